"""Finds room in VRAM for the blocks of requests.

Blocks that are clean are evicted at once. If there are too few, others are copied down, and the
request asks again in a later step. What it has in host memory is copied up meanwhile. When it has
not got on for long enough, the oldest blocks are given up.

Called by the engine's thread only.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tieredkv.cache.block import Block
from tieredkv.cache.chain import Chain
from tieredkv.cache.demotion import Demoter
from tieredkv.cache.hits import Hits
from tieredkv.cache.promotion import Promoter
from tieredkv.cache.tail import Tail
from tieredkv.cache.tiers import Tiers
from tieredkv.types import Tier

PATIENCE_S = 0.25
"""An allocation waits so long, without getting on, before blocks are given up for it."""

MAX_PATIENCE_S = 2.0
"""An allocation for which copies under way will make the room waits so long."""

SLICE = 1 / 64
"""Share of host memory that blocks may be copied to at once, besides pages that nobody needs.

A larger allocation gets its room in turns: what the request has in host memory is copied up, and
its pages then take what VRAM has to evict.
"""

MIN_SLICE = 32
"""The least number of blocks of a turn of a large allocation: a turn takes a step, in which nobody
else is admitted.
"""

FEW_BLOCKS = 128
"""Room for so few blocks is made at once: that takes the thread about a millisecond."""

MAX_AHEAD = 256
"""Blocks that are evicted, or whose copies are started, at once while the device computes a step: a
few milliseconds of the thread. The next step is issued late if they take longer than this one.
"""


class _Wait(NamedTuple):
    """A request's wait for room: since when it has not got on, and when it last asked, in seconds.

    Both are in monotonic time.
    """

    since: float
    asked_at: float


class _Wanted(NamedTuple):
    """How many blocks a request wants; for the others see `BlockPool.allocate`."""

    num_blocks: int
    tenant: bytes
    takes_kept: bool = False


class Room:
    """Gives requests their device blocks.

    Args:
        tiers: the tiers.
        promoter: copies up what a waiting request has in host memory.
        demoter: copies blocks down.
        hits: know what requests find in the tiers.
        poll: takes in the copies and writes that have ended.
    """

    def __init__(
        self,
        tiers: Tiers,
        promoter: Promoter,
        demoter: Demoter,
        hits: Hits,
        poll: Callable[[], None],
    ) -> None:
        self._tiers, self._promoter, self._demoter = tiers, promoter, demoter
        self._hits, self._poll = hits, poll
        self._waits: dict[Chain, _Wait] = {}
        self._refused: dict[Chain, tuple[int, ...]] = {}  # what `_found_by` was then
        self._lacking: dict[Chain, int] = {}  # pages that running requests did not get

    @property
    def state(self) -> tuple[int, ...]:
        """Numbers that change whenever there may be more room, or more can be done for it."""
        device, counters = self._tiers.device, self._tiers.counters
        copied = counters.demoted_host_blocks, counters.promoted_host_blocks
        return device.num_free, device.num_empty, *copied

    def lacks_still(self, chain: Chain, num_blocks: int, is_alone: bool) -> bool:
        """Return whether nothing has changed since `note_refused`, so that trying is in vain."""
        return self._refused.get(chain) == self._found_by(chain, num_blocks, is_alone)

    def note_refused(self, chain: Chain, num_blocks: int, is_alone: bool) -> None:
        """Note that a request found no room; if that comes soon, trying is never in vain."""
        self._refused.pop(chain, None)
        if not self.is_waiting(chain):
            self._refused[chain] = self._found_by(chain, num_blocks, is_alone)

    def _found_by(self, chain: Chain, num_blocks: int, is_alone: bool) -> tuple[int, ...]:
        """Return what decides whether a request finds room."""
        device = self._tiers.device
        num_free_for = device.num_free_for(chain.tenant)
        return device.num_free, num_free_for, device.num_cached, num_blocks, is_alone

    def is_kept_from(self, chain: Chain) -> bool:
        """Return whether the floors of other tenants keep free blocks from a request."""
        device = self._tiers.device
        return device.num_free_for(chain.tenant) < device.num_free

    def is_waiting(self, chain: Chain) -> bool:
        """Whether the blocks that a request lacks become free soon without a preemption."""
        return chain in self._waits

    @property
    def is_making_room(self) -> bool:
        """Whether room becomes free soon for some request."""
        return bool(self._waits)

    def forget(self, chain: Chain) -> None:
        """Note that a request needs no more blocks."""
        self._waits.pop(chain, None)
        self._refused.pop(chain, None)
        self._lacking.pop(chain, None)

    def hold(self, tail: Tail, first: int, end: int, *, is_alone: bool) -> bool:
        """Have a request hold the pages that it lacks to compute the blocks `[first, end)`.

        Without a page that is of use to later requests only, it goes on, unless room for that comes
        soon.

        Returns:
            Whether it may go on.
        """
        chain = tail.of
        for lacking in filter(None, tail.lacking(first, end)):
            device = self._tiers.device
            if device.num_free_for(chain.tenant) < len(lacking):
                device.release(tail.pass_last(), after=self._tiers.device_link.num_steps)
            fresh = self.allocate(chain, len(lacking), is_alone)
            if fresh is None and tail.is_optional and not self.is_waiting(chain):
                continue
            if fresh is None:
                self._lacking[chain] = len(lacking)
                return False
            for index, page in zip(lacking, fresh, strict=True):
                tail.hold(index, page)
        return True

    def allocate(
        self,
        chain: Chain,
        num_blocks: int,
        is_alone: bool,
        known: Sequence[Block | None] = (),
        *,
        makes_room: bool = True,
        at_most: int = sys.maxsize,
    ) -> list[Block] | None:
        """Allocate device blocks for a request.

        Args:
            chain: of the request.
            num_blocks: how many blocks.
            is_alone: no other request runs that could release blocks, so that floors give way.
            known: of a request that waits, the blocks of its hit, which it holds; None for those
                that VRAM lacks.
            makes_room: whether room is made at once if there is none yet. If not, `make_ahead` does
                it, unless a few blocks will do.
            at_most: how many blocks are evicted or copied down at once; the others are when the
                request asks again.

        Returns:
            None if there is no room yet.
        """
        device = self._tiers.device
        if num_blocks <= FEW_BLOCKS:
            makes_room, at_most = True, sys.maxsize
        elif not makes_room:
            at_most = MAX_AHEAD
        takes_kept, num_free = False, device.num_free_for(chain.tenant)
        is_known_to_lack = self.is_waiting(chain) and device.num_clean < num_blocks
        if is_known_to_lack and not makes_room:
            return None
        if is_alone and num_free < num_blocks:
            takes_kept, num_free = True, device.num_free
        wanted = _Wanted(num_blocks, chain.tenant, takes_kept)
        blocks = None if is_known_to_lack else self._take(wanted, at_most)
        # If too few are free, requests or floors hold the rest, and no demotion can help.
        if blocks is None and num_free >= num_blocks:
            if not makes_room:
                self._wait(chain, gets_on=False)
                return None
            blocks = self._make_room(chain, wanted, known, at_most)
            if blocks is None:
                self._bring_up(chain, known, at_most)
                return None
        self.forget(chain)
        self._demoter.note_change()
        return blocks

    def make_ahead(self, chain: Chain, num_blocks: int, *, is_alone: bool = False) -> bool:
        """Make room for a queued request that was refused, or that will soon ask.

        Beside others, no more is done at once than keeps the engine's thread for some milliseconds.

        Args:
            chain: of the request.
            num_blocks: length of its table.
            is_alone: see `allocate`.

        Returns:
            Whether there is room now, or more of it as soon as this is called again.
        """
        device, at_most = self._tiers.device, sys.maxsize if is_alone else MAX_AHEAD
        num_empty = device.num_empty
        found = self._hits.find(chain, num_blocks, is_alone=is_alone)
        num_fresh = found.num_fresh
        self._tiers.acquire(found.held)
        if self.is_waiting(chain):
            blocks = self.allocate(chain, num_fresh, is_alone, found.known, at_most=at_most)
            device.release(blocks or [])
        elif device.num_empty < num_fresh <= device.num_free_for(chain.tenant):
            wanted = _Wanted(num_fresh, chain.tenant)
            self._evict_and_demote(chain, wanted, found.known, at_most)
        device.release(found.held[::-1])
        return device.num_empty >= min(num_fresh, num_empty + at_most)

    def make_for_pages(self, num_blocks: int) -> None:
        """Make room for what `hold` did not get since the last call, as much as a step takes.

        Prompts that come at once get their blocks, which are few, before they get these pages,
        which are many. If room were made for one request after the other, each step would compute
        one prompt.

        Args:
            num_blocks: of how many blocks a step computes tokens, at most.
        """
        device, num_pages = self._tiers.device, 0
        lacking, self._lacking = self._lacking, {}
        by_tenant = dict[bytes, tuple[Chain, int]]()
        for chain, count in lacking.items():
            most = num_blocks * (chain.pages_per_block - 1)
            if num_pages + count > min(most, device.num_free_for(chain.tenant)):
                break
            num_pages += count
            _, before = by_tenant.get(chain.tenant, (chain, 0))
            by_tenant[chain.tenant] = chain, before + count
        num_pages = 0
        for chain, count in by_tenant.values():
            num_pages += count
            if num_pages > device.num_empty:
                wanted = _Wanted(num_pages, chain.tenant)
                self._evict_and_demote(chain, wanted, (), at_most=num_pages)

    def _take(self, wanted: _Wanted, at_most: int) -> list[Block] | None:
        """Allocate blocks, if for that no more than `at_most` have to be evicted."""
        if wanted.num_blocks - self._tiers.device.num_empty > at_most:
            return None
        return self._allocate(wanted)

    def _allocate(self, wanted: _Wanted, *, at_most: int | None = None) -> list[Block] | None:
        """Allocate blocks, or with `at_most` as many of them, up to this number, as there are."""
        return self._tiers.allocate(
            Tier.DEVICE,
            wanted.num_blocks if at_most is None else min(wanted.num_blocks, at_most),
            tenant=wanted.tenant,
            takes_kept=wanted.takes_kept,
            is_partial=at_most is not None,
        )

    def _bring_up(self, chain: Chain, known: Sequence[Block | None], at_most: int) -> None:
        """Copy pages of a chain into the empty blocks of VRAM while room for all of it is coming.

        The pages are duplicates then and make room for what VRAM has to evict. If the whole table
        were allocated first, as much as is brought up would be evicted from host memory. What would
        rather be computed is left, and no more is under way than the link copies soon, so that the
        request never waits for what it need not have begun.
        """
        device, promoter = self._tiers.device, self._promoter
        pages = self._pages_to_copy(chain, known) if device.num_empty else {}
        if not pages:
            return
        first = promoter.first_copied(chain, list(pages))
        wanted = [(index, page) for index, page in reversed(pages.items()) if index >= first]
        num_blocks = min(len(wanted), promoter.num_copies_left, at_most)
        blocks = device.allocate(num_blocks, is_partial=True, only_empty=True).blocks
        copies = list[tuple[Block, Block]]()
        for (_, page), block in zip(wanted, blocks or [], strict=False):
            block_hash = page.block_hash
            assert block_hash is not None, page
            device.insert(block, block_hash, chain.tenant)
            block.source = page.source or Tier.HOST
            copies.append((page, block))
        if copies:
            chain.row.copy(index for index, _ in wanted[: len(copies)])
            promoter.queue_copies(copies)
            promoter.pump()
            asked_at = self._waits[chain].asked_at
            self._waits[chain] = _Wait(asked_at, asked_at)  # it gets on

    def _evict_and_demote(
        self, chain: Chain, wanted: _Wanted, known: Sequence[Block | None], at_most: int
    ) -> int:
        """Empty the clean ones of the blocks, then copy others down; return how many in all."""
        device = self._tiers.device
        # NOTE: an allocation may get its room in parts. Clean blocks are evicted before others
        # are copied, since those copies may evict the pages that make them clean.
        self._poll()
        num_empty = device.num_empty
        device.release(self._allocate(wanted, at_most=num_empty + at_most) or [])
        num_evicted = device.num_empty - num_empty
        num_lacking = wanted.num_blocks - device.num_empty
        if num_evicted >= at_most or num_lacking <= 0:
            return num_evicted
        if not chain.blocks:
            self._tiers.touch_pages(chain.hashes)  # other chains' pages go before these
        num_ahead = self._num_to_demote(chain, known, num_lacking)
        return num_evicted + self._demoter.demote(num_ahead, at_most - num_evicted)

    def _make_room(
        self, chain: Chain, wanted: _Wanted, known: Sequence[Block | None], at_most: int
    ) -> list[Block] | None:
        """Copy blocks down; take the request's blocks if it has room now, or has waited enough."""
        device, demoter, num_blocks = self._tiers.device, self._demoter, wanted.num_blocks
        num_moved = self._evict_and_demote(chain, wanted, known, at_most)
        self._poll()
        if (blocks := self._take(wanted, at_most)) is not None:
            return blocks
        demoter.write(num_blocks)
        is_copying = demoter.is_copying or self._tiers.num_promoting > 0
        is_coming = is_copying and device.num_soon_clean >= num_blocks
        waited_s = self._wait(chain, gets_on=num_moved >= MIN_SLICE)
        if waited_s < (MAX_PATIENCE_S if is_coming else PATIENCE_S):
            return None
        demoter.drop_oldest(num_blocks)
        return self._allocate(wanted)

    def _wait(self, chain: Chain, *, gets_on: bool) -> float:
        """Note that a request goes on waiting; return since how many seconds it has not got on."""
        now = time.monotonic()
        if chain not in self._waits:
            self._tiers.counters.allocation_waits += 1
        since, asked_at = self._waits.get(chain, (now, now))
        # It may also have waited for something else since it asked the last time.
        if gets_on or now - asked_at >= MAX_PATIENCE_S:
            since = now
        self._waits[chain] = _Wait(since, now)
        return now - since

    def _num_to_demote(self, chain: Chain, known: Sequence[Block | None], num_blocks: int) -> int:
        """Return how many blocks VRAM may evict at once for a request that lacks so many.

        For what the request has in host memory, its own pages make the room, in turns.
        """
        host = self._tiers.host
        turn = max(MIN_SLICE, int(SLICE * host.num_blocks))
        turn += host.num_empty + host.num_duplicates
        if num_blocks <= turn:
            return num_blocks
        return max(turn, num_blocks - len(self._pages_to_copy(chain, known)))

    def _pages_to_copy(self, chain: Chain, known: Sequence[Block | None]) -> dict[int, Block]:
        """Return the pages of a waiting request whose blocks VRAM does not hold, by index."""
        if not self._tiers.can_load:
            return {}
        lacking = [index for index, block in enumerate(known) if block is None]
        pages = self._tiers.host.find(map(chain.hashes.__getitem__, lacking))
        found = zip(lacking, pages, strict=True)
        return {index: page for index, page in found if page is not None and page.is_ready}
