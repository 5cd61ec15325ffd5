"""The worker tells which blocks the store has, and the engine's table of them is right."""

import math
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.fakes import FakeClock
from tests.storage.blocks import CheckedStore, digest, make_record, open_store, put, sweep
from tests.storage.conftest import Harness, Mailbox, make_chain
from tests.waiting import wait_until
from tieredkv.cache.presence import Presence
from tieredkv.clock import Clock
from tieredkv.errors import StorageError
from tieredkv.storage.client.client import StoreClient
from tieredkv.storage.index.transaction import IndexTxn
from tieredkv.storage.worker import telling
from tieredkv.storage.worker.fault_log import FaultLog
from tieredkv.storage.worker.loop import Loop
from tieredkv.storage.worker.telling import Telling
from tieredkv.tier import Gone, Held, Restarted, Stored, TouchItem
from tieredkv.types import BlockRecord

PIECE = 16


class Told:
    """A store, what tells of it, and the table that an engine makes of that."""

    def __init__(self, store: CheckedStore, *, is_on: bool = True) -> None:
        self.store, self.table, self.pieces = store, Presence(), list[Held]()
        self.is_read = True
        self.telling = Telling(
            store, Loop(store.thread), FaultLog(), lambda: self.is_read, self._hear, is_on
        )

    def _hear(self, told: Held | Gone) -> None:
        if isinstance(told, Gone):
            self.table.discard(told.hashes)
        else:
            self.table.take(told)
            self.pieces.append(told)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.telling.step()

    def finish(self) -> None:
        while not self.table.is_whole:
            self.telling.step()

    def check(self, *maybe: BlockRecord) -> None:
        """Compare the table with the store, for these blocks and all that the store has."""
        self.table.check()
        now = self.store.clock.now()
        with self.store.index.reading() as txn:
            found = {name: it.record.expires_at for name, it in txn.blocks() if it is not None}
        names = [*{*found, *(each.block_hash for each in maybe)}]
        later = sorted(it + 0.5 for it in found.values() if it > now)
        for moment in (now, *later[:: max(1, len(later) // 4)]):
            alive = {name for name in found if math.ceil(found[name]) > max(moment, now)}
            has = self.table.has(names, moment)
            assert {name for name, is_there in zip(names, has, strict=True) if is_there} == alive


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "_PIECE_BLOCKS", PIECE)
    monkeypatch.setattr(telling, "_STEP_BLOCKS", PIECE // 2)
    monkeypatch.setattr(telling, "_PIECE_S", math.inf)
    monkeypatch.setattr(telling, "_PAUSES", 0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckedStore]:
    with open_store(tmp_path / "store", tells_blocks=True) as store:
        yield store


def blocks(count: int, name: str = "block") -> list[BlockRecord]:
    return [make_record(f"{name} {number}") for number in range(count)]


def test_all_blocks_are_told_in_pieces_and_then_the_table_is_whole(store: CheckedStore) -> None:
    put(store, *blocks(40))
    told = Told(store)
    told.step()
    (changes, first) = told.pieces
    assert (changes.is_first, first.is_first, first.num_blocks) == (False, True, 40)
    told.pieces = []
    told.finish()
    sizes = [len(each.seconds) // 4 for each in (first, *told.pieces)]
    assert sizes == [16, 16, 8]
    assert [each.is_whole for each in (first, *told.pieces)] == [False, False, True]
    assert not any(each.is_first for each in told.pieces)
    told.check()
    told.pieces = []
    told.step(5)
    assert told.pieces == [], "nothing has changed since"


def test_the_table_of_an_empty_store_is_whole_at_once(store: CheckedStore) -> None:
    told = Told(store)
    told.step()
    assert told.pieces == [Held(is_first=True, is_whole=True)]
    put(store, *blocks(3))
    told.step()
    assert told.table.is_whole
    told.check(*blocks(4))


def test_blocks_that_have_expired_are_not_told(store: CheckedStore) -> None:
    clock = store.clock
    assert isinstance(clock, FakeClock)
    young, old = blocks(20), [replace(it, expires_at=it.expires_at - 9) for it in blocks(20, "old")]
    put(store, *young, *old)
    store.take_held()
    clock.moment = old[0].expires_at
    told = Told(store)
    told.finish()
    assert len(told.table) == 20
    told.check(*young, *old)


def test_blocks_that_come_and_go_while_the_table_is_told_end_as_they_are(
    store: CheckedStore,
) -> None:
    put(store, *(first := blocks(60)))
    told = Told(store)
    told.step(2)
    store.drop([each.block_hash for each in first[::2]], "operator")
    put(store, *(others := blocks(30, "other")))
    told.step()
    longer = [TouchItem(it.block_hash, it.last_used, it.expires_at + 50, "24h") for it in first]
    store.touch(longer)
    put(store, *first[:3])
    told.finish()
    told.step()
    told.check(*first, *others)


def test_a_full_store_that_evicts_while_the_table_is_told_leaves_no_wrong_block(
    store: CheckedStore,
) -> None:
    put(store, *(first := blocks(200)))
    told, num_evicted = Told(store), store.stats().num_evicted
    told.step(2)
    put(store, *(others := blocks(150, "other")))
    told.finish()
    told.step()
    assert store.stats().num_evicted > num_evicted
    told.check(*first, *others)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_done_to_a_store_the_table_follows(tmp_path: Path, seed: int) -> None:
    generator, clock = random.Random(seed), FakeClock()
    known = list[BlockRecord]()
    with open_store(tmp_path / "store", clock, tells_blocks=True) as store:
        told = Told(store)

        def some(most: int = 12) -> list[BlockRecord]:
            return generator.sample(known, min(len(known), generator.randint(1, most)))

        for turn in range(60):
            now = clock.now()
            match generator.choices(
                ["put", "again", "touch", "drop", "age", "sweep", "rebuild"],
                [6, 2, 4, 2, 2, 1, 0.3],
            )[0]:
                case "put":
                    until = now + generator.uniform(5, 500)
                    new = [make_record(f"{turn}/{n}", now=now, expires_at=until) for n in range(20)]
                    known += new
                    put(store, *new)
                case "again":
                    again = [
                        replace(it, computed_at=now, last_used=now, expires_at=now + 60)
                        for it in some()
                    ]
                    put(store, *again)
                case "touch":
                    store.touch([TouchItem(it.block_hash, now, now + 200, "24h") for it in some()])
                case "drop":
                    store.drop([each.block_hash for each in some()], "operator")
                case "age":
                    clock.moment += generator.uniform(0, 60)
                case "sweep":
                    sweep(store)
                case "rebuild":
                    store.rebuild()
            if generator.random() < 0.7:
                told.step()
                if told.table.is_whole:
                    told.check(*known)
        told.step()
        told.finish()
        told.check(*known)


def test_the_table_begins_again_when_the_index_was_made_again(store: CheckedStore) -> None:
    put(store, *(kept := blocks(40)))
    told = Told(store)
    told.finish()
    store.rebuild()
    told.step()
    assert not told.table.is_whole
    told.finish()
    told.check(*kept)


def test_a_damaged_page_ends_the_walk_and_has_the_index_made_again(
    store: CheckedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, *(kept := blocks(40)))
    told, records = Told(store), IndexTxn.records
    told.step()
    with monkeypatch.context() as patch:
        patch.setattr(IndexTxn, "records", lambda txn, start: records(txn))  # for ever the first
        told.step(10)
    assert not told.table.is_whole and told.telling.wait_s == math.inf
    sweep(store)
    told.step()
    told.finish()
    told.check(*kept)


def test_an_index_that_cannot_be_read_is_tried_again(
    store: CheckedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, *(kept := blocks(40)))
    told = Told(store)
    told.step()

    def fail(txn: IndexTxn, start: bytes) -> None:
        raise StorageError("the disk is away")

    monkeypatch.setattr(telling, "_AGAIN_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(IndexTxn, "records", fail)
        told.step(3)
        assert not told.table.is_whole
    told.finish()
    told.check(*kept)


def test_nothing_is_read_while_the_engine_does_not_read(store: CheckedStore) -> None:
    put(store, *blocks(40))
    store.take_held()
    told = Told(store)
    told.is_read = False
    told.step(3)
    assert told.pieces == [] and told.telling.wait_s > 0


def test_a_worker_that_was_not_asked_to_tells_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        put(store, *blocks(3))
        told = Told(store, is_on=False)
        told.step(3)
        store.rebuild()
        told.step(3)
        assert told.pieces == [] and told.telling.wait_s == math.inf


# --- with a worker ------------------------------------------------------------------------------


class Follower:
    """Makes the table of what a client tells."""

    def __init__(self, client: StoreClient) -> None:
        self.client, self.table = client, Presence()
        self.events = list[object]()

    def take(self) -> None:
        for event in self.client.poll():
            self.events.append(event)
            if isinstance(event, Held):
                self.table.take(event)
            elif isinstance(event, Gone):
                self.table.discard(event.hashes)

    def wait(self) -> None:
        def is_whole() -> bool:
            self.take()
            return self.table.is_whole

        wait_until(is_whole, "the table does not come")


def filled(harness: Harness, count: int) -> list[BlockRecord]:
    """Put some thousand small blocks into the folder of a harness."""
    now = Clock().now()
    records = [make_record(f"{number}", now=now, size_bytes=512) for number in range(count)]
    with open_store(harness.folder, Clock(), budget_bytes=64 << 20) as store:
        for first in range(0, count, 64):
            put(store, *records[first : first + 64])
    return records


def test_the_table_begins_again_with_a_worker_that_takes_the_place_of_a_killed_one(
    harness: Harness,
) -> None:
    records = filled(harness, 2100)
    hashes = [each.block_hash for each in records]
    client = harness.open(tells_blocks=True)
    follower, pid = Follower(client), client.pid
    assert pid is not None

    def has_begun() -> bool:
        follower.take()
        return bool(follower.events)

    wait_until(has_begun)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: client.pid not in (None, pid))
    follower.take()
    down = follower.events.index(Held(is_first=True))
    assert down < follower.events.index(Restarted())
    follower.wait()
    assert follower.table.has(hashes, time.time()).all()
    assert len(follower.table) == len(hashes)
    client.delete(hashes[:50], "operator")

    def are_gone() -> bool:
        follower.take()
        return len(follower.table) == len(hashes) - 50

    wait_until(are_gone)
    assert not follower.table.has(hashes[:50], time.time()).any()


def test_a_block_is_told_before_its_store_ends_and_is_told_again_when_it_lives_longer(
    harness: Harness,
) -> None:
    client = harness.open(tells_blocks=True, sweep_interval_s=60)
    follower, mail, (record, *_) = Follower(client), Mailbox(client), make_chain("a", 1)
    follower.wait()
    mail.store([record])
    told = [it for it in mail.events if isinstance(it, Held)]
    assert told == [Held.of({record.block_hash: record.expires_at})]
    client.touch([TouchItem(record.block_hash, time.time(), record.expires_at + 60, "24h")])
    (held,) = [*mail.take(Held)] if not mail.events else [*mail.take(Held, 2)][1:]
    assert held == Held.of({record.block_hash: record.expires_at + 60})


@pytest.mark.parametrize("tells_blocks", [True, False])
def test_the_table_of_an_encrypted_store_has_hashes(
    harness: Harness, tmp_path: Path, tells_blocks: bool
) -> None:
    options = {"encryption": "on", "key_dir": str(tmp_path / "keys")}
    chain = make_chain("a", 20)
    hashes = [each.block_hash for each in chain]
    with_table = harness.open(**options)
    Mailbox(with_table).store(chain)
    with_table.close()
    client = harness.open(**options, tells_blocks=tells_blocks)
    follower, mail = Follower(client), Mailbox(client)
    if not tells_blocks:
        assert mail.lookup(hashes) == chain
        assert not [it for it in mail.events if isinstance(it, Held)]
        return
    follower.wait()
    assert follower.table.has(hashes, time.time()).all()
    assert not follower.table.has(client.names.hide(hashes), time.time()).any()
    more = make_chain("b", 3)
    mail.store(more)
    for event in mail.events:
        if isinstance(event, Held):
            follower.table.take(event)
    assert follower.table.has([each.block_hash for each in more], time.time()).all()
    assert not follower.table.has([digest("none")], time.time()).any()
    assert Stored(0) not in mail.events
