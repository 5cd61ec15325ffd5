"""A plugin of vLLM that draws its dummy weights as `random:` shapes are drawn here.

vLLM's own dummy weights lie within a thousandth of zero, where routers and attention hardly tell
tokens apart. `tests.stress.vllm_dummy` copies this file to where vLLM finds it, so that it imports
nothing of ours.
"""

# mypy: disable-error-code="import-not-found, no-untyped-call"
# (vLLM is in an environment of its own)

import itertools
import zlib
from typing import Any

import torch

DEVIATION = 0.02
"""Of matrices, as `tieredkv.engine.drawn_weights.RANDOM_STD`."""

DRAWN = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8
"""Of tensors that are drawn."""

LOG_DECAYS = -7.0, -3.0
"""Range of the logarithms of decays, so that states remember, as there."""

FP8_DEVIATION = 64.0
"""Of values in FP8 before their scale, as there."""

FP4_EXPONENT = 120
"""Of the scales in MXFP4, biased."""

_numbers = itertools.count()  # tensors of different layers may have one name


def draw(tensor: torch.Tensor, name: str) -> None:
    """Fill a tensor of a model in place: matrices and sinks with Gaussians, norms with ones.

    Values in FP8 and MXFP4 are random too, and all of their scales are the same.
    """
    seed = zlib.crc32(name.encode()) + next(_numbers)
    generator = torch.Generator(tensor.device).manual_seed(seed)
    with torch.no_grad():
        if name.endswith(("scale", "scale_inv")):
            tensor.fill_(FP4_EXPONENT if tensor.dtype == torch.uint8 else DEVIATION / FP8_DEVIATION)
        elif tensor.dtype == torch.uint8:
            tensor.random_(0, 256, generator=generator)
        elif tensor.dtype == torch.float8_e4m3fn:
            for matrix in tensor.flatten(0, -3) if tensor.ndim > 2 else [tensor]:
                drawn = torch.empty(matrix.shape, device=matrix.device)
                matrix.copy_(drawn.normal_(0.0, FP8_DEVIATION, generator=generator))
        elif name.endswith("sinks"):
            tensor.normal_(generator=generator)
        elif name.endswith("A_log"):
            tensor.uniform_(*LOG_DECAYS, generator=generator)
        elif tensor.ndim > 1:
            tensor.normal_(0.0, DEVIATION, generator=generator)
        else:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)


def register() -> None:
    """Have vLLM's loader of dummy weights draw them so."""
    from vllm.model_executor.model_loader import dummy_loader

    fill = dummy_loader.initialize_single_dummy_weight

    def initialize(param: torch.Tensor, *args: Any, name: str = "", **options: Any) -> None:
        is_given = getattr(param, "dummy_weight_value", None) is not None
        if param.device.type == "meta" or is_given or param.dtype not in DRAWN:
            fill(param, *args, name=name, **options)
        else:
            draw(param, name)

    dummy_loader.initialize_single_dummy_weight = initialize
