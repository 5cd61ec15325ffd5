"""A hostile hand on the volume of an encrypted store: it gains misses, and no start breaks."""

import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.storage.blocks import (
    RETENTIONS,
    CheckedStore,
    change_bytes,
    load,
    payload_of,
    put,
    segment_files,
    sweep,
)
from tests.storage.test_store_keys import DAY_S, Place
from tieredkv.operate.calls import EvictFilter
from tieredkv.storage.folder import INDEX
from tieredkv.storage.format.header import decode_encryption, encode_header_into
from tieredkv.storage.format.record import Located, encode_record
from tieredkv.storage.own_files import remove


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
        shutil.rmtree(place.folder / INDEX)
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
        store.make_index_again()
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
    assert place.control().evict(EvictFilter(all=True))["disk"]["kept_why"]
    assert not (place.folder / name).exists()
    assert (place.folder.parent / "keys").is_dir()
    place.stores()
