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

from tests.unprivileged import unprivileged
from tieredkv.engine import loader, weights
from tieredkv.engine.byte_tokenizer import byte_tokenizer
from tieredkv.engine.checkpoint import load_tokenizer
from tieredkv.engine.loader import LoadedModel, find_model
from tieredkv.errors import ModelError

Tensors = dict[str, Tensor]
UP = "model.layers.1.mlp.up_proj.weight"
NO_FIT = "its weights do not fit its config: "


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


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder, **options)
    message = str(caught.value)
    assert message.startswith(f"model `{folder}` cannot be served: ")
    assert "\n" not in message
    assert "report" not in message
    return message.removeprefix(f"model `{folder}` cannot be served: ")


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
    ("change", "reason"),
    [
        (
            add_biases,
            f"{NO_FIT}the model that config.json describes does not use 6 tensors "
            "(`model.layers.0.self_attn.k_proj.bias`, `model.layers.0.self_attn.q_proj.bias`, "
            "`model.layers.0.self_attn.v_proj.bias`, …)",
        ),
        (
            add_a_layer,
            f"{NO_FIT}the model that config.json describes does not use 9 tensors "
            "(`model.layers.2.input_layernorm.weight`, ",
        ),
        (
            add_scales,
            f"{NO_FIT}the model that config.json describes does not use tensor "
            "`model.layers.0.mlp.up_proj.weight_scale`",
        ),
        (make_fp8, f"its weights are quantized, which is not supported yet: tensor `{UP}` is "),
        (make_int8, f"its weights are quantized, which is not supported yet: tensor `{UP}` is "),
        (drop, f"{NO_FIT}tensor `{UP}` is missing from its weight files"),
        (narrow, f"{NO_FIT}tensor `{UP}` has the shape (90, 64), but config.json says (96, 64)"),
        (call_one_twice, "the model knows tensor `norm.weight` by other names"),
        (put_nan, f"tensor `{UP}` holds NaN or infinity in float32"),
        (put_infinity, f"tensors `{UP}`, `model.norm.weight` hold NaN or infinity in float32"),
    ],
)
def test_tensors_that_are_not_those_of_the_model_are_refused_by_name(
    folder: Path, change: Callable[[Tensors], None], reason: str
) -> None:
    tensors = read(folder)
    change(tensors)
    write(folder, tensors)
    assert reason in refusal(folder)


def test_values_beyond_the_dtype_asked_for_are_refused(folder: Path) -> None:
    tensors = read(folder)
    tensors[UP][0, 0] = 1e6
    write(folder, tensors)
    load(folder)
    assert refusal(folder, dtype="float16") == f"tensor `{UP}` holds NaN or infinity in float16"


def test_old_checkpoints_may_hold_buffers_that_transformers_computes(folder: Path) -> None:
    tensors = read(folder)
    write(folder, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    loaded = load(folder)
    assert torch.equal(loaded.model.get_parameter(UP), tensors[UP])


def test_a_checkpoint_may_hold_tensors_that_its_model_class_ignores(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = read(folder)
    write(folder, tensors | {"mtp.proj.weight": torch.ones(8, 8)})
    assert "`mtp.proj.weight`" in refusal(folder)
    patterns = [r"^mtp\."]
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", patterns)
    load(folder)


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
    expected = f"{NO_FIT}tensor `lm_head.weight` is tied to the input embeddings by config.json, "
    assert refusal(folder) == f"{expected}but stored with other values"


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    tensors = read(folder)
    (folder / "model.safetensors").unlink()
    for i in (1, 2):
        save_file(tensors, folder / f"model-{i}.safetensors")
    where = {key: f"model-{1 + i % 2}.safetensors" for i, key in enumerate(tensors)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert refusal(folder) == "tensor `lm_head.weight` is in two of its weight files"


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
    assert "has the shape (5, 64, 96), but config.json says (4, 64, 96)" in refusal(experts)
    write(experts, tensors | {key(3, 1): torch.ones(95, 64)})
    assert refusal(experts) == (
        "its weights do not fit its config: tensors that the model merges, such as those of its "
        "experts, differ in shape"
    )


def test_an_adapter_beside_the_weights_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    shutil.copy(folder / "model.safetensors", folder / "adapter_model.safetensors")
    told = refusal(folder)
    assert f"an adapter lies beside it (`{folder}/adapter_config.json`)" in told
    assert "merge it into the weights" in told


def test_a_folder_with_an_adapter_only_is_refused_as_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/model"}')
    assert "an adapter" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("file", "field"),
    [
        ("hf_quant_config.json", None),
        ("quantize_config.json", None),
        (None, "compression_config"),
        (None, "quantization_config"),
    ],
)
def test_quantized_weights_are_refused_wherever_it_is_said(
    folder: Path, file: str | None, field: str | None
) -> None:
    if file is not None:
        (folder / file).write_text('{"quantization": {"quant_algo": "FP8"}}')
    if field is not None:
        change_config(folder, **{field: {"quant_method": "fp8", "format": "float-quantized"}})
    told = refusal(folder)
    assert "its weights are quantized, which is not supported yet" in told
    assert str(file or field) in told


def test_other_weight_files_that_a_config_names_are_refused(folder: Path) -> None:
    tensors = read(folder)
    tensors[UP] += 1
    save_file(tensors, folder / "other.safetensors", metadata={"format": "pt"})
    change_config(folder, transformers_weights="other.safetensors")
    assert "`transformers_weights` = other.safetensors" in refusal(folder)


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
    assert refusal(folder) == "its weight files changed while they were loaded; load it again"


def test_transformers_prints_no_report_of_its_own_and_keeps_its_settings(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    theirs: Any = transformers_logging
    verbosity = theirs.get_verbosity()
    tensors = read(folder)
    add_biases(tensors)
    write(folder, tensors)
    refusal(folder)
    assert theirs.get_verbosity() == verbosity
    out, err = capfd.readouterr()
    assert "REPORT" not in out + err


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("model.safetensors", "`{}` cannot be read"),
        ("config.json", "`{}` cannot be read"),
        ("generation_config.json", "`{}` cannot be read"),
        ("tokenizer.json", "its tokenizer cannot be loaded: `{}` cannot be read"),
        ("tokenizer_config.json", "its tokenizer cannot be loaded: `{}` cannot be read"),
        (".", "`{}` cannot be read"),
        ("..", "`{}` cannot be read"),
    ],
)
def test_a_file_that_may_not_be_read_is_named_with_the_reason(
    folder: Path, name: str, what: str
) -> None:
    path = folder / name
    path.resolve().chmod(0)
    try:
        with unprivileged(), pytest.raises(ModelError) as caught:
            find_model(str(folder), device="cpu").load()
            load_tokenizer(str(folder))
    finally:
        path.resolve().chmod(0o755)
    told = what.format(folder if name == ".." else path)
    assert str(caught.value) == f"model `{folder}` cannot be served: {told}: Permission denied"


def test_weights_that_may_not_be_read_are_not_identified(folder: Path) -> None:
    weights_file = folder / "model.safetensors"
    weights_file.chmod(0)
    with unprivileged(), pytest.raises(ModelError) as caught:
        find_model(str(folder), device="cpu").find_fingerprint()
    assert f"`{weights_file}` cannot be read: Permission denied" in str(caught.value)


def test_a_name_that_no_folder_can_have_is_refused() -> None:
    for name in ("a" * 5000, "random:" + "a/" * 3000):
        with pytest.raises(ModelError, match=r"cannot be served: .*: File name too long$"):
            find_model(name, device="cpu")
