"""What the disk has not told is asked: a request is admitted with the answer, a moment later."""

import time

import pytest

from tests.fake_store import Rig
from tieredkv.cache.link_rate import LinkRate
from tieredkv.types import Tier

pytestmark = pytest.mark.usefixtures("each_tier")


def test_a_request_is_admitted_with_the_answer_of_the_disk() -> None:
    rig = Rig()
    rig.store.put("a", 4)
    rig.store.is_held = True
    prefix = rig.queue("a", 4)
    assert not rig.admit(prefix)
    rig.store.is_held = False
    rig.turn()
    assert rig.admit(prefix)
    assert rig.finish(prefix) == 0
    assert rig.store.asked == prefix.hashes, "each block once"
    rig.check_nothing_is_held()


def test_what_the_disk_has_and_is_computed_nevertheless_is_not_written_again() -> None:
    rig = Rig(restore="auto", is_write_behind=True)
    rig.tiers.disk_link.read_rate = LinkRate(1e-3, learnt_at=time.monotonic())
    rig.store.put("a", 4)
    prefix = rig.start("a", 4)
    assert rig.compute(prefix) == 4
    assert {rig.cache.why_missed(prefix, index) for index in range(4)} == {"computed_sooner"}
    assert rig.finish(prefix) == 0
    assert rig.cache.flush(Tier.DISK, deadline=time.monotonic() + 30.0)
    assert rig.store.loaded == rig.store.stored == [], "the disk has these blocks already"
    rig.check_nothing_is_held()


def test_a_request_that_ends_before_the_disk_answers_leaves_nothing_behind() -> None:
    rig = Rig()
    rig.store.put("a", 4)
    rig.store.is_held = True
    prefix = rig.queue("a", 4)
    rig.cache.release(prefix)
    assert rig.cache.is_settled(prefix)
    rig.store.answer(0)
    rig.turn()
    rig.check_nothing_is_held()


def test_what_host_memory_has_is_not_asked_for() -> None:
    rig = Rig()
    rig.run("a", 3, "in_memory")
    assert rig.cache.flush(Tier.HOST, deadline=time.monotonic() + 30.0)
    rig.store.asked.clear()
    prefix = rig.start("a", 4)
    assert rig.store.asked == prefix.hashes[3:]
    assert prefix.origins()[:3] == [Tier.HOST] * 3
    assert rig.finish(prefix) == 1
    rig.check_nothing_is_held()


def test_blocks_on_disk_count_as_half_held_and_those_in_ram_in_full() -> None:
    rig = Rig(num_blocks=64, num_pages=64)
    assert rig.cache.num_held(rig.chain("a", 40)) == 0
    rig.store.put("a", 40)
    prefix = rig.queue("a", 40)
    assert rig.cache.num_held(prefix) == 0, "the disk has not answered"
    rig.cache.poll()
    assert rig.cache.num_held(prefix) == 20
    rig.run("b", 40)
    assert rig.cache.num_held(rig.chain("b", 40)) == 40
    rig.cache.release(prefix)
    rig.check_nothing_is_held()


@pytest.mark.parametrize("num_first", [0, 1, 4])
def test_what_a_second_answer_tells_is_prefetched_beside_what_the_first_one_told(
    monkeypatch: pytest.MonkeyPatch, num_first: int
) -> None:
    # Two of twelve blocks were in memory when the disk was asked first, and have left it since. By
    # then, `num_first` of the others are being read.
    rig = Rig(num_blocks=32, num_pages=64)
    rig.run("a", 2, "in_memory")
    assert rig.cache.flush(Tier.HOST, deadline=time.monotonic() + 30.0)
    rig.store.put("a", 12)
    rig.store.is_held = True
    prefix = rig.queue("a", 12)
    rig.store.answer(0)
    rig.cache.poll()
    monkeypatch.setattr(rig.tiers.disk_link, "most_reads", lambda *_: num_first)
    rig.turn()
    assert len(rig.store.loaded) == num_first
    for block_hash in prefix.hashes[:2]:
        rig.tiers.drop_copy(Tier.HOST, block_hash)
    assert not rig.admit(prefix), "the disk is asked for these two"
    assert [len(hashes) for _, hashes in rig.store.lookups] == [2]
    rig.store.answer(0)
    monkeypatch.undo()
    rig.turn(4)
    assert sorted(rig.store.loaded) == sorted(prefix.hashes), "each of them once"
    rig.store.is_held = False
    rig.turn(4)
    assert rig.admit(prefix)
    assert rig.finish(prefix) == 0
    rig.check_nothing_is_held()
