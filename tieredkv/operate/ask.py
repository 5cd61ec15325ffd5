"""The command line's side of a store's verbs, on a running server or a stopped store.

The command line never opens a store itself. If a worker serves the store, this module talks to the
worker's socket; if none does, it starts the same worker and talks to that one. It does not know
tables or exit codes.
"""

import contextlib
import functools
import os
import socket
import stat
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from tieredkv.errors import (
    ConfigError,
    NoStoreError,
    StorageError,
    StoreBusyError,
    StoreUnreachableError,
    TieredKVError,
    named,
)
from tieredkv.operate.calls import Call, Df, EvictFilter, Ls, NamesKey, Rotate, Verify
from tieredkv.storage import worker_messages as messages
from tieredkv.storage.control_server import socket_address
from tieredkv.storage.folder import SOCKET, has_engine
from tieredkv.storage.limits import described
from tieredkv.storage.names import Names
from tieredkv.storage.results import ChainInfo
from tieredkv.storage.worker_messages import ControlReply, StoreOptions
from tieredkv.storage.worker_process import WorkerProcess
from tieredkv.types import Tier
from tieredkv.wire.channel import MAX_CONTROL_FRAME_BYTES, FrameChannel, Incoming
from tieredkv.wire.process import Refused

VerbProgress = Callable[[int, int], None]
"""Called with (blocks done, blocks in all) during a long verb."""

Page = list[Any]
"""Items of a list, such as `ChainInfo` for `ls`."""

Asking = Generator[Page, None, dict[str, Any]]
"""Yields the pages of an answer, if it has any, and returns the rest of it."""

_GONE = (ConnectionError, FileNotFoundError, BlockingIOError, EOFError)
_ATTEMPTS = 20
_RETRY_S = 0.25
MAX_REPLY_BYTES = 16 << 20
"""In one frame from the worker: a page of a list, or an answer that has a bounded size."""

_MAX_IDS = 8192  # in one frame of the size that the worker accepts
_decoder = msgspec.msgpack.Decoder(ControlReply)


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
            disk_retentions=(),
            clock_offset_file=clock_offset_file,
            encryption="as_it_is",
            key_dir=key_dir,
            master_key=master_key,
            master_key_command=master_key_command,
        )
        self._answer_timeout_s = answer_timeout_s

    def df(self, *, verbose: bool = False) -> dict[str, Any]:
        """Return what each tier holds: `device`, `host`, `disk`, `writer_pid`.

        With `verbose` the answer also has `namespaces`, the largest first, and `num_namespaces`.
        This reads the whole index.
        """
        return self.answer(Df(verbose=verbose))

    def ls(self, limit: int | None = None) -> Generator[list[ChainInfo], None, None]:
        """Yield what the tiers hold by chain, some chains at a time, the last used first.

        Args:
            limit: how many chains to list at most; None for all.
        """
        yield from self.pages(Ls(limit=limit))

    def evict(self, wanted: EvictFilter) -> dict[str, Any]:
        """Drop blocks from every tier; `{"evicted_blocks", "freed_bytes", "unknown_ids", ...}`.

        Copies count: a block that was in three tiers is evicted three times. `disk` has the disk
        tier's part.
        """
        return self.answer(wanted)

    def verify(
        self, *, repair: bool = True, progress: VerbProgress | None = None
    ) -> dict[str, Any]:
        """Read every block and compare; `{"checked", "bad", "by_reason", "repaired"}`."""
        return self.answer(Verify(repair=repair), progress)

    def prove_erased(self, key_id: str = "", namespace_prefix: str = "") -> dict[str, Any]:
        """Look for what is left; `{"erased", "checked", "keys", "blocks", "extents"}`."""
        return self.answer(Verify(erased_key=key_id, erased_namespace=namespace_prefix))

    def rotate(self, master_key: str | None, command: str | None) -> dict[str, Any]:
        """Replace the master key; `{"master_key", "keys"}`: where the new one is, keys it wraps."""
        return self.answer(Rotate(master_key=master_key, command=command))

    def adopt(self) -> dict[str, Any]:
        """Have the keys belong to this copy of the store; `{"adopted"}`: whether that was needed.

        Raises:
            ConfigError, MissingKeyError, StoreBusyError, StorageError: see `starts.adopt`.
        """
        from tieredkv.storage import starts  # loads what most verbs do not need

        return {"adopted": starts.adopt(self._options)}

    def names(self) -> Names:
        """Return what the store calls blocks.

        Raises:
            MissingKeyError: it is encrypted, and its keys are not there.
        """
        return Names(self.answer(NamesKey())["names_key"])

    def answer(self, call: Call, progress: VerbProgress | None = None) -> dict[str, Any]:
        """Return the answer of a verb without its list, if it has one.

        Of the many ids of an eviction some are sent at a time: a dry run then leaves out blocks
        that only chains of different parts share.
        """
        if isinstance(call, EvictFilter) and len(call.ids) > _MAX_IDS:
            parts = range(0, len(call.ids), _MAX_IDS)
            some = [replace(call, ids=call.ids[start : start + _MAX_IDS]) for start in parts]
            return functools.reduce(_add, map(self.answer, some))
        asking = self._ask(call, progress)
        while True:
            try:
                next(asking)
            except StopIteration as ending:
                body: dict[str, Any] = ending.value
                return body

    def pages(self, call: Call) -> Asking:
        """Yield the list that a verb answers with, some items at a time; return the rest of it.

        The worker waits until a page is taken before it makes the next one. Close the generator if
        it is not to be read to its end.
        """
        return (yield from self._ask(call))

    # --- asking ------------------------------------------------------------------------------

    def _ask(self, call: Call, progress: VerbProgress | None = None) -> Asking:
        """Ask the live worker, or start one; try again while a worker is starting or stopping.

        Raises:
            ConfigError: the call is too long for the worker.
        """
        if (size := len(msgspec.msgpack.encode(call))) > MAX_CONTROL_FRAME_BYTES:
            what = f"a call of `{call.verb}` may have {MAX_CONTROL_FRAME_BYTES} bytes at most"
            raise ConfigError(f"{what}, but has {size}; give a shorter prompt or fewer names")
        folder_fd = _open_folder(self._path)
        self._has_page = False
        # VRAM and host memory cannot be asked while an engine's worker is down.
        is_for_engine_too = isinstance(call, EvictFilter) and not call.dry_run
        try:
            for attempt in range(_ATTEMPTS):
                if attempt:
                    time.sleep(_RETRY_S)
                with contextlib.suppress(*_GONE), _connect(folder_fd) as connection:
                    return (yield from self._converse(connection, call, progress))
                if self._has_page:
                    what = "ended in the middle of its answer, so the answer is incomplete"
                    raise StoreUnreachableError(f"the store worker of `{self._path}` {what}")
                if is_for_engine_too and has_engine(folder_fd):
                    continue
                with contextlib.suppress(StoreBusyError):
                    if (emptied := self._empty_refused(call)) is not None:
                        return emptied
                    return (yield from self._ask_own_worker(folder_fd, call, progress))
            if is_for_engine_too and has_engine(folder_fd):
                what = f"an engine uses `{self._path}`, but its store worker is down"
                raise StoreUnreachableError(
                    f"{what}: what it holds in VRAM and host memory could come back, so nothing "
                    "was evicted\nhint: try again once the worker is up, or stop the server first"
                )
        finally:
            os.close(folder_fd)
        raise StoreUnreachableError(
            f"the store at `{self._path}` is in use, but its socket `{SOCKET}` does not answer\n"
            "hint: the server may be starting or stopping, so try again; "
            "if it has another version, use the `tieredkv` of that version"
        )

    def _empty_refused(self, call: Call) -> dict[str, Any] | None:
        """Empty a store that no server would start on, if a call is to drop every block on disk.

        Returns what the call answers; None if a worker has to carry it out.
        """
        if not _is_of_whole_disk(call):
            return None
        from tieredkv.storage import starts  # loads what most verbs do not need

        if not (why := starts.why_refused(self._options)):
            return None
        return {**starts.empty(self._options), "emptied_because": why}

    def _ask_own_worker(
        self,
        folder_fd: int,
        call: Call,
        progress: VerbProgress | None,
        index: messages.IndexStart = "as_it_is",
    ) -> Asking:
        """Start a worker on the stopped store, ask it, and stop it again.

        If that worker fails without saying why, `verify` has the next one look for damage first. If
        the index is damaged, and what is found is to be repaired, the index is made again.

        Raises:
            StoreBusyError: somebody was faster.
            StorageError: what the worker refused with, or died of.
        """
        try:
            worker = WorkerProcess(self._options, arena=None, index=index)
        except OSError as error:
            what = f"the store worker of `{self._path}` cannot be started"
            raise StorageError(f"{what}: {described(error)}") from error
        body = refused = None
        is_up = False
        try:
            while not is_up:
                for message in self._next(worker.channel):
                    if isinstance(message, Refused):
                        refused = named(message.kind, message.message)
                    is_up |= isinstance(message, messages.WorkerUp)
            with _connect(folder_fd) as connection:
                body = yield from self._converse(connection, call, progress)
        except _GONE:
            pass
        finally:
            worker.channel.send(messages.CloseCall())
            if body is None:
                refused = refused or self._last_words(worker)
            end = worker.bury(grace_s=self._answer_timeout_s)
        if body is not None:
            return body
        if isinstance(call, Verify) and end.is_unexplained and index == "as_it_is":
            return (yield from self._ask_own_worker(folder_fd, call, progress, "examined"))
        if isinstance(call, Verify) and call.repair and end.is_damage and index != "set_aside":
            body = yield from self._ask_own_worker(folder_fd, call, progress, "set_aside")
            by_reason = {"index": 1, **body["by_reason"]}
            bad, repaired = sum(by_reason.values()), body["repaired"] + 1
            return {**body, "bad": bad, "by_reason": by_reason, "repaired": repaired}
        if refused is not None and not end.is_damage:
            raise refused
        hint = "hint: run `tieredkv verify`, which rebuilds a damaged index"
        why = f"the store worker of `{self._path}` ended: {refused or end.text}"
        raise StorageError(f"{why}\n{hint}" if end.is_damage else why)

    def _last_words(self, worker: WorkerProcess) -> TieredKVError | None:
        """Wait for a worker to end and return what it said about that, if anything."""
        refused = None
        with contextlib.suppress(EOFError, StorageError):
            while received := worker.channel.receive(self._answer_timeout_s):
                for message in received:
                    if isinstance(message, Refused):
                        refused = named(message.kind, message.message)
        return refused

    def _converse(self, sock: socket.socket, call: Call, progress: VerbProgress | None) -> Asking:
        channel = FrameChannel(sock, _decoder, MAX_REPLY_BYTES)
        channel.send(call)
        while True:
            for reply in self._next(channel):
                match reply:
                    case messages.ControlProgress(done, total):
                        if progress is not None:
                            progress(done, total)
                    case messages.ControlPage(chains, blocks):
                        self._has_page = True
                        yield [*chains, *blocks]
                    case messages.ControlResult(body):
                        return body
                    case Refused(kind, text):
                        raise named(kind, text)

    def _next(self, channel: FrameChannel[Incoming]) -> list[Incoming]:
        """Return the messages that arrive next.

        Raises:
            EOFError: the worker has gone.
            StoreUnreachableError: it says nothing.
        """
        received = channel.receive(self._answer_timeout_s)
        if not received:
            raise StoreUnreachableError(
                f"the store worker of `{self._path}` has said nothing for "
                f"{self._answer_timeout_s:g} s\nhint: it may be stopped, or its disk may hang"
            )
        return received


def document(call: Call, pages: Iterator[Page]) -> Iterator[str]:
    """Yield the parts of the JSON document that has a verb's list, such as `{"chains": [...]}`.

    What `pages` returns, if it is a generator, follows the list.
    """
    before, rest = f'{{"{call.listed_as}": [', dict[str, Any]()
    while True:
        try:
            page = next(pages)
        except StopIteration as ending:
            rest = ending.value or {}
            break
        yield before + ", ".join(msgspec.json.encode(item).decode() for item in page)
        before = ", "
    more = (f', "{key}": {msgspec.json.encode(rest[key]).decode()}' for key in rest)
    yield "".join(["" if before == ", " else before, "]", *more, "}"])


def _add(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Add what two parts of an eviction answered."""
    added = {**one, **other}
    for key in one.keys() & other.keys():
        if isinstance(other[key], dict):
            added[key] = _add(one[key], other[key])
        elif isinstance(other[key], int | list):
            added[key] = one[key] + other[key]
    return added


def _is_of_whole_disk(call: Call) -> bool:
    """Return whether a call is to drop every block on disk."""
    if not isinstance(call, EvictFilter):
        return False
    is_whole = call.all and call.to == "drop" and not call.dry_run
    return is_whole and call.concerns(Tier.DISK)


def _open_folder(path: str) -> int:
    try:
        return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        what = f"there is no store at `{path}`: {os.strerror(error.errno or 0)}"
        raise NoStoreError(what) from error


def _connect(folder_fd: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        _check_socket(folder_fd)
        sock.connect(socket_address(folder_fd))
    except PermissionError as error:
        sock.close()
        what = "the store belongs to another account, which its server runs as"
        raise StorageError(f"{what}: {described(error)}\nhint: use that account") from error
    except OSError:
        sock.close()
        raise
    return sock


def _check_socket(folder_fd: int) -> None:
    """Refuse a link in the place of the socket, and a socket of another user than the store's.

    Raises:
        StorageError: it is no socket of the store's owner.
    """
    found = os.stat(SOCKET, dir_fd=folder_fd, follow_symlinks=False)
    owner = os.fstat(folder_fd).st_uid
    if not stat.S_ISSOCK(found.st_mode) or found.st_nlink > 1 or found.st_uid != owner:
        what = f"`{SOCKET}` in the folder of the store is no socket of the store's owner"
        raise StorageError(f"{what}; remove it, and start the server again")
