"""A prompt served from any tier gives the same tokens as a cold one."""

import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.engine.conftest import write_checkpoint
from tests.levels import few
from tests.prompts import prompt
from tests.waiting import wait_until
from tieredkv import LLM, SamplingParams
from tieredkv.cache import compute_rate, lookups, room
from tieredkv.cache.rate_file import read_rates
from tieredkv.engine.answer import Answer
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Df, EvictFilter
from tieredkv.storage.format.record import HEADER_BYTES
from tieredkv.types import Tier

pytestmark = pytest.mark.usefixtures("patience")

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SIZES: dict[str, Any] = {
    "device_size": "16MiB",
    "host_size": "16MiB",
    "disk_size": "256MiB",
    "restore": "load",
}


def by_tier(output: Answer) -> dict[str, int]:
    """Return the cached tokens by tier, without the tiers that had none."""
    return {tier: n for tier, n in output.usage.cached_tokens_by_tier.items() if n}


def one(llm: LLM, tokens: list[int], **options: str) -> Answer:
    """Serve one prompt greedily, check every invariant, and return its output."""
    [output] = llm.generate(tokens, GREEDY, **options)
    llm.core.cache.check()
    llm.core.scheduler.check()
    return output


@pytest.fixture
def disk_dir(tmp_path: Path) -> str:
    """Return the folder of the test's store."""
    return str(tmp_path / "store")


@pytest.fixture
def llm(disk_dir: str) -> Iterator[LLM]:
    """Return the demo model over small tiers, with a disk."""
    with LLM("tiny-random", retention="24h", disk_dir=disk_dir, **SIZES) as llm:
        yield llm


@pytest.mark.usefixtures("any_tier")
def test_every_tier_and_a_restart_give_the_cold_tokens(disk_dir: str) -> None:
    tokens = prompt(1)
    with LLM("tiny-random", retention="24h", disk_dir=disk_dir, **SIZES) as llm:
        cold = one(llm, tokens)
        assert by_tier(cold) == {}
        warm = one(llm, tokens)
        assert by_tier(warm) == {"device": 496}
        digest = llm.core.kv_digests.by_block(llm.make_request(tokens, GREEDY))
        assert len(digest) == len(tokens) // 16
        assert llm.demote("host")
        from_host = one(llm, tokens)
        assert by_tier(from_host) == {"host": 496}
        assert llm.core.kv_digests.by_block(llm.make_request(tokens, GREEDY)) == digest
        assert llm.demote("disk")
        from_disk = one(llm, tokens)
        assert by_tier(from_disk) == {"disk": 496}
        assert llm.core.kv_digests.by_block(llm.make_request(tokens, GREEDY)) == digest
    with LLM("tiny-random", retention="24h", disk_dir=disk_dir, **SIZES) as llm:
        restarted = one(llm, tokens)
        assert by_tier(restarted) == {"disk": 496}
        assert llm.core.kv_digests.by_block(llm.make_request(tokens, GREEDY)) == digest
    for output in (warm, from_host, from_disk, restarted):
        assert output.token_ids == cold.token_ids


@pytest.mark.usefixtures("any_tier")
def test_a_graceful_stop_writes_what_24h_promised(disk_dir: str) -> None:
    tokens = prompt(2)
    with LLM("tiny-random", retention="24h", disk_dir=disk_dir, **SIZES) as llm:
        cold = one(llm, tokens)
        assert llm.core.parts.tiers.counters.demoted_disk_blocks == 0
    with LLM("tiny-random", retention="24h", disk_dir=disk_dir, **SIZES) as llm:
        again = one(llm, tokens)
    assert by_tier(again) == {"disk": 496}
    assert again.token_ids == cold.token_ids


def test_a_wholly_cached_prompt_recomputes_its_last_token_only(llm: LLM) -> None:
    tokens = prompt(3, 512)
    cold = one(llm, tokens)
    digest = llm.core.kv_digests.by_block(llm.make_request(tokens, GREEDY))
    warm = one(llm, tokens)
    assert by_tier(warm) == {"device": 511}
    assert warm.token_ids == cold.token_ids
    assert llm.core.kv_digests.by_block(llm.make_request(tokens, GREEDY)) == digest


@pytest.mark.parametrize("any_tier", few(["disk", "folder"]), indirect=True)
@pytest.mark.usefixtures("any_tier")
def test_a_prefix_larger_than_the_arena_still_loads_from_disk(disk_dir: str) -> None:
    sizes = {**SIZES, "host_size": "512KiB"}
    tokens = prompt(4, 1600)
    with LLM("tiny-random", retention="24h", disk_dir=disk_dir, **sizes) as llm:
        assert llm.core.parts.tiers.host.num_blocks == 16
        cold = one(llm, tokens)
        assert llm.demote("disk")
        hit = one(llm, tokens)
    assert by_tier(hit) == {"disk": 1599}
    assert hit.token_ids == cold.token_ids


@pytest.mark.parametrize("any_tier", few(["disk", "folder"]), indirect=True)
@pytest.mark.usefixtures("any_tier")
def test_eviction_under_pressure_walks_blocks_down_to_the_disk_and_back(disk_dir: str) -> None:
    sizes = {**SIZES, "device_size": "4MiB", "host_size": "4MiB"}
    prompts = [prompt(100 + i, 1000) for i in range(8)]
    with LLM("tiny-random", retention="24h", disk_dir=disk_dir, **sizes) as llm:
        cold = [one(llm, tokens) for tokens in prompts]
        assert llm.core.parts.tiers.counters.demoted_disk_blocks > 0
        again = [one(llm, tokens) for tokens in prompts]
        assert llm.core.parts.tiers.counters.demotions_dropped == 0
    assert [output.token_ids for output in again] == [output.token_ids for output in cold]
    assert by_tier(again[0]) == {"disk": 992}


def test_requests_with_a_common_prefix_in_flight_compute_it_once(llm: LLM) -> None:
    common = prompt(5, 480)
    prompts = [common + prompt(50 + i, 40) for i in range(4)]
    outputs = llm.generate(prompts, GREEDY)
    llm.core.cache.check()
    computed = sum(o.usage.prompt_tokens - o.usage.cached_tokens for o in outputs)
    assert computed == 480 + 4 * 40
    alone = [one(llm, tokens, cache_salt="alone") for tokens in prompts]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]


@pytest.mark.parametrize("any_tier", few(["disk", "folder"]), indirect=True)
@pytest.mark.usefixtures("any_tier")
def test_two_requests_with_the_same_prefix_on_disk_load_it_once(llm: LLM) -> None:
    tokens = prompt(6)
    one(llm, tokens)
    llm.demote("disk")
    before = llm.core.parts.tiers.counters.promoted_disk_blocks
    outputs = llm.generate([tokens, tokens], GREEDY)
    assert llm.core.parts.tiers.counters.promoted_disk_blocks - before == 31
    assert outputs[0].token_ids == outputs[1].token_ids


def test_all_that_the_store_has_read_is_counted_as_moved_to_host_memory(disk_dir: str) -> None:
    prompts = [prompt(400 + i, 320) for i in range(6)]
    sizes = {**SIZES, "device_size": "1MiB"}  # for one of them: the others are read ahead
    with LLM("tiny-random", retention="24h", disk_dir=disk_dir, **sizes) as llm:
        llm.generate(prompts, GREEDY)
        assert llm.demote("disk")
        llm.generate(prompts, GREEDY)
        counters, block_bytes = llm.core.parts.tiers.counters, llm.core.kv_spec.block_bytes
        num_bytes = counters.promoted_disk_blocks * (HEADER_BYTES + block_bytes)
        assert num_bytes >= 6 * 19 * block_bytes

        def disk() -> Any:
            return llm.tier_stats()["disk"]

        wait_until(lambda: disk()["bytes_read"] >= num_bytes)
        assert disk()["bytes_read"] == num_bytes


def test_batch_composition_never_changes_a_greedy_answer(llm: LLM) -> None:
    prompts = [prompt(200 + i, 20 + 37 * i) for i in range(8)]
    together = llm.generate(prompts, GREEDY)
    alone = [one(llm, tokens, cache_salt=str(i)) for i, tokens in enumerate(prompts)]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]


def test_preemption_recomputes_and_changes_nothing(disk_dir: str) -> None:
    params = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    prompts = [prompt(300 + i, 160) for i in range(6)]
    with LLM("tiny-random", device_size="1MiB", host_size="16MiB") as llm:
        outputs = llm.generate(prompts, params)
        llm.core.cache.check()
        assert llm.core.scheduler.num_preemptions > 0
    with LLM("tiny-random", device_size="16MiB", host_size="16MiB") as llm:
        calm = llm.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in calm]


@pytest.mark.usefixtures("any_tier")
def test_in_memory_prompts_leave_nothing_on_disk(llm: LLM) -> None:
    one(llm, prompt(7), retention="in_memory")
    llm.demote("disk")
    assert llm.core.parts.tiers.counters.demoted_disk_blocks == 0
    stats = llm.tier_stats()["disk"]
    assert isinstance(stats, dict)
    assert stats["blocks"] == 0


def test_another_salt_misses_and_the_same_one_hits(llm: LLM) -> None:
    tokens = prompt(8)
    one(llm, tokens, cache_salt="a")
    assert by_tier(one(llm, tokens, cache_salt="b")) == {}
    assert by_tier(one(llm, tokens)) == {}
    assert by_tier(one(llm, tokens, cache_salt="a")) == {"device": 496}


def test_sampling_parameters_are_no_part_of_the_identity(llm: LLM) -> None:
    tokens = prompt(9)
    one(llm, tokens)
    params = SamplingParams(max_tokens=3, temperature=0.7, top_p=0.9, seed=3)
    [output] = llm.generate(tokens, params)
    assert output.usage.cached_tokens == 496


def test_a_worker_stopped_in_the_middle_of_a_read_spoils_nothing(
    disk_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, other = prompt(10, 1000), prompt(11, 1000)
    settings = {**SIZES, "load_timeout": 0.3}
    with LLM("tiny-random", retention="24h", disk_dir=disk_dir, **settings) as llm:
        cold = one(llm, tokens)
        cold_other = one(llm, other)
        assert llm.demote("disk")
        pid = llm.core.info.worker_pid
        assert pid is not None
        request = llm.make_request(tokens, GREEDY)
        llm.core.add_request(request)
        while not llm.core.parts.tiers.host.num_used:  # until a page is being read
            llm.core.step()
        monkeypatch.setattr(lookups, "LOOKUP_TIMEOUT_S", 0.3)
        os.kill(pid, signal.SIGSTOP)
        try:
            ids: list[int] = []
            while len(ids) < GREEDY.max_tokens:
                for output in llm.core.step():
                    ids.extend(output.token_ids)
                llm.core.wait(0.01)
            assert ids == cold.token_ids
            assert one(llm, other).token_ids == cold_other.token_ids
            llm.core.cache.check()
        finally:
            os.kill(pid, signal.SIGCONT)

        def is_idle() -> bool:
            llm.core.step()
            return llm.core.cache.is_idle

        wait_until(is_idle, "the read does not end")
        llm.core.cache.check()
        assert llm.demote("disk")
        assert one(llm, tokens).token_ids == cold.token_ids
        assert one(llm, other).token_ids == cold_other.token_ids


def test_a_killed_worker_costs_a_miss_and_comes_back(llm: LLM) -> None:
    tokens = prompt(12)
    cold = one(llm, tokens)
    assert llm.demote("disk")
    pid = llm.core.info.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert one(llm, tokens).token_ids == cold.token_ids
    llm.core.verbs.evict()

    def is_back() -> bool:
        llm.core.verbs.evict()
        hit = one(llm, tokens)
        assert hit.token_ids == cold.token_ids
        return by_tier(hit) == {"disk": 496}

    wait_until(is_back, "the worker does not come back")


def test_a_cancelled_request_releases_exactly_what_it_held(llm: LLM) -> None:
    tokens = prompt(13, 1000)
    one(llm, tokens)
    llm.demote("disk")
    device, host = llm.core.parts.tiers.device, llm.core.parts.tiers.host
    for num_steps in range(6):
        llm.core.add_request(llm.make_request(tokens, GREEDY))
        for _ in range(num_steps):
            llm.core.step()
        llm.core.abort(f"llm-{num_steps + 1}")
        while llm.core.has_work:
            llm.core.step()
            llm.core.wait(0.01)
        llm.core.cache.check()
        assert (device.num_used, host.num_used) == (0, 0)


@pytest.mark.usefixtures("any_tier")
def test_an_expired_prefix_misses_to_the_second(
    disk_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset = tmp_path / "offset"
    offset.write_text("0")
    monkeypatch.setenv("TIEREDKV_TEST_CLOCK_OFFSET_FILE", str(offset))
    tokens = prompt(14)
    settings = {**SIZES, "sweep_interval": 0.2}
    with LLM("tiny-random", retention="24h", disk_dir=disk_dir, **settings) as llm:
        one(llm, tokens)
        llm.demote("disk")
        offset.write_text(str(24 * 3600 - 60))
        time.sleep(0.05)
        assert by_tier(one(llm, tokens)) == {"disk": 496}
        llm.core.verbs.evict()
        offset.write_text(str(24 * 3600 + 1))
        time.sleep(0.05)
        assert by_tier(one(llm, tokens)) == {}
        llm.core.verbs.evict()
        offset.write_text("0")
        time.sleep(0.05)
        assert by_tier(one(llm, tokens)) == {}


def test_a_write_limit_drops_demotions_and_holds_up_no_request(
    disk_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "PATIENCE_S", 0.25)
    sizes = {**SIZES, "device_size": "4MiB", "host_size": "4MiB", "drain_timeout": 0.1}
    started_at = time.monotonic()
    with LLM(
        "tiny-random", retention="24h", disk_dir=disk_dir, disk_write_limit="1KiB", **sizes
    ) as llm:
        cold = [one(llm, prompt(seed)).token_ids for seed in range(12)]
        counters = llm.core.parts.tiers.counters
        assert counters.demotions_dropped > 0
        assert counters.lost_blocks.keys() == {"too_slow"}
        assert llm.core.parts.tiers.disk_link.write_rate.steady == 1024, "a stop keeps the limit"
        owed: Any = llm.tier_stats()["owed"]
        assert owed["drain_s"] == owed["bytes"] / 1024 > 0.1
        disk: Any = llm.tier_stats()["disk"]
        assert disk["bytes_write_limit"] == 1024
        # A full token bucket allows one block of 32 KiB and takes half a minute to fill.
        assert disk["blocks"] <= 1 + (time.monotonic() - started_at) / 32
    assert counters.lost_blocks["drain_timeout"] > 0
    with LLM("tiny-random", disk_dir=disk_dir, **SIZES) as llm:
        disk = llm.tier_stats()["disk"]
        assert disk["blocks"] > 1, "what was accepted is lost"
        assert [one(llm, prompt(seed)).token_ids for seed in range(3)] == cold[:3]


def test_blocks_that_a_stop_leaves_no_time_for_are_written_before_it_and_teach_the_write_rate(
    disk_dir: str,
) -> None:
    settings: dict[str, Any] = {"retention": "24h", "disk_dir": disk_dir, **SIZES}
    with LLM("tiny-random", **settings, drain_timeout=0) as llm:
        write_rate, seeds = llm.core.parts.tiers.disk_link.write_rate, itertools.count(1)

        def is_learnt() -> bool:
            one(llm, prompt(next(seeds)))
            return write_rate.is_learnt

        wait_until(is_learnt, "the disk's rate is not learnt")

        def is_all_written() -> bool:
            one(llm, prompt(1))
            return not llm.core.parts.tiers.owed_bytes

        wait_until(is_all_written, "some are still owed")
        assert not llm.core.parts.tiers.counters.lost_blocks

    def is_kept() -> bool:
        saved = read_rates(disk_dir)
        return saved is not None and saved.write_bytes_per_s == write_rate.bytes_per_s

    wait_until(is_kept, "the learnt rate is not kept")  # a stop waits for the file only so long
    with LLM("tiny-random", **settings) as llm:
        assert by_tier(one(llm, prompt(1))) == {"disk": 496}
        assert llm.core.parts.tiers.disk_link.write_rate.bytes_per_s == write_rate.bytes_per_s


@pytest.mark.parametrize("restore", ["auto", "load"])
def test_a_read_limit_below_a_block_a_second_holds_up_no_request(
    disk_dir: str, restore: str
) -> None:
    tokens = prompt(16)
    settings = {**SIZES, "restore": restore, "load_timeout": 0.5}
    with LLM(
        "tiny-random", retention="24h", disk_dir=disk_dir, disk_read_limit="1KiB", **settings
    ) as llm:
        cold = one(llm, tokens)
        llm.demote("disk")
        began_at = time.monotonic()
        again = one(llm, tokens)
        assert again.token_ids == cold.token_ids
        # A full token bucket allows one block of 32 KiB and takes half a minute to fill.
        usage = again.usage
        assert usage.cached_tokens <= 16 * (1 + (time.monotonic() - began_at) / 32)
        if restore == "auto":
            assert usage.miss_reason == "computed_sooner"
            assert usage.recomputed_tokens == 496 - usage.cached_tokens
            assert usage.split_token == usage.recomputed_tokens
            assert usage.predicted_s is not None and usage.actual_s is not None
        else:
            assert usage.miss_reason == "load_timeout"
            assert usage.written_tokens == 496 - usage.cached_tokens


def test_rates_are_learnt_once_and_known_after_a_restart(
    disk_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute_rate, "_FAR", math.inf)  # the speed of a busy machine varies
    settings: dict[str, Any] = {"retention": "24h", "disk_dir": disk_dir, **SIZES}
    with LLM("tiny-random", **settings) as llm:
        read_rate = llm.core.parts.tiers.disk_link.read_rate
        one(llm, prompt(1))

        def is_learnt() -> bool:
            llm.demote("disk")
            one(llm, prompt(1))
            return read_rate.is_learnt

        wait_until(is_learnt, "the disk's rate is not learnt")
    with LLM("tiny-random", **settings) as llm:
        assert llm.core.parts.tiers.disk_link.read_rate.bytes_per_s == read_rate.bytes_per_s
        assert not llm.core.parts.tiers.disk_link.read_rate.is_learnt
    with LLM("tiny-random", **settings, block_size=32) as llm:
        assert llm.core.parts.tiers.disk_link.read_rate.bytes_per_s == 2e9, (
            "other blocks are other reads"
        )


@pytest.mark.usefixtures("any_tier")
def test_flush_to_disk_leaves_the_ram_tiers_empty(llm: LLM) -> None:
    one(llm, prompt(15))
    assert llm.demote(Tier.DISK)
    assert llm.core.parts.tiers.device.num_cached == 0
    assert llm.core.parts.tiers.host.num_cached == 0


def test_what_is_evicted_while_an_engine_closes_is_not_written_any_more(disk_dir: str) -> None:
    settings = {**SIZES, "disk_write_limit": "64KiB", "drain_timeout": "60s"}
    llm = LLM("tiny-random", retention="24h", disk_dir=disk_dir, **settings)
    one(llm, prompt(1))
    closing = threading.Thread(target=llm.close)
    closing.start()
    store = StoreControl(disk_dir)
    wait_until(lambda: store.answer(Df())["disk"]["blocks"] > 0)
    answer = store.answer(EvictFilter(all=True))
    assert answer["evicted_blocks"] > answer["disk"]["evicted_blocks"]
    closing.join(30)
    assert not closing.is_alive()
    assert store.answer(Df())["disk"]["blocks"] == 0


@pytest.mark.parametrize("other", few(["other weights", "other model"]))
def test_a_store_moved_to_another_model_serves_it_nothing_and_loses_nothing(
    tmp_path: Path, disk_dir: str, other: str
) -> None:
    """The two models have caches of one layout, so that only the fingerprint tells them apart."""
    folders = [tmp_path / "this", tmp_path / "that"]
    write_checkpoint(folders[0], "llama")
    write_checkpoint(folders[1], "llama" if other == "other weights" else "qwen2")
    if other == "other weights":
        weights = load_file(file := folders[1] / "model.safetensors")
        weights["model.layers.0.self_attn.k_proj.weight"][0, 0] += 1.0
        save_file(weights, file, {"format": "pt"})
    this, that = map(str, folders)
    tokens, cold = prompt(1, 200), dict[str, list[int]]()
    for model in (this, that):
        with LLM(model, **SIZES) as llm:
            cold[model] = one(llm, tokens).token_ids
    assert cold[this] != cold[that]
    for model, hit in ((this, {}), (that, {}), (this, {"disk": 192}), (that, {"disk": 192})):
        with LLM(model, retention="24h", disk_dir=disk_dir, **SIZES) as llm:
            answer = one(llm, tokens)
            assert (by_tier(answer), answer.token_ids) == (hit, cold[model])
