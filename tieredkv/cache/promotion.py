"""Copies blocks to faster tiers: from disk to a host page, and from there to a device block.

Each move has two phases: `start` or `prefetch` holds the source and the destination, and the
completion releases them. A read that fails, is late or is no longer wanted only costs a
miss.

A page that is lent to the store stays held until the store returns it. After a timeout a device
block no longer waits for the page, but the page stays on loan.

Called by the engine's thread only.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import msgspec

from tieredkv.block_pool import Block
from tieredkv.cache.catalog import Entry
from tieredkv.cache.tiers import Tiers, count_failure
from tieredkv.errors import IntegrityError
from tieredkv.storage.codec import decode_record, expiry_of
from tieredkv.storage.worker_messages import LentPage, PageLoaded
from tieredkv.types import TENANT_BYTES, BlockHash, BlockId, BlockRecord, PageId

MAX_READS = 128
"""Queued reads that one step may start or cancel; the next step continues with the others."""

_FAILED = "a block could not be loaded (%s); it is computed again"
_HARMLESS = frozenset(("missing", "evicted", "expired", "closing", "worker_died", "worker_down"))
"""Reasons of failed loads that say nothing about the bytes."""

Copies = Sequence[tuple[Block, Block]]
"""Pages, each with the device block it is copied to; both are held until the bytes are there."""


@dataclass(slots=True)
class _Read:
    """A block that is to be read from disk.

    Attributes:
        record: the encoded record that the disk returned.
        page: the host page that the block is read into, on loan since `began_at`; None until there
            is room.
        waiting: device blocks that will be filled from the page; they are held.
    """

    block_hash: BlockHash
    record: bytes
    page: Block | None = None
    began_at: float = 0.0
    waiting: dict[Block, None] = field(default_factory=dict)

    def opened(self) -> BlockRecord:
        """Return the decoded record."""
        return decode_record(self.block_hash, self.record).record


class _Wait(NamedTuple):
    """A device block that waits for a read, and the time at which the wait is given up."""

    block: Block
    read: _Read
    give_up_at: float


class Promoter:
    """Loads the blocks that requests want, in the order of the requests, within the arena's caps.

    Admitted requests may have half of the arena's pages inbound. Queued requests (prefetch) may
    have half of that, so that they never starve running requests.

    Invariants (`check`): every device block that waits is loading and waits for one read; every
    page that is read into is held; reads stay within the cap.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._reads: dict[BlockHash, _Read] = {}
        self._to_read: deque[_Read] = deque()  # reads that have no page yet
        self._to_copy: list[tuple[Block, Block]] = []
        self._num_copying = 0  # including `_to_copy`
        self._waiting: dict[Block, _Wait] = {}
        self._waits: deque[_Wait] = deque()  # by `give_up_at`; some have ended
        self.has_more = False
        # Pages that reads and copies up may hold together.
        self._inbound_cap = max(1, tiers.host.num_blocks // 2)

    @property
    def is_idle(self) -> bool:
        """Whether no block is being promoted."""
        return not self._reads and not self._num_copying

    def note_release(self, blocks: Sequence[Block]) -> None:
        """Stop waiting for blocks that a request has released and no other request holds."""
        if not self._waiting:
            return
        for block in blocks:
            if block.is_loading and block.ref_count == 1 and block in self._waiting:
                self._stop_waiting(block)

    def copy(self, copies: Copies) -> None:
        """Queue copies from host pages that are ready to device blocks; `pump` starts them."""
        self._tiers.host.acquire(page for page, _ in copies)
        self._tiers.device.acquire(block for _, block in copies)
        for _, block in copies:
            block.is_loading = True
        self._num_copying += len(copies)
        self._to_copy += copies

    def start(self, block: Block, block_hash: BlockHash, record: bytes | None) -> bool:
        """Have a device block filled from a read of its hash; queue the read if there is none.

        Returns:
            False if there is no such read and no unexpired record to queue one with.
        """
        read = self._reads.get(block_hash)
        if read is None:
            expires_at = record and expiry_of(block_hash, record)
            if not record or not expires_at or expires_at <= self._tiers.clock.now():
                return False
            read = self._reads[block_hash] = _Read(block_hash, record)
            self._to_read.append(read)
        self._tiers.device.acquire([block])
        block.is_loading = True
        read.waiting[block] = None
        wait = _Wait(block, read, time.monotonic() + self._tiers.load_timeout_s)
        self._waiting[block] = wait
        self._waits.append(wait)
        return True

    def prefetch(self, records: Mapping[BlockHash, bytes]) -> None:
        """Start reads of blocks that a queued request wants, within the prefetch and pin caps."""
        host = self._tiers.host
        items: list[LentPage] = []
        for block_hash, record in records.items():
            if host.lookup(block_hash) is not None or block_hash in self._reads:
                continue
            num_inbound = self._num_inbound()
            is_full = num_inbound >= self._inbound_cap // 2
            are_others_wanted = host.num_pinned + num_inbound >= host.most_pinned
            read = _Read(block_hash, record)
            if is_full or are_others_wanted or not self._begin(read, items):
                break
            self._reads[block_hash] = read
        self._submit(items)

    def pump(self) -> bool:
        """Start the reads and copies that there is room for; give up late and unwanted reads.

        Returns:
            Whether a read has to wait for a page.
        """
        self._give_up()
        items: list[LentPage] = []
        num_left = MAX_READS
        while self._to_read and self._num_inbound() < self._inbound_cap and num_left:
            num_left -= 1
            read = self._to_read[0]
            page = self._tiers.host.lookup(read.block_hash)
            is_there = page is not None and page.is_ready
            is_over = is_there or not read.waiting
            if not is_over and not self._begin(read, items):
                break
            self._to_read.popleft()
            if is_over:
                del self._reads[read.block_hash]
                self._settle(read, page)
        self._submit(items)
        self.has_more = bool(self._to_read) and not num_left
        if self._to_copy:
            copies, self._to_copy = self._to_copy, []
            self._tiers.counters.promoted_host_blocks += len(copies)
            ids = [(page.block_id, block.block_id) for page, block in copies]
            tag = (time.perf_counter(), copies)
            self._tiers.transfer.promote(cast(list[tuple[PageId, BlockId]], ids), tag)
        return bool(self._to_read)

    def on_page_loaded(self, event: PageLoaded) -> None:
        """Take a page back from the store, whether the read succeeded or failed."""
        tiers, block_hash = self._tiers, BlockHash(event.block_hash)
        read = self._reads.pop(block_hash)
        page, record, reason = read.page, event.record, event.reason
        assert page is not None and page.block_id == event.page_id, (page, event.page_id)
        tiers.counters.note_move("disk,host", read.began_at)
        if record is not None and page.block_hash is None:
            reason = "evicted"  # by an operator, or expired, during the read
        elif record is not None and record.expires_at <= tiers.clock.now():
            reason = "expired"
        if record is not None and not reason:
            tiers.catalog.add(tiers.catalog.entry_of(record))
            page.is_ready = True
            tiers.device.look_again(block_hash)
            tiers.counters.promoted_disk_blocks += len(read.waiting)
        else:
            self._count_failure(reason)
            if reason not in _HARMLESS:
                tiers.catalog.note_departed(block_hash, "corrupt")
            if page.block_hash is not None:
                tiers.host.drop(block_hash)
        self._settle(read, page)
        tiers.host.release([page])

    def on_copied(self, began_at: float, copies: Copies) -> None:
        """Mark blocks as ready whose bytes have arrived in VRAM."""
        self._tiers.counters.note_move("host,device", began_at)
        for _, block in copies:
            block.is_ready, block.is_loading = True, False
        self._num_copying -= len(copies)
        self._tiers.device.release(block for _, block in reversed(copies))
        self._tiers.host.release(page for page, _ in reversed(copies))

    def evict(self, is_wanted: Callable[[Entry], bool]) -> None:
        """Drop the pages of blocks that are being read and that the filter wants evicted."""
        tiers = self._tiers
        for block_hash, read in self._reads.items():
            page = read.page
            if page and page.block_hash and is_wanted(tiers.catalog.entry_of(read.opened())):
                tiers.host.drop(block_hash)

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        waiting = [block for read in self._reads.values() for block in read.waiting]
        if set(waiting) != self._waiting.keys():
            raise IntegrityError("a block waits for a read that does not list it")
        if len(set(waiting)) < len(waiting) or not all(block.is_loading for block in waiting):
            raise IntegrityError("a block waits for two reads, or is not marked as loading")
        pages = [read.page for read in self._reads.values() if read.page]
        if any(page.ref_count < 1 for page in pages):
            raise IntegrityError("a page is the target of a read, but is not held for it")
        if len(pages) > self._inbound_cap or len(pages) + len(self._to_read) != len(self._reads):
            what = f"{len(pages)} of {len(self._reads)} reads have a page"
            waiting_for = f"{len(self._to_read)} wait for one"
            raise IntegrityError(f"{what}, at most {self._inbound_cap} may, and {waiting_for}")

    def _num_inbound(self) -> int:
        return len(self._reads) - len(self._to_read) + self._num_copying

    def _begin(self, read: _Read, items: list[LentPage]) -> bool:
        """Take a page to read a block into, if there is one."""
        record, host = read.opened(), self._tiers.host
        tenant = record.namespace[:TENANT_BYTES]
        pages = host.allocate(1, tenant=tenant)
        if pages is None:
            return False
        (read.page,), read.began_at = pages, time.perf_counter()
        host.insert(read.page, read.block_hash, tenant)
        # The size is this engine's block size, whatever size the disk has for that hash.
        wanted = msgspec.structs.replace(record, size_bytes=self._tiers.block_bytes)
        items.append(LentPage(wanted, read.page.block_id))
        return True

    def _submit(self, items: list[LentPage]) -> None:
        if items:
            assert self._tiers.store is not None
            self._tiers.store.load(items)

    def _give_up(self) -> None:
        """Stop waiting for reads that are late; their pages stay on loan."""
        now = time.monotonic()
        while self._waits and self._waits[0].give_up_at <= now:
            wait = self._waits.popleft()
            if self._waiting.get(wait.block) is wait:
                self._tiers.catalog.note_departed(wait.read.block_hash, "load_timeout")
                self._count_failure("timeout")
                self._stop_waiting(wait.block)

    def _count_failure(self, reason: str) -> None:
        count_failure(self._tiers.counters.load_failures, reason, _FAILED)

    def _settle(self, read: _Read, page: Block | None) -> None:
        """End a read: waiting blocks are filled from the page if it is ready, else computed."""
        for block in list(read.waiting):
            self._stop_waiting(block)
            if page is not None and page.is_ready and block.ref_count:  # still held
                self.copy([(page, block)])

    def _stop_waiting(self, block: Block) -> None:
        del self._waiting.pop(block).read.waiting[block]
        block.is_loading = False
        self._tiers.device.release([block])
