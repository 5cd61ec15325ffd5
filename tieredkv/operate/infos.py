"""What the verbs tell of chains and blocks: plain values that are sent as JSON."""

import msgspec

from tieredkv.types import Tier


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
        is_anchor: whether all pages of windows are in the tiers that a request needs to go on
            behind this block; not told of a model without windows, which needs none.
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
    is_anchor: bool | msgspec.UnsetType = msgspec.UNSET
