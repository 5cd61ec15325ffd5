"""How many bytes a store's files may occupy: its budget, or what the filesystem has left.

This module knows sizes of files and of the filesystem; it does not know what the bytes hold.
"""

import errno
import logging
import time
from dataclasses import dataclass

from tieredkv.errors import StoreFullError
from tieredkv.storage.extents.files import SegmentFiles
from tieredkv.storage.folder.filesystem import lack_of_room
from tieredkv.storage.folder.folder import StoreFolder
from tieredkv.storage.format.record import extent_bytes_for
from tieredkv.storage.index.environment import PAGE_BYTES
from tieredkv.storage.index.transaction import TXN_BLOCKS

logger = logging.getLogger(__name__)

_SMALLEST_INDEX_BYTES = 512 << 10
_FULL_S = 1.0  # after this time, a filesystem that was full is asked for space again


def headroom_bytes(index_bytes: int) -> int:
    """Bytes kept free for an index of this size to grow in one transaction of `TXN_BLOCKS` changes.

    LMDB copies each page that it changes: at most four pages for each block, and never more than
    the index has. It may add a few new pages.
    """
    return min(4 * TXN_BLOCKS * PAGE_BYTES, index_bytes) + 48 * PAGE_BYTES


def minimum_budget_bytes(block_bytes: int) -> int:
    """The smallest budget in which blocks of this size can be stored and replaced."""
    index_bytes = _SMALLEST_INDEX_BYTES + headroom_bytes(_SMALLEST_INDEX_BYTES)
    return index_bytes + 2 * extent_bytes_for(block_bytes)


@dataclass(eq=False)
class Space:
    """Counts what a store's files occupy, and says by how much segment files may grow.

    While the filesystem has less room than the budget, that room is the limit instead of the
    budget. Some space is left to the index. Only the store's thread uses this class.

    Attributes:
        overhead_bytes: what everything but the segment files occupied when it was last measured.
        why_full: what the filesystem had run out of when it was last full.
    """

    folder: StoreFolder
    files: SegmentFiles
    budget_bytes: int
    overhead_bytes: int = 0
    why_full: str = ""
    _full_until: float = 0.0
    _limit_when_full: int = 0  # until `_full_until`: room that the filesystem has for all files

    def measure(self) -> None:
        """Measure again how many bytes all files other than segments occupy."""
        self.overhead_bytes = self.folder.occupied_bytes()

    @property
    def occupied_bytes(self) -> int:
        """Bytes that all files of the store occupy."""
        return self.overhead_bytes + self.files.occupied_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes by which segment files may still grow; negative when they must shrink."""
        return self.most_bytes - self.files.occupied_bytes

    @property
    def fitting_bytes(self) -> int:
        """Bytes of neighbouring extents that certainly fit into `room_bytes`."""
        return self.files.filesystem.fitting_bytes(self.room_bytes)

    @property
    def headroom_bytes(self) -> int:
        """Bytes kept free for the index, in the pieces in which this filesystem hands out space."""
        return self.files.filesystem.spread_bytes(headroom_bytes(self.overhead_bytes))

    @property
    def most_bytes(self) -> int:
        """Bytes that all extents together may occupy at the moment."""
        budget = self.budget_bytes
        limit = min(budget, self._limit_when_full) if self.is_disk_full else budget
        return limit - self.overhead_bytes - self.headroom_bytes

    def check_fits(self, extent_bytes: int) -> None:
        """Raise an error if no eviction could make room for an extent of this size.

        What the other files occupy is measured again before a block is refused. Otherwise a store
        whose index was larger for a moment would never write, and so never measure, again.

        Raises:
            StoreFullError: the extent is larger than the budget leaves; names both sizes.
        """
        if extent_bytes > self._most_fitting_bytes:
            self.measure()
        if extent_bytes > (most := self._most_fitting_bytes):
            needs = f"a block needs {extent_bytes} bytes on disk, but the budget of"
            leaves = f"leaves {max(most, 0)} beside the index; raise `disk_size`"
            raise StoreFullError(f"{needs} {self.budget_bytes} bytes {leaves}")

    @property
    def _most_fitting_bytes(self) -> int:
        most = self.budget_bytes - self.overhead_bytes - self.headroom_bytes
        return self.files.filesystem.fitting_bytes(most)

    # --- a full filesystem ------------------------------------------------------------------

    @property
    def is_disk_full(self) -> bool:
        """Whether the filesystem was full within the last second."""
        return time.monotonic() < self._full_until

    def note_full(self, code: int | None, free_bytes: float = 0.0) -> None:
        """Limit the store for a second to what it occupies now plus what `free_bytes` leaves.

        The limit asks for a few blocks to be evicted to make room for the index, but only once in
        that time: otherwise another program that fills the disk would make the store evict
        everything. No block is evicted where erasing gives no space back.
        """
        self.measure()
        headroom, occupied = self.headroom_bytes, self.occupied_bytes
        can_shrink = self.files.punch_hole and not self.is_disk_full
        least = -min(headroom, occupied // 16) if can_shrink else min(self.room_bytes, 0)
        self.note_cause(code)
        if not self.is_disk_full:
            self._full_until = time.monotonic() + _FULL_S
        self._limit_when_full = occupied + headroom + int(max(free_bytes - headroom, least))

    def note_cause(self, code: int | None) -> None:
        """Note what the filesystem has run out of, by the code of the error if there was one."""
        if code is None and self.is_disk_full:
            return  # the cause is known already
        why = lack_of_room(self.folder.path, code or errno.ENOSPC)
        if why != self.why_full:
            logger.warning("%s; stored blocks stay, or are evicted for new ones", why)
        self.why_full = why
