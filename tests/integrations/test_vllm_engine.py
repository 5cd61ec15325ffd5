"""Our tier inside vLLM's engine: the real scheduler and connector, with memory in place of a GPU.

Whatever happens to the tier, every request gets all its tokens, nothing is computed from wrong bytes,
and nothing is held at the end. Needs vLLM's sources: `make test-vllm` runs it.
"""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.engines import HAS_VLLM
from tieredkv.errors import StorageError
from tieredkv.integrations import identity
from tieredkv.storage.control import StoreControl
from tieredkv.storage.results import EvictFilter

if not HAS_VLLM:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from tests.integrations import vllm_engine
from tests.integrations.vllm_engine import TOKENS, Asked, VllmEngine


class Setup:
    """A folder for the store, a model, and the engines that a test opens."""

    def __init__(self, path: Path) -> None:
        self.folder, self.model = path / "store", path / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(vllm_engine.MODEL))
        (self.model / "model.safetensors").write_bytes(b"weights")
        self.engines: list[VllmEngine] = []

    def open(
        self, *, tier: dict[str, Any] | None = None, is_alone: bool = False, **changes: Any
    ) -> VllmEngine:
        """Start an engine, alone or with a tier of these settings."""
        told = {"disk_dir": str(self.folder), "disk_size": "16MiB", "sweep_interval": "200ms"}
        told = {**told, "restore": "load", **(tier or {})}
        engine = VllmEngine(self.model, None if is_alone else told, **changes)
        self.engines.append(engine)
        return engine

    def close(self, engine: VllmEngine) -> None:
        self.engines.remove(engine)
        engine.close()

    @property
    def control(self) -> StoreControl:
        return StoreControl(str(self.folder))


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


class Storm:
    """Requests that arrive, are aborted and meet faults at random."""

    def __init__(self, setup: Setup, engine: VllmEngine, seed: int) -> None:
        self._setup, self._engine, self._random = setup, engine, random.Random(seed)
        self._stems = [prompt_of(f"stem {at}", 20 * TOKENS) for at in range(4)]
        self._open = list[Asked]()
        self._stopped = 0
        self.num_faults = 0

    def run(self, num_requests: int) -> None:
        """Send requests until there were enough of them; then wait for the rest."""
        deadline = time.monotonic() + 120
        while len(self._engine.asked) < num_requests:
            assert time.monotonic() < deadline, f"it stands still: {self._engine.state()}"
            self._open = [each for each in self._open if not each.is_over]
            if self._random.random() < 0.2 and len(self._open) < 12:
                self._open.append(self._ask())
            may_abort = not vllm_engine.IS_OLDER  # which does not survive it
            if may_abort and self._open and self._random.random() < 0.02:
                self._engine.abort(self._random.choice(self._open))
            if self._random.random() < 0.01:
                self._fault()
            if self._engine.has_work:
                self._engine.step()
        self._go_on()
        self._engine.settle(120)

    def _ask(self) -> Asked:
        stem = self._random.choice(self._stems)[: self._random.randint(1, 20 * TOKENS)]
        own = [self._random.randrange(1000) for _ in range(self._random.randint(1, 40))]
        retention = self._random.choice(["24h", "24h", "in_memory"])
        salt = self._random.choice([None, None, "a"])
        length = self._random.randint(1, 40)
        return self._engine.ask([*stem, *own], retention, length=length, salt=salt)

    def _fault(self) -> None:
        """Stop or kill the store's worker, evict what is on disk, or have vLLM forget."""
        self.num_faults += 1
        pid = self._engine.tier._rows.pid
        kind = self._random.choice(["kill", "stop", "evict", "forget", "go on"])
        with contextlib.suppress(ProcessLookupError, StorageError):
            if kind == "kill" and pid is not None:
                os.kill(pid, signal.SIGKILL)
            elif kind == "stop" and pid is not None and not self._stopped:
                os.kill(pid, signal.SIGSTOP)
                self._stopped = pid
            elif kind == "evict" and not self._stopped:
                self._setup.control.evict(EvictFilter(all=True))
            elif kind == "forget" and not vllm_engine.IS_OLDER:
                self._engine.scheduler.reset_prefix_cache(reset_connector=True)
            elif kind == "go on":
                self._go_on()

    def _go_on(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._stopped:
                os.kill(self._stopped, signal.SIGCONT)
        self._stopped = 0


@pytest.mark.parametrize("seed", range(int(os.environ.get("TIEREDKV_TEST_STORMS", "2"))))
def test_a_crowd_in_little_memory_gets_all_its_tokens_whatever_fails(
    setup: Setup, seed: int
) -> None:
    chance = random.Random(seed)
    engine = setup.open(
        tier={"load_timeout": "500ms", "disk_size": "2MiB"},
        is_async=bool(seed % 2),
        num_blocks=chance.choice([30, 45, 90]),
        num_rows=chance.choice([8, 24, 60]),
        ranks=chance.choice([1, 2]),
        blocks_per_chunk=chance.choice([1, 2]),
        max_delay=3,
        seed=seed,
        offload_prompt_only=vllm_engine.IS_OLDER,
    )
    storm = Storm(setup, engine, seed)
    storm.run(80)
    engine.check_at_rest()
    assert storm.num_faults > 0
