"""The further pages of a block, those of layers with windows, leave the disk with it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.fakes import FakeClock
from tests.storage.blocks import (
    CheckedStore,
    ask,
    change_bytes,
    evict,
    flip,
    load,
    make_record,
    open_store,
    payload_of,
    put,
    segment_files,
    stored_hashes,
    sweep,
    verify,
)
from tests.storage.windows import KINDS, pages_of
from tieredkv.operate.calls import EvictFilter
from tieredkv.storage.keys.names import Names
from tieredkv.storage.messages.operator import Delete, Figures
from tieredkv.types import BlockRecord

NOW = FakeClock().now()
BLOCKS = [make_record("a", position, now=NOW) for position in range(6)]
PLACE = 3
GONE = replace(BLOCKS[PLACE], expires_at=NOW + 1000, last_used=NOW - 1000)
"""The block that leaves; it expires first and was used last before the others."""

OTHERS = [*BLOCKS[:PLACE], *BLOCKS[PLACE + 1 :]]
PAGES = pages_of([BLOCKS[PLACE]])
KEPT = [*OTHERS, *pages_of(OTHERS)]


def filled(path: Path) -> CheckedStore:
    store = open_store(path, FakeClock())
    put(store, *KEPT, GONE, *PAGES)
    return store


def damage_payload(store: CheckedStore) -> None:
    (segment,) = segment_files(Path(store.path))
    change_bytes(segment, segment.read_bytes().index(payload_of(GONE)), flip)


def damage_record(store: CheckedStore) -> None:
    with store.index.writing() as txn:
        sealed = txn._txn.get(GONE.block_hash, db=txn._dbs["blocks"])
        txn._txn.put(GONE.block_hash, flip(sealed), db=txn._dbs["blocks"])


def load_damaged(store: CheckedStore) -> None:
    damage_payload(store)
    assert load(store, GONE) == "checksum"


def verify_damaged(store: CheckedStore) -> None:
    damage_payload(store)
    found = verify(store)
    assert (found.bad, found.repaired, found.stray_pages) == (1, 1, 0)


def sweep_damaged_record(store: CheckedStore) -> None:
    damage_record(store)
    assert not store.find([GONE.block_hash])
    sweep(store)


def verify_damaged_record(store: CheckedStore) -> None:
    damage_record(store)
    assert verify(store).bad > 0


def expire(store: CheckedStore) -> None:
    assert isinstance(store.clock, FakeClock)
    store.clock.advance(1000)
    assert sweep(store).expired_blocks == 1 + len(PAGES)


def make_room(store: CheckedStore) -> None:
    with store.parts.room.changing() as txn:
        assert store.parts.room._evict(txn, 1) == 1 + len(PAGES)
    assert store.stats().num_evicted == 1 + len(PAGES)


def drop(store: CheckedStore) -> None:
    assert len(store.drop([GONE.block_hash], "test")) == 1 + len(PAGES)


def evict_unused(store: CheckedStore) -> None:
    freed_bytes = evict(store, EvictFilter(older_than_s=1000)).freed_bytes
    assert freed_bytes == (1 + len(PAGES)) * (4096 + GONE.size_bytes)


@pytest.mark.parametrize(
    "leave",
    [
        load_damaged,
        verify_damaged,
        sweep_damaged_record,
        verify_damaged_record,
        expire,
        make_room,
        drop,
        evict_unused,
    ],
)
def test_the_pages_of_a_block_leave_with_it(
    tmp_path: Path, leave: Callable[[CheckedStore], None]
) -> None:
    with filled(tmp_path) as store:
        leave(store)
        store.check()
        assert stored_hashes(store, [GONE, *PAGES]) == set()
        assert len(stored_hashes(store, KEPT)) == len(KEPT)
        assert store.stats().window_pages == len(KEPT) - len(OTHERS)


def test_a_block_that_is_computed_anew_keeps_its_pages(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        put(store, replace(GONE, computed_at=NOW + 1))
        assert len(stored_hashes(store, PAGES)) == len(PAGES)


def test_pages_are_found_under_the_names_of_an_encrypted_store(tmp_path: Path) -> None:
    keys = str(tmp_path / "keys")
    with open_store(tmp_path / "store", FakeClock(), encryption="on", key_dir=keys) as store:
        names = Names(store.parts.key_use.names_key)

        def hidden(record: BlockRecord) -> BlockRecord:
            name, parent = names.hide([record.block_hash, record.parent_hash])
            return replace(record, block_hash=name, parent_hash=parent)

        put(store, *map(hidden, [*KEPT, GONE, *PAGES]))
        store.drop([hidden(GONE).block_hash], "test")
        assert store.stats().window_pages == len(KEPT) - len(OTHERS)


@pytest.mark.parametrize("repair", [False, True])
def test_verify_finds_pages_whose_block_is_not_there(tmp_path: Path, repair: bool) -> None:
    with open_store(tmp_path, FakeClock()) as store:
        put(store, *KEPT, *PAGES)
        assert verify(store, repair=repair).stray_pages == len(KINDS)
        assert verify(store).stray_pages == (0 if repair else len(KINDS))
        assert len(stored_hashes(store, KEPT)) == len(KEPT)


def test_an_index_that_was_made_again_has_no_pages_without_their_block(tmp_path: Path) -> None:
    with open_store(tmp_path, FakeClock()) as store:
        put(store, *KEPT, *PAGES)
        store.rebuild()
        store.check()
        assert not stored_hashes(store, PAGES)
        assert len(stored_hashes(store, KEPT)) == len(KEPT)


def test_pages_are_counted_beside_blocks(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        found = verify(store)
        assert (found.checked, found.window_pages) == (len(BLOCKS), len(BLOCKS) * len(KINDS))
        [figures] = ask(store, Figures(tenants=True))
        [(num_all, _, num_pages)] = figures.tenants.values()
        assert (num_all - num_pages, num_pages) == (found.checked, found.window_pages)
        [deleted] = ask(store, Delete())
        assert (deleted.num_blocks, deleted.window_pages) == (found.checked, found.window_pages)
