"""Takes blocks down: device block to host page, host page to disk, ahead of need.

A block is clean when evicting it loses nothing that was promised: its copy is below already, or no
retention lets it go further down. Demotion keeps enough clean blocks at the old end of each pool,
so that an allocation neither waits for PCIe nor for the disk. What cannot be demoted in time is
dropped, oldest first, and counted.

Called by the engine's thread only.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from operator import attrgetter

from tieredkv.block_pool import Block, BlockPool
from tieredkv.cache.directory import Entry
from tieredkv.cache.tiers import Tiers, count_failure
from tieredkv.errors import IntegrityError
from tieredkv.storage.messages import LentPage, PageStored
from tieredkv.types import BlockHash, BlockId, BlockRecord, PageId, Tier

POLL_S = 0.0005


@dataclass(frozen=True, slots=True)
class _Write:
    """One page lent to the store, and for whom: another entry of this hash may come meanwhile."""

    page: Block
    entry: Entry
    record: BlockRecord


class Demoter:
    """Keeps a reserve of clean blocks in VRAM and in host memory.

    Invariants (`check`): a page being written is pinned; no more pages are lent for writing than
    the cap.
    """

    def __init__(
        self,
        tiers: Tiers,
        *,
        device_reserve_blocks: int,
        is_write_behind: bool,
        poll: Callable[[], None],
    ) -> None:
        self._tiers = tiers
        self._poll = poll
        # NOTE: of the host no more than half, or its pages would push one another out for ever.
        most = max(1, min(tiers.device.num_blocks // 4, tiers.host.num_blocks // 2))
        self._device_reserve = min(device_reserve_blocks, most)
        self._host_reserve = max(1, tiers.host.num_blocks // 8)
        self._write_cap = max(1, tiers.host.num_blocks // 4)
        self._is_write_behind = is_write_behind
        self._behind: dict[BlockHash, None] = {}  # in order, each once
        self._fresh: dict[BlockHash, None] = {}  # likewise
        self._copying: set[int] = set()
        self._writing: dict[BlockHash, _Write] = {}
        self._is_stale = True

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way down."""
        return not self._copying and not self._writing and not self._behind

    @property
    def num_under_way(self) -> int:
        """Blocks being copied to the host or written to disk."""
        return len(self._copying) + len(self._writing)

    def is_device_clean(self, block: Block) -> bool:
        """Return whether a device block may be evicted without losing what was promised."""
        directory, host = self._tiers.directory, self._tiers.host
        entry = directory.get(block.block_hash)
        if entry is None or entry.is_droppable or not directory.may_enter(entry, Tier.HOST):
            return True
        page = host.lookup(entry.block_hash)
        return page is not None and page.is_ready

    def is_host_clean(self, page: Block) -> bool:
        """Return whether a host page may be evicted without losing what was promised."""
        tiers = self._tiers
        entry = tiers.directory.get(page.block_hash)
        return tiers.store is None or not self._is_owed(entry, tiers.clock.now())

    def note_change(self) -> None:
        """Look at the reserves again at the next `pump`: blocks were allocated or released."""
        self._is_stale = True

    def note_computed(self, entry: Entry) -> None:
        """Note a block that was computed just now, for copies and writes ahead of need."""
        self._fresh.setdefault(entry.block_hash)
        if len(self._fresh) > self._tiers.device.num_blocks:  # the oldest has been evicted
            del self._fresh[next(iter(self._fresh))]
        self._is_stale = True
        if self._is_write_behind and self._tiers.store is not None:
            self._behind.setdefault(entry.block_hash)

    def pump(self) -> None:
        """Top up both reserves; a few microseconds when nothing has changed."""
        if self._behind:
            self._persist_some(self._behind)
        if not self._is_stale:
            return
        self._is_stale = False
        device, host = self._tiers.device, self._tiers.host
        if device.num_empty < self._device_reserve:
            self.demote(self._device_reserve - device.num_empty)
        if device.num_free < self._device_reserve:
            self._demote_ahead()
        if host.num_empty < self._host_reserve:
            self.write(self._host_reserve - host.num_empty)

    def demote(self, num_blocks: int) -> int:
        """Start copying the dirty ones of the oldest `num_blocks` device blocks; count them."""
        oldest = islice(self._tiers.device.evictable(), num_blocks)
        return self._copy_out([block for block in oldest if not self.is_device_clean(block)])

    def _demote_ahead(self) -> None:
        """Copy blocks that are still in use, oldest first, as many as the reserve.

        NOTE: where running requests hold nearly all blocks, those that end let go of many at once,
        and the next ones need them at once. Whole blocks never change, so copies need not wait.
        """
        dirty: list[Block] = []
        done: list[BlockHash] = []
        for block_hash in self._fresh:
            block = self._tiers.device.lookup(block_hash)
            if block is None or not block.is_ready or self.is_device_clean(block):
                done.append(block_hash)
            elif block.block_id not in self._copying:
                dirty.append(block)
                if len(dirty) == self._device_reserve:
                    break
        for block_hash in done:
            del self._fresh[block_hash]
        self._copy_out(dirty)

    def write(self, num_pages: int) -> int:
        """Start writing the dirty ones of the oldest `num_pages` host pages; count them."""
        oldest = islice(self._tiers.host.evictable(), num_pages)
        return self._write_out([page for page in oldest if not self.is_host_clean(page)])

    def on_copied(self, pairs: list[tuple[Block, Block]]) -> None:
        """Finish copies to the host: the page may serve hits, the device block may be reused."""
        tiers = self._tiers
        for block, page in pairs:
            self._copying.discard(block.block_id)
            tiers.device.unpin(block)
            if page.block_hash is not None:  # else expired or evicted by hand meanwhile
                tiers.host.mark_ready(page)
                tiers.counters.demoted_host_blocks += 1
            tiers.host.release([page])
        self._is_stale = True

    def on_page_stored(self, event: PageStored) -> None:
        """Take a page back from the store: acknowledged on disk, or refused for a reason."""
        tiers = self._tiers
        write = self._writing.pop(BlockHash(event.block_hash))
        assert write.page.block_id == event.page_id, (write.page.block_id, event.page_id)
        entry = write.entry
        tiers.host.unpin(write.page)
        if event.ok:
            tiers.counters.demoted_disk_blocks += 1
            if tiers.directory.get(entry.block_hash) is entry:
                self._settle_on_disk(entry, write.record)
            else:  # expired or evicted by hand while it was written
                assert tiers.store is not None
                tiers.store.delete([entry.block_hash], "evicted")
        else:
            text = "a block could not be written to disk (%s)"
            count_failure(tiers.counters.store_failures, event.reason, text)
            entry.is_droppable = True
        self._is_stale = True

    def drop_oldest(self, num_blocks: int) -> None:
        """Give up the demotion of the oldest dirty device blocks, so that they can be evicted.

        At least a reserve of them: the next allocation must not wait in its turn.
        """
        at_most = max(num_blocks, self._device_reserve)
        for block in islice(self._tiers.device.evictable(), at_most):
            entry = self._tiers.directory.get(block.block_hash)
            if entry is not None and not block.pin_count and not self.is_device_clean(block):
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
        tiers = self._tiers
        is_to_disk = to is Tier.DISK
        while True:
            self._poll()
            moved = self._drop_clean(tiers.device, self.is_device_clean)
            if is_to_disk:
                moved += self._drop_clean(tiers.host, self.is_host_clean)
            started = self.demote(tiers.device.num_blocks)
            if is_to_disk or (started == 0 and tiers.device.num_evictable):
                started += self.write(tiers.host.num_blocks)
            is_host_done = not is_to_disk or not (self._writing or tiers.host.num_evictable)
            if not self._copying and not tiers.device.num_evictable and is_host_done:
                return True
            if time.monotonic() >= deadline or not (moved or started or self.num_under_way):
                return False
            if not moved:
                time.sleep(POLL_S)

    def drain(
        self, *, deadline: float, on_progress: Callable[[int, int], None] = lambda _done, _of: None
    ) -> int:
        """Write what disk policies still hold only in RAM, newest chains first, heads first.

        Args:
            deadline: monotonic time at which to stop.
            on_progress: told (written or given up, total).

        Returns:
            How many blocks were not written.
        """
        tiers = self._tiers
        if tiers.store is None:
            return 0
        entries = tiers.directory.entries()
        for entry in entries:
            entry.is_droppable = False
        now = tiers.clock.now()
        entries = [entry for entry in entries if self._is_owed(entry, now)]
        recency = {entry.block_hash: entry.last_used for entry in entries}
        for entry in sorted(entries, key=lambda entry: -entry.position):
            if entry.parent_hash in recency:  # a chain is as new as its newest block
                parent = recency[entry.parent_hash]
                recency[entry.parent_hash] = max(parent, recency[entry.block_hash])
        entries.sort(key=lambda entry: (-recency[entry.block_hash], entry.position))
        wanted = dict.fromkeys(entry.block_hash for entry in entries)
        while wanted and time.monotonic() < deadline:
            self._poll()
            self._persist_some(wanted)
            if not self.num_under_way:  # host pages that come later stand in the way
                self.write(tiers.host.num_blocks)
            on_progress(len(entries) - len(wanted), len(entries))
            time.sleep(POLL_S)
        return sum(not entry.is_on_disk for entry in entries)

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        for block_hash, write in self._writing.items():
            if write.page.pin_count < 1:
                raise IntegrityError(f"page of {block_hash.hex()[:12]} is written but not pinned")
        if len(self._writing) > self._write_cap:
            raise IntegrityError(f"{len(self._writing)} pages being written, cap {self._write_cap}")

    def _is_owed(self, entry: Entry | None, now: float) -> bool:
        """Return whether the disk has yet to be given the block, and nobody gave that up."""
        if entry is None or entry.is_on_disk or entry.is_droppable:
            return False
        return self._tiers.directory.disk_deadline(entry, now) is not None

    def _persist_some(self, wanted: dict[BlockHash, None]) -> None:
        """Move the first of `wanted` one step nearer to disk; those that need no more leave."""
        tiers = self._tiers
        now = tiers.clock.now()
        to_copy: list[Block] = []
        to_write: list[Block] = []
        for block_hash in list(islice(wanted, 2 * self._write_cap)):
            if not self._is_owed(tiers.directory.get(block_hash), now):
                del wanted[block_hash]
                continue
            page, block = tiers.host.lookup(block_hash), tiers.device.lookup(block_hash)
            if page is not None and page.is_ready:
                to_write.append(page)
            elif page is None and block is not None and block.is_ready:
                to_copy.append(block)
        self._write_out(to_write)
        self._copy_out(to_copy)

    def _copy_out(self, blocks: list[Block]) -> int:
        """Start copying device blocks into host pages, as many as there are pages for."""
        tiers = self._tiers
        wanted = [
            block
            for block in blocks  # the others' pages are being filled already, from here or disk
            if block.block_id not in self._copying
            and block.block_hash is not None
            and tiers.host.lookup(block.block_hash) is None
        ]
        pairs: list[tuple[Block, Block]] = []
        allocate = partial(tiers.host.allocate, can_evict=self.is_host_clean, is_partial=True)
        for tenant, group in groupby(wanted, key=attrgetter("tenant")):
            each = list(group)
            pairs += zip(each, allocate(len(each), tenant=tenant) or [], strict=False)
        for block, page in pairs:
            assert block.block_hash is not None, block
            tiers.device.pin(block)
            tiers.host.insert(page, block.block_hash, block.tenant)
            self._copying.add(block.block_id)
        if pairs:
            tiers.transfer.demote(
                [(BlockId(block.block_id), PageId(page.block_id)) for block, page in pairs], pairs
            )
        return len(pairs)

    def _write_out(self, pages: list[Block]) -> int:
        """Lend host pages to the store for writing, as many as the cap allows."""
        tiers = self._tiers
        if tiers.store is None:
            return 0
        now = tiers.clock.now()
        items: list[LentPage] = []
        for page in pages:
            if len(self._writing) >= self._write_cap:
                break
            entry = tiers.directory.get(page.block_hash)
            if entry is None or entry.block_hash in self._writing:
                continue
            expires_at = tiers.directory.disk_deadline(entry, now)
            if expires_at is None:
                continue
            tiers.host.pin(page)
            record = tiers.directory.record(
                entry, size_bytes=tiers.block_bytes, expires_at=expires_at
            )
            self._writing[entry.block_hash] = _Write(page, entry, record)
            items.append(LentPage(record, page.block_id))
        if items:
            tiers.store.store(items)
        return len(items)

    def _settle_on_disk(self, entry: Entry, record: BlockRecord) -> None:
        """Note an acknowledged copy; tell the disk at once if a claim has come in the meantime."""
        tiers = self._tiers
        assert tiers.store is not None
        entry.disk_expires_at = record.expires_at
        item = tiers.directory.touch_item(entry, tiers.clock.now())
        told = record.expires_at, record.protect_until
        if (entry.disk_expires_at, entry.protect_until) != told:
            tiers.store.touch([item])

    def _drop_clean(self, pool: BlockPool, is_clean: Callable[[Block], bool]) -> int:
        """Forget clean blocks of a pool that nobody uses, oldest first; return how many."""
        victims = [each for each in pool.evictable() if not each.pin_count and is_clean(each)]
        for block in victims:
            block_hash = block.block_hash
            assert block_hash is not None, block
            pool.drop(block_hash)
            self._tiers.on_evict("device" if pool is self._tiers.device else "host", block_hash)
        return len(victims)
