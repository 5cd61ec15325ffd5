"""How much a better order of eviction could win: LRU beside one that knows the future.

For one cache of each size it replays a trace with the order of a server, and with Belady's, which
evicts the block whose next use is the furthest away and keeps nothing that is not used again. No
order can find more. A prompt's blocks are used together, so that what that order keeps are heads.

    python -m tests.stress.eviction_bound TRACE --sizes 64GiB,1TiB

Source: Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.
"""

import heapq
import json
from pathlib import Path

import click

from tieredkv.bench import raw
from tieredkv.bench.progress import bench_progress
from tieredkv.cli.bench_options import several
from tieredkv.sizing.replay import Sizes, replay
from tieredkv.traces import Trace, read_trace
from tieredkv.units import parse_bytes


def clairvoyant_tokens(trace: Trace, num_blocks: int) -> int:
    """Return how many prompt tokens a cache of so many blocks finds if it knows the future."""
    next_use = next_uses(trace)
    kept, heap, cached = dict[int, int](), list[tuple[int, int, int]](), 0
    for number, request in enumerate(trace.requests):
        ids = request.hash_ids
        num_found = next((i for i, each in enumerate(ids) if each not in kept), len(ids))
        cached += min(num_found * trace.block_tokens, request.input_length)
        for position, each in enumerate(ids):
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
    return cached


def next_uses(trace: Trace) -> list[list[int | None]]:
    """Return the number of the request that uses each block of each request next."""
    last, found = dict[int, int](), list[list[int | None]]()
    for number, request in reversed([*enumerate(trace.requests)]):
        found.append([last.get(each) for each in request.hash_ids])
        last.update(dict.fromkeys(request.hash_ids, number))
    return found[::-1]


@click.command(context_settings={"show_default": True})
@click.argument("trace", type=click.Path(path_type=Path))
@several("--sizes", parse_bytes, default="64GiB,256GiB,1TiB,4TiB", help="Sizes of the cache.")
@click.option("--bytes-per-token", type=int, default=131_072, help="Keys and values of a token.")
@click.option("--commit", help="Commit to report, for a tree without its history.")
def main(trace: Path, sizes: list[int], bytes_per_token: int, commit: str | None) -> None:
    """Print what LRU and an order that knows the future find in caches of some sizes."""
    progress = bench_progress()
    read, rows = read_trace(trace, progress), []
    for size in sizes:
        lru = replay(read, Sizes(device=size, token_bytes=bytes_per_token), progress)
        num_blocks = size // (read.block_tokens * bytes_per_token)
        total = lru["prompt_tokens"]
        best = clairvoyant_tokens(read, num_blocks)
        rows.append({"bytes": size, "lru": lru["hit_rate"], "best": round(best / total, 6)})
    head = raw.head(commit, "python -m tests.stress.eviction_bound")
    click.echo(json.dumps(head | {"trace": read.name, "rows": rows}))


if __name__ == "__main__":
    main()
