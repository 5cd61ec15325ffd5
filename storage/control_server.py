"""The worker's socket for command-line clients, which nothing that a client does can hold up.

It knows connections: who may connect, how long they may be silent, how much they may send. What a
verb does is told to it as a function.
"""

import contextlib
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial

import msgspec

from tieredkv.errors import StorageError, TieredKVError
from tieredkv.storage.channel import MAX_CONTROL_FRAME_BYTES, FrameChannel
from tieredkv.storage.directory import SOCKET
from tieredkv.storage.messages import ControlCall, ControlProgress, ControlResult, refusal

logger = logging.getLogger(__name__)

_MAX_CLIENTS = 32
_SILENCE_S = 30.0
_decoder = msgspec.msgpack.Decoder(ControlCall)


def socket_address(folder_fd: int) -> str:
    """Return an address of the folder's socket that fits into 108 bytes, whatever its path."""
    return f"/proc/self/fd/{folder_fd}/{SOCKET}"


class ControlClient:
    """One connection: a call, any number of progress reports, an answer, and again."""

    def __init__(self, sock: socket.socket) -> None:
        self.channel = FrameChannel(sock, _decoder, MAX_CONTROL_FRAME_BYTES)
        self.is_busy = False
        self.is_gone = False
        self.last_heard = time.monotonic()

    def progress(self, done: int, total: int) -> None:
        """Report on a long verb; left out while the client does not read."""
        if not self.channel.has_queued:
            self.channel.send(ControlProgress(done, total))

    def answer(self, body: dict[str, object]) -> None:
        """End the call."""
        self._end(ControlResult(body))

    def fail(self, error: Exception) -> None:
        """End the call with an error; a bug of ours ends the call, never the worker."""
        if not isinstance(error, TieredKVError):
            logger.error("a verb broke", exc_info=error)
            error = StorageError(f"the store worker broke: {error!r}")
        self._end(refusal(error))

    def _end(self, message: msgspec.Struct) -> None:
        self.is_busy = False
        self.last_heard = time.monotonic()
        self.channel.send(message)


OnCall = Callable[[ControlClient, ControlCall], None]


class ControlServer:
    """Accepts clients and hands their calls on; used by the index thread alone.

    A client that says nothing, reads nothing or talks nonsense loses its connection and costs one
    bounded buffer until then.
    """

    def __init__(self, folder: str, selector: selectors.BaseSelector, on_call: OnCall) -> None:
        """Listen in `folder`, whose writer lock is held: a socket there is a dead worker's."""
        self._selector = selector
        self._on_call = on_call
        self._clients: list[ControlClient] = []
        self._folder_fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._remove()
            os.fchmod(self._listener.fileno(), 0o600)
            self._listener.bind(socket_address(self._folder_fd))
            os.chmod(socket_address(self._folder_fd), 0o600)  # the umask took its part
            self._listener.listen(_MAX_CLIENTS)
            self._listener.setblocking(False)
        except OSError as error:
            self._listener.close()
            os.close(self._folder_fd)
            raise StorageError(f"cannot listen on `{folder}/{SOCKET}`: {error}") from error
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def turn(self) -> None:
        """Drop clients that say or read nothing for too long."""
        now = time.monotonic()
        for client in list(self._clients):
            is_waiting = client.is_busy and not client.channel.has_queued
            if not is_waiting and now - client.last_heard > _SILENCE_S:
                self._drop(client)

    def close(self) -> None:
        """Hang up and remove the socket."""
        for client in list(self._clients):
            self._drop(client)
        self._selector.unregister(self._listener)
        self._listener.close()
        self._remove()
        os.close(self._folder_fd)

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET, dir_fd=self._folder_fd)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the client has gone again
            return
        if len(self._clients) >= _MAX_CLIENTS:
            idle = [client for client in self._clients if not client.is_busy]
            if not idle:
                sock.close()
                return
            self._drop(min(idle, key=lambda client: client.last_heard))
        client = ControlClient(sock)
        self._clients.append(client)
        receive = partial(self._receive_from, client)
        self._selector.register(client.channel, selectors.EVENT_READ, receive)

    def _receive_from(self, client: ControlClient) -> None:
        try:
            calls = client.channel.receive()
        except (EOFError, StorageError) as error:
            if isinstance(error, StorageError):
                logger.warning("a control client talks nonsense: %s", error)
            self._drop(client)
            return
        for call in calls:
            if client.is_busy:
                self._drop(client)
                return
            client.is_busy = True
            client.last_heard = time.monotonic()
            self._on_call(client, call)

    def _drop(self, client: ControlClient) -> None:
        if not client.is_gone:
            client.is_gone = True
            self._clients.remove(client)
            self._selector.unregister(client.channel)
            client.channel.close()
