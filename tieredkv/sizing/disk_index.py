"""A stand-in for the index of the store on disk: the same decisions, without files.

`BlockStore` evicts the blocks that were unused for longest (the tail of a prompt before its head),
no more than it needs room for, keeps a block that is as young as a new copy of it, and drops what
has expired when it is swept. This class does the same for a number of blocks of one size, in
memory. `tests/sizing/test_disk_index.py` runs random operations on both and compares them.

It knows times and places in prompts. It does not know bytes, links or policies.
"""

import heapq
import itertools
import math
from collections.abc import Callable

import msgspec

from tieredkv.errors import IntegrityError
from tieredkv.storage.codec import to_us
from tieredkv.types import BlockHash

_Queued = tuple[int, BlockHash, int, "Life"]
"""What orders blocks that were last used at the same time: position from the tail, and hash. The
number of the entry and the block follow.
"""


class Life(msgspec.Struct, gc=False):
    """One block and its times, which all tiers that have the block share.

    Attributes:
        block_hash: the block.
        position: index of the block in its prompt.
        computed_at, last_used: as of a `catalog.Entry`.
        expires_at: when it becomes unreachable on disk; 0.0 if it may not go there.
        claims: as of a `catalog.Entry`.
        queued: number of its entry in the index's queues; 0 while it is not on disk.
    """

    block_hash: BlockHash
    position: int
    computed_at: float
    last_used: float
    expires_at: float
    claims: frozenset[str] = frozenset()
    queued: int = 0

    @property
    def is_on_disk(self) -> bool:
        """Whether the index has it."""
        return self.queued > 0


class DiskIndex:
    """Which blocks are on disk, and which of them go when there is no room.

    Invariants (`check`): the index has as many blocks as fit at most; each of them is queued once
    to be evicted and once to expire, no later than its place; the blocks know that they are on
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
        # Queues. Uses and claims only move a block back in both, so that its entry is put right
        # once its turn has come. The numbers tell the entries of a block that has come back from
        # those that it had before. A request uses many blocks at once: a heap has the times of last
        # use in microseconds, and each time has its blocks.
        self._times: list[int] = []
        self._used_at: dict[int, list[_Queued]] = {}
        self._sorted_time = -1  # whose blocks are sorted, the first to be evicted last
        self._expiry: list[tuple[int, int, Life]] = []
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._lives)

    def get(self, block_hash: BlockHash, now: float) -> Life | None:
        """Return a block that is stored and not expired."""
        life = self._lives.get(block_hash)
        return life if life is not None and now < life.expires_at else None

    def store(self, life: Life, now: float) -> bool:
        """Store a block unless it is there already, as young; return whether it was written."""
        old = self._lives.get(life.block_hash)
        if old is not None and now < old.expires_at and old.computed_at >= life.computed_at:
            if old is not life:
                old.last_used = max(old.last_used, life.last_used)
                old.expires_at = max(old.expires_at, life.expires_at)
            return False
        if self.num_blocks < 1:
            return False
        if len(self._lives) >= self.num_blocks:
            self._make_room()
        if now >= life.expires_at:
            return True  # its room was taken for nothing
        if old is not None and old.is_on_disk:
            self.drop(old)
        self._lives[life.block_hash] = life
        life.queued = number = next(self._numbers)
        self._queue(life, number)
        if life.expires_at < math.inf:
            heapq.heappush(self._expiry, (to_us(life.expires_at), number, life))
        return True

    def drop(self, life: Life) -> None:
        """Drop a block that is stored."""
        del self._lives[life.block_hash]
        life.queued = 0

    def sweep(self, now: float) -> list[Life]:
        """Drop what has expired, and return it."""
        heap, due, dropped = self._expiry, to_us(now), list[Life]()
        while heap and heap[0][0] <= due:
            _, number, life = heapq.heappop(heap)
            if life.queued != number:
                continue
            if (expires_us := to_us(life.expires_at)) > due:
                heapq.heappush(heap, (expires_us, number, life))
                continue
            self.drop(life)
            dropped.append(life)
        return dropped

    def _queue(self, life: Life, number: int) -> None:
        """Queue a block to be evicted, as `codec.lru_order` orders records."""
        time_us = int(life.last_used * 1e6)
        queued = self._used_at.get(time_us)
        if queued is None:
            queued = self._used_at[time_us] = []
            heapq.heappush(self._times, time_us)
        elif time_us == self._sorted_time:
            self._sorted_time = -1
        queued.append((-life.position, life.block_hash, number, life))

    def _make_room(self) -> None:
        """Evict what was unused for longest until one more block fits."""
        times, lives = self._times, self._lives
        while times and len(lives) >= self.num_blocks:
            time_us = times[0]
            queued = self._used_at[time_us]
            if time_us != self._sorted_time:
                queued.sort(reverse=True)
                self._sorted_time = time_us
            while queued and len(lives) >= self.num_blocks:
                _, _, number, life = queued.pop()
                if life.queued != number:
                    continue
                if time_us != int(life.last_used * 1e6):
                    self._queue(life, number)
                    continue
                del lives[life.block_hash]  # as `drop`, but faster
                life.queued = 0
                self.on_evict(life)
            if not queued:
                heapq.heappop(times)
                del self._used_at[time_us]

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        if len(self._lives) > self.num_blocks:
            raise IntegrityError(f"{len(self._lives)} blocks on disk, room for {self.num_blocks}")
        unused = [
            (time_us, life)
            for time_us, queued in self._used_at.items()
            for _, _, number, life in queued
            if life.queued == number
        ]
        expiry = [life for _, number, life in self._expiry if life.queued == number]
        may_expire = [it for it in self._lives.values() if it.expires_at < math.inf]
        on_disk = self._lives.values(), [life for _, life in unused]
        for lives, queued_lives in on_disk, (may_expire, expiry):
            if sorted(it.block_hash for it in lives) != sorted(
                it.block_hash for it in queued_lives
            ):
                raise IntegrityError("a block on disk is queued twice or not at all")
        if any(time_us > int(life.last_used * 1e6) for time_us, life in unused):
            raise IntegrityError("a block on disk is queued behind its place")
        if sorted(self._times) != sorted(self._used_at):
            raise IntegrityError("the times of last uses are not those of the queued blocks")
        if not all(life.is_on_disk for life in self._lives.values()):
            raise IntegrityError("a block does not know that it is on disk")
