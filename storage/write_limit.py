"""How fast the disk tier may write, to spare the SSD.

This module knows bytes and time. The service decides what is written, and what happens to writes
that have to wait.
"""

import time
from collections.abc import Callable


class WriteLimit:
    """A token bucket that admits `bytes_per_s` in the long run, and one second's worth at once.

    Args:
        bytes_per_s: the limit; 0 for none.
        now: a clock that never goes back.
    """

    def __init__(self, bytes_per_s: int = 0, now: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_s = bytes_per_s
        self._now = now
        self._paid_until = 0.0  # when all bytes so far are paid for at this rate

    def wait_s(self) -> float:
        """Return how long the next write has to wait."""
        return max(0.0, self._paid_until - self._now() - 1.0)

    def admits(self, num_bytes: int) -> bool:
        """Return whether a write may begin; the one that empties the bucket may have any size."""
        if is_free := not self.wait_s() and self.bytes_per_s > 0:
            self._paid_until = max(self._paid_until, self._now()) + num_bytes / self.bytes_per_s
        return is_free or not self.bytes_per_s

    def refund(self, num_bytes: int) -> None:
        """Take back what a write was charged that did not begin after all."""
        if self.bytes_per_s:
            self._paid_until -= num_bytes / self.bytes_per_s
