"""Forecasts of first tokens, and the lag that is added to them."""

import pytest

from tests.fake_store import BLOCK_BYTES, Rig, chain_of
from tieredkv.cache.forecasts import LAG_S, NUM_LAGS, Forecasts, Lag
from tieredkv.config import Restore


def test_the_lag_of_first_tokens_is_that_of_most_of_the_last_requests() -> None:
    lag = Lag()
    assert lag.seconds == 0.0
    for seconds in (0.010, 0.012, 0.011, 5.0, 0.011):  # one had to wait for something else
        lag.learn(seconds)
    assert lag.seconds == 0.011
    for _ in range(NUM_LAGS):
        lag.learn(-0.5)
    assert lag.seconds == 0.0, "nothing comes before it is planned"


def test_a_lag_of_some_time_ago_is_not_expected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lag, now = Lag(), 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    lag.learn(0.2)
    now += LAG_S - 1
    lag.learn(0.1)
    assert lag.seconds == pytest.approx(0.15)
    now += 2
    assert lag.seconds == 0.1
    now += LAG_S
    assert lag.seconds == 0.0


def test_what_a_step_says_needs_no_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, now = Rig(has_store=False), 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    forecasts = Forecasts()
    issued, computed, restored, first, second = (rig.start(each, 1) for each in "abcde")
    forecasts.note_step([issued], lambda: 1.0)
    forecasts.note_plan([(first, False, 1.0)])
    now += 5.0
    assert forecasts.note_first_token(issued) == (1.0, 5.0, "issued")
    assert forecasts.note_first_token(first) == (1.0, 5.0, "computed")
    forecasts.note_plan([(computed, False, 1.0), (restored, True, 1.0)])
    forecasts.note_step([second], lambda: 1.0)
    assert forecasts.note_first_token(second) == (1.0, 0.0, "issued")
    assert forecasts.note_first_token(computed) == (5.0, 0.0, "computed")
    assert forecasts.note_first_token(restored) == (1.0, 0.0, "restored")


def test_nothing_is_expected_of_a_request_that_was_released() -> None:
    rig, forecasts = Rig(has_store=False), Forecasts()
    prefix = rig.start("a", 1)
    forecasts.note_plan([(prefix, False, 1.0)])
    forecasts.forget(prefix)
    assert forecasts.note_first_token(prefix) is None


def test_the_step_that_gives_a_request_its_first_token_says_when_that_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    rig = Rig(restore="auto")
    first, second = rig.start("a", 4), rig.start("b", 4)
    rig.plan()
    planned = rig.cache.note_first_token(second)
    assert planned is not None and planned.kind == "computed"
    rig.cache.begin_step(0.0, [first], lambda: 7.0)
    now += 1.0
    rig.cache.begin_step(0.0, [first, second], lambda: 9.0)
    # The step with its next token says nothing new.
    assert rig.cache.note_first_token(first) == (7.0, 1.0, "issued")
    # It is told as it was expected at first.
    assert rig.cache.note_first_token(second) == (planned.predicted_s, 1.0, "computed")
    for prefix in (first, second):
        rig.compute(prefix)
        rig.finish(prefix)
    rig.check_nothing_is_held()


@pytest.mark.parametrize("restore", ["auto", "compute"])
def test_a_request_without_a_plan_is_told_by_the_step_that_gives_its_first_token(
    restore: Restore,
) -> None:
    rig = Rig(restore=restore, has_store=False)
    prefix = rig.queue("a", 4)
    assert rig.cache.admit(prefix, 4)
    rig.cache.begin_step(0.0, [prefix], lambda: 7.0)
    told = rig.cache.note_first_token(prefix)
    assert (told and (told.predicted_s, told.kind)) == (
        (7.0, "issued") if restore == "auto" else None
    )
    rig.cache.release(prefix)
    rig.check_nothing_is_held()


def test_copies_that_are_under_way_are_waited_for() -> None:
    rig = Rig(restore="auto")
    rig.run("a", 4)
    assert rig.cache._demoter.demote(4) == 4
    rig.turn()
    for block_hash in chain_of("a", 4):
        rig.tiers.device.drop(block_hash)
    rig.transfer.is_held = True
    rig.start("a", 4)
    assert rig.transfer.has_pending
    rig.tiers.device_link.up_rate.bytes_per_s = BLOCK_BYTES
    second = rig.start("a", 4)
    told = rig.cache.note_first_token(second)
    assert told is not None and told.kind == "restored"
    assert told.predicted_s >= 4.0
