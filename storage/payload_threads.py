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
from tieredkv.storage.messages import LoadItem, StoreItem
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


@dataclass(slots=True)
class WriteTask:
    """One payload to be written from a page; `checksum` is set once it was."""

    job: int
    item: StoreItem
    slot: Slot
    page: memoryview
    checksum: bytes | None = None
    error: StorageError | None = None


class PayloadThreads:
    """Readers and writers; only the index thread calls the methods."""

    def __init__(
        self, store: BlockStore, *, num_readers: int, num_writers: int, wake: Callable[[], None]
    ) -> None:
        self._store = store
        self._wake = wake
        self._reads: SimpleQueue[ReadTask | None] = SimpleQueue()
        self._writes: SimpleQueue[WriteTask | None] = SimpleQueue()
        self._ended: deque[ReadTask | WriteTask] = deque()
        self._readers = _start(self._keep_reading, num_readers, "reader")
        self._writers = _start(self._keep_writing, num_writers, "writer")

    def read(self, task: ReadTask) -> None:
        """Have a payload read; it comes back from `collect()`."""
        self._reads.put(task)

    def write(self, task: WriteTask) -> None:
        """Have a payload written; it comes back from `collect()`."""
        self._writes.put(task)

    def collect(self) -> list[ReadTask | WriteTask]:
        """Return the tasks that have ended since the last call."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def close(self) -> None:
        """Wait until what was handed in has ended; `collect()` still has it afterwards."""
        for _ in self._readers:
            self._reads.put(None)
        for _ in self._writers:
            self._writes.put(None)
        for thread in self._readers + self._writers:
            thread.join()

    def _keep_reading(self) -> None:
        while (task := self._reads.get()) is not None:
            try:
                self._store.read_payload(task.located, task.page)
            except StorageError as error:
                task.error = error
            except Exception as error:
                logger.exception("a read broke")
                task.error = StorageError(f"a read broke: {error!r}")
            self._end(task)

    def _keep_writing(self) -> None:
        while (task := self._writes.get()) is not None:
            try:
                task.checksum = self._store.write_payload(task.slot, task.item.record, task.page)
            except StorageError as error:
                task.error = error
            except Exception as error:
                logger.exception("a write broke")
                task.error = StorageError(f"a write broke: {error!r}")
            self._end(task)

    def _end(self, task: ReadTask | WriteTask) -> None:
        self._ended.append(task)
        self._wake()


def _start(target: Callable[[], None], count: int, name: str) -> list[threading.Thread]:
    threads = [
        threading.Thread(target=target, name=f"{name}-{index}", daemon=True)
        for index in range(count)
    ]
    for thread in threads:
        thread.start()
    return threads
