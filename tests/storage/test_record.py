"""Records and extent headers come back as they went in, and damage to them is noticed."""

import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from tests.golden import refused
from tests.storage.blocks import RETENTIONS, digest, make_record
from tieredkv.errors import CorruptBlockError, StorageError
from tieredkv.operate.table import RECORD
from tieredkv.storage.format.header import (
    Encryption,
    decode_encryption,
    decode_header,
    encode_header_into,
    is_header_of,
)
from tieredkv.storage.format.record import (
    HEADER_BYTES,
    RECORD_BYTES,
    Extent,
    Located,
    Retentions,
    check_record,
    decode_record,
    encode_record,
    expiry_of,
    extent_bytes_for,
    identity_of,
    times_of,
)
from tieredkv.storage.index.entries import expiry_key, lru_key
from tieredkv.types import BlockRecord

NAMES = Retentions(["24h", "a week", "x" * 32])
HOW = Encryption(b"k" * 8, b"n" * 12, b"t" * 16)

u8, u16, u32 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32))
times = st.floats(min_value=0, max_value=1e12, allow_nan=False)


@st.composite
def located_blocks(draw: st.DrawFn) -> Located:
    """Draw an entry that the format can hold."""
    size = draw(st.sampled_from([16, 32]))
    hashes = st.binary(min_size=size, max_size=size)
    record = st.builds(
        BlockRecord,
        block_hash=hashes,
        parent_hash=hashes,
        root=hashes,
        namespace=st.binary(min_size=32, max_size=32),
        position=u32,
        size_bytes=st.integers(1, 2**31),
        retention=st.sampled_from(["", *NAMES.names]),
        computed_at=times,
        expires_at=times,
        last_used=times,
        pinned_until=times,
        hits=u32,
        kind=u8,
        part=u32,
        num_parts=st.integers(1, 2**16 - 1),
        page_form=u8,
    )
    extent = st.builds(Extent, u32, u32)
    checksum = st.binary(min_size=16, max_size=16)
    return draw(st.builds(Located, record, extent, u32, checksum, u8))


SOME = Located(make_record(hits=9), Extent(3, 11), 5000, bytes(range(16)))


def header_of(located: Located, how: Encryption | None = None) -> bytes:
    buffer = bytearray(HEADER_BYTES)
    encode_header_into(buffer, located, NAMES, how)
    return bytes(buffer)


def flipped(data: bytes, bit: int) -> bytes:
    """Return bytes with one bit changed."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@given(located_blocks())
def test_records_and_headers_come_back_as_they_went_in(located: Located) -> None:
    check_record(located.record, NAMES)
    key, sealed = located.record.block_hash, encode_record(located, NAMES)
    assert (len(sealed), sealed[219:]) == (RECORD_BYTES, bytes(21))
    assert decode_record(key, sealed, NAMES) == located
    assert expiry_of(key, sealed) == located.record.expires_at
    unnamed = located._replace(record=msgspec.structs.replace(located.record, retention=""))
    assert decode_record(key, sealed) == unnamed
    header = header_of(located, HOW)
    assert (decode_header(header, NAMES), decode_encryption(header)) == (located, HOW)


@given(located_blocks(), times)
def test_a_header_belongs_to_its_block_whatever_was_claimed_later(
    located: Located, later: float
) -> None:
    claimed = msgspec.structs.replace(located.record, expires_at=later, last_used=later, hits=1)
    assert is_header_of(located, located._replace(record=claimed))
    for name in ("position", "part", "kind", "page_form", "num_parts", "size_bytes"):
        more = {name: getattr(located.record, name) ^ 1}
        other = msgspec.structs.replace(located.record, **more)
        assert not is_header_of(located, located._replace(record=other))
    assert not is_header_of(None, located)


@given(st.data())
def test_a_flipped_bit_of_a_record_or_header_is_noticed(data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, RECORD_BYTES * 8 - 1))
    with pytest.raises(CorruptBlockError):
        decode_record(SOME.record.block_hash, flipped(encode_record(SOME, NAMES), bit))
    bit = data.draw(st.integers(0, (8 + RECORD_BYTES) * 8 - 1))
    assert decode_header(flipped(header_of(SOME), bit)) is None


def sealed_again(body: bytes) -> bytes:
    """Return a body under a right seal, as somebody can make it who may write to the folder."""
    return xxh3_64_digest(body) + body


@pytest.mark.parametrize(
    "change",
    [
        lambda it: it[:-1],
        lambda it: it + b"\0",
        lambda it: b"",
        lambda it: bytes(RECORD_BYTES),
        lambda it: sealed_again(it[8:-1]),
        lambda it: sealed_again(it[8:] + b"\0"),
        lambda it: sealed_again(it[8:175] + b"\x10" + it[176:]),
        lambda it: sealed_again(it[8:175] + b"\xff" + it[176:]),
        lambda it: sealed_again(it[8:16] + digest("other") + it[48:]),
    ],
    ids=["cut", "longer", "empty", "zeroes", "short", "long", "half hash", "no hash", "other"],
)
def test_bytes_that_are_no_record_of_their_key_are_the_damage_of_one_record(change: Any) -> None:
    key, data = SOME.record.block_hash, change(encode_record(SOME, NAMES))
    assert expiry_of(key, data) is None
    with pytest.raises(CorruptBlockError) as caught:
        decode_record(key, data, NAMES)
    assert caught.value.reason == "record"


def test_a_record_under_another_key_is_damage() -> None:
    data = encode_record(SOME, NAMES)
    for key in (digest("other"), SOME.record.block_hash[:16], SOME.record.block_hash[:31], b""):
        with pytest.raises(CorruptBlockError):
            decode_record(key, data)


@pytest.mark.parametrize("version", [0, 1, 2, 4, 255])
def test_a_header_of_another_version_is_none(version: int) -> None:
    header = header_of(SOME)
    assert decode_header(header[:7] + bytes([version]) + header[8:]) is None


def test_names_of_retention_policies_are_numbers_in_the_records() -> None:
    for number, name in enumerate(NAMES.names):
        record = msgspec.structs.replace(SOME.record, retention=name)
        sealed = encode_record(SOME._replace(record=record), NAMES)
        assert sealed[174] == number
        longer, none = Retentions([*NAMES.names, "7d"]), Retentions()
        for names, known in ((NAMES, name), (longer, name), (none, "")):
            assert decode_record(record.block_hash, sealed, names).record.retention == known
    with refused(StorageError):
        encode_record(SOME, Retentions(["7d"]))


@given(located_blocks())
def test_times_are_read_from_a_record_that_was_checked(located: Located) -> None:
    record = located.record
    wanted = record.expires_at, record.computed_at, record.last_used
    assert times_of(encode_record(located, NAMES)) == wanted


@given(located_blocks(), st.data())
def test_what_a_payload_is_authenticated_with_is_every_field_that_never_changes(
    located: Located, data: st.DataObject
) -> None:
    record = located.record

    def identity(codec: int = located.codec, size: int = 7, **changes: Any) -> bytes:
        return identity_of(msgspec.structs.replace(record, **changes), codec, size)

    before = identity()
    claims: dict[str, Any] = dict.fromkeys(("expires_at", "last_used", "pinned_until"), 5.0)
    assert identity(hits=3, retention="", **claims) == before
    name = data.draw(st.sampled_from(["block_hash", "parent_hash", "root", "namespace"]))
    digests = bytearray(getattr(record, name))
    digests[data.draw(st.integers(0, len(digests) - 1))] ^= 1
    other: dict[str, Any] = {name: bytes(digests)}
    changed = [
        identity(**other),
        identity(codec=(located.codec + 1) % 256),
        identity(size=8),
        identity(computed_at=record.computed_at + 1e6),
    ]
    for name, bits in (("position", 32), ("part", 32), ("kind", 8), ("page_form", 8)):
        changed.append(identity(**{name: getattr(record, name) ^ 1 << bits - 1}))
    changed.append(identity(num_parts=record.num_parts ^ 1 << 15))
    changed.append(identity(size_bytes=record.size_bytes ^ 1))
    if len(record.block_hash) == 16:
        wider: dict[str, Any] = {
            it: getattr(record, it) + bytes(16) for it in ("block_hash", "parent_hash", "root")
        }
        changed.append(identity(**wider))
    assert len({before, *changed}) == 1 + len(changed)


@given(located_blocks())
def test_numpy_reads_the_fields_where_the_record_has_them(located: Located) -> None:
    [row] = np.frombuffer(encode_record(located, NAMES), RECORD)
    it = located.record
    for name in ("expires_at", "computed_at", "last_used", "pinned_until", "position", "part"):
        assert row[name] == getattr(it, name)
    for name in ("size_bytes", "hits", "page_form", "num_parts"):
        assert row[name] == getattr(it, name)
    for name in ("block_hash", "parent_hash"):
        numbers = struct.unpack(">4Q", getattr(it, name).ljust(32, b"\0"))
        assert tuple(row[name].tolist()) == numbers
    assert (row["root"].tobytes(), row["namespace"].tobytes()) == (
        it.root.ljust(32, b"\0"),
        it.namespace,
    )
    assert (row["segment"], row["extent"]) == located.extent
    assert (row["payload_bytes"], row["codec"]) == (located.payload_bytes, located.codec)
    assert (row["page_kind"], row["hash_bytes"]) == (it.kind, len(it.block_hash))
    assert row["payload_checksum"].tobytes() == located.payload_checksum


def test_lru_keys_put_the_tail_of_a_chain_before_its_head() -> None:
    head, tail = (lru_key(make_record(position=i)) for i in (0, 1))
    later = lru_key(make_record(position=5, last_used=1_800_000_000.000001))
    assert tail < head < later


def test_the_secondary_keys_have_their_golden_bytes() -> None:
    record = make_record(
        block_hash=bytes(range(32)),
        namespace=bytes(range(96, 128)),
        position=7,
        expires_at=86401.5,
        last_used=2.0,
        pinned_until=3.0,
    )
    assert expiry_key(record).hex() == (
        "000000141dee4360000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    )
    assert lru_key(record).hex() == (
        "606162636465666700000000002dc6c0fffffff8"
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"block_hash": b""},
        {"block_hash": bytes(31)},
        {"root": bytes(16)},
        {"parent_hash": bytes(33)},
        {"namespace": bytes(33)},
        {"retention": "in_memory"},
        {"expires_at": float("inf")},
        {"last_used": float("nan")},
        {"size_bytes": 0},
        {"size_bytes": 1 << 32},
        {"position": -1},
        {"position": 1 << 32},
        {"part": 1 << 32},
        {"kind": 256},
        {"page_form": 256},
        {"num_parts": 0},
        {"num_parts": 1 << 16},
        {"hits": 1 << 32},
    ],
)
def test_a_block_that_the_format_cannot_hold_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(StorageError):
        check_record(make_record(**changes), RETENTIONS)


def test_extents_are_a_header_and_the_padded_payload() -> None:
    assert [extent_bytes_for(size) for size in (1, 4096, 4097)] == [8192, 8192, 12288]
