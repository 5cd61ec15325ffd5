"""What an operator does with a store: list its chains, evict blocks, verify them.

Each of these is a generator that works in short steps, so that other work can go on in between.
Blocks may come and go between two steps. The store itself drops and repairs blocks; this module
only chooses them.
"""

import math
import random
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from itertools import chain, islice, takewhile
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec.structs import asdict

from tieredkv.errors import CorruptBlockError, StorageError
from tieredkv.storage import codec
from tieredkv.storage.calls import EvictFilter, Ls
from tieredkv.storage.codec import Located, padded_bytes
from tieredkv.storage.compression import aligned_buffer
from tieredkv.storage.filters import ChainFilter, sort_key
from tieredkv.storage.index_txn import TXN_BLOCKS, IndexTxn, batches
from tieredkv.storage.known_models import KnownModels
from tieredkv.storage.lmdb_store import BlockStore, reason_of
from tieredkv.storage.names import Names
from tieredkv.storage.results import (
    ChainInfo,
    EvictResult,
    NamespaceUse,
    VerifyResult,
    chain_id,
    named_blocks,
)
from tieredkv.types import Tier

_KEY_BYTES, _START_BYTES = 8, 16
GATHERED_BLOCKS = 1024  # in one step
PAGE_CHAINS = 256
_MAX_SHARED_SUMS = 8192

Value = TypeVar("Value")


class Chains:
    """The stored blocks and their parents, as one walk over the index found them.

    Blocks may come and go during the walk, so a chain may be out of date like any list. A block is
    known by its key, which is the first 8 bytes of its hash, and by its place among the sorted
    keys; one block in 10^13 may be taken for another's parent. The memory is 36 bytes a block.
    """

    def __init__(self) -> None:
        self._keys = array("Q")  # sorted, as the walk goes by them
        self._parents = array("Q")
        self._last_used = array("d")
        self._children = array("I")  # places of all blocks, those of one parent together
        self._parents_of_children = array("Q")
        self.leaves = array("I")  # places of blocks that none follows, the last used first

    def add(self, links: Sequence[tuple[bytes, codec.Link]]) -> None:
        """Take blocks into account, in the order of their hashes."""
        self._keys.frombytes(_keys([block_hash for block_hash, _ in links]))
        self._parents.frombytes(_keys([link.parent_hash for _, link in links]))
        self._last_used.extend([link.last_used for _, link in links])

    def arrange(self) -> None:
        """Find children and leaves once all blocks are added; takes half a second a million."""
        keys, parents = np.array(self._keys, np.uint64), np.array(self._parents, np.uint64)
        children = np.argsort(parents, kind="stable")
        self._children = array("I", children.astype(np.uint32).tobytes())
        parents = parents[children]
        self._parents_of_children = array("Q", parents.tobytes())
        num_children = np.searchsorted(parents, keys, "right") - np.searchsorted(parents, keys)
        leaves = np.flatnonzero(num_children == 0)
        last_used = np.array(self._last_used, np.float64)[leaves]
        leaves = leaves[np.lexsort((leaves, -last_used))]
        self.leaves = array("I", leaves.astype(np.uint32).tobytes())

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, place: int) -> bytes:
        """First bytes of a block's hash."""
        return self._keys[place].to_bytes(_KEY_BYTES, "big")

    def find(self, block_hash: bytes) -> int | None:
        """The place of a block; None if it was not stored."""
        return self._place(_key(block_hash))

    def parent(self, place: int) -> int | None:
        """The place of the block before this one; None if it was not stored."""
        return self._place(self._parents[place])

    def children(self, place: int) -> Sequence[int]:
        """The places of the blocks that follow this one."""
        return self._children[slice(*self._range(self._keys[place]))]

    def num_children(self, block_hash: bytes) -> int:
        """How many stored blocks follow the block of this hash."""
        start, end = self._range(_key(block_hash))
        return end - start

    def _range(self, key: int) -> tuple[int, int]:
        parents = self._parents_of_children
        return bisect_left(parents, key), bisect_right(parents, key)

    def _place(self, key: int) -> int | None:
        place = bisect_left(self._keys, key)
        return place if place < len(self) and self._keys[place] == key else None


def gathering(store: BlockStore) -> Generator[None, None, Chains]:
    """Read all blocks and their parents, in steps; `arrange` has to be called on the result."""
    chains, now = Chains(), store.clock.now()
    for entries in walking(store, IndexTxn.links, GATHERED_BLOCKS):
        chains.add([(key, link) for key, link in entries if link and now < link.expires_at])
        yield
    return chains


def adding_up(store: BlockStore) -> Generator[None, None, list[NamespaceUse]]:
    """Add up the blocks of each model in each namespace, the largest first, in steps."""
    uses, now = dict[tuple[bytes, bytes], NamespaceUse](), store.clock.now()
    for entries in walking(store, IndexTxn.links, GATHERED_BLOCKS):
        for link in (link for _, link in entries if link and now < link.expires_at):
            if (use := uses.get((link.namespace, link.root))) is None:
                use = NamespaceUse(namespace=link.namespace.hex(), root=link.root.hex())
                uses[link.namespace, link.root] = use
            use.blocks += 1
            use.bytes += link.size_bytes
            use.last_used = max(use.last_used, link.last_used)
        yield
    return sorted(uses.values(), key=lambda use: (-use.bytes, use.root))


class Chosen(NamedTuple):
    """The blocks that ids name, as they are on disk; those behind others come first.

    Attributes:
        following: the named blocks and what follows them.
        before: blocks before them that no other chain uses.
        unknown_ids: ids that name no block.
    """

    following: Sequence[bytes] = ()
    before: Sequence[bytes] = ()
    unknown_ids: tuple[str, ...] = ()


NOTHING_CHOSEN = Chosen()


def choosing(
    store: BlockStore, chains: Chains, ids: Sequence[str]
) -> Generator[None, None, Chosen]:
    """Find the blocks that the chains of these ids have for themselves, in steps."""
    seeds, unknown_ids = dict[int, None](), list[str]()
    for id_ in ids:
        with store.index.reading() as txn:
            named = _seeds(txn, chains, id_)
        seeds.update(dict.fromkeys(named))
        if not named:
            unknown_ids.append(id_)
        yield
    is_chosen, following, before = bytearray(len(chains)), array("I"), array("I")
    for seed in seeds:
        branch, waiting = array("I"), [seed]
        while waiting:
            if not is_chosen[place := waiting.pop()]:
                is_chosen[place] = True
                branch.append(place)
                waiting += chains.children(place)
                if len(branch) % GATHERED_BLOCKS == 0:
                    yield
        following.extend(reversed(branch))
    num_chosen = Counter[int]()
    for seed in seeds:
        parent = chains.parent(seed)
        while parent is not None and not is_chosen[parent]:
            num_chosen[parent] += 1
            if num_chosen[parent] < len(chains.children(parent)):
                break  # another chain joins
            is_chosen[parent] = True
            before.append(parent)
            if len(before) % GATHERED_BLOCKS == 0:
                yield
            parent = chains.parent(parent)
    hashes = []
    for places in (following, before):
        found = list[bytes]()
        for start in range(0, len(places), GATHERED_BLOCKS):
            with store.index.reading() as txn:
                some = [_stored(txn, chains, at) for at in places[start : start + GATHERED_BLOCKS]]
            found += [block_hash for block_hash in some if block_hash]
            yield
        hashes.append(found)
    return Chosen(hashes[0], hashes[1], tuple(unknown_ids))


def _seeds(txn: IndexTxn, chains: Chains, id_: str) -> list[int]:
    """The places of the blocks that an id names, but for those before another of them.

    Its last block says which chain is meant. Its first one is needed where that is gone, or cut off
    by a hole.
    """
    names = named_blocks(id_)
    if names is None:
        return []
    firsts, lasts = (_named(txn, chains, digits) if digits else [] for digits in names)
    above = set[int]()
    for last in lasts:
        place: int | None = last
        while place is not None and place not in above:
            above.add(place)
            place = chains.parent(place)
    return [*lasts, *(first for first in firsts if first not in above)]


def _named(txn: IndexTxn, chains: Chains, digits: str) -> list[int]:
    """The places of the blocks whose hash starts with these hex digits."""
    places = map(chains.find, named_hashes(txn, digits))
    return [place for place in places if place is not None]


def named_hashes(txn: IndexTxn, digits: str) -> Iterator[bytes]:
    """The hashes of all entries whose hash starts with these hex digits."""
    start = bytes.fromhex(digits[: len(digits) // 2 * 2])
    hashes = takewhile(lambda each: each.startswith(start), txn.hashes_from(start))
    return (each for each in hashes if each.hex().startswith(digits))


def _stored(txn: IndexTxn, chains: Chains, place: int) -> bytes | None:
    """The whole hash of a block; None if it has gone."""
    key = chains.key(place)
    block_hash = next(txn.hashes_from(key), b"")
    return block_hash if block_hash.startswith(key) else None


def evicting(
    store: BlockStore, which: EvictFilter, chosen: Chosen = NOTHING_CHOSEN
) -> Generator[None, None, EvictResult]:
    """Drop and erase what an operator wants gone, in steps; chains that are named, tails first.

    Args:
        store: the store.
        which: which blocks.
        chosen: what the ids of the filter name.
    """
    now = store.clock.now()
    key_ids = set[bytes]()
    source: Iterator[Sequence[Located | None]] = iter(())
    if which.ids:
        hashes = [*chosen.following, *chosen.before]
        source = (list(map(store.locate, batch)) for batch in batches(hashes))
    elif which.all or which.older_than_s is not None or which.namespace_prefix:
        source = ([each for _, each in entries] for entries in walking(store, IndexTxn.blocks))
    num_evicted = freed_bytes = 0
    for some in source:
        records = ((each, each.record) for each in some if each)
        doomed = [e for e, it in records if which.matches(it.namespace, it.last_used, now)]
        freed_bytes += sum(located.extent_bytes for located in doomed)
        num_evicted += len(doomed)
        if not which.dry_run:
            key_ids |= store.key_use.ids_of(doomed)
            store.delete([located.record.block_hash for located in doomed], "operator")
        yield
    if not which.dry_run:
        store.key_use.drop_unused()
        yield from store.allocator.erasing()
    kept_ids = store.key_use.known(key_ids)
    erased, kept = (tuple(sorted(map(bytes.hex, each))) for each in (key_ids - kept_ids, kept_ids))
    return EvictResult(num_evicted, freed_bytes, chosen.unknown_ids, erased, kept)


class InRam(NamedTuple):
    """The keys of all blocks in VRAM and in host memory, by which `Chains` would know them."""

    device: frozenset[bytes] = frozenset()
    host: frozenset[bytes] = frozenset()

    @classmethod
    def of(cls, answer: Mapping[str, bytes], names: Names | None) -> "InRam":
        """Read what an engine tells, which is the `start_of` the hash of each block.

        Args:
            answer: of the engine.
            names: of the store, if it knows blocks by names; also the start of a hash has one.
        """
        starts = (_cut(answer.get(tier, b"")) for tier in cls._fields)
        return cls(*(frozenset(map(key_of, names.hide(it) if names else it)) for it in starts))


def start_of(block_hash: bytes) -> bytes:
    """Return the first bytes of a hash, by which an engine tells of a block."""
    return block_hash[:_START_BYTES].ljust(_START_BYTES, b"\0")


def key_of(block_hash: bytes) -> bytes:
    """Return the first bytes of a hash, by which a block is known in lists."""
    return block_hash[:_KEY_BYTES].ljust(_KEY_BYTES, b"\0")


def _cut(starts: bytes) -> list[bytes]:
    return [starts[at : at + _START_BYTES] for at in range(0, len(starts), _START_BYTES)]


def listing(
    store: BlockStore, chains: Chains, call: Ls, models: KnownModels, in_ram: InRam
) -> Generator[list[ChainInfo] | None, None, None]:
    """List chains as `Ls` wants them, in steps and by pages.

    A chain whose last blocks have gone meanwhile is listed as what is left of it. With `sort`, all
    chains that match are in memory.
    """
    page: list[ChainInfo] = []
    found: Iterator[ChainInfo | None] = _matching(store, chains, call.filter, models, in_ram)
    if call.sort:
        matching = list[ChainInfo]()
        for info in found:
            matching += [info] if info is not None else []
            yield None
        key, is_reverse = sort_key(call.sort, store.clock.now())
        matching.sort(key=key, reverse=is_reverse)
        found = iter(matching)
    left = sys.maxsize if call.limit is None else call.limit
    for info in found:
        page += [info] if info is not None else []
        is_full = len(page) == min(PAGE_CHAINS, left)
        yield page if is_full else None
        if is_full:
            left, page = left - len(page), []
        if not left:
            return
    if page:
        yield page


def _matching(
    store: BlockStore, chains: Chains, text: str, models: KnownModels, in_ram: InRam
) -> Iterator[ChainInfo | None]:
    """Yield the chains that match a filter, the last used first, and None for others."""
    now, shared, wanted = store.clock.now(), dict[bytes, _Sums](), ChainFilter(text)
    for leaf in chains.leaves:
        with store.index.reading() as txn:
            found = _sum_up(txn, chains, leaf, shared, now, models, in_ram)
        yield next((info for info in found if wanted.matches(info, now)), None)


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
    entries_of = walking(store, IndexTxn.blocks, start=start)
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


def walking(
    store: BlockStore,
    walk: Callable[[IndexTxn, bytes], Iterator[tuple[bytes, Value]]],
    num_entries: int = TXN_BLOCKS,
    start: bytes = b"",
) -> Iterator[list[tuple[bytes, Value]]]:
    """Walk over all entries and yield some of them at a time; others may come and go in between.

    The walk ends where a key is smaller than the one before it, as on a damaged page: it might
    never end otherwise.
    """
    while True:
        with store.index.reading() as txn:
            entries = list(islice(walk(txn, start), num_entries))
        keys = [start, *(key for key, _ in entries)]
        if keys != sorted(keys):
            return store.ask_for_rebuild()
        if not entries:
            return None
        yield entries
        start = keys[-1] + b"\0"


class _Sums(msgspec.Struct):
    """The sums over the first blocks of a chain; see `ChainInfo`."""

    blocks: int = 0
    in_device: int = 0
    in_host: int = 0
    bytes: int = 0
    stored_bytes: int = 0
    computed_at_min: float = math.inf
    computed_at_max: float = 0.0
    expires_at_min: float = math.inf
    last_used_max: float = 0.0
    hits: int = 0

    def add(self, located: Located, in_ram: InRam) -> None:
        """Count one more block."""
        record = located.record
        if in_ram.device or in_ram.host:
            key = key_of(record.block_hash)
            self.in_device += key in in_ram.device
            self.in_host += key in in_ram.host
        self.blocks += 1
        self.bytes += record.size_bytes
        self.stored_bytes += located.payload_bytes
        self.computed_at_min = min(record.computed_at, self.computed_at_min)
        self.computed_at_max = max(record.computed_at, self.computed_at_max)
        self.expires_at_min = min(record.expires_at, self.expires_at_min)
        self.last_used_max = max(record.last_used, self.last_used_max)
        self.hits += record.hits


def _sum_up(
    txn: IndexTxn,
    chains: Chains,
    leaf: int,
    shared: dict[bytes, _Sums],
    now: float,
    models: KnownModels,
    in_ram: InRam,
) -> list[ChainInfo]:
    """Describe a chain, if anything of its own is left.

    Args:
        txn: for reading.
        chains: as they were gathered.
        leaf: the place of its last block.
        shared: sums up to blocks where chains part, so that what they share is summed up once; the
            latest few are kept.
        now: what has expired by then is not there.
        models: name the chains.
        in_ram: which blocks have other copies.
    """
    path: list[Located] = []
    sums = _Sums()
    for located in _climb(txn, _last_stored(txn, chains, leaf), now):
        if (known := shared.get(located.record.block_hash)) is not None:
            sums = copy(known)
            break
        path.append(located)
    if not path:
        return []
    first = path[-1]
    for located, following in zip(reversed(path), [*reversed(path[:-1]), None], strict=True):
        sums.add(located, in_ram)
        block_hash = located.record.block_hash
        if following is not None and chains.num_children(block_hash) > 1:
            shared[block_hash] = copy(sums)
            if len(shared) > _MAX_SHARED_SUMS:
                del shared[next(iter(shared))]
            first = following
    last, summed = path[0].record, asdict(sums)
    model = models.of(last.root, last.namespace)
    info = ChainInfo(
        id=chain_id(first.record.block_hash, last.block_hash),
        namespace=last.namespace.hex(),
        root=last.root.hex(),
        last_position=last.position,
        retention=last.retention,
        last_used=last.last_used,
        model=None if model is None else model.name,
        tokens=None if model is None else model.block_size * sums.blocks,
        blocks_by_tier={
            Tier.DEVICE: summed.pop("in_device"),
            Tier.HOST: summed.pop("in_host"),
            Tier.DISK: sums.blocks,
        },
        **summed,
    )
    return [info]


def _last_stored(txn: IndexTxn, chains: Chains, leaf: int) -> bytes:
    """The hash of the last block that is left of a chain's own; b"" if none is."""
    place: int | None = leaf
    while place is not None:
        if (block_hash := _stored(txn, chains, place)) is not None:
            return block_hash
        place = chains.parent(place)
        if place is not None and len(chains.children(place)) > 1:
            break
    return b""


def _climb(txn: IndexTxn, leaf: bytes, now: float) -> Iterator[Located]:
    """Yield the stored blocks of a chain from its last one up to the first hole."""
    block_hash, below = leaf, math.inf
    with suppress(CorruptBlockError):
        while block_hash and (located := txn.get(block_hash)) and located.record.position < below:
            if now >= located.record.expires_at:
                break
            yield located
            block_hash, below = located.record.parent_hash, located.record.position


def _keys(hashes: Sequence[bytes]) -> bytes:
    """The keys of blocks, as an array has them."""
    starts = b"".join([each[:_KEY_BYTES] for each in hashes])
    if len(starts) < _KEY_BYTES * len(hashes):  # a hash is shorter
        starts = b"".join([each[:_KEY_BYTES].ljust(_KEY_BYTES, b"\0") for each in hashes])
    return np.frombuffer(starts, ">u8").astype(np.uint64).tobytes()


def _key(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:_KEY_BYTES].ljust(_KEY_BYTES, b"\0"), "big")
