"""Drops the blocks that an operator evicts from VRAM and host memory.

Called by the engine's thread only.
"""

from collections import Counter
from collections.abc import Callable, Collection

from tieredkv.cache.catalog import Entry
from tieredkv.cache.demotion import Demoter
from tieredkv.cache.disk_link import Read
from tieredkv.cache.promotion import Promoter
from tieredkv.cache.tiers import Tiers
from tieredkv.pieces import Pieces
from tieredkv.types import Tier

Copies = Counter[Tier]
"""How many copies each tier has."""

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

    def evict(self, is_wanted: IsWanted, only: Collection[Tier] | None = None) -> Pieces[Copies]:
        """Make copies unreachable in VRAM and host memory; return how many by tier.

        Without `only`, a wanted block that is being read from disk does not become ready, and one
        that is being written to disk is deleted there after the write. A block that is computed
        meanwhile may be spared.

        Args:
            is_wanted: which blocks to evict.
            only: tiers whose copies are evicted; None for both.
        """
        num_copies = Copies()
        for entries in self._tiers.catalog.sweep():
            for entry in filter(is_wanted, entries):
                num_copies.update(self._drop(entry, only))
            self._demoter.note_change()
            yield
        if only is None:
            self._promoter.evict(is_wanted)
        return num_copies

    def count(self, is_wanted: IsWanted, only: Collection[Tier] | None = None) -> Pieces[Copies]:
        """Count the copies that `evict` would drop."""
        num_copies, pools = Copies(), self._tiers.pools
        for entries in self._tiers.catalog.sweep():
            for entry in filter(is_wanted, entries):
                for tier in pools if only is None else only:
                    num_copies[tier] += pools[tier].lookup(entry.block_hash) is not None
            yield
        return num_copies

    def _drop(self, entry: Entry, only: Collection[Tier] | None) -> list[Tier]:
        """Drop a block, or its copies in some tiers; return which tiers had it."""
        if only is None:
            return self._tiers.drop(entry.block_hash, "admin")
        return [it for it in only if self._tiers.drop_copy(it, entry.block_hash, "admin")]
