"""The server notices when the engine is stopped, hangs or goes on."""

import asyncio
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.golden import told
from tieredkv.config import Settings
from tieredkv.engine import engine_messages as messages
from tieredkv.engine import engine_process
from tieredkv.engine.engine_messages import EngineInfo, EngineRequest, TokenOutput, ToServer
from tieredkv.engine.engine_process import EngineProcess
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.operate.calls import EvictFilter
from tieredkv.server import engine_client
from tieredkv.server.engine_client import EngineClient
from tieredkv.types import ignore_progress
from tieredkv.wire.channel import FrameChannel

HANG_S = 60
SMALL = Settings(model="tiny-random", device_size=8 << 20, host_size=8 << 20)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.05)


def test_a_stopped_engine_is_told_of_and_so_is_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_client, "SILENCE_LIMIT_S", 3.0)

    async def run() -> None:
        engine = EngineClient(SMALL, on_progress=ignore_progress)
        try:
            await engine.ready()
            assert engine.trouble is None
            os.kill(engine.pid, signal.SIGSTOP)
            await until(lambda: engine.trouble is not None)
            told(str(engine.trouble))
            os.kill(engine.pid, signal.SIGCONT)
            await until(lambda: engine.trouble is None)
            await asyncio.sleep(2 * engine_client.TICK_S)
            assert [each.levelname for each in caplog.records] == ["ERROR", "WARNING"]

            outputs: list[TokenOutput] = []
            request = EngineRequest(request_id="a", prompt_token_ids=[1], params=SamplingParams())
            os.kill(engine.pid, signal.SIGSTOP)
            engine.submit(request, outputs.append)
            await until(lambda: engine.trouble is not None)
            engine.stop()
            assert [output.finish_reason for output in outputs] == ["abort"]
            os.kill(engine.pid, signal.SIGCONT)
        finally:
            assert await engine.shutdown(HANG_S) == 0
        assert not engine.has_died

    asyncio.run(run())


class StuckCore:
    """Stands in for the engine; its first step lasts until `go_on` is set."""

    go_on = threading.Event()
    info = EngineInfo(model="m", max_model_len=1, vocab_size=1, block_size=16, worker_pid=None)
    tier_stats = SimpleNamespace(read=dict)
    verbs = SimpleNamespace(prompts=SimpleNamespace())

    def __init__(self, _settings: Settings, *, progress: Any) -> None:
        """Do nothing; no model is loaded."""

    def step(self) -> list[TokenOutput]:
        assert self.go_on.wait(HANG_S)
        return []

    def wait(self, timeout_s: float) -> None:
        threading.Event().wait(timeout_s / 10)

    def wake(self) -> None:
        """Do nothing; `wait` is short."""

    def abort_all(self) -> None:
        """Do nothing; no request runs."""

    def close(self, *, progress: Any) -> None:
        """Do nothing; nothing is held."""


def test_the_engine_says_how_long_its_step_has_lasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "EngineCore", StuckCore)
    monkeypatch.setattr(engine_process, "BEAT_INTERVAL_S", 0.1)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # works in the main thread only
    ours, theirs = socket.socketpair()
    decoder: Any = msgspec.msgpack.Decoder(ToServer)
    server = FrameChannel[ToServer](ours, decoder)
    channel = FrameChannel(theirs, msgspec.msgpack.Decoder(messages.ToEngine))
    process = EngineProcess(channel)
    thread = threading.Thread(target=process.run)
    server.send(messages.Start(settings=Settings()))
    thread.start()
    beats: queue.SimpleQueue[float] = queue.SimpleQueue()

    def hear_until(condition: Callable[[], bool]) -> None:
        while not condition():
            heard = server.receive(HANG_S)
            assert heard, "nothing is said"
            for message in heard:
                if isinstance(message, messages.Beat):
                    beats.put(message.step_s)

    steps: list[float] = []
    hear_until(lambda: beats.qsize() >= 6)
    steps += [beats.get() for _ in range(beats.qsize())]
    assert steps == sorted(steps) and steps[-1] - steps[0] >= 0.4
    StuckCore.go_on.set()
    hear_until(lambda: beats.qsize() >= 6)
    assert max(beats.get() for _ in range(beats.qsize() - 3, beats.qsize())) >= 0
    server.send(messages.Shutdown())
    thread.join(HANG_S)
    server.close()
    channel.close()
    assert not thread.is_alive()


def test_the_server_hears_of_steps_that_hang_of_evictions_and_of_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_client, "start_process", lambda *_, **__: fake_process())

    def fake_process() -> tuple[Any, socket.socket]:
        ours, theirs = socket.socketpair()
        engines.append(FrameChannel(theirs, msgspec.msgpack.Decoder(messages.ToEngine)))

        class Process:
            pid = os.getpid()

            def wait(self, _grace_s: float) -> int:
                return 0

        return Process(), ours

    engines: list[FrameChannel[Any]] = []

    async def run() -> None:
        client = EngineClient(Settings(), on_progress=ignore_progress)
        [engine] = engines
        engine.send(
            EngineInfo(model="m", max_model_len=1, vocab_size=1, block_size=16, worker_pid=None)
        )
        await client.ready()
        engine.send(messages.Beat(engine_client.STEP_LIMIT_S + 1))
        await until(lambda: client.trouble is not None)
        told(str(client.trouble))
        engine.send(messages.Beat(0.5))
        await until(lambda: client.trouble is None)
        evicted: list[EvictFilter] = []
        client.on_evict = evicted.append
        engine.send(messages.EvictToo(EvictFilter(namespace_prefix="ab")))
        await until(lambda: evicted == [EvictFilter(namespace_prefix="ab")])
        died: list[bool] = []
        client.on_death = lambda: died.append(client.has_died)
        engine.close()
        await until(lambda: died == [True])
        told(str(client.trouble))
        outputs: list[TokenOutput] = []
        client.submit(EngineRequest(request_id="a", params=SamplingParams()), outputs.append)
        assert [output.error_code for output in outputs] == ["engine_dead"]
        await client.shutdown(0.0)

    asyncio.run(run())
