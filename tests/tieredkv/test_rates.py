"""Rates that are learnt from moves and steps."""

import itertools
import math
import random

import pytest

from tieredkv.cache.rates import (
    FIRST_PROBE_S,
    MIN_WINDOW_S,
    PROBE_S,
    ComputeRate,
    LinkRate,
    Probes,
    Step,
)
from tieredkv.steps import pairs

MIB = 1 << 20


def run(
    rate: LinkRate, bytes_per_s: float, seconds: float, begin: float, *, depth: int = 32
) -> float:
    """Keep a link of this rate busy with `depth` moves of 2 MiB; return the time at the end."""
    now, each_s = begin, 2 * MIB / bytes_per_s
    for _ in range(depth):
        rate.begin(2 * MIB, now)
    while now < begin + seconds:
        now += each_s
        rate.end(2 * MIB, now)
        rate.begin(2 * MIB, now)
    for _ in range(depth):
        now += each_s
        rate.end(2 * MIB, now)
    return now


def test_the_first_moves_correct_the_first_assumption() -> None:
    rate = LinkRate(2e9)
    run(rate, 5e9, 0.5, 100.0)
    assert rate.bytes_per_s == pytest.approx(5e9, rel=0.15)


def test_one_slow_read_at_the_start_is_not_believed_for_good() -> None:
    rate = LinkRate(2e9)
    rate.begin(2 * MIB, 0.0)
    rate.end(2 * MIB, 0.03)
    assert rate.bytes_per_s > 1e9


def test_a_slow_beginning_does_not_last() -> None:
    rate = LinkRate(2e9)
    now = run(rate, 0.2e9, 0.02, 100.0, depth=1)
    run(rate, 2.5e9, 0.5, now)
    assert rate.bytes_per_s > 2.2e9


def test_a_link_that_becomes_slow_is_believed_within_a_second() -> None:
    rate = LinkRate(2e9)
    now = run(rate, 3e9, 5.0, 0.0)
    run(rate, 0.3e9, 1.0, now)
    assert rate.bytes_per_s < 0.8e9


def test_a_time_without_anything_to_move_teaches_nothing() -> None:
    rate = LinkRate(2e9)
    now = 0.0
    for _ in range(50):
        now = 10.0 + run(rate, 3e9, 0.05, now)
    assert rate.bytes_per_s == pytest.approx(3e9, rel=0.01)


def test_short_busy_times_add_up_to_a_measurement() -> None:
    rate, now = LinkRate(2e9), 0.0
    for _ in range(5000):
        rate.begin(2 * MIB, now)
        now += 2 * MIB / 4e9
        rate.end(2 * MIB, now)
        now += 1.0
    assert rate.bytes_per_s == pytest.approx(4e9, rel=0.01)


def test_moves_that_fail_are_no_fast_ones() -> None:
    rate, now = LinkRate(2e9), 0.0
    for _ in range(1000):
        rate.begin(2 * MIB, now)
        now += 1e-4
        rate.end(2 * MIB, now, teaches=False)
    assert rate.bytes_per_s == 2e9 and rate.learnt_at == -math.inf


def test_a_move_that_something_else_held_back_teaches_nothing() -> None:
    rate = LinkRate(2e9)
    now = run(rate, 3e9, 1.0, 0.0)
    known = rate.bytes_per_s
    for _ in range(100):
        rate.begin(4 * MIB, now)
        rate.end(2 * MIB, now + 0.0007)
        now += 0.1
        rate.skip(2 * MIB, now)
    assert rate.bytes_per_s == known and rate.num_bytes == 0
    assert run(rate, 1e9, 1.0, now) and rate.bytes_per_s < 0.6 * known, "what follows teaches"


def test_a_link_that_stops_is_told_as_slower_and_slower() -> None:
    rate = LinkRate(2e9)
    rate.begin(100 * MIB, 0.0)
    told = [rate.effective(now) for now in (0.0, 0.1, 1.0, 10.0)]
    assert told[0] == 2e9
    assert told == sorted(told, reverse=True) and told[-1] < 20e6
    assert rate.steady == 2e9, "what it gives once it goes on"
    assert rate.busy_s(10.0) > 9.0, "it is not expected to go on soon"
    rate.end(100 * MIB, 10.1)
    assert rate.busy_s(10.1) == 0.0


def test_a_queue_gets_shorter_while_it_is_waited_for() -> None:
    rate = LinkRate(1e9)
    rate.begin(100_000_000, 5.0)
    assert rate.busy_s(5.0) == pytest.approx(0.1)
    assert rate.busy_s(5.08) == pytest.approx(0.02)


def test_what_is_moved_at_once_is_due_at_once() -> None:
    rate = LinkRate(2e9)
    for _ in range(32):
        rate.begin(2 * MIB, 5.0)
    each_s = 2 * MIB / 2e9
    now = 5.0 + 31 * each_s
    rate.end(2 * MIB, now)
    assert rate.busy_s(now) == pytest.approx(each_s)
    rate.begin(2 * MIB, now)
    assert rate.busy_s(now) == pytest.approx(2 * each_s)


def test_a_link_that_is_faster_than_known_is_not_due_later_than_the_rest_takes() -> None:
    rate = LinkRate(1e9)
    for _ in range(10):
        rate.begin(100 * MIB, 0.0)
    for _ in range(9):
        rate.end(100 * MIB, 0.2)
    assert rate.busy_s(0.2) == pytest.approx(100 * MIB / 1e9)


def test_a_limit_caps_what_is_told_and_teaches_only_that_the_link_is_no_slower() -> None:
    rate = LinkRate(3e9, learnt_at=0.0)
    rate.limit = 1e9
    run(rate, 1e9, 1.0, 10.0)
    assert rate.effective(12.0) == 1e9
    assert not rate.is_stale(12.0)
    rate.limit = math.inf
    assert rate.effective(12.0) == 3e9


def test_a_first_assumption_is_lowered_to_the_limit() -> None:
    rate = LinkRate(3e9, limit=1e9)
    run(rate, 1e9, 1.0, 0.0)
    assert rate.is_learnt
    assert 1e9 <= rate.bytes_per_s < 3e9


def test_a_rate_that_was_learnt_too_low_is_raised_to_the_limit() -> None:
    rate = LinkRate(0.1e9, limit=1e9)
    run(rate, 1e9, 1.0, 0.0)
    assert rate.effective(2.0) >= 0.9e9


def test_a_move_that_is_admitted_but_does_not_begin_does_not_count_for_the_limit() -> None:
    rate = LinkRate(2e9, limit=1.0)
    assert all(rate.admits(2 * MIB, now) for now in (0.0, 0.1, 0.2))
    rate.begin(2 * MIB, 0.2)
    assert not rate.admits(2 * MIB, 1_000_000.0)
    assert rate.admits(2 * MIB, 3_000_000.0)


@pytest.mark.parametrize("limit", [1e6, 0.5e9, 2e9])
def test_a_limit_lets_through_no_more_than_it_says(limit: float) -> None:
    rate, now, num_bytes = LinkRate(3e9, limit=limit), 0.0, 0
    while now < 10.0:
        while rate.admits(2 * MIB, now):
            rate.begin(2 * MIB, now)
            rate.end(2 * MIB, now)
            num_bytes += 2 * MIB
        now += 0.001
    assert num_bytes <= limit * 10.0 + max(2 * MIB, 0.02 * limit)
    assert num_bytes >= 0.9 * limit * 10.0 - 2 * MIB


def test_a_rate_is_stale_until_it_is_measured_and_again_some_time_later() -> None:
    rate = LinkRate(2e9)
    assert rate.is_stale(0.0)
    now = run(rate, 3e9, 2 * MIN_WINDOW_S, 0.0)
    assert not rate.is_stale(now)
    assert rate.is_stale(now + PROBE_S)


@pytest.mark.parametrize("times", [0.1, 10.0])
def test_a_link_that_has_changed_is_believed_the_second_time(times: float) -> None:
    rate = LinkRate(2e9)
    for now in range(20):
        rate.learn(int(2e8), 0.1, float(now))
    rate.learn(int(2e7 * times), 0.01, 20.0)
    assert rate.bytes_per_s == pytest.approx(2e9, rel=0.3), "one exception counts little"
    rate.learn(int(2e7 * times), 0.01, 20.1)
    assert rate.bytes_per_s == pytest.approx(times * 2e9)


def test_exceptions_in_turn_above_and_below_the_rate_count_little() -> None:
    rate = LinkRate(2e9)
    for now in range(20):
        rate.learn(int(2e8), 0.1, float(now))
    for num_bytes in (8e7, 2e6, 8e7, 2e6):
        rate.learn(int(num_bytes), 0.01, 20.0)
    assert rate.bytes_per_s == pytest.approx(2e9, rel=0.3)


def test_a_rate_that_has_fallen_is_measured_at_once_and_then_after_longer_pauses() -> None:
    rate, probes, now = LinkRate(2e9, learnt_at=100.0), Probes(), 100.0
    probes.note_use(rate)
    assert not probes.is_due(rate, now)
    rate.bytes_per_s = 0.9e9
    probed_at = list[float]()
    while now < 130.0:
        if probes.is_due(rate, now):
            probes.note_probe(rate, now)
            probed_at.append(now)
        now += 0.125
    pauses = [after - before for before, after in itertools.pairwise(probed_at)]
    assert probed_at[0] == 100.0
    assert pauses[:6] == [FIRST_PROBE_S, 1.0, 2.0, 4.0, PROBE_S, PROBE_S]
    rate.learn(int(3e7), 0.01, now)
    assert rate.bytes_per_s == 3e9, "the next measurement replaces a rate that is in doubt"


def test_a_rate_that_stays_as_it_was_is_measured_once_it_is_stale() -> None:
    rate, probes = LinkRate(2e9, learnt_at=100.0), Probes()
    probes.note_use(rate)
    rate.bytes_per_s = 1.1e9
    assert not probes.is_due(rate, 100.0 + PROBE_S / 2)
    assert probes.is_due(rate, 100.0 + PROBE_S)
    probes.note_probe(rate, 100.0 + PROBE_S)
    assert not probes.is_due(rate, 100.0 + 1.5 * PROBE_S)


# Computing.


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


def test_a_rate_is_known_once_this_or_an_earlier_run_has_measured_it() -> None:
    earlier, now = LinkRate(2e9), LinkRate(2e9)
    assert not earlier.is_known
    earlier.assume(1e9)
    now.learn(1 << 30, 1.0, 5.0)
    assert earlier.is_known and now.is_known


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
