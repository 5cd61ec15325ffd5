"""`ls`: the chains of all tiers."""

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from tieredkv.operate.calls import Ls
from tieredkv.operate.chains import Chains
from tieredkv.operate.columns import ChainColumns
from tieredkv.operate.filters import ChainFilter, Order
from tieredkv.operate.infos import ChainInfo
from tieredkv.operate.models import KnownModels, read_models
from tieredkv.operate.ram import RamBlocks
from tieredkv.operate.table import scan
from tieredkv.operate.worker import Worker
from tieredkv.storage.messages.operator import NO_ANSWER

PAGE_CHAINS = 256


def ls(call: Ls, worker: Worker) -> Generator[list[ChainInfo], None, dict[str, Any]]:
    """Yield the chains that are asked for, by pages; tell whether some of the engine's may lack.

    The worker is let go before the first page, since nobody knows when the next one is asked for.
    """
    in_ram = RamBlocks.of(worker.ask_engine(Ls()))
    chains, now = chains_of(worker, in_ram)
    columns = columns_of(chains, worker)
    worker.let_go()
    yield from listing(columns, call, now)
    return {} if in_ram.is_told else {**NO_ANSWER}


def chains_of(worker: Worker, in_ram: RamBlocks, *, settled: bool = False) -> tuple[Chains, float]:
    """See which chains there are in all tiers, and what time it is."""
    on_disk, now = scan(worker, settled=settled)
    return Chains(*on_disk.unexpired(now).joined(in_ram.table.unexpired(now))), now


def columns_of(chains: Chains, worker: Worker) -> ChainColumns:
    """Sum up all chains."""
    return ChainColumns(chains, KnownModels(read_models(worker.path)))


def listing(columns: ChainColumns, call: Ls, now: float) -> Iterator[list[ChainInfo]]:
    """Yield the chains that `Ls` asks for, by pages."""
    is_match = ChainFilter(call.filter).matches(columns, now)
    places = Order(call.sort).places(columns, now) if call.sort else np.arange(len(is_match))
    places = places[is_match[places]][: call.limit]
    for start in range(0, len(places), PAGE_CHAINS):
        yield columns.infos(places[start : start + PAGE_CHAINS])
