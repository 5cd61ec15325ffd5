"""Which block the planner chooses, beside an evaluation of all blocks, one after another.

The evaluation knows what the planner promises, and none of how it searches: it counts tokens and
blocks one by one.
"""

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tieredkv.cache.plan import SHORT_GAIN, Demand, LinkLoad, LinkState, Planner
from tieredkv.cache.step_times import PromptTimes, StepTimes
from tieredkv.cache.stretches import stretches

BLOCK_BYTES = 1000
HOST, DISK = 0, 1


class Case(NamedTuple):
    """A machine, what it is busy with, and a request with blocks of it here and there."""

    links: tuple[LinkState, LinkState]
    times: PromptTimes
    size: int
    busy_s: float
    least_tokens: int
    demand: Demand

    def planner(self) -> Planner:
        return Planner(self.links, self.times, self.size, self.busy_s, self.least_tokens)

    @property
    def held(self) -> set[int]:
        """The blocks that are ready."""
        return {block for each in self.demand.ready for block in range(*each)}

    def load(self, link: int) -> LinkLoad:
        """Return what a link may load."""
        found = [each for each in self.demand.loads if each.link == link]
        return found[0] if found else LinkLoad(link, ())

    def compute_s(self, begin: int, end: int, held: set[int]) -> float:
        """Return how long the tokens take that are in none of the blocks that are held."""
        last = self.demand.end - 1
        asked = [it for it in range(begin, end) if it // self.size not in held or it == last]
        return sum(self.times(*each) for each in stretches(asked))

    def begin(self, token: int, held: set[int]) -> int:
        """Return the first token from `token` on that is not held."""
        while token // self.size in held and token < self.demand.end - 1:
            token += 1
        return token

    def load_s(self, link: int, block: int) -> float:
        """Return when a link's blocks from `block` on have arrived."""
        load, state = self.load(link), self.links[link]
        num, arrives_s = sum(each >= block for each in load.indices), 0.0
        if any(each >= block for each in load.queued):
            arrives_s = state.busy_s + state.latency_s
        if num:
            move_s = num * BLOCK_BYTES / state.bytes_per_s
            arrives_s = max(arrives_s, state.busy_s + move_s + state.latency_s)
        return arrives_s

    def arrival_s(self, host_block: int, block: int) -> float:
        """Return when all have arrived; what the disk gives passes the other link too."""
        disk, host = self.load(DISK), self.links[HOST]
        passing = [each for each in [*disk.indices, *disk.queued] if each >= block]
        num = len(passing) + sum(each >= host_block for each in self.load(HOST).indices)
        passed_s = host.busy_s + num * BLOCK_BYTES / host.bytes_per_s + host.latency_s
        both_s = max(self.load_s(HOST, host_block), self.load_s(DISK, block))
        return max(both_s, passed_s) if num else both_s

    @property
    def ends(self) -> tuple[int, int]:
        """The first block at which the request may be divided, and the last one."""
        first = -(-self.begin(self.demand.begin, self.held) // self.size)
        return first, max(first, *(each.end for each in self.demand.loads))

    def done_s(self, block: int) -> float:
        """Return when the last token is computed if both links load from one block on."""
        begin, end, (_, last) = self.demand.begin, self.demand.end, self.ends
        load_s, rest = self.arrival_s(block, block), max(last, self.demand.loaded_to)
        if block == last == rest:
            return max(self.busy_s, load_s) + self.compute_s(begin, end, self.held)
        head_s = self.compute_s(begin, min(end, block * self.size), self.held)
        rest_s = self.compute_s(min(end - 1, rest * self.size), end, self.held)
        return max(self.busy_s + head_s, load_s) + rest_s

    def done_with_head_s(self, head: int, block: int) -> float:
        """Return the same if host memory loads from `head` on, and the disk from `block` on."""
        begin, end, (_, last) = self.demand.begin, self.demand.end, self.ends
        head_s = self.busy_s + self.compute_s(begin, min(end, head * self.size), self.held)
        begin_s = max(head_s, self.load_s(HOST, head))
        held = self.held.union(each for each in self.load(HOST).indices if each >= head)
        disk = self.load(DISK)
        is_read = any(each >= block for each in [*disk.indices, *disk.queued])
        load_s = self.arrival_s(head, block) if is_read else 0.0
        middle, rest = max(begin, head * self.size), max(last, self.demand.loaded_to)
        if block == max(self.first_behind(head), disk.end) == rest:
            return max(begin_s, load_s) + self.compute_s(middle, end, held)
        middle_s = self.compute_s(middle, min(end, block * self.size), held)
        rest_s = self.compute_s(min(end - 1, rest * self.size), end, held)
        return max(begin_s + middle_s, load_s) + rest_s

    def first_behind(self, head: int) -> int:
        """Return the first block that is not there if host memory loads from `head` on."""
        held = self.held.union(each for each in self.load(HOST).indices if each >= head)
        token = max(self.begin(self.demand.begin, self.held), head * self.size)
        return -(-self.begin(token, held) // self.size)

    def allowed(self, first: int, last: int) -> list[int]:
        """Return the blocks at which a request may be divided; none for a step of a few tokens."""
        least = min(last, first - (-self.least_tokens // self.size))
        return sorted({first, *range(least, last + 1)})


def drawn(number: int, *, is_begun: bool, links: str) -> Iterator[Case]:
    """Draw requests whose blocks lie in runs, or scattered, in VRAM, elsewhere or nowhere.

    Args:
        number: of cases.
        is_begun: whether loading was begun, so that it needs to save nothing.
        links: the tiers that may load: `d`, or `hd`.
    """
    for seed in range(number):
        draw = random.Random(seed)
        size, num_blocks, where = draw.choice([1, 2, 4]), draw.randint(1, 40), list[str]()
        while len(where) < num_blocks:
            run = draw.choice([1, 1, 2, num_blocks])
            where += [draw.choice(["v", "none", *2 * links])] * draw.randint(1, run)
        of = {it: [i for i, at in enumerate(where) if at == it] for it in {*where, "v", "h", "d"}}
        begin = draw.choice([0, draw.randint(0, size * num_blocks)])
        end = size * len(where) + draw.randint(1, 2 * size)
        queued = (
            of["d"][draw.randint(0, len(of["d"])) :] if is_begun and draw.random() < 0.5 else []
        )
        on_disk = of["d"][: len(of["d"]) - len(queued)]
        loads = [LinkLoad(HOST, of["h"]), LinkLoad(DISK, on_disk, queued)]
        steps = StepTimes(draw.choice([0.0, 1e-3]), 1e-3, draw.choice([0.0, 1e-5]), 0.0, 0.0)
        block_s = steps.b * size * 10 ** draw.uniform(-1.5, 1.0)
        up_s = min(block_s, steps.b * size * 10 ** draw.uniform(-2.5, 0.3))
        host = LinkState(BLOCK_BYTES / up_s, BLOCK_BYTES, draw.choice([0.0, 0.01]), is_steady=True)
        disk = LinkState(
            BLOCK_BYTES / block_s, BLOCK_BYTES, draw.choice([0.0, 0.02]), 1e-3, through=HOST
        )
        yield Case(
            (host, disk),
            PromptTimes(steps, draw.choice([3, 16, 1 << 30])),
            size,
            draw.choice([0.0, 0.03]),
            draw.choice([1, 1, 3 * size]),
            Demand(begin, end, loads, is_begun, 0, stretches(of["v"])),
        )


def test_no_block_is_better_than_the_chosen_one_whatever_lies_where() -> None:
    num_divided = 0
    for case in drawn(300, is_begun=True, links="d"):
        split = case.planner().split(case.demand)
        first, last = case.ends
        best_s = min(map(case.done_s, case.allowed(first, last)))
        assert split.block in case.allowed(first, last), case
        assert split.done_s == pytest.approx(case.done_s(split.block), rel=1e-9), case
        assert split.done_s == pytest.approx(best_s, rel=1e-9), case
        assert split.load_s == pytest.approx(case.arrival_s(split.block, split.block)), case
        num_divided += first < split.block < last
    assert num_divided > 60


def test_what_is_begun_is_no_slower_than_computing_all_and_loading_all() -> None:
    for case in drawn(300, is_begun=True, links="hd"):
        done_s = case.planner().split(case.demand).done_s
        assert done_s <= (1 + 1e-9) * min(map(case.done_s, case.ends)), case


def test_nothing_is_read_that_does_not_save_enough_whatever_lies_where() -> None:
    num_loaded = 0
    for case in drawn(300, is_begun=False, links="d"):
        split = case.planner().split(case.demand)
        first, last = case.ends
        begin, end, held = case.demand.begin, case.demand.end, case.held
        best_s = min(map(case.done_s, case.allowed(first, last)))
        all_s, step_s = case.compute_s(begin, end, held), case.times(end - 1, end)
        least_s = min(step_s, SHORT_GAIN * all_s)
        if case.load(DISK).indices and case.done_s(last) - best_s <= least_s:
            best_s = case.done_s(last)
        assert split.done_s == pytest.approx(best_s, rel=1e-9), case
        num_loaded += split.block < last
    assert num_loaded > 100


def test_a_head_in_host_memory_is_left_out_or_computed_while_its_tail_is_copied() -> None:
    num_split = num_heads = 0
    for case in drawn(400, is_begun=True, links="hd"):
        split = case.planner().split(case.demand)
        first, last = case.ends
        best_s = min(map(case.done_s, case.allowed(first, last)))
        host, disk = case.load(HOST), case.load(DISK)
        if not (host.indices and disk.end):
            continue
        begin, host_end = case.begin(case.demand.begin, case.held), max(first, host.end)
        is_computed_last = (
            case.busy_s + case.compute_s(begin, head * case.size, case.held)
            >= case.load_s(HOST, head)
            for head in range(first, host_end)
        )
        crossing = next(itertools.compress(itertools.count(first), is_computed_last), host_end)
        is_worth_a_step = crossing - first >= case.least_tokens // case.size
        for head in {first, crossing} if is_worth_a_step else {first}:
            start = case.first_behind(head)
            blocks = case.allowed(start, max(start, disk.end))
            best_s = min([best_s, *(case.done_with_head_s(head, block) for block in blocks)])
        assert split.done_s == pytest.approx(best_s, rel=1e-9), case
        assert split.steady_block <= split.block, case
        num_split += split.steady_block < split.block
        num_heads += first < split.steady_block < split.block
    assert num_split > 40
    assert num_heads > 5


def test_a_faster_disk_makes_no_request_slower_and_leaves_no_more_to_compute() -> None:
    for case in drawn(100, is_begun=True, links="d"):
        host, disk = case.links
        splits = [
            case._replace(links=(host, disk._replace(bytes_per_s=factor * disk.bytes_per_s)))
            .planner()
            .split(case.demand)
            for factor in (0.1, 0.5, 1.0, 1.7, 3.0, 20.0)
        ]
        for slower, faster in itertools.pairwise(splits):
            assert faster.done_s <= (1 + 1e-9) * slower.done_s, case
            assert faster.block <= slower.block, case


@pytest.mark.parametrize("is_scattered", [False, True])
def test_a_request_of_65536_tokens_is_divided_by_the_times_of_eighty_parts(
    is_scattered: bool,
) -> None:
    class Counted(PromptTimes):
        def __call__(self, begin: int, end: int) -> float:
            asked.append((begin, end))
            return super().__call__(begin, end)

    asked = list[tuple[int, int]]()
    where = "vhd" * 1365 if is_scattered else "v" * 1365 + "h" * 1365 + "d" * 1365
    of = {tier: [i for i, at in enumerate(where) if at == tier] for tier in "vhd"}
    loads = [LinkLoad(HOST, of["h"]), LinkLoad(DISK, of["d"])]
    host, disk = (
        LinkState(1e8, BLOCK_BYTES, is_steady=True),
        LinkState(2e7, BLOCK_BYTES, through=HOST),
    )
    times = Counted(StepTimes(1e-3, 2e-6, 1e-11, 0.0, 0.0), 2048)
    demand = Demand(0, 16 * len(where) + 64, loads, ready=stretches(of["v"]))
    split = Planner([host, disk], times, 16).split(demand)
    assert 0 < split.block < len(where)
    assert len(asked) <= 80
