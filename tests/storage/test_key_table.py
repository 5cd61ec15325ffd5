"""The key table: its keys, its bytes, and what damage and strangers do to it."""

import errno
import fcntl
import hashlib
import hmac
import json
import logging
import os
import random
import secrets
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from xxhash import xxh3_64_digest

from tests.storage.cuts import failing, unflushed
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
from tieredkv.errors import DamagedTableError, MissingKeyError, StorageError, StoreBusyError
from tieredkv.storage.keys import gone, layout, table_file
from tieredkv.storage.keys.destruction import sweep_table
from tieredkv.storage.keys.table import KeyTable

# --- keys -----------------------------------------------------------------------------------------


def test_keys_are_found_again_after_a_restart(table: KeyTable, table_path: str) -> None:
    table.close()
    again = opened(table_path)
    assert list(again) == list(table)
    assert [(key.scope, key.dies_at) for key in again] == [(ONE, DEATH), (TWO, DEATH + 2)]
    assert (again.names_key, again.head.folder_id, again.head.stamps) == (
        table.names_key,
        FOLDER_ID,
        (STAMP, NO_STAMP),
    )
    assert (again.head.folder, again.head.master_place, again.num_lost) == ("/kv", "/key", 0)
    assert again.of_id(key_of(again, ONE).id) == key_of(again, ONE)


def test_a_dropped_key_is_overwritten_in_its_slot_and_nothing_else_changes(
    table: KeyTable, table_path: str
) -> None:
    one, before = key_of(table, ONE), Path(table_path).read_bytes()
    assert table.drop([ONE, THREE]) == [one.id]
    after = Path(table_path).read_bytes()
    assert after == before[:FIRST_SLOT] + bytes(SLOT) + before[FIRST_SLOT + SLOT :]
    assert (table.of_id(one.id), table.of_scope(ONE), len(table)) == (None, None, 1)
    table.close()
    assert scopes_of(opened(table_path)) == [TWO]


def test_a_slot_is_used_again_for_another_key(table: KeyTable, table_path: str) -> None:
    one = key_of(table, ONE)
    table.drop([ONE])
    table.add({ONE: DEATH})
    again = key_of(table, ONE)
    assert again.id != one.id and again.key != one.key
    assert os.path.getsize(table_path) == FIRST_SLOT + PAGE


def test_keys_leave_at_their_second_of_death(table: KeyTable, table_path: str) -> None:
    one, two = key_of(table, ONE), key_of(table, TWO)
    assert table.drop_dead(DEATH - 0.5) == []
    assert table.drop_dead(DEATH) == [one.id]
    assert table.drop_dead(DEATH + 1) == []
    table.add({THREE: DEATH})
    table.drop([THREE])
    assert table.drop_dead(DEATH + 10) == [two.id]
    assert Path(table_path).read_bytes()[FIRST_SLOT:] == bytes(PAGE)


def test_a_table_grows_by_whole_pages_and_is_not_shortened(
    table: KeyTable, table_path: str
) -> None:
    many = numbered(range(31))
    table.add(many)
    assert os.path.getsize(table_path) == FIRST_SLOT + 2 * PAGE
    table.add(numbered(range(100, 170)))
    assert os.path.getsize(table_path) == FIRST_SLOT + 4 * PAGE
    table.drop([key.scope for key in table])
    assert os.path.getsize(table_path) == FIRST_SLOT + 4 * PAGE
    assert not any(Path(table_path).read_bytes()[FIRST_SLOT:])
    table.add(many)
    table.close()
    assert scopes_of(opened(table_path)) == sorted(many)


def test_a_drop_writes_one_slot_and_flushes_once_at_any_number_of_keys(table: KeyTable) -> None:
    table.add(numbered(range(1000)))
    write, flush = os.pwrite, os.fdatasync
    sizes, num_flushes = list[int](), 0

    def pwrite(fd: int, data: memoryview, at: int) -> int:
        sizes.append(len(data))
        return write(fd, data, at)

    def fdatasync(fd: int) -> None:
        nonlocal num_flushes
        num_flushes += 1
        flush(fd)

    with patch.multiple(os, pwrite=pwrite, fdatasync=fdatasync):
        table.drop([b"%036d" % 500])
    assert (sizes, num_flushes) == ([SLOT], 1)


def test_each_write_of_a_slot_has_a_fresh_nonce(table: KeyTable, table_path: str) -> None:
    nonces = set()
    for _ in range(3):
        nonces.add(Path(table_path).read_bytes()[FIRST_SLOT + 52 :][:12])
        table.drop([ONE])
        table.add({ONE: DEATH})
    table.rotate(OTHER)
    nonces.add(Path(table_path).read_bytes()[FIRST_SLOT + 52 :][:12])
    assert len(nonces) == 4


def test_the_stamps_and_the_hints_change_without_the_keys(table: KeyTable, table_path: str) -> None:
    table.stamp(NEXT, STAMP)
    assert (table.head.folder, table.head.master_place) == ("/kv", "/key")
    table.stamp(NEXT, NO_STAMP, folder="/elsewhere")
    table.close()
    again = opened(table_path)
    assert again.head.stamps == (NEXT, NO_STAMP)
    assert (again.head.folder, again.head.master_place) == ("/elsewhere", "/key")
    assert scopes_of(again) == [ONE, TWO]


def test_a_path_that_is_too_long_is_not_remembered(table: KeyTable, table_path: str) -> None:
    table.stamp(NEXT, STAMP, folder="/x" * 800)
    table.close()
    assert opened(table_path).head.folder == ""


def test_a_look_changes_nothing_and_needs_no_lock(table: KeyTable, table_path: str) -> None:
    before = Path(table_path).read_bytes(), os.stat(table_path).st_mtime_ns
    seen = KeyTable.look(table_path, FOLDER_ID, MASTER)
    assert (list(seen), seen.names_key) == (list(table), table.names_key)
    with pytest.raises(StorageError):
        seen.drop([ONE])
    with pytest.raises(StorageError):
        seen.stamp(NEXT, STAMP)
    flip(table_path, FIRST_SLOT + 60)
    flip(table_path, 30)
    damaged = Path(table_path).read_bytes()
    seen = KeyTable.look(table_path, FOLDER_ID, MASTER)
    assert (scopes_of(seen), seen.num_lost, seen.head.stamps) == ([TWO], 1, (STAMP, NO_STAMP))
    assert Path(table_path).read_bytes() == damaged
    assert before[0] != damaged


def test_a_look_at_a_table_that_is_replaced_meanwhile_reads_the_new_one(
    table: KeyTable, table_path: str
) -> None:
    read, num_reads = os.pread, 0

    def pread(fd: int, size: int, at: int) -> bytes:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 2:  # the old file is overwritten then
            table.rotate(MASTER)
        return read(fd, size, at)

    with patch.object(os, "pread", pread):
        seen = KeyTable.look(table_path, FOLDER_ID, MASTER)
    assert (set(seen), seen.num_lost, num_reads) == (set(table), 0, 6)


# --- what is in the place of a table --------------------------------------------------------------


@pytest.mark.parametrize("read", [KeyTable.open, KeyTable.look])
def test_why_a_table_cannot_be_read_is_told_by_the_reason(
    read: Callable[[str, bytes, bytes], KeyTable], table: KeyTable, table_path: str
) -> None:
    table.close()
    before = Path(table_path).read_bytes()
    assert reason_of(read, table_path, FOLDER_ID, OTHER) == "master key"
    assert reason_of(read, table_path, b"x" * 16, MASTER) == "foreign"
    assert reason_of(read, table_path + ".gone", FOLDER_ID, MASTER) == "absent"
    assert Path(table_path).read_bytes() == before
    for version in (1, 3, 200):
        Path(table_path).write_bytes(b"TKVKEYS" + bytes([version]) + secrets.token_bytes(20_000))
        assert reason_of(read, table_path, FOLDER_ID, MASTER) == "version"
    Path(table_path).write_bytes(b"")
    assert reason_of(read, table_path, FOLDER_ID, MASTER) == "damaged"


def test_a_table_of_a_newer_version_is_left_as_it_is(table_path: str) -> None:
    data = b"TKVKEYS\x03" + secrets.token_bytes(20_000)
    Path(table_path).write_bytes(data)
    os.chmod(table_path, 0o600)
    assert reason_of(KeyTable.open, table_path, FOLDER_ID, MASTER) == "version"
    sweep_table(table_path, DEATH + 10)
    assert Path(table_path).read_bytes() == data


def test_a_second_process_cannot_open_a_table_but_look_at_it(
    table: KeyTable, table_path: str
) -> None:
    with pytest.raises(StoreBusyError):
        table_file.open_locked(table_path, wait_s=0.0)
    assert scopes_of(KeyTable.look(table_path, FOLDER_ID, MASTER)) == [ONE, TWO]
    table.close()
    assert scopes_of(opened(table_path)) == [ONE, TWO]


def test_a_filesystem_without_locks_is_told_as_such(table: KeyTable, table_path: str) -> None:
    table.close()
    no_locks = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    with patch.object(fcntl, "flock", side_effect=no_locks), pytest.raises(StorageError) as caught:
        KeyTable.open(table_path, FOLDER_ID, MASTER)
    assert (type(caught.value), caught.value.errno) == (StorageError, errno.ENOLCK)


def test_nothing_but_a_plain_file_with_one_name_is_taken_for_a_table(
    table: KeyTable, table_path: str, tmp_path: Path
) -> None:
    table.close()
    away, place = tmp_path / "away", Path(table_path)
    place.rename(away)
    makes: list[Callable[[], object]] = [
        lambda: place.symlink_to(away),
        lambda: os.mkfifo(table_path, 0o600),
        lambda: place.mkdir(0o700),
        lambda: place.hardlink_to(away),
    ]
    before = away.read_bytes()
    for make in makes:
        make()
        assert reason_of(KeyTable.open, table_path, FOLDER_ID, MASTER) == "unsafe"
        assert reason_of(KeyTable.look, table_path, FOLDER_ID, MASTER) == "unsafe"
        assert reason_of(sweep_table, table_path, DEATH + 10) == "unsafe"
        assert reason_of(table_file.erase, table_path) == "unsafe"
        assert away.read_bytes() == before
        place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()


def test_the_header_of_another_store_is_not_taken_for_ones_own(
    table: KeyTable, table_path: str
) -> None:
    table.close()
    other = table_path + ".other"
    with closing(KeyTable.create(other, b"o" * 16, lambda: MASTER, NEXT)) as another:
        for _ in range(3):
            another.stamp(NEXT, STAMP)  # so that its header has a higher number
    data = Path(table_path).read_bytes()
    Path(table_path).write_bytes(Path(other).read_bytes()[:PAGE] + data[PAGE:])
    again = opened(table_path)
    assert (set(again), again.head.stamps) == (set(table), (STAMP, NO_STAMP))
    assert Path(table_path).read_bytes()[8:24] == FOLDER_ID


def test_keys_are_not_shown_in_texts(table: KeyTable) -> None:
    key = key_of(table, ONE)
    for text in (repr(key), repr(layout.Secrets(key.key, key.key, key.key))):
        assert not any(part in text for part in (repr(key.key), key.key.hex()))


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o660])
def test_a_table_that_others_can_use_is_refused(
    table: KeyTable, table_path: str, mode: int
) -> None:
    table.close()
    os.chmod(table_path, mode)
    assert reason_of(opened, table_path) == "unsafe"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_table_or_a_folder_of_another_user_is_refused(table: KeyTable, table_path: str) -> None:
    table.close()
    os.chown(table_path, 12345, -1)
    assert reason_of(opened, table_path) == "unsafe"
    os.chown(table_path, 0, -1)
    os.chown(os.path.dirname(table_path), 12345, -1)
    assert reason_of(opened, table_path) == "unsafe"
    with pytest.raises(MissingKeyError):
        KeyTable.create(table_path + ".another", FOLDER_ID, lambda: MASTER, STAMP)


def test_a_folder_that_others_can_write_to_is_refused(table: KeyTable, table_path: str) -> None:
    table.close()
    for mode in (0o770, 0o702, 0o1777):
        os.chmod(os.path.dirname(table_path), mode)
        assert reason_of(opened, table_path) == "unsafe"


def test_a_table_takes_the_place_of_nothing(table: KeyTable, table_path: str) -> None:
    table.close()
    before = Path(table_path).read_bytes()
    with pytest.raises(StorageError):
        KeyTable.create(table_path, FOLDER_ID, lambda: OTHER, STAMP)
    assert Path(table_path).read_bytes() == before
    assert os.listdir(os.path.dirname(table_path)) == [os.path.basename(table_path)]


def test_a_table_that_was_removed_while_it_is_open_gets_no_more_keys(
    table: KeyTable, table_path: str
) -> None:
    os.rename(table_path, table_path + ".away")
    changes: list[Callable[[], None]] = [
        lambda: table.add({THREE: DEATH}),
        lambda: table.add({ONE: DEATH}),  # blocks under a key that is there would be lost as well
        lambda: table.stamp(NEXT, STAMP),
        lambda: table.rotate(OTHER),
    ]
    for change in changes:
        with pytest.raises(StorageError) as caught:
            change()
        assert caught.value.errno == errno.ENOENT
    assert table.drop([ONE])  # what was moved away must lose its keys, too
    os.rename(table_path + ".away", table_path)
    table.add({THREE: DEATH})
    table.close()
    assert scopes_of(opened(table_path)) == [TWO, THREE]


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 8, 44, 52, 64, 96, 112, 119, 120, 127])
def test_one_flipped_bit_of_a_slot_costs_one_key_and_is_told_once(
    table: KeyTable, table_path: str, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    table.close()
    flip(table_path, FIRST_SLOT + at, bit=3)
    with caplog.at_level(logging.WARNING):
        damaged = opened(table_path)
        assert len(caplog.records) == 1
        assert opened(table_path).num_lost == 0
        assert len(caplog.records) == 1
    assert (damaged.num_lost, scopes_of(damaged)) == (1, [TWO])
    assert Path(table_path).read_bytes()[FIRST_SLOT:][:SLOT] == bytes(SLOT)


def test_any_flipped_bit_of_the_file_costs_at_most_one_key(
    table: KeyTable, table_path: str
) -> None:
    table.close()
    data, chance = Path(table_path).read_bytes(), random.Random(1)
    places = [*range(304), *range(508, 520), 4095, *range(4096, 4116), *range(8190, 8450)]
    places += [chance.randrange(len(data)) for _ in range(200)]
    for at in places:
        with open(table_path, "r+b") as file:  # in its place, since a new file is flushed
            file.write(data)
        flip(table_path, at, bit=chance.randrange(8))
        with unflushed():
            again = opened(table_path)
        lost = 1 if at >= FIRST_SLOT else 0
        assert again.num_lost == lost
        assert 2 - len(again) == (1 if FIRST_SLOT <= at < FIRST_SLOT + 2 * SLOT else 0)
        assert (again.names_key, again.head.stamps) == (table.names_key, (STAMP, NO_STAMP))


def test_one_header_mends_the_other(table: KeyTable, table_path: str) -> None:
    table.stamp(NEXT, STAMP)
    table.close()
    data = Path(table_path).read_bytes()
    for at in (0, PAGE):
        Path(table_path).write_bytes(data[:at] + bytes(PAGE) + data[at + PAGE :])
        assert opened(table_path).head.stamps == (NEXT, STAMP)
        mended = Path(table_path).read_bytes()
        assert mended[:PAGE] == mended[PAGE:FIRST_SLOT]
        assert mended[FIRST_SLOT:] == data[FIRST_SLOT:]


@pytest.mark.parametrize("at", [0, 7, 9, 70, 90, 170, 600, 4090])
def test_both_headers_damaged_is_told_apart_and_changes_nothing(
    table: KeyTable, table_path: str, at: int
) -> None:
    table.close()
    flip(table_path, at)
    flip(table_path, PAGE + 100)
    before = Path(table_path).read_bytes()
    for read in (KeyTable.open, KeyTable.look):
        with pytest.raises(DamagedTableError) as caught:
            read(table_path, FOLDER_ID, MASTER)
        assert caught.value.reason == "damaged"
    assert Path(table_path).read_bytes() == before
    table_file.erase(table_path)
    again = KeyTable.create(table_path, FOLDER_ID, lambda: MASTER, NEXT)
    again.close()
    assert (len(again), again.head.stamps) == (0, (NEXT, NO_STAMP))


def test_a_table_that_was_cut_keeps_the_keys_that_are_left(
    table: KeyTable, table_path: str
) -> None:
    table.add(numbered(range(40)))
    table.close()
    os.truncate(table_path, FIRST_SLOT + PAGE + SLOT + 100)
    again = KeyTable.open(table_path, FOLDER_ID, MASTER)
    assert (len(again), again.num_lost) == (33, 1)
    assert not any(Path(table_path).read_bytes()[FIRST_SLOT + PAGE + SLOT :])  # the torn slot
    again.add(numbered(range(100, 132)))
    again.add({THREE: DEATH})
    again.close()
    assert os.path.getsize(table_path) == FIRST_SLOT + 3 * PAGE
    assert THREE in scopes_of(opened(table_path))


def test_a_slot_in_another_place_or_table_is_lost(table: KeyTable, table_path: str) -> None:
    table.close()
    data = Path(table_path).read_bytes()
    one, two = (data[FIRST_SLOT + at :][:SLOT] for at in (0, SLOT))
    Path(table_path).write_bytes(data[:FIRST_SLOT] + two + one + data[FIRST_SLOT + 2 * SLOT :])
    swapped = opened(table_path)
    assert (len(swapped), swapped.num_lost) == (0, 2)


def test_a_slot_whose_death_was_put_off_is_lost(table: KeyTable, table_path: str) -> None:
    table.close()
    data = bytearray(Path(table_path).read_bytes())
    slot = data[FIRST_SLOT : FIRST_SLOT + 120]
    struct.pack_into("<d", slot, 44, DEATH + 1e6)
    data[FIRST_SLOT : FIRST_SLOT + SLOT] = bytes(slot) + layout.seal(slot)
    Path(table_path).write_bytes(data)
    assert scopes_of(opened(table_path)) == [TWO]


def test_a_page_that_the_device_cannot_read_costs_its_keys_only(
    table: KeyTable, table_path: str
) -> None:
    table.add(numbered(range(62)))
    table.close()
    read = os.pread

    def pread(fd: int, size: int, at: int) -> bytes:
        if at <= FIRST_SLOT < at + size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, size, at)

    with patch.object(os, "pread", pread):
        again = opened(table_path)
    assert (len(again), again.num_lost) == (32, 32)


# --- bytes ----------------------------------------------------------------------------------------

GOLDEN = Path(__file__).with_name("key_table.json")


def test_the_bytes_of_headers_and_slots_are_those_of_the_golden_file(table_path: str) -> None:
    """With a counter in place of chance the whole table is the same at each run."""
    count = 0

    def token_bytes(size: int) -> bytes:
        nonlocal count
        count += 1
        return bytes([count]) * size

    with (
        patch.object(secrets, "token_bytes", token_bytes),
        patch.object(gone, "parent_of", lambda folder: b"p" * 32),
    ):
        table = KeyTable.create(
            table_path, FOLDER_ID, lambda: MASTER, STAMP, folder="/kv", master_place="/key"
        )
        table.add({ONE: DEATH, TWO: DEATH + 0.5})
        with pytest.raises(StorageError), failing("pwrite", errno.EIO, after=2):
            table.rotate(OTHER, place="/new")
        table.close()
    data = Path(table_path).read_bytes()
    found = {
        "header": data[:512].hex(),
        "folder": data[512:576].hex(),
        "master_place": data[2048:2112].hex(),
        "header_seal": data[PAGE - 8 : PAGE].hex(),
        "slots": [data[FIRST_SLOT + at :][:SLOT].hex() for at in (0, SLOT)],
    }
    assert found == json.loads(GOLDEN.read_text())
    assert not any(data[576:2048] + data[2112 : PAGE - 8])
    assert data[:PAGE] == data[PAGE:FIRST_SLOT]
    assert not any(data[FIRST_SLOT + 2 * SLOT :])


def test_an_outsider_with_the_master_key_reads_a_table_as_the_document_draws_it(
    table: KeyTable, table_path: str
) -> None:
    """Without tieredkv's own code, as docs/encryption.md says."""
    table.drop([ONE])
    table.add({THREE: DEATH})
    data = Path(table_path).read_bytes()
    header, folder_id = data[:4096], data[8:24]
    assert (header[:8], folder_id) == (b"TKVKEYS\x02", FOLDER_ID)
    assert (header[24:40], header[40:56]) == (STAMP, NO_STAMP)
    check = hashlib.sha256(b"tieredkv master key" + MASTER).digest()[:8]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    root = os.stat("/")
    parent = bytes.fromhex(boot.replace("-", "")) + struct.pack("<QQ", root.st_dev, root.st_ino)
    assert header[64:96] == parent
    assert (header[96:104], header[164:232]) == (check, bytes(68))
    lock_key = hmac.digest(MASTER, b"tieredkv key table" + folder_id, "sha256")
    wrapping_key = AESGCM(lock_key).decrypt(header[104:116], header[116:164], folder_id + check)
    cipher = AESGCM(wrapping_key)
    names_key = cipher.decrypt(header[232:244], header[244:292], header[:232] + header[292:4088])
    assert names_key == table.names_key
    assert header[512:2048].rstrip(b"\0") == b"/kv"
    assert header[2048:3584].rstrip(b"\0") == b"/key"
    assert header[4088:] == xxh3_64_digest(header[:4088])
    found = {}
    for number in range((len(data) - 8192) // 128):
        slot = data[8192 + 128 * number :][:128]
        if any(slot):
            place = folder_id + struct.pack("<Q", number) + slot[:52]
            key = cipher.decrypt(slot[52:64], slot[64:112], place)
            found[slot[8:44]] = (slot[:8], key, struct.unpack("<d", slot[44:52])[0])
            assert slot[112:120] == bytes(8)
            assert slot[120:] == xxh3_64_digest(slot[:120])
    assert found == {key.scope: (key.id, key.key, key.dies_at) for key in table}
    assert found.keys() == {TWO, THREE}
