"""Keeps one worker process serving a store: starts it, judges how it ends, starts the next one.

This module knows when a worker process lives and when it takes messages. It does not know what the
messages between the engine and the worker are about: those go to a `Customer`.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from tieredkv.errors import StorageError, StoreBusyError, TieredKVError
from tieredkv.storage.folder.folder import trouble_with
from tieredkv.storage.folder.lock import hold_for_engine
from tieredkv.storage.messages.engine import (
    CloseCall,
    IndexSetAside,
    IndexStart,
    WorkerMessage,
    WorkerUp,
)
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.worker.process import WorkerEnd, WorkerProcess
from tieredkv.wire.arena import HostArena
from tieredkv.wire.channel import FrameChannel
from tieredkv.wire.limits import described
from tieredkv.wire.process import Refused

logger = logging.getLogger(__name__)

_HEALTHY_S = 2.0  # a worker that served this long is restarted after the shortest pause again
_PROVEN_S = 60.0  # an index that was made again and served this long may be made again once more
_BUSY_POLL_S = 0.2


class Customer(Protocol):
    """Whoever a store is served for; its methods are called under the supervisor's lock."""

    def hear_start(self, started: WorkerUp, *, is_restart: bool) -> None:
        """Take note that a worker serves the store from now on, and what it says first."""

    def hear(self, message: WorkerMessage) -> None:
        """Take a message of the worker."""

    def hear_end(self) -> None:
        """Take note that no worker process exists any more."""


class Supervisor:
    """Starts workers until `close()`, by the rules of `tieredkv.storage.index.verdicts`.

    A thread of its own receives, judges and restarts. It calls `wake`, without the lock, when the
    customer has heard something.

    Attributes:
        lock: guards the attributes, and what the customer keeps of the worker.
        channel: to the worker, while that takes messages.
        trouble: why no worker serves the store; empty while one does.
    """

    def __init__(
        self, options: StoreOptions, arena: HostArena, customer: Customer, wake: Callable[[], None]
    ) -> None:
        # Absolute, or a restart after a change of folder would open another store.
        self._options = replace(options, path=os.path.abspath(options.path))
        self._arena, self._customer, self._wake = arena, customer, wake
        self.lock = threading.Lock()
        self.channel: FrameChannel[WorkerMessage] | None = None
        self.trouble = ""
        self._worker: WorkerProcess | None = None  # until it is reaped
        self._up_at: float | None = None  # when the worker of now began to serve
        self._refused: TieredKVError | None = None  # by the worker process of now
        self._index: IndexStart = "as_it_is"  # at the next start
        self._is_unproven = False  # the index was made again and has not served for long
        self._folder = _HeldFolder(self._options.path)
        self._failure: TieredKVError | None = None  # for good
        self._started = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tieredkv-store", daemon=True)

    def start(self) -> None:
        """Start the first worker; wait until it serves the store, or ended without saying why.

        Raises:
            StorageError, StoreBusyError, FormatVersionError, ConfigError: what it refused with.
        """
        self._thread.start()
        try:
            self._started.wait()
        except BaseException:  # Ctrl-C while a large store opens
            self.close(timeout_s=0)
            raise
        if self._failure is not None:
            self.close(timeout_s=None)
            raise self._failure

    @property
    def pid(self) -> int | None:
        """Process id of the worker, while it takes messages; under the lock."""
        return None if self._worker is None or self.channel is None else self._worker.pid

    def give_up(self, why: str) -> None:
        """Kill the worker that serves the store, if one does; under the lock.

        Args:
            why: what the worker does wrong, for the log.
        """
        if self._worker is not None and self.channel is not None:
            logger.error("store worker %d %s and is killed", self._worker.pid, why)
            self.channel = None
            self._worker.kill()

    def close(self, timeout_s: float | None) -> None:
        """Let the worker finish its writes and end, and start no other; twice is fine.

        Args:
            timeout_s: after this time it is killed; None to wait for as long as it takes.
        """
        with self.lock:
            self._stop.set()
            if self.channel is not None:
                self.channel.send(CloseCall())
                self.channel = None
            elif self._worker is not None:  # it does not serve the store yet, or was given up
                self._worker.kill()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with self.lock:
                if self._worker is not None:
                    logger.warning("store worker %d did not stop and is killed", self._worker.pid)
                    self._worker.kill()
            self._thread.join(timeout_s or None)
        if self._thread.is_alive():
            logger.error("the store worker cannot be killed; its pages stay on loan")

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._keep_serving()
        except Exception as error:
            logger.exception("the store client failed; the disk tier is off")
            self.trouble = f"the store client failed: {error!r}"
            self._failure = self._failure or StorageError(self.trouble)
        finally:
            self._folder.let_go()
            self._started.set()

    def _keep_serving(self) -> None:
        backoff_s = self._options.backoff_s
        busy_until = time.monotonic() + self._options.busy_patience_s
        while not self._stop.is_set():
            index = self._index
            end, served_s = self._serve(index)
            reason = self._judge(end, index, served_s)
            with self.lock:
                self._worker, self.trouble = None, reason
                self._customer.hear_end()
            self._wake()
            if self._stop.is_set():
                return
            if not self._started.is_set():
                if isinstance(self._refused, StoreBusyError) and time.monotonic() < busy_until:
                    self._stop.wait(_BUSY_POLL_S)
                    continue
                if self._refused is not None and not (end.is_damage or end.is_unexplained):
                    self._failure = self._refused
                    return
                if self._index not in ("as_it_is", index):
                    continue  # what may help is tried before the engine starts without this tier
                self._started.set()
            if served_s >= _HEALTHY_S:
                backoff_s = self._options.backoff_s
            text = "the store worker is down and is started again in %.1f s: %s"
            logger.warning(text, backoff_s, reason)
            self._stop.wait(backoff_s)
            backoff_s = min(2 * backoff_s, self._options.max_backoff_s)

    def _serve(self, index: IndexStart) -> tuple[WorkerEnd, float]:
        """Start a worker and talk to it; return how it ended, and for how many seconds it served.

        It is dead and reaped then.
        """
        self._refused = self._up_at = None
        options = replace(
            self._options, create=self._options.create and self._folder.may_become_a_store()
        )
        try:
            worker = WorkerProcess(options, self._arena, index=index)
        except OSError as error:  # no process, no descriptor, no memory left
            text = f"the store worker cannot be started: {described(error)}"
            return WorkerEnd(False, False, text), 0.0
        with self.lock:
            self._worker = worker
            if self._stop.is_set():
                worker.kill()
        try:
            while True:
                received = worker.channel.receive(None)
                with self.lock:
                    for message in received:
                        self._take(message, worker)
                self._wake()
        except EOFError:
            pass
        except StorageError as error:
            logger.error("store worker %d sent invalid data and is killed: %s", worker.pid, error)
            worker.kill()
        finally:
            with self.lock:
                self.channel = None
        served_s = 0.0 if self._up_at is None else time.monotonic() - self._up_at
        return worker.bury(), served_s

    def _take(self, message: WorkerMessage, worker: WorkerProcess) -> None:
        match message:
            case Refused():
                self._refused = message.error
            case IndexSetAside(text):
                self._index = "as_it_is"
                logger.warning("%s", text)
            case WorkerUp() if not self._stop.is_set():
                self._up_at = time.monotonic()
                self.channel, self.trouble = worker.channel, ""
                self._folder.hold_served()
                self._customer.hear_start(message, is_restart=self._started.is_set())
                self._started.set()
            case _:
                self._customer.hear(message)

    def _judge(self, end: WorkerEnd, index: IndexStart, served_s: float) -> str:
        """Decide what the next worker does with the index; return why the last one ended."""
        self._is_unproven &= served_s < _PROVEN_S
        reason = str(self._refused or end.text)
        if self._refused is None and (cause := trouble_with(self._options.path)):
            reason = f"{cause} (before that, {reason})"
        if served_s:
            self._index = "as_it_is"
        if end.is_damage and self._is_unproven:
            self._index = "as_it_is"
            reason = f"the index was rebuilt and is damaged again: {reason}"
        elif end.is_damage:
            self._index, self._is_unproven = "set_aside", True
        elif end.is_unexplained and self._index != "set_aside":
            was_examined = index == "examined" and not served_s
            self._index = "as_it_is" if was_examined else "examined"
        if end.is_damage or end.is_unexplained:
            logger.error("the store worker of `%s` failed: %s", self._options.path, reason)
        return reason


class _HeldFolder:
    """The folder at a path: the one wanted at first, and later the one that was served last.

    It is held so that a verb knows of the engine while that has no worker: see `hold_for_engine`.
    """

    def __init__(self, path: str) -> None:
        self._path, self._fd, self._is_served = path, -1, False

    def may_become_a_store(self) -> bool:
        """Return whether a start may make a new store at the path.

        It may not where the store that was served was moved away or unmounted, as that one may
        come back. It may where the store was removed or emptied.
        """
        if not self._is_served:
            self._hold()
            return True
        if self._fd < 0 or (served := os.fstat(self._fd)).st_nlink == 0:
            return True
        with contextlib.suppress(OSError):
            return os.path.samestat(served, os.stat(self._path))
        return False

    def hold_served(self) -> None:
        """Hold what is at the path now, as a worker serves it."""
        self._is_served = True
        self._hold()

    def _hold(self) -> None:
        before, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            self._fd = hold_for_engine(self._path)
        if before >= 0:  # only now, so that the folder is held all the time
            os.close(before)

    def let_go(self) -> None:
        """Hold no folder any more."""
        if self._fd >= 0:
            os.close(self._fd)
