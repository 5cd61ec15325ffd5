"""Tells of the blocks in VRAM and host memory, some of them at a time.

Blocks that come or go meanwhile may be told of or not. Called by the engine's thread only.
"""

from collections.abc import Generator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from tieredkv.cache.catalog import Entry
from tieredkv.cache.tiers import Tiers
from tieredkv.operate.table import RECORD, TIER_BITS
from tieredkv.pieces import cut
from tieredkv.tier import BlockNames

PART_BLOCKS = 512
"""Told of in one message."""

_COPIED = ("position", "part", "num_parts", "hits", "computed_at", "last_used", "pinned_until")


def list_blocks(tiers: Tiers, names: BlockNames) -> Generator[dict[str, Any], None, None]:
    """Make the parts of a list of all blocks by their names; see `operate.ram`."""
    retentions = dict[str, int]()
    for entries in cut(tiers.catalog.entries(), PART_BLOCKS):
        yield _part(tiers, entries, names, retentions)


def _part(
    tiers: Tiers, entries: Sequence[Entry], names: BlockNames, retentions: dict[str, int]
) -> dict[str, Any]:
    """Describe some blocks, without their copies on disk; number the retentions that are new."""
    catalog, hashes = tiers.catalog, [entry.block_hash for entry in entries]
    rows, in_tiers = np.zeros(len(entries), RECORD), np.zeros(len(entries), np.uint8)
    for name, digests in (
        ("block_hash", names.hide(hashes)),
        ("parent_hash", names.hide([entry.parent_hash for entry in entries])),
        ("root", [entry.root for entry in entries]),
        ("namespace", [entry.namespace for entry in entries]),
    ):
        field = RECORD[name]
        rows[name] = np.array(digests, "V32").view(field.base).reshape(-1, *field.shape)
    for name in _COPIED:
        rows[name] = list(map(attrgetter(name), entries))
    rows["page_kind"] = list(map(attrgetter("kind"), entries))
    rows["hash_bytes"], rows["size_bytes"] = len(hashes[0]), tiers.payload_bytes
    rows["expires_at"] = catalog.deadlines(entries)
    of_claims = {entry.claims: entry for entry in entries}
    numbers = {
        claims: retentions.setdefault(catalog.retention(entry), len(retentions))
        for claims, entry in of_claims.items()
    }
    rows["retention"] = [numbers[entry.claims] for entry in entries]
    for tier, pool in tiers.pools.items():
        copies = pool.find(hashes)
        is_there = np.array([copy is not None and copy.is_ready for copy in copies])
        in_tiers += is_there * np.uint8(TIER_BITS[tier])
    return {"records": rows.tobytes(), "tiers": in_tiers.tobytes(), "retentions": [*retentions]}
