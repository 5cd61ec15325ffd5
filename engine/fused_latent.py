"""Latent attention (MLA) of known families in a few large steps a layer.

The first products of queries and latents are one, and the norm, the rotation and the writing of
latents are one kernel. It takes its weights from transformers' modules, whose parameters become
views of merged matrices, and computes what their own code computes; all else of the model stays
transformers'. It leaves the choice of a kernel to `tieredkv.kernels`.
"""

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tieredkv.engine.attention import CONTEXT_ARGUMENT, context_of
from tieredkv.engine.latent import expansion, has_latents
from tieredkv.engine.merged_weights import merge_linears
from tieredkv.kernels import latents, layers
from tieredkv.kernels.checks import Rope

logger = logging.getLogger(__name__)

_FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")


@torch.no_grad()
def fuse_latents(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Replace the forward passes of a model's latent attention, if its family is known.

    The parameters keep names, shapes and values. Call it once all weights are loaded.
    """
    modules: list[Any] = [module for module in model.modules() if has_latents(module)]
    if not modules or config.model_type not in _FAMILIES or config.attention_bias:
        return
    for module in modules:
        module.forward = _FusedLatentAttention(module)
    logger.info("latent attention of `%s` runs in fused steps", config.model_type)


class _FusedLatentAttention:
    """The forward pass of one layer's attention; it never changes.

    Args:
        module: transformers' attention module.
    """

    def __init__(self, module: Any) -> None:
        self._layer, self._scale = int(module.layer_idx), float(module.scaling)
        self._interleaves = bool(getattr(module.config, "rope_interleave", False))
        has_up = module.q_lora_rank is not None
        self._q_norm = module.q_a_layernorm.weight.data if has_up else None
        self._up = module.q_b_proj.weight.data if has_up else None
        first = module.q_a_proj if has_up else module.q_proj
        self._down, _ = merge_linears(first, module.kv_a_proj_with_mqa)
        self._kv_norm = module.kv_a_layernorm.weight.data
        self._eps = float(module.kv_a_layernorm.variance_epsilon)
        self._matrix, self._out = expansion(module).data, module.o_proj.weight.data

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor | tuple[Tensor, Tensor],
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Compute a step's tokens, [1, num_tokens, hidden_size], as transformers' module does."""
        context, layer = context_of(options[CONTEXT_ARGUMENT]), self._layer
        heads, cache = context.heads(layer), context.latents(layer)
        latent = heads.latent
        assert latent is not None, "heads without latent attention"
        down = layers.linear(hidden_states[0], self._down)
        q, stored = down[:, : -latent.num_stored], down[:, -latent.num_stored :]
        if self._q_norm is not None and self._up is not None:
            q = layers.linear(layers.rms_norm(q, self._q_norm, self._eps), self._up)
        rope = self._rope(position_embeddings)
        slots = context.slots(layer)
        rotated = latents.rotate_and_store(
            q, stored, self._kv_norm, self._eps, rope, cache, slots, heads
        )
        plain = q.unflatten(1, (heads.num_heads, latent.query_dim))[..., : latent.key_dim]
        attended = context.attend_latents(plain, rotated, self._matrix, self._scale, layer)
        return layers.linear(attended.flatten(1), self._out)[None], None

    def _rope(self, angles: Tensor | tuple[Tensor, Tensor]) -> Rope:
        """Return the rotation of a step's tokens, which a family gives as complex numbers or not.

        Complex ones turn elements that stand side by side, and leave them there.
        """
        if isinstance(angles, Tensor):
            parts = torch.view_as_real(angles[0])
            return Rope(parts[..., 0], parts[..., 1], reads_pairs=True, writes_pairs=True)
        half = angles[0].shape[-1] // 2  # the other half of a head turns by the same angles
        cos, sin = (part[0, :, :half] for part in angles)
        return Rope(cos, sin, reads_pairs=self._interleaves, writes_pairs=False)
