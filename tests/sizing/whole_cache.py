"""Replays a trace through the project's own tiers, and counts what was found and moved."""

import math
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tieredkv.cache.catalog import Catalog
from tieredkv.cache.pool import Block, BlockPool
from tieredkv.cache.prefix import BlockClaim, Prefix
from tieredkv.cache.restores import Progress as Wanted
from tieredkv.cache.stretches import stretches
from tieredkv.cache.tiered import TieredCache
from tieredkv.cache.tiers import Tiers
from tieredkv.errors import IntegrityError
from tieredkv.retention import RetentionPolicies, RetentionPolicy
from tieredkv.sizing.disk_index import DiskIndex, Kept
from tieredkv.sizing.tiers import START, SimulatedClock, SimulatedDisk, SimulatedLink
from tieredkv.sizing.trace import Request, Trace
from tieredkv.types import BlockHash, Progress, Tier

UNLIMITED = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much each tier holds, in bytes; infinite for no limit."""

    device: float
    host: float
    disk: float
    block_bytes: int

    def blocks(self, tier: Tier) -> float:
        size = getattr(self, tier)
        return size if size == UNLIMITED else size // self.block_bytes


HALF_MS = 0.0005


class Replay:
    def __init__(self, trace: Trace, sizes: Sizes, retention_s: float, idle_s: float) -> None:
        self.trace = trace
        num_distinct, longest = trace.num_distinct, trace.most_blocks
        num = {tier: sizes.blocks(tier) for tier in Tier}
        pools, self._ballast = {}, {}
        for tier in (Tier.DEVICE, Tier.HOST):
            count = int(min(num[tier], num_distinct + longest))
            pools[tier] = BlockPool(max(count, longest, 4))
            self._ballast[tier] = pools[tier].num_blocks - count
        used = frozenset(
            {Tier.DEVICE, *(t for t in (Tier.HOST, Tier.DISK) if num[t] or num[Tier.DISK])}
        )
        policy = RetentionPolicy(
            name="replayed",
            idle_s=min(idle_s, retention_s) + HALF_MS,
            absolute_s=retention_s + HALF_MS,
            tiers=used,
        )
        self.clock = SimulatedClock()
        self.link = SimulatedLink(sizes.block_bytes)
        self.disk = None
        self.ages = {tier: array("d") for tier in Tier}
        if num[Tier.DISK]:
            self.index = DiskIndex(num[Tier.DISK], self._on_disk_evict)
            self.disk = SimulatedDisk(self.index, self.clock)
        self.tiers = Tiers(
            device=pools[Tier.DEVICE],
            host=pools[Tier.HOST],
            catalog=Catalog(RetentionPolicies([policy])),
            store=self.disk,
            device_link=self.link,
            clock=self.clock,
            block_bytes=sizes.block_bytes,
            block_size=trace.block_tokens,
            restore="load",
            device_reserve_blocks=32,
        )
        self.cache = TieredCache(self.tiers)
        self.claims = frozenset(["replayed"])
        self.found = Counter()
        self.cached = 0
        self._hash = {}

    def _on_disk_evict(self, kept: Kept) -> None:
        self.ages[Tier.DISK].append(self.clock.moment - kept.record.computed_at)

    def run(self):
        for request in self.trace.requests:
            self.serve(request)

    def serve(self, request):
        self.clock.moment = max(self.clock.moment, START + request.timestamp / 1e3)
        cache, tiers = self.cache, self.tiers
        if self.disk is not None:
            self.index.sweep(self.clock.moment)
        while True:
            cache.expire_due()
            if not tiers.catalog.is_behind:
                break
        hashes = [i.to_bytes(16, "little") for i in request.hash_ids]
        n = len(hashes)
        prefix = Prefix(b"root", b"namespace", hashes, [BlockClaim(n, self.claims)])
        cache.arrive(prefix)
        cache.poll()
        for tries in range(1000):
            if cache.admit(prefix, n, is_alone=True):
                break
            cache.poll()
            cache.pump()
        else:
            raise IntegrityError("not admitted")
        size = self.trace.block_tokens
        if prefix.awaited:
            self._fill(prefix, n)
        sources = prefix.origins()
        last = request.input_length - size * (n - 1) if n else 0
        for tier, count in Counter(sources).items():
            self.found[tier] += size * count
        if n:
            self.found[sources[-1]] -= size - last
        cache.touches.begin(prefix)
        cache.release(prefix)
        cache.poll()
        cache.pump()
        while cache.has_more or not cache.is_idle:
            cache.poll()
            cache.pump()

    def _fill(self, prefix, n):
        cache, size = self.cache, self.trace.block_tokens
        for _ in range(1000):
            if cache.is_restoring:
                cache.plan([Wanted(prefix, 0, n * size)])
            self._compute(prefix)
            if all(prefix.blocks[i].is_ready for i in prefix.awaited):
                return
            cache.poll()
            cache.pump()
        raise IntegrityError("not filled")

    def _compute(self, prefix):
        blocks, stop = prefix.blocks, self.cache.stop
        for first, last in stretches(sorted(prefix.awaited)):
            while first < last:
                if blocks[first].is_ready or blocks[first].is_loading:
                    first += 1
                    continue
                end = stop(prefix, first, last)
                if end == first:
                    first += 1
                    continue
                self.cache.complete(prefix, first, end)
                first = end
