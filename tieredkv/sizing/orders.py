"""Compares orders of eviction: what one cache of a given size finds with each of them.

This leaves out what tiers, retention, reserved shares and links add. A request first uses the
blocks that it finds; then the others are added, the tail of the prompt first, so that orders which
go by time evict tails before heads. All blocks have one size. `lru` is the order of a server.

    lru     the block that was unused for longest
    fifo    the block that was added first
    clock   the same, but a block that was used gets a second chance at the queue's end
    lfu     the block that was used least, where old uses lose their weight (LFU-DA)
    sieve   as clock, but blocks stay where they are and a hand moves over them
    s3fifo  most blocks pass a small queue, and stay only if they were used in it
    best    the block whose next use is the furthest away: no order can find more

Sources: Arlitt et al., "Evaluating Content Management Techniques for Web Proxy Caches", 2000
(LFU-DA, which GDSF is for blocks of one size); Zhang et al., "SIEVE is Simpler than LRU", NSDI'24;
Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP'23; Belady, "A Study of
Replacement Algorithms for a Virtual-Storage Computer", 1966.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from tieredkv.errors import ConfigError
from tieredkv.sizing.replay import Json
from tieredkv.traces import Request, Trace
from tieredkv.types import Progress
from tieredkv.units import format_bytes


class Order(Protocol):
    """A cache of a number of blocks, at least 1, with an order of eviction."""

    def __contains__(self, block: int) -> bool:
        """Return whether the cache has a block."""

    def use(self, block: int, now: int) -> None:
        """Note that a block that the cache has is used by the request number `now`."""

    def add(self, block: int, position: int, now: int) -> None:
        """Add a block, which is at this position of the request, and evict one if there is need."""


class _Ranked:
    """Evicts the block of the lowest rank; of blocks of one rank, the one nearest to the tail.

    Ranks only rise, so that an entry of the heap is put right once it has come to the top.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._ranks: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []
        self._last_evicted = 0  # its rank

    def __contains__(self, block: int) -> bool:
        return block in self._ranks

    def use(self, block: int, now: int) -> None:
        self._ranks[block] = now

    def add(self, block: int, position: int, now: int) -> None:
        self._make_room()
        self._insert(block, position, now)

    def _insert(self, block: int, position: int, rank: int) -> None:
        self._ranks[block] = rank
        heapq.heappush(self._heap, (rank, -position, block))

    def _make_room(self) -> None:
        while len(self._ranks) >= self._num_blocks:
            rank_then, minus_position, oldest = heapq.heappop(self._heap)
            if (rank_now := self._ranks[oldest]) > rank_then:
                heapq.heappush(self._heap, (rank_now, minus_position, oldest))
                continue
            del self._ranks[oldest]
            self._last_evicted = rank_then
            self._forget(oldest)

    def _forget(self, block: int) -> None:
        """Note that a block was evicted."""


class Lru(_Ranked):
    """Evicts the block that was unused for longest."""


class Fifo(_Ranked):
    """Evicts the block that was added first."""

    def use(self, block: int, now: int) -> None:
        """Change nothing."""


class Lfu(_Ranked):
    """Evicts the block with the fewest uses, counted from the rank that was evicted last."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._uses: dict[int, int] = {}

    def use(self, block: int, now: int) -> None:
        """Count the use."""
        self._uses[block] += 1
        self._ranks[block] = max(self._ranks[block], self._last_evicted + self._uses[block])

    def add(self, block: int, position: int, now: int) -> None:
        """Add a block with one use."""
        self._make_room()
        self._uses[block] = 1
        self._insert(block, position, self._last_evicted + 1)

    def _forget(self, block: int) -> None:
        del self._uses[block]


class Clock:
    """Evicts the block that was added first, unless it was used since it was last looked at."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._was_used: OrderedDict[int, bool] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._was_used

    def use(self, block: int, now: int) -> None:
        """Mark the block."""
        self._was_used[block] = True

    def add(self, block: int, position: int, now: int) -> None:
        """Add a block at the end of the queue."""
        while len(self._was_used) >= self._num_blocks:
            first, was_used = self._was_used.popitem(last=False)
            if was_used:
                self._was_used[first] = False
        self._was_used[block] = False


class Sieve:
    """As `Clock`, but a block that was used keeps its place and loses its mark."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._was_used: dict[int, bool] = {}
        # In the order in which they were added: those that the hand has passed, then the others.
        self._passed, self._ahead = deque[int](), deque[int]()

    def __contains__(self, block: int) -> bool:
        return block in self._was_used

    def use(self, block: int, now: int) -> None:
        """Mark the block."""
        self._was_used[block] = True

    def add(self, block: int, position: int, now: int) -> None:
        """Add a block as the newest."""
        while len(self._was_used) >= self._num_blocks:
            if not self._ahead:
                self._passed, self._ahead = self._ahead, self._passed
            at_hand = self._ahead.popleft()
            if self._was_used[at_hand]:
                self._was_used[at_hand] = False
                self._passed.append(at_hand)
            else:
                del self._was_used[at_hand]
        self._was_used[block] = False
        self._ahead.append(block)


class S3Fifo:
    """Evicts from a small queue what was not used twice in it, else from the main one.

    A block that comes back soon after it left the small queue is added to the main one.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks, self._num_small = num_blocks, max(1, num_blocks // 10)
        self._uses: dict[int, int] = {}
        self._small, self._main = deque[int](), deque[int]()
        self._left: OrderedDict[int, None] = OrderedDict()  # the small queue, the oldest first

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def use(self, block: int, now: int) -> None:
        """Count the use, up to 3."""
        self._uses[block] = min(3, self._uses[block] + 1)

    def add(self, block: int, position: int, now: int) -> None:
        """Add a block to the small queue, or to the main one if it left the small one lately."""
        while len(self._uses) >= self._num_blocks:
            if len(self._small) >= self._num_small or not self._main:
                self._move_on()
            else:
                self._evict_from_main()
        self._uses[block] = 0
        if block in self._left:
            del self._left[block]
            self._main.append(block)
        else:
            self._small.append(block)

    def _move_on(self) -> None:
        block = self._small.popleft()
        if self._uses[block] > 1:
            self._uses[block] = 0
            self._main.append(block)
            return
        del self._uses[block]
        self._left[block] = None
        if len(self._left) > self._num_blocks - self._num_small:
            self._left.popitem(last=False)

    def _evict_from_main(self) -> None:
        block = self._main.popleft()
        if self._uses[block]:
            self._uses[block] -= 1
            self._main.append(block)
        else:
            del self._uses[block]


ORDERS: dict[str, Callable[[int], Order]] = {
    "lru": Lru,
    "fifo": Fifo,
    "clock": Clock,
    "lfu": Lfu,
    "sieve": Sieve,
    "s3fifo": S3Fifo,
}
BEST = "best"


def compare(
    trace: Trace, sizes: Sequence[float], token_bytes: int, progress: Progress
) -> list[Json]:
    """Return the hit rate of each order in one cache of each size.

    Args:
        trace: the requests.
        sizes: of the cache, in bytes.
        token_bytes: bytes of the keys and values of one token.
        progress: called with the number of replays that have ended.

    Raises:
        ConfigError: a size has no room for the longest request.
    """
    block_bytes = trace.block_tokens * token_bytes
    least = trace.most_blocks * block_bytes
    total = sum(request.input_length for request in trace.requests)
    for size in sizes:
        if size < least:
            what = f"`--orders`: {format_bytes(int(size))} has no room for the longest request"
            raise ConfigError(f"{what}, which takes {format_bytes(least)}")
    rows, stage, count = list[Json](), "comparing orders", len(ORDERS) * len(sizes)
    try:
        for done, size in enumerate(sizes):
            num_blocks = min(int(size // block_bytes), trace.num_distinct)
            found = dict[str, int]()
            for number, (name, order) in enumerate(ORDERS.items()):
                progress(stage, done * len(ORDERS) + number, count)
                found[name] = found_tokens(trace, order(num_blocks))
            found[BEST] = clairvoyant_tokens(trace, num_blocks)
            rates = {name: round(tokens / max(total, 1), 6) for name, tokens in found.items()}
            rows.append({"bytes": int(size), **rates})
    finally:
        progress(stage, 1, 1)
    return rows


def found_tokens(trace: Trace, order: Order) -> int:
    """Return how many prompt tokens a cache finds that begins empty."""
    size, total = trace.block_tokens, 0
    for now, request in enumerate(trace.requests, start=1):
        chain = request.chain
        found, missing = list[int](), list[int]()
        for position in range(len(chain) - 1, -1, -1):
            (found if chain[position] in order else missing).append(position)
        total += _tokens(request, (each for each in found if each < len(request.hash_ids)), size)
        for position in found:
            order.use(chain[position], now)
        for position in missing:
            order.add(chain[position], position, now)
    return total


def _tokens(request: Request, found: Iterable[int], size: int) -> int:
    """Return how many tokens of a prompt are found with blocks at these positions."""
    most = request.most_cached_tokens
    return sum(min(size, most - size * position) for position in found)


def clairvoyant_tokens(trace: Trace, num_blocks: int) -> int:
    """Return how many prompt tokens a cache of so many blocks finds if it knows the future.

    It keeps nothing that is not used again.
    """
    next_use, size = next_uses(trace), trace.block_tokens
    kept, heap, total = dict[int, int](), list[tuple[int, int, int]](), 0
    for number, request in enumerate(trace.requests):
        found = (i for i, each in enumerate(request.hash_ids) if each in kept)
        total += _tokens(request, found, size)
        for position, each in enumerate(request.chain):
            again = next_use[number][position]
            if again is None:
                kept.pop(each, None)
                continue
            kept[each] = again
            heapq.heappush(heap, (-again, -position, each))  # of one prompt, the tail goes first
        while len(kept) > num_blocks:
            again, _, each = heapq.heappop(heap)
            if kept.get(each) == -again:
                del kept[each]
    return total


def next_uses(trace: Trace) -> list[list[int | None]]:
    """Return the number of the request that uses each block of each request next."""
    last, found = dict[int, int](), list[list[int | None]]()
    for number, request in reversed([*enumerate(trace.requests)]):
        found.append([last.get(each) for each in request.chain])
        last.update(dict.fromkeys(request.chain, number))
    return found[::-1]


def table(rows: Sequence[Json]) -> list[dict[str, object]]:
    """Return the rows for people, in percent of the prompt tokens."""
    return [
        {
            "size": format_bytes(row["bytes"]),
            **{name: f"{100 * row[name]:.1f}" for name in (*ORDERS, BEST)},
        }
        for row in rows
    ]
