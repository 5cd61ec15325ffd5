"""The engine's interface to the tiers: look up, admit, extend, complete, release.

A request's prompt is a chain of full blocks. `arrive` asks every tier for the whole chain and
starts disk reads; `admit` gives the request a block table in which each full block is either ready,
on its way up, or waiting to be computed; `complete` publishes computed blocks; `release` releases
the table.

Who owns a device block, by its state:

    hashed, ready        shared: any request with this prefix may hold it; never written again
    hashed, not ready    shared: being filled by a promotion, or to be computed by the first request
                         that reaches it; the others that hold it wait
    not hashed           private to the one request whose partial block it is

Called by the engine's thread only.
"""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tieredkv.cache.catalog import Entry
from tieredkv.cache.counters import COMPUTED_SOONER
from tieredkv.cache.demotion import Demoter
from tieredkv.cache.departures import Departures
from tieredkv.cache.disk_link import Read, Write
from tieredkv.cache.draining import Drainer
from tieredkv.cache.evictions import Evictions, IsWanted
from tieredkv.cache.forecasts import Forecasts
from tieredkv.cache.lookups import Lookups
from tieredkv.cache.pool import Block
from tieredkv.cache.prefix import Prefix
from tieredkv.cache.promotion import Promoter
from tieredkv.cache.restores import Progress
from tieredkv.cache.room import Room
from tieredkv.cache.stretches import stretches_between
from tieredkv.cache.tiers import Tiers
from tieredkv.cache.touches import Touches
from tieredkv.errors import IntegrityError
from tieredkv.pieces import whole
from tieredkv.storage.format.record import times_of
from tieredkv.storage.tier import ControlRequest, Gone, LookupDone, Restarted
from tieredkv.types import BlockHash, Tier

MAX_EXPIRED = 64
"""Queued blocks that one step examines for expiry; the next step continues with the others."""

NUM_SAMPLED = 16
"""Blocks of a chain that are looked up to tell which part of it RAM holds."""

STILL_ON_DISK = (None, COMPUTED_SOONER, "load_timeout")
"""Reasons of `Prefix.overtaken` for which the copy on disk is good; None of other blocks."""


class TieredCache:
    """Finds and keeps the blocks of all requests, and moves them between the tiers.

    Invariants (`check`): those of both pools, the catalog, the disk link, promotion and demotion;
    every ready hashed block of a pool has an entry in the catalog, and every entry is in a pool;
    VRAM keeps the block of every page that counts as a duplicate.

    Attributes:
        lookups: asks the disk which blocks it has.
        departures: blocks that an operator sends to a slower tier.
        evictions: drops the blocks that an operator evicts.
        drainer: empties VRAM and host memory.
        forecasts: tells when requests are expected to get their first token.
        touches: refreshes the chains that requests have used.
        room: finds device blocks for requests.
        on_other_lookup: called with the answers to lookups that no request waits for.
        control_requests: an operator's requests that the store's worker has passed on.
    """

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self.promoter = Promoter(tiers)
        self.restores = self.promoter.restores
        self.demoter = Demoter(tiers)
        self.forecasts = Forecasts()
        self.departures = Departures(tiers, self.demoter)
        self.evictions = Evictions(tiers, self.promoter, self.demoter)
        self.touches = Touches(tiers, self.demoter)
        self.drainer = Drainer(tiers, self.demoter, self.poll)
        self.control_requests: deque[ControlRequest] = deque()
        self.lookups = Lookups(tiers)
        self.on_other_lookup: Callable[[LookupDone], None] = lambda _: None
        self.room = Room(tiers, self.promoter, self.demoter, self._readable, self.poll)
        self._handlers: dict[type, Callable[[Any], object]] = {
            LookupDone: self._on_lookup_done,
            Read: self.promoter.on_read,
            Write: self.demoter.on_written,
            Gone: lambda gone: tiers.events.note_gone(gone.hashes),
            Restarted: lambda _: self._forget_disk(),
            ControlRequest: self.control_requests.append,
        }

    # Arrival

    def arrive(self, prefix: Prefix) -> None:
        """Ask every tier for the whole chain of a queued request, and prefetch some of it."""
        self.tiers.note_tenant(prefix.tenant)
        self._ask_disk(prefix)

    def _ask_disk(self, prefix: Prefix) -> None:
        """Ask the disk what it has of a chain, at once if the answer can matter."""
        if unasked := self.lookups.unasked(prefix):
            is_split = prefix.read_ends is not None  # what may be a hit depends on the answer
            prefix.awaits_answer = is_split or self.promoter.would_load(prefix)
            ask = self.lookups.ask if prefix.awaits_answer else self.lookups.defer
            ask(prefix, unasked)

    def num_held(self, prefix: Prefix) -> int:
        """Return how many blocks at the head of a chain need no computing, by and large.

        They are those that some tier holds, or soon will. Blocks on disk count once the disk has
        told of them, and as one half each: a part of them is computed, and they take room that
        others have. A chain is evicted from its tail, so that the end of its head is found by
        bisection; which part of that RAM holds is told by a sample.
        """
        device, host, records = self.tiers.device.lookup, self.tiers.host.lookup, prefix.records

        def is_missing(block_hash: BlockHash) -> bool:
            return not (device(block_hash) or host(block_hash) or records.get(block_hash))

        num_found = bisect_left(prefix.hashes, True, key=is_missing)
        if not records or not num_found:
            return num_found
        sample = prefix.hashes[: num_found : -(-num_found // NUM_SAMPLED)]
        num_in_ram = sum(1 for each in sample if device(each) or host(each))
        return num_found * (len(sample) + num_in_ram) // (2 * len(sample))

    # Room for requests

    @property
    def num_free(self) -> int:
        """Blocks that no request uses."""
        return self.tiers.device.num_free

    @property
    def floors(self) -> Mapping[bytes, int]:
        """Number of blocks that each tenant keeps, even if others want them."""
        return self.tiers.device.floors

    # Admission

    def admit(
        self, prefix: Prefix, num_blocks: int, *, is_alone: bool = False, makes_room: bool = True
    ) -> bool:
        """Give a request its block table, and start the promotions that it needs.

        Args:
            prefix: the request's chain, whose lookup is settled.
            num_blocks: length of the table: the chain and the partial block behind it.
            is_alone: no other request runs that could release blocks, so that floors give way.
            makes_room: whether room is made if there is none yet, see `Room.allocate`.

        Returns:
            False, with nothing held, if there is no room yet or the disk has to be asked first.
        """
        device = self.tiers.device
        if prefix.refused_at == self.room.found_by(prefix, num_blocks, is_alone):
            return False
        self._ask_disk(prefix)
        if not self.lookups.is_settled(prefix):
            return False
        self._expire(prefix.hashes)
        chain = device.find(self._readable(prefix))
        found = [block for block in chain if block is not None]
        device.acquire(found)
        num_fresh = num_blocks - len(found)
        fresh = self.room.allocate(prefix, num_fresh, is_alone, makes_room=makes_room)
        if fresh is None:
            device.release(found[::-1])
            refused_at = self.room.found_by(prefix, num_blocks, is_alone)
            prefix.refused_at = None if self.room.is_coming(prefix) else refused_at
            return False
        prefix.refused_at, rest = None, iter(fresh)
        is_whole = len(found) == len(prefix.hashes) and not prefix.brought
        if is_whole and all(block.is_ready for block in found):
            prefix.blocks = found
            prefix.sources = [Tier.DEVICE] * len(found)
            prefix.ready = [(0, len(found))]
        else:
            self._take_chain(prefix, chain, rest)
        prefix.blocks.extend(rest)
        prefix.block_ids = array("i", [block.block_id for block in prefix.blocks])
        self.promoter.end_prefetch(prefix)
        self.tiers.events.learn(prefix, 0, len(prefix.hashes))
        return True

    def extend(self, prefix: Prefix, *, is_alone: bool = False) -> bool:
        """Add one private block to an admitted request's table; False if there is no room yet."""
        fresh = self.room.allocate(prefix, 1, is_alone)
        if fresh is None:
            return False
        prefix.blocks.extend(fresh)
        prefix.block_ids.append(fresh[0].block_id)
        return True

    def why_missed(self, prefix: Prefix, index: int) -> str:
        """Return why a block of an admitted request had to be computed."""
        tiers, block_hash = self.tiers, prefix.hashes[index]
        if block_hash in prefix.overtaken:
            return prefix.overtaken[block_hash]
        if index < prefix.num_present:
            if 0 not in (prefix.read_ends or ()) or prefix.num_present == len(prefix.hashes):
                return "behind_lookback"
            # With this block, a hit could have ended behind it.
            block_hash = prefix.hashes[prefix.num_present]
        if not tiers.can_load and (prefix.records.get(block_hash) or tiers.host.lookup(block_hash)):
            return "loads_off"
        return tiers.catalog.departed.why(block_hash, tiers.clock.now())

    # Completion

    def claim(self, prefix: Prefix, first: int, last: int) -> None:
        """Note that a step will compute the blocks `[first, last)`, so that they are not loaded."""
        for block in prefix.blocks[first:last]:
            block.is_begun = True

    def complete(self, prefix: Prefix, first: int, last: int, *, has_rest: bool = False) -> None:
        """Publish the full blocks `[first, last)` of the chain, whose last tokens were computed.

        With `has_rest`, some tokens of the block `last` were computed too, but not all of them.
        """
        blocks, hashes = prefix.blocks, prefix.hashes
        if has_rest and last < len(hashes):
            blocks[last].is_begun = True
        computed = [index for index in range(first, last) if not blocks[index].is_ready]
        if not computed:
            return
        prefix.awaited.difference_update(computed)
        num_steps = self.tiers.device_link.num_steps
        for index in computed:
            block = blocks[index]
            block.last_step = num_steps
            if block.source is not None:
                prefix.overtaken[hashes[index]] = block.miss_reason or COMPUTED_SOONER
            self.tiers.device.fill(block)
            block.source = None
            prefix.sources[index] = None
        hashed = [index for index in computed if blocks[index].block_hash is not None]
        now = self.tiers.clock.now()
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
                pinned_until=claim.pinned_until,
            )
            for claim, part in prefix.by_claim(hashed)
            for index in part
        ]
        for entry in entries if prefix.records else ():
            if prefix.overtaken.get(entry.block_hash) in STILL_ON_DISK:
                self._note_copy_on_disk(entry, prefix.records.get(entry.block_hash), now)
        self.demoter.note_computed(self.tiers.catalog.add_all(entries))

    def _note_copy_on_disk(self, entry: Entry, record: bytes | None, now: float) -> None:
        """Count a block that was computed, though the disk has it, as the copy on disk.

        It is not written again, and it is as old as the copy.
        """
        if record and _is_alive(record, now):
            known = times_of(record)
            entry.computed_at = min(entry.computed_at, known.computed_at)
            entry.disk_expires_at = known.expires_at

    def seal(self, prefix: Prefix, block_hash: BlockHash) -> None:
        """Publish the private block behind the chain, which generated tokens have filled.

        If another request has computed the same block already, that block is shared and the
        private block is released.
        """
        device, index = self.tiers.device, len(prefix.hashes)
        block = prefix.blocks[index]
        self._expire([block_hash])
        prefix.hashes.append(block_hash)
        prefix.sources.append(None)
        known = device.insert(block, block_hash, prefix.tenant)
        if known is block:
            self.complete(prefix, index, index + 1)
        elif known.is_ready:
            device.acquire([known])
            device.release([block], after=self.tiers.device_link.num_steps)
            prefix.blocks[index] = known
            prefix.block_ids[index] = known.block_id
        self.tiers.events.learn(prefix, index, index + 1)

    def release(self, prefix: Prefix) -> None:
        """Release all blocks of a request that finished, was cancelled or was preempted."""
        self.lookups.forget(prefix)
        self.room.forget(prefix)
        self.promoter.end_prefetch(prefix)
        self.touches.finish(prefix)
        self.tiers.host.touch(prefix.hashes)
        after = self.tiers.device_link.num_steps
        self.tiers.device.release(prefix.blocks[::-1], after=after)
        self.restores.forget(prefix)
        prefix.blocks = []
        prefix.block_ids = array("i")
        prefix.sources = []
        prefix.awaited = set()
        prefix.ready = []
        prefix.brought = set()
        prefix.forecast = None
        self.demoter.note_change()

    # Moves

    def note_step(self) -> None:
        """Note that a step was issued, before its rows are completed."""
        self.tiers.device_link.note_step()

    @property
    def is_restoring(self) -> bool:
        """Whether a request has blocks to load or waits for some, so that `plan` is of use."""
        return bool(self.restores)

    @property
    def only_prefetches(self) -> bool:
        """Whether no admitted request has blocks to load or waits for some."""
        return not any(restore.is_admitted for restore in self.restores.order)

    def plan(
        self, requests: Sequence[Progress], *, busy_s: float = 0.0, num_read_beside: int = 0
    ) -> None:
        """Decide which blocks of these requests are computed and which are loaded.

        Args:
            requests: all admitted requests that have tokens of their prompts to compute, and the
                next queued ones, in the order of service.
            busy_s: for how long the device is busy with the steps that it was given.
            num_read_beside: see `ComputeRate`.
        """
        self.tiers.compute_rate.num_read_beside = num_read_beside
        planned = self.promoter.plan(requests, busy_s)
        if self.tiers.restore != "auto":
            return
        for (prefix, _, _), (is_restored, done_s) in zip(requests, planned, strict=True):
            if prefix.blocks and prefix.forecast is None:
                prefix.forecast = self.forecasts.make(done_s, is_restored=is_restored)

    def note_issue(self, ending: Iterable[Prefix], done_s: Callable[[], float]) -> None:
        """Say better when requests get their first token if that comes with the step issued now.

        Args:
            ending: prefixes of the requests that get a token with it.
            done_s: returns for how long the device is busy with this step and those before it.
                Most steps are given no such request, and need not know.
        """
        for prefix in ending if self.tiers.restore == "auto" else ():
            if prefix.forecast is None or self.forecasts.is_new(prefix.forecast):
                prefix.forecast = self.forecasts.with_step(prefix.forecast, done_s())
        self.forecasts.note_issue()

    def note_first_token(self, prefix: Prefix) -> None:
        """Learn from a request's forecast, since its time has come."""
        if prefix.forecast is not None:
            self.forecasts.learn(prefix.forecast)

    def stop(self, prefix: Prefix, first: int, end: int) -> int:
        """Return the first of the blocks `[first, end)` that is left to the links, or `end`."""
        return self.restores.stop(prefix, first, end)

    def poll(self, *, may_start_early: bool = False) -> None:
        """Take in the copies, reads and writes that have ended since the last call.

        Args:
            may_start_early: whether a block is ready when its first layers have arrived. The step
                then waits for the other layers and delays all its requests, so set this only while
                the device is idle.
        """
        tiers = self.tiers
        for _, copies in tiers.device_link.poll_usable() if may_start_early else ():
            for _, block in copies:
                tiers.device.fill(block)
        promoted, demoted = tiers.device_link.poll()
        for began_at, copies in promoted:
            self.promoter.on_copied(began_at, copies)
            self.demoter.note_change()
        for began_at, pairs in demoted:
            self.demoter.on_copied(began_at, pairs)
        for told in tiers.disk_link.poll():
            self._handlers[type(told)](told)

    def read_ahead(self, seconds: float) -> None:
        """Give the disk enough to read for the time that the engine's thread is about to be away.

        Args:
            seconds: for how long issuing the next step keeps the thread.
        """
        if seconds:
            self.promoter.pump(seconds)

    def pump(self) -> None:
        """Expire blocks, ask the disk, load and demote ahead of need; called once a step."""
        self.lookups.ask_deferred()
        self.expire_due()
        self.departures.pump()
        if self.promoter.pump():
            self.demoter.note_change()
        self.demoter.pump()

    def expire_due(self) -> None:
        """Drop expired blocks, a bounded number per call, and end pins whose time is over."""
        tiers, now = self.tiers, self.tiers.clock.now()
        aged: list[BlockHash] = []
        for entry in tiers.catalog.due(now, MAX_EXPIRED):
            if tiers.catalog.is_expired(entry, now):
                self._drop_expired(entry)
            else:
                aged.append(entry.block_hash)
        for pool in tiers.pools.values():
            pool.touch(aged)

    def _expire(self, hashes: Sequence[BlockHash]) -> None:
        """Drop expired blocks among `hashes`, even if the sweep has not reached them yet."""
        catalog, now = self.tiers.catalog, self.tiers.clock.now()
        self.expire_due()
        if catalog.is_behind:
            for entry in filter(None, map(catalog.get, hashes)):
                if catalog.is_expired(entry, now):
                    self._drop_expired(entry)

    def _drop_expired(self, entry: Entry) -> None:
        self.tiers.drop(entry.block_hash, "ttl")
        self.tiers.counters.expired_blocks += 1

    def evict(self, is_wanted: IsWanted) -> int:
        """Evict blocks from VRAM and host memory at once; return how many copies."""
        return whole(self.evictions.evict(is_wanted))

    @property
    def has_more(self) -> bool:
        """Whether only the bound of one step has kept the last `pump` from starting more."""
        is_behind = self.tiers.catalog.is_behind
        return is_behind or self.promoter.has_more or self.demoter.has_more

    @property
    def is_idle(self) -> bool:
        """Whether no block is being promoted or demoted."""
        return self.promoter.is_idle and self.demoter.is_idle

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        tiers = self.tiers
        tiers.device.check()
        tiers.host.check()
        tiers.catalog.check()
        tiers.disk_link.check()
        self.promoter.check()
        self.demoter.check()
        tiers.events.check()
        for entry in tiers.catalog.entries():
            if not tiers.is_in_ram(entry.block_hash):
                name = entry.block_hash.hex()[:12]
                raise IntegrityError(
                    f"the block of entry {name} is neither in VRAM nor in host memory"
                )
            owed = tiers.catalog.given_up if entry.is_droppable else tiers.catalog.owed
            if tiers.is_promised(entry) and entry.block_hash not in owed:
                raise IntegrityError(f"block {entry.block_hash.hex()[:12]} is owed, but not noted")
        for page in tiers.host.duplicates:
            if page.block_hash is None or not tiers.device.holds_young(page.block_hash):
                what = f"page {page.block_id} is a duplicate"
                raise IntegrityError(f"{what}, but VRAM does not keep its block")
        for pool in tiers.pools.values():
            for block in pool.evictable():
                if tiers.catalog.get(block.block_hash) is None:
                    raise IntegrityError(f"evictable block {block.block_id} has no entry")

    # Inside

    def _on_lookup_done(self, event: LookupDone) -> None:
        prefix = self.lookups.take(event)
        if prefix is None:
            self.on_other_lookup(event)
        if prefix is None or not event.found:
            return
        self.tiers.events.note_found(prefix, event.found.keys())
        if prefix.blocks:  # it did not wait for the answer
            on_disk = [it for it, each in enumerate(prefix.hashes) if each in event.found]
            for block in map(prefix.blocks.__getitem__, on_disk):
                if not block.is_ready:
                    block.source = block.source or Tier.DISK
            self.promoter.probe(prefix, on_disk)
        else:
            if self.num_free < len(prefix.hashes):
                self.touches.keep_on_disk(event.found)
            self._prefetch(prefix)

    def _prefetch(self, prefix: Prefix) -> None:
        """Have all blocks read for a queued request that the disk has told of and RAM lacks."""
        tiers, records, hashes = self.tiers, prefix.records, self._readable(prefix)
        lacking = [i for i, h in enumerate(hashes) if records.get(h) and not tiers.is_in_ram(h)]
        reading = [it for it in lacking if tiers.disk_link.is_coming(hashes[it])]
        on_disk = sorted({*lacking}.difference(reading))
        self.restores.want(prefix, in_host=[], on_disk=on_disk, reading=reading, end=len(hashes))

    def _forget_disk(self) -> None:
        """Count no block as being on disk, since another worker has started."""
        self.tiers.catalog.forget_disk()
        self.tiers.events.forget_disk()
        for pool in self.tiers.pools.values():
            pool.forget_looks()
        self.demoter.note_change()

    def _take_chain(
        self, prefix: Prefix, chain: list[Block | None], fresh: Iterator[Block]
    ) -> None:
        """Fill a request's table with the blocks that were found and with fresh blocks.

        Fresh blocks are filled from the fastest tier that has their bytes, if any has. Blocks
        behind `chain`, which may not be hits, are computed.
        """
        tiers, tenant = self.tiers, prefix.tenant
        in_host, on_disk, reading, end = list[int](), list[int](), list[int](), 0
        records, blocks, sources = prefix.records, prefix.blocks, prefix.sources
        last_copied, now = None, tiers.clock.now()
        hashes, missing = prefix.hashes[: len(chain)], list[int]()
        pages = tiers.host.find(hashes) if tiers.can_load else [None] * len(chain)
        for index, (block, block_hash, page) in enumerate(zip(chain, hashes, pages, strict=True)):
            record = records.get(block_hash) if records else None
            source: Tier | None
            if block is not None:
                was_there = block.is_ready and block_hash not in prefix.brought
                source = None if was_there else block.source
                source = source or Tier.DEVICE
                if not block.is_ready and tiers.disk_link.is_coming(block_hash):
                    reading.append(index)
            else:
                block = next(fresh)
                tiers.device.insert(block, block_hash, tenant)
                if page is not None and page.is_ready:
                    block.source = Tier.HOST if record is None else Tier.DISK
                    in_host.append(index)
                elif tiers.disk_link.is_coming(block_hash):
                    block.source = Tier.DISK
                    reading.append(index)
                elif record and _is_alive(record, now):
                    block.source = Tier.DISK
                    on_disk.append(index)
                source = block.source
            if not block.is_ready:
                prefix.awaited.add(index)
                if block.is_loading:
                    last_copied = block
                else:
                    missing.append(index)
                end = end if source is None else index + 1
            blocks.append(block)
            sources.append(source)
        prefix.ready = stretches_between(missing, len(chain))
        prefix.awaited.update(range(len(chain), len(prefix.hashes)))
        for block_hash in prefix.hashes[len(chain) :]:
            blocks.append(next(fresh))
            sources.append(None)
            tiers.device.insert(blocks[-1], block_hash, tenant)  # a known hash leaves it private
        self.restores.want(
            prefix,
            in_host=in_host,
            on_disk=on_disk,
            reading=reading,
            end=end,
            last_copied=last_copied,
        )

    def _readable(self, prefix: Prefix) -> list[BlockHash]:
        """Return the head of a chain that may be a hit: up to the last of `read_ends` in the tiers.

        Without `read_ends` this is the whole chain. Blocks that are being computed or loaded for
        other requests count as present.
        """
        if prefix.read_ends is None:
            return prefix.hashes
        tiers, hashes = self.tiers, prefix.hashes
        missing = tiers.device.missing(hashes)
        if tiers.can_load:
            missing = [each for each in tiers.host.missing(missing) if not prefix.records.get(each)]
        num_found = prefix.num_present = hashes.index(missing[0]) if missing else len(hashes)
        return hashes[: max((end for end in prefix.read_ends if end <= num_found), default=0)]


def _is_alive(record: bytes, now: float) -> bool:
    """Return whether the block of a record may still be served."""
    return times_of(record).expires_at > now
