"""What a replay knows of a block, and how it lends one to the disk."""

from collections.abc import Sequence

import msgspec

from tieredkv.tier import BlockLife, Lent
from tieredkv.types import BlockHash


class Life(msgspec.Struct, gc=False):
    """A block and its times.

    Attributes:
        block_hash: the block.
        position: index of the block in its prompt.
        computed_at, last_used: as of a `catalog.Entry`.
        expires_at: when it becomes unreachable on disk; 0.0 if it may not go there.
        claims: as of a `catalog.Entry`.
        is_on_disk: whether the disk has stored it, and has not told that it is gone.
    """

    block_hash: BlockHash
    position: int
    computed_at: float
    last_used: float
    expires_at: float
    claims: frozenset[str] = frozenset()
    is_on_disk: bool = False


def lent(some: Sequence[Life], stored: Sequence[BlockLife | None]) -> list[Lent]:
    """Return pages for blocks; a trace tells no more of a block than its hash and its place."""
    return [
        Lent(
            page_id=page,
            block_hash=life.block_hash,
            root=b"",
            parent_hash=b"",
            position=life.position,
            namespace=b"",
            size_bytes=1,
            life=each,
        )
        for page, (life, each) in enumerate(zip(some, stored, strict=True))
    ]
