"""The LMDB environment of a store: opens the index, and begins its transactions.

This module knows the index's file: how it is opened, how long it is, how it is read ahead, checked
and compacted. `tieredkv.storage.index_txn` knows what is in it.

One thread makes all changes and any thread may read; neither waits for the other. Only
`looking_over`, which reads the whole index, takes turns with changes: LMDB cannot reuse a page
while a read transaction is open that began before the page was released.
"""

import ctypes
import errno
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape, glob
from itertools import pairwise
from typing import Any

import lmdb
import numpy as np

from tieredkv.errors import StorageError
from tieredkv.storage.index_entries import NAMES, ORDERS
from tieredkv.storage.index_pages import DATA_FILE, Part, read_meta, read_part
from tieredkv.storage.index_txn import IndexTxn
from tieredkv.storage.limits import check_address_space
from tieredkv.storage.verdicts import storage_errors

MAP_BYTES = 64 << 30
_LIB_VERSION = 0  # selects the version of LMDB that writes `index_pages.DATA_VERSION`
_COMPACTED = "compact.mdb"
_LOCK_FILE = "lock.mdb"
_AHEAD_BYTES = 2 << 20  # more than one ordinary transaction adds to the file
PAGE_BYTES = 4096
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


def _remove_links(folder: str) -> None:
    """Remove the temporary folder of an opening; this takes no file descriptor."""
    with suppress(OSError):
        for name in (DATA_FILE, _LOCK_FILE):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


class Index:
    """The LMDB environment of a store."""

    def __init__(self, path: str, *, sync: bool) -> None:
        self.path = path
        self.sync = sync
        self._opened: Any = None
        self._file_end = 0
        self._changing = threading.Lock()
        self._open()

    def _open(self) -> None:
        with storage_errors(self.path):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, _COMPACTED))
            read_meta(self.path)
            check_address_space(f"the index at `{self.path}`", MAP_BYTES)
            env = self._open_beside(
                max_dbs=len(NAMES),
                map_size=MAP_BYTES,
                mode=0o600,
                readahead=False,
                sync=self.sync,
                metasync=False,
                lib_version=_LIB_VERSION,
            )
            try:
                # NOTE: the file is given its full length. Otherwise, reading a page that a short
                # file lacks would raise SIGBUS; now it reads as damage. A short file alone is no
                # damage, because pages that were never written may be missing. Bytes behind the
                # last page are empty, and cutting them off saves room in a copied file.
                size = self._end_bytes(env)
                os.truncate(os.path.join(self.path, DATA_FILE), size)
                self._file_end, self._opened = size, (env, dict[str, Any]())
                self.keep_ahead()
                self._opened = env, {name: env.open_db(name.encode()) for name in NAMES}
            except BaseException:
                env.close()
                raise

    def _open_beside(self, **options: Any) -> Any:
        """Open the environment with LMDB's lock file in memory; only this process uses it.

        LMDB writes to a map of the lock file. On a filesystem without room for a changed page, such
        as a full btrfs, that write would raise SIGBUS. LMDB finds the file in memory through a
        temporary folder of two links. The folder's name names the store, which one process at a
        time may open, so any such folder that is there is one of a process that was killed.
        """
        store = os.stat(os.path.dirname(os.path.abspath(self.path)))
        prefix = f"tieredkv-index-{store.st_dev:x}-{store.st_ino:x}-"
        for left in glob(os.path.join(escape(tempfile.gettempdir()), f"{prefix}*")):
            _remove_links(left)
        lock_fd = os.memfd_create("tieredkv-readers", os.MFD_CLOEXEC)
        try:
            folder = tempfile.mkdtemp(prefix=prefix)
            try:
                data = os.path.join(os.path.abspath(self.path), DATA_FILE)
                os.symlink(data, os.path.join(folder, DATA_FILE))
                os.symlink(f"/proc/self/fd/{lock_fd}", os.path.join(folder, _LOCK_FILE))
                return lmdb.open(folder, **options)
            finally:
                _remove_links(folder)
        finally:
            os.close(lock_fd)

    @contextmanager
    def reading(self) -> Iterator[IndexTxn]:
        """Open a transaction that reads one consistent state of the index.

        Raises:
            StorageError: the index is closed, or LMDB failed; see `tieredkv.storage.verdicts`.
        """
        if self._opened is None:
            raise StorageError(errno.EBADF, f"the index at `{self.path}` is closed")
        env, dbs = self._opened
        with storage_errors(self.path), env.begin() as txn:
            yield IndexTxn(txn, dbs)

    @contextmanager
    def writing(self) -> Iterator[IndexTxn]:
        """Change the index in one transaction, which is undone if anything raises."""
        env, dbs = self._opened
        with self._changing, storage_errors(self.path), env.begin(write=True) as txn:
            self.keep_ahead()
            changes = IndexTxn(txn, dbs)
            yield changes
            changes.keep_meta()

    def part(self, database: str, key: bytes) -> Part:
        """Read thousands of values of a database at once; see `index_pages.read_part`."""
        with self._changing, storage_errors(self.path):
            return read_part(self.path, database, key)

    def keep_ahead(self, num_bytes: int = _AHEAD_BYTES) -> None:
        """Keep the file's length `num_bytes` beyond its last page; the extra bytes take no space.

        LMDB then never makes the file grow by writing at its end. Some filesystems (XFS) give a
        file that grows that way far more space than was written, which the store cannot plan for.
        """
        end = self._end_bytes(self._opened[0]) + num_bytes
        if end > self._file_end:
            self._file_end = end + _AHEAD_BYTES
            os.truncate(os.path.join(self.path, DATA_FILE), self._file_end)

    @staticmethod
    def _end_bytes(env: Any) -> int:
        """Return the file offset at which the last page ends that was ever used."""
        return int((env.info()["last_pgno"] + 1) * env.stat()["psize"])

    def reading_ahead(self) -> Iterator[bool]:
        """Read the whole file and fill LMDB's map, so that the first lookups wait for no page.

        Yields after each short step whether all tree pages read in it lie where their numbers say.
        """
        path, first_page = os.path.join(self.path, DATA_FILE), 0
        with self.reading():
            page_bytes = self._opened[0].stat()["psize"]  # more than 4 KiB on some machines
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            while data := file.read(_READ_AHEAD_BYTES):
                pages = np.frombuffer(data, _PAGE, len(data) // PAGE_BYTES)
                pages = pages[:: page_bytes // PAGE_BYTES]
                places = np.arange(first_page, first_page := first_page + len(pages))
                is_tree = (pages["flags"] - 1 < 2) & (pages["lower"] >= _PAGE_HEADER_BYTES)
                is_tree &= (pages["lower"] <= pages["upper"]) & (pages["upper"] <= page_bytes)
                yield not np.any(is_tree & (pages["number"] != places))
            # NOTE: bytes behind the last page are left out: in a tmpfs they would take up room.
            size = ctypes.c_size_t(self._end_bytes(self._opened[0]))
            with open("/proc/self/maps") as maps:
                for line in maps:
                    if line.rstrip().endswith(os.path.realpath(path)):
                        start = ctypes.c_void_p(int(line.partition("-")[0], 16))
                        # Older kernels refuse this advice; pages are then read when first used.
                        ctypes.CDLL(None).madvise(start, size, _MADV_POPULATE_READ)

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

    def compact(self) -> None:
        """Replace the index file by a copy without unused pages; no transaction may be open."""
        draft = os.path.join(self.path, _COMPACTED)
        with storage_errors(self.path):
            fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            try:
                os.fchmod(fd, 0o600)
                os.ftruncate(fd, self.used_bytes())  # see `keep_ahead`
                self._opened[0].copyfd(fd, compact=True)
                os.fsync(fd)
            except BaseException:
                os.unlink(draft)
                raise
            finally:
                os.close(fd)
            self._opened[0].close()
            os.rename(draft, os.path.join(self.path, DATA_FILE))
        self._open()

    def become(self, draft: "Index") -> None:
        """Take over the environment of `draft`, whose folder has replaced this one's.

        Running read transactions finish on the old environment, which closes after the last one.
        """
        self._opened, self._file_end = draft._opened, draft._file_end

    def file_bytes(self) -> int:
        """Return how many bytes the index file occupies on disk."""
        return os.stat(os.path.join(self.path, DATA_FILE)).st_blocks * 512

    def used_bytes(self) -> int:
        """Return the size of a compacted copy: the pages in use, without the free list."""
        with self.reading() as txn:
            return txn.used_bytes()

    def flush(self) -> None:
        """Flush every change so far to the device."""
        with storage_errors(self.path):
            self._opened[0].sync(True)

    def close(self) -> None:
        """Flush and close the environment; may be called again."""
        if self._opened is not None:
            self.flush()
            size = self._end_bytes(self._opened[0])
            self._opened[0].close()
            self._opened = None
            with suppress(OSError):  # the length kept ahead is not needed any more
                os.truncate(os.path.join(self.path, DATA_FILE), size)
