"""Norms and sums around attention and block, of families whose layers are not fused as a whole.

Attention and block are called as transformers' decoder layers call them, and may be fused for
themselves. The sum with what attention adds and the norm behind it are one kernel.
"""

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tieredkv.kernels import layers
from tieredkv.kernels.checks import Branch, NormStyle

logger = logging.getLogger(__name__)

_FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite")


@torch.no_grad()
def fuse_norms(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Replace the forward passes of a model's decoder layers, if its family is known."""
    if config.model_type not in _FAMILIES or config.hidden_size > layers.MAX_HIDDEN_SIZE:
        return
    whole: Any = model
    for layer in whole.model.layers:
        layer.forward = _FusedLayer(layer)
    logger.info("norms of `%s` run in fused steps", config.model_type)


class _FusedLayer:
    """The forward pass of one decoder layer; it never changes.

    Args:
        layer: transformers' module.
    """

    def __init__(self, layer: Any) -> None:
        self._attention, self._mlp = layer.self_attn, layer.mlp
        self._input_norm = layer.input_layernorm.weight.data
        self._mlp_norm = layer.post_attention_layernorm.weight.data[None]
        self._style = NormStyle(float(layer.input_layernorm.variance_epsilon))

    def __call__(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """Compute a step's tokens, [1, num_tokens, hidden_size], in place."""
        x = hidden_states[0]
        normed = layers.rms_norm(x, self._input_norm, self._style.eps)
        attended, _ = self._attention(hidden_states=normed[None], **options)
        branch = Branch(attended[0])
        mlp_rows = layers.add_and_norm(x, branch, self._mlp_norm, self._style)
        return hidden_states.add_(self._mlp(mlp_rows))
