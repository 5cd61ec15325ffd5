"""Quantized weights as kernels take them, in place of a tensor.

The module knows the layouts and what their numbers mean. It knows no products, no weight files and
no models.
"""

import functools
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tieredkv.errors import ShapeError
from tieredkv.kernels.checks import describe

FP8_BLOCK = 128
"""Rows and columns of a weight in FP8 that have one scale, and columns of a quantized row."""

FP8_MAX = 448.0
"""The largest number of E4M3."""

MXFP4_GROUP = 32
"""Neighbouring inputs of a weight in MXFP4 that have one scale."""

_FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP4_CODES = torch.cat([_FP4_VALUES, -_FP4_VALUES])
_FP4_PAIRS = torch.stack([_FP4_CODES.repeat(16), _FP4_CODES.repeat_interleave(16)], dim=1)
"""The two E2M1 numbers of each byte, [256, 2]: that of its low bits, then that of its high ones."""

_E8M0_BIAS = 127


class Fp8Matrix(NamedTuple):
    """Weights in FP8, with a factor for each block of 128 outputs by 128 inputs.

    Attributes:
        values: float8_e4m3fn [..., outputs, inputs], contiguous.
        scales: float32 [..., ceil(outputs / 128), ceil(inputs / 128)], contiguous. A weight is its
            value times the scale of its block.

    Source: the weights of DeepSeek-V3, 2024.
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the weights: [..., outputs, inputs]."""
        return self.values.shape

    def at(self, expert: int) -> "Fp8Matrix":
        """Return the weights of one expert, which share memory with these."""
        return Fp8Matrix(self.values[expert], self.scales[expert])

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weights, [..., outputs, inputs]: computed in float32, and rounded once."""
        num_outputs, num_inputs = self.shape[-2:]
        factors = self.scales.repeat_interleave(FP8_BLOCK, -1)[..., :num_inputs]
        factors = factors.repeat_interleave(FP8_BLOCK, -2)[..., :num_outputs, :]
        return (self.values.float() * factors).to(dtype)


class Mxfp4Matrix(NamedTuple):
    """Weights in MXFP4: E2M1 numbers, with a power of two for each 32 inputs.

    Attributes:
        values: uint8 [..., outputs, inputs / 2], contiguous. A byte has two neighbouring inputs,
            the first one in its low bits.
        scales: uint8 [..., outputs, inputs / 32], contiguous: exponents of two plus 127.

    Source: OCP Microscaling Formats 1.0, 2023.
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the weights: [..., outputs, inputs]."""
        *others, num_bytes = self.values.shape
        return torch.Size([*others, 2 * num_bytes])

    def at(self, expert: int) -> "Mxfp4Matrix":
        """Return the weights of one expert, which share memory with these."""
        return Mxfp4Matrix(self.values[expert], self.scales[expert])

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weights, [..., outputs, inputs]: computed in float32, and rounded once."""
        pairs = _FP4_PAIRS.to(self.values.device).index_select(0, self.values.flatten().int())
        numbers = pairs.view(*self.scales.shape, MXFP4_GROUP)
        exponents = self.scales.int() - _E8M0_BIAS
        return torch.ldexp(numbers, exponents[..., None]).flatten(-2).to(dtype)


Weight = Tensor | Fp8Matrix | Mxfp4Matrix
"""Weights [..., outputs, inputs], quantized or not."""

Format = Literal["plain", "fp8", "mxfp4"]


def format_of(weight: Weight) -> Format:
    """Return how the numbers of weights are stored."""
    if isinstance(weight, Tensor):
        return "plain"
    return "fp8" if isinstance(weight, Fp8Matrix) else "mxfp4"


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """Return whether a device multiplies in FP8: an NVIDIA GPU since Hopper. CPUs do not."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def describe_weight(weight: Weight) -> str:
    """Name the shape, dtype and device of weights for a message."""
    return describe(weight if isinstance(weight, Tensor) else weight.values)


def check_quantized(name: str, weight: Fp8Matrix | Mxfp4Matrix, like: Tensor) -> None:
    """Refuse quantized weights of other layouts than their classes describe.

    Args:
        name: of the weights, for the message.
        weight: [..., outputs, inputs].
        like: a tensor on the device where they must be.

    Raises:
        ShapeError: names the tensor that does not fit.
    """
    is_fp8 = isinstance(weight, Fp8Matrix)
    values, scales = weight
    values_dtype = torch.float8_e4m3fn if is_fp8 else torch.uint8
    scales_dtype = torch.float32 if is_fp8 else torch.uint8
    *others, num_outputs, num_inputs = weight.shape
    if num_inputs % (FP8_BLOCK if is_fp8 else MXFP4_GROUP):
        what = f"{name} {describe(values)} has {num_inputs} inputs"
        raise ShapeError(f"{what}, not a multiple of {FP8_BLOCK if is_fp8 else MXFP4_GROUP}")
    shape = [*others, num_outputs, num_inputs // MXFP4_GROUP]
    if is_fp8:
        shape = [*others, -(-num_outputs // FP8_BLOCK), num_inputs // FP8_BLOCK]
    for part, tensor, dtype in (
        (name, values, values_dtype),
        (f"the scales of {name}", scales, scales_dtype),
    ):
        if tensor.dtype != dtype or tensor.device != like.device or not tensor.is_contiguous():
            what = f"{part}, {describe(tensor)}, must be contiguous"
            raise ShapeError(f"{what} and {str(dtype).removeprefix('torch.')} on {like.device}")
    if [*scales.shape] != shape:
        what = f"the scales of {name}, {describe(scales)}, must have the shape {shape}"
        raise ShapeError(f"{what} for {describe(values)}")
