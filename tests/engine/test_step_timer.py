"""Times of steps, and for how long the device is busy with those that were issued."""

import time
from typing import Any

import pytest
import torch

from tieredkv.cache.compute_rate import ComputeRate
from tieredkv.engine.step_buffers import BatchRow
from tieredkv.engine.step_timer import StepTimer
from tieredkv.steps import pairs


class Rate(ComputeRate):
    """Remembers what it is taught, and predicts a millisecond a token.

    Attributes:
        taught: tokens, pairs, seconds and tokens read of each step.
    """

    def __init__(self) -> None:
        super().__init__(8192)
        self.taught: list[tuple[int, float, float, float]] = []

    def learn(
        self, num_tokens: int, num_pairs: float, seconds: float, *, num_read: float = 0.0
    ) -> None:
        self.taught.append((num_tokens, num_pairs, seconds, num_read))

    def step_seconds(self, num_tokens: float, num_pairs: float, num_read: float = 0.0) -> float:
        return num_tokens / 1e3


class Event:
    """An event of a stream that a test runs by hand.

    Attributes:
        stream: every recorded event, in order.
        ended: how many of them have been reached.
    """

    stream: list["Event"] = []  # noqa: RUF012
    ended = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.stream.append(self)

    def query(self) -> bool:
        return Event.stream.index(self) < Event.ended

    def elapsed_time(self, end: "Event") -> float:
        assert self.query() and end.query()
        return 7.0


def row(num_tokens: int, start: int = 0) -> BatchRow:
    """Return the row of a step that computes so many tokens."""
    return BatchRow(
        token_ids=[0] * num_tokens,
        start=start,
        block_table=[],
        write_from=start,
        needs_logits=False,
        all_logits=False,
        request_index=0,
        table_key=1,
    )


def issue(timer: StepTimer, *rows: BatchRow, **options: Any) -> None:
    timer.begin()
    timer.end(rows, **options)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the clock that the timer reads; a test moves it."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


@pytest.fixture
def rate() -> Rate:
    return Rate()


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch, now: list[float], rate: Rate) -> StepTimer:
    """Return a timer of a CUDA device whose events a test runs by hand."""
    Event.stream, Event.ended = [], 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return StepTimer(rate, torch.device("cuda"))


def test_without_a_gpu_a_step_takes_as_long_as_its_call(now: list[float], rate: Rate) -> None:
    timer = StepTimer(rate, torch.device("cpu"))
    timer.begin()
    now[0] += 0.25
    timer.end([row(100, 50), row(30)])
    assert rate.taught == [(130, pairs(50, 150) + pairs(0, 30), 0.25, 0)]
    assert timer.busy_s() == 0


def test_steps_that_wait_for_bytes_teach_nothing(timer: StepTimer, rate: Rate) -> None:
    issue(timer, row(100), teaches=False)
    issue(timer, row(100))
    Event.ended = 4
    timer.poll()
    assert rate.taught == [(100, pairs(0, 100), 0.007, 0)]


def test_what_steps_took_and_by_how_much_they_were_mispredicted_is_summed_up(
    timer: StepTimer,
) -> None:
    for rows in ([row(9), row(1, 40)], [row(4)], [row(1, 40)] * 8):
        issue(timer, *rows)
    issue(timer, row(100), teaches=False)
    Event.ended = 8
    timer.poll()
    assert timer.step_seconds == {"prompts": (2, 0.014), "answers": (1, 0.007)}
    assert timer.error_seconds == pytest.approx({"prompts": 0.002 + 0.003, "answers": 0.007})


def test_tokens_that_are_generated_beside_a_prompt_read_those_before_them(
    timer: StepTimer, rate: Rate
) -> None:
    issue(timer, row(1, 4000), row(100, 50), row(1, 300), row(1))
    Event.ended = 2
    timer.poll()
    assert rate.taught == [(101, pairs(50, 150) + pairs(0, 1), 0.007, 4300)]


def test_the_device_is_busy_with_what_is_left_of_the_first_step_and_with_the_others(
    timer: StepTimer, now: list[float]
) -> None:
    assert timer.busy_s() == 0
    issue(timer, row(100))
    issue(timer, row(200))
    assert timer.busy_s() == pytest.approx(0.3)
    now[0] += 0.04
    assert timer.busy_s() == pytest.approx(0.26)
    now[0] += 0.5  # the first one takes longer than predicted
    assert timer.busy_s() == pytest.approx(0.2)
    Event.ended = 2
    assert timer.busy_s() == pytest.approx(0.2), "the second one is about to begin"
    Event.ended = 4
    assert timer.busy_s() == 0


def test_the_next_step_may_have_begun_while_the_thread_was_away(
    timer: StepTimer, now: list[float]
) -> None:
    for _ in range(3):
        issue(timer, row(100))
    now[0] += 0.03  # each step takes 7 ms
    Event.ended = 5
    assert timer.busy_s() == pytest.approx(0.1 - 0.03 + 2 * 0.007)
    now[0] -= 0.025  # by the device's clock it would begin later than now
    for _ in range(3):
        issue(timer, row(100))
    Event.ended = 9
    assert timer.busy_s() == pytest.approx(0.1 + 0.1)


def test_a_step_after_an_idle_time_begins_when_it_is_issued(
    timer: StepTimer, now: list[float]
) -> None:
    issue(timer, row(100))
    Event.ended = 2
    timer.poll()
    now[0] += 60
    issue(timer, row(100))
    assert timer.busy_s() == pytest.approx(0.1)


def test_the_time_for_which_issuing_a_step_keeps_the_thread_is_learnt_by_size(
    now: list[float],
) -> None:
    timer = StepTimer(Rate(), torch.device("cpu"))
    assert timer.issue_s([row(4000)]) == 0.0, "nothing is known yet"
    for num_tokens, seconds in ((500, 0.001), (3000, 0.03), (1, 10.0)):
        timer.begin()
        now[0] += seconds
        timer.end([row(num_tokens)])
    for num_tokens, seconds in ((1, 0.0), (300, 0.001), (600, 0.001), (1100, 0.03), (8000, 0.03)):
        assert timer.issue_s([row(num_tokens)]) == pytest.approx(seconds)
