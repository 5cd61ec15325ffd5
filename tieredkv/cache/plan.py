"""Decides which blocks of a prefix to compute and which to load: numbers in, splits out.

The head of a prefix is computed and its tail is loaded, both at once. Early tokens are the cheap
ones to compute, since each token attends to all before it. Computing goes from the head to the
tail and loading from the tail to the head, so that they meet. The best meeting point is the one at
which both arrive at the same time.

A link whose rate hardly varies, such as the one from host memory, has a meeting point of its own
where other links load for the request too. Blocks at the head of a prefix are the last to be
evicted, so that host memory often holds the head of what only the disk has besides. Without this,
that head would be computed, since computing comes from there.

While others wait for the device, its time has a price: what a steady link has is computed only if
that makes the request faster by more than it makes the others slower.

Requests share the device and the links. They are planned in the order in which they are served:
each finds the device and the links busy with the requests before it. So device and links meet in
one request, and both go on to the next.

This module knows seconds and bytes. It does not know blocks' contents, tiers, or clocks.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tieredkv.cache.rates import ComputeSeconds
from tieredkv.cache.stretches import joined, stretches

MIN_GAIN = 0.08
"""Loading from a link whose rate varies is begun if it saves this share of the time that computing
the same blocks takes, and more than one step, which late blocks would cost, or SHORT_GAIN. What a
steady link has is computed only if that saves more than one step, or this share of the whole time
if all is computed, which takes no further step.
"""

SHORT_GAIN = 0.12
"""Share of the time of computing a whole request that is enough to begin to load for it. A short
request takes so few steps that it can hardly save one.
"""


class LinkLoad(NamedTuple):
    """What one link may load for a request.

    Attributes:
        link: index of the link in the list of links.
        indices: the blocks that it may be given, ascending; they are loaded from the last one on.
        queued: the blocks that it was given and that have not arrived, ascending; they can be
            computed instead.
        is_bringing: whether it was also given blocks that cannot be computed any more. They count
            as ready, but the tokens behind them wait for it.
    """

    link: int
    indices: Sequence[int]
    queued: Sequence[int] = ()
    is_bringing: bool = False

    @property
    def end(self) -> int:
        """Index behind the last block of both."""
        return max((each[-1] + 1 for each in (self.indices, self.queued) if each), default=0)

    def __repr__(self) -> str:
        ends = f"{self.indices[0]}..{self.indices[-1]}" if self.indices else "none"
        return f"link {self.link}: {len(self.indices)} blocks, {ends}, {len(self.queued)} queued"


class Demand(NamedTuple):
    """What one request still needs.

    Attributes:
        begin: first token that is not computed.
        end: number of tokens of the request.
        loads: blocks that links may load.
        is_begun: whether something was loaded already, so that the plan is not a new one.
        loaded_to: index behind the last block that was loaded; those behind the last of `loads` and
            before it need no computing.
        ready: stretches of blocks `[first, last)` that need no computing, ascending.
    """

    begin: int
    end: int
    loads: Sequence[LinkLoad] = ()
    is_begun: bool = False
    loaded_to: int = 0
    ready: Sequence[tuple[int, int]] = ()


class LinkState(NamedTuple):
    """One link as the planner sees it.

    Attributes:
        bytes_per_s: its rate.
        busy_s: seconds until what it was given so far has arrived.
        latency_s: seconds from the arrival of the last byte until it can be used.
        is_steady: whether its rate hardly varies.
        through: index of another link that its bytes pass through next; None if they do not.
    """

    bytes_per_s: float
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

    @property
    def ready_s(self) -> float:
        """Seconds until all blocks are there, so that the tokens behind them can be computed."""
        return max(self.compute_s, self.load_s)


@dataclass(slots=True)
class Planner:
    """Divides the prefixes of requests between the device and the links.

    Attributes:
        links: the links.
        compute: predicts the device's time for a stretch of tokens.
        block_size: tokens a block.
        block_bytes: bytes a block.
        busy_s: seconds for which the device is busy with what it was given.
        least_tokens: a step with fewer tokens costs hardly less, so that none is planned.
        is_shared: whether more than one request needs the device.
        is_cpu: whether the device is the processor, which also moves the blocks: it computes
            nothing meanwhile.
    """

    links: Sequence[LinkState]
    compute: ComputeSeconds
    block_size: int
    block_bytes: int
    busy_s: float = 0.0
    least_tokens: int = 1
    is_shared: bool = False
    is_cpu: bool = False
    _free_s: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._free_s = [link.busy_s for link in self.links]

    def split(self, demand: Demand) -> Split:
        """Divide the next request's prefix; the following ones find device and links busier.

        Without anything to load, all is computed.
        """
        best = self._best(demand, self.busy_s)
        steady = [each for each in demand.loads if each.indices and self._is_steady(each)]
        others = [each for each in demand.loads if each.end and not self._is_steady(each)]
        if steady and others:
            options = self._options(demand, steady, others)
            best = min(
                [best, *options],
                key=lambda each: each.done_s + self._price_s(demand, each.steady_block),
            )
        for load in demand.loads:
            self._occupy(load, best.steady_block if self._is_steady(load) else best.block)
        self.busy_s = best.compute_s + self._rest_s(demand)
        return best

    def may_load(self, demand: Demand) -> bool:
        """Whether `split` may load something of a new request, all of which its only link can load.

        Only False is certain. It is found in less time than a split: while everything is computed,
        the link brings so much and no more, so that all before it is computed in any case.
        """
        (load,) = demand.loads
        begin, last = self._begin(demand), load.end
        all_s = self._compute_s(demand, begin, demand.end)
        num_loaded = int((self.busy_s + all_s) / self._move_s(load.link, 1))
        num_loaded = min(num_loaded, len(load.indices))
        if not num_loaded:
            return False
        split = max(begin, load.indices[-num_loaded] * self.block_size)
        least_s = self._compute_s(demand, begin, split) + self._rest_s(demand)
        return all_s - least_s > self.least_gain_s(demand, begin, last)

    def least_gain_s(self, demand: Demand, begin: int, last: int) -> float:
        """Return what loading the blocks before `last` from a link that varies has to save.

        Args:
            demand: of the request.
            begin: first token that is neither computed nor ready.
            last: index behind the last of the blocks.
        """
        blocks_s = self._compute_s(demand, begin, last * self.block_size)
        all_s = self._compute_s(demand, begin, demand.end)
        step_s = self.compute(demand.end - 1, demand.end)
        return max(MIN_GAIN * blocks_s, min(step_s, SHORT_GAIN * all_s))

    def _occupy(self, load: LinkLoad, split: int) -> None:
        """Have the links be busy for longer with what is loaded from `split` on."""
        num_blocks = _num_from(load.indices, split)
        self._free_s[load.link] += self._move_s(load.link, num_blocks)
        if (through := self.links[load.link].through) is not None:
            self._free_s[through] += self._move_s(through, num_blocks)

    def _is_steady(self, load: LinkLoad) -> bool:
        return self.links[load.link].is_steady

    def _rest(self, demand: Demand) -> int:
        """Return the index behind the last block that is loaded, or computed instead."""
        first = -(-self._begin(demand) // self.block_size)
        return max(first, demand.loaded_to, *(each.end for each in demand.loads))

    def _rest_s(self, demand: Demand) -> float:
        """Return how long the tokens behind that block take."""
        begin = min(self._rest(demand) * self.block_size, demand.end - 1)
        return self._compute_s(demand, begin, demand.end)

    def _begin(self, demand: Demand) -> int:
        """Return the first token that is neither computed nor ready."""
        begin = demand.begin
        for first, last in demand.ready:
            if first * self.block_size <= begin:
                begin = min(max(begin, last * self.block_size), demand.end - 1)
        return begin

    def _options(
        self, demand: Demand, steady: Sequence[LinkLoad], others: Sequence[LinkLoad]
    ) -> Iterator[Split]:
        """Yield splits in which the steady links load more than what lies behind `block`.

        They load all that they have, or what they have behind a head that is computed meanwhile.
        """
        size, begin = self.block_size, self._begin(demand)
        first, ends = -(-begin // size), [each.end for each in demand.loads]
        only = demand._replace(loads=steady)
        last = max(first, max(each.end for each in steady))
        crossing = first + bisect_left(
            range(first, last),
            True,
            key=lambda m: (
                self.busy_s + self._compute_s(demand, begin, m * size) >= self._load_s(only, m)
            ),
        )
        heads = [first]
        if crossing - first >= self.least_tokens // size:
            heads.append(crossing)
        for head in heads:
            steady_s = self._load_s(only, head)
            computed_s = self._begin_s(self.busy_s, steady_s)
            computed_s += self._compute_s(demand, begin, head * size)
            loaded = stretches(each for load in steady for each in load.indices if each >= head)
            rest = demand._replace(
                begin=max(begin, head * size),
                loads=others,
                loaded_to=max(demand.loaded_to, *ends),
                ready=joined([*demand.ready, *loaded]),
            )
            free_s = self._free_s.copy()
            for load in steady:
                self._occupy(load, head)
            best = self._best(rest, max(computed_s, steady_s))
            self._free_s = free_s
            load_s, done_s = max(best.load_s, steady_s), best.done_s
            yield best._replace(steady_block=head, load_s=load_s, done_s=done_s)

    def _best(self, demand: Demand, busy_s: float) -> Split:
        """Return the best split of those in which all links load what lies behind one block.

        Args:
            demand: of the request.
            busy_s: seconds until the device begins to compute it.
        """
        size, begin, end = self.block_size, self._begin(demand), demand.end
        first = -(-begin // size)
        last = max(first, 0, *(each.end for each in demand.loads))
        rest, rest_s = self._rest(demand), self._rest_s(demand)

        def compute_s(split: int) -> float:
            """Return when the device has computed the tokens before `split`."""
            begin_s = self._begin_s(busy_s, self._load_s(demand, split))
            return begin_s + self._compute_s(demand, begin, min(split * size, end))

        def done_s(split: int) -> float:
            """Return when the last token is computed; without loads it needs no step of its own."""
            if split == last == rest:
                begin_s = max(busy_s, self._load_s(demand, split))
                return begin_s + self._compute_s(demand, begin, end)
            return max(compute_s(split), self._load_s(demand, split)) + rest_s

        least = min(last, first - (-self.least_tokens // size))
        crossing = least + bisect_left(
            range(least, last + 1), True, key=lambda m: compute_s(m) >= self._load_s(demand, m)
        )
        candidates = {first, max(least, crossing - 1), min(crossing, last), last}
        varies = any(each.indices and not self._is_steady(each) for each in demand.loads)
        only_steady = {self._is_steady(each) for each in demand.loads if each.end} == {True}
        if only_steady or (varies and not demand.is_begun):
            simple = first if only_steady else last
            least_gain_s = self.compute(end - 1, end)
            if varies:
                least_gain_s = self.least_gain_s(demand, begin, last)
            if done_s(simple) - min(map(done_s, candidates)) <= least_gain_s:
                candidates = {simple}
                if only_steady and done_s(last) < (1 - MIN_GAIN) * done_s(first):
                    candidates.add(last)  # which takes no further step
        block = min(sorted(candidates), key=lambda m: done_s(m) + self._price_s(demand, m))
        return Split(block, block, compute_s(block), self._load_s(demand, block), done_s(block))

    def _price_s(self, demand: Demand, split: int) -> float:
        """Return for how long others wait for the blocks before `split` that steady links have."""
        steady = [load for load in demand.loads if self._is_steady(load)] if self.is_shared else []
        first = -(-self._begin(demand) // self.block_size)
        num_computed = sum(len(load.indices) - _num_from(load.indices, split) for load in steady)
        if not num_computed or split <= first:
            return 0.0
        compute_s = self._compute_s(demand, self._begin(demand), split * self.block_size)
        return compute_s * num_computed / (split - first)

    def _begin_s(self, busy_s: float, load_s: float) -> float:
        """Return when the device begins to compute what is not loaded."""
        return max(busy_s, load_s) if self.is_cpu else busy_s

    def _compute_s(self, demand: Demand, begin: int, end: int) -> float:
        """Return how long the device takes for those tokens of a stretch that are not ready."""
        seconds = 0.0
        for first, last in demand.ready:
            # The last token of a request is never cached.
            first, last = first * self.block_size, min(last * self.block_size, demand.end - 1)
            if begin < first < end:
                seconds += self.compute(begin, first)
            if first < end:
                begin = max(begin, last)
        return seconds + self.compute(begin, end)

    def _load_s(self, demand: Demand, split: int) -> float:
        """Return when all have arrived that are not computed: those from `split` on, and others."""
        arrivals, carried = [0.0], dict[int, int]()
        for load in demand.loads:
            link, num_blocks = self.links[load.link], _num_from(load.indices, split)
            if num_blocks:
                arrivals.append(self._arrival_s(load.link, num_blocks))
            is_coming = bool(load.queued) and load.queued[-1] >= split  # many are under way at once
            if is_coming or load.is_bringing:
                arrivals.append(link.busy_s + link.latency_s)
            if link.through is not None:
                num_blocks += _num_from(load.queued, split)
            last = load.link if link.through is None else link.through
            carried[last] = carried.get(last, 0) + num_blocks
        arrivals += [self._arrival_s(*each) for each in carried.items() if each[1]]
        return max(arrivals)

    def _arrival_s(self, link: int, num_blocks: int) -> float:
        """Return when so many more blocks have come over a link."""
        return self._free_s[link] + self._move_s(link, num_blocks) + self.links[link].latency_s

    def _move_s(self, link: int, num_blocks: int) -> float:
        """Return how long a link moves so many blocks."""
        return num_blocks * self.block_bytes / self.links[link].bytes_per_s


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
    move_s = len(blocks) * planner.block_bytes / link.bytes_per_s
    load_s = link.busy_s + move_s + link.latency_s + planner.compute(num_cached_tokens, num_tokens)
    compute_s = planner.busy_s + planner.compute(begin, num_tokens)
    split = planner.split(Demand(begin, num_tokens, [LinkLoad(0, blocks)]))
    return Outlook(split, compute_s, load_s)


def _num_from(indices: Sequence[int], first: int) -> int:
    """Count the indices, given in ascending order, from `first` on."""
    return len(indices) - bisect_left(indices, first)
