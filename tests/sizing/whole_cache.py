"""The whole `TieredCache` over links without bytes: what a replay is compared with.

Requests come one at a time, and moves have ended when they are next asked for. The disk is the
stand-in for the store's index.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import torch
from msgspec.structs import replace

from tests.fake_tier import FakeTier
from tests.fakes import FakeClock
from tieredkv.cache.catalog import Catalog
from tieredkv.cache.device_link import DeviceLink
from tieredkv.cache.pool import BlockPool
from tieredkv.cache.prefix import BlockClaim, Prefix
from tieredkv.cache.requests import TieredCache
from tieredkv.cache.restores import RequestProgress
from tieredkv.cache.stretches import stretches
from tieredkv.cache.tiers import Tiers
from tieredkv.kernels.copies import BlockCopier
from tieredkv.retention import RetentionPolicies
from tieredkv.sizing.disk_index import DiskIndex, Life
from tieredkv.sizing.tiers import Room, Source
from tieredkv.tier import BlockLife, Event, Lent, Loaded, LookupDone, Stored, TouchItem
from tieredkv.types import BlockHash, BlockRecord

START = 1e6
MANY_STEPS = 2000


class _NoCopies:
    """A copier of blocks that have no bytes."""

    device = torch.device("cpu")  # where a copy has ended when the call returns
    block_bytes = 1

    def copy_in(self, *_: object) -> None:
        pass

    copy_out = copy_in


class _Link(DeviceLink[Any]):
    def __init__(self) -> None:
        super().__init__(cast(BlockCopier, _NoCopies()))

    def most_promotions(self, now: float) -> int:
        return 1 << 30


class _Disk(FakeTier):
    """The disk tier: the stand-in for its index, and the records."""

    def __init__(self, index: DiskIndex, clock: FakeClock) -> None:
        super().__init__()
        self.index, self._clock = index, clock
        self._records = dict[BlockHash, BlockRecord]()
        self._events: deque[Event] = deque()
        self._num_jobs = 0

    def _record(self, block_hash: bytes) -> BlockRecord | None:
        life = self.index.get(BlockHash(block_hash), self._clock.moment)
        if life is None:
            return None
        record = self._records[life.block_hash]
        return replace(record, last_used=life.last_used, expires_at=life.expires_at)

    def lookup(self, hashes: Sequence[bytes]) -> int:
        self._num_jobs += 1
        found = dict[bytes, bytes]()
        for block_hash in hashes:
            if (record := self._record(block_hash)) is not None:
                found[block_hash] = self.found(record)
        self._events.append(LookupDone(self._num_jobs, found))
        return self._num_jobs

    def load(self, pages: Sequence[Lent]) -> None:
        for page in pages:
            record = self._record(page.block_hash)
            reason = "" if record is not None else "missing"
            life = None if record is None else BlockLife.of(record)
            self._events.append(Loaded(page.page_id, reason, life))

    def store(self, pages: Sequence[Lent]) -> None:
        for page in pages:
            record = page.record
            times = record.computed_at, record.last_used, record.expires_at
            life = Life(BlockHash(record.block_hash), record.position, *times)
            if self.index.store([life], self._clock.moment):
                self._records[life.block_hash] = record
            self._events.append(Stored(page.page_id))

    def touch(self, items: Sequence[TouchItem]) -> None:
        for item in items:
            life = self.index.get(BlockHash(item.block_hash), self._clock.moment)
            if life is not None:
                life.last_used = max(life.last_used, item.last_used)
                life.expires_at = max(life.expires_at, item.expires_at or 0.0)

    def poll(self) -> list[Event]:
        events = list(self._events)
        self._events.clear()
        return events


class WholeCache:
    """Serves requests as `tieredkv.sizing.tiers.Tiers` does, with everything that a server has."""

    def __init__(self, room: Room, policies: RetentionPolicies, *, enough: int) -> None:
        self.clock = FakeClock(START)
        self.disk = _Disk(DiskIndex(room.disk), self.clock) if room.disk else None
        self.tiers = Tiers(
            device=BlockPool(int(min(room.device, enough))),
            host=BlockPool(int(min(room.host, enough))),
            catalog=Catalog(policies),
            store=self.disk,
            device_link=_Link(),
            clock=self.clock,
            vram_bytes=1,
            payload_bytes=1,
            restore="load",
            device_reserve_blocks=room.reserve,
        )
        # At the assumed rate, so many blocks may wait to be written.
        rate = self.tiers.disk_link.write_rate.steady
        self.tiers.drain_timeout_s = 2 * (room.most_owed + 0.5) / rate
        self.cache = TieredCache(self.tiers)

    def serve(self, ids: Sequence[int], now: float, names: frozenset[str]) -> list[Source]:
        """Serve a request; return where each block was."""
        self.clock.moment = START + now
        cache, tiers = self.cache, self.tiers
        cache._expiry.sweep()
        while tiers.catalog.is_behind:
            cache._expiry.sweep()
        if self.disk is not None:
            self.disk.index.sweep(self.clock.moment)
        hashes = [BlockHash(each.to_bytes(32, "little")) for each in ids]
        claims = [BlockClaim(len(hashes), names)]
        prefix = Prefix(BlockHash(bytes(32)), bytes(32), hashes, claims)
        cache.arrive(prefix)
        cache.poll()
        for _ in range(MANY_STEPS):
            if cache.admit(prefix, len(hashes), is_alone=True):
                break
            self._step()
        for _ in range(MANY_STEPS):
            if cache.is_restoring:
                cache.plan([RequestProgress(prefix, 0, len(hashes))])
            self._compute(prefix)
            if all(prefix.blocks[each].is_ready for each in prefix.row.awaited):
                break
            self._step()
        sources: list[Source] = list(prefix.origins())
        cache.touch(prefix)
        cache.release(prefix)
        self._step()
        while cache.has_more or not cache.is_idle:
            self._step()
        return sources

    def _step(self) -> None:
        self.cache.poll()
        self.cache.pump()

    def _compute(self, prefix: Prefix) -> None:
        """Compute what is not left to the links."""
        blocks = prefix.blocks
        for first, last in stretches(prefix.row.awaited):
            while first < last:
                end = first
                if not (blocks[first].is_ready or blocks[first].is_copying):
                    end = self.cache.stop(prefix, first, last)
                if end > first:
                    self.cache.complete(prefix, first, end)
                first = max(end, first + 1)
