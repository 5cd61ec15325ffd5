"""Plan, on the host, how the programs of paged attention share the work of a batch.

Queries are cut into tiles. The keys that a tile sees are cut into units of one KV tile. With a
window, they begin at the first position that the tile's first query sees, in any place of a block.
All units of a batch form one row, and every program takes an equal range of it:
```
tiles     |---- tile 0 ----|- tile 1 -|-------------- tile 2 --------------|
programs  |    0     |    1     |    2     |    3     |    4     |
```
So a batch of any lengths keeps every multiprocessor busy to the end, and the grid is fixed, as CUDA
graphs need. A second kernel merges each tile that several programs share. A program has at most two
shared tiles, its first and its last, so partial results have fixed places as well.

Source: Stream-K, Osama et al. 2023, on the split of Flash-Decoding, Dao et al. 2023.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

INTS_PER_TILE = 8
INTS_PER_PROGRAM = 16
MAX_SUMS_PER_THREAD = 128
"""Most of a tile's float32 sums that a thread holds in its 255 registers."""

MAX_LATENT_ROWS = 64
"""Most rows of a tile of latent attention."""

MIN_UNITS = 2
"""Fewest units of a program; with fewer, merging would cost more than sharing saves."""


class Span(NamedTuple):
    """Tokens of one request in a step, as the host knows them.

    Attributes:
        row: the request's row of the block tables.
        first_token: index of its first query in the step.
        query_len: number of its queries, the last tokens of the context.
        context_len: tokens of the context, the queries' own included.
    """

    row: int
    first_token: int
    query_len: int
    context_len: int


class Batch(NamedTuple):
    """The requests of a step, their block tables, and the plans of the kernels.

    Attributes:
        block_tables: [num_rows, max_blocks] int32; entries past a row's context are not read.
        spans: all requests of the step, as the reference reads them. A captured CUDA graph reads
            only the partitions.
        dense: spans that the dense path attends.
        narrow: partition of the single queries; None if there are none.
        wide: partition of the chunks without the other spans; None if there are none. Both serve
            the layers of one window only, or those without one.
        products: spans of latent attention that `latent_products` attends.
    """

    block_tables: Tensor
    spans: Sequence[Span]
    dense: Sequence[Span] = ()
    narrow: Tensor | None = None
    wide: Tensor | None = None
    products: Sequence[Span] = ()


class Tiling(NamedTuple):
    """How one program works, and how many run at once.

    Attributes:
        num_queries: queries of a tile; a row of a tile is one query of one head of the group.
        row_tile: rows of a tile, padded to a power of two.
        kv_tile: positions of a unit.
        num_programs: programs for each KV head and split.
        num_splits: parts of the output's dims, each with programs of its own; of latent attention
            the groups of heads.
    """

    num_queries: int
    row_tile: int
    kv_tile: int
    num_warps: int
    num_stages: int
    num_programs: int
    num_splits: int = 1


class Latent(NamedTuple):
    """Dims of latent attention (MLA), in which all heads of a token share one stored vector.

    The vector is a latent, from which a matrix makes a key and a value of each head, and a rotated
    part, which is the rest of the key of every head. Two ways of computing give the same result.
    *Expanded*, keys and values are made of the latents of the context. *Absorbed*, the matrix is
    applied to queries and results instead, and heads attend to the latents themselves.

    Attributes:
        rank: elements of a latent, which are the values of absorbed attention.
        rope_dim: elements of the rotated part.
        key_dim: elements of a head's key that are made of a latent.
        value_dim: elements of a head's value.
    """

    rank: int
    rope_dim: int
    key_dim: int
    value_dim: int

    @property
    def query_dim(self) -> int:
        """Elements of a head's query, and of its key."""
        return self.key_dim + self.rope_dim

    @property
    def num_stored(self) -> int:
        """Elements that are stored for a token."""
        return self.rank + self.rope_dim

    def pair_products(self, *, is_expanded: bool) -> int:
        """Multiplications of a head for a query and a token that it attends to."""
        if is_expanded:
            return self.query_dim + self.value_dim
        return self.num_stored + self.rank

    def should_expand(self, num_queries: int) -> bool:
        """Return whether a chunk of so many queries takes fewer operations if expanded.

        A pair of a query and a token takes fewer of them, but first a key and a value are made for
        each token, however many queries there are. So to expand pays from 399 queries on for
        GLM-4.7-Flash, from 171 for DeepSeek-V2 and from 154 for Mistral Small 4.
        """
        expanded, absorbed = (self.pair_products(is_expanded=way) for way in (True, False))
        made = self.rank * (self.key_dim + self.value_dim)
        return made + num_queries * expanded < num_queries * absorbed


class Heads(NamedTuple):
    """Attention heads of a model, their dtype and device.

    Attributes:
        latent: of latent attention, where one KV head has the `num_stored` elements of a token.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    latent: Latent | None = None

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads


@functools.cache
def narrow_tiling(heads: Heads) -> Tiling:
    """Return the tiling for single queries: 128 KiB of keys and values per SM, half in flight.

    Contexts are often powers of two, so the number of programs is a multiple of 8 if it can be.
    """
    if heads.latent is not None:
        return _latent_tiling(heads, is_narrow=True)
    row_tile = max(16, 1 << (heads.group - 1).bit_length())
    programs = max(1, 2 * num_multiprocessors(heads.device) // heads.num_kv_heads)
    programs = programs & ~7 or programs
    if heads.dtype == torch.float32:  # no tensor cores in float32: tiles live in registers
        return Tiling(1, row_tile, 16, 4 if heads.head_dim <= 128 else 8, 1, programs)
    num_warps = 4 if row_tile * heads.head_dim <= MAX_SUMS_PER_THREAD * 128 else 8
    return Tiling(1, row_tile, _kv_tile(heads), num_warps, 5, programs)


@functools.cache
def wide_tiling(heads: Heads) -> Tiling:
    """Return the tiling for chunks: it fills an SM's 227 KiB of shared memory and its registers.

    The sums of 128 rows and 256 dims fill half of the registers, so larger heads are split. In
    shared memory, in 16 bits, a head of 512 takes 128 KiB for the queries, 32 KiB for the keys of
    32 positions and 16 KiB for half of their values, both twice: 224 KiB.
    """
    if heads.latent is not None:
        return _latent_tiling(heads, is_narrow=False)
    is_exact = heads.dtype == torch.float32
    row_tile = max(32 if is_exact else 128, 1 << (heads.group - 1).bit_length())
    num_queries = row_tile // heads.group
    num_splits = 1 if is_exact or heads.head_dim <= 256 else 2
    programs = max(1, num_multiprocessors(heads.device) // (heads.num_kv_heads * num_splits))
    if is_exact:
        return Tiling(num_queries, row_tile, 16, 8, 1, programs)
    kv_tile, num_stages = max(32, _kv_tile(heads)), 5 if heads.head_dim <= 128 else 3
    return Tiling(num_queries, row_tile, kv_tile, 8, num_stages, programs, num_splits)


def _latent_tiling(heads: Heads, *, is_narrow: bool) -> Tiling:
    """Return the tiling for absorbed queries; the programs of a split attend one group of heads.

    A tile of 32 positions of 576 elements takes 36 KiB in 16 bits. With up to 32 rows, a program
    has two such tiles and its queries in 110 KiB, and an SM has two programs. With 64 rows, whose
    sums fill the registers of 8 warps, it has one program with two tiles of 64 positions and its
    queries in 216 KiB.
    """
    group, is_exact = _latent_group(heads), heads.dtype == torch.float32
    num_queries = 1 if is_narrow or is_exact else MAX_LATENT_ROWS // group
    row_tile = max(16, 1 << (num_queries * group - 1).bit_length())
    num_groups, is_small = heads.num_heads // group, row_tile <= MAX_LATENT_ROWS // 2
    per_multiprocessor = 2 if is_small and not is_exact else 1
    programs = per_multiprocessor * num_multiprocessors(heads.device) // num_groups
    programs = max(1, programs & ~7 or programs)
    if is_exact:
        return Tiling(num_queries, row_tile, 16, 8, 1, programs, num_groups)
    if is_small:
        return Tiling(num_queries, row_tile, 32, 4, 5, programs, num_groups)
    return Tiling(num_queries, row_tile, 64, 8, 2, programs, num_groups)


def _latent_group(heads: Heads) -> int:
    """Return how many heads are together in a tile: all of them, or else an equal part."""
    most = range(min(heads.num_heads, MAX_LATENT_ROWS), 0, -1)
    return next(group for group in most if heads.num_heads % group == 0)


def _kv_tile(heads: Heads) -> int:
    """Return the positions whose keys take 16 KiB in 16 bits, and so do their values."""
    return max(16, min(128, 8192 >> (heads.head_dim - 1).bit_length()))


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device; 8 for Triton's interpreter."""
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def size_ints(tiling: Tiling, max_tiles: int) -> int:
    """Return the number of integers of a partition of at most `max_tiles` tiles."""
    return tiling.num_programs * INTS_PER_PROGRAM + max_tiles * INTS_PER_TILE


def count_tiles(tiling: Tiling, spans: Sequence[Span]) -> int:
    """Count the tiles of a batch."""
    return sum(-(-span.query_len // tiling.num_queries) for span in spans)


def partition(
    spans: Sequence[Span], tiling: Tiling, out: NDArray[np.int32], window: int | None = None
) -> None:
    """Divide the units of a batch among the programs, and write the plan to `out`.

    Layout of `out`, int32; a program finds its first tile with one read:
    ```
    a program   its first unit and the one after its last, its first tile, the last program that
                shares its last tile (-1 if none does), first query and number of
                queries of that tile, 2 unused, then its first tile
    a tile      row of the block tables, first query, number of queries, position of the first, its
                first unit and the one after its last, position of its first key if there is a
                window, 1 unused
    ```

    Args:
        spans: the requests; those without queries are ignored.
        tiling: tiling of the kernel.
        out: [size_ints] for at least the batch's tiles; only what the kernel reads is written.
        window: a query sees this many positions, its own and those before it; None for all.
            Positions that no query sees are in no unit.
    """
    rows, first_tokens, query_lens, context_lens = np.array(spans, dtype=np.int32).reshape(-1, 4).T
    tiles_a_span = -(-query_lens // tiling.num_queries)
    span = np.repeat(np.arange(len(rows)), tiles_a_span)
    before = np.cumsum(tiles_a_span) - tiles_a_span
    first_query = (np.arange(len(span)) - before[span]) * tiling.num_queries
    num_queries = np.minimum(tiling.num_queries, query_lens[span] - first_query)
    position = context_lens[span] - query_lens[span] + first_query
    num_keys = position + num_queries
    if window is not None:
        first_key = np.maximum(position - window + 1, 0)
        num_keys -= first_key
    stops = np.cumsum(-(-num_keys // tiling.kv_tile))
    starts = np.concatenate([[0], stops[:-1]])
    total = int(stops[-1]) if len(stops) else 0
    share = max(MIN_UNITS, -(-total // tiling.num_programs))

    num_programs = tiling.num_programs
    programs = out[: num_programs * INTS_PER_PROGRAM].reshape(num_programs, INTS_PER_PROGRAM)
    tiles = out[num_programs * INTS_PER_PROGRAM :].reshape(-1, INTS_PER_TILE)[: len(span)]
    assert len(tiles) == len(span), f"{len(span)} tiles, room for {len(tiles)}"
    tiles[:, 0], tiles[:, 1] = rows[span], first_tokens[span] + first_query
    tiles[:, 2], tiles[:, 3], tiles[:, 4], tiles[:, 5] = num_queries, position, starts, stops
    if window is not None:
        tiles[:, 6] = first_key

    first_units = np.minimum(np.arange(num_programs) * share, total)
    programs[:, 0], programs[:, 1] = first_units, np.minimum(first_units + share, total)
    programs[:, 2] = np.searchsorted(stops, first_units, side="right")
    programs[:, 3] = -1
    first_program, last_program = starts // share, (stops - 1) // share
    shared = np.flatnonzero(first_program < last_program)
    programs[first_program[shared], 3] = last_program[shared]
    programs[first_program[shared], 4:6] = tiles[shared, 1:3]
    busy = first_units < total
    programs[busy, INTS_PER_TILE:] = tiles[programs[busy, 2]]
