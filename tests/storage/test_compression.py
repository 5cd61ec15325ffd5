"""Blocks compressed plane by plane: bit-exact, smaller on disk, and a miss where damaged."""

import os
import random
import shutil
import signal
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import FakeClock
from tests.storage.blocks import (
    CheckedStore,
    change_bytes,
    commit,
    flip,
    load,
    make_record,
    occupied_bytes,
    open_store,
    page_with,
    segment_files,
    sweep,
    verify,
)
from tests.storage.conftest import (
    PAGE_BYTES,
    Harness,
    Mailbox,
    lent_pages,
    make_chain,
    payload_of,
    wait_until,
)
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Ls
from tieredkv.storage.format.planes import Packed, Packing, pack, pays, unpack
from tieredkv.storage.format.record import CODEC_RAW, Located, payload_checksum
from tieredkv.storage.store import Store
from tieredkv.tier import Stored
from tieredkv.types import BlockRecord

BLOCK_BYTES = 32_768
KINDS = {2: (np.dtype("<u2"), 1), 4: (np.dtype("<u4"), 2)}


def kv_bytes(seed: int, size_bytes: int = BLOCK_BYTES, width: int = 2) -> bytes:
    """Return normally distributed numbers, like keys and values, as bfloat16 or float32."""
    numbers = np.random.default_rng(seed).standard_normal(size_bytes // width, np.float32)
    bits = numbers.view(np.uint32)
    return (bits if width == 4 else (bits >> 16).astype("<u2")).tobytes()


def block_of(record: BlockRecord) -> bytes:
    """Return the right bytes of a block, which can be compressed."""
    return kv_bytes(int.from_bytes(record.block_hash[:4], "big"), record.size_bytes)


def there_and_back(block: bytes, number: int) -> tuple[bytes, int]:
    """Pack and unpack a block; return the result and the length of its payload.

    A block that does not become smaller is not packed, and is returned as it is.
    """
    packed = pack(memoryview(block), number)
    if packed is None:
        return block, len(block)
    page = bytearray(len(block) + 64)
    assert unpack(packed.payload, number, memoryview(page)[: len(block)])
    assert not any(page[len(block) :]), "it wrote beyond the block"
    assert not any(packed.image[512 + len(packed.payload) :])
    return bytes(page[: len(block)]), len(packed.payload)


def put(store: Store, *records: BlockRecord, pages: Sequence[memoryview] = ()) -> list[bool]:
    """Store blocks as the worker does."""
    pages = pages or [page_with(block_of(record)) for record in records]
    packed = [pack_page(store, record, page) for record, page in zip(records, pages, strict=True)]
    writes = []
    for i, extent in enumerate(store.reserve(records, packed)):
        assert extent is not None
        writes.append(store.write(extent, records[i], pages[i], packed[i]))
    return commit(store, writes)


def pack_page(store: Store, record: BlockRecord, page: memoryview) -> Packed | None:
    return store.packing.pack(page[: record.size_bytes])


def open_packing(
    path: Path, clock: FakeClock | None = None, setting: str = "on", **options: Any
) -> CheckedStore:
    store = open_store(path, clock, **options)
    store.packing = Packing(setting, 2)
    return store


def located(store: CheckedStore, record: BlockRecord) -> Located:
    found = store.locate(record.block_hash)
    assert found is not None
    return found


# Bytes


GOLDEN_FRAME = bytes.fromhex("28b52ffd60000f4d0000103f3f0100fbf70116")  # 4,096 times 0x3f
LOW = [random.Random(i).randbytes(4096) for i in range(3)]


@pytest.mark.parametrize(("number", "low"), [(1, LOW[:1]), (2, LOW)])
def test_a_payload_has_its_golden_bytes(number: int, low: list[bytes]) -> None:
    """A plane that does not shrink is stored raw, which bit 31 of its length says."""
    block = b"".join(map(bytes, zip(*low, bytes([0x3F]) * 4096, strict=True)))
    lengths = {1: "0010008013000000", 2: "00100080001000800010008013000000"}
    golden = bytes.fromhex(lengths[number]) + b"".join(low) + GOLDEN_FRAME
    page = bytearray(len(block))
    assert unpack(memoryview(golden), number, memoryview(page))
    assert page == block
    packed = pack(memoryview(block), number)
    assert packed is not None
    assert (bytes(packed.payload), packed.codec) == (golden, number)


@pytest.mark.parametrize(("width", "ratio"), [(2, 1.44), (4, 1.17)])
def test_numbers_of_one_kind_get_smaller_and_come_back(width: int, ratio: float) -> None:
    number = KINDS[width][1]
    block = kv_bytes(1, 1 << 18, width)
    back, size = there_and_back(block, number)
    assert back == block
    assert len(block) / size > ratio


@given(st.sampled_from([1, 2]), st.binary(min_size=1, max_size=300), st.integers(1, 200))
def test_every_byte_pattern_comes_back(number: int, pattern: bytes, count: int) -> None:
    block = pattern * count
    assert there_and_back(block, number)[0] == block


@pytest.mark.parametrize("width", [2, 4])
def test_every_special_number_comes_back(width: int) -> None:
    """All 65,536 upper halves: NaNs with any payload, infinities, zeroes, subnormal numbers."""
    upper = np.arange(1 << 16, dtype="<u4")
    numbers = upper.astype("<u2") if width == 2 else upper << 16 | upper[::-1]
    block = np.concatenate([numbers, np.zeros_like(numbers)]).tobytes()
    back, size = there_and_back(block, KINDS[width][1])
    assert back == block
    assert size < len(block)


BAD_PAYLOADS = {
    "empty": b"",
    "cut in its lengths": bytes(7),
    "a plane missing": struct.pack("<2I", 4096 | 1 << 31, 0) + LOW[0],
    "a plane too short": struct.pack("<2I", 4095 | 1 << 31, 19) + LOW[0][1:] + GOLDEN_FRAME,
    "lengths beyond the end": struct.pack("<2I", 4096 | 1 << 31, 1 << 30) + LOW[0] + GOLDEN_FRAME,
    "bytes behind the end": struct.pack("<2I", 4096 | 1 << 31, 19) + LOW[0] + GOLDEN_FRAME + b"x",
    "two frames": struct.pack("<2I", 4096 | 1 << 31, 38) + LOW[0] + GOLDEN_FRAME * 2,
    "no frame": struct.pack("<2I", 4096 | 1 << 31, 19) + LOW[0] + bytes(19),
    "half a frame": struct.pack("<2I", 4096 | 1 << 31, 12) + LOW[0] + GOLDEN_FRAME[:12],
}


@pytest.mark.parametrize("name", BAD_PAYLOADS)
def test_a_bad_payload_is_refused_and_writes_nothing(name: str) -> None:
    page = bytearray(8192)
    assert not unpack(memoryview(BAD_PAYLOADS[name]), 1, memoryview(page))
    assert not any(page)


@pytest.mark.parametrize("claimed", [4097, 1 << 20, 1 << 40])
def test_a_frame_that_says_it_is_larger_than_the_page_takes_no_memory(claimed: int) -> None:
    frame = zstandard.ZstdCompressor(level=1).compress(bytes(8192))
    bomb = frame[:4] + b"\xe0" + claimed.to_bytes(8, "little") + frame[7:]
    assert zstandard.frame_content_size(bomb) == claimed
    page = bytearray(8192)
    payload = struct.pack("<2I", 4096 | 1 << 31, len(bomb)) + LOW[0] + bomb
    assert not unpack(memoryview(payload), 1, memoryview(page))
    assert not any(page)


def test_flipped_bits_of_a_payload_never_write_beyond_the_block() -> None:
    packed = pack(memoryview(kv_bytes(3, 8192)), 1)
    assert packed is not None
    chosen = random.Random(7)
    page = bytearray(8192 + 64)
    for _ in range(2000):
        payload = bytearray(packed.payload)
        for _ in range(chosen.randint(1, 3)):
            at = chosen.choice([chosen.randrange(8), chosen.randrange(len(payload))])
            payload[at] ^= 1 << chosen.randrange(8)
        unpack(memoryview(payload), 1, memoryview(page)[:8192])
    assert not any(page[8192:])


# The store


def test_a_compressed_block_takes_less_and_loads_bit_for_bit(tmp_path: Path) -> None:
    records = [make_record(position=i, size_bytes=BLOCK_BYTES) for i in range(6)]
    with open_packing(tmp_path) as store:
        assert all(put(store, *records))
        for record in records:
            assert load(store, record) == block_of(record)
            found = located(store, record)
            assert (found.codec, found.extent_bytes) == (1, 6 * 4096)
        stats = store.stats()
        assert 1.4 < stats.compression_ratio == 6 * BLOCK_BYTES / stats.bytes_live
        assert stats.compression_rate > 0 < stats.decompression_rate
        assert (verify(store).checked, verify(store).bad) == (6, 0)
        store.check()
    with open_store(tmp_path) as store:  # compressed blocks are read whatever the setting is
        assert [load(store, record) for record in records] == list(map(block_of, records))


def test_the_extent_of_a_compressed_block_is_as_documented(tmp_path: Path) -> None:
    record = make_record(size_bytes=BLOCK_BYTES)
    with open_packing(tmp_path) as store:
        put(store, record)
        found = located(store, record)
    (file,) = segment_files(tmp_path)
    extent = file.read_bytes()[found.extent.number * found.extent_bytes :][: found.extent_bytes]
    assert extent[:8] == b"TKVSLOT\3"
    assert not any(extent[8 + 219 : 512])
    payload = extent[512 : 512 + found.payload_bytes]
    assert not any(extent[512 + found.payload_bytes :])
    assert found.payload_checksum == payload_checksum(payload) == extent[208:224]
    assert extent[8 + 172] == 1
    low, high = struct.unpack_from("<2I", payload)
    assert (low, 8 + BLOCK_BYTES // 2 + high) == (BLOCK_BYTES // 2 | 1 << 31, len(payload))
    block = block_of(record)
    assert payload[8 : 8 + BLOCK_BYTES // 2] == block[::2]
    assert zstandard.decompress(payload[8 + BLOCK_BYTES // 2 :]) == block[1::2]


@pytest.mark.parametrize("size_bytes", [BLOCK_BYTES, 5001])
def test_what_does_not_shrink_is_stored_raw(tmp_path: Path, size_bytes: int) -> None:
    record = make_record(size_bytes=size_bytes)
    noise = random.Random(1).randbytes(size_bytes)
    with open_packing(tmp_path) as store:
        page = page_with(noise)
        packed = pack_page(store, record, page)
        assert packed is None
        (extent,) = store.reserve([record], [packed])
        assert extent is not None
        store.commit([store.write(extent, record, page, packed)])
        assert located(store, record).codec == CODEC_RAW
        assert load(store, record) == noise


def test_a_lost_index_is_made_again_from_compressed_extents_too(tmp_path: Path) -> None:
    records = [make_record(position=i, size_bytes=BLOCK_BYTES) for i in range(5)]
    with open_packing(tmp_path) as store:
        put(store, *records)
    with open_store(tmp_path) as store:
        extents = store.reserve([plain := make_record("raw", size_bytes=BLOCK_BYTES)])
        assert extents[0] is not None
        store.commit([store.write(extents[0], plain, page_with(block_of(plain)))])
    shutil.rmtree(tmp_path / "index")
    (tmp_path / "index").mkdir(mode=0o700)
    with open_packing(tmp_path) as store:
        for record in [*records, plain]:
            assert load(store, record) == block_of(record)
        store.check()


@pytest.mark.parametrize(("at", "reason"), [(512, "checksum"), (9000, "checksum"), (90, "header")])
def test_damage_of_a_compressed_block_is_a_miss(tmp_path: Path, at: int, reason: str) -> None:
    record = make_record(size_bytes=BLOCK_BYTES)
    with open_packing(tmp_path) as store:
        put(store, record)
        found = located(store, record)
        change_bytes(
            segment_files(tmp_path)[0], found.extent.number * found.extent_bytes + at, flip
        )
        assert verify(store, repair=False).by_reason == {reason: 1}
        if reason == "checksum":
            assert load(store, record) == reason
            assert load(store, record) is None


def test_a_payload_that_lies_under_a_right_checksum_is_a_miss(tmp_path: Path) -> None:
    """The lengths in the payload contradict the block, but its checksum is right."""
    record = make_record(size_bytes=BLOCK_BYTES)
    with open_packing(tmp_path) as store:
        page = page_with(block_of(record))
        packed = pack_page(store, record, page)
        assert packed is not None
        packed.payload[:8] = struct.pack("<2I", 1 << 30, 1 << 30)
        (extent,) = store.reserve([record], [packed])
        assert extent is not None
        store.commit([store.write(extent, record, page, packed)])
        assert load(store, record) == "codec"
        assert load(store, record) is None
        assert store.stats().faults == {"codec": 1}


def test_a_reused_extent_holds_nothing_of_the_block_before(tmp_path: Path) -> None:
    clock = FakeClock()
    long = make_record("long", size_bytes=BLOCK_BYTES, expires_at=clock.now() + 10)
    short = make_record("short", size_bytes=BLOCK_BYTES)
    with open_packing(tmp_path, clock) as store:
        put(store, long)
        found = located(store, long)
        first = segment_files(tmp_path)[0].read_bytes()[found.extent.number * found.extent_bytes :]
        tail = first[: 512 + found.payload_bytes][-64:]
        clock.advance(20)
        store.drop([long.block_hash], "request")
        page = page_with(block_of(short))
        page[1:4096:2] = bytes([0x3F]) * 2048  # makes the payload a little shorter
        packed = pack_page(store, short, page)
        assert packed is not None and len(packed.image) == found.extent_bytes
        assert len(packed.payload) < found.payload_bytes
        (extent,) = store.reserve([short], [packed])
        assert extent == found.extent
        store.commit([store.write(extent, short, page, packed)])
        assert tail not in segment_files(tmp_path)[0].read_bytes()


@pytest.mark.parametrize(
    ("sizes", "most_constant", "least_live"),
    [
        ((131_072, 262_144), 1 / 3, 0.85),
        pytest.param((65_536,), 1 / 3, 0.85, marks=pytest.mark.slow),
        ((32_768,), 0, 0.85),
        # An extent is a payload of 13 to 22 KiB, 512 bytes of header and on average 2 KiB of
        # padding to whole pages. So 0.88 of it is payload. The index of so small a store takes
        # another 0.06.
        pytest.param((32_768,), 1 / 3, 0.80, marks=pytest.mark.slow),
    ],
)
def test_ten_turnovers_of_unequal_sizes_stay_within_the_budget_and_dense(
    tmp_path: Path, sizes: tuple[int, ...], most_constant: float, least_live: float
) -> None:
    """The files use nearly all of the budget, and most of their bytes are payload."""
    budget, chosen = 12 << 20, random.Random(5)
    numbers = {size: kv_bytes(1, size) for size in sizes}
    with open_packing(tmp_path, budget_bytes=budget) as store:
        while store.stats().bytes_written < 10 * budget:
            count = range(store.stats().num_stored, store.stats().num_stored + 16)
            records = [make_record(f"{i}", size_bytes=chosen.choice(sizes)) for i in count]
            pages = [page_with(numbers[record.size_bytes]) for record in records]
            for page in pages:  # a part of a page repeats one number, which compresses better
                constant = 2 * int(chosen.random() * most_constant * len(page) / 2)
                page[:constant] = b"\0\x3f" * (constant // 2)
            assert all(put(store, *records, pages=pages))
            assert occupied_bytes(tmp_path) <= budget
        sweep(store)
        stats = store.stats()
        assert stats.bytes_live >= least_live * stats.bytes_files
        assert stats.bytes_files >= 0.9 * budget
        num_segments = len(list((tmp_path / "segments").iterdir()))
        assert num_segments > 2 if most_constant else num_segments == 1
        assert verify(store).bad == 0
        store.check()


# Deciding


def test_a_trial_needs_blocks_and_says_what_it_measured(tmp_path: Path) -> None:
    records = [make_record(position=i, size_bytes=BLOCK_BYTES) for i in range(32)]
    with open_packing(tmp_path, setting="auto") as store:
        put(store, *records[:31])
        assert store.compression_trial(2) is None
        put(store, records[31])
        decide = store.compression_trial(2)
        assert decide is not None
        assert not store.stats().is_compressing
        decide()
        trial = store.stats().compression_trial
        assert 1.4 < trial["ratio"] < 1.5
        assert trial["decode_rate"] > 0 < trial["read_rate"]
        assert store.compression_trial(2) is None


@pytest.mark.parametrize(
    ("ratio", "decode_gb_s", "num_threads", "expected"),
    [
        (1.46, 1.7, 16, True),  # the cores keep up, and the disk delivers 1.46 times as much
        (1.46, 1.7, 2, False),  # one core decodes more slowly than the disk reads raw blocks
        (1.05, 1.7, 16, False),  # compression saves hardly anything
    ],
)
def test_compression_pays_where_disk_and_cores_gain_a_tenth(
    ratio: float, decode_gb_s: float, num_threads: int, expected: bool
) -> None:
    assert pays(ratio, decode_gb_s * 1e9, 2.5e9, num_threads) is expected


@pytest.mark.parametrize("is_noise", [False, True])
def test_auto_compresses_on_a_slow_disk_what_compresses(tmp_path: Path, is_noise: bool) -> None:
    size_bytes = 1 << 18
    block = random.Random(1).randbytes(size_bytes) if is_noise else kv_bytes(1, size_bytes)
    packing = Packing("auto", 2)
    record = make_record(size_bytes=size_bytes)
    with open_store(tmp_path) as store:
        put(store, record)

        def read_block(_: Located, page: memoryview) -> None:
            page[:size_bytes] = block
            time.sleep(0.05)

        packing.decide([located(store, record)] * 4, read_block, 1)
    assert packing.is_on is not is_noise


# The worker


def worker_block(block_hash: bytes) -> bytes:
    return kv_bytes(int.from_bytes(block_hash[:4], "big"), PAGE_BYTES, 4)


def test_the_worker_compresses_what_it_stores_and_loads_it(harness: Harness) -> None:
    box = Mailbox(harness.open(compression="on", element_bytes=4, num_writers=2))
    chain = make_chain("a", 24)
    assert all(done.ok for done in box.store(chain, worker_block))
    assert all(done.ok for done in box.load(chain))
    for page_id, record in enumerate(chain):
        assert bytes(box.page(page_id)) == worker_block(record.block_hash)
    stats = box.client.stats()
    assert stats.bytes_live < 24 * PAGE_BYTES / 1.1
    assert (stats.compression, stats.is_compressing) == ("on", True)
    ((listed,),) = StoreControl(harness.folder).pages(Ls())
    assert (listed.bytes, listed.stored_bytes) == (24 * PAGE_BYTES, stats.bytes_live)


def test_auto_tries_what_is_stored_and_goes_on_either_way(harness: Harness) -> None:
    box = Mailbox(harness.open(compression="auto", element_bytes=4, sweep_interval_s=0.05))
    chain = make_chain("a", 40)
    assert all(done.ok for done in box.store(chain, worker_block))

    def has_decided() -> bool:
        box.load(chain[:1])
        return bool(box.client.stats().compression_trial)

    wait_until(has_decided)
    more = make_chain("b", 20)
    assert all(done.ok for done in box.store(more, worker_block))
    assert all(done.ok for done in box.load(more))
    for page_id, record in enumerate(more):
        assert bytes(box.page(page_id)) == worker_block(record.block_hash)


def test_what_was_acknowledged_survives_kills_while_blocks_are_compressed(harness: Harness) -> None:
    """Some blocks can be compressed and some cannot; the budget is too small for all of them."""

    def block(block_hash: bytes) -> bytes:
        return (worker_block if block_hash[0] % 3 else payload_of)(block_hash)

    budget = 3 << 20
    client = harness.open(
        compression="on", element_bytes=4, budget_bytes=budget, backoff_s=0.01, max_backoff_s=0.01
    )
    box = Mailbox(client)
    num_right, killed = 0, None

    def is_another_up() -> bool:
        return client.pid not in (None, killed)

    for life in range(6):
        wait_until(lambda: client.pid is not None)
        chain = make_chain(f"chain {life}", 40)
        box.fill(chain, block)
        client.store(lent_pages(chain))
        done = box.take(Stored, 3 * life)
        killed = client.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        done += box.take(Stored, len(chain) - len(done))
        # All may have been stored before the kill, which the client then has not noticed yet.
        wait_until(is_another_up)
        stored = {each.page_id for each in done if each.ok}
        right = {each.page_id for each in box.load(chain) if each.ok}
        assert stored <= right  # a block is loaded into the page that it was stored from
        for page_id in right:
            assert bytes(box.page(page_id)) == block(chain[page_id].block_hash)
        num_right += len(right)
        assert occupied_bytes(harness.folder) <= budget
    assert num_right
