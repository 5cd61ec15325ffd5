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
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from tieredkv.engine.attention import AttentionContext
from tieredkv.kernels import layers

logger = logging.getLogger(__name__)

_CLASS_PREFIXES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""How transformers' classes are called in the families that are known, by `model_type`."""

_MODEL_CLASSES = ("ForCausalLM", "Model", "RotaryEmbedding")
_LAYER_CLASSES = ("DecoderLayer", "Attention", "MLP", "RMSNorm")
_FIRST = "model.layers.0."
_QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_LINEARS = (*_QKV, "self_attn.o_proj", *_GATE_UP, "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_EMBEDDING = "model.embed_tokens.weight"
_OTHER_WEIGHTS = {_EMBEDDING, "model.norm.weight", "lm_head.weight"}

_MAX_TABLE_BYTES = 1 << 30
_NUM_TABLE_ROWS = 1 << 14
"""Positions whose cosines and sines are computed at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Weights of one layer; linear ones are [outputs, inputs] with a bias or None."""

    input_norm: Tensor
    qkv: tuple[Tensor, Tensor | None]
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_out: tuple[Tensor, Tensor | None]
    mlp_norm: Tensor
    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedModel:
    """A model of the llama family, ready to run; it never changes.

    Attributes:
        embedding: [vocab_size, hidden_size].
        final_norm: [hidden_size].
        head: the output layer's weight, [vocab_size, hidden_size].
        cos_sin: [max_positions, head_dim] float32, as `layers.rotate_and_store` takes it.
        num_heads: heads of the queries.
        scale: factor on the attention scores.
        eps: of all norms.
    """

    embedding: Tensor
    layers: Sequence[_Layer]
    final_norm: Tensor
    head: Tensor
    cos_sin: Tensor
    num_heads: int
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
        whole: Any = model  # its parts are known by now, its types are not
        attention = whole.model.layers[0].self_attn
        fused = cls(
            embedding=whole.model.embed_tokens.weight.data,
            layers=[_merge_layer(layer) for layer in whole.model.layers],
            final_norm=whole.model.norm.weight.data,
            head=whole.lm_head.weight.data,
            cos_sin=_cos_sin_table(
                whole.model.rotary_emb, config.max_position_embeddings, whole.device
            ),
            num_heads=attention.q_proj.out_features // attention.head_dim,
            scale=float(attention.scaling),
            eps=float(config.rms_norm_eps),
        )
        if fused.embedding.is_cuda:
            torch.cuda.empty_cache()  # what the matrices were merged from
        return fused

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
        step = context.step
        assert step is not None, "a forward pass ran outside of ModelRunner.execute"
        x, residual = F.embedding(token_ids, self.embedding), None
        for index, layer in enumerate(self.layers):
            x, residual = layers.add_rms_norm(x, residual, layer.input_norm, self.eps)
            q = layers.rotate_and_store(
                F.linear(x, *layer.qkv),
                self.cos_sin,
                positions,
                step.slot_mapping,
                context.k_caches[index],
                context.v_caches[index],
                self.num_heads,
                layer.q_norm,
                layer.k_norm,
                self.eps,
            )
            x = context.attend(q, self.scale, index).flatten(1)
            if index == len(self.layers) - 1:  # nobody sees the other tokens from here on
                x, residual = x[kept], residual[kept]
            x = F.linear(x, *layer.attention_out)
            x, residual = layers.add_rms_norm(x, residual, layer.mlp_norm, self.eps)
            x = F.linear(layers.silu_mul(F.linear(x, *layer.gate_up)), *layer.down)
        x, _ = layers.add_rms_norm(x, residual, self.final_norm, self.eps)
        return F.linear(x, self.head)


def _refusal(model: PreTrainedModel, config: PreTrainedConfig) -> str | None:
    """Say what of a model is not known here, if anything is: a module, a parameter or a size."""
    prefix = _CLASS_PREFIXES.get(config.model_type)
    if prefix is None:
        return f"only {', '.join(_CLASS_PREFIXES)} are fused"
    names = {prefix + part for part in _MODEL_CLASSES + _LAYER_CLASSES}
    plain = (nn.Linear, nn.Embedding, nn.ModuleList, type(ACT2FN["silu"]))
    for path, module in model.named_modules():
        if type(module) not in plain and type(module).__name__ not in names:
            return f"`{path}` is a `{type(module).__name__}`"
    found = dict(model.named_parameters(remove_duplicate=False))
    if reason := _parameter_refusal(found, prefix, config.num_hidden_layers):
        return reason
    whole: Any = model
    num_rotated = 2 * len(whole.model.rotary_emb.inv_freq)
    head_dim = whole.model.layers[0].self_attn.head_dim
    if num_rotated != head_dim:
        return f"{num_rotated} of {head_dim} dimensions are rotated"
    if config.hidden_size > layers.MAX_HIDDEN_SIZE:
        return f"its hidden_size {config.hidden_size} is above {layers.MAX_HIDDEN_SIZE}"
    if 4 * head_dim * config.max_position_embeddings > _MAX_TABLE_BYTES:
        return f"a table of {config.max_position_embeddings} positions is too large"
    return None


def _parameter_refusal(found: dict[str, nn.Parameter], prefix: str, num_layers: int) -> str | None:
    """Say which parameter is missing, not known, or not as its like in the first layer."""
    embedding = found[_EMBEDDING]
    for name, parameter in found.items():
        if (parameter.dtype, parameter.device) != (embedding.dtype, embedding.device):
            return f"`{name}` is of another dtype or on another device than the embedding"
    shapes = {name: parameter.shape for name, parameter in found.items()}
    norms = _NORMS + _HEAD_NORMS if prefix == "Qwen3" else _NORMS
    weights = {f"{name}.weight" for name in (*_LINEARS, *norms)}
    first = {
        name.removeprefix(_FIRST): shapes.pop(name) for name in found if name.startswith(_FIRST)
    }
    if strange := sorted({name for name in first if not name.endswith("_proj.bias")} ^ weights):
        return f"the parameter `{_FIRST}{strange[0]}` is missing or not known"
    for merged in (_QKV, _GATE_UP):
        if len({f"{linear}.bias" in first for linear in merged}) > 1:
            return f"of {', '.join(merged)} some have a bias and some have not"
    for index in range(1, num_layers):
        for name, shape in first.items():
            if shapes.pop(f"model.layers.{index}.{name}", None) != shape:
                return f"layers 0 and {index} differ in `{name}`"
    if strange := sorted(shapes.keys() ^ _OTHER_WEIGHTS):
        return f"the parameter `{strange[0]}` is missing or not known"
    return None


def _merge_layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    is_normed = hasattr(attention, "q_norm")
    return _Layer(
        input_norm=layer.input_layernorm.weight.data,
        qkv=_merge(attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=attention.q_norm.weight.data if is_normed else None,
        k_norm=attention.k_norm.weight.data if is_normed else None,
        attention_out=_merge(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.data,
        gate_up=_merge(mlp.gate_proj, mlp.up_proj),
        down=_merge(mlp.down_proj),
    )


def _merge(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Put linear layers of one input under one another and make their parameters views."""
    weight = _merge_parameters([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return weight, _merge_parameters(biases) if biases else None


def _merge_parameters(parameters: Sequence[Tensor]) -> Tensor:
    if len(parameters) == 1:
        return parameters[0].data
    merged = torch.cat([parameter.data for parameter in parameters])
    parts = merged.split([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return merged


def _cos_sin_table(rotary: Any, num_positions: int, device: torch.device) -> Tensor:
    """Ask the model's own rotary embedding for all positions, its scaling included.

    Returns:
        [num_positions, head_dim] float32.
    """
    like = torch.empty(0, dtype=torch.float32, device=device)
    parts = []
    for start in range(0, num_positions, _NUM_TABLE_ROWS):
        end = min(start + _NUM_TABLE_ROWS, num_positions)
        cos, sin = rotary(like, position_ids=torch.arange(start, end, device=device)[None])
        half = cos.shape[-1] // 2  # the other half of a head turns by the same angles
        parts.append(torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1))
    return torch.cat(parts)
