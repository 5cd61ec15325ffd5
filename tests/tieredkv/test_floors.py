"""No tenant is evicted below its floor in VRAM or host memory, and no request gets stuck."""

import pytest

from tests.engine.test_scheduler import SIZE, Loop
from tests.fake_store import Rig
from tests.waiting import deadline, wait_until
from tieredkv.cache import lookups, room
from tieredkv.cache.shares import SEEN_S
from tieredkv.types import Tier


def flood(rig: Rig, *, num_blocks: int, retention: str = "24h") -> None:
    """Serve chains of four blocks, `num_blocks` in all, of one tenant."""
    for index in range(num_blocks // 4):
        rig.run(f"flood/{index}", 4, retention)


@pytest.mark.parametrize("length", [1, 7, 8])
def test_blocks_within_a_tenants_floor_outlive_a_flood_in_vram(length: int) -> None:
    rig = Rig(num_blocks=16, num_pages=8, has_store=False)
    rig.run("quiet/a", length, "in_memory")
    flood(rig, num_blocks=160, retention="in_memory")
    assert rig.on_device("quiet/a", length) == list(range(length))
    prefix = rig.start("quiet/a", length)
    assert prefix.origins() == [Tier.DEVICE] * length
    assert rig.finish(prefix) == 0
    rig.check_nothing_is_held()


def test_blocks_within_a_tenants_floor_outlive_a_flood_in_host_memory() -> None:
    rig = Rig(num_blocks=16, num_pages=16, has_store=False)
    rig.run("quiet/a", 8)
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    flood(rig, num_blocks=160)
    assert (rig.on_host("quiet/a", 8), rig.on_device("quiet/a", 8)) == (list(range(8)), [])
    prefix = rig.start("quiet/a", 8)
    assert prefix.origins() == [Tier.HOST] * 8
    assert rig.finish(prefix) == 0


def test_a_page_of_a_block_that_its_tenants_floor_keeps_in_vram_stays_a_duplicate() -> None:
    rig = Rig(num_blocks=8, num_pages=8, has_store=False)
    rig.run("quiet/a", 2, "in_memory")
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    rig.run("quiet/a", 2, "in_memory")
    assert rig.tiers.host.num_duplicates == 2
    flood(rig, num_blocks=16, retention="in_memory")
    assert rig.on_device("quiet/a", 2) == [0, 1]
    rig.check_nothing_is_held()


def test_a_flood_takes_what_is_above_the_floor_and_no_more() -> None:
    rig = Rig(num_blocks=16, num_pages=8, has_store=False)
    for index in range(4):
        rig.run(f"quiet/{index}", 4, "in_memory")
    assert sum(len(rig.on_device(f"quiet/{index}", 4)) for index in range(4)) == 16
    flood(rig, num_blocks=160, retention="in_memory")
    assert [rig.on_device(f"quiet/{index}", 4) for index in (2, 3)] == [[0, 1, 2, 3]] * 2
    assert rig.tiers.device.num_evictable == 16


def test_shares_that_an_operator_gave_count_and_others_share_the_rest() -> None:
    rig = Rig(num_blocks=20, num_pages=8, has_store=False)
    rig.tiers.shares.give({b"quiet": 0.6})
    rig.run("quiet/a", 12, "in_memory")
    rig.run("other/a", 4, "in_memory")
    flood(rig, num_blocks=200, retention="in_memory")
    assert rig.tiers.shares.by_tenant == {b"quiet": 0.6, b"other": 0.2, b"flood": 0.2}
    assert rig.run("quiet/a", 12) + rig.run("other/a", 4) == 0
    rig.tiers.shares.give({b"other": 0.5})
    assert rig.tiers.shares.by_tenant == {b"quiet": 0.25, b"other": 0.5, b"flood": 0.25}
    assert rig.tiers.device.floors[b"other"] == 10


def test_one_tenant_alone_has_no_floor_and_two_have_until_one_was_not_seen_for_an_hour() -> None:
    rig = Rig(num_blocks=16, num_pages=8)
    rig.run("quiet/a", 8)
    assert rig.tiers.shares.by_tenant == rig.tiers.device.floors == rig.store.shares == {}
    rig.run("flood/a", 4)
    assert rig.tiers.shares.by_tenant == rig.store.shares == {b"quiet": 0.5, b"flood": 0.5}
    assert rig.tiers.host.floors == {b"quiet": 4, b"flood": 4}
    rig.clock.moment += SEEN_S
    flood(rig, num_blocks=64)
    assert rig.tiers.shares.by_tenant == rig.tiers.device.floors == {}
    assert rig.on_device("quiet/a", 8) == []


def test_a_request_larger_than_what_floors_leave_takes_them_last() -> None:
    rig = Rig(num_blocks=16, num_pages=8, has_store=False)
    rig.run("quiet/a", 8, "in_memory")
    flood(rig, num_blocks=16, retention="in_memory")
    prefix = rig.chain("flood/large", 11, "in_memory")
    rig.cache.arrive(prefix)
    assert not rig.cache.admit(prefix, 11)
    assert not rig.cache._room.is_waiting(prefix)

    def is_admitted() -> bool:
        rig.turn()
        return rig.admit(prefix, is_alone=True)

    wait_until(is_admitted, "never admitted")
    rig.finish(prefix)
    assert rig.on_device("quiet/a", 8) == [0, 1, 2, 3, 4]


def test_dirty_blocks_beside_floors_are_waited_for_and_dropped_and_nobody_is_stuck() -> None:
    rig = Rig(num_blocks=16, num_pages=4)
    rig.store.reason = "io_error"
    rig.run("quiet/a", 8)
    rig.tiers.shares.note_request(b"flood")
    for index in range(12):
        rig.run_without_disk(f"flood/{index}", 6)
    assert rig.on_device("quiet/a", 8) == list(range(8))
    rig.check_nothing_is_held()


def test_a_tenant_that_floods_waits_for_its_own_requests_and_the_other_keeps_its_blocks() -> None:
    loop = Loop(rig := Rig(num_blocks=16, num_pages=8, has_store=False))
    quiet = loop.add("quiet", 32, tenant="quiet")
    hashes = list(quiet.chain.hashes)
    loop.run()
    for index in range(40):
        loop.add(f"flood {index}", 3 * SIZE, seed=index, max_tokens=9, tenant="flood")
    loop.run(steps=3000)
    assert len(loop.finished) == 41
    assert all(rig.tiers.device.lookup(block_hash) for block_hash in hashes)
    loop.add("again", 32, tenant="quiet")
    before = loop.num_computed_tokens
    loop.run()
    assert loop.num_computed_tokens == before + 1
    rig.check_nothing_is_held()


def test_answers_that_outgrow_what_floors_leave_are_given_all_the_same() -> None:
    loop = Loop(rig := Rig(num_blocks=16, num_pages=8, has_store=False))
    loop.add("quiet", 32, tenant="quiet")
    loop.run()
    for index in range(3):
        loop.add(f"flood {index}", 8, seed=index, max_tokens=50, tenant="flood")
        loop.add(f"quiet {index}", 8, seed=index, max_tokens=50, tenant="quiet")
    loop.run(steps=3000)
    assert len(loop.finished) == 7
    rig.check_nothing_is_held()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_request_larger_than_what_floors_leave_waits_no_longer_than_others_for_a_stopped_disk(
    monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    monkeypatch.setattr(room, "PATIENCE_S", 0.01)
    monkeypatch.setattr(lookups, "LOOKUP_TIMEOUT_S", 0.0)
    loop = Loop(rig := Rig(num_blocks=16, num_pages=4))
    rig.store.is_held = is_stopped
    for name in ("quiet", "flood"):
        for seed in range(2):
            loop.add(f"{name} {seed}", 16, seed=seed, tenant=name)
            loop.run(steps=20_000)
    num_waits = rig.tiers.counters.allocation_waits
    loop.add("large", 55, seed=5, tenant="flood")
    loop.run(steps=20_000)
    assert loop.finished[-1] == "large"
    assert rig.tiers.counters.allocation_waits <= num_waits + 1
    rig.check_nothing_is_held()


def test_a_request_that_waits_for_room_is_tried_again_though_another_tenant_found_none() -> None:
    rig = Rig(num_blocks=16, num_pages=16, has_store=False)
    rig.run("alice/a", 8)
    bob = rig.start("bob/a", 8)
    rig.compute(bob)
    rig.transfer.is_held = True
    alice = rig.queue("alice/b", 6)
    assert not rig.admit(alice) and rig.cache._room.is_waiting(alice)
    assert not rig.cache.extend(bob), "the rest is within the floor of another tenant"
    assert not rig.admit(alice) and rig.cache._room.is_waiting(alice)
    rig.transfer.is_held = False
    rig.turn()
    assert rig.admit(alice), "the copies have ended"
    rig.finish(alice)
    rig.finish(bob)
    rig.check_nothing_is_held()


def test_a_running_request_that_waits_for_copies_is_preempted_by_no_other_tenants_refusal() -> None:
    loop = Loop(rig := Rig(num_blocks=16, num_pages=16, has_store=False))
    rig.tiers.shares.give({b"alice": 6 / 16, b"bob": 10 / 16})
    loop.add("alice", 6 * SIZE, tenant="alice")
    loop.run()
    loop.add("bob 0", 2 * SIZE, seed=1, tenant="bob")
    loop.run()
    for seed in (2, 3):
        loop.add(f"bob {seed}", 4 * SIZE - 1, seed=seed, max_tokens=4, tenant="bob")
    loop.step()
    rig.transfer.is_held = True
    loop.add("carol", SIZE, seed=4, tenant="carol")
    for _ in range(10):
        loop.step()
    running = loop.scheduler.running
    assert all(rig.cache._room.is_waiting(request.chain) for request in running)
    assert (len(running), loop.scheduler.num_preemptions) == (2, 0)
    rig.transfer.is_held = False
    loop.run()
    assert loop.scheduler.num_preemptions == 0
    assert sorted(loop.finished) == ["alice", "bob 0", "bob 2", "bob 3", "carol"]
    rig.check_nothing_is_held()


def test_a_refused_request_is_tried_again_once_another_tenants_floor_is_lower() -> None:
    rig = Rig(num_blocks=16, num_pages=16, has_store=False)
    rig.tiers.shares.give({b"alice": 0.5, b"bob": 0.5})
    rig.run("alice/a", 8, "in_memory")
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    rig.run("alice/a", 8, "in_memory")
    other = rig.start("bob/a", 4)
    bob = rig.queue("bob/b", 6)
    assert not rig.admit(bob) and not rig.cache._room.is_waiting(bob)
    rig.tiers.shares.give({b"alice": 0.25, b"bob": 0.75})
    assert rig.admit(bob)
    rig.finish(bob)
    rig.finish(other)
    rig.check_nothing_is_held()


@pytest.mark.parametrize("first", ["alice", "bob"])
def test_the_tenant_that_exceeds_its_floor_the_most_is_preempted_and_not_the_largest(
    first: str,
) -> None:
    loop = Loop(rig := Rig(num_blocks=8, num_pages=16, has_store=False))
    rig.tiers.shares.give({b"alice": 6 / 8, b"bob": 2 / 8})
    num_tokens = {"alice": 4 * SIZE, "bob": 2 * SIZE}
    for tenant in sorted(num_tokens, key=lambda each: each != first):
        loop.add(tenant, num_tokens[tenant], seed=len(tenant), max_tokens=6, tenant=tenant)
    while not loop.scheduler.num_preemptions:
        loop.step()
    assert [each.request_id for each in loop.scheduler.waiting] == ["bob"]
    loop.run()
    assert loop.finished == ["alice", "bob"]
    rig.check_nothing_is_held()


def test_a_request_that_the_step_computes_already_is_not_preempted_for_another() -> None:
    loop = Loop(rig := Rig(num_blocks=8, num_pages=16, has_store=False))
    rig.tiers.shares.give({b"alice": 6 / 8, b"bob": 2 / 8})
    loop.add("bob", 4 * SIZE, seed=1, max_tokens=6, tenant="bob")
    loop.add("alice", 3 * SIZE - 2, seed=2, max_tokens=6, tenant="alice")
    computed = [[row.request.request_id for row in loop.step()] for _ in range(4)]
    assert computed == [["bob", "alice"], ["bob", "alice"], ["bob", "alice"], ["bob"]]
    assert loop.scheduler.num_preemptions == 0
    loop.run()
    assert loop.finished == ["alice", "bob"]
    rig.check_nothing_is_held()
