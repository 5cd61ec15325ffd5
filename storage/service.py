"""The worker's service: turns the engine's messages into reads, writes and transactions.

Two threads share the work, so that a read never waits for a change:

    front thread    receives messages, looks blocks up, has them read, answers
    index thread    makes every change: stores, touches, deletions, sweeps, and the changes that the
                    command line's verbs ask for (the verbs run on threads of their own)

Each of the two has a `Loop`; other threads hand it calls through that loop. Reader and writer
threads only move payloads. LMDB's readers never wait for its writer, so a commit, a flush to the
device or a sweep that takes ten seconds delays no lookup, no load and no answer.

This module knows the order of steps: bytes are written before the index changes, and the index
changes before an answer is sent. It knows the engine only as the other end of a channel; it knows
neither models nor what a payload means.
"""

import logging
import os
import selectors
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread
from typing import TypeVar

from msgspec.structs import replace

from tieredkv.errors import (
    CorruptBlockError,
    CorruptIndexError,
    StorageError,
    StoreFailedError,
    StoreFullError,
)
from tieredkv.storage import worker_messages as messages
from tieredkv.storage.allocator import TXN_BLOCKS
from tieredkv.storage.codec import Extent, Located, corrupt, decode_record
from tieredkv.storage.compression import Packed, extent_bytes_of
from tieredkv.storage.control_server import ControlServer
from tieredkv.storage.host import HostArena
from tieredkv.storage.lmdb_store import BlockStore
from tieredkv.storage.loop import Loop
from tieredkv.storage.results import TouchItem
from tieredkv.storage.touches import GatheredTouches
from tieredkv.storage.verbs import Verbs
from tieredkv.storage.worker_messages import LentPage, PageLoaded, PageStored
from tieredkv.storage.write_share import WriteShare
from tieredkv.types import BlockRecord
from tieredkv.wire.channel import FrameChannel

logger = logging.getLogger(__name__)

_MAX_LOCATES_A_TURN = 64
_WRITES_A_THREAD = 4  # enough to keep the threads busy while a group is flushed
_MAX_GROUP_AGE_S = 0.005  # how long written blocks wait for others to share a transaction
_CLOCK_SLACK_S = 1.0
_TIMES = ("computed_at", "expires_at", "pinned_until", "last_used")
Answer = TypeVar("Answer")
Item = TypeVar("Item", BlockRecord, TouchItem)
_TICK_S = 0.5  # how often to check for what sends no event: a lost parent, silent clients
_FORGOTTEN_S = 3.0  # a worker that a command line started ends after this time without a request
_POLL_S = 0.002  # how often writes look whether reads have earned them a share
_PAUSES = 25  # each pause while the index is checked lasts this many times the step before it
_OVER = object()


@dataclass(slots=True)
class ReadTask:
    """One payload to be read into a page by a thread; `error` is set if the read failed."""

    page: LentPage
    located: Located
    error: StorageError | None = None


@dataclass(slots=True, eq=False)
class WriteTask:
    """One block to be compressed and written by a thread; `error` is set if either failed.

    The extent is None until the block is compressed, because its size is not known before.
    `is_held_back` and `ended_at` are for `PageStored`.
    """

    page: LentPage
    packed: Packed | None = None
    extent: Extent | None = None
    written: Located | None = None
    error: StorageError | None = None
    is_held_back: bool = False
    ended_at: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of the extent that the block needs."""
        return extent_bytes_of(self.page.record, self.packed)


class StoreService:
    """Serves one store; the sections of the class say which thread runs and owns what.

    A load waits in `_loads`, is located, read by a thread and answered. If the read fails, the
    index thread finds out why before the load is answered. A block that the engine deletes is a
    miss at once (`_doomed`), even before the index thread has deleted it.
    A store waits in `_writes`, is compressed by a thread, waits in `_packed` for an extent, is
    written by a thread, waits in `_written` for its group's transaction and is answered after it.
    """

    def __init__(
        self,
        store: BlockStore,
        launch: messages.Launch,
        channel: FrameChannel[messages.EngineMessage],
        arena: HostArena | None,
    ) -> None:
        self._store = store
        self._launch = launch
        self._options = launch.options
        self._channel = channel
        self._arena = arena
        # These belong to the front thread.
        self._front = Loop()
        self._front.selector.register(channel, selectors.EVENT_READ, self._hear_engine)
        self._readers = ThreadPoolExecutor(self._options.num_readers)
        self._loads: deque[LentPage] = deque()
        self._num_reading = 0
        self._share = WriteShare()  # noted by the front thread, asked by the index thread
        self._loaded: list[PageLoaded] = []
        self._doomed: Counter[bytes] = Counter()
        self._is_closing = False  # no new work is taken; stores under way are finished

        # The front thread gathers touches, the index thread writes them.
        self._touches = GatheredTouches()

        # These belong to the index thread.
        self._changes = Loop()
        self._writers = ThreadPoolExecutor(self._options.num_writers)
        self._writes: deque[LentPage | Callable[[], None]] = deque()
        self._packed: deque[WriteTask] = deque()
        self._reserved: deque[WriteTask] = deque()
        self._num_writing = 0
        self._is_held_back = self._was_held_back = False  # now, and before this turn
        self._written: list[WriteTask] = []
        self._written_since = 0.0
        self._undeleted: list[messages.DeleteCall] = []  # failed; the next sweep tries again
        self._sweep: Iterator[None] | None = None
        self._next_sweep = 0.0  # at once: blocks may have expired while no worker ran
        self._stored: list[PageStored] = []
        self._store_error = ""  # why the last blocks could not be stored, or empty
        self._is_over = Event()
        self._has_all = Event()  # set when the front thread hands over nothing more
        self._stats = store.stats()  # as of the last turn; the front thread reads them too
        self._reported: set[str] = set()
        self._verbs = Verbs(
            store,
            hand=self._changes.hand,
            after_writes=lambda call: self._changes.hand(lambda: self._writes.append(call)),
            ask_engine=None if arena is None else self._ask_engine,
        )
        self._server = ControlServer(self._options.path, self._verbs.carry_out)

    def run(self) -> None:
        """Serve until the engine says so, then close the store.

        Raises:
            EOFError: the engine is gone, or the command line that started this worker is silent.
        """
        looking = Thread(target=self._look_over, daemon=True)
        looking.start()
        try:
            self._serve()
        finally:
            self._is_over.set()
            looking.join(_TICK_S)  # long enough for the current step to end
        self._store.close()

    def _serve(self) -> None:
        self._channel.send(messages.WorkerUp(self._stats))
        changing = ThreadPoolExecutor(1).submit(self._run_changes)
        # Its error, if any, is raised in the front thread.
        changing.add_done_callback(lambda _: self._front.hand(changing.result))
        try:
            while not self._is_closing or self._loads or self._num_reading:
                self._front_turn()
        finally:
            self._changes.hand(self._has_all.set)
        while not changing.done():
            self._front_turn()
        self._front_turn()
        self._readers.shutdown()
        while self._channel.has_queued:
            self._front.wait(_TICK_S)

    # --- front thread: the engine's channel ----------------------------------------------------

    def _front_turn(self) -> None:
        self._front.wait(0.0 if self._can_read else _TICK_S)
        self._start_reads()
        if self._loaded:
            stats = replace(
                self._stats,
                bytes_read=self._store.bytes_read,
                num_touches_dropped=self._touches.num_dropped,
            )
            self._channel.send(messages.Completions([*self._loaded], stats))
            self._loaded.clear()
        is_forgotten = self._arena is None and self._verbs.idle_s > _FORGOTTEN_S
        if is_forgotten or os.getppid() != self._launch.parent_pid:
            raise EOFError

    def _hear_engine(self) -> None:
        for message in self._channel.receive():
            self._obey(message)

    def _obey(self, message: messages.EngineMessage) -> None:
        match message:
            case messages.LookupCall(job, hashes):
                found = self._attempt("lookup", lambda: self._store.find(hashes)) or {}
                for block_hash in self._doomed.keys() & found.keys():
                    del found[block_hash]
                self._channel.send(messages.LookupDone(job, found))
            case messages.LoadCall(pages):
                self._loads += pages
            case messages.TouchCall(touches):
                self._touches.gather(map(self._allowed, touches))
            case messages.EngineAnswer():
                self._verbs.hear_engine(message)
            case messages.CloseCall():
                self._is_closing = True
                for page in self._loads:
                    self._end_load(page, "closing")
                self._loads.clear()
            case _:
                if isinstance(message, messages.DeleteCall):
                    self._doomed.update(message.hashes)
                self._changes.hand(lambda: self._change(message))

    def _forget_doomed(self, call: messages.DeleteCall) -> None:
        self._doomed -= Counter(call.hashes)
        self._channel.send(messages.DeleteDone(call.job))

    # --- front thread: loads -------------------------------------------------------------------

    @property
    def _can_read(self) -> bool:
        """Whether to start another load; only as many are started as keep the readers busy."""
        return bool(self._loads) and self._num_reading < 4 * self._options.num_readers

    def _start_reads(self) -> None:
        """Look several blocks up at once, then have them read.

        Lookups are made first, because busy readers slow them down.
        """
        if not self._can_read:
            return
        pages: list[LentPage] = []
        while self._can_read and len(pages) < _MAX_LOCATES_A_TURN:
            pages.append(self._loads.popleft())
            self._num_reading += 1
        hashes = [page.record.block_hash for page in pages]
        found = self._attempt("locate", lambda: self._store.find(hashes)) or {}
        for page in pages:
            sealed, wanted = found.get(page.record.block_hash), page.record
            if sealed is None or wanted.block_hash in self._doomed:
                self._num_reading -= 1
                self._end_load(page, "missing")
                continue
            try:
                task = ReadTask(page, decode_record(wanted.block_hash, sealed))
            except CorruptBlockError:  # the seal is right, but the bytes under it are no record
                self._store.note_damaged(wanted.block_hash)
                self._num_reading -= 1
                self._end_load(page, "missing")
                continue
            if _identity(task.located.record) == _identity(wanted):
                self._share.note_read(0)
                self._readers.submit(self._move, task)
            else:  # this block must be dropped, or the right one could never take its place
                what = "its record describes another block"
                task.error = corrupt(wanted.block_hash, "identity", what)
                self._end_read(task)

    def _end_read(self, task: ReadTask, reason: str = "") -> None:
        """Answer a load; one that failed is answered after the index thread has found out why."""
        if (error := task.error) is not None and not reason:
            self._changes.hand(lambda: self._judge(task, error))
            return
        self._num_reading -= 1
        if reason == "evicted":  # the block may also have moved since it was located: look again
            self._loads.append(task.page)
        else:
            self._share.note_read(task.page.record.size_bytes)
            self._end_load(task.page, reason, None if reason else task.located.record)

    def _end_load(self, page: LentPage, reason: str, record: BlockRecord | None = None) -> None:
        now = time.monotonic()
        self._loaded.append(PageLoaded(page.record.block_hash, page.page_id, reason, record, now))

    # --- index thread --------------------------------------------------------------------------

    def _run_changes(self) -> None:
        try:
            while not self._has_all.is_set() or self._has_writes:
                self._turn()
        finally:
            self._server.close()
        self._writers.shutdown()
        while self._touches:
            self._flush_touches()

    def _turn(self) -> None:
        self._changes.wait(self._idle_s())
        self._store.check_place()
        self._start_writes()
        now = time.monotonic()
        if self._is_group_due(now):
            self._commit()
            self._start_writes()
        self._refresh_stats()
        self._send_stored()
        if self._touches.are_due:
            self._flush_touches()
        if self._sweep is None and now >= self._next_sweep:
            for call in self._undeleted:
                self._writes.append(partial(self._end_delete, call, is_deleted=False))
            self._undeleted.clear()
            self._next_sweep = now + self._options.sweep_interval_s
            self._sweep = self._store.sweeping()
            if trial := self._store.compression_trial(self._options.num_readers):
                self._readers.submit(self._attempt, "compression", trial)
        if (sweep := self._sweep) is not None:
            is_over = self._attempt("sweep", lambda: next(sweep, _OVER)) is _OVER
            self._sweep = None if is_over else sweep

    def _idle_s(self) -> float:
        if self._sweep is not None or self._touches.are_due:
            return 0.0
        now = time.monotonic()
        waits_s = [_TICK_S, self._next_sweep - now]
        if self._written:
            waits_s.append(self._written_since + _MAX_GROUP_AGE_S - now)
        if self._reserved and not self._num_writing:
            waits_s.append(max(self._store.write_limit.wait_s(), min(self._share.wait_s, _POLL_S)))
        return max(0.0, min(waits_s))

    def _change(self, message: messages.EngineMessage) -> None:
        match message:
            case messages.StoreCall(pages, shares):
                self._store.keep_shares(shares)
                for page in pages:
                    self._accept_store(page)
            case messages.DeleteCall():
                is_deleted = self._delete(message) and not self._has_writes
                # These blocks may be among those being written, so they are deleted again after.
                self._writes.append(lambda: self._end_delete(message, is_deleted=is_deleted))

    def _judge(self, task: ReadTask, error: StorageError) -> None:
        """Count a failed load, drop the block if its bytes are bad, and hand the reason back."""
        reason = self._attempt("load", lambda: self._store.read_failed(task.located, error))
        self._refresh_stats()
        self._front.hand(lambda: self._end_read(task, reason or "io_error"))

    @property
    def _has_writes(self) -> bool:
        waiting = self._writes or self._packed or self._reserved
        return bool(waiting or self._num_writing or self._written)

    def _send_stored(self) -> None:
        """Send results of stores through the front thread, so that counters never go back."""
        if self._stored:
            stored = messages.Completions([*self._stored], self._stats)
            self._front.hand(lambda: self._channel.send(stored))
            self._stored.clear()

    def _refresh_stats(self) -> None:
        stats = self._attempt("stats", self._store.stats) or self._stats
        self._stats = replace(stats, store_error=self._store_error)

    def _allowed(self, touch: TouchItem) -> TouchItem:
        """Return a touch by our clock, without a claim that no retention lets the disk keep."""
        touch = self._by_our_clock(touch)
        is_kept = touch.retention in self._options.disk_retentions
        return touch if is_kept else replace(touch, expires_at=None, retention=None)

    def _by_our_clock(self, item: Item) -> Item:
        """Convert the times of a block or a touch to our clock if the engine's clock is ahead.

        Neither clock ever runs back. If the system's clock does, a worker that starts later is
        behind the engine, and would keep a block for longer than the engine asked.
        """
        ahead_s = item.last_used - self._store.clock.now()
        if ahead_s <= _CLOCK_SLACK_S:
            return item
        times = {name: getattr(item, name, None) for name in _TIMES}
        return replace(item, **{name: time - ahead_s for name, time in times.items() if time})

    # --- index thread: stores ------------------------------------------------------------------

    def _accept_store(self, page: LentPage) -> None:
        if page.record.retention not in self._options.disk_retentions:
            # NOTE: this is the last check that keeps such a block off the disk.
            self._end_store(page, "retention")
        else:
            self._writes.append(replace(page, record=self._by_our_clock(page.record)))

    def _start_writes(self) -> None:
        """Hand writes to the writer threads; beside reads, one at a time and within their share.

        If a limit delays writes, their pages stay lent, as with a slow disk. No limit applies while
        the store closes.

        A function in the queue is a barrier: it runs when every store before it is committed and no
        store after it has begun.
        """
        is_reading = self._share.wait_s > 0 and not self._is_closing
        self._was_held_back, self._is_held_back = self._is_held_back, is_reading
        max_writing = 1 if is_reading else _WRITES_A_THREAD * self._options.num_writers
        is_packing = self._store.packing.is_on
        max_packed = 2 * self._options.num_writers if is_packing else TXN_BLOCKS
        while self._num_writing < max_writing:
            head = self._writes[0] if self._writes else None
            if self._reserved:
                if not self._admits(self._reserved[0].size):
                    self._is_held_back = True
                    return
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

    def _admits(self, num_bytes: int) -> bool:
        """Return whether both limits let a write of so many bytes begin."""
        if self._is_closing:
            return True
        limit = self._store.write_limit
        return not limit.wait_s() and self._share.admits(num_bytes) and limit.admits(num_bytes)

    def _start_write(self, task: WriteTask) -> None:
        self._num_writing += 1
        task.is_held_back |= self._was_held_back or self._is_held_back
        self._writers.submit(self._move, task)

    def _reserve(self) -> bool:
        """Get extents for the next writes, in one transaction; return False to try again later."""
        batch = list(self._packed)
        self._packed.clear()
        try:
            batch = self._leave_out_known(batch)
            records = [task.page.record for task in batch]
            extents = self._store.reserve_many(records, [task.packed for task in batch])
        except StorageError as error:
            self._note_refusal(error)
            for task in batch:
                self._end_store(task.page, _refusal(error))
            return True
        waiting = []
        for task, extent in zip(batch, extents, strict=True):
            task.extent = extent
            if extent is not None:
                self._reserved.append(task)
            elif self._reserved or self._num_writing or self._written:
                waiting.append(task)  # there may be room once the writes under way are committed
            else:
                self._store_error = "the budget leaves no room for another block"
                self._end_store(task.page, "full")
        self._packed.extendleft(reversed(waiting))
        return not waiting or bool(self._reserved)

    def _leave_out_known(self, batch: list[WriteTask]) -> list[WriteTask]:
        """Acknowledge blocks that are stored already and keep their claims; return the others."""
        known = [task for task in batch if self._store.holds(task.page.record)]
        self._store.claim_or_touch([task.page.record for task in known])
        for task in known:
            self._end_store(task.page, "")
        return [task for task in batch if task not in known]

    def _end_write(self, task: WriteTask) -> None:
        self._num_writing -= 1
        task.is_held_back |= self._is_held_back or self._share.wait_s > 0
        if task.error is not None:
            if task.extent is not None:
                self._store.write_failed(task.extent, task.error)
            self._end_store(task.page, _refusal(task.error))
            self._note_refusal(task.error)
        elif task.written is None:
            self._packed.append(task)
        else:
            if not self._written:
                self._written_since = time.monotonic()
            self._written.append(task)

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
        try:
            reasons = ["" if is_stored else "expired" for is_stored in self._store.commit(rows)]
            self._store_error = ""
        except StorageError as error:
            reasons = [_refusal(error)] * len(group)
            self._note_refusal(error)
        for task, reason in zip(group, reasons, strict=True):
            page_id, block_hash = task.page.page_id, task.page.record.block_hash
            times = task.is_held_back, task.ended_at
            self._stored.append(PageStored(block_hash, page_id, reason, *times))

    def _note_refusal(self, error: StorageError) -> None:
        """Report why blocks are not stored, and keep the reason for `stats`."""
        self._store_error = str(error)
        self._report("store", error)

    def _end_store(self, page: LentPage, reason: str) -> None:
        self._stored.append(PageStored(page.record.block_hash, page.page_id, reason))

    # --- index thread: the rest ----------------------------------------------------------------

    def _flush_touches(self) -> None:
        """Write some of the gathered touches; a long list takes several turns."""
        items = self._touches.take()
        self._attempt("touch", lambda: self._store.claim_or_touch(items))

    def _delete(self, call: messages.DeleteCall) -> bool:
        delete = partial(self._store.delete, call.hashes, call.reason)
        return self._attempt("delete", delete) is not None

    def _end_delete(self, call: messages.DeleteCall, *, is_deleted: bool) -> None:
        """Answer a deletion; if the disk refused it, its blocks stay a miss and it is retried."""
        if is_deleted or self._delete(call):
            self._front.hand(partial(self._forget_doomed, call))
        else:
            self._undeleted.append(call)

    def _look_over(self) -> None:
        """Read the index into memory and check its consistency, on a thread of its own.

        Pages that swapped places break no checksum, but blocks in them may not be found. Checking
        competes with lookups for the interpreter's lock, so a pause follows each of its steps.
        """
        index = self._store.index
        try:
            for steps, pauses in (index.reading_ahead(), 0), (index.looking_over(), _PAUSES):
                begin = time.monotonic()
                for is_sound in steps:
                    if not is_sound:
                        return self._changes.hand(self._store.ask_for_rebuild)
                    pause_s = min(pauses * (time.monotonic() - begin), _TICK_S)
                    if self._is_over.wait(pause_s):
                        return None
                    begin = time.monotonic()
        except StorageError as error:
            self._changes.hand(partial(self._report, "index", error))

    # --- any thread ----------------------------------------------------------------------------

    def _ask_engine(self, request: messages.ControlRequest) -> None:
        """Ask the engine on behalf of a command line, unless the engine has stopped reading."""
        if not self._channel.is_stuck:
            self._channel.send(request)

    def _attempt(self, cause: str, action: Callable[[], Answer]) -> Answer | None:
        """Call `action` and return its result; a disk fault is logged and gives None."""
        try:
            return action()
        except StorageError as error:
            self._report(cause, error)
            return None

    def _move(self, task: ReadTask | WriteTask) -> None:
        """Read or write a payload on a thread of its own, and hand the result back."""
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
                task.ended_at = time.monotonic()
        except StorageError as error:
            task.error = error
        except Exception as error:
            logger.exception("a payload could not be moved")
            task.error = StorageError(f"a payload could not be moved: {error!r}")
        if isinstance(task, ReadTask):
            self._front.hand(lambda: self._end_read(task))
        else:
            self._changes.hand(lambda: self._end_write(task))

    def _report(self, cause: str, error: Exception) -> None:
        """Log the first failure of each cause; later ones are only counted.

        Raises:
            CorruptIndexError, StoreFailedError: `error` itself, because the worker cannot go on.
        """
        if isinstance(error, CorruptIndexError | StoreFailedError):
            raise error
        if cause not in self._reported:
            self._reported.add(cause)
            logger.warning("%s: %s (further ones are only counted)", cause, error)


def _identity(record: BlockRecord) -> tuple[bytes, bytes, int, int]:
    return record.parent_hash, record.root, record.position, record.size_bytes


def _refusal(error: StorageError) -> str:
    return "full" if isinstance(error, StoreFullError) else "io_error"
