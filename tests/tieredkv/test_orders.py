"""Each order of eviction evicts what it says, in a pool of a server."""

import random
from typing import get_args

import pytest

from tests.fake_store import Rig
from tieredkv.cache.block import Block
from tieredkv.cache.orders import ORDERS
from tieredkv.cache.pool import BlockPool
from tieredkv.config import EvictionOrder
from tieredkv.types import BlockHash


def name(block: int) -> BlockHash:
    return BlockHash(b"%d" % block)


def use(pool: BlockPool, block: int) -> None:
    """Use a block as a request does, and add it if the pool lacks it."""
    found = pool.lookup(name(block))
    if found is not None:
        pool.acquire([found])
    else:
        [found] = pool.allocate(1).blocks or []
        pool.insert_filled([found], [name(block)])
    pool.release([found])


@pytest.mark.parametrize(
    ("order", "num_blocks", "uses", "left"),
    [
        ("lru", 3, [1, 2, 3, 1, 4], [1, 3, 4]),
        ("fifo", 3, [1, 2, 3, 1, 4], [2, 3, 4]),
        ("clock", 3, [1, 2, 3, 1, 4], [1, 3, 4]),
        ("clock", 3, [1, 2, 3, 1, 4, 5], [1, 4, 5]),
        ("clock", 3, [1, 2, 3, 1, 4, 5, 6], [4, 5, 6]),  # its second chance is over
        ("sieve", 3, [1, 2, 3, 1, 4], [1, 3, 4]),
        ("sieve", 3, [1, 2, 3, 1, 4, 5, 6, 7], [1, 6, 7]),  # the hand has passed 1 for good
        ("lfu", 3, [1, 1, 1, 2, 2, 2, 3, 4, 5], [1, 2, 5]),
        ("lfu", 2, [1, 1, 1, 2, 3, 4, 5, 6], [5, 6]),  # old uses lose their weight
        ("s3fifo", 10, [*range(10), 0, 0, *range(10, 20)], [0, *range(11, 20)]),
        ("s3fifo", 10, [*range(11), 0, *range(11, 20)], [0, *range(11, 20)]),  # it came back soon
    ],
)
def test_each_order_keeps_what_it_says(
    order: str, num_blocks: int, uses: list[int], left: list[int]
) -> None:
    pool = BlockPool(num_blocks, order)
    for block in uses:
        use(pool, block)
        pool.check()
    assert [block for block in sorted({*uses}) if pool.lookup(name(block))] == left


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(3))
def test_a_pool_of_any_order_evicts_clean_blocks_only_and_keeps_its_invariants(
    order: str, seed: int
) -> None:
    choose, pool = random.Random(seed), BlockPool(20, order)
    held = list[list[Block]]()
    for number in range(300):
        pool.floors = choose.choice([pool.floors, {}, {b"a": 4, b"b": 9}])
        tenant = choose.choice([b"a", b"b"])
        blocks, evicted, _ = pool.allocate(choose.randrange(5), tenant=tenant, is_partial=True)
        assert not any(block_hash.endswith(b"!") for block_hash in evicted)
        for index, block in enumerate(blocks or ()):
            mark = choose.choice([b"", b"!"])
            pool.insert(block, BlockHash(b"%d/%d%s" % (number, index, mark)), tenant)
            pool.fill(block)
            pool.put_clean(block, not mark)
        held.append(blocks or [])
        cached = [block for block in pool.evictable() if choose.random() < 0.2]
        pool.acquire(cached)
        held.append(cached)
        pool.look_ahead(choose.randrange(9), 4)
        for block in pool.evictable():
            if not block.is_clean and choose.random() < 0.1:
                pool.drop(BlockHash(block.block_hash or b""))
                break
        for _ in range(choose.randrange(4)):
            pool.release(held.pop(choose.randrange(len(held))) if held else [])
        pool.check()


def test_the_setting_names_every_order() -> None:
    assert get_args(EvictionOrder) == tuple(ORDERS)


@pytest.mark.parametrize("order", ORDERS)
def test_requests_find_and_lose_blocks_under_any_order(order: str) -> None:
    rig = Rig(num_blocks=8, num_pages=8, eviction_order=order)
    for turn in range(12):
        rig.run(f"chat {turn % 3}", 1 + turn // 3)
    assert rig.tiers.counters.lost_blocks == {}
    rig.check_nothing_is_held()
