import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.waiting import HANG_S
from tieredkv.storage.channel import FrameChannel
from tieredkv.storage.control_server import ControlServer, Report
from tieredkv.storage.worker_messages import ControlCall, ControlReply, ControlResult, Refused

_decoder = msgspec.msgpack.Decoder(ControlReply)


class Carrier:
    """Carries calls out: at once, or, `verify`, until it may end or nobody listens any more."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Event()
        self.errors: list[Exception] = []
        self.ended = threading.Semaphore(0)

    def __call__(self, call: ControlCall, report: Report) -> dict[str, Any]:
        if call.verb == "ls":
            raise ZeroDivisionError("a bug")
        if call.verb == "verify":
            self.begun.release()
            try:
                while not self.may_end.wait(0.01):
                    report(1, 2)
            except Exception as error:
                self.errors.append(error)
                raise
            finally:
                self.ended.release()
        return {"verb": call.verb}


@contextmanager
def serving(folder: Path) -> Iterator[Carrier]:
    carrier = Carrier()
    with closing(ControlServer(str(folder), carrier)):
        yield carrier
        carrier.may_end.set()


def _connect(folder: Path) -> FrameChannel[ControlReply]:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(folder / "sock"))
    return FrameChannel(sock, _decoder)


def _ask(channel: FrameChannel[ControlReply], verb: str) -> ControlReply:
    channel.send(ControlCall(verb))  # type: ignore[arg-type]
    (reply,) = channel.receive(HANG_S)
    return reply


def test_calls_are_answered_one_after_another_and_a_bug_ends_only_its_call(tmp_path: Path) -> None:
    with serving(tmp_path), closing(_connect(tmp_path)) as channel:
        assert _ask(channel, "df") == ControlResult({"verb": "df"})
        refused = _ask(channel, "ls")
        assert isinstance(refused, Refused) and "a bug" in refused.message
        assert _ask(channel, "df") == ControlResult({"verb": "df"})
    assert not (tmp_path / "sock").exists()


def test_a_client_that_goes_ends_its_call(tmp_path: Path) -> None:
    with serving(tmp_path) as carrier:
        with closing(_connect(tmp_path)) as channel:
            _ask(channel, "verify")
        assert carrier.ended.acquire(timeout=HANG_S)
        assert [type(error) for error in carrier.errors] == [EOFError]


def test_the_longest_idle_client_makes_room_and_one_that_waits_does_not(tmp_path: Path) -> None:
    with serving(tmp_path) as carrier:
        waiting = _connect(tmp_path)
        _ask(waiting, "verify")
        idle = [_connect(tmp_path) for _ in range(31)]
        for channel in idle:
            _ask(channel, "df")
        with closing(_connect(tmp_path)) as late:
            assert _ask(late, "df") == ControlResult({"verb": "df"})
        with pytest.raises(EOFError):
            idle[0].receive(HANG_S)
        assert _ask(idle[1], "df") == ControlResult({"verb": "df"})
        carrier.may_end.set()
        while not isinstance(reply := waiting.receive(HANG_S)[-1], ControlResult):
            pass
        assert reply == ControlResult({"verb": "verify"})
        for channel in [waiting, *idle]:
            channel.close()
