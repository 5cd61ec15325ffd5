"""Whose keys a store has: what a start makes and refuses, copies, and writers of the volume."""

import errno
import logging
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.golden import refused
from tests.storage.blocks import (
    digest,
    evict,
    load,
    make_record,
    open_store,
    payload_of,
    put,
    segment_files,
    stored_hashes,
    sweep,
)
from tests.storage.cuts import failing
from tests.storage.test_encryption import HOUR_S, Encrypted
from tests.storage.test_folder import tree
from tieredkv.cache.rate_file import read_rates
from tieredkv.errors import (
    ConfigError,
    MissingKeyError,
    StorageError,
    StoreBusyError,
    StoreFullError,
)
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Df, EvictFilter
from tieredkv.operate.models import KnownModel, note_model, read_models
from tieredkv.storage import starts
from tieredkv.storage.folder.marker import MARKER
from tieredkv.storage.format.record import scope_of
from tieredkv.storage.keys import master
from tieredkv.storage.keys.layout import HEADERS_AT, PAGE_BYTES
from tieredkv.storage.keys.place import NOTE
from tieredkv.storage.keys.table import KeyTable
from tieredkv.storage.options import StoreOptions

DAY_S = 86_400


class Place(Encrypted):
    """An encrypted store with its folder of keys, and what is done with it from outside."""

    def options(self, **changes: Any) -> StoreOptions:
        told: dict[str, Any] = {"path": str(self.folder), "encryption": "on"}
        return StoreOptions(**(told | {"key_dir": str(self.key_dir)} | changes))

    def check_start(self, **changes: Any) -> None:
        """Look whether a server's start would go well; nothing may change."""
        before = tree(self.folder.parent)
        try:
            starts.check_start(self.options(**changes), patience_s=0.0)
        finally:
            assert tree(self.folder.parent) == before

    def control(self, **changes: Any) -> StoreControl:
        return StoreControl(self.folder, key_dir=str(self.key_dir), **changes)

    @property
    def marker(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode((self.folder / MARKER).read_bytes())
        return found

    def mark(self, **changes: Any) -> None:
        (self.folder / MARKER).write_bytes(msgspec.json.encode(self.marker | changes))

    @property
    def table(self) -> Path:
        return self.key_dir / f"{self.marker['id']}.keys"

    @property
    def master(self) -> Path:
        return self.key_dir / f"{self.marker['id']}.master"

    def copy(self, name: str = "copy") -> "Place":
        """Copy the folder, but not the keys, as a backup does."""
        other = Place(self.folder.parent)
        other.folder, other.key_dir, other.clock = (
            self.folder.with_name(name),
            self.key_dir,
            self.clock,
        )
        shutil.copytree(self.folder, other.folder, symlinks=True)
        return other

    def stores(self, name: str = "a") -> Any:
        """Open the store, store a block, and close it; return the block's record."""
        record = self.record(name)
        with self.open() as store:
            assert put(store, record) == [True]
        return record

    def files(self) -> dict[str, bytes]:
        return {each.name: each.read_bytes() for each in self.key_dir.iterdir()}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def look(place: Place) -> KeyTable:
    key = bytes.fromhex(place.master.read_text())
    return KeyTable.look(str(place.table), bytes.fromhex(place.marker["id"]), key)


# --- a first start ------------------------------------------------------------------------------


def test_a_first_start_makes_the_keys_and_says_where(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.check_start()
    place.open().close()
    assert place.files().keys() == {place.table.name, place.master.name}
    assert f"its master key was made at `{place.master}`" in caplog.text
    for file in (*place.key_dir.iterdir(), place.folder / NOTE, place.folder / MARKER):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.key_dir.stat().st_mode) == 0o700
    note = {"key_table": str(place.table), "master_key": str(place.master)}
    assert msgspec.json.decode((place.folder / NOTE).read_bytes()) == note
    assert place.marker["stamp"] == look(place).head.stamps[0].hex()
    place.open().close()
    assert look(place).head.stamps == (bytes.fromhex(place.marker["stamp"]),) * 2


@pytest.mark.parametrize("name", ["keys.place", "folder.marker"])
def test_a_first_start_that_fails_leaves_no_file_of_keys(
    place: Place, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    open_store(place.folder, place.clock).close()
    with monkeypatch.context() as patched, pytest.raises(StorageError):
        patched.setattr(f"tieredkv.storage.{name}.replace_own", fail)
        place.open()
    assert place.files() == {}
    assert (place.marker["id"], place.marker["stamp"]) == ("", "")
    place.open().close()


@pytest.mark.parametrize("to", [None, "new"])
def test_a_rotation_without_room_says_what_to_do_and_may_be_made_again(
    place: Place, to: str | None
) -> None:
    new = to and str(place.folder.with_name(to))
    record = place.record()
    with place.open() as store:
        assert store.keys is not None
        put(store, record)
        hide = {place.marker["id"]: "ID"}
        with (
            failing("pwrite", errno.ENOSPC),
            refused(StoreFullError, hide=hide, errno=errno.ENOSPC),
        ):
            store.keys.rotate(new, None)
        assert load(store, record) == payload_of(record)
        store.keys.rotate(new, None)
    with place.open(master_key=new) as store:
        assert load(store, record) == payload_of(record)


def test_a_store_that_is_not_encrypted_has_no_keys_and_makes_no_folder_of_keys(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(place.folder.parent / "state"))
    place.check_start(encryption="off", key_dir=None)
    for encryption in ("off", "as_it_is"):
        with open_store(place.folder, place.clock, encryption=encryption) as store:
            assert store.stats().encryption == "off"
            put(store, place.record())
    assert (place.marker["id"], place.marker["stamp"]) == ("", "")
    assert [each.name for each in place.folder.parent.iterdir()] == [place.folder.name]


@pytest.mark.parametrize("setting", ["key_dir", "master_key"])
def test_keys_in_the_folder_that_they_protect_are_refused(place: Place, setting: str) -> None:
    with refused(ConfigError):
        place.check_start(**{setting: str(place.folder / "within")})
    with pytest.raises(ConfigError):
        place.open(**{setting: str(place.folder / "within")})


def test_two_master_keys_are_refused(place: Place) -> None:
    with refused(ConfigError):
        place.check_start(master_key="/mine", master_key_command="echo")


def test_a_new_store_is_told_to_make_the_master_key_that_is_given(place: Place) -> None:
    with refused(MissingKeyError, reason="absent"):
        place.check_start(master_key=str(place.folder.with_name("mine")))
    with pytest.raises(MissingKeyError):
        place.open(master_key=str(place.folder.with_name("mine")))
    assert not place.key_dir.exists()


def test_a_given_master_key_has_to_be_given_each_time(place: Place) -> None:
    key = str(place.folder.with_name("mine"))
    master.make_file(key)
    place.open(master_key=key).close()
    assert place.files().keys() == {place.table.name}
    with refused(MissingKeyError, hide={place.marker["id"]: "ID"}, reason="absent"):
        place.check_start()
    command = f"cat {key}"
    place.check_start(master_key_command=command)
    place.open(master_key_command=command).close()
    assert command not in (place.folder / NOTE).read_text()


def test_a_folder_of_keys_that_cannot_be_made_is_refused_by_a_look_and_by_the_start(
    place: Place,
) -> None:
    place.key_dir.write_bytes(b"")
    with refused(ConfigError):
        place.check_start()
    with refused(ConfigError):
        place.open()
    with refused(ConfigError):
        place.check_start(key_dir=str(place.key_dir / "below"))


def test_a_folder_of_keys_that_cannot_be_written_to_is_refused_by_a_look(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.stores()

    def access(path: str, mode: int) -> bool:
        return not Path(path).is_relative_to(place.key_dir)

    monkeypatch.setattr(os, "access", access)
    with refused(ConfigError):
        place.check_start()


def test_keys_may_move_with_their_folder(place: Place) -> None:
    record = place.stores()
    moved = place.key_dir.rename(place.key_dir.with_name("moved"))
    with refused(MissingKeyError, hide={place.marker["id"]: "ID"}, reason="absent"):
        place.check_start()
    place.key_dir = moved
    with place.open() as store:
        assert load(store, record) == payload_of(record)


def test_a_start_says_whom_encryption_keeps_out_if_the_keys_are_on_the_same_volume(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    devices = {str(place.folder): 1, str(place.key_dir): 2}
    monkeypatch.setattr(starts, "_device_of", devices.__getitem__)
    with caplog.at_level(logging.INFO):
        place.check_start()
        assert not caplog.messages
        devices[str(place.key_dir)] = 1
        place.check_start(encryption="off")
        assert not caplog.messages
        place.check_start()
    [told] = caplog.messages
    assert str(place.key_dir) in told and str(place.folder) in told


# --- setting and store --------------------------------------------------------------------------


@pytest.mark.parametrize("has", ["on", "off"])
def test_a_setting_that_disagrees_with_a_store_that_has_blocks_is_refused(
    place: Place, has: str
) -> None:
    other = "off" if has == "on" else "on"
    with place.open(encryption=has) as store:
        put(store, place.record())
    keys = place.files() if has == "on" else {}
    with refused(ConfigError):
        place.check_start(encryption=other)
    with pytest.raises(ConfigError):
        place.open(encryption=other)
    assert (place.files() if place.key_dir.exists() else {}) == keys
    with place.open(encryption=has) as store:
        assert load(store, place.record()) == payload_of(place.record())


@pytest.mark.parametrize("has", ["on", "off"])
def test_an_empty_store_takes_the_setting(place: Place, has: str) -> None:
    other, record = "off" if has == "on" else "on", place.record()
    with place.open(encryption=has) as store:
        put(store, record)
        evict(store, EvictFilter(all=True))
        sweep(store)
    place.check_start(encryption=other)
    with place.open(encryption=other) as store:
        assert store.stats().encryption == other
        put(store, record)
        assert load(store, record) == payload_of(record)
        store.check()
    assert bool(place.marker["id"]) == bool(place.marker["stamp"]) == (other == "on")
    assert len(place.files()) == (2 if other == "on" else 0)


# --- who can write to the volume ----------------------------------------------------------------


def test_keys_that_the_folder_names_are_not_used(place: Place) -> None:
    """A writer of the volume puts keys of its own there and has the note name them."""
    record, planted = place.stores(), place.folder.with_name("planted")
    planted.mkdir()
    shutil.copy(place.master, planted / "master")
    (planted / "master").chmod(0o600)
    id, key = place.marker["id"], bytes.fromhex((planted / "master").read_text())
    KeyTable.create(str(planted / f"{id}.keys"), bytes.fromhex(id), lambda: key, bytes(16)).close()
    note = {"key_table": str(planted / f"{id}.keys"), "master_key": str(planted / "master")}
    (place.folder / NOTE).write_bytes(msgspec.json.encode({"store_id": id, **note}))
    before = tree(planted)
    new = place.record("new", namespace=digest("another"))
    with place.open() as store:
        assert load(store, record) == payload_of(record)
        put(store, new)
    assert tree(planted) == before
    assert scope_of(new) in [each.scope for each in look(place)]
    (place.folder / NOTE).unlink()
    with place.open() as store:
        assert load(store, new) == payload_of(new)
    place.key_dir.rename(place.key_dir.with_name("away"))
    (place.folder / NOTE).write_bytes(msgspec.json.encode(note))
    with pytest.raises(MissingKeyError):
        place.open()


def test_an_id_of_other_keys_opens_nothing(place: Place) -> None:
    place.stores()
    other = Place(place.folder.with_name("other"))
    other.key_dir = place.key_dir
    other.stores()
    before = place.files()
    place.mark(id=other.marker["id"])
    with refused(MissingKeyError, hide={place.marker["id"]: "ID"}, reason="copy"):
        place.check_start()
    with pytest.raises(MissingKeyError):
        place.open()
    assert place.files() == before


@pytest.mark.parametrize("marks", [{"id": "", "stamp": ""}, {}])
@pytest.mark.parametrize("has_index", [True, False])
def test_clear_blocks_put_into_an_encrypted_store_are_never_served(
    place: Place, marks: dict[str, str], has_index: bool
) -> None:
    """A writer of the volume puts clear extents into the folder, with or without an index."""
    kept, forger, forged = place.stores(), place.folder.with_name("forger"), make_record("forged")
    with open_store(forger, place.clock) as store:
        put(store, forged)
    [target], [source] = segment_files(place.folder), segment_files(forger)
    shutil.copy(source, target)
    shutil.rmtree(place.folder / "index")
    (place.folder / NOTE).unlink()
    if has_index:
        shutil.copytree(forger / "index", place.folder / "index")
    place.mark(**marks)
    if marks:
        with pytest.raises(ConfigError):
            place.check_start()
        with pytest.raises(ConfigError):
            place.open()
        return
    with place.open() as store:
        assert load(store, forged) == ("key" if has_index else None)
        assert load(store, forged) is None
        assert load(store, kept) is None
        sweep(store)
        store.check()


def test_a_block_that_is_prolonged_in_the_index_dies_with_its_key(place: Place) -> None:
    record, start = place.record(), place.clock.now() // HOUR_S * HOUR_S
    for_ever = make_record(now=record.computed_at, expires_at=record.computed_at + 100 * DAY_S)
    with place.open() as store:
        put(store, record)
        store.touch([for_ever])  # as who can write to the volume changes its record
        [key] = look(place)
        assert key.dies_at == start + HOUR_S + DAY_S
        place.clock.moment = key.dies_at - 1
        assert load(store, record) == payload_of(record)
        place.clock.moment = key.dies_at
        assert stored_hashes(store, [record])
        assert load(store, record) == "key"  # before any sweep
    with place.open() as store:
        assert store.stats().num_keys == 0
    assert key.id not in place.table.read_bytes()


def test_a_sweep_destroys_a_dead_key_whose_block_is_prolonged(place: Place) -> None:
    record = place.record()
    with place.open(longest_s=100.0) as store:
        put(store, record)
        [key] = look(place)
        assert key.dies_at == place.clock.now() // HOUR_S * HOUR_S + HOUR_S + 100
        place.clock.moment = key.dies_at
        sweep(store)
        assert store.stats().num_keys == 0
        assert key.id not in place.table.read_bytes()
        assert load(store, record) == "key"


def hard_link(path: Path, elsewhere: Path) -> None:
    path.rename(elsewhere)
    os.link(elsewhere, path)


def symbolic_link(path: Path, elsewhere: Path) -> None:
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def fifo(path: Path, elsewhere: Path) -> None:
    path.rename(elsewhere)
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("name", ["lock", MARKER, "index/data.mdb", "segments"])
@pytest.mark.parametrize("replace", [hard_link, symbolic_link, fifo])
def test_a_file_with_two_names_a_link_or_a_fifo_is_not_opened(
    place: Place, name: str, replace: Callable[[Path, Path], None]
) -> None:
    place.stores()
    elsewhere = place.folder.with_name("elsewhere")
    [file] = segment_files(place.folder) if name == "segments" else [place.folder / name]
    replace(file, elsewhere)
    before = elsewhere.read_bytes()
    with pytest.raises(StorageError) as error:
        place.open()
    assert file.name in str(error.value)
    assert elsewhere.read_bytes() == before


@pytest.mark.parametrize("name", ["trial", f"{MARKER}.tmp", f"{NOTE}.tmp"])
@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_link_in_the_place_of_a_file_that_is_to_be_made_is_not_written_through(
    place: Place, name: str, link: Callable[[Path, Path], None]
) -> None:
    place.stores()
    victim = place.folder.with_name("victim")
    victim.write_bytes(b"precious")
    link(victim, place.folder / name)
    with place.open() as store:
        with suppress(FileExistsError):
            link(victim, place.folder / name)
        assert store.keys is not None
        store.keys.rotate(None, f"echo {'12' * 32}")
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize("name", ["models.json", "rates.json"])
@pytest.mark.parametrize("replace", [hard_link, symbolic_link, fifo])
def test_the_files_of_an_engine_are_not_read_through_a_link_or_a_fifo(
    place: Place, name: str, replace: Callable[[Path, Path], None]
) -> None:
    place.stores()
    model = KnownModel(name="a", fingerprint="", dtype="f", block_size=16, hash_algo="sha256")
    note_model(place.folder, model)
    (place.folder / "rates.json").write_bytes(b"")
    replace(place.folder / name, place.folder.with_name("elsewhere"))
    if name == "models.json":
        assert read_models(place.folder) == []
        note_model(place.folder, model)  # in the place of what is there
        assert read_models(place.folder) == [model]
    else:
        with pytest.raises(StorageError, match=name):
            read_rates(str(place.folder))


@pytest.mark.parametrize("replace", [symbolic_link, fifo])
def test_a_link_in_the_place_of_the_socket_is_not_followed(
    place: Place, replace: Callable[[Path, Path], None]
) -> None:
    place.stores()
    (place.folder / "sock").touch(0o600)
    replace(place.folder / "sock", place.folder.with_name("elsewhere"))
    with refused(StorageError):
        place.control().answer(Df())


# --- copies -------------------------------------------------------------------------------------


def test_a_copy_is_refused_and_takes_nothing_from_the_original(place: Place) -> None:
    place.stores()
    copy, later = place.copy(), place.stores("later")
    keys = place.files()
    for _ in range(3):
        with refused(MissingKeyError, hide={place.marker["id"]: "ID"}, reason="copy"):
            copy.check_start()
        with pytest.raises(MissingKeyError):
            copy.open()
        with copy.open(encryption="as_it_is") as store:  # as a verb does
            assert store.stats().encryption == "no keys"
            sweep(store)
    assert place.files() == keys
    with place.open() as store:
        assert load(store, later) == payload_of(later)


def test_a_copy_is_refused_while_the_original_serves_and_after_it(place: Place) -> None:
    record = place.stores()
    with place.open() as store:
        copy = place.copy()  # of the stamp of the running server
        with pytest.raises(StoreBusyError):
            copy.open()
        put(store, place.record("new"))
        assert load(store, record) == payload_of(record)
    with place.open(), pytest.raises(MissingKeyError) as error:
        copy.open()
    assert error.value.reason == "copy"


def test_of_two_equal_folders_the_first_that_is_served_wins(place: Place) -> None:
    record = place.stores()
    one, two = place.copy("one"), place.copy("two")
    with two.open() as store:
        assert load(store, record) == payload_of(record)
    for other in (one, place):
        with pytest.raises(MissingKeyError) as error:
            other.open()
        assert error.value.reason == "copy"


def test_a_copy_that_adopts_the_keys_is_the_store_from_then_on(place: Place) -> None:
    record, copy = place.stores(), place.copy()
    later = place.stores("later")
    assert copy.control().adopt() == {"adopted": True}
    copy.check_start()
    with copy.open() as store:
        assert load(store, record) == payload_of(record)
        assert load(store, later) is None
    with pytest.raises(MissingKeyError):
        place.open()
    assert copy.control().adopt() == {"adopted": False}
    copy.open().close()


def test_keys_are_not_adopted_while_a_server_uses_them_or_by_a_clear_store(place: Place) -> None:
    place.stores()
    copy, keys = place.copy(), place.files()
    with place.open():
        with pytest.raises(StoreBusyError):
            copy.control().adopt()
        with pytest.raises(StoreBusyError):
            place.control().adopt()
    clear = Place(place.folder.with_name("clear"))
    clear.open(encryption="off").close()
    with refused(ConfigError):
        clear.control().adopt()
    assert place.files().keys() == keys.keys()


def test_a_store_that_was_moved_keeps_its_keys(place: Place) -> None:
    record, moved = place.stores(), place.folder.with_name("moved")
    place.folder = place.folder.rename(moved)
    with place.open() as store:
        assert load(store, record) == payload_of(record)


def test_evicting_all_of_a_copy_empties_it_and_leaves_the_keys_to_the_original(
    place: Place,
) -> None:
    record, copy = place.stores(), place.copy()
    kept = place.stores("kept")
    keys = place.files()
    answer = copy.control().answer(EvictFilter(all=True))
    assert answer["evicted_blocks"] == answer["disk"]["evicted_blocks"] == 1
    assert answer["freed_bytes"] > 0 and answer["emptied_because"]
    assert str(place.table) in answer["disk"]["kept_why"]
    assert place.files() == keys
    assert (copy.marker["id"], segment_files(copy.folder)) == ("", [])
    with copy.open() as store:
        assert load(store, record) is None
    with place.open() as store:
        assert load(store, kept) == payload_of(kept)


# --- keys outlive no block ----------------------------------------------------------------------


def test_after_a_store_was_removed_no_key_outlives_its_blocks(place: Place) -> None:
    place.stores()
    table, other = place.table, Place(place.folder.with_name("other"))
    other.key_dir = place.key_dir
    [key] = look(place)
    shutil.rmtree(place.folder)
    other.clock.moment = key.dies_at - 1
    with other.open() as store:
        assert key.id in table.read_bytes()
        other.clock.moment = key.dies_at
        store.parts.key_use.sweep_others()  # as each sweep of a server does
    assert not table.exists()


def test_a_start_destroys_dead_keys_of_stores_that_are_stopped_and_leaves_their_tables(
    place: Place,
) -> None:
    place.stores()
    other, [key] = Place(place.folder.with_name("other")), look(place)
    other.key_dir = place.key_dir
    other.clock.moment = key.dies_at
    other.open().close()
    assert key.id not in place.table.read_bytes()
    place.clock.moment = key.dies_at
    place.open().close()  # the store is there, so its table stays


# --- tables that are lost, damaged or strange ---------------------------------------------------


def damage_headers(table: Path, *numbers: int) -> None:
    data = bytearray(table.read_bytes())
    for number in numbers:
        at = HEADERS_AT[number]
        data[at : at + PAGE_BYTES] = os.urandom(PAGE_BYTES)
    table.write_bytes(data)


def test_a_table_of_which_one_header_is_lost_serves_all_blocks(place: Place) -> None:
    record = place.stores()
    damage_headers(place.table, 0)
    place.check_start()
    with place.open() as store:
        assert load(store, record) == payload_of(record)


def test_a_table_of_which_both_headers_are_lost_empties_the_store_and_it_begins_anew(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    record, old, before = place.stores(), place.table, place.marker
    damage_headers(place.table, 0, 1)
    place.check_start()
    with place.open() as store:
        assert store.stats().faults == {"key_table": 1}
        assert load(store, record) is None
        put(store, record)
        assert load(store, record) == payload_of(record)
    assert "its 1 blocks were removed" in caplog.text
    assert place.marker["id"] != before["id"] and not old.exists()
    assert place.files().keys() == {place.table.name, place.master.name}


def test_a_lost_slot_costs_its_blocks_only(place: Place) -> None:
    one, two = place.record("one"), place.record("two", namespace=digest("another"))
    with place.open() as store:
        put(store, one, two)
    keys = {each.scope: each for each in look(place)}
    data = bytearray(place.table.read_bytes())
    data[data.index(keys[scope_of(one)].id) + 60] ^= 1
    place.table.write_bytes(data)
    place.check_start()
    with place.open() as store:
        assert store.stats().faults == {"key_slot": 1}
        assert load(store, one) == "key"
        assert load(store, two) == payload_of(two)


def absent(place: Place) -> None:
    place.table.unlink()


def without_master(place: Place) -> None:
    place.master.unlink()


def another_master(place: Place) -> None:
    place.master.unlink()
    master.make_file(str(place.master))


def foreign(place: Place) -> None:
    id = os.urandom(16)
    key = bytes.fromhex(place.master.read_text())
    place.table.unlink()
    KeyTable.create(str(place.table), id, lambda: key, bytes(16)).close()


def newer(place: Place) -> None:
    data = bytearray(place.table.read_bytes())
    for at in HEADERS_AT:
        data[at + 7] = 200
        data[at + 100] ^= 1
    place.table.write_bytes(data)


def open_to_others(place: Place) -> None:
    place.table.chmod(0o644)


REASONS: dict[Callable[[Place], None], str] = {
    absent: "absent",
    without_master: "absent",
    another_master: "master key",
    foreign: "foreign",
    newer: "version",
    open_to_others: "unsafe",
}


@pytest.mark.parametrize("change", REASONS)
def test_keys_that_are_not_there_are_refused_and_evicting_all_is_the_way_out(
    place: Place, change: Callable[[Place], None]
) -> None:
    record = place.stores()
    change(place)
    keys, id = place.files(), place.marker["id"]
    with refused(MissingKeyError, hide={id: "ID"}, reason=REASONS[change]):
        place.check_start()
    with pytest.raises(MissingKeyError):
        place.open()
    assert place.files() == keys
    answer = place.control().answer(EvictFilter(all=True))
    assert answer["evicted_blocks"] == 1
    is_kept = change in (absent, foreign, newer, open_to_others)
    assert bool(answer["disk"]["kept_why"]) == is_kept
    assert (f"{id}.keys" in place.files()) == (is_kept and change is not absent)
    with place.open() as store:
        assert load(store, record) is None
        put(store, record)
        assert load(store, record) == payload_of(record)


@pytest.mark.parametrize("lost", ["index", "master"])
def test_evicting_all_works_without_keys_and_without_an_index(place: Place, lost: str) -> None:
    place.stores()
    place.master.unlink()
    if lost == "index":
        shutil.rmtree(place.folder / "index")
    answer = place.control().answer(EvictFilter(all=True))
    assert answer["evicted_blocks"] == (0 if lost == "index" else 1)
    assert segment_files(place.folder) == []
    place.open().close()


def test_keys_that_cannot_be_destroyed_are_told_and_go_with_the_next_emptying(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.stores()
    place.master.unlink()

    def fail(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        disk = place.control().answer(EvictFilter(all=True))["disk"]
    assert disk["evicted_blocks"] == 1 and "Read-only file system" in disk["keys_error"]
    assert place.table.exists() and segment_files(place.folder) == []
    assert "keys_error" not in place.control().answer(EvictFilter(all=True))["disk"]
    assert place.files() == {}
    place.open().close()


# --- the master key -----------------------------------------------------------------------------


def test_the_master_key_is_replaced_in_its_place(place: Place) -> None:
    record = place.stores()
    before = place.master.read_bytes()
    with place.open() as store:
        assert store.keys is not None
        assert store.keys.rotate(None, None) == str(place.master)
        assert load(store, record) == payload_of(record)
    assert place.master.read_bytes() != before
    with place.open() as store:
        assert load(store, record) == payload_of(record)
    place.master.write_bytes(before)
    with pytest.raises(MissingKeyError):
        place.open()


def test_the_master_key_is_replaced_by_another_file_or_command(place: Place) -> None:
    record, file = place.stores(), str(place.folder.with_name("mine"))
    with place.open() as store:
        assert store.keys is not None
        with refused(ConfigError):
            store.keys.rotate(str(place.folder / "mine"), None)
        assert not (place.folder / "mine").exists()
        assert store.keys.rotate(file, None) == file
    with refused(MissingKeyError, hide={place.marker["id"]: "ID"}, reason="master key"):
        place.check_start()
    with place.open(master_key=file) as store:
        assert load(store, record) == payload_of(record)
        assert store.keys is not None
        store.keys.rotate(None, f"cat {place.master}")
        assert msgspec.json.decode((place.folder / NOTE).read_bytes())["master_key"] is None
    with place.open(master_key_command=f"cat {place.master}") as store:
        assert load(store, record) == payload_of(record)
        assert store.keys is not None
        with refused(MissingKeyError):
            store.keys.rotate(None, None)
