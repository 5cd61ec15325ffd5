"""The time of steps is learnt from those that were computed."""

import math
import random

import pytest

from tieredkv.cache.compute_rate import ComputeRate
from tieredkv.cache.step_times import Step
from tieredkv.steps import pairs


def true_s(num_tokens: int, num_pairs: float) -> float:
    return 3e-3 + 2.2e-5 * num_tokens + 5e-10 * num_pairs


def test_measured_steps_are_predicted() -> None:
    rate, draw = ComputeRate(8192), random.Random(0)
    for _ in range(50):
        begin, count = draw.randrange(0, 60_000), draw.choice([64, 256, 512, 2048, 8192])
        num_pairs = pairs(begin, begin + count)
        rate.learn(count, num_pairs, draw.uniform(0.97, 1.03) * true_s(count, num_pairs))
    for begin, count in ((0, 8192), (32_768, 8192), (0, 512), (60_000, 2048)):
        expected = true_s(count, pairs(begin, begin + count))
        assert rate.seconds(begin, begin + count) == pytest.approx(expected, rel=0.1)


def test_every_step_of_a_long_prompt_has_its_fixed_cost() -> None:
    rate = ComputeRate(1000)
    for count in (100, 500, 1000):
        rate.learn(count, 0.0, 0.01 + 1e-5 * count)
    assert rate.seconds(0, 10_000) == pytest.approx(10 * 0.01 + 0.1, rel=0.05)
    assert rate.seconds(50, 50) == 0.0


@pytest.mark.parametrize("num_prompts", [20, 2000])
def test_a_step_with_few_tokens_takes_as_long_as_the_device_needs_for_any_step(
    num_prompts: int,
) -> None:
    rate = ComputeRate(8192)
    rate.learn(1, 0.0, 0.006)  # it is not forgotten while only prompts are computed
    for count in (2048, 8192) * num_prompts:
        rate.learn(count, 0.0, 2e-5 * count)
    assert rate.seconds(9, 10) == pytest.approx(0.006, rel=0.001)
    assert rate.seconds(0, 200) == pytest.approx(0.006, rel=0.001)
    assert rate.seconds(0, 2048) == pytest.approx(0.041, rel=0.02)
    assert 200 < rate.least_tokens < 300


def test_tokens_generated_beside_a_prompt_make_each_of_its_steps_longer() -> None:
    rate = ComputeRate(1000)
    for num_read in (0.0, 100_000.0, 300_000.0) * 20:
        for count in (250, 1000):
            rate.learn(count, 0.0, 2e-5 * count + 3e-8 * num_read, num_read=num_read)
    alone_s = rate.seconds(0, 4000)
    rate.num_read_beside = 200_000.0
    assert rate.seconds(0, 4000) - alone_s == pytest.approx(4 * 0.006, rel=0.1)
    rate.learn(1, 0.0, 0.004 + 0.003, num_read=100_000.0)
    assert rate.step_seconds(1, 0.0) == pytest.approx(0.004, rel=0.05)


def test_what_is_read_beside_prompts_is_learnt_from_steps_that_only_generate() -> None:
    rate, draw = ComputeRate(8192), random.Random(3)
    for _ in range(60):
        num_read = draw.uniform(50_000, 200_000)
        for _ in range(20):
            rate.learn(0, 0.0, 0.0043 + 3.1e-8 * num_read, num_read=num_read)
        count, noise = draw.choice([512, 2048, 8192]), draw.uniform(0.9, 1.1)
        rate.learn(count, 0.0, noise * (0.01 + 2e-5 * count + 3.1e-8 * num_read), num_read=num_read)
    for num_read in (0.0, 60_000.0, 180_000.0):
        expected = 0.0043 + 3.1e-8 * num_read
        assert rate.step_seconds(0, 0.0, num_read) == pytest.approx(expected, rel=0.05)


def test_no_coefficient_is_negative_whatever_was_measured() -> None:
    rate, draw = ComputeRate(8192), random.Random(1)
    for _ in range(300):
        rate.learn(draw.randrange(64, 8192), draw.uniform(0, 1e9), draw.uniform(1e-5, 10.0))
        times = [rate.seconds(0, end) for end in range(0, 100_000, 5000)]
        assert times == sorted(times) and math.isfinite(times[-1])


def test_a_device_that_becomes_slower_is_believed() -> None:
    rate = ComputeRate(8192)
    for factor in (1.0, 3.0):
        for count in (512, 2048, 8192) * 40:
            rate.learn(count, pairs(0, count), factor * true_s(count, pairs(0, count)))
    assert rate.seconds(0, 8192) == pytest.approx(3 * true_s(8192, pairs(0, 8192)), rel=0.1)


def steps_of(factor: float, counts: tuple[int, ...] = (512, 2048, 8192)) -> list[Step]:
    """Return steps at the beginning of a prompt and far into it, `factor` times as slow."""
    sizes = [(count, count * far) for count in counts for far in (count / 2, 50_000.0)]
    return [Step(*size, factor * true_s(*size)) for size in sizes]


def test_steps_of_an_earlier_run_predict_until_their_kind_is_measured() -> None:
    rate = ComputeRate(8192)
    assert rate.assume(steps_of(1.0))
    expected = true_s(8192, pairs(65_536, 73_728))
    assert rate.seconds(65_536, 73_728) == pytest.approx(expected, rel=0.05)
    fresh = ComputeRate(8192)
    for step in steps_of(2.0):
        for each in (rate, fresh):
            each.learn(int(step.num_tokens), step.num_pairs, step.seconds)
    assert rate.seconds(65_536, 73_728) == pytest.approx(fresh.seconds(65_536, 73_728))


@pytest.mark.parametrize(
    ("step_s", "token_s", "pair_s"),
    [(0.006, 2.4e-5, 7.3e-10), (0.002, 4e-5, 6e-8), (0.1, 2e-3, 1e-6), (1e-4, 2e-7, 1e-12)],
)
def test_the_times_of_a_device_of_any_speed_are_learnt(
    step_s: float, token_s: float, pair_s: float
) -> None:
    """The first assumption is that of a GPU, and attention takes a CPU 600 times as long."""

    def took_s(begin: int, end: int) -> float:
        return max(step_s, token_s * (end - begin)) + pair_s * pairs(begin, end)

    rate = ComputeRate(2_048)
    for begin, end in [(0, 1), (0, 16), (0, 64), (30_000, 30_016)]:
        rate.learn(end - begin, pairs(begin, end), took_s(begin, end))
    rate.doubt()
    for length in (512, 8_192, 2_048):
        for begin in range(0, length, 2_048):
            end = min(length, begin + 2_048)
            rate.learn(end - begin, pairs(begin, end), took_s(begin, end))
    for length in (512, 2_048, 8_192, 32_768):
        right_s = sum(took_s(it, min(length, it + 2_048)) for it in range(0, length, 2_048))
        assert rate.seconds(0, length) == pytest.approx(right_s, rel=0.1), length


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_what_is_measured_outweighs_an_earlier_run(factor: float) -> None:
    rate = ComputeRate(8192)
    for step in steps_of(1.0, (256, 8192)):
        rate.learn(int(step.num_tokens), step.num_pairs, step.seconds)
    assert rate.assume(steps_of(factor, (128, 512, 1024, 2048)))
    assert rate.seconds(0, 8192) == pytest.approx(true_s(8192, pairs(0, 8192)), rel=0.1)


def test_steps_of_made_up_tokens_predict_until_real_ones_are_measured() -> None:
    rate = ComputeRate(8192)
    for step in [*steps_of(0.9), Step(128, 128 * 130_000.0, 0.007)]:
        rate.learn(int(step.num_tokens), step.num_pairs, step.seconds)
    rate.doubt()
    for count in (2048, 8192):
        rate.learn(count, pairs(0, count), true_s(count, pairs(0, count)))
    for count in (2048, 6000, 8192):
        assert rate.seconds(0, count) == pytest.approx(true_s(count, pairs(0, count)), rel=0.03)


def test_a_step_can_stand_for_all_of_its_kind() -> None:
    rate = ComputeRate(8192)
    for seconds in (0.5, 0.2, 0.3):
        rate.replace(Step(8192, pairs(0, 8192), seconds))
    assert rate.steps == [Step(8192, pairs(0, 8192), 0.3)]
    assert rate.seconds(0, 8192) == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize("factor", [0.01, 10.0, 1000.0])
def test_steps_that_are_far_from_what_was_measured_are_not_believed(factor: float) -> None:
    rate = ComputeRate(8192)
    for step in steps_of(1.0, (256, 8192)):
        rate.learn(int(step.num_tokens), step.num_pairs, step.seconds)
    before = rate.seconds(0, 8192)
    assert not rate.assume(steps_of(factor))
    assert rate.seconds(0, 8192) == before
    assert rate.assume([*steps_of(1.0), Step(4096, 0.0, factor)]), "one of them is left out"
    assert rate.seconds(0, 8192) == pytest.approx(before, rel=0.05)


def test_steps_near_the_least_time_do_not_bend_the_time_of_long_ones() -> None:
    rate = ComputeRate(8_192)
    for num_tokens in (16, 70, 130, 256, 1_024, 4_096, 8_192):
        for _ in range(8):
            rate.learn(num_tokens, 0.0, max(6e-3, 2.4e-5 * num_tokens))
    assert rate.step_seconds(8_192, 0.0) == pytest.approx(2.4e-5 * 8_192, rel=0.01)


def test_a_device_that_becomes_slower_is_known_to_be_after_a_few_steps_of_some_kinds() -> None:
    rate = ComputeRate(8_192)
    for num_tokens in (512, 1_024, 2_048, 4_096, 8_192):
        rate.learn(num_tokens, 0.0, 2.4e-5 * num_tokens)
    for num_tokens in (512, 2_048) * 3:
        rate.learn(num_tokens, 0.0, 3 * 2.4e-5 * num_tokens)
    assert rate.step_seconds(8_192, 0.0) == pytest.approx(3 * 2.4e-5 * 8_192, rel=0.1)


def test_steps_of_sizes_between_those_that_were_measured_tell_of_a_slower_device() -> None:
    rate = ComputeRate(8_192)
    for num_tokens in (512, 8_192):
        rate.learn(num_tokens, 0.0, 2.4e-5 * num_tokens)
    for num_tokens in (1_000, 1_400, 2_000, 2_800, 4_000, 5_600):
        rate.learn(num_tokens, 0.0, 3 * 2.4e-5 * num_tokens)
    assert rate.step_seconds(8_192, 0.0) == pytest.approx(3 * 2.4e-5 * 8_192, rel=0.1)


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_device_that_has_changed_is_noticed_though_one_kind_of_step_is_seen(
    factor: float,
) -> None:
    """The kinds that come for the first time after the change are right already."""
    rate = ComputeRate(8_192)
    for num_tokens in (512, 1_024, 4_096, 8_192) * 10:
        rate.learn(num_tokens, 0.0, 2.4e-5 * num_tokens)
    for num_tokens in (512, 2_048, 512, 512, 512):
        rate.learn(num_tokens, 0.0, factor * 2.4e-5 * num_tokens)
    for num_tokens in (512, 2_048, 8_192):
        expected = pytest.approx(factor * 2.4e-5 * num_tokens, rel=0.1)
        assert rate.step_seconds(num_tokens, 0.0) == expected


def test_a_few_steps_that_take_longer_are_no_change_of_the_device() -> None:
    rate = ComputeRate(8_192)
    for num_tokens in (512, 2_048, 8_192) * 10:
        rate.learn(num_tokens, 0.0, 2.4e-5 * num_tokens)
    for _ in range(5):
        for factor in (3.0, 3.0, 3.0, 1.0):
            rate.learn(512, 0.0, factor * 2.4e-5 * 512)
    steps = {step.num_tokens: step.seconds for step in rate.steps}
    assert steps[8_192] == pytest.approx(2.4e-5 * 8_192)
