"""Forward passes of the llama family over the paged cache, in a few large steps a layer.

Queries, keys and values come from one matrix product, gate and up from another, and what stands
between the products is fused. It takes its weights from transformers' model, whose parameters
become views of the merged matrices, and computes what that model's own code computes. It knows
neither requests nor blocks, and leaves the choice of a kernel to `tieredkv.kernels`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tieredkv.engine.attention import AttentionContext
from tieredkv.engine.fused_experts import DenseMLP, SparseMLP
from tieredkv.engine.known_parts import MAX_TABLE_BYTES, cos_sin_table, find_unknown_part
from tieredkv.engine.merged_weights import Linear, merge_linears, merge_parameters
from tieredkv.kernels import layers
from tieredkv.kernels.checks import HeadNorms, NormStyle

logger = logging.getLogger(__name__)

_FAMILIES = ("gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Weights of one layer.

    Attributes:
        head_norms: of queries and keys, where a family norms them.
        sinks: [num_heads], where a family has them; see `launch.paged_attention`.
    """

    input_norm: Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    sinks: Tensor | None
    attention_out: Linear
    mlp_norm: Tensor
    mlp: DenseMLP | SparseMLP


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedModel:
    """A model of the llama family, ready to run; it never changes.

    Attributes:
        embedding: [vocab_size, hidden_size].
        final_norm: [hidden_size].
        head: the output layer's weight, [vocab_size, hidden_size].
        cos_sin: [max_positions, head_dim] float32, as `layers.rotate_and_store` takes it.
        scale: factor on the attention scores.
        eps: of all norms.
    """

    embedding: Tensor
    layers: Sequence[_Layer]
    final_norm: Tensor
    head: Tensor
    cos_sin: Tensor
    scale: float
    eps: float

    @classmethod
    @torch.no_grad()
    def from_model(cls, model: PreTrainedModel, config: PreTrainedConfig) -> "FusedModel | None":
        """Merge the matrices of a model that was found suitable, layer by layer.

        The model's own parameters keep names, shapes and values, and become views. At no time
        does more than one layer lie in memory twice.

        Returns:
            None for a model that is not known in every part.
        """
        if reason := _refusal(model, config):
            logger.info("`%s` runs in transformers' own code: %s", config.model_type, reason)
            return None
        whole: Any = model  # the parts are checked, their types are not
        attention = whole.model.layers[0].self_attn
        return cls(
            embedding=whole.model.embed_tokens.weight.data,
            layers=[
                _merge_layer(layer, float(config.rms_norm_eps)) for layer in whole.model.layers
            ],
            final_norm=whole.model.norm.weight.data,
            head=whole.lm_head.weight.data,
            cos_sin=cos_sin_table(
                whole.model.rotary_emb,
                config.max_position_embeddings,
                num_angles=len(whole.model.rotary_emb.inv_freq),
            ),
            scale=float(attention.scaling),
            eps=float(config.rms_norm_eps),
        )

    def forward(
        self, token_ids: Tensor, positions: Tensor, kept: Tensor, context: AttentionContext
    ) -> Tensor:
        """Compute a step's tokens and write their keys and values into the context's pool.

        Nothing is read from the device, so that a call can be captured in a CUDA graph.

        Args:
            token_ids: [num_tokens].
            positions: [num_tokens], below the model's longest length.
            kept: [num_kept], the indices of the tokens whose logits are wanted.
            context: the cache and the step, whose metadata cover all the tokens.

        Returns:
            Logits in the model's dtype, [num_kept, vocab_size].
        """
        x = F.embedding(token_ids, self.embedding)  # the residual stream, added to in place
        style = NormStyle(self.eps)
        normed = layers.rms_norm(x, self.layers[0].input_norm, self.eps)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.final_norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            q = layers.rotate_and_store(
                layers.linear(normed, *layer.qkv),
                context.heads(index).num_heads,
                self.cos_sin,
                positions,
                context.slots(index),
                context.caches[index],
                layer.head_norms,
            )
            if index < len(self.layers) - 1:
                attended = context.attend(q, self.scale, index, sinks=layer.sinks)
            elif len(kept):  # only these tokens are needed from here on
                attended = context.attend(q, self.scale, index, kept, layer.sinks)
                x = x[kept]
            else:  # only keys and values were wanted
                return x.new_empty(0, len(self.head))
            layers.linear(attended.flatten(1), *layer.attention_out, residual=x)
            normed = layers.rms_norm(x, layer.mlp_norm, self.eps)
            normed = layer.mlp.add_and_norm(normed, x, next_norm, style)
        return F.linear(normed, self.head)


def _refusal(model: PreTrainedModel, config: PreTrainedConfig) -> str | None:
    """Return why a model is not supported: a part is unknown or not as the config says."""
    if config.model_type not in _FAMILIES:
        return f"only models of type {', '.join(_FAMILIES)} are fused"
    if config.hidden_act != "silu":
        return f"its activation is `{config.hidden_act}`, and only `silu` is fused"
    if reason := find_unknown_part(model, config):
        return reason
    whole: Any = model
    num_rotated = 2 * len(whole.model.rotary_emb.inv_freq)
    head_dim = whole.model.layers[0].self_attn.head_dim
    if num_rotated != head_dim:
        return f"its rope rotates {num_rotated} of {head_dim} dimensions, not all of them"
    if config.hidden_size > layers.MAX_HIDDEN_SIZE:
        return f"its hidden_size {config.hidden_size} is above {layers.MAX_HIDDEN_SIZE}"
    if 4 * head_dim * config.max_position_embeddings > MAX_TABLE_BYTES:
        return f"a rope table of {config.max_position_embeddings} positions is too large"
    return None


def _merge_layer(layer: Any, eps: float) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    head_norms, sinks = None, getattr(attention, "sinks", None)
    if hasattr(attention, "q_norm"):
        merged = merge_parameters([attention.q_norm.weight, attention.k_norm.weight])
        head_norms = HeadNorms(merged.view(2, -1), NormStyle(eps))
    return _Layer(
        input_norm=layer.input_layernorm.weight.data,
        qkv=merge_linears(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=head_norms,
        sinks=None if sinks is None else sinks.data,
        attention_out=merge_linears(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.data,
        mlp=(SparseMLP if hasattr(mlp, "experts") else DenseMLP).from_module(mlp),
    )
