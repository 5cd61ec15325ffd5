"""Tables of blocks say what the records say, read by parts and without LMDB."""

import itertools
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from tests.golden import refused
from tests.storage.blocks import change_bytes, digest, make_record, told_by_engine
from tieredkv.errors import CorruptIndexError
from tieredkv.operate.ram import RamBlocks
from tieredkv.operate.table import TIER_BITS, BlockTable, Kind, TableReader
from tieredkv.storage import index_pages
from tieredkv.storage.codec import Extent, Located, encode_record
from tieredkv.storage.index import PAGE_BYTES, Index
from tieredkv.storage.index_pages import DATA_FILE, Part
from tieredkv.types import Tier


def located(rnd: random.Random, number: int) -> Located:
    """Return an entry; numbers and names have all the lengths that msgpack tells apart."""
    size = rnd.choice([16, 32])

    def some(name: str) -> bytes:
        return digest(name)[:size]

    def count(most: int) -> int:
        return rnd.randrange(1, rnd.choice([127, 255, 1 << 16, most]))

    record = make_record(
        position=count(1 << 31),
        block_hash=some(f"{number}"),
        parent_hash=some(f"parent {rnd.randrange(10)}"),
        root=some("root"),
        namespace=digest(f"namespace {rnd.randrange(3)}")[: rnd.choice([16, 32])],
        size_bytes=count(1 << 31),
        retention=rnd.choice(["24h", "x", "y" * 32]),
        computed_at=rnd.choice([rnd.random() * 1e9, 5]),
        hits=count(1 << 31),
    )
    extent = Extent(count(1 << 31), count(1 << 31))
    return Located(record, extent, count(1 << 31), digest("checksum")[:16], rnd.randrange(6))


def table_of(*entries: tuple[bytes, bytes]) -> BlockTable:
    """Read sealed records by their keys, in the order of these."""
    pieces = list(itertools.chain(*entries))
    ends = np.cumsum([0, *map(len, pieces)])
    reader = TableReader()
    data = np.frombuffer(b"".join(pieces), np.uint8)
    reader.add(Part(data, ends[:-1:2], ends[1:-1:2], ends[2::2], None))
    return reader.table


def sealed(entry: Located) -> tuple[bytes, bytes]:
    """Return an entry as the index has it."""
    return entry.record.block_hash, encode_record(entry)


def told(table: BlockTable) -> list[tuple[object, ...]]:
    """Return the fields of each row."""
    return [
        (key, rest, parent, table.kinds[kind], *others)
        for key, rest, parent, kind, *others in table.blocks.tolist()
    ]


def expected(entry: Located) -> tuple[object, ...]:
    """Return the fields that an entry has in a row."""
    it = entry.record
    start, parent = (each[:16].ljust(16, b"\0") for each in (it.block_hash, it.parent_hash))
    return (
        *(int.from_bytes(each, "big") for each in (start[:8], start[8:], parent[:8])),
        Kind(it.root, it.namespace, it.retention),
        *(it.position, it.size_bytes, entry.payload_bytes, it.hits),
        *(it.computed_at, it.expires_at, it.last_used),
        TIER_BITS[Tier.DISK],
    )


def some_entries(seed: int, count: int) -> list[Located]:
    """Return entries in the order of their hashes."""
    rnd = random.Random(seed)
    return sorted((located(rnd, i) for i in range(count)), key=lambda it: it.record.block_hash)


def test_a_table_says_what_the_records_say() -> None:
    entries = some_entries(1, 500)
    assert told(table_of(*map(sealed, entries))) == list(map(expected, entries))


def test_bytes_that_are_no_record_of_their_key_are_left_out() -> None:
    first, second, third, last = some_entries(2, 4)
    endless = third._replace(record=replace(third.record, expires_at=math.inf))
    key, record = sealed(second)
    bad = [b"", record[:-1], b"\x95" * 30, random.Random(2).randbytes(220), sealed(last)[1]]
    table = table_of(sealed(first), *((key, each) for each in bad), sealed(endless), sealed(last))
    assert told(table) == [expected(first), expected(last)]


def test_keys_out_of_order_are_damage() -> None:
    first, second = map(sealed, some_entries(5, 2))
    with refused(CorruptIndexError):
        table_of(second, first)


def test_expired_blocks_can_be_left_out() -> None:
    table = table_of(sealed(Located(make_record(now=0.0), Extent(1, 1), 1, b"c" * 16)))
    assert [len(table.unexpired(now).blocks) for now in (0.0, 86_399.0, 86_400.0)] == [1, 1, 0]


def test_tables_are_joined_and_what_both_have_is_there_once() -> None:
    on_disk, in_ram = some_entries(6, 60)[:40], some_entries(6, 60)[20:]
    parts = [[Tier.DEVICE, Tier.HOST], [Tier.HOST]]
    told_of = [told_by_engine((replace(it.record, hits=7), parts[0])) for it in in_ram[:30]]
    told_of += [told_by_engine((it.record, parts[1]), (it.record, ())) for it in in_ram[30:]]
    joined = table_of(*map(sealed, on_disk)).joined(RamBlocks.of(told_of).table)
    rows = {row[:2]: row for row in told(joined)}
    assert [*rows] == sorted(rows) and len(rows) == len(joined.blocks) == 60
    for place, entry in enumerate(some_entries(6, 60)):
        row = rows[expected(entry)[:2]]
        ram_bits = 0 if place < 20 else 3 if place < 50 else 2
        assert row[-1] == ram_bits + (TIER_BITS[Tier.DISK] if place < 40 else 0)
        if place < 40:
            assert row[:-1] == expected(entry)[:-1]
        else:
            wanted = replace(entry.record, hits=7) if place < 50 else entry.record
            assert row[:-1] == expected(entry._replace(record=wanted, payload_bytes=0))[:-1]


@contextmanager
def opened(folder: Path) -> Iterator[Index]:
    """Open a new index."""
    (folder / DATA_FILE).touch()
    index = Index(str(folder), sync=False)
    yield index
    index.close()


def test_an_empty_index_has_one_empty_part(tmp_path: Path) -> None:
    with opened(tmp_path) as index:
        part = index.part("blocks", b"")
    assert (len(part.starts), part.next_key) == (0, None)


def insert(index: Index, entries: list[Located]) -> None:
    with index.writing() as txn:
        for entry in entries:
            txn.insert(entry)


@pytest.mark.parametrize("count", [1, 30, 3000])
def test_parts_have_every_entry_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(index_pages, "_PART_BRANCHES", 1)
    rnd = random.Random(3)
    entries = [located(rnd, i) for i in range(count)]
    reader, num_parts = TableReader(), 1
    with opened(tmp_path) as index:
        insert(index, entries)
        reader.add(part := index.part("blocks", b""))
        while part.next_key is not None:
            # New blocks move the borders of pages.
            insert(index, [located(rnd, 10_000 * num_parts + i) for i in range(100)])
            reader.add(part := index.part("blocks", part.next_key))
            num_parts += 1
    assert (num_parts > 2) == (count == 3000)
    known = {row[:2] for row in told(reader.table)}
    assert len(known) == len(reader.table.blocks)
    assert {expected(entry)[:2] for entry in entries} <= known


@pytest.mark.parametrize(("at", "num_bytes"), [(0, 1), (10, 1), (12, 2), (14, 2), (16, 2)])
def test_a_damaged_page_is_named(tmp_path: Path, at: int, num_bytes: int) -> None:
    rnd, file = random.Random(4), tmp_path / DATA_FILE
    with opened(tmp_path) as index:
        insert(index, [located(rnd, i) for i in range(100)])
        page = index.part("blocks", b"").data[:PAGE_BYTES].tobytes()
        place = file.read_bytes().index(page)
        change_bytes(file, place + at, lambda _: b"\xff" * num_bytes, num_bytes)
        with refused(CorruptIndexError):
            index.part("blocks", b"")
        change_bytes(file, place, lambda _: page, PAGE_BYTES)
        assert len(index.part("blocks", b"").starts) == 100
