"""Replays a trace: what caches of given sizes would have found, moved and written."""

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from tieredkv.cache.disk_link import EARLY_SHARE
from tieredkv.cache.rate_file import SavedRates
from tieredkv.errors import ConfigError
from tieredkv.retention import RetentionPolicies, RetentionPolicy
from tieredkv.sizing.anchors import Anchors, AnchorSize, most_room
from tieredkv.sizing.disk import SimulatedClock, SimulatedDisk
from tieredkv.sizing.estimate import Estimate
from tieredkv.sizing.tiers import Capacity, SimulatedTiers, Source
from tieredkv.traces import Request, Trace
from tieredkv.types import BlockHash, Progress, Tier
from tieredkv.units import format_bytes, format_duration

UNLIMITED = math.inf
_TOLD_EVERY = 256
_DAY_S = 86_400.0

TICK_S = 0.0005
"""Times of a trace are whole milliseconds. A use in the last one of a life still counts."""

RESERVE_TOKENS = 2 * 8192
"""Tokens of the blocks that VRAM keeps clean ahead of need, as on a GPU."""

WRITE_BYTES_PER_S = 1e9
"""How fast the disk is taken to write where nobody has measured it."""

UNNAMED = "--retention"
"""Name of the policy of requests that have none of their own."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is asked for: sizes in bytes and times in seconds, infinite without a limit.

    Attributes:
        device, host, disk: the KV budget of each tier.
        retention_s, idle_s: how long a block is kept after it was computed, and after it was last
            used, by requests that name none of `policies`.
        policies: those that requests of a trace may name; none if all requests have one retention.
        token_bytes: bytes of the keys and values of one token in the layers that attend to all.
        anchor: what the layers with windows keep for an anchor; None if there are none.
        drain_timeout_s: as the setting of this name.
    """

    device: float = UNLIMITED
    host: float = 0
    disk: float = 0
    retention_s: float = _DAY_S
    idle_s: float = _DAY_S
    policies: Sequence[RetentionPolicy] = ()
    token_bytes: int = 131_072
    anchor: AnchorSize | None = None
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if self.token_bytes < 1:
            raise ConfigError("`--bytes-per-token` must be at least 1")
        for flag, seconds in ("--retention", self.retention_s), ("--idle", self.idle_s):
            if not seconds > 0:
                raise ConfigError(f"`{flag}` must be longer than 0 s")

    def of_trace(self, trace: Trace) -> "Sizes":
        """Return the sizes with anchors as the server made them that has recorded a trace."""
        if self.anchor is None or all(each.block_tokens is None for each in trace.requests):
            return self
        return replace(self, anchor=self.anchor._replace(block_size=trace.block_tokens))

    def capacity(self, block_tokens: int, write_bytes_per_s: float | None = None) -> Capacity:
        """Return how many blocks each tier holds."""
        block_bytes = block_tokens * self.token_bytes
        drained = EARLY_SHARE * self.drain_timeout_s * (write_bytes_per_s or WRITE_BYTES_PER_S)
        return Capacity(
            device=_num_blocks(self.device, block_bytes),
            host=_num_blocks(self.host, block_bytes),
            disk=_num_blocks(self.disk, block_bytes),
            reserve=RESERVE_TOKENS // block_tokens,
            most_owed=int(drained / block_bytes),
        )

    @property
    def retention_names(self) -> list[str]:
        """The policies that a trace may name; any, if there are none."""
        return [policy.name for policy in self.policies]

    def name_of(self, request: Request) -> str:
        """Return the name of a request's retention policy."""
        return (self.policies and request.retention) or UNNAMED

    def policies_of(self, requests: Iterable[Request]) -> RetentionPolicies:
        """Return the retention policies that requests have, as times of a trace need them."""
        forever = 1e12  # a policy has to be finite
        absolute_s = min(self.retention_s, forever)
        idle_s = min(self.idle_s, absolute_s)
        unnamed = RetentionPolicy(
            name=UNNAMED, idle_s=idle_s, absolute_s=absolute_s, tiers=frozenset(Tier)
        )
        used = set(map(self.name_of, requests))
        return RetentionPolicies(
            replace(it, idle_s=it.idle_s + TICK_S, absolute_s=it.absolute_s + TICK_S)
            for it in (unnamed, *self.policies)
            if it.name in used
        )

    def described(self) -> Json:
        """Return the sizes for programs; None stands for no limit."""
        return {
            "vram_bytes": _finite(self.device),
            "host_bytes": _finite(self.host),
            "disk_bytes": _finite(self.disk),
            "retention_s": _finite(self.retention_s),
            "idle_s": _finite(min(self.idle_s, self.retention_s)),
            "bytes_per_token": self.token_bytes,
            "bytes_per_anchor": self.anchor.num_bytes(self.token_bytes) if self.anchor else 0,
        }


def _num_blocks(num_bytes: float, block_bytes: int) -> float:
    return num_bytes if num_bytes == UNLIMITED else int(num_bytes) // block_bytes


def _finite(value: float) -> float | None:
    return None if value == UNLIMITED else value


def replay(
    trace: Trace, sizes: Sizes, progress: Progress, *, rates: SavedRates | None = None
) -> Json:
    """Replay a trace from empty tiers, and return its figures.

    If it is interrupted, the figures are those of the requests so far, and say so.

    Raises:
        ConfigError: the rates are not complete.
    """
    write_bytes_per_s = rates.write_bytes_per_s if rates is not None else None
    capacity = sizes.capacity(trace.block_tokens, write_bytes_per_s)
    block_bytes = trace.block_tokens * sizes.token_bytes
    estimate = None
    if rates is not None:
        estimate = Estimate(rates, block_tokens=trace.block_tokens, block_bytes=block_bytes)
    run = _Run(trace, sizes, capacity, estimate)
    is_interrupted = False
    try:
        run.serve_all(progress)
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        progress("replaying", 1, 1)
    found = run.figures(block_bytes)
    return {"trace": trace.name, **sizes.described(), **found, "interrupted": is_interrupted}


class _Run:
    """One replay, and what it has counted."""

    def __init__(
        self, trace: Trace, sizes: Sizes, capacity: Capacity, estimate: Estimate | None
    ) -> None:
        self._trace, self._name_of, self._estimate = trace, sizes.name_of, estimate
        policies = sizes.policies_of(trace.requests)
        self._claims = {name: frozenset([name]) for name in policies.names}
        self._began_at = trace.requests[0].timestamp
        clock = SimulatedClock()
        self._disk = SimulatedDisk(capacity.disk, clock) if capacity.disk > 0 else None
        anchor, size = sizes.anchor, trace.block_tokens
        num_pages, most_pages = most_room(anchor, trace) if anchor is not None else (0, 0)
        self.tiers = SimulatedTiers(
            capacity,
            policies,
            self._disk,
            clock,
            num_distinct=trace.num_distinct + num_pages,
            most_blocks=trace.most_blocks + most_pages,
            until=trace.span_s,
        )
        self._anchors = None if anchor is None else Anchors(anchor, self.tiers, size)
        self.num_lacking = 0
        self.found, self.num_of = Counter[Source](), Counter[str]()
        self.num_requests = self.num_blocks = self.prompt_tokens = self.contiguous_tokens = 0
        self.span_s = self.wall_s = self.cpu_s = 0.0

    def serve_all(self, progress: Progress) -> None:
        """Serve the requests in turn."""
        began_at, cpu_began_at, total = time.perf_counter(), time.process_time(), 0
        try:
            total = len(self._trace.requests)
            for number, request in enumerate(self._trace.requests):
                if number % _TOLD_EVERY == 0:
                    progress("replaying", number, total)
                now = (request.timestamp - self._began_at) / 1e3
                name = self._name_of(request)
                self.num_of[name] += 1
                self._serve(request, now, self._claims[name])
        finally:
            self.wall_s = time.perf_counter() - began_at
            self.cpu_s = time.process_time() - cpu_began_at

    def _serve(self, request: Request, now: float, claims: frozenset[str]) -> None:
        """Serve a request, and count what it has found."""
        if self._anchors is None:
            hashes = cast("Sequence[BlockHash]", request.chain)  # opaque keys
            self._count(self.tiers.serve(hashes, now, claims), request, now)
            return
        served = self._anchors.serve(request, now, claims)
        self.num_lacking += served.num_lacking
        if self._estimate is not None:
            self._estimate.add_pages(served.page_sources, now)
        self._count(served.sources, request, now)

    def _count(self, sources: list[Source], request: Request, now: float) -> None:
        size, found = self._trace.block_tokens, self.found
        self.num_requests += 1
        self.num_blocks += len(sources)
        self.prompt_tokens += request.input_length
        self.span_s = now
        del sources[len(request.hash_ids) :]  # those of the answer
        if self._estimate is not None:
            self._estimate.add(sources, request.input_length, now)
        if not sources:
            return
        for tier in set(sources):
            found[tier] += size * sources.count(tier)
        num_tokens = request.most_cached_tokens
        found[sources[-1]] -= size * len(sources) - num_tokens  # of a last block that is not whole
        if None in sources:
            self.contiguous_tokens += size * sources.index(None)
        else:
            self.contiguous_tokens += num_tokens

    def figures(self, block_bytes: int) -> Json:
        """Return what was counted."""
        tiers, estimate = self.tiers, self._estimate
        cached = sum(self.found[tier] for tier in Tier)
        links = "host_device", "device_host", "disk_host"
        moved = {link: tiers.moved[link] * block_bytes for link in links}
        num_stored = self._disk.stats().num_stored if self._disk is not None else 0
        moved["host_disk"] = num_stored * block_bytes
        written = {
            str(Tier.DEVICE): tiers.num_filled * block_bytes,
            str(Tier.HOST): moved["device_host"] + moved["disk_host"],
            str(Tier.DISK): moved["host_disk"],
        }
        days = self.span_s / _DAY_S
        document: Json = {
            "requests": self.num_requests,
            "requests_by_retention": {
                name: count for name, count in self.num_of.items() if name != UNNAMED
            },
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": cached,
            "hit_rate": round(cached / max(self.prompt_tokens, 1), 6),
            "contiguous_tokens": self.contiguous_tokens,
            "by_tier": {str(tier): self.found[tier] for tier in Tier},
            "prefilled_tokens": self.prompt_tokens - cached,
            "span_s": self.span_s,
            "bytes_moved": moved,
            "bytes_written": written,
            "wear_bytes_per_day": round(written[str(Tier.DISK)] / days) if days else None,
            "expired_blocks": tiers.num_expired,
            "age_at_eviction_s": _spread(tiers.ages[None])
            | {str(tier): _spread(tiers.ages[tier]) for tier in Tier},
            "ttft_ms": estimate and estimate.ttft_ms(),
        }
        if estimate is not None:
            document["computed_sooner_tokens"] = estimate.computed_sooner_tokens
            load = estimate.busy_s / self.span_s if self.span_s else None
            document["device_load"] = load and round(load, 4)
        wall_s, anchors = max(self.wall_s, 1e-9), self._anchors
        return document | {
            "no_anchor_tokens": self.num_lacking * self._trace.block_tokens,
            "blocks": self.num_blocks,
            "anchors": anchors.num_made if anchors is not None else 0,
            "anchor_bytes": anchors.num_pages * block_bytes if anchors is not None else 0,
            "requests_per_s": round(self.num_requests / wall_s, 1),
            "blocks_per_s": round(self.num_blocks / wall_s),
            "core_share": round(self.cpu_s / wall_s, 3),
            "blocks_per_core_s": round(self.num_blocks / max(self.cpu_s, 1e-9)),
        }


def _spread(values: Sequence[float]) -> Json:
    """Return percentiles of ages; None if nothing was evicted."""
    if not values:
        return {"p1": None, "p50": None}
    p1, p50 = np.percentile(np.array(values), (1, 50))
    return {"p1": round(float(p1), 3), "p50": round(float(p50), 3)}


def described(document: Json) -> list[str]:
    """Return the figures of a replay for people, one a line."""
    total = document["prompt_tokens"] or 1

    def tokens(count: int) -> str:
        return f"{count:,} ({100 * count / total:.1f} %)"

    def age(name: str) -> str:
        age_s = document["age_at_eviction_s"]
        p1, p50 = (age_s[name] if name else age_s)["p1"], (age_s[name] if name else age_s)["p50"]
        return (
            "nothing was evicted"
            if p1 is None
            else f"{format_duration(p1)}, {format_duration(p50)}"
        )

    lines = [f"requests            {document['requests']:,}"]
    for name, count in document["requests_by_retention"].items():
        lines.append(f"  {name:<18}{count:,}")
    lines += [f"prompt tokens       {document['prompt_tokens']:,}"]
    lines += [f"cached              {tokens(document['cached_tokens'])}"]
    for tier, count in document["by_tier"].items():
        lines.append(f"  {tier:<18}{tokens(count)}")
    lines += [f"prefilled           {tokens(document['prefilled_tokens'])}"]
    if document["anchors"]:
        lines.append(f"  without an anchor {tokens(document['no_anchor_tokens'])}")
        computed = format_bytes(document["anchor_bytes"])
        lines.append(f"anchors             {document['anchors']:,}, {computed} computed for them")
    for link, count in document["bytes_moved"].items():
        source, _, target = link.partition("_")
        lines.append(f"{source + ' to ' + target:<20}{format_bytes(count)}")
    if (wear := document["wear_bytes_per_day"]) is not None:
        lines.append(f"written to disk     {format_bytes(wear)} a day")
    for tier in document["by_tier"]:
        lines.append(f"age, leaves {tier:<8}{age(tier)}")
    ttft = document["ttft_ms"]
    if ttft is None:
        lines.append("TTFT                unknown without --rates")
    else:
        lines.append(f"TTFT                p50 {ttft['p50']:,.0f} ms, p90 {ttft['p90']:,.0f} ms")
        for source, each in ttft["by_source"].items():
            told = f"p50 {each['p50']:,.0f} ms, p90 {each['p90']:,.0f} ms"
            lines.append(f"  {source:<18}{told}, {each['requests']:,} requests")
        lines.append(f"load of the device  {document['device_load']}")
    speed = f"{document['blocks_per_s']:,} blocks/s"
    lines.append(f"replayed            {speed} with {100 * document['core_share']:.0f} % of a core")
    if document["interrupted"]:
        lines.append("It was interrupted: the figures are those of the requests so far.")
    return lines
