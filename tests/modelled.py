"""An engine on a modelled machine: everything that decides is real, and only time is computed.

Requests, scheduler, planner, pools and queues are those of the engine. Steps, copies and the disk
move no bytes: each takes as long as it would at the rates of the machine, in a time of its own that
passes only while the engine waits. So minutes of a GPU's work are replayed in seconds, always with
the same result.

Inside `VirtualTime.patched`, the functions of the module `time` are those of the modelled machine.
"""

import contextlib
import heapq
import itertools
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest import mock

import torch

from tests.fake_tier import FakeTier
from tieredkv.cache.chain import Chain
from tieredkv.cache.compute_rate import ComputeRate
from tieredkv.cache.device_link import MIN_SPLIT_BYTES, DeviceLink, _Pending, time_link
from tieredkv.cache.requests import Admission, TieredCache
from tieredkv.config import Settings
from tieredkv.engine import core
from tieredkv.engine.attention import early_bytes
from tieredkv.engine.core import EngineCore
from tieredkv.engine.engine_messages import EngineRequest, TokenOutput
from tieredkv.engine.graphs import MIXED_SIZES
from tieredkv.engine.loader import LoadedModel, find_model
from tieredkv.engine.parts import Parts, make_scheduler, make_tiers, share_blocks
from tieredkv.engine.profile import time_steps
from tieredkv.engine.runner import ModelRunner
from tieredkv.engine.sampling_params import TokenChoice
from tieredkv.engine.step_buffers import BatchRow, StepOutput
from tieredkv.engine.step_plan import ScheduledRow
from tieredkv.engine.step_timer import StepTimer, Work, _Step
from tieredkv.kernels.copies import BlockCopier
from tieredkv.steps import pairs
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.worker.pace import WRITE_SHARE
from tieredkv.tier import BlockLife, Event, Gone, Held, Lent, Loaded, LookupDone, Stored, TouchItem
from tieredkv.types import BlockId, BlockRecord, PageId

WALL_TIME = 1_800_000_000.0
STEP_S = 1e-5
"""What a call of `EngineCore.step` costs the engine's thread."""

BUSY_DEVICE_POLL_S = 0.004
"""How often the engine looks at its links; what ends wakes it earlier."""


class Machine(NamedTuple):
    """How fast a machine serves a model.

    The time of a step is the greater of `step_s` and its prompt tokens at `token_s`, and `pair_s`
    for each pair of a prompt's token and a token before it, and `decode_s` for each token before a
    token that is generated.

    Attributes:
        up_GBps, down_GBps: of copies from and to host memory.
        first_copy_s: for how much longer the first copy takes, which loads what copies need.
        read_GBps: of the disk, which reads and writes share.
        read_s: latency of a read.
        lookup_s: time until the disk has answered a lookup.
        issue_s: time for which issuing a step keeps the engine's thread; the device begins then.
        issue_long_s: time for which the thread is kept beyond that by a step that no graph holds.
        issue_token_s: the same for each of its prompt tokens.
        block_s: time for which the thread is kept by a block of a request that comes, and by one of
            a request that is admitted.
        is_cpu: whether the processor is the device, so that steps and copies keep the thread.
        arrival_s: time for which the thread is kept by a block that has come from disk.
    """

    step_s: float = 0.006
    token_s: float = 2.4e-5
    pair_s: float = 7.3e-10
    decode_s: float = 3.3e-8
    up_GBps: float = 50.0
    down_GBps: float = 50.0
    first_copy_s: float = 0.12
    read_GBps: float = 2.7
    read_s: float = 0.001
    lookup_s: float = 0.001
    issue_s: float = 0.001
    issue_long_s: float = 0.021
    issue_token_s: float = 1e-6
    block_s: float = 2e-6
    is_cpu: bool = False
    arrival_s: float = 0.0

    @property
    def device_type(self) -> str:
        """The type of the device, as torch calls it."""
        return "cpu" if self.is_cpu else "cuda"

    def num_tokens(self, rows: Sequence[BatchRow]) -> int:
        """Return the number of prompt tokens of a step."""
        return sum(len(row.token_ids) for row in rows if len(row.token_ids) > 1)

    def more_issue_s(self, rows: Sequence[BatchRow]) -> float:
        """Return for how long the thread is kept by a step after the device has begun with it."""
        is_long = sum(len(row.token_ids) for row in rows) > MIXED_SIZES[-1]
        return is_long * self.issue_long_s + self.issue_token_s * self.num_tokens(rows)

    def seconds(self, rows: Sequence[BatchRow]) -> float:
        """Return the time of a step."""
        more_s = 0.0
        for row in rows:
            count = len(row.token_ids)
            if count > 1:
                more_s += self.pair_s * pairs(row.start, row.start + count)
            else:
                more_s += self.decode_s * row.start
        return max(self.step_s, self.num_tokens(rows) * self.token_s) + more_s


H200_8B = Machine()
"""One H200 with Llama-3.1-8B shapes, roughly as docs/compute-or-load.md measured it."""

TWO_CORES = Machine(
    step_s=0.002,
    token_s=4e-5,
    pair_s=6e-8,
    up_GBps=2.0,
    down_GBps=2.0,
    read_GBps=0.2,
    issue_s=0.0,
    issue_long_s=0.0,
    issue_token_s=0.0,
    is_cpu=True,
    arrival_s=2e-4,
)
"""Two processor cores with `tiny-random`, roughly."""


class VirtualTime:
    """The time of a modelled machine.

    Attributes:
        now: seconds since some moment.
        wall_time: what the wall clock shows at moment 0.
    """

    def __init__(self) -> None:
        self.now, self.wall_time = 1000.0, WALL_TIME

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += max(0.0, seconds)

    def wait_until(self, moment: float) -> None:
        """Let time pass until a moment, if it has not come yet."""
        self.now = max(self.now, moment)

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Give this time to everything that asks the module `time`.

        What ends on the machine wakes the engine, so that it need not look at its links as often as
        a real one.
        """
        times: dict[str, Callable[..., float | None]] = {
            "monotonic": lambda: self.now,
            "perf_counter": lambda: self.now,
            "time": lambda: self.wall_time + self.now,
            "sleep": self.sleep,
        }
        with contextlib.ExitStack() as stack:
            for name, function in times.items():
                stack.enter_context(mock.patch.object(time, name, function))
            stack.enter_context(mock.patch.object(core, "IDLE_DEVICE_POLL_S", math.inf))
            stack.enter_context(mock.patch.object(core, "BUSY_DEVICE_POLL_S", BUSY_DEVICE_POLL_S))
            yield


class _Moment:
    """Stands in for a CUDA event."""

    def __init__(self, time_: VirtualTime, at: float) -> None:
        self._time, self.at = time_, at

    def query(self) -> bool:
        return self.at <= self._time.now

    def elapsed_time(self, other: "_Moment") -> float:
        return 1e3 * (other.at - self.at)


class _Device:
    """Computes steps, one after another.

    Attributes:
        free_at: when the steps that were issued have ended.
        last: when the last of them begins and ends.
        busy_s, prefill_s: time of all steps, and of those that compute prompts.
    """

    def __init__(self, machine: Machine, time_: VirtualTime, late_share: float) -> None:
        self.machine, self.time, self.free_at = machine, time_, 0.0
        self.last = self.moment(0.0), self.moment(0.0)
        self.busy_s = self.prefill_s = 0.0
        self._late_share = late_share

    def moment(self, at: float) -> Any:
        """Return what stands in for the event of a moment."""
        return _Moment(self.time, at)

    def begin(self, rows: Sequence[BatchRow], late_at: float) -> None:
        """Issue a step, whose late layers wait until `late_at`."""
        self.time.sleep(self.machine.issue_s)
        began, seconds = max(self.time.now, self.free_at), self.machine.seconds(rows)
        self.time.sleep(self.machine.more_issue_s(rows))
        self.free_at = max(began + seconds, late_at + self._late_share * seconds, self.time.now)
        self.last = self.moment(began), self.moment(self.free_at)
        if self.machine.is_cpu:
            self.time.wait_until(self.free_at)
        self.busy_s += seconds
        if any(len(row.token_ids) > 1 for row in rows):
            self.prefill_s += seconds


class _Runner:
    """Stands in for the model runner: every token that it samples is token 1."""

    def __init__(self, device: _Device) -> None:
        self._device = device

    def execute(self, rows: Sequence[BatchRow], late_event: _Moment | None = None) -> StepOutput:
        self._device.begin(rows, late_event.at if late_event is not None else 0.0)
        count = sum(row.needs_logits for row in rows)
        tokens = torch.ones(count, dtype=torch.int64)
        return StepOutput(torch.empty(count, 0), tokens, tokens)

    def synchronize(self) -> None:
        self._device.time.wait_until(self._device.free_at)


class _Timer(StepTimer):
    """Times steps as on CUDA: a step's time is known once it has ended."""

    def __init__(self, rate: ComputeRate, device: _Device) -> None:
        super().__init__(rate, torch.device("cpu"))
        self._device = device

    def end(self, rows: Sequence[BatchRow], *, teaches: bool = True) -> None:
        work = Work.of(rows)
        self._learn_issue(work)
        predicted_s = self.rate.step_seconds(*work)
        self._steps.append(_Step(work, predicted_s, teaches, *self._device.last))


class _Link(DeviceLink[Any]):
    """Copies of both directions, each direction at its own rate, one copy after another."""

    def __init__(self, device: _Device, block_bytes: int, early_bytes: int) -> None:
        copier = SimpleNamespace(device=torch.device("cpu"), block_bytes=block_bytes)
        super().__init__(cast(BlockCopier, copier), early_bytes=early_bytes)
        self._device, self._step_ends = device, [0.0]
        self._first_copy_s = device.machine.first_copy_s
        self._early_share = early_bytes / block_bytes

    @property
    def next_due(self) -> float:
        """When `poll` or `poll_usable` will have something to report; infinite if nothing moves."""
        times = [copies[0].event for copies in (self._promotions, self._demotions) if copies]
        if len(self._promotions) > self._num_usable:
            times.append(self._promotions[self._num_usable].early)
        return min((it.at for it in cast(list[Any], times) if it is not None), default=math.inf)

    def note_step(self) -> None:
        self.num_steps += 1
        self._step_ends.append(self._device.free_at)

    def promote(self, pairs: Sequence[tuple[PageId, BlockId]], tag: Any, *, after: int = 0) -> None:
        self._move(self._promotions, len(pairs), self._device.machine.up_GBps, tag, after)

    def demote(self, pairs: Sequence[tuple[BlockId, PageId]], tag: Any, *, after: int = 0) -> None:
        self._move(self._demotions, len(pairs), self._device.machine.down_GBps, tag, after)

    def _move(
        self, copies: deque[_Pending[Any]], count: int, GBps: float, tag: Any, after: int
    ) -> None:
        moment, num_bytes = self._device.moment, count * self._copier.block_bytes
        before = cast(Any, copies[-1].event).at if copies else 0.0
        began = max(self._device.time.now, before, self._step_ends[after])
        seconds = num_bytes / (GBps * 1e9) + self._first_copy_s
        self._first_copy_s = 0.0
        is_split = copies is self._promotions and num_bytes >= MIN_SPLIT_BYTES
        early = moment(began + self._early_share * seconds) if is_split else None
        ended = moment(began + seconds)
        copies.append(_Pending(ended, tag, early, num_bytes, moment(began)))
        if self._device.machine.is_cpu:
            self._device.time.wait_until(ended.at)

    def synchronize(self) -> None:
        for copy in (*self._promotions, *self._demotions):
            self._device.time.wait_until(cast(Any, copy.event).at)


@dataclass
class _Queue:
    """What the disk was given to read, or to write.

    Attributes:
        width: how many pages are moved at once, at equal shares of the rate.
        pages: each with the bytes that are left of it.
    """

    width: int
    pages: deque[tuple[Lent, list[float]]] = field(default_factory=deque)

    def add(self, pages: Sequence[Lent]) -> None:
        self.pages.extend((page, [float(page.size_bytes)]) for page in pages)

    @property
    def next_bytes(self) -> float:
        """How many bytes are moved until the next page has ended."""
        active = self._active
        return max(0.0, min(left[0] for _, left in active)) * len(active)

    def move(self, num_bytes: float) -> None:
        """Move so many bytes of the pages that are moved at once."""
        active = self._active
        for _, left in active:
            left[0] -= num_bytes / len(active)

    def pop(self) -> Lent:
        """Take out the page that has ended."""
        page, left = min(self._active, key=lambda each: each[1][0])
        self.pages.remove((page, left))
        return page

    @property
    def _active(self) -> list[tuple[Lent, list[float]]]:
        return list(itertools.islice(self.pages, self.width))


class Disk(FakeTier):
    """The disk tier: a table of records, and one device that reads and writes.

    It tells which blocks it has. While there are reads, writes get their share (`write_share`). The
    block used the longest ago is evicted for room.

    Attributes:
        records: of the blocks that it holds, the one used the longest ago first.
        bytes_read, bytes_written: so far.
    """

    def __init__(self, device: _Device, num_blocks: int) -> None:
        super().__init__()
        self._device, self._num_blocks = device, num_blocks
        self._GBps = device.machine.read_GBps
        self.records: OrderedDict[bytes, BlockRecord] = OrderedDict()
        self._numbers = itertools.count(1)
        self._events: list[tuple[float, int, Event]] = []
        self._reads, self._writes = _Queue(StoreOptions(path="").num_readers), _Queue(1)
        self._at = device.time.now
        self.bytes_read = self.bytes_written = 0
        self._add_event(self._at, Held(is_first=True, is_whole=True))

    @property
    def is_full(self) -> bool:
        """Whether it has to evict a block for each further one."""
        return len(self.records) >= self._num_blocks

    @property
    def GBps(self) -> float:
        """The device's rate; it may be changed at any time."""
        return self._GBps

    @GBps.setter
    def GBps(self, GBps: float) -> None:
        self._advance()
        self._GBps = GBps

    def _ends(self) -> dict[str, tuple[_Queue, float, float]]:
        """Return each queue that has pages, its rate, and when its first page ends."""
        rate = self._GBps * 1e9
        reads, writes = rate, rate
        if self._reads.pages and self._writes.pages:
            reads, writes = (1 - WRITE_SHARE) * rate, WRITE_SHARE * rate
        rates = {"read": (self._reads, reads), "write": (self._writes, writes)}
        return {
            name: (queue, rate, self._at + queue.next_bytes / rate)
            for name, (queue, rate) in rates.items()
            if queue.pages
        }

    def _advance(self) -> None:
        """Read and write until now."""
        now = self._device.time.now
        while self._at < now and (ends := self._ends()):
            name = min(ends, key=lambda each: ends[each][2])
            until = min(now, ends[name][2])
            for queue, rate, _ in ends.values():
                queue.move((until - self._at) * rate)
            self._at = until
            if until < ends[name][2]:
                break
            page = ends[name][0].pop()
            (self._finish_read if name == "read" else self._finish_write)(page)
        self._at = now

    @property
    def next_due(self) -> float:
        """When `poll` will have something to report; infinite if nothing is under way."""
        self._advance()
        latency_s = {"read": self._device.machine.read_s, "write": 0.0}
        times = [end + latency_s[name] for name, (_, _, end) in self._ends().items()]
        times += [self._events[0][0]] if self._events else []
        return min(times, default=math.inf)

    def _add_event(self, at: float, event: Event) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), event))

    def _finish_read(self, page: Lent) -> None:
        record = self.records.get(page.block_hash)
        self.bytes_read += page.size_bytes
        at = self._at + self._device.machine.read_s
        reason = "" if record is not None else "missing"
        life = None if record is None else BlockLife.of(record)
        event = Loaded(page.page_id, reason, life, at)
        self._add_event(at, event)

    def _finish_write(self, page: Lent) -> None:
        while self.is_full:
            block_hash, record = self.records.popitem(last=False)
            self._add_event(self._at, Gone([block_hash], "capacity", record.size_bytes))
        record = self.records[page.block_hash] = page.record
        self.bytes_written += page.size_bytes
        self._add_event(self._at, Held.of({page.block_hash: record.expires_at}))
        event = Stored(page.page_id, "", is_held_back=bool(self._reads.pages), ended_at=self._at)
        self._add_event(self._at, event)

    def lookup(self, hashes: Sequence[bytes]) -> int:
        self._advance()
        job, found = next(self._numbers), {}
        for block_hash in hashes:
            if (record := self.records.get(block_hash)) is not None:
                found[block_hash] = self.found(record)
        self._add_event(
            self._device.time.now + self._device.machine.lookup_s, LookupDone(job, found)
        )
        return job

    def load(self, pages: Sequence[Lent]) -> None:
        self._advance()
        self._reads.add([page for page in pages if page.block_hash in self.records])
        at = self._device.time.now + self._device.machine.lookup_s
        for page in pages:
            if page.block_hash not in self.records:  # found out before anything is read
                self._add_event(at, Loaded(page.page_id, "missing", None, at))

    def store(self, pages: Sequence[Lent]) -> None:
        self._advance()
        self._writes.add(pages)

    def touch(self, items: Sequence[TouchItem]) -> None:
        for item in reversed(items):  # a tail is evicted before its head
            if item.block_hash in self.records:
                self.records.move_to_end(item.block_hash)

    def delete(self, hashes: Sequence[bytes], reason: str) -> None:
        for block_hash in hashes:
            if (record := self.records.pop(block_hash, None)) is not None:
                gone = Gone([block_hash], reason, record.size_bytes)
                self._add_event(self._device.time.now, gone)

    def poll(self) -> list[Event]:
        self._advance()
        events: list[Event] = []
        while self._events and self._events[0][0] <= self._device.time.now:
            events.append(heapq.heappop(self._events)[-1])
        num_arrived = sum(isinstance(event, Loaded) for event in events)
        self._device.time.sleep(num_arrived * self._device.machine.arrival_s)
        return events


class _Wake(threading.Event):
    """What the engine's thread waits for: time jumps to when something on the machine ends."""

    def __init__(self, time_: VirtualTime, next_due: Callable[[], float]) -> None:
        super().__init__()
        self._time, self._next_due = time_, next_due

    def is_set(self) -> bool:
        return super().is_set() or self._next_due() <= self._time.now

    def wait(self, timeout: float | None = None) -> bool:
        if not super().is_set():
            now = self._time.now
            until = math.inf if timeout is None else now + timeout
            self._time.wait_until(max(now + STEP_S, min(until, self._next_due())))
        return self.is_set()


class ModelledCore(EngineCore):
    """The engine with a modelled device, links and disk.

    Attributes:
        time: the time of the machine.
        device: what computes.
        disk: the disk tier; None without one.
    """

    def __init__(self, settings: Settings, machine: Machine, time_: VirtualTime) -> None:
        self.machine, self.time = machine, time_
        self._ends: deque[float] = deque()  # of the steps whose tokens were not taken in
        super().__init__(settings, build=self._model_parts)
        waited_for: list[_Link | Disk] = [cast(_Link, self.parts.tiers.device_link)]
        waited_for += [self.disk] if self.disk is not None else []
        self._wake = _Wake(self.time, lambda: min(it.next_due for it in waited_for))

    def _model_parts(self, settings: Settings, *_: object, **__: object) -> Parts:
        found = find_model(settings.model, dtype="bfloat16", device="cpu")
        spec = found.kv_spec(settings.block_size)
        model = SimpleNamespace(
            name=found.name,
            fingerprint=bytes(32),
            vocab_size=found.vocab_size,
            max_model_len=found.max_model_len,
            eos_token_ids=frozenset(),
            device=torch.device("cpu"),
        )
        assert settings.device_size is not None
        num_blocks = settings.device_size // spec.block_bytes
        most_chunk, num_for_chains = share_blocks(spec, num_blocks)
        max_model_len = min(found.max_model_len, num_for_chains * spec.block_size)
        first_bytes = early_bytes(spec)
        self.device = _Device(self.machine, self.time, 1 - first_bytes / spec.block_bytes)
        self.disk = None
        if settings.disk_dir is not None:
            self.disk = Disk(self.device, settings.disk_size // spec.block_bytes)
        link = _Link(self.device, spec.block_bytes, first_bytes)
        num_pages = settings.host_size // spec.page_bytes
        device_type = self.machine.device_type
        tiers = make_tiers(settings, spec, link, self.disk, num_blocks, num_pages, device_type)
        cache = TieredCache(tiers)
        admit = cache.admit

        def admit_timed(chain: Chain, num_blocks: int, **options: bool) -> Admission:
            found = admit(chain, num_blocks, **options)
            self.time.sleep(bool(found) * num_blocks * self.machine.block_s)
            return found

        cache.admit = admit_timed  # type: ignore[method-assign]
        runner = cast(ModelRunner, _Runner(self.device))
        timer = _Timer(tiers.compute_rate, self.device)
        time_steps(
            runner,
            timer,
            most_tokens=settings.resolve_max_num_alone_tokens(device_type),
            max_model_len=max_model_len,
            is_cpu=self.machine.is_cpu,
        )
        time_link(link, min(num_blocks, num_pages), spec.block_bytes)
        return Parts(
            model=cast(LoadedModel, model),
            spec=spec,
            choice=TokenChoice(),
            max_model_len=max_model_len,
            device_blocks=torch.empty(num_blocks, 0, dtype=torch.uint8),  # no bytes are modelled
            runner=runner,
            timer=timer,
            tiers=tiers,
            cache=cache,
            scheduler=make_scheduler(settings, cache, spec.block_size, device_type, most_chunk),
            rate_file=None,
        )

    def add_request(self, asked: EngineRequest) -> None:
        num_blocks = len(asked.prompt_token_ids) // self.kv_spec.block_size
        self.time.sleep(self.machine.block_s * num_blocks)
        super().add_request(asked)

    def _launch(self, scheduled: list[ScheduledRow]) -> core._Launched | None:
        launched = super()._launch(scheduled)
        if launched is not None:
            self._ends.append(self.device.free_at)
        return launched

    def _collect(self) -> None:
        if self._launched is not None:
            self.time.wait_until(self._ends.popleft())
        super()._collect()

    def step(self) -> list[TokenOutput]:
        self.time.sleep(STEP_S)
        return super().step()
