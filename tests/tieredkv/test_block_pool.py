"""The block pool: allocation, eviction, sharing, recency, pins and its own check."""

from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.golden import refused
from tieredkv.cache.block import Block, clear
from tieredkv.cache.pool import BlockPool
from tieredkv.errors import IntegrityError
from tieredkv.types import BlockHash


def name(text: str | int) -> BlockHash:
    return BlockHash(str(text).encode().rjust(32, b"."))


def hashes_of(blocks: Iterable[Block]) -> list[BlockHash]:
    return [block.block_hash for block in blocks if block.block_hash is not None]


def ids(blocks: Iterable[Block] | None) -> list[int]:
    assert blocks is not None
    return [block.block_id for block in blocks]


Evicted = list[tuple[int, BlockHash]]


def take(pool: BlockPool, count: int, evicted: Evicted | None = None) -> list[Block]:
    """Allocate blocks; note in `evicted` what they held."""
    taken = pool.allocate(count)
    assert taken.blocks is not None
    if evicted is not None:
        num_empty = len(taken.blocks) - len(taken.evicted)
        evicted += zip(ids(taken.blocks[num_empty:]), taken.evicted, strict=True)
    return taken.blocks


def fill(pool: BlockPool, *names: str) -> list[Block]:
    """Insert a chain of ready blocks that are in use; its head is inserted first."""
    chain = take(pool, len(names))
    for block, text in zip(chain, names, strict=True):
        assert pool.insert(block, name(text)) is block
        block.fill()
    return chain


def keep(pool: BlockPool, *names: str) -> list[Block]:
    """Insert a chain of ready blocks that are no longer in use; its head is inserted first."""
    chain = fill(pool, *names)
    pool.release(reversed(chain))
    return chain


def put_dirty(pool: BlockPool, *names: str) -> None:
    """Say of these blocks, and of no others, that an eviction would lose them."""
    owed = set(map(name, names))
    for block in [*pool.evictable()]:
        pool.put_clean(block, block.block_hash is None or block.block_hash not in owed)


def dirty(pool: BlockPool, num_ahead: int, at_most: int = 99) -> list[Block]:
    """Return the blocks to be copied so that `num_ahead` blocks are clean."""
    pool.look_ahead(num_ahead, num_ahead)
    return pool.dirty(num_ahead, at_most)


@pytest.fixture
def evicted() -> Evicted:
    return []


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    pool = BlockPool(6)
    yield pool
    pool.check()


# Allocation and eviction


def test_a_new_pool_hands_out_empty_blocks_in_order(pool: BlockPool) -> None:
    blocks = take(pool, 6)
    assert ids(blocks) == [0, 1, 2, 3, 4, 5]
    assert all(b.ref_count == 1 and b.block_hash is None and not b.is_ready for b in blocks)
    assert (pool.num_blocks, pool.num_free, pool.num_used) == (6, 0, 6)
    assert (pool.num_empty, pool.num_evictable, pool.num_cached) == (0, 0, 0)


def test_empty_blocks_go_before_cached_ones(pool: BlockPool, evicted: Evicted) -> None:
    keep(pool, "a0", "a1")
    assert ids(take(pool, 4, evicted)) == [2, 3, 4, 5]
    assert evicted == []
    assert ids(take(pool, 1, evicted)) == [1]
    assert evicted == [(1, name("a1"))]


def test_eviction_takes_the_oldest_chain_first_and_its_tail_before_its_head(
    pool: BlockPool, evicted: Evicted
) -> None:
    keep(pool, "a0", "a1", "a2")
    keep(pool, "b0", "b1", "b2")
    assert ids(pool.evictable()) == [2, 1, 0, 5, 4, 3]
    assert ids(take(pool, 4, evicted)) == [2, 1, 0, 5]
    assert evicted == [(2, name("a2")), (1, name("a1")), (0, name("a0")), (5, name("b2"))]
    assert pool.lookup(name("a0")) is None
    assert pool.lookup(name("b1")) is not None
    assert (pool.num_evictable, pool.num_cached, pool.num_used) == (2, 2, 4)


def test_one_allocation_takes_empty_blocks_and_then_the_oldest_cached_ones(
    pool: BlockPool, evicted: Evicted
) -> None:
    keep(pool, "a0", "a1", "a2", "a3")
    assert ids(take(pool, 3, evicted)) == [4, 5, 3]
    assert evicted == [(3, name("a3"))]


def test_a_block_names_the_last_step_that_a_user_told_of(pool: BlockPool) -> None:
    (block,) = blocks = take(pool, 1)
    pool.acquire(blocks)
    pool.release(blocks, after=7)
    pool.release(blocks)  # by a copy, or by a request that found too little room
    assert block.last_step == 7


def test_a_partial_block_is_reused_before_cached_ones(pool: BlockPool) -> None:
    private = take(pool, 2)
    keep(pool, "a0", "a1", "a2", "a3")
    pool.release(private)
    assert ids(take(pool, 3)) == [0, 1, 5]


@pytest.mark.parametrize("refused", [None, 1])
def test_an_allocation_that_does_not_fit_changes_nothing(
    pool: BlockPool, refused: int | None
) -> None:
    keep(pool, "a0", "a1")
    put_dirty(pool, f"a{refused}")
    used = take(pool, 1)
    assert pool.allocate(6 if refused is None else 5) == (None, [], 0)
    put_dirty(pool)
    assert (pool.num_empty, pool.num_evictable, pool.num_used, pool.num_cached) == (3, 2, 1, 2)
    assert ids(pool.evictable()) == [1, 0]
    assert used[0].ref_count == 1
    assert ids(take(pool, 5)) == [3, 4, 5, 1, 0]


def test_blocks_that_are_not_clean_keep_their_order(pool: BlockPool, evicted: Evicted) -> None:
    keep(pool, "a0", "a1", "a2", "a3", "a4", "a5")
    put_dirty(pool, "a5", "a3")
    assert ids(take(pool, 2, evicted)) == [4, 2]
    put_dirty(pool)
    assert [lost for _, lost in evicted] == [name("a4"), name("a2")]
    assert ids(pool.evictable()) == [5, 3, 1, 0]
    assert ids(take(pool, 2)) == [5, 3]


def test_a_block_that_becomes_clean_is_evicted_in_its_old_place() -> None:
    pool = BlockPool(100)
    keep(pool, *map(str, reversed(range(100))))  # the oldest block has id 99
    names = [str(99 - block_id) for block_id in range(100)]
    put_dirty(pool, *names[10:])
    assert ids(take(pool, 5)) == [9, 8, 7, 6, 5]
    assert ids(take(pool, 2)) == [4, 3]
    assert (pool.num_clean, pool.num_young) == (0, 3), "each block was passed over once"
    for block_id in (50, 60):  # both were copied, the younger one first
        block = pool.lookup(name(99 - block_id))
        assert block is not None
        pool.put_clean(block, True)
    assert pool.num_clean == 2
    assert ids(take(pool, 3)) == [60, 50, 2], "the oldest first"
    assert pool.allocate(10).blocks is None
    pool.check()


def test_dirty_blocks_are_named_oldest_first_until_a_copy_reads_them() -> None:
    pool = BlockPool(8)
    keep(pool, *"abcdefgh")  # the oldest block has id 7
    put_dirty(pool, *"abcdefgh")
    assert ids(dirty(pool, 3)) == [7, 6, 5]
    assert ids(dirty(pool, 3, at_most=2)) == [7, 6]
    for block in dirty(pool, 2):
        pool.add_reader(block)
    assert ids(dirty(pool, 3)) == [5], "two are on their way"
    for block_id in (6, 7):
        block = next(block for block in pool.evictable() if block.block_id == block_id)
        pool.put_clean(block, True)
        pool.remove_reader(block)
        pool.check()
    assert dirty(pool, 2) == []
    assert ids(pool.evictable()) == [7, 6, 5, 4, 3, 2, 1, 0], "none has changed its place"
    assert ids(dirty(pool, 5)) == [5, 4, 3]
    pool.postpone(dirty(pool, 5)[0])
    assert ids(dirty(pool, 5)) == [4, 3, 5]
    assert ids(take(pool, 2)) == [7, 6]


def test_an_eviction_makes_the_oldest_of_the_older_dirty_blocks_late() -> None:
    pool = BlockPool(6)
    for text in "abcdef":
        keep(pool, text)
    put_dirty(pool, *"abce")
    assert hashes_of(dirty(pool, 6)) == list(map(name, "abce")) and not pool.late(0)
    pool.release(take(pool, 1))
    assert hashes_of(pool.late(0)) == [name("a")], "it was its turn instead of d"
    assert not pool.late(1)
    pool.allocate(2)
    assert hashes_of(pool.late(0)) == list(map(name, "ab")), "an empty one and f"
    assert hashes_of(pool.late(1)) == [name("a")]
    assert hashes_of(dirty(pool, 6)) == list(map(name, "abce"))
    block = pool.late(0)[0]
    pool.postpone(block)
    assert hashes_of(dirty(pool, 6)) == list(map(name, "bcea")), "it is the last to be copied"
    put_dirty(pool, *"ace")
    assert not pool.late(0), "it can be evicted now"
    pool.check()


def test_blocks_that_a_floor_keeps_are_passed_over_once_and_keep_their_place() -> None:
    pool = BlockPool(40)
    for number in range(30):
        [block] = take(pool, 1)
        pool.insert(block, name(number), b"quiet")
        block.fill()
        pool.release([block])
    pool.floors = {b"quiet": 30}
    for number in range(30, 40):
        [block] = pool.allocate(1, tenant=b"flood").blocks or []
        pool.insert(block, name(number), b"flood")
        block.fill()
        pool.release([block])
    assert [ids(pool.allocate(1, tenant=b"flood").blocks) for _ in range(2)] == [[30], [31]]
    assert pool.num_young == 8
    assert pool.allocate(9, tenant=b"flood") == (None, [], 30)
    assert (pool.num_free_for(b"flood"), pool.num_free, pool.num_young) == (8, 38, 8)
    last = pool.allocate(9, is_partial=True).blocks
    assert ids(last) == [*range(32, 40), 0], "floors give way last"
    pool.check()


def test_an_allocation_tells_what_was_evicted_and_each_block_is_without_its_hash() -> None:
    pool = BlockPool(2)
    keep(pool, "a0", "a1")
    taken = pool.allocate(2)
    assert taken.evicted == [name("a1"), name("a0")]
    assert all(block.block_hash is None for block in taken.blocks or ())
    assert pool.num_cached == 0


def test_a_pool_of_no_blocks_has_none_to_give() -> None:
    pool = BlockPool(0)
    assert pool.allocate(0).blocks == []
    assert pool.allocate(1).blocks is None
    pool.check()


# Sharing


def test_a_lookup_has_no_side_effect(pool: BlockPool) -> None:
    chain = keep(pool, "a0", "a1")
    assert pool.lookup(name("a1")) is chain[1]
    assert pool.lookup(name("b0")) is None
    assert ids(pool.evictable()) == [1, 0]
    assert [block.ref_count for block in chain] == [0, 0]


def test_a_second_block_of_the_same_hash_shares_the_first(pool: BlockPool) -> None:
    (first,) = fill(pool, "a")
    (second,) = take(pool, 1)
    assert pool.insert(second, name("a")) is first
    assert second.block_hash is None
    assert (first.ref_count, second.ref_count, pool.num_cached) == (1, 1, 1)
    assert pool.insert(first, name("a")) is first


def test_a_block_that_is_being_filled_is_found_and_not_ready(pool: BlockPool) -> None:
    (block,) = take(pool, 1)
    pool.insert(block, name("a"))
    assert pool.lookup(name("a")) is block
    assert not block.is_ready
    block.fill()
    assert block.is_ready


def test_a_shared_block_is_evictable_after_its_last_user_only(pool: BlockPool) -> None:
    chain = fill(pool, "a")
    pool.acquire([chain[0]])
    pool.release(chain)
    assert (pool.num_evictable, chain[0].ref_count) == (0, 1)
    pool.release(chain)
    assert ids(pool.evictable()) == [0]
    pool.acquire([chain[0]])
    assert (pool.num_evictable, pool.num_used, chain[0].ref_count) == (0, 1, 1)
    assert chain[0].is_ready


def test_a_block_acquired_from_the_middle_leaves_the_others_in_order(pool: BlockPool) -> None:
    chain = keep(pool, "a0", "a1", "a2", "a3")
    pool.acquire([chain[2]])
    assert ids(pool.evictable()) == [3, 1, 0]
    pool.release([chain[2]])
    assert ids(pool.evictable()) == [3, 1, 0, 2]


# Recency


def test_a_touched_chain_is_evicted_later_and_still_tail_first(pool: BlockPool) -> None:
    first = keep(pool, "a0", "a1", "a2")
    keep(pool, "b0", "b1", "b2")
    pool.touch(hashes_of(first))
    assert ids(pool.evictable()) == [5, 4, 3, 2, 1, 0]


def test_a_touch_of_a_chains_head_leaves_its_tail_to_go_first(pool: BlockPool) -> None:
    chain = keep(pool, "a0", "a1", "a2")
    pool.touch(hashes_of(chain[:2]))
    assert ids(pool.evictable()) == [2, 1, 0]


def test_a_touch_leaves_used_and_empty_blocks_alone(pool: BlockPool) -> None:
    used, idle = fill(pool, "a0", "a1"), keep(pool, "b0", "b1")
    (empty,) = take(pool, 1)
    pool.release([empty])
    pool.touch(hashes_of([*used, *idle, empty]))
    assert ids(pool.evictable()) == [3, 2]
    assert [block.ref_count for block in used] == [1, 1]
    assert ids(take(pool, 2)) == [5, 4]


def test_a_block_that_a_copy_reads_keeps_its_place_and_is_not_reused(pool: BlockPool) -> None:
    first, _ = keep(pool, "a0", "a1")
    take(pool, pool.num_empty)
    (oldest, youngest) = ids(pool.evictable())
    read = next(iter(pool.evictable()))
    pool.add_reader(read)
    assert ids(pool.evictable()) == [oldest, youngest]
    assert pool.allocate(2).blocks is None
    assert ids(take(pool, 1)) == [youngest]
    pool.remove_reader(read)
    assert ids(take(pool, 1)) == [oldest]
    assert first.ref_count == 1


@pytest.mark.parametrize("is_in_use", [False, True])
def test_a_block_that_loses_its_hash_comes_back_with_its_last_reader(
    pool: BlockPool, is_in_use: bool
) -> None:
    (block,) = keep(pool, "a")
    num_free = pool.num_free
    pool.add_reader(block)
    pool.add_reader(block)
    if is_in_use:
        pool.acquire([block])
    pool.drop(name("a"))
    pool.check()
    if is_in_use:
        pool.release([block])
    assert pool.num_free == num_free - 1
    pool.remove_reader(block)
    pool.check()
    assert pool.num_free == num_free - 1
    pool.remove_reader(block)
    assert pool.num_free == num_free
    pool.check()


# Forgetting


def test_a_block_released_before_it_was_ready_forgets_its_hash(pool: BlockPool) -> None:
    (block,) = take(pool, 1)
    pool.insert(block, name("a"))
    pool.acquire([block])
    pool.release([block])
    assert pool.lookup(name("a")) is block
    pool.release([block])
    assert pool.lookup(name("a")) is None
    assert (pool.num_empty, pool.num_cached) == (6, 0)


def test_a_dropped_block_that_nobody_uses_is_empty_at_once(pool: BlockPool) -> None:
    chain = keep(pool, "a0", "a1", "a2")
    assert pool.drop(name("a1")) is chain[1]
    assert pool.lookup(name("a1")) is None
    assert ids(pool.evictable()) == [2, 0]
    assert (pool.num_empty, pool.num_evictable) == (4, 2)
    assert not chain[1].is_ready
    assert pool.drop(name("a1")) is None


def test_a_block_dropped_in_use_is_freed_when_its_last_user_ends(pool: BlockPool) -> None:
    (block,) = fill(pool, "a")
    pool.acquire([block])
    assert pool.drop(name("a")) is block
    assert pool.lookup(name("a")) is None
    assert (block.is_ready, pool.num_used, pool.num_cached) == (True, 1, 0)
    pool.release([block])
    assert (pool.num_used, pool.num_empty) == (1, 5)
    pool.release([block])
    assert (pool.num_used, pool.num_empty, pool.num_evictable) == (0, 6, 0)
    assert not block.is_ready


def test_a_hash_can_be_computed_anew_while_the_dropped_block_is_in_use(pool: BlockPool) -> None:
    (old,) = fill(pool, "a")
    pool.drop(name("a"))
    (new,) = fill(pool, "a")
    assert new is not old
    pool.release([old])
    assert pool.lookup(name("a")) is new
    pool.release([new])
    assert ids(pool.evictable()) == [new.block_id]


# The check itself


def lose_a_user(pool: BlockPool) -> None:
    block_in_use(pool).ref_count = 0


def gain_a_user(pool: BlockPool) -> None:
    next(pool.evictable()).ref_count = 1


def count_below_zero(pool: BlockPool) -> None:
    block_in_use(pool).ref_count = -1


def lose_readiness(pool: BlockPool) -> None:
    clear([next(pool.evictable())])


def lose_a_hash(pool: BlockPool) -> None:
    next(pool.evictable()).block_hash = None


def gain_another_hash(pool: BlockPool) -> None:
    block_in_use(pool).block_hash = name("other")


def gain_a_hash_of_another(pool: BlockPool) -> None:
    block_in_use(pool).block_hash = next(pool.evictable()).block_hash


def lose_the_hash_of_a_used_block(pool: BlockPool) -> None:
    block_in_use(pool).block_hash = None


def block_in_use(pool: BlockPool) -> Block:
    block = pool.lookup(name("used"))
    assert block is not None
    return block


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_user,
        gain_a_user,
        count_below_zero,
        lose_readiness,
        lose_a_hash,
        gain_another_hash,
        gain_a_hash_of_another,
        lose_the_hash_of_a_used_block,
    ],
)
def test_check_finds_what_is_broken(damage: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(4)
    fill(pool, "used")
    keep(pool, "idle")
    pool.check()
    used, idle = block_in_use(pool), next(pool.evictable())
    damage(pool)
    with refused(IntegrityError, hide={repr(used): "USED", repr(idle): "IDLE"}):
        pool.check()


def keep_doubled(pool: BlockPool, *names: str) -> list[Block]:
    """Insert blocks as `keep` does, of which another tier has copies."""
    chain = fill(pool, *names)
    for block in chain:
        block.is_double = True
    pool.release(reversed(chain))
    return chain


def test_a_block_that_is_touched_twice_at_once_becomes_the_youngest_once(pool: BlockPool) -> None:
    keep(pool, "a", "b", "c")
    pool.touch([name("a"), name("b"), name("a")])
    pool.check()
    order = [block.block_hash for block in pool.evictable()]
    assert order == [name("c"), name("b"), name("a")]


def test_clean_blocks_that_are_evicted_last_do_not_stand_for_dirty_ones(pool: BlockPool) -> None:
    pool.pinned = {name("b"), name("c")}
    (waiting,) = keep(pool, "a")
    keep(pool, "b", "c")
    put_dirty(pool, "a")
    pool.allocate(pool.num_empty)
    pool.look_ahead(3, 3)
    assert pool.num_clean == 2
    assert pool.allocate(2).blocks is None
    assert dirty(pool, 2) == [waiting]


def test_duplicates_are_evicted_before_others_and_the_most_recently_used_first(
    pool: BlockPool, evicted: Evicted
) -> None:
    for text in "abcdef":
        (keep_doubled if text in "bce" else keep)(pool, text)
    take(pool, pool.num_empty)
    assert hashes_of(pool.evictable()) == [name(text) for text in "ecbadf"]
    take(pool, 4, evicted)
    assert [lost for _, lost in evicted] == [name(text) for text in "ecba"]
    pool.check()


def test_a_block_whose_other_copy_has_gone_becomes_the_youngest_of_the_others(
    pool: BlockPool,
) -> None:
    [single], _ = keep_doubled(pool, "a"), keep_doubled(pool, "b")
    keep(pool, "c")
    single.is_double = False
    pool.touch([name("a")])
    assert hashes_of(pool.evictable()) == [name(text) for text in "bca"]
    assert pool.num_duplicates == 1


def test_a_duplicate_that_may_not_go_is_passed_over(pool: BlockPool, evicted: Evicted) -> None:
    _, moving, _, pinned = (keep_doubled(pool, text)[0] for text in "abcd")
    keep(pool, "other")
    put_dirty(pool, "a")
    pool.add_reader(moving)
    pool.pinned = {name("d")}
    pool.touch([name("d")])
    held = keep_doubled(pool, "e")
    pool.acquire(held)
    take(pool, pool.num_empty)
    take(pool, 2, evicted)
    assert [lost for _, lost in evicted] == [name("c"), name("other")]
    assert pool.allocate(1).blocks is None, "what is not clean yet goes before what is pinned"
    pool.remove_reader(moving)
    take(pool, 1, evicted)
    assert [lost for _, lost in evicted][2:] == [name("b")]
    assert pinned.block_hash is not None
    pool.check()


def test_a_duplicate_that_was_prefetched_goes_before_other_blocks(
    pool: BlockPool, evicted: Evicted
) -> None:
    keep(pool, "other")
    pool.prefetched = {name("a")}
    keep_doubled(pool, "a")
    take(pool, pool.num_empty)
    take(pool, 1, evicted)
    assert [lost for _, lost in evicted] == [name("a")]


def test_duplicates_within_a_tenants_floor_are_not_evicted_for_another() -> None:
    pool = BlockPool(4)
    pool.floors = {b"owner": 3}
    chain = take(pool, 4)
    for block, text in zip(chain, "abcd", strict=True):
        pool.insert(block, name(text), b"owner")
        block.fill()
        block.is_double = True
    pool.release(chain)
    assert pool.allocate(2, tenant=b"other").blocks is None
    assert ids(pool.allocate(1, tenant=b"other").blocks) == [3]
    pool.check()


def test_an_allocation_of_empty_blocks_only_evicts_nothing(pool: BlockPool) -> None:
    keep(pool, "a", "b")
    num_empty = pool.num_empty
    blocks, evicted, _ = pool.allocate(num_empty + 2, only_empty=True)
    assert (len(blocks or []), evicted) == (num_empty, [])
    assert pool.allocate(1, only_empty=True) == ([], [], 0)


class PoolAgainstModel(RuleBasedStateMachine):
    """Compare a pool with a simple model of it: lists in the order of eviction.

    The order among duplicates is left open.
    """

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.blocks: dict[int, Block] = {}
        self.users = dict.fromkeys(range(num_blocks), 0)
        self.hashes: dict[int, BlockHash] = {}
        self.ready: set[int] = set()
        self.empty = list(range(num_blocks))
        self.evictable: list[int] = []
        self.readers: dict[int, int] = {}
        self.duplicates: set[int] = set()

    def used(self) -> list[int]:
        return [block_id for block_id, count in self.users.items() if count]

    def end_use(self, block_id: int) -> None:
        self.users[block_id] -= 1
        if self.users[block_id]:
            return
        if block_id in self.hashes and block_id in self.ready:
            self.place(block_id)
        else:
            self.hashes.pop(block_id, None)
            self.give_back(block_id)

    def place(self, block_id: int) -> None:
        if self.blocks[block_id].is_double:
            self.duplicates.add(block_id)
        else:
            self.evictable.append(block_id)

    def take_out(self, block_id: int) -> bool:
        """Take a block out of the order; return whether it was there."""
        is_duplicate, is_other = block_id in self.duplicates, block_id in self.evictable
        self.duplicates.discard(block_id)
        if is_other:
            self.evictable.remove(block_id)
        return is_duplicate or is_other

    def free(self) -> list[int]:
        """Blocks that hold content and that nobody uses."""
        return sorted(self.duplicates) + self.evictable

    @rule(texts=st.sets(st.integers(0, 5)))
    def double(self, texts: set[int]) -> None:
        for block_id, block_hash in self.hashes.items():
            self.blocks[block_id].is_double = block_hash in map(name, texts)

    def give_back(self, block_id: int) -> None:
        if not self.readers.get(block_id):  # else with its last reader
            self.ready.discard(block_id)
            self.empty.append(block_id)

    @rule(count=st.integers(0, 9), refused=st.none() | st.sets(st.integers(0, 7), max_size=3))
    def allocate(self, count: int, refused: set[int] | None) -> None:
        for block_id, block in self.blocks.items():
            self.pool.put_clean(block, block_id not in (refused or ()))
        blocks, evicted, _ = self.pool.allocate(count)
        barred = set(refused or ()) | {i for i, count in self.readers.items() if count}
        candidates = self.empty + [i for i in self.free() if i not in barred]
        if len(candidates) < count:
            assert blocks is None
            assert evicted == []
            return
        taken = ids(blocks)
        num_doubled = len(self.duplicates - barred)
        first, last = len(self.empty), len(self.empty) + num_doubled
        assert taken[:first] + taken[last:] == candidates[:count][:first] + candidates[last:count]
        assert set(taken[first:last]) <= self.duplicates - barred
        assert evicted == [self.hashes[i] for i in taken if i in self.hashes]
        for block in blocks or ():
            block_id = block.block_id
            if not self.take_out(block_id):
                self.empty.remove(block_id)
            self.blocks[block_id] = block
            self.users[block_id] = 1
            self.hashes.pop(block_id, None)
            self.ready.discard(block_id)

    @precondition(lambda self: self.used())
    @rule(data=st.data(), text=st.integers(0, 5))
    def insert(self, data: st.DataObject, text: int) -> None:
        block_id = data.draw(st.sampled_from(self.used()))
        owners = [i for i, known in self.hashes.items() if known == name(text)]
        if not owners and block_id in self.hashes:
            return  # an error of the caller, for which the pool has an assertion
        there = self.pool.insert(self.blocks[block_id], name(text))
        assert there.block_id == (owners or [block_id])[0]
        self.hashes[there.block_id] = name(text)

    @precondition(lambda self: self.used())
    @rule(data=st.data())
    def mark_ready(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.used()))
        self.blocks[block_id].fill()
        self.ready.add(block_id)

    @precondition(lambda self: self.used() or self.free())
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.used() + self.free()))
        self.pool.acquire([self.blocks[block_id]])
        self.users[block_id] += 1
        self.take_out(block_id)

    @precondition(lambda self: self.used())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chain = data.draw(st.lists(st.sampled_from(self.used()), unique=True, min_size=1))
        self.pool.release(self.blocks[block_id] for block_id in chain)
        for block_id in chain:
            self.end_use(block_id)

    @precondition(lambda self: self.used() or self.free())
    @rule(data=st.data())
    def add_reader(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.used() + self.free()))
        self.pool.add_reader(self.blocks[block_id])
        self.readers[block_id] = self.readers.get(block_id, 0) + 1

    @precondition(lambda self: any(self.readers.values()))
    @rule(data=st.data())
    def remove_reader(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from([i for i, count in self.readers.items() if count]))
        self.pool.remove_reader(self.blocks[block_id])
        self.readers[block_id] -= 1
        if not self.users[block_id] and block_id not in self.hashes:
            self.give_back(block_id)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        chain = data.draw(st.lists(st.sampled_from(sorted(self.blocks)), unique=True))
        self.pool.touch(hashes_of(self.blocks[block_id] for block_id in chain))
        for block_id in reversed(chain):
            if self.take_out(block_id):
                self.place(block_id)

    @rule(text=st.integers(0, 5))
    def drop(self, text: int) -> None:
        dropped = self.pool.drop(name(text))
        owners = [i for i, known in self.hashes.items() if known == name(text)]
        assert (ids([dropped]) if dropped else []) == owners
        for block_id in owners:
            del self.hashes[block_id]
            if self.take_out(block_id):
                self.give_back(block_id)

    @invariant()
    def is_sound_and_agrees_with_the_model(self) -> None:
        pool = self.pool
        pool.check()
        free, num_duplicates = ids(pool.evictable()), len(self.duplicates)
        assert pool.num_duplicates == num_duplicates
        assert set(free[:num_duplicates]) == self.duplicates
        assert free[num_duplicates:] == self.evictable
        assert pool.num_empty == len(self.empty)
        assert pool.num_free == len(self.empty) + len(self.free())
        assert pool.num_used == pool.num_blocks - pool.num_free
        assert pool.num_cached == len(self.hashes)
        for block_id, block in self.blocks.items():
            assert block.ref_count == self.users[block_id]
            assert block.block_hash == self.hashes.get(block_id)
            assert block.is_ready == (block_id in self.ready)
        for block_id, block_hash in self.hashes.items():
            assert pool.lookup(block_hash) is self.blocks[block_id]


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=120, stateful_step_count=40)


def test_all_clean_blocks_that_nobody_uses_are_evicted(pool: BlockPool) -> None:
    owed, _, used = (keep(pool, text)[0] for text in "abc")
    put_dirty(pool, "a")
    pool.acquire([used])
    assert pool.evict_clean() == [name("b")]
    assert pool.evict_clean() == []
    assert list(pool.evictable()) == [owed]
    pool.check()
