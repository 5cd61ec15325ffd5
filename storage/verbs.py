"""The verbs of the command line, as the worker carries them out.

It knows what each verb answers and whom else it concerns. It never takes longer than a slice at a
time, so that loads and lookups go on under a long `verify`.
"""

import itertools
import os
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec

from tieredkv.errors import ConfigError
from tieredkv.storage.control_server import ControlClient
from tieredkv.storage.index import is_damage
from tieredkv.storage.lmdb_store import BlockStore
from tieredkv.storage.messages import ControlCall, ControlRequest, EngineAnswer
from tieredkv.storage.results import EvictFilter, VerifyResult

_ENGINE_TIMEOUT_S = 5.0
_SLICE_S = 0.02
_REPORT_INTERVAL_S = 0.1

AskEngine = Callable[[ControlRequest], None]
Steps = Generator[bool | None, None, dict[str, Any]]
"""A verb under way: each step says whether it waits for somebody, the end is the answer."""


class Verbs:
    """Carries out one store's verbs; used by the index thread alone.

    Args:
        ask_engine: sends a question to the engine; None where there is none to ask.
        after_writes: runs a function once every store received so far is acknowledged, and before
            any later one is begun, so that what was on its way is evicted too.
    """

    def __init__(
        self,
        store: BlockStore,
        *,
        ask_engine: AskEngine | None,
        after_writes: Callable[[Callable[[], None]], None],
    ) -> None:
        self._store = store
        self._ask_engine = ask_engine
        self._after_writes = after_writes
        self._ids = itertools.count(1)
        self._answers: dict[int, dict[str, Any] | None] = {}  # of questions not given up
        self._running: list[tuple[ControlClient, Steps]] = []
        self.has_work = False  # whether a verb wants its next slice at once

    def begin(self, client: ControlClient, call: ControlCall) -> None:
        """Take on a verb; `turn` carries it out."""
        self._running.append((client, self._carry_out(client, call)))

    def hear_engine(self, answer: EngineAnswer) -> None:
        """Take the engine's answer; one that comes too late is dropped."""
        if answer.id in self._answers:
            self._answers[answer.id] = answer.body

    def turn(self) -> None:
        """Do one slice of every verb under way."""
        self.has_work = False
        for running in list(self._running):
            client, steps = running
            end = time.monotonic() + _SLICE_S
            try:
                while not (is_waiting := next(steps)) and time.monotonic() < end:
                    pass
                self.has_work = self.has_work or not is_waiting
            except StopIteration as ending:
                self._running.remove(running)
                client.answer(ending.value)
            except Exception as error:
                self._running.remove(running)
                client.fail(error)
                if is_damage(error):
                    raise

    def _carry_out(self, client: ControlClient, call: ControlCall) -> Steps:
        match call.verb:
            case "df":
                engine = yield from self._asking(call)
                tiers = {"device": None, "host": None, **engine}
                writer_pid = None if self._ask_engine is None else os.getpid()
                disk = msgspec.to_builtins(self._store.stats())
                return {**tiers, "disk": disk, "writer_pid": writer_pid}
            case "ls":
                return {"chains": msgspec.to_builtins((yield from self._store.listing()))}
            case "evict":
                return (yield from self._evicting(call))
            case "verify":
                return (yield from self._verifying(client, call.repair))

    def _evicting(self, call: ControlCall) -> Steps:
        wanted, engine = call.wanted, {}
        if wanted == EvictFilter(dry_run=wanted.dry_run):
            raise ConfigError("nothing says which blocks to evict; all of them must be asked for")
        if not wanted.dry_run:  # which is about the disk's blocks; the engine is not disturbed
            # RAM may have a chain's head without the tail that its id names.
            blocks, _ = yield from self._store.choosing(wanted.ids)
            engine = yield from self._asking(call, blocks)
        yield from self._settling_writes()
        result = yield from self._store.evicting(wanted)
        disk = {"evicted_blocks": result.evicted_blocks, "freed_bytes": result.freed_bytes}
        sums = {name: count + engine.get(name, 0) for name, count in disk.items()}
        return {**engine, **sums, "unknown_ids": list(result.unknown_ids), "disk": disk}

    def _verifying(self, client: ControlClient, repair: bool) -> Steps:
        total, result = self._store.stats().blocks, VerifyResult()
        next_report = 0.0
        for result in self._store.verifying(repair=repair):
            if client.is_gone:
                break
            if time.monotonic() >= next_report:
                next_report = time.monotonic() + _REPORT_INTERVAL_S
                client.progress(result.checked, total)
            yield False
        answer: dict[str, Any] = msgspec.to_builtins(result)
        return answer

    def _asking(self, call: ControlCall, blocks: Sequence[bytes] = ()) -> Steps:
        """Ask the engine, if there is one, and wait for what it says, but not for ever."""
        if self._ask_engine is None:
            return {}
        job, deadline = next(self._ids), time.monotonic() + _ENGINE_TIMEOUT_S
        self._answers[job] = None
        self._ask_engine(ControlRequest(job, call, list(blocks)))
        while self._answers[job] is None and time.monotonic() < deadline:
            yield True
        answer = self._answers.pop(job)
        return {"engine": "no answer"} if answer is None else answer

    def _settling_writes(self) -> Generator[bool, None, None]:
        settled: list[bool] = []
        self._after_writes(lambda: settled.append(True))
        while not settled:
            yield True
