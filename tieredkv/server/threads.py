"""A few threads that do the work on long requests, shared fairly among tenants.

This module knows which tenant the work belongs to, but not what the work is.
"""

import asyncio
import contextlib
import ctypes
import gc
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

NUM_THREADS = 4
NUM_ARENAS = 2
_M_ARENA_MAX = -8  # the parameter's number in <malloc.h> of glibc
TRIM_AFTER_S = 1.0

Result = TypeVar("Result")


class CancelledWorkError(Exception):
    """The work was stopped, because its client has gone or the server is shutting down."""


class Cancellation(threading.Event):
    """A flag that is set once the result of some work is no longer wanted."""

    def check(self) -> None:
        """Raise an error if the result of the work is no longer wanted.

        Raises:
            CancelledWorkError: the result is no longer wanted.
        """
        if self.is_set():
            raise CancelledWorkError


class FairThreads:
    """A few threads in which tenants have their work done in turns; used on one event loop.

    Waiting tenants take turns, however much work each of them has. One tenant never holds all of
    several threads, so that the work of a second tenant can begin at once.

    Args:
        num_threads: the number of threads; with 1, the work is done one after the other.
    """

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="requests")
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, in order of turns
        self._running: Counter[str] = Counter()
        self._cancellations: set[Cancellation] = set()
        self._trimming: asyncio.TimerHandle | None = None

    async def run(self, tenant: str, work: Callable[[Cancellation], Result]) -> Result:
        """Do the work in a thread and return its result. If this call is cancelled, the work stops.

        Raises:
            CancelledWorkError: the work was stopped, because the threads were closed.
        """
        await self._wait_for_turn(tenant)
        loop, cancellation = asyncio.get_running_loop(), Cancellation()
        self._cancellations.add(cancellation)

        def end(done: asyncio.Future[Result]) -> None:
            done.cancelled() or done.exception()  # otherwise asyncio logs it as never retrieved
            self._cancellations.discard(cancellation)
            self._give_back(tenant)

        running = loop.run_in_executor(self._executor, work, cancellation)
        running.add_done_callback(end)
        try:
            return await asyncio.shield(running)
        finally:
            cancellation.set()

    def close(self) -> None:
        """Tell all work to stop, and end the threads without waiting for them."""
        if self._trimming is not None:
            self._trimming.cancel()
        for cancellation in self._cancellations:
            cancellation.set()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _wait_for_turn(self, tenant: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._give_turns()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(tenant)
            else:
                with contextlib.suppress(KeyError, ValueError):
                    self._waiting[tenant].remove(turn)
                    if not self._waiting[tenant]:
                        del self._waiting[tenant]
            raise

    def _give_turns(self) -> None:
        while self._running.total() < self._num_threads:
            most = max(1, self._num_threads - 1)
            may_run = (it for it in self._waiting if self._running[it] < most)
            if (tenant := next(may_run, None)) is None:
                return
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # after the other tenants
            if not turn.done():
                self._running[tenant] += 1
                turn.set_result(None)

    def _give_back(self, tenant: str) -> None:
        self._running[tenant] -= 1
        self._running += Counter()  # drops tenants with no running work
        self._give_turns()
        if self._trimming is not None:
            self._trimming.cancel()
        loop = asyncio.get_running_loop()
        self._trimming = loop.call_later(TRIM_AFTER_S, self._trim, loop)

    def _trim(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give memory back to the system once the threads are idle."""
        self._trimming = None
        if not self._running:
            with contextlib.suppress(RuntimeError):  # the threads have just been closed
                loop.run_in_executor(self._executor, trim_memory)


def bound_arenas() -> None:
    """Have glibc allocate from few arenas; call it before threads are started.

    By default each thread gets an arena of its own, and what is still allocated in one keeps the
    memory around it from being returned.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, NUM_ARENAS)


def trim_memory() -> None:
    """Collect garbage, and return freed memory to the system.

    Memory is returned explicitly because glibc keeps memory freed by many threads in its arenas.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
