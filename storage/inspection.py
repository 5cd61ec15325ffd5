"""A store as its operator sees it: listed by chain, evicted from, verified; all of it in steps.

Between two steps blocks may come and go. What is dropped or mended, the store does itself.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice

import numpy as np

from tieredkv.errors import CorruptBlockError, StorageError
from tieredkv.storage.allocator import TXN_BLOCKS, batches
from tieredkv.storage.codec import Located, padded_bytes
from tieredkv.storage.compression import aligned_buffer
from tieredkv.storage.index import IndexTxn
from tieredkv.storage.lmdb_store import BlockStore, reason_of
from tieredkv.storage.results import ChainInfo, EvictFilter, EvictResult, VerifyResult
from tieredkv.types import BlockRecord

_KEY_BYTES = 8


class Chains:
    """Who follows whom among the stored blocks, gathered in one walk, at sixteen bytes a block.

    Blocks may come and go meanwhile; it is as right as any list is a moment later. It knows a block
    by the first bytes of its hash, so one in 10^13 may be taken for another's parent.
    """

    def __init__(self) -> None:
        self._blocks = array("Q")
        self._parents = array("Q")
        self.leaves: list[bytes] = []

    def add(self, records: Iterable[BlockRecord]) -> None:
        """Take blocks into account."""
        for record in records:
            self._blocks.append(_key(record.block_hash))
            self._parents.append(_key(record.parent_hash))

    def starts_of_leaves(self) -> list[bytes]:
        """First bytes of each block that none follows; nothing is added after this."""
        blocks, parents = (np.array(keys, np.uint64) for keys in (self._blocks, self._parents))
        parents.sort()
        self._parents = array("Q", parents.tobytes())
        behind = np.searchsorted(parents, blocks, "right")
        leaves = blocks[behind == np.searchsorted(parents, blocks)].tolist()
        return [key.to_bytes(_KEY_BYTES, "big") for key in leaves]

    def named(self, chain_id: str) -> list[bytes]:
        """The leaves whose hash starts with these hex digits, if there are any digits."""
        wanted = chain_id.lower()
        return [leaf for leaf in self.leaves if wanted and leaf.hex().startswith(wanted)]

    def num_children(self, block_hash: bytes) -> int:
        """How many stored blocks follow this one."""
        key = _key(block_hash)
        return bisect_right(self._parents, key) - bisect_left(self._parents, key)


def choosing(
    store: BlockStore, ids: Sequence[str]
) -> Generator[None, None, tuple[list[bytes], tuple[str, ...]]]:
    """Name the blocks that no chain but these uses, tails first; and the ids of none."""
    now = store.clock.now()
    chains = yield from _gathering(store, now)
    named = {id_: chains.named(id_) for id_ in ids}
    chosen: list[bytes] = []
    taken: Counter[bytes] = Counter()
    for leaf in dict.fromkeys(leaf for leaves in named.values() for leaf in leaves):
        with store.index.reading() as txn:
            for located in _climb(txn, leaf, now):
                block_hash = located.record.block_hash
                if chains.num_children(block_hash) > taken[block_hash]:
                    break  # another chain joins
                chosen.append(block_hash)
                taken[located.record.parent_hash] += 1
        yield
    return chosen, tuple(id_ for id_, leaves in named.items() if not leaves)


def evicting(store: BlockStore, which: EvictFilter) -> Generator[None, None, EvictResult]:
    """Drop and erase what an operator chose, in steps; chains that are named, tails first."""
    now = store.clock.now()
    unknown_ids: tuple[str, ...] = ()
    source: Iterator[Sequence[Located | None]] = iter(())

    if which.ids:
        hashes, unknown_ids = yield from choosing(store, which.ids)
        source = (list(map(store.locate, batch)) for batch in batches(hashes))
    elif which.all or which.older_than_s is not None or which.namespace_prefix:
        source = ([each for _, each in entries] for entries in _walking(store))
    num_evicted = freed_bytes = 0
    for some in source:
        records = ((each, each.record) for each in some if each)
        doomed = [e for e, it in records if which.matches(it.namespace, it.last_used, now)]
        freed_bytes += sum(located.slot_bytes for located in doomed)
        num_evicted += len(doomed)
        if not which.dry_run:
            store.delete([located.record.block_hash for located in doomed], "operator")
        yield
    if not which.dry_run:
        yield from store.slots.erasing()
    return EvictResult(num_evicted, freed_bytes, unknown_ids)


def listing(store: BlockStore) -> Generator[None, None, list[ChainInfo]]:
    """List every chain of blocks that have not expired, the last used first, in steps."""
    now = store.clock.now()
    chains = yield from _gathering(store, now)
    found: list[ChainInfo] = []
    shared: dict[bytes, ChainInfo] = {}
    for leaf in chains.leaves:
        with store.index.reading() as txn:
            found += _sum_up(txn, chains, leaf, shared, now)
        yield
    return sorted(found, key=lambda chain: (-chain.last_used_max, chain.id))


def verifying(store: BlockStore, result: VerifyResult, *, repair: bool) -> Iterator[None]:
    """Read every payload again and check it, and the index against itself, in steps.

    What was found so far is in `result`; what is bad is dropped if it is to be repaired.
    """
    is_whole, page = True, memoryview(b"")
    for block_hash in (key for entries in _walking(store) for key, _ in entries):
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
    for is_sound in chain(store.index.reading_ahead(), store.index.looking_over()):
        if not (is_whole := is_whole and is_sound):
            break
        yield
    if not is_whole:
        result.add("index", is_repaired=repair)
        if repair:
            store.make_index_again()


def _walking(store: BlockStore) -> Iterator[list[tuple[bytes, Located | None]]]:
    """Walk over all entries, a slice a step; blocks may come and go between two steps.

    It ends where keys go back, or it might never do so.
    """
    start = b""
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


def _gathering(store: BlockStore, now: float) -> Generator[None, None, Chains]:
    """See which chains there are, in steps."""
    chains = Chains()
    for entries in _walking(store):
        stored = (located.record for _, located in entries if located)
        chains.add(record for record in stored if now < record.expires_at)
        yield
    for start in chains.starts_of_leaves():
        with store.index.reading() as txn:
            chains.leaves += [key for key, _ in islice(txn.blocks(start), 1)]
        yield
    return chains


def _climb(txn: IndexTxn, leaf: bytes, now: float) -> Iterator[Located]:
    """The stored blocks of a chain, from its leaf on; it ends at a hole."""
    block_hash, below = leaf, math.inf
    with suppress(CorruptBlockError):
        while (located := txn.get(block_hash)) and located.record.position < below:
            if now >= located.record.expires_at:
                break
            yield located
            block_hash, below = located.record.parent_hash, located.record.position


def _sum_up(
    txn: IndexTxn, chains: Chains, leaf: bytes, shared: dict[bytes, ChainInfo], now: float
) -> list[ChainInfo]:
    """Describe a chain, if it is there; where chains part, what they share is summed up once."""
    path: list[Located] = []
    info = None
    for located in _climb(txn, leaf, now):
        if (info := shared.get(located.record.block_hash)) is not None:
            break
        path.append(located)
    for located in reversed(path):
        info = _extend(info, located)
        if chains.num_children(located.record.block_hash) > 1:
            shared[located.record.block_hash] = info
    return [info] if info else []


def _key(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:_KEY_BYTES].ljust(_KEY_BYTES, b"\0"), "big")


def _extend(before: ChainInfo | None, located: Located) -> ChainInfo:
    record = located.record
    return ChainInfo(
        id=record.block_hash.hex(),
        namespace=record.namespace.hex(),
        root=record.root.hex(),
        blocks=1 + (before.blocks if before else 0),
        last_position=record.position,
        bytes=record.size_bytes + (before.bytes if before else 0),
        stored_bytes=located.payload_bytes + (before.stored_bytes if before else 0),
        retention=record.retention,
        computed_at_min=min(record.computed_at, before.computed_at_min if before else 1e300),
        computed_at_max=max(record.computed_at, before.computed_at_max if before else 0.0),
        expires_at_min=min(record.expires_at, before.expires_at_min if before else 1e300),
        last_used_max=max(record.last_used, before.last_used_max if before else 0.0),
        hits=record.hits + (before.hits if before else 0),
    )
