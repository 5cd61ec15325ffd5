"""The header of an extent: the record of its block, and how the payload was encrypted.

So a block is found without the index. This module knows the layout, which docs/format.md draws.
"""

import struct
from contextlib import suppress
from typing import NamedTuple

from tieredkv.errors import CorruptBlockError
from tieredkv.storage.format.record import (
    FORMAT_VERSION,
    NO_RETENTIONS,
    RECORD_BYTES,
    Located,
    Retentions,
    decode_record,
    encode_record,
    hash_in,
    header_bytes_for,
    identity_of,
)

MAGIC = b"TKVSLOT" + bytes([FORMAT_VERSION])
_ENCRYPTION = struct.Struct("8s12s16s")  # id of the key, nonce, tag
_RECORD_AT = len(MAGIC)
_ENCRYPTION_AT = _RECORD_AT + RECORD_BYTES


class Encryption(NamedTuple):
    """How one payload was encrypted; the header of its extent has it."""

    key_id: bytes
    nonce: bytes
    tag: bytes


def encode_header_into(
    buffer: bytearray | memoryview,
    located: Located,
    retentions: Retentions,
    how: Encryption | None = None,
) -> None:
    """Write the extent header, which begins where the buffer does, with the current record.

    Args:
        buffer: where the extent is, or its first bytes.
        located: the block.
        retentions: of the store.
        how: of an encrypted payload.
    """
    fields = b"" if how is None else _ENCRYPTION.pack(*how)
    end = header_bytes_for(located.codec)
    buffer[:end] = (MAGIC + encode_record(located, retentions) + fields).ljust(end, b"\0")


def decode_header(
    header: bytes | memoryview, retentions: Retentions = NO_RETENTIONS
) -> Located | None:
    """Unpack the header of an extent; None if it was never written, was erased or is damaged."""
    if header[:_RECORD_AT] == MAGIC:
        data = bytes(header[_RECORD_AT:_ENCRYPTION_AT])
        with suppress(CorruptBlockError):
            return decode_record(hash_in(data), data, retentions)
    return None


def decode_encryption(header: bytes | memoryview) -> Encryption:
    """Read how the payload behind a sound header was encrypted."""
    return Encryption(*_ENCRYPTION.unpack_from(header, _ENCRYPTION_AT))


def is_header_of(header: Located | None, located: Located) -> bool:
    """Return whether a header belongs to an index entry, whatever was claimed of it since."""
    if header is None or header[1:] != located[1:]:
        return False
    return identity_of(header.record, 0, 0) == identity_of(located.record, 0, 0)
