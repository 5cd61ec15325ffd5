"""The LMDB index: which blocks are stored, where, for which namespace, and until when.

Every change to a block changes its secondary keys and the counters in the same transaction. This
module knows keys and values (docs/format.md), not segment files: extents are numbers here.

One thread makes all changes and any thread may read; neither waits for the other. Only
`looking_over`, which reads the whole index, takes turns with changes: LMDB cannot reuse a page
while a read transaction is open that began before the page was released.
"""

import ctypes
import errno
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from heapq import merge
from itertools import islice, pairwise, takewhile
from typing import Any, Literal, NamedTuple, TypeVar

import lmdb
import msgspec
import numpy as np
from msgspec.structs import replace

from tieredkv.errors import CorruptBlockError, CorruptIndexError, StorageError
from tieredkv.storage import codec
from tieredkv.storage.codec import Extent, Located, expiry_key, expiry_of, extent_key
from tieredkv.storage.index_pages import DATA_FILE, read_meta
from tieredkv.storage.limits import check_address_space
from tieredkv.storage.verdicts import storage_errors
from tieredkv.types import PAGE_ALIGNMENT_BYTES, TENANT_BYTES

MAP_BYTES = 64 << 30
NAMES = ("meta", "blocks", "expiry", "lru", "namespaces", "segments", "free", "pending")
_META_KEY = b"store"
_NUM_FIXED_PAGES = 3  # two meta pages and one page with the databases' names
_LIB_VERSION = 0  # selects the version of LMDB that writes `index_pages.DATA_VERSION`
_COMPACTED = "compact.mdb"
_AHEAD_BYTES = 2 << 20  # more than one ordinary transaction adds to the file
PAGE_BYTES = 4096
_PAGE_HEADER_BYTES = 16
_PAGE = np.dtype(  # the header of an LMDB page; its flags are 1 in a branch and 2 in a leaf
    {
        "names": ["number", "flags", "lower", "upper"],
        "formats": ["<u8", "<u2", "<u2", "<u2"],
        "offsets": [0, 10, 12, 14],
        "itemsize": PAGE_BYTES,
    }
)
_LOOKED_OVER_KEYS = 256  # how many keys one step of `looking_over` checks
_READ_AHEAD_BYTES = 1 << 20
_MADV_POPULATE_READ = 22


class Totals(NamedTuple):
    """How many blocks and payload bytes are stored, in all or in one namespace."""

    num_blocks: int
    payload_bytes: int

    def plus(self, num_blocks: int, payload_bytes: int) -> "Totals":
        """Return the sums; they never fall below zero, even if a damaged record was miscounted."""
        return Totals(max(self[0] + num_blocks, 0), max(self[1] + payload_bytes, 0))


class SegmentState(NamedTuple):
    """What the index knows of a segment file.

    Attributes:
        extent_bytes: the size of each of its extents.
        num_extents: how many extents have their space set aside in the file.
        num_used: extents below this number were handed out at least once; each of them belongs to a
            block, is free or is pending.
    """

    extent_bytes: int
    num_extents: int
    num_used: int


class Meta(msgspec.Struct):
    """What the index knows of the store as a whole.

    Attributes:
        format: version of the format; 0 until the index is complete.
        clock: the latest time that the store has seen.
        bytes_written: bytes written to segment files since the index was made.
        needs_rebuild: whether an entry was found damaged; the next sweep then makes the databases
            again.
        faults: cache faults by reason.
    """

    format: int = 0
    clock: float = 0.0
    next_segment: int = 1
    totals: Totals = Totals(0, 0)
    bytes_written: int = 0
    needs_rebuild: bool = False
    faults: dict[str, int] = {}


ExtentList = Literal["pending", "free"]
"""A list of extents without a stored block: `pending` ones may hold old bytes, `free` ones none."""

_ORDERS = {"expiry": expiry_key, "lru": codec.lru_key}
_encode = msgspec.msgpack.Encoder().encode
_decode_meta = msgspec.msgpack.Decoder(Meta).decode
_decode_totals = msgspec.msgpack.Decoder(Totals).decode
_decode_segment = msgspec.msgpack.Decoder(SegmentState).decode
Value = TypeVar("Value")


def _understand(database: str, decode: Callable[[bytes], Value], data: bytes) -> Value:
    """Decode a key or value of the index.

    Raises:
        CorruptIndexError: the store never writes such bytes.
    """
    try:
        return decode(data)
    except (struct.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptIndexError(f"an entry of `{database}` is damaged: {error}") from error


def _read_segment(data: bytes) -> SegmentState:
    """Decode the state of a segment; an impossible state raises CorruptIndexError."""
    state = _understand("segments", _decode_segment, data)
    is_so = state.extent_bytes > 0 and state.extent_bytes % PAGE_ALIGNMENT_BYTES == 0
    if not is_so or not 0 <= state.num_used <= state.num_extents:
        raise CorruptIndexError(f"an entry of `segments` is damaged: {state} is impossible")
    return state


def _read_lru_hash(key: bytes) -> bytes:
    """Take the block hash from a key of `lru`."""
    if not (block_hash := codec.lru_hash(key)):
        raise CorruptIndexError("a key of `lru` is damaged: it names no block")
    return block_hash


class Index:
    """The LMDB environment of a store."""

    def __init__(self, path: str, *, sync: bool) -> None:
        self.path = path
        self.sync = sync
        self._opened: Any = None
        self._file_end = 0
        self._changing = threading.Lock()
        self._open()

    def _open(self) -> None:
        with storage_errors(self.path):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, _COMPACTED))
            read_meta(self.path)
            check_address_space(f"the index at `{self.path}`", MAP_BYTES)
            env = self._open_beside(
                max_dbs=len(NAMES),
                map_size=MAP_BYTES,
                mode=0o600,
                readahead=False,
                sync=self.sync,
                metasync=False,
                lib_version=_LIB_VERSION,
            )
            try:
                # NOTE: the file is given its full length. Otherwise, reading a page that a short
                # file lacks would raise SIGBUS; now it reads as damage. A short file alone is no
                # damage, because pages that were never written may be missing. Bytes behind the
                # last page are empty, and cutting them off saves room in a copied file.
                size = self._end_bytes(env)
                os.truncate(os.path.join(self.path, DATA_FILE), size)
                self._file_end, self._opened = size, (env, dict[str, Any]())
                self.keep_ahead()
                self._opened = env, {name: env.open_db(name.encode()) for name in NAMES}
            except BaseException:
                env.close()
                raise

    def _open_beside(self, **options: Any) -> Any:
        """Open the environment with LMDB's lock file in memory; only this process uses it.

        LMDB writes to a map of the lock file. On a filesystem without room for a changed page, such
        as a full btrfs, that write would raise SIGBUS.
        """
        lock_fd = os.memfd_create("tieredkv-readers", os.MFD_CLOEXEC)
        try:
            with tempfile.TemporaryDirectory(prefix="tieredkv-index-") as folder:
                data = os.path.join(os.path.abspath(self.path), DATA_FILE)
                os.symlink(data, os.path.join(folder, DATA_FILE))
                os.symlink(f"/proc/self/fd/{lock_fd}", os.path.join(folder, "lock.mdb"))
                return lmdb.open(folder, **options)
        finally:
            os.close(lock_fd)

    @contextmanager
    def reading(self) -> Iterator["IndexTxn"]:
        """Open a transaction that reads one consistent state of the index.

        Raises:
            StorageError: the index is closed, or LMDB failed; see `tieredkv.storage.verdicts`.
        """
        if self._opened is None:
            raise StorageError(errno.EBADF, f"the index at `{self.path}` is closed")
        env, dbs = self._opened
        with storage_errors(self.path), env.begin() as txn:
            yield IndexTxn(txn, dbs)

    @contextmanager
    def writing(self) -> Iterator["IndexTxn"]:
        """Change the index in one transaction, which is undone if anything raises."""
        env, dbs = self._opened
        with self._changing, storage_errors(self.path), env.begin(write=True) as txn:
            self.keep_ahead()
            changes = IndexTxn(txn, dbs)
            yield changes
            changes.keep_meta()

    def keep_ahead(self, num_bytes: int = _AHEAD_BYTES) -> None:
        """Keep the file's length `num_bytes` beyond its last page; the extra bytes take no space.

        LMDB then never makes the file grow by writing at its end. Some filesystems (XFS) give a
        file that grows that way far more space than was written, which the store cannot plan for.
        """
        end = self._end_bytes(self._opened[0]) + num_bytes
        if end > self._file_end:
            self._file_end = end + _AHEAD_BYTES
            os.truncate(os.path.join(self.path, DATA_FILE), self._file_end)

    @staticmethod
    def _end_bytes(env: Any) -> int:
        """Return the file offset at which the last page ends that was ever used."""
        return int((env.info()["last_pgno"] + 1) * env.stat()["psize"])

    def reading_ahead(self) -> Iterator[bool]:
        """Read the whole file and fill LMDB's map, so that the first lookups wait for no page.

        Yields after each short step whether all tree pages read in it lie where their numbers say.
        """
        path, first_page = os.path.join(self.path, DATA_FILE), 0
        with self.reading():
            page_bytes = self._opened[0].stat()["psize"]  # more than 4 KiB on some machines
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            while data := file.read(_READ_AHEAD_BYTES):
                pages = np.frombuffer(data, _PAGE, len(data) // PAGE_BYTES)
                pages = pages[:: page_bytes // PAGE_BYTES]
                places = np.arange(first_page, first_page := first_page + len(pages))
                is_tree = (pages["flags"] - 1 < 2) & (pages["lower"] >= _PAGE_HEADER_BYTES)
                is_tree &= (pages["lower"] <= pages["upper"]) & (pages["upper"] <= page_bytes)
                yield not np.any(is_tree & (pages["number"] != places))
            # NOTE: bytes behind the last page are left out: in a tmpfs they would take up room.
            size = ctypes.c_size_t(self._end_bytes(self._opened[0]))
            with open("/proc/self/maps") as maps:
                for line in maps:
                    if line.rstrip().endswith(os.path.realpath(path)):
                        start = ctypes.c_void_p(int(line.partition("-")[0], 16))
                        # Older kernels refuse this advice; pages are then read when first used.
                        ctypes.CDLL(None).madvise(start, size, _MADV_POPULATE_READ)

    def looking_over(self) -> Iterator[bool]:
        """Check the index in short steps: first the order of keys, last the counters.

        Yields after each step whether that step found no fault. No transaction outlives its step,
        so blocks may change between steps. The number of keys is compared only if the index did not
        change during the walk.
        """
        for name in ("blocks", *_ORDERS):
            start, num_keys, states = b"", 0, set[int]()
            while True:
                with self._changing, self.reading() as txn:
                    keys, num_entries, state = txn.some_keys(name, start, _LOOKED_OVER_KEYS)
                states.add(state)
                num_keys += len(keys)
                if not keys:
                    break
                yield all(key < other for key, other in pairwise([start, *keys]))
                start = keys[-1] + b"\0"
            yield num_keys == num_entries or len(states) > 1
        with self._changing, self.reading() as txn:
            is_sound = not txn.contradictions()
        yield is_sound

    def compact(self) -> None:
        """Replace the index file by a copy without unused pages; no transaction may be open."""
        draft = os.path.join(self.path, _COMPACTED)
        with storage_errors(self.path):
            fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            try:
                os.fchmod(fd, 0o600)
                os.ftruncate(fd, self.used_bytes())  # see `keep_ahead`
                self._opened[0].copyfd(fd, compact=True)
                os.fsync(fd)
            except BaseException:
                os.unlink(draft)
                raise
            finally:
                os.close(fd)
            self._opened[0].close()
            os.rename(draft, os.path.join(self.path, DATA_FILE))
        self._open()

    def become(self, draft: "Index") -> None:
        """Take over the environment of `draft`, whose folder has replaced this one's.

        Running read transactions finish on the old environment, which closes after the last one.
        """
        self._opened, self._file_end = draft._opened, draft._file_end

    def file_bytes(self) -> int:
        """Return how many bytes the index file occupies on disk."""
        return os.stat(os.path.join(self.path, DATA_FILE)).st_blocks * 512

    def used_bytes(self) -> int:
        """Return the size of a compacted copy: the pages in use, without the free list."""
        with self.reading() as txn:
            return txn.used_bytes()

    def flush(self) -> None:
        """Flush every change so far to the device."""
        with storage_errors(self.path):
            self._opened[0].sync(True)

    def close(self) -> None:
        """Flush and close the environment; may be called again."""
        if self._opened is not None:
            self.flush()
            size = self._end_bytes(self._opened[0])
            self._opened[0].close()
            self._opened = None
            with suppress(OSError):  # the length kept ahead is not needed any more
                os.truncate(os.path.join(self.path, DATA_FILE), size)


class IndexTxn:
    """Reads and changes within one transaction; every change of a block updates the counters."""

    def __init__(self, txn: Any, dbs: dict[str, Any]) -> None:
        self._txn = txn
        self._dbs = dbs
        self._blocks = dbs["blocks"]

    # --- blocks -----------------------------------------------------------------------------

    def get(self, block_hash: bytes) -> Located | None:
        """Return one decoded entry, or None if there is none.

        Raises:
            CorruptBlockError: the record contradicts its checksum or key.
        """
        data = self._txn.get(block_hash, db=self._blocks)
        return None if data is None else codec.decode_record(block_hash, data)

    def find(self, hashes: Sequence[bytes], now: float) -> tuple[dict[bytes, bytes], list[bytes]]:
        """Return the sealed records that have not expired, and the hashes of damaged ones.

        This is the main cost of a lookup of thousands of blocks. Records are therefore not decoded,
        and hashes are looked up in sorted order.
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
        """Drop a block's entry and list its extent as pending, to be erased or reused."""
        self._txn.delete(located.record.block_hash, db=self._blocks)
        self._delete_keys(located)
        self._count(located, -1)
        self.add_extent("pending", located.extent)

    def remove_damaged(self, block_hash: bytes) -> None:
        """Drop an entry whose fields cannot be trusted; a rebuild finds its extent and keys."""
        self._txn.delete(block_hash, db=self._blocks)
        self.meta.needs_rebuild = True

    def blocks(self, start: bytes = b"") -> Iterator[tuple[bytes, Located | None]]:
        """Walk over all entries from a key on; a damaged entry is None.

        NOTE: on a damaged page, keys may be out of order. A caller that starts again behind the
        last key may then loop forever.
        """
        for key, data in self._walk("blocks", start):
            try:
                yield key, codec.decode_record(key, data)
            except CorruptBlockError:
                yield key, None

    def links(self, start: bytes = b"") -> Iterator[tuple[bytes, codec.Link | None]]:
        """Walk as `blocks` does, but decode only the links; bytes that are no record give None.

        A link says which block a block follows. The seals of the records are not checked.
        """
        return map(_link, self._walk("blocks", start))

    def hashes_from(self, start: bytes) -> Iterator[bytes]:
        """Walk over the hashes of all entries from a key on, without looking at the entries."""
        return (key for key, _ in self._walk("blocks", start))

    def _put_keys(self, located: Located) -> None:
        record = located.record
        self._txn.put(record.block_hash, codec.encode_record(located), db=self._blocks)
        for name, key_of in _ORDERS.items():
            self._txn.put(key_of(record), b"", db=self._dbs[name])

    def _delete_keys(self, located: Located) -> None:
        for name, key_of in _ORDERS.items():
            self._txn.delete(key_of(located.record), db=self._dbs[name])

    # --- orders -----------------------------------------------------------------------------

    def expired(self, now: float, limit: int) -> list[tuple[bytes, bytes]]:
        """Return up to `limit` expired keys of `expiry` with their block hashes, earliest first."""
        due = codec.to_us(now)
        found: list[tuple[bytes, bytes]] = []
        for key, _ in self._walk("expiry"):
            expires_us, block_hash = _understand("expiry", codec.split_expiry_key, key)
            if expires_us > due or len(found) >= limit:
                break
            found.append((key, block_hash))
        return found

    def drop_expiry_key(self, key: bytes) -> None:
        """Drop a key of `expiry` that belongs to no sound record."""
        self._txn.delete(key, db=self._dbs["expiry"])

    def longest_unused(self, kept: Container[bytes] = ()) -> Iterator[bytes]:
        """Walk over the block hashes of all namespaces, the longest unused first.

        Blocks of the tenants in `kept` come after all others. Nothing may change during the walk.
        """
        namespaces = [namespace for namespace, _ in self._walk("namespaces")]
        for is_kept in (False, True):
            some = [each for each in namespaces if (each[:TENANT_BYTES] in kept) == is_kept]
            orders = [self._lru_keys(codec.lru_prefix(each)) for each in some]
            yield from map(_read_lru_hash, merge(*orders, key=codec.lru_order))

    # --- extents ------------------------------------------------------------------------------

    def add_extent(self, name: ExtentList, extent: Extent) -> None:
        """Add an extent without a stored block to a list."""
        self._txn.put(extent_key(extent), b"", db=self._dbs[name])

    def drop_extent(self, name: ExtentList, extent: Extent) -> None:
        """Take an extent off a list."""
        self._txn.delete(extent_key(extent), db=self._dbs[name])

    def extents(self, name: ExtentList, start: bytes = b"") -> Iterator[Extent]:
        """Walk over listed extents in order from a key on; nothing may change during the walk."""
        keys = (key for key, _ in self._walk(name, start))
        return (_understand(name, codec.split_extent_key, key) for key in keys)

    def free(self, segment: int) -> Iterator[Extent]:
        """Walk over the free extents of one segment; nothing may change during the walk."""
        start = extent_key(Extent(segment, 0))
        return takewhile(lambda extent: extent.segment == segment, self.extents("free", start))

    def segments(self) -> dict[int, SegmentState]:
        """Return every segment that the index knows."""
        walk = self._walk("segments")
        return {int.from_bytes(key, "big"): _read_segment(data) for key, data in walk}

    def put_segment(self, segment: int, state: SegmentState) -> None:
        """Add or change a segment."""
        self._txn.put(_segment_key(segment), _encode(state), db=self._dbs["segments"])

    def get_segment(self, segment: int) -> SegmentState | None:
        """Return one segment, or None if there is none."""
        data = self._txn.get(_segment_key(segment), db=self._dbs["segments"])
        return None if data is None else _read_segment(data)

    def is_empty(self, segment: int, num_used: int) -> bool:
        """Return whether every extent handed out is free; it stops at the first that is not."""
        free = (extent.number for extent in self.free(segment))
        return all(next(free, None) == number for number in range(num_used))

    def remove_segment(self, segment: int) -> None:
        """Forget a segment and its extents, which must all be free."""
        for extent in list(self.free(segment)):
            self.drop_extent("free", extent)
        self._txn.delete(_segment_key(segment), db=self._dbs["segments"])

    # --- counters, meta -----------------------------------------------------------------

    @cached_property
    def meta(self) -> Meta:
        """What is known of the store as a whole; changes to it are part of the transaction."""
        data = self._txn.get(_META_KEY, db=self._dbs["meta"])
        return Meta() if data is None else _understand("meta", _decode_meta, data)

    def keep_meta(self) -> None:
        """Write `meta` if it was read in this transaction; this must be the last step of it."""
        if "meta" in self.__dict__:
            self._txn.put(_META_KEY, _encode(self.meta), db=self._dbs["meta"])

    def saw_time(self, now: float) -> None:
        """Move the latest time seen forward to `now`, if that is later."""
        self.meta.clock = max(self.meta.clock, now)

    def namespaces(self) -> dict[bytes, Totals]:
        """Return the blocks and payload bytes of each namespace that has any."""
        walk = self._walk("namespaces")
        return {key: _understand("namespaces", _decode_totals, data) for key, data in walk}

    def _count(self, located: Located, sign: int) -> None:
        """Add a block to the counters of its namespace and to the totals, or take it out."""
        namespace, payload_bytes = located.record.namespace, sign * located.payload_bytes
        self.meta.totals = self.meta.totals.plus(sign, payload_bytes)
        data = self._txn.get(namespace, db=self._dbs["namespaces"])
        before = Totals(0, 0)
        if data is not None:
            before = _understand("namespaces", _decode_totals, data)
        counted = before.plus(sign, payload_bytes)
        if counted.num_blocks:
            self._txn.put(namespace, _encode(counted), db=self._dbs["namespaces"])
        else:
            self._txn.delete(namespace, db=self._dbs["namespaces"])

    # --- whole databases --------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Return the bytes of all pages in use, including the changes of this transaction."""
        stats = list(map(self._txn.stat, self._dbs.values()))
        pages = ("branch_pages", "leaf_pages", "overflow_pages")
        num_pages = sum(stat[name] for stat in stats for name in pages)
        return int(stats[0]["psize"] * (_NUM_FIXED_PAGES + num_pages))

    def is_whole(self, located: Located) -> bool:
        """Return whether a record has its keys, and a used extent not listed as pending or free."""
        keys = {name: key_of(located.record) for name, key_of in _ORDERS.items()}
        keys |= dict.fromkeys(("pending", "free"), extent_key(located.extent))
        found = [self._txn.get(key, db=self._dbs[name]) for name, key in keys.items()]
        state = self.get_segment(located.extent.segment)
        is_used = state is not None and located.extent.number < state.num_used
        return is_used and found == [b"", b"", None, None]

    def contradictions(self) -> list[str]:
        """Compare all counters and return the names of those that disagree.

        Together with `is_whole` of every record, this finds every lost key.
        """
        num = {name: self._txn.stat(self._dbs[name])["entries"] for name in NAMES}
        num_blocks = num["blocks"]
        num_used = sum(each.num_used for each in self.segments().values())
        sums = list(map(sum, zip(*self.namespaces().values(), strict=True))) or [0, 0]
        num_extents = num_blocks + num["free"] + num["pending"]
        wrong = {
            "keys": any(num[name] != num_blocks for name in _ORDERS),
            "sums": sums != list(self.meta.totals) or sums[0] != num_blocks,
            "extents": num_used != num_extents,
            "damaged entries": self.meta.needs_rebuild,
        }
        return [name for name, is_wrong in wrong.items() if is_wrong]

    def some_keys(self, name: str, start: bytes, limit: int) -> tuple[list[bytes], int, int]:
        """Return up to `limit` keys from `start` on, the count of all keys, the transaction id."""
        keys = [key for key, _ in islice(self._walk(name, start), limit)]
        return keys, self._txn.stat(self._dbs[name])["entries"], self._txn.id()

    def begin(self, meta: Meta, segments: dict[int, SegmentState]) -> None:
        """Fill an empty index with a store's meta data and segments, before any block is added."""
        self.meta = replace(meta, totals=Totals(0, 0), needs_rebuild=False)
        for segment, state in segments.items():
            self.put_segment(segment, state)

    def clear(self) -> None:
        """Empty all databases but `meta`."""
        for name in NAMES:
            if name != "meta":
                self._txn.drop(self._dbs[name], delete=False)
        self.meta.totals, self.meta.needs_rebuild = Totals(0, 0), False

    def _lru_keys(self, prefix: bytes) -> Iterator[bytes]:
        keys = (key for key, _ in self._walk("lru", prefix))
        return takewhile(lambda key: key.startswith(prefix), keys)

    def _walk(self, name: str, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Walk over a database's entries from a key on; nothing may change during the walk."""
        with self._txn.cursor(db=self._dbs[name]) as cursor:
            if cursor.set_range(start) if start else cursor.first():
                yield from cursor.iternext(keys=True, values=True)


def _link(entry: tuple[bytes, bytes]) -> tuple[bytes, codec.Link | None]:
    return entry[0], codec.decode_link(entry[1])


def _segment_key(segment: int) -> bytes:
    return segment.to_bytes(4, "big")
