"""The event loop of one thread of the worker, and what it has other threads do.

It knows descriptors and calls, and nothing of a store.
"""

import logging
import os
import selectors
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tieredkv.errors import StorageError
from tieredkv.storage.ownership import OwningThread

logger = logging.getLogger(__name__)

_PATIENCE_S = 0.003  # beside a thread that is never idle, other work goes on after this time
_POLL_S = 0.0005


class Loop:
    """The event loop of one thread: descriptors, and calls that other threads hand to it.

    Args:
        thread: is told of this thread, by the first call of `wait`.
    """

    def __init__(self, thread: OwningThread | None = None) -> None:
        self._thread = thread or OwningThread()
        self._is_busy = False  # its thread does not wait for events
        self.selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], object]] = deque()
        self._poke_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        heed_poke = partial(os.eventfd_read, self._poke_fd)
        self.selector.register(self._poke_fd, selectors.EVENT_READ, heed_poke)

    def owns(self) -> bool:
        """Return whether the calling thread is that of the loop, or the loop has none yet."""
        return self._thread.owns()

    def wait(self, timeout_s: float) -> None:
        """Wait for events or calls, at most `timeout_s`, and handle them."""
        self._thread.own()
        self._is_busy = False
        events = self.selector.select(timeout_s)
        self._is_busy = True
        for key, _ in events:
            key.data()
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    # --- for any thread -------------------------------------------------------------------------

    def hand(self, call: Callable[[], object]) -> None:
        """Have this loop's thread run `call`, in the order handed."""
        self._calls.append(call)
        os.eventfd_write(self._poke_fd, 1)

    def have_done(
        self,
        threads: ThreadPoolExecutor,
        work: Callable[[], object],
        end: Callable[[StorageError | None], object],
    ) -> None:
        """Have one of `threads` call `work`, and then this loop's thread `end`.

        `end` gets the error if `work` failed.
        """

        def carry_out() -> None:
            failed: StorageError | None = None
            try:
                work()
            except StorageError as error:
                failed = error
            except Exception as error:
                logger.exception("a payload could not be moved")
                failed = StorageError(f"a payload could not be moved: {error!r}")
            self.hand(lambda: end(failed))

        threads.submit(carry_out)

    def give_way(self) -> None:
        """Wait until this loop's thread is idle, but not for ever.

        Python runs one thread at a time. A lookup of hundreds of blocks gives the interpreter away
        and asks for it again at each of them, so a thread that never rests makes it wait that
        often. Long work is therefore done in short steps, and none of them begins while the front
        thread is at work.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while self._is_busy and time.monotonic() < deadline:
            time.sleep(_POLL_S)
