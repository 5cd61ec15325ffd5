"""A store whose worker was killed opens again with every acknowledged block and no wrong one."""

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter

import pytest
from msgspec.structs import replace

from tests.operate.test_ask import engine_that_says
from tests.storage.blocks import occupied_bytes
from tests.storage.conftest import (
    NAMESPACE,
    Harness,
    Mailbox,
    is_alive,
    lent_pages,
    make_chain,
    make_record,
    wait_until,
)
from tests.storage.windows import NEEDS, WINDOWED, anchors_of, num_torn, pages_of
from tests.waiting import HANG_S
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Df, Verify
from tieredkv.operate.models import note_model
from tieredkv.storage.worker.process import EXIT_FAILED
from tieredkv.tier import Loaded, Restarted, Stored
from tieredkv.types import BlockRecord
from tieredkv.wire.process import start_process

BLOCKS_A_ROUND = 4
STORED_A_ROUND = BLOCKS_A_ROUND * (1 + NEEDS.num_pages)
LOADED_A_ROUND = 16
BUDGET_BYTES = 12 << 20
KEPT_BLOCKS = 128  # the blocks stored last, a third of the budget, are never evicted
EXPIRES_AFTER_S = 1.0


def survive_kills(harness: Harness, rounds: int, seed: int) -> Counter[str]:
    """Kill the worker at random times, with load on a full encrypted store; return the counters.

    Each round stores, loads, deletes and expires blocks and pages of windows, kills the worker, and
    checks the new one: what was acknowledged last is stored, every byte is right, `df` counts the
    places where a request could go on, `verify` finds nothing and the files stay within the budget.
    The moment is random in time in one round, and in the number of blocks acknowledged before it in
    the next, so that a slow worker is not only hit at its start.
    """
    client = harness.open(
        budget_bytes=BUDGET_BYTES,
        backoff_s=0.01,
        max_backoff_s=0.01,
        encryption="on",
        key_dir=f"{harness.folder}.keys",
    )
    note_model(harness.folder, WINDOWED)
    mail, random_, root = Mailbox(client), random.Random(seed), WINDOWED.root(NAMESPACE)
    acknowledged: dict[bytes, BlockRecord] = {}
    tried: dict[bytes, BlockRecord] = {}
    counted = Counter[str]()
    for round_ in range(rounds):
        chain = f"round {round_}"
        blocks = [make_record(chain, position, root=root) for position in range(BLOCKS_A_ROUND)]
        fresh = [*blocks, *pages_of(blocks)]
        random_.shuffle(fresh)
        brief, doomed = fresh[0], [fresh[1].block_hash]
        leaving = {brief.block_hash, *doomed}  # and with a block, its pages
        leaving |= {
            it.block_hash for it in pages_of([b for b in blocks if b.block_hash in leaving])
        }
        fresh[0] = replace(brief, expires_at=brief.computed_at + EXPIRES_AFTER_S)
        tried |= {record.block_hash: record for record in fresh}
        mail.fill(fresh)
        client.store(lent_pages(fresh))
        client.delete(doomed, "request")
        wanted = random_.sample(sorted(tried), min(len(tried), LOADED_A_ROUND))
        items = lent_pages([tried[key] for key in wanted], first_page=STORED_A_ROUND)
        client.load(items)
        pid = client.pid
        assert pid is not None
        stored_before = []
        if round_ % 2:
            stored_before = mail.take(Stored, random_.randint(1, STORED_A_ROUND))
        else:
            time.sleep(random_.random() * 0.03)
        os.kill(pid, signal.SIGKILL)
        mail.take(Restarted)
        assert client.pending_pages == frozenset(), "a dead worker holds pages"
        client.check()
        assert occupied_bytes(harness.folder) <= BUDGET_BYTES
        for stored in stored_before + mail.take(Stored, len(fresh) - len(stored_before)):
            counted["stores cut off"] += not stored.ok
            block_hash = client.block_of(stored)
            if stored.ok and block_hash not in leaving:
                acknowledged[block_hash] = tried[block_hash]
        for loaded in mail.take(Loaded, len(items)):
            if loaded.ok:
                mail.assert_right(loaded)
                counted["blocks verified"] += 1
        kept = list(acknowledged.values())[-KEPT_BLOCKS:]
        assert None not in mail.lookup([record.block_hash for record in kept]), (
            "an acknowledged block is lost"
        )
        for loaded in mail.load(kept[-2 * STORED_A_ROUND :]):
            assert loaded.ok, f"an acknowledged block is lost: {loaded.reason}"
            mail.assert_right(loaded)
            counted["blocks verified"] += 1
        there = found_of(mail, tried)
        with engine_that_says(client, {}):
            told = StoreControl(harness.folder).answer(Df(verbose=True))["namespaces"]
        num_told = sum(use["anchors"] for use in told)
        num_left = len(anchors_of(found_of(mail, tried)))  # what is brief may have expired
        assert num_left <= num_told <= len(anchors_of(there)), "a wrong anchor is told"
        counted["anchors verified"] += num_left
        counted["torn blocks"] += num_torn(there)
        found = StoreControl(harness.folder).answer(Verify(repair=False))
        assert found["bad"] == 0, found
        counted["blocks verified"] += found["checked"]
        counted["kills"] += 1
        counted["blocks acknowledged"] = len(acknowledged)
    for start in range(0, len(kept), 32):
        for loaded in mail.load(kept[start : start + 32]):
            assert loaded.ok, f"an acknowledged block is lost: {loaded.reason}"
            mail.assert_right(loaded)
    return counted


def found_of(mail: Mailbox, tried: dict[bytes, BlockRecord]) -> list[BlockRecord]:
    """Return which of some records the store finds."""
    found = zip(tried.values(), mail.lookup([*tried]), strict=True)
    return [record for record, is_there in found if is_there is not None]


@pytest.mark.slow
def test_a_worker_killed_sixty_times_loses_nothing_acknowledged(harness: Harness) -> None:
    counted = survive_kills(harness, 60, seed=7)
    assert counted["stores cut off"] and counted["blocks acknowledged"] > 60, "they hit nothing"


ENGINE = textwrap.dedent(
    """
    import os, sys, time
    from tieredkv.storage.client.client import StoreClient
    from tieredkv.wire.arena import HostArena
    from tieredkv.tier import Lent
    from tieredkv.storage.options import StoreOptions
    from tieredkv.types import BlockRecord
    import hashlib

    arena = HostArena(16, 32768)
    client = StoreClient(StoreOptions(path=sys.argv[1], budget_bytes=64 << 20), arena)
    child = 0
    if sys.argv[2] == "forked":  # the child holds a copy of the worker's channel
        child = os.fork()
        if child == 0:
            os.close(1)
            time.sleep(60)
            os._exit(0)
    print("pids", client.pid, child, flush=True)
    number = 0
    while True:
        items, now = [], time.time()
        for page in range(16):
            key = hashlib.sha256(f"engine/{number}".encode()).digest()
            arena.page(page)[:] = hashlib.shake_128(key).digest(32768)
            record = BlockRecord(
                block_hash=key, parent_hash=b"R" * 32, root=b"R" * 32, namespace=b"N" * 32,
                position=0, size_bytes=32768, retention="24h", computed_at=now,
                expires_at=now + 86400, last_used=now,
            )
            items.append(Lent.of(record, page))
            number += 1
        client.store(items)
        left = 16
        while left:
            for event in client.poll():
                left -= 1
                word, block = "ok" if event.ok else "lost", items[event.page_id]
                print(word, block.block_hash.hex(), flush=True)
            time.sleep(0.001)
    """
)


@pytest.mark.parametrize("how", ["alone", "forked"])
def test_a_killed_engine_leaves_no_worker_and_a_store_that_opens(
    harness: Harness, how: str
) -> None:
    command = [sys.executable, "-c", ENGINE, str(harness.folder), how]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    worker_pid, child_pid = map(int, engine.stdout.readline().split()[1:])
    stored: list[bytes] = []
    while len(stored) < 200:
        word, key = engine.stdout.readline().split()
        assert word == "ok"
        stored.append(bytes.fromhex(key))
    engine.kill()
    stored += [
        bytes.fromhex(line.split()[1])
        for line in engine.stdout.read().splitlines()
        if line.startswith("ok") and len(line) == 67
    ]
    engine.wait()
    engine.stdout.close()
    wait_until(lambda: not is_alive(worker_pid), "the worker outlives its engine")
    if child_pid:
        os.kill(child_pid, signal.SIGKILL)
    mail = Mailbox(harness.open())
    records = [record for record in mail.lookup(stored) if record is not None]
    assert len(records) == len(stored), "an acknowledged block is gone"
    for start in range(0, len(records), 32):
        for loaded in mail.load(records[start : start + 32]):
            assert loaded.ok, loaded.reason
            mail.assert_right(loaded)


@pytest.mark.parametrize("damage", ["cut off", "overwritten", "pages overwritten"])
def test_an_index_that_kills_its_worker_is_set_aside_and_made_again_from_the_extents(
    harness: Harness, damage: str
) -> None:
    client = harness.open()
    chain = [make_record("a", position) for position in range(16)]
    Mailbox(client).store(chain)
    client.close()
    index = harness.folder / "index" / "data.mdb"
    size = index.stat().st_size
    if damage == "cut off":
        os.truncate(index, 2 * 4096)  # both meta pages point past the end, which raises SIGBUS
    elif damage == "overwritten":
        index.write_bytes(os.urandom(size))
    else:
        with index.open("r+b") as file:
            file.seek(2 * 4096)
            file.write(b"\xff" * (size - 2 * 4096))
    mail = Mailbox(harness.open())
    mail.lookup([record.block_hash for record in chain])
    wait_until((harness.folder / "index.bad").exists)
    wait_until(lambda: mail.client.pid is not None)
    for done in mail.load(chain):
        assert done.ok, done.reason
        mail.assert_right(done)
    assert all(done.ok for done in mail.store(make_chain("b", 16)))


def test_a_folder_that_is_removed_under_the_worker_costs_its_blocks_and_no_more(
    harness: Harness,
) -> None:
    client = harness.open()
    mail = Mailbox(client)
    chain = [make_record("a", position) for position in range(4)]
    mail.store(chain)
    shutil.rmtree(harness.folder)
    mail.store(chain[:1])  # answered whether or not the worker notices the loss
    if client.pid is not None:
        os.kill(client.pid, signal.SIGKILL)
    mail.take(Restarted)
    assert mail.lookup([record.block_hash for record in chain]) == [None] * 4
    assert all(done.ok for done in mail.store(chain))


def test_a_worker_whose_parent_ends_before_it_begins_ends_quietly(
    capfd: pytest.CaptureFixture[str],
) -> None:
    process, sock = start_process("tieredkv.storage.worker")
    sock.close()
    assert process.wait(HANG_S) == EXIT_FAILED
    assert capfd.readouterr() == ("", "")
