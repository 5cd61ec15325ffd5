"""Recurrent layers (gated delta rule): has transformers' modules keep their states in pages.

The projections before and the gated norm behind are transformers' own. Between them, the short
convolution and the recurrence run over all tokens of a step, which go on from states that the
context has. It knows neither pages nor kernels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tieredkv.engine.attention import CONTEXT_ARGUMENT, StateCall, context_of
from tieredkv.errors import ModelError
from tieredkv.types import StateShape


class Projected(NamedTuple):
    """What a module makes of a step's tokens.

    Attributes:
        mixed: [num_tokens, num_channels], queries, keys and values before the convolution.
        update: [num_tokens, num_heads], before the sigmoid; how much a token changes the state.
        decay: [num_tokens, num_heads], before the softplus; how much of the state it leaves.
        gate: [num_tokens, num_heads * value_dim], of the norm behind.
    """

    mixed: Tensor
    update: Tensor
    decay: Tensor
    gate: Tensor


def keep_states(model: nn.Module) -> None:
    """Have all recurrent modules keep their states in a context; parameters and names stay."""
    for module in model.modules():
        project = _PROJECTIONS.get(type(module).__name__)
        if project is not None:
            module.forward = partial(_forward, module, project)


def find_projection(module: nn.Module) -> Callable[[Tensor], Projected]:
    """Return how a recurrent module projects the tokens of a step, [num_tokens, hidden_size]."""
    return partial(_PROJECTIONS[type(module).__name__], module)


def state_shape(module: Any) -> StateShape:
    """Return the shape of what a recurrent module keeps."""
    heads = module.num_v_heads, module.num_k_heads, module.head_k_dim, module.head_v_dim
    return StateShape(*heads, module.conv_kernel_size)


def _forward(
    module: Any, project: Callable[..., Projected], hidden_states: Tensor, **options: Any
) -> Tensor:
    """Compute a step's tokens, [1, num_tokens, hidden_size], as transformers' module does."""
    context, shape = options.get(CONTEXT_ARGUMENT), state_shape(module)
    if isinstance(context, list):
        context.append(StateCall(module.layer_idx, shape, module.activation))
        return torch.empty_like(hidden_states)
    if not isinstance(context, int):
        raise ModelError("its layers do not pass keyword arguments on to recurrent modules")
    mixed, update, decay, gate = project(module, hidden_states[0])
    turned = context_of(context).recur(
        mixed,
        update,
        decay,
        (module.conv1d.weight[:, 0], module.conv1d.bias),
        (module.A_log, module.dt_bias),
        layer=module.layer_idx,
        update_scale=2.0 if getattr(module, "allow_neg_eigval", False) else 1.0,
    )
    norm = module.o_norm if hasattr(module, "o_norm") else module.norm
    normed = norm(turned.reshape(-1, shape.value_dim), gate.reshape(-1, shape.value_dim))
    out = module.o_proj if hasattr(module, "o_proj") else module.out_proj
    projected: Tensor = out(normed.reshape(len(turned), -1))
    return projected[None]


def _project_apart(module: Any, x: Tensor) -> Projected:
    """Project by matrices of Qwen3.5."""
    projections = module.in_proj_qkv, module.in_proj_b, module.in_proj_a, module.in_proj_z
    return Projected(*(project(x) for project in projections))


def _project_by_heads(module: Any, x: Tensor) -> Projected:
    """Project by matrices of Qwen3-Next, in which everything of a key head lies together."""
    *parts, gate, update, decay = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(x)[None], module.in_proj_ba(x)[None]
    )
    mixed = torch.cat([part[0].flatten(1) for part in parts], dim=1)
    # Where each key head has one value head, both are columns of one matrix.
    return Projected(mixed, update[0].contiguous(), decay[0].contiguous(), gate[0].flatten(1))


def _project_each(module: Any, x: Tensor) -> Projected:
    """Project by matrices of OLMo Hybrid."""
    parts = module.q_proj(x), module.k_proj(x), module.v_proj(x)
    return Projected(torch.cat(parts, dim=1), module.b_proj(x), module.a_proj(x), module.g_proj(x))


_PROJECTIONS: dict[str, Callable[..., Projected]] = {
    "Qwen3_5GatedDeltaNet": _project_apart,
    "Qwen3_5MoeGatedDeltaNet": _project_apart,
    "Qwen3NextGatedDeltaNet": _project_by_heads,
    "OlmoHybridGatedDeltaNet": _project_each,
}
"""The modules that are known, and how each projects its tokens."""
