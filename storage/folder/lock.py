"""The lock of a store: one process that writes, or any number of processes that only look.

The lock is that of the whole lock file. A writer that finds the store being looked at says so by
a second lock, on one byte that is not there; whoever looks asks for it several times a second, and
ends at once. This module knows an open lock file; it does not know what is in it.
"""

import errno
import fcntl
import os
import struct
import time
from contextlib import suppress

_CHECKED_S = 0.1  # for so long a process may hold the lock that only checks it
_LOOKED_S = 2.0  # for so long a process that looks may take to end
_POLL_S = 0.01
_WISH_AT = 1
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: kind, whence, start, length, process


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
