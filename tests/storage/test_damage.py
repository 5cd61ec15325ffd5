"""Damage to the index costs blocks at most, and a folder that goes away costs only misses."""

import itertools
import os
import random
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.fakes import FakeClock
from tests.golden import refused
from tests.levels import few
from tests.storage.blocks import (
    chains,
    choose,
    digest,
    evict,
    flip,
    load,
    make_record,
    occupied_bytes,
    open_store,
    payload_of,
    put,
    segment_files,
    stored_hashes,
    sweep,
    verify,
)
from tests.storage.conftest import NAMESPACE, Harness, Mailbox, make_chain, wait_until
from tests.storage.test_faults import plain_index
from tieredkv.errors import CorruptIndexError, StorageError, StoreFailedError
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Df, EvictFilter, Verify
from tieredkv.operate.verify import Findings
from tieredkv.storage.folder.folder import StoreFolder
from tieredkv.storage.index import rebuild
from tieredkv.storage.index.pages import check_pages
from tieredkv.storage.worker.__main__ import set_aside_index
from tieredkv.types import BlockRecord

BUDGET_BYTES = 32 << 20
DAMAGED, UNEXPLAINED = 4, 5
DAMAGES = ("checksum", "header", "missing_segment", "truncated")
NOW = 1_800_000_000.0
CHURNED = [
    make_record(
        f"c{chain}",
        position,
        size_bytes=8192 - chain % 3 * 100,
        namespace=digest(f"t{chain % 4}"),
        last_used=NOW + chain,
    )
    for chain in range(20)
    for position in range(20)
]


@pytest.fixture(scope="module")
def churned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store with free and pending extents; its files are the same in every run."""
    path = tmp_path_factory.mktemp("churned") / "store"
    with open_store(path, budget_bytes=BUDGET_BYTES) as store:
        for start in range(0, len(CHURNED), 64):
            put(store, *CHURNED[start : start + 64])
        store.drop([record.block_hash for record in CHURNED[::7]], "test")
        sweep(store)
        store.drop([record.block_hash for record in CHURNED[1::7]], "test")
    return path


def flip_bits(file: Path, seed: int, count: int) -> None:
    rnd, data = random.Random(seed), bytearray(file.read_bytes())
    for _ in range(count):
        data[rnd.randrange(min(len(data), 4 << 20))] ^= 1 << rnd.randrange(8)
    file.write_bytes(data)


def set_aside(path: Path) -> str:
    """Set the index aside as damaged, so that the next start makes it again."""
    folder = StoreFolder.claim(str(path), create=False)
    try:
        return set_aside_index(folder)
    finally:
        folder.release()


def use_and_repair(path: Path) -> None:
    """Check that a damaged store serves no wrong byte, and is sound once `verify` repaired it."""
    with open_store(path, budget_bytes=BUDGET_BYTES) as store:
        for record in CHURNED:
            assert load(store, record) in (payload_of(record), None, *DAMAGES)
        verify(store)
        assert verify(store).bad == 0
        store.check()
        fresh = [make_record("fresh", position) for position in range(20)]
        assert all(put(store, *fresh))
        sweep(store)
        store.check()
        assert occupied_bytes(path) <= BUDGET_BYTES


def outcome_in_child(path: Path) -> int:
    """Use the store in a process, and return its exit code, which may be a signal's.

    As in a store worker, errors that nobody foresaw are UNEXPLAINED. Errors that would refuse the
    start, and a wrong byte, are told and are neither.
    """
    if (pid := os.fork()) == 0:
        code = 1
        try:
            use_and_repair(path)
            code = 0
        except CorruptIndexError:
            code = DAMAGED
        except StoreFailedError:
            code = UNEXPLAINED
        except (AssertionError, StorageError):
            traceback.print_exc()
        except Exception:
            code = UNEXPLAINED
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def is_sound(path: Path) -> bool:
    """Return whether the pages of the index fit together."""
    try:
        check_pages(str(path / "index"))
    except CorruptIndexError:
        return False
    return True


@pytest.mark.parametrize(
    "seed", [2003, 2007, 2016, 2018, 2022, 2041, 2043, 2051, 2120, 2768, 3263, 3448]
)
def test_flipped_bits_of_an_index_are_repaired_or_the_index_is_made_again(
    tmp_path: Path, churned: Path, seed: int
) -> None:
    path = tmp_path / "store"
    shutil.copytree(churned, path)
    flip_bits(path / "index" / "data.mdb", seed, 30)
    outcome = outcome_in_child(path)
    crashes = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)
    assert outcome in (0, DAMAGED, UNEXPLAINED, *crashes)
    if outcome:
        if outcome != UNEXPLAINED or not is_sound(path):  # else the next start finds no evidence
            set_aside(path)
        assert outcome_in_child(path) == 0


def test_verify_ends_where_the_keys_of_a_page_go_back(tmp_path: Path) -> None:
    path = tmp_path / "store"
    records = [make_record("a", position) for position in range(60)]
    hashes = sorted(record.block_hash for record in records)
    victim, last = hashes[30], hashes[-1]
    with open_store(path) as store:
        put(store, *records)
    change = payload_of(next(record for record in records if record.block_hash == last))[:64]
    for segment in segment_files(path):
        segment.write_bytes(segment.read_bytes().replace(change, flip(change)))
    index = path / "index" / "data.mdb"
    key = re.compile(re.escape(victim) + b"(?=.{16}%s)" % re.escape(victim), re.DOTALL)
    index.write_bytes(key.sub(bytes(32), index.read_bytes()))  # before its record, not in it
    with open_store(path) as store:
        found = verify(store)
        assert found.by_reason == {"index": 1, "checksum": 1}, "what lies behind it is verified"
        assert verify(store) == Findings(checked=58)
        store.check()
        for record in records:
            wanted = None if record.block_hash in (victim, last) else payload_of(record)
            assert load(store, record) == wanted


@pytest.mark.parametrize("name", ["namespaces", "lru"])
def test_a_full_store_that_lost_what_orders_its_blocks_takes_new_ones_after_a_sweep(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "store"
    with open_store(path) as store:
        for start in range(0, 400, 8):
            put(store, *[make_record("a", start + position) for position in range(8)])
        assert store.stats().num_evicted
    with plain_index(path, name) as (txn, database):
        txn.drop(database, delete=False)
    with open_store(path) as store:
        fresh = [make_record("fresh", position) for position in range(64)]
        for extent in filter(None, store.reserve(fresh)):
            store.give_back(extent)
        sweep(store)
        store.check()
        assert all(put(store, *fresh))


def test_a_sweep_ends_where_an_expired_key_cannot_be_deleted(tmp_path: Path) -> None:
    path, clock = tmp_path / "store", FakeClock()
    records = [make_record("a", position, expires_at=NOW + 10 + position) for position in range(90)]
    with open_store(path, clock) as store:
        put(store, *records)
    index = path / "index" / "data.mdb"
    data = index.read_bytes()
    for record in records:  # the times with which the keys begin are now in the wrong order
        key = struct.pack(">Q", int(record.expires_at * 1e6)) + record.block_hash
        data = data.replace(key, struct.pack(">Q", 90 - record.position) + record.block_hash)
    index.write_bytes(data)
    clock.advance(1000)
    with open_store(path, clock) as store:
        assert sum(1 for _ in itertools.islice(store.sweeping(), 1000)) < 1000
        sweep(store)
        store.check()
        assert store.stats().blocks == 0


def assert_back(mail: Mailbox, records: list[BlockRecord]) -> None:
    """Assert that the tier serves all of these blocks again and stores new ones."""
    wait_until(lambda: all(mail.lookup([record.block_hash for record in records])))
    for done in mail.load(records):
        assert done.ok, done.reason
        mail.assert_right(done)
    assert all(done.ok for done in mail.store(make_chain("after", 8)))


@pytest.mark.parametrize(
    ("name", "key"), [("meta", b"store"), ("namespaces", NAMESPACE), ("expiry", b"\0\0\0")]
)
def test_an_entry_of_a_wrong_length_costs_no_block(harness: Harness, name: str, key: bytes) -> None:
    client, records = harness.open(), make_chain("a", 20)
    Mailbox(client).store(records)
    client.close()
    with plain_index(harness.folder, name) as (txn, database):
        txn.put(key, b"x", db=database)
    mail = Mailbox(harness.open())
    mail.store(make_chain("counted", 1))
    wait_until((harness.folder / "index.bad").exists)
    assert_back(mail, records)


def test_a_database_of_another_kind_is_damage_and_costs_no_block(harness: Harness) -> None:
    client, records = harness.open(), make_chain("a", 20)
    Mailbox(client).store(records)
    client.close()
    index = harness.folder / "index" / "data.mdb"
    key = b"\0\0\2\0\3\0lru"  # flags of a root record, and the length of its key, come first
    data = index.read_bytes()
    assert key + bytes(4) in data
    index.write_bytes(data.replace(key + bytes(4), key + b"\0\0\0\1"))  # the size of its values
    mail = Mailbox(harness.open())
    assert_back(mail, records)
    assert (harness.folder / "index.bad").exists()


@pytest.mark.parametrize("size", few([0, 8192, 4096, 16384], 2))
@pytest.mark.parametrize("is_live", [True, False], ids=["live", "stopped"])
def test_a_truncated_index_costs_no_block(harness: Harness, size: int, is_live: bool) -> None:
    client, records = harness.open(), make_chain("a", 40)
    Mailbox(client).store(records)
    if not is_live:
        client.close()
    os.truncate(harness.folder / "index" / "data.mdb", size)
    mail = Mailbox(client if is_live else harness.open())
    mail.lookup([records[0].block_hash])
    assert_back(mail, records)
    assert StoreControl(harness.folder).answer(Verify())["bad"] == 0


@pytest.mark.parametrize("batch", [4096, 48])
def test_a_lost_index_is_made_again_within_a_budget_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, batch: int
) -> None:
    monkeypatch.setattr(rebuild, "_BATCH_EXTENTS", batch)
    monkeypatch.setattr(rebuild, "_REPORTED_EXTENTS", 4 * batch)
    path, budget = tmp_path / "store", 4 << 20
    records = [make_record(f"{i}", last_used=NOW + i) for i in range(400)]
    with open_store(path, budget_bytes=budget) as store:
        for start in range(0, len(records), 50):
            put(store, *records[start : start + 50])
        before = stored_hashes(store, records)
    set_aside(path)
    peaks: list[int] = []
    clock = FakeClock(NOW + 1000)
    with open_store(
        path, clock, budget_bytes=budget, failpoint=lambda _: peaks.append(occupied_bytes(path))
    ) as store:
        kept = stored_hashes(store, records)
        assert max(peaks) <= budget
        assert len(kept) > 0.8 * len(before)
        if batch > len(records):
            last_used = {record.block_hash for record in records[-len(kept) :]}
            assert kept == last_used, "the longest unused give way"
        assert verify(store).bad == 0
        store.check()
    said = [line for line in caplog.messages if "extents read" in line]
    assert len(said) == (1 if batch > len(records) else 2)


def forget_segments(path: Path) -> None:
    """Lose every entry of `segments`."""
    with plain_index(path, "segments") as (txn, segments):
        txn.drop(segments, delete=False)


def test_segments_that_the_index_forgot_keep_what_is_stored_and_nothing_that_was_dropped(
    tmp_path: Path,
) -> None:
    path, clock = tmp_path / "s", FakeClock()
    kept, evicted = make_chain_at("kept", 6), make_chain_at("evicted", 6)
    expired = make_chain_at("expired", 6, expires_at=NOW + 60)
    claimed = make_chain_at("claimed", 6, expires_at=NOW + 60)
    with open_store(path, clock) as store:
        for records in (kept, evicted, expired, claimed):
            assert all(put(store, *records))
        store.touch([make_later(record) for record in claimed])
        store.drop([record.block_hash for record in evicted], "test")  # not erased yet
    forget_segments(path)
    clock.advance(61)
    with open_store(path, clock) as store:
        store.check()
        assert [load(store, each) for each in kept + claimed] == [
            payload_of(each) for each in kept + claimed
        ], "a stored block is lost"
        assert not stored_hashes(store, evicted + expired)
        assert store.stats().faults["index"] == 1
        for file in segment_files(path):
            text = file.read_bytes()
            assert not any(payload_of(record) in text for record in evicted + expired)
    with open_store(path, clock) as store:
        assert store.stats().faults["index"] == 1, "an index that knows its segments is kept"


def make_chain_at(name: str, length: int, **changes: float) -> list[BlockRecord]:
    """Blocks of a chain, with some fields changed."""
    return [msgspec.structs.replace(make_record(name, i), **changes) for i in range(length)]


def make_later(record: BlockRecord) -> BlockRecord:
    """The same block, with a claim to keep it for a day."""
    return msgspec.structs.replace(record, expires_at=NOW + 86_400)


@pytest.mark.parametrize("life_s", [0, 60])
def test_an_unknown_segment_without_a_stored_block_is_removed(tmp_path: Path, life_s: int) -> None:
    path, clock = tmp_path / "s", FakeClock()
    records = make_chain_at("a", 6, expires_at=NOW + 60)
    with open_store(path, clock) as store:
        assert all(put(store, *records))
    [file] = segment_files(path)
    with plain_index(path, "blocks") as (txn, blocks):
        txn.drop(blocks, delete=False)
    forget_segments(path)
    if not life_s:
        file.write_bytes(bytes(file.stat().st_size))
    clock.advance(life_s)
    with open_store(path, clock) as store:
        assert segment_files(path) == []
        assert not stored_hashes(store, records)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_failed_transaction_removes_the_file_that_it_made_and_no_other(
    tmp_path: Path, is_known: bool
) -> None:
    path, is_failing = tmp_path / "s", False
    old, new = make_chain_at("old", 6), make_record("new", size_bytes=40_960)

    def fail(label: str) -> None:
        if is_failing and label == "segment:grown":
            raise StorageError("injected")

    with open_store(path, failpoint=fail) as store:
        assert all(put(store, *old))
        if not is_known:
            with store.index.writing() as txn:
                txn._txn.drop(txn._dbs["segments"], delete=False)
        files = segment_files(path)
        is_failing = True
        with refused(StorageError):
            put(store, new)
        is_failing = False
        assert segment_files(path) == files
    with open_store(path) as store:
        assert [load(store, each) for each in old] == [payload_of(each) for each in old]
        assert put(store, new) == [True]
        store.check()


def test_whoever_only_looks_does_not_empty_a_store_whose_index_is_lost(tmp_path: Path) -> None:
    path, record = tmp_path / "store", make_record()
    with open_store(path) as store:
        put(store, record)
    os.truncate(path / "index" / "data.mdb", 0)
    lock, text = path / "lock", (path / "lock").read_bytes()
    lock.write_bytes(b"")
    with refused(StorageError):
        open_store(path, budget_bytes=None, create=False)
    lock.write_bytes(text)
    with open_store(path, budget_bytes=None, create=False) as store:
        assert load(store, record) == payload_of(record)


def test_erased_extents_are_no_room_after_the_index_was_made_again(tmp_path: Path) -> None:
    path = tmp_path / "store"
    small = [make_record("small", position) for position in range(60)]
    large = [make_record("large", position, size_bytes=40_960) for position in range(60)]
    occupied = [0]

    def sample(_label: str) -> None:
        occupied.append(occupied_bytes(path))

    with open_store(path, budget_bytes=2 << 20, failpoint=sample) as store:
        put(store, *small)
        store.drop([record.block_hash for record in small[1:]], "test")
        sweep(store)  # turns the deleted blocks into holes
        for record in large:
            put(store, record)
        store.rebuild()
        shutil.rmtree(path / "index.bad")  # else room for it would be made by evictions first
        store.space.measure()
        put(store, *small)
        store.check()
    assert max(occupied) <= 2 << 20


# --- the folder ---------------------------------------------------------------------------------


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A folder on a newly mounted tmpfs."""
    folder = tmp_path / "mnt"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True
    )
    if made.returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], capture_output=True)


def test_an_unmounted_store_is_not_made_anew_below_and_serves_again_when_it_is_back(
    tmp_path: Path, mount: Path
) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    subprocess.run(["mount", "--bind", str(mount), str(other)], check=True)
    harness = Harness(mount / "store")
    harness.offset_file = tmp_path / "offset"
    try:
        client, records = harness.open(), make_chain("a", 8)
        mail = Mailbox(client)
        assert all(done.ok for done in mail.store(records))
        subprocess.run(["umount", "-l", str(mount)], check=True)
        wait_until(lambda: client.pid is None)
        assert {done.reason for done in mail.store(make_chain("lost", 4))} == {"worker_down"}
        assert list(mount.iterdir()) == []
        subprocess.run(["mount", "--bind", str(other), str(mount)], check=True)
        assert_back(mail, records)
    finally:
        harness.close()
        subprocess.run(["umount", "-l", str(other)], capture_output=True)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_store_that_was_moved_away_is_not_made_anew_and_serves_again_when_it_is_back(
    harness: Harness, is_replaced: bool
) -> None:
    client, records = harness.open(), make_chain("a", 8)
    mail = Mailbox(client)
    mail.store(records)
    away = harness.folder.with_name("away")
    harness.folder.rename(away)
    if is_replaced:
        harness.folder.mkdir()
    assert not any(done.ok for done in mail.store(make_chain("lost", 4))), (
        "into a folder moved away"
    )
    wait_until(lambda: client.pid is None)
    if is_replaced:
        harness.folder.rmdir()
    assert not harness.folder.exists()
    away.rename(harness.folder)
    assert_back(mail, records)


def test_the_socket_is_the_owners_whatever_the_umask(harness: Harness) -> None:
    umask = os.umask(0o777)
    try:
        harness.open()
    finally:
        os.umask(umask)
    assert stat.S_IMODE((harness.folder / "sock").stat().st_mode) == 0o600
    assert StoreControl(harness.folder).answer(Df())["disk"]["blocks"] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_segment_file_of_another_user_is_refused(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        put(store, make_record())
    [file] = segment_files(tmp_path / "store")
    os.chown(file, 12345, -1)
    with refused(StorageError):
        open_store(tmp_path / "store")


# --- the budget, and long listings --------------------------------------------------------------


def test_a_store_that_shrinks_is_never_above_the_larger_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, larger, smaller = tmp_path / "store", 12 << 20, 5 << 20
    records = [make_record(f"{i}", size_bytes=1, last_used=NOW + i) for i in range(2000)]
    with open_store(path, budget_bytes=larger) as store:
        for start in range(0, len(records), 50):
            put(store, *records[start : start + 50])
    peaks = [0]
    rename = os.rename

    def renaming(source: str, target: str) -> None:
        peaks.append(occupied_bytes(path))  # the index and its copy both exist now
        rename(source, target)

    monkeypatch.setattr(os, "rename", renaming)
    with open_store(
        path, budget_bytes=smaller, failpoint=lambda _: peaks.append(occupied_bytes(path))
    ) as store:
        assert max(peaks) <= larger
        assert occupied_bytes(path) <= smaller
        kept = stored_hashes(store, records)
        assert kept == {record.block_hash for record in records[-len(kept) :]}
        store.check()
    monkeypatch.undo()
    with open_store(path, budget_bytes=None) as store:
        assert store.stats().bytes_budget == smaller


def test_chains_are_listed_and_evicted_in_steps_as_a_plain_look_at_all_of_them_says(
    tmp_path: Path,
) -> None:
    rnd = random.Random(3)
    records: list[BlockRecord] = []
    for i in range(400):
        parent = rnd.choice(records) if records and rnd.random() < 0.8 else None
        position = parent.position + 1 if parent else 0
        parent_hash = parent.block_hash if parent else digest("root")
        records.append(make_record(f"{i}", position, size_bytes=100, parent_hash=parent_hash))
    by_hash = {record.block_hash: record for record in records}
    parents = {record.parent_hash for record in records}

    def chain_of(leaf: BlockRecord) -> list[BlockRecord]:
        above = by_hash.get(leaf.parent_hash)
        return [leaf, *(chain_of(above) if above else [])]

    expected = {r.block_hash.hex(): chain_of(r) for r in records if r.block_hash not in parents}
    with open_store(tmp_path / "store", budget_bytes=16 << 20) as store:
        put(store, *records)
        found = chains(store)
        assert {chain.id[33:]: (chain.blocks, chain.bytes) for chain in found} == {
            id_[:32]: (len(chain), 100 * len(chain)) for id_, chain in expected.items()
        }
        named = rnd.sample(sorted(expected), 20)
        kept = {r.block_hash for id_, chain in expected.items() if id_ not in named for r in chain}
        which = EvictFilter(ids=tuple(id_[:20] for id_ in named))
        chosen = choose(store, which.ids)
        foreseen = [*chosen.following, *chosen.before]
        assert set(foreseen) == by_hash.keys() - kept
        positions = {block_hash: at for at, block_hash in enumerate(foreseen)}
        for block_hash in foreseen:
            parent_at = positions.get(by_hash[block_hash].parent_hash)
            assert parent_at is None or parent_at > positions[block_hash], "a head before its tail"
        assert evict(store, which).evicted_blocks == len(foreseen)
        assert stored_hashes(store, records) == kept
        assert evict(store, EvictFilter(all=True)).evicted_blocks == len(kept)
        assert chains(store) == []
        store.check()
