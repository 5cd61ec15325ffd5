"""Inside vLLM, what the disk has is loaded where that is faster; else it is computed, at no cost.

Without vLLM the tests run against a stand-in of its classes; `make test-vllm` runs them with vLLM.
"""

import itertools
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.golden import refused
from tests.integrations.conftest import Setup
from tests.integrations.engines import NEWEST, NUM_ROWS, Engine, bytes_of
from tests.waiting import wait_until
from tieredkv.cache.link_rate import LinkRate
from tieredkv.errors import ConfigError
from tieredkv.integrations.row_store import RowStore
from tieredkv.tier import Loaded, Stored

DAY_S = 86_400.0
SLOW = {"restore": "auto", "prefill_seconds": {"1024": 1000.0}}
FAST = {"restore": "auto", "prefill_seconds": {"1024": 1e-5}}


def measure_disk(engine: Engine) -> None:
    """Let a request find a head while the disk's rate is not known, and wait for the probe."""
    chain = engine.chain("probe", 2)
    engine.store(chain)
    engine.forget()
    engine.hits(chain)

    wait_for(engine, lambda: engine.tier._rows._probe is None)
    # A probe of two small chunks is too short to measure anything.
    engine.tier._rows.read_rate.learn(1 << 30, 1.0, time.monotonic())


def computes(engine: Engine, keys: list[bytes], retention: str | None = None) -> Any:
    """Look chunks up until vLLM is told to compute; return the request's context, still open.

    As vLLM does, it asks for all chunks up to the first one that is missing.
    """
    context = engine.request(retention)
    engine.place(keys, context)

    def is_missed() -> bool:
        engine.step()
        verdicts = (engine.manager.lookup(key, context).name for key in keys)
        until = list(itertools.takewhile(lambda verdict: verdict != "MISS", verdicts))
        return not until

    wait_until(is_missed, "the first chunk is no miss")
    return context


def wait_for(engine: Engine, what: Callable[[], object]) -> None:
    """Go on with steps until something has come true."""

    def has_come() -> bool:
        engine.step()
        return bool(what())

    wait_until(has_come, "it does not come true")


def test_until_something_is_known_all_is_computed_and_the_disk_is_measured(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = setup.open(tier={"restore": "auto"})
    ends: list[float] = []
    rate = engine.tier._rows.read_rate

    def end(it: LinkRate, num_bytes: int, now: float, **more: bool) -> None:
        if it is rate:
            ends.append(now)

    monkeypatch.setattr(LinkRate, "end", end)
    chain = engine.chain("a", 4)
    engine.store(chain)
    engine.forget()
    assert engine.hits(chain) == [False] * 4
    figures = engine.metrics()
    assert figures["tieredkv_restores", ("compute", "unknown_prefill")] == 1
    assert figures["tieredkv_recomputed_chunks", ()] == 4
    wait_for(engine, lambda: engine.tier._rows._probe is None)
    assert len(ends) == 4, "each chunk was read, and nobody waited for it"


@pytest.mark.parametrize(("tier", "is_loaded"), [(SLOW, True), (FAST, False)], ids=["slow", "fast"])
def test_a_head_is_loaded_where_that_is_faster(
    setup: Setup, tier: dict[str, Any], is_loaded: bool
) -> None:
    engine = setup.open(tier=tier)
    measure_disk(engine)
    chain = engine.chain("a", 4)
    engine.store(chain)
    engine.forget()
    assert engine.hits([*chain, *engine.chain("b", 1)]) == [is_loaded] * 4 + [False]
    choice = ("load", "faster") if is_loaded else ("compute", "slower")
    assert engine.metrics()["tieredkv_restores", choice] == 1


@NEWEST
def test_the_setting_can_say_always_and_never(setup: Setup) -> None:
    engine = setup.open(tier={**FAST, "restore": "load"})
    chain = engine.chain("a", 3)
    engine.store(chain)
    engine.forget()
    assert engine.hits(chain) == [True] * 3
    engine = setup.reopen(engine, tier={**SLOW, "restore": "compute"})
    assert engine.hits(chain) == [False] * 3


def test_a_request_keeps_its_choice_until_it_is_preempted(setup: Setup) -> None:
    engine = setup.open(tier={"restore": "auto"})
    chain = engine.chain("a", 3)
    engine.store(chain)
    engine.forget()
    context = computes(engine, chain)
    engine.tier._chooser.restore = "load"  # what is known now would be chosen otherwise
    for _ in range(5):
        engine.step()
        assert engine.manager.lookup(chain[0], context).name == "MISS"
    engine.step(begun=[context])
    assert engine.manager.lookup(chain[0], context).name == "MISS"
    engine.step(preempted=[context])
    assert engine.manager.lookup(chain[0], context).name in ("HIT_PENDING", "RETRY")
    engine.settle()
    assert engine.manager.lookup(chain[0], context).name == "HIT"


def test_a_choice_waits_until_the_disk_has_told_of_all_that_was_asked(setup: Setup) -> None:
    engine = setup.open(tier=SLOW)
    measure_disk(engine)
    chain = engine.chain("a", 4)
    engine.store(chain)
    engine.forget()
    context = engine.request()
    engine.place(chain, context)
    for keys in (chain[2:], chain):  # vLLM's memory has lost the first ones meanwhile
        verdicts = [engine.manager.lookup(key, context).name for key in keys]
        assert verdicts == ["RETRY"] * len(keys)
        if keys != chain:
            engine.step()
            wait_until(lambda: bool(engine.tier._rows._events), "no answer comes")
            engine.tier._take(engine.tier._rows.poll())
    assert engine.metrics().get(("tieredkv_restores", ("load", "faster"))) is None
    engine.settle()
    for key in chain:
        engine.manager.lookup(key, context)
    engine.settle()
    assert [engine.manager.lookup(key, context).name for key in chain] == ["HIT"] * 4


def test_no_more_is_loaded_than_vllms_memory_holds(setup: Setup) -> None:
    engine = setup.open()
    chain = engine.chain("a", NUM_ROWS + 4)
    for keys in (chain[:8], chain[8:16], chain[16:]):
        context = engine.request("24h")
        engine.place(chain, context)
        engine.compute(keys, context)
        engine.settle()
        engine.manager.on_request_finished(context)
        engine.forget()
    context = engine.request()
    engine.place(chain, context)
    assert {engine.tier.lookup(key, context).name for key in chain} == {"RETRY"}
    engine.settle()
    verdicts = [engine.tier.lookup(key, context).name for key in chain]
    assert verdicts == ["HIT"] * NUM_ROWS + ["MISS"] * 4


def test_what_is_computed_by_choice_is_not_written_again_and_gets_no_younger(setup: Setup) -> None:
    engine = setup.open(tier={"restore": "compute"})
    chain = engine.chain("a", 4)
    engine.store(chain[:3])
    engine.forget()
    written = engine.tier._rows.stats().num_stored
    setup.set_clock(DAY_S - 60)
    context = computes(engine, chain, "24h")
    engine.compute(chain, context)
    engine.settle()
    assert engine.tier._rows.stats().num_stored == written + 1, "all but the last one were there"
    engine.manager.on_request_finished(context)
    engine = setup.reopen(engine)
    assert engine.hits(chain) == [True] * 4
    engine.forget()
    setup.set_clock(DAY_S + 1)
    assert engine.hits(chain) == [False] * 3 + [True]


def test_what_was_computed_by_choice_is_as_old_as_the_copy_that_the_disk_loses(
    setup: Setup,
) -> None:
    engine = setup.open(tier={"restore": "compute"})
    chain = engine.chain("a", 2)
    engine.store(chain)
    again = setup.reopen(engine, tier={"restore": "compute"})  # which remembers no ages
    setup.set_clock(DAY_S - 60)
    context = computes(again, chain, "24h")
    setup.control.answer(setup.everything)
    again.compute(chain, context)
    again.settle()
    again = setup.reopen(again)
    assert again.hits(chain) == [True, True]
    again.forget()
    setup.set_clock(DAY_S + 1)
    assert again.hits(chain) == [False, False]


def test_what_expired_behind_a_computed_head_lives_again(setup: Setup) -> None:
    engine = setup.open(tier={"restore": "compute"})
    if engine.is_older:
        pytest.skip("0.26 does not tell which chunks were computed")
    chain = engine.chain("a", 4)
    engine.store(chain[2:])  # expires first
    setup.set_clock(3600.0)
    engine.store(chain[:2])
    engine.forget()
    setup.set_clock(DAY_S + 1)
    context = computes(engine, chain, "24h")
    engine.compute(chain, context)
    engine.settle()
    engine = setup.reopen(engine)
    assert engine.hits(chain) == [True] * 4


@NEWEST
def test_what_computing_takes_is_learnt_from_any_traffic_and_kept(setup: Setup) -> None:
    engine = setup.open(tier={"restore": "auto"})
    for number in range(7):
        keys = engine.chain(f"prompt {number}", 8)
        context = computes(engine, keys, "in_memory")
        engine.step(begun=[context])
        for _ in range(6):
            time.sleep(0.005)
            engine.step()
        engine.compute(keys, context)
        engine.settle()
        engine.manager.on_request_finished(context)
        engine.forget()
    meter = engine.tier._chooser.meter
    assert meter.times is not None
    assert engine.metrics()["tieredkv_prefill_tokens_per_s", ()] > 0
    engine.tier._rows.read_rate.learn(1 << 30, 1.0, time.monotonic())
    known = meter.times.step_seconds(128, 0)
    again = setup.reopen(engine, tier={"restore": "auto"})
    assert again.tier._chooser.times.step_seconds(128, 0) == pytest.approx(known)
    assert again.tier._rows.read_rate.is_known
    assert json.loads((setup.folder / "rates.json").read_text())["machine"]["model"]
    other = setup.reopen(again, tier={"restore": "auto"}, dtype="float16")
    assert other.tier._chooser.times is None, "rates of another model"


@NEWEST
def test_a_load_teaches_the_disks_rate_and_what_the_protocol_costs(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = setup.open()
    chain = engine.chain("a", 8)
    engine.store(chain)
    engine.forget()
    learnt: list[float] = []
    rows: RowStore = engine.tier._rows
    end = rows.read_rate.end

    def spy(num_bytes: int, now: float, *, teaches: bool = True) -> None:
        learnt.append(num_bytes)
        end(num_bytes, now, teaches=teaches)

    monkeypatch.setattr(type(rows.read_rate), "end", lambda _, *args, **more: spy(*args, **more))
    context = engine.request()
    engine.place(chain, context)

    def is_here() -> bool:
        verdicts = {engine.manager.lookup(key, context).name for key in chain}
        engine.step()
        return verdicts == {"HIT"}

    wait_until(is_here, "the head is not loaded")
    engine.step(begun=[context])
    assert sum(learnt) == 8 * engine.row_bytes
    assert rows.read_rate.num_bytes == 0
    assert engine.tier._chooser.protocol._measured


@NEWEST
def test_loads_of_a_worker_that_is_killed_teach_nothing(setup: Setup) -> None:
    engine = setup.open()
    chain = engine.chain("a", 4)
    engine.store(chain)
    engine.forget()
    pid = engine.pid
    context = engine.request()
    engine.place(chain, context)
    assert {engine.manager.lookup(key, context).name for key in chain} == {"RETRY"}
    engine.step()
    wait_until(lambda: bool(engine.tier._rows._events), "no answer comes")
    os.kill(pid, signal.SIGSTOP)
    for key in chain:
        engine.manager.lookup(key, context)
    engine.step()
    time.sleep(0.3)
    os.kill(pid, signal.SIGKILL)
    engine.settle()
    assert not engine.tier._rows.read_rate.is_known
    assert engine.tier._rows.read_rate.num_bytes == 0
    figures = engine.metrics()
    assert figures["tieredkv_failed_loads", ("worker_died",)] == 4
    wait_for(engine, lambda: engine.tier._rows.num_restarts)
    assert engine.metrics()["tieredkv_worker_restarts", ()] == 1


@NEWEST
@pytest.mark.parametrize("reason", ["worker_died", "worker_down", "closing"])
def test_what_a_dead_worker_left_does_not_make_the_disk_slow(setup: Setup, reason: str) -> None:
    engine = setup.open()
    rows: RowStore = engine.tier._rows
    began = time.monotonic() - 10.0
    rows.read_rate.begin(2 * engine.row_bytes, began)
    rows._measure(Loaded(0, "", None, began + 0.03))
    rows._measure(Loaded(1, reason))  # ten seconds later
    assert not rows.read_rate.is_known
    assert rows.read_rate.num_bytes == 0


@NEWEST
def test_writes_that_were_held_back_do_not_make_the_disk_slow(setup: Setup) -> None:
    engine = setup.open()
    rows: RowStore = engine.tier._rows
    began = time.monotonic() - 10.0
    rows.write_rate.begin(2 * engine.row_bytes, began)
    rows._measure(Stored(0, "", False, began + 0.03))
    rows._measure(Stored(1, "", True, began + 9.0))
    assert not rows.write_rate.is_known


def test_figures_tell_what_was_stored_found_and_loaded(setup: Setup) -> None:
    engine = setup.open()
    chain = engine.chain("a", 4)
    engine.store(chain)
    engine.forget()
    engine.hits([*chain, *engine.chain("b", 1)])
    figures = engine.metrics()
    assert figures["tieredkv_stored_bytes", ()] == 4 * engine.row_bytes
    assert figures["tieredkv_loaded_bytes", ()] == 4 * engine.row_bytes
    assert figures["tieredkv_lookups", ("hit",)] == 4
    assert figures["tieredkv_lookups", ("miss",)] >= 1
    assert figures["tieredkv_restores", ("load", "setting")] == 1
    assert figures["tieredkv_disk_chunks", ()] == 4
    assert figures["tieredkv_disk_bytes", ()] > 0
    assert figures["tieredkv_disk_budget_bytes", ()] == 16 << 20
    again = engine.metrics()
    assert ("tieredkv_stored_bytes", ()) not in again, "told once"
    assert again["tieredkv_disk_chunks", ()] == 4
    defined = engine.tier.build_metric_definitions({})
    assert {name for name, _ in figures} <= defined.keys()
    for (name, labels), _ in figures.items():
        assert len(defined[name].labelnames) == len(labels)


def test_expired_chunks_are_counted(setup: Setup) -> None:
    engine = setup.open(tier={"disk_encryption": "off"})  # its bytes are looked for on disk
    engine.store(engine.chain("a", 3))
    setup.set_clock(DAY_S + 1)
    engine.store(engine.chain("b", 1))  # with which figures come
    wait_for(engine, lambda: not setup.holds(bytes_of(engine.chain("a", 1)[0], 512)))
    engine.store(engine.chain("c", 1))
    assert engine.metrics()["tieredkv_expired_chunks", ()] == 3


@NEWEST
def test_a_full_disk_is_a_miss_and_no_more(setup: Setup) -> None:
    engine = setup.open()
    chain, later = engine.chain("a", 2), engine.chain("b", 4)
    engine.store(chain)
    limits = resource.prlimit(engine.pid, resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))
    engine.store(later)
    engine.forget()
    assert engine.hits(later) == [False] * 4
    assert engine.hits(chain) == [True, True], "what was there is served"
    figures = engine.metrics()
    assert sum(it for (name, _), it in figures.items() if name == "tieredkv_failed_stores") == 4
    assert not any(name == "tieredkv_worker_restarts" for name, _ in figures)
    resource.prlimit(engine.pid, resource.RLIMIT_FSIZE, limits)
    engine.store(later)
    engine.forget()
    assert engine.hits(later) == [True] * 4


@NEWEST
@pytest.mark.parametrize("restore", ["load", "auto"])
def test_a_budget_for_less_than_a_prompt_is_no_trouble(setup: Setup, restore: str) -> None:
    engine = setup.open(tier={"disk_size": "1300KiB", "restore": restore})
    for name in "abcdef":
        engine.store(engine.chain(name, 8))
        engine.forget()
        engine.hits(engine.chain(name, 8))
        engine.forget()
    figures = engine.metrics()
    assert figures["tieredkv_disk_bytes", ()] <= 1300 << 10


def test_arguments_of_the_choice_that_make_no_sense_are_refused(setup: Setup) -> None:
    tiers = ({"restore": "both"}, {"prefill_seconds": "fast"}, {"kv_events_namespaces": "some"})
    for tier in tiers:  # in one test, so that every engine has the same texts
        with refused(ConfigError):
            setup.open(tier=tier)
