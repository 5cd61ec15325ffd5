"""When the store is swept: at once after its start, then again and again, step by step.

`BlockStore.sweeping` knows what a sweep does.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tieredkv.storage.ownership import owned_by
from tieredkv.storage.store import BlockStore
from tieredkv.storage.worker.fault_log import FaultLog

_OVER = object()


@dataclass(eq=False)
class Sweeper:
    """Sweeps one store; only the index thread uses it.

    Args:
        store: the store.
        interval_s: from the beginning of a sweep to that of the next.
        log: told of failures.
        begin: called before each sweep.
    """

    store: BlockStore
    interval_s: float
    log: FaultLog
    begin: Callable[[], None]
    _steps: Iterator[None] | None = None
    _next_at: float = 0.0  # at once: blocks may have expired while no worker ran

    @property
    @owned_by("store.thread")
    def wait_s(self) -> float:
        """Seconds until there is something to do."""
        return 0.0 if self._steps is not None else max(0.0, self._next_at - time.monotonic())

    @owned_by("store.thread")
    def step(self) -> None:
        """Begin a sweep if one is due; take one step of a sweep under way."""
        if self._steps is None:
            if self.wait_s > 0:
                return
            self.begin()
            self._next_at = time.monotonic() + self.interval_s
            self._steps = self.store.sweeping()
        steps = self._steps
        if self.log.attempt("sweep", lambda: next(steps, _OVER)) is _OVER:
            self._steps = None
