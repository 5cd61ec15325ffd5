"""Whether the folder of a store is gone for certain, as far as a key table remembers where it was.

Key tables of several stores may lie in one folder of keys, and other machines or containers may
use it, too. What is at a path here says nothing of them. So a table remembers which folder held
the store's folder: only where that very folder has the store no longer, the store is gone.
"""

import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tieredkv.storage.folder.marker import read_marker

UNKNOWN = bytes(32)
_PARENT = struct.Struct("<16sQQ")  # boot of the machine, device and inode of the folder
_OCTAL = re.compile(rb"\\([0-7]{3})")  # how a line of `mountinfo` writes a space


def parent_of(folder: str) -> bytes:
    """Return what identifies the folder that holds a store's folder, until the machine boots again.

    It is unknown, 32 zeroes, if that cannot be told or if the store's folder is a mount point,
    since a volume that is not mounted is not gone.
    """
    with suppress(OSError, ValueError):
        boot = bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", ""))
        if not is_mount_point(folder):
            info = os.stat(os.path.dirname(folder))
            return _PARENT.pack(boot, info.st_dev, info.st_ino)
    return UNKNOWN


def is_gone(folder: str, parent: bytes, id: bytes) -> bool:
    """Return whether the store of an id is in no folder beside the one where it was, nor in that.

    Args:
        folder: where it was.
        parent: what `parent_of` said then.
        id: of the store.
    """
    if parent == UNKNOWN or parent_of(folder) != parent:
        return False
    try:
        return not (_has_store(folder, id) or any(_stores_beside(folder, id)))
    except OSError:
        return False  # it may be there


def _stores_beside(folder: str, id: bytes) -> Iterator[bool]:
    above = os.path.dirname(folder)
    for name in os.listdir(above):
        with suppress(OSError):  # it is no folder of this user's store
            yield _has_store(os.path.join(above, name), id)


def _has_store(folder: str, id: bytes) -> bool:
    marker = read_marker(folder)
    return marker is not None and marker.id == id.hex()


def is_mount_point(path: str) -> bool:
    """Return whether something is mounted at a path, be it one file, as into a container.

    Raises:
        OSError: the mounts cannot be read.
    """
    real = os.fsencode(os.path.realpath(path))
    with open("/proc/self/mountinfo", "rb") as file:
        points = [line.split(b" ")[4] for line in file]
    return any(_OCTAL.sub(lambda found: bytes([int(found[1], 8)]), each) == real for each in points)
