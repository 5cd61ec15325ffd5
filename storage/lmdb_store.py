"""The disk tier's store: finds, reads, writes, expires and evicts blocks under a byte budget.

It knows records and slots; it does not know tokens, models, the host arena or who asks. A fault
of the disk is an answer (a miss, a failed put) and a counter, never a wrong byte.
"""

import errno
import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice
from typing import Literal, Self

import msgspec

from tieredkv.clock import Clock
from tieredkv.errors import CorruptBlockError, IntegrityError, StorageError, StoreFullError
from tieredkv.storage import recovery
from tieredkv.storage.allocator import TXN_BLOCKS, SlotAllocator, batches, headroom_bytes
from tieredkv.storage.codec import Extent, Located, check_record, expiry_key, slot_bytes_for
from tieredkv.storage.compression import Packed, Packing
from tieredkv.storage.directory import StoreDirectory
from tieredkv.storage.extents import SegmentFiles
from tieredkv.storage.index import Index, IndexTxn, storage_errors
from tieredkv.storage.inspection import fault_of, find_problems, list_chains, select_blocks
from tieredkv.storage.results import (
    ChainInfo,
    EvictFilter,
    EvictResult,
    StoreStats,
    TouchItem,
    VerifyResult,
)
from tieredkv.types import BlockRecord

logger = logging.getLogger(__name__)

_TRIAL_BLOCKS = 32
_SMALLEST_INDEX_BYTES = 512 << 10


def minimum_budget_bytes(block_bytes: int) -> int:
    """The smallest budget in which blocks of this size can be stored and replaced."""
    index_bytes = _SMALLEST_INDEX_BYTES + headroom_bytes(_SMALLEST_INDEX_BYTES)
    return index_bytes + 2 * slot_bytes_for(block_bytes)


class BlockStore:
    """Blocks at rest: payloads in segment files, every decision in one LMDB index.

    One process, one thread; any thread may call what moves, compresses or tries payloads.

    Invariants, as `check()` verifies them:
      - every record fits its key and checksum, and has one `expiry` and one `lru` key;
      - no two records share a slot; each slot ever handed out is a block's, free or pending;
      - pending slots are those lent to puts and those waiting to be erased;
      - the counters, in all and per namespace and segment, are the sums over the records;
      - the files occupy no more than the budget.
    """

    def __init__(self, slots: SlotAllocator, *, sync: bool, num_expired: int) -> None:
        self.path = slots.directory.path
        self._directory = slots.directory
        self._index = slots.index
        self._files = slots.files
        self._slots = slots
        self._clock = slots.clock
        self._sync = sync
        self._failpoint = slots.failpoint
        self._faults: Counter[str] = Counter()
        self._deleted: Counter[str] = Counter()
        self._num_stored, self._num_expired = 0, num_expired
        self._block_bytes = self._payload_bytes = 0  # of what was stored since
        self.packing = Packing()  # the owner may set another

    # --- opening and closing ------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        path: str,
        *,
        budget_bytes: int | None,
        clock: Clock,
        sync: Literal["commit", "none"] = "commit",
        create: bool = True,
        failpoint: Callable[[str], None] = lambda label: None,
    ) -> Self:
        """Open or create a store; what a crash left half done is finished, nothing is scanned.

        Args:
            path: the store's folder.
            budget_bytes: what all its files may occupy; None keeps the last one.
            clock: moved up to the latest time that the store has seen if it is a little behind.
            sync: whether a commit waits for the device; without, it survives kill -9 all the same.
            create: make the store if there is none.
            failpoint: called with a label at each step of a change; tests stop the process there.

        Raises:
            StoreBusyError, FormatVersionError, StoreFullError, StorageError
        """
        with ExitStack() as undo:
            directory = StoreDirectory.claim(path, create=create)
            undo.callback(directory.release)
            with storage_errors(directory.path):
                index = Index(directory.index_path, sync=sync == "commit")
                undo.callback(index.close)
                files = SegmentFiles(directory.segments_path)
                undo.callback(files.close)
                num_expired = recovery.settle_clock(index, clock)
                budget = recovery.settle_budget(index, budget_bytes)
                slots = SlotAllocator(directory, files, index, budget, clock, failpoint)
                recovery.recover(slots, clock.now())
            slots.reach_budget()
            undo.pop_all()
        return cls(slots, sync=sync == "commit", num_expired=num_expired)

    def close(self) -> None:
        """Flush and close; every lent slot must be back. Harmless when repeated."""
        try:
            self._files.close()
            self._index.close()
        finally:
            self._directory.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- finding and reading ------------------------------------------------------------------

    def lookup(self, hashes: Sequence[bytes]) -> list[BlockRecord | None]:
        """Answer what is stored and not expired, in the order asked; touches no payload."""
        return [located and located.record for located in self._find(hashes, self._clock.now())]

    def locate(self, block_hash: bytes) -> Located | None:
        """Answer where a block lies, for `read_payload`; None is a miss."""
        return self._find([block_hash], self._clock.now())[0]

    def read_payload(self, located: Located, into: memoryview) -> None:
        """Read a block's payload into `into` and check the bytes there; any thread may call this.

        Args:
            located: from `locate`.
            into: at least the payload's bytes; used in place by O_DIRECT where it is 4 KiB-aligned
                and as long as the padded payload.

        Raises:
            CorruptBlockError: `truncated`, `checksum`, `missing_segment` or `codec`.
            StorageError: the system could not read; nothing is known about the bytes.
            Hand either to `read_failed`.
        """
        self._files.read_block(located, into)

    def read_failed(self, located: Located, error: StorageError) -> str:
        """Count a failed read and drop the block if its bytes are to blame; answer the reason.

        A block that was evicted or replaced since `locate` is `evicted`, and no fault.
        """
        block_hash = located.record.block_hash
        (current,) = self._find([block_hash], located.record.computed_at)
        if current is None or current[1:] != located[1:]:
            return "evicted"
        if not isinstance(error, CorruptBlockError):
            self._count_fault("io_error", str(error))
            return "io_error"
        self._count_fault(error.reason, str(error))
        self._drop_bad(current)
        return error.reason

    # --- storing ------------------------------------------------------------------------------

    def reserve_many(
        self, records: Sequence[BlockRecord], packed: Sequence[Packed | None] = ()
    ) -> list[Extent | None]:
        """Lend a slot for each block, evicting no more than they need; one transaction a batch.

        Slots are of the compressed size for those blocks that have something in `packed`.

        None where slots lent to other puts leave no room at the moment. Every slot must come back
        by `commit` or `abandon`.

        Raises:
            StoreFullError: the block is larger than the budget, or the filesystem is full.
        """
        sizes = [slot_bytes_for(record.size_bytes) for record in records]
        if packed:
            sizes = [len(p.slot) if p else size for p, size in zip(packed, sizes, strict=True)]
        for record, size in zip(records, sizes, strict=True):
            check_record(record)
            self._slots.check_fits(size)
        self._slots.enforce_budget()
        lent_before = set(self._slots.lent)
        try:
            lent = {size: iter(self._slots.obtain(size, sizes.count(size))) for size in set(sizes)}
            answer = [next(lent[size], None) for size in sizes]
        except BaseException:
            for extent in self._slots.lent.keys() - lent_before:
                self.abandon(extent)
            raise
        if self._slots.is_disk_full and not any(answer):
            self._count_fault("no_space", "the filesystem is full")
            raise StoreFullError(errno.ENOSPC, f"no space left on the filesystem of `{self.path}`")
        return answer

    def write_payload(
        self, slot: Extent, record: BlockRecord, payload: memoryview, packed: Packed | None = None
    ) -> Located:
        """Write a block's bytes into its slot, for `commit`; any thread may call this.

        Args:
            slot: lent for this record.
            record: goes into the slot's header.
            payload: the block's bytes. Where it is longer than `record.size_bytes`, such as an
                arena page, the bytes beyond are overwritten with zeroes up to 4 KiB.
            packed: the block compressed, to be written instead.

        Raises:
            StoreFullError, StorageError: not written; hand the slot to `abandon`.
        """
        self._failpoint("write:before")
        written = self._files.write_block(slot, record, payload, packed)
        self._failpoint("write:done")
        return written

    def commit(self, writes: Sequence[Located]) -> list[bool]:
        """Make written blocks findable, all of them in one transaction a batch.

        Answers for each whether it is stored; a block that has expired meanwhile is not. A block
        that is there already keeps its bytes and the later expiry, unless it was computed anew.

        Raises:
            StorageError: none of the rest is stored; their slots are taken back.
        """
        if any(new.extent not in self._slots.lent for new in writes):
            raise IntegrityError("a slot was committed that is not lent")
        stored: list[bool] = []
        try:
            if self._sync:
                with storage_errors(self.path):
                    self._files.sync({new.extent.segment for new in writes})
            for batch in batches(writes):
                now = self._clock.now()
                with self._slots.changing() as txn:
                    owners = [self._insert(txn, new, now) for new in batch]
                    txn.set_clock_mark(now)
                    self._failpoint("commit:before")
                self._failpoint("commit:done")
                for new, owner in zip(batch, owners, strict=True):
                    self._slots.take_back(new.extent, is_stored=owner == new.extent)
                    stored.append(owner is not None)
                    self._num_stored += owner == new.extent
                    self._block_bytes += new.record.size_bytes
                    self._payload_bytes += new.payload_bytes
        except BaseException:
            for new in writes[len(stored) :]:
                self.abandon(new.extent)
            raise
        self._slots.enforce_budget()
        return stored

    def abandon(self, slot: Extent) -> None:
        """Give back a slot that was not committed; its thread must be done with it."""
        self._slots.take_back(slot, is_stored=False)

    def claim_or_touch(self, items: Sequence[TouchItem | BlockRecord]) -> None:
        """Refresh blocks; a block stored once more is a use and a claim of it too.

        Times only move forward; what has expired stays expired.
        """
        now = self._clock.now()
        for batch in batches(items):
            with self._slots.changing() as txn:
                for item in batch:
                    old = self._get(txn, item.block_hash)
                    if old is not None and now < old.record.expires_at:
                        self._refresh(txn, old, item)
                txn.set_clock_mark(now)
        self._slots.enforce_budget()

    def compression_trial(self, num_readers: int) -> Callable[[], None] | None:
        """Return what decides on a thread of its own; None if decided, or too few are stored."""
        if self.packing.setting != "auto" or self.packing.trial:
            return None
        with self._index.reading() as txn:
            blocks = [located for _, located in islice(txn.blocks(), _TRIAL_BLOCKS) if located]
        decide = partial(self.packing.decide, blocks, self._files.read_block, num_readers)
        return decide if len(blocks) == _TRIAL_BLOCKS else None

    def describe_root(self, root: bytes, description: dict[str, str]) -> None:
        """Remember what a root stands for, for whoever lists the store."""
        with self._slots.changing() as txn:
            txn.put_root(root, description)

    # --- dropping -----------------------------------------------------------------------------

    def delete(self, hashes: Sequence[bytes], reason: str) -> int:
        """Drop blocks; their bytes are reused or erased by the next sweep. Answers how many."""
        num_deleted, now = 0, self._clock.now()
        for batch in batches(hashes):
            num_deleted += self._drop([(None, block_hash) for block_hash in batch], now)
        self._deleted[reason] += num_deleted
        return num_deleted

    def sweeping(self) -> Iterator[None]:
        """Drop what has expired and erase every slot that holds bytes of no stored block, in steps.

        Costs in proportion to what expires; after a damaged record was met, the index's secondary
        keys are made again once.
        """
        now = self._clock.now()
        is_more = True
        while is_more:
            with self._index.reading() as txn:
                due = txn.expired(now, TXN_BLOCKS)
            self._num_expired += self._drop(due, now)
            is_more = len(due) == TXN_BLOCKS
            yield
        with self._index.reading() as txn:
            needs_rebuild = txn.meta("needs_rebuild") is not None
        if needs_rebuild:
            self._rebuild()
        yield from self._slots.erasing()
        self._slots.remove_empty_segments()

    def select(self, which: EvictFilter) -> list[bytes]:
        """Name the blocks that `evicting` would drop."""
        with self._index.reading() as txn:
            located, _ = select_blocks(txn, which, self._clock.now())
        return [each.record.block_hash for each in located]

    def evicting(self, which: EvictFilter) -> Generator[None, None, EvictResult]:
        """Drop and erase what an operator chose, tails of chains first, in steps."""
        with self._index.reading() as txn:
            located, unknown_ids = select_blocks(txn, which, self._clock.now())
        hashes = [each.record.block_hash for each in located]
        freed_bytes = sum(each.slot_bytes for each in located)
        if which.dry_run:
            return EvictResult(len(hashes), freed_bytes, unknown_ids)
        num_evicted = 0
        for batch in batches(hashes):
            num_evicted += self.delete(batch, "operator")
            yield
        yield from self._slots.erasing()
        self._slots.remove_empty_segments()
        return EvictResult(num_evicted, freed_bytes, unknown_ids)

    # --- looking at it ------------------------------------------------------------------------

    def chains(self) -> list[ChainInfo]:
        """List every chain, the last used first."""
        with self._index.reading() as txn:
            return list_chains(txn, self._clock.now())

    def verifying(self, *, repair: bool) -> Iterator[VerifyResult]:
        """Read every payload again and check it, then the index against itself, in steps.

        Answers what was found so far; what is bad is dropped if it is to be repaired.
        """
        result, after = VerifyResult(), b""
        while True:
            with self._index.reading() as txn:
                entry = next(txn.blocks(after), None)
            if entry is None:
                break
            after, located = entry
            if located is None:
                result.checked += 1
                result.add("record", is_repaired=repair)
                if repair:
                    self._drop_damaged([after])
            elif self._clock.now() < located.record.expires_at:
                result.checked += 1
                if (reason := fault_of(self._files, located)) is not None:
                    can_repair = repair and reason != "io_error"
                    result.add(reason, is_repaired=can_repair)
                    if can_repair:
                        self._drop_bad(located)
            yield result
        with self._index.reading() as txn:
            problems = find_problems(txn, self._slots)
        if problems:
            result.add("index", is_repaired=repair)
            if repair:
                self._rebuild()
        yield result

    def stats(self) -> StoreStats:
        """Figures as of now."""
        with self._index.reading() as txn:
            totals, num_namespaces = txn.totals(), txn.num_entries("namespaces")
            num_segments = txn.num_entries("segments")
        return StoreStats(
            blocks=totals.num_blocks,
            bytes_live=totals.payload_bytes,
            bytes_files=self._slots.occupied_bytes,
            bytes_index=self._slots.overhead_bytes,
            bytes_budget=self._slots.budget_bytes,
            bytes_pending=self._slots.pending_bytes,
            bytes_written=self._files.bytes_written,
            bytes_read=self._files.bytes_read,
            bytes_erased=self._files.bytes_erased,
            num_stored=self._num_stored,
            num_expired=self._num_expired,
            num_evicted=self._slots.num_evicted,
            num_namespaces=num_namespaces,
            num_segments=num_segments,
            faults=dict(self._faults),
            deleted=dict(self._deleted),
            compression=self.packing.setting,
            is_compressing=self.packing.is_on,
            compression_trial=self.packing.trial,
            compression_ratio=self._block_bytes / max(self._payload_bytes, 1),
            direct_io=self._files.direct_io,
            punch_hole=self._files.punch_hole,
        )

    def check(self) -> None:
        """Verify every invariant of the class.

        Raises:
            IntegrityError: naming each one that is broken.
        """
        with self._index.reading() as txn:
            problems = find_problems(txn, self._slots)
        if problems:
            raise IntegrityError("; ".join(problems))

    # --- parts ----------------------------------------------------------------------------------

    def _get(self, txn: IndexTxn, block_hash: bytes) -> Located | None:
        """One entry; a damaged one is dropped and counted."""
        try:
            return txn.get(block_hash)
        except CorruptBlockError as error:
            self._count_fault(error.reason, str(error))
            txn.remove_damaged(block_hash)
            return None

    def _find(self, hashes: Sequence[bytes], now: float) -> list[Located | None]:
        """Entries that have not expired, in the order asked; damaged ones are dropped."""
        damaged: list[bytes] = []
        found: list[Located | None] = []
        with self._index.reading() as txn:
            for block_hash in hashes:
                located = None
                try:
                    located = txn.get(block_hash)
                except CorruptBlockError:
                    damaged.append(block_hash)
                found.append(located if located and now < located.record.expires_at else None)
        self._drop_damaged(damaged)
        return found

    def _drop_damaged(self, hashes: Sequence[bytes]) -> None:
        if hashes:
            with self._slots.changing() as txn:
                for block_hash in hashes:
                    self._get(txn, block_hash)

    def _drop(self, doomed: Sequence[tuple[bytes | None, bytes]], now: float) -> int:
        """Drop a batch; on a disk too full to note it, the bytes go first, which makes room.

        A crash in between leaves entries whose payload fails its checksum: misses.
        """
        try:
            return self._drop_batch(doomed, now)
        except StorageError as error:
            self._count_fault("no_space", str(error))
        for _, block_hash in doomed:
            with self._index.reading() as txn, suppress(CorruptBlockError):
                if (located := txn.get(block_hash)) is not None:
                    self._slots.erase(located.extent)
        return self._drop_batch(doomed, now)

    def _drop_batch(self, doomed: Sequence[tuple[bytes | None, bytes]], now: float) -> int:
        """Drop blocks, those with a key of `expiry` only if it is still theirs."""
        num_dropped = 0
        with self._slots.changing() as txn:
            for key, block_hash in doomed:
                located = self._get(txn, block_hash)
                if located is not None and key in (None, expiry_key(located.record)):
                    self._slots.remove(txn, located)
                    num_dropped += 1
                elif key is not None:
                    txn.drop_expiry_key(key)
            txn.set_clock_mark(now)
            self._failpoint("delete:before")
        self._failpoint("delete:done")
        return num_dropped

    def _insert(self, txn: IndexTxn, new: Located, now: float) -> Extent | None:
        """Add a written block; answer the extent that holds it from now on, None if expired."""
        record = new.record
        if now >= record.expires_at:
            return None
        old = self._get(txn, record.block_hash)
        if old is not None:
            is_newer = record.computed_at > old.record.computed_at
            if not is_newer and now < old.record.expires_at:
                self._refresh(txn, old, record)
                return old.extent
            self._slots.remove(txn, old)
        txn.insert(new)
        txn.drop_pending(new.extent)
        return new.extent

    def _refresh(self, txn: IndexTxn, old: Located, item: TouchItem | BlockRecord) -> None:
        record, claim = old.record, item.retention
        later = max(record.expires_at, item.expires_at or 0.0)
        new = msgspec.structs.replace(
            record,
            expires_at=later,
            retention=claim if claim and later > record.expires_at else record.retention,
            last_used=max(record.last_used, item.last_used),
            hits=record.hits + 1,
        )
        check_record(new)
        txn.replace(old, old._replace(record=new))

    def _rebuild(self) -> None:
        """Make secondary keys, counters and slot lists again from the sound records."""
        with self._slots.changing() as txn:
            recovery.rebuild_keys(txn, lent=set(self._slots.lent))
        self._slots.reload()
        logger.warning("index of `%s`: secondary keys were made again", self.path)

    def _drop_bad(self, located: Located) -> None:
        """Drop a block whose bytes are bad; a slot that another block owns stays as it is."""
        block_hash = located.record.block_hash
        owner = None
        with suppress(OSError):
            owner = self._files.header_at(located.extent)
        with self._slots.changing() as txn:
            owner_hash = block_hash if owner is None else owner.record.block_hash
            other = None if owner_hash == block_hash else self._get(txn, owner_hash)
            if other is not None and other.extent == located.extent:
                txn.remove_damaged(block_hash)
            else:
                self._slots.remove(txn, located)

    def _count_fault(self, reason: str, message: str) -> None:
        self._faults[reason] += 1
        if self._faults[reason] == 1:
            logger.warning("disk tier: %s: %s (later ones are only counted)", reason, message)
