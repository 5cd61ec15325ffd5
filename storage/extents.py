"""Segment files: preallocated slots that are written, read and erased with O_DIRECT.

It knows file descriptors, alignment, hole punching, what files occupy and what a block's bytes must
be; it does not know which slot is whose. What reads and writes bytes may be called from any thread,
everything else is the owner's.
"""

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tieredkv.errors import StorageError
from tieredkv.storage import codec
from tieredkv.storage.codec import HEADER_BYTES, Extent, Located, corrupt, padded_bytes
from tieredkv.storage.compression import WIDTHS, Packed, scratch, unpack
from tieredkv.storage.index import storage_errors
from tieredkv.types import PAGE_ALIGNMENT_BYTES, BlockRecord

_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def aligned_buffer(size_bytes: int) -> memoryview:
    """Allocate anonymous memory that O_DIRECT accepts."""
    return memoryview(mmap.mmap(-1, size_bytes))


@dataclass(slots=True)
class _File:
    """One open segment file; it closes when nobody, no thread in it either, refers to it."""

    path: str
    fd: int
    slot_bytes: int
    occupied_bytes: int = 0

    def __del__(self) -> None:
        os.close(self.fd)


class SegmentFiles:
    """The files under `segments/`.

    Invariants: a descriptor is closed only when no thread is in it; a removed file is truncated
    first, so that its bytes are gone at once; `occupied_bytes` is the sum of `st_blocks`.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.direct_io = _can(_write_directly, directory, os.O_DIRECT)
        self.punch_hole = _can(_punch_first_page, directory)
        self.bytes_written = self.bytes_read = self.bytes_erased = 0  # changed under the lock
        self._files: dict[int, _File] = {}
        self._lock = threading.Lock()

    # --- life of a file ---------------------------------------------------------------------

    def names(self) -> dict[int, tuple[str, int]]:
        """List what lies in the directory: segment -> (file name, slot bytes).

        Raises:
            StorageError: a file that is no segment.
        """
        found = {}
        for name in os.listdir(self.directory):
            stem, _, suffix = name.rpartition(".")
            number, _, slot_bytes = stem.partition("-")
            if suffix != "seg" or not (number.isdecimal() and slot_bytes.isdecimal()):
                raise StorageError(f"`{self.directory}/{name}` is no segment file; move it away")
            found[int(number)] = (name, int(slot_bytes))
        return found

    def open(self, segment: int, slot_bytes: int, *, create: bool = False) -> None:
        """Open or create a segment file; a missing one raises FileNotFoundError.

        Number and slot size are in its name for whoever looks.
        """
        path = os.path.join(self.directory, f"{segment:08d}-{slot_bytes}.seg")
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= os.O_DIRECT if self.direct_io else 0
        flags |= os.O_CREAT if create else 0
        fd = os.open(path, flags, 0o600)
        os.fchmod(fd, 0o600)
        self._files[segment] = _File(path, fd, slot_bytes)
        self.refresh(segment)

    def size_bytes(self, segment: int) -> int:
        """Length of a file."""
        return os.fstat(self._files[segment].fd).st_size

    def remove(self, segment: int) -> None:
        """Erase and unlink a whole segment file."""
        file = self._files.pop(segment, None)
        if file is not None:
            os.ftruncate(file.fd, 0)
            os.unlink(file.path)

    def remove_unknown(self, known: set[int]) -> None:
        """Unlink segment files that the index does not know."""
        for segment in self._files.keys() - known:
            self.remove(segment)
        for segment, (name, _) in self.names().items():
            if segment not in known:
                os.unlink(os.path.join(self.directory, name))

    def close(self) -> None:
        """Close every file; no thread may be reading or writing."""
        self._files.clear()

    def __contains__(self, segment: int) -> bool:
        return segment in self._files

    # --- space ------------------------------------------------------------------------------

    def refresh(self, segment: int) -> None:
        """Read again what a file occupies."""
        if (file := self._files.get(segment)) is not None:
            file.occupied_bytes = os.fstat(file.fd).st_blocks * 512

    @property
    def occupied_bytes(self) -> int:
        """What all segment files occupy, as of the last refresh of each."""
        return sum(file.occupied_bytes for file in self._files.values())

    def allocate(self, segment: int, first_slot: int, num_slots: int) -> None:
        """Make the filesystem set the space of these slots aside; OSError where it has none."""
        file = self._files[segment]
        size_before = os.fstat(file.fd).st_size
        offset, length = first_slot * file.slot_bytes, num_slots * file.slot_bytes
        try:
            os.posix_fallocate(file.fd, offset, length)
        except OSError:
            if offset >= size_before:
                os.ftruncate(file.fd, size_before)
            raise
        finally:
            self.refresh(segment)

    def truncate(self, segment: int, num_slots: int) -> None:
        """Give back the preallocated tail of a file."""
        file = self._files[segment]
        os.ftruncate(file.fd, num_slots * file.slot_bytes)
        self.refresh(segment)

    def erase(self, extent: Extent) -> None:
        """Make a slot read as zeroes: a hole where the filesystem can, written zeroes elsewhere."""
        file = self._files.get(extent.segment)
        if file is None:
            return
        offset = extent.slot * file.slot_bytes
        size = min(file.slot_bytes, os.fstat(file.fd).st_size - offset)
        if size <= 0:
            return
        if self.punch_hole:
            _punch(file.fd, offset, size)
        else:
            zeroes = aligned_buffer(file.slot_bytes)
            _pwrite_all(file.fd, [zeroes], offset)
        self.bytes_erased += file.slot_bytes
        self.refresh(extent.segment)

    def sync(self, segments: set[int]) -> None:
        """Flush the data of these files to the device."""
        for segment in segments:
            if (file := self._files.get(segment)) is not None:
                os.fdatasync(file.fd)

    # --- bytes, from any thread -------------------------------------------------------------

    def write_block(
        self, extent: Extent, record: BlockRecord, payload: memoryview, packed: Packed | None = None
    ) -> Located:
        """Write header and payload into a slot and answer what the index has to know.

        An aligned page is written in place; what it holds beyond the block becomes zeroes. What is
        packed is written in place of it, with zeroes to the end of its slot: older bytes lie there.
        """
        if packed is None:
            size, padded = record.size_bytes, padded_bytes(record.size_bytes)
            written = Located(record, extent, size, codec.payload_checksum(payload[:size]))
            header = aligned_buffer(HEADER_BYTES)
            body = self._direct_view(payload, padded)
            if body is None:
                body = aligned_buffer(padded)
                body[:size] = payload[:size]
            body[size:] = bytes(padded - size)
            buffers = [header, body]
        else:
            checksum = codec.payload_checksum(packed.payload)
            written = Located(record, extent, len(packed.payload), checksum, packed.codec)
            buffers = [packed.slot]
        codec.encode_header_into(buffers[0], written)
        with storage_errors(self.directory):
            file = self._file(extent.segment)
            _pwrite_all(file.fd, buffers, extent.slot * file.slot_bytes)
        with self._lock:
            self.bytes_written += sum(map(len, buffers))
        return written

    def read_block(self, located: Located, into: memoryview) -> None:
        """Read a payload, check it and leave the block in `into`; see `BlockStore.read_payload`."""
        block_hash, size = located.record.block_hash, located.payload_bytes
        block = into[: located.record.size_bytes]
        if located.codec == codec.CODEC_RAW and size == len(block):
            payload, count = block, self._read_of(located, HEADER_BYTES, into, size)
        elif located.codec in WIDTHS and size < len(block):
            slot = scratch(padded_bytes(codec.PACKED_HEADER_BYTES + size))
            payload = slot[codec.PACKED_HEADER_BYTES :][:size]
            count = self._read_of(located, 0, slot, len(slot)) - codec.PACKED_HEADER_BYTES
        else:
            raise corrupt(block_hash, "codec", f"codec {located.codec} is unknown")
        if count < size:
            raise corrupt(block_hash, "truncated", f"{count} of {size} bytes are there")
        if codec.payload_checksum(payload) != located.payload_checksum:
            raise corrupt(block_hash, "checksum", "the payload fails its checksum")
        if payload is not block and not unpack(payload, located.codec, block):
            raise corrupt(block_hash, "codec", "the payload is none of such a block")

    def check_header(self, located: Located) -> None:
        """Read a slot's header and compare it with the index entry.

        Raises:
            CorruptBlockError, StorageError: as `read_block`, and reason `header`.
        """
        header, block_hash = aligned_buffer(HEADER_BYTES), located.record.block_hash
        if self._read_of(located, 0, header, HEADER_BYTES) < HEADER_BYTES:
            raise corrupt(block_hash, "truncated", "its slot is not there")
        if not codec.is_header_of(codec.decode_header(header), located):
            raise corrupt(block_hash, "header", "the slot header is another one's or damaged")

    def header_at(self, extent: Extent) -> Located | None:
        """Say what a slot's header claims to lie there; None where nothing sound stands."""
        header = aligned_buffer(HEADER_BYTES)
        self._read(extent, 0, header, HEADER_BYTES)
        found = codec.decode_header(header)
        return found if found and found.extent == extent else None

    def _read_of(self, located: Located, offset: int, into: memoryview, size: int) -> int:
        try:
            return self._read(located.extent, offset, into, size)
        except FileNotFoundError as error:
            raise corrupt(located.record.block_hash, "missing_segment", str(error)) from error
        except OSError as error:
            what = f"`{self.directory}`: {located.extent}: {error.strerror}"
            raise StorageError(error.errno or errno.EIO, what) from error

    def _read(self, extent: Extent, offset: int, into: memoryview, size: int) -> int:
        """Read `size` bytes from `offset` within a slot; answer how many there were."""
        padded = padded_bytes(size)
        body = self._direct_view(into, padded)
        bounce = aligned_buffer(padded) if body is None else body
        file = self._file(extent.segment)
        start = extent.slot * file.slot_bytes + offset
        count = 0
        while count < padded:
            step = os.preadv(file.fd, [bounce[count:]], start + count)
            count += step
            if step == 0 or step % PAGE_ALIGNMENT_BYTES:
                break
        with self._lock:
            self.bytes_read += count
        count = min(size, count)
        if body is None:
            into[:count] = bounce[:count]
        return count

    def _direct_view(self, buffer: memoryview, padded: int) -> memoryview | None:
        """The padded length of a buffer if O_DIRECT can use it in place, else None."""
        if len(buffer) < padded or buffer.readonly:
            return None
        if self.direct_io and np.frombuffer(buffer, np.uint8).ctypes.data % PAGE_ALIGNMENT_BYTES:
            return None
        return buffer[:padded]

    def _file(self, segment: int) -> _File:
        if (file := self._files.get(segment)) is None:
            raise FileNotFoundError(errno.ENOENT, f"segment {segment} is missing")
        return file


def _pwrite_all(fd: int, buffers: list[memoryview], offset: int) -> None:
    """Write every byte or raise; a short write shows its cause when it is continued."""
    while buffers:
        count = os.pwritev(fd, buffers, offset)
        if count == 0 or count % PAGE_ALIGNMENT_BYTES:
            raise OSError(errno.EIO, "short write")
        offset += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers[0])
            buffers = buffers[1:]
        if count:
            buffers = [buffers[0][count:], *buffers[1:]]


def _punch(fd: int, offset: int, size: int) -> None:
    if _libc.fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, size):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _can(attempt: Callable[[int], object], directory: str, flags: int = 0) -> bool:
    """Try something on an unnamed file in the directory; a full disk does not mean no."""
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        try:
            attempt(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EISDIR):
            return False
        if error.errno != errno.ENOSPC:
            raise
    return True


def _write_directly(fd: int) -> None:
    os.pwrite(fd, aligned_buffer(PAGE_ALIGNMENT_BYTES), 0)


def _punch_first_page(fd: int) -> None:
    os.ftruncate(fd, PAGE_ALIGNMENT_BYTES)
    _punch(fd, 0, PAGE_ALIGNMENT_BYTES)
