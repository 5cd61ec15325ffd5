"""vLLM is started with a model folder and a plugin that it can read."""

import importlib.metadata
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.stress import drawn_weights
from tests.stress.vllm_dummy import write_model, write_plugin
from tieredkv.engine.drawn_weights import RANDOM_STD


@pytest.mark.parametrize(
    ("shape", "architecture"),
    [("gemma-4-31b", "Gemma4ForCausalLM"), ("glm-4.7-flash", "Glm4MoeLiteForCausalLM")],
)
def test_a_model_folder_has_the_config_of_a_shape(
    tmp_path: Path, shape: str, architecture: str
) -> None:
    write_model(tmp_path / "model", shape)
    config: Any = AutoConfig.from_pretrained(tmp_path / "model")
    assert config.architectures == [architecture]
    assert config.num_hidden_layers in (47, 60)


def test_the_plugin_is_found_by_its_entry_point(tmp_path: Path) -> None:
    write_plugin(tmp_path / "plugins")
    [found] = importlib.metadata.distributions(path=[str(tmp_path / "plugins")])
    [entry] = found.entry_points.select(group="vllm.general_plugins")
    assert entry.value == "drawn_weights:register"
    assert (tmp_path / "plugins" / "drawn_weights.py").exists()


def test_a_model_folder_says_which_modules_are_not_quantized(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "qwen3.6-35b-a3b-fp8")
    config: Any = AutoConfig.from_pretrained(tmp_path / "model")
    told = config.quantization_config
    assert told["weight_block_size"] == [128, 128]
    paths = told["modules_to_not_convert"]
    assert {"lm_head", "model.layers.0.linear_attn.in_proj_a", "model.layers.3.mlp.gate"} < {*paths}
    assert not any("in_proj_qkv" in path or "experts" in path for path in paths)


def test_the_plugin_draws_weights_as_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = list[str]()

    def fill(_: torch.Tensor, *, name: str) -> None:
        filled.append(name)

    loader = SimpleNamespace(initialize_single_dummy_weight=fill)
    place = "vllm.model_executor.model_loader"
    for name in ("vllm", "vllm.model_executor"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, place, SimpleNamespace(dummy_loader=loader))
    drawn_weights.register()
    tensors = {
        "proj.weight": torch.zeros(64, 64),
        "norm.weight": torch.zeros(8),
        "proj.bias": torch.ones(8),
        "sinks": torch.zeros(64),
        "layer.A_log": torch.zeros(64),
        "weight": torch.zeros(2, 64, 64, dtype=torch.float8_e4m3fn),
        "weight_scale_inv": torch.zeros(2, 8, 8),
        "w2_weight": torch.zeros(64, 64, dtype=torch.uint8),
        "w2_weight_scale": torch.zeros(8, 8, dtype=torch.uint8),
        "places": torch.zeros(8, 8, dtype=torch.int32),
    }
    for name, tensor in tensors.items():
        loader.initialize_single_dummy_weight(tensor, name=name)
    assert filled == ["places"]
    scaled = tensors["weight"].float() * tensors["weight_scale_inv"][0, 0, 0]
    assert float(scaled.std()) == pytest.approx(RANDOM_STD, rel=0.1)
    assert len({*tensors["w2_weight"].flatten().tolist()}) > 200
    assert (tensors["w2_weight_scale"] == drawn_weights.FP4_EXPONENT).all()
    assert float(tensors["proj.weight"].std()) == pytest.approx(RANDOM_STD, rel=0.1)
    assert tensors["norm.weight"].tolist() == [1.0] * 8
    assert tensors["proj.bias"].tolist() == [0.0] * 8
    low, high = drawn_weights.LOG_DECAYS
    assert ((low <= tensors["layer.A_log"]) & (tensors["layer.A_log"] <= high)).all()
    assert float(tensors["sinks"].std()) == pytest.approx(1.0, rel=0.4)
