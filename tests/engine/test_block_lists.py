"""The engine tells of its blocks in parts, with the tiers that have them."""

from typing import Any

import pytest

from tests.fake_store import Rig, chain_of
from tieredkv.cache import block_lists
from tieredkv.engine.slices import Answer, Slices, telling
from tieredkv.operate.ram import RamBlocks
from tieredkv.operate.table import START_BYTES, TIER_BITS, starts_in
from tieredkv.types import NAMESPACE_BYTES, Tier


def listed(rig: Rig) -> Answer:
    """Return the answer to `ls`."""
    yield from rig.cache.operations.list_blocks()
    return {}


def told(rig: Rig) -> list[dict[str, Any]]:
    """Return the parts of a list."""
    slices, parts, ends = Slices(), list[dict[str, Any]](), list[bool]()

    def take(part: dict[str, Any], has_more: bool) -> None:
        parts.append(part)
        ends.append(not has_more)

    slices.begin(telling(listed(rig), take))
    while slices.has_more:
        slices.go_on()
    assert ends == [False] * (len(ends) - 1) + [True]
    return parts


def test_all_blocks_are_told_with_their_tiers_and_deadlines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_lists, "PART_BLOCKS", 2)
    rig = Rig()
    rig.run("a", 3)
    rig.run("b", 2, "in_memory")
    rig.cache._departures.send(chain_of("a", 3), Tier.HOST)
    rig.turn(5)
    parts = told(rig)
    assert [len(part.get("tiers", b"")) for part in parts] == [2, 2, 1, 0]
    found = RamBlocks(parts)
    rows = dict(zip(starts_in(found.table.blocks), found.table.blocks, strict=True))
    for name, length, tier, retention in (
        ("a", 3, Tier.HOST, "24h"),
        ("b", 2, Tier.DEVICE, "in_memory"),
    ):
        for position, block_hash in enumerate(chain_of(name, length)):
            row, entry = rows.pop(block_hash[:START_BYTES]), rig.tiers.catalog.get(block_hash)
            assert entry is not None
            assert (row["tiers"], row["position"]) == (TIER_BITS[tier], position)
            assert row["expires_at"] == rig.tiers.catalog.deadline(entry)
            assert row["size_bytes"] == rig.tiers.payload_bytes
            kind = found.table.kinds[row["kind"]]
            assert kind == (entry.root, entry.namespace.ljust(NAMESPACE_BYTES, b"\0"), retention)
    assert not rows


def test_an_engine_without_blocks_tells_of_none() -> None:
    parts = told(Rig())
    assert parts == [{}]
    assert len(RamBlocks(parts).table.blocks) == 0
