"""Published KV cache events: their wire format, replay, overflow, and what a model publishes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from tests.golden import told
from tests.subscriber import Subscriber
from tests.waiting import wait_until
from tieredkv.cache.events import BlockTokens, Change
from tieredkv.config import Settings
from tieredkv.engine import event_publisher
from tieredkv.engine.event_publisher import EventPublisher, is_local
from tieredkv.engine.kv_events import events_of
from tieredkv.errors import ConfigError
from tieredkv.types import BlockHash, Tier

SIZE = 16
VLLM_FIELDS = {
    "BlockStored": [
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
        *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
        *("kv_cache_spec_sliding_window", "locality", "ownership", "session_id"),
        "lookahead_token_ids",
    ],
    "BlockRemoved": ["block_hashes", "medium", "group_idx", "locality", "ownership"],
    "AllBlocksCleared": [],
}
VLLM_NEEDED = {
    "BlockStored": set(VLLM_FIELDS["BlockStored"][:7]),
    "BlockRemoved": {"block_hashes", "medium"},
    "AllBlocksCleared": set(),
}
ON: dict[str, Any] = {
    "kv_events_endpoint": "tcp://127.0.0.1:*",
    "kv_events_replay_endpoint": "tcp://127.0.0.1:*",
}


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def stored(tier: Tier, number: int, parent: int | None = None) -> Change:
    """Return the change that a tier has got a block, whose tokens are all its number."""
    tokens = array("I", [number] * SIZE).tobytes()
    return Change(
        tier, block(number), BlockTokens(None if parent is None else block(parent), tokens)
    )


def removed(tier: Tier, number: int) -> Change:
    return Change(tier, block(number), None)


@contextlib.contextmanager
def publishing(**changes: Any) -> Iterator[tuple[EventPublisher, Subscriber]]:
    """Run a publisher with a subscriber that gets every batch of the context."""
    publisher = EventPublisher(Settings(**{**ON, **changes}), SIZE)
    subscriber = Subscriber(publisher.endpoint, publisher.replay_endpoint)
    try:
        while subscriber.read(0.05) is None:
            publisher.publish([removed(Tier.DEVICE, 0)])
        while subscriber.read(0.2) is not None:
            pass
        yield publisher, subscriber
    finally:
        subscriber.close()
        publisher.close()


def test_a_batch_is_as_vllm_writes_it() -> None:
    with publishing(kv_events_topic="kv") as (publisher, subscriber):
        publisher.publish(
            [
                *(stored(Tier.DEVICE, 1), stored(Tier.DEVICE, 2, 1), stored(Tier.HOST, 2, 1)),
                *(stored(Tier.DEVICE, 3, 1), removed(Tier.DISK, 8), removed(Tier.DISK, 9)),
                removed(Tier.HOST, 2),
            ]
        )
        batch = subscriber.read()
    assert batch is not None
    topic, seq, (ts, events, rank) = batch
    assert (topic, rank) == (b"kv", 0)
    assert seq >= 1
    assert abs(ts - time.time()) < 60
    fixed = {"type": "BlockStored", "block_size": SIZE, "lora_id": None, "lora_name": None}
    assert events == [
        fixed
        | {
            "block_hashes": [block(1), block(2)],
            "parent_block_hash": None,
            "token_ids": [1] * SIZE + [2] * SIZE,
            "medium": "GPU",
        },
        fixed
        | {
            "block_hashes": [block(2)],
            "parent_block_hash": block(1),
            "token_ids": [2] * SIZE,
            "medium": "CPU",
        },
        fixed
        | {
            "block_hashes": [block(3)],
            "parent_block_hash": block(1),
            "token_ids": [3] * SIZE,
            "medium": "GPU",
        },
        {"type": "BlockRemoved", "block_hashes": [block(8), block(9)], "medium": "STORAGE"},
        {"type": "BlockRemoved", "block_hashes": [block(2)], "medium": "CPU"},
    ]


def test_anchors_have_events_of_their_own_group() -> None:
    first, second = (stored(Tier.DEVICE, *each) for each in ((1,), (2, 1)))
    changes = [
        *(first, first._replace(is_anchor=True), second._replace(is_anchor=True), second),
        *(removed(Tier.DEVICE, 3), removed(Tier.DEVICE, 4)._replace(is_anchor=True)),
        *(removed(Tier.DEVICE, 5)._replace(is_anchor=True), removed(Tier.DEVICE, 6)),
    ]
    events = msgspec.to_builtins([*events_of(changes, SIZE)], builtin_types=(bytes,))
    assert [(event["type"], event["block_hashes"], event.get("group_idx")) for event in events] == [
        ("BlockStored", [block(1)], None),
        ("BlockStored", [block(1)], 1),
        ("BlockStored", [block(2)], 1),
        ("BlockStored", [block(2)], None),
        ("BlockRemoved", [block(3)], None),
        ("BlockRemoved", [block(4), block(5)], 1),
        ("BlockRemoved", [block(6)], None),
    ]


def test_every_field_is_one_of_vllms_and_none_that_it_needs_is_missing() -> None:
    with publishing() as (publisher, subscriber):
        publisher.publish([stored(Tier.DEVICE, 1), removed(Tier.DEVICE, 1)])
        _, (_, first, _) = subscriber.replay(0)[0]
        _, (_, last, _) = subscriber.replay(0)[-1]
    found = {event.pop("type"): event.keys() for event in [*first, *last]}
    assert found.keys() == VLLM_FIELDS.keys()
    for name, fields in found.items():
        assert VLLM_NEEDED[name] <= fields <= set(VLLM_FIELDS[name]), name


def test_the_first_batch_that_is_sent_clears_what_an_earlier_server_has_told() -> None:
    with publishing() as (_, subscriber):
        batches = subscriber.replay(0)
    assert batches[0][0] == 0
    firsts = [events[0]["type"] for _, (_, events, _) in batches]
    assert firsts == ["AllBlocksCleared"] + ["BlockRemoved"] * (len(batches) - 1)


def test_a_replay_fills_a_gap_with_the_batches_that_are_kept() -> None:
    with publishing(kv_events_buffer_steps=5) as (publisher, subscriber):
        for number in range(8):
            publisher.publish([stored(Tier.DEVICE, number)])
        live = [subscriber.read() for _ in range(8)]
        last = live[-1][1]  # type: ignore[index]
        assert subscriber.replay(0) == [(seq, batch) for _, seq, batch in live[-5:]]  # type: ignore[misc]
        assert [seq for seq, _ in subscriber.replay(last - 1)] == [last - 1, last]
        assert subscriber.replay(last + 1) == []


def test_what_is_kept_for_replay_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_publisher, "MAX_REPLAY_BYTES", 1000)
    with publishing() as (publisher, subscriber):
        for number in range(40):
            publisher.publish([stored(Tier.DEVICE, number)])
        wait_until(lambda: len(subscriber.replay(0)) < 10, "nothing is forgotten")
        sizes = [len(msgspec.msgpack.encode(batch)) for _, batch in subscriber.replay(0)]
    assert 0 < sum(sizes) <= 1000


@pytest.mark.parametrize(
    "frames", [[b""], [b"", b"7"], [b"", b"7" * 8, b""], [b"x" * 5000], [b"", b"x" * 5000]]
)
def test_a_replay_request_that_is_malformed_is_not_answered(frames: list[bytes]) -> None:
    with publishing() as (publisher, subscriber):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        assert publisher.replay_endpoint is not None
        stranger.connect(publisher.replay_endpoint)
        stranger.send_multipart(frames)
        assert not stranger.poll(100)
        context.destroy(linger=0)
        publisher.publish([removed(Tier.DEVICE, 1)])
        assert subscriber.read() is not None
        assert subscriber.replay(0)


def test_a_full_queue_drops_batches_and_their_numbers_show_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = threading.Event()
    gate.set()

    def wait_at_the_gate(*arguments: Any) -> Any:
        gate.wait()
        return events_of(*arguments)

    monkeypatch.setattr(event_publisher, "events_of", wait_at_the_gate)
    with publishing(kv_events_max_queue_size=3) as (publisher, subscriber):
        gate.clear()
        publisher.publish([removed(Tier.DEVICE, 1)])
        wait_until(lambda: not publisher.num_queued, "the first batch is not taken")
        taken = [publisher.publish([removed(Tier.DEVICE, number)]) for number in range(5)]
        assert taken == [True] * 3 + [False] * 2
        gate.set()
        wait_until(lambda: not publisher.num_queued, "the queue is not emptied")
        assert publisher.publish([removed(Tier.DEVICE, 1)])
        wait_until(lambda: not publisher.num_queued, "the last batch is not sent")
        seqs = [seq for seq, _ in subscriber.replay(0)][-5:]
    assert [seq - seqs[0] for seq in seqs] == [0, 1, 2, 3, 6]


def test_a_subscriber_that_stands_still_delays_nobody() -> None:
    code = (
        "import sys, zmq; sub = zmq.Context().socket(zmq.SUB); sub.connect(sys.argv[1]);"
        "sub.setsockopt(zmq.SUBSCRIBE, b''); print(len(sub.recv_multipart()), flush=True);"
        "sub.poll(60_000); import time; time.sleep(60)"
    )
    with publishing(kv_events_max_queue_size=100, kv_events_buffer_steps=1) as (publisher, sub):
        stuck = subprocess.Popen(
            [sys.executable, "-P", "-c", code, publisher.endpoint], stdout=subprocess.PIPE
        )
        try:
            waiting = threading.Thread(target=stuck.stdout.readline)  # type: ignore[union-attr]
            waiting.start()
            while waiting.is_alive():
                publisher.publish([removed(Tier.DEVICE, 0)])
                waiting.join(0.01)
            os.kill(stuck.pid, signal.SIGSTOP)
            while sub.read(0.2) is not None:
                pass
            changes = [stored(Tier.DEVICE, number) for number in range(1000)]
            slowest_s, num_read = 0.0, 0
            for _ in range(150):  # some 20 MB, more than the system's buffers take
                began_at = time.perf_counter()
                assert publisher.publish(changes)
                slowest_s = max(slowest_s, time.perf_counter() - began_at)
                num_read += sub.read() is not None
            assert num_read == 150
            assert slowest_s < 0.5
            began_at = time.perf_counter()
            publisher.close()
            assert time.perf_counter() - began_at < 2 * event_publisher.CLOSE_S
        finally:
            stuck.kill()
            stuck.wait()
            stuck.stdout.close()  # type: ignore[union-attr]


def test_an_address_that_is_taken_is_said() -> None:
    with publishing() as (publisher, _):
        for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            with pytest.raises(ConfigError) as caught:
                EventPublisher(Settings(**{**ON, name: publisher.endpoint}), SIZE)
            text = re.sub("(cannot be bound:).*", r"\1 CAUSE", str(caught.value))
            told(text, hide={publisher.endpoint: "ENDPOINT"})


def test_an_address_that_others_can_reach_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with publishing(kv_events_endpoint="tcp://*:*"):
        pass
    (warning,) = [it for it in caplog.records if it.levelname == "WARNING"]
    told(re.sub(r":\d+", ":PORT", warning.getMessage()))
    assert not any(map(is_local, ("tcp://*:1", "tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://eth0:1")))
    assert all(
        map(is_local, ("tcp://127.0.0.1:*", "tcp://[::1]:1", "ipc:///a:b", "tcp://localhost:1"))
    )
