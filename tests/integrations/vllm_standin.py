"""The few classes of vLLM that the tier touches, for machines without vLLM.

`make test-vllm` runs the same tests with vLLM's own classes and its own manager.
"""

import enum
import sys
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest


class LookupResult(enum.Enum):
    MISS = enum.auto()
    HIT = enum.auto()
    HIT_PENDING = enum.auto()
    RETRY = enum.auto()


class Medium(enum.Enum):
    STORAGE = "STORAGE"


class OffloadPolicy(enum.Enum):
    CHUNK_LEVEL = "chunk_level"
    REQUEST_LEVEL = "request_level"


@dataclass
class RequestOffloadingContext:
    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL


@dataclass
class ReqContext:
    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
    ends: dict[bytes, int] = field(default_factory=dict)

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self.ends.get(key)


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Sequence[bytes] | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


@dataclass
class OlderOffloadingEvent:
    keys: list[bytes]
    medium: Any
    removed: bool
    locality: Any = None


@dataclass
class OffloadingEvent(OlderOffloadingEvent):
    ownership: str | None = None
    removal_expected: bool = False
    metadata_only: bool = False


@dataclass
class MetricMetadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


class Stats:
    """Sums of counters and last figures of gauges, by name and labels."""

    def __init__(self) -> None:
        self.data: dict[str, dict[str, dict[tuple[str, ...], float]]] = {"data": {}}

    def increase_counter(self, name: str, amount: float = 1, labels: tuple[str, ...] = ()) -> None:
        known = self.data["data"].setdefault(name, {})
        known[labels] = known.get(labels, 0) + amount

    def set_gauge(self, name: str, figure: float, labels: tuple[str, ...] = ()) -> None:
        self.data["data"].setdefault(name, {})[labels] = figure


class SecondaryTierManager:
    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
    ) -> None:
        self.tier_type = tier_type
        self._primary_kv_view = primary_kv_view


@dataclass
class OlderReqContext:
    """The context of vLLM 0.26, which knows no positions."""

    req_id: str
    kv_transfer_params: dict[str, Any] | None = None


@dataclass
class OlderJobResult:
    job_id: int
    success: bool


class OlderTierManager:
    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str) -> None:
        self.tier_type = tier_type
        self._primary_kv_view = primary_kv_view


def install(
    monkeypatch: pytest.MonkeyPatch, *, is_older: bool, version: str | None = None
) -> types.SimpleNamespace:
    """Let `import vllm…` find these classes; return those that a manager needs."""
    base, tiering, versions = (types.ModuleType(name) for name in ("base", "tiering", "version"))
    context = OlderReqContext if is_older else ReqContext
    named: dict[str, Any] = {
        "LookupResult": LookupResult,
        "OffloadPolicy": OffloadPolicy,
        "RequestOffloadingContext": RequestOffloadingContext,
        "ReqContext": context,
        "OffloadingEvent": OlderOffloadingEvent if is_older else OffloadingEvent,
        "OffloadingCounterMetadata": MetricMetadata,
        "OffloadingGaugeMetadata": MetricMetadata,
    }
    vars(base).update(named if is_older else named | {"Medium": Medium})
    vars(tiering).update(
        SecondaryTierManager=OlderTierManager if is_older else SecondaryTierManager,
        JobResult=OlderJobResult if is_older else JobResult,
    )
    vars(versions)["__version__"] = version or ("0.26.0" if is_older else "0.33.0")
    for name in ("vllm", "vllm.v1", "vllm.v1.kv_offload"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    packages = sys.modules["vllm"], sys.modules["vllm.v1"], sys.modules["vllm.v1.kv_offload"]
    tiers = types.ModuleType("vllm.v1.kv_offload.tiering")
    vars(packages[0]).update(v1=packages[1], version=versions)
    vars(packages[1]).update(kv_offload=packages[2])
    vars(packages[2]).update(base=base, tiering=tiers)
    vars(tiers).update(base=tiering)
    monkeypatch.setitem(sys.modules, "vllm.version", versions)
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.base", base)
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.tiering", tiers)
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.tiering.base", tiering)
    _install_metrics(monkeypatch)
    monkeypatch.delitem(sys.modules, "tieredkv.integrations.vllm", raising=False)
    return types.SimpleNamespace(**named)


def _install_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `from vllm.distributed… import metrics` find the class of statistics."""
    parent, name = sys.modules["vllm"], "vllm"
    parts = ("distributed", "kv_transfer", "kv_connector", "v1", "offloading", "metrics")
    for part in parts:
        name = f"{name}.{part}"
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        setattr(parent, part, module)
        parent = module
    vars(parent)["OffloadingConnectorStats"] = Stats


@dataclass
class Job:
    """A job as vLLM hands it to a tier."""

    job_id: int
    keys: Sequence[bytes]
    chunk_ids: Any
    is_promotion: bool
    req_context: Any


@dataclass
class OlderJob:
    job_id: int
    keys: Sequence[bytes]
    block_ids: Any
    is_promotion: bool
    req_context: Any


class Manager:
    """The memory that vLLM keeps above the tier: which key is in which row, and what is pinned."""

    def __init__(self, tier: Any, num_rows: int, *, is_older: bool) -> None:
        self.tier = tier
        self._job_class: Any = OlderJob if is_older else Job
        self._free = [*range(num_rows)]
        self._rows: dict[bytes, int] = {}  # of what is there
        self._coming: dict[bytes, int] = {}  # of what is being promoted
        self._jobs: dict[int, Any] = {}
        self._to_promote: dict[str, tuple[Any, list[bytes]]] = {}
        self._num_jobs = 0
        self.num_failed = 0

    def has_pending_work(self) -> bool:
        return bool(self._jobs) or bool(self.tier.has_pending_work())

    def on_new_request(self, context: Any) -> Any:
        return self.tier.on_new_request(context)

    def on_request_finished(self, context: Any) -> None:
        self.tier.on_request_finished(context)

    def row_of(self, key: bytes) -> int:
        """Return the row of a key, a new one if it has none."""
        if key not in self._rows:
            self._rows[key] = self._free.pop()
        return self._rows[key]

    def offer(self, keys: Sequence[bytes], context: Any) -> None:
        self._submit(keys, [self._rows[key] for key in keys], context, is_promotion=False)

    def lookup(self, key: bytes, context: Any) -> LookupResult:
        self._finish(self.tier.get_finished_jobs())
        if key in self._rows:
            return LookupResult.HIT
        if key in self._coming:
            return LookupResult.HIT_PENDING
        verdict: LookupResult = self.tier.lookup(key, context)
        if verdict is LookupResult.HIT:
            self._coming[key] = self._free.pop()
            self._to_promote.setdefault(context.req_id, (context, []))[1].append(key)
            return LookupResult.HIT_PENDING
        return verdict

    def take_events(self) -> Iterable[Any]:
        yield from self.tier.take_events()

    def step(self, context: Any) -> None:
        self._finish(self.tier.get_finished_jobs())
        for context, keys in self._to_promote.values():
            self._submit(keys, [self._coming[key] for key in keys], context, is_promotion=True)
        self._to_promote.clear()
        self.tier.on_schedule_end(context)

    def clear(self) -> None:
        """Evict all, as vLLM's own reset does: after the tier was drained."""
        self.tier.drain_jobs()
        self._finish(self.tier.get_finished_jobs())
        assert not self._jobs
        self._free += self._rows.values()
        self._rows.clear()

    def shutdown(self) -> None:
        self.tier.shutdown()

    def _submit(
        self, keys: Sequence[bytes], rows: Sequence[int], context: Any, *, is_promotion: bool
    ) -> None:
        self._num_jobs += 1
        ids = np.array(rows, np.int32)
        job = self._job_class(self._num_jobs, [*keys], ids, is_promotion, context)
        self._jobs[job.job_id] = job
        (self.tier.submit_load if is_promotion else self.tier.submit_store)(job)

    def _finish(self, results: Iterable[Any]) -> None:
        for result in results:
            job = self._jobs.pop(result.job_id)
            self.num_failed += not result.success
            if not job.is_promotion:
                continue
            good = job.keys if result.success else getattr(result, "successful_keys", None) or ()
            for key in job.keys:
                row = self._coming.pop(key)
                if key in good:
                    self._rows[key] = row
                else:
                    self._free.append(row)
