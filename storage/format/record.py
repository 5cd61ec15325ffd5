"""The record of one block, as the index and the headers of extents hold it.

A record has 240 bytes, and each field has its place in them. So lookups and tables of blocks read
slices, and only what uses a whole record decodes it. This module knows the layout, which
docs/format.md draws, and how a payload fills its extent. It opens no file and decides nothing.
"""

import math
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_digest, xxh3_128_digest

from tieredkv.errors import CorruptBlockError, StorageError
from tieredkv.tier import Times
from tieredkv.types import NAMESPACE_BYTES, PAGE_ALIGNMENT_BYTES, BlockRecord

FORMAT_VERSION = 3
RECORD_BYTES = 240
HASH_SIZES = (16, 32)
HOUR_S = 3600  # the blocks of a namespace that were computed in one hour have one payload key

CODEC_RAW = 0
FIRST_ENCRYPTED, NUM_CLEAR = 3, 3  # codecs 3, 4 and 5 are encrypted payloads of codecs 0, 1 and 2
_RAW_CODECS = (CODEC_RAW, FIRST_ENCRYPTED + CODEC_RAW)
HEADER_BYTES = PAGE_ALIGNMENT_BYTES
PACKED_HEADER_BYTES = 512  # header of a compressed payload, which starts in the same page

# Behind the seal: expires_at; block, parent, root, namespace; position, part, page bytes, payload
# bytes, segment, extent, hits; codec, page form, retention, bytes of a hash; computed_at,
# last_used, pinned_until; payload checksum; kind, number of parts; room.
_RECORD = struct.Struct("<d32s32s32s32s7I4B3d16sBH21x")
SEAL_BYTES = 8
BLOCK_AT, _NAMESPACE_AT, _HASH_BYTES_AT = 16, 112, 175
_TIMES = struct.Struct("<8xd160x3d")  # expires_at, computed_at, last_used, pinned_until
_IDENTITY = struct.Struct("<32s32s32s32s4I3BdBH")
_SCOPE = struct.Struct(">32sI")
_MAX_U32 = 0xFFFF_FFFF
MOST_NAMES, MOST_NAME_BYTES = 255, 32  # of retention policies
_NO_NAME = MOST_NAMES  # the number of a retention whose name is not in the list


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


class Retentions:
    """The names of retention policies by their numbers, which the records of a store have.

    Args:
        names: the list of the store.

    Raises:
        StorageError: there are more than 255 names, or one is too long.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self._numbers = {name: number for number, name in reversed([*enumerate(self.names)])}
        self._numbers[""] = _NO_NAME
        if len(self.names) > MOST_NAMES:
            what = f"a store knows at most {MOST_NAMES} names of retention policies"
            raise StorageError(f"{what}, but {len(self.names)} are wanted; choose another folder")
        for name in self.names:
            if len(name.encode(errors="surrogatepass")) > MOST_NAME_BYTES:
                what = f"retention name `{name}` is longer than {MOST_NAME_BYTES} bytes"
                raise StorageError(f"{what}; choose a shorter one")

    def with_new(self, names: Iterable[str]) -> "Retentions":
        """Return the list with those names at its end that it lacks."""
        new = dict.fromkeys(name for name in names if name not in self._numbers)
        return Retentions((*self.names, *new)) if new else self

    def name_of(self, number: int) -> str:
        """Return the name of a number; it is empty where the list has none."""
        return self.names[number] if number < len(self.names) else ""

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
    size = len(record.block_hash)
    if size not in HASH_SIZES or not size == len(record.parent_hash) == len(record.root):
        digests = (record.block_hash, record.parent_hash, record.root)
        what = "the hashes of a block, its parent and its root must all have 16 or all 32 bytes"
        raise StorageError(f"{what}, but are {digests}")
    if len(record.namespace) != NAMESPACE_BYTES:
        what = f"a namespace must have {NAMESPACE_BYTES} bytes"
        raise StorageError(f"{what}, but is {record.namespace!r}")
    times = (record.computed_at, record.expires_at, record.pinned_until, record.last_used)
    if not math.isfinite(sum(times)):
        raise StorageError(f"times must be finite, but are {times}")
    if not 0 < record.size_bytes <= _MAX_U32 - 2 * PAGE_ALIGNMENT_BYTES or record.num_parts < 1:
        what = f"a block of {record.size_bytes} bytes in {record.num_parts} parts"
        raise StorageError(f"{what} cannot be stored")
    try:
        encode_record(Located(record, Extent(0, 0), 0, b""), retentions)
    except struct.error as error:
        raise StorageError(f"a number is out of range in {record}: {error}") from error


def encode_record(located: Located, retentions: Retentions) -> bytes:
    """Pack and seal a record.

    Raises:
        StorageError: the list lacks the name of its retention.
    """
    it, (segment, number) = located.record, located.extent
    body = _RECORD.pack(
        it.expires_at, it.block_hash, it.parent_hash, it.root, it.namespace,
        it.position, it.part, it.size_bytes, located.payload_bytes, segment, number, it.hits,
        located.codec, it.page_form, retentions.number_of(it.retention), len(it.block_hash),
        it.computed_at, it.last_used, it.pinned_until, located.payload_checksum,
        it.kind, it.num_parts,
    )  # fmt: skip
    return xxh3_64_digest(body) + body


def is_record_of(block_hash: bytes, data: bytes) -> bool:
    """Return whether bytes are as long as a record and repeat its key; the seal is not checked."""
    return (
        len(data) == RECORD_BYTES
        and data.startswith(block_hash, BLOCK_AT)
        and data[_HASH_BYTES_AT] == len(block_hash)
    )


def expiry_of(block_hash: bytes, data: bytes) -> float | None:
    """Read the deadline of a sealed record, which is all that a lookup needs.

    Returns None for bytes that are no record of this block: their number, seal or hash is wrong, or
    one of its times is no time, which a forger can seal as well as we can.
    """
    if not is_record_of(block_hash, data) or xxh3_64_digest(data[SEAL_BYTES:]) != data[:8]:
        return None
    expires_at, computed_at, last_used, pinned_until = _TIMES.unpack_from(data)
    # NOTE: a sum is finite only if all its parts are.
    return (
        expires_at if math.isfinite(expires_at + computed_at + last_used + pinned_until) else None
    )


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
    (
        expires_at, _, parent, root, namespace,
        position, part, page_bytes, payload_bytes, segment, number, hits,
        codec, form, retention, _, computed_at, last_used, pinned_until, checksum, kind, num_parts,
    ) = _RECORD.unpack_from(data, SEAL_BYTES)  # fmt: skip
    record = BlockRecord(  # by position, which takes a quarter of the time
        block_hash, parent[:size], root[:size], namespace, position, page_bytes,
        retentions.name_of(retention), computed_at, expires_at, last_used, pinned_until, hits,
        kind, part, num_parts, form,
    )  # fmt: skip
    return Located(record, Extent(segment, number), payload_bytes, checksum, codec)


def hash_in(data: bytes) -> bytes:
    """Read the hash of the block from a record; it is empty if these bytes are none."""
    size = data[_HASH_BYTES_AT] if len(data) == RECORD_BYTES else 0
    return data[BLOCK_AT : BLOCK_AT + size] if size in HASH_SIZES else b""


def namespace_in(data: bytes) -> bytes:
    """Read the namespace of the block from a record."""
    return data[_NAMESPACE_AT : _NAMESPACE_AT + NAMESPACE_BYTES]


def identity_of(record: BlockRecord, codec: int, payload_bytes: int) -> bytes:
    """Return what a payload is authenticated with: those bytes of its record that never change.

    They tell block, parent, root, namespace, position, part, sizes of page and payload; codec, page
    form; bytes of a hash, computed_at; kind and number of parts.
    """
    it = record
    return _IDENTITY.pack(
        it.block_hash, it.parent_hash, it.root, it.namespace,
        it.position, it.part, it.size_bytes, payload_bytes, codec, it.page_form,
        len(it.block_hash), it.computed_at, it.kind, it.num_parts,
    )  # fmt: skip


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
    return HEADER_BYTES if codec in _RAW_CODECS else PACKED_HEADER_BYTES


def extent_bytes_for(payload_bytes: int, codec: int = CODEC_RAW, block_bytes: int = 0) -> int:
    """Return the size of an extent: the header, then the payload, padded.

    The size for a compressed payload is rounded up to sixteenths of the block, so that extents can
    be reused for other blocks.
    """
    if codec in _RAW_CODECS:
        return padded_bytes(HEADER_BYTES + payload_bytes)
    step = padded_bytes(-(-block_bytes // 16))
    return -(-(PACKED_HEADER_BYTES + payload_bytes) // step) * step


def scope_of(record: BlockRecord) -> bytes:
    """Return which payload key is a block's: that of its namespace and its hour of computing."""
    hour = min(max(int(record.computed_at // HOUR_S), 0), _MAX_U32)
    return _SCOPE.pack(record.namespace, hour)


def split_scope(scope: bytes) -> tuple[bytes, int]:
    """Undo `scope_of`: the namespace and the first second of the hour."""
    namespace, hour = _SCOPE.unpack(scope)
    return namespace, hour * HOUR_S
