"""Entry points of products in FP8: rows are quantized, and multiplied by weights in FP8.

As in `tieredkv.kernels.layers`, tensors are checked on the host, then the Triton kernels or the
torch reference run. No function reads a device tensor on the host. Which kernel multiplies depends
on shapes only. This module knows no requests, tiers or models.
"""

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from tieredkv.errors import ShapeError
from tieredkv.kernels import checks, reference
from tieredkv.kernels.checks import describe, triton_module
from tieredkv.kernels.quantized import FP8_BLOCK, Fp8Matrix

SCALED_MM_ROWS = 65
"""From this many rows on, torch's product is faster than the Triton kernel.

With 128 rows, the products of Qwen3.6-27B take 72, 56, 30 and 25 us instead of 123, 69, 68 and 42;
with 64 rows, 71, 54, 30 and 25 instead of 81, 43, 36 and 22 (H200).
"""

SCALED_MM_STEP = 16
"""Rows of torch's product are a multiple of it."""

PRODUCT_ROWS = 8_192
"""Rows that are quantized and multiplied at a time; a shorter rest joins the last such group."""

_SCALES_STEP = 4
"""Blocks of inputs whose scales cuBLASLt reads at a time: their number must be a multiple of it."""


class Fp8Tiling(NamedTuple):
    """How one product in FP8 is cut into programs.

    Attributes:
        num_rows: rows of x that a program multiplies, at least 16.
        num_outputs: outputs that a program computes; they divide the 128 that have one scale.
        num_splits: programs that share the inputs of one tile. With more than one, partial sums
            are written and then added in their order.
    """

    num_rows: int
    num_outputs: int
    num_splits: int
    num_warps: int
    num_stages: int


ENOUGH_PROGRAMS = 512
"""About four for each of an H200's 132 multiprocessors: so many have 128 KiB of weights each on
their way, and the last ones to end do not leave the others idle for long."""

MIN_SPLIT_BLOCKS = 4
"""Blocks of 128 inputs in a split: fewer would not fill the pipeline of loads."""

MAX_SPLITS = 16
"""More splits would make the partial sums of 32 rows as large as a tenth of the weights."""


def choose_tiling(num_rows: int, num_outputs: int, num_inputs: int) -> Fp8Tiling:
    """Choose how a product is cut: the fewest rows that hold x, and as many splits as fill a GPU.

    Tensor cores of Hopper multiply 64 outputs at a time, whatever the number of rows, because the
    weights are their first factor. Three stages of loads are faster than four: 45.4 us instead of
    47.5 for one row and the largest product of Qwen3.6-27B, and 50.2 instead of 62.4 for 32.
    """
    rows = next((size for size in (16, 32, 64) if num_rows <= size), 128)
    outputs, num_warps = (64, 4) if rows <= 64 else (128, 8)
    num_programs = -(-num_rows // rows) * -(-num_outputs // outputs)
    most = min(MAX_SPLITS, num_inputs // (FP8_BLOCK * MIN_SPLIT_BLOCKS))
    splits = max(1, min(most, -(-ENOUGH_PROGRAMS // num_programs)))
    return Fp8Tiling(rows, outputs, splits, num_warps, num_stages=3)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to FP8, each 128 columns of a row with a factor of their own.

    A scale is the largest absolute value, at least 1e-10, divided by 448. Values are divided by
    their scale, and rounded to the nearest number of E4M3.

    Args:
        x: [num_rows, num_columns], a float dtype, contiguous in its last dimension; num_columns is
            a multiple of 128.

    Returns:
        Values, float8_e4m3fn [num_rows, num_columns], contiguous; and scales, float32
        [num_rows, num_columns / 128], whose columns are contiguous, as torch's `scaled_mm` needs.

    Raises:
        ShapeError: x is not such a matrix; checked on the host before launch.

    Source: the activations of DeepSeek-V3, 2024.
    """
    if x.ndim != 2 or x.dtype not in checks.KERNEL_DTYPES:
        raise ShapeError(f"x {describe(x)} is not a matrix of a supported dtype")
    checks.check_last_dim("x", x)
    if not x.shape[1] or x.shape[1] % FP8_BLOCK:
        what = f"x {describe(x)} has {x.shape[1]} columns"
        raise ShapeError(f"{what}, not a multiple of {FP8_BLOCK}")
    if not checks.use_triton(x.device):
        return reference.quantise_rows(x)
    quantised: tuple[Tensor, Tensor] = triton_module("fp8_products").quantise_rows(x)
    return quantised


def multiply(x: Tensor, weight: Fp8Matrix, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Quantise x and multiply it by weights in FP8; same contract as `layers.linear`.

    Sums are float32. The bias and the residual stream are added before the result is rounded.
    """
    num_rows, num_outputs = len(x), weight.shape[0]
    if not checks.use_triton(x.device):
        exact = reference.multiply_fp8(x, weight, bias)
        return exact.to(x.dtype) if residual is None else residual.copy_(exact + residual.float())
    is_alone = residual is None and bias is None and num_rows < 2 * PRODUCT_ROWS
    if is_alone and _takes_scaled_mm(num_rows, weight, x.dtype):
        return _scaled_mm(x, weight, x.dtype)
    out = x.new_empty(num_rows, num_outputs) if residual is None else residual
    starts = range(0, max(1, num_rows - PRODUCT_ROWS + 1), PRODUCT_ROWS)
    for start, end in itertools.pairwise([*starts, num_rows]):
        if start == end:
            break
        rows = slice(start, end)
        if _takes_scaled_mm(end - start, weight, x.dtype):
            exact = _scaled_mm(x[rows], weight, torch.float32)
            for added in (bias, None if residual is None else residual[rows]):
                if added is not None:
                    exact += added
            out[rows] = exact
        else:
            tiling = choose_tiling(end - start, *weight.shape)
            triton_module("fp8_products").multiply(
                *quantise_rows(x[rows]), weight, bias, out[rows], residual is not None, tiling
            )
    return out


def _takes_scaled_mm(num_rows: int, weight: Fp8Matrix, dtype: torch.dtype) -> bool:
    num_outputs, num_inputs = weight.shape
    is_whole = num_outputs % FP8_BLOCK == 0 and num_inputs % (FP8_BLOCK * _SCALES_STEP) == 0
    return num_rows >= SCALED_MM_ROWS and is_whole and dtype == torch.bfloat16


def _scaled_mm(x: Tensor, weight: Fp8Matrix, dtype: torch.dtype) -> Tensor:
    values, scales = triton_module("fp8_products").quantise_rows(x, SCALED_MM_STEP)
    product = F.scaled_mm(
        values,
        weight.values.t(),
        scale_a=scales,
        scale_recipe_a=ScalingType.BlockWise1x128,
        scale_b=weight.scales.t(),
        scale_recipe_b=ScalingType.BlockWise128x128,
        swizzle_a=SwizzleType.NO_SWIZZLE,
        swizzle_b=SwizzleType.NO_SWIZZLE,
        output_dtype=dtype,
    )
    return product[: len(x)]
