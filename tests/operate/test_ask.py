import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.golden import refused
from tests.storage.blocks import make_record as make_small_record
from tests.storage.blocks import open_store, put, told_by_engine
from tests.storage.conftest import (
    NAMESPACE,
    PAGE_BYTES,
    ROOT,
    Harness,
    Mailbox,
    make_chain,
    make_record,
    payload_of,
    wait_until,
)
from tieredkv.clock import Clock
from tieredkv.errors import ConfigError, NoServerError, StorageError, StoreUnreachableError
from tieredkv.operate.ask import StoreControl, document
from tieredkv.operate.calls import Df, EvictFilter, Inspect, Ls, Prune, Verify, decoded
from tieredkv.operate.infos import ChainInfo
from tieredkv.operate.verb import Asking
from tieredkv.operate.worker import Worker
from tieredkv.storage.client.client import StoreClient
from tieredkv.storage.messages.engine import CloseCall, WorkerUp
from tieredkv.storage.messages.operator import Deleted
from tieredkv.storage.worker.process import WorkerProcess
from tieredkv.tier import ControlRequest
from tieredkv.types import TENANT_BYTES, Tier
from tieredkv.wire.channel import MAX_CONTROL_FRAME_BYTES


@contextmanager
def engine_that_says(
    client: StoreClient,
    *parts: dict[str, Any],
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> Iterator[list[ControlRequest]]:
    """Answer the worker's requests with `parts`, and yield them.

    Each answer comes after a call of `before`, and before one of `after`.
    """
    asked: list[ControlRequest] = []
    done = threading.Event()

    def answer() -> None:
        while not done.is_set():
            for event in client.poll():
                if isinstance(event, ControlRequest):
                    asked.append(event)
                    before()
                    for number, part in enumerate(parts, 1):
                        client.reply(event.id, part, number < len(parts))
                    after()
            time.sleep(0.005)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield asked
    finally:
        done.set()
        thread.join()


def test_df_on_a_live_store_has_every_tier(harness: Harness) -> None:
    client = harness.open()
    Mailbox(client).store(make_chain("a", 3))
    said = {"device": {"blocks": 1}, "host": {"blocks": 2}}
    with engine_that_says(client, said) as asked:
        df = StoreControl(harness.folder).answer(Df())
    assert [decoded(request.call).verb for request in asked] == ["df"]
    assert (df["device"], df["host"], df["writer_pid"]) == (
        {"blocks": 1},
        {"blocks": 2},
        client.pid,
    )
    assert df["disk"]["blocks"] == 3
    assert df["disk"]["bytes_live"] >= 3 * PAGE_BYTES
    assert df["disk"]["bytes_files"] >= df["disk"]["bytes_live"]
    assert df["disk"]["bytes_budget"] == 64 << 20
    json.dumps(df)


def test_the_parts_of_the_engines_answer_are_put_together(harness: Harness) -> None:
    client, chain = harness.open(), make_chain("a", 4)
    Mailbox(client).store(chain[:1])
    control = StoreControl(harness.folder)
    told = [told_by_engine((each, [Tier.DEVICE])) for each in chain[1:]]
    parts: list[Any] = [{}, *told[:2], {}, told[2], {}]
    with engine_that_says(client, *parts):
        pages = control.pages(Inspect(id=chain[-1].block_hash.hex()))
        blocks = [block for page in pages for block in page]
    assert [block.block_hash for block in blocks] == [each.block_hash.hex() for each in chain]
    assert [block.tiers for block in blocks] == [[Tier.DISK], *[[Tier.DEVICE]] * 3]
    with engine_that_says(client, {}, {}, {"evicted_blocks": 2, "freed_bytes": 100}):
        assert control.answer(EvictFilter(all=True))["evicted_blocks"] == 1 + 2


def test_df_on_a_stopped_store_has_the_disk_and_its_last_budget(harness: Harness) -> None:
    client = harness.open(budget_bytes=48 << 20)
    Mailbox(client).store(make_chain("a", 3))
    client.close()
    df = StoreControl(harness.folder).answer(Df())
    assert (df["device"], df["host"], df["writer_pid"]) == (None, None, None)
    assert (df["disk"]["blocks"], df["disk"]["bytes_budget"]) == (3, 48 << 20)
    assert all(done.ok for done in Mailbox(harness.open()).load(make_chain("a", 3)))


def test_df_adds_up_what_each_namespace_holds(harness: Harness) -> None:
    mailbox = Mailbox(client := harness.open())
    other = [replace(each, namespace=b"M" * 32) for each in make_chain("b", 2)]
    mailbox.store([*make_chain("a", 3), *other])
    client.close()
    df = StoreControl(harness.folder).answer(Df(verbose=True))
    assert df["num_namespaces"] == 2
    assert [(use["namespace"], use["root"], use["blocks"]) for use in df["namespaces"]] == [
        (NAMESPACE.hex(), ROOT.hex(), 3),
        ((b"M" * 32).hex(), ROOT.hex(), 2),
    ]
    assert [use["bytes"] for use in df["namespaces"]] == [3 * PAGE_BYTES, 2 * PAGE_BYTES]
    assert "namespaces" not in (df := StoreControl(harness.folder).answer(Df()))
    assert df["tenants"] == {
        NAMESPACE[:TENANT_BYTES].hex(): {"blocks": 3, "window_pages": 0, "bytes": 3 * PAGE_BYTES},
        (b"M" * TENANT_BYTES).hex(): {"blocks": 2, "window_pages": 0, "bytes": 2 * PAGE_BYTES},
    }


def test_an_engine_that_does_not_answer_leaves_the_disk_part(harness: Harness) -> None:
    client = harness.open()
    Mailbox(client).store(make_chain("a", 3))
    df = StoreControl(harness.folder).answer(Df())
    assert (df["engine"], df["device"], df["disk"]["blocks"]) == ("no answer", None, 3)


def test_nothing_is_pruned_while_an_engine_may_have_what_it_follows(harness: Harness) -> None:
    client = harness.open()
    Mailbox(client).store(make_chain("a", 3)[1:])
    control = StoreControl(harness.folder)
    with refused(StoreUnreachableError):
        control.answer(Prune())
    client.close()
    assert control.answer(Prune())["pruned_blocks"] == 2


def test_ls_shows_chains_and_tells_where_it_lacks_what_the_engine_has(harness: Harness) -> None:
    client = harness.open()
    Mailbox(client).store(make_chain("a", 3))
    control = StoreControl(harness.folder)
    live = json.loads("".join(document(Ls(), control.pages(Ls()))))
    assert [chain["blocks"] for chain in live["chains"]] == [3]
    client.close()
    stopped = json.loads("".join(document(Ls(), control.pages(Ls()))))
    assert live == {"chains": stopped["chains"], "engine": "no answer"}
    assert stopped["needs"] == []


def test_a_list_without_items_is_a_document() -> None:
    def no_pages() -> Asking:
        yield from ()
        return {"needs": []}

    assert json.loads("".join(document(Ls(), no_pages()))) == {"chains": [], "needs": []}


def fill(path: Path, num_chains: int) -> None:
    """Make a store with chains of one small block each; a later chain was used later."""
    now = time.time()
    records = [
        make_small_record(f"{i}", now=now, size_bytes=1, last_used=now + i / num_chains)
        for i in range(num_chains)
    ]
    with open_store(path, Clock(), budget_bytes=64 << 20) as store:
        for start in range(0, num_chains, 50):
            put(store, *records[start : start + 50])


def test_a_long_list_arrives_in_pages(harness: Harness) -> None:
    fill(harness.folder, 600)
    control = StoreControl(harness.folder)
    pages = list(control.pages(Ls()))
    chains = [chain for page in pages for chain in page]
    used = [chain.last_used for chain in chains]
    assert len(pages) > 2
    assert len({chain.id for chain in chains}) == 600 and used == sorted(used, reverse=True)
    assert [chain for page in control.pages(Ls(limit=300)) for chain in page] == chains[:300]
    assert control.answer(Df())["disk"]["blocks"] == 600


def test_the_store_is_free_while_a_list_is_read(harness: Harness) -> None:
    fill(harness.folder, 1500)
    pages = StoreControl(harness.folder).pages(Ls())
    first = next(pages)
    with open_store(harness.folder, Clock(), budget_bytes=None) as store:
        assert store.stats().blocks == 1500
    assert len(first) + sum(map(len, pages)) == 1500


def test_a_list_is_whole_though_the_worker_dies_while_it_is_read(harness: Harness) -> None:
    fill(harness.folder, 1500)
    client = harness.open(backoff_s=60.0, max_backoff_s=60.0)
    assert client.pid is not None
    pages = StoreControl(harness.folder).pages(Ls())
    with engine_that_says(client, {}):
        first = next(pages)
    os.kill(client.pid, signal.SIGKILL)
    assert len(first) + sum(map(len, pages)) == 1500


def test_more_ids_than_fit_into_a_frame_are_evicted(harness: Harness) -> None:
    fill(harness.folder, 300)
    client = harness.open()
    control = StoreControl(harness.folder)
    with engine_that_says(client, {}):
        ids = [chain.id for page in control.pages(Ls()) for chain in page]
    unknown = [hashlib.sha256(b"%d" % i).hexdigest() for i in range(20_000)]
    assert len(msgspec.msgpack.encode(unknown)) > MAX_CONTROL_FRAME_BYTES
    with engine_that_says(client, {}):
        answer = control.answer(EvictFilter(ids=(*ids[:150], *unknown, *ids[150:])))
    assert (answer["evicted_blocks"], answer["disk"]["evicted_blocks"]) == (300, 300)
    assert answer["unknown_ids"] == unknown


def listed(folder: Path) -> list[ChainInfo]:
    return [chain for page in StoreControl(folder).pages(Ls()) for chain in page]


def test_evict_asks_the_engine_first_and_counts_both(harness: Harness) -> None:
    client = harness.open()
    mail = Mailbox(client)
    chain = make_chain("a", 5)
    mail.store(chain)
    with engine_that_says(client, {"evicted_blocks": 2, "freed_bytes": 100}) as asked:
        result = StoreControl(harness.folder).answer(EvictFilter(all=True))
    assert decoded(asked[0].call) == EvictFilter(all=True)
    assert result["evicted_blocks"] == 5 + 2
    assert result["freed_bytes"] >= 5 * PAGE_BYTES + 100
    assert mail.lookup([record.block_hash for record in chain]) == [None] * 5


def test_a_tier_alone_says_which_copies_to_evict(harness: Harness) -> None:
    fill(harness.folder, 5)
    control = StoreControl(harness.folder)
    assert control.answer(EvictFilter(tiers=(Tier.HOST,)))["evicted_blocks"] == 0
    assert control.answer(EvictFilter(tiers=(Tier.DISK,), dry_run=True))["evicted_blocks"] == 5
    assert control.answer(EvictFilter(tiers=(Tier.DISK,)))["evicted_blocks"] == 5
    assert listed(harness.folder) == []


def test_an_eviction_that_the_engine_does_not_answer_is_no_success(harness: Harness) -> None:
    mail = Mailbox(harness.open())
    chain = make_chain("a", 5)
    mail.store(chain)
    with refused(StoreUnreachableError):
        StoreControl(harness.folder).answer(EvictFilter(all=True))
    assert mail.lookup([record.block_hash for record in chain]) == [None] * 5


def test_nothing_is_evicted_behind_the_back_of_an_engine_whose_worker_is_down(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tieredkv.operate.ask._RETRY_S", 0.0)
    client = harness.open(backoff_s=60.0, max_backoff_s=60.0)
    Mailbox(client).store(make_chain("a", 5))
    os.kill(client.pid or 0, signal.SIGKILL)
    wait_until(lambda: client.pid is None)
    control = StoreControl(harness.folder)
    for call in (EvictFilter(all=True), Prune()):
        with refused(StoreUnreachableError):
            control.answer(call)
    assert control.answer(EvictFilter(all=True, dry_run=True))["evicted_blocks"] == 5
    assert control.answer(Df())["disk"]["blocks"] == 5
    # Another verb has started a worker of its own meanwhile, which has no engine to ask.
    other = WorkerProcess(harness.options(create=False), None)
    while not any(isinstance(it, WorkerUp) for it in other.channel.receive(None)):
        pass
    with refused(StoreUnreachableError):
        control.answer(EvictFilter(all=True))
    other.channel.send(CloseCall())
    other.bury()
    assert control.answer(Df())["disk"]["blocks"] == 5
    client.close()
    assert control.answer(EvictFilter(all=True))["evicted_blocks"] == 5


def test_what_looks_tells_of_an_engine_whose_worker_is_down(harness: Harness) -> None:
    client, chain = harness.open(backoff_s=60.0, max_backoff_s=60.0), make_chain("a", 3)
    Mailbox(client).store(chain)
    os.kill(client.pid or 0, signal.SIGKILL)
    wait_until(lambda: client.pid is None)
    control = StoreControl(harness.folder)
    df, ls = control.answer(Df()), json.loads("".join(document(Ls(), control.pages(Ls()))))
    assert (df["engine"], df["writer_pid"], df["disk"]["blocks"]) == ("no answer", None, 3)
    assert (ls["engine"], len(ls["chains"])) == ("no answer", 1)
    with refused(StoreUnreachableError):
        control.answer(Inspect(id=ls["chains"][0]["id"]))
    client.close()
    assert "engine" not in control.answer(Df())
    assert sum(map(len, control.pages(Inspect(id=ls["chains"][0]["id"])))) == 3


def test_an_eviction_whose_worker_dies_in_between_is_made_by_the_next_one(harness: Harness) -> None:
    client = harness.open()
    mail = Mailbox(client)
    chain = make_chain("a", 5)
    mail.store(chain)
    answers = iter([lambda: os.kill(client.pid or 0, signal.SIGKILL)])
    with engine_that_says(client, {}, before=lambda: next(answers, lambda: None)()) as asked:
        StoreControl(harness.folder).answer(EvictFilter(all=True))
    assert len(asked) == 2
    assert mail.lookup([record.block_hash for record in chain]) == [None] * 5


def test_an_eviction_under_way_is_counted_in_full_though_the_engine_closes(
    harness: Harness,
) -> None:
    client = harness.open()
    Mailbox(client).store(make_chain("a", 5))
    said = {"evicted_blocks": 2, "freed_bytes": 100}
    with engine_that_says(client, said, after=client.close) as asked:
        answer = StoreControl(harness.folder).answer(EvictFilter(all=True))
    assert len(asked) == 1
    assert (answer["evicted_blocks"], answer["disk"]["evicted_blocks"]) == (5 + 2, 5)


def test_an_eviction_that_a_closing_engine_does_not_answer_is_made_by_the_next_worker(
    harness: Harness,
) -> None:
    client = harness.open()
    Mailbox(client).store(make_chain("a", 5))
    with engine_that_says(client, {}, before=client.close) as asked:
        answer = StoreControl(harness.folder).answer(EvictFilter(all=True))
    assert len(asked) == 1
    assert (answer["evicted_blocks"], answer["disk"]["evicted_blocks"]) == (5, 5)


def test_evict_on_a_stopped_store_takes_what_it_is_told(harness: Harness) -> None:
    client = harness.open()
    mail = Mailbox(client)
    old, new = make_record("old", 0), make_record("new", 0)
    mail.store([old, new])
    client.close()
    control = StoreControl(harness.folder)
    assert control.answer(EvictFilter(older_than_s=3600))["evicted_blocks"] == 0
    assert control.answer(EvictFilter(ids=(old.block_hash.hex(),)))["evicted_blocks"] == 1
    assert control.answer(EvictFilter(namespace_prefix="ff" * 32))["evicted_blocks"] == 0
    assert control.answer(Df())["disk"]["blocks"] == 1
    assert control.answer(EvictFilter(namespace_prefix=new.namespace.hex()))["evicted_blocks"] == 1
    assert control.answer(Df())["disk"]["blocks"] == 0


def test_an_eviction_on_a_stopped_store_is_flushed_once_at_its_end(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = harness.open()
    Mailbox(client).store(make_chain("a", 3))
    client.close()
    delete, notes = Worker.delete, list[dict[str, Any]]()

    def note(*args: Any, **options: Any) -> Deleted:
        done = delete(*args, **options)
        notes.append(json.loads((harness.folder / "lock").read_text()))
        return done

    monkeypatch.setattr(Worker, "delete", note)
    assert StoreControl(harness.folder).answer(EvictFilter(all=True))["evicted_blocks"] == 3
    notes.append(json.loads((harness.folder / "lock").read_text()))
    assert ["unflushed_boot" in note for note in notes] == [True, False]


def test_evict_without_a_filter_or_with_nonsense_evicts_nothing(harness: Harness) -> None:
    client = harness.open()
    Mailbox(client).store(make_chain("a", 2))
    client.close()
    control = StoreControl(harness.folder)
    for wanted in (
        EvictFilter(),
        EvictFilter(namespace_prefix=""),
        EvictFilter(namespace_prefix="0xab"),
        EvictFilter(filter=" "),
        EvictFilter(older_than_s=-1.0),
        EvictFilter(older_than_s=float("nan")),
        EvictFilter(starts=(b"x" * 16,)),
    ):
        with refused(ConfigError):
            control.answer(wanted)
    with refused(NoServerError):
        control.answer(EvictFilter(all=True, to="disk"))
    assert control.answer(EvictFilter(ids=("zz",)))["unknown_ids"] == ["zz"]
    assert control.answer(Df())["disk"]["blocks"] == 2


@pytest.mark.parametrize("is_live", [True, False])
def test_verify_finds_and_repairs_a_flipped_byte(harness: Harness, is_live: bool) -> None:
    client = harness.open()
    chain = make_chain("a", 20)
    Mailbox(client).store(chain)
    client.close()
    wanted = payload_of(chain[7].block_hash)
    for path in harness.folder.rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(wanted)) >= 0:
            with path.open("r+b") as file:
                file.seek(at + 3)
                file.write(bytes([wanted[3] ^ 1]))
    if is_live:
        harness.open()
    control = StoreControl(harness.folder)
    steps: list[tuple[int, int]] = []
    found = control.answer(Verify(), progress=lambda done, total: steps.append((done, total)))
    assert (found["checked"], found["bad"], found["repaired"]) == (20, 1, 1)
    assert sum(found["by_reason"].values()) == 1
    again = control.answer(Verify())
    assert (again["checked"], again["bad"]) == (19, 0)


def test_a_folder_that_is_no_store_is_named(tmp_path: Path) -> None:
    with refused(StorageError):
        StoreControl(tmp_path / "missing").answer(Df())
    with refused(StorageError):
        StoreControl(tmp_path).answer(Df())
    assert list(tmp_path.iterdir()) == []


def test_the_socket_of_a_dead_worker_is_replaced(harness: Harness) -> None:
    client = harness.open(backoff_s=60.0, max_backoff_s=60.0)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    client.close()
    assert (harness.folder / "sock").is_socket()
    assert StoreControl(harness.folder).answer(Df())["disk"]["blocks"] == 0
    assert StoreControl(harness.folder).answer(Verify())["checked"] == 0
    assert not (harness.folder / "sock").exists()


def test_the_socket_works_under_a_path_longer_than_a_socket_address(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 100) / ("e" * 100)
    folder.parent.mkdir()
    harness = Harness(folder)
    client = harness.open()
    with engine_that_says(client, {}):
        assert StoreControl(folder).answer(Df())["writer_pid"] == client.pid
    harness.close()


def test_several_command_lines_at_once_all_get_their_answer(harness: Harness) -> None:
    client = harness.open()
    Mailbox(client).store(make_chain("a", 3))
    client.close()
    answers: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda: answers.append(StoreControl(harness.folder).answer(Df())))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [df["disk"]["blocks"] for df in answers] == [3] * 4


def test_a_stopped_worker_is_reported_not_waited_for(harness: Harness) -> None:
    client = harness.open()
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    with refused(StorageError):
        StoreControl(harness.folder, answer_timeout_s=0.5).answer(Df())


def test_loads_go_on_while_verify_runs(harness: Harness) -> None:
    mail = Mailbox(harness.open())
    for name in "abcdefgh":
        assert all(done.ok for done in mail.store(make_chain(name, 60)))
    found: list[dict[str, Any]] = []
    thread = threading.Thread(
        target=lambda: found.append(StoreControl(harness.folder).answer(Verify()))
    )
    thread.start()
    num_loads = 0
    while thread.is_alive():
        assert all(done.ok for done in mail.load(make_chain("c", 4)))
        num_loads += 1
    thread.join()
    assert (found[0]["checked"], found[0]["bad"]) == (480, 0)
    assert num_loads > 1
