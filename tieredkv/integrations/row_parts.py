"""Which bytes of a row of another engine's memory a chunk writes, by its group of layers.

A row has room for a chunk of any group. The other bytes of it are what the row held before, such
as keys and values of another tenant. This module knows bytes and groups; it does not know the
engine.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class Span(NamedTuple):
    """The bytes `[begin, end)` of a row."""

    begin: int
    end: int


Parts = Mapping[int, Sequence[Span] | None]
"""The bytes that chunks of each group write; None where they are not known."""

_specs: ContextVar[tuple[str, ...] | None] = ContextVar("_specs", default=None)


@contextmanager
def telling_parts(specs: tuple[str, ...]) -> Iterator[None]:
    """Have the tiers that are made meanwhile know that they will be told the parts of their rows.

    Args:
        specs: what the KV cache of each group is, in words that change whenever its bytes do.
    """
    token = _specs.set(specs)
    try:
        yield
    finally:
        _specs.reset(token)


def told_specs() -> tuple[str, ...] | None:
    """Return the specs of `telling_parts`, or None if nobody will tell parts."""
    return _specs.get()


def parts_of_rank(
    tensors: Sequence[int],
    groups: Mapping[int, Sequence[tuple[int, int]]],
    layers: Mapping[int, Sequence[int]],
    *,
    begin: int,
    blocks_per_chunk: int,
) -> dict[int, list[Span] | None]:
    """Return what one rank writes into a row for a chunk of each group.

    Its part of a row has the pages of all tensors, one tensor after another, and in each the
    blocks of the chunk. A group copies some bytes at the begin of a page, for each of its layers.

    Args:
        tensors: bytes of a page of each tensor.
        groups: for each copy of a group, the tensor's number and how many bytes are copied.
        layers: for each group, the bytes that each of its layers has in a block. Where other
            sizes are copied, the copies have bytes of other layers, and the parts are not known.
        begin: where the rank's part of the row begins.
        blocks_per_chunk: blocks of a chunk, all of which are written.
    """
    starts = [begin]
    for page_bytes in tensors:
        starts.append(starts[-1] + page_bytes * blocks_per_chunk)
    parts = dict[int, list[Span] | None]()
    for group, copies in groups.items():
        if sorted(size for _, size in copies) != sorted(layers[group]):
            parts[group] = None
            continue
        firsts = [
            (starts[tensor] + tensors[tensor] * block, size)
            for tensor, size in copies
            for block in range(blocks_per_chunk)
        ]
        parts[group] = [Span(first, first + size) for first, size in firsts]
    return parts


def gaps_in(row_bytes: int, spans: Iterable[Span]) -> list[Span]:
    """Return the bytes of a row that are in none of these spans, in order."""
    gaps, end = list[Span](), 0
    for span in sorted(spans):
        if span.begin > end:
            gaps.append(Span(end, span.begin))
        end = max(end, span.end)
    if end < row_bytes:
        gaps.append(Span(end, row_bytes))
    return gaps
