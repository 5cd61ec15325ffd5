"""Models are loaded by name, or refused in one sentence."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.engine.harness import limits_of
from tests.golden import refused
from tieredkv.config import Dtype
from tieredkv.engine.loader import LoadedModel, find_model
from tieredkv.engine.runner import ModelRunner, make_kv_pool
from tieredkv.engine.step_buffers import BatchRow
from tieredkv.errors import ConfigError, ModelError


def load(name: object, *, dtype: Dtype = "auto", **options: Any) -> LoadedModel:
    return find_model(str(name), dtype=dtype, device="cpu").load(**options)


def last_logits(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    spec = loaded.kv_spec(16)
    runner = ModelRunner(loaded, make_kv_pool(spec, 8, loaded.device), spec, limits_of(loaded))
    return runner.execute([BatchRow(ids, 0, list(range(8)))]).logits


@pytest.fixture
def folder(checkpoints: Any, tmp_path: Path) -> Path:
    """Return a checkpoint that the test may damage."""
    path = tmp_path / "model"
    shutil.copytree(checkpoints("llama"), path)
    return path


def test_a_loaded_model_says_what_the_engine_must_know(checkpoints: Any) -> None:
    loaded = load(checkpoints("qwen3"))
    assert loaded.layers == [(4, 2, 32, index, None, None) for index in range(2)]
    assert (loaded.vocab_size, loaded.max_model_len) == (300, 512)
    assert loaded.dtype == "float32"
    assert loaded.eos_token_ids == {7, 257}
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.kv_spec(16).token_bytes == 2 * 2 * 2 * 32 * 4


def test_sharded_weights_load_as_one(folder: Path, tmp_path: Path) -> None:
    auto: Any = AutoModelForCausalLM
    sharded = tmp_path / "sharded"
    shutil.copytree(folder, sharded, ignore=shutil.ignore_patterns("*.safetensors"))
    auto.from_pretrained(folder).save_pretrained(sharded, max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    ids = list(range(10, 90))
    assert torch.equal(last_logits(load(folder), ids), last_logits(load(sharded), ids))


def test_weights_are_cast_to_the_dtype_asked_for(folder: Path) -> None:
    loaded = load(folder, dtype="bfloat16")
    assert loaded.dtype == "bfloat16"
    assert loaded.kv_spec(16).dtype == "bfloat16"
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}


def test_end_tokens_that_the_model_does_not_have_are_left_out(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [8, 32000]}))
    (folder / "generation_config.json").unlink()
    assert load(folder).eos_token_ids == {8, 257}


def test_a_context_beyond_the_positions_of_the_model_is_refused(folder: Path) -> None:
    assert find_model(str(folder), device="cpu", max_context_len=512).max_model_len == 512
    with refused(ConfigError, hide={str(folder): "FOLDER"}):
        find_model(str(folder), device="cpu", max_context_len=513)


def test_progress_is_told(folder: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    load(folder, progress=lambda *report: seen.append(report))
    assert ("loading weights", 1, 1) in seen
    assert seen[-1] == ("fingerprinting weights", 1, 1)


def damage_nothing(folder: Path) -> None:
    shutil.rmtree(folder)


def damage_empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def damage_format(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def damage_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama", ')


def damage_binary(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")


def damage_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"hidden_size": 64}')


def damage_unknown_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "no-such-model"}')


def damage_field(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "many"}))


def damage_weights(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)


def damage_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def damage_index_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "../model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def damage_index_json(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 5}')


def damage_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def damage_tokenizer_settings(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"model_max_length": ')


def damage_no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def damage_old_tokenizer(folder: Path) -> None:
    damage_no_tokenizer(folder)
    (folder / "tokenizer.model").write_bytes(b"not of sentencepiece")


def damage_tokenizer_code(folder: Path) -> None:
    damage_no_tokenizer(folder)
    (folder / "vocab.json").write_text("{}")
    code = {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(code))


def damage_pointer(folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"
    (folder / "model.safetensors").write_text(pointer)


@pytest.mark.parametrize(
    "damage",
    [
        damage_nothing,
        damage_empty,
        damage_format,
        damage_json,
        damage_binary,
        damage_type,
        damage_unknown_type,
        damage_field,
        damage_weights,
        damage_pointer,
        damage_index,
        damage_index_folder,
        damage_index_json,
        damage_tokenizer,
        damage_tokenizer_settings,
        damage_no_tokenizer,
        damage_old_tokenizer,
        damage_tokenizer_code,
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_sentence(folder: Path, damage: Any) -> None:
    damage(folder)
    with refused(ModelError, hide={str(folder): "FOLDER", transformers.__version__: "VERSION"}):
        load(folder)


def test_a_hub_model_that_cannot_be_fetched_is_a_model_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refused(ModelError):
        load("no-such/model")


@pytest.mark.parametrize("name", ["", " ", "a/b/c", "./gone", "no such model!"])
def test_names_that_can_be_no_model_are_refused(name: str) -> None:
    with refused(ModelError):
        load(name)


def test_code_beside_a_checkpoint_is_never_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "custom",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Config: pass\n")
    with refused(ModelError):
        load(folder)
    assert not (folder / "ran").exists()


def test_a_random_model_takes_its_shape_from_a_config(checkpoints: Any) -> None:
    loaded = load(f"random:{checkpoints('qwen2')}/config.json")
    assert (len(loaded.layers), loaded.attention[0].head_dim, loaded.vocab_size) == (2, 16, 300)
    weight = loaded.model.get_parameter("model.layers.0.mlp.up_proj.weight")
    assert weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert loaded.model.get_parameter("model.norm.weight").eq(1).all()
    assert loaded.model.get_parameter("model.layers.0.self_attn.q_proj.bias").eq(0).all()
    ids = loaded.tokenizer("hello")["input_ids"]
    assert last_logits(loaded, ids).isfinite().all()
    again = load(f"random:{checkpoints('qwen2')}")
    assert again.fingerprint == loaded.fingerprint


def test_an_unknown_shape_lists_the_known_ones() -> None:
    with refused(ModelError):
        load("random:gpt-9")


def test_a_vocabulary_without_room_for_bytes_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 4, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused(ModelError):
        load(f"random:{tmp_path}")


def test_loading_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    load("tiny-random")
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(("device", "found"), [("auto", "cuda"), ("cpu", "cpu"), ("cuda", "cuda")])
def test_the_device_is_resolved_by_what_is_there(
    monkeypatch: pytest.MonkeyPatch, device: str, found: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_model("tiny-random", device=device).device.type == found
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if device != "cuda":
        assert find_model("tiny-random", device=device).device.type == "cpu"
        return
    with refused(ConfigError):
        find_model("tiny-random", device=device)


@pytest.mark.gpu
def test_a_random_model_is_drawn_on_the_device_without_a_second_copy() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = find_model("random:llama-3.2-1b", device="cuda").load()
    weight_bytes = sum(p.numel() * p.element_size() for p in set(loaded.model.parameters()))
    assert loaded.dtype == "bfloat16"
    assert torch.cuda.max_memory_allocated() - before < 1.5 * weight_bytes


@pytest.mark.parametrize(
    ("name", "expected"),
    [("llama-3.1-8b", 16), ("mistral-7b", 16), ("glm-4.7-flash", 64), ("gpt-oss-20b", 64)],
)
def test_blocks_are_larger_where_layers_have_latents_or_only_some_a_window(
    name: str, expected: int
) -> None:
    found = find_model(f"random:{name}", device="cpu")
    assert found.kv_spec(None).block_size == expected
    assert found.kv_spec(32).block_size == 32
