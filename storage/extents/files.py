"""Segment files: preallocated extents that are written, read and erased with O_DIRECT.

This module knows file descriptors, alignment, what files occupy and what a block's bytes must be.
It does not know which block an extent belongs to. Any thread may read and write blocks; all other
methods are for the thread that owns the store.
"""

import errno
import math
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from tieredkv.errors import StorageError
from tieredkv.storage.folder.filesystem import (
    DIRECT_IO,
    NOT_SUPPORTED,
    PUNCHING,
    Filesystem,
    flush_folder,
    punch_hole,
    set_aside,
)
from tieredkv.storage.folder.own_files import open_own
from tieredkv.storage.format.header import (
    Encryption,
    decode_encryption,
    decode_header,
    encode_header_into,
    is_header_of,
)
from tieredkv.storage.format.planes import WIDTHS, Packed, Rate, aligned_buffer, scratch, unpack
from tieredkv.storage.format.record import (
    CODEC_RAW,
    HEADER_BYTES,
    NO_RETENTIONS,
    PACKED_HEADER_BYTES,
    Extent,
    Located,
    Retentions,
    clear_codec,
    corrupt,
    encrypted,
    extent_bytes_for,
    header_bytes_for,
    identity_of,
    is_encrypted,
    padded_bytes,
    payload_checksum,
    scope_of,
)
from tieredkv.storage.index.verdicts import storage_errors
from tieredkv.storage.keys.cipher import Sealed, decrypt, encrypt
from tieredkv.storage.keys.use import LivingKeys
from tieredkv.types import PAGE_ALIGNMENT_BYTES, BlockRecord

_ZEROES_BYTES = 1 << 20  # how many zeroes are written at once
_SEGMENT_NAME = re.compile(r"([0-9]{1,20})-([0-9]{1,20})\.seg")
_MOST_NUMBER = (1 << 32) - 1  # the next segment has to have a number, too
PIECE_BYTES = 512 << 10  # of a block, so that a write can be given up while it goes on


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
      - `occupied_bytes` is the sum of `st_blocks`, in bytes.

    Args:
        folder: where they lie.
        filesystem: what it can do.
        keys: see below.
        writes: whether they are opened for writing.

    Attributes:
        keys: new payloads are encrypted under these; None if the store is not encrypted, or its
            keys are not there.
    """

    def __init__(
        self,
        folder: str,
        filesystem: Filesystem,
        keys: LivingKeys | None = None,
        retentions: Retentions = NO_RETENTIONS,
        *,
        writes: bool = True,
    ) -> None:
        self.folder = folder
        self._writes = writes
        self.filesystem = filesystem
        self.keys = keys
        self._retentions = retentions
        self.direct_io = filesystem.can(DIRECT_IO)
        self.punch_hole = filesystem.can(PUNCHING)
        self.bytes_written = self.bytes_read = self.bytes_erased = 0  # changed under the lock
        self.unpacking = Rate()
        self._files: dict[int, _File] = {}
        self._lock = threading.Lock()

    # --- life of a file ---------------------------------------------------------------------

    def names(self) -> dict[int, tuple[str, int]]:
        """List the files in the folder: segment -> (file name, extent bytes).

        Raises:
            StorageError: the folder holds a file that is no segment.
        """
        found = {}
        for name in os.listdir(self.folder):
            match = _SEGMENT_NAME.fullmatch(name)
            segment, extent_bytes = map(int, match.groups()) if match else (0, 0)
            # There is one way to write a name, and the numbers are u32 in the records.
            is_so = name == _segment_name(segment, extent_bytes) and extent_bytes > 0
            is_so &= max(segment, extent_bytes) < _MOST_NUMBER
            if not is_so or extent_bytes % PAGE_ALIGNMENT_BYTES:
                raise StorageError(f"`{self.folder}/{name}` is not a segment file; move it away")
            found[segment] = (name, extent_bytes)
        return found

    def open(self, segment: int, extent_bytes: int, *, create: bool = False) -> None:
        """Open or create a segment file; a missing one raises FileNotFoundError.

        The file's name holds the segment number and the extent size.
        """
        path = os.path.join(self.folder, _segment_name(segment, extent_bytes))
        flags = os.O_RDWR if self._writes else os.O_RDONLY
        flags |= (os.O_DIRECT if self.direct_io else 0) | (os.O_CREAT if create else 0)
        fd = open_own(path, flags)
        file = _File(path, fd, extent_bytes)
        if self._writes:
            os.fchmod(fd, 0o600)
        self._files[segment] = file
        self.refresh(segment)

    def size_bytes(self, segment: int) -> int:
        """Return the length of a segment file."""
        return os.fstat(self._files[segment].fd).st_size

    def extent_bytes(self, segment: int) -> int:
        """Return the size of a segment's extents; 0 if its file is missing."""
        return self._files[segment].extent_bytes if segment in self._files else 0

    def remove(self, segment: int) -> None:
        """Erase and unlink a whole segment file."""
        file = self._files.pop(segment, None)
        if file is not None:
            os.ftruncate(file.fd, 0)
            with suppress(FileNotFoundError):  # somebody was faster
                os.unlink(file.path)

    def remove_all(self) -> None:
        """Erase and unlink every segment file; they stay gone after a power loss."""
        for segment, (_, extent_bytes) in self.names().items():
            if segment not in self._files:
                self.open(segment, extent_bytes)
            self.remove(segment)
        flush_folder(self.folder)

    def close(self) -> None:
        """Close every file; no thread may be reading or writing."""
        self._files.clear()

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

    def erase(self, first: Extent, num_extents: int) -> None:
        """Make neighbouring extents read as zeroes, by one hole or else by writing zeroes."""
        file = self._files.get(first.segment)
        if file is None:
            return
        offset, size = first.number * file.extent_bytes, num_extents * file.extent_bytes
        size = min(size, os.fstat(file.fd).st_size - offset)
        if size <= 0:
            return
        if self.punch_hole:
            try:
                punch_hole(file.fd, offset, size)
            except OSError as error:
                if error.errno not in NOT_SUPPORTED:
                    raise
                self.punch_hole = False
        if not self.punch_hole:
            self._write_zeroes(file, offset, size)
        with self._lock:
            self.bytes_erased += num_extents * file.extent_bytes
        self.refresh(first.segment)

    def sync(self, segments: set[int]) -> None:
        """Flush the data of these files to the device."""
        for segment in segments:
            if (file := self._files.get(segment)) is not None:
                with storage_errors(file.path):
                    os.fdatasync(file.fd)

    # --- bytes, from any thread -------------------------------------------------------------

    def write_block(
        self,
        extent: Extent,
        record: BlockRecord,
        payload: memoryview,
        packed: Packed | None,
        before_piece: Callable[[int], None],
    ) -> Located:
        """Write a block's header and payload into an extent; return its entry for the index.

        The payload is written from its page without a copy; bytes of the page behind the block are
        set to zero first. If `packed` is given, it is written instead, with zeroes to the end of
        the extent, where older bytes may lie. If there are keys, either is encrypted into memory of
        this thread and written from there. Before each piece of the block, `before_piece` is called
        with the number of bytes that are written; what it raises ends the write.
        """
        if self.keys is not None:
            clear = payload[: record.size_bytes] if packed is None else packed.payload
            number = CODEC_RAW if packed is None else packed.codec
            written, image = self._encrypt(self.keys, extent, record, clear, number)
            # Cut as a block that is not encrypted: the last piece is no single page.
            start = HEADER_BYTES if packed is None else 0
            buffers = [each for each in (image[:start], image[start:]) if each]
        elif packed is None:
            size, padded = record.size_bytes, padded_bytes(record.size_bytes)
            written = Located(record, extent, size, payload_checksum(payload[:size]))
            payload[size:padded] = bytes(padded - size)
            buffers = [scratch(HEADER_BYTES), payload[:padded]]
            encode_header_into(buffers[0], written, self._retentions)
        else:
            checksum = payload_checksum(packed.payload)
            written = Located(record, extent, len(packed.payload), checksum, packed.codec)
            buffers = [packed.image]
            encode_header_into(packed.image, written, self._retentions)
        file = self._file(extent.segment)
        offset, whole, num_written = extent.number * file.extent_bytes, buffers.pop(), 0
        for start in range(0, len(whole), PIECE_BYTES):
            before_piece(num_written)
            buffers.append(whole[start : start + PIECE_BYTES])
            num_written += self._write(file, buffers, offset + num_written)
        return written

    def _encrypt(
        self,
        keys: LivingKeys,
        extent: Extent,
        record: BlockRecord,
        payload: memoryview,
        number: int,
    ) -> tuple[Located, memoryview]:
        """Return a block's entry for the index, and the whole image of its extent.

        NOTE: in one go, since threads that encrypt 512 KiB at a time wait for the interpreter lock
        so often that stores took 1.21 times as long as without encryption, instead of 1.14.
        """
        key = keys.of_scope(scope_of(record))
        if key is None:
            raise corrupt(record.block_hash, "key", "its payload key has died meanwhile")
        number, size = encrypted(number), len(payload)
        image = scratch(extent_bytes_for(size, number, record.size_bytes))
        start = header_bytes_for(number)
        end = start + size
        how = encrypt(key, identity_of(record, number, size), payload, image[start:end])
        image[end:] = bytes(len(image) - end)
        checksum = payload_checksum(image[start:end])
        written = Located(record, extent, size, checksum, number)
        encode_header_into(image, written, self._retentions, Encryption(key.id, *how))
        return written, image

    def read_block(self, located: Located, into: memoryview) -> None:
        """Read a block from its extent into `into` and check it; see `BlockStore.read_payload`.

        The index and the extent's header both hold the block's identity, parent, sizes and
        checksum. They must agree before the bytes may be used. An encrypted payload is checked by
        its tag. Its checksum tells damage, and is not computed while there is none.
        """
        block_hash, size = located.record.block_hash, located.payload_bytes
        block, number = into[: located.record.size_bytes], clear_codec(located.codec)
        if number == CODEC_RAW and size == len(block):
            header, payload = scratch(HEADER_BYTES), block
            buffers = [header, into[: padded_bytes(size)]]
        elif number in WIDTHS and size < len(block):
            header = scratch(padded_bytes(PACKED_HEADER_BYTES + size))
            payload = header[PACKED_HEADER_BYTES:][:size]
            buffers = [header]
        else:
            raise corrupt(block_hash, "codec", f"codec {located.codec} is unknown")
        if located.extent.segment not in self._files:
            what = f"the segment file of {located.extent} is missing"
            raise corrupt(block_hash, "missing_segment", what)
        count = self._read(located.extent, [*buffers]) - header_bytes_for(located.codec)
        if count < size:
            what = f"only {max(count, 0)} of its {size} bytes are in the file"
            raise corrupt(block_hash, "truncated", what)
        if not is_header_of(decode_header(header), located):
            what = "the extent header is damaged or belongs to another block"
            raise corrupt(block_hash, "header", what)
        if self.keys is not None and not is_encrypted(located.codec):
            raise corrupt(block_hash, "key", "its payload is clear in an encrypted store")
        if not is_encrypted(located.codec):
            _compare_checksum(located, payload)
        elif not self._decrypt(located, decode_encryption(header), payload):
            self._read(located.extent, buffers)  # once more, since decrypting changed the bytes
            _compare_checksum(located, payload)
            raise corrupt(block_hash, "tag", "the payload is not the one that was encrypted")
        if number != CODEC_RAW:
            with self.unpacking.timing(len(block)):
                is_block = unpack(payload, number, block)
            if not is_block:
                raise corrupt(block_hash, "codec", "the payload cannot be decompressed")

    def _decrypt(self, located: Located, how: Encryption, payload: memoryview) -> bool:
        """Decrypt a payload in place; return False if it is not the one that was encrypted."""
        record, block_hash = located.record, located.record.block_hash
        if self.keys is None:
            raise StorageError(f"`{self.folder}`: the keys of its blocks are not there")
        key = self.keys.of_id(how.key_id)
        if key is None or key.scope != scope_of(record):
            raise corrupt(block_hash, "key", "the key of its payload is gone")
        known = identity_of(record, located.codec, len(payload))
        return decrypt(key, known, Sealed(how.nonce, how.tag), payload)

    def header_at(self, extent: Extent) -> Located | None:
        """Return what an extent's header says of its block; None if there is no sound header.

        In an encrypted store the header of a payload whose key is gone does not count, nor does one
        of a clear payload.
        """
        found, key_id = self.stored_at(extent)
        place = (extent, self.extent_bytes(extent.segment))
        if found is None or (found.extent, found.extent_bytes) != place:
            return None
        if self.keys is not None and (not key_id or self.keys.of_id(key_id) is None):
            return None
        return found

    def stored_at(self, extent: Extent) -> tuple[Located | None, bytes]:
        """Return what lies in an extent, and the id of its key; empty if it is not encrypted."""
        header = scratch(HEADER_BYTES)
        self._read(extent, [header])
        found = decode_header(header, self._retentions)
        has_key = found is not None and is_encrypted(found.codec)
        return found, decode_encryption(header).key_id if has_key else b""

    def _read(self, extent: Extent, buffers: list[memoryview]) -> int:
        """Fill aligned buffers from the start of an extent; return how many bytes were read."""
        file = self._file(extent.segment)
        with storage_errors(file.path):
            count = _move(os.preadv, file.fd, buffers, extent.number * file.extent_bytes)
        with self._lock:
            self.bytes_read += count
        return count

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


def _compare_checksum(located: Located, payload: memoryview) -> None:
    if payload_checksum(payload) != located.payload_checksum:
        raise corrupt(located.record.block_hash, "checksum", "the payload fails its checksum")


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
