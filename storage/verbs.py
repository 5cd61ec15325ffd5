"""The verbs of the command line, as the worker carries them out.

It knows what each verb answers and whom else it concerns. It never takes longer than a slice at a
time, so that loads and lookups go on under a long `verify`.
"""

import itertools
import os
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import msgspec

from tieredkv.errors import ConfigError
from tieredkv.storage.control_server import ControlClient
from tieredkv.storage.lmdb_store import BlockStore
from tieredkv.storage.messages import ControlCall
from tieredkv.storage.results import EvictFilter, VerifyResult

_ENGINE_TIMEOUT_S = 5.0
_SLICE_S = 0.02
_REPORT_INTERVAL_S = 0.1

AskEngine = Callable[[int, str, dict[str, Any]], None]
Finish = Callable[[ControlClient, dict[str, Any] | None], None]
Steps = Generator[None, None, None]


class _Question(NamedTuple):
    """An answer of the engine that a client waits for."""

    client: ControlClient
    deadline: float
    finish: Finish


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
        self._questions: dict[int, _Question] = {}
        self._slices: list[tuple[ControlClient, Steps]] = []

    @property
    def has_work(self) -> bool:
        """Whether a long verb wants its next slice at once."""
        return bool(self._slices)

    def begin(self, client: ControlClient, call: ControlCall) -> None:
        """Carry out a verb, or begin to.

        Raises:
            ConfigError: no such verb, or its arguments make no sense.
        """
        match call.verb:
            case "df":
                self._ask(client, call, self._finish_df)
            case "ls":
                client.answer({"chains": msgspec.to_builtins(self._store.chains())})
            case "evict":
                wanted = _evict_filter(call.args)
                if wanted.dry_run:  # of the disk's blocks; the engine is not disturbed
                    self._evict(client, wanted, {})
                    return
                if wanted.ids:  # RAM may have a chain's head without the tail that its id names
                    call.args["blocks"] = self._store.select(wanted)
                self._ask(client, call, lambda client, engine: self._evict(client, wanted, engine))
            case "verify":
                repair = call.args.get("repair") is not False
                self._slices.append((client, self._verify(client, repair)))
            case verb:
                raise ConfigError(f"no verb `{verb}`; there are `df`, `ls`, `evict`, `verify`")

    def hear_engine(self, job: int, body: dict[str, Any]) -> None:
        """Take the engine's answer; one that comes too late is dropped."""
        if job in self._questions:
            self._finish(job, body)

    def turn(self) -> None:
        """Give up on questions that are overdue, and do one slice of the long verbs."""
        now = time.monotonic()
        for job, question in list(self._questions.items()):
            if question.deadline <= now:
                self._finish(job, None)
        for running in list(self._slices):
            client, work = running
            end = time.monotonic() + _SLICE_S
            try:
                while time.monotonic() < end:
                    next(work)
            except StopIteration:
                self._slices.remove(running)
            except Exception as error:
                self._slices.remove(running)
                client.fail(error)

    def _verify(self, client: ControlClient, repair: bool) -> Steps:
        total, result = self._store.stats().blocks, VerifyResult()
        next_report = 0.0
        for result in self._store.verifying(repair=repair):
            if client.is_gone:
                break
            if time.monotonic() >= next_report:
                next_report = time.monotonic() + _REPORT_INTERVAL_S
                client.progress(result.checked, total)
            yield
        client.answer(msgspec.to_builtins(result))

    def _ask(self, client: ControlClient, call: ControlCall, finish: Finish) -> None:
        if self._ask_engine is None:
            finish(client, {})
            return
        job = next(self._ids)
        self._questions[job] = _Question(client, time.monotonic() + _ENGINE_TIMEOUT_S, finish)
        self._ask_engine(job, call.verb, call.args)

    def _finish(self, job: int, engine: dict[str, Any] | None) -> None:
        question = self._questions.pop(job)
        question.client.attempt(lambda: question.finish(question.client, engine))

    def _finish_df(self, client: ControlClient, engine: dict[str, Any] | None) -> None:
        disk = msgspec.to_builtins(self._store.stats())
        writer_pid = None if self._ask_engine is None else os.getpid()
        tiers = {"device": None, "host": None, **_said(engine), "disk": disk}
        client.answer({**tiers, "writer_pid": writer_pid})

    def _evict(
        self, client: ControlClient, wanted: EvictFilter, engine: dict[str, Any] | None
    ) -> None:
        def work() -> Steps:
            result = yield from self._store.evicting(wanted)
            disk = result._asdict()
            unknown_ids = list(disk.pop("unknown_ids"))
            said = _said(engine)
            sums = {name: count + said.get(name, 0) for name, count in disk.items()}
            client.answer({**said, **sums, "unknown_ids": unknown_ids, "disk": disk})

        self._after_writes(lambda: self._slices.append((client, work())))


def _said(engine: dict[str, Any] | None) -> dict[str, Any]:
    return {"engine": "no answer"} if engine is None else engine


def _evict_filter(args: dict[str, Any]) -> EvictFilter:
    try:
        wanted = msgspec.convert(args, EvictFilter)
    except msgspec.ValidationError as error:
        raise ConfigError(f"no filter of blocks: {error}") from error
    if wanted == EvictFilter(dry_run=wanted.dry_run):
        raise ConfigError("nothing says which blocks to evict; all of them must be asked for")
    return wanted
