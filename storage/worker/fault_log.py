"""What the worker does about an error of the disk: it logs the first of each cause and goes on.

The store counts faults. This module decides only which of them are logged, and which end the
worker.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from tieredkv.errors import CorruptIndexError, StorageError, StoreFailedError

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class FaultLog:
    """Logs disk faults, each cause once; any thread may use it."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def attempt(self, cause: str, action: Callable[[], Answer]) -> Answer | None:
        """Call `action` and return its result; a disk fault is logged and gives None."""
        try:
            return action()
        except StorageError as error:
            self.report(cause, error)
            return None

    def note_works(self, cause: str) -> None:
        """Note that what failed works again, so that its next failure is logged once more."""
        if cause in self._reported:
            self._reported.discard(cause)
            logger.info("%s: works again", cause)

    def report(self, cause: str, error: Exception) -> None:
        """Log the first failure of each cause; later ones are only counted.

        Raises:
            CorruptIndexError, StoreFailedError: `error` itself, because the worker cannot go on.
        """
        if isinstance(error, CorruptIndexError | StoreFailedError):
            raise error
        if cause not in self._reported:
            self._reported.add(cause)
            logger.warning("%s: %s (further ones are only counted)", cause, error)
