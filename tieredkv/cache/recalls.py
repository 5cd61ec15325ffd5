"""What requests lack in VRAM and slower tiers hold, and which part of it is computed instead.

The blocks that a request lacks in VRAM and that a slower tier holds are its recall. `divide`
splits each recall: blocks before the split are computed, blocks from it on are left to the links.

Requests that share blocks share the decision: what may be loaded stands in the recall of the
request that was admitted first, and `first_loaded` asks the recalls of all. When that request ends,
the others take over what is left.

This module starts no read and no copy. It does not know what the links have under way, but for the
blocks that are coming from disk.

Called by the engine's thread only.
"""

import math
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tieredkv.cache.block import Content
from tieredkv.cache.chain import Chain
from tieredkv.cache.plan import DISK_LINK, HOST_LINK, Demand, LinkLoad, Planner, Split
from tieredkv.cache.row import LOADABLE, State
from tieredkv.cache.tail import Tail
from tieredkv.cache.tiers import Tiers
from tieredkv.errors import IntegrityError
from tieredkv.hashing import num_shared
from tieredkv.types import BlockHash

_COMPUTED = (Content.COMPUTING, Content.WHOLE)


@dataclass(slots=True, eq=False)
class Recall:
    """What slower tiers hold of one request's chain, and VRAM does not.

    Attributes:
        end: index behind the last block that it waits for, here or in a recall that it shares.
        give_up_at: when blocks that have not come from disk are computed; infinite while the
            request is queued.
        split: blocks before it are computed; blocks from it on are left to the links. Nothing is
            loaded before the first plan.
        host_split: the same for the blocks at the host.
        due_at: when what is loaded has arrived, by the last plan; in monotonic time, and infinite
            where the plan does not decide.
        is_begun: whether a read or a copy was started.
        is_given_up: whether `give_up_at` has passed, so that it waits for no read any more.
    """

    chain: Chain
    end: int
    give_up_at: float
    split: int = sys.maxsize
    host_split: int = sys.maxsize
    due_at: float = 0.0
    is_begun: bool = False
    is_given_up: bool = False

    @property
    def is_admitted(self) -> bool:
        """Whether the request has a block table, so that blocks are filled, not only read ahead."""
        return bool(self.chain.blocks)

    def has(self, state: State) -> bool:
        """Return whether some block is in this state."""
        return self.chain.row.first(state) >= 0

    @property
    def first(self) -> int:
        """The first block that may be loaded or is being read; `end` if there is none."""
        found = [first for each in LOADABLE if (first := self.chain.row.first(each)) >= 0]
        return min(found, default=self.end)

    @property
    def loads(self) -> tuple[LinkLoad, LinkLoad]:
        """What each link may load, or was given to load."""
        # Copies begin with the last block, and those of a request end in their order.
        of, first = self.chain.row.indices, self.chain.row.first(State.COMING)
        is_copying = self.is_admitted and first >= 0 and self.chain.blocks[first].is_copying
        return (
            LinkLoad(HOST_LINK, of(State.AT_HOST), is_bringing=is_copying),
            LinkLoad(DISK_LINK, of(State.AT_DISK), of(State.READING)),
        )

    @property
    def copies_next(self) -> bool:
        """Whether its last block in host memory is to be copied to VRAM."""
        last = self.chain.row.last(State.AT_HOST)
        return self.is_admitted and 0 <= last >= self.host_split

    @property
    def reads_next(self) -> bool:
        """Whether its last block on disk is to be read."""
        return 0 <= self.chain.row.last(State.AT_DISK) >= self.split


class RequestProgress(NamedTuple):
    """A request's tokens, and how many of them are computed."""

    chain: Chain
    num_computed_tokens: int
    num_tokens: int


class Recalls:
    """The recalls of all requests, and how they are divided between computing and loading.

    Invariants (`check`): a block that a request waits for as being read is being read; only an
    admitted request holds pages.

    Attributes:
        order: all recalls, in the order in which they are loaded.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._recalls: dict[Chain, Recall] = {}
        self.order: list[Recall] = []

    def __len__(self) -> int:
        return len(self._recalls)

    @property
    def chains(self) -> list[Chain]:
        """The chains that have a recall, the oldest first."""
        return list(self._recalls)

    def is_open(self, block_hash: BlockHash) -> bool:
        """Return whether requests hold a block for these bytes into which nothing was written."""
        block = self._tiers.device.lookup(block_hash)
        return block is not None and block.ref_count > 0 and block.is_open

    # Requests

    def want(self, chain: Chain, *, end: int, loads_all: bool = False) -> None:
        """Recall blocks of an admitted request, or prefetch those of a queued one.

        Without any block to wait for, the request has no recall any more.

        Args:
            chain: of the request; its row tells what can be loaded.
            end: index behind the last block that is missing, here or in a recall that it shares.
            loads_all: whether all blocks are left to the links, whatever the plan.
        """
        if chain in self._recalls:  # of the request while it was queued
            self.order.remove(self._recalls.pop(chain))
        if not end:
            return
        timeout_s = self._tiers.settings.load_timeout_s if chain.blocks else float("inf")
        recall = Recall(chain, end, give_up_at=time.monotonic() + timeout_s)
        if loads_all:
            recall.split = recall.host_split = 0
        self._recalls[chain] = recall
        self.order.append(recall)
        if recall.is_admitted:
            host = self._tiers.host
            in_host = chain.row.indices(State.AT_HOST)
            pages = host.find(map(chain.hashes.__getitem__, in_host))
            chain.row.pages = {i: page for i, page in zip(in_host, pages, strict=True) if page}
            host.acquire(chain.row.pages.values())

    def forget(self, chain: Chain) -> None:
        """End the recall of a request; admitted requests that share its blocks take them over."""
        recall = self._recalls.pop(chain, None)
        if recall is None:
            return
        self.order.remove(recall)
        if recall.is_admitted:
            for other in self._recalls.values():
                if other.is_admitted:
                    self._hand_over(recall, other)
        self._tiers.release_pages(chain.row.pages.values())
        chain.row.pages = {}

    def _hand_over(self, recall: Recall, other: Recall) -> None:
        """Move the blocks that two requests share from a recall that ends to another one."""
        ours, theirs = recall.chain, other.chain
        shared = num_shared(ours.hashes, theirs.hashes)
        for state in LOADABLE:
            indices = ours.row.indices(state)
            ending = indices[: bisect_left(indices, shared)]
            passed = [
                index
                for index in ending
                if theirs.row[index] not in LOADABLE and self.is_open(ours.hashes[index])
            ]
            ours.row.leave(ending)
            theirs.row.take_over(passed, ours.row, state)
            if passed:
                other.split = min(other.split, recall.split)
                other.host_split = min(other.host_split, recall.host_split)
            for index in passed:
                if ours.disk_until:  # there is a disk
                    theirs.disk_until[index] = ours.disk_until[index]
                other.end = max(other.end, index + 1)

    # Plan

    def demands(self, requests: Sequence[RequestProgress]) -> list[tuple[Demand, Recall | None]]:
        """Return what requests need, each with its recall if it has one.

        Recalls of admitted requests that are not among them have ended.

        Args:
            requests: all admitted requests that have tokens of their prompts to compute, and the
                next queued ones, in the order of service.
        """
        needy: set[Chain] = {chain for chain, _, _ in requests}
        needy |= {chain.tail for chain in needy if chain.tail is not None}
        for chain in self.chains:
            if self._recalls[chain].is_admitted and chain not in needy:
                self.forget(chain)
        size = self._tiers.block_size
        demands: list[tuple[Demand, Recall | None]] = []
        planned: list[Recall] = []
        for chain, num_computed, num_tokens in requests:
            if chain.tail is not None and (recall := self._tidied(chain.tail, 0)) is not None:
                planned.append(recall)  # first, since nothing goes on without these pages
            recall = self._tidied(chain, num_computed // size)
            shared = (num_shared(chain.hashes, each.chain.hashes) for each in planned)
            num_covered = min(num_tokens, size * max(shared, default=0))
            demand = Demand(max(num_computed, num_covered), num_tokens, ready=chain.row.there)
            if recall is not None:
                demand = demand._replace(
                    loads=recall.loads,
                    is_begun=recall.is_begun,
                    loaded_to=0 if recall.is_given_up else recall.end,
                )
                planned.append(recall)
            if chain.tail is not None:
                demand = demand._replace(begin=num_computed)
                demand = self._with_tail(demand, chain.tail, num_covered)
            demands.append((demand, recall))
        self.order = planned + [it for it in self._recalls.values() if it not in planned]
        return demands

    def _with_tail(self, demand: Demand, tail: Tail, num_covered: int) -> Demand:
        """Return what a request needs that also has pages of layers with windows.

        Of these all are loaded, unless all blocks before the end of the hit are computed: as if
        they were parts of the last of these blocks.

        Args:
            demand: what it needs of its chain.
            tail: the further pages.
            num_covered: tokens that are there, or come for requests before it.
        """
        end, there = tail.hit_end or demand.loaded_to, tail.of.row.there
        if not end:
            return demand._replace(ready=())
        loads = [*demand.loads]
        if (recall := self._recalls.get(tail)) is not None:
            loads += [
                load._replace(
                    indices=[end - 1] * len(load.indices), queued=[end - 1] * len(load.queued)
                )
                for load in recall.loads
            ]
        first, last = next(iter(there), (0, 0))
        head = min(max(0 if first else last, num_covered // self._tiers.block_size), end - 1)
        return demand._replace(loads=loads, loaded_to=end, ready=(), head=head)

    def divide(
        self, demands: Iterable[tuple[Demand, Recall | None]], planner: Planner
    ) -> list[Split]:
        """Set the split of each recall, in the order of service; return the splits."""
        splits, now = [], time.monotonic()
        for demand, recall in demands:
            splits.append(planner.split(demand))
            if recall is not None:
                recall.split, recall.host_split = splits[-1].block, splits[-1].steady_block
                recall.due_at = now + splits[-1].load_s
                if self._tiers.settings.restore == "load":
                    recall.split = recall.host_split = recall.first
                    recall.due_at = math.inf
                if (tail := recall.chain.tail) is not None:
                    self._divide_tail(recall, tail)
        return splits

    def _divide_tail(self, recall: Recall, tail: Tail) -> None:
        """Have the pages of windows loaded before which computing ends, unless all is computed."""
        loads_all = self._tiers.settings.restore == "load"
        end = tail.hit_end or recall.end  # the latter of a queued request
        is_loaded = loads_all or recall.split < end
        if is_loaded:
            most = max(0, end - tail.num_needed)
            recall.split, recall.host_split = min(recall.split, most), min(recall.host_split, most)
        if (beside := self._recalls.get(tail)) is not None:
            beside.split = beside.host_split = 0 if is_loaded else beside.end

    def is_due(self, chain: Chain, seconds: float) -> bool:
        """Return whether what is loaded for a request arrives within this time, by the plan."""
        recall = self._recalls.get(chain)
        return recall is None or recall.due_at - time.monotonic() <= seconds

    def first_loaded(self, chain: Chain, first: int, end: int) -> int:
        """Return the first of a request's blocks `[first, end)` that is left to the links.

        Returns:
            `end` if all of them may be computed.
        """
        own = self._recalls.get(chain)
        may_read = own is None or not own.is_given_up
        for recall in self._recalls.values():
            if not recall.is_admitted or end <= max(first, recall.host_split):
                continue
            is_own = recall.chain is chain
            shared = end if is_own else num_shared(chain.hashes, recall.chain.hashes)
            last = min(end, shared)
            splits = recall.host_split, recall.split, recall.split
            for state, split in zip(LOADABLE, splits, strict=True):
                if not may_read and state is not State.AT_HOST:
                    continue
                found = recall.chain.row.first(state, max(first, split), last)
                if found >= 0:
                    end = last = found
        return end

    def note_read(self, block_hash: BlockHash, index: int, *, is_copying: bool) -> None:
        """Note for all who wait for a block that its read has ended, and whether it is copied."""
        for recall in self._recalls.values():
            chain = recall.chain
            if chain.has_at(index, block_hash) and chain.row[index] == State.READING:
                if is_copying and recall.is_admitted:
                    chain.row.copy([index])
                else:
                    chain.row.leave([index])

    def _tidied(self, chain: Chain, first: int) -> Recall | None:
        """Return a chain's recall without the blocks before `first`, if anything is left of it."""
        if (recall := self._recalls.get(chain)) is not None:
            self._tidy(recall, first)
        return self._recalls.get(chain)

    def _tidy(self, recall: Recall, first: int) -> None:
        """Drop the blocks before `first`, which are computed, and those that took too long."""
        hashes, row = recall.chain.hashes, recall.chain.row
        reading = row.indices(State.READING)
        if arrived := self._arrived(reading, [hashes[index] for index in reading]):
            row.leave(arrived)
        if not recall.is_admitted:
            if not (recall.has(State.AT_DISK) or recall.has(State.READING)):
                self.forget(recall.chain)
            return
        for state in LOADABLE:
            while (index := row.first(state, 0, first)) >= 0:
                row.leave([index])
        late = [index for index in row.pages if index < first]
        self._tiers.release_pages(row.pages.pop(index) for index in late)
        if first >= recall.end:
            self.forget(recall.chain)

    def _arrived(self, reading: Sequence[int], hashes: Sequence[BlockHash]) -> list[int]:
        """Return those of these blocks that no request waits to be read any more."""
        are_awaited = map(self._tiers.disk_link.is_awaited, hashes)
        blocks = self._tiers.device.find(hashes)
        return [
            index
            for index, is_awaited, block in zip(reading, are_awaited, blocks, strict=True)
            if not is_awaited or (block is not None and block.content in _COMPUTED)
        ]

    def give_up_late(self) -> dict[BlockHash, int]:
        """Have blocks computed that have not come from disk in time.

        Returns:
            Their indices in their chains by hash.
        """
        now, late = time.monotonic(), dict[BlockHash, int]()
        for recall in self._recalls.values():
            if now >= recall.give_up_at:
                recall.is_given_up = True
                row = recall.chain.row
                for state in (State.AT_DISK, State.READING):
                    for index in row.indices(state):
                        if self.is_open(block_hash := recall.chain.hashes[index]):
                            late[block_hash] = index
                    row.leave(row.indices(state))
        return late

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        if Counter(self.order) != Counter(self._recalls.values()):
            raise IntegrityError("the order of the recalls is not one of all of them")
        for recall in self._recalls.values():
            chain = recall.chain
            reading = (chain.hashes[index] for index in chain.row.indices(State.READING))
            if not all(map(self._tiers.disk_link.is_reading, reading)):
                raise IntegrityError("a request waits for a read that has ended")
            if chain.row.pages and not recall.is_admitted:
                raise IntegrityError("a request holds pages, but is not admitted")
