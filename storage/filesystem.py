"""What the filesystem under a folder can do: each system call that the store makes, tried once.

It knows calls and what the store does without them; it knows no segments, extents or blocks.
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
from tieredkv.storage.compression import aligned_buffer
from tieredkv.types import PAGE_ALIGNMENT_BYTES

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors that say that there is no room, which more room cures."""

NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a call that the filesystem, or this file in it, does not have."""

_UNSUPPORTED = (*NOT_SUPPORTED, errno.EINVAL, errno.ENODEV, errno.ENOTTY)
_TRIAL_NAME, _RENAMED = "trial", ".renamed"
_TRIAL_BYTES = 16 << 20  # the length of the trial's file, hardly any of which is written
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def lack_of_room(folder: str, code: int = errno.ENOSPC) -> str:
    """Say what the filesystem of a folder has run out of, after an error of `NO_SPACE`."""
    if code == errno.EDQUOT:
        return f"the disk quota for `{folder}` is used up"
    if code == errno.EFBIG:
        return f"a file in `{folder}` has reached the largest size that is allowed here"
    found = os.statvfs(folder)
    if found.f_files and not found.f_favail:
        return f"the filesystem of `{folder}` has no inodes left"
    return f"the filesystem of `{folder}` has no space left"


def set_aside(fd: int, offset: int, size: int) -> None:
    """Have the filesystem set space aside for a part of a file, which becomes as long as that."""
    _fallocate(fd, 0, offset, size)


def punch_hole(fd: int, offset: int, size: int) -> None:
    """Give the space of a part of a file back; it reads as zeroes from then on."""
    _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, size)


def _fallocate(fd: int, mode: int, offset: int, size: int) -> None:
    # The C library's `posix_fallocate` is not used: where the filesystem cannot allocate, it writes
    # single bytes, which fails on a file that was opened with O_DIRECT.
    while _libc.fallocate(fd, mode, offset, size):
        if (code := ctypes.get_errno()) != errno.EINTR:
            raise OSError(code, os.strerror(code))


@dataclass(frozen=True, slots=True)
class Call:
    """One system call, and how it went on a file of its own.

    Attributes:
        name: what an operator knows it as.
        purpose: what the store needs it for.
        without: what the store does where the call is not supported; empty if it cannot do without.
        error: why it failed, or None.
    """

    name: str
    purpose: str
    without: str
    error: OSError | None = None

    @property
    def works(self) -> bool:
        """Whether the call can be made; one that only lacked room got far enough to know."""
        return self.error is None or self.error.errno in NO_SPACE

    @property
    def is_refused(self) -> bool:
        """Whether no store can be where this call fails as it did."""
        if self.works or self.error is None:
            return False
        return not self.without or self.error.errno not in _UNSUPPORTED


@dataclass(frozen=True, slots=True)
class Filesystem:
    """What was found out about the filesystem under one folder.

    Attributes:
        path: the folder.
        calls: each call that the store makes.
        growth_bytes: what a file grows by when one page of it is written: more than a page where
            the filesystem hands out space in larger pieces, as tmpfs does with huge pages.
    """

    path: str
    calls: tuple[Call, ...]
    growth_bytes: int

    @classmethod
    def explore(cls, folder: str) -> "Filesystem":
        """Try each call on a file that is made in the folder and removed again.

        Raises:
            StorageError: no file can be made there.
        """
        path = os.path.join(folder, _TRIAL_NAME)
        calls, growth_bytes = [], PAGE_ALIGNMENT_BYTES
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise StorageError(error.errno, f"`{path}`: {error.strerror}") from error
            # Nothing can be tried, since not even an inode is left: expect what is common.
            return cls(folder, tuple(call for call, _ in _CALLS), growth_bytes)
        try:
            with suppress(OSError):  # then the calls say so
                os.ftruncate(fd, _TRIAL_BYTES)
                os.pwrite(fd, bytes(PAGE_ALIGNMENT_BYTES), 0)
                info = os.fstat(fd)
                growth_bytes = max(growth_bytes, info.st_blocks * 512, info.st_blksize)
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

    def can(self, name: str) -> bool:
        """Whether a call works."""
        return next(call.works for call in self.calls if call.name == name)

    def check(self) -> None:
        """Refuse a filesystem on which no store can be.

        Raises:
            StorageError: one sentence that names the call and what it is needed for.
        """
        for call in self.calls:
            if call.error is not None and call.is_refused:
                why = f"the store needs it {call.purpose}; choose another folder"
                what = f"{call.name} fails in `{self.path}` ({os.strerror(call.error.errno or 0)})"
                raise StorageError(call.error.errno, f"{what}, and {why}")

    def spread_bytes(self, num_bytes: int) -> int:
        """The most that files can grow by for so many neighbouring bytes, wherever they begin."""
        step = self.growth_bytes
        if step <= PAGE_ALIGNMENT_BYTES:
            return num_bytes
        return (-(-num_bytes // step) + 1) * step if num_bytes > 0 else 0

    def fitting_bytes(self, room_bytes: int) -> int:
        """How many neighbouring bytes certainly fit into so much room."""
        step = self.growth_bytes
        if step <= PAGE_ALIGNMENT_BYTES:
            return room_bytes
        return max(room_bytes // step - 1, 0) * step


# --- the calls ----------------------------------------------------------------------------------

DIRECT_IO, ALLOCATING, PUNCHING = "O_DIRECT", "fallocate", "hole punching"


def _try_direct_io(_fd: int, path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        page = aligned_buffer(PAGE_ALIGNMENT_BYTES)
        page[:] = written = os.urandom(len(page))
        os.pwritev(fd, [page], PAGE_ALIGNMENT_BYTES)
        page[:] = bytes(len(page))
        if os.preadv(fd, [page], PAGE_ALIGNMENT_BYTES) != len(page) or page != written:
            raise OSError(errno.EINVAL, "what was read is not what was written")
    finally:
        os.close(fd)


def _try_mapping(fd: int, _path: str) -> None:
    # NOTE: the map is not touched: where a page of it has no room, that would end the process.
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
            "what has expired is overwritten with zeroes, and only whole files give space back",
        ),
        lambda fd, _: punch_hole(fd, 0, PAGE_ALIGNMENT_BYTES),
    ),
    (Call("shared mmap", "to read its index", ""), _try_mapping),
    (Call("fdatasync", "to keep blocks over a power loss", ""), lambda fd, _: os.fdatasync(fd)),
    (Call("flock", "to keep other writers out", ""), _try_locking),
    (Call("rename", "to replace its files in one step", ""), _try_renaming),
)
"""Each call that the store makes, and how it is tried on an open file."""
