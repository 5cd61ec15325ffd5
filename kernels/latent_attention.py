"""Triton kernels of latent attention (MLA) over paged latents, and of storing them.

What is stored for a token is read once from memory, and serves as the key and as the value of all
heads. One kernel serves single queries and short chunks, with different tilings;
`tieredkv.kernels.partition` divides the work among programs. Callers go through
`tieredkv.kernels.latents`, which checks the tensors; this module does not.

Reference: `tieredkv.kernels.reference.latent_attention`. Source: DeepSeek-V2, Liu et al. 2024, on
absorbing; FlashMLA, DeepSeek 2025, on reading a tile once for scores and values.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (a kernel's arguments have no Python types)

import torch
import triton
import triton.language as tl
from torch import Tensor

from tieredkv.kernels.checks import has_dependent_launch
from tieredkv.kernels.paged_attention import LOG2_E, merge_partials
from tieredkv.kernels.partition import INTS_PER_PROGRAM, INTS_PER_TILE, Tiling


@triton.jit
def _store_latents_kernel(
    latent_ptr, rotated_ptr, cache_ptr, slot_mapping_ptr, latent_stride_token, rotated_stride_token,
    cache_stride_block, cache_stride_token, BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr,
    NUM_STORED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy the latent and the rotated part of one token into its slot.

    Grid: (num_tokens,). A program whose slot is negative returns at once. Masks: elements past the
    latent and past the rotated part. Bytes moved: NUM_STORED elements read and written per token.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot < 0:
        return
    element = tl.arange(0, TILE)
    latent = tl.load(latent_ptr + token * latent_stride_token + element, element < RANK)
    is_rotated = (element >= RANK) & (element < NUM_STORED)
    rotated_ptr += token * rotated_stride_token - RANK
    rotated = tl.load(rotated_ptr + element, is_rotated)
    target = slot // BLOCK_SIZE * cache_stride_block + slot % BLOCK_SIZE * cache_stride_token
    whole = tl.where(element < RANK, latent, rotated)
    tl.store(cache_ptr + target + element, whole, element < NUM_STORED)


def store_latents(latent: Tensor, rotated: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Launch the kernel; same contract as `latents.store_latents`."""
    num_tokens, rank = latent.shape
    _store_latents_kernel[(num_tokens,)](
        latent, rotated, cache, slot_mapping, latent.stride(0), rotated.stride(0),
        *cache.stride()[:2], BLOCK_SIZE=cache.shape[1], RANK=rank, NUM_STORED=cache.shape[2],
        TILE=triton.next_power_of_2(cache.shape[2]), num_warps=4,
    )  # fmt: skip


@triton.jit
def _attend(
    q, q_rotated, cache_ptr, block_table_ptr, first, end, row_position, scale_log2, stride_block,
    stride_token, BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr,
    ROPE_DIM: tl.constexpr, ROPE_TILE: tl.constexpr, KV_TILE: tl.constexpr,
):  # fmt: skip
    """Attend q's rows to the positions [first, end) of one request, tile by tile.

    A tile may begin anywhere and span blocks. Masks: elements past RANK and past ROPE_DIM,
    positions past the end, scores after the row's own position. Bytes moved: RANK + ROPE_DIM
    elements for each position.
    """
    acc = tl.zeros([q.shape[0], RANK_TILE], tl.float32)
    row_max = tl.full([q.shape[0]], float("-inf"), tl.float32)
    row_sum = tl.zeros([q.shape[0]], tl.float32)
    dim, rotated_dim = tl.arange(0, RANK_TILE), tl.arange(0, ROPE_TILE)
    for tile_start in tl.range(first, end, KV_TILE):
        position = tile_start + tl.arange(0, KV_TILE)
        is_loaded = position < end
        block_id = tl.load(block_table_ptr + position // BLOCK_SIZE, is_loaded, other=0)
        offset = block_id.to(tl.int64) * stride_block + (position % BLOCK_SIZE) * stride_token
        token_ptr = cache_ptr + offset[:, None]
        latent = tl.load(
            token_ptr + dim[None, :], is_loaded[:, None] & (dim < RANK)[None, :], other=0.0
        )
        rotated = tl.load(
            token_ptr + RANK + rotated_dim[None, :],
            is_loaded[:, None] & (rotated_dim < ROPE_DIM)[None, :],
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rotated, tl.trans(rotated), scores, input_precision="ieee") * scale_log2
        is_seen = (position[None, :] <= row_position[:, None]) & is_loaded[None, :]
        scores = tl.where(is_seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row without a visible position keeps -inf; a shift of 0 makes exp2 give 0, not NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(row_max - shift)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * decay[:, None], input_precision="ieee")
        row_sum = row_sum * decay + tl.sum(weights, 1)
        row_max = new_max
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=["block_tables_stride"])
def _latent_kernel(
    out_ptr, partial_out_ptr, partial_lse_ptr, q_ptr, q_rotated_ptr, cache_ptr, block_tables_ptr,
    plan_ptr, scale_log2, out_stride_query, out_stride_head, q_stride_query, q_stride_head,
    q_rotated_stride_query, q_rotated_stride_head, cache_stride_block, cache_stride_token,
    block_tables_stride, INTS_PER_PROGRAM: tl.constexpr, INTS_PER_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, ROW_TILE: tl.constexpr, RANK: tl.constexpr,
    RANK_TILE: tl.constexpr, ROPE_DIM: tl.constexpr, ROPE_TILE: tl.constexpr,
    KV_TILE: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attend one program's range of units for one group of heads, tile by tile.

    Row r of a tile is query r // GROUP and head r % GROUP of the group. Grid: (number of groups,
    num_programs); programs past the work return at once. Groups read the same latents at the same
    time, all but the first from the device's cache. Masks: rows past the tile's queries; others
    as in `_attend`. Bytes moved: the latents of the range for each group; q once per tile and
    program; out once, or as float32 partials if a tile is shared.
    """
    if IS_DEPENDENT:  # the merge kernel may start now; it waits for the results
        tl.extra.cuda.gdc_launch_dependents()
    group = tl.program_id(0)
    program = tl.program_id(1)
    program_ptr = plan_ptr + program * INTS_PER_PROGRAM
    unit = tl.load(program_ptr)
    last = tl.load(program_ptr + 1)
    next_tile_ptr = plan_ptr + tl.num_programs(1) * INTS_PER_PROGRAM
    next_tile_ptr += (tl.load(program_ptr + 2) + 1) * INTS_PER_TILE
    tile_ptr = program_ptr + INTS_PER_TILE  # copy of the record of the program's first tile
    row = tl.arange(0, ROW_TILE)
    dim, rotated_dim = tl.arange(0, RANK_TILE), tl.arange(0, ROPE_TILE)
    head = group * GROUP + row % GROUP
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
        query = (query_start + row // GROUP).to(tl.int64)
        q_offset = query * q_stride_query + head * q_stride_head
        q = tl.load(
            q_ptr + q_offset[:, None] + dim[None, :],
            is_row[:, None] & (dim < RANK)[None, :],
            other=0.0,
        )
        rotated_offset = query * q_rotated_stride_query + head * q_rotated_stride_head
        q_rotated = tl.load(
            q_rotated_ptr + rotated_offset[:, None] + rotated_dim[None, :],
            is_row[:, None] & (rotated_dim < ROPE_DIM)[None, :],
            other=0.0,
        )
        first = (unit - tile_start) * KV_TILE
        end = tl.minimum((stop - tile_start) * KV_TILE, position + num_queries)
        row_max, row_sum, acc = _attend(
            q, q_rotated, cache_ptr,
            block_tables_ptr + request.to(tl.int64) * block_tables_stride, first, end,
            position + row // GROUP, scale_log2, cache_stride_block, cache_stride_token,
            BLOCK_SIZE, RANK, RANK_TILE, ROPE_DIM, ROPE_TILE, KV_TILE,
        )  # fmt: skip
        # NOTE: a row that sees no position gives 0, or a partial with lse -inf and output 0.
        divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
        acc = acc / divisor[:, None]
        out_mask = is_row[:, None] & (dim < RANK)[None, :]
        if (unit == tile_start) & (stop == tile_stop):
            out_offset = query * out_stride_query + head * out_stride_head
            whole_ptr = out_ptr + out_offset[:, None] + dim[None, :]
            tl.store(whole_ptr, acc.to(out_ptr.dtype.element_ty), out_mask)
        else:
            part = 2 * program + (unit == tile_start).to(tl.int32)
            index = (part * tl.num_programs(0) + group).to(tl.int64) * ROW_TILE + row
            lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(divisor))
            tl.store(partial_lse_ptr + index, lse, is_row)
            partial_ptr = partial_out_ptr + index[:, None] * RANK + dim[None, :]
            tl.store(partial_ptr, acc, out_mask)
        unit = stop
        tile_ptr = next_tile_ptr
        next_tile_ptr += INTS_PER_TILE


def attend(
    q: Tensor,
    q_rotated: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    plan: Tensor,
    tiling: Tiling,
    scale: float,
    out: Tensor,
) -> None:
    """Launch the attention and merge kernels for one partition.

    Args:
        q: [num_tokens, num_heads, rank], absorbed queries.
        q_rotated: [num_tokens, num_heads, rope_dim].
        cache: [num_blocks, block_size, rank + rope_dim].
        block_tables: see `Batch`.
        plan: partition of the queries.
        tiling: with which the plan was made.
        scale: factor on the scores.
        out: [num_tokens, num_heads, rank], the result.
    """
    num_heads, rank = q.shape[1:]
    rope_dim = q_rotated.shape[2]
    groups = tiling.num_splits
    num_partials = 2 * tiling.num_programs * groups * tiling.row_tile
    partial_out = torch.empty(num_partials * rank, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(num_partials, dtype=torch.float32, device=q.device)
    is_dependent = has_dependent_launch(q.device)
    launch_options = {"launch_pdl": True} if is_dependent else {}
    _latent_kernel[(groups, tiling.num_programs)](
        out, partial_out, partial_lse, q, q_rotated, cache, block_tables, plan,
        scale * LOG2_E.value, *out.stride()[:2], *q.stride()[:2], *q_rotated.stride()[:2],
        *cache.stride()[:2], block_tables.stride(0), INTS_PER_PROGRAM=INTS_PER_PROGRAM,
        INTS_PER_TILE=INTS_PER_TILE, BLOCK_SIZE=cache.shape[1], GROUP=num_heads // groups,
        ROW_TILE=tiling.row_tile, RANK=rank, RANK_TILE=max(16, triton.next_power_of_2(rank)),
        ROPE_DIM=rope_dim, ROPE_TILE=max(16, triton.next_power_of_2(rope_dim)),
        KV_TILE=tiling.kv_tile, IS_DEPENDENT=is_dependent, num_warps=tiling.num_warps,
        num_stages=tiling.num_stages, **launch_options,
    )  # fmt: skip
    merge_partials(partial_out, partial_lse, plan, tiling, num_heads // groups, groups, out)
