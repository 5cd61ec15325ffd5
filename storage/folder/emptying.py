"""Removes everything that a store has stored, without opening it: its segments and its indexes.

This works whatever version, damage or lack of keys the store has, and follows nothing. The caller
holds the store's lock, and has destroyed the keys before. Other files in the folder stay.
"""

import os
import re
from contextlib import suppress
from typing import NamedTuple

from tieredkv.errors import StorageError
from tieredkv.storage.folder.filesystem import flush_folder
from tieredkv.storage.folder.folder import INDEX, INDEXES, SEGMENTS
from tieredkv.storage.folder.own_files import open_own, remove
from tieredkv.storage.index.pages import count_entries

_SEGMENT = re.compile(r"[0-9]+-[0-9]+\.seg")


class Emptied(NamedTuple):
    """What was removed.

    Attributes:
        num_blocks: as far as the index could tell.
        num_bytes: that segments and indexes occupied.
    """

    num_blocks: int
    num_bytes: int


def empty_store(folder: str) -> Emptied:
    """Remove the segments of a store, then its indexes.

    Raises:
        OSError: a file cannot be removed; the next call goes on.
    """
    num_blocks = 0
    with suppress(StorageError, OSError):
        num_blocks = count_entries(os.path.join(folder, INDEX), "blocks")
    num_bytes = 0
    with suppress(FileNotFoundError):
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        segments_fd = os.open(os.path.join(folder, SEGMENTS), flags)
        try:
            for name in filter(_SEGMENT.fullmatch, os.listdir(segments_fd)):
                num_bytes += _remove(name, segments_fd)
            os.fsync(segments_fd)
        finally:
            os.close(segments_fd)
    for path in (os.path.join(folder, name) for name in INDEXES):
        with suppress(FileNotFoundError):
            num_bytes += (
                sum(each.stat(follow_symlinks=False).st_blocks for each in os.scandir(path)) * 512
            )
            remove(path)
    flush_folder(folder)
    return Emptied(num_blocks, num_bytes)


def _remove(name: str, folder_fd: int) -> int:
    """Erase and unlink a file, and return what it occupied; of what is no file of ours the name."""
    num_bytes = 0
    with suppress(StorageError):
        fd = open_own(name, os.O_RDWR, dir_fd=folder_fd)
        try:
            num_bytes = os.fstat(fd).st_blocks * 512
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)
    remove(name, dir_fd=folder_fd)
    return num_bytes
