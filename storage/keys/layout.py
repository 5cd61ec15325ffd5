"""The bytes of a key table: two headers and slots, as docs/encryption.md draws them.

This module knows bytes in memory and how they are encrypted. It opens no file.
"""

import hashlib
import hmac
import os
import secrets
import struct
from collections.abc import Sequence
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from xxhash import xxh3_64_digest

VERSION = 2
KEY_BYTES, FOLDER_ID_BYTES, STAMP_BYTES, KEY_ID_BYTES, SCOPE_BYTES = 32, 16, 16, 8, 36
PAGE_BYTES, SLOT_BYTES = 4096, 128
HEADERS_AT = (0, PAGE_BYTES)
SLOTS_AT = 2 * PAGE_BYTES
FREE = bytes(SLOT_BYTES)
NONCE_BYTES = 12

_MAGIC = b"TKVKEYS"
_VERSION_AT = len(_MAGIC)
_MOST_PATH_BYTES = 1536
_SEAL_BYTES = 8
_NO_KEY, _NO_CHECK = bytes(KEY_BYTES), bytes(8)
SALT_BYTES = 16
NO_SALT = bytes(SALT_BYTES)

# magic and version, folder id, stamp, the stamp before, number, checks of both master keys, both
# salts, whether the wrapping key was told
_FIELDS = struct.Struct("<8s16s16s16sQ8s8s16s16sB7x")
_LOCK = struct.Struct("<12s64s16s")  # nonce, names key and another wrapping key, tag
_LOCKS_AT = (_FIELDS.size, _FIELDS.size + _LOCK.size)
_LOCKS_END = _LOCKS_AT[1] + _LOCK.size
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
    """

    id: bytes
    key: bytes
    scope: bytes
    dies_at: float

    def __repr__(self) -> str:  # without the key, which no log may have
        return f"PayloadKey({self.id.hex()}, scope={self.scope.hex()}, dies_at={self.dies_at})"


class Head(NamedTuple):
    """What anybody can read in a header. Only those who have a master key know that it is true.

    Attributes:
        folder_id: the id of the store's folder.
        stamps: that of the last start, and the one before.
        number: of the writing of headers; the higher one of two is the newer.
        checks: what tells the master key from others, and the same of the one before while the
            table is put under another wrapping key; 8 zeroes otherwise.
        salts: of the wrapping key, and of the one before in the same way.
        is_told: whether the wrapping key stood in a header under another master key.
        folder: where the store lay at its last start; empty if that is not known.
        master_place: the path of the file of the master key; empty if a command prints it.
    """

    folder_id: bytes
    stamps: tuple[bytes, bytes]
    number: int
    checks: tuple[bytes, bytes]
    salts: tuple[bytes, bytes]
    is_told: bool
    folder: str
    master_place: str

    @property
    def is_rotating(self) -> bool:
        """Whether slots may still be encrypted under the wrapping key of before."""
        return self.checks[1] != _NO_CHECK

    def has_stamp(self, stamp: str) -> bool:
        """Return whether a stamp, in hexadecimal digits, is the last one or the one before.

        Zeroes are none: a table that was started once has them in the place of the one before.
        """
        return any(bytes.fromhex(stamp)) and bytes.fromhex(stamp) in self.stamps

    def under(self, check: bytes, salt: bytes, *, is_told: bool) -> "Head":
        """Return this head with another wrapping key, and a note of the present one."""
        checks, salts = (check, self.checks[0]), (salt, self.salts[0])
        return self._replace(checks=checks, salts=salts, is_told=is_told)

    def settled(self) -> "Head":
        """Return this head without the note of a wrapping key of before."""
        return self._replace(checks=(self.checks[0], _NO_CHECK), salts=(self.salts[0], NO_SALT))


class Secrets(NamedTuple):
    """What a header keeps under the master key.

    Attributes:
        names_key: hides the names of blocks.
        wrapping_keys: those under which the slots are encrypted: the present one, and the one of
            before while the headers note it.
    """

    names_key: bytes
    wrapping_keys: tuple[bytes, ...]

    def __repr__(self) -> str:  # without the keys, which no log may have
        return f"Secrets({len(self.wrapping_keys)} wrapping keys)"


def check_of(master_key: bytes) -> bytes:
    """Return what tells a master key from others, in whatever table."""
    return hashlib.sha256(b"tieredkv master key" + master_key).digest()[:8]


def seal(data: bytes | bytearray) -> bytes:
    """Return the checksum that ends a header and a slot; it tells damage without a master key."""
    return xxh3_64_digest(data)


def wrapping_key(master_key: bytes, folder_id: bytes, salt: bytes) -> bytes:
    """Return the key under which one table is encrypted; it tells nothing of the master key."""
    return hmac.digest(master_key, b"tieredkv key table" + folder_id + salt, "sha256")


# --- headers ------------------------------------------------------------------------------------


def is_of_another_version(page: bytes) -> bool:
    """Return whether a page that has no head of ours begins a table of another format version."""
    if len(page) <= _VERSION_AT or not page.startswith(_MAGIC) or page[_VERSION_AT] == VERSION:
        return False
    # If the page is sound but for its version, a flipped bit has made the version.
    return head_of(page[:_VERSION_AT] + bytes([VERSION]) + page[_VERSION_AT + 1 :]) is None


def version_of(start: bytes) -> int | None:
    """Return the format version of a file with these first bytes; None if it is no key table."""
    return start[_VERSION_AT] if len(start) > _VERSION_AT and start.startswith(_MAGIC) else None


def header_pages(data: bytes) -> list[bytes]:
    """Return the pages of both headers from the bytes of a table."""
    return [data[at : at + PAGE_BYTES] for at in HEADERS_AT]


def head_of(page: bytes) -> Head | None:
    """Read a header; None if it is damaged or of another format version."""
    if len(page) != PAGE_BYTES or version_of(page) != VERSION:
        return None
    if seal(page[:_PAGE_SEAL_AT]) != page[_PAGE_SEAL_AT:]:
        return None
    _, folder_id, now, before, number, *checks_and_salts, told = _FIELDS.unpack_from(page)
    check, old_check, salt, old_salt = checks_and_salts
    paths = (page[at:][:_MOST_PATH_BYTES].rstrip(b"\0") for at in _PATHS_AT)
    folder, master_place = map(os.fsdecode, paths)
    return Head(
        folder_id=folder_id,
        stamps=(now, before),
        number=number,
        checks=(check, old_check),
        salts=(salt, old_salt),
        is_told=bool(told),
        folder=folder,
        master_place=master_place,
    )


def pack_header(head: Head, kept: Secrets) -> bytes:
    """Return the page of a header, encrypted with fresh nonces.

    While the headers note a wrapping key of before, each of both opens it. If they follow from two
    master keys, each tells the other one.
    """
    page = bytearray(PAGE_BYTES)
    magic = _MAGIC + bytes([VERSION])
    fields = (head.folder_id, *head.stamps, head.number, *head.checks, *head.salts, head.is_told)
    _FIELDS.pack_into(page, 0, magic, *fields)
    for at, path in zip(_PATHS_AT, (head.folder, head.master_place), strict=True):
        data = os.fsencode(path)
        if len(data) <= _MOST_PATH_BYTES:  # a longer one is not remembered
            page[at : at + len(data)] = data
    tells = head.is_rotating and head.checks[0] != head.checks[1]
    others = tuple(reversed(kept.wrapping_keys)) if tells else (_NO_KEY, _NO_KEY)
    for at, own, other in zip(_LOCKS_AT, kept.wrapping_keys, others, strict=False):
        nonce = secrets.token_bytes(NONCE_BYTES)
        sealed = AESGCM(own).encrypt(nonce, kept.names_key + other, _known_of(page))
        _LOCK.pack_into(page, at, nonce, sealed[:64], sealed[64:])
    page[_PAGE_SEAL_AT:] = seal(page[:_PAGE_SEAL_AT])
    return bytes(page)


def open_header(page: bytes, head: Head, master_key: bytes) -> Secrets | None:
    """Decrypt what a header keeps; None if this master key does not open it."""
    which = head.checks.index(check_of(master_key))
    own = wrapping_key(master_key, head.folder_id, head.salts[which])
    nonce, sealed, tag = _LOCK.unpack_from(page, _LOCKS_AT[which])
    try:
        plain = AESGCM(own).decrypt(nonce, sealed + tag, _known_of(page))
    except InvalidTag:
        return None
    names_key, other = plain[:KEY_BYTES], plain[KEY_BYTES:]
    if not head.is_rotating:
        return Secrets(names_key, (own,))
    if head.checks[0] == head.checks[1]:
        other = wrapping_key(master_key, head.folder_id, head.salts[1])
    return Secrets(names_key, (own, other) if which == 0 else (other, own))


def _known_of(page: bytes | bytearray) -> bytes:
    """What a header is authenticated with: all of it but its two locks and its seal."""
    return bytes(page[: _LOCKS_AT[0]] + page[_LOCKS_END:_PAGE_SEAL_AT])


# --- slots --------------------------------------------------------------------------------------


def pack_slot(key: PayloadKey, number: int, folder_id: bytes, cipher: AESGCM) -> bytes:
    """Return the bytes of a slot, encrypted with a fresh nonce."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    place = _PLACE.pack(folder_id, number, key.id, key.scope, key.dies_at)
    sealed = cipher.encrypt(nonce, key.key, place)
    fields = (key.id, key.scope, key.dies_at, nonce, sealed[:KEY_BYTES], sealed[KEY_BYTES:])
    slot = _SLOT.pack(*fields).ljust(_SLOT_SEAL_AT, b"\0")
    return slot + seal(slot)


def unpack_slot(
    slot: bytes, number: int, folder_id: bytes, ciphers: Sequence[AESGCM]
) -> PayloadKey | None:
    """Decrypt a slot that is not free; None if it is damaged or was written elsewhere.

    Args:
        slot: its bytes.
        number: its place in the table.
        folder_id: of the table.
        ciphers: those under which it may have been encrypted.
    """
    if death_of(slot) is None:
        return None
    key_id, scope, dies_at, nonce, sealed, tag = _SLOT.unpack_from(slot)
    place = _PLACE.pack(folder_id, number, key_id, scope, dies_at)
    for cipher in ciphers:
        try:
            return PayloadKey(key_id, cipher.decrypt(nonce, sealed + tag, place), scope, dies_at)
        except InvalidTag:
            continue
    return None


def death_of(slot: bytes) -> float | None:
    """Read the second of death of a slot, which needs no key; None if its seal is wrong."""
    if seal(slot[:_SLOT_SEAL_AT]) != slot[_SLOT_SEAL_AT:]:
        return None
    dies_at: float = _SLOT.unpack_from(slot)[2]
    return dies_at
