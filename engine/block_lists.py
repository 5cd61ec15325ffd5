"""Tells of the blocks in VRAM and host memory, some of them at a time, so that no step waits long.

Blocks that come or go meanwhile may be told of or not. Called by the engine's thread only.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from tieredkv.cache.catalog import Entry
from tieredkv.cache.tiers import Tiers
from tieredkv.storage.block_table import BLOCK, TIER_BITS, Kind
from tieredkv.storage.ram_blocks import part_of

SLICE_S = 0.002
"""For so long parts are made between two steps; the last one may take a millisecond more."""

PART_BLOCKS = 512
"""Told of in one message."""

_COPIED = ("position", "hits", "computed_at", "last_used")

TellPart = Callable[[dict[str, Any], bool], object]
"""Takes a part of an answer, and whether more parts follow."""


class BlockLists:
    """Makes the lists of blocks that operators wait for, one after the other."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._open = deque[Iterator[bool]]()

    @property
    def has_more(self) -> bool:
        """Whether there are parts that were not told yet."""
        return bool(self._open)

    def begin(self, tell: TellPart) -> None:
        """Have `tell` called with the parts of a list; see `storage.ram_blocks`."""
        self._open.append(self._telling(tell))

    def go_on(self) -> None:
        """Make parts for a short time, at least one."""
        end = time.monotonic() + SLICE_S
        while self._open:
            if not next(self._open[0], False):
                self._open.popleft()
            if time.monotonic() >= end:
                break

    def _telling(self, tell: TellPart) -> Iterator[bool]:
        entries = self._tiers.catalog.entries()
        for start in range(0, len(entries), PART_BLOCKS):
            tell(self._part(entries[start : start + PART_BLOCKS]), True)
            yield True
        tell({}, False)

    def _part(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Describe some blocks, without their copies on disk."""
        catalog, hashes = self._tiers.catalog, [entry.block_hash for entry in entries]
        rows, numbers = np.zeros(len(entries), BLOCK), dict[tuple[bytes, bytes, str], int]()
        for name in _COPIED:
            rows[name] = list(map(attrgetter(name), entries))
        rows["size_bytes"] = self._tiers.block_bytes
        rows["expires_at"] = catalog.deadlines(entries)
        for tier, pool in self._tiers.pools.items():
            copies = pool.find(hashes)
            is_there = np.array([copy is not None and copy.is_ready for copy in copies])
            rows["tiers"] += is_there * np.uint8(TIER_BITS[tier])
        of_claims = {entry.claims: entry for entry in entries}
        names = {claims: catalog.retention(entry) for claims, entry in of_claims.items()}
        rows["kind"] = [
            numbers.setdefault((it.root, it.namespace, names[it.claims]), len(numbers))
            for it in entries
        ]
        parents = [entry.parent_hash for entry in entries]
        return part_of(rows, hashes, parents, [Kind(*kind) for kind in numbers])
