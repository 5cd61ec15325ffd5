"""Where the files of one store's keys are: in the folder of keys, named by the id of the store.

A setting or this user's home names the folder of keys, and a setting may name a master key. No path
that the folder of the store names is ever opened.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tieredkv.environment import default_key_dir
from tieredkv.errors import ConfigError, MissingKeyError
from tieredkv.own_files import replace_own
from tieredkv.storage.keys import layout, master, trust
from tieredkv.storage.keys.layout import Head
from tieredkv.storage.keys.master import MASTER_SUFFIX
from tieredkv.storage.keys.table import KeyTable
from tieredkv.storage.keys.table_file import TABLE_SUFFIX, WHAT, look_at
from tieredkv.storage.options import StoreOptions

NOTE = "encryption.json"
"""A file in the folder of an encrypted store that tells people where its keys are."""


@dataclass(frozen=True)
class KeyPlace:
    """Where the files of one store's keys are.

    Args:
        folder: the store's folder.
        options: the settings that name other places.
        id: of the store, in hexadecimal digits.
    """

    folder: str
    options: StoreOptions
    id: str

    @property
    def key_dir(self) -> str:
        """The folder of keys.

        Raises:
            ConfigError: there is none.
        """
        return os.path.abspath(self.options.key_dir or default_key_dir())

    @property
    def table(self) -> str:
        """The path of the key table."""
        return os.path.join(self.key_dir, self.id + TABLE_SUFFIX)

    @property
    def own_master(self) -> str:
        """The path of the master key that the first start makes."""
        return os.path.join(self.key_dir, self.id + MASTER_SUFFIX)

    @property
    def master(self) -> str | None:
        """The path of the master key; None if a command prints it."""
        if self.options.master_key_command is not None:
            return None
        return os.path.abspath(self.options.master_key or self.own_master)

    @property
    def makes_master(self) -> bool:
        """Whether the first start makes the master key, since no setting names one."""
        return self.options.master_key is None and self.options.master_key_command is None

    def check(self) -> None:
        """Refuse settings that contradict each other, and keys in the folder that they protect.

        Raises:
            ConfigError: names the setting.
        """
        if self.options.master_key is not None and self.options.master_key_command is not None:
            what = "`disk_master_key` and `disk_master_key_command` are both set"
            raise ConfigError(f"{what}, but a store has one master key; leave one out")
        check_outside(self.key_dir, self.folder, "disk_key_dir")
        if self.options.master_key is not None:
            check_outside(self.options.master_key, self.folder, "disk_master_key")

    def read_master(self) -> bytes:
        """Return the master key.

        Raises:
            MissingKeyError: it is not there, or is none.
        """
        if self.options.master_key_command is not None:
            return master.ask_command(self.options.master_key_command)
        assert self.master is not None, "no command prints it"
        return master.read_file(self.master)

    def heads(self) -> list[Head]:
        """Return the sound headers of the key table, for which nobody vouches, the newest first.

        Raises:
            MissingKeyError: the table is absent, not to be believed or of another format version.
        """
        data = look_at(self.table)
        if layout.is_of_another_version(layout.header_pages(data)[0]):
            what = f"{WHAT} `{self.table}` has another format version"
            raise MissingKeyError(what, reason="version")
        return layout.heads_of(data)

    def look(self) -> KeyTable:
        """Read the key table, and change nothing.

        Raises:
            ConfigError, MissingKeyError, DamagedTableError
        """
        self.check()
        return KeyTable.look(self.table, bytes.fromhex(self.id), self.read_master())


def check_writable(key_dir: str) -> None:
    """Refuse a folder of keys that cannot be made or written to; nothing is made or changed.

    Raises:
        ConfigError: names `disk_key_dir`.
        MissingKeyError: others can write to it.
    """
    above = key_dir
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        what = f"the folder of keys `{key_dir}` cannot be made: `{above}` is no folder"
        raise ConfigError(f"{what}; set `disk_key_dir`")
    if not os.access(above, os.W_OK | os.X_OK):
        what = f"the folder of keys `{key_dir}` cannot be written to"
        raise ConfigError(f"{what}; set `disk_key_dir` to a folder that can")
    if above == key_dir:
        trust.check_folder(key_dir)


def check_outside(path: str, folder: str, setting: str) -> None:
    """Refuse to keep keys in the folder that they protect."""
    if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        what = f"`{setting}` = `{path}` lies in the folder of the store"
        raise ConfigError(f"{what}, so a copy of the folder would hold its keys; choose another")


def write_note(folder: str, table: str, master: str | None) -> None:
    """Tell people, in the store's folder, where its keys are; nothing reads it.

    Args:
        folder: the store's folder.
        table: the path of the key table.
        master: the path of the master key; None if a command prints it.

    Raises:
        OSError: the file cannot be written.
    """
    note = {"key_table": table, "master_key": master}
    replace_own(os.path.join(folder, NOTE), msgspec.json.encode(note) + b"\n")
