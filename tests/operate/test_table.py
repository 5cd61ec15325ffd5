"""Tables of blocks say what the records say."""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.storage.blocks import digest, make_record, told_by_engine
from tieredkv.operate.ram import RamBlocks
from tieredkv.operate.table import TIER_BITS, BlockKind, BlockTable, TableReader
from tieredkv.storage.format.record import Extent, Located, Retentions, encode_record
from tieredkv.storage.index.environment import Index
from tieredkv.storage.index.pages import DATA_FILE
from tieredkv.storage.worker.operators import sound_records
from tieredkv.types import Tier

NAMES = Retentions(["24h", "x", "y" * 32])


def located(rnd: random.Random, number: int, sizes: Sequence[int] = (16, 32)) -> Located:
    """Return an entry with numbers of all lengths, and with hashes of one of some sizes."""
    size = rnd.choice(sizes)

    def some(name: str) -> bytes:
        return digest(name)[:size]

    def count(most: int) -> int:
        return rnd.randrange(1, rnd.choice([127, 255, 1 << 16, most]))

    record = make_record(
        position=count(1 << 31),
        block_hash=some(f"{number}"),
        parent_hash=some(f"parent {rnd.randrange(10)}"),
        root=some("root"),
        namespace=digest(f"namespace {rnd.randrange(3)}"),
        size_bytes=count(1 << 31),
        retention=rnd.choice(NAMES.names),
        computed_at=rnd.choice([rnd.random() * 1e9, 5]),
        hits=count(1 << 31),
    )
    extent = Extent(count(1 << 31), count(1 << 31))
    return Located(record, extent, count(1 << 31), digest("checksum")[:16], rnd.randrange(6))


def table_of(*entries: tuple[bytes, bytes]) -> BlockTable:
    """Read sealed records by their keys, in the order of these."""
    reader = TableReader()
    reader.add(sound_records(entries), NAMES.names)
    return reader.table


def sealed(entry: Located) -> tuple[bytes, bytes]:
    """Return an entry as the index has it."""
    return entry.record.block_hash, encode_record(entry, NAMES)


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
        BlockKind(it.root, it.namespace, it.retention),
        *(it.position, it.size_bytes, entry.payload_bytes, it.hits),
        *(it.computed_at, it.expires_at, it.last_used),
        it.kind,
        TIER_BITS[Tier.DISK],
    )


def some_entries(seed: int, count: int, *sizes: int) -> list[Located]:
    """Return entries in the order of their hashes."""
    rnd, sizes = random.Random(seed), sizes or (16, 32)
    entries = (located(rnd, number, sizes) for number in range(count))
    return sorted(entries, key=lambda it: it.record.block_hash)


def test_a_table_says_what_the_records_say() -> None:
    entries = some_entries(1, 500)
    assert told(table_of(*map(sealed, entries))) == list(map(expected, entries))


def numbered(number: int, **changes: Any) -> Located:
    """Return an entry whose hash sorts by a number."""
    record = make_record(block_hash=bytes([number]) * 32, **changes)
    return Located(record, Extent(1, number), 1, b"c" * 16)


def test_bytes_that_are_no_record_of_their_key_are_left_out() -> None:
    first, endless, last = numbered(0), numbered(7, expires_at=math.inf), numbered(9)
    record = encode_record(last, NAMES)
    bad = [b"", record[:-1], record + b"\0", random.Random(2).randbytes(240), record]
    entries = [(bytes([1 + place]) * 32, data) for place, data in enumerate(bad)]
    entries += [sealed(endless), (bytes([8]) * 20, record), (last.record.block_hash[:16], record)]
    others = [sealed(last), (bytes([10]) * 64, record)]
    table = table_of(sealed(first), *entries, *others)
    assert told(table) == [expected(first), expected(last)]
    assert told(table_of(entries[0])) == told(table_of()) == []


def test_expired_blocks_can_be_left_out() -> None:
    table = table_of(sealed(numbered(1, now=0.0)))
    assert [len(table.unexpired(now).blocks) for now in (0.0, 86_399.0, 86_400.0)] == [1, 1, 0]


@pytest.mark.parametrize("size", [16, 32])
def test_tables_are_joined_and_what_both_have_is_there_once(size: int) -> None:
    entries = some_entries(6, 60, size)
    on_disk, in_ram = entries[:40], entries[20:]
    parts = [[Tier.DEVICE, Tier.HOST], [Tier.HOST]]
    told_of = [told_by_engine((replace(it.record, hits=7), parts[0])) for it in in_ram[:30]]
    told_of += [told_by_engine((it.record, parts[1]), (it.record, ())) for it in in_ram[30:]]
    joined = table_of(*map(sealed, on_disk)).joined(RamBlocks(told_of).table)
    rows = {row[:2]: row for row in told(joined)}
    assert [*rows] == sorted(rows) and len(rows) == len(joined.blocks) == 60
    for place, entry in enumerate(entries):
        row = rows[expected(entry)[:2]]
        ram_bits = 0 if place < 20 else 3 if place < 50 else 2
        assert row[-1] == ram_bits + (TIER_BITS[Tier.DISK] if place < 40 else 0)
        if place < 40:
            assert row[:-1] == expected(entry)[:-1]
        else:
            wanted = replace(entry.record, hits=7) if place < 50 else entry.record
            assert row[:-1] == expected(entry._replace(record=wanted, payload_bytes=0))[:-1]


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """A new index."""
    (tmp_path / DATA_FILE).touch()
    with closing(Index(str(tmp_path), sync=False, retentions=NAMES)) as index:
        yield index


def insert(index: Index, entries: Sequence[Located]) -> None:
    with index.writing() as txn:
        for entry in entries:
            txn.insert(entry)


def test_a_walk_in_steps_has_every_entry_once_while_others_come(index: Index) -> None:
    rnd = random.Random(3)
    entries = [located(rnd, number) for number in range(300)]
    insert(index, entries)
    reader, start, num_steps = TableReader(), b"", 0
    while True:
        with index.reading() as txn:
            found = [*islice(txn.records(start), 64)]
        if not found:
            break
        reader.add(sound_records(found), NAMES.names)
        start = found[-1][0] + b"\0"
        num_steps += 1
        insert(index, [located(rnd, 10_000 * num_steps + number) for number in range(10)])
    known = {row[:2] for row in told(reader.table)}
    assert len(known) == len(reader.table.blocks)
    assert {expected(entry)[:2] for entry in entries} <= known
    assert num_steps >= 5
