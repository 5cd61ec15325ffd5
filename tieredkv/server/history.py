"""What a server did in the last hours: samples of two minutes, and sums by tenant since its start.

The page at `/ui` and `tieredkv top` show them. Memory is bounded: there is a fixed number of
samples and of slow requests, and one entry for each key. This module knows figures of requests and
of the engine; it does not know HTTP.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from tieredkv.cache.counters import moved_bytes
from tieredkv.engine.engine_messages import RequestUsage
from tieredkv.histogram import LogHistogram
from tieredkv.server.diagnosis import NONE, Diagnosis
from tieredkv.server.engine_client import EngineClient
from tieredkv.server.slow_requests import SlowRequest, SlowRequests

SAMPLE_S = 120.0
NUM_SAMPLES = 360
"""Twelve hours."""

Ttft = dict[str, LogHistogram]
"""Times to first token in seconds, by the slowest tier that the prefix came from, or `cold`."""


class Sample(msgspec.Struct, kw_only=True):
    """What happened in a stretch of time.

    Attributes:
        began_at: in seconds since the epoch.
        cached_tokens: prompt tokens that were not computed, by the tier that had them.
        saved_s: time that the device would have taken to compute them, by its learnt rate.
        moved_bytes: by `from,to`; to and from the disk those that its device read and wrote.
        held_bytes: what each tier held at the end.
    """

    began_at: float
    num_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: Counter[str] = msgspec.field(default_factory=Counter)
    saved_s: float = 0.0
    ttft: Ttft = {}
    moved_bytes: dict[str, int] = {}
    held_bytes: dict[str, int] = {}


class TenantUse(msgspec.Struct):
    """What one tenant has asked for since the server started."""

    num_answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass
class History:
    """Keeps samples of one server; called on the server's event loop.

    Attributes:
        tenants: sums since the server started, for the tenants that asked for anything.
    """

    _engine: EngineClient
    _now: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._samples = deque[Sample](maxlen=NUM_SAMPLES)
        self._present = Sample(began_at=self._now())
        self._total = Sample(began_at=self._now())
        self._moved_before = dict[str, int]()  # in all, at the end of the last sample
        self._slow = SlowRequests()
        self.tenants = dict[str, TenantUse]()

    def note_first_token(
        self,
        tenant: str,
        usage: RequestUsage,
        source: str,
        ttft_s: float,
        prefill_s: float,
        diagnosis: Diagnosis = NONE,
    ) -> None:
        """Count a request whose first token has come.

        Args:
            tenant: whose request it is.
            usage: where its prompt came from.
            source: the slowest tier that its prefix came from, or `cold`.
            ttft_s: from its arrival to its first token.
            prefill_s: from its first step to its first token.
            diagnosis: how it differs from earlier requests, as far as that is known by now.
        """
        now = self._now()
        cached = {str(tier): count for tier, count in usage.cached_tokens_by_tier.items() if count}
        num_cached = sum(cached.values())
        rate = self._prefill_rate(num_cached // 2)
        for sums in (self._present, self._total):
            sums.prompt_tokens += usage.prompt_tokens
            sums.cached_tokens.update(cached)
            sums.saved_s += num_cached / rate if rate else 0.0
        self._present.ttft.setdefault(source, LogHistogram()).add(ttft_s)
        if self._slow.would_keep(now, ttft_s):  # else nothing is compared for it
            self._slow.add(
                SlowRequest(
                    at=now,
                    tenant=tenant,
                    ttft_s=ttft_s,
                    queue_s=usage.queue_s,
                    prefill_s=prefill_s,
                    source=source,
                    prompt_tokens=usage.prompt_tokens,
                    cached_tokens=cached,
                    recomputed_tokens=usage.recomputed_tokens,
                    miss_reason=diagnosis.miss(usage)["reason"],
                )
            )
        use = self.tenants.setdefault(tenant, TenantUse())
        use.num_answers += 1
        use.prompt_tokens += usage.prompt_tokens
        use.cached_tokens += num_cached

    def keep_tenants(self, knows: Callable[[str], bool]) -> None:
        """Forget the tenants whose keys were removed."""
        self.tenants = {tenant: use for tenant, use in self.tenants.items() if knows(tenant)}

    async def keep(self) -> None:
        """End samples, for as long as the server runs."""
        while True:
            await asyncio.sleep(SAMPLE_S - self._now() % SAMPLE_S)
            self.end_sample()

    def end_sample(self) -> None:
        """End the present sample and begin the next one."""
        self._samples.append(self._measured())
        self._moved_before = moved_bytes(self._engine.stats)
        self._present = Sample(began_at=self._now())

    def document(self, last_s: float | None = None) -> dict[str, Any]:
        """Return samples, the oldest first, sums over them and since the start, and slow requests.

        Tenants are told as `Keys.tenant` has them.

        Args:
            last_s: only samples that ended within this time are told; None for all.
        """
        samples = [*self._samples, self._measured()]
        if last_s is not None:
            since = self._now() - last_s
            samples = [it for it in samples[:-1] if it.began_at + it.num_s > since] + samples[-1:]
        sources = sorted({source for each in samples for source in each.ttft})
        ttft = {it: LogHistogram.sum(s.ttft[it] for s in samples if it in s.ttft) for it in sources}
        return {
            "now": self._now(),
            "samples": [_told(each) for each in samples],
            "ttft": _quantiles(ttft),
            "kept": _sums(samples),
            "since_start": _sums([self._total]),
            "slowest": msgspec.to_builtins(self._slow.slowest(self._now())),
        }

    def _measured(self) -> Sample:
        """Return the present sample as it is now."""
        stats, present = self._engine.stats, self._present
        tiers = {tier: stats.get(tier) or {} for tier in ("device", "host", "disk")}
        return msgspec.structs.replace(
            present,
            num_s=max(0.0, self._now() - present.began_at),
            # A worker that was started again counts from zero.
            moved_bytes={
                between: max(0, moved - self._moved_before.get(between, 0))
                for between, moved in moved_bytes(stats).items()
            },
            held_bytes={tier: each["bytes_live"] for tier, each in tiers.items() if each},
        )

    def _prefill_rate(self, position: int) -> float:
        """Return how many tokens the device computes a second behind a position; 0 if unknown.

        The engine tells it for a few positions; that of the last one before `position` is taken.
        """
        rates = self._engine.stats.get("learnt", {}).get("prefill_tokens_per_s", {})
        known = [(int(told), rate) for told, rate in rates.items() if int(told) <= position]
        return float(max(known)[1]) if known else 0.0


def _told(sample: Sample) -> dict[str, Any]:
    """Return a sample as the page reads it."""
    told: dict[str, Any] = msgspec.to_builtins(sample)
    return {**told, "ttft": _quantiles(sample.ttft)}


def _quantiles(ttft: Ttft) -> dict[str, Any]:
    return {
        source: {"num": each.num, "p50_s": each.quantile(0.5), "p90_s": each.quantile(0.9)}
        for source, each in ttft.items()
    }


def _sums(samples: Iterable[Sample]) -> dict[str, Any]:
    """Return what was asked for and saved in some samples, and since when."""
    samples, cached_tokens = list(samples), Counter[str]()
    for each in samples:
        cached_tokens.update(each.cached_tokens)
    return {
        "began_at": samples[0].began_at,
        "prompt_tokens": sum(each.prompt_tokens for each in samples),
        "cached_tokens": dict(cached_tokens),
        "saved_s": sum(each.saved_s for each in samples),
    }
