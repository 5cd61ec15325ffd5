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

from tieredkv.engine.attention import AttentionContext
from tieredkv.kernels import layers

logger = logging.getLogger(__name__)

_CLASS_PREFIXES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""How transformers' classes are called in the families that are known, by `model_type`."""

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
        head: the output layer's weight and bias.
        cos_sin: [max_positions, head_dim] float32, as `layers.rotate_and_store` takes it.
        num_heads: heads of the queries.
        scale: factor on the attention scores.
        eps: of all norms.
    """

    embedding: Tensor
    layers: Sequence[_Layer]
    final_norm: Tensor
    head: tuple[Tensor, Tensor | None]
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
            head=(whole.lm_head.weight.data, None),
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
        return F.linear(x, *self.head)


def _refusal(model: PreTrainedModel, config: PreTrainedConfig) -> str | None:
    """Say what of a model is not known here, if anything is: its classes, then its parameters."""
    prefix = _CLASS_PREFIXES.get(config.model_type)
    if prefix is None:
        return f"only {', '.join(_CLASS_PREFIXES)} are fused"
    classes = {"": "ForCausalLM", "model": "Model", "model.rotary_emb": "RotaryEmbedding"}
    classes |= {"model.norm": "RMSNorm"}
    parameters = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        classes |= {layer: "DecoderLayer", f"{layer}.mlp": "MLP", f"{layer}.self_attn": "Attention"}
        norms = ["input_layernorm", "post_attention_layernorm"]
        if prefix == "Qwen3":
            norms += ["self_attn.q_norm", "self_attn.k_norm"]
        classes |= {f"{layer}.{norm}": "RMSNorm" for norm in norms}
        parameters |= {f"{layer}.{norm}.weight" for norm in norms}
        linears = [f"{layer}.self_attn.{name}_proj" for name in "qkvo"]
        linears += [f"{layer}.mlp.{name}_proj" for name in ("gate", "up", "down")]
        parameters |= {f"{linear}.weight" for linear in linears}
    modules = dict(model.named_modules())
    for path, name in classes.items():
        if path not in modules or type(modules[path]).__name__ != prefix + name:
            return f"`{path or 'the model'}` is not a `{prefix}{name}`"
    found = dict(model.named_parameters(remove_duplicate=False))
    biases = {name for name in found if name.endswith("_proj.bias")}
    if strange := sorted(found.keys() - biases ^ parameters):
        return f"the parameter `{strange[0]}` is missing or not known"
    return _shape_refusal(modules, found, config)


def _shape_refusal(
    modules: dict[str, nn.Module], found: dict[str, nn.Parameter], config: PreTrainedConfig
) -> str | None:
    if config.hidden_act != "silu":
        return f"its activation is `{config.hidden_act}`"
    if config.hidden_size > layers.MAX_HIDDEN_SIZE:
        return f"its hidden_size {config.hidden_size} is above {layers.MAX_HIDDEN_SIZE}"
    embedding = found["model.embed_tokens.weight"]
    for name, parameter in found.items():
        if (parameter.dtype, parameter.device) != (embedding.dtype, embedding.device):
            return f"`{name}` is of another dtype or on another device than the embedding"
    tables = [
        {
            name.removeprefix(f"model.layers.{index}."): parameter.shape
            for name, parameter in found.items()
            if name.startswith(f"model.layers.{index}.")
        }
        for index in range(config.num_hidden_layers)
    ]
    for index, table in enumerate(tables):
        if table != tables[0]:
            return f"layers 0 and {index} differ in their parameters"
    for merged in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up")):
        if len({f"{name}_proj.bias" in tables[0] for name in merged}) > 1:
            return f"of {', '.join(merged)} some have a bias and some have not"
    first: Any = modules["model.layers.0.self_attn"]
    rotary: Any = modules["model.rotary_emb"]
    if 2 * rotary.inv_freq.numel() != first.head_dim:
        return f"{2 * rotary.inv_freq.numel()} of {first.head_dim} dimensions are rotated"
    for path, module in modules.items():
        if type(module) is nn.Linear or not path.endswith("_proj"):
            continue
        return f"`{path}` is not a plain linear layer"
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
