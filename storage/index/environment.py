"""The LMDB environment of a store: opens the index, and begins its transactions.

This module knows the index's file: how it is opened, how long it is, how it is read ahead
and checked. `tieredkv.storage.index.transaction` knows what is in it.

One thread makes all changes and any thread may read; neither waits for the other. Only
`looking_over`, which reads the whole index, takes turns with changes: LMDB cannot reuse a page
while a read transaction is open that began before the page was released.
"""

import ctypes
import errno
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from typing import Any, Literal

import lmdb
import numpy as np

from tieredkv.errors import CorruptIndexError, StorageError
from tieredkv.own_files import check_owner, open_own, remove
from tieredkv.storage.format.record import NO_RETENTIONS, RECORD_BYTES, Retentions
from tieredkv.storage.index.entries import META_KEY, NAMES, ORDERS, decode_meta
from tieredkv.storage.index.pages import DATA_FILE, MAP_BYTES, check_pages, read_meta
from tieredkv.storage.index.transaction import IndexTxn
from tieredkv.storage.index.verdicts import storage_errors
from tieredkv.storage.ownership import OwningThread, owned_by
from tieredkv.wire.limits import check_address_space

PAGE_BYTES = 4096
_OPTIONS: dict[str, Any] = {
    "max_dbs": len(NAMES),
    "map_size": MAP_BYTES,
    "readahead": False,
    "lib_version": 0,  # selects the version of LMDB that writes `pages.DATA_VERSION`
}
_EMPTY_BYTES = 1 << 20  # the map of an empty index in memory
_LOCK_FILE = "lock.mdb"
_LINKS = "index.open"  # beside the index: the folder through which LMDB finds its two files
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # of a filesystem without symbolic links
_AHEAD_BYTES = 2 << 20  # more than one ordinary transaction adds to the file
_PAGE_HEADER_BYTES = 16
_PAGE = np.dtype(  # the header of an LMDB page; its flags are 1 in a branch and 2 in a leaf
    {
        "names": ["number", "flags", "lower", "upper"],
        "formats": ["<u8", "<u2", "<u2", "<u2"],
        "offsets": [0, 10, 12, 14],
        "itemsize": PAGE_BYTES,
    }
)
_LOOKED_OVER_KEYS = 256  # how many keys one step of `looking_over` checks
_READ_AHEAD_BYTES = 1 << 20
_PAUSES = 25  # each pause while the index is checked lasts this many times the step before it
_MAX_PAUSE_S = 0.5
_MADV_POPULATE_READ = 22

Access = Literal["write", "look", "none"]
"""Whether an index is opened to write, opened to look at what was completed of it, or left alone.

One that is left alone, or that was never completed, is an empty index in memory for who looks.
"""


@contextmanager
def _folder_fd(path: str, parent_fd: int | None = None) -> Iterator[int]:
    """Open a folder of this user that others cannot write to; its last name is no link.

    Args:
        path: the folder, for errors as well; only its last name counts below `parent_fd`.
        parent_fd: the folder above it.
    """
    name = path if parent_fd is None else os.path.basename(path)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, dir_fd=parent_fd)
    try:
        check_owner(path, os.fstat(fd))
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _links_to(files: dict[str, int], store: str, store_fd: int) -> Iterator[str]:
    """Make links to open files in a folder of the store, and return a path to that folder.

    One process at a time opens a store, so whatever is there was left by a process that was killed,
    or by somebody else: it is removed by its name and never followed. Between two openings, empty
    files take the places of the links, so that these can be made on a full disk, too.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(_LINKS, dir_fd=store_fd).st_mode):
            os.unlink(_LINKS, dir_fd=store_fd)
    with suppress(FileExistsError):
        os.mkdir(_LINKS, dir_fd=store_fd)
        os.chmod(_LINKS, 0o700, dir_fd=store_fd)  # whatever the umask
    with _folder_fd(os.path.join(store, _LINKS), store_fd) as links_fd:
        os.fchmod(links_fd, 0o700)
        _empty(links_fd)
        try:
            for name, fd in files.items():
                os.symlink(f"/proc/self/fd/{fd}", name, dir_fd=links_fd)
            yield f"/proc/self/fd/{links_fd}"
        finally:
            _empty(links_fd)
            with suppress(OSError):
                for name in files:
                    os.close(open_own(name, os.O_CREAT | os.O_EXCL, dir_fd=links_fd))


def _empty(folder_fd: int) -> None:
    """Remove what lies in a folder by its name."""
    for name in os.listdir(folder_fd):
        remove(name, dir_fd=folder_fd)


class Index:
    """The LMDB environment of a store.

    Args:
        path: the folder of the index.
        sync: whether each change is flushed to the device.
        retentions: see below.
        access: with anything but `write` nothing is made, locked or changed.

    Attributes:
        retentions: the names of retention policies, by the numbers that the records have.
        emptied: scopes of payload keys that have lost their last block since somebody took them
            from here.
    """

    def __init__(
        self,
        path: str,
        *,
        sync: bool = False,
        retentions: Retentions = NO_RETENTIONS,
        access: Access = "write",
    ) -> None:
        self.path = path
        self.sync = sync
        self.retentions = retentions
        self.emptied = set[bytes]()
        self._opened: Any = None  # the environment and its databases
        self._data_fd = -1
        self._writes = access == "write"
        self.thread = OwningThread()  # makes every change
        self._changing = threading.Lock()
        with storage_errors(path):
            check_address_space(f"the index at `{path}`", _OPTIONS["map_size"])
            if self._writes:
                self._open()
            elif access == "none" or not self._look():
                self._data_fd = os.memfd_create("tieredkv-no-index", os.MFD_CLOEXEC)
                env = _open_alone(self._data_fd, map_size=_EMPTY_BYTES)
                self._opened = env, {name: env.open_db(name.encode()) for name in NAMES}

    def _open(self) -> None:
        store = os.path.dirname(os.path.abspath(self.path))
        with ExitStack() as folders, ExitStack() as undo:
            store_fd = folders.enter_context(_folder_fd(store))
            index_fd = folders.enter_context(_folder_fd(self.path, store_fd))
            is_empty = read_meta(self.path) is None
            self._data_fd = open_own(DATA_FILE, os.O_RDWR | os.O_CREAT, dir_fd=index_fd)
            undo.callback(os.close, self._data_fd)
            if is_empty:
                os.ftruncate(self._data_fd, 0)  # LMDB refuses a file of zeroes
            env = self._open_through_links(store, store_fd, index_fd)
            undo.callback(env.close)
            # NOTE: the file is given its full length. Otherwise, reading a page that a short file
            # lacks would raise SIGBUS; now it reads as damage. A short file alone is no damage,
            # because pages that were never written may be missing. Bytes behind the last page are
            # empty, and cutting them off saves room in a copied file.
            os.ftruncate(self._data_fd, end := _end_bytes(env))
            os.ftruncate(self._data_fd, end + 2 * _AHEAD_BYTES)  # as `keep_ahead` would
            num_there = env.stat()["entries"]
            dbs = {name: env.open_db(name.encode()) for name in NAMES}
            self._is_complete(env, dbs, num_there)
            self._opened = env, dbs
            undo.pop_all()

    def _open_through_links(self, store: str, store_fd: int, index_fd: int) -> Any:
        """Open the environment with LMDB's lock file in memory; only this process uses it.

        LMDB writes to a map of the lock file. On a filesystem without room for a changed page, such
        as a full btrfs, that write would raise SIGBUS. LMDB finds the file in memory through a
        folder of two links. A filesystem without symbolic links, such as FAT, sets room aside for
        every page of a file that grows, so there the lock file beside the data file will do.
        """
        options = _OPTIONS | {"mode": 0o600, "sync": self.sync, "metasync": False}
        lock_fd = os.memfd_create("tieredkv-readers", os.MFD_CLOEXEC)
        try:
            files = {DATA_FILE: self._data_fd, _LOCK_FILE: lock_fd}
            with _links_to(files, store, store_fd) as path:
                return lmdb.open(path, **options)
        except OSError as error:  # LMDB's own errors are none of these
            if error.errno not in _NO_LINKS:
                raise
            return lmdb.open(f"/proc/self/fd/{index_fd}", **options)
        finally:
            os.close(lock_fd)

    def _look(self) -> bool:
        """Open the file read-only and without LMDB's lock; return False if nothing was completed.

        A page that the file lacks would end the process with SIGBUS, so the pages of a file that is
        too short are checked first. What else a damaged page may do to LMDB, it does to the process
        of the look, and the next look leaves the index alone.
        """
        with ExitStack() as undo:
            try:
                fd = open_own(os.path.join(self.path, DATA_FILE))
            except FileNotFoundError:
                return False
            undo.callback(os.close, fd)
            if read_meta(self.path) is None:
                return False
            env = _open_alone(fd, readonly=True)
            undo.callback(env.close)
            if _end_bytes(env) > os.fstat(fd).st_size:
                check_pages(self.path)
            dbs = dict[str, Any]()
            for name in NAMES:
                with suppress(lmdb.NotFoundError):
                    dbs[name] = env.open_db(name.encode(), create=False)
            if not self._is_complete(env, dbs, len(dbs)):
                return False
            self._data_fd, self._opened = fd, (env, dbs)
            undo.pop_all()
            return True

    def _is_complete(self, env: Any, dbs: dict[str, Any], num_there: int) -> bool:
        """Return whether the index was ever completed, and refuse one that has lost a database."""
        with env.begin() as txn:
            data = txn.get(META_KEY, db=dbs["meta"]) if "meta" in dbs else None
        is_complete = data is not None and bool(decode_meta(data).format)
        if is_complete and num_there < len(NAMES):
            raise CorruptIndexError(f"the index at `{self.path}` has lost a database")
        return is_complete

    @contextmanager
    def reading(self) -> Iterator[IndexTxn]:
        """Open a transaction that reads one consistent state of the index.

        Raises:
            StorageError: the index is closed, or LMDB failed (`tieredkv.storage.index.verdicts`).
        """
        if self._opened is None:
            raise StorageError(errno.EBADF, f"the index at `{self.path}` is closed")
        env, dbs = self._opened
        with storage_errors(self.path), env.begin() as txn:
            yield IndexTxn(txn, dbs, self.retentions)

    @contextmanager
    @owned_by("thread")
    def writing(self) -> Iterator[IndexTxn]:
        """Change the index in one transaction, which is undone if anything raises."""
        env, dbs = self._opened
        with self._changing, storage_errors(self.path), env.begin(write=True) as txn:
            self.keep_ahead()
            changes = IndexTxn(txn, dbs, self.retentions)
            yield changes
            changes.keep()
        self.emptied |= changes.emptied

    def keep_ahead(self, num_bytes: int = _AHEAD_BYTES) -> None:
        """Keep the file's length `num_bytes` beyond its last page; the extra bytes take no space.

        LMDB then never makes the file grow by writing at its end. Some filesystems (XFS) give a
        file that grows that way far more space than was written, which the store cannot plan for.
        """
        end = _end_bytes(self._opened[0]) + num_bytes
        if end > os.fstat(self._data_fd).st_size:
            os.ftruncate(self._data_fd, end + _AHEAD_BYTES)

    def reading_ahead(self) -> Iterator[bool]:
        """Read all pages and fill LMDB's map, so that the first lookups wait for no page.

        Yields after each short step whether all tree pages read in it lie where their numbers say.
        Bytes behind the last page are left out: in a tmpfs they would take up room, and somebody
        else may have made the file longer.
        """
        path = os.path.join(self.path, DATA_FILE)
        with self.reading():
            page_bytes = self._opened[0].stat()["psize"]  # more than 4 KiB on some machines
            end = _end_bytes(self._opened[0])
        with suppress(OSError), open(open_own(path), "rb", buffering=0) as file:
            for start in range(0, end, _READ_AHEAD_BYTES):
                data = os.pread(file.fileno(), min(_READ_AHEAD_BYTES, end - start), start)
                pages = np.frombuffer(data, _PAGE, len(data) // PAGE_BYTES)
                pages = pages[:: page_bytes // PAGE_BYTES]
                places = start // page_bytes + np.arange(len(pages))
                is_tree = (pages["flags"] - 1 < 2) & (pages["lower"] >= _PAGE_HEADER_BYTES)
                is_tree &= (pages["lower"] <= pages["upper"]) & (pages["upper"] <= page_bytes)
                yield not np.any(is_tree & (pages["number"] != places))
            with open("/proc/self/maps") as maps:
                for line in maps:
                    if line.rstrip().endswith(os.path.realpath(path)):
                        at = ctypes.c_void_p(int(line.partition("-")[0], 16))
                        # Older kernels refuse this advice; pages are then read when first used.
                        ctypes.CDLL(None).madvise(at, ctypes.c_size_t(end), _MADV_POPULATE_READ)

    def looking_over(self) -> Iterator[bool]:
        """Check the index in short steps: first the order of keys, last the counters.

        Yields after each step whether that step found no fault. No transaction outlives its step,
        so blocks may change between steps. The number of keys is compared only if the index did not
        change during the walk.
        """
        for name in ("blocks", *ORDERS):
            start, num_keys, states = b"", 0, set[int]()
            while True:
                with self._changing, self.reading() as txn:
                    keys, num_entries, state = txn.some_keys(name, start, _LOOKED_OVER_KEYS)
                states.add(state)
                num_keys += len(keys)
                if not keys:
                    break
                yield all(key < other for key, other in pairwise([start, *keys]))
                start = keys[-1] + b"\0"
            yield num_keys == num_entries or len(states) > 1
        with self._changing, self.reading() as txn:
            is_sound = not txn.contradictions()
        yield is_sound

    def is_sound(self, is_over: threading.Event) -> bool:
        """Read the index into memory and check its consistency, beside the store's other work.

        Pages that swapped places break no checksum, but blocks in them may not be found. Checking
        competes with lookups for the interpreter's lock, so a pause follows each of its steps.

        Args:
            is_over: set to end the check early, as if nothing were wrong.

        Raises:
            StorageError: the index cannot be read.
        """
        for steps, pauses in (self.reading_ahead(), 0), (self.looking_over(), _PAUSES):
            begin = time.monotonic()
            for is_sound in steps:
                if not is_sound:
                    return False
                if is_over.wait(min(pauses * (time.monotonic() - begin), _MAX_PAUSE_S)):
                    return True
                begin = time.monotonic()
        return True

    @owned_by("thread")
    def become(self, draft: "Index") -> None:
        """Take over the environment of `draft`, whose folder has replaced this one's.

        Running read transactions finish on the old environment, which closes after the last one.
        """
        os.close(self._data_fd)
        self._opened, self._data_fd = draft._opened, draft._data_fd

    def file_bytes(self) -> int:
        """Return how many bytes the index file occupies on disk."""
        return os.fstat(self._data_fd).st_blocks * 512

    def most_records(self) -> int:
        """Return how many records the file has room for, however many a forged tree leads to."""
        return os.fstat(self._data_fd).st_size // RECORD_BYTES

    def used_bytes(self) -> int:
        """Return the bytes of all pages in use, without the free list."""
        with self.reading() as txn:
            return txn.used_bytes()

    @owned_by("thread")
    def flush(self) -> None:
        """Flush every change so far to the device."""
        with storage_errors(self.path):
            self._opened[0].sync(True)

    def close(self) -> None:
        """Flush and close the environment; may be called again."""
        if self._opened is None:
            return
        env, _ = self._opened
        if self._writes:
            self.flush()
            with suppress(OSError):  # the length kept ahead is not needed any more
                os.ftruncate(self._data_fd, _end_bytes(env))
        env.close()
        os.close(self._data_fd)
        self._opened, self._data_fd = None, -1


def _open_alone(fd: int, **options: Any) -> Any:
    """Open the environment in an open file, without LMDB's lock file."""
    path = f"/proc/self/fd/{fd}"
    return lmdb.open(path, subdir=False, lock=False, create=False, **(_OPTIONS | options))


def _end_bytes(env: Any) -> int:
    """Return the file offset at which the last page ends that was ever used."""
    return int((env.info()["last_pgno"] + 1) * env.stat()["psize"])
