"""Encrypted stores: what is on the disk, what is served, and what an attacker reads from a copy."""

import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tests.fakes import FakeClock
from tests.golden import refused, told
from tests.storage.blocks import (
    BLOCK_BYTES,
    CheckedStore,
    change_bytes,
    commit,
    digest,
    evict,
    flip,
    load,
    make_record,
    open_store,
    page_with,
    payload_of,
    put,
    segment_files,
    stored_hashes,
    sweep,
    verify,
)
from tests.storage.conftest import Harness, Mailbox, make_chain, wait_until
from tests.storage.conftest import payload_of as payload_of_hash
from tieredkv.errors import MissingKeyError, StorageError
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import EvictFilter, NamesKey
from tieredkv.storage.extents.payloads import PIECE_BYTES
from tieredkv.storage.format.header import decode_encryption, decode_header
from tieredkv.storage.format.planes import WIDTHS
from tieredkv.storage.format.record import (
    FIRST_ENCRYPTED,
    HEADER_BYTES,
    Located,
    header_bytes_for,
    identity_of,
    scope_of,
    split_scope,
)
from tieredkv.storage.keys.names import Names
from tieredkv.storage.keys.table import KeyTable
from tieredkv.tier import BlockLife, Gone, ProbeDone, TouchItem
from tieredkv.types import BlockRecord
from tieredkv.wire.channel import FrameChannel

HOUR_S = 3600
CODECS = [0, 1, 2]  # without compression, with elements of two and of four bytes


class Encrypted:
    """A folder with an encrypted store, whose keys are beside it."""

    def __init__(self, base: Path) -> None:
        self.folder, self.key_dir, self.clock = base / "kv", base / "keys", FakeClock()

    def open(self, **changes: Any) -> CheckedStore:
        options: dict[str, Any] = {"encryption": "on", "key_dir": str(self.key_dir)}
        return open_store(self.folder, self.clock, **(options | changes))

    @property
    def table(self) -> Path:
        """The key table."""
        [path] = self.key_dir.glob("*.keys")
        return path

    def record(self, name: str = "a", position: int = 0, **changes: Any) -> BlockRecord:
        return make_record(name, position, now=self.clock.now(), **changes)


@pytest.fixture
def encrypted(tmp_path: Path) -> Encrypted:
    return Encrypted(tmp_path)


def compressible(record: BlockRecord) -> bytes:
    """Return a payload that each codec shortens."""
    return (payload_of(record)[:64] * BLOCK_BYTES)[: record.size_bytes]


def put_packed(store: CheckedStore, record: BlockRecord) -> Located:
    """Store a block as a worker with compression does; return where it lies."""
    page = page_with(compressible(record))
    packed = store.packing.pack(page)
    (extent,) = store.reserve([record], [packed])
    assert extent is not None
    written = store.write(extent, record, page, packed)
    assert bytes(page) == compressible(record)  # it may be on its way up to the GPU
    assert commit(store, [written]) == [True]
    return written


def on_disk(folder: Path) -> bytes:
    return b"".join(each.read_bytes() for each in sorted(folder.rglob("*")) if each.is_file())


# --- reading and writing -------------------------------------------------------------------------


@pytest.mark.parametrize("number", CODECS)
def test_a_block_comes_back_from_disk_and_its_bytes_are_not_there(
    encrypted: Encrypted, number: int
) -> None:
    options = {"compression": "on" if number else "off", "element_bytes": WIDTHS.get(number, 2)}
    record = encrypted.record(size_bytes=BLOCK_BYTES)
    with encrypted.open(**options) as store:
        written = put_packed(store, record)
        assert written.codec == FIRST_ENCRYPTED + number
        assert load(store, record) == compressible(record)
    with encrypted.open() as store:  # whatever new blocks are
        assert load(store, record) == compressible(record)
        store.check()
    assert payload_of(record)[:64] not in on_disk(encrypted.folder)


@pytest.mark.parametrize(
    "size_bytes", [1, BLOCK_BYTES - 100, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES - 1]
)
def test_a_block_of_any_size_comes_back(encrypted: Encrypted, size_bytes: int) -> None:
    record = encrypted.record(size_bytes=size_bytes)
    with encrypted.open(budget_bytes=16 << 20) as store:
        assert put(store, record) == [True]
        assert load(store, record) == payload_of(record)


def test_a_compressed_block_of_several_pieces_comes_back(encrypted: Encrypted) -> None:
    values = np.random.default_rng(0).normal(size=2 * PIECE_BYTES).astype(np.float32)
    page = page_with(values.view(np.uint16)[1::2].tobytes())  # as bfloat16
    record = encrypted.record(size_bytes=len(page))
    options = {"compression": "on", "element_bytes": 2, "budget_bytes": 16 << 20}
    with encrypted.open(**options) as store:
        packed = store.packing.pack(page)
        assert packed is not None
        assert len(packed.payload) > 2 * PIECE_BYTES
        (extent,) = store.reserve([record], [packed])
        assert extent is not None
        store.commit([store.write(extent, record, page, packed)])
        assert load(store, record) == bytes(page)


def test_equal_blocks_are_encrypted_differently_each_time(encrypted: Encrypted) -> None:
    nonces, extents = set(), set()
    with encrypted.open() as store:
        for name in ("a", "b", "a"):
            encrypted.clock.advance(1)
            record = encrypted.record(name)
            (extent,) = store.reserve([record])
            assert extent is not None
            written = store.write(extent, record, page_with(bytes(BLOCK_BYTES)))
            store.commit([written])
            image = image_of(encrypted.folder, written)
            nonces.add(decode_encryption(image).nonce)
            extents.add(image[HEADER_BYTES:])
    assert (len(nonces), len(extents)) == (3, 3)


def image_of(folder: Path, located: Located) -> bytes:
    """Return the bytes of a block's extent."""
    [file] = folder.glob(f"segments/{located.extent.segment:08d}-*.seg")
    size = located.extent_bytes
    return file.read_bytes()[located.extent.number * size :][:size]


def locate(store: CheckedStore, record: BlockRecord) -> Located:
    located = store.locate(record.block_hash)
    assert located is not None
    return located


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (HEADER_BYTES, "checksum"),  # the payload
        (-36, "key"),  # in the header, behind the record: id, nonce, tag
        (-28, "tag"),
        (-16, "tag"),
    ],
)
def test_a_flipped_bit_is_a_miss(encrypted: Encrypted, at: int, reason: str) -> None:
    record = encrypted.record()
    with encrypted.open() as store:
        put(store, record)
        image = image_of(encrypted.folder, locate(store, record))
        end = image.rindex(decode_encryption(image).tag) + 16
        place = at if at > 0 else end + at
        number = locate(store, record).extent.number
        change_bytes(segment_files(encrypted.folder)[0], number * len(image) + place, flip)
        assert load(store, record) == reason
        assert load(store, record) is None
        store.check()


def test_a_longer_life_needs_no_new_payload(encrypted: Encrypted) -> None:
    record = encrypted.record()
    with encrypted.open() as store:
        put(store, record)
        written = store.stats().bytes_written
        longer = make_record(now=record.computed_at, expires_at=record.expires_at + 100)
        store.touch([longer])
        assert store.stats().bytes_written == written
        assert load(store, record) == payload_of(record)


# --- keys come and go ----------------------------------------------------------------------------


def scopes(store: CheckedStore) -> list[tuple[bytes, int]]:
    assert store.keys is not None
    return [split_scope(each.scope) for each in store.keys.table]


def test_there_is_a_key_for_each_namespace_and_hour(encrypted: Encrypted) -> None:
    now, other = encrypted.clock.now(), digest("another tenant")
    with encrypted.open() as store:
        put(store, encrypted.record("a"), encrypted.record("b"))
        put(store, encrypted.record("c", namespace=other))
        encrypted.clock.advance(HOUR_S)
        put(store, encrypted.record("d"))
        first = now // HOUR_S * HOUR_S
        mine = digest("tenant")
        assert scopes(store) == [(mine, first), (other, first), (mine, first + HOUR_S)]
        assert store.stats().num_keys == 3
        store.check()


def test_a_key_stays_while_a_write_may_use_it(encrypted: Encrypted) -> None:
    record = encrypted.record()
    with encrypted.open() as store:
        put(store, record)
        other = encrypted.record("b")
        (extent,) = store.reserve([other])
        assert extent is not None
        store.drop([record.block_hash], "operator")
        sweep(store)
        assert len(scopes(store)) == 1
        written = store.write(extent, other, page_with(payload_of(other)))
        store.commit([written])
        sweep(store)
        assert load(store, other) == payload_of(other)
        (extent,) = store.reserve([encrypted.record("c")])
        assert extent is not None
        store.drop([other.block_hash], "operator")
        store.give_back(extent)
        sweep(store)
        assert scopes(store) == []


def refuse_to_write(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_key_that_could_not_be_dropped_goes_with_the_next_sweep(
    encrypted: Encrypted, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = encrypted.record()
    with encrypted.open() as store:
        put(store, record)
        encrypted.clock.advance(2 * 86_400)
        with monkeypatch.context() as patch, pytest.raises(StorageError):
            patch.setattr(os, "pwrite", refuse_to_write)
            sweep(store)
        assert load(store, record) is None
        assert store.stats().bytes_pending == 0  # what lies here is erased nevertheless
        assert len(scopes(store)) == 1
        sweep(store)
        assert scopes(store) == []


def test_an_eviction_whose_keys_cannot_be_dropped_says_so_and_erases_the_blocks(
    encrypted: Encrypted, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = encrypted.record()
    with encrypted.open() as store:
        put(store, record)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", refuse_to_write)
            result = evict(store, EvictFilter(all=True))
        assert (len(result.kept_keys), result.erased_keys) == (1, ())
        told(result.keys_error, hide={encrypted.table.name: "ID.keys"})
        assert (store.stats().blocks, store.stats().bytes_pending) == (0, 0)
        sweep(store)
        assert scopes(store) == []


def test_keys_without_blocks_go_when_the_store_opens(encrypted: Encrypted) -> None:
    with encrypted.open() as store:
        put(store, encrypted.record())
    with encrypted.open(encryption="as_it_is", master_key="/nowhere") as store:
        assert store.stats().encryption == "no keys"
        assert evict(store, EvictFilter(all=True)).evicted_blocks == 1
    with encrypted.open() as store:
        assert scopes(store) == []


# --- attacks on a copy ---------------------------------------------------------------------------


class Attacker:
    """Has a copy of the folder, the master key, and the key table of the day of the attack."""

    def __init__(self, encrypted: Encrypted, copy: Path) -> None:
        self.copy = copy
        shutil.copytree(encrypted.folder, copy)
        self.note = msgspec.json.decode((copy / "encryption.json").read_bytes())
        self.id = bytes.fromhex(msgspec.json.decode((copy / "format.json").read_bytes())["id"])

    def payloads(self) -> set[bytes]:
        """Decrypt every extent of the copy with every key that there is, without our store."""
        master_key = bytes.fromhex(Path(self.note["master_key"]).read_text())
        table = KeyTable.look(self.note["key_table"], self.id, master_key)
        return {each for each in map(self._decrypt, self.images(), [table] * 99) if each}

    def images(self) -> Iterator[bytes]:
        for file in segment_files(self.copy):
            size, data = int(file.stem.split("-")[1]), file.read_bytes()
            yield from (data[start : start + size] for start in range(0, len(data), size))

    @staticmethod
    def _decrypt(image: bytes, table: KeyTable) -> bytes:
        if (located := decode_header(image)) is None:
            return b""
        how, start = decode_encryption(image), header_bytes_for(located.codec)
        data = image[start : start + located.payload_bytes] + how.tag
        for key in table:
            try:
                identity = identity_of(located.record, located.codec, located.payload_bytes)
                return AESGCM(key.key).decrypt(how.nonce, data, identity)
            except InvalidTag:
                continue
        return b""


def test_a_copy_is_noise_once_the_last_block_of_its_hour_has_expired(
    encrypted: Encrypted, tmp_path: Path
) -> None:
    first = encrypted.record("a", expires_at=encrypted.clock.now() + 100)
    last = encrypted.record("b", expires_at=encrypted.clock.now() + 200)
    with encrypted.open() as store:
        put(store, first, last)
        encrypted.clock.advance(HOUR_S)
        later = encrypted.record("c")
        encrypted.clock.advance(-HOUR_S)
        put(store, later)
        attacker = Attacker(encrypted, tmp_path / "copy")
        assert attacker.payloads() == {payload_of(each) for each in (first, last, later)}
        encrypted.clock.advance(150)
        sweep(store)
        assert load(store, first) is None
        assert len(attacker.payloads()) == 3  # its hour still has a block
        encrypted.clock.advance(100)
        sweep(store)
        assert attacker.payloads() == {payload_of(later)}
        assert load(store, later) == payload_of(later)


def test_a_copy_is_noise_for_a_namespace_that_was_deleted(
    encrypted: Encrypted, tmp_path: Path
) -> None:
    mine, theirs = encrypted.record("a"), encrypted.record("b", namespace=digest("other"))
    with encrypted.open() as store:
        put(store, mine, theirs)
        attacker = Attacker(encrypted, tmp_path / "copy")
        evict(store, EvictFilter(namespace_prefix=digest("other").hex()))
        assert attacker.payloads() == {payload_of(mine)}


def test_an_evicted_id_is_erased_here_and_its_copies_follow_with_the_hour(
    encrypted: Encrypted, tmp_path: Path
) -> None:
    gone, kept = encrypted.record("a"), encrypted.record("b")
    with encrypted.open() as store:
        put(store, gone, kept)
        attacker = Attacker(encrypted, tmp_path / "copy")
        ciphertexts = [image[HEADER_BYTES:] for image in attacker.images() if any(image)]
        evict(store, EvictFilter(ids=(gone.block_hash.hex(),)))
        still_there = [each for each in ciphertexts if each in on_disk(encrypted.folder)]
        assert len(still_there) == 1
        assert len(attacker.payloads()) == 2
        evict(store, EvictFilter(ids=(kept.block_hash.hex(),)))
        assert attacker.payloads() == set()


# --- without keys --------------------------------------------------------------------------------


@pytest.fixture
def lost(encrypted: Encrypted) -> Encrypted:
    """A store with a block, whose master key is lost."""
    with encrypted.open() as store:
        put(store, encrypted.record())
    [master] = encrypted.key_dir.glob("*.master")
    master.unlink()
    return encrypted


def test_a_store_whose_master_key_is_lost_is_refused_and_left_as_it_is(lost: Encrypted) -> None:
    before = on_disk(lost.folder / "segments"), on_disk(lost.folder / "index")
    with refused(MissingKeyError):
        lost.open()
    assert (on_disk(lost.folder / "segments"), on_disk(lost.folder / "index")) == before
    assert not list(lost.key_dir.glob("*.master"))


def test_a_store_without_its_keys_can_be_looked_at_and_emptied(lost: Encrypted) -> None:
    with lost.open(encryption="as_it_is") as store:
        stats = store.stats()
        assert (stats.blocks, stats.encryption) == (1, "no keys")
        assert stored_hashes(store, [lost.record()])
        with refused(StorageError):
            store.read(locate(store, lost.record()), page_with(b"", BLOCK_BYTES))
        sweep(store)
        assert store.stats().blocks == 1
        assert evict(store, EvictFilter(all=True)).evicted_blocks == 1
        store.check()


def test_a_lost_index_is_not_rebuilt_without_keys(lost: Encrypted) -> None:
    shutil.rmtree(lost.folder / "index")
    segments = on_disk(lost.folder / "segments")
    with refused(MissingKeyError):
        lost.open(encryption="as_it_is")
    assert on_disk(lost.folder / "segments") == segments


# --- rebuilding ----------------------------------------------------------------------------------


def test_a_rebuild_finds_blocks_and_skips_those_without_keys(encrypted: Encrypted) -> None:
    kept, gone = encrypted.record("a"), encrypted.record("b", namespace=digest("other"))
    with encrypted.open() as store:
        put(store, kept, gone)
        assert store.keys is not None
        store.keys.table.drop([scope_of(gone)])
    shutil.rmtree(encrypted.folder / "index")
    with encrypted.open() as store:
        assert stored_hashes(store, [kept, gone]) == {kept.block_hash}
        assert load(store, kept) == payload_of(kept)
        sweep(store)
        store.check()
        store.rebuild()
        store.check()
        assert load(store, kept) == payload_of(kept)


def test_verify_reads_encrypted_blocks(encrypted: Encrypted) -> None:
    records = [encrypted.record("a", position) for position in range(5)]
    with encrypted.open() as store:
        put(store, *records)
        assert verify(store).bad == 0
        number = locate(store, records[2]).extent.number
        size = locate(store, records[2]).extent_bytes
        change_bytes(segment_files(encrypted.folder)[0], number * size + 5000, flip)
        result = verify(store)
        assert (result.checked, result.by_reason) == (5, {"checksum": 1})
        assert verify(store).bad == 0


# --- names ---------------------------------------------------------------------------------------


def test_names_are_turned_back_and_depend_on_the_key() -> None:
    hashes = [digest("a"), digest("b")[:16], digest("c")]
    names = Names(b"k" * 32)
    hidden = names.hide(hashes)
    assert names.reveal(hidden) == hashes
    assert list(map(len, hidden)) == [32, 16, 32]
    assert not set(hidden) & set(Names(b"l" * 32).hide(hashes))
    assert names.hide([]) == []
    with refused(StorageError):
        names.hide([b"short"])


# --- through the worker --------------------------------------------------------------------------


def test_the_engine_knows_hashes_and_the_disk_only_names(harness: Harness, tmp_path: Path) -> None:
    options: dict[str, Any] = {"encryption": "on", "key_dir": str(tmp_path / "keys")}
    box, chain = Mailbox(harness.open(**options)), make_chain("a", 4)
    hashes = [each.block_hash for each in chain]
    assert all(done.ok for done in box.store(chain))
    assert box.lookup(hashes) == chain
    for done in box.load(chain):
        assert done.ok
        assert done.life in [*map(BlockLife.of, chain)]
        box.assert_right(done)
    box.client.close()
    data = on_disk(harness.folder)
    for record in chain:
        assert record.block_hash not in data
        assert payload_of_hash(record.block_hash)[:32] not in data
    box = Mailbox(harness.open(**options, tells_blocks=True))
    box.client.touch([TouchItem(hashes[0], time.time())])
    box.client.probe(hashes)
    (probed,) = box.take(ProbeDone)
    assert len(probed.ended_at) == len(chain)
    box.client.delete(hashes[1:2], "operator")
    (gone,) = box.take(Gone)
    assert (gone.hashes, gone.reason) == (hashes[1:2], "operator")
    assert box.lookup(hashes)[1] is None


def test_nothing_is_stored_while_the_keys_are_away_and_an_idle_store_resumes_by_itself(
    harness: Harness, tmp_path: Path
) -> None:
    keys, away = tmp_path / "keys", tmp_path / "away"
    box = Mailbox(harness.open(encryption="on", key_dir=str(keys)))
    known, new = make_chain("a", 4), make_chain("b", 4)
    assert all(done.ok for done in box.store(known))
    keys.rename(away)
    # Of the same namespace and hour: there is a key for them, which a restart would not find.
    assert {done.reason for done in box.store(new)} == {"io_error"}
    assert str(keys) in box.client.stats().store_error
    assert all(done.ok for done in box.load(known))
    away.rename(keys)
    wait_until(lambda: not box.client.stats().store_error)
    assert all(done.ok for done in box.store(new))


def test_no_hash_is_sent_to_the_worker_and_its_names_outlive_it(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, send = list[bytes](), FrameChannel.send

    def tell(channel: FrameChannel[Any], message: msgspec.Struct) -> None:
        sent.append(msgspec.msgpack.encode(message))
        send(channel, message)

    monkeypatch.setattr(FrameChannel, "send", tell)
    client = harness.open(encryption="on", key_dir=str(tmp_path / "keys"))
    box, chain = Mailbox(client), make_chain("a", 3)
    hashes = [each.block_hash for each in chain]
    box.store(chain)
    box.load(chain)
    box.lookup(hashes)
    client.probe(hashes)
    client.touch([TouchItem(each, time.time()) for each in hashes])
    client.delete(hashes[2:], "test")
    names = client.names.hide(hashes)
    client.close()
    data = b"".join(sent)
    assert [each in data for each in (*hashes, *names)] == [False] * 3 + [True] * 3
    assert client.names.hide(hashes) == names
    found = StoreControl(harness.folder, key_dir=str(tmp_path / "keys")).answer(NamesKey())
    assert Names(found["names_key"]).hide(hashes) == names


def test_an_engine_whose_master_key_is_lost_is_told_so_at_its_start(
    harness: Harness, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"encryption": "on", "key_dir": str(tmp_path / "keys")}
    harness.open(**options).close()
    [master] = (tmp_path / "keys").glob("*.master")
    master.rename(tmp_path / "elsewhere")
    with refused(MissingKeyError):
        harness.open(**options)
    harness.open(**options, master_key=str(tmp_path / "elsewhere"))
