"""A hostile hand on the volume of an encrypted store: it gains misses, and no start breaks."""

import math
import shutil
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
from tieredkv.storage.folder import INDEX
from tieredkv.storage.format.header import decode_encryption, encode_header_into
from tieredkv.storage.format.record import Located, encode_record


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# --- forged records --------------------------------------------------------------------------------


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
    encode_header_into(image, found, RETENTIONS, decode_encryption(image))
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
