"""Decides for each request of another engine whether its head is loaded, and learns from it.

This module knows requests by their names, heads by their size, and the rates. It does not know the
engine, whose thread calls it, nor what chunks are.
"""

import contextlib
import glob
import logging
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tieredkv.cache.compute_rate import ComputeRate
from tieredkv.cache.link_rate import LinkRate, Probes
from tieredkv.cache.rate_file import Machine, RateFile, disk_name
from tieredkv.cache.step_times import Step, StepTimes
from tieredkv.config import Restore
from tieredkv.errors import ConfigError
from tieredkv.integrations.prefill_meter import PrefillMeter, fitted
from tieredkv.integrations.restore_choice import Choice, Facts, LoggedChoice, choose
from tieredkv.integrations.row_store import RowStore
from tieredkv.steps import pairs
from tieredkv.storage.folder.marker import MARKER

logger = logging.getLogger(__name__)

COPY_BYTES_PER_S = 20e9
"""How fast the engine is taken to copy from its host memory to its device. It is not told of
copies; one that is slower makes what is measured as `ProtocolTime` longer.
"""

FIRST_PROTOCOL_S = 0.03
"""How long that is before anything was measured."""

_RELAX_S = 300.0
"""After this time without a load, a measured time is halfway back to the first assumption."""

_NUM_KEPT = 5

PROBE_S = 0.05
LEAST_PROBE_BYTES, MOST_PROBE_BYTES = 32 << 20, 128 << 20
"""A probe reads as much as the disk is taken to read in `PROBE_S`, within these bounds."""


@dataclass(slots=True)
class ProtocolTime:
    """How long the engine takes from the last byte of a load until it goes on with the request.

    It asks once in each step whether loads have ended, copies to its device and schedules the
    request. The time of the copy is not part of it, as far as it is known.
    """

    _measured: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    _learnt_at: float = 0.0

    def learn(self, seconds: float, now: float) -> None:
        """Take in a measurement."""
        self._measured.append(max(0.0, seconds))
        self._learnt_at = now

    def seconds(self, now: float) -> float:
        """Return the median of the last measurements, the less the longer ago they were made."""
        if not self._measured:
            return FIRST_PROTOCOL_S
        share: float = 0.5 ** ((now - self._learnt_at) / _RELAX_S)
        return FIRST_PROTOCOL_S + share * (statistics.median(self._measured) - FIRST_PROTOCOL_S)


@dataclass(slots=True)
class _Load:
    """A load that was chosen for a request, until the engine goes on with that."""

    choice: Choice
    began_at: float
    num_bytes: int = 0
    ended_at: float = 0.0  # its last byte


@dataclass(slots=True)
class RestoreChooser:
    """The choices of one tier, and the rates that they follow from.

    Attributes:
        restore: the operator's setting.
        rows: the disk, and its rate.
        given: how long prompts take, as the operator says; None to learn it.
        meter: learns it in any case.
        chunk_tokens: tokens of a chunk.
        row_bytes: bytes of a chunk.
        clock: monotonic time in seconds.
        predicted_s, measured_s: from choices to load until the engine went on, in all.
    """

    restore: Restore
    rows: RowStore
    given: StepTimes | None
    meter: PrefillMeter
    chunk_tokens: int
    row_bytes: int
    clock: Callable[[], float] = time.monotonic
    protocol: ProtocolTime = field(default_factory=ProtocolTime)
    predicted_s: float = 0.0
    measured_s: float = 0.0
    _probes: Probes = field(default_factory=Probes)
    _loads: dict[str, _Load] = field(default_factory=dict)

    @property
    def times(self) -> StepTimes | None:
        """How long prompts take, if that is known."""
        return self.given or self.meter.times

    def choose(
        self, request: str, begin: int, end: int, num_tokens: int, hashes: Sequence[bytes], num: int
    ) -> Choice:
        """Choose for one request.

        Args:
            request: its name.
            begin: first token of the head.
            end: behind the last one.
            num_tokens: of the request, as far as they are known.
            hashes: chunks of the head that can be read to measure the disk.
            num: chunks that would be read.
        """
        now, rate = self.clock(), self.rows.read_rate
        facts = Facts(
            restore=self.restore,
            chunk_tokens=self.chunk_tokens,
            begin=begin,
            end=end,
            num_tokens=num_tokens,
            load_bytes=num * self.row_bytes,
            read_bytes_per_s=rate.effective(now) if rate.is_known else None,
            read_busy_s=rate.busy_s(now),
            copy_bytes_per_s=COPY_BYTES_PER_S,
            protocol_s=self.protocol.seconds(now),
            times=self.times,
        )
        choice = choose(facts)
        logger.debug("choice: %s", LoggedChoice(request=request, facts=facts, choice=choice))
        if choice.should_load:
            self._probes.note_use(rate)
            self._loads[request] = _Load(choice, now)
        elif self.restore == "auto" and self._probes.is_due(rate, now):
            self._probe(hashes, now)
        return choice

    def _probe(self, hashes: Sequence[bytes], now: float) -> None:
        rate = self.rows.read_rate
        num_bytes = min(max(PROBE_S * rate.steady, LEAST_PROBE_BYTES), MOST_PROBE_BYTES)
        if self.rows.probe(hashes[: max(1, int(num_bytes / self.row_bytes))]):
            self._probes.note_probe(rate, now)

    def note_read(self, request: str, num_bytes: int, ended_at: float, *, ok: bool) -> None:
        """Note that a part of a load has ended; one that failed tells nothing."""
        if (load := self._loads.get(request)) is None:
            return
        load.num_bytes += num_bytes
        load.ended_at = max(load.ended_at, ended_at)
        if not ok:
            del self._loads[request]

    def note_scheduled(self, request: str) -> None:
        """Note that the engine goes on with a request."""
        load = self._loads.pop(request, None)
        if load is None or not load.ended_at:
            return
        now = self.clock()
        copy_s = load.num_bytes / COPY_BYTES_PER_S
        self.protocol.learn(now - load.ended_at - copy_s, now)
        if load.choice.arrival_s:
            self.predicted_s += load.choice.arrival_s
            self.measured_s += now - load.began_at

    def forget(self, request: str) -> None:
        """Note that a request has ended, or has to begin anew."""
        self._loads.pop(request, None)


def given_times(told: object) -> StepTimes | None:
    """Return how long prompts take by the operator's table, or None without one.

    Args:
        told: seconds by the number of tokens, such as `{"8192": 0.21, "32768": 1.2}`.

    Raises:
        ConfigError: it is no such table.
    """
    if told is None:
        return None
    table = dict[int, float]()
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        table = {int(tokens): float(seconds) for tokens, seconds in told.items()}  # type: ignore[attr-defined]
    if not table or min(table) < 1 or not all(0 < seconds < 1e6 for seconds in table.values()):
        what = "must tell the seconds of prompts by their tokens, such as"
        example = '{"8192": 0.21, "32768": 1.2}'
        raise ConfigError(f"`prefill_seconds` = {told!r} {what} {example}")
    return fitted([Step(tokens, pairs(0, tokens), seconds) for tokens, seconds in table.items()])


def rate_file(
    folder: str, rows: RowStore, compute: ComputeRate, *, model: str, identity: str, row_bytes: int
) -> RateFile:
    """Return the file that keeps the rates, and take over what an earlier run has learnt.

    Args:
        folder: of the store.
        rows: have the rates of the disk.
        compute: how long prompts take.
        model: its name, for people.
        identity: of the engine and the model, as everything that decides a chunk's bytes.
        row_bytes: bytes of a chunk.
    """
    machine = Machine(
        device=device_names(),
        disk=disk_name(folder),
        model=model,
        fingerprint=identity,
        block_bytes=row_bytes,
    )
    up = LinkRate(COPY_BYTES_PER_S)  # never measured here
    links = {"read": rows.read_rate, "write": rows.write_rate, "up": up}
    return RateFile(folder, machine, mark=MARKER, **links, compute=compute)


def device_names() -> str:
    """Name this machine's GPUs without touching them, as another process computes on them."""
    names = list[str]()
    for path in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")):
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            lines = (line.partition(":") for line in file)
            names += [text.strip() for word, _, text in lines if word == "Model"]
    return ", ".join(names) or f"{os.cpu_count()} processors"
