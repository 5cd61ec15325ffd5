"""The engine's door to the tiers: look up, admit, extend, complete, release.

A request's prompt is a chain of full blocks. `arrive` asks every tier for the whole chain and
starts disk reads; `admit` gives the request a block table in which each full block is either ready,
on its way up, or waiting to be computed; `complete` publishes what was computed; `release` lets go.

Whose is a device block, by state:

    hashed, ready        shared: any request with this prefix may hold it; never written again
    hashed, not ready    shared: being filled by a promotion, or to be computed by the first request
                         that reaches it; the others that hold it wait
    not hashed           private to the one request whose partial block it is

Called by the engine's thread only.
"""

import logging
import sys
import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, cast

from tieredkv.block_pool import Block, BlockPool
from tieredkv.cache.demotion import Demoter
from tieredkv.cache.directory import Entry
from tieredkv.cache.promotion import Promoter
from tieredkv.cache.tiers import Tiers
from tieredkv.errors import IntegrityError
from tieredkv.storage.codec import expiry_of
from tieredkv.storage.messages import ControlRequest, LookupDone, PageLoaded, PageStored, WorkerUp
from tieredkv.storage.results import TouchItem
from tieredkv.types import TENANT_BYTES, BlockHash, Tier

logger = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 1.0
PATIENCE_S = 0.25


class BlockClaim(NamedTuple):
    """What a request wants for the blocks from the end of the claim before it to its own.

    Attributes:
        end: index of the first block behind it.
        retentions: names of policies; a block lives by the longest.
        protect_until: see `Entry`.
    """

    end: int
    retentions: frozenset[str]
    protect_until: float = 0.0


@dataclass(slots=True, eq=False)
class Prefix:
    """One request's chain of full blocks, and what it holds in the tiers.

    Attributes:
        hashes: block hashes of the full blocks of its tokens, head first.
        retention: the policy that the request asked for, for blocks behind all claims.
        claims: ascending ends.
        max_blocks: no block behind so many is hashed.
        read_ends: numbers of blocks at which a hit may end; None for any.
        blocks: its block table; the first `len(hashes)` are the chain. Empty before `admit`.
        block_ids: the ids of `blocks`, as a model takes them.
        sources: tier in which each full block was found, None where it had to be computed.
        records: what the disk said about blocks, sealed as they are stored.
        num_present: blocks of its head that were in the tiers, where `read_ends` are given.
        held: blocks of each pool that are held for it while it waits.
        refused_at: free and cached blocks, how many it wanted, and whether it was alone, when there
            was no room for it; it is not looked up again before they change.
    """

    root: BlockHash
    namespace: bytes
    hashes: list[BlockHash]
    retention: str
    claims: Sequence[BlockClaim] = ()
    max_blocks: int = sys.maxsize
    read_ends: list[int] | None = None
    blocks: list[Block] = field(default_factory=list)
    block_ids: "array[int]" = field(default_factory=lambda: array("i"))
    sources: list[Tier | None] = field(default_factory=list)
    records: dict[BlockHash, bytes] = field(default_factory=dict)
    asked: set[BlockHash] = field(default_factory=set)
    lookup_job: int | None = None
    lookup_give_up_at: float = 0.0
    num_present: int = 0
    held: dict[BlockPool, list[Block]] = field(default_factory=dict)
    refused_at: tuple[int, int, int, bool] | None = None

    @property
    def tenant(self) -> bytes:
        """Whose it is."""
        return self.namespace[:TENANT_BYTES]

    @property
    def is_admitted(self) -> bool:
        """Whether the request has a block table."""
        return bool(self.blocks)

    @property
    def is_protected(self) -> bool:
        """Whether something is held for it while it waits."""
        return any(self.held.values())

    def by_claim(self, indices: Sequence[int]) -> Iterator[tuple[BlockClaim, Sequence[int]]]:
        """Yield the claims and, of these ascending indices of blocks, those that each covers."""
        start = 0
        for claim in (*self.claims, BlockClaim(sys.maxsize, frozenset({self.retention}))):
            end = bisect_left(indices, claim.end)
            yield claim, indices[start:end]
            start = end


class TieredCache:
    """Finds, keeps and moves the blocks of all requests.

    Invariants (`check`): those of both pools, the directory, promotion and demotion; every ready
    hashed block of a pool has an entry in the directory, and every entry is in a pool; queued
    requests protect at most half of each pool.
    """

    def __init__(
        self,
        tiers: Tiers,
        *,
        can_load: bool = True,
        is_write_behind: bool = False,
        device_reserve_blocks: int = 64,
        load_timeout_s: float = 30.0,
    ) -> None:
        self.tiers = tiers
        self._can_load = can_load
        self.demoter = Demoter(
            tiers,
            device_reserve_blocks=device_reserve_blocks,
            is_write_behind=is_write_behind,
            poll=self.poll,
        )
        self.promoter = Promoter(
            tiers, load_timeout_s=load_timeout_s, is_host_clean=self.demoter.is_host_clean
        )
        self._lookups: dict[int, Prefix] = {}
        self._overdue: set[int] = set()
        self._num_held: Counter[BlockPool] = Counter()
        self._short_since: dict[Prefix, float] = {}
        self._control_requests: list[ControlRequest] = []

    # Arrival

    def arrive(self, prefix: Prefix, *, is_next: bool = False) -> None:
        """Ask every tier for the whole chain of a queued request; protect and prefetch it.

        Args:
            prefix: the request's chain.
            is_next: the request is about to be admitted; it is not protected just for that.
        """
        self.tiers.note_tenant(prefix.tenant)
        self._ask(prefix)
        if not is_next:
            self.protect(prefix)

    def is_settled(self, prefix: Prefix) -> bool:
        """Return whether it is known where the chain is; the disk gets a bounded time to answer."""
        if prefix.lookup_job is None:
            return True
        if time.monotonic() < prefix.lookup_give_up_at:
            return False
        del self._lookups[prefix.lookup_job]
        self._overdue.add(prefix.lookup_job)
        prefix.lookup_job = None
        self.tiers.counters.load_failures["lookup_timeout"] += 1
        return True

    def protect(self, prefix: Prefix) -> None:
        """Hold what a queued request wants against eviction, up to half of each pool in all.

        Nothing is held while an allocation waits for room: what is queued comes after it.
        """
        if prefix.is_protected or prefix.is_admitted or self._short_since:
            return
        device, host = self.tiers.device, self.tiers.host
        head = prefix.hashes[:1]
        if not any(device.find(head) + host.find(head)):
            return  # without its head a chain is hardly ever cached
        self.expire_due()
        readable = self._readable(prefix)
        self._hold(prefix, device, device.find(readable), device.num_blocks // 2)
        self._hold(prefix, host, host.find(device.missing(readable)), host.num_blocks // 4)

    @property
    def num_held_blocks(self) -> int:
        """Device blocks that are held for queued requests."""
        return self._num_held[self.tiers.device]

    def unprotect(self, prefix: Prefix) -> None:
        """Let go of what was held for a queued request; it may still be found later."""
        for pool, blocks in prefix.held.items():
            pool.release(blocks[::-1])
            self._num_held[pool] -= len(blocks)
        prefix.held = {}
        self.demoter.note_change()

    # Admission

    def admit(self, prefix: Prefix, num_blocks: int, *, is_alone: bool = False) -> bool:
        """Give a request its block table, and start the promotions that it needs.

        Args:
            prefix: the request's chain; `is_settled`.
            num_blocks: length of the table: the chain and the partial block behind it.
            is_alone: nobody else runs and could let go of blocks, so that floors give way.

        Returns:
            False, with nothing held, where there is no room yet or the disk has to be asked first.
        """
        device = self.tiers.device
        if prefix.refused_at == (device.num_free, device.num_cached, num_blocks, is_alone):
            return False
        self._ask(prefix)
        if prefix.lookup_job is not None:
            return False
        self.expire_due()
        chain = device.acquire_chain(self._readable(prefix))
        found = [block for block in chain if block is not None]
        fresh = self._allocate(prefix, num_blocks - len(found), is_alone)
        if fresh is None:
            device.release(found[::-1])
            if any(block.block_hash is None for block in prefix.held.get(device, ())):
                self.unprotect(prefix)  # expired or evicted by hand: of no use, and in the way
            elif not self.is_room_coming(prefix):
                prefix.refused_at = device.num_free, device.num_cached, num_blocks, is_alone
            return False
        prefix.refused_at = None
        if len(found) == len(prefix.hashes) and not self.promoter.num_loading:
            prefix.blocks = found
            prefix.sources = [Tier.DEVICE] * len(found)
        else:
            fresh.reverse()
            self._take_chain(prefix, chain, fresh)
            fresh.reverse()
        prefix.blocks.extend(fresh)
        prefix.block_ids = array("i", [block.block_id for block in prefix.blocks])
        self.unprotect(prefix)
        self.promoter.pump()
        return True

    def is_room_coming(self, prefix: Prefix) -> bool:
        """Whether what was refused to it is about to become free without taking it from others."""
        return prefix in self._short_since

    def extend(self, prefix: Prefix, *, is_alone: bool = False) -> bool:
        """Add one private block to an admitted request's table; False if there is no room yet."""
        fresh = self._allocate(prefix, 1, is_alone)
        if fresh is None:
            return False
        prefix.blocks.extend(fresh)
        prefix.block_ids.append(fresh[0].block_id)
        return True

    def why_missed(self, prefix: Prefix, index: int) -> str:
        """Return why a block of an admitted request had to be computed."""
        tiers, block_hash = self.tiers, prefix.hashes[index]
        if index < prefix.num_present:
            return "behind_lookback"
        if not self._can_load and tiers.host.lookup(block_hash) is not None:
            return "slower_than_recomputing"
        return tiers.departed.reason(block_hash, tiers.clock.now())

    # Completion

    def complete(self, prefix: Prefix, first: int, last: int) -> None:
        """Publish the full blocks `[first, last)` of the chain: their last token was computed."""
        computed: list[int] = []
        for index in range(first, last):
            block = prefix.blocks[index]
            if block.is_ready:
                continue
            prefix.sources[index] = None
            self.tiers.device.mark_ready(block)
            if block.block_hash is not None:
                computed.append(index)
        if computed:
            self._add_computed(prefix, computed)

    def seal(self, prefix: Prefix, block_hash: BlockHash) -> None:
        """Publish the private block behind the chain: generated tokens have filled it.

        Where another request computed the same block already, that one is shared and ours freed.
        """
        tiers, index = self.tiers, len(prefix.hashes)
        block = prefix.blocks[index]
        prefix.hashes.append(block_hash)
        prefix.sources.append(None)
        known = tiers.device.insert(block, block_hash, prefix.tenant)
        if known is block:
            tiers.device.mark_ready(block)
            self._add_computed(prefix, [index])
        elif known.is_ready:
            tiers.device.acquire(known)
            tiers.device.release([block])
            prefix.blocks[index] = known
            prefix.block_ids[index] = known.block_id

    def touch(self, prefix: Prefix) -> None:
        """Refresh the whole chain in every tier that has it, and note what the request claims."""
        tiers, now = self.tiers, self.tiers.clock.now()
        items: list[TouchItem] = []
        directory, hashes = tiers.directory, prefix.hashes
        for claim, part in prefix.by_claim(range(len(hashes))):
            known = map(directory.get, map(hashes.__getitem__, part))
            entries = [entry for entry in known if entry is not None]
            if claim.protect_until > now:
                directory.protect(entries, claim.retentions, claim.protect_until)
            for entry in entries:
                directory.claim(entry, claim.retentions, now)
                if entry.is_on_disk:
                    items.append(tiers.directory.touch_item(entry, now))
                else:
                    self.demoter.note_computed(entry)
        tiers.host.touch(prefix.hashes)
        if prefix.read_ends is not None:  # blocks that it computed again and does not hold
            tiers.device.touch(hashes)
        if items and tiers.store is not None:
            tiers.store.touch(items)

    def release(self, prefix: Prefix) -> None:
        """Let go of everything that a request holds: it finished, was cancelled or preempted."""
        if prefix.lookup_job is not None:
            self._lookups.pop(prefix.lookup_job, None)
            prefix.lookup_job = None
        self._short_since.pop(prefix, None)
        self.unprotect(prefix)
        self.tiers.host.touch(prefix.hashes)
        self.tiers.device.release(prefix.blocks[::-1])
        prefix.blocks = []
        prefix.block_ids = array("i")
        prefix.sources = []
        self.promoter.note_release()
        self.demoter.note_change()

    # Moves

    def poll(self, *, may_start_early: bool = False) -> None:
        """Take in what streams and store have completed since the last call.

        Args:
            may_start_early: hand blocks over when their first layers have arrived. A step that
                waits for the others holds up whoever shares it, so it is for an idle device.
        """
        usable = self.tiers.transfer.poll_usable() if may_start_early else []
        promoted, demoted = self.tiers.transfer.poll()
        for promotions in usable:
            self.promoter.on_usable(promotions)
        for promotions in promoted:
            self.promoter.on_copied(promotions)
        for pairs in demoted:
            self.demoter.on_copied(pairs)
        if self.tiers.store is None:
            return
        for event in self.tiers.store.poll():
            if isinstance(event, PageLoaded):
                self.promoter.on_page_loaded(event)
            elif isinstance(event, PageStored):
                self.demoter.on_page_stored(event)
            elif isinstance(event, LookupDone):
                self._on_lookup_done(event)
            elif isinstance(event, WorkerUp):
                self._forget_disk_copies()
            else:
                self._control_requests.append(event)

    def pump(self) -> None:
        """Start what can start: loads, demotions ahead of need, expiry. Once a step."""
        self.expire_due()
        self.promoter.pump()
        if self.promoter.has_unstarted_reads:
            self.demoter.note_change()
        self.demoter.pump()

    def expire_due(self) -> None:
        """Make every block unreachable whose time has come; end the protection of others."""
        tiers, now = self.tiers, self.tiers.clock.now()
        aged: list[BlockHash] = []
        for entry in tiers.directory.due(now):
            if tiers.directory.is_expired(entry, now):
                tiers.drop(entry.block_hash, "ttl")
                tiers.counters.expired_blocks += 1
            else:
                aged.append(entry.block_hash)
        for pool in (tiers.device, tiers.host):
            pool.touch(aged)

    def take_control_requests(self) -> list[ControlRequest]:
        """Return what the store's worker wants to know for an operator."""
        requests, self._control_requests = self._control_requests, []
        return requests

    @property
    def is_idle(self) -> bool:
        """Whether nothing moves and nothing is being looked up."""
        return self.promoter.is_idle and self.demoter.is_idle and not self._lookups

    def evict(self, is_wanted: Callable[[Entry], bool]) -> int:
        """Make the blocks that the filter wants unreachable in VRAM and host memory; count them.

        Those that are being read from disk do not arrive; those that are being written to it are
        deleted there once they are.
        """
        wanted = [entry for entry in self.tiers.directory.entries() if is_wanted(entry)]
        for entry in wanted:
            self.tiers.drop(entry.block_hash, "admin")
        self.promoter.evict(is_wanted)
        self.demoter.note_change()
        return len(wanted)

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        tiers = self.tiers
        tiers.device.check()
        tiers.host.check()
        tiers.directory.check()
        self.promoter.check()
        self.demoter.check()
        for entry in tiers.directory.entries():
            if not tiers.is_in_ram(entry.block_hash):
                raise IntegrityError(f"entry {entry.block_hash.hex()[:12]} is in no RAM tier")
        for pool in (tiers.device, tiers.host):
            for block in pool.evictable():
                if tiers.directory.get(block.block_hash) is None:
                    raise IntegrityError(f"evictable block {block.block_id} has no entry")
            if self._num_held[pool] > pool.num_blocks // 2:
                raise IntegrityError(f"{self._num_held[pool]} blocks held for the queue")

    # Inside

    def _ask(self, prefix: Prefix) -> None:
        """Ask the disk for what no RAM tier has and the disk was not asked for yet.

        While an answer is overdue nobody else waits for one: a disk that hangs costs one timeout.
        """
        tiers = self.tiers
        if tiers.store is None or not self._can_load or prefix.lookup_job is not None:
            return
        if self._overdue:
            return
        end = None if prefix.read_ends is None else max(prefix.read_ends, default=0)
        unknown = tiers.host.missing(tiers.device.missing(prefix.hashes[:end]))
        if prefix.asked:
            unknown = [block_hash for block_hash in unknown if block_hash not in prefix.asked]
        if not unknown:
            return
        prefix.asked.update(unknown)
        prefix.lookup_job = tiers.store.lookup(unknown)
        prefix.lookup_give_up_at = time.monotonic() + LOOKUP_TIMEOUT_S
        self._lookups[prefix.lookup_job] = prefix

    def _on_lookup_done(self, event: LookupDone) -> None:
        self._overdue.discard(event.job)
        prefix = self._lookups.pop(event.job, None)
        if prefix is None:
            return
        prefix.lookup_job = None
        found = cast(dict[BlockHash, bytes], event.found)
        prefix.records |= found
        if found and not prefix.is_admitted:
            host = self.tiers.host
            most = host.num_blocks // 4
            wanted = {each: found[each] for each in self._readable(prefix) if each in found}
            pages = self.promoter.prefetch(wanted, max_pages=most - self._num_held[host])
            self._hold(prefix, host, pages, most)

    def _hold(
        self, prefix: Prefix, pool: BlockPool, blocks: Sequence[Block | None], most: int
    ) -> None:
        """Hold blocks for a queued request, the first of them, up to so many for all."""
        held = [block for block in blocks if block is not None][: most - self._num_held[pool]]
        for block in held:
            pool.acquire(block)
        prefix.held.setdefault(pool, []).extend(held)
        self._num_held[pool] += len(held)

    def _forget_disk_copies(self) -> None:
        """Count no block as being on disk: a new worker may have had to start with an empty store.

        What is there after all is acknowledged without being written again.
        """
        claimed = [entry for entry in self.tiers.directory.entries() if entry.claims]
        for entry in claimed:
            entry.disk_expires_at = 0.0
            entry.is_droppable = False
        self.tiers.directory.add_all(claimed)  # their lives may end earlier now

    def _take_chain(self, prefix: Prefix, chain: list[Block | None], fresh: list[Block]) -> None:
        """Fill a request's table from the blocks that were found and, from the end, fresh ones.

        Fresh blocks are filled from the fastest tier that has them, if any does; those behind
        `chain`, where no hit may end, are computed.
        """
        tiers, now, tenant = self.tiers, self.tiers.clock.now(), prefix.tenant
        copies: list[tuple[Block, Block]] = []
        records, blocks, sources = prefix.records, prefix.blocks, prefix.sources
        hashes = prefix.hashes[: len(chain)]
        pages = tiers.host.find(hashes) if self._can_load else [None] * len(chain)
        for block, block_hash, page in zip(chain, hashes, pages, strict=True):
            record = records.get(block_hash) if records else None
            source: Tier | None = Tier.HOST if record is None else Tier.DISK
            if block is not None:
                if block.is_ready or not self.promoter.is_loading(block):
                    source = Tier.DEVICE
            else:
                block = fresh.pop()
                tiers.device.insert(block, block_hash, tenant)
                if page is not None and page.is_ready:
                    copies.append((page, block))
                elif page is None and (not record or (expiry_of(block_hash, record) or 0) <= now):
                    source = None
                elif self._can_load:
                    self.promoter.start(block, block_hash, record)
                else:
                    source = None
            blocks.append(block)
            sources.append(source)
        for block_hash in prefix.hashes[len(chain) :]:
            blocks.append(fresh.pop())
            sources.append(None)
            tiers.device.insert(blocks[-1], block_hash, tenant)  # known already, it stays private
        self.promoter.copy(copies)

    def _readable(self, prefix: Prefix) -> list[BlockHash]:
        """Return the part of a chain that may be a hit: to the last end that is all in the tiers.

        What is being computed or loaded for others counts as there.
        """
        if prefix.read_ends is None:
            return prefix.hashes
        tiers, hashes = self.tiers, prefix.hashes
        missing = tiers.device.missing(hashes)
        if self._can_load:
            missing = [each for each in tiers.host.missing(missing) if each not in prefix.records]
        num_found = prefix.num_present = hashes.index(missing[0]) if missing else len(hashes)
        return hashes[: max((end for end in prefix.read_ends if end <= num_found), default=0)]

    def _add_computed(self, prefix: Prefix, indices: Sequence[int]) -> None:
        """Enter blocks that were computed just now."""
        now = self.tiers.clock.now()
        hashes, directory = prefix.hashes, self.tiers.directory
        if directory.has_due(now):  # an old copy's life has ended while this one was computed
            for known in map(directory.get, [hashes[index] for index in indices]):
                if known is not None and directory.is_expired(known, now):
                    self.tiers.host.drop(known.block_hash)
                    directory.forget(known.block_hash)
        entries = [
            Entry(
                block_hash=hashes[index],
                parent_hash=hashes[index - 1] if index else prefix.root,
                root=prefix.root,
                namespace=prefix.namespace,
                position=index,
                computed_at=now,
                last_used=now,
                claims=claim.retentions,
                protect_until=claim.protect_until,
            )
            for claim, part in prefix.by_claim(indices)
            for index in part
        ]
        for entry in directory.add_all(entries):
            self.demoter.note_computed(entry)

    def _allocate(self, prefix: Prefix, num_blocks: int, is_alone: bool) -> list[Block] | None:
        """Take blocks whose eviction loses nothing; after a bounded wait, drop the oldest."""
        device, demoter = self.tiers.device, self.demoter
        take = partial(
            device.allocate, num_blocks, tenant=prefix.tenant, can_evict=demoter.is_device_clean
        )
        blocks = take()
        if blocks is None and is_alone and device.num_free - device.num_kept < num_blocks:
            take = partial(take, tenant=None)
            blocks = take()
        # If there are none, requests or floors hold the rest: waiting for a demotion cannot help.
        if blocks is None and device.num_free - device.num_kept >= num_blocks:
            demoter.demote(num_blocks)
            self.poll()
            # NOTE: what is larger than the host tier gets its room bit by bit. Blocks left where
            # they are would be dirty again when the next ones push their pages out.
            device.release(take(is_partial=True) or [])
            blocks = take()
            if blocks is None:
                now = time.monotonic()
                if prefix not in self._short_since:
                    self._short_since[prefix] = now
                    self.tiers.counters.allocation_waits += 1
                demoter.write(num_blocks)
                if now - self._short_since[prefix] >= PATIENCE_S:
                    demoter.drop_oldest(num_blocks)
                    blocks = take()
                if blocks is None:
                    return None
        self._short_since.pop(prefix, None)
        if blocks is not None:
            demoter.note_change()
        return blocks
