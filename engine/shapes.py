"""Configurations of well-known models, for random weights of a real shape; no weights here."""

from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, **other: Any
) -> dict[str, Any]:
    config = _shape("llama", layers, hidden, heads, kv_heads, hidden // heads, mlp)
    config |= {"vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
    return config | {"rope_parameters": _LLAMA3_ROPE | {"factor": 8.0}} | other


def _qwen2(
    layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, **other: Any
) -> dict[str, Any]:
    config = _shape("qwen2", layers, hidden, heads, kv_heads, hidden // heads, mlp)
    config |= {"vocab_size": 152064, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
    return config | {"rope_parameters": _rope(1e6), "use_sliding_window": False} | other


def _qwen3(
    layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, **other: Any
) -> dict[str, Any]:
    config = _shape("qwen3", layers, hidden, heads, kv_heads, 128, mlp)
    config |= {"vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6}
    return config | {"rope_parameters": _rope(1e6), "use_sliding_window": False} | other


def _shape(
    model_type: str, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, mlp: int
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": mlp,
        "tie_word_embeddings": False,
    }


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


_TIED = {"tie_word_embeddings": True}
_ROPE_32 = {"rope_parameters": _LLAMA3_ROPE | {"factor": 32.0}}

KNOWN_SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _llama(32, 4096, 32, 8, 14336),
    "llama-3.1-70b": _llama(80, 8192, 64, 8, 28672),
    "llama-3.2-1b": _llama(16, 2048, 32, 8, 8192, **_TIED, **_ROPE_32),
    "llama-3.2-3b": _llama(28, 3072, 24, 8, 8192, **_TIED, **_ROPE_32),
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, **_TIED, vocab_size=151936),
    "qwen2.5-1.5b": _qwen2(
        28, 1536, 12, 2, 8960, **_TIED, vocab_size=151936, max_position_embeddings=131072
    ),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944),
    "qwen2.5-14b": _qwen2(48, 5120, 40, 8, 13824, rms_norm_eps=1e-5),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, **_TIED),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 6144, **_TIED),
    "qwen3-4b": _qwen3(36, 2560, 32, 8, 9728, **_TIED),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 17408),
    "mistral-7b": _shape("mistral", 32, 4096, 32, 8, 128, 14336)
    | {
        "vocab_size": 32768,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _rope(1e6),
        "sliding_window": None,
    },
}
"""Keyword arguments of the transformers config of each shape, `model_type` among them."""
