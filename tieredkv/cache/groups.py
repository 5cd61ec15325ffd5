"""What a hit needs of each group of a model's layers, and so where a hit may end.

Layers whose keys and values a hit needs alike form a group. A layer that attends to all tokens
needs those of every block before the end of the hit. A layer with a sliding window needs those of
the last blocks only.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of a model whose keys and values a hit needs alike.

    Attributes:
        tail_blocks: how many of the last blocks before the end of a hit it needs; None for all.
    """

    tail_blocks: int | None = None

    def needs(self, hit_end: int) -> range:
        """Return the blocks that a hit needs which ends behind so many blocks of a chain."""
        return range(0 if self.tail_blocks is None else max(0, hit_end - self.tail_blocks), hit_end)


PREFIX = KVGroup()
"""Layers that attend to all tokens."""


def hit_end(
    groups: Sequence[KVGroup], missing: Sequence[Sequence[int]], ends: Iterable[int]
) -> int:
    """Return the largest of some ends at which a hit lacks nothing; 0 if there is none.

    Args:
        groups: of the model.
        missing: for each group the blocks that no tier has, ascending.
        ends: numbers of blocks at which a hit may end.
    """

    def is_met(end: int) -> bool:
        return all(
            bisect_left(lacking, needed.start) == bisect_left(lacking, needed.stop)
            for lacking, needed in zip(missing, (it.needs(end) for it in groups), strict=True)
        )

    return next(filter(is_met, sorted(ends, reverse=True)), 0)
