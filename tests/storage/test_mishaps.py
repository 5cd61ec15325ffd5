"""Mishaps from outside: a changed folder or index, a clock that is ahead, a stopped caller."""

import os
import random
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.golden import refused
from tests.levels import few
from tests.operate.test_ask import engine_that_says
from tests.storage import blocks
from tests.storage.conftest import DAY_S, Harness, Mailbox, make_chain, wait_until
from tests.storage.test_faults import plain_index
from tests.waiting import HANG_S
from tieredkv.errors import StorageError, StoreBusyError, StoreFullError
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Df, Verify
from tieredkv.storage.messages.engine import CloseCall
from tieredkv.storage.worker.process import WorkerProcess, judge_end

CHAIN = make_chain("a", 8)
HASHES = [each.block_hash for each in CHAIN]


@pytest.fixture
def stopped(harness: Harness) -> Harness:
    """A store with some blocks, which no worker serves."""
    client = harness.open()
    assert all(done.ok for done in Mailbox(client).store(CHAIN))
    client.close()
    return harness


def expect_all(harness: Harness) -> None:
    """Assert that every block is served and that new blocks are stored."""
    mail = Mailbox(harness.open())
    for done in mail.load(CHAIN):
        mail.assert_right(done)
    assert all(done.ok for done in mail.store(make_chain("later", 8)))


# --- the index ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bit", few([28, 55, 32, 42]))
def test_a_flipped_bit_of_the_last_pages_number_costs_no_block(stopped: Harness, bit: int) -> None:
    index = stopped.folder / "index" / "data.mdb"
    data = bytearray(index.read_bytes())
    # In both meta pages, the number of the last page stands at this offset, then the transaction's.
    pages = [136, 4096 + 136]
    newest = max(pages, key=lambda at: struct.unpack_from("<QQ", data, at)[1])
    data[newest + bit // 8] ^= 1 << bit % 8
    index.write_bytes(data)
    expect_all(stopped)
    assert index.stat().st_size < 8 << 20


def test_verify_answers_for_a_stopped_store_whose_index_crashes_the_worker(
    stopped: Harness,
) -> None:
    os.truncate(stopped.folder / "index" / "data.mdb", 12_288)
    found = StoreControl(stopped.folder).answer(Verify())
    assert (found["checked"], found["bad"], found["repaired"]) == (len(CHAIN), 1, 1)
    assert found["by_reason"] == {"index": 1}
    assert StoreControl(stopped.folder).answer(Verify())["bad"] == 0
    expect_all(stopped)


def swap_pages(index: Path, seed: int) -> None:
    """Swap two pages of an index."""
    data = bytearray(index.read_bytes())
    one, other = (
        slice(4096 * page, 4096 * page + 4096)
        for page in random.Random(seed).sample(range(2, len(data) // 4096), 2)
    )
    data[one], data[other] = data[other], data[one]
    index.write_bytes(data)


@pytest.mark.parametrize("seed", few(range(8)))
def test_an_index_whose_pages_lie_in_each_others_place_is_made_again(
    harness: Harness, seed: int
) -> None:
    client = harness.open()
    chains = [make_chain(name, 60) for name in "abcdefgh"]
    for each in chains:
        Mailbox(client).store(each)
    client.close()
    swap_pages(harness.folder / "index" / "data.mdb", seed)
    mail = Mailbox(harness.open())

    def is_whole() -> bool:
        stored = [done.ok for each in chains for done in mail.store(each)]
        return all(stored) and all(done.ok for each in chains for done in mail.load(each))

    def is_sound() -> bool:
        with suppress(StorageError):  # the damage may end the worker
            return bool(StoreControl(harness.folder).answer(Verify(repair=False))["bad"] == 0)
        return False

    wait_until(is_sound)
    wait_until(is_whole)


def look_over(store: blocks.CheckedStore) -> Iterator[bool]:
    return chain(store.index.reading_ahead(), store.index.looking_over())


def test_an_index_is_looked_over_while_blocks_come_and_go(tmp_path: Path) -> None:
    records = [blocks.make_record("a", position) for position in range(300)]
    with blocks.open_store(tmp_path / "store", budget_bytes=16 << 20) as store:
        blocks.put(store, *records)
        for number, is_sound in enumerate(look_over(store)):
            assert is_sound
            store.drop([records[number].block_hash], "test")
            blocks.put(store, blocks.make_record("later", number))
        assert number > 8


@pytest.mark.parametrize("order", ["expiry", "lru"])
def test_looking_over_the_index_finds_a_lost_key(tmp_path: Path, order: str) -> None:
    path, records = tmp_path / "store", [blocks.make_record("a", each) for each in range(300)]
    with blocks.open_store(path) as store:
        blocks.put(store, *records)
    with plain_index(path, order) as (txn, db), txn.cursor(db) as cursor:
        assert cursor.first()
        cursor.delete()
    with blocks.open_store(path) as store:
        assert not all(look_over(store))
        assert blocks.verify(store).by_reason == {"index": 1}
        assert all(look_over(store))
        store.check()


def test_verify_answers_where_the_index_crashes_a_serving_worker(harness: Harness) -> None:
    mail = Mailbox(client := harness.open(sweep_interval_s=60.0))
    for name in "abcd":
        mail.store(make_chain(name, 60))
    wait_until(lambda: all(done.ok for done in mail.load(make_chain("a", 60))))
    with open(harness.folder / "index" / "data.mdb", "r+b") as index:
        index.seek(2 * 4096)
        index.write(bytes(8 * 4096))  # pages that every walk through the index reads
    with engine_that_says(client, {}):
        assert StoreControl(harness.folder).answer(Verify()).keys() >= {
            "checked",
            "bad",
            "repaired",
        }
    wait_until(lambda: all(done.ok for done in mail.store(make_chain("a", 60))))
    assert client.stats().faults["index"] >= 1
    assert StoreControl(harness.folder).answer(Verify())["bad"] == 0


def test_hashes_that_the_index_cannot_hold_are_misses_and_no_damage(stopped: Harness) -> None:
    mail = Mailbox(client := stopped.open())
    pid = client.pid
    assert mail.lookup([b"", b"short", b"x" * 600, HASHES[0]])[:3] == [None] * 3
    assert mail.lookup([HASHES[0]]) != [None]
    assert client.pid == pid


def test_faults_are_remembered_when_the_worker_ends(stopped: Harness) -> None:
    [segment] = (stopped.folder / "segments").iterdir()
    data = bytearray(segment.read_bytes())
    data[5000] ^= 1
    segment.write_bytes(data)
    mail = Mailbox(client := stopped.open())
    assert [done.reason for done in mail.load(CHAIN)].count("checksum") == 1
    client.close()
    assert StoreControl(stopped.folder).answer(Df())["disk"]["faults"] == {"checksum": 1}


# --- the folder ---------------------------------------------------------------------------------


def test_a_smaller_budget_is_reached_beside_an_index_that_was_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "store"
    records = [blocks.make_record("a", position) for position in range(200)]
    with blocks.open_store(path) as store:
        for start in range(0, 200, 50):
            assert all(blocks.put(store, *records[start : start + 50]))
    (path / "index.bad").mkdir(mode=0o700)
    (path / "index.bad" / "data.mdb").write_bytes(bytes(2 << 20))
    with blocks.open_store(path, budget_bytes=1 << 20) as store:
        assert blocks.occupied_bytes(path) <= 1 << 20
        assert 0 < store.stats().blocks < 200
        store.check()


def test_a_file_beside_the_store_that_takes_the_budget_empties_nothing(tmp_path: Path) -> None:
    path, record = tmp_path / "store", blocks.make_record()
    with blocks.open_store(path) as store:
        blocks.put(store, record)
    (path / "core").write_bytes(bytes(6 << 20))
    with refused(StoreFullError):
        blocks.open_store(path)
    (path / "core").unlink()
    with blocks.open_store(path) as store:
        assert blocks.load(store, record) == blocks.payload_of(record)


def test_a_new_index_that_was_never_finished_is_removed(stopped: Harness) -> None:
    (draft := stopped.folder / "index.new").mkdir(mode=0o700)
    (draft / "data.mdb").write_bytes(bytes(1 << 20))
    expect_all(stopped)
    assert not draft.exists()


@pytest.mark.parametrize("name", ["index.new", "index.next", "index.bad"])
def test_a_link_in_the_way_of_a_new_index_is_refused(
    stopped: Harness, tmp_path: Path, name: str
) -> None:
    (tmp_path / "precious").mkdir()
    (stopped.folder / name).symlink_to(tmp_path / "precious")
    with refused(StorageError):
        stopped.open()
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize("text", ["", "{}", "null", '{"format":"tieredkv-store","version":"2"}'])
def test_a_damaged_marker_is_named_and_the_index_left_alone(stopped: Harness, text: str) -> None:
    (stopped.folder / "format.json").write_text(text)
    with refused(StorageError):
        stopped.open()
    assert not (stopped.folder / "index.bad").exists()


def test_a_folder_that_was_emptied_is_a_store_again(harness: Harness) -> None:
    mail = Mailbox(harness.open())
    assert mail.store(CHAIN)[0].ok
    for each in harness.folder.iterdir():  # while the worker, which sees it, removes its socket
        shutil.rmtree(each) if each.is_dir() else each.unlink(missing_ok=True)
    wait_until(lambda: all(done.ok for done in mail.store(CHAIN)))
    for done in mail.load(CHAIN):
        mail.assert_right(done)


def test_nothing_is_acknowledged_into_a_segment_that_was_removed(harness: Harness) -> None:
    mail = Mailbox(client := harness.open())
    mail.store(CHAIN)
    for segment in (harness.folder / "segments").iterdir():
        segment.unlink()
    later = make_chain("later", 8)
    wait_until(lambda: all(done.ok for done in mail.store(later)))
    client.close()
    mail = Mailbox(harness.open())
    for done in mail.load(later):
        mail.assert_right(done)


def test_nothing_is_acknowledged_into_a_folder_without_its_marker(harness: Harness) -> None:
    mail = Mailbox(client := harness.open())
    mail.store(CHAIN)
    marker, away = harness.folder / "format.json", harness.folder.parent / "away"
    marker.rename(away)
    wait_until(lambda: bool(client.state().why))
    assert not any(done.ok for done in mail.store(make_chain("later", 2)))
    away.rename(marker)
    wait_until(lambda: not client.state().why)
    for done in mail.load(CHAIN):
        mail.assert_right(done)


def test_an_index_that_was_removed_is_made_again_at_once(harness: Harness) -> None:
    mail = Mailbox(client := harness.open())
    mail.store(CHAIN)
    first, index = client.pid, harness.folder / "index" / "data.mdb"
    index.unlink()
    wait_until(lambda: client.pid not in (None, first))
    assert index.exists()
    for done in mail.load(CHAIN):
        mail.assert_right(done)


def test_two_writers_never_share_a_store_whose_lock_was_removed(harness: Harness) -> None:
    mail = Mailbox(client := harness.open())
    mail.store(CHAIN)
    first = client.pid
    (harness.folder / "lock").unlink()
    wait_until(lambda: client.pid not in (None, first))  # the worker ended and was started again
    with refused(StoreBusyError, hide={str(client.pid): "PID"}):
        harness.open()
    for done in mail.load(CHAIN):
        mail.assert_right(done)


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Set the umask to 0, so that a folder gets exactly the mode that its maker asks for."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_umask")
def test_folders_above_a_new_store_are_private_too(tmp_path: Path) -> None:
    blocks.open_store(tmp_path / "a" / "b" / "store").close()
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        assert folder.stat().st_mode & 0o777 == 0o700


# --- the clock ----------------------------------------------------------------------------------


def test_a_block_from_a_clock_that_is_ahead_lives_no_longer(harness: Harness) -> None:
    mail = Mailbox(client := harness.open())
    names = ("computed_at", "expires_at", "last_used")
    ahead = [
        replace(each, **{name: getattr(each, name) + DAY_S for name in names}) for each in CHAIN
    ]
    assert all(done.ok for done in mail.store(ahead))
    now = time.time()
    for found in mail.lookup(HASHES):
        assert found is not None
        assert found.expires_at <= now + DAY_S
        assert found.computed_at <= now
    assert client.stats().faults == {}


# --- callers ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_worker_of_a_command_line_that_is_interrupted_at_once_ends_without_a_word(
    stopped: Harness, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = WorkerProcess(stopped.options(create=False), arena=None)
    worker.channel.send(CloseCall())
    assert worker.bury(HANG_S) == judge_end(0, b"")
    assert capfd.readouterr().err == ""


def test_a_store_that_lost_its_power_can_be_looked_at_before_a_server_starts(
    harness: Harness,
) -> None:
    client = harness.open(sync="none")
    Mailbox(client).store(CHAIN)
    lock = harness.folder / "lock"
    text = lock.read_bytes()
    client.close()
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    lock.write_bytes(text.replace(boot, b"another"))
    answer = StoreControl(harness.folder).answer(Df())
    assert [need["code"] for need in answer["needs"]] == ["index_unflushed"]
    assert answer["disk"]["bytes_budget"] == 64 << 20
    expect_all(harness)
