"""The disk tier as the engine sees it: it lends pages to the store's worker and hands out events.

It turns the hashes by which the engine knows blocks into the names by which the store does, and
back, and knows which pages the worker may be touching. It does not know what is stored, nor where a
page's bytes go next. The `Supervisor` knows whether a worker lives.
"""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from tieredkv.hashing import ModelIdentity
from tieredkv.storage.client.supervisor import Supervisor
from tieredkv.storage.format.record import times_of
from tieredkv.storage.keys.names import Names
from tieredkv.storage.messages import engine as messages
from tieredkv.storage.messages.operator import EngineAnswer
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.stats import NO_STATS, StoreStats
from tieredkv.tier import (
    HASHES,
    BackingTier,
    BlockNames,
    ControlRequest,
    Event,
    Gone,
    Held,
    Lent,
    Loaded,
    LookupDone,
    ProbeDone,
    Restarted,
    Stored,
    TierState,
    TouchItem,
)
from tieredkv.wire.arena import HostArena

logger = logging.getLogger(__name__)


class StoreClient(BackingTier):
    """The disk tier, which a worker process serves.

    Every method may be called from any thread. Only the constructor and `close()` wait for the
    disk. A thread of the supervisor's calls `wake` when there is something to `poll()`.

    Invariants, verified by the tests' `CheckedClient`:
    - a page is on loan from `load()` or `store()` until its event, for one job at a time;
    - a loan ends by the worker's completion, or after the worker was waited for as a child: never
      by a timeout;
    - while no worker is up, no new loan begins; once the last one is reaped, none is left;
    - every lookup and every probe gets its answer;
    - a deletion is repeated to each new worker until one has answered it.

    What waits for a worker that does not read is bounded: pages are, by the arena; beyond
    `MAX_QUEUED_BYTES` a lookup ends as a miss and a touch is dropped, both counted, and a deletion
    has the worker killed, to be carried out by the next one.

    Attributes:
        names: what the store calls blocks, as the last worker said; that worker may be down.
    """

    def __init__(
        self, options: StoreOptions, arena: HostArena, *, wake: Callable[[], None] = lambda: None
    ) -> None:
        """Start the worker and wait until it serves the store, or ended without saying why.

        In the second case the disk tier is off, as after a later failure: see `state`.

        Raises:
            StorageError, StoreBusyError, FormatVersionError, ConfigError: what it refused with.
        """
        self.arena = arena
        self.shares: dict[bytes, float] = {}
        self.names: BlockNames = HASHES
        self._names = Names()  # the same
        self._path, self._wake = options.path, wake
        self._numbers = itertools.count(1)  # of jobs
        self._events: deque[Event] = deque()
        # Jobs that are not answered yet: their blocks, and the answer if the worker dies.
        self._asked: dict[int, tuple[Sequence[bytes], LookupDone | ProbeDone]] = {}
        self._loans: dict[int, Loaded | Stored] = {}  # by page: the end if the worker dies
        self._deletions: dict[int, tuple[Sequence[bytes], str]] = {}  # by job: blocks and reason
        self._told_shares: dict[bytes, float] | None = None  # to the worker of now
        self._model: ModelIdentity | None = None  # of the engine, once it is loaded
        self._has_told = False  # whether the worker of now has told which blocks it has
        self._stats = NO_STATS
        self._num_lookups_dropped = self._num_touches_dropped = 0
        self._supervisor = Supervisor(options, arena, self, wake)
        self._lock = self._supervisor.lock
        self._supervisor.start()

    # --- the engine's calls --------------------------------------------------------------------

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """Ask which blocks are stored and not expired; answered by `LookupDone`."""
        return self._ask(messages.LookupCall, LookupDone, hashes)

    def probe(self, hashes: Sequence[bytes]) -> int:
        """Have blocks read into memory of the worker's own; answered by `ProbeDone`."""
        return self._ask(messages.ProbeCall, ProbeDone, hashes)

    def _ask(
        self,
        call: type[messages.LookupCall] | type[messages.ProbeCall],
        answer: type[LookupDone] | type[ProbeDone],
        hashes: Sequence[bytes],
    ) -> int:
        with self._lock:
            job, channel = next(self._numbers), self._supervisor.channel
            if channel is not None and not channel.is_stuck:
                self._asked[job] = [*hashes], answer(job)
                channel.send(call(job, self.names.hide(hashes)))
                return job
            self._num_lookups_dropped += channel is not None and answer is LookupDone
            self._events.append(answer(job))
        self._wake()
        return job

    times_of = staticmethod(times_of)

    def load(self, lent: Sequence[Lent]) -> None:
        """Read blocks into pages; each page is on loan until its `Loaded`."""
        self._lend(lent, Loaded)

    def store(self, lent: Sequence[Lent]) -> None:
        """Write blocks from pages; each page is on loan until its `Stored`."""
        self._lend(lent, Stored)

    def _lend(self, lent: Sequence[Lent], ending: type[Loaded] | type[Stored]) -> None:
        with self._lock:
            channel = self._supervisor.channel
            fault = "worker_down" if channel is None else "worker_died"
            ends = [ending(each.page_id, fault) for each in lent]
            if channel is not None:
                named = self._named(lent)
                self._loans |= {end.page_id: end for end in ends}
                if ending is Loaded:
                    channel.send(messages.LoadCall(named))
                    return
                is_new, self._told_shares = self.shares is not self._told_shares, self.shares
                channel.send(messages.StoreCall(named, self.shares if is_new else None))
                return
            self._events += ends
        self._wake()

    def _named(self, lent: Sequence[Lent]) -> list[Lent]:
        """Return pages with names in the places of hashes."""
        names = self.names.hide([each.block_hash for each in lent])
        parents = iter(self.names.hide([it.parent_hash for it in lent if it.parent_hash]))
        return [
            replace(it, block_hash=name, parent_hash=next(parents) if it.parent_hash else None)
            for it, name in zip(lent, names, strict=True)
        ]

    def touch(self, items: Sequence[TouchItem]) -> None:
        """Refresh blocks after a hit; gathered by the worker, lost if it dies before its flush."""
        with self._lock:
            channel = self._supervisor.channel
            if channel is None or channel.is_stuck:
                self._num_touches_dropped += len(items)
                return
            names = self.names.hide([each.block_hash for each in items])
            pairs = zip(items, names, strict=True)
            channel.send(messages.TouchCall([replace(it, block_hash=name) for it, name in pairs]))

    def delete(self, hashes: Sequence[bytes], reason: str) -> None:
        """Make blocks unreachable, those that are being written too.

        Where no worker takes it, the next one does before it looks anything up.
        """
        with self._lock:
            job, channel = next(self._numbers), self._supervisor.channel
            self._deletions[job] = [*hashes], reason
            if channel is not None and channel.is_stuck:
                self._supervisor.give_up("does not accept deletions")
            else:
                self._tell(messages.DeleteCall(job, self.names.hide(hashes), reason))

    def give_up(self, why: str) -> None:
        """Kill a worker that takes too long; every loan ends once it is dead, with `worker_died`.

        Until the next worker serves, nothing is accepted. Where none is up, this does nothing.

        Args:
            why: what the worker does wrong, for the log.
        """
        with self._lock:
            self._supervisor.give_up(why)

    def note_model(self, model: ModelIdentity) -> None:
        """Have this and each later worker count the blocks that this model can never use."""
        with self._lock:
            self._model = model
            self._tell(messages.ModelCall(model))

    def reply(self, id: int, body: dict[str, Any], has_more: bool = False) -> None:
        """Answer a `ControlRequest`; a part that takes more than five seconds is dropped."""
        with self._lock:
            self._tell(EngineAnswer(id, body, has_more))

    def _tell(self, message: messages.EngineMessage) -> None:
        """Send a message to the worker, if one takes any; under the lock."""
        if (channel := self._supervisor.channel) is not None:
            channel.send(message)

    def poll(self) -> list[Event]:
        """Return what has happened since the last call, oldest first; never waits."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    def stats(self) -> StoreStats:
        """Return the last known figures of the store, zeroes before the first worker is up."""
        with self._lock:
            return replace(
                self._stats,
                num_lookups_dropped=self._num_lookups_dropped,
                num_touches_dropped=self._stats.num_touches_dropped + self._num_touches_dropped,
            )

    def state(self) -> TierState:
        """Return whether a worker serves the store; `why` may be empty for a moment after its end.

        What the last worker told of the store counts while none is up.
        """
        with self._lock:
            supervisor, stats = self._supervisor, self._stats
            is_open = supervisor.channel is not None
            why = stats.store_error if is_open else supervisor.trouble
            room_bytes = max(0, stats.bytes_budget - stats.bytes_files)
            return TierState(is_open, why, room_bytes, supervisor.pid)

    @property
    def pid(self) -> int | None:
        """Process id of the worker, while one is up."""
        return self.state().pid

    def close(self, timeout_s: float = 30.0) -> None:
        """Let the worker finish its writes and exit; twice is fine.

        After `timeout_s` it is killed. Pages that are on loan get their events either way.
        """
        self._supervisor.close(timeout_s)
        with self._lock:
            num_undeleted = sum(len(hashes) for hashes, _ in self._deletions.values())
            self._deletions.clear()
        if num_undeleted:
            # No eviction that was answered is among them: `Verbs` had the disk's blocks deleted.
            text = "the store of `%s` cannot be reached and keeps %d blocks that were dropped while"
            text += " they were being written, until they expire"
            logger.warning(text, self._path, num_undeleted)

    # --- what the supervisor tells, under the lock ---------------------------------------------

    def hear_start(self, started: messages.WorkerUp, *, is_restart: bool) -> None:
        """Tell a new worker what the last one did not answer, before all else."""
        self._stats = started.stats
        self.names = self._names = Names(started.names_key)
        self._told_shares = None
        for job, (hashes, reason) in self._deletions.items():
            self._tell(messages.DeleteCall(job, self.names.hide(hashes), reason))
        if self._model is not None:
            self._tell(messages.ModelCall(self._model))
        if is_restart:
            self._events.append(Restarted())

    def hear(self, message: messages.WorkerMessage) -> None:
        """Take a message of the worker."""
        match message:
            case messages.Completions(ended, stats):
                self._stats = stats
                self._events += [each for each in ended if self._end_loan(each)]
            case messages.LookupAnswer(job, records):
                if (asked := self._asked.pop(job, None)) is not None:
                    pairs = zip(asked[0], records, strict=True)
                    self._events.append(LookupDone(job, {it: data for it, data in pairs if data}))
            case ProbeDone(job):
                if self._asked.pop(job, None) is not None:
                    self._events.append(message)
            case messages.DeleteDone(job):
                self._deletions.pop(job, None)
            case Held():
                heads = self._names.fingerprints(message.fingerprints)
                self._events.append(replace(message, fingerprints=heads))
                self._has_told = True
            case Gone(names, reason, num_bytes):
                self._events.append(Gone(self.names.reveal(names), reason, num_bytes))
            case ControlRequest():
                self._events.append(message)

    def _end_loan(self, ended: Loaded | Stored) -> bool:
        """Take a page back; return whether it was on that loan."""
        if type(self._loans.get(ended.page_id)) is not type(ended):
            text = "the store worker completed a load or store of page %d that nobody asked for"
            logger.error(text, ended.page_id)
            return False
        del self._loans[ended.page_id]
        return True

    def hear_end(self) -> None:
        """Answer every job that the worker left open; it is dead and reaped."""
        self._events += self._loans.values()
        self._events += [answer for _, answer in self._asked.values()]
        self._loans.clear()
        self._asked.clear()
        if self._has_told:  # what the next worker will have is not known
            self._events.append(Held(is_first=True))
            self._has_told = False
