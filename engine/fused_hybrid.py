"""Forward passes of Qwen3.5 and Qwen3-Next over the paged cache, in a few large steps a layer.

Most of their layers are recurrent, and the others gate what attention gives. As `FusedModel` does,
it takes its weights from transformers' model, whose parameters become views of merged matrices, and
computes what that model's own code computes.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tieredkv.engine.attention import AttentionContext
from tieredkv.engine.fused_experts import DenseMLP, SparseMLP
from tieredkv.engine.known_parts import MAX_TABLE_BYTES, cos_sin_table, find_unknown_part
from tieredkv.engine.merged_weights import Linear, merge_linears, merge_parameters
from tieredkv.engine.recurrent import Projected, find_projection, state_shape
from tieredkv.kernels import layers
from tieredkv.kernels.checks import Branch, HeadNorms, NormStyle

logger = logging.getLogger(__name__)

FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


class _Step(NamedTuple):
    """What all layers know of a step; see `FusedModel.forward`."""

    positions: Tensor
    context: AttentionContext


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """Weights of a layer's attention.

    Attributes:
        qkv: each head of the queries is followed by its gate.
        cos_sin: [max_positions, 2 * num_angles] float32, as `layers.rotate_and_store` takes it.
        scale: factor on the scores.
    """

    qkv: Linear
    head_norms: HeadNorms
    cos_sin: Tensor
    scale: float
    out: Linear

    def compute(self, normed: Tensor, step: "_Step", index: int, kept: Tensor | None) -> Tensor:
        """Compute what the layer adds to all tokens, or to the kept ones."""
        context = step.context
        projected = layers.linear(normed, *self.qkv)
        queries = layers.rotate_and_store(
            projected,
            num_heads := context.heads(index).num_heads,
            self.cos_sin,
            step.positions,
            context.slots(index),
            context.caches[index],
            self.head_norms,
            has_gates=True,
            is_partial=True,
        )
        if kept is not None and not len(kept):
            return normed.new_empty(0, normed.shape[1])
        attended = context.attend(queries, self.scale, index, kept)
        gates = projected if kept is None else projected[kept]
        gates = gates[:, : 2 * attended[0].numel()].unflatten(1, (num_heads, 2, -1))[:, :, 1]
        return layers.linear(layers.gate_heads(attended, gates).flatten(1), *self.out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recurrence:
    """Weights of a recurrent layer.

    Attributes:
        project: makes of the normed rows what the recurrence needs.
        conv: weight [num_channels, conv_width] and bias of the convolution.
        rates: [num_heads] each, the logarithms of the decays and what is added to them.
        norm: [value_dim], of each head before it is gated.
    """

    project: Callable[[Tensor], Projected]
    conv: tuple[Tensor, Tensor | None]
    rates: tuple[Tensor, Tensor]
    norm: Tensor
    eps: float
    out: Linear

    def compute(self, normed: Tensor, step: "_Step", index: int, kept: Tensor | None) -> Tensor:
        """Compute what the layer adds to all tokens, or to the kept ones."""
        mixed, update, decay, gate = self.project(normed)
        turned = step.context.recur(
            mixed, update, decay, self.conv, self.rates, layer=index, update_scale=1.0
        )
        gates = gate.unflatten(1, (-1, turned.shape[2]))
        if kept is not None:
            turned, gates = turned[kept], gates[kept]
        gated = layers.gate_heads(turned, gates, self.norm, self.eps)
        return layers.linear(gated.flatten(1), *self.out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Weights of one layer; the norms are [1, hidden_size]."""

    input_norm: Tensor
    mixer: _Attention | _Recurrence
    mlp_norm: Tensor
    mlp: DenseMLP | SparseMLP


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedHybrid:
    """A model with recurrent layers, ready to run; it never changes.

    Attributes:
        embedding: [vocab_size, hidden_size].
        final_norm: [1, hidden_size].
        head: the output layer's weight, [vocab_size, hidden_size].
        style: of all norms but those of recurrent heads.
    """

    embedding: Tensor
    layers: Sequence[_Layer]
    final_norm: Tensor
    head: Tensor
    style: NormStyle

    @classmethod
    @torch.no_grad()
    def from_model(cls, model: PreTrainedModel, config: PreTrainedConfig) -> "FusedHybrid | None":
        """Merge the matrices of a model that was found suitable; see `FusedModel.from_model`."""
        if reason := _refusal(model, config):
            logger.info("`%s` runs in transformers' own code: %s", config.model_type, reason)
            return None
        whole: Any = model  # the parts are checked, their types are not
        rotary = whole.model.rotary_emb
        cos_sin = cos_sin_table(
            rotary, config.max_position_embeddings, num_angles=len(rotary.inv_freq)
        )
        style = NormStyle(float(config.rms_norm_eps), offset=1.0, is_rounded_first=False)
        return cls(
            embedding=whole.model.embed_tokens.weight.data,
            layers=[_merge_layer(layer, cos_sin, style) for layer in whole.model.layers],
            final_norm=whole.model.norm.weight.data[None],
            head=whole.lm_head.weight.data,
            style=style,
        )

    def forward(
        self, token_ids: Tensor, positions: Tensor, kept: Tensor, context: AttentionContext
    ) -> Tensor:
        """Compute a step's tokens, as `FusedModel.forward` does."""
        x, step = F.embedding(token_ids, self.embedding), _Step(positions, context)
        [normed] = layers.add_and_norm(x, None, self.layers[0].input_norm, self.style)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.final_norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            wanted = kept if index == len(self.layers) - 1 else None
            mixed = layer.mixer.compute(normed, step, index, wanted)
            if wanted is not None:  # only these tokens are needed from here on
                if not len(kept):
                    return x.new_empty(0, len(self.head))
                x = x[kept]
            [normed] = layers.add_and_norm(x, Branch(mixed), layer.mlp_norm, self.style)
            if isinstance(layer.mlp, SparseMLP):
                normed = layer.mlp.add_and_norm(normed, x, next_norm[0], self.style)
            else:  # not `add_and_norm`: torch adds nothing to a product in FP8 of many rows
                branch = Branch(layer.mlp.compute(normed))
                [normed] = layers.add_and_norm(x, branch, next_norm, self.style)
        return F.linear(normed, self.head)


def _refusal(model: PreTrainedModel, config: PreTrainedConfig) -> str | None:
    """Return why a model is not supported: a part is unknown or not as the config says."""
    if config.hidden_act != "silu":
        return f"its activation is `{config.hidden_act}`, and only `silu` is fused"
    if reason := find_unknown_part(model, config):
        return reason
    if config.hidden_size > layers.MAX_HIDDEN_SIZE:
        return f"its hidden_size {config.hidden_size} is above {layers.MAX_HIDDEN_SIZE}"
    whole: Any = model
    if 8 * len(whole.model.rotary_emb.inv_freq) * config.max_position_embeddings > MAX_TABLE_BYTES:
        return f"a rope table of {config.max_position_embeddings} positions is too large"
    return None


def _merge_layer(layer: Any, cos_sin: Tensor, style: NormStyle) -> _Layer:
    mixer: _Attention | _Recurrence
    if hasattr(layer, "self_attn"):
        attention = layer.self_attn
        norms = merge_parameters([attention.q_norm.weight, attention.k_norm.weight])
        mixer = _Attention(
            qkv=merge_linears(attention.q_proj, attention.k_proj, attention.v_proj),
            head_norms=HeadNorms(norms.view(2, -1), style),
            cos_sin=cos_sin,
            scale=float(attention.scaling),
            out=merge_linears(attention.o_proj),
        )
    else:
        module = layer.linear_attn
        mixer = _Recurrence(
            project=_merge_projection(module),
            conv=(module.conv1d.weight.data[:, 0], None),
            rates=(module.A_log.data, module.dt_bias.data),
            norm=module.norm.weight.data,
            eps=float(module.norm.variance_epsilon),
            out=merge_linears(module.out_proj),
        )
    return _Layer(
        input_norm=layer.input_layernorm.weight.data[None],
        mixer=mixer,
        mlp_norm=layer.post_attention_layernorm.weight.data[None],
        mlp=(SparseMLP if hasattr(layer.mlp, "experts") else DenseMLP).from_module(layer.mlp),
    )


def _merge_projection(module: Any) -> Callable[[Tensor], Projected]:
    """Merge the matrices before a recurrence, unless they lie together already."""
    if not hasattr(module, "in_proj_qkv"):
        return find_projection(module)
    large = merge_linears(module.in_proj_qkv, module.in_proj_z)
    small = merge_linears(module.in_proj_b, module.in_proj_a)
    num_channels, num_heads = state_shape(module).num_channels, module.num_v_heads

    def project(x: Tensor) -> Projected:
        both, rates = layers.linear(x, *large), layers.linear(x, *small)
        parts = both[:, :num_channels], rates[:, :num_heads], rates[:, num_heads:]
        return Projected(*parts, both[:, num_channels:])

    return project
