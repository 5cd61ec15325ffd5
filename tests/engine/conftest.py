"""Small checkpoints of the tested families, written once per session."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tieredkv.engine import loader
from tieredkv.engine.byte_tokenizer import byte_tokenizer

VOCAB_SIZE = 300
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "qwen2": {"use_sliding_window": False, "sliding_window": 32},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "mistral": {"sliding_window": None, "head_dim": 16},
}

Checkpoints = Callable[[str], Path]


@pytest.fixture(autouse=True)
def no_digests_are_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep remembered digests of weight files in a folder of the test."""
    monkeypatch.setattr(loader, "CACHE_DIR", tmp_path / "digests")


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    """Run a test with each of the tested families."""
    return str(request.param)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Return a function that gives the folder of a family's checkpoint; float32, two layers."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            write_checkpoint(made[family], family)
        return made[family]

    return folder


def write_checkpoint(folder: Path, family: str, **changes: Any) -> None:
    """Write a checkpoint with weights large enough that attention decides the answer."""
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            "max_position_embeddings": 512,
            "eos_token_id": 7,
            "dtype": "float32",
        }
        | FAMILIES.get(family, {})
        | changes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    byte_tokenizer(VOCAB_SIZE, 512).save_pretrained(folder)
