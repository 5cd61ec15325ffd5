import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from tests.waiting import HANG_S, wait_until
from tieredkv.storage.messages.operator import (
    Asked,
    Checked,
    Done,
    EngineAnswer,
    Figures,
    Find,
    Reply,
    Rows,
    Scan,
    Verify,
)
from tieredkv.storage.worker.socket import Caller, ControlServer
from tieredkv.wire.channel import FrameChannel
from tieredkv.wire.process import Refused

_decoder = msgspec.msgpack.Decoder(Reply)


FIGURES, VERIFY = Figures(), Verify()


class Carrier:
    """Answers questions. `Verify` lasts until `may_end` is set or its client has gone."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Event()
        self.errors: list[Exception] = []
        self.ended = threading.Semaphore(0)
        self.num_pages = 0

    def __call__(self, asked: Asked, caller: Caller) -> Iterator[msgspec.Struct]:
        if isinstance(asked, Scan):
            raise ZeroDivisionError("a bug")
        if isinstance(asked, Verify):
            self.begun.release()
            try:
                while not self.may_end.wait(0.01):
                    caller.report()
            except Exception as error:
                self.errors.append(error)
                raise
            finally:
                self.ended.release()
            yield Checked(checked=1)
        if isinstance(asked, Find):
            try:
                for self.num_pages in range(1, 1000):
                    yield PAGE
            finally:
                self.ended.release()


PAGE = Rows(b"r" * 540 * 256, (), 0.0)


@contextmanager
def serving(folder: Path) -> Iterator[Carrier]:
    carrier = Carrier()
    with closing(ControlServer(str(folder), carrier)) as server:
        server.start()
        yield carrier
        carrier.may_end.set()


def _connect(folder: Path) -> FrameChannel[Reply]:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(folder / "sock"))
    return FrameChannel(sock, _decoder)


def _ask(channel: FrameChannel[Reply], asked: Asked) -> Reply:
    """Send a question and return the first reply to it, which may be a report of many."""
    channel.send(asked)
    return channel.receive(HANG_S)[0]


def test_calls_are_answered_one_after_another_and_a_bug_ends_only_its_call(tmp_path: Path) -> None:
    with serving(tmp_path), closing(_connect(tmp_path)) as channel:
        assert _ask(channel, FIGURES) == Done()
        refused = _ask(channel, Scan())
        assert isinstance(refused, Refused) and "a bug" in refused.message
        assert _ask(channel, FIGURES) == Done()
    assert not (tmp_path / "sock").exists()


def test_a_client_that_comes_before_the_start_is_heard_after_it(tmp_path: Path) -> None:
    carrier = Carrier()
    with (
        closing(ControlServer(str(tmp_path), carrier)) as server,
        closing(_connect(tmp_path)) as channel,
    ):
        channel.send(FIGURES)
        assert channel.receive(0.05) == []
        server.start()
        assert channel.receive(HANG_S) == [Done()]


def test_nothing_is_changed_that_somebody_puts_in_the_place_of_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, victim = tmp_path / "kv", tmp_path / "victim"
    folder.mkdir()
    victim.touch()
    victim.chmod(0o644)
    made: list[int] = []

    class RacedSocket(socket.socket):
        def bind(self, address: object) -> None:
            super().bind(address)  # type: ignore[arg-type]
            made.append((folder / "sock").stat().st_mode & 0o777)
            (folder / "sock").unlink()
            (folder / "sock").symlink_to(victim)

    monkeypatch.setattr("tieredkv.storage.worker.socket.socket.socket", RacedSocket)
    umask = os.umask(0)
    try:
        ControlServer(str(folder), Carrier()).close()
    finally:
        assert os.umask(umask) == 0
    assert made == [0o600]
    assert victim.stat().st_mode & 0o777 == 0o644


def test_a_server_that_never_starts_closes_and_takes_its_socket_with_it(tmp_path: Path) -> None:
    server = ControlServer(str(tmp_path), Carrier())
    with closing(_connect(tmp_path)) as channel:
        server.close()
        with pytest.raises((EOFError, ConnectionError)):
            channel.receive(HANG_S)
    assert not (tmp_path / "sock").exists()


def test_a_folder_in_the_place_of_the_socket_gives_way(tmp_path: Path) -> None:
    (tmp_path / "sock" / "inner").mkdir(parents=True)
    ControlServer(str(tmp_path), Carrier()).close()
    assert not (tmp_path / "sock").exists()


def test_a_call_of_another_version_is_refused_with_the_reason(tmp_path: Path) -> None:
    with serving(tmp_path), closing(_connect(tmp_path)) as channel:
        channel.send(msgspec.defstruct("Figures", [("sorted", bool)], tag="figures")(sorted=True))
        [refused] = channel.receive(HANG_S)
        assert isinstance(refused, Refused)
        assert "unknown field `sorted`" in refused.message and "another version" in refused.message
        with pytest.raises(EOFError):
            channel.receive(HANG_S)


def test_a_client_that_goes_ends_its_call(tmp_path: Path) -> None:
    with serving(tmp_path) as carrier:
        with closing(_connect(tmp_path)) as channel:
            _ask(channel, VERIFY)
        assert carrier.ended.acquire(timeout=HANG_S)
        assert [type(error) for error in carrier.errors] == [EOFError]


def test_a_client_that_goes_is_told_no_further_part(tmp_path: Path) -> None:
    with serving(tmp_path) as carrier:
        with closing(_connect(tmp_path)) as channel:
            _ask(channel, Find(starts=[]))
        assert carrier.ended.acquire(timeout=HANG_S)
        assert carrier.num_pages < 999


def test_a_client_without_room_is_heard_once_another_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tieredkv.storage.worker.socket._MAX_CLIENTS", 2)
    with serving(tmp_path) as carrier:
        waiting, idle = _connect(tmp_path), _connect(tmp_path)
        _ask(waiting, VERIFY)
        _ask(idle, FIGURES)
        with closing(_connect(tmp_path)) as late:
            late.send(FIGURES)
            assert late.receive(0.05) == []
            idle.close()
            assert late.receive(HANG_S) == [Done()]
        carrier.may_end.set()
        replies = list[Reply]()
        while Done() not in replies:
            replies += waiting.receive(HANG_S)
        assert Checked(checked=1) in replies
        waiting.close()


def test_a_client_that_reads_none_of_its_pages_loses_its_connection_after_one_or_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tieredkv.storage.worker.socket._SILENCE_S", 0.5)
    with serving(tmp_path) as carrier, closing(_connect(tmp_path)) as channel:
        channel.send(Find(starts=[]))
        assert carrier.ended.acquire(timeout=HANG_S)
        assert 1 <= carrier.num_pages <= 4


def test_a_client_that_asks_and_asks_and_never_reads_is_not_answered_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tieredkv.storage.worker.socket._SILENCE_S", 0.5)
    answered: list[Asked] = []
    others = set(threading.enumerate())

    def answer(asked: Asked, caller: Caller) -> Iterator[EngineAnswer]:
        answered.append(asked)
        yield EngineAnswer(0, {"text": "x" * 100_000})

    def is_being_served() -> bool:
        return any("_converse" in it.name for it in threading.enumerate() if it not in others)

    with (
        closing(ControlServer(str(tmp_path), answer)) as server,
        closing(_connect(tmp_path)) as channel,
    ):
        server.start()
        with suppress(EOFError):
            for _ in range(1000):
                channel.send(FIGURES)
        wait_until(lambda: bool(answered))
        wait_until(lambda: not is_being_served())
        assert len(answered) < 100


def test_pages_arrive_in_order_before_the_result(tmp_path: Path) -> None:
    with serving(tmp_path), closing(_connect(tmp_path)) as channel:
        channel.send(Find(starts=[]))
        replies: list[Reply] = []
        while not replies or not isinstance(replies[-1], Done):
            more = channel.receive(HANG_S)
            assert more, "no answer"
            replies += more
        assert replies[:-1] == [PAGE] * 999
