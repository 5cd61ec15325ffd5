"""The file of a key table: opened, locked, read, overwritten and replaced.

This module knows files and their locks; it does not know what a table holds.
"""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tieredkv.errors import MissingKeyError, StoreBusyError
from tieredkv.storage.folder.filesystem import flush_folder
from tieredkv.storage.index.verdicts import storage_errors
from tieredkv.storage.keys import trust
from tieredkv.wire.limits import described

TABLE_SUFFIX, DRAFT_SUFFIX = ".keys", ".new"
WHAT = "the key table"

_PAGE_BYTES = 4096
_UNREADABLE = b"\xff" * _PAGE_BYTES
# A sweep of another server locks a table for a moment only; a worker keeps it locked.
_MOST_WAIT_S, _POLL_S = 1.0, 0.01


def look_at(path: str) -> bytes:
    """Read a table without its lock; one that was replaced meanwhile is read again.

    Raises:
        MissingKeyError: it is absent, unreadable or not to be believed.
    """
    while True:
        with open(trust.open_file(path, WHAT, follows_link=False), "rb") as file:
            data = read_all(file.fileno(), path)
            if is_at(path, file.fileno()):
                return data


def open_locked(path: str, *, wait_s: float = _MOST_WAIT_S) -> int:
    """Open a table for writing and lock it; the caller closes it, which unlocks it.

    Args:
        path: of the file.
        wait_s: how long to wait for another process to unlock it.

    Raises:
        MissingKeyError: it is absent, unreadable or not to be believed.
        StoreBusyError: another process keeps it locked.
        StorageError: it cannot be locked.
    """

    def open_it() -> int:
        return trust.open_file(path, WHAT, os.O_RDWR, follows_link=False)

    with storage_errors(path):
        return _locked(path, open_it, wait_s)


@contextmanager
def replacing(path: str) -> Iterator[int]:
    """Yield a locked draft of a table, which takes the table's place at once if nothing fails.

    The file stays open and locked then; its name is still to be flushed.

    Raises:
        MissingKeyError: what is in the place of the draft is not to be believed.
        StoreBusyError: another process is making the table.
        OSError: it cannot be made; what was there is there.
    """
    draft = path + DRAFT_SUFFIX

    def make() -> int:
        if os.path.lexists(draft):  # a crash has left it
            erase(draft)
        return os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    fd = _locked(draft, make, 0.0)
    try:
        yield fd
        os.fsync(fd)
        os.rename(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        os.close(fd)
        raise


def erase(path: str) -> None:
    """Overwrite a file of keys that no process holds, and remove it.

    Raises:
        MissingKeyError, StoreBusyError: as `open_locked` does.
        StorageError: it cannot be overwritten or removed.
    """
    with open(open_locked(path), "r+b", buffering=0) as file:
        erase_locked(file.fileno(), path)


def erase_locked(fd: int, path: str) -> None:
    """Overwrite an open file and remove it.

    Raises:
        StorageError: it cannot be overwritten or removed.
    """
    with storage_errors(path):
        overwrite(fd)
        os.unlink(path)
        flush_folder(os.path.dirname(path))


def overwrite(fd: int) -> None:
    """Overwrite all bytes of an open file with zeroes, and flush them."""
    write_all(fd, bytes(os.fstat(fd).st_size), 0)
    os.fsync(fd)


def write_all(fd: int, data: bytes, offset: int) -> None:
    """Write all of `data` at an offset."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def read_all(fd: int, path: str) -> bytes:
    """Read a whole table; a page that the device cannot read counts as damaged.

    What a page lacks at the end of the file reads as zeroes.

    Raises:
        MissingKeyError: it cannot be read for another reason.
    """
    pages = list[bytes]()
    for at in range(0, os.fstat(fd).st_size, _PAGE_BYTES):
        try:
            pages.append(os.pread(fd, _PAGE_BYTES, at).ljust(_PAGE_BYTES, b"\0"))
        except OSError as error:
            if error.errno != errno.EIO:
                text = f"{WHAT} `{path}` cannot be read: {described(error)}"
                raise MissingKeyError(text, reason="unreadable") from error
            pages.append(_UNREADABLE)
    return b"".join(pages)


def is_at(path: str, fd: int) -> bool:
    """Return whether an open file is the one at a path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    return False


def _locked(path: str, open_it: Callable[[], int], wait_s: float) -> int:
    """Open a file and lock it; what was renamed or removed meanwhile is opened again."""
    deadline = time.monotonic() + wait_s
    while True:
        fd = open_it()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(path, fd):
                return fd
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(fd)
                text = f"{WHAT} `{path}` is in use by another process"
                raise StoreBusyError(errno.EWOULDBLOCK, text) from None
            time.sleep(_POLL_S)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
