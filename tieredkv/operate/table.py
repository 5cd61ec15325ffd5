"""A table of many blocks: their sealed records, read at once into the columns of a NumPy array.

Records differ little in how msgpack lays them out. Those of one layout have each field at the same
place, so NumPy reads it from all of them in one call. The seals are not checked, as that would take
longer than all the rest, but each record has to repeat its key: a damaged record may be listed
wrongly, but no block is served from a table. This module knows records, not the index.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from tieredkv.errors import CorruptIndexError
from tieredkv.storage.codec import RECORD_AT, Extent, Located
from tieredkv.storage.index_pages import Part
from tieredkv.types import BlockRecord, Tier

START_BYTES = 16
"""The first bytes of a hash, by which a table knows a block."""

TIER_BITS = {tier: 1 << number for number, tier in enumerate(Tier)}
"""By which a table tells where copies of a block are."""

BLOCK = np.dtype(
    [
        ("key", "u8"),  # the first 8 bytes of the block's hash, as a big-endian number
        ("key_rest", "u8"),  # the next 8
        ("parent_key", "u8"),
        ("kind", "i4"),
        ("position", "u4"),
        ("size_bytes", "u4"),
        ("payload_bytes", "u4"),
        ("hits", "u4"),
        ("computed_at", "f8"),
        ("expires_at", "f8"),
        ("last_used", "f8"),
        ("tiers", "u1"),
    ]
)
"""One row of a table; `kind` is the number of its `Kind`, `tiers` is a sum of `TIER_BITS`, and all
else is as in the record.
"""

Blocks = NDArray[np.void]
"""[num_blocks] BLOCK."""

_TIMES = ("computed_at", "expires_at", "last_used")
_COPIED = ("position", "size_bytes", "payload_bytes", "hits", *_TIMES)
_DIGESTS = ("block_hash", "parent_hash", "root", "namespace", "payload_checksum")
_ARRAY = ""  # stands for the head of an array in the list below
_ORDER = (_ARRAY, _ARRAY, *BlockRecord.__struct_fields__, _ARRAY, *Extent._fields)
_ORDER += Located._fields[2:]
_NUMBERS = {0xCA: ">f4", 0xCB: ">f8", 0xCC: "u1", 0xCD: ">u2", 0xCE: ">u4", 0xCF: ">u8"}
_CLASS = np.arange(256, dtype=np.uint8)  # of the first byte of a value
_CLASS[:0x80] = 0  # small numbers, each of which is a byte of its own


class Kind(NamedTuple):
    """What many blocks have in common: the root and the namespace, and the retention policy."""

    root: bytes
    namespace: bytes
    retention: str


class BlockTable(NamedTuple):
    """Blocks, and the kinds that they are of.

    Attributes:
        blocks: by `key`.
        kinds: by their numbers.
    """

    blocks: Blocks
    kinds: Sequence[Kind]

    def unexpired(self, now: float) -> "BlockTable":
        """Return the table of those blocks that have not expired."""
        is_young = self.blocks["expires_at"] > now
        return self if is_young.all() else self._replace(blocks=self.blocks[is_young])

    def joined(self, other: "BlockTable") -> "BlockTable":
        """Return the table of the blocks that are in either.

        A block that is in both is as this table tells it, with the tiers of both.
        """
        if not len(other.blocks):
            return self
        blocks, more = self.blocks.copy(), other.blocks.copy()
        more["kind"] += len(self.kinds)
        places = np.searchsorted(blocks["key"], more["key"])
        is_known = np.isin(more["key"], blocks["key"])
        blocks["tiers"][places[is_known]] |= more["tiers"][is_known]
        blocks = np.insert(blocks, places[~is_known], more[~is_known])
        return BlockTable(blocks, [*self.kinds, *other.kinds])


class TableReader:
    """Makes a table of index entries; one thread uses it."""

    def __init__(self) -> None:
        self._parts = [np.empty(0, BLOCK)]
        self._last_key = -1
        self._kinds: list[Kind] = []
        self._numbers = _Numbers()  # of the kinds, by the bytes of their fields

    @property
    def table(self) -> BlockTable:
        """The table of all records so far."""
        return BlockTable(np.concatenate(self._parts), self._kinds)

    def add(self, part: Part) -> None:
        """Add the sealed records of the next part of the index; what is no record is left out.

        Raises:
            CorruptIndexError: they are not in the order of their keys.
        """
        blocks, is_read = np.zeros(len(part.starts), BLOCK), np.zeros(len(part.starts), bool)
        lengths = part.ends - part.starts
        for length in np.flatnonzero(np.bincount(lengths)).tolist():
            places = np.flatnonzero((lengths == length) & (length > RECORD_AT))
            rows = _rows(part.data, part.starts[places], length)
            while len(places):
                layout = _Layout.of(rows[0].tobytes())
                is_alike = layout.fits(rows) if layout else np.arange(len(places)) == 0
                some, alike = (
                    (rows, places) if is_alike.all() else (rows[is_alike], places[is_alike])
                )
                if layout is not None:
                    self._read(layout, some, blocks, alike)
                    hashes = some[:, layout.slices["block_hash"]]
                    keys = _rows(part.data, part.keys[alike], hashes.shape[1])
                    is_read[alike] = (keys == hashes).all(axis=1)
                rows, places = rows[~is_alike], places[~is_alike]
        is_read &= np.isfinite(sum(blocks[name] for name in _TIMES))
        keys = blocks["key"][is_read]
        if np.any(keys[1:] < keys[:-1]):
            raise CorruptIndexError("the keys of `blocks` are out of order")
        # The first ones may have been in the part before.
        is_read &= blocks["key"] > self._last_key
        self._parts.append(blocks if is_read.all() else blocks[is_read])
        self._last_key = max([self._last_key, *keys[-1:].tolist()])

    def _read(
        self, layout: "_Layout", rows: NDArray[np.uint8], blocks: Blocks, places: NDArray[np.intp]
    ) -> None:
        """Read rows of one layout into their places among the blocks."""
        values = rows.view(layout.dtype)[:, 0]
        for name in _COPIED:
            blocks[name][places] = values[name]
        block_hash, parent_hash = (
            starts_of(rows[:, layout.slices[name]]) for name in ("block_hash", "parent_hash")
        )
        blocks["key"][places], blocks["key_rest"][places] = block_hash.T
        blocks["parent_key"][places] = parent_hash[:, 0]
        blocks["tiers"][places] = TIER_BITS[Tier.DISK]
        # The two digests lie side by side; the heads before them tell how long they are.
        owners = slice(layout.slices["root"].start - 2, layout.slices["namespace"].stop)
        of_kind = np.hstack([rows[:, owners], rows[:, layout.slices["retention"]]])
        as_bytes = of_kind.view(f"V{of_kind.shape[1]}")[:, 0].tolist()
        kinds = list(map(self._numbers.__getitem__, as_bytes))
        blocks["kind"][places] = kinds
        for number in range(len(self._kinds), len(self._numbers)):
            row = rows[kinds.index(number)]
            root, namespace, retention = (row[layout.slices[it]].tobytes() for it in Kind._fields)
            self._kinds.append(Kind(root, namespace, retention.decode(errors="replace")))


class _Numbers(dict[bytes, int]):
    """Numbers things in the order in which they are met."""

    def __missing__(self, thing: bytes) -> int:
        self[thing] = number = len(self)
        return number


class _Layout:
    """Where the fields of a sealed record are.

    Attributes:
        slices: where the bytes of each field are.
    """

    def __init__(self, record: bytes) -> None:
        """Look at a record.

        Raises:
            KeyError, IndexError: these bytes are none.
        """
        self.slices: dict[str, slice] = {}
        self._record = record
        self._formats: dict[str, str] = {}  # of the numbers
        self._types: list[int] = []  # where msgpack tells types and lengths but those of numbers
        self._number_types: list[int] = []
        end = RECORD_AT
        for name in _ORDER:
            end = self._pass(name, end)
        if end != len(record):
            raise IndexError

    @classmethod
    def of(cls, record: bytes) -> "_Layout | None":
        """Return the layout of bytes; None if they are no record."""
        try:
            return cls(record)
        except (KeyError, IndexError):
            return None

    def _pass(self, name: str, at: int) -> int:
        """Note where a field is, whose head is at a place; return where it ends."""
        head, start = self._record[at], at + 1
        if name not in (_ARRAY, "retention", *_DIGESTS):
            self._number_types.append(at)
            is_small = head < 0x80
            form = self._formats[name] = "u1" if is_small else _NUMBERS[head]
            start, size = start - is_small, np.dtype(form).itemsize
        else:
            self._types.append(at)
            if name == _ARRAY:
                return {0x90: start}[head & 0xF0]
            if 0xA0 <= head < 0xC0:
                size = head & 0x1F
            else:
                self._types.append(start)
                size, start = self._record[start], {0xC4: start + 1, 0xD9: start + 1}[head]
        self.slices[name] = slice(start, start + size)
        return start + size

    def fits(self, rows: NDArray[np.uint8]) -> NDArray[np.bool]:
        """Return which records, as long as this one, have its layout."""
        is_so = np.ones(len(rows), bool)
        for at in self._types:
            is_so &= rows[:, at] == self._record[at]
        for at in self._number_types:
            is_so &= _CLASS[rows[:, at]] == _CLASS[self._record[at]]
        return is_so

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The numbers of a row, by their fields."""
        names = list(self._formats)
        return np.dtype(
            {
                "names": names,
                "formats": [self._formats[name] for name in names],
                "offsets": [self.slices[name].start for name in names],
                "itemsize": len(self._record),
            }
        )


def _rows(data: NDArray[np.uint8], starts: NDArray[np.int64], length: int) -> NDArray[np.uint8]:
    """Return pieces of some data: [num_starts, length]."""
    return np.asarray(sliding_window_view(data, length)[starts])


def numbers_of(starts: bytes) -> NDArray[np.uint64]:
    """Return the first bytes of hashes, which lie side by side, as numbers: [num_hashes, 2]."""
    return np.frombuffer(starts, ">u8").astype(np.uint64).reshape(-1, 2)


def starts_of(digests: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return the first bytes of digests, [num_digests, num_bytes], as numbers: [num_digests, 2]."""
    padded = np.zeros((len(digests), START_BYTES), np.uint8)
    padded[:, : digests.shape[1]] = digests[:, :START_BYTES]
    return numbers_of(padded.tobytes())
