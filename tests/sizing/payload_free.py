"""The project's tiers without bytes: the same pools, catalog, links and index decisions.

A copy between VRAM and host memory moves nothing and has ended when it is next asked for. The disk
is an index in memory (`disk_index`); a write takes as long as it would at the given rate, and
everything else no time at all. So replaying is as fast as deciding is.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from tieredkv.cache.catalog import Catalog
from tieredkv.cache.device_link import DeviceLink
from tieredkv.cache.pool import BlockPool
from tieredkv.cache.tiers import Tiers
from tieredkv.clock import Clock
from tieredkv.kernels.copies import BlockCopier
from tieredkv.retention import RetentionPolicies, RetentionPolicy
from tieredkv.sizing.disk_index import DiskIndex
from tieredkv.storage.client import Event, StoreClient
from tieredkv.storage.results import NO_STATS, StoreStats, TouchItem
from tieredkv.storage.worker_messages import LentPage, LookupDone, PageLoaded, PageStored
from tieredkv.types import BlockId, PageId

START = 1e6
"""The time of the first request, in seconds; times have to be positive."""


class SimulatedClock(Clock):
    """A clock that shows what the replay sets.

    Attributes:
        moment: the time in seconds, of both the wall clock and the monotonic one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moment = START

    def now(self) -> float:
        return self.moment


class _NoCopies:
    """A copier of blocks that have no bytes."""

    device = torch.device("cpu")  # where a copy has ended when the call returns

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes

    def copy_in(self, *_: object) -> None:
        pass

    copy_out = copy_in


class SimulatedLink(DeviceLink[Any]):
    """Copies between VRAM and host memory, which are counted.

    Attributes:
        num_up, num_down: blocks copied to VRAM and to host memory.
    """

    def __init__(self, block_bytes: int) -> None:
        super().__init__(cast(BlockCopier, _NoCopies(block_bytes)))
        self.num_up = self.num_down = 0

    def most_promotions(self, now: float) -> int:
        return 1 << 30

    def promote(self, pairs: Sequence[tuple[PageId, BlockId]], tag: Any, *, after: int = 0) -> None:
        self.num_up += len(pairs)
        super().promote(pairs, tag, after=0)

    def demote(self, pairs: Sequence[tuple[BlockId, PageId]], tag: Any, *, after: int = 0) -> None:
        self.num_down += len(pairs)
        super().demote(pairs, tag, after=0)


class SimulatedDisk(StoreClient):
    """The disk tier: an index without bytes.

    Attributes:
        index: what it holds.
        num_read, num_written: blocks that were read and written.
    """

    def __init__(self, index: DiskIndex, clock: SimulatedClock) -> None:
        self.index, self._clock = index, clock
        self._events: list[Event] = []
        self._num_jobs = 0
        self.num_read = self.num_written = 0
        self.shares = {}

    def lookup(self, hashes: Sequence[bytes]) -> int:
        self._num_jobs += 1
        found = self.index.find(hashes, self._clock.moment)
        self._events.append(LookupDone(self._num_jobs, found))
        return self._num_jobs

    def load(self, pages: Sequence[LentPage]) -> None:
        now = self._clock.moment
        for page in pages:
            block_hash, page_id = page.record.block_hash, page.page_id
            record = self.index.get(block_hash, now)
            self.num_read += record is not None
            reason = "" if record is not None else "missing"
            self._events.append(PageLoaded(block_hash, page_id, reason, record))

    def store(self, pages: Sequence[LentPage]) -> None:
        now = self._clock.moment
        for page in pages:
            reason, is_new = self.index.store(page.record, now)
            self.num_written += is_new
            self._events.append(PageStored(page.record.block_hash, page.page_id, reason))

    def touch(self, items: Sequence[TouchItem]) -> None:
        self.index.touch(items, self._clock.moment)

    def delete(self, hashes: Sequence[bytes], reason: str) -> None:
        self.index.delete(hashes)

    def poll(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def stats(self) -> StoreStats:
        return NO_STATS

    @property
    def trouble(self) -> str:
        return ""

    @property
    def pid(self) -> int | None:
        return None

    def close(self, timeout_s: float = 30.0) -> None:
        pass
