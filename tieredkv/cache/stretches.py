"""Stretches of blocks: pairs `[first, last)` of indices."""

from collections.abc import Iterable

Stretch = tuple[int, int]


def stretches(indices: Iterable[int]) -> list[Stretch]:
    """Return ascending indices as stretches."""
    found = list[Stretch]()
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = found[-1][0], index + 1
        else:
            found.append((index, index + 1))
    return found


def stretches_between(indices: Iterable[int], end: int) -> list[Stretch]:
    """Return the stretches of `range(end)` that ascending indices leave."""
    found, begin = list[Stretch](), 0
    for index in indices:
        if begin < index:
            found.append((begin, index))
        begin = index + 1
    return [*found, (begin, end)] if begin < end else found


def joined(some: Iterable[Stretch]) -> list[Stretch]:
    """Return stretches in any order as ascending ones that do not touch."""
    found = list[Stretch]()
    for first, last in sorted(some):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found
