"""A prompt that is partly computed and partly loaded gives the tokens of a cold one."""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.prompts import prompt
from tests.splits import choose_any_splits
from tests.waiting import HANG_S, wait_until
from tieredkv import LLM, SamplingParams
from tieredkv.cache import link_rate
from tieredkv.cache.link_rate import LinkRate
from tieredkv.cache.requests import TieredCache
from tieredkv.engine.answer import Answer
from tieredkv.engine.step_buffers import BatchRow
from tieredkv.tier import Lent
from tieredkv.types import Tier

pytestmark = pytest.mark.usefixtures("patience")

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
SIZES: dict[str, Any] = {
    "device_size": "16MiB",
    "host_size": "16MiB",
    "disk_size": "256MiB",
    "default_retention": "24h",
    "load_timeout": HANG_S,
    "restore": "auto",
}


def families(seed: int) -> list[list[int]]:
    """Return prompts of which several begin alike, for some blocks or for many."""
    generator = random.Random(seed)
    trunk = prompt(seed, 700)
    ends = [generator.randrange(50, 700) for _ in range(4)]
    return [trunk[:end] + prompt(seed + end, generator.randrange(1, 300)) for end in ends]


def tokens_of(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def sums(answers: Sequence[Answer]) -> tuple[int, int]:
    """Return how many tokens were found on disk, and how many were computed."""
    usages = [answer.usage for answer in answers]
    found = sum(usage.cached_tokens_by_tier[Tier.DISK] for usage in usages)
    return found, sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)


def move_to_disk(llm: LLM) -> None:
    """Leave every block on disk only."""
    assert llm.demote("disk")
    llm.core.verbs.evict()


def serve(llm: LLM, prompts: list[list[int]]) -> list[Answer]:
    """Serve prompts together, checking every invariant after each step."""
    answers = llm.generate(prompts, GREEDY)
    llm.core.cache.check()
    llm.core.scheduler.check()
    return answers


@pytest.fixture(autouse=True)
def checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check every invariant of the cache after each step."""
    pump = TieredCache.pump

    def checked(cache: TieredCache) -> None:
        pump(cache)
        cache.check()

    monkeypatch.setattr(TieredCache, "pump", checked)


@pytest.fixture
def any_splits(monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """Have each plan choose any split, whatever it costs; return what the choice depends on."""
    return choose_any_splits(monkeypatch)


@pytest.mark.parametrize(
    ("block_size", "num_batched_tokens"),
    [
        pytest.param(size, tokens, marks=() if number % 8 == 0 else pytest.mark.slow)
        for number, (size, tokens) in enumerate(product((16, 32, 64), (96, 250, 2048)))
    ],
)
def test_any_splits_that_change_with_each_plan_give_the_cold_tokens(
    tmp_path: Path, any_splits: random.Random, block_size: int, num_batched_tokens: int
) -> None:
    sizes = {**SIZES, "block_size": block_size, "max_num_batched_tokens": num_batched_tokens}
    found = computed = 0
    with LLM("tiny-random", disk_dir=str(tmp_path / "store"), **sizes) as llm:
        for seed in range(3):
            prompts = families(seed)
            cold = [serve(llm, [each])[0].token_ids for each in prompts]
            for again in range(3):
                any_splits.seed(f"{seed} {again}")
                move_to_disk(llm)
                answers = serve(llm, prompts)
                assert tokens_of(answers) == cold
                found, computed = found + sums(answers)[0], computed + sums(answers)[1]
        assert llm.core.parts.tiers.counters.load_failures.total() == 0
    assert found > 0 and computed > 0


def test_each_computed_token_counts_as_computed(
    tmp_path: Path, any_splits: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM("tiny-random", disk_dir=str(tmp_path / "store"), **SIZES) as llm:
        tokens = prompt(1, 900)
        serve(llm, [tokens])
        executed, execute = list[int](), llm.core._runner.execute

        def count(rows: list[BatchRow], *args: Any) -> Any:
            executed.extend(len(row.token_ids) for row in rows)
            return execute(rows, *args)

        monkeypatch.setattr(llm.core._runner, "execute", count)
        seen = set[int]()
        for seed in range(10):
            any_splits.seed(seed)
            move_to_disk(llm)
            executed.clear()
            [answer] = serve(llm, [tokens])
            usage = answer.usage
            num_computed = usage.prompt_tokens - usage.cached_tokens
            assert sum(executed) == num_computed + GREEDY.max_tokens - 1
            seen.add(num_computed)
        assert len(seen) > 2, "the splits do not differ"


def test_cancelled_requests_leave_the_others_their_tokens_and_hold_nothing(
    tmp_path: Path, any_splits: random.Random
) -> None:
    with LLM("tiny-random", disk_dir=str(tmp_path / "store"), **SIZES) as llm:
        core, generator = llm.core, random.Random(1)
        for seed in range(6):
            prompts = families(seed % 3)
            cold = [serve(llm, [each])[0].token_ids for each in prompts]
            move_to_disk(llm)
            any_splits.seed(seed)
            requests = [llm.make_request(each, GREEDY) for each in prompts]
            for request in requests:
                core.add_request(request)
            cancelled = {each.request_id for each in generator.sample(requests, 2)}
            cancel_after = {name: generator.randrange(12) for name in cancelled}
            got: dict[str, list[int]] = {each.request_id: [] for each in requests}
            num_steps = 0
            while core.has_work:
                for output in core.step():
                    got[output.request_id] += output.token_ids
                for name, when in cancel_after.items():
                    if when == num_steps:
                        core.abort(name)
                core.wait(0.01)
                core.cache.check()
                num_steps += 1
            for request, expected in zip(requests, cold, strict=True):
                name = request.request_id
                assert got[name] == expected[: len(got[name])]
                assert name in cancelled or got[name] == expected
            assert (core.parts.tiers.device.num_used, core.parts.tiers.host.num_used) == (0, 0)


def test_a_clock_that_jumps_in_the_middle_changes_no_token(
    tmp_path: Path, any_splits: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset = tmp_path / "offset"
    offset.write_text("0")
    monkeypatch.setenv("TIEREDKV_TEST_CLOCK_OFFSET_FILE", str(offset))
    generator = random.Random(1)
    with LLM("tiny-random", disk_dir=str(tmp_path / "store"), **SIZES) as llm:
        for seed in range(4):
            prompts = families(seed % 2)
            offset.write_text("0")
            cold = [serve(llm, [each])[0].token_ids for each in prompts]
            move_to_disk(llm)
            any_splits.seed(seed)
            requests = [llm.make_request(each, GREEDY) for each in prompts]
            for request in requests:
                llm.core.add_request(request)
            got: dict[str, list[int]] = {each.request_id: [] for each in requests}
            while llm.core.has_work:
                offset.write_text(str(generator.choice([0, 0, 3600, 86_390, 86_401, -3600])))
                for output in llm.core.step():
                    got[output.request_id] += output.token_ids
                llm.core.wait(0.01)
                llm.core.cache.check()
            assert list(got.values()) == cold


class SlowDisk:
    """Passes reads on to the store at a rate that a test sets.

    Attributes:
        bytes_per_s: the rate.
        num_passed: how many reads were passed on.
    """

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, bytes_per_s: float) -> None:
        store, self.bytes_per_s, self.num_passed = llm.core.parts.tiers.store, bytes_per_s, 0
        assert store is not None
        self._load, self._poll, self._pages = store.load, store.poll, list[Lent]()
        self._block_bytes, self._passed_at = llm.core.parts.tiers.payload_bytes, time.monotonic()
        monkeypatch.setattr(store, "load", self.load)
        monkeypatch.setattr(store, "poll", self.poll)

    def load(self, pages: Sequence[Lent]) -> None:
        if not self._pages:
            self._passed_at = time.monotonic()
        self._pages += pages

    def poll(self) -> Any:
        now, each_s = time.monotonic(), self._block_bytes / self.bytes_per_s
        count = min(len(self._pages), int((now - self._passed_at) / each_s))
        if count:
            self._passed_at += count * each_s
            self._load(self._pages[:count])
            del self._pages[:count]
            self.num_passed += count
        return self._poll()


def finish(llm: LLM, tokens: list[int], meanwhile: Callable[[], object] = int) -> Answer:
    """Serve one prompt, and let the reads end that it has begun."""
    request = llm.make_request(tokens, GREEDY)
    llm.core.add_request(request)
    answer = Answer(request, llm.tokenizer)
    while llm.core.has_work:
        for output in llm.core.step():
            answer.take(output)
        meanwhile()
        llm.core.wait(0.01)
    llm.core.cache.check()
    return answer


def test_a_disk_that_becomes_tenfold_slower_in_the_middle_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM("tiny-random", disk_dir=str(tmp_path / "store"), **SIZES) as llm:
        tokens, tiers = prompt(1, 3000), llm.core.parts.tiers
        [cold] = serve(llm, [tokens])
        move_to_disk(llm)
        disk = SlowDisk(llm, monkeypatch, 40e6)
        tiers.disk_link.read_rate = LinkRate(40e6)

        def slow_down() -> None:
            if disk.num_passed > 40:
                disk.bytes_per_s = 4e6

        for _ in range(5):  # the processor may have too little time to read much at the new rate
            answer = finish(llm, tokens, slow_down)
            assert disk.bytes_per_s == 4e6
            assert answer.token_ids == cold.token_ids
            if tiers.disk_link.read_rate.bytes_per_s < 30e6:
                break
            move_to_disk(llm)
        assert tiers.disk_link.read_rate.bytes_per_s < 30e6
        assert tiers.counters.load_failures.total() == 0, "it waited for a timeout"


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_reads_that_a_stopped_worker_holds_are_computed_long_before_their_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    monkeypatch.setattr(link_rate, "PROBE_S", 0.3)
    with LLM("tiny-random", disk_dir=str(tmp_path / "store"), **SIZES) as llm:
        tokens, store, tiers = prompt(1, 3000), llm.core.parts.tiers.store, llm.core.parts.tiers
        assert store is not None
        [cold] = serve(llm, [tokens])
        move_to_disk(llm)
        pid, load, has_stopped = store.state().pid, store.load, list[int]()
        assert pid is not None

        def stop_and_load(pages: Sequence[Lent]) -> None:
            load(pages)
            if not has_stopped:
                has_stopped.append(len(pages))
                os.kill(pid, how)

        monkeypatch.setattr(store, "load", stop_and_load)
        tiers.disk_link.read_rate = LinkRate(1e12)  # all is to be loaded
        request = llm.make_request(tokens, GREEDY)
        llm.core.add_request(request)
        answer = Answer(request, llm.tokenizer)
        while answer.finish_reason is None:
            for output in llm.core.step():
                answer.take(output)
            llm.core.cache.check()
            llm.core.wait(0.01)
        assert has_stopped
        assert answer.token_ids == cold.token_ids
        if how == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)

        def is_loaded_again() -> bool:
            llm.core.verbs.evict()
            again = finish(llm, tokens)
            assert again.token_ids == cold.token_ids
            return sums([again])[0] > 0

        wait_until(is_loaded_again, "the disk is never read again")


@pytest.mark.slow
def test_a_rate_learnt_wrong_is_corrected_by_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_rate, "PROBE_S", 0.3)
    with LLM("tiny-random", disk_dir=str(tmp_path / "store"), **SIZES) as llm:
        tokens, tiers = prompt(1, 3000), llm.core.parts.tiers
        [cold] = serve(llm, [tokens])
        for wrong in (1.0, 1e15):
            tiers.disk_link.read_rate = LinkRate(wrong, learnt_at=time.monotonic(), _learnt_s=1e3)

            def is_right() -> bool:
                move_to_disk(llm)
                answer = finish(llm, tokens)
                assert answer.token_ids == cold.token_ids
                return sums([answer])[0] > 0 and 1e5 < tiers.disk_link.read_rate.bytes_per_s < 1e12

            wait_until(is_right, "the rate is never corrected")
