"""The disk tier's store: finds, reads, writes, expires and evicts blocks under a byte budget.

This module knows records and extents; it does not know tokens, models, the host arena or its
callers. A disk fault becomes a miss or a failed put and is counted; wrong bytes are never returned.
"""

import errno
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import NamedTuple, Self

import msgspec

from tieredkv.errors import (
    CorruptBlockError,
    CorruptIndexError,
    IntegrityError,
    StorageError,
    StoreFailedError,
    StoreFullError,
)
from tieredkv.storage.faults import Faults
from tieredkv.storage.format.planes import Packed, Packing, extent_bytes_of
from tieredkv.storage.format.record import Extent, Located, check_record, corrupt
from tieredkv.storage.index.entries import expiry_key
from tieredkv.storage.index.rebuild import fault_of, rebuild
from tieredkv.storage.index.transaction import DAMAGED, TXN_BLOCKS, Changes, IndexTxn, Left, batches
from tieredkv.storage.index.verdicts import is_of_memory
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.ownership import owned_by
from tieredkv.storage.parts import Parts
from tieredkv.storage.stats import Lifetimes, StoreStats
from tieredkv.tier import TouchItem
from tieredkv.types import TENANT_BYTES, BlockRecord

_TRIAL_BLOCKS = 32


class Outcome(NamedTuple):
    """What `Store.commit` did with a block; if there is no error, one not stored has expired."""

    is_stored: bool
    error: StorageError | None = None


class Store:
    """The blocks on disk: payloads lie in segment files, everything else in one LMDB index.

    One process uses a store. One thread makes every change. Any thread may find blocks, read and
    write payloads, and compress blocks.

    Invariants (`CheckedStore` in the tests verifies all of them, `verify` all but the last):
      - every record fits its key and checksum, and has one `expiry` and one `lru` key;
      - no two records share an extent; each extent ever handed out is a block's, free or pending;
      - pending extents are those lent to puts and those waiting to be erased;
      - the counters, in all and per namespace, are the sums over the records;
      - the files occupy no more than the budget.

    Attributes:
        parts: of which the store consists, as `tieredkv.storage.opening` has opened them. Those who
            only look, as operators do, look at these.
        thread: the thread that makes every change.
        packing: whether new blocks are compressed.
        num_rebuilds: how often the index was made again since the store was opened.
    """

    def __init__(self, parts: Parts, options: StoreOptions) -> None:
        self.parts = parts
        self.thread = parts.index.thread
        self.packing = Packing(options.compression, options.element_bytes)
        self._options, self._clock, self._index = options, parts.clock, parts.index
        self._key_use, self._files, self._space = parts.key_use, parts.files, parts.space
        self._payloads, self._extents, self._room = parts.payloads, parts.allocator, parts.room
        with self._index.reading() as txn:
            self._faults = Faults(txn.meta.faults)  # since the store was created
        if parts.key_use.keys is not None:
            self._faults.add(parts.key_use.keys.faults)
        self._deleted: Counter[str] = Counter()
        self._damaged: set[bytes] = set()  # keys of damaged records, which the next sweep drops
        self._num_stored, self._num_expired = 0, parts.num_expired
        self._bytes_noted = 0  # the part of `bytes_written` that the index has counted
        self._block_bytes = self._payload_bytes = 0  # of the blocks stored since opening
        self.num_rebuilds = 0
        if options.tells_blocks:
            parts.room.changes = Changes()

    # --- closing ------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush and close the store; every lent extent must be back. May be called again."""
        try:
            self._files.close()
            self._index.close()
        finally:
            if self._key_use.keys is not None:
                self._key_use.keys.close()
            self.parts.folder.release()

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
        with self._index.reading() as txn:
            found, damaged = txn.find(hashes, self._clock.now())
        for block_hash in damaged:
            self.note_damaged(block_hash)
        return found

    def note_damaged(self, block_hash: bytes) -> None:
        """Count a damaged record once; the next sweep drops it. Any thread may call this."""
        if block_hash not in self._damaged:
            self._damaged.add(block_hash)
            self._faults.note(corrupt(block_hash, "record", "its record is damaged"))

    def read(self, located: Located, into: memoryview) -> None:
        """Read a block's payload into `into` and check it; any thread may call this.

        Args:
            located: where the block lies, by its record.
            into: a page: 4 KiB-aligned and at least as long as the padded block.

        Raises:
            CorruptBlockError: `truncated`, `header`, `checksum`, `missing_segment` or `codec`.
            StorageError: the system could not read; nothing is known about the bytes.
            Pass either error to `read_failed`.
        """
        self._payloads.read(located, into)

    @owned_by("thread")
    def read_failed(self, located: Located, error: StorageError) -> str:
        """Count a failed read, drop the block if its bytes are bad, and return the reason.

        If the block was evicted or replaced meanwhile, the reason is `evicted` and no fault is
        counted.
        """
        with self._index.reading() as txn:
            current = txn.sound(located.record.block_hash)
        if current is None or current[1:] != located[1:]:
            return "evicted"
        reason = self._faults.note(error)
        if isinstance(error, CorruptBlockError):
            self.drop_bad(current)
        elif not is_of_memory(error):
            self._extents.faulty.add(current.extent)
        return reason

    # --- storing ------------------------------------------------------------------------------

    @owned_by("thread")
    def keep_shares(self, shares: Mapping[bytes, float]) -> None:
        """Keep a share of the budget for each of these tenants from now on."""
        self._room.tenants.keep_shares(shares)

    @owned_by("thread")
    def holds(self, record: BlockRecord) -> bool:
        """Return whether the stored block is as good as this one, so that no write is needed."""
        with self._index.reading() as txn:
            old = txn.sound(record.block_hash)
        return old is not None and self._is_as_good(old, record, self._clock.now())

    def _is_as_good(self, old: Located, new: BlockRecord, now: float) -> bool:
        is_current = now < old.record.expires_at and old.record.computed_at >= new.computed_at
        return is_current and old.extent not in self._extents.faulty

    @owned_by("thread")
    def reserve(
        self, records: Sequence[BlockRecord], packed: Sequence[Packed | None] = ()
    ) -> list[Extent | None]:
        """Lend an extent for each block; no more blocks are evicted than needed.

        A block with an entry in `packed` gets an extent of its compressed size. The answer is None
        for a block if extents lent to other puts leave no room at the moment. Every extent must
        come back through `commit` or `give_back`. Each batch takes one transaction.

        Raises:
            StoreFullError: the block is larger than the budget, or the filesystem is full.
        """
        sizes = list(map(extent_bytes_of, records, packed or [None] * len(records)))
        tenants = (record.namespace[:TENANT_BYTES] for record in records)
        for record, size in zip(records, sizes, strict=True):
            check_record(record, self._index.retentions)
            self._space.check_fits(size)
        lent_before = set(self._extents.lent)
        try:
            self._room.enforce_budget()
            answer = self._room.lend(list(zip(sizes, tenants, strict=True)))
            is_full = self._space.is_disk_full or self._extents.has_no_file
            if is_full and not any(answer):
                raise StoreFullError(errno.ENOSPC, self._space.why_full)
            self._key_use.begin(records, answer)
        except BaseException as error:
            for extent in self._extents.lent.keys() - lent_before:
                self.give_back(extent)
            self._faults.note(error)
            raise
        return answer

    def write(
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
            StoreFullError, StorageError: not written; hand extent and error to `give_back`.
        """
        self.parts.failpoint("write:before")
        written = self._payloads.write(extent, record, payload, packed, before_piece)
        self.parts.failpoint("write:done")
        return written

    def flush(self, segment: int) -> None:
        """Flush what was written to a segment, if the options ask for that; for any thread."""
        if self._options.sync == "commit":
            self._files.sync(segment)

    @owned_by("thread")
    def give_back(self, extent: Extent, error: StorageError | None = None) -> None:
        """Give back an extent that was not committed; no thread may still write to it.

        Args:
            extent: the extent.
            error: why it could not be written, which is counted.
        """
        reason = "" if error is None else self._faults.note(error)
        if error is not None and reason == "io_error" and not is_of_memory(error):
            self._extents.faulty.add(extent)
        self._take_back(extent, is_stored=False)

    def _take_back(self, extent: Extent, *, is_stored: bool) -> None:
        self._extents.take_back(extent, is_stored=is_stored)
        self._key_use.end(extent)

    @owned_by("thread")
    def commit(self, writes: Sequence[Located]) -> list[Outcome]:
        """Make written blocks findable, in one transaction for each batch.

        Returns what became of each block. A block that has expired meanwhile is not stored. A block
        that is stored already keeps its old bytes and the later expiry, unless the new one was
        computed later. A block fails with its batch, or if its segment file was removed or cannot
        be flushed. Every extent is taken back.

        Raises:
            CorruptIndexError, StoreFailedError: the store cannot go on.
        """
        lent = self._extents.lent
        if any(new.extent not in lent for new in writes):
            raise IntegrityError("an extent is committed that was not lent")
        failed = self._flush_all({new.extent.segment for new in writes})
        outcomes = {
            new.extent: Outcome(is_stored=False, error=failed.get(new.extent.segment))
            for new in writes
        }
        for batch in batches([new for new in writes if new.extent.segment not in failed]):
            try:
                outcomes |= self._commit_batch(batch)
            except (CorruptIndexError, StoreFailedError):
                raise
            except StorageError as error:
                self._faults.note(error)
                outcomes |= {new.extent: Outcome(is_stored=False, error=error) for new in batch}
        for extent in outcomes.keys() & lent.keys():
            self.give_back(extent)
        try:
            self._room.enforce_budget()
        except (CorruptIndexError, StoreFailedError):
            raise
        except StorageError as error:  # the next blocks try again; these are stored
            self._faults.note(error)
        return [outcomes[new.extent] for new in writes]

    def _flush_all(self, segments: Iterable[int]) -> dict[int, StorageError]:
        """Flush segments; return those that were removed or cannot be flushed, with the errors."""
        failed = dict[int, StorageError]()
        for segment in segments:
            try:
                self._files.check_there(segment)
                self.flush(segment)
            except StorageError as error:
                self._faults.note(error)
                failed[segment] = error
        return failed

    def _commit_batch(self, batch: Sequence[Located]) -> dict[Extent, Outcome]:
        now, bytes_written = self._clock.now(), self._files.bytes_written
        with self._changing() as txn:
            owners = [self._insert(txn, new, now) for new in batch]
            txn.saw_time(now)
            txn.meta.bytes_written += bytes_written - self._bytes_noted
            self.parts.failpoint("commit:before")
        self._bytes_noted = bytes_written
        self.parts.failpoint("commit:done")
        for new, owner in zip(batch, owners, strict=True):
            self._take_back(new.extent, is_stored=owner == new.extent)
            self._num_stored += owner == new.extent
            self._block_bytes += new.record.size_bytes
            self._payload_bytes += new.payload_bytes
        pairs = zip(batch, owners, strict=True)
        return {new.extent: Outcome(is_stored=owner is not None) for new, owner in pairs}

    def _insert(self, txn: IndexTxn, new: Located, now: float) -> Extent | None:
        """Add a written block; return the extent that holds it now, or None if it has expired."""
        record = new.record
        if now >= record.expires_at:
            return None
        old = self._get(txn, record.block_hash)
        if old is not None:
            if self._is_as_good(old, record, now):
                self._refresh(txn, old, record)
                return old.extent
            self._room.drop_alone(txn, old, "replaced")
        txn.insert(new)
        txn.drop_extent("pending", new.extent)
        times = {"computed_at": record.computed_at, "expires_at": record.expires_at}
        txn.meta.lifetimes.note_written(record.retention, new.extent_bytes, now, **times)
        return new.extent

    @owned_by("thread")
    def touch(self, items: Sequence[TouchItem | BlockRecord]) -> None:
        """Update recency and retention of blocks after a touch, or after a repeated store.

        Times only move forward, and an expired block stays expired.
        """
        now = self._clock.now()
        for batch in batches(items):
            with self._changing() as txn:
                for item in batch:
                    old = self._get(txn, item.block_hash)
                    if old is not None and now < old.record.expires_at:
                        self._refresh(txn, old, item)
                txn.saw_time(now)
        self._room.enforce_budget()

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
        check_record(new, self._index.retentions)
        txn.replace(old, old._replace(record=new))

    @owned_by("thread")
    def compression_trial(self, num_readers: int) -> Callable[[], None] | None:
        """Return a call that tries compression and decides on it, to be run on another thread.

        None if the decision is made or fixed by the options, or if too few blocks are stored.
        """
        if self.packing.setting != "auto" or self.packing.trial:
            return None
        with self._index.reading() as txn:
            blocks = [located for _, located in islice(txn.blocks(), _TRIAL_BLOCKS) if located]
        decide = partial(self.packing.decide, blocks, self._payloads.read, num_readers)
        return decide if len(blocks) == _TRIAL_BLOCKS else None

    # --- dropping -----------------------------------------------------------------------------

    @owned_by("thread")
    def drop(self, hashes: Sequence[bytes], reason: str) -> list[Located]:
        """Drop blocks with their further pages, and return them all.

        The next sweep erases extents that are not reused by then.
        """
        dropped, now = list[Located](), self._clock.now()
        for batch in batches(hashes):
            doomed = [(None, block_hash) for block_hash in batch]
            dropped += self._drop(doomed, reason, now)
        self._deleted[reason] += len(dropped)
        return dropped

    def _drop(
        self, doomed: Sequence[tuple[bytes | None, bytes]], reason: str, now: float
    ) -> list[Located]:
        """Drop a batch of blocks; if that fails, as on a full disk, try once more."""
        try:
            return self._drop_batch(doomed, reason, now)
        except StorageError as error:
            self._faults.note(error)
        return self._drop_batch(doomed, reason, now)

    def _drop_batch(
        self, doomed: Sequence[tuple[bytes | None, bytes]], reason: str, now: float
    ) -> list[Located]:
        """Drop blocks; a block given with an `expiry` key is kept if its key has changed."""
        dropped = list[Located]()
        with self._changing() as txn:
            for key, block_hash in doomed:
                located = self._get(txn, block_hash)
                if located is not None and key in (None, expiry_key(located.record)):
                    gone = self._room.drop(txn, located, reason)
                    dropped += gone
                    for each in gone if key is not None else ():
                        txn.meta.lifetimes.note_expired(each.record.retention, now)
                elif key is not None:
                    txn.drop_expiry_key(key)
            txn.saw_time(now)
            self.parts.failpoint("delete:before")
        self.parts.failpoint("delete:done")
        return dropped

    @owned_by("thread")
    def drop_bad(self, located: Located) -> None:
        """Drop a block whose bytes are bad, but keep its extent if another block owns it."""
        block_hash = located.record.block_hash
        owner = None
        with suppress(OSError):
            owner = self._payloads.header_at(located.extent)
        with self._changing() as txn:
            owner_hash = block_hash if owner is None else owner.record.block_hash
            other = None if owner_hash == block_hash else self._get(txn, owner_hash)
            if other is not None and other.extent == located.extent:
                txn.remove_damaged(block_hash)
            else:
                self._room.drop(txn, located, DAMAGED)

    @owned_by("thread")
    def sweeping(self) -> Iterator[None]:
        """Drop expired blocks and erase extents that hold bytes of no stored block, in steps.

        The cost grows with the number of expired blocks. If a damaged record was met, the index is
        then made again.
        """
        now = self._clock.now()
        before, due = [], [(b"", b"")] * TXN_BLOCKS
        while len(due) == TXN_BLOCKS:
            with self._index.reading() as txn:
                before, due = due, txn.expired(now, TXN_BLOCKS)
            if due == before:  # a page is damaged: keys that the walk finds cannot be deleted
                self.ask_for_rebuild()
                break
            self._num_expired += len(self._drop(due, "expired", now))
            yield
        failed = yield from self.clearing()  # this makes room for a rebuild
        with self._index.reading() as txn:
            needs_rebuild = txn.meta.needs_rebuild
        if (needs_rebuild or self._damaged) and not self._key_use.lacks_keys:
            self.rebuild()
        if failed is not None:
            raise failed

    @owned_by("thread")
    def clearing(self) -> Generator[None, None, StorageError | None]:
        """Destroy keys without blocks and dead ones, then erase dirty extents, in short steps.

        Returns the error if the keys could not be dropped; the extents are erased nevertheless.
        """
        failed = yield from self._key_use.dropping_unused()
        yield from self._room.erasing()
        return failed

    @owned_by("thread")
    def take_held(self) -> dict[bytes, float]:
        """Return the blocks that were stored, or got another expiry, since the last call.

        Blocks that have left again are none of them. Nothing is noted unless
        `StoreOptions.tells_blocks`.
        """
        if (changes := self._room.changes) is None:
            return {}
        held, changes.held = changes.held, {}
        return held

    @owned_by("thread")
    def take_gone(self) -> list[Left]:
        """Return the blocks that have left the store since the last call, and are not back."""
        if (changes := self._room.changes) is None:
            return []
        gone, changes.gone = changes.gone, {}
        return [*gone.values()]

    # --- the index and the figures --------------------------------------------------------------

    @owned_by("thread")
    def ask_for_rebuild(self) -> None:
        """Have the next sweep make the index again."""
        with self._changing() as txn:
            txn.meta.needs_rebuild = True

    @owned_by("thread")
    def rebuild(self) -> None:
        """Make the index again from its sound records."""
        damaged = f"damaged records were met: {len(self._damaged)}" if self._damaged else ""
        fault = fault_of(self._index) or damaged or "that was asked for"
        most = self._index.most_records()
        with self._index.reading() as old:
            rebuild(self.parts, fault)
            self.num_rebuilds += 1
            if self._room.changes is not None:
                self._note_lost(islice(old.records(), most), self._room.changes)
        self._key_use.suspect_all()
        self._faults.add({"index": 1})
        self._damaged.clear()

    def _note_lost(self, records: Iterator[tuple[bytes, bytes]], changes: Changes) -> None:
        """Note which of these blocks are not in the index that was made of them."""
        with suppress(StorageError):  # what a damaged page does not tell stays unknown
            while names := [name for name, _ in islice(records, TXN_BLOCKS)]:
                lost = set(names) - self.find(names).keys()
                changes.leave({name: Left(name, DAMAGED, 0) for name in lost})

    @owned_by("thread")
    def stats(self, lifetimes: Lifetimes | None = None) -> StoreStats:
        """Return the store's counters and sizes as of now.

        Args:
            lifetimes: what to tell of them; None for what they are now, which takes far longer to
                find out than the other figures.
        """
        with self._index.reading() as txn:
            totals, window_bytes = txn.meta.totals, txn.meta.window_bytes
            noted = txn.meta.bytes_written
            counts = txn.meta.lifetimes
        files, space, use, packing = self._files, self._space, self._key_use, self.packing
        other_bytes = space.overhead_bytes + space.headroom_bytes
        sizes = {"budget_bytes": space.budget_bytes, "other_bytes": other_bytes}
        return StoreStats(
            blocks=totals.num_blocks,
            bytes_live=totals.payload_bytes,
            window_pages=totals.window_pages,
            window_bytes=window_bytes,
            bytes_files=space.occupied_bytes,
            bytes_index=space.overhead_bytes,
            bytes_budget=space.budget_bytes,
            bytes_pending=self._extents.pending_bytes,
            bytes_written=files.bytes_written,
            bytes_written_ever=noted + files.bytes_written - self._bytes_noted,
            bytes_write_limit=self._options.write_limit or None,
            bytes_read=files.bytes_read,
            bytes_erased=files.bytes_erased,
            num_stored=self._num_stored,
            num_expired=self._num_expired,
            num_evicted=self._room.num_evicted,
            num_extents_retired=sum(map(self._extents.is_retired, self._extents.num_failures)),
            faults=self._faults.counts,
            deleted=dict(self._deleted),
            encryption="no keys" if use.lacks_keys else "off" if use.keys is None else "on",
            num_keys=0 if use.keys is None else len(use.keys.table),
            compression=packing.setting,
            is_compressing=packing.is_on,
            compression_trial=packing.trial,
            compression_ratio=self._block_bytes / max(self._payload_bytes, 1),
            compression_rate=packing.rate.bytes_per_s,
            decompression_rate=self._payloads.unpacking.bytes_per_s,
            direct_io=files.direct_io,
            punch_hole=files.punch_hole,
            lifetimes=lifetimes or counts.figures(self._clock.now(), **sizes),
        )

    # --- parts ----------------------------------------------------------------------------------

    @contextmanager
    def _changing(self) -> Iterator[IndexTxn]:
        """Open one write transaction that also saves the fault counters."""
        with self._room.changing() as txn:
            yield txn
            txn.meta.faults = self._faults.counts

    def _get(self, txn: IndexTxn, block_hash: bytes) -> Located | None:
        """Return one entry, or None if it is missing or damaged."""
        try:
            return txn.get(block_hash)
        except CorruptBlockError:
            self.note_damaged(block_hash)
            return None
