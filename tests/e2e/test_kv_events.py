"""A subscriber to an engine's KV cache events knows what each tier holds, and no more."""

import contextlib
import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests import http
from tests.golden import told
from tests.levels import few
from tests.prompts import prompt
from tests.serving import ask_store, running
from tests.subscriber import Picture, Subscriber
from tests.waiting import wait_until
from tieredkv import LLM, SamplingParams
from tieredkv.types import Tier

SIZES: dict[str, Any] = {"device_size": "1MiB", "host_size": "1MiB", "restore": "load"}
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU"}


class Followed:
    """An engine in this process, and what a subscriber knows of it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        live, replay = f"ipc://{folder}/live", f"ipc://{folder}/replay"
        ends = {"kv_events_endpoint": live, "kv_events_replay_endpoint": replay}
        self.llm = LLM("tiny-random", kv_events="on", **{**SIZES, **ends, **settings})
        self.core, self.subscriber = self.llm.core, Subscriber(live, replay)
        self.texts: list[list[int]] = []

    def serve(self, tokens: list[int], **asked: Any) -> None:
        """Serve a prompt, and remember it with its answer."""
        [answer] = self.llm.serve([self.llm.make_request(tokens, GREEDY, **asked)])
        self.texts.append([*tokens, *answer.token_ids])
        self.core.cache.check()

    def settle(self) -> None:
        """Step until nothing moves and everything is sent."""
        self.core.step()
        wait_until(lambda: not self.core.step() and not self.core.has_work, "it never ends")
        self.core.step()

    @property
    def picture(self) -> Picture:
        """What the events tell from the first one on."""
        self.settle()
        num_batches, batches = self.core.parts.tiers.counters.event_batches, list[Any]()

        def has_all() -> bool:
            batches[:] = self.subscriber.replay(0)
            return len(batches) == num_batches

        wait_until(has_all, "a batch is missing")
        assert [seq for seq, _ in batches] == [*range(num_batches)]
        picture = Picture()
        for _, (_, events, _) in batches:
            picture.follow(events)
        return picture

    def check(self) -> Picture:
        """Compare what the events tell with the pools and with what was served."""
        picture, tiers = self.picture, self.core.parts.tiers
        for tier, pool in tiers.pools.items():
            entries = tiers.catalog.entries()
            found = {entry.block_hash: pool.lookup(entry.block_hash) for entry in entries}
            ready = {each for each, block in found.items() if block and block.is_ready}
            assert picture.media[MEDIA[tier]] == ready, tier
        for block_hash in picture.media["GPU"]:
            tokens = picture.tokens_before(block_hash)
            assert any(text[: len(tokens)] == tokens for text in self.texts)
        return picture

    @property
    def num_on_disk(self) -> int:
        """How many blocks the store has."""
        assert self.core.parts.tiers.store is not None
        return self.core.parts.tiers.store.stats().blocks

    def check_disk(self) -> None:
        """Wait until the events tell of as many blocks on disk as there are."""
        wait_until(lambda: len(self.check().media["STORAGE"]) == self.num_on_disk, "they differ")


@contextlib.contextmanager
def followed(folder: Path, **settings: Any) -> Iterator[Followed]:
    """Run an engine that publishes events, and close it."""
    engine = Followed(folder, **settings)
    try:
        with engine.llm:
            yield engine
    finally:
        engine.subscriber.close()


def test_the_events_tell_what_each_tier_holds(tmp_path: Path) -> None:
    store = {"disk_dir": tmp_path / "store", "disk_size": "3MiB", "disk_write": "write_behind"}
    with followed(tmp_path, retention="24h", **store) as engine:
        generator = random.Random(7)
        for _ in range(25):
            seed, length = generator.randrange(6), generator.randrange(20, 450)
            engine.serve(prompt(seed, length))
            engine.check()
        engine.check_disk()
        counters = engine.core.parts.tiers.counters
        assert counters.evictions["device,capacity"]
        assert counters.evictions["host,capacity"]
        assert counters.promoted_host_blocks
        assert engine.core.parts.tiers.store.stats().num_evicted  # type: ignore[union-attr]


def test_a_whole_prompt_is_one_event_and_its_answer_follows(tmp_path: Path) -> None:
    with followed(tmp_path) as engine:
        engine.serve(prompt(1, 100))
        engine.check()
        (_, (_, events, rank)), *_ = engine.subscriber.replay(0)
        assert rank == 0
        clear, first = events
        assert clear == {"type": "AllBlocksCleared"}
        assert first["token_ids"] == prompt(1, 100)[:96]
        assert first["parent_block_hash"] is None
        assert [len(each) for each in first["block_hashes"]] == [32] * 6
        last = [event for _, (_, events, _) in engine.subscriber.replay(1) for event in events]
        generated = [event for event in last if event["medium"] == "GPU"]
        assert generated[0]["parent_block_hash"] == first["block_hashes"][-1]
        assert sum(len(event["block_hashes"]) for event in generated) == 2  # 139 tokens in all


def test_what_only_the_disk_has_is_announced_when_it_is_used(tmp_path: Path) -> None:
    store = {"disk_dir": tmp_path / "store", "retention": "24h"}
    with followed(tmp_path, **store) as engine:
        engine.serve(prompt(1, 200))
        engine.serve(prompt(2, 200))
    with followed(tmp_path, **store) as engine:
        assert engine.num_on_disk
        engine.settle()
        assert engine.core.parts.tiers.counters.event_batches == 0
        engine.serve(prompt(1, 200))
        picture = engine.check()
        on_disk = picture.media["STORAGE"]
        assert len(on_disk) == 12
        assert on_disk <= picture.media["GPU"]
        tokens = [picture.tokens_before(block_hash) for block_hash in on_disk]
        assert max(tokens, key=len) == prompt(1, 200)[:192]


def test_a_worker_that_starts_again_has_nothing_until_it_is_used(tmp_path: Path) -> None:
    store = {"disk_dir": tmp_path / "store", "retention": "24h", "disk_write": "write_behind"}
    with followed(tmp_path, **store) as engine:
        engine.serve(prompt(1, 200))
        engine.check_disk()
        assert engine.llm.demote("disk")
        assert len(engine.check().media["STORAGE"]) == engine.num_on_disk > 0
        pid = engine.core.parts.tiers.store.state().pid  # type: ignore[union-attr]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not engine.check().media["STORAGE"], "the disk is not forgotten")
        engine.serve(prompt(1, 200))
        engine.check()
        assert len(engine.check().media["STORAGE"]) >= 12


def test_what_an_operator_evicts_is_removed_from_every_medium(tmp_path: Path) -> None:
    store = {"disk_dir": tmp_path / "store", "retention": "24h", "disk_write": "write_behind"}
    with followed(tmp_path, **store) as engine:
        engine.serve(prompt(1, 200))
        engine.check_disk()
        assert engine.num_on_disk
        evicting = threading.Thread(
            target=ask_store, args=[tmp_path / "store", "evict", "--all", "--yes"]
        )
        evicting.start()
        while evicting.is_alive():
            engine.core.step()
            engine.core.wait(0.01)
        wait_until(lambda: not any(engine.check().media.values()), "something is left")


def test_an_expired_block_is_removed_from_every_medium(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset = tmp_path / "offset"
    offset.write_text("0")
    monkeypatch.setenv("TIEREDKV_TEST_CLOCK_OFFSET_FILE", str(offset))
    store = {"disk_dir": tmp_path / "store", "retention": "24h", "disk_write": "write_behind"}
    with followed(tmp_path, sweep_interval=0.1, **store) as engine:
        engine.serve(prompt(1, 200))
        engine.check_disk()
        assert engine.num_on_disk
        offset.write_text("90000")
        wait_until(lambda: not any(engine.check().media.values()), "something is left")


@pytest.mark.parametrize(
    ("asked", "isolate_by"),
    few(
        [
            ({"cache_salt": "s"}, "salt"),
            ({"tenant": "t"}, "none"),
            ({"tenant": "t", "cache_salt": "s"}, "salt"),
            ({"cache_salt": "s"}, "none"),
            ({"tenant": "t"}, "salt"),
            ({"tenant": "t", "cache_salt": "s"}, "none"),
        ],
        3,
    ),
)
def test_nothing_is_told_of_a_salt_or_a_key(
    tmp_path: Path, asked: dict[str, str], isolate_by: str
) -> None:
    with followed(tmp_path, disk_dir=tmp_path / "store", isolate_by=isolate_by) as engine:
        engine.serve(prompt(1, 100), retention="24h", **asked)
        engine.settle()
        assert engine.llm.demote("disk")
        engine.serve(prompt(1, 100), retention="24h", **asked)
        engine.settle()
        assert engine.core.parts.tiers.counters.event_batches == 0
        engine.serve(prompt(1, 100), prompt_cache_key="routing only")
        assert len(engine.picture.media["GPU"]) == 8


def test_a_cache_key_that_isolates_is_silent(tmp_path: Path) -> None:
    with followed(tmp_path, isolate_by="prompt_cache_key") as engine:
        engine.serve(prompt(1, 100), prompt_cache_key="k")
        engine.settle()
        assert engine.core.parts.tiers.counters.event_batches == 0


def test_all_namespaces_are_told_if_the_operator_says_so(tmp_path: Path) -> None:
    with followed(tmp_path, kv_events_namespaces="all") as engine:
        engine.serve(prompt(1, 100), cache_salt="s", tenant="t")
        engine.serve(prompt(1, 100))
        assert len(engine.check().media["GPU"]) == 2 * 8


def test_no_socket_is_opened_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a ZeroMQ context is made")

    monkeypatch.setattr(zmq, "Context", refuse)
    with LLM("tiny-random", **SIZES) as llm:
        llm.generate(prompt(1, 100), GREEDY)
        assert llm.core.parts.tiers.counters.event_batches == 0
        assert not any(thread.name == "kv-events" for thread in threading.enumerate())


def test_a_server_publishes_and_counts(tmp_path: Path) -> None:
    live, replay = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"
    flags = ("--kv-events", "on", "--kv-events-endpoint", live)
    with running(tmp_path, *flags, "--kv-events-replay-endpoint", replay) as server:
        subscriber = Subscriber(live, replay)
        with server.client() as client:
            client.completions.create(model="tiny-random", prompt=prompt(1, 100), max_tokens=1)
        picture = Picture()
        wait_until(lambda: bool(subscriber.replay(0)), "nothing is published")
        for _, (_, events, _) in subscriber.replay(0):
            picture.follow(events)
        subscriber.close()
        assert len(picture.media["GPU"]) == 6

        def metrics() -> str:
            return str(http.get(f"{server.root}/metrics").text)

        wait_until(lambda: 'event_batches_total{state="all"} 0.0' not in metrics(), "not counted")
        assert 'tieredkv_kv_event_batches_total{state="dropped"} 0.0' in metrics()
        assert server.stop() == 0


@pytest.mark.slow
def test_a_server_whose_address_is_taken_does_not_start(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    flags = ("--kv-events", "on", "--kv-events-endpoint", f"tcp://127.0.0.1:{port}")
    with pytest.raises(AssertionError) as ended, running(tmp_path, *flags):
        pass
    [text] = re.findall("error: (.*cannot be bound:)", str(ended.value))
    told(text, hide={str(port): "PORT"})
    taken.close()
    context.destroy(linger=0)
