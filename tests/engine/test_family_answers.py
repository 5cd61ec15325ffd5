"""The engine answers as transformers generates, for checkpoints like the published ones.

Each config is a shrunk copy of a published config.json: the same fields, with smaller sizes. The
prompts are longer than the windows, and are computed in chunks of odd sizes, alone and beside each
other.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from tests.engine.test_families import SMALL, write_checkpoint
from tests.engine.test_text_model import QWEN_VISION, VISION, write_whole
from tieredkv import LLM, SamplingParams
from tieredkv.engine.fused_gemma import FusedGemma
from tieredkv.engine.suitability import TESTED_MODEL_TYPES

CONTEXT_LEN = 256
LENGTHS = (1, 17, 64, 131, 203)
NUM_TOKENS = 16
S, F, L = "sliding_attention", "full_attention", "linear_attention"


def rope(theta: float, rope_type: str = "default", **others: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": theta} | others


GEMMA_4 = {
    "vocab_size_per_layer_input": 300,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 32,
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {F: rope(1e6, "proportional", partial_rotary_factor=0.25), S: rope(1e4)},
    "tie_word_embeddings": True,
}
GEMMA_3 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 32,
    "layer_types": [*[S] * 5, F, S, S],
    "rope_parameters": {F: rope(1e6, "linear", factor=8.0), S: rope(1e4)},
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED_EXPERTS = EXPERTS | {"shared_expert_intermediate_size": 32}
DELTA = {
    "layer_types": [L, L, L, F] * 2,
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": rope(1e7, partial_rotary_factor=0.25),
    "tie_word_embeddings": False,
}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
}
LATENT = ROUTED | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2": (
        "cohere2",
        {
            "layer_types": [S, S, S, F],
            "sliding_window": 48,
            "logit_scale": 0.25,
            "rope_parameters": rope(5e4),
            "head_dim": 16,
        },
    ),
    "deepseek_v2 lite": (
        "deepseek_v2",
        LATENT
        | {
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": False,
            "topk_method": "greedy",
            "rope_parameters": rope(
                1e4,
                "yarn",
                factor=4.0,
                beta_fast=32.0,
                beta_slow=1.0,
                mscale=0.707,
                mscale_all_dim=0.707,
                original_max_position_embeddings=64,
            ),
        },
    ),
    "exaone4": (
        "exaone4",
        {
            "layer_types": [S, S, S, F],
            "sliding_window": 48,
            "sliding_window_pattern": "LLLG",
            "rope_parameters": rope(
                1e6,
                "llama3",
                factor=16.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        },
    ),
    "gemma3": ("gemma3_text", GEMMA_3),
    "gemma4 e2b": (
        "gemma4_text",
        GEMMA_4
        | {
            "layer_types": [S, S, S, F] * 2,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "num_key_value_heads": 1,
        },
    ),
    "gemma4 26b": (
        "gemma4_text",
        GEMMA_4
        | {
            "layer_types": [*[S] * 5, F],
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        ROUTED
        | {
            "attention_bias": True,
            "head_dim": 16,
            "rope_parameters": rope(1e6, partial_rotary_factor=0.5),
            "use_qk_norm": True,
        },
    ),
    "glm4_moe_lite": ("glm4_moe_lite", LATENT | {"rope_parameters": rope(1e6)}),
    "gpt_oss": (
        "gpt_oss",
        {
            "layer_types": [S, F] * 2,
            "sliding_window": 32,
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_parameters": rope(
                1.5e5,
                "yarn",
                factor=32.0,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
                original_max_position_embeddings=64,
            ),
        },
    ),
    "laguna": (
        "laguna",
        EXPERTS
        | {
            "layer_types": [F, S, S, S],
            "sliding_window": 32,
            "head_dim": 16,
            "num_attention_heads_per_layer": [4, 8, 8, 8],
            "gating": "per-head",
            "shared_expert_intermediate_size": 32,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "moe_routed_scaling_factor": 2.5,
            "rope_parameters": {
                F: rope(
                    5e5,
                    "yarn",
                    factor=4.0,
                    original_max_position_embeddings=64,
                    beta_fast=64.0,
                    beta_slow=1.0,
                    attention_factor=1.0,
                    partial_rotary_factor=0.5,
                ),
                S: rope(1e4, partial_rotary_factor=1.0),
            },
        },
    ),
    "mellum": (
        "mellum",
        EXPERTS
        | {
            "layer_types": [S, S, S, F],
            "sliding_window": 32,
            "head_dim": 16,
            "norm_topk_prob": True,
            "rope_parameters": {
                F: rope(5e5, "yarn", factor=4.0, original_max_position_embeddings=64),
                S: rope(1e4),
            },
        },
    ),
    "mistral4": (
        "mistral4",
        LATENT
        | {
            "n_shared_experts": 1,
            "rope_parameters": rope(
                1e4,
                "yarn",
                factor=4.0,
                beta_fast=32.0,
                beta_slow=1.0,
                mscale=1.0,
                mscale_all_dim=1.0,
                original_max_position_embeddings=64,
                llama_4_scaling_beta=0.1,
            ),
        },
    ),
    "mistral in a window": ("mistral", {"sliding_window": 48, "head_dim": 16}),
    "olmo3": (
        "olmo3",
        {
            "layer_types": [S, S, S, F],
            "sliding_window": 48,
            "rope_parameters": {
                F: rope(5e5, "yarn", factor=8.0, original_max_position_embeddings=64),
                S: rope(5e5),
            },
        },
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        {
            "layer_types": [L, L, L, F],
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 24,
            "linear_allow_neg_eigval": True,
            "num_key_value_heads": 4,
        },
    ),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", DELTA | SHARED_EXPERTS),
    "qwen3_next": (
        "qwen3_next",
        DELTA
        | SHARED_EXPERTS
        | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen2": ("qwen2", {}),
    "llama": ("llama", {}),
}
MROPE = rope(5e6, mrope_section=[4, 2, 2], mrope_interleaved=True)
WHOLES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3 in its wrapper": ("gemma3", GEMMA_3 | {"model_type": "gemma3_text"}, VISION),
    "gemma4 e4b in its wrapper": (
        "gemma4",
        TEXTS["gemma4 e2b"][1] | {"model_type": "gemma4_text", "num_key_value_heads": 2},
        VISION,
    ),
    "gemma4 12b in its wrapper": (
        "gemma4_unified",
        GEMMA_4
        | {
            "model_type": "gemma4_unified_text",
            "layer_types": [*[S] * 5, F],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "use_bidirectional_attention": "vision",
        },
        VISION,
    ),
    "qwen3_5 in its wrapper": (
        "qwen3_5",
        DELTA
        | {
            "model_type": "qwen3_5_text",
            "head_dim": 32,
            "rope_parameters": MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
        },
        QWEN_VISION,
    ),
    "qwen3_5_moe in its wrapper": (
        "qwen3_5_moe",
        DELTA
        | SHARED_EXPERTS
        | {
            "model_type": "qwen3_5_moe_text",
            "head_dim": 32,
            "rope_parameters": MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
        },
        QWEN_VISION,
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        EXPERTS | {"model_type": "qwen3_vl_moe_text", "rope_parameters": MROPE, "head_dim": 16},
        QWEN_VISION | {"deepstack_visual_indexes": [0]},
    ),
}


def text_sizes(told: dict[str, Any]) -> dict[str, Any]:
    layers = len(told.get("layer_types", range(3)))
    sizes = {"num_hidden_layers": layers, "max_position_embeddings": CONTEXT_LEN}
    return SMALL | sizes | {"bos_token_id": 1, "eos_token_id": 7} | told


def make_whole(name: str) -> PreTrainedConfig:
    kind, text, vision = WHOLES[name]
    text = text_sizes(text) | {"pad_token_id": 0}
    return AutoConfig.for_model(kind, text_config=text, vision_config=vision)


def prompts() -> list[list[int]]:
    return [random.Random(n).choices(range(10, 256), k=n) for n in LENGTHS]


@torch.inference_mode()
def assert_greedy(model: Any, answers: list[list[int]]) -> None:
    """Verify that transformers finds each token of the answers the likeliest, without a cache."""
    model.set_attn_implementation("eager")
    for prompt, answer in zip(prompts(), answers, strict=True):
        logits = model(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
        assert answer == logits[len(prompt) - 1 :].argmax(-1).tolist(), len(prompt)


def assert_same_answers(name: str, folder: Path, model: Any) -> None:
    """Compare answers in a batch, and of each prompt alone, computed in chunks of odd sizes.

    A checkpoint of Gemma runs in fused steps, and no other by the same class.
    """
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    sizes: dict[str, Any] = {"device_size": "16MiB", "host_size": "16MiB"}
    with LLM(str(folder), device="cpu", max_num_batched_tokens=37, **sizes) as llm:
        together = [answer.token_ids for answer in llm.generate(prompts(), params)]
        alone = [llm.generate(it, params, cache_salt="alone")[0] for it in reversed(prompts())]
        llm.core.cache.check()
        assert isinstance(llm.core.model.fused, FusedGemma) == ("gemma" in name)
    assert [answer.usage.cached_tokens for answer in alone] == [0] * len(alone)
    assert [answer.token_ids for answer in reversed(alone)] == together
    assert len({token for answer in together for token in answer}) > NUM_TOKENS // 2
    assert_greedy(model, together)


@pytest.mark.parametrize("name", TEXTS)
def test_the_engine_answers_as_transformers_generates(name: str, tmp_path: Path) -> None:
    model_type, told = TEXTS[name]
    write_checkpoint(tmp_path, AutoConfig.for_model(model_type, **text_sizes(told)))
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert_same_answers(name, tmp_path, model)


@pytest.mark.parametrize("name", WHOLES)
def test_the_engine_answers_as_the_whole_of_a_multimodal_checkpoint(
    name: str, tmp_path: Path
) -> None:
    model = write_whole(tmp_path, make_whole(name))
    assert_same_answers(name, tmp_path, model)


def test_the_log_names_the_types_that_are_tested_here() -> None:
    types = {model_type for model_type, _ in TEXTS.values()}
    types |= {text["model_type"] for _, text, _ in WHOLES.values()}
    assert types - {"qwen3_vl_moe_text"} == TESTED_MODEL_TYPES, "which is served as qwen3_moe"
