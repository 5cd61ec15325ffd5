"""Opens the key table of a store, and puts it under another master key.

A rotation in place makes the new master key in a draft beside the old one, has it open the table,
too, renames the draft over the old key, and has the new key alone open the table. So the key in the
file opens the table at each moment. Whatever a crash leaves of a rotation, also of one to another
file, the next opening finishes it.
"""

import logging
import os
from contextlib import suppress

from tieredkv.errors import ConfigError, MissingKeyError, StorageError
from tieredkv.storage.folder.filesystem import flush_folder
from tieredkv.storage.index.verdicts import storage_errors
from tieredkv.storage.keys import gone, master, trust
from tieredkv.storage.keys.destruction import others_under
from tieredkv.storage.keys.layout import check_of
from tieredkv.storage.keys.place import KeyPlace
from tieredkv.storage.keys.table import KeyTable
from tieredkv.storage.keys.table_file import DRAFT_SUFFIX, overwrite

logger = logging.getLogger(__name__)

_HINT = "hint: give the new key another place, with `tieredkv rotate --to FILE`"


def open_table(place: KeyPlace) -> KeyTable:
    """Open the key table of a store, and finish a rotation that was cut short.

    Raises:
        ConfigError, MissingKeyError, DamagedTableError, StoreBusyError: as `KeyPlace.look` and
            `KeyTable.open` do.
    """
    place.check()
    table = KeyTable.open(place.table, bytes.fromhex(place.id), place.read_master())
    if table.head.is_rotating:
        _finish(table)
    return table


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
        StorageError: a file cannot be written. The key in the file opens the table, and the next
            opening or another call finishes the rotation.
    """
    with storage_errors(key_file):
        is_fixed = os.path.islink(key_file) or gone.is_mount_point(key_file)
    if is_fixed:
        text = f"the master key `{key_file}` is a link or mounted, so no new key can take its place"
        raise ConfigError(f"{text}\n{_HINT}")
    check = check_of(master.read_file(key_file))
    if check not in table.head.checks:
        text = f"the key in `{key_file}` is not the master key of the key table `{table.path}`"
        raise MissingKeyError(f"{text}\n{_HINT}", reason="master key")
    if others := others_under(check, table.path):
        shown = ", ".join(f"`{path}`" for path in others)
        text = f"the master key `{key_file}` is that of other key tables, too: {shown}"
        raise ConfigError(f"{text}\n{_HINT}")
    draft = key_file + DRAFT_SUFFIX
    with storage_errors(draft), suppress(FileNotFoundError):
        os.unlink(draft)  # one of a rotation that was cut short, under which no table is alone
    key = master.make_file(draft)
    table.note(key, place=key_file)
    _take_place(draft, key_file)
    table.renew(key)


def _take_place(draft: str, key_file: str) -> None:
    """Rename the draft of a master key over the old one, and overwrite that."""
    with storage_errors(key_file):
        old = trust.open_file(key_file, master.WHAT, os.O_RDWR, follows_link=False)
        try:
            os.rename(draft, key_file)
            flush_folder(os.path.dirname(os.path.abspath(key_file)))
            overwrite(old)
        finally:
            os.close(old)


def _finish(table: KeyTable) -> None:
    """Finish a rotation that was cut short, if the new master key is where the table has it.

    What fails is logged only: the old key opens the table until a start has the new one.
    """
    place = table.head.master_place
    where, why = f"`{place}`" if place else "the output of a command", ""
    for path in (place + DRAFT_SUFFIX, place) if place else ():
        try:
            key = master.read_file(path)
        except MissingKeyError:
            continue
        if check_of(key) not in table.head.checks[1:]:
            continue
        try:
            if path != place:
                _take_place(path, place)
            table.renew(key)
        except StorageError as error:
            why = f": {error}"
            break
        text = "%s: a change of the master key was cut short and is finished now; the table needs "
        text += "the new one, %s, from now on"
        logger.warning(text, table.path, where)
        return
    text = "%s: a change of the master key was cut short; either key opens the table until a start "
    text += "is given the new one, %s%s"
    logger.warning(text, table.path, where, why)
