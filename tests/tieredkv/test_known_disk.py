"""Once the disk has told all that it has, nothing is asked before a request is admitted."""

import time
from collections.abc import Sequence

import pytest

from tests.fake_store import DAY_S, Rig, chain_of
from tieredkv.cache.link_rate import LinkRate
from tieredkv.tier import Held, Lent, TouchItem
from tieredkv.types import BlockHash, Tier


def told(**options: object) -> Rig:
    """Return a cache whose disk has told that it has four blocks of `a`, and no others."""
    rig = Rig(**options)  # type: ignore[arg-type]
    rig.store.put("a", 4)
    rig.store.tell_all()
    rig.cache.poll()
    return rig


def slow(rig: Rig) -> Rig:
    """Have everything computed, as the disk is slow."""
    rig.tiers.disk_link.read_rate = LinkRate(1e-3, learnt_at=time.monotonic())
    return rig


def test_a_request_is_admitted_at_once_and_loads_what_the_disk_has() -> None:
    rig = told()
    prefix = rig.queue("a", 6)
    assert rig.cache.num_held(prefix) == 2, "half of what the disk has"
    assert rig.admit(prefix)
    assert prefix.origins() == [Tier.DISK] * 4 + [None] * 2
    assert rig.finish(prefix) == 2
    assert rig.store.asked == []
    rig.check_nothing_is_held()


def test_a_load_says_which_block_of_which_chain_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, lent = told(), list[Lent]()
    load = rig.store.load

    def note(pages: Sequence[Lent]) -> None:
        lent.extend(pages)
        load(pages)

    monkeypatch.setattr(rig.store, "load", note)
    rig.run("a", 4)
    records = [rig.store.blocks[BlockHash(each.block_hash)][0] for each in lent]
    assert len(lent) == 4
    for each, record in zip(lent, records, strict=True):
        fields = "root", "parent_hash", "position", "namespace", "size_bytes"
        assert [getattr(each, it) for it in fields] == [getattr(record, it) for it in fields]


def test_until_all_is_told_the_disk_is_asked_for_what_it_has_not_told() -> None:
    rig = Rig()
    rig.store.tell_all(is_whole=False)
    rig.store.put("a", 2)  # these are told
    rig.store.tells_held = False
    rig.store.put("a", 4)
    rig.cache.poll()
    prefix = rig.start("a", 6)
    assert rig.store.asked == prefix.hashes[2:]
    assert rig.finish(prefix) == 2
    rig.check_nothing_is_held()


def test_the_disk_is_asked_again_while_another_worker_has_not_told_all() -> None:
    rig = told()
    rig.store.told.append(Held(is_first=True))  # the worker has died
    rig.store.is_down = True
    rig.cache.poll()
    assert rig.run("a", 4) == 4
    assert rig.store.asked[:4] == chain_of("a", 4)
    rig.check_nothing_is_held()


@pytest.mark.parametrize(("left_s", "origin"), [(1, Tier.DISK), (0, None)])
def test_a_block_on_disk_is_used_until_the_second_in_which_it_expires(
    left_s: float, origin: Tier | None
) -> None:
    rig = told()
    rig.clock.moment += DAY_S - left_s
    prefix = rig.queue("a", 4)
    assert rig.admit(prefix)
    assert prefix.origins() == [origin] * 4
    rig.cache.release(prefix)
    rig.check_nothing_is_held()


def test_what_has_left_the_disk_is_not_read() -> None:
    rig = told()
    rig.store.lose(chain_of("a", 4)[2:])
    rig.cache.poll()
    assert rig.run("a", 4) == 2
    assert len(rig.store.loaded) == 2
    rig.check_nothing_is_held()


def test_what_the_disk_has_evicted_is_owed_again_once_it_is_used_in_memory() -> None:
    rig = told(num_blocks=16, num_pages=16, is_write_behind=True)
    rig.run("b", 3)
    assert rig.cache.flush(Tier.HOST, deadline=time.monotonic() + 30.0)
    assert rig.cache.drain(30.0).num_late == 0
    assert rig.on_disk("b", 3) == [0, 1, 2]
    rig.store.lose(chain_of("b", 3)[1:])
    rig.cache.poll()
    assert not rig.tiers.catalog.owed, "or a small disk would be written for ever"
    assert rig.run("b", 3) == 0
    assert rig.cache.drain(30.0).num_late == 0
    assert rig.on_disk("b", 3) == [0, 1, 2]
    rig.check_nothing_is_held()


def test_a_block_that_the_disk_does_not_have_after_all_is_a_miss_and_is_not_tried_again() -> None:
    rig = told()
    del rig.store.blocks[chain_of("a", 4)[3]]
    prefix = rig.start("a", 4)
    assert rig.finish(prefix) == 1
    assert rig.cache.why_missed(prefix, 3) == "evicted_disk"
    assert rig.tiers.counters.load_failures == {"missing": 1}
    assert not rig.tiers.presence.has(chain_of("a", 4)[3:], rig.clock.now()).any()
    rig.check_nothing_is_held()


def test_what_is_written_is_known_to_be_on_disk() -> None:
    rig = told(is_write_behind=True)
    rig.run("b", 3)
    assert rig.cache.flush(Tier.DISK, deadline=time.monotonic() + 30.0)
    assert rig.tiers.presence.has(chain_of("b", 3), rig.clock.now()).all()
    assert rig.run("b", 3) == 0
    assert rig.store.asked == []


def test_a_block_that_is_computed_beside_its_copy_is_as_old_as_that_and_is_not_written() -> None:
    rig = slow(Rig(restore="auto", is_write_behind=True))
    rig.store.put("a", 2, age_s=1000.0)
    rig.store.tell_all()
    rig.cache.poll()
    prefix, now = rig.start("a", 2), rig.clock.now()
    assert rig.compute(prefix) == 2
    assert {rig.cache.why_missed(prefix, index) for index in range(2)} == {"computed_sooner"}
    assert rig.entry("a", 0).is_on_disk
    rig.cache.touch(prefix)
    rig.cache.refresh()
    assert rig.store.touched == [], "the age of the copy is not known yet"
    rig.cache.poll()
    assert rig.entry("a", 0).computed_at == now - 1000.0
    until = now - 1000.0 + DAY_S
    assert rig.entry("a", 0).disk_expires_at == until
    assert [(it.block_hash, it.expires_at) for it in rig.store.touched] == [
        (block_hash, until) for block_hash in prefix.hashes
    ]
    assert rig.finish(prefix) == 0
    assert rig.cache.flush(Tier.DISK, deadline=time.monotonic() + 30.0)
    assert rig.store.stored == []
    rig.check_nothing_is_held()


def test_a_block_that_is_computed_beside_a_copy_that_has_gone_is_written() -> None:
    rig = slow(told(restore="auto", is_write_behind=True))
    prefix = rig.start("a", 4)
    rig.store.lose(prefix.hashes[1:2])
    assert rig.compute(prefix) == 4
    rig.turn(3)
    assert rig.finish(prefix) == 0
    assert rig.cache.flush(Tier.DISK, deadline=time.monotonic() + 30.0)
    assert rig.store.stored == prefix.hashes[1:2]
    rig.check_nothing_is_held()


def test_a_block_that_leaves_memory_before_the_age_of_its_copy_is_told_is_passed_over() -> None:
    rig = slow(told(restore="auto"))
    prefix = rig.start("a", 4)
    rig.store.is_held = True
    assert rig.compute(prefix) == 4
    for block_hash in prefix.hashes:
        rig.tiers.drop(block_hash, "admin")
    rig.store.is_held = False
    rig.turn()
    assert rig.store.touched == []
    rig.cache.release(prefix)
    rig.check_nothing_is_held()


def test_a_queued_request_has_what_the_disk_has_read_ahead_and_kept_there() -> None:
    rig = told(num_blocks=8)
    first = rig.start("b", 6)
    prefix = rig.queue("a", 4)
    rig.turn(3)
    assert rig.store.loaded, "it waits for room, and its blocks are read meanwhile"
    kept = [TouchItem(it, rig.clock.now(), hits=0) for it in prefix.hashes]
    assert rig.store.touched == kept
    rig.finish(first)
    while not rig.admit(prefix):
        rig.turn()
    assert rig.finish(prefix) == 0
    rig.check_nothing_is_held()


def test_what_leaves_memory_while_a_request_waits_for_room_is_read_ahead() -> None:
    rig = Rig(num_blocks=8, is_write_behind=True)
    rig.run("a", 4)
    rig.turn(4)
    assert rig.on_disk("a", 4) == [0, 1, 2, 3]
    assert rig.cache.flush(Tier.HOST, deadline=time.monotonic() + 30.0)
    rig.store.tell_all()
    first, prefix = rig.start("b", 6), rig.queue("a", 4)
    rig.turn()
    assert rig.store.loaded == []
    for block_hash in prefix.hashes:
        rig.tiers.drop_copy(Tier.HOST, block_hash)
    assert not rig.admit(prefix)
    rig.turn(3)
    assert sorted(rig.store.loaded) == sorted(prefix.hashes)
    rig.finish(first)
    while not rig.admit(prefix):
        rig.turn()
    assert rig.finish(prefix) == 0
    assert len(rig.store.loaded) == 4
    rig.check_nothing_is_held()


def test_what_leaves_the_disk_while_a_request_waits_for_room_is_not_read_ahead() -> None:
    rig = told(num_blocks=8)
    first, prefix = rig.start("b", 6), rig.queue("a", 4)
    rig.store.lose(prefix.hashes[2:])
    rig.cache.poll()
    assert not rig.admit(prefix)
    rig.turn(3)
    assert sorted(rig.store.loaded) == sorted(prefix.hashes[:2])
    assert rig.tiers.counters.load_failures == {}
    rig.finish(first)
    while not rig.admit(prefix):
        rig.turn()
    assert rig.finish(prefix) == 2
    rig.check_nothing_is_held()


def test_what_the_disk_turns_out_to_lack_is_not_read_again_though_an_answer_told_of_it() -> None:
    rig = Rig(num_blocks=8)
    rig.store.put("a", 4)
    first, prefix = rig.start("b", 6), rig.queue("a", 4)
    while rig.store.lookups:
        rig.store.answer(0)
    rig.store.blocks.clear()
    for _ in range(4):
        assert not rig.admit(prefix)
        rig.turn(2)
        rig.cache._room._refused.clear()  # as if there were more room
    assert rig.tiers.counters.load_failures == {"missing": 4}
    rig.finish(first)
    rig.cache.release(prefix)
    rig.check_nothing_is_held()


def test_a_request_with_read_ends_hits_at_the_last_of_them_that_the_disk_has() -> None:
    rig = told()
    prefix = rig.chain("a", 6)
    prefix.read_ends = [3, 5]
    rig.cache.arrive(prefix)
    assert rig.admit(prefix)
    assert prefix.origins() == [Tier.DISK] * 3 + [None] * 3
    rig.cache.release(prefix)
    rig.check_nothing_is_held()
