"""Measures how much moving blocks between VRAM and host memory slows down the running requests.

    python -m tests.stress.moving_blocks --model random:llama-3.1-8b --promotion 32768

--demotion   runs a workload with VRAM for a quarter of it, in pairs with and without the host tier
--promotion  promotes a prefix from host memory while 8 requests decode; measures their ITL

A problem is reported if two requests load the same prefix twice, or if a cancelled request still
holds blocks.
"""

import contextlib
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import click
import numpy as np

from tieredkv.bench import raw
from tieredkv.bench.decode import Bench, Row, Workload, begin, parse_workload
from tieredkv.bench.progress import bench_progress
from tieredkv.cli.settings import settings_options
from tieredkv.config import LoadedSettings
from tieredkv.engine.loader import find_model
from tieredkv.errors import TieredKVError
from tieredkv.retention import DEFAULT_POLICIES, IN_MEMORY, RetentionPolicy
from tieredkv.types import Progress, Tier, tracked

DEVICE_ONLY = RetentionPolicy(
    name="device_only", idle_s=600.0, absolute_s=3600.0, tiers=frozenset({Tier.DEVICE})
)
RETENTIONS = {"on": IN_MEMORY.name, "off": DEVICE_ONLY.name}
NUM_DECODING, DECODING_TOKENS, SUFFIX_TOKENS, SPARE_TOKENS = 8, 1024, 64, 2000


def run(
    settings: Row,
    progress: Progress,
    *,
    demotion: str | None,
    promotion: int,
    pairs: int = 7,
    repeats: int = 15,
    tokens: int = 200,
) -> Row:
    """Measure demotion, promotion or both; demotion in an engine with little VRAM."""
    settings = settings | {"policies": (*DEFAULT_POLICIES, DEVICE_ONLY)}
    report = begin(settings)
    report["raw"]["h2d_GBps"] = raw.h2d_GBps()
    token_bytes = (
        find_model(settings["model"], dtype=settings.get("dtype", "auto")).kv_spec(None).token_bytes
    )
    if promotion:
        room = (promotion + NUM_DECODING * (DECODING_TOKENS + SPARE_TOKENS)) * 3 // 2
        told = {"host_size": 2 * promotion * token_bytes, **settings}
        with contextlib.closing(Moving(told, report, progress, room)) as moving:
            moving.promotion(promotion, tokens, tracked(progress, "promotion", range(repeats)))
        del moving
        gc.collect()  # free its pool in VRAM
    if demotion:
        workload = parse_workload(demotion)
        room = workload.num_tokens
        told = {"host_size": room * token_bytes, **settings}
        with contextlib.closing(Moving(told, report, progress, room // 4)) as moving:
            moving.demotion(workload, pairs, progress)
    return report


class Moving(Bench):
    """An engine, and the measurements while its blocks move."""

    def demotion(self, workload: Workload, pairs: int, progress: Progress) -> None:
        """Serve a workload with and without demotion, in pairs whose order alternates."""
        runs: dict[str, list[Row]] = {mode: [] for mode in RETENTIONS}
        for pair in tracked(progress, "pairs", range(pairs + 1)):  # the first warms up
            for mode in sorted(runs, reverse=pair % 2 == 0):
                runs[mode].append(self.serve_counted(mode, workload))
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

    def promotion(self, num_tokens: int, num_gaps: int, repeats: Iterable[int]) -> None:
        """Cancel a request while its prefix loads; then let two load it while others decode."""
        prefix, quiet, busy, loaded, waits_ms = self.prompt(num_tokens), [], [], set(), []
        self.submit(prefix, 1)
        self.run()
        self.to_host()
        before = self.counts()
        self.submit([*prefix, *self.prompt(SUFFIX_TOKENS)], SPARE_TOKENS)
        self.run_until(lambda: self.since(before, "promoted_host_blocks") > 0)
        self.settle()
        is_released = self.counts()["held"] == before["held"]
        for _ in repeats:
            self.to_host()
            before = self.counts()
            two = [[*prefix, *self.prompt(SUFFIX_TOKENS)] for _ in range(2)]
            some = [self.prompt(DECODING_TOKENS) for _ in range(NUM_DECODING)]
            decoding = [self.submit(prompt, SPARE_TOKENS, DEVICE_ONLY.name) for prompt in some]
            began = self.run_until(partial(self.have, decoding, 0))
            came = self.run_until(partial(self.have, decoding, min(num_gaps, SPARE_TOKENS // 2)))
            loading = []
            for prompt in two:  # one request per step, as the engine's process takes them
                loading.append(self.submit(prompt, 1))
                self.step()
            ended = self.run_until(partial(self.has_loaded, before))
            self.run_until(partial(self.have, loading, 0))
            quiet += self.gaps_ms(decoding, began, came)
            busy += self.gaps_ms(decoding, came, ended)
            loaded.add(self.since(before, "promoted_host_blocks"))
            waits_ms.append((min(self.times[name][0] for name in loading) - came) * 1e3)
        spec = self.core.kv_spec
        rows = [raw.percentiles_ms("itl", gaps, (50, 99)) for gaps in (quiet, busy)]
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

    def run_until(self, holds: Callable[[], bool]) -> float:
        """Step until a condition holds; return the moment."""
        while self.core.has_work and not holds():
            self.step()
        return time.perf_counter()

    def settle(self) -> None:
        """Cancel all requests, and wait until no block moves."""
        self.core.abort_all()
        self.run()

    def serve_counted(self, mode: str, workload: Workload) -> Row:
        """Serve a workload with or without the host tier, and count the bytes that moved."""
        self.settle()
        before = self.counts()
        row = self.serve(f"tiers {mode}", workload, RETENTIONS[mode])
        moved = self.since(before, "demoted_host_blocks") * self.core.kv_spec.block_bytes
        waits = self.since(before, "allocation_waits")
        return {**row, "demoted_GBps": moved / row["wall_s"] / 1e9, "allocation_waits": waits}

    def gaps_ms(self, ids: Sequence[str], start: float, end: float) -> list[float]:
        """Return the times between two tokens of a request, if the second came within a span."""
        pairs = (pair for name in ids for pair in itertools.pairwise(self.times[name]))
        return [(late - early) * 1e3 for early, late in pairs if start < late <= end]

    def to_host(self) -> None:
        """Cancel all requests and demote all blocks of the device tier."""
        self.settle()
        if not self.core.cache.flush(Tier.HOST, deadline=time.monotonic() + 60):
            raise TieredKVError("not every block could be demoted to host memory; see the log")

    def have(self, ids: Sequence[str], count: int) -> bool:
        """Return whether each of these requests has more than `count` tokens."""
        return all(len(self.times[name]) > count for name in ids)

    def has_loaded(self, before: Row) -> bool:
        """Return whether blocks were promoted and no copy is pending any more."""
        has_begun = self.since(before, "promoted_host_blocks") > 0
        return has_begun and not self.core.parts.tiers.device_link.has_pending

    def counts(self) -> Row:
        """Return the cache's counters, and as `held` the blocks in use in each RAM tier."""
        stats: Row = self.core.tier_stats.read()
        return {**stats["counters"], "held": [stats[t]["blocks_used"] for t in ("device", "host")]}

    def since(self, before: Row, counter: str) -> int:
        """Return how much a counter has grown."""
        return int(self.counts()[counter] - before[counter])


@click.command()
@click.option("--model", required=True, help="As for `serve`, e.g. random:llama-3.1-8b.")
@click.option("--demotion", help="Workload of the demotion part, e.g. 64x2048+64; else skipped.")
@click.option("--pairs", default=7, show_default=True, help="Pairs of runs of the demotion part.")
@click.option("--promotion", default=0, help="Tokens of the promoted prefix; 0 skips that part.")
@click.option("--repeats", default=15, show_default=True, help="Runs of the promotion part.")
@click.option("--tokens", default=200, show_default=True, help="Tokens decoded before a promotion.")
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
@settings_options("model", "cache", "scheduler", without=("seed", "device", "default_retention"))
def main(loaded: LoadedSettings, commit: str | None, **options: Any) -> None:
    """Measure how much moving blocks slows down running requests; print JSON."""
    report = run(loaded.given(), bench_progress(), **options)
    click.echo(json.dumps(raw.head(commit, "python -m tests.stress.moving_blocks") | report))
    sys.exit(1 if report["problems"] else 0)


if __name__ == "__main__":
    main()
