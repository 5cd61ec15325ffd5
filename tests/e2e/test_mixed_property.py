"""Whatever happens in whatever order, the engine's tokens are those of a cold one.

A state machine draws what is asked of a real engine with a real disk tier, and what goes wrong
meanwhile: see `Engine` and `MixedMachine`. Nothing depends on how fast the machine is, but what
happens at once does, so that a failure may need several runs to come again.
"""

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from msgspec.structs import replace

from tests.prompts import prompt
from tests.splits import choose_any_splits
from tests.waiting import HANG_S, wait_until
from tieredkv import LLM, SamplingParams
from tieredkv.cache import lookups, promotion, rates, room
from tieredkv.cache.pool import Block, BlockPool
from tieredkv.cache.rates import LinkRate
from tieredkv.engine import model_runner
from tieredkv.engine.answer import Answer
from tieredkv.storage import client
from tieredkv.storage.client import Event
from tieredkv.storage.results import EvictFilter
from tieredkv.storage.worker_messages import PageLoaded, PageStored
from tieredkv.types import Tier

POISON = 0x4B
"""Fills memory that is handed out, so that keys and values that nobody wrote change the tokens."""

MOST_TOKENS = 40
PATIENCE_S = HANG_S / 4
"""An answer that takes longer counts as a hang; most take less than a second."""

SIZES: dict[str, Any] = {
    "block_size": 16,
    "max_num_batched_tokens": 96,
    "max_num_seqs": 4,
    "device_size": "1536KiB",
    "host_size": "1MiB",
    "disk_size": "16MiB",
    "default_retention": "24h",
    "restore": "auto",
}


class Ask(NamedTuple):
    """One request: a part of one of a few long texts, tokens of its own, and when it comes.

    Attributes:
        trunk: which text its prompt begins with.
        num_shared: how many tokens of the text.
        num_own: how many tokens follow, which no other text has.
        num_answered: tokens of the cold answer that follow too, as in the next turn of a chat.
        max_tokens: length of the answer.
        step: the step of the engine before which it comes.
    """

    trunk: int
    num_shared: int
    num_own: int
    num_answered: int
    max_tokens: int
    step: int
    retention: str


class Mishap(NamedTuple):
    """Something that happens before a step of the engine; `number` says more about it."""

    step: int
    what: str
    number: int


class Conditions(NamedTuple):
    """What is the same for a while.

    Attributes:
        fail_share, delay_share: see `FlakyDisk`.
        load_timeout_s, lookup_timeout_s, room_patience_s: how long the engine waits for a block,
            for an answer of the disk, and for room.
        has_any_splits: whether the planner chooses any splits, and not those that it finds best.
        disk_bytes_per_s: the rate of the disk that the planner believes in; None for what it knows.
        seed: of what is chosen at random.
    """

    fail_share: float = 0.0
    delay_share: float = 0.0
    load_timeout_s: float = 30.0
    lookup_timeout_s: float = 1.0
    room_patience_s: float = 0.25
    has_any_splits: bool = False
    disk_bytes_per_s: float | None = None
    seed: int = 0


class FlakyDisk:
    """Holds back what the store's worker has done, and lets some of it fail, at random.

    Nobody is told of a page that is held back: it stays on loan. A read that fails leaves anything
    in its page.

    Attributes:
        fail_share: the share of reads and writes that fail.
        delay_share: how likely a read or write that has ended is held back by one more `poll`.
        generator: decides.
    """

    REASONS = "checksum", "identity", "io", "missing", "evicted", "expired"

    def __init__(self, llm: LLM) -> None:
        store = llm.core.tiers.store
        assert store is not None
        self.fail_share = self.delay_share = 0.0
        self.generator = random.Random()
        self._arena, self._poll, self._held = store.arena, store.poll, list[Event]()
        store.poll = self.poll  # type: ignore[method-assign]

    def poll(self) -> list[Event]:
        events, self._held, told = [*self._held, *self._poll()], [], list[Event]()
        for event in events:
            if not isinstance(event, PageLoaded | PageStored):
                told.append(event)
            elif self.generator.random() < self.delay_share:
                self._held.append(event)
            else:
                told.append(self._spoilt(event))
        return told

    def fill(self, page_ids: Sequence[int]) -> None:
        """Fill pages of the arena with garbage."""
        for page in map(self._arena.page, page_ids):
            page[:] = bytes([POISON]) * len(page)

    def _spoilt(self, event: PageLoaded | PageStored) -> PageLoaded | PageStored:
        if not event.ok or self.generator.random() >= self.fail_share:
            return event
        if isinstance(event, PageStored):
            return replace(event, reason="full")
        self.fill([event.page_id])
        return replace(event, reason=self.generator.choice(self.REASONS), record=None)


class Engine:
    """A real engine with a real disk tier, to which anything may happen, and a cold one.

    One engine serves many examples, each with a salt of its own, so that none finds blocks of
    another one. After an example that failed a new engine is started.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, **sizes: object) -> None:
        self._folder, self._patch, self._sizes = folder, patch, {**SIZES, **sizes}
        self._splits = pytest.MonkeyPatch()
        self._offset_s, self._offset_file = 0, folder / "offset"
        self._names, self._is_spoilt = itertools.count(), True
        self._cold, self._llm = LLM("tiny-random", device_size="4MiB"), None
        self._cold_tokens: dict[tuple[int, ...], list[int]] = {}
        self._offset_file.write_text("0")
        patch.setenv("TIEREDKV_TEST_CLOCK_OFFSET_FILE", str(self._offset_file))
        patch.setattr(client, "_HEALTHY_S", 0.0)  # a killed worker is started again at once
        for module in (promotion, rates):
            patch.setattr(module, "PROBE_S", 0.1)  # a disk that was away is soon tried again
        self._poison_what_is_handed_out()

    _llm: LLM | None

    @property
    def llm(self) -> LLM:
        """The engine of now."""
        assert self._llm is not None
        return self._llm

    def _poison_what_is_handed_out(self) -> None:
        """Fill blocks and pages with garbage when they are allocated."""
        make, allocate = model_runner.make_kv_pool, BlockPool.allocate

        def kept(*args: Any) -> torch.Tensor:
            self._device_blocks = make(*args)
            return self._device_blocks

        def poisoned(pool: BlockPool, *args: Any, **options: Any) -> list[Block] | None:
            blocks = allocate(pool, *args, **options)
            if blocks and self._llm is not None and pool in self.llm.core.tiers.pools.values():
                ids = [block.block_id for block in blocks]
                if pool is self.llm.core.tiers.device:
                    self._device_blocks.view(torch.uint8)[ids] = POISON
                else:
                    self._disk.fill(ids)
            return blocks

        self._patch.setattr(model_runner, "make_kv_pool", kept)
        self._patch.setattr(BlockPool, "allocate", poisoned)

    # Examples

    def begin(self) -> None:
        """Start an example: nothing is cached, all works, and the settings are the usual ones."""
        if self._is_spoilt:
            self._start_anew()
        self._is_spoilt, self._resumes_in = True, 0
        self.salt = f"example {next(self._names)}"
        self.calm()

    def _start_anew(self) -> None:
        self._end()
        folder, self._llm = self._folder / f"store {next(self._names)}", None
        self._llm = LLM("tiny-random", disk_dir=str(folder), **self._sizes)
        self._disk = FlakyDisk(self._llm)

    def _end(self) -> None:
        if self._llm is not None:
            self.resume()
            with suppress(Exception):  # it has failed already
                self._llm.close()

    def calm(self) -> None:
        """Let nothing go wrong from now on."""
        self.resume()
        self.meet(Conditions())

    def end(self) -> None:
        """End an example: nothing is held any more, and all tiers serve."""
        self.calm()
        self.settle()
        wait_until(lambda: self._worker is not None, "the worker is never started again")
        ask = Ask(9, 100, 0, 0, 4, 0, "24h")

        def is_loaded() -> bool:
            self.serve([ask])
            self.llm.demote("disk")
            self.evict()
            self.llm.core.tiers.disk_link.read_rate = LinkRate(1e12)
            [usage] = [answer.usage for answer in self.serve([ask])]
            return usage.cached_tokens_by_tier[Tier.DISK] > 0

        wait_until(is_loaded, "the disk is never read again")
        self.settle()
        self.evict()
        self.llm.core.step()  # more than one step may see that nothing is left
        self.check()
        assert not self.llm.core.tiers.catalog.entries()
        self._is_spoilt = False

    def close(self) -> None:
        """Stop both engines; one that no example has spoilt must stop without a loss."""
        self._splits.undo()
        self._cold.close()
        if self._is_spoilt:
            self._end()
        else:
            self.llm.close()

    # What goes wrong

    def meet(self, conditions: Conditions) -> None:
        """Let these conditions hold from now on."""
        self._disk.fail_share = conditions.fail_share
        self._disk.delay_share = conditions.delay_share
        self._disk.generator.seed(conditions.seed)
        tiers = self.llm.core.tiers
        tiers.load_timeout_s = conditions.load_timeout_s
        self._patch.setattr(lookups, "LOOKUP_TIMEOUT_S", conditions.lookup_timeout_s)
        self._patch.setattr(room, "PATIENCE_S", conditions.room_patience_s)
        self._splits.undo()
        if conditions.has_any_splits:
            choose_any_splits(self._splits).seed(conditions.seed)
        if conditions.disk_bytes_per_s is not None:
            tiers.disk_link.read_rate = LinkRate(conditions.disk_bytes_per_s)

    @property
    def _worker(self) -> int | None:
        store = self.llm.core.tiers.store
        return store.pid if store is not None else None

    def _signal(self, number: signal.Signals) -> None:
        if (pid := self._worker) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def stop(self, num_turns: int) -> None:
        """Stop the worker, and have it go on after so many turns of the engine."""
        self._signal(signal.SIGSTOP)
        self._resumes_in = num_turns

    def resume(self) -> None:
        self._resumes_in = 0
        self._signal(signal.SIGCONT)

    def evict(self) -> None:
        self.llm.core.verbs.evict()

    def evict_chains(self, number: int) -> None:
        """Evict the chains that begin with some of the blocks."""
        names = sorted(it.block_hash.hex() for it in self.llm.core.tiers.catalog.entries())
        chosen = random.Random(number).sample(names, min(2, len(names)))
        self.llm.core.verbs.evict(EvictFilter(ids=tuple(chosen)))

    def evict_here_and_there(self, number: int) -> None:
        """Evict single blocks, so that chains have holes."""
        generator = random.Random(number)
        self.llm.core.cache.evict(lambda _: generator.random() < 0.3)

    def jump(self, number: int) -> None:
        """Move the clock forward."""
        self._offset_s += [300, 601, 3600, 86_390, 86_401][number % 5]
        self._offset_file.write_text(str(self._offset_s))

    def demote(self, to: str) -> None:
        """Move blocks down, as many as it takes a moment to move."""
        self.llm.demote(to, timeout_s=0.2)
        self.check()

    # What is asked

    def turn(self) -> list[Any]:
        """Let the engine do one step, check all invariants, and wait for what it waits for."""
        core = self.llm.core
        outputs = core.step()
        self.check()
        if self._resumes_in:
            self._resumes_in -= 1
            if not self._resumes_in:
                self.resume()
        core.wait(0.005)
        return outputs

    def check(self) -> None:
        """Check the invariants of the engine's parts."""
        self.llm.core.cache.check()
        self.llm.core.scheduler.check()

    def cold(self, tokens: Sequence[int]) -> list[int]:
        """Return the longest answer to a prompt of an engine that has cached nothing."""
        key = tuple(tokens)
        if key not in self._cold_tokens:
            self._cold.core.verbs.evict()
            params = SamplingParams(max_tokens=MOST_TOKENS, temperature=0.0, ignore_eos=True)
            [answer] = self._cold.generate([list(tokens)], params)
            assert answer.usage.cached_tokens == 0
            self._cold_tokens[key] = answer.token_ids
        return self._cold_tokens[key]

    def prompt_of(self, ask: Ask) -> list[int]:
        name = f"{ask.trunk} {ask.num_shared} {ask.num_own}"
        own = prompt(random.Random(name).randrange(1 << 32), ask.num_own)
        tokens = prompt(ask.trunk, 1000)[: ask.num_shared] + own
        return tokens + (self.cold(tokens)[: ask.num_answered] if ask.num_answered else [])

    def serve(self, asks: Sequence[Ask], mishaps: Sequence[Mishap] = ()) -> list[Answer]:
        """Serve requests while this and that goes wrong; compare each answer with the cold one."""
        core, scheduler = self.llm.core, self.llm.core.scheduler
        answers, expected = dict[str, Answer](), dict[str, list[int]]()
        coming = dict[str, int]()
        for ask in asks:
            tokens = self.prompt_of(ask)
            params = SamplingParams(max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True)
            asked = {"retention": ask.retention, "cache_salt": self.salt}
            request = self.llm.make_request(tokens, params, **asked)
            answers[request.request_id] = Answer(request, self.llm.tokenizer)
            expected[request.request_id] = self.cold(tokens)[: ask.max_tokens]
            coming[request.request_id] = ask.step
        num_computed, num_preempted = scheduler.num_computed_tokens, scheduler.num_preemptions
        give_up_at = time.monotonic() + PATIENCE_S
        for step in itertools.count():
            for name in [name for name, when in coming.items() if when <= step]:
                core.add_request(answers[name].request)
                del coming[name]
            for mishap in mishaps:
                if mishap.step == step:
                    self.happen(mishap, list(answers))
            for output in self.turn():
                answers[output.request_id].take(output)
            if all(answer.finish_reason is not None for answer in answers.values()):
                break
            assert time.monotonic() < give_up_at, "a request is never answered"
        num_computed = scheduler.num_computed_tokens - num_computed
        num_claimed, is_aborted = 0, False
        for name, answer in answers.items():
            if answer.finish_reason == "abort":
                is_aborted = True
                assert answer.token_ids == expected[name][: len(answer.token_ids)]
            else:
                assert answer.token_ids == expected[name]
                num_claimed += self._num_claimed(answer)
        if is_aborted or scheduler.num_preemptions > num_preempted:
            assert num_claimed <= num_computed
        else:
            assert num_claimed == num_computed
        return list(answers.values())

    def _num_claimed(self, answer: Answer) -> int:
        """Return how many tokens a request says to have computed; check that its usage adds up."""
        usage, size = answer.usage, self.llm.core.kv_spec.block_size
        num_prompt_tokens = len(answer.request.prompt_token_ids)
        assert usage.prompt_tokens == num_prompt_tokens
        assert min(usage.cached_tokens_by_tier.values()) >= 0
        counted = usage.cached_tokens + usage.written_tokens + usage.recomputed_tokens
        assert counted == num_prompt_tokens // size * size
        return num_prompt_tokens - usage.cached_tokens + len(answer.token_ids) - 1

    def happen(self, mishap: Mishap, names: Sequence[str] = ()) -> None:
        """Let something happen; `names` are of the requests, any of which may be aborted."""
        number = mishap.number
        match mishap.what:
            case "abort":
                self.llm.core.abort(names[number % len(names)] if names else "")
            case "stop":
                self.stop(1 + number % 60)
            case "kill":
                self.kill()
            case "evict":
                self.evict()
            case "evict_chains":
                self.evict_chains(number)
            case "evict_here_and_there":
                self.evict_here_and_there(number)
            case "jump":
                self.jump(number)
            case what:
                raise AssertionError(what)

    def settle(self) -> None:
        """Let all moves end; then nobody may hold anything."""
        core, tiers = self.llm.core, self.llm.core.tiers
        give_up_at = time.monotonic() + PATIENCE_S
        while core.has_work:
            self.turn()
            assert time.monotonic() < give_up_at, "a block is never moved to the end"
        assert (tiers.device.num_used, tiers.host.num_used) == (0, 0)
        assert (tiers.disk_link.num_reading, tiers.disk_link.num_writing) == (0, 0)
        assert not core.cache.is_restoring
        assert tiers.prefetched.total() == 0


ASKS = st.builds(
    Ask,
    trunk=st.integers(0, 1),
    num_shared=st.sampled_from([0, 16, 150, 320, 480]) | st.integers(0, 500),
    num_own=st.sampled_from([0, 40]) | st.integers(0, 150),
    num_answered=st.sampled_from([0, 0, MOST_TOKENS]),
    max_tokens=st.sampled_from([1, 4, MOST_TOKENS]),
    step=st.just(0) | st.integers(0, 12),
    retention=st.sampled_from(["24h", "24h", "24h", "in_memory"]),
).filter(lambda ask: ask.num_shared + ask.num_own > 0)

CONDITIONS = st.builds(
    Conditions,
    fail_share=st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]),
    delay_share=st.sampled_from([0.0, 0.0, 0.5, 0.95]),
    load_timeout_s=st.sampled_from([0.0, 0.005, 0.05, 30.0]),
    lookup_timeout_s=st.sampled_from([0.0, 0.01, 1.0, 1.0, 1.0]),
    room_patience_s=st.sampled_from([0.0, 0.25]),
    has_any_splits=st.booleans(),
    disk_bytes_per_s=st.sampled_from([None, 1e5, 1e9, 1e12]),
    seed=st.integers(0, 999),
)

MISHAPS = st.builds(
    Mishap,
    step=st.integers(0, 12),
    what=st.sampled_from(
        ["abort", "stop", "kill", "jump", "evict", "evict_chains", "evict_here_and_there"]
    ),
    number=st.integers(0, 999),
)


class MixedMachine(RuleBasedStateMachine):
    """Requests come, together or one after another, and things go wrong before and meanwhile.

    Blocks fail to load or to be stored, or come late; timeouts are short; the planner chooses any
    split or believes in a wrong rate; the worker is stopped or killed; blocks are demoted, evicted
    and expire; requests are aborted. Each answer is compared with the cold one. At the end all that
    was begun ends, nothing may be held, and all tiers have to serve.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        engine.begin()

    @rule(
        asks=st.lists(ASKS, min_size=1, max_size=5),
        conditions=CONDITIONS,
        mishaps=st.lists(MISHAPS, max_size=5),
    )
    def serve(self, asks: list[Ask], conditions: Conditions, mishaps: list[Mishap]) -> None:
        self.engine.meet(conditions)
        self.engine.serve(asks, mishaps)

    @rule(
        before=st.lists(ASKS, min_size=1, max_size=3),
        asks=st.lists(ASKS, min_size=1, max_size=3),
        conditions=CONDITIONS,
        mishaps=st.lists(MISHAPS, max_size=5),
    )
    def serve_from_disk(
        self, before: list[Ask], asks: list[Ask], conditions: Conditions, mishaps: list[Mishap]
    ) -> None:
        """Serve requests after others, which may begin alike, have left memory for the disk."""
        self.engine.calm()
        self.engine.serve([ask._replace(step=0, retention="24h") for ask in before])
        self.engine.demote("disk")
        self.engine.evict()
        self.engine.meet(conditions)
        self.engine.serve([*asks, before[0]], mishaps)

    @rule(to=st.sampled_from(["host", "disk"]))
    def demote(self, to: str) -> None:
        self.engine.demote(to)

    @rule(mishap=MISHAPS)
    def go_wrong(self, mishap: Mishap) -> None:
        self.engine.happen(mishap)

    @rule(num_turns=st.integers(1, 10))
    def turn(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.engine.turn()

    def teardown(self) -> None:
        if sys.exception() is None:  # else the engine may hang once more
            self.engine.end()


def run(tmp_path: Path, limits: settings, **sizes: object) -> None:
    """Draw examples until the limits are reached or one fails."""
    with pytest.MonkeyPatch.context() as patch:
        engine = Engine(tmp_path, patch, **sizes)

        class Machine(MixedMachine):
            def __init__(self) -> None:
                super().__init__(engine)

        try:
            run_state_machine_as_test(Machine, settings=limits)
        finally:
            engine.close()


LIMITS = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
    report_multiple_bugs=False,
    phases=[Phase.generate],  # what depends on the moment can hardly be made smaller
)


def test_no_mishaps_in_any_order_change_a_token_or_leave_a_block_held(tmp_path: Path) -> None:
    limits = settings(LIMITS, max_examples=8, stateful_step_count=6, derandomize=True)
    run(tmp_path, limits)


@pytest.mark.stress
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("disk_write", ["on_evict", "write_behind"])
@pytest.mark.parametrize(("block_size", "num_batched_tokens"), [(16, 96), (32, 250), (16, 2048)])
def test_no_mishaps_in_any_order_change_a_token_in_hundreds_of_examples(
    tmp_path: Path, block_size: int, num_batched_tokens: int, disk_write: str
) -> None:
    sizes = {"block_size": block_size, "max_num_batched_tokens": num_batched_tokens}
    limits = settings(LIMITS, max_examples=60, stateful_step_count=10)
    run(tmp_path, limits, disk_write=disk_write, **sizes)
