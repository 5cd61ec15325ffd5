"""A store in a temporary folder that the real worker process serves, and blocks to store in it."""

import hashlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec.structs import replace

from tests.storage.key_tables import DEATH, FOLDER_ID, MASTER, ONE, STAMP, TWO
from tests.waiting import is_alive as is_alive
from tests.waiting import wait_until as wait_until
from tieredkv.errors import IntegrityError
from tieredkv.storage.client.client import StoreClient
from tieredkv.storage.format.record import Retentions, decode_record
from tieredkv.storage.keys.table import KeyTable
from tieredkv.storage.options import StoreOptions
from tieredkv.tier import Event, Lent, Loaded, LookupDone, Stored
from tieredkv.types import BlockRecord
from tieredkv.wire.arena import HostArena

PAGE_BYTES = 32 * 1024
NUM_PAGES = 64
RETENTIONS = Retentions(StoreOptions(path="").disk_retentions)
ROOT = b"R" * 32
NAMESPACE = b"N" * 32
DAY_S = 86_400.0

SomeEvent = TypeVar("SomeEvent", bound=Event)


def hash_of(chain: str, position: int) -> bytes:
    """Return the hash of a made-up block; position -1, the parent of the first, is the root."""
    return hashlib.sha256(f"{chain}/{position}".encode()).digest() if position >= 0 else ROOT


def payload_of(block_hash: bytes, size_bytes: int = PAGE_BYTES) -> bytes:
    """Return the one right payload of a block, which is made from its hash."""
    return hashlib.shake_128(block_hash).digest(size_bytes)


def make_record(
    chain: str,
    position: int,
    *,
    root: bytes = ROOT,
    retention: str = "24h",
    size_bytes: int = PAGE_BYTES,
) -> BlockRecord:
    """Return the record of a block that is computed now."""
    now = time.time()
    return BlockRecord(
        block_hash=hash_of(chain, position),
        parent_hash=hash_of(chain, position - 1) if position else root,
        root=root,
        namespace=NAMESPACE,
        position=position,
        size_bytes=size_bytes,
        retention=retention,
        computed_at=now,
        expires_at=now + DAY_S,
        last_used=now,
    )


def make_chain(name: str, length: int) -> list[BlockRecord]:
    """Return the records of a chain of blocks."""
    return [make_record(name, position) for position in range(length)]


class CheckedClient(StoreClient):
    """A client that can verify its invariants, and checks each page before it is lent.

    Attributes:
        lent: the block that was lent each page last.
    """

    def __init__(self, options: StoreOptions, arena: HostArena) -> None:
        self.lent = dict[int, bytes]()
        super().__init__(options, arena)

    def check(self) -> None:
        """Verify that loans lie in the arena, and that no job is open without a worker."""
        with self._lock:
            if any(not 0 <= page < self.arena.num_pages for page in self._loans):
                raise IntegrityError("a page on loan is not in the arena")
            if self._supervisor._worker is None and (self._loans or self._asked):
                raise IntegrityError("jobs are open though no worker process exists")

    @property
    def pending_pages(self) -> frozenset[int]:
        """The pages that are on loan to the worker."""
        with self._lock:
            return frozenset(self._loans)

    def load(self, pages: Sequence[Lent]) -> None:
        self._check_lendable(pages)
        super().load(pages)

    def store(self, pages: Sequence[Lent]) -> None:
        self._check_lendable(pages)
        super().store(pages)

    def block_of(self, ended: Loaded | Stored) -> bytes:
        """Return which block was lent the page of a loan that has ended."""
        return self.lent[ended.page_id]

    def _check_lendable(self, lent: Sequence[Lent]) -> None:
        self.lent |= {it.page_id: it.block_hash for it in lent}
        pages = [each.page_id for each in lent]
        if any(not 0 <= page < self.arena.num_pages for page in pages):
            raise IntegrityError(f"not all of the pages {pages} are in the arena")
        if any(each.size_bytes > self.arena.page_bytes for each in lent):
            raise IntegrityError("a block is larger than its page")
        if len(set(pages)) < len(pages) or not self.pending_pages.isdisjoint(pages):
            raise IntegrityError(f"of pages {pages} some are on loan already")


class Harness:
    """A folder, an arena and the clients that a test opens on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.offset_file = folder.parent / "clock-offset"
        self.arena = HostArena(NUM_PAGES, PAGE_BYTES)
        self._clients: list[CheckedClient] = []

    def options(self, **changes: object) -> StoreOptions:
        """Return options for a small store that reacts quickly, with some of them changed."""
        defaults: dict[str, object] = {
            "path": str(self.folder),
            "budget_bytes": 64 << 20,
            "sweep_interval_s": 0.2,
            "clock_offset_file": str(self.offset_file),
            "num_readers": 2,
            "num_writers": 2,
            "max_backoff_s": 0.1,
            "busy_patience_s": 0.3,
        }
        return StoreOptions(**(defaults | changes))  # type: ignore[arg-type]

    def open(self, **changes: object) -> CheckedClient:
        """Start a worker; return its client, which is closed after the test."""
        client = CheckedClient(self.options(**changes), self.arena)
        self._clients.append(client)
        return client

    def close(self) -> None:
        """Check and close all clients, including those whose worker is stopped by a signal."""
        for client in self._clients:
            if client.pid is not None:
                os.kill(client.pid, signal.SIGCONT)
            client.check()
            client.close()
            client.check()
            assert client.pending_pages == frozenset()
        self.arena.close()

    def set_clock(self, offset_s: float) -> None:
        """Set how many seconds the clock of the store's worker is ahead."""
        self.offset_file.write_text(f"{offset_s}\n")


class Mailbox:
    """The events of one client, kept until a test asks for them."""

    def __init__(self, client: CheckedClient) -> None:
        self.client = client
        self.events: list[Event] = []

    def take(self, kind: type[SomeEvent], count: int = 1) -> list[SomeEvent]:
        """Wait for the next `count` events of a kind, in order."""
        found: list[SomeEvent] = []

        def has_come() -> bool:
            self.events += self.client.poll()
            while len(found) < count:
                event = next((event for event in self.events if isinstance(event, kind)), None)
                if event is None:
                    return False
                self.events.remove(event)
                found.append(event)
            return True

        wait_until(has_come, f"{count} of {kind.__name__} do not come")
        return found

    def lookup(self, hashes: Sequence[bytes]) -> list[BlockRecord | None]:
        """Look blocks up, and wait for the answer: a record or None for each hash."""
        job = self.client.lookup(hashes)
        (done,) = self.take(LookupDone)
        assert done.job == job
        assert done.found.keys() <= set(hashes)
        names = self.client.names.hide(hashes)
        records = [done.found.get(each) for each in hashes]
        found = zip(names, records, strict=True)
        return [self._record(name, data) if data is not None else None for name, data in found]

    def _record(self, name: bytes, data: bytes) -> BlockRecord:
        """Return a record of the disk with hashes in the places of names."""
        record = decode_record(name, data, RETENTIONS).record
        block, parent = self.client.names.reveal([name, record.parent_hash])
        return replace(record, block_hash=block, parent_hash=parent)

    def store(
        self, records: Sequence[BlockRecord], payload: Callable[[bytes], bytes] = payload_of
    ) -> list[Stored]:
        """Store blocks from the first pages of the arena, and wait for the answers."""
        self.fill(records, payload)
        self.client.store(lent_pages(records))
        return self.take(Stored, len(records))

    def fill(
        self, records: Sequence[BlockRecord], payload: Callable[[bytes], bytes] = payload_of
    ) -> None:
        """Put the payloads of blocks into the first pages of the arena."""
        for page_id, record in enumerate(records):
            self.page(page_id)[: record.size_bytes] = payload(record.block_hash)[
                : record.size_bytes
            ]

    def load(self, records: Sequence[BlockRecord]) -> list[Loaded]:
        """Load blocks into the first pages of the arena, which are wiped first, and wait."""
        for page_id in range(len(records)):
            self.page(page_id)[:] = bytes(PAGE_BYTES)
        self.client.load(lent_pages(records))
        return self.take(Loaded, len(records))

    def page(self, page_id: int) -> memoryview:
        """Return the bytes of a page."""
        return self.client.arena.page(page_id)

    def assert_right(self, done: Loaded, size_bytes: int = PAGE_BYTES) -> None:
        """Assert that the page of a loaded block holds the block's right payload."""
        held = bytes(self.page(done.page_id)[:size_bytes])
        assert held == payload_of(self.client.block_of(done), size_bytes), (
            "a wrong block was served"
        )


def lent_pages(records: Sequence[BlockRecord], first_page: int = 0) -> list[Lent]:
    """Return each block with a page, counted from the first page."""
    return [Lent.of(record, page) for page, record in enumerate(records, first_page)]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    """A harness on a folder that is not a store yet."""
    harness = Harness(tmp_path / "store")
    yield harness
    harness.close()


@pytest.fixture(scope="module")
def ram_path() -> Iterator[Path]:
    """A folder in memory, if the machine has one, for tests that write very much."""
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tieredkv-test-", dir=where) as folder:
        yield Path(folder)


@pytest.fixture
def key_dir(tmp_path: Path) -> Path:
    """A folder of keys."""
    folder = tmp_path / "keys"
    folder.mkdir(0o700)
    return folder


@pytest.fixture
def table_path(key_dir: Path) -> str:
    """Where a key table is to be."""
    return str(key_dir / f"{FOLDER_ID.hex()}.keys")


@pytest.fixture
def table(table_path: str) -> Iterator[KeyTable]:
    """A key table with keys of two scopes, added one after the other."""
    table = KeyTable.create(
        table_path, FOLDER_ID, lambda: MASTER, STAMP, folder="/kv", master_place="/key"
    )
    table.add({ONE: DEATH})
    table.add({ONE: DEATH + 1, TWO: DEATH + 2})
    yield table
    table.close()
