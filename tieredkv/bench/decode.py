"""`bench decode`: the time between tokens, throughput, and what moving blocks does to both.

    itl         one request at a time: the gaps between its output tokens at each context
    throughput  many requests at once: tokens over the wall clock
    demotion    a workload that evicts all the time, with the host tier and without, in pairs
    promotion   a long prefix comes up from host memory while other requests decode

The limit of a step is the bytes that it must read, weights and KV, over the copy bandwidth of the
same run; that of a prompt is its FLOPs over the rate of a large matrix product. Times are read
when `EngineCore.step` hands tokens out.
"""

import gc
import itertools
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tieredkv.bench import raw
from tieredkv.config import DEFAULT_POLICIES, Settings
from tieredkv.engine.core import EngineCore
from tieredkv.engine.loader import find_model
from tieredkv.engine.messages import EngineRequest
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import ConfigError, TieredKVError
from tieredkv.retention import IN_MEMORY, RetentionPolicy
from tieredkv.types import Progress, Tier

PARTS = ("itl", "throughput", "promotion", "demotion")
DEVICE_ONLY = RetentionPolicy(
    name="device_only", idle_s=600.0, absolute_s=3600.0, tiers=frozenset({Tier.DEVICE})
)
RETENTIONS = {"tiers on": IN_MEMORY.name, "tiers off": DEVICE_ONLY.name}
NUM_DECODING, DECODING_TOKENS, SUFFIX_TOKENS, SPARE_TOKENS = 8, 1024, 64, 1000
MIN_TIER_BYTES = 16 << 20

Row = dict[str, Any]


class Workload(NamedTuple):
    """Requests that are given to the engine at once, each with a prompt of its own."""

    requests: int
    given: int
    made: int

    @classmethod
    def parse(cls, text: str) -> "Workload":
        """Read `128x1024+256`: requests x input + output tokens."""
        if match := re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,6})\+([1-9]\d{0,5})", text):
            return cls(*map(int, match.groups()))
        raise ConfigError(f"`{text}` is no workload; write one such as 128x1024+256")

    @property
    def num_tokens(self) -> int:
        """Tokens in and out, all requests."""
        return self.requests * (self.given + self.made)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpec:
    """What to measure; `tokens` is the gaps of an ITL figure, `demotion` the workload of pairs."""

    parts: Sequence[str]
    contexts: Sequence[int]
    workloads: Sequence[Workload]
    demotion: Workload
    pairs: int
    prefix: int
    tokens: int
    repeats: int


def run(spec: DecodeSpec, settings: dict[str, Any], *, progress: Progress) -> dict[str, Any]:
    """Measure the parts; demotion in an engine of its own, whose device tier is too small.

    Args:
        spec: what to measure.
        settings: fields of `Settings` for the engine, `model` among them.
        progress: told how far it is.
    """
    if set(spec.parts) - set(PARTS) or min(spec.pairs, spec.prefix, spec.tokens, spec.repeats) < 1:
        raise ConfigError(f"`parts` are {', '.join(PARTS)}; every count must be at least 1")
    found = find_model(
        settings["model"],
        dtype=settings.get("dtype", "auto"),
        device=settings.get("device", "auto"),
    )
    limits = {"copy_GBps": raw.copy_GBps(), "gemm_TFLOPs": raw.gemm_TFLOPs(found.dtype)}
    limits["h2d_GBps"] = raw.h2d_GBps()
    report: dict[str, Any] = {"model": found.name, "dtype": found.dtype, "raw": limits}
    report |= {"rows": [], "problems": []}
    token_bytes = found.kv_spec(16).token_bytes
    decoding = NUM_DECODING * (DECODING_TOKENS + spec.tokens + SPARE_TOKENS)
    most = max(max(spec.contexts) + spec.tokens, spec.prefix + decoding)
    most = max(most, *(workload.num_tokens for workload in spec.workloads))
    for parts, device_tokens, host_tokens in (
        (set(spec.parts) - {"demotion"}, most * 5 // 4, 2 * spec.prefix),
        (set(spec.parts) & {"demotion"}, spec.demotion.num_tokens // 4, spec.demotion.num_tokens),
    ):
        if not parts:
            continue
        sizes = {"device_size": device_tokens * token_bytes, "host_size": host_tokens * token_bytes}
        sizes = {name: max(MIN_TIER_BYTES, size) for name, size in sizes.items()}
        policies = (*DEFAULT_POLICIES, DEVICE_ONLY)
        engine_settings = Settings(**{**sizes, **settings, "policies": policies})
        core = EngineCore(engine_settings, progress=progress)
        try:
            bench = _Bench(core, spec, limits, progress)
            for part in filter(parts.__contains__, PARTS):
                getattr(bench, part)(report)
        finally:
            core.close()
        del core, bench
        gc.collect()  # the pool, before the next engine takes its own
    return report


class _Served(NamedTuple):
    """A workload from the first submission to the last token."""

    wall_s: float
    gaps_ms: list[float]
    demoted_GBps: float
    allocation_waits: int


class _Bench:
    """One engine, its requests, when each of their tokens came, and the parts."""

    def __init__(
        self, core: EngineCore, spec: DecodeSpec, limits: dict[str, float], progress: Progress
    ) -> None:
        self.core, self.spec, self.limits, self.progress = core, spec, limits, progress
        self.times: dict[str, list[float]] = {}
        self.unfinished: set[str] = set()
        self.random = np.random.default_rng(0)
        self.block_bytes, self.token_bytes = core.kv_spec.block_bytes, core.kv_spec.token_bytes
        model: Any = core.model.model
        ends = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
        ends_numel = sum({id(weight): weight.numel() for weight in ends}.values())
        self.num_body = sum(weight.numel() for weight in model.parameters()) - ends_numel
        self.weight_bytes = (self.num_body + ends[1].numel()) * ends[1].element_size()

    # Parts

    def itl(self, report: dict[str, Any]) -> None:
        """One request alone."""
        for context in self.spec.contexts:
            self.serve(Workload(1, context, 4))  # first-time work
            workload = Workload(1, context, self.spec.tokens + 1)
            row = self.row("itl", workload, [self.serve(workload)])
            limit_ms = self.step_s(1, context + self.spec.tokens / 2) * 1e3
            row |= {"limit_ms": limit_ms, "ratio": limit_ms / row["itl_p50_ms"]}
            report["rows"].append(row)

    def throughput(self, report: dict[str, Any]) -> None:
        """Many requests at once, medians of the repeats."""
        for workload in self.spec.workloads:
            self.serve(Workload(min(4, workload.requests), workload.given, 4))
            served = [self.serve(workload) for _ in range(self.spec.repeats)]
            report["rows"].append(self.row("throughput", workload, served))

    def demotion(self, report: dict[str, Any]) -> None:
        """The same workload with demotion and without it, in pairs of changing order."""
        runs: dict[str, list[_Served]] = {mode: [] for mode in RETENTIONS}
        for pair in range(self.spec.pairs + 1):  # the first warms up
            self.progress("pairs", pair, self.spec.pairs + 1)
            for mode in sorted(runs, reverse=pair % 2 == 0):
                served = self.serve(self.spec.demotion, RETENTIONS[mode])
                runs[mode] += [served] if pair else []
        self.progress("pairs", 1, 1)
        for mode, several in runs.items():
            row = self.row(f"demotion, {mode}", self.spec.demotion, several)
            row["demoted_GBps"] = statistics.median(one.demoted_GBps for one in several)
            report["rows"].append(row | {"wall_s_all": [one.wall_s for one in several]})
        pairs = list(zip(runs["tiers on"], runs["tiers off"], strict=True))
        p99 = [(_p99(on.gaps_ms), _p99(off.gaps_ms)) for on, off in pairs]
        report["demotion"] = {
            "pairs": self.spec.pairs,
            "throughput_ratio": _median_interval([off.wall_s / on.wall_s for on, off in pairs]),
            "itl_p99_ratio": _median_interval([on / off for on, off in p99]),
            "allocation_waits": sum(on.allocation_waits for on, _ in pairs),
        }

    def promotion(self, report: dict[str, Any]) -> None:
        """One request is cancelled while its prefix loads; then two load it while others decode."""
        prefix, quiet, busy, promoted, waits_s = self.prompt(self.spec.prefix), [], [], set(), []
        self.submit(prefix, 1)
        self.run()
        self.to_host()
        held, before = self.blocks_used(), self.counter("promoted_host_blocks")
        self.submit([*prefix, *self.prompt(SUFFIX_TOKENS)], self.spec.tokens)
        self.run(lambda: self.counter("promoted_host_blocks") > before)
        self.settle()
        is_released = self.blocks_used() == held
        for _ in range(self.spec.repeats):
            self.to_host()
            before = self.counter("promoted_host_blocks")
            some = [self.prompt(DECODING_TOKENS) for _ in range(NUM_DECODING)]
            most = self.spec.tokens + SPARE_TOKENS
            decoding = [self.submit(prompt, most, DEVICE_ONLY.name) for prompt in some]
            began = self.run(partial(self.have, decoding, 0))
            came = self.run(partial(self.have, decoding, self.spec.tokens // 4))
            two = [[*prefix, *self.prompt(SUFFIX_TOKENS)] for _ in range(2)]
            loading = [self.submit(prompt, 1) for prompt in two]
            ended = self.run(partial(self.have, loading, 0))
            quiet += self.gaps_ms(decoding, began, came)
            busy += self.gaps_ms(decoding, came, ended)
            promoted.add((self.counter("promoted_host_blocks") - before) * self.block_bytes)
            waits_s.append(min(self.times[name][0] for name in loading) - came)
        prefix_bytes = len(prefix) * self.token_bytes // self.block_bytes * self.block_bytes
        limit_ms = prefix_bytes / self.limits["h2d_GBps"] / 1e6
        names = ("quiet", f"while {len(prefix)} tokens come up")
        for name, gaps in zip(names, (quiet, busy), strict=True):
            report["rows"].append({"part": "promotion", "requests": name, **_itl(gaps)})
        report["promotion"] = {
            "itl_p99_ratio": _p99(busy) / _p99(quiet),
            "ttft_ms": statistics.median(waits_s) * 1e3,
            "limit_ms": limit_ms,
            "ratio": limit_ms / statistics.median(waits_s) / 1e3,
            "prefix_bytes": prefix_bytes,
            "bytes_promoted": max(promoted),
            "is_share_released": is_released,
        }
        if promoted != {prefix_bytes}:
            report["problems"].append(f"two requests of one prefix had {promoted} bytes promoted")
        if not is_released:
            report["problems"].append("a cancelled request still holds blocks")

    # Serving

    def serve(self, workload: Workload, retention: str | None = None) -> _Served:
        """Serve a workload of new prompts with empty RAM tiers."""
        self.settle()
        self.core.evict()
        prompts = [self.prompt(workload.given) for _ in range(workload.requests)]
        demoted, waits = self.counter("demoted_host_blocks"), self.counter("allocation_waits")
        start = time.perf_counter()
        ids = [self.submit(prompt, workload.made, retention) for prompt in prompts]
        wall_s = self.run() - start
        moved = (self.counter("demoted_host_blocks") - demoted) * self.block_bytes
        waited = self.counter("allocation_waits") - waits
        return _Served(wall_s, self.gaps_ms(ids), moved / wall_s / 1e9, waited)

    def prompt(self, count: int) -> list[int]:
        """Return tokens that were never seen."""
        tokens: list[int] = self.random.integers(self.core.info.vocab_size, size=count).tolist()
        return tokens

    def submit(self, prompt: list[int], max_tokens: int, retention: str | None = None) -> str:
        """Queue a request whose answer has exactly so many tokens."""
        name = f"bench-{len(self.times)}"
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.times[name] = []
        self.core.add_request(
            EngineRequest(
                request_id=name, prompt_token_ids=prompt, params=params, retention=retention
            )
        )
        self.unfinished.add(name)
        return name

    def run(self, until: Callable[[], bool] = lambda: False) -> float:
        """Step until something holds or every request has ended; return when that was."""
        while self.unfinished and not until():
            self.step()
        return time.perf_counter()

    def settle(self) -> None:
        """Cancel what runs, and wait until nothing moves."""
        for name in self.unfinished:
            self.core.abort(name)
        while self.core.has_work:
            self.step()

    def step(self) -> None:
        """Step once, note when tokens came, and wait if there is nothing to compute."""
        outputs, now = self.core.step(), time.perf_counter()
        for output in outputs:
            if output.finish_reason == "error":
                raise TieredKVError(f"A request failed: {output.error}")
            self.times[output.request_id] += [now] * len(output.token_ids)
            self.unfinished -= {output.request_id} if output.finish_reason else set()
        if self.core.has_work:
            self.core.wait(0.01)

    def to_host(self) -> None:
        """Cancel what runs and empty the device tier."""
        self.settle()
        if not self.core.demote(Tier.HOST):
            raise TieredKVError("Not everything could be demoted to host memory; see the log")

    # Figures

    def have(self, ids: Sequence[str], count: int) -> bool:
        """Return whether each of some requests has more tokens than that."""
        return all(len(self.times[name]) > count for name in ids)

    def gaps_ms(self, ids: Sequence[str], start: float = 0, end: float = 1e99) -> list[float]:
        """Return the times between two tokens of a request, of which the second came in a span."""
        pairs = (pair for name in ids for pair in itertools.pairwise(self.times[name]))
        return [(late - early) * 1e3 for early, late in pairs if start < late <= end]

    def counter(self, name: str) -> int:
        """Return one of the cache's counters."""
        counters: Any = self.core.tier_stats()["counters"]
        return int(counters[name])

    def blocks_used(self) -> list[int]:
        """Return how many blocks requests and copies hold in each RAM tier."""
        stats: Any = self.core.tier_stats()
        return [stats[tier]["blocks_used"] for tier in (Tier.DEVICE, Tier.HOST)]

    def step_s(self, count: int, context: float) -> float:
        """Return the least time of a step: it reads the weights once and each request's KV."""
        read = self.weight_bytes + count * context * self.token_bytes
        return read / self.limits["copy_GBps"] / 1e9

    def row(self, part: str, workload: Workload, served: Sequence[_Served]) -> Row:
        """Return the medians of several runs beside the least time of one."""
        count, given, made = workload
        shape = self.core.model.shape
        flops = 4 * shape.num_layers * shape.num_heads * shape.head_dim * given * (given + 1) // 2
        flops += 2 * self.num_body * given
        limit_s = count * flops / self.limits["gemm_TFLOPs"] / 1e12
        limit_s += (made - 1) * self.step_s(count, given + made / 2)
        wall_s = statistics.median(one.wall_s for one in served)
        return {
            "part": part,
            "requests": f"{count}x{given}+{made}",
            "output_tok_s": count * made / wall_s,
            "prompt_tok_s": count * given / wall_s,
            **_itl([gap for one in served for gap in one.gaps_ms]),
            "wall_s": wall_s,
            "limit_ms": limit_s * 1e3,
            "ratio": limit_s / wall_s,
        }


def _itl(gaps_ms: list[float]) -> Row:
    if not gaps_ms:
        raise ConfigError("There are no two tokens to measure between; ask for more output tokens")
    return {"itl_p50_ms": float(np.median(gaps_ms)), "itl_p99_ms": _p99(gaps_ms)}


def _p99(values: list[float]) -> float:
    return float(np.quantile(values, 0.99, method="higher"))


def _median_interval(values: list[float]) -> dict[str, float]:
    """Return the median and its 95 % bootstrap interval."""
    draws = np.random.default_rng(0).choice(values, (10_000, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return {"median": statistics.median(values), "low": float(low), "high": float(high)}
