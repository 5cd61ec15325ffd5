"""VRAM, host memory and a disk whose moves take no time, so that deciding is all that is done.

The pools, the order of eviction (`lru`) and the retention policy are those of a server. The disk is
any `BackingTier` that has done what it was asked for when it is polled next, as `SimulatedDisk`
has. What a server's links and queues add is when bytes arrive. Here they have arrived at once:

- a block that VRAM evicts is copied to host memory, unless it has a page there already;
- VRAM and host memory add up, since pages whose blocks VRAM keeps are evicted first;
- a block that host memory evicts is written to disk, and so is the oldest block that the disk lacks
  once more are owed to it than a stop would have time to write;
- a block that is used is the youngest in each tier that has it, its prompt's head last.

`tests/sizing/test_whole_cache.py` compares this with the whole `TieredCache` on the same requests.
"""

import functools
import heapq
import itertools
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from tieredkv.cache.block import Block
from tieredkv.cache.pool import BlockPool
from tieredkv.errors import IntegrityError
from tieredkv.retention import RetentionPolicies
from tieredkv.sizing.disk import SimulatedClock
from tieredkv.sizing.life import Life, lent
from tieredkv.tier import BackingTier, BlockLife, Gone, Loaded, Stored, TouchItem
from tieredkv.types import BlockHash, Tier

Hashes = Sequence[BlockHash]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How many blocks each tier holds, infinite without a limit.

    Attributes:
        reserve: blocks of VRAM that are copied to host memory ahead of need, so that they take room
            twice.
        most_owed: how many blocks may wait to be written to disk until host memory evicts them.
    """

    device: float = math.inf
    host: float = 0.0
    disk: float = 0.0
    reserve: int = 0
    most_owed: int = 0


Source = Tier | None
"""The tier that has a block; None if it has to be computed."""


class SimulatedTiers:
    """The tiers of a replay.

    Invariants (`check`): those of the pools; a block has a life if, and only if, it is in a tier;
    what is superseded has a life, and is not owed to the disk.

    Attributes:
        device, host: pools of VRAM and of host memory; the latter is None without host memory.
        disk: None without a disk.
        moved: blocks by the link that they were moved over, such as `device_host`.
        num_filled: blocks written to VRAM.
        ages: seconds since they were computed, of the blocks that each tier evicted for want of
            room; under None of those that were in no tier then.
        num_expired: blocks that have expired.
    """

    def __init__(
        self,
        capacity: Capacity,
        policies: RetentionPolicies,
        disk: BackingTier | None,
        clock: SimulatedClock,
        *,
        num_distinct: int,
        most_blocks: int,
        until: float = math.inf,
    ) -> None:
        """Make empty tiers.

        Args:
            capacity: how many blocks they hold.
            policies: those that requests claim, and no others.
            disk: it is empty; None without a disk.
            clock: the clock of the disk, which is set to the time of each request.
            num_distinct: how many different blocks there are at most.
            most_blocks: blocks of the longest prompt. It is computed in room beside that of VRAM if
                VRAM is smaller.
            until: time of the last request.
        """
        self._policies, self._lives = policies, dict[BlockHash, Life]()
        self._longest = functools.cache(policies.longest)
        self.moved = dict.fromkeys(("host_device", "device_host", "disk_host"), 0)
        self.ages: dict[Source, array[float]] = {each: array("d") for each in (*Tier, None)}
        self.num_filled = self.num_expired = 0
        self._now = 0.0
        enough = num_distinct + most_blocks
        kept = int(min(capacity.device, enough))
        self.device = BlockPool(max(kept, most_blocks))
        self._off_device = list[BlockHash]()  # evicted from VRAM and not moved on yet
        self._superseded = set[BlockHash]()
        self._num_beside, self._beside = self.device.num_blocks - kept, list[Block]()
        self.host = None
        if capacity.host > 0:
            self.host = BlockPool(
                max(1, int(min(capacity.host, enough)) - self._reserve(capacity, kept))
            )
        for pool in self.device, self.host:
            if pool is not None:
                pool.superseded = self._superseded
        self.disk, self._clock = disk, clock
        self._expired = dict[BlockHash, Life]()  # copies on disk that it has not dropped yet
        self._off_disk = dict[BlockHash, None]()  # evicted from disk by this request
        self._owed, self._most_owed = dict[BlockHash, Life](), capacity.most_owed
        self._bars_host = any(
            Tier.HOST not in policies.tiers(frozenset([it])) for it in policies.names
        )
        shortest_s = min(policies.deadline([name], 0.0, 0.0) for name in policies.names)
        self._has_expiry = shortest_s <= until
        # A heap of deadlines, each with blocks that have it unless they were used again.
        self._due: list[tuple[float, int, Hashes]] = []
        self._numbers = itertools.count()

    @staticmethod
    def _reserve(capacity: Capacity, kept: int) -> int:
        """Return how many pages hold what VRAM evicts next, as `Demoter` does."""
        if capacity.host == math.inf or capacity.device == math.inf:
            return 0
        return min(capacity.reserve, kept // 4, int(capacity.host) // 2)

    def begin(self, now: float) -> None:
        """Let time pass until a request comes."""
        self._now = self._clock.moment = now
        if self._beside:
            self.device.release(self._beside)
            self._beside = []
        if self._has_expiry:
            self._expire()
        if self.disk is not None:
            self._hear()

    def has(self, block_hash: BlockHash) -> bool:
        """Return whether a tier has a block that has not expired."""
        life = self._lives.get(block_hash)
        return life is not None and (self._now < life.expires_at or self._is_in_ram(block_hash))

    def supersede(self, hashes: Hashes) -> None:
        """Have blocks evicted first and go to no slower tier, unless they are used again."""
        known = [each for each in hashes if each in self._lives]
        self._superseded.update(known)
        for block_hash in known:
            self._owed.pop(block_hash, None)
        for pool in self.device, self.host:
            if pool is not None:
                pool.touch(known)

    def serve(self, hashes: Hashes, now: float, claims: frozenset[str]) -> list[Source]:
        """Serve a request: find its blocks, and compute and keep the others.

        Args:
            hashes: of its blocks.
            now: when it comes.
            claims: names of its retention policies.

        Returns:
            Where each block was.
        """
        self.begin(now)
        device = self.device
        table = device.find(hashes)
        sources: list[Source] = [Tier.DEVICE] * len(hashes)
        missing = [i for i, block in enumerate(table) if block is None]
        if missing:
            device.acquire([block for block in table if block is not None])
            self._fill(hashes, table, missing, sources, claims)
        else:
            device.acquire(cast("list[Block]", table))
        found = [each for each, source in zip(hashes, sources, strict=True) if source is not None]
        self._note_use(hashes, found, claims)
        if self.host is not None:
            self.host.touch(found)
        device.release(cast("list[Block]", table)[::-1])
        if self._num_beside:
            self._beside = self._allocate(self._num_beside)
            self._move_down()
        if self.disk is not None:
            self._write_owed()
            if self._off_disk:
                self._leave_disk()
        return sources

    def _fill(
        self,
        hashes: Hashes,
        table: list[Block | None],
        missing: list[int],
        sources: list[Source],
        claims: frozenset[str],
    ) -> None:
        """Put the blocks that VRAM lacks into it: from the fastest tier that has them, or computed.

        Pages are held until their blocks are in VRAM, and make room for what VRAM evicts then.
        """
        device, host = self.device, self.host
        pages, on_disk = self._find(hashes, missing, sources, claims)
        lost = self._read(hashes, on_disk) if on_disk else []
        if lost:
            self._find(hashes, lost, sources, claims)  # they are computed
        num_read = len(on_disk) - len(lost)
        if host is not None:
            host.acquire(pages)
        wanted = [hashes[i] for i in missing]
        fresh = self._allocate(len(missing))
        device.insert_filled(fresh, wanted)
        for i, block in zip(missing, fresh, strict=True):
            table[i] = block
        if host is not None:
            for page in pages:
                page.is_double = True
            host.release(pages)
        self._move_down()
        self.moved["host_device"] += len(pages) + num_read
        self.moved["disk_host"] += num_read
        self.num_filled += len(missing)

    def _allocate(self, count: int) -> list[Block]:
        """Allocate blocks of VRAM; `_move_down` has to move on what they held."""
        taken = self.device.allocate(count)
        assert taken.blocks is not None, "VRAM has no room for one request"
        self._off_device += taken.evicted
        return taken.blocks

    def _find(
        self, hashes: Hashes, indices: Iterable[int], sources: list[Source], claims: frozenset[str]
    ) -> tuple[list[Block], list[int]]:
        """Note where blocks are that VRAM lacks, and compute those that are nowhere.

        Returns:
            Their pages in host memory, and the indices of those that are to be read from disk.
        """
        now, host, lives, owed = self._now, self.host, self._lives, self._owed
        pages: list[Block] = []
        on_disk: list[int] = []
        expires_at = self._disk_deadline(claims, now)
        is_owed = expires_at > now
        for i in indices:
            block_hash = hashes[i]
            if (old := lives.get(block_hash)) is not None:
                page = host.lookup(block_hash) if host is not None else None
                if page is not None:
                    pages.append(page)
                    sources[i] = Tier.HOST
                    continue
                if old.is_on_disk:
                    if now < old.expires_at:
                        on_disk.append(i)
                        sources[i] = Tier.DISK
                        continue
                    self._note_expired(old)
            sources[i] = None
            lives[block_hash] = life = Life(block_hash, i, now, now, expires_at, claims)
            if is_owed:
                owed[block_hash] = life
        return pages, on_disk

    def _disk_deadline(self, claims: frozenset[str], computed_at: float) -> float:
        """Return until when the disk may keep blocks that are used now; 0.0 if it may not."""
        if self.disk is None or Tier.DISK not in self._policies.tiers(claims):
            return 0.0
        if not self._has_expiry:
            return math.inf
        return self._policies.disk_deadline(claims, computed_at, self._now) or 0.0

    def _note_use(self, hashes: Hashes, found: Hashes, claims: frozenset[str]) -> None:
        """Note that blocks were used now, by a request with these claims, and which were found."""
        now, has_claimed = self._now, False
        if self._superseded:
            self._superseded.difference_update(hashes)
        on_disk: list[Life] = []
        for life in map(self._lives.__getitem__, found):
            life.last_used = now
            if life.is_on_disk:
                on_disk.append(life)
            if life.claims is not claims and not claims <= life.claims:
                life.claims |= claims
                has_claimed = True
        is_extended = self._has_expiry or has_claimed
        if is_extended:
            self._extend(hashes)
        if not on_disk:
            return
        assert self.disk is not None
        if is_extended:
            longest = self._longest
            self.disk.touch(
                [
                    TouchItem(life.block_hash, now, life.expires_at, longest(life.claims))
                    for life in on_disk
                ]
            )
        else:
            self.disk.touch([TouchItem(life.block_hash, now) for life in on_disk])

    def _extend(self, hashes: Hashes) -> None:
        """Give blocks that are used now their deadlines; the disk may be owed them from now on.

        Blocks that came together live equally long, and are queued together to expire.
        """
        now, first, computed_at, expires_at = self._now, 0, -1.0, 0.0
        claims: frozenset[str] | None = None
        for index, life in enumerate(map(self._lives.__getitem__, hashes)):
            is_same = life.claims is claims or life.claims == claims  # the first is faster
            if not is_same or life.computed_at != computed_at:
                self._queue(claims, computed_at, hashes[first:index])
                first, claims, computed_at = index, life.claims, life.computed_at
                expires_at = self._disk_deadline(claims, computed_at)
            if life.expires_at <= now < expires_at:
                self._note_expired(life)
                self._owed[life.block_hash] = life
            life.expires_at = expires_at
        self._queue(claims, computed_at, hashes[first:])

    # Down

    def _move_down(self) -> None:
        """Copy to host memory what VRAM has evicted, unless it has pages there."""
        evicted, self._off_device = self._off_device, []
        if not evicted:
            return
        host, lives, now = self.host, self._lives, self._now
        some = list(map(lives.__getitem__, evicted))
        self.ages[Tier.DEVICE].extend([now - life.computed_at for life in some])
        if host is None:
            self._leave_ram(some)
            return
        absent = host.missing(evicted)
        if len(absent) < len(evicted):
            for page in host.find(evicted):
                if page is not None and page.is_double:
                    page.is_double = False
                    host.touch([cast(BlockHash, page.block_hash)])
        if self._bars_host or self._superseded:
            tiers_of, entering, barred = self._policies.tiers, list[BlockHash](), list[Life]()
            for block_hash in absent:
                life = lives[block_hash]
                is_superseded = block_hash in self._superseded
                if Tier.HOST in tiers_of(life.claims) and not is_superseded:
                    entering.append(block_hash)
                else:
                    barred.append(life)
            self._leave_ram(barred)
            absent = entering
        for first in range(0, len(absent), host.num_blocks):
            self._copy_down(absent[first : first + host.num_blocks])

    def _leave_host(self, evicted: list[BlockHash]) -> None:
        """Keep what host memory has evicted on disk, unless VRAM has it."""
        now, some = self._now, list(map(self._lives.__getitem__, evicted))
        self.ages[Tier.HOST].extend([now - life.computed_at for life in some])
        self._leave_ram(some)

    def _leave_ram(self, some: Iterable[Life]) -> None:
        """Keep blocks that have left VRAM and host memory on disk, if there is one."""
        now, in_device = self._now, self.device.lookup
        storing: list[Life] = []
        lost: list[Life] = []
        for life in some:
            if storing and life.is_on_disk:  # what is stored may take its room
                self._forget(lost)
                self._store(storing)
                storing, lost = [], []
            if life.is_on_disk or in_device(life.block_hash) is not None:
                continue
            self._owed.pop(life.block_hash, None)
            is_stored = life.expires_at > now and life.block_hash not in self._superseded
            (storing if is_stored else lost).append(life)
        if lost:
            self._forget(lost)
        if storing:
            self._store(storing)

    def _write_owed(self) -> None:
        """Write the oldest blocks that are owed to the disk, if more are than may wait.

        What has no page yet is copied to one first, which is then the next to be evicted.
        """
        owed, now = self._owed, self._now
        oldest = [*itertools.islice(owed.values(), max(0, len(owed) - self._most_owed))]
        for life in oldest:
            del owed[life.block_hash]
        some = oldest
        if self._has_expiry:
            some = [life for life in oldest if life.expires_at > now]
        if not some:
            return
        if self.host is not None:
            absent = self.host.missing([life.block_hash for life in some])
            self.moved["device_host"] += len(absent)
        self._store(some)

    def _copy_down(self, hashes: Hashes) -> None:
        """Copy blocks to pages, of which none is in use."""
        host = self.host
        assert host is not None
        pages, evicted, _ = host.allocate(len(hashes))
        assert pages is not None, "host memory has no room for what it can hold"
        self._leave_host(evicted)
        host.insert_filled(pages, hashes)
        host.release(pages)
        self.moved["device_host"] += len(pages)

    # The disk

    def _read(self, hashes: Hashes, indices: Sequence[int]) -> list[int]:
        """Read blocks from disk by their indices; return the indices of those that it lacks."""
        assert self.disk is not None
        lives = [self._lives[hashes[i]] for i in indices]
        self.disk.load(lent(lives, [None] * len(lives)))
        lost = self._hear(lives)
        for page in lost:
            lives[page].is_on_disk = False
        return [indices[page] for page in lost]

    def _store(self, some: Sequence[Life]) -> None:
        """Store blocks on disk; what it does not take and no other tier has is forgotten."""
        assert self.disk is not None
        stored: list[BlockLife] = []
        of: Life | None = None
        for each in some:
            if (  # blocks of one request share it
                of is None
                or each.last_used != of.last_used
                or each.computed_at != of.computed_at
                or each.claims is not of.claims
            ):
                of = each
                life = BlockLife(
                    retention=self._longest(each.claims),
                    computed_at=each.computed_at,
                    expires_at=each.expires_at,
                    last_used=each.last_used,
                )
            stored.append(life)
        self.disk.store(lent(some, stored))
        refused = [some[page] for page in self._hear(some)]
        self._forget([life for life in refused if not self._is_in_ram(life.block_hash)])

    def _hear(self, on_loan: Sequence[Life] = ()) -> list[int]:
        """Take in what the disk tells.

        Args:
            on_loan: the blocks that it was asked to read, or to write, by the numbers of their
                pages.

        Returns:
            The pages whose blocks could not be read, or written.
        """
        assert self.disk is not None
        failed: list[int] = []
        events, expired, num_others = self.disk.poll(), self._expired, 0
        for event in events:
            if isinstance(event, Stored):
                if event.reason:
                    failed.append(event.page_id)
                    continue
                life = on_loan[event.page_id]
                life.is_on_disk = True
                if expired:
                    expired.pop(life.block_hash, None)
            elif isinstance(event, Loaded):
                if event.reason:
                    failed.append(event.page_id)
            else:
                num_others += 1
                if isinstance(event, Gone):
                    self._note_gone(event)
        assert len(events) - num_others == len(on_loan), "moves take no time"
        return failed

    def _note_expired(self, life: Life) -> None:
        """Note that a copy on disk, if there is one, will never be found again."""
        if life.is_on_disk:
            life.is_on_disk = False
            self._expired[life.block_hash] = life

    def _note_gone(self, gone: Gone) -> None:
        """Note that blocks have left the disk."""
        now, lives, off_disk, age = self._now, self._lives, self._off_disk, self.ages[Tier.DISK]
        has_expired = gone.reason == "expired"
        for block_hash in cast("list[BlockHash]", gone.hashes):
            life = lives.get(block_hash)
            if life is None or not life.is_on_disk:
                life = self._expired.pop(block_hash, None)
                if life is None:  # a load has found that it is gone
                    continue
            life.is_on_disk = False
            if not has_expired:
                off_disk[block_hash] = None
                age.append(now - life.computed_at)
            elif not self._is_in_ram(block_hash):  # else its claims keep it there
                self._drop(life)

    def _leave_disk(self) -> None:
        """Forget what the disk has evicted, unless another tier has it."""
        absent = self.device.missing([*self._off_disk])
        self._off_disk.clear()
        if self.host is not None:
            absent = self.host.missing(absent)
        some = map(self._lives.get, absent)
        self._forget([life for life in some if life is not None and not life.is_on_disk])

    def _forget(self, some: Sequence[Life]) -> None:
        """Note that no tier has these blocks any more, for want of room."""
        now, lives = self._now, self._lives
        self.ages[None].extend([now - life.computed_at for life in some])
        for life in some:
            del lives[life.block_hash]
            self._superseded.discard(life.block_hash)

    def _is_in_ram(self, block_hash: BlockHash) -> bool:
        in_host = self.host is not None and self.host.lookup(block_hash) is not None
        return in_host or self.device.lookup(block_hash) is not None

    # Expiry

    def _queue(self, claims: frozenset[str] | None, computed_at: float, hashes: Hashes) -> None:
        """Queue blocks that are used now to expire."""
        if self._has_expiry and claims is not None:
            deadline = self._policies.deadline(claims, computed_at, self._now)
            heapq.heappush(self._due, (deadline, next(self._numbers), hashes))

    def _expire(self) -> None:
        """Drop what has expired from VRAM and host memory."""
        now, lives, due = self._now, self._lives, self._due
        while due and due[0][0] <= now:
            known, deadline = None, 0.0
            for life in map(lives.get, heapq.heappop(due)[2]):
                if life is None or life.expires_at > now:
                    continue
                if (times := (life.claims, life.computed_at, life.last_used)) != known:
                    known, deadline = times, self._policies.deadline(*times)
                if deadline <= now:  # else it is queued again
                    self._drop(life)

    def _drop(self, life: Life) -> None:
        """Make an expired block unreachable; a sweep takes it off the disk."""
        if self._lives.get(life.block_hash) is not life:
            return
        self.device.drop(life.block_hash)
        if self.host is not None:
            self.host.drop(life.block_hash)
        self._owed.pop(life.block_hash, None)
        self._note_expired(life)
        del self._lives[life.block_hash]
        self._superseded.discard(life.block_hash)
        self.num_expired += 1

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        self.device.check()
        if self.host is not None:
            self.host.check()
        for block_hash, life in self._lives.items():
            if not (self._is_in_ram(block_hash) or life.is_on_disk):
                raise IntegrityError(f"block {block_hash!r} has a life, but is in no tier")
        if not self._superseded <= self._lives.keys() or self._superseded & self._owed.keys():
            raise IntegrityError("a block is superseded that is in no tier, or owed to the disk")
        for pool in self.device, self.host:
            for block in pool.evictable() if pool is not None else ():
                if block.block_hash is None or block.block_hash not in self._lives:
                    raise IntegrityError(f"block {block.block_hash!r} is in a tier without a life")
