"""The key tables of a key folder that no worker holds: destroys what is over, and what is left.

No master key is needed, since anybody can read a slot's second of death. This module knows files of
keys; the caller knows the folders of stores.
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from tieredkv.errors import StorageError
from tieredkv.storage.index.verdicts import storage_errors
from tieredkv.storage.keys import layout, trust
from tieredkv.storage.keys.layout import FREE, SLOT_BYTES, SLOTS_AT, Head
from tieredkv.storage.keys.table_file import (
    DRAFT_SUFFIX,
    TABLE_SUFFIX,
    WHAT,
    erase_locked,
    open_locked,
    read_all,
    write_all,
)

logger = logging.getLogger(__name__)

HasStore = Callable[[str, bytes], bool]
"""Called with a path and a folder id; returns whether the folder of that store is at that path."""


class Swept(NamedTuple):
    """What a sweep has done.

    Attributes:
        num_keys: keys that were destroyed, since their second was over or they were damaged.
        num_tables: empty tables that were removed, since the folders of their stores are gone.
    """

    num_keys: int
    num_tables: int


def tables_under(key_dir: str, check: bytes) -> list[str]:
    """Return the paths of the tables in a key folder that are encrypted under one master key.

    Args:
        key_dir: the folder.
        check: what tells the master key from others (`layout.check_of`).

    Raises:
        StorageError: the folder cannot be read.
    """
    found = []
    for path in _listed(key_dir, TABLE_SUFFIX):
        with suppress(StorageError):
            fd = trust.open_file(path, WHAT, follows_link=False)
            try:
                head = _newest(read_all(fd, path))
            finally:
                os.close(fd)
            if head is not None and check in head.checks:
                found.append(path)
    return found


def sweep_tables(key_dir: str, now: float, has_store: HasStore) -> Swept:
    """Sweep each table of a key folder that no process holds; what fails is logged only.

    Each table is read wholly, so this is no work for the thread that answers lookups.

    Args:
        key_dir: the folder.
        now: seconds since the epoch.
        has_store: tells whether the folder of a store is where its table remembers it.
    """
    num_keys = num_tables = 0
    try:
        paths = [*_listed(key_dir, TABLE_SUFFIX), *_listed(key_dir, TABLE_SUFFIX + DRAFT_SUFFIX)]
    except StorageError as error:
        logger.warning("the folder of keys could not be swept: %s", error)
        return Swept(0, 0)
    for path in paths:
        try:
            swept = sweep_table(path, now, has_store)
        except StorageError as error:
            logger.debug("%s was not swept: %s", WHAT, error)
            continue
        num_keys, num_tables = num_keys + swept.num_keys, num_tables + swept.num_tables
    return Swept(num_keys, num_tables)


def sweep_table(path: str, now: float, has_store: HasStore) -> Swept:
    """Destroy the dead and damaged slots of a table; remove it if it is empty and its folder gone.

    A table of another format version is left as it is. So is one that a process holds. A draft
    that a crash has left is removed.

    Raises:
        MissingKeyError: it is absent, unreadable or not to be believed.
        StoreBusyError: a process holds it.
        StorageError: it cannot be written.
    """
    if path.endswith(DRAFT_SUFFIX):
        fd = open_locked(path, wait_s=0.0)
        try:
            erase_locked(fd, path)
        finally:
            os.close(fd)
        return Swept(0, 0)
    fd = trust.open_file(path, WHAT, follows_link=False)
    try:
        data = read_all(fd, path)  # without a lock, which would keep a worker from starting
    finally:
        os.close(fd)
    if not _dead(data, now) and not _is_left(data, has_store):
        return Swept(0, 0)
    fd = open_locked(path, wait_s=0.0)
    try:
        left = bytearray(read_all(fd, path))
        dead = _dead(left, now)
        with storage_errors(path):
            for number in dead:
                at = SLOTS_AT + number * SLOT_BYTES
                write_all(fd, FREE, at)
                left[at : at + SLOT_BYTES] = FREE
            if dead:
                os.fdatasync(fd)
        is_left = _is_left(left, has_store)
        if is_left:
            erase_locked(fd, path)
    finally:
        os.close(fd)
    return Swept(len(dead), int(is_left))


def _listed(key_dir: str, suffix: str) -> list[str]:
    with storage_errors(key_dir):
        return sorted(
            os.path.join(key_dir, name) for name in os.listdir(key_dir) if name.endswith(suffix)
        )


def _newest(data: bytes | bytearray) -> Head | None:
    heads = map(layout.head_of, layout.header_pages(bytes(data)))
    return max((each for each in heads if each), key=lambda head: head.number, default=None)


def _dead(data: bytes | bytearray, now: float) -> list[int]:
    """Return the slots whose second of death has come, and those that are damaged.

    Without a sound header nothing shows that the file is a table of ours.
    """
    if _newest(data) is None:
        return []
    numbers = []
    for number in range((len(data) - SLOTS_AT) // SLOT_BYTES):
        at = SLOTS_AT + number * SLOT_BYTES
        slot = bytes(data[at : at + SLOT_BYTES])
        if slot != FREE:
            dies_at = layout.death_of(slot)
            if dies_at is None or dies_at <= now:
                numbers.append(number)
    return numbers


def _is_left(data: bytes | bytearray, has_store: HasStore) -> bool:
    """Return whether a table is empty and belongs to a folder that is gone."""
    head = _newest(data)
    if head is None or not head.folder or any(data[SLOTS_AT:]):
        return False
    return not has_store(head.folder, head.folder_id)
