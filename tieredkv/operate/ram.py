"""The blocks that VRAM and host memory hold, as an engine tells of them by their names.

An engine tells of its blocks in parts, since it makes them between its steps. This module knows
neither the engine nor the index.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tieredkv.operate.chains import Mask
from tieredkv.operate.table import BLOCK, TIER_BITS, Blocks, BlockTable, Kind, starts_of
from tieredkv.types import Tier

Part = Mapping[str, Any]
"""Some blocks, in a form that fits into a message; empty from an engine that tells of none."""


class RamBlocks(NamedTuple):
    """The blocks that VRAM and host memory hold.

    Attributes:
        table: of the blocks.
        hashes: of the blocks, in the same order.
        is_told: whether the engine has told all of them; it may be silent.
    """

    table: BlockTable
    hashes: Sequence[bytes]
    is_told: bool = True

    @classmethod
    def of(cls, parts: Iterable[Part]) -> "RamBlocks":
        """Read what an engine tells.

        Args:
            parts: as `part_of` makes them; one with `engine` stands for those of a silent engine.
        """
        rows, hashes, kinds, is_told = [np.empty(0, BLOCK)], list[bytes](), list[Kind](), True
        for part in parts:
            is_told &= "engine" not in part
            if not (num_blocks := part.get("num_blocks", 0)):
                continue
            some = np.frombuffer(part["rows"], BLOCK).copy()
            own, parents = part["hashes"], part["parents"]
            starts, parent_starts = (
                starts_of(np.frombuffer(each, np.uint8).reshape(num_blocks, -1))
                for each in (own, parents)
            )
            some["key"], some["key_rest"] = starts.T
            some["parent_key"] = parent_starts[:, 0]
            some["kind"] += len(kinds)
            is_there = some["tiers"] > 0
            rows.append(some[is_there])
            size = len(own) // num_blocks
            all_hashes = (own[at : at + size] for at in range(0, len(own), size))
            hashes += compress(all_hashes, is_there)
            kinds += (Kind(*kind) for kind in part["kinds"])
        blocks = np.concatenate(rows)
        order = np.lexsort((blocks["key_rest"], blocks["key"]))
        table = BlockTable(blocks[order], kinds)
        return cls(table, [hashes[place] for place in order.tolist()], is_told)

    def holds(self, keys: NDArray[np.uint64]) -> Mask:
        """Return which of these keys are those of blocks in VRAM or host memory."""
        return np.isin(keys, self.table.blocks["key"])

    def named(self, digits: str) -> list[bytes]:
        """Return the hashes that start with these hex digits."""
        start = bytes.fromhex(digits[: len(digits) // 2 * 2])
        places = range(bisect_left(self.hashes, start), len(self.hashes))
        hashes = map(self.hashes.__getitem__, places)
        some = takewhile(lambda each: each.startswith(start), hashes)
        return [each for each in some if each.hex().startswith(digits)]

    def hashes_of(self, blocks: Blocks) -> list[bytes]:
        """Return the whole hashes of those blocks of a table that the disk does not have."""
        keys = blocks["key"][blocks["tiers"] & TIER_BITS[Tier.DISK] == 0]
        places = np.searchsorted(self.table.blocks["key"], keys)
        return [self.hashes[place] for place in places.tolist()]


def part_of(
    rows: Blocks, hashes: Sequence[bytes], parents: Sequence[bytes], kinds: Sequence[Kind]
) -> dict[str, Any]:
    """Return a part of what an engine tells.

    Args:
        rows: of blocks that are in VRAM or host memory, without their keys.
        hashes: of the same blocks, all of the same length.
        parents: the hashes of the blocks before them.
        kinds: by their numbers in the rows.
    """
    return {
        "num_blocks": len(rows),
        "rows": rows.tobytes(),
        "hashes": b"".join(hashes),
        "parents": b"".join(parents),
        "kinds": kinds,
    }
