"""Stores that were moved, merged, restored from a backup, or copied only in part.

Whatever the folder holds, a block is served with its own bytes and before it expires, or not at
all.
"""

import os
import shutil
from pathlib import Path

import pytest

from tests.fakes import FakeClock
from tests.golden import refused
from tests.storage.blocks import (
    BLOCK_BYTES,
    chains,
    evict,
    load,
    make_record,
    open_store,
    payload_of,
    put,
    stored_hashes,
    sweep,
    verify,
)
from tieredkv.errors import StorageError
from tieredkv.operate.calls import EvictFilter
from tieredkv.types import BlockRecord

BUDGET = 1 << 20
DAY_S = 86_400.0


class Folders:
    """Copies of one store at two times, `old` and `new`, another store, and all their blocks."""

    def __init__(self, path: Path) -> None:
        self.path, self.clock = path, FakeClock()
        start = self.clock.now()
        kept = [make_record("kept", i, now=start) for i in range(10)]
        ageing = [make_record("ageing", i, now=start - DAY_S / 2) for i in range(10)]
        evicted = [make_record("evicted", i, now=start) for i in range(10)]
        self.records: list[BlockRecord] = [*kept, *ageing, *evicted]
        self.evicted = evicted
        with open_store(path / "live", self.clock, budget_bytes=BUDGET) as store:
            put(store, *self.records)
        self.keep("old")
        self.clock.advance(DAY_S * 3 / 4)  # the ageing blocks expire meanwhile
        later = self.clock.now()
        with open_store(path / "live", self.clock, budget_bytes=BUDGET) as store:
            evict(store, EvictFilter(ids=(evicted[0].block_hash.hex(),)))
            sweep(store)
            anew = [make_record("kept", i, now=later) for i in range(5)]
            others = [make_record("new", i, now=later) for i in range(15)]
            sizes = [make_record(f"s{i}", now=later, size_bytes=3 * BLOCK_BYTES) for i in range(5)]
            for some in (anew, others, sizes):
                put(store, *some)
                self.records += some
        self.keep("new")
        with open_store(path / "other", self.clock, budget_bytes=BUDGET) as store:
            strangers = [make_record("other", i, now=later) for i in range(25)]
            put(store, *strangers, make_record("kept", 0, now=later))
            self.records += strangers

    def keep(self, name: str) -> None:
        """Copy the live store as it is, as `cp -a` does."""
        shutil.copytree(self.path / "live", self.path / name)

    def take(self, index: str, segments: str) -> None:
        """Replace the live store by the index of one copy and the segments of another."""
        shutil.rmtree(self.path / "live")
        shutil.copytree(self.path / index, self.path / "live")
        shutil.rmtree(self.path / "live" / "segments")
        shutil.copytree(self.path / segments / "segments", self.path / "live" / "segments")

    def copy_over(self, name: str) -> None:
        """Copy one folder over the live one, as `cp -r` does."""
        shutil.copytree(self.path / name, self.path / "live", dirs_exist_ok=True)

    def check_what_is_served(self) -> int:
        """Open the live store, load every block, repair the store and use it; return the hits."""
        num_hits = 0
        with open_store(self.path / "live", self.clock, budget_bytes=BUDGET) as store:
            for record in self.records:
                [found] = store.lookup([record.block_hash])
                assert found is None or self.clock.now() < found.expires_at, "an expired block"
                loaded = load(store, record)
                if isinstance(loaded, bytes):
                    assert found is not None and loaded == payload_of(found), "a wrong block"
                    num_hits += 1
            verify(store)
            sweep(store)
            assert verify(store).bad == 0
            more = [make_record("more", i, now=self.clock.now()) for i in range(10)]
            assert put(store, *more) == [True] * 10
            assert all(load(store, record) == payload_of(record) for record in more)
            store.check()
        return num_hits


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folders, made once; each test copies them."""
    return Folders(tmp_path_factory.mktemp("folders"))


@pytest.fixture
def folders(made: Folders, tmp_path: Path) -> Folders:
    """A copy of the folders for one test."""
    copy = object.__new__(Folders)
    copy.__dict__ |= made.__dict__
    copy.path, copy.clock = tmp_path / "all", FakeClock(made.clock.now())
    shutil.copytree(made.path, copy.path)
    return copy


@pytest.mark.parametrize("segments", ["old", "new", "other"])
@pytest.mark.parametrize("index", ["old", "new", "other"])
def test_an_index_and_segments_that_do_not_belong_together_serve_no_wrong_byte(
    folders: Folders, index: str, segments: str
) -> None:
    folders.take(index, segments)
    num_hits = folders.check_what_is_served()
    if index == segments:
        assert num_hits >= 10


@pytest.mark.parametrize("first", ["old", "new", "other"])
@pytest.mark.parametrize("second", ["old", "new", "other"])
def test_two_stores_copied_into_one_folder_serve_no_wrong_byte(
    folders: Folders, first: str, second: str
) -> None:
    folders.take(first, first)
    folders.copy_over(second)
    folders.check_what_is_served()


@pytest.mark.parametrize("segments", ["old", "new", "other"])
def test_segments_without_their_index_are_adopted_without_what_has_expired(
    folders: Folders, segments: str
) -> None:
    folders.take(segments, segments)
    folders.copy_over("other")
    shutil.rmtree(folders.path / "live" / "index")
    assert folders.check_what_is_served() > 0


def test_a_backup_brings_back_what_was_evicted_and_nothing_that_expired(folders: Folders) -> None:
    with open_store(folders.path / "new", folders.clock, budget_bytes=BUDGET) as store:
        assert not stored_hashes(store, folders.evicted)
    with open_store(folders.path / "old", folders.clock, budget_bytes=BUDGET) as store:
        ageing = [record for record in folders.records if record.expires_at <= folders.clock.now()]
        assert ageing and not stored_hashes(store, ageing)
        # NOTE: The docs say so: a backup brings back blocks that were evicted after it was made.
        assert len(stored_hashes(store, folders.evicted)) == len(folders.evicted)
        sweep(store)
        for file in (folders.path / "old" / "segments").iterdir():
            text = file.read_bytes()
            assert not any(payload_of(record) in text for record in ageing), "not erased"
        folders.clock.advance(DAY_S)
        assert chains(store) == []


def test_a_store_is_served_by_a_machine_of_another_boot_under_another_path(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tieredkv.storage.folder.folder._boot_id", lambda: "another")
    moved = folders.path / "elsewhere" / "store"
    moved.parent.mkdir()
    os.rename(folders.path / "live", moved)
    with open_store(moved, folders.clock, budget_bytes=BUDGET) as store:
        kept = [record for record in folders.records if record.computed_at == folders.clock.now()]
        assert len(stored_hashes(store, kept)) >= 15
        store.check()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_store_that_another_user_copied_is_refused_with_the_way_out(folders: Folders) -> None:
    for each in [folders.path / "live", *(folders.path / "live").rglob("*")]:
        os.chown(each, 12345, 12345)
    with refused(StorageError):
        open_store(folders.path / "live", folders.clock)
