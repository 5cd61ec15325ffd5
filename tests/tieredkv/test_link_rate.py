"""The rate of a link is learnt from the moves that it ends."""

import itertools
import math

import pytest

from tieredkv.cache.link_rate import FIRST_PROBE_S, MIN_WINDOW_S, PROBE_S, LinkRate, Probes

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


def test_a_rate_is_known_once_this_or_an_earlier_run_has_measured_it() -> None:
    earlier, now = LinkRate(2e9), LinkRate(2e9)
    assert not earlier.is_known
    earlier.assume(1e9)
    now.learn(1 << 30, 1.0, 5.0)
    assert earlier.is_known and now.is_known
