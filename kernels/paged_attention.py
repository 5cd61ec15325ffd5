"""Triton kernels of causal attention over paged keys and values, for any mix of chunks.

One kernel serves single queries (decode) and chunks (prefill), with different tilings.
`tieredkv.kernels.partition` divides the work among programs. Scores are kept in base 2: the scale
contains log2(e), so that exp2 can be used. With a window, a query sees the last WINDOW positions
only, its own included. A sink is one more score of a head, without a value. Callers go through
`tieredkv.kernels.launch`, which checks the tensors; this module does not. On GPUs that support it
(Hopper and later), a kernel is launched while the previous one still runs, and waits before it
reads what that one writes.

Reference: `tieredkv.kernels.reference.paged_attention`. Source of windows: Longformer, Beltagy et
al. 2020, and Mistral 7B, Jiang et al. 2023; of sinks: StreamingLLM, Xiao et al. 2023, and gpt-oss,
OpenAI 2025.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (a kernel's arguments have no Python types)

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tieredkv.kernels.checks import LayerCache, has_dependent_launch
from tieredkv.kernels.partition import INTS_PER_PROGRAM, INTS_PER_TILE, Tiling

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _attend(
    q, k_ptr, v_ptr, block_table_ptr, first, whole_end, end, row_position, row_max, row_sum,
    value_dim, scale_log2, stride_block, stride_token, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr, KV_TILE: tl.constexpr, WINDOW: tl.constexpr,
    HAS_ONE_LOOP: tl.constexpr,
):  # fmt: skip
    """Attend q's rows to the positions [first, end) of one request and KV head, tile by tile.

    Every row sees all positions below `whole_end`, so those tiles need no mask. HAS_ONE_LOOP masks
    all tiles, so that all of them go through one pipelined loop. It is for short contexts, and for
    windows, where no tile may be seen whole. The block id of each position is looked up separately,
    so a tile may begin anywhere and span blocks. k_ptr and v_ptr point at the KV head; row_max and
    row_sum hold what each row has summed already; value_dim are the dims to sum up. Masks: dims
    past HEAD_DIM; in the masked loop also loads past the end, scores after the row's own position
    and scores before its window. Bytes moved: KV_TILE keys and the value dims of as many values per
    tile.
    """
    acc = tl.zeros([q.shape[0], value_dim.shape[0]], tl.float32)
    dim = tl.arange(0, DIM_TILE)
    for IS_MASKED in tl.static_range(1 if HAS_ONE_LOOP else 0, 2):
        start = whole_end if IS_MASKED and not HAS_ONE_LOOP else first
        stop = end if IS_MASKED else whole_end
        for tile_start in tl.range(
            start, stop, KV_TILE, num_stages=1 if IS_MASKED and not HAS_ONE_LOOP else None
        ):
            position = tile_start + tl.arange(0, KV_TILE)
            mask = (dim < HEAD_DIM)[None, :]
            value_mask = (value_dim < HEAD_DIM)[None, :]
            if IS_MASKED:
                is_loaded = position < end
                mask = mask & is_loaded[:, None]
                value_mask = value_mask & is_loaded[:, None]
                block_id = tl.load(block_table_ptr + position // BLOCK_SIZE, is_loaded, other=0)
            else:
                block_id = tl.load(block_table_ptr + position // BLOCK_SIZE)
            block_offset = block_id.to(tl.int64) * stride_block
            token_offset = block_offset + (position % BLOCK_SIZE) * stride_token
            offset = token_offset[:, None] + dim[None, :]
            k = tl.load(k_ptr + offset, mask=mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            if IS_MASKED:
                is_seen = (position[None, :] <= row_position[:, None]) & is_loaded[None, :]
                if WINDOW:
                    is_seen &= position[None, :] > row_position[:, None] - WINDOW
                scores = tl.where(is_seen, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            # A row without a visible position keeps -inf; a shift of 0 makes exp2 give 0, not NaN.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max) if IS_MASKED else new_max
            weights = tl.exp2(scores - shift[:, None])
            decay = tl.exp2(row_max - shift)
            value_offset = token_offset[:, None] + value_dim[None, :]
            v = tl.load(v_ptr + value_offset, mask=value_mask, other=0.0)
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
            row_sum = row_sum * decay + tl.sum(weights, 1)
            row_max = new_max
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=["block_tables_stride"])
def _attention_kernel(
    out_ptr, partial_out_ptr, partial_lse_ptr, q_ptr, k_cache_ptr, v_cache_ptr, block_tables_ptr,
    plan_ptr, sinks_ptr, scale_log2, out_stride_query, out_stride_head, q_stride_query,
    q_stride_head, cache_stride_block, cache_stride_token, cache_stride_head, block_tables_stride,
    INTS_PER_PROGRAM: tl.constexpr, INTS_PER_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr, ROW_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    KV_TILE: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, HAS_ONE_LOOP: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attend one program's range of units for one KV head, tile by tile.

    Row r of a tile is query r // GROUP and head r % GROUP, so that keys and values are read once
    for the whole group. Grid: (num_kv_heads * SPLITS, num_programs); programs past the work return
    at once. Each of SPLITS programs computes all scores and an equal part of the output's dims.
    Masks: rows past the tile's queries, dims past HEAD_DIM; positions as in `_attend`. WINDOW is 0
    and sinks_ptr None if there are none. Bytes moved: keys and values of the range, the keys SPLITS
    times; q once per tile and program; out once, or as float32 partials if a tile is shared.
    """
    if IS_DEPENDENT:  # the merge kernel may start now; it waits for the results
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0) // SPLITS
    program = tl.program_id(1)
    program_ptr = plan_ptr + program * INTS_PER_PROGRAM
    unit = tl.load(program_ptr)
    last = tl.load(program_ptr + 1)
    next_tile_ptr = plan_ptr + tl.num_programs(1) * INTS_PER_PROGRAM
    next_tile_ptr += (tl.load(program_ptr + 2) + 1) * INTS_PER_TILE
    tile_ptr = program_ptr + INTS_PER_TILE  # copy of the record of the program's first tile
    row = tl.arange(0, ROW_TILE)
    dim = tl.arange(0, DIM_TILE)
    value_dim = tl.program_id(0) % SPLITS * (DIM_TILE // SPLITS) + tl.arange(0, DIM_TILE // SPLITS)
    head = kv_head * GROUP + row % GROUP
    if IS_DEPENDENT:  # nothing above reads what the previous kernel writes
        tl.extra.cuda.gdc_wait()
    while unit < last:
        request = tl.load(tile_ptr)
        query_start = tl.load(tile_ptr + 1)
        num_queries = tl.load(tile_ptr + 2)
        position = tl.load(tile_ptr + 3)
        tile_start = tl.load(tile_ptr + 4)
        tile_stop = tl.load(tile_ptr + 5)
        stop = tl.minimum(last, tile_stop)

        is_row = row < num_queries * GROUP
        query = query_start + row // GROUP
        q_offset = query.to(tl.int64) * q_stride_query + head * q_stride_head
        mask = is_row[:, None] & (dim < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + q_offset[:, None] + dim[None, :], mask=mask, other=0.0)
        first = (unit - tile_start) * KV_TILE
        end = (stop - tile_start) * KV_TILE
        if WINDOW:  # the units begin at the first position that a query of the tile sees
            first_seen = tl.load(tile_ptr + 6)
            first += first_seen
            end += first_seen
        end = tl.minimum(end, position + num_queries)
        whole_end = tl.minimum(end, position + 1) // KV_TILE * KV_TILE
        row_max = tl.full([ROW_TILE], float("-inf"), tl.float32)
        row_sum = tl.zeros([ROW_TILE], tl.float32)
        if sinks_ptr is not None:
            # A tile's first unit counts the sink, so that it counts once however many programs
            # share the tile.
            sink = tl.load(sinks_ptr + head, is_row, other=0.0).to(tl.float32)
            row_max = tl.where(unit == tile_start, sink * LOG2_E, float("-inf"))
            row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
        row_max, row_sum, acc = _attend(
            q, k_cache_ptr + kv_head * cache_stride_head, v_cache_ptr + kv_head * cache_stride_head,
            block_tables_ptr + request.to(tl.int64) * block_tables_stride, first,
            tl.maximum(first, whole_end), end, position + row // GROUP, row_max, row_sum, value_dim,
            scale_log2, cache_stride_block, cache_stride_token, BLOCK_SIZE, HEAD_DIM, DIM_TILE,
            KV_TILE, WINDOW, HAS_ONE_LOOP,
        )  # fmt: skip
        # NOTE: a row without a visible position gives 0, or a partial with lse -inf and output 0.
        divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
        acc = acc / divisor[:, None]
        out_mask = is_row[:, None] & (value_dim < HEAD_DIM)[None, :]
        if (unit == tile_start) & (stop == tile_stop):
            out_offset = query.to(tl.int64) * out_stride_query + head * out_stride_head
            whole_ptr = out_ptr + out_offset[:, None] + value_dim[None, :]
            tl.store(whole_ptr, acc.to(out_ptr.dtype.element_ty), out_mask)
        else:
            part = 2 * program + (unit == tile_start).to(tl.int32)
            index = part * (tl.num_programs(0) // SPLITS) + kv_head
            index = index.to(tl.int64) * ROW_TILE + row
            lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(divisor))
            tl.store(partial_lse_ptr + index, lse, is_row)
            partial_ptr = partial_out_ptr + index[:, None] * HEAD_DIM + value_dim[None, :]
            tl.store(partial_ptr, acc, out_mask)
        unit = stop
        tile_ptr = next_tile_ptr
        next_tile_ptr += INTS_PER_TILE


@triton.jit
def _merge_kernel(
    out_ptr, partial_out_ptr, partial_lse_ptr, plan_ptr, out_stride_query, out_stride_head,
    INTS_PER_PROGRAM: tl.constexpr, INTS_PER_TILE: tl.constexpr, GROUP: tl.constexpr,
    ROW_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr, PARTIALS: tl.constexpr,
    ROWS: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of a shared tile by log-sum-exp, ROWS rows per program.

    Grid: (num_programs - 1, num_kv_heads, ceil(rows / ROWS)). Program p merges the tile that
    begins in the attention kernel's program p and continues in p + 1, if there is one. Masks:
    partials past the tile's last, rows past its queries, dims past HEAD_DIM. Bytes moved:
    4 * (HEAD_DIM + 1) read per partial and row, HEAD_DIM elements written per row.
    """
    first = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    program_ptr = plan_ptr + first * INTS_PER_PROGRAM
    last = tl.load(program_ptr + 3)
    query_start = tl.load(program_ptr + 4)
    num_queries = tl.load(program_ptr + 5)
    if IS_DEPENDENT:  # always: the next kernel waits for this one only
        tl.extra.cuda.gdc_wait()
    if last < 0:
        return

    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_TILE)
    is_row = row < num_queries * GROUP
    is_dim = dim < HEAD_DIM
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_TILE], tl.float32)
    for start in range(first, last + 1, PARTIALS):
        program = start + tl.arange(0, PARTIALS)
        part = 2 * program + (program == first).to(tl.int32)
        index = (part * num_kv_heads + kv_head).to(tl.int64)[:, None] * ROW_TILE + row[None, :]
        mask = (program <= last)[:, None] & is_row[None, :]
        lse = tl.load(partial_lse_ptr + index, mask, other=float("-inf"))
        part = tl.load(
            partial_out_ptr + index[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask[:, :, None] & is_dim[None, None, :],
            other=0.0,
        )
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(lse - shift[None, :])
        decay = tl.exp2(row_max - shift)
        acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * part, 0)
        row_sum = row_sum * decay + tl.sum(weights, 0)
        row_max = new_max
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    query = (query_start + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    offset = query * out_stride_query + head * out_stride_head
    target = out_ptr + offset[:, None] + dim[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), is_row[:, None] & is_dim[None, :])


def paged_attention(
    q: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    plan: Tensor,
    tiling: Tiling,
    scale: float,
    out: Tensor,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Launch the attention and merge kernels for one partition; see `launch.paged_attention`."""
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = cache.k.shape
    group = num_heads // num_kv_heads
    is_narrow = tiling.num_queries == 1
    num_partials = 2 * tiling.num_programs * num_kv_heads * tiling.row_tile
    partial_out = torch.empty(num_partials * head_dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(num_partials, dtype=torch.float32, device=q.device)
    is_dependent = has_dependent_launch(q.device)
    launch_options = {"launch_pdl": True} if is_dependent else {}
    _attention_kernel[(num_kv_heads * tiling.num_splits, tiling.num_programs)](
        out, partial_out, partial_lse, q, *cache, block_tables, plan, sinks, scale * LOG2_E.value,
        *out.stride()[:2], *q.stride()[:2], *cache.k.stride()[:3], block_tables.stride(0),
        INTS_PER_PROGRAM=INTS_PER_PROGRAM, INTS_PER_TILE=INTS_PER_TILE, BLOCK_SIZE=block_size,
        GROUP=group, ROW_TILE=tiling.row_tile, HEAD_DIM=head_dim,
        DIM_TILE=max(16, triton.next_power_of_2(head_dim)), KV_TILE=tiling.kv_tile,
        WINDOW=window or 0, SPLITS=tiling.num_splits,
        HAS_ONE_LOOP=is_narrow or window is not None, IS_DEPENDENT=is_dependent,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **launch_options,
    )  # fmt: skip
    merge_partials(partial_out, partial_lse, plan, tiling, group, num_kv_heads, out)


def merge_partials(
    partial_out: Tensor,
    partial_lse: Tensor,
    plan: Tensor,
    tiling: Tiling,
    group: int,
    num_groups: int,
    out: Tensor,
) -> None:
    """Launch the merge kernel for the tiles that several programs share.

    Args:
        partial_out: partial results, float32.
        partial_lse: their log-sum-exps in base 2, float32.
        plan: partition of the queries.
        tiling: with which the plan was made.
        group: heads of a group, which are together in a tile.
        num_groups: groups of heads.
        out: [num_tokens, num_heads, head_dim], the result.
    """
    if tiling.num_programs == 1:
        return
    is_narrow, head_dim = tiling.num_queries == 1, out.shape[2]
    is_dependent = has_dependent_launch(out.device)
    launch_options = {"launch_pdl": True} if is_dependent else {}
    rows = 1 if is_narrow else 4
    num_rows = tiling.num_queries * group
    _merge_kernel[(tiling.num_programs - 1, num_groups, triton.cdiv(num_rows, rows))](
        out, partial_out, partial_lse, plan, *out.stride()[:2],
        INTS_PER_PROGRAM=INTS_PER_PROGRAM, INTS_PER_TILE=INTS_PER_TILE, GROUP=group,
        ROW_TILE=tiling.row_tile, HEAD_DIM=head_dim,
        DIM_TILE=max(16, triton.next_power_of_2(head_dim)), PARTIALS=32 // rows, ROWS=rows,
        IS_DEPENDENT=is_dependent, num_warps=max(1, head_dim // 128) if is_narrow else 4,
        **launch_options,
    )  # fmt: skip
