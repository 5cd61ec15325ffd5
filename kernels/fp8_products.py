"""Triton kernels that quantise rows to FP8 and multiply them by weights in FP8.

Grids depend on shapes only, and sums have a fixed order. Callers go through `tieredkv.kernels.fp8`,
which checks the tensors; this module does not. References: `quantise_rows` and `multiply_fp8` of
`tieredkv.kernels.reference`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (a kernel's arguments have no Python types)

import torch
import triton
import triton.language as tl
from torch import Tensor

from tieredkv.kernels.fp8 import Fp8Tiling
from tieredkv.kernels.quantized import FP8_BLOCK, Fp8Matrix
from tieredkv.kernels.quantized_tiles import sum_fp8_blocks

QUANTISE_ROWS = 16
"""Rows of which one program quantises 128 columns, where there are so many."""

SUM_TILE = 1024


@triton.jit
def _nearest_fp8(x):
    """Round float32 to the nearest numbers of E4M3 of at most 448, to even ones in the middle."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    subnormal = (tl.abs(x) + 16384.0) - 16384.0  # the last place of 2^14 is 2^-9
    signed = (subnormal.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(
        tl.float32, bitcast=True
    )
    return tl.where(tl.abs(x) < 0.015625, signed, normal)


@triton.jit(do_not_specialize=["num_rows", "scales_stride"])
def _quantise_rows_kernel(
    x_ptr, values_ptr, scales_ptr, num_rows, x_stride, scales_stride, CAN_ROUND: tl.constexpr,
    NUM_COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Quantise 128 columns of ROWS rows.

    Grid: (ceil(num_rows / ROWS), NUM_COLUMNS / 128); rows past the last one are masked. CAN_ROUND
    says whether conversions to FP8 round to nearest and to at most 448, as those of GPUs do and
    those of Triton's interpreter do not; a NaN stays one on a GPU. Bytes moved: 1 read and 1 write
    of the elements, and one scale for 128 of them.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    column = block * 128 + tl.arange(0, 128)
    is_row = row < num_rows
    mask = is_row[:, None]
    source = x_ptr + row.to(tl.int64)[:, None] * x_stride + column[None, :]
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-10)
    scale = tl.div_rn(largest, tl.full([ROWS], 448.0, tl.float32))
    values = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    if not CAN_ROUND:
        values = _nearest_fp8(values)
    target = values_ptr + row.to(tl.int64)[:, None] * NUM_COLUMNS + column[None, :]
    tl.store(target, values.to(tl.float8e4nv), mask=mask)
    tl.store(scales_ptr + block.to(tl.int64) * scales_stride + row, scale, mask=is_row)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_kernel(
    x_ptr, x_scales_ptr, weight_ptr, weight_scales_ptr, bias_ptr, out_ptr, num_rows,
    HAS_RESIDUAL: tl.constexpr, NUM_OUTPUTS: tl.constexpr, NUM_INPUTS: tl.constexpr,
    NUM_SPLITS: tl.constexpr, ROW_TILE: tl.constexpr, OUTPUT_TILE: tl.constexpr,
):  # fmt: skip
    """Multiply ROW_TILE rows by OUTPUT_TILE outputs over one split of the inputs.

    Grid: (ceil(num_rows / ROW_TILE) * ceil(NUM_OUTPUTS / OUTPUT_TILE), NUM_SPLITS), all rows of a
    tile of outputs one after the other. Rows and outputs past the last ones are masked. With
    several splits, `out_ptr` has their sums, [NUM_SPLITS, num_rows, NUM_OUTPUTS] float32; with one,
    it has the result, to which the bias, and the former contents if HAS_RESIDUAL, are added. Bytes
    moved: the weights once per tile of rows, and the rows once per tile of outputs.
    """
    num_row_tiles = (num_rows + ROW_TILE - 1) // ROW_TILE
    row = (tl.program_id(0) % num_row_tiles) * ROW_TILE + tl.arange(0, ROW_TILE)
    output = (tl.program_id(0) // num_row_tiles) * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)
    split = tl.program_id(1)
    num_blocks: tl.constexpr = NUM_INPUTS // 128
    first = split * num_blocks // NUM_SPLITS
    end = (split + 1) * num_blocks // NUM_SPLITS
    is_row = row < num_rows
    is_output = output < NUM_OUTPUTS
    input_ = tl.arange(0, 128)
    acc = sum_fp8_blocks(
        x_ptr + row.to(tl.int64)[:, None] * NUM_INPUTS + input_[None, :],
        x_scales_ptr + row, num_rows,
        weight_ptr + output.to(tl.int64)[:, None] * NUM_INPUTS + input_[None, :],
        weight_scales_ptr + (output // 128) * num_blocks,
        is_row, is_output, first, end, NUM_OUTPUTS % OUTPUT_TILE == 0,
    )  # fmt: skip
    total = tl.trans(acc)
    target = row.to(tl.int64)[:, None] * NUM_OUTPUTS + output[None, :]
    mask = is_row[:, None] & is_output[None, :]
    if NUM_SPLITS > 1:
        out_ptr += split.to(tl.int64) * num_rows * NUM_OUTPUTS
    else:
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)
            total += bias[None, :]
        if HAS_RESIDUAL:
            total += tl.load(out_ptr + target, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + target, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _add_splits_kernel(
    parts_ptr, bias_ptr, out_ptr, num_rows, HAS_RESIDUAL: tl.constexpr, NUM_OUTPUTS: tl.constexpr,
    NUM_SPLITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add up the sums of all splits in their order, then the bias and the former contents of out.

    Grid: (num_rows, ceil(NUM_OUTPUTS / TILE)); outputs past the last one are masked. Bytes moved:
    NUM_SPLITS reads in float32 and 1 write, and 1 read more if HAS_RESIDUAL.
    """
    output = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = output < NUM_OUTPUTS
    target = tl.program_id(0).to(tl.int64) * NUM_OUTPUTS + output
    total = tl.zeros([TILE], tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        source = parts_ptr + split * num_rows.to(tl.int64) * NUM_OUTPUTS + target
        total += tl.load(source, mask=mask, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + output, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(out_ptr + target, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + target, total.to(out_ptr.dtype.element_ty), mask=mask)


def quantise_rows(x: Tensor, row_step: int = 1) -> tuple[Tensor, Tensor]:
    """Launch the kernel; same contract as `fp8.quantise_rows`.

    The results have rows up to a multiple of `row_step`; those past the rows of x are not defined.
    """
    num_rows, num_columns = x.shape
    num_blocks, num_made = num_columns // FP8_BLOCK, -(-num_rows // row_step) * row_step
    values = torch.empty(num_made, num_columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_blocks, num_made, dtype=torch.float32, device=x.device)
    if num_rows:
        rows = QUANTISE_ROWS if num_rows >= QUANTISE_ROWS else 1
        _quantise_rows_kernel[(triton.cdiv(num_rows, rows), num_blocks)](
            x, values, scales, num_rows, x.stride(0), num_made, CAN_ROUND=x.is_cuda,
            NUM_COLUMNS=num_columns, ROWS=rows, num_warps=1 if rows == 1 else 4,
        )  # fmt: skip
    return values, scales.t()


def multiply(
    values: Tensor,
    scales: Tensor,
    weight: Fp8Matrix,
    bias: Tensor | None,
    out: Tensor,
    has_residual: bool,
    tiling: Fp8Tiling,
) -> None:
    """Multiply quantized rows by weights, into `out` or added to it.

    Args:
        values: of `quantise_rows`.
        scales: of the same.
        weight: [num_outputs, num_inputs].
        bias: [num_outputs] or None.
        out: [num_rows, num_outputs], contiguous.
        has_residual: whether the product is added to `out`.
        tiling: of the product.
    """
    num_rows, num_outputs, num_inputs = len(values), *weight.shape
    splits = tiling.num_splits
    parts = out
    if splits > 1:
        parts = out.new_empty(splits, num_rows, num_outputs, dtype=torch.float32)
    num_tiles = triton.cdiv(num_outputs, tiling.num_outputs)
    _multiply_kernel[(triton.cdiv(num_rows, tiling.num_rows) * num_tiles, splits)](
        values, scales, *weight, bias, parts, num_rows, HAS_RESIDUAL=has_residual,
        NUM_OUTPUTS=num_outputs, NUM_INPUTS=num_inputs, NUM_SPLITS=splits,
        ROW_TILE=tiling.num_rows, OUTPUT_TILE=tiling.num_outputs, num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )  # fmt: skip
    if splits > 1:
        _add_splits_kernel[(num_rows, triton.cdiv(num_outputs, SUM_TILE))](
            parts, bias, out, num_rows, HAS_RESIDUAL=has_residual, NUM_OUTPUTS=num_outputs,
            NUM_SPLITS=splits, TILE=SUM_TILE, num_warps=4,
        )  # fmt: skip
