"""Compares orders of eviction: what one cache of a given size finds with each of them.

This leaves out what tiers, retention, reserved shares and links add. The cache is a block pool of a
server with the order of its setting `eviction_order`, see `tieredkv.cache.orders`. A request holds
the blocks that it finds, while the others are added. `best` is no order that a server can have: it
evicts the block whose next use is the furthest away, and no order can find more.

Source: Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer", 1966.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import cast

from tieredkv.cache.orders import ORDERS
from tieredkv.cache.pool import BlockPool
from tieredkv.errors import ConfigError
from tieredkv.sizing.replay import Json
from tieredkv.traces import Request, Trace
from tieredkv.types import BlockHash, Progress
from tieredkv.units import format_bytes

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
            for number, name in enumerate(ORDERS):
                progress(stage, done * len(ORDERS) + number, count)
                found[name] = found_tokens(trace, BlockPool(num_blocks, name))
            found[BEST] = clairvoyant_tokens(trace, num_blocks)
            rates = {name: round(tokens / max(total, 1), 6) for name, tokens in found.items()}
            rows.append({"bytes": int(size), **rates})
    finally:
        progress(stage, 1, 1)
    return rows


def found_tokens(trace: Trace, pool: BlockPool) -> int:
    """Return how many prompt tokens a pool finds that begins empty."""
    size, total = trace.block_tokens, 0
    for request in trace.requests:
        chain = cast(Sequence[BlockHash], request.chain)  # the pool's keys may be anything
        table, most = pool.find(chain), len(request.hash_ids)
        total += _tokens(request, (i for i, each in enumerate(table[:most]) if each), size)
        pool.acquire(block for block in table if block is not None)
        missing = [block_hash for block_hash, each in zip(chain, table, strict=True) if not each]
        fresh = pool.allocate(len(missing)).blocks
        assert fresh is not None, "the pool has no room for one request"
        pool.insert_filled(fresh, missing)
        added = iter(fresh)
        pool.release([each or next(added) for each in table][::-1])
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
