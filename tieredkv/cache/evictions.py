"""Drops the blocks that an operator evicts from VRAM and host memory.

Called by the engine's thread only.
"""

from collections.abc import Callable, Collection

from tieredkv.cache.catalog import Entry
from tieredkv.cache.demotion import Demoter
from tieredkv.cache.disk_link import Read
from tieredkv.cache.promotion import Promoter
from tieredkv.cache.tiers import Tiers
from tieredkv.pieces import Pieces
from tieredkv.types import Tier

IsWanted = Callable[[Entry | Read], bool]
"""Returns whether a block is to be evicted."""


class Evictions:
    """Evicts in pieces.

    Args:
        tiers: the tiers.
        promoter: reads blocks from disk.
        demoter: is told when there is more room.
    """

    def __init__(self, tiers: Tiers, promoter: Promoter, demoter: Demoter) -> None:
        self._tiers, self._promoter, self._demoter = tiers, promoter, demoter

    def evict(self, is_wanted: IsWanted, only: Collection[Tier] | None = None) -> Pieces[int]:
        """Make copies unreachable in VRAM and host memory; return how many.

        Without `only`, a wanted block that is being read from disk does not become ready, and one
        that is being written to disk is deleted there after the write. A block that is computed
        meanwhile may be spared.

        Args:
            is_wanted: which blocks to evict.
            only: tiers whose copies are evicted; None for both.
        """
        num_copies = 0
        for entries in self._tiers.catalog.sweep():
            for entry in filter(is_wanted, entries):
                num_copies += self._drop(entry, only)
            self._demoter.note_change()
            yield
        if only is None:
            self._promoter.evict(is_wanted)
        return num_copies

    def count(self, is_wanted: IsWanted, only: Collection[Tier] | None = None) -> Pieces[int]:
        """Count the copies that `evict` would drop."""
        num_copies, pools = 0, [self._tiers.pools[it] for it in only or self._tiers.pools]
        for entries in self._tiers.catalog.sweep():
            for entry in filter(is_wanted, entries):
                num_copies += sum(pool.lookup(entry.block_hash) is not None for pool in pools)
            yield
        return num_copies

    def _drop(self, entry: Entry, only: Collection[Tier] | None) -> int:
        if only is None:
            return self._tiers.drop(entry.block_hash, "admin")
        return sum(self._tiers.drop_copy(tier, entry.block_hash, "admin") for tier in only)
