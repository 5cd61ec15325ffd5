"""The front thread of the worker answers while the index thread is in the middle of a change."""

import errno
import os
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.fakes import FakeClock
from tests.golden import refused
from tests.storage.blocks import RETENTIONS, make_record, open_store, payload_of, put
from tests.waiting import HANG_S, wait_until
from tieredkv.clock import Clock
from tieredkv.errors import CorruptIndexError, StorageError, StoreUnreachableError
from tieredkv.operate.ask import StoreControl
from tieredkv.operate.calls import Df, EvictFilter, Ls
from tieredkv.storage.format.record import Located, decode_record
from tieredkv.storage.messages.engine import (
    CloseCall,
    Completions,
    DeleteCall,
    DeleteDone,
    EngineMessage,
    Launch,
    LoadCall,
    LookupAnswer,
    LookupCall,
    StoreCall,
    TouchCall,
    WorkerMessage,
    WorkerUp,
)
from tieredkv.storage.messages.operator import (
    AskEngine,
    Delete,
    Deleted,
    Done,
    EngineAnswer,
    Figures,
    Reply,
    Rows,
    Scan,
    StoreFigures,
)
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.stats import StoreStats
from tieredkv.storage.store import Store
from tieredkv.storage.worker import operators, pace, service, touches
from tieredkv.storage.worker import socket as control_socket
from tieredkv.storage.worker.service import StoreService
from tieredkv.storage.worker.socket import socket_address
from tieredkv.tier import ControlRequest, Lent, Loaded, Stored, TouchItem
from tieredkv.types import BlockRecord
from tieredkv.wire.arena import HostArena
from tieredkv.wire.channel import FrameChannel

NOW = Clock().now()
OLD, OLDER = (make_record("old", n, now=NOW, size_bytes=4096) for n in (0, 1))
NEW = make_record("new", 0, now=NOW, size_bytes=4096)


class Gate:
    """A failpoint that holds up the thread that reaches `label` until the gate is opened."""

    def __init__(self) -> None:
        self.label: str | None = None
        self.error: Exception | None = None
        self.failing: StorageError | None = None  # what every write raises
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, label: str) -> None:
        if self.failing is not None and label == "write:before":
            raise self.failing
        if label == self.label:
            self.label = None
            self.reached.set()
            assert self.opened.wait(HANG_S), "nobody was answered meanwhile"
            if self.error is not None:
                raise self.error


class Engine:
    """The engine's end of the channel."""

    def __init__(self, sock: socket.socket, gate: Gate, served: "Future[None]") -> None:
        self.gate = gate
        self.served = served
        self.channel = FrameChannel(sock, msgspec.msgpack.Decoder(WorkerMessage))
        self.pages: list[Loaded | Stored] = []
        self.lookups: list[LookupAnswer] = []
        self.deleted: list[int] = []
        self.stats: StoreStats | None = None
        self.asked = deque[ControlRequest]()

    def hold_up(self, label: str, message: EngineMessage) -> None:
        """Send a message and wait until the index thread is held up at a failpoint."""
        self.gate.label = label
        self.channel.send(message)
        assert self.gate.reached.wait(HANG_S), "the failpoint was never reached"

    def lookup(self, *hashes: bytes) -> dict[bytes, bytes]:
        self.channel.send(LookupCall(1, list(hashes)))
        while not self.lookups:
            self._receive()
        records = self.lookups.pop().records
        return {each: data for each, data in zip(hashes, records, strict=True) if data}

    def load(self, page: Lent) -> Loaded | Stored:
        self.channel.send(LoadCall([page]))
        return self.next_page()

    def next_page(self) -> Loaded | Stored:
        while not self.pages:
            self._receive()
        return self.pages.pop(0)

    def hears_stats(self) -> bool:
        self._receive()
        return self.stats is not None

    def _receive(self) -> None:
        assert not self.served.done(), self.served.exception()
        for message in self.channel.receive():
            if isinstance(message, LookupAnswer):
                self.lookups.append(message)
            elif isinstance(message, DeleteDone):
                self.deleted.append(message.job)
            elif isinstance(message, Completions):
                self.pages += message.pages
                self.stats = message.stats
            elif isinstance(message, ControlRequest):
                self.asked.append(message)


@pytest.fixture
def arena() -> Iterator[HostArena]:
    arena = HostArena(4, 4096)
    yield arena
    arena.close()


@contextmanager
def serving(
    path: Path, arena: HostArena | None, *, num_writers: int = 2, **options: Any
) -> Iterator[Engine]:
    """Serve a store with two blocks in this process; yield the engine's end of its channel.

    Without an arena, a command line has started this worker.
    """
    gate = Gate()
    clock = Clock()
    store: Store = open_store(path, clock, failpoint=gate, **options)
    put(store, OLD, OLDER)
    ours, theirs = socket.socketpair()
    channel = FrameChannel(theirs, msgspec.msgpack.Decoder(EngineMessage))
    limit = options.get("write_limit", 0)
    served = make_service(store, channel, arena, num_writers=num_writers, write_limit=limit)
    with ThreadPoolExecutor(1) as pool:
        engine = Engine(ours, gate, pool.submit(served.run))
        try:
            yield engine
        finally:
            gate.opened.set()
            engine.channel.send(CloseCall())
            engine.served.exception(HANG_S)
            engine.channel.close()
            channel.close()
    wait_until(store.thread.owns, "the index thread goes on")
    store.close()


def make_service(
    store: Store, channel: FrameChannel[EngineMessage], arena: HostArena | None, **options: Any
) -> StoreService:
    """Return the service of a store, with a short sweep interval; it does not run yet."""
    launch = Launch(
        stack_fd=-1,
        options=StoreOptions(
            path=str(store.parts.folder.path), num_readers=2, sweep_interval_s=0.05, **options
        ),
        arena=None,
        parent_pid=os.getppid(),
    )
    return StoreService(store, launch, channel, arena)


def test_the_engine_is_asked_nothing_before_it_knows_that_the_worker_is_up(
    tmp_path: Path, arena: HostArena
) -> None:
    """Otherwise it would answer to nobody, and the command would be told that it is silent."""
    sockets = socket.socketpair()
    ours = FrameChannel(sockets[0], msgspec.msgpack.Decoder(WorkerMessage))
    theirs = FrameChannel(sockets[1], msgspec.msgpack.Decoder(EngineMessage))
    with open_store(tmp_path / "store", Clock()) as store, ThreadPoolExecutor(2) as pool:
        served = make_service(store, theirs, arena)
        asking = pool.submit(StoreControl(tmp_path / "store").answer, Df())
        heard = ours.receive(0.1)
        running = pool.submit(served.run)
        while not any(isinstance(each, WorkerUp) for each in heard):
            heard += ours.receive(HANG_S)
        is_first = type(heard[0]) is WorkerUp
        while not any(isinstance(each, ControlRequest) for each in heard):
            heard += ours.receive(HANG_S)
        [request] = [each for each in heard if isinstance(each, ControlRequest)]
        ours.send(EngineAnswer(request.id, {"host": {"blocks": 7}}))
        assert asking.result(HANG_S)["host"] == {"blocks": 7}
        ours.send(CloseCall())
        running.result(HANG_S)
    for channel in (ours, theirs):
        channel.close()
    assert is_first


def test_a_disk_that_is_too_small_is_told_once_an_hour_and_with_the_figures(
    tmp_path: Path, arena: HostArena, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock(NOW - 3000)
    with open_store(tmp_path / "store", clock) as store:
        for i in range(300):
            put(store, make_record(f"{i}", now=clock.now()))
            clock.advance(10)
    with serving(tmp_path / "store", arena) as engine:
        for _ in range(3):  # figures come with each sweep, although nothing is stored
            engine.stats = None
            wait_until(engine.hears_stats, "figures")
    assert engine.stats is not None
    shortfall = engine.stats.lifetimes.shortfall
    assert "`24h` promises 1d, but at the present write rate of" in shortfall
    assert shortfall.endswith("would do, it is `4 MiB`")
    told = [each.message for each in caplog.records if "too small" in each.message]
    assert len(told) == 1
    assert told[0].startswith("the disk tier is too small: `24h` promises 1d")


@pytest.mark.parametrize("label", ["reserve:before", "write:before", "commit:before"])
def test_lookups_and_loads_are_answered_in_the_middle_of_a_store(
    tmp_path: Path, arena: HostArena, label: str
) -> None:
    with serving(tmp_path / "store", arena) as engine:
        arena.page(1)[:] = payload_of(NEW)
        engine.hold_up(label, StoreCall([Lent.of(NEW, 1)]))
        found = engine.lookup(OLD.block_hash, NEW.block_hash)
        records = {key: decode_record(key, each, RETENTIONS).record for key, each in found.items()}
        assert records == {OLD.block_hash: OLD}
        assert engine.load(Lent.of(OLD, 0)).ok
        assert arena.page(0) == payload_of(OLD)
        engine.gate.opened.set()
        stored = engine.next_page()
        assert isinstance(stored, Stored) and stored.ok
        assert stored.page_id == 1
        assert engine.lookup(NEW.block_hash)


def test_a_store_tells_when_it_was_written_and_whether_something_held_it_back(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "store", arena) as engine:

        def store(record: BlockRecord) -> Stored:
            arena.page(1)[:] = payload_of(record)
            engine.channel.send(StoreCall([Lent.of(record, 1)]))
            stored = engine.next_page()
            assert isinstance(stored, Stored) and stored.ok
            return stored

        began_at = time.monotonic()
        alone = store(NEW)
        assert began_at < alone.ended_at <= time.monotonic() and not alone.is_held_back
        again = store(NEW)
        assert again.ended_at == 0.0, "the store has it, and wrote nothing"
        monkeypatch.setattr(pace, "QUIET_S", 0.2)
        assert engine.load(Lent.of(OLD, 0)).ok
        beside = store(make_record("new", 1, now=NOW, size_bytes=4096))
        assert beside.ended_at > alone.ended_at and beside.is_held_back


def test_stores_give_way_to_reads_that_begin_meanwhile(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "store", arena, num_writers=1) as engine:
        monkeypatch.setattr(pace, "QUIET_S", 0.3)
        records = [make_record("new", n, now=NOW, size_bytes=4096) for n in range(3)]
        for page_id, record in enumerate(records, 1):
            arena.page(page_id)[:] = payload_of(record)
        pages = [Lent.of(record, page_id) for page_id, record in enumerate(records, 1)]
        engine.hold_up("write:before", StoreCall(pages))  # the thread has all of them
        assert engine.load(Lent.of(OLD, 0)).ok
        loaded_at = time.monotonic()
        engine.gate.opened.set()
        stored = [engine.next_page() for _ in records]
        assert all(isinstance(each, Stored) and each.ok for each in stored)
        ended = [each.ended_at - loaded_at for each in stored if isinstance(each, Stored)]
        assert min(ended) > 0.2, "no piece of any was written at once"
        assert all(engine.lookup(each.block_hash) for each in records)


def test_a_store_that_the_write_limit_held_back_says_so(tmp_path: Path, arena: HostArena) -> None:
    with serving(tmp_path / "store", arena, write_limit=1 << 12) as engine:
        records = [make_record("new", n, now=NOW, size_bytes=4096) for n in range(3)]
        pages = [Lent.of(each, n) for n, each in enumerate(records)]
        for page_id, record in enumerate(records):
            arena.page(page_id)[:] = payload_of(record)
        engine.channel.send(StoreCall(pages[:1]))
        first = engine.next_page()
        engine.channel.send(StoreCall(pages[1:]))  # either of them empties the bucket
        stored = first, engine.next_page(), engine.next_page()
        assert all(isinstance(each, Stored) and each.ok for each in stored)
        assert isinstance(first, Stored) and not first.is_held_back, "the bucket was full"
        last = stored[-1]
        assert isinstance(last, Stored) and last.is_held_back


def test_a_store_closes_without_waiting_for_a_timer(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "store", arena) as engine:
        assert engine.lookup(OLD.block_hash)
        monkeypatch.setattr(service, "_TICK_S", 2 * HANG_S)  # a wait for it counts as a hang
        arena.page(1)[:] = payload_of(NEW)
        engine.channel.send(StoreCall([Lent.of(NEW, 1)]))
        stored = engine.next_page()
        assert isinstance(stored, Stored) and stored.ok
    assert engine.served.done()


def test_stores_that_the_write_limit_holds_back_are_written_when_the_store_closes(
    tmp_path: Path, arena: HostArena
) -> None:
    with serving(tmp_path / "store", arena, write_limit=1) as engine:
        records = [make_record("new", n, now=NOW, size_bytes=4096) for n in range(3)]
        for page_id, record in enumerate(records):
            arena.page(page_id)[:] = payload_of(record)
        engine.channel.send(StoreCall([Lent.of(each, n) for n, each in enumerate(records)]))
        assert engine.next_page().ok, "the first write is within any limit"
        engine.channel.send(CloseCall())
        engine.served.result(HANG_S)
        ended = [each for each in engine.channel.receive() if isinstance(each, Completions)]
        assert [page.ok for each in ended for page in each.pages] == [True, True]


@pytest.mark.parametrize("label", ["delete:before", "delete:done", "erase:before", "erase:done"])
def test_what_is_deleted_is_a_miss_at_once_and_the_rest_is_served(
    tmp_path: Path, arena: HostArena, label: str
) -> None:
    with serving(tmp_path / "store", arena) as engine:
        engine.hold_up(label, DeleteCall(1, [OLD.block_hash], "test"))
        assert engine.lookup(OLD.block_hash, OLDER.block_hash).keys() == {OLDER.block_hash}
        assert engine.load(Lent.of(OLD, 0)).reason == "missing"
        assert engine.load(Lent.of(OLDER, 0)).ok
        engine.gate.opened.set()


def test_a_block_stored_after_its_deletion_is_found_again(tmp_path: Path, arena: HostArena) -> None:
    with serving(tmp_path / "store", arena) as engine:
        arena.page(1)[:] = payload_of(OLD)
        engine.hold_up("delete:before", DeleteCall(1, [OLD.block_hash] * 2, "test"))
        engine.channel.send(StoreCall([Lent.of(OLD, 1)]))
        engine.channel.send(DeleteCall(1, [OLD.block_hash], "test"))
        engine.channel.send(StoreCall([Lent.of(OLD, 1)]))
        assert engine.lookup(OLD.block_hash) == {}
        engine.gate.opened.set()
        assert [engine.next_page().ok, engine.next_page().ok] == [True, True]
        assert engine.lookup(OLD.block_hash)


def test_a_deletion_that_the_disk_does_not_take_stays_a_miss_and_is_tried_again(
    tmp_path: Path, arena: HostArena
) -> None:
    with serving(tmp_path / "store", arena) as engine:
        engine.gate.error = StorageError(5, "made up")
        engine.hold_up("delete:before", DeleteCall(7, [OLD.block_hash], "test"))
        assert engine.lookup(OLD.block_hash) == {}
        assert engine.deleted == []
        engine.gate.opened.set()
        for _ in range(20):
            assert engine.lookup(OLD.block_hash) == {}
        engine.gate.error = None
        while not engine.deleted:
            assert engine.lookup(OLD.block_hash) == {}
        assert engine.deleted == [7]
        assert engine.lookup(OLD.block_hash, OLDER.block_hash).keys() == {OLDER.block_hash}


def test_a_cured_fault_is_told_no_longer_although_nothing_is_stored(
    tmp_path: Path, arena: HostArena, caplog: pytest.LogCaptureFixture
) -> None:
    """The sweep writes a trial block. `df` tells the same as the reports to the engine."""
    caplog.set_level("INFO")
    with serving(tmp_path / "store", arena) as engine, ThreadPoolExecutor(1) as pool:

        def told() -> str:
            engine.stats = None
            wait_until(engine.hears_stats, "figures")
            assert engine.stats is not None
            return engine.stats.store_error

        engine.gate.failing = StorageError(errno.EROFS, "Read-only file system")
        engine.channel.send(StoreCall([Lent.of(NEW, 1)]))
        assert engine.next_page().reason == "io_error"
        asking = pool.submit(StoreControl(tmp_path / "store").answer, Df())
        while not engine.asked:
            engine.hears_stats()
        dropped = {"num_lookups_dropped": 3, "num_touches_dropped": 5}
        job = engine.asked.popleft().id
        engine.channel.send(EngineAnswer(job, {"disk": {**dropped, "blocks": 77}}))
        disk = asking.result(HANG_S)["disk"]
        assert "Read-only file system" in told()
        for _ in range(4):
            assert "Read-only file system" in told(), "the fault is still there"
        engine.gate.failing = None
        wait_until(lambda: not told(), "the fault was cured")
        engine.channel.send(StoreCall([Lent.of(NEW, 1)]))
        assert engine.next_page().ok
    assert "Read-only file system" in disk["store_error"]
    assert disk | dropped | {"blocks": 2} == disk
    assert [each.levelname for each in caplog.records if each.message.startswith("store: ")] == [
        "WARNING",
        "INFO",
    ]
    with open_store(tmp_path / "store", Clock()) as store:
        assert store.stats().blocks == 3
        store.check()


def test_touches_that_wait_for_the_disk_are_bounded(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(touches, "_MAX_TOUCHES", 3)
    some = [TouchItem(block_hash=bytes([n]) * 32, last_used=1.0) for n in range(5)]
    with serving(tmp_path / "store", arena) as engine:
        engine.hold_up("delete:before", DeleteCall(1, [NEW.block_hash], "test"))
        engine.channel.send(TouchCall(some))
        engine.channel.send(TouchCall(some[:3]))
        assert engine.load(Lent.of(OLD, 0)).ok
        assert engine.stats is not None
        assert engine.stats.num_touches_dropped == 2
        engine.gate.opened.set()


def test_a_damaged_index_ends_the_front_thread_too(tmp_path: Path, arena: HostArena) -> None:
    with serving(tmp_path / "store", arena) as engine:
        engine.gate.error = CorruptIndexError("the index is damaged")
        engine.hold_up("commit:before", StoreCall([Lent.of(NEW, 1)]))
        engine.gate.opened.set()
        error = engine.served.exception(HANG_S)
        assert isinstance(error, CorruptIndexError)


def test_a_deletion_that_takes_longer_than_anybody_waits_for_a_word_says_that_it_goes_on(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, delete = tmp_path / "store", Store.drop

    def delete_slowly(store: Store, hashes: Sequence[bytes], reason: str) -> list[Located]:
        time.sleep(1.5)
        return delete(store, hashes, reason)

    monkeypatch.setattr(Store, "drop", delete_slowly)
    monkeypatch.setattr(operators, "_ENGINE_TIMEOUT_S", 0.1)
    with serving(path, arena) as engine:
        control = StoreControl(path, answer_timeout_s=1.0)
        with refused(StoreUnreachableError):  # of the engine, which is silent
            control.answer(EvictFilter(older_than_s=0.0))
        assert not engine.lookup(OLD.block_hash)


def test_a_command_line_that_is_stopped_holds_no_stopped_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tieredkv.storage.worker.socket._SILENCE_S", 0.1)
    with serving(tmp_path / "store", None) as worker:
        assert isinstance(worker.served.exception(HANG_S), EOFError)


def test_an_engine_that_has_ended_is_asked_nothing_by_a_worker_that_still_writes(
    tmp_path: Path, arena: HostArena
) -> None:
    with serving(path := tmp_path / "store", arena) as engine:
        engine.hold_up("write:before", StoreCall([Lent.of(NEW, 1)]))
        engine.channel.send(CloseCall())
        engine.lookup(OLD.block_hash)  # it has heard of both
        with asking(path) as channel:
            channel.send(AskEngine(call=b""))
            with pytest.raises(EOFError):
                channel.receive(HANG_S)
        engine.gate.opened.set()
        assert engine.next_page().ok
        assert not engine.asked


@contextmanager
def asking(path: Path) -> Iterator[FrameChannel[Reply]]:
    """Connect to a worker as a verb does."""
    folder_fd = os.open(path, os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(socket_address(folder_fd))
            channel = FrameChannel(sock, msgspec.msgpack.Decoder(Reply))
            yield channel
            channel.close()
    finally:
        os.close(folder_fd)


def test_a_list_of_many_frames_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_ROWS_A_STEP", 8)
    with open_store(path := tmp_path / "store", Clock()) as store:
        put(store, *(make_record(f"many {i}", 0, now=NOW, size_bytes=1) for i in range(100)))
    with serving(path, None):
        with asking(path) as channel:
            channel.send(Scan())
            frames = list[Reply]()
            while not any(isinstance(it, Done) for it in frames):
                frames += channel.receive(HANG_S)
        assert sum(isinstance(it, Rows) for it in frames) > 2
        chains = [it.id for page in StoreControl(path).pages(Ls()) for it in page]
    assert len({*chains}) == len(chains) == 101


def test_clients_that_hang_or_talk_nonsense_hold_nothing_up(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "_SILENCE_S", 0.5)
    with serving(path := tmp_path / "store", arena) as engine, ExitStack() as hung:
        for garbage in (
            b"",
            b"\x10",
            struct.pack("<I", 1000) + b"half a frame",
            struct.pack("<I", 0xFFFFFFFF),
            b"GET / HTTP/1.1\r\n\r\n",
            struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
            os.urandom(100_000),
            *[b""] * 60,
        ):
            client = hung.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(str(path / "sock"))
            client.setblocking(False)
            with suppress(OSError):
                client.send(garbage)
        with asking(path) as channel:
            channel.send(Figures())
            while not (
                told := [it for it in channel.receive(HANG_S) if isinstance(it, StoreFigures)]
            ):
                pass
        assert told[0].stats.blocks == 2
        assert engine.load(Lent.of(OLD, 0)).ok


def test_what_is_not_written_yet_goes_with_everything_at_once(
    tmp_path: Path, arena: HostArena
) -> None:
    with serving(path := tmp_path / "store", arena, write_limit=1) as engine:
        records = [replace(NEW, block_hash=bytes([number]) * 32) for number in range(4)]
        engine.channel.send(StoreCall([Lent.of(each, page) for page, each in enumerate(records)]))
        assert engine.next_page().ok, "a full bucket lets the first one through"
        with asking(path) as channel:
            channel.send(Delete())
            while not (told := [it for it in channel.receive(HANG_S) if isinstance(it, Deleted)]):
                pass
        assert [it.num_blocks for it in told] == [3]
        assert [engine.next_page().reason for _ in range(3)] == ["evicted"] * 3
        assert engine.lookup(*(each.block_hash for each in records)) == {}


def test_a_client_that_goes_ends_its_eviction(
    tmp_path: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, steps = tmp_path / "store", Counter[str]()

    def endless(*_: object, **__: object) -> Iterator[None]:
        while True:
            steps["taken"] += 1
            time.sleep(0.01)
            yield

    monkeypatch.setattr(operators, "deleting", endless)
    with serving(path, arena) as engine:
        with asking(path) as channel:
            channel.send(Delete(unused_since=0.0))
            assert channel.receive(HANG_S)
        deadline, before = time.monotonic() + HANG_S, -1
        while steps["taken"] != before:
            assert time.monotonic() < deadline, "it goes on for nobody"
            before = steps["taken"]
            time.sleep(0.5)
        assert engine.lookup(OLD.block_hash)
