"""What an operator does with a store: read its blocks, evict some, verify them.

What reads or changes the store is a generator that works in short steps, so that other work can go
on in between. Blocks may come and go between two steps. The store itself drops and repairs blocks;
this module only chooses them.
"""

import random
from collections.abc import Generator, Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import NamedTuple

import numpy as np

from tieredkv.errors import CorruptBlockError, StorageError
from tieredkv.operate.calls import EvictFilter
from tieredkv.operate.chains import Chains
from tieredkv.operate.ram import RamBlocks
from tieredkv.operate.table import TIER_BITS, Blocks, BlockTable, TableReader
from tieredkv.storage.format.planes import aligned_buffer
from tieredkv.storage.format.record import Located, padded_bytes
from tieredkv.storage.index_txn import TXN_BLOCKS, IndexTxn, batches
from tieredkv.storage.lmdb_store import BlockStore, reason_of
from tieredkv.storage.results import EvictResult, NamespaceUse, VerifyResult, named_blocks
from tieredkv.types import Tier

_READ_ENTRIES = 4096  # how many entries one step of `gathering` reads


def gathering(store: BlockStore) -> Generator[None, None, BlockTable]:
    """Read all blocks, in steps. Blocks that come or go meanwhile may be in the table or not."""
    reader, start = TableReader(store.index.retentions), b""
    while True:
        with store.index.reading() as txn:
            entries = txn.records(start, _READ_ENTRIES)
        if not entries:
            return reader.table
        reader.add(entries)
        start = entries[-1][0] + b"\0"
        yield


def adding_up(table: BlockTable) -> list[NamespaceUse]:
    """Add up the blocks of each model in each namespace, the largest first."""
    uses, num_kinds = dict[tuple[bytes, bytes], NamespaceUse](), len(table.kinds)
    numbers = table.blocks["kind"]
    nums = np.bincount(numbers, minlength=num_kinds)
    sizes = np.bincount(numbers, table.blocks["size_bytes"], num_kinds)
    last_used = np.zeros(num_kinds)
    np.maximum.at(last_used, numbers, table.blocks["last_used"])
    columns = (nums.tolist(), sizes.tolist(), last_used.tolist())
    for (root, namespace, _), num, size, used in zip(table.kinds, *columns, strict=True):
        new = NamespaceUse(namespace=namespace.hex(), root=root.hex())
        use = uses.setdefault((namespace, root), new)
        use.blocks += num
        use.bytes += int(size)
        use.last_used = max(use.last_used, used)
    found = [use for use in uses.values() if use.blocks]
    return sorted(found, key=lambda use: (-use.bytes, use.root))


class Chosen(NamedTuple):
    """The blocks that an eviction is about, by their hashes.

    Attributes:
        following: with ids, the named blocks and what follows them, on disk those behind others
            first.
        before: blocks before them that no other chain uses.
        unknown_ids: ids that name no block.
    """

    following: Sequence[bytes] = ()
    before: Sequence[bytes] = ()
    unknown_ids: tuple[str, ...] = ()


NOTHING_CHOSEN = Chosen()


def finding(
    store: BlockStore, chains: Chains, in_ram: RamBlocks, ids: Sequence[str]
) -> Generator[None, None, tuple[list[int], list[str]]]:
    """Find the places of the blocks that ids name, and the ids that name none, in steps."""
    places, unknown_ids = list[int](), list[str]()
    for id_ in ids:
        with store.index.reading() as txn:
            named = _seeds(txn, chains, in_ram, id_)
        places += named
        unknown_ids += [] if named else [id_]
        yield
    return places, unknown_ids


def _seeds(txn: IndexTxn, chains: Chains, in_ram: RamBlocks, id_: str) -> list[int]:
    """The places of the blocks that an id names, but for those before another of them.

    Its last block says which chain is meant. Its first one is needed where that is gone, or cut off
    by a hole.
    """
    names = named_blocks(id_)
    if names is None:
        return []
    firsts, lasts = (_named(txn, chains, in_ram, digits) if digits else [] for digits in names)
    return [
        *lasts,
        *(first for first in firsts if not any(chains.leads_to(first, last) for last in lasts)),
    ]


def _named(txn: IndexTxn, chains: Chains, in_ram: RamBlocks, digits: str) -> list[int]:
    """The places of the blocks whose hash starts with these hex digits."""
    hashes = dict.fromkeys([*named_hashes(txn, digits), *in_ram.named(digits)])
    return [place for place in map(chains.find, hashes) if place is not None]


def reading_hashes(store: BlockStore, blocks: Blocks) -> Generator[None, None, list[bytes]]:
    """Return the whole hashes of blocks in a table, of those that are still on disk, in steps."""
    hashes, blocks = list[bytes](), blocks[blocks["tiers"] & TIER_BITS[Tier.DISK] > 0]
    for some in batches(blocks[["key", "key_rest"]].tolist()):
        with store.index.reading() as txn:
            for number in some:
                start = b"".join(part.to_bytes(8, "big") for part in number)
                first = next(txn.hashes_from(start), b"")
                hashes += [first] if first.startswith(start) else []
        yield
    return hashes


def named_hashes(txn: IndexTxn, digits: str) -> Iterator[bytes]:
    """The hashes of all entries whose hash starts with these hex digits."""
    start = bytes.fromhex(digits[: len(digits) // 2 * 2])
    hashes = takewhile(lambda each: each.startswith(start), txn.hashes_from(start))
    return (each for each in hashes if each.hex().startswith(digits))


def matching(table: BlockTable, which: EvictFilter, now: float) -> Blocks:
    """Return the blocks that an eviction without ids is about."""
    is_named = np.array([which.names(kind.namespace) for kind in table.kinds], bool)
    older_than_s = -np.inf if which.older_than_s is None else which.older_than_s
    is_old = (now - table.blocks["last_used"] >= older_than_s) & (not which.is_empty)
    blocks: Blocks = table.blocks[is_old & is_named[table.blocks["kind"]]]
    return blocks


def evicting(
    store: BlockStore, which: EvictFilter, chosen: Chosen
) -> Generator[None, None, EvictResult]:
    """Drop and erase what an operator wants gone, in steps; chains that are named, tails first.

    Args:
        store: the store.
        which: which blocks, if they still match.
        chosen: the same blocks by their hashes.
    """
    now = store.clock.now()
    key_ids, failed = set[bytes](), None
    num_evicted = freed_bytes = 0
    for hashes in batches([*chosen.following, *chosen.before]):
        records = ((it, it.record) for it in map(store.locate, hashes) if it)
        doomed = [it for it, each in records if which.matches(each.namespace, each.last_used, now)]
        freed_bytes += sum(located.extent_bytes for located in doomed)
        num_evicted += len(doomed)
        if not which.dry_run:
            key_ids |= store.key_use.ids_of(doomed)
            store.delete([located.record.block_hash for located in doomed], "operator")
        yield
    if not which.dry_run:
        failed = yield from store.allocator.clearing()
    kept_ids = store.key_use.known(key_ids)
    erased, kept = (tuple(sorted(map(bytes.hex, each))) for each in (key_ids - kept_ids, kept_ids))
    why = "" if failed is None else str(failed)
    return EvictResult(num_evicted, freed_bytes, chosen.unknown_ids, erased, kept, why)


def verifying(
    store: BlockStore, result: VerifyResult, *, repair: bool, sample: float = 1.0
) -> Generator[None, None, None]:
    """Read every payload and check it, then check the index against itself, in steps.

    `result` always holds the findings so far. With `repair`, bad blocks are dropped. Below 1.0,
    `sample` is the part of the payloads that is read.
    """
    is_whole, last = yield from _reading(store, result, b"", repair=repair, sample=sample)
    for is_sound in chain(store.index.reading_ahead(), store.index.looking_over()):
        if not (is_whole := is_whole and is_sound):
            break
        yield
    if not is_whole:
        result.add("index", is_repaired=repair)
        if repair:
            store.make_index_again()
            # A walk that damage cut short goes on in the sound index.
            yield from _reading(store, result, last + b"\0", repair=repair, sample=sample)


def _reading(
    store: BlockStore, result: VerifyResult, start: bytes, *, repair: bool, sample: float
) -> Generator[None, None, tuple[bool, bytes]]:
    """Read and check the payloads of blocks from a key on, or of a sample of them, in steps.

    Returns whether their entries are whole, and the last key.
    """
    is_whole, page, block_hash = True, memoryview(b""), start
    entries_of = walking(store, start)
    for block_hash in (key for entries in entries_of for key, _ in entries):
        if random.random() >= sample:
            yield
            continue
        with store.index.reading() as txn:
            entry = dict(islice(txn.blocks(block_hash), 1))
        if block_hash not in entry:  # gone since the walk came by
            continue
        located = entry[block_hash]
        if located is None:
            result.checked += 1
            result.add("record", is_repaired=repair)
            is_whole = False
        elif store.clock.now() < located.record.expires_at:
            result.checked += 1
            with store.index.reading() as txn:
                is_whole = txn.is_whole(located) and is_whole
            if len(page) < (size := padded_bytes(located.record.size_bytes)):
                page = aligned_buffer(size)
            try:
                store.read_payload(located, page)
            except StorageError as error:
                can_repair = repair and isinstance(error, CorruptBlockError)
                result.add(reason_of(error), is_repaired=can_repair)
                if can_repair:
                    store.drop_bad(located)
        yield
    return is_whole, block_hash


def walking(store: BlockStore, start: bytes = b"") -> Iterator[list[tuple[bytes, Located | None]]]:
    """Walk over all entries and yield some of them at a time; others may come and go in between.

    The walk ends where a key is smaller than the one before it, as on a damaged page: it might
    never end otherwise.
    """
    while True:
        with store.index.reading() as txn:
            entries = list(islice(txn.blocks(start), TXN_BLOCKS))
        keys = [start, *(key for key, _ in entries)]
        if keys != sorted(keys):
            return store.ask_for_rebuild()
        if not entries:
            return None
        yield entries
        start = keys[-1] + b"\0"
