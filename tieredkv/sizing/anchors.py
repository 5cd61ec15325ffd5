"""The pages of layers with windows in a replay, and where they let requests go on.

A request can go on behind blocks that it found only where the pages of the windows are there too:
at an anchor. Such pages are kept where a prompt ends, where a recorded answer ends, where a request
leaves another one, and at intervals. Once a request has gone on, the earlier anchors of its chain
are evicted first, but those where requests parted and those at intervals.

Pages are as large as a block of the trace. Where a window ends amid such a block, as many of its
pages are kept as the window fills, the last one whole.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

from tieredkv.cache.tail import SPARE_BLOCKS, Interval, tail_kinds
from tieredkv.sizing.tiers import SimulatedTiers, Source
from tieredkv.traces import Request, Trace
from tieredkv.types import BlockHash, KVSpec, window_blocks

SEVERAL = 2
"""So many requests that went on from an anchor have it kept."""


class AnchorSize(NamedTuple):
    """What is kept for an anchor.

    Attributes:
        num_kinds: how many pages a block has beside its own.
        window: the longest window in tokens; 1 of a recurrent state, which is kept with one block.
        block_size: tokens of a block of the server.
        num_spare: blocks before those needed whose pages are kept as well.
        grid_tokens: at multiples of so many tokens there are anchors.
    """

    num_kinds: int
    window: int
    block_size: int
    num_spare: int = SPARE_BLOCKS
    grid_tokens: int = 1

    @property
    def needed_tokens(self) -> int:
        """Of how many of the last tokens a request needs pages to go on."""
        return window_blocks(self.window, self.block_size) * self.block_size

    @property
    def kept_tokens(self) -> int:
        """Of how many tokens pages are kept, but at intervals, where only those needed are."""
        return self.needed_tokens + self.num_spare * self.block_size

    @property
    def _interval(self) -> Interval:
        num_pages = self.num_kinds * self.needed_tokens // self.block_size
        return Interval.of(num_pages, self.block_size, max(1, self.grid_tokens // self.block_size))

    @property
    def interval_tokens(self) -> int:
        """From one of the anchors at intervals to the next."""
        return self._interval.num_blocks * self.block_size

    @property
    def uses_intervals(self) -> bool:
        """Whether the anchors at intervals are used whenever their conversation is."""
        return self._interval.is_used

    def place(self, num_blocks: int, block_tokens: int) -> int:
        """Return behind how many of some blocks there is the last place for an anchor."""
        num_tokens = num_blocks * block_tokens
        return (num_tokens - num_tokens % self.grid_tokens) // block_tokens

    def places(self, end: int, block_tokens: int) -> set[int]:
        """Return where anchors are made of a part of a prompt that ends behind so many blocks.

        Without spare blocks there is one more before the last place.
        """
        last = self.place(end, block_tokens)
        before = self.place(last - 1, block_tokens) if last and not self.num_spare else 0
        return {last, before} - {0}

    def num_bytes(self, token_bytes: int) -> int:
        """Return the bytes of an anchor, if a token has so many in a page."""
        return self.num_kinds * self.kept_tokens * token_bytes

    def interval(self, block_tokens: int) -> int:
        """Return the blocks from one of the anchors at intervals to the next, rounded up."""
        return -(-self.interval_tokens // block_tokens)

    def num_pages(self, num_tokens: int, block_tokens: int) -> int:
        """Return how many pages of a block some of its tokens fill."""
        return -(-self.num_kinds * min(num_tokens, block_tokens) // block_tokens)

    def most_pages(self, block_tokens: int) -> int:
        """Return how many pages an anchor has."""
        starts = range(0, self.kept_tokens, block_tokens)
        return sum(self.num_pages(self.kept_tokens - start, block_tokens) for start in starts)


def anchor_size(spec: KVSpec) -> AnchorSize | None:
    """Return what is kept for an anchor of a model; None if all layers attend to all tokens."""
    if not (kinds := tail_kinds(spec)):
        return None
    if spec.states:
        grid_tokens = spec.grid_blocks * spec.block_size
        return AnchorSize(len(kinds), 1, spec.block_size, num_spare=0, grid_tokens=grid_tokens)
    window = max(layer.window or 0 for layer in spec.layers)
    return AnchorSize(len(kinds), window, spec.block_size)


class Served(NamedTuple):
    """Where a request has found what it used.

    Attributes:
        sources: of each block of its prompt and its answer; None of those that it computed.
        page_sources: of each page of windows that it needed to go on.
        num_lacking: how many more blocks of its prompt were there, without an anchor.
    """

    sources: list[Source]
    page_sources: list[Source]
    num_lacking: int


class Anchors:
    """Serves the requests of a replay from tiers that keep pages of windows, too.

    Args:
        size: what is kept for an anchor.
        tiers: of the replay.
        block_tokens: tokens of a block of the trace.

    Attributes:
        num_made: how many anchors were made.
        num_pages: how many pages were computed for them.
    """

    def __init__(self, size: AnchorSize, tiers: SimulatedTiers, block_tokens: int) -> None:
        self._size, self._tiers, self._block_tokens = size, tiers, block_tokens
        self._interval = size.interval(block_tokens)
        # An anchor is known by the block before it, and so are the requests that went on there.
        self._kept = dict[int, int]()  # the tokens before it of which pages are kept
        self._num_continued = Counter[int]()
        self._num_users = Counter[BlockHash]()  # anchors for which a page is kept
        self.num_made = self.num_pages = 0

    def serve(self, request: Request, now: float, claims: frozenset[str]) -> Served:
        """Serve a request; see `SimulatedTiers.serve`."""
        tiers, chain = self._tiers, request.chain
        tiers.begin(now)
        prompt = cast("Sequence[BlockHash]", request.hash_ids)
        num_there = next((i for i, it in enumerate(prompt) if not tiers.has(it)), len(prompt))
        most, place = min(num_there, (request.input_length - 1) // self._block_tokens), self._place
        hit_end, needed_tokens = place(most), self._size.needed_tokens
        while not all(tiers.has(page) for page, _ in self._pages(chain, hit_end, needed_tokens)):
            hit_end = place(hit_end - 1)
        ends = self._ends(request, hit_end, num_there)
        needed = dict(self._pages(chain, hit_end, needed_tokens))
        pages_of = defaultdict[int, dict[BlockHash, None]](dict)  # by the place of their block
        for page, index in needed.items():
            pages_of[index][page] = None
        for end, num_tokens in ends.items():
            is_at_interval = num_tokens < self._size.kept_tokens
            if is_at_interval and end <= hit_end and not self._size.uses_intervals:
                continue
            for page, index in self._pages(chain, end, num_tokens):
                if index >= hit_end or tiers.has(page):  # those before are not computed
                    pages_of[index][page] = None
        keys = list[BlockHash]()
        for index, block in enumerate(cast("Sequence[BlockHash]", chain)):
            keys += block, *pages_of[index]
        found = dict(zip(keys, tiers.serve(keys, now, claims), strict=True))
        self.num_pages += sum(found[page] is None for some in pages_of.values() for page in some)
        self._keep(chain, ends)
        sources = [found[each] for each in prompt[:hit_end]]
        sources += [None] * (len(chain) - hit_end)
        return Served(sources, [found[page] for page in needed], num_there - hit_end)

    def _ends(self, request: Request, hit_end: int, num_there: int) -> dict[int, int]:
        """Return behind how many blocks a request makes anchors, or has them kept.

        Each end comes with the tokens before it whose pages are kept.

        Args:
            request: the request.
            hit_end: behind how many blocks it goes on.
            num_there: how many were there.
        """
        end = min(len(request.hash_ids), request.input_length // self._block_tokens)
        ends = self._size.places(end, self._block_tokens)
        if request.answer_hash_ids:
            ends.add(self._place(len(request.chain)))
        if hit_end:
            last = request.hash_ids[hit_end - 1]
            self._num_continued[last] += 1
            if self._num_continued[last] >= SEVERAL:
                ends.add(hit_end)
        if (left_at := self._place(num_there)) > hit_end:
            self._num_continued[request.hash_ids[left_at - 1]] = SEVERAL
            ends.add(left_at)
        chain, kept = request.chain, dict[int, int]()
        for end in range(self._interval, len(chain) + 1, self._interval):
            if end > hit_end or chain[end - 1] in self._kept:
                kept[end] = self._size.needed_tokens
        return kept | dict.fromkeys(ends - {0}, self._size.kept_tokens)

    def _place(self, num_blocks: int) -> int:
        """Return the last place for an anchor behind so many blocks."""
        return self._size.place(num_blocks, self._block_tokens)

    def _keep(self, chain: Sequence[int], ends: Mapping[int, int]) -> None:
        """Keep the anchors of a request, and have those evicted first that it has gone on past."""
        changes, held = list[tuple[int, int, int]](), self._kept
        for end, block in enumerate(chain, start=1):
            if block not in held and end not in ends:
                continue
            before, num_tokens = held.get(block, 0), ends.get(end, 0)
            if self._num_continued[block] >= SEVERAL:
                num_tokens = max(num_tokens, before)
            if num_tokens != before:
                self.num_made += not before
                changes.append((num_tokens - before, end, num_tokens))
        passed = list[BlockHash]()
        for _, end, num_tokens in sorted(changes, reverse=True):  # those that need more come first
            passed += self._hold(chain, end, num_tokens)
        self._tiers.supersede(passed)

    def _hold(self, chain: Sequence[int], end: int, num_tokens: int) -> list[BlockHash]:
        """Keep the pages of so many tokens for an anchor; return those that none needs any more."""
        block, users, passed = chain[end - 1], self._num_users, list[BlockHash]()
        held = self._kept.pop(block, 0)
        before, after = (dict(self._pages(chain, end, count)) for count in (held, num_tokens))
        users.update(page for page in after if page not in before)
        for page in [page for page in before if page not in after]:
            users[page] -= 1
            if not users[page]:
                del users[page]
                passed.append(page)
        if num_tokens:
            self._kept[block] = num_tokens
        return passed

    def _pages(
        self, chain: Sequence[int], end: int, num_tokens: int
    ) -> Iterator[tuple[BlockHash, int]]:
        """Yield the pages of the last tokens before the end of some blocks, the last block's first.

        Each one comes with the place of its block.
        """
        num_kinds = self._size.num_kinds
        for index in reversed(range(end)):
            if num_tokens <= 0:
                return
            for number in range(self._size.num_pages(num_tokens, self._block_tokens)):
                page = -1 - chain[index] * num_kinds - number  # ids of blocks are not negative
                yield cast(BlockHash, page), index
            num_tokens -= self._block_tokens


def most_room(size: AnchorSize, trace: Trace) -> tuple[int, int]:
    """Return how many pages there are at most, of all requests of a trace and of one of them."""
    longest = max((len(request.chain) for request in trace.requests), default=0)
    at_intervals = longest // size.interval(trace.block_tokens)
    # A request goes on from one, and has four kept beside those at intervals.
    of_one = (5 + at_intervals) * size.most_pages(trace.block_tokens)
    return min(size.num_kinds * trace.num_distinct, of_one * len(trace.requests)), of_one
