"""Carries out verbs on a store, whether a server has it open or none does.

The process of a verb never opens a store itself. If a worker serves the store, the verb asks that
worker by its socket. If none does, a worker is started to answer this one verb; see `own_worker`.
This module finds the live worker, and asks another one if it ends too early. It does not know
tables or exit codes.
"""

import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tieredkv.errors import NoStoreError, StorageError, StoreBusyError, StoreUnreachableError
from tieredkv.operate.calls import Call
from tieredkv.operate.own_worker import ask_own_worker
from tieredkv.operate.verb import Asking, Page
from tieredkv.operate.worker import GONE, VerbProgress, Worker, channel_over
from tieredkv.pieces import whole
from tieredkv.storage.folder.folder import SOCKET
from tieredkv.storage.folder.lock import has_engine
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.worker.socket import socket_address
from tieredkv.wire.limits import described

_ATTEMPTS = 20
_RETRY_S = 0.25


class StoreControl:
    """The verbs of one store; used by one thread.

    Args:
        path: the store's folder.
        answer_timeout_s: how long a worker may say nothing before this is reported as an error. A
            worker that is busy with a long verb says so several times a second.
        clock_offset_file: for a worker that has to be started; see `tieredkv.clock`.
        key_dir, master_key, master_key_command: where the keys of the store are, for such a worker;
            see `tieredkv.storage.keys.place`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        answer_timeout_s: float = 60.0,
        clock_offset_file: str | None = None,
        key_dir: str | None = None,
        master_key: str | None = None,
        master_key_command: str | None = None,
    ) -> None:
        self._path = str(Path(path))
        self._options = StoreOptions(
            path=self._path,
            create=False,
            sync="none",  # all at the end, instead of after each of ten thousand transactions
            disk_retentions=(),
            clock_offset_file=clock_offset_file,
            encryption="as_it_is",
            key_dir=key_dir,
            master_key=master_key,
            master_key_command=master_key_command,
        )
        self._answer_timeout_s = answer_timeout_s

    def adopt(self) -> dict[str, Any]:
        """Have the keys belong to this copy of the store; `{"adopted"}`: whether that was needed.

        Raises:
            ConfigError, MissingKeyError, StoreBusyError, StorageError: see `starts.adopt`.
        """
        from tieredkv.storage import starts  # loads what most verbs do not need

        return {"adopted": starts.adopt(self._options)}

    def answer(self, call: Call, progress: VerbProgress | None = None) -> dict[str, Any]:
        """Return the answer of a verb without its list, if it has one."""
        return whole(self.pages(call, progress))

    def pages(self, call: Call, progress: VerbProgress | None = None) -> Asking:
        """Yield the list that a verb answers with, some items at a time; return the rest of it.

        A live worker is asked, or one is started; this is tried again while a worker is starting or
        stopping. The store is not held open while the pages are read.

        Raises:
            ConfigError: the call says too little or too much.
        """
        call.check()
        folder_fd = _open_folder(self._path)
        worker_of = partial(
            Worker,
            path=self._path,
            timeout_s=self._answer_timeout_s,
            progress=progress or (lambda done, total: None),
            earlier=dict[str, Any](),
        )
        connect = partial(_connect, folder_fd)
        try:
            for attempt in range(_ATTEMPTS):
                if attempt:
                    time.sleep(_RETRY_S)
                with contextlib.suppress(*GONE), connect() as connection:
                    channel = channel_over(connection)
                    worker = worker_of(channel=channel, let_go=channel.close)
                    # That of another verb has none, as where an engine's worker is down.
                    if not (call.needs_engine and has_engine(folder_fd)) or worker.has_engine:
                        return (yield from call.carry_out(worker))
                if call.needs_engine and has_engine(folder_fd):
                    continue
                with contextlib.suppress(StoreBusyError):
                    if call.empties and (emptied := self._empty_refused()) is not None:
                        return emptied
                    timeout_s = self._answer_timeout_s
                    own_of = partial(worker_of, lacks_engine=has_engine(folder_fd))
                    own = ask_own_worker(call, self._options, own_of, connect, timeout_s)
                    return (yield from own)
            if call.needs_engine and has_engine(folder_fd):
                what = f"an engine uses `{self._path}`, but its store worker is down"
                raise StoreUnreachableError(
                    f"{what}: it cannot be asked what it holds in VRAM and host memory, so nothing "
                    "was dropped\nhint: try again once the worker is up, or stop the server first"
                )
        finally:
            os.close(folder_fd)
        raise StoreUnreachableError(
            f"the store at `{self._path}` is in use, but its socket `{SOCKET}` does not answer\n"
            "hint: the server may be starting or stopping, so try again; "
            "if it has another version, use the `tieredkv` of that version"
        )

    def _empty_refused(self) -> dict[str, Any] | None:
        """Empty a store that no server would start on; return None if one would."""
        from tieredkv.storage import starts  # loads what most verbs do not need

        if not (why := starts.why_refused(self._options)):
            return None
        return {**starts.empty(self._options), "emptied_because": why}


def document(call: Call, pages: Asking) -> Iterator[str]:
    """Yield the parts of the JSON document that is the answer of a verb.

    A list is such as `{"chains": [...]}`. What `pages` returns follows it.
    """
    if not call.listed_as:
        yield msgspec.json.encode(whole(pages)).decode()
        return
    before, rest = f'{{"{call.listed_as}": [', dict[str, Any]()

    def items() -> Iterator[Page]:
        rest.update((yield from pages))

    for page in items():
        yield before + ", ".join(msgspec.json.encode(item).decode() for item in page)
        before = ", "
    more = (f', "{key}": {msgspec.json.encode(rest[key]).decode()}' for key in rest)
    yield "".join(["" if before == ", " else before, "]", *more, "}"])


def _open_folder(path: str) -> int:
    try:
        return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        what = f"there is no store at `{path}`: {os.strerror(error.errno or 0)}"
        raise NoStoreError(what) from error


def _connect(folder_fd: int) -> socket.socket:
    """Connect to the socket in a store's folder.

    Raises:
        OSError: nobody listens there.
        StorageError: it is a link, or the socket of another account than the store's.
    """
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.setblocking(False)
        found = os.stat(SOCKET, dir_fd=folder_fd, follow_symlinks=False)
        owner = os.fstat(folder_fd).st_uid
        if not stat.S_ISSOCK(found.st_mode) or found.st_nlink > 1 or found.st_uid != owner:
            what = f"`{SOCKET}` in the folder of the store is no socket of the store's owner"
            raise StorageError(f"{what}; remove it, and start the server again")
        try:
            sock.connect(socket_address(folder_fd))
        except PermissionError as error:
            what = "the store belongs to another account, which its server runs as"
            raise StorageError(f"{what}: {described(error)}\nhint: use that account") from error
        undo.pop_all()
    return sock
