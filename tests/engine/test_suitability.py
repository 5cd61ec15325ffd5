"""Models that cannot be paged are refused by their config, with the reason."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.golden import refused
from tieredkv.engine.attention import AttentionLayer, attention_layers
from tieredkv.engine.checkpoint import SHAPES
from tieredkv.engine.loader import find_model
from tieredkv.engine.suitability import check_config, probe_attention
from tieredkv.errors import ModelError
from tieredkv.kernels.partition import Latent
from tieredkv.types import StateShape

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4}
FULL = ["full_attention", "full_attention"]


def examine(
    model_type: str, changes: dict[str, Any], context_len: int = 256
) -> Sequence[AttentionLayer]:
    config = AutoConfig.for_model(model_type, **(SMALL | changes))
    check_config("some/model", config, context_len)
    return [*attention_layers(probe_attention("some/model", config, context_len)).values()]


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mistral", {"sliding_window": 0}),
        ("gemma3_text", {"sliding_window": None}),
        ("gemma3_text", {"query_pre_attn_scalar": -1}),
        ("llama", {"max_position_embeddings": 0}),
        ("qwen3_moe", {"num_experts_per_tok": 0}),
        ("gemma2", {"layer_types": FULL}),
        ("deepseek_v32", {"num_key_value_heads": 4}),
        ("qwen3_next", {}),
        ("nemotron_h", {}),
        ("falcon_h1", {}),
        ("llama4_text", {"attention_chunk_size": 64}),
        ("llama", {"hidden_act": "sliu"}),
        ("gemma", {"hidden_activation": "nope"}),
        ("t5", {}),
        ("bloom", {}),
        ("stablelm", {}),
        ("diffllama", {}),
        ("bert", {}),
        ("vit", {}),
        ("lfm2_moe", {}),
        ("lfm2_moe", {"layer_types": ["conv", "full_attention"]}),
        ("deepseek_v3", {"num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 3}),
        ("gemma3_text", {"final_logit_softcapping": 0.0}),
        ("gemma3_text", {"rope_parameters": {"full_attention": LINEAR | {"factor": 0}}}),
        ("gemma4_text", {"enable_moe_block": True, "top_k_experts": 0}),
        ("llama", {"num_hidden_layers": 0}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}),
        ("llama", {"rope_parameters": LINEAR | {"factor": -2.0}}),
        ("mistral", {"sliding_window": 48, "per_layer_config": {1: {"sliding_window": 8}}}),
        ("llama", {"rms_norm_eps": -1e-6}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 8}),
        ("qwen3_next", {"rope_parameters": LINEAR | {"factor": 2.0, "partial_rotary_factor": 0.0}}),
    ],
)
def test_a_model_that_cannot_be_paged_is_refused_with_its_reason(
    model_type: str, changes: dict[str, Any]
) -> None:
    with refused(ModelError):
        examine(model_type, changes)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 4096}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        ("mixtral", {"sliding_window": None}),
    ],
)
def test_full_attention_is_accepted_however_the_config_says_it(
    model_type: str, changes: dict[str, Any]
) -> None:
    examine(model_type, changes)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mistral", {}),
        ("starcoder2", {}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
        ("gemma3_text", {}),
        ("cohere2", {}),
    ],
)
def test_a_window_at_least_as_long_as_the_context_is_no_window(
    model_type: str, changes: dict[str, Any]
) -> None:
    for window, context_len in ((256, 256), (100, 100)):
        layers = examine(model_type, changes | {"sliding_window": window}, context_len)
        assert {layer.window for layer in layers} == {None}
    for window, context_len in ((255, 256), (100, 101)):
        layers = examine(model_type, changes | {"sliding_window": window}, context_len)
        assert window in {layer.window for layer in layers} <= {None, window}


def test_text_is_causal_where_only_images_are_not() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    ropes = {"full_attention": rope, "sliding_attention": rope}
    for told, is_accepted in (("vision", True), ("all", False)):
        sizes = {"rope_parameters": ropes, "layer_types": FULL}
        changes = SMALL | sizes | {"use_bidirectional_attention": told}
        config = AutoConfig.for_model("gemma4_text", **changes)
        with nullcontext() if is_accepted else refused(ModelError):
            check_config("some/model", config, 256)


@pytest.mark.parametrize("shape", sorted(file.stem for file in SHAPES.glob("*.json")))
def test_every_known_shape_can_be_served(shape: str) -> None:
    table = json.loads((SHAPES / f"{shape}.json").read_text())
    config = AutoConfig.from_pretrained(SHAPES / f"{shape}.json")
    check_config(shape, config, 4096)
    layers = probe_attention(shape, config, 4096)
    found = [*attention_layers(layers).values()]
    assert len(layers) == table["num_hidden_layers"]
    every = table.get("full_attention_interval", 1)
    assert [layer.source for layer in found] == list(range(every - 1, len(layers), every))
    if every > 1:
        heads, key_heads = table["linear_num_value_heads"], table["linear_num_key_heads"]
        assert {*layers} - {*found} == {StateShape(heads, key_heads, 128, 128, 4)}
    if rank := table.get("kv_lora_rank"):
        rope_dim, key_dim, value_dim = (
            table[name] for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        )
        kind = table["num_attention_heads"], 1, rank + rope_dim, None
        latent = Latent(rank, rope_dim, key_dim, value_dim)
        assert {(*layer[:3], *layer[4:]) for layer in found} == {(*kind, latent)}
        return
    heads, kv_heads, head_dim = (
        table[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    whole_heads = table.get("num_global_key_value_heads", kv_heads)
    whole = heads, whole_heads, table.get("global_head_dim", head_dim)
    window = table.get("sliding_window")
    kinds = {(heads, kv_heads, head_dim, window), (*whole, None)} if window else {(*whole, None)}
    assert {(*layer[:3], layer.window) for layer in found} == kinds


def test_the_probe_allocates_no_weights() -> None:
    huge = {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 100}
    config = AutoConfig.for_model("llama", **(SMALL | huge), head_dim=128)
    found = probe_attention("huge", config, 256)
    assert found == [(4, 2, 128, index, None, None) for index in range(100)]


def test_the_probe_leaves_the_config_as_it_was() -> None:
    config = find_model("tiny-random").config
    before = config.to_dict()
    probe_attention("tiny", config, 256)
    assert config.to_dict() == before


def test_a_layer_with_a_window_that_no_page_can_hold_is_refused(tmp_path: Path) -> None:
    sizes = {"head_dim": 64, "global_head_dim": 16, "num_global_key_value_heads": 1}
    changes = {"sliding_window": 16, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
    config = AutoConfig.for_model("gemma4_text", **(SMALL | sizes | changes | layers))
    config.save_pretrained(tmp_path)
    with refused(ModelError, hide={str(tmp_path): "FOLDER"}):
        find_model(f"random:{tmp_path}", device="cpu")
