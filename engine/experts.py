"""Mixture-of-experts layers as transformers' modelling code calls them, computed by our kernels.

Each family's router stays transformers' own. Experts that are made in another way than the kernels
know are computed by transformers. The module knows neither requests nor the cache.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from tieredkv.kernels import experts
from tieredkv.kernels.expert_layout import Experts, Gate, GateKind
from tieredkv.kernels.quantized import Fp8Matrix, Mxfp4Matrix, Weight

EXPERTS_NAME = "tieredkv"

SCALES = "_scales"
"""What follows the name of a weight that stays quantized in that of its scales."""

_ACTIVATIONS: dict[str, GateKind] = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUTanh": "gelu_tanh",
}
"""Classes of activations of which the gate is a plain product."""


def find_experts(module: nn.Module) -> Experts | None:
    """Return the weights of a layer's experts as the kernels take them, or None if they cannot.

    Nothing is copied.
    """
    layer: Any = module
    is_normed = getattr(layer, "has_post_expert_norm", False)  # unknown to transformers 5.17
    if not layer.has_gate or is_normed or (gate := _find_gate(layer)) is None:
        return None
    gate_up, down = _weight_of(layer, "gate_up_proj"), _weight_of(layer, "down_proj")
    if not layer.has_bias:
        return Experts(gate_up, down, gate=gate)
    return Experts(gate_up, down, layer.gate_up_proj_bias.data, layer.down_proj_bias.data, gate)


def _weight_of(layer: Any, name: str) -> Weight:
    """Return a weight of all experts, [num_experts, outputs, inputs]."""
    weight: Tensor = getattr(layer, name).data
    if hasattr(layer, f"{name}{SCALES}"):
        scales = getattr(layer, f"{name}{SCALES}").data
        is_fp8 = weight.dtype == torch.float8_e4m3fn
        return (Fp8Matrix if is_fp8 else Mxfp4Matrix)(weight, scales)
    return weight.transpose(1, 2) if layer.is_transposed else weight


def _find_gate(layer: Any) -> Gate | None:
    if type(layer)._apply_gate is moe._default_apply_gate:
        kind = _ACTIVATIONS.get(type(layer.act_fn).__name__)
        return None if kind is None else Gate(kind)
    if type(layer).__name__ == "GptOssExperts":
        return Gate("clamped", not layer.is_concatenated, float(layer.alpha), float(layer.limit))
    return None


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Serve transformers' experts interface; see `kernels.experts.compute_experts`.

    Args:
        self: the module that holds the weights of all experts of a layer.
        hidden_states: [num_tokens, hidden_size].
        top_k_index: [num_tokens, top_k], the experts of each token.
        top_k_weights: their weights, of the same shape.
    """
    found = find_experts(self)
    if found is None:
        return moe.grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    ids, weights = top_k_index.contiguous(), top_k_weights.contiguous()
    return experts.compute_experts(hidden_states, ids, weights, found)


moe.ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)
