"""Copies blocks to faster tiers: from disk to a host page, and from there to a device block.

The blocks that a request lacks in VRAM and that a slower tier holds are its restore. `plan` splits
each restore: blocks before the split are computed, blocks from it on are loaded, the last one
first. Reads and copies are started in the order of the plan. What the links cannot take yet is held
back here, so that the split may still move.

Each device block has one writer. A copy is started only into a block of which nothing is computed,
and a block into which a copy was started is not computed. A read from disk fills a host page only:
if the block was computed meanwhile, the page stays in host memory and no copy is started.

A page that is lent to the store stays held until the store returns it, whatever becomes of the
restore.

Called by the engine's thread only.
"""

import logging
import sys
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import msgspec

from tieredkv.cache.catalog import Entry
from tieredkv.cache.plan import Demand, LinkLoad, LinkState, Planner
from tieredkv.cache.pool import Block
from tieredkv.cache.prefix import Prefix
from tieredkv.cache.rates import PROBE_S
from tieredkv.cache.tiers import Tiers, count_failure
from tieredkv.errors import IntegrityError
from tieredkv.hashing import num_shared
from tieredkv.storage.codec import decode_record
from tieredkv.storage.worker_messages import LentPage, PageLoaded
from tieredkv.types import TENANT_BYTES, BlockHash, BlockId, BlockRecord, PageId

logger = logging.getLogger(__name__)

MAX_READS = 128
"""Queued reads that one step may start or drop; the next step continues with the others."""

MAX_READ_S = 0.05
"""How much the disk is given ahead, in seconds at its rate; the rest is held back for the plan."""

MAX_COPY_S = 0.25
"""The same for copies to VRAM. They are fast, and the first layers of all that is copied at once
are copied first, so that a step may begin before the others have arrived.
"""

MIN_READS = 32
"""Reads that the worker may hold at any rate, so that its threads are busy."""

READ_LATENCY_S = 0.003
"""From the end of a read until its block is in VRAM and a step can use it."""

PROBE_BYTES = 128 << 20
"""Bytes that are read to measure the disk again while the plan reads nothing."""

NO_ROOM_BYTES_PER_S = 1.0
"""The rate of a link that has no page to read into: what it might load is computed."""

_FAILED = "a block could not be loaded (%s); it is computed again"
_HARMLESS = frozenset(("missing", "evicted", "expired", "closing", "worker_died", "worker_down"))
"""Reasons of failed loads that say nothing about the bytes."""

_HOST, _DISK = 0, 1  # the links, as the planner numbers them

Copies = Sequence[tuple[Block, Block]]
"""Pages, each with the device block it is copied to; both are held until the bytes are there."""


class _Read(NamedTuple):
    """A block that is being read from disk into a page, which is on loan since `began_at`."""

    record: BlockRecord
    page: Block
    began_at: float


@dataclass(slots=True, eq=False)
class _Restore:
    """What slower tiers hold of one request's prefix, and VRAM does not.

    Attributes:
        in_host, on_disk: blocks that may be loaded and were not started, by ascending index. The
            last ones are started first.
        reading: blocks whose read was started, ascending, until `plan` finds that it has ended.
        end: index behind the last block that it waits for.
        pages: the pages of `in_host` by index, held while the request is admitted.
        give_up_at: when blocks that have not come from disk are computed; infinite while the
            request is queued.
        split: blocks before it are computed; blocks from it on are left to the links.
        probe_from: blocks from it on are read even if the plan computes them.
        is_begun: whether a read or a copy was started.
        predicted_s: from the last plan until the request's last token is computed.
    """

    prefix: Prefix
    in_host: list[int]
    on_disk: list[int]
    reading: list[int]
    end: int
    pages: dict[int, Block] = field(default_factory=dict)
    give_up_at: float = float("inf")
    split: int = 0
    probe_from: int = sys.maxsize
    is_begun: bool = False
    predicted_s: float = 0.0

    @property
    def first(self) -> int:
        """The first block that may be loaded or is being read; `end` if there is none."""
        firsts = (*self.in_host[:1], *self.on_disk[:1], *self.reading[:1])
        return min(firsts, default=self.end)

    @property
    def loads(self) -> tuple[LinkLoad, LinkLoad]:
        """What each link may load, or was given to load."""
        return LinkLoad(_HOST, self.in_host), LinkLoad(_DISK, self.on_disk, self.reading)

    @property
    def is_admitted(self) -> bool:
        """Whether the request has a block table, so that blocks are filled and not only read."""
        return bool(self.prefix.blocks)


class Progress(NamedTuple):
    """A request's tokens, and how many of them are computed."""

    prefix: Prefix
    num_computed_tokens: int
    num_tokens: int


class Promoter:
    """Loads the blocks that requests want, in the order of the requests, within the arena's caps.

    Admitted requests may have half of the arena's pages inbound. Queued requests (prefetch) may
    have half of that, so that they never starve running requests.

    Invariants (`check`): every page that is read into or copied from is held; reads stay within
    the cap; no block is queued for two copies.

    Attributes:
        has_more: whether more could be started at once, but for the bounds of one call.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._restores: dict[Prefix, _Restore] = {}
        self._order: list[_Restore] = []  # of the last plan; restores that are new follow
        self._reads: dict[BlockHash, _Read] = {}
        self._to_copy: list[tuple[Block, Block]] = []
        self._num_copying = 0  # including `_to_copy`
        self._is_short = False  # the last read found no page
        self._fence: Any = None  # after the last step that may use blocks that copies fill
        self._probed_at = -sys.float_info.max
        self.has_more = False
        # Pages that reads and copies up may hold together.
        self._inbound_cap = max(1, tiers.host.num_blocks // 2)

    @property
    def is_idle(self) -> bool:
        """Whether no block is being promoted."""
        return not self._reads and not self._num_copying

    @property
    def is_restoring(self) -> bool:
        """Whether a request has blocks to load or waits for some."""
        return bool(self._restores)

    @property
    def prefixes(self) -> list[Prefix]:
        """The prefixes that have a restore, the oldest first."""
        return list(self._restores)

    def is_reading(self, block_hash: BlockHash) -> bool:
        """Return whether the block is being read from disk."""
        return block_hash in self._reads

    # Restores

    def want(
        self,
        prefix: Prefix,
        *,
        in_host: list[int],
        on_disk: list[int],
        reading: list[int],
        end: int,
    ) -> None:
        """Restore blocks of an admitted request, or prefetch those of a queued one.

        Args:
            prefix: the request's chain.
            in_host: indices of blocks that have a ready page, ascending.
            on_disk: indices of blocks that only the disk has, ascending; their records are in
                `prefix.records`.
            reading: indices of blocks that are being read already, ascending.
            end: index behind the last block that is missing, here or in a restore that it shares.
        """
        self.forget(prefix)
        restore = _Restore(prefix, in_host, on_disk, reading, end)
        restore.split = restore.first
        self._restores[prefix] = restore
        self._order.append(restore)
        if restore.is_admitted:
            restore.give_up_at = time.monotonic() + self._tiers.load_timeout_s
            self._hold_pages(restore, in_host)
            self._fence = self._tiers.transfer.fence()

    def forget(self, prefix: Prefix) -> None:
        """End the restore of a request; requests that share its blocks take over what is left."""
        restore = self._restores.pop(prefix, None)
        if restore is None:
            return
        self._order.remove(restore)
        for other in self._restores.values():
            if other.is_admitted and (restore.in_host or restore.on_disk):
                self._hand_over(restore, other)
        self._tiers.host.release(restore.pages.values())

    def plan(self, requests: Iterable[Progress], busy_s: float) -> None:
        """Divide the restores between computing and loading, and start what is to be loaded.

        Args:
            requests: those that have tokens of their prompts to compute, in the order of service.
            busy_s: for how long the device is busy with the steps that it was given.
        """
        if not self._restores:
            return
        demands: list[Demand] = []
        restores: list[_Restore | None] = []
        num_covered = 0
        for prefix, num_computed, num_tokens in requests:
            restore = self._restores.get(prefix)
            if restore is not None:
                self._tidy(restore, num_computed)
            shared = [num_shared(prefix.hashes, each.prefix.hashes) for each in restores if each]
            num_covered = max(shared, default=0) * self._tiers.block_size
            begin = max(num_computed, min(num_covered, num_tokens))
            loads = restore.loads if restore else ()
            demands.append(Demand(begin, num_tokens, loads, bool(restore and restore.is_begun)))
            restores.append(restore)
        planned = [each for each in restores if each and self._restores.get(each.prefix) is each]
        self._order = planned + [it for it in self._restores.values() if it not in planned]
        self._split(demands, restores, busy_s)
        self.pump()
        if self._is_short:
            self._split(demands, restores, busy_s)
        for restore in planned if self._tiers.restore == "auto" else ():
            if restore.is_admitted and not restore.prefix.planned_at:
                restore.prefix.planned_at = time.monotonic()
                restore.prefix.predicted_s = restore.predicted_s

    def stop(self, prefix: Prefix, first: int, end: int) -> int:
        """Return the first of a request's blocks `[first, end)` that is left to the links.

        Returns:
            `end` if all of them may be computed.
        """
        hashes = prefix.hashes
        for restore in self._restores.values():
            if not restore.is_admitted:
                continue
            shared = end if restore.prefix is prefix else num_shared(hashes, restore.prefix.hashes)
            begin, last = max(first, restore.split), min(end, shared, restore.end)
            if begin >= last:
                continue
            for indices in (restore.in_host, restore.on_disk, restore.reading):
                at = bisect_left(indices, begin)
                last = min([last, *indices[at : at + 1]])
            if last < min(end, shared, restore.end):
                end = last
        return end

    # Moves

    def pump(self) -> bool:
        """Start the reads and copies that the plan wants and that there is room for.

        Returns:
            Whether a read has to wait for a page.
        """
        items: list[LentPage] = []
        num_left, self._is_short, self.has_more = MAX_READS, False, False
        now = time.monotonic()
        most_copies = self._most_queued(MAX_COPY_S * self._tiers.up_rate.effective(now))
        most_reads = max(
            MIN_READS, self._most_queued(MAX_READ_S * self._tiers.read_rate.effective(now))
        )
        for restore in self._order:
            while restore.in_host and restore.in_host[-1] >= restore.split and restore.is_admitted:
                if self._num_copying >= most_copies:
                    break
                index, restore.is_begun = restore.in_host.pop(), True
                page = restore.pages.pop(index)
                self._copy_if_wanted(page, restore.prefix.hashes[index])
                self._tiers.host.release([page])
            while restore.on_disk and restore.on_disk[-1] >= min(restore.split, restore.probe_from):
                is_over = self._is_over(restore)
                if not is_over:
                    if len(self._reads) >= most_reads or self._is_short:
                        break
                    if not self._tiers.read_rate.admits(self._tiers.block_bytes, now):
                        break
                    if not num_left:
                        self.has_more = True
                        break
                    if not self._begin(restore, items):
                        break
                    self._tiers.read_rate.begin(self._tiers.block_bytes, now)
                    num_left -= 1
                index, restore.is_begun = restore.on_disk.pop(), True
                if restore.prefix.hashes[index] in self._reads:
                    insort(restore.reading, index)
        if items:
            assert self._tiers.store is not None
            self._tiers.store.load(items)
        self._start_copies()
        return self._is_short

    def on_page_loaded(self, event: PageLoaded) -> None:
        """Take a page back from the store, whether the read succeeded or failed."""
        tiers, block_hash = self._tiers, BlockHash(event.block_hash)
        read = self._reads.pop(block_hash)
        page, record, reason = read.page, event.record, event.reason
        assert page.block_id == event.page_id, (page, event.page_id)
        tiers.counters.note_move("disk,host", read.began_at)
        tiers.read_rate.end(tiers.block_bytes, event.ended_at, teaches=not reason)
        if record is not None and page.block_hash is None:
            reason = "evicted"  # by an operator, or expired, during the read
        elif record is not None and record.expires_at <= tiers.clock.now():
            reason = "expired"
        if record is not None and not reason:
            tiers.catalog.add(tiers.catalog.entry_of(record))
            page.is_ready = True
            tiers.device.look_again(block_hash)
            if self._copy_if_wanted(page, block_hash):
                tiers.counters.promoted_disk_blocks += 1
            elif (block := tiers.device.lookup(block_hash)) is not None:
                tiers.counters.overtaken_blocks += block.is_ready or block.is_begun
        else:
            count_failure(tiers.counters.load_failures, reason, _FAILED)
            if reason not in _HARMLESS:
                tiers.catalog.note_departed(block_hash, "corrupt")
            if page.block_hash is not None:
                tiers.host.drop(block_hash)
        tiers.host.release([page])

    def on_copied(self, began_at: float, copies: Copies) -> None:
        """Mark blocks as ready whose bytes have arrived in VRAM."""
        tiers = self._tiers
        tiers.counters.note_move("host,device", began_at)
        for _, block in copies:
            block.is_ready, block.is_loading = True, False
        self._num_copying -= len(copies)
        tiers.device.release(block for _, block in reversed(copies))
        tiers.host.release(page for page, _ in reversed(copies))

    def evict(self, is_wanted: Callable[[Entry], bool]) -> None:
        """Drop the pages of blocks that are being read and that the filter wants evicted."""
        tiers = self._tiers
        for block_hash, read in self._reads.items():
            if read.page.block_hash and is_wanted(tiers.catalog.entry_of(read.record)):
                tiers.host.drop(block_hash)

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        pages = [read.page for read in self._reads.values()]
        pages += [page for each in self._restores.values() for page in each.pages.values()]
        if any(page.ref_count < 1 for page in pages):
            raise IntegrityError("a page is read into or wanted, but not held")
        if len(self._reads) > self._inbound_cap:
            raise IntegrityError(f"{len(self._reads)} pages read, cap {self._inbound_cap}")
        targets = [block for _, block in self._to_copy]
        if len(set(targets)) < len(targets) or not all(each.is_loading for each in targets):
            raise IntegrityError("a block is queued for two copies, or for none")
        for restore in self._restores.values():
            if restore.is_admitted and restore.pages.keys() != set(restore.in_host):
                raise IntegrityError("the pages of a restore are not those that it wants")

    # Inside

    def _most_queued(self, num_bytes: float) -> int:
        """Return how many blocks a link may be given ahead."""
        return max(1, int(num_bytes / self._tiers.block_bytes))

    def _hold_pages(self, restore: _Restore, indices: Iterable[int]) -> None:
        host, hashes = self._tiers.host, restore.prefix.hashes
        for index in indices:
            page = host.lookup(hashes[index])
            assert page is not None and page.is_ready, index
            restore.pages[index] = page
            host.acquire([page])

    def _hand_over(self, restore: _Restore, other: _Restore) -> None:
        """Let another request load what it shares with a restore that ends."""
        ours, theirs, tiers = restore.prefix, other.prefix, self._tiers
        shared = num_shared(ours.hashes, theirs.hashes)
        for name in ("in_host", "on_disk"):
            indices: list[int] = getattr(restore, name)
            passed = [
                i for i in indices[: bisect_left(indices, shared)] if self._is_open(ours.hashes[i])
            ]
            known = {*other.in_host, *other.on_disk}
            passed = [index for index in passed if index not in known]
            setattr(other, name, sorted([*getattr(other, name), *passed]))
            if name == "in_host":
                self._hold_pages(other, passed)
            theirs.records.update(
                {ours.hashes[i]: ours.records.get(ours.hashes[i]) for i in passed}
            )
            other.end = max([other.end, *(i + 1 for i in passed)])
        del tiers

    def _is_open(self, block_hash: BlockHash) -> bool:
        """Return whether VRAM has a block for these bytes into which nothing was written yet."""
        block = self._tiers.device.lookup(block_hash)
        is_held = block is not None and block.ref_count > 0
        return (
            is_held
            and block is not None
            and not (block.is_ready or block.is_loading or block.is_begun)
        )

    def _tidy(self, restore: _Restore, num_computed_tokens: int) -> None:
        """Drop what is computed already, and what has taken too long."""
        first, hashes = num_computed_tokens // self._tiers.block_size, restore.prefix.hashes
        restore.reading[:] = [each for each in restore.reading if hashes[each] in self._reads]
        if restore.is_admitted:
            for indices in (restore.in_host, restore.on_disk, restore.reading):
                del indices[: bisect_left(indices, first)]
            late = [index for index in restore.pages if index < first]
            self._tiers.host.release(restore.pages.pop(index) for index in late)
            if first >= restore.end:
                self.forget(restore.prefix)
            elif time.monotonic() >= restore.give_up_at:
                self._give_up(restore)
        elif not (restore.on_disk or restore.reading):
            self.forget(restore.prefix)

    def _give_up(self, restore: _Restore) -> None:
        """Have blocks computed that have not come from disk in time; their pages stay on loan."""
        tiers, hashes = self._tiers, restore.prefix.hashes
        restore.give_up_at = float("inf")
        for index in [*restore.on_disk, *restore.reading]:
            if self._is_open(hashes[index]):
                tiers.catalog.note_departed(hashes[index], "load_timeout")
                count_failure(tiers.counters.load_failures, "timeout", _FAILED)
        restore.on_disk.clear()
        restore.reading.clear()

    def _split(
        self, demands: Sequence[Demand], restores: Sequence[_Restore | None], busy_s: float
    ) -> None:
        tiers, now = self._tiers, time.monotonic()
        up, disk = tiers.up_rate.effective(now), tiers.read_rate.effective(now)
        if self._is_short:
            disk = NO_ROOM_BYTES_PER_S
        links = [
            LinkState(up, self._num_copying * tiers.block_bytes / up),
            LinkState(disk, tiers.read_rate.busy_s(now), READ_LATENCY_S),
        ]
        planner = Planner(
            links,
            tiers.compute_rate.seconds,
            block_size=tiers.block_size,
            block_bytes=tiers.block_bytes,
            busy_s=busy_s,
            least_tokens=tiers.compute_rate.least_tokens,
        )
        for demand, restore in zip(demands, restores, strict=True):
            split = planner.split(demand)
            if restore is None:
                continue
            restore.split, restore.predicted_s = split.block, split.done_s
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("plan %s -> %s; device busy %.4f s; %s", demand, split, busy_s, links)
            if tiers.restore == "load":
                restore.split = restore.first
        self._probe(now)

    def _probe(self, now: float) -> None:
        """Have some blocks read if the plan reads none and the disk's rate is old."""
        is_due = self._tiers.read_rate.is_stale(now) and now - self._probed_at >= PROBE_S
        first = next((each for each in self._order if each.on_disk), None)
        if first is None or not is_due or first.on_disk[-1] >= first.split:
            return
        self._probed_at = now
        count = max(MIN_READS, PROBE_BYTES // self._tiers.block_bytes)
        first.probe_from = first.on_disk[max(0, len(first.on_disk) - count)]

    def _is_over(self, restore: _Restore) -> bool:
        """Return whether a restore's last block needs no read; copy it if it has a page."""
        block_hash = restore.prefix.hashes[restore.on_disk[-1]]
        if block_hash in self._reads:
            return True
        page = self._tiers.host.lookup(block_hash)
        if page is not None and page.is_ready:
            self._copy_if_wanted(page, block_hash)
            return True
        return restore.is_admitted and not self._is_open(block_hash)

    def _begin(self, restore: _Restore, items: list[LentPage]) -> bool:
        """Take a page to read a restore's last block into, if there is one."""
        tiers, host = self._tiers, self._tiers.host
        block_hash = restore.prefix.hashes[restore.on_disk[-1]]
        num_inbound = len(self._reads) + self._num_copying
        cap = self._inbound_cap
        if not restore.is_admitted:
            cap //= 2
            if host.num_pinned + num_inbound >= host.most_pinned:
                return False
        if num_inbound >= cap:
            return False
        sealed = restore.prefix.records.get(block_hash)
        assert sealed, block_hash
        record = decode_record(block_hash, sealed).record
        tenant = record.namespace[:TENANT_BYTES]
        pages = host.allocate(1, tenant=tenant)
        if pages is None:
            self._is_short = restore.is_admitted
            return False
        host.insert(pages[0], block_hash, tenant)
        # The size is this engine's block size, whatever size the disk has for that hash.
        wanted = msgspec.structs.replace(record, size_bytes=tiers.block_bytes)
        self._reads[block_hash] = _Read(record, pages[0], time.perf_counter())
        items.append(LentPage(wanted, pages[0].block_id))
        return True

    def _copy_if_wanted(self, page: Block, block_hash: BlockHash) -> bool:
        """Queue a copy of a ready page if a request waits for its bytes in VRAM."""
        if not self._is_open(block_hash):
            return False
        block = self._tiers.device.lookup(block_hash)
        assert block is not None
        self._tiers.host.acquire([page])
        self._tiers.device.acquire([block])
        block.is_loading = True
        self._num_copying += 1
        self._to_copy.append((page, block))
        return True

    def _start_copies(self) -> None:
        if self._to_copy:
            copies, self._to_copy = self._to_copy, []
            self._tiers.counters.promoted_host_blocks += len(copies)
            ids = [(page.block_id, block.block_id) for page, block in copies]
            tag = (time.perf_counter(), copies)
            pairs = cast(list[tuple[PageId, BlockId]], ids)
            self._tiers.transfer.promote(pairs, tag, self._fence)
