import contextlib
import gc
import os
import re
import resource
import signal
import stat
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.golden import refused
from tests.storage.conftest import (
    DAY_S,
    NUM_PAGES,
    PAGE_BYTES,
    CheckedClient,
    Harness,
    Mailbox,
    hash_of,
    is_alive,
    lent_pages,
    make_chain,
    make_record,
    payload_of,
    wait_until,
)
from tests.waiting import HANG_S
from tieredkv.errors import FormatVersionError, IntegrityError, StorageError, StoreBusyError
from tieredkv.storage.client.client import StoreClient
from tieredkv.storage.folder.lock import has_engine, hold_for_engine
from tieredkv.tier import BlockLife, Event, Lent, Loaded, LookupDone, Restarted, Stored, TouchItem
from tieredkv.wire.arena import HostArena
from tieredkv.wire.channel import MAX_QUEUED_BYTES


def raw_bytes(folder: Path) -> bytes:
    """Return the content of all files of a store; one that is deleted meanwhile has none."""
    contents = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with contextlib.suppress(FileNotFoundError):
            contents.append(path.read_bytes())
    return b"".join(contents)


def test_blocks_come_back_bit_for_bit_and_lookups_tell_which(harness: Harness) -> None:
    mail = Mailbox(harness.open())
    chain = make_chain("a", NUM_PAGES)
    assert all(done.ok for done in mail.store(chain))
    records = mail.lookup([*(record.block_hash for record in chain), hash_of("b", 0)])
    assert [record and record.block_hash for record in records] == [
        *(record.block_hash for record in chain),
        None,
    ]
    loaded = mail.load(chain)
    assert {done.page_id for done in loaded} == set(range(NUM_PAGES))
    for done in loaded:
        assert done.ok, done.reason
        assert done.life in [*map(BlockLife.of, chain)]
        mail.assert_right(done)
    assert mail.client.pending_pages == frozenset()
    assert mail.client.stats().blocks == NUM_PAGES


def test_blocks_survive_a_close_and_the_next_start_serves_them(harness: Harness) -> None:
    chain = make_chain("a", 8)
    first = harness.open()
    Mailbox(first).store(chain)
    pid = first.pid
    first.close()
    first.close()
    assert pid is not None and not is_alive(pid)
    mail = Mailbox(harness.open())
    for done in mail.load(chain):
        assert done.ok, done.reason
        mail.assert_right(done)


def test_a_size_that_is_no_multiple_of_4_kib_round_trips(harness: Harness) -> None:
    mail = Mailbox(harness.open())
    record = make_record("odd", 0, size_bytes=5_000)
    assert mail.store([record])[0].ok
    (done,) = mail.load([record])
    assert done.ok, done.reason
    mail.assert_right(done, 5_000)


def test_a_block_that_contradicts_what_is_wanted_is_a_miss(harness: Harness) -> None:
    mail = Mailbox(harness.open())
    record = make_record("a", 3)
    changes: list[dict[str, Any]] = [
        *({name: b"x" * 32} for name in ("parent_hash", "root", "namespace")),
        *({name: 4} for name in ("position", "part", "num_parts", "kind", "page_form")),
        {"size_bytes": 4096},
    ]
    for change in changes:
        mail.store([record])
        mail.client.load(lent_pages([msgspec.structs.replace(record, **change)]))
        (done,) = mail.take(Loaded)
        assert (done.ok, done.reason) == (False, "identity")
        assert mail.lookup([record.block_hash]) == [None]
    assert mail.client.stats().faults == {"identity": len(changes)}


def test_a_load_expects_only_what_the_engine_knows_of_the_chain(harness: Harness) -> None:
    mail = Mailbox(harness.open())
    record = make_record("a", 3)
    mail.store([record])
    lent = replace(Lent.of(record, 0), parent_hash=None, position=None, life=None)
    mail.client.load([lent])
    (done,) = mail.take(Loaded)
    assert done.ok and done.life == BlockLife.of(record)
    mail.client.load([replace(lent, root=b"x" * 32)])
    (done,) = mail.take(Loaded)
    assert (done.ok, done.reason) == (False, "identity")


def test_a_block_nobody_stored_is_missing(harness: Harness) -> None:
    mail = Mailbox(harness.open())
    (done,) = mail.load([make_record("a", 0)])
    assert (done.ok, done.reason, done.life) == (False, "missing", None)


def test_a_flipped_byte_is_a_counted_miss_and_the_block_is_gone(harness: Harness) -> None:
    client = harness.open()
    chain = make_chain("a", 2)
    Mailbox(client).store(chain)
    client.close()
    wanted = payload_of(chain[0].block_hash)
    for path in harness.folder.rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(wanted)) >= 0:
            with path.open("r+b") as file:
                file.seek(at + 777)
                file.write(bytes([wanted[777] ^ 1]))
    mail = Mailbox(harness.open())
    first, second = sorted(mail.load(chain), key=lambda done: done.page_id)
    assert not first.ok and first.reason
    assert second.ok
    assert [record is None for record in mail.lookup([r.block_hash for r in chain])] == [
        True,
        False,
    ]


def test_an_in_memory_block_never_reaches_the_disk(harness: Harness) -> None:
    client = harness.open()
    mail = Mailbox(client)
    record = make_record("secret", 0, retention="in_memory")
    (done,) = mail.store([record])
    assert (done.ok, done.reason) == (False, "retention")
    assert mail.lookup([record.block_hash]) == [None]
    client.close()
    held = raw_bytes(harness.folder)
    assert payload_of(record.block_hash)[:64] not in held
    assert record.block_hash not in held


def test_an_expired_block_is_not_served_and_its_bytes_are_erased(harness: Harness) -> None:
    mail = Mailbox(harness.open())
    record = make_record("a", 0)
    mail.store([record])
    start = payload_of(record.block_hash)[:64]
    assert start in raw_bytes(harness.folder)
    harness.set_clock(DAY_S + 1)
    time.sleep(0.05)
    assert mail.lookup([record.block_hash]) == [None]
    assert not mail.load([record])[0].ok
    wait_until(lambda: start not in raw_bytes(harness.folder), "it is not erased")


def test_touches_survive_a_restart(harness: Harness) -> None:
    client = harness.open()
    record = make_record("a", 0)
    Mailbox(client).store([record])
    later = record.last_used + 0.5
    client.touch([TouchItem(block_hash=record.block_hash, last_used=later)])
    client.close()
    (found,) = Mailbox(harness.open()).lookup([record.block_hash])
    assert found is not None and found.last_used == pytest.approx(later, abs=1e-3)


def test_a_block_deleted_while_it_is_being_written_stays_deleted(harness: Harness) -> None:
    client = harness.open()
    mail = Mailbox(client)
    chain = make_chain("a", NUM_PAGES)
    mail.fill(chain)
    client.store(lent_pages(chain))
    client.delete([record.block_hash for record in chain], "test")
    mail.take(Stored, NUM_PAGES)
    assert mail.lookup([record.block_hash for record in chain]) == [None] * NUM_PAGES


def test_two_stores_of_one_block_are_both_answered(harness: Harness) -> None:
    client = harness.open()
    mail = Mailbox(client)
    record = make_record("a", 0)
    payload = payload_of(record.block_hash)
    harness.arena.page(0)[:] = harness.arena.page(1)[:] = payload
    items = lent_pages([record, record])
    client.store(items)
    assert [done.ok for done in mail.take(Stored, 2)] == [True, True]
    assert client.stats().blocks == 1


def test_a_block_that_is_there_is_not_written_again_but_its_claim_counts(harness: Harness) -> None:
    client = harness.open()
    mail = Mailbox(client)
    record = make_record("a", 0)
    mail.store([record])
    written = client.stats().bytes_written
    longer = msgspec.structs.replace(record, expires_at=record.expires_at + 50)
    assert mail.store([longer], payload=lambda _: os.urandom(PAGE_BYTES))[0].ok
    assert client.stats().bytes_written == written
    (found,) = mail.lookup([record.block_hash])
    assert found is not None and found.expires_at == pytest.approx(longer.expires_at)
    (done,) = mail.load([record])
    mail.assert_right(done)


def test_pages_stay_on_loan_to_a_stopped_worker_until_it_goes_on(harness: Harness) -> None:
    client = harness.open()
    mail = Mailbox(client)
    chain = make_chain("a", NUM_PAGES)
    mail.store(chain)
    assert client.pid is not None
    for page in range(NUM_PAGES):
        harness.arena.page(page)[:] = bytes(PAGE_BYTES)
    client.load(lent_pages(chain)[:32])
    mail.take(Loaded)  # the worker is in the middle of these loads
    os.kill(client.pid, signal.SIGSTOP)
    client.load(lent_pages(chain)[32:])
    time.sleep(0.3)
    news = mail.events + client.poll()
    arrived = {event.page_id for event in news if isinstance(event, Loaded)}
    mail.events.clear()
    assert client.pending_pages >= frozenset(range(32, NUM_PAGES))
    assert not client.pending_pages & arrived
    with refused(IntegrityError):
        client.load(lent_pages(chain)[40:41])
    client.check()
    still_out = len(client.pending_pages)
    assert client.poll() == []
    os.kill(client.pid, signal.SIGCONT)
    done = mail.take(Loaded, still_out)
    assert client.pending_pages == frozenset()
    assert all(event.ok for event in done)
    for page, record in enumerate(chain):
        assert bytes(harness.arena.page(page)) == payload_of(record.block_hash)


def test_the_engine_never_waits_for_a_stopped_worker(harness: Harness) -> None:
    client = harness.open()
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    hashes = [hash_of("a", position) for position in range(8192)]
    jobs = [client.lookup(hashes) for _ in range(20)]  # far more than a socket buffers
    assert client.poll() == []
    os.kill(client.pid, signal.SIGCONT)
    done = Mailbox(client).take(LookupDone, 20)
    assert [event.job for event in done] == jobs


def test_killing_a_stopped_worker_ends_its_loans_and_a_new_one_serves(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    client = harness.open()
    mail = Mailbox(client)
    chain = make_chain("a", 8)
    mail.store(chain)
    pid = client.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    lookup = client.lookup([chain[0].block_hash])
    client.load(lent_pages(chain))
    os.kill(pid, signal.SIGKILL)
    lost = mail.take(Loaded, 8)
    assert {(done.ok, done.reason) for done in lost} == {(False, "worker_died")}
    assert mail.take(LookupDone) == [LookupDone(lookup, {})]
    assert not is_alive(pid)
    mail.take(Restarted)
    assert "killed by SIGKILL" in caplog.text
    assert client.pid not in (None, pid)
    assert all(done.ok for done in mail.load(chain))


def stuff(client: CheckedClient) -> int:
    """Stop the worker and look up until a lookup is dropped; return the number of lookups."""
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    hashes = [hash_of("none", position) for position in range(8192)]
    num_lookups = 0
    while not client.stats().num_lookups_dropped:
        client.lookup(hashes)
        num_lookups += 1
        assert num_lookups * len(hashes) * 32 < 8 * MAX_QUEUED_BYTES, "the queue has no end"
    return num_lookups


def test_what_a_stopped_worker_is_sent_is_bounded_and_counted(harness: Harness) -> None:
    client = harness.open()
    num_lookups = stuff(client)
    (missed,) = (event for event in client.poll() if isinstance(event, LookupDone))
    assert missed.found == {}
    touches = [TouchItem(block_hash=hash_of("a", n), last_used=time.time()) for n in range(100)]
    client.touch(touches)
    assert client.stats().num_touches_dropped == 100
    assert client.pid is not None
    os.kill(client.pid, signal.SIGCONT)
    Mailbox(client).take(LookupDone, num_lookups - 1)
    client.touch(touches)
    assert client.stats().num_touches_dropped == 100
    assert client.stats().num_lookups_dropped == 1


def test_a_worker_that_takes_no_deletions_is_killed_and_the_next_one_carries_them_out(
    harness: Harness,
) -> None:
    client = harness.open()
    mail = Mailbox(client)
    chain = make_chain("a", 8)
    mail.store(chain)
    pid = client.pid
    stuff(client)
    client.delete([chain[0].block_hash], "test")
    client.delete([chain[1].block_hash], "test")
    assert pid is not None
    wait_until(lambda: not is_alive(pid))
    mail.take(Restarted)
    mail.events.clear()
    client.poll()
    found = mail.lookup([record.block_hash for record in chain])
    assert [record is None for record in found] == [True, True] + [False] * 6


def test_a_worker_whose_master_key_is_gone_is_down_until_it_is_back(
    harness: Harness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mail = Mailbox(harness.open(encryption="on", key_dir=str(tmp_path / "keys")))
    record = make_record("a", 0)
    assert mail.store([record])[0].ok
    [key] = (tmp_path / "keys").glob("*.master")
    key.rename(tmp_path / "moved")
    assert mail.client.pid is not None
    os.kill(mail.client.pid, signal.SIGKILL)
    said = rf"is down and is started again in .* s: the master key `{key}` is missing\nhint: "
    wait_until(lambda: re.search(said, caplog.text) is not None, "the lost key is not told")
    (tmp_path / "moved").rename(key)
    wait_until(lambda: mail.lookup([record.block_hash]) == [record], "the block does not come back")


@pytest.mark.parametrize("is_down", [True, False], ids=["worker is down", "worker dies of it"])
def test_no_deletion_is_lost_with_a_worker(harness: Harness, is_down: bool) -> None:
    client = harness.open(backoff_s=1.0, max_backoff_s=1.0)
    mail = Mailbox(client)
    chain = make_chain("a", 4)
    mail.store(chain)
    assert client.pid is not None
    pid = client.pid
    os.kill(pid, signal.SIGSTOP)
    if is_down:
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: client.pid is None)
    client.delete([chain[0].block_hash], "test")
    if not is_down:
        os.kill(pid, signal.SIGKILL)
    mail.take(Restarted)
    found = mail.lookup([record.block_hash for record in chain])
    assert [record is None for record in found] == [True, False, False, False]
    mail.store(chain[:1])
    os.kill(client.pid or 0, signal.SIGKILL)
    mail.take(Restarted)
    assert all(mail.lookup([record.block_hash for record in chain])), "it was deleted once"


def test_jobs_given_while_no_worker_is_up_are_answered_at_once(harness: Harness) -> None:
    client = harness.open(backoff_s=60.0, max_backoff_s=60.0)
    mail = Mailbox(client)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    wait_until(lambda: client.pid is None)
    chain = make_chain("a", 2)
    client.load(lent_pages(chain))
    client.store(lent_pages(chain))
    client.lookup([b"x" * 32] * 3)
    assert client.pending_pages == frozenset()
    assert {event.reason for event in mail.take(Loaded, 2)} == {"worker_down"}
    assert {event.reason for event in mail.take(Stored, 2)} == {"worker_down"}
    assert mail.take(LookupDone)[0].found == {}


def test_the_worker_outlives_ctrl_c_and_sigterm(harness: Harness) -> None:
    client = harness.open()
    assert client.pid is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(client.pid, number)
    assert Mailbox(client).store([make_record("a", 0)])[0].ok


def test_a_second_writer_is_refused_and_told_the_pid(harness: Harness) -> None:
    client = harness.open()
    with pytest.raises(StoreBusyError, match=str(client.pid)):
        harness.open()
    assert Mailbox(client).store([make_record("a", 0)])[0].ok


def test_a_start_waits_for_a_writer_that_is_just_going(harness: Harness) -> None:
    first = harness.open()
    timer = threading.Timer(0.7, first.close)
    timer.start()
    second = harness.open(busy_patience_s=20.0)
    timer.join()
    assert Mailbox(second).store([make_record("a", 0)])[0].ok


def test_a_worker_that_finds_another_writer_comes_back_when_that_one_goes(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    ours = harness.open(backoff_s=0.5, max_backoff_s=0.5)
    mail = Mailbox(ours)
    assert ours.pid is not None
    os.kill(ours.pid, signal.SIGKILL)
    wait_until(lambda: ours.pid is None)
    other = harness.open()
    wait_until(lambda: "in use" in caplog.text)
    other.close()
    mail.take(Restarted)
    assert mail.store([make_record("a", 0)])[0].ok


def test_a_folder_is_held_for_the_engine_all_the_time(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_held = list[bool]()
    client = harness.open()
    folder_fd = os.open(harness.folder, os.O_PATH)

    def hold(path: str) -> int:
        is_held.append(has_engine(folder_fd))
        return hold_for_engine(path)

    monkeypatch.setattr("tieredkv.storage.client.supervisor.hold_for_engine", hold)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    Mailbox(client).take(Restarted)
    client.close()
    assert (is_held, has_engine(folder_fd)) == ([True], False)
    os.close(folder_fd)


def test_a_change_of_folder_does_not_change_the_store(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(harness.folder.parent)
    client = harness.open(path="store")
    mail = Mailbox(client)
    mail.store([make_record("a", 0)])
    monkeypatch.chdir("/")
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    mail.take(Restarted)
    assert mail.lookup([hash_of("a", 0)]) != [None]


def test_clients_leave_no_descriptors_threads_or_processes(harness: Harness) -> None:
    harness.open().close()
    gc.collect()  # what earlier tests left
    descriptors, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    pids = []
    for _ in range(5):
        client = harness.open()
        pids.append(client.pid)
        client.close()
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    assert threading.active_count() <= threads
    assert not any(pid is None or is_alive(pid) for pid in pids)


def test_loads_that_race_with_eviction_are_right_or_missing_and_no_fault(harness: Harness) -> None:
    client = harness.open(budget_bytes=6 << 20)
    mail = Mailbox(client)
    num_ok = num_missing = 0
    for round_ in range(40):
        fresh = make_chain(f"round {round_}", 16)
        older = [
            record for back in (1, 2, 7) for record in make_chain(f"round {round_ - back}", 16)
        ]
        mail.fill(fresh)
        client.store(lent_pages(fresh))
        client.load(lent_pages(older, first_page=16))
        for done in mail.take(Loaded, len(older)):
            assert done.ok or done.reason == "missing", done.reason
            num_ok, num_missing = num_ok + done.ok, num_missing + (not done.ok)
            if done.ok:
                mail.assert_right(done)
        assert all(done.ok for done in mail.take(Stored, len(fresh)))
    assert client.stats().faults == {}
    assert client.stats().num_evicted > 0
    assert num_ok and num_missing


def test_a_folder_that_cannot_be_a_store_is_refused_with_its_path(tmp_path: Path) -> None:
    harness = Harness(tmp_path / "file" / "store")
    (tmp_path / "file").write_text("")
    with refused(StorageError):
        harness.open()
    with refused(StorageError):
        StoreClient(harness.options(path=str(tmp_path / "none"), create=False), harness.arena)
    harness.close()


def test_a_store_of_another_version_or_open_to_others_is_refused_untouched(
    harness: Harness,
) -> None:
    harness.open().close()
    marker = harness.folder / "format.json"
    text = marker.read_text()
    marker.write_text('{"format": "tieredkv-store", "version": 99}')
    with refused(FormatVersionError):
        harness.open()
    assert marker.read_text() == '{"format": "tieredkv-store", "version": 99}'
    marker.write_text(text)
    harness.folder.chmod(0o777)
    with refused(StorageError):
        harness.open()
    harness.folder.chmod(0o700)
    harness.open().close()


def test_after_a_kill_the_state_tells_what_keeps_the_next_worker_from_serving(
    harness: Harness,
) -> None:
    client = harness.open(backoff_s=60.0, max_backoff_s=60.0)
    Mailbox(client).store(make_chain("a", 4))
    room_bytes = client.stats().bytes_budget - client.stats().bytes_files
    assert client.state() == (True, "", room_bytes, client.pid)
    harness.folder.chmod(0o777)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    wait_until(lambda: bool(client.state().why))
    harness.folder.chmod(0o700)
    assert (client.state().is_open, client.state().pid) == (False, None)
    assert client.state().why.startswith(f"`{harness.folder}` is writable by others")
    assert "SIGKILL" in client.state().why


def test_more_blocks_than_the_budget_holds_stay_within_it(harness: Harness) -> None:
    client = harness.open(budget_bytes=2 << 20)
    mail = Mailbox(client)
    chain = make_chain("a", NUM_PAGES)
    done = mail.store(chain)
    assert {event.reason for event in done if not event.ok} <= {"full"}
    assert client.stats().bytes_files <= 2 << 20
    assert mail.lookup([b"x" * 32]) == [None]


def test_closing_finishes_the_stores_in_hand(harness: Harness) -> None:
    client = harness.open()
    chain = make_chain("a", NUM_PAGES)
    mail = Mailbox(client)
    mail.fill(chain)
    client.store(lent_pages(chain))
    client.close()
    assert all(done.ok for done in mail.take(Stored, NUM_PAGES))
    assert all(done.ok for done in Mailbox(harness.open()).load(chain))


def test_wake_is_called_for_news(harness: Harness) -> None:
    woken = threading.Event()
    client = StoreClient(harness.options(), harness.arena, wake=woken.set)
    job, events = client.lookup([b"x" * 32]), list[Event]()
    while not events:
        assert woken.wait(HANG_S)
        woken.clear()
        events = client.poll()
    assert events == [LookupDone(job, {})]
    client.close()


def test_only_the_owner_can_reach_the_store(harness: Harness) -> None:
    client = harness.open()
    Mailbox(client).store([make_record("a", 0)])
    assert stat.S_IMODE(harness.folder.stat().st_mode) == 0o700
    for path in harness.folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_blocks_larger_than_the_socket_and_the_threads_stream_in(tmp_path: Path) -> None:
    harness = Harness(tmp_path / "store")
    harness.arena.close()
    harness.arena = HostArena(32, 1 << 20)
    mail = Mailbox(harness.open(budget_bytes=256 << 20))
    chain = [make_record("big", n, size_bytes=1 << 20) for n in range(32)]
    page = os.urandom(1 << 20)
    for page_id in range(32):
        harness.arena.page(page_id)[:] = page
    mail.client.store(lent_pages(chain))
    assert all(done.ok for done in mail.take(Stored, 32))
    mail.client.load(lent_pages(chain))
    first = mail.take(Loaded)
    assert first[0].ok
    assert all(done.ok for done in mail.take(Loaded, 31))
    assert all(harness.arena.page(page_id) == page for page_id in range(32))
    harness.close()


def test_a_worker_that_is_given_up_returns_every_page_only_once_it_is_dead(
    harness: Harness,
) -> None:
    client = harness.open()
    mail = Mailbox(client)
    chain = make_chain("a", 4)
    assert all(done.ok for done in mail.store(chain))
    pid = client.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    client.load(lent_pages(chain))
    time.sleep(0.1)
    assert client.pending_pages == {0, 1, 2, 3}
    client.give_up("is too slow for this test")
    assert {done.reason for done in mail.take(Loaded, 4)} == {"worker_died"}
    assert not is_alive(pid)
    wait_until(lambda: client.pid not in (None, pid), "no worker serves the store again")
    assert all(done.ok for done in mail.load(chain))
    client.close()
    client.give_up("is closed")


def test_a_worker_that_served_for_a_while_is_started_again_at_once(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tieredkv.storage.client.supervisor._HEALTHY_S", 0.5)
    client = harness.open(backoff_s=0.1, max_backoff_s=60.0)
    mail = Mailbox(client)
    for serves_s in (0.0, 0.0, 0.0, 0.7, 0.7, 0.7):  # killed soon, and then now and then
        time.sleep(serves_s)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        mail.take(Restarted)
    pauses = re.findall(r"again in (.*?):", caplog.text)
    assert pauses == ["0.1 s", "0.2 s", "0.4 s", "0.1 s", "0.1 s", "0.1 s"]


def test_a_worker_that_crashes_leaves_no_core_file_with_its_keys(harness: Harness) -> None:
    pid = harness.open().pid
    assert pid is not None
    limit, most = resource.prlimit(pid, resource.RLIMIT_CORE)
    assert limit == most <= 1
