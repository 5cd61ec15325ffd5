"""Metrics for Prometheus, from reports of the engine and measurements of the server.

`metrics.toml` lists the metrics. They hold counts, times and the labels that the operator allows,
but never a text, token or hash.
"""

import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import prometheus_client
from prometheus_client.core import Metric

from tieredkv.config import Settings
from tieredkv.engine.answer import Answer
from tieredkv.engine.engine_messages import RequestUsage, TokenOutput
from tieredkv.server.diagnosis import NONE
from tieredkv.server.engine_client import DISK_STATES, EngineClient, disk_state
from tieredkv.server.history import History
from tieredkv.server.recorder import Recorder
from tieredkv.server.remembered import RememberedAnswers
from tieredkv.server.stored_responses import StoredResponses
from tieredkv.types import Tier

MAX_LABEL_SETS = 1000
MAX_LABEL_SETS_OF_TENANT = 100
MAX_LABEL_LENGTH = 64
_SUFFIXES = {"gauge": [""], "counter": ["_total"], "summary": ["_count", "_sum"]}
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


class Metrics:
    """All metric families of `/metrics`, which `metrics.toml` lists."""

    def __init__(
        self,
        settings: Settings,
        engine: EngineClient,
        responses: StoredResponses | None = None,
        remembered: RememberedAnswers | None = None,
    ) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._settings = settings
        self._engine = engine
        self.history = History(engine)
        self._stores = {"responses": responses, "remembered": remembered}
        self._labels: dict[tuple[str, ...], str] = {}  # the first tenant to use each
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)
        self.observed = {row["name"]: self._make(row) for row in _TABLE["server"]}

    @property
    def block_size(self) -> int:
        """Tokens of a block of the engine."""
        return self._engine.info.block_size

    def labels_of(self, tenant: str, metadata: Mapping[str, object]) -> tuple[str, ...]:
        """Return the values of a request's allowed labels.

        Once there are too many sets of values, new sets are counted as `other`.
        """
        names = self._settings.metric_labels
        labels = tuple(str(metadata.get(name, ""))[:MAX_LABEL_LENGTH] for name in names)
        if labels not in self._labels:
            num_own = sum(tenant == each for each in self._labels.values())
            if len(self._labels) >= MAX_LABEL_SETS or num_own >= MAX_LABEL_SETS_OF_TENANT:
                return ("other",) * len(labels)
            self._labels[labels] = tenant
        return labels

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family, and a copy of a family for each alias."""
        settings = {"block_size": self.block_size, "drain_timeout_s": self._settings.drain_timeout}
        held = {name: store.figures._asdict() for name, store in self._stores.items() if store}
        reported = {**self._engine.stats, **settings, **held, "one": 1}
        if self._settings.disk_dir is not None:
            told = self._engine.info, self._engine.stats, self._settings.drain_timeout
            reported["disk_states"] = {it: int(it == disk_state(*told)[0]) for it in DISK_STATES}
        families = {row["name"]: _read(row, reported) for row in _TABLE["engine"]}
        families |= {name: own.collect()[0] for name, own in self.observed.items()}
        yield from families.values()
        who = {"model_name": self._engine.info.model, "engine": "0"}
        for alias, name in _TABLE["alias"].items():
            family = Metric(alias, families[name].documentation, families[name].type)
            for each in families[name].samples:
                new_name = each.name.replace(name, alias)
                family.samples.append(each._replace(name=new_name, labels=each.labels | who))
            yield family

    def text(self) -> bytes:
        """Return all metric families in the text format of Prometheus."""
        return prometheus_client.generate_latest(self._registry)

    def _make(self, row: dict[str, Any]) -> Any:
        labels = self._settings.metric_labels if row.get("is_labelled") else ()
        kind = {"counter": prometheus_client.Counter, "histogram": prometheus_client.Histogram}
        buckets = {"buckets": row["buckets"]} if "buckets" in row else {}
        names = [*row.get("labels", ()), *labels]
        return kind[row["type"]](row["name"], row["help"], names, registry=None, **buckets)


class Observer:
    """Measures the answers to one request.

    Outputs are measured when they arrive from the engine, even if the client reads them later.

    Attributes:
        diagnosis: how the request differs from earlier ones; nothing until its digests are made.
        ttft_s: the time to the first token of the first answer; None before it.

    Args:
        tenant: the tenant of the request.
        metadata: the metadata in the body of the request.
        arrived_at: when the request arrived, by `perf_counter`.
        recorder: records the request; None if none does.
    """

    def __init__(
        self,
        metrics: Metrics,
        tenant: str,
        metadata: Mapping[str, object],
        arrived_at: float,
        recorder: Recorder | None = None,
    ) -> None:
        self.diagnosis = NONE
        self._recorder, self._tenant = recorder, tenant
        self._block_size = metrics.block_size
        self._families, self._history = metrics.observed, metrics.history
        self._labels = metrics.labels_of(tenant, metadata)
        self._arrived_at, self._submitted_at = arrived_at, time.perf_counter()
        self._spans: dict[str, list[float]] = {}  # times of the first and the newest token
        self._itl = self._families["tieredkv_itl_seconds"]
        self.ttft_s: float | None = None

    def on_output(self, output: TokenOutput) -> None:
        """Measure the output of one engine step for one answer."""
        if not (output.token_ids or output.usage):
            return
        now = time.perf_counter()
        if (span := self._spans.get(output.request_id)) is not None:
            self._itl.observe(now - span[1])
            span[1] = now
            return
        self._spans[output.request_id] = [now, now]
        usage = output.usage or RequestUsage(prompt_tokens=0)
        by_tier = usage.cached_tokens_by_tier
        source = next((str(tier) for tier in reversed(Tier) if by_tier[tier]), "cold")
        ttft_s = now - self._arrived_at
        self.ttft_s = ttft_s if self.ttft_s is None else self.ttft_s
        prefill_s = max(0.0, now - self._submitted_at - usage.queue_s)
        self._families["tieredkv_ttft_seconds"].labels(source).observe(ttft_s)
        self._history.note_first_token(
            self._tenant, usage, source, ttft_s, prefill_s, self.diagnosis
        )
        self._families["tieredkv_queue_seconds"].observe(usage.queue_s)
        self._count("prefill_seconds", prefill_s)
        self._count("prompt_tokens", usage.prompt_tokens)
        self._count("recomputed_tokens", usage.recomputed_tokens)
        if (error := usage.prediction_error) is not None:
            errors = self._families["tieredkv_prediction_error_ratio"]
            errors.labels(usage.forecast_kind).observe(error)
        for tier in Tier:
            self._count("cached_tokens", by_tier[tier], tier)

    def on_end(self, answer: Answer, reason: str) -> None:
        """Count an answer that has ended or was cancelled."""
        first_at, last_at = self._spans.get(answer.request.request_id, (0.0, 0.0))
        self._families["tieredkv_answers"].labels(reason).inc()
        self._families["tieredkv_e2e_seconds"].observe(time.perf_counter() - self._arrived_at)
        self._count("generation_tokens", len(answer.token_ids))
        self._count("decode_seconds", last_at - first_at)
        has_run = answer.token_ids or reason in ("stop", "length")
        if self._recorder is not None and has_run:
            self._recorder.add(answer, self._arrived_at, self._block_size)

    def _count(self, name: str, count: float, *labels: str) -> None:
        family, values = self._families[f"tieredkv_{name}"], (*labels, *self._labels)
        (family.labels(*values) if values else family).inc(count)


def _read(row: dict[str, Any], reported: dict[str, Any]) -> Metric:
    """Return a metric family with the reported values; samples without a value are left out."""
    family = Metric(row["name"], row["help"], row["type"])
    for *fixed, path in row["samples"]:
        values = [str(_at(reported, each[1:])) if each[0] == "$" else each for each in fixed]
        found = _at(reported, path)
        for keys, number in (found if isinstance(found, dict) else {"": found}).items():
            if number is not None:
                told = dict(zip(row.get("labels", ()), values + keys.split(","), strict=False))
                scale = _at(reported, row["times"]) if "times" in row else 1
                numbers = number if isinstance(number, list) else [number * scale]
                for suffix, each in zip(_SUFFIXES[row["type"]], numbers, strict=True):
                    family.add_sample(row["name"] + suffix, told, each)
    return family


def _at(tree: Any, path: str) -> Any:
    """Return the value at a dotted path, or None if there is none."""
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree
