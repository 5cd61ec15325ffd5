"""Demotion of blocks: reserves, writes, drains, and the cost of a failing disk."""

import time

import pytest

from tests.fake_store import BLOCK_BYTES, Rig, chain_of
from tests.waiting import deadline
from tieredkv.cache import room
from tieredkv.cache.chain import Chain
from tieredkv.cache.demotion import MAX_MOVES, most_late
from tieredkv.cache.disk_link import MIN_WRITES
from tieredkv.cache.tiers import Tiers
from tieredkv.pieces import whole
from tieredkv.retention import DEFAULT_POLICIES, IN_MEMORY, RetentionPolicy
from tieredkv.tier import TierFigures
from tieredkv.types import BlockHash, Tier

pytestmark = pytest.mark.usefixtures("each_tier")


def push_out(rig: Rig, name: str, num_chains: int) -> None:
    """Serve chains of four blocks that the disk is not owed, a step for each."""
    for number in range(num_chains):
        rig.run_without_disk(f"{name} {number}", 4, "in_memory")
        rig.turn()


def test_a_reserve_of_clean_device_blocks_is_kept_ahead_of_need() -> None:
    rig = Rig(num_blocks=16, reserve=4)
    rig.run("a", 16)
    rig.turn(2)
    assert rig.on_host("a", 16) == [12, 13, 14, 15]
    rig.run("b", 4)
    assert rig.tiers.counters.allocation_waits == 0
    assert rig.on_device("a", 16) == list(range(12))


def test_blocks_in_use_are_copied_ahead_where_running_requests_hold_nearly_all() -> None:
    rig = Rig(num_blocks=16, num_pages=32, reserve=4)
    first = rig.start("a", 6)
    rig.compute(first)
    rig.turn(2)
    assert rig.on_host("a", 6) == [], "there is room"
    second = rig.start("b", 8)
    rig.compute(second)
    rig.turn(6)
    assert rig.on_host("a", 6) == list(range(6))
    assert rig.on_host("b", 8) == list(range(8))
    rig.finish(first)
    rig.finish(second)
    rig.run("c", 16)
    assert rig.tiers.counters.allocation_waits == 0
    assert rig.run("a", 6) == rig.run("b", 8) == 0, "nothing was lost"


def test_touching_blocks_often_keeps_no_others_from_being_copied_ahead() -> None:
    rig = Rig(num_blocks=16, num_pages=32, reserve=4)
    rig.compute(rig.start("a", 8))
    second = rig.start("b", 6)
    rig.compute(second)
    for _ in range(4):
        rig.cache.touch(second)
    rig.turn(8)
    assert rig.on_host("a", 8) == list(range(8))
    assert rig.on_host("b", 6) == list(range(6))


def test_demoting_what_the_tier_below_has_writes_nothing() -> None:
    rig = Rig()
    rig.run("a", 4)
    assert rig.cache.flush(Tier.DISK, deadline=deadline())
    assert rig.run("a", 4) == 0
    demoted, stored = rig.tiers.counters.demoted_host_blocks, list(rig.store.stored)
    assert rig.on_host("a", 4) == [0, 1, 2, 3], "promotion keeps the lower copy"
    assert rig.cache.flush(Tier.DISK, deadline=deadline())
    assert rig.tiers.counters.demoted_host_blocks == demoted
    assert rig.store.stored == stored


def test_copies_of_blocks_that_are_evicted_meanwhile_count_as_moved() -> None:
    rig = Rig()
    rig.run("a", 4)
    rig.transfer.is_held = True
    assert rig.cache._demoter.demote(4) == 4
    rig.evict(lambda entry: True)
    rig.transfer.is_held = False
    rig.turn()
    assert rig.on_host("a", 4) == []
    counters = rig.tiers.counters
    assert (counters.demoted_host_blocks, counters.move_seconds["device,host"][0]) == (4, 1)
    rig.check_nothing_is_held()


def test_on_evict_writes_under_pressure_only() -> None:
    rig = Rig(num_blocks=8, num_pages=8)
    rig.run("a", 4)
    rig.turn(3)
    assert rig.store.stored == []
    for name in "bcde":
        rig.run(name, 4)
        rig.turn(3)
    assert rig.store.stored
    assert rig.tiers.counters.demotions_dropped == 0


def test_write_behind_writes_soon_after_the_compute() -> None:
    rig = Rig(is_write_behind=True)
    rig.transfer.is_held = True
    rig.run("a", 4)
    rig.run("b", 2, "in_memory")
    rig.turn()
    assert rig.tiers.host.num_used == 4, "each block is on its way once"
    rig.transfer.is_held = False
    rig.turn(4)
    assert rig.on_disk("a", 4) == [0, 1, 2, 3]
    assert rig.on_disk("b", 2) == []
    assert rig.on_device("a", 4) == [0, 1, 2, 3], "a copy was made, nothing was moved"
    assert rig.cache.is_idle


def test_a_step_starts_no_more_writes_behind_than_follow_from_what_was_computed() -> None:
    rig = Rig(num_blocks=256, num_pages=512, is_write_behind=True)
    prefix = rig.start("a", 200)
    rig.store.is_held = True
    rig.compute(prefix)
    rig.turn()
    assert rig.tiers.host.num_used <= MAX_MOVES + 2 * 200
    rig.turn(2)
    assert len(rig.store.jobs) == 128, "a quarter of host memory may be on loan"
    for _ in range(100):
        rig.store.complete(0)
    rig.turn(2)
    assert 28 < len(rig.store.jobs) <= 28 + 2 * MAX_MOVES
    rig.store.is_held = False
    rig.turn(20)
    assert rig.on_disk("a", 200) == list(range(200))
    rig.finish(prefix)
    rig.check_nothing_is_held()


def test_blocks_owed_to_the_disk_are_not_scanned_while_the_worker_is_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(num_blocks=256, num_pages=128, is_write_behind=True)
    rig.run("a", 100)
    rig.store.is_held = True
    rig.run_without_disk("b", 100)
    rig.turn(30)
    assert len(rig.store.jobs) == 32, "the cap"
    looks: list[object] = []
    is_owed = Tiers.is_owed_to_disk

    def counted(tiers: Tiers, block_hash: BlockHash | None) -> bool:
        looks.append(block_hash)
        return is_owed(tiers, block_hash)

    monkeypatch.setattr(Tiers, "is_owed_to_disk", counted)
    rig.cache.poll()
    rig.cache.pump()
    assert not looks
    rig.check_nothing_is_held()
    assert rig.on_disk("b", 100) == list(range(100))


def test_blocks_that_may_not_go_to_disk_are_not_queued_for_it() -> None:
    rig = Rig(is_write_behind=True)
    prefix = rig.start("a", 4, "in_memory")
    rig.compute(prefix)
    assert rig.cache.is_idle
    rig.finish(prefix)
    rig.turn()
    assert rig.store.stored == []


def test_the_oldest_blocks_are_written_early_once_a_stop_could_not_write_all() -> None:
    rig = Rig(num_blocks=32, num_pages=32, most_owed=4)
    rig.run("a", 4)
    rig.turn(4)
    assert rig.store.stored == [], "a stop has time for all of them"
    rig.run("b", 3)
    rig.run("ram", 3, "in_memory")
    rig.turn(4)
    assert rig.on_disk("a", 3) == [0, 1, 2]
    assert len(rig.store.stored) == 3 and rig.tiers.owed_bytes == 4 * BLOCK_BYTES
    assert rig.on_device("a", 4) == [0, 1, 2, 3] and rig.cache.is_idle
    rig.tiers.disk_link.write_rate.bytes_per_s /= 2
    rig.turn(4)
    assert rig.tiers.owed_bytes == 2 * BLOCK_BYTES, "a slower disk may be owed less"


def test_what_is_owed_to_the_disk_is_known_however_it_changes() -> None:
    rig = Rig(num_blocks=16, num_pages=16)
    rig.run("a", 4)
    rig.run("ram", 4, "in_memory")
    rate = rig.tiers.disk_link.write_rate.steady
    assert rig.tiers.owed_bytes == 4 * BLOCK_BYTES
    assert rig.tiers.drain_s == pytest.approx(4 * BLOCK_BYTES / rate)
    rig.tiers.disk_link.write_rate.limit = rate / 100
    assert rig.tiers.drain_s == pytest.approx(400 * BLOCK_BYTES / rate), "a stop keeps the limit"
    rig.run("ram", 4, "24h")
    assert rig.tiers.owed_bytes == 8 * BLOCK_BYTES, "another request claims them"
    rig.evict(lambda entry: entry.block_hash in chain_of("ram", 2))
    assert rig.tiers.owed_bytes == 6 * BLOCK_BYTES
    rig.store.reason = "io_error"
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    rig.cache._demoter.write(16)
    rig.turn(3)
    assert rig.tiers.counters.store_failures["io_error"] > 0
    assert rig.tiers.owed_bytes == 6 * BLOCK_BYTES, "a stop tries them again"
    rig.store.reason = ""
    assert rig.cache.drain(30.0).num_late == 0
    assert rig.tiers.owed_bytes == 0
    rig.store.restart_empty()
    rig.turn()
    assert rig.tiers.owed_bytes == 6 * BLOCK_BYTES, "a new worker starts with an empty store"
    rig.clock.moment += 90_000.0
    rig.turn()
    assert rig.tiers.owed_bytes == 0, "they have expired"
    without_disk = Rig(has_store=False)
    without_disk.run("a", 4)
    assert without_disk.tiers.owed_bytes == 0


def test_blocks_whose_claim_on_the_disk_has_ended_are_not_written_early() -> None:
    short = RetentionPolicy(name="short", idle_s=20.0, absolute_s=20.0, tiers=frozenset(Tier))
    rig = Rig(most_owed=4, policies=(*DEFAULT_POLICIES, short))
    rig.run("a", 4, "short")
    rig.run("a", 4, "in_memory")
    rig.clock.moment += 30.0
    rig.run("b", 2)
    rig.turn(4)
    assert rig.store.stored == []
    assert rig.tiers.owed_bytes <= 4 * BLOCK_BYTES


def test_a_claim_on_the_disk_that_has_ended_is_over_if_the_clock_is_set_back() -> None:
    short = RetentionPolicy(name="short", idle_s=20.0, absolute_s=20.0, tiers=frozenset(Tier))
    rig = Rig(num_blocks=4, num_pages=1, policies=(*DEFAULT_POLICIES, short))
    rig.store.reason = "full"
    rig.run("a", 4, "short")
    rig.run("a", 4, "in_memory")
    rig.clock.moment += 30.0
    rig.turn()
    rig.clock.moment -= 20.0
    rig.check()
    assert rig.run("b", 4) == 4, "their room is free"
    rig.check_nothing_is_held()


def test_blocks_that_the_store_refuses_are_not_tried_again_and_again() -> None:
    rig = Rig(num_blocks=32, num_pages=32, most_owed=0)
    rig.store.reason = "full"
    rig.run("a", 8)
    rig.turn(20)
    assert len(rig.store.stored) == 8 and rig.cache.is_idle
    rig.store.reason = ""
    rig.run("b", 4)
    rig.turn(4)
    assert rig.on_disk("b", 4) == [0, 1, 2, 3], "they do not wait for the others"
    assert rig.run("a", 8) == 0
    rig.turn(4)
    assert rig.on_disk("a", 8) == list(range(8)), "another request claims them"


def test_the_write_rate_is_learnt_from_writes_that_nothing_held_back() -> None:
    rig = Rig(num_blocks=64, num_pages=64, is_write_behind=True)
    rig.store.is_held = True
    rig.run_without_disk("a", 16)
    rig.turn(4)
    assert len(rig.store.jobs) == 16
    rate, began_at = rig.tiers.disk_link.write_rate, time.monotonic()
    assumed = rate.bytes_per_s

    def end(at_s: float, *, is_held_back: bool = False) -> None:
        rig.store.complete(0, is_held_back=is_held_back, written_at=at_s)
        rig.cache.poll()

    for number in range(1, 5):
        end(began_at + 10.0 * number, is_held_back=True)
    end(0.0)
    assert rate.bytes_per_s == assumed and not rate.is_learnt
    for number in range(1, 12):
        end(began_at + 40.0 + number)
    assert rate.is_learnt and rate.bytes_per_s == pytest.approx(BLOCK_BYTES, rel=0.05)
    assert rig.tiers.drain_s == 0.0
    rig.run_without_disk("b", 1)
    assert rig.tiers.drain_s == pytest.approx(1.0, rel=0.05)
    rig.check_nothing_is_held()


def test_a_page_being_written_is_not_reused_though_its_block_was_evicted_and_expired() -> None:
    for end in ("evict", "expire"):
        rig = Rig(num_blocks=8, num_pages=4)
        rig.run("a", 2)
        assert rig.cache.flush(Tier.HOST, deadline=deadline())
        rig.store.is_held = True
        rig.cache._demoter.write(4)
        on_loan = rig.store.pending_pages
        assert on_loan
        if end == "evict":
            rig.evict(lambda entry: True)
        else:
            rig.clock.moment += 90_000.0
        rig.turn()
        for name in "bcd":
            rig.run_without_disk(name, 4, "in_memory")
            rig.cache._demoter.demote(8)
            rig.turn()
        assert rig.store.pending_pages == on_loan
        rig.check_nothing_is_held()
        assert rig.store.blocks == {}


def test_a_device_block_being_copied_out_is_not_reused_before_its_event() -> None:
    rig = Rig(num_blocks=4, num_pages=8)
    rig.run("a", 4)
    rig.transfer.is_held = True
    rig.cache._demoter.demote(4)
    rig.evict(lambda entry: True)
    rig.check()
    other = rig.chain("b", 4)
    rig.pass_over_disk(other)
    assert not rig.admit(other)
    rig.transfer.is_held = False
    rig.turn()
    assert rig.on_host("a", 4) == [], "an evicted block came back by a copy in flight"
    assert rig.admit(other)
    rig.finish(other)
    rig.check_nothing_is_held()


def is_admitted_in_turns(rig: Rig, prefix: Chain) -> bool:
    """Return whether a request is admitted within some turns."""
    for _ in range(20):
        if rig.admit(prefix):
            return True
        rig.turn()
    return False


def test_an_allocation_larger_than_the_host_tier_drops_nothing_and_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "PATIENCE_S", 1e9)
    rig = Rig(num_blocks=12, num_pages=4)
    rig.run("a", 12, "in_memory")
    prefix = rig.queue("b", 12, "in_memory")
    assert is_admitted_in_turns(rig, prefix), "blocks go round in circles through the host"
    assert rig.tiers.counters.demotions_dropped == 0
    assert rig.on_host("a", 12) == [0, 1, 2, 3]


def test_what_a_tenant_can_spare_goes_through_a_small_host_tier_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "PATIENCE_S", 1e9)
    rig = Rig(num_blocks=5, num_pages=1)
    rig.run("a", 5, "in_memory")
    prefix = rig.queue("other/b", 3, "in_memory")
    assert rig.tiers.device.floors == {b"ns": 2, b"other": 2}
    assert is_admitted_in_turns(rig, prefix), "a clean block that was put back is never taken"
    assert rig.tiers.counters.demotions_dropped == 0


@pytest.mark.parametrize("reason", ["full", "io_error", "worker_down"])
def test_a_store_that_fails_drops_blocks_and_hangs_nobody(reason: str) -> None:
    rig = Rig(num_blocks=4, num_pages=4)
    rig.store.reason = reason
    for name in "abcdef":
        assert rig.run(name, 4) == 4
        rig.turn(2)
    assert rig.store.blocks == {}
    assert rig.tiers.counters.store_failures[reason] > 0
    rig.check_nothing_is_held()
    num_left = len(rig.tiers.catalog.entries())
    assert rig.tiers.counters.lost_blocks == {reason: 24 - num_left}, "each block once"


def test_what_a_tier_says_of_itself_is_why_a_stop_loses_blocks_and_what_is_reported() -> None:
    rig = Rig()
    rig.run("a", 2)
    assert rig.cache.operations.stats(64)["disk"]["store_error"] == ""
    rig.store.reason = "no space left"
    assert rig.cache.operations.stats(64)["disk"]["store_error"] == "no space left"
    rig.store.is_down = True
    assert rig.cache.operations.disk == (False, "no space left", rig.store.state().room_bytes, None)
    assert rig.cache.operations.stats(64)["disk"]["store_error"] == "", "it is off, not failing"
    assert rig.cache.drain(5.0) == (0, 2, "no space left")


def test_a_block_that_no_write_was_waited_for_is_counted_as_lost_when_it_leaves_ram() -> None:
    rig = Rig(num_blocks=4, num_pages=4)
    rig.store.is_held = True
    rig.run_without_disk("a", 4)
    rig.cache._demoter.drop_oldest(4)
    assert rig.tiers.counters.demotions_dropped == 4
    assert rig.tiers.counters.lost_blocks == {}, "all of them are still in VRAM"
    rig.run_without_disk("b", 2)
    num_left = sum(rig.tiers.catalog.get(each) is not None for each in chain_of("a", 4))
    assert num_left < 4
    assert rig.tiers.counters.lost_blocks == {"too_slow": 4 - num_left}
    rig.check_nothing_is_held()


def test_what_a_stopped_disk_does_not_take_leaves_most_of_memory_to_others() -> None:
    rig = Rig(num_blocks=8, num_pages=32)
    rig.store.is_held = True
    num_computed = 0
    for number in range(44):
        num_computed += rig.run_without_disk("abcd"[number % 4], 4, "in_memory")
        rig.run_without_disk(f"promised {number}", 2)
    assert num_computed < 4 * 44 / 3, "two thirds were found"
    assert rig.tiers.counters.lost_blocks.keys() == {"too_slow"}
    rig.check_nothing_is_held()


def test_no_more_blocks_are_given_up_than_others_take_the_room_of() -> None:
    rig = Rig(num_blocks=8, num_pages=64)
    rig.store.is_held = True
    for number in range(10):
        rig.run_without_disk(f"promised {number}", 4)
    counters = rig.tiers.counters
    for number in range(12):
        rig.run_without_disk(f"other {number}", 4, "in_memory")
        rig.turn()
        num_evicted = counters.evictions["host,capacity"]
        assert counters.demotions_dropped <= max(0, num_evicted - 64 // 16)
    assert 0 < counters.demotions_dropped < 40 - 16
    rig.check_nothing_is_held()
    num_on_disk = sum(len(rig.on_disk(f"promised {number}", 4)) for number in range(10))
    assert num_on_disk == 40 - counters.demotions_dropped


def test_a_64th_of_host_memory_may_be_late_and_more_of_a_small_one() -> None:
    block_bytes = 2 << 20
    assert most_late((16 << 30) // block_bytes, block_bytes) == 128
    assert most_late((1 << 30) // block_bytes, block_bytes) == 32
    assert most_late((64 << 20) // block_bytes, block_bytes) == 2
    assert most_late(2, block_bytes) == 1


def test_late_blocks_within_the_floor_of_a_tenant_are_not_given_up_for_others() -> None:
    rig = Rig(num_blocks=8, num_pages=64)
    rig.tiers.shares.give({b"a": 0.5, b"b": 0.5})
    rig.store.is_held = True
    for number in range(7):
        rig.run_without_disk(f"a/promised {number}", 4)
    push_out(rig, "b/other", 40)
    assert rig.tiers.counters.evictions["host,capacity"] > 64
    assert rig.tiers.counters.demotions_dropped == 0
    rig.check_nothing_is_held()
    on_disk = [rig.on_disk(f"a/promised {number}", 4) for number in range(6)]
    assert on_disk == 6 * [[0, 1, 2, 3]], "VRAM still has the last four"


def test_nothing_is_given_up_for_pages_that_a_flush_has_evicted() -> None:
    rig = Rig(num_blocks=8, num_pages=64)
    rig.store.is_held = True
    for number in range(6):
        rig.run_without_disk(f"promised {number}", 4)
        rig.run_without_disk(f"other {number}", 4, "in_memory")
    assert not rig.cache.flush(Tier.DISK, deadline=time.monotonic() + 0.05)
    rig.check_nothing_is_held()
    assert rig.tiers.counters.demotions_dropped == 0
    assert [len(rig.on_disk(f"promised {number}", 4)) for number in range(6)] == [4] * 6


def test_late_pages_of_blocks_that_requests_use_again_are_not_given_up() -> None:
    rig = Rig(num_blocks=32, num_pages=32)
    rig.store.is_held = True
    names = [f"promised {number}" for number in range(12)]
    for name in names:
        rig.run_without_disk(name, 2)
    rig.cache._demoter.demote(24)
    rig.turn(6)
    running = [rig.chain(name, 2) for name in names[4:8]]
    for prefix in running:
        rig.pass_over_disk(prefix)
        assert rig.admit(prefix)
    push_out(rig, "other", 30)
    assert rig.tiers.counters.demotions_dropped > 0
    for prefix in running:
        entries = list(map(rig.tiers.catalog.get, prefix.hashes))
        assert not any(entry is None or entry.is_droppable for entry in entries)
        rig.finish(prefix)
    rig.check_nothing_is_held()


def test_blocks_whose_claim_on_the_disk_has_ended_are_not_given_up() -> None:
    short = RetentionPolicy(name="short", idle_s=20.0, absolute_s=20.0, tiers=frozenset(Tier))
    rig = Rig(num_blocks=8, num_pages=32, policies=(*DEFAULT_POLICIES, short))
    rig.store.is_held = True
    for number in range(6):
        rig.run_without_disk(f"old {number}", 4, "short")
        rig.run_without_disk(f"old {number}", 4, "in_memory")
    rig.turn(5)
    rig.clock.moment += 30.0
    push_out(rig, "other", 12)
    assert rig.tiers.counters.evictions["host,capacity"] > 8
    assert rig.tiers.counters.demotions_dropped == 0
    rig.check_nothing_is_held()


def test_host_memory_is_written_before_its_pages_have_to_be_evicted() -> None:
    rig = Rig(num_blocks=8, num_pages=32)
    for number in range(5):
        rig.run(f"new {number}", 4)
    rig.turn(4)
    in_host = [each for number in range(5) for each in chain_of(f"new {number}", 4)]
    in_host = [each for each in in_host if rig.tiers.host.lookup(each)]
    assert len(in_host) >= 12
    assert rig.store.blocks.keys() >= set(in_host)
    rig.check_nothing_is_held()


def test_a_new_worker_is_given_all_of_host_memory_though_no_request_comes() -> None:
    rig = Rig(num_blocks=32, num_pages=600)
    for number in range(25):
        rig.run(f"in memory {number}", 16, "in_memory")
    for number in range(12):
        rig.run(f"promised {number}", 16)
    promised = {it for number in range(12) for it in chain_of(f"promised {number}", 16)}
    in_host = {it for it in promised if rig.tiers.host.lookup(it)}
    assert len(in_host) > 150
    rig.store.restart_empty()
    rig.turn(60)
    assert rig.store.blocks.keys() >= in_host
    assert not rig.cache.has_more
    rig.check_nothing_is_held()


def test_blocks_that_left_ram_for_another_reason_are_not_counted_as_lost() -> None:
    rig = Rig(num_blocks=4, num_pages=4)
    rig.run("evicted", 2)
    rig.evict(lambda entry: True)
    rig.run("expired", 2)
    rig.clock.moment += 90_000.0
    rig.turn()
    for name in "abc":
        rig.run(name, 4, "in_memory")
    rig.run("kept", 4)
    assert rig.cache.flush(Tier.DISK, deadline=deadline())
    assert rig.tiers.catalog.entries() == []
    assert rig.tiers.counters.lost_blocks == {}
    without_disk = Rig(num_blocks=4, num_pages=4, has_store=False)
    for name in "abc":
        without_disk.run(name, 4)
    assert without_disk.tiers.counters.lost_blocks == {}


def test_blocks_that_were_given_up_are_copied_down_once_another_worker_has_started() -> None:
    rig = Rig(num_blocks=8, num_pages=8)
    rig.run("a", 4)
    rig.cache._demoter.drop_oldest(4)
    rig.store.restart_empty()
    rig.turn()
    rig.run("b", 8)
    assert rig.on_host("a", 4) == [0, 1, 2, 3]
    assert rig.tiers.counters.lost_blocks == {}


def test_a_failed_write_is_tried_again_at_the_end() -> None:
    rig = Rig()
    rig.store.reason = "io_error"
    rig.run("a", 2)
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    rig.cache._demoter.write(16)
    rig.turn(3)
    rig.store.reason = ""
    assert rig.cache.drain(30.0).num_late == 0
    assert rig.on_disk("a", 2) == [0, 1]


# Draining


def test_a_drain_writes_newest_chains_first_and_their_heads_first() -> None:
    rig = Rig(num_blocks=16, num_pages=16)
    for name in ("old", "new"):
        rig.run(name, 3)
        rig.clock.moment += 1
    rig.run("ram", 2, "in_memory")
    assert rig.cache.drain(30.0).num_late == 0
    assert rig.store.stored == chain_of("new", 3) + chain_of("old", 3)


def test_a_drain_leaves_out_what_a_small_disk_has_no_room_for_beside_newer_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(num_blocks=16, num_pages=16)
    for name in ("old", "middle", "new"):
        rig.run(name, 3)
        rig.clock.moment += 1
    figures = TierFigures(bytes_budget=5 * BLOCK_BYTES)
    monkeypatch.setattr(rig.store, "stats", lambda: figures)
    drained = rig.cache.drain(30.0)
    assert (drained.num_late, drained.num_refused) == (0, 0)
    assert rig.store.stored == chain_of("new", 3) + chain_of("middle", 2)
    assert not rig.tiers.counters.lost_blocks


def test_a_drain_writes_the_head_of_a_chain_before_what_was_generated_behind_it() -> None:
    rig = Rig(num_blocks=16, num_pages=16)
    prefix = rig.start("a", 2)
    rig.compute(prefix)
    rig.cache.touch(prefix)
    rig.clock.moment += 1
    rig.run("between", 1)
    rig.clock.moment += 1
    assert rig.cache.extend(prefix)
    sealed = chain_of("a", 3)[2]
    rig.write(prefix.blocks[2], sealed)
    rig.cache.seal(prefix, sealed)
    rig.cache.release(prefix)
    assert rig.cache.drain(30.0).num_late == 0
    assert rig.store.stored == [*chain_of("a", 3), *chain_of("between", 1)]


def test_a_drain_through_an_arena_full_of_older_blocks_writes_everything() -> None:
    rig = Rig(num_blocks=8, num_pages=4)
    rig.store.reason = "io_error"
    rig.run("old", 4)
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    rig.store.reason = ""
    rig.tiers.catalog.try_again()
    rig.clock.moment += 1
    prefix = rig.chain("new", 8)
    rig.pass_over_disk(prefix)
    assert rig.admit(prefix)
    rig.compute(prefix)
    rig.cache.release(prefix)
    assert not rig.store.jobs
    assert rig.cache.drain(30.0).num_late == 0
    assert rig.on_disk("old", 4) == [0, 1, 2, 3]
    assert rig.on_disk("new", 8) == list(range(8))


def test_a_drain_stops_at_its_deadline_and_counts_what_is_left() -> None:
    rig = Rig()
    rig.run("a", 3)
    rig.store.is_held = True
    assert rig.cache.drain(0.05).num_late == 3
    rig.check_nothing_is_held()


def test_a_drain_counts_no_block_whose_claim_on_the_disk_ends_meanwhile() -> None:
    short = RetentionPolicy(name="short", idle_s=20.0, absolute_s=20.0, tiers=frozenset(Tier))
    rig = Rig(policies=(*DEFAULT_POLICIES, short))
    rig.run("a", 2, "short")
    rig.run("a", 2, "in_memory")
    rig.store.is_held = True
    assert rig.cache.drain(0.05, meanwhile=lambda: rig.clock.advance(1.0)).num_late == 0


def test_a_drain_counts_what_the_disk_is_owed_again_as_its_worker_restarts() -> None:
    rig = Rig()
    rig.run("a", 3)
    assert rig.cache.drain(30.0).num_late == 0
    rig.run("b", 1)
    rig.store.is_held = True
    assert rig.cache.drain(0.05, meanwhile=rig.store.restart_empty).num_late == 4


# Flushing


def test_flush_to_host_empties_vram_and_flush_to_disk_empties_both() -> None:
    rig = Rig(num_blocks=16, num_pages=16)
    rig.run("a", 6)
    rig.run("ram", 4, "in_memory")
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    assert rig.tiers.device.num_cached == 0
    assert rig.on_host("a", 6) == list(range(6))
    assert rig.on_host("ram", 4) == list(range(4))
    assert rig.cache.flush(Tier.DISK, deadline=deadline())
    assert rig.tiers.host.num_cached == 0
    assert rig.on_disk("a", 6) == list(range(6))
    assert rig.on_disk("ram", 4) == []
    rig.check()
    assert rig.run("a", 6) == 0


@pytest.mark.parametrize("to", [Tier.HOST, Tier.DISK])
def test_flush_works_through_an_arena_smaller_than_vram(to: Tier) -> None:
    rig = Rig(num_blocks=16, num_pages=4)
    rig.run("a", 16)
    assert rig.cache.flush(to, deadline=deadline())
    assert rig.tiers.device.num_cached == 0
    assert rig.on_disk("a", 16) or to is Tier.HOST
    if to is Tier.DISK:
        assert rig.on_disk("a", 16) == list(range(16))
    rig.check_nothing_is_held()


def test_flush_leaves_the_blocks_that_a_request_uses() -> None:
    rig = Rig()
    user = rig.start("a", 2)
    rig.compute(user)
    rig.run("b", 2)
    assert rig.cache.flush(Tier.DISK, deadline=deadline())
    assert rig.on_device("a", 2) == [0, 1]
    rig.verify(user)
    rig.finish(user)
    rig.check_nothing_is_held()


def test_flush_gives_up_at_its_deadline_when_the_store_hangs() -> None:
    rig = Rig()
    rig.run("a", 2)
    rig.store.is_held = True
    assert not rig.cache.flush(Tier.DISK, deadline=time.monotonic() + 0.05)
    rig.check_nothing_is_held()


@pytest.mark.parametrize("has_store", [False, True])
def test_a_host_tier_smaller_than_the_device_reserve_comes_to_rest(has_store: bool) -> None:
    rig = Rig(num_blocks=32, num_pages=6, reserve=8, has_store=has_store)
    for name in "abcdefgh":
        rig.run(name, 4)
    rig.check_nothing_is_held()


@pytest.mark.parametrize(("bytes_per_s", "most"), [(1.0, MIN_WRITES), (1e12, 64)])
def test_pages_on_loan_to_be_written_are_those_that_the_disk_writes_soon(
    bytes_per_s: float, most: int
) -> None:
    rig = Rig(num_blocks=256, num_pages=256, is_write_behind=True)
    rig.tiers.disk_link.write_rate.bytes_per_s = bytes_per_s
    rig.store.is_held = True
    rig.run_without_disk("a", 200)
    rig.turn(10)
    assert len(rig.store.jobs) == most, "at most a quarter of host memory"


def test_copies_ahead_of_need_that_evict_one_another_end() -> None:
    """The floors of three tenants in host memory are smaller than the reserve."""
    rig = Rig(num_blocks=32, num_pages=16, reserve=8, has_store=False)
    lengths = {"x/a": 10, "y/b": 3, "x/b": 10, "y/a": 9, "z/a": 9, "z/b": 8}
    for name in (*lengths, "x/b"):
        rig.run(name, lengths[name], "in_memory")
    rig.turn(60)
    before = rig.tiers.counters.demoted_host_blocks
    rig.turn(10)
    assert rig.tiers.counters.demoted_host_blocks == before, "blocks are copied for ever"


def test_a_page_whose_claim_on_the_disk_ends_with_time_is_clean_from_that_second_on() -> None:
    short = RetentionPolicy(name="short", idle_s=60.0, absolute_s=60.0, tiers=frozenset(Tier))
    rig = Rig(num_blocks=8, num_pages=8, policies=(short, IN_MEMORY))
    rig.store.is_held = True
    rig.run_without_disk("a", 4, "short")
    rig.run_without_disk("a", 4, "in_memory")
    assert not rig.cache.flush(Tier.DISK, deadline=time.monotonic())
    rig.turn(4)
    rig.tiers.evict_clean(Tier.DEVICE)
    pages = list(rig.tiers.host.evictable())
    assert [page.is_clean for page in pages] == [False] * 4
    rig.clock.moment += 59.0
    rig.turn()
    assert [page.is_clean for page in pages] == [False] * 4
    rig.clock.moment += 1.0
    rig.turn()
    assert [page.is_clean for page in pages] == [True] * 4
    assert rig.tiers.catalog.owed == {}
    assert rig.on_host("a", 4) == [0, 1, 2, 3], "another policy keeps it in memory"


def test_what_is_evicted_from_vram_while_it_is_copied_down_expires_like_other_blocks() -> None:
    rig = Rig()
    rig.run("a", 4)
    rig.transfer.is_held = True
    assert rig.cache._demoter.demote(4) == 4
    freed = whole(rig.cache.operations.evict(lambda _: True, [Tier.DEVICE]))
    assert freed.num_copies == 4
    rig.transfer.is_held = False
    rig.turn()
    assert rig.on_host("a", 4) == [0, 1, 2, 3]
    rig.clock.moment += 25 * 3600.0
    rig.turn()
    assert rig.on_host("a", 4) == []
    rig.check_nothing_is_held()


def test_what_is_computed_again_while_an_earlier_copy_of_it_goes_down_needs_no_other() -> None:
    rig = Rig(num_blocks=8)
    rig.run("a", 4)
    rig.transfer.is_held = True
    assert rig.cache._demoter.demote(4) == 4
    whole(rig.cache.operations.evict(lambda _: True, [Tier.DEVICE]))
    assert rig.run("a", 4) == 4
    rig.transfer.is_held = False
    rig.turn()
    assert rig.on_host("a", 4) == rig.on_device("a", 4) == [0, 1, 2, 3]
    assert rig.cache.flush(Tier.HOST, deadline=time.monotonic() + 30.0)
    assert rig.tiers.counters.demoted_host_blocks == 4
    rig.check_nothing_is_held()
