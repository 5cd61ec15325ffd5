"""The tier tells routers what the disk gets and loses, where vLLM publishes events at all.

Without vLLM the tests run against a stand-in of its classes; `make test-vllm` runs them with vLLM.
"""

import os
import signal
from typing import Any

import pytest

from tests.integrations.conftest import Setup
from tests.integrations.engines import NEWEST, Engine, flip_a_bit
from tests.waiting import wait_until
from tieredkv.operate.calls import EvictFilter

DAY_S = 86_400.0


def told(engine: Engine) -> list[tuple[str, list[bytes]]]:
    """Return what the tier tells of the disk: chunks that it got (`+`) and lost (`-`)."""
    events = [it for it in engine.manager.take_events() if _medium(it) == "STORAGE"]
    return [("-" if it.removed else "+", sorted(it.keys)) for it in events]


def _medium(event: Any) -> str:
    return str(getattr(event.medium, "value", event.medium))


def told_later(engine: Engine) -> list[tuple[str, list[bytes]]]:
    """Go on with steps until something is told."""
    found: list[tuple[str, list[bytes]]] = []

    def has_come() -> bool:
        engine.step()
        found.extend(told(engine))
        return bool(found)

    wait_until(has_come, "nothing is told")
    return found


def open_engine(setup: Setup, **tier: Any) -> Engine:
    return setup.open(tier=tier, enable_kv_cache_events=True)


def test_what_is_written_is_told_and_what_is_evicted_too(setup: Setup) -> None:
    engine = open_engine(setup)
    chain = sorted(engine.chain("a", 3))
    engine.store(chain)
    assert told(engine) == [("+", chain)]
    engine.store(chain)
    assert told(engine) == [], "it is told once"
    setup.control.answer(EvictFilter(all=True))
    assert told_later(engine) == [("-", chain)]
    engine.forget()
    engine.store(chain)
    assert told(engine) == [("+", chain)]


def test_what_expires_is_told(setup: Setup) -> None:
    engine = open_engine(setup)
    chain = sorted(engine.chain("a", 2))
    engine.store(chain)
    told(engine)
    setup.set_clock(DAY_S + 1)
    found = told_later(engine)
    while sum(len(keys) for _, keys in found) < 2:
        found += told_later(engine)
    assert sorted(key for sign, keys in found for key in keys if sign == "-") == chain


def test_what_gives_way_to_others_is_told(setup: Setup) -> None:
    engine = open_engine(setup, disk_size="1300KiB")
    for number in range(16):
        engine.store(engine.chain(f"{number}", 8))
        engine.forget()
    found = told_later(engine)
    while not any(sign == "-" for sign, _ in found):
        found += told_later(engine)


@NEWEST
def test_what_is_dropped_as_it_is_damaged_is_told(setup: Setup) -> None:
    clear = {"disk_encryption": "off"}  # bytes of chunks are looked for on disk
    engine = open_engine(setup, **clear)
    chain = sorted(engine.chain("a", 2))
    engine.store(chain)
    engine = setup.reopen(engine, tier=clear, enable_kv_cache_events=True)
    for key in chain:
        flip_a_bit(setup.folder, key, 64)
    assert engine.hits(chain) == [False, False]
    assert told(engine) == [("+", chain), ("-", chain)], "found by a lookup, not by a load"


def test_what_an_earlier_run_has_stored_is_told_when_it_is_used(setup: Setup) -> None:
    engine = open_engine(setup)
    chain, other = sorted(engine.chain("a", 2)), engine.chain("b", 2)
    engine.store(chain)
    engine.store(other)
    engine = setup.reopen(engine, enable_kv_cache_events=True)
    assert told(engine) == []
    assert engine.hits(chain) == [True, True]
    assert told(engine) == [("+", chain)]
    setup.control.answer(EvictFilter(all=True))
    assert told_later(engine) == [("-", chain)], "nobody knew of the others"


@NEWEST
def test_of_a_worker_that_is_started_again_nothing_is_known(setup: Setup) -> None:
    engine = open_engine(setup)
    chain = sorted(engine.chain("a", 2))
    engine.store(chain)
    told(engine)
    os.kill(engine.pid, signal.SIGKILL)
    assert told_later(engine) == [("-", chain)]
    engine.forget()
    assert engine.hits(chain) == [True, True]
    assert told(engine) == [("+", chain)]


@pytest.mark.parametrize("restore", ["load", "compute"])
def test_chunks_that_are_loaded_or_computed_are_told(setup: Setup, restore: str) -> None:
    engine = open_engine(setup)
    chain = sorted(engine.chain("a", 2))
    engine.store(chain)
    setup.close(engine)
    engine = open_engine(setup, restore=restore)
    engine.hits(chain)
    if restore == "compute":
        assert told(engine) == []
        engine.store(chain)  # as it was computed
    assert told(engine) == [("+", chain)]


@NEWEST
@pytest.mark.parametrize("namespaces", ["open", "all"])
def test_tenants_chunks_are_told_only_if_the_operator_says_so(
    setup: Setup, namespaces: str
) -> None:
    engine = open_engine(setup, kv_events_namespaces=namespaces)
    chain = sorted(engine.chain("a", 2))
    engine.store(chain, tenant="one")
    assert told(engine) == ([] if namespaces == "open" else [("+", chain)])
    engine.forget()
    engine.hits(chain, tenant="one")
    setup.control.answer(EvictFilter(all=True))
    if namespaces == "all":
        assert told_later(engine) == [("-", chain)]
    engine.settle()
    assert told(engine) == []


def test_nothing_is_told_or_kept_where_vllm_publishes_nothing(setup: Setup) -> None:
    engine = setup.open()
    engine.store(engine.chain("a", 2))
    assert told(engine) == []
    assert engine.tier._announced is None
    setup.control.answer(EvictFilter(all=True))
    engine.settle()
    assert engine.tier._rows.take_left().hashes == []
