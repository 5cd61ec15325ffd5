"""The place and the keys of a store that a bench makes and removes."""

import os

from tieredkv.errors import ConfigError, StorageError
from tieredkv.storage.folder.folder import make_missing
from tieredkv.storage.keys import master


def make_place(folder: str | None) -> None:
    """Make the folder in which a bench makes its store, as a server makes it; None names none.

    Raises:
        ConfigError: it is not there and cannot be made.
    """
    try:
        make_missing(folder)
    except StorageError as error:
        raise ConfigError(str(error)) from error


def temporary_keys(key_dir: str) -> dict[str, str]:
    """Make a folder of keys with a master key in it; return the settings that name them.

    A store that makes its own asks people to keep a copy of it.
    """
    os.makedirs(key_dir, 0o700)
    path = os.path.join(key_dir, "master")
    master.make_file(path)
    return {"disk_key_dir": key_dir, "disk_master_key": path}
