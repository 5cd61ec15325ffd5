"""Arguments and results of the block store: plain values that can be sent to another process."""

from collections.abc import Mapping
from typing import Any

import msgspec

from tieredkv.errors import ConfigError
from tieredkv.types import BlockRecord, Tier


class TouchItem(msgspec.Struct, frozen=True, array_like=True):
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


NOTHING_EVICTED: Mapping[str, Any] = {
    "evicted_blocks": 0,
    "freed_bytes": 0,
    "refused_blocks": 0,
    "unknown_ids": [],
    "disk": None,
}
"""The answer of an eviction that matches no chain."""


_ID_DIGITS = 32
MIN_ID_DIGITS = 8
"""An id with fewer digits would name other chains, too, in a store of millions of blocks."""


ID_HINT = f"`ls` lists the ids, of which each part needs at least {MIN_ID_DIGITS} hex digits"


def chain_id(first: bytes, last: bytes) -> str:
    """Return the id of a chain from the hashes of its own first block and of its last one."""
    return f"{first.hex()[:_ID_DIGITS]}-{last.hex()[:_ID_DIGITS]}"


def short_id(chain_id: str, num_digits: int) -> str:
    """Shorten both hashes of a chain's id; the result is an id of the chain, too."""
    return "-".join(part[:num_digits] for part in chain_id.split("-"))


def named_blocks(chain_id: str) -> tuple[str, str] | None:
    """Return the digits of the first and of the last block in an id, "" if it names no last block.

    Returns None for a text that cannot be an id, as it has too few digits or other characters.
    """
    first, dash, last = chain_id.lower().partition("-")
    parts = (first, last) if dash else (first,)
    is_id = all(len(each) >= MIN_ID_DIGITS and not set(each) - _HEX for each in parts)
    return (first, last) if is_id else None


_HEX = frozenset("0123456789abcdef")


def namespace_prefix(text: str) -> str:
    """Return the first digits of a namespace in lower case.

    Raises:
        ConfigError: the text cannot be those.
    """
    if not text or set(text.lower()) - _HEX:
        what = "is not the beginning of a namespace, which has hexadecimal digits only"
        raise ConfigError(f"`{text}` {what}; `ls` lists the namespaces")
    return text.lower()


class ChainInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One chain: a block without a successor in any tier, and all blocks before it.

    An id is made of the hashes of two blocks: the chain's first own block, which follows the last
    block shared with another chain, and the chain's last block. Eviction takes the last blocks of a
    chain first, and the first blocks expire first. The id names what is left of the chain as long
    as one of the two blocks is in some tier. Either hash, or its first digits, is an id as well.

    Attributes:
        id: the first digits of both hashes, with a dash between them.
        namespace, root: hex digests; chains of one model, in one namespace, share their root.
        blocks: its blocks in any tier, those shared with other chains included.
        last_position: position of the last block; `blocks - 1` where there is no hole.
        bytes, stored_bytes: size of these blocks, each counted once, and of their payloads as they
            are on disk; blocks that the disk does not have add nothing to the latter.
        model: name of the model; None where it is not known.
        tokens: of these blocks; None where the model is not known.
        blocks_by_tier: how many of these blocks each tier has.
        retention: retention policy of the last block.
        last_used: last use of the last block; `last_used_max` is that of any of the blocks.
        hits: how often the first own block was found.
    """

    id: str
    namespace: str
    root: str
    blocks: int
    last_position: int
    bytes: int
    stored_bytes: int
    model: str | None = None
    tokens: int | None = None
    blocks_by_tier: dict[Tier, int] = {}
    retention: str
    computed_at_min: float
    computed_at_max: float
    expires_at_min: float
    last_used: float
    last_used_max: float
    hits: int

    @property
    def tiers(self) -> list[Tier]:
        """The tiers that have some of it, the fastest first."""
        return [tier for tier in Tier if self.blocks_by_tier.get(tier)]


class BlockInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One block, and the tiers that have a copy.

    Attributes:
        block_hash, parent_hash, root, namespace: hex digests; see `BlockRecord`.
        position: index in its chain, 0 for the first.
        tiers: where it is, the fastest tier first.
        size_bytes: before any compression.
        stored_bytes, codec: size of its payload on disk, and how it is compressed there; None where
            the disk has no copy.
        retention: the longest retention policy that asked for it.
        expires_at: unreachable in every tier from this moment on.
        pinned_until: until then it is evicted last; 0.0 without a pin.
    """

    block_hash: str
    parent_hash: str
    root: str
    namespace: str
    position: int
    tiers: list[Tier]
    size_bytes: int
    stored_bytes: int | None = None
    codec: str | None = None
    retention: str
    computed_at: float
    last_used: float
    expires_at: float
    pinned_until: float = 0.0
    hits: int

    @classmethod
    def of(
        cls,
        record: BlockRecord,
        tiers: list[Tier],
        *,
        stored_bytes: int | None = None,
        codec: str | None = None,
    ) -> "BlockInfo":
        """Describe the block of a record."""
        return cls(
            block_hash=record.block_hash.hex(),
            parent_hash=record.parent_hash.hex(),
            root=record.root.hex(),
            namespace=record.namespace.hex(),
            position=record.position,
            tiers=tiers,
            size_bytes=record.size_bytes,
            stored_bytes=stored_bytes,
            codec=codec,
            retention=record.retention,
            computed_at=record.computed_at,
            last_used=record.last_used,
            expires_at=record.expires_at,
            pinned_until=record.pinned_until,
            hits=record.hits,
        )


class NamespaceUse(msgspec.Struct, kw_only=True):
    """What one model has stored in one namespace.

    Attributes:
        namespace: hex digest; the first `TENANT_BYTES` bytes of it identify the tenant.
        root: hex digest that the chains of one model, in one namespace, share.
        model: name of the model; None where it is not known.
        bytes: size of the blocks, before any compression.
        last_used: the latest use of any of the blocks.
    """

    namespace: str
    root: str
    model: str | None = None
    blocks: int = 0
    bytes: int = 0
    last_used: float = 0.0


class ErasureResult(msgspec.Struct, kw_only=True):
    """What is left of what should be erased.

    Attributes:
        checked: extents whose headers were read.
        keys: payload keys that are left in the key table.
        blocks: blocks that are left in the index.
        extents: extents that still hold a payload.
    """

    checked: int = 0
    keys: int = 0
    blocks: int = 0
    extents: int = 0

    @property
    def is_erased(self) -> bool:
        """Whether nothing is left."""
        return not (self.keys or self.blocks or self.extents)


class VerifyResult(msgspec.Struct, kw_only=True):
    """What `verify` found."""

    checked: int = 0
    bad: int = 0
    by_reason: dict[str, int] = msgspec.field(default_factory=dict)
    repaired: int = 0

    def add(self, reason: str, *, is_repaired: bool) -> None:
        """Count one finding."""
        self.bad += 1
        self.by_reason[reason] = self.by_reason.get(reason, 0) + 1
        self.repaired += is_repaired


class Lifetimes(msgspec.Struct, kw_only=True):
    """How long the disk keeps blocks, by retention policy; see `tieredkv.storage.lifetimes`.

    Attributes:
        measured_s: the time that the write rates were measured for, at most the last two hours.
        write_bytes_per_s: the present write rate, in bytes of extents; empty until it was measured
            for ten minutes, like all that is told by it.
        promised_s: from the computation of the blocks that were written to their expiry.
        expected_s: age at which such blocks will leave the disk on average, evicted or expired.
        needed_bytes: the `disk_size` that would keep every promise; None until the rate is known.
        ages_since: since when evicted and expired blocks count: for the last one or two days.
        evicted_age_p1_s, evicted_age_p50_s: age since their computation of the blocks that had to
            make room for others, to within 5 %; 1 % and half of them were not older.
        shortfall: why the promises will not be kept, and what would help; empty if they will.
    """

    measured_s: float = 0.0
    write_bytes_per_s: dict[str, float] = {}
    promised_s: dict[str, float] = {}
    expected_s: dict[str, float] = {}
    needed_bytes: int | None = None
    ages_since: float = 0.0
    num_evicted: dict[str, int] = {}
    num_expired: dict[str, int] = {}
    evicted_age_p1_s: dict[str, float] = {}
    evicted_age_p50_s: dict[str, float] = {}
    shortfall: str = ""


class Need(msgspec.Struct, frozen=True):
    """What a stopped store needs, as a verb that only looks has found.

    Attributes:
        code: for programs; docs/disk.md lists them.
        text: what is so, and what the next start of a server does about it.
    """

    code: str
    text: str


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a store since it was opened, sizes as they are now.

    Attributes:
        blocks, bytes_live: stored blocks and their payload, expired ones not yet swept included.
        bytes_files: what all files occupy (`st_blocks`), index included.
        bytes_index: what everything but the segment files occupies.
        bytes_pending: extents lent or waiting to be erased.
        bytes_written: headers, payload and padding written to the device; index pages are not
            counted.
        bytes_written_ever: the same since the store, or its index after a loss of it, was made.
        bytes_write_limit: bytes that may be written per second; None for no limit.
        num_extents_retired: extents that failed twice and are left alone.
        faults: cache faults in the store's life by reason; each was a miss, a block that was not
            stored, or (`index`) an index that was made again.
        deleted: blocks deleted on request by reason.
        encryption: `on`, `off`, or `no keys` if the store is encrypted and served without them.
        num_keys: payload keys, one for each namespace and hour of computing.
        compression, is_compressing: the setting, and whether new blocks are compressed.
        compression_trial: result of the trial of `auto`: the ratio, and the bytes per second
            decoded by one thread and read by all; empty before the trial.
        compression_ratio: bytes of the stored blocks before compression, divided by bytes after
            it; 0 if there are none.
        compression_rate, decompression_rate: bytes of blocks per second of one thread's time; 0 if
            nothing was packed or unpacked yet.
        store_error: why the last blocks could not be stored; empty once one was stored again.
        num_other_model: blocks that were of another model than the engine's when this model was
            loaded, so that no request can use them; None while they are not counted.
        num_lookups_dropped, num_touches_dropped: calls not carried out, because too much was
            waiting for a stuck worker; a dropped lookup is a miss, a dropped touch is lost.
        lifetimes: how long blocks are kept.
    """

    blocks: int
    bytes_live: int
    bytes_files: int
    bytes_index: int
    bytes_budget: int
    bytes_pending: int
    bytes_written: int
    bytes_written_ever: int
    bytes_write_limit: int | None
    bytes_read: int
    bytes_erased: int
    num_stored: int
    num_expired: int
    num_evicted: int
    num_extents_retired: int
    faults: dict[str, int]
    deleted: dict[str, int]
    encryption: str
    num_keys: int
    compression: str
    is_compressing: bool
    compression_trial: dict[str, float]
    compression_ratio: float
    compression_rate: float
    decompression_rate: float
    direct_io: bool
    punch_hole: bool
    store_error: str = ""
    num_other_model: int | None = None
    num_lookups_dropped: int = 0
    num_touches_dropped: int = 0
    lifetimes: Lifetimes = msgspec.field(default_factory=Lifetimes)


_NO_FIGURE = {
    "faults": {},
    "deleted": {},
    "compression_trial": {},
    "compression": "",
    "encryption": "",
}
NO_STATS = StoreStats(
    **{  # type: ignore[arg-type]
        name: _NO_FIGURE.get(name, 0)
        for name in StoreStats.__struct_fields__
        if name not in ("store_error", "num_other_model", "lifetimes")
    }
)
"""The figures of a store that was not opened yet."""
