"""Models with windows give the same tokens from every tier as cold, with pages that end."""

import contextlib
import functools
import io
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_families import FAMILIES, make_config, write_checkpoint
from tests.levels import few
from tieredkv import LLM, SamplingParams
from tieredkv.cache import expiry, tail
from tieredkv.cache.chain import Chain
from tieredkv.cache.events import Change
from tieredkv.cache.operations import KeptBlock
from tieredkv.cache.plan import Demand, Planner, Split
from tieredkv.cache.tail import Tail, anchor_pages, hit_pages, tail_kinds
from tieredkv.cli.main import main
from tieredkv.engine.engine_messages import Claim
from tieredkv.engine.step_plan import longest_chunk
from tieredkv.pieces import whole
from tieredkv.sizing.anchors import anchor_size
from tieredkv.sizing.replay import Sizes, replay
from tieredkv.traces import Request, Trace
from tieredkv.types import BlockHash, KVSpec, Tier, ignore_progress

BLOCK = 16


def tokens(n: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, 256), k=n)


def make_folder(name: str, factory: pytest.TempPathFactory) -> Path:
    path = factory.mktemp("model")
    model_type, changes = FAMILIES[name]
    config = make_config(model_type, changes | {"max_position_embeddings": 1024})
    write_checkpoint(path, config)
    return path


@pytest.fixture(scope="module", params=few(["gpt_oss", "gemma4", "gemma3"], 2))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with windows."""
    return make_folder(request.param, tmp_path_factory)


@pytest.fixture(scope="module", params=few(["gpt_oss", "qwen3_5", "gemma4", "olmo_hybrid"], 2))
def every(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with windows, or with recurrent states."""
    return make_folder(request.param, tmp_path_factory)


def open_llm(folder: Path, **options: Any) -> LLM:
    sizes: dict[str, Any] = {"device_size": "16MiB", "host_size": "16MiB", "block_size": BLOCK}
    return LLM(str(folder), device="cpu", **(sizes | {"max_num_batched_tokens": 64} | options))


def generate(llm: LLM, prompt: list[int], n: int = 12) -> tuple[list[int], Any]:
    [answer] = llm.generate([prompt], SamplingParams(max_tokens=n, temperature=0, ignore_eos=True))
    llm.core.cache.check()
    return answer.token_ids, answer.usage


def test_a_second_request_goes_on_from_vram_with_equal_tokens(folder: Path) -> None:
    prompt = tokens(205, seed=1)
    with open_llm(folder) as llm:
        cold, _ = generate(llm, prompt)
        warm, usage = generate(llm, prompt)
        assert warm == cold
        assert usage.cached_tokens == 192
        longer, usage = generate(llm, prompt + cold + tokens(20, seed=2))
        assert usage.cached_tokens == 208
    with open_llm(folder) as llm:
        assert generate(llm, prompt + cold + tokens(20, seed=2))[0] == longer


def test_blocks_of_the_default_size_give_equal_tokens(every: Path) -> None:
    prompt = tokens(205, seed=5)
    with LLM(str(every), device="cpu", device_size="16MiB", host_size="16MiB") as llm:
        assert llm.core.info.block_size == llm.core.kv_spec.block_size == 64
        cold, _ = generate(llm, prompt)
        flush(llm, Tier.HOST)
        warm, usage = generate(llm, prompt)
        assert warm == cold
        assert usage.cached_tokens_by_tier[Tier.HOST] == 192


def digests(llm: LLM, prompt: list[int]) -> dict[BlockHash, str]:
    """Return digests of keys and values that a hit on a prompt's full blocks needs."""
    return llm.core.kv_digests.by_block(llm.make_request(prompt, SamplingParams()))


def flush(llm: LLM, to: Tier) -> None:
    assert llm.core.cache.flush(to, deadline=time.monotonic() + 20)


@pytest.mark.parametrize(
    ("tier", "restore"),
    few([(Tier.HOST, "load"), (Tier.DISK, "load"), (Tier.DISK, "auto"), (Tier.HOST, "auto")], 3),
)
def test_a_hit_from_slower_tiers_gives_equal_tokens(
    folder: Path, tmp_path: Path, tier: Tier, restore: str
) -> None:
    prompt, turn = tokens(301, seed=3), tokens(20, seed=4)
    options = {
        "disk_dir": str(tmp_path / "store"),
        "disk_size": "64MiB",
        "default_retention": "24h",
    }
    with open_llm(folder, **options, restore=restore) as llm:
        cold, usage = generate(llm, prompt)
        assert usage.cached_tokens == 0
        computed = digests(llm, prompt)
        flush(llm, tier)
        warm, usage = generate(llm, prompt)
        assert warm == cold
        if restore == "load":
            assert usage.cached_tokens_by_tier[tier] == 288
            assert digests(llm, prompt) == computed
            assert len(computed) > len(prompt) // BLOCK
        flush(llm, tier)
        second, usage = generate(llm, prompt + cold + turn)
        if restore == "load":
            assert usage.cached_tokens_by_tier[tier] == 304
        assert llm.core.cache.flush(Tier.DISK, deadline=time.monotonic() + 20)
    with open_llm(folder, **options, restore=restore) as llm:
        again, usage = generate(llm, prompt + cold + turn)
        assert again == second
        if restore == "load":
            assert usage.cached_tokens_by_tier[Tier.DISK] == 320


@pytest.fixture
def partly_there(folder: Path, tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    """Return an engine that has answered `PROMPT`, with a copy of everything in each tier."""
    with contextlib.ExitStack() as stack:

        def begin(restore: str) -> LLM:
            options = {"disk_dir": str(tmp_path / "store"), "default_retention": "24h"}
            llm = stack.enter_context(open_llm(folder, **options, restore=restore))
            generate(llm, PROMPT, n=1)
            flush(llm, Tier.HOST)
            while llm.core.parts.tiers.catalog.owed:
                llm.core.step()
            generate(llm, PROMPT, n=1)
            return llm

        yield begin


PROMPT = tokens(205, seed=40)


def drop(llm: LLM, position: int, *tiers: Tier) -> int:
    """Drop a block of the only chain from some tiers; -1 stands for all pages of windows."""

    def is_meant(block: KeptBlock) -> bool:
        entry = llm.core.parts.tiers.catalog.get(block.block_hash)
        assert entry is not None
        return bool(entry.kind) if position < 0 else entry.position == position and not entry.kind

    freed = whole(llm.core.operations.evict(is_meant, tiers))
    return freed.num_copies + freed.num_pages


def test_a_request_computes_what_its_plan_does_not_load(
    partly_there: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = partly_there("auto")
    assert drop(llm, 0, Tier.DEVICE) and drop(llm, -1, Tier.DEVICE)

    monkeypatch.setattr(Planner, "split", compute_all)
    answer, usage = generate(llm, PROMPT, n=1)
    assert usage.cached_tokens == 0
    monkeypatch.undo()
    assert generate(llm, PROMPT, n=1)[0] == answer


def compute_all(planner: Planner, demand: Demand) -> Split:
    """Leave nothing to the links."""
    case = planner._case(demand)
    return case.at(case.last)


def test_pages_on_disk_that_are_computed_nevertheless_are_not_written_again(
    every: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"disk_dir": str(tmp_path / "store"), "default_retention": "24h", "restore": "auto"}
    prompt = tokens(301, seed=3)
    with open_llm(every, **options) as llm:
        counters = llm.core.parts.tiers.counters
        generate(llm, prompt, n=1)
        flush(llm, Tier.DISK)
        num_written = counters.demoted_disk_blocks
        assert num_written > len(prompt) // BLOCK, "there are pages"
        monkeypatch.setattr(Planner, "split", compute_all)
        assert generate(llm, prompt, n=1)[1].cached_tokens == 0
        flush(llm, Tier.DISK)
        assert counters.demoted_disk_blocks == num_written


def test_pages_are_loaded_after_all_blocks(
    partly_there: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = partly_there("load")
    assert drop(llm, 11, Tier.DEVICE) and drop(llm, -1, Tier.DEVICE, Tier.HOST)
    monkeypatch.setattr(llm.core.cache._promoter, "_inbound_cap", 1)  # one read at a time
    begun = time.monotonic()
    _, usage = generate(llm, PROMPT, n=1)
    assert usage.cached_tokens == 192
    assert time.monotonic() - begun < 10


def test_a_request_whose_few_pages_have_left_before_it_runs_releases_all(
    every: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens(20, seed=41)
    with open_llm(every) as llm:
        cold, _ = generate(llm, prompt)
        flush(llm, Tier.HOST)
        room = llm.core.cache._room
        allocate = room.allocate

        def evict_and_allocate(*args: Any, **options: Any) -> Any:
            drop(llm, -1, Tier.HOST)
            return allocate(*args, **options)

        monkeypatch.setattr(room, "allocate", evict_and_allocate)
        assert generate(llm, prompt)[0] == cold
        assert llm.core.parts.tiers.device.num_used == 0


def test_pages_that_an_operator_evicts_from_a_running_request_do_not_come_back(every: Path) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with open_llm(every) as llm:
        core, done = llm.core, False
        core.add_request(llm.make_request(PROMPT, params))
        evicted = set[BlockHash]()
        while not done:
            done = any(output.finish_reason for output in core.step())
            if not evicted and core.scheduler.running[0].num_output_tokens:
                evicted = {entry.block_hash for entry in core.parts.tiers.catalog.entries()}
                assert core.verbs.evict() == len(evicted) > len(PROMPT) // BLOCK
        core.cache.check()
        assert not evicted & {entry.block_hash for entry in core.parts.tiers.catalog.entries()}


def test_pages_that_have_expired_are_no_hit_though_their_blocks_were_used_since(
    every: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(every) as llm:
        clock, begun = llm.core.parts.tiers.clock, llm.core.parts.tiers.clock.now()
        llm.serve([llm.make_request(PROMPT, ONE, anchors=[96])])
        clock.advance_to(begun + 400)
        assert generate(llm, PROMPT, n=1)[1].cached_tokens == 192
        clock.advance_to(begun + 700)
        monkeypatch.setattr(expiry, "MAX_EXPIRED", 0)  # the sweep has more to do than it can
        _, usage = generate(llm, PROMPT[:100] + tokens(9, seed=42), n=1)
        assert (usage.cached_tokens, usage.miss_reason) == (0, "no_anchor")


def test_a_session_that_outlives_its_limit_is_computed_anew_once(every: Path) -> None:
    text, num_cold = tokens(100, seed=43), 0
    with open_llm(every) as llm:
        clock = llm.core.parts.tiers.clock
        for turn in range(24):  # for 92 minutes, of which a block lives 60
            answer, usage = generate(llm, text, n=4)
            num_cold += usage.cached_tokens < len(text) - 192
            text += answer + tokens(30, seed=turn)
            clock.advance_to(clock.now() + 240)
    assert num_cold == 1


def test_blocks_that_would_not_expire_first_are_not_replaced_by_a_prompt_computed_again(
    every: Path,
) -> None:
    prompt = tokens(205, seed=44)
    with open_llm(every) as llm:
        tiers = llm.core.parts.tiers
        generate(llm, prompt, n=1)
        before = {it.block_hash: it for it in tiers.catalog.entries()}
        for entry in [entry for entry in before.values() if entry.kind]:
            tiers.drop(entry.block_hash, "admin")
        tiers.clock.advance_to(tiers.clock.now() + 60)
        _, usage = generate(llm, prompt, n=1)
        assert (usage.cached_tokens, usage.miss_reason) == (0, "no_anchor")
        blocks = [entry for entry in tiers.catalog.entries() if not entry.kind]
        assert len(blocks) == 12
        assert all(before[entry.block_hash] is entry for entry in blocks)


def test_a_request_whose_blocks_are_not_kept_holds_no_more_pages_than_others(every: Path) -> None:
    with open_llm(every) as llm:
        device, most = llm.core.parts.tiers.device, list[int]()
        for cacheable in (None, 40, 0):
            asked = llm.make_request(
                tokens(300, seed=43), ONE, cacheable_tokens=cacheable, cache_salt=str(cacheable)
            )
            llm.core.add_request(asked)
            held = [0]
            while llm.core.scheduler.running or llm.core.scheduler.waiting:
                llm.core.step()
                held.append(device.num_used)
            most.append(max(held))
    assert max(most) == most[0]


def test_a_request_learns_at_once_that_a_page_was_read(
    partly_there: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = partly_there("load")
    assert drop(llm, -1, Tier.DEVICE, Tier.HOST)
    cache = llm.core.cache
    poll = cache.poll

    def poll_and_check(**options: Any) -> None:
        poll(**options)
        cache.check()

    monkeypatch.setattr(cache, "poll", poll_and_check)
    assert generate(llm, PROMPT, n=1)[1].cached_tokens == 192


def test_pages_are_read_from_disk_while_their_request_is_queued(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, other, prefetched = tokens(150, seed=1), tokens(300, seed=2), list[int]()
    options = {"disk_dir": str(tmp_path / "store"), "default_retention": "24h"}
    with open_llm(folder, **options) as llm:
        cold, _ = generate(llm, stored)
    with open_llm(folder, **options, max_num_seqs=1, restore="load") as llm:
        end_prefetch = llm.core.cache._promoter.end_prefetch

        def counted(chain: Chain) -> None:
            if isinstance(chain, Tail) and chain.of.blocks == []:
                prefetched.append(len(chain.prefetched))
            end_prefetch(chain)

        monkeypatch.setattr(llm.core.cache._promoter, "end_prefetch", counted)
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        _, answer = llm.generate([other, stored], params)
        llm.core.cache.check()
        needed = hit_pages(llm.core.kv_spec)
    assert answer.token_ids == cold
    assert answer.usage.cached_tokens_by_tier[Tier.DISK] == 144
    assert sorted(prefetched) == [0, needed]


def test_a_request_that_leaves_another_one_near_its_end_finds_what_is_before(folder: Path) -> None:
    prompt = tokens(205, seed=5)
    with open_llm(folder) as llm:
        generate(llm, prompt, n=1)
        for length in (204, 197, 192, 191, 180, 177):
            _, usage = generate(llm, prompt[:length] + tokens(30, seed=length), n=1)
            assert usage.cached_tokens >= length - 2 * BLOCK, length


def test_a_window_may_be_of_one_token(tmp_path: Path) -> None:
    model_type, changes = FAMILIES["gemma3"]
    write_checkpoint(tmp_path, make_config(model_type, changes | {"sliding_window": 1}))
    prompt = tokens(100, seed=5)
    with open_llm(tmp_path) as llm:
        cold, _ = generate(llm, prompt)
        found, usage = generate(llm, prompt)
    assert usage.cached_tokens == 96
    assert found == cold


def test_the_same_prompt_is_found_again(folder: Path) -> None:
    with open_llm(folder) as llm:
        for length in (1, 2, 15, 16, 17, 31, 32, 33, 47, 48):
            prompt = tokens(length, seed=60 + length)
            first, usage = generate(llm, prompt, n=1)
            assert usage.cached_tokens == 0, length
            again, usage = generate(llm, prompt, n=1)
            assert again == first, length
            assert usage.cached_tokens >= length - 2 * BLOCK, length


def test_where_two_requests_part_a_third_one_goes_on(folder: Path) -> None:
    shared = tokens(100, seed=10)
    with open_llm(folder) as llm:
        found = []
        for seed in (11, 12, 13):
            _, usage = generate(llm, shared + tokens(150, seed=seed), n=1)
            found.append((usage.cached_tokens, usage.miss_reason))
    assert found == [(0, "never_seen"), (0, "no_anchor"), (96, "never_seen")]


def test_of_requests_that_come_at_once_one_computes_what_they_share(every: Path) -> None:
    shared = tokens(200, seed=40)
    prompts = [shared + tokens(40 + seed, seed=seed) for seed in (41, 42, 43)]
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    with open_llm(every) as llm:
        cold = [llm.generate([it], params, cache_salt=str(it[-1]))[0].token_ids for it in prompts]
    with open_llm(every) as llm:
        answers = llm.generate(prompts, params)
        llm.core.cache.check()
    assert [answer.token_ids for answer in answers] == cold
    assert [answer.usage.cached_tokens for answer in answers] == [0, 192, 192]


def test_what_a_session_has_gone_on_past_leaves_first(folder: Path, tmp_path: Path) -> None:
    options = {"disk_dir": str(tmp_path / "store"), "default_retention": "24h"}
    with open_llm(folder, **options) as llm:
        catalog, tiers, talk = llm.core.parts.tiers.catalog, llm.core.parts.tiers, tokens(60, 20)
        shared = list(talk)
        for turn in range(4):
            answer, usage = generate(llm, talk)
            assert usage.cached_tokens >= (len(talk) - 60 - BLOCK if turn else 0)
            talk += answer + tokens(60, seed=21 + turn)
        superseded = {*catalog.superseded}
        assert superseded.isdisjoint(catalog.owed)
        pages = [entry for entry in catalog.entries() if entry.kind]
        assert 0 < len(superseded) < len(pages)
        last = max(entry.position for entry in pages)
        kept = {entry.position for entry in pages if entry.block_hash not in superseded}
        window = len(set(range(last + 1)) & kept)
        assert kept >= set(range(last + 1 - window, last + 1)), "of the last place all are kept"
        order = [block.block_hash for block in tiers.device.evictable()]
        first = [order.index(each) for each in superseded if each in order]
        assert max(first) < len(first), "superseded pages are evicted before all others"
        for seed in (30, 31):  # two requests go on where the first prompt ended
            generate(llm, shared[:48] + tokens(70, seed=seed))
            generate(llm, shared[:48] + tokens(70, seed=seed) + tokens(90, seed=34))
        needed = [entry for entry in catalog.entries() if entry.kind and entry.position == 2]
        assert needed
        assert catalog.superseded.isdisjoint(entry.block_hash for entry in needed)


def test_a_session_that_changes_what_was_said_goes_on_at_an_interval(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "INTERVAL", 2)
    talk = tokens(400, seed=60)
    with open_llm(folder) as llm:
        kinds = tail_kinds(llm.core.kv_spec)
        needed = max(kind.num_blocks for kind in kinds)
        interval = 2 * needed * len(kinds)
        clock, catalog = llm.core.parts.tiers.clock, llm.core.parts.tiers.catalog
        began_at = clock.now()
        for turn in range(5):  # in twice the time for which unused blocks are kept
            talk += generate(llm, talk)[0] + tokens(60, seed=61 + turn)
            clock.advance_to(began_at + 240 * (turn + 1))
        generate(llm, talk)
        pages = {entry.position for entry in catalog.entries() if entry.kind}
        passed = {entry.position for entry in catalog.entries() if entry.kind} & {
            entry.position for entry in catalog.entries() if entry.block_hash in catalog.superseded
        }
        at_intervals = [*range(interval, len(talk) // BLOCK, interval)]
        assert passed
        assert at_intervals
        for end in at_intervals:
            blocks = set(range(end - needed, end))
            assert blocks <= pages
            assert not blocks & passed
        changed = talk[: BLOCK * interval + 5] + tokens(80, seed=70)
        _, usage = generate(llm, changed)
        assert usage.cached_tokens == BLOCK * interval


@pytest.mark.parametrize("is_close", [False, True])
def test_places_at_intervals_stay_in_full_vram_as_long_as_their_session_unless_they_are_close(
    is_close: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(folder) as llm:
        spec = llm.core.kv_spec
    interval = 2 * hit_pages(spec)
    monkeypatch.setattr(tail, "INTERVAL", 4 if is_close else 2)
    monkeypatch.setattr(tail, "CLOSE_TOKENS", interval * BLOCK)
    num_kinds = len(tail_kinds(spec))
    pages = 36 * (1 + num_kinds) + 3 * anchor_pages(spec)
    sizes = {"device_size": 2 * pages * spec.block_bytes, "host_size": 8 * spec.block_bytes}
    talk = tokens(400, seed=80)
    with open_llm(folder, **sizes) as llm:
        for turn in range(4):
            talk += generate(llm, talk)[0] + tokens(20, seed=81 + turn)
            for number in range(2 + num_kinds):
                generate(llm, tokens(200, seed=100 + 10 * turn + number))
        assert llm.core.parts.tiers.counters.evictions["device,capacity"]
        changed = talk[: BLOCK * interval + 5] + tokens(80, seed=90)
        _, usage = generate(llm, changed)
        assert usage.cached_tokens == (0 if is_close else BLOCK * interval)


def test_what_is_pinned_is_not_superseded(folder: Path) -> None:
    talk = tokens(100, seed=50)
    with open_llm(folder) as llm:
        tiers = llm.core.parts.tiers
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        claims = [Claim(end_token=64, retention="in_memory", pin_s=600.0)]
        llm.serve([llm.make_request(talk, params, claims=claims)])
        for seed in (51, 52):
            talk += tokens(60, seed=seed)
            generate(llm, talk)
        pinned = [entry for entry in tiers.catalog.entries() if entry.pinned_until]
        assert any(entry.kind for entry in pinned)
        assert tiers.catalog.superseded
        assert tiers.catalog.superseded.isdisjoint(entry.block_hash for entry in pinned)


def test_a_long_request_holds_pages_of_its_window_and_of_one_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_held = list[int]()
    with open_llm(folder) as llm:
        device, kinds = llm.core.parts.tiers.device, tail_kinds(llm.core.kv_spec)
        schedule = llm.core.scheduler.schedule

        def counted(*args: Any, **options: Any) -> Any:
            step = schedule(*args, **options)
            num_held.append(device.num_blocks - device.num_free)
            return step

        monkeypatch.setattr(llm.core.scheduler, "schedule", counted)
        generate(llm, tokens(900, seed=0), 20)
    num_blocks, step_blocks = -(-919 // BLOCK), -(-longest_chunk(64) // BLOCK)
    beside = anchor_pages(llm.core.kv_spec) + len(kinds) * (step_blocks + 1)
    # A step begins where the one before it ended, which need not be where a block begins.
    assert num_blocks + anchor_pages(llm.core.kv_spec) < max(num_held) <= num_blocks + beside


@pytest.mark.parametrize("host_blocks", few([64, 4]))
def test_requests_that_take_turns_in_too_little_memory_compute_little_twice(
    every: Path, host_blocks: int
) -> None:
    prompts = [tokens(180 + 7 * number, seed=number) for number in range(8)]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with open_llm(every, restore="compute") as llm:
        cold = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
        spec = llm.core.kv_spec
    one = -(-230 // BLOCK) + anchor_pages(spec) + len(tail_kinds(spec)) * (2 + 64 // BLOCK)
    sizes = {"device_size": 3 * one // 2 * spec.block_bytes}
    sizes["host_size"] = host_blocks * spec.block_bytes
    with open_llm(every, restore="load", max_num_seqs=8, **sizes) as llm:
        answers = llm.generate(prompts, params)
        llm.core.cache.check()
        num_computed = llm.core.scheduler.num_computed_tokens
    assert [answer.token_ids for answer in answers] == cold
    most = sum(len(prompt) + 40 for prompt in prompts)
    assert num_computed <= 1.1 * most


def histories(number: int, *, most: int = 240) -> list[list[int]]:
    """Return prompts that go on from one another, or leave one another somewhere."""
    draw, made = random.Random(number), [tokens(50, seed=0)]
    while len(made) < 24:
        before = draw.choice(made)
        kept = before[: draw.randrange(1, len(before) + 1)]
        made.append((kept + tokens(draw.randrange(1, 90), seed=len(made)))[:most])
    return made


THIRTEEN = SamplingParams(max_tokens=13, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def cold_answers(every: Path) -> Callable[[int], tuple[list[list[int]], KVSpec]]:
    """Return a function for the answers to random histories without a cache, and the pages."""

    @functools.cache
    def answer(seed: int) -> tuple[list[list[int]], KVSpec]:
        cold = list[list[int]]()
        with open_llm(every, restore="compute", host_size="1MiB") as llm:
            for number, prompt in enumerate(histories(seed)):
                [answer] = llm.generate([prompt], THIRTEEN, cache_salt=str(number))
                assert not answer.usage.cached_tokens
                cold.append(answer.token_ids)
            return cold, llm.core.kv_spec

    return answer


@pytest.mark.parametrize("seed", few(range(3)))
@pytest.mark.parametrize("has_disk", [False, True])
def test_random_histories_in_small_tiers_give_the_tokens_of_cold_prompts(
    every: Path,
    tmp_path: Path,
    cold_answers: Callable[[int], tuple[list[list[int]], KVSpec]],
    seed: int,
    has_disk: bool,
) -> None:
    prompts, (cold, spec) = histories(seed), cold_answers(seed)
    page, num_tails = spec.block_bytes, len(tail_kinds(spec))
    device_pages = (16 if spec.states else 22) + (3 if spec.states else 10) * num_tails
    host_pages = 18 + 9 * num_tails
    sizes = {"device_size": device_pages * page, "host_size": host_pages * page}
    options: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 4}
    if has_disk:
        options |= {"disk_dir": str(tmp_path / "store"), "default_retention": "24h"}
    num_cached = Counter[Tier]()
    with open_llm(every, **sizes, **options) as llm:
        for start in range(0, len(prompts), 6):
            some = prompts[start : start + 6] * 2
            answers = llm.generate(some, THIRTEEN)
            llm.core.cache.check()
            assert [it.token_ids for it in answers] == cold[start : start + 6] * 2
            for answer in answers:
                num_cached.update(answer.usage.cached_tokens_by_tier)
        if has_disk:
            assert llm.core.cache.flush(Tier.DISK, deadline=time.monotonic() + 20)
        for number in random.Random(seed).choices(range(len(prompts)), k=10):
            [answer] = llm.generate([prompts[number]], THIRTEEN)
            llm.core.cache.check()
            num_cached.update(answer.usage.cached_tokens_by_tier)
            assert answer.token_ids == cold[number]
        # How many requests lose their room, and what memory still has, depends on the disk's time.
        assert llm.core.scheduler.num_preemptions or seed or has_disk
    assert num_cached[Tier.DEVICE]
    assert num_cached[Tier.HOST] or has_disk
    assert bool(num_cached[Tier.DISK]) == has_disk


@pytest.mark.parametrize("seed", few(range(4)))
def test_a_replay_finds_what_the_engine_finds(every: Path, seed: int) -> None:
    requests, cached = list[Request](), list[int]()
    with open_llm(every, device_size="64MiB") as llm:
        spec = llm.core.kv_spec
        for number, prompt in enumerate(histories(seed)):
            answer, usage = generate(llm, prompt, n=40)
            cached.append(usage.cached_tokens)
            text = prompt + answer[:-1]  # whose last token was not computed
            made = llm.core._chains.make(llm.make_request(text, SamplingParams()), text)
            ids = [int.from_bytes(block_hash, "big") for block_hash in made.hashes]
            num_blocks = len(prompt) // BLOCK
            requests.append(
                Request(
                    timestamp=number,
                    input_length=len(prompt),
                    output_length=len(answer),
                    hash_ids=ids[:num_blocks],
                    answer_hash_ids=ids[num_blocks:],
                    block_tokens=BLOCK,
                )
            )
    sizes = Sizes(token_bytes=spec.token_bytes, anchor=anchor_size(spec))
    found = replay(Trace("served", requests, BLOCK), sizes, ignore_progress)
    assert sum(cached) > 0
    assert found["cached_tokens"] == sum(cached)


def check_listed(chains: list[Any]) -> list[Any]:
    """Verify what `ls` tells of two chains; return them, the longer one first."""
    first, second = sorted(chains, key=lambda it: -int(it["blocks"]))
    assert (first["blocks"], second["blocks"]) == (12, 6)
    return [first, second]


def check_anchors(chain: list[Any]) -> None:
    """Verify at which blocks of the longer chain `inspect` shows anchors."""
    assert [block["position"] for block in chain] == [*range(12)]
    assert [block["position"] for block in chain if block["is_anchor"]] == [9, 10, 11]


def test_operators_see_chains_and_evict_them_with_their_pages(folder: Path, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with open_llm(folder, disk_dir=store, default_retention="24h") as llm:
        generate(llm, tokens(205, seed=8), n=1)
        generate(llm, tokens(100, seed=9), n=1)
        size, num_pages = llm.core.kv_spec.block_bytes, anchor_pages(llm.core.kv_spec)
        with ThreadPoolExecutor() as threads:

            def ask(*arguments: str) -> Any:
                asking = threads.submit(run_json, arguments[0], store, *arguments[1:])
                while not asking.done():
                    llm.core.step()
                return asking.result()

            [first, _] = check_listed(ask("ls")["chains"])
            check_anchors(ask("inspect", first["id"])["chain"])
            in_vram = ask("df")["device"]
        assert (in_vram["blocks"], in_vram["window_pages"]) == (18, 2 * num_pages)
        assert in_vram["window_bytes"] == 2 * num_pages * size
        assert in_vram["bytes_live"] == in_vram["window_bytes"] + 18 * size
        flush(llm, Tier.DISK)
    [first, second] = check_listed(run_json("ls", store)["chains"])
    check_anchors(run_json("inspect", store, first["id"])["chain"])
    df = run_json("df", store, "-v")
    [use], disk = df["namespaces"], df["disk"]
    assert disk["blocks"] == use["blocks"] == 18
    assert (disk["window_pages"], use["anchors"]) == (2 * num_pages, 2 * 3)
    assert disk["window_bytes"] <= use["anchor_bytes"] == 2 * num_pages * size
    kept = {"blocks": disk["blocks"], "window_pages": disk["window_pages"]}
    assert [*df["tenants"].values()] == [{**kept, "bytes": disk["bytes_live"]}]
    verified = run_json("verify", store)
    assert (verified["checked"], verified["window_pages"], verified["bad"]) == (*kept.values(), 0)
    for each, num_blocks in (first, 12), (second, 6):
        gone = run_json("evict", store, each["id"], "-y")
        assert (gone["evicted_blocks"], gone["window_pages"]) == (num_blocks, num_pages)
    assert run_json("verify", store) == {**run_json("verify", store), "bad": 0}


def test_the_report_on_a_prompt_says_where_a_request_could_go_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIEREDKV_DEVICE", "cpu")
    monkeypatch.setenv("TIEREDKV_BLOCK_SIZE", str(BLOCK))
    store, prompt = tmp_path / "store", bytes(range(32, 122)) * 3  # a token a byte
    with open_llm(folder, disk_dir=str(store), default_retention="24h") as llm:
        generate(llm, list(prompt), n=1)
        flush(llm, Tier.DISK)
    asked, expected = tmp_path / "prompt", dict[int, tuple[int, str | None]]()
    expected |= {270: (256, None), 256: (240, "no_anchor"), 250: (240, None)}
    expected |= {150: (0, "no_anchor"), BLOCK: (0, "no_anchor"), BLOCK - 1: (0, None)}
    for length, found in expected.items():
        asked.write_bytes(prompt[:length])
        told = run_json("inspect", str(store), "--prompt-file", str(asked), "--model", str(folder))
        assert told["prompt_tokens"] == length
        assert (told["by_tier"]["disk"], told["reason"]) == found
        assert (told["anchor_pages"]["disk"] > 0) == (found[0] > 0)
    with open_llm(folder, disk_dir=str(store), restore="load") as llm:
        for length, found in expected.items():
            _, usage = generate(llm, list(prompt[:length]), n=1)
            assert (usage.cached_tokens, usage.miss_reason) == found


def test_what_no_layer_fills_of_a_page_keeps_nothing_of_what_was_there(tmp_path: Path) -> None:
    model_type, changes = FAMILIES["gemma4"]
    kinds = {"layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention"]}
    kinds["layer_types"].append("full_attention")
    sizes = {"num_hidden_layers": 6, "max_position_embeddings": 1024, "num_key_value_heads": 1}
    write_checkpoint(tmp_path, make_config(model_type, changes | kinds | sizes))
    with open_llm(tmp_path) as llm:
        spec, blocks = llm.core.kv_spec, llm.core.parts.device_blocks
        kind = spec.page_kinds[-1]
        first = 4 * spec.first_element(kind, len(kind.layers))
        assert first < spec.block_bytes and len(spec.page_kinds) > 1
        blocks.fill_(0xAA)
        generate(llm, tokens(100, seed=14), n=1)
        tiers, seen = llm.core.parts.tiers, 0
        for entry in tiers.catalog.entries():
            block = tiers.device.lookup(entry.block_hash)
            if entry.kind and entry.part == entry.num_parts - 1 and block is not None:
                assert not blocks[block.block_id, first:].any()
                assert blocks[block.block_id, :first].any()
                seen += 1
    assert seen


class Announced:
    """Follows the changes of the tiers of an engine.

    Attributes:
        blocks, anchors: what each tier has, as the changes tell.
        num_ended: how many anchors have ended in some tier.
    """

    def __init__(self, llm: LLM) -> None:
        self.blocks, self.anchors = (
            {tier: set[BlockHash]() for tier in Tier} for _ in ("blocks", "anchors")
        )
        self.num_ended, self._llm = 0, llm
        llm.core.parts.tiers.events.publish_to(self.take)

    def take(self, changes: list[Change]) -> bool:
        for tier, block_hash, content, is_anchor in changes:
            held = (self.anchors if is_anchor else self.blocks)[tier]
            assert (block_hash in held) == (content is None)
            (held.add if content else held.remove)(block_hash)
            self.num_ended += is_anchor and content is None
        return True

    def check(self, texts: list[list[int]]) -> None:
        """Verify what each tier has where the prompts and answers of requests ended."""
        tiers = self._llm.core.parts.tiers
        tiers.events.flush()
        tiers.events.check()
        entries = {entry.block_hash: entry for entry in tiers.catalog.entries()}
        pages = {block_hash for block_hash, entry in entries.items() if entry.kind}
        for text in texts:
            chain = self._llm.core._chains.make(self._llm.make_request(text, ONE), text)
            assert chain.tail is not None
            needed = chain.tail.needed(len(chain.hashes))
            needs = chain.tail.hashes[needed.start : needed.stop]
            for tier, pool in tiers.pools.items():
                assert not self.blocks[tier] & pages
                ready = [it is not None and it.is_ready for it in pool.find(needs)]
                assert (chain.hashes[-1] in self.anchors[tier]) == all(ready)
            if all((entry := entries.get(it)) and entry.is_on_disk for it in needs):
                assert chain.hashes[-1] in self.anchors[Tier.DISK]


ONE = SamplingParams(max_tokens=1)


def test_events_tell_when_a_tier_has_all_pages_of_an_anchor(every: Path, tmp_path: Path) -> None:
    options = {"disk_dir": str(tmp_path / "store"), "default_retention": "24h"}
    options |= {"kv_events": "on", "kv_events_endpoint": f"ipc://{tmp_path}/events"}
    turn, texts = tokens(20, seed=30), list[list[int]]()
    with open_llm(every) as llm:
        spec = llm.core.kv_spec
        size = 2 * (20 + anchor_pages(spec) + 4 * len(spec.page_kinds)) * spec.block_bytes
    sizes = {"device_size": size, "host_size": size}
    with open_llm(every, **options, **sizes, restore="load") as llm:
        announced = Announced(llm)
        for seed in range(31, 41):
            prompt = tokens(205, seed=seed)
            answer, _ = generate(llm, prompt)
            texts += [prompt, (prompt + answer)[:216]]
            announced.check(texts)
        assert announced.num_ended
        _, usage = generate(llm, texts[0] + turn)
        assert usage.cached_tokens_by_tier[Tier.DISK]
        announced.check(texts)
        flush(llm, Tier.DISK)
        announced.check(texts)
        assert not announced.anchors[Tier.DEVICE] and announced.anchors[Tier.DISK]
    with open_llm(every, **options, **sizes, restore="load") as llm:
        announced = Announced(llm)
        _, usage = generate(llm, texts[-1] + turn)
        assert usage.cached_tokens_by_tier[Tier.DISK]
        announced.check(texts[-1:])
        assert announced.anchors[Tier.DISK] and announced.anchors[Tier.DEVICE]


def run_json(verb: str, store: str, *arguments: str) -> Any:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([verb, *arguments, "--disk-dir", store, "--json"]) == 0
    return json.loads(printed.getvalue().splitlines()[-1])
