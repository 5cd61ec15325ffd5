"""Segment files: preallocated extents that are written, read and erased with O_DIRECT.

This module knows file descriptors, alignment and what files occupy. It does not know what lies in
an extent. Any thread may read and write extents; all other methods are for the thread that owns the
store.
"""

import errno
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from tieredkv.errors import StorageError
from tieredkv.own_files import open_own
from tieredkv.storage.folder.filesystem import (
    DIRECT_IO,
    NOT_SUPPORTED,
    PUNCHING,
    Filesystem,
    punch_hole,
    set_aside,
)
from tieredkv.storage.format.planes import aligned_buffer
from tieredkv.storage.format.record import Extent
from tieredkv.storage.index.verdicts import storage_errors
from tieredkv.types import PAGE_ALIGNMENT_BYTES
from tieredkv.units import printable

logger = logging.getLogger(__name__)

_ZEROES_BYTES = 1 << 20  # how many zeroes are written at once
_SEGMENT_NAME = re.compile(r"([0-9]{1,20})-([0-9]{1,20})\.seg")
_MOST_NUMBER = (1 << 32) - 1  # the next segment has to have a number, too
_MOST_OFFSET = (1 << 63) - 1  # that the system takes


def _segment_name(segment: int, extent_bytes: int) -> str:
    return f"{segment:08d}-{extent_bytes}.seg"


@dataclass(slots=True)
class _File:
    """One open segment file; it closes when the last reference to it, of any thread, is gone."""

    path: str
    fd: int
    extent_bytes: int
    occupied_bytes: int = 0

    def __del__(self) -> None:
        os.close(self.fd)


class SegmentFiles:
    """The files under `segments/`.

    Invariants:
      - a descriptor is closed only when no thread uses it;
      - a file is truncated before it is removed, so that its bytes are gone at once;
      - names are those in the folder that was opened first, whatever takes its place;
      - `occupied_bytes` is the sum of `st_blocks`, in bytes.

    Args:
        folder: where they lie.
        filesystem: what it can do.
        writes: whether they are opened for writing.
    """

    def __init__(self, folder: str, filesystem: Filesystem, *, writes: bool = True) -> None:
        self.folder = folder
        self._writes = writes
        self.filesystem = filesystem
        self.direct_io = filesystem.can(DIRECT_IO)
        self.punch_hole = filesystem.can(PUNCHING)
        self.bytes_written = self.bytes_read = self.bytes_erased = 0  # changed under the lock
        self._erase_errors: set[int | None] = set()  # error codes already logged
        self._files: dict[int, _File] = {}
        self._lock = threading.Lock()

    @cached_property
    def _folder_fd(self) -> int:
        return os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    # --- life of a file ---------------------------------------------------------------------

    def found(self) -> dict[int, int]:
        """List the files in the folder: segment -> extent bytes.

        Raises:
            StorageError: the folder holds a file that is no segment.
        """
        found = {}
        for name in os.listdir(self._folder_fd):
            match = _SEGMENT_NAME.fullmatch(name)
            segment, extent_bytes = map(int, match.groups()) if match else (0, 0)
            # There is one way to write a name, and the numbers are u32 in the records.
            is_so = name == _segment_name(segment, extent_bytes) and extent_bytes > 0
            is_so &= max(segment, extent_bytes) < _MOST_NUMBER
            if not is_so or extent_bytes % PAGE_ALIGNMENT_BYTES:
                what = f"`{self.folder}/{printable(name)}` is not a segment file"
                raise StorageError(f"{what}; move it away")
            found[segment] = extent_bytes
        return found

    def open(self, segment: int, extent_bytes: int, *, create: bool = False) -> None:
        """Open or create a segment file; a missing one raises FileNotFoundError.

        The file's name holds the segment number and the extent size.
        """
        name = _segment_name(segment, extent_bytes)
        flags = os.O_RDWR if self._writes else os.O_RDONLY
        flags |= (os.O_DIRECT if self.direct_io else 0) | (os.O_CREAT if create else 0)
        fd = open_own(name, flags, dir_fd=self._folder_fd)
        file = _File(os.path.join(self.folder, name), fd, extent_bytes)
        if self._writes:
            os.fchmod(fd, 0o600)
        self._files[segment] = file
        self.refresh(segment)

    def size_bytes(self, segment: int) -> int:
        """Return the length of a segment file."""
        return os.fstat(self._files[segment].fd).st_size

    def num_extents(self, segment: int) -> int:
        """Return how many extents begin in a segment file; 0 if it is missing."""
        if segment not in self._files:
            return 0
        return -(-self.size_bytes(segment) // self.extent_bytes(segment))

    def extent_bytes(self, segment: int) -> int:
        """Return the size of a segment's extents; 0 if its file is missing."""
        return self._files[segment].extent_bytes if segment in self._files else 0

    def remove(self, segment: int) -> None:
        """Erase and unlink a whole segment file."""
        file = self._files.pop(segment, None)
        if file is not None:
            os.ftruncate(file.fd, 0)
            with suppress(FileNotFoundError):  # somebody was faster
                os.unlink(os.path.basename(file.path), dir_fd=self._folder_fd)

    def remove_all(self) -> None:
        """Erase and unlink every segment file; they stay gone after a power loss."""
        for segment, extent_bytes in self.found().items():
            if segment not in self._files:
                self.open(segment, extent_bytes)
            self.remove(segment)
        os.fsync(self._folder_fd)

    def close(self) -> None:
        """Close every file; no thread may be reading or writing."""
        self._files.clear()
        if (fd := self.__dict__.pop("_folder_fd", None)) is not None:
            os.close(fd)

    def __contains__(self, segment: int) -> bool:
        return segment in self._files

    # --- space ------------------------------------------------------------------------------

    def refresh(self, segment: int) -> None:
        """Measure again what a file occupies; an unlinked file counts as missing from then on."""
        if (file := self._files.get(segment)) is not None:
            info = os.fstat(file.fd)
            file.occupied_bytes = info.st_blocks * 512
            if not info.st_nlink:
                del self._files[segment]

    def check_there(self, segment: int) -> None:
        """Raise StorageError if a segment file was removed."""
        self.refresh(segment)
        self._file(segment)

    @property
    def occupied_bytes(self) -> int:
        """Bytes that all segment files occupy, as of the last `refresh` of each."""
        return sum(file.occupied_bytes for file in self._files.values())

    def free_bytes(self) -> float:
        """Return how many bytes the filesystem has left; infinite if it does not say."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize if found.f_blocks else math.inf

    def all_bytes(self) -> int:
        """Return how many bytes the filesystem has in all; 0 if it does not say."""
        found = os.statvfs(self.folder)
        return found.f_blocks * found.f_frsize

    def written(self, segment: int) -> Iterator[int]:
        """Walk over the extents of a segment but those in holes, which take no time."""
        file, at, size = self._files[segment], 0, self.size_bytes(segment)
        while at < size:
            try:
                start = os.lseek(file.fd, at, os.SEEK_DATA)
                end = os.lseek(file.fd, start, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:  # the rest is a hole
                    return
                start, end = at, size  # this filesystem does not tell
            numbers = range(start // file.extent_bytes, -(-end // file.extent_bytes))
            yield from numbers
            at = numbers.stop * file.extent_bytes

    def allocate(self, segment: int, first_extent: int, num_extents: int) -> None:
        """Set the space of these extents aside on disk; the bytes in them may be lost.

        If the filesystem cannot set space aside, zeroes are written, which takes the same space.

        Raises:
            StoreFullError: the filesystem has no room.
            StorageError: the system call failed.
        """
        file = self._files[segment]
        size_before = os.fstat(file.fd).st_size
        offset, length = first_extent * file.extent_bytes, num_extents * file.extent_bytes
        try:
            self._set_aside(file, offset, length)
        except OSError:
            if offset >= size_before:
                os.ftruncate(file.fd, size_before)
            raise
        finally:
            self.refresh(segment)

    def truncate(self, segment: int, num_extents: int) -> None:
        """Give back the preallocated tail of a file."""
        file = self._files[segment]
        with storage_errors(file.path):
            os.ftruncate(file.fd, num_extents * file.extent_bytes)
        self.refresh(segment)

    def erase(self, first: Extent, num_extents: int = 1) -> bool:
        """Make neighbouring extents read as zeroes, by one hole or else by writing zeroes.

        Returns False if that failed; each cause is logged once.
        """
        if (file := self._files.get(first.segment)) is None:
            return True
        offset, size = first.number * file.extent_bytes, num_extents * file.extent_bytes
        try:
            size = min(size, os.fstat(file.fd).st_size - offset)
            if size > 0:
                self._erase(file, offset, size)
        except OSError as error:
            if error.errno not in self._erase_errors:
                self._erase_errors.add(error.errno)
                text = "extents such as %s cannot be erased now, which is tried again later: %s"
                logger.warning(text, first, error)
            return False
        self.bytes_erased += max(size, 0)
        self.refresh(first.segment)
        return True

    def _erase(self, file: _File, offset: int, size: int) -> None:
        if self.punch_hole:
            try:
                return punch_hole(file.fd, offset, size)
            except OSError as error:
                if error.errno not in NOT_SUPPORTED:
                    raise
                self.punch_hole = False
        return self._write_zeroes(file, offset, size)

    def sync(self, segment: int) -> None:
        """Flush the data of a file to the device; any thread may call this.

        Raises:
            StorageError: the file is missing, or cannot be flushed.
        """
        file = self._file(segment)
        with storage_errors(file.path):
            os.fdatasync(file.fd)

    # --- bytes, from any thread -------------------------------------------------------------

    def read(self, extent: Extent, buffers: list[memoryview]) -> int:
        """Fill aligned buffers from the start of an extent; return how many bytes were read.

        What was not filled stays in `buffers`. A forged index may name an extent that no file has.
        """
        file = self._file(extent.segment)
        if (offset := extent.number * file.extent_bytes) > _MOST_OFFSET:
            return 0
        with storage_errors(file.path):
            count = _move(os.preadv, file.fd, buffers, offset)
        with self._lock:
            self.bytes_read += count
        return count

    def write(self, extent: Extent, buffers: list[memoryview], at: int) -> int:
        """Write every byte at an offset in an extent, and return how many; empties `buffers`."""
        file = self._file(extent.segment)
        return self._write(file, buffers, extent.number * file.extent_bytes + at)

    def _write(self, file: _File, buffers: list[memoryview], offset: int) -> int:
        """Write every byte or raise, and return how many; `buffers` is then empty.

        After a short write, the next write shows the cause.
        """
        with storage_errors(file.path):
            count = _move(os.pwritev, file.fd, buffers, offset)
        with self._lock:
            self.bytes_written += count
        if buffers:
            raise StorageError(errno.EIO, f"`{file.path}`: not all bytes could be written")
        return count

    def _set_aside(self, file: _File, offset: int, size: int) -> None:
        try:
            with storage_errors(file.path):
                set_aside(file.fd, offset, size)
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise
            # Without hole punching, every part of a file still has its space.
            end = os.fstat(file.fd).st_size
            start = offset if self.punch_hole else max(offset, end)
            self._write_zeroes(file, start, offset + size - start)

    def _write_zeroes(self, file: _File, offset: int, size: int) -> None:
        zeroes = aligned_buffer(min(size, _ZEROES_BYTES)) if size > 0 else memoryview(b"")
        for start in range(offset, offset + size, _ZEROES_BYTES):
            self._write(file, [zeroes[: offset + size - start]], start)

    def _file(self, segment: int) -> _File:
        if (file := self._files.get(segment)) is None:
            raise StorageError(errno.ENOENT, f"segment {segment} of `{self.folder}` is missing")
        return file


def _move(move: Callable[..., int], fd: int, buffers: list[memoryview], offset: int) -> int:
    """Read or write until the buffers are done or a short transfer ends the aligned part.

    Returns how many bytes were moved. Parts that were not moved stay in `buffers`.
    """
    done = 0
    while buffers:
        count = move(fd, buffers, offset + done)
        done += count
        if count == 0 or count % PAGE_ALIGNMENT_BYTES:
            break
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]
    return done
