"""Connects the threads of the soak with the store's client.

This module knows which thread waits for which page or lookup, and when a worker starts. It does not
know which answers are right.
"""

import contextlib
import os
import queue
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

from tieredkv.storage.client.client import StoreClient
from tieredkv.storage.options import StoreOptions
from tieredkv.tier import ControlRequest, Lent, Loaded, LookupDone, Restarted, Stored
from tieredkv.wire.arena import HostArena

_POLL_S = 0.02
_PATIENCE_S = 60.0
_COUNTERS = ("num_stored", "num_expired", "num_evicted", "bytes_written", "bytes_read")


class Gate:
    """Lets threads in while it is open. A thread that shuts it waits until nobody is inside."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._num_shut = 0

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Be inside while the context lasts; wait first until the gate is open."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_shut == 0)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def shut(self) -> Iterator[None]:
        """Keep all threads out while the context lasts. Several threads may shut it at once."""
        with self._changed:
            self._num_shut += 1
            self._changed.wait_for(lambda: self._num_inside == 0)
        try:
            yield
        finally:
            with self._changed:
                self._num_shut -= 1
                self._changed.notify_all()


class Courier:
    """Holds the store's client, and passes the client's events on to the threads that wait.

    The client is closed and opened again when the soak restarts the worker.

    Attributes:
        tally, faults: Counters of all workers together. Each worker is counted up to the last
            figures that it sent.
        num_starts: How many workers have started to serve.
    """

    def __init__(self, options: StoreOptions, pages_each: int, num_users: int, page_bytes: int):
        self.options = options
        self.arena = HostArena(pages_each * num_users, page_bytes)
        self.tally: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.num_starts = 0
        self._pages_each = pages_each
        self._inboxes: list[queue.SimpleQueue[Loaded | Stored]] = [
            queue.SimpleQueue() for _ in range(num_users)
        ]
        self._answers: dict[int, LookupDone] = {}
        self._answered = threading.Condition()
        self._seen: dict[str, int] = {}
        self._wake = threading.Event()
        self._taking = threading.Lock()
        self._is_over = False
        self._client: StoreClient | None = None
        self._thread = threading.Thread(target=self._run, name="soak-courier", daemon=True)
        self._thread.start()

    def open(self) -> None:
        """Start a worker.

        Raises:
            StorageError: The worker refuses the store.
        """
        self._client = StoreClient(self.options, self.arena, wake=self._wake.set)
        self.num_starts += 1

    def close(self) -> None:
        """Stop the worker. No thread may be inside the gate."""
        if self._client is not None:
            self._client.close()
            self._take_events(self._client)
            self._client = None

    def end(self) -> None:
        """Stop the worker and the thread, and free the arena."""
        self.close()
        self._is_over = True
        self._wake.set()
        self._thread.join()
        self.arena.close()

    @property
    def is_open(self) -> bool:
        """Whether there is a client, whether or not its worker runs."""
        return self._client is not None

    @property
    def pid(self) -> int | None:
        """The process id of the worker; None while no worker serves."""
        return self._client.pid if self._client is not None else None

    @property
    def client(self) -> StoreClient:
        """The open client. Use it inside the gate, or while the gate is shut."""
        assert self._client is not None, "no client is open"
        return self._client

    def pages_of(self, user: int) -> range:
        """Return the ids of the pages that belong to one thread."""
        return range(user * self._pages_each, (user + 1) * self._pages_each)

    def store(self, user: int, pages: Sequence[Lent]) -> list[Stored]:
        """Store blocks from these pages, and wait for the answer to each."""
        self.client.store(pages)
        return [done for done in self._wait(user, len(pages)) if isinstance(done, Stored)]

    def load(self, user: int, pages: Sequence[Lent]) -> list[Loaded]:
        """Load blocks into these pages, and wait for the answer to each."""
        self.client.load(pages)
        return [done for done in self._wait(user, len(pages)) if isinstance(done, Loaded)]

    def lookup(self, hashes: Sequence[bytes]) -> list[bool] | None:
        """Return which blocks are stored; None if the worker died meanwhile or none serves."""
        pid = self.pid
        job = self.client.lookup(hashes)
        with self._answered:
            if not self._answered.wait_for(lambda: job in self._answers, _PATIENCE_S):
                raise TimeoutError(f"no answer to a lookup for {_PATIENCE_S:g} s")
            done = self._answers.pop(job)
        is_same = pid is not None and pid == self.pid
        return [block_hash in done.found for block_hash in hashes] if is_same else None

    def _wait(self, user: int, count: int) -> list[Loaded | Stored]:
        try:
            return [self._inboxes[user].get(timeout=_PATIENCE_S) for _ in range(count)]
        except queue.Empty:
            raise TimeoutError(f"a page did not come back for {_PATIENCE_S:g} s") from None

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_over:
            self._wake.wait(_POLL_S)
            self._wake.clear()
            if (client := self._client) is not None:
                self._take_events(client)

    def _take_events(self, client: StoreClient) -> None:
        with self._taking:
            self._hand_around(client)

    def _hand_around(self, client: StoreClient) -> None:
        for event in client.poll():
            match event:
                case Loaded() | Stored():
                    self._inboxes[event.page_id // self._pages_each].put(event)
                case LookupDone():
                    with self._answered:
                        self._answers[event.job] = event
                        self._answered.notify_all()
                case Restarted():
                    self.num_starts += 1
                case ControlRequest():
                    client.reply(event.id, {})
        stats = client.stats()
        self._add(self.tally, {name: getattr(stats, name) for name in _COUNTERS})
        self._add(self.faults, stats.faults)

    def _add(self, sums: Counter[str], now: dict[str, int]) -> None:
        for name, count in now.items():
            before = self._seen.get(name, 0)
            # A counter that is smaller than before comes from a new worker.
            sums[name] += count - before if count >= before else count
            self._seen[name] = count


def kill(pid: int) -> None:
    """Kill a worker with SIGKILL; it may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 9)
