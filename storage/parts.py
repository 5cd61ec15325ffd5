"""The parts of an open store, of which `tieredkv.storage.opening` makes them."""

from collections.abc import Callable
from dataclasses import dataclass

from tieredkv.clock import Clock
from tieredkv.storage.extents.allocator import ExtentAllocator
from tieredkv.storage.extents.files import SegmentFiles
from tieredkv.storage.extents.payloads import Payloads
from tieredkv.storage.extents.room import Room
from tieredkv.storage.extents.space import Space
from tieredkv.storage.folder.folder import StoreFolder
from tieredkv.storage.index.environment import Index
from tieredkv.storage.keys.names import Names
from tieredkv.storage.keys.use import KeyUse


@dataclass(frozen=True, eq=False)
class Parts:
    """What an open store consists of; each part knows only those before it.

    Attributes:
        clock: tells every part the time.
        folder: the folder, which this process has locked.
        index: which blocks are stored, where and until when.
        key_use: the payload keys, and which of them blocks need.
        files: the segment files.
        payloads: moves blocks into extents and back.
        space: how many bytes the files may occupy.
        allocator: which extents are in use.
        room: makes transactions, and room for blocks.
        failpoint: called with a label at each step of a change; tests stop the process there.
        num_expired: how many blocks expired since the clock was behind.
    """

    clock: Clock
    folder: StoreFolder
    index: Index
    key_use: KeyUse
    files: SegmentFiles
    payloads: Payloads
    space: Space
    allocator: ExtentAllocator
    room: Room
    failpoint: Callable[[str], None]
    num_expired: int = 0

    @classmethod
    def join(
        cls,
        clock: Clock,
        folder: StoreFolder,
        index: Index,
        key_use: KeyUse,
        files: SegmentFiles,
        budget_bytes: int,
        failpoint: Callable[[str], None] = lambda label: None,
    ) -> "Parts":
        """Put the other parts on those that were opened."""
        payloads = Payloads(files, key_use.living, index.retentions)
        space = Space(folder, files, budget_bytes)
        allocator = ExtentAllocator(files, space, failpoint)
        room = Room(index, payloads, allocator, clock, failpoint, Names(key_use.names_key))
        outer = (payloads, space, allocator, room, failpoint)
        return cls(clock, folder, index, key_use, files, *outer)
