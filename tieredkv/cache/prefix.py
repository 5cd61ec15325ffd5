"""One request's chain of full blocks: what it claims for them, and what it holds in the tiers."""

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tieredkv.block_pool import Block
from tieredkv.types import TENANT_BYTES, BlockHash, Tier


class BlockClaim(NamedTuple):
    """What a request wants for the blocks from the end of the claim before it to its own.

    Attributes:
        end: index of the first block behind it.
        retentions: names of policies; a block lives by the longest.
        pinned_until: see `catalog.Entry`.
    """

    end: int
    retentions: frozenset[str]
    pinned_until: float = 0.0


@dataclass(slots=True, eq=False)
class Prefix:
    """One request's chain of full blocks, and what it holds in the tiers.

    Attributes:
        hashes: block hashes of the full blocks of its tokens, head first.
        claims: ascending ends; the last one covers what is generated, too.
        max_blocks: no block behind so many is hashed.
        read_ends: numbers of blocks at which a hit may end; None for any.
        blocks: its block table; the first `len(hashes)` are the chain. Empty before it is admitted.
        block_ids: the ids of `blocks`, as a model takes them.
        sources: tier in which each full block was found, None where it had to be computed.
        records: what the disk was asked for: each block's record, sealed as it is stored, None
            while there is none.
        lookup_job, lookup_give_up_at: the question to the disk that has no answer yet.
        num_present: blocks of its head that were in the tiers, where `read_ends` are given.
        wanted: blocks that are evicted last, while it waits.
        refused_at: free and cached blocks, how many it wanted, and whether it was alone, when there
            was no room for it; it is not looked up again before they change.
    """

    root: BlockHash
    namespace: bytes
    hashes: list[BlockHash]
    claims: Sequence[BlockClaim]
    max_blocks: int = sys.maxsize
    read_ends: list[int] | None = None
    blocks: list[Block] = field(default_factory=list)
    block_ids: "array[int]" = field(default_factory=lambda: array("i"))
    sources: list[Tier | None] = field(default_factory=list)
    records: dict[BlockHash, bytes | None] = field(default_factory=dict)
    lookup_job: int | None = None
    lookup_give_up_at: float = 0.0
    num_present: int = 0
    wanted: list[BlockHash] = field(default_factory=list)
    refused_at: tuple[int, int, int, bool] | None = None

    @property
    def tenant(self) -> bytes:
        """Whose it is."""
        return self.namespace[:TENANT_BYTES]

    def by_claim(self, indices: Sequence[int]) -> Iterator[tuple[BlockClaim, Sequence[int]]]:
        """Yield the claims and, of these ascending indices of blocks, those that each covers."""
        start = 0
        for claim in self.claims:
            end = bisect_left(indices, claim.end)
            yield claim, indices[start:end]
            start = end
