"""The whole `TieredCache` over links without bytes: what a replay is compared with.

Requests come one at a time, and moves have ended when they are next asked for. The disk is the
simulated one of a replay.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch

from tests.fakes import FakeClock
from tieredkv.cache.catalog import Catalog
from tieredkv.cache.chain import BlockClaim, Chain
from tieredkv.cache.device_link import DeviceLink
from tieredkv.cache.pool import BlockPool
from tieredkv.cache.recalls import RequestProgress
from tieredkv.cache.requests import TieredCache
from tieredkv.cache.settings import CacheSettings
from tieredkv.cache.stretches import stretches
from tieredkv.cache.tiers import Tiers
from tieredkv.kernels.copies import BlockCopier
from tieredkv.retention import RetentionPolicies
from tieredkv.sizing.disk import SimulatedDisk
from tieredkv.sizing.tiers import Capacity, Source
from tieredkv.types import BlockHash

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

    @property
    def most_promotions(self) -> int:
        return 1 << 30


class WholeCache:
    """Serves requests as `SimulatedTiers` does, with everything that a server has."""

    def __init__(self, capacity: Capacity, policies: RetentionPolicies, *, enough: int) -> None:
        self.clock = FakeClock(START)
        self.disk = SimulatedDisk(capacity.disk, self.clock) if capacity.disk else None
        self.tiers = Tiers(
            device=BlockPool(int(min(capacity.device, enough))),
            host=BlockPool(int(min(capacity.host, enough))),
            catalog=Catalog(policies),
            store=self.disk,
            device_link=_Link(),
            clock=self.clock,
            vram_bytes=1,
            payload_bytes=1,
            settings=CacheSettings(restore="load", device_reserve_blocks=capacity.reserve),
        )
        # At the assumed rate, so many blocks may wait to be written.
        rate = self.tiers.disk_link.write_rate.steady
        self.tiers.settings.drain_timeout_s = 2 * (capacity.most_owed + 0.5) / rate
        self.cache = TieredCache(self.tiers)

    def serve(self, ids: Sequence[int], now: float, names: frozenset[str]) -> list[Source]:
        """Serve a request; return where each block was."""
        self.clock.moment = START + now
        cache, tiers = self.cache, self.tiers
        cache._expiry.sweep()
        while tiers.catalog.is_behind:
            cache._expiry.sweep()
        hashes = [BlockHash(each.to_bytes(32, "little")) for each in ids]
        claims = [BlockClaim(len(hashes), names)]
        prefix = Chain(BlockHash(bytes(32)), bytes(32), hashes, claims)
        cache.arrive(prefix)
        cache.poll()
        for _ in range(MANY_STEPS):
            if cache.admit(prefix, len(hashes), is_alone=True):
                break
            self._step()
        for _ in range(MANY_STEPS):
            if cache.is_recalling:
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

    def _compute(self, prefix: Chain) -> None:
        """Compute what is not left to the links."""
        blocks = prefix.blocks
        for first, last in stretches(prefix.row.awaited):
            while first < last:
                end = first
                if not (blocks[first].is_ready or blocks[first].is_copying):
                    end = self.cache.first_loaded(prefix, first, last)
                if end > first:
                    self.cache.complete(prefix, first, end)
                first = max(end, first + 1)
