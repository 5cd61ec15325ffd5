"""A key table whose master key lies in a file: opened, and put under a new key in the same file.

A rotation in place makes the new master key in a draft beside the old one, puts the table under it,
and renames the draft. Whatever a crash leaves of that, the next opening finishes it. This module
knows no store.
"""

import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress

from tieredkv.errors import ConfigError, MissingKeyError, StorageError
from tieredkv.storage.folder.filesystem import flush_folder
from tieredkv.storage.index.verdicts import storage_errors
from tieredkv.storage.keys import master, trust
from tieredkv.storage.keys.layout import check_of
from tieredkv.storage.keys.sweeps import tables_under
from tieredkv.storage.keys.table import KeyTable
from tieredkv.storage.keys.table_file import DRAFT_SUFFIX, write_all

logger = logging.getLogger(__name__)

_OCTAL = re.compile(rb"\\([0-7]{3})")  # how a line of `mountinfo` writes a space
_HINT = "hint: give the new key another place, with `tieredkv rotate --to FILE`"


def open_table(path: str, folder_id: bytes, key_file: str) -> KeyTable:
    """Open a table with the master key in a file, or with the one in a draft beside it.

    Args:
        path: of the table.
        folder_id: of the store's folder.
        key_file: the file of the master key.

    Raises:
        MissingKeyError, StoreBusyError: as `KeyTable.open` and `master.read_file` do.
    """
    table = _with_either_key(KeyTable.open, path, folder_id, key_file)
    try:
        _settle(table, key_file)
    except StorageError as error:
        logger.warning("the new master key of `%s` is not in its place yet: %s", path, error)
    return table


def look_table(path: str, folder_id: bytes, key_file: str) -> KeyTable:
    """Read a table as `open_table` does, but without its lock and without a change.

    Raises:
        MissingKeyError: as `KeyTable.look` and `master.read_file` do.
    """
    return _with_either_key(KeyTable.look, path, folder_id, key_file)


def rotate_in_place(table: KeyTable, key_file: str) -> None:
    """Put a table under a new master key that takes the place of the old one in its file.

    Args:
        table: an open table.
        key_file: the file of its master key.

    Raises:
        ConfigError: another table of the key folder has the same master key, or the file is a
            link or a mount, so the key cannot be replaced in its place.
        MissingKeyError: the file holds no key or another one, or the new key cannot be made
            beside it.
        StorageError: a file cannot be written. Either key opens the table, and the next
            `open_table` or another call finishes the rotation.
    """
    if os.path.islink(key_file) or _is_mount_point(key_file):
        text = f"the master key `{key_file}` is a link or mounted, so no new key can take its place"
        raise ConfigError(f"{text}\n{_HINT}")
    others = tables_under(os.path.dirname(table.path), table.head.checks[0])
    if others := [
        path for path in others if os.path.basename(path) != os.path.basename(table.path)
    ]:
        shown = ", ".join(f"`{path}`" for path in others)
        text = f"the master key `{key_file}` is that of other key tables, too: {shown}"
        raise ConfigError(f"{text}\n{_HINT}")
    _settle(table, key_file)
    if check_of(master.read_file(key_file)) != table.head.checks[0]:
        text = f"the key in `{key_file}` is not the master key of the key table `{table.path}`"
        raise MissingKeyError(f"{text}\n{_HINT}", reason="master key")
    draft = key_file + DRAFT_SUFFIX
    key = _key_in(draft)
    if key is None:
        with storage_errors(draft), suppress(FileNotFoundError):
            os.unlink(draft)  # a crash has left a part of a key, under which nothing was written
        key = master.make_file(draft)
    table.rotate(key, place=key_file)
    _settle(table, key_file)


def _with_either_key(
    read: Callable[[str, bytes, bytes], KeyTable], path: str, folder_id: bytes, key_file: str
) -> KeyTable:
    """Read a table with the key in a file; if it is another one, with the key in the draft."""
    key = master.read_file(key_file)
    try:
        return read(path, folder_id, key)
    except MissingKeyError as error:
        if error.reason != "master key" or (draft_key := _key_in(key_file + DRAFT_SUFFIX)) is None:
            raise
    return read(path, folder_id, draft_key)


def _settle(table: KeyTable, key_file: str) -> None:
    """Put the draft of a master key into its place, if the table is under it already."""
    draft = key_file + DRAFT_SUFFIX
    if not os.path.lexists(draft):
        return
    key = _key_in(draft)
    if key is None or check_of(key) != table.head.checks[0]:
        return
    with storage_errors(key_file):
        old = trust.open_file(key_file, master.WHAT, os.O_RDWR, follows_link=False)
        try:
            os.rename(draft, key_file)
            flush_folder(os.path.dirname(os.path.abspath(key_file)))
            write_all(old, bytes(os.fstat(old).st_size), 0)
            os.fsync(old)
        finally:
            os.close(old)


def _is_mount_point(path: str) -> bool:
    """Return whether a file is mounted by itself, as into a container; nothing can replace it."""
    real = os.fsencode(os.path.realpath(path))
    with storage_errors(path), open("/proc/self/mountinfo", "rb") as file:
        points = [line.split(b" ")[4] for line in file]
    return any(_OCTAL.sub(lambda found: bytes([int(found[1], 8)]), each) == real for each in points)


def _key_in(draft: str) -> bytes | None:
    """Return the master key in a draft; None if there is none, or only a part of one.

    Raises:
        MissingKeyError: the file cannot be read or is not to be believed.
    """
    try:
        return master.read_file(draft)
    except MissingKeyError as error:
        if error.reason in ("absent", "no key"):
            return None
        raise
