"""The clock follows the wall clock but never runs backwards."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes import FakeClock
from tieredkv.clock import OFFSET_CHECK_S, Clock

TOLERANCE_S = 30.0
"""Offsets in these tests are much larger, so that a busy machine cannot fail them."""


@pytest.fixture
def offset_file(tmp_path: Path) -> Path:
    return tmp_path / "offset"


def after_check(clock: Clock) -> float:
    """Wait until the clock must read its offset file again, and return its time."""
    time.sleep(OFFSET_CHECK_S * 1.5)
    return clock.now()


def is_about(moment: float, expected: float) -> bool:
    return abs(moment - expected) < TOLERANCE_S


def test_it_tells_the_wall_clock() -> None:
    before = time.time()
    assert before <= Clock().now() < before + TOLERANCE_S


def test_it_never_runs_backwards_and_does_run() -> None:
    clock = Clock()
    first = clock.now()
    readings = [clock.now() for _ in range(1000)]
    assert readings == sorted(readings)
    time.sleep(0.005)
    assert clock.now() >= first + 0.005


def test_it_goes_on_when_the_wall_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    before = clock.now()
    monkeypatch.setattr(time, "time", lambda: before - 7200)
    at_once = clock.now()
    time.sleep(0.005)
    assert before <= at_once < clock.now() < before + TOLERANCE_S


def test_it_follows_a_wall_clock_that_is_set_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    ahead = clock.now() + 7200
    monkeypatch.setattr(time, "time", lambda: ahead)
    assert clock.now() == ahead


def test_advance_to_is_a_high_water_mark_from_which_it_runs_on() -> None:
    clock = Clock()
    mark = clock.now() + 7200
    clock.advance_to(mark)
    first = clock.now()
    assert mark <= first < mark + TOLERANCE_S
    time.sleep(0.005)
    assert clock.now() >= first + 0.005


def test_advance_to_a_moment_that_has_passed_changes_nothing() -> None:
    clock = Clock()
    clock.advance_to(clock.now() - 7200)
    assert is_about(clock.now(), time.time())


def test_the_offset_file_is_added_to_the_wall_clock(offset_file: Path) -> None:
    offset_file.write_text("86400.5\n")
    assert is_about(Clock(str(offset_file)).now(), time.time() + 86400.5)


@pytest.mark.parametrize("content", ["", "tomorrow", "1h", "nan", "inf", "-inf", "9" * 400, "1\n2"])
def test_a_malformed_offset_counts_as_none(offset_file: Path, content: str) -> None:
    offset_file.write_text(content)
    assert is_about(Clock(str(offset_file)).now(), time.time())


def test_an_offset_file_that_is_not_text_or_not_a_file_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "binary", tmp_path, tmp_path / "absent" / "offset"):
        assert is_about(Clock(str(path)).now(), time.time())


def test_an_offset_file_may_appear_and_change_while_the_clock_runs(offset_file: Path) -> None:
    clock = Clock(str(offset_file))
    assert is_about(clock.now(), time.time())
    offset_file.write_text("3600")
    assert is_about(after_check(clock), time.time() + 3600)
    offset_file.write_text("7200")
    assert is_about(after_check(clock), time.time() + 7200)


def test_a_change_is_seen_even_if_size_and_mtime_stay(offset_file: Path) -> None:
    offset_file.write_text("3600")
    clock = Clock(str(offset_file))
    clock.now()
    stamp = offset_file.stat().st_mtime_ns
    offset_file.write_text("7200")
    os.utime(offset_file, ns=(stamp, stamp))
    assert is_about(after_check(clock), time.time() + 7200)


def test_an_offset_file_that_comes_back_counts_again(
    offset_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset_file.write_text("3600")
    clock = Clock(str(offset_file))
    clock.now()
    offset_file.rename(tmp_path / "away")
    after_check(clock)
    (tmp_path / "away").rename(offset_file)
    ahead = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: ahead)
    assert is_about(after_check(clock), ahead + 3600)


@pytest.mark.parametrize(
    "turn_back",
    [
        lambda path: path.write_text("0"),
        lambda path: path.write_text("-86400"),
        lambda path: path.write_text("oops"),
        Path.unlink,
    ],
    ids=["zero", "negative", "malformed", "absent"],
)
def test_an_offset_that_is_taken_back_does_not_turn_the_clock_back(
    offset_file: Path, turn_back: Callable[[Path], object]
) -> None:
    offset_file.write_text("3600")
    clock = Clock(str(offset_file))
    ahead = clock.now()
    turn_back(offset_file)
    first = after_check(clock)
    assert first >= ahead + OFFSET_CHECK_S
    assert is_about(first, ahead)
    time.sleep(0.005)
    assert clock.now() >= first + 0.005


def test_threads_together_never_see_it_run_backwards_or_lose_a_mark() -> None:
    clock = Clock()
    failures: list[str] = []

    def read(mark: float) -> None:
        last = 0.0
        for index in range(2000):
            if index == 1000:
                clock.advance_to(mark)
            moment = clock.now()
            if moment < last or (index >= 1000 and moment < mark):
                failures.append(f"{moment} after {last}, mark {mark}")
            last = moment

    start = clock.now()
    threads = [threading.Thread(target=read, args=(start + 1e4 * n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert is_about(clock.now(), start + 4e4)


def test_the_fake_clock_stands_still_until_it_is_told_to_move() -> None:
    clock = FakeClock(100.0)
    assert clock.now() == clock.now() == 100.0
    clock.advance(2.5)
    assert clock.now() == 102.5
    clock.advance_to(50.0)
    assert clock.now() == 102.5
    clock.advance_to(200.0)
    assert clock.now() == 200.0
    clock.moment = 10.0
    assert clock.now() == 10.0
