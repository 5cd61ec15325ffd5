"""All chains of a store in columns, so that no Python object is made for one that is not listed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tieredkv.operate.chains import Chains
from tieredkv.operate.models import KnownModels
from tieredkv.operate.table import TIER_BITS
from tieredkv.storage.results import ChainInfo
from tieredkv.types import Tier

_TIERS = [[tier for tier, bit in TIER_BITS.items() if code & bit] for code in range(8)]

_HELD = ("in_device", "in_host", "on_disk")

Column = NDArray[Any]
"""[num_chains]."""


class Labels(NamedTuple):
    """One of a few values for each chain.

    Attributes:
        codes: [num_chains], the place of each chain's value in `names`.
        names: the values.
    """

    codes: NDArray[np.integer]
    names: Sequence[Any]


class ChainColumns(NamedTuple):
    """All chains, those whose last block was used last first; see `ChainInfo`.

    Attributes:
        ids: the numbers whose digits make an id: [num_chains, 4].
    """

    ids: Column
    namespace: Labels
    root: Labels
    model: Labels
    retention: Labels
    tiers: Labels
    tokens: Column
    blocks: Column
    in_device: Column
    in_host: Column
    on_disk: Column
    last_position: Column
    bytes: Column
    stored_bytes: Column
    computed_at_min: Column
    computed_at_max: Column
    expires_at_min: Column
    last_used: Column
    last_used_max: Column
    hits: Column

    @classmethod
    def of(cls, chains: Chains, models: KnownModels) -> "ChainColumns":
        """Sum up all chains.

        Args:
            chains: of all blocks.
            models: name the chains.
        """
        blocks, run = chains.blocks, chains.run[chains.leaves]
        last, first = blocks[chains.leaves], blocks[chains.heads[run]]

        def total(values: NDArray[Any], combine: np.ufunc = np.add) -> Column:
            values = values.astype(np.int64 if combine is np.add else np.float64)
            return np.asarray(chains.totals(values, combine)[run])

        num_blocks = total(np.ones(len(blocks)))
        held = {bit: total(blocks["tiers"] & bit > 0) for bit in TIER_BITS.values()}
        tiers = np.sum([(num > 0) * bit for bit, num in held.items()], axis=0)
        known = [models.of(kind.root, kind.namespace) for kind in chains.kinds]
        block_sizes = np.array([it.block_size if it else np.nan for it in known], np.float64)
        kinds = last["kind"]
        ends = (first["key"], first["key_rest"], last["key"], last["key_rest"])
        return cls(
            ids=np.stack(ends, axis=1),
            namespace=Labels(kinds, [kind.namespace.hex() for kind in chains.kinds]),
            root=Labels(kinds, [kind.root.hex() for kind in chains.kinds]),
            model=Labels(kinds, [it.name if it else "" for it in known]),
            retention=Labels(kinds, [kind.retention for kind in chains.kinds]),
            tiers=Labels(tiers, _TIERS),
            tokens=block_sizes[kinds] * num_blocks,
            blocks=num_blocks,
            **dict(zip(_HELD, held.values(), strict=True)),
            last_position=last["position"],
            bytes=total(blocks["size_bytes"]),
            stored_bytes=total(blocks["payload_bytes"]),
            computed_at_min=total(blocks["computed_at"], np.minimum),
            computed_at_max=total(blocks["computed_at"], np.maximum),
            expires_at_min=total(blocks["expires_at"], np.minimum),
            last_used=last["last_used"],
            last_used_max=total(blocks["last_used"], np.maximum),
            hits=first["hits"],
        )

    def infos(self, places: NDArray[np.intp]) -> list[ChainInfo]:
        """Return the chains in some places."""
        columns: dict[str, Sequence[Any]] = {}
        for name, column in self._asdict().items():
            if isinstance(column, Labels):
                columns[name] = [column.names[code] for code in column.codes[places].tolist()]
            else:
                columns[name] = column[places].tolist()
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        return list(map(_info, rows))


def _info(row: dict[str, Any]) -> ChainInfo:
    """Make a description of the values in a row of the columns."""
    ids = [f"{number:016x}" for number in row.pop("ids")]
    held = {tier: row.pop(name) for tier, name in zip(Tier, _HELD, strict=True)}
    tokens, model = row.pop("tokens"), row.pop("model")
    del row["tiers"]
    return ChainInfo(
        id=f"{ids[0]}{ids[1]}-{ids[2]}{ids[3]}",
        model=model or None,
        tokens=None if np.isnan(tokens) else int(tokens),
        blocks_by_tier=held,
        **row,
    )
