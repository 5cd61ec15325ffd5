"""The simulated disk decides as the store does, whatever the operations."""

import random
from pathlib import Path

import pytest

from tests.fakes import FakeClock
from tests.storage.blocks import CheckedStore, make_record, open_store, put, sweep
from tieredkv.sizing.disk import SWEEP_S, SimulatedDisk
from tieredkv.tier import Event, Gone, Lent, Loaded, LookupDone, Stored, TouchItem
from tieredkv.types import BlockHash, BlockRecord

SIZE_BYTES = 128 << 10
CHAINS, POSITIONS = "abcdef", 12


class Both:
    """A store and a simulated disk, which get the same operations."""

    def __init__(self, path: Path) -> None:
        self.clock = FakeClock()
        # Half a block more than whole ones, as the store's index grows a little.
        self.store = open_store(path, self.clock, budget_bytes=(4 << 20) + SIZE_BYTES // 2)
        self.evicted, self.next_sweep = list[bytes](), 0.0
        self.disk = SimulatedDisk(self.capacity(), self.clock)
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
        block_hash = BlockHash(record.block_hash)
        self.records.setdefault(block_hash, record)
        if self.store.holds(record):
            self.store.touch([record])
        else:
            put(self.store, record)
        self.disk.store([Lent.of(record, 0)])
        self.hear()

    def touch(self, block_hash: BlockHash, expires_at: float | None) -> None:
        """Use a block, if it is there, and claim it for longer."""
        now = self.clock.now()
        retention = "24h" if expires_at else None
        for tier in self.store, self.disk:
            tier.touch([TouchItem(block_hash, now, expires_at, retention)])

    def hear(self) -> list[Event]:
        """Return what the simulated disk tells but for what has gone, and sweep the store as it is.

        The simulated disk drops what has expired when it is due.
        """
        now, others, num_expired = self.clock.now(), list[Event](), 0
        for event in self.disk.poll():
            if not isinstance(event, Gone):
                others.append(event)
            elif event.reason == "expired":
                num_expired += len(event.hashes)
            else:
                self.evicted += event.hashes
        if now >= self.next_sweep:
            self.next_sweep = now + SWEEP_S
            assert sweep(self.store).expired_blocks == num_expired
        return others

    def found(self) -> set[bytes]:
        """Return which blocks the simulated disk finds."""
        job = self.disk.lookup(list(self.records))
        (done,) = self.hear()
        assert isinstance(done, LookupDone) and done.job == job
        return set(done.found)

    def check(self) -> None:
        """Compare what both find, and what both hold."""
        self.disk.check()
        assert found_in(self.store, [*self.records.values()]) == self.found()
        assert self.store.stats().blocks == self.disk.stats().blocks


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
            both.clock.advance(SWEEP_S)
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


def make_lent(position: int, page_id: int, clock: FakeClock, *, life_s: float = 60.0) -> Lent:
    times = {"now": clock.now(), "expires_at": clock.now() + life_s}
    return Lent.of(make_record("a", position, **times), page_id)


def test_loans_of_a_simulated_disk_end_at_the_next_poll_with_the_life_of_the_block() -> None:
    clock = FakeClock()
    disk = SimulatedDisk(2, clock)
    lent = [make_lent(each, each, clock) for each in range(3)]
    disk.store(lent)
    oldest = lent[1].block_hash  # of equal age, the tail of a prompt goes first
    stored = [Stored(0), Stored(1), Stored(2)]
    assert disk.poll() == [*stored, Gone([oldest], "capacity", 1)]
    disk.load([lent[2], lent[1]])
    assert disk.poll() == [Loaded(2, life=lent[2].life), Loaded(1, "missing")]
    figures = disk.stats()
    assert (figures.blocks, figures.num_stored, figures.num_evicted) == (2, 3, 1)
    assert disk.state().room_bytes == 0


def test_a_block_that_has_expired_is_missing_before_it_is_swept() -> None:
    clock = FakeClock()
    disk, lent = SimulatedDisk(2, clock), make_lent(0, 0, clock, life_s=5.0)
    disk.poll()  # the next sweep is due after `SWEEP_S`
    disk.store([lent])
    clock.advance(5.0)
    disk.touch([TouchItem(lent.block_hash, clock.now(), clock.now() + 60.0, "24h")])
    disk.load([lent])
    assert disk.poll() == [Stored(0), Loaded(0, "missing")]
    clock.advance(SWEEP_S)
    assert disk.poll() == [Gone([lent.block_hash], "expired", 1)]


def test_what_is_told_of_a_block_that_left_and_came_back_ends_with_where_it_is() -> None:
    clock = FakeClock()
    disk, first = SimulatedDisk(1, clock), make_lent(0, 0, clock)
    disk.store([first])
    disk.poll()
    clock.advance(1.0)
    disk.store([make_lent(1, 1, clock), make_lent(0, 0, clock)])
    other = make_lent(1, 1, clock).block_hash
    gone = Gone([first.block_hash, other], "capacity", 2)
    assert disk.poll() == [Stored(1), gone, Stored(0)]


def test_a_disk_without_room_stores_nothing() -> None:
    clock = FakeClock()
    disk = SimulatedDisk(0, clock)
    disk.store([make_lent(0, 0, clock)])
    assert disk.poll() == [Stored(0, "full")]
    assert disk.stats().num_stored == 0


def test_a_deleted_block_is_gone_for_its_reason() -> None:
    clock = FakeClock()
    disk, lent = SimulatedDisk(2, clock), make_lent(0, 0, clock)
    disk.store([lent])
    disk.delete([lent.block_hash], "operator")
    assert disk.poll() == [Stored(0), Gone([lent.block_hash], "operator", 1)]
    assert disk.stats().deleted == {"operator": 1}
