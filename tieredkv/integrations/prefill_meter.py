"""How fast another engine computes prompts, found out from what it tells a tier.

A tier is told when a request is scheduled for the first time, when each step has been scheduled,
and when chunks that a request has computed are offered. It is not told what a step computes. So
these times are measured:

    prompts of several steps    from one offer to a later one of the same request
    prompts of one step         from the step that began the request to the end of that step

The second is known as the time at which the step after the next one was scheduled: an engine that
schedules ahead does so when the first one has ended, and any other one has computed one more step
by then. The time of a short step is taken off. Where the prompt was offered before that, this time
counts.

All requests share the device. So what any of them has computed meanwhile counts as computed in
that time, and offers that come late count for more tokens than the time had. The output of a step
brings the offers of several requests one after another, so that they are looked at together. What
disturbs a measurement otherwise, such as answers that are generated beside or a first use of a
kernel, makes it longer: of the last few measurements of prompts of about one length, the lower
median counts, and the very first of all does not.

What the tier cannot see is missing: tokens behind the last whole chunk count as one chunk less a
token.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tieredkv.cache.compute_rate import ComputeRate
from tieredkv.cache.step_times import FEW_TOKENS, Step, StepTimes
from tieredkv.integrations.restore_choice import ANY_LENGTH
from tieredkv.steps import pairs

LEAST_MEASURED = 3
"""So many measurements are taken before any of them counts."""

_NUM_KEPT = 5
"""Measurements of a kind of which the median counts."""

_NUM_STEPS = 64
"""Of so many steps the short ones are known."""

_LEAST_S = 0.02
"""Offers that follow each other sooner are counted as one.

So are those that follow each other sooner than in half of the longest step: the first of them came
a step late, so that the second seems to have taken no time.
"""


def fitted(steps: Sequence[Step]) -> StepTimes:
    """Return the times that fit measured prompts, of devices of any speed.

    `ComputeRate` fits well what is within some ten times of its first assumption. So it is given
    the times in a unit in which they are.
    """
    first = ComputeRate(ANY_LENGTH)
    ratios = [it.seconds / first.step_seconds(it.num_tokens, it.num_pairs) for it in steps]
    unit_s = statistics.median(ratios)
    first.assume(it._replace(seconds=it.seconds / unit_s) for it in steps)
    return StepTimes(*(unit_s * each for each in first.times))


@dataclass(slots=True)
class _Prompt:
    """A prompt that is being computed.

    Attributes:
        begin: tokens before it were there already.
        done: tokens before it are computed by now.
        end: number of its tokens.
        step: the number of the step that began it.
        began_at: when that step was scheduled.
        since: of the last offer that counts, when it came, and the tokens and pairs that all
            requests together had computed by then; of the beginning before the first one.
        is_offered: whether there was an offer.
    """

    begin: int
    done: int
    end: int
    step: int
    began_at: float
    since: tuple[float, float, float]
    is_offered: bool = False

    @property
    def is_over(self) -> bool:
        """Whether all of it is computed."""
        return self.done >= self.end


@dataclass(slots=True)
class PrefillMeter:
    """Learns the time of prompts as a function of tokens and positions.

    Attributes:
        compute: keeps what is learnt of each kind of prompt.
        chunk_tokens: tokens of a chunk.
        clock: monotonic time in seconds.
        predicted_s, measured_s: sums over all measurements for which there was a prediction.
    """

    compute: ComputeRate
    chunk_tokens: int
    clock: Callable[[], float] = time.monotonic
    predicted_s: float = 0.0
    measured_s: float = 0.0
    _prompts: dict[str, _Prompt] = field(default_factory=dict)
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_STEPS))
    _num_steps: int = 0
    _computed: tuple[float, float] = (0.0, 0.0)  # tokens and pairs, by all requests
    _offered: dict[str, tuple[_Prompt, float]] = field(default_factory=dict)  # since the last step
    _measured: dict[tuple[int, int, int], deque[Step]] = field(default_factory=dict)
    _num_measured: int = 0
    _times: StepTimes | None = None

    @property
    def times(self) -> StepTimes | None:
        """How long prompts take; None while nothing is known, from this or from an earlier run."""
        if self._times is None and (steps := self.compute.steps):
            self._times = fitted(steps)
        return self._times

    def note_step(self) -> None:
        """Note that a step has been scheduled; before the requests that it begins are noted."""
        self._measure()
        self._num_steps += 1
        self._steps.append(self.clock())

    def begin(self, request: str, begin: int, end: int) -> None:
        """Note that the last step begins to compute the tokens `[begin, end)` of a request."""
        now = self._steps[-1]
        since = now, *self._computed
        self._prompts[request] = _Prompt(begin, begin, end, self._num_steps, now, since)

    def forget(self, request: str) -> None:
        """Note that a request has ended, or has to begin anew."""
        self._prompts.pop(request, None)

    def note_offer(self, request: str, end: int) -> None:
        """Note that the chunks of a request that end at token `end` are offered."""
        prompt = self._prompts.get(request)
        if prompt is None or end <= prompt.done:
            return
        end = min(end, prompt.end)
        tokens, num_pairs = self._computed
        self._computed = tokens + end - prompt.done, num_pairs + pairs(prompt.done, end)
        prompt.done = end
        self._offered.setdefault(request, (prompt, self.clock()))

    def _measure(self) -> None:
        """Learn from the offers since the last step, which a step's output has brought together."""
        for request, (prompt, now) in self._offered.items():
            is_over, was_offered, prompt.is_offered = prompt.is_over, prompt.is_offered, True
            if is_over and self._prompts.get(request) is prompt:
                del self._prompts[request]
            at, tokens, num_pairs = prompt.since
            seconds, num_tokens = now - at, self._computed[0] - tokens
            if was_offered and seconds < max(_LEAST_S, self._longest_step_s(prompt) / 2):
                continue
            prompt.since = now, *self._computed
            if not was_offered:
                # Of several steps, the first offer does not tell how many they were; and in a step
                # that others share, it does not tell what they have computed.
                if not is_over or prompt.done - prompt.begin < num_tokens / 2:
                    continue
                seconds = self._step_end(prompt, now) - prompt.began_at - self._short_step_s()
            num_tokens += self.chunk_tokens - 1 if is_over else 0
            self._learn(Step(num_tokens, self._computed[1] - num_pairs, seconds))
        self._offered.clear()

    def _step_end(self, prompt: _Prompt, now: float) -> float:
        """Return when the step that began a prompt had ended at the latest."""
        at = prompt.step + 1 - (self._num_steps - len(self._steps))  # two steps later
        return min(now, self._steps[at]) if 0 <= at < len(self._steps) else now

    def _longest_step_s(self, prompt: _Prompt) -> float:
        """Return how long the longest step took since a prompt was begun."""
        steps = (each for each in self._steps if each >= prompt.began_at)
        return max((then - now for now, then in pairwise(steps)), default=0.0)

    def _short_step_s(self) -> float:
        """Return how long the shorter steps take, from one to the next: their lower quartile."""
        steps = [*self._steps]
        times = sorted(then - now for now, then in pairwise(steps))
        return times[len(times) // 4] if times else 0.0

    def _learn(self, step: Step) -> None:
        if step.num_tokens < FEW_TOKENS or step.seconds <= 0:
            return
        self._num_measured += 1
        if self._num_measured == 1:
            return
        if (times := self.times) is not None:
            self.predicted_s += times.step_seconds(step.num_tokens, step.num_pairs)
            self.measured_s += step.seconds
        measured = self._measured.setdefault(step.kind, deque(maxlen=_NUM_KEPT))
        measured.append(step)
        if self._num_measured == LEAST_MEASURED + 1:
            for each in self._measured.values():
                self.compute.replace(_typical(each))
        elif self._num_measured > LEAST_MEASURED:
            self.compute.replace(_typical(measured))
        self._times = None


def _typical(steps: Sequence[Step]) -> Step:
    """Return the lower median of prompts of one kind, by the time of a token."""
    by_length = sorted(steps, key=lambda it: it.seconds / it.num_tokens)
    return by_length[(len(by_length) - 1) // 2]
