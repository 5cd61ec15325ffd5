"""How long a prompt takes of which some blocks are ready, beside a count token by token."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredkv.cache.compute_rate import ComputeRate
from tieredkv.cache.gaps import Gaps
from tieredkv.cache.step_times import PromptTimes, StepTimes
from tieredkv.cache.stretches import stretches
from tieredkv.steps import pairs

TIMES = [
    PromptTimes(StepTimes(2e-3, 2e-5, 6e-10, 0.0, 0.0), 1 << 40),
    PromptTimes(StepTimes(1e-3, 3e-5, 4e-10, 2e-9, 6e-3), 512, num_read=1e5),
    PromptTimes(StepTimes(0.0, 5e-5, 0.0, 0.0, 1.2e-2), 64),
    PromptTimes(StepTimes(3e-3, 0.0, 1e-9, 1e-9, 0.0), 7, num_read=10.0),
]


@pytest.mark.parametrize("times", TIMES)
def test_many_parts_take_what_each_takes_and_each_what_its_steps_take(times: PromptTimes) -> None:
    draw = random.Random(1)
    parts = [(begin, begin + draw.randint(1, 3000)) for begin in draw.sample(range(100_000), 200)]
    parts += [(0, times.chunk), (5, 5 + 2 * times.chunk)] if times.chunk < 1000 else []
    begins, ends = np.array(parts).T
    told = [times(*each) for each in parts]
    assert times.each(begins, ends).tolist() == told
    for (begin, end), told_s in zip(parts, told, strict=True):
        steps = [(it, min(end, it + times.chunk)) for it in range(begin, end, times.chunk)]
        steps_s = [
            times.times.step_seconds(last - first, pairs(first, last), times.num_read)
            for first, last in steps
        ]
        assert told_s == pytest.approx(sum(steps_s), rel=1e-9)
    assert times(7, 7) == times(8, 7) == 0.0


def test_the_times_of_a_prompt_are_those_that_were_learnt_when_they_were_asked_for() -> None:
    rate = ComputeRate(2048)
    rate.num_read_beside = 5000.0
    before = rate.prompt_times
    assert before(10, 9000) == rate.seconds(10, 9000)
    rate.learn(2048, 1e6, 10.0)
    assert rate.prompt_times(10, 9000) == rate.seconds(10, 9000) > before(10, 9000)


def seconds(times: PromptTimes, size: int, end: int, ready: set[int], part: range) -> float:
    """Return how long the tokens of a part take of which the blocks are not ready.

    The last token of the prompt takes a step of its own if its block is ready.
    """
    asked = [*stretches([each for each in part if each // size not in ready])]
    if end - 1 in part and (end - 1) // size in ready:
        asked.append((end - 1, end))
    return sum(times(*each) for each in asked)


blocks = st.sets(st.integers(0, 40))


@given(
    ready=blocks,
    also=st.lists(blocks.filter(bool), max_size=3),
    size=st.integers(1, 4),
    num_more=st.integers(1, 30),
    parts=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), max_size=20),
    times=st.sampled_from(TIMES),
)
def test_only_tokens_that_are_not_ready_and_the_last_one_take_time(
    ready: set[int],
    also: list[set[int]],
    size: int,
    num_more: int,
    parts: list[tuple[int, int]],
    times: PromptTimes,
) -> None:
    end = size * max([0, *ready, *(each for some in also for each in some)]) + size + num_more - 1
    gaps = Gaps(times, size, end, stretches(sorted(ready)))
    less = gaps.without(*(sorted(each) for each in also)) if also else gaps
    for left, held in (gaps, ready), (less, ready.union(*also)):
        for first, last in parts:
            begin, behind = first % end, last % (end + 1)
            expected = seconds(times, size, end, held, range(begin, behind))
            assert left.since(begin)(behind) == pytest.approx(expected, rel=1e-12)
            free = (it for it in range(begin, end) if it // size not in held or it == end - 1)
            assert left.begin(begin) == next(free)


def test_a_prompt_is_not_walked_for_each_part_of_it() -> None:
    calls = list[tuple[int, int]]()

    class Counted(PromptTimes):
        def __call__(self, begin: int, end: int) -> float:
            calls.append((begin, end))
            return super().__call__(begin, end)

    times = Counted(*(getattr(TIMES[0], name) for name in ("times", "chunk", "num_read")))
    gaps = Gaps(times, 16, 65_536, stretches(range(0, 4096, 2)))
    since = gaps.since(gaps.begin(0))
    assert since(65_536) > since(32_768) > 0
    assert len(calls) <= 4
