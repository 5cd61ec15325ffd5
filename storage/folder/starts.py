"""What is done with a store that no worker serves: a look before a start, and two ways out.

The look refuses what a start would refuse, before memory is taken and a model is loaded, and
changes nothing. `adopt` and `empty` are for stores that a start refuses. None of them opens the
index.
"""

import logging
import os
from contextlib import ExitStack
from typing import Any

from tieredkv.errors import ConfigError, MissingKeyError, StorageError
from tieredkv.storage.folder.emptying import Emptied, empty_store
from tieredkv.storage.folder.folder import StoreFolder, check_folder, check_unused, has_segments
from tieredkv.storage.folder.replaced import destroy_replaced
from tieredkv.storage.index.verdicts import storage_errors
from tieredkv.storage.keys.destruction import destroy_own_table
from tieredkv.storage.keys.place import KeyPlace
from tieredkv.storage.keys.rotation import open_table
from tieredkv.storage.keys.store_keys import plan, write_stamp
from tieredkv.storage.options import StoreOptions

logger = logging.getLogger(__name__)


def check_start(options: StoreOptions, *, patience_s: float) -> None:
    """Refuse a store that the start of a server with these options would refuse.

    Nothing is made or changed. The start looks again.

    Args:
        options: of the start.
        patience_s: for so long another writer is given time to go.

    Raises:
        StoreBusyError: another process writes to the store, and does not go.
        ConfigError: setting and store disagree, or the keys cannot be where the settings say.
        MissingKeyError: the keys are not there, or the folder is a copy.
        StorageError: the folder is not safe, or its format has another version.
    """
    path = os.path.abspath(options.path)
    check_unused(path, patience_s=patience_s)
    marker = check_folder(path, create=options.create)
    is_kept = marker is not None and not marker.is_replaced
    plan(path, marker, options, has_blocks=is_kept and has_segments(path))
    if options.encryption == "on":
        _tell_of_one_volume(path, KeyPlace(path, options, "").key_dir)


def is_on_one_volume(folder: str, key_dir: str) -> bool:
    """Return whether a store and its keys lie, or will lie, on one filesystem."""
    return _device_of(folder) == _device_of(key_dir)


def _device_of(path: str) -> int:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return os.stat(path).st_dev


def _tell_of_one_volume(folder: str, key_dir: str) -> None:
    if is_on_one_volume(folder, key_dir):
        text = (
            "the keys in `%s` lie on the same volume as `%s`: encryption protects copies of that "
        )
        text += "folder, not against those who can read or write the whole volume"
        logger.info(text, key_dir, folder)


def adopt(options: StoreOptions) -> bool:
    """Have the keys of a store belong to this copy of its folder, and no longer to any other.

    Returns whether that was needed.

    Raises:
        ConfigError: the store is not encrypted.
        MissingKeyError: its keys are not there.
        StoreBusyError: a server uses the folder or the keys.
        StorageError: the folder holds no store of this version, or cannot be written.
    """
    folder = StoreFolder.claim(options.path, create=False)
    try:
        if not folder.marker.id:
            what = f"the store at `{folder.path}` is not encrypted, so it has no keys to adopt"
            raise ConfigError(what)
        table = open_table(KeyPlace(folder.path, options, folder.marker.id))
        try:
            is_needed = not table.head.has_stamp(folder.marker.stamp)
            write_stamp(folder, table)
        finally:
            table.close()
    finally:
        folder.release()
    return is_needed


def why_refused(options: StoreOptions) -> str:
    """Return why a server's start would refuse a store; empty if it would not, with some setting.

    A store of the version before counts, since nothing else can be done with it than to destroy it.

    Raises:
        StoreBusyError, NoStoreError, StorageError: the folder is in use, no store or not safe.
    """
    path = os.path.abspath(options.path)
    marker = check_folder(path, create=False)
    if marker is None or not (marker.is_replaced or marker.id):
        return ""
    if marker.is_replaced:
        return "it has the format version before"
    try:
        place = KeyPlace(path, options, marker.id)
        if place.look().head.has_stamp(marker.stamp):
            return ""
    except (MissingKeyError, ConfigError) as error:
        return str(error)
    return "it is a copy or an old backup of another folder"


def empty(options: StoreOptions) -> dict[str, Any]:
    """Destroy all blocks of a store that a start refuses, and its keys; this needs no keys.

    The keys of a store of which this folder is a copy stay.

    Returns:
        what `evict` answers.

    Raises:
        StoreBusyError: a process uses the folder or the keys.
        StorageError: a file cannot be removed; the next call goes on.
    """
    emptied = list[Emptied]()

    def destroy(path: str) -> None:
        emptied.append(destroy_replaced(options, path))

    keys: dict[str, Any] = {"erased_keys": [], "kept_keys": [], "kept_why": ""}
    with storage_errors(options.path), ExitStack() as undo:
        folder = StoreFolder.claim(options.path, create=False, destroy_replaced=destroy)
        undo.callback(folder.release)
        if folder.marker.id:
            place = KeyPlace(folder.path, options, folder.marker.id)
            try:
                keys["kept_why"] = destroy_own_table(place, folder.marker)
            except StorageError as error:
                keys["keys_error"] = str(error)
            emptied.append(empty_store(folder.path))
            folder.begin_anew()
            if "keys_error" not in keys:  # otherwise the next call still knows whose keys these are
                folder.mark(id="", stamp="")
    num_blocks = sum(each.num_blocks for each in emptied)
    num_bytes = sum(each.num_bytes for each in emptied)
    sums = {"evicted_blocks": num_blocks, "freed_bytes": num_bytes}
    return {**sums, "unknown_ids": [], "disk": {**sums, **keys}}
