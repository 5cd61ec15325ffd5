"""A checkpoint is loaded whole and unchanged, or refused with the name of what is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from tests.engine.test_families import GLM4_MOE, make_config, write_checkpoint
from tests.golden import refused
from tests.unprivileged import unprivileged
from tieredkv.engine import loader, weights
from tieredkv.engine.byte_tokenizer import byte_tokenizer
from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.engine.loader import LoadedModel, find_model
from tieredkv.errors import ModelError

Tensors = dict[str, Tensor]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(checkpoints: Any, tmp_path: Path) -> Path:
    """Return a checkpoint that the test may change."""
    path = tmp_path / "model"
    shutil.copytree(checkpoints("llama"), path)
    return path


def load(folder: Path, **options: Any) -> LoadedModel:
    return find_model(str(folder), device="cpu", **options).load()


def read(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def write(folder: Path, tensors: Tensors) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def refuse(folder: Path, **options: Any) -> None:
    """Expect that a checkpoint is refused, with the text of the test."""
    with refused(ModelError, hide={str(folder): "FOLDER"}):
        load(folder, **options)


def refuse_at_once(folder: Path) -> None:
    """Expect that a checkpoint is refused before anything is allocated, with the test's text."""
    with refused(ModelError, hide={str(folder): "FOLDER"}):
        find_model(str(folder), device="cpu")


def add_biases(tensors: Tensors) -> None:
    for layer in range(2):
        for part in "qkv":
            size = len(tensors[f"model.layers.{layer}.self_attn.{part}_proj.weight"])
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = torch.ones(size)


def add_a_layer(tensors: Tensors) -> None:
    tensors |= {
        key.replace("layers.1", "layers.2"): it.clone()
        for key, it in tensors.items()
        if "layers.1" in key
    }


def lose_a_layer(tensors: Tensors) -> None:
    for key in [key for key in tensors if "layers.1" in key]:
        del tensors[key]


def add_vision(tensors: Tensors) -> None:
    tensors["vision_tower.encoder.layers.0.weight"] = torch.ones(8)
    tensors["multi_modal_projector.linear_1.weight"] = torch.ones(8, 8)
    tensors["multi_modal_projector.linear_2.weight"] = torch.ones(8, 8)


def add_scales(tensors: Tensors) -> None:
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(1)


def make_fp8(tensors: Tensors) -> None:
    tensors[UP] = tensors[UP].to(torch.float8_e4m3fn)


def make_int8(tensors: Tensors) -> None:
    tensors[UP] = (tensors[UP] * 10).to(torch.int8)


def drop(tensors: Tensors) -> None:
    del tensors[UP]


def narrow(tensors: Tensors) -> None:
    tensors[UP] = tensors[UP][:90].clone()


def call_one_twice(tensors: Tensors) -> None:
    tensors["norm.weight"] = torch.full((64,), 5.0)


def put_nan(tensors: Tensors) -> None:
    tensors[UP][3, 3] = float("nan")


def put_infinity(tensors: Tensors) -> None:
    tensors[UP][3, 3] = float("-inf")
    tensors["model.norm.weight"][0] = float("inf")


@pytest.mark.parametrize(
    "change",
    [
        add_biases,
        add_a_layer,
        lose_a_layer,
        add_vision,
        add_scales,
        make_fp8,
        make_int8,
        drop,
        narrow,
        call_one_twice,
    ],
)
def test_tensors_that_are_not_those_of_the_model_are_refused_by_name(
    folder: Path, change: Callable[[Tensors], None]
) -> None:
    tensors = read(folder)
    change(tensors)
    write(folder, tensors)
    refuse_at_once(folder)


@pytest.mark.parametrize("change", [put_nan, put_infinity])
def test_values_that_are_not_finite_are_refused_by_name(
    folder: Path, change: Callable[[Tensors], None]
) -> None:
    tensors = read(folder)
    change(tensors)
    write(folder, tensors)
    refuse(folder)


@pytest.mark.parametrize("change", [add_a_layer, lose_a_layer, add_vision, make_fp8, narrow])
def test_what_the_headers_tell_is_refused_before_anything_is_allocated(
    folder: Path, change: Callable[[Tensors], None]
) -> None:
    tensors = read(folder)
    change(tensors)
    write(folder, tensors)
    with pytest.raises(ModelError):
        find_model(str(folder), device="cpu")


def test_values_beyond_the_dtype_asked_for_are_refused(folder: Path) -> None:
    tensors = read(folder)
    tensors[UP][0, 0] = 1e6
    write(folder, tensors)
    load(folder)
    refuse(folder, dtype="float16")


def test_old_checkpoints_may_hold_buffers_that_transformers_computes(folder: Path) -> None:
    tensors = read(folder)
    write(folder, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    loaded = load(folder)
    assert torch.equal(loaded.model.get_parameter(UP), tensors[UP])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "bool"])
def test_a_config_may_name_a_dtype_in_which_nothing_is_computed(folder: Path, dtype: str) -> None:
    change_config(folder, dtype=dtype)
    assert torch.equal(load(folder).model.get_parameter(UP), read(folder)[UP])


def test_a_checkpoint_may_hold_tensors_that_its_model_class_ignores(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = read(folder)
    write(folder, tensors | {"mtp.proj.weight": torch.ones(8, 8)})
    refuse(folder)
    patterns = [r"^mtp\."]
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", patterns)
    load(folder)


def test_a_layer_of_the_model_is_loaded_though_its_class_ignores_that_number(
    tmp_path: Path,
) -> None:
    """GLM-4.5 has 92 layers and MTP behind them, and MTP of GLM-4.5-Air is its layer 46."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 47, "head_dim": 8}
    routed = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    write_checkpoint(tmp_path, make_config("glm4_moe", GLM4_MOE | sizes | routed))
    tensors = read(tmp_path)
    write(tmp_path, tensors | {"model.layers.92.eh_proj.weight": torch.ones(8, 8)})
    merged = load(tmp_path).model.get_parameter("model.layers.46.mlp.experts.down_proj")
    assert torch.equal(merged[1], tensors["model.layers.46.mlp.experts.1.down_proj.weight"])


def test_a_tied_copy_is_accepted_if_it_is_equal(checkpoints: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints("qwen3"), folder)
    tensors = read(folder)
    assert "lm_head.weight" not in tensors
    first = load(folder)
    write(folder, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    again = load(folder)
    model: Any = again.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, tensors["model.embed_tokens.weight"])
    assert first.fingerprint != again.fingerprint
    write(folder, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    refuse(folder)


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    tensors = read(folder)
    (folder / "model.safetensors").unlink()
    for i in (1, 2):
        save_file(tensors, folder / f"model-{i}.safetensors")
    where = {key: f"model-{1 + i % 2}.safetensors" for i, key in enumerate(tensors)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    refuse(folder)


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    """Return a checkpoint of four experts, whose matrices the model merges."""
    folder = tmp_path / "experts"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    config = AutoConfig.for_model("mixtral", vocab_size=300, **sizes, **heads, sliding_window=None)
    auto: Any = AutoModelForCausalLM
    auto.from_config(config).save_pretrained(folder)
    byte_tokenizer(300, 512).save_pretrained(folder)
    return folder


def test_experts_are_merged_and_an_expert_too_many_or_of_another_shape_is_refused(
    experts: Path,
) -> None:
    tensors = read(experts)
    key = "model.layers.0.block_sparse_moe.experts.{}.w{}.weight".format
    merged = load(experts).model.get_parameter("model.layers.0.mlp.experts.down_proj")
    assert torch.equal(merged[3], tensors[key(3, 2)])
    write(experts, tensors | {key(4, w): tensors[key(3, w)].clone() for w in (1, 2, 3)})
    refuse_at_once(experts)
    write(experts, tensors | {key(3, 1): torch.ones(95, 64)})
    refuse_at_once(experts)
    write(experts, tensors | {key(3, 1): torch.ones(64, 96)})
    refuse(experts)


def test_an_adapter_beside_the_weights_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    shutil.copy(folder / "model.safetensors", folder / "adapter_model.safetensors")
    refuse(folder)


def test_a_folder_with_an_adapter_only_is_refused_as_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/model"}')
    refuse(tmp_path)


def test_other_weight_files_that_a_config_names_are_refused(folder: Path) -> None:
    tensors = read(folder)
    tensors[UP] += 1
    save_file(tensors, folder / "other.safetensors", metadata={"format": "pt"})
    change_config(folder, transformers_weights="other.safetensors")
    refuse(folder)


def test_only_the_files_of_the_fingerprint_are_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apply_an_adapter(*where: object, **how: object) -> Any:
        assert where[0] is None, f"transformers looks for adapters in {where[0]}"
        return None, where[0], {}

    monkeypatch.setattr("transformers.modeling_utils.maybe_load_adapters", apply_an_adapter)
    expected = load(folder)
    shutil.copytree(folder, folder / "checkpoint")
    torch.save({}, folder / "pytorch_model.bin")
    (folder / ".metadata").write_bytes(b"of a distributed checkpoint")
    loaded = load(folder)
    assert loaded.fingerprint == expected.fingerprint
    assert torch.equal(loaded.model.get_parameter(UP), expected.model.get_parameter(UP))


def test_files_that_change_while_they_are_loaded_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_weights = weights.load_weights

    def change_behind(*args: Any, **options: Any) -> Any:
        model = load_weights(*args, **options)
        tensors = read(folder)
        tensors[UP] += 1
        write(folder, tensors)
        return model

    monkeypatch.setattr(loader, "load_weights", change_behind)
    refuse(folder)


def test_transformers_prints_no_report_of_its_own_and_keeps_its_settings(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    theirs: Any = transformers_logging
    verbosity = theirs.get_verbosity()
    tensors = read(folder)
    add_biases(tensors)
    write(folder, tensors)
    refuse(folder)
    assert theirs.get_verbosity() == verbosity
    out, err = capfd.readouterr()
    assert "REPORT" not in out + err


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        ".",
        "..",
    ],
)
def test_a_file_that_may_not_be_read_is_named_with_the_reason(folder: Path, name: str) -> None:
    path = folder / name
    path.resolve().chmod(0)
    try:
        with refused(ModelError, hide={str(folder): "FOLDER"}), unprivileged():
            find_model(str(folder), device="cpu").load()
            load_tokenizer(str(folder))
    finally:
        path.resolve().chmod(0o755)


def test_weights_that_may_not_be_read_are_not_identified(folder: Path) -> None:
    found = find_model(str(folder), device="cpu")
    (folder / "model.safetensors").chmod(0)
    with refused(ModelError, hide={str(folder): "FOLDER"}), unprivileged():
        found.find_fingerprint()


def test_a_name_that_no_folder_can_have_is_refused() -> None:
    for name in ("a" * 5000, "random:" + "a/" * 3000):
        with refused(ModelError):
            find_model(name, device="cpu")
