"""What floors keep is counted as tenants change, and is what a count of all blocks finds."""

import random
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from tieredkv.cache.block import Block
from tieredkv.cache.pool import BlockPool
from tieredkv.types import BlockHash


class Naive:
    """A pool, and what its floors keep, counted anew each time."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.pool = BlockPool(choose.choice((8, 16, 40)))
        self.tenants = [b"tenant %d" % number for number in range(choose.choice((2, 5, 20)))]
        self.held: list[list[Block]] = []
        self.tenant_of: dict[BlockHash, bytes] = {}
        self.num_made = 0

    def allocate(self, count: int, **options: Any) -> tuple[list[Block] | None, list[BlockHash]]:
        """Allocate blocks; return them, and the hashes of what was evicted."""
        taken = self.pool.allocate(count, **options)
        evicted = taken.evicted
        for block_hash in evicted:
            del self.tenant_of[block_hash]
        return taken.blocks, evicted

    def num_spare(self, tenant: bytes) -> int:
        """Return how many blocks of a tenant others may have."""
        floor = self.pool.floors.get(tenant)
        num_hashed = Counter(self.tenant_of.values())[tenant]
        return sys.maxsize if floor is None else max(0, num_hashed - floor)

    def num_kept_from(self, tenant: bytes) -> int:
        """Return how many evictable blocks the floors of others keep from a tenant."""
        evictable = Counter(block.tenant for block in self.pool.evictable())
        others = {each: num for each, num in evictable.items() if each != tenant}
        return sum(max(0, num - self.num_spare(each)) for each, num in others.items())

    def victims(self, count: int, tenant: bytes) -> list[BlockHash]:
        """Return what an allocation has to evict, oldest first."""
        spare = {each: self.num_spare(each) for each in self.tenants} | {tenant: sys.maxsize}
        found = list[BlockHash]()
        for block in self.pool.evictable():
            if spare[block.tenant] > 0 and block.block_hash is not None:
                spare[block.tenant] -= 1
                found.append(block.block_hash)
        return found[: max(0, count - self.pool.num_empty)]

    def fill(self, blocks: list[Block], tenant: bytes) -> None:
        for block in blocks:
            self.num_made += 1
            block_hash = BlockHash(b"block %d" % self.num_made)
            self.tenant_of[block_hash] = tenant
            self.pool.insert(block, block_hash, tenant)
            self.pool.fill(block)
        self.held.append(blocks)

    def change(self) -> None:
        """Change floors, or use, release or drop some blocks."""
        pool, choose = self.pool, self.choose
        cached = [block.block_hash for block in pool.evictable() if block.block_hash is not None]
        match choose.randrange(10):
            case 0:
                most = max(2, 2 * pool.num_blocks // len(self.tenants))
                given = [each for each in self.tenants if choose.random() < 0.8]
                is_off = choose.random() < 0.3
                pool.floors = {} if is_off else {it: choose.randrange(most) for it in given}
            case 1 | 2 | 3 if cached:
                hits = [pool.lookup(each) for each in choose.sample(cached, len(cached) // 3)]
                found = [block for block in hits if block is not None]
                pool.acquire(found)
                self.held.append(found)
            case 4 if cached:
                pool.drop(dropped := choose.choice(cached))
                del self.tenant_of[dropped]
            case _ if self.held:
                pool.release(self.held.pop(choose.randrange(len(self.held)))[::-1])

    def check(self) -> None:
        self.pool.check()
        for tenant in [*self.tenants, b"unknown"]:
            num_free_for = self.pool.num_free - self.num_kept_from(tenant)
            assert self.pool.num_free_for(tenant) == num_free_for


@pytest.mark.parametrize("seed", range(20))
def test_an_allocation_evicts_exactly_the_oldest_blocks_that_floors_do_not_keep(seed: int) -> None:
    naive = Naive(random.Random(seed))
    pool, choose = naive.pool, naive.choose
    for _ in range(80):
        naive.change()
        count, tenant = choose.choice((1, 1, 2, 4, 9)), choose.choice(naive.tenants)
        expected = naive.victims(count, tenant)
        has_room = pool.num_empty + len(expected) >= count
        blocks, evicted = naive.allocate(count, tenant=tenant)
        assert (blocks is not None) == has_room
        assert evicted == (expected if has_room else [])
        naive.fill(blocks or [], tenant)
        naive.check()


@pytest.mark.parametrize("seed", range(20))
def test_what_floors_keep_is_counted_right_whatever_waits_for_copies(seed: int) -> None:
    naive = Naive(random.Random(seed))
    pool, choose = naive.pool, naive.choose
    read = list[Block]()
    for _ in range(80):
        naive.change()
        tenant = choose.choice((None, *naive.tenants))
        blocks, _ = naive.allocate(
            choose.choice((1, 1, 2, 4, 9)),
            tenant=tenant,
            takes_kept=choose.random() < 0.3,
            is_partial=choose.random() < 0.3,
        )
        naive.fill(blocks or [], tenant or b"nobody")
        for block in filter(None, pool.find(naive.tenant_of)):
            if choose.random() < 0.05:
                pool.put_clean(block, False)
        num_ahead = choose.randrange(pool.num_blocks)
        pool.look_ahead(num_ahead, num_ahead)
        for block in pool.dirty(num_ahead, 3):
            pool.add_reader(block)
            read.append(block)
        while read and choose.random() < 0.6:
            block = read.pop(choose.randrange(len(read)))
            if block.block_hash is not None:
                pool.put_clean(block, True)
            pool.remove_reader(block)
        naive.check()


@pytest.mark.parametrize("takes_kept", [False, True])
def test_blocks_within_floors_are_taken_last_and_only_if_the_caller_wants_them(
    takes_kept: bool,
) -> None:
    pool = BlockPool(6)
    for tenant, names in ((b"quiet", "abc"), (b"flood", "xyz")):
        blocks = pool.allocate(3).blocks or []
        for block, name in zip(blocks, names, strict=True):
            pool.insert(block, BlockHash(name.encode()), tenant)
            pool.fill(block)
        pool.release(blocks)
    pool.floors = {b"quiet": 3, b"flood": 3}
    taken = pool.allocate(4, tenant=b"flood", takes_kept=takes_kept).blocks
    left = [each for each in "abcxyz" if pool.lookup(BlockHash(each.encode()))]
    assert left == (["b", "c"] if takes_kept else list("abcxyz"))
    assert (taken is not None) == takes_kept
    pool.check()


def keep(pool: BlockPool, tenant: bytes, names: bytes, *, is_clean: bool = True) -> None:
    """Insert ready blocks of a tenant that nobody uses, the oldest first; each is a letter."""
    blocks = pool.allocate(len(names)).blocks or []
    for block, letter in zip(blocks, names, strict=True):
        pool.insert(block, BlockHash(bytes([letter])), tenant)
        pool.fill(block)
        pool.put_clean(block, is_clean)
    pool.release(blocks)


def dirty(pool: BlockPool, num_ahead: int) -> list[Block]:
    """Return the blocks to be copied so that `num_ahead` blocks are clean."""
    pool.look_ahead(num_ahead, num_ahead)
    return pool.dirty(num_ahead, num_ahead)


def named(blocks: Iterable[Block] | None) -> bytes:
    return b"".join(block.block_hash or b"-" for block in blocks or ())


@pytest.mark.parametrize(("tenant", "late"), [(b"quiet", b"a"), (b"flood", b"")])
def test_a_block_within_its_tenants_floor_is_late_only_for_what_its_tenant_evicts(
    tenant: bytes, late: bytes
) -> None:
    pool = BlockPool(2)
    pool.floors = {b"quiet": 1}
    keep(pool, b"quiet", b"a", is_clean=False)
    keep(pool, b"flood", b"x")
    assert named(dirty(pool, 2)) == b"a"
    assert pool.allocate(1, tenant=tenant).blocks is not None
    assert pool.hashes == [b"a"]
    assert named(pool.late(0)) == late
    assert named(dirty(pool, 2)) == b"a"
    pool.check()


def test_a_pinned_block_is_evicted_if_floors_keep_all_that_are_not_pinned() -> None:
    pool = BlockPool(4)
    pool.floors = {b"quiet": 3}
    pool.pinned = {BlockHash(b"x")}
    keep(pool, b"quiet", b"abc")
    keep(pool, b"flood", b"x")
    assert (pool.num_last, pool.num_free_for(b"flood")) == (1, 1)
    assert pool.allocate(1, tenant=b"flood").blocks is not None
    assert pool.hashes == [b"a", b"b", b"c"]
    pool.check()


def test_no_more_kept_blocks_are_copied_than_the_tenant_has_to_spare() -> None:
    pool = BlockPool(5)
    pool.floors = {b"quiet": 3}
    keep(pool, b"quiet", b"abc")
    for block in filter(None, pool.find(map(BlockHash, (b"a", b"b", b"c")))):
        pool.put_clean(block, False)
    keep(pool, b"flood", b"xy")
    assert pool.allocate(1, tenant=b"flood").blocks is not None
    assert named(pool.dirty(4, 4)) == b"", "the floor keeps all that has become due"
    pool.floors = {b"quiet": 1}
    assert pool.allocate(1, tenant=b"flood").blocks is not None
    assert (named(pool.dirty(4, 4)), pool.hashes) == (b"ab", [b"a", b"b", b"c"])
    assert pool.num_free_for(b"flood") == 2
    pool.check()
