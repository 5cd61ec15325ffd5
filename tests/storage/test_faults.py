"""Damaged blocks of a closed store are found, dropped and counted, and no other block is lost."""

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import pytest

from tests.storage.blocks import (
    RETENTIONS,
    CheckedStore,
    change_bytes,
    digest,
    flip,
    load,
    make_record,
    open_store,
    page_with,
    payload_of,
    put,
    reserve,
    segment_files,
    stored_hashes,
    sweep,
    verify,
)
from tieredkv.errors import StorageError
from tieredkv.storage.extents.room import Room
from tieredkv.storage.format.record import (
    HEADER_BYTES,
    Extent,
    Located,
    decode_record,
    encode_record,
)
from tieredkv.storage.index.environment import Index
from tieredkv.storage.index.transaction import TXN_BLOCKS
from tieredkv.storage.store import Outcome
from tieredkv.types import BlockRecord

SMALL = [make_record("small", position) for position in range(6)]
LARGE = [make_record("large", position, size_bytes=20_480) for position in range(6)]
RECORDS = SMALL + LARGE
HASHES = [record.block_hash for record in RECORDS]


class Victim(NamedTuple):
    """A block that the damage hit.

    Attributes:
        on_load: The reason with which a load fails; None if the load is a plain miss, because no
            sound record is left.
        on_verify: The reason that `verify` reports.
    """

    block_hash: bytes
    on_load: str | None
    on_verify: str


class Filled:
    """A closed store with two chains in two segments, and the places of its blocks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_store(path) as store:
            for records in (SMALL[:1], SMALL[1:], LARGE):  # two steps leave some extents unused
                assert all(put(store, *records))
            self.located = {key: self._must(store.locate(key)) for key in HASHES}
        assert len(segment_files(path)) == 2

    @staticmethod
    def _must(located: Located | None) -> Located:
        assert located is not None
        return located

    def file_of(self, block_hash: bytes) -> Path:
        located = self.located[block_hash]
        name = f"{located.extent.segment:08d}-{located.extent_bytes}.seg"
        return self.path / "segments" / name

    def offset_of(self, block_hash: bytes) -> int:
        located = self.located[block_hash]
        return located.extent.number * located.extent_bytes

    def in_file_of(self, block_hash: bytes) -> list[bytes]:
        return [key for key in HASHES if self.file_of(key) == self.file_of(block_hash)]

    def entry(self, block_hash: bytes) -> bytes:
        """Return the record of a block in the index, read with plain LMDB."""
        with plain_index(self.path, "blocks") as (txn, blocks):
            return bytes(txn.get(block_hash, db=blocks) or b"")

    def put_entry(self, block_hash: bytes, data: bytes) -> None:
        with plain_index(self.path, "blocks") as (txn, blocks):
            txn.put(block_hash, data, db=blocks)

    def rewrite(self, block_hash: bytes, **changes: Any) -> None:
        """Change a record and seal it again, so that its checksum is right."""
        located = decode_record(block_hash, self.entry(block_hash), RETENTIONS)
        self.put_entry(block_hash, encode_record(located._replace(**changes), RETENTIONS))


@contextmanager
def plain_index(path: Path, name: str) -> Iterator[tuple[lmdb.Transaction, Any]]:
    with lmdb.open(str(path / "index"), max_dbs=9, map_size=64 << 30) as env:
        database = env.open_db(name.encode(), create=False)
        with env.begin(write=True) as txn:
            yield txn, database


# --- the damage -------------------------------------------------------------------------------

FIRST, OTHER = SMALL[1].block_hash, SMALL[4].block_hash


def first_bit_of_a_payload(store: Filled) -> list[Victim]:
    change_bytes(store.file_of(FIRST), store.offset_of(FIRST) + HEADER_BYTES, flip)
    return [Victim(FIRST, "checksum", "checksum")]


def last_bit_of_a_payload(store: Filled) -> list[Victim]:
    size = store.located[FIRST].payload_bytes
    change_bytes(store.file_of(FIRST), store.offset_of(FIRST) + HEADER_BYTES + size - 1, flip)
    return [Victim(FIRST, "checksum", "checksum")]


def a_bit_of_a_extent_header(store: Filled) -> list[Victim]:
    change_bytes(store.file_of(FIRST), store.offset_of(FIRST) + 100, flip)
    return [Victim(FIRST, "header", "header")]


def a_zeroed_extent(store: Filled) -> list[Victim]:
    size = store.located[FIRST].extent_bytes
    change_bytes(store.file_of(FIRST), store.offset_of(FIRST), lambda old: bytes(len(old)), size)
    return [Victim(FIRST, "header", "header")]


def a_bit_of_an_index_record(store: Filled) -> list[Victim]:
    data = store.entry(FIRST)
    store.put_entry(FIRST, data[:40] + flip(data[40:41]) + data[41:])
    return [Victim(FIRST, None, "record")]


def an_index_record_cut_off(store: Filled) -> list[Victim]:
    store.put_entry(FIRST, store.entry(FIRST)[:50])
    return [Victim(FIRST, None, "record")]


def an_empty_index_record(store: Filled) -> list[Victim]:
    store.put_entry(FIRST, b"")
    return [Victim(FIRST, None, "record")]


def a_record_copied_over_another(store: Filled) -> list[Victim]:
    store.put_entry(OTHER, store.entry(FIRST))
    return [Victim(OTHER, None, "record")]


def a_record_copied_under_a_new_key(store: Filled) -> list[Victim]:
    store.put_entry(digest("new"), store.entry(FIRST))
    return [Victim(digest("new"), None, "record")]


def a_truncated_segment(store: Filled) -> list[Victim]:
    cut = store.offset_of(OTHER) + HEADER_BYTES + 4096
    os.truncate(store.file_of(OTHER), cut)
    lost = [key for key in store.in_file_of(OTHER) if store.offset_of(key) > cut]
    return [Victim(key, "truncated", "truncated") for key in [OTHER, *lost]]


def an_emptied_segment(store: Filled) -> list[Victim]:
    os.truncate(store.file_of(FIRST), 0)
    return [Victim(key, "truncated", "truncated") for key in store.in_file_of(FIRST)]


def a_missing_segment(store: Filled) -> list[Victim]:
    store.file_of(FIRST).unlink()
    return [Victim(k, "missing_segment", "missing_segment") for k in store.in_file_of(FIRST)]


def all_segments_missing(store: Filled) -> list[Victim]:
    for file in segment_files(store.path):
        file.unlink()
    return [Victim(key, "missing_segment", "missing_segment") for key in HASHES]


def two_payloads_swapped(store: Filled) -> list[Victim]:
    _swap(store, HEADER_BYTES)
    return [Victim(key, "checksum", "checksum") for key in (FIRST, OTHER)]


def two_extents_swapped(store: Filled) -> list[Victim]:
    _swap(store, 0)
    return [Victim(key, "header", "header") for key in (FIRST, OTHER)]


def _swap(store: Filled, skip: int) -> None:
    size = store.located[FIRST].extent_bytes - skip
    file, places = store.file_of(FIRST), [store.offset_of(key) + skip for key in (FIRST, OTHER)]
    data = file.read_bytes()
    with file.open("r+b") as target:
        for at, source in zip(places, reversed(places), strict=True):
            target.seek(at)
            target.write(data[source : source + size])


def an_entry_in_an_unknown_segment(store: Filled) -> list[Victim]:
    store.rewrite(FIRST, extent=Extent(999, 0))
    return [Victim(FIRST, "missing_segment", "missing_segment")]


def an_entry_past_the_end_of_its_segment(store: Filled) -> list[Victim]:
    segment = store.located[FIRST].extent.segment
    store.rewrite(FIRST, extent=Extent(segment, 4_000_000_000))
    return [Victim(FIRST, "truncated", "truncated")]


def an_entry_in_a_extent_never_used(store: Filled) -> list[Victim]:
    unused = Extent(store.located[FIRST].extent.segment, len(SMALL))
    store.rewrite(FIRST, extent=unused)
    return [Victim(FIRST, "header", "header")]


def an_entry_that_claims_the_extent_of_another(store: Filled) -> list[Victim]:
    store.rewrite(FIRST, extent=store.located[OTHER].extent)
    return [Victim(FIRST, "header", "header")]


def an_entry_in_a_segment_of_another_extent_size(store: Filled) -> list[Victim]:
    segment = store.located[LARGE[0].block_hash].extent.segment
    store.rewrite(FIRST, extent=Extent(segment, 2))
    return [Victim(FIRST, "header", "header")]


def an_unknown_codec(store: Filled) -> list[Victim]:
    store.rewrite(FIRST, codec=7)
    return [Victim(FIRST, "codec", "codec")]


def an_older_copy_of_a_segment(store: Filled) -> list[Victim]:
    """The copied extents have been used again: their blocks are sound, but not the index's."""
    file, copy = store.file_of(FIRST), store.path.parent / "copy"
    with open_store(store.path) as opened:  # the deletion frees the two extents for `again`
        opened.drop([FIRST, OTHER], "request")
        shutil.copyfile(file, copy)
        again = [make_record("small", position, now=1_800_000_001.0) for position in (1, 4)]
        assert all(put(opened, *again))
        for record in again:
            assert load(opened, record) == payload_of(record)
    shutil.copyfile(copy, file)
    return [Victim(key, "header", "header") for key in (FIRST, OTHER)]


DAMAGE = [
    first_bit_of_a_payload,
    last_bit_of_a_payload,
    a_bit_of_a_extent_header,
    a_zeroed_extent,
    a_bit_of_an_index_record,
    an_index_record_cut_off,
    an_empty_index_record,
    a_record_copied_over_another,
    a_record_copied_under_a_new_key,
    a_truncated_segment,
    an_emptied_segment,
    a_missing_segment,
    all_segments_missing,
    two_payloads_swapped,
    two_extents_swapped,
    an_entry_in_an_unknown_segment,
    an_entry_past_the_end_of_its_segment,
    an_entry_in_a_extent_never_used,
    an_entry_that_claims_the_extent_of_another,
    an_entry_in_a_segment_of_another_extent_size,
    an_unknown_codec,
    an_older_copy_of_a_segment,
]
damages = pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
Damage = Callable[[Filled], list[Victim]]


def record_of(block_hash: bytes) -> BlockRecord:
    known = {record.block_hash: record for record in RECORDS}
    return known.get(block_hash) or make_record("new", block_hash=block_hash)


def survivors(victims: list[Victim]) -> list[BlockRecord]:
    hit = {victim.block_hash for victim in victims}
    return [record for record in RECORDS if record.block_hash not in hit]


# --- what the store makes of it ---------------------------------------------------------------


@damages
def test_a_load_finds_the_damage_drops_the_block_and_counts_it(
    tmp_path: Path, damage: Damage
) -> None:
    filled = Filled(tmp_path / "store")
    victims = damage(filled)
    with open_store(filled.path) as store:
        for block_hash, on_load, _ in victims:
            assert load(store, record_of(block_hash)) == on_load
        for block_hash, _, _ in victims:
            assert load(store, record_of(block_hash)) is None, "it is still there"
        assert store.stats().faults == Counter(victim.on_load or "record" for victim in victims)
        sweep(store)
        store.check()
        for record in survivors(victims):
            assert load(store, record) == payload_of(record), "an undamaged block is lost"
        assert store.stats().blocks == len(RECORDS) - sum(v.block_hash in HASHES for v in victims)


def test_a_damaged_record_is_a_miss_counted_once_and_gone_with_the_next_sweep(
    tmp_path: Path,
) -> None:
    filled = Filled(tmp_path / "store")
    a_bit_of_an_index_record(filled)
    with open_store(filled.path) as store:
        for _ in range(3):
            assert store.find(HASHES).keys() == set(HASHES) - {FIRST}
        assert store.stats().blocks == len(HASHES), "a lookup has changed something"
        assert store.stats().faults == {"record": 1}
        sweep(store)
        assert store.stats().blocks == len(HASHES) - 1
        assert store.stats().faults == {"record": 1, "index": 1}
        store.check()


@damages
def test_damaged_blocks_are_stored_again_and_the_store_stays_sound(
    tmp_path: Path, damage: Damage
) -> None:
    filled = Filled(tmp_path / "store")
    victims = damage(filled)
    with open_store(filled.path) as store:
        for victim in victims:
            load(store, record_of(victim.block_hash))
        for round_ in range(2):  # into dirty extents, then into erased ones
            fresh = [make_record(f"fresh {round_}", position) for position in range(4)]
            assert all(put(store, *fresh, *RECORDS))
            for record in [*fresh, *RECORDS]:
                assert load(store, record) == payload_of(record)
            store.drop([record.block_hash for record in fresh], "request")
            sweep(store)
            store.check()
    with open_store(filled.path) as store:
        for record in RECORDS:
            assert load(store, record) == payload_of(record)
        assert not verify(store).by_reason, "a load has left damage for later"


@damages
def test_verify_finds_and_repairs_the_damage_once(tmp_path: Path, damage: Damage) -> None:
    filled = Filled(tmp_path / "store")
    victims = damage(filled)
    expected = Counter(victim.on_verify for victim in victims)
    with open_store(filled.path) as store:
        found = verify(store, repair=False)
        assert Counter(found.by_reason) - Counter(index=1) == expected
        assert found.repaired == 0
        assert verify(store, repair=False) == found, "looking has changed it"
        repaired = verify(store)
        assert Counter(repaired.by_reason) - Counter(index=1) == expected
        assert repaired.repaired == repaired.bad
        store.check()
        again = verify(store)
        assert (again.bad, again.by_reason) == (0, {})
        assert again.checked == len(survivors(victims))
        sweep(store)
        store.check()
        for record in survivors(victims):
            assert load(store, record) == payload_of(record), "an undamaged block is lost"
    with open_store(filled.path) as store:
        assert verify(store).bad == 0


@pytest.mark.parametrize("name", ["expiry", "lru", "namespaces", "segments", "free", "pending"])
def test_verify_makes_lost_keys_and_counters_again(tmp_path: Path, name: str) -> None:
    filled = Filled(tmp_path / "store")
    with open_store(filled.path) as store:  # the deletion leaves a free extent
        store.drop([FIRST], "request")
        sweep(store)
    with plain_index(filled.path, name) as (txn, database):
        txn.drop(database, delete=False)
    with open_store(filled.path) as store:
        verify(store)
        store.check()
        assert verify(store).bad == 0
        for record in RECORDS:
            is_there = record.block_hash != FIRST
            assert load(store, record) == (payload_of(record) if is_there else None)


EIO_FILE, ENOSPC_FILE = "/proc/self/mem", "/dev/full"  # reads or writes at address 0 fail so


@contextmanager
def failing_files(path: Path, cause: str = EIO_FILE) -> Iterator[None]:
    """Make the system calls on the open segment files fail while the context lasts."""
    descriptors = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor by which this folder was listed
            if link.readlink().parent == path / "segments":
                descriptors.append(int(link.name))
    segments = {fd: os.dup(fd) for fd in descriptors}
    assert segments
    broken = os.open(cause, os.O_RDWR)
    for fd in segments:
        os.dup2(broken, fd, inheritable=False)
    os.close(broken)
    try:
        yield
    finally:
        for fd, kept in segments.items():
            os.dup2(kept, fd, inheritable=False)
            os.close(kept)


def test_a_disk_that_cannot_be_read_for_a_moment_costs_a_miss_and_no_block(tmp_path: Path) -> None:
    path = Filled(tmp_path / "store").path
    with open_store(path) as store:
        with failing_files(path):
            assert [load(store, record) for record in SMALL] == ["io_error"] * len(SMALL)
            result = verify(store)
            assert (result.by_reason, result.repaired) == ({"io_error": len(RECORDS)}, 0)
        assert store.stats().faults == {"io_error": len(SMALL)}
        for record in RECORDS:
            assert load(store, record) == payload_of(record)
        store.check()
        assert verify(store).bad == 0


def extent_of(store: CheckedStore, record: BlockRecord) -> Extent:
    located = store.locate(record.block_hash)
    assert located is not None
    return located.extent


def put_into(store: CheckedStore, extent: Extent, name: str) -> BlockRecord | None:
    """Store 20 blocks and delete those outside this extent; return the block in it, if any."""
    tried = [make_record(f"{name} {i}") for i in range(20)]
    found = None
    for record in tried:
        assert put(store, record) == [True]
        if extent_of(store, record) == extent:
            found = record
    unwanted = [record.block_hash for record in tried if record is not found]
    store.drop(unwanted, "request")
    return found


def test_a_block_that_cannot_be_read_is_written_anew_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        put(store, *SMALL)
        victim, others = SMALL[0], SMALL[1:]
        bad = extent_of(store, victim)
        for num_retired in (0, 1):
            assert all(map(store.holds, [victim, *others]))
            with failing_files(path):
                assert load(store, victim) == "io_error"
            assert not store.holds(victim) and all(map(store.holds, others))
            assert put(store, victim) == [True]  # the same block, computed at the same time
            assert load(store, victim) == payload_of(victim)
            assert extent_of(store, victim) != bad
            assert put_into(store, bad, "too early") is None, "a bad extent was lent before a sweep"
            sweep(store)
            store.check()
            assert store.stats().num_extents_retired == num_retired
            again = put_into(store, bad, f"after {num_retired}")
            if num_retired:
                assert again is None, "an extent that failed twice was lent again"
            else:
                assert again is not None, "an extent that failed once was never tried again"
                victim = again
        assert store.stats().faults == {"io_error": 2}
        assert [load(store, record) for record in SMALL] == [payload_of(r) for r in SMALL]
        store.check()
        sweep(store)
        store.check()
    with open_store(path) as store:  # a new start forgets bad extents: the disk may be new
        store.check()
        assert verify(store).bad == 0


@pytest.mark.parametrize(
    ("cause", "reason"), [(EIO_FILE, "io_error"), (ENOSPC_FILE, "no_space")], ids=str
)
def test_a_failed_write_is_counted_by_its_reason(tmp_path: Path, cause: str, reason: str) -> None:
    path, new = tmp_path / "s", make_record("new")
    with open_store(path) as store:
        put(store, *SMALL)
        sweep(store)
        (extent,) = store.reserve([new])
        assert extent is not None
        with failing_files(path, cause), pytest.raises(StorageError) as error:
            store.write(extent._replace(number=0), new, page_with(payload_of(new)))
        store.give_back(extent, error.value)
        assert store.stats().faults == {reason: 1}
        assert store.lookup([new.block_hash]) == [None]
        store.check()
        assert put(store, new) == [True]
        assert load(store, new) == payload_of(new)
        assert (extent_of(store, new) == extent) == (reason == "no_space")
        assert [load(store, record) for record in SMALL] == [payload_of(r) for r in SMALL]


def test_a_segment_that_is_lost_is_dropped_block_by_block(tmp_path: Path) -> None:
    filled = Filled(tmp_path / "store")
    with open_store(filled.path) as store:
        store.drop([OTHER], "request")
        sweep(store)
    filled.file_of(FIRST).unlink()
    with open_store(filled.path) as store:
        store.check()  # the free extent was lost with its file
        assert load(store, SMALL[1]) == "missing_segment"
        sweep(store)
        store.check()
        assert put(store, *SMALL[:2]) == [True, True]
        assert load(store, SMALL[1]) == payload_of(SMALL[1])
        assert load(store, SMALL[2]) == "missing_segment"
        verify(store)
        sweep(store)
        store.check()
        assert verify(store).bad == 0
    with open_store(filled.path) as store:
        assert load(store, SMALL[1]) == payload_of(SMALL[1])
        assert len(segment_files(filled.path)) == 2


# --- a segment file that is removed while the store runs ------------------------------------------


@pytest.mark.parametrize("change", ["none", "delete", "sweep"])
@pytest.mark.parametrize("size_bytes", [8192, 300_000])
def test_a_segment_that_was_removed_costs_its_blocks_and_no_store(
    tmp_path: Path, change: str, size_bytes: int
) -> None:
    """There may be extents that were never used, erased ones, and ones that wait to be erased."""
    old = [make_record("old", each, size_bytes=size_bytes) for each in range(8)]
    new = [make_record("new", each, size_bytes=size_bytes) for each in range(24)]
    with open_store(tmp_path / "s", budget_bytes=16 << 20) as store:
        put(store, *old)
        if change != "none":
            store.drop([each.block_hash for each in old[:4]], "test")
        if change == "sweep":
            sweep(store)
        (segment,) = segment_files(tmp_path / "s")
        segment.unlink()
        for start in range(0, len(new), 3):
            assert put(store, *new[start : start + 3]) == [True] * 3
        store.check()
        sweep(store)
        assert [load(store, each) for each in new] == [payload_of(each) for each in new]
        assert all(load(store, each) in (None, "missing_segment") for each in old)
        sweep(store)
        assert store.stats().blocks == len(new)
        assert store.stats().bytes_pending == 0
        assert store.stats().faults.get("io_error", 0) == 0
        store.check()
    with open_store(tmp_path / "s", budget_bytes=16 << 20) as store:
        assert [load(store, each) for each in new] == [payload_of(each) for each in new]
        store.check()


@pytest.mark.parametrize("damage", ["removed", "cannot be flushed"])
def test_blocks_of_one_file_fail_alone_while_others_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    small = [make_record("small", each) for each in range(3)]
    large = [make_record("large", each, size_bytes=50_000) for each in range(2)]
    group = [small[0], large[0], small[1], large[1], small[2]]
    with open_store(tmp_path / "s", sync="commit") as store:
        lent = [extent for extent in store.reserve(group) if extent is not None]
        pages = [page_with(payload_of(each)) for each in group]
        written = list(map(store.write, lent, group, pages))
        [file] = (tmp_path / "s" / "segments").glob(f"{lent[1].segment:08d}-*.seg")
        number, flush = file.stat().st_ino, os.fdatasync
        if damage == "removed":
            file.unlink()
        else:
            monkeypatch.setattr(os, "fdatasync", lambda fd: flush_unless(fd, number, flush))
        outcomes = store.commit(written)
        monkeypatch.undo()
        assert [each.is_stored for each in outcomes] == [True, False, True, False, True]
        codes = [each.error and each.error.errno for each in outcomes]
        code = errno.ENOENT if damage == "removed" else errno.EIO
        assert codes == [None, code, None, code, None]
        assert store.stats().faults == {"io_error": 1}
        assert stored_hashes(store, group) == {each.block_hash for each in small}
        store.check()
        assert put(store, *large) == [True] * 2
        sweep(store)
        assert store.stats().bytes_pending == 0
        store.check()


def flush_unless(fd: int, inode: int, flush: Callable[[int], None]) -> None:
    if os.fstat(fd).st_ino == inode:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    flush(fd)


@pytest.mark.parametrize("sync", ["commit", "none"])
def test_nothing_is_lent_from_a_new_file_before_the_index_that_knows_it_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str
) -> None:
    flushed = list[bool]()

    def fail(index: Index) -> None:
        flushed.append(False)
        raise StorageError(errno.EIO, os.strerror(errno.EIO))

    with open_store(tmp_path / "s", sync=sync) as store:
        put(store, *SMALL)
        monkeypatch.setattr(Index, "flush", fail)
        put(store, make_record("other", 0))  # in the file that is there
        assert flushed == []
        if sync == "commit":
            for _ in range(2):
                with pytest.raises(StorageError) as raised:
                    store.reserve(LARGE)
                assert raised.value.errno == errno.EIO
                store.check()
            assert flushed == [False] * 2
        monkeypatch.undo()
        assert put(store, *LARGE) == [True] * len(LARGE)
        assert [load(store, each) for each in RECORDS] == list(map(payload_of, RECORDS))
        store.check()


def test_a_batch_that_cannot_be_committed_fails_without_the_others(tmp_path: Path) -> None:
    """More blocks than one transaction changes were written."""

    def fail_at_the_first(label: str) -> None:
        met.append(label)
        if met.count("commit:before") == 1 and label == "commit:before":
            raise OSError(errno.EIO, "the index cannot be written")

    met: list[str] = []
    records = [make_record("a", each, size_bytes=1024) for each in range(TXN_BLOCKS + 3)]
    with open_store(tmp_path / "s", failpoint=fail_at_the_first) as store:
        lent = [extent for extent in store.reserve(records) if extent is not None]
        pages = [page_with(payload_of(each)) for each in records]
        outcomes = store.commit(list(map(store.write, lent, records, pages)))
        assert [each.is_stored for each in outcomes] == [False] * TXN_BLOCKS + [True] * 3
        assert stored_hashes(store, records) == {each.block_hash for each in records[-3:]}
        store.check()


def test_blocks_are_stored_though_room_for_the_next_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_room: Room) -> None:
        raise StorageError(errno.EIO, "an extent cannot be listed as free")

    record = make_record()
    with open_store(tmp_path / "s") as store:
        extent = reserve(store, record)
        assert extent is not None
        written = store.write(extent, record, page_with(payload_of(record)))
        monkeypatch.setattr(Room, "enforce_budget", fail)
        assert store.commit([written]) == [Outcome(is_stored=True)]
        monkeypatch.undo()
        assert store.stats().faults == {"io_error": 1}
        assert load(store, record) == payload_of(record)
        store.check()


def test_a_store_at_its_budget_goes_on_when_all_its_segments_are_removed(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", budget_bytes=2 << 20) as store:
        number = 0
        while not store.stats().num_evicted:
            put(store, make_record(f"old{number}"))
            number += 1
        for segment in segment_files(tmp_path / "s"):
            segment.unlink()
        later = store.clock.now() + 1
        new = [make_record(f"new{each}", last_used=later) for each in range(20)]
        assert [put(store, each) for each in new] == [[True]] * 20
        assert [load(store, each) for each in new] == [payload_of(each) for each in new]
        store.check()
