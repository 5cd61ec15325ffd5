"""Makes room for blocks: erases what is dirty, gives space back, and evicts blocks if it must.

This module makes the transactions in which extents change. The longest unused blocks are evicted
first, the end of a prompt before its beginning, and no more blocks than needed.
"""

import errno
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from types import MappingProxyType

from tieredkv.clock import Clock
from tieredkv.errors import StorageError, StoreFullError
from tieredkv.storage.extents.allocator import ExtentAllocator
from tieredkv.storage.extents.payloads import Payloads
from tieredkv.storage.extents.tenants import Tenants
from tieredkv.storage.format.record import Extent, Located
from tieredkv.storage.index.entries import extent_key
from tieredkv.storage.index.environment import Index
from tieredkv.storage.index.transaction import TXN_BLOCKS, Changes, IndexTxn, batches
from tieredkv.storage.keys.names import Names
from tieredkv.storage.ownership import owned_by

_ERASING_S = 0.01  # of one step
# Limits of one step of giving a segment back. Neighbouring extents share a few pages of the index.
_LOOKED_EXTENTS, _SHORTENED_EXTENTS, _SHORTENED_BYTES = 4096, 1024, 64 << 20

Wanted = tuple[int, bytes]
"""The size of an extent, and the tenant who asks for it."""


@dataclass(eq=False)
class Room:
    """Keeps what files occupy within the budget; only the thread that changes the index uses it.

    A tenant with a share of the budget keeps that much when other tenants need room; see
    `tieredkv.storage.extents.tenants`. A block that leaves takes along its further pages, those of
    layers with windows: no chain leads to them without it.

    Attributes:
        tenants: decides whose blocks are evicted.
        changes: the blocks that have changed since they were taken from here; None if nobody takes
            them.
    """

    index: Index
    payloads: Payloads
    allocator: ExtentAllocator
    clock: Clock
    failpoint: Callable[[str], None]
    names: Names
    tenants: Tenants = field(default_factory=Tenants)
    num_evicted: int = 0
    changes: Changes | None = None
    _lacked_room: bool = False  # whether the disk was too full for the last transaction

    def __post_init__(self) -> None:
        self._files, self._space = self.allocator.files, self.allocator.space

    # --- transactions -------------------------------------------------------------------------

    @owned_by("index.thread")
    def reload(self) -> None:
        """Read from the index what is kept of it in memory."""
        with self.index.reading() as txn:
            self.allocator.reload(txn)
        self.tenants.forget()
        self._space.measure()

    @contextmanager
    @owned_by("index.thread")
    def changing(self) -> Iterator[IndexTxn]:
        """Open one write transaction; if it fails, the state in memory is restored as well."""
        try:
            with self.index.writing() as txn:
                yield txn
        except BaseException as error:
            self.reload()
            space = self._space
            is_full = isinstance(error, StoreFullError)
            is_short = space.is_disk_full or self._files.free_bytes() < space.headroom_bytes
            if is_full or is_short:
                space.note_full(error.errno if isinstance(error, StoreFullError) else None)
                self._lacked_room = True
            if is_short and type(error) is StorageError:  # a page written in part is EIO for LMDB
                raise StoreFullError(errno.ENOSPC, space.why_full) from error
            raise
        self.allocator.note_committed()
        self.tenants.note(txn)
        if self.changes is not None:
            self.changes.follow(txn.changes)
        self._lacked_room = False
        self._space.measure()

    @owned_by("index.thread")
    def drop(self, txn: IndexTxn, located: Located, reason: str) -> list[Located]:
        """Drop a block and its further pages; return what was dropped."""
        dropped, record = [located], located.record
        if record.kind == 0 and (kinds := txn.meta.page_kinds):
            pages = map(txn.sound, self.names.of_pages(record.block_hash, [*kinds]))
            dropped += [page for page in pages if page is not None]
        for each in dropped:
            self.drop_alone(txn, each, reason)
        return dropped

    @owned_by("index.thread")
    def drop_alone(self, txn: IndexTxn, located: Located, reason: str) -> None:
        """Drop one entry and mark its extent as dirty, if that extent exists.

        If the last transaction lacked room, the extent is erased first, which makes room. A crash
        between the two steps leaves an entry whose payload fails its checksum; it is a miss.
        """
        segment, number = located.extent
        state = txn.get_segment(segment)
        if state is None or number >= state.num_used or located.extent_bytes != state.extent_bytes:
            txn.remove_damaged(located.record.block_hash)
            return
        if self._lacked_room:
            self._files.erase(located.extent)
        txn.remove(located, reason)
        self.allocator.add_dirty(located.extent)

    # --- lending ------------------------------------------------------------------------------

    @owned_by("index.thread")
    def lend(self, wanted: Sequence[Wanted]) -> list[Extent | None]:
        """Lend an extent for each one wanted, or None if eviction makes no room.

        Blocks are evicted only if there is no other room, and once for each batch.
        """
        allocator, found = self.allocator, dict[int, Extent]()
        allocator.has_no_file = False
        for batch in batches(list(enumerate(wanted))):
            missing = dict(batch)
            while missing:
                with self.changing() as txn:
                    taken = self._take(txn, missing)
                    short = {at: each for at, each in missing.items() if at not in taken}
                    if short and not allocator.has_no_file:
                        self._evict_for(txn, list(short.values()))
                        taken |= self._take(txn, short)
                    self.failpoint("reserve:before")
                self._flush_new_file()
                self.failpoint("reserve:done")
                found |= taken
                allocator.lent.update((taken[at], missing.pop(at)[0]) for at in taken)
                if missing:
                    missing_bytes = self._spread_bytes(missing.values())
                    if allocator.has_no_file or not self.release_idle(missing_bytes):
                        return list(map(found.get, range(len(wanted))))
        return list(map(found.get, range(len(wanted))))

    def _take(self, txn: IndexTxn, wanted: Mapping[int, Wanted]) -> dict[int, Extent]:
        """Take extents for some of what is wanted without evicting anything."""
        of_size = dict[int, list[int]]()
        for at, (size, _) in wanted.items():
            of_size.setdefault(size, []).append(at)
        taken = dict[int, Extent]()
        for size, some in of_size.items():
            taken.update(zip(some, self.allocator.take(txn, size, len(some)), strict=False))
        return taken

    def _flush_new_file(self) -> None:
        """Have the index know a new segment file for certain before a block is written to it.

        LMDB flushes the page that makes a transaction count with the next transaction only. If the
        power fails in between, a file with a block that the index does not know would have the
        whole index made again.
        """
        if self.index.sync and self.allocator.has_new_file:
            try:
                self.index.flush()
            except StorageError:
                self.reload()
                raise
        self.allocator.has_new_file = False

    def _evict_for(self, txn: IndexTxn, wanted: Sequence[Wanted]) -> None:
        """Evict what does not fit beside the space that no block needs."""
        free_bytes = max(self._space.room_bytes, 0) + self.allocator.idle_bytes(txn)
        asked = Counter[bytes]()
        for size, tenant in wanted:
            asked[tenant] += size
        self._evict(txn, self._spread_bytes(wanted) - free_bytes, asked)

    def _spread_bytes(self, wanted: Iterable[Wanted]) -> int:
        """Return the most that extents can make files grow by."""
        sums = Counter[int]()
        for size, _ in wanted:
            sums[size] += size
        return sum(map(self._files.filesystem.spread_bytes, sums.values()))

    # --- giving back ------------------------------------------------------------------------

    @owned_by("index.thread")
    def erasing(self) -> Iterator[None]:
        """Erase dirty extents in short steps, each run at once; then unlink empty segments."""
        start = b""
        while runs := self._next_runs(start):
            erased, end = [], time.monotonic() + _ERASING_S
            self.failpoint("erase:before")
            for run in runs:
                start = extent_key(run[-1]) + b"\0"
                erased += [run] if self._files.erase(run[0], len(run)) else []
                if time.monotonic() > end:
                    break
            self.failpoint("erase:done")
            with self.changing() as txn:
                for run in erased:
                    is_known = txn.get_segment(run[0].segment) is not None
                    for extent in run:
                        txn.drop_extent("pending", extent)
                        if is_known:
                            txn.add_extent("free", extent)
            self.failpoint("erase:committed")
            for extent in chain(*erased):
                self.allocator.drop_dirty(extent)
            yield
        yield from self._removing_empty_segments()

    def _next_runs(self, start: bytes) -> list[list[Extent]]:
        with self.index.reading() as txn:
            return self.allocator.dirty_runs(txn, start)

    def _removing_empty_segments(self) -> Iterator[None]:
        """Give back segments that hold neither blocks nor pending extents, in short steps.

        A segment may have a hundred thousand extents. It is made shorter from its end, and unlinked
        by the last step. Where a block is stored in it meanwhile, what is left of it stays.
        """
        with self.index.reading() as txn:
            segments = txn.segments()
        for segment, state in segments.items():
            num_free, found = 0, _LOOKED_EXTENTS
            while num_free < state.num_used and found == _LOOKED_EXTENTS:
                with self.index.reading() as txn:
                    found = txn.num_free(Extent(segment, num_free), _LOOKED_EXTENTS)
                num_free += found
                if found == _LOOKED_EXTENTS:
                    yield
            is_left = num_free >= state.num_used
            while is_left:
                is_left = self._shorten(segment)
                yield

    def _shorten(self, segment: int) -> bool:
        """Give back free extents at the end of a segment; return whether others may follow."""
        with self.changing() as txn:
            if (state := txn.get_segment(segment)) is None:
                return False
            most = min(_SHORTENED_BYTES // state.extent_bytes or 1, _SHORTENED_EXTENTS)
            num_used = max(state.num_used - most, 0)
            count = state.num_used - num_used
            if txn.num_free(Extent(segment, num_used), count) < count:
                return False
            txn.shorten_segment(segment, state, num_used)
        self.failpoint("segment:forgotten")
        if not num_used:
            self._files.remove(segment)
        elif segment in self._files:
            self._files.truncate(segment, num_used)
        return num_used > 0

    @owned_by("index.thread")
    def release_idle(self, needed_bytes: int) -> bool:
        """Give back space that no block needs, until there is room for `needed_bytes`.

        If that much room cannot be made, all such space is given back. Returns whether anything
        was given back.
        """
        before = self._files.occupied_bytes, self.allocator.pending_bytes
        for _ in self.erasing():
            is_less = self.allocator.pending_bytes < before[1]
            if self._space.room_bytes >= needed_bytes and is_less:
                return True
        with self.changing() as txn:
            cut = self.allocator.cut(txn)
        for segment in [each for each in cut if each in self._files]:
            self._files.truncate(segment, cut[segment])
        return bool(cut) or before != (self._files.occupied_bytes, self.allocator.pending_bytes)

    # --- evicting ---------------------------------------------------------------------------

    @owned_by("index.thread")
    def enforce_budget(self) -> None:
        """Evict until the files fit into the budget, with room left for the index to grow."""
        while self._space.room_bytes < 0 and self.give_way():
            pass

    @owned_by("index.thread")
    def give_way(self) -> bool:
        """Give back space that no block needs, or evict blocks; return False if nothing is left."""
        if self.release_idle(0):
            return True
        with self.changing() as txn:
            return bool(self._evict(txn, -self._space.room_bytes))

    @owned_by("index.thread")
    def in_order(self, txn: IndexTxn) -> Iterator[Located]:
        """Walk over blocks in the order in which they give way to a smaller budget.

        The longest unused go first, or, where only the end of a file gives space back, the last
        blocks of the files.
        """
        if self._files.punch_hole:
            yield from filter(None, map(txn.sound, txn.longest_unused()))
            return
        for extent in self.allocator.from_ends(txn):
            found = None
            with suppress(StorageError):
                found = self.payloads.header_at(extent)
            located = None if found is None else txn.sound(found.record.block_hash)
            if located is not None and located.extent == extent:
                yield located

    def _evict(
        self, txn: IndexTxn, needed_bytes: int, asked: Mapping[bytes, int] = MappingProxyType({})
    ) -> int:
        """Drop blocks with `needed_bytes` of extents, up to `TXN_BLOCKS`; return how many entries.

        Extents of every size count, because their space can be given back. `asked` has how many
        bytes of extents each tenant asks for.
        """
        if needed_bytes <= 0:
            return 0
        victims = list[Located]()
        if not asked and not self._files.punch_hole:
            for located in islice(self.in_order(txn), TXN_BLOCKS):
                victims.append(located)
                needed_bytes -= located.extent_bytes
                if needed_bytes <= 0:
                    break
        if not victims:
            victims = self.tenants.choose(txn, needed_bytes, asked, self._space.most_bytes)
        if not victims and txn.meta.totals.num_blocks:
            txn.meta.needs_rebuild = True  # blocks are stored, but their `lru` keys are lost
        dropped = dict[bytes, Located]()
        for located in victims:
            if located.record.block_hash not in dropped:  # it may be a page of one before it
                gone = self.drop(txn, located, "capacity")
                dropped |= {each.record.block_hash: each for each in gone}
        self.note_evicted(txn, [*dropped.values()])
        return len(dropped)

    @owned_by("index.thread")
    def note_evicted(self, txn: IndexTxn, victims: Sequence[Located]) -> None:
        """Count blocks that had to make room."""
        self.num_evicted += len(victims)
        now, counts = self.clock.now(), txn.meta.lifetimes
        for record in (located.record for located in victims):
            counts.note_evicted(record.retention, now, computed_at=record.computed_at)
