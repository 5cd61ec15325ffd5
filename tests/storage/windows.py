"""Makes the pages beside blocks of a model with windows, and finds blocks that have all of them."""

from collections import Counter
from collections.abc import Collection
from typing import Any

from msgspec.structs import replace

from tieredkv.hashing import PageNames, layout_of
from tieredkv.operate.models import AnchorNeeds, KnownModel
from tieredkv.types import BlockHash, BlockRecord, KVSpec, LayerKV

LAYERS = [LayerKV(1, 8), LayerKV(1, 8, 20), LayerKV(1, 8, 40), LayerKV(1, 8, 40)]
SPEC = KVSpec(layers=LAYERS, dtype="float32", block_size=16)
KINDS = [(1, 0, 1), (2, 0, 2), (2, 1, 2)]
"""Group, part and number of parts of the further pages of a block."""

NAMES = PageNames([(kind, part) for kind, part, _ in KINDS], "sha256")

NEEDS = AnchorNeeds(num_blocks=3, num_pages=len(KINDS))
"""What a request needs of the windows to go on."""

WINDOWED = KnownModel(
    name="windowed",
    fingerprint="ab" * 32,
    dtype="float32",
    block_size=16,
    hash_algo="sha256",
    layout=layout_of(SPEC),
)


def pages_of(blocks: Collection[BlockRecord], **changes: Any) -> list[BlockRecord]:
    """Return the records of all further pages of some blocks, whose other fields they share."""
    return [
        replace(
            block,
            block_hash=block_hash,
            parent_hash=block.block_hash,
            kind=kind,
            part=part,
            num_parts=num_parts,
            **changes,
        )
        for block in blocks
        for (kind, part, num_parts), block_hash in zip(
            KINDS, NAMES.of(BlockHash(block.block_hash)), strict=True
        )
    ]


def num_torn(records: Collection[BlockRecord]) -> int:
    """Return of how many blocks some records have pages, but not all."""
    return sum(number < NEEDS.num_pages for number in _num_pages(records).values())


def anchors_of(records: Collection[BlockRecord]) -> set[bytes]:
    """Return the blocks behind which all that a request needs of the windows is there."""
    counts = _num_pages(records)
    whole = {it.block_hash: it for it in records if counts[it.block_hash] == NEEDS.num_pages}

    def is_anchor(record: BlockRecord | None) -> bool:
        for _ in range(NEEDS.num_blocks):
            if record is None or record.position == 0:
                return record is not None
            record = whole.get(record.parent_hash)
        return True

    return {block_hash for block_hash, record in whole.items() if is_anchor(record)}


def _num_pages(records: Collection[BlockRecord]) -> Counter[bytes]:
    """Return how many further pages each block has."""
    return Counter(record.parent_hash for record in records if record.kind)
