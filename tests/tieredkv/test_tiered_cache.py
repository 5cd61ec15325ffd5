"""The tiered cache as a request uses it, from its arrival to its end."""

import pytest

from tests.fake_store import DAY_S, Rig, chain_of
from tests.waiting import deadline, wait_until
from tieredkv.cache import lookups, room
from tieredkv.cache.block import Block
from tieredkv.types import BlockHash, Tier

pytestmark = pytest.mark.usefixtures("each_tier")


def test_a_second_request_with_a_prefix_computes_nothing() -> None:
    rig = Rig()
    assert rig.run("a", 6) == 6
    assert rig.run("a", 6) == 0
    rig.check_nothing_is_held()


def test_two_requests_with_one_prefix_compute_it_once() -> None:
    rig = Rig()
    first, second = rig.start("a", 4), rig.start("a", 4)
    assert [block.block_id for block in first.blocks] == [block.block_id for block in second.blocks]
    assert rig.compute(first, at_most=2) + rig.compute(second) == 4
    assert rig.finish(first) + rig.finish(second) == 0
    rig.check_nothing_is_held()


def test_two_requests_with_one_prefix_load_it_once() -> None:
    rig = Rig()
    rig.store.put("a", 4)
    first, second = rig.queue("a", 4), rig.queue("a", 4)
    rig.turn()
    assert rig.admit(first)
    assert rig.admit(second)
    assert rig.finish(first) + rig.finish(second) == 0
    assert sorted(rig.store.loaded) == sorted(chain_of("a", 4))
    rig.check_nothing_is_held()


def test_a_hole_is_computed_and_what_lies_beyond_it_is_loaded() -> None:
    rig = Rig()
    rig.store.put("a", 6)
    hole = chain_of("a", 6)[2]
    rig.store.lose([hole])
    prefix = rig.start("a", 6)
    assert prefix.origins() == [Tier.DISK, Tier.DISK, None, Tier.DISK, Tier.DISK, Tier.DISK]
    assert rig.finish(prefix) == 1
    assert set(rig.store.loaded) == set(chain_of("a", 6)) - {hole}


def test_sources_name_the_tier_that_each_block_came_from() -> None:
    rig = Rig()
    rig.store.put("a", 2)
    disk = rig.start("a", 3)
    assert disk.origins() == [Tier.DISK, Tier.DISK, None]
    rig.finish(disk)
    device = rig.start("a", 3)
    assert device.origins() == [Tier.DEVICE] * 3
    rig.finish(device)
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    host = rig.start("a", 3)
    assert host.origins() == [Tier.HOST] * 3
    assert rig.finish(host) == 0


def test_a_failed_load_of_one_block_is_computed_and_the_others_are_served() -> None:
    rig = Rig()
    rig.store.put("a", 4)
    rig.store.is_held = True
    prefix = rig.queue("a", 4)
    rig.store.answer(0)
    rig.turn()
    assert rig.admit(prefix)
    bad = chain_of("a", 4)[1]
    while rig.store.jobs:
        reason = "checksum" if rig.store.jobs[0].block_hash == bad else ""
        rig.store.complete(0, reason=reason)
        rig.turn()
    assert rig.finish(prefix) == 1
    assert prefix.origins() == []
    assert rig.tiers.counters.load_failures == {"checksum": 1}
    rig.check_nothing_is_held()


def test_a_prefix_larger_than_the_arena_streams_through_it() -> None:
    rig = Rig(num_blocks=32, num_pages=4)
    rig.store.put("a", 24)
    prefix = rig.start("a", 24)
    assert rig.finish(prefix) == 0
    assert sorted(rig.store.loaded) == sorted(chain_of("a", 24))
    rig.check_nothing_is_held()


def test_a_store_that_is_down_costs_misses_only() -> None:
    rig = Rig()
    rig.store.put("a", 4)
    rig.store.is_down = True
    assert rig.run("a", 4) == 4
    rig.check_nothing_is_held()


def test_a_lookup_that_gets_no_answer_is_a_miss_and_only_the_first_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    rig.store.put("a", 2)
    rig.store.is_held = True
    with monkeypatch.context() as patch:
        patch.setattr(lookups, "LOOKUP_TIMEOUT_S", 0.0)
        assert rig.run("a", 2) == 2
    other = rig.queue("b", 2)
    assert rig.cache.is_settled(other), "it waits for a disk that does not answer"
    assert rig.admit(other)
    rig.finish(other)
    rig.store.is_held = False
    rig.turn()
    assert not rig.cache.is_settled(rig.queue("c", 1)), "the disk answers again and is not asked"
    assert rig.tiers.counters.load_failures == {"lookup_timeout": 1}


# Cancelling, at every stage.


@pytest.mark.parametrize("stage", ["looking up", "prefetching", "admitted", "reading", "copying"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_cancelled_request_releases_exactly_what_it_held(stage: str, is_shared: bool) -> None:
    rig = Rig(num_blocks=16, num_pages=16)
    rig.store.put("a", 8)
    other = rig.queue("a", 8) if is_shared else None
    rig.store.is_held = True
    prefix = rig.queue("a", 8)
    if stage != "looking up":
        while rig.store.lookups:
            rig.store.answer(0)
        rig.turn()
        assert rig.store.jobs
    if stage in ("admitted", "reading", "copying"):
        rig.transfer.is_held = stage == "copying"
        assert rig.admit(prefix)
    if stage == "reading":
        rig.turn()
    if stage == "copying":
        rig.store.complete(0)
        rig.turn()
        assert rig.transfer.has_pending
    rig.cache.release(prefix)
    rig.turn()
    assert (prefix.blocks, prefix.prefetched) == ([], [])
    loans = rig.store.pending_pages
    if not rig.transfer.has_pending and other is None:
        assert rig.tiers.device.num_used == 0, "device blocks wait for a read that nobody wants"
        assert rig.tiers.host.num_used == len(loans), "exactly the pages on loan stay held"
    rig.store.is_held = rig.transfer.is_held = False
    rig.turn(2)
    if other is not None:
        while not rig.admit(other):
            rig.turn()
        assert rig.finish(other) == 0
    rig.check_nothing_is_held()


def test_cancelling_the_request_that_computes_leaves_its_work_to_the_others() -> None:
    rig = Rig()
    first, second = rig.start("a", 4), rig.start("a", 4)
    rig.compute(first, at_most=1)
    rig.cache.release(first)
    rig.check()
    assert rig.finish(second) == 3
    rig.check_nothing_is_held()


# Recency, pins and room.


def test_eviction_takes_the_tail_before_the_head_in_every_ram_tier() -> None:
    rig = Rig(num_blocks=8, num_pages=8)
    rig.run("a", 6)
    rig.turn()
    rig.run("b", 4)
    assert rig.on_device("a", 6) == [0, 1, 2, 3]
    rig.run("c", 6)
    rig.run("d", 6)
    rig.turn()
    for name in "abcd":
        kept = sorted({*rig.on_device(name, 6), *rig.on_host(name, 6)})
        assert kept == list(range(len(kept))), f"{name} kept {kept}: no usable prefix"


def test_pages_written_to_disk_are_still_evicted_tail_first() -> None:
    rig = Rig(num_blocks=8, num_pages=8, reserve=8)
    rig.run("a", 8)
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    rig.cache._demoter.write(8)
    rig.turn(10)
    rig.cache._demoter.write(8)
    rig.turn(10)
    assert len(rig.on_disk("a", 8)) >= 4
    rig.run("b", 4, "in_memory")
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    assert rig.on_host("a", 8) == [0, 1, 2, 3]


def test_a_hit_refreshes_the_whole_chain_in_every_tier() -> None:
    rig = Rig(num_blocks=16, num_pages=16)
    for name in "ab":
        rig.run(name, 4)
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    rig.cache._demoter.write(16)
    rig.turn(8)
    rig.clock.moment += 5
    rig.run("a", 4)
    oldest = [page.block_hash for page in rig.tiers.host.evictable()]
    assert oldest == chain_of("a", 4) + chain_of("b", 4)[::-1], "VRAM has the one, not the other"
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    oldest = [page.block_hash for page in rig.tiers.host.evictable()]
    assert oldest == chain_of("b", 4)[::-1] + chain_of("a", 4)[::-1]
    on_disk = [h for h in chain_of("a", 4) if h in rig.store.blocks]
    assert on_disk
    assert [item.block_hash for item in rig.store.touched] == on_disk
    assert all(item.last_used == rig.clock.moment for item in rig.store.touched)


@pytest.mark.parametrize(
    ("num_blocks", "num_pages", "names", "length"),
    [(12, 12, "abcde", 4), (20, 12, "abcde", 5), (24, 16, "abcdefghijkl", 3)],
)
def test_vram_and_host_memory_hold_together_what_one_pool_of_both_would(
    num_blocks: int, num_pages: int, names: str, length: int
) -> None:
    """The chains take turns, and there is room for one more, but for none to be held twice."""
    rig = Rig(num_blocks=num_blocks, num_pages=num_pages, has_store=False)
    assert len(names) * length + length > num_blocks + num_pages - length
    num_computed = [rig.run(name, length, "in_memory") for name in 5 * names]
    assert num_computed == [length] * len(names) + [0] * (4 * len(names))


@pytest.mark.parametrize(("num_blocks", "num_pages"), [(8, 16), (12, 12)])
def test_pages_owed_to_the_disk_make_room_while_vram_keeps_their_blocks(
    num_blocks: int, num_pages: int
) -> None:
    rig = Rig(num_blocks=num_blocks, num_pages=num_pages)
    rig.store.is_held = True  # so that every page stays owed
    num_computed = [rig.run_without_disk(name, 6) for name in 5 * "abc"]
    assert num_computed == [6, 6, 6] + [0] * 12
    assert not rig.tiers.counters.lost_blocks
    assert rig.tiers.counters.demotions_dropped == 0


def test_the_page_of_a_block_that_vram_evicts_next_is_the_youngest_page() -> None:
    rig = Rig(num_blocks=8, num_pages=8, has_store=False, reserve=2)
    rig.run("a", 6, "in_memory")
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    rig.run("a", 6, "in_memory")
    rig.cache._demoter.demote(4)
    seen = chain_of("a", 6)[:1:-1]
    pages = [page.block_hash for page in rig.tiers.host.evictable()]
    assert pages == [*chain_of("a", 6)[:2], *seen]
    assert rig.tiers.host.num_duplicates == 2
    rig.check()


def test_what_is_evicted_for_a_request_is_not_what_it_came_for() -> None:
    rig = Rig(num_blocks=8, num_pages=12, has_store=False)
    for name, length in (("a", 6), ("b", 4), ("c", 6), ("d", 2)):
        rig.run(name, length, "in_memory")
    assert rig.on_host("a", 6) == list(range(6))
    assert rig.on_host("b", 4) == list(range(4))
    prefix = rig.start("a", 6, "in_memory")
    assert rig.on_host("b", 4) == []
    assert rig.finish(prefix) == 0


def test_what_is_brought_up_gives_its_pages_to_what_vram_evicts() -> None:
    rig = Rig(num_blocks=256, num_pages=256, has_store=False)
    rig.run("a", 200, "in_memory")
    rig.run("b", 240, "in_memory")
    prefix = rig.start("a", 200, "in_memory")
    assert prefix.origins().count(Tier.HOST) >= 200 - 16 - room.MIN_SLICE, "16 are left in VRAM"
    assert rig.finish(prefix) <= room.MIN_SLICE, "as many as one turn takes from others"
    rig.check_nothing_is_held()


def test_no_block_is_given_up_for_a_request_that_gets_its_room_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "PATIENCE_S", 1e-9)  # it asks at longer intervals
    rig = Rig(num_blocks=256, num_pages=256, has_store=False)
    rig.run("a", 200, "in_memory")
    rig.run("b", 240, "in_memory")
    assert rig.finish(rig.start("a", 200, "in_memory")) <= room.MIN_SLICE
    assert rig.tiers.counters.demotions_dropped == 0
    rig.check_nothing_is_held()


def test_pages_of_what_is_being_copied_up_make_room_before_others() -> None:
    rig = Rig(num_blocks=8, num_pages=8, has_store=False)
    for name in "ab":
        rig.run(name, 4, "in_memory")
        assert rig.cache.flush(Tier.HOST, deadline=deadline())
    rig.run("c", 4, "in_memory")
    rig.transfer.is_held = True
    prefix = rig.start("a", 4, "in_memory")
    rig.turn()
    assert rig.cache._demoter.demote(4) == 0
    rig.transfer.is_held = False
    rig.turn()
    rig.cache._demoter.demote(4)
    rig.turn()
    assert rig.on_host("c", 4) == rig.on_host("b", 4) == list(range(4))
    assert rig.on_host("a", 4) == [], "it made the room"
    assert rig.finish(prefix) == 0
    rig.check_nothing_is_held()


def test_a_cancelled_hit_leaves_the_host_chain_in_order() -> None:
    rig = Rig(num_blocks=8, num_pages=8)
    rig.run("a", 6)
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    prefix = rig.start("a", 6)
    rig.turn()
    rig.cache.release(prefix)
    assert rig.tiers.host.num_duplicates == 6
    duplicates = [page.block_hash for page in rig.tiers.host.evictable()]
    assert duplicates == chain_of("a", 6), "the last to leave VRAM goes first"
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    oldest = [page.block_hash for page in rig.tiers.host.evictable()]
    assert oldest == chain_of("a", 6)[::-1]


def test_blocks_that_arrived_one_by_one_are_left_in_order_by_a_cancelled_request() -> None:
    rig = Rig(num_blocks=8, num_pages=16)
    rig.store.put("a", 4)
    rig.store.is_held = True
    prefix = rig.queue("a", 4)
    rig.store.answer(0)
    rig.turn()
    assert rig.admit(prefix)
    while rig.store.jobs:
        rig.store.complete(0)
        rig.turn(2)
    rig.cache.release(prefix)
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    oldest = [page.block_hash for page in rig.tiers.host.evictable()]
    assert oldest == chain_of("a", 4)[::-1]


def test_what_queued_requests_want_is_evicted_like_other_blocks() -> None:
    rig = Rig(num_blocks=16, has_store=False)
    rig.run("a", 4)
    rig.run("b", 8)
    queued = rig.queue("a", 4)
    rig.run("c", 8)
    assert rig.on_device("a", 4) == []
    assert rig.on_device("b", 8) == list(range(8))
    rig.cache.release(queued)
    rig.check_nothing_is_held()


def test_what_was_prefetched_is_evicted_last_until_nobody_waits_for_it() -> None:
    rig = Rig(num_blocks=16, num_pages=8, restore="load")
    rig.store.put("a", 2)
    first, second = rig.queue("a", 2), rig.queue("a", 2)
    rig.turn(4)
    assert rig.on_host("a", 2) == [0, 1]
    assert sum(len(prefix.prefetched) for prefix in (first, second)) == 2
    for number in range(8):
        rig.run(f"flood{number}", 4, "in_memory")
        assert rig.on_host("a", 2) == [0, 1]
    rig.cache.release(first)
    rig.cache.release(second)
    assert not rig.tiers.prefetched
    for number in range(8, 16):
        rig.run(f"flood{number}", 4, "in_memory")
    assert rig.on_host("a", 2) == []
    rig.check_nothing_is_held()


def test_a_running_request_takes_what_queued_ones_want_when_nothing_else_is_left() -> None:
    rig = Rig(num_blocks=8, has_store=False)
    rig.run("a", 4)
    queued = rig.queue("a", 4)
    running = rig.start("b", 4)
    rig.compute(running)
    while not rig.cache.extend(running):
        rig.turn()
    assert rig.on_device("a", 4) == [0, 1, 2], "no more of it than is needed"
    rig.cache.release(running)
    rig.cache.release(queued)
    rig.check_nothing_is_held()


def test_nothing_is_prefetched_while_something_is_written() -> None:
    rig = Rig(num_blocks=16, num_pages=16, is_write_behind=True)
    rig.store.put("a", 4)
    rig.run("b", 4)
    rig.store.is_held = True
    rig.turn(3)
    assert rig.tiers.disk_link.num_writing
    prefix = rig.queue("a", 4)
    while rig.store.lookups:
        rig.store.answer(0)
    rig.turn(3)
    assert rig.store.loaded == []
    rig.store.is_held = False
    rig.turn(8)
    assert rig.on_host("a", 4) == [0, 1, 2, 3]
    rig.cache.release(prefix)
    rig.check_nothing_is_held()


def test_queued_requests_prefetch_and_hold_at_most_half_of_the_arena() -> None:
    rig = Rig(num_blocks=64, num_pages=16)
    queued = []
    for name in "abcdef":
        rig.store.put(name, 8)
        queued.append(rig.queue(name, 8))
        rig.turn(2)
    assert 0 < len(rig.store.loaded) <= 8
    assert rig.tiers.host.num_used <= 8
    for prefix in queued:
        while not rig.admit(prefix):
            rig.turn()
        assert rig.finish(prefix) == 0
    rig.check_nothing_is_held()


def test_prefetch_leaves_room_for_what_an_admitted_request_reads() -> None:
    rig = Rig(num_blocks=64, num_pages=16)
    rig.store.put("admitted", 8)
    rig.store.is_held = True
    first = rig.queue("admitted", 8)
    queued = []
    for name in "abcdef":
        rig.store.put(name, 8)
        queued.append(rig.queue(name, 8))
    while rig.store.lookups:
        rig.store.answer(len(rig.store.lookups) - 1)
    rig.turn()
    num_prefetched = len(rig.store.jobs)
    assert 0 < num_prefetched <= 4
    assert rig.admit(first)
    rig.turn()
    assert len(rig.store.jobs) == 8, "inbound loads may use half of the arena, and do"
    wanted = set(chain_of("admitted", 8))
    while jobs := [i for i, job in enumerate(rig.store.jobs) if job.block_hash in wanted]:
        rig.store.complete(jobs[0])
        rig.turn()
    assert rig.finish(first) == 0, "prefetched pages stand in the way"


def test_allocation_waits_for_a_stalled_store_no_longer_than_its_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "PATIENCE_S", 0.02)
    rig = Rig(num_blocks=4, num_pages=4)
    rig.run("a", 4)
    rig.turn(3)
    rig.run("b", 4)
    rig.store.is_held = True
    prefix = rig.chain("c", 4)
    rig.pass_over_disk(prefix)
    rig.cache.arrive(prefix)

    def is_admitted() -> bool:
        if rig.admit(prefix):
            return True
        assert rig.cache._room.is_waiting(prefix)
        rig.turn()
        return False

    wait_until(is_admitted, "the allocation waits for ever")
    assert rig.tiers.counters.demotions_dropped > 0
    assert rig.finish(prefix) == 4


def test_what_the_disk_cannot_take_is_lost_from_the_oldest_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "PATIENCE_S", 0.02)
    rig = Rig(num_blocks=8, num_pages=8)
    rig.run("old", 8)
    assert rig.cache._demoter.demote(8) == 8
    rig.turn()
    rig.store.is_held = True
    rig.run_without_disk("young", 8)
    rig.run_without_disk("new", 8)
    left = [len(rig.on_device(name, 8)) + len(rig.on_host(name, 8)) for name in ("old", "young")]
    assert left == [2, 6], "two pages are on loan to be written"
    assert rig.tiers.counters.lost_blocks == {"too_slow": 8}


def test_no_block_is_given_up_while_its_copy_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PATIENCE_S", 0.0)
    rig = Rig(num_blocks=16, num_pages=32, has_store=False, reserve=16)
    rig.run("a", 16, "in_memory")
    rig.transfer.is_held = True
    prefix = rig.queue("b", 2, "in_memory")
    for _ in range(5):
        assert not rig.admit(prefix)
        rig.turn()
    assert rig.tiers.counters.demotions_dropped == 0
    rig.transfer.is_held = False
    rig.turn()
    assert rig.admit(prefix)
    assert sorted({*rig.on_host("a", 16), *rig.on_device("a", 16)}) == [*range(16)]


def test_a_refused_request_finds_the_room_that_was_made_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "FEW_BLOCKS", 2)
    rig = Rig(num_blocks=8, num_pages=8, has_store=False)
    rig.run("a", 8, "in_memory")
    few, many = rig.queue("few", 2, "in_memory"), rig.queue("many", 6, "in_memory")
    for _ in range(5):
        assert not rig.cache.admit(many, 6, makes_room=False)
        rig.turn()
    assert rig.on_device("a", 8) == [*range(8)] and rig.on_host("a", 8) == [7], "but the reserve"
    rig.transfer.is_held = True
    assert not rig.cache.make_room(many, 6), "its copies are under way"
    rig.transfer.is_held = False
    rig.turn()
    assert rig.cache.make_room(many, 6) and not many.blocks
    assert rig.cache.admit(many, 6, makes_room=False)
    rig.check()
    rig.cache.release(many)
    rig.turn()
    assert rig.cache.admit(few, 2, makes_room=False), "few blocks are not put off"
    assert sorted({*rig.on_host("a", 8), *rig.on_device("a", 8)}) == [*range(8)]


def test_room_beside_others_is_made_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "FEW_BLOCKS", 1)
    monkeypatch.setattr(room, "MAX_AHEAD", 3)
    rig = Rig(num_blocks=16, num_pages=16, has_store=False)
    rig.run("a", 16, "in_memory")
    prefix, device = rig.queue("b", 10, "in_memory"), rig.tiers.device
    num_empty, num_turns = device.num_empty, 0
    while not rig.cache.admit(prefix, 10, makes_room=False):
        rig.cache.make_room(prefix, 10)
        num_new, num_empty = device.num_empty - num_empty, device.num_empty
        assert num_new <= 3
        rig.turn()
        num_turns += 1
    assert 3 <= num_turns < 10 and rig.tiers.counters.demotions_dropped == 0
    assert sorted({*rig.on_host("a", 16), *rig.on_device("a", 16)}) == [*range(16)]
    rig.cache.release(prefix)
    alone = rig.queue("c", 12, "in_memory")
    rig.turn()
    rig.cache.make_room(alone, 12, is_alone=True)
    rig.turn()
    assert rig.cache.make_room(alone, 12, is_alone=True), "nobody else waits for a step"
    assert rig.cache.admit(alone, 12)


def test_room_that_is_made_ahead_keeps_what_the_request_will_find() -> None:
    rig = Rig(num_blocks=8, num_pages=8, has_store=False)
    rig.run("a", 3, "in_memory")
    rig.run("b", 5, "in_memory")
    again = rig.queue("a", 6, "in_memory")
    for _ in range(2):
        rig.cache.make_room(again, 6)
        rig.turn()
    assert rig.on_device("a", 3) == [0, 1, 2] and rig.tiers.device.num_empty == 3
    assert rig.admit(again)
    assert rig.finish(again) == 3


def test_an_allocation_larger_than_host_memory_gets_its_room_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "PATIENCE_S", 1e9)
    monkeypatch.setattr(room, "MAX_PATIENCE_S", 1e9)
    rig = Rig(num_blocks=12, num_pages=4, has_store=False)
    rig.run("a", 12, "in_memory")
    rig.transfer.is_held = True
    prefix = rig.queue("b", 10, "in_memory")
    for _ in range(10):
        if rig.admit(prefix):
            break
        rig.transfer.complete()  # nothing else ends while the others are tried again
        rig.turn()
    else:
        raise AssertionError("copies evict one another's pages for ever")
    assert rig.tiers.counters.demotions_dropped == 0


def test_patience_is_counted_for_each_request_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PATIENCE_S", 0.05)
    rig = Rig(num_blocks=12, num_pages=4)
    rig.run("a", 4)
    rig.run("b", 4)
    rig.store.is_held = True
    big = rig.chain("big", 10)
    rig.pass_over_disk(big)
    rig.cache.arrive(big)

    def is_admitted() -> bool:
        if rig.admit(big):
            return True
        one = rig.chain("one", 0)
        if rig.cache.extend(one):  # small allocations still succeed
            rig.cache.release(one)
        rig.turn()
        return False

    wait_until(is_admitted, "small allocations starve a large one")


def test_generated_blocks_are_sealed_and_found_again() -> None:
    rig = Rig()
    prefix = rig.start("a", 2)
    rig.compute(prefix)
    twin = rig.start("a", 2)
    sealed = chain_of("a", 3)[2]
    for request in (prefix, twin):
        assert rig.cache.extend(request)
        rig.write(request.blocks[2], sealed)
        rig.cache.seal(request, sealed)
        rig.check()
    assert prefix.blocks[2].block_hash == sealed
    assert twin.blocks[2].block_hash is None, "the twin of a block stays private"
    rig.cache.release(prefix)
    rig.cache.release(twin)
    assert rig.run("a", 3) == 0
    rig.check_nothing_is_held()


# Retention.


def test_an_idle_block_expires_to_the_second_in_both_ram_tiers() -> None:
    for tier in (Tier.DEVICE, Tier.HOST):
        rig = Rig(has_store=False)
        rig.run("a", 2, "in_memory")
        if tier is Tier.HOST:
            assert rig.cache.flush(Tier.HOST, deadline=deadline())
        rig.clock.moment += 599.0
        assert rig.run("a", 2, "in_memory") == 0
        rig.clock.moment += 600.0
        assert rig.run("a", 2, "in_memory") == 2


def test_hits_do_not_keep_a_block_beyond_its_absolute_limit() -> None:
    rig = Rig(has_store=False)
    rig.run("a", 2, "in_memory")
    for _ in range(7):
        rig.clock.moment += 500.0
        assert rig.run("a", 2, "in_memory") == 0
    rig.clock.moment += 99.0
    assert rig.run("a", 2, "in_memory") == 0
    rig.clock.moment += 1.0
    assert rig.run("a", 2, "in_memory") == 2


def test_a_disk_block_counts_its_age_from_its_compute_after_it_was_loaded() -> None:
    rig = Rig()
    rig.store.put("a", 2, age_s=DAY_S - 100.0)
    assert rig.run("a", 2) == 0
    rig.clock.moment += 99.0
    assert rig.run("a", 2) == 0
    rig.clock.moment += 1.0
    assert rig.run("a", 2) == 2


def test_a_read_that_ends_after_the_expiry_is_a_miss() -> None:
    rig = Rig()
    rig.store.put("a", 2, age_s=DAY_S - 10.0)
    rig.store.is_held = True
    prefix = rig.queue("a", 2)
    rig.store.answer(0)
    rig.turn()
    assert rig.admit(prefix)
    rig.clock.moment += 10.0
    rig.store.is_held = False
    assert rig.finish(prefix) == 2
    rig.check_nothing_is_held()


def test_a_block_in_use_at_its_expiry_is_unindexed_at_once_and_freed_with_its_last_user() -> None:
    rig = Rig(has_store=False)
    user = rig.start("a", 2, "in_memory")
    rig.compute(user)
    rig.clock.moment += 3600.0
    rig.turn()
    assert rig.on_device("a", 2) == []
    assert rig.tiers.device.num_used == 2
    rig.verify(user)
    first, second = rig.start("a", 2, "in_memory"), rig.start("a", 2, "in_memory")
    assert rig.compute(first) == 2
    assert rig.compute(second) == 0, "the others wait for the first that misses it"
    rig.cache.release(user)
    assert rig.tiers.device.num_used == 2
    rig.finish(first)
    rig.finish(second)
    rig.check_nothing_is_held()


def test_a_block_computed_while_its_old_copy_expires_expires_with_it() -> None:
    rig = Rig(restore="compute", has_store=False)
    rig.run("a", 1, "in_memory")
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    prefix = rig.start("a", 1, "in_memory")
    rig.clock.moment += 3600.0
    rig.finish(prefix)
    rig.turn()
    assert rig.on_host("a", 1) == rig.on_device("a", 1) == []
    assert rig.run("a", 1, "in_memory") == 1
    assert rig.entry("a", 0).computed_at == rig.clock.moment


def test_in_memory_blocks_are_never_offered_to_the_store() -> None:
    rig = Rig(num_blocks=4, num_pages=4)
    for round_ in range(6):
        rig.run(f"a{round_}", 4, "in_memory")
        rig.turn(3)
    assert rig.cache.flush(Tier.DISK, deadline=deadline())
    rig.run("b", 4, "in_memory")
    rig.cache.drain(30.0)
    assert rig.store.stored == []


def test_a_later_24h_claim_makes_a_block_eligible_and_its_age_counts_from_its_compute() -> None:
    rig = Rig()
    rig.run("a", 2, "in_memory")
    rig.clock.moment += 500.0
    rig.run("a", 2, "24h")
    assert rig.cache.drain(30.0).num_late == 0
    records = [record for record, _ in rig.store.blocks.values()]
    assert [record.expires_at for record in records] == [rig.clock.moment - 500.0 + DAY_S] * 2
    assert [record.retention for record in records] == ["24h"] * 2


def test_an_evicted_block_is_gone_from_ram_and_a_write_in_flight_is_deleted_on_disk() -> None:
    rig = Rig()
    rig.run("a", 2)
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    rig.store.is_held = True
    rig.cache._demoter.write(16)
    assert len(rig.store.jobs) == 2
    assert rig.evict(lambda entry: True) == 2
    rig.check()
    again = rig.chain("a", 2, "in_memory")
    rig.pass_over_disk(again)
    assert rig.admit(again)
    rig.compute(again)
    rig.store.is_held = False
    rig.turn(2)
    assert rig.store.blocks == {}, "an evicted block came back on disk"
    assert not rig.entry("a", 0).is_on_disk
    rig.cache.release(again)
    rig.check_nothing_is_held()


def test_an_evicted_block_does_not_come_back_by_a_read_in_flight() -> None:
    rig = Rig()
    rig.store.put("a", 2)
    rig.store.is_held = True
    prefix = rig.queue("a", 2)
    rig.store.answer(0)
    rig.turn()
    assert rig.admit(prefix)
    rig.evict(lambda entry: True)
    rig.store.is_held = False
    assert rig.finish(prefix) == 2
    assert rig.tiers.counters.load_failures["evicted"] == 2
    rig.check_nothing_is_held()


def test_a_block_in_use_that_an_operator_evicts_serves_its_user_and_nobody_else() -> None:
    rig = Rig(has_store=False)
    user = rig.start("a", 2)
    rig.compute(user)
    rig.evict(lambda entry: True)
    rig.check()
    rig.verify(user)
    other = rig.start("a", 2)
    assert rig.compute(other) == 2
    rig.finish(user)
    rig.finish(other)
    rig.check_nothing_is_held()


def test_a_request_without_room_is_looked_up_again_when_something_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(num_blocks=16, has_store=False)
    running = rig.start("a", 10)
    waiting = rig.queue("b", 10)
    looked_up: list[int] = []
    find = rig.tiers.device.find

    def record(hashes: list[BlockHash]) -> list[Block | None]:
        looked_up.extend([len(hashes)] if hashes else [])
        return find(hashes)

    monkeypatch.setattr(rig.tiers.device, "find", record)
    for _ in range(5):
        assert not rig.admit(waiting)
        rig.turn()
    assert looked_up == [10]
    rig.compute(running)
    rig.finish(running)
    while not rig.admit(waiting):
        rig.turn()
    rig.finish(waiting)
    rig.check_nothing_is_held()


def test_a_prefix_shared_by_many_takes_the_room_of_one() -> None:
    rig = Rig(num_blocks=8)
    users = [rig.start("a", 4) for _ in range(20)]
    assert sum(rig.compute(user) for user in users) == 4
    assert rig.tiers.device.num_used == 4
    for user in users:
        rig.finish(user)
    rig.check_nothing_is_held()


def test_a_block_whose_last_copy_went_while_it_waited_to_be_computed_is_forgotten() -> None:
    rig = Rig(num_blocks=8, num_pages=2, restore="compute", has_store=False)
    rig.run("a", 2, "in_memory")
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    prefix = rig.start("a", 2, "in_memory")
    rig.run("b", 2, "in_memory")
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    rig.cache.release(prefix)
    rig.check()
    assert len(rig.tiers.catalog.entries()) == 2


def test_blocks_that_a_new_worker_may_have_lost_are_written_again() -> None:
    rig = Rig()
    rig.run("a", 4)
    assert rig.cache.drain(30.0).num_late == 0
    assert sorted(rig.store.blocks) == sorted(chain_of("a", 4))
    rig.store.restart_empty()
    rig.cache.poll()
    assert rig.cache.drain(30.0).num_late == 0
    assert sorted(rig.store.blocks) == sorted(chain_of("a", 4))
    rig.check_nothing_is_held()


def test_a_new_worker_does_not_lengthen_a_life() -> None:
    rig = Rig()
    rig.store.put("a", 2, retention="7d")  # by a policy that is no longer configured
    assert rig.finish(rig.start("a", 2, "in_memory")) == 0
    rig.clock.moment += 700
    assert rig.finish(rig.start("a", 2, "in_memory")) == 0, "the disk's word counted"
    rig.store.restart_empty()
    rig.turn()
    rig.clock.moment += 700
    assert rig.run("a", 2, "in_memory") == 2


def test_nothing_expired_is_served_though_the_sweep_has_not_come_to_it() -> None:
    rig = Rig(num_blocks=256, num_pages=256, has_store=False)
    for name in "abcd":
        assert rig.run(name, 50, "in_memory") == 50
    rig.clock.moment += 600.0
    rig.cache._expiry.sweep()
    assert rig.cache.has_more and rig.tiers.counters.expired_blocks < 200
    for name in "dcba":
        assert rig.run(name, 50, "in_memory") == 50, name
    rig.turn(4)
    assert (rig.tiers.counters.expired_blocks, rig.cache.has_more) == (200, False)
