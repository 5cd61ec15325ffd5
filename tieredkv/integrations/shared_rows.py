"""Find the shared memory that another part of this process holds, by an address in it.

This module knows the maps and descriptors of a process. It does not know whose memory it is.
"""

import contextlib
import os
from pathlib import Path

import numpy as np

from tieredkv.errors import StorageError


def open_rows(view: memoryview) -> int:
    """Return a new descriptor of the shared file that a buffer begins and ends with.

    The file is found by the process's map of the buffer's address, and then among the process's
    descriptors, since its name may be gone. No view of the buffer is kept.

    Raises:
        StorageError: the buffer is no whole shared file, or nobody here has it open.
    """
    # NOTE: an array that lives on would keep the owner from giving its memory back.
    address = int(np.frombuffer(view, np.uint8, count=1).ctypes.data) if view.nbytes else 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, flags, offset, device, inode, *_ = line.split(maxsplit=5)
        start, end = (int(each, 16) for each in span.split("-"))
        if not start <= address < end:
            continue
        is_whole = address == start and int(offset, 16) == 0 and address + view.nbytes <= end
        if not (is_whole and flags[3] == "s"):
            raise StorageError(
                "the rows are not one shared file from its start to its end, so that another "
                "process cannot reach them"
            )
        major, minor = (int(each, 16) for each in device.split(":"))
        return _descriptor(os.makedev(major, minor), int(inode))
    raise StorageError("the rows are not mapped in this process")


def _descriptor(device: int, inode: int) -> int:
    """Duplicate the descriptor of a file that this process has open.

    Raises:
        StorageError: it has none.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            fd = os.dup(int(name))
            found = os.fstat(fd)
            if (found.st_dev, found.st_ino) == (device, inode):
                return fd
            os.close(fd)
    raise StorageError("nobody in this process has the file of the rows open any more")
