"""A look at a stopped store, for a verb that changes nothing.

The process of a look takes the place of the worker that would open the store. It makes no file and
changes none, neither in the store's folder nor in that of its keys, so it may look at a backup, at
a read-only mount, and with a clock that is wrong. What an opening would settle or repair stays as
it is, and is told instead: see `Need`. The look holds the store's lock together with others that
look, and ends at once when a writer wants it. Started by root, it takes the identity of the store's
owner first, so that a forged index gets no rights that its owner does not have.
"""

import os
import socket
import stat
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import NamedTuple

from tieredkv.clock import Clock
from tieredkv.errors import (
    ConfigError,
    DamagedTableError,
    MissingKeyError,
    StorageError,
    StoreBusyError,
)
from tieredkv.own_files import open_own
from tieredkv.storage.extents.files import SegmentFiles
from tieredkv.storage.folder.filesystem import Filesystem
from tieredkv.storage.folder.folder import COMPLETE, DRAFT, StoreFolder, check_folder
from tieredkv.storage.folder.lock import LOCK, in_use, is_wanted, lock_to_look
from tieredkv.storage.folder.marker import MARKER, refuse_replaced
from tieredkv.storage.index.entries import SegmentState
from tieredkv.storage.index.environment import Access, Index
from tieredkv.storage.index.pages import check_pages
from tieredkv.storage.index.transaction import IndexTxn
from tieredkv.storage.index.verdicts import storage_errors
from tieredkv.storage.keys.place import KeyPlace
from tieredkv.storage.keys.store_keys import StoreKeys, check_stamp
from tieredkv.storage.keys.use import KeyUse
from tieredkv.storage.messages import engine as messages
from tieredkv.storage.messages.engine import EngineMessage, IndexStart
from tieredkv.storage.opening import CLOCK_TOLERANCE_S
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.parts import Parts
from tieredkv.storage.stats import Need
from tieredkv.storage.store import Store
from tieredkv.storage.worker.operators import Operators
from tieredkv.storage.worker.process import EXIT_FAILED
from tieredkv.storage.worker.socket import Caller, decoder
from tieredkv.wire.channel import MAX_CONTROL_FRAME_BYTES, FrameChannel
from tieredkv.wire.process import Refused

_WISH_POLL_S = 0.1
_HERE = "/proc/self/cwd/."
_REBUILDS = "the next start of a server makes it again from the segments"
_NEEDS: Mapping[str, str] = {
    "index_damaged": f"the index is damaged; {_REBUILDS}",
    "index_unflushed": f"the machine stopped before the index was flushed; {_REBUILDS}",
    "index_replaced": "a new index has not replaced the old one yet; the next start of a server "
    "does that",
    "index_draft": "a new index was not finished; the next start of a server removes what there is",
    "index_lost": f"the index is lost or was never completed; {_REBUILDS}",
    "index_rebuild": "entries of the index are damaged; the next start of a server makes it again "
    "from those that are sound",
    "segments": "the index does not know {num} segment files; the next start of a server removes "
    "those without blocks, or makes the index again",
    "keys_damaged": "{why}; the next start of a server empties the store and makes new keys",
    "copy": "no server starts on it: {why}",
    "clock": "the clock is {behind_s:.0f} s behind the store's latest time, so its {num} blocks "
    "count as expired; the next start of a server removes them unless the clock is set right "
    "before",
}
"""What a store may need, by codes for programs; docs/disk.md lists them."""


class LookedFolder(StoreFolder):
    """A store's folder that others may look at, too, and that is not changed; for one thread."""

    @classmethod
    def look(cls, path: str) -> "LookedFolder":
        """Check the folder, and take its lock as one who looks, if it has one.

        Raises:
            StoreBusyError: a process writes to the store, or wants to.
            FormatVersionError: another version of tieredkv wrote the store.
            StorageError: the folder holds no store, belongs to another user or is not safe.
        """
        marker = check_folder(path, create=False, writes=False)
        assert marker is not None, "it would have been refused"
        if marker.is_replaced:
            raise refuse_replaced(path)
        lock_fd = -1
        with suppress(FileNotFoundError):
            lock_fd = open_own(os.path.join(path, LOCK))
        try:
            if lock_fd >= 0:
                lock_to_look(lock_fd)
        except BlockingIOError:
            busy = in_use(path, lock_fd)
            os.close(lock_fd)
            raise busy from None
        folder = cls(path, lock_fd, marker)
        if os.path.isdir(complete := os.path.join(path, COMPLETE)):
            folder.index_path = complete  # the next start begins with it
            folder._identity = folder._look()
        return folder

    @property
    def is_wanted(self) -> bool:
        """Whether a writer waits for this process to end."""
        return self._lock_fd >= 0 and is_wanted(self._lock_fd)

    def release(self) -> None:
        """Release the lock, and write nothing; may be called again."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


class LookedStore(Store):
    """A store whose folder, index and segments are not changed; those parts refuse to be."""

    def ask_for_rebuild(self) -> None:
        """Do nothing: the next start of a server finds the damage, too."""


def open_to_look(
    options: StoreOptions, folder: LookedFolder, clock: Clock, index: IndexStart
) -> tuple[LookedStore, messages.Looking]:
    """See what there is; return the store, which releases the folder, and what it needs.

    Args:
        options: where the keys are.
        folder: the folder of the store.
        clock: moved up to the latest time that the store has seen, if it is a little behind, and
            behind the end of all blocks, if it is further behind.
        index: whether its pages are checked first, or it is left alone.

    Raises:
        CorruptIndexError, StoreFailedError, FormatVersionError, StorageError
    """
    unfinished = {
        "index_damaged": index == "set_aside",
        "index_unflushed": index != "set_aside" and folder.lost_unflushed,
        "index_replaced": os.path.isdir(os.path.join(folder.path, COMPLETE)),
        "index_draft": os.path.isdir(os.path.join(folder.path, DRAFT)),
    }
    needs = [_need(code) for code, is_so in unfinished.items() if is_so]
    with ExitStack() as undo, storage_errors(folder.path):
        undo.callback(folder.release)
        if index == "examined":
            check_pages(folder.index_path)
        is_believed = index != "set_aside" and not folder.lost_unflushed
        access: Access = "look" if is_believed else "none"
        looked = Index(folder.index_path, retentions=folder.retentions, access=access)
        undo.callback(looked.close)
        keys, why = _look_for_keys(folder, options, needs)
        use = KeyUse(looked, clock, keys, why, options.longest_s)
        filesystem = Filesystem.look(os.path.join(folder.path, MARKER))
        files = SegmentFiles(folder.segments_path, filesystem, writes=False)
        undo.callback(files.close)
        with looked.reading() as txn:
            num_unknown = _open_segments(files, txn.segments())
            is_lost = not txn.meta.format
            if num_unknown and is_believed:
                needs.append(_need("index_lost" if is_lost else "segments", num=num_unknown))
            num_expired = _compare_clocks(txn, clock, needs)
        parts = Parts.join(clock, folder, looked, use, files, folder.budget_bytes)
        parts.room.reload()
        store = LookedStore(replace(parts, num_expired=num_expired), options)
        undo.pop_all()
    is_whole = is_believed and not num_unknown
    return store, messages.Looking(needs, is_whole)


def _need(code: str, **facts: object) -> Need:
    return Need(code, _NEEDS[code].format(**facts))


def _look_for_keys(
    folder: LookedFolder, options: StoreOptions, needs: list[Need]
) -> tuple[StoreKeys | None, str]:
    """Read the keys; return them and, if the store is encrypted and they are not there, why."""
    if not folder.marker.id:
        return None, ""
    place = KeyPlace(folder.path, options, folder.marker.id)
    try:
        table = place.look()
        check_stamp(folder.path, folder.marker, table)
    except DamagedTableError as error:
        needs.append(_need("keys_damaged", why=error))
        return None, str(error)
    except MissingKeyError as error:
        if error.reason == "copy":
            needs.append(_need("copy", why=error))
        return None, str(error)
    except (ConfigError, StorageError) as error:
        return None, str(error)
    return StoreKeys(place, table), ""


def _open_segments(files: SegmentFiles, known: Mapping[int, SegmentState]) -> int:
    """Open the segment files that the index knows; return how many others there are."""
    found = dict[int, int]()
    with suppress(FileNotFoundError):
        found = files.found()
    for segment, state in known.items():
        with suppress(FileNotFoundError):  # its blocks are misses
            files.open(segment, state.extent_bytes)
    others = found.keys() - known.keys()
    for segment in others:  # only what they occupy counts
        files.open(segment, found[segment])
    return len(others)


def _compare_clocks(txn: IndexTxn, clock: Clock, needs: list[Need]) -> int:
    """Compare the clock with the store's latest time; return how many blocks expire by it."""
    if txn.meta.needs_rebuild:
        needs.append(_need("index_rebuild"))
    num_blocks, behind_s = txn.meta.totals.num_blocks, txn.meta.clock - clock.now()
    if behind_s <= CLOCK_TOLERANCE_S or not num_blocks:
        clock.advance_to(txn.meta.clock)
        return 0
    needs.append(_need("clock", behind_s=behind_s, num=num_blocks))
    clock.advance_to(txn.latest_expiry())
    return num_blocks


class Look(NamedTuple):
    """Answers one verb on a stopped store; what goes wrong ends it, and is told by its end.

    Attributes:
        store: what is looked at.
        looking: what the verb is told first.
        channel: on which it is told that.
        sock: on which the verb asks.
    """

    store: LookedStore
    looking: messages.Looking
    channel: FrameChannel[EngineMessage]
    sock: socket.socket

    def run(self) -> None:
        """Answer until the other side has what it wants, or has gone."""
        operators = Operators(self.store, self.store.stats)
        self.channel.send(self.looking)
        with (
            suppress(EOFError),
            closing(FrameChannel(self.sock, decoder, MAX_CONTROL_FRAME_BYTES)) as answers,
        ):
            caller = Caller(answers)
            while True:
                for call in answers.receive(None):
                    caller.tell(operators.answer(call, caller))
        self.store.close()


def look(launch: messages.Launch, channel: FrameChannel[EngineMessage]) -> Look:
    """Look at a store; nothing of it is changed.

    Raises:
        StoreBusyError, FormatVersionError, CorruptIndexError, StoreFailedError, StorageError
    """
    assert launch.look_fd is not None, "it is no look"
    options = launch.options
    folder = LookedFolder.look(_become_owner(os.path.abspath(options.path)))
    threading.Thread(target=_watch, args=[folder, channel], name="watch", daemon=True).start()
    clock = Clock(options.clock_offset_file)
    store, looking = open_to_look(options, folder, clock, launch.index)
    return Look(store, looking, channel, socket.socket(fileno=launch.look_fd))


def _watch(folder: LookedFolder, channel: FrameChannel[EngineMessage]) -> None:
    """End the process when a writer wants the store, whatever it is doing."""
    while not folder.is_wanted:
        time.sleep(_WISH_POLL_S)
    busy = StoreBusyError(f"a server has started on the store at `{folder.path}`")
    channel.send(Refused.of(busy))
    os._exit(EXIT_FAILED)


def _become_owner(path: str) -> str:
    """Give up the rights of root for those of the user whom a folder belongs to.

    Returns:
        a path by which that user reaches the folder.

    Raises:
        StorageError: the identity cannot be changed.
    """
    try:
        info = os.lstat(path)
    except OSError:
        return path  # what is wrong is said later
    if os.geteuid() != 0 or info.st_uid == 0 or not stat.S_ISDIR(info.st_mode):
        return path
    try:
        os.chdir(path)
        os.setgroups([])
        os.setresgid(info.st_gid, info.st_gid, info.st_gid)
        os.setresuid(info.st_uid, info.st_uid, info.st_uid)
    except OSError as error:
        what = f"`{path}` belongs to uid {info.st_uid}, whose identity this process cannot take"
        raise StorageError(f"{what} ({error.strerror}); run the command as that user") from error
    return path if os.access(path, os.R_OK | os.X_OK) else _HERE
