"""The engine's process, as the server sees it: started, spoken to, and known to be dead.

It knows frames and process ids, no HTTP and no text. Everything runs on the server's event loop.
"""

import asyncio
import contextlib
import itertools
import logging
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from tieredkv import errors
from tieredkv.config import Settings
from tieredkv.engine import engine_messages as messages
from tieredkv.engine.engine_messages import EngineInfo, EngineRequest, TokenOutput, ToServer
from tieredkv.errors import RequestError, StorageError, TieredKVError
from tieredkv.storage.channel import FrameChannel
from tieredkv.storage.results import EvictFilter
from tieredkv.storage.worker_messages import Refused
from tieredkv.storage.worker_process import bury, start_process
from tieredkv.types import Progress

logger = logging.getLogger(__name__)

EXIT_GRACE_S = 10.0
_decoder: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)

Take = Callable[[TokenOutput], None]


class EngineClient:
    """One engine process.

    Every submitted request gets its outputs through the function that came with it, and always an
    output with a `finish_reason`: the engine's death is an output with "error".

    Args:
        settings: what it loads, at once.
        on_progress: told how far loading and draining are.
        log_level: of its process.

    Attributes:
        stats: what the engine last said of its tiers; empty until it did.
        info: what it last said of itself; there once it is ready.
        pid: the engine's process.
    """

    def __init__(
        self, settings: Settings, *, on_progress: Progress, log_level: str = "INFO"
    ) -> None:
        self._on_progress = on_progress
        self._takers: dict[str, Take] = {}
        self._ids = itertools.count(1)
        self._evictions: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        # Ctrl-C in the terminal reaches the server alone, which tells the engine.
        engine, stdout = "tieredkv.engine.engine_process", sys.stderr.fileno()
        self._process, sock = start_process(engine, stdout=stdout)
        self.pid = self._process.pid
        self._channel = FrameChannel(sock, _decoder)
        self._ended = asyncio.Event()
        self._is_stopping = False
        self.stats: dict[str, Any] = {}
        self.info: EngineInfo
        self.is_alive = True
        self._channel.send(messages.Start(settings=settings, log_level=log_level))
        self._loop.add_reader(self._channel, self._hear)

    async def ready(self) -> EngineInfo:
        """Wait until the model is loaded and return what the engine can do.

        Raises:
            TieredKVError: of the type that the engine refused with.
        """
        return await asyncio.shield(self._ready)

    def submit(self, request: EngineRequest, take: Take) -> None:
        """Hand a request to the engine; `take` is called with each of its outputs."""
        if self._is_stopping:
            take(TokenOutput(request_id=request.request_id, finish_reason="abort"))
        elif not self.is_alive:
            take(_death_of(request.request_id))
        else:
            self._takers[request.request_id] = take
            self._channel.send(request)

    def abort(self, request_id: str) -> None:
        """Stop a request; nothing more of it is told."""
        if self._takers.pop(request_id, None) is not None:
            self._tell(messages.Abort(request_id))

    def give_shares(self, shares: dict[str, float]) -> None:
        """Give tenants their shares of every tier, in place of those before."""
        self._tell(messages.Shares(shares))

    async def evict(self, wanted: EvictFilter) -> dict[str, Any]:
        """Drop blocks from VRAM and host memory, and return what the verb `evict` answers.

        Raises:
            RequestError: the engine is dead, or stops.
        """
        id = next(self._ids)
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._evictions[id] = answer
        if self._is_stopping or not self.is_alive:
            answer.set_exception(_death())
        else:
            self._channel.send(messages.Evict(id, wanted))
        try:
            return await answer
        finally:
            del self._evictions[id]

    def stop(self) -> None:
        """Tell the engine to end every request, write what it promised, and exit; do not wait."""
        self._tell(messages.Shutdown())
        self._is_stopping = True

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
        return await asyncio.to_thread(bury, self._process, EXIT_GRACE_S)

    def _tell(self, message: messages.ToEngine) -> None:
        if self.is_alive and not self._is_stopping:
            self._channel.send(message)

    def _hear(self) -> None:
        try:
            for message in self._channel.receive():
                self._take(message)
        except (EOFError, StorageError) as error:
            if isinstance(error, StorageError):
                logger.error("the engine sent %s", error)
            self._mark_dead()

    def _take(self, message: ToServer) -> None:
        match message:
            case messages.StepOutputs(outputs, stats):
                self.stats = stats or self.stats
                for output in outputs:
                    pick = self._takers.pop if output.finish_reason else self._takers.get
                    if (take := pick(output.request_id, None)) is not None:
                        take(output)
            case messages.ProgressReport(stage, done, total):
                self._on_progress(stage, done, total)
            case messages.Evicted(id, body):
                if (answer := self._evictions.get(id)) is not None and not answer.done():
                    answer.set_result(body)
            case EngineInfo():
                self.info = message
                if not self._ready.done():
                    self._ready.set_result(message)
            case Refused(kind, text):  # said instead of `EngineInfo`
                self._ready.set_exception(errors.named(kind, text))

    def _mark_dead(self) -> None:
        self._loop.remove_reader(self._channel)
        self._ended.set()
        self.is_alive = False
        if not self._ready.done():
            self._ready.set_exception(TieredKVError("the engine died while it was starting"))
        elif not (self._is_stopping or self._ready.exception()):
            logger.error("the engine has died; every request is refused until a restart")
        for request_id, take in self._takers.items():
            take(_death_of(request_id))
        self._takers.clear()
        for answer in self._evictions.values():
            if not answer.done():
                answer.set_exception(_death())


def _death() -> RequestError:
    text = "The engine has stopped; restart the server"
    return RequestError(text, code="engine_dead", status=503)


def _death_of(request_id: str) -> TokenOutput:
    return messages.failed(request_id, _death())


STATUS_OF_CODE = {"queue_full": 429, "engine_dead": 503, "shutting_down": 503}


def error_of(output: TokenOutput) -> RequestError:
    """Return what an output that ended with "error" or "abort" means to the caller."""
    if output.finish_reason == "abort":
        return RequestError("The server is shutting down", code="shutting_down", status=503)
    status = STATUS_OF_CODE.get(output.error_code or "", 400)
    text = output.error or "The request failed"
    error = RequestError(text, code=output.error_code, status=status)
    error.retry_after_s = output.retry_after_s
    return error
