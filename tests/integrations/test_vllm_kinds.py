"""Our tier behind vLLM with models of several kinds of layers, without a GPU.

vLLM 0.33 groups the layers, lays them out and copies them (`vllm_layers`). Whatever a request
attends to is compared with what it must be, and what a group loads with what it has stored.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden import refused, warnings_of
from tests.integrations.engines import HAS_VLLM
from tests.waiting import wait_until
from tieredkv.errors import ConfigError
from tieredkv.integrations import chunk_rows

if not HAS_VLLM:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from tests.integrations import vllm_engine
from tests.integrations.test_vllm_engine import Setup, Storm, prompt_of, setup
from tests.integrations.vllm_device import IS_OLDER, TOKENS, Text
from tests.integrations.vllm_engine import VllmEngine
from tests.integrations.vllm_layers import MARK, Layers, fill

if IS_OLDER:
    pytest.skip("vLLM 0.26 does not tell of windows and positions", allow_module_level=True)

__all__ = ["setup"]

HYBRID = Layers("state state state full state state state full")
WINDOWS = Layers("full window full window full window")
UNEVEN = Layers("window window window window window window full " * 2 + "window", window=70)
LATENT = Layers("latent latent latent")
ONE_WINDOW = Layers("window window")
NO_HYBRID = Layers("full window full window", is_hybrid_off=True)
KINDS = {
    "hybrid": HYBRID,
    "windows": WINDOWS,
    "uneven windows": UNEVEN,
    "latent": LATENT,
    "one window": ONE_WINDOW,
    "one group": NO_HYBRID,
}
each_kind = pytest.mark.parametrize("layers", KINDS.values(), ids=KINDS)
LATENT_MODEL = {"model_type": "deepseek_v2", "kv_lora_rank": 96, "q_lora_rank": None}
LATENT_MODEL |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 32, "v_head_dim": 16}
HOUR_S = 3600.0
WHOLE = 10 * TOKENS


class Opener:
    """Opens engines on one store, whose devices know what earlier ones have stored."""

    def __init__(self, setup: Setup, offset_file: Path) -> None:
        self._setup, self._offset_file = setup, offset_file
        self._copied = set[tuple[int, bytes]]()

    def __call__(self, layers: Layers, **changes: Any) -> VllmEngine:
        known = vllm_engine.MODEL | (LATENT_MODEL if "latent" in layers.names else {})
        (self._setup.model / "config.json").write_text(json.dumps(known))
        how = {"connector": "TieredKVConnector", "num_blocks": 256, "num_rows": 256, **changes}
        engine = self._setup.open(layers=layers, **how)
        for device in engine.devices:
            device.copied = self._copied
        fill(engine._view)
        return engine

    def again(self, engine: VllmEngine, layers: Layers, **changes: Any) -> VllmEngine:
        """Stop an engine and start another one."""
        self._setup.close(engine)
        return self(layers, **changes)

    def turn_clock(self, hours: float) -> None:
        self._offset_file.write_text(f"{hours * HOUR_S}")


@pytest.fixture
def start(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    offset_file = tmp_path / "offset"
    monkeypatch.setenv("TIEREDKV_TEST_CLOCK_OFFSET_FILE", str(offset_file))
    yield Opener(setup, offset_file)


@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
@each_kind
def test_each_kind_is_found_in_each_memory_and_after_a_restart(
    start: Opener, layers: Layers, is_async: bool
) -> None:
    engine = start(layers, is_async=is_async, max_delay=2)
    prompt = prompt_of("a", WHOLE + 5)
    assert engine.serve(prompt, "24h").cached == 0
    assert engine.serve(prompt, "24h").cached == WHOLE, "the device has it"
    engine.forget_device()
    assert engine.serve(prompt, "24h").cached == WHOLE, "vLLM's memory has it"
    engine.forget()
    again = engine.serve(prompt, "24h", length=20)
    assert again.cached == WHOLE and again.loaded > 0, "the disk has it"
    engine.check_at_rest()
    engine = start.again(engine, layers, is_async=is_async, max_delay=2)
    again = engine.serve([*prompt, *again.answer, 1], "24h")
    assert again.cached >= WHOLE, "the disk still has it"
    engine.check_at_rest()
    assert engine.worker.num_checked > 0


@pytest.mark.parametrize("layers", [HYBRID, UNEVEN, LATENT], ids=["hybrid", "uneven", "latent"])
def test_two_ranks_get_back_what_is_theirs(start: Opener, layers: Layers) -> None:
    engine = start(layers, ranks=2, max_delay=2)
    row_bytes = engine.manager.primary_tier.get_kv_memoryview().shape[1]
    is_one_copy = row_bytes == engine.block_bytes
    assert is_one_copy is (layers is LATENT), "a latent vector is the same on all ranks"
    prompt = prompt_of("a", WHOLE + 5)
    engine.serve(prompt, "24h")
    engine = start.again(engine, layers, ranks=2, max_delay=2)
    assert engine.serve(prompt, "24h").cached == WHOLE
    engine.check_at_rest()


# --- rows ---------------------------------------------------------------------------------------


def write_prompts(start: Opener, setup: Setup, layers: Layers, **changes: Any) -> bytes:
    """Serve parts of a prompt, beside ones of others; return what the store's files hold."""
    tier = {"disk_encryption": "off", "disk_compression": "off"}
    engine = start(layers, num_rows=40, tier=tier, **changes)
    prompt = prompt_of("a", 24 * TOKENS + 1)
    for end in range(3, 25, 3):
        engine.serve(prompt_of(f"other {end}", 100), "in_memory")
        engine.serve(prompt[: end * TOKENS + 1], "24h", length=2)
        engine.forget_device()
    setup.close(engine)
    return b"".join(each.read_bytes() for each in setup.folder.rglob("*") if each.is_file())


def num_layers_in(held: bytes, layers: Layers) -> int:
    """Return of how many layers the store holds the end of the prompt."""
    prompt = prompt_of("a", 24 * TOKENS + 1)
    text, found = Text(prompt, None), 0
    for at, name in enumerate(layers.names.split()):
        begin = 24 * TOKENS - 1 if name == "state" else 23 * TOKENS
        wanted = text.slots(begin, 24 * TOKENS, sorted_number(layers, at), 0).tobytes()
        found += wanted in held
    return found


def sorted_number(layers: Layers, at: int) -> int:
    return sorted(layers.specs()).index(f"layers.{at}")


@each_kind
def test_nothing_but_the_chunk_reaches_the_disk(
    start: Opener, setup: Setup, layers: Layers
) -> None:
    held = write_prompts(start, setup, layers)
    has_mark = MARK in held
    assert not has_mark
    assert num_layers_in(held, layers) == len(layers.names.split())


@pytest.mark.parametrize("layers", [HYBRID, UNEVEN], ids=["hybrid", "uneven"])
def test_a_row_as_it_is_would_have_bytes_of_others(
    start: Opener, setup: Setup, layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_rows, "gaps_in", lambda row_bytes, spans: [])
    held = write_prompts(start, setup, layers)
    has_mark = MARK in held
    assert has_mark, "the test above looks for what is not there anyway"


def test_nothing_is_stored_until_the_workers_have_told_what_they_write(
    start: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(VllmEngine, "_shake_hands", lambda *args: None)
    engine = start(HYBRID)
    engine.serve(prompt_of("a", WHOLE + 5), "24h")
    engine.check_at_rest()
    assert engine.tier._rows.stats().blocks == 0
    (warning,) = warnings_of(caplog, "tieredkv.integrations.chunk_rows")
    assert "TieredKVConnector" in warning


def test_states_of_another_dtype_are_not_found(start: Opener, setup: Setup) -> None:
    engine = start(HYBRID)
    prompt = prompt_of("a", WHOLE + 5)
    engine.serve(prompt, "24h")
    narrow = HYBRID._replace(state_dtype="bfloat16")
    engine = start.again(engine, narrow)
    assert engine.serve(prompt, "24h").cached == 0


# --- ages ---------------------------------------------------------------------------------------


@each_kind
def test_nothing_is_found_a_day_after_it_was_computed(start: Opener, layers: Layers) -> None:
    engine = start(layers)
    prompt = prompt_of("a", WHOLE + 5)
    engine.serve(prompt, "24h")
    start.turn_clock(23)
    engine.forget()
    assert engine.serve(prompt, "24h").cached == WHOLE, "it is not refreshed by that"
    start.turn_clock(25)
    engine.forget()
    assert engine.serve(prompt, "24h").cached == 0
    engine.check_at_rest()


@pytest.mark.parametrize("place", ["disk", "host", "device"])
@pytest.mark.parametrize("layers", [HYBRID, WINDOWS], ids=["hybrid", "windows"])
def test_a_state_is_as_old_as_what_it_was_computed_from(
    start: Opener, layers: Layers, place: str
) -> None:
    engine = start(layers)
    head = prompt_of("a", WHOLE)
    whole = [*head, *prompt_of("b", WHOLE + 5)]
    engine.serve([*head, 1], "24h")
    start.turn_clock(23)
    if place == "disk":
        engine = start.again(engine, layers)
    elif place == "host":
        engine.forget_device()
    assert engine.serve(whole, "24h").cached == WHOLE
    engine.forget()
    assert engine.serve(whole, "24h").cached == 2 * WHOLE
    # At hour 25 only the head's keys and values are computed anew. The state behind the whole was
    # computed at hour 23 from that of hour 0.
    start.turn_clock(25)
    engine = start.again(engine, layers)
    assert engine.serve([*head, 1], "24h").cached == 0
    engine.forget()
    assert engine.serve(whole, "24h").cached == (WHOLE if layers is HYBRID else 2 * WHOLE)
    engine.forget()
    assert engine.serve(whole, "24h").cached == 2 * WHOLE, "this state was computed at hour 25"
    engine.check_at_rest()


def test_states_of_short_turns_are_stored_too(start: Opener) -> None:
    # vLLM looks nothing up for turns of less than a block, and stores states before the keys.
    engine = start(HYBRID, max_delay=3)
    history = prompt_of("a", WHOLE)
    for turn in range(8):
        asked = engine.serve([*history, *prompt_of(f"turn {turn}", 7)], "24h", length=3)
        history = [*asked.prompt, *asked.answer]
    engine = start.again(engine, HYBRID)
    cached = engine.serve(history, "24h").cached
    assert cached >= len(history) - 2 * TOKENS


# --- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_loaded", [False, True])
@each_kind
def test_a_worker_that_dies_is_a_miss(start: Opener, layers: Layers, has_loaded: bool) -> None:
    engine = start(layers)
    prompt = prompt_of("a", WHOLE + 5)
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
    assert engine.serve(prompt, "24h").cached == WHOLE


@pytest.mark.parametrize("seed", range(int(os.environ.get("TIEREDKV_TEST_STORMS", "1"))))
@pytest.mark.parametrize("layers", [HYBRID, UNEVEN], ids=["hybrid", "uneven"])
def test_a_crowd_gets_all_its_tokens_whatever_fails(
    start: Opener, setup: Setup, layers: Layers, seed: int
) -> None:
    engine = start(
        layers,
        tier={"load_timeout": "500ms", "disk_size": "4MiB"},
        is_async=bool(seed % 2),
        num_blocks=400,
        num_rows=60,
        max_delay=3,
        seed=seed,
    )
    storm = Storm(setup, engine, seed)
    storm.run(60)
    engine.check_at_rest()
    assert storm.num_faults > 0


# --- refusals -----------------------------------------------------------------------------------

NO_CANONICAL = {"canonical_layout": True}
REFUSED: dict[str, tuple[Layers, dict[str, Any]]] = {
    "vLLM's connector": (HYBRID, {"connector": "OffloadingConnector"}),
    "chunks of blocks": (WINDOWS, {"blocks_per_chunk": 4}),
    "one window in chunks of blocks": (ONE_WINDOW, {"blocks_per_chunk": 4}),
    "hits within a block": (HYBRID._replace(match_unit=TOKENS // 2), {}),
    "draft tokens": (HYBRID._replace(draft_tokens=2), {}),
    "only states": (Layers("state state"), {}),
    "whole blocks": (UNEVEN._replace(layout="BLHNC"), {}),
    "canonical": (WINDOWS, NO_CANONICAL),
}


@pytest.mark.parametrize(("layers", "changes"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_made_safe_is_refused_in_one_sentence(
    start: Opener, setup: Setup, layers: Layers, changes: dict[str, Any]
) -> None:
    with refused(ConfigError, hide={"0.33.0": "VERSION"}):
        start(layers, **changes)
