"""A hostile hand on the volume of an encrypted store: it gains misses, and no start breaks."""

import math
import os
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from tests.fakes import FakeClock
from tests.golden import refused
from tests.storage.blocks import (
    RETENTIONS,
    CheckedStore,
    change_bytes,
    evict,
    load,
    payload_of,
    put,
    segment_files,
    sweep,
)
from tests.storage.test_store_keys import DAY_S, Place
from tieredkv.errors import CorruptIndexError, MissingKeyError, StorageError
from tieredkv.operate.calls import Df, EvictFilter
from tieredkv.own_files import remove
from tieredkv.pieces import whole
from tieredkv.storage.folder.folder import INDEX, make_folder
from tieredkv.storage.folder.marker import MARKER
from tieredkv.storage.format.header import decode_encryption, encode_header_into
from tieredkv.storage.format.record import Extent, Located, encode_record, scope_of
from tieredkv.storage.index.entries import META_KEY, encode
from tieredkv.storage.keys.layout import HEADERS_AT, PAGE_BYTES
from tieredkv.storage.keys.place import NOTE
from tieredkv.storage.messages.operator import Scan, Verify
from tieredkv.storage.worker.operators import Operators
from tieredkv.storage.worker.socket import Caller
from tieredkv.storage.worker.steps import checking_extents
from tieredkv.types import BlockRecord

LAST_PAGE_AT = 136  # in a meta page of LMDB


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# --- forged records -------------------------------------------------------------------------------


def forge_entry(store: CheckedStore, found: Located) -> None:
    """Put a record with a right seal into the index."""
    sealed = encode_record(found, RETENTIONS)
    with store.index.writing() as txn:
        txn._txn.put(found.record.block_hash, sealed, db=txn._blocks)


def forge_header(store: CheckedStore, found: Located) -> None:
    """Put a record with a right seal into the header of its extent; the index is to be lost."""
    [file] = segment_files(Path(store.path))
    at, size = found.extent.number * found.extent_bytes, found.extent_bytes
    image = bytearray(file.read_bytes()[at : at + size])
    encode_header_into(image, found, RETENTIONS, decode_encryption(bytes(image)))
    change_bytes(file, at, lambda _: bytes(image[:size]), size)


@pytest.mark.parametrize("time", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("field", ["expires_at", "computed_at", "last_used", "pinned_until"])
@pytest.mark.parametrize("forge", [forge_entry, forge_header])
def test_a_forged_record_whose_time_is_no_time_costs_its_block_only(
    place: Place, forge: Callable[[CheckedStore, Located], None], field: str, time: float
) -> None:
    forged, other = place.record("a"), place.record("b")
    changes: dict[str, Any] = {field: time}
    with place.open() as store:
        put(store, forged, other)
        found = store.locate(forged.block_hash)
        assert found is not None
        forge(store, found._replace(record=replace(found.record, **changes)))
    if forge is forge_header:
        remove(str(place.folder / INDEX))
    with place.open() as store:
        assert load(store, forged) is None
        assert load(store, other) == payload_of(other)
        sweep(store)
        assert put(store, forged) == [True]
        assert load(store, forged) == payload_of(forged)
        assert load(store, other) == payload_of(other)
        store.check()
        place.clock.advance(2 * DAY_S)
        sweep(store)
        assert store.stats().blocks == 0
        assert len(store.keys.table if store.keys else [0]) == 0


@pytest.mark.parametrize("time", [sys.float_info.max, -sys.float_info.max])
@pytest.mark.parametrize("field", ["expires_at", "last_used", "pinned_until"])
def test_a_forged_record_of_another_age_of_the_world_is_touched_and_goes_in_time(
    place: Place, field: str, time: float
) -> None:
    record = place.record("a")
    with place.open() as store:
        put(store, record)
        found = store.locate(record.block_hash)
        assert found is not None
        changes: dict[str, Any] = {field: time}
        forge_entry(store, found._replace(record=replace(found.record, **changes)))
        is_over = (field, time < 0) == ("expires_at", True)
        assert load(store, record) == (None if is_over else payload_of(record))
        store.touch([record])
        evict(store, EvictFilter(namespace_prefix=record.namespace.hex()))
        assert load(store, record) is None
        store.rebuild()
        store.check()


# --- in the places of files ----------------------------------------------------------------------


def deep_folder(path: Path) -> None:
    """Make folders in each other, deeper than a function can call itself."""
    path.mkdir()
    fd = os.open(path, os.O_RDONLY)
    for _ in range(sys.getrecursionlimit() + 100):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)


def folder_with_a_link(path: Path) -> None:
    (path / "a" / "b").mkdir(parents=True)
    (path / "a" / "b" / "link").symlink_to(path.parents[1])


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("format.json.tmp", folder_with_a_link),
        ("index.bad", folder_with_a_link),
        ("index.new", deep_folder),
        ("index.open/x", folder_with_a_link),
        ("trial", folder_with_a_link),
        ("trial.renamed", deep_folder),
        ("other", deep_folder),
    ],
)
def test_a_folder_in_the_place_of_a_draft_does_not_keep_a_store_from_starting(
    place: Place, name: str, make: Callable[[Path], None]
) -> None:
    record = place.stores()
    make(place.folder / name)
    with place.open(budget_bytes=64 << 20) as store:
        assert load(store, record) == payload_of(record)
        store.rebuild()
        assert load(store, record) == payload_of(record)
        store.check()
    left = [each for each in ("a", "d") if (place.folder / name / each).exists()]
    assert bool(left) == (name == "other")
    assert len(place.files()) == 2
    remove(str(place.folder))  # which the test's own clearing could not


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("format.json.tmp", folder_with_a_link),
        ("index.bad", deep_folder),
        ("index/data", folder_with_a_link),
        ("segments/00000009-8192.seg", folder_with_a_link),
    ],
)
def test_evicting_all_removes_what_lies_in_the_places_of_its_files(
    place: Place, name: str, make: Callable[[Path], None]
) -> None:
    place.stores()
    place.table.unlink()
    make(place.folder / name)
    assert place.control().answer(EvictFilter(all=True))["disk"]["kept_why"]
    assert not (place.folder / name).exists()
    assert (place.folder.parent / "keys").is_dir()
    place.stores()


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *("4294967295-8192.seg", "99999999999-8192.seg", "9" * 100 + "-8192.seg"),
        *("9-8192.seg", "\u0663\u0663-8192.seg", "000000009-8192.seg"),
        *("00000009-0.seg", "00000009-4294967296.seg", f"00000009-{4096 * 10**40}.seg"),
    ],
)
def test_a_name_that_no_segment_has_is_refused_and_said(
    place: Place, name: str, is_lost: bool
) -> None:
    record = place.stores()
    stranger = place.folder / "segments" / name
    stranger.write_bytes(bytes(8192))
    stranger.chmod(0o600)
    if is_lost:
        remove(str(place.folder / INDEX))
    with refused(StorageError) as told:
        place.open()
    assert str(stranger) in str(told.value)
    stranger.unlink()
    with place.open() as store:
        assert load(store, record) == payload_of(record)


def forge_value(store: CheckedStore, name: str, key: bytes, value: object) -> None:
    """Put an entry into a database of the index."""
    with store.index.writing() as txn:
        txn._txn.put(key, encode(value), db=txn._dbs[name])


def lifetimes(
    *, num_bytes: int = 1, byte_s: float = 1.0, ages: dict[int, int] | None = None
) -> list[Any]:
    """Return what the index could say of the blocks that were written and evicted in this span."""
    now = FakeClock().now()
    written = {"24h": [num_bytes, byte_s, byte_s]}
    gone = {"24h": [[ages or {}], 0]}
    return [[now - 3000, int(now // 3600), written, {}], [now - 3000, int(now // 86_400), gone, {}]]


@pytest.mark.parametrize(
    "told",
    [
        *({"next_segment": number} for number in (-1, 0, 1 << 32, (1 << 64) - 1)),
        *({"totals": totals} for totals in ([-1, 0], [0, (1 << 64) - 1])),
        *({name: (1 << 64) - 1} for name in ("bytes_written", "num_encrypted")),
        *({"faults": faults} for faults in ({"\x1b[31m": 1}, {"io_error": -1})),
        {"lifetimes": lifetimes(num_bytes=0)},
        *({"lifetimes": lifetimes(byte_s=number)} for number in (math.nan, math.inf, 1e300)),
        *({"lifetimes": lifetimes(ages=ages)} for ages in ({9: 1 << 63}, {1 << 20: 1})),
    ],
)
def test_an_index_that_tells_impossible_figures_is_damaged(
    place: Place, told: dict[str, object]
) -> None:
    place.stores()
    with place.open() as store:
        with store.index.reading() as txn:
            meta = msgspec.to_builtins(txn.meta)
        forge_value(store, "meta", META_KEY, meta | told)
        with pytest.raises(CorruptIndexError):
            store.stats()
        forge_value(store, "meta", META_KEY, meta | {"lifetimes": lifetimes()})
        assert store.stats().lifetimes.num_evicted == {"24h": 0}


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("segments", b"\0", [12_288, 1, 1]),
        ("segments", bytes(8), [12_288, 1, 1]),
        ("segments", bytes(4), [1 << 32, 1, 1]),
        ("segments", bytes(4), [12_288, 1 << 32, 1]),
        ("segments", bytes(4), [12_288, 1, 2]),
        ("keys", bytes(36), (1 << 64) - 1),
        ("namespaces", bytes(32), [0, (1 << 64) - 1]),
    ],
)
def test_an_index_with_an_impossible_entry_is_damaged(
    place: Place, name: str, key: bytes, value: object
) -> None:
    place.stores()
    with place.open() as store:
        forge_value(store, name, key, value)
        with pytest.raises(CorruptIndexError), store.index.reading() as txn:
            assert txn.contradictions()


@pytest.mark.parametrize("name", ["blocks", "expiry", "segments"])
def test_an_index_that_has_lost_a_database_is_damaged_for_a_start_and_for_a_look(
    place: Place, name: str
) -> None:
    place.stores()
    with place.open() as store, store.index.writing() as txn:
        txn._txn.drop(txn._dbs[name])
    needs = place.control().answer(Df())["needs"]
    assert [need["code"] for need in needs if need["code"] != "clock"] == ["index_damaged"]
    with pytest.raises(CorruptIndexError):
        place.open()


@pytest.mark.parametrize("size_bytes", [None, 0, 1 << 43])
def test_a_forged_segment_of_billions_of_extents_costs_no_time(
    place: Place, size_bytes: int | None
) -> None:
    record, most = place.stores(), (1 << 32) - 1
    with place.open() as store:
        forge_value(store, "segments", bytes([0, 0, 0, 9]), [1 << 20, most, most])
    if size_bytes is not None:
        file = place.folder / "segments" / f"00000009-{1 << 20}.seg"
        file.touch(0o600)
        os.truncate(file, size_bytes)
    with place.open() as store:
        if size_bytes != 1 << 43:
            with store.index.reading() as txn:
                assert len([*store.parts.allocator.from_ends(txn)]) == 1
            asked = Verify(erased_key="00" * 8)
            assert whole(checking_extents(store, asked)).checked == 1
        store.rebuild()
        assert load(store, record) == payload_of(record)
        store.check()


def test_a_record_of_an_extent_that_no_file_can_have_is_a_miss(place: Place) -> None:
    record, largest = place.stores(), (1 << 32) - 4096
    with place.open() as store:
        forge_value(store, "segments", bytes([0, 0, 0, 9]), [largest, 9, 9])
        found = store.locate(record.block_hash)
        assert found is not None
        forge_entry(store, found._replace(extent=Extent(9, (1 << 32) - 1)))
    file = place.folder / "segments" / f"00000009-{largest}.seg"
    file.touch(0o600)
    with place.open() as store:
        assert load(store, record) == "truncated"


@pytest.mark.parametrize("last_page", [1 << 26, 1 << 40, 1 << 60])
def test_an_index_that_claims_more_pages_than_any_has_is_damaged(
    place: Place, last_page: int
) -> None:
    place.stores()
    data = place.folder / INDEX / "data.mdb"
    os.truncate(data, 1 << 43)
    for page in (0, 4096):
        change_bytes(data, page + LAST_PAGE_AT, lambda _: struct.pack("<Q", last_page), 8)
    with pytest.raises(CorruptIndexError):
        place.open()


PAGE_HEADER, NODE = struct.Struct("<QHHHH"), struct.Struct("<HHHH")  # of LMDB
TREE = struct.Struct(
    "<IHHQQQQQ"
)  # page size, flags, depth; branches, leaves, others, entries; root


def make_endless(data_file: Path, name: str) -> None:
    """Put levels of branches above a database, each of whose entries leads to the level below."""
    data = bytearray(data_file.read_bytes())
    tail = struct.Struct("<QQ")  # of a meta page: last page, transaction
    meta = max((0, 4096), key=lambda at: tail.unpack_from(data, at + LAST_PAGE_AT)[1])
    last, transaction = tail.unpack_from(data, meta + LAST_PAGE_AT)
    main = TREE.unpack_from(data, meta + LAST_PAGE_AT - TREE.size)[-1] * 4096
    tree_at = data.index(name.encode(), main, main + 4096) + len(name)
    tree = list(TREE.unpack_from(data, tree_at))
    del data[(last + 1) * 4096 :]
    for _ in range(5):
        page, last, end, entries = bytearray(4096), last + 1, 4096, range(80)
        for number in entries:
            key = b"%08d" % number if number else b""
            end -= NODE.size + len(key)
            page[end : end + NODE.size + len(key)] = NODE.pack(tree[-1], 0, 0, len(key)) + key
            struct.pack_into("<H", page, PAGE_HEADER.size + 2 * number, end)
        PAGE_HEADER.pack_into(page, 0, last, 0, 1, PAGE_HEADER.size + 2 * len(entries), end)
        tree[2], tree[-1] = tree[2] + 1, last
        data += page
    TREE.pack_into(data, tree_at, *tree)
    tail.pack_into(data, meta + LAST_PAGE_AT, last, transaction)
    data_file.write_bytes(data)


@pytest.mark.parametrize("name", ["pending", "segments"])
def test_an_index_whose_pages_lead_to_each_other_for_ever_is_damaged(
    place: Place, name: str
) -> None:
    record, gone = place.record("a"), place.record("b")
    with place.open() as store:
        put(store, record, gone)
        store.drop([gone.block_hash], "test")
    make_endless(place.folder / INDEX / "data.mdb", name)
    with pytest.raises(CorruptIndexError):
        place.open()


def test_blocks_in_pages_that_lead_to_each_other_for_ever_are_listed_and_made_again_in_time(
    place: Place,
) -> None:
    records = [place.record("a", position) for position in range(4)]
    with place.open() as store:
        put(store, *records)
    make_endless(place.folder / INDEX / "data.mdb", "blocks")
    with place.open() as store:
        with pytest.raises(CorruptIndexError):
            list(Operators(store, store.stats).answer(Scan(), cast(Caller, None)))
        with store.index.reading() as txn, pytest.raises(CorruptIndexError):
            assert [*txn.entries_of(b"")]
        assert load(store, records[0]) == payload_of(records[0])
        store.rebuild()
        store.check()
        assert put(store, *records) == [True] * 4


def test_nothing_behind_a_link_that_takes_the_place_of_the_segments_is_changed(
    place: Place, victim: tuple[Place, BlockRecord]
) -> None:
    place.stores()
    segments, others = place.folder / "segments", victim[0].folder / "segments"
    before = {each.name: each.read_bytes() for each in others.iterdir()}
    with place.open() as store:
        [segment] = store.files.found()
        assert f"{segment:08d}" in "".join(before)
        segments.rename(segments.with_name("moved"))
        segments.symlink_to(others)
        store.files.open(segment + 1, 8192, create=True)
        store.files.remove(segment)
        store.files.remove_all()
        segments.unlink()
        segments.with_name("moved").rename(segments)
    assert {each.name: each.read_bytes() for each in others.iterdir()} == before


@pytest.mark.parametrize("name", ["index", "segments"])
def test_a_folder_is_not_made_through_a_link(place: Place, name: str) -> None:
    elsewhere = place.folder.with_name("elsewhere")
    elsewhere.mkdir()
    elsewhere.chmod(0o755)
    place.folder.mkdir()
    (place.folder / name).symlink_to(elsewhere)
    with pytest.raises(StorageError):
        make_folder(str(place.folder / name))
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o755


# --- the folder of keys ---------------------------------------------------------------------------


def test_nobody_else_can_write_to_the_folders_above_the_keys_whatever_the_umask(
    place: Place,
) -> None:
    above = place.key_dir
    place.key_dir = above / "state" / "keys"
    before = os.umask(0)
    try:
        place.stores()
    finally:
        os.umask(before)
    made = (above, above / "state", place.key_dir, place.table, place.master)
    assert [stat.S_IMODE(each.stat().st_mode) & 0o077 for each in made] == [0] * len(made)


# --- the id of another store ----------------------------------------------------------------------


@pytest.fixture
def victim(place: Place) -> tuple[Place, BlockRecord]:
    """Another store whose keys lie in the same folder of keys, and its one block."""
    other = Place(place.folder.parent)
    other.folder, other.clock = place.folder.with_name("victim"), place.clock
    return other, other.stores()


def assert_is_served(victim: tuple[Place, BlockRecord]) -> None:
    other, record = victim
    with other.open() as store:
        assert load(store, record) == payload_of(record)
        assert put(store, other.record("new")) == [True]


@pytest.mark.parametrize("stamp", ["00" * 16, "ab" * 16])
def test_a_clear_start_on_a_folder_that_names_the_keys_of_another_store_leaves_them(
    place: Place, victim: tuple[Place, BlockRecord], stamp: str
) -> None:
    place.open(encryption="off").close()
    place.mark(id=victim[0].marker["id"], stamp=stamp)
    before = place.files()
    place.open(encryption="off").close()
    assert place.files() == before
    assert_is_served(victim)


def test_a_clear_start_on_an_old_copy_without_blocks_leaves_the_keys_to_the_original(
    place: Place,
) -> None:
    place.open().close()
    copy = place.copy()
    record = place.stores()
    copy.open(encryption="off").close()
    assert_is_served((place, record))


@pytest.mark.parametrize("stamp", ["00" * 16, "ab" * 16])
def test_a_folder_that_names_the_keys_of_another_store_gets_none_of_them(
    place: Place, victim: tuple[Place, BlockRecord], stamp: str
) -> None:
    place.stores()
    own = place.files()
    place.mark(id=victim[0].marker["id"], stamp=stamp)
    with refused(MissingKeyError):
        place.open()
    answer = place.control().answer(EvictFilter(all=True))
    assert answer["disk"]["kept_why"]
    assert place.files() == own
    assert_is_served(victim)


def test_a_forged_old_store_does_not_cost_a_table_of_which_one_header_is_lost(
    place: Place, victim: tuple[Place, BlockRecord]
) -> None:
    place.open().close()
    note = {"store_id": victim[0].marker["id"]}
    (place.folder / NOTE).write_bytes(msgspec.json.encode(note))
    (place.folder / MARKER).write_text('{"format":"tieredkv-store","version":2}')
    change_bytes(victim[0].table, HEADERS_AT[0], lambda data: bytes(len(data)), PAGE_BYTES)
    place.open().close()
    assert_is_served(victim)


# --- what the index says of keys ------------------------------------------------------------------


def count_more(store: CheckedStore, found: Located) -> None:
    """Have the index say that a key has more blocks than there are."""
    with store.index.writing() as txn:
        txn._txn.put(scope_of(found.record), encode(1000), db=txn._dbs["keys"])


def move_away(store: CheckedStore, found: Located) -> None:
    """Have the index say that a block belongs to another namespace."""
    forge_entry(store, found._replace(record=replace(found.record, namespace=b"z" * 32)))


@pytest.mark.parametrize("forge", [count_more, move_away])
def test_the_key_of_an_evicted_namespace_goes_whatever_the_index_says_of_its_blocks(
    place: Place, forge: Callable[[CheckedStore, Located], None]
) -> None:
    record, other = place.record("a"), place.record("b", namespace=b"other")
    with place.open() as store:
        put(store, record, other)
        found = store.locate(record.block_hash)
        assert found is not None and store.keys is not None
        forge(store, found)
        evict(store, EvictFilter(namespace_prefix=record.namespace.hex()))
        assert [key.scope for key in store.keys.table] == [scope_of(other)]
        assert load(store, record) in (None, "key", "header")
        assert load(store, other) == payload_of(other)
