"""The tier's figures, as vLLM's metrics and as text.

vLLM collects what a tier counts with each step and shows it on `/metrics`, with the number of the
engine. It adds `_total` to the names of counters. This module knows names and sums, and not what
happens when; it does not import vLLM.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from tieredkv.cache.step_times import PromptTimes
from tieredkv.integrations.restore_choice import ANY_LENGTH
from tieredkv.integrations.restore_chooser import RestoreChooser
from tieredkv.integrations.row_store import RowStore


class Metric(NamedTuple):
    """A metric.

    Attributes:
        kind: whether it only grows.
        text: what it counts.
        labels: names of its labels.
    """

    kind: Literal["counter", "gauge"]
    text: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, Metric] = {
    "tieredkv_lookups": Metric(
        "counter", "Chunks that were looked up on disk: found (hit) or not (miss).", ("result",)
    ),
    "tieredkv_restores": Metric(
        "counter",
        "Requests of whose prompt the disk had a head: whether it was loaded or computed, and why.",
        ("choice", "reason"),
    ),
    "tieredkv_recomputed_chunks": Metric(
        "counter", "Chunks that the disk had and that were computed, since that was faster."
    ),
    "tieredkv_loaded_bytes": Metric("counter", "Bytes loaded from disk."),
    "tieredkv_stored_bytes": Metric("counter", "Bytes of chunks written to disk."),
    "tieredkv_failed_loads": Metric(
        "counter", "Chunks that could not be loaded, by reason.", ("reason",)
    ),
    "tieredkv_failed_stores": Metric(
        "counter", "Chunks that could not be stored, by reason.", ("reason",)
    ),
    "tieredkv_expired_chunks": Metric("counter", "Chunks erased as their retention ended."),
    "tieredkv_evicted_chunks": Metric("counter", "Chunks evicted from disk for want of room."),
    "tieredkv_worker_restarts": Metric("counter", "How often the disk's worker was started again."),
    "tieredkv_load_seconds": Metric(
        "counter",
        "Seconds from choices to load until vLLM went on with the requests: as predicted, and as "
        "measured.",
        ("kind",),
    ),
    "tieredkv_prefill_seconds": Metric(
        "counter", "Seconds of computing prompts: as predicted, and as measured.", ("kind",)
    ),
    "tieredkv_disk_bytes": Metric("gauge", "What the store's files occupy."),
    "tieredkv_disk_budget_bytes": Metric("gauge", "What they may occupy."),
    "tieredkv_disk_chunks": Metric("gauge", "Chunks on disk."),
    "tieredkv_disk_read_bytes_per_s": Metric("gauge", "How fast the disk reads; 0 if unknown."),
    "tieredkv_disk_write_bytes_per_s": Metric("gauge", "How fast it writes; 0 if unknown."),
    "tieredkv_prefill_tokens_per_s": Metric(
        "gauge", "How fast a prompt of 8,192 tokens is computed; 0 if unknown."
    ),
    "tieredkv_protocol_seconds": Metric(
        "gauge", "From the last byte of a load until vLLM goes on, without copying."
    ),
}

Labels = tuple[str, ...]


class ConnectorStats:
    """What has been counted since it was last told, and what the gauges show."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, Labels]] = Counter()
        self._gauges: dict[str, float] = {}
        self._sums: dict[tuple[str, Labels], float] = {}

    def count(self, name: str, amount: float = 1, *labels: str) -> None:
        """Add to a counter."""
        metric = METRICS[name]
        assert metric.kind == "counter" and len(labels) == len(metric.labels), (name, labels)
        if amount > 0:
            self._counts[name, labels] += amount  # type: ignore[assignment]

    def follow(self, name: str, total: float, *labels: str) -> None:
        """Have a counter follow a sum that is kept elsewhere, and may begin anew."""
        before = self._sums.get((name, labels), 0.0)
        self._sums[name, labels] = total
        self.count(name, total - before if total >= before else total, *labels)

    def show(self, figures: Mapping[str, float]) -> None:
        """Set gauges."""
        assert all(METRICS[name].kind == "gauge" for name in figures), figures
        self._gauges.update(figures)

    def tell(self, stats: Any) -> Any:
        """Put all that was counted since the last call into vLLM's statistics; return them."""
        for (name, labels), amount in self._counts.items():
            stats.increase_counter(name, amount, labels)
        for name, figure in self._gauges.items():
            stats.set_gauge(name, figure)
        self._counts.clear()
        return stats

    def __str__(self) -> str:
        told = {_label(*key): amount for key, amount in self._counts.items()} | self._gauges
        return ", ".join(f"{name} {figure:g}" for name, figure in sorted(told.items()))


def gather(stats: ConnectorStats, rows: RowStore, chooser: RestoreChooser) -> None:
    """Take in the figures that a tier's disk and its choices keep themselves."""
    store, meter, reads, writes = rows.stats(), chooser.meter, rows.read_rate, rows.write_rate
    stats.follow("tieredkv_expired_chunks", store.num_expired)
    stats.follow("tieredkv_evicted_chunks", store.num_evicted)
    stats.follow("tieredkv_worker_restarts", rows.num_restarts)
    stats.follow("tieredkv_load_seconds", chooser.predicted_s, "predicted")
    stats.follow("tieredkv_load_seconds", chooser.measured_s, "measured")
    stats.follow("tieredkv_prefill_seconds", meter.predicted_s, "predicted")
    stats.follow("tieredkv_prefill_seconds", meter.measured_s, "measured")
    times = chooser.times
    prefill_s = PromptTimes(times, ANY_LENGTH)(0, 8192) if times is not None else float("inf")
    stats.show(
        {
            "tieredkv_disk_bytes": store.bytes_files,
            "tieredkv_disk_budget_bytes": store.bytes_budget,
            "tieredkv_disk_chunks": store.blocks,
            "tieredkv_disk_read_bytes_per_s": reads.bytes_per_s if reads.is_known else 0,
            "tieredkv_disk_write_bytes_per_s": writes.bytes_per_s if writes.is_known else 0,
            "tieredkv_prefill_tokens_per_s": 8192 / prefill_s,
            "tieredkv_protocol_seconds": chooser.protocol.seconds(chooser.clock()),
        }
    )


def _label(name: str, labels: Labels) -> str:
    return f"{name}{{{','.join(labels)}}}" if labels else name
