"""The key table of a store: the keys of its payloads and of its block names, in one file.

Each payload key belongs to a scope: a namespace and an hour of computing. The table is encrypted
under a key of its own, which is wrapped by the master key. New keys are appended. When keys leave,
the whole table is written anew under a fresh table key and takes the place of the old file, which
is overwritten. docs/encryption.md draws the bytes.

This module knows one file and its keys; it knows no store.
"""

import hashlib
import logging
import os
import secrets
import struct
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tieredkv.errors import MissingKeyError
from tieredkv.storage.filesystem import flush_folder
from tieredkv.storage.limits import described
from tieredkv.storage.master_key import KEY_BYTES, LOST_HINT
from tieredkv.storage.verdicts import storage_errors

logger = logging.getLogger(__name__)

STORE_ID_BYTES, KEY_ID_BYTES, NONCE_BYTES, TAG_BYTES = 16, 8, 12, 16
DRAFT_SUFFIX = ".new"
_MAGIC = b"TKVKEYS" + bytes([1])
# magic, store, what tells one master key from another, nonce and wrapped key of the table
_HEADER = struct.Struct(f"<8s{STORE_ID_BYTES}s8s{NONCE_BYTES}s{KEY_BYTES + TAG_BYTES}s")
_LENGTH = struct.Struct("<I")  # of the frame that follows: a nonce and an encrypted `_Frame`


class PayloadKey(NamedTuple):
    """The key of the payloads of one scope."""

    id: bytes
    key: bytes
    scope: bytes


class _Frame(msgspec.Struct):
    """What one frame holds; only the first one has more than keys."""

    keys: list[PayloadKey]
    folder: str = ""
    names_key: bytes = b""
    has_clear: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Frame).decode


class KeyTable:
    """The keys of one store, as its file has them.

    One thread makes every change; any thread may look keys up. A change is on the device before it
    is visible here.

    Attributes:
        path: the file.
        store_id: of the store; 16 random bytes.
        folder: where the store lay when the table was last written in whole.
        names_key: the key of the block names in the index.
        has_clear: whether the store may hold blocks from before it was encrypted.
    """

    def __init__(
        self,
        path: str,
        store_id: bytes,
        master_key: bytes,
        folder: str = "",
        names_key: bytes = b"",
        has_clear: bool = False,
    ) -> None:
        self.path, self.store_id, self.folder = path, store_id, folder
        self.names_key, self.has_clear = names_key, has_clear
        self._master_key = master_key
        self._table_key = b""
        self._num_frames = self._size = 0
        self._by_scope: dict[bytes, PayloadKey] = {}
        self._by_id: dict[bytes, PayloadKey] = {}

    # --- files --------------------------------------------------------------------------------

    @classmethod
    def create(
        cls, path: str, store_id: bytes, master_key: bytes, folder: str, has_clear: bool = False
    ) -> "KeyTable":
        """Make a table without payload keys.

        Raises:
            StorageError: the file cannot be written.
        """
        names_key = secrets.token_bytes(KEY_BYTES)
        table = cls(path, store_id, master_key, folder, names_key, has_clear)
        table._write_whole([])
        return table

    @classmethod
    def open(cls, path: str, store_id: bytes, master_key: bytes) -> "KeyTable":
        """Read a table.

        Raises:
            MissingKeyError: it is missing or damaged, belongs to another store, or the master key
                is not the one that it was written with.
        """
        what = f"the key table `{path}`"
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            raise MissingKeyError(f"{what} is missing\n{LOST_HINT}") from None
        except OSError as error:
            raise MissingKeyError(f"{what} cannot be read: {described(error)}") from error
        if len(data) < _HEADER.size or not data.startswith(_MAGIC):
            raise MissingKeyError(f"{what} is damaged or no key table\n{LOST_HINT}")
        _, owner, check, nonce, wrapped = _HEADER.unpack_from(data)
        if owner != store_id:
            raise MissingKeyError(f"{what} belongs to another store")
        if check != _check_of(master_key):
            text = f"the master key is not the one that {what} was written with"
            raise MissingKeyError(f"{text}\n{LOST_HINT}")
        table = cls(path, store_id, master_key)
        try:
            table._table_key = AESGCM(master_key).decrypt(nonce, wrapped, _MAGIC + store_id)
            frame = table._take_frame(data, _HEADER.size)
        except (InvalidTag, msgspec.MsgspecError, struct.error, ValueError) as error:
            raise MissingKeyError(f"{what} is damaged\n{LOST_HINT}") from error
        table.folder, table.names_key = frame.folder, frame.names_key
        table.has_clear = frame.has_clear
        while table._size < len(data):
            # A crash can leave a part of a frame, whose keys were never used.
            try:
                table._take_frame(data, table._size)
            except (InvalidTag, msgspec.MsgspecError, struct.error, ValueError):
                num_bytes = len(data) - table._size
                logger.warning("%s: its last %d bytes hold no key", what, num_bytes)
                break
        return table

    def add(self, scopes: Iterable[bytes]) -> None:
        """Make a key for each scope that has none, and append these keys to the file.

        Raises:
            StorageError: the file cannot be written; nothing was added.
        """
        missing = dict.fromkeys(scope for scope in scopes if scope not in self._by_scope)
        if not missing:
            return
        new = [
            PayloadKey(secrets.token_bytes(KEY_ID_BYTES), secrets.token_bytes(KEY_BYTES), scope)
            for scope in missing
        ]
        frame = self._seal_frame(_Frame(new), self._num_frames)
        with storage_errors(self.path), _opened(self.path) as fd:
            _write(fd, frame, self._size)
        self._num_frames += 1
        self._size += len(frame)
        self._take_keys(new)

    def drop(self, scopes: Collection[bytes]) -> list[bytes]:
        """Drop the keys of scopes, and write the table anew under a fresh key.

        Returns the ids of the keys that are gone.

        Raises:
            StorageError: the file cannot be written; nothing was dropped.
        """
        gone = [self._by_scope[scope] for scope in scopes if scope in self._by_scope]
        if gone:
            scopes = {each.scope for each in gone}
            self._write_whole([each for each in self if each.scope not in scopes])
        return [each.id for each in gone]

    def wrap(self, master_key: bytes) -> None:
        """Write the table anew under another master key; the payload keys stay.

        Raises:
            StorageError: the file cannot be written.
        """
        self._write_whole(list(self), master_key=master_key)

    def move_to(self, folder: str) -> None:
        """Note that the store lies in another folder now.

        Raises:
            StorageError: the file cannot be written.
        """
        self._write_whole(list(self), folder=folder)

    def refuse_clear(self) -> None:
        """Note that every block of the store is encrypted from now on.

        Raises:
            StorageError: the file cannot be written.
        """
        self._write_whole(list(self), has_clear=False)

    def copy_to(self, path: str, folder: str) -> "KeyTable":
        """Write a second table with these keys, for a store in another folder.

        Raises:
            StorageError: the file cannot be written.
        """
        same = (self.names_key, self.has_clear)
        copied = KeyTable(path, self.store_id, self._master_key, folder, *same)
        copied._write_whole(list(self))
        return copied

    # --- keys ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[PayloadKey]:
        return iter(list(self._by_scope.values()))

    def __len__(self) -> int:
        return len(self._by_scope)

    def of_scope(self, scope: bytes) -> PayloadKey | None:
        """Return the key for new payloads of a scope; None if there is none."""
        return self._by_scope.get(scope)

    def of_id(self, key_id: bytes) -> PayloadKey | None:
        """Return the key of an id; None if it has left the table."""
        return self._by_id.get(key_id)

    def _take_keys(self, keys: Iterable[PayloadKey]) -> None:
        self._by_scope |= {each.scope: each for each in keys}
        self._by_id |= {each.id: each for each in keys}

    # --- bytes --------------------------------------------------------------------------------

    def _seal_frame(self, frame: _Frame, number: int) -> bytes:
        nonce = secrets.token_bytes(NONCE_BYTES)
        sealed = AESGCM(self._table_key).encrypt(nonce, _encode(frame), self._place(number))
        return _LENGTH.pack(len(nonce + sealed)) + nonce + sealed

    def _take_frame(self, data: bytes, start: int) -> _Frame:
        (length,) = _LENGTH.unpack_from(data, start)
        sealed = data[start + _LENGTH.size :][:length]
        nonce, sealed = sealed[:NONCE_BYTES], sealed[NONCE_BYTES:]
        place = self._place(self._num_frames)
        frame = _decode(AESGCM(self._table_key).decrypt(nonce, sealed, place))
        self._num_frames += 1
        self._size = start + _LENGTH.size + length
        self._take_keys(frame.keys)
        return frame

    def _place(self, number: int) -> bytes:
        """What a frame is authenticated with, so that frames cannot change their places."""
        return self.store_id + number.to_bytes(8, "little")

    def _write_whole(
        self,
        keys: list[PayloadKey],
        *,
        master_key: bytes = b"",
        folder: str = "",
        has_clear: bool = True,
    ) -> None:
        """Write a new file under a fresh table key, put it in place, and overwrite the old one."""
        master_key, folder = master_key or self._master_key, folder or self.folder
        has_clear = has_clear and self.has_clear
        new = KeyTable(self.path, self.store_id, master_key, folder, self.names_key, has_clear)
        new._table_key, nonce = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(NONCE_BYTES)
        wrapped = AESGCM(master_key).encrypt(nonce, new._table_key, _MAGIC + self.store_id)
        header = _HEADER.pack(_MAGIC, self.store_id, _check_of(master_key), nonce, wrapped)
        frame = new._seal_frame(_Frame(keys, folder, self.names_key, has_clear), 0)
        new._num_frames, new._size = 1, len(header) + len(frame)
        new._take_keys(keys)
        draft = self.path + DRAFT_SUFFIX
        with storage_errors(self.path), ExitStack() as stack:
            fd = stack.enter_context(_opened(draft, os.O_CREAT))
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, new._size)  # a draft that a crash has left is overwritten, too
            _write(fd, header + frame)
            old_fd = -1
            with suppress(FileNotFoundError):
                old_fd = stack.enter_context(_opened(self.path))
            os.rename(draft, self.path)
            self.__dict__.update(new.__dict__)
            flush_folder(os.path.dirname(self.path))
            if old_fd >= 0:
                _write(old_fd, bytes(os.fstat(old_fd).st_size))


@contextmanager
def _opened(path: str, flags: int = 0) -> Iterator[int]:
    """Open a file for writing; symbolic links are refused."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _write(fd: int, data: bytes, offset: int = 0) -> None:
    """Write all of `data` at an offset and flush it."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
    os.fsync(fd)


def _check_of(master_key: bytes) -> bytes:
    """Return what tells a wrong master key from a damaged table."""
    return hashlib.sha256(b"tieredkv master key" + master_key).digest()[:8]
