"""The tiers, the links between them and the counters that promotion and demotion share."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tieredkv.cache.block import Block, Content
from tieredkv.cache.catalog import Catalog, Entry
from tieredkv.cache.compute_rate import ComputeRate
from tieredkv.cache.counters import CacheCounters
from tieredkv.cache.device_link import DeviceLink
from tieredkv.cache.disk_link import DiskLink
from tieredkv.cache.events import BlockEvents
from tieredkv.cache.miss_reasons import EVICTED
from tieredkv.cache.pool import BlockPool
from tieredkv.cache.presence import Presence
from tieredkv.cache.settings import CacheSettings
from tieredkv.cache.shares import Shares
from tieredkv.clock import Clock
from tieredkv.errors import IntegrityError
from tieredkv.tier import BackingTier
from tieredkv.types import BlockHash, Tier

logger = logging.getLogger(__name__)

_LOST = "a block that was promised to the disk has left memory without a copy there (%s)"


def count_failure(failures: Counter[str], reason: str, text: str) -> None:
    """Count a failed move or a lost block, and log the first one for each reason."""
    failures[reason] += 1
    if failures[reason] == 1:
        logger.warning(text, reason)


@dataclass(slots=True)
class Tiers:
    """The tiers of one engine, and what may move between them.

    A block is clean when its eviction loses nothing that was promised: a slower tier already has a
    copy, or no retention policy lets the block go to a slower tier.

    VRAM and host memory hold as many blocks as one pool of both sizes would: a page whose block is
    in use or young in VRAM is a duplicate, and goes before all others. It goes even if the disk is
    owed the block, which is then copied down once more; only pages that are being written stay.
    Once its block is one of the next to be evicted in VRAM, the page is what makes the block clean.
    From then on it is the youngest of the other pages.

    Attributes:
        device, host: pools of blocks; the host pool's block ids are arena pages.
        store: the disk tier, or None.
        device_link: copies between the pools; a tag holds when the copy began and its pairs of
            blocks.
        disk_link: reads and writes between the host pool and the disk tier.
        vram_bytes: bytes of one block in VRAM.
        payload_bytes: bytes of its content below VRAM: in a page, in a copy and on disk.
        block_size: tokens of one block.
        is_cpu: whether the device is the processor, which also moves the blocks.
        settings: how blocks move.
        compute_rate: of the device.
        shares: what is reserved for tenants.
        pools: the pools of the two RAM tiers.
        events: what appears in the tiers and leaves them, for followers outside.
        prefetched: blocks that were prefetched, and for how many queued requests; evicted last.
        presence: which blocks the disk has, as it has told.
        num_promoting: blocks that are being copied to VRAM, or are next; their pages are duplicates
            soon.
    """

    device: BlockPool
    host: BlockPool
    catalog: Catalog
    store: BackingTier | None
    device_link: DeviceLink[Any]
    clock: Clock
    vram_bytes: int
    payload_bytes: int
    block_size: int = 1
    is_cpu: bool = False
    settings: CacheSettings = field(default_factory=CacheSettings)
    counters: CacheCounters = field(default_factory=CacheCounters)
    compute_rate: ComputeRate = field(default_factory=lambda: ComputeRate(8192))
    shares: Shares = field(init=False)
    disk_link: DiskLink = field(init=False)
    pools: dict[Tier, BlockPool] = field(init=False)
    events: BlockEvents = field(init=False)
    prefetched: Counter[BlockHash] = field(default_factory=Counter)
    num_promoting: int = 0
    presence: Presence = field(default_factory=Presence)

    def __post_init__(self) -> None:
        self.disk_link = DiskLink(self.store, self.payload_bytes, self.counters)
        self.pools = {Tier.DEVICE: self.device, Tier.HOST: self.host}
        self.shares = Shares(self.pools.values(), self.store, self.clock)
        self.events = BlockEvents(self.device, self.host, self.block_size, self.counters)
        for pool in self.pools.values():
            pool.pinned, pool.prefetched = self.catalog.pinned, self.prefetched
            pool.superseded = self.catalog.superseded

    @property
    def bytes_in(self) -> dict[Tier, int]:
        """Bytes of a block in VRAM and in host memory."""
        return {Tier.DEVICE: self.vram_bytes, Tier.HOST: self.payload_bytes}

    @property
    def can_load(self) -> bool:
        """Whether blocks are promoted."""
        return self.settings.restore != "compute"

    def is_in_ram(self, block_hash: BlockHash) -> bool:
        """Return whether VRAM or host memory has a copy of the block, or one is on its way there.

        What is copied between the two arrives even if it is dropped meanwhile where it came from.
        """
        block, page = self.device.lookup(block_hash), self.host.lookup(block_hash)
        if block is not None and block.content >= Content.COPYING:
            return True
        # A page that is neither ready nor read into is being filled from VRAM.
        return page is not None and (page.is_ready or not self.disk_link.is_reading(block_hash))

    def is_owed_to_disk(self, block_hash: BlockHash | None) -> bool:
        """Return whether the block has yet to be written to disk; not if that was given up."""
        entry = self.catalog.get(block_hash)
        return entry is not None and not entry.is_droppable and self.is_promised(entry)

    def is_promised(self, entry: Entry) -> bool:
        """Return whether the disk should keep the block and does not have it."""
        if self.store is None or entry.is_on_disk or entry.block_hash in self.catalog.superseded:
            return False
        return self.catalog.disk_deadline(entry, self.clock.now()) is not None

    def note_not_on_disk(self, entry: Entry) -> None:
        """Note that the disk has no copy of a block after all."""
        self.catalog.note_not_on_disk(entry)
        self.recheck([entry.block_hash])

    @property
    def owed_bytes(self) -> int:
        """Bytes in RAM that the disk should keep and does not have."""
        if self.store is None:
            return 0
        return (len(self.catalog.owed) + len(self.catalog.given_up)) * self.payload_bytes

    @property
    def drain_s(self) -> float:
        """How many seconds a stop would need to write what is owed to the disk."""
        return self.owed_bytes / self.disk_link.write_rate.steady

    # What may be evicted

    def is_device_clean(self, block_hash: BlockHash) -> bool:
        """Return whether host memory has the block, or is owed nothing."""
        page = self.host.lookup(block_hash)
        if page is not None and page.is_ready:
            return True
        entry = self.catalog.get(block_hash)
        if entry is None or entry.is_droppable or block_hash in self.catalog.superseded:
            return True
        return not self.catalog.may_enter(entry.claims, Tier.HOST)

    def is_host_clean(self, block_hash: BlockHash) -> bool:
        """Return whether the disk is owed nothing, or the page is a duplicate anyway."""
        if block_hash not in self.catalog.owed or not self.is_owed_to_disk(block_hash):
            return True
        page = self.host.lookup(block_hash)
        return page is not None and page.is_double

    def recheck(self, hashes: Iterable[BlockHash]) -> None:
        """Tell the pools whether these blocks are clean; called after a change that decides it."""
        hashes = [*hashes]
        found = zip(hashes, self.device.find(hashes), self.host.find(hashes), strict=True)
        for block_hash, block, page in found:
            if block is not None:
                self.device.put_clean(block, self.is_device_clean(block_hash))
            if page is not None:
                self.host.put_clean(page, self.is_host_clean(block_hash))

    def forget_disk(self) -> None:
        """Note that the disk may have no copy of any block, so that it is owed all again."""
        given_up = self.catalog.forget_disk()
        self.events.forget_disk()
        self.recheck({**dict.fromkeys(self.host.hashes), **dict.fromkeys(given_up)})

    def supersede(self, hashes: Sequence[BlockHash]) -> None:
        """Have pages evicted first, which then go to no slower tier."""
        self.counters.superseded_pages += len(hashes)
        self.catalog.supersede(hashes)
        self._put_again(hashes)

    def _put_again(self, hashes: Sequence[BlockHash]) -> None:
        """Put blocks where they belong in the order of eviction."""
        self.recheck(hashes)
        for pool in self.pools.values():
            pool.touch(hashes)

    def _is_in_ram_only(self, block_hash: BlockHash) -> bool:
        """Return whether a block is in RAM and never goes to disk."""
        if (entry := self.catalog.get(block_hash)) is None:
            return False
        has_disk = self.store is not None and self.catalog.may_enter(entry.claims, Tier.DISK)
        return not (has_disk or entry.is_on_disk)

    def note_reach(self) -> None:
        """Have blocks evicted first that no request can go on behind any more.

        Those that may go to disk are left out, since what a request needs there may be on disk.
        """
        if not (changed := self.catalog.reach.take_changed()):
            return
        lost = [it for it, is_of_use in changed.items() if not is_of_use]
        lost = [it for it in lost if self._is_in_ram_only(it)]
        self.catalog.supersede(lost)
        found = self.catalog.need_again(it for it, is_of_use in changed.items() if is_of_use)
        self._put_again([*reversed(found), *reversed(lost)])

    # Pages

    def release_pages(self, pages: Iterable[Block]) -> None:
        """Release pages; those whose blocks VRAM keeps for longer are duplicates."""
        pages = [*pages]
        self.note_doubles(pages)
        self.host.release(pages)

    def touch_pages(self, hashes: Iterable[BlockHash]) -> None:
        """Make the pages of a chain the youngest; those whose blocks VRAM keeps are duplicates."""
        pages = self.host.find(dict.fromkeys(hashes))  # a block may be named twice
        found = [page for page in pages if page is not None]
        self.note_doubles(found)
        self.host.renew(found)

    def note_doubles(self, pages: Sequence[Block]) -> None:
        """Note which pages are duplicates, of blocks that VRAM keeps for longer."""
        owed = self.catalog.owed
        are_double = self.device.holds_young([page.block_hash for page in pages])
        for page, is_double in zip(pages, are_double, strict=True):
            if page.is_double != is_double:
                page.is_double = is_double
                if (block_hash := page.block_hash) is not None and block_hash in owed:
                    self.host.put_clean(page, self.is_host_clean(block_hash))

    def acquire(self, blocks: Iterable[Block]) -> None:
        """Use blocks of VRAM: it keeps those again that it would have evicted next."""
        due = self.device.acquire(blocks)
        pages = self.host.find(block.block_hash for block in due)
        self.note_doubles([page for page in pages if page is not None])

    def end_duplicates(self, pages: Iterable[Block]) -> None:
        """Make duplicates the youngest of the others, since VRAM will not keep their blocks.

        Other pages stay as clean as they are while VRAM has their blocks.
        """
        host, free = self.host, dict[BlockHash, Block]()
        for page in pages:
            if page.is_double and (block_hash := page.block_hash) is not None:
                page.is_double = False
                if host.is_duplicate(page):
                    free[block_hash] = page
        host.touch(reversed(free))
        for block_hash, page in free.items():
            host.put_clean(page, self.is_host_clean(block_hash))

    # What leaves

    def allocate(
        self,
        tier: Tier,
        count: int,
        *,
        tenant: bytes | None = None,
        takes_kept: bool = False,
        is_partial: bool = False,
        only_empty: bool = False,
    ) -> list[Block] | None:
        """Allocate blocks of VRAM or host memory; see `BlockPool.allocate`."""
        pool = self.pools[tier]
        taken = pool.allocate(
            count,
            tenant=tenant,
            takes_kept=takes_kept,
            is_partial=is_partial,
            only_empty=only_empty,
        )
        self._note_evicted(tier, taken.evicted)
        if taken.blocks is None and count <= pool.num_free - taken.num_kept:
            # Too few are clean: the turn of all has come.
            self.look_ahead(tier, pool.num_blocks, pool.num_blocks)
        return taken.blocks

    def look_ahead(self, tier: Tier, num_ahead: int, most_looks: int) -> None:
        """Have the turn of a tier's next blocks come; VRAM will not keep those of its own."""
        due = self.pools[tier].look_ahead(num_ahead, most_looks)
        if tier is Tier.DEVICE:
            pages = self.host.find(block.block_hash for block in due if block.is_clean)
            self.end_duplicates(page for page in pages if page is not None)

    def evict_clean(self, tier: Tier) -> int:
        """Evict all blocks of a tier that nobody uses and that are clean; return how many."""
        evicted = self.pools[tier].evict_clean()
        self._note_evicted(tier, evicted)
        return len(evicted)

    def check(self) -> None:
        """Raise IntegrityError if a pool takes a block for clean or for a duplicate that is not."""
        is_clean = {Tier.DEVICE: self.is_device_clean, Tier.HOST: self.is_host_clean}
        for tier, pool in self.pools.items():
            for block in pool.evictable():
                block_hash = block.block_hash
                entry = self.catalog.get(block_hash)
                if block_hash is None or entry is None:
                    raise IntegrityError(f"evictable block {block.block_id} has no entry")
                is_elsewhere = tier is Tier.HOST and self.device.lookup(block_hash) is not None
                may_go = is_clean[tier](block_hash)
                if block.is_clean and not (may_go or is_elsewhere):
                    raise IntegrityError(f"block {block.block_id} of {tier} is not clean")
                is_due = entry.queued_second <= self.clock.now()  # the next sweep will tell
                if may_go and not block.is_clean and not is_due:
                    raise IntegrityError(f"block {block.block_id} of {tier} counts as not clean")
                if block.is_double and not all(self.device.holds_young([block_hash])):
                    what = f"page {block.block_id} is a duplicate"
                    raise IntegrityError(f"{what}, but VRAM does not keep its block")

    def drop(self, block_hash: BlockHash, reason: Literal["expired", "admin"]) -> list[Tier]:
        """Make a block unreachable now; return the tiers that had a copy.

        Requests that hold it keep its memory until they end.
        """
        label = "ttl" if reason == "expired" else reason
        had = [tier for tier, pool in self.pools.items() if pool.drop(block_hash) is not None]
        for tier in had:
            self.counters.evictions[f"{tier},{label}"] += 1
        self.catalog.forget(block_hash, reason)
        return had

    def replace(self, hashes: Sequence[BlockHash]) -> None:
        """Drop pages from all tiers, since others with the same hashes were computed anew."""
        for block_hash in hashes:
            for tier, pool in self.pools.items():
                if pool.drop(block_hash) is not None:
                    self.counters.evictions[f"{tier},replaced"] += 1
            self.catalog.forget(block_hash, EVICTED[Tier.DEVICE])
        if self.store is not None:
            self.store.delete(hashes, "replaced")
            self.presence.discard(hashes)

    def drop_copy(self, tier: Tier, block_hash: BlockHash) -> bool:
        """Make the copy in one tier unreachable for an operator; return whether there was one.

        The block is forgotten if that was its last copy in RAM.
        """
        if self.pools[tier].drop(block_hash) is None:
            return False
        self.counters.evictions[f"{tier},admin"] += 1
        self._note_left(tier, [block_hash])
        if not self.is_in_ram(block_hash):
            self.catalog.forget(block_hash, "admin")
        return True

    def _note_left(self, tier: Tier, hashes: Sequence[BlockHash]) -> list[Block | None]:
        """Note that copies have gone, in the pool of the other tier; return what that has."""
        if tier is Tier.DEVICE:
            pool, is_clean = self.host, self.is_host_clean
        else:
            pool, is_clean = self.device, self.is_device_clean
        others = pool.find(hashes)
        if tier is Tier.DEVICE:
            self.end_duplicates(page for page in others if page is not None)
        for block_hash, block in zip(hashes, others, strict=True):
            if block is not None:
                pool.put_clean(block, is_clean(block_hash))
        return others

    def _note_evicted(self, tier: Tier, evicted: Sequence[BlockHash]) -> None:
        """Count copies that were evicted for room; forget blocks that have left RAM with them.

        This is the only place where a block that was promised to the disk can be lost while the
        engine runs: every other way out of RAM is an expiry or an operator's eviction.
        """
        if not evicted:
            return
        self.counters.evictions[f"{tier},capacity"] += len(evicted)
        others = self._note_left(tier, evicted)
        for block_hash, other in zip(evicted, others, strict=True):
            if other is not None and other.is_ready:
                continue
            entry = self.catalog.get(block_hash)
            if entry is not None and not self.is_in_ram(block_hash):
                if self.is_promised(entry):
                    count_failure(self.counters.lost_blocks, entry.refusal or "too_slow", _LOST)
                self.catalog.forget(block_hash, EVICTED[Tier.DISK if entry.is_on_disk else tier])
        self.note_reach()
