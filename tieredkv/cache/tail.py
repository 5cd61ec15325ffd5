"""The pages of one request's layers with windows, beside the chain of its blocks.

A block has one page of the layers that attend to all tokens, and it may have further pages of
layers with a window. Of those only the ones near the end of what is computed are needed, so that a
request holds few of them at a time.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, overload

from tieredkv.cache.block import Block
from tieredkv.cache.chain import Chain, PageIdentity
from tieredkv.errors import IntegrityError
from tieredkv.hashing import PageNames
from tieredkv.pieces import PIECE_BLOCKS, Pieces, cut
from tieredkv.types import BlockHash, HashAlgo, KVSpec, window_blocks

NO_PAGE = Block(0)
"""Stands in a table where the request holds no page."""

INTERVAL = 10
"""A place is kept where the blocks since the last such one have so many times the bytes of what is
kept for it. Requests that change what was said before may go on there.
"""

CLOSE_TOKENS = 10_240
"""After so many tokens at the latest one is kept, unless what is kept for it has more bytes."""

SPARE_BLOCKS = 2
"""Blocks before those that a hit needs whose pages are kept as well.

A request that leaves another one's tokens a little before their end then finds a hit there.
"""


class TailKind(NamedTuple):
    """One of the further pages of a block.

    Attributes:
        num_blocks: how many of the last blocks before the end of a hit it is needed of.
        group, part, num_parts: which page it is of which group of layers, and how many that has.
    """

    num_blocks: int
    group: int
    part: int
    num_parts: int


def tail_kinds(spec: KVSpec) -> list[TailKind]:
    """Return what the pages of a block hold beside the first one.

    The pages of a recurrent state are those of the last block before it.
    """
    if num_pages := spec.state_pages:
        return [TailKind(1, 1, part, num_pages) for part in range(num_pages)]
    _, *kinds = spec.page_kinds
    windows, parts = sorted({kind.window or 0 for kind in kinds}), Counter[int]()
    num_parts, made = Counter(kind.window or 0 for kind in kinds), list[TailKind]()
    for kind in kinds:
        window = kind.window or 0
        num_blocks = window_blocks(window, spec.block_size)
        group = 1 + windows.index(window)
        made.append(TailKind(num_blocks, group, parts[window], num_parts[window]))
        parts[window] += 1
    return made


class StateStep(NamedTuple):
    """What a step does with a request's recurrent state.

    Attributes:
        pages: of the state itself, ids.
        copies: ids of pages that are copied before it, from and to.
        kept: numbers of its tokens behind which it writes the state to other pages too, and these.
    """

    pages: Sequence[int] = ()
    copies: Sequence[tuple[int, int]] = ()
    kept: Sequence[tuple[int, Sequence[int]]] = ()


class Interval(NamedTuple):
    """From one of the places that are kept along a chain to the next.

    Attributes:
        num_blocks: between them.
        is_used: whether what is kept there is used whenever its session is. If it has many bytes it
            is not, so that a full tier loses it before what the session needs to go on.
    """

    num_blocks: int
    is_used: bool

    @classmethod
    def of(cls, num_pages: int, block_size: int, grid: int = 1) -> Self:
        """Return the interval of places for each of which so many further pages are kept."""
        far = INTERVAL * num_pages  # a page has the bytes of a block
        num_blocks = min(far, max(num_pages, CLOSE_TOKENS // block_size))
        return cls(-(-num_blocks // grid) * grid, is_used=num_blocks == far)


def hit_pages(spec: KVSpec) -> int:
    """Return how many further pages a hit needs."""
    kinds = tail_kinds(spec)
    return len(kinds) * max((kind.num_blocks for kind in kinds), default=0)


def anchor_pages(spec: KVSpec) -> int:
    """Return how many further pages are kept for a place where later requests may go on."""
    num_spare = 0 if spec.states else SPARE_BLOCKS
    return hit_pages(spec) + len(tail_kinds(spec)) * num_spare


class PageHashes(Sequence[BlockHash]):
    """The names of the further pages of a chain's blocks, which are made when they are asked for.

    A block may have a dozen of these pages, and of most blocks none is ever kept.
    """

    def __init__(self, of: Chain, kinds: Sequence[TailKind], algo: HashAlgo) -> None:
        self._of = of
        self._names = PageNames([(kind.group, kind.part) for kind in kinds], algo)
        self._made = dict[int, list[BlockHash]]()  # by block
        self._alone = dict[int, BlockHash]()  # by page, of blocks of which one page was asked for

    def __len__(self) -> int:
        return len(self._of.hashes) * len(self._names)

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...
    @overload
    def __getitem__(self, index: slice) -> list[BlockHash]: ...
    def __getitem__(self, index: int | slice) -> BlockHash | list[BlockHash]:
        num_pages = len(self._names)
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return [self[each] for each in range(start, stop, step)]
            first = start // num_pages
            made = self.of_blocks(range(first, -(-stop // num_pages)))
            return made[start - first * num_pages : stop - first * num_pages]
        block, number = divmod(index, num_pages)
        if block in self._made:
            return self._made[block][number]
        if (alone := self._alone.get(index)) is None:
            alone = self._alone[index] = self._names.one_of(self._of.hashes[block], number)
        return alone

    def named(self) -> Iterator[tuple[int, BlockHash]]:
        """Return the pages that were asked for so far, with their names, in any order."""
        yield from self._alone.items()
        for block, names in self._made.items():
            yield from enumerate(names, block * len(self._names))

    def of_blocks(self, blocks: Iterable[int]) -> list[BlockHash]:
        """Return the names of all pages of these blocks."""
        made, hashes, found = self._made, self._of.hashes, list[BlockHash]()
        for block in blocks:
            if block not in made:
                made[block] = self._names.of(hashes[block])
            found += made[block]
        return found


@dataclass(slots=True, eq=False, kw_only=True)
class Tail(Chain):
    """The further pages of the blocks of a chain, block after block; an index is that of a page.

    Attributes:
        of: the chain.
        kinds: the pages of a block.
        interval: from one of the places that are kept along the chain to the next.
        grid: behind a multiple of how many blocks a hit may end.
        tables: for each kind the ids of the pages that the request holds, by block; other cells
            have no meaning.
        num_needed: of how many of the last blocks before its end a hit needs pages; at least of
            one.
        most_end: behind how many blocks a hit may end, which leaves a token to compute.
        hit_end: behind how many blocks the request will go on from pages that it found; 0 if it
            computes all tokens from where it is.
        junction: the number of blocks behind which the request leaves others that went on; 0 if it
            goes on where they do.
        found_end: the same, also once it has gone on there.
        kept_ends: numbers of blocks behind which later requests may go on.
        awaited: the request that computes what it waits for, and behind how many blocks that ends.
        waits_until: until when it waits for what another request computes, in `monotonic` time;
            None before it has waited.
        num_done: blocks before it are computed, or were passed.
        first_held: no page of a block before it is held.
    """

    of: Chain
    kinds: Sequence[TailKind]
    interval: Interval
    grid: int = 1
    tables: list["array[int]"] = field(init=False)
    num_needed: int = field(init=False)
    most_end: int = 0
    hit_end: int = 0
    junction: int = 0
    found_end: int = 0
    kept_ends: set[int] = field(default_factory=set)
    awaited: tuple[Chain, int] | None = None
    waits_until: float | None = None
    num_done: int = 0
    first_held: int = 0

    def __post_init__(self) -> None:
        Chain.__post_init__(self)
        self.tables = [array("i") for _ in self.kinds]
        self.num_needed = max(1, *(kind.num_blocks for kind in self.kinds))

    @classmethod
    def beside(
        cls,
        chain: Chain,
        kinds: Sequence[TailKind],
        interval: Interval,
        algo: HashAlgo,
        grid: int = 1,
    ) -> Self:
        """Return the further pages of a chain's blocks.

        Args:
            chain: the chain.
            kinds: the pages of a block.
            interval: from one of the places that are kept along the chain to the next.
            algo: which hash names the pages.
            grid: behind a multiple of how many blocks a hit may end.
        """
        claims = [claim._replace(end=claim.end * len(kinds)) for claim in chain.claims]
        hashes: Any = PageHashes(chain, kinds, algo)  # it grows with the chain
        names = chain.root, chain.namespace, hashes
        return cls(*names, claims, of=chain, kinds=kinds, interval=interval, grid=grid)

    def add_blocks(self, number: int) -> None:
        """Add the pages of so many more blocks."""
        self.row.append_computed(number * len(self.kinds))

    def num_private(self, *, is_alone: bool) -> int:
        """Return how many pages a request holds for itself from its admission on.

        Args:
            is_alone: no other request runs that could have it preempted.
        """
        return 0

    def hold_private(self, _pages: Sequence[Block]) -> None:
        """Hold pages for the request itself; see `num_private`."""

    def take_step(self, _start: int, _end: int) -> StateStep:
        """Return what a step of the tokens `[start, end)` does with the state, just before it."""
        return StateStep()

    @property
    def pages_beside(self) -> int:
        """How many pages a request needs beside each block that it computes."""
        return len(self.kinds)

    @property
    def is_optional(self) -> bool:
        """Whether a request can go on without the pages that it lacks."""
        return False

    def possible(self, ends: Sequence[int]) -> Sequence[int]:
        """Return behind how many blocks a hit may end, given what else limits that, ascending."""
        if isinstance(ends, range):
            return range(0, ends.stop, self.grid)
        return sorted({self.floor(end) for end in ends})

    def floor(self, end: int) -> int:
        """Return the last place at or before `end` behind which a hit may end."""
        return end - end % self.grid

    def keep_at(self, end: int, *, is_end: bool = False) -> None:
        """Have what is needed kept at the last place at or before `end`.

        Args:
            end: a number of blocks.
            is_end: whether a part of the prompt ends there, which a later request may leave a
                little earlier.
        """
        self.kept_ends.add(self.floor(end))

    def expect_stop_strings(self) -> None:
        """Note that the request's client may take back its last tokens."""

    @property
    def num_held(self) -> int:
        """How many pages the request holds."""
        return sum(page is not NO_PAGE for page in self.blocks[self.first_held * len(self.kinds) :])

    def needed(self, end: int) -> range:
        """Return the pages that a hit needs which ends behind so many blocks."""
        return self.pages_of(self._first_needed(end), end)

    def _first_needed(self, end: int) -> int:
        """Return the first block of which a hit needs pages that ends behind so many blocks."""
        return max(0, end - self.num_needed)

    def ends(self, is_there: Callable[[BlockHash], object]) -> Pieces[list[int]]:
        """Return behind how many blocks a hit may end, in pieces, where some pages are there."""
        lacking, num_kinds = set[int](), len(self.kinds)
        for some in cut(list(enumerate(self.hashes)), PIECE_BLOCKS):
            lacking.update(index // num_kinds for index, each in some if not is_there(each))
            yield
        most, asked, first = self.most_end, self.of.read_ends, self._first_needed
        ends = range(most + 1) if asked is None else [end for end in asked if end <= most]
        possible = self.possible(ends)
        return [end for end in possible if lacking.isdisjoint(range(first(end), end))]

    def pages_of(self, first: int, end: int) -> range:
        """Return the pages of the blocks `[first, end)`."""
        return range(first * len(self.kinds), end * len(self.kinds))

    def hashes_of(self, blocks: Iterable[int]) -> list[BlockHash]:
        """Return the names of all pages of these blocks."""
        names: Any = self.hashes
        found: list[BlockHash] = names.of_blocks(blocks)
        return found

    @property
    def named(self) -> Iterable[tuple[int, BlockHash]]:
        """The pages whose names are known so far, in any order."""
        names: Any = self.hashes
        found: Iterator[tuple[int, BlockHash]] = names.named()
        return found

    @property
    def reach(self) -> int:
        """Of how many of the last blocks before a place pages are kept."""
        return self.num_needed + SPARE_BLOCKS

    def kept_within(self, first: int, end: int) -> list[int]:
        """Return those of the blocks `[first, end)` whose pages later requests may need."""
        places = self.kept_between(first, end + self.reach - 1)
        return sorted(self._before(places, first, end))

    def _before(self, places: Iterable[int], first: int, end: int) -> set[int]:
        """Return those of the blocks `[first, end)` whose pages are kept for these places."""
        kept = set[int]()
        for place in places:
            kept.update(range(max(first, place - self.reach_of(place)), min(place, end)))
        return kept

    def reach_of(self, place: int) -> int:
        """Return of how many of the last blocks before a place pages are kept.

        At intervals there are no spare ones, because no prompt ends there that a later request
        could leave a little earlier.
        """
        return self.reach if place in self.kept_ends else self.num_needed

    @property
    def used(self) -> list[int]:
        """The pages that are used now: those found, and those kept for its places, ascending.

        Places at intervals count only if those are used with their session.
        """
        return [i for block in self._used_blocks for i in self.pages_of(block, block + 1)]

    @property
    def _used_blocks(self) -> list[int]:
        """The blocks whose pages are used now, ascending."""
        end, most = self.found_end, len(self.of.hashes)
        is_used = self.interval.is_used
        places = self.kept_between(0, most + self.reach - 1) if is_used else self.kept_ends
        return sorted({*range(self._first_needed(end), end), *self._before(places, 0, most)})

    @property
    def used_hashes(self) -> list[BlockHash]:
        """The chain's hashes, each with those of its `used` pages behind it."""
        hashes, found, begun = self.of.hashes, list[BlockHash](), 0
        for block in self._used_blocks:
            found += hashes[begun : block + 1]
            found += self.hashes_of([block])
            begun = block + 1
        return found + hashes[begun:]

    def with_pages(self, blocks: Sequence[Block]) -> list[Block]:
        """Return the blocks of the request's table, the last one first, each behind its pages."""
        num_kinds, first, found = len(self.kinds), self.first_held, list[Block]()
        for index in reversed(range(first, len(blocks))):
            pages = self.blocks[index * num_kinds : (index + 1) * num_kinds]
            found += [page for page in pages if page is not NO_PAGE]
            found.append(blocks[index])
        found += blocks[:first][::-1]
        return found

    def kept_between(self, first: int, end: int) -> list[int]:
        """Return behind how many blocks, more than `first` and up to `end`, requests may go on."""
        interval = self.interval.num_blocks
        ends = {*self.kept_ends, *range(first - first % interval + interval, end + 1, interval)}
        return sorted(it for it in ends if first < it <= end)

    def begin(self, hit_end: int, num_blocks: int) -> None:
        """Begin tables of so many blocks for a request that goes on behind `hit_end` of them."""
        self.hit_end, self.num_done, self.first_held = hit_end, 0, 0
        self.found_end = hit_end
        self.extend(num_blocks)

    def hold(self, index: int, block: Block) -> None:
        """Put a page into the tables."""
        number, kind = divmod(index, len(self.kinds))
        self.blocks[index] = block
        self.tables[kind][number] = block.block_id

    def extend(self, num_blocks: int) -> None:
        """Make the tables as long as those of so many blocks."""
        lacking = num_blocks - len(self.tables[0])
        if lacking > 0:
            self.blocks += [NO_PAGE] * (lacking * len(self.kinds))
            for table in self.tables:
                table.frombytes(bytes(table.itemsize * lacking))

    def lacking(self, first: int, end: int) -> list[list[int]]:
        """Return the pages that the request lacks to compute the blocks `[first, end)`.

        Pages of one list are of use only together.
        """
        self.extend(end)
        return [[index for index in self.pages_of(first, end) if self.blocks[index] is NO_PAGE]]

    def completed(self, end: int) -> list[int]:
        """Note that the blocks before `end` were computed; return those whose pages are kept."""
        kept = self.kept_within(max(self.num_done, self.first_held), end)
        self.num_done = max(self.num_done, end)
        return kept

    def pass_last(self) -> list[Block]:
        """Return pages that the request holds only in case it is preempted, to be released."""
        return []

    @property
    def last_end(self) -> int:
        """Behind how many blocks another request may go on from the last pages that are held."""
        return min(self.num_done, len(self.of.hashes))

    @property
    def last_ends(self) -> Sequence[int]:
        """Behind how many blocks another request may go on once this one has ended, ascending."""
        return [self.last_end] if self.last_end else []

    def step_end(self, _start: int, end: int, *, is_last: bool) -> int:
        """Return behind which token a step has to end that would compute `[start, end)`.

        Args:
            _start: the first token.
            end: the token behind the last one.
            is_last: whether the tokens of the request end there.
        """
        return end

    def is_written(self, _block: int) -> bool:
        """Return whether the pages that are held of a computed block have their bytes."""
        return True

    def note_released(self, blocks: Iterable[int]) -> None:
        """Note that the request holds no page of these blocks any more."""

    def note_computed(self, end: int, *, has_rest: bool) -> None:
        """Note that a step was issued that computes the blocks before `end`, and maybe more."""

    def go_on(self, end: int, _computed_at: float) -> None:
        """Note that the request goes on behind so many blocks.

        Args:
            end: the number of blocks.
            _computed_at: when the pages were computed that it goes on from, the earliest of them.
        """
        self.num_done = end

    def first_computed_at(self, now: float) -> float:
        """Return when what is computed now was computed, with what it was continued from."""
        return now

    def hand_over(self) -> None:
        """Have what only the running request has be kept, where it can be, as the request ends."""

    def passed(self, num_computed: int) -> Collection[int]:
        """Return the blocks whose pages no token to come attends to, and no later request needs.

        Those of blocks that are not in the chain yet are needed. If the chain may have no more
        blocks, all that are computed count.
        """
        can_grow = len(self.of.hashes) < self.of.max_blocks
        return self.passed_before((self.num_done if can_grow else num_computed) - self.reach)

    def passed_before(self, end: int) -> Collection[int]:
        """Return the blocks before `end` of which pages are held; the request needs none again."""
        passed = range(self.first_held, max(0, end))
        self.first_held = max(self.first_held, end)
        return passed

    def identity(self, index: int) -> PageIdentity:
        """Return what a page is, besides its hash."""
        block, number = divmod(index, len(self.kinds))
        _, group, part, num_parts = self.kinds[number]
        return PageIdentity(self.of.hashes[block], block, group, part, num_parts)

    def end(self) -> None:
        """Forget what the request holds."""
        self.blocks, self.hit_end, self.num_done, self.first_held = [], 0, 0, 0
        for table in self.tables:
            del table[:]

    def check(self) -> None:
        """Raise IntegrityError if a page that is held is not that of its place."""
        if len(self.row) != len(self.hashes):
            raise IntegrityError(f"{len(self.hashes)} pages have {len(self.row)} states")
        for index, block in enumerate(self.blocks):
            number, kind = divmod(index, len(self.kinds))
            if block is NO_PAGE:
                continue
            if block.ref_count < 1:
                raise IntegrityError(f"{block} is in a table of a window, but not held")
            if number < self.first_held:
                raise IntegrityError(f"{block} is held behind the window")
            if block.block_hash is not None and not self.has_at(index, block.block_hash):
                raise IntegrityError(f"{block} is not page {index} of the chain")
            if self.tables[kind][number] != block.block_id:
                raise IntegrityError(f"{block} is not where its table says")
