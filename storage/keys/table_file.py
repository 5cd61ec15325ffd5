"""The file of a key table: opened, locked, read and overwritten.

This module knows files and their locks; it does not know what a table holds.
"""

import errno
import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress

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


def make_locked(draft: str) -> int:
    """Make and lock an empty file; what a crash has left in its place is removed first.

    Raises:
        MissingKeyError: what is in its place is not to be believed.
        StoreBusyError: another process is making it.
        OSError: it cannot be made.
    """

    def make() -> int:
        return os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def make_anew() -> int:
        try:
            return make()
        except FileExistsError:
            erase(draft)
            return make()

    return _locked(draft, make_anew, 0.0)


def erase(path: str) -> None:
    """Overwrite a table that no process holds, or a draft of one, and remove the file.

    Raises:
        MissingKeyError: it is absent, unreadable or not to be believed.
        StoreBusyError: a process holds it.
        StorageError: it cannot be overwritten or removed.
    """
    fd = open_locked(path)
    try:
        erase_locked(fd, path)
    finally:
        os.close(fd)


def erase_locked(fd: int, path: str) -> None:
    """Overwrite an open file and remove it.

    Raises:
        StorageError: it cannot be overwritten or removed.
    """
    with storage_errors(path):
        write_all(fd, bytes(os.fstat(fd).st_size), 0)
        os.fsync(fd)
        os.unlink(path)
        flush_folder(os.path.dirname(path))


def read_all(fd: int, path: str) -> bytes:
    """Read a whole table; a page that the device cannot read counts as damaged.

    Raises:
        MissingKeyError: it cannot be read for another reason.
    """
    size = os.fstat(fd).st_size
    try:
        with suppress(OSError):
            return _read_part(fd, size, 0)
        parts = list[bytes]()
        for at in range(0, size, _PAGE_BYTES):
            try:
                parts.append(_read_part(fd, min(_PAGE_BYTES, size - at), at))
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                parts.append(_UNREADABLE)
        return b"".join(parts)
    except OSError as error:
        text = f"{WHAT} `{path}` cannot be read: {described(error)}"
        raise MissingKeyError(text, reason="unreadable") from error


def write_all(fd: int, data: bytes, offset: int) -> None:
    """Write all of `data` at an offset."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _read_part(fd: int, size: int, offset: int) -> bytes:
    parts = list[bytes]()
    while size and (part := os.pread(fd, size, offset)):
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return b"".join(parts)


def _locked(path: str, open_it: Callable[[], int], wait_s: float) -> int:
    """Open a file and lock it; what another process has removed meanwhile is opened again."""
    deadline = time.monotonic() + wait_s
    while True:
        fd = open_it()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
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
