"""The entries of the LMDB index: what each of its databases holds, and how it is decoded.

This module knows keys and values (docs/format.md); it does not know LMDB. Bytes that the store
never writes raise CorruptIndexError.
"""

import struct
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

import msgspec

from tieredkv.errors import CorruptIndexError
from tieredkv.storage.format.record import expiry_key, extent_bytes_for, lru_key, order_hash
from tieredkv.storage.lifetimes import LifetimeCounts
from tieredkv.types import PAGE_ALIGNMENT_BYTES

NAMES = ("meta", "blocks", "expiry", "lru", "namespaces", "segments", "free", "pending", "keys")
"""The names of the databases."""

_MAX_U32 = (1 << 32) - 1

META_KEY = b"store"
"""The only key of `meta`."""


class Totals(NamedTuple):
    """How many blocks and payload bytes are stored, in all or in one namespace."""

    num_blocks: int
    payload_bytes: int

    def plus(self, num_blocks: int, payload_bytes: int) -> "Totals":
        """Return the sums; they never fall below zero, even if a damaged record was miscounted."""
        return Totals(max(self[0] + num_blocks, 0), max(self[1] + payload_bytes, 0))

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

    extent_bytes: int
    num_extents: int
    num_used: int


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
    """

    format: int = 0
    clock: float = 0.0
    next_segment: int = 1
    totals: Totals = Totals(0, 0)
    bytes_written: int = 0
    needs_rebuild: bool = False
    faults: dict[str, int] = {}
    lifetimes: LifetimeCounts = msgspec.field(default_factory=LifetimeCounts)
    num_encrypted: int = 0


ExtentList = Literal["pending", "free"]
"""A list of extents without a stored block: `pending` ones may hold old bytes, `free` ones none."""

ORDERS = {"expiry": expiry_key, "lru": lru_key}
"""The databases that order the blocks, and how a record's key in each of them is made."""

encode = msgspec.msgpack.Encoder().encode
_decode_meta = msgspec.msgpack.Decoder(Meta).decode
_decode_totals = msgspec.msgpack.Decoder(Totals).decode
_decode_count = msgspec.msgpack.Decoder(int).decode
_decode_segment = msgspec.msgpack.Decoder(SegmentState).decode
Value = TypeVar("Value")


def understand(database: str, decode: Callable[[bytes], Value], data: bytes) -> Value:
    """Decode a key or value of the index.

    Raises:
        CorruptIndexError: the store never writes such bytes.
    """
    try:
        return decode(data)
    except (struct.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptIndexError(f"an entry of `{database}` is damaged: {error}") from error


def decode_meta(data: bytes) -> Meta:
    """Decode what `meta` holds; an impossible number of a segment raises CorruptIndexError."""
    meta = understand("meta", _decode_meta, data)
    if not 0 < meta.next_segment <= _MAX_U32:
        text = f"an entry of `meta` is damaged: no segment has the number {meta.next_segment}"
        raise CorruptIndexError(text)
    return meta


def decode_totals(data: bytes) -> Totals:
    """Decode the counters of a namespace."""
    return understand("namespaces", _decode_totals, data)


def decode_count(data: bytes) -> int:
    """Decode how many blocks are encrypted under one key."""
    return understand("keys", _decode_count, data)


def decode_segment(data: bytes) -> SegmentState:
    """Decode the state of a segment; an impossible state raises CorruptIndexError."""
    state = understand("segments", _decode_segment, data)
    is_so = state.extent_bytes > 0 and state.extent_bytes % PAGE_ALIGNMENT_BYTES == 0
    if not is_so or not 0 <= state.num_used <= state.num_extents:
        raise CorruptIndexError(f"an entry of `segments` is damaged: {state} is impossible")
    return state


def decode_order(order: bytes) -> bytes:
    """Take the block hash from a key of `lru` without its tenant."""
    if not (block_hash := order_hash(order)):
        raise CorruptIndexError("a key of `lru` is damaged: it names no block")
    return block_hash


def segment_key(segment: int) -> bytes:
    """Return a segment's key in `segments`."""
    return segment.to_bytes(4, "big")
