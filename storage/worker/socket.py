"""The worker's socket for operators' processes.

It limits how many clients are connected, how long they may be silent, how much they may send and
how long they may leave an answer unread, so that no client can hold up the worker. It does not know
what is asked: a function that answers is given to it.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from itertools import chain

import msgspec

from tieredkv.errors import StorageError, TieredKVError
from tieredkv.own_files import remove
from tieredkv.storage.folder.folder import SOCKET
from tieredkv.storage.messages.operator import Asked, Done, StillBusy
from tieredkv.wire.channel import MAX_CONTROL_FRAME_BYTES, FrameChannel
from tieredkv.wire.limits import described
from tieredkv.wire.process import Refused

logger = logging.getLogger(__name__)

_MAX_CLIENTS = 32
_SILENCE_S = 30.0
_PAUSE_S = 0.1
_HINT = "hint: it may have another version; use the `tieredkv` of that version"
_DONE = Done()
decoder = msgspec.msgpack.Decoder(Asked)


class Caller:
    """The client whose questions are answered: it hears that work goes on, and gets the answers.

    Both methods raise EOFError once nobody listens any more.
    """

    def __init__(self, channel: FrameChannel[Asked]) -> None:
        self._channel = channel

    def report(self) -> None:
        """Tell that the answer takes longer, if the client reads what it is told."""
        self._channel.receive()  # if only the end of the client
        if not self._channel.has_queued:
            self._channel.send(StillBusy())

    def tell(self, parts: Iterable[msgspec.Struct], last: msgspec.Struct = _DONE) -> None:
        """Send the parts of an answer and its last word, each once the client has read the others.

        A client that does not read what it is told counts as gone.
        """
        for part in chain(parts, [last]):
            self._channel.receive()  # if only the end of the client
            self._channel.send(part)
            if not self._channel.drain(_SILENCE_S):
                text = "a control client has not read its answer for %g s, so it is closed"
                logger.warning(text, _SILENCE_S)
                raise EOFError


Answer = Callable[[Asked, Caller], Iterable[msgspec.Struct]]


def socket_address(folder_fd: int) -> str:
    """Return an address of the folder's socket that fits into 108 bytes, whatever its path."""
    return f"/proc/self/fd/{folder_fd}/{SOCKET}"


class ControlServer:
    """Accepts clients and has their questions answered, each client on a thread of its own.

    A client that sends nothing, reads nothing or does not speak the protocol loses its connection.
    Until then it takes one thread and one bounded buffer. Whoever comes while there are too many
    is heard once another one has gone.

    Clients may connect as soon as the server exists. They are heard once `start` is called.
    """

    def __init__(self, folder: str, answer: Answer) -> None:
        """Listen in `folder`, whose writer lock is held: a socket there is a dead worker's."""
        self._carry_out = answer
        self._room = threading.Semaphore(_MAX_CLIENTS)
        self._calls: list[Asked] = []  # until their answers are taken
        self._answered_at = time.monotonic()
        self._is_over = threading.Event()
        self._folder_fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._remove()
            umask = os.umask(0o177)  # a change of its mode might follow a link in its place
            try:
                self._listener.bind(socket_address(self._folder_fd))
            finally:
                os.umask(umask)
            self._listener.listen(_MAX_CLIENTS)
        except OSError as error:
            self._listener.close()
            os.close(self._folder_fd)
            raise StorageError(f"cannot listen on `{folder}/{SOCKET}`: {error}") from error
        self._thread = threading.Thread(target=self._accept, name="control", daemon=True)

    def start(self) -> None:
        """Hear the clients that have connected, and those that will."""
        self._thread.start()

    @property
    def is_forgotten(self) -> bool:
        """Whether no client has asked anything for as long as a client may be silent."""
        return not self._calls and time.monotonic() - self._answered_at > _SILENCE_S

    def is_answering(self, *kinds: type[Asked]) -> bool:
        """Return whether a client waits for the answer to a question of one of these kinds."""
        return any(isinstance(call, kinds) for call in [*self._calls])

    def close(self) -> None:
        """Take no more clients and remove the socket; those that are left go with the process."""
        self._is_over.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # ends the `accept`
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()
        self._remove()
        os.close(self._folder_fd)

    def _remove(self) -> None:
        with suppress(FileNotFoundError):
            remove(SOCKET, dir_fd=self._folder_fd)

    def _accept(self) -> None:
        told = set[int | None]()
        while not self._is_over.is_set():
            if not self._room.acquire(timeout=_PAUSE_S):
                continue
            try:
                sock, _ = self._listener.accept()
            except OSError as error:  # the client has gone again, or no descriptor is left
                self._room.release()
                if not self._is_over.wait(_PAUSE_S) and error.errno not in told:
                    told.add(error.errno)
                    logger.warning("a command cannot be accepted: %s", described(error))
                continue
            threading.Thread(target=self._converse, args=[sock], daemon=True).start()

    def _converse(self, sock: socket.socket) -> None:
        """Hear one call after another, with any number of reports and an answer to each."""
        try:
            with closing(FrameChannel(sock, decoder, MAX_CONTROL_FRAME_BYTES)) as channel:
                try:
                    while calls := channel.receive(_SILENCE_S):
                        for call in calls:
                            self._answer(call, channel)
                except StorageError as error:
                    logger.warning("the connection of a control client is closed: %s", error)
                    channel.send(Refused.of(StorageError(f"the store worker: {error}\n{_HINT}")))
        except (EOFError, OSError):  # it is gone, or there is no descriptor for it
            pass
        finally:
            sock.close()
            self._room.release()

    def _answer(self, call: Asked, channel: FrameChannel[Asked]) -> None:
        """Have a call carried out; a bug of ours ends the call, never the worker."""
        caller = Caller(channel)
        self._calls.append(call)
        try:
            caller.tell(self._carry_out(call, caller))
        except EOFError:
            raise
        except TieredKVError as error:
            caller.tell([], Refused.of(error))
        except Exception as error:
            logger.exception("a command failed")
            what = f"the command failed in the store worker: {error!r}"
            caller.tell([], Refused.of(StorageError(what)))
        finally:
            self._answered_at = time.monotonic()
            self._calls.remove(call)
