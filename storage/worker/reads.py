"""Loads: blocks that the engine wants to have read into pages, and what becomes of each.

A load waits, is located together with others, is read by a thread and ends. If reading fails, the
load ends once the index thread has found out why.

A probe reads blocks into memory that nobody looks at, since only its time is of interest. Its reads
start while no load waits.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from tieredkv.errors import CorruptBlockError, StorageError
from tieredkv.storage.format.planes import aligned_buffer
from tieredkv.storage.format.record import Located, corrupt, decode_record, padded_bytes
from tieredkv.storage.ownership import owned_by
from tieredkv.storage.store import Store
from tieredkv.storage.worker.loop import Loop, Threads
from tieredkv.storage.worker.pace import WriteShare
from tieredkv.tier import BlockLife, Lent, Loaded, ProbeDone

_MAX_LOCATES_A_TURN = 64
_READS_A_THREAD = 4  # enough to keep the threads busy while the next loads are located

Find = Callable[[list[bytes]], dict[bytes, bytes]]
Judge = Callable[[Located, StorageError, Callable[[str], None]], None]


@dataclass(eq=False, slots=True)
class _Probe:
    """A probe that has not ended: blocks that were not read yet, and when others had been."""

    job: int
    waiting: deque[bytes]
    num_reading: int = 0
    ended_at: list[float] = field(default_factory=list)


@dataclass(eq=False)
class Reads:
    """The loads and probes that one worker was asked for; only the front thread uses them.

    Args:
        store: where blocks are stored.
        loop: of the front thread.
        threads, num_threads: read payloads.
        page_of: returns the memory of a page; called by these threads.
        share: told of every read, so that writes give way.
        find: returns the sealed records of those blocks that may be read.
        judge: finds out why a read failed, and then calls back with the reason.
        answer: sends the answer to a probe.
    """

    store: Store
    loop: Loop
    threads: Threads
    num_threads: int
    page_of: Callable[[int], memoryview]
    share: WriteShare
    find: Find
    judge: Judge
    answer: Callable[[ProbeDone], None]
    _waiting: deque[Lent] = field(default_factory=deque)
    _num_reading: int = 0
    _ended: list[Loaded] = field(default_factory=list)
    _probes: deque[_Probe] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.retentions = self.store.parts.index.retentions

    @owned_by("loop")
    def add(self, pages: Iterable[Lent]) -> None:
        """Have blocks read into these pages, after those that wait already."""
        self._waiting += pages

    @owned_by("loop")
    def probe(self, job: int, hashes: Iterable[bytes]) -> None:
        """Have blocks read for nothing but the time that it takes."""
        self._probes.append(_Probe(job, deque(hashes)))

    @owned_by("loop")
    def refuse_waiting(self) -> None:
        """End the loads and probes that have not been started, because the store closes."""
        for probe in self._probes:
            probe.waiting.clear()
        for page in self._waiting:
            self._answer(page, "closing")
        self._waiting.clear()

    @owned_by("loop")
    def take_ended(self) -> list[Loaded]:
        """Return the loads that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    @property
    @owned_by("loop")
    def are_under_way(self) -> bool:
        """Whether any load or probe has not ended."""
        return bool(self._waiting or self._num_reading or self._probes)

    @property
    @owned_by("loop")
    def can_start(self) -> bool:
        """Whether to start another load; only as many are started as keep the readers busy."""
        return bool(self._waiting) and self._num_reading < _READS_A_THREAD * self.num_threads

    @owned_by("loop")
    def start(self) -> None:
        """Look several blocks up at once, then have them read.

        Lookups are made first, because busy readers slow them down.
        """
        if not self.can_start:
            self._start_probes()
            return
        pages: list[Lent] = []
        while self.can_start and len(pages) < _MAX_LOCATES_A_TURN:
            pages.append(self._waiting.popleft())
            self._num_reading += 1
        found = self.find([page.block_hash for page in pages])
        for page in pages:
            self._start(page, found.get(page.block_hash))

    def _start_probes(self) -> None:
        """Start reads of the first probe while no load waits, and end those that have been read."""
        while self._probes:
            probe = self._probes[0]
            while probe.waiting and not self._waiting and probe.num_reading < self.num_threads:
                self._start_probing(probe, probe.waiting.popleft())
            if probe.waiting or probe.num_reading:
                return
            self.answer(ProbeDone(probe.job, probe.ended_at))
            self._probes.popleft()

    def _start_probing(self, probe: _Probe, block_hash: bytes) -> None:
        if (sealed := self.find([block_hash]).get(block_hash)) is None:
            return
        try:
            located = decode_record(block_hash, sealed, self.retentions)
        except CorruptBlockError:  # whoever loads the block has it dropped
            return

        def read() -> None:
            size_bytes = padded_bytes(located.record.size_bytes)
            self.store.read(located, aligned_buffer(size_bytes))

        def end(error: StorageError | None) -> None:
            probe.num_reading -= 1
            if error is None:
                probe.ended_at.append(time.monotonic())
                self.share.note_read(located.record.size_bytes)

        probe.num_reading += 1
        self.share.note_read(0)
        self.loop.have_done(self.threads, read, end)

    def _start(self, page: Lent, sealed: bytes | None) -> None:
        if sealed is None:
            return self._end(page, "missing")
        try:
            located = decode_record(page.block_hash, sealed, self.retentions)
        except CorruptBlockError:  # the seal is right, but the bytes under it are no record
            self.store.note_damaged(page.block_hash)
            return self._end(page, "missing")
        end = partial(self._end_read, page, located)
        if not page.is_of(located.record):
            # This block must be dropped, or the right one could never take its place.
            what = "its record describes another block"
            return end(corrupt(page.block_hash, "identity", what))

        def read() -> None:
            self.store.read(located, self.page_of(page.page_id))

        self.share.note_read(0)
        return self.loop.have_done(self.threads, read, end)

    def _end_read(self, page: Lent, located: Located, error: StorageError | None) -> None:
        if error is None:
            self.share.note_read(page.size_bytes)
            self._end(page, "", BlockLife.of(located.record))
        else:
            self.judge(located, error, partial(self._end_failed, page))

    def _end_failed(self, page: Lent, reason: str) -> None:
        if reason == "evicted":  # the block may also have moved since it was located: look again
            self._num_reading -= 1
            self._waiting.append(page)
        else:
            self.share.note_read(page.size_bytes)
            self._end(page, reason)

    def _end(self, page: Lent, reason: str, life: BlockLife | None = None) -> None:
        self._num_reading -= 1
        self._answer(page, reason, life)

    def _answer(self, page: Lent, reason: str, life: BlockLife | None = None) -> None:
        now = time.monotonic()
        self._ended.append(Loaded(page.page_id, reason, life, now))
