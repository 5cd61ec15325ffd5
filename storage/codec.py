"""The bytes of the store: index records, extent headers and index keys, each with its version.

This module knows layouts and checksums, which docs/format.md draws. It opens no file and decides
nothing.
"""

import math
import struct
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from msgspec.structs import replace
from xxhash import xxh3_64_digest, xxh3_128_digest

from tieredkv.errors import CorruptBlockError, StorageError
from tieredkv.types import PAGE_ALIGNMENT_BYTES, BlockRecord

FORMAT_VERSION = 2
CODEC_RAW = 0
FIRST_ENCRYPTED, NUM_CLEAR = 3, 3  # codecs 3, 4 and 5 are encrypted payloads of codecs 0, 1 and 2
HEADER_BYTES = PAGE_ALIGNMENT_BYTES
PACKED_HEADER_BYTES = 512  # header of a compressed payload, which starts in the same page
MAX_DIGEST_BYTES = 32

# A sealed record consists of the seal (a checksum of all that follows), a copy of `expires_at`, and
# the entry in msgpack.
_SEAL_BYTES = 8
_DEADLINE = struct.Struct("<d")
RECORD_AT = _SEAL_BYTES + _DEADLINE.size
"""Where the entry begins in a sealed record."""

# An extent header consists of the magic with the version, the length of the sealed record, and it.
_HEADER = struct.Struct("<8sI")
_EXTENT_MAGIC = b"TKVSLOT" + bytes([FORMAT_VERSION])

# What follows the record in the header of an encrypted payload: id of the key, nonce, tag.
_ENCRYPTION = struct.Struct("8s12s16s")
# The first digest of a sealed record lies behind the heads of two arrays and its own head.
_DIGEST_AT = RECORD_AT + 4

_EXPIRY = struct.Struct(">Q")
_SCOPE = struct.Struct(">32sI")
_LRU = struct.Struct(">32sQI")
_EXTENT = struct.Struct(">II")
_MAX_U32 = 0xFFFF_FFFF
_CLAIM = ("retention", "expires_at", "last_used", "pinned_until", "hits")


class Extent(NamedTuple):
    """Where the bytes of one block lie: an extent of a segment file."""

    segment: int
    number: int


class Located(NamedTuple):
    """One index entry: the block, its extent and what its payload must be."""

    record: BlockRecord
    extent: Extent
    payload_bytes: int
    payload_checksum: bytes
    codec: int = CODEC_RAW

    @property
    def extent_bytes(self) -> int:
        """The extent size class that holds this payload."""
        return extent_bytes_for(self.payload_bytes, self.codec, self.record.size_bytes)


class Encryption(NamedTuple):
    """How one payload was encrypted; the header of its extent has it."""

    key_id: bytes
    nonce: bytes
    tag: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Located).decode


def padded_bytes(size_bytes: int) -> int:
    """Round up to the alignment of O_DIRECT."""
    return -(-size_bytes // PAGE_ALIGNMENT_BYTES) * PAGE_ALIGNMENT_BYTES


def is_encrypted(codec: int) -> bool:
    """Return whether payloads of this codec are encrypted."""
    return FIRST_ENCRYPTED <= codec < FIRST_ENCRYPTED + NUM_CLEAR


def encrypted(codec: int) -> int:
    """Return the codec of encrypted payloads of a clear codec."""
    return FIRST_ENCRYPTED + codec


def clear_codec(codec: int) -> int:
    """Return the codec of a payload once it is decrypted."""
    return codec - FIRST_ENCRYPTED if is_encrypted(codec) else codec


def header_bytes_for(codec: int) -> int:
    """Return the size of the header, after which the payload begins in its extent."""
    return HEADER_BYTES if clear_codec(codec) == CODEC_RAW else PACKED_HEADER_BYTES


def extent_bytes_for(payload_bytes: int, codec: int = CODEC_RAW, block_bytes: int = 0) -> int:
    """Return the size of an extent: the header, then the payload, padded.

    The size for a compressed payload is rounded up to sixteenths of the block, so that extents can
    be reused for other blocks.
    """
    is_raw = clear_codec(codec) == CODEC_RAW
    step = PAGE_ALIGNMENT_BYTES if is_raw else padded_bytes(-(-block_bytes // 16))
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
        raise StorageError(f"digests must have 1 to {MAX_DIGEST_BYTES} bytes, but are {digests}")
    if len(record.retention.encode()) > 32:
        raise StorageError(f"retention name `{record.retention}` is longer than 32 bytes")
    times = (record.computed_at, record.expires_at, record.pinned_until, record.last_used)
    if not all(math.isfinite(time) for time in times):
        raise StorageError(f"times must be finite, but are {times}")
    if not 0 < record.size_bytes <= _MAX_U32 - 2 * PAGE_ALIGNMENT_BYTES:
        raise StorageError(f"a block of {record.size_bytes} bytes cannot be stored")
    if not 0 <= record.position <= _MAX_U32:
        raise StorageError(f"position {record.position} is not in 0 to {_MAX_U32}")


def encode_record(located: Located) -> bytes:
    """Pack an index record; its seal covers the key as well."""
    body = _DEADLINE.pack(located.record.expires_at) + _encode(located)
    return xxh3_64_digest(located.record.block_hash + body) + body


def expiry_of(block_hash: bytes, data: bytes) -> float | None:
    """Read the deadline of a sealed record, which is all that a lookup needs.

    Returns None for a record that does not fit its seal or its key.
    """
    is_long_enough = len(data) >= RECORD_AT
    if not is_long_enough or xxh3_64_digest(block_hash + data[_SEAL_BYTES:]) != data[:_SEAL_BYTES]:
        return None
    expires_at: float = _DEADLINE.unpack_from(data, _SEAL_BYTES)[0]
    return expires_at


def decode_record(block_hash: bytes, data: bytes) -> Located:
    """Unpack an index record.

    Raises:
        CorruptBlockError: its seal or key is wrong, or the sealed bytes are not a record; the
            reason is `record`.
    """
    if expiry_of(block_hash, data) is None:
        raise corrupt(block_hash, "record", "the index record fails its checksum")
    try:
        return _decode(data[RECORD_AT:])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise corrupt(block_hash, "record", f"the index record is invalid: {error}") from error


def linked_digests(records: Iterable[bytes]) -> list[bytes]:
    """Read the first two digests of each sealed record: the block's and its parent's."""
    digests = list[bytes]()
    for sealed in records:
        end = _DIGEST_AT + sealed[_DIGEST_AT - 1]
        digests += (sealed[_DIGEST_AT:end], sealed[end + 2 : end + 2 + sealed[end + 1]])
    return digests


def with_digests(records: Iterable[bytes], digests: Iterable[bytes]) -> dict[bytes, bytes]:
    """Put other digests of the same lengths into sealed records; return these by the first one."""
    changed, rest = dict[bytes, bytes](), iter(digests)
    for sealed, block_hash, parent_hash in zip(records, rest, rest, strict=False):
        end = _DIGEST_AT + len(block_hash)
        head, tail = sealed[_SEAL_BYTES:_DIGEST_AT], sealed[end + 2 + len(parent_hash) :]
        body = b"".join((head, block_hash, sealed[end : end + 2], parent_hash, tail))
        changed[block_hash] = xxh3_64_digest(block_hash + body) + body
    return changed


def scope_of(record: BlockRecord) -> bytes:
    """Return which payload key is a block's: that of its namespace and its hour of computing."""
    hour = min(max(int(record.computed_at // 3600), 0), _MAX_U32)
    return _SCOPE.pack(record.namespace, hour)


def split_scope(scope: bytes) -> tuple[bytes, int]:
    """Undo `scope_of`: the namespace, filled up with zeroes, and the first second of the hour."""
    namespace, hour = _SCOPE.unpack(scope)
    return namespace, hour * 3600


def identity_of(record: BlockRecord, codec: int) -> bytes:
    """Return what an encrypted payload is authenticated with: the facts that never change."""
    digests = (record.block_hash, record.parent_hash, record.root, record.namespace)
    return _encode((codec, *digests, record.position, record.size_bytes, record.computed_at))


def encode_header_into(
    buffer: bytearray | memoryview, located: Located, how: Encryption | None = None
) -> None:
    """Write the extent header: the current record, so that a block is found without the index.

    Args:
        buffer: where the header begins.
        located: the block.
        how: of an encrypted payload.
    """
    sealed, end = encode_record(located), header_bytes_for(located.codec)
    fields = b"" if how is None else _ENCRYPTION.pack(*how)
    header = _HEADER.pack(_EXTENT_MAGIC, len(sealed)) + sealed + fields
    buffer[:end] = header.ljust(end, b"\0")


def decode_encryption(header: bytes | memoryview) -> Encryption:
    """Read how the payload behind a sound header was encrypted."""
    _, length = _HEADER.unpack_from(header)
    return Encryption(*_ENCRYPTION.unpack_from(header, _HEADER.size + length))


def decode_header(header: bytes | memoryview) -> Located | None:
    """Unpack the header of an extent; None if it was never written, was erased or is damaged."""
    magic, length = _HEADER.unpack_from(header)
    if magic != _EXTENT_MAGIC:
        return None
    sealed = bytes(header[_HEADER.size :][:length])
    try:
        located = _decode(sealed[RECORD_AT:])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    is_sound = expiry_of(located.record.block_hash, sealed) is not None
    return located if is_sound else None


def is_header_of(header: Located | None, located: Located) -> bool:
    """Return whether a header belongs to an index entry; claims are not compared."""
    if header is None or header[1:] != located[1:]:
        return False
    claim = {name: getattr(located.record, name) for name in _CLAIM}
    return replace(header.record, **claim) == located.record


def to_us(time_s: float) -> int:
    """Convert a time to whole microseconds, by which the secondary keys are sorted."""
    return min(max(int(time_s * 1e6), 0), (1 << 64) - 1)


def expiry_key(record: BlockRecord) -> bytes:
    """Key of `expiry`: the soonest to expire sorts first."""
    return _EXPIRY.pack(to_us(record.expires_at)) + record.block_hash


def split_expiry_key(key: bytes) -> tuple[int, bytes]:
    """Undo `expiry_key`: (microseconds, block hash)."""
    return _EXPIRY.unpack_from(key)[0], key[_EXPIRY.size :]


def lru_key(record: BlockRecord) -> bytes:
    """Key of `lru`: in each namespace the longest unused sorts first, a tail before its head.

    A pinned block counts as used until its pin ends.
    """
    used_until = to_us(max(record.last_used, record.pinned_until))
    order = _LRU.pack(record.namespace, used_until, _MAX_U32 - record.position)
    return order + record.block_hash


def lru_prefix(namespace: bytes) -> bytes:
    """First bytes of every `lru` key of a namespace."""
    return namespace.ljust(MAX_DIGEST_BYTES, b"\0")


def lru_order(key: bytes) -> bytes:
    """Return what orders `lru` keys across namespaces: time, position from the tail, hash."""
    return key[MAX_DIGEST_BYTES:]


def lru_hash(key: bytes) -> bytes:
    """The block hash at the end of an `lru` key."""
    return key[_LRU.size :]


def extent_key(extent: Extent) -> bytes:
    """Key of `pending`, and the last part of the keys of `free`."""
    return _EXTENT.pack(*extent)


def split_extent_key(key: bytes) -> Extent:
    """Undo `extent_key`."""
    return Extent(*_EXTENT.unpack(key))


def corrupt(block_hash: bytes, reason: str, what: str) -> CorruptBlockError:
    """Return the error for a block whose stored bytes are wrong."""
    text = f"block {block_hash.hex()[:12]}: {what}"
    return CorruptBlockError(text, reason=reason)
