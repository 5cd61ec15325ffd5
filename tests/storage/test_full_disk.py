"""The store on a filesystem that is really full. It is made and mounted here, which needs root."""

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.fakes import FakeClock
from tests.golden import refused
from tests.storage.blocks import (
    BLOCK_BYTES,
    evict,
    load,
    make_record,
    open_store,
    payload_of,
    put,
    segment_files,
    stored_hashes,
    sweep,
    verify,
)
from tests.storage.conftest import wait_until
from tieredkv.errors import StorageError, StoreFullError
from tieredkv.operate.calls import EvictFilter
from tieredkv.tier import TouchItem
from tieredkv.types import BlockRecord

SMALL_BYTES, BUDGET_BYTES = 3 << 20, 64 << 20


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    mount_point, image = tmp_path / "disk", tmp_path / "image"
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "tmpfs", str(mount_point)]
    if request.param == "ext4":
        image.write_bytes(bytes(SMALL_BYTES))
        subprocess.run(["mkfs.ext4", "-q", "-m0", "-O", "^has_journal", str(image)], check=True)
        command = ["mount", "-o", "loop", str(image), str(mount_point)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a filesystem is not permitted here")
    yield mount_point
    subprocess.run(["umount", "--lazy", str(mount_point)], check=True)


def fill(disk: Path, clock: FakeClock) -> list[BlockRecord]:
    """Store until blocks are evicted, then fill the disk; return the blocks that are stored."""
    stored: list[BlockRecord] = []
    with open_store(disk / "s", clock, budget_bytes=BUDGET_BYTES) as store:
        while not store.stats().num_evicted:
            stored.append(make_record(f"{len(stored)}", expires_at=clock.now() + 10))
            assert put(store, stored[-1]) == [True]
        there = stored_hashes(store, stored)
        stored = [each for each in stored if each.block_hash in there]
        assert [load(store, each) for each in stored] == [payload_of(each) for each in stored]
        store.check()
    fill_up(disk / "stranger")
    return stored


def fill_up(path: Path) -> None:
    """Fill the disk with a file, so that not one page is left for the index."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1024))


def test_a_disk_too_full_for_a_new_index_is_told_and_the_old_one_stays(small_disk: Path) -> None:
    clock, folder, stranger = FakeClock(), small_disk / "s", small_disk / "stranger"
    records = [make_record(f"{number}", now=clock.now()) for number in range(100)]
    with open_store(folder, clock, budget_bytes=BUDGET_BYTES) as store:
        put(store, *records)
        stranger.write_bytes(bytes(int(store.files.free_bytes()) - (64 << 10)))
        with refused(StoreFullError):
            store.rebuild()
        stranger.unlink()
        assert [load(store, each) for each in records] == [payload_of(each) for each in records]
        store.rebuild()
        assert [load(store, each) for each in records] == [payload_of(each) for each in records]
        store.check()


def test_new_blocks_take_the_place_of_the_longest_unused_ones(small_disk: Path) -> None:
    clock, kept = FakeClock(), make_record("kept")
    records = [make_record(f"{number}", now=clock.now() + number) for number in range(500)]
    with open_store(small_disk / "s", clock, budget_bytes=BUDGET_BYTES) as store:
        for number, record in enumerate([kept, *records]):
            clock.moment = record.computed_at
            assert put(store, record) == [True]
            assert load(store, record) == payload_of(record)
            store.touch([TouchItem(kept.block_hash, clock.now())])
            if number % 50 == 0:
                store.check()
        there = stored_hashes(store, [kept, *records])
        newest = {each.block_hash for each in [kept, *records[-len(there) + 1 :]]}
        assert there == newest
        assert len(there) * BLOCK_BYTES > 0.4 * SMALL_BYTES
        assert store.stats().faults == {}
        assert os.statvfs(small_disk).f_bavail > 0, "nobody else can write a byte"


def test_blocks_of_all_sizes_share_a_full_disk(small_disk: Path) -> None:
    sizes = [4096, 30_000, 9_000, 100_000, 60_000]
    clock = FakeClock()
    with open_store(small_disk / "s", clock, budget_bytes=BUDGET_BYTES) as store:
        for number in range(200):
            clock.advance(1)
            record = make_record(f"{number}", size_bytes=sizes[number % 5], now=clock.now())
            assert put(store, record) == [True]
            assert load(store, record) == payload_of(record)
        store.check()
        assert store.stats().bytes_live > 0.4 * SMALL_BYTES


def test_the_tier_grows_again_once_the_disk_has_room(small_disk: Path) -> None:
    (small_disk / "stranger").write_bytes(bytes(SMALL_BYTES // 2))
    with open_store(small_disk / "s", budget_bytes=BUDGET_BYTES) as store:
        names = map(str, itertools.count())
        while not store.stats().num_evicted:
            put(store, make_record(next(names)))
        num_blocks = store.stats().blocks
        (small_disk / "stranger").unlink()

        def has_grown() -> bool:
            put(store, make_record(next(names)))
            return store.stats().blocks > 1.3 * num_blocks

        wait_until(has_grown)
        store.check()


def test_blocks_are_stored_where_others_left_nothing_to_the_index(small_disk: Path) -> None:
    clock = FakeClock()
    stored = fill(small_disk, clock)
    later = [make_record(f"later {each}", now=clock.now() + each / 10) for each in range(20)]
    with open_store(small_disk / "s", clock, budget_bytes=BUDGET_BYTES) as store:

        def is_stored(record: BlockRecord) -> bool:
            with suppress(StorageError):
                return put(store, record) == [True]
            return False

        for number, record in enumerate(later):
            if number % 10 == 5:
                fill_up(small_disk / f"another {number}")
            wait_until(partial(is_stored, record))
            assert load(store, record) == payload_of(record)
        assert store.stats().blocks > len(stored) // 2
        store.check()
    with open_store(small_disk / "s", clock, budget_bytes=BUDGET_BYTES) as store:
        assert verify(store).bad == 0


def test_expired_bytes_go_although_the_index_cannot_grow(small_disk: Path) -> None:
    clock = FakeClock()
    stored = fill(small_disk, clock)
    assert len(stored) > 50
    with open_store(small_disk / "s", clock, budget_bytes=BUDGET_BYTES) as store:
        assert [load(store, each) for each in stored] == [payload_of(each) for each in stored]
        clock.advance(10)
        assert sweep(store).expired_blocks == len(stored)
        assert segment_files(small_disk / "s") == []
        store.check()
        assert put(store, make_record("after")) == [True]


def test_an_operator_can_evict_to_free_a_full_disk(small_disk: Path) -> None:
    clock = FakeClock()
    stored = fill(small_disk, clock)
    with open_store(small_disk / "s", clock, budget_bytes=BUDGET_BYTES) as store:
        assert evict(store, EvictFilter(all=True)).evicted_blocks == len(stored)
        assert segment_files(small_disk / "s") == []
        store.check()
