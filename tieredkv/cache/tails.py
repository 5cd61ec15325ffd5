"""Finds, holds and keeps the further pages of requests' blocks: those of layers with windows.

A request may go on behind blocks that it found if it also has the pages that the windows of the
next token reach. While these are loaded it may compute its prompt from the first token on, with
pages of its own, up to where the loaded ones begin. What it computes is kept only where a later
request may go on.

Called by the engine's thread only.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import partial

from tieredkv.cache.block import Block
from tieredkv.cache.chain import Chain
from tieredkv.cache.expiry import Expiry
from tieredkv.cache.hit_end import hit_end
from tieredkv.cache.lookups import Lookups
from tieredkv.cache.recalls import Recalls
from tieredkv.cache.row import State
from tieredkv.cache.state_tail import StateTail
from tieredkv.cache.tail import NO_PAGE, Tail
from tieredkv.cache.tiers import Tiers
from tieredkv.pieces import cut
from tieredkv.types import BlockHash

PLACES_AT_ONCE = 16
"""Places whose states are looked for at once, until one is found."""


class Tails:
    """The further pages of all requests; see the module.

    Args:
        tiers: the tiers.
        recalls: tell what is left to the links.
        lookups: what the disk has answered.
        expiry: drops pages whose retention has ended.
    """

    def __init__(self, tiers: Tiers, recalls: Recalls, lookups: Lookups, expiry: Expiry) -> None:
        self._tiers, self._recalls, self._lookups = tiers, recalls, lookups
        self._expiry = expiry

    def unknown(self, tail: Tail) -> list[BlockHash]:
        """Return the pages of a queued request for which the disk has to be asked."""
        tiers = self._tiers
        if tiers.store is None or not tiers.can_load or tiers.presence.is_whole:
            return []
        hashes = self._parts_to_ask(tail) if isinstance(tail, StateTail) else tail.hashes
        return tiers.host.missing(tiers.device.missing(hashes))

    def _parts_to_ask(self, tail: StateTail) -> list[BlockHash]:
        """Return one part of the state of each place, and the others of the last that has this one.

        Those others are left out where some of them are known to be missing.
        """
        most = min(tail.most_end, len(tail.of.hashes))  # generated tokens may lack their hashes
        parts = self._first_parts(tail, tail.possible(range(most + 1)))
        hashes = [tail.hashes[index] for index in parts]
        absent = self._absent(tail, parts, hashes)
        for index, block_hash in zip(reversed(parts), reversed(hashes), strict=True):
            if block_hash in absent:
                continue
            others = range(index + 1, index + len(tail.kinds))
            missing = self._absent(tail, others, tail.hashes[others.start : others.stop])
            if not (missing and self._lookups.has_asked(tail, missing)):
                return [*hashes, *missing]
        return hashes

    def _first_parts(self, tail: StateTail, ends: Sequence[int]) -> list[int]:
        """Return the first page of the state of each of some places."""
        return [tail.needed(end).start for end in ends if end]

    def hit_end(self, tail: Tail, num_found: int, ends: Sequence[int]) -> int:
        """Return behind how many blocks a hit ends, the first `num_found` of which are there.

        Args:
            tail: of a queued request.
            num_found: how many blocks of its head the tiers have.
            ends: numbers of blocks at which it may end, ascending.
        """
        most = min(num_found, tail.most_end)
        possible = tail.possible(ends)
        if isinstance(tail, StateTail):
            return self._state_end(tail, [end for end in possible if end <= most])
        return hit_end(most, tail.num_needed, possible, partial(self._missing, tail))

    def _state_end(self, tail: StateTail, ends: Sequence[int]) -> int:
        """Return the last of some places at which no tier lacks a part of the state; 0 if none is.

        Of each place one part is looked for, and the others where that one is there; the last
        places come first, so that of most no part needs a name.
        """
        for some in cut(ends[::-1], PLACES_AT_ONCE):
            parts = self._first_parts(tail, some)
            absent = self._absent(tail, parts, [tail.hashes[index] for index in parts])
            for index in parts:
                block = index // len(tail.kinds)
                if tail.hashes[index] not in absent and not self._missing(tail, [block]):
                    return block + 1
        return 0

    def _missing(self, tail: Tail, blocks: Sequence[int]) -> list[int]:
        """Return those of these blocks some of whose pages no tier has."""
        pages = [index for each in blocks for index in tail.pages_of(each, each + 1)]
        hashes = tail.hashes_of(blocks)
        absent = self._absent(tail, pages, hashes)
        lacking = zip(pages, hashes, strict=True)
        return sorted({index // len(tail.kinds) for index, it in lacking if it in absent})

    def _absent(
        self, tail: Tail, pages: Sequence[int], hashes: Sequence[BlockHash]
    ) -> set[BlockHash]:
        """Return which of these pages no tier has, by their hashes."""
        tiers = self._tiers
        self._expiry.drop_among(hashes)
        absent = {*tiers.device.missing(hashes)}
        if absent and tiers.can_load:
            absent = {*tiers.host.missing(absent)}
            now = tiers.clock.now()
            has_disk = tiers.store is not None
            until = self.until(tail, pages, hashes) if absent and has_disk else ()
            on_disk = (it for it, second in zip(hashes, until, strict=False) if second > now)
            absent.difference_update(on_disk)
        return absent

    def until(self, tail: Tail, pages: Sequence[int], hashes: Sequence[BlockHash]) -> list[int]:
        """Return until when the disk has these pages, by their hashes; 0 of those that it lacks."""
        presence = self._tiers.presence
        until: list[int] = presence.until(hashes).tolist()
        if not presence.is_whole:  # what the disk has answered counts as well
            answers = self._lookups.answers(tail)
            until = [max(it, answers.get(i, 0)) for i, it in zip(pages, until, strict=True)]
        return until

    def look(self, tail: Tail, end: int) -> range:
        """Note which pages the disk has that a hit needs which ends behind so many blocks.

        Returns:
            All pages that it needs.
        """
        needed = tail.needed(end)
        tail.disk_until = []
        if needed and self._tiers.store is not None and self._tiers.can_load:
            tail.disk_until = [0] * len(tail.hashes)
            named = tail.hashes[needed.start : needed.stop]
            tail.disk_until[needed.start : needed.stop] = self.until(tail, needed, named)
        return needed

    def find(self, tail: Tail, end: int) -> list[Block | None]:
        """Do as `look` does; return what VRAM has of the pages that the hit needs."""
        needed = self.look(tail, end)
        return self._tiers.device.find(tail.hashes[needed.start : needed.stop])

    def next_start(self, chain: Chain, first: int) -> int:
        """Return behind how many blocks a request goes on that has computed those before `first`.

        That is `first` itself, unless all that it found is there.
        """
        tail = chain.tail
        if tail is None or tail.hit_end <= first:
            return first
        needed = tail.needed(tail.hit_end)
        pages = [tail.blocks[index] for index in needed]
        is_lost = (
            tail.row[index] == State.COMPUTE and not (page.is_ready or page.is_copying)
            for index, page in zip(needed, pages, strict=True)
        )
        if any(is_lost):
            self._give_up(tail)
            return first
        # A step that begins early waits for the last layers of blocks, and not for these pages.
        are_there = all(block.is_ready for block in chain.blocks[first : tail.hit_end])
        if not (are_there and all(page.is_whole for page in pages)):
            return first
        end, tail.hit_end, tail.disk_until = tail.hit_end, 0, []
        self._release(tail, tail.passed_before(end - tail.num_needed))
        entries = filter(None, (self._tiers.catalog.get(page.block_hash) for page in pages))
        tail.go_on(end, min((entry.computed_at for entry in entries), default=0.0))
        return end

    def compute_end(self, chain: Chain, first: int) -> int | None:
        """Return the end of the blocks that may be computed from `first` on; None if there is none.

        While the pages of a hit are loaded, a request computes only what no tier brings, and not
        over these pages.
        """
        tail = chain.tail
        if tail is None or tail.hit_end <= first:
            return None
        end = max(0, tail.hit_end - tail.num_needed)
        first_loaded = self._recalls.first_loaded(chain, first, tail.hit_end)
        blocks = chain.blocks[first:first_loaded]
        lacking = (i for i, it in enumerate(blocks, first) if not (it.is_ready or it.is_copying))
        first_lacking = next(lacking, None)
        if first_lacking is None and (first_loaded < tail.hit_end or self._are_coming(tail)):
            return first  # what is coming is waited for
        if first_lacking is not None and first_lacking < end:
            return end
        self._give_up(tail)  # it has to compute up to there anyway
        return None

    def _are_coming(self, tail: Tail) -> bool:
        """Return whether nobody has to compute the pages of a hit, by the plan."""
        needed = tail.needed(tail.hit_end)
        is_any_open = any(tail.blocks[index].is_open for index in needed)
        first_loaded = self._recalls.first_loaded(tail, needed.start, needed.stop)
        return not is_any_open or first_loaded < needed.stop

    def _give_up(self, tail: Tail) -> None:
        """Have a request compute all its tokens from where it is."""
        needed, num_kinds = tail.needed(tail.hit_end), len(tail.kinds)
        tail.hit_end, tail.disk_until = 0, []
        self._recalls.forget(tail)
        self._release(tail, range(needed.start // num_kinds, needed.stop // num_kinds))

    def complete(self, tail: Tail, end: int) -> Iterator[int]:
        """Note that the blocks before `end` were computed; yield the pages of those to be kept."""
        for block in tail.completed(end):
            yield from self._private(tail, block)

    def last(self, tail: Tail) -> Iterator[int]:
        """Yield the last pages that a request has computed, behind which another may go on."""
        for end in tail.last_ends:
            yield from self.computed(tail, end - tail.reach, end)

    def computed(self, tail: Tail, first: int, end: int) -> Iterator[int]:
        """Yield the pages of the blocks `[first, end)` that a request has not published yet."""
        for block in range(max(0, first), min(end, tail.num_done, len(tail.of.hashes))):
            yield from self._private(tail, block)

    def _private(self, tail: Tail, block: int) -> Iterator[int]:
        """Yield the pages of a block that are held and were not published.

        A page that was published and dropped since, as it expired, is not published again.
        """
        for index in tail.pages_of(block, block + 1) if tail.is_written(block) else ():
            page = tail.blocks[index] if index < len(tail.blocks) else NO_PAGE
            if page is not NO_PAGE and page.block_hash is None and not page.is_ready:
                yield index

    def note_found(self, chain: Chain, tail: Tail) -> None:
        """Note where an admitted request goes on, and where it leaves others."""
        if tail.hit_end:
            last = tail.hashes[tail.needed(tail.hit_end).stop - len(tail.kinds)]
            if (entry := self._tiers.catalog.get(last)) is not None:
                entry.num_continued += 1
        if (left_at := tail.floor(chain.num_present)) > tail.hit_end:
            tail.junction = left_at
            tail.keep_at(left_at)

    def superseded(self, tail: Tail) -> list[BlockHash]:
        """Return the kept pages that a request has gone on past, and that no other may need.

        These are all but those of the last place of the request, of the places that it names and of
        those at intervals, those where several requests have gone on, and those that are pinned.
        """
        get, superseded = self._tiers.catalog.get, self._tiers.catalog.superseded
        found, have_pages = list[BlockHash](), self._tiers.catalog.blocks_with_pages
        end = tail.last_end
        kept_from = end - tail.reach
        reaches = {place - 1: tail.reach_of(place) for place in tail.kept_between(0, end)}
        kept = {index for index, it in enumerate(tail.of.hashes[:end]) if it in have_pages}
        for block in sorted({*kept, *reaches}, reverse=True):
            pages = tail.pages_of(block, block + 1)
            entry = get(tail.hashes[pages.start])
            if block in reaches or (entry is not None and entry.num_continued > 1):
                kept_from = min(kept_from, block + 1 - reaches.get(block, tail.reach))
            is_kept = entry is None or entry.pinned_until or entry.block_hash in superseded
            if block < kept_from and not is_kept:
                hashes = tail.hashes[pages.start : pages.stop]
                found += [block_hash for block_hash in hashes if get(block_hash) is not None]
        return found

    def pass_by(self, tail: Tail, num_computed: int) -> None:
        """Release the pages that no token to come attends to, and that no later request may need.

        Those of a hit that is still being loaded are held, and those of blocks that are not in the
        chain yet. If the chain may have no more blocks, all that are computed count.
        """
        self._release(tail, tail.passed(num_computed))

    def end(self, tail: Tail) -> None:
        """Forget what a request holds, which is released together with its blocks."""
        tail.end()
        tail.row.begin(bytearray([State.COMPUTE]) * len(tail.hashes))

    def _release(self, tail: Tail, blocks: Collection[int]) -> None:
        """Release the pages of some blocks, the last ones first."""
        pages = list[Block]()
        for block in sorted(blocks, reverse=True):
            for index in reversed(tail.pages_of(block, block + 1)):
                if tail.blocks[index] is not NO_PAGE:
                    pages.append(tail.blocks[index])
                    tail.blocks[index] = NO_PAGE
        tail.note_released(blocks)
        self._tiers.device.release(pages, after=self._tiers.device_link.num_steps)
