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
from tieredkv.config import Settings
from tieredkv.engine.core import EngineCore
from tieredkv.engine.loader import find_model
from tieredkv.engine.messages import EngineRequest
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import ConfigError, TieredKVError
from tieredkv.retention import DEFAULT_POLICIES, IN_MEMORY, RetentionPolicy
from tieredkv.types import Progress, Tier, tracked

DEVICE_ONLY = RetentionPolicy(
    name="device_only", idle_s=600.0, absolute_s=3600.0, tiers=frozenset({Tier.DEVICE})
)
RETENTIONS = {"on": IN_MEMORY.name, "off": DEVICE_ONLY.name}
NUM_DECODING, DECODING_TOKENS, SUFFIX_TOKENS, SPARE_TOKENS = 8, 1024, 64, 2000
MIN_HOST_BLOCKS = 64

Row = dict[str, Any]


class Workload(NamedTuple):
    """Requests that are given to the engine at once, each with a prompt of its own."""

    requests: int
    given: int
    made: int


def _parse(text: str) -> Workload:
    """Read `128x1024+256`: requests x input + output tokens."""
    if match := re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,6})\+([1-9]\d{0,5})", text):
        return Workload(*map(int, match.groups()))
    raise ConfigError(f"`{text}` is no workload; write one such as 128x1024+256")


def _num_tokens(workload: Workload) -> int:
    return workload.requests * (workload.given + workload.made)


def run(settings: dict[str, Any], progress: Progress, **options: Any) -> Row:
    """Measure what the options of the command tell, demotion in an engine with little VRAM."""
    several = [Workload(1, context, options["tokens"] + 1) for context in options["contexts"]]
    several += map(_parse, filter(None, (options["workloads"] or "").split(",")))
    evicting = _parse(options["demotion"]) if options["demotion"] else None
    found = find_model(settings["model"], dtype=settings.get("dtype"))
    limits = {"copy_GBps": raw.copy_GBps(), "gemm_TFLOPs": raw.gemm_TFLOPs(found.dtype)}
    limits["h2d_GBps"] = raw.h2d_GBps()
    report = {"model": found.name, "dtype": found.dtype, "raw": limits, "rows": [], "problems": []}
    prefix, token_bytes = options["promotion"], found.kv_spec(16).token_bytes

    def engine(device_tokens: int, host_tokens: int) -> "contextlib.closing[_Bench]":
        gc.collect()  # the pool of the engine before
        host_tokens = max(host_tokens, MIN_HOST_BLOCKS * settings.get("block_size", 16))
        sizes = {"device_size": device_tokens * token_bytes, "host_size": host_tokens * token_bytes}
        policies = (*DEFAULT_POLICIES, DEVICE_ONLY)
        told = {"restore": "load", **sizes, **settings, "policies": policies}
        core = EngineCore(Settings(**told), progress=progress)
        return contextlib.closing(_Bench(core, report, progress))

    if several or prefix:
        decoding = prefix + NUM_DECODING * (DECODING_TOKENS + SPARE_TOKENS)
        with engine(max([decoding, *map(_num_tokens, several)]) * 3 // 2, 2 * prefix) as bench:
            bench.serving(several, options["repeats"])
            if prefix:
                bench.promotion(prefix, options["tokens"], options["repeats"])
        del bench
    if evicting:
        with engine(_num_tokens(evicting) // 4, _num_tokens(evicting)) as bench:
            bench.demotion(evicting, options["pairs"])
    return report


class _Bench:
    """One engine, its requests, when each of their tokens came, and what is measured with it."""

    def __init__(self, core: EngineCore, report: Row, progress: Progress) -> None:
        self.core = core
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
        for workload in tracked(self.progress, "serving", workloads):
            self.serve("", Workload(min(4, workload.requests), workload.given, 4))  # warms up
            part, times = ("throughput", repeats) if workload.requests > 1 else ("itl", 1)
            self.add_median([self.serve(part, workload) for _ in range(times)])

    def demotion(self, workload: Workload, pairs: int) -> None:
        """Serve a workload with demotion and without it, in pairs of changing order."""
        runs: dict[str, list[Row]] = {mode: [] for mode in RETENTIONS}
        for pair in tracked(self.progress, "pairs", range(pairs + 1)):  # the first warms up
            for mode in sorted(runs, reverse=pair % 2 == 0):
                runs[mode].append(self.serve(f"tiers {mode}", workload, RETENTIONS[mode]))
        on, off = (self.add_median(several[1:]) for several in runs.values())
        waits = sum(row["allocation_waits"] for row in runs["on"][1:])
        shown = {"pairs": pairs, "demoted_GBps": on["demoted_GBps"], "allocation_waits": waits}
        for name, over, under in (
            ("throughput_ratio", off["wall_s_all"], on["wall_s_all"]),
            ("itl_p99_ratio", on["itl_p99_ms_all"], off["itl_p99_ms_all"]),
        ):
            ratios = np.divide(over, under)
            draws = np.median(np.random.default_rng(0).choice(ratios, (10_000, pairs)), axis=1)
            shown[name] = float(np.median(ratios))
            shown[f"{name}_95"] = np.percentile(draws, (2.5, 97.5)).tolist()
        self.report["demotion"] = shown

    def promotion(self, num_tokens: int, num_gaps: int, repeats: int) -> None:
        """Cancel a request while its prefix loads; then let two load it while others decode."""
        prefix, quiet, busy, loaded, waits_ms = self.prompt(num_tokens), [], [], set(), []
        self.submit(prefix, 1)
        self.run()
        self.to_host()
        before = self.counts()
        self.submit([*prefix, *self.prompt(SUFFIX_TOKENS)], SPARE_TOKENS)
        self.run(lambda: self.since(before, "promoted_host_blocks") > 0)
        self.settle()
        is_released = self.counts()["held"] == before["held"]
        for _ in tracked(self.progress, "promotion", range(repeats)):
            self.to_host()
            before = self.counts()
            two = [[*prefix, *self.prompt(SUFFIX_TOKENS)] for _ in range(2)]
            some = [self.prompt(DECODING_TOKENS) for _ in range(NUM_DECODING)]
            decoding = [self.submit(prompt, SPARE_TOKENS, DEVICE_ONLY.name) for prompt in some]
            began = self.run(partial(self.have, decoding, 0))
            came = self.run(partial(self.have, decoding, min(num_gaps, SPARE_TOKENS // 2)))
            loading = [self.submit(prompt, 1) for prompt in two]
            ended = self.run(partial(self.has_loaded, before))
            self.run(partial(self.have, loading, 0))
            quiet += self.gaps_ms(decoding, began, came)
            busy += self.gaps_ms(decoding, came, ended)
            loaded.add(self.since(before, "promoted_host_blocks"))
            waits_ms.append((min(self.times[name][0] for name in loading) - came) * 1e3)
        spec, rows = self.core.kv_spec, [_itl(quiet), _itl(busy)]
        blocks, wait_ms = num_tokens // spec.block_size, statistics.median(waits_ms)
        limit_ms = blocks * spec.block_bytes / self.report["raw"]["h2d_GBps"] / 1e6
        for row, name in zip(rows, ("quiet", f"beside {num_tokens} tokens"), strict=True):
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
        before, start = self.counts(), time.perf_counter()
        ids = [self.submit(prompt, made, retention) for prompt in prompts]
        wall_s = self.run() - start
        moved = self.since(before, "demoted_host_blocks") * self.core.kv_spec.block_bytes
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
            "demoted_GBps": moved / wall_s / 1e9,
            "allocation_waits": self.since(before, "allocation_waits"),
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
        name = f"bench-{len(self.times)}"
        self.times[name] = []
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        asked: Row = {"request_id": name, "prompt_token_ids": prompt, "retention": retention}
        self.core.add_request(EngineRequest(**asked, params=params))
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

    def has_loaded(self, before: Row) -> bool:
        """Return whether blocks have come up and none is on its way any longer."""
        has_begun = self.since(before, "promoted_host_blocks") > 0
        return has_begun and not self.core.tiers.transfer.has_pending

    def gaps_ms(self, ids: Sequence[str], start: float = 0, end: float = 1e99) -> list[float]:
        """Return the times between two tokens of a request, of which the second came in a span."""
        pairs = (pair for name in ids for pair in itertools.pairwise(self.times[name]))
        return [(late - early) * 1e3 for early, late in pairs if start < late <= end]

    def counts(self) -> Row:
        """Return the cache's counters, and what requests and copies hold in each RAM tier."""
        stats: Row = self.core.tier_stats()
        return {**stats["counters"], "held": [stats[t]["blocks_used"] for t in ("device", "host")]}

    def since(self, before: Row, counter: str) -> int:
        """Return how much a counter has grown."""
        return int(self.counts()[counter] - before[counter])


def _itl(gaps_ms: list[float]) -> Row:
    if not gaps_ms:
        raise ConfigError("There are no two tokens to measure between; ask for more output tokens")
    p99 = sorted(gaps_ms)[-1 - len(gaps_ms) // 100]
    return {"itl_p50_ms": statistics.median(gaps_ms), "itl_p99_ms": p99}
