"""A probe reads blocks into no page of the engine's, and tells when each had been read."""

import os
import signal
import time

from tests.storage.conftest import NUM_PAGES, Harness, Mailbox, hash_of, lent_pages, make_chain
from tieredkv.tier import Loaded, ProbeDone


def test_a_probe_tells_when_each_stored_block_had_been_read(harness: Harness) -> None:
    mail = Mailbox(harness.open())
    chain = make_chain("a", 8)
    mail.store(chain)
    mail.fill(chain, lambda _: bytes(chain[0].size_bytes))
    before = time.monotonic()
    job = mail.client.probe([*(record.block_hash for record in chain), hash_of("b", 0)])
    (done,) = mail.take(ProbeDone)
    assert done.job == job
    assert len(done.ended_at) == 8
    assert done.ended_at == sorted(done.ended_at)
    assert before < done.ended_at[0] and done.ended_at[-1] < time.monotonic()
    assert mail.client.stats().faults == {}
    for page in range(len(chain)):
        assert not any(mail.page(page)[: chain[0].size_bytes]), "a page was written to"


def test_loads_are_answered_while_a_probe_goes_on(harness: Harness) -> None:
    mail = Mailbox(harness.open())
    chain = make_chain("a", NUM_PAGES)
    mail.store(chain)
    hashes = [record.block_hash for record in chain]
    mail.client.probe(64 * hashes)
    mail.client.load(lent_pages(chain))
    loaded = mail.take(Loaded, NUM_PAGES)
    assert all(done.ok for done in loaded)
    (done,) = mail.take(ProbeDone)
    assert len(done.ended_at) == 64 * NUM_PAGES
    assert done.ended_at[-1] > loaded[-1].ended_at, "the probe went before the loads"


def test_a_probe_of_a_worker_that_dies_ends_without_a_time(harness: Harness) -> None:
    mail = Mailbox(harness.open())
    chain = make_chain("a", 2)
    mail.store(chain)
    pid = mail.client.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    mail.client.probe([record.block_hash for record in chain])
    os.kill(pid, signal.SIGKILL)
    (done,) = mail.take(ProbeDone)
    assert done.ended_at == []


def test_a_probe_of_bad_bytes_drops_nothing(harness: Harness) -> None:
    client = harness.open()
    chain = make_chain("a", 2)
    Mailbox(client).store(chain)
    client.close()
    for path in harness.folder.rglob("*.seg"):
        data = bytearray(path.read_bytes())
        data[len(data) // 4] ^= 1
        path.write_bytes(data)
    mail = Mailbox(harness.open())
    mail.client.probe([record.block_hash for record in chain])
    (done,) = mail.take(ProbeDone)
    assert len(done.ended_at) <= 2
    assert mail.client.stats().faults == {}
    assert None not in mail.lookup([record.block_hash for record in chain])


def test_a_close_does_not_wait_for_a_long_probe(harness: Harness) -> None:
    mail = Mailbox(harness.open())
    chain = make_chain("a", NUM_PAGES)
    mail.store(chain)
    mail.client.probe(4096 * [chain[0].block_hash])
    began = time.monotonic()
    mail.client.close()
    assert time.monotonic() - began < 5
    (done,) = mail.take(ProbeDone)
    assert len(done.ended_at) < 4096
