"""Reads the pages of an LMDB data file without LMDB.

LMDB maps the file and trusts what it finds there, so a damaged page can end the process. Pages are
read here with `pread` and checked before they are used, to find the file's version and any damage.
This module knows the layout of LMDB's data version 1, not the meaning of the entries.
"""

import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from mmap import PAGESIZE
from typing import Any, NamedTuple

from tieredkv.errors import CorruptIndexError, FormatVersionError
from tieredkv.own_files import open_own

DATA_VERSION = 1
"""The data version that LMDB 0.9 writes."""

DATA_FILE = "data.mdb"
MAP_BYTES = 64 << 30
"""The size of LMDB's map, which no index outgrows."""

_MAGIC = 0xBEEFC0DE
_NO_ROOT = (1 << 64) - 1
_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
_BIG, _DATABASE = 1, 2  # flags of a leaf's entry: its data has pages of its own; it is a tree
_PAGE_HEADER = struct.Struct("<QHHHH")  # number, unused, flags, end of the pointers, first entry
_NUM_OVERFLOW_PAGES = struct.Struct("<12xI")
_NODE_HEADER = struct.Struct("<HHHH")  # data size or page number, low and high; flags; key size
_META_HEADER = struct.Struct("<II16x")  # magic, version; it follows the page's header
_TREE = struct.Struct("<IHHQQQQQ")  # page size, flags, depth; pages of 3 kinds, entries, root
_META_TAIL = struct.Struct("<QQ")  # last page, transaction
_META_AT, _TREES_AT = _PAGE_HEADER.size, _PAGE_HEADER.size + _META_HEADER.size
_TAIL_AT = _TREES_AT + 2 * _TREE.size
_META_END = _TAIL_AT + _META_TAIL.size
_SNIFFED_BYTES = 128  # later versions have longer page headers before the magic number
_MOST_UNWRITTEN_BYTES = 64 << 20  # a file may be this much shorter than its meta page says
_MAX_DEPTH = 32  # the deepest tree that LMDB's cursors can walk


class Tree(NamedTuple):
    """The root record of one tree, which is stored in a meta page or in the main tree."""

    page_bytes: int
    flags: int
    depth: int
    num_branches: int
    num_leaves: int
    num_overflow_pages: int
    num_entries: int
    root: int


class MetaPage(NamedTuple):
    """The content of a meta page."""

    free: Tree
    main: Tree
    last_page: int
    transaction: int


Node = tuple[int, int, int, bytes, int]
"""An entry of a page: its size or the page below it (low, high); flags, key, start of the data."""


def read_meta(folder: str) -> MetaPage | None:
    """Read the newer meta page of the data file in a folder; return None if the file is empty.

    A file counts as empty, too, if a power loss has left zeroes of a page that a new file has.

    Raises:
        FormatVersionError: another version of LMDB wrote the file.
        CorruptIndexError: the file is not LMDB's, or its meta page holds impossible values.
        OSError: the file cannot be read.
    """
    path = os.path.join(folder, DATA_FILE)
    with open(open_own(path), "rb", buffering=0) as file:
        fd, size_bytes = file.fileno(), os.fstat(file.fileno()).st_size
        if not size_bytes or _lost_its_beginning(path, fd):
            return None
        first = _parse_meta(path, os.pread(fd, _META_END, 0))
        other = _parse_meta(path, os.pread(fd, _META_END, first.free.page_bytes))
    newest = max(first, other, key=lambda meta: meta.transaction)
    claimed_bytes = newest.last_page * newest.free.page_bytes
    # LMDB would map them all.
    if claimed_bytes > min(size_bytes + _MOST_UNWRITTEN_BYTES, MAP_BYTES):
        what = f"the meta page of `{path}` claims {newest.last_page} pages"
        raise CorruptIndexError(f"{what}, more than fit into the file")
    return newest


def _lost_its_beginning(path: str, fd: int) -> bool:
    """Return whether the pages that LMDB gives to a new file did not all reach the device.

    They are flushed with the first transaction. Later, a page is written in the place of an older
    one, so none becomes zeroes, and one of them names a root.
    """
    pages = [os.pread(fd, _META_END, at) for at in (0, PAGESIZE)]
    written = [page for page in pages if any(page)]
    if len(written) == len(pages):
        return False
    return all(_parse_meta(path, page).main.root == _NO_ROOT for page in written)


def _parse_meta(path: str, page: bytes) -> MetaPage:
    for at in range(_META_AT, len(page[:_SNIFFED_BYTES]) - 7, 4):
        magic, version = struct.unpack_from("<II", page, at)
        if magic == _MAGIC:
            break
    else:
        raise CorruptIndexError(f"a meta page of `{path}` does not have LMDB's magic number")
    if version != DATA_VERSION:
        raise FormatVersionError(
            f"the index at `{path}` has LMDB data version {version}, but this tieredkv reads "
            f"{DATA_VERSION}; it was left untouched: use the tieredkv that wrote it, or choose "
            "another folder"
        )
    if at != _META_AT or len(page) < _META_END or not _PAGE_HEADER.unpack_from(page)[2] & _META:
        raise CorruptIndexError(f"a meta page of `{path}` is damaged")
    free, main = map(Tree._make, _TREE.iter_unpack(page[_TREES_AT:_TAIL_AT]))
    size = free.page_bytes
    if not 4096 <= size <= 1 << 16 or size & (size - 1):
        raise CorruptIndexError(f"a meta page of `{path}` says that pages have {size} bytes")
    return MetaPage(free, main, *_META_TAIL.unpack_from(page, _TAIL_AT))


def check_pages(folder: str) -> None:
    """Walk over every tree of a data file and check that its pages fit together.

    No process may have the file open. All pages in use are read once, which takes about ten seconds
    for a million blocks.

    Raises:
        FormatVersionError, CorruptIndexError, OSError: as `read_meta`; CorruptIndexError also where
            pages do not fit together.
    """
    if (meta := read_meta(folder)) is None:
        return
    path = os.path.join(folder, DATA_FILE)
    with open(open_own(path), "rb", buffering=0) as file:
        try:
            _Pages(file.fileno(), meta).check()
        except CorruptIndexError as error:
            raise CorruptIndexError(f"the index at `{path}` is damaged: {error}") from None


def count_entries(folder: str, database: str) -> int:
    """Return how many entries a database has, by its root record.

    Raises:
        FormatVersionError, CorruptIndexError, OSError: as `check_pages`.
    """
    if (meta := read_meta(folder)) is None:
        return 0
    with open(open_own(os.path.join(folder, DATA_FILE)), "rb", buffering=0) as file:
        trees = dict(_Pages(file.fileno(), meta).trees())
    _expect(database.encode() in trees, 0, "describes a main tree that lacks a database")
    return trees[database.encode()].num_entries


class _Pages:
    """The pages of one file, with a mark on each page met; no page may be met twice."""

    def __init__(self, fd: int, meta: MetaPage) -> None:
        self._fd = fd
        self._meta = meta
        self._size = meta.free.page_bytes
        self._is_met = bytearray(meta.last_page + 1)

    def check(self) -> None:
        """Walk over the free list and every database."""
        # The keys of the free list are the numbers of transactions.
        freed = [data for _, data in self._walk(self._meta.free, _number)]
        for _, tree in self.trees():
            is_so = not (tree.page_bytes or tree.flags)  # other kinds of trees have these
            _expect(is_so, tree.root, "is the root of a tree of an unknown kind")
            for _ in self._walk(tree):
                pass
        for data in freed:
            for number in _freed_pages(data):
                self._meet(number)

    def trees(self) -> Iterator[tuple[bytes, Tree]]:
        """Walk over the names and root records of the databases."""
        for name, data in self._walk(self._meta.main, is_main=True):
            yield name, Tree(*_TREE.unpack(data))

    def _meet(self, number: int) -> None:
        _expect(2 <= number <= self._meta.last_page, number, "is outside of the file")
        _expect(not self._is_met[number], number, "is used twice")
        self._is_met[number] = 1

    def _read(self, number: int, num_pages: int = 1) -> bytes:
        for each in range(number, number + num_pages):
            self._meet(each)
        page = os.pread(self._fd, num_pages * self._size, number * self._size)
        _expect(len(page) == num_pages * self._size, number, "is missing")
        _expect(_PAGE_HEADER.unpack_from(page)[0] == number, number, "has another page's number")
        return page

    def _walk(
        self, tree: Tree, order_of: Callable[[bytes], Any] = bytes, *, is_main: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Walk over the entries of a tree in order; each page is checked before it is used.

        Args:
            tree: the root record of the tree.
            order_of: returns what keys are sorted by.
            is_main: whether its entries are the root records of the databases.
        """
        if tree.root == _NO_ROOT:
            _expect(not tree.num_entries, 0, "describes a tree that has entries but no root")
            return
        _expect(tree.depth <= _MAX_DEPTH, tree.root, "is the root of a tree that is too deep")
        num_pages, num_entries, last = Counter[int](), 0, None
        todo: list[tuple[int, int, Any]] = [(tree.root, 1, None)]  # page, depth, its least key
        while todo:
            number, depth, least = todo.pop()
            page = self._read(number)
            kind = _PAGE_HEADER.unpack_from(page)[2]
            wanted = _LEAF if depth == tree.depth else _BRANCH
            _expect(kind == wanted, number, f"is of kind {kind} instead of {wanted}")
            num_pages[kind] += 1
            nodes = _nodes(page, number)
            if kind == _BRANCH:
                _expect(bool(nodes), number, "is a branch without entries")
                below = [
                    (low | high << 16 | top << 32, depth + 1, order_of(key))
                    for low, high, top, key, _ in nodes
                ]
                below[0] = (below[0][0], depth + 1, least)  # it has no key of its own
                todo += reversed(below)
                continue
            for low, high, flags, key, at in nodes:
                order = order_of(key)
                is_next = (last is None or last < order) and (least is None or least <= order)
                _expect(is_next, number, "has keys out of order")
                last, num_entries = order, num_entries + 1
                size = low | high << 16
                is_tree = flags == _DATABASE and size == _TREE.size
                _expect(is_tree if is_main else flags in (0, _BIG), number, "has an invalid entry")
                end = at + (8 if flags == _BIG else size)
                _expect(end <= self._size, number, "has an entry beyond its end")
                data = page[at:end]
                if flags == _BIG:
                    data = self._read_big(_number(data), size, num_pages)
                yield key, data
        found = [num_pages[kind] for kind in (_BRANCH, _LEAF, _OVERFLOW)] + [num_entries]
        is_so = found == [*tree[3:7]]
        _expect(is_so, tree.root, "is the root of a tree of other numbers of pages or entries")

    def _read_big(self, number: int, size: int, num_pages: Counter[int]) -> bytes:
        """Read the data of an entry that is stored in pages of its own."""
        num = -(-(_PAGE_HEADER.size + size) // self._size)
        page = self._read(number, num)
        is_so = _PAGE_HEADER.unpack_from(page)[2] == _OVERFLOW
        is_so &= _NUM_OVERFLOW_PAGES.unpack_from(page)[0] == num
        _expect(is_so, number, "does not hold the large entry that belongs there")
        num_pages[_OVERFLOW] += num
        return page[_PAGE_HEADER.size :][:size]


def _nodes(page: bytes, number: int) -> list[Node]:
    """Split a page into its entries."""
    _, _, _, lower, upper = _PAGE_HEADER.unpack_from(page)
    is_so = _PAGE_HEADER.size <= lower <= upper <= len(page) and lower % 2 == 0
    _expect(is_so, number, "has an invalid header")
    num_nodes = (lower - _PAGE_HEADER.size) // 2
    nodes = []
    for at in struct.unpack_from(f"<{num_nodes}H", page, _PAGE_HEADER.size):
        _expect(upper <= at <= len(page) - _NODE_HEADER.size, number, "has an invalid offset")
        low, high, flags, key_bytes = _NODE_HEADER.unpack_from(page, at)
        start = at + _NODE_HEADER.size
        _expect(start + key_bytes <= len(page), number, "has a key beyond its end")
        nodes.append((low, high, flags, page[start : start + key_bytes], start + key_bytes))
    return nodes


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _freed_pages(data: bytes) -> tuple[int, ...]:
    """Decode the numbers of the pages that one transaction freed; their count comes first."""
    count = len(data) // 8 - 1
    is_so = len(data) % 8 == 0 and count >= 0 and _number(data[:8]) == count
    _expect(is_so, 0, "has a free list that contradicts itself")
    return struct.unpack_from(f"<{count}Q", data, 8)


def _expect(is_so: bool, number: int, what: str) -> None:
    if not is_so:
        raise CorruptIndexError(f"page {number} {what}")
