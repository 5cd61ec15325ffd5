"""Forward passes of Gemma 3 and 4 over the paged cache, in a few large steps a layer.

What a layer adds to the residual stream is normed before the sum, which one kernel does together
with the norms of what comes next. Heads, windows and ropes differ by layer. As `FusedModel` does,
it takes its weights from transformers' model, whose parameters become views of merged matrices,
and computes what that model's own code computes.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tieredkv.engine.attention import AttentionContext
from tieredkv.engine.experts import find_experts
from tieredkv.engine.fused_experts import DenseMLP, SparseMLP
from tieredkv.engine.known_parts import MAX_TABLE_BYTES, cos_sin_table, find_unknown_part
from tieredkv.engine.merged_weights import Linear, merge_linears, merge_parameters
from tieredkv.kernels import experts, layers
from tieredkv.kernels.checks import Branch, HeadNorms, NormStyle
from tieredkv.kernels.expert_layout import RoutingRule

logger = logging.getLogger(__name__)

FAMILIES = ("gemma3_text", "gemma4_text", "gemma4_unified_text")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Weights of one layer.

    Attributes:
        input_norm: [1, hidden_size].
        qkv: without values where the keys are the values too.
        cos_sin: of the layer's type; see `layers.rotate_and_store`.
        attention_norm: [hidden_size], of what attention adds.
        mlp_norms: [num_norms, hidden_size], of the inputs of the MLP, the experts and the router.
        mlp: for all tokens.
        sparse: experts beside it, or None.
        own_norms: [2, hidden_size], of the MLP and of the experts before they are added up.
        mlp_norm: [hidden_size], of what the MLP, or both, add.
        scalar: [1], a factor on the layer's result; None in Gemma 3.
    """

    input_norm: Tensor
    qkv: Linear
    head_norms: HeadNorms
    cos_sin: Tensor
    scale: float
    attention_out: Linear
    attention_norm: Tensor
    mlp_norms: Tensor
    mlp: DenseMLP
    sparse: SparseMLP | None
    own_norms: Tensor | None
    mlp_norm: Tensor
    scalar: Tensor | None

    def compute_mlp(self, normed: Tensor) -> Branch:
        """Compute what the second half of the layer adds to the residual stream.

        Args:
            normed: [num_norms, num_tokens, hidden_size], by `mlp_norms`.
        """
        rows, others = self.mlp.compute(normed[0]), None
        if self.sparse is not None:
            chosen = self.sparse.choose(normed[2])
            others = experts.compute_experts(normed[1], *chosen, self.sparse.experts)
        return Branch(rows, self.mlp_norm, others, self.own_norms, self.scalar)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedGemma:
    """A model of the Gemma family, ready to run; it never changes.

    Attributes:
        embedding: [vocab_size, hidden_size].
        embedding_scale: factor on it.
        final_norm: [1, hidden_size].
        head: the output layer's weight, [vocab_size, hidden_size].
        softcap: logits lie between it and its negative; None for no limit.
        style: of all norms.
    """

    embedding: Tensor
    embedding_scale: float
    layers: Sequence[_Layer]
    final_norm: Tensor
    head: Tensor
    softcap: float | None
    style: NormStyle

    @classmethod
    @torch.no_grad()
    def from_model(cls, model: PreTrainedModel, config: PreTrainedConfig) -> "FusedGemma | None":
        """Merge the matrices of a model that was found suitable; see `FusedModel.from_model`."""
        if reason := _refusal(model, config):
            logger.info("`%s` runs in transformers' own code: %s", config.model_type, reason)
            return None
        whole: Any = model  # the parts are checked, their types are not
        base, num_positions = whole.model, config.max_position_embeddings
        tables = {
            kind: cos_sin_table(
                base.rotary_emb,
                num_positions,
                num_angles=_num_angles(base.rotary_emb, kind),
                layer_type=kind,
            )
            for kind in set(config.layer_types)
        }
        weights_plus_one = config.model_type == "gemma3_text"
        style = NormStyle(config.rms_norm_eps, float(weights_plus_one), is_rounded_first=False)
        embeddings = base.embed_tokens
        fused = cls(
            embedding=embeddings.weight.data,
            embedding_scale=float(embeddings.embed_scale.to(embeddings.weight.dtype)),
            layers=[
                _merge_layer(layer, tables[kind], style)
                for layer, kind in zip(base.layers, config.layer_types, strict=True)
            ],
            final_norm=base.norm.weight.data[None],
            head=whole.lm_head.weight.data,
            softcap=config.final_logit_softcapping,
            style=style,
        )
        if fused.embedding.is_cuda:
            torch.cuda.empty_cache()  # what the matrices were merged from
        return fused

    def shortened(self, num_layers: int) -> "FusedGemma":
        """Return the model without its later layers; the weights are shared."""
        return replace(self, layers=self.layers[:num_layers])

    def forward(
        self, token_ids: Tensor, positions: Tensor, kept: Tensor, context: AttentionContext
    ) -> Tensor:
        """Compute a step's tokens, as `FusedModel.forward` does."""
        x = F.embedding(token_ids, self.embedding) * self.embedding_scale
        [normed] = layers.add_and_norm(x, None, self.layers[0].input_norm, self.style)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.final_norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            q = layers.rotate_and_store(
                layers.linear(normed, *layer.qkv),
                context.heads(index).num_heads,
                layer.cos_sin,
                positions,
                context.slots(index),
                context.caches[index],
                layer.head_norms,
            )
            if index < len(self.layers) - 1:
                attended = context.attend(q, layer.scale, index)
            elif len(kept):  # only these tokens are needed from here on
                attended = context.attend(q, layer.scale, index, kept)
                x = x[kept]
            else:  # only keys and values were wanted
                return x.new_empty(0, len(self.head))
            branch = Branch(
                layers.linear(attended.flatten(1), *layer.attention_out), layer.attention_norm
            )
            mlp_rows = layers.add_and_norm(x, branch, layer.mlp_norms, self.style)
            branch = layer.compute_mlp(mlp_rows)
            [normed] = layers.add_and_norm(x, branch, next_norm, self.style)
        logits = F.linear(normed, self.head)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


def _refusal(model: PreTrainedModel, config: PreTrainedConfig) -> str | None:
    """Return why a model is not supported: a part is unknown or not as the config says."""
    if config.hidden_activation != "gelu_pytorch_tanh":
        what = f"its activation is `{config.hidden_activation}`"
        return f"{what}, and only `gelu_pytorch_tanh` is fused"
    if getattr(config, "hidden_size_per_layer_input", 0):
        return "its layers have embeddings of their own"
    if getattr(config, "num_kv_shared_layers", 0):
        return "some of its layers attend to the keys of others"
    if reason := find_unknown_part(model, config):
        return reason
    whole: Any = model
    rotary, num_bytes = whole.model.rotary_emb, 0
    for layer, kind in zip(whole.model.layers, config.layer_types, strict=True):
        num_rotated = 2 * len(_angles(rotary, kind))
        if num_rotated != layer.self_attn.head_dim:
            dims = layer.self_attn.head_dim
            return f"its rope rotates {num_rotated} of {dims} dimensions, not all of them"
    for kind in set(config.layer_types):
        num_bytes += 8 * _num_angles(rotary, kind) * config.max_position_embeddings
    if num_bytes > MAX_TABLE_BYTES:
        return f"rope tables of {config.max_position_embeddings} positions are too large"
    if config.hidden_size > layers.MAX_HIDDEN_SIZE:
        return f"its hidden_size {config.hidden_size} is above {layers.MAX_HIDDEN_SIZE}"
    return None


def _angles(rotary: Any, layer_type: str) -> Tensor:
    angles: Tensor = getattr(rotary, f"{layer_type}_inv_freq")
    return angles


def _num_angles(rotary: Any, layer_type: str) -> int:
    """Return how many angles of a rope are not zero; by its others nothing turns."""
    angles = _angles(rotary, layer_type)
    is_partial = rotary.rope_type[layer_type] == "proportional"  # zeros come last
    return int(angles.count_nonzero()) if is_partial else len(angles)


def _merge_layer(layer: Any, cos_sin: Tensor, style: NormStyle) -> _Layer:
    attention = layer.self_attn
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    head_norms = merge_parameters([attention.q_norm.weight, attention.k_norm.weight])
    sparse, own_norms = None, None
    mlp_norms = [layer.pre_feedforward_layernorm.weight]
    if hasattr(layer, "router"):
        router, found = layer.router, find_experts(layer.experts)
        assert found is not None, f"{layer.experts} is not known to the kernels"
        mlp_norms += [layer.pre_feedforward_layernorm_2.weight, router.scale]
        norms = layer.post_feedforward_layernorm_1.weight, layer.post_feedforward_layernorm_2.weight
        own_norms = merge_parameters(norms).view(2, -1)
        sparse = SparseMLP(
            router=(router.proj.weight.data, None),
            experts=found,
            num_chosen=int(router.config.top_k_experts),
            rule=RoutingRule(
                expert_scales=router.per_expert_scale.data,
                logit_scale=float(router.scalar_root_size),
            ),
        )
    return _Layer(
        input_norm=layer.input_layernorm.weight.data[None],
        qkv=merge_linears(*(each for each in projections if each is not None)),
        head_norms=HeadNorms(head_norms.view(2, -1), style, hasattr(attention, "v_norm")),
        cos_sin=cos_sin,
        scale=float(attention.scaling),
        attention_out=merge_linears(attention.o_proj),
        attention_norm=layer.post_attention_layernorm.weight.data,
        mlp_norms=merge_parameters(mlp_norms).view(len(mlp_norms), -1),
        mlp=DenseMLP.from_module(layer.mlp, "gelu_tanh"),
        sparse=sparse,
        own_norms=own_norms,
        mlp_norm=layer.post_feedforward_layernorm.weight.data,
        scalar=getattr(layer, "layer_scalar", None),
    )
