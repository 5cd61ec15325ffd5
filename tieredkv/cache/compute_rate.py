"""How fast the device computes: the steps that it has computed teach the time of others.

Called by the engine's thread only.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tieredkv.cache.step_times import PromptTimes, Step, StepTimes
from tieredkv.steps import NEW_SHARE

_PRIOR = np.array([2e-3, 2e-5, 1e-10, 1e-8, 2e-3])
"""The coefficients before any measurement: seconds a step, a token, a pair of tokens, a token read
and a step with few tokens.
"""

_FEW_STEPS = 32
"""After so many steps with few tokens, the coefficients are fitted again."""

_TRUST = 1e-3 * np.array([1.0, 1.0, 1.0, 1.0, 0.0])
"""Weights of the first assumption beside one measured kind of step; there is none of steps with few
tokens.
"""

_HALF_LIFE = 200
"""Steps after which a kind that was not seen again has half of its weight."""

_LONG_AGO = -5 * _HALF_LIFE
"""The number of a step of an earlier run, so that it weighs 1/32 and less."""

_NEAR_LEAST = 1.1
"""A step that took no more than so many times the least one says nothing about its tokens."""

_CHANGED = 1.5
"""A step that takes so many times what was expected may mean that the device itself has changed."""

_NUM_CHANGED = 6
"""The device has changed if so many steps in turn say so; fewer are enough if they take longer."""

_LEAST_CHANGED = 4
"""The least number of steps that tell of a changed device."""

_FAR = 3.0
"""A step of an earlier run is not believed if it took so many times what is expected of it."""


class _Kind(NamedTuple):
    """Steps of about the same size and position: their mean, and the number of the last one."""

    mean: Step
    last: int


class _Streak(NamedTuple):
    """Steps in turn that took far more than was expected before the first of them, or far less.

    Attributes:
        before: the times of steps, as they were known then.
        ratios: how many times what was expected each of them took.
        seen: the last step of each kind that was measured since, also of kinds that were not known.
    """

    before: StepTimes
    ratios: list[float]
    seen: dict[tuple[int, int, int], Step]

    def ratio(self, step: Step) -> float:
        """Return how many times what was expected a step took."""
        expected_s = self.before.step_seconds(step.num_tokens, step.num_pairs, step.num_read)
        return step.seconds / expected_s

    def is_ended_by(self, step: Step) -> bool:
        """Return whether a step is off in the other direction."""
        return bool(self.ratios) and (self.ratio(step) > 1) != (self.ratios[0] > 1)

    @property
    def says_changed(self) -> bool:
        """Whether they are so many, and so far off, that the device itself has changed."""
        change = abs(sum(map(math.log, self.ratios)))
        return len(self.ratios) >= _LEAST_CHANGED and change >= _NUM_CHANGED * math.log(_CHANGED)


class ComputeRate:
    """Learns how long the device takes for a prompt's tokens, as a function of their positions.

    The time of a step is modelled as `max(least, a + b * tokens) + c * pairs + d * read`. Each
    token of a prompt is paired with every token before it. Each token that is generated beside them
    reads all tokens before it. A step with few tokens takes the least time. The coefficients
    are fitted by least squares of the relative error. Steps are gathered by kind, so that many
    steps of one kind do not hide what is known of others.

    Attributes:
        chunk: the most tokens of one step.
        num_read_beside: what the steps to come will read for requests that are generating.
    """

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.num_read_beside = 0.0
        self._kinds: dict[tuple[int, int, int], _Kind] = {}
        self._num_learnt = self._num_few = 0
        self._streak: _Streak | None = None
        self._least_s = 0.0
        self._fitted: StepTimes | None = None

    @property
    def least_tokens(self) -> int:
        """Tokens of a step that takes hardly longer than one with few tokens."""
        a, b, _, _, least_s = self.times
        return max(1, min(self.chunk, int(max(a, least_s - a) / b))) if b else 1

    @property
    def times(self) -> StepTimes:
        """What is known of the time of steps."""
        return self._fitted or self._fit()

    def learn(
        self, num_tokens: int, num_pairs: float, seconds: float, *, num_read: float = 0.0
    ) -> None:
        """Take in a measured step.

        Args:
            num_tokens: tokens of prompts that the step computed.
            num_pairs: pairs of such a token and a token before it.
            seconds: how long the device took.
            num_read: tokens before the tokens that it generated.
        """
        new = Step(max(1, num_tokens), num_pairs, max(seconds, 1e-6), num_read)
        known = self._kinds.get(new.kind)
        self._num_learnt += not new.has_few
        if not new.has_few and (known is not None or self._is_between(new)):
            self._note_change(new)
        before = new if known is None or known.last < 0 else known.mean
        mean = Step(*(was + NEW_SHARE * (it - was) for was, it in zip(before, new, strict=True)))
        self._kinds[new.kind] = _Kind(mean, self._num_learnt)
        self._num_few += new.has_few
        if known is None or not new.has_few or self._num_few % _FEW_STEPS == 0:
            self._fitted = None
        if self._streak is not None:
            self._streak.seen[new.kind] = new
            if self._streak.says_changed:
                self._follow_change(self._streak)

    def _is_between(self, step: Step) -> bool:
        """Return whether steps of fewer and of more tokens and pairs were measured."""
        known = [it.mean for it in self._kinds.values() if it.last >= 0 and not it.mean.has_few]
        tokens, all_pairs = [it.num_tokens for it in known], [it.num_pairs for it in known]
        return bool(known) and (
            min(tokens) <= step.num_tokens <= max(tokens)
            and min(all_pairs) <= step.num_pairs <= max(all_pairs)
        )

    def replace(self, step: Step) -> None:
        """Have a step stand for all of its kind; the caller knows better than their mean."""
        self._num_learnt += not step.has_few
        self._kinds[step.kind] = _Kind(step, self._num_learnt)
        self._fitted = None

    def _note_change(self, step: Step) -> None:
        """Note whether a step is one of a streak, and follow a change of the device."""
        streak = self._streak
        if streak is None or streak.is_ended_by(step):
            streak = _Streak(self.times, [], {})
        ratio = streak.ratio(step)
        if 1 / _CHANGED < ratio < _CHANGED:
            self._streak = None
            return
        self._streak = streak
        streak.ratios.append(ratio)

    def _follow_change(self, streak: _Streak) -> None:
        """Scale what is known of the kinds that were not seen since the device has changed."""
        ratio = sorted(streak.ratios)[len(streak.ratios) // 2]
        for kind, (mean, last) in self._kinds.items():
            step = streak.seen.get(kind) or mean._replace(seconds=ratio * mean.seconds)
            self._kinds[kind] = _Kind(step, last)
        self._fitted = self._streak = None

    @property
    def steps(self) -> list[Step]:
        """The mean step of each kind that is known."""
        return [each.mean for each in self._kinds.values()]

    def assume(self, steps: Iterable[Step]) -> bool:
        """Take in the steps of an earlier run, until steps of their kinds are measured.

        Returns:
            Whether most of them agree with what was measured; if not, none is taken in.
        """
        steps = list(steps)
        believed = [it for it in steps if not self._kinds or self._is_near(it)]
        if 2 * len(believed) < len(steps):
            return False
        for step in believed:
            if step.kind not in self._kinds or self._kinds[step.kind].last < 0:
                self._kinds[step.kind] = _Kind(step, _LONG_AGO)
        self._fitted = None
        return True

    def doubt(self) -> None:
        """Have what was measured so far weigh as little as the steps of an earlier run.

        It was measured with made-up tokens, which a GPU computes a little faster than real ones.
        """
        for kind, (mean, _) in self._kinds.items():
            self._kinds[kind] = _Kind(mean, _LONG_AGO)
        self._fitted = None

    def _is_near(self, step: Step) -> bool:
        expected_s = self.step_seconds(step.num_tokens, step.num_pairs, step.num_read)
        return expected_s / _FAR <= step.seconds <= expected_s * _FAR

    @property
    def prompt_times(self) -> PromptTimes:
        """What is known now of the time of prompts."""
        return PromptTimes(self.times, self.chunk, self.num_read_beside)

    def seconds(self, begin: int, end: int) -> float:
        """Return how long it takes to compute the tokens `[begin, end)` of one prompt."""
        return self.prompt_times(begin, end)

    def step_seconds(self, num_tokens: float, num_pairs: float, num_read: float = 0.0) -> float:
        """Return how long a step takes."""
        return self.times.step_seconds(num_tokens, num_pairs, num_read)

    def _fit(self) -> StepTimes:
        least_s = _NEAR_LEAST * self._least_s
        known = self._kinds.values()
        few = [it for it in known if it.mean.has_few]
        long = [it for it in known if not it.mean.has_few and it.mean.seconds > least_s]
        kinds = few + long
        steps = [each.mean for each in kinds]
        sizes = [
            [0.0, 0.0, it.num_pairs, it.num_read, 1.0]
            if it.has_few
            else [1.0, it.num_tokens, it.num_pairs, it.num_read, 0.0]
            for it in steps
        ]
        rows = np.array(sizes).reshape(-1, 5)
        rows /= np.array([it.seconds for it in steps]).reshape(-1, 1)
        # In units of the most that the measurements allow, so that the first assumption counts only
        # where they say nothing, however slow the device is. It counts for the constant part of a
        # long step, which is small on every device, and which few measurements tell from the rest.
        most = rows.max(axis=0, initial=0.0)
        units = np.divide(1.0, most, out=_PRIOR.copy(), where=most > 0)
        units[0] = _PRIOR[0]
        rows *= units
        weights = np.array([*_weights(few), *_weights(long)])
        moments = rows.T @ (rows * weights[:, None]) + np.diag(_TRUST)
        targets = rows.T @ weights + _TRUST * _PRIOR / units
        free = [0, 1, 2, 3, 4] if few else [0, 1, 2, 3]
        while True:  # coefficients cannot be negative: leave out those that would be
            fitted = np.linalg.solve(moments[np.ix_(free, free)], targets[free])
            if (fitted >= 0).all():
                break
            free = [each for each, it in zip(free, fitted, strict=True) if it > 0]
        whole = np.zeros(5)
        whole[free] = fitted
        self._fitted = StepTimes(*(whole * units).tolist())
        self._least_s = self._fitted.least_s
        return self._fitted


def _weights(kinds: Sequence[_Kind]) -> list[float]:
    """Return the weight of each kind: the longer ago it was seen, the less it counts."""
    newest = max((it.last for it in kinds), default=0)
    return [0.5 ** ((newest - it.last) / _HALF_LIFE) for it in kinds]
