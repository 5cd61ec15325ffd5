import random

import pytest

from tests.storage.conftest import Harness, Mailbox, lent_pages, make_chain
from tieredkv.storage.worker.pace import WriteLimit
from tieredkv.tier import Stored


@pytest.mark.parametrize("write_bytes", [4096, 300_000, 5_000_000])
def test_no_span_of_time_has_more_than_its_share_and_the_rate_is_reached(write_bytes: int) -> None:
    now, rate, rng = [1000.0], 1_000_000, random.Random(write_bytes)
    limit = WriteLimit(rate, lambda: now[0])
    writes: list[float] = []
    while now[0] < 1100:
        while not limit.wait_s:
            assert limit.admits(write_bytes)
            writes.append(now[0])
        now[0] += limit.wait_s if len(writes) % 2 else rng.uniform(0.01, 0.2)
    for i in range(0, len(writes), 1 + len(writes) // 100):
        for j in range(i, len(writes), 1 + len(writes) // 100):
            written = (j - i + 1) * write_bytes
            assert written <= rate * (writes[j] - writes[i] + 1) + write_bytes + 1
    assert len(writes) * write_bytes >= rate * 95


def test_after_a_pause_one_second_is_there_at_once_and_no_more() -> None:
    now = [0.0]
    limit = WriteLimit(1000, lambda: now[0])
    for _ in range(3):
        now[0] += 100.0
        num_writes = 0
        while limit.admits(100):
            num_writes += 1
        assert num_writes in (10, 11)


def test_a_write_that_did_not_begin_is_not_charged() -> None:
    limit = WriteLimit(1000, lambda: 5.0)
    for _ in range(100):
        assert limit.admits(900)
        limit.refund(900)
    assert limit.admits(2000) and not limit.admits(1)


def test_without_a_limit_nothing_waits() -> None:
    limit = WriteLimit(0)
    assert limit.admits(1 << 60)
    limit.refund(1 << 60)
    assert limit.wait_s == 0


def test_writes_that_are_held_back_stop_nothing_else(harness: Harness) -> None:
    client = harness.open(write_limit=1)
    mail, chain = Mailbox(client), make_chain("a", 6)
    mail.fill(chain)
    client.store(lent_pages(chain))
    (done,) = mail.take(Stored)
    assert done.ok, "a full bucket lets the first one through"
    assert len(mail.lookup([record.block_hash for record in chain])) == len(chain)
    client.load(lent_pages([chain[done.page_id]], first_page=40))
    assert [each.ok for each in mail.load(chain[done.page_id : done.page_id + 1])] == [True]
    stats = client.stats()
    assert (stats.blocks, stats.bytes_write_limit) == (1, 1)
    assert client.pending_pages >= set(range(6)) - {done.page_id}
    client.close()  # closing waits for accepted stores, without the limit
    assert [done.ok for done in mail.take(Stored, 5)] == [True] * 5
    with_all = Mailbox(harness.open())
    assert all(with_all.lookup([record.block_hash for record in chain]))
