from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tieredkv.block_pool import Block, BlockPool
from tieredkv.errors import IntegrityError
from tieredkv.types import BlockHash


def named(name: str | int) -> BlockHash:
    return BlockHash(str(name).encode().rjust(32, b"."))


def ids(blocks: Any) -> list[int]:
    assert blocks is not None
    return [block.block_id for block in blocks]


def cache(pool: BlockPool, *names: str) -> list[Block]:
    """Put a chain of ready blocks into the pool, in use, head first."""
    chain = pool.allocate(len(names))
    assert chain is not None
    for block, name in zip(chain, names, strict=True):
        assert pool.insert(block, named(name)) is block
        pool.mark_ready(block)
    return chain


@pytest.fixture
def evicted() -> list[tuple[int, BlockHash]]:
    return []


@pytest.fixture
def pool(evicted: list[tuple[int, BlockHash]]) -> Iterator[BlockPool]:
    pool = BlockPool(6, on_evict=lambda block, name: evicted.append((block.block_id, name)))
    yield pool
    pool.check()


def test_a_new_pool_hands_out_its_blocks_in_order(pool: BlockPool) -> None:
    blocks = pool.allocate(6)
    assert ids(blocks) == [0, 1, 2, 3, 4, 5]
    assert blocks is not None
    assert all(b.ref_count == 1 and b.block_hash is None and not b.is_ready for b in blocks)
    assert (pool.num_free, pool.num_used, pool.num_cached, pool.num_evictable) == (0, 6, 0, 0)


def test_eviction_takes_the_tail_of_a_chain_first(
    pool: BlockPool, evicted: list[tuple[int, BlockHash]]
) -> None:
    pool.release(cache(pool, "a0", "a1", "a2"))
    pool.release(cache(pool, "b0", "b1", "b2"))
    assert ids(pool.evictable()) == [2, 1, 0, 5, 4, 3]
    assert ids(pool.allocate(4)) == [2, 1, 0, 5]
    assert evicted == [(2, named("a2")), (1, named("a1")), (0, named("a0")), (5, named("b2"))]
    assert pool.lookup(named("a0")) is None
    assert pool.lookup(named("b1")) is pool.block(4)


def test_free_blocks_are_taken_before_cached_ones(
    pool: BlockPool, evicted: list[tuple[int, BlockHash]]
) -> None:
    pool.release(cache(pool, "a0", "a1"))
    assert ids(pool.allocate(4)) == [2, 3, 4, 5]
    assert evicted == []
    assert ids(pool.allocate(1)) == [1]
    assert evicted == [(1, named("a1"))]


def test_a_released_block_without_hash_is_reused_first(pool: BlockPool) -> None:
    blocks = pool.allocate(3)
    assert blocks is not None
    pool.release(blocks)
    assert ids(pool.allocate(4)) == [0, 1, 2, 3]


def test_a_touched_chain_is_evicted_last_and_still_tail_first(pool: BlockPool) -> None:
    first, second = cache(pool, "a0", "a1", "a2"), cache(pool, "b0", "b1", "b2")
    pool.release(first)
    pool.release(second)
    pool.touch(first)
    assert ids(pool.evictable()) == [5, 4, 3, 2, 1, 0]
    assert ids(pool.allocate(3)) == [5, 4, 3]


def test_touch_leaves_blocks_in_use_alone(pool: BlockPool) -> None:
    used, idle = cache(pool, "a0", "a1"), cache(pool, "b0", "b1")
    pool.release(idle)
    pool.touch([*used, *idle])
    assert ids(pool.evictable()) == [3, 2]
    assert [block.ref_count for block in used] == [1, 1]


def test_a_block_that_may_not_go_yet_is_passed_over_and_keeps_its_place(
    pool: BlockPool, evicted: list[tuple[int, BlockHash]]
) -> None:
    pool.release(cache(pool, "a0", "a1", "a2", "a3", "a4", "a5"))
    assert ids(pool.allocate(2, lambda block: block.block_id not in (5, 3))) == [4, 2]
    assert ids(pool.evictable()) == [5, 3, 1, 0]
    assert [name for _, name in evicted] == [named("a4"), named("a2")]
    assert ids(pool.allocate(2)) == [5, 3]


@pytest.mark.parametrize("can_evict", [None, lambda block: block.block_id != 1])
def test_an_allocation_that_does_not_fit_changes_nothing(
    pool: BlockPool,
    evicted: list[tuple[int, BlockHash]],
    can_evict: Callable[[Block], bool] | None,
) -> None:
    pool.release(cache(pool, "a0", "a1"))
    used = pool.allocate(1)
    assert pool.allocate(6 if can_evict is None else 5, can_evict) is None
    assert evicted == []
    assert ids(used) == [2]
    assert (pool.num_free, pool.num_evictable, pool.num_used) == (3, 2, 1)
    assert ids(pool.evictable()) == [1, 0]
    assert ids(pool.allocate(3)) == [3, 4, 5]


def test_nothing_is_asked_about_blocks_that_are_not_needed(pool: BlockPool) -> None:
    pool.release(cache(pool, "a0", "a1"))
    asked: list[int] = []

    def can_evict(block: Block) -> bool:
        asked.append(block.block_id)
        return True

    pool.allocate(4, can_evict)
    assert asked == []
    pool.allocate(1, can_evict)
    assert asked == [1]
    assert pool.allocate(0) == []


def test_an_evicted_block_is_told_about_when_the_pool_is_whole_again() -> None:
    def on_evict(block: Block, name: BlockHash) -> None:
        pool.check()
        assert pool.lookup(name) is None
        assert block.ref_count == 1
        told.append(name)

    told: list[BlockHash] = []
    pool = BlockPool(3, on_evict=on_evict)
    pool.release(cache(pool, "a", "b", "c"))
    blocks = pool.allocate(3)
    assert blocks is not None
    assert not any(block.is_ready for block in blocks)
    assert told == [named("c"), named("b"), named("a")]


def test_equal_content_is_registered_once(pool: BlockPool) -> None:
    (first,) = cache(pool, "a")
    second = pool.allocate(1)
    assert second is not None
    assert pool.insert(second[0], named("a")) is first
    assert second[0].block_hash is None
    assert first.ref_count == 1
    assert pool.insert(first, named("a")) is first
    assert pool.num_cached == 1


def test_a_shared_block_is_evictable_only_after_its_last_user(pool: BlockPool) -> None:
    chain = cache(pool, "a")
    pool.acquire(chain[0])
    pool.release(chain)
    assert pool.num_evictable == 0
    pool.release(chain)
    assert ids(pool.evictable()) == [0]
    pool.acquire(chain[0])
    assert (pool.num_evictable, pool.num_used, chain[0].ref_count) == (0, 1, 1)


def test_a_block_that_never_became_ready_is_forgotten_on_release(pool: BlockPool) -> None:
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.insert(blocks[0], named("a"))
    assert pool.lookup(named("a")) is blocks[0]
    pool.release(blocks)
    assert pool.lookup(named("a")) is None
    assert (pool.num_free, pool.num_cached) == (6, 0)


def test_a_dropped_block_that_nobody_uses_is_free_at_once(
    pool: BlockPool, evicted: list[tuple[int, BlockHash]]
) -> None:
    pool.release(cache(pool, "a0", "a1"))
    assert pool.drop(named("a0")) is pool.block(0)
    assert pool.lookup(named("a0")) is None
    assert (pool.num_free, pool.num_evictable) == (5, 1)
    assert ids(pool.allocate(1)) == [0]
    assert pool.drop(named("a0")) is None
    assert evicted == []


def test_a_block_dropped_in_use_is_freed_by_its_last_user(pool: BlockPool) -> None:
    chain = cache(pool, "a")
    pool.acquire(chain[0])
    assert pool.drop(named("a")) is chain[0]
    assert pool.lookup(named("a")) is None
    assert chain[0].is_ready
    pool.release(chain)
    assert pool.num_free == 5
    pool.release(chain)
    assert (pool.num_free, pool.num_evictable) == (6, 0)
    assert not chain[0].is_ready


def test_an_expired_hash_can_be_computed_anew_while_the_old_block_is_in_use(
    pool: BlockPool,
) -> None:
    (old,) = cache(pool, "a")
    pool.drop(named("a"))
    (new,) = cache(pool, "a")
    assert pool.lookup(named("a")) is new is not old
    pool.release([old])
    assert pool.lookup(named("a")) is new


def test_a_demoted_chain_released_head_first_to_the_front_goes_next_tail_first(
    pool: BlockPool,
) -> None:
    older, demoted = cache(pool, "a0", "a1"), cache(pool, "b0", "b1")
    pool.release(older)
    for block in demoted:
        pool.release_to_front(block)
    assert ids(pool.evictable()) == [3, 2, 1, 0]


def test_release_to_front_ends_one_use_only_and_frees_what_has_no_hash(pool: BlockPool) -> None:
    (block,) = cache(pool, "a")
    pool.acquire(block)
    pool.release_to_front(block)
    assert pool.num_evictable == 0
    pool.drop(named("a"))
    pool.release_to_front(block)
    assert pool.num_free == 6


def test_a_block_may_be_acquired_or_dropped_as_it_is_iterated_over(pool: BlockPool) -> None:
    pool.release(cache(pool, "a0", "a1", "a2", "a3"))
    seen = []
    for block in pool.evictable():
        seen.append(block.block_id)
        if block.block_id == 3:
            pool.acquire(block)
        elif block.block_id == 1:
            pool.drop(named("a1"))
    assert seen == [3, 2, 1, 0]
    assert ids(pool.evictable()) == [2, 0]


def test_misuse_is_an_integrity_error(pool: BlockPool) -> None:
    free = pool.block(5)
    with pytest.raises(IntegrityError, match="released more often"):
        pool.release([free])
    with pytest.raises(IntegrityError, match="allocated, not acquired"):
        pool.acquire(free)
    with pytest.raises(IntegrityError, match="in use without a hash"):
        pool.insert(free, named("a"))
    with pytest.raises(IntegrityError, match="cannot become ready"):
        pool.mark_ready(free)
    (used,) = cache(pool, "a")
    with pytest.raises(IntegrityError, match="in use without a hash"):
        pool.insert(used, named("b"))


def test_an_empty_pool_has_nothing_to_give() -> None:
    pool = BlockPool(0)
    assert pool.allocate(0) == []
    assert pool.allocate(1) is None
    pool.check()


def break_(change: str, used: Block, idle: Block, free: Block) -> None:
    match change:
        case "id":
            used.block_id = 9
        case "negative use":
            used.ref_count = -1
        case "link":
            idle.next = idle
        case "left the list":
            free.prev.next, free.next.prev = free.next, free.prev
        case "free but ready":
            free.is_ready = True
        case "free in use":
            free.ref_count = 1
        case "evictable not ready":
            idle.is_ready = False
        case "lost use":
            used.ref_count = 0
        case "used with a neighbour":
            used.next = idle
        case "lost hash":
            used.block_hash = None
        case "other hash":
            used.block_hash = named("other")
        case "two blocks a hash":
            used.block_hash = idle.block_hash


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        ("id", 1),
        ("negative use", 1),
        ("link", 2),
        ("left the list", 2),
        ("free but ready", 3),
        ("free in use", 3),
        ("evictable not ready", 4),
        ("lost use", 4),
        ("used with a neighbour", 5),
        ("lost hash", 6),
        ("other hash", 6),
        ("two blocks a hash", 6),
    ],
)
def test_check_finds_every_broken_invariant(change: str, invariant: int) -> None:
    pool = BlockPool(4)
    pool.release(cache(pool, "used", "idle"))
    pool.acquire(pool.block(0))
    pool.check()
    break_(change, pool.block(0), pool.block(1), pool.block(2))
    with pytest.raises(IntegrityError, match=f"invariant {invariant} "):
        pool.check()


class PoolAgainstModel(RuleBasedStateMachine):
    """Drive a pool and an obvious list-based model of it side by side."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.evicted: list[tuple[int, BlockHash]] = []
        self.pool = BlockPool(
            num_blocks, on_evict=lambda b, h: self.evicted.append((b.block_id, h))
        )
        self.refs = dict.fromkeys(range(num_blocks), 0)
        self.hashes: dict[int, BlockHash] = {}
        self.ready: set[int] = set()
        self.free = list(range(num_blocks))
        self.lru: list[int] = []

    def pick(self, data: st.DataObject, candidates: list[int]) -> int:
        return data.draw(st.sampled_from(candidates))

    def used(self) -> list[int]:
        return [block_id for block_id, count in self.refs.items() if count]

    @rule(num_blocks=st.integers(0, 9), held=st.sets(st.integers(0, 8), max_size=3))
    def allocate(self, num_blocks: int, held: set[int]) -> None:
        self.evicted.clear()
        blocks = self.pool.allocate(num_blocks, lambda block: block.block_id not in held)
        candidates = self.free + [block_id for block_id in self.lru if block_id not in held]
        if len(candidates) < num_blocks:
            assert blocks is None
            assert self.evicted == []
            return
        taken = candidates[:num_blocks]
        assert ids(blocks) == taken
        assert self.evicted == [(i, self.hashes[i]) for i in taken if i in self.hashes]
        for block_id in taken:
            (self.lru if block_id in self.hashes else self.free).remove(block_id)
            self.refs[block_id] = 1
            self.hashes.pop(block_id, None)
            self.ready.discard(block_id)

    @precondition(lambda self: self.used())
    @rule(data=st.data(), name=st.integers(0, 5))
    def insert(self, data: st.DataObject, name: int) -> None:
        block_id = self.pick(data, self.used())
        owners = [i for i, block_hash in self.hashes.items() if block_hash == named(name)]
        if owners:
            assert ids([self.pool.insert(self.pool.block(block_id), named(name))]) == owners
        elif block_id in self.hashes:
            with pytest.raises(IntegrityError):
                self.pool.insert(self.pool.block(block_id), named(name))
        else:
            assert ids([self.pool.insert(self.pool.block(block_id), named(name))]) == [block_id]
            self.hashes[block_id] = named(name)

    @precondition(lambda self: self.free)
    @rule(name=st.integers(0, 5), num_uses=st.integers(0, 2))
    def compute_and_release(self, name: int, num_uses: int) -> None:
        """Most of a block's life in one step, or too few runs would get to an eviction."""
        block_id = self.free[0]
        self.allocate(1, set())
        block = self.pool.block(block_id)
        if self.pool.insert(block, named(name)) is block:
            self.hashes[block_id] = named(name)
        self.pool.mark_ready(block)
        self.ready.add(block_id)
        if num_uses == 2:
            self.pool.acquire(block)
            self.refs[block_id] += 1
        if num_uses:
            self.pool.release([block])
            self.end_use(block_id, len(self.lru))

    @precondition(lambda self: self.used())
    @rule(data=st.data())
    def mark_ready(self, data: st.DataObject) -> None:
        block_id = self.pick(data, self.used())
        self.pool.mark_ready(self.pool.block(block_id))
        self.ready.add(block_id)

    @precondition(lambda self: self.used() or self.lru)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        block_id = self.pick(data, self.used() + self.lru)
        self.pool.acquire(self.pool.block(block_id))
        self.refs[block_id] += 1
        if block_id in self.lru:
            self.lru.remove(block_id)

    def end_use(self, block_id: int, place: int) -> None:
        self.refs[block_id] -= 1
        if self.refs[block_id]:
            return
        if block_id in self.hashes and block_id in self.ready:
            self.lru.insert(place, block_id)
        else:
            self.hashes.pop(block_id, None)
            self.ready.discard(block_id)
            self.free.insert(0, block_id)

    @precondition(lambda self: self.used())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chain = data.draw(st.lists(st.sampled_from(self.used()), unique=True, min_size=1))
        self.pool.release([self.pool.block(block_id) for block_id in chain])
        for block_id in reversed(chain):
            self.end_use(block_id, len(self.lru))

    @precondition(lambda self: self.used())
    @rule(data=st.data())
    def release_to_front(self, data: st.DataObject) -> None:
        block_id = self.pick(data, self.used())
        self.pool.release_to_front(self.pool.block(block_id))
        self.end_use(block_id, 0)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        chain = data.draw(st.lists(st.sampled_from(sorted(self.refs)), unique=True))
        self.pool.touch([self.pool.block(block_id) for block_id in chain])
        for block_id in reversed(chain):
            if block_id in self.lru:
                self.lru.remove(block_id)
                self.lru.append(block_id)

    @rule(name=st.integers(0, 5))
    def drop(self, name: int) -> None:
        owners = [i for i, block_hash in self.hashes.items() if block_hash == named(name)]
        block = self.pool.drop(named(name))
        assert ([] if block is None else [block.block_id]) == owners
        for block_id in owners:
            del self.hashes[block_id]
            if block_id in self.lru:
                self.lru.remove(block_id)
                self.ready.discard(block_id)
                self.free.insert(0, block_id)

    @invariant()
    def pool_and_model_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert ids(self.pool.evictable()) == self.lru
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_evictable == len(self.lru)
        assert self.pool.num_allocatable == len(self.free) + len(self.lru)
        assert self.pool.num_used == len(self.used())
        assert self.pool.num_cached == len(self.hashes)
        for block_id, count in self.refs.items():
            block = self.pool.block(block_id)
            assert block.ref_count == count
            assert block.block_hash == self.hashes.get(block_id)
            assert block.is_ready == (block_id in self.ready)
        for block_id, block_hash in self.hashes.items():
            assert self.pool.lookup(block_hash) is self.pool.block(block_id)


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
