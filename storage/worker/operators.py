"""What the worker does for operators: it finds, lists, deletes and checks blocks.

Each client has a thread, on which its questions are answered. What only reads the index, or reads
payloads, is done there. What changes the store is handed to the index thread, in steps of a few
milliseconds, so that stores go on. No step begins while a lookup is made. The verbs of the command
line are made of these answers by `tieredkv.operate`, in processes of their own.
"""

import itertools
import os
import queue
import random
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from typing import TypeVar

import msgspec

from tieredkv.errors import ConfigError, CorruptIndexError, MissingKeyError, StoreFailedError
from tieredkv.storage.format.record import decode_record, is_record_of
from tieredkv.storage.index.entries import Totals
from tieredkv.storage.index.transaction import TXN_BLOCKS
from tieredkv.storage.messages import operator as messages
from tieredkv.storage.messages.operator import EngineAnswer
from tieredkv.storage.stats import StoreStats
from tieredkv.storage.store import Store
from tieredkv.storage.tier import ControlRequest
from tieredkv.storage.worker.claims import Doomed
from tieredkv.storage.worker.socket import Caller
from tieredkv.storage.worker.steps import (
    check_blocks,
    checking_extents,
    checking_index,
    deleting,
    is_of_whole_namespaces,
)
from tieredkv.types import TENANT_BYTES

_ENGINE_TIMEOUT_S = 5.0
_REPORT_INTERVAL_S = 0.1
_SLICE_S = 0.02  # of the index thread's time, between which other work goes on
_ROWS = 4096  # of the index, in one frame
_ROWS_A_STEP = 1024
_FOUND = 2048  # records in one frame
_TOLD_TENANTS = 10_000  # those that hold most, in one frame

Result = TypeVar("Result")
Hand = Callable[[Callable[[], None]], object]
_DAMAGE = (CorruptIndexError, StoreFailedError)


def _numbers() -> Iterator[int]:
    """Number questions otherwise than the last worker did, whom an engine may still answer."""
    return itertools.count(random.getrandbits(48))


@dataclass(eq=False)
class Operators:
    """Answers the questions of operators, any number of them at once.

    Args:
        store: the store.
        figures: reads the figures of the store; called by the index thread.
        hand: has the index thread make a call.
        give_way: waits until no lookup is made, but not for ever.
        after_writes: hands a call to the index thread, to be made once every store received so far
            is acknowledged and before any later one is begun.
        doomed: told of namespaces that are deleted.
        ask_engine: sends a question to the engine; None if there is no engine.
    """

    store: Store
    figures: Callable[[], StoreStats]
    hand: Hand
    give_way: Callable[[], None]
    after_writes: Hand
    doomed: Doomed
    ask_engine: Callable[[ControlRequest], None] | None
    _ids: Iterator[int] = field(default_factory=_numbers)
    _asked: dict[int, queue.SimpleQueue[EngineAnswer]] = field(default_factory=dict)
    _has_engine_ended: bool = False

    def __post_init__(self) -> None:
        self.parts = self.store.parts

    def hear_engine(self, answer: EngineAnswer) -> None:
        """Take the engine's answer; one that comes too late is dropped."""
        if (answers := self._asked.get(answer.id)) is not None:
            answers.put(answer)

    def note_engine_ended(self) -> None:
        """Note that the engine has given its last answer and is about to end.

        Clients whose calls need another answer lose their connections, and ask the next worker.
        """
        self._has_engine_ended = True

    def answer(self, asked: messages.Asked, caller: Caller) -> msgspec.Struct:
        """Tell a client the parts of an answer and return its last word; on the client's thread.

        A damaged index ends the worker, as it does wherever it is met.
        """
        try:
            return self._answer(asked, caller)
        except _DAMAGE as error:
            self.hand(partial(_raise, error))
            raise

    def _answer(self, asked: messages.Asked, caller: Caller) -> msgspec.Struct:
        match asked:
            case messages.Find():
                return self._find(asked, caller)
            case messages.Scan():
                if asked.settled:
                    self._settle(caller)
                return self._scan(asked.after)
            case messages.Delete():
                return self._delete(asked, caller)
            case messages.Verify():
                return self._verify(asked, caller)
            case messages.Figures():
                return self._figures(asked, caller)
            case messages.Rotate():
                return self._at_once(partial(self._rotate, asked), caller)
            case messages.AskEngine():
                return self._ask(asked, caller)

    # --- looking -----------------------------------------------------------------------------

    def _find(self, asked: messages.Find, caller: Caller) -> messages.Done:
        waiting, met, some = [*reversed(asked.starts)], set[bytes](), list[bytes]()
        now = self.parts.clock.now()
        while waiting:
            self.give_way()
            with self.parts.index.reading() as txn:
                for _ in range(min(TXN_BLOCKS, len(waiting))):
                    for name, data in txn.entries_of(waiting.pop()):
                        record = decode_record(name, data).record
                        if name in met or record.expires_at <= now:
                            continue
                        met.add(name)
                        some.append(data)
                        if asked.climbs and record.position:
                            waiting.append(record.parent_hash)
            if len(some) >= _FOUND or (some and not waiting):
                caller.tell(messages.Rows(b"".join(some), self._retentions, now))
                some = []
        return messages.Done()

    def _scan(self, after: bytes) -> messages.Rows:
        entries, key = list[tuple[bytes, bytes]](), after
        while len(entries) < _ROWS:
            self.give_way()
            with self.parts.index.reading() as txn:
                some = [*islice(txn.records(key), _ROWS_A_STEP)]
            entries += some
            if len(some) < _ROWS_A_STEP:
                return rows_of(entries, None, self.parts.clock.now(), self._retentions)
            key = some[-1][0] + b"\0"
        return rows_of(entries, key, self.parts.clock.now(), self._retentions)

    @property
    def _retentions(self) -> tuple[str, ...]:
        return self.parts.index.retentions.names

    def _figures(self, asked: messages.Figures, caller: Caller) -> messages.Told:
        tenants = self._tenants() if asked.tenants else {}
        return messages.Told(
            stats=self._at_once(self.figures, caller),
            tenants=tenants,
            writer_pid=None if self.ask_engine is None else os.getpid(),
            now=self.parts.clock.now(),
            lacks_keys=self.parts.key_use.lacks_keys,
            names_key=self.parts.key_use.names_key if asked.names_key else b"",
        )

    def _tenants(self) -> dict[str, tuple[int, int]]:
        """Return the blocks and payload bytes on disk by tenant, of those who have the most."""
        sums = defaultdict[bytes, Totals](lambda: Totals(0, 0))
        self.give_way()
        with self.parts.index.reading() as txn:
            for namespace, totals in txn.namespaces().items():
                tenant = namespace[:TENANT_BYTES]
                sums[tenant] = sums[tenant].plus(*totals)
        most = sorted(sums, key=lambda tenant: -sums[tenant].payload_bytes)[:_TOLD_TENANTS]
        return {
            tenant.hex(): (sums[tenant].num_blocks, sums[tenant].payload_bytes) for tenant in most
        }

    # --- changing ------------------------------------------------------------------------------

    def _delete(self, asked: messages.Delete, caller: Caller) -> messages.Deleted:
        if not is_of_whole_namespaces(asked):
            if not asked.dry_run:
                self._settle(caller)
            return self._finish(deleting(self.store, asked), caller)
        with self.doomed.deleting(asked.namespace.lower()):
            self._settle(caller)
            deleted = self._finish(deleting(self.store, asked), caller)
            self._at_once(_nothing, caller)  # stores that were received by now come before it
            return deleted

    def _verify(self, asked: messages.Verify, caller: Caller) -> messages.Checked:
        self._check_keys()
        match asked.step:
            case "blocks":
                at_once = partial(self._at_once, caller=caller)
                return check_blocks(self.store, asked, at_once, self.give_way)
            case "index":
                return self._finish(checking_index(self.store, asked), caller)
            case "extents":
                return self._finish(checking_extents(self.store, asked), caller)

    def _rotate(self, asked: messages.Rotate) -> messages.Rotated:
        """Replace the master key.

        Raises:
            ConfigError: the store is not encrypted.
            MissingKeyError: its keys are not there, or no new key is.
        """
        self._check_keys()
        if (keys := self.parts.key_use.keys) is None:
            raise ConfigError(f"the store at `{self.parts.folder.path}` is not encrypted")
        where = keys.rotate(asked.master_key, asked.command)
        return messages.Rotated(where, len(keys.table))

    def _check_keys(self) -> None:
        if self.parts.key_use.lacks_keys:
            raise MissingKeyError(self.parts.key_use.lacks_keys)

    # --- the engine ------------------------------------------------------------------------------

    def _ask(self, asked: messages.AskEngine, caller: Caller) -> messages.Done:
        """Ask the engine, if there is one, and tell each part of its answer, but not for ever.

        A silent engine is taken to say `NO_ANSWER`.

        Raises:
            EOFError: the engine has ended, or nobody waits any more.
        """
        if self.ask_engine is None:
            return messages.Done()
        if self._has_engine_ended:
            raise EOFError
        job, answers = next(self._ids), queue.SimpleQueue[EngineAnswer]()
        self._asked[job] = answers
        try:
            self.ask_engine(ControlRequest(job, asked.call, asked.roots))
            while (answer := self._next(answers, caller)) is not None:
                caller.tell(answer)
                if not answer.has_more:
                    return messages.Done()
            caller.tell(EngineAnswer(job, messages.NO_ANSWER))
            return messages.Done()
        finally:
            del self._asked[job]

    def _next(
        self, answers: "queue.SimpleQueue[EngineAnswer]", caller: Caller
    ) -> EngineAnswer | None:
        """Wait for the engine's next answer; None from a silent engine.

        Raises:
            EOFError: the engine has ended without it, or nobody waits any more.
        """
        deadline = time.monotonic() + _ENGINE_TIMEOUT_S
        while time.monotonic() < deadline:
            has_engine_ended = self._has_engine_ended  # its last answer is here by now
            try:
                return answers.get(timeout=_REPORT_INTERVAL_S)
            except queue.Empty:
                if has_engine_ended:
                    raise EOFError from None
                caller.report()
        return None

    # --- the index thread ------------------------------------------------------------------------

    def _settle(self, caller: Caller) -> None:
        """Wait until every store that was received so far is acknowledged."""
        self._at_once(_nothing, caller, self.after_writes)

    def _at_once(
        self, call: Callable[[], Result], caller: Caller, hand: Hand | None = None
    ) -> Result:
        """Have the index thread make a call, and return its result."""
        done = Future[Result]()

        def make() -> None:
            try:
                done.set_result(call())
            except Exception as error:
                done.set_exception(error)

        (hand or self.hand)(make)
        while not wait([done], _REPORT_INTERVAL_S).done:
            caller.report()
        return done.result()

    def _finish(self, steps: Generator[None, None, Result], caller: Caller) -> Result:
        """Have the index thread take all steps, a few at once; return what they end with.

        Raises:
            EOFError: nobody waits any more; no further step is taken.
        """

        def take_some() -> StopIteration | None:
            end = time.monotonic() + _SLICE_S
            try:
                while time.monotonic() < end:
                    next(steps)
            except StopIteration as ending:
                return ending
            return None

        told_at = time.monotonic()
        while True:
            self.give_way()
            if (ending := self._at_once(take_some, caller)) is not None:
                result: Result = ending.value
                return result
            if time.monotonic() - told_at > _REPORT_INTERVAL_S:
                caller.report()
                told_at = time.monotonic()


def _nothing() -> None:
    """Be called, which tells that what was handed over before has been done."""


def rows_of(
    entries: Sequence[tuple[bytes, bytes]],
    next_key: bytes | None,
    now: float,
    retentions: tuple[str, ...],
) -> messages.Rows:
    """Return entries of the index as a message; what is no record of its key is left out.

    Args:
        entries: keys with sealed records.
        next_key: where the next part begins.
        now: the time.
        retentions: names of retention policies by their numbers.

    Raises:
        CorruptIndexError: they are not in the order of their keys.
    """
    names = [name for name, _ in entries]
    if any(name >= other for name, other in pairwise(names)):
        raise CorruptIndexError("the keys of `blocks` are out of order")
    data = b"".join([record for name, record in entries if is_record_of(name, record)])
    return messages.Rows(data, retentions, now, next_key)


def _raise(error: Exception) -> None:
    raise error
