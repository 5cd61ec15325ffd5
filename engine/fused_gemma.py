"""Forward passes of Gemma 3 and 4 over the paged cache, in a few large steps a layer.

What a layer adds to the residual stream is normed before the sum, which one kernel does together
with the norms of what comes next. Heads, windows and ropes differ by layer. As `FusedModel` does,
it takes its weights from transformers' model, whose parameters become views of merged matrices,
and computes what that model's own code computes.
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
        qkv: without values where the keys are the values too, and without keys in a layer that
            attends to those of another.
        cos_sin: of the layer's type; see `layers.rotate_and_store`.
        attention_norm: [hidden_size], of what attention adds.
        mlp_norms: [num_norms, hidden_size], of the inputs of the MLP, the experts and the router.
        mlp: for all tokens.
        sparse: experts beside it, or None.
        own_norms: [2, hidden_size], of the MLP and of the experts before they are added up.
        mlp_norm: [hidden_size], of what the MLP, or both, add.
        own_input: what the layer's own embeddings add behind the MLP; None for nothing.
        scalar: [1], a factor on the layer's result; None in Gemma 3.
        has_keys: whether it stores keys and values.
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
    own_input: "_OwnInput | None"
    scalar: Tensor | None
    has_keys: bool

    def compute_mlp(self, normed: Tensor) -> Branch:
        """Compute what the second half of the layer adds to the residual stream.

        Args:
            normed: [num_norms, num_tokens, hidden_size], by `mlp_norms`.
        """
        rows, others = self.mlp.compute(normed[0]), None
        if self.sparse is not None:
            chosen = self.sparse.choose(self.sparse.score(normed[2]))
            others = experts.compute_experts(normed[1], *chosen, self.sparse.experts)
        scalar = self.scalar if self.own_input is None else None  # of the layer's last sum
        return Branch(rows, self.mlp_norm, others, self.own_norms, scalar)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnInput:
    """Weights by which a layer's own embeddings enter it.

    Attributes:
        gate: of the residual stream, [own_size, hidden_size].
        out: [hidden_size, own_size].
        norm: [hidden_size], of what is added.
    """

    gate: Linear
    out: Linear
    norm: Tensor

    def compute(self, x: Tensor, embedded: Tensor, scalar: Tensor | None) -> Branch:
        """Compute what the embeddings, [num_tokens, own_size], add to the residual stream."""
        gated = F.gelu(layers.linear(x, *self.gate), approximate="tanh") * embedded
        return Branch(layers.linear(gated, *self.out), self.norm, scalar=scalar)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnEmbeddings:
    """Embeddings of all layers, made of the tokens and of the residual stream before the first.

    Attributes:
        embedding: [vocab_size, num_layers * own_size].
        embedding_scale: factor on it.
        projection: [num_layers * own_size, hidden_size].
        projection_scale: factor on what it gives.
        norm: [own_size], of that.
        scale: factor on the sum.
    """

    embedding: Tensor
    embedding_scale: float
    projection: Linear
    projection_scale: float
    norm: Tensor
    scale: float

    def compute(self, token_ids: Tensor, x: Tensor, style: NormStyle) -> Tensor:
        """Return the embeddings of a step's tokens, [num_tokens, num_layers, own_size]."""
        own_size = len(self.norm)
        embedded = F.embedding(token_ids, self.embedding) * self.embedding_scale
        projected = layers.linear(x, *self.projection) * self.projection_scale
        branch = Branch(projected.view(-1, own_size), self.norm)
        rows = embedded.view(-1, own_size)
        layers.add_and_norm(rows, branch, rows.new_empty(0, own_size), style)
        return rows.mul_(self.scale).view(len(token_ids), -1, own_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedGemma:
    """A model of the Gemma family, ready to run; it never changes.

    Attributes:
        embedding: [vocab_size, hidden_size].
        embedding_scale: factor on it.
        own_embeddings: of the layers, or None.
        final_norm: [1, hidden_size].
        head: the output layer's weight, [vocab_size, hidden_size].
        softcap: logits lie between it and its negative; None for no limit.
        style: of all norms.
    """

    embedding: Tensor
    embedding_scale: float
    layers: Sequence[_Layer]
    own_embeddings: _OwnEmbeddings | None
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
        offset = 1.0 if config.model_type == "gemma3_text" else 0.0  # whose weights are less by 1
        style = NormStyle(float(config.rms_norm_eps), offset, is_rounded_first=False)
        has_own = bool(getattr(config, "hidden_size_per_layer_input", 0))
        return cls(
            embedding=base.embed_tokens.weight.data,
            embedding_scale=_scale_of(base.embed_tokens),
            layers=[
                _merge_layer(layer, tables[kind], style)
                for layer, kind in zip(base.layers, config.layer_types, strict=True)
            ],
            own_embeddings=_own_embeddings(base) if has_own else None,
            final_norm=base.norm.weight.data[None],
            head=whole.lm_head.weight.data,
            softcap=config.final_logit_softcapping,
            style=style,
        )

    def forward(
        self, token_ids: Tensor, positions: Tensor, kept: Tensor, context: AttentionContext
    ) -> Tensor:
        """Compute a step's tokens, as `FusedModel.forward` does."""
        x = F.embedding(token_ids, self.embedding) * self.embedding_scale
        own, nothing = self.own_embeddings, x.new_empty(0, x.shape[1])
        embedded = None if own is None else own.compute(token_ids, x, self.style)
        last_stored = max(index for index, layer in enumerate(self.layers) if layer.has_keys)
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
            if not len(kept) and index == last_stored:  # only keys and values were wanted
                return x.new_empty(0, len(self.head))
            if index < len(self.layers) - 1:
                attended = context.attend(q, layer.scale, index)
            else:  # only these tokens are needed from here on
                attended = context.attend(q, layer.scale, index, kept)
                x, embedded = x[kept], None if embedded is None else embedded[kept]
            branch = Branch(
                layers.linear(attended.flatten(1), *layer.attention_out), layer.attention_norm
            )
            mlp_rows = layers.add_and_norm(x, branch, layer.mlp_norms, self.style)
            branch = layer.compute_mlp(mlp_rows)
            if embedded is not None and layer.own_input is not None:
                layers.add_and_norm(x, branch, nothing, self.style)
                branch = layer.own_input.compute(x, embedded[:, index], layer.scalar)
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


def _scale_of(embeddings: Any) -> float:
    return float(embeddings.embed_scale.to(embeddings.weight.dtype))


def _own_embeddings(base: Any) -> _OwnEmbeddings:
    return _OwnEmbeddings(
        embedding=base.embed_tokens_per_layer.weight.data,
        embedding_scale=_scale_of(base.embed_tokens_per_layer),
        projection=merge_linears(base.per_layer_model_projection),
        projection_scale=float(base.per_layer_model_projection_scale),
        norm=base.per_layer_projection_norm.weight.data,
        scale=float(base.per_layer_input_scale),
    )


def _merge_layer(layer: Any, cos_sin: Tensor, style: NormStyle) -> _Layer:
    attention = layer.self_attn
    has_keys = hasattr(attention, "k_proj")
    projections, norms = [attention.q_proj], [attention.q_norm.weight]
    if has_keys:
        values = [] if attention.v_proj is None else [attention.v_proj]
        projections += [attention.k_proj, *values]
        norms += [attention.k_norm.weight]
    head_norms = merge_parameters(norms).view(len(norms), -1)
    sparse, own_norms, own_input = None, None, None
    mlp_norms = [layer.pre_feedforward_layernorm.weight]
    if hasattr(layer, "router"):
        router, found = layer.router, find_experts(layer.experts)
        assert found is not None, f"{layer.experts} is not known to the kernels"
        mlp_norms += [layer.pre_feedforward_layernorm_2.weight, router.scale]
        outs = layer.post_feedforward_layernorm_1, layer.post_feedforward_layernorm_2
        own_norms = merge_parameters([out.weight for out in outs]).view(2, -1)
        sparse = SparseMLP(
            router=(router.proj.weight.data, None),
            experts=found,
            num_chosen=int(router.config.top_k_experts),
            rule=RoutingRule(
                expert_scales=router.per_expert_scale.data,
                logit_scale=float(router.scalar_root_size),
            ),
        )
    if hasattr(layer, "per_layer_input_gate"):
        own_input = _OwnInput(
            gate=merge_linears(layer.per_layer_input_gate),
            out=merge_linears(layer.per_layer_projection),
            norm=layer.post_per_layer_input_norm.weight.data,
        )
    return _Layer(
        input_norm=layer.input_layernorm.weight.data[None],
        qkv=merge_linears(*projections),
        head_norms=HeadNorms(head_norms, style, hasattr(attention, "v_norm")),
        cos_sin=cos_sin,
        scale=float(attention.scaling),
        attention_out=merge_linears(attention.o_proj),
        attention_norm=layer.post_attention_layernorm.weight.data,
        mlp_norms=merge_parameters(mlp_norms).view(len(mlp_norms), -1),
        mlp=DenseMLP.from_module(layer.mlp, "gelu_tanh"),
        sparse=sparse,
        own_norms=own_norms,
        mlp_norm=layer.post_feedforward_layernorm.weight.data,
        own_input=own_input,
        scalar=getattr(layer, "layer_scalar", None),
        has_keys=has_keys,
    )
