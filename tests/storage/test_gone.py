"""The store tells which blocks have left it, for whatever reason, and of no others."""

from collections.abc import Callable
from pathlib import Path

from tests.fakes import FakeClock
from tests.storage.blocks import Hearer, evict, make_record, open_store, put, sweep
from tests.storage.conftest import PAGE_BYTES, Harness, Mailbox, lent_pages, make_chain
from tests.waiting import wait_until
from tieredkv.errors import CorruptBlockError
from tieredkv.operate.calls import EvictFilter
from tieredkv.storage.messages.operator import Delete
from tieredkv.storage.worker.operators import Operators
from tieredkv.tier import Gone, Stored


def test_a_store_tells_of_deleted_bad_evicted_and_expired_blocks_and_why_they_left(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    records = [make_record(f"block {number}") for number in range(5)]
    with open_store(tmp_path / "store", clock, tells_blocks=True) as store:
        put(store, *records)
        assert store.take_gone() == []
        first, second, *others = [record.block_hash for record in records]
        store.drop([first, first, b"none" * 8], "test")
        located = store.locate(second)
        assert located is not None
        extent_bytes = located.extent_bytes
        assert store.take_gone() == [(first, "test", extent_bytes)]
        store.read_failed(located, CorruptBlockError("bad", reason="checksum"))
        assert store.take_gone() == [(second, "damaged", extent_bytes)]
        clock.moment = records[0].expires_at
        assert store.take_gone() == []
        sweep(store)
        expired = [(block_hash, "expired", extent_bytes) for block_hash in others]
        assert sorted(store.take_gone()) == sorted(expired)
        put(store, new := make_record("new", now=clock.moment))
        evict(store, EvictFilter(all=True))
        assert store.take_gone() == [(new.block_hash, "operator", extent_bytes)]


def test_a_block_that_came_back_is_not_gone(tmp_path: Path) -> None:
    record = make_record("block")
    with open_store(tmp_path / "store", tells_blocks=True) as store:
        put(store, record)
        store.drop([record.block_hash], "test")
        put(store, record)
        assert store.take_gone() == []
        store.drop([record.block_hash], "test")
        store.rebuild()
        assert [left[:2] for left in store.take_gone()] == [(record.block_hash, "test")]


def test_a_store_notes_nothing_unless_it_is_asked_to(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        put(store, make_record("block"))
        evict(store, EvictFilter(all=True))
        assert store.room.changes is None
        assert store.take_gone() == []


def test_a_deletion_is_answered_when_the_engine_was_told_of_it(tmp_path: Path) -> None:
    record, told = make_record("block"), list[bytes]()
    with open_store(tmp_path / "store", tells_blocks=True) as store:

        def after_telling(call: Callable[[], None]) -> None:
            told.extend(left.block_hash for left in store.take_gone())
            call()

        put(store, record)
        operators = Operators(store, store.stats, after_telling=after_telling)
        for _ in operators.answer(Delete(), Hearer()):
            assert told == [record.block_hash]
        assert told


def test_a_worker_tells_of_what_it_evicts_after_it_told_that_it_was_stored(
    harness: Harness,
) -> None:
    client = harness.open(budget_bytes=2 << 20, tells_blocks=True)
    mail, held = Mailbox(client), set[bytes]()
    for number in range(6):
        chain = make_chain(f"chain {number}", 16)
        mail.fill(chain)
        client.store([*lent_pages(chain)])
        num_ended = 0
        while num_ended < len(chain):
            for event in client.poll():
                if isinstance(event, Stored):
                    num_ended += 1
                    held |= {client.block_of(event)} if event.ok else set()
                elif isinstance(event, Gone):
                    assert event.reason == "capacity"
                    assert event.num_bytes >= len(event.hashes) * PAGE_BYTES
                    assert held.issuperset(event.hashes)
                    held.difference_update(event.hashes)

    def agrees() -> bool:
        for event in client.poll():
            if isinstance(event, Gone):
                held.difference_update(event.hashes)
        return len(held) == client.stats().blocks

    wait_until(agrees, "what it tells differs from what it has")
    assert client.stats().num_evicted > 0
