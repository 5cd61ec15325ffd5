"""A block that a copy still reads is not reused, even after its last release."""

from tieredkv.cache.pool import BlockPool
from tieredkv.types import BlockHash


def filled_pool(length: int) -> BlockPool:
    pool = BlockPool(length)
    for number, block in enumerate(pool.allocate(length).blocks or []):
        pool.insert(block, BlockHash(b"%d" % number))
        block.fill()
        pool.release([block])
    return pool


def test_a_pinned_block_keeps_its_place_and_is_passed_over() -> None:
    pool = filled_pool(3)
    oldest = next(pool.evictable())
    pool.pin(oldest)
    pool.check()
    assert [block.block_id for block in pool.allocate(2).blocks or []] == [1, 2]
    assert pool.allocate(1).blocks is None
    pool.unpin(oldest)
    pool.check()
    assert pool.allocate(1).blocks == [oldest]


def test_a_pinned_block_that_lost_its_hash_is_empty_only_after_the_last_unpin() -> None:
    for is_in_use in (False, True):
        pool = filled_pool(2)
        block = pool.lookup(BlockHash(b"0"))
        assert block is not None
        pool.pin(block)
        pool.pin(block)
        if is_in_use:
            pool.acquire([block])
        pool.drop(BlockHash(b"0"))
        pool.check()
        if is_in_use:
            pool.release([block])
        pool.unpin(block)
        pool.check()
        assert (pool.num_empty, pool.num_used) == (0, 1)
        pool.unpin(block)
        pool.check()
        assert (pool.num_empty, pool.num_used) == (1, 0)
