"""Brings blocks up: disk to host page, host page to device block.

Two phases each: `start` or `prefetch` holds source and destination, completion lets go of them.
A read that fails, comes late or is no longer wanted costs a miss and nothing else.

Pages on loan: a page handed to the store stays held until the store says that it is done with it;
a timeout ends the waiting of a promotion, never the loan.

Called by the engine's thread only.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

from tieredkv.block_pool import Block
from tieredkv.cache.directory import Entry
from tieredkv.cache.tiers import Tiers, count_failure
from tieredkv.errors import IntegrityError
from tieredkv.storage.codec import decode_record
from tieredkv.storage.messages import LentPage, PageLoaded
from tieredkv.types import TENANT_BYTES, BlockHash, BlockId, BlockRecord, PageId

LOOK_AGAIN_S = 0.05
_FAILED = "a block could not be loaded (%s); it is computed again"
_HARMLESS = frozenset(("missing", "evicted", "expired", "closing", "worker_died", "worker_down"))
"""Reasons of failed loads that say nothing about the bytes."""


@dataclass(slots=True, eq=False)
class Promotion:
    """One device block that waits for its page to be read, held here until it is or cannot be."""

    block: Block
    block_hash: BlockHash
    record: bytes | None  # sealed, as the disk has it
    give_up_at: float


@dataclass(slots=True)
class _Read:
    """One page being filled from disk, and the promotions that want it or gave it up."""

    page: Block
    record: BlockRecord
    began_at: float
    waiting: list[Promotion] = field(default_factory=list)


Copies = Sequence[tuple[Block, Block]]
"""Pages, each with the device block it is copied to; both are held until the bytes are there."""


class Promoter:
    """Loads what requests want, in the order they asked, within the caps of the arena.

    Admitted requests may have half of the arena's pages inbound, queued requests (prefetch) half
    of that, so that what is queued can never starve what is running.

    Invariants (`check`): every promotion under way holds its device block; every read holds its
    page; reads stay within the cap; no block both waits for a page and is copied to.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._promotions: dict[Block, Promotion] = {}
        self._to_read: deque[Promotion] = deque()
        self._reads: dict[BlockHash, _Read] = {}
        self._to_copy: list[tuple[Block, Block]] = []
        self._copying: set[Block] = set()  # those to copy included
        self._look_again_at = 0.0
        # Pages that reads and copies up may hold together.
        self._inbound_cap = max(1, tiers.host.num_blocks // 2)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way up."""
        return not self._promotions and not self._reads and not self._copying

    def is_loading(self, block: Block) -> bool:
        """Return whether the bytes of this device block are on their way."""
        return block in self._copying or block in self._promotions

    def note_release(self) -> None:
        """Look at the next `pump` for blocks that nobody wants any longer."""
        self._look_again_at = 0.0

    def copy(self, copies: Copies) -> None:
        """Fill device blocks from host pages whose content is there, from the next `pump` on."""
        self._tiers.host.acquire(page for page, _ in copies)
        self._tiers.device.acquire(block for _, block in copies)
        self._copying.update(block for _, block in copies)
        self._to_copy += copies

    def start(self, block: Block, block_hash: BlockHash, record: bytes | None) -> None:
        """Begin to fill a device block from the page being read for it or, with a record, anew."""
        self._tiers.device.acquire([block])
        give_up_at = time.monotonic() + self._tiers.load_timeout_s
        promotion = self._promotions[block] = Promotion(block, block_hash, record, give_up_at)
        if self._join(promotion):
            return
        if record is not None:
            self._to_read.append(promotion)
        else:
            self._fail(promotion, "evicted")

    def prefetch(self, records: Mapping[BlockHash, bytes], *, max_pages: int) -> int:
        """Start reading blocks that a queued request wants; return how many."""
        host = self._tiers.host
        items: list[LentPage] = []
        for block_hash, record in records.items():
            if host.lookup(block_hash) is not None or block_hash in self._reads:
                continue
            is_full = len(items) >= max_pages or self._num_inbound() >= self._inbound_cap // 2
            are_others_wanted = host.num_free <= host.num_protected
            if is_full or are_others_wanted or not self._begin_read(block_hash, record, items):
                break
        self._submit(items)
        return len(items)

    def pump(self) -> bool:
        """Start the reads and copies that there is room for; give up what is late or unwanted.

        Returns:
            Whether a read has to wait for a page.
        """
        self._give_up()
        items: list[LentPage] = []
        while self._to_read and self._num_inbound() < self._inbound_cap:
            promotion = self._to_read[0]
            if self._is_under_way(promotion) and not self._join(promotion):
                assert promotion.record is not None
                if not self._begin_read(promotion.block_hash, promotion.record, items):
                    break
                self._join(promotion)
            self._to_read.popleft()
        self._submit(items)
        if self._to_copy:
            copies, self._to_copy = self._to_copy, []
            self._tiers.counters.promoted_host_blocks += len(copies)
            ids = [(page.block_id, block.block_id) for page, block in copies]
            tag = (time.perf_counter(), copies)
            self._tiers.transfer.promote(cast(list[tuple[PageId, BlockId]], ids), tag)
        return bool(self._to_read)

    def on_page_loaded(self, event: PageLoaded) -> None:
        """Take a page back from the store: its loan has ended, well or badly."""
        tiers, block_hash = self._tiers, BlockHash(event.block_hash)
        read = self._reads.pop(block_hash)
        page, record, reason = read.page, event.record, event.reason
        tiers.counters.note_move("disk,host", read.began_at)
        assert page.block_id == event.page_id, (page.block_id, event.page_id)
        if record is not None and page.block_hash is None:
            reason = "evicted"  # by hand, or expired, while it was read
        elif record is not None and record.expires_at <= tiers.clock.now():
            reason = "expired"
        if record is not None and not reason:
            tiers.directory.add(tiers.directory.entry_of(record))
            page.is_ready = True
        else:
            count_failure(self._tiers.counters.load_failures, reason, _FAILED)
            if reason not in _HARMLESS:
                tiers.departed.note(block_hash, "corrupt")
            if page.block_hash is not None:
                tiers.host.drop(block_hash)
        for promotion in filter(self._is_under_way, read.waiting):
            tiers.counters.promoted_disk_blocks += page.is_ready
            self._settle(promotion, page)
        tiers.host.release([page])

    def on_copied(self, began_at: float, copies: Copies) -> None:
        """Hand over blocks whose bytes are in VRAM."""
        self._tiers.counters.note_move("host,device", began_at)
        for _, block in copies:
            block.is_ready = True
        self._copying.difference_update(block for _, block in copies)
        self._tiers.device.release(block for _, block in reversed(copies))
        self._tiers.host.release(page for page, _ in reversed(copies))

    def evict(self, is_wanted: Callable[[Entry], bool]) -> None:
        """Let go of the blocks that the filter wants and that are being read just now."""
        tiers = self._tiers
        for block_hash, read in self._reads.items():
            if read.page.block_hash and is_wanted(tiers.directory.entry_of(read.record)):
                tiers.host.drop(block_hash)

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        if self._copying & self._promotions.keys():
            raise IntegrityError("a block is read and copied at once")
        for block in self._promotions:
            if block.ref_count < 1:
                raise IntegrityError(f"block {block.block_id} is filled but not held")
        for block_hash, read in self._reads.items():
            if read.page.ref_count < 1:
                raise IntegrityError(f"page of {block_hash.hex()[:12]} is read into but not held")
        if len(self._reads) > self._inbound_cap:
            raise IntegrityError(f"{len(self._reads)} pages read, cap {self._inbound_cap}")

    def _num_inbound(self) -> int:
        return len(self._reads) + len(self._copying)

    def _is_under_way(self, promotion: Promotion) -> bool:
        return self._promotions.get(promotion.block) is promotion

    def _join(self, promotion: Promotion) -> bool:
        """Fill a block from its page that is there or being read; False if there is none."""
        page = self._tiers.host.lookup(promotion.block_hash)
        read = self._reads.get(promotion.block_hash)
        if page is not None and page.is_ready:
            self._settle(promotion, page)
        elif read is not None:
            read.waiting.append(promotion)
        else:
            return False
        return True

    def _begin_read(self, block_hash: BlockHash, sealed: bytes, items: list[LentPage]) -> bool:
        """Take a page to read a block into, if there is one."""
        record = decode_record(block_hash, sealed).record
        host, tenant = self._tiers.host, record.namespace[:TENANT_BYTES]
        pages = host.allocate(1, tenant=tenant)
        if pages is None:
            return False
        (page,) = pages
        host.insert(page, block_hash, tenant)
        self._reads[block_hash] = _Read(page, record, time.perf_counter())
        # Its size is what it must be here, whatever the disk has under that hash.
        wanted = msgspec.structs.replace(record, size_bytes=self._tiers.block_bytes)
        items.append(LentPage(wanted, page.block_id))
        return True

    def _submit(self, items: list[LentPage]) -> None:
        if items:
            assert self._tiers.store is not None
            self._tiers.store.load(items)

    def _give_up(self) -> None:
        """End the promotions whose read is late or that nobody wants; pages stay on loan."""
        now = time.monotonic()
        if now < self._look_again_at:
            return
        self._look_again_at = now + min(LOOK_AGAIN_S, self._tiers.load_timeout_s / 10)
        for promotion in list(self._promotions.values()):
            if promotion.block.ref_count == 1:
                self._settle(promotion)
            elif promotion.give_up_at <= now:
                self._tiers.departed.note(promotion.block_hash, "slower_than_recomputing")
                self._fail(promotion, "timeout")

    def _fail(self, promotion: Promotion, reason: str) -> None:
        count_failure(self._tiers.counters.load_failures, reason, _FAILED)
        self._settle(promotion)

    def _settle(self, promotion: Promotion, page: Block | None = None) -> None:
        """End a promotion: its block is copied from the page, if that is ready, or computed."""
        block = promotion.block
        del self._promotions[block]
        if page is not None and page.is_ready and block.ref_count > 1:  # else nobody wants it
            self.copy([(page, block)])
        self._tiers.device.release([block])
