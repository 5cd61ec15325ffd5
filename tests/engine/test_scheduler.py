"""The scheduler over a real cache, a stand-in for the model and a disk that misbehaves."""

import math
import random
from collections import defaultdict
from typing import Any

import pytest

from tests.fake_store import Rig, kept_by, root_of
from tieredkv.cache import lookups, room
from tieredkv.cache.chain import Chain
from tieredkv.cache.plan import Planner
from tieredkv.engine import quick_tenants, scheduler
from tieredkv.engine.engine_messages import EngineRequest
from tieredkv.engine.queue import MAX_PASSES
from tieredkv.engine.request import Request
from tieredkv.engine.sampler import SamplerState
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.engine.scheduler import Scheduler
from tieredkv.engine.step_buffers import BatchRow
from tieredkv.engine.step_plan import ScheduledRow, StepPlan
from tieredkv.hashing import chain_hashes
from tieredkv.types import BlockHash, BlockRecord, Tier

SIZE = 4


class Loop:
    """The engine's loop without a model: computing a row writes the right bytes of its blocks."""

    def __init__(
        self,
        rig: Rig,
        *,
        max_num_batched_tokens: int = 64,
        max_num_alone_tokens: int | None = None,
        max_num_seqs: int = 8,
    ) -> None:
        self.rig = rig
        rig.tiers.block_size = SIZE
        self.scheduler = Scheduler(
            cache=rig.cache,
            block_size=SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_alone_tokens=max_num_alone_tokens or max_num_batched_tokens,
            hash_algo="sha256",
        )
        self.finished: list[str] = []
        self.pending: list[Request] = []
        self.num_computed_tokens = 0
        self.computed: defaultdict[str, set[BlockHash]] = defaultdict(set)

    def add(
        self, name: str, num_tokens: int, *, max_tokens: int = 1, seed: int = 0, tenant: str = ""
    ) -> Request:
        """Queue a request; prompts of the same seed share their prefix."""
        token_ids = prompt_of(seed, num_tokens)
        root = root_of(f"scheduler{tenant}")
        hashes = chain_hashes(root, token_ids, SIZE, algo="sha256")
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(
            EngineRequest(
                request_id=name, prompt_token_ids=token_ids, params=params, tenant=tenant
            ),
            chain=Chain(root, tenant.encode() or b"ns", hashes, claims=kept_by("24h")),
            sampler=SamplerState(params, 0, eos_token_ids=frozenset(), prompt_token_ids=token_ids),
            max_output_tokens=max_tokens,
        )
        self.scheduler.add(request)
        return request

    def step(self) -> list[ScheduledRow]:
        """Run one step and check every invariant; return its rows."""
        cache, scheduler = self.rig.cache, self.scheduler
        cache.poll()
        if self.pending:
            scheduler.prepare()
            self.rig.check()
        if scheduler.wants_preemption:
            self.collect()
        rows = scheduler.schedule(may_preempt=not self.pending)
        scheduler.check()
        self.rig.check()
        for request, row in rows:
            self.compute(request, row)
        for each in rows:
            scheduler.complete(each)
            if each.row.needs_logits and each.request.usage is None:
                self.measure_usage(*each)
        scheduler.make_room()
        self.rig.check()
        cache.refresh()
        self.collect()
        self.pending = [request for request, row in rows if row.needs_logits]
        cache.pump()
        scheduler.check()
        self.rig.check()
        return rows

    def compute(self, request: Request, row: BatchRow) -> None:
        """Write the blocks that a forward pass would write; check those that it would read."""
        prefix = request.chain
        self.num_computed_tokens += len(row.token_ids)
        self.rig.verify(prefix)
        for index, block in enumerate(prefix.blocks[: len(prefix.hashes)]):
            if index < row.start // SIZE:
                assert block.is_ready, f"{request.request_id} attends to what is not there"
            elif (index + 1) * SIZE <= row.context_len and row.write_from <= row.start:
                assert not block.is_ready, "a shared block is written"
                assert not block.is_copying, "two writers of one block"
                self.rig.write(block, prefix.hashes[index])
                self.computed[request.request_id].add(prefix.hashes[index])

    def measure_usage(self, request: Request, row: BatchRow) -> None:
        """Count where a prompt came from; verify that what it computed itself is no hit."""
        num_again = int(row.write_from > row.start)
        usage = request.measure_usage(SIZE, num_again, self.rig.cache.why_missed)
        num_again += sum(request.overlaps.values())
        chain = request.chain.hashes[: request.num_prompt_tokens // SIZE]
        num_computed = SIZE * len(self.computed[request.request_id].intersection(chain))
        assert usage.written_tokens + usage.recomputed_tokens - num_again == num_computed
        assert usage.cached_tokens + num_again + num_computed == SIZE * len(chain)
        request.usage = usage

    def collect(self) -> None:
        """Collect the tokens of the step before, except of requests that no longer run."""
        pending, self.pending = self.pending, []
        for request in pending:
            if request.is_running:
                self.sample(request)

    def sample(self, request: Request) -> None:
        """Give a request its next token."""
        if not request.touched_at:
            request.touched_at = 1.0
            self.rig.cache.touch(request.chain)
        request.append(7)
        num_full = request.num_computed_tokens // SIZE
        if len(request.chain.hashes) < num_full:
            start = len(request.chain.hashes) * SIZE
            parent = request.chain.hashes[-1] if start else request.chain.root
            tokens = request.token_ids[start : start + SIZE]
            (block_hash,) = chain_hashes(parent, tokens, SIZE, algo="sha256")
            self.rig.write(request.chain.blocks[start // SIZE], block_hash)
        self.scheduler.seal_full_blocks(request)
        if request.num_output_tokens >= request.max_output_tokens:
            self.finished.append(request.request_id)
            self.scheduler.remove(request)

    def run(self, *, steps: int = 400) -> None:
        """Step until every request has finished."""
        for _ in range(steps):
            if not self.scheduler.waiting and not self.scheduler.running:
                return
            self.step()
        waiting = [request.request_id for request in self.scheduler.waiting]
        running = [request.request_id for request in self.scheduler.running]
        raise AssertionError(f"stuck: waiting {waiting}, running {running}")


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    """Return the tokens of a prompt, which depend on the seed and the positions."""
    return [seed * 100_000 + position for position in range(num_tokens)]


def put_on_disk(rig: Rig, seed: int, num_tokens: int) -> None:
    """Place a prompt's blocks on disk."""
    root = parent = root_of("scheduler")
    for position, block_hash in enumerate(
        chain_hashes(root, prompt_of(seed, num_tokens), SIZE, algo="sha256")
    ):
        rig.store.put_block(
            BlockRecord(
                block_hash=block_hash,
                parent_hash=parent,
                root=root,
                namespace=b"ns",
                position=position,
                size_bytes=64,
                retention="24h",
                computed_at=rig.clock.now(),
                expires_at=rig.clock.now() + 86_400.0,
                last_used=rig.clock.now(),
            )
        )
        parent = BlockHash(block_hash)


@pytest.fixture
def endless_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never drop blocks to make room, so that a circular wait is not hidden."""
    monkeypatch.setattr(room, "PATIENCE_S", 1e9)


@pytest.fixture(params=["at once", "after the step"])
def room_is_made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make room for queued requests at once, or after the step was issued, however few blocks."""
    if request.param != "at once":
        monkeypatch.setattr(room, "FEW_BLOCKS", 0)


@pytest.mark.usefixtures("endless_patience")
@pytest.mark.parametrize("num_pages", [4, 5, 8])
@pytest.mark.usefixtures("room_is_made")
def test_big_prefixes_on_disk_and_tiny_tiers_never_wait_in_a_circle(num_pages: int) -> None:
    rng = random.Random(num_pages)
    rig = Rig(num_blocks=16, num_pages=num_pages)
    loop = Loop(rig, max_num_batched_tokens=16)
    for seed in range(6):
        put_on_disk(rig, seed, 48)
    for index in range(18):
        loop.add(f"r{index}", rng.choice([5, 24, 48, 56]), seed=rng.randrange(8), max_tokens=5)
    loop.run(steps=1500)
    assert len(loop.finished) == 18
    rig.check_nothing_is_held()


@pytest.mark.usefixtures("endless_patience", "room_is_made")
def test_a_disk_that_answers_in_any_order_and_fails_stops_nobody() -> None:
    for seed in range(8):
        rng = random.Random(seed)
        rig = Rig(num_blocks=16, num_pages=rng.choice([4, 6, 9]))
        rig.store.is_held = rig.transfer.is_held = True
        loop = Loop(rig, max_num_batched_tokens=rng.choice([3, 16, 64]))
        for prompt in range(4):
            put_on_disk(rig, prompt, 40)
        requests = [
            loop.add(f"r{index}", rng.randrange(1, 50), seed=rng.randrange(6), max_tokens=6)
            for index in range(12)
        ]
        for _ in range(3000):
            if not loop.scheduler.waiting and not loop.scheduler.running:
                break
            loop.step()
            if rng.random() < 0.02:
                victim = rng.choice(requests)
                if victim in loop.scheduler.waiting or victim in loop.scheduler.running:
                    loop.scheduler.remove(victim)
            if rng.random() < 0.5:
                rig.transfer.complete()
            if rig.store.lookups and rng.random() < 0.5:
                rig.store.answer(rng.randrange(len(rig.store.lookups)))
            if rig.store.jobs and rng.random() < 0.7:
                reason = rng.choice(["", "", "", "checksum"])
                rig.store.complete(rng.randrange(len(rig.store.jobs)), reason=reason)
        else:
            raise AssertionError(f"stuck with seed {seed}")
        rig.check_nothing_is_held()


@pytest.mark.usefixtures("room_is_made")
def test_a_head_of_the_queue_gets_the_blocks_that_those_behind_it_pin() -> None:
    loop = Loop(rig := Rig(num_blocks=8, num_pages=16))
    loop.add("warm", 16, seed=1)
    loop.run()
    loop.add("large", 30, seed=2).num_passes = MAX_PASSES  # its turn has come
    loop.add("cached", 17, seed=1)
    loop.run(steps=40)
    assert loop.finished == ["warm", "large", "cached"]
    rig.check_nothing_is_held()


@pytest.mark.usefixtures("room_is_made")
def test_a_head_of_the_queue_is_admitted_though_store_hangs_and_others_are_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "PATIENCE_S", 0.01)
    monkeypatch.setattr(lookups, "LOOKUP_TIMEOUT_S", 0.0)
    loop = Loop(rig := Rig(num_blocks=8, num_pages=4))
    for seed in (1, 2, 3):
        loop.add(f"warm {seed}", 16, seed=seed)
        loop.run()
    rig.store.is_held = True
    loop.add("large", 31, seed=4).num_passes = MAX_PASSES  # its turn has come
    loop.add("cached", 17, seed=3)
    loop.run(steps=20_000)
    assert loop.finished[-2:] == ["large", "cached"]
    rig.check_nothing_is_held()


@pytest.mark.usefixtures("room_is_made")
def test_a_store_that_hangs_holds_up_no_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PATIENCE_S", 0.01)
    monkeypatch.setattr(lookups, "LOOKUP_TIMEOUT_S", 0.0)
    loop = Loop(rig := Rig(num_blocks=16, num_pages=4, load_timeout_s=0.02))
    put_on_disk(rig, 1, 24)
    loop.add("first", 24, seed=1)
    rig.store.answer(0)
    rig.store.is_held = True
    for index in range(6):
        loop.add(f"r{index}", 20, seed=index, max_tokens=12)
    loop.run(steps=20_000)
    assert len(loop.finished) == 7
    assert rig.tiers.counters.load_failures["timeout"] > 0
    rig.check_nothing_is_held()


def test_what_only_queued_requests_load_is_planned_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop(rig := Rig(num_blocks=8, num_pages=16))
    put_on_disk(rig, 2, 24)
    loop.add("running", 16, seed=1, max_tokens=12)
    loop.step()
    plans: list[object] = []
    plan = rig.cache.plan

    def note_plan(*args: Any, **options: Any) -> None:
        plans.append(args)
        plan(*args, **options)

    monkeypatch.setattr(rig.cache, "plan", note_plan)
    rig.store.is_held = True
    loop.add("queued", 25, seed=2)
    rig.store.answer(0)
    loop.step()
    assert rig.cache.is_recalling
    num_before = len(plans)
    for _ in range(3):
        loop.step()
    assert len(plans) == num_before + 3
    rig.store.is_held = False
    loop.run()
    assert loop.finished == ["running", "queued"]


@pytest.mark.usefixtures("room_is_made")
def test_requests_that_outgrow_the_pool_preempt_the_newest_and_all_finish() -> None:
    loop = Loop(rig := Rig(num_blocks=8, num_pages=16))
    for index in range(4):
        loop.add(f"r{index}", 8, seed=index, max_tokens=16)
    loop.run()
    assert sorted(loop.finished) == ["r0", "r1", "r2", "r3"]
    assert loop.finished[0] == "r0"
    assert loop.scheduler.num_preemptions > 0
    rig.check_nothing_is_held()


def test_a_preempted_request_is_not_admitted_again_in_the_step_that_preempted_it() -> None:
    loop = Loop(Rig(num_blocks=6, num_pages=16))
    for index in range(2):
        loop.add(f"r{index}", 8, seed=index, max_tokens=12)
    while loop.scheduler.num_preemptions == 0:
        loop.step()
    assert [request.is_running for request in loop.scheduler.waiting] == [False]
    loop.run()


def test_a_wholly_cached_prompt_computes_its_last_token_only() -> None:
    loop = Loop(Rig())
    loop.add("cold", 16)
    loop.run()
    assert loop.num_computed_tokens == 16
    loop.add("warm", 16)
    loop.run()
    assert loop.num_computed_tokens == 17


def test_two_requests_with_one_prompt_compute_its_blocks_once() -> None:
    loop = Loop(Rig(), max_num_batched_tokens=6)
    loop.add("a", 18)
    loop.add("b", 18)
    loop.run()
    assert loop.num_computed_tokens <= 18 + 2 + SIZE
    assert sorted(loop.finished) == ["a", "b"]


def test_what_one_request_computed_and_what_the_disk_gave_is_told_to_each_that_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    best, at_6 = Planner.split, {"block": 6, "steady_block": 6}
    monkeypatch.setattr(Planner, "split", lambda *args: best(*args)._replace(**at_6))
    rig = Rig(num_blocks=32, num_pages=32, restore="auto")
    loop = Loop(rig, max_num_batched_tokens=32)  # both requests are admitted in the first step
    put_on_disk(rig, 0, 40)
    rig.tiers.disk_link.read_rate.learnt_at = math.inf  # nothing is read only to measure the disk
    first, second = loop.add("first", 43), loop.add("second", 46)
    loop.run()
    assert first.usage is not None and second.usage is not None
    assert first.usage.cached_tokens_by_tier == {Tier.DEVICE: 0, Tier.HOST: 0, Tier.DISK: 16}
    assert (first.usage.recomputed_tokens, first.usage.written_tokens) == (24, 0)
    assert second.usage.cached_tokens_by_tier == {Tier.DEVICE: 24, Tier.HOST: 0, Tier.DISK: 16}
    assert (second.usage.recomputed_tokens, second.usage.written_tokens) == (0, 4)
    assert second.usage.split_token == 24


def test_a_block_that_became_ready_while_half_of_it_was_computed_is_skipped() -> None:
    loop = Loop(rig := Rig(), max_num_batched_tokens=6)
    request = loop.add("a", 16)
    loop.step()
    assert request.num_computed_tokens == 6
    other = Chain(request.chain.root, b"ns", list(request.chain.hashes), kept_by("24h"))
    assert rig.admit(other)
    rig.write(other.blocks[1], other.hashes[1])
    rig.cache.complete(other, 1, 2)
    loop.run(steps=10)
    assert loop.finished == ["a"]
    assert request.usage is not None and request.usage.cached_tokens == SIZE - 2
    assert request.usage.recomputed_tokens == 2
    rig.cache.release(other)


@pytest.mark.usefixtures("room_is_made")
def test_a_request_cancelled_in_any_step_leaves_nothing_behind() -> None:
    for cancel_at in range(8):
        loop = Loop(rig := Rig(num_blocks=16), max_num_batched_tokens=5)
        put_on_disk(rig, 0, 16)
        request = loop.add("a", 30, max_tokens=20)
        for _ in range(cancel_at):
            loop.step()
        loop.scheduler.remove(request)
        rig.check_nothing_is_held()


def test_a_request_alone_gets_longer_chunks_than_one_that_others_wait_beside() -> None:
    limits = {"max_num_batched_tokens": 4 * SIZE, "max_num_alone_tokens": 8 * SIZE}
    loop = Loop(Rig(num_blocks=64, has_store=False), **limits)
    loop.add("a", 20 * SIZE, seed=1)
    assert [len(row.token_ids) for _, row in loop.step()] == [8 * SIZE]
    loop.add("b", 20 * SIZE, seed=2)
    assert sum(len(row.token_ids) for _, row in loop.step()) == 4 * SIZE


def test_prompts_of_a_burst_are_looked_up_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_ADMITTED_TOKENS", 32)
    loop = Loop(Rig(num_blocks=64, num_pages=16))
    loop.add("first", 20)
    loop.run()
    loop.add("decodes", 8, max_tokens=9, seed=1)
    loop.step()
    for name in "abcd":
        loop.add(name, 20)
    admitted = [{row.request.request_id for row in loop.step()} for _ in range(3)]
    assert admitted == [{"decodes"}, {"decodes", "a", "b"}, {"decodes", "c", "d"}]


def test_a_request_that_was_just_hashed_waits_one_step_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "MAX_ADMITTED_TOKENS", 16)
    loop = Loop(Rig(num_blocks=64, has_store=False))
    admitted = []
    for number in range(6):  # one more request arrives before each step
        loop.add(f"{number}", 16, max_tokens=9, seed=number)
        admitted.append(max(row.request.request_id for row in loop.step()))
    assert admitted == ["0", "0", "1", "1", "2", "2"]


def test_a_short_rest_of_a_prompt_goes_with_the_chunk_before_it() -> None:
    budget = 64 * SIZE
    for rest, expected in (
        (1, [budget, budget + 1]),
        (budget // 32, [budget, budget + budget // 32]),
        (budget // 32 + 1, [budget, budget, budget // 32 + 1]),
    ):
        loop = Loop(Rig(num_blocks=512, has_store=False), max_num_batched_tokens=budget)
        loop.add("a", 2 * budget + rest, seed=1)
        chunks = [len(row.token_ids) for _ in expected for _, row in loop.step()]
        assert chunks == expected


def test_nobody_is_admitted_without_room_for_the_next_token() -> None:
    loop = Loop(Rig(num_blocks=8, has_store=False))
    loop.add("a", 4 * SIZE, max_tokens=4, seed=1)
    loop.add("b", 4 * SIZE, max_tokens=4, seed=2)
    loop.run()
    assert loop.scheduler.num_preemptions == 0


@pytest.mark.parametrize("seconds", [0.0, 172_800.0])
def test_a_queued_request_is_admitted_though_what_it_wanted_is_evicted_or_expires(
    seconds: float,
) -> None:
    loop = Loop(rig := Rig(num_blocks=8))
    loop.add("warm", 16, seed=1)
    loop.run()
    loop.add("running", 12, seed=2, max_tokens=3)
    loop.step()
    loop.add("large", 31, seed=1)  # needs the whole pool
    loop.step()
    assert rig.tiers.device.num_free and rig.tiers.device.num_cached
    rig.clock.moment += seconds
    if not seconds:
        rig.evict(lambda _entry: True)
    loop.run(steps=40)
    rig.check_nothing_is_held()


BUDGET, SHORT = 256, 64


def beside_a_flood(monkeypatch: pytest.MonkeyPatch, num_clients: int) -> Loop:
    """Return a loop with a cached prompt of a quiet tenant and a queued flood of another."""
    monkeypatch.setattr(quick_tenants, "SHORT_STEPS_S", 1e9)
    monkeypatch.setattr(quick_tenants, "RETURN_S", 0.0)
    loop = Loop(Rig(num_blocks=1024, has_store=False), max_num_batched_tokens=BUDGET)
    loop.add("cold", 8 * SIZE + 1, tenant="quiet")
    loop.run()
    for index in range(num_clients):
        loop.add(f"flood {index}", 2 * BUDGET, seed=1 + index, tenant="flood")
    return loop


def num_tokens_of(rows: list[ScheduledRow]) -> int:
    return sum(len(row.token_ids) for _, row in rows)


@pytest.mark.parametrize("num_clients", [1, 12])
def test_a_cached_prompt_is_in_the_next_step_of_a_flood_and_steps_stay_short(
    monkeypatch: pytest.MonkeyPatch, num_clients: int
) -> None:
    loop = beside_a_flood(monkeypatch, num_clients)
    for number in range(5):
        in_progress = num_tokens_of(loop.step())
        assert 0 < in_progress <= SHORT + 2
        loop.add(f"warm {number}", 8 * SIZE + 1, tenant="quiet")
        rows = loop.step()
        assert f"warm {number}" in {row.request.request_id for row in rows}
        assert SHORT // 4 < num_tokens_of(rows) <= SHORT // 4 + 2
    assert loop.finished == ["cold", *(f"warm {number}" for number in range(4))]


def test_long_prompts_wait_for_a_tenant_that_asks_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def names_of(rows: list[ScheduledRow]) -> set[str]:
        return {row.request.request_id for row in rows}

    def ask(name: str) -> list[ScheduledRow]:
        loop.add(name, 8 * SIZE + 1, tenant="quiet")
        rows = loop.step()
        assert name in names_of(rows)
        loop.collect()
        return rows

    loop = beside_a_flood(monkeypatch, 2)
    loop.step()
    loop.add("other", 8, seed=9, max_tokens=100, tenant="other")
    assert "other" in names_of(loop.step())
    monkeypatch.setattr(quick_tenants, "RETURN_S", 1e9)
    ask("first")
    assert SHORT // 4 < num_tokens_of(ask("soon")) <= SHORT // 4 + 3
    for _ in range(3):
        assert names_of(loop.step()) == {"other"}
        assert loop.scheduler.held_until
    assert SHORT * 3 // 4 < num_tokens_of(ask("again")) <= SHORT * 3 // 4 + 3
    monkeypatch.setattr(quick_tenants, "RETURN_S", 0.0)
    for _ in range(3):  # the time to ask again has passed
        assert SHORT < num_tokens_of(loop.step()) <= SHORT + 3
        assert not loop.scheduler.held_until
    ask("late")
    monkeypatch.setattr(quick_tenants, "RETURN_S", 1e9)
    assert num_tokens_of(loop.step()) > SHORT


def test_steps_are_short_for_a_while_only_and_never_for_a_tenant_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = beside_a_flood(monkeypatch, 2)
    assert num_tokens_of(loop.step()) <= SHORT + 2
    monkeypatch.setattr(quick_tenants, "SHORT_STEPS_S", 0.0)
    assert num_tokens_of(loop.step()) == BUDGET
    monkeypatch.setattr(quick_tenants, "SHORT_STEPS_S", 1e9)
    loop = Loop(Rig(num_blocks=1024, has_store=False), max_num_batched_tokens=BUDGET)
    for seed, num_tokens in enumerate((8, BUDGET, BUDGET)):
        loop.add(f"{seed}", num_tokens, seed=seed)
    assert [num_tokens_of(loop.step()) for _ in range(2)] == [BUDGET, BUDGET]


def test_cached_prompts_without_end_do_not_starve_a_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, num_steps = beside_a_flood(monkeypatch, 1), 0
    while "flood 0" not in loop.finished:
        loop.add(f"warm {num_steps}", 8 * SIZE + 1, tenant="quiet")
        loop.step()
        num_steps += 1
    assert num_steps <= 2 * BUDGET // (SHORT // 4) + 2


def test_a_tenant_of_cached_prompts_does_not_keep_all_places() -> None:
    """Its answers of 16 tokens count half as much as the other tenant's prompts of 32."""
    loop = Loop(Rig(num_blocks=64, has_store=False), max_num_seqs=2)
    loop.add("cold", 8 * SIZE + 1, tenant="cached")
    loop.run()
    for index in range(20):
        loop.add(f"cached {index}", 8 * SIZE + 1, max_tokens=16, tenant="cached")
    loop.step()
    for index in range(4):
        loop.add(f"long {index}", 8 * SIZE, seed=1 + index, tenant="long")
    loop.run(steps=2000)
    assert loop.finished.index("long 3") <= 14


def sizes_of(rows: list[ScheduledRow]) -> dict[str, int]:
    """Return how many tokens each request computes."""
    return {request.request_id: len(row.token_ids) for request, row in rows}


def test_brief_requests_are_computed_beside_a_long_prompt_that_came_first() -> None:
    loop = Loop(Rig(num_blocks=200, has_store=False), max_num_batched_tokens=64)
    loop.add("long", 400, seed=1)
    assert sizes_of(loop.step()) == {"long": 64}
    loop.add("brief", 16, seed=2, max_tokens=2)
    loop.add("as brief", 10, seed=3)
    loop.add("not brief", 17, seed=4)
    assert sizes_of(loop.step()) == {"as brief": 10, "brief": 6}
    assert sizes_of(loop.step()) == {"brief": 10, "long": 8}
    assert sizes_of(loop.step()) == {"brief": 1, "long": 64}
    loop.run()
    assert loop.finished == ["as brief", "brief", "long", "not brief"]


def test_a_long_prompt_goes_on_beside_brief_requests_without_end() -> None:
    loop = Loop(Rig(num_blocks=200, has_store=False), max_num_batched_tokens=64)
    loop.add("long", 400, seed=1)
    loop.step()
    for index in range(2 * (400 - 64 - 16) // 8):  # then it is brief itself
        loop.add(f"brief {index}", 16, seed=2 + index)
        assert sizes_of(loop.step()).get("long", 0) == 8 * (index % 2)
    loop.step()
    loop.step()
    assert "long" in loop.finished


def test_only_a_brief_request_has_longer_ones_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(Rig(num_blocks=300, has_store=False), max_num_batched_tokens=64)
    for index in range(2):
        loop.add(f"long {index}", 60 + 400 * index, seed=1 + index)
        loop.step()
    loop.add("long 2", 400, seed=3)
    loop.scheduler._admit(StepPlan(loop.rig.cache, SIZE), 1)
    # A brief request waits for blocks, and so do the longer ones, behind their next block.
    monkeypatch.setattr(Scheduler, "_comes_soon", lambda *_: True)
    monkeypatch.setattr(loop.rig.cache, "first_loaded", lambda _prefix, first, _end: first + 1)
    assert sizes_of(loop.step()) == {"long 1": SIZE, "long 2": SIZE}


def test_brief_requests_leave_running_ones_the_blocks_that_they_need_next() -> None:
    loop = Loop(Rig(num_blocks=26, has_store=False), max_num_batched_tokens=64)
    loop.add("long", 80, seed=1, max_tokens=4)
    loop.step()
    for index in range(8):
        loop.add(f"brief {index}", 4, seed=2 + index)
    loop.run()
    assert not loop.scheduler.num_preemptions
    assert len(loop.finished) == 9


@pytest.mark.parametrize(("num_blocks", "is_admitted"), [(102, False), (103, True)])
def test_a_brief_request_takes_no_block_that_a_running_one_may_need_next(
    num_blocks: int, is_admitted: bool
) -> None:
    loop = Loop(Rig(num_blocks=num_blocks, has_store=False), max_num_batched_tokens=64)
    loop.add("long", 400, seed=1, max_tokens=8)  # it has 101 blocks, and is the only one that runs
    loop.step()
    assert loop.rig.cache.num_free == num_blocks - 101
    loop.add("brief", 4, seed=2)
    assert sizes_of(loop.step()) == ({"brief": 4} if is_admitted else {"long": 64})
