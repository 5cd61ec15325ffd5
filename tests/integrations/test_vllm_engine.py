"""Our tier inside vLLM's engine: the real scheduler and connector, with memory in place of a GPU.

Whatever happens to the tier, every request gets all its tokens, nothing is computed from wrong bytes,
and nothing is held at the end. Needs vLLM's sources: `make test-vllm` runs it.
"""

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.engines import HAS_VLLM
from tieredkv.integrations import identity

if not HAS_VLLM:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from tests.integrations import vllm_engine
from tests.integrations.vllm_engine import TOKENS, VllmEngine, answer_to


class Setup:
    """A folder for the store, a model, and the engines that a test opens."""

    def __init__(self, path: Path) -> None:
        self.folder, self.model = path / "store", path / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(vllm_engine.MODEL))
        (self.model / "model.safetensors").write_bytes(b"weights")
        self.engines: list[VllmEngine] = []

    def open(self, *, tier: dict[str, Any] | None = None, **changes: Any) -> VllmEngine:
        told = {"disk_dir": str(self.folder), "disk_size": "16MiB", "sweep_interval": "200ms"}
        engine = VllmEngine(self.model, {**told, "restore": "load", **(tier or {})}, **changes)
        self.engines.append(engine)
        return engine

    def close(self, engine: VllmEngine) -> None:
        self.engines.remove(engine)
        engine.close()


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    monkeypatch.setattr(identity, "CACHE_DIR", tmp_path / "digests")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    setup = Setup(tmp_path)
    yield setup
    for engine in setup.engines:
        engine.close()


def prompt_of(name: str, length: int) -> list[int]:
    """Return the tokens of a prompt."""
    tokens = random.Random(name)
    return [tokens.randrange(vllm_engine.VOCABULARY) for _ in range(length)]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_prompt_is_found_in_each_memory_and_after_a_restart(setup: Setup, is_async: bool) -> None:
    engine = setup.open(is_async=is_async)
    prompt = prompt_of("a", 10 * TOKENS + 5)
    whole = 10 * TOKENS
    cold = engine.serve(prompt, "24h")
    assert (cold.cached, cold.loaded) == (0, 0)
    again = engine.serve(prompt, "24h")
    assert (again.cached, again.loaded) == (whole, 0), "the device has it"
    engine.forget_device()
    again = engine.serve(prompt, "24h")
    assert (again.cached, again.loaded) == (whole, whole), "vLLM's memory has it"
    before = engine.tier._rows.read_rate
    assert not before.is_known
    engine.forget()
    again = engine.serve(prompt, "24h")
    assert (again.cached, again.loaded) == (whole, whole), "the disk has it"
    engine.check_at_rest()
    setup.close(engine)
    engine = setup.open(is_async=is_async)
    again = engine.serve(prompt, "24h")
    assert (again.cached, again.loaded) == (whole, whole), "the disk still has it"
    engine.check_at_rest()
    assert engine.worker.num_checked >= whole
