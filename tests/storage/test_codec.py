from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.blocks import digest, make_record
from tieredkv.errors import CorruptBlockError, StorageError
from tieredkv.storage.codec import (
    HEADER_BYTES,
    Extent,
    Located,
    check_record,
    decode_header,
    decode_record,
    encode_header_into,
    encode_record,
    expiry_key,
    extent_bytes_for,
    is_header_of,
    lru_key,
)
from tieredkv.types import BlockRecord

GOLDEN = Located(
    BlockRecord(
        block_hash=bytes(range(32)),
        parent_hash=bytes(range(32, 64)),
        root=bytes(range(64, 96)),
        namespace=bytes(range(96, 128)),
        position=7,
        size_bytes=5000,
        retention="24h",
        computed_at=1.5,
        expires_at=86401.5,
        last_used=2.0,
        pinned_until=3.0,
        hits=9,
    ),
    Extent(segment=3, number=11),
    payload_bytes=5000,
    payload_checksum=bytes(range(16)),
)


def header_of(located: Located) -> bytes:
    buffer = bytearray(HEADER_BYTES)
    encode_header_into(buffer, located)
    return bytes(buffer)


def test_the_index_record_has_its_golden_bytes() -> None:
    assert encode_record(GOLDEN).hex() == (
        "974559e4ab2059b3000000001818f540959cc420000102030405060708090a0b0c0d0e0f10111213"
        "1415161718191a1b1c1d1e1fc420202122232425262728292a2b2c2d2e2f30313233343536373839"
        "3a3b3c3d3e3fc420404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f"
        "c420606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f07cd1388a332"
        "3468cb3ff8000000000000cb40f5181800000000cb4000000000000000cb40080000000000000992"
        "030bcd1388c410000102030405060708090a0b0c0d0e0f00"
    )


def test_the_extent_header_is_the_record_with_its_length_behind_a_magic() -> None:
    record = encode_record(GOLDEN)
    assert header_of(GOLDEN) == (b"TKVSLOT\x02\xe0\0\0\0" + record).ljust(4096, b"\0")


def test_the_secondary_keys_have_their_golden_bytes() -> None:
    assert expiry_key(GOLDEN.record).hex() == (
        "000000141dee4360000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    )
    assert lru_key(GOLDEN.record).hex() == (
        "606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f00000000002dc6c0"
        "fffffff8000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    )


digests = st.binary(min_size=1, max_size=32)
times = st.floats(min_value=0, max_value=1e12, allow_nan=False)
located_blocks = st.builds(
    Located,
    st.builds(
        BlockRecord,
        block_hash=digests,
        parent_hash=digests,
        root=digests,
        namespace=digests,
        position=st.integers(0, 2**32 - 1),
        size_bytes=st.integers(1, 2**31),
        retention=st.text(max_size=8),
        computed_at=times,
        expires_at=times,
        last_used=times,
        pinned_until=times,
        hits=st.integers(0, 2**32 - 1),
    ),
    st.builds(Extent, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
    st.integers(1, 2**31),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 255),
)


@given(located_blocks)
def test_records_and_headers_come_back_as_they_went_in(located: Located) -> None:
    check_record(located.record)
    assert decode_record(located.record.block_hash, encode_record(located)) == located
    assert decode_header(header_of(located)) == located


@given(located_blocks, times)
def test_a_header_belongs_to_its_block_whatever_was_claimed_later(
    located: Located, later: float
) -> None:
    claimed = msgspec.structs.replace(located.record, expires_at=later, last_used=later, hits=1)
    assert is_header_of(located, located._replace(record=claimed))
    other = msgspec.structs.replace(located.record, position=located.record.position + 1)
    assert not is_header_of(located, located._replace(record=other))


@given(st.data())
def test_a_flipped_bit_of_a_record_or_header_is_noticed(data: st.DataObject) -> None:
    record, header = bytearray(encode_record(GOLDEN)), bytearray(header_of(GOLDEN))
    bit = data.draw(st.integers(0, len(record) * 8 - 1))
    record[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptBlockError):
        decode_record(GOLDEN.record.block_hash, bytes(record))
    bit = data.draw(st.integers(0, (12 + len(record)) * 8 - 1))
    header[bit // 8] ^= 1 << bit % 8
    assert decode_header(bytes(header)) is None


def test_a_record_under_another_key_or_cut_short_is_corrupt() -> None:
    record = encode_record(GOLDEN)
    for key, data in ((digest("other"), record), (bytes(range(32)), record[:-1]), (b"", b"")):
        with pytest.raises(CorruptBlockError) as caught:
            decode_record(key, data)
        assert caught.value.reason == "record"


def test_lru_keys_put_the_tail_of_a_chain_before_its_head() -> None:
    head, tail = (lru_key(make_record(position=i)) for i in (0, 1))
    later = lru_key(make_record(position=5, last_used=1_800_000_000.000001))
    assert tail < head < later


@pytest.mark.parametrize(
    "changes",
    [
        {"block_hash": b""},
        {"namespace": bytes(33)},
        {"retention": "x" * 33},
        {"expires_at": float("inf")},
        {"last_used": float("nan")},
        {"size_bytes": 0},
        {"size_bytes": 1 << 32},
        {"position": -1},
    ],
)
def test_a_block_that_the_format_cannot_hold_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(StorageError):
        check_record(make_record(**changes))


def test_extents_are_a_header_and_the_padded_payload() -> None:
    assert [extent_bytes_for(size) for size in (1, 4096, 4097)] == [8192, 8192, 12288]
