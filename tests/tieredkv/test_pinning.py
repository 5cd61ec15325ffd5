"""Pins of blocks in the pools, in the cache, and on the way to disk and back."""

import pytest

from tests.fake_store import DAY_S, Rig, chain_of
from tests.fakes import START
from tests.golden import refused
from tieredkv.cache.block import Block
from tieredkv.cache.chain import BlockClaim, Chain
from tieredkv.cache.pool import BlockPool
from tieredkv.errors import RequestError
from tieredkv.retention import DEFAULT_POLICIES, RetentionPolicies, RetentionPolicy
from tieredkv.types import BlockHash, Tier

pytestmark = pytest.mark.usefixtures("each_tier")

HOUR_S = 3600.0


def pinned_run(
    rig: Rig, name: str, length: int, *, pin_s: float = 1800.0, retention: str = "24h"
) -> int:
    """Serve a request whose blocks are all claimed and pinned; return how many it computed."""
    prefix = rig.chain(name, length, retention)
    until = rig.clock.now() + pin_s
    prefix.claims = [BlockClaim(length, frozenset({retention}), until), *prefix.claims]
    return serve(rig, prefix)


def serve(rig: Rig, prefix: Chain) -> int:
    rig.cache.arrive(prefix)
    for _ in range(100):
        if rig.admit(prefix):
            return rig.finish(prefix)
        rig.turn()
    raise AssertionError("not admitted in 100 steps")


def hashes(*names: str) -> list[BlockHash]:
    return [BlockHash(name.encode()) for name in names]


def filled_pool(pinned: set[BlockHash], *names: str) -> BlockPool:
    """Return a full pool of unused blocks; the first name is the oldest block."""
    pool = BlockPool(len(names))
    pool.pinned = pinned
    for block_hash in hashes(*names):
        [block] = pool.allocate(1).blocks or []
        pool.insert(block, block_hash)
        block.fill()
        pool.release([block])
        pool.check()
    return pool


def order(pool: BlockPool) -> str:
    return b"".join(block.block_hash or b"-" for block in pool.evictable()).decode()


# --- the pool


def test_pinned_blocks_are_evicted_last_and_then_the_oldest_first() -> None:
    pool = filled_pool(set(hashes("a", "c")), "a", "b", "c", "d")
    assert order(pool) == "bdac"
    for left in ("dac", "ac", "c", ""):
        assert pool.allocate(1).blocks is not None, "never stuck, even where all is pinned"
        pool.check()
        assert order(pool) == left


def test_no_more_than_half_of_a_pool_is_held_back() -> None:
    pool = filled_pool(set(hashes("a", "b", "c", "d")), "a", "b", "c", "d")
    assert order(pool) == "cdab"


def test_a_use_takes_a_block_to_the_young_end_of_its_part() -> None:
    pool = filled_pool(pinned := set(hashes("a", "b")), "a", "b", "c", "d")
    pool.touch(hashes("a"))
    assert order(pool) == "cdba"
    pinned.discard(hashes("b")[0])
    pool.touch(hashes("b", "c"))
    assert order(pool) == "dcba"
    pool.check()
    chain = [block for block in pool.find(hashes("a", "d")) if block]
    pool.acquire(chain)
    assert order(pool) == "cb"
    pool.release(chain)
    assert order(pool) == "cbda"
    pool.check()


def test_a_pinned_block_does_not_stand_in_for_one_that_is_not_clean_yet() -> None:
    pool = filled_pool(set(hashes("a", "b")), "a", "b", "c", "d")
    first, second = filter(None, pool.find(hashes("c", "d")))
    pool.put_clean(first, False)
    pool.put_clean(second, False)
    assert pool.allocate(2).blocks is None
    pool.put_clean(first, True)
    assert pool.allocate(1).blocks is not None
    assert order(pool) == "dab"
    assert len(pool.allocate(3, is_partial=True).blocks or []) == 2
    assert order(pool) == "d"


def test_pinned_blocks_that_a_floor_keeps_do_not_hide_those_that_may_be_taken() -> None:
    pool = filled_pool(set(hashes("a", "b")), "a", "b", "c", "d")
    pool.drop(hashes("a")[0])
    [block] = pool.allocate(1).blocks or []
    pool.insert(block, hashes("a")[0], b"quiet")
    block.fill()
    pool.release([block])
    pool.touch(hashes("b"))
    pool.acquire(block for block in pool.find(hashes("c", "d")) if block)
    assert order(pool) == "ab"
    pool.floors = {b"quiet": 1}
    assert pool.allocate(1, tenant=b"flood").blocks is not None
    assert order(pool) == "a"
    pool.check()


def test_blocks_that_a_floor_keeps_are_taken_instead_of_pinned_ones_and_not_besides() -> None:
    pool = BlockPool(12)
    pool.pinned = set(hashes(*"fghxyz"))
    blocks = pool.allocate(11).blocks or []
    tenants = [b"quiet"] * 8 + [b"other"] * 3
    for block, block_hash, tenant in zip(blocks, hashes(*"abcdefghxyz"), tenants, strict=True):
        pool.insert(block, block_hash, tenant)
        block.fill()
    pool.release(blocks)
    pool.floors = {b"quiet": 8}
    pool.allocate(1, only_empty=True)
    assert order(pool) == "abcdefghxyz"
    assert len(pool.allocate(8).blocks or []) == 8
    assert order(pool) == "fgh"
    pool.check()


# --- the cache


def test_a_flood_takes_what_is_not_pinned_from_vram() -> None:
    rig = Rig(num_blocks=16, num_pages=64, has_store=False)
    assert pinned_run(rig, "kept", 4) == 4
    rig.run("plain", 4)
    for number in range(10):
        rig.run(f"flood{number}", 3)
    assert rig.on_device("kept", 4) == [0, 1, 2, 3]
    assert rig.on_device("plain", 4) == []


@pytest.mark.parametrize("retention", ["in_memory", "24h"])
def test_a_flood_takes_what_is_not_pinned_from_host_memory(retention: str) -> None:
    rig = Rig(num_blocks=16, num_pages=16, has_store=retention == "24h")
    pinned_run(rig, "kept", 4, retention=retention)
    rig.run("plain", 4, retention)
    assert rig.cache.flush(to=Tier.HOST, deadline=1e12)
    assert rig.on_host("kept", 4) == rig.on_host("plain", 4) == [0, 1, 2, 3]
    for number in range(20):
        rig.run(f"flood{number}", 4, retention)
        rig.turn(3)
    assert rig.on_host("kept", 4) == [0, 1, 2, 3]
    assert rig.on_host("plain", 4) == []
    rig.check_nothing_is_held()


def test_one_request_cannot_pin_a_pool() -> None:
    rig = Rig(num_blocks=16, num_pages=16, has_store=False)
    pinned_run(rig, "greedy", 16)
    for number in range(20):
        assert rig.run(f"flood{number}", 6) == 6
    assert len(rig.on_device("greedy", 16)) <= 8
    assert rig.run("flood19", 6) == 0


def test_a_pin_ends_to_the_second_and_its_blocks_are_as_if_just_used() -> None:
    rig = Rig(num_blocks=8, num_pages=8, has_store=False)
    pinned_run(rig, "kept", 3, pin_s=60)
    rig.run("other", 3)
    rig.clock.moment = START + 59
    rig.turn()
    assert rig.tiers.catalog.pinned == set(chain_of("kept", 3))
    rig.clock.moment = START + 60
    rig.turn()
    assert rig.tiers.catalog.pinned == set()
    names = [block.block_hash for block in rig.tiers.device.evictable()]
    assert names == [*chain_of("other", 3)[::-1], *chain_of("kept", 3)[::-1]]
    assert rig.run("kept", 3) == 0, "evictable is not expired"


def test_pin_outlives_idleness_but_not_age() -> None:
    rig = Rig(has_store=False, policies=DEFAULT_POLICIES)
    pinned_run(rig, "kept", 2, retention="in_memory")
    pinned_run(rig, "old", 2, retention="in_memory", pin_s=12 * HOUR_S)
    rig.run("plain", 2, "in_memory")
    for moment, left in ((601, {"kept", "old"}), (1799, {"kept", "old"}), (1800, {"old"})):
        rig.clock.moment = START + moment
        rig.turn()
        names = {name for name in ("kept", "old", "plain") if rig.on_device(name, 2)}
        assert names == left, moment
    rig.clock.moment = START + HOUR_S - 1
    pinned_run(rig, "old", 2, retention="in_memory")
    rig.clock.moment = START + HOUR_S
    rig.turn()
    assert rig.on_device("old", 2) == []


def test_a_hit_moves_pin_forward_and_never_back() -> None:
    rig = Rig(has_store=False)
    entry_of = rig.tiers.catalog.get
    head = chain_of("kept", 2)[0]

    def until() -> float:
        entry = entry_of(head)
        assert entry is not None
        return entry.pinned_until - START

    pinned_run(rig, "kept", 2, pin_s=1800)
    rig.clock.moment = START + 100
    pinned_run(rig, "kept", 2, pin_s=300)
    assert until() == 1800
    rig.run("kept", 2)
    assert until() == 1800
    pinned_run(rig, "kept", 2, pin_s=1800)
    assert until() == 1900
    pinned_run(rig, "kept", 2, pin_s=48 * HOUR_S)
    assert until() == 24 * HOUR_S, "never past the end of the longest policy"


def test_hits_without_end_do_not_fill_the_queue_of_deadlines() -> None:
    rig = Rig(has_store=False)
    for number in range(200):
        rig.clock.moment = START + number
        pinned_run(rig, "kept", 8)
    assert rig.tiers.catalog.num_queued < 200


def test_pin_travels_to_the_disk_and_back() -> None:
    rig = Rig(num_blocks=8, num_pages=8)
    pinned_run(rig, "kept", 2)
    assert rig.cache.flush(to=Tier.DISK, deadline=1e12)
    records = [record for record, _ in rig.store.blocks.values()]
    assert [record.pinned_until for record in records] == [START + 1800] * 2
    assert rig.tiers.catalog.entries() == []
    rig.clock.moment = START + 10
    assert rig.run("kept", 2) == 0
    entries = rig.tiers.catalog.entries()
    assert {entry.pinned_until for entry in entries} == {START + 1800}
    pinned_run(rig, "kept", 2)
    assert rig.store.touched[-1].pinned_until == START + 1810


def test_pin_that_comes_while_a_block_is_written_reaches_the_disk() -> None:
    rig = Rig(is_write_behind=True)
    rig.store.is_held = True
    rig.run_without_disk("kept", 1)
    rig.turn(3)
    assert len(rig.store.jobs) == 1
    prefix = rig.chain("kept", 1)
    rig.pass_over_disk(prefix)
    prefix.claims = [BlockClaim(1, frozenset({"24h"}), START + 60), *prefix.claims]
    serve(rig, prefix)
    rig.store.is_held = False
    rig.turn(2)
    assert [item.pinned_until for item in rig.store.touched] == [START + 60]


def test_longer_claim_that_comes_while_a_block_is_written_reaches_the_disk() -> None:
    disk = frozenset(Tier)
    week = RetentionPolicy(name="week", idle_s=7 * DAY_S, absolute_s=7 * DAY_S, tiers=disk)
    rig = Rig(is_write_behind=True, policies=(*DEFAULT_POLICIES, week))
    rig.store.is_held = True
    rig.run_without_disk("kept", 2)
    rig.turn(3)
    assert len(rig.store.jobs) == 2
    prefix = rig.chain("kept", 2)
    rig.pass_over_disk(prefix)
    prefix.claims = [BlockClaim(1, frozenset({"week"})), *prefix.claims]
    serve(rig, prefix)
    rig.store.is_held = False
    rig.turn(2)
    longer, same = rig.store.touched  # the disk is told of both, since both were found
    assert (longer.expires_at, longer.retention, longer.hits) == (START + 7 * DAY_S, "week", 1)
    assert (same.retention, same.hits) == ("24h", 1)


def test_the_end_of_a_claim_on_the_disk_is_no_use_of_a_block() -> None:
    brief = RetentionPolicy(name="brief", idle_s=10.0, absolute_s=10.0, tiers=frozenset(Tier))
    long = RetentionPolicy(name="long", idle_s=1e3, absolute_s=1e3, tiers=frozenset({Tier.DEVICE}))
    rig = Rig(num_blocks=8, num_pages=1, policies=(*DEFAULT_POLICIES, brief, long))
    both = rig.chain("a", 2)
    both.claims = [BlockClaim(2, frozenset({"brief", "long"})), *both.claims]
    serve(rig, both)
    serve(rig, rig.chain("b", 2, "long"))
    before = [block.block_hash for block in rig.tiers.device.evictable()]
    rig.clock.moment = START + 10.0
    rig.turn()
    assert [block.block_hash for block in rig.tiers.device.evictable()] == before


def test_each_block_lives_by_the_claims_that_cover_it() -> None:
    rig = Rig(policies=DEFAULT_POLICIES)
    prefix = rig.chain("mixed", 4, "in_memory")
    prefix.claims = [
        BlockClaim(1, frozenset({"24h", "5m"})),
        BlockClaim(2, frozenset({"5m"})),
        BlockClaim(3, frozenset({"1h"})),
        *prefix.claims,
    ]
    serve(rig, prefix)
    for moment, left in ((299, [0, 1, 2, 3]), (300, [0, 2, 3]), (600, [0, 2]), (3600, [0])):
        rig.clock.moment = START + moment
        rig.turn()
        assert rig.on_device("mixed", 4) == left, moment
    assert rig.cache.flush(to=Tier.DISK, deadline=1e12)
    assert rig.on_disk("mixed", 4) == [0]


# --- where a hit may end


def read(rig: Rig, name: str, length: int, ends: list[int] | None) -> tuple[int, Chain]:
    """Serve a request whose hit may end at `ends`; return how many blocks it computed."""
    prefix = rig.chain(name, length)
    prefix.read_ends = ends
    return serve(rig, prefix), prefix


@pytest.mark.parametrize(
    ("ends", "computed"), [([], 6), ([2], 4), ([2, 4], 2), ([4, 9], 2), ([6], 0), ([7], 6)]
)
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_hit_ends_at_the_last_end_that_is_there(
    tier: str, ends: list[int], computed: int
) -> None:
    rig = Rig()
    rig.run("chain", 6)
    if tier != "device":
        assert rig.cache.flush(to=Tier(tier), deadline=1e12)
    counters = rig.tiers.counters
    before = counters.promoted_host_blocks
    assert read(rig, "chain", 6, ends)[0] == computed
    loaded = {"device": 0, "host": 6 - computed, "disk": 6 - computed}[tier]
    assert counters.promoted_host_blocks - before == loaded, "nothing is loaded in vain"
    assert len(rig.store.loaded) == (loaded if tier == "disk" else 0)
    rig.check_nothing_is_held()
    assert rig.run("chain", 6) == 0, "all of it is there, each block once"


def test_a_chain_with_a_hole_is_read_to_an_end_before_it() -> None:
    rig = Rig()
    rig.run("chain", 6)
    rig.tiers.drop(chain_of("chain", 6)[3], "admin")
    assert read(rig, "chain", 6, [2, 4, 6])[0] == 4


def test_for_a_queued_request_nothing_is_prefetched_that_it_may_not_read() -> None:
    rig = Rig()
    rig.store.put("disk", 6)
    prefix = rig.chain("disk", 6)
    prefix.read_ends = [2, 9]
    rig.cache.arrive(prefix)
    rig.turn(3)
    assert len(prefix.prefetched) == 2
    rig.cache.release(prefix)
    assert len(rig.store.loaded) == 2
    rig.check_nothing_is_held()


def test_blocks_computed_again_are_claimed_and_pinned_too() -> None:
    rig = Rig(num_blocks=8, num_pages=8, has_store=False)
    rig.run("chain", 4)
    prefix = rig.chain("chain", 4)
    prefix.read_ends = []
    prefix.claims = [BlockClaim(4, frozenset({"24h"}), START + 60), *prefix.claims]
    assert serve(rig, prefix) == 4
    assert rig.tiers.catalog.pinned == set(chain_of("chain", 4))
    rig.run("flood", 4)
    assert rig.on_device("chain", 4) == [0, 1, 2, 3]


# --- policies


def test_the_policies_of_ttls_exist_but_cannot_be_named() -> None:
    policies = RetentionPolicies()
    for name, idle_s in (("5m", 300.0), ("1h", HOUR_S)):
        policy = policies.get(name, is_any=True)
        assert (policy.idle_s, policy.absolute_s, policy.may_use_disk) == (idle_s, HOUR_S, False)
        with refused(RequestError, param="prompt_cache_retention", code="invalid_value"):
            policies.get(name)


@pytest.mark.parametrize(
    ("claims", "used", "until", "deadline"),
    [
        ({"5m"}, 0, 0, 300),
        ({"5m"}, 3400, 0, 3600),
        ({"1h"}, 3400, 0, 3600),
        ({"in_memory"}, 0, 1800, 1800),
        ({"in_memory"}, 1500, 1800, 2100),
        ({"in_memory"}, 0, 9999, 3600),
        ({"in_memory", "24h"}, 0, 43200, 86400),
    ],
)
def test_the_deadline_of_a_pinned_block(
    claims: set[str], used: float, until: float, deadline: float
) -> None:
    assert RetentionPolicies().deadline(claims, 0.0, used, until) == deadline


def test_a_block_that_was_due_before_floors_came_is_evicted_when_its_turn_comes() -> None:
    pool = BlockPool(1)
    pool.most_last = 1

    def keep(block_hash: BlockHash) -> Block:
        [block] = pool.allocate(1).blocks or []
        pool.insert_filled([block], [block_hash])
        pool.release([block])
        pool.look_ahead(1, 1)
        return block

    first, pinned = BlockHash(b"first"), BlockHash(b"pinned")
    block = keep(first)
    pool.put_clean(block, False)
    pool.floors = {b"other": 1}
    pool.put_clean(block, True)
    pool.pinned = {pinned}
    keep(pinned)
    pool.check()
    assert pool.allocate(1).blocks is not None
