"""A request tells where each of its blocks came from, whatever was expected at its admission."""

import pytest

from tests.fake_store import Rig
from tieredkv.cache.chain import Chain
from tieredkv.types import Tier

pytestmark = pytest.mark.usefixtures("each_tier")


def waiting_for_disk(rig: Rig, length: int, count: int) -> list[Chain]:
    """Return admitted requests for the same blocks on disk, of which nothing is loaded yet."""
    rig.store.put("a", length)
    rig.store.is_held = True
    requests = [rig.queue("a", length) for _ in range(count)]
    while rig.store.lookups:
        rig.store.answer(0)
    rig.cache.poll()
    for request in requests:
        assert rig.admit(request)
    return requests


def let_all_arrive(rig: Rig) -> None:
    """Let the reads and copies that are under way end, and those that follow."""
    rig.store.is_held = rig.transfer.is_held = False
    rig.turn(20)


def test_a_block_that_another_request_computed_came_from_vram(slow_disk: Rig) -> None:
    rig = slow_disk
    first, second, third = waiting_for_disk(rig, 4, 3)
    assert first.origins() == [Tier.DISK] * 4
    assert rig.compute(second, at_most=3) == 3
    assert rig.compute(third) == 1
    assert first.origins() == [Tier.DEVICE] * 4
    assert second.origins() == [None, None, None, Tier.DEVICE]
    assert third.origins() == [Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, None]
    for request in (first, second, third):
        rig.end(request)


def test_each_request_that_waited_for_a_read_counts_the_block_as_one_from_disk() -> None:
    rig = Rig()
    requests = waiting_for_disk(rig, 4, 3)
    let_all_arrive(rig)
    later = rig.start("a", 4)
    assert later.origins() == [Tier.DEVICE] * 4
    for request in requests:
        assert request.origins() == [Tier.DISK] * 4
        rig.end(request)


def test_each_request_that_waited_for_a_copy_counts_the_block_as_one_from_host_memory() -> None:
    rig = Rig()
    rig.run("a", 4)
    assert rig.cache._demoter.demote(4) == 4
    rig.turn()
    for block in list(rig.tiers.device.evictable()):
        assert block.block_hash is not None
        rig.tiers.device.drop(block.block_hash)
    rig.transfer.is_held = True
    requests = [rig.start("a", 4) for _ in range(2)]
    let_all_arrive(rig)
    for request in requests:
        assert request.origins() == [Tier.HOST] * 4
        rig.end(request)


def test_a_block_that_a_request_takes_over_and_computes_was_on_disk(slow_disk: Rig) -> None:
    rig = slow_disk
    first, second = waiting_for_disk(rig, 3, 2)
    rig.cache.release(first)
    assert rig.compute(second) == 3
    assert second.origins() == [None] * 3
    assert second.row.why_computed == dict.fromkeys(range(3), "computed_sooner")
    rig.end(second)


def test_a_block_that_a_request_takes_over_was_nowhere_if_the_other_had_to_compute_it() -> None:
    rig = Rig()
    first, second = rig.start("a", 3), rig.start("a", 3)
    assert second.origins() == [Tier.DEVICE] * 3
    assert rig.compute(first, at_most=1) == 1
    rig.cache.release(first)
    assert rig.compute(second) == 2
    assert second.origins() == [Tier.DEVICE, None, None]
    assert not second.row.why_computed
    rig.end(second)


def test_a_block_that_was_in_no_tier_may_still_come_from_one_or_from_another_request() -> None:
    rig = Rig()
    first = rig.chain("a", 4)
    rig.pass_over_disk(first)  # the disk has not answered in time
    rig.store.put("a", 2)
    rig.store.is_held = True
    second = rig.queue("a", 4)
    assert rig.admit(first)
    assert first.origins() == [None] * 4
    while rig.store.lookups:
        rig.store.answer(0)
    rig.turn(2)
    assert len(rig.store.jobs) == 2, "read ahead for the second, which is queued"
    assert rig.admit(second)
    let_all_arrive(rig)
    assert rig.compute(second) == 2
    assert first.origins() == [Tier.DISK, Tier.DISK, Tier.DEVICE, Tier.DEVICE]
    assert second.origins() == [Tier.DISK, Tier.DISK, None, None]
    for request in (first, second):
        rig.end(request)


def test_blocks_of_a_later_chain_do_not_count_as_loaded_in_memory_that_a_load_has_filled() -> None:
    rig = Rig(num_blocks=4)
    rig.store.put("a", 4)
    rig.run("a", 4)
    first, second = rig.start("b", 4), rig.start("b", 4)
    assert rig.compute(first) == 4
    assert first.origins() == [None] * 4
    assert second.origins() == [Tier.DEVICE] * 4
    for request in (first, second):
        rig.end(request)
