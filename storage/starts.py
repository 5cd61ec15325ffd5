"""What is done with a store before it is opened, or instead: without its index.

A look before a start refuses what the start would refuse, before memory is taken and a model is
loaded, and changes nothing. A start then claims the folder; for a server's, a store of the format
version before gives way, since a cache of at most some days is not worth a migration. `adopt` and
`empty` are for stores that a start refuses.
"""

import logging
import os
import re
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec

from tieredkv.errors import ConfigError, MissingKeyError, StorageError
from tieredkv.own_files import read_own
from tieredkv.storage.folder.folder import Emptied, StoreFolder, check_folder, has_segments
from tieredkv.storage.folder.lock import check_unused
from tieredkv.storage.folder.marker import REPLACED_VERSION
from tieredkv.storage.index.verdicts import storage_errors
from tieredkv.storage.keys.destruction import destroy_own_table, destroy_replaced_tables
from tieredkv.storage.keys.place import NOTE, KeyPlace
from tieredkv.storage.keys.rotation import open_table
from tieredkv.storage.keys.store_keys import plan, write_stamp
from tieredkv.storage.options import StoreOptions
from tieredkv.units import format_bytes

logger = logging.getLogger(__name__)

_MOST_NOTE_BYTES = 64 << 10
_ID = re.compile("[0-9a-f]{32}")


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
    key_dir = KeyPlace(path, options, "").key_dir if options.encryption == "on" else ""
    if key_dir and is_on_one_volume(path, key_dir):
        text = "the keys in `%s` lie on the same volume as `%s`: encryption protects copies of that"
        text += " folder, not against those who can read or write the whole volume"
        logger.info(text, key_dir, path)


def is_on_one_volume(folder: str, key_dir: str) -> bool:
    """Return whether a store and its keys lie, or will lie, on one filesystem."""
    return _device_of(folder) == _device_of(key_dir)


def _device_of(path: str) -> int:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return os.stat(path).st_dev


def claim_folder(options: StoreOptions) -> StoreFolder:
    """Claim the folder of a store; for a server, a store of the version before gives way.

    Raises:
        ConfigError, StorageError: as `StoreFolder.claim` and `destroy_replaced`.
    """
    is_server = options.encryption != "as_it_is"
    return StoreFolder.claim(
        options.path,
        create=options.create,
        is_flushed=options.sync == "commit",
        retentions=options.disk_retentions,
        destroy_replaced=partial(destroy_replaced, options) if is_server else None,
    )


def destroy_replaced(options: StoreOptions, folder: StoreFolder) -> Emptied:
    """Destroy a store of the version before, its keys first.

    Of what the folder says of its keys only the id is used: the files of that id in the key folder
    of the settings go.

    Raises:
        ConfigError: the settings name no usable key folder.
        StorageError: a file cannot be removed; the next start goes on.
    """
    keys = "which had no keys here"
    if id := _replaced_id(folder.path):
        place = KeyPlace(folder.path, options, id)
        place.check()
        if destroy_replaced_tables(place):
            keys = f"with its keys in `{place.key_dir}`"
    emptied = folder.empty()
    what = f"{emptied.num_blocks} blocks, {format_bytes(emptied.num_bytes)}"
    text = "the store at `%s` had format version %d and was destroyed, %s: %s"
    logger.warning(text, folder.path, REPLACED_VERSION, keys, what)
    return emptied


def _replaced_id(path: str) -> str:
    """Return the id of the keys of such a store; empty if it has none, or does not say so."""
    try:
        note = msgspec.json.decode(read_own(os.path.join(path, NOTE), _MOST_NOTE_BYTES))
        id = note.get("store_id", "") if isinstance(note, dict) else ""
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return id if isinstance(id, str) and _ID.fullmatch(id) else ""


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

    def destroy(folder: StoreFolder) -> None:
        emptied.append(destroy_replaced(options, folder))

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
            emptied.append(folder.empty())
            if "keys_error" not in keys:  # otherwise the next call still knows whose keys these are
                folder.mark(id="", stamp="")
    num_blocks = sum(each.num_blocks for each in emptied)
    num_bytes = sum(each.num_bytes for each in emptied)
    sums = {"evicted_blocks": num_blocks, "freed_bytes": num_bytes}
    return {**sums, "unknown_ids": [], "disk": {**sums, **keys}}
