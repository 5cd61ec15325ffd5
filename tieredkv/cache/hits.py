"""What the tiers have of a chain: how much is a hit, where each block comes from, and what missed.

Called by the engine's thread only.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from tieredkv.cache.block import Block
from tieredkv.cache.chain import Chain
from tieredkv.cache.hit_end import last_end
from tieredkv.cache.lookups import Lookups
from tieredkv.cache.miss_reasons import MissReason
from tieredkv.cache.recalls import Recalls
from tieredkv.cache.row import LOADABLE, State
from tieredkv.cache.tail import Tail
from tieredkv.cache.tails import Tails
from tieredkv.cache.tiers import Tiers
from tieredkv.types import BlockHash, Tier

NUM_SAMPLED = 16
"""Blocks of a chain that are looked up to tell which part of it RAM holds."""


_FOUND, _COMING, _SHARED, _COMPUTE, _AT_HOST, _AT_DISK, _READING, _ = map(int, State)


class Found(NamedTuple):
    """What VRAM has for a request; None stands for a block or a page that it has not.

    Attributes:
        known: the blocks of its chain that are a hit.
        pages: the pages of layers with windows that it needs to go on behind them.
        held: of all of these, what VRAM has.
        num_private: how many pages only it will have; see `Tail.num_private`.
        num_fresh: how many blocks and pages it lacks, with the private ones.
    """

    known: list[Block | None]
    pages: list[Block | None]
    held: list[Block]
    num_private: int
    num_fresh: int


class Hits:
    """Finds chains in the tiers.

    Args:
        tiers: the tiers.
        recalls: take what slower tiers have.
        lookups: what the disk has answered.
        tails: the further pages of blocks.
    """

    def __init__(self, tiers: Tiers, recalls: Recalls, lookups: Lookups, tails: Tails) -> None:
        self._tiers, self._recalls, self._lookups = tiers, recalls, lookups
        self._tails = tails

    def look(self, chain: Chain) -> list[BlockHash]:
        """Note which blocks of a queued request's chain the disk has; return those RAM lacks.

        Blocks that cannot be hits are left out.
        """
        tiers = self._tiers
        if tiers.store is None or not tiers.can_load:
            return []
        missing = tiers.host.missing(tiers.device.missing(chain.hashes[: chain.last_end]))
        chain.disk_until = self.until(chain) if missing else [0] * len(chain.hashes)
        return missing

    def until(self, chain: Chain) -> list[int]:
        """Return until when the disk has each block of a chain that may be a hit; 0 of others."""
        presence = self._tiers.presence
        until: list[int] = presence.until(chain.hashes[: chain.last_end]).tolist()
        until += [0] * (len(chain.hashes) - len(until))
        if not presence.is_whole:  # what the disk has answered counts as well
            for index, second in self._lookups.answers(chain).items():
                until[index] = max(until[index], second)
        return until

    def begin(self, chain: Chain) -> list[BlockHash]:
        """Do as `look` does for a chain that has just arrived, and note what RAM has of it."""
        missing, hashes = self.look(chain), chain.hashes
        states = bytearray([_COMPUTE]) * len(hashes)
        if self._tiers.store is not None and self._tiers.can_load:
            absent, may_be = set(missing), hashes[: chain.last_end]
            states[: len(may_be)] = [_COMPUTE if each in absent else _FOUND for each in may_be]
        chain.row.begin(states)
        return missing

    def readable(self, chain: Chain) -> list[BlockHash]:
        """Return the head of a chain that may be a hit: up to the last of `read_ends` in the tiers.

        Without `read_ends` this is the whole chain, or where layers have windows, what is before
        the last place with the pages that these need. Blocks that are being computed or loaded for
        other requests count as present.
        """
        if chain.read_ends is None and chain.tail is None:
            return chain.hashes
        tiers, hashes = self._tiers, chain.hashes
        missing = tiers.device.missing(hashes)
        if tiers.can_load:
            on_disk = chain.on_disk(tiers.clock.now())
            missing = [each for each in tiers.host.missing(missing) if each not in on_disk]
        num_found = chain.num_present = hashes.index(missing[0]) if missing else len(hashes)
        # What is missing behind the first block that is missing changes no end of a hit.
        ends = range(num_found + 1) if chain.read_ends is None else sorted(chain.read_ends)
        if chain.tail is not None:
            return hashes[: self._tails.hit_end(chain.tail, num_found, ends)]
        return hashes[: last_end(ends, num_found)]

    def find(self, chain: Chain, num_blocks: int, *, is_alone: bool) -> Found:
        """Return what VRAM has for a request whose table has `num_blocks` blocks.

        Args:
            chain: of the request.
            num_blocks: length of its table.
            is_alone: no other request runs.
        """
        known, tail = self._tiers.device.find(self.readable(chain)), chain.tail
        pages = self._tails.find(tail, len(known)) if tail is not None else []
        held = [block for block in known + pages if block is not None]
        num_private = tail.num_private(is_alone=is_alone) if tail is not None else 0
        num_fresh = num_blocks + len(pages) + num_private - len(held)
        return Found(known, pages, held, num_private, num_fresh)

    def num_held(self, chain: Chain) -> int:
        """Return how many blocks at the head of a chain need no computing, by and large.

        They are those that some tier holds, or soon will. Blocks on disk count as one half each: a
        part of them is computed, and they take room that others have. A chain is evicted from its
        tail, so that the end of its head is found by bisection; which part of that RAM holds is
        told by a sample.
        """
        hashes, now = chain.hashes, self._tiers.clock.now()
        in_vram, in_host = self._tiers.device.lookup, self._tiers.host.lookup

        def is_near(block_hash: BlockHash) -> bool:
            return bool(in_vram(block_hash) or in_host(block_hash))

        def is_missing(index: int) -> bool:
            return not (is_near(hashes[index]) or chain.is_on_disk(index, now))

        num_found = bisect_left(range(len(hashes)), True, key=is_missing)
        if not num_found:
            return 0
        sample = hashes[: num_found : -(-num_found // NUM_SAMPLED)]
        num_in_ram = sum(map(is_near, sample))
        return num_found * (len(sample) + num_in_ram) // (2 * len(sample))

    def prefetch(self, chain: Chain) -> None:
        """Note what a plan may read of a queued request: blocks that the disk has and RAM lacks."""
        num_found = len(self.readable(chain))
        if (tail := chain.tail) is not None:
            needed = self._tails.look(tail, num_found)
            self._note_on_disk(tail, needed)
            self._recalls.want(tail, end=needed.stop)
        self._note_on_disk(chain, range(num_found))
        self._recalls.want(chain, end=num_found)

    def _note_on_disk(self, chain: Chain, indices: range) -> None:
        """Note which of these blocks of a queued request the disk has and RAM lacks, alone."""
        tiers, row, now = self._tiers, chain.row, self._tiers.clock.now()
        for state in LOADABLE:
            row.leave(row.indices(state))
        for index in indices:
            block_hash = chain.hashes[index]
            if chain.is_on_disk(index, now) and not tiers.is_in_ram(block_hash):
                is_awaited = tiers.disk_link.is_awaited(block_hash)
                row.find(index, State.READING if is_awaited else State.AT_DISK)

    def take(self, chain: Chain, found: list[Block | None], fresh: Iterator[Block]) -> None:
        """Fill a request's table with the blocks that were found and with fresh blocks.

        Fresh blocks are filled from the fastest tier that has their bytes, if any has. Blocks
        behind `found`, which may not be hits, are computed.
        """
        chain.blocks, end = self._fill(chain, found, fresh, 0)
        for block_hash in chain.hashes[len(found) :]:
            chain.blocks.append(next(fresh))
            # Where the hash is known, the block stays private.
            self._tiers.device.insert(chain.blocks[-1], block_hash, chain.tenant)
        self._recalls.want(chain, end=end)

    def take_pages(self, tail: Tail, found: list[Block | None], fresh: Iterator[Block]) -> None:
        """Do as `take` does for the pages of layers with windows that a hit needs."""
        first = tail.needed(tail.hit_end).start
        pages, end = self._fill(tail, found, fresh, first)
        for index, page in enumerate(pages, first):
            tail.hold(index, page)
        self._recalls.want(tail, end=end, loads_all=True)

    def _fill(
        self, chain: Chain, found: list[Block | None], fresh: Iterator[Block], first: int
    ) -> tuple[list[Block], int]:
        """Return the blocks from `first` on, and the index behind the last that is not there."""
        tiers, tenant, until, blocks = self._tiers, chain.tenant, chain.disk_until, list[Block]()
        end, now, is_awaited = 0, tiers.clock.now(), tiers.disk_link.is_awaited
        coming = {*chain.row.indices(State.COMING)}  # while the request waited for room
        states = bytearray([_COMPUTE]) * len(chain.hashes)
        hashes = chain.hashes[first : first + len(found)]
        pages = tiers.host.find(hashes) if tiers.can_load else [None] * len(found)
        asked = zip(found, hashes, pages, strict=True)
        for index, (block, block_hash, page) in enumerate(asked, first):
            state = _COMPUTE
            if block is not None:
                if block.is_ready and index not in coming:
                    state = _FOUND
                elif block.is_ready or block.is_copying:
                    state = _COMING
                else:
                    state = _READING if is_awaited(block_hash) else _SHARED
            else:
                block = next(fresh)
                tiers.device.insert(block, block_hash, tenant)
                if page is not None and page.is_ready:
                    state, block.source = _AT_HOST, page.source or Tier.HOST
                elif is_awaited(block_hash):
                    state, block.source = _READING, Tier.DISK
                elif until and until[index] > now:
                    state, block.source = _AT_DISK, Tier.DISK
            if state != _COMPUTE:
                states[index] = state
                end = end if block.is_ready else index + 1
            blocks.append(block)
        chain.row.begin(states)
        return blocks, end

    def why_missed(self, chain: Chain, index: int) -> MissReason:
        """Return why a block of an admitted request had to be computed."""
        tiers, block_hash = self._tiers, chain.hashes[index]
        if (why := chain.row.why_computed.get(index)) is not None:
            return why
        if index < chain.num_present and chain.tail is not None:
            return "no_anchor"
        if index < chain.num_present:
            if 0 not in (chain.read_ends or ()) or chain.num_present == len(chain.hashes):
                return "behind_lookback"
            # With this block, a hit could have ended behind it.
            block_hash = chain.hashes[chain.num_present]
        if not tiers.can_load and tiers.host.lookup(block_hash):
            return "loads_off"
        return tiers.catalog.miss_reasons.why(block_hash, tiers.clock.now())
