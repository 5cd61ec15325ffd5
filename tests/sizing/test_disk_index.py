"""The stand-in for the store's index decides as the store does, whatever the operations."""

import random
from pathlib import Path

import pytest

from tests.fakes import FakeClock
from tests.storage.blocks import CheckedStore, make_record, open_store, put, sweep
from tieredkv.sizing.disk_index import DiskIndex, Life
from tieredkv.tier import TouchItem
from tieredkv.types import BlockHash, BlockRecord

SIZE_BYTES = 128 << 10
CHAINS, POSITIONS = "abcdef", 12


class Both:
    """A store and the stand-in for its index, which get the same operations."""

    def __init__(self, path: Path) -> None:
        self.clock = FakeClock()
        # Half a block more than whole ones, as the index grows a little.
        self.store = open_store(path, self.clock, budget_bytes=(4 << 20) + SIZE_BYTES // 2)
        self.evicted = list[BlockHash]()
        self.index = DiskIndex(self.capacity(), lambda life: self.evicted.append(life.block_hash))
        self.records = dict[BlockHash, BlockRecord]()

    def capacity(self) -> int:
        """Return how many blocks the store holds; it is empty afterwards."""
        fillers = [self.record("filler", at) for at in range(64)]
        for filler in fillers:
            put(self.store, filler)
        count = len(found_in(self.store, fillers))
        self.store.drop([each.block_hash for each in fillers], "admin")
        sweep(self.store)
        return count

    def record(self, chain: str, position: int, *, life_s: float = 1e6) -> BlockRecord:
        """Return a block that is computed now."""
        now = self.clock.now()
        times = {"now": now, "expires_at": now + life_s, "size_bytes": SIZE_BYTES}
        return make_record(chain, position, **times)

    def put(self, record: BlockRecord) -> None:
        """Store a block, as the worker does."""
        now, block_hash = self.clock.now(), BlockHash(record.block_hash)
        self.records.setdefault(block_hash, record)
        if self.store.holds(record):
            self.store.touch([record])
        else:
            put(self.store, record)
        times = record.computed_at, record.last_used, record.expires_at
        self.index.store([Life(block_hash, record.position, *times)], now)

    def touch(self, block_hash: BlockHash, expires_at: float | None) -> None:
        """Use a block, if it is there, and claim it for longer."""
        now = self.clock.now()
        retention = "24h" if expires_at else None
        self.store.touch([TouchItem(block_hash, now, expires_at, retention)])
        life = self.index.get(block_hash, now)
        if life is not None:
            life.last_used = max(life.last_used, now)
            life.expires_at = max(life.expires_at, expires_at or 0.0)

    def sweep(self) -> None:
        """Drop what has expired."""
        assert sweep(self.store).expired_blocks == len(self.index.sweep(self.clock.now()))

    def check(self) -> None:
        """Compare what both find, and what both hold."""
        self.index.check()
        now, records = self.clock.now(), list(self.records.values())
        found = {h for h in self.records if self.index.get(h, now) is not None}
        assert found_in(self.store, records) == found
        assert self.store.stats().blocks == len(self.index)


def found_in(store: CheckedStore, records: list[BlockRecord]) -> set[bytes]:
    return set(store.find([each.block_hash for each in records]))


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_leave_the_same_blocks_in_both(seed: int, tmp_path: Path) -> None:
    both, generator = Both(tmp_path / "store"), random.Random(seed)
    for _ in range(250):
        what = generator.random()
        if what < 0.55:
            chain, position = generator.choice(CHAINS), generator.randrange(POSITIONS)
            life_s = generator.choice((20.0, 60.0, 1e6))
            both.put(both.record(chain, position, life_s=life_s))
        elif what < 0.75 and both.records:
            later = generator.choice((None, both.clock.now() + 90.0))
            both.touch(generator.choice(sorted(both.records)), later)
        elif what < 0.9:
            both.clock.advance(generator.choice((0.5, 3.0, 15.0)))
        else:
            both.sweep()
        both.check()
    assert both.evicted, "nothing was evicted, so that the test compares little"


def test_the_tail_of_what_was_unused_for_longest_goes_first(tmp_path: Path) -> None:
    both = Both(tmp_path / "store")
    for chain in "ab":
        for position in range(3):
            both.put(both.record(chain, position))
        both.clock.advance(1.0)
    for position in range(3):
        both.touch(BlockHash(both.record("a", position).block_hash), None)
    both.clock.advance(1.0)
    number = 0
    while len(both.evicted) < 6:
        both.put(both.record("filler", number))
        number += 1
        both.check()
    order = [("b", 2), ("b", 1), ("b", 0), ("a", 2), ("a", 1), ("a", 0)]
    assert both.evicted == [both.record(*each).block_hash for each in order]
