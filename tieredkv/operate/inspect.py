"""`inspect`: a chain block by block, or what the tiers have of a prompt.

The blocks before a block are found by the names in the records, so that no walk over the index is
needed. A walk is needed to find the blocks behind one.
"""

from collections.abc import Generator, Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

from tieredkv.errors import ConfigError, NoServerError, UnknownIdError
from tieredkv.operate.calls import Inspect, Ls
from tieredkv.operate.chain_ids import ID_HINT, named_blocks
from tieredkv.operate.evict import choose, names_of
from tieredkv.operate.infos import BlockInfo
from tieredkv.operate.ls import chains_of
from tieredkv.operate.ram import RamBlocks
from tieredkv.operate.table import scan
from tieredkv.operate.worker import Worker, only, silent_engine
from tieredkv.storage.format.planes import codec_name
from tieredkv.storage.format.record import Located
from tieredkv.types import Tier

Known = dict[str, BlockInfo]
"""Blocks by their hash in hex."""


def described(located: Located) -> BlockInfo:
    """Describe a block on disk."""
    codec = codec_name(located.codec)
    return BlockInfo.of(
        located.record, [Tier.DISK], stored_bytes=located.payload_bytes, codec=codec
    )


def add(known: Known, found: Iterable[BlockInfo]) -> None:
    """Add copies of blocks to those that are known; a block is as old as its oldest copy."""
    for info in found:
        if (one := known.get(info.block_hash)) is None:
            known[info.block_hash] = info
            continue
        ends = max(one, info, key=lambda each: each.expires_at)
        on_disk = one if one.codec is not None else info
        known[info.block_hash] = replace(
            ends,
            tiers=[tier for tier in Tier if tier in (*one.tiers, *info.tiers)],
            stored_bytes=on_disk.stored_bytes,
            codec=on_disk.codec,
            computed_at=min(one.computed_at, info.computed_at),
            last_used=max(one.last_used, info.last_used),
            pinned_until=max(one.pinned_until, info.pinned_until),
            hits=max(one.hits, info.hits),
        )


def missing_parents(known: Known) -> list[bytes]:
    """Return the blocks that precede known ones and are not known themselves."""
    parents = {info.parent_hash for info in known.values() if info.position}
    return [bytes.fromhex(parent) for parent in sorted(parents - known.keys())]


def in_order(blocks: Iterable[BlockInfo]) -> list[BlockInfo]:
    """Return blocks as a tree is printed: each one before those behind it, branch by branch."""
    children: dict[str, list[BlockInfo]] = {}
    by_position = sorted(blocks, key=lambda each: (-each.position, each.block_hash))
    for info in by_position:
        children.setdefault(info.parent_hash, []).append(info)
    known = {info.block_hash for info in by_position}
    waiting = [info for info in by_position if info.parent_hash not in known]
    ordered = list[BlockInfo]()
    while waiting:
        ordered.append(waiting.pop())
        waiting += children.get(ordered[-1].block_hash, [])
    return ordered


_PAGE_BLOCKS = 4096


def inspect(call: Inspect, worker: Worker) -> Generator[list[BlockInfo], None, dict[str, Any]]:
    """Yield the blocks of a chain, or those of some names; or return the report on a prompt."""
    if call.prompt is not None:
        return _report(call, worker)
    rest = dict[str, Any]()
    if call.names:
        blocks = list(map(described, worker.find(call.names)))
        if not any(info.block_hash == call.names[0].hex() for info in blocks):
            rest = {"roots": _roots(worker)}
    else:
        blocks = in_order(_chain(call, worker).values())
    worker.let_go()
    for start in range(0, len(blocks), _PAGE_BLOCKS):
        yield blocks[start : start + _PAGE_BLOCKS]
    return rest


def _report(call: Inspect, worker: Worker) -> dict[str, Any]:
    """Have the engine report on a prompt.

    Raises:
        NoServerError: no server is there to tokenize it.
        ConfigError: the server refuses the prompt.
    """
    answer = only(worker.ask_engine(call))
    if (answer.get("diverges_at"), answer.get("reason")) == (0, "never_seen"):
        answer = only(worker.ask_engine(call, roots=_roots(worker)))
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    if "reason" not in answer:
        raise NoServerError("no server answers that could tokenize the prompt")
    return answer


def _roots(worker: Worker) -> dict[bytes, bytes]:
    return {kind.root: kind.namespace for kind in scan(worker).table.kinds}


def _chain(call: Inspect, worker: Worker) -> Known:
    """Find the blocks of a chain in every tier.

    Raises:
        UnknownIdError: the id names none.
    """
    first, last = named_blocks(call.id) or ("", "")
    known: Known = {}
    if not call.following:
        digits = last or first
        start = bytes.fromhex(digits[: len(digits) // 2 * 2])
        found = [each.record.block_hash for each in worker.find([start])]
        named = [name for name in found if name.hex().startswith(digits)]
        known = _climb(call, named, worker)
    if not known and (call.following or last):
        in_ram = RamBlocks.of(worker.ask_engine(Ls()))
        behind = choose(chains_of(worker, in_ram)[0], (call.id,)).following
        names = names_of(behind, in_ram, worker)
        known = _climb(replace(call, following=True), names, worker)
    if not known:
        raise UnknownIdError(f"no chain has the id `{call.id}`\nhint: {ID_HINT}")
    return known


def _climb(call: Inspect, starts: Iterable[bytes], worker: Worker) -> Known:
    """Find blocks and all before them.

    A tier may lack a block in the middle of a chain that another one has. So each tier is asked for
    what the others have told of, until nothing new is told.

    Raises:
        StoreUnreachableError: the engine did not answer.
    """
    known: Known = {}
    told, wanted = set[bytes](), set(starts)
    while True:
        on_disk = list(map(described, worker.find([*(wanted - told)], climbs=True)))
        told |= wanted
        add(known, on_disk)
        told.update(bytes.fromhex(info.block_hash) for info in on_disk)
        in_ram = list[BlockInfo]()
        for part in worker.ask_engine(call, [*told, *missing_parents(known)]):
            if "engine" in part:
                raise silent_engine()
            in_ram += msgspec.convert(part.get("blocks", []), list[BlockInfo])
        add(known, in_ram)
        wanted = {*map(bytes.fromhex, known), *missing_parents(known)}
        if wanted <= told:
            return known
