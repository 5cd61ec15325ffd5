"""All chains of a store in columns, so that no Python object is made for one that is not listed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tieredkv.operate.chain_ids import chain_id
from tieredkv.operate.chains import Chains, Mask
from tieredkv.operate.filters import LABELS, Condition, Order
from tieredkv.operate.infos import ChainInfo
from tieredkv.operate.models import KnownModels
from tieredkv.operate.table import TIER_BITS, starts_in
from tieredkv.types import Tier

PAGE_CHAINS = 256
_TIERS = [[tier for tier, bit in TIER_BITS.items() if code & bit] for code in range(8)]

Column = NDArray[Any]
"""[num_chains]; of floats NaN where a value is not known."""


class Labels(NamedTuple):
    """One of a few values for each chain.

    Attributes:
        codes: [num_chains], the place of each chain's value in `names`.
        names: the values.
    """

    codes: NDArray[np.integer]
    names: Sequence[Any]


_SUMS: Mapping[str, tuple[str, np.ufunc, type[Any]]] = {
    "bytes": ("size_bytes", np.add, np.int64),
    "stored_bytes": ("payload_bytes", np.add, np.int64),
    "computed_at_min": ("computed_at", np.minimum, np.float64),
    "computed_at_max": ("computed_at", np.maximum, np.float64),
    "expires_at_min": ("expires_at", np.minimum, np.float64),
    "last_used_max": ("last_used", np.maximum, np.float64),
}
"""What is combined over the blocks of a chain: a field of theirs, how, and the type of the sums."""


class ChainColumns:
    """All chains, those whose last block was used last first; see `ChainInfo`.

    A column is worked out when it is asked for, as all of them would take more memory than the
    blocks. What is summed up over whole chains is kept, once for all chains that share a run.

    Args:
        chains: of all blocks.
        models: name the chains.
    """

    def __init__(self, chains: Chains, models: KnownModels) -> None:
        self._chains, self._run = chains, chains.run[chains.leaves]
        self._known = [models.of(kind.root, kind.namespace) for kind in chains.kinds]
        self._owners = [
            {"namespace": it.namespace.hex(), "root": it.root.hex(), "retention": it.retention}
            for it in chains.kinds
        ]
        self._sums = dict[str, Column]()  # of each run: over its blocks and all before them

    def values(self, field: str, now: float) -> Column | Labels:
        """Return a field of all chains; see `filters.FIELDS`."""
        blocks, kinds = self._chains.blocks, self._chains.kinds

        def of_last(name: str) -> Column:
            return np.asarray(blocks[name][self._chains.leaves])

        def of_all(name: str) -> Column:
            return np.asarray(self._of_runs(name)[self._run])

        match field:
            case "tier":
                bits = (np.uint8(bit) * (of_all(tier) > 0) for tier, bit in TIER_BITS.items())
                return Labels(sum(bits, np.zeros(len(self._run), np.uint8)), _TIERS)
            case "ns":
                return Labels(of_last("kind"), [kind.namespace.hex() for kind in kinds])
            case "model":
                return Labels(of_last("kind"), [it.name if it else "" for it in self._known])
            case "retention":
                return Labels(of_last("kind"), [kind.retention for kind in kinds])
            case "size":
                return of_all("bytes")
            case "tokens":
                sizes = [it.block_size if it else np.nan for it in self._known]
                return np.array(sizes, np.float64)[of_last("kind")] * of_all("blocks")
            case "blocks":
                return of_all("blocks")
            case "hits":
                return np.asarray(blocks["hits"][self._chains.heads[self._run]])
            case "age":
                return now - of_all("computed_at_min")
            case "idle":
                return now - of_last("last_used")
            case "expires":
                return of_all("expires_at_min") - now
        raise AssertionError(f"`{field}` is no field")

    def matching(self, conditions: Sequence[Condition], now: float) -> Mask:
        """Return which chains meet all conditions; not those whose value is not known."""
        is_match = np.ones(len(self._run), bool)
        for field, compare, value in conditions:
            values = self.values(field, now)
            if isinstance(values, Labels):
                equal = [LABELS[field](name, value) for name in values.names]
                is_match &= compare(np.array(equal, bool), True)[values.codes]
            else:
                is_match &= compare(values, value) & ~np.isnan(values)
        return is_match

    def places(self, order: Order, now: float) -> NDArray[np.intp]:
        """Return the places of all chains in an order; equal ones stay in theirs."""
        if not order.field:
            return np.arange(len(self._run))
        values = self.values(order.field, now)
        if isinstance(values, Labels):
            ranks = {repr(name): rank for rank, name in enumerate(sorted(values.names))}
            values = np.array([ranks[repr(name)] for name in values.names] or [0])[values.codes]
        return np.argsort(order.sign * np.asarray(values, np.float64), kind="stable")

    def listed(
        self, conditions: Sequence[Condition], order: Order, limit: int | None, now: float
    ) -> Iterator[list[ChainInfo]]:
        """Yield the chains that meet all conditions, in an order, by pages."""
        places = self.places(order, now)
        places = places[self.matching(conditions, now)[places]][:limit]
        for start in range(0, len(places), PAGE_CHAINS):
            yield self._infos(places[start : start + PAGE_CHAINS])

    def _infos(self, places: NDArray[np.intp]) -> list[ChainInfo]:
        """Describe the chains in some places."""
        run, last = self._run[places], self._chains.blocks[self._chains.leaves[places]]
        first = self._chains.blocks[self._chains.heads[run]]
        columns = {
            "blocks": self._of_runs("blocks")[run],
            "last_position": last["position"],
            "last_used": last["last_used"],
            "hits": first["hits"],
            **{name: self._of_runs(name)[run] for name in _SUMS},
        }
        ids = map(chain_id, starts_in(first), starts_in(last))
        held = zip(*(self._of_runs(tier)[run].tolist() for tier in Tier), strict=True)
        values = zip(*(column.tolist() for column in columns.values()), strict=True)
        infos = list[ChainInfo]()
        for id_, kind, in_tiers, some in zip(ids, last["kind"].tolist(), held, values, strict=True):
            model, fields = self._known[kind], dict(zip(columns, some, strict=True))
            infos.append(
                ChainInfo(
                    id=id_,
                    model=model.name if model else None,
                    tokens=model.block_size * fields["blocks"] if model else None,
                    blocks_by_tier=dict(zip(Tier, in_tiers, strict=True)),
                    **self._owners[kind],
                    **fields,
                )
            )
        return infos

    def _of_runs(self, name: str) -> Column:
        """Return for each run what is combined over its blocks and all before them.

        The name is one of `_SUMS`, "blocks" for their number, or a tier for those that it has.
        """
        if name not in self._sums:
            blocks = self._chains.blocks
            if name in _SUMS:
                field, combine, dtype = _SUMS[name]
                values = blocks[field]
            else:
                combine, dtype, values = np.add, np.uint32, np.ones(len(blocks), np.uint8)
                if name != "blocks":
                    values = blocks["tiers"] & np.uint8(TIER_BITS[Tier(name)]) > 0
            self._sums[name] = self._chains.totals(values, combine, dtype)
        return self._sums[name]
