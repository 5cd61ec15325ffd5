"""Extents under a byte budget: which are lent, which wait to be erased, which blocks are evicted.

This module knows segments and extent sizes, and asks `space` how much room there is. The least
recently used blocks are evicted first, the end of a prompt before its beginning, and no more blocks
than needed. An extent that failed twice is not used again until the next start.
"""

import errno
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, groupby, islice, product
from types import MappingProxyType

from tieredkv.clock import Clock
from tieredkv.errors import IntegrityError, StorageError, StoreFullError
from tieredkv.storage.extents.files import SegmentFiles
from tieredkv.storage.extents.space import Space
from tieredkv.storage.extents.tenants import Tenants
from tieredkv.storage.folder.filesystem import NO_SPACE
from tieredkv.storage.format.record import Extent, Located
from tieredkv.storage.index.entries import SegmentState, extent_key, split_extent_key
from tieredkv.storage.index.environment import Index
from tieredkv.storage.index.transaction import TXN_BLOCKS, IndexTxn, batches
from tieredkv.storage.ownership import owned_by

logger = logging.getLogger(__name__)

_STEP_BYTES = 64 << 20
_SEGMENT_BYTES = 1 << 30
# Limits of one step of erasing. An extent changes two pages of the index; a block changes four.
_ERASED_EXTENTS, _ERASED_BYTES, _ERASING_S = 2 * TXN_BLOCKS, 64 << 20, 0.01
# Limits of one step of giving a segment back. Neighbouring extents share a few pages of the index.
_LOOKED_EXTENTS, _SHORTENED_EXTENTS = 4096, 1024


def largest_file_bytes(budget_bytes: int) -> int:
    """Return the size that no segment file exceeds, unless one extent alone is larger."""
    return max(_SEGMENT_BYTES, budget_bytes // 256)


@dataclass(eq=False)
class ExtentAllocator:
    """Hands out extents, takes them back, and keeps what files occupy within the budget.

    Every extent below `num_used` of its segment is in exactly one state: it belongs to a stored
    block, it is free (erased), or it is pending. A pending extent is `lent` (a put is under way) or
    `dirty` (it will be reused or erased). A tenant with a share of the budget keeps that much when
    other tenants need room; see `tieredkv.storage.extents.tenants`.

    `lent` and `_dirty` mirror the pending extents of the last committed transaction. After a failed
    transaction, `reload` restores them. Only the thread that changes the index uses this class.

    Attributes:
        faulty: extents that could not be read or written and are still lent or hold a block.
        strikes: how often each extent became dirty while it was faulty. After the first time the
            extent is erased before it is lent again; after the second time it is never lent again.
        has_no_file: whether the last request for extents failed because it needed a new file and
            the filesystem has no inode left.
        gone: blocks that have left the index since they were taken from here; they may have come
            back. None if nobody takes them.
        tenants: decides whose blocks are evicted.
    """

    files: SegmentFiles
    index: Index
    space: Space
    clock: Clock
    failpoint: Callable[[str], None]
    tenants: Tenants = field(default_factory=Tenants)
    lent: dict[Extent, int] = field(default_factory=dict)
    # By size of the extents, their keys; the size is 0 if the segment file is missing. There may be
    # a million: with tuples in their place, Python's garbage collector would stop all threads for
    # half a second now and then.
    _dirty: dict[int, dict[bytes, None]] = field(default_factory=dict)
    faulty: set[Extent] = field(default_factory=set)
    strikes: Counter[Extent] = field(default_factory=Counter)
    num_evicted: int = 0
    has_no_file: bool = False
    gone: list[bytes] | None = None
    _erase_errors: set[int | None] = field(default_factory=set)  # error codes already logged
    _lacks_room: bool = False  # whether the disk was too full for the last transaction
    _made: set[int] = field(default_factory=set)  # segments of the transaction under way

    # --- state ------------------------------------------------------------------------------

    @owned_by("index.thread")
    def reload(self) -> None:
        """Read the pending extents from the index; remove files that a failed transaction made."""
        with self.index.reading() as txn:
            segments, pending = set(txn.segments()), set(txn.extents("pending"))
        for segment in self._made - segments:
            self.files.remove(segment)
        self._made.clear()
        self._dirty = {}
        self.tenants.forget()
        for extent in pending - self.lent.keys():
            self._add_dirty(extent)
        self.space.measure()

    @contextmanager
    @owned_by("index.thread")
    def changing(self) -> Iterator[IndexTxn]:
        """Open one write transaction; if it fails, the state in memory is restored as well."""
        try:
            with self.index.writing() as txn:
                yield txn
        except BaseException as error:
            self.reload()
            space = self.space
            is_full = isinstance(error, StoreFullError)
            is_short = space.is_disk_full or self.files.free_bytes() < space.headroom_bytes
            if is_full or is_short:
                space.note_full(error.errno if isinstance(error, StoreFullError) else None)
                self._lacks_room = True
            if is_short and type(error) is StorageError:  # a page written in part is EIO for LMDB
                raise StoreFullError(errno.ENOSPC, space.lack) from error
            raise
        self.tenants.note(txn)
        if self.gone is not None:
            self.gone += txn.gone
        self._lacks_room = False
        self._made.clear()
        self.space.measure()

    @owned_by("index.thread")
    def remove(self, txn: IndexTxn, located: Located) -> None:
        """Drop a block's entry and mark its extent as dirty, if that extent exists.

        If the last transaction lacked room, the extent is erased first, which makes room. A crash
        between the two steps leaves an entry whose payload fails its checksum; it is a miss.
        """
        segment, number = located.extent
        state = txn.get_segment(segment)
        if state is None or number >= state.num_used or located.extent_bytes != state.extent_bytes:
            txn.remove_damaged(located.record.block_hash)
            return
        if self._lacks_room:
            self.erase(located.extent)
        txn.remove(located)
        self._add_dirty(located.extent)

    def _add_dirty(self, extent: Extent) -> None:
        size = self.files.extent_bytes(extent.segment)
        self._dirty.setdefault(size, {})[extent_key(extent)] = None
        if extent in self.faulty:
            self.faulty.discard(extent)
            self.strikes[extent] += 1

    def is_retired(self, extent: Extent) -> bool:
        """Return whether an extent failed too often to be used again."""
        return self.strikes[extent] > 1

    @property
    def pending_bytes(self) -> int:
        """Bytes of the extents that are lent or dirty."""
        return sum(self.lent.values()) + self._dirty_bytes

    @property
    def _dirty_bytes(self) -> int:
        return sum(size * len(extents) for size, extents in self._dirty.items())

    def idle_bytes(self, txn: IndexTxn) -> int:
        """Return how many bytes `release_idle` can give back."""
        states = (state for segment, state in txn.segments().items() if segment in self.files)
        unused = sum((each.num_extents - each.num_used) * each.extent_bytes for each in states)
        return self._dirty_bytes + unused

    # --- lending ----------------------------------------------------------------------------

    @owned_by("index.thread")
    def take(self, txn: IndexTxn, extent_bytes: int, count: int) -> list[Extent]:
        """List up to `count` extents as pending without evicting anything.

        Extents of a segment file that somebody removed are left as dirty, and others are taken.
        """
        taken = self._take_dirty(extent_bytes, count)
        sources = (self._take_unused, self._take_free, self._take_new)
        while True:
            for source in sources:
                if len(taken) < count:
                    found = source(txn, extent_bytes, count - len(taken))
                    for extent in found:
                        txn.add_extent("pending", extent)
                    taken += found
            for segment in {extent.segment for extent in taken}:
                self.files.refresh(segment)
            there = [extent for extent in taken if extent.segment in self.files]
            if len(there) == len(taken):
                return taken
            for extent in taken:
                if extent.segment not in self.files:
                    self._add_dirty(extent)
            taken = there + self._take_dirty(extent_bytes, count - len(there))

    @owned_by("index.thread")
    def take_back(self, extent: Extent, *, is_stored: bool) -> None:
        """End the loan of an extent: it now holds a stored block, or it is dirty."""
        if self.lent.pop(extent, None) is None:
            raise IntegrityError(f"extent {extent} is not lent")
        self.files.refresh(extent.segment)
        if not is_stored:
            self._add_dirty(extent)

    def _take_dirty(self, extent_bytes: int, count: int) -> list[Extent]:
        dirty = self._dirty.get(extent_bytes, {})
        found = map(split_extent_key, dirty)
        fit = (each for each in found if each not in self.strikes and each.segment in self.files)
        taken = list(islice(fit, count))
        for extent in taken:
            del dirty[extent_key(extent)]
        return taken

    def _take_unused(self, txn: IndexTxn, extent_bytes: int, count: int) -> list[Extent]:
        """Take extents whose space was set aside and that were never handed out."""
        taken: list[Extent] = []
        for segment, state in txn.segments().items():
            more = min(state.num_extents - state.num_used, count - len(taken))
            if state.extent_bytes == extent_bytes and more > 0 and segment in self.files:
                num_used = state.num_used + more
                taken += [Extent(segment, number) for number in range(state.num_used, num_used)]
                txn.put_segment(segment, state._replace(num_used=num_used))
        return taken

    def _take_free(self, txn: IndexTxn, extent_bytes: int, count: int) -> list[Extent]:
        """Take erased extents; if erasing punches holes, their space is set aside again first."""
        taken: list[Extent] = []
        segments = txn.segments().items()
        same = [
            s for s, state in segments if state.extent_bytes == extent_bytes and s in self.files
        ]
        free = chain.from_iterable(map(txn.free, same))
        for extent in list(islice((e for e in free if not self.is_retired(e)), count)):
            if extent.segment not in self.files:  # its file was found to be removed just now
                continue
            if self.files.punch_hole and self.space.fitting_bytes < extent_bytes:
                break
            if not self._allocate(extent.segment, extent.number, 1):
                break
            txn.drop_extent("free", extent)
            taken.append(extent)
        return taken

    def _take_new(self, txn: IndexTxn, extent_bytes: int, count: int) -> list[Extent]:
        """Take extents from a segment that grows by one step, or from a new segment."""
        largest = largest_file_bytes(self.space.budget_bytes) // extent_bytes or 1
        same = {
            s: state for s, state in txn.segments().items() if state.extent_bytes == extent_bytes
        }
        fits = [s for s in same if same[s].num_extents < largest and s in self.files]
        state = same[fits[-1]] if fits else SegmentState(extent_bytes, 0, 0)
        num_extents = state.num_extents
        step = min(_STEP_BYTES, self.space.budget_bytes // 64) // extent_bytes
        fitting = self.space.fitting_bytes // extent_bytes
        growth = min(max(step, count), fitting, largest - num_extents)
        if growth <= 0:
            return []
        try:
            segment = fits[-1] if fits else self._new_segment(txn, extent_bytes)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            # No inode is left. Evicting blocks of another size would not help.
            self.space.note_lack(error.errno)
            self.has_no_file = True
            return []
        self.failpoint("segment:opened")
        if not self._allocate(segment, num_extents, growth):
            return []
        self.failpoint("segment:grown")
        txn.put_segment(segment, state._replace(num_extents=num_extents + growth))
        return self._take_unused(txn, extent_bytes, count)

    def _new_segment(self, txn: IndexTxn, extent_bytes: int) -> int:
        segment = txn.meta.next_segment
        self.files.open(segment, extent_bytes, create=True)
        self._made.add(segment)
        txn.meta.next_segment += 1
        txn.put_segment(segment, SegmentState(extent_bytes, 0, 0))
        return segment

    def _allocate(self, segment: int, first_extent: int, num_extents: int) -> bool:
        """Set space aside; return False if too little would be left for the index to grow."""
        extent_bytes = self.files.extent_bytes(segment)
        needed_bytes = self.files.filesystem.spread_bytes(num_extents * extent_bytes)
        free_bytes = self.files.free_bytes()
        if needed_bytes + self.space.headroom_bytes > free_bytes:
            self.space.note_full(None, free_bytes)
            return False
        try:
            self.files.allocate(segment, first_extent, num_extents)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self.space.note_full(error.errno)
            return False
        return True

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
                erased += [run] if self.erase(run[0], len(run)) else []
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
            # The file of an extent may have been removed since that extent became dirty.
            for extent, extents in product(chain(*erased), self._dirty.values()):
                extents.pop(extent_key(extent), None)
            yield
        yield from self._removing_empty_segments()

    def _next_runs(self, start: bytes) -> list[list[Extent]]:
        """Return runs of neighbouring dirty extents for one step, from a key of `pending` on."""
        most = min(_ERASED_EXTENTS, _ERASED_BYTES // max([1, *self._dirty]) or 1)
        with self.index.reading() as txn:
            pending, sizes = txn.extents("pending", start), self._dirty.values()
            dirty = (it for it in pending if any(extent_key(it) in extents for extents in sizes))
            # Along a run, the extent's number grows as the position in the list does.
            runs = groupby(enumerate(islice(dirty, most)), lambda e: (e[1][0], e[1][1] - e[0]))
            return [[extent for _, extent in run] for _, run in runs]

    @owned_by("index.thread")
    def release_idle(self, needed_bytes: int) -> bool:
        """Give back space that no block needs, until there is room for `needed_bytes`.

        If that much room cannot be made, all such space is given back. Returns whether anything
        was given back.
        """
        before = self.files.occupied_bytes, self.pending_bytes
        for _ in self.erasing():
            if self.space.room_bytes >= needed_bytes and self.pending_bytes < before[1]:
                return True
        with self.index.reading() as txn:
            states = txn.segments().items()
        unused = {s: state for s, state in states if state.num_extents > state.num_used}
        if unused:
            with self.changing() as txn:
                for segment, state in unused.items():
                    txn.put_segment(segment, state._replace(num_extents=state.num_used))
            for segment in [s for s in unused if s in self.files]:
                self.files.truncate(segment, unused[segment].num_used)
        return bool(unused) or before != (self.files.occupied_bytes, self.pending_bytes)

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
            most = min(_ERASED_BYTES // state.extent_bytes or 1, _SHORTENED_EXTENTS)
            num_used = max(state.num_used - most, 0)
            count = state.num_used - num_used
            if txn.num_free(Extent(segment, num_used), count) < count:
                return False
            txn.shorten_segment(segment, state, num_used)
        self.failpoint("segment:forgotten")
        if not num_used:
            self.files.remove(segment)
        elif segment in self.files:
            self.files.truncate(segment, num_used)
        return num_used > 0

    @owned_by("index.thread")
    def erase(self, first: Extent, num_extents: int = 1) -> bool:
        """Erase the bytes of neighbouring extents; return False if that failed."""
        try:
            self.files.erase(first, num_extents)
        except OSError as error:
            if error.errno not in self._erase_errors:
                self._erase_errors.add(error.errno)
                text = "extents such as %s cannot be erased now, which is tried again later: %s"
                logger.warning(text, first, error)
            return False
        return True

    # --- evicting ---------------------------------------------------------------------------

    @owned_by("index.thread")
    def obtain(self, wanted: Sequence[tuple[int, bytes]]) -> list[Extent | None]:
        """Lend an extent for each pair of a size and a tenant, or None if eviction makes no room.

        Blocks are evicted only if there is no other room, and once for each batch.
        """
        found = dict[int, Extent]()
        self.has_no_file = False
        for places in batches(range(len(wanted))):
            while missing := [place for place in places if place not in found]:
                with self.changing() as txn:
                    taken = self._take_for(txn, wanted, missing)
                    short = [place for place in missing if place not in taken]
                    if short and not self.has_no_file:
                        spare = max(self.space.room_bytes, 0) + self.idle_bytes(txn)
                        asked = Counter[bytes]()
                        for size, tenant in (wanted[place] for place in short):
                            asked[tenant] += size
                        self._evict(txn, self._spread_bytes(wanted, short) - spare, asked)
                        taken |= self._take_for(txn, wanted, short)
                    self.failpoint("reserve:before")
                self.failpoint("reserve:done")
                found |= taken
                self.lent.update((extent, wanted[place][0]) for place, extent in taken.items())
                short = [place for place in missing if place not in found]
                missing_bytes = self._spread_bytes(wanted, short)
                if short and (self.has_no_file or not self.release_idle(missing_bytes)):
                    return list(map(found.get, range(len(wanted))))
        return list(map(found.get, range(len(wanted))))

    def _take_for(
        self, txn: IndexTxn, wanted: Sequence[tuple[int, bytes]], places: Sequence[int]
    ) -> dict[int, Extent]:
        """Take extents for some places of `wanted` without evicting anything."""
        of_size = dict[int, list[int]]()
        for place in places:
            of_size.setdefault(wanted[place][0], []).append(place)
        taken = dict[int, Extent]()
        for size, some in of_size.items():
            taken.update(zip(some, self.take(txn, size, len(some)), strict=False))
        return taken

    def _spread_bytes(self, wanted: Sequence[tuple[int, bytes]], places: Sequence[int]) -> int:
        """Return the most that extents for some places of `wanted` can make files grow by."""
        sums = Counter[int]()
        for place in places:
            sums[wanted[place][0]] += wanted[place][0]
        return sum(map(self.files.filesystem.spread_bytes, sums.values()))

    def _evict(
        self, txn: IndexTxn, needed_bytes: int, asked: Mapping[bytes, int] = MappingProxyType({})
    ) -> int:
        """Drop blocks with `needed_bytes` of extents, up to `TXN_BLOCKS`; return how many.

        Extents of every size count, because their space can be given back. `asked` has how many
        bytes of extents each tenant asks for.
        """
        if needed_bytes <= 0:
            return 0
        victims = self.tenants.choose(txn, needed_bytes, asked, self.space.most_bytes)
        if not victims and txn.meta.totals.num_blocks:
            txn.meta.needs_rebuild = True  # blocks are stored, but their `lru` keys are lost
        for located in victims:
            self.remove(txn, located)
        self.note_evicted(txn, victims)
        return len(victims)

    @owned_by("index.thread")
    def note_evicted(self, txn: IndexTxn, victims: Sequence[Located]) -> None:
        """Count blocks that had to make room."""
        self.num_evicted += len(victims)
        now, counts = self.clock.now(), txn.meta.lifetimes
        for record in (located.record for located in victims):
            counts.note_evicted(record.retention, now, computed_at=record.computed_at)

    @owned_by("index.thread")
    def enforce_budget(self) -> None:
        """Evict until the files fit into the budget, with room left for the index to grow."""
        while self.space.room_bytes < 0 and self.give_way():
            pass

    @owned_by("index.thread")
    def give_way(self) -> bool:
        """Give back space that no block needs, or evict blocks; return False if nothing is left."""
        if self.release_idle(0):
            return True
        with self.changing() as txn:
            return bool(self._evict(txn, -self.space.room_bytes))
