"""Stretches of blocks: pairs `[first, last)` of indices."""

from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Stretch = tuple[int, int]
Ints = NDArray[np.int64]


class Stretches(Sequence[Stretch]):
    """Stretches that ascend and do not touch, kept as arrays.

    Attributes:
        firsts: the first index of each.
        lasts: the index behind each.
    """

    __slots__ = ("firsts", "lasts")

    def __init__(self, firsts: Ints, lasts: Ints) -> None:
        self.firsts, self.lasts = firsts, lasts

    @classmethod
    def of(cls, pairs: Sequence[Stretch]) -> Self:
        """Return pairs that ascend and do not touch as stretches."""
        firsts, lasts = [first for first, _ in pairs], [last for _, last in pairs]
        return cls(np.array(firsts, dtype=np.int64), np.array(lasts, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.firsts)

    def __iter__(self) -> Iterator[Stretch]:
        return zip(self.firsts.tolist(), self.lasts.tolist(), strict=True)

    def __getitem__(self, at: Any) -> Any:
        return [*self][at]


def stretches(indices: Sequence[int]) -> Stretches:
    """Return ascending indices as stretches."""
    return joined(loose(indices))


def loose(indices: Sequence[int]) -> Stretches:
    """Return ascending indices as stretches that touch where they please, for `joined`."""
    if indices and indices[-1] - indices[0] < len(indices):
        return Stretches(np.array([indices[0]]), np.array([indices[-1] + 1]))
    found = np.fromiter(indices, np.int64, len(indices))
    return Stretches(found, found + 1)


def joined(*some: Stretches) -> Stretches:
    """Return all stretches, each row of which ascends, as ascending ones that do not touch."""
    firsts = np.concatenate([each.firsts for each in some])
    lasts = np.concatenate([each.lasts for each in some])
    if not len(firsts):
        return Stretches(firsts, lasts)
    order = firsts.argsort(kind="stable")
    firsts, lasts = firsts[order], np.maximum.accumulate(lasts[order])
    edges = np.flatnonzero(np.concatenate([[True], firsts[1:] > lasts[:-1], [True]]))
    return Stretches(firsts[edges[:-1]], lasts[edges[1:] - 1])
