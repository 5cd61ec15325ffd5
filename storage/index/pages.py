"""Reads the pages of an LMDB data file without LMDB.

LMDB maps the file and trusts what it finds there, so a damaged page can end the process. Pages are
read here with `pread` and checked before they are used, to find the file's version and any damage.
This module knows the layout of LMDB's data version 1, not the meaning of the entries.
"""

import os
import struct
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from tieredkv.errors import CorruptIndexError, FormatVersionError
from tieredkv.storage.folder.own_files import open_own

DATA_VERSION = 1
"""The data version that LMDB 0.9 writes."""

DATA_FILE = "data.mdb"
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
_META_END = _TREES_AT + 2 * _TREE.size + _META_TAIL.size
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


class Meta(NamedTuple):
    """The content of a meta page."""

    free: Tree
    main: Tree
    last_page: int
    transaction: int


def read_meta(folder: str) -> Meta | None:
    """Read the newer meta page of the data file in a folder; return None if the file is empty.

    Raises:
        FormatVersionError: another version of LMDB wrote the file.
        CorruptIndexError: the file is not LMDB's, or its meta page holds impossible values.
        OSError: the file cannot be read.
    """
    path = os.path.join(folder, DATA_FILE)
    with open(open_own(path), "rb", buffering=0) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if not size_bytes:
            return None
        first = _parse_meta(path, os.pread(file.fileno(), _META_END, 0))
        other = os.pread(file.fileno(), _META_END, first.free.page_bytes)
        newest = max(first, _parse_meta(path, other), key=lambda meta: meta.transaction)
    claimed_bytes = newest.last_page * first.free.page_bytes
    if claimed_bytes > size_bytes + _MOST_UNWRITTEN_BYTES:  # LMDB would map them all
        what = f"the meta page of `{path}` claims {newest.last_page} pages"
        raise CorruptIndexError(f"{what}, more than fit into the file")
    return newest


def _parse_meta(path: str, page: bytes) -> Meta:
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
    free, main = (Tree(*_TREE.unpack_from(page, _TREES_AT + n * _TREE.size)) for n in range(2))
    last_page, transaction = _META_TAIL.unpack_from(page, _META_END - _META_TAIL.size)
    size = free.page_bytes
    if not 256 <= size <= 1 << 16 or size & (size - 1):
        raise CorruptIndexError(f"a meta page of `{path}` says that pages have {size} bytes")
    return Meta(free, main, last_page, transaction)


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
        pages = _Pages(file.fileno(), meta)
        try:
            pages.check()
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
        return _Pages(file.fileno(), meta).tree(database.encode()).num_entries


class _Pages:
    """The pages of one file, with a mark on each page met; no page may be met twice."""

    def __init__(self, fd: int, meta: Meta) -> None:
        self._fd = fd
        self._meta = meta
        self._size = meta.free.page_bytes
        self._is_met = bytearray(meta.last_page + 1)

    def check(self) -> None:
        """Walk over the free list and every database."""
        lists = [data for _, data in self._walk(self._meta.free, has_numbers=True)]
        for _, data in self._walk(self._meta.main, is_main=True):
            tree = Tree(*_TREE.unpack(data))
            is_so = not (tree.page_bytes or tree.flags)  # other kinds of trees have these
            _expect(is_so, tree.root, "is the root of a tree of an unknown kind")
            for _ in self._walk(tree):
                pass
        for number in chain(*map(_ids, lists)):
            self._meet(number)

    def tree(self, database: bytes) -> Tree:
        """Return the root record of a database."""
        trees = dict(self._walk(self._meta.main, is_main=True))
        _expect(database in trees, 0, "describes a main tree that lacks a database")
        return Tree(*_TREE.unpack(trees[database]))

    def _meet(self, number: int) -> None:
        _expect(2 <= number <= self._meta.last_page, number, "is outside of the file")
        _expect(not self._is_met[number], number, "is used twice")
        self._is_met[number] = 1

    def _read(self, number: int, num_pages: int = 1) -> bytes:
        page = os.pread(self._fd, num_pages * self._size, number * self._size)
        _expect(len(page) == num_pages * self._size, number, "is missing")
        _expect(_PAGE_HEADER.unpack_from(page)[0] == number, number, "has another page's number")
        return page

    def _walk(
        self, tree: Tree, *, has_numbers: bool = False, is_main: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Walk over the entries of a tree in order; each page is checked before it is used.

        Args:
            tree: the root record of the tree.
            has_numbers: whether its keys are transaction numbers, as in the free list.
            is_main: whether its entries are the root records of the databases.
        """
        if tree.root == _NO_ROOT:
            _expect(not tree.num_entries, 0, "describes a tree that has entries but no root")
            return
        _expect(tree.depth <= _MAX_DEPTH, tree.root, "is the root of a tree that is too deep")
        counts = {_BRANCH: 0, _LEAF: 0, _OVERFLOW: 0}
        num_entries, last_key = 0, b""
        todo: list[tuple[int, int, bytes]] = [(tree.root, 1, b"")]
        while todo:
            number, depth, first_key = todo.pop()
            self._meet(number)
            page = self._read(number)
            kind = _PAGE_HEADER.unpack_from(page)[2]
            wanted = _LEAF if depth == tree.depth else _BRANCH
            _expect(kind == wanted, number, f"is of kind {kind} instead of {wanted}")
            counts[kind] += 1
            nodes = _nodes(page, number)
            if kind == _BRANCH:
                children = _children(nodes, number, first_key)
                todo += [(child, depth + 1, key) for child, key in reversed(children)]
                continue
            for low, high, flags, key, at in nodes:
                order = _order(key) if has_numbers else key
                least = _order(first_key) if has_numbers else first_key
                is_next = (last_key < order or not num_entries) and least <= order
                _expect(is_next, number, "has keys out of order")
                last_key, num_entries = order, num_entries + 1
                size = low | high << 16
                is_tree = flags == _DATABASE and size == _TREE.size
                _expect(is_tree if is_main else flags in (0, _BIG), number, "has an invalid entry")
                end = at + (8 if flags == _BIG else size)
                _expect(end <= self._size, number, "has an entry beyond its end")
                data = page[at:end]
                if flags == _BIG:
                    data = self._read_big(data, size, counts)
                yield key, data
        wanted_counts = (tree.num_branches, tree.num_leaves, tree.num_overflow_pages)
        is_so = tuple(counts.values()) == wanted_counts
        _expect(is_so, tree.root, "is the root of a tree whose number of pages is wrong")
        is_so = num_entries == tree.num_entries
        _expect(is_so, tree.root, "is the root of a tree whose number of entries is wrong")

    def _read_big(self, pointer: bytes, size: int, counts: dict[int, int]) -> bytes:
        """Read the data of an entry that is stored in pages of its own."""
        number = int.from_bytes(pointer, "little")
        num_pages = -(-(_PAGE_HEADER.size + size) // self._size)
        _expect(number + num_pages - 1 <= self._meta.last_page, number, "is outside of the file")
        for each in range(number, number + num_pages):
            self._meet(each)
        page = self._read(number, num_pages)
        is_so = _PAGE_HEADER.unpack_from(page)[2] == _OVERFLOW
        is_so &= _NUM_OVERFLOW_PAGES.unpack_from(page)[0] == num_pages
        _expect(is_so, number, "does not hold the large entry that belongs there")
        counts[_OVERFLOW] += num_pages
        return page[_PAGE_HEADER.size :][:size]


Node = tuple[int, int, int, bytes, int]
"""An entry of a page: its size or the page below it (low, high); flags, key, start of the data."""


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


def _children(nodes: list[Node], number: int, first_key: bytes) -> list[tuple[int, bytes]]:
    """Return the pages below a branch page, each with the least key that it may have."""
    _expect(bool(nodes), number, "is a branch without entries")
    children = [(low | high << 16 | top << 32, key) for low, high, top, key, _ in nodes]
    return [(children[0][0], first_key), *children[1:]]


def _order(number: bytes) -> bytes:
    """Return the bytes by which transaction numbers sort."""
    return number.rjust(8, b"\0")[::-1]


def _ids(data: bytes) -> tuple[int, ...]:
    """Decode the numbers of the pages that one transaction freed; their count comes first."""
    count = len(data) // 8 - 1
    _expect(
        len(data) % 8 == 0 and count >= 0 and int.from_bytes(data[:8], "little") == count,
        0,
        "has a free list that contradicts itself",
    )
    return struct.unpack_from(f"<{count}Q", data, 8)


def _expect(is_so: bool, number: int, what: str) -> None:
    if not is_so:
        raise CorruptIndexError(f"page {number} {what}")
