"""Decides which blocks of a prefix to compute and which to load: numbers in, splits out.

The head of a prefix is computed and its tail is loaded, both at once. Early tokens are the cheap
ones to compute, since each token attends to all before it. Computing goes from the head to the
tail and loading from the tail to the head, so that they meet. The best meeting point is the one at
which both arrive at the same time.

Requests share the device and the links. They are planned in the order in which they are served:
each finds the device and the links busy with the requests before it. So device and links meet in
one request, and both go on to the next.

This module knows seconds and bytes. It does not know blocks' contents, tiers, or clocks.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from tieredkv.cache.rates import ComputeSeconds


class LinkLoad(NamedTuple):
    """What one link may load for a request.

    Attributes:
        link: index of the link in the list of links.
        indices: the blocks that it may be given, ascending; they are loaded from the last one on.
        queued: the blocks that it was given and that have not arrived, ascending.
    """

    link: int
    indices: Sequence[int]
    queued: Sequence[int] = ()

    def __repr__(self) -> str:
        ends = f"{self.indices[0]}..{self.indices[-1]}" if self.indices else "none"
        return f"link {self.link}: {len(self.indices)} blocks, {ends}, {len(self.queued)} queued"


class Demand(NamedTuple):
    """What one request still needs.

    Attributes:
        begin: first token that is not computed.
        end: number of tokens of the request.
        loads: blocks that links may load.
    """

    begin: int
    end: int
    loads: Sequence[LinkLoad] = ()


class LinkState(NamedTuple):
    """One link as the planner sees it.

    Attributes:
        bytes_per_s: its rate.
        busy_bytes: bytes that it was given and that have not arrived.
        latency_s: seconds from the arrival of the last byte until it can be used.
    """

    bytes_per_s: float
    busy_bytes: float = 0.0
    latency_s: float = 0.0


class Split(NamedTuple):
    """How a request's missing prefix is divided.

    Attributes:
        block: blocks before it are computed, and those from it on are loaded.
        compute_s: seconds until the device has computed the blocks before it.
        load_s: seconds until the blocks from it on are loaded.
    """

    block: int
    compute_s: float
    load_s: float

    @property
    def ready_s(self) -> float:
        """Seconds until all blocks are there, so that the tokens behind them can be computed."""
        return max(self.compute_s, self.load_s)


def plan(
    demands: Sequence[Demand],
    links: Sequence[LinkState],
    compute: ComputeSeconds,
    *,
    block_size: int,
    block_bytes: int,
    busy_s: float = 0.0,
    least_tokens: int = 1,
) -> list[Split]:
    """Divide the prefixes of requests between the device and the links.

    Args:
        demands: what the requests need, in the order in which they are served.
        links: the links.
        compute: predicts the device's time for a stretch of tokens.
        block_size: tokens a block.
        block_bytes: bytes a block.
        busy_s: seconds for which the device is busy with what it was given.
        least_tokens: a step with fewer tokens costs hardly less, so that none is planned.

    Returns:
        One split for each demand. Without anything to load, all is computed.
    """
    free_s = [link.busy_bytes / link.bytes_per_s for link in links]
    splits = []
    for demand in demands:
        first = -(-demand.begin // block_size)
        ends = (
            indices[-1] + 1
            for load in demand.loads
            for indices in (load.indices, load.queued)
            if indices
        )
        last = max(first, max(ends, default=first))

        def load_s(split: int, demand: Demand = demand) -> float:
            """Return when all blocks from `split` on have arrived."""
            arrivals = [0.0]
            for load in demand.loads:
                link = links[load.link]
                if count := _num_from(load.indices, split):
                    move_s = count * block_bytes / link.bytes_per_s
                    arrivals.append(free_s[load.link] + move_s + link.latency_s)
                if count := _num_from(load.queued, split):
                    queue_s = link.busy_bytes / link.bytes_per_s
                    arrivals.append(queue_s * count / len(load.queued) + link.latency_s)
            return max(arrivals)

        def compute_s(split: int, demand: Demand = demand, busy_s: float = busy_s) -> float:
            """Return when the device has computed the tokens before `split`."""
            return busy_s + compute(demand.begin, min(split * block_size, demand.end))

        least = min(last, first - (-least_tokens // block_size))
        candidates = range(least, last + 1)
        crossing = least + bisect_left(candidates, True, key=lambda m: compute_s(m) >= load_s(m))
        around = {first, *(min(max(each, least), last) for each in (crossing - 1, crossing))}
        block = min(sorted(around), key=lambda m: max(compute_s(m), load_s(m)))
        splits.append(Split(block, compute_s(block), load_s(block)))
        for load in demand.loads:
            num_bytes = _num_from(load.indices, block) * block_bytes
            free_s[load.link] += num_bytes / links[load.link].bytes_per_s
        busy_s += compute(demand.begin, min(block * block_size, demand.end))
        busy_s += compute(last * block_size, demand.end)
    return splits


def _num_from(indices: Sequence[int], first: int) -> int:
    """Count the indices, given in ascending order, from `first` on."""
    return len(indices) - bisect_left(indices, first)
