"""What a sweep does to the files of the key folder that no worker holds."""

import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.storage.cuts import cut_short
from tests.storage.key_tables import (
    DEATH,
    FIRST_SLOT,
    FOLDER_ID,
    MASTER,
    SLOT,
    STAMP,
    THREE,
    TWO,
    flip,
    opened,
    scopes_of,
)
from tests.storage.test_store_keys import Place
from tieredkv.errors import StorageError
from tieredkv.storage.folder.marker import new_marker, write_marker
from tieredkv.storage.keys import gone, table_file
from tieredkv.storage.keys.destruction import sweep_tables
from tieredkv.storage.keys.table import KeyTable


def make_store(folder: Path, id: bytes = FOLDER_ID) -> Path:
    """Make the folder of a store with an id."""
    folder.mkdir()
    write_marker(str(folder), msgspec.structs.replace(new_marker(), id=id.hex(), stamp=id.hex()))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the folder of a store is, or was."""
    (tmp_path / "stores").mkdir()
    return tmp_path / "stores" / "kv"


@pytest.fixture
def empty_table(folder: Path, table_path: str) -> Path:
    """A table without keys of that store, which nobody holds."""
    KeyTable.create(table_path, FOLDER_ID, lambda: MASTER, STAMP, folder=str(folder)).close()
    return Path(table_path)


@pytest.fixture
def own_master(table_path: str) -> Path:
    """The master key of the table, in a file whose name says that a first start made it."""
    return write_key(Path(table_path).with_suffix(".master"))


def write_key(path: Path) -> Path:
    path.write_text(MASTER.hex())
    path.chmod(0o600)
    return path


def test_a_sweep_destroys_dead_and_damaged_slots_without_a_master_key(
    table: KeyTable, table_path: str, key_dir: Path, folder: Path
) -> None:
    table.stamp(STAMP, STAMP, folder=str(make_store(folder)))
    table.add({THREE: DEATH + 3})
    before = Path(table_path).read_bytes()
    sweep_tables(str(key_dir), DEATH + 10)
    assert Path(table_path).read_bytes() == before  # it is held
    table.close()
    flip(table_path, FIRST_SLOT + 2 * SLOT + 50, bit=7)
    sweep_tables(str(key_dir), DEATH)
    again = opened(table_path)
    assert (scopes_of(again), again.num_lost) == ([TWO], 0)
    sweep_tables(str(key_dir), DEATH + 2)
    assert not any(Path(table_path).read_bytes()[FIRST_SLOT:])
    assert len(opened(table_path)) == 0


def test_a_sweep_leaves_files_that_are_no_tables(key_dir: Path) -> None:
    files = {
        "own.keys": b"my keys" * 2000,
        "short.keys": b"TKVKEYS",
        "old.keys": b"TKVKEYS\x01" + bytes(9000),
        "a.master": MASTER.hex().encode(),
        f"{FOLDER_ID.hex()}.master": MASTER.hex().encode(),  # as one that is put back first
    }
    for name, data in files.items():
        (key_dir / name).write_bytes(data)
        (key_dir / name).chmod(0o600)
    sweep_tables(str(key_dir), DEATH)
    assert {each.name: each.read_bytes() for each in key_dir.iterdir()} == files
    with pytest.raises(StorageError) as caught:
        sweep_tables(str(key_dir / "gone"), DEATH)
    assert caught.value.errno == errno.ENOENT


def test_a_table_of_another_version_can_be_erased(table: KeyTable, key_dir: Path) -> None:
    old = key_dir / "old.keys"
    old.write_bytes(b"TKVKEYS\x01" + STAMP + bytes(200))
    old.chmod(0o600)
    table_file.erase(str(old))
    assert not old.exists()


# --- stores that are gone -------------------------------------------------------------------------


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def remove_and_begin_anew(folder: Path) -> None:
    shutil.rmtree(folder)
    make_store(folder, b"o" * 16)


@pytest.mark.parametrize("change", [remove, remove_and_begin_anew])
def test_an_empty_table_whose_store_is_gone_is_overwritten_and_removed_with_its_master_key(
    empty_table: Path, own_master: Path, folder: Path, change: Callable[[Path], None]
) -> None:
    draft = write_key(own_master.with_suffix(".master.new"))  # of a rotation that was cut short
    held = [os.open(each, os.O_RDONLY) for each in (empty_table, own_master, draft)]
    make_store(folder)
    sweep_tables(str(empty_table.parent), DEATH)
    assert empty_table.exists() and own_master.exists()
    change(folder)
    sweep_tables(str(empty_table.parent), DEATH)
    assert not list(empty_table.parent.iterdir())
    for fd in held:
        assert not any(os.pread(fd, 1 << 20, 0))
        os.close(fd)


def test_a_table_with_keys_stays_until_they_are_dead(
    table: KeyTable, table_path: str, key_dir: Path
) -> None:
    table.close()  # of a folder that has never been there
    sweep_tables(str(key_dir), DEATH)
    assert os.path.exists(table_path)
    sweep_tables(str(key_dir), DEATH + 2)
    assert not os.listdir(key_dir)


@pytest.mark.parametrize("has_other_table", [True, False])
def test_the_master_key_of_a_table_that_is_removed_stays_if_another_one_needs_it(
    empty_table: Path, own_master: Path, folder: Path, *, has_other_table: bool
) -> None:
    other = empty_table.with_name("other.keys")
    if has_other_table:
        KeyTable.create(str(other), b"o" * 16, lambda: MASTER, STAMP).close()
    sweep_tables(str(empty_table.parent), DEATH)
    assert not empty_table.exists()
    assert other.exists() == own_master.exists() == has_other_table


def moved(folder: Path) -> None:
    """The store lies beside its place, where another one is now."""
    make_store(folder.with_name("moved"))
    make_store(folder, b"o" * 16)


def not_mounted(folder: Path) -> None:
    folder.parent.rename(folder.parent.with_name("elsewhere"))


def not_mounted_but_made(folder: Path) -> None:
    not_mounted(folder)
    folder.parent.mkdir()


def of_another_volume(folder: Path) -> None:
    """Another container has the same path on a volume of its own."""
    not_mounted_but_made(folder)
    make_store(folder, b"o" * 16)


def unreadable(folder: Path) -> None:
    folder.mkdir()
    (folder / "format.json").write_text("?")
    (folder / "format.json").chmod(0o600)


@pytest.mark.parametrize(
    "change", [moved, not_mounted, not_mounted_but_made, of_another_volume, unreadable]
)
def test_an_empty_table_whose_store_may_be_elsewhere_stays(
    empty_table: Path, own_master: Path, folder: Path, change: Callable[[Path], None]
) -> None:
    change(folder)
    before = empty_table.read_bytes()
    sweep_tables(str(empty_table.parent), DEATH)
    assert (empty_table.read_bytes(), own_master.read_text()) == (before, MASTER.hex())


def test_an_empty_table_of_another_machine_or_of_a_time_before_it_booted_stays(
    empty_table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent_of = gone.parent_of
    with monkeypatch.context() as patch:
        patch.setattr(gone, "parent_of", lambda folder: b"b" * 16 + parent_of(folder)[16:])
        sweep_tables(str(empty_table.parent), DEATH)
    assert empty_table.exists()


def test_two_stores_on_volumes_that_are_mounted_at_one_path_keep_their_keys(tmp_path: Path) -> None:
    place, ids = Place(tmp_path), list[str]()
    place.folder.mkdir()
    for _ in range(2):
        mount = ["mount", "-t", "tmpfs", "-o", "mode=700", "tmpfs", str(place.folder)]
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("this machine cannot mount")
        try:
            place.open().close()
            ids.append(place.marker["id"])
        finally:
            subprocess.run(["umount", place.folder], check=True)
    assert place.files().keys() == {f"{id}.{kind}" for id in ids for kind in ("keys", "master")}
    sweep_tables(str(place.key_dir), DEATH)
    assert len(place.files()) == 4


# --- starts that were cut short -------------------------------------------------------------------


def test_what_a_first_start_left_that_was_cut_short_is_removed(tmp_path: Path) -> None:
    place, seen = Place(tmp_path), set[tuple[str, ...]]()
    place.key_dir.mkdir(0o700)
    left = cut_short(place.key_dir, tmp_path / "copies", lambda: place.open().close())
    shutil.rmtree(place.folder)
    for folder, what, _ in left:
        seen.add(tuple(sorted(each.suffix for each in folder.iterdir())))
        sweep_tables(str(folder), DEATH)
        assert not list(folder.iterdir()), what
    assert seen == {(".master", ".new"), (".keys", ".master")}


def test_a_first_start_that_goes_on_loses_nothing(table_path: str, own_master: Path) -> None:
    own_master.unlink()

    def make_key() -> bytes:
        write_key(own_master)
        sweep_tables(str(own_master.parent), DEATH)
        return MASTER

    KeyTable.create(table_path, FOLDER_ID, make_key, STAMP).close()
    assert own_master.read_text() == MASTER.hex()
    assert opened(table_path).head.stamps[0] == STAMP
