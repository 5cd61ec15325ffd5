"""A store as its operator sees it: its chains. It reads the index and changes nothing."""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from contextlib import suppress

import numpy as np

from tieredkv.errors import CorruptBlockError
from tieredkv.storage.codec import Located
from tieredkv.storage.index import IndexTxn
from tieredkv.storage.results import ChainInfo
from tieredkv.types import BlockRecord

_KEY_BYTES = 8


class Chains:
    """Who follows whom among the stored blocks, gathered in one walk, at sixteen bytes a block.

    Blocks may come and go meanwhile; it is as right as any list is a moment later. It knows a block
    by the first bytes of its hash, so one in 10^13 may be taken for another's parent.
    """

    def __init__(self) -> None:
        self._blocks = array("Q")
        self._parents = array("Q")
        self.leaves: list[bytes] = []

    def add(self, records: Iterable[BlockRecord]) -> None:
        """Take blocks into account."""
        for record in records:
            self._blocks.append(_key(record.block_hash))
            self._parents.append(_key(record.parent_hash))

    def starts_of_leaves(self) -> list[bytes]:
        """First bytes of each block that none follows; nothing is added after this."""
        blocks, parents = (np.array(keys, np.uint64) for keys in (self._blocks, self._parents))
        parents.sort()
        self._parents = array("Q", parents.tobytes())
        behind = np.searchsorted(parents, blocks, "right")
        leaves = blocks[behind == np.searchsorted(parents, blocks)].tolist()
        return [key.to_bytes(_KEY_BYTES, "big") for key in leaves]

    def named(self, chain_id: str) -> list[bytes]:
        """The leaves whose hash starts with these hex digits, if there are any digits."""
        wanted = chain_id.lower()
        return [leaf for leaf in self.leaves if wanted and leaf.hex().startswith(wanted)]

    def num_children(self, block_hash: bytes) -> int:
        """How many stored blocks follow this one."""
        key = _key(block_hash)
        return bisect_right(self._parents, key) - bisect_left(self._parents, key)


def climb(txn: IndexTxn, leaf: bytes, now: float) -> Iterator[Located]:
    """The stored blocks of a chain, from its leaf on; it ends at a hole."""
    block_hash, below = leaf, math.inf
    with suppress(CorruptBlockError):
        while (located := txn.get(block_hash)) and located.record.position < below:
            if now >= located.record.expires_at:
                break
            yield located
            block_hash, below = located.record.parent_hash, located.record.position


def sum_up(
    txn: IndexTxn, chains: Chains, leaf: bytes, shared: dict[bytes, ChainInfo], now: float
) -> list[ChainInfo]:
    """Describe a chain, if it is there; where chains part, what they share is summed up once."""
    path: list[Located] = []
    info = None
    for located in climb(txn, leaf, now):
        if (info := shared.get(located.record.block_hash)) is not None:
            break
        path.append(located)
    for located in reversed(path):
        info = _extend(info, located)
        if chains.num_children(located.record.block_hash) > 1:
            shared[located.record.block_hash] = info
    return [info] if info else []


def _key(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:_KEY_BYTES].ljust(_KEY_BYTES, b"\0"), "big")


def _extend(before: ChainInfo | None, located: Located) -> ChainInfo:
    record = located.record
    return ChainInfo(
        id=record.block_hash.hex(),
        namespace=record.namespace.hex(),
        root=record.root.hex(),
        blocks=1 + (before.blocks if before else 0),
        last_position=record.position,
        bytes=record.size_bytes + (before.bytes if before else 0),
        stored_bytes=located.payload_bytes + (before.stored_bytes if before else 0),
        retention=record.retention,
        computed_at_min=min(record.computed_at, before.computed_at_min if before else 1e300),
        computed_at_max=max(record.computed_at, before.computed_at_max if before else 0.0),
        expires_at_min=min(record.expires_at, before.expires_at_min if before else 1e300),
        last_used_max=max(record.last_used, before.last_used_max if before else 0.0),
        hits=record.hits + (before.hits if before else 0),
    )
