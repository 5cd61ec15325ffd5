"""Carries out verbs on a store, whether a server has it open or none does.

The process of a verb never opens a store itself. If a worker serves the store, the verb asks that
worker by its socket. If none does, a worker is started to answer this one verb: one that only looks
unless the verb changes the store. This module finds that worker, and asks another one if it ends
too early. It does not know tables or exit codes.
"""

import contextlib
import os
import socket
import stat
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from tieredkv.errors import (
    ConfigError,
    MissingKeyError,
    NoStoreError,
    StorageError,
    StoreBusyError,
    StoreUnreachableError,
    TieredKVError,
)
from tieredkv.operate.calls import (
    Call,
    Df,
    EvictFilter,
    Inspect,
    Ls,
    NamesKey,
    Prune,
    Rotate,
    Verify,
    encoded,
)
from tieredkv.operate.df import df
from tieredkv.operate.infos import ChainInfo
from tieredkv.operate.rotate import rotate
from tieredkv.operate.verify import VerbProgress, verify
from tieredkv.operate.worker import Channel, Worker, decoder, silent
from tieredkv.storage.client.names import Names
from tieredkv.storage.folder.folder import SOCKET, has_engine
from tieredkv.storage.messages import engine as messages
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.worker.process import WorkerEnd, WorkerProcess
from tieredkv.storage.worker.socket import socket_address
from tieredkv.types import Tier
from tieredkv.wire.channel import MAX_CONTROL_FRAME_BYTES, FrameChannel, Incoming
from tieredkv.wire.limits import described
from tieredkv.wire.process import Refused

Page = list[Any]
"""Items of a list, such as `ChainInfo` for `ls`."""

Asking = Generator[Page, None, dict[str, Any]]
"""Yields the pages of an answer, if it has any, and returns the rest of it."""

CarryingOut = Callable[[Worker], Asking]
"""Carries out one verb."""

_GONE = (ConnectionError, FileNotFoundError, BlockingIOError, EOFError)
_ATTEMPTS = 20
_RETRY_S = 0.25
_MAX_CALL_BYTES = MAX_CONTROL_FRAME_BYTES - (1 << 16)  # it goes to the engine in one frame
_MAX_REPLY_BYTES = 16 << 20  # in one frame from the worker: thousands of records


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
        from tieredkv.storage.folder import starts  # loads what most verbs do not need

        return {"adopted": starts.adopt(self._options)}

    def names(self) -> Names:
        """Return what the store calls blocks.

        Raises:
            MissingKeyError: it is encrypted, and its keys are not there.
        """
        return Names(self.answer(NamesKey())["names_key"])

    def answer(self, call: Call, progress: VerbProgress | None = None) -> dict[str, Any]:
        """Return the answer of a verb without its list, if it has one."""
        asking = self._ask(call, progress)
        while True:
            try:
                next(asking)
            except StopIteration as ending:
                body: dict[str, Any] = ending.value
                return body

    def pages(self, call: Call) -> Asking:
        """Yield the list that a verb answers with, some items at a time; return the rest of it.

        The store is not held open while the pages are read.
        """
        return (yield from self._ask(call))

    # --- asking ------------------------------------------------------------------------------

    def _ask(self, call: Call, progress: VerbProgress | None = None) -> Asking:
        """Ask the live worker, or start one; try again while a worker is starting or stopping.

        Raises:
            ConfigError: the call says too little or too much, or is too long for the worker.
        """
        call.check()
        if isinstance(call, Inspect) and (size := len(encoded(call))) > _MAX_CALL_BYTES:
            what = f"a call of `{call.verb}` may have {_MAX_CALL_BYTES} bytes at most"
            raise ConfigError(f"{what}, but has {size}; give a shorter prompt or fewer names")
        folder_fd = _open_folder(self._path)
        carrying_out = _carrying_out(call, progress)
        # VRAM and host memory cannot be asked while an engine's worker is down.
        is_for_engine_too = isinstance(call, EvictFilter) and not call.dry_run
        try:
            for attempt in range(_ATTEMPTS):
                if attempt:
                    time.sleep(_RETRY_S)
                with contextlib.suppress(*_GONE), _connect(folder_fd) as connection:
                    channel = FrameChannel(connection, decoder, _MAX_REPLY_BYTES)
                    return (
                        yield from carrying_out(self._worker(channel, channel.close, is_own=False))
                    )
                if is_for_engine_too and has_engine(folder_fd):
                    continue
                with contextlib.suppress(StoreBusyError):
                    if (emptied := self._empty_refused(call)) is not None:
                        return emptied
                    return (yield from self._ask_own_worker(folder_fd, call, carrying_out))
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
        from tieredkv.storage.folder import starts  # loads what most verbs do not need

        if not (why := starts.why_refused(self._options)):
            return None
        return {**starts.empty(self._options), "emptied_because": why}

    def _ask_own_worker(
        self,
        folder_fd: int,
        call: Call,
        carrying_out: CarryingOut,
        index: messages.IndexStart = "as_it_is",
    ) -> Asking:
        """Start a worker on the stopped store, ask it, and stop it again.

        If that worker fails without saying why, the next one looks for damage first; but not for a
        verb other than `verify` that changes the store. If the index is damaged, a verb that only
        looks does without it. It is made again if what `verify` finds is to be repaired.

        Raises:
            StoreBusyError: somebody was faster.
            StorageError: what the worker refused with, or died of.
        """
        try:
            worker = WorkerProcess(self._options, None, index=index, looks=not call.changes)
        except OSError as error:
            what = f"the store worker of `{self._path}` cannot be started"
            raise StorageError(f"{what}: {described(error)}") from error
        body = refused = looking = None
        with _Own(worker, grace_s=self._answer_timeout_s) as own:
            try:
                while not own.is_up:
                    for message in self._next(worker.channel):
                        match message:
                            case Refused():
                                refused = message.error
                            case messages.WorkerUp():
                                own.is_up = True
                            case messages.Looking():
                                own.is_up, looking = True, message
                if looking is not None:
                    _check_proof(call, looking)
                with worker.answers or _connect(folder_fd) as connection:
                    channel = FrameChannel(connection, decoder, _MAX_REPLY_BYTES)
                    let_go = partial(own.end, channel)
                    body = yield from carrying_out(self._worker(channel, let_go, is_own=True))
            except _GONE:
                worker.channel.send(messages.CloseCall())
                refused = refused or self._last_words(worker)
        if body is not None and looking is not None:
            return {**body, "needs": msgspec.to_builtins(looking.needs)}
        if body is not None:
            return body
        end = own.ended
        assert end is not None, "it is ended with the block above"
        is_verify = isinstance(call, Verify)
        can_go_on = is_verify or not call.changes
        if can_go_on and end.is_unexplained and index == "as_it_is":
            return (yield from self._ask_own_worker(folder_fd, call, carrying_out, "examined"))
        if can_go_on and end.is_damage and index != "set_aside":
            body = yield from self._ask_own_worker(folder_fd, call, carrying_out, "set_aside")
            return _with_damage(body, is_repaired=call.changes) if is_verify else body
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
                        refused = message.error
        return refused

    def _worker(self, channel: Channel, let_go: Callable[[], object], *, is_own: bool) -> Worker:
        return Worker(channel, self._path, self._answer_timeout_s, let_go, is_own=is_own)

    def _next(self, channel: FrameChannel[Incoming]) -> list[Incoming]:
        """Return the messages that arrive next.

        Raises:
            EOFError: the worker has gone.
            StoreUnreachableError: it says nothing.
        """
        received = channel.receive(self._answer_timeout_s)
        if not received:
            raise silent(self._path, self._answer_timeout_s)
        return received


class _Own:
    """A worker that was started for one verb; it ends with the verb, or before.

    Attributes:
        is_up: whether it serves.
        ended: how it ended.
    """

    def __init__(self, process: WorkerProcess, *, grace_s: float) -> None:
        self._process, self._grace_s = process, grace_s
        self.is_up = False
        self.ended: WorkerEnd | None = None

    def end(self, channel: Channel | None = None) -> None:
        """Have it close the store, and wait until it has ended."""
        if channel is not None:
            channel.close()
        if self.ended is None:
            self._process.channel.send(messages.CloseCall())
            self.ended = self._process.bury(grace_s=self._grace_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()


def _carrying_out(call: Call, progress: VerbProgress | None) -> CarryingOut:
    """Return what carries out a verb on any worker, and on another one if that ends too early."""
    match call:
        case Df():
            return _whole(partial(df, call))
        case NamesKey():
            return _whole(_names_key)
        case Verify():
            return _whole(partial(verify, call, progress=progress))
        case Rotate():
            return _whole(partial(rotate, call))
    from tieredkv.operate import evict, inspect, ls, prune  # load NumPy

    match call:
        case Ls():
            return partial(ls.ls, call)
        case Inspect():
            return partial(inspect.inspect, call)
        case EvictFilter():
            return _whole(evict.Evicting(call).carry_out)
        case Prune():
            return _whole(partial(prune.prune, call))


def _names_key(worker: Worker) -> dict[str, Any]:
    """Return the key of the names of blocks.

    Raises:
        MissingKeyError: the store is encrypted, and its keys are not there.
    """
    told = worker.figures(names_key=True)
    if told.lacks_keys:
        raise MissingKeyError(told.lacks_keys)
    return {"names_key": told.names_key}


def _whole(verb: Callable[[Worker], dict[str, Any]]) -> CarryingOut:
    """Return a verb whose answer has no list."""

    def carry_out(worker: Worker) -> Asking:
        yield from ()
        return verb(worker)

    return carry_out


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


def _check_proof(call: Call, looking: messages.Looking) -> None:
    """Refuse to look for what should be erased where not everything can be seen.

    Raises:
        StorageError: says what is wrong with the store.
    """
    if isinstance(call, Verify) and call.is_proof and not looking.is_whole:
        why = "; ".join(need.text for need in looking.needs)
        hint = "hint: run `tieredkv verify`, which makes the index again"
        raise StorageError(f"nothing can be proven, since {why}\n{hint}")


def _with_damage(body: dict[str, Any], *, is_repaired: bool) -> dict[str, Any]:
    """Return the answer of `verify` with a damaged index, which the worker before has found."""
    by_reason = {"index": 1, **body["by_reason"]}
    bad, repaired = sum(by_reason.values()), body["repaired"] + is_repaired
    return {**body, "bad": bad, "by_reason": by_reason, "repaired": repaired}


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
