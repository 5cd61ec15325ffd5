"""The reasons for which the last blocks have left RAM are remembered."""

import gc

from tieredkv.cache.miss_reasons import NUM_REMEMBERED, MissReasons
from tieredkv.garbage import THRESHOLDS
from tieredkv.types import BlockHash

HASHES = [BlockHash(b"%032d" % number) for number in range(NUM_REMEMBERED + 1)]


def test_a_block_on_disk_expires_there_unless_an_operator_has_deleted_it() -> None:
    reasons, block_hash = MissReasons(), HASHES[0]
    assert reasons.why(block_hash, 0) == "never_seen"
    reasons.note(block_hash, "evicted_disk", until=10)
    assert [reasons.why(block_hash, now) for now in (9, 10)] == ["evicted_disk", "expired"]
    reasons.note_deleted(HASHES[:2])
    assert reasons.why(block_hash, 99) == "admin"
    assert reasons.why(HASHES[1], 99) == "never_seen"
    reasons.note(block_hash, "evicted_host")
    reasons.note_deleted([block_hash])
    assert reasons.why(block_hash, 99) == "evicted_host"


def test_the_blocks_that_left_last_are_remembered_with_their_last_reason() -> None:
    reasons = MissReasons()
    for block_hash in HASHES[:-1]:
        reasons.note(block_hash, "corrupt")
    assert {reasons.why(each, 0) for each in HASHES[:-1]} == {"corrupt"}
    reasons.note(HASHES[0], "evicted_host")
    reasons.note(HASHES[-1], "evicted_device")
    assert reasons.why(HASHES[0], 0) == "evicted_host"
    assert reasons.why(HASHES[1], 0) == "never_seen"
    assert {reasons.why(each, 0) for each in HASHES[NUM_REMEMBERED // 4 : -1]} == {"corrupt"}
    assert reasons.why(HASHES[-1], 0) == "evicted_device"


def test_blocks_that_leave_do_not_make_python_look_for_garbage() -> None:
    reasons, before = MissReasons(), gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    gc.collect()
    try:
        for number, block_hash in enumerate(HASHES[:1000]):
            reasons.note(block_hash, "evicted_disk", until=number)
        assert gc.get_count()[0] < 500  # new objects that a look would go through
    finally:
        gc.set_threshold(*before)
