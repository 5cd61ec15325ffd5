"""Wall-clock time that never runs backwards.

Knows the only time functions of the project and the offset file by which outside checks turn the
clock. Does not know what expires, nor when.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

OFFSET_CHECK_INTERVAL_S = 0.020


def _elapsed() -> float:
    """Return seconds since boot, those spent suspended included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Clock:
    """Tell the wall-clock time, in seconds since the epoch.

    A wall clock that is set back does not lengthen a life: from there on time goes on by elapsed
    seconds until the wall has caught up. Any thread may call.

    Invariants:
        - `now()` never answers less than it, or `advance_to()`, said before in this process.
        - Time goes on at least as fast as elapsed seconds do.
    """

    def __init__(
        self,
        offset_file: str | None = None,
        *,
        wall: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = _elapsed,
    ) -> None:
        """Start at the wall's time.

        Args:
            offset_file: holds seconds to add to the wall clock, as text; read again whenever it
                changes. A missing or unreadable file leaves the offset as it was, 0 at first.
            wall: seconds since the epoch; may jump.
            elapsed: seconds since any moment; must not jump.
        """
        self._wall = wall
        self._elapsed = elapsed
        self._lock = threading.Lock()
        self._offset_file = offset_file
        self._offset_s = 0.0
        self._offset_stat: tuple[int, int, int] | None = None
        self._next_offset_check = -math.inf
        self._base = -math.inf
        self._base_elapsed = elapsed()

    def now(self) -> float:
        """Return the time, in seconds since the epoch."""
        with self._lock:
            elapsed = self._elapsed()
            if self._offset_file is not None and elapsed >= self._next_offset_check:
                self._next_offset_check = elapsed + OFFSET_CHECK_INTERVAL_S
                self._read_offset(self._offset_file)
            wall = self._wall() + self._offset_s
            steady = self._base + (elapsed - self._base_elapsed)
            if wall > steady:
                self._base, self._base_elapsed = wall, elapsed
            return max(wall, steady)

    def advance_to(self, t: float) -> None:
        """Make `t` a high-water mark: `now()` never answers less, and goes on from there."""
        now = self.now()
        with self._lock:
            elapsed = self._elapsed()
            steady = self._base + (elapsed - self._base_elapsed)
            if t > max(now, steady):
                self._base, self._base_elapsed = t, elapsed

    def _read_offset(self, path: str) -> None:
        # NOTE: stat before read. Bytes newer than the stat are read once more; never the reverse.
        try:
            stat = os.stat(path)
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if seen == self._offset_stat:
                return
            with open(path, encoding="utf-8") as file:
                offset_s = float(file.read())
            if not math.isfinite(offset_s):
                raise ValueError("not a finite number")
        except (OSError, ValueError) as error:
            # A writer may be half way; the file is read again once its stat changes.
            logger.debug("clock offset file %s is not readable: %s", path, error)
            return
        self._offset_stat = seen
        if offset_s != self._offset_s:
            logger.info("clock offset is now %s s", offset_s)
            self._offset_s = offset_s
