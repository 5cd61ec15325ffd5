"""What crashes, power losses and full disks leave of a key table."""

import errno
import logging
import os
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tests.storage.cuts import Left, cut_short, failing, unflushed
from tests.storage.key_tables import (
    DEATH,
    FIRST_SLOT,
    FOLDER_ID,
    MASTER,
    NEXT,
    NO_STAMP,
    ONE,
    OTHER,
    PAGE,
    SLOT,
    STAMP,
    THREE,
    TWO,
    flip,
    key_of,
    numbered,
    opened,
    reason_of,
    scopes_of,
)
from tests.storage.mounts import FILESYSTEMS, CannotMountError, mounted
from tieredkv.errors import MissingKeyError, StorageError, StoreFullError
from tieredkv.storage.keys import layout
from tieredkv.storage.keys.destruction import sweep_tables
from tieredkv.storage.keys.layout import check_of
from tieredkv.storage.keys.table import KeyTable

# --- cuts -----------------------------------------------------------------------------------------


def states(change: Callable[[KeyTable], object], table_path: str, tmp_path: Path) -> list[Left]:
    """What each cut of a change leaves of the table that the fixture made."""
    with closing(KeyTable.open(table_path, FOLDER_ID, MASTER)) as table:
        return cut_short(Path(table_path).parent, tmp_path / "copies", lambda: change(table))


def test_each_cut_of_a_creation_leaves_no_table_or_a_sound_one(
    table_path: str, tmp_path: Path
) -> None:
    def create() -> None:
        KeyTable.create(table_path, FOLDER_ID, lambda: MASTER, STAMP, folder="/kv").close()

    left = cut_short(Path(table_path).parent, tmp_path / "copies", create)
    assert len(left) > 8
    for folder, what, _ in left:
        copy = folder / Path(table_path).name
        if not copy.exists():
            KeyTable.create(str(copy), FOLDER_ID, lambda: MASTER, STAMP, folder="/kv").close()
        assert opened(copy).head.stamps == (STAMP, NO_STAMP), what
        sweep_tables(str(folder), DEATH)
        assert not list(folder.iterdir()), what


def test_each_cut_of_an_addition_leaves_the_other_keys_and_no_other_one(
    table: KeyTable, table_path: str, tmp_path: Path
) -> None:
    table.close()
    many = numbered(range(34))  # more than there are free slots
    known = {key.id: key for key in table}
    kept = list[KeyTable]()

    def add(table: KeyTable) -> None:
        table.add(many)
        kept.append(table)

    left = states(add, table_path, tmp_path)
    assert len(left) > 10
    all_known = known | {key.id: key for key in kept[0]}
    for folder, what, is_torn in left:
        again = opened(folder / Path(table_path).name)
        found = {key.id: key for key in again}
        assert found.items() >= known.items(), what
        assert found.items() <= all_known.items(), what
        assert again.num_lost <= is_torn, what
    assert opened(left[-1].folder / Path(table_path).name).num_lost == 0


def test_each_cut_of_a_drop_leaves_the_other_keys(
    table: KeyTable, table_path: str, tmp_path: Path
) -> None:
    table.add({THREE: DEATH})
    table.close()
    left = states(lambda table: table.drop([ONE, THREE]), table_path, tmp_path)
    assert len(left) > 8
    for folder, what, is_torn in left:
        again = opened(folder / Path(table_path).name)
        assert key_of(again, TWO) == key_of(table, TWO), what
        assert set(again) <= set(table), what
        assert again.num_lost <= is_torn, what
    assert scopes_of(opened(left[-1].folder / Path(table_path).name)) == [TWO]


def test_each_cut_of_a_stamp_leaves_the_old_ones_or_the_new_ones(
    table: KeyTable, table_path: str, tmp_path: Path
) -> None:
    table.close()
    left = states(lambda table: table.stamp(NEXT, STAMP), table_path, tmp_path)
    seen = list[tuple[bytes, bytes]]()
    for folder, what, _ in left:
        copy = folder / Path(table_path).name
        looked = KeyTable.look(str(copy), FOLDER_ID, MASTER)
        again = opened(copy)
        assert looked.head.stamps == again.head.stamps, what
        assert set(again) == set(table), what
        seen.append(again.head.stamps)
    assert set(seen) == {(STAMP, NO_STAMP), (NEXT, STAMP)}
    assert seen[-1] == (NEXT, STAMP)


def test_each_cut_of_a_rotation_is_finished_by_a_start_with_the_new_key(
    table: KeyTable, table_path: str, tmp_path: Path
) -> None:
    table.add(numbered(range(60)))
    table.drop([b"%036d" % number for number in range(0, 60, 7)])
    table.close()
    left = states(lambda table: table.rotate(OTHER, place="/new"), table_path, tmp_path)
    openers = list[str]()
    with unflushed():
        for folder, what, _ in left:
            copy = folder / Path(table_path).name
            data, can = copy.read_bytes(), ""
            for name, key in (("old", MASTER), ("new", OTHER)):
                copy.write_bytes(data)
                try:
                    looked = KeyTable.look(str(copy), FOLDER_ID, key)
                except MissingKeyError as error:
                    assert error.reason == "master key", what
                    continue
                can += name
                assert copy.read_bytes() == data, what
                again = opened(copy, key)
                assert set(looked) == set(again) == set(table), what
                assert again.num_lost == 0, what
                if again.head.is_rotating:  # the new key is the one that ends it
                    assert key == MASTER, what
                    assert set(opened(copy, MASTER)) == set(opened(copy, OTHER)), what
                    key = OTHER
                assert set(opened(copy, key)) == set(table), what
                gone = MASTER if key == OTHER else OTHER
                assert reason_of(KeyTable.look, str(copy), FOLDER_ID, gone) == "master key", what
            openers.append(can)
    order = ["old", "oldnew", "new"]
    kills = [can for can, (_, what, _) in zip(openers, left, strict=True) if "kill" in what]
    assert kills == sorted(kills, key=order.index) and kills.count("oldnew") >= 6
    assert set(openers) == set(order) and openers[-1] == "new"


def test_who_saw_a_rotation_with_the_old_master_key_reads_no_slot_of_later(
    table: KeyTable, table_path: str, tmp_path: Path
) -> None:
    table.close()
    left = states(lambda table: table.rotate(OTHER), table_path, tmp_path)
    seen = set[bytes]()
    for folder, what, _ in left:
        for page in layout.header_pages((folder / Path(table_path).name).read_bytes()):
            head = layout.head_of(page)
            if head is not None and check_of(MASTER) in head.checks:
                kept = layout.open_header(page, head, MASTER)
                assert kept is not None, what
                seen.add(kept.wrapping_key)
    [known] = seen

    def num_read(path: str | Path) -> int:
        data, cipher = Path(path).read_bytes(), AESGCM(known)
        slots = [data[FIRST_SLOT + SLOT * number :][:SLOT] for number in range(2)]
        found = [layout.unpack_slot(slot, at, FOLDER_ID, cipher) for at, slot in enumerate(slots)]
        return len([key for key in found if key is not None])

    # The same holds for each cut, once a start has had the new master key.
    num_finished = 0
    for folder, what, _ in left:
        copy = folder / Path(table_path).name
        assert num_read(copy) in (0, 2), what
        with suppress(MissingKeyError), unflushed():
            opened(copy, OTHER)
            num_finished += 1
            assert num_read(copy) == 0, what
    assert num_read(table_path) == 0 < num_finished


# --- failures -------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[KeyTable], object]] = {
    "add": lambda table: table.add(numbered(range(40))),
    "drop": lambda table: table.drop([ONE]),
    "drop_dead": lambda table: table.drop_dead(DEATH),
    "stamp": lambda table: table.stamp(NEXT, STAMP),
    "rotate": lambda table: table.rotate(OTHER, place="/new"),
}


@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_fails_changes_nothing_here_and_can_be_made_again(
    table: KeyTable, table_path: str, name: str, call: str
) -> None:
    keys, stamps, checks = set(table), table.head.stamps, table.head.checks
    num_failed = 0
    for after in range(20):
        try:
            with failing(call, errno.ENOSPC, after=after):
                CHANGES[name](table)
        except StoreFullError as error:
            num_failed += 1
            table.check()
            assert (error.errno, set(table), table.head.stamps) == (errno.ENOSPC, keys, stamps)
            is_new = table.head.checks[0] == check_of(OTHER)
            found = KeyTable.look(table_path, FOLDER_ID, OTHER if is_new else MASTER)
            gone = {key for key in keys if key.scope == ONE} if "drop" in name else set()
            assert keys - gone <= set(found)
        else:
            break
    assert num_failed > 0
    table.check()
    now = set(table)
    table.close()
    new_key = OTHER if name == "rotate" else MASTER
    assert set(opened(table_path, new_key)) == now
    assert opened(table_path, new_key).num_lost == 0
    assert (now - keys or keys - now or name in ("stamp", "rotate")) and checks


def test_a_rotation_of_which_one_header_was_written_is_finished_by_the_next_start(
    table: KeyTable, table_path: str
) -> None:
    with pytest.raises(StorageError), failing("fdatasync", errno.EIO):
        table.rotate(OTHER)
    assert not table.head.is_rotating
    table.add({THREE: DEATH})
    table.close()
    assert len(opened(table_path)) == len(opened(table_path, OTHER)) == 3
    assert reason_of(opened, table_path) == "master key"


def test_a_start_on_a_device_that_takes_no_write_serves_what_it_reads(
    table: KeyTable, table_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    table.close()
    flip(table_path, FIRST_SLOT)
    with failing("pwrite", errno.EIO), caplog.at_level(logging.WARNING):
        again = KeyTable.open(table_path, FOLDER_ID, MASTER)
    assert (scopes_of(again), again.num_lost) == ([TWO], 1)
    again.drop([])  # the damaged slot is overwritten with the next change
    again.close()
    assert Path(table_path).read_bytes()[FIRST_SLOT:][:SLOT] == bytes(SLOT)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_keys_are_destroyed_on_a_full_disk_but_not_made(kind: str) -> None:
    try:
        with mounted(FILESYSTEMS[kind], image_bytes=8 << 20) as disk:
            folder = disk / "keys"
            folder.mkdir(0o700)
            table_path = str(folder / "table")
            with closing(KeyTable.create(table_path, FOLDER_ID, lambda: MASTER, STAMP)) as table:
                table.add(numbered(range(32)))
                for size in (1 << 16, 1 << 10):
                    with pytest.raises(OSError), open(disk / f"{size}", "wb", buffering=0) as file:
                        while True:
                            file.write(bytes(size))
                            os.fsync(file.fileno())
                for _ in range(2):
                    with pytest.raises(StoreFullError):
                        table.add({ONE: DEATH})
                assert (len(table), os.path.getsize(table_path)) == (32, FIRST_SLOT + PAGE)
                assert len(table.drop([b"%036d" % 3, b"%036d" % 9])) == 2
                table.stamp(NEXT, STAMP)
                table.add({ONE: DEATH})
                with pytest.raises(StoreFullError):
                    table.rotate(OTHER)
                assert os.listdir(folder) == ["table"]
            assert len(opened(table_path)) == 31
            (disk / f"{1 << 16}").unlink()
            assert len(opened(table_path, OTHER)) == 31
            assert reason_of(opened, table_path) == "master key"
    except CannotMountError as error:
        pytest.skip(str(error))


def test_a_table_that_cannot_be_made_leaves_no_file(table_path: str) -> None:
    for name in ("pwrite", "fsync", "rename"):
        with failing(name, errno.ENOSPC), pytest.raises(StoreFullError):
            KeyTable.create(table_path, FOLDER_ID, lambda: MASTER, STAMP)
        assert not os.listdir(os.path.dirname(table_path))
    with failing("fsync", errno.EIO, after=1), pytest.raises(StorageError):  # of the folder
        KeyTable.create(table_path, FOLDER_ID, lambda: MASTER, STAMP)
    assert not os.listdir(os.path.dirname(table_path))
