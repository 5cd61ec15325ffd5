"""Promotion of blocks: pages on loan, late answers and limits."""

import msgspec
import pytest

from tests.fake_store import BLOCK_BYTES, DAY_S, Rig, chain_of
from tests.waiting import deadline
from tieredkv.cache.chain import Chain
from tieredkv.cache.disk_link import MAX_READ_S
from tieredkv.cache.link_rate import LinkRate
from tieredkv.tier import OPERATOR
from tieredkv.types import Tier

pytestmark = pytest.mark.usefixtures("each_tier")


def admitted_from_disk(rig: Rig, name: str, length: int) -> Chain:
    """Return an admitted request whose blocks are being read; the store does not answer yet."""
    rig.store.put(name, length)
    rig.store.is_held = True
    prefix = rig.queue(name, length)
    while rig.store.lookups:
        rig.store.answer(0)
    rig.turn()
    assert rig.admit(prefix)
    rig.turn()
    assert rig.store.jobs
    return prefix


def test_promotion_keeps_the_copies_below() -> None:
    rig = Rig()
    rig.store.put("a", 3)
    assert rig.run("a", 3) == 0
    assert rig.on_device("a", 3) == rig.on_host("a", 3) == rig.on_disk("a", 3) == [0, 1, 2]
    assert rig.tiers.counters.promoted_disk_blocks == 3
    assert rig.store.deleted == []


def test_copies_between_tiers_are_timed() -> None:
    rig = Rig()
    rig.run("a", 3)
    assert rig.cache.flush(Tier.DISK, deadline=deadline())
    assert rig.run("a", 3) == 0
    moves = rig.tiers.counters.move_seconds
    assert {between: count for between, (count, _) in moves.items()} == {
        "device,host": 1,  # one copy of three blocks
        "host,disk": 3,
        "disk,host": 3,
        "host,device": 1,
    }
    assert all(seconds > 0 for _, seconds in moves.values())


def test_a_page_on_loan_is_never_reused_though_the_read_timed_out() -> None:
    rig = Rig(num_blocks=16, num_pages=4, load_timeout_s=0.0)
    prefix = admitted_from_disk(rig, "a", 4)
    on_loan = rig.store.pending_pages
    assert rig.finish(prefix) == 4, "a read that is late is computed"
    assert rig.tiers.counters.load_failures["timeout"] == 4
    for name in "bcd":
        rig.run_without_disk(name, 8)
    assert rig.store.pending_pages >= on_loan
    rig.check_nothing_is_held()


def test_a_page_on_loan_is_never_reused_though_its_request_was_cancelled() -> None:
    rig = Rig(num_blocks=8, num_pages=4)
    prefix = admitted_from_disk(rig, "a", 2)
    on_loan = rig.store.pending_pages
    rig.cache.release(prefix)
    rig.turn()
    assert rig.tiers.device.num_used == 0
    assert rig.tiers.host.num_used == len(on_loan) > 0
    rig.run_without_disk("b", 8, "in_memory")
    assert rig.cache._demoter.demote(8) > 0
    rig.turn()
    assert rig.store.pending_pages == on_loan
    rig.check_nothing_is_held()


def test_a_device_block_being_filled_is_not_reused_before_its_event() -> None:
    rig = Rig(num_blocks=4, num_pages=8)
    rig.run("a", 4)
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    rig.transfer.is_held = True
    prefix = rig.start("a", 4)
    rig.turn()
    assert rig.transfer.has_pending
    rig.cache.release(prefix)
    rig.evict(lambda entry: True)
    other = rig.chain("b", 4)
    rig.pass_over_disk(other)
    assert not rig.admit(other)
    rig.transfer.is_held = False
    rig.turn()
    assert rig.admit(other)
    assert rig.finish(other) == 4
    rig.check_nothing_is_held()


def test_a_late_completion_spoils_nothing_and_its_bytes_are_kept() -> None:
    rig = Rig(load_timeout_s=0.0)
    prefix = admitted_from_disk(rig, "a", 2)
    assert rig.finish(prefix) == 2
    assert rig.on_host("a", 2) == []
    rig.store.is_held = False
    rig.turn()
    assert rig.on_host("a", 2) == [0, 1]
    assert rig.entry("a", 0).is_on_disk
    rig.check_nothing_is_held()


def test_blocks_that_were_computed_before_their_reads_ended_count_as_overtaken() -> None:
    rig = Rig(load_timeout_s=0.0)
    prefix = admitted_from_disk(rig, "a", 2)
    assert rig.finish(prefix) == 2
    assert rig.tiers.counters.overtaken_blocks == 0
    rig.store.is_held = False
    rig.turn()
    assert rig.tiers.counters.overtaken_blocks == 2
    in_time = Rig()
    in_time.store.put("a", 3)
    assert in_time.run("a", 3) == 0
    assert in_time.tiers.counters.overtaken_blocks == 0


def test_a_late_read_of_older_bytes_makes_the_block_as_old_as_they_are() -> None:
    rig = Rig(load_timeout_s=0.0)
    rig.store.put("a", 1, age_s=1000.0)
    rig.store.is_held = True
    prefix = rig.queue("a", 1)
    rig.store.answer(0)
    rig.turn()
    assert rig.admit(prefix)
    assert rig.finish(prefix) == 1
    rig.store.is_held = False
    rig.turn()
    assert rig.entry("a", 0).computed_at == rig.clock.moment - 1000.0


def test_reads_in_flight_hold_at_most_half_of_the_arena() -> None:
    rig = Rig(num_blocks=32, num_pages=8)
    prefix = admitted_from_disk(rig, "a", 20)
    most = 0
    while rig.store.jobs:
        most = max(most, len(rig.store.jobs))
        rig.store.complete(0)
        rig.turn()
    assert most == 4
    assert rig.finish(prefix) == 0


def test_a_failed_prefetch_leaves_no_page_behind_that_stands_for_its_block() -> None:
    rig = Rig()
    rig.store.put("a", 2)
    rig.store.is_held = True
    prefix = rig.queue("a", 2)
    rig.store.answer(0)
    rig.turn()
    assert rig.store.jobs
    while rig.store.jobs:
        rig.store.complete(0, reason="io_error")
    rig.turn()
    rig.store.is_held = False
    assert rig.admit(prefix)
    assert rig.finish(prefix) == 0, "it is read again at admission"
    rig.check_nothing_is_held()


def test_reads_that_wait_for_pages_have_older_blocks_written_out() -> None:
    rig = Rig(num_blocks=16, num_pages=4)
    rig.run_without_disk("dirty", 4)
    rig.cache._demoter.demote(16)
    rig.turn()
    assert rig.on_host("dirty", 4)
    rig.store.put("a", 8)
    prefix = rig.start("a", 8)
    assert rig.finish(prefix) == 0
    rig.check_nothing_is_held()


def test_a_request_joins_the_read_that_another_one_began() -> None:
    rig = Rig()
    first = admitted_from_disk(rig, "a", 2)
    second = rig.queue("a", 2)
    assert rig.admit(second)
    rig.cache.release(first)
    rig.turn()
    rig.store.is_held = False
    assert rig.finish(second) == 0
    assert sorted(rig.store.loaded) == sorted(chain_of("a", 2))
    rig.check_nothing_is_held()


def test_a_slow_disk_has_all_computed_and_the_time_of_that_predicted(slow_disk: Rig) -> None:
    rig = slow_disk
    rig.store.put("a", 4)
    rig.store.is_held = True
    prefix = rig.queue("a", 4)
    rig.store.answer(0)
    rig.cache.poll()
    assert rig.admit(prefix)
    predicted_s = rig.tiers.compute_rate.seconds(0, 4)
    rig.turn()
    told = rig.cache.note_first_token(prefix)
    assert told is not None
    assert told.predicted_s == predicted_s
    assert rig.compute(prefix) == 4
    assert {rig.cache.why_missed(prefix, index) for index in range(4)} == {"computed_sooner"}
    rig.cache.release(prefix)
    rig.check_nothing_is_held()


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        ("worker_died", "load_failed"),
        ("worker_down", "load_failed"),
        ("io_error", "load_failed"),
        ("missing", "evicted_disk"),
        ("checksum", "corrupt"),
    ],
)
def test_a_failed_load_is_told_by_its_reason(failure: str, told: str) -> None:
    rig = Rig()
    prefix = admitted_from_disk(rig, "a", 2)
    while rig.store.jobs:
        rig.store.complete(0, reason=failure)
    rig.turn()
    assert rig.compute(prefix) == 2
    assert [rig.cache.why_missed(prefix, index) for index in range(2)] == [told] * 2
    assert rig.tiers.counters.load_failures == {failure: 2}
    rig.finish(prefix)
    rig.check_nothing_is_held()


@pytest.mark.parametrize(("reason", "told"), [(OPERATOR, "admin"), ("capacity", "evicted_disk")])
def test_a_load_that_comes_after_a_deletion_is_told_by_who_deleted(reason: str, told: str) -> None:
    rig = Rig()
    rig.store.tells_gone = True
    for each in chain_of("a", 2):
        rig.tiers.catalog.miss_reasons.note(each, "evicted_disk", DAY_S)
    prefix = admitted_from_disk(rig, "a", 2)
    rig.store.lose(prefix.hashes, reason)
    while rig.store.jobs:
        rig.store.complete(0, reason="missing")
    rig.turn()
    assert rig.compute(prefix) == 2
    assert [rig.cache.why_missed(prefix, index) for index in range(2)] == [told] * 2
    rig.finish(prefix)
    rig.check_nothing_is_held()


@pytest.mark.parametrize("is_computed_first", [False, True])
@pytest.mark.parametrize("failure", ["missing", "checksum"])
def test_a_block_that_the_disk_turns_out_to_have_lost_is_written_again(
    failure: str, is_computed_first: bool
) -> None:
    rig = Rig(load_timeout_s=0.0 if is_computed_first else 30.0)
    prefix = admitted_from_disk(rig, "a", 2)
    rig.store.lose(prefix.hashes)
    if is_computed_first:
        assert rig.compute(prefix) == 2
    while rig.store.jobs:
        rig.store.complete(0, reason=failure)
    rig.turn()
    rig.store.is_held = False
    rig.finish(prefix)
    assert rig.cache.drain(30.0).num_late == 0
    assert rig.on_disk("a", 2) == [0, 1]
    rig.check_nothing_is_held()


@pytest.mark.parametrize("told", ["admin", "expired"])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_block_that_goes_during_its_load_was_evicted_by_an_operator_or_has_expired(
    told: str, is_gone: bool
) -> None:
    rig = Rig()
    prefix = admitted_from_disk(rig, "a", 2)
    if told == "admin":
        rig.evict(lambda entry: True)
    else:
        rig.clock.moment += DAY_S
    if is_gone:
        rig.store.lose(prefix.hashes)
    rig.store.is_held = False
    rig.turn()
    assert rig.compute(prefix) == 2
    assert [rig.cache.why_missed(prefix, index) for index in range(2)] == [told] * 2
    rig.finish(prefix)
    rig.check_nothing_is_held()


def test_a_reason_of_an_earlier_miss_is_not_told_where_computing_was_faster(slow_disk: Rig) -> None:
    rig = slow_disk
    rig.store.put("a", 4)
    prefix = rig.chain("a", 4)
    for block_hash in prefix.hashes:
        rig.tiers.catalog.miss_reasons.note(block_hash, "load_timeout")
    rig.cache.arrive(prefix)
    rig.cache.poll()
    assert rig.admit(prefix)
    assert rig.compute(prefix) == 4
    assert {rig.cache.why_missed(prefix, index) for index in range(4)} == {"computed_sooner"}
    rig.finish(prefix)
    rig.check_nothing_is_held()


@pytest.mark.parametrize("told", ["admin", "expired"])
def test_a_page_that_goes_before_it_is_copied_up_was_evicted_by_an_operator_or_has_expired(
    told: str,
) -> None:
    rig = Rig()
    rig.run("a", 2)
    assert rig.cache.flush(Tier.HOST, deadline=deadline())
    prefix = rig.queue("a", 2)
    assert rig.cache.admit(prefix, 2)
    if told == "admin":
        rig.evict(lambda entry: True)
    else:
        rig.clock.moment += DAY_S
        rig.cache._expiry.sweep()
    rig.admitted.append(prefix)
    rig.turn()
    assert rig.compute(prefix) == 2
    assert [rig.cache.why_missed(prefix, index) for index in range(2)] == [told] * 2
    rig.cache.release(prefix)
    rig.check_nothing_is_held()


def test_a_prompt_that_is_demoted_while_it_is_computed_was_in_no_tier() -> None:
    rig = Rig(is_write_behind=True)
    prefix = rig.start("a", 4)
    rig.compute(prefix)
    rig.turn(4)
    assert rig.on_host("a", 4)
    assert rig.cache.why_missed(prefix, 0) == "never_seen"
    rig.cache.release(prefix)


def test_a_limit_far_below_a_block_a_second_holds_up_no_request() -> None:
    rig = Rig(restore="auto")
    rig.tiers.disk_link.read_rate.limit = 1e-3
    rig.store.put("a", 8)
    assert rig.run("a", 8) >= 7
    assert len(rig.store.loaded) <= 1


def test_more_is_read_ahead_before_the_thread_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinkRate, "effective", lambda rate, now: rate.steady)  # it never stalls
    rig = Rig(num_blocks=512, num_pages=512)
    rig.tiers.disk_link.read_rate.bytes_per_s = 1000 * BLOCK_BYTES
    rig.store.put("a", 400)
    prefix = rig.queue("a", 400)
    rig.cache.poll()
    rig.store.is_held = True
    assert rig.admit(prefix)
    assert len(rig.store.jobs) == 1000 * MAX_READ_S
    rig.cache.begin_step(0.0, [], float)
    assert len(rig.store.jobs) == 1000 * MAX_READ_S
    rig.cache.begin_step(0.1, [], float)
    assert len(rig.store.jobs) == pytest.approx(1000 * (MAX_READ_S + 0.1))
    rig.store.is_held = False
    rig.finish(prefix)
    rig.check_nothing_is_held()


def test_nothing_is_copied_into_a_block_that_a_step_will_compute() -> None:
    rig = Rig(restore="auto")
    prefix = rig.start("a", 3)
    rig.cache.begin_compute(prefix, 0, 1)
    assert [rig.cache._recalls.is_open(each) for each in prefix.hashes] == [False, True, True]
    rig.finish(prefix)


def test_a_read_that_is_copied_to_vram_is_counted_as_used_once() -> None:
    rig = Rig(num_blocks=8, num_pages=16)
    rig.store.put("a", 6)
    ahead = rig.queue("a", 6)
    rig.turn(3)
    counters = rig.tiers.counters
    assert (len(rig.store.loaded), counters.used_reads) == (6, 0), "read ahead, and not used yet"
    assert counters.promoted_disk_blocks == 6
    assert rig.admit(ahead)
    rig.finish(ahead)
    assert counters.used_reads == 6
    rig.run("b", 8)
    rig.run("a", 6)
    assert counters.promoted_host_blocks > 6 and counters.used_reads == 6
    assert counters.promoted_disk_blocks == len(rig.store.loaded) == 6


def test_a_read_names_the_block_of_the_requests_chain_whatever_is_stored_under_its_hash() -> None:
    rig = Rig()
    rig.store.put("a", 3)
    for record, _ in list(rig.store.blocks.values()):
        where = {"root": b"x", "parent_hash": b"y", "namespace": b"z", "position": 9}
        rig.store.put_block(msgspec.structs.replace(record, **where, size_bytes=1))
    rig.store.is_held = True
    prefix = rig.queue("a", 3)
    rig.store.answer(0)
    rig.turn(2)
    lent = sorted((job.page for job in rig.store.jobs), key=lambda each: each.position or 0)
    assert [each.block_hash for each in lent] == prefix.hashes
    assert [each.root for each in lent] == [prefix.root] * 3
    assert [each.parent_hash for each in lent] == [prefix.root, *prefix.hashes[:2]]
    assert [each.position for each in lent] == [0, 1, 2]
    assert [each.namespace for each in lent] == [prefix.namespace] * 3
    assert [each.size_bytes for each in lent] == [BLOCK_BYTES] * 3


def test_what_vram_has_and_is_copying_down_is_not_read_for_a_queued_request() -> None:
    rig = Rig(load_timeout_s=0.0)
    rig.store.put("a", 6)
    rig.store.is_held = True
    waiting, other = rig.queue("a", 6), rig.queue("a", 6)
    while rig.store.lookups:
        rig.store.answer(0)
    rig.cache.poll()
    assert rig.admit(other) and rig.compute(other) == 6, "the disk does not answer in time"
    rig.cache.release(other)
    num_reading, rig.transfer.is_held = len(rig.store.jobs), True
    assert 0 < num_reading < 6 and rig.cache._demoter.demote(6) == 6 - num_reading
    rig.store.is_held = False
    rig.turn(6)
    rig.transfer.is_held = False
    rig.turn()
    assert rig.tiers.counters.load_failures.keys() == {"timeout"}
    assert rig.store.loaded == waiting.hashes[: -1 - num_reading : -1], (
        "those that were begun before"
    )
    assert all(rig.entry("a", index).is_on_disk for index in range(6))
    rig.cache.release(waiting)
    rig.check_nothing_is_held()
