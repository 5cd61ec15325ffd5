"""Shows a chain block by block, for an operator: the blocks before a named one, and those behind.

The blocks before a block are found by the hashes in the records, so that no walk over the index is
needed. A walk is needed to find the blocks behind one.
"""

from collections.abc import Generator, Iterable, Sequence

from msgspec.structs import replace

from tieredkv.operate.inspection import named_hashes
from tieredkv.storage.format.planes import codec_name
from tieredkv.storage.format.record import Located
from tieredkv.storage.index_txn import TXN_BLOCKS, IndexTxn, batches
from tieredkv.storage.lmdb_store import BlockStore
from tieredkv.storage.results import BlockInfo
from tieredkv.types import Tier

Blocks = dict[str, BlockInfo]
"""Blocks by their hash in hex."""


def described(located: Located) -> BlockInfo:
    """Describe a block on disk."""
    codec = codec_name(located.codec)
    return BlockInfo.of(
        located.record, [Tier.DISK], stored_bytes=located.payload_bytes, codec=codec
    )


def add(known: Blocks, found: Iterable[BlockInfo]) -> None:
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


def missing_parents(known: Blocks) -> list[bytes]:
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


def naming(store: BlockStore, digits: str) -> Generator[None, None, list[bytes]]:
    """Find the blocks on disk whose hash starts with these hex digits."""
    with store.index.reading() as txn:
        found = list(named_hashes(txn, digits))
    yield
    return found


def climbing(store: BlockStore, starts: Iterable[bytes]) -> Generator[None, None, list[BlockInfo]]:
    """Describe some blocks on disk, and all before them up to the first hole, in steps."""
    found, waiting, now = dict[bytes, BlockInfo](), list(starts), store.clock.now()
    while waiting:
        with store.index.reading() as txn:
            for _ in range(min(TXN_BLOCKS, len(waiting))):
                block_hash = waiting.pop()
                if block_hash in found or (located := _read(txn, block_hash, now)) is None:
                    continue
                found[block_hash] = described(located)
                if located.record.position:
                    waiting.append(located.record.parent_hash)
        yield
    return list(found.values())


def reading(store: BlockStore, hashes: Sequence[bytes]) -> Generator[None, None, list[BlockInfo]]:
    """Describe those of some blocks that are on disk, in steps."""
    found, now = list[BlockInfo](), store.clock.now()
    for some in batches(hashes):
        with store.index.reading() as txn:
            found += map(described, filter(None, (_read(txn, each, now) for each in some)))
        yield
    return found


def _read(txn: IndexTxn, block_hash: bytes, now: float) -> Located | None:
    """Return what the index says of a block; None if it has none that may still be served."""
    located = txn.sound(block_hash)
    return located if located is not None and now < located.record.expires_at else None
