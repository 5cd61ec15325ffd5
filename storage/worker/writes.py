"""Stores: blocks in pages that the engine wants to have written, and what becomes of each.

A store waits, is compressed by a thread, waits for an extent, is written by a thread, waits for its
group's transaction and ends after it. Writes give way to reads and keep to the write limit. A store
that fails ends with the reason.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from tieredkv.errors import StorageError, StoreFullError
from tieredkv.storage.format.planes import Packed, aligned_buffer, extent_bytes_of
from tieredkv.storage.format.record import Extent, Located, padded_bytes
from tieredkv.storage.index.transaction import TXN_BLOCKS
from tieredkv.storage.ownership import owned_by
from tieredkv.storage.store import Store
from tieredkv.storage.worker.claims import Claims, Doomed
from tieredkv.storage.worker.fault_log import FaultLog
from tieredkv.storage.worker.loop import Loop, Threads
from tieredkv.storage.worker.pace import WriteLimit, WriteShare
from tieredkv.tier import Lent, Stored
from tieredkv.types import BlockRecord

_WRITES_A_THREAD = 4  # enough to keep the threads busy while a group is flushed
_MAX_GROUP_AGE_S = 0.005  # how long written blocks wait for others to share a transaction
_POLL_S = 0.002  # how often writes look whether reads have earned them a share


Task = TypeVar("Task")


class _GivesWayError(Exception):
    """A write ends before its block is written, because there are reads."""


@dataclass(slots=True, eq=False)
class WriteTask:
    """One block to be compressed and written by a thread.

    Attributes:
        page_id: of the page that holds the block; None for a trial, whose end nobody waits for.
        extent: None until the block is compressed, because its size is not known before.
        gives_way: whether the thread leaves the block unwritten once there are reads.
        num_in_vain: the bytes that it has written by then.
        is_held_back, ended_at: for `Stored`.
    """

    page_id: int | None
    record: BlockRecord
    packed: Packed | None = None
    extent: Extent | None = None
    written: Located | None = None
    gives_way: bool = False
    num_in_vain: int = 0
    is_held_back: bool = False
    ended_at: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of the extent that the block needs."""
        return extent_bytes_of(self.record, self.packed)


@dataclass(eq=False)
class Writes:
    """The stores that one worker was asked for; only the index thread uses them.

    Each moves from `_waiting` through `_packed`, `_reserved` and `_written` to `_ended`.

    Args:
        store: where blocks are stored.
        loop: of the index thread.
        threads, num_threads: compress and write payloads.
        page_of: returns the memory of a page; called by these threads.
        share: what writes get of the disk while blocks are read.
        limit: what they get at most.
        claims: decides which blocks may be stored, and until when.
        log: told of failures.
        doomed: namespaces that are being deleted, of which no store is taken.

    Attributes:
        last_error: why the last blocks could not be stored; empty if they could, or if a trial has
            shown since that blocks can be stored again.
    """

    store: Store
    loop: Loop
    threads: Threads
    num_threads: int
    page_of: Callable[[int], memoryview]
    share: WriteShare
    limit: WriteLimit
    claims: Claims
    log: FaultLog
    doomed: Doomed
    last_error: str = ""
    _refused: BlockRecord | None = None  # the last block that could not be stored
    _is_hurried: bool = False
    # A function among those that wait is a barrier; see `add_barrier`.
    _waiting: deque[WriteTask | Callable[[], None]] = field(default_factory=deque)
    _packed: deque[WriteTask] = field(default_factory=deque)
    _reserved: deque[WriteTask] = field(default_factory=deque)
    _num_writing: int = 0  # compressions included
    _is_held_back: bool = False  # now
    _was_held_back: bool = False  # before this turn
    _written: list[WriteTask] = field(default_factory=list)
    _written_since: float = 0.0
    _ended: list[Stored] = field(default_factory=list)

    # --- what comes and goes -------------------------------------------------------------------

    @owned_by("loop")
    def add(self, pages: Iterable[Lent]) -> None:
        """Have the blocks in these pages written, after those that wait already."""
        for page in pages:
            if (record := self.claims.of_block(page.record)) is None:
                self._ended.append(Stored(page.page_id, "retention"))
            elif self.doomed.covers(record.namespace):
                self._ended.append(Stored(page.page_id, "evicted"))
            else:
                self._waiting.append(WriteTask(page.page_id, record))

    @owned_by("loop")
    def add_barrier(self, call: Callable[[], None]) -> None:
        """Call a function once every store before it is committed and none after it has begun.

        Those of namespaces that are being deleted end before it, and are not written any more.
        """
        if self.doomed.has_namespaces:
            self._packed = deque(self._ending_doomed(self._packed))
            self._reserved = deque(self._ending_doomed(self._reserved))
            self._waiting = deque(self._ending_doomed(self._waiting))
        self._waiting.append(call)

    def _ending_doomed(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """End the stores of namespaces that are being deleted, and yield what is left."""
        for task in tasks:
            if not isinstance(task, WriteTask) or not self.doomed.covers(task.record.namespace):
                yield task
                continue
            if task.extent is not None:
                self.store.give_back(task.extent)
            self._end(task, "evicted")

    @owned_by("loop")
    def try_again(self) -> None:
        """Try whether a block can be stored, if the last ones could not and none is under way.

        The trial is written like the last block that was refused, and its extent is given back. It
        has expired and its hash is random, so nothing finds it even in an index that is made again.
        """
        if self._refused is None or self.are_under_way:
            return
        now, block_hash = self.store.parts.clock.now(), os.urandom(len(self._refused.block_hash))
        times = {"computed_at": now, "expires_at": now, "last_used": now, "pinned_until": 0.0}
        trial = replace(self._refused, block_hash=block_hash, **times)
        self._packed.append(WriteTask(None, trial))  # as large as the block: it is not compressed

    @owned_by("loop")
    def hurry(self) -> None:
        """Give way to nothing from now on, because the store closes."""
        self._is_hurried = True

    @owned_by("loop")
    def take_ended(self) -> list[Stored]:
        """Return the stores that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    @property
    @owned_by("loop")
    def are_under_way(self) -> bool:
        """Whether any store has not ended, or any barrier's function was not called."""
        waiting = self._waiting or self._packed or self._reserved
        return bool(waiting or self._num_writing or self._written)

    @property
    @owned_by("loop")
    def wait_s(self) -> float:
        """Seconds until there is something to do that no thread hands over."""
        waits_s = [math.inf]
        if self._written:
            waits_s.append(self._written_since + _MAX_GROUP_AGE_S - time.monotonic())
        if self._reserved and not self._num_writing:
            waits_s.append(max(self.limit.wait_s, min(self.share.wait_s, _POLL_S)))
        return max(0.0, min(waits_s))

    @owned_by("loop")
    def step(self) -> None:
        """Start what may be started, and commit the group of written blocks if it is due."""
        self._start()
        if self._is_group_due():
            self._commit()
            self._start()

    # --- compressing and writing ---------------------------------------------------------------

    def _start(self) -> None:
        """Hand writes to the writer threads; beside reads, one at a time and within their share.

        If a limit delays writes, their pages stay lent, as with a slow disk. No limit applies while
        the store closes.
        """
        is_reading = self._is_reading
        self._was_held_back, self._is_held_back = self._is_held_back, is_reading
        max_writing = 1 if is_reading else _WRITES_A_THREAD * self.num_threads
        is_packing = self.store.packing.is_on
        max_packed = 2 * self.num_threads if is_packing else TXN_BLOCKS
        while self._num_writing < max_writing:
            head = self._waiting[0] if self._waiting else None
            if self._reserved:
                if not self._admits(self._reserved[0].size):
                    self._is_held_back = True
                    return
                self._start_task(self._reserved.popleft(), gives_way=not is_reading)
            elif isinstance(head, WriteTask) and len(self._packed) + self._num_writing < max_packed:
                self._waiting.popleft()
                self._start_task(head) if is_packing else self._packed.append(head)
            elif self._packed:
                if not self._reserve():
                    return
            elif callable(head) and not self._num_writing:
                self._commit()
                self._waiting.popleft()
                head()
            else:
                return

    @property
    def _is_reading(self) -> bool:
        """Whether there are reads that writes give way to; called on writer threads too."""
        return self.share.wait_s > 0 and not self._is_hurried

    def _admits(self, num_bytes: int) -> bool:
        """Return whether both limits let a write of so many bytes begin."""
        if self._is_hurried:
            return True
        return (
            not self.limit.wait_s and self.share.admits(num_bytes) and self.limit.admits(num_bytes)
        )

    def _start_task(self, task: WriteTask, *, gives_way: bool = False) -> None:
        self._num_writing += 1
        task.gives_way = gives_way
        task.is_held_back |= self._was_held_back or self._is_held_back
        self.loop.have_done(self.threads, partial(self._move, task), partial(self._end_task, task))

    def _move(self, task: WriteTask) -> None:
        """Compress or write a block, on a writer thread."""
        if task.page_id is None:
            page = aligned_buffer(padded_bytes(task.record.size_bytes))
        else:
            page = self.page_of(task.page_id)
        if task.extent is None:
            task.packed = self.store.packing.pack(page[: task.record.size_bytes])
        else:
            what = (task.record, page, task.packed, partial(self._give_way, task))
            with suppress(_GivesWayError):
                task.written = self.store.write(task.extent, *what)
                task.packed = None  # its memory
                task.ended_at = time.monotonic()

    def _give_way(self, task: WriteTask, num_written: int) -> None:
        if task.gives_way and self._is_reading:
            task.num_in_vain = num_written
            raise _GivesWayError

    @owned_by("loop")
    def _end_task(self, task: WriteTask, error: StorageError | None) -> None:
        self._num_writing -= 1
        task.is_held_back |= self._is_held_back or self.share.wait_s > 0
        if error is not None:
            if task.extent is not None:
                self.store.give_back(task.extent, error)
            self._end(task, _refusal(error))
            self._note_refusal(task.record, error)
        elif task.extent is None:
            self._packed.append(task)
        elif task.written is None:
            self.limit.refund(task.size - task.num_in_vain)
            self._reserved.appendleft(task)
        else:
            if not self._written:
                self._written_since = time.monotonic()
            self._written.append(task)

    # --- extents -------------------------------------------------------------------------------

    def _reserve(self) -> bool:
        """Get extents for the next writes, in one transaction; return False to try again later."""
        batch = list(self._packed)
        self._packed.clear()
        try:
            batch = self._leave_out_known(batch)
            records = [task.record for task in batch]
            extents = self.store.reserve(records, [task.packed for task in batch])
        except StorageError as error:
            self._note_refusal(batch[0].record, error)
            for task in batch:
                self._end(task, _refusal(error))
            return True
        waiting = []
        for task, extent in zip(batch, extents, strict=True):
            task.extent = extent
            if extent is not None:
                self._reserved.append(task)
            elif self._reserved or self._num_writing or self._written:
                waiting.append(task)  # there may be room once the writes under way are committed
            else:
                # After an error, extents that were written in vain may be what leaves no room.
                self.last_error = self.last_error or "the budget leaves no room for another block"
                self._refused = task.record
                self._end(task, "full")
        self._packed.extendleft(reversed(waiting))
        return not waiting or bool(self._reserved)

    def _leave_out_known(self, batch: list[WriteTask]) -> list[WriteTask]:
        """Acknowledge blocks that are stored already and keep their claims; return the others."""
        known = [task for task in batch if self.store.holds(task.record)]
        self.store.touch([task.record for task in known])
        for task in known:
            self._end(task, "")
        return [task for task in batch if task not in known]

    # --- transactions --------------------------------------------------------------------------

    def _is_group_due(self) -> bool:
        return bool(self._written) and (
            (self._num_writing == 0 and not self._reserved)
            or len(self._written) >= TXN_BLOCKS
            or time.monotonic() - self._written_since >= _MAX_GROUP_AGE_S
        )

    def _commit(self) -> None:
        """Acknowledge every block that is written, in one index transaction."""
        group, self._written = self._written, []
        if not group:
            return
        rows = [task.written for task in group if task.written is not None]
        outcomes = self.store.commit(rows)
        errors = [each.error for each in outcomes if each.error is not None]
        if errors:
            self._note_refusal(group[0].record, errors[0])
        else:
            self.last_error, self._refused = "", None
            self.log.note_works("store")
        for task, outcome in zip(group, outcomes, strict=True):
            reason = "" if outcome.is_stored else "expired"
            if outcome.error is not None:
                reason = _refusal(outcome.error)
            self._end(task, reason, task.is_held_back, task.ended_at)

    def _note_refusal(self, record: BlockRecord, error: StorageError) -> None:
        """Report why blocks are not stored, and keep the reason for `stats`."""
        self.last_error, self._refused = str(error), record
        self.log.report("store", error)

    def _end(
        self, task: WriteTask, reason: str, is_held_back: bool = False, ended_at: float = 0.0
    ) -> None:
        if task.page_id is not None:
            ended = Stored(task.page_id, reason, is_held_back, ended_at)
            self._ended.append(ended)


def _refusal(error: StorageError) -> str:
    return "full" if isinstance(error, StoreFullError) else "io_error"
