"""Measured rates: how fast a link moves bytes, and how fast the device computes a prompt.

The planner (`plan`) reads them; the moves and the steps teach them. A rate that nothing was
measured of yet starts from an assumption and is corrected by the first moves.

Called by the engine's thread only.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tieredkv.cache.stretches import Ints
from tieredkv.steps import NEW_SHARE, pairs

MIN_WINDOW_S = 0.02
"""A shorter busy time is no measurement: it would be one of latency."""

BURST_GAP_S = 0.002
"""Moves that end so shortly after one another belong to one burst."""

MEMORY_S = 0.5
"""Busy seconds after which a measurement has lost most of its weight."""

FIRST_S = 0.03
"""The first assumption weighs as much as a measurement of so many seconds."""

STALE_S = 0.1
"""The rate of an earlier run weighs as much, and so does a stale one beside a lower measurement."""

BURST_S = 0.02
"""A limit lets through at most what it allows in this time, at once."""

PROBE_S = 5.0
"""A rate that nothing taught for so long is measured again, while there is something to load.

A rate that is wrong is so corrected within ten seconds, also if requests are seldom.
"""

FIRST_PROBE_S = 0.5
"""The first pause between two measurements of a rate that has fallen; see `Probes`."""

FAR_OFF = 2.0
"""If two measurements in turn differ from the rate so many times, both in one direction, the link
itself has changed.
"""


@dataclass(slots=True)
class _Window:
    """A measurement of a link.

    A link moves many things at once, which arrive in bursts. So a measurement lasts until as many
    bytes have arrived as were under way at its beginning, and then to the end of a burst. If they
    arrive one by one, it ends once twice as many have.

    Attributes:
        busy_s: for how long something was under way.
        num_bytes: what was under way at its beginning; 0 before anything has ended.
        num_ended: bytes whose moves have ended.
        num_moved: those of them that arrived.
    """

    busy_s: float = 0.0
    num_bytes: int = 0
    num_ended: int = 0
    num_moved: int = 0


@dataclass(slots=True)
class LinkRate:
    """Learns the rate of one direction of a link while it has something to move.

    The rate is what arrives in a time during which something was always under way. While nothing
    arrives for longer than the bytes under way should take, the rate that is told falls by itself,
    so that a link that has stopped is not waited for.

    Attributes:
        bytes_per_s: the rate that was learnt, or the first assumption.
        limit: the operator's limit in bytes/s; infinite without one. It caps what is told. A link
            that it holds back is known to be no slower than the limit, and nothing more.
        learnt_at: when the rate was last measured, or found to be no lower than the limit; negative
            infinity before that.
        memory_bytes: bytes after which it has too, if they take less than `MEMORY_S`.
    """

    bytes_per_s: float
    limit: float = math.inf
    learnt_at: float = -math.inf
    memory_bytes: float = math.inf
    num_bytes: int = 0
    _moved_at: float = 0.0
    _due_at: float = 0.0
    _window: _Window = field(default_factory=_Window)
    _learnt_s: float = FIRST_S
    _allowed: float = 0.0
    _allowed_at: float = -math.inf
    _far: int = 0  # whether the last measurement was far above the rate or far below it
    _is_taken_over: bool = False

    def begin(self, num_bytes: int, now: float) -> None:
        """Note that a move of so many bytes was handed to the link; it counts for the limit."""
        if not self.num_bytes:
            self._moved_at = now
        self._due_at = now + self.busy_s(now) + num_bytes / self.steady
        self.num_bytes += num_bytes
        if self.limit < math.inf:
            self._allowed -= num_bytes

    def end(self, num_bytes: int, now: float, *, teaches: bool = True) -> None:
        """Note that a move has ended.

        Args:
            num_bytes: as given to `begin`.
            now: when it ended.
            teaches: whether the bytes arrived; if not, the move says nothing about the rate.
        """
        window, gap_s = self._window, max(0.0, now - self._moved_at)
        if gap_s > BURST_GAP_S and 0 < window.num_bytes <= window.num_ended:
            window = self._measure(self._moved_at)
        window.num_bytes = window.num_bytes or self.num_bytes
        window.busy_s += gap_s
        window.num_ended += num_bytes
        window.num_moved += num_bytes if teaches else 0
        self._note_end(num_bytes, now)
        if not self.num_bytes or window.num_ended >= 2 * window.num_bytes:
            self._measure(now)

    def skip(self, num_bytes: int, now: float) -> None:
        """Note that a move has ended that something else than the link held back.

        The time up to now teaches nothing, nor do moves that ended shortly before.
        """
        self._note_end(num_bytes, now)
        self._window = _Window()

    def _measure(self, now: float) -> _Window:
        """Learn from the window and return the next one; one that is too short goes on."""
        window = self._window
        if window.busy_s < MIN_WINDOW_S:
            window.num_bytes = window.num_ended = 0
            return window
        if window.num_moved:
            self.learn(window.num_moved, window.busy_s, now)
        self._window = _Window()
        return self._window

    def _note_end(self, num_bytes: int, now: float) -> None:
        self.num_bytes -= num_bytes
        self._due_at = min(self._due_at, now + self.num_bytes / self.steady)
        self._moved_at = max(now, self._moved_at)

    def admits(self, num_bytes: int, now: float) -> bool:
        """Return whether the limit lets a move of so many bytes begin now."""
        if self.limit == math.inf:
            return True
        most = max(num_bytes, self.limit * BURST_S)
        self._allowed = min(most, self._allowed + (now - self._allowed_at) * self.limit)
        self._allowed_at = now
        return self._allowed >= num_bytes

    def learn(self, num_bytes: int, seconds: float, now: float) -> None:
        """Take in a measurement; longer ones weigh more.

        Of a stale rate, a first measurement that is higher replaces it, since a link is never
        faster than it can be. One that is lower may be an exception, and counts in part. The second
        one in turn that is far off in the same direction replaces the rate.
        """
        measured = num_bytes / max(seconds, 1e-9)
        if self.is_learnt and measured >= 0.9 * self.limit and self.bytes_per_s >= measured:
            self.learnt_at = now
            return
        if self.is_stale(now):
            if measured > self.bytes_per_s:
                self._learnt_s = 0.0
            elif self.is_learnt:
                self._learnt_s = STALE_S
        self._learnt_s += seconds
        share = max(seconds / MEMORY_S, num_bytes / self.memory_bytes)
        weight = max(1 - math.exp(-share), seconds / self._learnt_s)
        times = measured / self.bytes_per_s
        far = (times >= FAR_OFF) - (times <= 1 / FAR_OFF)
        if far and far == self._far:
            weight, far = 1.0, 0
        self._far = far
        self.bytes_per_s += weight * (measured - self.bytes_per_s)
        self.learnt_at = now

    def assume(self, bytes_per_s: float) -> None:
        """Take over the rate of an earlier run, until it is measured."""
        self.bytes_per_s, self._learnt_s, self._is_taken_over = bytes_per_s, STALE_S, True

    def doubt(self) -> None:
        """Have the next measurement replace the rate."""
        self._learnt_s = 0.0

    def effective(self, now: float) -> float:
        """Return the rate in bytes/s to plan with: what was learnt, or less if the link stalls."""
        rate = self.steady
        idle_s = now - self._moved_at
        if self.num_bytes and idle_s > MIN_WINDOW_S:
            rate = min(rate, self.num_bytes / idle_s)
        return rate

    def busy_s(self, now: float) -> float:
        """Return for how long the link is busy with what is under way.

        A link moves many things at once, so that none may have arrived while all nearly have. What
        is overdue is expected to take as long again as it is overdue already.
        """
        return abs(self._due_at - now) if self.num_bytes else 0.0

    @property
    def steady(self) -> float:
        """The rate in bytes/s, even if the link has stopped for now."""
        return min(self.bytes_per_s, self.limit)

    @property
    def is_learnt(self) -> bool:
        """Whether the rate was measured, so that it is no assumption any more."""
        return self.learnt_at > -math.inf

    @property
    def is_known(self) -> bool:
        """Whether the rate was measured, now or in an earlier run."""
        return self.is_learnt or self._is_taken_over

    def is_stale(self, now: float) -> bool:
        """Whether the rate was not measured for `PROBE_S`."""
        return now - self.learnt_at >= PROBE_S


@dataclass(slots=True)
class Probes:
    """Says when the rate of a link that the plan gives nothing to is to be measured again.

    A rate is measured every `PROBE_S`. If it has fallen to less than half of what the link was last
    used at, that may be a mistake: it is measured at once, and then after pauses that double.
    """

    _used_at: float = 0.0  # bytes per second
    _pause_s: float = 0.0
    _probed_at: float = -math.inf

    def note_use(self, rate: LinkRate) -> None:
        """Note that the plan gives something to the link."""
        self._used_at, self._pause_s = rate.steady, 0.0

    def is_due(self, rate: LinkRate, now: float) -> bool:
        """Return whether the rate is to be measured again."""
        if self._has_fallen(rate):
            return now - self._probed_at >= self._pause_s
        return now - self._probed_at >= PROBE_S and rate.is_stale(now)

    def note_probe(self, rate: LinkRate, now: float) -> None:
        """Note that the rate is being measured; one that has fallen is not believed any more."""
        if self._has_fallen(rate):
            rate.doubt()
        self._probed_at = now
        self._pause_s = min(PROBE_S, max(FIRST_PROBE_S, 2 * self._pause_s))

    def _has_fallen(self, rate: LinkRate) -> bool:
        return rate.steady < self._used_at / FAR_OFF


_PRIOR = np.array([2e-3, 2e-5, 1e-10, 1e-8, 2e-3])
"""Seconds a step, a token, a pair of tokens, a token read and a step with few tokens, before any
measurement.
"""

FEW_TOKENS = 64
"""A step of fewer prompt tokens takes as long as the device needs for any step."""

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
_NUM_CHANGED = 6
"""If so many steps in turn take so many times what was expected before the first of them, the
device itself has changed. Fewer steps are enough if they take more.
"""

_LEAST_CHANGED = 4
"""The least number of such steps."""

_FAR = 3.0
"""A step of an earlier run is not believed if it took so many times what is expected of it."""


class Step(NamedTuple):
    """A step that was measured; see `ComputeRate.learn`."""

    num_tokens: float
    num_pairs: float
    seconds: float
    num_read: float = 0.0

    @property
    def has_few(self) -> bool:
        """Whether it has so few tokens of prompts that their number does not matter."""
        return self.num_tokens < FEW_TOKENS

    @property
    def kind(self) -> tuple[int, int, int]:
        """Its size and its position, and what is generated beside it, roughly."""
        num_read = int(self.num_read).bit_length()
        if self.has_few:
            return 0, 0, num_read
        size, position = int(self.num_tokens), int(self.num_pairs / self.num_tokens)
        return size.bit_length(), position.bit_length(), num_read


class _Kind(NamedTuple):
    """Steps of about the same size and position: their mean, and the number of the last one."""

    mean: Step
    last: int


class StepTimes(NamedTuple):
    """How long steps take: `max(least_s, a + b * tokens) + c * pairs + d * read`, in seconds."""

    a: float
    b: float
    c: float
    d: float
    least_s: float

    def step_seconds(self, num_tokens: float, num_pairs: float, num_read: float = 0.0) -> float:
        """Return how long a step takes."""
        a, b, c, d, least_s = self
        is_least = num_tokens < FEW_TOKENS and least_s > 0
        tokens_s = least_s if is_least else max(least_s, a + b * num_tokens)
        return tokens_s + c * num_pairs + d * num_read


@dataclass(slots=True)
class PromptTimes:
    """How long it takes to compute tokens `[begin, end)` of one prompt, in seconds.

    Attributes:
        times: of steps.
        chunk: the most tokens of one step.
        num_read: tokens that each step reads for requests that are generating.
    """

    times: StepTimes
    chunk: int
    num_read: float = 0.0
    _full_s: float = field(init=False)  # of a step that is full

    def __post_init__(self) -> None:
        self._full_s = self.times.step_seconds(self.chunk, 0.0, self.num_read)

    def __call__(self, begin: int, end: int) -> float:
        """Return how many seconds these tokens take."""
        if end <= begin:
            return 0.0
        num_full, rest = divmod(end - begin, self.chunk)
        seconds = num_full * self._full_s
        if rest:
            seconds += self.times.step_seconds(rest, 0.0, self.num_read)
        return seconds + self.times.c * pairs(begin, end)

    def each(self, begins: Ints, ends: Ints) -> NDArray[np.float64]:
        """Return the same for many parts `[begins[i], ends[i])`, none of which is empty."""
        times, num_tokens = self.times, ends - begins
        num_full, rest = np.divmod(num_tokens, self.chunk)
        rest_s = np.maximum(times.least_s, times.a + times.b * rest)
        if times.least_s > 0:
            rest_s[rest < FEW_TOKENS] = times.least_s
        rest_s = (rest > 0) * (rest_s + times.d * self.num_read)
        return num_full * self._full_s + rest_s + times.c * (num_tokens * (ends + begins) / 2)


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
        if known is not None and not new.has_few:
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
