"""Requests that share blocks: who loads them, who computes them, and who takes them over."""

import time
from typing import Any

import pytest

from tests.fake_store import Rig, chain_of
from tieredkv.cache.chain import Chain
from tieredkv.types import Tier

pytestmark = pytest.mark.usefixtures("each_tier")


def queued(rig: Rig, length: int, count: int) -> list[Chain]:
    """Return queued requests for the same blocks, which are on disk; none is read ahead yet.

    The store does not answer reads.
    """
    rig.store.put("a", length)
    rig.store.is_held = True
    requests = [rig.queue("a", length) for _ in range(count)]
    while rig.store.lookups:
        rig.store.answer(0)
    rig.cache.poll()
    return requests


def admitted(rig: Rig, length: int, count: int) -> list[Chain]:
    """Return requests as `queued` does, all of them admitted."""
    requests = queued(rig, length, count)
    for request in requests:
        assert rig.admit(request)
    return requests


def read_all(rig: Rig) -> None:
    """Let the reads that are under way end, and those that follow."""
    rig.store.is_held = False
    for _ in range(50):
        rig.turn()


def test_a_decoding_request_restores_nothing() -> None:
    rig = Rig()
    rig.store.put("a", 3)
    prefix = rig.start("a", 3)
    for _ in range(5):
        rig.turn()
    assert all(block.is_ready for block in prefix.blocks)
    assert not rig.cache.is_recalling, "its recall has ended with its last block"


def test_a_request_recalls_nothing_once_vram_has_all_that_it_would_have_read() -> None:
    rig = Rig(load_timeout_s=0.0)
    waiting, other = queued(rig, 4, 2)
    assert rig.admit(other)
    assert rig.compute(other) == 4, "the disk does not answer in time"
    assert rig.cache.admit(waiting, 4)
    assert waiting not in rig.cache._recalls.chains
    rig.cache.release(waiting)
    rig.cache.release(other)
    read_all(rig)
    rig.check_nothing_is_held()


def test_blocks_are_read_once_though_requests_hand_them_over_twice() -> None:
    rig = Rig(num_blocks=128, num_pages=16)  # most reads have to wait for a page
    first, second, third = admitted(rig, 60, 3)
    rig.turn()
    rig.cache.release(first)
    rig.turn()
    rig.cache.release(second)
    read_all(rig)
    assert rig.finish(third) == 0
    assert sorted(rig.store.loaded) == sorted(chain_of("a", 60))
    rig.check_nothing_is_held()


def test_a_request_waits_for_a_read_that_a_cancelled_one_began() -> None:
    rig = Rig(num_pages=4)  # two reads at once
    first, second = admitted(rig, 3, 2)
    rig.store.complete(0)
    rig.turn(3)
    assert rig.store.loaded[-1] == chain_of("a", 1)[0], "read for the first, which is cancelled"
    rig.cache.release(first)
    assert rig.compute(second) == 0
    read_all(rig)
    assert rig.finish(second) == 0
    rig.check_nothing_is_held()


def test_a_request_that_was_given_up_on_takes_nothing_over() -> None:
    rig = Rig(load_timeout_s=0.0)
    first, second = queued(rig, 4, 2)
    assert rig.admit(first)
    rig.tiers.settings.load_timeout_s = 1e9
    assert rig.admit(second)
    assert rig.finish(first) == 4, "a block that was given up is computed, whoever else wants it"
    rig.cache.release(second)
    rig.check_nothing_is_held()


def test_a_late_read_is_waited_for_by_no_request_that_comes_later() -> None:
    rig = Rig(load_timeout_s=0.0)
    first, second = queued(rig, 4, 2)
    rig.turn()
    assert len(rig.store.jobs) == 4
    assert rig.admit(first)
    rig.tiers.settings.load_timeout_s = 1e9
    assert rig.admit(second)
    assert rig.finish(first) == 4
    assert rig.finish(second) == 0
    rig.check_nothing_is_held()


def test_blocks_that_were_computed_before_their_bytes_came_are_counted() -> None:
    rig = Rig(load_timeout_s=0.0)
    (prefix,) = queued(rig, 3, 1)
    rig.turn()
    assert rig.admit(prefix)
    assert rig.finish(prefix) == 3
    assert rig.tiers.counters.overtaken_blocks == 0
    read_all(rig)
    assert rig.tiers.counters.overtaken_blocks == 3
    assert rig.tiers.counters.promoted_disk_blocks == 3
    assert rig.tiers.counters.promoted_host_blocks == 0


def test_blocks_that_nobody_wants_any_more_are_not_overtaken() -> None:
    rig = Rig()
    (prefix,) = admitted(rig, 3, 1)
    rig.cache.release(prefix)
    read_all(rig)
    assert rig.on_host("a", 3) == [0, 1, 2]
    assert rig.tiers.counters.overtaken_blocks == 0


def in_host_memory(rig: Rig, length: int) -> Chain:
    """Return an admitted request whose blocks host memory has; one of them is being copied."""
    rig.run("a", length)
    assert rig.cache._demoter.demote(length) == length
    rig.turn()
    for block_hash in chain_of("a", length):
        rig.tiers.device.drop(block_hash)
    rig.transfer.is_held = True
    rig.tiers.device_link.up_rate.bytes_per_s = 1.0
    return rig.start("a", length)


def test_an_evicted_page_fills_no_block_of_a_later_request() -> None:
    rig = Rig()
    first = in_host_memory(rig, 4)
    rig.evict(lambda entry: True)
    later = rig.start("a", 4)
    rig.transfer.is_held = False
    assert rig.finish(later) == 4, "evicted blocks are not served"
    rig.finish(first)
    rig.check_nothing_is_held()


def test_an_evicted_page_is_handed_over_to_nobody() -> None:
    rig = Rig()
    first = in_host_memory(rig, 4)
    rig.evict(lambda entry: True)
    later = rig.start("a", 4)
    rig.cache.release(first)
    rig.transfer.is_held = False
    assert rig.finish(later) == 4
    rig.check_nothing_is_held()


def test_a_request_that_is_not_planned_yet_loads_nothing() -> None:
    rig = Rig(restore="auto")
    rig.store.put("a", 4)
    rig.queue("a", 4)
    rig.cache.poll()
    rig.cache.pump()
    assert rig.store.loaded == []


def test_a_host_page_is_handed_over_with_its_block() -> None:
    rig = Rig()
    first = in_host_memory(rig, 4)
    second = rig.start("a", 4)
    rig.cache.release(first)
    rig.transfer.is_held = False
    assert rig.finish(second) == 0
    rig.check_nothing_is_held()


def test_a_copy_waits_for_the_last_step_that_may_use_its_block_and_for_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, steps = Rig(num_blocks=4), dict[str, int]()
    promote, demote = rig.transfer.promote, rig.transfer.demote

    def up(pairs: Any, tag: Any, *, after: int = 0) -> None:
        steps["up"] = after
        promote(pairs, tag, after=after)

    def down(pairs: Any, tag: Any, *, after: int = 0) -> None:
        steps["down"] = after
        demote(pairs, tag, after=after)

    monkeypatch.setattr(rig.transfer, "promote", up)
    monkeypatch.setattr(rig.transfer, "demote", down)
    prefix = rig.start("a", 4)
    rig.cache.end_step()
    rig.compute(prefix)  # in step 1
    rig.cache.end_step()
    rig.finish(prefix)  # it ends while step 2 may still read its blocks
    rig.cache.end_step()
    assert rig.cache._demoter.demote(4)
    assert steps == {"down": 2}
    rig.store.put("b", 4)
    assert rig.run("b", 4) == 0
    assert steps == {"down": 2, "up": 2}


def test_a_copy_does_not_wait_for_steps_that_were_issued_while_its_request_waited_for_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, steps = Rig(num_blocks=4, has_store=False), list[int]()
    rig.run("b", 4, "in_memory")
    prefix = rig.start("a", 4, "in_memory")  # evicts those of "b"
    rig.cache.end_step()
    rig.finish(prefix)
    assert rig.cache._demoter.demote(2)
    rig.turn()
    rig.transfer.is_held = True
    promote = rig.transfer.promote

    def up(pairs: Any, tag: Any, *, after: int = 0) -> None:
        steps.append(after)
        promote(pairs, tag, after=after)

    monkeypatch.setattr(rig.transfer, "promote", up)
    queued = rig.queue("b", 4, "in_memory")
    for _ in range(3):
        rig.cache.end_step()
        assert not rig.admit(queued)
    rig.transfer.is_held = False
    while not rig.admit(queued):
        rig.turn()
    assert rig.finish(queued) == 0
    assert set(steps) == {1}, "the last step that used a block"


def test_a_block_that_is_partly_computed_is_not_filled_by_a_read_that_ends_now() -> None:
    rig = Rig(restore="auto")
    rig.tiers.disk_link.read_rate.bytes_per_s = 1e12
    (prefix,) = queued(rig, 2, 1)
    assert rig.admit(prefix)
    rig.turn()
    assert len(rig.store.jobs) == 2
    rig.tiers.disk_link.read_rate.bytes_per_s = 1e-3  # the plan changes: all is computed
    rig.plan()
    rig.begin(prefix)
    read_all(rig)
    assert [block.is_ready for block in prefix.blocks] == [False, True]
    assert rig.tiers.counters.overtaken_blocks == 1
    assert rig.finish(prefix) == 1
    rig.check_nothing_is_held()


def test_without_a_disk_a_request_takes_over_the_pages_of_a_cancelled_one() -> None:
    rig = Rig(has_store=False)
    rig.run("a", 4)
    assert rig.cache.flush(Tier.HOST, deadline=time.monotonic() + 30.0)
    first, second = rig.queue("a", 4), rig.queue("a", 4)
    assert rig.cache.admit(first, 4) and rig.cache.admit(second, 4)
    rig.cache.release(first)  # before a plan has begun its copies
    rig.turn()
    assert second.origins() == [Tier.HOST] * 4
    rig.verify(second)
    rig.cache.release(second)
    rig.check_nothing_is_held()
