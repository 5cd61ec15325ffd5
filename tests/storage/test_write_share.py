"""Writes beside reads: a tenth of the bytes, neither more nor nothing."""

import pytest

from tieredkv.storage.worker.pace import MAX_CREDIT_BYTES, QUIET_S, WRITE_SHARE, WriteShare

BLOCK = 2 << 20


def test_without_reads_every_write_may_begin() -> None:
    clock = [100.0]
    share = WriteShare(lambda: clock[0])
    assert all(share.admits(BLOCK) for _ in range(1000))


def test_beside_reads_writes_get_a_tenth_of_the_bytes() -> None:
    clock = [100.0]
    share, num_written = WriteShare(lambda: clock[0]), 0
    for _ in range(10_000):
        clock[0] += 1e-3
        share.note_read(BLOCK)
        num_written += share.admits(BLOCK)
    assert num_written / (10_000 + num_written) == pytest.approx(WRITE_SHARE, rel=0.02)


def test_a_read_that_has_only_begun_holds_writes_back() -> None:
    clock = [100.0]
    share = WriteShare(lambda: clock[0])
    share.note_read(0)
    assert not share.admits(BLOCK)
    clock[0] += QUIET_S
    assert share.admits(BLOCK)


def test_no_burst_of_writes_follows_a_long_time_with_reads_alone() -> None:
    clock = [100.0]
    share = WriteShare(lambda: clock[0])
    for _ in range(100_000):
        share.note_read(BLOCK)
    assert sum(share.admits(BLOCK) for _ in range(1000)) == MAX_CREDIT_BYTES // BLOCK


def test_what_writes_saved_is_forgotten_once_they_had_the_disk_for_themselves() -> None:
    clock = [100.0]
    share = WriteShare(lambda: clock[0])
    for _ in range(1000):
        share.note_read(BLOCK)
    clock[0] += QUIET_S
    assert share.admits(BLOCK)
    share.note_read(BLOCK)
    assert not share.admits(BLOCK)


def test_a_block_larger_than_the_credit_is_written_in_the_end() -> None:
    clock = [100.0]
    share, size = WriteShare(lambda: clock[0]), 4 * MAX_CREDIT_BYTES
    for _ in range(1000):
        share.note_read(BLOCK)
        if share.admits(size):
            return
    raise AssertionError("it is never written")
