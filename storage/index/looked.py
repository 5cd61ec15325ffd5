"""The index of a stopped store, opened by who only looks: nothing is made, locked or changed.

LMDB maps the file read-only, without its lock file. A page that the file lacks would end the
process with SIGBUS, so the pages of a file that is too short are checked first. What else a damaged
page may do to LMDB, it does to the process of the look, and the next look leaves the index alone.
"""

import os
from contextlib import suppress
from typing import Any

import lmdb

from tieredkv.storage.folder.own_files import open_own
from tieredkv.storage.format.record import Retentions
from tieredkv.storage.index.entries import NAMES, split_expiry_key
from tieredkv.storage.index.environment import LIB_VERSION, MAP_BYTES, Index
from tieredkv.storage.index.pages import DATA_FILE, check_pages, read_meta
from tieredkv.storage.index.verdicts import storage_errors
from tieredkv.wire.limits import check_address_space

_EMPTY_BYTES = 1 << 20


class LookedIndex(Index):
    """An index that cannot be changed.

    Args:
        path: the folder of the index.
        is_read: whether what lies there is read; otherwise this is an empty index in memory.
        retentions: as of `Index`.

    Attributes:
        is_read: as given; False if there is no index, or one that was never completed.
    """

    def __init__(self, path: str, *, is_read: bool, retentions: Retentions) -> None:
        self.is_read = is_read
        super().__init__(path, sync=False, retentions=retentions)
        if self.is_read:
            with self.reading() as txn:
                is_complete = bool(txn.meta.format)
            if not is_complete:
                self._close()
                self.is_read = False
                self._open()

    def _open(self) -> None:
        with storage_errors(self.path):
            found = self._data_file() if self.is_read else None
            self.is_read = found is not None
            fd = os.memfd_create("tieredkv-no-index", os.MFD_CLOEXEC) if found is None else found
            try:
                env = self._open_env(fd)
                try:
                    if self.is_read and self._end_bytes(env) > os.fstat(fd).st_size:
                        check_pages(self.path)
                    is_new = not self.is_read
                    dbs = {name: env.open_db(name.encode(), create=is_new) for name in NAMES}
                except BaseException:
                    env.close()
                    raise
            except BaseException:
                os.close(fd)
                raise
            self._data_fd, self._opened = fd, (env, dbs)

    def _data_file(self) -> int | None:
        """Open the file; None if there is none, or an empty one."""
        with suppress(FileNotFoundError):
            fd = open_own(os.path.join(self.path, DATA_FILE))
            try:
                if read_meta(self.path) is not None:
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        return None

    def _open_env(self, fd: int) -> Any:
        map_bytes = MAP_BYTES if self.is_read else _EMPTY_BYTES
        check_address_space(f"the index at `{self.path}`", map_bytes)
        return lmdb.open(
            f"/proc/self/fd/{fd}",
            subdir=False,
            readonly=self.is_read,
            lock=False,
            create=False,
            max_dbs=len(NAMES),
            map_size=map_bytes,
            readahead=False,
            lib_version=LIB_VERSION,
        )

    def latest_expiry(self) -> float:
        """Return when the last block expires; 0.0 without blocks."""
        env, dbs = self._opened
        with storage_errors(self.path), env.begin() as txn, txn.cursor(db=dbs["expiry"]) as cursor:
            if not cursor.last():
                return 0.0
            return split_expiry_key(cursor.key())[0] / 1e6

    def close(self) -> None:
        """Close the environment; may be called again."""
        if self._opened is not None:
            self._close()
