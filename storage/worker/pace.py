"""How fast the worker may write: a tenth of the bytes beside reads, and never more than the limit.

Writes can wait, and reads cannot. Writes that got nothing would never end while there are reads,
and what is owed to the disk would be lost at a stop. The limit is the operator's, to spare the SSD.
This module knows bytes and time, and not what is written.
"""

import time
from collections.abc import Callable

WRITE_SHARE = 0.1
"""Share of all bytes that writes get while there are reads."""

QUIET_S = 0.02
"""Reads that follow each other within this time count as one stretch of reading."""

MAX_CREDIT_BYTES = 16 << 20
"""What writes may save up, so that no burst of them follows a long time with reads alone. What they
have saved is forgotten once they had the disk for themselves.
"""

Now = Callable[[], float]
"""A clock that never goes back."""


class WriteShare:
    """Counts bytes read and written; one thread reads, and one writes."""

    def __init__(self, now: Now = time.monotonic) -> None:
        self._now = now
        self._bytes_read = 0  # by the thread that reads
        self._read_at = float("-inf")
        self._bytes_seen = 0  # of `_bytes_read`, by the thread that writes
        self._credit = 0.0

    def note_read(self, num_bytes: int) -> None:
        """Note that a read begins (0 bytes), or that it has ended."""
        self._bytes_read += num_bytes
        self._read_at = self._now()

    @property
    def wait_s(self) -> float:
        """How long reads may go on before writes have the disk for themselves again."""
        return max(0.0, self._read_at + QUIET_S - self._now())

    def admits(self, num_bytes: int) -> bool:
        """Return whether a write of so many bytes may begin; if so, count it."""
        num_new, self._bytes_seen = self._bytes_read - self._bytes_seen, self._bytes_read
        earned = num_new * WRITE_SHARE / (1 - WRITE_SHARE)
        self._credit = min(self._credit + earned, max(MAX_CREDIT_BYTES, num_bytes))
        if not self.wait_s:
            self._credit = 0.0  # writes have the disk for themselves
            return True
        if self._credit < num_bytes:
            return False
        self._credit -= num_bytes
        return True


class WriteLimit:
    """A token bucket that admits `bytes_per_s` in the long run, and one second's worth at once.

    Args:
        bytes_per_s: the limit; 0 for none.
        now: the clock.
    """

    def __init__(self, bytes_per_s: int = 0, now: Now = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._now = now
        self._paid_until = 0.0  # when all bytes so far are paid for at this rate

    @property
    def wait_s(self) -> float:
        """How long the next write has to wait."""
        return max(0.0, self._paid_until - self._now() - 1.0)

    def admits(self, num_bytes: int) -> bool:
        """Return whether a write may begin; the one that empties the bucket may have any size."""
        if self.wait_s:
            return False
        if self._bytes_per_s:
            self._paid_until = max(self._paid_until, self._now()) + num_bytes / self._bytes_per_s
        return True

    def refund(self, num_bytes: int) -> None:
        """Take back what a write was charged that did not begin after all."""
        if self._bytes_per_s:
            self._paid_until -= num_bytes / self._bytes_per_s
