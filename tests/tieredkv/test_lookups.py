"""A request waits for what the disk has of it only if something of that would be loaded.

Else the disk is asked when the first step is issued.
"""

import time

import pytest

from tests.fake_store import Rig
from tieredkv.cache import promotion
from tieredkv.cache.link_rate import LinkRate
from tieredkv.cache.lookups import ANSWER_S
from tieredkv.cache.prefix import Prefix
from tieredkv.config import Restore
from tieredkv.types import Tier

pytestmark = pytest.mark.usefixtures("each_tier")

SLOW, FAST = 1e-3, 1e12


def asked(rig: Rig, bytes_per_s: float, *, learnt_at: float | None = None) -> Prefix:
    """Return a queued request whose blocks the disk has, which gives no answer by itself."""
    learnt_at = time.monotonic() if learnt_at is None else learnt_at
    rig.tiers.disk_link.read_rate = LinkRate(bytes_per_s, learnt_at=learnt_at)
    rig.store.put("a", 4)
    rig.store.is_held = True
    return rig.queue("a", 4)


def run_on(rig: Rig, prefix: Prefix) -> None:
    """Admit a request and issue its first step, with which the disk is asked."""
    assert not rig.store.lookups
    assert rig.cache.answers_until(1) == rig.cache._lookups.running_until() == 0.0
    assert rig.admit(prefix)
    rig.cache._lookups.ask_deferred()
    assert len(rig.store.lookups) == 1
    assert rig.cache._lookups.running_until() > 0.0


def test_what_would_be_computed_anyway_is_computed_before_the_disk_answers() -> None:
    rig = Rig(restore="auto", is_write_behind=True)
    prefix = asked(rig, SLOW)
    run_on(rig, prefix)
    rig.store.answer(0)
    rig.cache.poll()
    assert rig.cache._lookups.running_until() == 0.0
    assert rig.compute(prefix) == 4
    assert {rig.cache.why_missed(prefix, index) for index in range(4)} == {"computed_sooner"}
    rig.store.is_held = False
    assert rig.finish(prefix) == 0
    assert rig.cache.flush(Tier.DISK, deadline=time.monotonic() + 30.0)
    assert rig.store.loaded == rig.store.stored == [], "the disk has these blocks already"
    rig.check_nothing_is_held()


def test_an_answer_after_everything_was_computed_changes_nothing() -> None:
    rig = Rig(restore="auto")
    prefix = asked(rig, SLOW)
    run_on(rig, prefix)
    assert rig.compute(prefix) == 4
    rig.store.answer(0)
    rig.turn()
    assert prefix.origins() == [None] * 4
    assert rig.finish(prefix) == 0
    rig.check_nothing_is_held()


def test_a_request_that_ends_before_the_disk_answers_leaves_nothing_behind() -> None:
    rig = Rig(restore="auto")
    prefix = asked(rig, SLOW)
    run_on(rig, prefix)
    rig.cache.release(prefix)
    assert rig.cache._lookups.running_until() == 0.0
    rig.store.answer(0)
    rig.turn()
    rig.check_nothing_is_held()


def test_the_disk_is_not_asked_about_a_request_that_is_cancelled_before_its_first_step() -> None:
    rig = Rig(restore="auto")
    rig.cache.release(asked(rig, SLOW))
    rig.turn()
    assert not rig.store.lookups
    rig.check_nothing_is_held()


def test_the_disk_is_asked_about_a_request_that_stays_in_the_queue() -> None:
    rig = Rig(restore="auto")
    prefix = asked(rig, SLOW)
    rig.store.is_held = False
    rig.turn()
    rig.turn()
    assert all(prefix.records.values())
    rig.cache.release(prefix)
    rig.check_nothing_is_held()


@pytest.mark.parametrize(
    ("bytes_per_s", "learnt_at", "restore"),
    [(FAST, None, "auto"), (SLOW, -1e9, "auto"), (SLOW, None, "load")],
    ids=["a fast disk", "an old rate", "everything is loaded"],
)
def test_what_might_be_loaded_waits_for_the_disk(
    bytes_per_s: float, learnt_at: float | None, restore: Restore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotion, "LONG_S", 0.0)
    rig = Rig(restore=restore, block_size=4096)  # computing a block takes longer than a step
    prefix = asked(rig, bytes_per_s, learnt_at=learnt_at)
    assert not rig.admit(prefix)
    assert rig.cache.answers_until(1) == prefix.asked_at + ANSWER_S
    rig.store.is_held = False
    rig.store.answer(0)
    rig.turn()
    assert rig.admit(prefix)
    rig.finish(prefix)
    rig.check_nothing_is_held()


def test_what_host_memory_has_is_no_reason_to_wait() -> None:
    rig = Rig(restore="auto")
    rig.run("a", 3, "in_memory")
    assert rig.cache.flush(Tier.HOST, deadline=time.monotonic() + 30.0)
    prefix = asked(rig, SLOW)
    run_on(rig, prefix)
    assert prefix.origins()[:3] == [Tier.HOST] * 3
    rig.store.answer(0)
    rig.store.is_held = False
    assert rig.finish(prefix) == 4 - rig.tiers.counters.promoted_host_blocks
    rig.check_nothing_is_held()


def test_blocks_on_disk_count_as_half_held_and_those_in_ram_in_full() -> None:
    rig = Rig(num_blocks=64, num_pages=64)
    assert rig.cache.num_held(rig.prefix("a", 40)) == 0
    rig.store.put("a", 40)
    prefix = rig.queue("a", 40)
    assert rig.cache.num_held(prefix) == 0, "the disk has not answered"
    rig.cache.poll()
    assert rig.cache.num_held(prefix) == 20
    rig.run("b", 40)
    assert rig.cache.num_held(rig.prefix("b", 40)) == 40
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
        rig.tiers.drop_copy(Tier.HOST, block_hash, "admin")
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
