"""Wall-clock time that never runs backwards within a process.

Retention is counted in wall-clock seconds, because it must hold across restarts. A wall clock that
is set back would lengthen every life; so between readings the monotonic clock carries the time on,
and the wall clock may only push it forward.
"""

import math
import threading
import time

OFFSET_CHECK_S = 0.02


class Clock:
    """Tells the time; any thread may call it.

    Args:
        offset_file: for outside checks: a file that holds seconds to add to the wall clock, read
            again every 20 ms. Missing or malformed counts as 0.
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
        """Never answer less than `moment` from now on: a high-water mark of an earlier process."""
        with self._lock:
            self._rebase(moment, time.monotonic())

    def _rebase(self, moment: float, monotonic: float) -> float:
        """Return the time; a moment ahead of what the monotonic clock carried pushes it there."""
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
