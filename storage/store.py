"""The disk tier's store: finds, reads, writes, expires and evicts blocks under a byte budget.

This module knows records and extents; it does not know tokens, models, the host arena or its
callers. A disk fault becomes a miss or a failed put and is counted; wrong bytes are never returned.
"""

import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Self

import msgspec

from tieredkv.clock import Clock
from tieredkv.errors import CorruptBlockError, IntegrityError, StorageError, StoreFullError
from tieredkv.storage import opening
from tieredkv.storage.folder.folder import StoreFolder
from tieredkv.storage.format.planes import Packed, Packing, extent_bytes_of
from tieredkv.storage.format.record import Extent, Located, check_record, corrupt, decode_record
from tieredkv.storage.index.entries import expiry_key
from tieredkv.storage.index.rebuild import OpeningProgress, fault_of, rebuild
from tieredkv.storage.index.transaction import TXN_BLOCKS, IndexTxn, batches
from tieredkv.storage.index.verdicts import is_of_memory
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.ownership import owned_by
from tieredkv.storage.parts import Parts
from tieredkv.storage.stats import Lifetimes, StoreStats
from tieredkv.storage.tier import TouchItem
from tieredkv.types import TENANT_BYTES, BlockRecord

logger = logging.getLogger(__name__)

_TRIAL_BLOCKS = 32


class BlockStore:
    """The blocks on disk: payloads lie in segment files, everything else in one LMDB index.

    One process uses a store. One thread makes every change. Any thread may find blocks, read and
    write payloads, and compress blocks.

    Invariants (`CheckedStore` in the tests verifies all of them, `verify` all but the last):
      - every record fits its key and checksum, and has one `expiry` and one `lru` key;
      - no two records share an extent; each extent ever handed out is a block's, free or pending;
      - pending extents are those lent to puts and those waiting to be erased;
      - the counters, in all and per namespace, are the sums over the records;
      - the files occupy no more than the budget.
    """

    def __init__(self, parts: Parts, num_expired: int, options: StoreOptions) -> None:
        self._parts = parts
        self.path = parts.folder.path
        self._folder = parts.folder
        self.index = parts.index
        self.thread = parts.index.thread  # makes every change
        self.retentions = parts.index.retentions
        self.files = parts.files
        self._space = parts.space
        self.allocator = parts.allocator
        self.key_use = parts.key_use
        self.keys, self.lacks_keys = self.key_use.keys, self.key_use.lacks_keys
        self.names_key = b"" if self.keys is None else self.keys.table.names_key
        self.clock = parts.clock
        self.write_limit = options.write_limit  # bytes/s, which callers of `write_payload` keep to
        self.packing = Packing(options.compression, options.element_bytes)
        self._sync = options.sync == "commit"
        self._failpoint = parts.failpoint
        with self.index.reading() as txn:
            self._faults = Counter(txn.meta.faults)  # since the store was created
        if self.keys is not None:
            self._faults.update(self.keys.faults)
        self._reported: set[str] = set()
        self._counting = threading.Lock()  # both reading and changing threads count faults
        self._deleted: Counter[str] = Counter()
        self._damaged: set[bytes] = set()  # keys of damaged records, which the next sweep drops
        self._num_stored, self._num_expired = 0, num_expired
        self._bytes_noted = 0  # the part of `bytes_written` that the index has counted
        self._block_bytes = self._payload_bytes = 0  # of the blocks stored since opening
        if options.tells_gone:
            parts.allocator.gone = []

    # --- opening and closing ------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        options: StoreOptions,
        clock: Clock,
        failpoint: Callable[[str], None] = lambda label: None,
        *,
        prepare: Callable[[StoreFolder], None] = lambda folder: None,
        progress: OpeningProgress = lambda done, total: None,
    ) -> Self:
        """Open or create a store and finish what a crash left half done, without a scan.

        Args:
            options: the options of this store.
            clock: moved up to the latest time that the store has seen if it is a little behind.
            failpoint: called with a label at each step of a change; tests stop the process there.
            prepare: called with the locked folder before its index is opened.
            progress: called during steps that take long.

        Raises:
            CorruptIndexError, StoreFailedError, StoreBusyError, FormatVersionError,
            MissingKeyError, StoreFullError, StorageError, ConfigError
        """
        return cls(*opening.open_store(options, clock, failpoint, prepare, progress), options)

    def check_place(self) -> None:
        """Raise StorageError if the folder is not at its path any more."""
        self._folder.check_place()

    def close(self) -> None:
        """Flush and close the store; every lent extent must be back. May be called again."""
        try:
            self.files.close()
            self.index.close()
        finally:
            if self.keys is not None:
                self.keys.close()
            self._folder.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- finding and reading ------------------------------------------------------------------

    def find(self, hashes: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the sealed records of blocks that are stored and not expired; for any thread.

        `decode_record` reads a sealed record. A lookup does not wait for changes and makes none. A
        damaged record is a miss, and the next sweep drops it.
        """
        with self.index.reading() as txn:
            found, damaged = txn.find(hashes, self.clock.now())
        for block_hash in damaged:
            self.note_damaged(block_hash)
        return found

    def locate(self, block_hash: bytes) -> Located | None:
        """Return where a block lies, for `read_payload`, or None on a miss; for any thread."""
        sealed = self.find([block_hash]).get(block_hash)
        return None if sealed is None else decode_record(block_hash, sealed, self.retentions)

    def read_payload(self, located: Located, into: memoryview) -> None:
        """Read a block's payload into `into` and check it; any thread may call this.

        Args:
            located: from `locate`.
            into: a page: 4 KiB-aligned and at least as long as the padded block.

        Raises:
            CorruptBlockError: `truncated`, `header`, `checksum`, `missing_segment` or `codec`.
            StorageError: the system could not read; nothing is known about the bytes.
            Pass either error to `read_failed`.
        """
        self.files.read_block(located, into)

    @owned_by("thread")
    def read_failed(self, located: Located, error: StorageError) -> str:
        """Count a failed read, drop the block if its bytes are bad, and return the reason.

        If the block was evicted or replaced since `locate`, the reason is `evicted` and no fault is
        counted.
        """
        block_hash, current = located.record.block_hash, None
        with self.index.reading() as txn, suppress(CorruptBlockError):
            current = txn.get(block_hash)
        if current is None or current[1:] != located[1:]:
            return "evicted"
        reason = self._count_fault(error)
        if isinstance(error, CorruptBlockError):
            self.drop_bad(current)
        elif not is_of_memory(error):
            self.allocator.faulty.add(current.extent)
        return reason

    # --- storing ------------------------------------------------------------------------------

    @owned_by("thread")
    def holds(self, record: BlockRecord) -> bool:
        """Return whether the stored block is as good as this one, so that no write is needed."""
        old = self.locate(record.block_hash)
        return old is not None and self._is_as_good(old, record)

    def _is_as_good(self, old: Located, new: BlockRecord) -> bool:
        return old.record.computed_at >= new.computed_at and old.extent not in self.allocator.faulty

    @owned_by("thread")
    def reserve_many(
        self, records: Sequence[BlockRecord], packed: Sequence[Packed | None] = ()
    ) -> list[Extent | None]:
        """Lend an extent for each block; no more blocks are evicted than needed.

        A block with an entry in `packed` gets an extent of its compressed size. The answer is None
        for a block if extents lent to other puts leave no room at the moment. Every extent must
        come back through `commit` or `abandon`. Each batch takes one transaction.

        Raises:
            StoreFullError: the block is larger than the budget, or the filesystem is full.
        """
        sizes = list(map(extent_bytes_of, records, packed or [None] * len(records)))
        tenants = (record.namespace[:TENANT_BYTES] for record in records)
        for record, size in zip(records, sizes, strict=True):
            check_record(record, self.retentions)
            self._space.check_fits(size)
        lent_before = set(self.allocator.lent)
        try:
            self.allocator.enforce_budget()
            answer = self.allocator.obtain(list(zip(sizes, tenants, strict=True)))
            is_full = self._space.is_disk_full or self.allocator.has_no_file
            if is_full and not any(answer):
                raise StoreFullError(errno.ENOSPC, self._space.lack)
            self.key_use.begin(records, answer)
        except BaseException as error:
            for extent in self.allocator.lent.keys() - lent_before:
                self.abandon(extent)
            self._count_fault(error)
            raise
        return answer

    def write_payload(
        self,
        extent: Extent,
        record: BlockRecord,
        payload: memoryview,
        packed: Packed | None = None,
        before_piece: Callable[[int], None] = lambda num_written: None,
    ) -> Located:
        """Write a block's bytes into its extent, ready for `commit`; any thread may call this.

        Args:
            extent: the extent lent for this record.
            record: the record for the extent's header.
            payload: a page, 4 KiB-aligned, that starts with the block's bytes; the bytes behind
                them are overwritten with zeroes up to the next multiple of 4 KiB.
            packed: the compressed block, to be written instead.
            before_piece: called with the number of bytes written so far, before each piece of some
                512 KiB; what it raises ends the write.

        Raises:
            StoreFullError, StorageError: not written; hand the extent to `write_failed`.
        """
        self._failpoint("write:before")
        written = self.files.write_block(extent, record, payload, packed, before_piece)
        self._failpoint("write:done")
        return written

    @owned_by("thread")
    def write_failed(self, extent: Extent, error: StorageError) -> None:
        """Count a failed write and take its extent back."""
        if self._count_fault(error) == "io_error" and not is_of_memory(error):
            self.allocator.faulty.add(extent)
        self.abandon(extent)

    @owned_by("thread")
    def commit(self, writes: Sequence[Located]) -> list[bool]:
        """Make written blocks findable, in one transaction for each batch.

        Returns for each block whether it is stored; a block that has expired in the meantime is
        not. A block that is stored already keeps its old bytes and the later expiry, unless the new
        one was computed later.

        Raises:
            StorageError: a batch failed; it and all later ones are not stored, and their extents
                are taken back.
        """
        if any(new.extent not in self.allocator.lent for new in writes):
            raise IntegrityError("an extent is committed that was not lent")
        stored: list[bool] = []
        segments = {new.extent.segment for new in writes}
        try:
            for segment in segments:
                self.files.refresh(segment)
            if any(segment not in self.files for segment in segments):
                raise StorageError(errno.ENOENT, f"a segment file of `{self.path}` was removed")
            self.flush_payloads(segments)
            for batch in batches(writes):
                now, bytes_written = self.clock.now(), self.files.bytes_written
                with self._changing() as txn:
                    owners = [self._insert(txn, new, now) for new in batch]
                    txn.saw_time(now)
                    txn.meta.bytes_written += bytes_written - self._bytes_noted
                    self._failpoint("commit:before")
                self._bytes_noted = bytes_written
                self._failpoint("commit:done")
                for new, owner in zip(batch, owners, strict=True):
                    self._take_back(new.extent, is_stored=owner == new.extent)
                    stored.append(owner is not None)
                    self._num_stored += owner == new.extent
                    self._block_bytes += new.record.size_bytes
                    self._payload_bytes += new.payload_bytes
        except BaseException as error:
            for new in writes[len(stored) :]:
                self.abandon(new.extent)
            self._count_fault(error)
            raise
        self.allocator.enforce_budget()
        return stored

    def flush_payloads(self, segments: set[int]) -> None:
        """Flush segments to the device if the options ask for that; any thread may call this."""
        if self._sync:
            self.files.sync(segments)

    @owned_by("thread")
    def keep_shares(self, shares: Mapping[bytes, float]) -> None:
        """Keep a share of the budget for each of these tenants from now on."""
        self.allocator.tenants.keep_shares(shares)

    @owned_by("thread")
    def abandon(self, extent: Extent) -> None:
        """Give back an extent that was not committed; no thread may still write to it."""
        self._take_back(extent, is_stored=False)

    def _take_back(self, extent: Extent, *, is_stored: bool) -> None:
        self.allocator.take_back(extent, is_stored=is_stored)
        self.key_use.end(extent)

    @owned_by("thread")
    def claim_or_touch(self, items: Sequence[TouchItem | BlockRecord]) -> None:
        """Update recency and retention of blocks after a touch, or after a repeated store.

        Times only move forward, and an expired block stays expired.
        """
        now = self.clock.now()
        for batch in batches(items):
            with self._changing() as txn:
                for item in batch:
                    old = self._get(txn, item.block_hash)
                    if old is not None and now < old.record.expires_at:
                        self._refresh(txn, old, item)
                txn.saw_time(now)
        self.allocator.enforce_budget()

    @owned_by("thread")
    def compression_trial(self, num_readers: int) -> Callable[[], None] | None:
        """Return a call that tries compression and decides on it, to be run on another thread.

        None if the decision is made or fixed by the options, or if too few blocks are stored.
        """
        if self.packing.setting != "auto" or self.packing.trial:
            return None
        with self.index.reading() as txn:
            blocks = [located for _, located in islice(txn.blocks(), _TRIAL_BLOCKS) if located]
        decide = partial(self.packing.decide, blocks, self.files.read_block, num_readers)
        return decide if len(blocks) == _TRIAL_BLOCKS else None

    # --- dropping -----------------------------------------------------------------------------

    @owned_by("thread")
    def delete(self, hashes: Sequence[bytes], reason: str) -> int:
        """Drop blocks and return how many; the next sweep erases extents not reused by then."""
        num_deleted, now = 0, self.clock.now()
        for batch in batches(hashes):
            num_deleted += self._drop([(None, block_hash) for block_hash in batch], now)
        self._deleted[reason] += num_deleted
        return num_deleted

    @owned_by("thread")
    def sweeping(self) -> Iterator[None]:
        """Drop expired blocks and erase extents that hold bytes of no stored block, in steps.

        The cost grows with the number of expired blocks. If a damaged record was met, the index is
        then made again.
        """
        now = self.clock.now()
        before, due = [], [(b"", b"")] * TXN_BLOCKS
        while len(due) == TXN_BLOCKS:
            with self.index.reading() as txn:
                before, due = due, txn.expired(now, TXN_BLOCKS)
            if due == before:  # a page is damaged: keys that the walk finds cannot be deleted
                self.ask_for_rebuild()
                break
            self._num_expired += self._drop(due, now)
            yield
        failed = yield from self.clearing()  # this makes room for a rebuild
        with self.index.reading() as txn:
            needs_rebuild = txn.meta.needs_rebuild
        if (needs_rebuild or self._damaged) and not self.lacks_keys:
            self.make_index_again()
        if failed is not None:
            raise failed

    @owned_by("thread")
    def clearing(self) -> Generator[None, None, StorageError | None]:
        """Destroy keys without blocks and dead ones, then erase dirty extents, in short steps.

        Returns the error if the keys could not be dropped; the extents are erased nevertheless.
        """
        failed = yield from self.key_use.dropping_unused()
        yield from self.allocator.erasing()
        return failed

    @owned_by("thread")
    def take_gone(self) -> list[bytes]:
        """Return the blocks that have left the store since the last call, and are not back.

        None are noted unless `StoreOptions.tells_gone`.
        """
        if not self.allocator.gone:
            return []
        gone, self.allocator.gone = self.allocator.gone, []
        found = self.find(gone)
        return [block_hash for block_hash in dict.fromkeys(gone) if block_hash not in found]

    # --- looking at it ------------------------------------------------------------------------

    @owned_by("thread")
    def ask_for_rebuild(self) -> None:
        """Have the next sweep make the index again."""
        with self._changing() as txn:
            txn.meta.needs_rebuild = True

    @owned_by("thread")
    def stats(self, lifetimes: Lifetimes | None = None) -> StoreStats:
        """Return the store's counters and sizes as of now.

        Args:
            lifetimes: what to tell of them; None for what they are now, which takes far longer to
                find out than the other figures.
        """
        with self.index.reading() as txn:
            totals, noted, counts = txn.meta.totals, txn.meta.bytes_written, txn.meta.lifetimes
        return StoreStats(
            blocks=totals.num_blocks,
            bytes_live=totals.payload_bytes,
            bytes_files=self._space.occupied_bytes,
            bytes_index=self._space.overhead_bytes,
            bytes_budget=self._space.budget_bytes,
            bytes_pending=self.allocator.pending_bytes,
            bytes_written=self.files.bytes_written,
            bytes_written_ever=noted + self.files.bytes_written - self._bytes_noted,
            bytes_write_limit=self.write_limit or None,
            bytes_read=self.files.bytes_read,
            bytes_erased=self.files.bytes_erased,
            num_stored=self._num_stored,
            num_expired=self._num_expired,
            num_evicted=self.allocator.num_evicted,
            num_extents_retired=sum(map(self.allocator.is_retired, self.allocator.strikes)),
            faults=dict(self._faults),
            deleted=dict(self._deleted),
            encryption="no keys" if self.lacks_keys else "off" if self.keys is None else "on",
            num_keys=0 if self.keys is None else len(self.keys.table),
            compression=self.packing.setting,
            is_compressing=self.packing.is_on,
            compression_trial=self.packing.trial,
            compression_ratio=self._block_bytes / max(self._payload_bytes, 1),
            compression_rate=self.packing.rate.bytes_per_s,
            decompression_rate=self.files.unpacking.bytes_per_s,
            direct_io=self.files.direct_io,
            punch_hole=self.files.punch_hole,
            lifetimes=lifetimes or self._space.lifetimes(counts, self.clock.now()),
        )

    @property
    def bytes_read(self) -> int:
        """The current value of `bytes_read` in `stats`; any thread may read it."""
        return self.files.bytes_read

    @owned_by("thread")
    def make_index_again(self) -> None:
        """Make the index again from its sound records."""
        damaged = f"damaged records were met: {len(self._damaged)}" if self._damaged else ""
        fault = fault_of(self.index) or damaged or "that was asked for"
        if self.allocator.gone is not None:
            with self.index.reading() as txn:
                self.allocator.gone += (
                    name for name, _ in txn.records()
                )  # not all of them may come back
        rebuild(self._parts, fault)
        self.key_use.suspect_all()
        with self._counting:
            self._faults["index"] += 1
        self._damaged.clear()

    @contextmanager
    def _changing(self) -> Iterator[IndexTxn]:
        """Open one write transaction that also saves the fault counters."""
        with self.allocator.changing() as txn:
            yield txn
            txn.meta.faults = dict(self._faults)

    # --- parts ----------------------------------------------------------------------------------

    def _get(self, txn: IndexTxn, block_hash: bytes) -> Located | None:
        """Return one entry, or None if it is missing or damaged."""
        try:
            return txn.get(block_hash)
        except CorruptBlockError:
            self.note_damaged(block_hash)
            return None

    def note_damaged(self, block_hash: bytes) -> None:
        """Count a damaged record once; the next sweep drops it. Any thread may call this."""
        if block_hash not in self._damaged:
            self._damaged.add(block_hash)
            self._count_fault(corrupt(block_hash, "record", "its record is damaged"))

    def _drop(self, doomed: Sequence[tuple[bytes | None, bytes]], now: float) -> int:
        """Drop a batch of blocks; if that fails, as on a full disk, try once more."""
        try:
            return self._drop_batch(doomed, now)
        except StorageError as error:
            self._count_fault(error)
        return self._drop_batch(doomed, now)

    def _drop_batch(self, doomed: Sequence[tuple[bytes | None, bytes]], now: float) -> int:
        """Drop blocks; a block given with an `expiry` key is kept if its key has changed."""
        num_dropped = 0
        with self._changing() as txn:
            for key, block_hash in doomed:
                located = self._get(txn, block_hash)
                if located is not None and key in (None, expiry_key(located.record)):
                    self.allocator.remove(txn, located)
                    num_dropped += 1
                    if key is not None:
                        txn.meta.lifetimes.note_expired(located.record.retention, now)
                elif key is not None:
                    txn.drop_expiry_key(key)
            txn.saw_time(now)
            self._failpoint("delete:before")
        self._failpoint("delete:done")
        return num_dropped

    def _insert(self, txn: IndexTxn, new: Located, now: float) -> Extent | None:
        """Add a written block; return the extent that holds it now, or None if it has expired."""
        record = new.record
        if now >= record.expires_at:
            return None
        old = self._get(txn, record.block_hash)
        if old is not None:
            if self._is_as_good(old, record) and now < old.record.expires_at:
                self._refresh(txn, old, record)
                return old.extent
            self.allocator.remove(txn, old)
        txn.insert(new)
        txn.drop_extent("pending", new.extent)
        times = {"computed_at": record.computed_at, "expires_at": record.expires_at}
        txn.meta.lifetimes.note_written(record.retention, new.extent_bytes, now, **times)
        return new.extent

    def _refresh(self, txn: IndexTxn, old: Located, item: TouchItem | BlockRecord) -> None:
        record, claim = old.record, item.retention
        later = max(record.expires_at, item.expires_at or 0.0)
        new = msgspec.structs.replace(
            record,
            expires_at=later,
            retention=claim if claim and later > record.expires_at else record.retention,
            last_used=max(record.last_used, item.last_used),
            pinned_until=max(record.pinned_until, item.pinned_until),
            hits=record.hits + 1 if item.hits is None else max(record.hits, item.hits),
        )
        check_record(new, self.retentions)
        txn.replace(old, old._replace(record=new))

    @owned_by("thread")
    def drop_bad(self, located: Located) -> None:
        """Drop a block whose bytes are bad, but keep its extent if another block owns it."""
        block_hash = located.record.block_hash
        owner = None
        with suppress(OSError):
            owner = self.files.header_at(located.extent)
        with self._changing() as txn:
            owner_hash = block_hash if owner is None else owner.record.block_hash
            other = None if owner_hash == block_hash else self._get(txn, owner_hash)
            if other is not None and other.extent == located.extent:
                txn.remove_damaged(block_hash)
            else:
                self.allocator.remove(txn, located)

    def _count_fault(self, error: BaseException) -> str:
        """Count a fault, log the first one of each reason, and return the reason."""
        reason = reason_of(error)
        with self._counting:
            self._faults[reason] += 1
            is_new = reason not in self._reported
            self._reported.add(reason)
        if is_new:
            logger.warning("disk tier: %s: %s (further ones are only counted)", reason, error)
        return reason


def reason_of(error: BaseException) -> str:
    if isinstance(error, CorruptBlockError):
        return error.reason
    return "no_space" if isinstance(error, StoreFullError) else "io_error"
