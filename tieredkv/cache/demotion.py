"""Copies blocks to slower tiers ahead of need: from VRAM to host memory, and from there to disk.

Demotion keeps enough of the next blocks of VRAM, and all pages of host memory, clean (see `Tiers`),
so that an allocation waits neither for PCIe nor for the disk. For that, each pool names the dirty
ones in the order of eviction. Other blocks go down before their turn, for one of these reasons:

    in use    running requests hold nearly all of VRAM, and will release many blocks at once
    owed      more blocks are owed to the disk than a stop may leave to be written
    draining  the engine stops, so that all that is owed is written
    operator  an operator sends them down; see `departures`

All ways down are one: `_copy_out` starts copies, which `on_copied` takes in, and `_write_out`
starts writes, which `on_written` takes in.

Blocks that cannot be demoted in time are dropped, the oldest first, and counted.

Called by the engine's thread only.
"""

import sys
import time
from collections import OrderedDict
from collections.abc import Iterable
from itertools import groupby, islice
from operator import attrgetter

from tieredkv.cache.block import Block
from tieredkv.cache.catalog import Entry
from tieredkv.cache.disk_link import EARLY_SHARE, Write
from tieredkv.cache.tiers import Tiers, count_failure
from tieredkv.errors import IntegrityError
from tieredkv.types import BlockHash, BlockId, PageId, Tier

MAX_MOVES = 16
"""Copies, and writes, that one step may start, besides two for each block computed since the last.

The queues then drain faster than they fill, and the work of a step does not depend on how long
they are.
"""

LOOKS_PER_MOVE = 8
"""Queued blocks that a step may examine for each move; many of them need no move any more."""

MAX_LATE = 1 / 64
"""Share of host memory for pages that should have been evicted but have to be written first.

Younger pages, which the disk has already, made room instead. While blocks are computed faster than
the disk takes them, such pages would fill all of host memory, so the oldest are given up.
"""

LEAST_LATE_BYTES = 64 << 20
"""Blocks of so many bytes may be late, whatever share of host memory they are, up to a sixteenth of
it: what a disk writes in the time for which it may well pause.
"""


def most_late(num_pages: int, payload_bytes: int) -> int:
    """Return how many of the pages of host memory may be late; see `MAX_LATE`."""
    least = min(LEAST_LATE_BYTES // payload_bytes, num_pages // 16)
    return max(1, least, int(num_pages * MAX_LATE))


class Demoter:
    """Keeps a reserve of clean blocks in VRAM, and host memory clean.

    A block that is copied or written keeps its place in the order of eviction (`add_reader`).

    Invariant (`check`): the number of pages being written stays within the cap.

    Attributes:
        is_draining: whether all that is owed to the disk is written, even if it may wait.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._disk_link, self._device_link = tiers.disk_link, tiers.device_link
        # NOTE: if the reserve were above half of the host tier, its pages would evict one
        # another forever.
        most = max(1, min(tiers.device.num_blocks // 4, tiers.host.num_blocks // 2))
        self._device_reserve = min(tiers.settings.device_reserve_blocks, most)
        self._write_cap = max(1, tiers.host.num_blocks // 4)
        self._most_late = most_late(tiers.host.num_blocks, tiers.payload_bytes)
        self._computed: OrderedDict[BlockHash, None] = OrderedDict()  # lately; only VRAM has them
        self._num_noted = 0  # blocks computed since the last step
        self._num_copying = 0
        self.is_draining = False
        self._is_stale = True
        self._gains_nothing = False  # the last copies ahead of need evicted as many made before
        self._is_bounded = False  # the last `pump` could have started more

    @property
    def has_more(self) -> bool:
        """Whether `pump` may start more: its last call was bounded, or something has changed."""
        return self._is_bounded or self._is_stale

    @property
    def is_idle(self) -> bool:
        """Whether no block is being demoted or has to be written before its turn."""
        return not self.is_moving and self._num_overdue <= 0

    @property
    def is_moving(self) -> bool:
        """Whether copies to host memory or writes are under way."""
        return bool(self._num_copying or self._disk_link.num_writing)

    @property
    def is_copying(self) -> bool:
        """Whether copies to host memory are under way."""
        return self._num_copying > 0

    def note_change(self) -> None:
        """Note that there may be more room, or less: the next `pump` checks the reserves."""
        self._is_stale, self._gains_nothing = True, False

    def note_computed(self, entries: Iterable[Entry]) -> None:
        """Note blocks that were just computed, so that they may go down before their turn."""
        computed = self._computed
        num_before = len(computed)
        for entry in entries:
            computed[entry.block_hash] = None
        self._num_noted += len(computed) - num_before
        while len(computed) > self._tiers.device.num_blocks:  # the oldest has been evicted
            computed.popitem(last=False)
        self._is_stale = True

    def pump(self) -> None:
        """Start the moves that keep blocks clean, in a few microseconds if nothing has changed.

        The work of one call is bounded by the moves that it may start, however many blocks wait.
        If more moves could be started, the next call continues (`has_more`).
        """
        at_most = MAX_MOVES + 2 * self._num_noted
        self._num_noted, self._is_bounded = 0, False
        num_written = self._write_owed(at_most)
        if not self._is_stale:
            return
        self._is_stale = False
        device, host = self._tiers.device, self._tiers.host
        if device.num_empty < self._device_reserve and not self._gains_nothing:
            num_soon_clean = device.num_soon_clean
            started = self.demote(self._device_reserve - device.num_empty, at_most)
            # NOTE: in little host memory, such as one tenant's floor, these copies evict those that
            # were made before. Then they end until something else changes.
            self._gains_nothing = started > 0 and device.num_soon_clean <= num_soon_clean
            self._keep_going(started, at_most)
        # NOTE: if running requests hold nearly all blocks, a request that ends releases many at
        # once, and the next request needs them at once. Full blocks never change, so blocks in
        # use can be copied before they are released.
        if device.num_free < self._device_reserve:
            self._keep_going(self._copy_used(at_most), at_most)
        if self._tiers.store is not None:
            if not self.is_draining:
                self._give_up_late()
            at_most -= num_written
            num_young = host.num_young
            started = self.write(host.num_blocks - host.num_empty, at_most)
            has_looked = host.num_young < num_young  # others may have to be written
            self._keep_going(at_most if has_looked else started, at_most)

    def demote(self, num_ahead: int, at_most: int = sys.maxsize) -> int:
        """Start the copies that make the oldest device blocks clean; return how many were started.

        Args:
            num_ahead: how many of the oldest blocks have to be clean.
            at_most: how many copies to start at most.
        """
        return self._copy_out(self._dirty(Tier.DEVICE, num_ahead, at_most))

    def write(self, num_ahead: int, at_most: int = sys.maxsize) -> int:
        """Start the writes that make the oldest host pages clean; return how many were started.

        Args:
            num_ahead: how many of the oldest pages have to be clean.
            at_most: how many writes to start at most.
        """
        room = self._write_room if self._tiers.store is not None else 0
        pages = self._dirty(Tier.HOST, num_ahead, min(at_most, room)) if room else []
        return self._write_out(pages)

    def send(self, blocks: list[Block], pages: list[Block]) -> None:
        """Start copies of device blocks and writes of host pages, as far as there is room."""
        self._write_out(pages)  # before copies take these pages
        self._copy_out(blocks)
        self.note_change()

    def on_copied(self, began_at: float, pairs: list[tuple[Block, Block]]) -> None:
        """Finish copies to the host: each page may serve hits, each device block may be reused."""
        tiers = self._tiers
        tiers.counters.note_move("device,host", began_at)
        tiers.counters.demoted_host_blocks += len(pairs)
        self._num_copying -= len(pairs)
        arrived = dict[BlockHash, Block]()
        for _, page in pairs:
            if page.block_hash is not None:  # if not, it expired or an operator evicted it
                tiers.host.fill(page)
                arrived[page.block_hash] = page
        tiers.recheck(arrived)
        for block, _ in pairs:
            tiers.device.remove_reader(block)
        owed = tiers.catalog.owed if self._num_overdue > 0 else ()
        landed = [page for block_hash, page in arrived.items() if block_hash in owed]
        self._write_out(landed)  # before others take their room
        tiers.release_pages(page for _, page in pairs)
        self._is_stale = True

    def on_written(self, write: Write) -> None:
        """Note that a block was written to disk, or that the store refused it."""
        tiers, catalog, entry, record = self._tiers, self._tiers.catalog, write.entry, write.record
        assert tiers.store is not None
        self.note_change()
        entry.refusal = write.reason
        if write.reason:
            text = "a block could not be written to disk (%s)"
            count_failure(tiers.counters.store_failures, write.reason, text)
            catalog.give_up(entry)
        elif catalog.get(entry.block_hash) is not entry:  # expired or evicted
            tiers.counters.demoted_disk_blocks += 1
            tiers.store.delete([entry.block_hash], "evicted")
        else:
            tiers.counters.demoted_disk_blocks += 1
            catalog.note_on_disk(entry, record.expires_at)
            tiers.events.note_written(entry.block_hash)
            now = tiers.clock.now()
            until = catalog.disk_deadline(entry, now) or 0.0
            noted = record.pinned_until, record.hits
            if until > record.expires_at or (entry.pinned_until, entry.hits) != noted:
                self._disk_link.touch(catalog.touch_items([entry], now))  # used meanwhile
        tiers.recheck([entry.block_hash])
        tiers.host.remove_reader(write.page)

    def drop_oldest(self, num_blocks: int) -> None:
        """Give up the demotion of the oldest dirty blocks, so that device blocks can be evicted.

        A block in host memory is older than one in VRAM. So if both are owed to the disk, the write
        of the former is given up, and its page is for the latter.

        At least as many blocks as the reserve are given up, so that the next allocation does not
        have to wait either.
        """
        tiers = self._tiers
        oldest = self._dirty(Tier.DEVICE, max(num_blocks, self._device_reserve))
        owed = [block for block in oldest if tiers.is_owed_to_disk(block.block_hash)]
        older = self._dirty(Tier.HOST, len(owed))
        kept = set(owed[len(owed) - len(older) :])
        self._give_up([*older, *(block for block in oldest if block not in kept)])

    def _give_up_late(self) -> None:
        """Give up the oldest of the pages that should have been evicted, if they are too many."""
        host = self._tiers.host
        for page in host.late(self._most_late):
            assert page.block_hash is not None, page
            self._tiers.note_doubles([page])
            if not page.is_clean:  # else VRAM holds its block again
                self._give_up([page])

    def _give_up(self, blocks: Iterable[Block]) -> None:
        """Have blocks evicted without a copy in a slower tier when it is their turn."""
        tiers = self._tiers
        for block in blocks:
            entry = tiers.catalog.get(block.block_hash)
            if entry is not None:
                tiers.catalog.give_up(entry)
                tiers.recheck([entry.block_hash])
                tiers.counters.demotions_dropped += 1

    def write_owed(self) -> None:
        """Start as many writes of what is owed to the disk as there is room for.

        Copies that have to come before a write are started, too.
        """
        self._write_owed(2 * self._write_cap)
        if not self.is_moving:  # pages whose turn is later fill the host tier
            self.write(self._tiers.host.num_blocks)

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        if (num_writing := self._disk_link.num_writing) > self._write_cap:
            what = f"{num_writing} pages are being written"
            raise IntegrityError(f"{what}, but at most {self._write_cap} may be")

    @property
    def _write_room(self) -> int:
        """How many more pages may be lent to be written.

        A page on loan cannot be evicted, so more of them would only keep others out of memory.
        """
        return min(self._write_cap, self._disk_link.most_writes) - self._disk_link.num_writing

    @property
    def _num_overdue(self) -> int:
        """How many of the blocks that are owed to the disk have to be written before their turn.

        The others may wait until an allocation needs their room.
        """
        tiers = self._tiers
        if tiers.store is None:
            return 0
        most_bytes = 0.0
        if not (tiers.settings.is_write_behind or self.is_draining):
            rate = self._disk_link.write_rate.steady
            most_bytes = EARLY_SHARE * tiers.settings.drain_timeout_s * rate
        return len(tiers.catalog.owed) - int(most_bytes / tiers.payload_bytes)

    def _keep_going(self, num_started: int, at_most: int) -> None:
        """Have the next `pump` continue if a step started as many moves as it may."""
        if num_started >= at_most:
            self._is_stale = self._is_bounded = True

    def _write_owed(self, at_most: int) -> int:
        """Start the writes, and the copies before them, of the first blocks that are overdue.

        What is under way, or cannot go down yet, goes behind the others of the list. A copy is
        started only if its page can be written at once when it lands.

        Returns:
            How many writes were started.
        """
        tiers, owed = self._tiers, self._tiers.catalog.owed
        num_moving = self._num_copying + self._disk_link.num_writing
        num_overdue, room = self._num_overdue - num_moving, self._write_room - self._num_copying
        most = min(num_overdue, room, at_most)
        if most <= 0:
            return 0
        pages, blocks = list[Block](), list[Block]()
        looks = min(num_overdue + num_moving, LOOKS_PER_MOVE * at_most)
        for block_hash in [*islice(owed, looks)]:
            if len(pages) + len(blocks) >= most:
                break
            owed.move_to_end(block_hash)
            page, block = tiers.host.lookup(block_hash), tiers.device.lookup(block_hash)
            if page is not None and page.is_ready and not page.num_readers:
                pages.append(page)
            elif page is None and block is not None and block.is_whole:
                blocks.append(block)
        num_written, num_copied = self._write_out(pages), self._copy_out(blocks)
        self._put_first(owed, [block for block in blocks if not block.num_readers])
        self._is_bounded = self._is_bounded or max(num_written, num_copied) >= at_most
        return num_written

    def _copy_used(self, at_most: int) -> int:
        """Start copies of the first computed blocks into empty pages; return how many.

        Blocks that host memory has, or is not owed, leave the list. If only the bound on examined
        blocks ended the search, `at_most` is returned.
        """
        tiers, computed, blocks, num_looks = self._tiers, self._computed, list[Block](), 0
        while computed and len(blocks) < at_most and num_looks < LOOKS_PER_MOVE * at_most:
            block_hash, _ = computed.popitem(last=False)
            num_looks += 1
            block = tiers.device.lookup(block_hash)
            if block is None or block.is_clean or not block.is_ready:
                continue
            if tiers.host.lookup(block_hash) is None:
                blocks.append(block)
        num_started = self._copy_out(blocks, only_empty=True)
        left = [block for block in blocks if not block.num_readers]
        self._put_first(computed, left)
        return at_most if num_looks == LOOKS_PER_MOVE * at_most and not left else num_started

    def _put_first(self, waiting: OrderedDict[BlockHash, None], left: list[Block]) -> None:
        """Have blocks for which there was no room be the first again.

        With shares they are the last, so that no tenant waits for another's room.
        """
        for block in left if self._tiers.shares else reversed(left):
            assert block.block_hash is not None, block
            waiting[block.block_hash] = None
            waiting.move_to_end(block.block_hash, last=bool(self._tiers.shares))

    def _dirty(self, tier: Tier, num_ahead: int, at_most: int = sys.maxsize) -> list[Block]:
        """Return the oldest blocks of a tier to move down so that `num_ahead` blocks are clean."""
        self._tiers.look_ahead(tier, num_ahead, LOOKS_PER_MOVE * at_most)
        return self._tiers.pools[tier].dirty(num_ahead, at_most)

    def _copy_out(self, blocks: list[Block], *, only_empty: bool = False) -> int:
        """Start copies of device blocks to host pages while there are pages; return how many.

        Args:
            blocks: the device blocks.
            only_empty: whether only empty pages are taken.
        """
        tiers = self._tiers
        pairs: list[tuple[Block, Block]] = []
        if not only_empty:
            blocks = blocks[: self._page_room(len(blocks))]
        for tenant, group in groupby(blocks, key=attrgetter("tenant")):
            each = [block for block in group if self._can_be_copied(block)]
            pages = tiers.allocate(
                Tier.HOST, len(each), tenant=tenant, is_partial=True, only_empty=only_empty
            )
            pages = pages or []
            pairs += zip(each, pages, strict=False)
            for block in each[len(pages) :] if tiers.shares else ():
                tiers.device.postpone(block)
        for block, page in pairs:
            assert block.block_hash is not None, block
            tiers.device.add_reader(block)
            tiers.host.insert(page, block.block_hash, block.tenant)
        self._num_copying += len(pairs)
        if pairs:
            ids = [(BlockId(block.block_id), PageId(page.block_id)) for block, page in pairs]
            after = max(block.last_step for block, _ in pairs)
            self._device_link.demote(ids, (time.perf_counter(), pairs), after=after)
        return len(pairs)

    def _page_room(self, num_blocks: int) -> int:
        """Return how many of these blocks may be copied to host pages now.

        What is being copied up leaves duplicates. If others made room instead, VRAM and host memory
        would hold these blocks twice for a moment, and the others would be lost for good.
        """
        host = self._tiers.host
        num_free = min(num_blocks, host.num_empty + host.num_duplicates)
        return num_free + max(0, num_blocks - num_free - self._tiers.num_promoting)

    def _write_out(self, pages: list[Block]) -> int:
        """Start writes of host pages, up to the cap; return how many."""
        tiers, catalog, now = self._tiers, self._tiers.catalog, self._tiers.clock.now()
        began_at, room, num_begun = time.monotonic(), self._write_room, 0
        for page in pages:
            entry = catalog.get(page.block_hash)
            expires_at = entry and catalog.disk_deadline(entry, now)
            if not entry or not expires_at or self._disk_link.is_writing(entry.block_hash):
                if entry and not expires_at:  # its claim on the disk has ended
                    catalog.owed.pop(entry.block_hash, None)
                if page.block_hash is not None:
                    tiers.recheck([page.block_hash])
                tiers.host.postpone(page)
                continue
            if num_begun >= room:
                break
            record = catalog.record(entry, size_bytes=tiers.payload_bytes, expires_at=expires_at)
            tiers.host.add_reader(page)
            self._disk_link.write(record, page, entry, began_at)
            num_begun += 1
        self._disk_link.send()
        return num_begun

    def _can_be_copied(self, block: Block) -> bool:
        """Return whether the block is whole, and host memory has no page of it, filled or not.

        NOTE: every copy out of VRAM passes here. A block whose late layers are on their way may be
        ready for a step, but a copy of it would hold what was in its memory before.
        """
        block_hash = block.block_hash
        is_free = block_hash is not None and self._tiers.host.lookup(block_hash) is None
        is_free = is_free and block.is_whole
        if not is_free:
            self._tiers.device.postpone(block)
        return is_free
