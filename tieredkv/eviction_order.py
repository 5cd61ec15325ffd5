"""The order in which blocks that nobody uses are evicted: the least recently used first.

Most of the oldest blocks often cannot go yet, since a copy of them is still to be made. They are
kept apart from those that can, so that nobody asks about each of them again in every step.

It knows blocks as things with a place; it does not know hashes, tiers or retention.
Called by the engine's thread only.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from tieredkv.errors import IntegrityError
from tieredkv.types import BlockHash

_SLACK = 64


@dataclass(slots=True, eq=False)
class Block:
    """One block of a pool.

    Attributes:
        block_id: index in the pool's memory.
        ref_count: users; 0 means that it is in the free list.
        pin_count: copies that read the content; above 0 its memory is not reused.
        block_hash: identity of the content, None for a private or an empty block.
        is_ready: whether the content has arrived; a hashed block that is not ready is being filled.
        is_loading: whether it is filled from a slower tier, and held until that has ended.
        tenant: whose the content is.
        part: the part of the eviction order that it is in, None while it is in use or empty.
        rank: its place among the blocks that an eviction order has looked at.
        queued_rank: the rank with which it stands in the heap of those to be evicted.
    """

    block_id: int
    ref_count: int = 0
    pin_count: int = 0
    block_hash: BlockHash | None = field(default=None, repr=False)  # which no log may show
    is_ready: bool = False
    is_loading: bool = False
    tenant: bytes = b""
    part: "Part | None" = field(default=None, repr=False)
    rank: int = 0
    queued_rank: int = 0


class Part(OrderedDict[Block, None]):
    """Some of an order's blocks; taking one out of the middle, as every hit does, is O(1).

    Attributes:
        order: whose part it is.
        is_open: whether its blocks are, or will be, free to be evicted by any tenant.
    """

    def __init__(self, order: "EvictionOrder", *, is_open: bool = False) -> None:
        super().__init__()
        self.order = order
        self.is_open = is_open


_Ranked = list[tuple[int, Block]]
"""A heap of blocks, the oldest first; entries of blocks that have moved on are passed over."""


class EvictionOrder:
    """Blocks that nobody uses, from the oldest to the youngest, apart by what is known of them.

    A block is looked at when it has become one of the oldest. Then it goes from `unseen` to one of
    the other parts, and it is not asked about again until something is said to have changed:

        unseen   not looked at since it was last used; younger than every block of another part
        clean    it can be evicted now
        dirty    its eviction would lose something; it waits for somebody to start a copy
        moving   a copy reads it
        kept     it is within the floor of its tenant, so that the others cannot have it

    Invariants (`check`): every block is in the part that its `part` names; those of `moving` are
    pinned, those of `dirty` are not; every clean and every kept block has one entry in its heap.

    Attributes:
        can_evict: whether evicting a block loses nothing.
        num_of: blocks by tenant, None while nobody has to know.
        num_open_of: those in open parts.
    """

    def __init__(self) -> None:
        self.can_evict: Callable[[Block], bool] = lambda _block: True
        self.num_of: Counter[bytes] | None = None
        self.num_open_of: Counter[bytes] = Counter()
        self.unseen, self._kept = Part(self), Part(self)
        self._clean = Part(self, is_open=True)
        self._dirty = Part(self, is_open=True)
        self._moving = Part(self, is_open=True)
        self._seen = (self._clean, self._dirty, self._moving, self._kept)
        self._to_evict: _Ranked = []
        self._of_floors: dict[bytes, _Ranked] = {}
        self._num_looks = 0

    def __len__(self) -> int:
        return len(self.unseen) + sum(map(len, self._seen))

    def __iter__(self) -> Iterator[Block]:
        seen = sorted(chain.from_iterable(self._seen), key=lambda block: block.rank)
        return chain(seen, self.unseen)

    @property
    def num_ready(self) -> int:
        """Blocks that can be evicted now, or once the copies under way have ended."""
        return len(self._clean) + len(self._moving)

    def append(self, block: Block) -> None:
        """Add a block as the youngest."""
        self.unseen[block] = None
        block.part = self.unseen
        if self.num_of is not None:
            self.num_of[block.tenant] += 1

    def count_tenants(self, is_wanted: bool) -> None:
        """Begin to count blocks by tenant, or stop it."""
        if is_wanted != (self.num_of is not None):
            self.forget_looks()
            self.num_of = Counter(block.tenant for block in self) if is_wanted else None

    def choose(self, count: int, spare: dict[bytes, int], most_looks: int) -> list[Block]:
        """Return the oldest blocks that can be evicted; they are to be removed or put back.

        Args:
            count: how many at most.
            spare: how many may be taken of each tenant that has a floor; counted down.
            most_looks: how many of the blocks that nobody has looked at yet are looked at.
        """
        for tenant, heap in self._of_floors.items():
            for _ in range(min(count, spare.get(tenant, count)) - self.num_open_of[tenant]):
                block = _pop(heap, self._kept)
                if block is None:
                    break
                self._put(block, self._part_for(block))
        chosen: list[Block] = []
        while len(chosen) < count:
            block = _pop(self._to_evict, self._clean)
            if block is None:
                if not self.unseen or not most_looks:
                    break
                most_looks -= 1
                block = self._take_unseen()
            if spare.get(block.tenant, 1) <= 0:
                self._put(block, self._kept)
                continue
            part = self._part_for(block)
            if part is not self._clean:
                self._put(block, part)
                continue
            if block.part is not part:
                self._move(block, part)
            if block.tenant in spare:
                spare[block.tenant] -= 1
            chosen.append(block)
        return chosen

    def put_back(self, block: Block) -> None:
        """Leave a block that was chosen where it is."""
        self._put(block, self._clean)

    def look_ahead(self, num_ahead: int, most_looks: int) -> None:
        """Look at the oldest blocks until so many are known, those within floors not counted."""
        num_known = len(self._clean) + len(self._dirty) + len(self._moving)
        for _ in range(min(num_ahead - num_known, most_looks, len(self.unseen))):
            block = self._take_unseen()
            self._put(block, self._part_for(block))

    def dirty(self, at_most: int) -> list[Block]:
        """Return the first blocks that wait for a copy."""
        return list(islice(self._dirty, max(0, at_most)))

    def postpone(self, block: Block) -> None:
        """Have a block that waits for a copy wait behind the others."""
        if block.part is self._dirty:
            self._dirty.move_to_end(block)

    def look_again(self, block: Block) -> None:
        """Put a block that was looked at where it belongs now."""
        if block.part is not self.unseen and block.part is not self._kept:
            part = self._part_for(block)
            if part is not block.part:
                self._put(block, part)

    def forget_looks(self) -> None:
        """Take what is known of each block as out of date."""
        seen = sorted(chain.from_iterable(self._seen), key=lambda block: -block.rank)
        for block in seen:
            self._put(block, self.unseen)
            self.unseen.move_to_end(block, last=False)
        self._to_evict.clear()
        self._of_floors.clear()
        self.num_open_of.clear()

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        for part in (self.unseen, *self._seen):
            if any(block.part is not part for block in part):
                raise IntegrityError("a block is not in the part of the order that it names")
        if not all(block.pin_count for block in self._moving):
            raise IntegrityError("a block is moving and not pinned")
        if any(block.pin_count for block in self._dirty):
            raise IntegrityError("a block waits for a copy while one reads it")
        heaps = (
            (self._to_evict, self._clean),
            *((h, self._kept) for h in self._of_floors.values()),
        )
        entries = Counter(
            block for heap, part in heaps for rank, block in heap if _is_valid(rank, block, part)
        )
        if entries != Counter(chain(self._clean, self._kept)):
            raise IntegrityError("a block that can be evicted is not queued for it, or twice")
        if self.num_of is None:
            return
        is_open = Counter(block.tenant for part in self._seen if part.is_open for block in part)
        if +self.num_of != Counter(block.tenant for block in self) or +self.num_open_of != is_open:
            raise IntegrityError("the blocks of the order are not counted to their tenants")

    def _part_for(self, block: Block) -> Part:
        if block.pin_count:
            return self._moving
        return self._clean if self.can_evict(block) else self._dirty

    def _take_unseen(self) -> Block:
        """Give the oldest block that nobody has looked at its rank; the caller moves it."""
        block = next(iter(self.unseen))
        self._num_looks += 1
        block.rank = self._num_looks
        return block

    def _move(self, block: Block, part: Part) -> None:
        """Move a block that is in the order to another part."""
        before = block.part
        assert before is not None, block
        if self.num_of is not None:
            self.num_open_of[block.tenant] += part.is_open - before.is_open
        del before[block]
        part[block] = None
        block.part = part

    def _put(self, block: Block, part: Part) -> None:
        """Move a block to a part and queue it there."""
        self._move(block, part)
        if part is self._clean:
            self._queue(block)
        elif part is self._kept:
            heapq.heappush(self._of_floors.setdefault(block.tenant, []), (block.rank, block))

    def _queue(self, block: Block) -> None:
        """Queue a clean block to be evicted, unless it is still queued from before."""
        if block.queued_rank == block.rank:
            return
        block.queued_rank = block.rank
        heap = self._to_evict
        heapq.heappush(heap, (block.rank, block))
        if len(heap) > 2 * (len(self) - len(self.unseen)) + _SLACK:
            heap[:] = [(rank, each) for rank, each in heap if each.queued_rank == rank]
            heapq.heapify(heap)


def remove(block: Block) -> None:
    """Take a block out of the order that it is in."""
    part = block.part
    assert part is not None, block
    del part[block]
    block.part = None
    block.queued_rank = 0
    if (num_of := part.order.num_of) is not None:
        num_of[block.tenant] -= 1
        part.order.num_open_of[block.tenant] -= part.is_open


def _is_valid(rank: int, block: Block, part: Part) -> bool:
    return block.part is part and block.rank == rank


def _pop(heap: _Ranked, part: Part) -> Block | None:
    """Take the oldest block off a heap of a part."""
    while heap:
        rank, block = heapq.heappop(heap)
        if block.queued_rank == rank:
            block.queued_rank = 0
        if _is_valid(rank, block, part):
            return block
    return None
