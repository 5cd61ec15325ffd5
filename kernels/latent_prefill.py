"""Prefill of latent attention for long chunks: keys and values are made of latents, piece by piece.

The chunk and the context before it are cut into squares and pieces as `prefill_dense` says. Keys
and values of a piece are made once, attended to by all squares behind it, and dropped, so their
memory does not grow with the context. cuDNN attends with the dims of a head's own keys and values,
and the results are merged by log-sum-exp. This module knows no batches.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tieredkv.kernels import prefill_dense
from tieredkv.kernels.checks import LayerCache, triton_module
from tieredkv.kernels.partition import Heads, Latent
from tieredkv.kernels.prefill_dense import Partial


class _Square(NamedTuple):
    """Queries of a chunk that attend together, and the parts of their result that are not merged.

    Attributes:
        first, end: positions of the queries.
        parts: over disjoint parts of the context.
    """

    first: int
    end: int
    parts: list[Partial]


def attend_chunk(
    q: Tensor,
    cache: Tensor,
    matrix: Tensor,
    block_table: Tensor,
    context_len: int,
    scale: float,
    out: Tensor,
    heads: Heads,
) -> None:
    """Attend a chunk's queries, the last tokens of the context, causally to the whole context.

    Args:
        q: [num_queries, num_heads, query_dim], contiguous; `prefill_dense.count_queries` gives
            their number.
        cache: [num_blocks, block_size, rank + rope_dim], of the layer.
        matrix: [num_heads * (key_dim + value_dim), rank].
        block_table: [max_blocks].
        context_len: tokens of the context with these queries, a multiple of the dense path's STEP.
        scale: factor on the scores.
        out: the result, [num_queries, num_heads, value_dim], contiguous.
        heads: of the layer, with `latent`.

    Raises:
        RefusedError: cuDNN does not support these shapes on this machine.
    """
    step, prefix_len, latent = prefill_dense.STEP, context_len - len(q), heads.latent
    assert latent is not None, "heads without latent attention"
    begin = prefix_len // step * step
    rows = F.pad(q, (0, 0, 0, 0, prefix_len - begin, 0)) if begin < prefix_len else q
    cut, most = prefill_dense.cut, prefill_dense.max_made_steps(heads)
    squares = [_Square(*ends, []) for ends in cut(begin, context_len, max_steps=most)]
    pieces = [*cut(0, begin, max_steps=most), *((it.first, it.end) for it in squares)]
    for start, end in pieces:
        k, v = expand(cache, matrix, block_table, start, end, latent)
        for square in squares:
            if square.first < start:
                continue
            queries = rows[square.first - begin : square.end - begin]
            is_own = square.first == start
            part = prefill_dense.attend_cudnn(queries, k, v, scale, is_own)
            square.parts.append(part)
            if len(square.parts) > triton_module("dense_kernels").MAX_PARTS - 1:
                square.parts[:] = [_merged(square.parts)]
    for first, end, parts in squares:
        merged = parts[0] if len(parts) == 1 else _merged(parts)
        idle = max(0, prefix_len - first)
        out[first + idle - prefix_len : end - prefix_len] = merged.out[idle:]


def _merged(parts: list[Partial]) -> Partial:
    merged = torch.empty_like(parts[0].out)
    lse = triton_module("dense_kernels").merge_parts(parts, merged)
    return Partial(merged, lse)


def expand(
    cache: Tensor, matrix: Tensor, block_table: Tensor, start: int, end: int, latent: Latent
) -> tuple[Tensor, Tensor]:
    """Make keys and values of all heads for the positions [start, end) of a context.

    Bytes moved: the latents are read twice and written once, keys and values are written, and the
    part of the keys that is made of latents is read and written once more.
    """
    stored = gather(cache, block_table, start, end)
    latents, rotated = stored.split([latent.rank, latent.rope_dim], dim=1)
    made = F.linear(latents, matrix).unflatten(1, (-1, latent.key_dim + latent.value_dim))
    plain, v = made.split([latent.key_dim, latent.value_dim], dim=2)
    return torch.cat([plain, rotated[:, None].expand(-1, plain.shape[1], -1)], dim=2), v


def gather(cache: Tensor, block_table: Tensor, start: int, end: int) -> Tensor:
    """Copy what is stored for the positions [start, end) of a context.

    Bytes moved: those of the blocks with these positions are read and written once.

    Args:
        cache: [num_blocks, block_size, rank + rope_dim], with contiguous blocks.
        block_table: [max_blocks].
        start: first position.
        end: position after the last one.

    Returns:
        [end - start, rank + rope_dim], contiguous.
    """
    block_size = cache.shape[1]
    first_block, end_block = start // block_size, -(-end // block_size)
    gathered = cache.new_empty(1, end_block - first_block, *cache.shape[1:])
    blocks = block_table[first_block:end_block]
    triton_module("dense_kernels").gather_blocks(LayerCache(cache, cache), blocks, gathered)
    return gathered.flatten(0, 2)[start - first_block * block_size : end - first_block * block_size]
