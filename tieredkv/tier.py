"""The protocol of a tier that backs an engine's memory, and all that the two tell each other.

The engine lends a page with the name of a block: to have the block loaded into it, or stored from
it. It says what it knows of the block from the chain of tokens, so that the tier can tell another
block that it finds under the same name. A loan ends with an event, and only with that.

This module knows no tier. The disk is one (`storage.client.client`), and the engine opens what
`engine.parts.TIER` names. To have another one in its place, implement `BackingTier`
and name it there; `tests/folder_tier.py` is a small one.
"""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import msgspec

from tieredkv.types import BlockRecord

FINGERPRINT_BYTES = 8
"""Bytes of a hash by which a block is known. One that is taken for another is a miss."""


_MAX_U32 = 0xFFFF_FFFF


class Times(NamedTuple):
    """When a block will expire, was computed and was last used; see `BlockRecord`."""

    expires_at: float
    computed_at: float
    last_used: float


class BlockLife(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """How long a stored block lives and how it is used; see `BlockRecord`."""

    retention: str
    computed_at: float
    expires_at: float
    last_used: float
    pinned_until: float = 0.0
    hits: int = 0

    @classmethod
    def of(cls, record: BlockRecord) -> Self:
        """Return what a record says of a block's life."""
        return cls(**{name: getattr(record, name) for name in cls.__struct_fields__})


class Lent(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """A page on loan, and the block that is loaded into it or stored from it.

    A page is on one loan at a time, so the number of the page identifies the loan.

    Attributes:
        page_id: number of the page in the arena.
        block_hash, root, namespace, size_bytes: see `BlockRecord`.
        parent_hash, position: the same; None for a load by an engine that does not know them.
        kind, part, num_parts, page_form: see `BlockRecord`.
        life: of a block that is stored; None for a load.
    """

    page_id: int
    block_hash: bytes
    root: bytes
    parent_hash: bytes | None
    position: int | None
    namespace: bytes
    size_bytes: int
    kind: int = 0
    part: int = 0
    num_parts: int = 1
    page_form: int = 0
    life: BlockLife | None = None

    @classmethod
    def of(cls, record: BlockRecord, page_id: int) -> Self:
        """Return a page for the block of a record."""
        fields = {it: getattr(record, it) for it in _IDENTITY}
        return cls(page_id=page_id, life=BlockLife.of(record), **fields)

    @property
    def record(self) -> BlockRecord:
        """The record of a block that is stored."""
        assert self.life is not None, "a block is stored with its life"
        fields = {name: getattr(self, name) for name in _IDENTITY}
        return BlockRecord(**fields, **msgspec.structs.asdict(self.life))

    def is_of(self, record: BlockRecord) -> bool:
        """Return whether a record that was found under the block's name is that of the block."""
        return all(
            expected == getattr(record, name)
            for name in _IDENTITY
            if (expected := getattr(self, name)) is not None
        )


_IDENTITY = [name for name in Lent.__struct_fields__ if name in BlockRecord.__struct_fields__]


class TouchItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One use of a block, and the claim that came with it if that lengthens the block's life.

    Attributes:
        hits: how many requests have found the block, as far as is known; None for one more.
    """

    block_hash: bytes
    last_used: float
    expires_at: float | None = None
    retention: str | None = None
    pinned_until: float = 0.0
    hits: int | None = None


class Ended(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end of one loan; `reason` tells why it failed, and is empty if it succeeded."""

    page_id: int
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether the block was loaded or stored."""
        return not self.reason


class Loaded(Ended, frozen=True, array_like=True, gc=False, tag="loaded"):
    """The end of one load.

    Attributes:
        life: of the block, if `ok`.
        ended_at: when the bytes had been read, in seconds of the system's monotonic clock.
    """

    life: BlockLife | None = None
    ended_at: float = 0.0


class Stored(Ended, frozen=True, array_like=True, gc=False, tag="stored"):
    """The end of one store; if `ok`, the block survives a kill of every tieredkv process.

    Attributes:
        is_held_back: whether reads or the write limit delayed the write, so that the time that it
            took does not tell how fast the disk is.
        ended_at: when the bytes had been written, in seconds of the system's monotonic clock; 0.0
            if nothing was written.
    """

    is_held_back: bool = False
    ended_at: float = 0.0


class Held(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="held"):
    """Blocks that the tier has, each with the second in which it expires; the last word counts.

    A tier that tells of any block tells of all: those that it has when it begins, in as many pieces
    as it likes, each one that it stores from then on, at the latest with its `Stored`, and each one
    whose second has changed. `Gone` tells which of them are left no more. A tier that never tells
    is asked by `lookup`.

    Attributes:
        fingerprints: the first eight bytes of each hash.
        seconds: until when each block is kept, in seconds since the epoch, rounded up; u32 in the
            byte order of little-endian machines.
        is_first: whether what was told before does not count any more.
        is_whole: whether all blocks that the tier has have been told now.
        num_blocks: with `is_first`, about how many will be told.
    """

    fingerprints: bytes = b""
    seconds: bytes = b""
    is_first: bool = False
    is_whole: bool = False
    num_blocks: int = 0

    @classmethod
    def of(cls, expires_at: Mapping[bytes, float], num_bytes: int = FINGERPRINT_BYTES) -> Self:
        """Return what tells of some blocks, of whose hashes it has so many bytes."""
        heads = b"".join([each[:num_bytes] for each in expires_at])
        return cls(fingerprints=heads, seconds=in_seconds([*expires_at.values()]))


def in_seconds(expires_at: Iterable[float]) -> bytes:
    """Return times as `Held` has them."""
    seconds = [min(math.ceil(max(each, 0.0)), _MAX_U32) for each in expires_at]
    return struct.pack(f"<{len(seconds)}I", *seconds)


OPERATOR = "operator"
"""Why a block has gone that an operator has deleted."""


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """Blocks that have left the tier; see `Held`.

    Attributes:
        hashes: of the blocks.
        reason: `capacity` (they made room for others), `expired`, `damaged`, `OPERATOR`, or why the
            engine had them deleted.
        num_bytes: what the blocks took in the tier, as far as is known.
    """

    hashes: list[bytes]
    reason: str
    num_bytes: int


class Restarted(msgspec.Struct, frozen=True):
    """Another worker serves the tier, which may have other blocks now."""


class LookupDone(msgspec.Struct, frozen=True):
    """What a lookup found.

    Attributes:
        job: of the lookup.
        found: by block hash, what the tier has noted of the block; never empty. Only the tier reads
            it, in `BackingTier.times_of`, as the engine uses few of them at a time.
    """

    job: int
    found: dict[bytes, bytes] = {}


class ProbeDone(msgspec.Struct, frozen=True, array_like=True, tag="probed"):
    """The end of a probe.

    Attributes:
        job: of the probe.
        ended_at: when each block had been read, ascending, in seconds of the system's monotonic
            clock. Blocks that could not be read have none.
    """

    job: int
    ended_at: list[float] = []


class ControlRequest(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """An operator's call that also concerns the engine's own tiers; the engine answers it.

    Attributes:
        call: as an operator's process encoded it; see `tieredkv.operate.calls`.
        roots: of chains on disk, each with its namespace, for a prompt that was found nowhere.
    """

    id: int
    call: bytes
    roots: dict[bytes, bytes] = {}


Event = LookupDone | ProbeDone | Loaded | Stored | Held | Gone | Restarted | ControlRequest
"""What a tier tells the engine."""


class BlockNames(Protocol):
    """What a tier calls blocks; operators' ids are made of these names. Any thread may use it."""

    def hide(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the names of blocks."""

    def reveal(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the hashes of blocks by their names."""


class _Hashes:
    """Calls blocks by their hashes."""

    def hide(self, hashes: Sequence[bytes]) -> list[bytes]:
        return [*hashes]

    def reveal(self, names: Sequence[bytes]) -> list[bytes]:
        return [*names]


HASHES: BlockNames = _Hashes()
"""The names in a tier that calls blocks by their hashes, and where there is no tier."""


class TierFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a tier since it was opened, sizes as they are now; a tier may have more of them.

    Attributes:
        blocks, bytes_live: stored blocks and their bytes, expired ones not yet swept included.
        bytes_files: bytes that the tier occupies.
        bytes_budget: bytes that it may occupy.
        bytes_written, bytes_read: bytes that were written and read.
        num_stored, num_expired, num_evicted: blocks that were stored, that expired, and that made
            room for others.
        faults: faults by reason; each was a miss, or a block that was not stored.
        deleted: blocks deleted on request by reason.
    """

    blocks: int = 0
    bytes_live: int = 0
    bytes_files: int = 0
    bytes_budget: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    num_stored: int = 0
    num_expired: int = 0
    num_evicted: int = 0
    faults: dict[str, int] = {}
    deleted: dict[str, int] = {}


class TierState(NamedTuple):
    """Whether a tier serves.

    Attributes:
        is_open: whether it finds and takes blocks; else lookups miss and loans fail at once.
        why: why it is off; while it is open, why it could not store the last blocks. Empty if all
            is well, or if the reason is not known yet.
        room_bytes: how many bytes more it may occupy before other blocks have to go.
        pid: of the process that serves it; None if there is none, or it is down.
    """

    is_open: bool
    why: str
    room_bytes: int
    pid: int | None = None


class BackingTier(Protocol):
    """A tier that backs the engine's memory, as the engine sees it; nothing waits for its medium.

    The engine's thread calls it. A page is on loan until its event, whatever becomes of the tier.

    Attributes:
        shares: the part of the budget that each tenant keeps, whatever other tenants store; to
            change them, assign other ones.
        names: what an operator's ids are made of.
    """

    shares: dict[bytes, float]
    names: BlockNames

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """Ask which blocks are stored and not expired; answered by `LookupDone` of this job."""

    def times_of(self, found: bytes, /) -> Times:
        """Read the times of a block from what a lookup has found."""

    def load(self, lent: Sequence[Lent]) -> None:
        """Read blocks into pages; each page is on loan until its `Loaded`."""

    def store(self, lent: Sequence[Lent]) -> None:
        """Write blocks from pages; each page is on loan until its `Stored`."""

    def touch(self, items: Sequence[TouchItem]) -> None:
        """Refresh blocks after a hit; a touch may be lost."""

    def delete(self, hashes: Sequence[bytes], reason: str) -> None:
        """Make blocks unreachable, those that are being written too; no deletion is lost."""

    def reply(self, id: int, body: dict[str, Any], has_more: bool = False) -> None:
        """Answer a `ControlRequest`, whole or in part."""

    def poll(self) -> list[Event]:
        """Return what has happened since the last call, oldest first."""

    def stats(self) -> TierFigures:
        """Return the last known figures."""

    def state(self) -> TierState:
        """Return whether it serves."""

    def close(self) -> None:
        """End what was accepted, and end; every loan ends."""
