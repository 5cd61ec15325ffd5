"""Compares docs/format.md with the files of a real store, read without tieredkv's own code."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import pytest
from xxhash import xxh3_64_digest, xxh3_128_digest

from tieredkv import LLM, SamplingParams

DOCUMENT = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
NUM_BLOCKS = 12
BLOCK_BYTES = 16 * 2048
BUDGET_BYTES = 64 << 20
EXTENT_BYTES = 4096 + BLOCK_BYTES

Databases = dict[str, dict[bytes, bytes]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a stopped store with one chain of 12 blocks."""
    folder = tmp_path_factory.mktemp("format") / "kv"
    sizes: dict[str, Any] = {"device_size": "2MiB", "host_size": "2MiB", "disk_size": BUDGET_BYTES}
    with LLM("tiny-random", retention="24h", disk_dir=folder, **sizes) as llm:
        llm.generate("y" * 200, SamplingParams(max_tokens=1))
    return folder


@pytest.fixture(scope="module")
def databases(store: Path) -> Databases:
    """Return every database of the index by name."""
    with (
        lmdb.open(str(store / "index"), max_dbs=16, readonly=True, lock=False) as env,
        env.begin() as txn,
    ):
        names = [key for key, _ in txn.cursor()]
        return {
            name.decode(): dict(txn.cursor(db=env.open_db(name, txn=txn, create=False)))
            for name in names
        }


def entry_of(record: bytes) -> Any:
    """Decode the content of a sealed record."""
    return msgspec.msgpack.decode(record[16:])


def record_of(databases: Databases, position: int) -> tuple[bytes, bytes]:
    """Return the key and the index record of one block of the chain."""
    [found] = [
        (key, value)
        for key, value in databases["blocks"].items()
        if entry_of(value)[0][4] == position
    ]
    return found


def test_the_folder_holds_what_the_document_draws_and_is_closed_to_others(store: Path) -> None:
    found = {str(path.relative_to(store)): path for path in store.rglob("*")}
    segments = {
        name for name in found if re.fullmatch(rf"segments/\d{{8}}-{EXTENT_BYTES}\.seg", name)
    }
    assert len(segments) == 1
    assert found.keys() == segments | {
        *("format.json", "lock", "rates.json"),
        *("index", "index/data.mdb", "index/lock.mdb", "segments"),
    }
    assert json.loads((store / "format.json").read_text()) == {
        "format": "tieredkv-store",
        "version": 2,
    }
    assert store.stat().st_mode & 0o777 == 0o700
    for path in found.values():
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_the_document_names_every_database(databases: Databases) -> None:
    table = DOCUMENT.partition("| database |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(databases)


def test_the_example_for_outsiders_lists_the_blocks(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    match = re.search(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    assert match is not None
    exec(match[1].replace("DIR", str(store)), {})
    lines = capsys.readouterr().out.splitlines()
    assert sorted(int(line.split()[1]) for line in lines) == list(range(NUM_BLOCKS))
    assert all(re.fullmatch(r"[0-9a-f]{12} \d+", line) for line in lines)


def test_meta_counters_and_segments_are_as_described(databases: Databases) -> None:
    meta = msgspec.msgpack.decode(databases["meta"].pop(b"store"))
    assert not databases["meta"]
    totals = [NUM_BLOCKS, NUM_BLOCKS * BLOCK_BYTES]
    (computed_at, *_) = entry_of(record_of(databases, 0)[1])[0][7:]
    assert meta.pop("clock") >= computed_at
    assert meta.pop("bytes_written") >= NUM_BLOCKS * EXTENT_BYTES
    (began_at, hour, present, before), gone = meta.pop("lifetimes")
    assert began_at >= computed_at
    assert hour == int(began_at // 3600)
    assert (before, gone) == ({}, [0.0, 0, {}, {}])
    num_bytes, promised_byte_s, left_byte_s = present["24h"]
    assert num_bytes == NUM_BLOCKS * EXTENT_BYTES
    assert promised_byte_s == pytest.approx(num_bytes * 24 * 3600)
    assert 0 < left_byte_s <= promised_byte_s
    assert meta == {
        "format": 2,
        "next_segment": 2,
        "totals": totals,
        "needs_rebuild": False,
        "faults": {},
        "store_id": "",
        "num_encrypted": 0,
    }
    assert list(map(msgspec.msgpack.decode, databases["namespaces"].values())) == [totals]
    [(segment, state)] = databases["segments"].items()
    extent_bytes, num_extents, num_used = msgspec.msgpack.decode(state)
    assert (int.from_bytes(segment, "big"), extent_bytes) == (1, EXTENT_BYTES)
    assert num_used <= num_extents
    unused = [*databases["free"], *databases["pending"]]
    assert len(unused) == num_used - NUM_BLOCKS
    assert {struct.unpack(">II", each)[0] for each in unused} <= {1}


def test_records_form_the_chain_and_are_sealed_with_their_keys(databases: Databases) -> None:
    [namespace] = databases["namespaces"]
    root = parent = entry_of(record_of(databases, 0)[1])[0][2]
    for position in range(NUM_BLOCKS):
        key, record = record_of(databases, position)
        assert record[:8] == xxh3_64_digest(key + record[8:])
        block, _, payload_bytes, _, codec = entry_of(record)
        assert block[:4] == [key, parent, root, namespace]
        assert block[4:7] == [position, BLOCK_BYTES, "24h"]
        assert (payload_bytes, codec) == (BLOCK_BYTES, 0)
        computed_at, expires_at, last_used, pinned_until, _ = block[7:]
        assert expires_at == computed_at + 24 * 3600
        assert pinned_until <= last_used
        assert struct.unpack_from("<d", record, 8) == (expires_at,)
        expiry = struct.pack(">Q", int(expires_at * 1e6)) + key
        lru = namespace + struct.pack(">QI", int(last_used * 1e6), (1 << 32) - 1 - position) + key
        assert databases["expiry"][expiry] == databases["lru"][lru] == b""
        parent = key
    assert len(databases["expiry"]) == len(databases["lru"]) == NUM_BLOCKS


def test_extents_hold_the_header_and_the_bytes_that_the_record_seals(
    store: Path, databases: Databases
) -> None:
    for key, record in databases["blocks"].items():
        block, (segment, number), _, checksum, _ = entry_of(record)
        file = store / "segments" / f"{segment:08d}-{EXTENT_BYTES}.seg"
        extent = file.read_bytes()[number * EXTENT_BYTES : (number + 1) * EXTENT_BYTES]
        header, payload = extent[:4096], extent[4096:]
        assert checksum == xxh3_128_digest(payload)
        assert header[:8] == b"TKVSLOT\2"
        (length,) = struct.unpack_from("<I", header, 8)
        first = header[12 : 12 + length]
        assert first[:8] == xxh3_64_digest(key + first[8:])
        written, *place = entry_of(first)
        assert place == entry_of(record)[1:]
        assert written[:6] == block[:6]
        assert not any(header[12 + length :])
