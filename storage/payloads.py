"""One block's bytes, to and from its slot; what is read is checked where it arrived."""

import errno

from tieredkv.errors import StorageError
from tieredkv.storage import codec
from tieredkv.storage.codec import HEADER_BYTES, Extent, Located, decode_header, padded_bytes
from tieredkv.storage.extents import SegmentFiles, aligned_buffer
from tieredkv.storage.index import storage_errors
from tieredkv.storage.results import Slot
from tieredkv.types import BlockRecord


def read_block(files: SegmentFiles, located: Located, into: memoryview) -> None:
    """Read a payload and check the bytes in `into`; see `BlockStore.read_payload`."""
    size = located.payload_bytes
    if located.codec != codec.CODEC_RAW or size != located.record.size_bytes:
        raise codec.corrupt(located.record.block_hash, "codec", f"codec {located.codec} is unknown")
    count = _read(files, located, HEADER_BYTES, into, size)
    if count < size:
        raise codec.corrupt(
            located.record.block_hash, "truncated", f"{count} of {size} bytes are there"
        )
    if codec.payload_checksum(into[:size]) != located.payload_checksum:
        raise codec.corrupt(located.record.block_hash, "checksum", "the payload fails its checksum")


def check_header(files: SegmentFiles, located: Located) -> None:
    """Read a slot's header and compare it with the index entry.

    Raises:
        CorruptBlockError, StorageError: as `read_block`, and reason `header`.
    """
    header = aligned_buffer(HEADER_BYTES)
    if _read(files, located, 0, header, HEADER_BYTES) < HEADER_BYTES:
        raise codec.corrupt(located.record.block_hash, "truncated", "its slot is not there")
    if not codec.is_header_of(decode_header(header), located):
        raise codec.corrupt(
            located.record.block_hash, "header", "the slot header is another one's or damaged"
        )


def read_owner(files: SegmentFiles, extent: Extent) -> bytes | None:
    """Name the block that a slot's header says lies there; None where nothing sound stands."""
    header = aligned_buffer(HEADER_BYTES)
    try:
        files.read(extent, 0, header, HEADER_BYTES, HEADER_BYTES)
    except OSError:
        return None
    found = decode_header(header)
    return found.record.block_hash if found and found.extent == extent else None


def write_block(files: SegmentFiles, slot: Slot, record: BlockRecord, payload: memoryview) -> bytes:
    """Write header and payload, answer the checksum; see `BlockStore.write_payload`."""
    size, padded = record.size_bytes, padded_bytes(record.size_bytes)
    checksum = codec.payload_checksum(payload[:size])
    header = files.header_buffer()
    codec.encode_header_into(header, Located(record, slot.extent, size, checksum))
    if len(payload) >= padded and not payload.readonly:
        payload[size:padded] = bytes(padded - size)
    else:
        payload, given = aligned_buffer(padded), payload
        payload[:size] = given[:size]
    with storage_errors(files.directory):
        files.write(slot.extent, header, payload, padded)
    return checksum


def _read(files: SegmentFiles, located: Located, offset: int, into: memoryview, size: int) -> int:
    try:
        return files.read(located.extent, offset, into, size, padded_bytes(size))
    except FileNotFoundError as error:
        raise codec.corrupt(located.record.block_hash, "missing_segment", str(error)) from error
    except OSError as error:
        what = f"`{files.directory}`: {located.extent}: {error.strerror}"
        raise StorageError(error.errno or errno.EIO, what) from error
