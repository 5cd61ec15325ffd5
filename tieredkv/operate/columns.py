"""All chains of a store in columns, so that no Python object is made for one that is not listed."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tieredkv.operate.chains import Chains
from tieredkv.operate.infos import ChainInfo
from tieredkv.operate.models import KnownModels
from tieredkv.operate.table import TIER_BITS
from tieredkv.types import Tier

_TIERS = [[tier for tier, bit in TIER_BITS.items() if code & bit] for code in range(8)]

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


class _Total(NamedTuple):
    """What is combined over the blocks of a chain: a field of theirs, how, and the sums' type."""

    field: str
    combine: np.ufunc
    dtype: type[Any]


_TOTALS: Mapping[str, _Total] = {
    "bytes": _Total("size_bytes", np.add, np.int64),
    "stored_bytes": _Total("payload_bytes", np.add, np.int64),
    "computed_at_min": _Total("computed_at", np.minimum, np.float64),
    "computed_at_max": _Total("computed_at", np.maximum, np.float64),
    "expires_at_min": _Total("expires_at", np.minimum, np.float64),
    "last_used_max": _Total("last_used", np.maximum, np.float64),
}


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
        self._totals = dict[str, Column]()  # of each run: over its blocks and all before them

    def __len__(self) -> int:
        return len(self._run)

    @property
    def namespace(self) -> Labels:
        """Namespaces in hex."""
        return Labels(self._last("kind"), [kind.namespace.hex() for kind in self._chains.kinds])

    @property
    def model(self) -> Labels:
        """Names of models; "" where one is not known."""
        return Labels(self._last("kind"), [it.name if it else "" for it in self._known])

    @property
    def retention(self) -> Labels:
        """Retention policies of the last blocks."""
        return Labels(self._last("kind"), [kind.retention for kind in self._chains.kinds])

    @property
    def tiers(self) -> Labels:
        """The tiers that have some of a chain."""
        codes = np.zeros(len(self._chains.heads), np.uint8)
        for tier, bit in TIER_BITS.items():
            codes |= np.uint8(bit) * (self._held(tier) > 0)
        return Labels(codes[self._run], _TIERS)

    @property
    def tokens(self) -> Column:
        """Tokens; NaN where the model is not known."""
        sizes = np.array([it.block_size if it else np.nan for it in self._known], np.float64)
        return np.asarray(sizes[self._last("kind")] * self.blocks)

    @property
    def blocks(self) -> Column:
        """Numbers of blocks."""
        return np.asarray(self._num_blocks[self._run])

    @property
    def bytes(self) -> Column:
        """Sizes of the blocks."""
        return np.asarray(self._total("bytes")[self._run])

    @property
    def computed_at_min(self) -> Column:
        """When the oldest blocks were computed."""
        return np.asarray(self._total("computed_at_min")[self._run])

    @property
    def expires_at_min(self) -> Column:
        """When the first blocks expire."""
        return np.asarray(self._total("expires_at_min")[self._run])

    @property
    def last_used(self) -> Column:
        """When the last blocks were used."""
        return self._last("last_used")

    @property
    def hits(self) -> Column:
        """How often the first own blocks were found."""
        return np.asarray(self._chains.blocks["hits"][self._chains.heads[self._run]])

    def infos(self, places: NDArray[np.intp]) -> list[ChainInfo]:
        """Return the chains in some places."""
        chains, run = self._chains, self._run[places]
        blocks, last, first = chains.blocks, chains.leaves[places], chains.heads[run]
        rows = zip(
            *(blocks[name][at].tolist() for at in (first, last) for name in ("key", "key_rest")),
            *(blocks[name][last].tolist() for name in ("kind", "position", "last_used")),
            blocks["hits"][first].tolist(),
            self._num_blocks[run].tolist(),
            zip(*(self._held(tier)[run].tolist() for tier in Tier), strict=True),
            zip(*(self._total(name)[run].tolist() for name in _TOTALS), strict=True),
            strict=True,
        )
        return [self._info(*row) for row in rows]

    def _info(
        self,
        first: int,
        first_rest: int,
        end: int,
        end_rest: int,
        kind: int,
        position: int,
        last_used: float,
        hits: int,
        num_blocks: int,
        held: Sequence[int],
        totals: Sequence[Any],
    ) -> ChainInfo:
        """Make a description of the values of one chain."""
        model, what = self._known[kind], self._chains.kinds[kind]
        return ChainInfo(
            id=f"{first:016x}{first_rest:016x}-{end:016x}{end_rest:016x}",
            namespace=what.namespace.hex(),
            root=what.root.hex(),
            blocks=num_blocks,
            last_position=position,
            model=model.name if model else None,
            tokens=model.block_size * num_blocks if model else None,
            blocks_by_tier=dict(zip(Tier, held, strict=True)),
            retention=what.retention,
            last_used=last_used,
            hits=hits,
            **dict(zip(_TOTALS, totals, strict=True)),
        )

    def _last(self, name: str) -> Column:
        """Return a field of the last block of each chain."""
        return np.asarray(self._chains.blocks[name][self._chains.leaves])

    def _total(self, name: str) -> Column:
        if name not in self._totals:
            field, combine, dtype = _TOTALS[name]
            values = self._chains.blocks[field]
            self._totals[name] = self._chains.totals(values, combine, dtype)
        return self._totals[name]

    @property
    def _num_blocks(self) -> Column:
        if "blocks" not in self._totals:
            ones = np.ones(len(self._chains), np.uint8)
            self._totals["blocks"] = self._chains.totals(ones, np.add, np.uint32)
        return self._totals["blocks"]

    def _held(self, tier: Tier) -> Column:
        """Return for each run how many blocks a tier has."""
        if tier not in self._totals:
            is_held = self._chains.blocks["tiers"] & np.uint8(TIER_BITS[tier]) > 0
            self._totals[tier] = self._chains.totals(is_held, np.add, np.uint32)
        return self._totals[tier]
