"""The link between host memory and disk: reads into pages, writes of pages, and questions.

This module knows what the store's worker was given, since when, and how fast the disk is. It does
not know why a block moves. `poll` returns a read or a write once the worker is done with its page,
never before. Until then the page is on loan, and the caller holds it.

Only the engine's thread may call it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tieredkv.cache.block import Block
from tieredkv.cache.catalog import Entry
from tieredkv.cache.counters import CacheCounters
from tieredkv.cache.link_rate import LinkRate
from tieredkv.cache.plan import LinkState
from tieredkv.errors import IntegrityError
from tieredkv.tier import (
    BackingTier,
    BlockLife,
    ControlRequest,
    Gone,
    Held,
    Lent,
    Loaded,
    LookupDone,
    ProbeDone,
    Restarted,
    Stored,
    Times,
    TouchItem,
)
from tieredkv.types import BlockHash, BlockRecord

MAX_READ_S = 0.05
"""How much the disk is given ahead, in seconds at its rate; the rest is held back for the plan."""

MIN_READS, MIN_READ_BYTES = 32, 32 << 20
"""Reads that the worker may hold at any rate, so that its threads are busy; of larger blocks it
may hold so many bytes, but two reads at least.
"""

MAX_WRITE_S = 0.1
"""Pages are on loan to be written for about so long, at the measured rate."""

MIN_WRITES = 32
"""Pages that may be on loan to be written at any rate, so that writes can be merged."""

READ_LATENCY_S = 0.003
"""From the end of a read until its block is in VRAM and a step can use it."""

EARLY_SHARE = 0.5
"""Share of `drain_timeout` that a stop may need; blocks that would take it longer are written."""


@dataclass(slots=True, eq=False)
class Read:
    """A block that is being read from disk.

    Attributes:
        lent: the block, as its chain says, and the page.
        index: of the block in its chain.
        until: until when the disk has the block, as far as is known.
        page: what it is read into; on loan until `poll` returns the read.
        began_at: when that began, in `perf_counter` time.
        last_used: the same, by the clock of retention.
        is_cancelled: whether no request waits for it any more.
        reason: why it failed, once it has ended; empty if it succeeded.
        found: what the disk told of the block's life, if it succeeded.
    """

    lent: Lent
    index: int
    until: float
    page: Block
    began_at: float
    last_used: float
    is_cancelled: bool = False
    reason: str = ""
    found: BlockLife | None = None

    @property
    def block_hash(self) -> BlockHash:
        """Hash of the block."""
        return BlockHash(self.lent.block_hash)

    @property
    def namespace(self) -> bytes:
        """Namespace of the block."""
        return self.lent.namespace


@dataclass(slots=True, eq=False)
class Write:
    """A page that is being written to disk.

    Attributes:
        record: of the block.
        page: what is written; on loan until `poll` returns the write.
        began_at: when that began, in `perf_counter` time.
        entry: of the block, since the hash may get another entry meanwhile.
        reason: why it failed, once it has ended; empty if it succeeded.
    """

    record: BlockRecord
    page: Block
    began_at: float
    entry: Entry
    reason: str = ""


TakeFound = Callable[[Mapping[bytes, bytes]], object]
"""Takes what the disk has found: what it knows of each block by hash."""

Told = Read | Write | ProbeDone | Held | Gone | Restarted | ControlRequest
"""A read or a write that has ended, or something else that the store has told."""


def _no_times(found: bytes) -> Times:
    raise AssertionError("without a disk nothing is found there")


class DiskLink:
    """Moves blocks between host memory and disk.

    Reads and writes are queued by `read` and `write`, and `send` starts what is queued. How much
    the disk is given ahead follows from its measured rate.

    Invariants (`check`): a page that is read into is held, and one that is written has a
    reader.

    Attributes:
        times_of: reads the times of a block from what a lookup has found.
        read_rate, write_rate: of reads from disk, and of writes to it while no reads compete with
            them.
    """

    def __init__(
        self, store: BackingTier | None, payload_bytes: int, counters: CacheCounters
    ) -> None:
        """Bind the disk.

        Args:
            store: the client of its worker; None if there is no disk, so that nothing ever moves.
            payload_bytes: bytes of a block's content in a page and on disk.
            counters: count the moves that have ended.
        """
        self._store, self._payload_bytes, self._counters = store, payload_bytes, counters
        self.times_of = _no_times if store is None else store.times_of
        self.read_rate, self.write_rate = LinkRate(2e9), LinkRate(1e9)
        self._reads: dict[bytes, Read] = {}
        self._writes: dict[bytes, Write] = {}
        self._on_loan: dict[int, bytes] = {}  # by page: the hash of the block
        self._to_load: list[Lent] = []
        self._to_store: list[Lent] = []
        self._questions: dict[int, TakeFound] = {}  # by job

    # What is under way

    @property
    def reads(self) -> Iterable[Read]:
        """The reads under way, the oldest first."""
        return self._reads.values()

    @property
    def num_reading(self) -> int:
        """How many pages are read into."""
        return len(self._reads)

    @property
    def num_writing(self) -> int:
        """How many pages are being written."""
        return len(self._writes)

    def is_reading(self, block_hash: BlockHash) -> bool:
        """Return whether the block is being read."""
        return block_hash in self._reads

    def is_awaited(self, block_hash: BlockHash) -> bool:
        """Return whether the block is being read and may be waited for."""
        read = self._reads.get(block_hash)
        return read is not None and not read.is_cancelled

    def is_writing(self, block_hash: BlockHash) -> bool:
        """Return whether the block is being written."""
        return block_hash in self._writes

    # How much it takes

    def most_reads(self, now: float, away_s: float = 0.0) -> int:
        """Return how many reads may be under way.

        Args:
            now: monotonic time.
            away_s: for how much longer than usual nobody will ask again.
        """
        num_bytes = (MAX_READ_S + away_s) * self.read_rate.effective(now)
        least = max(2, min(MIN_READS, MIN_READ_BYTES // self._payload_bytes))
        return max(least, int(num_bytes / self._payload_bytes))

    @property
    def most_writes(self) -> int:
        """How many writes may be under way."""
        return max(MIN_WRITES, int(MAX_WRITE_S * self.write_rate.steady / self._payload_bytes))

    def may_read(self, now: float) -> bool:
        """Return whether the operator's limit lets a read begin now."""
        return self.read_rate.admits(self._payload_bytes, now)

    def read_state(self, now: float) -> LinkState:
        """Return what the planner has to know of reads."""
        rate = self.read_rate
        return LinkState(rate.effective(now), self._payload_bytes, rate.busy_s(now), READ_LATENCY_S)

    # Moves

    def read(
        self, lent: Lent, index: int, until: float, page: Block, now: float, clock_s: float
    ) -> None:
        """Queue a read of a block into a page, which is on loan from now on.

        Args:
            lent: the block, as its chain says, and the page.
            index: of the block in its chain.
            until: until when the disk has the block, as far as is known.
            page: what it is read into.
            now: monotonic time.
            clock_s: the time by the clock of retention.
        """
        self._on_loan[page.block_id] = lent.block_hash
        self._reads[lent.block_hash] = Read(lent, index, until, page, time.perf_counter(), clock_s)
        self.read_rate.begin(self._payload_bytes, now)
        self._to_load.append(lent)

    def write(self, record: BlockRecord, page: Block, entry: Entry, now: float) -> None:
        """Queue a write of a page, which is on loan from now on.

        Args:
            record: of the block.
            page: what is written.
            entry: of the block.
            now: monotonic time.
        """
        self._on_loan[page.block_id] = record.block_hash
        self._writes[record.block_hash] = Write(record, page, time.perf_counter(), entry)
        self.write_rate.begin(self._payload_bytes, now)
        self._to_store.append(Lent.of(record, page.block_id))

    def send(self) -> None:
        """Start the reads and writes that are queued."""
        if self._to_load:
            assert self._store is not None
            pages, self._to_load = self._to_load, []
            self._store.load(pages)
        if self._to_store:
            assert self._store is not None
            pages, self._to_store = self._to_store, []
            self._store.store(pages)

    def cancel(self, block_hash: BlockHash) -> None:
        """Have nobody wait for a block that is being read, if it is; its page stays on loan."""
        if (read := self._reads.get(block_hash)) is not None:
            read.is_cancelled = True

    def look_up(self, hashes: Sequence[bytes], then: TakeFound) -> None:
        """Have `poll` call `then` with the records of the blocks that the disk has.

        Without any block, or without a disk, `then` is called at once.
        """
        if self._store is None or not hashes:
            then({})
        else:
            self._questions[self._store.lookup(hashes)] = then

    def touch(self, items: Sequence[TouchItem]) -> None:
        """Tell the disk that blocks were used."""
        if items and self._store is not None:
            self._store.touch(items)

    def poll(self) -> Iterator[Told]:
        """Yield what the store has told since the last call, the oldest first.

        The loan of a page ends when its read or write is yielded. Answers go to those who asked.
        """
        counters, size = self._counters, self._payload_bytes
        for event in self._store.poll() if self._store is not None else ():
            if isinstance(event, Loaded):
                read = self._reads.pop(self._on_loan.pop(event.page_id))
                read.found, read.reason = event.life, event.reason
                counters.note_move("disk,host", read.began_at)
                self.read_rate.end(size, event.ended_at, teaches=not event.reason)
                yield read
            elif isinstance(event, Stored):
                write = self._writes.pop(self._on_loan.pop(event.page_id))
                write.reason = event.reason
                counters.note_move("host,disk", write.began_at)
                if event.is_held_back:
                    self.write_rate.skip(size, event.ended_at)
                else:
                    is_written = not event.reason and event.ended_at > 0
                    self.write_rate.end(size, event.ended_at, teaches=is_written)
                yield write
            elif isinstance(event, LookupDone):
                if (then := self._questions.pop(event.job, None)) is not None:
                    then(event.found)
            else:
                yield event

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        if any(read.page.ref_count < 1 for read in self._reads.values()):
            raise IntegrityError("a page is read into, but not held")
        for block_hash, write in self._writes.items():
            if write.page.num_readers < 1:
                what = f"the page of {block_hash.hex()[:12]} is being written"
                raise IntegrityError(f"{what}, but it has no reader")
