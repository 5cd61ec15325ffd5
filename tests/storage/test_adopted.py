"""Pages in memory of another program, which can take that memory away at any time."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.golden import refused
from tests.storage.conftest import (
    NUM_PAGES,
    PAGE_BYTES,
    CheckedClient,
    Harness,
    Mailbox,
    lent_pages,
    make_chain,
    wait_until,
)
from tests.storage.test_verdicts import kept_files
from tieredkv.errors import ConfigError, StorageError
from tieredkv.storage.folder.folder import SET_ASIDE
from tieredkv.tier import Loaded, Stored
from tieredkv.wire.arena import HostArena

SIZE_BYTES = NUM_PAGES * PAGE_BYTES
BLIND = """
import sys
if any("tieredkv.storage.worker" in each for each in sys.orig_argv):
    import tieredkv.wire.arena as host
    host.HostArena.page.__globals__["_check_adopted"] = lambda fd, size_bytes: None
"""
"""Makes the worker touch pages without a look at the file first, as if it shrank just then."""


@pytest.fixture
def region(ram_path: Path, tmp_path: Path) -> Iterator[Path]:
    """A file of shared memory, as another program makes it: not sealed."""
    path = ram_path / f"region-{tmp_path.name}.mmap"
    path.write_bytes(bytes(SIZE_BYTES))
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def adopted(harness: Harness, region: Path) -> Harness:
    """A harness whose pages are in that file."""
    harness.arena.close()
    harness.arena = HostArena.attach(
        os.open(region, os.O_RDWR), NUM_PAGES, PAGE_BYTES, is_adopted=True
    )
    return harness


@pytest.fixture
def stored(adopted: Harness) -> tuple[CheckedClient, Mailbox]:
    """A client with a chain on disk."""
    client = adopted.open(num_readers=1, num_writers=1)
    mail = Mailbox(client)
    assert all(done.ok for done in mail.store(make_chain("a", 8)))
    return client, mail


def test_blocks_come_back_into_the_rows_of_another_program(
    adopted: Harness, region: Path, stored: tuple[CheckedClient, Mailbox]
) -> None:
    region.unlink()  # as the other program does once all its processes have mapped the file
    mail = stored[1]
    for done in mail.load(make_chain("a", 8)):
        assert done.ok, done.reason
        mail.assert_right(done)
    adopted.arena.check()


@pytest.mark.parametrize("size_bytes", [SIZE_BYTES - 4096, SIZE_BYTES + 4096, 0])
def test_memory_of_another_size_is_not_adopted(region: Path, size_bytes: int) -> None:
    os.truncate(region, size_bytes)
    fd = os.open(region, os.O_RDWR)
    with refused(StorageError):
        HostArena.attach(fd, NUM_PAGES, PAGE_BYTES, is_adopted=True)
    os.close(fd)


def test_rows_that_are_not_aligned_are_not_adopted(region: Path) -> None:
    fd = os.open(region, os.O_RDWR)
    with refused(ConfigError):
        HostArena.attach(fd, 8, PAGE_BYTES + 512, is_adopted=True)
    os.close(fd)


def test_loads_and_stores_fail_while_the_memory_is_gone_and_no_extent_is_blamed(
    adopted: Harness, region: Path, stored: tuple[CheckedClient, Mailbox]
) -> None:
    client, mail = stored
    pid = client.pid
    for _ in range(3):
        os.truncate(region, 0)
        client.load(lent_pages(make_chain("a", 8)))
        assert {done.reason for done in mail.take(Loaded, 8)} == {"io_error"}
        client.store(lent_pages(make_chain("b", 8)))
        assert {done.reason for done in mail.take(Stored, 8)} == {"io_error"}
    os.truncate(region, SIZE_BYTES)
    assert all(done.ok for done in mail.load(make_chain("a", 8)))
    assert all(done.ok for done in mail.store(make_chain("b", 8)))
    assert client.pid == pid
    assert client.stats().num_extents_retired == 0


@pytest.fixture
def blind_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that touch pages which are gone."""
    extra = tmp_path / "extra"
    extra.mkdir()
    (extra / "sitecustomize.py").write_text(BLIND)
    old = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(extra), *([old] if old else [])]))


@pytest.mark.usefixtures("blind_worker")
@pytest.mark.parametrize("is_store", [True, False])
def test_a_bus_error_in_the_rows_is_no_verdict_on_the_index(
    adopted: Harness,
    region: Path,
    stored: tuple[CheckedClient, Mailbox],
    caplog: pytest.LogCaptureFixture,
    is_store: bool,
) -> None:
    client, mail = stored
    before = {name: text for name, text in kept_files(adopted.folder).items() if "seg" in name}
    os.truncate(region, 0)
    if is_store:  # the checksum of the page is computed first
        client.store(lent_pages(make_chain("b", 8)))
        assert {done.reason for done in mail.take(Stored, 8)} == {"worker_died"}
        wait_until(lambda: "SIGBUS" in caplog.text, "nobody tells of the signal")
        assert "the memory that another program lends is gone" in caplog.text
    else:  # the system call answers EFAULT
        client.load(lent_pages(make_chain("a", 8)))
        assert {done.reason for done in mail.take(Loaded, 8)} == {"io_error"}
    os.truncate(region, SIZE_BYTES)
    wait_until(lambda: client.pid is not None, "no worker serves the store again")
    for done in mail.load(make_chain("a", 8)):
        assert done.ok, done.reason
        mail.assert_right(done)
    assert not list(adopted.folder.glob(f"{SET_ASIDE}*"))
    assert {name: text for name, text in kept_files(adopted.folder).items() if name in before}
    assert "damaged" not in caplog.text
    assert client.stats().faults.keys() <= {"io_error"}


def test_a_worker_that_finds_the_memory_gone_at_its_start_says_so(
    adopted: Harness, region: Path, stored: tuple[CheckedClient, Mailbox]
) -> None:
    client, mail = stored
    os.truncate(region, 4096)
    assert client.pid is not None
    os.kill(client.pid, 9)
    wait_until(lambda: "has 4096 bytes instead of" in client.state().why, "the cause is not named")
    os.truncate(region, SIZE_BYTES)
    wait_until(lambda: client.pid is not None, "no worker serves the store again")
    assert all(done.ok for done in mail.load(make_chain("a", 8)))
