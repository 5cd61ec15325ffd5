"""The engine tells of its blocks in parts, with the tiers that have them."""

from typing import Any

import pytest

from tests.fake_store import Rig, chain_of
from tieredkv.engine import block_lists
from tieredkv.engine.block_lists import BlockLists
from tieredkv.storage.block_table import TIER_BITS
from tieredkv.storage.ram_blocks import RamBlocks
from tieredkv.types import Tier


def told(lists: BlockLists) -> tuple[list[dict[str, Any]], int]:
    """Return the parts of a list, and between how many steps they were made."""
    parts, ends, turns = list[dict[str, Any]](), list[bool](), 0

    def take(part: dict[str, Any], has_more: bool) -> None:
        parts.append(part)
        ends.append(not has_more)

    lists.begin(take)
    while lists.has_more:
        lists.go_on()
        turns += 1
    assert ends == [False] * (len(ends) - 1) + [True]
    return parts, turns


def test_all_blocks_are_told_with_their_tiers_and_deadlines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_lists, "PART_BLOCKS", 2)
    monkeypatch.setattr(block_lists, "SLICE_S", 0.0)  # for one part at a time
    rig = Rig()
    rig.run("a", 3)
    rig.run("b", 2, "in_memory")
    rig.cache.departures.send(chain_of("a", 3), Tier.HOST)
    rig.turn(5)
    lists = BlockLists(rig.tiers)
    parts, turns = told(lists)
    assert (len(parts), turns) == (4, 4)
    found = RamBlocks.of(parts)
    rows = dict(zip(found.hashes, found.table.blocks, strict=True))
    for name, length, tier, retention in (
        ("a", 3, Tier.HOST, "24h"),
        ("b", 2, Tier.DEVICE, "in_memory"),
    ):
        for position, block_hash in enumerate(chain_of(name, length)):
            row, entry = rows.pop(block_hash), rig.tiers.catalog.get(block_hash)
            assert entry is not None
            assert (row["tiers"], row["position"]) == (TIER_BITS[tier], position)
            assert row["expires_at"] == rig.tiers.catalog.deadline(entry)
            assert row["size_bytes"] == rig.tiers.block_bytes
            kind = found.table.kinds[row["kind"]]
            assert kind == (entry.root, entry.namespace, retention)
    assert not rows


def test_an_engine_without_blocks_tells_of_none() -> None:
    parts, _ = told(BlockLists(Rig().tiers))
    assert parts == [{}]
    assert len(RamBlocks.of(parts).table.blocks) == 0
