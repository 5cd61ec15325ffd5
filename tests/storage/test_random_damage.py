"""After thousands of random flips, cuts, swaps and older copies, every load is right or a miss."""

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes import FakeClock
from tests.levels import few
from tests.storage.blocks import (
    BUDGET_BYTES,
    CheckedStore,
    change_bytes,
    digest,
    load,
    make_record,
    occupied_bytes,
    open_store,
    payload_of,
    put,
    segment_files,
    sweep,
    verify,
)
from tests.storage.conftest import NUM_PAGES, Harness, Mailbox, lent_pages, wait_until
from tests.storage.test_faults import plain_index
from tieredkv.storage.format.record import HEADER_BYTES, Located
from tieredkv.tier import Stored
from tieredkv.types import BlockRecord

pytestmark = pytest.mark.e2e

START = 1_800_000_000.0
SIZES_BYTES = (8192, 8100, 4096)
CHAIN_LENGTH = 16
USED_HEADER_BYTES = 256


def chain(name: str, *, at: float = START) -> list[BlockRecord]:
    """Return the records of a chain. Its name decides which of three sizes its blocks have."""
    size = SIZES_BYTES[sum(name.encode()) % 3]
    return [make_record(name, i, now=at, size_bytes=size) for i in range(CHAIN_LENGTH)]


class Base:
    """Two copies of a closed store: `now`, and `old`, which is some changes older.

    `versions` has every version of a block that was ever stored, by hash.
    """

    def __init__(self, folder: Path) -> None:
        self.now, self.old = folder / "now", folder / "old"
        first = [chain(f"first {i}") for i in range(6)]
        second = [chain(f"second {i}", at=START + 1) for i in range(4)]
        again = [chain(f"first {i}", at=START + 2)[::2] for i in range(3)]
        self.versions: dict[bytes, list[BlockRecord]] = {}
        for record in [each for blocks in (*first, *second, *again) for each in blocks]:
            self.versions.setdefault(record.block_hash, []).append(record)
        clock = FakeClock(START + 10)
        with open_store(self.now, clock) as store:
            for blocks in first:
                assert all(put(store, *blocks))
            store.drop([each.block_hash for each in first[5]], "request")
            sweep(store)
        shutil.copytree(self.now, self.old)
        with open_store(self.now, clock) as store:
            store.drop([each.block_hash for each in first[4]], "request")
            for blocks in (*second, *again):
                assert all(put(store, *blocks))
            sweep(store)
            self.located = [found for key in self.versions if (found := store.locate(key))]

    def copy_to(self, target: Path) -> Path:
        shutil.rmtree(target, ignore_errors=True)
        return Path(shutil.copytree(self.now, target))


@pytest.fixture(scope="module")
def base(ram_path: Path) -> Base:
    return Base(ram_path)


def file_of(store: Path, located: Located) -> Path:
    name = f"{located.extent.segment:08d}-{located.extent_bytes}.seg"
    return store / "segments" / name


def is_right(base: Base, store: CheckedStore, block_hash: bytes) -> bool:
    """Load a block; return whether it is there. Bytes that were never stored fail the test."""
    located = store.locate(block_hash)
    if located is None:
        return False
    assert located.record.block_hash == block_hash
    known = [each for each in base.versions[block_hash] if is_same(each, located.record)]
    assert known, "the record of another block is served"
    data = load(store, known[0])
    assert not isinstance(data, bytes) or data == payload_of(known[0]), "wrong bytes are served"
    return isinstance(data, bytes)


def is_same(one: BlockRecord, other: BlockRecord) -> bool:
    """Return whether two records are of the same version of a block; times of use may differ."""
    names = ("block_hash", "parent_hash", "root", "namespace", "position", "computed_at")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def assert_recovers(base: Base, folder: Path) -> set[bytes]:
    """Open a damaged store, load all blocks, repair it and use it; return the blocks loaded."""
    with open_store(folder, FakeClock(START + 20)) as store:
        right = {key for key in base.versions if is_right(base, store, key)}
        verify(store)
        assert verify(store).bad == 0, "a second look finds what the first one left"
        sweep(store)
        store.check()
        fresh = [each for i in range(3) for each in chain(f"fresh {i}", at=START + 20)]
        assert all(put(store, *fresh))
        for record in fresh:
            assert load(store, record) == payload_of(record)
        for key in base.versions:
            is_right(base, store, key)
        store.check()
    assert occupied_bytes(folder) <= BUDGET_BYTES
    return right


def flip_bit(path: Path, at: int, bit: int) -> None:
    change_bytes(path, at, lambda data: bytes([data[0] ^ 1 << bit]))


def test_three_thousand_flipped_bits_of_extents_cost_the_blocks_they_hit(
    base: Base, ram_path: Path
) -> None:
    random_ = random.Random(1)
    num_lost = 0
    for _ in range(30):
        folder = base.copy_to(ram_path / "store")
        flipped: dict[bytes, set[int]] = {}
        for _ in range(100):
            located = random_.choice(base.located)
            in_header = random_.random() < 0.5
            start = 0 if in_header else HEADER_BYTES
            size = USED_HEADER_BYTES if in_header else located.payload_bytes
            at, bit = start + random_.randrange(size), random_.randrange(8)
            extent_at = located.extent.number * located.extent_bytes
            flip_bit(file_of(folder, located), extent_at + at, bit)
            flipped.setdefault(located.record.block_hash, set()).symmetric_difference_update(
                {8 * at + bit}
            )
        right = assert_recovers(base, folder)
        for located in base.located:
            bits = flipped.get(located.record.block_hash, set())
            if not bits:
                assert located.record.block_hash in right, "an undamaged block is lost"
            elif max(bits) >= 8 * HEADER_BYTES:
                assert located.record.block_hash not in right
                num_lost += 1
    assert num_lost > 500


# --- cuts, swaps, copies ----------------------------------------------------------------------


def cut_a_segment(base: Base, store: Path, random_: random.Random) -> None:
    file = random_.choice(segment_files(store))
    os.truncate(file, random_.randrange(file.stat().st_size + 1))


def swap_two_extents(base: Base, store: Path, random_: random.Random) -> None:
    one, other = _two_of_a_size(base, random_)
    here, there = _extent(store, one), _extent(store, other)
    change_bytes(
        file_of(store, one), one.extent.number * one.extent_bytes, lambda _: there, len(here)
    )
    at = other.extent.number * other.extent_bytes
    change_bytes(file_of(store, other), at, lambda _: here, len(there))


def copy_a_extent_over_another(base: Base, store: Path, random_: random.Random) -> None:
    one, other = _two_of_a_size(base, random_)
    data, at = _extent(store, one), other.extent.number * other.extent_bytes
    change_bytes(file_of(store, other), at, lambda _: data, len(data))


def swap_two_records(base: Base, store: Path, random_: random.Random) -> None:
    with plain_index(store, "blocks") as (txn, blocks):
        entries = [(bytes(key), bytes(data)) for key, data in txn.cursor(db=blocks)]
        (one, here), (other, there) = random_.sample(entries, 2)
        txn.put(one, there, db=blocks)
        txn.put(other, here, db=blocks)


def copy_a_record_under_another_key(base: Base, store: Path, random_: random.Random) -> None:
    with plain_index(store, "blocks") as (txn, blocks):
        entries = [(bytes(key), bytes(data)) for key, data in txn.cursor(db=blocks)]
        (_, data), (other, _) = random_.choices(entries, k=2)
        txn.put(random_.choice([other, digest(f"new {random_.random()}")]), data, db=blocks)


def an_older_copy_of_a_segment(base: Base, store: Path, random_: random.Random) -> None:
    file = random_.choice(segment_files(base.old))
    shutil.copyfile(file, store / "segments" / file.name)


def an_older_copy_of_the_index(base: Base, store: Path, random_: random.Random) -> None:
    shutil.copyfile(base.old / "index" / "data.mdb", store / "index" / "data.mdb")


def a_lost_segment(base: Base, store: Path, random_: random.Random) -> None:
    if files := segment_files(store):
        random_.choice(files).unlink()


def _two_of_a_size(base: Base, random_: random.Random) -> tuple[Located, Located]:
    one = random_.choice(base.located)
    alike = [each for each in base.located if each.extent_bytes == one.extent_bytes]
    return one, random_.choice(alike)


def _extent(store: Path, located: Located) -> bytes:
    with file_of(store, located).open("rb") as file:
        file.seek(located.extent.number * located.extent_bytes)
        return file.read(located.extent_bytes)


Harm = Callable[[Base, Path, random.Random], None]
ON_EXTENTS: list[Harm] = [swap_two_extents, copy_a_extent_over_another]
ON_RECORDS: list[Harm] = [swap_two_records, copy_a_record_under_another_key]
ON_FILES: list[Harm] = [
    an_older_copy_of_the_index,
    an_older_copy_of_a_segment,
    cut_a_segment,
    a_lost_segment,
]


@pytest.mark.parametrize("harm", [*ON_EXTENTS, *ON_RECORDS, *ON_FILES], ids=lambda h: h.__name__)
def test_random_harm_of_one_kind_costs_blocks_at_most(
    base: Base, ram_path: Path, harm: Harm
) -> None:
    for seed in range(5):
        random_ = random.Random(seed)
        folder = base.copy_to(ram_path / "store")
        for _ in range(1 if harm in ON_FILES else random_.randrange(1, 20)):
            harm(base, folder, random_)
        assert_recovers(base, folder)


def test_random_harm_of_every_kind_at_once_costs_blocks_at_most(base: Base, ram_path: Path) -> None:
    for seed in range(20):
        random_ = random.Random(seed)
        folder = base.copy_to(ram_path / "store")
        harms = [*random_.choices(ON_EXTENTS, k=4), *random_.choices(ON_FILES, k=2)]
        for harm in [*random_.choices(ON_RECORDS, k=4), *harms]:
            if harm in ON_EXTENTS and len(segment_files(folder)) < len(segment_files(base.now)):
                continue
            harm(base, folder, random_)
        assert_recovers(base, folder)


# --- the index, served by a worker because damage can end the process that reads it -----------


def serve_damaged(base: Base, harness: Harness) -> None:
    """Assert that every load is right or a miss, and that the tier stores and loads again."""
    client = harness.open(budget_bytes=BUDGET_BYTES)
    mail = Mailbox(client)

    def load_all(records: list[BlockRecord]) -> int:
        num_right = 0
        for start in range(0, len(records), NUM_PAGES):
            for done in mail.load(records[start : start + NUM_PAGES]):
                if done.ok:
                    assert done.life is not None
                    all_known, computed_at = versions[client.block_of(done)], done.life.computed_at
                    known = [each for each in all_known if each.computed_at == computed_at]
                    data = bytes(mail.page(done.page_id)[: known[0].size_bytes])
                    assert data == payload_of(known[0]), "wrong bytes are served"
                    num_right += 1
        return num_right

    late = chain("late", at=START + 20)
    versions = base.versions | {record.block_hash: [record] for record in late}

    def serves() -> bool:
        for page_id, record in enumerate(late):
            mail.page(page_id)[: record.size_bytes] = payload_of(record)
        client.store(lent_pages(late))
        is_stored = all(done.ok for done in mail.take(Stored, len(late)))
        return is_stored and load_all(late) == len(late)

    load_all([known[-1] for known in base.versions.values()])
    wait_until(serves)
    load_all([known[-1] for known in base.versions.values()])


@pytest.fixture
def served(base: Base, ram_path: Path) -> Iterator[Harness]:
    """A copy of the store, and a clock at the time of its blocks."""
    harness = Harness(base.copy_to(ram_path / "store"))
    harness.set_clock(START + 20 - time.time())
    yield harness
    harness.close()


@pytest.mark.parametrize("seed", few(range(12), 4))
def test_flipped_bits_of_the_index_cost_blocks_at_most(
    base: Base, served: Harness, seed: int
) -> None:
    random_ = random.Random(seed)
    index = served.folder / "index" / "data.mdb"
    for _ in range(35):
        flip_bit(index, random_.randrange(index.stat().st_size), random_.randrange(8))
    serve_damaged(base, served)


@pytest.mark.parametrize("seed", few(range(4), 2))
def test_an_index_cut_anywhere_costs_blocks_at_most(base: Base, served: Harness, seed: int) -> None:
    index = served.folder / "index" / "data.mdb"
    os.truncate(index, random.Random(seed).randrange(index.stat().st_size))
    serve_damaged(base, served)
