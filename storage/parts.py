"""The parts of an open store, of which `tieredkv.storage.opening` makes them."""

from collections.abc import Callable
from dataclasses import dataclass

from tieredkv.clock import Clock
from tieredkv.storage.extents.allocator import ExtentAllocator
from tieredkv.storage.extents.files import SegmentFiles
from tieredkv.storage.extents.space import Space
from tieredkv.storage.folder.folder import StoreFolder
from tieredkv.storage.index.environment import Index
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
        space: how many bytes the files may occupy.
        allocator: which extents are in use.
        failpoint: called with a label at each step of a change; tests stop the process there.
    """

    clock: Clock
    folder: StoreFolder
    index: Index
    key_use: KeyUse
    files: SegmentFiles
    space: Space
    allocator: ExtentAllocator
    failpoint: Callable[[str], None] = lambda label: None
