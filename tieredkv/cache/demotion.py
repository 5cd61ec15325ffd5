"""Takes blocks down: device block to host page, host page to disk, ahead of need.

Demotion keeps enough clean blocks (see `Tiers`) at the old end of each pool, so that an allocation
neither waits for PCIe nor for the disk. What cannot be demoted in time is dropped, oldest first,
and counted.

Called by the engine's thread only.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby, islice
from operator import attrgetter
from typing import NamedTuple

from tieredkv.block_pool import Block, BlockPool
from tieredkv.cache.catalog import Entry
from tieredkv.cache.tiers import Tiers, count_failure
from tieredkv.errors import IntegrityError
from tieredkv.storage.worker_messages import LentPage, PageStored
from tieredkv.types import BlockHash, BlockId, BlockRecord, PageId, Progress, Tier, ignore_progress

POLL_S = 0.0005

Waiting = dict[BlockHash, None]
"""Blocks that are to go down, in order, each once."""


class _Write(NamedTuple):
    """One page lent to the store, and for whom: another entry of this hash may come meanwhile."""

    page: Block
    entry: Entry
    record: BlockRecord
    began_at: float


class Demoter:
    """Keeps a reserve of clean blocks in VRAM and in host memory.

    A block is pinned while it is copied or written, so that its place in the order of eviction
    stays.

    Invariants (`check`): a page being written is pinned; no more pages are lent for writing than
    the cap.
    """

    def __init__(self, tiers: Tiers, poll: Callable[[], None]) -> None:
        self._tiers = tiers
        self._poll = poll
        # NOTE: of the host no more than half, or its pages would push one another out for ever.
        most = max(1, min(tiers.device.num_blocks // 4, tiers.host.num_blocks // 2))
        self._device_reserve = min(tiers.device_reserve_blocks, most)
        self._host_reserve = max(1, tiers.host.num_blocks // 8)
        self._write_cap = max(1, tiers.host.num_blocks // 4)
        self._behind: Waiting = {}
        self._fresh: Waiting = {}
        self._num_copying = 0
        self._writing: dict[BlockHash, _Write] = {}
        self._is_stale = True

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way down."""
        return not (self._num_copying or self._writing or self._behind)

    def note_change(self) -> None:
        """Look at the reserves again at the next `pump`: blocks were allocated or released."""
        self._is_stale = True

    def note_computed(self, entries: Iterable[Entry]) -> None:
        """Note blocks that were computed just now, for copies and writes ahead of need."""
        for entry in entries:
            self._fresh.setdefault(entry.block_hash)
            if len(self._fresh) > self._tiers.device.num_blocks:  # the oldest has been evicted
                del self._fresh[next(iter(self._fresh))]
            if self._tiers.is_write_behind:
                self._behind.setdefault(entry.block_hash)
        self._is_stale = True

    def pump(self) -> None:
        """Top up both reserves; a few microseconds when nothing has changed."""
        if self._behind:
            self._advance(self._behind, self._tiers.is_owed_to_disk, 2 * self._write_cap)
        if not self._is_stale:
            return
        self._is_stale = False
        device, host = self._tiers.device, self._tiers.host
        if device.num_empty < self._device_reserve:
            self.demote(self._device_reserve - device.num_empty)
        # NOTE: where running requests hold nearly all blocks, those that end let go of many at
        # once, and the next ones need them at once. Whole blocks never change, so copies of what
        # is in use need not wait.
        if device.num_free < self._device_reserve:
            self._advance(self._fresh, self._is_owed_to_host, 2 * self._device_reserve)
        if host.num_empty < self._host_reserve:
            self.write(self._host_reserve - host.num_empty)

    def demote(self, num_blocks: int) -> int:
        """Start copying the dirty ones of the oldest `num_blocks` device blocks; count them."""
        return self._copy_out(_dirty(self._tiers.device, num_blocks))

    def write(self, num_pages: int) -> int:
        """Start writing the dirty ones of the oldest `num_pages` host pages; count them."""
        return self._write_out(_dirty(self._tiers.host, num_pages))

    def on_copied(self, began_at: float, pairs: list[tuple[Block, Block]]) -> None:
        """Finish copies to the host: the page may serve hits, the device block may be reused."""
        tiers = self._tiers
        tiers.counters.note_move("device,host", began_at)
        self._num_copying -= len(pairs)
        for block, page in pairs:
            tiers.device.unpin(block)
            if page.block_hash is not None:  # else expired or evicted by hand meanwhile
                page.is_ready = True
                tiers.counters.demoted_host_blocks += 1
            tiers.host.release([page])
        self._is_stale = True

    def on_page_stored(self, event: PageStored) -> None:
        """Take a page back from the store: acknowledged on disk, or refused for a reason."""
        tiers, catalog = self._tiers, self._tiers.catalog
        page, entry, record, began_at = self._writing.pop(BlockHash(event.block_hash))
        tiers.counters.note_move("host,disk", began_at)
        assert page.block_id == event.page_id, (page.block_id, event.page_id)
        assert tiers.store is not None
        tiers.host.unpin(page)
        self._is_stale = True
        entry.refusal = event.reason
        if not event.ok:
            text = "a block could not be written to disk (%s)"
            count_failure(tiers.counters.store_failures, event.reason, text)
            entry.is_droppable = True
            return
        tiers.counters.demoted_disk_blocks += 1
        if catalog.get(entry.block_hash) is not entry:  # expired or evicted by hand meanwhile
            tiers.store.delete([entry.block_hash], "evicted")
            return
        entry.disk_expires_at = record.expires_at
        item = catalog.touch_item(entry, tiers.clock.now())
        told = record.expires_at, record.pinned_until
        if (entry.disk_expires_at, entry.pinned_until) != told:  # a claim has come meanwhile
            tiers.store.touch([item])

    def drop_oldest(self, num_blocks: int) -> None:
        """Give up the demotion of the oldest dirty device blocks, so that they can be evicted.

        At least a reserve of them: the next allocation must not wait in its turn.
        """
        at_most = max(num_blocks, self._device_reserve)
        for block in _dirty(self._tiers.device, at_most):
            entry = self._tiers.catalog.get(block.block_hash)
            if entry is not None and not block.pin_count:
                entry.is_droppable = True
                self._tiers.counters.demotions_dropped += 1

    def flush(self, to: Tier, *, deadline: float) -> bool:
        """Empty the tiers above `to` of everything that no request uses.

        What may not go as far down as `to` is dropped.

        Args:
            to: HOST empties the device tier, DISK the device and the host tier.
            deadline: monotonic time at which to stop.

        Returns:
            Whether everything has gone; False when the deadline came first.
        """
        device, host = self._tiers.device, self._tiers.host
        pools = [device, host] if to is Tier.DISK else [device]
        while self._num_copying or any(pool.num_evictable for pool in pools):
            self._poll()
            moved = sum(map(_drop_clean, pools))
            started = self.demote(device.num_blocks)
            if to is Tier.DISK or (not started and device.num_evictable):
                started += self.write(host.num_blocks)
            is_stuck = not (moved or started or self._num_copying or self._writing)
            if is_stuck or time.monotonic() >= deadline:
                return False
            if not moved:
                time.sleep(POLL_S)
        return True

    def drain(self, *, deadline: float, progress: Progress = ignore_progress) -> int:
        """Write what disk policies still hold only in RAM, newest chains first, heads first.

        Args:
            deadline: monotonic time at which to stop.
            progress: told how many are written or given up.

        Returns:
            How many blocks were not written.
        """
        entries = self._tiers.catalog.entries()
        for entry in entries:
            entry.is_droppable = False
        entries = [entry for entry in entries if self._tiers.is_owed_to_disk(entry.block_hash)]
        recency = {entry.block_hash: entry.last_used for entry in entries}
        for entry in sorted(entries, key=lambda entry: -entry.position):
            if entry.parent_hash in recency:  # a chain is as new as its newest block
                parent = recency[entry.parent_hash]
                recency[entry.parent_hash] = max(parent, recency[entry.block_hash])
        entries.sort(key=lambda entry: (-recency[entry.block_hash], entry.position))
        wanted = dict.fromkeys(entry.block_hash for entry in entries)
        while wanted and time.monotonic() < deadline:
            self._poll()
            self._advance(wanted, self._tiers.is_owed_to_disk, 2 * self._write_cap)
            is_moving = self._num_copying or self._writing
            if not is_moving:  # host pages that come later stand in the way
                self.write(self._tiers.host.num_blocks)
            progress("writing to disk", len(entries) - len(wanted), len(entries))
            time.sleep(POLL_S)
        return sum(not entry.is_on_disk for entry in entries)

    def refusals(self) -> Counter[str]:
        """Count the blocks in RAM that the disk was to keep and the store refused, by reason."""
        catalog, now = self._tiers.catalog, self._tiers.clock.now()
        refused = (each for each in catalog.entries() if each.refusal and not each.is_on_disk)
        return Counter(each.refusal for each in refused if catalog.disk_deadline(each, now))

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        for block_hash, write in self._writing.items():
            if write.page.pin_count < 1:
                raise IntegrityError(f"page of {block_hash.hex()[:12]} is written but not pinned")
        if len(self._writing) > self._write_cap:
            raise IntegrityError(f"{len(self._writing)} pages being written, cap {self._write_cap}")

    def _is_owed_to_host(self, block_hash: BlockHash) -> bool:
        """Return whether VRAM has the block, and evicting it there would lose it."""
        block = self._tiers.device.lookup(block_hash)
        return block is not None and block.is_ready and not self._tiers.device.can_evict(block)

    def _advance(self, wanted: Waiting, is_owed: Callable[[BlockHash], bool], at_most: int) -> None:
        """Move the first of `wanted` one step down; those that are owed no more leave."""
        owed: list[BlockHash] = []
        done: list[BlockHash] = []
        for block_hash in wanted:
            (owed if is_owed(block_hash) else done).append(block_hash)
            if len(owed) == at_most:
                break
        for block_hash in done:
            del wanted[block_hash]
        pages, blocks = self._tiers.host.find(owed), self._tiers.device.find(owed)
        self._write_out([page for page in pages if page is not None and page.is_ready])
        self._copy_out([block for block in blocks if block is not None and block.is_ready])

    def _copy_out(self, blocks: list[Block]) -> int:
        """Start copying device blocks into host pages, as many as there are pages for."""
        tiers = self._tiers
        wanted = [  # the others' pages are being filled already, from here or disk
            block
            for block in blocks
            if block.block_hash is not None and tiers.host.lookup(block.block_hash) is None
        ]
        pairs: list[tuple[Block, Block]] = []
        for tenant, group in groupby(wanted, key=attrgetter("tenant")):
            each = list(group)
            pages = tiers.host.allocate(len(each), tenant=tenant, is_partial=True)
            pairs += zip(each, pages or [], strict=False)
        for block, page in pairs:
            assert block.block_hash is not None, block
            tiers.device.pin(block)
            tiers.host.insert(page, block.block_hash, block.tenant)
        self._num_copying += len(pairs)
        if pairs:
            ids = [(BlockId(block.block_id), PageId(page.block_id)) for block, page in pairs]
            tiers.transfer.demote(ids, (time.perf_counter(), pairs))
        return len(pairs)

    def _write_out(self, pages: list[Block]) -> int:
        """Lend host pages to the store for writing, as many as the cap allows."""
        tiers, catalog, now = self._tiers, self._tiers.catalog, self._tiers.clock.now()
        items: list[LentPage] = []
        began_at = time.perf_counter()
        for page in pages:
            entry = catalog.get(page.block_hash)
            expires_at = entry and catalog.disk_deadline(entry, now)
            if not entry or not expires_at or entry.block_hash in self._writing:
                continue
            if len(self._writing) == self._write_cap:
                break
            record = catalog.record(entry, size_bytes=tiers.block_bytes, expires_at=expires_at)
            tiers.host.pin(page)
            self._writing[entry.block_hash] = _Write(page, entry, record, began_at)
            items.append(LentPage(record, page.block_id))
        if items:
            assert tiers.store is not None
            tiers.store.store(items)
        return len(items)


def _dirty(pool: BlockPool, num_oldest: int) -> list[Block]:
    """Return those of the oldest blocks that nobody uses whose eviction would lose something."""
    oldest = islice(pool.evictable(), num_oldest)
    return [block for block in oldest if not pool.can_evict(block)]


def _drop_clean(pool: BlockPool) -> int:
    """Evict the clean blocks of a pool that nobody uses; return how many."""
    before = pool.num_evictable
    pool.release(pool.allocate(pool.num_blocks, is_partial=True) or [])
    return before - pool.num_evictable
