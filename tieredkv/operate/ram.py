"""The blocks that VRAM and host memory hold, as an engine tells of them by their names.

An engine tells of its blocks in parts, since it makes them between its steps. This module knows
neither the engine nor the index.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieredkv.operate.chains import Chains, Mask
from tieredkv.operate.infos import BlockInfo
from tieredkv.operate.table import (
    BLOCK,
    START_BYTES,
    TIER_BITS,
    Blocks,
    BlockTable,
    Kind,
    places_named,
    scan,
    starts_of,
)
from tieredkv.operate.worker import Worker

Part = Mapping[str, Any]
"""Some blocks, in a form that fits into a message; empty from an engine that tells of none."""


class RamBlocks:
    """The blocks that VRAM and host memory hold.

    Args:
        parts: as `part_of` makes them; one with `engine` stands for those of a silent engine.

    Attributes:
        table: of the blocks.
        names: [num_blocks], of the blocks.
        is_told: whether the engine has told all of them; it may be silent.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        rows, kinds, self.is_told = [np.empty(0, BLOCK)], list[Kind](), True
        names, parents, pins = (list[NDArray[Any]]() for _ in range(3))
        for part in parts:
            self.is_told &= "engine" not in part
            if not (num_blocks := part.get("num_blocks", 0)):
                continue
            some = np.frombuffer(part["rows"], BLOCK).copy()
            own, above = (
                np.frombuffer(part[each], np.uint8).reshape(num_blocks, -1)
                for each in ("names", "parents")
            )
            some["key"], some["key_rest"] = starts_of(own).T
            some["parent_key"] = starts_of(above)[:, 0]
            some["kind"] += len(kinds)
            rows.append(some)
            names.append(own)
            parents.append(above)
            pins.append(np.frombuffer(part["pinned_until"], np.float64))
            kinds += (Kind(*kind) for kind in part["kinds"])
        blocks = np.concatenate(rows)
        order = np.lexsort((blocks["key_rest"], blocks["key"]))
        order = order[blocks["tiers"][order] > 0]
        self.table = BlockTable(blocks[order], kinds)
        self._keys, self._rests = (self.table.blocks[it].copy() for it in ("key", "key_rest"))
        self.names, self._parents, self._pins = (
            np.concatenate(each)[order] if each else np.empty(0) for each in (names, parents, pins)
        )

    def holds(self, keys: NDArray[np.uint64]) -> Mask:
        """Return which of these keys are those of blocks in VRAM or host memory."""
        return np.isin(keys, self._keys)

    def named(self, digits: str) -> list[bytes]:
        """Return the names that start with these hex digits, of which 32 count."""
        return [self.names[place].tobytes() for place in self._places(digits)]

    def up_from(self, names: Iterable[bytes], now: float) -> list[BlockInfo]:
        """Describe blocks and all before them, up to the first that is not here or has expired.

        Args:
            names: of the blocks, or the first bytes of these.
            now: the time.
        """
        infos, waiting = dict[int, BlockInfo](), [*names]
        while waiting:
            for place in self._places(waiting.pop()[:START_BYTES].hex()):
                if place in infos or self.table.blocks["expires_at"][place] <= now:
                    continue
                infos[place] = self._info(place)
                if infos[place].position:
                    waiting.append(self._parents[place].tobytes())
        return [*infos.values()]

    def _places(self, digits: str) -> list[int]:
        return places_named(self._keys, self._rests, digits)

    def _info(self, place: int) -> BlockInfo:
        """Describe a block, without its copy on disk."""
        row = self.table.blocks[place]
        kind = self.table.kinds[row["kind"]]
        copied = ("position", "size_bytes", "hits", "computed_at", "last_used", "expires_at")
        return BlockInfo(
            block_hash=self.names[place].tobytes().hex(),
            parent_hash=self._parents[place].tobytes().hex(),
            root=kind.root.hex(),
            namespace=kind.namespace.hex(),
            tiers=[tier for tier, bit in TIER_BITS.items() if row["tiers"] & bit],
            retention=kind.retention,
            pinned_until=self._pins[place].item(),
            **{name: row[name].item() for name in copied},
        )


def part_of(
    rows: Blocks,
    names: Sequence[bytes],
    parents: Sequence[bytes],
    pinned_until: Sequence[float],
    kinds: Sequence[Kind],
) -> dict[str, Any]:
    """Return a part of what an engine tells.

    Args:
        rows: of blocks that are in VRAM or host memory, without their keys.
        names: of the same blocks, all of the same length.
        parents: the names of the blocks before them.
        pinned_until: until when they are evicted last.
        kinds: by their numbers in the rows.
    """
    return {
        "num_blocks": len(rows),
        "rows": rows.tobytes(),
        "names": b"".join(names),
        "parents": b"".join(parents),
        "pinned_until": np.array(pinned_until, np.float64).tobytes(),
        "kinds": kinds,
    }


def chains_of(worker: Worker, in_ram: RamBlocks, *, settled: bool = False) -> tuple[Chains, float]:
    """See which chains there are in all tiers, and what time it is.

    Args:
        worker: tells what is on disk.
        in_ram: what VRAM and host memory hold.
        settled: see `Worker.rows`.
    """
    on_disk, now = scan(worker, settled=settled)
    return Chains(on_disk.unexpired(now).joined(in_ram.table.unexpired(now))), now
