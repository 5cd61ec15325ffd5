"""Triton kernels of the dense prefill path: gathering a context, merging partial results.

Callers go through `tieredkv.kernels.prefill_dense`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (a kernel's arguments have no Python types)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tieredkv.kernels.checks import LayerCache

TILE = 16384
MERGED_ROWS = 16
MAX_PARTS = 4


@triton.jit(do_not_specialize_on_alignment=["table_ptr"])
def _gather_kernel(
    k_cache_ptr, v_cache_ptr, table_ptr, out_ptr, cache_stride_block, half_elements,
    NUM_ELEMENTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy one tile of one block's keys and values; v_cache_ptr is None where keys are all.

    Grid: (num_blocks, ceil(block elements / TILE)). Masks: the end of the block. Bytes moved: TILE
    elements of keys, and of values, read and written per program.
    """
    block = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = element < NUM_ELEMENTS
    source = tl.load(table_ptr + block).to(tl.int64) * cache_stride_block + element
    target = out_ptr + block * NUM_ELEMENTS + element
    k = tl.load(k_cache_ptr + source, mask)
    if v_cache_ptr is not None:
        v = tl.load(v_cache_ptr + source, mask)
        tl.store(target + half_elements, v, mask)
    tl.store(target, k, mask)


def gather_blocks(cache: LayerCache, table: Tensor, out: Tensor) -> None:
    """Copy the blocks of a table, each contiguous, to out.

    Args:
        cache: of the layer; keys and values may be one tensor, which is copied once.
        table: [num_blocks].
        out: [2, num_blocks, *block shape], or [1, num_blocks, *block shape].
    """
    num_blocks, num_elements = table.shape[0], cache.k[0].numel()
    tile = min(TILE, triton.next_power_of_2(num_elements))
    v_cache = cache.v if len(out) == 2 else None
    _gather_kernel[(num_blocks, triton.cdiv(num_elements, tile))](
        cache.k, v_cache, table, out, cache.k.stride(0), num_blocks * num_elements,
        NUM_ELEMENTS=num_elements, TILE=tile, num_warps=8,
    )  # fmt: skip


@triton.jit
def _add_sink(total, acc, row_max, sink):
    """Add one more score, which has no value, to the running sums."""
    new_max = tl.maximum(row_max, sink)
    decay = tl.exp(row_max - new_max)
    return total * decay + tl.exp(sink - new_max), acc * decay[:, None], new_max


@triton.jit
def _add_part(total, acc, row_max, out_ptr, lse_ptr, offset, lse_offset, mask, is_row):
    """Add one part to the running sums, with log-sum-exp in base e."""
    lse = tl.load(lse_ptr + lse_offset, is_row, other=float("-inf"))
    part = tl.load(out_ptr + offset, mask, other=0.0).to(tl.float32)
    new_max = tl.maximum(row_max, lse)
    decay = tl.exp(row_max - new_max)
    weight = tl.exp(lse - new_max)
    return total * decay + weight, acc * decay[:, None] + weight[:, None] * part, new_max


_LSE_STRIDES = [f"lse_stride_{part}" for part in range(MAX_PARTS)]


@triton.jit(
    do_not_specialize=[*_LSE_STRIDES, "num_rows", "num_queries"],
    do_not_specialize_on_alignment=[f"lse_{part}_ptr" for part in range(MAX_PARTS)],
)
def _merge_parts_kernel(
    out_ptr, merged_lse_ptr, out_0_ptr, out_1_ptr, out_2_ptr, out_3_ptr, lse_0_ptr, lse_1_ptr,
    lse_2_ptr, lse_3_ptr, sinks_ptr, lse_stride_0, lse_stride_1, lse_stride_2, lse_stride_3,
    num_rows, num_queries, NUM_PARTS: tl.constexpr, NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Combine the parts of ROWS rows; a row is one head of one query; out may alias part 0.

    sinks_ptr is None, or one score for each head, which is added as a part without a value. Grid:
    (ceil(num_queries * num_heads / ROWS),). Masks: rows past the end, dims past HEAD_DIM. Bytes
    moved per row: HEAD_DIM elements and a float, read for each part and written once.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_TILE)
    is_row = row < num_rows
    mask = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    query, head = row // NUM_HEADS, row % NUM_HEADS
    offset = row.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
    row_max = tl.load(lse_0_ptr + head * lse_stride_0 + query, is_row, other=0.0)
    acc = tl.load(out_0_ptr + offset, mask, other=0.0).to(tl.float32)
    total = tl.full([ROWS], 1.0, tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, is_row, other=0.0).to(tl.float32)
        total, acc, row_max = _add_sink(total, acc, row_max, sink)
    if NUM_PARTS > 1:
        at = head * lse_stride_1 + query
        total, acc, row_max = _add_part(
            total, acc, row_max, out_1_ptr, lse_1_ptr, offset, at, mask, is_row
        )
    if NUM_PARTS > 2:
        at = head * lse_stride_2 + query
        total, acc, row_max = _add_part(
            total, acc, row_max, out_2_ptr, lse_2_ptr, offset, at, mask, is_row
        )
    if NUM_PARTS > 3:
        at = head * lse_stride_3 + query
        total, acc, row_max = _add_part(
            total, acc, row_max, out_3_ptr, lse_3_ptr, offset, at, mask, is_row
        )
    tl.store(out_ptr + offset, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask)
    tl.store(merged_lse_ptr + head * num_queries + query, row_max + tl.log(total), is_row)


def merge_parts(
    parts: Sequence[tuple[Tensor, Tensor]], out: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """Combine partial results (out, lse) of attention into out, in float32.

    The parts cover disjoint parts of one context; the result is attention over all of them.
    Each tensor is contiguous, except that lse may have any stride between heads.

    Args:
        parts: two or more, or at least one with sinks.
        out: [num_queries, num_heads, head_dim].
        sinks: [num_heads], one more score for each head, without a value.

    Returns:
        [num_heads, num_queries] float32, the log-sum-exp over all parts.

    Source: the identity behind Flash-Decoding and cascade inference.
    """
    num_queries, num_heads, head_dim = out.shape
    first, others = parts[0], list(parts[1:])
    while others or sinks is not None:
        group = [first, *others[: MAX_PARTS - 1]]
        others = others[MAX_PARTS - 1 :]
        padded = group + [group[0]] * (MAX_PARTS - len(group))
        lse = torch.empty(num_heads, num_queries, dtype=torch.float32, device=out.device)
        _merge_parts_kernel[(triton.cdiv(num_queries * num_heads, MERGED_ROWS),)](
            out, lse, *(part[0] for part in padded), *(part[1] for part in padded), sinks,
            *(part[1].stride(0) for part in padded), num_queries * num_heads, num_queries,
            NUM_PARTS=len(group), NUM_HEADS=num_heads, HEAD_DIM=head_dim,
            DIM_TILE=max(16, triton.next_power_of_2(head_dim)), ROWS=MERGED_ROWS, num_warps=4,
        )  # fmt: skip
        first, sinks = (out, lse), None  # the merged part has the sinks
    return first[1]
