"""The store's folder: what lies in it, who may use it, and which index is the present one.

The folder has the marker file, the lock file, segments, and up to four folders of an index: the
present one, a draft, a complete draft that has not taken its place yet, and one that was set aside
for people. This module opens neither index nor segments.
"""

import errno
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tieredkv.errors import NoStoreError, StorageError
from tieredkv.own_files import (
    DRAFT_SUFFIX,
    check_own,
    check_owner,
    erase_all,
    flush_folder,
    open_own,
    opened_folder,
    remove,
)
from tieredkv.storage.folder.lock import LOCK, read_writer, take_lock
from tieredkv.storage.folder.marker import (
    MARKER,
    Marker,
    new_marker,
    read_marker,
    refuse_replaced,
    write_marker,
)
from tieredkv.storage.format.record import Retentions
from tieredkv.storage.index.pages import count_entries
from tieredkv.units import printable

logger = logging.getLogger(__name__)

SOCKET = "sock"
INDEX = "index"
SEGMENTS = "segments"
SET_ASIDE = "index.bad"
DRAFT, COMPLETE = "index.new", "index.next"
INDEX_FILES = ("data.mdb", "lock.mdb")
_INDEXES = (INDEX, SET_ASIDE, DRAFT, COMPLETE)
_MOST_BUDGET_BYTES = 1 << 62  # of what the lock file says
_SEGMENT = re.compile(r"[0-9]+-[0-9]+\.seg")


class Emptied(NamedTuple):
    """What was removed.

    Attributes:
        num_blocks: as far as the index could tell.
        num_bytes: that segments and indexes occupied.
    """

    num_blocks: int
    num_bytes: int


class StoreFolder:
    """A store folder that is checked, marked and locked by this process; for one thread.

    Attributes:
        marker: the content of `format.json`.
        retentions: names of retention policies, by their numbers in the records.
        budget_bytes: the last budget, which applies when the store is opened without one; 0 if it
            is not known.
    """

    def __init__(self, path: str, lock_fd: int, marker: Marker) -> None:
        self.path = path
        self.marker = marker
        self.retentions = Retentions(marker.retentions)
        self.index_path = os.path.join(path, INDEX)
        self.draft_path = os.path.join(path, DRAFT)
        self.segments_path = os.path.join(path, SEGMENTS)
        self._lock_fd = lock_fd
        self._writer = read_writer(lock_fd)
        budget = self._writer.get("budget_bytes")
        self.budget_bytes = 0
        if isinstance(budget, int) and 0 < budget <= _MOST_BUDGET_BYTES:
            self.budget_bytes = budget
        self._identity = self._look()

    @classmethod
    def claim(
        cls,
        path: str,
        *,
        create: bool,
        is_flushed: bool = True,
        retentions: Iterable[str] = (),
        destroy_replaced: Callable[["StoreFolder"], object] | None = None,
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
        lock_fd = take_lock(path)
        try:
            with opened_folder(path) as fd:
                os.fchmod(fd, 0o700)
            found = read_marker(path)
            folder = cls(path, lock_fd, found or new_marker())
            if folder.marker.is_replaced:
                if destroy_replaced is None:
                    raise refuse_replaced(path)
                destroy_replaced(folder)
                folder.marker, found = new_marker(), None
            if folder.lost_unflushed:
                logger.warning(
                    "the machine stopped before `%s` was flushed; its index is set aside", path
                )
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

    def release(self) -> None:
        """Release the lock for the next process; may be called again."""
        if self._lock_fd >= 0:
            self._describe({})
            os.close(self._lock_fd)
            self._lock_fd = -1

    # --- what is noted ------------------------------------------------------------------------

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

    @property
    def lost_unflushed(self) -> bool:
        """Whether the machine stopped while a writer used the store that does not flush."""
        boot = _boot_id()
        return bool(self._writer.get("unflushed_boot", boot) != boot)

    # --- what lies in it ----------------------------------------------------------------------

    def check_place(self) -> None:
        """Raise an error if the folder is not at its path any more.

        Raises:
            StorageError: the folder was moved, removed, replaced or unmounted.
        """
        if self._look() != self._identity:
            what = f"the store is no longer at `{self.path}`: it was moved, replaced or unmounted"
            raise StorageError(errno.ESTALE, what)

    def _look(self) -> list[tuple[int, int]]:
        """Identify the folders, the index and the lock at the path; empty if one is missing."""
        with suppress(OSError):
            os.stat(os.path.join(self.path, MARKER))  # it may be another file, but is always there
            files = os.path.join(self.index_path, INDEX_FILES[0]), os.path.join(self.path, LOCK)
            infos = map(os.stat, (self.path, self.index_path, self.segments_path, *files))
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

    def empty(self) -> Emptied:
        """Remove the segments, then every index, and make an empty one.

        This works whatever version, damage or lack of keys the store has, and follows nothing. The
        keys were destroyed before. Other files in the folder stay.

        Raises:
            OSError: a file cannot be removed; the next call goes on.
        """
        num_blocks = num_bytes = 0
        with suppress(StorageError, OSError):
            num_blocks = count_entries(self.index_path, "blocks")
        with suppress(FileNotFoundError):
            num_bytes += erase_all(self.segments_path, _SEGMENT)
        for path in (os.path.join(self.path, name) for name in _INDEXES):
            with suppress(FileNotFoundError):
                files = [each.stat(follow_symlinks=False) for each in os.scandir(path)]
                num_bytes += 512 * sum(each.st_blocks for each in files)
                remove(path)
        flush_folder(self.path)
        _make_index(self.index_path)
        self._identity = self._look()
        return Emptied(num_blocks, num_bytes)

    # --- its indexes --------------------------------------------------------------------------

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
        os.rename(self.draft_path, os.path.join(self.path, COMPLETE))
        if sets_aside:
            self.set_aside()
        self._replace_index()
        self._identity = self._look()

    def _replace_index(self) -> None:
        """Have a complete draft, if there is one, take the place of the index."""
        if os.path.isdir(complete := os.path.join(self.path, COMPLETE)):
            with suppress(FileNotFoundError):
                remove(self.index_path)
            os.rename(complete, self.index_path)

    def set_aside(self) -> None:
        """Rename the index to keep it for inspection, and make an empty one in its place.

        One that was set aside earlier is removed.
        """
        self.drop_set_aside()
        with suppress(FileNotFoundError):
            os.rename(self.index_path, os.path.join(self.path, SET_ASIDE))
        _make_index(self.index_path)
        self._identity = self._look()

    def drop_set_aside(self) -> None:
        """Remove the index that was set aside, if there is one."""
        with suppress(FileNotFoundError):
            remove(os.path.join(self.path, SET_ASIDE))


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
        names = set(os.listdir(path)) - {LOCK, MARKER + DRAFT_SUFFIX}
        strangers = set(map(printable, names))
        if not create:
            others = f" and contains other files, such as `{min(strangers)}`" if strangers else ""
            raise NoStoreError(f"`{path}` is not a tieredkv store: it has no {MARKER}{others}")
        if strangers:
            why = f"holds no tieredkv store (`{min(strangers)}` is there); choose an empty folder"
            raise StorageError(f"`{path}` is not empty and {why}")
    for name in (*_INDEXES, SEGMENTS):
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
        with opened_folder(path) as fd:
            os.fchmod(fd, 0o700)
    except OSError as error:
        why = f"cannot be created: {error.strerror}; choose another folder"
        raise StorageError(f"`{path}` {why}") from error


def make_missing(path: str | None) -> None:
    """Make a folder as `make_folder` does unless it is there; None names no folder."""
    if path is not None and not os.path.isdir(path):
        make_folder(os.path.abspath(path))


def _make_index(path: str) -> None:
    make_folder(path)
    with opened_folder(path) as fd:
        for name in INDEX_FILES:
            os.close(open_own(name, os.O_RDWR | os.O_CREAT, dir_fd=fd))


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
