"""The running worker on a disk that really fails for a while: with errors, stalls or no room.

The disks are the FUSE filesystem of `fuse.py` and a small tmpfs. Both need the right to mount.
"""

import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.fakes import FakeClock
from tests.levels import few
from tests.storage.blocks import occupied_bytes, open_store, page_with, verify
from tests.storage.conftest import (
    DAY_S,
    PAGE_BYTES,
    Harness,
    Mailbox,
    lent_pages,
    make_chain,
    make_record,
    payload_of,
    wait_until,
)
from tests.storage.fuse import FaultyDisk, mounted_faulty_disk
from tieredkv.storage.client.client import StoreClient
from tieredkv.tier import Loaded, LookupDone, Restarted, Stored
from tieredkv.types import BlockRecord

LENGTH = 8
BUDGET_BYTES = 16 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FaultyDisk]:
    with mounted_faulty_disk(tmp_path) as disk:
        yield disk


@contextmanager
def harness_on(folder: Path, tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(folder)
    harness.offset_file = tmp_path / "clock-offset"
    try:
        yield harness
    finally:
        harness.close()


@pytest.fixture
def harness(disk: FaultyDisk, tmp_path: Path) -> Iterator[Harness]:
    with harness_on(disk.folder / "store", tmp_path) as harness:
        yield harness
        disk.set_faults()  # a worker whose call hangs could not be ended


def assert_sound(folder: Path, stored: list[BlockRecord], budget_bytes: int = 64 << 20) -> None:
    """Assert that a stopped store has these blocks, is sound, and is within its budget."""
    with open_store(folder, FakeClock(time.time()), budget_bytes=budget_bytes) as store:
        for record in stored:
            located = store.locate(record.block_hash)
            assert located is not None, "an acknowledged block is gone"
            page = page_with(b"", PAGE_BYTES)
            store.read(located, page)
            assert page == payload_of(record.block_hash), "a wrong block was stored"
        assert verify(store, repair=False).bad == 0
        store.check()
    assert occupied_bytes(folder) <= budget_bytes


def assert_none_lost(client: StoreClient, mail: Mailbox, records: list[BlockRecord]) -> list[Any]:
    """Assert that each block is right or was evicted; return the blocks that are stored."""
    loaded = mail.load(records) if records else []
    there = [done for done in loaded if done.ok]
    assert reasons(loaded) <= {"", "missing"}
    for done in there:
        mail.assert_right(done)
    assert len(records) - len(there) <= client.stats().num_evicted, "acknowledged blocks are gone"
    found = {mail.client.block_of(done) for done in there}
    return [record for record in records if record.block_hash in found]


def assert_all_right(mail: Mailbox, records: list[BlockRecord]) -> None:
    for done in mail.load(records):
        assert done.ok, done.reason
        mail.assert_right(done)


def reasons(done: list[Loaded] | list[Stored]) -> set[str]:
    return {each.reason for each in done}


# --- errors -----------------------------------------------------------------------------------


def test_a_disk_that_cannot_be_read_costs_misses_and_no_block(
    disk: FaultyDisk, harness: Harness
) -> None:
    client = harness.open()
    mail = Mailbox(client)
    chain, other = make_chain("a", LENGTH), make_chain("b", LENGTH)
    assert reasons(mail.store(chain)) == {""}
    pid = client.pid
    disk.set_faults(only=".seg", fail_reads=errno.EIO)
    assert reasons(mail.load(chain)) == {"io_error"}
    assert None not in mail.lookup([record.block_hash for record in chain])
    assert reasons(mail.store(other)) == {""}
    assert client.stats().faults["io_error"] == LENGTH
    assert disk.set_faults() >= LENGTH
    assert_all_right(mail, chain + other)
    assert client.pid == pid
    client.close()
    assert_sound(harness.folder, chain + other)


@pytest.mark.parametrize(
    ("only", "code"),
    few(
        [
            (".seg", errno.ENOSPC),
            ("data.mdb", errno.ENOSPC),
            ("data.mdb", errno.EIO),
            ("", errno.EIO),
            (".seg", errno.EIO),
            ("", errno.ENOSPC),
        ],
        4,
    ),
)
def test_a_disk_that_cannot_be_written_acknowledges_nothing_and_comes_back(
    disk: FaultyDisk, harness: Harness, only: str, code: int
) -> None:
    client = harness.open()
    mail = Mailbox(client)
    chain, refused, late = (make_chain(name, LENGTH) for name in "abc")
    assert reasons(mail.store(chain)) == {""}
    disk.set_faults(only=only, fail_writes=code)
    assert reasons(mail.store(refused)) <= {"io_error", "full", "worker_died", "worker_down"}
    if client.pid is not None:
        assert_none_lost(client, mail, chain)
        assert mail.lookup([record.block_hash for record in refused]) == [None] * LENGTH
    assert disk.set_faults() > 0
    wait_until(lambda: reasons(mail.store(refused)) == {""})
    assert reasons(mail.store(late)) == {""}
    assert_all_right(mail, late)
    there = assert_none_lost(client, mail, chain + refused + late)
    client.close()
    assert_sound(harness.folder, there)


@pytest.mark.parametrize("room_bytes", few([50_000, 1 << 20, 4096, 130_000, (2 << 20) + 8192]))
def test_wherever_the_room_ends_what_was_acknowledged_is_there(
    disk: FaultyDisk, harness: Harness, room_bytes: int
) -> None:
    client = harness.open()
    mail = Mailbox(client)
    disk.set_faults(room_bytes=room_bytes)
    stored: list[BlockRecord] = []
    for number in range(20):
        chain = make_chain(f"{number}", LENGTH)
        done = mail.store(chain)
        ok = {client.block_of(each) for each in done if each.ok}
        stored += [record for record in chain if record.block_hash in ok]
        if len(ok) < LENGTH:
            break
    else:
        pytest.fail("the room did not end")
    assert_none_lost(client, mail, stored[-2 * LENGTH :])
    assert disk.set_faults() > 0
    wait_until(lambda: reasons(mail.store(chain)) == {""})
    assert_all_right(mail, chain)
    there = assert_none_lost(client, mail, stored + chain)
    client.close()
    assert_sound(harness.folder, there)


def test_an_index_that_cannot_be_read_at_a_restart_comes_back_by_itself(
    disk: FaultyDisk, harness: Harness
) -> None:
    client = harness.open()
    mail = Mailbox(client)
    chain = make_chain("a", LENGTH)
    assert reasons(mail.store(chain)) == {""}
    disk.set_faults(only="data.mdb", fail_reads=errno.EIO)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    wait_until(lambda: disk.num_hits() >= 5)
    assert mail.lookup([record.block_hash for record in chain]) == [None] * LENGTH
    disk.set_faults()
    wait_until(lambda: client.pid is not None)
    assert_all_right(mail, chain)
    client.close()
    assert_sound(harness.folder, chain)


UNREADABLE: dict[str, Any] = {"only": "data.mdb", "fail_reads": errno.EIO, "fail_from": 2 * 4096}
"""Of the index only the two meta pages can be read: a page fault on any other one is a SIGBUS."""


def test_a_page_fault_that_fails_once_costs_a_restart_and_no_block(
    disk: FaultyDisk, harness: Harness
) -> None:
    client = harness.open()
    mail = Mailbox(client)
    chain = make_chain("a", 64)
    assert reasons(mail.store(chain)) == {""}
    assert client.pid is not None
    disk.set_faults(**UNREADABLE)
    os.kill(client.pid, signal.SIGKILL)
    wait_until(lambda: disk.num_hits() > 0)
    disk.set_faults()
    mail.take(Restarted)
    assert_all_right(mail, chain)


def test_page_faults_that_fail_for_a_while_cost_no_block(
    disk: FaultyDisk, harness: Harness
) -> None:
    client = harness.open()
    mail = Mailbox(client)
    chain, late = make_chain("a", 32), make_chain("late", LENGTH)
    assert reasons(mail.store(chain)) == {""}
    assert client.pid is not None
    disk.set_faults(**UNREADABLE)
    os.kill(client.pid, signal.SIGKILL)
    mail.take(Restarted)
    disk.set_faults()
    wait_until(lambda: reasons(mail.store(late)) == {""})
    assert_all_right(mail, late)
    assert_all_right(mail, chain)


# --- stalls -----------------------------------------------------------------------------------


def test_a_read_that_hangs_holds_up_nobody_else(disk: FaultyDisk, harness: Harness) -> None:
    client = harness.open()
    mail = Mailbox(client)
    chain, later = make_chain("a", LENGTH), make_chain("b", LENGTH)
    assert reasons(mail.store(chain)) == {""}
    disk.set_faults(only=".seg", hold_reads=1)
    client.load(lent_pages(chain[:1], first_page=32))
    wait_until(lambda: disk.num_hits() > 0)
    assert client.pending_pages == {32}
    assert None not in mail.lookup([record.block_hash for record in chain])
    assert_all_right(mail, chain[1:])
    assert reasons(mail.store(later)) == {""}
    assert_all_right(mail, later)
    assert client.pending_pages == {32}, "the read was not held"
    disk.set_faults()
    (done,) = mail.take(Loaded)
    assert done.ok
    mail.assert_right(done)


@pytest.mark.parametrize("only", [".seg", "data.mdb"], ids=["segments", "index"])
def test_a_sync_that_hangs_holds_up_no_lookup_and_no_load(
    disk: FaultyDisk, harness: Harness, only: str
) -> None:
    client = harness.open(sync="commit")
    mail = Mailbox(client)
    chain, later = make_chain("a", LENGTH), make_chain("b", LENGTH)
    assert reasons(mail.store(chain)) == {""}
    mail.fill(later)
    disk.set_faults(only=only, hold_syncs=True)
    client.store(lent_pages(later))
    wait_until(lambda: disk.num_hits() > 0)
    client.lookup([record.block_hash for record in chain])
    (found,) = mail.take(LookupDone)
    assert found.found.keys() == {record.block_hash for record in chain}
    client.load(lent_pages(chain, first_page=32))
    for done in mail.take(Loaded, LENGTH):
        assert done.ok
        mail.assert_right(done)
    assert len(client.pending_pages) == LENGTH, "acknowledged before it was synced"
    disk.set_faults()
    assert reasons(mail.take(Stored, LENGTH)) == {""}


def test_a_sync_that_hung_is_answered_once_it_returns(disk: FaultyDisk, harness: Harness) -> None:
    client = harness.open(sync="commit")
    mail = Mailbox(client)
    chain = make_chain("a", LENGTH)
    mail.fill(chain)
    disk.set_faults(only=".seg", hold_syncs=True)
    client.store(lent_pages(chain))
    wait_until(lambda: disk.num_hits() > 0)
    assert len(client.pending_pages) == LENGTH, "acknowledged before it was synced"
    disk.set_faults()
    assert reasons(mail.take(Stored, LENGTH)) == {""}
    assert_all_right(mail, chain)


# --- a small disk -----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB, half of the store's budget."""
    mount_point = tmp_path / "small"
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8M", "tmpfs", str(mount_point)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "--lazy", str(mount_point)], check=True)


def test_a_full_filesystem_takes_new_blocks_expires_and_serves_again(
    small_disk: Path, tmp_path: Path
) -> None:
    with harness_on(small_disk / "store", tmp_path) as harness:
        client = harness.open(budget_bytes=BUDGET_BYTES)
        mail = Mailbox(client)
        pid = client.pid
        chains = [make_chain(f"{number}", 32) for number in range(20)]
        for chain in chains:
            assert reasons(mail.store(chain)) == {""}
            assert_all_right(mail, chain)
        num_stored = sum(done.ok for chain in chains for done in mail.load(chain))
        assert 4 << 20 < num_stored * PAGE_BYTES < 8 << 20
        filler = small_disk / "somebody else's"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        late = make_chain("full", LENGTH)
        wait_until(lambda: reasons(mail.store(late)) == {""})
        assert_all_right(mail, late)
        secret = payload_of(late[0].block_hash)[:64]
        harness.set_clock(DAY_S + 60)
        mail.lookup([late[0].block_hash])
        wait_until(lambda: not any((harness.folder / "segments").iterdir()))
        held = b"".join(path.read_bytes() for path in small_disk.rglob("*") if path.is_file())
        assert secret not in held, "expired bytes are still on the disk"
        filler.unlink()
        late = [aged(make_record("late", position)) for position in range(32)]
        assert reasons(mail.store(late)) == {""}
        assert_all_right(mail, late)
        assert client.pid == pid


def aged(record: BlockRecord) -> BlockRecord:
    """Return the same block as if computed after the clock was set ahead by a day and a minute."""
    shift = DAY_S + 60
    return replace(
        record,
        computed_at=record.computed_at + shift,
        expires_at=record.expires_at + shift,
        last_used=record.last_used + shift,
    )
