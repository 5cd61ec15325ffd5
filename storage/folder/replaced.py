"""What a server's first start does with a store of the format version before: it destroys it.

A cache of at most some days is not worth a migration. Its keys go first, then its blocks.
"""

import logging
import os
import re
from functools import partial

import msgspec

from tieredkv.storage.folder.emptying import Emptied, empty_store
from tieredkv.storage.folder.folder import StoreFolder
from tieredkv.storage.folder.marker import REPLACED_VERSION
from tieredkv.storage.folder.own_files import read_own
from tieredkv.storage.keys.destruction import destroy_replaced_tables
from tieredkv.storage.keys.place import NOTE, KeyPlace
from tieredkv.storage.options import StoreOptions
from tieredkv.units import format_bytes

logger = logging.getLogger(__name__)

_MOST_NOTE_BYTES = 64 << 10
_ID = re.compile("[0-9a-f]{32}")


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


def destroy_replaced(options: StoreOptions, folder: str) -> Emptied:
    """Destroy a store of the version before, under its lock.

    Of what the folder says of its keys only the id is used: the files of that id in the key folder
    of the settings go.

    Raises:
        ConfigError: the settings name no usable key folder.
        StorageError: a file cannot be removed; the next start goes on.
    """
    id, num_tables = _id_of(folder), 0
    if id:
        place = KeyPlace(folder, options, id)
        place.check()
        num_tables = destroy_replaced_tables(place)
    emptied = empty_store(folder)
    what = f"{emptied.num_blocks} blocks, {format_bytes(emptied.num_bytes)}"
    keys = f"with its keys in `{place.key_dir}`" if num_tables else "which had no keys here"
    text = "the store at `%s` had format version %d and was destroyed, %s: %s"
    logger.warning(text, folder, REPLACED_VERSION, keys, what)
    return emptied


def _id_of(folder: str) -> str:
    """Return the id of the keys of such a store; empty if it has none, or does not say so."""
    try:
        note = msgspec.json.decode(read_own(os.path.join(folder, NOTE), _MOST_NOTE_BYTES))
        id = note.get("store_id", "") if isinstance(note, dict) else ""
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return id if isinstance(id, str) and _ID.fullmatch(id) else ""
