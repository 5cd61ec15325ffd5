"""What the decode and prefill kernels share: a tile of paged KV, the online softmax, the merge.

Scores are kept in base 2: the scale carries log2(e), so that exp2 serves. Callers go through
`tieredkv.kernels.launch`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (a kernel's arguments have no Python types)

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
MERGE_TILE = 16


class Tiling(NamedTuple):
    """How one program works: rows, positions a step, warps, software pipeline stages."""

    row_tile: int
    kv_tile: int
    num_warps: int
    num_stages: int


class Partials(NamedTuple):
    """Scratch for the splits' results; a split without keys has lse -inf and no output.

    Attributes:
        out: [num_queries, num_heads, num_splits, head_dim] float32.
        lse: [num_queries, num_heads, num_splits] float32, base 2.
    """

    out: Tensor
    lse: Tensor


@triton.jit
def attend(
    q,
    k_ptr,
    v_ptr,
    block_table_ptr,
    first,
    whole_end,
    end,
    row_position,
    scale_log2,
    stride_block,
    stride_token,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
):
    """Attend q's rows to the positions [first, end) of one request and KV head, tile by tile.

    All rows see all of the tiles below `whole_end`. Each position's block id is looked up by
    itself, so a tile may span blocks. Masks: dims past HEAD_DIM; from `whole_end` on also loads
    past the end and scores after the row's own position, which covers the former. Bytes moved:
    2 * KV_TILE * HEAD_DIM elements a tile. k_ptr and v_ptr point at the KV head.
    """
    row_max = tl.full([q.shape[0]], float("-inf"), tl.float32)
    row_sum = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], DIM_TILE], tl.float32)
    dim = tl.arange(0, DIM_TILE)
    for IS_MASKED in tl.static_range(2):
        start = whole_end if IS_MASKED else first
        stop = end if IS_MASKED else whole_end
        for tile_start in tl.range(start, stop, KV_TILE, num_stages=1 if IS_MASKED else None):
            position = tile_start + tl.arange(0, KV_TILE)
            mask = (dim < HEAD_DIM)[None, :]
            if IS_MASKED:
                is_loaded = position < end
                mask = mask & is_loaded[:, None]
                block_id = tl.load(block_table_ptr + position // BLOCK_SIZE, is_loaded, other=0)
            else:
                block_id = tl.load(block_table_ptr + position // BLOCK_SIZE)
            block_offset = block_id.to(tl.int64) * stride_block
            token_offset = block_offset + (position % BLOCK_SIZE) * stride_token
            offset = token_offset[:, None] + dim[None, :]
            k = tl.load(k_ptr + offset, mask=mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            if IS_MASKED:
                is_seen = position[None, :] <= row_position[:, None]
                scores = tl.where(is_seen, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            # A row that has seen nothing yet keeps -inf; 0 in its place makes exp2 give 0, not NaN.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max) if IS_MASKED else new_max
            weights = tl.exp2(scores - shift[:, None])
            decay = tl.exp2(row_max - shift)
            v = tl.load(v_ptr + offset, mask=mask, other=0.0)
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
            row_sum = row_sum * decay + tl.sum(weights, 1)
            row_max = new_max
    return row_max, row_sum, acc


@triton.jit
def store_rows(
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
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Write finished rows: to the output if nothing is split, else to the split's partials.

    A row that saw nothing is 0, or a partial with lse -inf whose output is not read.
    """
    dim = tl.arange(0, DIM_TILE)
    mask = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    out = acc / divisor[:, None]
    if IS_SPLIT:
        index = (query.to(tl.int64) * NUM_HEADS + head) * num_splits + split
        lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(divisor))
        tl.store(partial_lse_ptr + index, lse, is_row)
        mask = mask & (row_sum > 0.0)[:, None]
        tl.store(partial_out_ptr + index[:, None] * HEAD_DIM + dim[None, :], out, mask)
    else:
        offset = query.to(tl.int64) * out_stride_query + head * out_stride_head
        tl.store(out_ptr + offset[:, None] + dim[None, :], out.to(out_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits_kernel(
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    num_splits,
    out_stride_query,
    out_stride_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
):
    """Combine the splits of one query head by their log-sum-exp.

    Grid: (num_queries, num_heads). Masks: splits without keys, dims past HEAD_DIM. Bytes moved:
    4 * (HEAD_DIM + 1) read a split that has keys, HEAD_DIM elements written.
    """
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, DIM_TILE)
    first = (query * NUM_HEADS + head) * num_splits
    row_max = float("-inf")
    row_sum = 0.0
    acc = tl.zeros([DIM_TILE], tl.float32)
    for start in range(0, num_splits, SPLIT_TILE):
        split = start + tl.arange(0, SPLIT_TILE)
        lse = tl.load(partial_lse_ptr + first + split, split < num_splits, other=float("-inf"))
        mask = (lse > float("-inf"))[:, None] & (dim < HEAD_DIM)[None, :]
        offset = (first + split)[:, None] * HEAD_DIM + dim[None, :]
        part = tl.load(partial_out_ptr + offset, mask, other=0.0)
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(lse - shift)
        decay = tl.exp2(row_max - shift)
        acc = acc * decay + tl.sum(weights[:, None] * part, 0)
        row_sum = row_sum * decay + tl.sum(weights, 0)
        row_max = new_max
    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)
    target = out_ptr + query * out_stride_query + head * out_stride_head + dim
    tl.store(target, out.to(out_ptr.dtype.element_ty), dim < HEAD_DIM)


def merge_splits(out: Tensor, partials: Partials) -> None:
    """Write the merged partial results of all queries to out [num_queries, num_heads, head_dim]."""
    num_queries, num_heads, head_dim = out.shape
    _merge_splits_kernel[(num_queries, num_heads)](
        out,
        *partials,
        partials.lse.shape[2],
        *out.stride()[:2],
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        DIM_TILE=triton.next_power_of_2(head_dim),
        SPLIT_TILE=MERGE_TILE,
        num_warps=4,
    )


def make_partials(out: Tensor, num_splits: int) -> Partials:
    """Allocate the splits' results of every query and head; nothing is written if none is split."""
    if num_splits == 1:
        return Partials(out, out)
    num_queries, num_heads, head_dim = out.shape
    rows = (num_queries, num_heads, num_splits)
    return Partials(
        torch.empty(*rows, head_dim, dtype=torch.float32, device=out.device),
        torch.empty(rows, dtype=torch.float32, device=out.device),
    )
