"""A real engine to which mishaps happen at random, and whose answers are compared with cold ones.

This module knows what can go wrong and what must hold nevertheless. It does not choose what is
asked, or what goes wrong when.
"""

import itertools
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace

from tests.prompts import prompt
from tests.splits import choose_any_splits
from tests.waiting import HANG_S, wait_until
from tieredkv import LLM, SamplingParams
from tieredkv.cache import device_link, link_rate, lookups, room
from tieredkv.cache.link_rate import LinkRate
from tieredkv.cache.pool import BlockPool, Taken
from tieredkv.engine import parts
from tieredkv.engine.answer import Answer
from tieredkv.engine.engine_messages import TokenOutput
from tieredkv.engine.runner import make_kv_pool
from tieredkv.operate.calls import EvictFilter
from tieredkv.operate.table import START_BYTES
from tieredkv.pieces import whole
from tieredkv.storage.client import supervisor
from tieredkv.storage.client.client import StoreClient
from tieredkv.tier import HASHES, Event, Loaded, Stored
from tieredkv.types import Tier

POISON = 0x4B
"""The byte that fills blocks and pages when they are allocated, so that keys and values that were
never written change the tokens.
"""

MOST_TOKENS = 20
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
        num_shared: how many tokens it has of that text.
        num_own: how many tokens of its own follow.
        num_answered: how many tokens of the answer follow too, as in the next turn of a chat.
        max_tokens: length of the answer.
        step: the step of the engine before which it comes.
        retention: how long its blocks may be kept.
    """

    trunk: int
    num_shared: int
    num_own: int
    num_answered: int
    max_tokens: int
    step: int
    retention: str


class Mishap(NamedTuple):
    """Something that goes wrong before a step of the engine.

    Attributes:
        step: the number of the step.
        what: see `UnluckyEngine.happen`.
        number: says more about it, such as which request is aborted.
    """

    step: int
    what: str
    number: int


class Conditions(NamedTuple):
    """How reliable the disk is, how long the engine waits, and what the planner does.

    Attributes:
        fail_share, delay_share: see `FlakyDisk`.
        load_timeout_s, lookup_timeout_s, room_patience_s: how long the engine waits for a block,
            for an answer of the disk, and for room.
        has_any_splits: whether the planner chooses any splits, and not those that it finds best.
        disk_bytes_per_s: the rate of the disk that the planner believes in; None for what it knows.
        host_bytes_per_s: the same for copies from host memory.
        seed: of the failures, the delays and the splits.
    """

    fail_share: float = 0.0
    delay_share: float = 0.0
    load_timeout_s: float = 30.0
    lookup_timeout_s: float = 1.0
    room_patience_s: float = 0.25
    has_any_splits: bool = False
    disk_bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None
    seed: int = 0


class FlakyDisk:
    """Makes some of the worker's reads and writes fail, and reports others late.

    A page stays on loan until its read or write is reported. A read that fails leaves garbage in
    its page.

    Attributes:
        fail_share: the share of reads and writes that fail.
        delay_share: how likely it is that a `poll` does not report a read or write that has ended.
        generator: chooses them.
    """

    REASONS = "checksum", "identity", "io", "missing", "evicted", "expired"

    def __init__(self, llm: LLM) -> None:
        store = llm.core.parts.tiers.store
        assert isinstance(store, StoreClient)
        self.fail_share = self.delay_share = 0.0
        self.generator = random.Random()
        self._arena, self._poll, self._held = store.arena, store.poll, list[Event]()
        store.poll = self.poll  # type: ignore[method-assign]

    def poll(self) -> list[Event]:
        events, self._held, told = [*self._held, *self._poll()], [], list[Event]()
        for event in events:
            if not isinstance(event, Loaded | Stored):
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

    def _spoilt(self, event: Loaded | Stored) -> Loaded | Stored:
        if not event.ok or self.generator.random() >= self.fail_share:
            return event
        if isinstance(event, Stored):
            return replace(event, reason="full")
        self.fill([event.page_id])
        return replace(event, reason=self.generator.choice(self.REASONS), life=None)


class UnluckyEngine:
    """A real engine with a real disk tier, to which mishaps happen, and a cold one beside it.

    One engine serves many examples. Each example has a cache salt of its own, so that it finds no
    blocks of another one. After an example that failed, a new engine is started.

    Args:
        folder: for the stores, and for the file that sets the clock.
        patch: undone by the caller, after `close`.
        sizes: settings of the engine that differ from `SIZES`.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, **sizes: object) -> None:
        self._folder, self._patch, self._sizes = folder, patch, {**SIZES, **sizes}
        self._splits = pytest.MonkeyPatch()
        self._offset_s, self._offset_file = 0, folder / "offset"
        self._names, self._is_spoilt = itertools.count(), True
        self._cold = LLM("tiny-random", device_size="4MiB")
        self._llm: LLM | None = None
        self._cold_tokens: dict[tuple[int, ...], list[int]] = {}
        self._offset_file.write_text("0")
        patch.setenv("TIEREDKV_TEST_CLOCK_OFFSET_FILE", str(self._offset_file))
        patch.setattr(supervisor, "_HEALTHY_S", 0.0)  # a killed worker is started again at once
        patch.setattr(link_rate, "PROBE_S", 0.1)  # a disk that was away is soon tried again
        patch.setattr(device_link, "LEAST_SHARE", 0.0)  # rates that a test sets are believed
        self._poison_allocations()

    @property
    def llm(self) -> LLM:
        """The engine that the examples use now."""
        assert self._llm is not None
        return self._llm

    def _poison_allocations(self) -> None:
        """Fill blocks and pages with garbage when they are allocated."""
        allocate = BlockPool.allocate

        def kept(*args: Any) -> torch.Tensor:
            self._device_blocks = make_kv_pool(*args)
            return self._device_blocks

        def poisoned(pool: BlockPool, *args: Any, **options: Any) -> Taken:
            taken = allocate(pool, *args, **options)
            blocks = taken.blocks
            if (
                blocks
                and self._llm is not None
                and pool in self.llm.core.parts.tiers.pools.values()
            ):
                ids = [block.block_id for block in blocks]
                if pool is self.llm.core.parts.tiers.device:
                    self._device_blocks.view(torch.uint8)[ids] = POISON
                else:
                    self._disk.fill(ids)
            return taken

        self._patch.setattr(parts, "make_kv_pool", kept)
        self._patch.setattr(BlockPool, "allocate", poisoned)

    # Examples

    def begin(self) -> None:
        """Start an example on a sound engine, whose cache has nothing for it."""
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
        """Restore the default conditions."""
        self.resume()
        self.meet(Conditions())

    def end(self) -> None:
        """End an example: check that nothing is held any more and that the disk serves again."""
        self.calm()
        self.settle()
        wait_until(lambda: self._worker is not None, "the worker is never started again")
        ask = Ask(9, 100, 0, 0, 4, 0, "24h")

        def is_loaded() -> bool:
            self.serve([ask])
            self.llm.demote("disk")
            self.evict()
            self.llm.core.parts.tiers.disk_link.read_rate = LinkRate(1e12)
            self.llm.core.parts.tiers.device_link.up_rate = LinkRate(1e12)
            [usage] = [answer.usage for answer in self.serve([ask])]
            return usage.cached_tokens_by_tier[Tier.DISK] > 0

        wait_until(is_loaded, "the disk is never read again")
        self.settle()
        self.evict()
        self.check()
        assert not self.llm.core.parts.tiers.catalog.entries()
        self._is_spoilt = False

    def close(self) -> None:
        """Stop both engines. An engine whose last example succeeded must stop without an error."""
        self._splits.undo()
        self._cold.close()
        if self._is_spoilt:
            self._end()
        else:
            self.llm.close()

    # What goes wrong

    def meet(self, conditions: Conditions) -> None:
        """Set the conditions from now on."""
        self._disk.fail_share = conditions.fail_share
        self._disk.delay_share = conditions.delay_share
        self._disk.generator.seed(conditions.seed)
        tiers = self.llm.core.parts.tiers
        tiers.settings.load_timeout_s = conditions.load_timeout_s
        self._patch.setattr(lookups, "LOOKUP_TIMEOUT_S", conditions.lookup_timeout_s)
        self._patch.setattr(room, "PATIENCE_S", conditions.room_patience_s)
        self._splits.undo()
        if conditions.has_any_splits:
            choose_any_splits(self._splits).seed(conditions.seed)
        if conditions.disk_bytes_per_s is not None:
            tiers.disk_link.read_rate = LinkRate(conditions.disk_bytes_per_s)
        if conditions.host_bytes_per_s is not None:
            tiers.device_link.up_rate = LinkRate(conditions.host_bytes_per_s)

    @property
    def _worker(self) -> int | None:
        store = self.llm.core.parts.tiers.store
        return store.state().pid if store is not None else None

    def _signal(self, number: signal.Signals) -> None:
        if (pid := self._worker) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def stop(self, num_turns: int) -> None:
        """Stop the worker, and continue it after so many turns of the engine."""
        self._signal(signal.SIGSTOP)
        self._resumes_in = num_turns

    def resume(self) -> None:
        self._resumes_in = 0
        self._signal(signal.SIGCONT)

    def evict(self) -> None:
        self.llm.core.verbs.evict()

    def evict_chains(self, number: int) -> None:
        """Evict two blocks and all that follow them."""
        tiers = self.llm.core.parts.tiers
        entries = sorted(tiers.catalog.entries(), key=lambda it: (it.position, it.block_hash))
        hashes = sorted(it.block_hash for it in entries)
        doomed = {*random.Random(number).sample(hashes, min(2, len(hashes)))}
        doomed.update(it.block_hash for it in entries if it.parent_hash in doomed)
        names = (HASHES if tiers.store is None else tiers.store.names).hide([*doomed])
        starts = tuple(name[:START_BYTES] for name in names)
        self.llm.core.verbs.evict(EvictFilter(starts=starts))

    def evict_here_and_there(self, number: int) -> None:
        """Evict single blocks, so that chains have holes."""
        generator = random.Random(number)
        whole(self.llm.core.operations.evict(lambda _: generator.random() < 0.3))

    def jump(self, number: int) -> None:
        """Move the clock forward."""
        self._offset_s += [300, 601, 3600, 86_390, 86_401][number % 5]
        self._offset_file.write_text(str(self._offset_s))

    def demote(self, to: str) -> None:
        """Move blocks down for a moment; a worker that is stopped or killed moves none."""
        self.llm.demote(to, timeout_s=0.2)
        self.check()

    # What is asked

    def turn(self) -> list[TokenOutput]:
        """Do one step of the engine, check all invariants, and wait until the next one is due."""
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
        """Return the tokens of a request's prompt."""
        name = f"{ask.trunk} {ask.num_shared} {ask.num_own}"
        own = prompt(random.Random(name).randrange(1 << 32), ask.num_own)
        tokens = prompt(ask.trunk, 1000)[: ask.num_shared] + own
        return tokens + (self.cold(tokens)[: ask.num_answered] if ask.num_answered else [])

    def serve(self, asks: Sequence[Ask], mishaps: Sequence[Mishap] = ()) -> list[Answer]:
        """Serve requests while mishaps happen, and compare each answer with the cold one.

        The tokens that all requests say to have computed must be those that the engine computed.
        After an abort or a preemption it may have computed more.
        """
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
                    come = [name for name in answers if name not in coming]
                    self.happen(mishap, [it for it in come if not answers[it].finish_reason])
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
        """Return how many tokens a request claims to have computed; its usage must add up."""
        usage, size = answer.usage, self.llm.core.kv_spec.block_size
        num_prompt_tokens = len(answer.request.prompt_token_ids)
        assert usage.prompt_tokens == num_prompt_tokens
        assert min(usage.cached_tokens_by_tier.values()) >= 0
        counted = usage.cached_tokens + usage.written_tokens + usage.recomputed_tokens
        assert counted == num_prompt_tokens // size * size
        return num_prompt_tokens - usage.cached_tokens + len(answer.token_ids) - 1

    def happen(self, mishap: Mishap, names: Sequence[str] = ()) -> None:
        """Make a mishap happen; `names` are ids of requests, one of which may be aborted."""
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
        """Wait until all moves have ended, and check that no block and no page is held."""
        core, tiers = self.llm.core, self.llm.core.parts.tiers
        give_up_at = time.monotonic() + PATIENCE_S
        while core.has_work:
            self.turn()
            assert time.monotonic() < give_up_at, "a block is never moved to the end"
        assert (tiers.device.num_used, tiers.host.num_used) == (0, 0)
        assert (tiers.disk_link.num_reading, tiers.disk_link.num_writing) == (0, 0)
        assert not core.cache.is_recalling
        assert tiers.prefetched.total() == 0
