"""Triton kernels that choose each token's experts, and sort tokens by expert, on the device.

A pair is a token and one of its experts; pair `token * top_k + rank` is the token's expert of that
rank. Grids depend on shapes only, nothing is read on the host, and there are no atomics: equal
input gives equal order. Callers go through `tieredkv.kernels.experts`, which checks the tensors.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (a kernel's arguments have no Python types)

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tieredkv.kernels.expert_layout import RoutingRule, most_blocks

FEW_PAIRS = 2048
"""Pairs that are sorted in one launch, in which each program reads all of them."""

FEW_TILE = 16
"""Pairs that a program places in that launch."""

CHUNK = 512
"""Pairs that a program reads at a time, and that it sorts where there are more than FEW_PAIRS."""

SORT_TILE = 8192
"""Comparisons of pairs with experts that a program holds in registers."""

COUNT_TILE = 4096
"""Counts that a program loads at a time."""


class SortedPairs(NamedTuple):
    """Pairs grouped by expert, each group padded to whole blocks.

    Attributes:
        pairs: [num_blocks * rows of a block] int32; places past a block's rows hold anything.
        blocks: [num_blocks, 2] int32: a block's expert and its number of rows, 0 behind the last.
    """

    pairs: Tensor
    blocks: Tensor


@triton.jit
def _top_k_kernel(
    logits_ptr, choice_bias_ptr, scales_ptr, ids_ptr, weights_ptr, logits_stride, scale,
    logit_scale, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, IS_SIGMOID: tl.constexpr,
    IS_NORMALISED: tl.constexpr, EXPERT_TILE: tl.constexpr, RANK_TILE: tl.constexpr,
):  # fmt: skip
    """Choose one token's experts and weigh them.

    Grid: (num_tokens,). A program holds the logits in registers; of equal scores the first is
    chosen. Logits that are NaN give some experts of the layer. Bytes moved: 1 read of the logits.
    """
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERT_TILE)
    rank = tl.arange(0, RANK_TILE)
    is_expert, is_rank = expert < NUM_EXPERTS, rank < TOP_K
    source = logits_ptr + token * logits_stride
    logits = tl.load(source + expert, mask=is_expert, other=float("-inf")).to(tl.float32)
    logits *= logit_scale
    left = logits
    if IS_SIGMOID:
        left = tl.sigmoid(logits)
        if choice_bias_ptr is not None:
            left += tl.load(choice_bias_ptr + expert, mask=is_expert, other=0.0)
        left = tl.where(is_expert, left, float("-inf"))
    ids = tl.zeros([RANK_TILE], tl.int32)
    for index in tl.static_range(TOP_K):
        place = tl.minimum(tl.argmax(left, axis=0), NUM_EXPERTS - 1)
        ids = tl.where(rank == index, place, ids)
        left = tl.where(expert == place, float("-inf"), left)
    chosen = tl.load(source + ids, mask=is_rank, other=float("-inf")).to(tl.float32) * logit_scale
    if IS_SIGMOID:
        scores = tl.sigmoid(chosen)
        total = tl.sum(scores, axis=0) + 1e-20 if IS_NORMALISED else 1.0
    else:
        largest = tl.max(logits, axis=0)
        scores = tl.exp(chosen - largest)
        total = tl.sum(tl.exp((chosen if IS_NORMALISED else logits) - largest), axis=0)
    weights = scores / total * scale
    if scales_ptr is not None:
        weights *= tl.load(scales_ptr + ids, mask=is_rank, other=0.0).to(tl.float32)
    tl.store(ids_ptr + token * TOP_K + rank, ids, mask=is_rank)
    tl.store(weights_ptr + token * TOP_K + rank, weights, mask=is_rank)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _sort_few_kernel(
    ids_ptr, pairs_ptr, blocks_ptr, num_pairs, num_blocks, NUM_ROWS: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, EXPERT_TILE: tl.constexpr,
):  # fmt: skip
    """Place TILE pairs, and write as many entries of the block table.

    Grid: (ceil(num_pairs / TILE),); there are at most as many blocks as pairs. Each program counts
    the pairs of every expert, and the earlier pairs of the experts of its own ones. Pairs past the
    last one and blocks past the last one are masked. Bytes moved: 1 read of all ids per program, 1
    write of the pairs and of the table.
    """
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_pair = index < num_pairs
    own = tl.load(ids_ptr + index, mask=is_pair, other=0).to(tl.int32)
    expert = tl.arange(0, EXPERT_TILE)
    total = tl.zeros([EXPERT_TILE], tl.int32)
    earlier = tl.zeros([TILE, CHUNK], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=0).to(tl.int32)
        total += tl.histogram(ids, EXPERT_TILE, mask=pair < num_pairs)
        is_same = own[:, None] == ids[None, :]
        earlier += (is_same & (pair[None, :] < index[:, None])).to(tl.int32)
    blocks_of = (total + NUM_ROWS - 1) // NUM_ROWS
    ends = tl.cumsum(blocks_of, 0)
    starts = ends - blocks_of

    first = tl.sum(tl.where(own[:, None] == expert[None, :], starts[None, :], 0), 1)
    place = first * NUM_ROWS + tl.sum(earlier, 1)
    tl.store(pairs_ptr + place, index, mask=is_pair)
    _write_blocks(blocks_ptr, index, num_blocks, total, starts, ends, NUM_ROWS)


@triton.jit
def _write_blocks(blocks_ptr, block, end, total, starts, ends, NUM_ROWS: tl.constexpr):
    """Write entries of the block table, but those from `end` on.

    Args:
        blocks_ptr: to the table.
        block: [tile], the entries.
        end: the entry after the last one to be written.
        total: [experts], pairs of each.
        starts: [experts], the first block of each.
        ends: [experts], the block after the last one of each.
        NUM_ROWS: of a block.
    """
    expert = tl.arange(0, total.shape[0])
    owner = tl.sum((ends[None, :] <= block[:, None]).to(tl.int32), 1)
    rest = total[None, :] - (block[:, None] - starts[None, :]) * NUM_ROWS
    rest = tl.sum(tl.where(expert[None, :] == owner[:, None], rest, 0), 1)
    tl.store(blocks_ptr + 2 * block, owner, mask=block < end)
    tl.store(blocks_ptr + 2 * block + 1, tl.minimum(rest, NUM_ROWS), mask=block < end)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(ids_ptr, counts_ptr, num_pairs, CHUNK: tl.constexpr, EXPERT_TILE: tl.constexpr):
    """Count the pairs of each expert in one chunk.

    Grid: (num_chunks,). Bytes moved: 1 read of the ids, and EXPERT_TILE counts written per chunk.
    """
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=0).to(tl.int32)
    counts = tl.histogram(ids, EXPERT_TILE, mask=pair < num_pairs)
    tl.store(counts_ptr + tl.program_id(0) * EXPERT_TILE + tl.arange(0, EXPERT_TILE), counts)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks", "num_blocks"])
def _sort_kernel(
    ids_ptr, counts_ptr, pairs_ptr, blocks_ptr, num_pairs, num_chunks, num_blocks,
    NUM_ROWS: tl.constexpr, CHUNK: tl.constexpr, PAIR_TILE: tl.constexpr,
    EXPERT_TILE: tl.constexpr, CHUNK_TILE: tl.constexpr,
):  # fmt: skip
    """Place one chunk's pairs behind those of earlier chunks, and write a part of the block table.

    Grid: (num_chunks,). Each program adds up the counts of all chunks. Bytes moved: 1 read of the
    ids, 1 write of the pairs and of the table, and one read of all counts per program.
    """
    chunk = tl.program_id(0)
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, num_pairs)
    expert = tl.arange(0, EXPERT_TILE)
    before = tl.zeros([EXPERT_TILE], tl.int32)
    total = tl.zeros([EXPERT_TILE], tl.int32)
    for start in range(0, num_chunks, CHUNK_TILE):
        other = (start + tl.arange(0, CHUNK_TILE))[:, None]
        source = counts_ptr + other * EXPERT_TILE + expert[None, :]
        counts = tl.load(source, mask=other < num_chunks, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(other < chunk, counts, 0), 0)
    blocks_of = (total + NUM_ROWS - 1) // NUM_ROWS
    ends = tl.cumsum(blocks_of, 0)
    starts = ends - blocks_of

    free = starts * NUM_ROWS + before  # the first free place of each expert
    index = tl.arange(0, PAIR_TILE)
    for start in range(first, end, PAIR_TILE):
        pair = start + index
        own = tl.load(ids_ptr + pair, mask=pair < end, other=-1).to(tl.int32)
        is_of = own[:, None] == expert[None, :]
        is_behind = (own[:, None] == own[None, :]) & (index[:, None] > index[None, :])
        place = tl.sum(tl.where(is_of, free[None, :], 0), 1) + tl.sum(is_behind.to(tl.int32), 1)
        tl.store(pairs_ptr + place, pair, mask=pair < end)
        free += tl.sum(is_of.to(tl.int32), 0)

    share = (num_blocks + num_chunks - 1) // num_chunks
    last = tl.minimum((chunk + 1) * share, num_blocks)
    for start in range(chunk * share, last, PAIR_TILE):
        _write_blocks(blocks_ptr, start + index, last, total, starts, ends, NUM_ROWS)


def top_k(logits: Tensor, num_chosen: int, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """Launch the kernel; same contract as `experts.route`."""
    num_tokens, num_experts = logits.shape
    ids = torch.empty(num_tokens, num_chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=logits.device)
    _top_k_kernel[(num_tokens,)](
        logits, rule.bias, rule.expert_scales, ids, weights, logits.stride(0), rule.scale,
        rule.logit_scale, NUM_EXPERTS=num_experts, TOP_K=num_chosen, IS_SIGMOID=rule.is_sigmoid,
        IS_NORMALISED=rule.is_normalised, EXPERT_TILE=triton.next_power_of_2(num_experts),
        RANK_TILE=triton.next_power_of_2(num_chosen), num_warps=1,
    )  # fmt: skip
    return ids, weights


def sort_pairs(expert_ids: Tensor, num_experts: int, num_rows: int) -> SortedPairs:
    """Sort pairs by expert, in one launch for at most FEW_PAIRS pairs and in two for more.

    Args:
        expert_ids: [num_tokens, top_k] int32 or int64, contiguous, at least one.
        num_experts: all ids are below it.
        num_rows: of a block.
    """
    num_pairs, device = expert_ids.numel(), expert_ids.device
    num_blocks = most_blocks(num_pairs, num_experts, num_rows)
    expert_tile = max(32, triton.next_power_of_2(num_experts))
    pairs = torch.empty(num_blocks * num_rows, dtype=torch.int32, device=device)
    blocks = torch.empty(num_blocks, 2, dtype=torch.int32, device=device)
    if num_pairs <= FEW_PAIRS:
        _sort_few_kernel[(triton.cdiv(num_pairs, FEW_TILE),)](
            expert_ids, pairs, blocks, num_pairs, num_blocks, NUM_ROWS=num_rows, TILE=FEW_TILE,
            CHUNK=CHUNK, EXPERT_TILE=expert_tile, num_warps=4,
        )  # fmt: skip
        return SortedPairs(pairs, blocks)
    num_chunks = triton.cdiv(num_pairs, CHUNK)
    tiles = {"CHUNK": CHUNK, "EXPERT_TILE": expert_tile}
    counts = torch.empty(num_chunks, expert_tile, dtype=torch.int32, device=device)
    _count_kernel[(num_chunks,)](expert_ids, counts, num_pairs, **tiles, num_warps=4)
    _sort_kernel[(num_chunks,)](
        expert_ids, counts, pairs, blocks, num_pairs, num_chunks, num_blocks, NUM_ROWS=num_rows,
        PAIR_TILE=min(64, max(16, SORT_TILE // expert_tile)),
        CHUNK_TILE=max(1, COUNT_TILE // expert_tile), **tiles, num_warps=8,
    )  # fmt: skip
    return SortedPairs(pairs, blocks)
