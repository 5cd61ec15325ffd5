"""A table of many blocks: their records, read at once into the columns of a NumPy array.

The fields of all records are at the same places, so NumPy reads each field from all of them in one
call. The seals are not checked, as that would take longer than all the rest; the worker has only
compared each record with its key, and an engine seals none. So a damaged record may be listed
wrongly, but no block is served from a table. This module knows records, not the index.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tieredkv.operate.infos import BlockInfo
from tieredkv.operate.worker import Worker
from tieredkv.storage.format.planes import codec_name
from tieredkv.storage.format.record import RECORD_BYTES
from tieredkv.storage.messages.operator import Rows, Scan
from tieredkv.types import Tier

START_BYTES = 16
"""The first bytes of a hash, by which a table knows a block."""

TIER_BITS = {tier: 1 << number for number, tier in enumerate(Tier)}
"""By which a table tells where copies of a block are."""

_ON_DISK = TIER_BITS[Tier.DISK]

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
"""The fields of a record, as docs/format.md draws them."""

_TIMES = ("computed_at", "expires_at", "last_used")
_COPIED = ("position", "size_bytes", "payload_bytes", "hits", *_TIMES)
_SHOWN = ("position", "size_bytes", "hits", *_TIMES, "pinned_until")
_AT = {name: at for name, (_, at, *_) in (RECORD.fields or {}).items()}
_OWNERS = slice(_AT["root"], _AT["position"])  # root and namespace
_KIND = slice(_AT["retention"], _AT["computed_at"])  # and the bytes of a hash

BLOCK = np.dtype(
    [
        ("key", "u8"),  # the first 8 bytes of the block's hash, as a big-endian number
        ("key_rest", "u8"),  # the next 8
        ("parent_key", "u8"),
        ("kind", "i4"),
        *((name, RECORD[name]) for name in _COPIED),
        ("page_kind", "u1"),
        ("tiers", "u1"),
    ]
)
"""One row of a table; `kind` is the number of its `BlockKind`, `tiers` is a sum of `TIER_BITS`, and
all else is as in the record.
"""

Blocks = NDArray[np.void]
"""[num_blocks] BLOCK."""


class BlockKind(NamedTuple):
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
    kinds: Sequence[BlockKind]

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
    """Makes a table of records, some of which are given at a time; one thread uses it."""

    def __init__(self) -> None:
        self._blocks, self._num_read = np.empty(0, BLOCK), 0
        self._kinds = list[BlockKind]()
        self._numbers: defaultdict[bytes, int] = defaultdict(lambda: len(self._numbers))

    @property
    def table(self) -> BlockTable:
        """The table of all records so far."""
        self._blocks.resize(self._num_read, refcheck=False)
        return BlockTable(self._blocks, self._kinds)

    def add(
        self,
        records: bytes,
        retentions: Sequence[str],
        tiers: int | NDArray[np.uint8] = TIER_BITS[Tier.DISK],
    ) -> None:
        """Add records, of which those whose times are none are left out.

        Args:
            records: side by side.
            retentions: names of retention policies by their numbers.
            tiers: where the blocks are, as a sum of `TIER_BITS`, for all of them or for each.
        """
        rows = np.frombuffer(records, RECORD)
        blocks = np.empty(len(rows), BLOCK)
        for name in _COPIED:
            blocks[name] = rows[name]
        blocks["key"], blocks["key_rest"] = rows["block_hash"][:, :2].T
        blocks["parent_key"] = rows["parent_hash"][:, 0]
        blocks["page_kind"], blocks["tiers"] = rows["page_kind"], tiers
        data = rows.view(np.uint8).reshape(-1, RECORD_BYTES)
        of_kind = np.hstack([data[:, _OWNERS], data[:, _KIND]])
        as_bytes = of_kind.view(f"V{of_kind.shape[1]}")[:, 0].tolist()
        blocks["kind"] = numbers = list(map(self._numbers.__getitem__, as_bytes))
        for number in range(len(self._kinds), len(self._numbers)):
            row = rows[numbers.index(number)]
            root, namespace = digest_in(row, "root"), row["namespace"].tobytes()
            self._kinds.append(BlockKind(root, namespace, retention_in(row, retentions)))
        is_read = np.isfinite(sum(rows[name] for name in _TIMES))
        if not is_read.all():
            blocks = blocks[is_read]
        end = self._num_read + len(blocks)
        if end > len(self._blocks):  # in place, as twice the table may be too much for memory
            self._blocks.resize(max(end, len(self._blocks) * 5 // 4), refcheck=False)
        self._blocks[self._num_read : end] = blocks
        self._num_read = end


def digest_in(row: Any, name: str) -> bytes:
    """Return a hash in a record."""
    return bytes(row[name].tobytes()[: row["hash_bytes"]])


def retention_in(row: Any, retentions: Sequence[str]) -> str:
    """Return the name of the retention policy of a record."""
    number = row["retention"]
    return retentions[number] if number < len(retentions) else ""


def described(row: Any, retentions: Sequence[str], tiers: int) -> BlockInfo:
    """Describe the block of a RECORD; see `TableReader.add`."""
    is_on_disk, copied = tiers & _ON_DISK, {name: row[name].item() for name in _SHOWN}
    return BlockInfo(
        block_hash=digest_in(row, "block_hash").hex(),
        parent_hash=digest_in(row, "parent_hash").hex(),
        root=digest_in(row, "root").hex(),
        namespace=row["namespace"].tobytes().hex(),
        tiers=[tier for tier, bit in TIER_BITS.items() if tiers & bit],
        stored_bytes=row["payload_bytes"].item() if is_on_disk else None,
        codec=codec_name(row["codec"].item()) if is_on_disk else None,
        retention=retention_in(row, retentions),
        **copied,
    )


class Scanned(NamedTuple):
    """All blocks on disk, and the time by the store's clock."""

    table: BlockTable
    now: float


def scan(worker: Worker, *, settled: bool = False) -> Scanned:
    """Read all blocks on disk; see `Scan`."""
    reader, now = TableReader(), 0.0
    for part in worker.parts(Scan(settled=settled), Rows):
        reader.add(part.data, part.retentions)
        now = part.now
    return Scanned(reader.table, now)


def places_named(keys: NDArray[np.uint64], rests: NDArray[np.uint64], digits: str) -> list[int]:
    """Return the places of the blocks whose names start with hex digits, of which 32 count.

    The blocks are given by their `key` and `key_rest`, side by side, and in the order of these.
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
