"""Every accepted family gives the logits of transformers' own code; all others are refused.

The reference is the plain model of transformers with eager attention, which builds its own masks.
The runner computes the same weights in chunks and single tokens over scattered blocks.
"""

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.engine.harness import BLOCK_SIZE
from tests.engine.logits import run_paged, run_transformers
from tieredkv.engine.attention import own_layers
from tieredkv.engine.byte_tokenizer import byte_tokenizer
from tieredkv.engine.fused_gemma import FusedGemma
from tieredkv.engine.fused_hybrid import FusedHybrid
from tieredkv.engine.loader import LoadedModel, find_model
from tieredkv.engine.suitability import check_config, probe_attention
from tieredkv.engine.text_model import text_config
from tieredkv.errors import ModelError
from tieredkv.types import KVSpec

CONTEXT_LEN = 128
SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": CONTEXT_LEN,
    "pad_token_id": None,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.0,
}
FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FULL = ["full_attention", "full_attention"]
MIXED = ["sliding_attention", "full_attention"]
GEMMA4 = {
    "sliding_window": 16,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 300,
}
GPT_OSS = {
    "sliding_window": 32,
    "head_dim": 16,
    "swiglu_limit": 1.0,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": MIXED,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
GLM4_MOE = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
}
DELTA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
}
DELTA_EXPERTS = FEW_EXPERTS | {"shared_expert_intermediate_size": 32, "norm_topk_prob": True}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
SHORT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.5,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
LONG_ROPE = SHORT_ROPE | {"factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {"attention_bias": True, "mlp_bias": True}),
    "cohere": ("cohere", {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": ("cohere2", {"sliding_window": 20, "layer_types": MIXED}),
    "cohere2 in a wide window": ("cohere2", {"sliding_window": CONTEXT_LEN}),
    "deepseek_v2": (
        "deepseek_v2",
        LATENT
        | {
            "q_lora_rank": None,
            "n_group": None,
            "topk_group": None,
            "first_k_dense_replace": 1,
            "rope_parameters": LONG_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        LATENT | {"first_k_dense_replace": 1, "rope_parameters": LONG_ROPE | {"mscale_all_dim": 1}},
    ),
    "deepseek_v3 without pairs": (
        "deepseek_v3",
        LATENT | {"first_k_dense_replace": 2, "rope_interleave": False, "q_lora_rank": None},
    ),
    "ernie4_5": ("ernie4_5", {"use_bias": True}),
    "exaone4": ("exaone4", {"sliding_window": 33, "layer_types": MIXED}),
    "exaone4 in a wide window": ("exaone4", {"sliding_window": CONTEXT_LEN}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2 without soft caps": (
        "gemma2",
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 50.0,
            "query_pre_attn_scalar": 9,
            "sliding_window": CONTEXT_LEN,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 16, "query_pre_attn_scalar": 9, "num_hidden_layers": 6},
    ),
    "gemma3 in a wide window": (
        "gemma3_text",
        {
            "sliding_window": CONTEXT_LEN,
            "query_pre_attn_scalar": 9,
            "final_logit_softcapping": 50.0,
            "num_hidden_layers": 6,
        },
    ),
    "gemma4": ("gemma4_text", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4 with experts": (
        "gemma4_text",
        GEMMA4
        | {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma4 with shared keys": (
        "gemma4_text",
        GEMMA4
        | {"layer_types": MIXED * 3, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 8},
    ),
    "glm": ("glm", {"attention_bias": True}),
    "glm4": ("glm4", {"attention_bias": True}),
    "glm4_moe_lite": ("glm4_moe_lite", LATENT),
    "glm4_moe_lite with biases": ("glm4_moe_lite", LATENT | {"attention_bias": True}),
    "glm4_moe": ("glm4_moe", GLM4_MOE),
    "glm4_moe in groups": ("glm4_moe", GLM4_MOE | {"n_group": 2}),
    "gpt2": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2 unscaled": ("gpt2", {"scale_attn_weights": False}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_neox": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss in one window": ("gpt_oss", GPT_OSS | {"layer_types": ["sliding_attention"] * 2}),
    "gpt_oss without windows": ("gpt_oss", GPT_OSS | {"layer_types": FULL}),
    "granite": ("granite", MULTIPLIERS),
    "granitemoe": ("granitemoe", MULTIPLIERS),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 16}),
    "laguna": (
        "laguna",
        FEW_EXPERTS
        | {
            "sliding_window": 16,
            "layer_types": MIXED,
            "head_dim": 16,
            "num_attention_heads_per_layer": [8, 4],
            "shared_expert_intermediate_size": 32,
        },
    ),
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama with half of its rope": ("llama", {"rope_parameters": PARTIAL_ROPE}),
    "llama by gelu": ("llama", {"hidden_act": "gelu", "head_dim": 24}),
    "mellum": (
        "mellum",
        FEW_EXPERTS | {"sliding_window": 16, "layer_types": MIXED, "head_dim": 16},
    ),
    "ministral3": ("ministral3", {"rope_parameters": SHORT_ROPE, "head_dim": 16}),
    "minicpm3": ("minicpm3", LATENT),
    "mistral": ("mistral", {"sliding_window": 24}),
    "mistral in a wide window": ("mistral", {"sliding_window": CONTEXT_LEN}),
    "mistral4": ("mistral4", LATENT | {"rope_parameters": LONG_ROPE}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "nanochat": ("nanochat", {"final_logit_softcapping": 2.0}),
    "olmo": ("olmo", {"clip_qkv": 0.5}),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "olmo3": ("olmo3", {"sliding_window": 17, "layer_types": MIXED}),
    "olmo3 in a wide window": ("olmo3", {"sliding_window": CONTEXT_LEN}),
    "olmoe": ("olmoe", {"clip_qkv": 0.5, "norm_topk_prob": True}),
    "olmo_hybrid": ("olmo_hybrid", DELTA | {"linear_allow_neg_eigval": True}),
    "opt": ("opt", {}),
    "phi": ("phi", {"qk_layernorm": True}),
    "phi3": ("phi3", {"rope_parameters": PARTIAL_ROPE, "sliding_window": CONTEXT_LEN}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 1}),
    "qwen2 in a wide window": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": CONTEXT_LEN},
    ),
    "qwen2_moe": ("qwen2_moe", FEW_EXPERTS | {"shared_expert_intermediate_size": 48}),
    "qwen3_5": ("qwen3_5_text", DELTA | {"head_dim": 16}),
    "qwen3_5 with experts": ("qwen3_5_moe_text", DELTA | DELTA_EXPERTS | {"head_dim": 16}),
    "qwen3_next": ("qwen3_next", DELTA | DELTA_EXPERTS | {"head_dim": 16}),
    "qwen3_next with a value head for each key head": (
        "qwen3_next",
        DELTA | DELTA_EXPERTS | {"head_dim": 16, "linear_num_value_heads": 2},
    ),
    "qwen3": ("qwen3", {"attention_bias": True, "head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", FEW_EXPERTS | {"norm_topk_prob": True, "head_dim": 16}),
    "seed_oss": ("seed_oss", {"attention_out_bias": True, "head_dim": 16}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "starcoder2": ("starcoder2", {"use_bias": True}),
}


def make_config(model_type: str, changes: dict[str, Any]) -> PreTrainedConfig:
    return AutoConfig.for_model(model_type, **(SMALL | changes))


def draw_weights(model: torch.nn.Module) -> None:
    """Draw random values everywhere, by which no part of a model goes unnoticed."""
    generator = torch.Generator().manual_seed(5)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            mean, std = (0.0, 0.2) if tensor.ndim > 1 else (0.7, 0.3)
            tensor.normal_(mean, std, generator=generator)
            if name.endswith("A_log"):  # a state forgets 0.1 to 5 % with each token
                tensor.uniform_(-7.0, -3.0, generator=generator)


def write_checkpoint(folder: Path, config: PreTrainedConfig) -> None:
    """Write a checkpoint with random values everywhere: weights, norms, biases and buffers."""
    auto: Any = AutoModelForCausalLM
    with torch.random.fork_rng():
        model = auto.from_config(config, dtype=torch.float32)
    draw_weights(model)
    model.save_pretrained(folder)
    byte_tokenizer(300, CONTEXT_LEN).save_pretrained(folder)


def assert_equal_logits(folder: Path) -> LoadedModel:
    """Compare the logits of the engine and of transformers, and return the engine's model."""
    ids = random.Random(7).choices(range(300), k=CONTEXT_LEN)
    auto: Any = AutoModelForCausalLM
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = auto.from_pretrained(folder, **eager, dtype=torch.float32).eval()
    expected = run_transformers(model, ids)
    loaded = find_model(str(folder), device="cpu").load()
    assert (run_paged(loaded, ids) - expected).abs().max() <= 1e-4 * expected.abs().max()
    return loaded


@pytest.mark.parametrize("name", FAMILIES)
def test_an_accepted_family_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_config(*FAMILIES[name]))
    loaded = assert_equal_logits(tmp_path)
    assert isinstance(loaded.fused, FusedGemma) == name.startswith(("gemma3", "gemma4"))
    assert isinstance(loaded.fused, FusedHybrid) == name.startswith(("qwen3_5", "qwen3_next"))


@pytest.mark.parametrize(
    ("name", "num_page_kinds"),
    [
        ("gemma3", 6),
        ("gemma4", 6),
        ("gemma4 with shared keys", 2),
        ("gpt_oss", 2),
        ("gpt_oss in one window", 1),
        ("mistral", 1),
        ("qwen2", 2),
    ],
)
def test_layers_with_a_window_may_have_pages_of_their_own_which_end_with_it(
    name: str, num_page_kinds: int, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, make_config(*FAMILIES[name]))
    loaded = find_model(str(tmp_path), device="cpu").load()
    spec = KVSpec(layers=own_layers(loaded.layers), dtype="float32", block_size=BLOCK_SIZE)
    assert len(spec.page_kinds) == num_page_kinds
    ids = random.Random(7).choices(range(300), k=CONTEXT_LEN)
    torch.testing.assert_close(run_paged(loaded, ids, spec), run_paged(loaded, ids))


@pytest.mark.parametrize(
    "name",
    [
        *("cohere2", "exaone4", "gemma3", "gemma4", "gemma4 with shared keys"),
        *("gpt_oss", "laguna", "mellum", "mistral", "olmo3"),
    ],
)
def test_a_window_that_is_off_by_one_or_a_sink_that_is_lost_would_be_seen(
    name: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, make_config(*FAMILIES[name]))
    loaded = find_model(str(tmp_path), device="cpu").load()
    ids = random.Random(7).choices(range(300), k=CONTEXT_LEN)
    expected = run_paged(loaded, ids)
    least = 1e-3 * expected.abs().max()
    for change in (-1, 1):
        wrong = [it._replace(window=(it.window or 1000) + change) for it in loaded.attention]
        logits = run_paged(replace(loaded, layers=wrong), ids)
        assert not (logits - expected).abs().max() <= least
    for name, parameter in loaded.model.named_parameters():
        if name.endswith("sinks"):
            parameter.copy_(parameter.roll(1))
            assert (run_paged(loaded, ids) - expected).abs().max() > least


def accepted(model_type: str) -> list[PreTrainedConfig]:
    """Return the configs of a type that are accepted, among its default and some changed ones."""
    configs = []
    for changes in ({}, {"layer_types": FULL}, {"sliding_window": CONTEXT_LEN}, {"head_dim": 16}):
        try:
            config = text_config(model_type, make_config(model_type, changes))
            if hasattr(config, "kv_lora_rank"):  # all heads have keys of their own, once expanded
                config.num_key_value_heads = config.num_attention_heads
            check_config(model_type, config, CONTEXT_LEN)
            probe_attention(model_type, copy.deepcopy(config), CONTEXT_LEN)
        except Exception:  # a type may raise any error for a field it does not know
            continue
        configs.append(config)
    return configs


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_no_family_that_transformers_offers_is_accepted_and_differs(
    model_type: str, tmp_path: Path
) -> None:
    auto: Any = AutoModelForCausalLM
    for number, config in enumerate(accepted(model_type)):
        with torch.device("meta"):
            model = auto.from_config(copy.deepcopy(config))
        if sum(parameter.numel() for parameter in model.parameters()) > 3e7:
            pytest.skip("its other sizes are too large by default")
        folder = tmp_path / str(number)
        write_checkpoint(folder, config)
        assert_equal_logits(folder)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gemma2", {"attn_logit_softcapping": 5.0, "sliding_window": CONTEXT_LEN}),
        ("gemma", {"use_bidirectional_attention": True}),
    ],
)
def test_a_config_that_changes_attention_is_refused(
    model_type: str, changes: dict[str, Any]
) -> None:
    config = make_config(model_type, changes)
    with pytest.raises(ModelError):
        check_config(model_type, config, CONTEXT_LEN)
        probe_attention(model_type, config, CONTEXT_LEN)
