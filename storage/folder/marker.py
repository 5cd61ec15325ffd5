"""The marker file of a store's folder, `format.json`: its version, whose keys it has, and names.

This module knows one file. `tieredkv.storage.keys.store_keys` knows what id and stamp are compared
with.
"""

import os
from typing import Annotated

import msgspec
from msgspec import Meta

from tieredkv.errors import FormatVersionError, StorageError
from tieredkv.own_files import read_own, replace_own
from tieredkv.storage.format.record import FORMAT_VERSION, MOST_NAME_BYTES, MOST_NAMES
from tieredkv.units import printable

MARKER = "format.json"
FORMAT_NAME = "tieredkv-store"
REPLACED_VERSION = 2
"""The version of which a store is destroyed by a server's first start."""

ID_BYTES = 16
_MOST_BYTES = 64 << 10
Id = Annotated[str, Meta(pattern=f"^([0-9a-f]{{{2 * ID_BYTES}}})?$")]
_Name = Annotated[str, Meta(max_length=MOST_NAME_BYTES)]


class _Head(msgspec.Struct):
    """What every version has."""

    format: str
    version: int


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file.

    Attributes:
        id: names the key table, in hexadecimal digits; empty for a store that is not encrypted.
        stamp: changes with each server's start, and so distinguishes a copy; empty as `id` is.
        retentions: names of retention policies; a record has the place of one in this list.
    """

    format: str = FORMAT_NAME
    version: int = FORMAT_VERSION
    id: Id
    stamp: Id
    retentions: Annotated[list[_Name], Meta(max_length=MOST_NAMES)]

    @property
    def is_replaced(self) -> bool:
        """Whether the store has the version before, which only its destruction can change."""
        return self.version == REPLACED_VERSION


def new_marker() -> Marker:
    """Return the marker of a new store, which is not encrypted yet."""
    return Marker(id="", stamp="", retentions=[])


def read_marker(folder: str) -> Marker | None:
    """Read the marker of a folder; None without one.

    Of a store of the version before only `version` is told.

    Raises:
        FormatVersionError: the store has another version yet, or it may not have that one.
        StorageError: the file is damaged, of another program, or no regular file of this user.
    """
    path = os.path.join(folder, MARKER)
    try:
        text = read_own(path, _MOST_BYTES)
    except FileNotFoundError:
        return None
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"`{path}` cannot be read: {error.strerror}") from error
    try:
        head = msgspec.json.decode(text, type=_Head)
        if (head.format, head.version) == (FORMAT_NAME, FORMAT_VERSION):
            found = msgspec.json.decode(text, type=Marker)
            if bool(found.id) == bool(found.stamp):
                return found
            raise msgspec.ValidationError("it has an id without a stamp, or a stamp without an id")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        cure = "restore that file or remove the folder"
        what = f"`{path}` is damaged, so the store's version is unknown; {cure}"
        raise StorageError(f"{what}: {error}") from None  # the index is not to blame
    if head.format != FORMAT_NAME:
        what = f"`{path}` says that the folder belongs to `{printable(head.format)}`"
        raise StorageError(f"{what}; choose another folder")
    if head.version == REPLACED_VERSION:
        return Marker(version=head.version, id="", stamp="", retentions=[])
    raise FormatVersionError(
        f"the store at `{folder}` has format version {head.version}, but this tieredkv reads "
        f"{FORMAT_VERSION}; it was left untouched: use the tieredkv that wrote it, or choose "
        "another folder"
    )


def write_marker(folder: str, marker: Marker) -> None:
    """Write the marker of a folder; it is there as a whole, or the old one is.

    Raises:
        OSError: it cannot be written.
    """
    replace_own(os.path.join(folder, MARKER), msgspec.json.encode(marker) + b"\n")


def refuse_replaced(folder: str) -> FormatVersionError:
    """Return the error of what cannot be done with a store of the version before."""
    return FormatVersionError(
        f"the store at `{folder}` has format version {REPLACED_VERSION}, but this tieredkv reads "
        f"{FORMAT_VERSION}; the next start of a server destroys it with its keys and begins anew\n"
        f"hint: `tieredkv evict --all --disk-dir {folder}` destroys it now; an older tieredkv "
        "can still read it"
    )
