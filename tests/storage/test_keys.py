"""The master key and the key table of a store, as files."""

import base64
import errno
import os
import stat
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from tests.golden import refused
from tests.storage.mounts import FILESYSTEMS, CannotMountError, mounted
from tieredkv.environment import default_key_dir
from tieredkv.errors import ConfigError, MissingKeyError, StorageError
from tieredkv.storage import master_key
from tieredkv.storage.key_table import KeyTable
from tieredkv.storage.store_keys import NOTE, StoreKeys, open_keys, try_keys
from tieredkv.storage.worker_messages import StoreOptions

MASTER = bytes(range(32))
OTHER = bytes(range(1, 33))
STORE_ID = b"i" * 16
ONE, TWO, THREE = (name * 36 for name in (b"1", b"2", b"3"))


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "table")


@pytest.fixture
def table(path: str) -> KeyTable:
    """A table with keys of two scopes, added one after the other."""
    table = KeyTable.create(path, STORE_ID, MASTER, "/kv")
    table.add([ONE])
    table.add([ONE, TWO])
    return table


def reopened(table: KeyTable, key: bytes = MASTER) -> KeyTable:
    return KeyTable.open(table.path, table.store_id, key)


# --- the master key -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [MASTER, MASTER.hex().encode() + b"\n", base64.b64encode(MASTER), b"\n" * 32]
)
def test_a_master_key_is_read_in_each_form(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(data)
    file.chmod(0o600)
    assert master_key.read_file(str(file)) == (data if len(data) == 32 else MASTER)


@pytest.mark.parametrize("data", [b"", MASTER[:-1], MASTER.hex().encode()[:-2], b"z" * 64])
def test_a_master_key_of_the_wrong_length_is_refused_with_its_length(
    tmp_path: Path, data: bytes
) -> None:
    file = tmp_path / "key"
    file.write_bytes(data)
    file.chmod(0o600)
    with refused(MissingKeyError):
        master_key.read_file(str(file))


def test_a_master_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(MASTER)
    file.chmod(0o640)
    with refused(MissingKeyError):
        master_key.read_file(str(file))


def test_a_new_master_key_is_closed_to_others_and_overwrites_nothing(tmp_path: Path) -> None:
    file = tmp_path / "key"
    key = master_key.make_file(str(file))
    assert master_key.read_file(str(file)) == key
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with refused(MissingKeyError):
        master_key.make_file(str(file))


def test_a_master_key_that_could_not_be_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with refused(MissingKeyError):
        master_key.make_file(str(tmp_path / "key"))
    assert not list(tmp_path.iterdir())


def test_a_command_prints_the_master_key() -> None:
    assert master_key.ask_command(f"echo {MASTER.hex()}") == MASTER


@pytest.mark.parametrize("command", ["false", "/nowhere/kms get", "echo 'x", "", "echo short"])
def test_a_command_that_prints_no_key_is_refused(command: str) -> None:
    with refused(MissingKeyError):
        master_key.ask_command(command)


# --- the key table --------------------------------------------------------------------------------


def test_keys_are_found_again_after_a_restart(table: KeyTable) -> None:
    again = reopened(table)
    assert list(again) == list(table)
    assert [each.scope for each in again] == [ONE, TWO]
    assert (again.folder, again.names_key) == ("/kv", table.names_key)
    one = again.of_scope(ONE)
    assert one is not None and again.of_id(one.id) == one


def test_a_dropped_key_is_gone_and_the_table_has_a_fresh_key(table: KeyTable) -> None:
    one, before = table.of_scope(ONE), Path(table.path).read_bytes()
    assert one is not None
    old = os.open(table.path, os.O_RDONLY)
    assert table.drop([ONE, THREE]) == [one.id]
    assert table.of_id(one.id) is None
    assert [each.scope for each in reopened(table)] == [TWO]
    assert table._table_key not in (b"", None)
    after = Path(table.path).read_bytes()
    assert before[:92] != after[:92]
    assert os.pread(old, len(before) + 1, 0) == bytes(len(before))  # what was there is overwritten
    os.close(old)
    table.add([ONE])
    again = reopened(table).of_scope(ONE)
    assert again is not None and again.id != one.id and again.key != one.key


def test_another_master_key_opens_nothing_and_changes_nothing(table: KeyTable) -> None:
    before = Path(table.path).read_bytes()
    with refused(MissingKeyError):
        reopened(table, OTHER)
    with refused(MissingKeyError):
        KeyTable.open(table.path, b"x" * 16, MASTER)
    assert Path(table.path).read_bytes() == before


def test_another_master_key_can_take_over(table: KeyTable) -> None:
    keys = list(table)
    table.wrap(OTHER)
    table.add([THREE])
    assert list(reopened(table, OTHER))[:2] == keys
    with pytest.raises(MissingKeyError):
        reopened(table)


@pytest.mark.parametrize("at", [10, 30, 50, 100, 150])
def test_a_flipped_byte_of_what_opens_the_table_is_refused(table: KeyTable, at: int) -> None:
    table.drop([ONE])  # so that all is in one frame
    data = bytearray(Path(table.path).read_bytes())
    data[at] ^= 1
    Path(table.path).write_bytes(data)
    with pytest.raises(MissingKeyError):
        reopened(table)


def test_a_key_whose_writing_was_cut_short_is_ignored(
    table: KeyTable, caplog: pytest.LogCaptureFixture
) -> None:
    size = Path(table.path).stat().st_size
    table.add([THREE])
    for cut in (size + 1, size + 40):
        os.truncate(table.path, cut)
        again = reopened(table)
        assert [each.scope for each in again] == [ONE, TWO]
        assert f"its last {cut - size} bytes hold no key" in caplog.text
    again.add([THREE])
    assert [each.scope for each in reopened(table)] == [ONE, TWO, THREE]


def test_a_table_that_cannot_be_written_keeps_its_keys(table: KeyTable, tmp_path: Path) -> None:
    Path(table.path).rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError):
        table.add([THREE])
    assert table.of_scope(THREE) is None
    os.mkdir(table.path)
    with pytest.raises(StorageError):
        table.drop([ONE])
    assert table.of_scope(ONE) is not None


def test_no_table_with_a_dropped_key_is_left_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(mounted(FILESYSTEMS["ext4"], 8 << 20))
        except CannotMountError as error:
            pytest.skip(str(error))
        image = disk.parent / "image"
        table = KeyTable.create(str(disk / "table"), STORE_ID, MASTER, "/kv")
        table.add([ONE, TWO])

        def rename(*names: str) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch, pytest.raises(StorageError):
            patch.setattr(os, "rename", rename)
            table.wrap(OTHER)  # leaves a draft
        os.sync()
        before = [(disk / name).read_bytes()[32:92] for name in ("table", "table.new")]
        assert all(each in image.read_bytes() for each in before)
        table.drop([ONE])
        os.sync()
        left = image.read_bytes()
        assert [each in left for each in before] == [False, False]


# --- where they are -------------------------------------------------------------------------------


class Place:
    """A folder that is to be a store, with a folder for its keys."""

    def __init__(self, base: Path) -> None:
        self.folder, self.key_dir = base / "kv", base / "keys"
        self.folder.mkdir()

    def open(self, folder: Path | None = None, **changes: object) -> StoreKeys:
        settings: dict[str, object] = {"encryption": "on", "key_dir": str(self.key_dir)}
        folder = folder or self.folder
        options = StoreOptions(path=str(folder), **(settings | changes))  # type: ignore[arg-type]
        keys = open_keys(str(folder), options, known_id="")
        assert keys is not None
        return keys


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_first_start_makes_the_keys_and_prints_where(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    keys = place.open()
    [master] = place.key_dir.glob("*.master")
    assert f"its master key was made at `{master}`" in caplog.text
    for file in (*place.key_dir.iterdir(), place.folder / NOTE):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.key_dir.stat().st_mode) == 0o700
    again = place.open(key_dir=None, encryption="as_it_is")  # which the folder remembers
    assert (again.note, again.table.names_key) == (keys.note, keys.table.names_key)
    assert MASTER.hex() not in (place.folder / NOTE).read_text()


def test_a_first_start_that_fails_leaves_no_keys(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = place.folder / f"{NOTE}.new"
    in_the_way.mkdir()
    with pytest.raises(StorageError, match=NOTE):
        place.open()
    assert not list(place.key_dir.iterdir())
    assert "master key was made" not in caplog.text
    in_the_way.rmdir()
    place.open()


def test_a_new_store_is_told_to_make_the_master_key_that_is_given(
    place: Place, tmp_path: Path
) -> None:
    with refused(MissingKeyError):
        place.open(master_key=str(tmp_path / "mine"))


def test_a_store_that_is_not_encrypted_has_no_keys(place: Place) -> None:
    for encryption in ("off", "as_it_is"):
        options = StoreOptions(path=str(place.folder), encryption=encryption)
        assert open_keys(str(place.folder), options, known_id="") is None
    assert not place.key_dir.exists()


@pytest.mark.parametrize("suffix", ["master", "keys"])
def test_a_lost_file_is_refused_and_nothing_is_made_in_its_place(place: Place, suffix: str) -> None:
    place.open()
    [lost] = place.key_dir.glob(f"*.{suffix}")
    lost.unlink()
    before = {each.name: each.read_bytes() for each in place.key_dir.iterdir()}
    with refused(MissingKeyError):
        place.open()
    assert {each.name: each.read_bytes() for each in place.key_dir.iterdir()} == before


def test_a_store_without_its_note_is_refused(place: Place) -> None:
    store_id = place.open().store_id
    (place.folder / NOTE).unlink()
    options = StoreOptions(path=str(place.folder), encryption="on", key_dir=str(place.key_dir))
    with refused(MissingKeyError):
        open_keys(str(place.folder), options, known_id=store_id)


def test_a_store_that_is_encrypted_is_not_opened_with_encryption_off(place: Place) -> None:
    place.open()
    with refused(ConfigError):
        place.open(encryption="off")


def test_a_given_master_key_is_remembered_by_its_path(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "mine"
    master_key.make_file(str(file))
    place.open(master_key=str(file))
    assert not list(place.key_dir.glob("*.master"))
    assert place.open().note.master_key == str(file)
    other = tmp_path / "other"
    master_key.make_file(str(other))
    with refused(MissingKeyError):
        place.open(master_key=str(other))


def test_two_master_keys_are_refused(place: Place) -> None:
    with refused(ConfigError):
        place.open(master_key="/mine", master_key_command="echo")


def test_a_command_is_not_remembered(place: Place) -> None:
    place.open(master_key_command=f"echo {MASTER.hex()}")
    assert "echo" not in (place.folder / NOTE).read_text()
    with refused(MissingKeyError):
        place.open()
    place.open(master_key_command=f"echo {MASTER.hex()}")


@pytest.mark.parametrize("setting", ["key_dir", "master_key"])
def test_keys_in_the_folder_that_they_protect_are_refused(place: Place, setting: str) -> None:
    with refused(ConfigError):
        place.open(None, **{setting: str(place.folder / "within")})


@pytest.mark.parametrize("field", ["key_table", "master_key"])
def test_a_folder_cannot_bring_keys_with_it(place: Place, field: str) -> None:
    """Else whoever writes to the folder would know the keys of new blocks."""
    note = place.open().note
    planted = place.folder / "planted"
    planted.write_bytes(Path(getattr(note, field)).read_bytes())
    planted.chmod(0o600)
    changed = msgspec.structs.replace(note, **{field: str(planted)})
    (place.folder / NOTE).write_bytes(msgspec.json.encode(changed))
    with refused(ConfigError):
        place.open(key_dir=None)
    looking = StoreOptions(path=str(place.folder), encryption="as_it_is")
    keys, why = try_keys(str(place.folder), looking, known_id=note.store_id)
    assert keys is None and "lies in the folder" in why


def test_a_master_key_is_not_put_into_the_folder_that_it_protects(place: Place) -> None:
    keys = place.open()
    with refused(ConfigError):
        keys.rotate(str(place.folder / "mine"), None)
    place.open()


def test_a_note_that_is_damaged_is_refused(place: Place) -> None:
    note = place.open().note
    for changed in (b"{", msgspec.json.encode(msgspec.structs.replace(note, store_id="zz"))):
        (place.folder / NOTE).write_bytes(changed)
        with refused(MissingKeyError):
            place.open()


def test_a_copy_of_a_store_that_is_still_there_gets_a_table_of_its_own(
    place: Place, tmp_path: Path
) -> None:
    keys = place.open()
    keys.table.add([ONE])
    copy = tmp_path / "copy"
    copy.mkdir()
    note = (place.folder / NOTE).read_bytes()
    (copy / NOTE).write_bytes(note)
    looked = place.open(copy, encryption="as_it_is")
    assert looked.is_shared and list(looked.table) == list(keys.table)
    with refused(MissingKeyError):
        looked.rotate(None, None)
    assert (copy / NOTE).read_bytes() == note
    served = place.open(copy)
    assert not served.is_shared
    assert served.table.path != keys.table.path
    served.table.drop([ONE])
    assert [each.scope for each in place.open().table] == [ONE]
    assert place.open(copy).table.path == served.table.path
    assert len(place.open(copy).table) == 0


def test_a_store_that_was_moved_keeps_its_table(place: Place, tmp_path: Path) -> None:
    keys, moved = place.open(), tmp_path / "moved"
    place.folder.rename(moved)
    again = place.open(moved)
    assert (again.table.path, again.table.folder) == (keys.table.path, str(moved))


def test_keys_may_move_to_another_folder(place: Place, tmp_path: Path) -> None:
    place.open()
    moved = tmp_path / "moved"
    place.key_dir.rename(moved)
    with refused(MissingKeyError):
        place.open()
    place.open(key_dir=str(moved))
    place.open(key_dir=None)


def test_the_master_key_is_replaced_in_its_place(place: Place) -> None:
    keys = place.open()
    keys.table.add([ONE])
    [file] = place.key_dir.glob("*.master")
    before = file.read_bytes()
    assert keys.rotate(None, None) == str(file)
    assert file.read_bytes() != before
    assert [each.scope for each in place.open().table] == [ONE]
    file.write_bytes(before)
    with pytest.raises(MissingKeyError):
        place.open()


def test_a_rotation_that_was_cut_short_is_finished(place: Place) -> None:
    keys = place.open()
    [file] = place.key_dir.glob("*.master")
    draft = file.with_name(file.name + ".new")
    keys.table.wrap(master_key.make_file(str(draft)))
    place.open()
    assert not draft.exists()
    master_key.make_file(str(draft))  # one that was made, and then never used
    place.open()


def test_the_master_key_is_replaced_by_another_file_or_command(
    place: Place, tmp_path: Path
) -> None:
    keys, file = place.open(), str(tmp_path / "mine")
    keys.rotate(file, None)
    assert place.open().note.master_key == file
    inside = Path(keys.folder, "mine")
    with refused(ConfigError):
        keys.rotate(str(inside), None)
    assert not inside.exists() and place.open().note.master_key == file
    keys.rotate(None, f"echo {OTHER.hex()}")
    with refused(MissingKeyError):
        place.open()
    again = place.open(master_key_command=f"echo {OTHER.hex()}")
    with refused(MissingKeyError):
        again.rotate(None, None)


def test_keys_are_kept_where_state_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert default_key_dir() == "/state/tieredkv/keys"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/kv")
    assert default_key_dir() == "/home/kv/.local/state/tieredkv/keys"
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    assert default_key_dir() == "/home/kv/.local/state/tieredkv/keys"
    monkeypatch.setenv("HOME", "kv")
    with refused(ConfigError):
        default_key_dir()
