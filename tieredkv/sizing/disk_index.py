"""A stand-in for the index of the store on disk: the same decisions, without files.

`Store` evicts the blocks that were unused for longest (the tail of a prompt before its head),
no more than it needs room for, keeps a block that is as young as a new copy of it, and drops what
has expired when it is swept. This class does the same for a number of blocks of one size, in
memory. `tests/sizing/test_disk_index.py` runs random operations on both and compares them.

It knows times and places in prompts. It does not know bytes, links or policies.
"""

import heapq
import math
from collections.abc import Callable, Iterable
from operator import attrgetter

import msgspec

from tieredkv.errors import IntegrityError
from tieredkv.storage.index.entries import to_us
from tieredkv.types import BlockHash


class Life(msgspec.Struct, gc=False):
    """One block and its times, which all tiers that have the block share.

    Attributes:
        block_hash: the block.
        position: index of the block in its prompt.
        computed_at, last_used: as of a `catalog.Entry`.
        expires_at: when it becomes unreachable on disk; 0.0 if it may not go there.
        claims: as of a `catalog.Entry`.
        is_on_disk: whether the index has it.
        used_us, expires_us: the times under which the index has queued it to be evicted, and to
            expire.
    """

    block_hash: BlockHash
    position: int
    computed_at: float
    last_used: float
    expires_at: float
    claims: frozenset[str] = frozenset()
    is_on_disk: bool = False
    used_us: int = 0
    expires_us: int = 0


_HASH, _POSITION = attrgetter("block_hash"), attrgetter("position")


class _Queue:
    """Blocks by a time in microseconds.

    A request uses and stores many blocks at once. So a heap has the times, and each time has its
    blocks.
    """

    def __init__(self) -> None:
        self.times: list[int] = []
        self.lives: dict[int, list[Life]] = {}

    def add(self, time_us: int, life: Life) -> None:
        """Add a block."""
        lives = self.lives.get(time_us)
        if lives is None:
            lives = self.lives[time_us] = []
            heapq.heappush(self.times, time_us)
        lives.append(life)

    def pop(self) -> list[Life]:
        """Remove the earliest time, and return its blocks."""
        return self.lives.pop(heapq.heappop(self.times))

    def check(self) -> None:
        """Raise IntegrityError if the heap does not have the times of the blocks."""
        if sorted(self.times) != sorted(self.lives):
            raise IntegrityError("the times of a queue are not those of its blocks")


class DiskIndex:
    """Which blocks are on disk, and which of them go when there is no room.

    Invariants (`check`): the index has as many blocks as fit at most; each of them is queued to be
    evicted, and to expire if it does, no later than its place; the blocks know that they are on
    disk.

    Attributes:
        num_blocks: how many fit; may be infinite.
        on_evict: called with a block that goes for want of room.
    """

    def __init__(
        self, num_blocks: float, on_evict: Callable[[Life], object] = lambda _life: None
    ) -> None:
        self.num_blocks, self.on_evict = num_blocks, on_evict
        self._lives: dict[BlockHash, Life] = {}
        # Uses and claims only move a block back in both queues, so that its entry is put right once
        # its turn has come. Entries of blocks that have left, or that stand elsewhere, are skipped.
        self._used, self._expiring = _Queue(), _Queue()
        self._sorted_us = -1  # whose blocks are sorted, the first to be evicted last

    def __len__(self) -> int:
        return len(self._lives)

    def get(self, block_hash: BlockHash, now: float) -> Life | None:
        """Return a block that is stored and not expired."""
        life = self._lives.get(block_hash)
        return life if life is not None and now < life.expires_at else None

    def store(self, lives: Iterable[Life], now: float) -> int:
        """Store blocks unless they are there already, as young; return how many were written."""
        stored, num_written = self._lives, 0
        for life in lives:
            old = stored.get(life.block_hash)
            if old is not None and now < old.expires_at and old.computed_at >= life.computed_at:
                if old is not life:
                    old.last_used = max(old.last_used, life.last_used)
                    old.expires_at = max(old.expires_at, life.expires_at)
                continue
            if self.num_blocks < 1:
                continue
            if len(stored) >= self.num_blocks:
                self._evict_one()
            num_written += 1
            if now >= life.expires_at:
                continue  # its room was taken for nothing
            if old is not None and old.is_on_disk:
                self.drop(old)
            stored[life.block_hash] = life
            life.is_on_disk = True
            life.used_us = time_us = int(life.last_used * 1e6)
            self._used.add(time_us, life)
            if time_us == self._sorted_us:
                self._sorted_us = -1
            if life.expires_at < math.inf:
                life.expires_us = to_us(life.expires_at)
                self._expiring.add(life.expires_us, life)
        return num_written

    def drop(self, life: Life) -> None:
        """Drop a block that is stored."""
        del self._lives[life.block_hash]
        life.is_on_disk = False

    def sweep(self, now: float) -> list[Life]:
        """Drop what has expired, and return it."""
        expiring, due, dropped = self._expiring, to_us(now), list[Life]()
        while expiring.times and (time_us := expiring.times[0]) <= due:
            for life in expiring.pop():
                if not life.is_on_disk or life.expires_us != time_us:
                    continue
                if (expires_us := to_us(life.expires_at)) > due:
                    life.expires_us = expires_us
                    expiring.add(expires_us, life)
                    continue
                self.drop(life)
                dropped.append(life)
        return dropped

    def _evict_one(self) -> None:
        """Evict the block that was unused for longest."""
        used = self._used
        while used.times:
            time_us = used.times[0]
            queued = used.lives[time_us]
            if time_us != self._sorted_us:
                queued.sort(key=_HASH, reverse=True)  # as `lru_order` orders records
                queued.sort(key=_POSITION)
                self._sorted_us = time_us
            while queued:
                life = queued.pop()
                if not life.is_on_disk or life.used_us != time_us:
                    continue
                if (last_used_us := int(life.last_used * 1e6)) != time_us:
                    life.used_us = last_used_us
                    used.add(last_used_us, life)
                    continue
                del self._lives[life.block_hash]  # as `drop`, but faster
                life.is_on_disk = False
                self.on_evict(life)
                return
            used.pop()

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        if len(self._lives) > self.num_blocks:
            raise IntegrityError(f"{len(self._lives)} blocks on disk, room for {self.num_blocks}")
        self._used.check()
        self._expiring.check()
        for life in self._lives.values():
            if not life.is_on_disk:
                raise IntegrityError("a block does not know that it is on disk")
            places = [(self._used, life.used_us, int(life.last_used * 1e6))]
            if life.expires_at < math.inf:
                places.append((self._expiring, life.expires_us, to_us(life.expires_at)))
            for queue, time_us, place_us in places:
                if not any(queued is life for queued in queue.lives.get(time_us, ())):
                    raise IntegrityError("a block on disk is not queued")
                if time_us > place_us:
                    raise IntegrityError("a block on disk is queued behind its place")
