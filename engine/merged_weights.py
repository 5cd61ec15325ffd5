"""Linear layers of one input as one matrix, of which their parameters become views."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Linear = tuple[Tensor, Tensor | None]
"""A weight [outputs, inputs], and a bias or None."""


def merge_linears(*linears: nn.Linear) -> Linear:
    """Put linear layers of one input under one another and make their parameters views."""
    weight = merge_parameters([linear.weight for linear in linears])
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
