"""The engine's side of the store worker: it sends jobs, receives events and lends pages.

It knows when a worker process lives and which pages the worker may be touching. It turns the hashes
by which the engine knows blocks into the names by which the store does, and back. It does not know
what is stored, nor where a page's bytes go next.
"""

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from tieredkv.errors import StorageError, StoreBusyError, TieredKVError, named
from tieredkv.hashing import ModelIdentity
from tieredkv.storage.client.names import NO_NAMES, Names
from tieredkv.storage.folder.folder import hold_for_engine, trouble_with
from tieredkv.storage.messages import engine as messages
from tieredkv.storage.messages.engine import ControlRequest, TouchItem
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.stats import NO_STATS, StoreStats
from tieredkv.storage.tier import Gone, Lent, Loaded, LookupDone, ProbeDone, Restarted, Stored
from tieredkv.storage.worker.process import WorkerEnd, WorkerProcess
from tieredkv.wire.arena import HostArena
from tieredkv.wire.limits import described
from tieredkv.wire.process import Refused

logger = logging.getLogger(__name__)

_HEALTHY_S = 2.0  # a worker that served this long is restarted after the shortest pause again
_PROVEN_S = 60.0  # an index that was made again and served this long may be made again once more
_BUSY_POLL_S = 0.2
_HASHES_A_CALL = 1 << 16
_UNSENT = 0  # in the place of the number of a job


Ending = Loaded | Stored
Event = LookupDone | ProbeDone | Ending | Gone | Restarted | ControlRequest


class _Loan(NamedTuple):
    """A page on loan: what the store calls its block, and how the loan ends if the worker dies."""

    name: bytes
    ending: Ending


class StoreClient:
    """The disk tier as the engine sees it.

    Every method may be called from any thread. Only the constructor and `close()` wait for the
    disk. A thread of the client's own talks to the worker and restarts it; it calls `wake` when
    there is something to `poll()`.

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
        shares: the part of the budget that each tenant keeps, whatever other tenants store; to
            change them, assign other ones.
        names: what the store calls blocks, as the last worker said; that worker may be down.
    """

    def __init__(
        self, options: StoreOptions, arena: HostArena, *, wake: Callable[[], None] = lambda: None
    ) -> None:
        """Start the worker and wait until it serves the store, or ended without saying why.

        In the second case the disk tier is off, as after a later failure: see `trouble`.

        Raises:
            StorageError, StoreBusyError, FormatVersionError, ConfigError: what it refused with.
        """
        # Absolute, or a restart after a change of folder would open another store.
        self._options = replace(options, path=os.path.abspath(options.path))
        self.arena = arena
        self._wake = wake
        self._lock = threading.Lock()
        self._jobs = itertools.count(1)
        self._events: deque[Event] = deque()
        self._lookups: dict[int, list[bytes]] = {}  # jobs not answered yet, and their blocks
        self._probes: set[int] = set()  # jobs not answered yet
        self._loans: dict[int, _Loan] = {}  # by page
        self._worker: WorkerProcess | None = None  # until it is reaped
        self._serves_since: float | None = None  # while the worker serves
        self.shares: dict[bytes, float] = {}
        self._told_shares: dict[bytes, float] | None = None  # to the worker of now
        self.names = NO_NAMES
        self._stats = NO_STATS
        self._model: ModelIdentity | None = None  # of the engine, once it is loaded
        self._num_lookups_dropped = self._num_touches_dropped = 0
        self._undeleted: dict[bytes, tuple[int, str]] = {}  # block -> job that deletes it, reason
        self._deletions: dict[int, list[bytes]] = {}  # job -> its blocks
        self._is_given_up = False  # the worker of now was killed, and may take long to end
        self._index: messages.IndexStart = "as_it_is"  # at the next start
        self._is_unproven = False  # the index was made again and has not served for long
        self._trouble = ""
        self._refused: TieredKVError | None = None  # by the worker process of now
        self._failure: TieredKVError | None = None  # for good
        self._folder_fd = -1  # of the store that is or was served, or at first of the one wanted
        self._has_served = False
        self._started = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tieredkv-store", daemon=True)
        self._thread.start()
        try:
            self._started.wait()
        except BaseException:  # Ctrl-C while a large store opens
            self.close(timeout_s=0)
            raise
        if self._failure is not None:
            self.close()
            raise self._failure

    # --- jobs --------------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """Ask which blocks are stored and not expired; answered by `LookupDone`."""
        with self._lock:
            job = next(self._jobs)
            if self._accepts and not self._is_stuck:
                names = self.names.hide(hashes)
                self._lookups[job] = [*hashes]
                self._send(messages.LookupCall(job, names))
                return job
            self._num_lookups_dropped += self._accepts
            self._events.append(LookupDone(job, {}))
        self._wake()
        return job

    def load(self, lent: Sequence[Lent]) -> None:
        """Read blocks into pages; each page is on loan until its `Loaded`."""
        self._lend(lent, Loaded)

    def store(self, lent: Sequence[Lent]) -> None:
        """Write blocks from pages; each page is on loan until its `Stored`."""
        self._lend(lent, Stored)

    def probe(self, hashes: Sequence[bytes]) -> int:
        """Have blocks read into memory of the worker's own; answered by `ProbeDone`."""
        with self._lock:
            job = next(self._jobs)
            if self._accepts and not self._is_stuck:
                self._probes.add(job)
                self._send(messages.ProbeCall(job, self.names.hide(hashes)))
                return job
            self._events.append(ProbeDone(job, []))
        self._wake()
        return job

    def touch(self, items: Sequence[TouchItem]) -> None:
        """Refresh blocks after a hit; gathered by the worker, lost if it dies before its flush."""
        with self._lock:
            if self._accepts and not self._is_stuck:
                names = self.names.hide([each.block_hash for each in items])
                pairs = zip(items, names, strict=True)
                self._send(messages.TouchCall([replace(it, block_hash=name) for it, name in pairs]))
            else:
                self._num_touches_dropped += len(items)

    def delete(self, hashes: Sequence[bytes], reason: str) -> None:
        """Make blocks unreachable, those that are being written too.

        Where no worker takes it, the next one does before it looks anything up.
        """
        with self._lock:
            self._undeleted |= dict.fromkeys(hashes, (_UNSENT, reason))
            if self._accepts and self._is_stuck:
                self._give_up("does not accept deletions")
            elif self._accepts:
                self._send_deletion(list(hashes), reason)

    def give_up(self, why: str) -> None:
        """Kill a worker that takes too long; every loan ends once it is dead, with `worker_died`.

        Until the next worker serves, nothing is accepted. Where none is up, this does nothing.

        Args:
            why: what the worker does wrong, for the log.
        """
        with self._lock:
            if self._accepts:
                self._give_up(why)

    def note_model(self, model: ModelIdentity) -> None:
        """Have this and each later worker count the blocks that this model can never use."""
        with self._lock:
            self._model = model
            if self._accepts:
                self._send(messages.ModelCall(model))

    def reply_control(self, id: int, body: dict[str, Any], has_more: bool = False) -> None:
        """Answer a `ControlRequest`; a part that takes more than five seconds is dropped."""
        self._tell(messages.EngineAnswer(id, body, has_more))

    def poll(self) -> list[Event]:
        """Return what has happened since the last call, oldest first; never waits."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    def stats(self) -> StoreStats:
        """Return the last known figures of the store, zeroes before the first worker is up."""
        with self._lock:
            num_touches = self._stats.num_touches_dropped + self._num_touches_dropped
            return replace(
                self._stats,
                num_lookups_dropped=self._num_lookups_dropped,
                num_touches_dropped=num_touches,
            )

    @property
    def trouble(self) -> str:
        """Why the disk tier is off; empty while a worker serves the store."""
        with self._lock:
            return self._trouble if self._serves_since is None else ""

    @property
    def pid(self) -> int | None:
        """Process id of the worker, while one is up."""
        with self._lock:
            is_up = self._serves_since is not None
            return self._worker.pid if self._worker is not None and is_up else None

    def close(self, timeout_s: float = 30.0) -> None:
        """Let the worker finish its writes and exit; twice is fine.

        After `timeout_s` it is killed. Pages that are on loan get their events either way.
        """
        with self._lock:
            if self._accepts:
                self._send(messages.CloseCall())
            self._stop.set()
            self._kill_unborn()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with self._lock:
                if self._worker is not None:
                    logger.warning("store worker %d did not stop and is killed", self._worker.pid)
                    self._worker.kill()
            self._thread.join(timeout_s or None)
        if self._thread.is_alive():
            logger.error("the store worker cannot be killed; its pages stay on loan")
        with self._lock:
            num_undeleted, self._undeleted = len(self._undeleted), {}
        if num_undeleted:
            # No eviction that was answered is among them: `Verbs` had the disk's blocks deleted.
            text = "the store of `%s` cannot be reached and keeps %d blocks that were dropped while"
            text += " they were being written, until they expire"
            logger.warning(text, self._options.path, num_undeleted)

    def _lend(self, lent: Sequence[Lent], ending: type[Loaded] | type[Stored]) -> None:
        with self._lock:
            fault = "worker_died" if self._accepts else "worker_down"
            ends = [ending(each.block_hash, each.page_id, fault) for each in lent]
            if self._accepts:
                named = self._named(lent)
                for each, end in zip(named, ends, strict=True):
                    self._loans[each.page_id] = _Loan(each.block_hash, end)
                if ending is Loaded:
                    self._send(messages.LoadCall(named))
                    return
                is_new, self._told_shares = self.shares is not self._told_shares, self.shares
                self._send(messages.StoreCall(named, self.shares if is_new else None))
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

    # --- out ---------------------------------------------------------------------------------

    def _tell(self, message: messages.EngineMessage) -> None:
        with self._lock:
            if self._accepts:
                self._send(message)

    @property
    def _accepts(self) -> bool:
        is_up = self._serves_since is not None and not self._is_given_up
        return is_up and not self._stop.is_set()

    @property
    def _is_stuck(self) -> bool:
        """Whether the worker leaves too much unread; under the lock, while one is up."""
        return self._worker is not None and self._worker.channel.is_stuck

    def _send(self, message: messages.EngineMessage) -> None:
        """Send without waiting, so that a stopped worker cannot stop the engine; under the lock."""
        assert self._worker is not None, "nothing is sent while no worker is up"
        self._worker.channel.send(message)

    def _give_up(self, why: str) -> None:
        """Kill the worker that is up; under the lock."""
        assert self._worker is not None, "the worker is up"
        logger.error("store worker %d %s and is killed", self._worker.pid, why)
        self._is_given_up = True
        self._worker.kill()

    def _send_deletion(self, hashes: list[bytes], reason: str) -> None:
        """Send a deletion and remember it until it is answered; under the lock."""
        job = next(self._jobs)
        self._deletions[job] = hashes
        self._undeleted |= dict.fromkeys(hashes, (job, reason))
        self._send(messages.DeleteCall(job, self.names.hide(hashes), reason))

    def _send_deletions(self) -> None:
        """Send what the last worker did not answer to the new one, before all else."""
        by_reason: dict[str, list[bytes]] = {}
        for block_hash, (_, reason) in self._undeleted.items():
            by_reason.setdefault(reason, []).append(block_hash)
        for reason, hashes in by_reason.items():
            for start in range(0, len(hashes), _HASHES_A_CALL):
                self._send_deletion(hashes[start : start + _HASHES_A_CALL], reason)

    def _kill_unborn(self) -> None:
        """Kill a worker that was never ready if the client is closing; under the lock."""
        if self._stop.is_set() and self._worker is not None and self._serves_since is None:
            self._worker.kill()

    # --- the thread that talks ---------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._keep_serving()
        except Exception as error:
            logger.exception("the store client failed; the disk tier is off")
            self._trouble = f"the store client failed: {error!r}"
            self._failure = self._failure or StorageError(self._trouble)
        finally:
            if self._folder_fd >= 0:
                os.close(self._folder_fd)
            self._started.set()

    def _keep_serving(self) -> None:
        """Start workers until `close()`, by the rules of `tieredkv.storage.index.verdicts`."""
        backoff_s = self._options.backoff_s
        busy_until = time.monotonic() + self._options.busy_patience_s
        while not self._stop.is_set():
            if not self._has_served:
                self._hold_folder()
            options = replace(self._options, create=self._options.create and self._may_create())
            index = self._index
            try:
                worker = WorkerProcess(options, self.arena, index=index)
            except OSError as error:  # no process, no descriptor, no memory left
                served_s, self._refused = 0.0, None
                reason = f"the store worker cannot be started: {described(error)}"
                end = WorkerEnd(False, False, reason)
            else:
                served_s = self._serve(worker)
                end = worker.bury()
                reason = self._judge(end, index, served_s)
            with self._lock:
                self._trouble = reason
            self._end_all()
            if self._stop.is_set():
                return
            if not self._started.is_set():
                if isinstance(self._refused, StoreBusyError) and time.monotonic() < busy_until:
                    self._stop.wait(_BUSY_POLL_S)
                    continue
                if self._refused is not None and not (end.is_damage or end.is_unexplained):
                    self._failure = self._refused
                    return
                if self._index not in ("as_it_is", index):
                    continue  # what may help is tried before the engine starts without this tier
                self._started.set()
            if served_s >= _HEALTHY_S:
                backoff_s = self._options.backoff_s
            text = "the store worker is down and is started again in %.1f s: %s"
            logger.warning(text, backoff_s, reason)
            self._stop.wait(backoff_s)
            backoff_s = min(2 * backoff_s, self._options.max_backoff_s)

    def _judge(self, end: WorkerEnd, index: messages.IndexStart, served_s: float) -> str:
        """Decide what the next worker does with the index; return why the last one ended."""
        self._is_unproven &= served_s < _PROVEN_S
        reason = str(self._refused or end.text)
        if self._refused is None and (cause := trouble_with(self._options.path)):
            reason = f"{cause} (before that, {reason})"
        if served_s:
            self._index = "as_it_is"
        if end.is_damage and self._is_unproven:
            self._index = "as_it_is"
            reason = f"the index was rebuilt and is damaged again: {reason}"
        elif end.is_damage:
            self._index, self._is_unproven = "set_aside", True
        elif end.is_unexplained and self._index != "set_aside":
            was_examined = index == "examined" and not served_s
            self._index = "as_it_is" if was_examined else "examined"
        if end.is_damage or end.is_unexplained:
            logger.error("the store worker of `%s` failed: %s", self._options.path, reason)
        return reason

    def _serve(self, worker: WorkerProcess) -> float:
        """Talk until the channel ends; return for how many seconds the worker served."""
        with self._lock:
            self._worker = worker
            self._is_given_up = False
            self._refused = None
            self._kill_unborn()
        try:
            while True:
                received = worker.channel.receive(None)
                with self._lock:
                    for message in received:
                        self._take(message)
                self._wake()
        except EOFError:
            pass
        except StorageError as error:
            logger.error("store worker %d sent invalid data and is killed: %s", worker.pid, error)
            worker.kill()
        finally:
            with self._lock:
                since, self._serves_since = self._serves_since, None
        return time.monotonic() - since if since is not None else 0.0

    # --- in ----------------------------------------------------------------------------------

    def _take(self, message: messages.WorkerMessage) -> None:
        match message:
            case messages.Completions(ended, stats):
                self._events += filter(None, map(self._end_loan, ended))
                self._stats = stats
            case messages.LookupAnswer(job, records):
                if (hashes := self._lookups.pop(job, None)) is not None:
                    found = {it: each for it, each in zip(hashes, records, strict=True) if each}
                    self._events.append(LookupDone(job, found))
            case ProbeDone(job):
                if job in self._probes:
                    self._probes.remove(job)
                    self._events.append(message)
            case Gone(names):
                self._events.append(Gone(self.names.reveal(names)))
            case messages.ControlRequest(_, _, following, before):
                following, before = self.names.reveal(following), self.names.reveal(before)
                self._events.append(replace(message, following=following, before=before))
            case messages.DeleteDone(job):
                for block_hash in self._deletions.pop(job, []):
                    if self._undeleted.get(block_hash, (_UNSENT, ""))[0] == job:
                        del self._undeleted[block_hash]
            case Refused(kind, text):
                self._refused = named(kind, text)
            case messages.IndexSetAside(text):
                self._index = "as_it_is"
                logger.warning("%s", text)
            case messages.WorkerUp(stats, names_key):
                self.names = Names(names_key)
                if not self._stop.is_set():
                    self._serves_since = time.monotonic()
                    self._told_shares = None
                    self._send_deletions()
                    if self._model is not None:
                        self._send(messages.ModelCall(self._model))
                self._stats = stats
                self._hold_folder()
                self._has_served = True
                if self._started.is_set():
                    self._events.append(Restarted())
                self._started.set()

    def _hold_folder(self) -> None:
        """Keep a descriptor of the folder that is served now, and close the one kept before."""
        before, self._folder_fd = self._folder_fd, -1
        with contextlib.suppress(OSError):
            self._folder_fd = hold_for_engine(self._options.path)
        if before >= 0:  # only now, so that the folder is held all the time
            os.close(before)

    def _may_create(self) -> bool:
        """Return whether a start may make a new store at the path.

        It may not where the store that was served was moved away or unmounted, as that one may
        come back. It may where the store was removed or emptied.
        """
        if not self._has_served or self._folder_fd < 0:
            return True
        if (before := os.fstat(self._folder_fd)).st_nlink == 0:
            return True
        with contextlib.suppress(OSError):
            return os.path.samestat(before, os.stat(self._options.path))
        return False

    def _end_loan(self, told: Ending) -> Ending | None:
        """Take a page back; return the event, or None if the page was not on that loan."""
        loan = self._loans.get(told.page_id)
        is_its = loan is not None and loan.name == told.block_hash
        if loan is None or not is_its or type(loan.ending) is not type(told):
            text = "the store worker completed a load or store of page %d that nobody asked for"
            logger.error(text, told.page_id)
            return None
        del self._loans[told.page_id]
        return replace(told, block_hash=loan.ending.block_hash)

    def _end_all(self) -> None:
        """Answer every job that a worker left open; called only once it is dead and reaped."""
        with self._lock:
            self._worker = None
            self._events += [loan.ending for loan in self._loans.values()]
            self._events += [LookupDone(job, {}) for job in sorted(self._lookups)]
            self._events += [ProbeDone(job, []) for job in sorted(self._probes)]
            self._loans.clear()
            self._lookups.clear()
            self._probes.clear()
            self._deletions.clear()
        self._wake()
