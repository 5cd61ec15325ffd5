"""What appears in each tier and what leaves it, for those who follow the tiers from outside.

The pools tell of blocks in VRAM and host memory, and the store of blocks on disk. A block is
announced if the token ids of its request are given (see `Chain.token_ids`); all other blocks are
passed over in silence. This module knows neither what a follower is nor how it is told.

Called by the engine's thread only.
"""

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from tieredkv.cache.chain import Chain
from tieredkv.cache.counters import CacheCounters
from tieredkv.cache.pool import BlockPool, PoolChange
from tieredkv.errors import IntegrityError
from tieredkv.types import BlockHash, Tier


class BlockTokens(NamedTuple):
    """What an announced block holds.

    Attributes:
        parent_hash: of the block before it; None for the first of a chain.
        token_ids: u32 in the machine's byte order.
    """

    parent_hash: BlockHash | None
    token_ids: bytes


class Change(NamedTuple):
    """A block that has appeared in a tier, or has left it if `content` is None."""

    tier: Tier
    block_hash: BlockHash
    content: BlockTokens | None


Publish = Callable[[list[Change]], bool]
"""Takes the changes of a step, oldest first, without waiting; returns whether it took them."""


class BlockEvents:
    """Gathers the changes of a step.

    Nothing is gathered before `publish_to`. Memory grows with the announced blocks: some 300 bytes
    for each one that RAM holds, and some 100 for each one on disk.

    Invariant (`check`): contents are known of no block that neither pool has in its index.

    Args:
        device, host: the pools of VRAM and host memory.
        block_size: tokens of one block.
        counters: count the batches.
    """

    def __init__(
        self, device: BlockPool, host: BlockPool, block_size: int, counters: CacheCounters
    ) -> None:
        self._pools = {Tier.DEVICE: device, Tier.HOST: host}
        self._block_size, self._counters = block_size, counters
        self._tier_of = {device: Tier.DEVICE, host: Tier.HOST}
        self._in_pools: list[PoolChange] = []  # which the pools fill, and `_take_in` empties
        self._publish: Publish = lambda _: True
        self._changes: list[Change] = []
        self._contents: dict[BlockHash, BlockTokens] = {}  # of blocks in an index of the pools
        self._on_disk: set[BlockHash] = set()  # announced there

    def publish_to(self, publish: Publish) -> None:
        """Have each `flush` publish what has changed since the last one."""
        self._publish = publish
        for pool in self._pools.values():
            pool.changes = self._in_pools

    def flush(self) -> None:
        """Publish the changes since the last call; called once a step."""
        self._take_in()
        if self._changes:
            changes, self._changes = self._changes, []
            self._counters.event_batches += 1
            self._counters.dropped_event_batches += not self._publish(changes)

    # VRAM and host memory

    def learn(self, chain: Chain, first: int, last: int) -> None:
        """Learn the contents of the blocks `[first, last)` of a chain, which have a place in RAM.

        Blocks that were not known and are there already are announced.
        """
        if chain.token_ids is None:
            return
        self._take_in()
        contents, hashes = self._contents, chain.hashes
        for index in range(first, last):
            if (block_hash := hashes[index]) in contents:
                continue
            contents[block_hash] = content = self._content(chain, index)
            for tier, pool in self._pools.items():
                block = pool.lookup(block_hash)
                if block is not None and block.is_ready:
                    self._changes.append(Change(tier, block_hash, content))

    def _take_in(self) -> None:
        """Note what has appeared in the pools and has left them since the last call."""
        for pool, block_hash, is_there, was_ready in self._in_pools:
            content = self._contents.get(block_hash)
            if content is not None and (is_there or was_ready):
                content_now = content if is_there else None
                self._changes.append(Change(self._tier_of[pool], block_hash, content_now))
        for _, block_hash, _, _ in self._in_pools:
            if not any(each.lookup(block_hash) for each in self._pools.values()):
                self._contents.pop(block_hash, None)
        self._in_pools.clear()

    def _content(self, chain: Chain, index: int) -> BlockTokens:
        assert chain.token_ids is not None
        start = index * self._block_size
        tokens = chain.token_ids[start : start + self._block_size].tobytes()
        return BlockTokens(chain.hashes[index - 1] if index else None, tokens)

    # The disk

    def note_written(self, block_hash: BlockHash) -> None:
        """Announce a block of RAM that was written to disk."""
        self._take_in()
        content = self._contents.get(block_hash)
        if content is not None and block_hash not in self._on_disk:
            self._on_disk.add(block_hash)
            self._changes.append(Change(Tier.DISK, block_hash, content))

    def note_found(self, chain: Chain, found: Collection[bytes]) -> None:
        """Announce the blocks of a chain that the disk has told of, its head first."""
        if chain.token_ids is None:
            return
        self._take_in()
        for index, block_hash in enumerate(chain.hashes):
            if block_hash in found and block_hash not in self._on_disk:
                self._on_disk.add(block_hash)
                content = self._contents.get(block_hash) or self._content(chain, index)
                self._changes.append(Change(Tier.DISK, block_hash, content))

    def note_gone(self, block_hashes: Iterable[bytes]) -> None:
        """Announce that blocks have left the disk."""
        self._take_in()
        for block_hash in map(BlockHash, block_hashes):
            if block_hash in self._on_disk:
                self._on_disk.remove(block_hash)
                self._changes.append(Change(Tier.DISK, block_hash, None))

    def forget_disk(self) -> None:
        """Announce that nothing is on disk: what a new worker has is not known until it is used."""
        self.note_gone(list(self._on_disk))

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        self._take_in()
        for block_hash in self._contents:
            if not any(pool.lookup(block_hash) for pool in self._pools.values()):
                name = block_hash.hex()[:12]
                raise IntegrityError(f"the tokens of block {name} are kept, but it is not in RAM")
