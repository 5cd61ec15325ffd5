"""The entries of the LMDB index: what each of its databases holds, and how it is decoded.

This module knows keys and values (docs/format.md); it does not know LMDB. Bytes that the store
never writes raise CorruptIndexError.
"""

import struct
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta as Bounds
from msgspec.msgpack import Decoder

from tieredkv.errors import CorruptIndexError
from tieredkv.storage.format.record import Extent, extent_bytes_for
from tieredkv.storage.lifetimes import Counted, LifetimeCounts
from tieredkv.types import PAGE_ALIGNMENT_BYTES, TENANT_BYTES, BlockRecord

NAMES = ("meta", "blocks", "expiry", "lru", "namespaces", "segments", "free", "pending", "keys")
"""The names of the databases."""

META_KEY = b"store"
"""The only key of `meta`."""

ExtentList = Literal["pending", "free"]
"""A list of extents without a stored block: `pending` ones may hold old bytes, `free` ones none."""

_MAX_U32 = 0xFFFF_FFFF
_EXPIRY = struct.Struct(">Q")
_LRU = struct.Struct(f">{TENANT_BYTES}sQI")
_SEGMENT = struct.Struct(">I")
_EXTENT = struct.Struct(">II")


# --- values -----------------------------------------------------------------------------------


class Totals(NamedTuple):
    """How many blocks and payload bytes are stored, in all or in one namespace.

    Attributes:
        num_blocks: pages of layers with windows included.
        window_pages: how many of them are such pages.
    """

    num_blocks: Counted
    payload_bytes: Counted
    window_pages: Counted = 0

    def plus(self, num_blocks: int, payload_bytes: int, window_pages: int = 0) -> "Totals":
        """Return the sums; they never fall below zero, even if a damaged record was miscounted."""
        added = num_blocks, payload_bytes, window_pages
        return Totals(*(max(sum(each), 0) for each in zip(self, added, strict=True)))

    @property
    def extent_bytes(self) -> int:
        """About how many bytes the extents of these blocks have."""
        if not self.num_blocks:
            return 0
        return self.num_blocks * extent_bytes_for(self.payload_bytes // self.num_blocks)


class SegmentState(NamedTuple):
    """What the index knows of a segment file.

    Attributes:
        extent_bytes: the size of each of its extents.
        num_extents: how many extents have their space set aside in the file.
        num_used: extents below this number were handed out at least once; each of them belongs to a
            block, is free or is pending.
    """

    extent_bytes: Annotated[int, Bounds(gt=0, le=_MAX_U32, multiple_of=PAGE_ALIGNMENT_BYTES)]
    num_extents: Annotated[int, Bounds(ge=0, le=_MAX_U32)]
    num_used: Annotated[int, Bounds(ge=0, le=_MAX_U32)]


_Reason = Annotated[str, Bounds(pattern="^[a-z_]+$", max_length=32)]


class Meta(msgspec.Struct):
    """What the index knows of the store as a whole.

    Attributes:
        format: version of the format; 0 until the index is complete.
        clock: the latest time that the store has seen.
        bytes_written: bytes written to segment files since the index was made.
        needs_rebuild: whether an entry was found damaged; the next sweep then makes the databases
            again.
        faults: cache faults by reason.
        lifetimes: what was written lately, and the ages of blocks that were evicted.
        num_encrypted: how many of the blocks are encrypted.
        window_bytes: how many of the payload bytes are of pages of layers with windows.
        page_kinds: kind and part of each such page that the store ever had.
    """

    format: int = 0
    clock: float = 0.0
    next_segment: Annotated[int, Bounds(gt=0, le=_MAX_U32)] = 1
    totals: Totals = Totals(0, 0)
    bytes_written: Counted = 0
    needs_rebuild: bool = False
    faults: dict[_Reason, Counted] = {}
    lifetimes: LifetimeCounts = msgspec.field(default_factory=LifetimeCounts)
    num_encrypted: Counted = 0
    window_bytes: Counted = 0
    page_kinds: set[tuple[int, int]] = set()


Value = TypeVar("Value")


def _understand(databases: str, decode: Callable[[bytes], Value], data: bytes) -> Value:
    """Decode a key or value of the index.

    Raises:
        CorruptIndexError: the store never writes such bytes.
    """
    try:
        return decode(data)
    except (struct.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptIndexError(f"an entry of {databases} is damaged: {error}") from error


encode = msgspec.msgpack.Encoder().encode
decode_meta = partial(_understand, "`meta`", Decoder(Meta).decode)
decode_totals = partial(_understand, "`namespaces`", Decoder(Totals).decode)
decode_count = partial(_understand, "`keys`", Decoder(Counted).decode)
_decode_segment = partial(_understand, "`segments`", Decoder(SegmentState).decode)


def decode_segment(data: bytes) -> SegmentState:
    """Decode the state of a segment; an impossible state raises CorruptIndexError."""
    state = _decode_segment(data)
    if state.num_used > state.num_extents:
        raise CorruptIndexError(f"an entry of `segments` is damaged: {state} is impossible")
    return state


# --- keys -------------------------------------------------------------------------------------


def to_us(time_s: float) -> int:
    """Convert a time to whole microseconds, by which the secondary keys are sorted."""
    return min(int(min(max(time_s * 1e6, 0.0), 1e20)), (1 << 64) - 1)


def expiry_key(record: BlockRecord) -> bytes:
    """Key of `expiry`: the soonest to expire sorts first."""
    return _EXPIRY.pack(to_us(record.expires_at)) + record.block_hash


def split_expiry_key(key: bytes) -> tuple[int, bytes]:
    """Undo `expiry_key`: (microseconds, block hash)."""
    return _understand("`expiry`", _EXPIRY.unpack_from, key)[0], key[_EXPIRY.size :]


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


def hash_of_order(order: bytes) -> bytes:
    """Return the block hash in what `lru_order` returns."""
    if not (block_hash := order[_LRU.size - TENANT_BYTES :]):
        raise CorruptIndexError("a key of `lru` is damaged: it names no block")
    return block_hash


ORDERS = {"expiry": expiry_key, "lru": lru_key}
"""The databases that order the blocks, and how a record's key in each of them is made."""


def segment_key(segment: int) -> bytes:
    """Return a segment's key in `segments`."""
    return _SEGMENT.pack(segment)


def split_segment_key(key: bytes) -> int:
    """Undo `segment_key`."""
    (segment,) = _understand("`segments`", _SEGMENT.unpack, key)
    return int(segment)


def extent_key(extent: Extent) -> bytes:
    """Return an extent's key in the lists `pending` and `free`."""
    return _EXTENT.pack(*extent)


def split_extent_key(key: bytes) -> Extent:
    """Undo `extent_key`."""
    return Extent(*_understand("`pending` or `free`", _EXTENT.unpack, key))
