"""What the filesystem under a folder can do: each system call that the store makes is tried once.

This module knows system calls and what the store does without them. It knows no segments, extents
or blocks.
"""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from tieredkv.errors import StorageError
from tieredkv.own_files import flush_folder as flush_folder
from tieredkv.own_files import open_own, remove
from tieredkv.storage.format.planes import aligned_buffer
from tieredkv.types import PAGE_ALIGNMENT_BYTES

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error codes of a lack of room: the same call works once there is more room."""

NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS)
"""Error codes of a call that the filesystem, or this file in it, does not support."""

_UNSUPPORTED = (*NOT_SUPPORTED, errno.EINVAL, errno.ENODEV, errno.ENOTTY)
_TRIAL_NAME, _RENAMED = "trial", ".renamed"
_TRIAL_BYTES = 16 << 20  # the length of the trial file; only a few pages of it are written
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def lack_of_room(folder: str, code: int = errno.ENOSPC) -> str:
    """Return a sentence on what a folder's filesystem has run out of, after a `NO_SPACE` error."""
    if code == errno.EDQUOT:
        return f"the disk quota for `{folder}` is used up"
    if code == errno.EFBIG:
        return f"a file in `{folder}` has reached the largest size that is allowed here"
    found = os.statvfs(folder)
    if found.f_files and not found.f_favail:
        return f"the filesystem of `{folder}` has no inodes left"
    return f"the filesystem of `{folder}` has no space left"


def set_aside(fd: int, offset: int, size: int) -> None:
    """Set space aside for a part of a file; the file grows if it ends before that part does."""
    _fallocate(fd, 0, offset, size)


def punch_hole(fd: int, offset: int, size: int) -> None:
    """Give the space of a part of a file back; that part reads as zeroes from then on."""
    _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, size)


def _fallocate(fd: int, mode: int, offset: int, size: int) -> None:
    # The C library's `posix_fallocate` is not used: if the filesystem cannot allocate, that call
    # writes single bytes, which fails on a file that was opened with O_DIRECT.
    while _libc.fallocate(fd, mode, offset, size):
        if (code := ctypes.get_errno()) != errno.EINTR:
            raise OSError(code, os.strerror(code))


@dataclass(frozen=True, slots=True)
class Call:
    """One system call, and the result of trying it on a trial file.

    Attributes:
        name: the name by which an operator knows the call.
        purpose: what the store needs the call for.
        without: what the store does if the call is not supported; empty if it needs the call.
        error: the error if the call failed, or None.
    """

    name: str
    purpose: str
    without: str
    error: OSError | None = None

    @property
    def works(self) -> bool:
        """Whether the call is supported; a call that failed only for lack of room is."""
        return self.error is None or self.error.errno in NO_SPACE

    @property
    def is_refused(self) -> bool:
        """Whether the call failed in such a way that the folder cannot hold a store."""
        if self.works or self.error is None:
            return False
        return not self.without or self.error.errno not in _UNSUPPORTED


@dataclass(frozen=True, slots=True)
class Filesystem:
    """The abilities of the filesystem under one folder.

    Attributes:
        path: the folder.
        calls: each call that the store makes, with its result.
        growth_bytes: bytes that a file grows by when one page of it is written. This is more than a
            page if the filesystem hands out space in larger pieces, as tmpfs does with huge pages.
    """

    path: str
    calls: tuple[Call, ...]
    growth_bytes: int

    @classmethod
    def explore(cls, folder: str) -> "Filesystem":
        """Try each call on a file that is made in the folder and removed again.

        Raises:
            StorageError: no file can be made in the folder.
        """
        path, calls = os.path.join(folder, _TRIAL_NAME), []
        try:
            for left in (path, path + _RENAMED):
                with suppress(FileNotFoundError):
                    remove(left)  # that a crash has left, or that somebody has put there
            fd = open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise StorageError(error.errno, f"`{path}`: {error.strerror}") from error
            # Nothing can be tried, because not even an inode is left. Assume that all calls work.
            return cls(folder, tuple(call for call, _ in _CALLS), PAGE_ALIGNMENT_BYTES)
        try:
            with suppress(OSError):  # if this fails, the calls below fail too and say why
                os.ftruncate(fd, _TRIAL_BYTES)
                os.pwrite(fd, bytes(PAGE_ALIGNMENT_BYTES), 0)
            growth_bytes = _growth_of(os.fstat(fd))
            for call, attempt in _CALLS:
                try:
                    attempt(fd, path)
                    calls.append(call)
                except OSError as error:
                    calls.append(replace(call, error=error))
        finally:
            os.close(fd)
            for left in (path, path + _RENAMED):
                with suppress(FileNotFoundError):
                    os.unlink(left)
        return cls(folder, tuple(calls), growth_bytes)

    @classmethod
    def look(cls, path: str) -> "Filesystem":
        """Tell what can be told by reading a small file; other calls count as supported."""
        calls = {call.name: call for call, _ in _CALLS}
        try:
            with open(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_NOFOLLOW), "rb", 0) as file:
                file.readinto(aligned_buffer(PAGE_ALIGNMENT_BYTES))
        except OSError as error:
            calls[DIRECT_IO] = replace(calls[DIRECT_IO], error=error)
        return cls(os.path.dirname(path), tuple(calls.values()), _growth_of(os.stat(path)))

    def can(self, name: str) -> bool:
        """Return whether a call works."""
        return next(call.works for call in self.calls if call.name == name)

    def check(self) -> None:
        """Raise an error if the filesystem cannot hold a store.

        Raises:
            StorageError: one sentence that names the call and what it is needed for.
        """
        for call in self.calls:
            if call.error is not None and call.is_refused:
                why = f"the store needs it {call.purpose}; choose another folder"
                what = f"{call.name} fails in `{self.path}` ({os.strerror(call.error.errno or 0)})"
                raise StorageError(call.error.errno, f"{what}, and {why}")

    def spread_bytes(self, num_bytes: int) -> int:
        """Return the most that a file can grow by when `num_bytes` in a row are written."""
        step = self.growth_bytes
        if step <= PAGE_ALIGNMENT_BYTES:
            return num_bytes
        return (-(-num_bytes // step) + 1) * step if num_bytes > 0 else 0

    def fitting_bytes(self, room_bytes: int) -> int:
        """Return how many bytes in a row certainly fit into `room_bytes`, wherever they begin."""
        step = self.growth_bytes
        if step <= PAGE_ALIGNMENT_BYTES:
            return room_bytes
        return max(room_bytes // step - 1, 0) * step


def _growth_of(info: os.stat_result) -> int:
    """Return by how much a file of one written page has grown, or would grow."""
    return max(PAGE_ALIGNMENT_BYTES, info.st_blocks * 512, info.st_blksize)


# --- the calls ----------------------------------------------------------------------------------

DIRECT_IO, ALLOCATING, PUNCHING = "O_DIRECT", "fallocate", "hole punching"


def _try_direct_io(_fd: int, path: str) -> None:
    page = aligned_buffer(PAGE_ALIGNMENT_BYTES)
    page[:] = written = os.urandom(len(page))
    fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.pwritev(fd, [page], PAGE_ALIGNMENT_BYTES)
        page[:] = bytes(len(page))
        if os.preadv(fd, [page], PAGE_ALIGNMENT_BYTES) != len(page) or page != written:
            raise OSError(errno.EINVAL, "the bytes read are not those that were written")
    finally:
        os.close(fd)


def _try_mapping(fd: int, _path: str) -> None:
    # NOTE: the map is not touched: if the disk has no room for its page, that ends the process.
    mmap.mmap(fd, PAGE_ALIGNMENT_BYTES).close()


def _try_locking(fd: int, _path: str) -> None:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _try_renaming(_fd: int, path: str) -> None:
    os.rename(path, path + _RENAMED)
    os.rename(path + _RENAMED, path)


_CALLS: tuple[tuple[Call, Callable[[int, str], object]], ...] = (
    (
        Call(
            DIRECT_IO,
            "to read and write blocks",
            "blocks go through the page cache, which costs memory and time",
        ),
        _try_direct_io,
    ),
    (
        Call(
            ALLOCATING,
            "to set space aside",
            "new space is filled with zeroes first, so it is written twice",
        ),
        lambda fd, _: set_aside(fd, 0, PAGE_ALIGNMENT_BYTES),
    ),
    (
        Call(
            PUNCHING,
            "to erase what has expired",
            "what has expired is overwritten with zeroes, and only ends of files give space back",
        ),
        lambda fd, _: punch_hole(fd, 0, PAGE_ALIGNMENT_BYTES),
    ),
    (Call("shared mmap", "to read its index", ""), _try_mapping),
    (Call("fdatasync", "to keep blocks over a power loss", ""), lambda fd, _: os.fdatasync(fd)),
    (Call("flock", "to keep other writers out", ""), _try_locking),
    (Call("rename", "to replace its files in one step", ""), _try_renaming),
)
"""Each call that the store makes, and the function that tries it on an open file."""
