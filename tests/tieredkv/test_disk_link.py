"""The link between host memory and disk: loans, what it is given ahead, and its rates."""

import time
from typing import Any

import pytest
import torch

from tests.fake_store import BLOCK_BYTES, FakeStore, chain_of, payload_of
from tests.fakes import FakeClock
from tests.golden import refused
from tieredkv.cache.block import Block
from tieredkv.cache.catalog import Entry
from tieredkv.cache.counters import CacheCounters
from tieredkv.cache.disk_link import (
    MAX_READ_S,
    MAX_WRITE_S,
    MIN_READS,
    MIN_WRITES,
    DiskLink,
    Read,
    Write,
)
from tieredkv.cache.pool import BlockPool
from tieredkv.errors import IntegrityError
from tieredkv.tier import BlockLife, Lent, Restarted
from tieredkv.types import BlockHash, BlockRecord


class Rig:
    """A link, and a store that has the blocks `a` and whose jobs stay open."""

    def __init__(self) -> None:
        self.memory = torch.zeros((8, BLOCK_BYTES), dtype=torch.uint8)
        self.store = FakeStore(self.memory, FakeClock())
        self.store.put("a", 8)
        self.store.is_held = True
        self.counters, self.pool = CacheCounters(), BlockPool(8)
        self.link = DiskLink(self.store, BLOCK_BYTES, self.counters)

    def page(self) -> Block:
        """Return a page that is held."""
        pages = self.pool.allocate(1).blocks
        assert pages is not None
        return pages[0]

    def read(self, index: int) -> BlockHash:
        """Queue a read of one of the blocks."""
        block_hash = chain_of("a", index + 1)[-1]
        page, record = self.page(), self.store.blocks[block_hash][0]
        lent, now = Lent.of(record, page.block_id), time.monotonic()
        self.link.read(lent, record.position, record.expires_at, page, now, record.last_used)
        return block_hash

    def write(self, name: str) -> Entry:
        """Queue a write of a block that the store does not have; return its entry."""
        [block_hash], page = chain_of(name, 1), self.page()
        root = BlockHash(bytes(32))
        shared: dict[str, Any] = {
            "block_hash": block_hash,
            "parent_hash": root,
            "root": root,
            "namespace": b"ns",
            "position": 0,
            "computed_at": 0.0,
            "last_used": 0.0,
        }
        entry = Entry(**shared, claims=frozenset({"24h"}))
        record = BlockRecord(**shared, size_bytes=BLOCK_BYTES, retention="24h", expires_at=1.0)
        self.pool.add_reader(page)
        self.memory[page.block_id] = torch.frombuffer(
            bytearray(payload_of(block_hash)), dtype=torch.uint8
        )
        self.link.write(record, page, entry, time.monotonic())
        return entry


def test_what_is_queued_is_on_loan_at_once_and_starts_together() -> None:
    rig = Rig()
    read, other = rig.read(0), rig.read(1)
    written = rig.write("b").block_hash
    assert rig.link.is_reading(read) and rig.link.is_writing(written)
    assert (rig.link.num_reading, rig.link.num_writing) == (2, 1)
    assert rig.store.jobs == []
    rig.link.send()
    assert (rig.store.loaded, rig.store.stored) == ([read, other], [written])
    rig.link.send()
    assert len(rig.store.jobs) == 3, "each of them is started once"


def test_a_loan_ends_when_the_store_returns_the_page_and_says_why_it_failed() -> None:
    rig = Rig()
    block_hash, entry = rig.read(0), rig.write("b")
    rig.link.send()
    assert list(rig.link.poll()) == []
    rig.link.check()
    rig.store.complete(0)
    [read] = rig.link.poll()
    assert isinstance(read, Read) and read.found == BlockLife.of(rig.store.blocks[block_hash][0])
    assert (read.block_hash, read.reason) == (block_hash, "")
    assert not rig.link.is_reading(block_hash) and rig.link.is_writing(entry.block_hash)
    rig.store.complete(0, reason="full")
    [write] = rig.link.poll()
    assert isinstance(write, Write) and (write.entry, write.reason) == (entry, "full")
    assert rig.link.num_writing == 0
    counts = {between: count for between, (count, _) in rig.counters.move_seconds.items()}
    assert counts == {"disk,host": 1, "host,disk": 1}


def test_a_cancelled_read_is_not_waited_for_and_its_page_stays_on_loan() -> None:
    rig = Rig()
    block_hash, other = rig.read(0), rig.read(1)
    rig.link.send()
    rig.link.cancel(block_hash)
    rig.link.cancel(chain_of("unknown", 1)[0])
    assert not rig.link.is_awaited(block_hash) and rig.link.is_awaited(other)
    assert rig.link.is_reading(block_hash)
    assert [read.block_hash for read in rig.link.reads] == [block_hash, other]
    rig.store.complete(0)
    [read] = rig.link.poll()
    assert isinstance(read, Read) and read.block_hash == block_hash


def test_what_the_store_tells_comes_in_the_same_order() -> None:
    rig, told = Rig(), list[object]()
    rig.read(0)
    rig.link.send()
    [first], [unknown] = chain_of("a", 1), chain_of("unknown", 1)
    found = {first: rig.store.found(rig.store.blocks[first][0])}
    rig.link.look_up([first, unknown], told.append)
    rig.store.answer(0)
    rig.store.complete(0)
    rig.store.restart_empty()
    for event in rig.link.poll():
        told.append(type(event))
    assert told == [found, Read, Restarted]


def test_without_a_disk_nothing_is_found_at_once() -> None:
    told = list[object]()
    DiskLink(None, BLOCK_BYTES, CacheCounters()).look_up(chain_of("a", 1), told.append)
    assert told == [{}]


@pytest.mark.parametrize(
    ("block_bytes", "num_reads"),
    [(4096, 32), (2 << 20, 16), (8 << 20, 4), (32 << 20, 2), (64 << 20, 2)],
)
def test_a_slow_disk_is_given_few_bytes_ahead(block_bytes: int, num_reads: int) -> None:
    link = DiskLink(None, block_bytes, CacheCounters())
    link.read_rate.bytes_per_s = 1.0
    assert link.most_reads(time.monotonic()) == num_reads


@pytest.mark.parametrize("num_blocks", [1, 1000])
def test_the_disk_is_given_ahead_what_it_moves_in_a_moment(num_blocks: int) -> None:
    rig, now = Rig(), time.monotonic()
    rig.link.read_rate.bytes_per_s = num_blocks * BLOCK_BYTES
    rig.link.write_rate.bytes_per_s = num_blocks * BLOCK_BYTES
    assert rig.link.most_reads(now) == max(MIN_READS, int(MAX_READ_S * num_blocks))
    assert rig.link.most_reads(now, 1.0) == max(MIN_READS, int((MAX_READ_S + 1.0) * num_blocks))
    assert rig.link.most_writes == max(MIN_WRITES, int(MAX_WRITE_S * num_blocks))


def test_a_limit_on_reads_holds_them_back() -> None:
    rig, now = Rig(), time.monotonic()
    rig.link.read_rate.limit = BLOCK_BYTES
    assert rig.link.may_read(now)
    rig.read(0)
    assert not rig.link.may_read(now)
    assert rig.link.may_read(now + 1.1)


def test_the_planner_is_told_how_long_reads_keep_the_disk() -> None:
    rig = Rig()
    rig.link.read_rate.bytes_per_s = BLOCK_BYTES
    assert rig.link.read_state(time.monotonic()).busy_s == 0.0
    rig.read(0)
    rig.read(1)
    state = rig.link.read_state(time.monotonic())
    assert state.bytes_per_s == BLOCK_BYTES and state.busy_s == pytest.approx(2.0, abs=0.1)


def test_a_page_that_nobody_holds_must_not_be_on_loan() -> None:
    rig = Rig()
    rig.read(0)
    rig.write("b")
    rig.link.check()
    [read] = rig.link.reads
    rig.pool.release([read.page])
    with refused(IntegrityError):
        rig.link.check()


def test_without_a_disk_nothing_is_told() -> None:
    assert list(DiskLink(None, BLOCK_BYTES, CacheCounters()).poll()) == []
