"""Orders of eviction: which of the blocks that nobody uses goes first.

An order is one class with the methods of `Order`, and has its name in `ORDERS`. It sees a block
when its last user has released it, and again after each further use. It loses sight of a block
while it is used. `take` decides, and the pool evicts what it returns, or copies it down first.
What an order has to remember of a block stands in `Block.place`; it is None for new content.

    lru     the block that was unused for longest
    fifo    the block that was added first
    clock   the same, but a block that was used gets a second chance at the queue's end
    lfu     the block that was used least, where old uses lose their weight (LFU-DA)
    sieve   as clock, but blocks stay where they are and a hand moves over them
    s3fifo  most blocks pass a small queue, and stay only if they were used in it

Sources: Arlitt et al., "Evaluating Content Management Techniques for Web Proxy Caches", 2000
(LFU-DA, which GDSF is for blocks of one size); Zhang et al., "SIEVE is Simpler than LRU", NSDI'24;
Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP'23.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Generic, Protocol, TypeVar

from tieredkv.cache.block import Block
from tieredkv.types import BlockHash

_SLACK = 64
Item = TypeVar("Item", bound=Hashable)


class Order(Protocol):
    """Blocks that nobody uses, and which of them goes first."""

    def __len__(self) -> int:
        """Return how many blocks there are."""

    def __iter__(self) -> Iterator[Block]:
        """Return the blocks in the order in which they go if none is used again."""

    def add(self, block: Block) -> None:
        """Take a block in: a new one if its `place` is None, else one that was used again."""

    def remove(self, block: Block) -> None:
        """Lose sight of a block because it is used or has lost its content."""

    def take(self, count: int) -> list[Block]:
        """Remove the blocks that go first, so many or all, and return them in this order."""

    def put_back(self, block: Block) -> None:
        """Take back the last block that was taken and is not back, as the first to go."""


class ByRank(Generic[Item]):
    """Items of which the one with the lowest rank is found at once; of equal ranks, the earlier."""

    def __init__(self) -> None:
        self._entries: dict[Item, tuple[int, int, Item]] = {}
        self._heap: list[tuple[int, int, Item]] = []  # with some that hold no more
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Item]:
        return (item for _, _, item in sorted(self._entries.values()))

    @property
    def first_rank(self) -> int | None:
        """The lowest rank; None without items."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            if entries.get(entry[2]) is entry:
                return entry[0]
            heapq.heappop(heap)
        return None

    def add(self, item: Item, rank: int) -> None:
        """Add an item, or give it another rank."""
        self._num_added += 1
        entry = self._entries[item] = rank, self._num_added, item
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap = [*self._entries.values()]
            heapq.heapify(self._heap)

    def remove(self, item: Item) -> None:
        """Remove an item, if it is there."""
        self._entries.pop(item, None)

    @property
    def first(self) -> Item:
        """The item of the lowest rank; there is one."""
        assert self.first_rank is not None
        return self._heap[0][2]

    def pop(self) -> Item:
        """Remove the item of the lowest rank, and return it; there is one."""
        while True:
            entry = heapq.heappop(self._heap)
            if self._entries.get(entry[2]) is entry:
                del self._entries[entry[2]]
                return entry[2]


@dataclass(slots=True)
class _Place:
    """What an order remembers of a block: its rank, its uses, and whether its queue is small."""

    rank: int
    uses: int = 0
    is_small: bool = False


class Lru:
    """Evicts the block that was unused for longest.

    Each block of each request passes here, so that the dict's own methods are used.
    """

    def __init__(self, num_blocks: int = 0) -> None:
        self._blocks: OrderedDict[Block, None] = OrderedDict()
        self.add: Callable[[Block], None] = self._blocks.setdefault  # as the youngest
        self.remove: Callable[[Block], None] = self._blocks.__delitem__

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def take(self, count: int) -> list[Block]:
        """Remove the blocks that go first."""
        blocks = [*islice(self, count)]
        for block in blocks:
            del self._blocks[block]
        return blocks

    def put_back(self, block: Block) -> None:
        """Take a block in as the oldest."""
        self._blocks[block] = None
        self._blocks.move_to_end(block, last=False)


class Mru(Lru):
    """Evicts the block that was used last; for blocks of which another tier has a copy."""

    def __iter__(self) -> Iterator[Block]:
        return reversed(self._blocks)

    def put_back(self, block: Block) -> None:
        """Take a block in as the youngest."""
        self._blocks[block] = None


class Fifo:
    """Evicts the block that was added first."""

    def __init__(self, num_blocks: int = 0) -> None:
        self._queue = ByRank[Block]()
        self._number = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._queue)

    def add(self, block: Block) -> None:
        """Take a block in: a new one at the queue's end, another one where it was."""
        if block.place is None:
            block.place = _Place(self._next_rank())
        else:
            self._use(block.place)
        self._queue.add(block, block.place.rank)

    def remove(self, block: Block) -> None:
        """Lose sight of a block."""
        self._queue.remove(block)

    def take(self, count: int) -> list[Block]:
        """Remove the blocks of the lowest ranks that get no other chance."""
        return [self._pop() for _ in range(min(count, len(self)))]

    def _pop(self) -> Block:
        while self._gets_another_chance(block := self._queue.pop()):
            self._queue.add(block, block.place.rank)
        return block

    def put_back(self, block: Block) -> None:
        """Take a block in with the rank that it had."""
        self._queue.add(block, block.place.rank)

    def _next_rank(self) -> int:
        self._number += 1
        return self._number

    def _use(self, place: _Place) -> None:
        """Note that a block was used again."""

    def _gets_another_chance(self, block: Block) -> bool:
        """Return whether the first block is not evicted yet; it has another rank then."""
        return False


class Clock(Fifo):
    """Evicts the block that was added first, unless it was used since it was last looked at."""

    def _use(self, place: _Place) -> None:
        place.uses = 1

    def _gets_another_chance(self, block: Block) -> bool:
        place: _Place = block.place
        if not place.uses:
            return False
        place.rank, place.uses = self._next_rank(), 0
        return True


class Sieve(Clock):
    """As `Clock`, but a block that was used keeps its place and loses its mark."""

    _LAP = 1 << 40
    """Ranks of one round of the hand; blocks that it has passed wait for the next round."""

    def __init__(self, num_blocks: int = 0) -> None:
        super().__init__(num_blocks)
        self._lap = 0

    def _next_rank(self) -> int:
        return self._lap * self._LAP + super()._next_rank()

    def _gets_another_chance(self, block: Block) -> bool:
        place: _Place = block.place
        self._lap = max(self._lap, place.rank // self._LAP)
        if not place.uses:
            return False
        place.rank, place.uses = (self._lap + 1) * self._LAP + place.rank % self._LAP, 0
        return True


class Lfu(Fifo):
    """Evicts the block with the fewest uses, counted from the rank that was evicted last."""

    def __init__(self, num_blocks: int = 0) -> None:
        super().__init__(num_blocks)
        self._last_evicted = 0

    def add(self, block: Block) -> None:
        """Take a block in, with one use more."""
        place = block.place = block.place or _Place(0)
        place.uses += 1
        place.rank = max(place.rank, self._last_evicted + place.uses)
        self._queue.add(block, place.rank)

    def _pop(self) -> Block:
        block = super()._pop()
        self._last_evicted = block.place.rank
        return block


class S3Fifo:
    """Evicts from a small queue what was not used twice in it, else from the main one.

    A block that comes back soon after it left the small queue is added to the main one.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_small = max(1, num_blocks // 10)
        self._most_left = num_blocks - self._num_small
        self._small, self._main = ByRank[Block](), ByRank[Block]()
        self._left: OrderedDict[BlockHash | None, None] = OrderedDict()  # the small queue lately
        self._number = 0

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __iter__(self) -> Iterator[Block]:
        return chain(self._small, self._main)

    def add(self, block: Block) -> None:
        """Take a block in: a new one at the end of its queue, another one where it was."""
        if (place := block.place) is None:
            is_small = block.block_hash not in self._left
            self._left.pop(block.block_hash, None)
            place = block.place = _Place(self._next_rank(), is_small=is_small)
        else:
            place.uses = min(3, place.uses + 1)
        self.put_back(block)

    def remove(self, block: Block) -> None:
        """Lose sight of a block."""
        self._queue_of(block.place).remove(block)

    def put_back(self, block: Block) -> None:
        """Take a block in with the rank that it had."""
        self._queue_of(block.place).add(block, block.place.rank)

    def take(self, count: int) -> list[Block]:
        """Remove the first blocks of the small queue, or of the main one if the former is short."""
        return [self._pop() for _ in range(min(count, len(self)))]

    def _pop(self) -> Block:
        while True:
            is_small = len(self._small) >= self._num_small or not self._main
            block = (self._small if is_small else self._main).pop()
            place: _Place = block.place
            if is_small and place.uses <= 1:
                self._left[block.block_hash] = None
                if len(self._left) > self._most_left:
                    self._left.popitem(last=False)
                return block
            if not (is_small or place.uses):
                return block
            place.uses = 0 if is_small else place.uses - 1
            place.rank, place.is_small = self._next_rank(), False
            self._main.add(block, place.rank)

    def _next_rank(self) -> int:
        self._number += 1
        return self._number

    def _queue_of(self, place: _Place) -> ByRank[Block]:
        return self._small if place.is_small else self._main


ORDERS: dict[str, Callable[[int], Order]] = {
    "lru": Lru,
    "fifo": Fifo,
    "clock": Clock,
    "lfu": Lfu,
    "sieve": Sieve,
    "s3fifo": S3Fifo,
}
"""The orders by their names in the setting `eviction_order`, made for a number of blocks."""
