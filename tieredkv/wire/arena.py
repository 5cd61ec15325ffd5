"""The host arena: block-sized pages of shared memory that two processes and a GPU can reach.

This module knows sizes, alignment and how much memory the machine has left. It does not know
which page holds which block (`tieredkv.cache.pool` does), nor whether a GPU has registered the
memory.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path

from tieredkv.errors import ConfigError, IntegrityError, StorageError
from tieredkv.types import PAGE_ALIGNMENT_BYTES

PrefaultProgress = Callable[[int, int], None]
"""Called with (bytes ready, bytes in all) while the arena is being allocated."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PREFAULT_STEP_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; the mmap module does not name it yet


class HostArena:
    """One range of shared memory, cut into pages of equal size.

    It is made here and sealed, or adopted from another program, whose file can be truncated.

    Invariants, verified by `check()`:
    - the memory is exactly `num_pages * page_bytes` long, and its own can neither shrink nor grow,
      so that neither process can kill the other one by truncating it;
    - every page starts on a multiple of 4 KiB, as O_DIRECT requires.

    Attributes:
        fd: the file of the memory; negative once `close()` was called.
        is_adopted: whether another program made the memory.

    Any thread may call `page()`; the bytes of a page belong to whoever holds it in the block pool,
    or to the store worker while it is on loan.
    """

    def __init__(
        self, num_pages: int, page_bytes: int, *, progress: PrefaultProgress | None = None
    ) -> None:
        """Allocate the memory for real, so that a page fault can never fail later.

        Raises:
            ConfigError: the sizes make no sense.
            StorageError: the machine does not have that much memory left; nothing was allocated.
        """
        _check_sizes(num_pages, page_bytes)
        size_bytes = num_pages * page_bytes
        _check_memory(size_bytes)
        self.is_adopted = False
        fd = os.memfd_create("tieredkv-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self._map(fd, num_pages, page_bytes)
            self._prefault(size_bytes, progress)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
                raise _too_large(size_bytes, os.strerror(error.errno)) from error
            raise

    @classmethod
    def attach(
        cls, fd: int, num_pages: int, page_bytes: int, is_adopted: bool = False
    ) -> "HostArena":
        """Map an arena that another process made, and take ownership of `fd`.

        With `is_adopted` the memory is another program's, which decides when it goes. If that
        truncates the file, what touches the lost pages gets SIGBUS or EFAULT: that may end the
        store worker, and says nothing about the disk.

        Raises:
            IntegrityError: the file behind `fd` is not a sealed arena of this size.
            StorageError: the adopted memory has another size.
        """
        _check_sizes(num_pages, page_bytes)
        arena = cls.__new__(cls)
        arena.is_adopted = is_adopted
        if is_adopted:
            _check_adopted(fd, num_pages * page_bytes)
        arena._map(fd, num_pages, page_bytes)
        arena.check()
        return arena

    def _map(self, fd: int, num_pages: int, page_bytes: int) -> None:
        self.fd = fd
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.buffer = mmap.mmap(fd, num_pages * page_bytes, mmap.MAP_SHARED)
        self._view = memoryview(self.buffer)

    def _prefault(self, size_bytes: int, progress: PrefaultProgress | None) -> None:
        for start in range(0, size_bytes, _PREFAULT_STEP_BYTES):
            length = min(_PREFAULT_STEP_BYTES, size_bytes - start)
            # NOTE: allocate through the file first. Without enough memory this fails with ENOMEM,
            # while touching the map would kill the process with SIGBUS.
            os.posix_fallocate(self.fd, start, length)
            with contextlib.suppress(OSError, ValueError):  # kernels before 5.14 lack it
                self.buffer.madvise(_MADV_POPULATE_WRITE, start, length)
            if progress is not None:
                progress(start + length, size_bytes)

    @property
    def size_bytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.page_bytes

    def page(self, page_id: int) -> memoryview:
        """Return the writable bytes of one page; they are shared, not copied.

        Raises:
            StorageError: the adopted memory has shrunk.
        """
        if not 0 <= page_id < self.num_pages:
            raise IndexError(f"page {page_id} is outside of the arena's {self.num_pages} pages")
        if self.is_adopted:
            self.check()
        start = page_id * self.page_bytes
        return self._view[start : start + self.page_bytes]

    def check(self) -> None:
        """Verify the invariants in the class docstring."""
        if self.fd < 0:
            return
        if self.is_adopted:
            _check_adopted(self.fd, self.size_bytes)
            return
        size_bytes = os.fstat(self.fd).st_size
        if size_bytes != self.size_bytes:
            what = f"the arena has {size_bytes} bytes"
            raise IntegrityError(f"{what} instead of {self.size_bytes}")
        if fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise IntegrityError("the arena is not sealed against resizing")
        if self.page_bytes % PAGE_ALIGNMENT_BYTES:
            raise IntegrityError(f"pages of {self.page_bytes} bytes are not aligned to 4 KiB")

    def close(self) -> None:
        """Give the memory back; a second call does nothing.

        Views that are still in use stay valid: the memory is freed with the last of them.
        """
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._view.release()
        with contextlib.suppress(BufferError):
            self.buffer.close()


def _check_sizes(num_pages: int, page_bytes: int) -> None:
    if num_pages < 1:
        raise ConfigError(f"`host_size` holds {num_pages} pages; it must hold at least one")
    if page_bytes < 1 or page_bytes % PAGE_ALIGNMENT_BYTES:
        what = f"a page has {page_bytes} bytes"
        raise ConfigError(f"{what}, which must be a multiple of {PAGE_ALIGNMENT_BYTES}")


def _check_adopted(fd: int, size_bytes: int) -> None:
    """Raise StorageError with EFAULT unless the file of another program has this size."""
    if (found := os.fstat(fd).st_size) != size_bytes:
        what = f"the memory of another program has {found} bytes instead of {size_bytes}"
        raise StorageError(errno.EFAULT, what)


def _check_memory(size_bytes: int) -> None:
    limits = [(bytes_, what) for bytes_, what in _memory_limits() if bytes_ < size_bytes]
    if limits:
        bytes_, what = min(limits)
        raise _too_large(size_bytes, f"{what} allows only {_mib(bytes_)}")


def _memory_limits() -> list[tuple[int, str]]:
    """Return the bytes that each limit of this process and machine leaves, and the limit's name."""
    limits = []
    with contextlib.suppress(OSError):
        meminfo = _key_values(Path("/proc/meminfo"))
        limits.append((meminfo["MemAvailable:"] * 1024, "the memory available on this machine"))
    with contextlib.suppress(OSError):
        told = Path("/proc/self/cgroup").read_text()
        what = "the memory limit of the container or service"
        limits += [(left, what) for left in memory_left_by_groups(told, Path("/sys/fs/cgroup"))]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    limits.append((address_space, "the limit of address space (`ulimit -v`)"))
    file_size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    limits.append((file_size, "the limit of file size (`ulimit -f`)"))
    return [each for each in limits if each[0] != resource.RLIM_INFINITY]


def memory_left_by_groups(told: str, root: Path) -> list[int]:
    """Return the bytes that each limited control group of this process leaves, innermost first.

    A container often sees only its own group, which then lies at the root.

    Args:
        told: the text of `/proc/self/cgroup`.
        root: where control groups are mounted.
    """
    left = []
    for line in told.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mount = root / controllers
        group = mount / path.lstrip("/")
        for folder in [each for each in (group, *group.parents) if each.is_relative_to(mount)]:
            with contextlib.suppress(OSError, ValueError):
                name = "memory.limit_in_bytes" if controllers else "memory.max"
                limit = int((folder / name).read_text())  # "max" means no limit
                used = _key_values(folder / "memory.stat")
                kinds = ("total_rss", "total_shmem") if controllers else ("anon", "shmem")
                left.append(limit - sum(used.get(kind, 0) for kind in kinds))
    return left


def _key_values(path: Path) -> dict[str, int]:
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2}


def _too_large(size_bytes: int, why: str) -> StorageError:
    return StorageError(
        f"the host arena needs {_mib(size_bytes)}, but {why}\nhint: set a smaller `host_size`"
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.0f} MiB"
