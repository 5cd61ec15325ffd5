import os
import threading
import time
from pathlib import Path

from tests.fakes import FakeClock
from tieredkv.clock import OFFSET_CHECK_INTERVAL_S, Clock


class Hands:
    """The two sources that a Clock reads, moved by hand."""

    def __init__(self, wall: float = 1000.0, elapsed: float = 50.0) -> None:
        self.wall = wall
        self.elapsed = elapsed

    def clock(self, offset_file: Path | None = None) -> Clock:
        name = None if offset_file is None else str(offset_file)
        return Clock(name, wall=lambda: self.wall, elapsed=lambda: self.elapsed)

    def pass_(self, seconds: float) -> None:
        self.wall += seconds
        self.elapsed += seconds


def test_now_is_the_wall_clock() -> None:
    before = time.time()
    now = Clock().now()
    assert before <= now <= time.time() + 1.0


def test_a_wall_clock_set_back_goes_on_by_elapsed_seconds() -> None:
    hands = Hands()
    clock = hands.clock()
    assert clock.now() == 1000.0
    hands.wall -= 600.0
    assert clock.now() == 1000.0
    hands.pass_(5.0)
    assert clock.now() == 1005.0


def test_a_wall_clock_set_ahead_is_followed_and_not_undone() -> None:
    hands = Hands()
    clock = hands.clock()
    clock.now()
    hands.wall = 5000.0
    assert clock.now() == 5000.0
    hands.wall = 1000.0
    hands.pass_(1.0)
    assert clock.now() == 5001.0


def test_a_high_water_mark_is_never_undercut_and_time_goes_on_from_it() -> None:
    hands = Hands()
    clock = hands.clock()
    clock.advance_to(1300.0)
    assert clock.now() == 1300.0
    hands.pass_(10.0)
    assert clock.now() == 1310.0
    clock.advance_to(1200.0)
    assert clock.now() == 1310.0


def test_the_offset_file_turns_the_clock_and_is_read_again_when_it_changes(tmp_path: Path) -> None:
    hands, path = Hands(), tmp_path / "offset"
    clock = hands.clock(path)
    assert clock.now() == 1000.0, "a missing file is no offset"
    path.write_text("86400\n")
    assert clock.now() == 1000.0, "looked at only every 20 ms"
    hands.pass_(OFFSET_CHECK_INTERVAL_S)
    assert clock.now() == 1000.0 + OFFSET_CHECK_INTERVAL_S + 86400
    path.write_text("90000.5")
    hands.pass_(OFFSET_CHECK_INTERVAL_S)
    assert clock.now() == 1000.0 + 2 * OFFSET_CHECK_INTERVAL_S + 90000.5


def test_an_equally_long_offset_put_in_place_by_rename_is_seen(tmp_path: Path) -> None:
    hands, path = Hands(), tmp_path / "offset"
    path.write_text("100")
    clock = hands.clock(path)
    assert clock.now() == 1100.0
    (tmp_path / "new").write_text("200")
    os.utime(tmp_path / "new", ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    (tmp_path / "new").replace(path)
    hands.pass_(1.0)
    assert clock.now() == 1201.0


def test_an_unreadable_offset_leaves_the_last_one(tmp_path: Path) -> None:
    hands, path = Hands(), tmp_path / "offset"
    path.write_text("100")
    clock = hands.clock(path)
    clock.now()
    for text in ("", "soon", "nan", "inf", "\x00"):
        path.write_text(text)
        hands.pass_(1.0)
        assert clock.now() == hands.wall + 100.0
    path.write_bytes(b"\xff\xfe")
    hands.pass_(1.0)
    assert clock.now() == hands.wall + 100.0


def test_a_smaller_offset_does_not_turn_time_back(tmp_path: Path) -> None:
    hands, path = Hands(), tmp_path / "offset"
    path.write_text("3600")
    clock = hands.clock(path)
    assert clock.now() == 4600.0
    path.write_text("0")
    hands.pass_(1.0)
    assert clock.now() == 4601.0


def test_threads_never_see_time_run_backwards() -> None:
    clock = Clock()
    backwards: list[tuple[float, float]] = []

    def watch() -> None:
        last = 0.0
        for _ in range(2000):
            now = clock.now()
            if now < last:
                backwards.append((last, now))
            last = now

    threads = [threading.Thread(target=watch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for i in range(50):
        clock.advance_to(time.time() + i)
    for thread in threads:
        thread.join()
    assert backwards == []


def test_the_fake_clock_moves_only_when_told() -> None:
    clock = FakeClock(100.0)
    assert clock.now() == clock.now() == 100.0
    clock.advance(2.5)
    assert clock.now() == 102.5
    clock.advance_to(50.0)
    assert clock.now() == 102.5
    clock.set(50.0)
    assert clock.now() == 50.0
