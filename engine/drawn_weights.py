"""Random weights of a model's shape, drawn on its device in the form in which they are stored.

They are the same in every process on a kind of device. The module knows parameters and how their
numbers are stored; it knows no files and no requests.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tieredkv.engine.attention import ATTENTION_NAME
from tieredkv.engine.experts import EXPERTS_NAME
from tieredkv.engine.quantized_modules import (
    Method,
    choose_drawn,
    keep_quantized,
    other_parameters,
    quantized_parameters,
)

RANDOM_SEED = 0
RANDOM_STD = 0.02

_LOG_DECAYS = -7.0, -3.0
"""Range of the logarithms of decays: a state loses about 0.1 to 4 % with each token."""

_FP8_STD = 64.0
"""Of values in FP8 before their scale: far from the largest one, 448, and from the smallest."""

_FP4_EXPONENTS = 119, 121
"""Range of biased exponents of scales in MXFP4; E2M1 numbers have a deviation of 2.9."""

_AUTO_MODEL: Any = AutoModelForCausalLM  # untyped in transformers


def make_model(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """Make a model on a device, with weights as transformers initialises them."""
    with torch.device(device):
        return _AUTO_MODEL.from_config(
            config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            experts_implementation=EXPERTS_NAME,
        )


@torch.no_grad()
def make_quantized_model(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    method: Method,
    excluded: Collection[str],
) -> Any:
    """Make a model with room for quantized weights, none of which has a value yet.

    Args:
        config: that of the model.
        dtype: of what is not quantized.
        device: where it lies; at no time does it take more than it keeps.
        method: how weights are quantized.
        excluded: parts of paths of modules that are not quantized.
    """
    model = make_model(config, dtype, torch.device("meta"))
    keep_quantized(model, choose_drawn(model, method, excluded), method)
    model.to_empty(device=device)
    model.tie_weights()
    for module in model.modules():
        if hasattr(module, "config"):
            _compute_buffers(module, device)
        elif next(module.buffers(recurse=False), None) is not None:
            model._init_weights(module)
    return model


def _compute_buffers(module: Any, device: torch.device) -> None:
    """Give a module's buffers their values, such as a rope's angles, which no checkpoint has."""
    if not (buffers := dict(module.named_buffers(recurse=False))):
        return
    with torch.device(device):
        made = dict(type(module)(module.config).named_buffers(recurse=False))
    for name, buffer in buffers.items():
        buffer.copy_(made[name])


@torch.no_grad()
def draw_weights(model: PreTrainedModel) -> None:
    """Fill every matrix with small Gaussians and every norm with ones, in place.

    Sinks are drawn with a deviation of 1, so that those of two heads are not taken for one another,
    and decays of recurrent states so that they remember.
    """
    generator = torch.Generator(model.device).manual_seed(RANDOM_SEED)
    for name, parameter in other_parameters(model):
        if name.endswith("sinks"):
            parameter.normal_(generator=generator)
        elif name.endswith("A_log"):
            parameter.uniform_(*_LOG_DECAYS, generator=generator)
        elif parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.normal_(0.0, RANDOM_STD, generator=generator)
    for values, scales in quantized_parameters(model):
        _draw_quantized(values, scales, generator)


def _draw_quantized(values: Tensor, scales: Tensor, generator: torch.Generator) -> None:
    if values.dtype == torch.uint8:
        values.random_(0, 256, generator=generator)
        scales.random_(*_FP4_EXPONENTS, generator=generator)
        return
    scales.uniform_(0.5, 1.5, generator=generator).mul_(RANDOM_STD / _FP8_STD)
    for matrix in values.flatten(0, -3) if values.ndim > 2 else [values]:
        drawn = torch.empty(matrix.shape, device=matrix.device)
        matrix.copy_(drawn.normal_(0.0, _FP8_STD, generator=generator))
