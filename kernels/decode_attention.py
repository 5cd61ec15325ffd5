"""Triton attention of one query per request over paged keys and values, split over the context.

Callers go through `tieredkv.kernels.launch`, which checks the tensors; this module does not.
Reference: `tieredkv.kernels.reference.paged_decode_attention`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (a kernel's arguments have no Python types)

import torch
import triton
import triton.language as tl
from torch import Tensor

from tieredkv.kernels import attention_tiles, splits
from tieredkv.kernels.attention_tiles import Tiling, attend, store_rows

MIN_ROWS = 16
"""Rows that a tensor core instruction takes at least; smaller groups are padded."""


def choose_tiling(group: int, head_dim: int, dtype: torch.dtype) -> Tiling:
    """Keep about 100 KiB of keys and values in flight per multiprocessor, which hides latency."""
    rows = max(MIN_ROWS, triton.next_power_of_2(group))
    if dtype == torch.float32:  # no tensor cores at full precision: tiles live in registers
        return Tiling(rows, 16, 4 if head_dim <= 128 else 8, 1)
    if head_dim <= 64:
        return Tiling(rows, 128, 4, 3)
    return Tiling(rows, 64 if head_dim <= 128 else 32, 4, 3)


@triton.jit(do_not_specialize=["num_splits", "block_tables_stride"])
def _decode_kernel(
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    scale_log2,
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
    GROUP_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Attend the query heads of one KV head to one split of one request's context.

    Grid: (num_kv_heads, num_splits, num_requests). The context is cut into equal splits of whole
    KV tiles, none shorter than MIN_SPLIT; programs past its end write an empty partial. Masks:
    rows past GROUP, dims past HEAD_DIM, positions past the context in its last tile. Bytes moved:
    keys and values of the split once for the whole group; each program reads GROUP * HEAD_DIM
    elements of q and writes as many, in float32 if the context is split.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2)
    context_len = tl.load(context_lens_ptr + request)
    split_len = tl.maximum(tl.cdiv(context_len, num_splits), MIN_SPLIT)
    split_len = tl.cdiv(split_len, KV_TILE) * KV_TILE
    first = split * split_len
    end = tl.minimum(first + split_len, context_len)

    row = tl.arange(0, GROUP_TILE)
    dim = tl.arange(0, DIM_TILE)
    head = kv_head * GROUP + row
    is_row = row < GROUP
    q_offset = request.to(tl.int64) * q_stride_query + head * q_stride_head
    q_mask = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_offset[:, None] + dim[None, :], mask=q_mask, other=0.0)

    row_position = tl.zeros([GROUP_TILE], tl.int32) + context_len - 1
    whole_end = tl.maximum(first, end // KV_TILE * KV_TILE)
    row_max, row_sum, acc = attend(
        q,
        k_cache_ptr + kv_head * cache_stride_head,
        v_cache_ptr + kv_head * cache_stride_head,
        block_tables_ptr + request.to(tl.int64) * block_tables_stride,
        first,
        whole_end,
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
        request + tl.zeros([GROUP_TILE], tl.int32),
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


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    max_context_len: int,
    out: Tensor,
) -> None:
    """Launch the split kernel, and the merge if there are splits; as `launch.…`, into `out`."""
    num_requests, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    num_splits = splits.num_splits(
        num_requests * num_kv_heads,
        max_context_len,
        splits.num_multiprocessors(q.device),
        splits.MAX_DECODE_SPLIT_TOKENS,
    )
    tiling = choose_tiling(group, head_dim, q.dtype)
    partials = attention_tiles.make_partials(out, num_splits)
    _decode_kernel[(num_kv_heads, num_splits, num_requests)](
        out,
        *partials,
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        scale * attention_tiles.LOG2_E,
        num_splits,
        *out.stride()[:2],
        *q.stride()[:2],
        *k_cache.stride()[:3],
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        NUM_HEADS=num_heads,
        GROUP=group,
        GROUP_TILE=tiling.row_tile,
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
