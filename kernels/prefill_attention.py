"""Triton attention of chunks of queries over paged keys and values, causal, ragged batches.

Callers go through `tieredkv.kernels.launch`, which checks the tensors; this module does not.
Reference: `tieredkv.kernels.reference.paged_prefill_attention`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (a kernel's arguments have no Python types)

import torch
import triton
import triton.language as tl
from torch import Tensor

from tieredkv.kernels import attention_tiles, splits
from tieredkv.kernels.attention_tiles import Tiling, attend, store_rows


def choose_tiling(num_rows: int, head_dim: int, dtype: torch.dtype) -> Tiling:
    """Fit q, the pipelined tiles and the accumulator into an SM's 227 KiB and 64k registers.

    Args:
        num_rows: queries of the longest chunk times the heads of a group.
        head_dim: of the model; tiles are padded to a power of two.
        dtype: of the cache.
    """
    if dtype == torch.float32:  # no tensor cores at full precision: tiles live in registers
        return Tiling(32 if num_rows > 16 else 16, 16, 8, 1)
    if num_rows <= 16:
        return Tiling(16, 64 if head_dim <= 128 else 32, 4, 3)
    if num_rows <= 64:
        return Tiling(64, 64, 4, 3) if head_dim <= 128 else Tiling(64, 32, 8, 3)
    if head_dim <= 64:
        return Tiling(128, 128, 8, 3)
    return Tiling(128, 64, 8, 3) if head_dim <= 128 else Tiling(128, 32, 8, 2)


@triton.jit(do_not_specialize=["num_splits", "block_tables_stride", "num_tiles"])
def _prefill_kernel(
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    query_start_lens_ptr,
    context_lens_ptr,
    scale_log2,
    num_tiles,
    num_splits,
    out_stride_query,
    out_stride_head,
    q_stride_query,
    q_stride_head,
    cache_stride_block,
    cache_stride_token,
    cache_stride_head,
    block_tables_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Attend a tile of rows to one split of what the tile's last row sees.

    A row is one query of one head: row r of a KV head's group is query r // GROUP and head
    r % GROUP, so that a tile of keys and values serves the whole group.
    Grid: (num_tiles * num_splits, num_kv_heads, num_requests); the last rows, which see most, start
    first. Programs past a request's rows return; a split past the context is an empty partial.
    Masks: rows past the chunk, dims past HEAD_DIM; causal only in tiles that reach beyond the first
    row's position. Bytes moved: keys and values up to the
    last row's position once for each tile of rows, q once, out once (and in float32, a split).
    """
    tile = num_tiles - 1 - tl.program_id(0) // num_splits
    split = tl.program_id(0) % num_splits
    kv_head = tl.program_id(1)
    request = tl.program_id(2)
    query_start = tl.load(query_start_lens_ptr + request)
    query_len = tl.load(query_start_lens_ptr + request + 1) - query_start
    if tile * ROW_TILE >= query_len * GROUP:
        return
    context_len = tl.load(context_lens_ptr + request)
    prefix_len = context_len - query_len

    row = tile * ROW_TILE + tl.arange(0, ROW_TILE)
    dim = tl.arange(0, DIM_TILE)
    is_row = row < query_len * GROUP
    query = query_start + row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_position = prefix_len + row // GROUP
    q_offset = query.to(tl.int64) * q_stride_query + head * q_stride_head
    q_mask = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_offset[:, None] + dim[None, :], mask=q_mask, other=0.0)

    first_row_position = prefix_len + tile * ROW_TILE // GROUP
    last_row = tl.minimum(tile * ROW_TILE + ROW_TILE, query_len * GROUP) - 1
    seen_len = prefix_len + last_row // GROUP + 1
    split_len = tl.maximum(tl.cdiv(seen_len, num_splits), MIN_SPLIT)
    split_len = tl.cdiv(split_len, KV_TILE) * KV_TILE
    first = split * split_len
    end = tl.minimum(first + split_len, seen_len)
    # Every row sees the whole of the tiles below `diagonal`; splits start on tile bounds.
    diagonal = tl.minimum(end, first_row_position + 1) // KV_TILE * KV_TILE
    diagonal = tl.maximum(first, diagonal)

    row_max, row_sum, acc = attend(
        q,
        k_cache_ptr + kv_head * cache_stride_head,
        v_cache_ptr + kv_head * cache_stride_head,
        block_tables_ptr + request.to(tl.int64) * block_tables_stride,
        first,
        diagonal,
        end,
        row_position,
        scale_log2,
        cache_stride_block,
        cache_stride_token,
        BLOCK_SIZE,
        HEAD_DIM,
        DIM_TILE,
        KV_TILE,
    )
    store_rows(
        out_ptr,
        partial_out_ptr,
        partial_lse_ptr,
        row_max,
        row_sum,
        acc,
        query,
        head,
        is_row,
        split,
        num_splits,
        out_stride_query,
        out_stride_head,
        NUM_HEADS,
        HEAD_DIM,
        DIM_TILE,
        IS_SPLIT,
    )


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start_lens: Tensor,
    context_lens: Tensor,
    scale: float,
    max_query_len: int,
    max_context_len: int,
    out: Tensor,
) -> None:
    """Launch the kernel, and the merge if there are splits; as `launch.…`, into `out`."""
    num_requests = block_tables.shape[0]
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    tiling = choose_tiling(max_query_len * group, head_dim, q.dtype)
    num_tiles = triton.cdiv(max_query_len * group, tiling.row_tile)
    num_splits = splits.num_splits(
        num_tiles * num_kv_heads * num_requests,
        max_context_len,
        splits.num_multiprocessors(q.device),
    )
    partials = attention_tiles.make_partials(out, num_splits)
    _prefill_kernel[(num_tiles * num_splits, num_kv_heads, num_requests)](
        out,
        *partials,
        q,
        k_cache,
        v_cache,
        block_tables,
        query_start_lens,
        context_lens,
        scale * attention_tiles.LOG2_E,
        num_tiles,
        num_splits,
        *out.stride()[:2],
        *q.stride()[:2],
        *k_cache.stride()[:3],
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        NUM_HEADS=num_heads,
        GROUP=group,
        ROW_TILE=tiling.row_tile,
        HEAD_DIM=head_dim,
        DIM_TILE=max(16, triton.next_power_of_2(head_dim)),
        KV_TILE=tiling.kv_tile,
        MIN_SPLIT=splits.MIN_SPLIT_TOKENS,
        IS_SPLIT=num_splits > 1,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if num_splits > 1:
        attention_tiles.merge_splits(out, partials)
