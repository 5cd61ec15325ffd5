import errno
import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import msgspec
import pytest

from tieredkv.errors import StorageError
from tieredkv.storage.messages.engine import EngineMessage, LookupCall
from tieredkv.wire.channel import FrameChannel

_decoder = msgspec.msgpack.Decoder(EngineMessage)


def _pair(max_bytes: int = 1 << 24) -> tuple[FrameChannel[EngineMessage], socket.socket]:
    ours, theirs = socket.socketpair()
    return FrameChannel(ours, _decoder, max_bytes), theirs


def test_messages_larger_than_the_socket_arrive_in_order_and_nobody_waits() -> None:
    left, sock = _pair()
    right = FrameChannel(sock, _decoder, 1 << 24)
    sent = [LookupCall(job, [os.urandom(32) for _ in range(50_000)]) for job in range(3)]
    for message in sent:
        left.send(message)
    assert left.has_queued
    received: list[EngineMessage] = []
    while len(received) < 3:
        assert left.receive() == []
        received += right.receive()
    assert received == sent
    assert not left.has_queued
    assert right.receive() == []
    left.close()
    right.close()


def test_a_frame_split_anywhere_is_the_same_frame() -> None:
    channel, sock = _pair()
    body = msgspec.msgpack.encode(LookupCall(7, []))
    frame = struct.pack("<I", len(body)) + body
    for byte in frame + frame:
        assert len(received := channel.receive()) <= 1
        sock.send(bytes([byte]))
    assert (received or channel.receive()) == [LookupCall(7, [])]
    channel.close()
    sock.close()


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack("<I", (1 << 24) + 1),
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", 1) + b"\x01",
        struct.pack("<I", 0),
        struct.pack("<I", 12) + b"\x92\xa6lookup\x01\x01\x01\x01",
    ],
)
def test_nonsense_is_an_error_and_nothing_is_kept_for_it(garbage: bytes) -> None:
    channel, sock = _pair()
    sock.send(garbage)
    with pytest.raises(StorageError):
        channel.receive()
    channel.close()
    sock.close()


def test_the_end_of_the_other_side_is_an_eof() -> None:
    channel, sock = _pair()
    sock.close()
    channel.send(LookupCall(1, []))
    assert not channel.has_queued
    with pytest.raises(EOFError):
        channel.receive()
    channel.close()


def test_messages_to_a_closed_channel_are_not_kept() -> None:
    channel, sock = _pair()
    channel.send(LookupCall(1, [bytes(32)] * 50_000))
    assert channel.has_queued
    sock.close()
    with pytest.raises(EOFError):
        channel.receive()
    assert not channel.has_queued
    channel.close()
    channel.close()
    channel.send(LookupCall(2, []))
    assert not channel.has_queued
    with pytest.raises(EOFError):
        channel.receive()


def test_a_channel_that_is_closed_while_a_thread_waits_has_ended_for_it() -> None:
    channel, sock = _pair()

    def close_and_fail(_timeout_s: float | None) -> list[tuple[int, int]]:
        channel.close()  # as another thread may do at any time
        raise OSError(errno.EBADF, "Bad file descriptor")

    with mock.patch.object(channel, "_ready", wraps=channel._ready) as ready:
        ready.closed, ready.poll.side_effect = False, close_and_fail
        ready.close.side_effect = lambda: setattr(ready, "closed", True)
        with pytest.raises(EOFError):
            channel.receive(None)
    sock.close()


def test_a_waiting_thread_sends_the_rest_of_another_threads_message() -> None:
    channel, sock = _pair()
    other = FrameChannel(sock, _decoder)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(channel.receive, None)
        large = LookupCall(1, [os.urandom(32) for _ in range(50_000)])
        channel.send(large)
        assert other.receive(30.0) == [large]
        other.send(LookupCall(2, []))
        assert received.result(30.0) == [LookupCall(2, [])]
    assert channel.receive(0.0) == []
    channel.close()
    other.close()
