"""What a sweep does to the key tables that no worker holds."""

import os
from pathlib import Path

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
from tieredkv.storage.keys import table_file
from tieredkv.storage.keys.sweeps import Swept, sweep_table, sweep_tables
from tieredkv.storage.keys.table import KeyTable


def no_store(_folder: str, _folder_id: bytes) -> bool:
    return False


def test_a_sweep_destroys_dead_and_damaged_slots_without_a_master_key(
    table: KeyTable, table_path: str
) -> None:
    table.add({THREE: DEATH + 3})
    assert sweep_tables(os.path.dirname(table_path), DEATH + 10, no_store) == Swept(
        0, 0
    )  # it is held
    table.close()
    flip(table_path, FIRST_SLOT + 2 * SLOT + 50, bit=7)
    folders = list[tuple[str, bytes]]()

    def has_store(folder: str, folder_id: bytes) -> bool:
        folders.append((folder, folder_id))
        return True

    assert sweep_tables(os.path.dirname(table_path), DEATH, has_store) == Swept(2, 0)
    again = opened(table_path)
    assert (scopes_of(again), again.num_lost) == ([TWO], 0)
    assert sweep_tables(os.path.dirname(table_path), DEATH + 2, has_store) == Swept(1, 0)
    assert os.path.exists(table_path)
    assert set(folders) == {("/kv", FOLDER_ID)}


def test_an_empty_table_whose_folder_is_gone_is_overwritten_and_removed(
    table: KeyTable, table_path: str
) -> None:
    table.close()
    held = os.open(table_path, os.O_RDONLY)
    assert sweep_table(table_path, DEATH, no_store) == Swept(1, 0)
    assert os.path.exists(table_path)
    assert sweep_table(table_path, DEATH + 2, no_store) == Swept(1, 1)
    assert not os.listdir(os.path.dirname(table_path))
    assert not any(os.pread(held, 1 << 20, 0))
    os.close(held)


def test_a_sweep_leaves_files_that_are_no_tables(key_dir: Path) -> None:
    files = {
        "own.keys": b"my keys" * 2000,
        "short.keys": b"TKVKEYS",
        "old.keys": b"TKVKEYS\x01" + bytes(9000),
        "a.master": MASTER.hex().encode(),
    }
    for name, data in files.items():
        (key_dir / name).write_bytes(data)
        (key_dir / name).chmod(0o600)
    assert sweep_tables(str(key_dir), DEATH, no_store) == Swept(0, 0)
    assert {each.name: each.read_bytes() for each in key_dir.iterdir()} == files
    assert sweep_tables(str(key_dir / "gone"), DEATH, no_store) == Swept(0, 0)


def test_a_table_of_another_version_can_be_erased(table: KeyTable, key_dir: Path) -> None:
    old = key_dir / "old.keys"
    old.write_bytes(b"TKVKEYS\x01" + STAMP + bytes(200))
    old.chmod(0o600)
    table_file.erase(str(old))
    assert not old.exists()
