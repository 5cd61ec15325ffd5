"""What a start does with a store: the index that it makes again, and why."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.golden import told
from tests.storage.blocks import (
    load,
    make_record,
    occupied_bytes,
    open_store,
    payload_of,
    put,
    segment_files,
    stored_hashes,
    sweep,
)
from tests.storage.test_damage import forget_segments, set_aside
from tests.storage.test_faults import plain_index

NOW = 1_800_000_000.0
RECORDS = [make_record("a", position) for position in range(20)]


def lose(path: Path) -> None:
    """Cut the index off."""
    (path / "index" / "data.mdb").write_bytes(b"")


def damage(path: Path) -> None:
    """Have one record fail its seal."""
    with plain_index(path, "blocks") as (txn, blocks):
        txn.put(RECORDS[3].block_hash, bytes(240), db=blocks)


def lose_order(path: Path) -> None:
    """Lose what orders the blocks by their last use."""
    with plain_index(path, "lru") as (txn, lru):
        txn.drop(lru, delete=False)


def lose_meta(path: Path) -> None:
    """Lose what the index knows of the store as a whole."""
    with plain_index(path, "meta") as (txn, meta):
        txn.drop(meta, delete=False)


def leave(path: Path) -> None:
    """Change nothing."""


@pytest.mark.parametrize(
    "harm", [lose, set_aside, forget_segments, damage, lose_order, lose_meta, leave]
)
def test_a_rebuild_says_what_it_is_made_from_and_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], object]
) -> None:
    path = tmp_path / "store"
    with open_store(path) as store:
        put(store, *RECORDS)
    harm(path)
    with open_store(path) as store:
        if harm in (damage, lose_order, leave):
            stored_hashes(store, RECORDS)  # meets the damage
            store.rebuild()
        assert store.stats().faults["index"] == 1
        store.check()
        assert put(store, make_record("b", size_bytes=16384)) == [True]
        kept = [each for each in RECORDS if harm is not damage or each is not RECORDS[3]]
        assert [load(store, each) for each in kept] == list(map(payload_of, kept))
    [said] = [text for text in caplog.messages if "was rebuilt from" in text]
    told(said)


@pytest.mark.parametrize("harm", [lose, leave])
@pytest.mark.parametrize("data", [b"", b"?" * 4096], ids=["empty", "written at its end"])
@pytest.mark.parametrize(
    ("size", "tells_holes"),
    [(1 << 30, True), (1 << 40, True), (1 << 40, False)],
    ids=["1 GiB", "1 TiB", "1 TiB, on a filesystem that tells no holes"],
)
def test_a_file_of_holes_among_the_segments_is_removed_without_reading_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    data: bytes,
    harm: Callable[[Path], object],
    tells_holes: bool,
) -> None:
    path = tmp_path / "store"
    with open_store(path) as store:
        put(store, *RECORDS)
    foreign = path / "segments" / "00000009-8192.seg"
    foreign.touch(mode=0o600)
    with foreign.open("r+b") as file:
        file.truncate(size)
        file.seek(size - len(data))
        file.write(data)
    if not tells_holes:

        def refuse(*args: object) -> int:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        monkeypatch.setattr(os, "lseek", refuse)
    harm(path)
    with open_store(path) as store:
        assert store.files.bytes_read < 2 << 20
        assert not foreign.exists()
        assert [load(store, each) for each in RECORDS] == list(map(payload_of, RECORDS))
        store.check()


def test_space_behind_the_last_block_of_a_lost_index_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with open_store(path, budget_bytes=64 << 20) as store:
        put(store, *RECORDS)
        store.drop([each.block_hash for each in RECORDS[10:]], "test")
        sweep(store)
    [segment] = segment_files(path)
    assert segment.stat().st_size > 20 * 12_288
    lose(path)
    with open_store(path, budget_bytes=64 << 20) as store:
        assert segment.stat().st_size == 10 * 12_288
        assert [load(store, each) for each in RECORDS[:10]] == list(map(payload_of, RECORDS[:10]))
        assert all(put(store, *RECORDS))
        store.check()


def test_a_smaller_budget_makes_a_smaller_index_that_was_not_at_fault(tmp_path: Path) -> None:
    path, smaller = tmp_path / "store", 5 << 20
    records = [make_record(f"{i}", size_bytes=1, last_used=NOW + i) for i in range(2000)]
    with open_store(path, budget_bytes=12 << 20) as store:
        for start in range(0, len(records), 50):
            put(store, *records[start : start + 50])
        before = store.stats()
    with open_store(path, budget_bytes=smaller) as store:
        assert occupied_bytes(path) <= smaller
        assert store.stats().bytes_index < before.bytes_index / 2
        assert "index" not in store.stats().faults
        kept = stored_hashes(store, records)
        assert kept == {record.block_hash for record in records[-len(kept) :]}
        assert len(kept) > 400, "a copy of the index has as many pages as it, and less room is left"
        store.check()
    assert not (path / "index.bad").exists()


def test_what_was_written_before_the_index_was_made_smaller_is_found_after_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store"
    records = [make_record(f"{i}", size_bytes=1, last_used=NOW + i) for i in range(1200)]
    with open_store(path, budget_bytes=12 << 20) as store:
        for start in range(0, len(records), 50):
            put(store, *records[start : start + 50])
        before = store.stats()
    with open_store(path, budget_bytes=5 << 20) as store:
        after = store.stats()
        assert after.bytes_written_ever == before.bytes_written_ever
        assert [load(store, each) for each in records[-9:]] == list(map(payload_of, records[-9:]))
        assert put(store, msgspec.structs.replace(records[0], computed_at=NOW + 1)) == [True]
        sweep(store)
        store.check()
