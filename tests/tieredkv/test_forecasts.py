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
    forecasts, now = Forecasts(), 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    issued = forecasts.with_step(None, 1.0)
    planned = forecasts.make(1.0, is_restored=False)
    now += 5.0
    for late in (issued, planned):
        forecasts.learn(late)
    assert forecasts.with_step(None, 1.0).predicted_s == 1.0
    assert forecasts.make(1.0, is_restored=False).predicted_s == 5.0
    assert forecasts.make(1.0, is_restored=True).predicted_s == 1.0


def test_the_step_that_gives_a_request_its_first_token_says_when_that_comes() -> None:
    rig = Rig(restore="auto")
    first, second = rig.start("a", 4), rig.start("b", 4)
    rig.plan()
    planned = [prefix.forecast for prefix in (first, second)]
    assert [forecast and forecast.kind for forecast in planned] == ["computed", "computed"]
    rig.cache.begin_step(0.0, [first], lambda: 7.0)
    assert first.forecast is not None
    assert first.forecast.kind == "issued"
    assert first.forecast.planned_s == pytest.approx(7.0, abs=1.0)
    known = first.forecast
    rig.cache.begin_step(0.0, [first, second], lambda: 9.0)
    assert first.forecast is known, "the step with its next token says nothing new"
    assert second.forecast is planned[1], "it is told as it was expected at first"
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
    told = prefix.forecast and (prefix.forecast.kind, prefix.forecast.planned_s)
    assert told == (("issued", 7.0) if restore == "auto" else None)
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
    assert second.forecast is not None
    assert second.forecast.kind == "restored"
    assert second.forecast.planned_s >= 4.0
