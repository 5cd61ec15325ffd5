"""Tells of the blocks in VRAM and host memory, some of them at a time.

Blocks that come or go meanwhile may be told of or not. Called by the engine's thread only.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from tieredkv.cache.catalog import Entry
from tieredkv.cache.tiers import Tiers
from tieredkv.engine.slices import Answer
from tieredkv.operate.ram import part_of
from tieredkv.operate.table import BLOCK, TIER_BITS, Kind
from tieredkv.pieces import cut
from tieredkv.storage.client.names import NO_NAMES, Names

PART_BLOCKS = 512
"""Told of in one message."""

_COPIED = ("position", "hits", "computed_at", "last_used")


def list_blocks(tiers: Tiers, names: Names = NO_NAMES) -> Answer:
    """Make the parts of a list of all blocks by their names; see `operate.ram`."""
    for entries in cut(tiers.catalog.entries(), PART_BLOCKS):
        yield _part(tiers, entries, names)
    return {}


def _part(tiers: Tiers, entries: Sequence[Entry], names: Names) -> dict[str, Any]:
    """Describe some blocks, without their copies on disk."""
    catalog, hashes = tiers.catalog, [entry.block_hash for entry in entries]
    rows, numbers = np.zeros(len(entries), BLOCK), dict[tuple[bytes, bytes, str], int]()
    for name in _COPIED:
        rows[name] = list(map(attrgetter(name), entries))
    rows["size_bytes"] = tiers.block_bytes
    rows["expires_at"] = catalog.deadlines(entries)
    for tier, pool in tiers.pools.items():
        copies = pool.find(hashes)
        is_there = np.array([copy is not None and copy.is_ready for copy in copies])
        rows["tiers"] += is_there * np.uint8(TIER_BITS[tier])
    of_claims = {entry.claims: entry for entry in entries}
    retentions = {claims: catalog.retention(entry) for claims, entry in of_claims.items()}
    rows["kind"] = [
        numbers.setdefault((it.root, it.namespace, retentions[it.claims]), len(numbers))
        for it in entries
    ]
    parents = names.hide([entry.parent_hash for entry in entries])
    pins = [entry.pinned_until for entry in entries]
    kinds = [Kind(*kind) for kind in numbers]
    return part_of(rows, names.hide(hashes), parents, pins, kinds)
