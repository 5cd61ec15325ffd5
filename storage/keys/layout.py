"""The bytes of a key table: two headers and slots, as docs/encryption.md draws them.

This module knows bytes in memory and how they are encrypted. It opens no file.
"""

import hashlib
import hmac
import os
import secrets
import struct
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from xxhash import xxh3_64_digest

VERSION = 2
KEY_BYTES, KEY_ID_BYTES, NONCE_BYTES = 32, 8, 12
PAGE_BYTES, SLOT_BYTES = 4096, 128
HEADERS_AT = (0, PAGE_BYTES)
SLOTS_AT = 2 * PAGE_BYTES
SLOTS_A_PAGE = PAGE_BYTES // SLOT_BYTES
FREE = bytes(SLOT_BYTES)

_MAGIC = b"TKVKEYS"
_VERSION_AT = len(_MAGIC)
_SEAL_BYTES = 8

# magic and version, folder id, stamp, the stamp before, number, parent, lock, lock of a new key
_FIELDS = struct.Struct("<8s16s16s16sQ32s68s68s")
_LOCK = struct.Struct("<8s12s32s16s")  # check of a master key, nonce, wrapping key, tag
_NO_LOCK = bytes(_LOCK.size)
_NAMES_KEY = struct.Struct("<12s32s16s")  # nonce, names key, tag
_NAMES_KEY_AT = _FIELDS.size
_NAMES_KEY_END = _NAMES_KEY_AT + _NAMES_KEY.size
_MOST_PATH_BYTES = 1536
_PATHS_AT = (512, 512 + _MOST_PATH_BYTES)
_PAGE_SEAL_AT = PAGE_BYTES - _SEAL_BYTES

# key id, scope, second of death, nonce, payload key, tag; then room, and the seal
_SLOT = struct.Struct("<8s36sd12s32s16s")
_SLOT_SEAL_AT = SLOT_BYTES - _SEAL_BYTES
_PLACE = struct.Struct("<16sQ8s36sd")  # what a slot is authenticated with


class PayloadKey(NamedTuple):
    """The key of the payloads of one scope.

    Attributes:
        id: 8 bytes, by which the header of an extent names the key.
        key: 32 bytes, for AES-256-GCM.
        scope: 36 bytes: a namespace and an hour of computing.
        dies_at: seconds since the epoch; from then on no block may be read with this key,
            whatever the index says.
        slot: the number of its place in the key table.
    """

    id: bytes
    key: bytes
    scope: bytes
    dies_at: float
    slot: int = 0

    def __repr__(self) -> str:  # without the key, which no log may have
        return f"PayloadKey({self.id.hex()}, scope={self.scope.hex()}, dies_at={self.dies_at})"


class Head(NamedTuple):
    """What anybody can read in a header. Only those who have a master key know that it is true.

    Attributes:
        folder_id: the id of the store's folder.
        stamps: that of the last start, and the one before.
        number: of the writing of headers; the higher one of two is the newer.
        parent: which folder held the store's at its last start (`tieredkv.storage.keys.gone`).
        locks: the wrapping key under the master key; while that is replaced, also under the new.
        folder: where the store lay at its last start; empty if that is not known.
        master_place: the path of the file of the master key, of the new one while it is replaced;
            empty if a command prints it.
    """

    folder_id: bytes
    stamps: tuple[bytes, bytes]
    number: int
    parent: bytes
    locks: tuple[bytes, ...]
    folder: str
    master_place: str

    @property
    def checks(self) -> tuple[bytes, ...]:
        """What tells the master keys of the locks from others (`check_of`)."""
        return tuple(each[:8] for each in self.locks)

    @property
    def is_rotating(self) -> bool:
        """Whether a new master key opens the table, too, which is to be the only one."""
        return len(self.locks) > 1

    def has_stamp(self, stamp: str) -> bool:
        """Return whether a stamp, in hexadecimal digits, is the last one or the one before.

        Zeroes are none: a table that was started once has them in the place of the one before.
        """
        return any(bytes.fromhex(stamp)) and bytes.fromhex(stamp) in self.stamps


class Secrets(NamedTuple):
    """What a header keeps under a master key.

    Attributes:
        names_key: hides the names of blocks.
        wrapping_key: encrypts the names key and the slots.
        lock: the wrapping key under this master key.
    """

    names_key: bytes
    wrapping_key: bytes
    lock: bytes

    def __repr__(self) -> str:  # without the keys, which no log may have
        return "Secrets()"


def check_of(master_key: bytes) -> bytes:
    """Return what tells a master key from others, in whatever table."""
    return hashlib.sha256(b"tieredkv master key" + master_key).digest()[:8]


def seal(data: bytes | bytearray) -> bytes:
    """Return the checksum that ends a header and a slot; it tells damage without a master key."""
    return xxh3_64_digest(data)


# --- headers ------------------------------------------------------------------------------------


def lock(wrapping_key: bytes, master_key: bytes, folder_id: bytes) -> bytes:
    """Encrypt the wrapping key of a table, so that a master key opens the table."""
    check, nonce = check_of(master_key), secrets.token_bytes(NONCE_BYTES)
    cipher = _cipher_of_locks(master_key, folder_id)
    return check + nonce + cipher.encrypt(nonce, wrapping_key, folder_id + check)


def _unlock(lock: bytes, master_key: bytes, folder_id: bytes) -> bytes:
    check, nonce, sealed, tag = _LOCK.unpack(lock)
    return _cipher_of_locks(master_key, folder_id).decrypt(nonce, sealed + tag, folder_id + check)


def _cipher_of_locks(master_key: bytes, folder_id: bytes) -> AESGCM:
    return AESGCM(hmac.digest(master_key, b"tieredkv key table" + folder_id, "sha256"))


def version_of(start: bytes) -> int | None:
    """Return the format version of a file with these first bytes; None if it is no key table."""
    return start[_VERSION_AT] if len(start) > _VERSION_AT and start.startswith(_MAGIC) else None


def is_of_another_version(page: bytes) -> bool:
    """Return whether a page that has no head of ours begins a table of another format version."""
    if version_of(page) in (None, VERSION):
        return False
    # If the page is sound but for its version, a flipped bit has made the version.
    return head_of(page[:_VERSION_AT] + bytes([VERSION]) + page[_VERSION_AT + 1 :]) is None


def header_pages(data: bytes) -> list[bytes]:
    """Return the pages of both headers from the bytes of a table."""
    return [data[at : at + PAGE_BYTES] for at in HEADERS_AT]


def heads_of(data: bytes) -> list[Head]:
    """Read the sound headers of a table, the newest one first."""
    heads = [head for head in map(head_of, header_pages(data)) if head is not None]
    return sorted(heads, key=lambda head: -head.number)


def head_of(page: bytes) -> Head | None:
    """Read a header; None if it is damaged or of another format version."""
    if len(page) != PAGE_BYTES or version_of(page) != VERSION:
        return None
    if seal(page[:_PAGE_SEAL_AT]) != page[_PAGE_SEAL_AT:]:
        return None
    _, folder_id, now, before, number, parent, own, new = _FIELDS.unpack_from(page)
    locks = (own,) if new == _NO_LOCK else (own, new)
    paths = (page[at:][:_MOST_PATH_BYTES].rstrip(b"\0") for at in _PATHS_AT)
    return Head(folder_id, (now, before), number, parent, locks, *map(os.fsdecode, paths))


def pack_table(
    head: Head, names_key: bytes, master_key: bytes, keys: Iterable[PayloadKey], num_slots: int
) -> bytes:
    """Return the bytes of a whole table under a fresh wrapping key, which one master key opens.

    Args:
        head: of the table, whose locks do not matter.
        names_key: 32 bytes.
        master_key: 32 bytes.
        keys: of the slots that are not free.
        num_slots: of the table.
    """
    wrapping_key = secrets.token_bytes(KEY_BYTES)
    own_lock = lock(wrapping_key, master_key, head.folder_id)
    kept = Secrets(names_key, wrapping_key, own_lock)
    header, cipher = pack_header(head._replace(locks=(own_lock,)), kept), AESGCM(wrapping_key)
    slots = [FREE] * num_slots
    for key in keys:
        slots[key.slot] = pack_slot(key, head.folder_id, cipher)
    return header * len(HEADERS_AT) + b"".join(slots)


def pack_header(head: Head, kept: Secrets) -> bytes:
    """Return the page of a header, encrypted with a fresh nonce."""
    page = bytearray(PAGE_BYTES)
    locks = (*head.locks, _NO_LOCK)[:2]
    start = (_MAGIC + bytes([VERSION]), head.folder_id, *head.stamps, head.number, head.parent)
    _FIELDS.pack_into(page, 0, *start, *locks)
    for at, path in zip(_PATHS_AT, (head.folder, head.master_place), strict=True):
        data = os.fsencode(path)
        if len(data) <= _MOST_PATH_BYTES:  # a longer one is not remembered
            page[at : at + len(data)] = data
    nonce = secrets.token_bytes(NONCE_BYTES)
    sealed = AESGCM(kept.wrapping_key).encrypt(nonce, kept.names_key, _facts_of(page))
    page[_NAMES_KEY_AT:_NAMES_KEY_END] = nonce + sealed
    page[_PAGE_SEAL_AT:] = seal(page[:_PAGE_SEAL_AT])
    return bytes(page)


def open_header(page: bytes, head: Head, master_key: bytes) -> Secrets | None:
    """Decrypt what a header keeps; None if no lock of it opens with this master key."""
    nonce, sealed, tag = _NAMES_KEY.unpack_from(page, _NAMES_KEY_AT)
    for each in head.locks:
        with suppress(InvalidTag):
            wrapping_key = _unlock(each, master_key, head.folder_id)
            names_key = AESGCM(wrapping_key).decrypt(nonce, sealed + tag, _facts_of(page))
            return Secrets(names_key, wrapping_key, each)
    return None


def _facts_of(page: bytes | bytearray) -> bytes:
    """What a header is authenticated with: all of it but the names key and its seal."""
    return bytes(page[:_NAMES_KEY_AT] + page[_NAMES_KEY_END:_PAGE_SEAL_AT])


# --- slots --------------------------------------------------------------------------------------


def place_of(number: int) -> int:
    """Return where a slot begins in the file."""
    return SLOTS_AT + number * SLOT_BYTES


def pack_slot(key: PayloadKey, folder_id: bytes, cipher: AESGCM) -> bytes:
    """Return the bytes of a slot, encrypted with a fresh nonce."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    place = _PLACE.pack(folder_id, key.slot, key.id, key.scope, key.dies_at)
    sealed = cipher.encrypt(nonce, key.key, place)
    fields = (key.id, key.scope, key.dies_at, nonce, sealed[:KEY_BYTES], sealed[KEY_BYTES:])
    slot = _SLOT.pack(*fields).ljust(_SLOT_SEAL_AT, b"\0")
    return slot + seal(slot)


def unpack_slot(slot: bytes, number: int, folder_id: bytes, cipher: AESGCM) -> PayloadKey | None:
    """Decrypt a slot that is not free; None if it is damaged or was written elsewhere.

    Args:
        slot: its bytes.
        number: its place in the table.
        folder_id: of the table.
        cipher: of the table's wrapping key.
    """
    if death_of(slot) is None:
        return None
    key_id, scope, dies_at, nonce, sealed, tag = _SLOT.unpack_from(slot)
    place = _PLACE.pack(folder_id, number, key_id, scope, dies_at)
    try:
        key = cipher.decrypt(nonce, sealed + tag, place)
    except InvalidTag:
        return None
    return PayloadKey(key_id, key, scope, dies_at, number)


def death_of(slot: bytes) -> float | None:
    """Read the second of death of a slot, which needs no key; None if its seal is wrong."""
    if seal(slot[:_SLOT_SEAL_AT]) != slot[_SLOT_SEAL_AT:]:
        return None
    dies_at: float = _SLOT.unpack_from(slot)[2]
    return dies_at
