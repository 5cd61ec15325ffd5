"""`bench decode`: the time between tokens, throughput, and what moving blocks does to both.

The limit of a step is the bytes that it must read, weights and KV, over the copy bandwidth of the
same run; that of a prompt is its FLOPs over the rate of a large matrix product. Times are read
when `EngineCore.step` hands tokens out. A workload's row is its median run by the wall clock.
"""

import contextlib
import gc
import itertools
import re
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tieredkv.bench import raw
from tieredkv.config import DEFAULT_POLICIES, Settings
from tieredkv.engine.core import EngineCore
from tieredkv.engine.loader import FoundModel, find_model
from tieredkv.engine.messages import EngineRequest
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import ConfigError, TieredKVError
from tieredkv.retention import IN_MEMORY, RetentionPolicy
from tieredkv.types import Progress, Tier

DEVICE_ONLY = RetentionPolicy(
    name="device_only", idle_s=600.0, absolute_s=3600.0, tiers=frozenset({Tier.DEVICE})
)
RETENTIONS = {"on": IN_MEMORY.name, "off": DEVICE_ONLY.name}
NUM_DECODING, DECODING_TOKENS, SUFFIX_TOKENS, SPARE_TOKENS = 8, 1024, 64, 2000
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


def run(settings: dict[str, Any], progress: Progress, **options: Any) -> Row:
    """Measure what the options of the command tell, demotion in an engine with little VRAM."""
    several = [Workload(1, context, options["tokens"] + 1) for context in options["contexts"]]
    several += map(Workload.parse, options["workloads"])
    evicting = [Workload.parse(text) for text in options["demotion"]]
    found = find_model(settings["model"], dtype=settings.get("dtype"))
    limits = {"copy_GBps": raw.copy_GBps(), "gemm_TFLOPs": raw.gemm_TFLOPs(found.dtype)}
    limits["h2d_GBps"] = raw.h2d_GBps()
    report = {"model": found.name, "dtype": found.dtype, "raw": limits, "rows": [], "problems": []}
    bench, prefix = partial(_Bench, settings, found, report, progress), options["promotion"]
    if several or prefix:
        decoding = prefix + NUM_DECODING * (DECODING_TOKENS + SPARE_TOKENS)
        most = max([decoding, *(workload.num_tokens for workload in several)])
        with contextlib.closing(bench(most * 5 // 4, 2 * prefix)) as engine:
            engine.serving(several, options["repeats"])
            if prefix:
                engine.promotion(prefix, options["tokens"], options["repeats"])
        del engine
    for workload in evicting:
        size = workload.num_tokens
        with contextlib.closing(bench(size // 4, size)) as engine:
            engine.demotion(workload, options["pairs"])
        del engine
    return report


class _Bench:
    """One engine, its requests, when each of their tokens came, and what is measured with it."""

    def __init__(
        self,
        settings: dict[str, Any],
        found: FoundModel,
        report: Row,
        progress: Progress,
        device_tokens: int,
        host_tokens: int,
    ) -> None:
        gc.collect()  # the pool of the engine before
        tokens = {"device_size": device_tokens, "host_size": host_tokens}
        size = found.kv_spec(16).token_bytes
        sizes = {name: max(MIN_TIER_BYTES, count * size) for name, count in tokens.items()}
        told = {**sizes, **settings, "policies": (*DEFAULT_POLICIES, DEVICE_ONLY)}
        self.core = core = EngineCore(Settings(**told), progress=progress)
        self.close, self.report, self.progress = core.close, report, progress
        self.times: dict[str, list[float]] = {}
        self.unfinished: set[str] = set()
        self.random = np.random.default_rng(0)
        model: Any = core.model.model
        ends = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
        ends_numel = sum({id(weight): weight.numel() for weight in ends}.values())
        self.num_body = sum(weight.numel() for weight in model.parameters()) - ends_numel
        self.weight_bytes = (self.num_body + ends[1].numel()) * ends[1].element_size()

    def serving(self, workloads: Sequence[Workload], repeats: int) -> None:
        """Serve workloads: the ITL of one request alone, the throughput of several."""
        for done, workload in enumerate(workloads):
            self.progress("serving", done, len(workloads))
            self.serve("", Workload(min(4, workload.requests), workload.given, 4))  # warms up
            part, repeats_here = ("throughput", repeats) if workload.requests > 1 else ("itl", 1)
            self.add_median([self.serve(part, workload) for _ in range(repeats_here)])
        self.progress("serving", 1, 1)

    def demotion(self, workload: Workload, pairs: int) -> None:
        """Serve a workload with demotion and without it, in pairs of changing order."""
        runs: dict[str, list[Row]] = {mode: [] for mode in RETENTIONS}
        for pair in range(pairs + 1):  # the first warms up
            self.progress("pairs", pair, pairs + 1)
            for mode in sorted(runs, reverse=pair % 2 == 0):
                runs[mode].append(self.serve(f"tiers {mode}", workload, RETENTIONS[mode]))
        self.progress("pairs", 1, 1)
        on, off = (self.add_median(several[1:]) for several in runs.values())
        self.report["demotion"] = {"pairs": pairs, "demoted_GBps": on["demoted_GBps"]}
        for name, shown in (("wall_s", "throughput_ratio"), ("itl_p99_ms", "itl_p99_ratio")):
            ratios = np.divide(off[f"{name}_all"], on[f"{name}_all"])
            ratios = ratios if name == "wall_s" else 1 / ratios
            draws = np.random.default_rng(0).choice(ratios, (10_000, pairs))
            low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5)).tolist()
            interval = {shown: statistics.median(ratios.tolist()), f"{shown}_95": [low, high]}
            self.report["demotion"] |= interval

    def promotion(self, num_tokens: int, num_gaps: int, repeats: int) -> None:
        """Cancel a request while its prefix loads; then let two load it while others decode."""
        prefix, quiet, busy, loaded, waits_ms = self.prompt(num_tokens), [], [], set(), []
        self.submit(prefix, 1)
        self.run()
        self.to_host()
        held, before = self.blocks_used(), self.counter("promoted_host_blocks")
        self.submit([*prefix, *self.prompt(SUFFIX_TOKENS)], SPARE_TOKENS)
        self.run(lambda: self.counter("promoted_host_blocks") > before)
        self.settle()
        is_released = self.blocks_used() == held
        for done in range(repeats):
            self.progress("promotion", done, repeats)
            self.to_host()
            before = self.counter("promoted_host_blocks")
            some = [self.prompt(DECODING_TOKENS) for _ in range(NUM_DECODING)]
            decoding = [self.submit(prompt, SPARE_TOKENS, DEVICE_ONLY.name) for prompt in some]
            began = self.run(partial(self.have, decoding, 0))
            came = self.run(partial(self.have, decoding, min(num_gaps, SPARE_TOKENS // 2)))
            two = [[*prefix, *self.prompt(SUFFIX_TOKENS)] for _ in range(2)]
            loading = [self.submit(prompt, 1) for prompt in two]
            ended = self.run(partial(self.have, loading, 0))
            quiet += self.gaps_ms(decoding, began, came)
            busy += self.gaps_ms(decoding, came, ended)
            loaded.add(self.counter("promoted_host_blocks") - before)
            waits_ms.append((min(self.times[name][0] for name in loading) - came) * 1e3)
        self.progress("promotion", 1, 1)
        spec, rows = self.core.kv_spec, [_itl(quiet), _itl(busy)]
        blocks, wait_ms = num_tokens // spec.block_size, statistics.median(waits_ms)
        limit_ms = blocks * spec.block_bytes / self.report["raw"]["h2d_GBps"] / 1e6
        for name, row in zip(("quiet", f"beside {num_tokens} tokens"), rows, strict=True):
            self.report["rows"].append({"part": "promotion", "requests": name, **row})
        self.report["promotion"] = {
            "itl_p99_ratio": rows[1]["itl_p99_ms"] / rows[0]["itl_p99_ms"],
            "ttft_ms": wait_ms,
            "limit_ms": limit_ms,
            "ratio": limit_ms / wait_ms,
            "prefix_bytes": blocks * spec.block_bytes,
            "bytes_promoted": max(loaded) * spec.block_bytes,
            "is_share_released": is_released,
        }
        if loaded != {blocks}:
            self.report["problems"].append(f"two requests of one prefix loaded {loaded} blocks")
        if not is_released:
            self.report["problems"].append("a cancelled request still holds blocks")

    def serve(self, part: str, workload: Workload, retention: str | None = None) -> Row:
        """Serve a workload of new prompts with empty RAM tiers; return what one row tells."""
        self.settle()
        self.core.evict()
        requests, given, made = workload
        prompts = [self.prompt(given) for _ in range(requests)]
        names = ("demoted_host_blocks", "allocation_waits")
        before = [self.counter(name) for name in names]
        start = time.perf_counter()
        ids = [self.submit(prompt, made, retention) for prompt in prompts]
        wall_s = self.run() - start
        demoted, waits = (self.counter(n) - was for n, was in zip(names, before, strict=True))
        shape, spec, limits = self.core.model.shape, self.core.kv_spec, self.report["raw"]
        flops = 4 * shape.num_layers * shape.num_heads * shape.head_dim * given * (given + 1) // 2
        flops += 2 * self.num_body * given
        read = self.weight_bytes + requests * (given + made / 2) * spec.token_bytes
        itl, limit_ms = _itl(self.gaps_ms(ids)), read / limits["copy_GBps"] / 1e6
        timed_ms = itl["itl_p50_ms"]
        if requests > 1:
            timed_ms, limit_ms = wall_s * 1e3, (made - 1) * limit_ms
            limit_ms += requests * flops / limits["gemm_TFLOPs"] / 1e9
        return {
            "part": part,
            "requests": f"{requests}x{given}+{made}",
            "output_tok_s": requests * made / wall_s,
            "prompt_tok_s": requests * given / wall_s,
            **itl,
            "wall_s": wall_s,
            "limit_ms": limit_ms,
            "ratio": limit_ms / timed_ms,
            "demoted_GBps": demoted * spec.block_bytes / wall_s / 1e9,
            "allocation_waits": waits,
        }

    def add_median(self, several: list[Row]) -> Row:
        """Report the median run by the wall clock, with the times of all."""
        row = dict(sorted(several, key=lambda row: float(row["wall_s"]))[len(several) // 2])
        for name in ("wall_s", "itl_p99_ms"):
            row[f"{name}_all"] = [one[name] for one in several]
        self.report["rows"].append(row)
        return row

    def prompt(self, count: int) -> list[int]:
        """Return tokens that were never seen."""
        tokens: list[int] = self.random.integers(self.core.info.vocab_size, size=count).tolist()
        return tokens

    def submit(self, prompt: list[int], max_tokens: int, retention: str | None = None) -> str:
        """Queue a request whose answer has exactly so many tokens."""
        name, told = (
            f"bench-{len(self.times)}",
            {"prompt_token_ids": prompt, "retention": retention},
        )
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.times[name] = []
        self.core.add_request(EngineRequest(request_id=name, params=params, **told))
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


def _itl(gaps_ms: list[float]) -> Row:
    if not gaps_ms:
        raise ConfigError("There are no two tokens to measure between; ask for more output tokens")
    p99 = sorted(gaps_ms)[-1 - len(gaps_ms) // 100]
    return {"itl_p50_ms": statistics.median(gaps_ms), "itl_p99_ms": p99}
