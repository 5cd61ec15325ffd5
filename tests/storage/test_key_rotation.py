"""A new master key takes the place of the old one in its file."""

import os
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from tests.storage.cuts import cut_short, unflushed
from tests.storage.key_tables import FOLDER_ID, MASTER, OTHER, STAMP, opened
from tieredkv.errors import ConfigError, MissingKeyError
from tieredkv.storage.keys import master, rotation
from tieredkv.storage.keys.layout import check_of
from tieredkv.storage.keys.sweeps import tables_under
from tieredkv.storage.keys.table import KeyTable


@pytest.fixture
def key_file(key_dir: Path) -> str:
    file = key_dir / f"{FOLDER_ID.hex()}.master"
    file.write_text(MASTER.hex())
    file.chmod(0o600)
    return str(file)


def test_a_rotation_in_place_replaces_the_key_and_overwrites_the_old_one(
    table: KeyTable, table_path: str, key_file: str
) -> None:
    old = os.open(key_file, os.O_RDONLY)
    rotation.rotate_in_place(table, key_file)
    assert os.pread(old, 100, 0) == bytes(64)
    os.close(old)
    table.close()
    new = master.read_file(key_file)
    assert new != MASTER
    with closing(rotation.open_table(table_path, FOLDER_ID, key_file)) as again:
        assert (set(again), again.head.master_place) == (set(table), key_file)
    assert sorted(os.listdir(os.path.dirname(table_path))) == sorted(
        map(os.path.basename, (table_path, key_file))
    )


def test_each_cut_of_a_rotation_in_place_is_finished_by_the_next_start(
    table: KeyTable, table_path: str, key_file: str, tmp_path: Path
) -> None:
    table.close()
    with closing(KeyTable.open(table_path, FOLDER_ID, MASTER)) as again:
        left = cut_short(
            Path(table_path).parent,
            tmp_path / "copies",
            lambda: rotation.rotate_in_place(again, key_file),
        )
    assert len(left) > 30
    with unflushed():
        for folder, what, is_torn in left:
            copies = [str(folder / os.path.basename(each)) for each in (table_path, key_file)]
            looked = rotation.look_table(copies[0], FOLDER_ID, copies[1])
            with closing(rotation.open_table(copies[0], FOLDER_ID, copies[1])) as again:
                assert set(looked) == set(again) <= set(table), what
                assert 2 - len(again) == again.num_lost <= is_torn, what
                assert not again.head.is_rotating, what
                rotation.rotate_in_place(again, copies[1])
            assert set(opened(copies[0], master.read_file(copies[1]))) == set(again), what
            assert not os.path.exists(copies[1] + ".new"), what


def test_a_rotation_in_place_is_refused_while_another_table_has_the_same_master_key(
    table: KeyTable, table_path: str, key_file: str
) -> None:
    other = str(Path(table_path).with_name("other.keys"))
    KeyTable.create(other, b"o" * 16, MASTER, STAMP).close()
    before = {each: Path(each).read_bytes() for each in (table_path, key_file, other)}
    assert tables_under(os.path.dirname(table_path), check_of(MASTER)) == sorted(
        [table_path, other]
    )
    with pytest.raises(ConfigError):
        rotation.rotate_in_place(table, key_file)
    assert {each: Path(each).read_bytes() for each in (table_path, key_file, other)} == before
    assert len(os.listdir(os.path.dirname(table_path))) == 3
    opened(other, folder_id=b"o" * 16)
    with closing(KeyTable.open(other, b"o" * 16, MASTER)) as another:
        another.rotate(OTHER)
    rotation.rotate_in_place(table, key_file)


def test_a_rotation_in_place_takes_the_key_that_an_earlier_one_has_made(
    table: KeyTable, key_file: str
) -> None:
    made = master.make_file(key_file + ".new")
    rotation.rotate_in_place(table, key_file)
    assert master.read_file(key_file) == made


@pytest.mark.parametrize("case", ["link", "key of another table", "draft open to others"])
def test_a_rotation_in_place_that_cannot_be_made_changes_nothing(
    table: KeyTable, table_path: str, key_file: str, case: str, tmp_path: Path
) -> None:
    if case == "link":
        real = tmp_path / "key"
        os.rename(key_file, real)
        os.symlink(real, key_file)
    elif case == "key of another table":
        Path(key_file).write_text(OTHER.hex())
    else:
        Path(key_file + ".new").write_text(OTHER.hex())
        os.chmod(key_file + ".new", 0o666)
    before = {each: each.read_bytes() for each in Path(table_path).parent.iterdir()}
    with pytest.raises((ConfigError, MissingKeyError)):
        rotation.rotate_in_place(table, key_file)
    assert {each: each.read_bytes() for each in Path(table_path).parent.iterdir()} == before


def test_a_rotation_to_the_present_key_does_nothing(table: KeyTable, table_path: str) -> None:
    before = Path(table_path).read_bytes()
    table.rotate(MASTER)
    assert Path(table_path).read_bytes() == before


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
            rotation.rotate_in_place(table, str(place))
    finally:
        subprocess.run(["umount", place], check=True)
    assert sorted(each.name for each in key_dir.iterdir()) == [Path(table.path).name, "a key"]
    assert not table.head.is_rotating
