"""The key table of a store: its payload keys in slots of one file, each destroyed in its place.

Each payload key belongs to a scope: a namespace and an hour of computing. A slot is encrypted under
a key that follows from the master key. A change writes slots and flushes them once; the rest of the
file stays as it is. docs/encryption.md draws the bytes.

This module knows one file and its keys. It knows no store, and does not know where a master key
comes from.
"""

import errno
import heapq
import logging
import math
import os
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tieredkv.errors import DamagedTableError, IntegrityError, MissingKeyError, StorageError
from tieredkv.storage.folder.filesystem import flush_folder
from tieredkv.storage.index.verdicts import storage_errors
from tieredkv.storage.keys import layout, trust
from tieredkv.storage.keys.layout import (
    FREE,
    HEADERS_AT,
    KEY_BYTES,
    KEY_ID_BYTES,
    PAGE_BYTES,
    SALT_BYTES,
    SLOT_BYTES,
    SLOTS_AT,
    Head,
    PayloadKey,
    Secrets,
    check_of,
    header_pages,
)
from tieredkv.storage.keys.table_file import (
    DRAFT_SUFFIX,
    WHAT,
    make_locked,
    open_locked,
    read_all,
    write_all,
)

logger = logging.getLogger(__name__)

_SLOTS_A_PAGE = PAGE_BYTES // SLOT_BYTES


class KeyTable:
    """The keys of one store, as its file has them.

    One thread makes every change; any thread may look keys up. A change is on the device before it
    is visible here. If a change fails, nothing has changed here, and the same call may be made
    again.

    Attributes:
        path: the file.
        names_key: 32 bytes; the key of the names of blocks.
        num_lost: slots that were damaged when the table was opened; their keys are gone.
    """

    def __init__(self, path: str, fd: int, head: Head, kept: Secrets) -> None:
        self.path, self.names_key, self.num_lost = path, kept.names_key, 0
        self._fd, self._head, self._num_written = fd, head, head.number
        self._use(kept.wrapping_keys)
        self._by_scope: dict[bytes, PayloadKey] = {}
        self._by_id: dict[bytes, PayloadKey] = {}
        self._slots: dict[bytes, int] = {}  # by key id
        self._deaths: list[tuple[float, bytes]] = []  # a heap of all keys; some of them are gone
        self._num_slots = 0
        self._free: list[int] = []  # a heap
        # Slots without a key whose bytes are not known to be zeroes: of writes that failed, and
        # damaged ones. They are overwritten before or with the next change.
        self._unclean: set[int] = set()

    # --- files --------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: str,
        folder_id: bytes,
        master_key: bytes,
        stamp: bytes,
        *,
        folder: str = "",
        master_place: str = "",
    ) -> "KeyTable":
        """Make a table without payload keys, and keep it locked until it is closed.

        Args:
            path: of the file, which must not exist.
            folder_id: 16 bytes; of the folder of the store.
            master_key: 32 bytes.
            stamp: 16 bytes; of the first start.
            folder: the path of the folder of the store, as a hint for `sweeps`.
            master_place: the path of the file of the master key, as a hint for people; empty if a
                command prints it.

        Raises:
            MissingKeyError: the folder of the file is missing or not to be believed.
            StoreBusyError: another process makes the same table.
            StorageError: the file exists or cannot be written; no part of it stays.
        """
        salt = secrets.token_bytes(SALT_BYTES)
        head = Head(
            folder_id=folder_id,
            stamps=(stamp, bytes(len(stamp))),
            number=1,
            checks=(check_of(master_key), b""),
            salts=(salt, b""),
            is_told=False,
            folder=folder,
            master_place=master_place,
        ).settled()
        own = layout.wrapping_key(master_key, folder_id, salt)
        kept = Secrets(secrets.token_bytes(KEY_BYTES), (own,))
        trust.check_folder(os.path.dirname(path))
        draft = path + DRAFT_SUFFIX
        with storage_errors(path):
            fd = make_locked(draft)
            made = [draft]
            try:
                if os.path.lexists(path):
                    raise StorageError(errno.EEXIST, f"{WHAT} `{path}` is there already")
                header = layout.pack_header(head, kept)
                write_all(fd, header * len(HEADERS_AT) + bytes(PAGE_BYTES), 0)
                os.fsync(fd)
                os.rename(draft, path)
                made = [path]
                flush_folder(os.path.dirname(path))
            except BaseException:
                for each in made:
                    with suppress(OSError):
                        os.unlink(each)
                os.close(fd)
                raise
        table = cls(path, fd, head, kept)
        table._num_slots, table._free = _SLOTS_A_PAGE, list(range(_SLOTS_A_PAGE))
        return table

    @classmethod
    def open(cls, path: str, folder_id: bytes, master_key: bytes) -> "KeyTable":
        """Read a table, and keep it locked until it is closed.

        Damaged slots are counted, logged and overwritten, a damaged header is mended from the
        other one, and a rotation that was cut short is finished.

        Raises:
            DamagedTableError: both headers are damaged.
            MissingKeyError: the table is absent, unreadable, not to be believed, of another folder
                or version, or written with another master key; the error's `reason` tells.
            StoreBusyError: another process has it open.
        """
        fd = open_locked(path)
        try:
            data = read_all(fd, path)
            table = cls._of(path, fd, folder_id, master_key, data)
            table._mend(data, master_key)
        except BaseException:
            os.close(fd)
            raise
        return table

    @classmethod
    def look(cls, path: str, folder_id: bytes, master_key: bytes) -> "KeyTable":
        """Read a table without its lock, and change nothing; another process may be changing it.

        Nothing of the table may be changed, and there is no need to close it.

        Raises:
            DamagedTableError: both headers are damaged.
            MissingKeyError: as `open` does.
        """
        fd = trust.open_file(path, WHAT, follows_link=False)
        try:
            data = read_all(fd, path)
        finally:
            os.close(fd)
        return cls._of(path, -1, folder_id, master_key, data)

    @classmethod
    def _of(
        cls, path: str, fd: int, folder_id: bytes, master_key: bytes, data: bytes
    ) -> "KeyTable":
        """Make the table of the bytes of a file."""
        table = cls(path, fd, *_open_header(path, folder_id, master_key, data))
        num_pages = max((len(data) - SLOTS_AT) // PAGE_BYTES, 0)
        table._num_slots = num_pages * _SLOTS_A_PAGE
        for number in range(table._num_slots):
            slot = data[_place_of(number) : _place_of(number + 1)]
            if slot == FREE:
                table._free.append(number)
            elif key := layout.unpack_slot(slot, number, folder_id, table._ciphers):
                table._take(key, number)
            else:
                table._unclean.add(number)
        table.num_lost = len(table._unclean)
        return table

    def _mend(self, data: bytes, master_key: bytes) -> None:
        """Put right what damage or a crash has left in the file; what fails is logged only."""
        head = self._head
        try:
            if self.num_lost:
                text = "%s `%s`: %d slots were damaged; the blocks of their keys are lost"
                logger.warning(text, WHAT, self.path, self.num_lost)
                self._clean()
            first, second = header_pages(data)
            if head.is_rotating:
                self._finish_rotation()
            elif first != second:
                self._write_head(head)
                logger.warning("%s `%s`: a header was mended", WHAT, self.path)
            if head.is_rotating and head.checks[0] != head.checks[1]:
                where = f"`{head.master_place}`" if head.master_place else "the output of a command"
                text = "%s `%s`: a change of the master key was cut short and is finished now; "
                text += "the table needs the new one, %s, from now on"
                logger.warning(text, WHAT, self.path, where)
            self._renew_told(master_key)
        except StorageError as error:
            logger.warning("%s could not be mended: %s", WHAT, error)

    def close(self) -> None:
        """Unlock the table; a second call does nothing. Keys can be looked up further on."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # --- what the header has --------------------------------------------------------------------

    @property
    def folder_id(self) -> bytes:
        """The id of the folder of the store; 16 bytes."""
        return self._head.folder_id

    @property
    def stamps(self) -> tuple[bytes, bytes]:
        """The stamp of the last start and the one before: 16 bytes each, zeroes for none."""
        return self._head.stamps

    @property
    def head(self) -> Head:
        """What stands in the header, under the master key."""
        return self._head

    def stamp(
        self,
        new: bytes,
        before: bytes,
        *,
        folder: str | None = None,
        master_place: str | None = None,
    ) -> None:
        """Write the stamps, and the hints that are given, into both headers.

        A crash leaves either the stamps of before or the new ones.

        Raises:
            StorageError: the file cannot be written.
        """
        head = self._head._replace(stamps=(new, before))
        if folder is not None:
            head = head._replace(folder=folder)
        if master_place is not None:
            head = head._replace(master_place=master_place)
        with storage_errors(self.path):
            self._check_place()
            self._write_head(head)

    def rotate(self, master_key: bytes, *, place: str = "") -> None:
        """Put the table under another master key; payload keys and names key stay.

        Both headers note the change first. Until they are written again, either master key opens
        the table, and the next `open` finishes what was cut short. Then the slots are written once
        more, under a wrapping key that no header has told.

        Args:
            master_key: 32 bytes; if the table is under it already, nothing is done.
            place: the path of the file of the master key; empty if a command prints it.

        Raises:
            StorageError: the file cannot be written.
        """
        with storage_errors(self.path):
            self._check_place()
            if self._head.is_rotating:  # since it could not be finished
                self._finish_rotation()
            check, salt = check_of(master_key), secrets.token_bytes(SALT_BYTES)
            if check != self._head.checks[0]:
                head = self._head.under(check, salt, is_told=True)._replace(master_place=place)
                own = layout.wrapping_key(master_key, self.folder_id, salt)
                self._write_head(head, (own, *self._wrapping_keys))
                self._finish_rotation()
            self._renew_told(master_key)

    def _finish_rotation(self) -> None:
        """Encrypt each slot under the new wrapping key, and clear the note in the headers."""
        with storage_errors(self.path):
            self._clean()
            keys = {number: self._by_id[key_id] for key_id, number in self._slots.items()}
            self._write_slots({number: self._pack(key, number) for number, key in keys.items()})
            self._write_head(self._head.settled(), self._wrapping_keys[:1])

    def _renew_told(self, master_key: bytes) -> None:
        """Take a fresh wrapping key if the headers have told the present one.

        Who has the master key of before, and a copy of the headers that told it, could otherwise
        read the keys of later.
        """
        check, salt = check_of(master_key), secrets.token_bytes(SALT_BYTES)
        if self._head.is_told and check == self._head.checks[0]:
            own = layout.wrapping_key(master_key, self.folder_id, salt)
            head = self._head.under(check, salt, is_told=False)
            self._write_head(head, (own, *self._wrapping_keys))
            self._finish_rotation()

    # --- keys -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[PayloadKey]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def of_scope(self, scope: bytes) -> PayloadKey | None:
        """Return the key for new payloads of a scope; None if there is none."""
        return self._by_scope.get(scope)

    def of_id(self, key_id: bytes) -> PayloadKey | None:
        """Return the key of an id; None if it has left the table.

        NOTE: whoever reads a block with it compares `dies_at` with the time first.
        """
        return self._by_id.get(key_id)

    def add(self, scopes: Mapping[bytes, float]) -> None:
        """Make a key for each scope that has none, and write it into a free slot.

        Args:
            scopes: for each scope the second after which none of its blocks may be read. A key
                that is there already keeps its own.

        Raises:
            StorageError: the file cannot be written or is no longer in its place.
        """
        new = [
            PayloadKey(secrets.token_bytes(KEY_ID_BYTES), secrets.token_bytes(KEY_BYTES), *each)
            for each in scopes.items()
            if each[0] not in self._by_scope
        ]
        if not new:
            return
        assert all(map(math.isfinite, scopes.values())), scopes
        with storage_errors(self.path):
            self._check_place()
            self._clean()
            self._grow(len(new) - len(self._free))
            placed = {heapq.heappop(self._free): key for key in new}
            try:
                self._write_slots(
                    {number: self._pack(key, number) for number, key in placed.items()}
                )
            except BaseException:
                self._unclean.update(placed)
                with suppress(StorageError):
                    self._clean()
                raise
        for number, key in placed.items():
            self._take(key, number)

    def drop(self, scopes: Collection[bytes]) -> list[bytes]:
        """Destroy the keys of scopes in their slots; return their ids.

        It works on a full disk, since it overwrites what is there.

        Raises:
            StorageError: the file cannot be written; all of these keys are still to be dropped.
        """
        keys = [self._by_scope.get(scope) for scope in dict.fromkeys(scopes)]
        return self._destroy([key for key in keys if key is not None])

    def drop_dead(self, now: float) -> list[bytes]:
        """Destroy the keys whose second of death has come; return their ids.

        Raises:
            StorageError: as `drop` does.
        """
        dead = []
        while self._deaths and self._deaths[0][0] <= now:
            _, key_id = heapq.heappop(self._deaths)
            if (key := self._by_id.get(key_id)) is not None:
                dead.append(key)
        try:
            return self._destroy(dead)
        except BaseException:
            for key in dead:
                heapq.heappush(self._deaths, (key.dies_at, key.id))
            raise

    def _destroy(self, keys: list[PayloadKey]) -> list[bytes]:
        numbers = [self._slots[key.id] for key in keys]
        with storage_errors(self.path):
            self._write_slots(dict.fromkeys((*numbers, *self._unclean), FREE))
        self._free_unclean()
        for key, number in zip(keys, numbers, strict=True):
            del self._by_id[key.id], self._slots[key.id]
            if self._by_scope.get(key.scope) == key:
                del self._by_scope[key.scope]
            heapq.heappush(self._free, number)
        return [key.id for key in keys]

    def _take(self, key: PayloadKey, number: int) -> None:
        self._slots[key.id] = number
        heapq.heappush(self._deaths, (key.dies_at, key.id))
        self._by_id[key.id] = self._by_scope[key.scope] = key

    def check(self) -> None:
        """Check that each slot is free, unclean or that of one key.

        Raises:
            IntegrityError: a slot is none of these, or two of them.
        """
        slots = [*self._slots.values(), *self._free, *self._unclean]
        if sorted(slots) != list(range(self._num_slots)):
            raise IntegrityError(f"{WHAT} `{self.path}` has lost or doubled slots")
        if self._slots.keys() != self._by_id.keys() or len(self._by_scope) > len(self._by_id):
            raise IntegrityError(f"{WHAT} `{self.path}` has keys without slots")

    # --- bytes ----------------------------------------------------------------------------------

    def _use(self, wrapping_keys: tuple[bytes, ...]) -> None:
        self._wrapping_keys = wrapping_keys
        self._ciphers = [AESGCM(each) for each in wrapping_keys]

    def _pack(self, key: PayloadKey, number: int) -> bytes:
        return layout.pack_slot(key, number, self.folder_id, self._ciphers[0])

    def _check_place(self) -> None:
        """Refuse to make keys in a file that the next start will not find."""
        found = None
        with suppress(FileNotFoundError):
            found = os.stat(self.path, follow_symlinks=False)
        if found is None or not os.path.samestat(found, os.fstat(self._fd)):
            code, what = errno.ENOENT, f"{WHAT} `{self.path}` was removed or moved away"
            raise StorageError(code, f"{what}; put it back")

    def _clean(self) -> None:
        """Overwrite the slots that have no key but may hold bytes of one."""
        with storage_errors(self.path):
            self._write_slots(dict.fromkeys(self._unclean, FREE))
        self._free_unclean()

    def _free_unclean(self) -> None:
        for number in self._unclean:
            heapq.heappush(self._free, number)
        self._unclean.clear()

    def _grow(self, num_slots: int) -> None:
        """Append whole pages, until there is room for so many more slots."""
        num_pages = -(-num_slots // _SLOTS_A_PAGE)
        if num_pages <= 0:
            return
        end = _place_of(self._num_slots)
        try:
            write_all(self._fd, bytes(num_pages * PAGE_BYTES), end)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, end)
            raise
        new = range(self._num_slots, self._num_slots + num_pages * _SLOTS_A_PAGE)
        self._num_slots = new.stop
        for number in new:
            heapq.heappush(self._free, number)

    def _write_slots(self, slots: Mapping[int, bytes]) -> None:
        """Write slots, those that lie side by side at once, and flush them all."""
        for run in _runs(sorted(slots)):
            write_all(self._fd, b"".join(slots[number] for number in run), _place_of(run.start))
        if slots:
            os.fdatasync(self._fd)

    def _write_head(self, head: Head, wrapping_keys: tuple[bytes, ...] | None = None) -> None:
        """Write both headers; if that fails, try to have the old ones there again."""
        keys = self._wrapping_keys if wrapping_keys is None else wrapping_keys
        with storage_errors(self.path):
            try:
                head = self._write_headers(head, keys)
            except OSError:
                with suppress(OSError):
                    self._head = self._write_headers(self._head, self._wrapping_keys)
                raise
        self._head = head
        self._use(keys)

    def _write_headers(self, head: Head, wrapping_keys: tuple[bytes, ...]) -> Head:
        """Write one header after the other, so that one of them is always sound."""
        self._num_written += 1
        head = head._replace(number=self._num_written)
        page = layout.pack_header(head, Secrets(self.names_key, wrapping_keys))
        for at in HEADERS_AT:
            write_all(self._fd, page, at)
            os.fdatasync(self._fd)
        return head


def _open_header(
    path: str, folder_id: bytes, master_key: bytes, data: bytes
) -> tuple[Head, Secrets]:
    """Find the newest header that this master key opens."""
    what = f"{WHAT} `{path}`"
    pages = header_pages(data)
    heads = [(layout.head_of(page), page) for page in pages]
    found = [(head, page) for head, page in heads if head is not None]
    if not found:
        if layout.is_of_another_version(pages[0]):
            text = f"{what} has format version {layout.version_of(pages[0])}, but this tieredkv"
            text += f" reads {layout.VERSION} only; use the tieredkv that wrote it"
            raise MissingKeyError(text, reason="version")
        raise DamagedTableError(f"{what} is damaged: neither of its headers is sound")
    found = sorted(found, key=lambda each: -each[0].number)
    own = [each for each in found if each[0].folder_id == folder_id]
    if not own:
        raise MissingKeyError(f"{what} belongs to another store", reason="foreign")
    fitting = [each for each in own if check_of(master_key) in each[0].checks]
    if not fitting:
        text = f"the master key is not the one that {what} was written with"
        raise MissingKeyError(text, reason="master key")
    for head, page in fitting:
        if (kept := layout.open_header(page, head, master_key)) is not None:
            return head, kept
    raise DamagedTableError(f"{what} is damaged: its master key opens neither of its headers")


def _place_of(number: int) -> int:
    """Return where a slot begins in the file."""
    return SLOTS_AT + number * SLOT_BYTES


def _runs(numbers: list[int]) -> Iterator[range]:
    """Yield the runs of consecutive numbers in a sorted list."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield range(numbers[start], numbers[end - 1] + 1)
            start = end
