"""One request's chain of full blocks: what it claims for them, and what it holds in the tiers."""

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tieredkv.cache.block import Block
from tieredkv.cache.miss_reasons import COMPUTED_SOONER
from tieredkv.cache.row import Row, State
from tieredkv.errors import IntegrityError
from tieredkv.types import TENANT_BYTES, BlockHash, Tier

if TYPE_CHECKING:
    from tieredkv.cache.tail import Tail


class BlockClaim(NamedTuple):
    """A request's wishes for the blocks from the end of the previous claim to this one's end.

    Attributes:
        end: index of the first block behind the claim.
        retentions: names of retention policies; the longest one counts.
        pinned_until: see `catalog.Entry`.
    """

    end: int
    retentions: frozenset[str]
    pinned_until: float = 0.0


class PageIdentity(NamedTuple):
    """What a page of a chain is, besides its own hash; see `BlockRecord`."""

    parent_hash: BlockHash
    position: int
    kind: int = 0
    part: int = 0
    num_parts: int = 1


@dataclass(slots=True, eq=False)
class Chain:
    """One request's chain of full blocks, and what it holds in the tiers.

    Attributes:
        hashes: block hashes of the full blocks of its tokens, head first.
        claims: the request's claims by ascending `end`; the last one also covers generated tokens.
        max_blocks: how many blocks are hashed at most.
        token_ids: the tokens of `hashes`, packed as u32; None if its blocks are not announced.
        read_ends: numbers of blocks at which a hit may end; None if it may end anywhere.
        blocks: the block table, empty before admission; the first `len(hashes)` are the chain.
        block_ids: the ids of `blocks`, as a model takes them.
        row: the state of each full block.
        disk_until: until when the disk has each block, in seconds, as was known when the request
            came or was admitted; 0 of blocks that it does not have, and of all if RAM had them all.
        num_present: if `read_ends` are given, how many blocks of the head were in the tiers.
        prefetched: blocks that were read from disk for it while it waits; they are evicted last.
        tail: the further pages of its blocks, of a model that has layers with windows.
    """

    root: BlockHash
    namespace: bytes
    hashes: list[BlockHash]
    claims: Sequence[BlockClaim]
    max_blocks: int = sys.maxsize
    token_ids: "array[int] | None" = None
    read_ends: list[int] | None = None
    blocks: list[Block] = field(default_factory=list)
    block_ids: "array[int]" = field(default_factory=lambda: array("i"))
    row: Row = field(init=False)
    disk_until: list[int] = field(default_factory=list)
    num_present: int = 0
    prefetched: list[BlockHash] = field(default_factory=list)
    tail: "Tail | None" = None

    def __post_init__(self) -> None:
        self.row = Row(len(self.hashes))

    @property
    def tenant(self) -> bytes:
        """The tenant whose request this is."""
        return self.namespace[:TENANT_BYTES]

    def is_on_disk(self, index: int, now: float) -> bool:
        """Return whether the disk has a block, as far as is known."""
        return index < len(self.disk_until) and self.disk_until[index] > now

    def on_disk(self, now: float) -> set[BlockHash]:
        """Return the blocks that the disk has, as far as is known."""
        hashes, until = self.hashes, self.disk_until
        return {hashes[index] for index, second in enumerate(until) if second > now}

    @property
    def named(self) -> Iterable[tuple[int, BlockHash]]:
        """The blocks by index, with their names."""
        return enumerate(self.hashes)

    @property
    def last_end(self) -> int:
        """Behind how many blocks a hit may end at most."""
        return len(self.hashes) if self.read_ends is None else max(self.read_ends, default=0)

    @property
    def used(self) -> Sequence[int]:
        """The blocks that the request uses, ascending."""
        return range(len(self.hashes))

    @property
    def pages_per_block(self) -> int:
        """How many pages a block has, with those of layers with windows."""
        return 1 + (self.tail.pages_beside if self.tail is not None else 0)

    @property
    def num_held(self) -> int:
        """How many blocks and pages the request holds."""
        return len(self.blocks) + (self.tail.num_held if self.tail is not None else 0)

    def origins(self) -> list[Tier | None]:
        """Return where an admitted request got each full block from; None if it computed the block.

        A block that became ready while it waited came from the tier that it was loaded from, or
        from VRAM if another request computed it. For a block that is not ready this is a forecast.
        """
        if not self.blocks:
            return []
        origins: list[Tier | None] = [Tier.DEVICE] * len(self.row)
        for index in self.row.indices(State.COMPUTED):
            origins[index] = None
        blocks, states = self.blocks, self.row.states
        for index in self.row.awaited:
            block = blocks[index]
            if (source := block.source) is not None:
                origins[index] = source
            elif not block.is_ready and states[index] != State.SHARED:
                origins[index] = None
        return origins

    @property
    def num_expected(self) -> int:
        """How many blocks the request does not have to compute, or not necessarily."""
        return len(self.row) - self.row.count(State.COMPUTE)

    def check(self) -> None:
        """Raise IntegrityError if a state of an admitted request contradicts its block or page."""
        row = self.row
        if len(row) != len(self.hashes):
            raise IntegrityError(f"{len(self.hashes)} blocks have {len(row)} states")
        if not row.pages.keys() >= {*row.indices(State.AT_HOST)}:
            raise IntegrityError("a block is at the host, but the request holds no page of it")
        if any(page.ref_count < 1 for page in row.pages.values()):
            raise IntegrityError("a page is wanted, but not held")
        for index, block in enumerate(self.blocks[: len(row)]):
            state = State(row[index])
            if block.ref_count < 1:
                raise IntegrityError(f"{block} is in a block table, but not held")
            if block.block_hash is None:  # it was dropped, or another block has its hash
                continue
            if block.block_hash != self.hashes[index]:
                raise IntegrityError(f"{block} is not block {index} of the chain")
            is_there = state in (State.FOUND, State.COMPUTED)
            if (is_there and not block.is_ready) or (state is State.COMING and block.is_open):
                raise IntegrityError(f"{block} is {state.name} for a request")

    def grow(self, hashes: Iterable[BlockHash]) -> None:
        """Add the hashes of blocks that generated tokens have filled."""
        num_before = len(self.hashes)
        self.hashes += hashes
        if self.tail is not None:
            self.tail.add_blocks(len(self.hashes) - num_before)

    def identity(self, index: int) -> PageIdentity:
        """Return what a page of the chain is, besides its hash."""
        return PageIdentity(self.hashes[index - 1] if index else self.root, index)

    def computed_sooner(self, indices: Iterable[int]) -> list[int]:
        """Return which blocks were computed though a slower tier had them, to have them sooner."""
        lost = self.row.why_computed
        return [index for index in indices if lost.get(index) == COMPUTED_SOONER] if lost else []

    def has_at(self, index: int, block_hash: BlockHash) -> bool:
        """Return whether this is the block at an index of the chain."""
        return index < len(self.hashes) and self.hashes[index] == block_hash

    def by_claim(self, indices: Sequence[int]) -> Iterator[tuple[BlockClaim, Sequence[int]]]:
        """Yield each claim with the indices that it covers; `indices` must be ascending."""
        start = 0
        for claim in self.claims:
            end = bisect_left(indices, claim.end)
            yield claim, indices[start:end]
            start = end
