"""What an operator asks of a running engine, carried out in VRAM and host memory.

The server sends these requests, or the store's worker passes them on: see `storage.verbs` for the
worker's part.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from tieredkv.cache.catalog import Entry
from tieredkv.cache.tiered import TieredCache
from tieredkv.engine.tier_stats import TierStats
from tieredkv.hashing import tenant_digest
from tieredkv.storage.results import EvictFilter
from tieredkv.types import BlockHash, HashAlgo

EVERYTHING = EvictFilter(all=True)


class Verbs:
    """Carries out an operator's requests; called by the engine's thread.

    Attributes:
        on_evict: called with each filter of blocks that the store's worker has passed on.
    """

    def __init__(self, cache: TieredCache, tier_stats: TierStats, hash_algo: HashAlgo) -> None:
        self._cache, self._tiers, self._tier_stats = cache, cache.tiers, tier_stats
        self._hash_algo = hash_algo
        self.on_evict: Callable[[EvictFilter], None] = lambda _: None

    def give_shares(self, shares: Mapping[str, float]) -> None:
        """Replace the tenants' shares of every tier."""
        algo = self._hash_algo
        self._tiers.give_shares({tenant_digest(t, algo=algo): it for t, it in shares.items()})

    def evict(
        self,
        wanted: EvictFilter = EVERYTHING,
        following: Collection[BlockHash] = (),
        before: Collection[BlockHash] = (),
    ) -> int:
        """Drop blocks from VRAM and host memory; return how many.

        Args:
            wanted: which blocks to drop; a dry run only counts them.
            following: further blocks that `wanted` names; see `Catalog.chains`.
            before: further blocks that precede the named ones.
        """
        now = self._tiers.clock.now()
        chains = self._tiers.catalog.chains(wanted.ids, following, before)

        def is_wanted(entry: Entry) -> bool:
            is_of_chains = not wanted.ids or entry.block_hash in chains
            return is_of_chains and wanted.matches(entry.namespace, entry.last_used, now)

        if wanted.dry_run:
            return sum(map(is_wanted, self._tiers.catalog.entries()))
        return self._cache.evict(is_wanted)

    def answer_evict(
        self,
        wanted: EvictFilter,
        following: Collection[BlockHash] = (),
        before: Collection[BlockHash] = (),
    ) -> dict[str, Any]:
        """Carry out `evict` for an operator; return the verb's answer."""
        unknown_ids = self._tiers.catalog.unknown_ids(wanted.ids)
        evicted = self.evict(wanted, following, before)
        freed_bytes = evicted * self._tiers.block_bytes
        sums = {"evicted_blocks": evicted, "freed_bytes": freed_bytes}
        return {**sums, "unknown_ids": unknown_ids, "disk": None}

    def answer_control(self) -> None:
        """Answer the requests that the store's worker has passed on."""
        while self._cache.control_requests:
            event = self._cache.control_requests.popleft()
            if event.call.verb == "df":
                answer = self._tier_stats.read()
            else:
                blocks = (map(BlockHash, each) for each in (event.following, event.before))
                answer = self.answer_evict(event.call.wanted, *map(set, blocks))
                self.on_evict(event.call.wanted)
                if event.call.wanted == EVERYTHING:
                    self._tiers.catalog.note_empty_disk()
            assert self._tiers.store is not None
            self._tiers.store.reply_control(event.id, answer)
