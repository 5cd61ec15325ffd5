"""The blocks of a pool that hold content and that nobody uses, in the order of eviction.

There are three lines. Duplicates of what another tier keeps go first, the most recently used first.
The others follow in the pool's order of eviction (see `orders`). Those that are evicted last have a
line of their own, the least recently used first.

A block is young until its turn comes, for an allocation or ahead of one. Then it is due: it is
evicted, or it waits until a copy has made it clean, or it is kept since its tenant has no more
blocks than its floor. It keeps its place among the blocks that are due.

This module knows neither hashes nor tiers. Only the engine's thread may call it.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from tieredkv.cache.block import Block
from tieredkv.cache.floors import Floors
from tieredkv.cache.orders import ORDERS, ByRank, Lru, Mru, Order
from tieredkv.errors import IntegrityError

DUPLICATES, OTHERS, LAST = LINES = range(3)
"""The lines in the order in which they go."""

PARTIAL_LOOKS = 256
"""Most blocks that become due in vain if fewer blocks than wanted are acceptable."""

_LINE = 1 << 60
"""More than there are ranks in one line."""


@dataclass(slots=True)
class _Walk:
    """How an allocation goes through the list.

    Attributes:
        tenant: see `FreeList.take`.
        most_looks: how many blocks may become due.
        takes_kept: whether blocks within floors are taken now.
        most_kept: how many of those that were kept may be opened then.
        num_of: how many blocks were taken from each tenant.
    """

    tenant: bytes | None
    most_looks: int
    takes_kept: bool = False
    most_kept: int = 0
    num_of: Counter[bytes] = field(default_factory=Counter)


class FreeList:
    """Blocks in three lines; those that are due are in parts by their state.

        clean      can be evicted now
        dirty      eviction would lose the content, and no copy of it has been started
        late       the same, and a younger block was evicted instead of it
        sheltered  the same, but it was within the floor of its tenant, so its turn had not come
        moving     a copy reads it
        kept       within the floor of its tenant, so it is not evicted for others; one per tenant

    Invariants (`check`): every block is in the part that it names, and in the one that its state
    asks for; the counts by line and by tenant are right.

    Attributes:
        floors: what tenants keep.
        young: the blocks of each line whose turn has not come.
    """

    def __init__(self, num_blocks: int, order: str) -> None:
        self.floors = Floors()
        self._num_due, self._num_kept = [0, 0, 0], [0, 0, 0]  # the former without the latter
        self.young: tuple[Order, ...] = (Mru(), ORDERS[order](num_blocks), Lru())
        self._clean, self._moving = ByRank[Block](), Lru()
        self._dirty = Lru(), Lru(), Lru()
        self._late, self._sheltered = Lru(), Lru()
        first, others, last = self._dirty
        self._waiting_in = (first,), (self._late, others, self._sheltered), (last,)  # by line
        self._waiting = tuple(chain(*self._waiting_in))
        self._num_ranks = 0
        self._last_evicted = 0  # the highest rank of the evicted blocks of the line of others

    def __iter__(self) -> Iterator[Block]:
        due = chain(self._clean, self._moving, *self._waiting, *self.floors.kept)
        by_rank = sorted(due, key=lambda block: block.rank)
        for line in LINES:
            yield from (block for block in by_rank if self.line_of(block) == line)
            yield from self.young[line]

    def __len__(self) -> int:
        return self.num_young + sum(self._num_due) + sum(self._num_kept)

    def num_in(self, line: int) -> int:
        """Return the number of blocks in a line."""
        return len(self.young[line]) + self._num_due[line] + self._num_kept[line]

    @property
    def num_clean(self) -> int:
        """Blocks that are due and can be evicted now."""
        return len(self._clean)

    @property
    def num_soon_clean(self) -> int:
        """Blocks that are due, and clean already or once the copies under way have ended."""
        return len(self._clean) + len(self._moving)

    @property
    def num_young(self) -> int:
        """Blocks whose turn has not come yet."""
        return sum(map(len, self.young))

    def is_kept(self, block: Block) -> bool:
        """Return whether a block is due, but kept for its tenant."""
        return block.rank != 0 and isinstance(block.part, ByRank) and block.part is not self._clean

    def line_of(self, block: Block) -> int:
        """Return which line a block of the list is in."""
        return block.rank // _LINE if block.rank else self.young.index(block.part)

    # Changes

    def append(self, blocks: Sequence[Block], line: int) -> None:
        """Add blocks that were used, or that are new, to a line."""
        young = self.young[line]
        add = young.add
        for block in blocks:
            block.part = young
            add(block)
        self._count(blocks, 1)

    def remove(self, blocks: Sequence[Block]) -> None:
        """Take blocks out of the list."""
        self._count(blocks, -1)
        for block in blocks:
            if block.rank:
                self._take_out(block)
                block.place = None  # its turn had come: if it comes back, it is like a new one
                block.rank = 0
            else:
                block.part.remove(block)
            block.part = None

    def _count(self, blocks: Sequence[Block], number: int) -> None:
        """Count each of these blocks so many times for its tenant."""
        for block in blocks if self.floors.by_tenant else ():
            counts = self.floors.change(block.tenant)
            counts.num_free += number
            if self.line_of(block) == LAST:
                counts.num_last += number

    def put_clean(self, block: Block, is_clean: bool) -> None:
        """Note whether evicting a block of the list loses nothing."""
        self._note_state(block, is_clean, block.num_readers)

    def put_readers(self, block: Block, num_readers: int) -> None:
        """Note how many copies read a block of the list."""
        self._note_state(block, block.is_clean, num_readers)

    def _note_state(self, block: Block, is_clean: bool, num_readers: int) -> None:
        block.is_clean, block.num_readers = is_clean, num_readers
        if not block.rank or self.is_kept(block):
            return
        if num_readers:
            is_right = block.part is self._moving
        elif is_clean:
            is_right = block.part is self._clean
        else:
            is_right = block.part in self._waiting
        if not is_right:
            self._take_out(block)
            self._put(block)

    def set_floors(self, floors: Mapping[bytes, int], hashed: Iterable[Block]) -> None:
        """Set the floors of tenants; `hashed` are all hashed blocks of the pool, in use or not."""
        was_counting = bool(self.floors)
        if was_counting and not floors:
            for block in reversed([*self]):
                if self.is_kept(block):
                    self._take_out(block)
                    self._put_young(block)
            self.floors.clear()
        self.floors.put(floors)
        if floors and not was_counting:
            for block in hashed:
                counts = self.floors.change(block.tenant)
                counts.num_hashed += 1
                counts.num_free += block.part is not None
                counts.num_last += block.part is not None and self.line_of(block) == LAST
                counts.num_waiting += block.rank != 0 and block.part is not self._clean

    # Parts

    def _put(self, block: Block) -> None:
        """Put a due block that is in no part into the one of its state."""
        if block.is_clean and not block.num_readers:
            block.part = self._clean
            self._clean.add(block, block.rank)
        else:
            block.part = self._moving if block.num_readers else self._dirty[block.rank // _LINE]
            block.part.add(block)
            if self.floors.by_tenant:
                self.floors.change(block.tenant).num_waiting += 1
        self._num_due[block.rank // _LINE] += 1

    def _keep(self, block: Block) -> None:
        """Put a due block that is in no part to those that are kept for its tenant."""
        block.part = self.floors.change(block.tenant).kept
        block.part.add(block, block.rank)
        self._num_kept[block.rank // _LINE] += 1

    def _take_out(self, block: Block) -> None:
        """Take a due block out of its part."""
        if self.is_kept(block):
            self.floors.change(block.tenant)
            self._num_kept[block.rank // _LINE] -= 1
        else:
            self._num_due[block.rank // _LINE] -= 1
            if self.floors.by_tenant and block.part is not self._clean:
                self.floors.change(block.tenant).num_waiting -= 1
        block.part.remove(block)

    def _take_young(self, line: int, count: int) -> list[Block]:
        """Take the next young blocks of a line; they are due now, and in no part."""
        blocks = self.young[line].take(count)
        for rank, block in enumerate(blocks, line * _LINE + self._num_ranks + 1):
            block.rank = rank
        self._num_ranks += len(blocks)
        return blocks

    # Whose turn it is

    def take(
        self,
        count: int,
        tenant: bytes | None,
        *,
        takes_kept: bool,
        is_partial: bool,
        makes_late: bool = True,
    ) -> list[Block]:
        """Take the next blocks that can be evicted out of the list.

        Args:
            count: how many.
            tenant: the tenant that gets them; None if they are for no tenant.
            takes_kept: whether blocks within the floors of others are taken, but last of all.
            is_partial: whether fewer blocks are taken if there are too few; else none is.
            makes_late: whether others are late that should have gone before them.
        """
        if not count:
            return []
        num_free, num_ranks, num_spare_taken = len(self), self._num_ranks, 0
        num_spare = num_free - self.floors.kept_from(tenant).num_all
        if count > (num_free if takes_kept else num_spare) and not is_partial:
            return []
        most_looks = count + PARTIAL_LOOKS if is_partial else sys.maxsize
        if self.floors.by_tenant:
            walk = _Walk(tenant, most_looks)
            taken = self._walk(walk, count)
            num_spare_taken = len(taken)
            if takes_kept and num_spare < count:
                num_lacking = count - max(num_spare, len(taken))
                num_open = self.floors.kept_from(tenant).num_open
                walk.takes_kept, walk.most_kept = True, num_lacking - num_open
                taken += self._walk(walk, num_lacking)
        else:
            taken = self._walk_plain(count, most_looks)
        if len(taken) < count and not is_partial:
            self._put_back(taken, num_ranks, num_spare_taken)
            return []
        if makes_late:
            self._note_evicted(taken, tenant)
        self._count(taken, -1)
        for block in taken:
            block.part, block.rank = None, 0
        return taken

    def _most_in(self, line: int, count: int, num_kept: int = 0) -> int:
        """Return, as a walk comes to a line, how many blocks it has taken when it leaves the line.

        Blocks that are evicted last are taken only if there are too few others. Others that cannot
        be evicted yet count as well, but for those that are kept: no block of the last line
        replaces them.
        """
        if line != LAST:
            return count
        return count - max(0, self.num_in(DUPLICATES) + self.num_in(OTHERS) - num_kept)

    def _walk(self, walk: "_Walk", count: int) -> list[Block]:
        """Take the next blocks out of their parts, `count` of them at most."""
        num_kept = 0 if walk.takes_kept else self.floors.kept_from(walk.tenant).num_before_last
        taken: list[Block] = []
        for line in LINES:
            most = self._most_in(line, count, num_kept)
            while len(taken) < most:
                block = self._pop_due(line, walk)
                if block is None:
                    walk.most_looks -= 1
                    if walk.most_looks < 0 or not (young := self._take_young(line, 1)):
                        break
                    (block,) = young
                if self._may_go(block, walk):
                    walk.num_of[block.tenant] += 1
                    taken.append(block)
        return taken

    def _walk_plain(self, count: int, most_looks: int) -> list[Block]:
        """Take the next blocks as `_walk` does, but faster, where no tenant has a floor."""
        clean = self._clean
        taken: list[Block] = []
        for line in LINES:
            if len(taken) == count:
                break
            most, end = self._most_in(line, count), (line + 1) * _LINE
            while len(taken) < most and (rank := clean.first_rank) is not None and rank < end:
                taken.append(block := clean.pop())
                self._num_due[block.rank // _LINE] -= 1
            while self.young[line] and (num := min(most - len(taken), most_looks)) > 0:
                young = self._take_young(line, num)
                most_looks -= len(young)
                for block in young:
                    if block.is_clean and not block.num_readers:
                        taken.append(block)
                    else:
                        self._put(block)
        return taken

    def _may_go(self, block: Block, walk: "_Walk") -> bool:
        """Return whether a due block may be evicted; if not, put it into its part."""
        if not walk.takes_kept and block.tenant != walk.tenant:
            counts = self.floors.change(block.tenant)
            num_spare = counts.num_spare - walk.num_of[block.tenant]
            if num_spare <= 0:
                self._keep(block)
                self.floors.note_kept(counts, num_spare)
                return False
        if block.is_clean and not block.num_readers:
            return True
        self._put(block)
        return False

    def _pop_due(self, line: int, walk: "_Walk") -> Block | None:
        """Take the first block that is due, of this line or one before it, out of its part."""
        floors, end, best = self.floors, (line + 1) * _LINE, self._clean
        first = best.first_rank or end
        heads = floors.keeping if walk.most_kept > 0 else floors.giving
        tenants = [heads.first] if len(heads) else []
        if (own := floors.get(walk.tenant)) is not None:
            tenants.append(own)
        for tenant in tenants:
            if (rank := tenant.kept.first_rank) is not None and rank < first:
                first, best = rank, tenant.kept
        if first >= end:
            return None
        block = best.pop()
        if best is self._clean:
            self._num_due[block.rank // _LINE] -= 1
        else:
            self._num_kept[block.rank // _LINE] -= 1
            counts = floors.change(block.tenant)
            walk.most_kept -= block.tenant != walk.tenant
            floors.note_kept(counts, counts.num_spare - walk.num_of[block.tenant] - 1)
        return block

    def _put_back(self, taken: list[Block], num_ranks: int, num_spare_taken: int) -> None:
        """Put back what was taken since so many blocks had become due.

        With floors, all but the first `num_spare_taken` of them are within their tenants' floors.
        """
        for index, block in reversed([*enumerate(taken)]):
            if block.rank % _LINE > num_ranks:
                self._put_young(block)
            elif self.floors.by_tenant and index >= num_spare_taken:
                self._keep(block)
            else:
                self._put(block)

    def _put_young(self, block: Block) -> None:
        """Put a due block that is in no part back as the first of the young ones."""
        line = self.line_of(block)
        block.rank, block.part = 0, self.young[line]
        block.part.put_back(block)

    def _note_evicted(self, blocks: list[Block], tenant: bytes | None) -> None:
        """Note for which blocks that wait for a copy others are evicted, to make room for a tenant.

        Those of other lines do not count. An eviction makes at most one block late, however many
        older ones wait: with fewer evictions, it would not have been the turn of the others either.
        """
        waiting = self._dirty[OTHERS]
        if not waiting:
            return
        ranks = [each.rank for each in blocks if self.line_of(each) == OTHERS]
        self._last_evicted = max([self._last_evicted, *ranks])
        for _ in ranks:
            block = next(iter(waiting), None)
            if block is None or block.rank > self._last_evicted:
                break
            counts = self.floors.get(block.tenant) if self.floors else None
            is_sheltered = block.tenant != tenant and counts is not None and not counts.num_spare
            self._move(block, self._sheltered if is_sheltered else self._late)

    def _move(self, block: Block, part: Lru) -> None:
        block.part.remove(block)
        block.part = part
        part.add(block)

    def late(self, num_allowed: int) -> list[Block]:
        """Return the first due blocks that wait for a copy although younger ones were evicted.

        Args:
            num_allowed: how many such blocks, the youngest of them, are not returned.
        """
        return [*islice(self._late, max(0, len(self._late) - num_allowed))]

    def postpone(self, block: Block) -> None:
        """Move a block that waits for a copy behind the others that do."""
        if block.part in self._waiting:
            self._move(block, self._dirty[block.rank // _LINE])

    def look_ahead(self, num_ahead: int, most_looks: int = sys.maxsize) -> list[Block]:
        """Have `num_ahead` blocks be due, besides kept ones; return the new ones."""
        due: list[Block] = []
        for line in LINES:
            num_ahead -= self._num_due[line]
            young = self._take_young(line, max(0, min(num_ahead, most_looks)))
            num_ahead, most_looks = num_ahead - len(young), most_looks - len(young)
            for block in young:
                self._put(block)
            due += young
        return due

    def dirty(self, num_ahead: int, at_most: int = sys.maxsize) -> list[Block]:
        """Return the first due blocks that wait for a copy.

        Args:
            num_ahead: how many due blocks shall be clean afterwards, or be read by a copy.
            at_most: how many blocks to return at most.
        """
        found: list[Block] = []
        for line, parts in enumerate(self._waiting_in):
            num_ahead -= self._num_due[line] - sum(map(len, parts))
            some = [*islice(chain(*parts), max(0, min(num_ahead, at_most - len(found))))]
            found += some
            num_ahead -= len(some)
            if num_ahead <= 0 or self.young[line]:  # those of the next lines do not replace them
                break
        return found

    def check(self, hashed: Iterable[Block]) -> None:
        """Raise IntegrityError if an invariant is broken; `hashed` are all hashed blocks."""
        kept, num_in = {*map(id, self.floors.kept)}, Counter[int]()
        for block in self:
            num_in[self.line_of(block)] += 1
            if not block.rank:
                is_right = block.part in self.young
            elif block.num_readers:
                is_right = block.part is self._moving or id(block.part) in kept
            else:
                parts = (self._clean,) if block.is_clean else self._waiting
                is_right = block.part in parts or id(block.part) in kept
            if not is_right:
                raise IntegrityError(f"{block} is in the wrong part of the free list")
        if any(self.num_in(line) != num_in[line] for line in LINES):
            raise IntegrityError("the number of blocks in a line is wrong")
        if self.floors:
            self.floors.check(hashed)
