"""One transaction of the LMDB index: which blocks are stored, where, for whom, and until when.

Every change to a block changes its secondary keys and the counters in the same transaction. This
module knows databases and their entries, not segment files: extents are numbers here.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from heapq import merge
from itertools import islice, takewhile
from typing import Any, NamedTuple, TypeVar

from tieredkv.errors import CorruptBlockError, CorruptIndexError
from tieredkv.storage.format.record import (
    Extent,
    Located,
    Retentions,
    decode_record,
    encode_record,
    expiry_of,
    is_encrypted,
    scope_of,
)
from tieredkv.storage.index.entries import (
    META_KEY,
    NAMES,
    ORDERS,
    ExtentList,
    Meta,
    SegmentState,
    Totals,
    decode_count,
    decode_meta,
    decode_segment,
    decode_totals,
    encode,
    extent_key,
    hash_of_order,
    lru_order,
    segment_key,
    split_expiry_key,
    split_extent_key,
    split_segment_key,
    tenant_of,
    to_us,
)
from tieredkv.types import TENANT_BYTES

TXN_BLOCKS = 64
"""How many blocks one transaction changes at most, pages that leave with their block left out."""

MAX_KEY_BYTES = 256  # no key of the index is longer
_NUM_FIXED_PAGES = 3  # two meta pages and one page with the databases' names

DAMAGED = "damaged"
"""Why a block is dropped whose record or bytes cannot be trusted."""

Item = TypeVar("Item")


def batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Cut a list into batches that one transaction can change."""
    return (items[start : start + TXN_BLOCKS] for start in range(0, len(items), TXN_BLOCKS))


class Left(NamedTuple):
    """A block whose entry was dropped: why, and the bytes of its extent; 0 if not known."""

    block_hash: bytes
    reason: str
    extent_bytes: int


class Changes:
    """Which blocks have come, stay until another time, or have gone; of each the last word counts.

    Attributes:
        held: blocks that are stored, each with its expiry.
        gone: the entries that were dropped.
    """

    def __init__(self) -> None:
        self.held: dict[bytes, float] = {}
        self.gone: dict[bytes, Left] = {}

    def hold(self, held: Mapping[bytes, float]) -> None:
        """Note blocks that are stored, or that are kept until another time."""
        for block_hash in self.gone.keys() & held.keys():
            del self.gone[block_hash]
        self.held |= held

    def leave(self, gone: Mapping[bytes, Left]) -> None:
        """Note blocks that have gone."""
        for block_hash in self.held.keys() & gone.keys():
            del self.held[block_hash]
        self.gone |= gone

    def follow(self, later: "Changes") -> None:
        """Note what has changed since."""
        self.hold(later.held)
        self.leave(later.gone)


class IndexTxn:
    """Reads and changes within one transaction; every change of a block updates the counters.

    Attributes:
        changes: the blocks that it has changed.
        emptied: scopes of payload keys that have lost their last block; see `scope_of`.
        growth: by how many bytes the extents of each tenant have grown, negative if they shrank.
            This and `emptied` are known once the transaction is committed.
        first_orders: the first of the `lru` keys that were added, of each tenant and without it.
    """

    def __init__(self, txn: Any, dbs: dict[str, Any], retentions: Retentions) -> None:
        self.changes = Changes()
        self.emptied: set[bytes] = set()
        self.growth = defaultdict[bytes, int](int)  # not a `Counter`, which takes longer to make
        self.first_orders: dict[bytes, bytes] = {}
        self._txn = txn
        self._dbs = dbs
        self._retentions = retentions
        self._blocks = dbs["blocks"]
        # What the blocks that came and went change of the counters, which `keep` writes.
        self._new_blocks = defaultdict[bytes, int](int)
        self._new_bytes = defaultdict[bytes, int](int)
        self._new_pages = defaultdict[bytes, int](int)
        self._new_encrypted = defaultdict[bytes, int](int)

    # --- blocks -----------------------------------------------------------------------------

    def get(self, block_hash: bytes) -> Located | None:
        """Return one decoded entry, or None if there is none.

        Raises:
            CorruptBlockError: the record contradicts its checksum or key.
        """
        data = self._txn.get(block_hash, db=self._blocks)
        return None if data is None else decode_record(block_hash, data, self._retentions)

    def sound(self, block_hash: bytes) -> Located | None:
        """Return one decoded entry, or None if there is none or it is damaged."""
        with suppress(CorruptBlockError):
            return self.get(block_hash)
        return None

    def is_stray(self, located: Located) -> bool:
        """Return whether an entry is a further page of a block that is not stored."""
        parent = located.record.parent_hash
        return located.record.kind > 0 and self._txn.get(parent, db=self._blocks) is None

    def find(self, hashes: Sequence[bytes], now: float) -> tuple[dict[bytes, bytes], list[bytes]]:
        """Return the sealed records that have not expired, and the hashes of damaged ones.

        This is the main cost of a lookup of thousands of blocks. Records are therefore not decoded,
        and hashes are looked up in sorted order.
        """
        found: dict[bytes, bytes] = {}
        damaged: list[bytes] = []
        get, blocks = self._txn.get, self._blocks  # a cursor would take longer
        for block_hash in sorted(hashes):
            if (data := get(block_hash, None, blocks)) is None:
                continue
            if (expires_at := expiry_of(block_hash, data)) is None:
                damaged.append(block_hash)
            elif now < expires_at:
                found[block_hash] = data
        return found, damaged

    def insert(self, located: Located) -> None:
        """Add a block that has no entry."""
        self._put_record(located)
        self._count(located, 1)
        self.changes.hold({located.record.block_hash: located.record.expires_at})

    def replace(self, old: Located, new: Located) -> None:
        """Change retention, recency or hits of a block that stays where it is."""
        self._put_record(new, old)
        if new.record.expires_at != old.record.expires_at:
            self.changes.hold({new.record.block_hash: new.record.expires_at})

    def remove(self, located: Located, reason: str) -> None:
        """Drop a block's entry and list its extent as pending, to be erased or reused."""
        self._delete("blocks", located.record.block_hash)
        block_hash = located.record.block_hash
        self.changes.leave({block_hash: Left(block_hash, reason, located.extent_bytes)})
        for name, key_of in ORDERS.items():
            self._delete(name, key_of(located.record))
        self._count(located, -1)
        self.add_extent("pending", located.extent)

    def remove_damaged(self, block_hash: bytes) -> None:
        """Drop an entry whose fields cannot be trusted; a rebuild finds its extent and keys."""
        self._delete("blocks", block_hash)
        self.changes.leave({block_hash: Left(block_hash, DAMAGED, 0)})
        self.meta.needs_rebuild = True

    def blocks(self, start: bytes = b"") -> Iterator[tuple[bytes, Located | None]]:
        """Walk over all entries from a key on; a damaged entry is None.

        NOTE: on a damaged page, keys may be out of order. A caller that starts again behind the
        last key may then loop forever.
        """
        for key, data in self.records(start):
            try:
                yield key, decode_record(key, data, self._retentions)
            except CorruptBlockError:
                yield key, None

    def records(self, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Walk over all entries from a key on: keys and sealed records, as they are."""
        return self._walk("blocks", start)

    def some_blocks(self, start: bytes) -> list[tuple[bytes, Located | None]]:
        """Return as many entries from a key on as one transaction may change; see `blocks`."""
        return list(islice(self.blocks(start), TXN_BLOCKS))

    def entries_of(self, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Walk over the keys that begin so, with their sealed records, which are sound."""
        for key, data in self._whole("blocks", start):
            if not key.startswith(start):
                return
            if expiry_of(key, data) is not None:
                yield key, data

    def _put_record(self, located: Located, old: Located | None = None) -> None:
        """Write a record, and those of its keys that the old one does not have."""
        record = located.record
        self._put("blocks", record.block_hash, encode_record(located, self._retentions))
        for name, key_of in ORDERS.items():
            key, old_key = key_of(record), None if old is None else key_of(old.record)
            if key == old_key:
                continue
            if old_key is not None:
                self._delete(name, old_key)
            self._put(name, key)
            if name == "lru":
                tenant, order = key[:TENANT_BYTES], lru_order(key)
                self.first_orders[tenant] = min(self.first_orders.get(tenant, order), order)

    # --- orders -----------------------------------------------------------------------------

    def expired(self, now: float, limit: int) -> list[tuple[bytes, bytes]]:
        """Return up to `limit` expired keys of `expiry` with their block hashes, earliest first."""
        due = to_us(now)
        found: list[tuple[bytes, bytes]] = []
        for key, _ in self._walk("expiry"):
            expires_us, block_hash = split_expiry_key(key)
            if expires_us > due or len(found) >= limit:
                break
            found.append((key, block_hash))
        return found

    def latest_expiry(self) -> float:
        """Return when the last block expires; 0.0 without blocks."""
        with self._txn.cursor(db=self._dbs["expiry"]) as cursor:
            return split_expiry_key(cursor.key())[0] / 1e6 if cursor.last() else 0.0

    def drop_expiry_key(self, key: bytes) -> None:
        """Drop a key of `expiry` that belongs to no sound record."""
        self._delete("expiry", key)

    def longest_unused(self) -> Iterator[bytes]:
        """Walk over the block hashes of all tenants, the longest unused first.

        Nothing may change during the walk.
        """
        orders = [self._orders_of(tenant) for tenant, _ in list(self.first_unused())]
        yield from map(hash_of_order, merge(*orders))

    def first_unused(self) -> Iterator[tuple[bytes, bytes]]:
        """Return each tenant with blocks, and the first of its `lru` keys without the tenant."""
        with self._txn.cursor(db=self._dbs["lru"]) as cursor:
            is_there = cursor.first()
            while is_there:
                key = cursor.key()
                yield (tenant := key[:TENANT_BYTES]), lru_order(key)
                is_there = cursor.set_range(tenant + b"\xff" * (MAX_KEY_BYTES - TENANT_BYTES))
                if is_there and cursor.key() <= key:
                    raise _out_of_order("lru")

    def next_unused(self, tenant: bytes, order: bytes) -> bytes | None:
        """Return the first `lru` key of a tenant from one on, both without the tenant."""
        with self._txn.cursor(db=self._dbs["lru"]) as cursor:
            if not cursor.set_range(start := tenant + order):
                return None
            if (key := cursor.key()) < start:
                raise _out_of_order("lru")
            return lru_order(key) if key.startswith(tenant) else None

    def unused_block(self, order: bytes) -> Located | None:
        """Return the block of an `lru` key without its tenant; None if its entry is damaged."""
        return self.sound(hash_of_order(order))

    # --- extents ------------------------------------------------------------------------------

    def add_extent(self, name: ExtentList, extent: Extent) -> None:
        """Add an extent without a stored block to a list."""
        self._put(name, extent_key(extent))

    def drop_extent(self, name: ExtentList, extent: Extent) -> None:
        """Take an extent off a list."""
        self._delete(name, extent_key(extent))

    def is_listed(self, extent: Extent) -> bool:
        """Return whether an extent is free or pending, so that it holds no stored block."""
        key = extent_key(extent)
        return any(self._get(name, key) is not None for name in ("free", "pending"))

    def extents(self, name: ExtentList, start: bytes = b"") -> Iterator[Extent]:
        """Walk over listed extents in order from a key on; nothing may change during the walk."""
        return (split_extent_key(key) for key, _ in self._whole(name, start))

    def free(self, segment: int) -> Iterator[Extent]:
        """Walk over the free extents of one segment; nothing may change during the walk."""
        start = extent_key(Extent(segment, 0))
        return takewhile(lambda extent: extent.segment == segment, self.extents("free", start))

    def segments(self) -> dict[int, SegmentState]:
        """Return every segment that the index knows."""
        walk = self._whole("segments")
        return {split_segment_key(key): decode_segment(data) for key, data in walk}

    def put_segment(self, segment: int, state: SegmentState) -> None:
        """Add or change a segment."""
        self._put("segments", segment_key(segment), encode(state))

    def get_segment(self, segment: int) -> SegmentState | None:
        """Return one segment, or None if there is none."""
        data = self._get("segments", segment_key(segment))
        return None if data is None else decode_segment(data)

    def num_free(self, first: Extent, most: int) -> int:
        """Return how many extents in a row are free from one on, up to `most`."""
        count = 0
        for key, _ in self._walk("free", extent_key(first)):
            expected = Extent(first.segment, first.number + count)
            if count == most or key != extent_key(expected):
                break
            count += 1
        return count

    def shorten_segment(self, segment: int, state: SegmentState, num_used: int) -> None:
        """Forget the extents of a segment from one on, which are all free; with none left, it."""
        for number in range(num_used, state.num_used):
            self.drop_extent("free", Extent(segment, number))
        if num_used:
            shorter = state._replace(num_extents=num_used, num_used=num_used)
            self.put_segment(segment, shorter)
        else:
            self._delete("segments", segment_key(segment))

    # --- counters, meta -----------------------------------------------------------------

    @cached_property
    def meta(self) -> Meta:
        """What is known of the store as a whole; changes to it are part of the transaction."""
        data = self._get("meta", META_KEY)
        return Meta() if data is None else decode_meta(data)

    def keep(self) -> None:
        """Write the counters and `meta` if they have changed; the last step of a transaction."""
        for namespace, num_blocks in self._new_blocks.items():
            added = num_blocks, self._new_bytes[namespace], self._new_pages[namespace]
            self._keep_totals(namespace, added)
        for scope, num_blocks in self._new_encrypted.items():
            self._keep_encrypted(scope, num_blocks)
        if "meta" in self.__dict__:
            self._put("meta", META_KEY, encode(self.meta))

    def _keep_totals(self, namespace: bytes, added: tuple[int, int, int]) -> None:
        self.meta.totals = self.meta.totals.plus(*added)
        data = self._get("namespaces", namespace)
        before = Totals(0, 0) if data is None else decode_totals(data)
        counted = before.plus(*added)
        self.growth[tenant_of(namespace)] += counted.extent_bytes - before.extent_bytes
        if counted.num_blocks:
            self._put("namespaces", namespace, encode(counted))
        else:
            self._delete("namespaces", namespace)

    def _keep_encrypted(self, scope: bytes, num_blocks: int) -> None:
        self.meta.num_encrypted = max(self.meta.num_encrypted + num_blocks, 0)
        if (count := self.num_encrypted(scope) + num_blocks) > 0:
            self._put("keys", scope, encode(count))
        else:
            self._delete("keys", scope)
            self.emptied.add(scope)

    def saw_time(self, now: float) -> None:
        """Move the latest time seen forward to `now`, if that is later."""
        self.meta.clock = max(self.meta.clock, now)

    def namespaces(self) -> dict[bytes, Totals]:
        """Return the blocks and payload bytes of each namespace that has any."""
        walk = self._whole("namespaces")
        return {key: decode_totals(data) for key, data in walk}

    def tenant_bytes(self) -> Counter[bytes]:
        """Return about how many bytes the extents of each tenant's blocks have.

        If the counters of namespaces are not those of the store, the index will be made again.
        """
        sums, num_blocks = Counter[bytes](), 0
        for namespace, totals in self.namespaces().items():
            sums[tenant_of(namespace)] += totals.extent_bytes
            num_blocks += totals.num_blocks
        if num_blocks != self.meta.totals.num_blocks:
            self.meta.needs_rebuild = True
        return sums

    def _count(self, located: Located, sign: int) -> None:
        """Add a block to the counters of its namespace and of its key, or take it out."""
        namespace = located.record.namespace
        self._new_blocks[namespace] += sign
        self._new_bytes[namespace] += sign * located.payload_bytes
        if located.record.kind:
            self._new_pages[namespace] += sign
            window_bytes = self.meta.window_bytes + sign * located.payload_bytes
            self.meta.window_bytes = max(window_bytes, 0)
            self.meta.page_kinds.add((located.record.kind, located.record.part))
        if is_encrypted(located.codec):
            self._new_encrypted[scope_of(located.record)] += sign

    def num_encrypted(self, scope: bytes) -> int:
        """Return how many blocks are encrypted under the key of a scope."""
        data = self._get("keys", scope)
        return 0 if data is None else decode_count(data)

    # --- whole databases --------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Return the bytes of all pages in use, including the changes of this transaction."""
        stats = list(map(self._txn.stat, self._dbs.values()))
        pages = ("branch_pages", "leaf_pages", "overflow_pages")
        num_pages = sum(stat[name] for stat in stats for name in pages)
        return int(stats[0]["psize"] * (_NUM_FIXED_PAGES + num_pages))

    def is_whole(self, located: Located) -> bool:
        """Return whether a record has its keys, and a used extent not listed as pending or free."""
        state = self.get_segment(located.extent.segment)
        is_used = state is not None and located.extent.number < state.num_used
        keys = [self._get(name, key_of(located.record)) for name, key_of in ORDERS.items()]
        return is_used and None not in keys and not self.is_listed(located.extent)

    def contradictions(self) -> list[str]:
        """Compare all counters and return the names of those that disagree.

        Together with `is_whole` of every record, this finds every lost key.
        """
        num = {name: self._txn.stat(self._dbs[name])["entries"] for name in NAMES}
        num_blocks = num["blocks"]
        num_used = sum(each.num_used for each in self.segments().values())
        sums = list(map(sum, zip(*self.namespaces().values(), strict=True))) or [0, 0, 0]
        num_extents = num_blocks + num["free"] + num["pending"]
        num_encrypted = sum(decode_count(data) for _, data in self._whole("keys"))
        wrong = {
            "keys": any(num[name] != num_blocks for name in ORDERS),
            "sums": sums != list(self.meta.totals) or sums[0] != num_blocks,
            "encrypted": num_encrypted != self.meta.num_encrypted,
            "extents": num_used != num_extents,
            "damaged entries": self.meta.needs_rebuild,
        }
        return [name for name, is_wrong in wrong.items() if is_wrong]

    def some_keys(self, name: str, start: bytes, limit: int) -> tuple[list[bytes], int, int]:
        """Return up to `limit` keys from `start` on, the count of all keys, the transaction id."""
        keys = [key for key, _ in islice(self._walk(name, start), limit)]
        return keys, self._txn.stat(self._dbs[name])["entries"], self._txn.id()

    def clear(self) -> None:
        """Empty all databases but `meta`."""
        for name in NAMES:
            if name != "meta":
                self._txn.drop(self._dbs[name], delete=False)
        self.meta.totals = Totals(0, 0)
        self.meta.num_encrypted = self.meta.window_bytes = 0
        self.meta.needs_rebuild = False

    def _orders_of(self, tenant: bytes) -> Iterator[bytes]:
        keys = (key for key, _ in self._whole("lru", tenant))
        return map(lru_order, takewhile(lambda key: key.startswith(tenant), keys))

    def _get(self, name: str, key: bytes) -> bytes | None:
        found: bytes | None = self._txn.get(key, db=self._dbs[name])
        return found

    def _put(self, name: str, key: bytes, data: bytes = b"") -> None:
        self._txn.put(key, data, db=self._dbs[name])

    def _delete(self, name: str, key: bytes) -> None:
        self._txn.delete(key, db=self._dbs[name])

    def _whole(self, name: str, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Walk over a database as `_walk` does, where nothing else ends the walk.

        A forged tree whose branches all lead to one page would never end.
        """
        last = b""
        for key, data in self._walk(name, start):
            if key <= last:
                raise _out_of_order(name)
            yield (last := key), data

    def _walk(self, name: str, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Walk over a database's entries from a key on; nothing may change during the walk."""
        with self._txn.cursor(db=self._dbs[name]) as cursor:
            if cursor.set_range(start) if start else cursor.first():
                yield from cursor.iternext(keys=True, values=True)


def _out_of_order(name: str) -> CorruptIndexError:
    return CorruptIndexError(f"keys of `{name}` are out of order")
