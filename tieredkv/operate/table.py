"""A table of many blocks: their sealed records, read at once into the columns of a NumPy array.

The fields of all records are at the same places, so NumPy reads each field from all of them in one
call. The seals are not checked, as that would take longer than all the rest; the worker has only
compared each record with its key. So a damaged record may be listed wrongly, but no block is served
from a table. This module knows records, not the index.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tieredkv.operate.worker import Worker
from tieredkv.storage.format.record import NO_RETENTIONS, RECORD_BYTES, Retentions
from tieredkv.storage.messages.operator import Rows
from tieredkv.types import Tier

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

RECORD = np.dtype(
    [
        ("seal", "V8"),
        ("expires_at", "<f8"),
        ("block_hash", ">u8", 4),
        ("parent_hash", ">u8", 4),
        ("root", "V32"),
        ("namespace", "V32"),
        ("position", "<u4"),
        ("part", "<u4"),
        ("size_bytes", "<u4"),
        ("payload_bytes", "<u4"),
        ("segment", "<u4"),
        ("extent", "<u4"),
        ("hits", "<u4"),
        ("codec", "u1"),
        ("page_form", "u1"),
        ("retention", "u1"),
        ("hash_bytes", "u1"),
        ("computed_at", "<f8"),
        ("last_used", "<f8"),
        ("pinned_until", "<f8"),
        ("payload_checksum", "V16"),
        ("page_kind", "u1"),
        ("num_parts", "<u2"),
        ("room", "V21"),
    ]
)
"""The fields of a sealed record, as docs/format.md draws them."""

_TIMES = ("computed_at", "expires_at", "last_used")
_COPIED = ("position", "size_bytes", "payload_bytes", "hits", *_TIMES)
_AT = {name: at for name, (_, at, *_) in (RECORD.fields or {}).items()}
_OWNERS = slice(_AT["root"], _AT["position"])  # root and namespace
_KIND = slice(_AT["retention"], _AT["computed_at"])  # and the bytes of a hash


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

    def are_of(self, is_meant: Callable[[Kind], bool]) -> NDArray[np.bool]:
        """Return which blocks are of kinds that are meant."""
        are_meant = np.array(list(map(is_meant, self.kinds)), bool)
        return np.asarray(are_meant[self.blocks["kind"]])

    def sums(self) -> Iterator[tuple[Kind, int, int, float]]:
        """Yield each kind that has blocks: their number, their bytes, and their latest use."""
        numbers, num_kinds = self.blocks["kind"], len(self.kinds)
        nums = np.bincount(numbers, minlength=num_kinds).tolist()
        sizes = np.bincount(numbers, self.blocks["size_bytes"], num_kinds).tolist()
        last_used = np.zeros(num_kinds)
        np.maximum.at(last_used, numbers, self.blocks["last_used"])
        for kind, num, size, used in zip(self.kinds, nums, sizes, last_used.tolist(), strict=True):
            if num:
                yield kind, num, int(size), used

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
        self._retentions = NO_RETENTIONS
        self._blocks, self._num_read = np.empty(0, BLOCK), 0
        self._kinds: list[Kind] = []
        self._numbers = _Numbers()  # of the kinds, by the bytes of their fields

    @property
    def table(self) -> BlockTable:
        """The table of all records so far."""
        self._blocks.resize(self._num_read, refcheck=False)
        return BlockTable(self._blocks, self._kinds)

    def add(self, part: Rows) -> None:
        """Add the next part of the index; records whose times are none are left out."""
        if part.retentions != self._retentions.names:
            self._retentions = Retentions(part.retentions)
        rows = np.frombuffer(part.data, RECORD)
        data = rows.view(np.uint8).reshape(-1, RECORD_BYTES)
        is_read = np.isfinite(sum(rows[name] for name in _TIMES))
        if not is_read.all():
            rows, data = rows[is_read], data[is_read]
        end = self._num_read + len(rows)
        if end > len(self._blocks):  # in place, as twice the table may be too much for memory
            self._blocks.resize(max(end, len(self._blocks) * 5 // 4), refcheck=False)
        self._blocks[self._num_read : end] = self._read(rows, data)
        self._num_read = end

    def _read(self, rows: NDArray[np.void], data: NDArray[np.uint8]) -> Blocks:
        """Return the blocks of records, which are given as RECORD and as bytes."""
        blocks = np.empty(len(rows), BLOCK)
        for name in _COPIED:
            blocks[name] = rows[name]
        blocks["key"], blocks["key_rest"] = rows["block_hash"][:, :2].T
        blocks["parent_key"] = rows["parent_hash"][:, 0]
        blocks["tiers"] = TIER_BITS[Tier.DISK]
        of_kind = np.hstack([data[:, _OWNERS], data[:, _KIND]])
        as_bytes = of_kind.view(f"V{of_kind.shape[1]}")[:, 0].tolist()
        kinds = list(map(self._numbers.__getitem__, as_bytes))
        blocks["kind"] = kinds
        for number in range(len(self._kinds), len(self._numbers)):
            row = rows[kinds.index(number)]
            root = row["root"].tobytes()[: row["hash_bytes"]]
            name = self._retentions.name_of(int(row["retention"]))
            self._kinds.append(Kind(root, row["namespace"].tobytes(), name))
        return blocks


class Scanned(NamedTuple):
    """All blocks on disk, and the time by the store's clock."""

    table: BlockTable
    now: float


def scan(worker: Worker, *, settled: bool = False) -> Scanned:
    """Read all blocks on disk; see `Worker.rows`."""
    reader, now = TableReader(), 0.0
    for rows in worker.rows(settled=settled):
        reader.add(rows)
        now = rows.now
    return Scanned(reader.table, now)


class _Numbers(dict[bytes, int]):
    """Numbers things in the order in which they are met."""

    def __missing__(self, thing: bytes) -> int:
        self[thing] = number = len(self)
        return number


def starts_of(digests: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return the first bytes of digests, [num_digests, num_bytes], as numbers: [num_digests, 2]."""
    padded = np.zeros((len(digests), START_BYTES), np.uint8)
    padded[:, : digests.shape[1]] = digests[:, :START_BYTES]
    return padded.view(">u8").astype(np.uint64)


def places_named(keys: NDArray[np.uint64], rests: NDArray[np.uint64], digits: str) -> list[int]:
    """Return the places of the blocks whose names start with hex digits, of which 32 count.

    Args:
        keys: of the blocks of a table, side by side.
        rests: their `key_rest`.
        digits: of the names.
    """
    digits = digits[: 2 * START_BYTES]
    ends = (int(digits.ljust(2 * START_BYTES, end), 16) for end in "0f")
    (first, first_rest), (last, last_rest) = (divmod(end, 1 << 64) for end in ends)
    start = np.searchsorted(keys, np.uint64(first))
    end = np.searchsorted(keys, np.uint64(last), "right")
    keys, rests = keys[start:end], rests[start:end]
    is_so = (keys > np.uint64(first)) | (rests >= np.uint64(first_rest))
    is_so &= (keys < np.uint64(last)) | (rests <= np.uint64(last_rest))
    places: list[int] = (start + np.flatnonzero(is_so)).tolist()
    return places


def starts_in(blocks: Blocks) -> list[bytes]:
    """Return the first bytes of the names of blocks in a table."""
    data = np.stack([blocks["key"], blocks["key_rest"]], axis=1).astype(">u8").tobytes()
    return [data[start : start + START_BYTES] for start in range(0, len(data), START_BYTES)]
