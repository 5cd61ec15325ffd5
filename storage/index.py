"""The LMDB index: what is stored where, by whom, until when, and how much of it.

Every change to a block changes its secondary keys and the counters in the same transaction. It
knows keys and values (docs/format.md), not files: slots are numbers here. One thread makes all
changes; any thread may read, and neither waits for the other.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from heapq import merge
from itertools import takewhile
from typing import Any, NamedTuple

import lmdb

from tieredkv.errors import CorruptBlockError, StorageError, StoreFullError
from tieredkv.storage import codec
from tieredkv.storage.codec import Extent, Located, expiry_key, expiry_of, extent_key
from tieredkv.types import TENANT_BYTES

MAP_BYTES = 64 << 30
NAMES = ("meta", "blocks", "expiry", "lru", "namespaces", "roots", "segments", "free", "pending")
_TOTALS = struct.Struct("<QQ")
_SEGMENT = struct.Struct("<4I")
_FREE_CLASS = struct.Struct(">I")
_TIME = struct.Struct("<d")
_SYSTEM_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EROFS, errno.ENOMEM)
_NUM_FIXED_PAGES = 3  # two of meta, one of the databases' names
_READ_AHEAD_BYTES = 1 << 20
_MADV_POPULATE_READ = 22


class Totals(NamedTuple):
    """How much is stored, in all or in one namespace."""

    num_blocks: int
    payload_bytes: int

    def plus(self, num_blocks: int, payload_bytes: int) -> "Totals":
        """Return the totals with so much more; what a damaged record miscounted ends at zero."""
        return Totals(max(self[0] + num_blocks, 0), max(self[1] + payload_bytes, 0))


class SegmentState(NamedTuple):
    """What the index knows of a segment file.

    Attributes:
        slot_bytes: the one size of its slots.
        num_slots: slots whose space is set aside in the file.
        num_used: slots below this number were handed out at least once; each of them is a block's,
            free or pending.
        num_live: slots that hold a stored block.
    """

    slot_bytes: int
    num_slots: int
    num_used: int
    num_live: int


@contextmanager
def storage_errors(path: str) -> Iterator[None]:
    """Turn what LMDB and the system raise into StorageError, path and cause kept."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise StoreFullError(f"the index at `{path}` has reached its largest size") from error
    except (lmdb.Error, struct.error) as error:
        if "No space left" in str(error):
            raise StoreFullError(f"no space left for the index at `{path}`") from error
        raise StorageError(f"the index at `{path}` failed: {error}") from error
    except StorageError:
        raise
    except OSError as error:
        what = f"`{error.filename or path}`: {error.strerror}"
        kind = StoreFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
        raise kind(error.errno or errno.EIO, what) from error


def is_damage(error: BaseException) -> bool:
    """Whether an error comes from an index that contradicts itself, not from the system below it.

    Entries of an impossible length are damage too.
    """
    cause = error.__cause__
    if not isinstance(cause, lmdb.Error | struct.error) or isinstance(cause, lmdb.MapFullError):
        return False
    return not any(os.strerror(code) in str(cause) for code in _SYSTEM_ERRORS)


class Index:
    """The LMDB environment of a store."""

    def __init__(self, path: str, *, sync: bool) -> None:
        self.path = path
        self._sync = sync
        self._env: Any = None
        self._open()

    def _open(self) -> None:
        with storage_errors(self.path):
            self._env = lmdb.open(
                self.path,
                map_size=MAP_BYTES,
                max_dbs=len(NAMES),
                mode=0o600,
                readahead=False,
                sync=self._sync,
                metasync=False,
            )
            # NOTE: what a short file lacks must read as damage: under the map it would be SIGBUS.
            # It may lack pages that were never written, so being short is no damage yet.
            size = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
            with open(os.path.join(self.path, "data.mdb"), "r+b") as data:
                data.truncate(max(size, data.seek(0, os.SEEK_END)))
            self._dbs = {name: self._env.open_db(name.encode()) for name in NAMES}

    @contextmanager
    def reading(self) -> Iterator["IndexTxn"]:
        """Look at one consistent state."""
        with storage_errors(self.path), self._env.begin() as txn:
            yield IndexTxn(txn, self._dbs)

    @contextmanager
    def writing(self) -> Iterator["IndexTxn"]:
        """Change the index; all of it or, if anything raises, nothing."""
        with storage_errors(self.path), self._env.begin(write=True) as txn:
            yield IndexTxn(txn, self._dbs)

    def read_ahead(self) -> None:
        """Bring the file into memory and into LMDB's map, or each of the first lookups waits."""
        path = os.path.join(self.path, "data.mdb")
        with (
            suppress(OSError),
            open(path, "rb", buffering=0) as file,
            open("/proc/self/maps") as maps,
        ):
            while file.read(_READ_AHEAD_BYTES):
                pass
            for line in maps:
                if line.rstrip().endswith(os.path.realpath(path)):
                    start = ctypes.c_void_p(int(line.partition("-")[0], 16))
                    size = ctypes.c_size_t(os.fstat(file.fileno()).st_size)
                    # An older kernel does not know the advice, and pages come as they are touched.
                    ctypes.CDLL(None).madvise(start, size, _MADV_POPULATE_READ)

    def compact(self) -> None:
        """Replace the index file by a copy without unused pages; no transaction may be open."""
        draft = os.path.join(self.path, "compact.mdb")
        with storage_errors(self.path):
            fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            try:
                os.fchmod(fd, 0o600)
                self._env.copyfd(fd, compact=True)
                os.fsync(fd)
            except BaseException:
                os.unlink(draft)
                raise
            finally:
                os.close(fd)
            self._env.close()
            os.rename(draft, os.path.join(self.path, "data.mdb"))
        self._open()

    def used_bytes(self) -> int:
        """What a copy takes: pages in use; it has none of the free pages' own tree."""
        with self.reading() as txn:
            return txn.used_bytes()

    def close(self) -> None:
        """Close the environment."""
        with storage_errors(self.path):
            if self._env is not None:
                self._env.sync(True)
                self._env.close()
                self._env = None


class IndexTxn:
    """Reads and changes within one transaction; whoever changes a block changes its counters."""

    def __init__(self, txn: Any, dbs: dict[str, Any]) -> None:
        self._txn = txn
        self._dbs = dbs
        self._blocks = dbs["blocks"]

    # --- blocks -----------------------------------------------------------------------------

    def get(self, block_hash: bytes) -> Located | None:
        """Decode one entry; None where there is none.

        Raises:
            CorruptBlockError: the record contradicts its checksum or key.
        """
        data = self._txn.get(block_hash, db=self._blocks)
        return None if data is None else codec.decode_record(block_hash, data)

    def find(self, hashes: Sequence[bytes], now: float) -> tuple[dict[bytes, bytes], list[bytes]]:
        """The sealed records that have not expired, and the hashes of damaged ones.

        Nothing is decoded, and neighbours are looked up one after the other: this is what a lookup
        of thousands of blocks costs.
        """
        found: dict[bytes, bytes] = {}
        damaged: list[bytes] = []
        with self._txn.cursor(db=self._blocks) as cursor:
            for block_hash in sorted(hashes):
                if (data := cursor.get(block_hash)) is None:
                    continue
                if (expires_at := expiry_of(block_hash, data)) is None:
                    damaged.append(block_hash)
                elif now < expires_at:
                    found[block_hash] = data
        return found, damaged

    def insert(self, located: Located) -> None:
        """Add a block that has no entry."""
        self._put_keys(located)
        self._count(located, 1)

    def replace(self, old: Located, new: Located) -> None:
        """Change retention, recency or hits of a block that stays where it is."""
        self._delete_keys(old)
        self._put_keys(new)

    def remove(self, located: Located) -> None:
        """Drop a block's entry and list its slot as pending, to be erased or reused."""
        self._txn.delete(located.record.block_hash, db=self._blocks)
        self._delete_keys(located)
        self._count(located, -1)
        self.add_pending(located.extent)

    def remove_damaged(self, block_hash: bytes) -> None:
        """Drop an entry whose fields cannot be trusted; a rebuild finds its slot and keys again."""
        self._txn.delete(block_hash, db=self._blocks)
        self.set_meta("needs_rebuild", b"1")

    def blocks(self, start: bytes = b"") -> Iterator[tuple[bytes, Located | None]]:
        """Walk over all entries from a key on; None for a damaged one.

        NOTE: where a page is damaged, keys may go back: whoever starts again behind the last one
        may go in circles.
        """
        for key, data in self._walk("blocks", start):
            try:
                yield key, codec.decode_record(key, data)
            except CorruptBlockError:
                yield key, None

    def _put_keys(self, located: Located) -> None:
        record = located.record
        self._txn.put(record.block_hash, codec.encode_record(located), db=self._blocks)
        self._txn.put(expiry_key(record), b"", db=self._dbs["expiry"])
        self._txn.put(codec.lru_key(record), b"", db=self._dbs["lru"])

    def _delete_keys(self, located: Located) -> None:
        self._txn.delete(expiry_key(located.record), db=self._dbs["expiry"])
        self._txn.delete(codec.lru_key(located.record), db=self._dbs["lru"])

    # --- orders -----------------------------------------------------------------------------

    def expired(self, now: float, limit: int) -> list[tuple[bytes, bytes]]:
        """The first keys of `expiry` that are due, and their hashes; costs what it answers."""
        due = codec.to_us(now)
        found: list[tuple[bytes, bytes]] = []
        for key, _ in self._walk("expiry"):
            expires_us, block_hash = codec.split_expiry_key(key)
            if expires_us > due or len(found) >= limit:
                break
            found.append((key, block_hash))
        return found

    def drop_expiry_key(self, key: bytes) -> None:
        """Drop a key of `expiry` that no sound record stands behind."""
        self._txn.delete(key, db=self._dbs["expiry"])

    def longest_unused(self, kept: Container[bytes] = ()) -> Iterator[bytes]:
        """Hashes across namespaces, the longest unused first; change nothing while it walks.

        Those of tenants to be kept come after all others.
        """
        namespaces = [namespace for namespace, _ in self._walk("namespaces")]
        for is_kept in (False, True):
            some = [each for each in namespaces if (each[:TENANT_BYTES] in kept) == is_kept]
            orders = [self._keys_with(codec.lru_prefix(each), "lru") for each in some]
            yield from map(codec.lru_hash, merge(*orders, key=codec.lru_order))

    # --- slots ------------------------------------------------------------------------------

    def add_pending(self, extent: Extent) -> None:
        """List a slot that may hold bytes of no stored block."""
        self._txn.put(extent_key(extent), b"", db=self._dbs["pending"])

    def drop_pending(self, extent: Extent) -> None:
        """Take a slot off the list: a block owns it now, or it is erased."""
        self._txn.delete(extent_key(extent), db=self._dbs["pending"])

    def pending(self, start: bytes = b"") -> Iterator[Extent]:
        """Pending slots from a key on, neighbours together; change nothing while it walks."""
        return (codec.split_extent_key(key) for key, _ in self._walk("pending", start))

    def add_free(self, slot_bytes: int, extent: Extent) -> None:
        """List an erased slot."""
        self._txn.put(_free_key(slot_bytes, extent), b"", db=self._dbs["free"])

    def drop_free(self, slot_bytes: int, extent: Extent) -> None:
        """Take a slot off the free list."""
        self._txn.delete(_free_key(slot_bytes, extent), db=self._dbs["free"])

    def free(self, slot_bytes: int) -> Iterator[Extent]:
        """Free slots of one size; change nothing while it walks."""
        keys = self._keys_with(_FREE_CLASS.pack(slot_bytes), "free")
        return (codec.split_extent_key(key[_FREE_CLASS.size :]) for key in keys)

    def segments(self) -> dict[int, SegmentState]:
        """Every segment that the index knows."""
        walk = self._walk("segments")
        states = {key: SegmentState(*_SEGMENT.unpack(data)) for key, data in walk}
        return {int.from_bytes(key, "big"): state for key, state in states.items()}

    def put_segment(self, segment: int, state: SegmentState) -> None:
        """Add or change a segment."""
        self._txn.put(segment.to_bytes(4, "big"), _SEGMENT.pack(*state), db=self._dbs["segments"])

    def get_segment(self, segment: int) -> SegmentState | None:
        """One segment; None where there is none."""
        data = self._txn.get(segment.to_bytes(4, "big"), db=self._dbs["segments"])
        return None if data is None else SegmentState(*_SEGMENT.unpack(data))

    def remove_segment(self, segment: int, slot_bytes: int) -> None:
        """Forget a segment without live and pending slots, with its free slots."""
        prefix = _FREE_CLASS.pack(slot_bytes) + segment.to_bytes(4, "big")
        for key in list(self._keys_with(prefix, "free")):
            self._txn.delete(key, db=self._dbs["free"])
        self._txn.delete(segment.to_bytes(4, "big"), db=self._dbs["segments"])

    # --- counters, meta -----------------------------------------------------------------

    def totals(self) -> Totals:
        """Blocks and payload bytes in all."""
        return Totals(*_TOTALS.unpack(self.meta("totals") or bytes(_TOTALS.size)))

    def namespaces(self) -> dict[bytes, Totals]:
        """Blocks and payload bytes per namespace that has any."""
        return {key: Totals(*_TOTALS.unpack(data)) for key, data in self._walk("namespaces")}

    def meta(self, name: str) -> bytes | None:
        """One value of `meta`."""
        value: bytes | None = self._txn.get(name.encode(), db=self._dbs["meta"])
        return value

    def set_meta(self, name: str, value: bytes | None) -> None:
        """Set one value of `meta`; None deletes it."""
        if value is None:
            self._txn.delete(name.encode(), db=self._dbs["meta"])
        else:
            self._txn.put(name.encode(), value, db=self._dbs["meta"])

    def bytes_written(self) -> int:
        """What was written to segment files since the index was made."""
        return int.from_bytes(self.meta("written") or b"", "little")

    def clock_mark(self) -> float | None:
        """The latest time that this store has seen."""
        value = self.meta("clock")
        return None if value is None else float(_TIME.unpack(value)[0])

    def set_clock_mark(self, now: float, *, is_empty: bool = False) -> None:
        """Raise the latest time seen; lower it only where nothing is stored any more."""
        if is_empty or now > (self.clock_mark() or 0.0):
            self.set_meta("clock", _TIME.pack(now))

    def _count(self, located: Located, sign: int) -> None:
        """Add a block to its namespace, its segment and the totals, or take it out."""
        namespace, payload_bytes = located.record.namespace, sign * located.payload_bytes
        self.set_meta("totals", _TOTALS.pack(*self.totals().plus(sign, payload_bytes)))
        data = self._txn.get(namespace, db=self._dbs["namespaces"])
        counted = Totals(*_TOTALS.unpack(data or bytes(_TOTALS.size))).plus(sign, payload_bytes)
        if counted.num_blocks:
            self._txn.put(namespace, _TOTALS.pack(*counted), db=self._dbs["namespaces"])
        else:
            self._txn.delete(namespace, db=self._dbs["namespaces"])
        if (state := self.get_segment(located.extent.segment)) is not None:
            state = state._replace(num_live=max(state.num_live + sign, 0))
            self.put_segment(located.extent.segment, state)

    # --- whole databases --------------------------------------------------------------------

    def used_bytes(self) -> int:
        """What all pages in use take, those of this transaction's changes as well."""
        stats = list(map(self._txn.stat, self._dbs.values()))
        pages = ("branch_pages", "leaf_pages", "overflow_pages")
        num_pages = sum(stat[name] for stat in stats for name in pages)
        return int(stats[0]["psize"] * (_NUM_FIXED_PAGES + num_pages))

    def is_whole(self, located: Located) -> bool:
        """Whether a record has its keys, and a slot in use that is on no other list."""
        record, extent = located.record, extent_key(located.extent)
        state = self.get_segment(located.extent.segment) or SegmentState(0, 0, 0, 0)
        free_key = _FREE_CLASS.pack(state.slot_bytes) + extent
        keys = (expiry_key(record), codec.lru_key(record), extent, free_key)
        names = ("expiry", "lru", "pending", "free")
        found = [
            self._txn.get(key, db=self._dbs[name]) for key, name in zip(keys, names, strict=True)
        ]
        return located.extent.slot < state.num_used and found == [b"", b"", None, None]

    def contradictions(self) -> list[str]:
        """Compare all counters; with `is_whole` of every record none goes unseen."""
        num = {name: self._txn.stat(self._dbs[name])["entries"] for name in NAMES}
        num_blocks, segments = num["blocks"], self.segments().values()
        sums = list(map(sum, zip(*self.namespaces().values(), strict=True))) or [0, 0]
        num_slots = num_blocks + num["free"] + num["pending"]
        wrong = {
            "keys": num_blocks != num["expiry"] or num_blocks != num["lru"],
            "sums": sums != list(self.totals()) or sums[0] != num_blocks,
            "segments": sum(each.num_live for each in segments) != num_blocks,
            "slots": sum(each.num_used for each in segments) != num_slots,
            "damaged entries": self.meta("needs_rebuild") is not None,
        }
        return [name for name, is_wrong in wrong.items() if is_wrong]

    def clear(self, segments: dict[int, SegmentState]) -> None:
        """Empty all databases but `meta`; these segments are known then, with nothing in them."""
        for name in NAMES:
            if name != "meta":
                self._txn.drop(self._dbs[name], delete=False)
        self.set_meta("totals", None)
        self.set_meta("needs_rebuild", None)
        for segment, state in segments.items():
            self.put_segment(segment, state._replace(num_live=0))

    def _keys_with(self, prefix: bytes, name: str) -> Iterator[bytes]:
        keys = (key for key, _ in self._walk(name, prefix))
        return takewhile(lambda key: key.startswith(prefix), keys)

    def _walk(self, name: str, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Walk from a key on; nothing may change meanwhile."""
        with self._txn.cursor(db=self._dbs[name]) as cursor:
            if cursor.set_range(start) if start else cursor.first():
                yield from cursor.iternext(keys=True, values=True)


def _free_key(slot_bytes: int, extent: Extent) -> bytes:
    return _FREE_CLASS.pack(slot_bytes) + extent_key(extent)
