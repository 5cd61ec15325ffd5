"""The list of chains that `Ls` asks for."""

from collections.abc import Iterator

import numpy as np

from tieredkv.operate.calls import Ls
from tieredkv.operate.columns import ChainColumns
from tieredkv.operate.filters import ChainFilter, Order
from tieredkv.storage.results import ChainInfo

PAGE_CHAINS = 256


def listing(columns: ChainColumns, call: Ls, now: float) -> Iterator[list[ChainInfo]]:
    """Yield the chains that `Ls` asks for, by pages."""
    is_match = ChainFilter(call.filter).matches(columns, now)
    places = Order(call.sort).places(columns, now) if call.sort else np.arange(len(is_match))
    places = places[is_match[places]][: call.limit]
    for start in range(0, len(places), PAGE_CHAINS):
        yield columns.infos(places[start : start + PAGE_CHAINS])
