"""Publishes KV cache events over ZeroMQ, on a thread of its own.

The engine's thread hands over the changes of a step and goes on. The publisher's thread encodes
them, sends them to all subscribers, and keeps the last batches for those that missed some: a
subscriber that sees a gap in the numbers asks the replay socket for all batches from a number on.

Batches are numbered when they are handed over. One that finds the queue full is dropped and leaves
a gap that no replay fills. ZeroMQ drops what a subscriber does not take; that is a gap for this
subscriber alone.
"""

import ipaddress
import logging
import os
import threading
import time
from collections import deque
from typing import Any

import msgspec
import zmq

from tieredkv.cache.events import Change
from tieredkv.config import Settings
from tieredkv.engine.kv_events import END_SEQ, AllBlocksCleared, EventBatch, events_of, seq_frame
from tieredkv.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_REPLAY_BYTES = 256 << 20
"""Bytes of the batches that are kept for replay, however many batches these are."""

MAX_REQUEST_BYTES = 1024
"""Longest message of a subscriber; one that sends more is disconnected."""

CLOSE_S = 2.0
"""How long a stop waits until the last batches are sent."""


class EventPublisher:
    """Sends batches of events to whoever subscribes.

    `publish` and `close` are for the engine's thread. The sockets are the publisher's thread's.

    Attributes:
        endpoint, replay_endpoint: the addresses that are bound; the latter may be None.

    Raises:
        ConfigError: an address cannot be bound.
    """

    def __init__(self, settings: Settings, block_size: int) -> None:
        self._block_size, self._topic = block_size, settings.kv_events_topic.encode()
        self._most_queued = settings.kv_events_max_queue_size
        self._queue: deque[tuple[int, float, list[Change]]] = deque()
        self._num_batches = 0  # handed over, dropped ones too
        self._has_sent = self._is_closing = False
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes, self._most_kept = 0, settings.kv_events_buffer_steps
        self._encoder = msgspec.msgpack.Encoder()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        self.replay_endpoint: str | None = None
        try:
            self._pub, self.endpoint = self._bind(
                zmq.PUB, "kv_events_endpoint", settings.kv_events_endpoint, self._most_queued
            )
            if settings.kv_events_replay_endpoint is not None:
                # A whole replay fits, even if the one before has not been read to its end.
                self._replay, self.replay_endpoint = self._bind(
                    zmq.ROUTER,
                    "kv_events_replay_endpoint",
                    settings.kv_events_replay_endpoint,
                    2 * (self._most_kept + 1),
                )
        except ConfigError:
            self._context.destroy(linger=0)
            os.close(self._wake_fd)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def num_queued(self) -> int:
        """How many batches wait to be sent."""
        return len(self._queue)

    def publish(self, changes: list[Change]) -> bool:
        """Hand over the changes of a step; return False if they are dropped, as too many wait."""
        seq, self._num_batches = self._num_batches, self._num_batches + 1
        if len(self._queue) >= self._most_queued:
            return False
        self._queue.append((seq, time.time(), changes))
        os.eventfd_write(self._wake_fd, 1)
        return True

    def close(self) -> None:
        """Send what waits, for a moment, and release the addresses; twice is fine."""
        if self._is_closing:
            return
        self._is_closing = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            os.close(self._wake_fd)

    # Inside

    def _bind(
        self, kind: int, setting: str, endpoint: str, most_queued: int
    ) -> tuple["zmq.Socket[bytes]", str]:
        """Return a socket at an address, and the address with its port."""
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.SNDHWM, most_queued)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        sock.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            sock.bind(endpoint.replace("//localhost:", "//127.0.0.1:"))
        except zmq.ZMQError as error:
            what = f"`{setting}` = `{endpoint}` cannot be bound: {error.strerror}"
            hint = "hint: give a free port at an address of this machine"
            raise ConfigError(f"{what}\n{hint}") from None
        bound = sock.getsockopt_string(zmq.LAST_ENDPOINT)
        if is_local(endpoint):
            logger.info("`%s`: KV cache events are at %s", setting, bound)
        else:
            text = "`%s`: other machines can read KV cache events, which hold prompts, at %s"
            logger.warning(text, setting, bound)
        return sock, bound

    def _run(self) -> None:
        """Send batches and answer replays until the publisher is closed."""
        try:
            self._serve()
        except Exception:
            logger.exception("KV cache events are no longer published")
        finally:
            self._context.destroy(linger=int(1000 * CLOSE_S / 2))

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while self._queue or not self._is_closing:
            ready: dict[Any, int] = dict(poller.poll())
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            for _ in range(len(self._queue)):
                self._send(*self._queue.popleft())
            if self._replay in ready:
                self._answer()

    def _send(self, seq: int, ts: float, changes: list[Change]) -> None:
        batch = EventBatch(ts, [*events_of(changes, self._block_size)], data_parallel_rank=0)
        if not self._has_sent:  # an earlier server may have had this address
            self._has_sent = True
            batch.events.insert(0, AllBlocksCleared())
        number, payload = seq_frame(seq), self._encoder.encode(batch)
        self._pub.send_multipart((self._topic, number, payload))
        if self._replay is not None:
            self._kept.append((number, payload))
            self._kept_bytes += len(payload)
            while len(self._kept) > self._most_kept or self._kept_bytes > MAX_REPLAY_BYTES:
                self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self) -> None:
        """Send the batches that a subscriber asks for, from a number on, and the end."""
        assert self._replay is not None
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("a request for KV cache events has %d frames, not 3", len(frames))
            return
        who, empty, first = frames
        for number, payload in self._kept:
            if number >= first:
                self._replay.send_multipart((who, empty, self._topic, number, payload))
        self._replay.send_multipart((who, empty, b"", END_SEQ, b""))


def is_local(endpoint: str) -> bool:
    """Return whether only this machine can reach an address."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if endpoint.startswith("ipc://") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or `*` for all addresses
        return False
