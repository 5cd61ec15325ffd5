"""Compares docs/format.md and docs/encryption.md with the files of real stores.

They are read without tieredkv's own code, but for the golden bytes of a record and a header.
"""

import json
import re
import struct
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from msgspec.structs import replace
from xxhash import xxh3_64_digest, xxh3_128_digest

from tests.storage.strangers_reader import Keys
from tieredkv import LLM, SamplingParams
from tieredkv.storage.format.header import Encryption, encode_header_into
from tieredkv.storage.format.record import (
    Extent,
    Located,
    Retentions,
    decode_record,
    encode_record,
    identity_of,
)
from tieredkv.types import BlockRecord

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
    sizes["disk_encryption"] = "off"
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


RECORD = struct.Struct("<8sd32s32s32s32s7I4B3d16sBH21s")
FIELDS = (
    *("seal", "expires_at", "block", "parent", "root", "namespace"),
    *("position", "part", "page_bytes", "payload_bytes", "segment", "extent", "hits"),
    *("codec", "page_form", "retention", "hash_bytes"),
    *("computed_at", "last_used", "pinned_until", "checksum", "kind", "num_parts", "room"),
)


def entry_of(record: bytes) -> dict[str, Any]:
    """Decode a sealed record."""
    return dict(zip(FIELDS, RECORD.unpack(record), strict=True))


def record_of(databases: Databases, position: int) -> tuple[bytes, bytes]:
    """Return the key and the index record of one block of the chain."""
    [found] = [
        (key, value)
        for key, value in databases["blocks"].items()
        if entry_of(value)["position"] == position
    ]
    return found


def test_the_folder_holds_what_the_document_draws_and_is_closed_to_others(store: Path) -> None:
    found = {str(path.relative_to(store)): path for path in store.rglob("*")}
    segments = {
        name for name in found if re.fullmatch(rf"segments/\d{{8}}-{EXTENT_BYTES}\.seg", name)
    }
    assert len(segments) == 1
    assert found.keys() == segments | {
        *("format.json", "lock", "models.json", "rates.json"),
        *("index", "index/data.mdb", "index/lock.mdb", "segments"),
        *("index.open", "index.open/data.mdb", "index.open/lock.mdb"),
    }
    assert json.loads((store / "format.json").read_text()) == {
        "format": "tieredkv-store",
        "version": 3,
        "id": "",
        "stamp": "",
        "retentions": ["24h"],
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
    totals = [NUM_BLOCKS, NUM_BLOCKS * BLOCK_BYTES, 0]
    computed_at = entry_of(record_of(databases, 0)[1])["computed_at"]
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
        "format": 3,
        "next_segment": 2,
        "totals": totals,
        "needs_rebuild": False,
        "faults": {},
        "num_encrypted": 0,
        "window_bytes": 0,
        "page_kinds": [],
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
    root = parent = entry_of(record_of(databases, 0)[1])["root"]
    for position in range(NUM_BLOCKS):
        key, record = record_of(databases, position)
        assert record[:8] == xxh3_64_digest(record[8:])
        it = entry_of(record)
        assert (it["block"], it["parent"], it["root"]) == (key, parent, root)
        assert (it["namespace"], it["position"]) == (namespace, position)
        assert (it["page_bytes"], it["payload_bytes"]) == (BLOCK_BYTES, BLOCK_BYTES)
        assert (it["kind"], it["part"], it["num_parts"]) == (0, 0, 1)
        assert (it["codec"], it["page_form"], it["retention"], it["hash_bytes"]) == (0, 0, 0, 32)
        assert it["room"] == bytes(21)
        assert it["expires_at"] == it["computed_at"] + 24 * 3600
        assert it["pinned_until"] <= it["last_used"]
        expiry = struct.pack(">Q", int(it["expires_at"] * 1e6)) + key
        used = struct.pack(">QI", int(it["last_used"] * 1e6), (1 << 32) - 1 - position)
        lru = namespace[:8] + used + key
        assert databases["expiry"][expiry] == databases["lru"][lru] == b""
        parent = key
    assert len(databases["expiry"]) == len(databases["lru"]) == NUM_BLOCKS


def test_extents_hold_the_header_and_the_bytes_that_the_record_seals(
    store: Path, databases: Databases
) -> None:
    may_differ = {"seal", "expires_at", "hits", "retention", "last_used", "pinned_until"}
    for record in databases["blocks"].values():
        it = entry_of(record)
        file = store / "segments" / f"{it['segment']:08d}-{EXTENT_BYTES}.seg"
        extent = file.read_bytes()[it["extent"] * EXTENT_BYTES :][:EXTENT_BYTES]
        header, payload = extent[:4096], extent[4096:]
        assert it["checksum"] == xxh3_128_digest(payload)
        assert header[:8] == b"TKVSLOT\3"
        first = header[8:248]
        assert first[:8] == xxh3_64_digest(first[8:])
        written = entry_of(first)
        assert {name for name in FIELDS if written[name] != it[name]} <= may_differ
        assert not any(header[248:])


# --- golden bytes ---------------------------------------------------------------------------------

GOLDEN = Located(
    BlockRecord(
        block_hash=bytes(range(32)),
        parent_hash=bytes(range(32, 64)),
        root=bytes(range(64, 96)),
        namespace=bytes(range(96, 128)),
        position=0x0100_0007,
        part=0x0200_0008,
        size_bytes=0x0300_0009,
        retention="24h",
        computed_at=1.5,
        expires_at=86401.5,
        last_used=2.0,
        pinned_until=3.0,
        hits=0x0600_000C,
        kind=0x21,
        num_parts=0x2223,
        page_form=0x11,
    ),
    Extent(segment=0x0400_000A, number=0x0500_000B),
    payload_bytes=0x0200_000D,
    payload_checksum=bytes(range(0xE0, 0xF0)),
    codec=4,
)
RETENTIONS = Retentions(["7d", "24h"])
GOLDEN_BYTES = bytes.fromhex(
    "f268803c4ceb0ecf"
    "000000001818f540"
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f"
    "404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f"
    "606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f"
    "0700000108000002090000030d0000020a0000040b0000050c000006"
    "04110120"
    "000000000000f83f00000000000000400000000000000840"
    "e0e1e2e3e4e5e6e7e8e9eaebecedeeef"
    "212322"
    "000000000000000000000000000000000000000000"
)


def test_a_record_has_its_golden_bytes() -> None:
    assert encode_record(GOLDEN, RETENTIONS) == GOLDEN_BYTES
    assert decode_record(GOLDEN.record.block_hash, GOLDEN_BYTES, RETENTIONS) == GOLDEN


def test_a_record_with_short_hashes_has_zeroes_behind_them() -> None:
    hashes = ("block_hash", "parent_hash", "root")
    record = replace(GOLDEN.record, **{name: getattr(GOLDEN.record, name)[:16] for name in hashes})
    sealed, was, room = encode_record(GOLDEN._replace(record=record), RETENTIONS), GOLDEN_BYTES, 16
    wanted = was[8:32] + bytes(room) + was[48:64] + bytes(room) + was[80:96] + bytes(room)
    assert sealed[8:] == wanted + was[112:175] + b"\x10" + was[176:]


def test_an_extent_header_has_its_golden_bytes() -> None:
    buffer, how = bytearray(b"?" * 600), Encryption(b"k" * 8, b"n" * 12, b"t" * 16)
    encode_header_into(buffer, GOLDEN, RETENTIONS, how)
    wanted = b"TKVSLOT\3" + GOLDEN_BYTES + b"k" * 8 + b"n" * 12 + b"t" * 16
    assert buffer == wanted.ljust(512, b"\0") + b"?" * 88


def test_a_payload_is_authenticated_with_its_golden_bytes() -> None:
    was = GOLDEN_BYTES
    wanted = was[16:160] + was[172:174] + was[175:184] + was[216:219]
    assert identity_of(GOLDEN.record, 4, GOLDEN.payload_bytes) == wanted


# --- an encrypted store ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a stopped store that is encrypted; its keys are in the folder `keys` beside it."""
    folder = tmp_path_factory.mktemp("encrypted") / "kv"
    sizes: dict[str, Any] = {"device_size": "2MiB", "host_size": "2MiB", "disk_size": BUDGET_BYTES}
    sizes["disk_key_dir"] = str(folder.with_name("keys"))
    with LLM("tiny-random", retention="24h", disk_dir=folder, **sizes) as llm:
        llm.generate("y" * 200, SamplingParams(max_tokens=1))
    return folder


def test_an_outsider_with_the_keys_decrypts_what_the_document_draws(
    encrypted: Path, store: Path, databases: Databases
) -> None:
    """Read keys, names and payloads as docs/encryption.md says, without tieredkv's own code."""
    note = json.loads((encrypted / "encryption.json").read_text())
    marker = json.loads((encrypted / "format.json").read_text())
    keys = Keys(Path(note["key_table"]), bytes.fromhex(Path(note["master_key"]).read_text()))
    assert Path(note["key_table"]).name == f"{marker['id']}.keys"
    assert keys.folder_id == bytes.fromhex(marker["id"])
    table = Path(note["key_table"]).read_bytes()
    assert table[24:40] == bytes.fromhex(marker["stamp"])
    assert table[512:2048].rstrip(b"\0") == str(encrypted).encode()
    clear = {key: entry_of(record) for key, record in databases["blocks"].items()}
    [file] = (encrypted / "segments").iterdir()
    [clear_file] = (store / "segments").iterdir()
    extents, clear_extents = file.read_bytes(), clear_file.read_bytes()
    found = 0
    for start in range(0, len(extents), EXTENT_BYTES):
        extent = extents[start : start + EXTENT_BYTES]
        if extent[:8] != b"TKVSLOT\3":
            continue
        record = extent[8:248]
        it = entry_of(record)
        key_id, nonce, tag = struct.unpack_from("8s12s16s", extent, 248)
        key, hour = keys.payload_keys[key_id], int(it["computed_at"] // 3600)
        scope = it["namespace"] + struct.pack(">I", hour)
        assert keys.deaths[scope] == 3600 * (hour + 1) + 86_400
        data = extent[4096 : 4096 + it["payload_bytes"]]
        assert (it["codec"], it["checksum"]) == (3, xxh3_128_digest(data))
        identity = record[16:160] + record[172:174] + record[175:184] + record[216:219]
        payload = AESGCM(key).decrypt(nonce, data + tag, identity)
        number = clear[keys.hash_of(it["block"])]["extent"]
        assert payload == clear_extents[number * EXTENT_BYTES + 4096 :][: it["payload_bytes"]]
        found += 1
    assert found == NUM_BLOCKS


def test_the_index_of_an_encrypted_store_counts_blocks_by_key(encrypted: Path) -> None:
    with (
        lmdb.open(str(encrypted / "index"), max_dbs=16, readonly=True, lock=False) as env,
        env.begin() as txn,
    ):
        counts = dict(txn.cursor(db=env.open_db(b"keys", txn=txn, create=False)))
        [(_, data)] = txn.cursor(db=env.open_db(b"meta", txn=txn))
        meta = msgspec.msgpack.decode(data)
    assert sum(map(msgspec.msgpack.decode, counts.values())) == NUM_BLOCKS
    assert meta["num_encrypted"] == NUM_BLOCKS
