"""Cache faults by reason. Each was a miss, a block not stored, or an index that was made again."""

import logging
import threading
from collections import Counter
from collections.abc import Mapping

from tieredkv.errors import CorruptBlockError, StoreFullError

logger = logging.getLogger(__name__)


class Faults:
    """Counts the faults of one store and logs the first of each reason; any thread may use it.

    Args:
        before: those counted before the store was opened.
    """

    def __init__(self, before: Mapping[str, int]) -> None:
        self._counts = Counter(before)
        self._lock = threading.Lock()
        self._reported: set[str] = set()

    def add(self, counts: Mapping[str, int]) -> None:
        """Add faults that were logged where they were found."""
        with self._lock:
            self._counts.update(counts)

    def note(self, error: BaseException) -> str:
        """Count a fault and return its reason."""
        reason = reason_of(error)
        with self._lock:
            self._counts[reason] += 1
            is_new = reason not in self._reported
            self._reported.add(reason)
        if is_new:
            logger.warning("disk tier: %s: %s (further ones are only counted)", reason, error)
        return reason

    @property
    def counts(self) -> dict[str, int]:
        """The faults so far."""
        with self._lock:
            return dict(self._counts)


def reason_of(error: BaseException) -> str:
    """Return the name by which a fault is counted."""
    if isinstance(error, CorruptBlockError):
        return error.reason
    return "no_space" if isinstance(error, StoreFullError) else "io_error"
