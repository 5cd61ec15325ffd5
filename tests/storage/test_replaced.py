"""A store of the format version before: destroyed with its keys by the start of a server."""

import errno
import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.golden import refused
from tests.storage.blocks import load, make_record, open_store, payload_of, put, segment_files
from tests.storage.test_folder import tree
from tests.storage.test_store_keys import Place
from tieredkv.errors import FormatVersionError, StorageError, StoreBusyError
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Df, EvictFilter, Ls, Verify
from tieredkv.storage.folder.folder import StoreFolder
from tieredkv.storage.folder.marker import MARKER
from tieredkv.storage.keys import master
from tieredkv.storage.keys.place import NOTE

ID = "0123456789abcdef" * 2
OTHER = "fedcba9876543210" * 2
NUM_BLOCKS = 3


def old_table(path: Path, id: str, key: bytes) -> Path:
    """Make the beginning of a key table of version 1, and something behind it."""
    check = hashlib.sha256(b"tieredkv master key" + key).digest()[:8]
    path.write_bytes(b"TKVKEYS\1" + bytes.fromhex(id) + check + os.urandom(200))
    path.chmod(0o600)
    return path


class OldPlace(Place):
    """A store of version 2 with blocks, whose master key and key table a first start made."""

    def __init__(self, base: Path, *, is_encrypted: bool = True) -> None:
        super().__init__(base)
        records = [make_record("old", position) for position in range(NUM_BLOCKS)]
        with open_store(self.folder, self.clock) as store:
            put(store, *records)
        (self.folder / MARKER).write_text('{"format":"tieredkv-store","version":2}\n')
        self.key_dir.mkdir(mode=0o700)
        if is_encrypted:
            self.old_master = self.key_dir / f"{ID}.master"
            self.master_key = master.make_file(str(self.old_master))
            self.old_table = old_table(self.key_dir / f"{ID}.keys", ID, self.master_key)
            self.note(key_table=str(self.old_table), master_key=str(self.old_master))

    def note(self, **changes: Any) -> None:
        note = {"store_id": ID, **changes}
        (self.folder / NOTE).write_bytes(msgspec.json.encode(note))


@pytest.fixture
def old(tmp_path: Path) -> OldPlace:
    return OldPlace(tmp_path)


def assert_is_new(place: Place) -> None:
    """Assert that a start makes a new store without the old one's blocks, and use it."""
    record = place.record("new")
    with place.open() as store:
        assert store.stats().blocks == 0
        put(store, record)
        assert load(store, record) == payload_of(record)
        store.check()
    assert place.marker["version"] == 3
    assert not list(place.folder.glob("index.[bn]*"))


def test_a_start_destroys_the_store_and_the_keys_that_it_made(
    old: OldPlace, caplog: pytest.LogCaptureFixture
) -> None:
    served = old_table(old.key_dir / f"{ID}-0a1b2c3d.keys", ID, old.master_key)
    old.check_start()
    with open(old.old_table, "rb") as table, open(old.old_master, "rb") as key:
        assert_is_new(old)
        assert not any(table.read())  # what was there is overwritten
        assert not any(key.read())
    assert not old.old_table.exists() and not old.old_master.exists() and not served.exists()
    assert len(old.files()) == 2
    [told] = [each for each in caplog.messages if "format version 2" in each]
    assert re.search(rf"{NUM_BLOCKS} blocks, [1-9]\d*", told) and str(old.key_dir) in told


@pytest.mark.parametrize("encryption", ["on", "off"])
def test_a_clear_store_is_destroyed_whatever_the_setting(tmp_path: Path, encryption: str) -> None:
    old = OldPlace(tmp_path, is_encrypted=False)
    old.check_start(encryption=encryption)
    with old.open(encryption=encryption) as store:
        assert store.stats().blocks == 0
    assert segment_files(old.folder) == []


def test_keys_go_also_if_the_new_store_is_to_be_clear(old: OldPlace) -> None:
    old.open(encryption="off").close()
    assert old.files() == {}


def test_a_master_key_that_a_setting_names_stays(old: OldPlace) -> None:
    named = old.key_dir / "named.master"
    named.symlink_to(old.old_master)
    old.open(master_key=str(named)).close()
    assert old.old_master.exists() and not old.old_table.exists()


def test_a_master_key_that_another_table_needs_stays(old: OldPlace) -> None:
    other = old_table(old.key_dir / f"{OTHER}.keys", OTHER, old.master_key)
    old.open().close()
    assert old.old_master.exists() and not old.old_table.exists() and other.exists()


def test_files_that_only_the_folder_names_stay(old: OldPlace, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for file in (old.old_table, old.old_master):
        shutil.move(file, elsewhere / file.name)
    old.note(
        key_table=str(elsewhere / old.old_table.name),
        master_key=str(elsewhere / old.old_master.name),
    )
    before = tree(elsewhere)
    old.open().close()
    assert tree(elsewhere) == before


@pytest.mark.parametrize("encryption", ["on", "off"])
def test_a_store_whose_folder_of_keys_is_not_there_is_destroyed_nevertheless(
    old: OldPlace, encryption: str
) -> None:
    """As in a container whose home is not kept, or with a setting that names a new folder."""
    shutil.rmtree(old.key_dir)
    old.check_start(encryption=encryption)
    with old.open(encryption=encryption) as store:
        assert store.stats().blocks == 0
    assert segment_files(old.folder) == []


def test_emptying_one_whose_folder_of_keys_is_not_there_works_as_well(old: OldPlace) -> None:
    shutil.rmtree(old.key_dir)
    control = StoreControl(old.folder, key_dir=str(old.key_dir))
    assert control.answer(EvictFilter(all=True))["evicted_blocks"] == NUM_BLOCKS


@pytest.mark.parametrize("id", ["", "../../etc", "*", OTHER])
def test_files_of_another_id_or_kind_stay(old: OldPlace, id: str) -> None:
    strangers = [
        old_table(old.key_dir / f"{OTHER}-1.keys", ID, old.master_key),
        old.key_dir / f"{OTHER}.master",
    ]
    strangers[1].write_bytes(b"another's")
    (old.key_dir / f"{OTHER}.keys").write_bytes(b"no table")
    old.note(store_id=id)
    before = old.files()
    old.open().close()
    left = old.files()
    assert {name: left[name] for name in before} == before


def test_a_master_key_of_a_store_of_this_version_is_not_taken_for_an_old_one(
    tmp_path: Path,
) -> None:
    """A writer of the volume has a folder say that it is an old store with a living one's id."""
    living = Place(tmp_path / "living")
    living.folder.parent.mkdir()
    record = living.stores()
    forged = OldPlace(tmp_path)
    forged.key_dir = living.key_dir
    forged.note(store_id=living.marker["id"])
    forged.open().close()
    with living.open() as store:
        assert load(store, record) == payload_of(record)


def test_links_and_second_names_among_the_segments_are_removed_and_not_followed(
    old: OldPlace, tmp_path: Path
) -> None:
    victims = [tmp_path / name for name in ("one", "two")]
    for victim in victims:
        victim.write_bytes(b"precious")
    (old.folder / "segments" / "00000007-4096.seg").symlink_to(victims[0])
    os.link(victims[1], old.folder / "segments" / "00000008-4096.seg")
    shutil.rmtree(old.folder / "index")
    (old.folder / "index").mkdir(0o700)
    old.open().close()
    assert [victim.read_bytes() for victim in victims] == [b"precious"] * 2
    assert segment_files(old.folder) == []


def test_other_files_in_the_folder_stay(old: OldPlace) -> None:
    (old.folder / "notes.txt").write_text("mine")
    old.open().close()
    assert (old.folder / "notes.txt").read_text() == "mine"


def test_a_store_that_another_process_uses_is_left_alone(old: OldPlace) -> None:
    folder = StoreFolder.claim(str(old.folder), create=False, destroy_replaced=lambda path: None)
    keys = old.files()
    (old.folder / MARKER).write_text('{"format":"tieredkv-store","version":2}\n')
    with pytest.raises(StoreBusyError):
        old.check_start()
    with pytest.raises(StoreBusyError):
        old.open()
    assert old.files() == keys and len(segment_files(old.folder)) == 1
    folder.release()


def test_verbs_refuse_it_and_change_nothing(old: OldPlace) -> None:
    before = tree(old.folder.parent)
    with refused(FormatVersionError):
        old.open(encryption="as_it_is", create=False)
    control = old.control()
    for call in (Df(), Verify(), Ls(), EvictFilter(older_than_s=0.0)):
        with pytest.raises(FormatVersionError):
            control.answer(call)
    with pytest.raises(FormatVersionError):
        control.adopt()
    with pytest.raises(FormatVersionError):
        control.answer(EvictFilter(all=True, dry_run=True))
    assert tree(old.folder.parent) == before


def test_evicting_all_destroys_it(old: OldPlace) -> None:
    answer = old.control().answer(EvictFilter(all=True))
    assert answer["evicted_blocks"] == answer["disk"]["evicted_blocks"] == NUM_BLOCKS
    assert answer["freed_bytes"] > 0
    assert old.files() == {} and segment_files(old.folder) == []
    assert_is_new(old)


def test_keys_that_cannot_be_destroyed_keep_the_store(
    old: OldPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlink(path: str, **_: object) -> None:
        raise PermissionError(13, "Permission denied", path)

    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(os, "unlink", unlink)
        old.open()
    assert len(segment_files(old.folder)) == 1
    assert_is_new(old)


def test_a_segment_that_cannot_be_removed_is_named_by_its_path(
    old: OldPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    [segment] = segment_files(old.folder)
    unlink = os.unlink

    def refusing(path: str, **how: Any) -> None:
        if path == segment.name:
            raise PermissionError(errno.EPERM, "Operation not permitted", path)
        unlink(path, **how)

    with monkeypatch.context() as patch, pytest.raises(StorageError, match=re.escape(str(segment))):
        patch.setattr(os, "unlink", refusing)
        old.open()
    assert_is_new(old)


@pytest.mark.parametrize("version", [0, 1, 4, 999])
def test_any_other_version_is_left_untouched_also_by_evicting_all(
    old: OldPlace, version: int
) -> None:
    (old.folder / MARKER).write_text(f'{{"format":"tieredkv-store","version":{version}}}')
    before = tree(old.folder.parent)
    for attempt in (
        old.check_start,
        old.open,
        lambda: StoreControl(old.folder, key_dir=str(old.key_dir)).answer(EvictFilter(all=True)),
    ):
        with pytest.raises(FormatVersionError, match=f"version {version}"):
            attempt()
    assert tree(old.folder.parent) == before
