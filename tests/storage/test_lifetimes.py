"""How long the disk keeps blocks: what was evicted at which age, and what is expected."""

import math
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fakes import FakeClock
from tests.storage.blocks import make_record, open_store, put, sweep
from tieredkv.storage.lifetimes import LEAST_MEASURED_S, LifetimeCounts
from tieredkv.storage.stats import Lifetimes
from tieredkv.storage.store import Store
from tieredkv.units import parse_bytes

NOW = 1_800_000_000.0
DAY_S, HOUR_S = 86_400.0, 3600.0
GIB = 1 << 30


def written(
    rates: dict[str, float],
    life_s: dict[str, float],
    *,
    for_s: float = 2 * HOUR_S,
    age_s: float = 0,
) -> LifetimeCounts:
    """Return counts of a steady stream of writes, in bytes a second by policy, that ends at NOW."""
    counts = LifetimeCounts()
    for i in range(int(for_s // 10)):
        now = NOW - for_s + 10 * i
        for policy, rate in rates.items():
            times = {"computed_at": now - age_s, "expires_at": now - age_s + life_s[policy]}
            counts.note_written(policy, int(10 * rate), now, **times)
    return counts


def told(counts: LifetimeCounts, disk_size: float, now: float = NOW) -> Lifetimes:
    return counts.figures(now, budget_bytes=int(disk_size), other_bytes=0)


def test_a_block_is_expected_to_stay_until_the_disk_is_written_once() -> None:
    found = told(written({"24h": 1e6}, {"24h": DAY_S}), 1e6 * 6 * HOUR_S)
    assert found.write_bytes_per_s == {"24h": pytest.approx(1e6, rel=0.01)}
    assert found.promised_s == {"24h": pytest.approx(DAY_S)}
    assert found.expected_s == {"24h": pytest.approx(6 * HOUR_S, rel=0.01)}
    assert found.needed_bytes == pytest.approx(1e6 * DAY_S, rel=0.01)
    assert told(written({"24h": 1e6}, {"24h": DAY_S}), 1e6 * DAY_S * 1.02).shortfall == ""


def test_time_in_memory_counts_for_the_age_but_takes_no_room_on_disk() -> None:
    counts = written({"24h": 1e6}, {"24h": DAY_S}, age_s=HOUR_S)
    found = told(counts, 1e6 * 6 * HOUR_S)
    assert found.expected_s["24h"] == pytest.approx(7 * HOUR_S, rel=0.01)
    assert found.needed_bytes == pytest.approx(1e6 * 23 * HOUR_S, rel=0.01)


def test_policies_share_the_room_and_a_short_one_is_kept_first() -> None:
    counts = written({"1h": 2e6, "24h": 1e6}, {"1h": HOUR_S, "24h": DAY_S})
    found = told(counts, 2e6 * HOUR_S + 1e6 * 10 * HOUR_S)
    assert found.expected_s["1h"] == pytest.approx(HOUR_S, rel=0.01)
    assert found.expected_s["24h"] == pytest.approx(10 * HOUR_S, rel=0.02)
    assert found.shortfall.startswith("`24h` promises 1d, but")
    both_evicted = told(counts, 3e6 * HOUR_S / 2).expected_s
    assert both_evicted == {policy: pytest.approx(HOUR_S / 2, rel=0.01) for policy in ("1h", "24h")}


def test_the_size_that_a_warning_names_ends_it() -> None:
    counts = written({"24h": 12e6}, {"24h": DAY_S})
    found = told(counts, 100 * GIB)
    assert found.needed_bytes is not None
    words = re.search(r"`disk_size` = `([^`]+)` would do, it is `100 GiB`$", found.shortfall)
    assert words is not None, found.shortfall
    assert "11.44 MiB/s (of the last 1h)" in found.shortfall
    assert parse_bytes(words[1]) == pytest.approx(found.needed_bytes, rel=0.001)
    assert told(counts, found.needed_bytes).shortfall == ""
    assert told(counts, found.needed_bytes - 1e6).shortfall


def test_nothing_is_expected_before_the_rate_was_measured_for_a_while() -> None:
    counts = written({"24h": 1e9}, {"24h": DAY_S}, for_s=LEAST_MEASURED_S - 10)
    found = told(counts, GIB)
    assert (found.expected_s, found.needed_bytes, found.shortfall) == ({}, None, "")
    assert told(counts, GIB, NOW + 10).shortfall
    assert told(LifetimeCounts(), GIB).measured_s == 0.0


def test_the_write_rate_is_that_of_the_last_two_hours() -> None:
    counts = written({"24h": 1e6}, {"24h": DAY_S})
    later = told(counts, GIB, NOW + HOUR_S / 2)
    assert later.measured_s == 1.5 * HOUR_S
    assert later.write_bytes_per_s["24h"] == pytest.approx(1e6 / 1.5, rel=0.01)
    assert told(counts, GIB, NOW + HOUR_S).write_bytes_per_s == {}


def test_ages_are_told_to_within_a_twentieth_and_forgotten_after_two_days() -> None:
    counts, source = LifetimeCounts(), random.Random(0)
    ages = sorted(source.lognormvariate(8, 1.5) for _ in range(5000))
    for age in ages:
        counts.note_evicted("24h", NOW, computed_at=NOW - age)
    found = told(counts, GIB)
    assert found.num_evicted == {"24h": 5000}
    assert found.evicted_age_p1_s["24h"] == pytest.approx(ages[49], rel=0.05)
    assert found.evicted_age_p50_s["24h"] == pytest.approx(ages[2499], rel=0.05)
    counts.note_expired("24h", NOW + DAY_S)
    after = told(counts, GIB, NOW + DAY_S)
    assert (after.num_evicted, after.num_expired) == ({"24h": 5000}, {"24h": 1})
    assert NOW - DAY_S <= after.ages_since <= NOW
    assert told(counts, GIB, NOW + 3 * DAY_S).evicted_age_p1_s == {}


@pytest.mark.parametrize("age_s", [-5.0, 0.0, 1.0, math.exp(40)])
def test_any_age_has_a_bucket_and_the_memory_is_bounded(age_s: float) -> None:
    counts = LifetimeCounts()
    for i in range(1000):
        counts.note_evicted("24h", NOW, computed_at=NOW - age_s * (1 + i / 1000))
    assert len(msgspec.msgpack.encode(counts)) < 1500
    assert told(counts, GIB).evicted_age_p50_s["24h"] > 0


def fill(store: Store, clock: FakeClock, seconds: int, **changes: Any) -> None:
    """Store one block every ten seconds."""
    for _ in range(seconds // 10):
        now = clock.now()
        put(store, make_record(f"{now}", now=now, **changes))
        clock.advance(10)


def test_a_store_tells_how_old_its_blocks_became_also_after_a_restart(tmp_path: Path) -> None:
    clock = FakeClock()
    with open_store(tmp_path / "s", clock, budget_bytes=3 << 20) as store:
        fill(store, clock, 3000)
        before = store.stats()
        assert before.num_evicted > 0
        found = before.lifetimes
        assert found.num_evicted == {"24h": before.num_evicted}
        assert found.num_expired == {"24h": 0}
        kept_s = before.blocks * 10
        assert found.evicted_age_p50_s["24h"] == pytest.approx(kept_s, rel=0.15)
        assert found.expected_s["24h"] == pytest.approx(kept_s, rel=0.15)
        assert "`24h` promises 1d" in found.shortfall
    with open_store(tmp_path / "s", clock, budget_bytes=3 << 20) as store:
        assert store.stats().num_evicted == 0
        again = store.stats().lifetimes
        assert again.num_evicted == found.num_evicted
        assert again.evicted_age_p1_s == found.evicted_age_p1_s
        store.rebuild()  # which evicts to make room for the new index
        num_evicted = before.num_evicted + store.stats().num_evicted
        assert store.stats().lifetimes.num_evicted == {"24h": num_evicted}


def test_blocks_that_expire_or_are_deleted_are_not_evicted(tmp_path: Path) -> None:
    clock = FakeClock()
    with open_store(tmp_path / "s", clock) as store:
        fill(store, clock, 1000, expires_at=clock.now() + 1000)
        store.drop([make_record(f"{clock.now() - 1000}").block_hash], "operator")
        clock.advance(1000)
        sweep(store)
        found = store.stats().lifetimes
        assert found.num_expired == {"24h": 99}
        assert (found.num_evicted, found.evicted_age_p1_s) == ({"24h": 0}, {})
