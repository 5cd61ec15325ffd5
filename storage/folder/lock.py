"""Who uses a store: one process that writes, or any number of processes that only look.

The lock is that of the whole lock file, in which the writer describes itself. A writer that finds
the store being looked at says so by a second lock, on one byte that is not there; whoever looks
asks for it several times a second, and ends at once. An engine, whose worker may be down, locks the
folder itself in another way.
"""

import errno
import fcntl
import logging
import os
import struct
import time
from contextlib import suppress
from typing import Any

import msgspec

from tieredkv.errors import StorageError, StoreBusyError
from tieredkv.own_files import open_own

logger = logging.getLogger(__name__)

LOCK = "lock"

_CHECKED_S = 0.1  # for so long a process may hold the lock that only checks it
_LOOKED_S = 2.0  # for so long a process that looks may take to end
_POLL_S = 0.01
_BUSY_POLL_S = 0.1
_WISH_AT = 1
_FLOCK = struct.Struct("hhqqi4x")  # `struct flock`: kind, whence, start, length, process


def lock_to_write(fd: int) -> None:
    """Take the lock for a writer. Those who look are given time to end, another writer is not.

    Raises:
        BlockingIOError: others hold the lock.
        OSError: there are no locks here.
    """
    began_at = time.monotonic()
    with suppress(OSError):  # another one wishes the same, or there are no such locks here
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _wish(fcntl.F_WRLCK))
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                patience_s = _CHECKED_S if is_written(fd) else _LOOKED_S
                if time.monotonic() - began_at >= patience_s:
                    raise
            time.sleep(_POLL_S)
    finally:
        with suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _wish(fcntl.F_UNLCK))


def lock_to_look(fd: int) -> None:
    """Take the lock for a process that only looks.

    Raises:
        BlockingIOError: a writer has it.
        OSError: there are no locks here.
    """
    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    if is_wanted(fd):
        fcntl.flock(fd, fcntl.LOCK_UN)
        raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))


def is_wanted(fd: int) -> bool:
    """Return whether a writer waits for those who look."""
    with suppress(OSError):
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _wish(fcntl.F_RDLCK))
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)
    return False


def is_written(fd: int) -> bool:
    """Return whether another process has the lock to write; this process then has none."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # this is said when the store is opened
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _wish(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, _WISH_AT, 1, 0)


# --- the lock file ------------------------------------------------------------------------------


def take_lock(path: str) -> int:
    """Open and lock the lock file of a store's folder for a writer.

    Raises:
        StoreBusyError: another process has the lock.
        StorageError: it cannot be opened or locked.
    """
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
    return fd


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


def read_writer(lock_fd: int) -> dict[str, Any]:
    """Return what the last writer has described itself by; empty if that cannot be read."""
    try:
        return msgspec.json.decode(os.pread(lock_fd, 4096, 0), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def in_use(path: str, lock_fd: int) -> StoreBusyError:
    """Return the error that another process has the lock."""
    pid = read_writer(lock_fd).get("pid")
    who = f"process {pid}" if isinstance(pid, int) else "another process"
    return StoreBusyError(
        f"the store at `{path}` is in use by {who}; stop it or choose another folder"
    )


def _is_looked_at(path: str) -> StoreBusyError:
    """Return the error that processes which only look do not let go of the lock."""
    what = f"a command that looks at the store at `{path}` does not end, though it was asked to"
    return StoreBusyError(f"{what}; stop that command")


# --- the engine ---------------------------------------------------------------------------------


def hold_for_engine(path: str) -> int:
    """Open the folder, and note for `has_engine` that an engine uses it until this is closed.

    Raises:
        OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _whole(fcntl.F_RDLCK))
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
        kind, *_ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _whole(fcntl.F_WRLCK)))
    except OSError:
        return False
    finally:
        os.close(fd)
    return bool(kind != fcntl.F_UNLCK)


def _whole(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)
