"""What the worker does for operators, and that it delays nothing else."""

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from msgspec.structs import replace

from tests.golden import refused
from tests.storage.blocks import (
    CheckedStore,
    ask,
    digest,
    load,
    make_record,
    open_store,
    payload_of,
    put,
    segment_files,
    stored_hashes,
    sweep,
)
from tests.storage.test_service import NEW, OLD, OLDER, Engine, serving
from tests.waiting import HANG_S
from tieredkv.errors import CorruptIndexError
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import EvictFilter, Ls
from tieredkv.pieces import whole
from tieredkv.storage.extents import room
from tieredkv.storage.format.record import Located
from tieredkv.storage.index.transaction import IndexTxn
from tieredkv.storage.keys import use
from tieredkv.storage.messages.engine import StoreCall
from tieredkv.storage.messages.operator import Delete, Scan, Verify
from tieredkv.storage.store import Store
from tieredkv.storage.worker import loop, operators
from tieredkv.storage.worker.loop import Loop
from tieredkv.storage.worker.steps import deleting
from tieredkv.tier import Lent
from tieredkv.types import Tier
from tieredkv.wire.arena import HostArena

MINE, THEIRS = digest("tenant"), digest("other")
ON_DISK = EvictFilter(namespace_prefix=MINE.hex(), tiers=(Tier.DISK,))


@pytest.fixture
def arena() -> Iterator[HostArena]:
    arena = HostArena(4, 4096)
    yield arena
    arena.close()


@contextmanager
def evicting(path: Path, engine: Engine) -> Iterator[Callable[[], dict[str, Any]]]:
    """Evict my blocks on another thread; yield what waits for the answer."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(StoreControl(path).answer, ON_DISK)
        try:
            yield lambda: answer.result(HANG_S)
        finally:
            engine.gate.opened.set()


def test_a_namespace_is_gone_at_once_and_takes_no_block_while_it_is_deleted(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = Store.drop

    def delete_through_gate(store: Store, hashes: Sequence[bytes], reason: str) -> list[Located]:
        engine.gate("deleting")
        return delete(store, hashes, reason)

    monkeypatch.setattr(Store, "drop", delete_through_gate)
    path, theirs = tmp_path / "store", replace(OLD, namespace=THEIRS, block_hash=digest("theirs"))
    with serving(path, arena) as engine:
        engine.gate.label = "deleting"
        with evicting(path, engine) as answer:
            assert engine.gate.reached.wait(HANG_S)
            assert not engine.lookup(OLD.block_hash, OLDER.block_hash), "they can still be found"
            engine.channel.send(StoreCall([Lent.of(NEW, 0), Lent.of(theirs, 1)]))
            assert not engine.lookup(NEW.block_hash)  # once the stores were received
            engine.gate.opened.set()
            ended = [engine.next_page() for _ in range(2)]
            assert answer()["evicted_blocks"] == 2
        assert {each.page_id: each.reason for each in ended} == {0: "evicted", 1: ""}
        assert [*engine.lookup(NEW.block_hash, theirs.block_hash)] == [theirs.block_hash]


def test_a_store_that_is_under_way_is_deleted_with_its_namespace(
    tmp_path: Path, arena: HostArena
) -> None:
    path = tmp_path / "store"
    with serving(path, arena) as engine:
        engine.hold_up("write:before", StoreCall([Lent.of(NEW, 0)]))
        with evicting(path, engine) as answer:
            assert not engine.lookup(NEW.block_hash)
            engine.gate.opened.set()
            assert answer()["evicted_blocks"] == 3
        assert engine.next_page().ok
        assert not engine.lookup(NEW.block_hash)


def test_a_list_waits_for_no_change_of_the_store(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "_ENGINE_TIMEOUT_S", 0.01)
    with serving(tmp_path / "store", arena) as engine:
        engine.hold_up("commit:before", StoreCall([Lent.of(NEW, 0)]))
        chains = [chain for page in StoreControl(tmp_path / "store").pages(Ls()) for chain in page]
        assert [chain.blocks for chain in chains] == [2]
        engine.gate.opened.set()


def encrypted(path: Path) -> CheckedStore:
    store = open_store(path / "kv", encryption="on", key_dir=str(path / "keys"))
    mine = [make_record("mine", position) for position in range(200)]
    put(store, *mine[:100])
    put(store, *mine[100:])
    put(store, make_record("theirs", namespace=THEIRS))
    return store


def scopes(store: CheckedStore) -> set[bytes]:
    assert store.keys is not None
    return {key.scope[:32] for key in store.keys.table}


def test_the_keys_of_a_namespace_go_before_its_blocks(tmp_path: Path) -> None:
    with encrypted(tmp_path) as store:
        steps = deleting(store, Delete(namespace=MINE.hex()))
        next(steps)
        assert (scopes(store), store.stats().blocks) == ({THEIRS}, 201)
        done = whole(steps)
        assert (done.num_blocks, len(done.erased_keys), done.kept_keys) == (200, 1, [])
        assert store.stats().blocks == 1
        store.check()


def test_no_step_of_a_deletion_destroys_more_than_some_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(use, "_KEYS_A_STEP", 2)
    with encrypted(tmp_path) as store:
        put(store, *[make_record(f"{n}", namespace=digest(f"tenant {n}")) for n in range(6)])
        for asked in (Delete(unused_since=store.clock.now()), Delete()):
            put(store, *[make_record(f"{n}", namespace=digest(f"tenant {n}")) for n in range(6)])
            left = [len(scopes(store)) for _ in deleting(store, asked)]
            assert max(one - other for one, other in pairwise([left[0], *left])) == 2
            assert left[-1] == 0
            store.check()


def test_blocks_of_some_age_keep_the_key_that_others_need(tmp_path: Path) -> None:
    with encrypted(tmp_path) as store:
        old = make_record("old", last_used=make_record().last_used - 100)
        put(store, old)
        asked = Delete(namespace=MINE.hex(), unused_since=old.last_used)
        done = whole(deleting(store, asked))
        assert (done.num_blocks, done.erased_keys, len(done.kept_keys)) == (1, [], 1)
        assert not stored_hashes(store, [old])
        sweep(store)
        assert scopes(store) == {MINE, THEIRS}


def test_a_step_waits_until_the_front_thread_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_PATIENCE_S", HANG_S)
    front, is_busy, may_rest = Loop(), Event(), Event()

    def work() -> None:
        is_busy.set()
        assert may_rest.wait(HANG_S)

    def run() -> None:
        front.wait(HANG_S)
        front.wait(HANG_S)  # idle, until the test ends

    with ThreadPoolExecutor(2) as pool:
        front.hand(work)
        running = pool.submit(run)
        assert is_busy.wait(HANG_S)
        waiting = pool.submit(front.give_way)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        may_rest.set()
        waiting.result(HANG_S)
        front.hand(lambda: None)
        running.result(HANG_S)


def test_a_segment_of_many_extents_is_given_back_in_short_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, most in (("_LOOKED_EXTENTS", 5), ("_SHORTENED_EXTENTS", 8)):
        monkeypatch.setattr(room, name, most)
    with open_store(tmp_path / "kv") as store:
        put(store, *[make_record(f"{n}", size_bytes=4096) for n in range(30)])
        [file] = segment_files(tmp_path / "kv")
        sizes = []
        for _ in deleting(store, Delete()):
            store.check()
            sizes.append(file.stat().st_size if file.exists() else 0)
        assert [*dict.fromkeys(sizes)][1:] == [22 * 8192, 14 * 8192, 6 * 8192, 0]


def test_a_block_that_is_stored_meanwhile_keeps_what_is_left_of_its_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_SHORTENED_EXTENTS", 8)
    with open_store(tmp_path / "kv") as store:
        put(store, *[make_record(f"{n}", size_bytes=4096) for n in range(30)])
        [file] = segment_files(tmp_path / "kv")
        steps, late = deleting(store, Delete()), make_record("late", size_bytes=4096)
        while file.stat().st_size != 22 * 8192:
            next(steps)
        assert put(store, late) == [True]
        whole(steps)
        assert load(store, late) == payload_of(late)
        assert file.stat().st_size == 6 * 8192
        store.check()


def test_a_check_of_few_blocks_of_many_tells_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "_TOLD_S", 0.0)
    with open_store(tmp_path / "kv") as store:
        put(store, *[make_record(f"{n}", size_bytes=4096) for n in range(100)])
        parts = ask(store, Verify(sample=1e-9))
    assert (len(parts), sum(part.checked for part in parts)) == (101, 0)


@pytest.mark.parametrize("places", [(1, 0), (0, 0)])
def test_keys_out_of_order_are_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: tuple[int, ...]
) -> None:
    with open_store(tmp_path / "kv") as store:
        put(store, make_record("a"), make_record("b"))
        with store.index.reading() as txn:
            entries = [*txn.records()]
        found = [entries[place] for place in places]
        monkeypatch.setattr(IndexTxn, "records", lambda *_: iter(found))
        with refused(CorruptIndexError):
            ask(store, Scan())
        ask(store, Verify(sample=1e-9, repair=False))
        monkeypatch.undo()
        with store.index.reading() as txn:
            assert txn.meta.needs_rebuild


def test_the_garbage_collector_has_nothing_to_do_with_blocks_that_were_deleted(
    tmp_path: Path,
) -> None:
    """A million objects would have it stop all threads for half a second."""
    records = [make_record(f"{n}", size_bytes=4096) for n in range(200)]
    with open_store(tmp_path / "kv") as store:
        put(store, *records)
        gc.collect()
        before = len(gc.get_objects())
        store.drop([record.block_hash for record in records], "test")
        gc.collect()
        assert len(gc.get_objects()) - before < 100


def test_one_step_of_a_deletion_unlinks_one_segment_at_most(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv") as store:
        sizes = [4096 * number for number in range(1, 6)]
        put(store, *[make_record(f"{size}", size_bytes=size) for size in sizes])
        assert len(segment_files(tmp_path / "kv")) == len(sizes)
        left = [len(segment_files(tmp_path / "kv")) for _ in deleting(store, Delete())]
        assert {one - other for one, other in pairwise([len(sizes), *left])} == {0, 1}
        assert left[-1] == 0
        store.check()
