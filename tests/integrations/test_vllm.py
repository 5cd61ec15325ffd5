"""Our disk tier inside vLLM: what was asked to be kept comes back, and vLLM bears every fault.

Without vLLM the tests run against a stand-in of its classes; `make test-vllm` runs them with vLLM.
"""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import golden
from tests.golden import refused
from tests.integrations.conftest import Setup
from tests.integrations.engines import HAS_VLLM, NEWEST, NUM_ROWS, Engine, bytes_of, flip_a_bit
from tests.integrations.with_vllm import VERSIONS
from tests.waiting import is_alive, wait_until
from tieredkv.errors import ConfigError, StorageError, StoreBusyError
from tieredkv.integrations import offers, vllm_settings
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Df, EvictFilter, Ls, Verify

DAY_S = 86_400.0
CLEAR = {"disk_encryption": "off"}  # where bytes of chunks are looked for on disk
Open = Callable[..., Engine]


def test_what_was_asked_to_be_kept_comes_back_bit_for_bit(setup: Setup) -> None:
    engine = setup.open()
    chain = engine.chain("a", 6)
    engine.store(chain)
    assert engine.hits(chain) == [True] * 6, "vLLM's own memory has it"
    engine.forget()
    assert engine.hits([*chain, *engine.chain("b", 1)]) == [True] * 6 + [False]
    assert engine.tier._rows.stats().blocks == 6


def test_in_memory_never_reaches_the_disk(setup: Setup) -> None:
    engine = setup.open(tier=CLEAR)
    chain, other = engine.chain("a", 4), engine.chain("b", 2)
    engine.store(chain, "in_memory")
    engine.store(other, None)  # the default
    engine.forget()
    assert engine.hits([*chain, *other]) == [False] * 6
    setup.close(engine)
    for key in [*chain, *other]:
        assert not setup.holds(bytes_of(key, 512))
    assert setup.holds(b"TKVSLOT") is False


WINDOW = {"sliding_window_size_in_chunks": 3}
PARTLY: list[dict[str, Any]] = [
    {"groups": [{}, {"group_id": 1}]},
    {"groups": [{}, {"group_id": 1, **WINDOW}]},
    {"groups": [WINDOW], "blocks_per_chunk": 4},
]


@pytest.mark.parametrize("encryption", ["on", "off"])
def test_a_model_whose_chunks_do_not_fill_their_rows_is_refused_in_one_sentence(
    setup: Setup, encryption: str
) -> None:
    for changes in PARTLY:
        if HAS_VLLM and setup.kind.is_older and len(changes) > 1:
            continue  # vLLM 0.26 does not tell of windows
        with refused(ConfigError, hide=dict.fromkeys(VERSIONS, "VERSION")):
            setup.open(tier={"disk_encryption": encryption}, **changes)
        assert not setup.folder.exists(), "nothing is written of any row"


@NEWEST
@pytest.mark.parametrize(
    "params",
    [{"retention": "48h"}, {"retention": ["24h"]}, {"retention": "24h", "tenant": 7}],
    ids=str,
)
def test_words_that_do_not_exist_never_lengthen_a_life(
    setup: Setup, params: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = setup.open(tier={"default_retention": "24h"})
    chain = engine.chain("a", 2)
    for _ in range(2):
        engine.store(chain, **{"retention": None, **params})
    engine.forget()
    assert engine.hits(chain) == [False, False]
    (warning,) = golden.warnings_of(caplog, "tieredkv.integrations.vllm")
    golden.told(re.sub("(not understood:).*", r"\1 CAUSE (told once)", warning))


def test_the_default_is_the_configured_one(setup: Setup) -> None:
    engine = setup.open(tier={"default_retention": "24h"})
    engine.store(engine.chain("a", 2), None)
    engine.store(engine.chain("b", 2), "in_memory")
    engine.forget()
    assert engine.hits(engine.chain("a", 2)) == [True, True]
    assert engine.hits(engine.chain("b", 2)) == [False, False]


def test_a_request_for_the_disk_wants_what_others_computed_of_its_prompt(setup: Setup) -> None:
    engine = setup.open()
    chain = engine.chain("a", 4)
    engine.store(chain[:2], "in_memory")
    context = engine.request("24h")
    engine.place(chain, context)
    assert engine.manager.on_new_request(context).policy.name == "REQUEST_LEVEL"
    engine.compute(chain, context)  # vLLM offers all of them, as the policy says
    engine.settle()
    engine.forget()
    assert engine.hits(chain) == [True] * 4


def test_a_restart_is_a_hit(setup: Setup) -> None:
    engine = setup.open()
    chain = engine.chain("a", 4)
    engine.store(chain)
    again = setup.reopen(engine)
    assert again.hits(chain) == [True] * 4


def test_a_stop_writes_what_was_offered(setup: Setup) -> None:
    engine = setup.open()
    chain = engine.chain("a", 4)
    context = engine.request("24h")
    engine.place(chain, context)
    engine.compute(chain, context)
    again = setup.reopen(engine)
    assert again.hits(chain) == [True] * 4


def test_a_killed_worker_is_a_miss_and_the_next_one_serves_again(setup: Setup) -> None:
    engine = setup.open()
    chain = engine.chain("a", 4)
    engine.store(chain)
    engine.forget()
    pid = engine.pid
    os.kill(pid, signal.SIGSTOP)
    context = engine.request()
    engine.place(chain, context)
    assert [engine.manager.lookup(key, context).name for key in chain] == ["RETRY"] * 4
    engine.step()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: engine.pid != pid, "no other worker is up")
    wait_until(
        lambda: [engine.manager.lookup(key, context).name for key in chain] == ["MISS"] * 4,
        "the lookup is not answered",
    )
    assert engine.hits(chain) == [True] * 4


@NEWEST
def test_a_load_that_takes_too_long_is_a_miss_once_the_worker_is_dead(setup: Setup) -> None:
    engine = setup.open(tier={"load_timeout": "2s"})
    chain = engine.chain("a", 4)
    engine.store(chain)
    engine.forget()
    context = engine.request()
    engine.place(chain, context)

    def verdicts() -> list[str]:
        return [engine.manager.lookup(key, context).name for key in chain]

    assert verdicts() == ["RETRY"] * 4
    engine.step()
    wait_until(lambda: bool(engine.tier._rows._events), "no answer comes")
    pid = engine.pid
    os.kill(pid, signal.SIGSTOP)
    waiting = {"RETRY", "HIT_PENDING"}
    assert waiting >= {*verdicts()}, "the load has begun"
    began = time.monotonic()

    def has_ended() -> bool:
        engine.step()
        return not waiting & {*verdicts()}

    wait_until(has_ended, "the load does not end")
    assert verdicts() == ["MISS"] * 4
    assert not is_alive(pid), "rows came back while the worker could still write to them"
    assert time.monotonic() - began > 2
    assert engine.pid != pid
    assert engine.hits(chain) == [True] * 4


@NEWEST
def test_lookups_of_a_stopped_worker_are_misses_and_the_worker_is_given_up(setup: Setup) -> None:
    engine = setup.open(tier={"load_timeout": "1s"})
    chain = engine.chain("a", 2)
    engine.store(chain)
    engine.forget()
    pid = engine.pid
    os.kill(pid, signal.SIGSTOP)
    assert engine.hits(chain) == [False, False]

    def is_given_up() -> bool:
        engine.step()
        return engine.pid != pid

    wait_until(is_given_up, "the worker is not given up")
    assert engine.hits(chain) == [True, True]


@NEWEST
def test_a_worker_that_is_stopped_in_the_middle_of_a_store_ends_it(setup: Setup) -> None:
    engine = setup.open(tier={"load_timeout": "2s"})
    pid = engine.pid
    os.kill(pid, signal.SIGSTOP)
    engine.store(engine.chain("a", 4))
    assert not is_alive(pid)
    assert engine.pid != pid
    engine.store(engine.chain("b", 4))
    engine.forget()
    assert engine.hits(engine.chain("b", 4)) == [True] * 4


@NEWEST
def test_chunks_are_encrypted_on_disk_and_their_keys_go_with_them(
    setup: Setup, tmp_path: Path
) -> None:
    keys = {"disk_key_dir": str(tmp_path / "keys")}
    engine = setup.open(tier=keys)
    chain = engine.chain("a", 3)
    engine.store(chain)
    engine = setup.reopen(engine, tier=keys)
    assert engine.hits(chain) == [True] * 3
    assert not any(setup.holds(bytes_of(each, 512)) for each in chain)
    assert engine.tier._rows.stats().num_keys == 1
    setup.close(engine)
    control = StoreControl(str(setup.folder), key_dir=keys["disk_key_dir"])
    assert len(control.answer(setup.everything)["disk"]["erased_keys"]) == 1


@NEWEST
def test_flipped_bits_are_a_miss(setup: Setup) -> None:
    engine = setup.open(tier=CLEAR)
    chain = engine.chain("a", 3)
    engine.store(chain)
    setup.close(engine)
    flip_a_bit(setup.folder, bytes_of(chain[1], 8192), 100)
    engine = setup.open(tier=CLEAR)
    assert engine.hits(chain) == [True, False, True]
    assert engine.hits(chain) == [True, False, True]


def test_a_chunk_of_several_blocks_and_ranks_is_one_record(setup: Setup) -> None:
    # vLLM 0.26 does not tell windows, so that chunks of several blocks are refused there.
    num_blocks = 1 if HAS_VLLM and setup.kind.is_older else 4
    engine = setup.open(ranks=2, blocks_per_chunk=num_blocks)
    assert engine.row_bytes == 2 * num_blocks * 8192
    chain = engine.chain("a", 3)
    engine.store(chain)
    engine.forget()
    assert engine.hits(chain) == [True] * 3
    assert engine.tier._rows.stats().blocks == 3
    (listed,) = [each for page in setup.control.pages(Ls()) for each in page][:1]
    assert listed.bytes in (3 * engine.row_bytes, engine.row_bytes)


def test_other_facts_about_the_bytes_are_a_miss(setup: Setup) -> None:
    each: list[dict[str, Any]] = [
        {"dtype": "float16"},
        {"layer_names": ("layers.0", "layers.2")},
        {"parallel": {"tp_size": 1, "pp_size": 2}},
    ]
    if not setup.kind.is_older:  # which does not tell these
        each += [{"kv_cache_layout": "BLHNC"}, {"canonical_layout": True}]
    engine = setup.open()
    chain = engine.chain("a", 2)
    engine.store(chain)
    for changes in each:
        engine = setup.reopen(engine, **changes)
        assert engine.hits(chain) == [False, False], changes
    engine = setup.reopen(engine)
    assert engine.hits(chain) == [True, True]


def test_other_weights_under_the_same_name_are_a_miss(setup: Setup) -> None:
    engine = setup.open()
    chain = engine.chain("a", 2)
    engine.store(chain)
    setup.close(engine)
    (setup.model / "model.safetensors").write_bytes(b"others!")
    assert setup.open().hits(chain) == [False, False]


@NEWEST
def test_a_text_stands_for_weights_that_are_in_no_folder(setup: Setup) -> None:
    engine = setup.open(tier={"weights_id": "first"})
    chain = engine.chain("a", 1)
    engine.store(chain)
    engine = setup.reopen(engine, tier={"weights_id": "second"})
    assert engine.hits(chain) == [False]
    engine = setup.reopen(engine, tier={"weights_id": "first"})
    assert engine.hits(chain) == [True]


@NEWEST
def test_a_text_about_the_weights_does_not_hide_that_they_changed(setup: Setup) -> None:
    engine = setup.open(tier={"weights_id": "quantized"})
    chain = engine.chain("a", 1)
    engine.store(chain)
    engine = setup.reopen(engine, tier={"weights_id": "quantized"})
    assert engine.hits(chain) == [True]
    setup.close(engine)
    (setup.model / "model.safetensors").write_bytes(b"others!")
    engine = setup.open(tier={"weights_id": "quantized"})
    assert engine.hits(chain) == [False]
    setup.close(engine)
    (setup.model / "model.safetensors").unlink()
    engine = setup.open(tier={"weights_id": "quantized"})
    assert engine.hits(chain) == [False]


def test_a_wrong_folder_of_weights_is_refused_whatever_text_there_is(setup: Setup) -> None:
    with refused(ConfigError):
        setup.open(tier={"weights_id": "mine", "weights": "/none"})


def test_weights_that_nobody_knows_are_refused(setup: Setup) -> None:
    (setup.model / "model.safetensors").unlink()
    with refused(ConfigError):
        setup.open()


def test_tenants_do_not_find_each_others_chunks(setup: Setup) -> None:
    engine = setup.open()
    chain = engine.chain("a", 2)
    engine.store(chain, tenant="one")
    engine.forget()
    assert engine.hits(chain, tenant="two") == [False, False]
    assert engine.hits(chain, tenant="one") == [True, True]
    listed = [each for page in setup.control.pages(Ls()) for each in page]
    assert len({each.namespace for each in listed}) == 1


def test_two_requests_may_offer_one_chunk_at_once(setup: Setup) -> None:
    engine = setup.open()
    chain = engine.chain("a", 4)
    for tenant in ("one", "one", "two"):
        context = engine.request("24h", tenant=tenant)
        engine.place(chain, context)
        engine.compute(chain, context)
    engine.settle()
    engine.forget()
    assert engine.hits(chain, tenant="one") == [True] * 4


# --- times --------------------------------------------------------------------------------------


def test_a_chunk_expires_a_day_after_its_first_store_and_is_erased(setup: Setup) -> None:
    engine = setup.open(tier=CLEAR)
    chain = engine.chain("a", 2)
    engine.store(chain)
    for hours in (6, 12, 18):  # found, promoted, lost and offered again
        setup.set_clock(hours * 3600.0)
        engine.forget()
        assert engine.hits(chain, "24h") == [True, True]
        engine.store(chain)
    assert setup.holds(bytes_of(chain[0], 512))
    engine = setup.reopen(engine, tier=CLEAR)
    assert engine.hits(chain) == [True, True]
    engine.store(chain)  # offered again after a restart
    engine.forget()
    setup.set_clock(DAY_S - 60)
    assert engine.hits(chain) == [True, True]
    engine.forget()
    setup.set_clock(DAY_S + 1)
    assert engine.hits(chain) == [False, False]
    data = bytes_of(chain[0], 512)
    wait_until(lambda: not setup.holds(data), "it is not erased")


def test_a_copy_that_others_computed_before_is_as_old_as_their_offer(setup: Setup) -> None:
    engine = setup.open()
    chain = engine.chain("a", 2)
    engine.store(chain, "in_memory")
    setup.set_clock(DAY_S - 60)
    context = engine.request("24h")
    engine.place(chain, context)
    engine.compute(chain, context)
    engine.settle()
    engine.forget()
    assert engine.hits(chain) == [True, True]
    engine.forget()
    setup.set_clock(DAY_S + 1)
    assert engine.hits(chain) == [False, False]


def test_what_is_computed_again_after_it_expired_lives_again(setup: Setup) -> None:
    engine = setup.open()
    chain = engine.chain("a", 3)
    engine.store(chain)
    engine.forget()
    setup.set_clock(DAY_S + 1)
    context = engine.request("24h")
    engine.place(chain, context)

    def is_missed() -> bool:  # vLLM asks no further than the first chunk that is missing
        engine.step()
        return bool(engine.manager.lookup(chain[0], context).name == "MISS")

    wait_until(is_missed, "the lookup is not answered")
    engine.compute(chain, context)
    engine.settle()
    engine.forget()
    found = engine.hits(chain)
    assert found[0]
    if not setup.kind.is_older:  # which does not tell which chunks were computed
        assert found == [True] * 3


# --- the operator -------------------------------------------------------------------------------


def test_the_command_lines_verbs_work_on_the_store_of_a_running_engine(setup: Setup) -> None:
    engine = setup.open()
    engine.store(engine.chain("a", 4))
    engine.store(engine.chain("b", 2))
    control = setup.control
    told = control.answer(Df())
    assert told["disk"]["blocks"] == 6
    assert told["writer_pid"] == engine.pid
    assert told["device"] is None
    listed = [each for page in control.pages(Ls()) for each in page]
    if setup.kind.is_older:  # which tells no positions
        assert [each.blocks for each in listed] == [1] * 6
    else:
        assert sorted(each.blocks for each in listed) == [2, 4]
    assert control.answer(Verify())["bad"] == 0
    evicted = control.answer(EvictFilter(ids=(listed[0].id,)))
    assert evicted["evicted_blocks"] == listed[0].blocks
    assert control.answer(Df())["disk"]["blocks"] == 6 - listed[0].blocks
    assert control.answer(EvictFilter(all=True))["evicted_blocks"] == 6 - listed[0].blocks
    engine.forget()
    assert not any(engine.hits([*engine.chain("a", 4), *engine.chain("b", 2)]))


def test_what_the_operator_evicts_while_it_is_offered_is_not_written_after(setup: Setup) -> None:
    engine = setup.open()
    chain = engine.chain("a", 4)
    context = engine.request("24h")
    engine.place(chain, context)
    engine.compute(chain, context)
    setup.control.answer(EvictFilter(all=True))  # the engine has not taken the answer yet
    engine.settle()
    engine.forget()
    assert engine.hits(chain) == [False] * 4
    engine.store(chain)
    engine.forget()
    assert engine.hits(chain) == [True] * 4


def test_an_offer_that_takes_several_steps_is_written_in_whole(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offers, "PART_CHUNKS", 2)
    monkeypatch.setattr(offers, "_MOST_S", 0.0)
    engine = setup.open()
    chain = engine.chain("a", 7)
    engine.store(chain)
    engine.forget()
    assert engine.hits(chain) == [True] * 7


@NEWEST
def test_the_command_line_works_on_a_stopped_store(setup: Setup) -> None:
    engine = setup.open()
    engine.store(engine.chain("a", 4))
    setup.close(engine)
    done = subprocess.run(
        [sys.executable, "-m", "tieredkv", "df", "--disk-dir", str(setup.folder), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1])["disk"]["blocks"] == 4


# --- bad input ----------------------------------------------------------------------------------


@NEWEST
def test_a_folder_that_another_engine_uses_is_refused(setup: Setup) -> None:
    setup.open()
    with pytest.raises(StoreBusyError):
        setup.open()


def test_settings_that_make_no_sense_are_refused(setup: Setup) -> None:
    tiers = ({"disk_dir": None}, {"disk_size": "4KiB"}, {"default_retention": "48h"})
    for tier in tiers:  # in one test, so that every engine has the same texts
        with refused(ConfigError):
            setup.open(tier=tier)


def test_arguments_that_are_not_known_are_borne_and_named(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    engine = setup.open(tier={"something_new": 1, "locality": "LOCAL"})
    (warning,) = golden.warnings_of(caplog, vllm_settings.__name__)
    golden.told(warning)
    chain = engine.chain("a", 2)
    engine.store(chain)
    engine.forget()
    assert engine.hits(chain) == [True, True]


def test_each_data_parallel_rank_has_a_folder_of_its_own(setup: Setup) -> None:
    told = {"data_parallel_index": 1, "data_parallel_size": 2}
    if setup.kind.is_older:
        with refused(ConfigError):
            setup.open(parallel=told)
        return
    setup.open(parallel=told)
    setup.open(parallel=told | {"data_parallel_index": 0})
    assert sorted(path.name for path in setup.folder.iterdir()) == ["dp0", "dp1"]


def test_stores_leave_most_of_the_rows_for_loads(setup: Setup) -> None:
    engine = setup.open()
    chain = engine.chain("a", NUM_ROWS - 2)
    engine.store(chain)  # one job that is too large: its head is stored
    engine.forget()
    assert engine.hits(chain) == [True] * (NUM_ROWS // 2) + [False] * (NUM_ROWS // 2 - 2)
    engine.forget()
    engine.store(chain)  # the rest, as what is stored takes no room
    engine.forget()
    assert engine.hits(chain) == [True] * len(chain)


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is here")
def test_without_vllm_one_sentence_says_what_to_do() -> None:
    code = "import tieredkv.integrations.vllm"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    golden.told(done.stderr.splitlines()[-1])


def test_no_view_of_the_rows_is_left_after_a_stop(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    engine = setup.open()
    engine.store(engine.chain("a", 2))
    setup.close(engine)  # the stand-in raises, vLLM warns
    assert "Keeping" not in caplog.text


def test_rows_that_no_other_process_can_reach_are_refused(tmp_path: Path) -> None:
    from tieredkv.integrations.shared_rows import open_rows

    with refused(StorageError):
        open_rows(memoryview(bytearray(1 << 22)))
