"""Where a hit may end.

A layer that attends to all tokens needs the keys and values of every block before the end of the
hit. A layer with a sliding window needs those of the last blocks only.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence


def last_end(ends: Sequence[int], most: int) -> int:
    """Return the largest of some ends, ascending, that is at most `most`; 0 if there is none."""
    index = bisect_right(ends, most)
    return ends[index - 1] if index else 0


def hit_end(
    num_found: int,
    num_needed: int,
    ends: Sequence[int],
    missing: Callable[[Sequence[int]], Sequence[int]],
) -> int:
    """Return the largest of some ends at which layers with windows lack nothing.

    One block of each window is asked for first, and the others where that one is there.

    Args:
        num_found: how many blocks at the head are there for the layers without a window.
        num_needed: of how many of the last blocks before its end a hit needs the others.
        ends: numbers of blocks at which a hit may end, ascending.
        missing: returns those of some blocks, ascending, of which layers with windows lack
            something.

    Returns:
        0 if there is no such end.
    """
    most = num_found
    lacking = {*missing(range(most % num_needed, most, num_needed))}
    while end := last_end(ends, most):
        needed = range(max(0, end - num_needed), end)
        found = sorted(lacking.intersection(needed)) or missing(needed)
        if not found:
            return end
        most = found[0]
    return 0
