"""The time of prompts is found out from what a tier is told, on modelled engines of many kinds."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from tests.fakes import FakeClock
from tieredkv.cache.compute_rate import ComputeRate
from tieredkv.cache.step_times import PromptTimes
from tieredkv.integrations.prefill_meter import LEAST_MEASURED, PrefillMeter
from tieredkv.integrations.restore_choice import ANY_LENGTH
from tieredkv.steps import pairs

CHUNK = 64
STEP_S, TOKEN_S, PAIR_S = 5e-3, 25e-6, 0.8e-9
COPY_S = 5e-6  # for a token
TICK_S = 1e-3

Arrivals = Iterator[tuple[float, int]]


def true_s(begin: int, end: int) -> float:
    """Return how long the modelled device takes for tokens of a prompt."""
    return TOKEN_S * (end - begin) + PAIR_S * pairs(begin, end)


@dataclass
class Prompt:
    """A request of the modelled engine."""

    name: str
    tokens: int
    done: int = 0
    answers: int = 30  # tokens to be generated
    is_new: bool = True


@dataclass
class Model:
    """An engine that computes prompts in steps and tells a meter what vLLM tells a tier.

    Attributes:
        is_ahead: whether a step is scheduled while the one before it is computed.
        budget: tokens of a step.
        slow: by how much a step takes longer, by its number.
    """

    is_ahead: bool
    budget: int = 8192
    slow: Callable[[int], float] = lambda _: 1.0
    clock: FakeClock = field(default_factory=lambda: FakeClock(100.0))
    reports: list[tuple[float, str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rate = ComputeRate(chunk=ANY_LENGTH)
        self.meter = PrefillMeter(rate, CHUNK, clock=lambda: self.clock.moment)

    def run(self, arrivals: list[tuple[float, int]]) -> None:
        """Serve prompts, each given by when it arrives and by its tokens."""
        waiting = [(100.0 + at, Prompt(f"{n}", it)) for n, (at, it) in enumerate(arrivals)]
        running: list[Prompt] = []
        scheduled_at, ends, step = 100.0, [100.0, 100.0], 0
        while waiting or running:
            if not running and waiting[0][0] > scheduled_at:
                self._report(scheduled_at + 1.0)
                scheduled_at = waiting[0][0]
            while waiting and waiting[0][0] <= scheduled_at:
                running.append(waiting.pop(0)[1])
            self._report(scheduled_at)
            self.clock.moment = scheduled_at
            self.meter.note_step()
            left, seconds, stored = self.budget, STEP_S, list[tuple[str, int]]()
            for prompt in [*running]:
                if prompt.done >= prompt.tokens:
                    prompt.answers -= 1
                    if not prompt.answers:
                        running.remove(prompt)
                    continue
                num = min(left, prompt.tokens - prompt.done)
                if num and prompt.is_new:
                    prompt.is_new = False
                    self.meter.begin(prompt.name, 0, prompt.tokens // CHUNK * CHUNK)
                seconds += true_s(prompt.done, prompt.done + num)
                prompt.done, left = prompt.done + num, left - num
                if num:
                    stored.append((prompt.name, num))
                    done = prompt.done // CHUNK * CHUNK
                    self.reports.append((-1.0, prompt.name, done))
            end = max(scheduled_at, ends[-1]) + seconds * self.slow(step)
            ends.append(end)
            copy_s = COPY_S * sum(num for _, num in stored)
            # A copy begins with the next step, and its end is told with a later one.
            self.reports = [
                (end + copy_s + STEP_S if at < 0 else at, name, it) for at, name, it in self.reports
            ]
            step += 1
            scheduled_at = max(scheduled_at + TICK_S, ends[-2] if self.is_ahead else end)
        self._report(scheduled_at + 10.0)
        self.meter.note_step()

    def _report(self, now: float) -> None:
        """Have vLLM offer the chunks whose copies have ended."""
        for at, name, end in sorted(self.reports):
            if 0 <= at <= now:
                self.clock.moment = max(self.clock.moment, at)
                self.meter.note_offer(name, end)
        self.reports = [each for each in self.reports if each[0] > now]


def seconds(meter: PrefillMeter, begin: int, end: int) -> float:
    """Return what a meter has learnt of tokens of a prompt."""
    assert meter.times is not None
    return PromptTimes(meter.times, ANY_LENGTH)(begin, end)


def alone(*sizes: int, times: int = 6) -> list[tuple[float, int]]:
    """Prompts of these sizes in turn, each of which finds the engine idle."""
    return [(30.0 * n, sizes[n % len(sizes)]) for n in range(times * len(sizes))]


def crowded(num: int, seed: int = 0) -> list[tuple[float, int]]:
    """Prompts that come while others are computed or answered."""
    draw, at, found = random.Random(seed), 0.0, list[tuple[float, int]]()
    for _ in range(num):
        at += draw.expovariate(2.0)
        found.append((at, draw.choice([900, 2000, 5000, 12_000, 30_000])))
    return found


TRAFFIC = {
    "short": (alone(700, 2000, 5000), (1024, 4096)),
    "one size": (alone(2000, times=12), (2000,)),
    "long": (alone(20_000, 60_000), (16_384, 32_768)),
    "both": (alone(1500, 6000, 30_000, 60_000), (2048, 8192, 32_768)),
    "crowded": (crowded(60), (2048, 8192, 32_768)),
}


# A crowd on a device that is a hundred times slower would queue without an end.
@pytest.mark.parametrize(
    ("traffic", "factor"),
    [(it, by) for it in TRAFFIC for by in (0.1, 1.0, 100.0) if (it, by) != ("crowded", 100.0)],
)
@pytest.mark.parametrize("is_ahead", [True, False])
def test_prompts_are_never_taken_for_much_dearer_than_they_are(
    traffic: str, is_ahead: bool, factor: float
) -> None:
    model = Model(is_ahead, slow=lambda _: factor)
    arrivals, sizes = TRAFFIC[traffic]
    model.run(arrivals)
    for size in sizes:
        told, right = seconds(model.meter, 0, size), true_s(0, size) * factor
        # Steps that answers share with a prompt take their time, too.
        assert told < 1.15 * right + 2 * STEP_S * factor, (size, told, right)
        assert told > (0.35 if traffic == "crowded" else 0.7) * right, (size, told, right)


@pytest.mark.parametrize("is_ahead", [True, False])
def test_tokens_further_back_are_known_to_be_dearer(is_ahead: bool) -> None:
    model = Model(is_ahead)
    model.run(alone(60_000, times=8))
    late, early = seconds(model.meter, 50_000, 58_000), seconds(model.meter, 0, 8000)
    assert late / early == pytest.approx(true_s(50_000, 58_000) / true_s(0, 8000), rel=0.35)


def test_nothing_is_known_before_some_prompts_were_measured() -> None:
    model = Model(True)
    model.run(alone(2000, times=LEAST_MEASURED))
    assert model.meter.times is None
    model.run(alone(2000, times=2))
    assert model.meter.times is not None


def test_a_slow_first_use_and_single_slow_steps_count_for_nothing() -> None:
    steady, slow = Model(True), Model(True, slow=lambda step: 30.0 if step % 67 == 0 else 1.0)
    for model in (steady, slow):
        model.run(alone(2000, 5000, times=12))
    wanted = seconds(steady.meter, 0, 4096)
    assert seconds(slow.meter, 0, 4096) == pytest.approx(wanted, rel=0.2)


def test_an_engine_that_becomes_slower_is_followed() -> None:
    model = Model(True)
    model.run(alone(3000, times=8))
    before = seconds(model.meter, 0, 3000)
    model.slow = lambda _: 2.0
    model.run(alone(3000, times=8))
    assert seconds(model.meter, 0, 3000) > 1.7 * before


def test_a_request_that_begins_anew_teaches_nothing() -> None:
    clock = FakeClock(1.0)
    meter = PrefillMeter(ComputeRate(ANY_LENGTH), CHUNK, clock=lambda: clock.moment)
    for n in range(8):
        meter.note_step()
        meter.begin(f"{n}", 0, 4096)
        clock.moment += 5.0
        meter.forget(f"{n}")
        meter.note_offer(f"{n}", 4096)
    assert meter.times is None


def test_what_was_there_already_is_not_taken_for_computed() -> None:
    clock = FakeClock(1.0)
    meter = PrefillMeter(ComputeRate(ANY_LENGTH), CHUNK, clock=lambda: clock.moment)
    for n in range(8):
        meter.note_step()
        meter.begin(f"{n}", 40_960, 45_056)
        meter.note_offer(f"{n}", 40_960)  # chunks of its head, which vLLM offers at once
        clock.moment += 0.2
        for _ in range(8):
            meter.note_step()
        meter.note_offer(f"{n}", 45_056)
        clock.moment += 60.0
    (step,) = meter.compute.steps
    assert step[:2] == (4096 + CHUNK - 1, pairs(40_960, 45_056))
    assert step.seconds == pytest.approx(0.2)


def test_predictions_are_compared_with_what_was_measured() -> None:
    model = Model(False)
    model.run(alone(2000, 5000, times=10))
    meter = model.meter
    assert meter.measured_s > 0
    assert meter.predicted_s == pytest.approx(meter.measured_s, rel=0.3)


def test_an_offer_that_comes_a_step_late_makes_nothing_look_cheap() -> None:
    clock = FakeClock(100.0)
    meter = PrefillMeter(ComputeRate(chunk=ANY_LENGTH), CHUNK, clock=lambda: clock.moment)
    for number in range(2 * LEAST_MEASURED):
        name = f"{number}"
        meter.note_step()
        meter.begin(name, 0, 3 * 1024)
        clock.moment += 0.4  # the end of the second step, when the first one's chunks are told of
        meter.note_step()
        meter.note_offer(name, 1024)
        meter.note_step()
        clock.moment += 0.03
        meter.note_offer(name, 2048)
        meter.note_step()
        clock.moment += 0.2
        meter.note_offer(name, 3 * 1024)
        meter.note_step()
    assert meter.compute.steps
    for step in meter.compute.steps:
        assert step.seconds / step.num_tokens > 0.2 / 1024 / 2.5
