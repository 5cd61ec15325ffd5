"""A checkpoint's generation_config.json gives the defaults, and requests override them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.golden import refused
from tieredkv.engine.llm import LLM
from tieredkv.engine.loader import find_model
from tieredkv.engine.sampling_params import SamplingParams, TokenChoice
from tieredkv.errors import ModelError

PROMPT = [*range(10, 40)]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, repetition_penalty=1.0, ignore_eos=True)
UNSAID = SamplingParams(max_tokens=16, ignore_eos=True, seed=1)


@pytest.fixture
def folder(checkpoints: Any, tmp_path: Path) -> Path:
    """Return a checkpoint without a generation_config.json."""
    path = tmp_path / "model"
    shutil.copytree(checkpoints("llama"), path)
    (path / "generation_config.json").unlink()
    return path


def recommend(folder: Path, **fields: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps(fields))


def answer(folder: Path, params: SamplingParams, **settings: Any) -> list[int]:
    sizes: Any = {"device_size": "1MiB", "host_size": "1MiB", "device": "cpu"}
    with LLM(str(folder), **sizes, **settings) as llm:
        [output] = llm.generate(PROMPT, params)
        return output.token_ids


def test_the_model_decides_how_to_sample_where_a_request_does_not_say(folder: Path) -> None:
    greedy, drawn = answer(folder, GREEDY), answer(folder, UNSAID)
    assert greedy != drawn
    recommend(folder, do_sample=True, top_k=1, temperature=0.7)
    assert answer(folder, UNSAID) == greedy
    assert answer(folder, UNSAID, generation_config="none") == drawn
    own = SamplingParams(max_tokens=16, ignore_eos=True, seed=1, top_k=0, temperature=1.0)
    assert answer(folder, own) == drawn


def test_only_sampling_fields_and_end_tokens_are_used(folder: Path) -> None:
    recommended = {"top_p": 0.8, "top_k": 20, "temperature": 1, "min_p": None}
    ignored = {"do_sample": False, "max_new_tokens": 3, "num_beams": 4, "transformers_version": "9"}
    recommend(folder, eos_token_id=[11, 12], repetition_penalty=1.05, **recommended, **ignored)
    loaded = find_model(str(folder), device="cpu").load()
    assert loaded.generation.choice == TokenChoice(top_p=0.8, top_k=20, repetition_penalty=1.05)
    assert loaded.eos_token_ids == {7, 11, 12, 257}


def test_a_checkpoint_without_recommendations_has_the_usual_defaults(folder: Path) -> None:
    assert find_model(str(folder), device="cpu").generation.choice == TokenChoice()


@pytest.mark.parametrize(
    "text",
    [
        '{"temperature": 0.6,',
        '{"temperature": "warm"}',
        '{"eos_token_id": "</s>"}',
        "[]",
        "\ufffd",
        '{"temperature": -1}',
        '{"top_p": 7}',
    ],
)
def test_a_broken_generation_config_is_refused_by_its_name(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    with refused(ModelError, hide={str(folder): "FOLDER"}):
        find_model(str(folder), device="cpu")
