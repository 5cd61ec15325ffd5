"""Work on many blocks, cut into pieces: between two of them other work goes on.

Such work is a generator that yields after each piece. Blocks come, go and are used meanwhile.
"""

from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import TypeVar

PIECE_BLOCKS = 64
"""Blocks that one piece moves, describes or looks up in the tiers."""

SCANNED_BLOCKS = 512
"""Blocks that one piece only looks at."""

Item = TypeVar("Item")
Result = TypeVar("Result")
Pieces = Generator[None, None, Result]
"""Yields after each piece of work; returns what the work has found."""


def cut(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield some items at a time."""
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some


def whole(pieces: Generator[object, None, Result]) -> Result:
    """Do all pieces at once; return what they have found."""
    while True:
        try:
            next(pieces)
        except StopIteration as ending:
            result: Result = ending.value
            return result
