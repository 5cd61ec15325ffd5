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

LOG_DECAYS = -7.0, -3.0
"""Range of the logarithms of decays, so that states remember, as there."""

_numbers = itertools.count()  # tensors of different layers may have one name


def draw(tensor: torch.Tensor, name: str) -> None:
    """Fill a tensor of a model in place: matrices and sinks with Gaussians, norms with ones."""
    seed = zlib.crc32(name.encode()) + next(_numbers)
    generator = torch.Generator(tensor.device).manual_seed(seed)
    with torch.no_grad():
        if name.endswith("sinks"):
            tensor.normal_(generator=generator)
        elif name.endswith("A_log"):
            tensor.uniform_(*LOG_DECAYS, generator=generator)
        elif tensor.ndim > 1:
            tensor.normal_(0.0, DEVIATION, generator=generator)
        else:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)


def register() -> None:
    """Have vLLM's loader of dummy weights draw those that are not quantized."""
    from vllm.model_executor.model_loader import dummy_loader

    fill = dummy_loader.initialize_single_dummy_weight

    def initialize(param: torch.Tensor, *args: Any, name: str = "", **options: Any) -> None:
        is_given = getattr(param, "dummy_weight_value", None) is not None
        is_float = param.dtype in (torch.bfloat16, torch.float16, torch.float32)
        if param.device.type == "meta" or is_given or not is_float:
            fill(param, *args, name=name, **options)
        else:
            draw(param, name)

    dummy_loader.initialize_single_dummy_weight = initialize
