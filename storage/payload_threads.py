"""The threads that move payloads between arena pages and extents.

They know how to call the store's two thread-safe methods and nothing about the index: what is to be
read or written was decided by the index thread, which also collects the outcomes.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from tieredkv.errors import StorageError
from tieredkv.storage.codec import Located
from tieredkv.storage.lmdb_store import BlockStore
from tieredkv.storage.messages import LoadItem, StoreItem, StoreOptions
from tieredkv.storage.results import Slot

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ReadTask:
    """One payload to be read into a page; `error` says how it ended."""

    job: int
    item: LoadItem
    located: Located
    page: memoryview
    error: StorageError | None = None

    def run(self, store: BlockStore) -> None:
        """Read it."""
        store.read_payload(self.located, self.page)


@dataclass(slots=True)
class WriteTask:
    """One payload to be written from a page; `checksum` is set once it was."""

    job: int
    item: StoreItem
    slot: Slot
    page: memoryview
    checksum: bytes | None = None
    error: StorageError | None = None

    def run(self, store: BlockStore) -> None:
        """Write it."""
        self.checksum = store.write_payload(self.slot, self.item.record, self.page)


Task = ReadTask | WriteTask


class PayloadThreads:
    """Readers and writers; only the index thread calls the methods."""

    def __init__(
        self, store: BlockStore, options: StoreOptions, *, wake: Callable[[], None]
    ) -> None:
        self._store = store
        self._wake = wake
        self._reads: SimpleQueue[Task | None] = SimpleQueue()
        self._writes: SimpleQueue[Task | None] = SimpleQueue()
        self._ended: deque[Task] = deque()
        self._threads: list[tuple[threading.Thread, SimpleQueue[Task | None]]] = []
        for tasks, num_threads in (
            (self._reads, options.num_readers),
            (self._writes, options.num_writers),
        ):
            for _ in range(num_threads):
                thread = threading.Thread(target=self._keep_doing, args=(tasks,), daemon=True)
                thread.start()
                self._threads.append((thread, tasks))

    def read(self, task: ReadTask) -> None:
        """Have a payload read; it comes back from `collect()`."""
        self._reads.put(task)

    def write(self, task: WriteTask) -> None:
        """Have a payload written; it comes back from `collect()`."""
        self._writes.put(task)

    def collect(self) -> list[Task]:
        """Return the tasks that have ended since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def close(self) -> None:
        """Wait until what was handed in has ended; `collect()` still has it afterwards."""
        for _, tasks in self._threads:
            tasks.put(None)
        for thread, _ in self._threads:
            thread.join()

    def _keep_doing(self, tasks: SimpleQueue[Task | None]) -> None:
        while (task := tasks.get()) is not None:
            try:
                task.run(self._store)
            except StorageError as error:
                task.error = error
            except Exception as error:
                logger.exception("a payload's thread broke")
                task.error = StorageError(f"a payload's thread broke: {error!r}")
            self._ended.append(task)
            self._wake()
