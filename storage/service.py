"""The index thread: turns jobs into reads, writes and transactions, and answers them.

It knows the order of things: reads before writes, bytes before index, index before the answer. It
knows no engine but as the other end of a channel, and neither models nor what a payload means.
"""

import logging
import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import lmdb
from msgspec.structs import replace

from tieredkv.errors import StorageError, StoreFullError
from tieredkv.storage import messages
from tieredkv.storage.allocator import TXN_BLOCKS
from tieredkv.storage.channel import FrameChannel
from tieredkv.storage.codec import Extent, Located
from tieredkv.storage.compression import Packed
from tieredkv.storage.control_server import ControlServer
from tieredkv.storage.host import HostArena
from tieredkv.storage.lmdb_store import BlockStore
from tieredkv.storage.messages import LentPage, PageLoaded, PageStored
from tieredkv.storage.results import TouchItem
from tieredkv.storage.verbs import Verbs
from tieredkv.types import BlockRecord

logger = logging.getLogger(__name__)

_MAX_LOCATES_A_TURN = 64
_MAX_GROUP_AGE_S = 0.005  # of written blocks that wait for one index transaction
_TOUCH_INTERVAL_S = 1.0
_TOUCHES_A_TURN = 256
_DAMAGE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.PanicError)
Answer = TypeVar("Answer")
_TICK_S = 0.5  # how often what nobody pokes for is looked at: a lost parent, silent clients
_OVER = object()


@dataclass(slots=True)
class ReadTask:
    """One payload to be read into a page by a thread; `error` says how it ended."""

    page: LentPage
    located: Located
    error: StorageError | None = None


@dataclass(slots=True)
class WriteTask:
    """One block to be compressed, then written by a thread; `error` says how it ended.

    Without an extent it waits for its slot, whose size is known once it is compressed.
    """

    page: LentPage
    packed: Packed | None = None
    extent: Extent | None = None
    written: Located | None = None
    error: StorageError | None = None


class StoreService:
    """One store being served.

    Every method but `_move` runs on the index thread. Work in hand moves through queues: a load
    waits in `_loads`, is located, read by a thread and answered; a store waits in `_writes`, is
    compressed by a thread, waits in `_packed` for a slot, is written by a thread, waits in
    `_written` for its group's transaction and is answered after it.
    Nothing but `ls` takes longer than one transaction at a time, so that a lookup never waits for a
    long load, store, sweep, eviction or verify.
    """

    def __init__(
        self,
        store: BlockStore,
        argument: messages.LaunchArgument,
        channel: FrameChannel[messages.EngineMessage],
        arena: HostArena | None,
        notes: list[str],
    ) -> None:
        self._store = store
        self._argument = argument
        self._options = argument.options
        self._channel = channel
        self._arena = arena
        self._notes = notes
        self._is_closing = False  # no new work; what is written gets finished
        self._is_orphan = False  # nobody is left to answer to

        self._loads: deque[LentPage] = deque()
        self._num_reading = 0
        self._writes: deque[LentPage | Callable[[], None]] = deque()
        self._packed: deque[WriteTask] = deque()
        self._reserved: deque[WriteTask] = deque()
        self._num_writing = 0
        self._written: list[WriteTask] = []
        self._written_since = 0.0
        self._touches: dict[bytes, TouchItem] = {}
        self._touched_since = 0.0
        self._sweep: Iterator[None] | None = None
        self._next_sweep = 0.0  # at once: what expired while nobody served is still there
        self._done: list[PageLoaded | PageStored] = []
        self._reported: set[str] = set()

        self._poke_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        heed_poke = partial(os.eventfd_read, self._poke_fd)
        self._selector.register(self._poke_fd, selectors.EVENT_READ, heed_poke)
        self._selector.register(channel, selectors.EVENT_READ, self._hear_engine)
        self._readers = ThreadPoolExecutor(self._options.num_readers)
        self._writers = ThreadPoolExecutor(self._options.num_writers)
        self._moved: deque[ReadTask | WriteTask] = deque()
        ask_engine = None if arena is None else self._send
        self._verbs = Verbs(store, ask_engine=ask_engine, after_writes=self._add_barrier)
        self._server = ControlServer(self._options.path, self._selector, self._verbs.begin)

    def run(self) -> None:
        """Serve until the engine says so or is gone, then close the store."""
        self._channel.send(messages.WorkerUp(self._store.stats(), self._notes))
        while not (self._is_closing and self._is_drained()):
            self._turn()
        self._server.close()
        self._readers.shutdown()
        self._writers.shutdown()
        self._collect()
        self._commit()
        while self._touches:
            self._flush_touches()
        self._send_done()
        self._store.close()
        while self._channel.push_queued() and not self._is_orphan:
            self._wait(_TICK_S)

    # --- one turn ----------------------------------------------------------------------------

    def _turn(self) -> None:
        self._wait(self._idle_s())
        self._collect()
        self._start_reads()
        self._start_writes()
        now = time.monotonic()
        if self._is_group_due(now):
            self._commit()
            self._start_writes()
        self._send_done()
        if self._touches_are_due:
            self._flush_touches()
        if self._sweep is None and now >= self._next_sweep:
            self._next_sweep = now + self._options.sweep_interval_s
            self._sweep = self._store.sweeping()
            if trial := self._store.compression_trial(self._options.num_readers):
                self._readers.submit(self._attempt, "compression", trial)
        if (sweep := self._sweep) is not None:
            is_over = self._attempt("sweep", lambda: next(sweep, _OVER)) is _OVER
            self._sweep = None if is_over else sweep
        self._verbs.turn()
        self._server.turn()
        if os.getppid() != self._argument.parent_pid:
            self._abandon()

    def _wait(self, timeout_s: float) -> None:
        for key, ready in self._selector.select(timeout_s):
            if ready & selectors.EVENT_WRITE and not self._channel.push_queued():
                self._listen(selectors.EVENT_READ)
            if ready & selectors.EVENT_READ:
                key.data()

    def _idle_s(self) -> float:
        has_work = self._verbs.has_work or (self._loads and self._num_reading < self._max_reading)
        if has_work or self._sweep is not None or self._touches_are_due:
            return 0.0
        if self._written:
            return max(0.0, self._written_since + _MAX_GROUP_AGE_S - time.monotonic())
        if self._server.has_queued:
            return 0.01
        return max(0.0, min(_TICK_S, self._next_sweep - time.monotonic()))

    def _poke(self) -> None:
        os.eventfd_write(self._poke_fd, 1)

    # --- the engine's channel ----------------------------------------------------------------

    def _send(self, message: messages.WorkerMessage) -> None:
        if self._channel.send(message):
            self._listen(selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _listen(self, mask: int) -> None:
        if not self._is_orphan:
            self._selector.modify(self._channel, mask, self._hear_engine)

    def _hear_engine(self) -> None:
        try:
            received = self._channel.receive()
        except EOFError:
            self._abandon()
            return
        for message in received:
            self._obey(message)

    def _obey(self, message: messages.EngineMessage) -> None:
        match message:
            case messages.LookupCall(job, hashes):
                found = self._attempt("lookup", lambda: self._store.lookup(hashes))
                misses: list[BlockRecord | None] = [None] * len(hashes)
                self._send(messages.LookupDone(job, found or misses))
            case messages.LoadCall(pages):
                self._loads += pages
            case messages.StoreCall(pages):
                for page in pages:
                    self._accept_store(page)
            case messages.TouchCall(touches):
                self._gather(touches)
            case messages.DeleteCall(hashes, reason):
                self._delete(hashes, reason)
                if self._has_writes:  # of these blocks, perhaps
                    self._writes.append(lambda: self._delete(hashes, reason))
            case messages.DescribeCall(root, description):
                self._attempt("describe", lambda: self._store.describe_root(root, description))
            case messages.EngineAnswer():
                self._verbs.hear_engine(message)
            case messages.CloseCall():
                self._is_closing = True
                for page in self._loads:
                    self._end_load(page, "closing")
                self._loads.clear()

    def _abandon(self) -> None:
        """Finish what is in hand for nobody: the engine is gone."""
        if not self._is_orphan:
            self._is_orphan = self._is_closing = True
            self._selector.unregister(self._channel)
            self._loads.clear()
            self._writes.clear()
            self._packed.clear()
            while self._reserved:
                self._give_up(self._reserved.popleft())

    def _is_drained(self) -> bool:
        return not (self._loads or self._num_reading or self._has_writes)

    @property
    def _has_writes(self) -> bool:
        waiting = self._writes or self._packed or self._reserved
        return bool(waiting or self._num_writing or self._written)

    def _send_done(self) -> None:
        if self._done:
            self._send(messages.Completions(self._done, self._store.stats()))
            self._done = []

    # --- loads -------------------------------------------------------------------------------

    @property
    def _max_reading(self) -> int:
        """Reads handed to the threads: enough to keep them busy, few enough to stay current."""
        return 4 * self._options.num_readers

    def _start_reads(self) -> None:
        for _ in range(_MAX_LOCATES_A_TURN):
            if not self._loads or self._num_reading >= self._max_reading:
                break
            self._start_read(self._loads.popleft())

    def _start_read(self, page: LentPage) -> None:
        wanted = page.record
        located = self._attempt("locate", lambda: self._store.locate(wanted.block_hash))
        if located is None:
            self._end_load(page, "missing")
        elif _identity(located.record) != _identity(wanted):
            # Dropped, or the right block could never take its place.
            self._delete([wanted.block_hash], "identity")
            self._end_load(page, "identity")
        else:
            self._num_reading += 1
            self._readers.submit(self._move, ReadTask(page, located))

    def _end_read(self, task: ReadTask) -> None:
        self._num_reading -= 1
        if (error := task.error) is None:
            self._end_load(task.page, "", task.located.record)
            return
        reason = self._attempt("load", lambda: self._store.read_failed(task.located, error))
        if reason == "evicted":  # or stored anew elsewhere since it was located: look again
            self._loads.append(task.page)
        else:
            self._end_load(task.page, reason or "io_error")

    def _end_load(self, page: LentPage, reason: str, record: BlockRecord | None = None) -> None:
        self._done.append(PageLoaded(page.record.block_hash, page.page_id, reason, record))

    # --- stores ------------------------------------------------------------------------------

    def _accept_store(self, page: LentPage) -> None:
        if page.record.retention not in self._options.disk_retentions:
            # NOTE: the last gate of the promise that such a block never touches a disk.
            self._end_store(page, "retention")
        else:
            self._writes.append(page)

    def _add_barrier(self, barrier: Callable[[], None]) -> None:
        self._writes.append(barrier)
        self._poke()

    def _start_writes(self) -> None:
        """Hand writes to the threads; reads that wait leave them one thread at a time.

        A function in the queue is a barrier: it runs when everything before it is committed and
        nothing after it has begun.
        """
        max_writing = 1 if self._num_reading else self._options.num_writers
        is_packing = self._store.packing.is_on
        max_packed = 2 * self._options.num_writers if is_packing else TXN_BLOCKS
        while self._num_writing < max_writing:
            head = self._writes[0] if self._writes else None
            if self._reserved:
                self._start_write(self._reserved.popleft())
            elif isinstance(head, LentPage) and len(self._packed) + self._num_writing < max_packed:
                self._writes.popleft()
                task = WriteTask(head)
                self._start_write(task) if is_packing else self._packed.append(task)
            elif self._packed:
                if not self._reserve():
                    return
            elif callable(head) and not self._num_writing:
                self._commit()
                self._writes.popleft()
                head()
            else:
                return

    def _start_write(self, task: WriteTask) -> None:
        self._num_writing += 1
        self._writers.submit(self._move, task)

    def _reserve(self) -> bool:
        """Get slots for the next writes, in one transaction; False to try again later."""
        batch = list(self._packed)
        self._packed.clear()
        try:
            batch = self._leave_out_known(batch)
            records = [task.page.record for task in batch]
            extents = self._store.reserve_many(records, [task.packed for task in batch])
        except StorageError as error:
            self._report("store", error)
            reason = "full" if isinstance(error, StoreFullError) else "io_error"
            for task in batch:
                self._end_store(task.page, reason)
            return True
        waiting = []
        for task, extent in zip(batch, extents, strict=True):
            task.extent = extent
            if extent is not None:
                self._reserved.append(task)
            elif self._reserved or self._num_writing or self._written:
                waiting.append(task)  # room comes when these are committed
            else:
                self._end_store(task.page, "full")
        self._packed.extendleft(reversed(waiting))
        return not waiting or bool(self._reserved)

    def _leave_out_known(self, batch: list[WriteTask]) -> list[WriteTask]:
        """Acknowledge blocks that are there already, with their claims; nothing is written."""
        stored = self._store.lookup([task.page.record.block_hash for task in batch])
        known: list[WriteTask] = []
        left: list[WriteTask] = []
        for task, old in zip(batch, stored, strict=True):
            is_known = old is not None and old.computed_at >= task.page.record.computed_at
            (known if is_known else left).append(task)
        if known:
            self._store.claim_or_touch([task.page.record for task in known])
        for task in known:
            self._end_store(task.page, "")
        return left

    def _end_write(self, task: WriteTask) -> None:
        self._num_writing -= 1
        if task.error is not None:
            self._give_up(task)
            self._end_store(task.page, "io_error")
            self._report("store", task.error)
        elif task.written is None:
            self._packed.append(task)
        else:
            if not self._written:
                self._written_since = time.monotonic()
            self._written.append(task)

    def _give_up(self, task: WriteTask) -> None:
        if task.extent is not None:
            self._store.abandon(task.extent)

    def _is_group_due(self, now: float) -> bool:
        return bool(self._written) and (
            (self._num_writing == 0 and not self._reserved)
            or len(self._written) >= TXN_BLOCKS
            or now - self._written_since >= _MAX_GROUP_AGE_S
        )

    def _commit(self) -> None:
        """Acknowledge every block that is written, in one index transaction."""
        group, self._written = self._written, []
        if not group:
            return
        rows = [task.written for task in group if task.written is not None]
        stored = self._attempt("commit", lambda: self._store.commit(rows))
        for i, task in enumerate(group):
            reason = "io_error" if stored is None else "" if stored[i] else "expired"
            self._end_store(task.page, reason)

    def _end_store(self, page: LentPage, reason: str) -> None:
        self._done.append(PageStored(page.record.block_hash, page.page_id, reason))

    # --- index -------------------------------------------------------------------------------

    def _collect(self) -> None:
        while self._moved:
            task = self._moved.popleft()
            self._end_read(task) if isinstance(task, ReadTask) else self._end_write(task)

    def _gather(self, touches: list[TouchItem]) -> None:
        """Keep touches for later; two uses of a block are the later use, the longer claim."""
        if not self._touches:
            self._touched_since = time.monotonic()
        for touch in touches:
            if touch.retention not in self._options.disk_retentions:
                touch = replace(touch, expires_at=None, retention=None)
            known = self._touches.get(touch.block_hash, touch)
            longer = max(known, touch, key=lambda each: each.expires_at or 0.0)
            last_used = max(known.last_used, touch.last_used)
            self._touches[touch.block_hash] = replace(longer, last_used=last_used)

    @property
    def _touches_are_due(self) -> bool:
        age_s = time.monotonic() - self._touched_since
        return bool(self._touches) and age_s > _TOUCH_INTERVAL_S

    def _flush_touches(self) -> None:
        """Write some of the gathered touches; a long list takes several turns."""
        items = [self._touches.pop(key) for key in list(self._touches)[:_TOUCHES_A_TURN]]
        self._attempt("touch", lambda: self._store.claim_or_touch(items))

    def _delete(self, hashes: list[bytes], reason: str) -> None:
        self._attempt("delete", lambda: self._store.delete(hashes, reason))

    def _attempt(self, cause: str, action: Callable[[], Answer]) -> Answer | None:
        """Do what may fail without harm; a fault of the disk is logged, and None."""
        try:
            return action()
        except StorageError as error:
            self._report(cause, error)
            return None

    def _move(self, task: ReadTask | WriteTask) -> None:
        """Read or write a payload, on a thread of its own; `_collect` takes what came of it."""
        try:
            assert self._arena is not None, "the engine lends no pages without an arena"
            page = self._arena.page(task.page.page_id)
            if isinstance(task, ReadTask):
                self._store.read_payload(task.located, page)
            elif task.extent is None:
                task.packed = self._store.packing.pack(page[: task.page.record.size_bytes])
            else:
                what = (task.page.record, page, task.packed)
                task.written = self._store.write_payload(task.extent, *what)
                task.packed = None  # its memory
        except StorageError as error:
            task.error = error
        except Exception as error:
            logger.exception("a payload's thread broke")
            task.error = StorageError(f"a payload's thread broke: {error!r}")
        self._moved.append(task)
        self._poke()

    def _report(self, cause: str, error: Exception) -> None:
        """Log the first failure of each cause; the counters have the rest.

        Raises:
            StorageError: `error` itself, if the index is damaged: then nothing of it can be served.
        """
        if is_damage(error):
            raise error
        if cause not in self._reported:
            self._reported.add(cause)
            logger.warning("%s: %s; further ones are counted only", cause, error)


def _identity(record: BlockRecord) -> tuple[bytes, bytes, int, int]:
    return record.parent_hash, record.root, record.position, record.size_bytes


def is_damage(error: BaseException) -> bool:
    """Whether an error comes from an index that contradicts itself."""
    return isinstance(error.__cause__, _DAMAGE)
