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
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import NamedTuple, TypeVar

import msgspec

from tieredkv.errors import (
    ConfigError,
    CorruptBlockError,
    CorruptIndexError,
    MissingKeyError,
    StorageError,
    StoreFailedError,
)
from tieredkv.pieces import Pieces, cut
from tieredkv.storage.faults import reason_of
from tieredkv.storage.format.planes import aligned_buffer
from tieredkv.storage.format.record import Located, decode_record, is_record_of, padded_bytes
from tieredkv.storage.index.entries import Totals
from tieredkv.storage.index.transaction import TXN_BLOCKS, IndexTxn
from tieredkv.storage.messages import operator as messages
from tieredkv.storage.messages.operator import EngineAnswer
from tieredkv.storage.stats import StoreStats
from tieredkv.storage.store import Store
from tieredkv.storage.worker.claims import Doomed
from tieredkv.storage.worker.socket import Caller
from tieredkv.storage.worker.steps import (
    DisorderError,
    checking_extents,
    checking_index,
    deleting,
    is_of_whole_namespaces,
    taking_strays,
    walking,
)
from tieredkv.tier import ControlRequest
from tieredkv.types import TENANT_BYTES

_ENGINE_TIMEOUT_S = 5.0
_REPORT_INTERVAL_S = 0.1
_SLICE_S = 0.02  # of the index thread's time, between which other work goes on
_TOLD_S = 0.1  # for so long blocks are checked before the operator is told
_ROWS_A_STEP = 1024  # of the index
_STEPS_A_FRAME = 4
_FOUND = 2048  # records in one frame
_TOLD_TENANTS = 10_000  # those that hold most, in one frame
_DAMAGE = (CorruptIndexError, StoreFailedError)

Result = TypeVar("Result")
Hand = Callable[[Callable[[], None]], object]


class _Seen(NamedTuple):
    """A block, or None for a damaged record; whether its entries are whole; see `is_stray`."""

    located: Located | None
    is_whole: bool
    is_stray: bool


def _do_at_once(call: Callable[[], object]) -> None:
    call()


@dataclass(eq=False)
class Operators:
    """Answers the questions of operators, any number of them at once.

    By default the caller is alone with the store, as a verb is that looks at a stopped one.

    Args:
        store: the store.
        figures: reads the figures of the store; called by the index thread.
        hand: has the index thread make a call.
        give_way: waits until no lookup is made, but not for ever.
        after_writes: hands a call to the index thread, to be made once every store received so far
            is acknowledged and before any later one is begun.
        after_telling: has a call made once the engine was told what has gone by now.
        doomed: told of namespaces that are deleted.
        ask_engine: sends a question to the engine; None if there is no engine.
    """

    store: Store
    figures: Callable[[], StoreStats]
    hand: Hand = _do_at_once
    give_way: Callable[[], None] = lambda: None
    after_writes: Hand = _do_at_once
    after_telling: Hand = _do_at_once
    doomed: Doomed = field(default_factory=Doomed)
    ask_engine: Callable[[ControlRequest], None] | None = None

    def __post_init__(self) -> None:
        self._parts, self._index = self.store.parts, self.store.parts.index
        # Questions to the engine have other numbers than the last worker's, whom it may yet answer.
        self._ids = itertools.count(random.getrandbits(48))
        self._asked = dict[int, queue.SimpleQueue[EngineAnswer]]()
        self._has_engine_ended = False

    def hear_engine(self, answer: EngineAnswer) -> None:
        """Take the engine's answer; one that comes too late is dropped."""
        if (answers := self._asked.get(answer.id)) is not None:
            answers.put(answer)

    def note_engine_ended(self) -> None:
        """Note that the engine has given its last answer and is about to end.

        Clients whose calls need another answer lose their connections, and ask the next worker.
        """
        self._has_engine_ended = True

    def answer(self, asked: messages.Asked, caller: Caller) -> Iterator[msgspec.Struct]:
        """Yield the parts of an answer, on the client's thread.

        A damaged index ends the worker, as it does wherever it is met.
        """
        try:
            yield from self._answer(asked, caller)
        except _DAMAGE as error:
            self.hand(partial(_raise, error))
            raise

    def _answer(self, asked: messages.Asked, caller: Caller) -> Iterator[msgspec.Struct]:
        match asked:
            case messages.Find():
                yield from self._find(asked)
            case messages.Scan():
                if asked.settled:
                    self._settle(caller)
                yield from self._scan()
            case messages.Delete():
                yield self._delete(asked, caller)
            case messages.Verify():
                self._check_keys()
                if asked.erased_key or asked.erased_namespace:
                    yield self._finish(checking_extents(self.store, asked), caller)
                else:
                    yield from self._verify(asked, caller)
            case messages.Figures():
                yield self._figures(asked, caller)
            case messages.Rotate():
                yield self._at_once(partial(self._rotate, asked), caller)
            case messages.AskEngine():
                yield from self._ask(asked, caller)

    # --- looking -----------------------------------------------------------------------------

    def _find(self, asked: messages.Find) -> Iterator[messages.Rows]:
        waiting, met, some = [*reversed(asked.starts)], set[bytes](), list[bytes]()
        now = self._parts.clock.now()
        while waiting:
            self.give_way()
            with self._index.reading() as txn:
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
                yield messages.Rows(b"".join(some), self._index.retentions.names, now)
                some = []

    def _scan(self) -> Iterator[messages.Rows]:
        steps = walking(self._index, _some_records, rest=self.give_way)
        try:
            for some in chain(cut(steps, _STEPS_A_FRAME), [[]]):  # the last part tells the time
                data, now = b"".join(map(sound_records, some)), self._parts.clock.now()
                yield messages.Rows(data, self._index.retentions.names, now)
        except DisorderError:
            raise CorruptIndexError("the keys of `blocks` are out of order") from None

    def _figures(self, asked: messages.Figures, caller: Caller) -> messages.StoreFigures:
        key_use = self._parts.key_use
        return messages.StoreFigures(
            stats=self._at_once(self.figures, caller),
            tenants=self._tenants() if asked.tenants else {},
            writer_pid=None if self.ask_engine is None else os.getpid(),
            now=self._parts.clock.now(),
            lacks_keys=key_use.lacks_keys,
            names_key=key_use.names_key if asked.names_key else b"",
        )

    def _tenants(self) -> dict[str, tuple[int, int, int]]:
        """Return what each tenant has on disk, of those who have the most; see `StoreFigures`."""
        sums = defaultdict[bytes, Totals](lambda: Totals(0, 0))
        self.give_way()
        with self._index.reading() as txn:
            for namespace, totals in txn.namespaces().items():
                tenant = namespace[:TENANT_BYTES]
                sums[tenant] = sums[tenant].plus(*totals)
        most = sorted(sums.items(), key=lambda it: -it[1].payload_bytes)[:_TOLD_TENANTS]
        return {tenant.hex(): (*it,) for tenant, it in most}

    # --- checking ----------------------------------------------------------------------------

    def _verify(self, asked: messages.Verify, caller: Caller) -> Iterator[messages.Checked]:
        """Check every payload, or a sample, then the index against itself."""
        is_whole, last, strays = yield from self._compare(asked, b"", caller)
        if strays:
            self._settle(caller)  # their blocks may have been under way
            taking = taking_strays(self.store, strays, repair=asked.repair)
            yield messages.Checked(stray_pages=self._finish(taking, caller))
        steps = checking_index(self.store, is_whole=is_whole, repair=asked.repair)
        if not self._finish(steps, caller):
            yield messages.Checked(by_reason={"index": 1}, repaired=int(asked.repair))
            if asked.repair:  # a walk that damage cut short goes on in the sound index
                yield from self._compare(asked, last, caller)

    def _compare(
        self, asked: messages.Verify, last: bytes, caller: Caller
    ) -> Generator[messages.Checked, None, tuple[bool, bytes, list[bytes]]]:
        """Compare the payloads of the blocks behind a name with their checksums.

        Returns whether the entries of these blocks were whole, the name of the last one, and those
        of pages whose block is not there.
        """
        are_whole, page, strays = True, memoryview(b""), list[bytes]()
        checked, num_pages, by_reason, repaired = 0, 0, Counter[str](), 0
        told_at = time.monotonic()
        try:
            for entries in walking(self._index, _seen_blocks, last, self.give_way):
                for name, (located, is_whole, is_stray) in entries:
                    strays += [name] if is_stray else []
                    if time.monotonic() - told_at > _TOLD_S:
                        yield messages.Checked(checked, dict(by_reason), repaired, num_pages)
                        checked, num_pages, by_reason, repaired = 0, 0, Counter[str](), 0
                        told_at = time.monotonic()
                    if random.random() >= asked.sample or self._has_expired(located):
                        continue
                    is_page = located is not None and located.record.kind > 0
                    num_pages += is_page
                    checked += not is_page
                    are_whole = are_whole and is_whole
                    reason, is_repaired = "record", asked.repair
                    if located is not None:
                        if len(page) < (size := padded_bytes(located.record.size_bytes)):
                            page = aligned_buffer(size)
                        reason, is_repaired = self._read(located, page, asked, caller)
                    by_reason.update([reason] if reason else [])
                    repaired += is_repaired
                last, _ = entries[-1]
        except DisorderError:
            self._at_once(self.store.ask_for_rebuild, caller)
        yield messages.Checked(checked, dict(by_reason), repaired, num_pages)
        return are_whole, last, strays

    def _has_expired(self, located: Located | None) -> bool:
        return located is not None and self._parts.clock.now() >= located.record.expires_at

    def _read(
        self, located: Located, page: memoryview, asked: messages.Verify, caller: Caller
    ) -> tuple[str, bool]:
        """Read a payload; return why it is bad, if it is, and whether it was dropped."""
        self.give_way()
        try:
            self.store.read(located, page)
        except StorageError as error:
            return self._at_once(partial(self._judge, located, error, asked), caller)
        return "", False

    def _judge(
        self, located: Located, error: StorageError, asked: messages.Verify
    ) -> tuple[str, bool]:
        """Judge a block that could not be read; it may have left the store meanwhile."""
        with self._index.reading() as txn:
            current = txn.sound(located.record.block_hash)
        if current is None or current[1:] != located[1:]:
            return "", False
        is_repaired = asked.repair and isinstance(error, CorruptBlockError)
        if is_repaired:
            self.store.drop_bad(located)
        return reason_of(error), is_repaired

    # --- changing ----------------------------------------------------------------------------

    def _delete(self, asked: messages.Delete, caller: Caller) -> messages.Deleted:
        is_whole = is_of_whole_namespaces(asked)
        with self.doomed.deleting(asked.namespace.lower()) if is_whole else nullcontext():
            if not asked.dry_run:
                self._settle(caller)
            deleted = self._finish(deleting(self.store, asked), caller)
            # Stores that were received by now come before it.
            self._at_once(_nothing, caller, self.after_telling)
        return deleted

    def _rotate(self, asked: messages.Rotate) -> messages.Rotated:
        """Replace the master key.

        Raises:
            ConfigError: the store is not encrypted.
            MissingKeyError: its keys are not there, or no new key is.
        """
        self._check_keys()
        if (keys := self._parts.key_use.keys) is None:
            raise ConfigError(f"the store at `{self._parts.folder.path}` is not encrypted")
        where = keys.rotate(asked.master_key, asked.command)
        return messages.Rotated(where, len(keys.table))

    def _check_keys(self) -> None:
        if self._parts.key_use.lacks_keys:
            raise MissingKeyError(self._parts.key_use.lacks_keys)

    # --- the engine --------------------------------------------------------------------------

    def _ask(self, asked: messages.AskEngine, caller: Caller) -> Iterator[EngineAnswer]:
        """Ask the engine, if there is one, and yield each part of its answer, but not for ever.

        A silent engine is taken to say `NO_ANSWER`.

        Raises:
            EOFError: the engine has ended without a whole answer, or nobody waits any more.
        """
        if self.ask_engine is None:
            return
        if self._has_engine_ended:
            raise EOFError
        id, answers = next(self._ids), queue.SimpleQueue[EngineAnswer]()
        self._asked[id] = answers
        try:
            self.ask_engine(ControlRequest(id, asked.call, asked.roots))
            heard_at = time.monotonic()
            while time.monotonic() - heard_at < _ENGINE_TIMEOUT_S:
                has_engine_ended = self._has_engine_ended  # its last answer is here by now
                try:
                    answer = answers.get(timeout=_REPORT_INTERVAL_S)
                except queue.Empty:
                    if has_engine_ended:
                        raise EOFError from None
                    caller.report()
                    continue
                yield answer
                if not answer.has_more:
                    return
                heard_at = time.monotonic()
            yield EngineAnswer(id, messages.NO_ANSWER)
        finally:
            del self._asked[id]

    # --- the index thread --------------------------------------------------------------------

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

    def _finish(self, steps: Pieces[Result], caller: Caller) -> Result:
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


def _raise(error: Exception) -> None:
    raise error


def _some_records(txn: IndexTxn, start: bytes) -> list[tuple[bytes, bytes]]:
    return [*islice(txn.records(start), _ROWS_A_STEP)]


def _seen_blocks(txn: IndexTxn, start: bytes) -> list[tuple[bytes, _Seen]]:
    """Read some blocks and how they are in one state of the index, as it may change."""

    def seen(located: Located | None) -> _Seen:
        if located is None:
            return _Seen(None, is_whole=False, is_stray=False)
        return _Seen(located, txn.is_whole(located), txn.is_stray(located))

    return [(name, seen(located)) for name, located in txn.some_blocks(start)]


def sound_records(entries: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return sealed records, side by side; what is none of its key is left out."""
    return b"".join([record for name, record in entries if is_record_of(name, record)])
