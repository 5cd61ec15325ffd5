"""The text model of a multimodal checkpoint is served, as transformers computes the whole.

The reference is the whole model of transformers, which gets text only.
"""

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedConfig

from tests.engine.logits import run_paged, run_transformers
from tests.engine.test_families import CONTEXT_LEN, FULL, SMALL, draw_weights
from tests.engine.test_quantized import check_meant, quantise
from tests.golden import refused, told
from tieredkv.engine.byte_tokenizer import byte_tokenizer
from tieredkv.engine.llm import LLM
from tieredkv.engine.loader import LoadedModel, find_model
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.engine.text_model import text_config
from tieredkv.engine.weights import check_weights, find_weight_files, load_weights
from tieredkv.errors import ModelError

AUTO: Any = AutoModelForMultimodalLM  # untyped in transformers
TEXT = SMALL | {"bos_token_id": 1, "eos_token_id": 7}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
WHOLES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "gemma3",
        {"model_type": "gemma3_text", "sliding_window": CONTEXT_LEN, "head_dim": 16},
        VISION | {"model_type": "siglip_vision_model"},
    ),
    "llava": (
        "llava",
        {"model_type": "llama", "head_dim": 16},
        VISION | {"model_type": "clip_vision_model", "projection_dim": 16},
    ),
    "mistral3 of mistral": (
        "mistral3",
        {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
        VISION | {"model_type": "pixtral", "head_dim": 16},
    ),
    "mistral3 of ministral3": (
        "mistral3",
        {
            "model_type": "ministral3",
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "llama_4_scaling_beta": 0.5,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
            },
        },
        VISION | {"model_type": "pixtral", "head_dim": 16},
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {"model_type": "qwen2_5_vl_text", "rope_parameters": MROPE, "layer_types": FULL},
        QWEN_VISION,
    ),
    "qwen3_vl": (
        "qwen3_vl",
        {
            "model_type": "qwen3_vl_text",
            "rope_parameters": MROPE | {"mrope_interleaved": True},
            "head_dim": 16,
        },
        QWEN_VISION | {"deepstack_visual_indexes": [0]},
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {
            "model_type": "qwen3_vl_moe_text",
            "rope_parameters": MROPE | {"mrope_interleaved": True},
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        QWEN_VISION | {"deepstack_visual_indexes": [0]},
    ),
    "smolvlm": (
        "smolvlm",
        {"model_type": "llama", "head_dim": 16},
        VISION | {"model_type": "smolvlm_vision"},
    ),
}


def whole_config(name: str) -> PreTrainedConfig:
    kind, text, vision = WHOLES[name]
    table = {"text_config": TEXT | text, "vision_config": vision}
    return AutoConfig.for_model(kind, **table, tie_word_embeddings=False)


def write_whole(folder: Path, config: PreTrainedConfig) -> Any:
    """Write a multimodal checkpoint with random values everywhere, and return its model."""
    with torch.random.fork_rng():
        model = AUTO.from_config(config, dtype=torch.float32).eval()
    draw_weights(model)
    model.save_pretrained(folder)
    byte_tokenizer(300, CONTEXT_LEN).save_pretrained(folder)
    return model


def load(folder: Path) -> LoadedModel:
    return find_model(str(folder), device="cpu").load()


def read(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("name", WHOLES)
def test_the_text_model_gives_the_logits_of_the_whole(name: str, tmp_path: Path) -> None:
    whole, ids = (
        write_whole(tmp_path, whole_config(name)),
        random.Random(7).choices(range(300), k=128),
    )
    expected, loaded = run_transformers(whole, ids), load(tmp_path)
    assert (run_paged(loaded, ids) - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (loaded.vocab_size, loaded.max_model_len) == (300, CONTEXT_LEN)
    assert loaded.layers == [(4, 2, 16, index, None, None) for index in range(2)]


def test_the_engine_answers_as_transformers_generates(tmp_path: Path) -> None:
    whole, ids = write_whole(tmp_path, whole_config("mistral3 of ministral3")), [*range(20, 90)]
    expected = whole.generate(
        torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(str(tmp_path), device="cpu", host_size="1MiB") as llm:
        [answer] = llm.generate(ids, params)
    assert answer.token_ids == expected[0, len(ids) :].tolist()
    assert len({*answer.token_ids}) > 2


NEW_NAMES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}


def rename(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """Rename the tensors that begin with one of some names; each name must begin one."""
    for old, new in names.items():
        assert any(key.startswith(old) for key in tensors), old
        renamed = {key: new + key.removeprefix(old) for key in tensors if key.startswith(old)}
        tensors = {renamed.get(key, key): it for key, it in tensors.items()}
    return tensors


def test_tensors_may_have_the_names_of_the_class_or_those_of_earlier_versions(
    tmp_path: Path,
) -> None:
    write_whole(tmp_path, whole_config("mistral3 of mistral"))
    expected, tensors = load(tmp_path).model.state_dict(), read(tmp_path)
    write(tmp_path, rename(tensors, NEW_NAMES))
    found = load(tmp_path).model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_text_that_is_named_as_a_text_model_does_is_the_same_by_the_names_of_the_class(
    tmp_path: Path,
) -> None:
    write_whole(tmp_path, whole_config("qwen2_5_vl"))
    expected, tensors = load(tmp_path).model.state_dict(), read(tmp_path)
    names = {"model.": "model.language_model.", "visual.": "model.visual."}
    write(tmp_path, rename(tensors, names))
    found = load(tmp_path).model.state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_experts_may_be_stored_with_inputs_before_outputs(tmp_path: Path) -> None:
    write_whole(tmp_path, whole_config("qwen3_vl_moe"))
    expected, tensors = load(tmp_path).model.state_dict(), read(tmp_path)
    turned = {k: it.transpose(1, 2).contiguous() for k, it in tensors.items() if it.ndim == 3}
    assert len([key for key in turned if "experts" in key]) == 4
    write(tmp_path, tensors | turned)
    found = load(tmp_path).model.state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_square_weights_of_experts_are_stored_as_the_others_of_their_layer(tmp_path: Path) -> None:
    kind, text, vision = WHOLES["qwen3_vl_moe"]
    table = {"text_config": TEXT | text | {"moe_intermediate_size": 32}, "vision_config": vision}
    write_whole(tmp_path, AutoConfig.for_model(kind, **table))
    expected, tensors = load(tmp_path).model.state_dict(), read(tmp_path)
    turned = {k: it.transpose(1, 2).contiguous() for k, it in tensors.items() if "experts" in k}
    assert {it.shape[1:] for it in turned.values()} == {(64, 64), (32, 64)}
    write(tmp_path, tensors | turned)
    found = load(tmp_path).model.state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_the_log_names_the_groups_of_tensors_that_are_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_whole(tmp_path, whole_config("gemma3"))
    with caplog.at_level(logging.INFO, "tieredkv.engine.weights"):
        load(tmp_path)
    [record] = [it for it in caplog.records if it.name == "tieredkv.engine.weights"]
    told(record.getMessage(), hide={str(tmp_path): "FOLDER"})


def test_only_what_stands_beside_the_text_model_is_left_out(tmp_path: Path) -> None:
    write_whole(tmp_path, whole_config("gemma3"))
    write(tmp_path, read(tmp_path) | {"language_model.model.extra.weight": torch.ones(8)})
    with refused(ModelError, hide={str(tmp_path): "FOLDER"}):
        load(tmp_path)
    write(tmp_path, {k: it for k, it in read(tmp_path).items() if "extra" not in k})
    tensors = read(tmp_path)
    write(
        tmp_path, tensors | {"model.norm.weight": tensors["language_model.model.norm.weight"] + 1}
    )
    with refused(ModelError, hide={str(tmp_path): "FOLDER"}):
        find_model(str(tmp_path), device="cpu")


def test_a_missing_tensor_of_the_text_is_refused(tmp_path: Path) -> None:
    write_whole(tmp_path, whole_config("llava"))
    tensors = read(tmp_path)
    del tensors["language_model.model.layers.1.mlp.up_proj.weight"]
    write(tmp_path, tensors)
    with refused(ModelError, hide={str(tmp_path): "FOLDER"}):
        load(tmp_path)


def test_a_stored_output_layer_is_used_whatever_the_configs_say(tmp_path: Path) -> None:
    write_whole(tmp_path, whole_config("mistral3 of mistral"))
    change_config(tmp_path, tie_word_embeddings=True)
    tensors = read(tmp_path)
    model: Any = load(tmp_path).model
    assert torch.equal(model.lm_head.weight, tensors["language_model.lm_head.weight"])
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    write(tmp_path, {key: it for key, it in tensors.items() if "lm_head" not in key})
    model = load(tmp_path).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    change_config(tmp_path, tie_word_embeddings=False)
    with refused(ModelError, hide={str(tmp_path): "FOLDER"}):
        load(tmp_path)


def test_fp8_with_a_scale_a_tensor_under_a_wrapper(tmp_path: Path) -> None:
    write_whole(tmp_path, whole_config("mistral3 of ministral3"))
    tensors, meant = read(tmp_path), {}
    for key, weight in [*tensors.items()]:
        if key.startswith("language_model.model.layers") and key.endswith("_proj.weight"):
            scale = weight.abs().amax() / 448
            tensors[key] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[f"{key}_scale_inv"] = scale.bfloat16()
            tensors[key.replace(".weight", ".activation_scale")] = torch.ones(())
            means = tensors[key].float() * scale.bfloat16().float()
            meant[key.removeprefix("language_model.")] = means
    write(tmp_path, tensors)
    quantized = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    change_config(tmp_path, quantization_config=quantized)
    assert len(meant) == 14
    check_meant(load(tmp_path).model, meant)


def test_fp8_experts_may_be_stored_with_inputs_before_outputs(tmp_path: Path) -> None:
    write_whole(tmp_path, whole_config("qwen3_vl_moe"))
    tensors, meant = read(tmp_path), {}
    for key in [key for key in tensors if ".experts." in key]:
        turned = tensors[key].transpose(1, 2).contiguous()
        tensors[key], scales, means = quantise(turned, (16, 24))
        tensors[f"{key}_scale_inv"] = scales
        meant[key.replace("model.language_model.", "model.")] = means.transpose(1, 2)
    write(tmp_path, tensors)
    change_config(
        tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 24]}
    )
    assert len(meant) == 4
    check_meant(load(tmp_path).model, meant)


def load_text(folder: Path) -> Any:
    """Load a text model whose attention is not served yet."""
    whole = AutoConfig.from_pretrained(folder)
    config, files = text_config("m", whole), find_weight_files("m", folder)
    check_weights("m", config, files, whole=whole, dtype=torch.float32)
    where = torch.device("cpu")
    return load_weights("m", config, files, whole=whole, dtype=torch.float32, device=where)


def test_a_config_may_name_a_dtype_in_which_nothing_is_computed(tmp_path: Path) -> None:
    expected = write_whole(tmp_path, whole_config("qwen3_vl")).state_dict()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float8_e4m3fn"}))
    up = "layers.0.mlp.up_proj.weight"
    found = load(tmp_path).model.get_parameter(f"model.{up}")
    assert torch.equal(found, expected[f"model.language_model.{up}"])


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_qwen3_5_loads_whole_without_vision_and_mtp(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    text = TEXT | {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
    text |= {"model_type": f"{kind}_text"} | experts | {"shared_expert_intermediate_size": 32}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=QWEN_VISION)
    expected = write_whole(tmp_path, config).state_dict()
    write(
        tmp_path,
        read(tmp_path) | {"mtp.fc.weight": torch.ones(8), "mtp.norm.weight": torch.ones(8)},
    )
    with caplog.at_level(logging.INFO, "tieredkv.engine.weights"):
        model = load_text(tmp_path)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[key.replace("model.", "model.language_model.")]), key
    [record] = [it for it in caplog.records if it.name == "tieredkv.engine.weights"]
    told(record.getMessage())


@pytest.mark.parametrize(
    "kind", ["clip", "mllama", "glm4v", "florence2", "musicgen", "colpali", "paligemma"]
)
def test_a_model_without_a_text_model_to_serve_is_refused(kind: str, tmp_path: Path) -> None:
    config: Callable[..., Any] = AutoConfig.for_model
    sub = {"text_encoder": {"model_type": "t5"}, "decoder": {}} if kind == "musicgen" else {}
    if kind == "musicgen":
        sub |= {"audio_encoder": {"model_type": "encodec"}}
    (tmp_path / "config.json").write_text(json.dumps(config(kind, **sub).to_dict(), default=str))
    with refused(ModelError, hide={str(tmp_path): "FOLDER"}):
        find_model(f"random:{tmp_path}", device="cpu")


def test_random_weights_are_drawn_for_the_text_of_a_multimodal_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(whole_config("qwen3_vl").to_dict()))
    loaded = find_model(f"random:{tmp_path}", device="cpu").load()
    assert loaded.layers == [(4, 2, 16, index, None, None) for index in range(2)]
    assert not [key for key in loaded.model.state_dict() if "visual" in key]
