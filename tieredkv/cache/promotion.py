"""Copies blocks to faster tiers: from disk to a host page, and from there to a device block.

What is copied, and in which order, stand in the requests' recalls (see `recalls`). Reads and
copies are started from a recall's last block on. What the links cannot take yet is held back, so
that the plan may still change.

Each device block has one writer. A copy is started only into a block of which nothing is computed,
and a block into which a copy was started is not computed. A read from disk fills a host page only:
if the block was computed meanwhile, the page stays in host memory and no copy is started.

A page that is read into stays held until the disk link returns it, whatever becomes of the recall.

Called by the engine's thread only.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import NamedTuple, cast

import msgspec

from tieredkv.cache import plan_log
from tieredkv.cache.block import Block, Content
from tieredkv.cache.chain import Chain
from tieredkv.cache.disk_link import Read
from tieredkv.cache.link_rate import Probes
from tieredkv.cache.miss_reasons import OF_FAILED_LOADS, MissReason
from tieredkv.cache.plan import HOST_LINK, Demand, LinkLoad, Planner, Split
from tieredkv.cache.recalls import Recall, Recalls, RequestProgress
from tieredkv.cache.row import State
from tieredkv.cache.tiers import Tiers, count_failure
from tieredkv.errors import IntegrityError
from tieredkv.tier import BlockLife, Lent
from tieredkv.types import BlockHash, BlockId, PageId, Tier

logger = logging.getLogger(__name__)

MAX_READS = 128
"""Queued reads that one step may start or drop; the next step continues with the others."""

PROBE_BYTES = 128 << 20
"""Bytes that are read to measure the disk again while the plan reads nothing."""

NO_ROOM_BYTES_PER_S = 1.0
"""The rate of a link that has no page to read into: what it might load is computed."""

_FAILED = "a block could not be loaded (%s); it is computed again"

Copies = Sequence[tuple[Block, Block]]
"""Pages, each with the device block it is copied to; both are held until the bytes are there."""


class Planned(NamedTuple):
    """What is planned for a request.

    Attributes:
        chain: of the request.
        is_restored: whether it lacks blocks that slower tiers have.
        done_s: seconds until its last token is computed.
    """

    chain: Chain
    is_restored: bool
    done_s: float


class Promoter:
    """Loads the blocks that requests want, in the order of the requests, within the arena's caps.

    Admitted requests may have half of the arena's pages inbound. Queued requests may have half of
    that (prefetch), so that they never starve running requests, and nothing is prefetched while
    something is being written. What was prefetched may take half of the pages, and is evicted last
    until the requests are admitted.

    Invariants (`check`): those of the recalls; reads stay within the cap; no block is queued for
    two copies.

    Args:
        tiers: the tiers.
        admitted: the chains of all admitted requests.

    Attributes:
        recalls: what requests want.
        has_more: whether more could be started at once, but for the bounds of one call.
    """

    def __init__(self, tiers: Tiers, admitted: Collection[Chain]) -> None:
        self._tiers, self._admitted = tiers, admitted
        self._disk_link, self._device_link = tiers.disk_link, tiers.device_link
        self.recalls = Recalls(tiers)
        self._to_copy: list[tuple[Block, Block]] = []
        self._lacks_page = False  # the last read found no page
        self._read_probes = Probes()
        self.has_more = False
        # Pages that reads and copies up may hold together.
        self._inbound_cap = max(1, tiers.host.num_blocks // 2)

    @property
    def is_idle(self) -> bool:
        """Whether no block is being promoted."""
        return not self._disk_link.num_reading and not self._tiers.num_promoting

    @property
    def num_copies_left(self) -> int:
        """How many more copies may be under way to VRAM."""
        most = self._device_link.most_promotions
        return max(0, most - self._tiers.num_promoting)

    # Plan

    def plan(self, requests: Sequence[RequestProgress], busy_s: float) -> list[Planned]:
        """Divide the recalls between computing and loading, and start what is to be loaded.

        Args:
            requests: see `Recalls.demands`.
            busy_s: for how long the device is busy with the steps that it was given.

        Returns:
            What is planned for each request; nothing if there is nothing to divide or to predict.
        """
        if not self.recalls and self._tiers.settings.restore != "auto":
            return []
        self._give_up_late()
        demands = self.recalls.demands(requests)
        splits = self._divide(demands, busy_s)
        self.pump()
        if self._lacks_page:
            splits = self._divide(demands, busy_s)
        return [
            Planned(request.chain, recall is not None, split.done_s)
            for request, (_, recall), split in zip(requests, demands, splits, strict=True)
        ]

    def first_copied(self, chain: Chain, in_host: Sequence[int]) -> int:
        """Return the block from which on pages of a request that waits for room are copied.

        These are all of them, unless copying them takes longer than computing them.

        Args:
            chain: of the request.
            in_host: indices of its blocks that host memory has and VRAM lacks, ascending.
        """
        tiers, planner = self._tiers, self.planner(0.0, time.monotonic())
        num_tokens = len(chain.hashes) * tiers.block_size + 1
        copy_s = len(in_host) * tiers.payload_bytes / planner.links[HOST_LINK].bytes_per_s
        if tiers.settings.restore != "auto" or copy_s <= planner.compute(0, num_tokens):
            return in_host[0]
        demand = Demand(0, num_tokens, [LinkLoad(HOST_LINK, in_host)], ready=chain.row.there)
        return planner.split(demand).steady_block

    def _give_up_late(self) -> None:
        """Have blocks computed that have not come from disk in time; their pages stay on loan."""
        tiers = self._tiers
        for block_hash, index in self.recalls.give_up_late().items():
            self._disk_link.cancel(block_hash)
            tiers.catalog.miss_reasons.note(block_hash, "load_timeout")
            self._lose(block_hash, index, "load_timeout")
            count_failure(tiers.counters.load_failures, "timeout", _FAILED)

    def _divide(
        self, demands: Sequence[tuple[Demand, Recall | None]], busy_s: float
    ) -> list[Split]:
        now = time.monotonic()
        planner = self.planner(busy_s, now)
        logged = None
        if logger.isEnabledFor(logging.DEBUG):
            logged = plan_log.before(planner, [demand for demand, _ in demands])
        splits = self.recalls.divide(demands, planner)
        if logged is not None:
            # As text at once, since the lists of the demands change.
            logger.debug("plan %s", str(msgspec.structs.replace(logged, splits=splits)))
        first = next((each for each in self.recalls.order if each.has(State.AT_DISK)), None)
        if first is not None and not first.reads_next:
            self.probe(first.chain, first.chain.row.indices(State.AT_DISK))
        return splits

    def planner(self, busy_s: float, now: float) -> Planner:
        """Return a planner that knows what the device and the links are busy with."""
        tiers = self._tiers
        up = self._device_link.up_state(self._tiers.num_promoting, now)
        disk = self._disk_link.read_state(now)
        if self._lacks_page:
            disk = disk._replace(bytes_per_s=NO_ROOM_BYTES_PER_S)
        return Planner(
            [up, disk._replace(through=HOST_LINK)],
            tiers.compute_rate.prompt_times,
            block_size=tiers.block_size,
            busy_s=busy_s,
            least_tokens=tiers.compute_rate.least_tokens,
            is_cpu=tiers.is_cpu,
        )

    # Moves

    def probe(self, chain: Chain, on_disk: Sequence[int]) -> None:
        """Read some blocks that are to be computed, if the disk's rate is old.

        Nobody waits for them; they teach the rate.

        Args:
            chain: of an admitted or queued request.
            on_disk: indices of blocks that the disk has, ascending.
        """
        link, host, now = self._disk_link, self._tiers.host, time.monotonic()
        if link.num_reading or not self._read_probes.is_due(link.read_rate, now):
            return  # what is being read teaches the rate
        most = max(1, min(MAX_READS, PROBE_BYTES // self._tiers.payload_bytes))
        clock_s = self._tiers.clock.now()
        for index in reversed(on_disk[-most:]):
            block_hash = chain.hashes[index]
            is_gone = not chain.is_on_disk(index, clock_s)
            if is_gone or link.is_reading(block_hash) or host.lookup(block_hash) is not None:
                continue
            if not link.may_read(now) or not self._begin(chain, index, now):
                break
        if link.num_reading:
            self._read_probes.note_probe(link.read_rate, now)
        link.send()

    def pump(self, away_s: float = 0.0) -> bool:
        """Start the reads and copies that the plan wants and that there is room for.

        Args:
            away_s: the next call comes so much later than usual, so that more is given ahead.

        Returns:
            Whether a read has to wait for a page.
        """
        link, now, num_begun = self._disk_link, time.monotonic(), 0
        self._lacks_page = self.has_more = False
        room = link.most_reads(now, away_s) - link.num_reading
        for recall in self.recalls.order:
            if recall.copies_next:
                self._copy_pages(recall, self.num_copies_left)
            while recall.reads_next:
                if self._needs_no_read(recall):
                    continue
                if num_begun >= room or self._lacks_page:
                    break
                if num_begun == MAX_READS:
                    self.has_more = True
                    break
                index = recall.chain.row.last(State.AT_DISK)
                if not link.may_read(now) or not self._begin(recall.chain, index, now):
                    break
                num_begun += 1
                recall.is_begun = True
                recall.chain.row.read(index)
        if num_begun:
            self._read_probes.note_use(link.read_rate)
        link.send()
        self._start_copies()
        return self._lacks_page

    def end_prefetch(self, chain: Chain) -> None:
        """Have what was prefetched for a request evicted like other blocks, and as the youngest."""
        tiers, hashes, chain.prefetched = self._tiers, chain.prefetched, []
        tiers.prefetched.subtract(hashes)
        for block_hash in hashes:
            if not tiers.prefetched[block_hash]:
                del tiers.prefetched[block_hash]
        tiers.device.touch(hashes)
        tiers.touch_pages(hashes)

    def queue_copies(self, copies: Copies) -> None:
        """Queue copies of ready pages; the next `pump` starts them.

        Args:
            copies: each page with a block that has the hash of its content, and the tier that it
                came from. A copy takes over one use of the block.
        """
        self._tiers.host.acquire(page for page, _ in copies)
        for _, block in copies:
            block.begin_copy()
        self._tiers.num_promoting += len(copies)
        self._to_copy += copies

    def on_read(self, read: Read) -> None:
        """Use what was read from disk, if the read succeeded, and release its page."""
        life = read.found
        self._tiers.counters.promoted_disk_blocks += life is not None
        reason = self._why_useless(read)
        if life is not None and not reason:
            self._take(read, life)
        else:
            self._note_failed(read, reason)
        self._tiers.release_pages([read.page])

    def _why_useless(self, read: Read) -> str:
        """Return why a read brings nothing that may be used; "" if it does."""
        life, block_hash = read.found, read.block_hash
        if life is not None or read.reason == "missing":
            if (life.expires_at if life else read.until) <= self._tiers.clock.now():
                return "expired"
            if read.page.block_hash is None or (life is None and self._is_deleted(block_hash)):
                return "evicted"  # by an operator, during the read or since it was planned
        return read.reason

    def _take(self, read: Read, life: BlockLife) -> None:
        """Use what was read from disk."""
        tiers, page, block_hash = self._tiers, read.page, read.block_hash
        tiers.catalog.add(tiers.catalog.entry_of(read.lent, life))
        page.source = Tier.DISK
        tiers.host.fill(page)
        tiers.recheck([block_hash])
        block = tiers.device.lookup(block_hash)
        is_wanted = self._copy_if_wanted(page, block_hash, Tier.DISK)
        self.recalls.note_read(block_hash, read.index, is_copying=is_wanted)
        if block is not None and not is_wanted:
            is_overtaken = block.is_ready or block.content is Content.COMPUTING
            tiers.counters.overtaken_blocks += is_overtaken

    def _note_failed(self, read: Read, reason: str) -> None:
        """Have a block computed whose read has failed."""
        tiers, page, block_hash = self._tiers, read.page, read.block_hash
        count_failure(tiers.counters.load_failures, reason, _FAILED)
        told = OF_FAILED_LOADS.get(reason, "corrupt")
        tiers.catalog.miss_reasons.note(block_hash, told, read.until)
        self._lose(block_hash, read.index, told)
        self.recalls.note_read(block_hash, read.index, is_copying=False)
        if (entry := tiers.catalog.get(block_hash)) is not None:  # it was computed meanwhile
            tiers.note_not_on_disk(entry)
        if page.block_hash is not None:
            tiers.host.drop(block_hash)

    def _is_deleted(self, block_hash: BlockHash) -> bool:
        reasons, now = self._tiers.catalog.miss_reasons, self._tiers.clock.now()
        return reasons.why(block_hash, now) == "admin"

    def _lose(self, block_hash: BlockHash, index: int, why: MissReason) -> None:
        """Have all who want a block compute it, and note why, though a slower tier had it."""
        for chain in self._admitted:
            if chain.has_at(index, block_hash):
                chain.row.lose(index, why)

    def on_copied(self, began_at: float, copies: Copies) -> None:
        """Mark blocks as ready whose bytes have arrived in VRAM."""
        tiers = self._tiers
        tiers.counters.note_move("host,device", began_at)
        for page, block in copies:
            tiers.device.fill(block)
            if page.block_hash is None and block.block_hash is not None:
                tiers.recheck([block.block_hash])
        tiers.num_promoting -= len(copies)
        tiers.device.release(block for _, block in reversed(copies))
        tiers.release_pages(page for page, _ in reversed(copies))

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        self.recalls.check()
        if (num_reading := self._disk_link.num_reading) > self._inbound_cap:
            raise IntegrityError(f"{num_reading} pages read, cap {self._inbound_cap}")
        targets = [block for _, block in self._to_copy]
        if len(set(targets)) < len(targets) or not all(each.is_copying for each in targets):
            raise IntegrityError("a block is queued for two copies, or for none")

    # Inside

    def _copy_pages(self, recall: Recall, at_most: int) -> None:
        """Copy a recall's last blocks in host memory, unless they were evicted meanwhile.

        The pages are held for the recall already, and then for the copies.
        """
        chain, row, unwanted = recall.chain, recall.chain.row, list[Block]()
        catalog, now = self._tiers.catalog, self._tiers.clock.now()
        copies: list[tuple[Block, Block]] = []
        in_host = row.indices(State.AT_HOST)
        first = max(bisect_left(in_host, recall.host_split), len(in_host) - at_most)
        row.copy(in_host[first:])
        for index in in_host[first:]:
            page, block = row.pages.pop(index), chain.blocks[index]
            is_sound = page.block_hash is not None and page.block_hash == block.block_hash
            if not is_sound:  # expired, or evicted by an operator
                block_hash = chain.hashes[index]
                is_expired = catalog.miss_reasons.why(block_hash, now) == "expired"
                row.leave([index])
                self._lose(block_hash, index, "expired" if is_expired else "admin")
            if is_sound and block.is_open:
                block.begin_copy()
                copies.append((page, block))
            else:
                unwanted.append(page)
        self._tiers.device.acquire(block for _, block in copies)
        self._tiers.release_pages(unwanted)
        self._tiers.num_promoting += len(copies)
        self._to_copy += copies

    def _needs_no_read(self, recall: Recall) -> bool:
        """Return whether a recall's last block on disk needs no read; copy it if it has a page."""
        row = recall.chain.row
        block_hash = recall.chain.hashes[index := row.last(State.AT_DISK)]
        if self._disk_link.is_reading(block_hash):
            row.read(index)
            return True
        page = self._tiers.host.lookup(block_hash)
        if page is not None:  # if it is not ready, a copy from VRAM fills it
            if page.is_ready:
                recall.is_begun |= self._copy_if_wanted(page, block_hash, Tier.HOST)
            row.leave([index])
            return True
        if recall.is_admitted:
            is_wanted = self.recalls.is_open(block_hash)
        else:  # the disk may have dropped it since
            is_wanted = recall.chain.is_on_disk(index, self._tiers.clock.now())
        if not is_wanted:
            row.leave([index])
        return not is_wanted

    def _begin(self, chain: Chain, index: int, now: float) -> bool:
        """Queue a read of a request's block if there is a page to read it into."""
        host, block_hash = self._tiers.host, chain.hashes[index]
        num_inbound = self._disk_link.num_reading + self._tiers.num_promoting
        cap, is_admitted = self._inbound_cap, bool(chain.blocks)
        if not is_admitted:
            if self._disk_link.num_writing or len(self._tiers.prefetched) >= cap:
                return False
            cap //= 2
        if num_inbound >= cap:
            return False
        pages = self._tiers.allocate(Tier.HOST, 1, tenant=chain.tenant)
        if pages is None:
            self._lacks_page = is_admitted
            return False
        host.insert(pages[0], block_hash, chain.tenant)
        self._tiers.events.learn(chain, index, index + 1)
        # The worker refuses what is stored under this hash if it is another block than this one.
        lent = Lent(
            page_id=pages[0].block_id,
            block_hash=block_hash,
            root=chain.root,
            namespace=chain.namespace,
            size_bytes=self._tiers.payload_bytes,
            **chain.identity(index)._asdict(),
        )
        until, clock_s = chain.disk_until[index], self._tiers.clock.now()
        self._disk_link.read(lent, index, until, pages[0], now, clock_s)
        if not is_admitted:
            chain.prefetched.append(block_hash)
            self._tiers.prefetched[block_hash] += 1
        return True

    def _copy_if_wanted(self, page: Block, block_hash: BlockHash, source: Tier) -> bool:
        """Queue a copy of a ready page if a request waits for its bytes in VRAM.

        Args:
            page: of the block.
            block_hash: of the block.
            source: the tier whose bytes the request waits for.
        """
        if not self.recalls.is_open(block_hash):
            return False
        block = self._tiers.device.lookup(block_hash)
        assert block is not None
        self._tiers.device.acquire([block])
        block.source = source
        self.queue_copies([(page, block)])
        return True

    def _start_copies(self) -> None:
        if self._to_copy:
            copies, self._to_copy = self._to_copy, []
            self._tiers.counters.promoted_host_blocks += len(copies)
            for page, _ in copies:
                self._tiers.counters.used_reads += page.source is Tier.DISK
                page.source = None
            ids = [(page.block_id, block.block_id) for page, block in copies]
            tag = (time.perf_counter(), copies)
            pairs = cast(list[tuple[PageId, BlockId]], ids)
            after = max(block.last_step for _, block in copies)
            self._device_link.promote(pairs, tag, after=after)
