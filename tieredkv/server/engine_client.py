"""The engine's process as the server sees it: started, talked to, and watched for its death.

It knows frames and process ids, no HTTP and no text. Everything runs on the server's event loop.
"""

import asyncio
import contextlib
import itertools
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tieredkv.config import Settings
from tieredkv.engine import engine_messages as messages
from tieredkv.engine.engine_messages import (
    EngineInfo,
    EngineRequest,
    Operated,
    TokenOutput,
    ToServer,
)
from tieredkv.errors import RequestError, StorageError, TieredKVError
from tieredkv.operate.calls import Call, EvictFilter, Inspect
from tieredkv.types import Progress
from tieredkv.units import format_bytes
from tieredkv.wire.channel import FrameChannel
from tieredkv.wire.process import Refused, bury, describe_exit, start_process

logger = logging.getLogger(__name__)

EXIT_GRACE_S = 10.0
SILENCE_LIMIT_S = 10.0
STEP_LIMIT_S = 60.0
"""A step takes seconds at most on a GPU. A large model on a CPU can take longer, and the engine is
then reported as stuck until the step ends.
"""

TICK_S = 1.0
_decoder: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)

Take = Callable[[TokenOutput], None]


class EngineClient:
    """One engine process.

    Every submitted request gets its outputs through the function that came with it, and always an
    output with a `finish_reason`: the engine's death is an output with "error".

    Args:
        settings: passed to the engine, which starts to load at once.
        on_progress: called with the progress of loading and draining.
        log_level: of the engine's process.

    Attributes:
        stats: the engine's newest figures of its tiers; empty before the first.
        info: the engine's newest description of itself; set once it is ready.
        pid: the engine's process.
        is_alive: whether the process is there.
        has_died: whether the process ended without being told to.
        on_death: called when it has, after every request got its last output.
        on_evict: called with each filter of blocks that the command line has evicted.
        on_prompt: makes the request that a prompt is, which an operator inspects.
    """

    def __init__(
        self, settings: Settings, *, on_progress: Progress, log_level: str = "INFO"
    ) -> None:
        self._on_progress = on_progress
        self._takers: dict[str, Take] = {}
        self._ids = itertools.count(1)
        self._operations: dict[int, asyncio.Queue[Operated | None]] = {}
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        # Ctrl-C in the terminal reaches the server alone, which tells the engine.
        self._process, sock = start_process("tieredkv.engine", stdout=sys.stderr.fileno())
        self.pid = self._process.pid
        self._channel = FrameChannel(sock, _decoder)
        self._ended = asyncio.Event()
        self._is_stopping = False
        self.stats: dict[str, Any] = {}
        self.info: EngineInfo
        self.is_alive, self.has_died = True, False
        self.on_death: Callable[[], None] = lambda: None
        self.on_evict: Callable[[EvictFilter], object] = lambda _: None
        self.on_prompt: Callable[[Inspect], Awaitable[EngineRequest]]
        self._tasks = set[asyncio.Task[None]]()
        self._silent_s = self._step_s = 0.0
        self._was_stuck = False
        self._ticking: asyncio.TimerHandle | None = None
        self._channel.send(messages.Start(settings=settings, log_level=log_level))
        self._loop.add_reader(self._channel, self._hear)

    async def ready(self) -> EngineInfo:
        """Wait until the model is loaded and return what the engine can do.

        Raises:
            TieredKVError: of the type that the engine refused with.
        """
        return await asyncio.shield(self._ready)

    @property
    def trouble(self) -> str | None:
        """Why the engine cannot answer now, as a sentence; None while it can.

        A stopped process sends nothing. While a step hangs, in the GPU's driver for instance, the
        engine's receiving thread still reports how long the step has lasted. Both can recover.
        """
        if not self.is_alive:
            return "The engine has died"
        if self._silent_s >= SILENCE_LIMIT_S:
            state = _state_of(self.pid)
            return f"The engine has not reported for {self._silent_s:.0f} s; its process {state}"
        if self._step_s >= STEP_LIMIT_S:
            return f"The engine has been in one step for {self._step_s:.0f} s"
        return None

    def submit(self, request: EngineRequest, take: Take) -> None:
        """Hand a request to the engine; `take` is called with each of its outputs."""
        if self.has_died:
            take(_death_of(request.request_id))
        elif self._is_stopping or not self.is_alive:
            take(_abort_of(request.request_id))
        else:
            self._takers[request.request_id] = take
            self._channel.send(request)

    def abort(self, request_id: str) -> None:
        """Stop a request; `take` is not called for it any more."""
        if self._takers.pop(request_id, None) is not None:
            self._tell(messages.Abort(request_id))

    def give_shares(self, shares: dict[str, float]) -> None:
        """Replace the tenants' shares of every tier."""
        self._tell(messages.Shares(shares))

    async def operate(self, call: Call) -> list[dict[str, Any]]:
        """Carry out a verb in VRAM and host memory, and return the parts of its answer.

        Raises:
            RequestError: the engine is dead, or stops.
        """
        if self._is_stopping or not self.is_alive:
            raise _death()
        id, parts = next(self._ids), list[dict[str, Any]]()
        answers = self._operations[id] = asyncio.Queue[Operated | None]()
        try:
            self._channel.send(messages.Operate(id, call))
            while (answer := await answers.get()) is not None:
                parts.append(answer.body)
                if not answer.has_more:
                    return parts
            raise _death()
        finally:
            del self._operations[id]

    def stop(self) -> None:
        """Tell the engine to end every request, write what it promised, and exit; do not wait."""
        self._tell(messages.Shutdown())
        self._is_stopping = True
        self._stop_ticking()
        if self.trouble:  # it will not end its requests in time
            self._end_requests(_abort_of)

    def kill(self) -> None:
        """End an engine that is still starting and has promised nothing."""
        self._process.kill()

    async def shutdown(self, drain_timeout_s: float) -> int:
        """Stop, wait for the engine's end, and return its exit code."""
        self.stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), drain_timeout_s + EXIT_GRACE_S)
        self._mark_dead()
        self._channel.close()
        exit_code = await asyncio.to_thread(bury, self._process, EXIT_GRACE_S)
        if self.has_died:
            told = describe_exit(exit_code)
            logger.error("the engine has died (%s); the server ends with exit code 1", told)
        return exit_code

    def _tell(self, message: messages.ToEngine) -> None:
        if self.is_alive and not self._is_stopping:
            self._channel.send(message)

    def _tick(self) -> None:
        """Count one second of silence; seconds in which this process did not run do not count."""
        self._silent_s += TICK_S
        self._ticking = self._loop.call_later(TICK_S, self._tick)
        trouble = self.trouble
        if trouble and not self._was_stuck:
            logger.error("%s; /health reports this until the engine recovers", trouble)
        elif self._was_stuck and not trouble:
            logger.warning("the engine has recovered")
        self._was_stuck = bool(trouble)

    def _stop_ticking(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()

    def _hear(self) -> None:
        self._silent_s = 0.0
        try:
            for message in self._channel.receive():
                self._take(message)
        except (EOFError, StorageError) as error:
            if isinstance(error, StorageError):
                logger.error("the engine sent invalid data: %s", error)
            self._mark_dead()

    def _take(self, message: ToServer) -> None:
        match message:
            case messages.StepOutputs(outputs, stats):
                self.stats = stats or self.stats
                for output in outputs:
                    pick = self._takers.pop if output.finish_reason else self._takers.get
                    if (take := pick(output.request_id, None)) is not None:
                        take(output)
            case messages.Beat(step_s):
                self._step_s = step_s
            case messages.ProgressReport(stage, done, total):
                self._on_progress(stage, done, total)
            case Operated(id=id):
                if (answers := self._operations.get(id)) is not None:
                    answers.put_nowait(message)
            case messages.Tokenize(id, call):
                task = self._loop.create_task(self._tokenize(id, call))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case messages.EvictToo(wanted):
                self.on_evict(wanted)
            case EngineInfo():
                self.info = message
                if not self._ready.done():
                    self._ready.set_result(message)
                    self._ticking = self._loop.call_later(TICK_S, self._tick)
            case Refused():  # said instead of `EngineInfo`
                self._ready.set_exception(message.error)

    async def _tokenize(self, id: int, call: Inspect) -> None:
        """Tell the engine the tokens of a prompt that an operator inspects, or why it has none."""
        try:
            self._tell(messages.Tokenized(id, await self.on_prompt(call)))
        except TieredKVError as error:
            self._tell(messages.Tokenized(id, refused=str(error)))

    def _mark_dead(self) -> None:
        self._loop.remove_reader(self._channel)
        self._ended.set()
        self._stop_ticking()
        self.is_alive = False
        if not self._ready.done():
            self._ready.set_exception(TieredKVError("the engine died while it was starting"))
        elif not (self._is_stopping or self._ready.exception()):
            self.has_died = True
            logger.error("the engine has died; its requests fail and the server ends")
        self._end_requests(_death_of)
        for answers in self._operations.values():
            answers.put_nowait(None)
        if not self._is_stopping:
            self.on_death()

    def _end_requests(self, last_output_of: Callable[[str], TokenOutput]) -> None:
        """Give every request its last output."""
        takers, self._takers = self._takers, {}
        for request_id, take in takers.items():
            take(last_output_of(request_id))


def _death() -> RequestError:
    text = "The engine has died, so the server ends; retry later."
    return RequestError(text, code="engine_dead", status=503)


DISK_STATES = ("ok", "off", "failing", "behind")
"""What `/health` and the metrics call the states of a disk tier."""


def disk_state(
    info: EngineInfo, stats: Mapping[str, Any], drain_timeout_s: float
) -> tuple[str, str]:
    """Return the state of the disk tier and its cause, which is empty if the state is `ok`.

    Args:
        info: what the engine can do.
        stats: what the engine reported.
        drain_timeout_s: the setting.
    """
    causes = {
        "off": info.disk_trouble,
        "failing": (stats.get("disk") or {}).get("store_error"),
        "behind": backlog(stats, drain_timeout_s),
    }
    return next(((state, cause) for state, cause in causes.items() if cause), ("ok", ""))


def backlog(stats: Mapping[str, Any], drain_timeout_s: float) -> str:
    """Return why a stop would lose blocks that were promised to the disk; empty if it would not.

    Args:
        stats: what the engine reported.
        drain_timeout_s: the setting.
    """
    owed = stats.get("owed")
    if owed is None or owed["drain_s"] <= drain_timeout_s:
        return ""
    num_bytes = format_bytes(owed["bytes"])
    rate = format_bytes(stats["learnt"]["write_bytes_per_s"])
    return (
        f"a stop would lose promised blocks: {num_bytes} are not on disk yet, and at {rate}/s they "
        f"take {owed['drain_s']:.0f} s to write, but `drain_timeout` is {drain_timeout_s:g} s; "
        "raise it, or make `host_size` smaller or `disk_write_limit` larger"
    )


def _death_of(request_id: str) -> TokenOutput:
    return messages.failed(request_id, _death())


def _abort_of(request_id: str) -> TokenOutput:
    return TokenOutput(request_id=request_id, finish_reason="abort")


def _state_of(pid: int) -> str:
    """Say what the kernel says of a process."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "is gone"
    stopped = "is stopped by a signal, and SIGCONT continues it"
    waits = "waits in the kernel, for a disk or the GPU's driver"
    return {"T": stopped, "t": "is stopped by a debugger", "D": waits}.get(state, "does not answer")


STATUS_OF_CODE = {
    "constraint_failed": 500,
    "queue_full": 429,
    "engine_dead": 503,
    "shutting_down": 503,
}


def error_of(output: TokenOutput) -> RequestError:
    """Return what an output that ended with "error" or "abort" means to the caller."""
    if output.finish_reason == "abort":
        return RequestError("The server is shutting down.", code="shutting_down", status=503)
    status = STATUS_OF_CODE.get(output.error_code or "", 400)
    text = output.error or "The request failed."
    error = RequestError(text, code=output.error_code, status=status)
    error.retry_after_s = output.retry_after_s
    return error
