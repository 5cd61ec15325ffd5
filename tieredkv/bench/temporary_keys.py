"""The place and the keys of a store that a bench makes and removes."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tieredkv.bench.processes import noting_interruptions
from tieredkv.errors import ConfigError, StorageError
from tieredkv.storage.folder.folder import make_missing
from tieredkv.storage.keys import master

_REMOVAL_S = 10.0


def make_place(folder: str | None) -> None:
    """Make the folder in which a bench makes its store, as a server makes it; None names none.

    Raises:
        ConfigError: it is not there and cannot be made.
    """
    try:
        make_missing(folder)
    except StorageError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def temporary_folder(parent: str | os.PathLike[str] | None) -> Iterator[str]:
    """Make a folder in `parent`, or in the system's temporary folder, and remove it at the end.

    No interruption cuts the removal short. A store's worker whose engine was killed may add files
    until it ends, which is soon; they are removed as well.

    Raises:
        KeyboardInterrupt: the removal was interrupted; the folder is gone nevertheless.
    """
    folder = tempfile.mkdtemp(prefix="tieredkv-bench-", dir=parent)
    try:
        yield folder
    finally:
        with noting_interruptions() as noted:
            give_up_at = time.monotonic() + _REMOVAL_S
            while os.path.exists(folder) and time.monotonic() < give_up_at:
                shutil.rmtree(folder, ignore_errors=True)
        if noted.is_set():
            raise KeyboardInterrupt


def temporary_keys(key_dir: str) -> dict[str, str]:
    """Make a folder of keys with a master key in it; return the settings that name them.

    A store that makes its own asks people to keep a copy of it.
    """
    os.makedirs(key_dir, 0o700)
    path = os.path.join(key_dir, "master")
    master.make_file(path)
    return {"disk_key_dir": key_dir, "disk_master_key": path}
