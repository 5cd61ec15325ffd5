"""The table of what a tier has agrees with a plain dict, whatever comes and goes."""

import random
from collections.abc import Mapping

import numpy as np
import pytest

from tieredkv.cache.presence import Presence
from tieredkv.tier import Held

NOW = 1_800_000_000


def hash_of(number: int, size: int = 32) -> bytes:
    """Return a hash; those of the first numbers are alike, as somebody may choose them to be."""
    return number.to_bytes(8, "little") + bytes(size - 8)


def has(table: Presence, *hashes: bytes, now: float = NOW) -> list[bool]:
    return [*map(bool, table.has(hashes, now))]


def told(numbers: "np.ndarray[tuple[int], np.dtype[np.uint64]]", second: int) -> Held:
    seconds = np.full(len(numbers), second, np.uint32)
    return Held(fingerprints=numbers.tobytes(), seconds=seconds.tobytes())


def test_a_block_counts_until_the_second_in_which_it_expires() -> None:
    table, block = Presence(), hash_of(1)
    assert has(table, block) == [False]
    table.take(Held.of({block: NOW + 10}))
    assert has(table, block, now=NOW + 9.999) == [True]
    assert has(table, block, now=NOW + 10) == [False]
    table.take(Held.of({block: NOW + 20.5}))
    assert has(table, block, now=NOW + 20.5) == [True], "seconds are rounded up"
    assert has(table, block, now=NOW + 21) == [False]
    table.take(Held.of({block: NOW + 5}))
    assert has(table, block, now=NOW + 5) == [False], "the last word counts"


def test_a_hash_that_begins_with_zeroes_is_one_like_others() -> None:
    table, block = Presence(), bytes(32)
    assert has(table, block) == [False]
    table.take(Held.of({block: NOW + 1}))
    assert has(table, block, hash_of(2)) == [True, False]
    table.discard([block])
    assert has(table, block) == [False] and len(table) == 0


def test_hashes_of_sixteen_bytes_are_looked_up_like_others() -> None:
    table = Presence()
    table.take(Held.of({hash_of(n, 16): NOW + 1 for n in range(100)}))
    assert has(table, *(hash_of(n, 16) for n in range(200))) == [True] * 100 + [False] * 100
    assert has(table) == []


def test_a_table_is_whole_once_the_tier_says_so_and_until_it_begins_again() -> None:
    table, first, second = Presence(), hash_of(1), hash_of(2)
    assert not table.is_whole
    table.take(Held.of({first: NOW + 1}))
    assert not table.is_whole
    table.take(Held(is_whole=True))
    table.take(Held.of({second: NOW + 1}))
    assert table.is_whole and has(table, first, second) == [True, True]
    table.take(Held(is_first=True))
    assert not table.is_whole and has(table, first, second) == [False, False]
    table.take(Held(is_whole=True))
    table.clear()
    assert not table.is_whole


def test_of_a_block_that_one_message_tells_twice_the_last_second_counts() -> None:
    table, block = Presence(), hash_of(7)
    both = Held.of({block: NOW + 9}), Held.of({block: NOW + 3})
    fingerprints, seconds = (b"".join(getattr(it, name) for it in both) for name in FIELDS)
    table.take(Held(fingerprints=fingerprints, seconds=seconds))
    assert len(table) == 1 and has(table, block, now=NOW + 3) == [False]


FIELDS = "fingerprints", "seconds"


@pytest.mark.parametrize("seed", range(20))
def test_a_table_agrees_with_a_dict(seed: int) -> None:
    generator, model = random.Random(seed), dict[bytes, int]()
    table, most = Presence(), generator.choice([40, 600, 6000])

    def some() -> list[bytes]:
        return [hash_of(generator.randrange(1, most)) for _ in range(generator.choice([1, 3, 200]))]

    for _ in range(120):
        blocks = some()
        match generator.choices(["take", "discard", "clear"], [6, 4, 0.1])[0]:
            case "take":
                new = {each: NOW + generator.randrange(1, 100) for each in blocks}
                table.take(Held.of(new))
                model |= new
            case "discard":
                table.discard(blocks)
                for each in blocks:
                    model.pop(each, None)
            case "clear":
                table.clear(generator.choice([0, most]))
                model = {}
        table.check()
        asked, now = some(), NOW + generator.randrange(100)
        assert has(table, *asked, now=now) == [model.get(each, 0) > now for each in asked]
        assert len(table) == len(model)
    agrees(table, model)


def agrees(table: Presence, model: Mapping[bytes, int]) -> None:
    assert has(table, *model, now=NOW) == [True] * len(model)


def test_a_table_grows_bit_by_bit_and_keeps_all_blocks() -> None:
    numbers = np.random.default_rng(1).permutation(np.arange(1, 200_001, dtype=np.uint64))
    table = Presence()
    for first in range(0, len(numbers), 1000):
        table.take(told(numbers[first : first + 1000], NOW + 1))
    table.check()
    assert len(table) == len(numbers)
    assert table.has([hash_of(n) for n in range(1, 200_001)], NOW).all()
    assert not table.has([hash_of(n) for n in range(200_001, 300_000)], NOW).any()


def test_blocks_that_come_and_go_for_ever_leave_nothing_behind() -> None:
    table = Presence()
    table.clear(1000)
    before = table.num_bytes
    for turn in range(100):
        numbers = np.arange(1000 * turn + 1, 1000 * turn + 1001, dtype=np.uint64)
        table.take(told(numbers, NOW + 1))
        table.check()
        table.discard([hash_of(int(n)) for n in numbers])
    assert len(table) == 0 and table.num_bytes == before


def test_a_million_blocks_take_about_sixteen_bytes_each() -> None:
    numbers = np.random.default_rng(2).integers(1, 1 << 63, 1_000_000, dtype=np.uint64)
    table = Presence()
    table.clear(len(numbers))
    for some in np.array_split(numbers, 100):
        table.take(told(some, NOW + 1))
    assert len(table) == len(set(numbers.tolist()))
    assert table.num_bytes < 17 * len(numbers)
    chain = [number.tobytes() + bytes(24) for number in numbers[:4096]]
    assert table.has(chain, NOW).all() and not table.has(chain, NOW + 1).any()
