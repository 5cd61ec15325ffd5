"""Measures how long the device takes for each step, and predicts how long it is busy.

Steps are issued ahead, so the host cannot time them by a clock: on CUDA a pair of events brackets
each step. On other devices a step has ended when the call that issued it returns.

Called by the engine's thread only.
"""

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from tieredkv.engine.step_buffers import BatchRow
from tieredkv.steps import pairs, smoothed

MIN_LONG_STEP = 256
"""Issuing a step of fewer tokens of prompts takes no time that matters."""


class Work(NamedTuple):
    """What a step computes, as `StepRate.learn` takes it."""

    num_tokens: int
    num_pairs: float
    num_read: float

    @classmethod
    def of(cls, rows: Sequence[BatchRow]) -> "Work":
        """Return the work of a step; a row of one token behind others is one that generates."""
        prompts = [row for row in rows if len(row.token_ids) > 1 or not row.start]
        return cls(
            sum(len(row.token_ids) for row in prompts),
            sum(pairs(row.start, row.start + len(row.token_ids)) for row in prompts),
            float(sum(row.start for row in rows) - sum(row.start for row in prompts)),
        )


class StepRate(Protocol):
    """Learns how long the device takes for steps, and predicts it; see `cache.compute_rate`."""

    def learn(self, num_tokens: int, num_pairs: float, seconds: float, *, num_read: float) -> None:
        """Take in a measured step."""

    def step_seconds(self, num_tokens: float, num_pairs: float, num_read: float) -> float:
        """Return how long a step should take."""

    def doubt(self) -> None:
        """Let the next steps correct quickly what is known."""


class _Step(NamedTuple):
    """A step that was issued: what it computes, how long it should take, and its two events."""

    work: Work
    predicted_s: float
    teaches: bool
    began: torch.cuda.Event
    ended: torch.cuda.Event


class StepTimer:
    """Times steps in the order in which they are issued.

    Args:
        rate: learns from the steps, and predicts them.
        device: the model's device.

    Attributes:
        rate: as given.
        step_seconds: number of steps, and the sum of their durations, by whether they compute
            `prompts`, maybe beside answers, or only `answers`.
        error_seconds: the sum of what they took more or less than was predicted.
    """

    def __init__(self, rate: StepRate, device: torch.device) -> None:
        self.rate = rate
        self.step_seconds: dict[str, tuple[int, float]] = {}
        self.error_seconds: defaultdict[str, float] = defaultdict(float)
        self._is_cuda = device.type == "cuda"
        self._steps: deque[_Step] = deque()
        self._began: torch.cuda.Event | None = None
        self._began_at = self._called_at = 0.0
        self._issue_s: dict[int, float] = {}  # by the octave of the number of tokens

    def begin(self) -> None:
        """Note that a step is about to be issued."""
        self._called_at = time.monotonic()
        if self._is_cuda:
            self._began = torch.cuda.Event(enable_timing=True)
            self._began.record()
        if not self._steps:
            self._began_at = time.monotonic()

    def end(self, rows: Sequence[BatchRow], *, teaches: bool = True) -> None:
        """Note that the step was issued.

        Args:
            rows: of the step.
            teaches: whether its time is that of computing only.
        """
        work = Work.of(rows)
        self._learn_issue(work)
        predicted_s = self.rate.step_seconds(*work)
        if self._began is None:
            if teaches:
                self._learn(work, time.monotonic() - self._began_at, predicted_s)
            return
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        self._steps.append(_Step(work, predicted_s, teaches, self._began, ended))

    def _learn(self, work: Work, seconds: float, predicted_s: float) -> None:
        num_tokens, num_pairs, num_read = work
        kind = "prompts" if num_tokens else "answers"
        count, sum_s = self.step_seconds.get(kind, (0, 0.0))
        self.step_seconds[kind] = count + 1, sum_s + seconds
        self.error_seconds[kind] += abs(seconds - predicted_s)
        self.rate.learn(num_tokens, num_pairs, seconds, num_read=num_read)

    def _learn_issue(self, work: Work) -> None:
        if work.num_tokens >= MIN_LONG_STEP:
            octave, seconds = work.num_tokens.bit_length(), time.monotonic() - self._called_at
            self._issue_s[octave] = smoothed(self._issue_s.get(octave, 0.0), seconds)

    def poll(self) -> None:
        """Take in the steps that have ended.

        By the device's own clock it is known when the step after them began, though the thread may
        have been away then.
        """
        while self._steps and self._steps[0].ended.query():
            step, now = self._steps.popleft(), time.monotonic()
            if self._steps and self._steps[0].began.query():
                began_at = self._began_at + step.began.elapsed_time(self._steps[0].began) / 1e3
                self._began_at = min(now, began_at)
            else:
                self._began_at = now
            if step.teaches:
                seconds = step.began.elapsed_time(step.ended) / 1e3
                self._learn(step.work, seconds, step.predicted_s)

    def issue_s(self, rows: Sequence[BatchRow]) -> float:
        """Return for how long issuing a step keeps the engine's thread, as far as it is known.

        It is what steps of about the size took: launching kernels takes long whatever their size,
        and replaying a graph does not.
        """
        num_tokens = Work.of(rows).num_tokens
        if num_tokens < MIN_LONG_STEP or not self._issue_s:
            return 0.0
        octave = num_tokens.bit_length()
        return self._issue_s[min(self._issue_s, key=lambda known: abs(known - octave))]

    def predict_s(self, rows: Sequence[BatchRow]) -> float:
        """Return how long the device takes for a step."""
        return self.rate.step_seconds(*Work.of(rows))

    @property
    def issued_s(self) -> float:
        """How long the steps take that were issued and have not ended, each from its beginning."""
        return sum(step.predicted_s for step in self._steps)

    def busy_s(self) -> float:
        """Return for how long the device is busy with the steps that were issued."""
        self.poll()
        if not self._steps:
            return 0.0
        first_s = self._steps[0].predicted_s - (time.monotonic() - self._began_at)
        rest = (step.predicted_s for step in list(self._steps)[1:])
        return max(0.0, first_s) + sum(rest)
