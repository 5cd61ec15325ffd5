"""Triton kernels for the products of a layer's experts.

Rows are sorted by expert, then multiplied in blocks of one expert, whose weights are read once for
a block. Grids depend on shapes only, so that every launch can be captured in a CUDA graph, and sums
have a fixed order. Callers go through `tieredkv.kernels.experts`, which checks the tensors; this
module does not. Reference: `tieredkv.kernels.reference.compute_experts`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (a kernel's arguments have no Python types)

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tieredkv.kernels.checks import NormStyle
from tieredkv.kernels.expert_layout import Experts, SharedExpert, Tiling, choose_tiling
from tieredkv.kernels.fp8_products import quantise_rows
from tieredkv.kernels.quantized import Fp8Matrix, Mxfp4Matrix, Weight, format_of, has_fp8
from tieredkv.kernels.quantized_tiles import sum_fp8_blocks, sum_mxfp4_groups, sum_wide_fp8_blocks
from tieredkv.kernels.routing import SortedPairs, sort_pairs

MAX_UNSORTED = 2
"""Tokens of which each pair is a block of its own, since hardly any two have the same expert."""

BLOCK_GROUP = 8
"""Blocks of rows that are multiplied by a tile of weights before the next tile is."""


@triton.jit
def _gated(gate, up, alpha, limit, GATE: tl.constexpr):
    """Make the inner values of an expert, in float32; see `expert_layout.Gate`."""
    if GATE == "clamped":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        slope = gate * alpha
    elif GATE == "gelu_tanh":  # (1 + tanh(z)) / 2 is sigmoid(2 z)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        slope = gate
    return gate * tl.sigmoid(slope) * up


@triton.jit
def _weight_rows(
    tile, GATE: tl.constexpr, IS_INTERLEAVED: tl.constexpr, NUM_OUTPUTS: tl.constexpr,
    OUTPUT_TILE: tl.constexpr,
):  # fmt: skip
    """Return the rows of the weight that a tile has: with a gate, gate and up take turns."""
    row = tile * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)
    if GATE != "none" and not IS_INTERLEAVED:
        row = row // 2 + (row % 2) * (NUM_OUTPUTS // 2)
    return row


@triton.jit
def _sum_plain_tiles(
    x, weight, input_stride, is_row, is_output, NUM_INPUTS: tl.constexpr, IS_EVEN: tl.constexpr
):
    """Multiply rows by outputs of a weight that is not quantized.

    Args:
        x: pointers [rows, tile].
        weight: pointers [tile, outputs].
        input_stride: from one input of the weight to the next.
        is_row: [rows]; other rows are not loaded.
        is_output: [outputs]; others are not loaded unless IS_EVEN, nor are inputs past the last.
        NUM_INPUTS: of the weight.
        IS_EVEN: whether tiles divide outputs and inputs.

    Returns:
        [rows, outputs] float32.
    """
    INPUT_TILE: tl.constexpr = x.shape[1]
    input_ = tl.arange(0, INPUT_TILE)
    acc = tl.zeros([x.shape[0], weight.shape[1]], tl.float32)
    for start in range(0, NUM_INPUTS, INPUT_TILE):
        if IS_EVEN:
            rows = tl.load(x + start, mask=is_row[:, None], other=0.0)
            values = tl.load(weight + start * input_stride)
        else:
            is_input = start + input_ < NUM_INPUTS
            rows = tl.load(x + start, mask=is_row[:, None] & is_input[None, :], other=0.0)
            mask = is_input[:, None] & is_output[None, :]
            values = tl.load(weight + start * input_stride, mask=mask, other=0.0)
        acc = tl.dot(rows, values, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_blocks", "x_scales_stride"])
def _grouped_kernel(
    x_ptr, x_scales_ptr, weight_ptr, weight_scales_ptr, bias_ptr, routing_ptr, out_ptr, pairs_ptr,
    blocks_ptr, num_blocks, x_stride, x_scales_stride, expert_stride, output_stride, input_stride,
    alpha, limit, FORMAT: tl.constexpr, HAS_PTX: tl.constexpr, GATE: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, PAIRS_PER_ROW: tl.constexpr, NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr, IS_EVEN: tl.constexpr, GROUP: tl.constexpr, NUM_ROWS: tl.constexpr,
    OUTPUT_TILE: tl.constexpr, INPUT_TILE: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    """Multiply one block of rows by one tile of its expert's weight; gate or weigh the result.

    Grid: (num_blocks * ceil(NUM_OUTPUTS / OUTPUT_TILE),), GROUP blocks by all tiles one after the
    other, so that both are read from the device's cache; programs of blocks without rows end at
    once. Without sorted pairs, each pair is a block, and `blocks_ptr` has the experts. Pair p has
    row p // PAIRS_PER_ROW of x and row p of out. Rows past a block's last are masked, and so are
    columns unless the tiles divide the weight evenly (IS_EVEN). FORMAT is that of the weight:
    `plain`, `fp8` or `mxfp4`; the strides are those of `plain`, since quantized weights have no
    gaps. In `fp8`, rows have scales too; in `mxfp4`, rows are words of 64 bits, and the weight is
    words of as many inputs. HAS_PTX says whether weights in MXFP4 may be unpacked by PTX, and
    IS_WIDE whether the rows are the first factor in `fp8`. Bytes moved: each tile of weights once
    per block, each row once per tile.
    """
    num_tiles: tl.constexpr = (NUM_OUTPUTS + OUTPUT_TILE - 1) // OUTPUT_TILE
    group = tl.program_id(0) // (GROUP * num_tiles)
    within = tl.program_id(0) % (GROUP * num_tiles)
    size = tl.minimum(num_blocks - group * GROUP, GROUP)
    block = group * GROUP + within % size
    tile = within // size
    row = tl.arange(0, NUM_ROWS)
    if pairs_ptr is None:
        expert = tl.load(blocks_ptr + block).to(tl.int64)
        is_row = row < 1
        pair = (block + row).to(tl.int64)
    else:
        num_rows = tl.load(blocks_ptr + 2 * block + 1)
        if num_rows == 0:
            return
        expert = tl.load(blocks_ptr + 2 * block).to(tl.int64)
        is_row = row < num_rows
        pair = tl.load(pairs_ptr + block * NUM_ROWS + row, mask=is_row, other=0).to(tl.int64)

    output = _weight_rows(tile, GATE, IS_INTERLEAVED, NUM_OUTPUTS, OUTPUT_TILE)
    is_output = tile * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE) < NUM_OUTPUTS
    source = pair // PAIRS_PER_ROW
    if FORMAT == "plain":
        input_ = tl.arange(0, INPUT_TILE)
        weight = weight_ptr + expert * expert_stride + output[None, :] * output_stride
        acc = _sum_plain_tiles(
            x_ptr + source[:, None] * x_stride + input_[None, :],
            weight + input_[:, None] * input_stride, input_stride, is_row, is_output, NUM_INPUTS,
            IS_EVEN,
        )  # fmt: skip
    elif FORMAT == "fp8":
        input_ = tl.arange(0, 128)
        num_steps: tl.constexpr = NUM_INPUTS // 128
        weight = weight_ptr + expert * NUM_OUTPUTS * NUM_INPUTS + output[:, None] * NUM_INPUTS
        scales = weight_scales_ptr + expert * ((NUM_OUTPUTS + 127) // 128) * num_steps
        rows = x_ptr + source[:, None] * x_stride + input_[None, :]
        if IS_WIDE:
            first = tile * OUTPUT_TILE
            second = first + 1
            if GATE != "none" and not IS_INTERLEAVED:
                first = first // 2
                second = first + NUM_OUTPUTS // 2
            acc = sum_wide_fp8_blocks(
                rows, x_scales_ptr + source, x_scales_stride, weight + input_[None, :],
                scales + first // 128 * num_steps, scales + second // 128 * num_steps, is_row,
                is_output, 0, num_steps, IS_EVEN,
            )  # fmt: skip
        else:
            sums = sum_fp8_blocks(
                rows, x_scales_ptr + source, x_scales_stride, weight + input_[None, :],
                scales + output // 128 * num_steps, is_row, is_output, 0, num_steps, IS_EVEN,
            )  # fmt: skip
            acc = tl.trans(sums)
    else:
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        WORD: tl.constexpr = 64 // dtype.primitive_bitwidth
        word = tl.arange(0, INPUT_TILE // WORD)
        scale = tl.arange(0, INPUT_TILE // 32)
        first = expert * NUM_OUTPUTS + output
        sums = sum_mxfp4_groups(
            x_ptr + source[:, None] * x_stride + word[None, :],
            weight_ptr + first[:, None] * (NUM_INPUTS // WORD) + word[None, :],
            weight_scales_ptr + first[:, None] * (NUM_INPUTS // 32) + scale[None, :],
            is_row, is_output, NUM_INPUTS, IS_EVEN, WORD, HAS_PTX and dtype == tl.bfloat16, dtype,
        )  # fmt: skip
        acc = tl.trans(sums)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * NUM_OUTPUTS + output, mask=is_output, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if GATE == "none":
        routing = tl.load(routing_ptr + pair, mask=is_row, other=0.0).to(tl.float32)
        result = acc * routing[:, None]
        target = out_ptr + pair[:, None] * NUM_OUTPUTS + output[None, :]
        mask = is_row[:, None] & is_output[None, :]
    else:
        gate, up = tl.split(tl.reshape(acc, (NUM_ROWS, OUTPUT_TILE // 2, 2)))
        result = _gated(gate, up, alpha, limit, GATE)
        inner = tile * (OUTPUT_TILE // 2) + tl.arange(0, OUTPUT_TILE // 2)
        target = out_ptr + pair[:, None] * (NUM_OUTPUTS // 2) + inner[None, :]
        mask = is_row[:, None] & (inner < NUM_OUTPUTS // 2)[None, :]
    tl.store(target, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["gate_stride"])
def _sum_kernel(
    parts_ptr, shared_ptr, gate_ptr, out_ptr, norm_ptr, normed_ptr, gate_stride, eps, offset,
    IS_ROUNDED_FIRST: tl.constexpr, TOP_K: tl.constexpr, NUM_COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Add up the rows of one token's pairs by rank; with a norm, add them to out, and norm that.

    Grid: (num_tokens,). A program holds its row in registers; columns past NUM_COLUMNS are masked.
    With a shared expert, the sum is rounded before and after its row is added. Bytes moved: TOP_K
    reads and 1 write of the row, 1 read more with a shared expert, and with a norm 1 read and 1
    write more.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    mask = column < NUM_COLUMNS
    target = token * NUM_COLUMNS + column
    total = tl.zeros([TILE], tl.float32)
    for rank in tl.static_range(TOP_K):
        source = parts_ptr + (token * TOP_K + rank) * NUM_COLUMNS + column
        total += tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if shared_ptr is not None:
        gate = tl.sigmoid(tl.load(gate_ptr + token * gate_stride).to(tl.float32))
        gate = gate.to(gate_ptr.dtype.element_ty).to(tl.float32)
        shared = tl.load(shared_ptr + target, mask=mask, other=0.0).to(tl.float32)
        total = (total.to(dtype).to(tl.float32) + shared * gate).to(dtype).to(tl.float32)
    if norm_ptr is not None:
        total += tl.load(out_ptr + target, mask=mask, other=0.0).to(tl.float32)
    out = total.to(dtype)
    tl.store(out_ptr + target, out, mask=mask)
    if norm_ptr is not None:
        exact = out.to(tl.float32)
        variance = tl.sum(exact * exact, axis=0) / NUM_COLUMNS
        normed = exact * tl.rsqrt(variance + eps)
        if IS_ROUNDED_FIRST:
            normed = normed.to(dtype).to(tl.float32)
        weight = tl.load(norm_ptr + column, mask=mask, other=0.0).to(tl.float32) + offset
        tl.store(normed_ptr + target, (normed * weight).to(dtype), mask=mask)


def compute_experts(
    x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, shared: SharedExpert | None
) -> Tensor:
    """Launch the kernels; same contract as `experts.compute_experts`."""
    out = x.new_empty(x.shape)
    _sum(_compute_parts(x, ids, weights, experts), shared, out, None, None, NormStyle(0.0))
    return out


def add_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    shared: SharedExpert | None,
    residual: Tensor,
    norm: Tensor,
    style: NormStyle,
) -> Tensor:
    """Launch the kernels; same contract as `experts.add_experts`."""
    normed = x.new_empty(x.shape)
    _sum(_compute_parts(x, ids, weights, experts), shared, residual, norm, normed, style)
    return normed


def _sum(
    parts: Tensor,
    shared: SharedExpert | None,
    out: Tensor,
    norm: Tensor | None,
    normed: Tensor | None,
    style: NormStyle,
) -> None:
    num_tokens, hidden_size = out.shape
    tile = triton.next_power_of_2(hidden_size)
    rows, gate = (None, None) if shared is None else shared
    _sum_kernel[(num_tokens,)](
        parts, rows, gate, out, norm, normed, 0 if gate is None else gate.stride(0), style.eps,
        style.offset, IS_ROUNDED_FIRST=style.is_rounded_first, TOP_K=len(parts) // num_tokens,
        NUM_COLUMNS=hidden_size, TILE=tile, num_warps=min(16, max(1, tile // 512)),
    )  # fmt: skip


def _compute_parts(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """Compute the weighted result of each pair, [num_tokens * top_k, hidden_size]."""
    num_experts, num_outputs, hidden_size = experts.gate_up.shape
    kind = format_of(experts.gate_up)
    tiling = choose_tiling(ids.numel(), num_experts, x.element_size(), kind)
    order = None
    if len(x) > MAX_UNSORTED:
        order = sort_pairs(ids, num_experts, tiling.num_rows)
    inner = x.new_empty(ids.numel(), num_outputs // 2)
    _multiply(x, ids, None, experts, order, tiling, inner)
    parts = x.new_empty(ids.numel(), hidden_size)
    _multiply(inner, ids, weights, experts, order, tiling, parts)
    return parts


def _multiply(
    x: Tensor,
    ids: Tensor,
    routing: Tensor | None,
    experts: Experts,
    order: SortedPairs | None,
    tiling: Tiling,
    out: Tensor,
) -> None:
    """Launch one product: that of the gate, or the one down if there are routing weights."""
    is_gate, gate = routing is None, experts.gate
    weight, bias, tile = experts.down, experts.down_bias, tiling.down
    if is_gate:
        weight, bias, tile = experts.gate_up, experts.gate_up_bias, tiling.gate_up
    outputs, inputs, num_warps, num_stages = tile
    _, num_outputs, num_inputs = weight.shape
    pairs, blocks = (None, ids) if order is None else order
    num_blocks = ids.numel() if order is None else len(order.blocks)
    factors = _factors(x, weight)
    strides = weight.stride() if isinstance(weight, Tensor) else (0, 0, 1)
    scales_stride = 0 if factors.x_scales is None else factors.x_scales.stride(1)
    _grouped_kernel[(num_blocks * triton.cdiv(num_outputs, outputs),)](
        *factors, bias, routing, out, pairs, blocks, num_blocks, factors.x.stride(0),
        scales_stride, *strides, gate.alpha, gate.limit, FORMAT=format_of(weight),
        HAS_PTX=has_fp8(x.device), GATE=gate.kind if is_gate else "none",
        IS_INTERLEAVED=gate.is_interleaved, PAIRS_PER_ROW=len(out) // len(x),
        NUM_OUTPUTS=num_outputs, NUM_INPUTS=num_inputs,
        IS_EVEN=num_outputs % outputs == 0 and num_inputs % inputs == 0, GROUP=BLOCK_GROUP,
        NUM_ROWS=tiling.num_rows, OUTPUT_TILE=outputs, INPUT_TILE=inputs,
        IS_WIDE=is_wide(tiling.num_rows, num_outputs, outputs), num_warps=num_warps,
        num_stages=num_stages,
    )  # fmt: skip


def is_wide(num_rows: int, num_outputs: int, output_tile: int) -> bool:
    """Return whether a product in FP8 has enough rows for Hopper's tensor cores as first factor.

    A tile's halves of the gate and of the up values must each have one scale.
    """
    return num_rows >= 64 and output_tile <= 128 and num_outputs // 2 % (output_tile // 2) == 0


class _Factors(NamedTuple):
    """The tensors of a product, as the kernel takes them; scales are None where there are none."""

    x: Tensor
    x_scales: Tensor | None
    weight: Tensor
    weight_scales: Tensor | None


def _factors(x: Tensor, weight: Weight) -> _Factors:
    if isinstance(weight, Fp8Matrix):
        return _Factors(*quantise_rows(x), *weight)
    if isinstance(weight, Mxfp4Matrix):
        inputs = 64 // (8 * x.element_size())
        if x.stride(0) % inputs or x.data_ptr() % 8:
            x = x.clone(memory_format=torch.contiguous_format)
        words = weight.values.view(torch.int16) if inputs == 4 else weight.values
        return _Factors(x.view(torch.int64), None, words, weight.scales)
    return _Factors(x, None, weight, None)
