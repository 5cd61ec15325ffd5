"""Wall-clock time that never runs backwards within a process.

Retention is counted in wall-clock seconds, because it must hold across restarts. A wall clock that
is set back would lengthen every life; so between readings the monotonic clock carries the time on,
and the wall clock may only push it forward.
"""

import os
import time

OFFSET_CHECK_S = 0.02


class Clock:
    """Tells the time; any thread may call it.

    Args:
        offset_file: for outside checks: a file that holds seconds to add to the wall clock, read
            again when it changes. Missing or malformed counts as 0.
    """

    def __init__(self, offset_file: str | None = None) -> None:
        self._offset_file = offset_file
        self._offset_s = 0.0
        self._offset_stamp: tuple[int, int] | None = None
        self._next_check = 0.0
        self._base_wall = time.time()
        self._base_monotonic = time.monotonic()

    def now(self) -> float:
        """Return seconds since the epoch."""
        monotonic = time.monotonic()
        carried = self._base_wall + (monotonic - self._base_monotonic)
        wall = time.time() + self._offset(monotonic)
        if wall > carried:
            self._base_wall, self._base_monotonic = wall, monotonic
            return wall
        return carried

    def advance_to(self, moment: float) -> None:
        """Never answer less than `moment` from now on: a high-water mark of an earlier process."""
        monotonic = time.monotonic()
        if moment > self._base_wall + (monotonic - self._base_monotonic):
            self._base_wall, self._base_monotonic = moment, monotonic

    def _offset(self, monotonic: float) -> float:
        if self._offset_file is None or monotonic < self._next_check:
            return self._offset_s
        self._next_check = monotonic + OFFSET_CHECK_S
        try:
            status = os.stat(self._offset_file)
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp != self._offset_stamp:
                with open(self._offset_file, encoding="ascii") as file:
                    self._offset_s = float(file.read().strip() or 0.0)
                self._offset_stamp = stamp
        except (OSError, ValueError):
            self._offset_s = 0.0
        return self._offset_s
