"""Rows of another engine's memory, stored on disk and loaded from it by our store worker.

This module knows rows, jobs and loans. It does not know the engine: that calls every method, but
never waits here except in `drain()` and `close()`. How old a chunk is, and what a request asked
for, is decided by the caller, who puts it into the record of what is stored.

A job is any number of rows. It ends when the last of them is back, never by a timeout: if loads
stand still or the worker says nothing for too long, the worker is killed, and its rows come back
once it is dead. A lookup lends no row, so that it is a miss as soon as it takes long.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tieredkv.cache.link_rate import LinkRate
from tieredkv.integrations.row_parts import Span
from tieredkv.operate.calls import EvictFilter, decoded
from tieredkv.retention import RetentionPolicies
from tieredkv.tier import (
    BackingTier,
    BlockLife,
    ControlRequest,
    Event,
    Gone,
    Lent,
    Loaded,
    LookupDone,
    ProbeDone,
    Restarted,
    Stored,
    TierFigures,
    Times,
    TouchItem,
)
from tieredkv.types import BlockRecord
from tieredkv.wire.arena import HostArena

_POLL_S = 0.05
_LOOKUP_S = 2.0  # a lookup that takes longer is a miss
_UNMEASURED = ("worker_died", "worker_down", "closing")  # moves that say nothing about the disk


@dataclass(eq=False, slots=True)
class Job:
    """Rows that the engine lent together.

    Attributes:
        id: the engine's number of the job.
        records: what is stored from each row, by the row's number.
        gaps: bytes of rows that are no part of what they hold.
        is_load: whether rows are read from disk.
        began_at: when the job was begun, in seconds of the monotonic clock.
        open: rows that are not back yet.
        failed: why rows were not stored or loaded, by the row's number.
        loaded: what the disk told of the life of each row's block that was loaded.
        purge: how many evictions there had been when the engine asked for it.
        is_whole: whether all its rows are known.
        num_lookups: parts of it that wait for the worker to tell what is stored already.
        ended_at: when the last byte had been read, in seconds of the monotonic clock.
        num_moved: rows that were read or written.
        seconds: how long the job took, once it has ended.
    """

    id: int
    records: dict[int, BlockRecord]
    is_load: bool
    purge: int
    gaps: dict[int, Sequence[Span]] = field(default_factory=dict)
    is_whole: bool = True
    num_lookups: int = 0
    began_at: float = field(default_factory=time.monotonic)
    open: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)
    loaded: dict[int, BlockLife] = field(default_factory=dict)
    ended_at: float = 0.0
    num_moved: int = 0
    seconds: float = 0.0


class _Loan(NamedTuple):
    """A row that the worker has; more than one job may wait for it, as two may offer one chunk."""

    block_hash: bytes
    jobs: list[Job]


class Left(NamedTuple):
    """What has left the disk.

    Attributes:
        hashes: of blocks.
        is_unknown: whether another worker has started, so that other blocks may have left as well.
    """

    hashes: list[bytes]
    is_unknown: bool


class RowTier(BackingTier, Protocol):
    """What rows need of the disk besides."""

    def probe(self, hashes: Sequence[bytes]) -> int:
        """Have blocks read into memory of the tier's own; answered by `ProbeDone`."""

    def give_up(self, why: str) -> None:
        """End a worker that takes too long, and with it every loan."""

    def close(self, timeout_s: float = 30.0) -> None:
        """End what was accepted, within so long, and end; every loan ends."""


class RowStore:
    """The disk tier of an engine whose memory was adopted.

    One thread at a time calls the methods. The store client's thread calls only `_hear`, which
    answers the command line while the engine is idle, and keeps all else for `poll()`.

    Attributes:
        read_rate, write_rate: of the disk, while there is something to read or to write. Moves that
            were held back or that a dead worker left teach nothing.
        num_restarts: how often another worker has started.
        num_purges: evictions by the operator.

    Args:
        open_tier: opens the disk over the rows, and is given what that calls when there is
            something to poll.
        arena: the engine's rows; closed by `close()`.
        policies: until when a claim keeps a block.
        max_stored_rows: how many rows are written at once; the chunks of others are not stored, so
            that a slow disk leaves the engine room.
        write_limit: bytes a second that may be written; 0 for no limit.
        load_timeout_s: the longest that no load may come to its end, and a worker may be silent.

    Raises:
        StorageError, StoreBusyError, FormatVersionError, ConfigError: the store cannot be opened.
    """

    def __init__(
        self,
        open_tier: Callable[[Callable[[], None]], RowTier],
        arena: HostArena,
        policies: RetentionPolicies,
        *,
        max_stored_rows: int,
        write_limit: int,
        load_timeout_s: float,
    ) -> None:
        self._max_stored_rows = max_stored_rows
        self._num_stored_rows = 0  # that are on loan
        self.read_rate, self.write_rate = LinkRate(2e9), LinkRate(1e9)
        self.num_restarts = 0
        self._probe: tuple[int, int] | None = None  # the job, and how many blocks are read
        self._left: list[bytes] = []
        self._has_restarted = False
        self._arena = arena
        self._policies = policies
        self._load_timeout_s = load_timeout_s
        # A write limit makes the worker wait between two rows.
        pause_s = 2 * arena.page_bytes / write_limit if write_limit else 0.0
        self._silence_s = max(load_timeout_s, pause_s)
        self._heard = threading.Condition()  # its lock guards what `_hear` uses
        self._events: deque[Event] = deque()
        self.num_purges = 0
        self._asked: dict[bytes, None] = {}  # blocks to be looked up by the next `flush()`
        self._touched: dict[bytes, TouchItem] = {}
        self._lookups: dict[int, tuple[float, list[bytes]]] = {}  # since when, blocks
        self._late: set[int] = set()  # lookups that are misses by now, as no answer came
        self._answers: dict[bytes, Times | None] = {}
        self._jobs: dict[int, Job] = {}  # by their numbers
        self._lent: dict[int, _Loan] = {}  # by row
        # Parts of stores that wait for a lookup, by the lookup.
        self._unlent: dict[int, tuple[Job, dict[int, BlockRecord]]] = {}
        self._ended: list[Job] = []
        self._last_event = self._last_load = time.monotonic()
        self._client: RowTier | None = None
        self._client = open_tier(self._hear)
        self._hear()

    # --- lookups -------------------------------------------------------------------------------

    def ask(self, block_hash: bytes) -> None:
        """Have a block looked up by the next `flush()`, once for all who ask."""
        self._asked[block_hash] = None

    def touch(self, item: TouchItem) -> None:
        """Note a use of a block; the next `flush()` tells the worker."""
        self._touched[item.block_hash] = item

    def claim(self, block_hash: bytes, computed_at: float, retention: str, now: float) -> TouchItem:
        """Return the use of a stored block by a request of this retention."""
        deadline = self._policies.disk_deadline((retention,), computed_at, now)
        if deadline is None:
            return TouchItem(block_hash, now)
        return TouchItem(block_hash, now, deadline, retention)

    def flush(self) -> None:
        """Send all that was asked since the last call, in one message each."""
        assert self._client is not None
        if self._asked:
            hashes, self._asked = [*self._asked], {}
            self._note_wait()
            self._lookups[self._client.lookup(hashes)] = (time.monotonic(), hashes)
        if self._touched:
            items, self._touched = [*self._touched.values()], {}
            self._client.touch(items)

    def take_answers(self) -> dict[bytes, Times | None]:
        """Return what became of lookups since the last call: the times, or None for a miss."""
        answers, self._answers = self._answers, {}
        return answers

    def take_left(self) -> Left:
        """Return what has left the disk since the last call, if the store's options ask for it."""
        left = Left(self._left, self._has_restarted)
        self._left, self._has_restarted = [], False
        return left

    def probe(self, hashes: Sequence[bytes]) -> bool:
        """Measure the disk with these blocks; return whether that has begun.

        One probe is under way at a time. Its bytes reach no row.
        """
        assert self._client is not None
        if self._probe is not None:
            return False
        self.read_rate.begin(len(hashes) * self._arena.page_bytes, time.monotonic())
        self._probe = self._client.probe(hashes), len(hashes)
        return True

    # --- jobs ----------------------------------------------------------------------------------

    def load(self, id: int, lent: Sequence[Lent], lost: Collection[int] = ()) -> None:
        """Read blocks into rows.

        Args:
            id: the engine's number of the job.
            lent: rows, each with what the engine knows of the block that goes there.
            lost: rows of the job whose blocks are not known any more.
        """
        assert self._client is not None
        self._note_wait()
        if not any(job.is_load for job in self._jobs.values()):
            self._last_load = time.monotonic()
        job = self._jobs[id] = Job(id, {}, is_load=True, purge=self.num_purges)
        job.failed |= dict.fromkeys(lost, "missing")
        self._lend(job, lent)
        self.read_rate.begin(len(lent) * self._arena.page_bytes, time.monotonic())
        self._client.load(lent)
        self._end_if_over(job)

    def store(
        self,
        id: int,
        records: dict[int, BlockRecord],
        *,
        gaps: Mapping[int, Sequence[Span]] | None = None,
        purge: int,
        is_last: bool,
    ) -> None:
        """Write rows that hold blocks which are not stored yet; others are only claimed.

        Args:
            id: the engine's number of the job.
            records: what each row holds, the head of a chain first.
            gaps: bytes of rows that are no part of that: they are zeroed before a row is written.
            purge: what `num_purges` was when the engine asked for it.
            is_last: whether no more rows of this job follow in another call.
        """
        assert self._client is not None
        job = self._jobs.setdefault(id, Job(id, {}, is_load=False, purge=purge))
        job.records |= records
        job.gaps |= gaps or {}
        job.is_whole = is_last
        if records:
            self._note_wait()
            hashes = [record.block_hash for record in records.values()]
            self._unlent[self._client.lookup(hashes)] = job, records
            job.num_lookups += 1
        self._end_if_over(job)

    def poll(self) -> list[Job]:
        """Return the jobs that have ended since the last call."""
        with self._heard:
            events = [*self._events]
            self._events.clear()
        for event in events:
            self._take(event)
        self._watch()
        ended, self._ended = self._ended, []
        return ended

    @property
    def has_work(self) -> bool:
        """Whether any job or lookup has not ended."""
        return bool(self._jobs or self._lookups or self._asked or self._ended)

    def stats(self) -> TierFigures:
        """Return the store's figures."""
        assert self._client is not None
        return self._client.stats()

    @property
    def pid(self) -> int | None:
        """Process id of the worker, while one is up."""
        return self._client.state().pid if self._client is not None else None

    def drain(self, timeout_s: float | None = None) -> list[Job]:
        """Wait until every job has ended, and return those that have; the worker may be killed."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        ended = self.poll()
        while self._jobs and (deadline is None or time.monotonic() < deadline):
            with self._heard:
                if not self._events:
                    self._heard.wait(_POLL_S)
            ended += self.poll()
        return ended

    def close(self, drain_timeout_s: float) -> None:
        """Write what was accepted, then let the worker end; no row is used any more after this."""
        self.drain(drain_timeout_s)
        assert self._client is not None
        self._client.close(drain_timeout_s)
        self._arena.close()

    # --- inside --------------------------------------------------------------------------------

    def _note_wait(self) -> None:
        """Note that the worker is asked for something, so that its silence counts from now on."""
        if not self._is_awaited:
            self._last_event = time.monotonic()

    def _lend(self, job: Job, lent: Sequence[Lent]) -> None:
        job.open.update(each.page_id for each in lent)
        self._lent |= {each.page_id: _Loan(each.block_hash, [job]) for each in lent}

    def _end_if_over(self, job: Job) -> None:
        if job.is_whole and not job.num_lookups and not job.open and job.id in self._jobs:
            job.seconds = time.monotonic() - job.began_at
            self._ended.append(self._jobs.pop(job.id))

    def _take(self, event: Event) -> None:
        self._last_event = time.monotonic()
        match event:
            case LookupDone(number, sealed) if number in self._unlent:
                self._store_unknown(*self._unlent.pop(number), sealed)
            case LookupDone(number, sealed) if number in self._lookups:
                for block_hash in self._lookups.pop(number)[1]:
                    self._answers[block_hash] = self._times(block_hash, sealed)
            case LookupDone(number):
                self._late.discard(number)
            case Loaded() | Stored():
                if isinstance(event, Loaded):
                    self._last_load = self._last_event
                self._num_stored_rows -= isinstance(event, Stored)
                self._measure(event)
                for job in self._lent.pop(event.page_id).jobs:
                    job.open.discard(event.page_id)
                    job.num_moved += event.ok
                    job.ended_at = max(job.ended_at, event.ended_at)
                    if not event.ok:
                        job.failed[event.page_id] = event.reason
                    elif isinstance(event, Loaded) and event.life is not None:
                        job.loaded[event.page_id] = event.life
                    self._end_if_over(job)
            case ProbeDone(number, ended_at) if self._probe is not None:
                assert self._probe[0] == number, "one probe is under way at a time"
                for moment in ended_at:
                    self.read_rate.end(self._arena.page_bytes, moment)
                num_lost, self._probe = self._probe[1] - len(ended_at), None
                if num_lost:
                    self.read_rate.skip(num_lost * self._arena.page_bytes, time.monotonic())
            case Gone(hashes=hashes):
                self._left += hashes
            case Restarted():
                self.num_restarts += 1
                self._has_restarted = True

    def _measure(self, event: Loaded | Stored) -> None:
        """Learn how fast the disk is from a move that has ended."""
        num_bytes, now = self._arena.page_bytes, event.ended_at or time.monotonic()
        rate = self.read_rate if isinstance(event, Loaded) else self.write_rate
        is_held_back = isinstance(event, Stored) and event.is_held_back
        if is_held_back or event.reason in _UNMEASURED:
            rate.skip(num_bytes, now)
        else:
            rate.end(num_bytes, now, teaches=event.ok and event.ended_at > 0)

    def _store_unknown(
        self, job: Job, records: Mapping[int, BlockRecord], sealed: Mapping[bytes, bytes]
    ) -> None:
        """Write those blocks of a part of a job that are not stored, and claim the others.

        A stored block keeps its age, whenever its copies are offered again.
        """
        assert self._client is not None
        unknown = dict[int, BlockRecord]()
        job.num_lookups -= 1
        for row, offered in records.items():
            if (stored := self._times(block_hash := offered.block_hash, sealed)) is not None:
                claimed = stored.computed_at, offered.retention, offered.last_used
                self.touch(self.claim(block_hash, *claimed))
            elif (loan := self._lent.get(row)) is None:
                unknown[row] = offered
            elif loan.block_hash == block_hash:
                loan.jobs.append(job)
                job.open.add(row)
            else:  # of another tenant
                job.failed[row] = "busy"
        for row in unknown:
            page = self._arena.page(row) if row in job.gaps else memoryview(b"")
            for begin, end in job.gaps.get(row, ()):
                page[begin:end] = bytes(end - begin)
            page.release()
        with self._heard:
            if job.purge == self.num_purges:
                room = max(0, self._max_stored_rows - self._num_stored_rows)
                job.failed |= dict.fromkeys([*unknown][room:], "busy")
                unknown = dict([*unknown.items()][:room])
                self._num_stored_rows += len(unknown)
                lent = [Lent.of(record, row) for row, record in unknown.items()]
                self._lend(job, lent)
                num_bytes = len(unknown) * self._arena.page_bytes
                self.write_rate.begin(num_bytes, time.monotonic())
                self._client.store(lent)
            else:  # the operator has evicted blocks since, and these may be among them
                job.failed |= dict.fromkeys(unknown, "evicted")
        self._end_if_over(job)

    def _times(self, block_hash: bytes, found: Mapping[bytes, bytes]) -> Times | None:
        assert self._client is not None
        return None if (it := found.get(block_hash)) is None else self._client.times_of(it)

    @property
    def _is_awaited(self) -> bool:
        """Whether the worker has something to say."""
        is_moving = any(job.open or job.num_lookups for job in self._jobs.values())
        return bool(is_moving or self._lookups or self._late)

    def _watch(self) -> None:
        """Give up a worker that stands still; answer lookups that wait too long as misses."""
        assert self._client is not None
        now = time.monotonic()
        for number, (since, hashes) in [*self._lookups.items()]:
            if now - since > min(_LOOKUP_S, self._load_timeout_s):
                del self._lookups[number]
                self._late.add(number)
                self._answers |= dict.fromkeys(hashes)
        is_loading = any(job.is_load for job in self._jobs.values())
        if is_loading and now - self._last_load > self._load_timeout_s:
            self._client.give_up(f"has ended no load for {self._load_timeout_s:g} s")
        elif self._is_awaited and now - self._last_event > self._silence_s:
            self._client.give_up(f"has been silent for {self._silence_s:g} s")

    def _hear(self) -> None:
        """Take events from the client, on whatever thread it has them; answer the command line.

        VRAM and host memory are the engine's own, of which the command line learns nothing here.
        Stores that are not lent yet when blocks are evicted do not begin any more.
        """
        with self._heard:
            if self._client is None:  # it is being made
                return
            for event in self._client.poll():
                if isinstance(event, ControlRequest):
                    self.num_purges += isinstance(decoded(event.call), EvictFilter)
                    self._client.reply(event.id, {})
                else:
                    self._events.append(event)
            self._heard.notify_all()
