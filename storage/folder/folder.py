"""The store's folder: its owner, its format, and the process that may write to it.

This module knows the marker file, permissions and the lock; it opens neither index nor segments.
"""

import errno
import fcntl
import logging
import os
import stat
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from tieredkv.errors import NoStoreError, StorageError, StoreBusyError
from tieredkv.storage.folder.lock import is_written, lock_to_write
from tieredkv.storage.folder.marker import MARKER as MARKER
from tieredkv.storage.folder.marker import (
    Marker,
    new_marker,
    read_marker,
    refuse_replaced,
    write_marker,
)
from tieredkv.storage.folder.own_files import DRAFT_SUFFIX, check_own, open_own, remove
from tieredkv.storage.folder.own_files import check_owner as check_owner
from tieredkv.storage.format.record import Retentions

logger = logging.getLogger(__name__)

LOCK = "lock"
SOCKET = "sock"
INDEX = "index"
SEGMENTS = "segments"
SET_ASIDE = "index.bad"
DRAFT, COMPLETE = "index.new", "index.next"
INDEX_FILES = ("data.mdb", "lock.mdb")
_BUSY_POLL_S = 0.1
INDEXES = (INDEX, SET_ASIDE, DRAFT, COMPLETE)
_FOLDERS = (*INDEXES, SEGMENTS)
_WHOLE = struct.Struct("hhqqi4x")  # `struct flock`: kind, whence, start, length, process


class StoreFolder:
    """A store folder that is checked, marked and locked by this process; for one thread.

    Attributes:
        marker: the content of `format.json`.
        retentions: names of retention policies, by their numbers in the records.
    """

    def __init__(self, path: str, lock_fd: int, marker: Marker) -> None:
        self.path = path
        self.marker = marker
        self.retentions = Retentions(marker.retentions)
        self.index_path = os.path.join(path, INDEX)
        self.draft_path = os.path.join(path, DRAFT)
        self._complete_path = os.path.join(path, COMPLETE)
        self.segments_path = os.path.join(path, SEGMENTS)
        self._lock_fd = lock_fd
        self._writer = _read_writer(lock_fd)
        budget = self._writer.get("budget_bytes")
        self.budget_bytes = budget if isinstance(budget, int) else 0
        self._identity = self._look()

    @classmethod
    def claim(
        cls,
        path: str,
        *,
        create: bool,
        is_flushed: bool = True,
        retentions: Iterable[str] = (),
        destroy_replaced: Callable[[str], object] | None = None,
    ) -> "StoreFolder":
        """Check the folder, take its lock and make what is missing in it.

        If the machine stopped while a writer ran without flushing, the index may have lost pages
        and still look sound. Such an index is set aside, and a new one is made.

        Args:
            path: the folder.
            create: whether to make the folder if it does not exist.
            is_flushed: whether this writer flushes what it commits.
            retentions: names of retention policies; the list of the store gets those that are new.
            destroy_replaced: destroys a store of the version before, under its lock, so that a new
                one takes its place; without it, such a store is refused.

        Raises:
            StoreBusyError: another process writes to the store.
            FormatVersionError: another version of tieredkv wrote the store.
            StorageError: the folder belongs to another user, is not safe or does not exist, or the
                store has no number left for the name of a retention policy.
        """
        path = os.path.abspath(path)
        found = check_folder(path, create=create)
        if found is not None and found.is_replaced and destroy_replaced is None:
            raise refuse_replaced(path)
        if not os.path.isdir(path):
            make_folder(path)
        lock_fd = _take_lock(path)
        try:
            found = read_marker(path)
            if found is not None and found.is_replaced:
                if destroy_replaced is None:
                    raise refuse_replaced(path)
                destroy_replaced(path)
                found = None
            folder = cls(path, lock_fd, found or new_marker())
            if folder.lost_unflushed:
                logger.warning(
                    "the machine stopped before `%s` was flushed; its index is set aside", path
                )
                with suppress(FileNotFoundError):
                    folder.set_aside()
            unflushed = {} if is_flushed else {"unflushed_boot": _boot_id()}
            folder._describe({"pid": os.getpid(), "socket": SOCKET, **unflushed})
            known = folder.retentions
            folder.retentions = known.with_new(retentions)
            if found is None or folder.retentions is not known:
                folder.mark(retentions=list(folder.retentions.names))
            folder.drop_draft()
            folder._replace_index()
            _make_index(folder.index_path)
            make_folder(folder.segments_path)
            folder._identity = folder._look()
        except BaseException:
            os.close(lock_fd)
            raise
        return folder

    def mark(self, **changes: Any) -> None:
        """Change fields of `format.json`.

        Raises:
            OSError: it cannot be written.
        """
        marker = msgspec.structs.replace(self.marker, **changes)
        write_marker(self.path, marker)
        self.marker = marker

    def note_budget(self, budget_bytes: int) -> None:
        """Save the budget, which applies when the store is opened without one."""
        if budget_bytes != self.budget_bytes:
            self.budget_bytes = budget_bytes
            self._describe(self._writer)

    def _describe(self, writer: dict[str, Any]) -> None:
        """Write into the lock file which process writes to the store, and the budget."""
        self._writer = writer
        text = msgspec.json.encode({**writer, "budget_bytes": self.budget_bytes})
        with suppress(OSError):  # the old text is overwritten, so a full disk has room for it
            os.pwrite(self._lock_fd, text, 0)
            os.ftruncate(self._lock_fd, len(text))
            os.fsync(self._lock_fd)

    def check_place(self) -> None:
        """Raise an error if the folder is not at its path any more.

        Raises:
            StorageError: the folder was moved, removed, replaced or unmounted.
        """
        if self._look() != self._identity:
            what = f"the store is no longer at `{self.path}`: it was moved, replaced or unmounted"
            raise StorageError(errno.ESTALE, what)

    @property
    def lost_unflushed(self) -> bool:
        """Whether the machine stopped while a writer used the store that does not flush."""
        boot = _boot_id()
        return bool(self._writer.get("unflushed_boot", boot) != boot)

    @property
    def has_segments(self) -> bool:
        """Whether there are segment files, which may hold blocks."""
        return has_segments(self.path)

    def begin_anew(self) -> None:
        """Replace every index by an empty one, for a store without blocks."""
        for name in INDEXES:
            with suppress(FileNotFoundError):
                remove(os.path.join(self.path, name))
        _make_index(self.index_path)
        self._identity = self._look()

    def make_draft(self) -> None:
        """Make an empty folder for a new index that will replace the present one."""
        self.drop_draft()
        _make_index(self.draft_path)

    def drop_draft(self) -> None:
        """Remove the draft of an index, if there is one."""
        with suppress(FileNotFoundError):
            remove(self.draft_path)

    def take_draft(self, *, sets_aside: bool) -> None:
        """Replace the index by the draft; the old index is set aside or removed.

        If this is cut short, the next start goes on with it: the old index may be there in part
        only, and it lists extents that hold what was deleted.
        """
        os.rename(self.draft_path, self._complete_path)
        if sets_aside:
            self.set_aside()
        self._replace_index()
        self._identity = self._look()

    def _replace_index(self) -> None:
        """Have a complete draft, if there is one, take the place of the index."""
        if os.path.isdir(self._complete_path):
            with suppress(FileNotFoundError):
                remove(self.index_path)
            os.rename(self._complete_path, self.index_path)

    def set_aside(self) -> None:
        """Rename the index to keep it for inspection; one set aside earlier is removed."""
        self.drop_set_aside()
        os.rename(self.index_path, os.path.join(self.path, SET_ASIDE))

    def renew_index(self) -> None:
        """Set the index aside and put an empty one in its place."""
        self.set_aside()
        _make_index(self.index_path)
        self._identity = self._look()

    def drop_set_aside(self) -> None:
        """Remove the index that was set aside, if there is one."""
        with suppress(FileNotFoundError):
            remove(os.path.join(self.path, SET_ASIDE))

    def _look(self) -> list[tuple[int, int]]:
        """Identify the folders and the lock file at the path; empty if one of them is missing."""
        with suppress(OSError):
            lock_path = os.path.join(self.path, LOCK)
            infos = map(os.stat, (self.path, self.index_path, self.segments_path, lock_path))
            return [(info.st_dev, info.st_ino) for info in infos]
        return []

    def occupied_bytes(self) -> int:
        """Return how many bytes all files but the segments occupy, as `du` counts them.

        A file that is removed or renamed meanwhile, as an engine's rates are, counts nothing.
        """
        self.check_place()
        total = os.stat(self.path).st_blocks
        folders = [self.path]
        while folders:  # one after the other, however deep they lie in each other
            with suppress(OSError), os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        total += entry.stat(follow_symlinks=False).st_blocks
                        is_other = entry.path != self.segments_path
                        if entry.is_dir(follow_symlinks=False) and is_other:
                            folders.append(entry.path)
        return total * 512

    def release(self) -> None:
        """Release the lock for the next process; may be called again."""
        if self._lock_fd >= 0:
            self._describe({})
            os.close(self._lock_fd)
            self._lock_fd = -1


def hold_for_engine(path: str) -> int:
    """Open the folder, and note for `has_engine` that an engine uses it until this is closed.

    Raises:
        OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        text = "`%s`: an eviction while the store worker is down will not know of this engine: %s"
        logger.warning(text, path, error.strerror)
    return fd


def has_engine(folder_fd: int) -> bool:
    """Return whether an engine uses a folder, also while it has no worker.

    Nothing is locked, even for a moment, so that an engine that starts just now notes its use.
    """
    try:
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder_fd)
    except OSError:
        return False
    try:
        wanted = _WHOLE.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_ = _WHOLE.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, wanted))
    except OSError:
        return False
    finally:
        os.close(fd)
    return bool(kind != fcntl.F_UNLCK)


def trouble_with(path: str) -> str:
    """Return why a store's folder would be refused now; empty if it would not. Nothing changes."""
    try:
        check_folder(path, create=True)
    except (StorageError, OSError) as error:
        return str(error)
    return ""


def has_segments(path: str) -> bool:
    """Return whether a store's folder has segment files, which may hold blocks."""
    with suppress(FileNotFoundError):
        return bool(os.listdir(os.path.join(path, SEGMENTS)))
    return False


def check_folder(path: str, *, create: bool, writes: bool = True) -> Marker | None:
    """Raise an error unless `path` is a safe store folder, or may become one; nothing is changed.

    Args:
        path: the folder.
        create: whether it may be missing, or empty.
        writes: whether it must be writable.

    Returns:
        what `format.json` says; None without it.
    """
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        if not create:
            raise NoStoreError(f"there is no store at `{path}`") from None
        return None
    except OSError as error:
        why = f"cannot be reached: {error.strerror}; choose another folder"
        raise StorageError(f"`{path}` {why}") from error
    if stat.S_ISLNK(info.st_mode):
        raise StorageError(f"`{path}` is a symbolic link; name the folder that it points to")
    if not stat.S_ISDIR(info.st_mode):
        raise StorageError(f"`{path}` is not a folder; choose another path")
    check_owner(path, info)
    if not os.access(path, os.R_OK | os.X_OK):
        raise StorageError(f"`{path}` cannot be read; `chmod u+rx` it or choose another folder")
    if writes and not os.access(path, os.W_OK):
        raise StorageError(f"`{path}` is not writable; mount it writable or choose another folder")
    if (marker := read_marker(path)) is None:
        strangers = set(os.listdir(path)) - {LOCK, MARKER + DRAFT_SUFFIX}
        if not create:
            others = f" and contains other files, such as `{min(strangers)}`" if strangers else ""
            raise NoStoreError(f"`{path}` is not a tieredkv store: it has no {MARKER}{others}")
        if strangers:
            why = f"holds no tieredkv store (`{min(strangers)}` is there); choose an empty folder"
            raise StorageError(f"`{path}` is not empty and {why}")
    for name in _FOLDERS:
        part = os.path.join(path, name)
        with suppress(FileNotFoundError):
            part_info = os.lstat(part)
            if not stat.S_ISDIR(part_info.st_mode):
                raise StorageError(f"`{part}` must be a folder, and no symbolic link; remove it")
            check_owner(part, part_info)
    for name in (LOCK, *(os.path.join(INDEX, name) for name in INDEX_FILES)):
        part = os.path.join(path, name)
        with suppress(FileNotFoundError):
            check_own(part, os.lstat(part))
    return marker


def make_folder(path: str) -> None:
    """Make a folder that only this user can use, and those above it that are missing.

    Raises:
        StorageError: it cannot be made.
    """
    if not os.path.isdir(parent := os.path.dirname(path)):
        make_folder(parent)
    try:
        os.makedirs(path, 0o700, exist_ok=True)
        os.chmod(path, 0o700)
    except OSError as error:
        why = f"cannot be created: {error.strerror}; choose another folder"
        raise StorageError(f"`{path}` {why}") from error


def make_missing(path: str | None) -> None:
    """Make a folder as `make_folder` does unless it is there; None names no folder."""
    if path is not None and not os.path.isdir(path):
        make_folder(os.path.abspath(path))


def _make_index(path: str) -> None:
    make_folder(path)
    for name in INDEX_FILES:
        os.close(open_own(os.path.join(path, name), os.O_RDWR | os.O_CREAT))


def check_unused(path: str, *, patience_s: float) -> None:
    """Refuse a store that another process writes to. Nothing is made or changed.

    This is for those who take much memory before they open the store, which then looks again. What
    else may be wrong with the folder is said when it is opened.

    Args:
        path: the store's folder, which need not exist.
        patience_s: for so long another writer is given time to go.

    Raises:
        StoreBusyError: it is still there.
    """
    path, give_up_at = os.path.abspath(path), time.monotonic() + patience_s
    try:
        fd = open_own(os.path.join(path, LOCK))
    except OSError:
        return
    try:
        while is_written(fd):
            if time.monotonic() >= give_up_at:
                raise in_use(path, fd)
            time.sleep(_BUSY_POLL_S)
    finally:
        os.close(fd)


def in_use(path: str, lock_fd: int) -> StoreBusyError:
    """Return the error that another process has the lock."""
    pid = _read_writer(lock_fd).get("pid")
    who = "another process" if pid is None else f"process {pid}"
    return StoreBusyError(
        f"the store at `{path}` is in use by {who}; stop it or choose another folder"
    )


def _is_looked_at(path: str) -> StoreBusyError:
    """Return the error that processes which only look do not let go of the lock."""
    what = f"a command that looks at the store at `{path}` does not end, though it was asked to"
    return StoreBusyError(f"{what}; stop that command")


def _take_lock(path: str) -> int:
    lock = os.path.join(path, LOCK)
    try:
        fd = open_own(lock, os.O_RDWR | os.O_CREAT)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"`{lock}` cannot be opened: {error.strerror}") from error
    try:
        lock_to_write(fd)
    except BlockingIOError:
        busy = in_use(path, fd) if is_written(fd) else _is_looked_at(path)
        os.close(fd)
        raise busy from None
    except OSError as error:
        os.close(fd)
        raise StorageError(f"`{lock}` cannot be locked: {error.strerror}") from error
    os.chmod(path, 0o700)
    return fd


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _read_writer(fd: int) -> dict[str, Any]:
    try:
        return msgspec.json.decode(os.pread(fd, 4096, 0), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
