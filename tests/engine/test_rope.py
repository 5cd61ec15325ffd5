"""Each rope that is served gives the logits of transformers, whatever a sequence's length."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.engine.logits import run_paged, run_transformers
from tests.engine.test_families import CONTEXT_LEN, MIXED, make_config, write_checkpoint
from tests.golden import refused
from tieredkv.config import Settings, load_settings
from tieredkv.engine.checkpoint import SHAPES
from tieredkv.engine.loader import FoundModel, find_model
from tieredkv.engine.rope import SERVED_ROPES, scaled_rope
from tieredkv.errors import ConfigError

SHORT = CONTEXT_LEN // 2
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": SHORT,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
}
SCALED: dict[str, dict[str, Any]] = {
    "default": {},
    "dynamic": {"factor": 4.0},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": LONGROPE,
    "proportional": {"partial_rotary_factor": 0.5},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn with all it has": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.5,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn with a factor of its own": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 0.8,
    },
}


def rope(name: str) -> dict[str, Any]:
    return {"rope_type": name, "rope_theta": 1e4} | SCALED[name]


def prompt_ids(num_tokens: int) -> list[int]:
    return random.Random(7).choices(range(300), k=num_tokens)


def expected_logits(folder: Path, num_tokens: int, **changes: Any) -> Tensor:
    """Return the logits of transformers for a prompt, by the config of a folder with changes."""
    config = AutoConfig.from_pretrained(folder, **changes)
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    return run_transformers(model, prompt_ids(num_tokens))


def assert_equal(found: FoundModel, num_tokens: int, expected: Tensor) -> None:
    logits = run_paged(found.load(), prompt_ids(num_tokens))
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_all_ropes_of_transformers_are_served() -> None:
    assert {"default", *ROPE_INIT_FUNCTIONS} == SERVED_ROPES
    assert SCALED.keys() >= SERVED_ROPES


@pytest.mark.parametrize("model_type", ["llama", "granite"])
@pytest.mark.parametrize("name", SCALED)
def test_a_rope_gives_the_logits_of_transformers(
    name: str, model_type: str, tmp_path: Path
) -> None:
    """Llama is fused, and granite runs in the code of transformers."""
    changes = {"rope_parameters": rope(name), "head_dim": 16}
    write_checkpoint(tmp_path, make_config(model_type, changes))
    expected = expected_logits(tmp_path, CONTEXT_LEN)
    assert_equal(find_model(str(tmp_path), device="cpu"), CONTEXT_LEN, expected)


@pytest.mark.parametrize("name", sorted(SERVED_ROPES - {"default", "proportional"}))
def test_a_rope_of_some_dimensions_gives_the_logits_of_transformers(
    name: str, tmp_path: Path
) -> None:
    table = rope(name) | {"partial_rotary_factor": 0.5}
    if name == "longrope":
        table |= {key: LONGROPE[key][:4] for key in ("short_factor", "long_factor")}
    write_checkpoint(tmp_path, make_config("phi", {"rope_parameters": table}))
    expected = expected_logits(tmp_path, CONTEXT_LEN)
    assert_equal(find_model(str(tmp_path), device="cpu"), CONTEXT_LEN, expected)


@pytest.mark.parametrize("name", sorted(SERVED_ROPES))
def test_a_rope_of_one_type_of_layers_gives_the_logits_of_transformers(
    name: str, tmp_path: Path
) -> None:
    ropes = {"sliding_attention": rope("default"), "full_attention": rope(name)}
    sizes = {"layer_types": MIXED, "sliding_window": 16, "head_dim": 16}
    config = make_config("gemma3_text", sizes | {"rope_parameters": ropes})
    write_checkpoint(tmp_path, config)
    expected = expected_logits(tmp_path, CONTEXT_LEN)
    assert_equal(find_model(str(tmp_path), device="cpu"), CONTEXT_LEN, expected)


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_longrope_has_the_factors_of_the_longest_context(model_type: str, tmp_path: Path) -> None:
    changes = {"rope_parameters": rope("longrope"), "head_dim": 16}
    changes["original_max_position_embeddings"] = SHORT  # where Phi-3 and Phi-4 say it
    write_checkpoint(tmp_path, make_config(model_type, changes))
    short = find_model(str(tmp_path), device="cpu", max_context_len=SHORT)
    assert_equal(short, SHORT, expected_logits(tmp_path, SHORT))
    long = find_model(str(tmp_path), device="cpu", max_context_len=SHORT + 1)
    table = rope("longrope") | {"short_factor": LONGROPE["long_factor"]}
    assert_equal(long, SHORT, expected_logits(tmp_path, SHORT, rope_parameters=table))
    longest = find_model(str(tmp_path), device="cpu")
    digests = [found.find_fingerprint() for found in (short, long, longest)]
    assert digests[0] != digests[1] == digests[2]


@pytest.mark.parametrize("model_type", ["qwen3", "olmo2"])
def test_a_rope_that_is_scaled_by_setting_gives_the_logits_of_transformers(
    model_type: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, make_config(model_type, {"max_position_embeddings": 32}))
    theta = AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"]
    for scaling, factor, original in (("yarn:4", 4.0, 32), ("yarn:8:16", 8.0, 16)):
        table = {"rope_type": "yarn", "rope_theta": theta, "factor": factor}
        table["original_max_position_embeddings"] = original
        found = find_model(str(tmp_path), device="cpu", rope_scaling=scaling)
        assert found.max_model_len == CONTEXT_LEN
        changes = {"rope_parameters": table, "max_position_embeddings": CONTEXT_LEN}
        expected = expected_logits(tmp_path, CONTEXT_LEN, **changes)
        assert_equal(found, CONTEXT_LEN, expected)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": table}))
    by_file = find_model(str(tmp_path), device="cpu")
    assert found.find_fingerprint() == by_file.find_fingerprint(), "as if config.json said so"


def test_a_scaled_rope_is_part_of_a_models_identity(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_config("qwen3", {}))
    settings = [None, "yarn:2", "yarn:4", "yarn:4:64"]
    digests = [find_model(str(tmp_path), rope_scaling=it).find_fingerprint() for it in settings]
    assert len({*digests}) == 4
    plain = find_model(str(tmp_path))
    assert plain.rope is None and plain.load().fingerprint == digests[0]
    assert find_model(str(tmp_path), rope_scaling="yarn:2").load().fingerprint == digests[1]


def test_the_positions_of_a_known_shape_are_multiplied() -> None:
    shape = f"random:{SHAPES / 'qwen3-8b.json'}"
    told = json.loads((SHAPES / "qwen3-8b.json").read_text())["max_position_embeddings"]
    assert find_model(shape, rope_scaling="yarn:4").max_model_len == 4 * told
    found = find_model(shape, rope_scaling="yarn:4:32768", max_context_len=100_000)
    assert found.max_model_len == 100_000


@pytest.mark.parametrize(
    ("model_type", "changes", "scaling"),
    [
        ("llama", {"rope_parameters": rope("llama3")}, "yarn:4"),
        ("gpt2", {}, "yarn:4"),
        ("gemma3_text", {}, "yarn:4"),
        ("qwen3", {}, "yarn:4:256"),
        ("qwen3", {}, "yarn:1.5:64"),
    ],
)
def test_a_rope_that_cannot_be_scaled_is_refused(
    model_type: str, changes: dict[str, Any], scaling: str
) -> None:
    config = make_config(model_type, changes)
    with refused(ConfigError):
        scaled_rope("some/model", config, scaling)


@pytest.mark.parametrize(
    "value", ["yarn", "yarn:1", "yarn:0.5", "yarn:x", "linear:4", "yarn:4:", 4]
)
def test_a_scaling_that_is_none_is_refused(value: Any) -> None:
    with refused(ConfigError):
        load_settings(arguments={"rope_scaling": value}, environ={})
    if isinstance(value, str):
        with pytest.raises(ConfigError):
            Settings(rope_scaling=value)


def test_a_context_that_is_too_long_is_told_how_it_could_be_served(tmp_path: Path) -> None:
    for number, (model_type, changes) in enumerate(
        [("qwen3", {}), ("llama", {"rope_parameters": rope("linear")})]
    ):
        make_config(model_type, changes).save_pretrained(tmp_path / str(number))
        with refused(ConfigError, hide={str(tmp_path): "FOLDER"}):
            find_model(str(tmp_path / str(number)), max_context_len=300)
