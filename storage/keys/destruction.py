"""Destroys the files of one store's keys, of this format version or the one before.

Only files of the key folder that are named by the store's id are touched, and a master key only if
a first start made it and nothing else needs it.
"""

import glob
import logging
import os
from contextlib import suppress

from tieredkv.errors import MissingKeyError
from tieredkv.storage.folder.marker import Marker
from tieredkv.storage.keys import layout, master, trust
from tieredkv.storage.keys.place import KeyPlace
from tieredkv.storage.keys.sweeps import tables_under
from tieredkv.storage.keys.table_file import TABLE_SUFFIX, WHAT, erase

logger = logging.getLogger(__name__)

REPLACED_TABLE_VERSION = 1
"""The version of the key tables of stores of the version before."""

# In such a table: id of the store, and what tells one master key from another.
_REPLACED_ID_AT, _REPLACED_CHECK_AT, _CHECK_BYTES = 8, 24, 8


def destroy_table(place: KeyPlace) -> None:
    """Destroy the key table of a store, then its master key if nothing else needs that.

    Raises:
        MissingKeyError: the table is not to be believed.
        StoreBusyError: a process has it open.
        StorageError: it cannot be overwritten or removed.
    """
    with suppress(FileNotFoundError):
        os.lstat(place.table)
        erase(place.table)
    _destroy_master(place)


def destroy_own_table(place: KeyPlace, marker: Marker) -> str:
    """Destroy the key table that a folder names, if it belongs to that folder, and its master key.

    Whoever can write to the folder can name the table of any store, and a copy of the folder names
    that of the original.

    Args:
        place: of the id in `marker`.
        marker: of the folder.

    Returns why keys stay; empty if none do.

    Raises:
        StorageError: they cannot be overwritten or removed.
    """
    try:
        found = place.heads()
    except MissingKeyError as error:
        if error.reason == "absent":
            destroy_table(place)  # what is left of it
        return str(error)
    # If no header is sound, the table is of no use. Nobody vouches for a header without the master
    # key, but only its owner can have written it.
    if found and not any(head.has_stamp(marker.stamp) for head in found):
        return f"`{place.table}` belongs to the folder of which this one is a copy"
    destroy_table(place)
    return ""


def destroy_replaced_tables(place: KeyPlace) -> int:
    """Destroy the keys of a store of the version before; return how many tables there were.

    The master key goes first: without a table of the store it would not count as the one that a
    first start made, so a crash in between would leave it.

    Raises:
        StorageError: a file cannot be overwritten or removed.
    """
    start = os.path.join(glob.escape(place.key_dir), f"{place.id}*{TABLE_SUFFIX}")
    tables = [path for path in sorted(glob.glob(start)) if _is_replaced_table(path, place.id)]
    if tables:
        _destroy_master(place)
    for path in tables:
        erase(path)
    return len(tables)


def _is_replaced_table(path: str, id: str) -> bool:
    """Return whether a file is a key table of version 1 of an id, or was overwritten as one."""
    start = _start_of(path)
    is_so = layout.version_of(start) == REPLACED_TABLE_VERSION
    is_so &= start[_REPLACED_ID_AT:_REPLACED_CHECK_AT] == bytes.fromhex(id)
    if is_so or any(start) or not start:
        return is_so
    pages = layout.header_pages(_start_of(path, layout.SLOTS_AT))
    return not any(map(layout.head_of, pages))  # of a table of this version one header may be lost


def _start_of(path: str, num_bytes: int = _REPLACED_CHECK_AT + _CHECK_BYTES) -> bytes:
    """Return the first bytes of a file of the key folder; none of what is not to be believed."""
    with suppress(OSError), open(trust.open_file(path, WHAT, follows_link=False), "rb") as file:
        return file.read(num_bytes)
    return b""


def _destroy_master(place: KeyPlace) -> None:
    """Destroy the master key that a first start made, unless something else needs it."""
    path = place.own_master
    if not os.path.lexists(path):
        return None
    if place.options.master_key is not None:
        with suppress(OSError):
            if os.path.samefile(place.options.master_key, path):
                return None
    try:
        try:
            check = layout.check_of(master.read_file(path))
        except MissingKeyError as error:
            if error.reason != "no key":
                raise
            return erase(path)  # a destruction that was cut short has overwritten it
        names = {os.path.basename(each) for each in tables_under(place.key_dir, check)}
        if not names - {place.id + TABLE_SUFFIX} and not _replaced_under(place, check):
            erase(path)
    except MissingKeyError as error:
        logger.warning("the master key of a store that was destroyed stays: %s", error)


def _replaced_under(place: KeyPlace, check: bytes) -> bool:
    """Return whether another store of the version before has its table under a master key."""
    for path in glob.glob(os.path.join(glob.escape(place.key_dir), f"*{TABLE_SUFFIX}")):
        if not os.path.basename(path).startswith(place.id):
            start = _start_of(path)
            is_replaced = layout.version_of(start) == REPLACED_TABLE_VERSION
            if is_replaced and start[_REPLACED_CHECK_AT:] == check:
                return True
    return False
