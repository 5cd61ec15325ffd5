"""Makes blocks, chains and stores for the tests of the block store, and checks a whole store."""

import hashlib
import mmap
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.fakes import FakeClock
from tieredkv.clock import Clock
from tieredkv.errors import IntegrityError, StorageError
from tieredkv.operate.calls import EvictFilter
from tieredkv.operate.chains import Chains
from tieredkv.operate.columns import ChainColumns
from tieredkv.operate.filters import Order
from tieredkv.operate.infos import BlockInfo, ChainInfo
from tieredkv.operate.models import KnownModels
from tieredkv.operate.ram import RamRecords
from tieredkv.operate.table import TIER_BITS, BlockTable, TableReader, starts_in
from tieredkv.operate.verify import Findings
from tieredkv.storage.extents.allocator import ExtentAllocator
from tieredkv.storage.format.record import Extent, Located, Retentions, decode_record, encode_record
from tieredkv.storage.index.entries import Totals, expiry_key, extent_key, lru_key, split_extent_key
from tieredkv.storage.index.transaction import IndexTxn
from tieredkv.storage.messages.operator import Asked, Delete, Scan, Verify
from tieredkv.storage.opening import open_parts
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.store import Store
from tieredkv.storage.worker.operators import Operators
from tieredkv.storage.worker.socket import Caller
from tieredkv.types import NAMESPACE_BYTES, BlockRecord, Tier

BLOCK_BYTES = 8192
BUDGET_BYTES = 4 << 20
RETENTIONS = Retentions(["24h"])
TOLD_RETENTIONS = Retentions(["24h", "in_memory", "x", "y" * 32])


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def payload_of(record: BlockRecord) -> bytes:
    """Return the one right payload of a block, made from its hash and `computed_at`."""
    seed = record.block_hash + str(record.computed_at).encode()
    return random.Random(seed).randbytes(record.size_bytes)


def make_record(
    name: str = "a", position: int = 0, *, now: float = 1_800_000_000.0, **changes: Any
) -> BlockRecord:
    """Return the record of block `position` of chain `name`, which is kept for a day.

    A namespace is filled up with zeroes.
    """
    if "namespace" in changes:
        changes["namespace"] = changes["namespace"].ljust(NAMESPACE_BYTES, b"\0")
    parent = digest(f"{name}/{position - 1}") if position else digest("root")
    record = BlockRecord(
        block_hash=digest(f"{name}/{position}"),
        parent_hash=parent,
        root=digest("root"),
        namespace=digest("tenant"),
        position=position,
        size_bytes=BLOCK_BYTES,
        retention="24h",
        computed_at=now,
        expires_at=now + 86_400,
        last_used=now,
    )
    return msgspec.structs.replace(record, **changes)


def page_with(data: bytes, page_bytes: int | None = None) -> memoryview:
    """Return an aligned page, like those of the arena, that starts with `data`."""
    size = page_bytes or -(-len(data) // 4096) * 4096
    page = memoryview(mmap.mmap(-1, size))
    page[: len(data)] = data
    return page


class CheckedStore(Store):
    """A store whose `check()` reads all entries and compares them with each other."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.path, self.clock, self.index = (
            self.parts.folder.path,
            self.parts.clock,
            self.parts.index,
        )
        self.files, self.space, self.room = self.parts.files, self.parts.space, self.parts.room
        self.keys = self.parts.key_use.keys

    def locate(self, block_hash: bytes) -> Located | None:
        """Return where a block lies, or None on a miss."""
        sealed = self.find([block_hash]).get(block_hash)
        return None if sealed is None else decode_record(block_hash, sealed, self.index.retentions)

    def check(self) -> None:
        """Verify every invariant of the class."""
        with self.index.reading() as txn:
            problems = find_problems(txn, self.parts.allocator) + txn.contradictions()
        if problems:
            raise IntegrityError("; ".join(problems))

    def lookup(self, hashes: Sequence[bytes]) -> list[BlockRecord | None]:
        """Return the records that `find` answers, decoded and in the order of the hashes."""
        found, names = self.find(hashes), self.index.retentions
        return [decode_record(h, found[h], names).record if h in found else None for h in hashes]


def find_problems(txn: IndexTxn, allocator: ExtentAllocator) -> list[str]:
    """Compare records, secondary keys, counters and extents; describe each contradiction."""
    problems = []

    def keys(name: str) -> set[bytes]:
        return {key for key, _ in txn._walk(name)}

    expiry, lru = set(), set()
    owners: Counter[Extent] = Counter()
    namespaces, window_bytes = dict[bytes, Totals](), 0
    for block_hash, located in txn.blocks():
        if located is None:
            problems.append(f"record {block_hash.hex()[:12]} fails its checksum")
            continue
        record = located.record
        expiry.add(expiry_key(record))
        lru.add(lru_key(record))
        owners[located.extent] += 1
        counted = namespaces.get(record.namespace, Totals(0, 0))
        namespaces[record.namespace] = counted.plus(1, located.payload_bytes, record.kind > 0)
        window_bytes += located.payload_bytes if record.kind else 0
    for name, wanted in (("expiry", expiry), ("lru", lru)):
        if different := keys(name) ^ wanted:
            problems.append(f"{len(different)} keys of `{name}` do not match the records")
    if txn.namespaces() != namespaces:
        problems.append("the counters of the namespaces are not their sums")
    sums = [sum(each) for each in zip(*namespaces.values(), strict=True)] or [0, 0, 0]
    if list(txn.meta.totals) != sums:
        problems.append(f"the counters say {txn.meta.totals}, the records {sums}")
    if txn.meta.window_bytes != window_bytes:
        problems.append(f"pages of windows have {window_bytes} bytes, not {txn.meta.window_bytes}")
    return problems + _extent_problems(txn, allocator, owners, keys("free"))


def _extent_problems(
    txn: IndexTxn, allocator: ExtentAllocator, owners: Counter[Extent], free_keys: set[bytes]
) -> list[str]:
    problems = []
    if shared := [extent for extent, count in owners.items() if count > 1]:
        problems.append(f"records share the extents {shared[:3]}")
    pending = set(txn.extents("pending"))
    dirty = {split_extent_key(key) for keys in allocator._dirty.values() for key in keys}
    if pending != dirty | allocator.lent.keys() or dirty & allocator.lent.keys():
        problems.append("pending extents are not those lent and those to be erased")
    segments = txn.segments()
    for segment, state in segments.items():
        for number in range(state.num_used):
            extent = Extent(segment, number)
            key = extent_key(extent)
            roles = (extent in owners) + (extent in pending) + (key in free_keys)
            free_keys.discard(key)
            if roles != 1:
                problems.append(f"extent {extent} has {roles} roles")
    if free_keys:
        problems.append(f"{len(free_keys)} free extents lie in no segment")
    if allocator.space.occupied_bytes > allocator.space.budget_bytes:
        sizes = f"{allocator.space.occupied_bytes} of {allocator.space.budget_bytes}"
        problems.append(f"files occupy {sizes} bytes")
    return problems


def open_store(
    path: Path,
    clock: Clock | None = None,
    failpoint: Callable[[str], None] = lambda label: None,
    **options: Any,
) -> CheckedStore:
    options.setdefault("budget_bytes", BUDGET_BYTES)
    options.setdefault("sync", "none")
    how = StoreOptions(path=str(path), **options)
    return CheckedStore(open_parts(how, clock or FakeClock(), failpoint), how)


def put(store: Store, *records: BlockRecord) -> list[bool]:
    """Store blocks with their right payloads, as the worker does."""
    extents = store.reserve(records)
    writes = []
    for extent, record in zip(extents, records, strict=True):
        assert extent is not None
        writes.append(store.write(extent, record, page_with(payload_of(record))))
    return commit(store, writes)


def commit(store: Store, writes: Sequence[Located]) -> list[bool]:
    """Commit written blocks; return which are stored, and raise what the commit fails with."""
    outcomes = store.commit(writes)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.is_stored for outcome in outcomes]


def reserve(store: Store, record: BlockRecord) -> Extent | None:
    """Reserve an extent for one block."""
    (extent,) = store.reserve([record])
    return extent


class SweepResult(NamedTuple):
    """What one sweep has done, by the store's counters."""

    expired_blocks: int
    erased_bytes: int


def sweep(store: Store) -> SweepResult:
    """Run all steps of a sweep."""
    before = store.stats()
    for _ in store.sweeping():
        pass
    after = store.stats()
    expired_blocks = after.num_expired - before.num_expired
    return SweepResult(expired_blocks, after.bytes_erased - before.bytes_erased)


class EvictResult(NamedTuple):
    """What an eviction freed; `unknown_ids` matched no chain.

    The payload keys of the evicted blocks are erased, or kept while other blocks need them. If keys
    that no block needs could not be erased, `keys_error` says why, and each sweep tries again.
    """

    evicted_blocks: int
    freed_bytes: int
    unknown_ids: tuple[str, ...] = ()
    erased_keys: tuple[str, ...] = ()
    kept_keys: tuple[str, ...] = ()
    keys_error: str = ""


def evict(store: Store, which: EvictFilter) -> EvictResult:
    """Evict from a store as its worker and the verb do."""
    if which.is_empty:
        return EvictResult(0, 0)
    now, starts, unknown_ids = store.parts.clock.now(), None, tuple[str, ...]()
    if which.ids:
        chosen = choose(store, which.ids)
        starts, unknown_ids = [*chosen.following, *chosen.before], tuple(chosen.unknown_ids)
    asked = Delete(
        starts=starts,
        namespace=which.namespace_prefix or "",
        unused_since=None if which.older_than_s is None else now - which.older_than_s,
        dry_run=which.dry_run,
    )
    [done] = ask(store, asked)
    keys = tuple(done.erased_keys), tuple(done.kept_keys)
    return EvictResult(done.num_blocks, done.freed_bytes, unknown_ids, *keys, done.keys_error)


class Chosen(NamedTuple):
    """What ids name, by the hashes of blocks; see `Chains.of_blocks`."""

    following: list[bytes]
    before: list[bytes]
    unknown_ids: list[str]


def choose(store: Store, ids: Sequence[str]) -> Chosen:
    """Find the blocks that ids name."""
    places, unknown_ids = (chains := gather(store)).named(ids)
    with store.parts.index.reading() as txn:
        found = [
            [next(txn.entries_of(start))[0] for start in starts_in(blocks)]
            for blocks in chains.of_blocks(places)
        ]
    return Chosen(found[0], found[1], unknown_ids)


def table_of(store: Store) -> BlockTable:
    """See which blocks there are."""
    reader = TableReader()
    for rows in ask(store, Scan()):
        reader.add(rows.data, rows.retentions)
    return reader.table


def gather(store: Store) -> Chains:
    """See which chains there are."""
    return Chains(table_of(store).unexpired(store.parts.clock.now()))


def chains(store: Store) -> list[ChainInfo]:
    """List all chains."""
    columns = ChainColumns(gather(store), KnownModels([]))
    pages = columns.listed([], Order(), None, store.parts.clock.now())
    return [each for page in pages for each in page]


def told_by_engine(*blocks: tuple[BlockRecord, Sequence[Tier]]) -> dict[str, Any]:
    """Return what an engine tells that has these blocks in these tiers."""
    places = [Located(record, Extent(0, 0), 0, b"") for record, _ in blocks]
    records = [encode_record(it, TOLD_RETENTIONS) for it in places]
    tiers = bytes(sum(TIER_BITS[tier] for tier in tiers) for _, tiers in blocks)
    return {"records": b"".join(records), "tiers": tiers, "retentions": TOLD_RETENTIONS.names}


def info_of(record: BlockRecord, tier: Tier) -> BlockInfo:
    """Return what `inspect` tells of a block that is in one tier of RAM."""
    [info] = RamRecords([told_by_engine((record, [tier]))]).up_from([record.block_hash], 0.0)
    return info


class Hearer(Caller):
    """A client in this process."""

    def __init__(self) -> None:
        pass

    def report(self) -> None:
        """Hear that work goes on."""


def ask(store: Store, asked: Asked) -> list[Any]:
    """Return what the worker tells an operator."""
    return [*Operators(store, store.stats).answer(asked, Hearer())]


def verify(store: Store, *, repair: bool = True) -> Findings:
    """Check a store as its worker and the verb do."""
    found = Findings()
    for part in ask(store, Verify(repair=repair)):
        found.add(part)
    return found


def load(store: CheckedStore, record: BlockRecord) -> bytes | str | None:
    """Load a block as the worker does; return its bytes, the reason of a failure or None (miss)."""
    located = store.locate(record.block_hash)
    if located is None:
        return None
    page = page_with(b"", -(-record.size_bytes // 4096) * 4096)
    try:
        store.read(located, page)
    except StorageError as error:
        return store.read_failed(located, error)
    return bytes(page[: record.size_bytes])


def stored_hashes(store: CheckedStore, records: Sequence[BlockRecord]) -> set[bytes]:
    found = store.lookup([record.block_hash for record in records])
    return {record.block_hash for record in found if record is not None}


def occupied_bytes(path: Path) -> int:
    """Return the occupied space of a folder, as `du` does."""
    return 512 * sum(each.lstat().st_blocks for each in [path, *path.rglob("*")])


def segment_files(path: Path) -> list[Path]:
    return sorted((path / "segments").iterdir())


def change_bytes(path: Path, at: int, change: Callable[[bytes], bytes], size: int = 1) -> None:
    """Change `size` bytes of a file at an offset without the store's knowledge."""
    with path.open("r+b") as file:
        file.seek(at)
        data = file.read(size)
        file.seek(at)
        file.write(change(data))


def refuse(code: int) -> Callable[..., None]:
    """Return a system call that fails with a code."""

    def call(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


def flip(data: bytes) -> bytes:
    return bytes(byte ^ 1 for byte in data)
