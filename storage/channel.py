"""Frames over a stream socket, without ever waiting for the other side.

A frame is a little-endian u32 length and that many bytes of msgpack: one tagged struct of
`tieredkv.storage.messages`. It knows bytes and limits, not what a message means.
"""

import socket
import struct
from collections import deque
from typing import Generic, TypeVar

import msgspec

from tieredkv.errors import StorageError

MAX_ENGINE_FRAME_BYTES = 256 << 20
"""Between engine and worker, who trust each other; 8,192 records are about 3 MiB."""

MAX_CONTROL_FRAME_BYTES = 1 << 20
"""From a command-line client: a verb and its filter, at most some thousand block hashes."""

_LENGTH = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 20
_encoder = msgspec.msgpack.Encoder()

Incoming = TypeVar("Incoming")


def encode_frame(message: msgspec.Struct) -> bytearray:
    """Return the frame of one message, ready to send."""
    frame = bytearray(_LENGTH.size)
    _encoder.encode_into(message, frame, _LENGTH.size)
    _LENGTH.pack_into(frame, 0, len(frame) - _LENGTH.size)
    return frame


class FrameChannel(Generic[Incoming]):
    """One non-blocking end of a stream; takes ownership of the socket.

    `send` and `push_queued` need a common lock where several threads call them; `receive` is for
    one thread.

    Args:
        sock: a connected stream socket.
        decoder: for the messages that may arrive.
        max_bytes: a frame that claims more is refused before anything is kept for it.
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
        self._outbound: deque[memoryview] = deque()

    @property
    def has_queued(self) -> bool:
        """Whether something waits for the other side to read."""
        return bool(self._outbound)

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket; twice is fine."""
        self._socket.close()

    def send(self, message: msgspec.Struct) -> bool:
        """Send what the other side takes at once, queue the rest; whether something is queued."""
        self._outbound.append(memoryview(encode_frame(message)))
        return len(self._outbound) > 1 or self.push_queued()

    def push_queued(self) -> bool:
        """Send what is queued, as far as it goes; whether something is left."""
        while self._outbound:
            frame = self._outbound[0]
            try:
                sent = self._socket.send(frame, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return True
            except OSError:  # the other side is gone, as `receive` will find out
                self._outbound.clear()
                return False
            if sent == len(frame):
                self._outbound.popleft()
            else:
                self._outbound[0] = frame[sent:]
        return False

    def receive(self) -> list[Incoming]:
        """Return the messages that have arrived in whole.

        Raises:
            EOFError: the other side is gone.
            StorageError: the other side does not speak this protocol.
        """
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        self._inbound += data
        messages = []
        start = 0
        while len(self._inbound) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._inbound, start)
            if length > self._max_bytes:
                raise StorageError(f"a frame of {length} bytes; {self._max_bytes} are allowed")
            end = start + _LENGTH.size + length
            if len(self._inbound) < end:
                break
            with memoryview(self._inbound) as view, view[start + _LENGTH.size : end] as body:
                try:
                    messages.append(self._decoder.decode(body))
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise StorageError(f"a frame that is no message: {error}") from error
            start = end
        del self._inbound[:start]
        return messages
