"""The order in which blocks that nobody uses are evicted: the least recently used first, or last.

Most of the oldest blocks often cannot be evicted yet, since a copy of them is still to be made.
They are kept apart from the blocks that can, so that they are not looked at again in every step.

This module knows the places of blocks in the order. It does not know hashes, tiers or retention.
Only the engine's thread may call it.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice

from tieredkv.errors import IntegrityError
from tieredkv.types import BlockHash, Tier

_SLACK = 64


@dataclass(slots=True, eq=False)
class Block:
    """One block of a pool.

    Attributes:
        block_id: index in the pool's memory.
        ref_count: number of users; 0 means that it is in the free list.
        pin_count: number of copies that read the content; above 0 its memory is not reused.
        block_hash: identity of the content, None for a private or an empty block.
        is_ready: whether the content has arrived; a hashed block that is not ready is being filled.
        is_begun: whether some of its tokens are computed, so that it is not loaded any more.
        is_loading: whether it is filled from a slower tier, and held until that has ended. It may
            be ready before: a step can begin once the first layers have arrived; see `is_whole`.
        last_step: the last step that may use its memory, but for those of its present users.
        source: the slower tier that its content came from, or may come from; None if a request
            computed it, or has to, and of a page whose content was copied to VRAM.
        miss_reason: why its content could not be loaded from there; empty unless that has failed.
        tenant: the tenant that the content belongs to.
        part: the part of the eviction order that it is in, None while it is in use or empty.
        rank: its place among the blocks that an eviction order has looked at.
        queued_rank: its rank in the heap of blocks to be evicted, 0 if it is not in the heap.
    """

    block_id: int
    ref_count: int = 0
    pin_count: int = 0
    block_hash: BlockHash | None = field(default=None, repr=False)  # no log may show it
    is_ready: bool = False
    is_begun: bool = False
    is_loading: bool = False
    last_step: int = 0
    source: Tier | None = None
    miss_reason: str = ""
    tenant: bytes = b""
    part: "Part | None" = field(default=None, repr=False)
    rank: int = 0
    queued_rank: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the bytes of all layers have arrived, so that the content may be copied."""
        return self.is_ready and not self.is_loading


class Part(OrderedDict[Block, None]):
    """Some of an order's blocks; taking one out of the middle, as every hit does, is O(1).

    Attributes:
        order: the eviction order that it is a part of.
        is_open: whether its blocks can be evicted for any tenant, now or later.
        is_waiting: whether its blocks wait for a copy to be started.
    """

    def __init__(
        self, order: "EvictionOrder", *, is_open: bool = False, is_waiting: bool = False
    ) -> None:
        super().__init__()
        self.order = order
        self.is_open, self.is_waiting = is_open, is_waiting


_Ranked = list[tuple[int, Block]]
"""A heap of blocks, the oldest first; entries of blocks that have moved since are skipped."""


class EvictionOrder:
    """Blocks that nobody uses, in the order of eviction, in parts by their state.

    The oldest blocks are evicted first, or the youngest if `is_youngest_first`. What is said of the
    oldest blocks then holds for the youngest.

    A block is looked at when it has become one of the oldest. It then moves from `unseen` to one of
    the other parts. It is not looked at again until a caller reports a change. The parts are:

        unseen   not looked at since it was last used; younger than every block of another part
        clean    it can be evicted now
        dirty    its eviction would lose its content; it waits for a copy to be started
        late     the same, and a younger block was evicted instead of it
        spared   the same, but it was within the floor of its tenant, so that its turn had not come
        moving   a copy reads it
        kept     it is within the floor of its tenant, so it is not evicted for others

    Invariants (`check`): every block is in the part that its `part` names; those of `moving` are
    pinned, those that wait for a copy are not; every clean and every kept block has one entry in
    its heap.

    Attributes:
        parts: all of its parts.
        can_evict: whether evicting a block loses nothing.
        on_clean: called with a block that was found clean and stays in the order.
        num_of: number of blocks by tenant; None while they are not counted.
        num_open_of: number of blocks in open parts, by tenant.
    """

    def __init__(self, *, is_youngest_first: bool = False) -> None:
        self.can_evict: Callable[[Block], bool] = lambda _block: True
        self.on_clean: Callable[[Block], object] = lambda _block: None
        self._is_youngest_first = is_youngest_first
        self.num_of: Counter[bytes] | None = None
        self.num_open_of: Counter[bytes] = Counter()
        self.unseen, self._kept = Part(self), Part(self)
        self._clean = Part(self, is_open=True)
        self._waiting = tuple(Part(self, is_open=True, is_waiting=True) for _ in range(3))
        self._late, self._dirty, self._spared = self._waiting
        self._moving = Part(self, is_open=True)
        self._seen = (self._clean, *self._waiting, self._moving, self._kept)
        self.parts = (self.unseen, *self._seen)
        self._to_evict: _Ranked = []
        self._of_floors: dict[bytes, _Ranked] = {}
        self._num_looks = 0
        self._last_evicted = 0  # the highest rank of a block that was evicted

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __bool__(self) -> bool:
        return any(self.parts)

    def __iter__(self) -> Iterator[Block]:
        seen = sorted(chain.from_iterable(self._seen), key=lambda block: block.rank)
        return chain(seen, reversed(self.unseen) if self._is_youngest_first else self.unseen)

    @property
    def num_ready(self) -> int:
        """Blocks that can be evicted now, or once the copies under way have ended."""
        return len(self._clean) + len(self._moving)

    @property
    def num_clean(self) -> int:
        """Blocks that can be evicted now, of those that were looked at."""
        return len(self._clean)

    def is_kept(self, block: Block) -> bool:
        """Whether a block of this order is not among the next to be evicted."""
        return block.part is self.unseen or block.part is self._kept

    def append(self, block: Block) -> None:
        """Add a block as the youngest."""
        self.unseen[block] = None
        block.part = self.unseen
        if self.num_of is not None:
            self.num_of[block.tenant] += 1

    def count_tenants(self, is_wanted: bool) -> None:
        """Start counting blocks by tenant, or stop it."""
        if is_wanted != (self.num_of is not None):
            self.forget_looks()
            self.num_of = Counter(block.tenant for block in self) if is_wanted else None

    def take(self, count: int, spare: dict[bytes, int], most_looks: int) -> list[Block]:
        """Take the oldest blocks that can be evicted out of the order; `put_back` undoes it.

        The caller evicts them. Until then, `part` tells where they were.

        Args:
            count: how many at most.
            spare: how many blocks may be taken from each tenant with a floor; it is counted down.
            most_looks: how many unseen blocks may be looked at.
        """
        for tenant, heap in self._of_floors.items():
            for _ in range(min(count, spare.get(tenant, count)) - self.num_open_of[tenant]):
                block = _pop(heap, self._kept)
                if block is None:
                    break
                self._put(block, self._part_for(block))
        taken: list[Block] = []
        while self._to_evict and len(taken) < count:
            clean = iter(partial(_pop, self._to_evict, self._clean), None)
            oldest = list(islice(clean, count - len(taken)))
            taken += self._take_from(self._clean, oldest, spare)
        while self.unseen and len(taken) < count and most_looks > 0:
            oldest = self._look_at_unseen(min(count - len(taken), most_looks))
            most_looks -= len(oldest)
            taken += self._take_from(self.unseen, oldest, spare)
        return taken

    def _take_from(
        self, part: Part, blocks: Iterable[Block], spare: dict[bytes, int]
    ) -> list[Block]:
        """Take those of a part's blocks that can be evicted, and move the others."""
        taken: list[Block] = []
        can_evict, num_of = self.can_evict, self.num_of
        for block in blocks:
            if spare and spare.get(block.tenant, 1) <= 0:
                self._put(block, self._kept)
            elif block.pin_count or not can_evict(block):
                self._put(block, self._moving if block.pin_count else self._dirty)
            else:
                if spare and block.tenant in spare:
                    spare[block.tenant] -= 1
                if num_of is not None:
                    num_of[block.tenant] -= 1
                    self.num_open_of[block.tenant] -= part.is_open
                del part[block]
                taken.append(block)
        return taken

    def put_back(self, block: Block) -> None:
        """Put a block that was taken back among the clean ones."""
        self.append(block)
        self._put(block, self._clean)

    def look_ahead(self, num_ahead: int, most_looks: int) -> None:
        """Look at the oldest blocks until the state of `num_ahead` outside of floors is known."""
        num_known = self.num_ready + sum(map(len, self._waiting))
        for block in self._look_at_unseen(min(num_ahead - num_known, most_looks)):
            self._put(block, self._part_for(block))

    def dirty(self, at_most: int) -> list[Block]:
        """Return the first blocks that wait for a copy."""
        return list(islice(chain.from_iterable(self._waiting), max(0, at_most)))

    def note_evicted(
        self, blocks: Iterable[Block], is_within_floor: Callable[[Block], bool]
    ) -> None:
        """Note for which blocks that wait for a copy others are evicted, to make room.

        Those of other orders do not count.

        An eviction makes at most one block late, however many older ones wait: with fewer
        evictions, it would not have been the turn of the others either.
        """
        if not self._dirty:
            return
        ranks = [each.rank for each in blocks if each.part is not None and each.part.order is self]
        self._last_evicted = max([self._last_evicted, *ranks])
        for _ in ranks:
            block = next(iter(self._dirty), None)
            if block is None or block.rank > self._last_evicted:
                break
            self._move(block, self._spared if is_within_floor(block) else self._late)

    def late(self, num_allowed: int) -> list[Block]:
        """Return the oldest blocks that wait for a copy although younger ones were evicted.

        Args:
            num_allowed: how many such blocks, the youngest of them, are not returned.
        """
        return list(islice(self._late, max(0, len(self._late) - num_allowed)))

    def postpone(self, block: Block) -> None:
        """Move a block that waits for a copy behind the others that do."""
        if block.part is not None and block.part.is_waiting:
            self._move(block, self._dirty)

    def look_again(self, block: Block) -> None:
        """Move a block that was looked at to the part where it belongs now."""
        before = block.part
        if before is None or before is self.unseen or before is self._kept:
            return
        part = self._part_for(block)
        if part is not before and not (part.is_waiting and before.is_waiting):
            self._put(block, part)

    def forget_looks(self) -> None:
        """Forget the state of every block, so that each is looked at again."""
        seen = sorted(chain.from_iterable(self._seen), key=lambda block: -block.rank)
        for block in seen:
            self._put(block, self.unseen)
            self.unseen.move_to_end(block, last=self._is_youngest_first)
        self._to_evict.clear()
        self._of_floors.clear()
        self.num_open_of.clear()

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        for part in self.parts:
            if any(block.part is not part for block in part):
                raise IntegrityError("a block is not in the part of the order that it names")
        if not all(block.pin_count for block in self._moving):
            raise IntegrityError("a block is listed as moving, but is not pinned")
        if any(block.pin_count for block in chain.from_iterable(self._waiting)):
            raise IntegrityError("a block waits to be copied, but a copy already pins it")
        heaps = (
            (self._to_evict, self._clean),
            *((h, self._kept) for h in self._of_floors.values()),
        )
        entries = Counter(
            block for heap, part in heaps for rank, block in heap if _is_valid(rank, block, part)
        )
        if entries != Counter(chain(self._clean, self._kept)):
            raise IntegrityError("a block that can be evicted is queued twice or not at all")
        if self.num_of is None:
            return
        is_open = Counter(block.tenant for part in self._seen if part.is_open for block in part)
        if +self.num_of != Counter(block.tenant for block in self) or +self.num_open_of != is_open:
            raise IntegrityError("the number of blocks per tenant is wrong in the order")

    def _part_for(self, block: Block) -> Part:
        if block.pin_count:
            return self._moving
        return self._clean if self.can_evict(block) else self._dirty

    def _look_at_unseen(self, count: int) -> list[Block]:
        """Return the first unseen blocks, after giving them ranks; the caller moves them."""
        unseen = self.unseen
        oldest = reversed(unseen) if self._is_youngest_first else iter(unseen)
        taken = list(islice(oldest, max(0, count)))
        for rank, block in enumerate(taken, start=self._num_looks + 1):
            block.rank = rank
        self._num_looks += len(taken)
        return taken

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
            self.on_clean(block)
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
    """Remove the oldest block of a part from its heap, and return it."""
    while heap:
        rank, block = heapq.heappop(heap)
        if block.queued_rank == rank:
            block.queued_rank = 0
        if _is_valid(rank, block, part):
            return block
    return None
