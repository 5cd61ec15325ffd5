"""An engine on a modelled machine: everything that decides is real, and only time is computed.

Requests, scheduler, planner, pools and queues are those of the engine. Steps, copies and the disk
move no bytes: each takes as long as it would at the rates of the machine, in a time of its own that
passes only while the engine waits. So minutes of a GPU's work are replayed in seconds, always with
the same result.

Inside `VirtualTime.patched`, `time.monotonic`, `time.perf_counter` and `time.sleep` are those of
the modelled machine.
"""

import contextlib
import itertools
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from tieredkv.cache.device_link import MIN_SPLIT_BYTES, DeviceLink
from tieredkv.cache.rates import ComputeRate, pairs
from tieredkv.clock import Clock
from tieredkv.config import Settings
from tieredkv.engine.core import EngineCore
from tieredkv.engine.engine_messages import TokenOutput
from tieredkv.engine.loader import find_model
from tieredkv.engine.model_runner import StepOutput
from tieredkv.engine.sampling_params import TokenChoice
from tieredkv.engine.step_buffers import BatchRow
from tieredkv.engine.step_timer import StepTimer, Work, _Step
from tieredkv.storage.client import Event, StoreClient
from tieredkv.storage.codec import Extent, Located, encode_record
from tieredkv.storage.results import NO_STATS, StoreStats, TouchItem
from tieredkv.storage.worker_messages import LentPage, LookupDone, PageLoaded, PageStored
from tieredkv.storage.write_share import WRITE_SHARE
from tieredkv.types import BlockId, BlockRecord, PageId, Progress

START = 1_800_000_000.0
WAKE_S = 2e-4
POLL_S = 1e-5
"""What a look at queues costs the engine's thread."""


class Machine(NamedTuple):
    """How fast a machine serves a model.

    The time of a step is the greater of `step_s` and its prompt tokens at `token_s`, and `pair_s`
    for each pair of a prompt's token and a token before it, and `decode_s` for each token before a
    token that is generated.

    Attributes:
        up_GBps, down_GBps: of copies from and to host memory.
        read_GBps: of the disk, which reads and writes share.
        read_s: latency of a read.
        lookup_s: time until the disk has answered a lookup.
        issue_s: time for which issuing a step keeps the engine's thread.
    """

    step_s: float = 0.006
    token_s: float = 2.4e-5
    pair_s: float = 7.3e-10
    decode_s: float = 3.3e-8
    up_GBps: float = 50.0
    down_GBps: float = 50.0
    read_GBps: float = 2.7
    read_s: float = 0.001
    lookup_s: float = 0.001
    issue_s: float = 0.0005

    def seconds(self, rows: Sequence[BatchRow]) -> float:
        """Return the time of a step."""
        num_tokens, more_s = 0, 0.0
        for row in rows:
            count = len(row.token_ids)
            if count > 1:
                num_tokens += count
                more_s += self.pair_s * pairs(row.start, row.start + count)
            else:
                more_s += self.decode_s * row.start
        return max(self.step_s, num_tokens * self.token_s) + more_s


H200_8B = Machine()
"""One H200 with Llama-3.1-8B shapes, roughly as docs/compute-or-load.md measured it."""


class VirtualTime:
    """The time of a modelled machine.

    Attributes:
        now: seconds since some moment.
    """

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Stand in for `time.monotonic` and `time.perf_counter`."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += max(0.0, seconds)

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Give this time to everything that asks the module `time`."""
        with (
            mock.patch.object(time, "monotonic", self.monotonic),
            mock.patch.object(time, "perf_counter", self.monotonic),
            mock.patch.object(time, "sleep", self.sleep),
        ):
            yield


class _Clock(Clock):
    def __init__(self, time_: VirtualTime) -> None:
        super().__init__()
        self._time = time_

    def now(self) -> float:
        return START + self._time.now


class _Device:
    """Computes steps, one after another."""

    def __init__(self, machine: Machine, time_: VirtualTime) -> None:
        self.machine, self.time, self.free_at = machine, time_, 0.0
        self.busy_s = self.prefill_s = 0.0

    def begin(self, rows: Sequence[BatchRow], not_before: float) -> tuple[float, float]:
        """Issue a step; return when it begins and ends."""
        began = max(self.time.now, self.free_at, not_before)
        seconds = self.machine.seconds(rows)
        self.free_at = began + seconds
        self.busy_s += seconds
        if any(len(row.token_ids) > 1 for row in rows):
            self.prefill_s += seconds
        return began, self.free_at


class _Runner:
    """Stands in for the model runner: every token that it samples is token 1."""

    def __init__(self, device: _Device, vocab_size: int) -> None:
        self._device, self._vocab_size = device, vocab_size
        self.last = 0.0, 0.0

    def execute(self, rows: Sequence[BatchRow], late_at: float | None = None) -> StepOutput:
        self._device.time.sleep(self._device.machine.issue_s)
        self.last = self._device.begin(rows, late_at or 0.0)
        count = sum(row.needs_logits for row in rows)
        tokens = torch.ones(count, dtype=torch.int64)
        return StepOutput(torch.empty(count, 0), tokens, tokens)

    def synchronize(self) -> None:
        self._device.time.now = max(self._device.time.now, self._device.free_at)


class _Moment:
    """Stands in for a CUDA event."""

    def __init__(self, time_: VirtualTime, at: float) -> None:
        self._time, self.at = time_, at

    def query(self) -> bool:
        return self.at <= self._time.now

    def elapsed_time(self, other: "_Moment") -> float:
        return 1e3 * (other.at - self.at)


class _Timer(StepTimer):
    """Times steps as on CUDA: a step's time is known once it has ended."""

    def __init__(self, rate: ComputeRate, runner: _Runner, time_: VirtualTime) -> None:
        super().__init__(rate, torch.device("cpu"))
        self._runner, self._time = runner, time_

    def end(self, rows: Sequence[BatchRow], *, teaches: bool = True) -> None:
        work = Work.of(rows)
        began, ended = (_Moment(self._time, at) for at in self._runner.last)
        predicted_s = self._rate.step_seconds(*work)
        self._steps.append(_Step(work, predicted_s, teaches, began, ended))  # type: ignore[arg-type]


@dataclass
class _Copy:
    tag: Any
    num_bytes: int
    began: float
    early: float
    ended: float


class _Link(DeviceLink[Any]):
    """Copies of both directions, each direction at its own rate, one copy after another."""

    def __init__(self, device: _Device, block_bytes: int, early_share: float) -> None:
        self._device, self._block_bytes, self._early_share = device, block_bytes, early_share
        self._up: deque[_Copy] = deque()
        self._down: deque[_Copy] = deque()
        self._up_free = self._down_free = 0.0
        self._num_usable = self.num_steps = 0
        self._step_ends = [0.0]
        self._promoted_bytes, self._promoted_s = 0, 0.0

    @property
    def has_pending(self) -> bool:
        return bool(self._up or self._down)

    @property
    def has_completed(self) -> bool:
        now = self._device.time.now
        return any(queue and queue[0].ended <= now for queue in (self._up, self._down)) or any(
            copy.early <= now
            for copy in itertools.islice(self._up, self._num_usable, self._num_usable + 1)
        )

    def note_step(self) -> None:
        self.num_steps += 1
        self._step_ends.append(self._device.free_at)

    def promote(self, pairs: Sequence[tuple[PageId, BlockId]], tag: Any, *, after: int = 0) -> None:
        rate = self._device.machine.up_GBps * 1e9
        num_bytes = len(pairs) * self._block_bytes
        began = max(self._device.time.now, self._up_free, self._step_ends[after])
        ended = self._up_free = began + num_bytes / rate
        is_split = num_bytes >= MIN_SPLIT_BYTES
        early = began + self._early_share * num_bytes / rate if is_split else math.inf
        self._up.append(_Copy(tag, num_bytes, began, early, ended))

    def demote(self, pairs: Sequence[tuple[BlockId, PageId]], tag: Any, *, after: int = 0) -> None:
        num_bytes = len(pairs) * self._block_bytes
        began = max(self._device.time.now, self._down_free, self._step_ends[after])
        self._down_free = began + num_bytes / (self._device.machine.down_GBps * 1e9)
        self._down.append(_Copy(tag, num_bytes, began, math.inf, self._down_free))

    def poll_usable(self) -> list[Any]:
        tags, now = [], self._device.time.now
        for copy in itertools.islice(self._up, self._num_usable, None):
            if copy.early > now:
                break
            tags.append(copy.tag)
        self._num_usable += len(tags)
        return tags

    @property
    def late_event(self) -> Any:
        return self._up[self._num_usable - 1].ended if self._num_usable else None

    def poll(self) -> tuple[list[Any], list[Any]]:
        promoted, demoted = self._ended(self._up), self._ended(self._down)
        self._num_usable = max(0, self._num_usable - len(promoted))
        for copy in promoted:
            if copy.num_bytes >= MIN_SPLIT_BYTES:
                self._promoted_bytes += copy.num_bytes
                self._promoted_s += copy.ended - copy.began
        return [copy.tag for copy in promoted], [copy.tag for copy in demoted]

    def _ended(self, copies: deque[_Copy]) -> list[_Copy]:
        ended = []
        while copies and copies[0].ended <= self._device.time.now:
            ended.append(copies.popleft())
        return ended

    def synchronize(self) -> None:
        last = max((copy.ended for copy in (*self._up, *self._down)), default=0.0)
        self._device.time.now = max(self._device.time.now, last)


class Disk(StoreClient):
    """The disk tier: a table of records, and one device that reads and writes.

    While there are reads, writes get their share (`write_share`). The block used the longest ago is
    evicted for room.

    Attributes:
        read_GBps: the device's rate; it may be changed at any time.
        bytes_read, bytes_written: so far.
    """

    def __init__(self, device: _Device, num_blocks: int) -> None:
        self._device, self._num_blocks = device, num_blocks
        self.read_GBps = device.machine.read_GBps
        self.records: OrderedDict[bytes, BlockRecord] = OrderedDict()
        self.shares: dict[bytes, float] = {}
        self._numbers = itertools.count(1)
        self._answers: deque[tuple[float, LookupDone]] = deque()
        self._reads: deque[LentPage] = deque()
        self._writes: deque[LentPage] = deque()
        self._done: deque[tuple[float, Event]] = deque()
        self._left = {"read": 0.0, "write": 0.0}
        self._at = device.time.now
        self.bytes_read = self.bytes_written = 0

    def _advance(self) -> None:
        """Read and write until now."""
        now = self._device.time.now
        while self._at < now:
            queues = {"read": self._reads, "write": self._writes}
            shares = {name: float(bool(queue)) for name, queue in queues.items()}
            if all(shares.values()):
                shares = {"read": 1 - WRITE_SHARE, "write": WRITE_SHARE}
            ends = {
                name: self._at + max(0.0, self._left[name]) / (share * self.read_GBps * 1e9)
                for name, share in shares.items()
                if share
            }
            if not ends:
                self._at = now
                return
            name = min(ends, key=ends.__getitem__)
            until = min(now, ends[name])
            for each in ends:
                moved = (until - self._at) * shares[each] * self.read_GBps * 1e9
                self._left[each] -= moved
            self._at = until
            if until < ends[name]:
                return
            page = queues[name].popleft()
            self._left[name] = float(queues[name][0].record.size_bytes) if queues[name] else 0.0
            (self._finish_read if name == "read" else self._finish_write)(page)

    def _finish_read(self, page: LentPage) -> None:
        record = self.records.get(page.record.block_hash)
        self.bytes_read += page.record.size_bytes
        at = self._at + self._device.machine.read_s
        reason = "" if record is not None else "missing"
        event = PageLoaded(page.record.block_hash, page.page_id, reason, record, at)
        self._done.append((at, event))

    def _finish_write(self, page: LentPage) -> None:
        while len(self.records) >= self._num_blocks:
            self.records.popitem(last=False)
        self.records[page.record.block_hash] = page.record
        self.bytes_written += page.record.size_bytes
        ids = page.record.block_hash, page.page_id
        event = PageStored(*ids, "", is_held_back=bool(self._reads), ended_at=self._at)
        self._done.append((self._at, event))

    def lookup(self, hashes: Sequence[bytes]) -> int:
        self._advance()
        job, found = next(self._numbers), {}
        for block_hash in hashes:
            if (record := self.records.get(block_hash)) is not None:
                located = Located(record, Extent(1, 0), record.size_bytes, bytes(16))
                found[block_hash] = encode_record(located)
        at = self._device.time.now + self._device.machine.lookup_s
        self._answers.append((at, LookupDone(job, found)))
        return job

    def load(self, pages: Sequence[LentPage]) -> None:
        self._queue("read", self._reads, pages)

    def store(self, pages: Sequence[LentPage]) -> None:
        self._queue("write", self._writes, pages)

    def _queue(self, name: str, queue: deque[LentPage], pages: Sequence[LentPage]) -> None:
        self._advance()
        if not queue:
            self._left[name] = float(pages[0].record.size_bytes)
        queue.extend(pages)

    def touch(self, items: Sequence[TouchItem]) -> None:
        for item in items:
            if item.block_hash in self.records:
                self.records.move_to_end(item.block_hash)

    def delete(self, hashes: Sequence[bytes], reason: str) -> None:
        for block_hash in hashes:
            self.records.pop(block_hash, None)

    @property
    def has_due(self) -> bool:
        """Whether `poll` has something to report."""
        self._advance()
        now = self._device.time.now
        return any(queue and queue[0][0] <= now for queue in (self._answers, self._done))

    def poll(self) -> list[Event]:
        self._advance()
        events: list[Event] = []
        for queue in (self._answers, self._done):
            while queue and queue[0][0] <= self._device.time.now:
                events.append(queue.popleft()[1])
        return events

    def stats(self) -> StoreStats:
        return NO_STATS

    @property
    def trouble(self) -> str:
        return ""

    @property
    def pid(self) -> int | None:
        return None

    def close(self, timeout_s: float = 30.0) -> None:
        pass


class _Wake(threading.Event):
    """What the engine's thread waits for; waiting lets time pass."""

    def __init__(self, time_: VirtualTime, has_due: Callable[[], bool]) -> None:
        super().__init__()
        self._time, self._has_due = time_, has_due

    def is_set(self) -> bool:
        return super().is_set() or self._has_due()

    def wait(self, timeout: float | None = None) -> bool:
        until = self._time.now + (timeout or 0.0)
        while not self.is_set() and self._time.now < until:
            self._time.sleep(min(WAKE_S, until - self._time.now))
        return self.is_set()


class ModelledCore(EngineCore):
    """The engine with a modelled device, links and disk.

    Attributes:
        time: the time of the machine.
        disk: its disk; None without a disk tier.
    """

    def __init__(self, settings: Settings, machine: Machine, time_: VirtualTime) -> None:
        self.machine, self.time = machine, time_
        super().__init__(settings)

    def _build(self, settings: Settings, progress: Progress, stack: contextlib.ExitStack) -> None:
        found = find_model(settings.model, dtype="bfloat16", device="cpu")
        spec = self.kv_spec = found.kv_spec(settings.block_size)
        self.model = SimpleNamespace(  # type: ignore[assignment]
            name=found.name,
            fingerprint=bytes(32),
            vocab_size=found.vocab_size,
            max_model_len=found.max_model_len,
            eos_token_ids=frozenset(),
            device=torch.device("cpu"),
        )
        self._choice = TokenChoice()
        assert settings.device_size is not None
        num_blocks = settings.device_size // spec.block_bytes
        self._max_model_len = min(found.max_model_len, num_blocks * spec.block_size)
        device = self.device = _Device(self.machine, self.time)
        self.disk = None
        if settings.disk_dir is not None:
            self.disk = Disk(device, settings.disk_size // spec.block_bytes)
        link = _Link(device, spec.block_bytes, early_share=0.5)
        num_pages = settings.host_size // spec.page_bytes
        self._connect(link, self.disk, num_blocks, num_pages, "cuda")
        self.tiers.clock = _Clock(self.time)
        self._runner = _Runner(device, found.vocab_size)  # type: ignore[assignment]
        self._timer = _Timer(self.tiers.compute_rate, self._runner, self.time)  # type: ignore
        disk = self.disk
        self._wake = _Wake(self.time, lambda: disk is not None and disk.has_due)
        self._rate_file = None
        self._ends: deque[float] = deque()
        self._learn_steps(settings.resolve_max_num_alone_tokens("cuda"))

    def _learn_steps(self, most_tokens: int) -> None:
        """Learn steps of several sizes and positions, as the engine does at its start."""
        sizes = [max(1, most_tokens >> shift) for shift in (0, 2, 4, 6)]
        shapes = [(size, 0) for size in sizes]
        for size, start in [*shapes, (sizes[-1], self._max_model_len - sizes[-1])]:
            seconds = max(self.machine.step_s, size * self.machine.token_s)
            seconds += self.machine.pair_s * pairs(start, start + size)
            self.tiers.compute_rate.learn(size, pairs(start, start + size), seconds)
        self.tiers.compute_rate.learn(1, 0.0, self.machine.step_s)

    def _launch(self, scheduled: Any) -> Any:
        launched = super()._launch(scheduled)
        if launched is not None:
            self._ends.append(self._runner.last[1])  # type: ignore[attr-defined]
        return launched

    def _collect(self) -> None:
        if self._launched is not None:
            self.time.now = max(self.time.now, self._ends.popleft())
        super()._collect()

    def step(self) -> list[TokenOutput]:
        self.time.sleep(POLL_S)
        return super().step()
