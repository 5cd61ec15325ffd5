"""What the kernels of recurrent states read of the rows of a step, as the host writes it.

A plan is one array of numbers. Its size depends on counts only, so that a captured step can have
room for any rows. This module knows counts and places of tokens: no states, no Triton.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tieredkv.kernels.state_layout import ChunkRows, StateRows, StateSpan
from tieredkv.types import MAX_KEPT_WITHIN

MAX_STEP_TOKENS = 64
"""Rows of more tokens are computed in chunks, and not one by one; of a row that keeps states, only
what comes before the first one is. The way depends on the row alone, so that its result does. On an
H200, chunks are the faster way for 128 tokens, and as fast for 64."""

CHUNK = 64
"""Tokens of a chunk; cuts of a row at multiples of it change no bit."""

CONV_TILE = 16
"""Tokens of a tile of the convolution in rows with more than one; at least the inputs that a state
keeps."""

MAX_CAPTURED_CHUNK_ROWS = 8
"""Rows in chunks that a captured step has room for: all that there can be in a step of 512 tokens.
Each costs a little where there are fewer."""

_NO_TILE = 1 << 20
"""A tile behind the end of any row."""

NUM_FIELDS = 4 + 2 * (MAX_KEPT_WITHIN + 1)
"""Of a row; see `row_fields`."""

_CHUNK_FIELDS = 3


def num_in_chunks(span: StateSpan) -> int:
    """Return how many of a row's tokens, from the first one on, are computed in chunks."""
    first_end = span.kept[0][0] if span.kept else span.num_tokens
    return first_end if first_end > MAX_STEP_TOKENS else 0


def row_fields(span: StateSpan) -> list[int]:
    """Return what kernels read of a row.

    Returns:
        The index of its first token; how many tokens are computed in chunks; the row of the tables
        whose state the others go on from; how many of the pairs are of no use. Then these pairs, of
        a number of tokens and the row of the tables where the state behind them is written. Those
        of no use come first, and that of the whole row last. A row of zeros is one without tokens.
    """
    row, first_token, num_tokens, kept = span
    in_chunks = num_in_chunks(span)
    source = kept[0][1] if kept and in_chunks else row
    num_unused = MAX_KEPT_WITHIN - len(kept)
    pairs = [number for pair in kept for number in pair]
    return [
        first_token,
        in_chunks,
        source,
        num_unused,
        *[0, 0] * num_unused,
        *pairs,
        num_tokens,
        row,
    ]


class PlanSize(NamedTuple):
    """How much a plan has room for.

    Attributes:
        num_rows: any rows.
        num_tiles: tiles of the convolution; 0 if no row has more than one token.
        num_chunk_rows: rows that are computed in chunks.
        num_chunks: of these rows; 0 for a step without them.
    """

    num_rows: int
    num_tiles: int = 0
    num_chunk_rows: int = 0
    num_chunks: int = 0

    @classmethod
    def of_step(cls, spans: Sequence[StateSpan]) -> "PlanSize":
        """Return the size for these rows, without any padding."""
        counts = [span.num_tokens for span in spans]
        if max(counts, default=0) <= 1:
            return cls(len(spans))
        num_tiles = sum(-(-count // CONV_TILE) for count in counts)
        chunks = [-(-count // CHUNK) for count in map(num_in_chunks, spans) if count]
        return cls(len(spans), num_tiles, len(chunks), sum(chunks))

    @classmethod
    def of_any(cls, num_tokens: int, max_rows: int) -> "PlanSize":
        """Return the size for any rows of so many tokens in all, with few in chunks."""
        num_rows = min(num_tokens, max_rows)
        if num_tokens <= MAX_STEP_TOKENS:
            return cls(num_rows, num_tokens // CONV_TILE + num_rows)
        most_long = num_tokens // (MAX_STEP_TOKENS + 1)
        num_long = min(MAX_CAPTURED_CHUNK_ROWS, num_rows, most_long)
        num_chunks = num_tokens // CHUNK + num_long
        # A row without tokens stands behind the others; unused chunks are its.
        return cls(num_rows, num_tokens // CONV_TILE + num_rows, num_long + 1, num_chunks)

    @classmethod
    def largest(cls, max_tokens: int, max_rows: int) -> "PlanSize":
        """Return a size with room for each step of at most so many tokens and rows."""
        num_long = min(max_rows, max_tokens // (MAX_STEP_TOKENS + 1)) + 1
        num_chunks = max_tokens // CHUNK + num_long + MAX_CAPTURED_CHUNK_ROWS
        return cls(max_rows, max_tokens // CONV_TILE + max_rows, num_long + 1, num_chunks)

    @property
    def num_ints(self) -> int:
        """Length of the plan."""
        num_ints: int = self.parts()[-1].stop
        return num_ints

    def parts(self) -> list[slice]:
        """Return where rows, tiles, and rows, bounds, offsets and chunks in chunks stand.

        Each begins at a multiple of 16 bytes: kernels are compiled for what their pointers divide.
        """
        rows, tiles, chunk_rows, chunks = self
        in_chunks = _CHUNK_FIELDS * chunk_rows, 2 * chunk_rows, 2 * chunk_rows, 2 * chunks
        end, parts = 0, list[slice]()
        for length in (NUM_FIELDS * rows, 2 * tiles, *in_chunks):
            first = -(-end // 4) * 4
            end = first + length
            parts.append(slice(first, end))
        return parts

    def has_room(self, spans: Sequence[StateSpan]) -> bool:
        """Return whether there is room for all of these rows that are computed in chunks."""
        num_long = sum(num_in_chunks(span) > 0 for span in spans)
        return num_long < self.num_chunk_rows or not num_long


def fill(plan: NDArray[np.int32], spans: Sequence[StateSpan], size: PlanSize) -> None:
    """Write the plan of some rows.

    Args:
        plan: [at least num_ints] int32.
        spans: the rows, no more than the size has room for.
        size: of the plan.
    """
    rows, tiles, chunk_rows, bounds, offsets, chunks = (plan[part] for part in size.parts())
    rows[: NUM_FIELDS * len(spans)] = [field for span in spans for field in row_fields(span)]
    rows[NUM_FIELDS * len(spans) :] = 0
    if size.num_tiles:
        pairs = [
            (row, tile)
            for row, span in enumerate(spans)
            for tile in range(-(-span.num_tokens // CONV_TILE))
        ]
        _fill_pairs(tiles, pairs, (0, _NO_TILE))
    if not size.num_chunk_rows:
        return
    long = [(span, count) for span in spans if (count := num_in_chunks(span))]
    long.sort(key=lambda found: -found[0].first_token)
    chunk_rows[:], bounds[:], offsets[:] = 0, 0, 0
    pairs = []
    for index, (span, count) in enumerate(long):
        target = span.kept[0][1] if span.kept else span.row
        fields = slice(_CHUNK_FIELDS * index, _CHUNK_FIELDS * (index + 1))
        chunk_rows[fields] = span.row, target, count
        bounds[2 * index : 2 * index + 2] = span.first_token, span.first_token + count
        offsets[2 * index] = len(pairs)
        pairs += [(2 * index, chunk) for chunk in range(-(-count // CHUNK))]
    _fill_pairs(chunks, pairs, (2 * (size.num_chunk_rows - 1), 0))


def _fill_pairs(
    target: NDArray[np.int32], pairs: list[tuple[int, int]], padding: tuple[int, int]
) -> None:
    flat = np.array(pairs, dtype=np.int32).reshape(-1)
    target[: len(flat)] = flat
    target[len(flat) :].reshape(-1, 2)[:] = padding


def view(plan: Tensor, size: PlanSize, spans: Sequence[StateSpan]) -> StateRows:
    """Return the parts of a plan.

    Args:
        plan: [at least num_ints] int32 on the device.
        size: of the plan.
        spans: the rows, or none where a captured step serves any rows.
    """
    rows, tiles, chunk_rows, bounds, offsets, chunks = (plan[part] for part in size.parts())
    rows, tiles = rows.view(-1, NUM_FIELDS), tiles.view(-1, 2)
    in_chunks = None
    if size.num_chunk_rows:
        in_chunks = ChunkRows(
            chunk_rows.view(-1, _CHUNK_FIELDS), bounds, offsets, chunks.view(-1, 2)
        )
    return StateRows(spans, rows, tiles if size.num_tiles else None, in_chunks)


def make_rows(
    spans: Sequence[StateSpan], device: torch.device | str, size: PlanSize | None = None
) -> StateRows:
    """Upload the rows of a step to a new tensor; a captured step reuses a buffer instead.

    Args:
        spans: rows of the step.
        device: of the pool.
        size: of the plan; None for a plan without padding.
    """
    size = PlanSize.of_step(spans) if size is None else size
    plan = np.zeros(size.num_ints, dtype=np.int32)
    fill(plan, spans, size)
    return view(torch.from_numpy(plan).to(device), size, spans)
