"""The order in which blocks that nobody uses are evicted: the least recently used first, or last.

Most of the oldest blocks often cannot be evicted yet, since a copy of them is still to be made.
They are kept apart from the blocks that can, so that they are not looked at again in every step.

This module knows the places of blocks in the order. It does not know hashes, tiers or retention.
Only the engine's thread may call it.
"""

import heapq
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Generic, TypeVar

from tieredkv.cache.block import Block
from tieredkv.errors import IntegrityError

_SLACK = 64
Item = TypeVar("Item", bytes, Block)


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


class _Queue(Generic[Item]):
    """Items by ascending key; entries that hold no more are skipped, and dropped now and then."""

    def __init__(self, holds: Callable[[int, Item], bool]) -> None:
        self._holds: Callable[[int, Item], bool] = holds
        self._heap: list[tuple[int, Item]] = []
        self._most = _SLACK

    def push(self, key: int, item: Item) -> None:
        heapq.heappush(self._heap, (key, item))
        if len(self._heap) > self._most:
            self._heap = list(self.entries())
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + _SLACK

    def first(self) -> int | None:
        """Return the lowest key; None if there is no item."""
        heap = self._heap
        while heap and not self._holds(*heap[0]):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop(self) -> Item | None:
        """Remove the item with the lowest key, and return it; None if there is none."""
        heap = self._heap
        while heap:
            entry = heapq.heappop(heap)
            if self._holds(*entry):
                while heap and heap[0] == entry:  # it was pushed again
                    heapq.heappop(heap)
                return entry[1]
        return None

    def entries(self) -> set[tuple[int, Item]]:
        """Return the entries that hold."""
        return {entry for entry in self._heap if self._holds(*entry)}

    def clear(self) -> None:
        self._heap.clear()


class Spare(dict[bytes, int]):
    """How many blocks an allocation may yet take from each tenant; it is counted down.

    Attributes:
        tenant: the tenant that gets the blocks: it may have all of its own; None if none does.
        takes_kept: whether blocks within the floors of all tenants are taken, too.
    """

    def __init__(
        self, num_spare: Callable[[bytes], int], tenant: bytes | None, *, takes_kept: bool = False
    ) -> None:
        super().__init__()
        self._num_spare, self.tenant, self.takes_kept = num_spare, tenant, takes_kept

    def __missing__(self, tenant: bytes) -> int:
        is_all = self.takes_kept or tenant == self.tenant
        num = self[tenant] = sys.maxsize if is_all else self._num_spare(tenant)
        return num


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

    Kept blocks of a tenant that has come to have some to spare are opened: they move to the other
    parts, no more of them than an allocation may take. For this, `_due` has the tenants whose kept
    blocks are looked at by the next allocation, and `_parked` those with more to spare than they
    have blocks in open parts, by the number of these: only a larger allocation looks at them. If
    floors give way, the oldest kept blocks are opened, whosever they are. `_covered` has the number
    of blocks in open parts that are within the floor of their tenant.

    Invariants (`check`): every block is in the part that its `part` names; those of `moving` are
    pinned, those that wait for a copy are not; every clean and every kept block is queued.

    Attributes:
        parts: all of its parts.
        can_evict: whether evicting a block loses nothing.
        on_clean: called with a block that was found clean and stays in the order.
        changed: tenants whose blocks have changed, while they are counted; its owner empties it.
        num_of: number of blocks by tenant, while they are counted.
        num_open_of: number of blocks in open parts, by tenant.
    """

    def __init__(self, *, is_youngest_first: bool = False) -> None:
        self.can_evict: Callable[[Block], bool] = lambda _block: True
        self.on_clean: Callable[[Block], object] = lambda _block: None
        self._is_youngest_first = is_youngest_first
        self._is_counting = False
        self.changed: dict[bytes, None] = {}
        self.num_of: Counter[bytes] = Counter()
        self.num_open_of: Counter[bytes] = Counter()
        self.unseen, self._kept = Part(self), Part(self)
        self._clean = Part(self, is_open=True)
        self._waiting = tuple(Part(self, is_open=True, is_waiting=True) for _ in range(3))
        self._late, self._dirty, self._spared = self._waiting
        self._moving = Part(self, is_open=True)
        self._seen = (self._clean, *self._waiting, self._moving, self._kept)
        self.parts = (self.unseen, *self._seen)
        self._to_evict = _queue_of(self._clean)
        self._all_kept = _queue_of(self._kept)
        self._kept_of: dict[bytes, _Queue[Block]] = {}
        self._due: dict[bytes, None] = {}
        self._parked: dict[bytes, int] = {}
        self._covered: dict[bytes, int] = {}
        self._num_covered = 0
        self._by_level = _Queue[bytes](lambda level, tenant: self._parked.get(tenant) == level)
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
        if self._is_counting:
            self.num_of[block.tenant] += 1
            self.changed[block.tenant] = None

    def remove(self, block: Block) -> None:
        """Take a block out of the order."""
        part = block.part
        assert part is not None, block
        del part[block]
        block.part = None
        if self._is_counting:
            self.num_of[block.tenant] -= 1
            self.num_open_of[block.tenant] -= part.is_open
            self.changed[block.tenant] = None

    def count_tenants(self, is_wanted: bool) -> None:
        """Start counting blocks by tenant, or stop it."""
        self.forget_looks()
        self.num_of = Counter(block.tenant for block in self) if is_wanted else Counter()
        self._is_counting = is_wanted

    def note_changed(self, tenant: bytes, num_spare: int) -> None:
        """Have the next allocation look at the kept blocks of a tenant whose blocks have changed.

        Args:
            tenant: whose blocks, or the number of those to spare, have changed.
            num_spare: how many of its blocks others may have.
        """
        covered = max(0, self.num_open_of[tenant] - num_spare)
        self._num_covered += covered - self._covered.pop(tenant, 0)
        if covered:
            self._covered[tenant] = covered
        if tenant in self._kept_of:
            self._due[tenant] = None

    def forget_tenant(self, tenant: bytes) -> None:
        """Note that a tenant has no blocks in the pool."""
        del self.num_of[tenant], self.num_open_of[tenant]
        for of_tenants in (self._kept_of, self._due, self._parked):
            of_tenants.pop(tenant, None)

    def take(self, count: int, spare: Spare | None, most_looks: int) -> list[Block]:
        """Take the oldest blocks that can be evicted out of the order; `put_back` undoes it.

        The caller evicts them. Until then, `part` tells where they were.

        Args:
            count: how many at most.
            spare: how many blocks may be taken from each tenant; None if there are no floors.
            most_looks: how many unseen blocks may be looked at.
        """
        if spare is not None and spare.takes_kept:
            self._open_oldest(count, spare.tenant)
        elif spare is not None:
            self._open(count, spare)
        taken: list[Block] = []
        clean = iter(self._to_evict.pop, None)
        while len(taken) < count and (oldest := list(islice(clean, count - len(taken)))):
            taken += self._take_from(oldest, spare)
        while self.unseen and len(taken) < count and most_looks > 0:
            oldest = self._look_at_unseen(min(count - len(taken), most_looks))
            most_looks -= len(oldest)
            taken += self._take_from(oldest, spare)
        return taken

    def _open(self, count: int, spare: Spare) -> None:
        """Open kept blocks of tenants with some to spare, for an allocation of `count` blocks."""
        while (level := self._by_level.first()) is not None and level < count:
            tenant = self._by_level.pop()
            assert tenant is not None
            del self._parked[tenant]
            self._due[tenant] = None
        due, self._due = self._due, {}
        if spare.tenant is not None:
            due[spare.tenant] = None
        for tenant in due:
            if (kept := self._kept_of.get(tenant)) is None:
                continue
            num_open = self.num_open_of[tenant]
            for block in islice(iter(kept.pop, None), max(0, min(count, spare[tenant]) - num_open)):
                self._put(block, self._part_for(block))
            if kept.first() is None:
                del self._kept_of[tenant]
            elif (num_open := self.num_open_of[tenant]) < spare[tenant]:
                self._parked[tenant] = num_open
                self._by_level.push(num_open, tenant)

    def _open_oldest(self, count: int, tenant: bytes | None) -> None:
        """Open the oldest kept blocks, until `count` within floors of others than a tenant are."""
        own = self._covered.get(tenant, 0) if tenant is not None else 0
        num_more = max(0, count - self._num_covered + own)
        for block in islice(iter(self._all_kept.pop, None), num_more):
            self._put(block, self._part_for(block))

    def _take_from(self, blocks: Iterable[Block], spare: Spare | None) -> list[Block]:
        """Take those of some blocks that can be evicted, and move the others."""
        taken: list[Block] = []
        can_evict, is_counting = self.can_evict, self._is_counting
        for block in blocks:
            if spare is not None and spare[block.tenant] <= 0:
                self._put(block, self._kept)
            elif block.pin_count or not can_evict(block):
                self._put(block, self._moving if block.pin_count else self._dirty)
            else:
                if spare is not None:
                    spare[block.tenant] -= 1
                part = block.part
                assert part is not None, block
                if is_counting:
                    self.num_of[block.tenant] -= 1
                    self.num_open_of[block.tenant] -= part.is_open
                    self.changed[block.tenant] = None
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
        self._all_kept.clear()
        self._by_level.clear()
        for of_tenants in (self._kept_of, self._due, self._parked, self.num_open_of, self._covered):
            of_tenants.clear()
        self._num_covered = 0

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        for part in self.parts:
            if any(block.part is not part for block in part):
                raise IntegrityError("a block is not in the part of the order that it names")
        if not all(block.pin_count for block in self._moving):
            raise IntegrityError("a block is listed as moving, but is not pinned")
        if any(block.pin_count for block in chain.from_iterable(self._waiting)):
            raise IntegrityError("a block waits to be copied, but a copy already pins it")
        of_tenants = [entry for kept in self._kept_of.values() for entry in kept.entries()]
        for entries, part in (
            (self._to_evict.entries(), self._clean),
            (self._all_kept.entries(), self._kept),
            (of_tenants, self._kept),
        ):
            if {block for _, block in entries} != set(part):
                raise IntegrityError("a block that can be evicted is not queued")
        if not self._is_counting:
            return
        is_open = Counter(block.tenant for part in self._seen if part.is_open for block in part)
        if +self.num_of != Counter(block.tenant for block in self) or +self.num_open_of != is_open:
            raise IntegrityError("the number of blocks per tenant is wrong in the order")

    def check_kept(self, num_spare: Callable[[bytes], int]) -> None:
        """Raise IntegrityError if counts are wrong, or kept blocks to spare are overlooked.

        Args:
            num_spare: returns how many of a tenant's blocks others may have.
        """
        num_open_of = +self.num_open_of
        covered = {it: max(0, num - num_spare(it)) for it, num in num_open_of.items()}
        if self._covered != {it: num for it, num in covered.items() if num}:
            raise IntegrityError("the number of open blocks within floors is wrong")
        if self._num_covered != sum(covered.values()):
            raise IntegrityError("the sum of open blocks within floors is wrong")
        for tenant in {block.tenant for block in self._kept}:
            num_open = num_open_of[tenant]
            is_parked = self._parked.get(tenant, sys.maxsize) <= num_open
            if num_open < num_spare(tenant) and not (is_parked or tenant in self._due):
                raise IntegrityError("a tenant has blocks to spare, but they stay kept")

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
        if self._is_counting and part.is_open != before.is_open:
            self.num_open_of[block.tenant] += part.is_open - before.is_open
            self.changed[block.tenant] = None
        del before[block]
        part[block] = None
        block.part = part

    def _put(self, block: Block, part: Part) -> None:
        """Move a block to a part and queue it there."""
        self._move(block, part)
        if part is self._clean:
            self._to_evict.push(block.rank, block)
            self.on_clean(block)
        elif part is self._kept:
            self._all_kept.push(block.rank, block)
            if (kept := self._kept_of.get(block.tenant)) is None:
                kept = self._kept_of[block.tenant] = _queue_of(part)
            kept.push(block.rank, block)


def _queue_of(part: Part) -> _Queue[Block]:
    """Return an empty queue for the blocks of a part, the oldest first."""
    return _Queue(lambda rank, block: block.part is part and block.rank == rank)
