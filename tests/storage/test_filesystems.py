"""The store on filesystems that lack a call, allocate space in large pieces, or run out of it.

The tests that mount a filesystem need root and the tools that make it.
"""

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes import FakeClock
from tests.golden import refused
from tests.levels import few
from tests.storage.blocks import (
    load,
    make_record,
    occupied_bytes,
    open_store,
    payload_of,
    put,
    refuse,
    segment_files,
    stored_hashes,
    sweep,
    verify,
)
from tests.storage.conftest import wait_until
from tests.storage.mounts import FILESYSTEMS, CannotMountError, Filesystem, mounted
from tieredkv.errors import StorageError, StoreFullError
from tieredkv.storage.extents import files as extents
from tieredkv.storage.folder import filesystem
from tieredkv.types import BlockRecord

pytestmark = pytest.mark.e2e

BUDGET_BYTES = 24 << 20
NO_ALLOCATING = ["ext4, no extents", "ext3", "ext2", "ext2, 1 KiB blocks"]
LARGE_PIECES = ["ext4, bigalloc 64 KiB", "xfs, extent size hint of 1 MiB", "tmpfs, huge pages"]


@pytest.fixture
def mount(request: pytest.FixtureRequest) -> Iterator[Callable[[Filesystem], Path]]:
    """Mounts filesystems for the time of a test."""
    with contextlib.ExitStack() as stack:

        def make(wanted: Filesystem, image_bytes: int = 64 << 20) -> Path:
            try:
                return stack.enter_context(mounted(wanted, image_bytes))
            except CannotMountError as error:
                pytest.skip(f"this filesystem cannot be mounted here: {error}")

        yield make


def churn(folder: Path, *sizes: int) -> None:
    """Store, expire and evict blocks of these sizes, and verify the store."""
    clock, stored = FakeClock(), list[BlockRecord]()
    with open_store(folder, clock, budget_bytes=4 << 20) as store:
        for number in range(40):
            clock.advance(1)
            group = [
                make_record(f"{number}/{size}", each, now=clock.now(), size_bytes=size)
                for size in sizes[: 1 + number % 2]
                for each in range(16)
            ]
            assert put(store, *group) == [True] * len(group)
            stored += group
            sweep(store)
            store.check()
        there = stored_hashes(store, stored)
        assert {each.block_hash for each in stored[-16:]} <= there
        assert len(there) < len(stored)
        kept = [each for each in stored if each.block_hash in there]
        assert [load(store, each) for each in kept] == [payload_of(each) for each in kept]
        clock.advance(90_000)
        sweep(store)
        assert segment_files(folder) == []
        assert store.stats().faults == {}
    with open_store(folder, clock, budget_bytes=4 << 20) as store:
        assert verify(store).bad == 0


@pytest.mark.parametrize("name", NO_ALLOCATING)
def test_blocks_are_stored_where_the_filesystem_cannot_set_space_aside(
    mount: Callable[[Filesystem], Path], name: str
) -> None:
    churn(mount(FILESYSTEMS[name]) / "store", 8192, 50_000)


@pytest.mark.parametrize("code", filesystem.NOT_SUPPORTED)
@pytest.mark.parametrize("missing", [["set_aside"], ["punch_hole"], ["set_aside", "punch_hole"]])
def test_zeroes_take_the_place_of_calls_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: list[str], code: int
) -> None:
    for name in missing:
        monkeypatch.setattr(filesystem, name, refuse(code))
        monkeypatch.setattr(extents, name, refuse(code))
    # Without holes, space is passed on to another size only by removing whole files.
    churn(tmp_path / "store", 8192, *[50_000] * ("punch_hole" not in missing))


@pytest.mark.parametrize("share", [3 / 4, 1 / 2, 1 / 4])
def test_a_smaller_budget_without_holes_costs_only_the_blocks_at_the_ends_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    for module in (filesystem, extents):
        monkeypatch.setattr(module, "punch_hole", refuse(errno.EOPNOTSUPP))
    clock, folder, budget_bytes = FakeClock(), tmp_path / "store", int(share * (4 << 20))
    records = [make_record(f"{i}", last_used=clock.now() - i) for i in range(250)]
    with open_store(folder, clock, budget_bytes=4 << 20) as store:
        assert put(store, *records) == [True] * 250
        store.drop([records[7].block_hash], "test")
    with open_store(folder, clock, budget_bytes=budget_bytes) as store:
        assert occupied_bytes(folder) <= budget_bytes
        kept = [each for each in records if each.block_hash in stored_hashes(store, records)]
        assert kept == [each for each in records[: len(kept) + 1] if each is not records[7]]
        assert sum(each.size_bytes for each in kept) > 0.3 * budget_bytes
        assert [load(store, each) for each in kept] == [payload_of(each) for each in kept]
        assert store.stats().num_evicted == 249 - len(kept)
        store.check()
        later = [make_record("later", each, now=clock.now() + 1) for each in range(8)]
        assert put(store, *later) == [True] * 8
        assert occupied_bytes(folder) <= budget_bytes
        store.check()


def test_a_full_disk_that_cannot_set_space_aside_takes_no_space_for_a_block_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extents, "set_aside", refuse(errno.EOPNOTSUPP))
    with open_store(tmp_path / "store") as store:
        assert put(store, make_record("a")) == [True]
        size_bytes = segment_files(tmp_path / "store")[0].stat().st_size
        monkeypatch.setattr(extents.SegmentFiles, "_write_zeroes", refuse(errno.ENOSPC))
        lent = store.reserve([make_record("b", each) for each in range(64)])
        assert None in lent
        for extent in filter(None, lent):
            store.give_back(extent)
        assert segment_files(tmp_path / "store")[0].stat().st_size == size_bytes
        monkeypatch.undo()
        wait_until(lambda: not store.space.is_disk_full)
        assert put(store, make_record("c")) == [True]
        store.check()


def grow_the_index(folder: Path) -> float:
    """Fill the budget with large blocks, then replace them by small ones.

    The index grows most when no room is left. Returns the largest share of the budget that was
    occupied.
    """
    clock, most = FakeClock(), 0

    def sample(_label: str) -> None:
        nonlocal most
        most = max(most, occupied_bytes(folder))

    folder.mkdir(mode=0o700)
    with open_store(folder, clock, failpoint=sample, budget_bytes=BUDGET_BYTES) as store:
        for number in range(70):
            clock.advance(1)
            count, size = (64, 1024) if number > 8 else (32, 100_000)
            now = clock.now()
            group = [
                make_record(f"{number}", each, now=now, size_bytes=size) for each in range(count)
            ]
            extents = store.reserve(group)
            for extent in filter(None, extents):
                store.give_back(extent)
            if None not in extents:
                put(store, *group)
            sample("")
        assert store.stats().blocks > 500
        store.check()
    return most / BUDGET_BYTES


@pytest.mark.parametrize(
    "name",
    few(["xfs", *LARGE_PIECES, "overlay", "ext2, 1 KiB blocks", "btrfs"], len(LARGE_PIECES) + 2),
)
def test_the_files_stay_within_the_budget(
    mount: Callable[[Filesystem, int], Path], name: str
) -> None:
    disk = mount(FILESYSTEMS[name], 400 << 20)
    assert grow_the_index(disk / "store") <= 1.0


def test_an_open_index_is_never_written_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "store" / "index" / "data.mdb"
    with open_store(tmp_path / "store", budget_bytes=BUDGET_BYTES) as store:
        ends = set()
        for number in range(30):
            put(store, *[make_record(f"{number}", each, size_bytes=1024) for each in range(64)])
            ends.add(path.stat().st_size)
            assert path.stat().st_size > store.index.used_bytes() + (1 << 20)
        assert len(ends) < 5
        assert path.stat().st_blocks * 512 < path.stat().st_size
    assert path.stat().st_size < 4 << 20


def test_an_index_that_was_copied_with_its_empty_end_takes_no_room(tmp_path: Path) -> None:
    folder, copy = tmp_path / "store", tmp_path / "copy"
    record = make_record("a")
    with open_store(folder) as store:
        assert put(store, record) == [True]
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("lock", "sock"))
        index = copy / "index" / "data.mdb"
        index.write_bytes(index.read_bytes())
        assert occupied_bytes(copy) > 2 << 20
    with open_store(copy, budget_bytes=2 << 20) as store:
        assert load(store, record) == payload_of(record)
        store.check()


def test_a_call_that_the_store_cannot_do_without_is_named_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tieredkv.storage.folder.filesystem.mmap.mmap", refuse(errno.ENODEV))
    with refused(StorageError, errno=errno.ENODEV):
        open_store(tmp_path / "store")
    assert {each.name for each in (tmp_path / "store").iterdir()} == {
        *("format.json", "index", "lock", "segments")
    }


def test_direct_io_that_wants_another_alignment_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev

    def strict(fd: int, buffers: list[memoryview], offset: int) -> int:
        is_direct = os.O_DIRECT & int(
            Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0], 8
        )
        if is_direct and offset % 65536:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", strict)
    with open_store(tmp_path / "store") as store:
        assert not store.stats().direct_io
        assert put(store, *[make_record("a", each) for each in range(8)]) == [True] * 8
        assert load(store, make_record("a", 3)) == payload_of(make_record("a", 3))


def test_an_error_names_the_file_that_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path / "store") as store:
        monkeypatch.setattr(extents, "set_aside", refuse(errno.EINVAL))
        with refused(StorageError):
            put(store, make_record("a"))
        monkeypatch.undo()
        assert put(store, make_record("a")) == [True]
        monkeypatch.setattr(os, "pwritev", refuse(errno.EIO))
        with refused(StorageError):
            put(store, make_record("b"))


# --- no room ------------------------------------------------------------------------------------


def assert_blocks_give_way(
    folder: Path, cause: str, make_room: Callable[[], object], *, can_erase: bool = True
) -> None:
    """Assert that new blocks replace old ones on a full disk, and use room that becomes free.

    Blocks are replaced only if their bytes can be erased (`can_erase`).
    """
    clock, stored = FakeClock(), list[BlockRecord]()

    def store_some() -> bool:
        clock.advance(1)
        group = [make_record(f"{len(stored)}", each, now=clock.now()) for each in range(16)]
        try:
            assert put(store, *group) == [True] * 16
        except StorageError as error:
            assert cause in str(error)
            return False
        stored.extend(group)
        return True

    with open_store(folder, clock, budget_bytes=64 << 20) as store:
        for _ in range(200):
            store_some()
            if store.space.why_full:
                break
        assert cause in store.space.why_full
        assert len(stored) > 100
        for _ in range(20):
            wait_until(store_some) if can_erase else store_some()
        there = stored_hashes(store, stored)
        assert not can_erase or {each.block_hash for each in stored[-16:]} <= there
        assert store.stats().num_evicted >= len(stored) - len(there)
        kept = [each for each in stored if each.block_hash in there]
        assert [load(store, each) for each in kept] == [payload_of(each) for each in kept]
        store.check()
        num_blocks = store.stats().blocks
        make_room()

        def has_grown() -> bool:
            store_some()
            return store.stats().blocks > num_blocks + 64

        wait_until(has_grown)
        store.check()
    with open_store(folder, clock, budget_bytes=64 << 20) as store:
        assert verify(store).bad == 0


def test_a_quota_that_is_used_up_is_a_full_disk(mount: Callable[[Filesystem, int], Path]) -> None:
    disk = mount(FILESYSTEMS["btrfs"], 400 << 20)
    folder = disk / "store"

    def btrfs(*words: str) -> None:
        done = subprocess.run(["btrfs", *words], capture_output=True, text=True)
        assert not done.returncode, done.stderr

    btrfs("quota", "enable", str(disk))
    btrfs("subvolume", "create", str(folder))
    folder.chmod(0o700)
    btrfs("qgroup", "limit", "12M", str(folder))
    # Nothing can be erased on btrfs then, because even a hole in a file takes some of the quota.
    assert_blocks_give_way(
        folder, "quota", lambda: btrfs("quota", "disable", str(disk)), can_erase=False
    )


def test_blocks_reserved_for_root_are_left_alone(mount: Callable[[Filesystem, int], Path]) -> None:
    disk = mount(Filesystem(("mkfs.ext4", "-q", "-m", "50", "-O", "^has_journal")), 32 << 20)
    stranger = disk / "stranger"
    stranger.write_bytes(bytes(4 << 20))
    reserved = os.statvfs(disk).f_bfree - os.statvfs(disk).f_bavail
    assert reserved > 0
    assert_blocks_give_way(disk / "store", "has no space left", stranger.unlink)
    assert os.statvfs(disk).f_bfree >= reserved


def test_a_filesystem_without_inodes_says_so_and_keeps_what_it_has(
    mount: Callable[[Filesystem, int], Path],
) -> None:
    disk = mount(Filesystem(("mkfs.ext4", "-q", "-N", "32")), 64 << 20)
    clock = FakeClock()
    small = [make_record("small", each) for each in range(32)]
    large = [make_record("large", each, size_bytes=50_000) for each in range(8)]
    with open_store(disk / "store", clock) as store:
        assert put(store, *small) == [True] * 32
        strangers = list[Path]()
        while os.statvfs(disk).f_favail:
            strangers.append(disk / f"stranger-{len(strangers)}")
            strangers[-1].touch()
        with refused(StoreFullError):
            put(store, *large)
        assert [load(store, each) for each in small] == [payload_of(each) for each in small]
        store.check()
    with open_store(disk / "store", clock) as store:
        for each in strangers:
            each.unlink()

        def is_stored() -> bool:
            try:
                return put(store, *large) == [True] * 8
            except StoreFullError:
                return False

        wait_until(is_stored)
        store.check()
