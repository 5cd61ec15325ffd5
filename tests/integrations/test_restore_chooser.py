"""The choices of a tier follow its rates, which idle disks are measured for."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from tests.fakes import FakeClock
from tests.golden import refused
from tieredkv.cache.compute_rate import ComputeRate
from tieredkv.cache.link_rate import LinkRate
from tieredkv.cache.step_times import PromptTimes, Step
from tieredkv.errors import ConfigError
from tieredkv.integrations import restore_chooser
from tieredkv.integrations.prefill_meter import PrefillMeter
from tieredkv.integrations.restore_choice import ANY_LENGTH, replay
from tieredkv.integrations.restore_chooser import (
    COPY_BYTES_PER_S,
    FIRST_PROTOCOL_S,
    ProtocolTime,
    RestoreChooser,
    device_names,
    given_times,
)
from tieredkv.integrations.row_store import RowStore
from tieredkv.steps import pairs

CHUNK, ROW_BYTES = 64, 8 << 20
Make = Callable[..., RestoreChooser]


class FakeRows:
    """A disk whose probes a test answers."""

    def __init__(self) -> None:
        self.read_rate = LinkRate(2e9)
        self.probed: list[Sequence[bytes]] = []

    def probe(self, hashes: Sequence[bytes]) -> bool:
        self.probed.append(hashes)
        return True


class Tier:
    """The choices of a tier on a machine that a test makes up."""

    def __init__(self, restore: str = "auto", told: object = None) -> None:
        self.clock = FakeClock(1000.0)
        self.rows = FakeRows()
        clock = lambda: self.clock.moment  # noqa: E731
        self.meter = PrefillMeter(ComputeRate(ANY_LENGTH), CHUNK, clock)
        self.chooser = RestoreChooser(
            cast(Any, restore),
            cast(RowStore, self.rows),
            given_times(told),
            self.meter,
            CHUNK,
            ROW_BYTES,
            clock,
        )

    def learn(self, *, read: float | None = None, prefill: float | None = None) -> None:
        """Have rates be measured: bytes and tokens per second."""
        if read:
            self.rows.read_rate.learn(int(read), 1.0, self.clock.moment)
        for tokens in (2048, 8192) if prefill else ():
            self.meter.compute.replace(Step(tokens, pairs(0, tokens), tokens / (prefill or 1)))

    def choose(self, name: str = "r", num: int = 128) -> str:
        hashes = [b"%d" % n for n in range(num)]
        tokens = num * CHUNK
        choice = self.chooser.choose(name, 0, tokens, tokens + 1, hashes, num)
        return f"{'load' if choice.should_load else 'compute'}: {choice.reason}"


def test_until_both_rates_are_known_all_is_computed_and_the_disk_is_measured() -> None:
    tier = Tier()
    assert tier.choose() == "compute: unknown_prefill"
    assert len(tier.rows.probed) == 1
    tier.learn(prefill=2000)
    assert tier.choose() == "compute: unknown_disk"
    tier.learn(read=2e9)
    assert tier.choose() == "load: faster"


def test_a_rate_of_an_earlier_run_is_known_until_it_is_measured() -> None:
    tier = Tier()
    tier.rows.read_rate.assume(2e9)
    tier.learn(prefill=2000)
    assert tier.choose() == "load: faster"


def test_a_disk_that_is_not_used_is_measured_every_few_seconds() -> None:
    tier = Tier()
    tier.learn(read=1e8, prefill=50_000)
    for _ in range(120):
        num_probed = len(tier.rows.probed)
        assert tier.choose() == "compute: slower"
        if len(tier.rows.probed) > num_probed:
            tier.rows.read_rate.learnt_at = tier.clock.moment
        tier.clock.moment += 0.5
    assert 8 <= len(tier.rows.probed) <= 12
    sizes = {len(hashes) * ROW_BYTES for hashes in tier.rows.probed}
    assert sizes == {restore_chooser.LEAST_PROBE_BYTES}
    tier.rows.read_rate.learn(int(5e9), 1.0, tier.clock.moment)
    tier.clock.moment += 10
    tier.choose()
    assert len(tier.rows.probed[-1]) * ROW_BYTES <= restore_chooser.MOST_PROBE_BYTES


def test_a_disk_that_became_faster_is_used_again_after_one_probe() -> None:
    tier = Tier()
    tier.learn(read=1e8, prefill=2000)
    assert tier.choose() == "compute: slower"
    tier.clock.moment += 6
    assert tier.choose() == "compute: slower"
    assert tier.rows.probed
    tier.rows.read_rate.learn(int(2e9), 1.0, tier.clock.moment)
    assert tier.choose() == "load: faster"


@pytest.mark.parametrize("restore", ["load", "compute"])
def test_nothing_is_measured_where_the_setting_decides(restore: str) -> None:
    tier = Tier(restore)
    assert tier.choose() == f"{restore}: setting"
    tier.clock.moment += 60
    assert tier.choose() == f"{restore}: setting"
    assert tier.rows.probed == []


def test_reads_under_way_are_waited_for() -> None:
    tier = Tier()
    tier.learn(read=2e9, prefill=8000)
    assert tier.choose() == "load: faster"
    tier.rows.read_rate.begin(int(20e9), tier.clock.moment)
    assert tier.choose("other") == "compute: slower"


def test_what_the_protocol_costs_is_learnt_from_loads() -> None:
    tier = Tier("load")
    tier.learn(read=2e9, prefill=8000)
    for _ in range(5):
        tier.choose()
        began = tier.clock.moment
        tier.chooser.note_read("r", 64 * ROW_BYTES, began + 0.2, ok=True)
        tier.chooser.note_read("r", 64 * ROW_BYTES, began + 0.4, ok=True)
        tier.clock.moment += 0.4 + 128 * ROW_BYTES / COPY_BYTES_PER_S + 0.25
        tier.chooser.note_scheduled("r")
    assert tier.chooser.protocol.seconds(tier.clock.moment) == pytest.approx(0.25)
    assert tier.chooser.measured_s == pytest.approx(5 * (0.65 + 128 * ROW_BYTES / 20e9))
    assert tier.chooser.predicted_s == pytest.approx(tier.chooser.measured_s, rel=0.5)


def test_loads_that_fail_and_requests_that_end_teach_nothing() -> None:
    tier = Tier("load")
    for end in ("fail", "forget", "computed"):
        tier.choose()
        if end != "computed":
            tier.chooser.note_read("r", ROW_BYTES, tier.clock.moment, ok=end != "fail")
        if end == "forget":
            tier.chooser.forget("r")
        tier.clock.moment += 30
        tier.chooser.note_scheduled("r")
    assert tier.chooser.protocol.seconds(tier.clock.moment) == FIRST_PROTOCOL_S


def test_one_long_wait_does_not_count_and_old_times_count_less_and_less() -> None:
    protocol = ProtocolTime()
    for seconds in (0.1, 9.0, 0.12, 0.09):
        protocol.learn(seconds, 50.0)
    assert protocol.seconds(50.0) == pytest.approx(0.11)
    for _ in range(5):
        protocol.learn(3.0, 60.0)
    assert protocol.seconds(60.0) == 3.0
    assert protocol.seconds(360.0) == pytest.approx((3.0 + FIRST_PROTOCOL_S) / 2)
    assert protocol.seconds(6000.0) == pytest.approx(FIRST_PROTOCOL_S, abs=1e-3)


def test_each_choice_is_logged_with_all_that_it_follows_from(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger=restore_chooser.__name__)
    tier = Tier()
    tier.learn(read=2e9, prefill=2000)
    tier.choose("chat-7")
    (line,) = [it for it in caplog.messages if it.startswith("choice: ")]
    logged, again = replay(line.removeprefix("choice: "))
    assert logged.request == "chat-7"
    assert logged.choice == again


def test_the_operators_table_is_what_computing_takes() -> None:
    given = given_times({"8192": 0.21, "32768": 1.2, 65_536: "3.3"})
    assert given is not None
    for tokens, seconds in ((8192, 0.21), (32_768, 1.2), (65_536, 3.3)):
        assert PromptTimes(given, ANY_LENGTH)(0, tokens) == pytest.approx(seconds, rel=0.1)
    late_s = PromptTimes(given, ANY_LENGTH)(57_344, 65_536)
    assert late_s > 2 * PromptTimes(given, ANY_LENGTH)(0, 8192)
    tier = Tier(told={"8192": 8.0})
    tier.learn(read=2e9, prefill=1e6)
    assert tier.choose() == "load: faster", "the table counts, not what is learnt"
    assert given_times(None) is None


@pytest.mark.parametrize(
    "told", [{}, [], 5, "fast", {"a": 1}, {"8192": 0}, {"8192": -1}, {"0": 1}, {"8192": None}]
)
def test_a_table_that_is_none_is_refused(told: object) -> None:
    with refused(ConfigError):
        given_times(told)


def test_the_devices_have_a_name() -> None:
    assert device_names()
