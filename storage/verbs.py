"""The verbs of the command line, as the worker carries them out.

It knows what each verb answers and whom else it concerns. Each runs on its client's thread and has
the index thread do what touches the store, never longer than a slice at a time, so that loads and
stores go on under a long `verify`.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from tieredkv.errors import ConfigError, CorruptIndexError, StoreFailedError
from tieredkv.storage import inspection
from tieredkv.storage.control_server import Report
from tieredkv.storage.lmdb_store import BlockStore
from tieredkv.storage.results import EvictFilter, StoreStats, VerifyResult
from tieredkv.storage.worker_messages import ControlCall, ControlRequest, EngineAnswer

_ENGINE_TIMEOUT_S = 5.0
_SLICE_S = 0.02
_REPORT_INTERVAL_S = 0.1

Hand = Callable[[Callable[[], None]], None]
Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""What the index thread does a little at a time."""


@dataclass(eq=False)
class Verbs:
    """Carries out one store's verbs; any number of them at once.

    Args:
        hand: has something called by the index thread.
        after_writes: the same, once every store received so far is acknowledged, and before any
            later one is begun, so that what was on its way is evicted too.
        ask_engine: sends a question to the engine; None where there is none to ask.
    """

    store: BlockStore
    hand: Hand
    after_writes: Hand
    ask_engine: Callable[[ControlRequest], None] | None
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _asked: dict[int, Future[dict[str, Any]]] = field(default_factory=dict)  # not given up
    _running: list[ControlCall] = field(default_factory=list)
    _ended_at: float = field(default_factory=time.monotonic)

    def hear_engine(self, answer: EngineAnswer) -> None:
        """Take the engine's answer; one that comes too late is dropped."""
        if (asked := self._asked.pop(answer.id, None)) is not None:
            asked.set_result(answer.body)

    @property
    def idle_s(self) -> float:
        """For how long nobody has asked for anything."""
        return 0.0 if self._running else time.monotonic() - self._ended_at

    def carry_out(self, call: ControlCall, report: Report) -> dict[str, Any]:
        """Do what a client asks for and return what it is told."""
        self._running.append(call)
        try:
            return self._carry_out(call, report)
        finally:
            self._ended_at = time.monotonic()
            self._running.remove(call)

    def _carry_out(self, call: ControlCall, report: Report) -> dict[str, Any]:
        match call.verb:
            case "df":
                tiers = {"device": None, "host": None, **self._ask(call)}
                writer_pid = None if self.ask_engine is None else os.getpid()
                disk = msgspec.to_builtins(self._finish(self._figures()))
                return {**tiers, "disk": disk, "writer_pid": writer_pid}
            case "ls":
                return {"chains": msgspec.to_builtins(self._finish(inspection.listing(self.store)))}
            case "evict":
                return self._evict(call)
            case "verify":
                return dict(msgspec.to_builtins(self._verify(report, repair=call.repair)))

    def _evict(self, call: ControlCall) -> dict[str, Any]:
        wanted, engine = call.wanted, dict[str, Any]()
        if wanted == EvictFilter(dry_run=wanted.dry_run):
            raise ConfigError("nothing says which blocks to evict; all of them must be asked for")
        if not wanted.dry_run:  # which is about the disk's blocks; the engine is not disturbed
            # RAM may have a chain's head without the tail that its id names.
            blocks, _ = self._finish(inspection.choosing(self.store, wanted.ids))
            engine = self._ask(call, blocks)
        settled = threading.Event()
        self.after_writes(settled.set)
        settled.wait()
        result = self._finish(inspection.evicting(self.store, wanted))
        disk = {"evicted_blocks": result.evicted_blocks, "freed_bytes": result.freed_bytes}
        sums = {name: count + engine.get(name, 0) for name, count in disk.items()}
        return {**engine, **sums, "unknown_ids": list(result.unknown_ids), "disk": disk}

    def _figures(self) -> Steps[StoreStats]:
        yield
        return self.store.stats()

    def _verify(self, report: Report, *, repair: bool) -> VerifyResult:
        """Verify; an index that cannot be read ends the worker, and its next start makes it again.

        Raises:
            EOFError: nobody but the caller will start one.
        """
        result = VerifyResult()
        try:
            self._finish(self._verifying(report, repair, result))
        except CorruptIndexError as error:
            if not repair:
                raise
            if self.ask_engine is None:
                raise EOFError from error
            result.add("index", is_repaired=True)
        except StoreFailedError:  # of damage, or not: the next worker looks before it serves
            if not repair:
                raise
            if self.ask_engine is None:
                raise EOFError from None
            result.add("index", is_repaired=False)
        return result

    def _verifying(self, report: Report, repair: bool, result: VerifyResult) -> Steps[None]:
        total, next_report = self.store.stats().blocks, 0.0
        for _ in inspection.verifying(self.store, result, repair=repair):
            if time.monotonic() >= next_report:
                next_report = time.monotonic() + _REPORT_INTERVAL_S
                report(result.checked, total)
            yield

    def _ask(self, call: ControlCall, blocks: Sequence[bytes] = ()) -> dict[str, Any]:
        """Ask the engine, if there is one, and wait for what it says, but not for ever."""
        if self.ask_engine is None:
            return {}
        job, asked = next(self._ids), Future[dict[str, Any]]()
        self._asked[job] = asked
        self.ask_engine(ControlRequest(job, call, list(blocks)))
        try:
            return asked.result(_ENGINE_TIMEOUT_S)
        except TimeoutError:
            self._asked.pop(job, None)
            return {"engine": "no answer"}

    def _finish(self, steps: Steps[Result]) -> Result:
        """Have the index thread take all steps, a slice at a time; return what they end with."""
        done: Future[Result] = Future()

        def take_slice() -> None:
            slice_end = time.monotonic() + _SLICE_S
            try:
                while time.monotonic() < slice_end:
                    next(steps)
                self.hand(take_slice)
            except StopIteration as ending:
                done.set_result(ending.value)
            except Exception as error:
                done.set_exception(error)
                if isinstance(error, CorruptIndexError | StoreFailedError):  # ends the worker
                    raise

        self.hand(take_slice)
        return done.result()
