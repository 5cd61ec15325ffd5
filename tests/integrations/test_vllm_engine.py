"""Our tier inside vLLM's engine: the real scheduler and connector, memory in place of a GPU.

Whatever happens to the tier, every request gets all its tokens, nothing is computed from wrong
bytes, and nothing is held at the end. Needs vLLM's sources: `make test-vllm` runs it.
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

import numpy as np
import pytest

from tests.integrations.engines import HAS_VLLM, flip_a_bit
from tests.waiting import wait_until
from tieredkv.cache.step_times import PromptTimes
from tieredkv.errors import ConfigError, StorageError
from tieredkv.integrations import identity
from tieredkv.integrations.restore_choice import ANY_LENGTH
from tieredkv.integrations.vllm_stats import METRICS
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import EvictFilter

if not HAS_VLLM:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from tests.integrations import vllm_engine
from tests.integrations.vllm_device import BLOCK_BYTES, IS_OLDER, TOKENS, VOCABULARY, Text
from tests.integrations.vllm_engine import Asked, VllmEngine


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

    def figures(self, engine: VllmEngine) -> dict[str, float]:
        """Have the engine tell its figures, and return the sums of all that it told."""
        engine.tier._told_at = float("-inf")
        engine.serve([1])
        sums = dict[str, float]()
        for stats in engine.stats:
            for name, told in ((stats and stats.kv_connector_stats) or {}).get("data", {}).items():
                for amount in told.values() if isinstance(told, dict) else ():
                    if isinstance(amount, int | float):
                        is_sum = METRICS[name].kind == "counter" if name in METRICS else False
                        sums[name] = amount + (sums.get(name, 0.0) if is_sum else 0.0)
        return sums

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
    return [tokens.randrange(VOCABULARY) for _ in range(length)]


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


# --- memories -----------------------------------------------------------------------------------


def test_in_memory_never_reaches_the_disk(setup: Setup) -> None:
    engine = setup.open()
    prompt = prompt_of("a", 6 * TOKENS + 1)
    engine.serve(prompt, "in_memory")
    engine.serve(prompt)  # the default
    engine.forget_device()
    assert engine.serve(prompt).cached == 6 * TOKENS
    assert engine.tier._rows.stats().blocks == 0
    engine.forget()
    assert engine.serve(prompt).cached == 0
    # A request for the disk wants what the others computed, too.
    engine.serve(prompt, "24h")
    engine.forget()
    assert engine.serve(prompt).cached == 6 * TOKENS
    engine.check_at_rest()


def test_tenants_with_salts_share_nothing(setup: Setup) -> None:
    engine = setup.open()
    prompt = prompt_of("a", 6 * TOKENS + 1)
    engine.serve(prompt, "24h", salt="one", tenant="one")
    engine.forget()
    assert engine.serve(prompt, "24h", salt="two", tenant="two").cached == 0
    engine.forget()
    assert engine.serve(prompt, "24h", salt="two", tenant="two").cached == 6 * TOKENS
    assert engine.serve(prompt, "24h", salt="one", tenant="one").cached == 6 * TOKENS
    engine.check_at_rest()


@pytest.mark.skipif(IS_OLDER, reason="vLLM 0.26 fails at the end of answers by itself")
@pytest.mark.parametrize("is_async", [False, True])
def test_the_next_turn_finds_the_answers_of_the_one_before(setup: Setup, is_async: bool) -> None:
    engine = setup.open(is_async=is_async)
    history = prompt_of("system", 3 * TOKENS)
    for turn in range(4):
        asked = engine.serve([*history, *prompt_of(f"turn {turn}", 9)], "24h", length=31)
        assert asked.cached == max(0, (len(history) - 1) // TOKENS * TOKENS) * (turn > 0)
        history = [*asked.prompt, *asked.answer]
        engine.forget()
    engine.check_at_rest()


def test_a_prompt_that_is_longer_than_vllms_memory_is_served(setup: Setup) -> None:
    engine = setup.open(num_rows=8, num_blocks=64)
    prompt = prompt_of("a", 30 * TOKENS)
    for _ in range(3):
        cached = engine.serve(prompt, "24h").cached
        engine.forget()
    assert 0 < cached <= 8 * TOKENS
    engine.check_at_rest()


def test_two_requests_that_share_a_prefix_on_disk_both_load_it(setup: Setup) -> None:
    engine = setup.open(max_delay=2)
    prefix = prompt_of("a", 8 * TOKENS)
    engine.serve(prefix, "24h")
    engine.forget()
    assert "tieredkv_loaded_bytes" not in setup.figures(engine)
    asked = [engine.ask([*prefix, at], "24h", length=4) for at in range(3)]
    engine.settle()
    assert [each.cached for each in asked] == [8 * TOKENS] * 3
    assert setup.figures(engine)["tieredkv_loaded_bytes"] == 8 * BLOCK_BYTES, (
        "each chunk is read once"
    )
    engine.check_at_rest()


def test_a_model_with_a_sliding_window_comes_back_too(setup: Setup) -> None:
    engine = setup.open(windows=(40,), num_blocks=128)
    prompt = prompt_of("a", 12 * TOKENS + 3)
    engine.serve(prompt, "24h", length=5)
    engine.forget_device()
    assert engine.serve(prompt, "24h", length=5).cached == 12 * TOKENS, "vLLM's memory has it"
    engine.forget()
    assert engine.serve(prompt, "24h", length=5).cached == 12 * TOKENS, "the disk has it"
    engine.check_at_rest()


MARK = b"of another tenant"
WINDOWS = [(None,), (17,), (None, None), (None, 17), (17, None)]


@pytest.mark.parametrize("encryption", ["on", "off"])
@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_what_a_row_held_before_never_reaches_the_disk(
    setup: Setup, windows: tuple[int | None, ...], blocks_per_chunk: int, encryption: str
) -> None:
    tier = {"disk_encryption": encryption, "disk_compression": "off"}
    how: dict[str, Any] = {"windows": windows, "blocks_per_chunk": blocks_per_chunk}
    prompt, is_refused = prompt_of("a", 24 * TOKENS + 1), False
    try:
        engine = setup.open(num_blocks=128, tier=tier, **how)
    except ConfigError:
        is_refused = True
    else:
        engine._view[:] = np.resize(np.frombuffer(MARK, np.uint8), engine._view.size)
        # vLLM computes the end of a chunk without its first blocks, which no window needs any more.
        for end in range(3, 25, 3):
            engine.serve(prompt[: end * TOKENS + 1], "24h", length=2)
        setup.close(engine)
    held = b"".join(each.read_bytes() for each in setup.folder.rglob("*") if each.is_file())
    has_mark = MARK in held
    assert not has_mark
    # vLLM 0.26 does not tell windows, so that chunks of several blocks are refused there.
    is_whole = blocks_per_chunk == 1
    fills_rows = len(windows) == 1 and (is_whole or (windows == (None,) and not IS_OLDER))
    assert is_refused is not fills_rows
    if encryption == "off":
        chunk = Text(prompt, None).slots(23 * TOKENS, 24 * TOKENS, 0, 0).tobytes()
        assert (chunk in held) is fills_rows, "the store is what is looked at"


@pytest.mark.parametrize("is_off", [False, True])
def test_without_the_hybrid_manager_windows_and_full_attention_are_one_group(
    setup: Setup, is_off: bool
) -> None:
    engine = setup.open(is_alone=True)
    config = engine.scheduler.vllm_config
    config.scheduler_config.disable_hybrid_kv_cache_manager = is_off
    config.cache_config.kv_cache_layout = "LBNHC"
    specs = vllm_engine.specs_of((None, 40))
    assert len(vllm_engine.groups_of(config, specs)) == (1 if is_off else 2)


def test_two_ranks_get_back_what_is_theirs(setup: Setup) -> None:
    num_blocks = 1 if IS_OLDER else 2
    engine = setup.open(ranks=2, blocks_per_chunk=num_blocks, max_delay=2)
    prompt = prompt_of("a", 9 * TOKENS + 3)
    engine.serve(prompt, "24h")
    setup.close(engine)
    engine = setup.open(ranks=2, blocks_per_chunk=num_blocks, max_delay=2)
    whole = 9 // num_blocks * num_blocks
    assert engine.serve(prompt, "24h").cached == whole * TOKENS
    assert [each.num_loaded for each in engine.devices] == [whole, whole]
    engine.check_at_rest()


# --- faults -------------------------------------------------------------------------------------


def test_a_chunk_that_is_broken_on_disk_is_computed(setup: Setup) -> None:
    clear = {"disk_encryption": "off"}  # bytes of a chunk are looked for on disk
    engine = setup.open(tier=clear)
    prompt = prompt_of("a", 10 * TOKENS + 5)
    engine.serve(prompt, "24h")
    setup.close(engine)
    chunk = Text(prompt, None).slots(5 * TOKENS, 6 * TOKENS, 0, 0).tobytes()
    flip_a_bit(setup.folder, chunk, 100)
    engine = setup.open(tier=clear)
    assert engine.serve(prompt, "24h").cached == 5 * TOKENS
    figures = setup.figures(engine)
    assert figures["tieredkv_failed_loads"] == 1
    engine.check_at_rest()


@pytest.mark.parametrize("has_loaded", [False, True])
def test_a_worker_that_dies_while_requests_wait_for_it(setup: Setup, has_loaded: bool) -> None:
    engine = setup.open()
    prompt = prompt_of("a", 10 * TOKENS + 5)
    engine.serve(prompt, "24h")
    engine.forget()
    pid = engine.tier._rows.pid
    if not has_loaded:
        os.kill(pid, signal.SIGSTOP)
    asked = [engine.ask([*prompt, at], "24h", length=3) for at in range(3)]
    while not (engine.tier._rows._jobs or engine.tier._rows._lookups):
        engine.step()
    engine.step()
    os.kill(pid, signal.SIGKILL)
    engine.settle()
    assert all(each.is_over for each in asked)
    engine.check_at_rest()
    wait_until(lambda: engine.tier._rows.pid not in (None, pid), "no other worker is up")
    engine.forget()
    assert engine.serve(prompt, "24h").cached == 10 * TOKENS


# --- choices ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "cached"), [(None, 0), ({"1024": 100.0}, 10), ({"1024": 1e-6}, 0)], ids=str
)
def test_a_head_is_loaded_in_whole_or_not_at_all(
    setup: Setup, seconds: dict[str, float] | None, cached: int
) -> None:
    tier = {"restore": "auto", **({"prefill_seconds": seconds} if seconds else {})}
    engine = setup.open(tier=tier)
    prompt = prompt_of("a", 10 * TOKENS + 5)
    assert engine.serve(prompt, "24h").cached == 0
    engine.forget()
    engine.tier._rows.read_rate.learn(1 << 30, 1.0, time.monotonic())
    assert engine.serve(prompt, "24h").cached == cached * TOKENS
    engine.check_at_rest()


@pytest.mark.parametrize("is_async", [False, True])
def test_what_prompts_take_is_learnt_from_the_schedulers_steps(
    setup: Setup, is_async: bool
) -> None:
    engine = setup.open(
        num_blocks=400, num_rows=400, is_async=is_async, step_tokens=1024, offload_prompt_only=True
    )

    def pace(begin: int, end: int) -> float:
        return (end - begin) * (2e-4 + 1e-9 * (begin + end) / 2)

    engine.worker.pace = pace
    for at, length in enumerate([300, 900, 3900, 500, 2100, 1300]):
        # Most steps are short, as with people who read answers.
        engine.serve(prompt_of(f"{at}", length), "in_memory", length=20)
    times = engine.tier._chooser.times
    assert times is not None
    for length in (640, 1280, 3000):
        learnt = PromptTimes(times, ANY_LENGTH)(0, length)
        assert 0.7 < learnt / pace(0, length) < 1.3, (length, learnt, pace(0, length))
    engine.check_at_rest()


# --- ends ---------------------------------------------------------------------------------------


@pytest.mark.skipif(IS_OLDER, reason="vLLM 0.26 does not survive aborts by itself")
@pytest.mark.parametrize("num_steps", range(6))
def test_a_request_is_aborted_at_each_step_of_its_load(setup: Setup, num_steps: int) -> None:
    engine = setup.open(max_delay=2)
    prompt = prompt_of("a", 10 * TOKENS + 5)
    engine.serve(prompt, "24h")
    engine.forget()
    pid = engine.tier._rows.pid
    asked = engine.ask(prompt, "24h", length=8)
    for at in range(num_steps):
        if at == 2:
            os.kill(pid, signal.SIGSTOP)
        engine.step()
    engine.abort(asked)
    for _ in range(5):
        engine.step()
    os.kill(pid, signal.SIGCONT)
    engine.settle()
    engine.check_at_rest()
    assert engine.serve(prompt, "24h").cached == 10 * TOKENS


def begin_two(engine: VllmEngine, num_steps: int) -> list[int]:
    """Ask for a prompt that only the disk has, which is returned, and for a new one; take steps."""
    prompt = prompt_of("a", 10 * TOKENS + 5)
    engine.serve(prompt, "24h")
    engine.forget()
    engine.ask(prompt, "24h", length=8)
    engine.ask(prompt_of("b", 10 * TOKENS), "24h", length=8)
    for _ in range(num_steps):
        engine.step()
    return prompt


@pytest.mark.parametrize("num_steps", [1, 3, 5, 8])
def test_a_stop_in_the_middle_loses_nothing_that_was_stored(setup: Setup, num_steps: int) -> None:
    engine = setup.open(max_delay=2, num_blocks=128)
    prompt = begin_two(engine, num_steps)
    setup.close(engine)
    engine = setup.open()
    assert engine.serve(prompt, "24h").cached == 10 * TOKENS
    engine.check_at_rest()


@pytest.mark.skipif(IS_OLDER, reason="vLLM 0.26 does not survive it by itself")
@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("num_steps", range(1, 9))
def test_vllm_forgets_all_in_the_middle(setup: Setup, num_steps: int, is_forced: bool) -> None:
    engine = setup.open(max_delay=2, num_blocks=128, is_async=bool(num_steps % 2))
    prompt = begin_two(engine, num_steps)
    with contextlib.suppress(RuntimeError):  # vLLM cannot force it while a request loads
        engine.scheduler.reset_prefix_cache(reset_running_requests=is_forced, reset_connector=True)
    engine.settle()
    engine.check_at_rest()
    engine.forget()
    assert engine.serve(prompt, "24h").cached == 10 * TOKENS


# --- what is told -------------------------------------------------------------------------------


def test_events_tell_what_the_disk_gets_and_loses(setup: Setup) -> None:
    engine = setup.open(has_events=True)
    engine.serve(prompt_of("a", 4 * TOKENS + 1), "24h")
    told = [each for each in engine.events if getattr(each, "medium", None) == "STORAGE"]
    stored = {hash for each in told for hash in each.block_hashes}
    assert len(stored) == 4 and {type(each).__name__ for each in told} == {"BlockStored"}
    engine.events.clear()
    setup.control.answer(EvictFilter(all=True))
    engine.serve(prompt_of("b", 4 * TOKENS + 1))
    told = [each for each in engine.events if type(each).__name__ == "BlockRemoved"]
    assert {
        hash for each in told for hash in each.block_hashes if each.medium == "STORAGE"
    } == stored


def test_the_figures_reach_the_schedulers_statistics(setup: Setup) -> None:
    engine = setup.open()
    prompt = prompt_of("a", 4 * TOKENS + 1)
    engine.serve(prompt, "24h")
    engine.forget()
    engine.serve(prompt, "24h")
    figures = setup.figures(engine)
    size = 4 * BLOCK_BYTES
    assert figures["tieredkv_stored_bytes"] == figures["tieredkv_loaded_bytes"] == size
    assert figures["tieredkv_disk_chunks"] == 4


# --- vLLM alone ---------------------------------------------------------------------------------


@pytest.mark.skipif(not IS_OLDER, reason="vLLM 0.33 survives it")
@pytest.mark.parametrize("offload_prompt_only", [False, True])
def test_vllm_0_26_fails_by_itself_when_a_prompt_is_aborted(
    setup: Setup, offload_prompt_only: bool
) -> None:
    engine = setup.open(is_alone=True, offload_prompt_only=offload_prompt_only)
    asked = engine.ask(prompt_of("a", 20 * TOKENS))
    engine.step()
    engine.step()
    engine.abort(asked)
    with pytest.raises(AssertionError) as caught:
        engine.step()
    assert caught.traceback[-1].name == "_build_store_jobs"


@pytest.mark.skipif(not IS_OLDER, reason="vLLM 0.33 survives it")
def test_vllm_0_26_fails_by_itself_when_an_answer_fills_a_block(setup: Setup) -> None:
    engine = setup.open(is_alone=True)
    with pytest.raises(KeyError, match="request-0"):
        engine.serve(prompt_of("a", TOKENS + 8), length=8)


# --- crowds -------------------------------------------------------------------------------------


class Storm:
    """Requests that arrive, are aborted and meet faults at random.

    vLLM 0.26 is spared what it does not survive without a tier either: see docs/vllm.md.
    """

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
            if not IS_OLDER and self._open and self._random.random() < 0.02:
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
        retention = self._random.choice(["24h", "24h", "5m", "in_memory"])
        salt = self._random.choice([None, None, "a"])
        length = self._random.randint(1, 40)
        return self._engine.ask([*stem, *own], retention, length=length, salt=salt)

    def _fault(self) -> None:
        """Stop or kill the store's worker, evict what is on disk, or have vLLM forget."""
        self.num_faults += 1
        pid = None if self._engine.tier is None else self._engine.tier._rows.pid
        kind = self._random.choice(["kill", "stop", "evict", "forget", "go on"])
        with contextlib.suppress(ProcessLookupError, StorageError):
            if kind == "kill" and pid is not None:
                os.kill(pid, signal.SIGKILL)
            elif kind == "stop" and pid is not None and not self._stopped:
                os.kill(pid, signal.SIGSTOP)
                self._stopped = pid
            elif kind == "evict" and pid is not None and not self._stopped:
                self._setup.control.answer(EvictFilter(all=True))
            elif kind == "forget":
                if IS_OLDER:
                    self._engine.settle()
                self._engine.scheduler.reset_prefix_cache(reset_connector=True)
            elif kind == "go on":
                self._go_on()

    def _go_on(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._stopped:
                os.kill(self._stopped, signal.SIGCONT)
        self._stopped = 0


@pytest.mark.parametrize("seed", range(int(os.environ.get("TIEREDKV_TEST_STORMS", "2"))))
@pytest.mark.parametrize("is_alone", [False, True], ids=["with the tier", "vLLM alone"])
def test_a_crowd_in_little_memory_gets_all_its_tokens_whatever_fails(
    setup: Setup, seed: int, is_alone: bool
) -> None:
    if is_alone and seed:
        pytest.skip("one crowd tells whether a fault is vLLM's own")
    chance = random.Random(seed)
    policy = "tieredkv.integrations.vllm_policy"
    pins = {"eviction_policy": "RetentionCachePolicy", "cache_policy_module_path": policy}
    engine = setup.open(
        tier={"load_timeout": "500ms", "disk_size": "2MiB"},
        is_alone=is_alone,
        is_async=bool(seed % 2),
        num_blocks=400 if IS_OLDER else chance.choice([30, 45, 90]),
        num_rows=400 if IS_OLDER else chance.choice([8, 24, 60]),
        ranks=chance.choice([1, 2]),
        blocks_per_chunk=1 if IS_OLDER else chance.choice([1, 2]),
        max_delay=3,
        seed=seed,
        offload_prompt_only=IS_OLDER,
        sync_load_budget_bytes=chance.choice([0, 1 << 20]),  # of vLLM 0.33
        **({} if IS_OLDER else chance.choice([{}, pins])),
    )
    storm = Storm(setup, engine, seed)
    storm.run(80)
    engine.check_at_rest()
    assert storm.num_faults > 0
