"""The recurrent state of one request, beside the chain of its blocks.

A model with recurrent layers keeps of all tokens before a place one state, which has the size of
many blocks. A running request has it in pages of its own, and the state changes with each step. At
some places it is copied to further pages, those of the last block before the place, from which
later requests may go on.
"""

import math
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from tieredkv.cache.block import Block
from tieredkv.cache.chain import Chain
from tieredkv.cache.tail import NO_PAGE, Interval, StateStep, Tail, hit_pages, tail_kinds
from tieredkv.errors import IntegrityError
from tieredkv.types import MAX_KEPT_WITHIN, MAX_PASSING_TOKENS, HashAlgo, KVSpec

ZEROS = -1
"""Stands for a page of zeros that is copied from."""


@dataclass(slots=True, eq=False, kw_only=True)
class StateTail(Tail):
    """The state of a request at its places, and the pages in which it has it while it runs.

    Where a step of a prompt passes a place, it keeps the state there by itself. Where one ends at a
    place, a copy is made before the next step, when the host knows all tokens before it.
    Behind its prompt a request keeps one copy, which it moves on as it generates. If stop strings
    may end it, it keeps two: they are seen when some tokens behind them are computed already.

    A request that is preempted goes on from its last copy. So it holds that one until there is a
    later one, and if it runs beside others it holds pages for the first copy from its admission on:
    when a request is preempted, no page has been free for some time.

    Attributes:
        state: the pages of the state itself.
        spare: the pages for the first copy, until it is made; none if it was admitted alone.
        num_prompt_blocks: blocks of the prompt; behind them, each place is kept until the next.
        block_size: tokens a block.
        at: the number of blocks behind which the state stands; None if it is within a block.
        copied_at: the same for the last place whose pages are written; 0 if there is none.
        num_copies: how many copies it keeps behind its prompt, if there is room.
        copies: pages to be copied before the request's next step, from and to.
        computed_at: when the pages were computed from which the request went on, the earliest of
            them; infinite if it computed all tokens.
    """

    state: list[Block] = field(default_factory=list)
    spare: list[Block] = field(default_factory=list)
    num_prompt_blocks: int = 0
    block_size: int = 1
    at: int | None = 0
    copied_at: int = 0
    num_copies: int = 1
    copies: list[tuple[int, int]] = field(default_factory=list)
    computed_at: float = math.inf
    _earlier: int = 0  # of two copies, the place of the one before `copied_at`
    _held: set[int] = field(default_factory=set)
    _unwritten: set[int] = field(default_factory=set)  # those of places to come
    _written: list[int] = field(default_factory=list)  # places, since `completed`

    def __post_init__(self) -> None:
        Tail.__post_init__(self)
        self.tables = []  # no step reads what is kept

    def num_private(self, *, is_alone: bool) -> int:
        """Return how many pages a request holds for itself: its state, and room for a copy."""
        return (1 if is_alone else 2) * len(self.kinds)

    @property
    def pages_beside(self) -> int:
        """How many pages a request needs beside each block that it computes."""
        return 0

    @property
    def is_optional(self) -> bool:
        """Whether a request can go on without the pages that it lacks: a copy may be left out."""
        return True

    @property
    def reach(self) -> int:
        """Of how many of the last blocks before a place pages are kept."""
        return self.num_needed

    @property
    def num_held(self) -> int:
        """How many pages the request holds."""
        return len(self.state) + len(self.spare) + len(self._held) * len(self.kinds)

    @property
    def state_ids(self) -> "array[int]":
        """The pages of the state itself, as a model takes them."""
        return array("i", [page.block_id for page in self.state])

    def keep_at(self, end: int, *, is_end: bool = False) -> None:
        """Do as `Tail.keep_at`; where a part of the prompt ends, keep the place before it, too."""
        Tail.keep_at(self, end)
        if is_end and self.floor(end) > self.grid:
            self.kept_ends.add(self.floor(end) - self.grid)

    def expect_stop_strings(self) -> None:
        """Keep two copies; see the class."""
        self.num_copies = 2

    def take_step(self, start: int, end: int) -> StateStep:
        """Return what a step of the tokens `[start, end)` does with the state, just before it.

        What it keeps the request holds pages for; places without them are passed.
        """
        place, copies, self.copies = self._wanted, self.copies, []
        if place and place - 1 not in self._held and (movable := self._movable):
            self._move(movable[0], place)
        if place - 1 in self._held:
            copies = [*zip(self.state_ids, self._page_ids(place), strict=True)]
            self._note_written(place)
        kept = list[tuple[int, Sequence[int]]]()
        for place in self._places_within(start // self.block_size, -(-end // self.block_size)):
            if place - 1 in self._held:
                ids = self._page_ids(place)
                # What a page has behind its pieces is not written by a step, and may be anyone's.
                copies += [(ZEROS, page) for page in ids]
                kept.append((place * self.block_size - start, ids))
                self._note_written(place)
        return StateStep(self.state_ids, copies, kept)

    def _page_ids(self, place: int) -> "array[int]":
        return array("i", [self.blocks[index].block_id for index in self.needed(place)])

    def _note_written(self, place: int) -> None:
        self._earlier = self.copied_at if self.num_copies > 1 else 0
        self.copied_at = place
        self._unwritten.discard(place - 1)
        self._written.append(place)

    def step_end(self, start: int, end: int, *, is_last: bool) -> int:
        """Return where a step has to end so that states are kept, or the last one can be copied.

        A short step passes places to be kept. A long one ends at the first, or at one a little
        behind it, so that what follows is computed in the same step, to the last bit, when a later
        request goes on there. The last step of a request ends anywhere.
        """
        size = self.block_size
        most = self._last_block(start // size, -(-end // size))
        if most * size < end:
            return most * size
        place = self.floor(end // size) * size
        return end if is_last or place <= start else place

    def _last_block(self, first: int, end: int) -> int:
        """Return the end of the blocks, from `first` to at most `end`, that a step may compute."""
        places = self._places_within(first, end)
        most = MAX_PASSING_TOKENS // self.block_size
        if not places or (end - first <= most and len(places) <= MAX_KEPT_WITHIN):
            return end
        places = places[: MAX_KEPT_WITHIN + 1]
        return max(place for place in places if place - places[0] <= most)

    def _places_within(self, first: int, end: int) -> list[int]:
        """Return the places to be kept that lie within the blocks `[first, end)`."""
        if end - first < 2 or self.hit_end > first:
            return []
        return [place for place in self.kept_between(first, end - 1) if self._is_new(place)]

    def begin(self, hit_end: int, num_blocks: int) -> None:
        """Begin for a request that goes on behind `hit_end` blocks, with a state of zeros."""
        Tail.begin(self, hit_end, num_blocks)
        self.at, self.copied_at, self._earlier, self.computed_at = 0, 0, 0, math.inf

    def hold_private(self, pages: Sequence[Block]) -> None:
        """Take the pages of the state itself, and behind them those for the first copy, if any."""
        num_kinds = len(self.kinds)
        self.state, self.spare = [*pages[:num_kinds]], [*pages[num_kinds:]]
        self.copies = [(ZEROS, page.block_id) for page in self.state]

    def hold(self, index: int, block: Block) -> None:
        """Hold a page of a place."""
        self.blocks[index] = block
        self._held.add(index // len(self.kinds))

    def extend(self, num_blocks: int) -> None:
        """Make room for the pages of so many blocks."""
        self.blocks += [NO_PAGE] * (num_blocks * len(self.kinds) - len(self.blocks))

    def lacking(self, first: int, end: int) -> list[list[int]]:
        """Return the pages that the request lacks to keep its state, the last place first.

        It is kept where it stands before the next step, which would compute the blocks
        `[first, end)`, and at the places that this passes.
        """
        self.extend(end)
        places = self._places_within(first, end)
        if (place := self._wanted) and len(self._movable) < self.num_copies:
            places.insert(0, place)
        places = [place for place in reversed(places) if place - 1 not in self._held]
        self._unwritten.update(place - 1 for place in places)
        if self.spare and places:
            for index, page in zip(self.needed(places.pop(0)), self.spare, strict=True):
                self.hold(index, page)
            self.spare = []
        return [[*self.needed(place)] for place in places]

    @property
    def _wanted(self) -> int:
        """The place where the state stands, if it is to be copied there; else 0."""
        place = self.at or 0
        if self.copies or place <= self.hit_end or not self._is_new(place):
            return 0
        return place if place > self.num_prompt_blocks or self._is_kept(place) else 0

    def _is_new(self, place: int) -> bool:
        """Return whether this is a place of which no copy was made yet."""
        is_place = 0 < place <= len(self.of.hashes) and place == self.floor(place)
        return is_place and place > self.copied_at

    def _is_kept(self, place: int) -> bool:
        return bool(self.kept_between(place - 1, place))

    @property
    def _movable(self) -> list[int]:
        """The places of copies whose pages can be those of a later one, ascending."""
        places = self._earlier, self.copied_at
        return [it for it in places if it - 1 in self._held and not self._is_kept(it)]

    def _move(self, place: int, later: int) -> None:
        """Have the pages of a copy be those of a later one."""
        for old, new in zip(self.needed(place), self.needed(later), strict=True):
            self.blocks[new], self.blocks[old] = self.blocks[old], NO_PAGE
        self._held.discard(place - 1)
        self._held.add(later - 1)

    def note_computed(self, end: int, *, has_rest: bool) -> None:
        """Note that a step was issued that computes the blocks before `end`, and maybe more."""
        self.at = None if has_rest else end

    def completed(self, end: int) -> list[int]:
        """Note that the blocks before `end` were computed; return those whose pages are kept."""
        written, self._written = self._written, []
        self.num_done = max(self.num_done, end)
        return [it - 1 for it in written if it - 1 in self._held and self._is_kept(it)]

    def is_written(self, block: int) -> bool:
        """Return whether the pages that are held of a block have their bytes."""
        return block not in self._unwritten

    @property
    def last_end(self) -> int:
        """Behind how many blocks another request may go on from the last pages that are held."""
        return min(self.copied_at or self.floor(self.found_end), len(self.of.hashes))

    @property
    def last_ends(self) -> Sequence[int]:
        """Behind how many blocks another request may go on once this one has ended, ascending."""
        copies = {block + 1 for block in self._held - self._unwritten}
        return sorted({end for end in copies if end < self.last_end} | {self.last_end} - {0})

    def note_released(self, blocks: Iterable[int]) -> None:
        """Note that the request holds no page of these blocks any more."""
        self._held.difference_update(blocks)
        self._unwritten.difference_update(blocks)

    def go_on(self, end: int, computed_at: float) -> None:
        """Note that the request goes on from the state behind so many blocks, which it has found.

        Args:
            end: the number of blocks.
            computed_at: when that state was computed.
        """
        self.num_done = self.at = end
        self.computed_at = computed_at
        pages = (self.blocks[index].block_id for index in self.needed(end))
        self.copies = [*zip(pages, self.state_ids, strict=True)]

    def first_computed_at(self, now: float) -> float:
        """Return when what is computed now was computed, with what it was continued from.

        A state holds all tokens before it, so that it is as old as the oldest of them.
        """
        return min(now, self.computed_at)

    def passed(self, num_computed: int) -> Collection[int]:
        """Return the blocks whose pages the request needs no more."""
        needed = {self.hit_end - 1, self._earlier - 1, self.copied_at - 1}
        return self._held - self._unwritten - needed

    def pass_last(self) -> list[Block]:
        """Return the pages of the last copy, to be released to make room for a later one.

        Those that can be moved are not released.
        """
        last, pages = self.copied_at - 1, list[Block]()
        if not self._movable and last in self._held and last != self.hit_end - 1:
            for index in reversed(self.needed(self.copied_at)):
                pages.append(self.blocks[index])
                self.blocks[index] = NO_PAGE
            self._held.discard(last)
        return pages

    def passed_before(self, end: int) -> Collection[int]:
        """Return the blocks before `end` of which pages are held: none but those of places."""
        return ()

    def hand_over(self) -> None:
        """Have the pages of the state be those of the place where it stands, as a request ends.

        The copies before stay too: its client may know fewer tokens.
        """
        earlier = self._movable
        if (place := self.at) is not None and not self.copies and self._is_new(place):
            self.extend(place)
            if place - 1 in self._held:
                self.spare += [self.blocks[index] for index in self.needed(place)]
                self._unwritten.discard(place - 1)
            for index, page in zip(self.needed(place), self.state, strict=True):
                self.hold(index, page)
            self.state, self.copied_at = [], place
        for end in earlier:
            if end < self.copied_at:
                Tail.keep_at(self, end)

    def with_pages(self, blocks: Sequence[Block]) -> list[Block]:
        """Return what the request holds: its state, then its blocks, each behind its pages."""
        found, num_kinds = [*self.spare, *self.state], len(self.kinds)
        for index in reversed(range(len(blocks))):
            if index in self._held:
                found += self.blocks[index * num_kinds : (index + 1) * num_kinds]
            found.append(blocks[index])
        return found

    def end(self) -> None:
        """Forget what the request holds."""
        Tail.end(self)
        self.state, self.spare, self.copies, self._written = [], [], [], []
        self._held, self._unwritten = set(), set()
        self.at, self.copied_at, self._earlier = 0, 0, 0

    def check(self) -> None:
        """Raise IntegrityError if a page that is held is not that of its place."""
        if len(self.row) != len(self.hashes):
            raise IntegrityError(f"{len(self.hashes)} pages have {len(self.row)} states")
        own = [*self.state, *self.spare]
        if any(page.ref_count < 1 or page.block_hash is not None for page in own):
            raise IntegrityError("a page of a running request's state is not its own")
        held = {block for block in self._held for _ in self.kinds}
        found = {i // len(self.kinds) for i, it in enumerate(self.blocks) if it is not NO_PAGE}
        if found != held:
            raise IntegrityError(f"pages of the blocks {found} are held, and {held} are known")
        for index, block in enumerate(self.blocks):
            if block is NO_PAGE:
                continue
            if block.ref_count < 1:
                raise IntegrityError(f"{block} is a part of a state, but not held")
            if block.block_hash is not None and not self.has_at(index, block.block_hash):
                raise IntegrityError(f"{block} is not page {index} of the chain")


def tails_of(spec: KVSpec, algo: HashAlgo) -> Callable[[Chain], Tail] | None:
    """Return what makes the further pages of a chain; None if a model has none."""
    if not (kinds := tail_kinds(spec)):
        return None
    interval = Interval.of(hit_pages(spec), spec.block_size, spec.grid_blocks)

    def make(chain: Chain) -> Tail:
        if not spec.states:
            return Tail.beside(chain, kinds, interval, algo)
        tail = StateTail.beside(chain, kinds, interval, algo, spec.grid_blocks)
        tail.num_prompt_blocks, tail.block_size = len(chain.hashes), spec.block_size
        return tail

    return make
