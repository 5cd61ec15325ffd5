"""The key table of a store: its payload keys in slots of one file, each destroyed in its place.

Each payload key belongs to a scope: a namespace and an hour of computing. A slot is encrypted under
the wrapping key of the table, which each header has under the master key. A change writes slots and
flushes them once; the rest of the file stays as it is. docs/encryption.md draws the bytes.

This module knows one file and its keys. It knows no store, and does not know where a master key
comes from.
"""

import errno
import logging
import math
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tieredkv.errors import DamagedTableError, IntegrityError, MissingKeyError, StorageError
from tieredkv.storage.folder.filesystem import flush_folder
from tieredkv.storage.index.verdicts import storage_errors
from tieredkv.storage.keys import gone, layout, table_file, trust
from tieredkv.storage.keys.layout import (
    FREE,
    HEADERS_AT,
    KEY_BYTES,
    KEY_ID_BYTES,
    PAGE_BYTES,
    SLOTS_A_PAGE,
    SLOTS_AT,
    Head,
    PayloadKey,
    Secrets,
    check_of,
    header_pages,
    place_of,
)
from tieredkv.storage.keys.table_file import WHAT, write_all

logger = logging.getLogger(__name__)


class KeyTable:
    """The keys of one store, as its file has them.

    One thread makes every change; any thread may look keys up. A change is on the device before it
    is visible here. If a change fails, nothing has changed here, part of it may have on the device,
    and the same call may be made again.

    Attributes:
        path: the file.
        head: what stands in the headers.
        names_key: 32 bytes; the key of the names of blocks.
        num_lost: slots that were damaged when the table was opened; their keys are gone.
    """

    def __init__(self, path: str, fd: int, head: Head, kept: Secrets, num_slots: int) -> None:
        self.path, self.names_key, self.num_lost = path, kept.names_key, 0
        self._fd, self._num_slots = fd, num_slots
        self._use(head, kept)
        self._by_scope: dict[bytes, PayloadKey] = {}
        self._by_id: dict[bytes, PayloadKey] = {}
        self._first_death = math.inf  # no key dies before it
        self._free: list[int] = []  # the next one is the last
        # Slots without a key whose bytes are not known to be zeroes: of writes that failed, and
        # damaged ones. They are overwritten with the next change.
        self._unclean: set[int] = set()

    # --- files --------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: str,
        folder_id: bytes,
        get_master_key: Callable[[], bytes],
        stamp: bytes,
        *,
        folder: str = "",
        master_place: str = "",
    ) -> "KeyTable":
        """Make a table without payload keys, and keep it locked until it is closed.

        Args:
            path: of the file, which must not exist.
            folder_id: 16 bytes; of the folder of the store.
            get_master_key: returns 32 bytes. It may make the key: a draft of the table lies there
                by then, by which a sweep knows that nothing else needs that key.
            stamp: 16 bytes; of the first start.
            folder: the path of the folder of the store, as a hint for `destruction`.
            master_place: the path of the file of the master key, as a hint for people; empty if a
                command prints it.

        Raises:
            MissingKeyError: the folder of the file is missing or not to be believed, or there is
                no master key.
            StoreBusyError: another process makes the same table.
            StorageError: the file exists or cannot be written; no part of it stays.
        """
        stamps, parent = (stamp, bytes(len(stamp))), gone.parent_of(folder)
        head = Head(folder_id, stamps, 1, parent, (), folder, master_place)
        names_key = secrets.token_bytes(KEY_BYTES)
        trust.check_folder(os.path.dirname(path))
        with storage_errors(path):
            with table_file.replacing(path) as fd:
                if os.path.lexists(path):
                    raise StorageError(errno.EEXIST, f"{WHAT} `{path}` is there already")
                master_key = get_master_key()
                data = layout.pack_table(head, names_key, master_key, (), SLOTS_A_PAGE)
                write_all(fd, data, 0)
            try:
                flush_folder(os.path.dirname(path))
            except BaseException:
                os.unlink(path)
                os.close(fd)
                raise
        return cls._of(path, fd, folder_id, master_key, data)

    @classmethod
    def open(cls, path: str, folder_id: bytes, master_key: bytes) -> "KeyTable":
        """Read a table, and keep it locked until it is closed.

        Damaged slots are counted, logged and overwritten, a damaged header is mended from the
        other one, and a rotation to this master key that was cut short is finished.

        Raises:
            DamagedTableError: both headers are damaged.
            MissingKeyError: the table is absent, unreadable, not to be believed, of another folder
                or version, or written with another master key; the error's `reason` tells.
            StoreBusyError: another process has it open.
        """
        fd = table_file.open_locked(path)
        try:
            data = table_file.read_all(fd, path)
            table = cls._of(path, fd, folder_id, master_key, data)
        except BaseException:
            os.close(fd)
            raise
        table._mend(data, master_key)
        return table

    @classmethod
    def look(cls, path: str, folder_id: bytes, master_key: bytes) -> "KeyTable":
        """Read a table without its lock, and change nothing; another process may be changing it.

        Nothing of the table may be changed, and there is no need to close it.

        Raises:
            DamagedTableError: both headers are damaged.
            MissingKeyError: as `open` does.
        """
        return cls._of(path, -1, folder_id, master_key, table_file.look_at(path))

    @classmethod
    def _of(
        cls, path: str, fd: int, folder_id: bytes, master_key: bytes, data: bytes
    ) -> "KeyTable":
        """Make the table of the bytes of a file."""
        num_slots = max((len(data) - SLOTS_AT) // PAGE_BYTES, 0) * SLOTS_A_PAGE
        table = cls(path, fd, *_open_header(path, folder_id, master_key, data), num_slots)
        for number in range(num_slots):
            slot = data[place_of(number) : place_of(number + 1)]
            if slot == FREE:
                table._free.append(number)
            elif key := layout.unpack_slot(slot, number, folder_id, table._cipher):
                table._take(key)
            else:
                table._unclean.add(number)
        table._free.reverse()
        table.num_lost = len(table._unclean)
        return table

    def _mend(self, data: bytes, master_key: bytes) -> None:
        """Put right what damage or a crash has left in the file; what fails is logged only."""
        if self.num_lost:
            text = "%s `%s`: %d slots were damaged; the blocks of their keys are lost"
            logger.warning(text, WHAT, self.path, self.num_lost)
        first, second = header_pages(data)
        try:
            if check_of(master_key) in self.head.checks[1:]:
                self.renew(master_key)
                text = "%s `%s`: a change of the master key was cut short and is finished now"
                logger.warning(text, WHAT, self.path)
            else:
                with storage_errors(self.path):
                    self._write_slots({})
                if first != second:
                    self._write_head(self.head)
                    logger.warning("%s `%s`: a header was mended", WHAT, self.path)
        except StorageError as error:
            logger.warning("%s could not be mended: %s", WHAT, error)

    def close(self) -> None:
        """Unlock the table; a second call does nothing. Keys can be looked up further on."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # --- headers --------------------------------------------------------------------------------

    def stamp(self, new: bytes, before: bytes, *, folder: str | None = None) -> None:
        """Write the stamps, and where the folder of the store is, into both headers.

        A crash leaves either the stamps of before or the new ones.

        Raises:
            StorageError: the file cannot be written.
        """
        head = self.head._replace(stamps=(new, before))
        if folder is not None:
            head = head._replace(folder=folder, parent=gone.parent_of(folder))
        self._write_head(head)

    def rotate(self, master_key: bytes, *, place: str = "") -> None:
        """Put the table under another master key; payload keys and names key stay.

        Raises:
            StorageError: as `note` and `renew` do.
        """
        self.note(master_key, place=place)
        self.renew(master_key)

    def note(self, master_key: bytes, *, place: str) -> None:
        """Have a new master key open the table, too; `renew` ends that.

        Args:
            master_key: 32 bytes.
            place: the path of its file; empty if a command prints it.

        Raises:
            StorageError: the file cannot be written.
        """
        lock = layout.lock(self._kept.wrapping_key, master_key, self.head.folder_id)
        self._write_head(self.head._replace(locks=(self._kept.lock, lock), master_place=place))

    def renew(self, master_key: bytes) -> None:
        """Write the table anew under a fresh wrapping key, which only one master key opens.

        So nobody who has another one and old headers can read the keys of later.

        Raises:
            StorageError: the file cannot be written.
        """
        head = self.head._replace(number=self._num_written + 1)
        data = layout.pack_table(head, self.names_key, master_key, self, self._num_slots)
        with storage_errors(self.path):
            self._check_place()
            with table_file.replacing(self.path) as fd:
                write_all(fd, data, 0)
            old, self._fd = self._fd, fd
            self._use(*_open_header(self.path, head.folder_id, master_key, data))
            self._free += sorted(self._unclean, reverse=True)
            self._unclean.clear()
            try:
                flush_folder(os.path.dirname(self.path))
                table_file.overwrite(old)
            finally:
                os.close(old)

    def _use(self, head: Head, kept: Secrets) -> None:
        self.head, self._kept, self._num_written = head, kept, head.number
        self._cipher = AESGCM(kept.wrapping_key)

    def _write_head(self, head: Head) -> None:
        """Write one header after the other, so that one of them is always sound."""
        self._num_written += 1
        head = head._replace(number=self._num_written)
        page = layout.pack_header(head, self._kept)
        with storage_errors(self.path):
            self._check_place()
            for at in HEADERS_AT:
                write_all(self._fd, page, at)
                os.fdatasync(self._fd)
        self.head = head

    def _check_place(self) -> None:
        """Refuse to write what the next start will not find."""
        if not table_file.is_at(self.path, self._fd):
            what = f"{WHAT} `{self.path}` was removed or moved away"
            raise StorageError(errno.ENOENT, f"{what}; put it back")

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
        new = [scope for scope in scopes if scope not in self._by_scope]
        assert all(map(math.isfinite, scopes.values())), scopes
        with storage_errors(self.path):
            self._check_place()  # for keys that are there too: their blocks would be lost
            if not new:
                return
            self._grow(len(new) - len(self._free))
            keys = [
                PayloadKey(
                    secrets.token_bytes(KEY_ID_BYTES),
                    secrets.token_bytes(KEY_BYTES),
                    scope,
                    scopes[scope],
                    self._free.pop(),
                )
                for scope in new
            ]
            self._unclean.update(key.slot for key in keys)
            folder_id, cipher = self.head.folder_id, self._cipher
            self._write_slots({key.slot: layout.pack_slot(key, folder_id, cipher) for key in keys})
        for key in keys:
            self._take(key)

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
        if now < self._first_death:
            return []
        dropped = self._destroy([key for key in self if key.dies_at <= now])
        self._first_death = min((key.dies_at for key in self), default=math.inf)
        return dropped

    def _destroy(self, keys: list[PayloadKey]) -> list[bytes]:
        slots = [key.slot for key in keys]
        with storage_errors(self.path):
            self._write_slots(dict.fromkeys(slots, FREE))
        for key in keys:
            del self._by_id[key.id]
            if self._by_scope.get(key.scope) == key:
                del self._by_scope[key.scope]
        self._free += slots
        return [key.id for key in keys]

    def _take(self, key: PayloadKey) -> None:
        self._first_death = min(self._first_death, key.dies_at)
        self._by_id[key.id] = self._by_scope[key.scope] = key

    def check(self) -> None:
        """Check that each slot is free, unclean or of one key, and that no scope has a lost key.

        Raises:
            IntegrityError: that is not so.
        """
        slots = [*(key.slot for key in self), *self._free, *self._unclean]
        if sorted(slots) != list(range(self._num_slots)):
            raise IntegrityError(f"{WHAT} `{self.path}` has lost or doubled slots")
        if any(self._by_id.get(key.id) != key for key in self._by_scope.values()):
            raise IntegrityError(f"{WHAT} `{self.path}` has a key of a scope that is gone")

    # --- slots ----------------------------------------------------------------------------------

    def _grow(self, num_slots: int) -> None:
        """Append whole pages, until there is room for so many more slots."""
        num_pages = max(-(-num_slots // SLOTS_A_PAGE), 0)
        write_all(self._fd, bytes(num_pages * PAGE_BYTES), place_of(self._num_slots))
        new = range(self._num_slots, self._num_slots + num_pages * SLOTS_A_PAGE)
        self._num_slots = new.stop
        self._free[:0] = reversed(new)

    def _write_slots(self, slots: Mapping[int, bytes]) -> None:
        """Write slots, and zeroes into the unclean ones, and flush them all."""
        images = {**dict.fromkeys(self._unclean, FREE), **slots}
        for run in _runs(sorted(images)):
            write_all(self._fd, b"".join(images[number] for number in run), place_of(run.start))
        if images:
            os.fdatasync(self._fd)
        self._free += sorted(self._unclean - slots.keys(), reverse=True)
        self._unclean.clear()


def _open_header(
    path: str, folder_id: bytes, master_key: bytes, data: bytes
) -> tuple[Head, Secrets]:
    """Find the newest header that this master key opens."""
    what, pages = f"{WHAT} `{path}`", header_pages(data)
    found = [(head, page) for page in pages if (head := layout.head_of(page)) is not None]
    if not found:
        if layout.is_of_another_version(pages[0]):
            text = f"{what} has format version {layout.version_of(pages[0])}, but this tieredkv"
            text += f" reads {layout.VERSION} only; use the tieredkv that wrote it"
            raise MissingKeyError(text, reason="version")
        raise DamagedTableError(f"{what} is damaged: neither of its headers is sound")
    own = [each for each in found if each[0].folder_id == folder_id]
    if not own:
        raise MissingKeyError(f"{what} belongs to another store", reason="foreign")
    fitting = [each for each in own if check_of(master_key) in each[0].checks]
    if not fitting:
        text = f"the master key is not the one that {what} was written with"
        raise MissingKeyError(text, reason="master key")
    for head, page in sorted(fitting, key=lambda each: -each[0].number):
        if (kept := layout.open_header(page, head, master_key)) is not None:
            return head, kept
    raise DamagedTableError(f"{what} is damaged: its master key opens neither of its headers")


def _runs(numbers: list[int]) -> Iterator[range]:
    """Yield the runs of consecutive numbers in a sorted list."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield range(numbers[start], numbers[end - 1] + 1)
            start = end
