"""Latent attention (MLA): has transformers' modules hand latents on, in place of keys and values.

Every attention module of this kind in transformers computes queries, normed latents and the rotated
part in its own way, and then makes keys and values of the latents by `expand_kv`. Only that step is
left out, so that what is paged is the latents. It knows neither pages nor kernels.
"""

from typing import Any

from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tieredkv.kernels.partition import Latent

# transformers has this class, and does not list it.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault("mistral4", "Mistral4ForCausalLM")


def keep_latents(model: nn.Module) -> None:
    """Have all modules with latent attention give their latents to the attention interface.

    The interface then gets latents `[1, 1, num_tokens, rank]` in place of keys and the rotated part
    `[1, 1, num_tokens, rope_dim]` in place of values. Parameters and their names stay.
    """
    for module in model.modules():
        if hasattr(module, "expand_kv"):
            _as_any(module).expand_kv = _unexpanded


def has_latents(module: nn.Module) -> bool:
    """Return whether the attention interface gets latents from a module."""
    return getattr(module, "expand_kv", None) is _unexpanded


def expansion(module: nn.Module) -> Tensor:
    """Return the matrix that makes keys and values of latents.

    Returns:
        [num_heads * (key_dim + value_dim), rank]; the rows of a head make its key, then its value.
    """
    weight: Tensor = _as_any(module).kv_b_proj.weight
    return weight


def latent_dims(module: nn.Module, query: Tensor, latents: Tensor, rotated: Tensor) -> Latent:
    """Return the dims of a module, by what it gives to the attention interface."""
    num_heads, query_dim = query.shape[1], query.shape[3]
    rank, rope_dim = latents.shape[3], rotated.shape[3]
    key_dim = query_dim - rope_dim
    return Latent(rank, rope_dim, key_dim, len(expansion(module)) // num_heads - key_dim)


def _unexpanded(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    return latents, rotated


def _as_any(module: nn.Module) -> Any:  # modules of transformers have no common type
    return module
