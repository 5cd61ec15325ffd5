"""Compares docs/format.md and docs/encryption.md with the files of real stores.

They are read without tieredkv's own code.
"""

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
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
        *("format.json", "lock", "models.json", "rates.json"),
        *("index", "index/data.mdb", "index/lock.mdb", "segments"),
        *("index.open", "index.open/data.mdb", "index.open/lock.mdb"),
    }
    assert json.loads((store / "format.json").read_text()) == {
        "format": "tieredkv-store",
        "version": 2,
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
    store_id = bytes.fromhex(note["store_id"])
    master_key = bytes.fromhex(Path(note["master_key"]).read_text())
    table = Path(note["key_table"]).read_bytes()
    assert table[:24] == b"TKVKEYS\1" + store_id
    check = hashlib.sha256(b"tieredkv master key" + master_key).digest()
    assert table[24:32] == check[:8]
    table_key = AESGCM(master_key).decrypt(table[32:44], table[44:92], table[:24])
    frames, at = list[bytes](), 92
    while at < len(table):
        (length,) = struct.unpack_from("<I", table, at)
        sealed, place = table[at + 4 :][:length], store_id + struct.pack("<Q", len(frames))
        frames.append(AESGCM(table_key).decrypt(sealed[:12], sealed[12:], place))
        at += 4 + length
    first, *others = map(msgspec.msgpack.decode, frames)
    assert first["folder"] == str(encrypted)
    keys = {
        key_id: (key, scope) for each in (first, *others) for key_id, key, scope in each["keys"]
    }
    names = Cipher(algorithms.AES256(first["names_key"]), modes.ECB())
    clear = {key: entry_of(record) for key, record in databases["blocks"].items()}
    [file] = (encrypted / "segments").iterdir()
    [clear_file] = (store / "segments").iterdir()
    extents, clear_extents = file.read_bytes(), clear_file.read_bytes()
    found = 0
    for start in range(0, len(extents), EXTENT_BYTES):
        extent = extents[start : start + EXTENT_BYTES]
        if extent[:8] != b"TKVSLOT\2":
            continue
        (length,) = struct.unpack_from("<I", extent, 8)
        block, _, size, checksum, codec = entry_of(extent[12 : 12 + length])
        key_id, nonce, tag = struct.unpack_from("8s12s16s", extent, 12 + length)
        key, scope = keys[key_id]
        assert scope == block[3] + struct.pack(">I", int(block[7] // 3600))
        data = extent[4096 : 4096 + size]
        assert (codec, checksum) == (3, xxh3_128_digest(data))
        identity = msgspec.msgpack.encode([codec, *block[:6], block[7]])
        payload = AESGCM(key).decrypt(nonce, data + tag, identity)
        block_hash = names.decryptor().update(block[0])
        _, (_, number), *_ = clear[block_hash]
        assert payload == clear_extents[number * EXTENT_BYTES + 4096 :][:size]
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
    assert (meta["num_encrypted"], len(meta["store_id"])) == (NUM_BLOCKS, 32)
