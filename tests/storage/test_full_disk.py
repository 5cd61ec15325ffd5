"""A filesystem that is really full; makes its own small one, which takes root."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import FakeClock
from tests.storage.blocks import (
    evict,
    load,
    make_record,
    open_store,
    payload_of,
    put,
    segment_files,
    sweep,
)
from tieredkv.errors import StoreFullError
from tieredkv.storage.results import EvictFilter
from tieredkv.types import BlockRecord

SMALL_BYTES = 3 << 20


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
    """Store until the disk is full; answer what was acknowledged."""
    stored: list[BlockRecord] = []
    with open_store(disk / "s", clock, budget_bytes=64 << 20) as store:
        while len(stored) < 1000:
            record = make_record(f"{len(stored)}", expires_at=clock.now() + 10)
            try:
                put(store, record)
            except StoreFullError:
                break
            stored.append(record)
        assert store.stats().num_evicted == 0
        assert [load(store, each) for each in stored] == [payload_of(each) for each in stored]
        store.check()
    # What others leave free is taken too: not one page more for the index.
    with (disk / "stranger").open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(1024))
            except OSError:
                return stored


def test_expired_bytes_go_although_the_index_cannot_grow(small_disk: Path) -> None:
    clock = FakeClock()
    stored = fill(small_disk, clock)
    assert len(stored) > 50
    with open_store(small_disk / "s", clock, budget_bytes=64 << 20) as store:
        assert [load(store, each) for each in stored] == [payload_of(each) for each in stored]
        clock.advance(10)
        assert sweep(store).expired_blocks == len(stored)
        assert segment_files(small_disk / "s") == []
        store.check()
        assert put(store, make_record("after")) == [True]


def test_an_operator_can_evict_to_free_a_full_disk(small_disk: Path) -> None:
    clock = FakeClock()
    stored = fill(small_disk, clock)
    with open_store(small_disk / "s", clock, budget_bytes=64 << 20) as store:
        assert evict(store, EvictFilter(all=True)).evicted_blocks == len(stored)
        assert segment_files(small_disk / "s") == []
        store.check()
