"""The worker's service: turns the engine's messages into reads, writes and transactions.

Two threads share the work, so that a read never waits for a change:

    front thread    receives messages, looks blocks up, has them read, answers
    index thread    makes every change: stores, touches, deletions, sweeps, and the changes that
                    operators ask for (each of them is heard on a thread of its own)

Each of the two has a `Loop`; other threads hand it calls through that loop. What belongs to one of
them fails when another thread calls it: see `ownership`. Reader and writer threads only move
payloads. LMDB's readers never wait for its writer, so a commit, a flush to the device or a sweep
that takes ten seconds delays no lookup, no load and no answer.

This module knows both threads from their start to their end, and which of them does what. The
modules `reads`, `writes`, `deletions`, `touches`, `telling` and `operators` know how it is done.
All keep one order of steps: bytes are written before the index changes, and the index changes
before an answer is sent. The service knows the engine only as the other end of a channel; it knows
neither models nor what a payload means.
"""

import logging
import math
import os
import selectors
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event, Thread
from typing import TypeVar

from msgspec.structs import replace

from tieredkv.errors import StorageError
from tieredkv.storage.format.record import Located
from tieredkv.storage.lifetimes import RATE_SPAN_S
from tieredkv.storage.messages import engine as messages
from tieredkv.storage.messages.operator import Delete, EngineAnswer
from tieredkv.storage.stats import Lifetimes, StoreStats
from tieredkv.storage.store import Store
from tieredkv.storage.worker.claims import Claims, Doomed
from tieredkv.storage.worker.deletions import Deletions
from tieredkv.storage.worker.fault_log import FaultLog
from tieredkv.storage.worker.loop import Loop, Threads
from tieredkv.storage.worker.operators import Operators
from tieredkv.storage.worker.pace import WriteLimit, WriteShare
from tieredkv.storage.worker.reads import Reads
from tieredkv.storage.worker.socket import ControlServer
from tieredkv.storage.worker.steps import count_others
from tieredkv.storage.worker.telling import Telling
from tieredkv.storage.worker.touches import GatheredTouches
from tieredkv.storage.worker.writes import Writes
from tieredkv.tier import ControlRequest
from tieredkv.wire.arena import HostArena
from tieredkv.wire.channel import FrameChannel

logger = logging.getLogger(__name__)

_TICK_S = 0.5  # how often to check for what sends no event: a lost parent, silent clients
_OVER = object()

Result = TypeVar("Result")


class StoreService:
    """Serves one store; the sections of the class say which thread runs and owns what."""

    def __init__(
        self,
        store: Store,
        launch: messages.Launch,
        channel: FrameChannel[messages.EngineMessage],
        arena: HostArena | None,
    ) -> None:
        options = launch.options
        self._store, self._parts = store, store.parts
        self._launch = launch
        self._channel = channel
        self._arena = arena
        self._front, self._changes = Loop(), Loop(store.thread)  # of the front and index thread
        num_writers = options.writers(is_encrypted=self._parts.key_use.keys is not None)
        self._readers = Threads(options.num_readers)
        self._writers = Threads(num_writers)
        self._log = FaultLog()
        self._claims = Claims(self._parts.clock, options.disk_retentions)
        self._doomed = Doomed()
        share = WriteShare()  # noted by the front thread, asked by the index thread

        # These belong to the index thread.
        self._writes = Writes(
            store,
            self._changes,
            self._writers,
            num_writers,
            self._page_of,
            share,
            WriteLimit(options.write_limit),
            self._claims,
            self._log,
            self._doomed,
        )
        self._sweep: Iterator[None] | None = None  # the steps of the sweep under way
        self._sweep_at = 0.0  # at once: blocks may have expired while no worker ran
        self._look_at = 0.0
        self._telling = Telling(
            store,
            self._changes,
            self._log,
            is_read=lambda: not channel.has_queued,
            # Sent by the front thread, after all that it was handed before.
            tell=lambda told: self._front.hand(partial(self._tell_engine, told)),
            is_on=options.tells_blocks,
        )
        self._is_over = Event()
        self._has_all = Event()  # set when the front thread hands over nothing more
        self._stats = store.stats()  # as of the last turn; the front thread reads them too
        self._num_others: int | None = None  # blocks of other models, once they are counted
        self._told_error = ""  # the last `store_error` that the engine was told
        self._warned_at = -math.inf

        # Both threads call these: the front thread gathers what the index thread carries out.
        self._touches = GatheredTouches()
        self._deletions = Deletions(
            store,
            self._writes,
            self._log,
            self._doomed,
            self._front,
            self._changes,
            answer=self._tell_engine,
        )

        # These belong to the front thread.
        self._reads = Reads(
            store,
            self._front,
            self._readers,
            options.num_readers,
            self._page_of,
            share,
            find=partial(self._find, "locate"),
            judge=self._judge,
            answer=self._tell_engine,
        )
        self._is_closing = False  # no new work is taken; stores under way are finished
        self._has_ended = False  # the index thread has ended, and what it handed over is done
        self._front.selector.register(channel, selectors.EVENT_READ, self._hear_engine)

        self._operators = Operators(
            store,
            self._figures,
            hand=self._changes.hand,
            give_way=self._front.give_way,
            after_writes=lambda call: self._changes.hand(partial(self._writes.add_barrier, call)),
            after_telling=lambda call: self._changes.hand(partial(self._after_telling, call)),
            doomed=self._doomed,
            ask_engine=None if arena is None else self._ask_engine,
        )
        self._server = ControlServer(options.path, self._operators.answer)

    def run(self) -> None:
        """Serve until the engine says so, then close the store.

        Raises:
            EOFError: the engine is gone, or the command line that started this worker is silent.
        """
        look = partial(self._parts.index.is_sound, self._is_over)
        checking = self._look_through("index", look, self._note_checked)
        try:
            self._serve()
        finally:
            self._is_over.set()
            checking.join(_TICK_S)  # long enough for the current step to end
        self._store.close()

    def _serve(self) -> None:
        # A question that came before `WorkerUp` would be answered to nobody: until then the engine
        # sends nothing to this worker.
        self._tell_engine(messages.WorkerUp(self._stats, self._parts.key_use.names_key))
        self._server.start()
        changing = ThreadPoolExecutor(1).submit(self._run_changes)
        changing.add_done_callback(lambda _: self._store.thread.disown())

        def end() -> None:
            changing.result()  # its error, if any, is raised in the front thread
            self._has_ended = True

        changing.add_done_callback(lambda _: self._front.hand(end))
        try:
            while not self._is_closing or self._reads.are_under_way:
                self._front_turn()
        finally:
            self._changes.hand(self._has_all.set)
        while not self._has_ended:
            self._front_turn()
        self._readers.shutdown()
        while self._channel.has_queued:
            self._front.wait(_TICK_S)

    def _look_through(
        self, what: str, look: Callable[[], Result], then: Callable[[Result], object]
    ) -> Thread:
        """Look through the index on a thread of its own; the index thread gets the result."""

        def run() -> None:
            try:
                self._changes.hand(partial(then, look()))
            except StorageError as error:
                self._changes.hand(partial(self._log.report, what, error))

        thread = Thread(target=run, daemon=True)
        thread.start()
        return thread

    def _ask_engine(self, request: ControlRequest) -> None:
        """Ask the engine, on an operator's thread, unless the engine has stopped reading."""
        if not self._channel.is_stuck:
            self._tell_engine(request)

    def _page_of(self, page_id: int) -> memoryview:
        """Return the memory of a page that the engine lends, to a reader or writer thread."""
        assert self._arena is not None, "without an arena no engine lends pages"
        return self._arena.page(page_id)

    def _tell_engine(self, message: messages.WorkerMessage) -> None:
        self._channel.send(message)

    # --- front thread --------------------------------------------------------------------------

    def _front_turn(self) -> None:
        self._front.wait(0.0 if self._reads.can_start else _TICK_S)
        self._reads.start()
        if loaded := self._reads.take_ended():
            stats = replace(
                self._stats,
                bytes_read=self._parts.files.bytes_read,
                num_touches_dropped=self._touches.num_dropped,
            )
            self._tell_engine(messages.Completions([*loaded], stats))
        is_forgotten = self._arena is None and self._server.is_forgotten
        if is_forgotten or os.getppid() != self._launch.parent_pid:
            raise EOFError

    def _hear_engine(self) -> None:
        for message in self._channel.receive():
            self._obey(message)

    def _obey(self, message: messages.EngineMessage) -> None:
        match message:
            case messages.LookupCall(job, hashes):
                found = self._find("lookup", hashes)
                records = [found.get(each, b"") for each in hashes]
                self._tell_engine(messages.LookupAnswer(job, records))
            case messages.LoadCall(pages):
                self._reads.add(pages)
            case messages.ProbeCall(job, hashes):
                self._reads.probe(job, hashes)
            case messages.StoreCall():
                self._changes.hand(partial(self._accept_stores, message))
            case messages.TouchCall(touches):
                self._touches.gather(map(self._claims.of_touch, touches))
            case messages.DeleteCall():
                self._deletions.begin(message)
            case EngineAnswer():
                self._operators.hear_engine(message)
            case messages.ModelCall(model):
                now, index = self._parts.clock.now(), self._parts.index
                count = partial(count_others, index, model, now, self._is_over)
                self._look_through("other models", count, self._note_others)
            case messages.CloseCall():
                self._is_closing = True
                self._operators.note_engine_ended()
                self._reads.refuse_waiting()
                self._changes.hand(self._writes.hurry)

    def _find(self, cause: str, hashes: list[bytes]) -> dict[bytes, bytes]:
        """Return the sealed records of blocks that are stored and that nobody deletes."""
        found = self._log.attempt(cause, lambda: self._store.find(hashes)) or {}
        return self._doomed.without(found)

    def _judge(self, located: Located, error: StorageError, tell: Callable[[str], None]) -> None:
        """Have the index thread count a failed read and drop the block if its bytes are bad.

        `tell` is then called with the reason, by the front thread.
        """

        def judge() -> None:
            failed = partial(self._store.read_failed, located, error)
            if self._doomed.covers(located.record.namespace):  # its key was destroyed meanwhile
                reason = "evicted"
            else:
                reason = self._log.attempt("load", failed) or "io_error"
            self._refresh_stats(self._stats.lifetimes)
            self._front.hand(lambda: tell(reason))

        self._changes.hand(judge)

    # --- index thread --------------------------------------------------------------------------

    def _run_changes(self) -> None:
        """Make changes until the store closes.

        Evictions under way are ended first: another worker could not tell what this one has evicted
        and what the engine had in VRAM and host memory.
        """
        try:
            while not self._has_all.is_set() or self._has_changes:
                self._turn()
        finally:
            self._server.close()
        self._writers.shutdown()
        while self._touches:
            self._flush_touches()

    def _turn(self) -> None:
        sweep_in_s = max(0.0, self._sweep_at - time.monotonic())
        is_due = self._touches.are_due or self._sweep is not None
        waits_s = (_TICK_S, sweep_in_s, self._writes.wait_s, self._telling.wait_s)
        self._changes.wait(0.0 if is_due else min(waits_s))
        if (now := time.monotonic()) >= self._look_at:  # each transaction looks as well
            self._look_at = now + _TICK_S
            self._parts.folder.check_place()
        self._writes.step()
        self._refresh_stats(self._stats.lifetimes)  # these are found out at each sweep
        stored = self._writes.take_ended()
        if stored or self._stats.store_error != self._told_error:
            self._told_error = self._stats.store_error
            self._telling.tell_held()
            # Sent by the front thread, so that counters never go back.
            done = messages.Completions([*stored], self._stats)
            self._front.hand(lambda: self._tell_engine(done))
        if self._touches.are_due:
            self._flush_touches()
        self._step_sweep()
        self._telling.step()

    def _after_telling(self, call: Callable[[], None]) -> None:
        """Have a call made once the engine was told what has changed by now."""
        self._telling.tell_changes()
        self._front.hand(call)

    @property
    def _has_changes(self) -> bool:
        """Whether changes are under way that the store does not close without."""
        return self._writes.are_under_way or self._server.is_answering(Delete)

    def _note_checked(self, is_sound: bool) -> None:
        if not is_sound:
            self._store.ask_for_rebuild()

    def _note_others(self, num_others: int | None) -> None:
        self._num_others = num_others
        if num_others:
            logger.warning(
                "%d blocks on disk are of another model, or of a tieredkv that identified this "
                "model in another way; no request can use them, and they go when they expire",
                num_others,
            )

    def _accept_stores(self, call: messages.StoreCall) -> None:
        if call.shares is not None:
            self._store.keep_shares(call.shares)
        self._writes.add(call.pages)

    def _flush_touches(self) -> None:
        """Write some of the gathered touches; a long list takes several turns."""
        items = self._touches.take()
        self._log.attempt("touch", lambda: self._store.touch(items))

    def _step_sweep(self) -> None:
        """Take one step of the sweep under way, or of the next one if it is due."""
        if self._sweep is None and time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + self._launch.options.sweep_interval_s
            self._begin_sweep()
            self._sweep = self._store.sweeping()
        if (steps := self._sweep) is None:
            return

        def take_step() -> bool:
            if next(steps, _OVER) is _OVER:
                self._sweep = None
                self._log.note_works("sweep")
            return True

        if not self._log.attempt("sweep", take_step):
            self._sweep = None

    def _begin_sweep(self) -> None:
        """Retry what the disk refused, tell all figures, and try compression if it is undecided."""
        self._deletions.retry_refused()
        self._writes.try_again()
        self._refresh_stats()
        self._warn_of_shortfall()
        told = messages.Completions([], self._stats)  # figures that change while nothing is stored
        self._front.hand(lambda: self._channel.send(told))
        self._readers.submit(partial(self._log.attempt, "keys", self._sweep_others))
        if trial := self._store.compression_trial(self._launch.options.num_readers):
            self._readers.submit(partial(self._log.attempt, "compression", trial))

    def _sweep_others(self) -> None:
        """Sweep the files of keys of other stores, on a reader thread."""
        self._parts.key_use.sweep_others()
        self._log.note_works("keys")

    def _warn_of_shortfall(self) -> None:
        """Log that the disk is too small for what retention policies promise, once an hour."""
        shortfall, now = self._stats.lifetimes.shortfall, time.monotonic()
        if shortfall and self._arena is not None and now - self._warned_at >= RATE_SPAN_S:
            self._warned_at = now
            logger.warning("the disk tier is too small: %s", shortfall)

    def _refresh_stats(self, lifetimes: Lifetimes | None = None) -> None:
        stats = self._log.attempt("stats", partial(self._figures, lifetimes))
        self._stats = stats or replace(self._stats, store_error=self._writes.last_error)

    def _figures(self, lifetimes: Lifetimes | None = None) -> StoreStats:
        """Return the figures of the store and what this worker knows beside it, as of now."""
        error, num_dropped = self._writes.last_error, self._touches.num_dropped
        stats = self._store.stats(lifetimes)
        return replace(
            stats,
            store_error=error,
            num_touches_dropped=num_dropped,
            num_other_model=self._num_others,
        )
