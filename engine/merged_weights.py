"""Linear layers of one input as one matrix, of which their parameters become views."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tieredkv.engine.quantized_modules import QuantizedLinear
from tieredkv.kernels.quantized import Fp8Matrix

Linear = tuple[Tensor | Fp8Matrix, Tensor | None]
"""A weight [outputs, inputs], and a bias or None."""


def merge_linears(*linears: nn.Linear) -> Linear:
    """Put linear layers of one input under one another and make their parameters views.

    All of them are quantized, in whole blocks, or none is.
    """
    values = merge_parameters([linear.weight for linear in linears])
    weight: Tensor | Fp8Matrix = values
    quantized = [linear for linear in linears if isinstance(linear, QuantizedLinear)]
    if quantized:
        assert len(quantized) == len(linears), "only some of the merged matrices are quantized"
        weight = Fp8Matrix(values, merge_parameters([linear.scales for linear in quantized]))
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return weight, merge_parameters(biases) if biases else None


def merge_parameters(parameters: Sequence[Tensor]) -> Tensor:
    """Put parameters under one another and make them views; one alone stays where it is."""
    if len(parameters) == 1:
        return parameters[0].data
    merged = torch.cat([parameter.data for parameter in parameters])
    parts = merged.split([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return merged
