"""Configurations of well-known models, for random weights of a real shape; no weights here."""

from typing import Any


def _llama3_rope(factor: float) -> dict[str, Any]:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_parameters": rope | {"original_max_position_embeddings": 8192}}


_NO_WINDOW = {"use_sliding_window": False}
_FAMILIES: dict[str, tuple[int, int, float, dict[str, Any]]] = {
    "llama": (128256, 131072, 1e-5, _llama3_rope(8.0)),
    "qwen2": (152064, 32768, 1e-6, _NO_WINDOW),
    "qwen3": (151936, 40960, 1e-6, _NO_WINDOW | {"head_dim": 128}),
    "mistral": (32768, 32768, 1e-5, {"sliding_window": None}),
}
"""Vocabulary, positions, epsilon of the norms, and what else the shapes of a family share."""


def _shape(
    family: str, layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, **other: Any
) -> dict[str, Any]:
    vocab_size, max_positions, eps, shared = _FAMILIES[family]
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": mlp,
        "tie_word_embeddings": False,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        **shared,
        **other,
    }


_TIED = {"tie_word_embeddings": True}
_ROPE_32 = _llama3_rope(32.0)
_QWEN25_SMALL = {**_TIED, "vocab_size": 151936}

KNOWN_SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _shape("llama", 32, 4096, 32, 8, 14336),
    "llama-3.1-70b": _shape("llama", 80, 8192, 64, 8, 28672),
    "llama-3.2-1b": _shape("llama", 16, 2048, 32, 8, 8192, **_TIED, **_ROPE_32),
    "llama-3.2-3b": _shape("llama", 28, 3072, 24, 8, 8192, **_TIED, **_ROPE_32),
    "qwen2.5-0.5b": _shape("qwen2", 24, 896, 14, 2, 4864, **_QWEN25_SMALL),
    "qwen2.5-1.5b": _shape(
        "qwen2", 28, 1536, 12, 2, 8960, **_QWEN25_SMALL, max_position_embeddings=131072
    ),
    "qwen2.5-7b": _shape("qwen2", 28, 3584, 28, 4, 18944),
    "qwen2.5-14b": _shape("qwen2", 48, 5120, 40, 8, 13824, rms_norm_eps=1e-5),
    "qwen3-0.6b": _shape("qwen3", 28, 1024, 16, 8, 3072, **_TIED),
    "qwen3-1.7b": _shape("qwen3", 28, 2048, 16, 8, 6144, **_TIED),
    "qwen3-4b": _shape("qwen3", 36, 2560, 32, 8, 9728, **_TIED),
    "qwen3-8b": _shape("qwen3", 36, 4096, 32, 8, 12288),
    "qwen3-14b": _shape("qwen3", 40, 5120, 40, 8, 17408),
    "mistral-7b": _shape("mistral", 32, 4096, 32, 8, 14336),
}
"""Keyword arguments of the transformers config of each shape, `model_type` among them."""
