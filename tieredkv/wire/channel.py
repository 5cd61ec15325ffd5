"""Messages in frames over a stream socket; sending never waits for the other side.

A frame is a little-endian u32 length and that many bytes of msgpack: one tagged struct. This module
does not know what the messages mean.
"""

import select
import socket
import struct
import threading
import time
from typing import Generic, TypeVar

import msgspec

from tieredkv.errors import StorageError

MAX_ENGINE_FRAME_BYTES = 256 << 20
"""Largest frame between engine and worker, which trust each other; 8,192 records are 3 MiB."""

MAX_CONTROL_FRAME_BYTES = 1 << 20
"""Largest frame from an operator's process: a question with some thousand names."""

MAX_QUEUED_BYTES = 32 << 20
"""What may wait for a side that does not read before callers hold back what can be held back."""

_LENGTH = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 20
_encoder = msgspec.msgpack.Encoder()

Incoming = TypeVar("Incoming")


class FrameChannel(Generic[Incoming]):
    """One end of a stream; takes ownership of the socket.

    Any thread may send. One thread receives, and `receive` also sends what the other side was too
    slow for, so that `send` never waits. The descriptor is ready when `receive` has work to do.

    Args:
        sock: a connected stream socket.
        decoder: decoder of the messages that may arrive.
        max_bytes: largest frame accepted; a larger one is refused before its body is kept.
    """

    def __init__(
        self,
        sock: socket.socket,
        decoder: msgspec.msgpack.Decoder[Incoming],
        max_bytes: int = MAX_ENGINE_FRAME_BYTES,
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._decoder = decoder
        self._max_bytes = max_bytes
        self._inbound = bytearray()
        self._outbound = bytearray()
        self._sending = threading.Lock()
        self._ready = select.epoll()
        self._ready.register(sock, select.EPOLLIN)

    @property
    def has_queued(self) -> bool:
        """Whether sent bytes still wait for the other side to read."""
        return bool(self._outbound)

    @property
    def is_stuck(self) -> bool:
        """Whether so much waits for the other side that callers should hold back what they can."""
        return len(self._outbound) > MAX_QUEUED_BYTES

    def fileno(self) -> int:
        """Return the descriptor, for a selector that waits for reading."""
        return self._ready.fileno()

    def close(self) -> None:
        """Close the socket; a second call does nothing. Queued and later messages are lost."""
        with self._sending:
            self._socket.close()
            self._ready.close()

    def send(self, message: msgspec.Struct) -> None:
        """Send what the other side takes at once; `receive` sends the rest."""
        body = _encoder.encode(message)
        with self._sending:
            is_waiting = self.has_queued
            self._outbound += _LENGTH.pack(len(body))
            self._outbound += body
            if not is_waiting and not self._push():
                self._ready.modify(self._socket, select.EPOLLIN | select.EPOLLOUT)

    def _push(self) -> bool:
        """Send as much of the queue as the socket takes; return whether nothing is left."""
        try:
            while self._outbound:
                del self._outbound[: self._socket.send(self._outbound, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            return False
        except OSError:  # the other side is gone, as `receive` will find out
            self._outbound.clear()
        return True

    def drain(self, timeout_s: float) -> bool:
        """Wait until the socket has taken all that was sent; return whether it did so in time.

        Messages that arrive meanwhile are dropped.

        Raises:
            EOFError: the other side is gone.
            StorageError: the other side does not speak this protocol.
        """
        deadline = time.monotonic() + timeout_s
        while self.has_queued:
            if (left_s := deadline - time.monotonic()) <= 0:
                return False
            self._wait(left_s)
        return True

    def receive(self, timeout_s: float | None = 0.0) -> list[Incoming]:
        """Return the complete messages that have arrived; none if nothing happens for `timeout_s`.

        Raises:
            EOFError: the other side is gone.
            StorageError: the other side does not speak this protocol.
        """
        while (messages := self._wait(timeout_s)) == []:
            pass
        return messages or []

    def _wait(self, timeout_s: float | None) -> list[Incoming] | None:
        """Send and read once, and return the complete messages; None if nothing happens in time."""
        try:
            ready = self._ready.poll(timeout_s)
        except (OSError, ValueError) as error:
            if not self._ready.closed:
                raise
            raise EOFError from error  # another thread may close it at any time
        if not ready:
            return None
        (_, events) = ready[0]
        if events & select.EPOLLOUT:
            with self._sending:
                if self._push():
                    self._ready.modify(self._socket, select.EPOLLIN)
        return self._read() if events & ~select.EPOLLOUT else []

    def _read(self) -> list[Incoming]:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except OSError:  # for example, it was killed before it had read all bytes
            data = b""
        if not data:
            with self._sending:
                self._outbound.clear()
            raise EOFError
        self._inbound += data
        messages = []
        start = 0
        while len(self._inbound) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._inbound, start)
            if length > self._max_bytes:
                most = f"at most {self._max_bytes} are allowed"
                raise StorageError(f"a frame has {length} bytes, but {most}")
            end = start + _LENGTH.size + length
            if len(self._inbound) < end:
                break
            with memoryview(self._inbound) as view, view[start + _LENGTH.size : end] as body:
                try:
                    messages.append(self._decoder.decode(body))
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise StorageError(f"a frame is not a valid message: {error}") from error
            start = end
        del self._inbound[:start]
        return messages
