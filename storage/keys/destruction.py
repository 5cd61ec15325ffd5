"""Destroys files of the folder of keys: those of one store, and what is over of the other stores.

A store is destroyed with its keys first. Each sweep of a server destroys the keys whose second is
over in the tables that no process holds, and removes what no store can need any more: empty tables
whose stores are gone, and what a first start left that was cut short. No master key is needed for
that. A master key is destroyed only if a first start made it, as its name says, and no table needs
it.
"""

import logging
import os
import re
from contextlib import suppress
from functools import partial

from tieredkv.errors import MissingKeyError, StorageError
from tieredkv.storage.folder.marker import Marker
from tieredkv.storage.index.verdicts import storage_errors
from tieredkv.storage.keys import gone, layout, master
from tieredkv.storage.keys.layout import FREE, SLOT_BYTES, SLOTS_AT
from tieredkv.storage.keys.master import MASTER_SUFFIX
from tieredkv.storage.keys.place import KeyPlace
from tieredkv.storage.keys.table_file import (
    DRAFT_SUFFIX,
    TABLE_SUFFIX,
    WHAT,
    erase,
    erase_locked,
    look_at,
    open_locked,
    read_all,
    write_all,
)

logger = logging.getLogger(__name__)

REPLACED_TABLE_VERSION = 1
"""The version of the key tables of stores of the version before."""

# In such a table: id of the store, and what tells one master key from another.
_REPLACED_ID_AT, _REPLACED_CHECK_AT, _REPLACED_END = 8, 24, 32
_ID = re.compile("[0-9a-f]{32}")


# --- the keys of one store ----------------------------------------------------------------------


def destroy_table(place: KeyPlace) -> None:
    """Destroy the key table of a store, then its master key if nothing else needs that.

    Raises:
        MissingKeyError: the table is not to be believed.
        StoreBusyError: a process has it open.
        StorageError: it cannot be overwritten or removed.
    """
    if os.path.lexists(place.table):
        erase(place.table)
    _destroy_own_master(place)


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
        heads = place.heads()
    except MissingKeyError as error:
        if error.reason == "absent":
            destroy_table(place)  # what is left of it
        return str(error)
    # If no header is sound, the table is of no use. Nobody vouches for a header without the master
    # key, but only its owner can have written it.
    if heads and not any(head.has_stamp(marker.stamp) for head in heads):
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
    if not os.path.lexists(place.key_dir):  # as in a container whose home is not kept
        return 0
    paths = [path for path in _tables(place.key_dir) if _id_of(path).startswith(place.id)]
    paths = [path for path in paths if _is_replaced_table(path, bytes.fromhex(place.id))]
    if paths:
        _destroy_own_master(place)
    for path in paths:
        erase(path)
    return len(paths)


def _is_replaced_table(path: str, id: bytes) -> bool:
    """Return whether a file is a key table of version 1 of an id, or was overwritten as one."""
    data = _bytes_of(path)
    if any(data[:_REPLACED_END]):
        is_replaced = layout.version_of(data) == REPLACED_TABLE_VERSION
        return is_replaced and data[_REPLACED_ID_AT:_REPLACED_CHECK_AT] == id
    # Of a table of this version one header may be lost.
    return bool(data) and not layout.heads_of(data)


def _destroy_own_master(place: KeyPlace) -> None:
    """Destroy the master key that a first start made, unless a setting names it."""
    if (named := place.options.master_key) is not None:
        with suppress(OSError):
            if os.path.samefile(named, place.own_master):
                return
    _destroy_master(place.table)


def _destroy_master(table: str) -> None:
    """Destroy the master key that was made for a table, and a draft of it, if no other needs it."""
    if not _ID.fullmatch(_id_of(table)):
        return
    own = table.removesuffix(TABLE_SUFFIX) + MASTER_SUFFIX
    for path in filter(os.path.lexists, (own, own + DRAFT_SUFFIX)):
        try:
            if not _is_needed(path, table):
                erase(path)
        except MissingKeyError as error:
            logger.warning("a master key that nothing needs any more stays: %s", error)


def _is_needed(path: str, table: str) -> bool:
    """Return whether a table of another store is under the master key in a file."""
    try:
        check = layout.check_of(master.read_file(path))
    except MissingKeyError as error:
        if error.reason != "no key":
            raise
        return False  # what was cut short has left a part of a key
    return bool(others_under(check, table))


def others_under(check: bytes, table: str) -> list[str]:
    """Return the paths of the tables beside one that are encrypted under the same master key.

    Args:
        check: what tells that master key from others (`layout.check_of`).
        table: the path of the one.

    Raises:
        StorageError: the folder cannot be read.
    """
    return [
        path
        for path in _tables(os.path.dirname(table))
        if not _id_of(path).startswith(_id_of(table)) and check in _checks_of(_bytes_of(path))
    ]


def _checks_of(data: bytes) -> list[bytes]:
    if layout.version_of(data) == REPLACED_TABLE_VERSION:
        return [data[_REPLACED_CHECK_AT:_REPLACED_END]]
    return [check for head in layout.heads_of(data) for check in head.checks]


def _tables(key_dir: str, suffix: str = TABLE_SUFFIX) -> list[str]:
    with storage_errors(key_dir):
        names = sorted(os.listdir(key_dir))
    return [os.path.join(key_dir, name) for name in names if name.endswith(suffix)]


def _id_of(table: str) -> str:
    return os.path.basename(table).removesuffix(TABLE_SUFFIX)


def _bytes_of(path: str) -> bytes:
    """Read a file of the key folder; of what is not to be believed nothing."""
    with suppress(StorageError):
        return look_at(path)
    return b""


# --- what is over -------------------------------------------------------------------------------


def sweep_tables(key_dir: str, now: float) -> None:
    """Sweep each table and each draft in a key folder that no process holds.

    Each table is read wholly, so this is no work for the thread that answers lookups.

    Args:
        key_dir: the folder.
        now: seconds since the epoch.

    Raises:
        StorageError: the folder cannot be read.
    """
    tables, drafts = _tables(key_dir), _tables(key_dir, TABLE_SUFFIX + DRAFT_SUFFIX)
    for sweep, paths in ((sweep_draft, drafts), (partial(sweep_table, now=now), tables)):
        for path in paths:
            try:
                sweep(path)
            except StorageError as error:
                logger.debug("%s was not swept: %s", WHAT, error)


def sweep_draft(path: str) -> None:
    """Remove the draft of a table; without a table, its first start was cut short.

    Then nothing needs the master key that this start made either.

    Raises:
        StorageError: as `sweep_table`.
    """
    with open(open_locked(path, wait_s=0.0), "r+b", buffering=0) as file:
        table = path.removesuffix(DRAFT_SUFFIX)
        if not os.path.lexists(table):
            _destroy_master(table)
        erase_locked(file.fileno(), path)


def sweep_table(path: str, now: float) -> None:
    """Destroy the dead and damaged slots of a table; if it is empty and its store gone, remove it.

    The master key that was made for it goes with it. A table of another format version is left as
    it is. So is one that a process holds.

    Raises:
        MissingKeyError: it is absent, unreadable or not to be believed.
        StoreBusyError: a process holds it.
        StorageError: it cannot be written.
    """
    data = look_at(path)  # without a lock, which would keep a worker from starting
    if not _dead(data, now) and not _is_left(data):
        return
    with storage_errors(path), open(open_locked(path, wait_s=0.0), "r+b", buffering=0) as file:
        data = read_all(file.fileno(), path)
        if dead := _dead(data, now):
            for at in dead:
                write_all(file.fileno(), FREE, at)
            os.fdatasync(file.fileno())
            data = read_all(file.fileno(), path)
        if _is_left(data):
            _destroy_master(path)
            erase_locked(file.fileno(), path)


def _dead(data: bytes, now: float) -> list[int]:
    """Return where slots begin whose second of death has come, and those that are damaged.

    Without a sound header nothing shows that the file is a table of ours.
    """
    if not layout.heads_of(data):
        return []
    places = []
    for at in range(SLOTS_AT, len(data) - SLOT_BYTES + 1, SLOT_BYTES):
        if (slot := data[at : at + SLOT_BYTES]) != FREE:
            dies_at = layout.death_of(slot)
            if dies_at is None or dies_at <= now:
                places.append(at)
    return places


def _is_left(data: bytes) -> bool:
    """Return whether a table is empty and the folder of its store gone."""
    heads = layout.heads_of(data)
    if not heads or any(data[SLOTS_AT:]):
        return False
    return gone.is_gone(heads[0].folder, heads[0].parent, heads[0].folder_id)
