"""The order of admission, counted in admissions and steps, never in seconds."""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.test_scheduler import SIZE, Loop, put_on_disk
from tests.fake_store import Rig
from tests.levels import few
from tieredkv.engine import queue as queues
from tieredkv.engine.queue import MAX_PASSES, WINDOW, RequestQueue
from tieredkv.engine.request import Request
from tieredkv.errors import RequestError


def one_at_a_time() -> Loop:
    return Loop(Rig(num_blocks=64, has_store=False), max_num_seqs=1)


def order(queue: RequestQueue) -> list[str]:
    """Empty the queue; return its requests' names in the order of their admission."""
    names = []
    while queue:
        request = queue.upcoming()[0]
        queue.take(request)
        names.append(request.request_id)
    return names


def test_a_request_of_a_quiet_tenant_waits_for_one_of_each_other_tenant_at_most() -> None:
    loop = one_at_a_time()
    for index in range(100):
        loop.add(f"flood {index}", 8, seed=index, tenant="flood")
        loop.add(f"other {index}", 8, seed=index, tenant="other")
    for _ in range(40):
        loop.step()
    before = len(loop.finished) + len(loop.scheduler.running)
    loop.add("quiet", 8, tenant="quiet")
    loop.run(steps=2000)
    assert loop.finished.index("quiet") <= before + 2
    assert len(loop.finished) == 201


def test_tenants_get_equal_numbers_of_tokens_whatever_the_length_of_their_prompts() -> None:
    loop = one_at_a_time()
    long = [loop.add(f"long {index}", 40, seed=index, tenant="long") for index in range(10)]
    short = [loop.add(f"short {index}", 8, seed=index, tenant="short") for index in range(50)]
    got = {"long": 0, "short": 0}
    for name in order(loop.scheduler.waiting)[:36]:
        got[name.split()[0]] += 40 if name.startswith("long") else 8
        assert abs(got["long"] - got["short"]) <= 40
    assert len(long) + len(short) == 60


def test_a_tenant_is_charged_for_what_is_not_cached() -> None:
    loop = one_at_a_time()
    loop.add("cold", 40, tenant="cached")
    loop.run()
    for index in range(8):
        loop.add(f"new {index}", 40, seed=1 + index, tenant="new")
        loop.add(f"cached {index}", 41, tenant="cached")
    loop.run()
    names = [name.split()[0] for name in loop.finished]
    assert names[:11].count("new") <= 2


def test_a_tenant_that_comes_back_does_not_catch_up_on_what_it_did_not_ask_for() -> None:
    loop = one_at_a_time()
    for index in range(20):
        loop.add(f"flood {index}", 8, seed=index, tenant="flood")
    queue = loop.scheduler.waiting
    for _ in range(10):
        queue.take(queue.upcoming()[0])
    for index in range(5):
        loop.add(f"late {index}", 8, seed=index, tenant="late")
    names = [name.split()[0] for name in order(queue)]
    assert names[:10].count("late") == 5
    assert max(len(run) for run in "".join(name[0] for name in names[:10]).split("f")) <= 1


def test_requests_that_share_a_prefix_run_near_each_other() -> None:
    loop = one_at_a_time()
    for index in range(4):
        for seed in (1, 2):
            loop.add(f"{seed}{index}", 8 + index, seed=seed)
    assert order(loop.scheduler.waiting) == ["10", "11", "12", "13", "20", "21", "22", "23"]


def test_the_longest_shared_prefix_counts() -> None:
    loop = one_at_a_time()
    short = loop.add("a", 4 * SIZE, seed=1)
    loop.add("far", 4 * SIZE, seed=2)
    near = loop.add("near", 4 * SIZE, seed=1)
    nearer = loop.add("nearer", 5 * SIZE, seed=1)
    near.chain.hashes[2:] = short.chain.hashes[:2][::-1]
    assert order(loop.scheduler.waiting) == ["a", "nearer", "near", "far"]
    assert nearer.num_passes == 0


def test_short_work_comes_before_long_work_whichever_is_older() -> None:
    loop = one_at_a_time()
    for name, num_tokens in (("long", 40), ("short", 8), ("middle", 24), ("as short", 8)):
        loop.add(name, num_tokens, seed=num_tokens)
    assert order(loop.scheduler.waiting) == ["short", "as short", "middle", "long"]


def test_what_the_disk_holds_counts_as_held_once_it_has_told() -> None:
    loop = Loop(rig := Rig(num_blocks=64, num_pages=64), max_num_seqs=1)
    put_on_disk(rig, 3, 40)
    loop.add("running", 8, seed=9, max_tokens=20)
    loop.step()
    loop.add("cold", 32, seed=4)
    loop.add("on disk", 44, seed=3)
    assert [each.request_id for each in loop.scheduler.waiting.upcoming()] == ["cold", "on disk"]
    loop.step()
    assert [each.request_id for each in loop.scheduler.waiting.upcoming()] == ["on disk", "cold"]
    loop.run()


def test_the_oldest_request_is_passed_so_often_and_no_more() -> None:
    loop = one_at_a_time()
    loop.add("first", 8, seed=1)
    loop.add("alone", 8, seed=2)
    for index in range(2 * MAX_PASSES):
        loop.add(f"like the first {index}", 8, seed=1)
    names = order(loop.scheduler.waiting)
    assert names.index("alone") == 1 + MAX_PASSES


def test_only_the_oldest_of_a_long_queue_are_looked_at() -> None:
    loop = one_at_a_time()
    loop.add("first", 8, seed=1)
    for index in range(WINDOW):
        loop.add(f"other {index}", 8, seed=2 + index)
    loop.add("like the first", 8, seed=1)
    assert order(loop.scheduler.waiting)[-1] == "like the first"
    assert loop.scheduler.waiting.upcoming() == []


def test_a_preempted_request_goes_to_the_head_of_its_tenant() -> None:
    loop = one_at_a_time()
    queue = loop.scheduler.waiting
    for name in "abc":
        loop.add(name, 8, seed=ord(name))
    first = queue.upcoming()[0]
    queue.take(first)
    first.table_key = 1
    queue.append(first)
    assert order(queue) == ["a", "b", "c"]


@pytest.mark.parametrize("num_tokens", few([7, 2]))
def test_a_small_request_gets_its_turn_beside_answers_that_do_not_fit_together(
    num_tokens: int,
) -> None:
    """The bound is two blocks' worth of steps: each running request needs a block by then."""
    loop = Loop(Rig(num_blocks=64, has_store=False), max_num_seqs=16)
    for index in range(8):
        loop.add(f"giant {index}", 8, seed=index, max_tokens=200)
    for _ in range(60):
        loop.step()
    assert loop.scheduler.num_preemptions > 0
    assert loop.scheduler.waiting
    for number in range(MAX_PASSES):
        name = f"small {number}"
        loop.add(name, num_tokens, seed=100 + number, max_tokens=2)
        for _ in range(2 * SIZE + 2):
            loop.step()
        assert name in loop.finished
    loop.run(steps=5000)
    assert len(loop.finished) == 8 + MAX_PASSES


def test_small_requests_without_end_do_not_starve_a_large_one() -> None:
    loop = Loop(Rig(num_blocks=16, has_store=False), max_num_seqs=8)
    for index in range(3):
        loop.add(f"small {index}", 12, seed=index, max_tokens=6)
    loop.step()
    large = loop.add("large", 50, seed=99)
    for index in range(3, 200):
        loop.add(f"small {index}", 12, seed=index, max_tokens=6)
        loop.step()
        if large.request_id in loop.finished:
            break
    assert len(loop.finished) <= 3 + MAX_PASSES + 8
    loop.run(steps=3000)


def test_the_newest_request_of_the_tenant_that_holds_most_is_preempted() -> None:
    loop = Loop(rig := Rig(num_blocks=20, has_store=False), max_num_seqs=8)
    flood = [loop.add(f"flood {i}", 16, seed=i, max_tokens=12, tenant="flood") for i in range(3)]
    quiet = loop.add("quiet", 8, max_tokens=12, tenant="quiet")
    while not loop.scheduler.num_preemptions:
        loop.step()
    assert [each.is_running for each in (*flood, quiet)] == [True, True, False, True]
    loop.run()
    rig.check_nothing_is_held()


@pytest.mark.parametrize(
    ("queued", "refused"),
    [
        ("aaaaaaa", ""),
        ("aaaaaaaa", "a"),
        ("aaaaaaaab", "a"),
        ("aaaaaaaabbbb", "ab"),
        ("aaaabbbb", "ab"),
        ("aaaaabbb", "a"),
    ],
)
def test_a_full_queue_refuses_a_tenant_that_has_its_share(
    queued: Sequence[str], refused: str
) -> None:
    loop = one_at_a_time()
    requests: list[Request] = [
        loop.add(f"{index}", 8, tenant=tenant) for index, tenant in enumerate(queued)
    ]
    queue = loop.scheduler.waiting
    assert len(queue) == len(requests)
    queue.waited_s = 2.5
    for tenant in "ab":
        with pytest.raises(RequestError) if tenant in refused else nullcontext() as caught:
            queue.check_room(tenant, 8)
        assert caught is None or (caught.value.status, caught.value.retry_after_s) == (429, 3)
    queue.check_room("c", 8)


def test_conversations_that_are_still_cached_come_before_those_that_were_evicted() -> None:
    loop = one_at_a_time()
    for seed in (1, 2):
        loop.add(f"first turn {seed}", 40, seed=seed)
    loop.run()
    loop.add("running", 8, seed=9, max_tokens=20)
    loop.step()
    for seed in (3, 4, 2, 5, 1):
        loop.add(f"turn {seed}", 41, seed=seed)
    loop.run()
    assert loop.finished[3:] == ["turn 2", "turn 1", "turn 3", "turn 4", "turn 5"]


def test_a_request_that_was_evicted_is_passed_by_so_many_cached_ones_at_most() -> None:
    loop = one_at_a_time()
    loop.add("first turn", 40, seed=1)
    loop.run()
    loop.add("running", 8, seed=9, max_tokens=5)
    loop.step()
    loop.add("evicted", 41, seed=2)
    for index in range(2 * MAX_PASSES):
        loop.add(f"cached {index}", 41, seed=1)
    loop.run(steps=1000)
    assert loop.finished.index("evicted") <= 2 + MAX_PASSES


def test_more_conversations_than_memory_holds_do_not_push_each_other_out_in_a_circle() -> None:
    loop = Loop(Rig(num_blocks=64, num_pages=4, has_store=False), max_num_seqs=2)
    num_prompt_tokens = 0
    for turn in range(6):
        for seed in range(8):  # of 12 blocks each, where 64 fit
            num_tokens = 48 + 4 * turn
            loop.add(f"{turn}/{seed}", num_tokens, seed=seed)
            num_prompt_tokens += num_tokens
        loop.run(steps=1000)
    assert loop.num_computed_tokens < 0.6 * num_prompt_tokens


@dataclass(eq=False)
class Waiting:
    """What a queue reads of a request, and writes to it."""

    tenant: str
    num_uncached_tokens: int
    num_output_tokens: int
    table_key: int = 0
    num_passes: int = 0
    num_tokens: int = 32
    added_at: float = 0.0
    chain: Any = field(default_factory=lambda: SimpleNamespace(hashes=[]))

    @property
    def asked(self) -> Any:
        return SimpleNamespace(tenant=self.tenant)


def test_tenants_are_forgotten_once_they_start_level_with_the_others_and_nothing_else_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken, known = list[list[str]](), list[int]()
    for most_away in (4, 1_000_000):
        monkeypatch.setattr(queues, "MOST_AWAY", most_away)
        choose, queue = random.Random(1), RequestQueue(SIZE, lambda _: 0)
        turns, running, most_known = list[str](), list[Any](), 0
        for number in range(3000):
            tenant = str(number // 4 - choose.choice((0, 0, 1, 9)))
            request: Any = Waiting(tenant, choose.randint(1, 32), choose.randint(1, 32))
            queue.append(request)
            while queue and choose.random() < 0.6:
                request = queue.upcoming()[0]
                queue.take(request)
                turns.append(request.tenant)
                running.append(request)
                request.table_key = 1
            while running and choose.random() < 0.6:
                request = running.pop(choose.randrange(len(running)))
                if choose.random() < 0.1:
                    queue.append(request)  # it was preempted
                else:
                    queue.end(request)
            most_known = max(most_known, len(queue._tokens))
        taken.append(turns)
        known.append(most_known)
    assert taken[0] == taken[1]
    assert 10 * known[0] < known[1]
