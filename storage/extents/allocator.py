"""Extents of the segment files: which are lent, which wait to be erased, and where more come from.

This module knows segments and extent sizes; `tieredkv.storage.extents.space` says how much files
may grow, and `tieredkv.storage.extents.room` makes transactions and room. An extent that failed
twice is not used again until the next start.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, groupby, islice

from tieredkv.errors import IntegrityError
from tieredkv.storage.extents.files import SegmentFiles
from tieredkv.storage.extents.space import Space
from tieredkv.storage.folder.filesystem import NO_SPACE
from tieredkv.storage.format.record import Extent
from tieredkv.storage.index.entries import SegmentState, extent_key, split_extent_key
from tieredkv.storage.index.transaction import TXN_BLOCKS, IndexTxn

_STEP_BYTES = 64 << 20
_SEGMENT_BYTES = 1 << 30
# Limits of one step of erasing. An extent changes two pages of the index; a block changes four.
_ERASED_EXTENTS, _ERASED_BYTES = 2 * TXN_BLOCKS, 64 << 20


def largest_file_bytes(budget_bytes: int) -> int:
    """Return the size that no segment file exceeds, unless one extent alone is larger."""
    return max(_SEGMENT_BYTES, budget_bytes // 256)


@dataclass(eq=False)
class ExtentAllocator:
    """Hands out extents and takes them back; only the thread that changes the index uses it.

    Every extent below `num_used` of its segment is in exactly one state: it belongs to a stored
    block, it is free (erased), or it is pending. A pending extent is `lent` (a put is under way) or
    dirty (it will be reused or erased). `lent` and the dirty extents mirror the pending extents of
    the last committed transaction.

    Attributes:
        faulty: extents that could not be read or written and are still lent or hold a block.
        num_failures: how often each extent became dirty while it was faulty. After the first time
            it is erased before it is lent again; after the second time it is never lent again.
        has_no_file: whether a request for extents failed because it needed a new file and the
            filesystem has no inode left.
        has_new_file: whether a file was made since the index was last flushed for one.
    """

    files: SegmentFiles
    space: Space
    failpoint: Callable[[str], None]
    lent: dict[Extent, int] = field(default_factory=dict)  # with their sizes
    # By size of the extents, their keys; the size is 0 if the segment file is missing. There may be
    # a million: with tuples in their place, Python's garbage collector would stop all threads for
    # half a second now and then.
    _dirty: dict[int, dict[bytes, None]] = field(default_factory=dict)
    faulty: set[Extent] = field(default_factory=set)
    num_failures: Counter[Extent] = field(default_factory=Counter)
    has_no_file: bool = False
    has_new_file: bool = False
    _made: set[int] = field(default_factory=set)  # segments of the transaction under way

    # --- state ------------------------------------------------------------------------------

    def reload(self, txn: IndexTxn) -> None:
        """Read which extents are dirty; remove files that a failed transaction has made."""
        for segment in self._made.difference(txn.segments()):
            self.files.remove(segment)
        self._made.clear()
        self._dirty = {}
        for extent in set(txn.extents("pending")) - self.lent.keys():
            self.add_dirty(extent)

    def note_committed(self) -> None:
        """Note that the files which the transaction has made are to stay."""
        self._made.clear()

    def add_dirty(self, extent: Extent) -> None:
        """Note that an extent, which is pending, holds bytes of no block."""
        size = self.files.extent_bytes(extent.segment)
        self._dirty.setdefault(size, {})[extent_key(extent)] = None
        if extent in self.faulty:
            self.faulty.discard(extent)
            self.num_failures[extent] += 1

    def is_retired(self, extent: Extent) -> bool:
        """Return whether an extent failed too often to be used again."""
        return self.num_failures[extent] > 1

    @property
    def pending_bytes(self) -> int:
        """Bytes of the extents that are lent or dirty."""
        return sum(self.lent.values()) + self._dirty_bytes

    @property
    def _dirty_bytes(self) -> int:
        return sum(size * len(extents) for size, extents in self._dirty.items())

    def idle_bytes(self, txn: IndexTxn) -> int:
        """Return how many bytes are dirty, or set aside and never handed out."""
        states = (state for segment, state in txn.segments().items() if segment in self.files)
        unused = sum((each.num_extents - each.num_used) * each.extent_bytes for each in states)
        return self._dirty_bytes + unused

    def dirty_runs(self, txn: IndexTxn, start: bytes) -> list[list[Extent]]:
        """Return runs of neighbouring dirty extents for one step, from a key of `pending` on."""
        most = min(_ERASED_EXTENTS, _ERASED_BYTES // max([1, *self._dirty]) or 1)
        pending, sizes = txn.extents("pending", start), self._dirty.values()
        dirty = (it for it in pending if any(extent_key(it) in extents for extents in sizes))
        # Along a run, the extent's number grows as the position in the list does.
        runs = groupby(enumerate(islice(dirty, most)), lambda e: (e[1][0], e[1][1] - e[0]))
        return [[extent for _, extent in run] for _, run in runs]

    def drop_dirty(self, extent: Extent) -> None:
        """Note that an extent was erased; its file may have been removed since it became dirty."""
        for extents in self._dirty.values():
            extents.pop(extent_key(extent), None)

    # --- lending ----------------------------------------------------------------------------

    def take(self, txn: IndexTxn, extent_bytes: int, count: int) -> list[Extent]:
        """List up to `count` extents as pending without evicting anything.

        Extents of a segment file that somebody removed are left as dirty, and others are taken.
        """
        taken = self._take_dirty(extent_bytes, count)
        for source in (self._take_unused, self._take_free, self._take_new):
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
                self.add_dirty(extent)
        return there + self.take(txn, extent_bytes, count - len(there))

    def take_back(self, extent: Extent, *, is_stored: bool) -> None:
        """End the loan of an extent: it now holds a stored block, or it is dirty."""
        if self.lent.pop(extent, None) is None:
            raise IntegrityError(f"extent {extent} is not lent")
        self.files.refresh(extent.segment)
        if not is_stored:
            self.add_dirty(extent)

    def _segments(self, txn: IndexTxn, extent_bytes: int) -> Iterator[tuple[int, SegmentState]]:
        """Walk over the segments with extents of this size whose files are there."""
        for segment, state in txn.segments().items():
            if state.extent_bytes == extent_bytes and segment in self.files:
                yield segment, state

    def _take_dirty(self, extent_bytes: int, count: int) -> list[Extent]:
        dirty = self._dirty.get(extent_bytes, {})
        failed = self.num_failures
        found = map(split_extent_key, dirty)
        fit = (each for each in found if each not in failed and each.segment in self.files)
        taken = list(islice(fit, count))
        for extent in taken:
            del dirty[extent_key(extent)]
        return taken

    def _take_unused(self, txn: IndexTxn, extent_bytes: int, count: int) -> list[Extent]:
        """Take extents whose space was set aside and that were never handed out."""
        taken: list[Extent] = []
        for segment, state in self._segments(txn, extent_bytes):
            more = min(state.num_extents - state.num_used, count - len(taken))
            if more > 0:
                num_used = state.num_used + more
                taken += [Extent(segment, number) for number in range(state.num_used, num_used)]
                txn.put_segment(segment, state._replace(num_used=num_used))
        return taken

    def _take_free(self, txn: IndexTxn, extent_bytes: int, count: int) -> list[Extent]:
        """Take erased extents; if erasing punches holes, their space is set aside again first."""
        taken: list[Extent] = []
        segments = [segment for segment, _ in self._segments(txn, extent_bytes)]
        free = chain.from_iterable(map(txn.free, segments))
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
        same = self._segments(txn, extent_bytes)
        growing = [each for each in same if each[1].num_extents < largest]
        segment, state = growing[-1] if growing else (None, SegmentState(extent_bytes, 0, 0))
        step = min(_STEP_BYTES, self.space.budget_bytes // 64) // extent_bytes
        fitting = self.space.fitting_bytes // extent_bytes
        growth = min(max(step, count), fitting, largest - state.num_extents)
        if growth <= 0:
            return []
        try:
            if segment is None:
                segment = self._new_segment(txn, state)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            # No inode is left. Evicting blocks of another size would not help.
            self.space.note_cause(error.errno)
            self.has_no_file = True
            return []
        self.failpoint("segment:opened")
        if not self._allocate(segment, state.num_extents, growth):
            return []
        self.failpoint("segment:grown")
        txn.put_segment(segment, state._replace(num_extents=state.num_extents + growth))
        return self._take_unused(txn, extent_bytes, count)

    def _new_segment(self, txn: IndexTxn, state: SegmentState) -> int:
        segment = txn.meta.next_segment
        self.files.open(segment, state.extent_bytes, create=True)
        self._made.add(segment)
        self.has_new_file = True
        txn.meta.next_segment += 1
        txn.put_segment(segment, state)
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

    # --- cutting files ----------------------------------------------------------------------

    def cut(self, txn: IndexTxn) -> dict[int, int]:
        """Take what no block needs off the ends of segments; return the new lengths in extents.

        That is what was never handed out and, where erasing gives no space back, what is free. The
        caller truncates the files once the transaction is committed.
        """
        cut = dict[int, int]()
        for segment, state in txn.segments().items():
            end = state.num_used
            if not self.files.punch_hole:
                free = {extent.number for extent in txn.free(segment)}
                while end - 1 in free:
                    end -= 1
                    txn.drop_extent("free", Extent(segment, end))
            if end < state.num_extents:
                txn.put_segment(segment, state._replace(num_extents=end, num_used=end))
                cut[segment] = end
        return cut

    def from_ends(self, txn: IndexTxn) -> Iterator[Extent]:
        """Walk over extents from the ends of the segment files on, as far as those can be cut."""
        for segment, state in reversed(txn.segments().items()):
            num_used = min(state.num_used, self.files.num_extents(segment))
            for number in reversed(range(num_used)):
                if (extent := Extent(segment, number)) in self.lent:
                    break
                yield extent
