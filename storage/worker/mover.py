"""Threads that move payloads between the engine's pages and the disk.

This module knows pages and threads; `reads` and `writes` know what is moved, and what comes next.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tieredkv.errors import StorageError
from tieredkv.storage.worker.loop import Loop
from tieredkv.wire.arena import HostArena

logger = logging.getLogger(__name__)

Move = Callable[[memoryview], None]
End = Callable[[StorageError | None], None]


@dataclass(frozen=True, slots=True)
class Mover:
    """Has payloads moved on other threads, for the thread of one loop.

    Args:
        threads: those that move payloads.
        arena: the memory of the pages; None if no engine lends any.
        loop: the loop of the thread that has payloads moved.
    """

    threads: ThreadPoolExecutor
    arena: HostArena | None
    loop: Loop

    def start(self, page_id: int, move: Move, end: End) -> None:
        """Have a thread call `move` with the page's bytes, and then the loop call `end`.

        `end` gets the error if `move` failed.
        """

        def move_page() -> None:
            assert self.arena is not None, "the engine lends no pages without an arena"
            move(self.arena.page(page_id))

        self.start_trial(move_page, end)

    def start_trial(self, move: Callable[[], None], end: End) -> None:
        """Do the same where `move` needs no page."""
        self.threads.submit(self._carry_out, move, end)

    def _carry_out(self, move: Callable[[], None], end: End) -> None:
        failed: StorageError | None = None
        try:
            move()
        except StorageError as error:
            failed = error
        except Exception as error:
            logger.exception("a payload could not be moved")
            failed = StorageError(f"a payload could not be moved: {error!r}")
        self.loop.hand(lambda: end(failed))
