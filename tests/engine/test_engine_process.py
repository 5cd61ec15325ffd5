"""The engine's process ends when it is told to."""

import logging
import os
import signal
import socket
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.waiting import HANG_S
from tieredkv.config import Settings
from tieredkv.engine import engine_process, store_options
from tieredkv.engine.core import EngineCore
from tieredkv.engine.engine_messages import EngineInfo, Shutdown, Start, ToEngine, ToServer
from tieredkv.errors import ModelError
from tieredkv.wire.channel import MAX_ENGINE_FRAME_BYTES, FrameChannel
from tieredkv.wire.process import Refused


def test_an_engine_that_was_told_to_stop_waits_for_no_more_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    server = FrameChannel(ours, msgspec.msgpack.Decoder(ToServer))
    waits: list[float] = []
    started: list[Any] = []

    class IdleCore:
        """A core without requests, which is told to stop while it waits for one."""

        info = EngineInfo(model="m", max_model_len=1, vocab_size=1, block_size=16, worker_pid=None)
        tier_stats = SimpleNamespace(read=lambda: None)
        verbs = SimpleNamespace(prompts=SimpleNamespace())

        def __init__(self, *_: Any, **__: Any) -> None:
            assert not started
            self.woken = threading.Event()
            self.wake = self.woken.set

        def step(self) -> list[Any]:
            return []

        def wait(self, timeout_s: float) -> None:
            waits.append(timeout_s)
            server.send(Shutdown())
            assert self.woken.wait(HANG_S)

        def abort_all(self) -> None:
            pass

        def close(self, **_: Any) -> None:
            pass

    monkeypatch.setattr(engine_process, "EngineCore", IdleCore)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    server.send(Start(settings=Settings(model="m")))
    decoder = msgspec.msgpack.Decoder(ToEngine)
    channel = FrameChannel(theirs, decoder, MAX_ENGINE_FRAME_BYTES)
    assert engine_process.EngineProcess(channel, lambda: started.append(True)).run() == 0
    assert started == [True]
    assert waits == [engine_process.IDLE_WAIT_S]
    server.close()
    for thread in threading.enumerate():
        if thread.name == "receive":  # it ends now that the server is gone
            thread.join(HANG_S)
    channel.close()


@pytest.mark.parametrize(
    ("options", "num_calls"),
    [({"disk_dir": "kv"}, 1), ({"disk_dir": "kv", "disk_encryption": "off"}, 0), ({}, 0)],
)
def test_an_engine_that_is_given_a_names_key_leaves_no_core_file(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], num_calls: int
) -> None:
    calls, (ours, theirs) = list[None](), socket.socketpair()
    server = FrameChannel(ours, msgspec.msgpack.Decoder(ToServer))

    def refuse(*_: Any, **__: Any) -> EngineCore:
        raise ModelError(f"{len(calls)} calls before the engine starts")

    monkeypatch.setattr(store_options, "forbid_core_files", lambda: calls.append(None))
    monkeypatch.setattr(engine_process, "EngineCore", refuse)
    monkeypatch.setattr(os, "_exit", lambda _: None)  # only the receiving thread ends
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    server.send(Start(settings=Settings(model="m", **options)))
    channel = FrameChannel(theirs, msgspec.msgpack.Decoder(ToEngine), MAX_ENGINE_FRAME_BYTES)
    assert engine_process.EngineProcess(channel).run() == engine_process.EXIT_START_FAILED
    told = [each for each in server.receive(HANG_S) if isinstance(each, Refused)]
    assert told == [Refused("ModelError", f"{num_calls} calls before the engine starts")]
    server.close()
    for thread in threading.enumerate():
        if thread.name == "receive":
            thread.join(HANG_S)
    channel.close()
