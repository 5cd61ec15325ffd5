"""Damages the files of a store from outside: it flips bits, cuts files and puts back older copies.

This module knows files and offsets. It does not know where a block lies or which process serves the
store.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path

_PAGE = 4096
_WINDOW_BYTES = 64 << 20
_TRIES = 64

INDEX_KINDS = ("index-flips", "index-cuts")
KINDS = ("segment-flips", "segment-cuts", "old-segments", *INDEX_KINDS)


class Faults:
    """Damages the files of one store."""

    def __init__(self, store: Path, seed: int) -> None:
        self._store = store
        self._random = random.Random(seed)
        self._copy: tuple[Path, int, bytes] | None = None

    def inject(self, kind: str) -> int:
        """Do one kind of damage; return how many bits, files or pages were changed."""
        act: Callable[[], int] = {
            "segment-flips": lambda: self._flip(self._segment(), self._random.randint(1, 16)),
            "index-flips": lambda: self._flip(self._index, self._random.randint(1, 8)),
            "segment-cuts": lambda: self._cut(self._segment(), self._random.random()),
            "index-cuts": lambda: self._cut(self._index, self._random.choice([0.0, 0.5, 0.9])),
            "old-segments": self._put_back,
        }[kind]
        try:
            return act()
        except FileNotFoundError:  # the store removed it meanwhile
            return 0

    def copy(self) -> None:
        """Copy the present content of a segment, 64 MiB of it at most, for `old-segments`."""
        try:
            path = self._segment()
            with path.open("rb") as file:
                num_windows = max(1, path.stat().st_size // _WINDOW_BYTES)
                start = self._random.randrange(num_windows) * _WINDOW_BYTES
                file.seek(start)
                self._copy = path, start, file.read(_WINDOW_BYTES)
        except FileNotFoundError:
            return

    @property
    def _index(self) -> Path:
        return self._store / "index" / "data.mdb"

    def _segment(self) -> Path:
        """Choose a segment; a larger one is chosen more often.

        Raises:
            FileNotFoundError: there is none.
        """
        sizes = {path: path.stat().st_size for path in (self._store / "segments").iterdir()}
        if not sum(sizes.values()):
            raise FileNotFoundError("no segment holds anything")
        return self._random.choices(list(sizes), list(sizes.values()))[0]

    def _flip(self, path: Path, count: int) -> int:
        """Flip bits in pages that are not zero; a write into a hole would make the file grow."""
        done = 0
        fd = os.open(path, os.O_RDWR)
        try:
            num_pages = os.fstat(fd).st_size // _PAGE
            for _ in range(_TRIES * count):
                if done == count or not num_pages:
                    break
                at = self._random.randrange(num_pages) * _PAGE
                page = os.pread(fd, _PAGE, at)
                if not any(page):
                    continue
                offset = self._random.randrange(len(page))
                os.pwrite(fd, bytes([page[offset] ^ 1 << self._random.randrange(8)]), at + offset)
                done += 1
            _let_go(fd)
        finally:
            os.close(fd)
        return done

    def _cut(self, path: Path, share: float) -> int:
        """Cut a file to a share of its length, in whole pages."""
        size = path.stat().st_size
        os.truncate(path, int(size * share) // _PAGE * _PAGE)
        return int(size > 0)

    def _put_back(self) -> int:
        """Put the content that `copy` has taken back into its segment."""
        if self._copy is None:
            return 0
        path, start, old = self._copy
        self._copy = None
        num_changed = 0
        fd = os.open(path, os.O_RDWR)
        try:
            for at in range(0, min(len(old), os.fstat(fd).st_size - start), _PAGE):
                page = old[at : at + _PAGE]
                if os.pread(fd, len(page), start + at) != page:
                    os.pwrite(fd, page, start + at)
                    num_changed += 1
            _let_go(fd)
        finally:
            os.close(fd)
        return num_changed


def _let_go(fd: int) -> None:
    """Drop a file from the page cache, so that no page of it is written back over later bytes."""
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
