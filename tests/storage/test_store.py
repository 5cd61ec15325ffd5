import math
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.fakes import FakeClock
from tests.golden import refused
from tests.storage.blocks import (
    BLOCK_BYTES,
    BUDGET_BYTES,
    chains,
    digest,
    evict,
    load,
    make_record,
    occupied_bytes,
    open_store,
    page_with,
    payload_of,
    put,
    reserve,
    segment_files,
    stored_hashes,
    sweep,
)
from tieredkv.errors import IntegrityError, StorageError, StoreFullError
from tieredkv.operate.calls import EvictFilter
from tieredkv.operate.chain_ids import chain_id
from tieredkv.storage.extents.space import minimum_budget_bytes
from tieredkv.storage.format.record import HEADER_BYTES, Extent
from tieredkv.storage.index.environment import PAGE_BYTES
from tieredkv.storage.index.transaction import TXN_BLOCKS, IndexTxn
from tieredkv.tier import TouchItem
from tieredkv.types import BlockRecord


def chain(name: str, length: int, **changes: Any) -> list[BlockRecord]:
    return [make_record(name, i, **changes) for i in range(length)]


def test_a_block_comes_back_bit_for_bit_after_reopening(tmp_path: Path) -> None:
    records = [*chain("a", 5), make_record("odd", size_bytes=5001), make_record("s", size_bytes=1)]
    with open_store(tmp_path / "s") as store:
        assert put(store, *records) == [True] * 7
        assert [load(store, record) for record in records] == [payload_of(r) for r in records]
    with open_store(tmp_path / "s", sync="commit") as store:
        store.check()
        assert store.lookup([record.block_hash for record in records]) == records
        assert [load(store, record) for record in records] == [payload_of(r) for r in records]
        assert store.lookup([digest("unknown")]) == [None]


def test_a_load_reads_its_extent_once_and_nothing_else(tmp_path: Path) -> None:
    record = make_record(size_bytes=2 << 20)
    with open_store(tmp_path / "s", budget_bytes=16 << 20) as store:
        put(store, record)
        load(store, record)
        assert store.stats().bytes_read == (2 << 20) + HEADER_BYTES


@pytest.mark.parametrize("encryption", ["off", "on"])
@pytest.mark.parametrize("size_bytes", [1, 4096, 512 << 10, (2 << 20) - 1, 2 << 20])
def test_a_write_can_be_given_up_before_each_of_its_pieces_and_made_again(
    tmp_path: Path, size_bytes: int, encryption: str
) -> None:
    record, piece_bytes = make_record(size_bytes=size_bytes), 512 << 10
    options: dict[str, Any] = {"encryption": encryption, "key_dir": str(tmp_path / "keys")}
    with open_store(tmp_path / "s", budget_bytes=16 << 20, **options) as store:
        extent, page = reserve(store, record), page_with(payload_of(record))
        assert extent is not None
        for num_pieces in range(math.ceil(size_bytes / piece_bytes)):
            num_before = store.stats().bytes_written
            with pytest.raises(GivenUpError) as error:
                store.write(extent, record, page, None, give_up_after(num_pieces))
            num_written = num_pieces * piece_bytes + bool(num_pieces) * HEADER_BYTES
            assert error.value.args == (num_written,)
            assert store.stats().bytes_written - num_before == num_written
        store.commit([store.write(extent, record, page, None, give_up_after(9))])
        store.check()
        assert load(store, record) == payload_of(record)


class GivenUpError(Exception):
    """What a write is given up with: the number of bytes that it has written."""


def give_up_after(num_pieces: int) -> Callable[[int], None]:
    """Return a function that raises once it was called more often than this."""
    left = iter(range(num_pieces))

    def call(num_written: int) -> None:
        if next(left, None) is None:
            raise GivenUpError(num_written)

    return call


def test_pages_may_be_longer_than_the_block(tmp_path: Path) -> None:
    record = make_record(size_bytes=5000)
    data = payload_of(record)
    with open_store(tmp_path / "s") as store:
        extent = reserve(store, record)
        assert extent is not None
        page = page_with(data + b"secret of the page's last user", 16384)
        store.commit([store.write(extent, record, page)])
        assert b"secret" not in segment_files(tmp_path / "s")[0].read_bytes()
        located, page = store.locate(record.block_hash), page_with(b"", 16384)
        assert located is not None
        store.read(located, page)
        assert page[:5000] == data


def test_expiry_is_to_the_second_and_touching_does_not_revive(tmp_path: Path) -> None:
    clock = FakeClock()
    record = make_record(expires_at=clock.now() + 10)
    with open_store(tmp_path / "s", clock) as store:
        put(store, record)
        clock.advance(9.999)
        assert load(store, record) == payload_of(record)
        clock.advance(0.001)
        assert load(store, record) is None
        key = record.block_hash
        assert store.lookup([key]) == [None]
        store.touch([TouchItem(key, clock.now(), clock.now() + 99)])
        assert store.lookup([key]) == [None]
        assert sweep(store).expired_blocks == 1
        assert store.stats().blocks == 0
        assert put(store, record) == [False]
        store.check()


def test_expired_bytes_are_in_no_file_after_the_sweep(tmp_path: Path) -> None:
    clock = FakeClock()
    short, long = chain("short", 9, expires_at=clock.now() + 10), chain("long", 9)
    with open_store(tmp_path / "s", clock) as store:
        put(store, *short, *long)
        clock.advance(10)
        result = sweep(store)
        assert (result.expired_blocks, result.erased_bytes) == (9, 9 * (BLOCK_BYTES + 4096))
        raw = b"".join(path.read_bytes() for path in segment_files(tmp_path / "s"))
        for record in short:
            assert payload_of(record)[1000:1032] not in raw
            assert record.block_hash not in raw
        assert all(payload_of(record) in raw for record in long)
        assert sweep(store).expired_blocks == 0
        store.check()


@pytest.mark.parametrize("drop", ["delete", "evict", "capacity", "abandon"])
def test_dropped_bytes_are_in_no_file_after_the_next_sweep(tmp_path: Path, drop: str) -> None:
    record = make_record()
    with open_store(tmp_path / "s") as store:
        if drop == "abandon":
            extent = reserve(store, record)
            assert extent is not None
            store.write(extent, record, page_with(payload_of(record)))
            store.give_back(extent)
        else:
            put(store, record)
        if drop == "delete":
            assert len(store.drop([record.block_hash, digest("x")], "test")) == 1
        elif drop == "evict":
            assert evict(store, EvictFilter(all=True)).evicted_blocks == 1
        elif drop == "capacity":
            while stored_hashes(store, [record]):
                put(store, make_record(f"more{store.stats().num_stored}", size_bytes=100_000))
        sweep(store)
        raw = b"".join(path.read_bytes() for path in segment_files(tmp_path / "s"))
        assert payload_of(record)[1000:1032] not in raw
        store.check()


def test_a_sweep_erases_neighbours_at_once_and_nothing_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for gap in (1000, 2):  # all in a row; then every second extent
        records = [make_record(f"{gap}", i) for i in range(256)]
        kept = records[gap - 1 :: gap]
        gone = [record for record in records if record not in kept]
        with open_store(path, budget_bytes=16 << 20) as store:
            put(store, *records)
            store.drop([record.block_hash for record in gone], "request")
            before = store.stats()
            assert before.bytes_pending == len(gone) * (BLOCK_BYTES + HEADER_BYTES)
            num_steps = sum(1 for _ in store.sweeping())
            # One step more may unlink the segment.
            assert num_steps <= len(gone) // (128 if gap > 256 else 1) + 2
            after = store.stats()
            assert after.bytes_erased - before.bytes_erased == before.bytes_pending
            assert after.bytes_pending == 0
            store.check()
            raw = b"".join(file.read_bytes() for file in segment_files(path))
            assert not any(payload_of(record) in raw for record in gone)
            assert [load(store, record) for record in kept] == [payload_of(r) for r in kept]
            store.drop([record.block_hash for record in kept], "request")
            sweep(store)


def test_room_for_another_extent_size_is_made_only_as_far_as_it_is_needed(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", budget_bytes=5 << 20) as store:
        records = [make_record("small", i) for i in range(300)]
        put(store, *records)
        store.drop([record.block_hash for record in records[:200]], "request")
        assert put(store, make_record("other", size_bytes=1 << 20)) == [True]
        assert store.stats().bytes_erased > 0
        assert store.stats().bytes_pending > 0, "all of them were erased at once"
        assert store.stats().num_evicted == 0
        store.check()


def test_bytes_written_are_counted_over_all_lives_of_a_store(tmp_path: Path) -> None:
    for life in range(3):
        with open_store(tmp_path / "s") as store:
            before = store.stats()
            assert (before.bytes_written, before.bytes_written_ever) == (0, life * 40_960)
            lost, extent = make_record("lost"), reserve(store, make_record("lost"))
            assert extent is not None
            store.write(extent, lost, page_with(payload_of(lost)))
            store.give_back(extent)
            assert store.stats().bytes_written_ever == life * 40_960 + 12_288
            put(store, make_record(f"{life}"), make_record(f"odd {life}", size_bytes=9000))
            after = store.stats()
            assert (after.bytes_written, after.bytes_written_ever) == (40_960, (life + 1) * 40_960)


def test_a_later_claim_extends_a_life_but_never_shortens_it(tmp_path: Path) -> None:
    clock = FakeClock()
    record = make_record(expires_at=clock.now() + 10, retention="1h")
    with open_store(tmp_path / "s", clock, disk_retentions=("24h", "1h")) as store:
        put(store, record)
        key = record.block_hash
        store.touch([TouchItem(key, clock.now() + 1, clock.now() + 50, "24h")])
        store.touch([TouchItem(key, clock.now() - 1, clock.now() + 20, "1h")])
        (found,) = store.lookup([key])
        assert found is not None
        assert (found.expires_at, found.retention) == (clock.now() + 50, "24h")
        assert (found.last_used, found.hits) == (clock.now() + 1, 2)
        store.check()


def test_storing_again_keeps_the_older_bytes_unless_they_were_computed_anew(tmp_path: Path) -> None:
    clock = FakeClock()
    first = make_record()
    anew = make_record(computed_at=clock.now() + 5, expires_at=clock.now() + 99_999)
    with open_store(tmp_path / "s", clock) as store:
        put(store, first)
        put(store, make_record(expires_at=clock.now() + 90_000))
        assert load(store, first) == payload_of(first)
        assert store.lookup([first.block_hash])[0].expires_at == clock.now() + 90_000  # type: ignore
        put(store, anew)
        assert load(store, anew) == payload_of(anew)
        assert store.stats().blocks == 1
        store.check()


def test_eviction_takes_the_longest_unused_and_the_tail_of_a_chain_first(tmp_path: Path) -> None:
    clock = FakeClock()
    with open_store(tmp_path / "s", clock, budget_bytes=2 << 20) as store:
        old: list[BlockRecord] = []
        new: list[BlockRecord] = []
        while store.stats().num_evicted == 0:
            clock.advance(1)
            name, tenant = f"old{len(old)}", digest(f"tenant{len(old) % 3}")
            old += chain(name, 8, last_used=clock.now(), namespace=tenant)
            put(store, *old[-8:])
        gone = [r for r in old if not stored_hashes(store, [r])]
        while len(new) < 24:
            clock.advance(1)
            new.append(make_record(f"new{len(new)}", last_used=clock.now()))
            put(store, new[-1])
            now_gone = [r for r in old if not stored_hashes(store, [r])]
            assert len(now_gone) <= len(gone) + 1
            gone = now_gone
        assert stored_hashes(store, new) == {r.block_hash for r in new}
        order = sorted(old, key=lambda r: (r.last_used, -r.position))
        assert sorted(gone, key=lambda r: (r.last_used, -r.position)) == order[: len(gone)]
        store.check()


def test_pinned_blocks_give_way_last_in_the_order_in_which_pin_ends(tmp_path: Path) -> None:
    path, clock = tmp_path / "s", FakeClock()
    start = clock.now()
    kept = [
        make_record("kept", i, last_used=start, pinned_until=start + 1e6 * (3 - i))
        for i in range(3)
    ]
    touched = make_record("touched", last_used=start)
    with open_store(path, clock, budget_bytes=2 << 20) as store:
        put(store, *kept, touched)
        store.touch([TouchItem(touched.block_hash, start, pinned_until=start + 1e5)])
        store.touch([TouchItem(touched.block_hash, start)])
    with open_store(path, clock, budget_bytes=2 << 20) as store:
        while store.stats().num_evicted < 20:
            clock.advance(1)
            put(store, make_record(f"flood{clock.now()}", last_used=clock.now()))
        assert len(stored_hashes(store, [*kept, touched])) == 4
        for num_left in (3, 2, 1, 0):
            while len(stored_hashes(store, [*kept, touched])) > num_left:
                clock.advance(1)
                used = clock.now() + 1e7  # after the end of every pin
                put(store, make_record(f"late{used}", last_used=used))
            assert stored_hashes(store, kept) == {each.block_hash for each in kept[:num_left]}
        store.check()


def test_two_extent_sizes_share_a_budget(tmp_path: Path) -> None:
    path, clock = tmp_path / "s", FakeClock()
    with open_store(path, clock) as store:
        for round_number in range(4):
            size = (8192, 120_000)[round_number % 2]
            for i in range(BUDGET_BYTES // size + 5):
                clock.advance(1)
                record = make_record(f"{round_number}/{i}", size_bytes=size, last_used=clock.now())
                assert put(store, record) == [True]
                assert occupied_bytes(path) <= BUDGET_BYTES
                assert load(store, record) == payload_of(record)
            store.check()
            assert store.stats().bytes_live > BUDGET_BYTES * 0.4


def test_a_smaller_budget_is_reached_before_open_returns(tmp_path: Path) -> None:
    path, clock = tmp_path / "s", FakeClock()
    records = [make_record(f"{i}", last_used=clock.now() + i) for i in range(250)]
    with open_store(path, clock) as store:
        put(store, *records)
    with open_store(path, clock, budget_bytes=2 << 20) as store:
        assert occupied_bytes(path) <= 2 << 20
        kept = stored_hashes(store, records)
        assert 50 < len(kept) < 250
        assert kept == {record.block_hash for record in records[-len(kept) :]}
        store.check()
    with open_store(path, clock, budget_bytes=None) as store:
        assert store.stats().bytes_budget == 2 << 20


def test_a_bloated_index_shrinks_when_the_budget_does(tmp_path: Path) -> None:
    path = tmp_path / "s"
    records = [make_record(f"{i}", size_bytes=1) for i in range(4000)]
    with open_store(path, budget_bytes=64 << 20) as store:
        put(store, *records)
        store.drop([record.block_hash for record in records[100:]], "test")
    assert (path / "index" / "data.mdb").stat().st_size > 2 << 20
    with open_store(path, budget_bytes=3 << 20) as store:
        assert occupied_bytes(path) <= 3 << 20
        assert stored_hashes(store, records) == {r.block_hash for r in records[:100]}
        store.check()


def test_a_block_larger_than_the_budget_is_refused_with_both_sizes(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", budget_bytes=1 << 20) as store:
        with refused(StoreFullError):
            reserve(store, make_record(size_bytes=1 << 20))
        assert put(store, make_record()) == [True]
    with refused(StoreFullError):
        open_store(tmp_path / "t", budget_bytes=10_000)


def test_a_trial_file_that_a_power_loss_has_left_takes_no_room(tmp_path: Path) -> None:
    path = tmp_path / "s"
    open_store(path).close()
    (path / "trial").write_bytes(bytes(BUDGET_BYTES))
    with open_store(path) as store:
        assert put(store, *chain("a", 8)) == [True] * 8
    assert not (path / "trial").exists()


def test_room_that_other_files_of_the_store_give_back_is_used(tmp_path: Path) -> None:
    path, records = tmp_path / "s", chain("a", 2)
    with open_store(path) as store:
        (path / "large").write_bytes(bytes(BUDGET_BYTES))
        put(store, records[0])  # sizes are measured after each change
        with pytest.raises(StoreFullError):
            put(store, records[1])
        (path / "large").unlink()
        assert put(store, records[1]) == [True]


def test_a_refused_batch_keeps_no_extent(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", budget_bytes=1 << 20) as store:
        with pytest.raises(StoreFullError):
            store.reserve([make_record("fits"), make_record("large", size_bytes=1 << 20)])
        assert store.stats().bytes_pending == 0
        store.check()


def test_a_batch_that_fails_half_way_keeps_no_extent(tmp_path: Path) -> None:
    def fail_at_the_second(label: str) -> None:
        met.append(label)
        if met.count("reserve:before") == 2:
            raise OSError("the index cannot be written")

    met: list[str] = []
    records = [make_record(f"{number}") for number in range(TXN_BLOCKS + 1)]
    with open_store(tmp_path / "s", failpoint=fail_at_the_second) as store:
        with pytest.raises(StorageError):
            store.reserve(records)
        store.check()
        assert put(store, *records) == [True] * len(records)
        sweep(store)
        assert store.stats().bytes_pending == 0
        store.check()


@pytest.mark.parametrize("size", [1, 32768, 2 << 20])
def test_the_smallest_budget_lets_blocks_replace_one_another(tmp_path: Path, size: int) -> None:
    path, clock = tmp_path / "s", FakeClock()
    budget = minimum_budget_bytes(size)
    with open_store(path, clock, budget_bytes=budget) as store:
        for i in range(40):
            record = make_record(f"{i}", size_bytes=size, last_used=clock.now() + i)
            assert put(store, record) == [True]
            assert load(store, record) == payload_of(record)
            assert occupied_bytes(path) <= budget
        store.check()


def test_lent_extents_are_neither_evicted_nor_lent_twice(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", budget_bytes=2 << 20) as store:
        extents: list[Extent] = []
        while (
            extent := reserve(store, make_record(f"{len(extents)}", size_bytes=60_000))
        ) is not None:
            extents.append(extent)
        assert len(set(extents)) == len(extents) > 5
        sweep(store)
        assert reserve(store, make_record("x", size_bytes=60_000)) is None
        store.check()
        store.give_back(extents.pop())
        with pytest.raises(IntegrityError):
            store.give_back(extents[0]._replace(number=999))
        assert reserve(store, make_record("x", size_bytes=60_000)) is not None


def test_a_failed_write_loses_nothing_that_was_stored(tmp_path: Path) -> None:
    old, new = make_record("old"), make_record("new")
    with open_store(tmp_path / "s") as store:
        put(store, old)
        extent = reserve(store, new)
        assert extent is not None
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with refused(StorageError):
                store.write(extent, new, page_with(payload_of(new)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        store.give_back(extent)
        assert load(store, old) == payload_of(old)
        assert load(store, new) is None
        store.check()
        assert put(store, new) == [True]


def test_a_file_that_cannot_grow_takes_new_blocks_in_the_place_of_old_ones(tmp_path: Path) -> None:
    now = FakeClock().now()
    records = [make_record(f"{i}", now=now - 12 + i, size_bytes=200_000) for i in range(12)]
    with open_store(tmp_path / "s", budget_bytes=64 << 20) as store:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        put(store, *records[:4])
        size = segment_files(tmp_path / "s")[0].stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            assert [put(store, record) for record in records[4:]] == [[True]] * 8
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert segment_files(tmp_path / "s")[0].stat().st_size <= size
        assert [load(store, each) for each in records[9:]] == [payload_of(r) for r in records[9:]]
        assert len(stored_hashes(store, records)) >= 4
        store.check()


def test_a_clock_far_behind_the_store_expires_everything(tmp_path: Path) -> None:
    clock = FakeClock()
    record = make_record()
    with open_store(tmp_path / "s", clock) as store:
        put(store, record)
        clock.advance(1000)
        sweep(store)
    clock.moment = clock.now() - 59
    with open_store(tmp_path / "s", clock) as store:
        assert clock.now() == 1_800_000_000.0 + 1000
        assert load(store, record) == payload_of(record)
    clock.moment = clock.now() - 61
    with open_store(tmp_path / "s", clock) as store:
        assert load(store, record) is None
        assert (store.stats().blocks, store.stats().num_expired) == (0, 1)
        assert segment_files(tmp_path / "s") == []
        assert put(store, record) == [True]
        store.check()
    with open_store(tmp_path / "s", clock) as store:
        assert load(store, record) == payload_of(record)


def test_an_index_that_is_made_again_knows_the_latest_time_that_the_old_one_saw(
    tmp_path: Path,
) -> None:
    """Its blocks are an hour old; a clock that was set back must not make them new again."""
    clock, record = FakeClock(), make_record()
    with open_store(tmp_path / "s", clock) as store:
        put(store, record)
        clock.advance(3600)
        store.ask_for_rebuild()
        sweep(store)
        assert load(store, record) == payload_of(record)
        with store.index.reading() as txn:
            assert txn.meta.clock == clock.now()
    clock.moment = clock.now() - 3600
    with open_store(tmp_path / "s", clock) as store:
        assert (store.stats().blocks, store.stats().num_expired) == (0, 1)


def test_a_block_evicted_between_locate_and_read_is_a_miss_and_no_fault(tmp_path: Path) -> None:
    old, new = make_record("old"), make_record("new")
    with open_store(tmp_path / "s") as store:
        put(store, old)
        located = store.locate(old.block_hash)
        assert located is not None
        store.drop([old.block_hash], "test")
        put(store, new)
        with pytest.raises(StorageError) as caught:
            store.read(located, page_with(b"", BLOCK_BYTES))
        assert store.read_failed(located, caught.value) == "evicted"
        assert store.stats().faults == {}
        assert load(store, new) == payload_of(new)


def test_chains_are_listed_by_their_leaf_and_evicted_without_what_they_share(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    trunk = [replace(each, hits=9) for each in chain("trunk", 3)]
    later = {"last_used": clock.now() + 2, "hits": 4}
    left = make_record("left", 3, parent_hash=trunk[-1].block_hash, **later)
    right = make_record("right", 3, parent_hash=trunk[-1].block_hash, namespace=digest("other"))
    with open_store(tmp_path / "s", clock) as store:
        put(store, *trunk, left, right)
        first, second = chains(store)
        own = left.block_hash, right.block_hash
        assert [first.id, second.id] == [chain_id(each, each) for each in own]
        assert (first.blocks, first.last_position, first.bytes) == (4, 3, 4 * BLOCK_BYTES)
        assert first.last_used == first.last_used_max == clock.now() + 2
        assert (first.hits, second.hits) == (4, 0)
        result = evict(store, EvictFilter(ids=(first.id[:12], "beef")))
        assert (result.evicted_blocks, result.unknown_ids) == (1, ("beef",))
        assert result.freed_bytes == BLOCK_BYTES + 4096
        assert evict(store, EvictFilter(ids=(second.id,))).evicted_blocks == 4
        assert chains(store) == []
        store.check()


def test_filters_must_all_apply_and_an_empty_one_means_nothing(tmp_path: Path) -> None:
    clock = FakeClock()
    old = make_record("old", last_used=clock.now() - 100)
    new = make_record("new", namespace=b"\xab" * 32)
    with open_store(tmp_path / "s", clock) as store:
        put(store, old, new)
        assert evict(store, EvictFilter()).evicted_blocks == 0
        which = EvictFilter(older_than_s=50.0, namespace_prefix="abab")
        assert evict(store, which).evicted_blocks == 0
        assert evict(store, EvictFilter(namespace_prefix="AB")).evicted_blocks == 1
        assert stored_hashes(store, [old, new]) == {old.block_hash}
        assert evict(store, EvictFilter(older_than_s=100.0)).evicted_blocks == 1
        store.check()


def test_closing_twice_is_fine_and_frees_the_lock(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    store.close()
    store.close()
    open_store(tmp_path / "s").close()
    assert os.listdir(f"/proc/{os.getpid()}/fd")


def test_a_reader_of_a_store_that_closes_gets_an_error(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        put(store, make_record())
        steps = store.index.looking_over()
        assert next(steps)
    for reading in (steps, store.index.reading_ahead()):
        with refused(StorageError):
            list(reading)


def test_the_index_does_not_grow_by_what_changes_while_it_is_looked_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks come and go during a slow step. LMDB uses no page again that a reader may see."""

    def turn_over(times: int) -> None:
        for _ in range(times):
            put(store, make_record())
            store.drop([make_record().block_hash], "test")

    def slowly(*arguments: Any) -> Any:
        keys = some_keys(*arguments)
        changing.start()
        changing.join(0.5)
        monkeypatch.undo()
        return keys

    some_keys, changing = IndexTxn.some_keys, threading.Thread(target=turn_over, args=[50])
    with open_store(tmp_path / "s") as store:
        put(store, make_record("other"))
        turn_over(50)
        size_bytes = store.index.file_bytes()
        monkeypatch.setattr(IndexTxn, "some_keys", slowly)
        assert all(store.index.looking_over())
        changing.join()
        assert store.index.file_bytes() <= size_bytes + 10 * PAGE_BYTES


def test_opening_does_not_read_the_entries(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", budget_bytes=64 << 20) as store:
        put(store, *(make_record(f"{i}", size_bytes=1) for i in range(500)))
    store = open_store(tmp_path / "s", budget_bytes=None)
    assert store.stats().bytes_read == 0
    store.close()
