"""Ropes: which ones are served, and how a config is changed so that a position has one rotation.

A cached key serves later requests of any length, so its rotation must not depend on the length of
the sequence in which it was computed. Two ropes of transformers depend on it. `longrope` has one
set of factors for sequences of up to `original_max_position_embeddings` tokens and another one for
longer ones; here the longest context that is served decides which set holds for all sequences, as
in vLLM. `dynamic` is the unscaled rope up to `max_position_embeddings`, the longest context that
can be served.
"""

import copy
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from tieredkv.errors import ConfigError
from tieredkv.kinds import yarn_of

SERVED_ROPES = frozenset(
    {"default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn"}
)

_POSITIVE = ("rope_theta", "factor", "partial_rotary_factor")
"""With one of 0 or less no dimension is rotated, or the rotations of most tokens are no numbers."""


def rope_types(config: PreTrainedConfig) -> list[str]:
    """Return the type of a config's rope, or those of each type of layer."""
    return [str(table.get("rope_type", "default")) for table in _tables(config)]


def rope_numbers(config: PreTrainedConfig) -> list[tuple[str, Any]]:
    """Return the names and values of those numbers of a config's ropes that must be positive."""
    return [(it, table[it]) for table in _tables(config) for it in _POSITIVE if it in table]


def fixed_rope(config: PreTrainedConfig, context_len: int) -> PreTrainedConfig:
    """Return a config by which the rotation of a position does not depend on a sequence's length.

    Args:
        config: a text model's config, which is not changed.
        context_len: the longest context that is served, at most the positions of the config.
    """
    config = copy.deepcopy(config)
    for table in _tables(config):
        rope_type = table.get("rope_type")
        if rope_type == "longrope":
            is_long = context_len > table["original_max_position_embeddings"]
            kept = table["long_factor" if is_long else "short_factor"]
            table.update(short_factor=kept, long_factor=kept)
        elif rope_type == "dynamic" and not table.get("alpha"):  # by `alpha` it is static already
            table["rope_type"] = "default"
            table.pop("factor", None)
    return config


def scaled_rope(name: str, config: PreTrainedConfig, rope_scaling: str) -> PreTrainedConfig:
    """Return a config with a scaled rope and as many positions as it gives.

    Args:
        name: the model's name.
        config: a text model's config, which is not changed.
        rope_scaling: as in `Settings`.

    Raises:
        ConfigError: the rope cannot be scaled, or not so.
    """
    factor, told = yarn_of(rope_scaling)
    positions = getattr(config, "max_position_embeddings", None) or 0
    original = told or positions
    longest = int(factor * original)
    reason = why_unscalable(config)
    if reason is None and original > positions:
        reason = f"{original} is more than its {positions} positions"
    if reason is None and longest <= positions:
        reason = f"it gives {longest} positions, and the model has {positions} without it"
    if reason is not None:
        what = f"`rope_scaling` = {rope_scaling} does not fit model `{name}`"
        raise ConfigError(f"{what}: {reason}")
    config = copy.deepcopy(config)
    config.rope_parameters |= {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    config.max_position_embeddings = longest
    return config


def why_unscalable(config: PreTrainedConfig) -> str | None:
    """Return why a model's rope cannot be scaled by a setting; None if it can be."""
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return "it has no rope"
    if scaled := sorted({*rope_types(config)} - {"default"}):
        return f"its rope is scaled already (`rope_type` = {scaled[0]} in config.json)"
    if any(isinstance(each, Mapping) for each in rope.values()):
        return "it has a rope for each type of layer, and only a single one can be scaled"
    return None


def _tables(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of a config's rope, or those of each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = [each for each in rope.values() if isinstance(each, dict)]
    return by_layer or ([rope] if rope else [])
