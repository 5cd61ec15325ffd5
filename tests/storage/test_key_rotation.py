"""A new master key takes the place of the old one in its file."""

import os
import shutil
import subprocess
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.storage.cuts import cut_short, unflushed
from tests.storage.key_tables import FOLDER_ID, MASTER, OTHER, STAMP, opened, reason_of
from tieredkv.errors import ConfigError, MissingKeyError
from tieredkv.storage.keys import master
from tieredkv.storage.keys.destruction import others_under
from tieredkv.storage.keys.layout import check_of
from tieredkv.storage.keys.master import make_file as make_key
from tieredkv.storage.keys.place import KeyPlace
from tieredkv.storage.keys.rotation import open_table, rotate_in_place
from tieredkv.storage.keys.table import KeyTable
from tieredkv.storage.options import StoreOptions


@pytest.fixture
def key_file(key_dir: Path) -> str:
    file = key_dir / f"{FOLDER_ID.hex()}.master"
    file.write_text(MASTER.hex())
    file.chmod(0o600)
    return str(file)


def open_with(key_dir: Path, **settings: Any) -> KeyTable:
    """Open the table in a folder of keys, as a start with these settings does."""
    options = StoreOptions(path="/kv", key_dir=str(key_dir), **settings)
    table = open_table(KeyPlace("/kv", options, FOLDER_ID.hex()))
    table.close()
    return table


def test_a_rotation_in_place_replaces_the_key_and_overwrites_the_old_one(
    table: KeyTable, key_dir: Path, key_file: str
) -> None:
    olds = [os.open(each, os.O_RDONLY) for each in (key_file, table.path)]
    rotate_in_place(table, key_file)
    for old in olds:
        assert not any(os.pread(old, 1 << 20, 0))
        os.close(old)
    table.close()
    assert master.read_file(key_file) != MASTER
    again = open_with(key_dir)
    assert (set(again), again.head.master_place) == (set(table), key_file)
    assert {each.name for each in key_dir.iterdir()} == {
        os.path.basename(each) for each in (table.path, key_file)
    }


def test_each_cut_of_a_rotation_in_place_is_finished_by_the_next_start(
    table: KeyTable, key_dir: Path, key_file: str, tmp_path: Path
) -> None:
    left = cut_short(key_dir, tmp_path / "copies", lambda: rotate_in_place(table, key_file))
    assert len(left) > 30
    with unflushed():
        for folder, what, _ in left:
            shutil.rmtree(key_dir)
            folder.rename(key_dir)
            looked = KeyTable.look(table.path, FOLDER_ID, master.read_file(key_file))
            again = open_with(key_dir)
            assert set(looked) == set(again) == set(table), what
            assert (again.num_lost, again.head.is_rotating) == (0, False), what
            with closing(KeyTable.open(table.path, FOLDER_ID, master.read_file(key_file))) as last:
                rotate_in_place(last, key_file)
            assert set(open_with(key_dir)) == set(table), what
            assert not os.path.exists(key_file + ".new"), what


@pytest.mark.parametrize("start", ["old key", "new key"])
def test_each_cut_of_a_rotation_to_a_file_is_finished_by_a_start_with_either_key(
    table: KeyTable, key_dir: Path, key_file: str, tmp_path: Path, start: str
) -> None:
    to = str(key_dir.with_name("to"))
    key = make_key(to)
    left = cut_short(key_dir, tmp_path / "copies", lambda: table.rotate(key, place=to))
    num_finished = 0
    for folder, what, _ in left:
        can = {"old key": {}, "new key": {"master_key": to}}
        with unflushed(), suppress(MissingKeyError):
            again = open_with(folder, **can[start])
            is_begun = check_of(key) in again.head.checks
            assert not again.head.is_rotating and set(again) == set(table), what
            if is_begun:
                num_finished += 1
                assert set(open_with(folder, master_key=to)) == set(table), what
                assert reason_of(open_with, folder) == "master key", what
    assert num_finished >= 6


@pytest.mark.parametrize("new", ["file", "command"])
def test_a_rotation_that_cannot_be_finished_with_the_old_key_waits_for_the_new_one(
    table: KeyTable, key_dir: Path, key_file: str, caplog: pytest.LogCaptureFixture, new: str
) -> None:
    to = key_dir.with_name("to")
    key, command = make_key(str(to)), f"cat {to}"
    table.note(key, place=str(to) if new == "file" else "")
    table.close()
    to.rename(to.with_name("not mounted"))
    for _ in range(2):
        caplog.clear()
        again = open_with(key_dir)
        assert len(caplog.records) == 1
        assert set(again) == set(table) and again.head.is_rotating
    to.with_name("not mounted").rename(to)
    way = {"master_key": str(to)} if new == "file" else {"master_key_command": command}
    assert not open_with(key_dir, **way).head.is_rotating
    assert reason_of(open_with, key_dir) == "master key"


def test_a_rotation_takes_the_place_of_one_that_was_not_finished(
    table: KeyTable, key_dir: Path, key_file: str
) -> None:
    table.note(OTHER, place="/nowhere")
    rotate_in_place(table, key_file)
    table.close()
    assert set(open_with(key_dir)) == set(table)
    assert reason_of(opened, table.path, OTHER) == "master key"


def test_a_rotation_in_place_is_refused_while_another_table_has_the_same_master_key(
    table: KeyTable, table_path: str, key_file: str
) -> None:
    other = str(Path(table_path).with_name("other.keys"))
    KeyTable.create(other, b"o" * 16, lambda: MASTER, STAMP).close()
    before = {each: Path(each).read_bytes() for each in (table_path, key_file, other)}
    assert others_under(check_of(MASTER), table_path) == [other]
    assert others_under(check_of(OTHER), table_path) == []
    with pytest.raises(ConfigError):
        rotate_in_place(table, key_file)
    assert {each: Path(each).read_bytes() for each in (table_path, key_file, other)} == before
    assert len(os.listdir(os.path.dirname(table_path))) == 3
    opened(other, folder_id=b"o" * 16)
    with closing(KeyTable.open(other, b"o" * 16, MASTER)) as another:
        another.rotate(OTHER)
    rotate_in_place(table, key_file)


def test_a_rotation_in_place_uses_no_file_that_lies_in_the_place_of_its_draft(
    table: KeyTable, key_dir: Path, key_file: str
) -> None:
    Path(key_file + ".new").write_text(OTHER.hex())
    os.chmod(key_file + ".new", 0o666)
    rotate_in_place(table, key_file)
    table.close()
    assert master.read_file(key_file) not in (MASTER, OTHER)
    assert set(open_with(key_dir)) == set(table)


@pytest.mark.parametrize("case", ["link", "key of another table"])
def test_a_rotation_in_place_that_cannot_be_made_changes_nothing(
    table: KeyTable, table_path: str, key_file: str, case: str, tmp_path: Path
) -> None:
    if case == "link":
        real = tmp_path / "key"
        os.rename(key_file, real)
        os.symlink(real, key_file)
    else:
        Path(key_file).write_text(OTHER.hex())
    before = {each: each.read_bytes() for each in Path(table_path).parent.iterdir()}
    with pytest.raises((ConfigError, MissingKeyError)):
        rotate_in_place(table, key_file)
    assert {each: each.read_bytes() for each in Path(table_path).parent.iterdir()} == before


def test_a_rotation_in_place_is_refused_for_a_file_that_is_mounted(
    table: KeyTable, key_dir: Path, tmp_path: Path
) -> None:
    source, place = tmp_path / "source", key_dir / "a key"
    for file in (source, place):
        file.write_text(MASTER.hex())
        file.chmod(0o600)
    if subprocess.run(["mount", "--bind", source, place], capture_output=True).returncode:
        pytest.skip("this machine cannot mount")
    try:
        with pytest.raises(ConfigError):
            rotate_in_place(table, str(place))
    finally:
        subprocess.run(["umount", place], check=True)
    assert sorted(each.name for each in key_dir.iterdir()) == [Path(table.path).name, "a key"]
    assert not table.head.is_rotating
