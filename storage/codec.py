"""The bytes of the store: index records, slot headers and index keys, each with its version.

It knows layouts and checksums (docs/format.md draws them); it opens no file and decides nothing.
"""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace
from xxhash import xxh3_64_digest, xxh3_128_digest

from tieredkv.errors import CorruptBlockError, StorageError
from tieredkv.types import PAGE_ALIGNMENT_BYTES, BlockRecord

FORMAT_VERSION = 1
CODEC_RAW = 0
HEADER_BYTES = PAGE_ALIGNMENT_BYTES
PACKED_HEADER_BYTES = 512  # of a compressed payload, which follows in the same page
SLOT_MAGIC = b"TKVSLOT\0"
MAX_DIGEST_BYTES = 32
CHECKSUM_BYTES = 16

# version, codec, lengths of parent, root, namespace, retention; position, size, payload, segment,
# slot, hits; computed_at, expires_at, protect_until, last_used; payload checksum; the four strings.
_RECORD = struct.Struct("<6B2x6I4d16s32s32s32s32s")
RECORD_BYTES = _RECORD.size + 8
_SEAL_BYTES = 8
_SEALED = struct.Struct("<B39xd160x8s")  # version, expires_at and seal of a record

# magic, version; lengths of hash, parent, root, namespace, retention, codec; position, size,
# payload, segment, slot; four times; payload checksum; the five strings.
_HEADER = struct.Struct("<8sI6B2x5I4d16s32s32s32s32s32s")
_HEADER_CODEC_AT = 17

_EXPIRY = struct.Struct(">Q")
_LRU = struct.Struct(">32sQI")
_EXTENT = struct.Struct(">II")
_MAX_U32 = 0xFFFF_FFFF
_CLAIM = ("retention", "expires_at", "last_used", "protect_until", "hits")


class Extent(NamedTuple):
    """Where the bytes of one block lie: a slot of a segment file."""

    segment: int
    slot: int


class Located(NamedTuple):
    """One index entry: the block, its extent and what its payload must be."""

    record: BlockRecord
    extent: Extent
    payload_bytes: int
    payload_checksum: bytes
    codec: int = CODEC_RAW

    @property
    def slot_bytes(self) -> int:
        """The slot size class that holds this payload."""
        return slot_bytes_for(self.payload_bytes, self.codec, self.record.size_bytes)


def padded_bytes(size_bytes: int) -> int:
    """Round up to the alignment of O_DIRECT."""
    return -(-size_bytes // PAGE_ALIGNMENT_BYTES) * PAGE_ALIGNMENT_BYTES


def header_bytes_for(codec: int) -> int:
    """Where the payload begins in its slot."""
    return HEADER_BYTES if codec == CODEC_RAW else PACKED_HEADER_BYTES


def slot_bytes_for(payload_bytes: int, codec: int = CODEC_RAW, block_bytes: int = 0) -> int:
    """Bytes of a slot: the header, then the payload, padded.

    Slots of compressed payloads come in sixteenths of the block, so that they can be reused.
    """
    step = PAGE_ALIGNMENT_BYTES if codec == CODEC_RAW else padded_bytes(-(-block_bytes // 16))
    return -(-(header_bytes_for(codec) + payload_bytes) // step) * step


def payload_checksum(payload: memoryview | bytes) -> bytes:
    """Digest the payload as it is stored: xxh3_128, big-endian."""
    return xxh3_128_digest(payload)


def check_record(record: BlockRecord) -> None:
    """Refuse a record that the format cannot hold.

    Raises:
        StorageError: a digest or name is too long, a size or time out of range.
    """
    digests = (record.block_hash, record.parent_hash, record.root, record.namespace)
    if not all(0 < len(digest) <= MAX_DIGEST_BYTES for digest in digests):
        raise StorageError(f"digests must have 1 to {MAX_DIGEST_BYTES} bytes, got {digests}")
    if len(record.retention.encode()) > 32:
        raise StorageError(f"retention name `{record.retention}` is longer than 32 bytes")
    times = (record.computed_at, record.expires_at, record.protect_until, record.last_used)
    if not all(math.isfinite(time) for time in times):
        raise StorageError(f"times must be finite, got {times}")
    if not 0 < record.size_bytes <= _MAX_U32 - 2 * PAGE_ALIGNMENT_BYTES:
        raise StorageError(f"a block of {record.size_bytes} bytes cannot be stored")
    if not 0 <= record.position <= _MAX_U32:
        raise StorageError(f"position {record.position} is out of range")


def encode_record(located: Located) -> bytes:
    """Pack an index record; its seal covers the key as well."""
    block = located.record
    names = _names(block)
    body = _RECORD.pack(
        FORMAT_VERSION,
        located.codec,
        *map(len, names),
        *_numbers(located),
        min(block.hits, _MAX_U32),
        *_times(block),
        located.payload_checksum,
        *names,
    )
    return body + xxh3_64_digest(block.block_hash + body)


def expiry_of(block_hash: bytes, data: bytes) -> float | None:
    """Read only the deadline of a sealed record, all that a lookup needs of it.

    None for a record of another version, or one that does not fit its seal or its key.
    """
    if len(data) != RECORD_BYTES:
        return None
    version, expires_at, seal = _SEALED.unpack(data)
    is_sound = xxh3_64_digest(block_hash + data[:-_SEAL_BYTES]) == seal
    return expires_at if is_sound and version == FORMAT_VERSION else None


def decode_record(block_hash: bytes, data: bytes) -> Located:
    """Unpack an index record.

    Raises:
        CorruptBlockError: reason `record`: its version, seal or key is not what it must be.
    """
    if expiry_of(block_hash, data) is None:
        raise corrupt(block_hash, "record", "the index record fails its checksum")
    _, codec, *fields = _RECORD.unpack_from(data)
    lengths, numbers, hits, times = fields[:4], fields[4:9], fields[9], fields[10:14]
    names = [name[:length] for name, length in zip(fields[15:], lengths, strict=True)]
    return _located([block_hash, *names], numbers, times, fields[14], codec, hits)


def encode_header_into(buffer: bytearray | memoryview, located: Located) -> None:
    """Write the slot header: enough to make the index record again without the index."""
    block = located.record
    names = (block.block_hash, *_names(block))
    end = header_bytes_for(located.codec)
    buffer[:end] = bytes(end)
    _HEADER.pack_into(
        buffer,
        0,
        SLOT_MAGIC,
        FORMAT_VERSION,
        *map(len, names),
        located.codec,
        *_numbers(located),
        *_times(block),
        located.payload_checksum,
        *names,
    )
    buffer[end - CHECKSUM_BYTES : end] = xxh3_128_digest(buffer[: end - CHECKSUM_BYTES])


def decode_header(header: bytes | memoryview) -> Located | None:
    """Unpack a slot header; None where no sound header stands (never written, erased, damaged)."""
    sealed = bytes(header[:HEADER_BYTES])
    if len(sealed) != HEADER_BYTES or not sealed.startswith(SLOT_MAGIC):
        return None
    sealed = sealed[: header_bytes_for(sealed[_HEADER_CODEC_AT])]
    if xxh3_128_digest(sealed[:-CHECKSUM_BYTES]) != sealed[-CHECKSUM_BYTES:]:
        return None
    _, version, *fields = _HEADER.unpack_from(sealed)
    if version != FORMAT_VERSION:
        return None
    lengths, codec, numbers, times = fields[:5], fields[5], fields[6:11], fields[11:15]
    names = [name[:length] for name, length in zip(fields[16:], lengths, strict=True)]
    return _located(names, numbers, times, fields[15], codec)


def _names(block: BlockRecord) -> tuple[bytes, bytes, bytes, bytes]:
    return block.parent_hash, block.root, block.namespace, block.retention.encode()


def _numbers(located: Located) -> tuple[int, ...]:
    block = located.record
    return block.position, block.size_bytes, located.payload_bytes, *located.extent


def _times(block: BlockRecord) -> tuple[float, ...]:
    return block.computed_at, block.expires_at, block.protect_until, block.last_used


def _located(
    names: Sequence[bytes],
    numbers: Sequence[int],
    times: Sequence[float],
    checksum: bytes,
    codec: int,
    hits: int = 0,
) -> Located:
    """Undo `_names` (behind the block hash), `_numbers` and `_times`."""
    block_hash, parent_hash, root, namespace, retention = names
    position, size_bytes, payload_bytes, segment, slot = numbers
    computed_at, expires_at, protect_until, last_used = times
    record = BlockRecord(
        block_hash=block_hash,
        parent_hash=parent_hash,
        root=root,
        namespace=namespace,
        position=position,
        size_bytes=size_bytes,
        retention=retention.decode(errors="replace"),
        computed_at=computed_at,
        expires_at=expires_at,
        last_used=last_used,
        protect_until=protect_until,
        hits=hits,
    )
    return Located(record, Extent(segment, slot), payload_bytes, checksum, codec)


def is_header_of(header: Located | None, located: Located) -> bool:
    """Answer whether a slot header belongs to this index entry; claims made later may differ."""
    if header is None or header[1:] != located[1:]:
        return False
    claim = {name: getattr(located.record, name) for name in _CLAIM}
    return replace(header.record, **claim) == located.record


def to_us(time_s: float) -> int:
    """Map a time to whole microseconds, the order that the secondary keys sort by."""
    return min(max(int(time_s * 1e6), 0), (1 << 64) - 1)


def expiry_key(record: BlockRecord) -> bytes:
    """Key of `expiry`: the soonest to expire sorts first."""
    return _EXPIRY.pack(to_us(record.expires_at)) + record.block_hash


def split_expiry_key(key: bytes) -> tuple[int, bytes]:
    """Undo `expiry_key`: (microseconds, block hash)."""
    return _EXPIRY.unpack_from(key)[0], key[_EXPIRY.size :]


def lru_key(record: BlockRecord) -> bytes:
    """Key of `lru`: per namespace the longest unused first, the tail of a chain before its head.

    A protected block counts as used until its protection ends.
    """
    used_until = to_us(max(record.last_used, record.protect_until))
    order = _LRU.pack(record.namespace, used_until, _MAX_U32 - record.position)
    return order + record.block_hash


def lru_prefix(namespace: bytes) -> bytes:
    """First bytes of every `lru` key of a namespace."""
    return namespace.ljust(MAX_DIGEST_BYTES, b"\0")


def lru_order(key: bytes) -> bytes:
    """What orders `lru` keys across namespaces: time, then position from the tail, then hash."""
    return key[MAX_DIGEST_BYTES:]


def lru_hash(key: bytes) -> bytes:
    """The block hash at the end of an `lru` key."""
    return key[_LRU.size :]


def extent_key(extent: Extent) -> bytes:
    """Key of `pending`, and tail of the keys of `free`."""
    return _EXTENT.pack(*extent)


def split_extent_key(key: bytes) -> Extent:
    """Undo `extent_key`."""
    return Extent(*_EXTENT.unpack(key))


def corrupt(block_hash: bytes, reason: str, what: str) -> CorruptBlockError:
    """Return the error for bytes of a block that are not what they must be."""
    text = f"block {block_hash.hex()[:12]}: {what}"
    return CorruptBlockError(text, reason=reason)
