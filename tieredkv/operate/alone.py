"""Verbs of a server without a disk tier, made of what its engine has told."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tieredkv.errors import UnknownIdError
from tieredkv.operate.ask import Asking
from tieredkv.operate.calls import Call, EvictFilter, Inspect, Ls
from tieredkv.operate.chains import Chains
from tieredkv.operate.columns import ChainColumns
from tieredkv.operate.infos import BlockInfo, ChainInfo
from tieredkv.operate.inspect import in_order
from tieredkv.operate.ls import listing
from tieredkv.operate.models import KnownModel, KnownModels
from tieredkv.operate.ram import RamBlocks


def pages(call: Call, told: Sequence[dict[str, Any]]) -> Asking:
    """Yield the list that `Ls` answers with, or `Inspect` of an id.

    Args:
        call: the verb.
        told: all that the engine has told.

    Raises:
        UnknownIdError: the id names no block.
    """
    if isinstance(call, Ls):
        yield from _list(call, told)
    elif isinstance(call, Inspect):
        blocks = [block for part in told for block in part.get("blocks", ())]
        if call.id and not blocks:
            raise UnknownIdError(f"no chain has the id `{call.id}`")
        yield in_order(msgspec.convert(blocks, list[BlockInfo]))
    return {}


def answer(call: Call, told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the ids of the chains that an eviction by a filter is about.

    Args:
        call: the eviction.
        told: all that the engine has told of its blocks.
    """
    assert isinstance(call, EvictFilter), "the engine answers all others itself"
    return {"ids": call.of_listed(_list(Ls(filter=call.filter), told)).ids}


def _list(call: Ls, told: Sequence[dict[str, Any]]) -> Iterator[list[ChainInfo]]:
    first, *parts = told
    now, model = first["now"], msgspec.convert(first["model"], KnownModel)
    chains = Chains(*RamBlocks.of(parts).table.unexpired(now))
    yield from listing(ChainColumns(chains, KnownModels([model])), call, now)
