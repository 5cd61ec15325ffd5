"""Where the keys of a store are: finds or makes its master key and its key table.

The folder of an encrypted store remembers, in `encryption.json`, the store's id and the paths of
both files, which lie outside the folder. This module knows that file and how paths are chosen;
`tieredkv.storage.key_table` knows the keys.
"""

import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tieredkv.environment import default_key_dir
from tieredkv.errors import ConfigError, MissingKeyError, StorageError
from tieredkv.storage import master_key
from tieredkv.storage.filesystem import flush_folder
from tieredkv.storage.key_table import DRAFT_SUFFIX, STORE_ID_BYTES, KeyTable
from tieredkv.storage.master_key import LOST_HINT
from tieredkv.storage.verdicts import storage_errors
from tieredkv.storage.worker_messages import StoreOptions

logger = logging.getLogger(__name__)

NOTE = "encryption.json"
"""The file in a store's folder that says where its keys are."""

TABLE_SUFFIX = ".keys"


class KeyNote(msgspec.Struct, frozen=True, kw_only=True):
    """What `encryption.json` holds.

    Attributes:
        store_id: 32 hexadecimal digits.
        key_table: path of the key table.
        master_key: path of the master key; None if a command prints it.
    """

    store_id: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    key_table: str
    master_key: str | None


class StoreKeys:
    """The keys of one store: its table, and where its master key comes from.

    Attributes:
        table: the key table.
        note: what the folder remembers.
        is_shared: whether the table belongs to a store of which this folder is a copy, so that
            nothing in it may be changed.
    """

    def __init__(
        self, folder: str, note: KeyNote, table: KeyTable, *, is_shared: bool = False
    ) -> None:
        self.folder, self.note, self.table, self.is_shared = folder, note, table, is_shared

    @property
    def store_id(self) -> str:
        """The id of the store, in hexadecimal digits."""
        return self.note.store_id

    def rotate(self, path: str | None, command: str | None) -> str:
        """Replace the master key; no payload is rewritten. Returns where the new one is.

        Args:
            path: a file with the new master key, which is made if it does not exist.
            command: prints the new master key. If neither is given, a new key takes the place of
                the old one in its file.

        Raises:
            ConfigError: the path lies in the folder.
            MissingKeyError: there is no such key, or none to replace.
            StorageError: a file cannot be written; either key may apply.
        """
        if self.is_shared:
            what = f"`{self.folder}` is a copy of the store at `{self.table.folder}`"
            raise MissingKeyError(f"{what}, which has its keys; rotate the original")
        if command is not None:
            self.table.wrap(master_key.ask_command(command))
            self._remember(None)
            return f"the output of `{command}`"
        if path is not None:
            _check_outside(path, self.folder, "--to")
            is_there = os.path.lexists(path)
            self.table.wrap(master_key.read_file(path) if is_there else master_key.make_file(path))
            self._remember(os.path.abspath(path))
            return path
        if (old := self.note.master_key) is None:
            what = "the master key of the store is printed by a command"
            raise MissingKeyError(f"{what}; name the command or the file of the new one")
        # A crash between the two steps leaves the new key in the draft: see `_read_master_key`.
        draft = old + DRAFT_SUFFIX
        with storage_errors(draft):
            with suppress(FileNotFoundError):
                os.unlink(draft)
            self.table.wrap(master_key.make_file(draft))
            os.rename(draft, old)
            flush_folder(os.path.dirname(old))
        return old

    def _remember(self, path: str | None) -> None:
        self.note = msgspec.structs.replace(self.note, master_key=path)
        _write_note(self.folder, self.note)


def open_keys(
    folder: str, options: StoreOptions, *, known_id: str, has_blocks: bool = False
) -> StoreKeys | None:
    """Open the keys of a store, or make them for a store that is to be encrypted from now on.

    Args:
        folder: the absolute path of the store's folder.
        options: whether the store is encrypted, and where its keys are.
        known_id: the id that the index knows; empty if it knows none.
        has_blocks: whether the folder may hold blocks; without keys they are clear.

    Returns:
        None for a store that is not encrypted.

    Raises:
        ConfigError: the options do not fit the store.
        MissingKeyError: the keys of an encrypted store are not there.
    """
    if options.master_key is not None and options.master_key_command is not None:
        what = "`disk_master_key` and `disk_master_key_command` are both set"
        raise ConfigError(f"{what}, but a store has one master key; leave one out")
    note = read_note(folder)
    if note is None:
        if known_id:
            what = f"the store at `{folder}` is encrypted, but its file `{NOTE}` is missing"
            raise MissingKeyError(f"{what}\n{LOST_HINT}")
        return _make_keys(folder, options, has_blocks) if options.encryption == "on" else None
    if options.encryption == "off":
        what = f"the store at `{folder}` is encrypted, but `disk_encryption` is off"
        raise ConfigError(f"{what}; turn it on or choose another folder")
    if known_id not in ("", note.store_id):
        what = f"`{folder}/{NOTE}` belongs to another store"
        raise MissingKeyError(f"{what}; restore the one of this store")
    return _open_keys(folder, options, note)


def try_keys(
    folder: str, options: StoreOptions, *, known_id: str, has_blocks: bool = False
) -> tuple[StoreKeys | None, str]:
    """Open keys as `open_keys` does; with `as_it_is`, a store may do without them.

    Returns the keys and, if the store is encrypted and they are not there, why.
    """
    try:
        return open_keys(folder, options, known_id=known_id, has_blocks=has_blocks), ""
    except (MissingKeyError, ConfigError) as error:
        if options.encryption != "as_it_is":
            raise
        return None, str(error)


def read_note(folder: str) -> KeyNote | None:
    """Return what a folder remembers of its keys; None if the store is not encrypted.

    Raises:
        MissingKeyError: the file is damaged.
    """
    path = os.path.join(folder, NOTE)
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=KeyNote)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MissingKeyError(f"`{path}` is damaged: {error}\n{LOST_HINT}") from error


def _make_keys(folder: str, options: StoreOptions, has_blocks: bool) -> StoreKeys:
    """Make the key table of a store, and its master key if none is given.

    If any part of it fails, no file of it stays: the next start makes other keys.
    """
    key_dir = os.path.abspath(options.key_dir or default_key_dir())
    store_id = secrets.token_bytes(STORE_ID_BYTES)
    _check_outside(key_dir, folder, "disk_key_dir")
    try:
        os.makedirs(key_dir, 0o700, exist_ok=True)
    except OSError as error:
        what = f"the folder of keys `{key_dir}` cannot be made: {error.strerror}"
        raise ConfigError(f"{what}; set `disk_key_dir`") from error
    path: str | None = None
    made = list[str]()
    if options.master_key_command is not None:
        key = master_key.ask_command(options.master_key_command)
    elif options.master_key is not None:
        path = os.path.abspath(options.master_key)
        _check_outside(path, folder, "disk_master_key")
        if not os.path.lexists(path):
            hint = "hint: make it, as with `openssl rand -hex 32`, or leave `disk_master_key` out"
            raise MissingKeyError(f"the master key `{path}` is missing\n{hint}")
        key = master_key.read_file(path)
    else:
        path = os.path.join(key_dir, f"{store_id.hex()}.master")
        key = master_key.make_file(path)
        made.append(path)
    table_path = os.path.join(key_dir, store_id.hex() + TABLE_SUFFIX)
    note = KeyNote(store_id=store_id.hex(), key_table=table_path, master_key=path)
    try:
        table = KeyTable.create(table_path, store_id, key, folder, has_blocks)
        _write_note(folder, note)
    except BaseException:
        for each in (os.path.join(folder, NOTE), table_path, *made):
            for file in (each, each + DRAFT_SUFFIX):
                with suppress(OSError):
                    os.unlink(file)
        raise
    if made:
        text = "the store at `%s` is encrypted; its master key was made at `%s`: keep a copy of it"
        logger.warning(text, folder, path)
    return StoreKeys(folder, note, table)


def _open_keys(folder: str, options: StoreOptions, note: KeyNote) -> StoreKeys:
    """Read the keys of a store; paths that are given take precedence over those remembered.

    Whoever can write to the folder can have it remember other paths, but gets no keys of their own
    used, since keys in the folder are refused.
    """
    table_path = _moved(note.key_table, options.key_dir)
    _check_outside(table_path, folder, "disk_key_dir")
    store_id = bytes.fromhex(note.store_id)
    if options.master_key_command is not None:
        path, key = None, master_key.ask_command(options.master_key_command)
        table = KeyTable.open(table_path, store_id, key)
    elif options.master_key is None and note.master_key is None:
        what = f"the master key of the store at `{folder}` is printed by a command"
        raise MissingKeyError(f"{what}; set `disk_master_key_command`")
    else:
        path = os.path.abspath(options.master_key or _moved(note.master_key or "", options.key_dir))
        _check_outside(path, folder, "disk_master_key")
        table = _open_table(table_path, store_id, path)
    is_shared = False
    if table.folder != folder:
        if not _has_original(folder, note, table):
            table.move_to(folder)
        elif options.encryption == "as_it_is":
            is_shared = True
        else:
            table_path = f"{table_path.removesuffix(TABLE_SUFFIX)}-{secrets.token_hex(4)}"
            table = table.copy_to(table_path := table_path + TABLE_SUFFIX, folder)
            logger.warning(
                "`%s` is a copy of a store and gets the key table `%s`", folder, table.path
            )
    found = KeyNote(store_id=note.store_id, key_table=table_path, master_key=path)
    if found != note and not is_shared:
        _write_note(folder, found)
    return StoreKeys(folder, found, table, is_shared=is_shared)


def _moved(path: str, key_dir: str | None) -> str:
    """Return where a file is that was remembered at `path` and may have moved to `key_dir`."""
    if key_dir is None:
        return path
    given = os.path.join(os.path.abspath(key_dir), os.path.basename(path))
    return given if os.path.lexists(given) else path


def _open_table(table_path: str, store_id: bytes, path: str) -> KeyTable:
    """Open a table with the master key in a file; finish a rotation that was cut short."""
    draft = path + DRAFT_SUFFIX
    with suppress(MissingKeyError):
        table = KeyTable.open(table_path, store_id, master_key.read_file(draft))
        with storage_errors(path):
            os.rename(draft, path)
        return table
    return KeyTable.open(table_path, store_id, master_key.read_file(path))


def _has_original(folder: str, note: KeyNote, table: KeyTable) -> bool:
    """Return whether a folder is a copy of a store that is still in its place.

    The key table belongs to the original. What expires in the copy must not take its keys.
    """
    other = None
    with suppress(StorageError):
        other = read_note(table.folder)
    is_same_store = other is not None and other.store_id == note.store_id
    return is_same_store and not os.path.samefile(folder, table.folder)


def _check_outside(path: str, folder: str, setting: str) -> None:
    """Refuse to keep keys in the folder that they protect."""
    if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        what = f"`{setting}` = `{path}` lies in the folder of the store"
        raise ConfigError(f"{what}, so a copy of the folder would hold its keys; choose another")


def _write_note(folder: str, note: KeyNote) -> None:
    path = os.path.join(folder, NOTE)
    draft = path + DRAFT_SUFFIX
    with storage_errors(path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(draft, flags, 0o600), "wb") as file:
            file.write(msgspec.json.encode(note) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(draft, path)
        flush_folder(folder)
