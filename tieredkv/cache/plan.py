"""Decides which blocks of a prefix to compute and which to load: numbers in, splits out.

The head of a prefix is computed and its tail is loaded, both at once. Early tokens are the cheap
ones to compute, since each token attends to all before it. Computing goes from the head to the
tail and loading from the tail to the head, so that they meet. The best meeting point is the one at
which both arrive at the same time.

A link whose rate hardly varies, such as the one from host memory, has a meeting point of its own
where other links load for the request too. Blocks at the head of a prefix are the last to be
evicted, so that host memory often holds the head of what only the disk has besides. Without this,
that head would be computed, since computing comes from there.

Requests share the device and the links. They are planned in the order in which they are served:
each finds the device and the links busy with the requests before it. So device and links meet in
one request, and both go on to the next.

How a split is found: the later the block at which a request is divided, the later is its head
computed, and the sooner has its tail arrived. So either block at which the two times cross is the
best one, or else the first or the last block, since computing nothing saves a step, and so does
loading nothing. So only a handful of blocks is tried. When a tail has arrived follows from how many
blocks of each list lie in it, which a bisection finds. When a head is computed `gaps` finds in the
same way. Only blocks that lie scattered are walked, once for a split.

This module knows seconds and bytes. It does not know blocks' contents, tiers, or clocks.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from tieredkv.cache.gaps import Gaps
from tieredkv.cache.step_times import PromptTimes
from tieredkv.cache.stretches import Stretch

SHORT_GAIN = 0.12
"""Loading from a link whose rate varies is begun if it saves more than the smaller of two times: a
step, which late blocks would cost, and this share of the time of computing the whole request. A
short request takes so few steps that it can hardly save one.
"""

HOST_LINK, DISK_LINK = 0, 1
"""The engine's links by their numbers: from host memory, and from disk."""

MAX_STRAIGHT = 6
"""Tries along a straight line to find where computing and loading meet; nearly all need no more."""


class LinkLoad(NamedTuple):
    """What one link may load for a request.

    Attributes:
        link: index of the link in the list of links.
        indices: the blocks that it may be given, ascending; they are loaded from the last one on.
        queued: the blocks that it was given and that have not arrived, ascending; they can be
            computed instead.
        is_bringing: whether blocks of `Demand.ready` are still on their way, given to it earlier
            and too late to be computed. The tokens behind them wait until it has moved all that it
            was given.
    """

    link: int
    indices: Sequence[int]
    queued: Sequence[int] = ()
    is_bringing: bool = False

    @property
    def end(self) -> int:
        """Index behind the last block of both."""
        end = self.indices[-1] + 1 if self.indices else 0
        return max(end, self.queued[-1] + 1) if self.queued else end


class Demand(NamedTuple):
    """What one request still needs.

    Attributes:
        begin: first token that is not computed.
        end: number of tokens of the request.
        loads: blocks that links may load.
        is_begun: whether something was loaded already, so that the plan is not a new one.
        loaded_to: index behind the last block that was loaded; those behind the last of `loads` and
            before it need no computing.
        ready: stretches of blocks `[first, last)` that need no computing, ascending; they do not
            touch.
        head: number of blocks at the head that are ready, of a model that has layers with windows:
            they need no computing if all that is not ready is loaded, but they do if anything is
            computed, since these layers leave out no token. `ready` is empty then.
    """

    begin: int
    end: int
    loads: Sequence[LinkLoad] = ()
    is_begun: bool = False
    loaded_to: int = 0
    ready: Sequence[Stretch] = ()
    head: int | None = None


class LinkState(NamedTuple):
    """One link as the planner sees it.

    Attributes:
        bytes_per_s: its rate.
        block_bytes: bytes of a block that pass it.
        busy_s: seconds until what it was given so far has arrived.
        latency_s: seconds from the arrival of the last byte until it can be used.
        is_steady: whether its rate hardly varies.
        through: index of another link that its bytes pass through next; None if they do not.
    """

    bytes_per_s: float
    block_bytes: int
    busy_s: float = 0.0
    latency_s: float = 0.0
    is_steady: bool = False
    through: int | None = None


class Split(NamedTuple):
    """How a request's missing prefix is divided.

    Attributes:
        block: blocks before it are computed, and those from it on are loaded.
        steady_block: the same for the blocks that steady links have; `block` or less.
        compute_s: seconds until the device has computed what is not loaded.
        load_s: seconds until the other blocks are loaded.
        done_s: seconds until the request's last token is computed.
    """

    block: int
    steady_block: int
    compute_s: float
    load_s: float
    done_s: float


@dataclass(slots=True)
class Planner:
    """Divides the prefixes of requests between the device and the links.

    Attributes:
        links: the links.
        compute: the device's time for a stretch of tokens.
        block_size: tokens a block.
        busy_s: seconds for which the device is busy with what it was given.
        least_tokens: a step with fewer tokens costs hardly less, so that none is planned.
        is_cpu: whether the device is the processor, which also moves the blocks: it computes
            nothing meanwhile.
    """

    links: Sequence[LinkState]
    compute: PromptTimes
    block_size: int
    busy_s: float = 0.0
    least_tokens: int = 1
    is_cpu: bool = False
    _free_s: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._free_s = [link.busy_s for link in self.links]

    def split(self, demand: Demand) -> Split:
        """Divide the next request's prefix; the following ones find device and links busier.

        Without anything to load, all is computed.
        """
        case = self._case(demand)
        best = case.best()
        if case.others and any([each.indices for each in case.steady]):
            options = [best, *self._options(case)]
            best = min(options, key=attrgetter("done_s"))
        for load in demand.loads:
            block = best.steady_block if self.is_steady(load) else best.block
            self._occupy(self._free_s, load, block)
        self.busy_s = best.compute_s + case.rest_s
        return best

    def least_gain_s(self, demand: Demand) -> float:
        """Return what a plan has to save beside loading all from steady links, or computing all."""
        return self._case(demand).least_gain_s

    def is_steady(self, load: LinkLoad) -> bool:
        """Return whether the rate of the link that loads hardly varies."""
        return self.links[load.link].is_steady

    def _case(self, demand: Demand) -> "_Case":
        gaps = Gaps(self.compute, self.block_size, demand.end, demand.ready)
        return _Case(self, demand, gaps, self.busy_s, self._free_s)

    def _options(self, case: "_Case") -> Iterator[Split]:
        """Yield splits in which the steady links load more than what lies behind `block`.

        They load all that they have, or what they have behind a head that is computed meanwhile.
        """
        size, compute_s, begin, first = self.block_size, case.compute_s, case.begin, case.first
        steady = [each for each in case.steady if each.indices]
        last = max(first, *(each.end for each in steady))
        load_s = _arrivals(self, steady, self._free_s)
        crossing = _crossing(
            lambda block: self.busy_s + compute_s(block * size) - load_s(block), first, last
        )
        is_worth_a_step = crossing - first >= self.least_tokens // size
        left = case.gaps
        if case.demand.head is None:
            left = left.without(*(each.indices for each in steady))
        for head in [first, crossing] if is_worth_a_step else [first]:
            steady_s, free_s = load_s(head), self._free_s.copy()
            for load in steady:
                self._occupy(free_s, load, head)
            busy_s = max(self.busy_s, steady_s) if self.is_cpu else self.busy_s
            busy_s = max(busy_s + compute_s(head * size), steady_s)
            if case.demand.head is None or head > first:
                begin = max(begin, head * size)
            rest = case.demand._replace(begin=begin, loads=case.others, loaded_to=case.rest)
            best = _Case(self, rest, left, busy_s, free_s).best()
            yield best._replace(steady_block=head, load_s=max(best.load_s, steady_s))

    def _occupy(self, free_s: list[float], load: LinkLoad, block: int) -> None:
        """Have the links be busy for longer with what is loaded from `block` on."""
        num_blocks = len(load.indices) - bisect_left(load.indices, block)
        free_s[load.link] += self._move_s(load.link, num_blocks)
        if (through := self.links[load.link].through) is not None:
            free_s[through] += self._move_s(through, num_blocks)

    def _move_s(self, link: int, num_blocks: int) -> float:
        """Return how long a link moves so many blocks."""
        return num_blocks * self.links[link].block_bytes / self.links[link].bytes_per_s


class _Case:
    """One request that is divided at one block, by which all links go.

    Attributes:
        steady, others: what links with a steady rate may load, and what other links load.
        begin: the first token that is neither computed nor ready.
        first: the first block at which it may be divided: everything is loaded.
        last: the last one: nothing is loaded.
        rest: index behind the last block that is loaded, or computed instead.
        rest_s: how long the tokens behind that one take.
        load_s: tells when all blocks from any one on have arrived.
    """

    def __init__(
        self, planner: Planner, demand: Demand, gaps: Gaps, busy_s: float, free_s: list[float]
    ) -> None:
        size, end = planner.block_size, demand.end
        self.planner, self.demand, self.gaps = planner, demand, gaps
        self.load_s = _arrivals(planner, demand.loads, free_s)
        self.busy_s, self._known = busy_s, dict[int, Split]()
        self.steady = [each for each in demand.loads if planner.is_steady(each)]
        self.others = [each for each in demand.loads if each.end and not planner.is_steady(each)]
        self.begin = gaps.begin(demand.begin)
        self.first = max(-(-self.begin // size), demand.head or 0)
        self.last = max([self.first, *(each.end for each in demand.loads)])
        self.rest = max(self.last, demand.loaded_to)
        self._since = gaps.since(self.begin)
        self.rest_s = gaps.since(min(self.rest * size, end - 1))(end)

    def compute_s(self, token: int) -> float:
        """Return how long the tokens from `begin` to any other one take."""
        is_left_out = self.demand.head is not None and token <= self.first * self.planner.block_size
        return 0.0 if is_left_out else self._since(token)

    @property
    def least_gain_s(self) -> float:
        """What a plan has to save beside loading all from steady links, or computing all."""
        end = self.demand.end
        step_s = self.planner.compute(end - 1, end)
        return min(step_s, SHORT_GAIN * self.compute_s(end))

    def at(self, block: int) -> Split:
        """Return what comes of computing the blocks before `block`, and loading the others."""
        if block not in self._known:
            end, load_s = self.demand.end, self.load_s(block)
            begin_s = max(self.busy_s, load_s) if self.planner.is_cpu else self.busy_s
            compute_s = begin_s + self.compute_s(min(block * self.planner.block_size, end))
            done_s = max(compute_s, load_s) + self.rest_s
            if block == self.last == self.rest:  # the tokens behind it need no step of their own
                done_s = max(self.busy_s, load_s) + self.compute_s(end)
            self._known[block] = Split(block, block, compute_s, load_s, done_s)
        return self._known[block]

    def best(self) -> Split:
        """Return the best of all splits."""
        planner, first, last = self.planner, self.first, self.last
        least = min(last, first - (-planner.least_tokens // planner.block_size))
        crossing = _crossing(self._lead_s, least, last + 1)
        blocks = {first, max(least, crossing - 1), min(crossing, last), last}
        splits = [self.at(block) for block in sorted(blocks)]
        varies = any([each.indices for each in self.others])
        only_steady = not self.others and any([each.end for each in self.steady])
        if only_steady or (varies and not self.demand.is_begun):
            # Neither loading all nor computing all takes a further step.
            simple = [splits[0], splits[-1]] if only_steady else splits[-1:]
            if simple[0].done_s - min(each.done_s for each in splits) <= self.least_gain_s:
                splits = simple
        return min(splits, key=attrgetter("done_s"))

    def _lead_s(self, block: int) -> float:
        """Return how much sooner the tail has arrived than the head is computed."""
        split = self.at(block)
        return split.compute_s - split.load_s


def _arrivals(
    planner: Planner, loads: Sequence[LinkLoad], free_s: Sequence[float]
) -> Callable[[int], float]:
    """Return what tells of a block when all have arrived that are not computed.

    These are those from this block on, and those that were begun and cannot be computed any more.

    Args:
        planner: knows the links.
        loads: of one request.
        free_s: for how long each link is busy with what it was given.
    """
    links = planner.links
    lists = defaultdict[int, list[Sequence[int]]](list)  # of blocks that pass each link
    # For each link that was given blocks, the last one that can still be computed instead, and when
    # they arrive. If some cannot, they are waited for wherever the request is divided.
    coming = list[tuple[float, float]]()
    for load in loads:
        link = links[load.link]
        if load.indices:
            lists[load.link].append(load.indices)
        if link.through is not None:
            lists[link.through] += [each for each in (load.indices, load.queued) if each]
        if load.is_bringing or load.queued:
            last = math.inf if load.is_bringing else load.queued[-1]
            coming.append((last, link.busy_s + link.latency_s))
    passing = [(free_s[link], links[link], each) for link, each in lists.items()]

    def load_s(block: int) -> float:
        latest_s = 0.0
        for last, arrival_s in coming:  # many are under way at once
            if last >= block and arrival_s > latest_s:
                latest_s = arrival_s
        for busy_s, link, some in passing:
            num_blocks = 0
            for indices in some:
                num_blocks += len(indices) - bisect_left(indices, block)
            if num_blocks:
                move_s = num_blocks * link.block_bytes / link.bytes_per_s
                arrival_s = busy_s + move_s + link.latency_s
                if arrival_s > latest_s:
                    latest_s = arrival_s
        return latest_s

    return load_s


def _crossing(lead_s: Callable[[int], float], low: int, high: int) -> int:
    """Return the first block of `range(low, high)` with a lead of 0 or more; `high` without one.

    The lead does not fall from one block to the next. Mostly it hardly bends, so that a straight
    line between two blocks leads close to where it is 0, in half the tries of a bisection. Where it
    does bend, the blocks that are left after some tries are halved.

    Source: regula falsi, the Illinois variant (Dowell and Jarratt 1971).
    """
    if low >= high or (low_s := lead_s(low)) >= 0:
        return low
    high -= 1
    if (high_s := lead_s(high)) < 0:
        return high + 1
    was_low = was_high = False
    tries_left = MAX_STRAIGHT
    while (num_between := high - low - 1) > 0:
        share = low_s / (low_s - high_s) if tries_left > 0 else 0.5
        block = low + min(max(int((high - low) * share), 1), num_between)
        if (found_s := lead_s(block)) < 0:
            low, low_s, high_s = block, found_s, high_s / 2 if was_low else high_s
        else:
            high, high_s, low_s = block, found_s, low_s / 2 if was_high else low_s
        was_low, was_high = found_s < 0, found_s >= 0
        tries_left -= 1
    return high


class Outlook(NamedTuple):
    """What is expected of one request that is alone, and whose prefix a slower tier has.

    Attributes:
        split: the plan.
        compute_s: seconds until its last token is computed if all is computed.
        load_s: the same if the whole prefix is loaded.
    """

    split: Split
    compute_s: float
    load_s: float


def outlook(
    planner: Planner, num_cached_tokens: int, num_tokens: int, *, begin: int = 0
) -> Outlook:
    """Compare the plan for one request with computing and with loading all of its prefix.

    Args:
        planner: a new one, whose first link has the prefix.
        num_cached_tokens: length of the prefix, in whole blocks.
        num_tokens: of the request.
        begin: the tokens before it, in whole blocks, are there already.
    """
    size, link = planner.block_size, planner.links[0]
    blocks = range(begin // size, num_cached_tokens // size)
    move_s = len(blocks) * link.block_bytes / link.bytes_per_s
    load_s = link.busy_s + move_s + link.latency_s + planner.compute(num_cached_tokens, num_tokens)
    compute_s = planner.busy_s + planner.compute(begin, num_tokens)
    split = planner.split(Demand(begin, num_tokens, [LinkLoad(0, blocks)]))
    return Outlook(split, compute_s, load_s)
