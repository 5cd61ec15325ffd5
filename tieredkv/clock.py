"""Wall-clock time that never runs backwards within a process.

Retention is counted in wall-clock seconds, because it must hold across restarts. A wall clock that
is set back would keep every block longer. So the time advances with the monotonic clock, and the
wall clock can only move it forward.
"""

import math
import threading
import time

OFFSET_CHECK_S = 0.001


class Clock:
    """A clock that never runs backwards; any thread may call it.

    Args:
        offset_file: a file with the seconds to add to the wall clock, for tests from outside. It
            is read again every millisecond; a missing or malformed file counts as 0.
    """

    def __init__(self, offset_file: str | None = None) -> None:
        self._offset_file = offset_file
        self._offset_s = 0.0
        self._next_check = 0.0
        self._lock = threading.Lock()
        self._base_monotonic = time.monotonic()
        self._base_wall = time.time() + self._offset(self._base_monotonic)

    def now(self) -> float:
        """Return seconds since the epoch."""
        with self._lock:
            monotonic = time.monotonic()
            return self._rebase(time.time() + self._offset(monotonic), monotonic)

    def advance_to(self, moment: float) -> None:
        """Move the clock forward to `moment`, such as the latest time of an earlier process."""
        with self._lock:
            self._rebase(moment, time.monotonic())

    def _rebase(self, moment: float, monotonic: float) -> float:
        """Return the time; if `moment` is ahead of it, move the time forward to `moment` first."""
        carried = self._base_wall + (monotonic - self._base_monotonic)
        if moment > carried:
            self._base_wall, self._base_monotonic = moment, monotonic
            return moment
        return carried

    def _offset(self, monotonic: float) -> float:
        if self._offset_file is None or monotonic < self._next_check:
            return self._offset_s
        self._next_check = monotonic + OFFSET_CHECK_S
        try:
            with open(self._offset_file, encoding="ascii") as file:
                offset_s = float(file.read())
        except (OSError, ValueError):
            offset_s = 0.0
        self._offset_s = offset_s if math.isfinite(offset_s) else 0.0
        return self._offset_s
