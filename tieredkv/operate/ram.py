"""The blocks that VRAM and host memory hold, as an engine tells of them by their names.

An engine tells of its blocks in parts, since it makes them between its steps: by records as those
on disk, but without seals. This module knows neither the engine nor the index.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieredkv.operate.chains import Chains, Mask
from tieredkv.operate.infos import BlockInfo
from tieredkv.operate.table import (
    RECORD,
    START_BYTES,
    BlockTable,
    TableReader,
    described,
    digest_in,
    places_named,
    scan,
)
from tieredkv.operate.worker import Worker

RamPart = Mapping[str, Any]
"""Some blocks, in a form that fits into a message; empty from an engine that tells of none.

`records` has them side by side, `tiers` their sums of `TIER_BITS`, and `retentions` the names of
retention policies by their numbers, of this part and of those before.
"""


class RamBlocks:
    """Which blocks VRAM and host memory hold; a part with `engine` is that of a silent engine.

    Attributes:
        table: of the blocks.
        is_told: whether the engine has told all of them; it may be silent.
    """

    def __init__(self, parts: Iterable[RamPart]) -> None:
        reader, self.is_told = TableReader(), True
        for part in parts:
            self.is_told &= "engine" not in part
            if "records" in part:
                tiers = np.frombuffer(part["tiers"], np.uint8)
                reader.add(part["records"], part["retentions"], tiers)
        blocks, kinds = reader.table
        blocks = blocks[blocks["tiers"] > 0]
        self.table = BlockTable(blocks[np.lexsort((blocks["key_rest"], blocks["key"]))], kinds)

    def holds(self, keys: NDArray[np.uint64]) -> Mask:
        """Return which of these keys are those of blocks in VRAM or host memory."""
        return np.isin(keys, self.table.blocks["key"])


class RamRecords(RamBlocks):
    """All that is known of the blocks that VRAM and host memory hold."""

    def __init__(self, parts: Sequence[RamPart]) -> None:
        super().__init__(parts)
        told = [part for part in parts if "records" in part]
        self._rows = np.frombuffer(b"".join(part["records"] for part in told), RECORD)
        self._tiers = b"".join(part["tiers"] for part in told)
        self._retentions = told[-1]["retentions"] if told else ()
        keys, rests = self._rows["block_hash"][:, :2].astype(np.uint64).T
        self._order = np.lexsort((rests, keys))
        self._keys, self._rests = keys[self._order], rests[self._order]

    def named(self, digits: str) -> list[bytes]:
        """Return the names that start with these hex digits, of which 32 count."""
        return [digest_in(self._rows[place], "block_hash") for place in self._places(digits)]

    def up_from(self, names: Iterable[bytes], now: float) -> list[BlockInfo]:
        """Describe blocks and all before them, up to the first that is not here or has expired.

        A block is given by its name or the first bytes of this.
        """
        infos, waiting = dict[int, BlockInfo](), [*names]
        while waiting:
            for place in self._places(waiting.pop()[:START_BYTES].hex()):
                row = self._rows[place]
                if place in infos or row["expires_at"] <= now or not self._tiers[place]:
                    continue
                infos[place] = described(row, self._retentions, self._tiers[place])
                if row["position"]:
                    waiting.append(digest_in(row, "parent_hash"))
        return [*infos.values()]

    def _places(self, digits: str) -> list[int]:
        places = places_named(self._keys, self._rests, digits)
        return list(map(int, self._order[places]))


def chains_of(worker: Worker, in_ram: RamBlocks, *, settled: bool = False) -> tuple[Chains, float]:
    """See which chains there are in all tiers, and what time it is; see `Scan`."""
    on_disk, now = scan(worker, settled=settled)
    return Chains(on_disk.unexpired(now).joined(in_ram.table.unexpired(now))), now
