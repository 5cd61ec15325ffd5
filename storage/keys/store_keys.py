"""Where the keys of a store are, and what a start does about them.

The folder of keys, which a setting or this user's home names, is the only anchor of trust. Its
files are named by the id that the store's folder has, and no path that the folder names is opened.
The setting says whether a store is encrypted; a store that is not has no id, and no file of keys.

Each start of a server writes a fresh stamp into the key table and into the folder. So a folder with
another stamp is a copy or an old backup: its keys have gone on with another folder.

This module knows which files there are and in which order they change;
`tieredkv.storage.keys.table` knows the keys.
"""

import logging
import os
import secrets
from contextlib import suppress
from functools import partial
from typing import Literal

from tieredkv.errors import ConfigError, DamagedTableError, MissingKeyError, StorageError
from tieredkv.storage.folder.folder import StoreFolder, has_segments, make_missing
from tieredkv.storage.folder.marker import ID_BYTES, Marker
from tieredkv.storage.keys import master
from tieredkv.storage.keys.destruction import destroy_own_table, destroy_table
from tieredkv.storage.keys.place import KeyPlace, check_outside, check_writable, write_note
from tieredkv.storage.keys.rotation import open_table, rotate_in_place
from tieredkv.storage.keys.table import KeyTable
from tieredkv.storage.options import StoreOptions
from tieredkv.wire.limits import described

logger = logging.getLogger(__name__)


Start = Literal["clear", "make", "open", "renew"]
"""What a start does: it sees that a store without blocks has no keys, or makes them; opens the keys
of a store and writes a fresh stamp; or empties one whose key table is damaged, and makes new keys.
"""


def plan(folder: str, marker: Marker | None, options: StoreOptions, *, has_blocks: bool) -> Start:
    """Find out what a server's start does about the keys; nothing is made or changed.

    Args:
        folder: the store's folder.
        marker: what `format.json` says; None for a new store.
        options: whether the store is encrypted, and where its keys are.
        has_blocks: whether the folder may hold blocks.

    Raises:
        ConfigError: setting and store disagree, or keys cannot be made where the settings say.
        MissingKeyError: the keys are not there, or belong to a store of which this is a copy.
    """
    wants, is_encrypted = options.encryption == "on", marker is not None and bool(marker.id)
    if wants != is_encrypted and has_blocks:
        has, set_to = ("not encrypted", "on") if wants else ("encrypted", "off")
        what = f"the store at `{folder}` is {has}, but `disk_encryption` is {set_to}"
        raise ConfigError(f"{what}\n{_ways_out(folder, 'set it to what the store has')}")
    if not wants:
        return "clear"
    place = KeyPlace(folder, options, marker.id if marker is not None else "")
    place.check()
    check_writable(place.key_dir)
    if not is_encrypted:
        if not place.makes_master:
            place.read_master()
        return "make"
    assert marker is not None, "an encrypted store has a marker"
    try:
        table = place.look()
    except DamagedTableError:
        return "renew"
    except MissingKeyError as error:
        raise _with_way_out(error, place) from error
    check_stamp(folder, marker, table)
    return "open"


def check_stamp(folder: str, marker: Marker, table: KeyTable) -> None:
    """Refuse a folder that is no longer the one of its key table.

    Raises:
        MissingKeyError: another folder has been served with these keys since.
    """
    if not table.head.has_stamp(marker.stamp):
        what = f"`{folder}` is a copy or an old backup of a store whose keys, `{table.path}`,"
        adopt = f"`tieredkv adopt --disk-dir {folder}` takes them here, so that the other folder"
        raise MissingKeyError(
            f"{what} another folder has used since\n{_ways_out(folder, f'{adopt} is the copy')}",
            reason="copy",
        )


class StoreKeys:
    """The keys of one store: its table, and where its master key comes from.

    Attributes:
        table: the key table, which is locked until `close`.
        faults: what the opening has found: `key_slot`, damaged slots; `key_table`, blocks that were
            removed since both headers of the table were damaged.
    """

    def __init__(self, place: KeyPlace, table: KeyTable) -> None:
        self.place, self.table = place, table
        self.faults = {"key_slot": table.num_lost} if table.num_lost else {}

    def rotate(self, path: str | None, command: str | None) -> str:
        """Replace the master key; no payload is rewritten. Returns where the new one is.

        Args:
            path: a file with the new master key, which is made if it does not exist.
            command: prints the new master key. If neither is given, a new key takes the place of
                the old one in its file.

        Raises:
            ConfigError: the path lies in the folder, or the old key cannot be replaced in place.
            MissingKeyError: there is no such key, or none to replace.
            StorageError: a file cannot be written; either key may apply.
        """
        try:
            return self._rotate(path, command)
        except MissingKeyError:
            raise
        except StorageError as error:
            hint = "hint: once this is put right, run it again; until then keep both master keys"
            raise type(error)(error.errno, f"{described(error)}\n{hint}") from error

    def _rotate(self, path: str | None, command: str | None) -> str:
        place = self.place
        if command is not None:
            self.table.rotate(master.ask_command(command))
            write_note(place.folder, place.table, None)
            return f"the output of `{command}`"
        if path is not None:
            check_outside(path, place.folder, "--to")
            is_there = os.path.lexists(path)
            key = master.read_file(path) if is_there else master.make_file(path)
            self.table.rotate(key, place=os.path.abspath(path))
            write_note(place.folder, place.table, os.path.abspath(path))
            return path
        if place.master is None:
            what = "the master key of the store is printed by a command"
            raise MissingKeyError(f"{what}; name the command or the file of the new one")
        rotate_in_place(self.table, place.master)
        return place.master

    def close(self) -> None:
        """Unlock the key table for the next process; may be called again."""
        self.table.close()


def open_keys(folder: StoreFolder, options: StoreOptions) -> tuple[StoreKeys | None, str]:
    """Open the keys of a store; a server makes them if there are none, and writes a fresh stamp.

    A verb goes by what the store is, and can do without the keys.

    Returns:
        the keys, None for a store that is not encrypted or, for a verb, if they are not there; and
        in the last case, why.

    Raises:
        ConfigError, MissingKeyError: as `plan`, to a server; no file of keys is left behind.
        StorageError: a file cannot be written.
    """
    if options.encryption != "as_it_is":
        return _start(folder, options), ""
    if not folder.marker.id:
        return None, ""
    try:
        place = KeyPlace(folder.path, options, folder.marker.id)
        return _open(folder, place, writes_stamp=False), ""
    except (ConfigError, StorageError) as error:
        return None, str(error)


def _start(folder: StoreFolder, options: StoreOptions) -> StoreKeys | None:
    start = plan(folder.path, folder.marker, options, has_blocks=has_segments(folder.path))
    place = KeyPlace(folder.path, options, folder.marker.id)
    match start:
        case "open":
            return _open(folder, place, writes_stamp=True)
        case "make":
            folder.empty()
            return _make(folder, options)
        case "renew":
            emptied = folder.empty()
            text = "both headers of the key table `%s` are damaged, so nothing in the store at `%s`"
            text += " can be read any more: its %d blocks were removed, and it begins anew"
            logger.warning(text, place.table, folder.path, emptied.num_blocks)
            folder.mark(id="", stamp="")
            destroy_table(place)
            keys = _make(folder, options)
            keys.faults["key_table"] = emptied.num_blocks
            return keys
        case "clear":
            if (was := folder.marker).id:
                folder.empty()
                folder.mark(id="", stamp="")
                if kept_why := destroy_own_table(place, was):
                    text = "the keys of `%s` were not destroyed: %s"
                    logger.warning(text, folder.path, kept_why)
            return None


def _open(folder: StoreFolder, place: KeyPlace, *, writes_stamp: bool) -> StoreKeys:
    table = open_table(place)
    try:
        check_stamp(folder.path, folder.marker, table)
        if writes_stamp:
            write_stamp(folder, table)
    except BaseException:
        table.close()
        raise
    return StoreKeys(place, table)


def write_stamp(folder: StoreFolder, table: KeyTable) -> None:
    """Write a fresh stamp into the table and into the folder, so that every copy has an old one.

    A crash between two steps leaves a folder whose stamp is in the table.

    Raises:
        OSError: a file cannot be written.
    """
    new, before = secrets.token_bytes(ID_BYTES), bytes.fromhex(folder.marker.stamp)
    table.stamp(new, before, folder=folder.path)
    folder.mark(stamp=new.hex())
    table.stamp(new, new)


def _make(folder: StoreFolder, options: StoreOptions) -> StoreKeys:
    """Make the key table of a store, and its master key if none is given.

    If any part of it fails, no file of it stays: the next start makes other keys.
    """
    place = KeyPlace(folder.path, options, secrets.token_hex(ID_BYTES))
    place.check()
    try:
        make_missing(place.key_dir)
    except StorageError as error:
        what = f"the folder of keys `{place.key_dir}` cannot be made; set `disk_key_dir`"
        raise ConfigError(f"{what}: {error}") from error
    make = partial(master.make_file, place.own_master)
    stamp, table = secrets.token_bytes(ID_BYTES), None
    try:
        table = KeyTable.create(
            place.table,
            bytes.fromhex(place.id),
            make if place.makes_master else place.read_master,
            stamp,
            folder=folder.path,
            master_place=place.master or "",
        )
        write_note(folder.path, place.table, place.master)
        folder.mark(id=place.id, stamp=stamp.hex())
    except BaseException:
        if table is not None:
            table.close()
        with suppress(OSError):
            folder.mark(id="", stamp="")
        with suppress(OSError):
            destroy_table(place)
        raise
    if place.makes_master:
        text = "the store at `%s` is encrypted; its master key was made at `%s`: keep a copy of it"
        logger.warning(text, folder.path, place.own_master)
    return StoreKeys(place, table)


def _ways_out(folder: str, way_out: str) -> str:
    return f"hint: {way_out}; or {_evict_all(folder)}"


def _evict_all(folder: str) -> str:
    return f"`tieredkv evict --all --disk-dir {folder}` empties the folder, which needs no keys"


def _with_way_out(error: MissingKeyError, place: KeyPlace) -> MissingKeyError:
    way_out = "put the keys back, as by mounting their folder"
    if error.reason == "master key" and (where := _master_place(place)):
        way_out = f"set `disk_master_key` = `{where}`, where the table has it"
    has_hint = "\nhint:" in str(error)
    more = (
        f"; or {_evict_all(place.folder)}" if has_hint else f"\n{_ways_out(place.folder, way_out)}"
    )
    return MissingKeyError(f"{error}{more}", reason=error.reason)


def _master_place(place: KeyPlace) -> str:
    """Return where a key table says that its master key is; empty if it names the present place."""
    where = place.heads()[0].master_place
    return "" if where == place.master else where
