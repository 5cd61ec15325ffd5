"""The parts that promotion and demotion share, and the counters that they keep."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tieredkv.block_pool import Block, BlockPool
from tieredkv.cache.directory import Directory, Entry
from tieredkv.clock import Clock
from tieredkv.storage.client import StoreClient
from tieredkv.transfer import BlockTransfer
from tieredkv.types import BlockHash


@dataclass(slots=True)
class CacheCounters:
    """Counts since start; blocks unless the name says otherwise.

    Attributes:
        allocation_waits: times an allocation found room only behind a copy still under way.
        demotions_dropped: blocks evicted without the copy below that they should have had.
        load_failures: by reason; each was recomputed.
    """

    promoted_host_blocks: int = 0
    promoted_disk_blocks: int = 0
    demoted_host_blocks: int = 0
    demoted_disk_blocks: int = 0
    demotions_dropped: int = 0
    allocation_waits: int = 0
    expired_blocks: int = 0
    load_failures: Counter[str] = field(default_factory=Counter)
    store_failures: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Tiers:
    """The tiers of one engine.

    Attributes:
        device, host: pools of block-sized slots; the host pool's block ids are arena pages.
        transfer: copies between them; its tags are lists of promotions or of demoted blocks.
        store: the disk tier, or None.
        block_bytes: payload bytes of one block.
    """

    device: BlockPool
    host: BlockPool
    directory: Directory
    transfer: BlockTransfer[Any]
    store: StoreClient | None
    clock: Clock
    block_bytes: int
    counters: CacheCounters = field(default_factory=CacheCounters)

    def live_entry(self, block_hash: BlockHash, now: float) -> Entry | None:
        """Return the entry of a block that may still be served."""
        entry = self.directory.get(block_hash)
        if entry is None or self.directory.is_expired(entry, now):
            return None
        return entry

    def forget_if_absent(self, block_hash: BlockHash) -> None:
        """Drop the entry once neither RAM tier holds the block."""
        if self.device.lookup(block_hash) is None and self.host.lookup(block_hash) is None:
            self.directory.forget(block_hash)

    def expire(self, entry: Entry) -> None:
        """Make a block unreachable now; users that hold it keep its memory until they end."""
        self.device.drop(entry.block_hash)
        self.host.drop(entry.block_hash)
        self.directory.forget(entry.block_hash)
        self.counters.expired_blocks += 1


def release_to_pool(pool: BlockPool, blocks: list[Block]) -> None:
    """Release blocks of one chain, head first in `blocks`, so that the tail is evicted first."""
    pool.release(blocks[::-1])
