"""The event loop of one thread of the worker.

It knows descriptors and calls, and nothing of a store.
"""

import os
import selectors
from collections import deque
from collections.abc import Callable
from functools import partial

from tieredkv.storage.ownership import OwningThread


class Loop:
    """The event loop of one thread: descriptors, and calls that other threads hand to it.

    Args:
        thread: is told of this thread, by the first call of `wait`.

    Attributes:
        is_busy: whether its thread does not wait for events; any thread may read it.
    """

    def __init__(self, thread: OwningThread | None = None) -> None:
        self._thread = thread or OwningThread()
        self.is_busy = False
        self.selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], object]] = deque()
        self._poke_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        heed_poke = partial(os.eventfd_read, self._poke_fd)
        self.selector.register(self._poke_fd, selectors.EVENT_READ, heed_poke)

    def hand(self, call: Callable[[], object]) -> None:
        """Have this loop's thread run `call`, in the order handed; any thread may call this."""
        self._calls.append(call)
        os.eventfd_write(self._poke_fd, 1)

    def owns(self) -> bool:
        """Return whether the calling thread is that of the loop, or the loop has none yet."""
        return self._thread.owns()

    def wait(self, timeout_s: float) -> None:
        """Wait for events or calls, at most `timeout_s`, and handle them."""
        self._thread.own()
        self.is_busy = False
        events = self.selector.select(timeout_s)
        self.is_busy = True
        for key, _ in events:
            key.data()
        for _ in range(len(self._calls)):
            self._calls.popleft()()
