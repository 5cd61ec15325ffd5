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

_Queued = tuple[int, int, BlockHash, int, "Life"]
"""What orders blocks for eviction: last use in microseconds, position from the tail, hash. The
number of the entry and the block follow.
"""


class Life(msgspec.Struct, gc=False):
    """One block and its times, which all tiers that have the block share.

    Attributes:
        block_hash: the block.
        position: index of the block in its prompt.
        computed_at, last_used: as of a `catalog.Entry`.
        expires_at: when the block becomes unreachable.
        queued: number of its entry in the index's heaps; 0 while it is not on disk.
    """

    block_hash: BlockHash
    position: int
    computed_at: float
    last_used: float
    expires_at: float
    queued: int = 0

    @property
    def is_on_disk(self) -> bool:
        """Whether the index has it."""
        return self.queued > 0


class DiskIndex:
    """Which blocks are on disk, and which of them go when there is no room.

    Invariants (`check`): the index has as many blocks as fit at most; each of them is in both heaps
    once, no later than its place; the blocks know that they are on disk.

    Attributes:
        num_blocks: how many fit; may be infinite.
        on_evict: called with a block that goes for want of room.
    """

    def __init__(
        self, num_blocks: float, on_evict: Callable[[Life], object] = lambda _life: None
    ) -> None:
        self.num_blocks, self.on_evict = num_blocks, on_evict
        self._lives: dict[BlockHash, Life] = {}
        # Heaps. Uses and claims only move a block back in both, so that its entry is put right once
        # it has come to the top. The numbers tell the entries of a block that has come back from
        # those that it had before.
        self._unused: list[_Queued] = []
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
        heapq.heappush(self._unused, _queued(life, number))
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

    def _make_room(self) -> None:
        """Evict what was unused for longest until one more block fits."""
        heap = self._unused
        while heap and len(self._lives) >= self.num_blocks:
            used_us, _, _, number, life = heap[0]
            if life.queued != number:
                heapq.heappop(heap)
            elif used_us != int(life.last_used * 1e6):
                heapq.heapreplace(heap, _queued(life, number))
            else:
                heapq.heappop(heap)
                del self._lives[life.block_hash]  # as `drop`, but faster
                life.queued = 0
                self.on_evict(life)

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        if len(self._lives) > self.num_blocks:
            raise IntegrityError(f"{len(self._lives)} blocks on disk, room for {self.num_blocks}")
        unused = [each for each in self._unused if each[4].queued == each[3]]
        expiry = [life for _, number, life in self._expiry if life.queued == number]
        may_expire = [it for it in self._lives.values() if it.expires_at < math.inf]
        for lives, queued in (self._lives.values(), [it[4] for it in unused]), (may_expire, expiry):
            if sorted(it.block_hash for it in lives) != sorted(it.block_hash for it in queued):
                raise IntegrityError("a block on disk is queued twice or not at all")
        if any(each > _queued(each[4], each[3]) for each in unused):
            raise IntegrityError("a block on disk is queued behind its place")
        if not all(life.is_on_disk for life in self._lives.values()):
            raise IntegrityError("a block does not know that it is on disk")


def _queued(life: Life, number: int) -> _Queued:
    """Return the entry of a block, which is ordered as `codec.lru_order` orders records."""
    return int(life.last_used * 1e6), -life.position, life.block_hash, number, life
