"""What the verbs tell of chains, blocks and namespaces: plain values that are sent as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from tieredkv.storage.client.names import Names
from tieredkv.types import BlockRecord, Tier

NOTHING_EVICTED: Mapping[str, Any] = {
    "evicted_blocks": 0,
    "freed_bytes": 0,
    "refused_blocks": 0,
    "unknown_ids": [],
    "disk": None,
}
"""The answer of an eviction that matches no chain."""


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


def hidden(names: Names, blocks: Sequence[BlockInfo]) -> list[BlockInfo]:
    """Return descriptions of blocks with their names in the places of hashes, all in hex."""
    digests = [it for each in blocks for it in (each.block_hash, each.parent_hash)]
    hid = iter(names.hide([*map(bytes.fromhex, digests)]))
    pairs = zip(blocks, hid, hid, strict=False)
    return [replace(it, block_hash=a.hex(), parent_hash=b.hex()) for it, a, b in pairs]


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
