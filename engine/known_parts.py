"""What fused models have in common: they run what is known in every part, and ropes as tables."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tieredkv.engine.quantized_modules import keep_quantized, other_parameters, quantized_paths

MAX_TABLE_BYTES = 1 << 30
"""The most that the tables of a model's ropes may take."""

_NUM_TABLE_ROWS = 1 << 14
"""Positions whose cosines and sines are computed at a time."""


def find_unknown_part(model: PreTrainedModel, config: PreTrainedConfig) -> str | None:
    """Return which part of a model is not as its class makes it by the config; None if all are."""
    with torch.device("meta"):
        whole = type(model)(copy.deepcopy(config))
    for path, method in quantized_paths(model):
        keep_quantized(whole, [path], method)
    plain, found = _parts(whole), _parts(model)
    for path in [*found, *plain]:
        if found.get(path) != plain.get(path):
            return f"`{path}` is a `{found.get(path)}`, not a `{plain.get(path)}`"
    others = (parameter for _, parameter in other_parameters(model))
    if len({(parameter.dtype, parameter.device) for parameter in others}) > 1:
        return "its parameters are of several dtypes or on several devices"
    return None


def _parts(model: nn.Module) -> dict[str, str]:
    """Name the class of each module and the shape of each parameter."""
    parameters = model.named_parameters(remove_duplicate=False)
    shapes = {name: str(tuple(parameter.shape)) for name, parameter in parameters}
    return {path: type(module).__name__ for path, module in model.named_modules()} | shapes


def cos_sin_table(rotary: Any, num_positions: int, *, num_angles: int, **options: str) -> Tensor:
    """Ask the model's own rotary embedding for all positions, its scaling included.

    Args:
        rotary: transformers' module.
        num_positions: rows of the table.
        num_angles: how many of the angles are kept; those past them are zero.
        options: what the module has to know beside the positions.

    Returns:
        [num_positions, 2 * num_angles] float32, as `layers.rotate_and_store` takes it.
    """
    device = next(rotary.buffers()).device
    like = torch.empty(0, dtype=torch.float32, device=device)
    parts = []
    for start in range(0, num_positions, _NUM_TABLE_ROWS):
        end = min(start + _NUM_TABLE_ROWS, num_positions)
        positions = torch.arange(start, end, device=device)[None]
        if hasattr(rotary, "mrope_section"):  # has positions in time, height and width
            positions = positions.expand(3, 1, -1)
        cos, sin = rotary(like, position_ids=positions, **options)
        # The other half of a head turns by the same angles.
        parts.append(torch.cat([cos[0, :, :num_angles], sin[0, :, :num_angles]], dim=-1))
    return torch.cat(parts)
