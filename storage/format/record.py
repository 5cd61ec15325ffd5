"""The record of one block, as the index and the headers of extents hold it; the keys of the index.

A record has 240 bytes, and each field has its place in them. So lookups and tables of blocks read
slices, and only what uses a whole record decodes it. This module knows
layouts and checksums, which docs/format.md draws. It opens no file and decides nothing.
"""

import math
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_digest, xxh3_128_digest

from tieredkv.errors import CorruptBlockError, StorageError
from tieredkv.types import NAMESPACE_BYTES, PAGE_ALIGNMENT_BYTES, TENANT_BYTES, BlockRecord

FORMAT_VERSION = 3
RECORD_BYTES = 240
HASH_SIZES = (16, 32)
MAX_DIGEST_BYTES = 32
HOUR_S = 3600  # the blocks of a namespace that were computed in one hour have one payload key

CODEC_RAW = 0
FIRST_ENCRYPTED, NUM_CLEAR = 3, 3  # codecs 3, 4 and 5 are encrypted payloads of codecs 0, 1 and 2
HEADER_BYTES = PAGE_ALIGNMENT_BYTES
PACKED_HEADER_BYTES = 512  # header of a compressed payload, which starts in the same page

# Seal; expires_at; block, parent, root, namespace; position, part, page bytes, payload bytes,
# segment, extent, hits; codec, page form, retention, bytes of a hash; computed_at, last_used,
# pinned_until; payload checksum; kind, number of parts; room.
_RECORD = struct.Struct("<8xd32s32s32s32s7I4B3d16sBH21x")
_SEAL_BYTES = 8
_BLOCK_AT, _NAMESPACE_AT, _HASH_BYTES_AT = 16, 112, 175
_TIMES = struct.Struct("<8xd160x3d")  # expires_at, computed_at, last_used, pinned_until

_EXPIRY = struct.Struct(">Q")
_SCOPE = struct.Struct(">32sI")
_LRU = struct.Struct(f">{TENANT_BYTES}sQI")
_EXTENT = struct.Struct(">II")
_MAX_U8, _MAX_U16, _MAX_U32 = 0xFF, 0xFFFF, 0xFFFF_FFFF
_NO_NAME = _MAX_U8  # the number of a name that is not in the list
_MOST_NAME_BYTES = 32


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


class Times(NamedTuple):
    """When a block will expire, was computed and was last used; see `BlockRecord`."""

    expires_at: float
    computed_at: float
    last_used: float


class Retentions:
    """The names of retention policies by their numbers, which the records of a store have.

    Args:
        names: the list of the store.

    Attributes:
        names: the same.

    Raises:
        StorageError: there are more than 255 names, or one is too long.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self._numbers = {"": _NO_NAME}
        for number, name in enumerate(self.names):
            self._numbers.setdefault(name, number)
        self._names = dict(enumerate(self.names))
        if len(self.names) > _NO_NAME:
            what = f"a store knows at most {_NO_NAME} names of retention policies"
            raise StorageError(f"{what}, but {len(self.names)} are wanted; choose another folder")
        for name in self.names:
            if len(name.encode(errors="surrogatepass")) > _MOST_NAME_BYTES:
                what = f"retention name `{name}` is longer than {_MOST_NAME_BYTES} bytes"
                raise StorageError(f"{what}; choose a shorter one")

    def with_new(self, names: Iterable[str]) -> "Retentions":
        """Return the list with those names at its end that it lacks."""
        new = dict.fromkeys(name for name in names if name not in self._numbers)
        return Retentions((*self.names, *new)) if new else self

    def name_of(self, number: int) -> str:
        """Return the name of a number; it is empty where the list has none."""
        return self._names.get(number, "")

    def number_of(self, name: str) -> int:
        """Return the number of a name; the empty name has one that no list has.

        Raises:
            StorageError: the list lacks the name.
        """
        if (number := self._numbers.get(name)) is None:
            known = ", ".join(f"`{each}`" for each in self.names) or "none"
            raise StorageError(f"retention `{name}` may not use the disk; those that may: {known}")
        return number


NO_RETENTIONS = Retentions()
"""For readers that need no names, such as lookups."""

# --- records ----------------------------------------------------------------------------------


def check_record(record: BlockRecord, retentions: Retentions) -> None:
    """Refuse a record that the format cannot hold.

    Raises:
        StorageError: a digest has another length, a size, a number or a time is out of range, or
            the store has no number for the retention.
    """
    digests = (record.block_hash, record.parent_hash, record.root)
    if len({*map(len, digests)}) > 1 or len(record.block_hash) not in HASH_SIZES:
        what = "the hashes of a block, its parent and its root must all have 16 or all 32 bytes"
        raise StorageError(f"{what}, but are {digests}")
    if len(record.namespace) != NAMESPACE_BYTES:
        what = f"a namespace must have {NAMESPACE_BYTES} bytes"
        raise StorageError(f"{what}, but is {record.namespace!r}")
    times = (record.computed_at, record.expires_at, record.pinned_until, record.last_used)
    if not all(math.isfinite(time) for time in times):
        raise StorageError(f"times must be finite, but are {times}")
    if not 0 < record.size_bytes <= _MAX_U32 - 2 * PAGE_ALIGNMENT_BYTES:
        raise StorageError(f"a block of {record.size_bytes} bytes cannot be stored")
    for name, least, most in (
        ("position", 0, _MAX_U32),
        ("part", 0, _MAX_U32),
        ("num_parts", 1, _MAX_U16),
        ("kind", 0, _MAX_U8),
        ("page_form", 0, _MAX_U8),
        ("hits", 0, _MAX_U32),
    ):
        if not least <= (value := getattr(record, name)) <= most:
            raise StorageError(f"{name} {value} is not in {least} to {most}")
    retentions.number_of(record.retention)


def encode_record(located: Located, retentions: Retentions) -> bytes:
    """Pack and seal a record.

    Raises:
        StorageError: the list lacks the name of its retention.
    """
    return _sealed(_pack(located, retentions.number_of(located.record.retention))[_SEAL_BYTES:])


def _pack(located: Located, retention: int = _NO_NAME) -> bytes:
    """Return the bytes of a record, with zeroes in the place of the seal."""
    it, (segment, number) = located.record, located.extent
    return _RECORD.pack(
        *(it.expires_at, it.block_hash, it.parent_hash, it.root, it.namespace),
        *(it.position, it.part, it.size_bytes, located.payload_bytes, segment, number, it.hits),
        *(located.codec, it.page_form, retention, len(it.block_hash)),
        *(it.computed_at, it.last_used, it.pinned_until, located.payload_checksum),
        *(it.kind, it.num_parts),
    )


def _sealed(body: bytes) -> bytes:
    return xxh3_64_digest(body) + body


def expiry_of(block_hash: bytes, data: bytes) -> float | None:
    """Read the deadline of a sealed record, which is all that a lookup needs.

    Returns None for bytes that are no record of this block: their number, seal or hash is wrong, or
    one of its times is no time, which a forger can seal as well as we can.
    """
    if (
        len(data) != RECORD_BYTES
        or not data.startswith(block_hash, _BLOCK_AT)
        or data[_HASH_BYTES_AT] != len(block_hash)
        or xxh3_64_digest(data[_SEAL_BYTES:]) != data[:_SEAL_BYTES]
    ):
        return None
    times: tuple[float, ...] = _TIMES.unpack_from(data)
    return times[0] if all(map(math.isfinite, times)) else None


def times_of(data: bytes) -> Times:
    """Read the times from a record that was checked before."""
    return Times(*_TIMES.unpack_from(data)[:3])


def decode_record(
    block_hash: bytes, data: bytes, retentions: Retentions = NO_RETENTIONS
) -> Located:
    """Unpack a sealed record.

    Args:
        block_hash: its key in the index.
        data: the record.
        retentions: of the store; without them the name of the retention is empty.

    Raises:
        CorruptBlockError: these bytes are no record of this block; the reason is `record`.
    """
    size = len(block_hash)
    if size not in HASH_SIZES or expiry_of(block_hash, data) is None:
        raise corrupt(block_hash, "record", "the index record fails its checksum")
    fields = _RECORD.unpack(data)
    expires_at, _, parent_hash, root, namespace, position, part, size_bytes = fields[:8]
    payload_bytes, segment, number, hits, codec, page_form, retention, _ = fields[8:16]
    computed_at, last_used, pinned_until, payload_checksum, kind, num_parts = fields[16:]
    record = BlockRecord(
        block_hash=block_hash,
        parent_hash=parent_hash[:size],
        root=root[:size],
        namespace=namespace,
        position=position,
        size_bytes=size_bytes,
        retention=retentions.name_of(retention),
        computed_at=computed_at,
        expires_at=expires_at,
        last_used=last_used,
        pinned_until=pinned_until,
        hits=hits,
        kind=kind,
        part=part,
        num_parts=num_parts,
        page_form=page_form,
    )
    return Located(record, Extent(segment, number), payload_bytes, payload_checksum, codec)


def hash_in(data: bytes) -> bytes:
    """Read the hash of the block from a record; it is empty if these bytes are none."""
    size = data[_HASH_BYTES_AT] if len(data) == RECORD_BYTES else 0
    return data[_BLOCK_AT : _BLOCK_AT + size] if size in HASH_SIZES else b""


def namespace_in(data: bytes) -> bytes:
    """Read the namespace of the block from a record."""
    return data[_NAMESPACE_AT : _NAMESPACE_AT + MAX_DIGEST_BYTES]


def is_record_of(block_hash: bytes, data: bytes) -> bool:
    """Return whether bytes are as long as a record and repeat its key; the seal is not checked."""
    return (
        len(data) == RECORD_BYTES
        and data.startswith(block_hash, _BLOCK_AT)
        and data[_HASH_BYTES_AT] == len(block_hash)
    )


def identity_of(record: BlockRecord, codec: int, payload_bytes: int) -> bytes:
    """Return what a payload is authenticated with: those bytes of its record that never change.

    They tell block, parent, root, namespace, position, part, sizes of page and payload; codec, page
    form; bytes of a hash, computed_at; kind and number of parts.
    """
    data = _pack(Located(record, Extent(0, 0), payload_bytes, b"", codec))
    return data[16:160] + data[172:174] + data[175:184] + data[216:219]


def corrupt(block_hash: bytes, reason: str, what: str) -> CorruptBlockError:
    """Return the error for a block whose stored bytes are wrong."""
    text = f"block {block_hash.hex()[:12]}: {what}"
    return CorruptBlockError(text, reason=reason)


# --- payloads and extents ---------------------------------------------------------------------


def payload_checksum(payload: memoryview | bytes) -> bytes:
    """Digest the payload as it is stored: xxh3_128, big-endian."""
    return xxh3_128_digest(payload)


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


def scope_of(record: BlockRecord) -> bytes:
    """Return which payload key is a block's: that of its namespace and its hour of computing."""
    hour = min(max(int(record.computed_at // HOUR_S), 0), _MAX_U32)
    return _SCOPE.pack(record.namespace, hour)


def split_scope(scope: bytes) -> tuple[bytes, int]:
    """Undo `scope_of`: the namespace and the first second of the hour."""
    namespace, hour = _SCOPE.unpack(scope)
    return namespace, hour * HOUR_S


# --- keys of the index ------------------------------------------------------------------------


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
    """Key of `lru`: of each tenant the longest unused sorts first, a tail before its head.

    A pinned block counts as used until its pin ends.
    """
    used_until = to_us(max(record.last_used, record.pinned_until))
    order = _LRU.pack(record.namespace, used_until, _MAX_U32 - record.position)
    return order + record.block_hash


def tenant_of(namespace: bytes) -> bytes:
    """Return the tenant of a namespace: the first bytes of the `lru` keys of its blocks."""
    return namespace[:TENANT_BYTES].ljust(TENANT_BYTES, b"\0")


def lru_order(key: bytes) -> bytes:
    """Return what orders `lru` keys across tenants: time, position from the tail, hash."""
    return key[TENANT_BYTES:]


def order_hash(order: bytes) -> bytes:
    """The block hash at the end of what `lru_order` returns; empty if there is none."""
    return order[_LRU.size - TENANT_BYTES :]


def extent_key(extent: Extent) -> bytes:
    """Key of `pending`, and the last part of the keys of `free`."""
    return _EXTENT.pack(*extent)


def split_extent_key(key: bytes) -> Extent:
    """Undo `extent_key`."""
    return Extent(*_EXTENT.unpack(key))
