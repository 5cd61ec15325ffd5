"""`bench restore`: one request whose prefix is on disk: computed, loaded, or both at once.

For every prefix length and repeat, a new prefix is served in each of these arms, which take turns:

    cold      with empty tiers: everything is computed; each block's KV bytes are digested
    load      from disk, with VRAM and host memory empty: everything is loaded
    planned   the same, and the planner decides which blocks are computed and which are loaded
    device    from VRAM
    chunked   as `cold`, in steps of at most CHUNK_TOKENS, to see by how much that changes logits

Each case has a prefix of its own, so that no earlier one can serve it. `elsewhere_tokens` is the
number of tokens that came from a tier that the arm does not claim, such as host memory. The worker
reads without the page cache where `page_cache` is `bypassed`, and `bytes_from_disk` are the bytes
that the kernel read from storage for it. The report complains if tokens were served from elsewhere,
or if these bytes are not 0.95 to 1.2 times `bytes_loaded`; in `planned` they may be more, because
computing overtakes reads.

Just before each arm but `device`, the raw rate of the disk is measured, as the best of 4, 16 and 32
threads (`raw_by_threads_GBps` has each); before `load` over as many bytes as that arm loads, since
some disks read faster for a second than for long. The best of three measurements of a disk whose
rate varies is above its mean. The disk tier may have a limit on its reads, as on a slower disk.

The report compares `planned` with the better of the other two and with the ideal: the least, over
all splits m, of the longer of computing m tokens and loading the rest at the raw rate, plus the
time of the arm `device`. The time of computing m tokens is interpolated between the cold arms.
"""

import contextlib
import itertools
import math
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from tieredkv.bench import raw, sources
from tieredkv.bench.processes import cut_short, in_new_process, noting_interruptions
from tieredkv.bench.progress import bench_progress
from tieredkv.bench.sources import DiskShare
from tieredkv.bench.temporary_keys import temporary_folder, temporary_keys
from tieredkv.bench.ttft import (
    SUFFIX_TOKENS,
    Sample,
    are_tokens_equal,
    compare,
    demote_all,
    find_problems,
    have_equal_bytes,
    look_up,
    make_prompt,
    serve_once,
    tier_sizes,
)
from tieredkv.cache.tail import hit_pages
from tieredkv.engine.llm import LLM
from tieredkv.types import KVSpec, Progress, Tier, tracked

RAW_BYTES = {"cuda": 512 << 20, "cpu": 32 << 20}
"""Least bytes of a measurement of the raw disk, which has a file of four times as many."""

FROM_DISK = (("planned", "load"), ("load", "planned"))
MODES = {"cold": "compute", "load": "load", "planned": "auto", "device": "load"}
MODES |= {"chunked": "compute"}
CLAIMED = {"cold": None, "load": "disk", "planned": "disk", "device": "device", "chunked": None}

CHUNK_TOKENS = 272  # no multiple of what kernels work on, as splits are
MAX_LOGIT_RATIO = 2.0
"""Logits of `planned` may differ from the cold ones so many times as much as those of `chunked`."""

COLUMNS: tuple[str, ...] = ("arm", "prefix_tokens", "disk_rate_GBps", "ttft_ms.p50", "ttft_ms.min")
COLUMNS += ("predicted_ms", "raw_GBps", "over_cold", "over_better", "ideal_ms", "over_ideal")
COLUMNS += ("computed_tokens", "loaded_tokens", "load_GBps", "elsewhere_tokens")
COLUMNS += ("disk_over_loaded", "tokens_equal_cold", "max_logit_diff", "kv_bytes_equal")
PLOTTED = (("ttft_ms.p50", "ideal_ms"),)

Row = dict[str, Any]


class Run(NamedTuple):
    """One prompt served in one arm.

    Attributes:
        sample: what came back.
        raw_GBps: the disk's rate beside it, for each number of threads; empty if unknown.
        load_s: from the first read to the last block in VRAM; 0.0 if nothing was read.
        load_bytes: what was read from disk into VRAM.
    """

    sample: Sample
    raw_GBps: list[float]
    load_s: float
    load_bytes: int


Runs = dict[tuple[str, int, int], list[Run]]
"""Runs by arm, prefix length and limit of the reads in bytes per second; 0 is none."""


def measure(
    settings: Row,
    folder: Path,
    arms: list[str],
    lengths: list[int],
    limits: list[int],
    repeats: int,
) -> tuple[Runs, Row]:
    """Serve every prompt in each arm, in this process; also return the rates learnt.

    An interruption ends it with the cases that were served in all arms.
    """
    progress, runs = bench_progress(), Runs()
    with (
        LLM(**settings, retention="24h", progress=progress) as llm,
        contextlib.closing(
            raw.RawDisk(folder, 4 * RAW_BYTES[raw.device()], raw.BEST_THREADS)
        ) as disk,
    ):
        serve_once(llm, make_prompt(llm, max(lengths), -1))  # warm-up
        demote_all(llm, "disk")
        serve_once(llm, make_prompt(llm, max(lengths), -1))  # the disk's rate is learnt
        llm.core.verbs.evict()
        with noting_interruptions() as interrupted:
            cases = list(itertools.product(range(repeats), lengths, limits))
            for repeat, length, limit in tracked(progress, "measuring", cases):
                prompt = make_prompt(llm, length, repeat * len(limits) + limits.index(limit))
                from_disk = [arm for arm in FROM_DISK[repeat % 2] if arm in arms]
                last = ["chunked"] if "chunked" in arms else []
                case = {
                    arm: _serve(llm, prompt, arm, limit, disk)
                    for arm in ("cold", *from_disk, "device", *last)
                    if not interrupted.is_set()
                }
                if interrupted.is_set():
                    llm.core.verbs.evict()  # or it would be written when the engine closes
                    break
                for arm, run in case.items():
                    runs.setdefault((arm, length, limit), []).append(run)
                demote_all(llm, "disk")
                llm.core.verbs.evict()
        return runs, _learnt(llm, lengths)


def _learnt(llm: LLM, lengths: list[int]) -> Row:
    """Return the rates that the engine has learnt."""
    tiers, now = llm.core.parts.tiers, time.monotonic()
    return {
        "read_GBps": round(tiers.disk_link.read_rate.effective(now) / 1e9, 3),
        "h2d_GBps": round(tiers.device_link.up_bytes_per_s / 1e9, 3),
        "prefill_s": {str(n): round(tiers.compute_rate.seconds(0, n), 4) for n in lengths},
    }


def _serve(llm: LLM, prompt: list[int], arm: str, limit: int, disk: raw.RawDisk) -> Run:
    """Serve a prompt once, with the raw rate of the disk measured just before."""
    core, is_in_vram = llm.core, arm == "device"
    if arm in FROM_DISK[0]:
        demote_all(llm, "disk")
    if arm == "chunked":
        core.verbs.evict()
    num_bytes = (len(prompt) - SUFFIX_TOKENS) * core.kv_spec.token_bytes if arm == "load" else 0
    num_bytes = max(num_bytes, RAW_BYTES[raw.device()])
    raw_GBps = [] if is_in_vram else disk.read_GBps(num_bytes)
    mode: Any = MODES[arm]
    core.parts.tiers.settings.restore = mode
    core.parts.tiers.disk_link.read_rate.limit = limit or math.inf
    times: list[float] = []
    store = core.parts.tiers.store
    assert store is not None
    load = store.load

    def note_load(pages: Any) -> None:
        times.append(time.perf_counter())
        load(pages)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(store, "load", note_load))
        for name in ("max_num_batched_tokens", "max_num_alone_tokens") if arm == "chunked" else ():
            stack.enter_context(mock.patch.object(core.scheduler, name, CHUNK_TOKENS))
        sample = serve_once(llm, prompt, digested=not is_in_vram)
    load_bytes = len(sample.loaded) * core.kv_spec.block_bytes if sample.by_tier[Tier.DISK] else 0
    return Run(sample, raw_GBps, sample.copied_at - times[0] if load_bytes else 0.0, load_bytes)


def run(
    _progress: Progress,
    *,
    settings: Row,
    prefix_tokens: list[int],
    arms: list[str],
    disk_rate: list[int],
    repeats: int,
) -> Row:
    """Run the whole bench in a new process, which draws its progress itself.

    If it is interrupted, the report has the cases that were measured by then.

    Raises:
        ConfigError: a prefix is too long for the model.
        ConfigError: `disk_dir` is not a folder and cannot be made.
        KeyboardInterrupt: it was interrupted before anything was measured.
        TieredKVError: the process failed.
    """
    found, kv_spec = look_up(settings)
    sizes = tier_sizes(prefix_tokens, repeats * len(disk_rate), found, kv_spec)
    with temporary_folder(settings.get("disk_dir")) as folder:
        places = {"disk_dir": f"{folder}/store", **temporary_keys(f"{folder}/keys")}
        settings = sizes | settings | {"restore": "load"} | places
        runs, learnt = in_new_process(
            measure, settings, Path(folder), arms, prefix_tokens, disk_rate, repeats
        )
        page_cache = sources.page_cache(Path(folder))
    if not runs:
        raise KeyboardInterrupt
    measured = [it for it in itertools.product(prefix_tokens, disk_rate) if ("cold", *it) in runs]
    cold = {length: _p50(runs["cold", length, disk_rate[0]]) for length, _ in measured}
    rows = [_row(arm, *case, runs, cold, kv_spec, page_cache) for case in measured for arm in arms]
    share = DiskShare.expected(settings, kv_spec)
    problems = []
    for row in rows:
        bytes_told = row["page_cache"], row["disk_over_loaded"]
        # Computing overtakes reads, and a rate is measured with reads that nobody waits for.
        text = share.problem(*bytes_told, may_exceed=row["arm"] == "planned")
        problems += find_problems(row, text)
    problems += logit_problems(rows)
    num_served = sum(len(runs["cold", *case]) for case in measured)
    problems += cut_short(num_served, repeats * len(prefix_tokens) * len(disk_rate), "cases")
    facts = {"model": found.name, "dtype": found.dtype, "block_size": kv_spec.block_size}
    raws = [max(run.raw_GBps) for some in runs.values() for run in some if run.raw_GBps]
    limits = {
        "h2d_GBps": raw.h2d_GBps(),
        "disk_read_GBps": round(statistics.median(raws), 3) if raws else None,
    }
    return {**facts, "learnt": learnt, "raw": limits, "rows": rows, "problems": problems}


def logit_problems(rows: list[Row]) -> list[str]:
    """Return a problem if logits of `planned` differ more from the cold ones than chunks cause."""
    most = dict[str, float]()
    for row in rows:
        most[row["arm"]] = max(row["max_logit_diff"], most.get(row["arm"], 0.0))
    if not {"planned", "chunked"} <= set(most):
        return []
    planned, chunked = most["planned"], most["chunked"]
    if planned <= MAX_LOGIT_RATIO * chunked:
        return []
    what = f"logits of planned differ by up to {planned:.3g} from the cold ones"
    return [f"{what}, where computing in steps of {CHUNK_TOKENS} tokens changes {chunked:.3g}"]


def _p50(runs: list[Run]) -> float:
    return statistics.median(run.sample.ttft_ms for run in runs)


def ideal_ms(
    length: int, cold: dict[int, float], spec: KVSpec, raw_GBps: float, device_ms: float
) -> float:
    """Return the least time of any split of a prefix.

    Args:
        length: of the prefix in tokens.
        cold: milliseconds to compute prefixes, by their length.
        spec: how keys and values lie in blocks.
        raw_GBps: the rate of the disk.
        device_ms: what the request takes when all is in VRAM.
    """
    known = sorted({0: 0.0, **cold}.items())
    at, took_ms = zip(*known, strict=True)
    splits = np.arange(0, length + 1, 16)
    # A prefill is quadratic in its length, so that it is interpolated as time per token.
    per_token = [ms / tokens if tokens else took_ms[1] / at[1] for tokens, ms in known]
    compute_ms = splits * np.interp(splits, at, per_token)
    window_bytes = hit_pages(spec) * spec.block_bytes
    num_bytes = (length - splits) * spec.token_bytes + window_bytes * (splits < length)
    load_ms = num_bytes / raw_GBps / 1e6
    return float(np.maximum(compute_ms, load_ms).min()) + device_ms


def _row(
    arm: str,
    length: int,
    limit: int,
    runs: Runs,
    cold_ms: dict[int, float],
    spec: KVSpec,
    page_cache: str,
) -> Row:
    """Return one row of the report: all repeats of an arm."""
    ours, cold = runs[arm, length, limit], runs["cold", length, limit]
    times = [round(run.sample.ttft_ms, 3) for run in ours]
    p50_ms = round(statistics.median(times), 3)
    pairs = [(each.sample, other.sample) for each, other in zip(ours, cold, strict=True)]
    differences, are_equal, are_excluded = zip(*(compare(*pair) for pair in pairs), strict=True)
    raws = [each.raw_GBps for each in ours if each.raw_GBps]
    raw_GBps = statistics.median(map(max, raws)) if raws else None
    by_threads = zip(raw.BEST_THREADS, zip(*raws, strict=True), strict=False)
    rates = [each.load_bytes / each.load_s / 1e9 for each in ours if each.load_s]
    predicted = [run.sample.predicted_ms for run in ours if run.sample.predicted_ms is not None]
    claimed, by_tier = CLAIMED[arm], [each.sample.by_tier for each in ours]
    from_disk = [each.sample.bytes_from_disk for each in ours]
    loaded = [each.load_bytes for each in ours]
    found = int(statistics.median(sum(run.sample.by_tier.values()) for run in ours))
    row = {
        "arm": arm,
        "prefix_tokens": length,
        "disk_rate_GBps": limit / 1e9 if limit else None,
        "ttft_ms": {"p50": p50_ms, "min": min(times), "all": times},
        "predicted_ms": round(statistics.median(predicted), 3) if predicted else None,
        "raw_GBps": round(raw_GBps, 3) if raw_GBps else None,
        "raw_by_threads_GBps": {n: round(statistics.median(all_), 3) for n, all_ in by_threads},
        "over_cold": round(p50_ms / _p50(cold), 3),
        "over_better": None,
        "over_ideal": None,
        "ideal_ms": None,
        "computed_tokens": length + SUFFIX_TOKENS - found,
        "loaded_tokens": int(statistics.median(each.sample.by_tier[Tier.DISK] for each in ours)),
        "by_tier": by_tier,
        "elsewhere_tokens": sum(sources.tokens_elsewhere(each, claimed) for each in by_tier),
        "is_from_claimed_tier": sources.are_from(by_tier, claimed, may_compute=arm == "planned"),
        "page_cache": page_cache if claimed == "disk" else None,
        "bytes_loaded": loaded,
        "bytes_from_disk": from_disk,
        "disk_over_loaded": sources.disk_over_loaded(from_disk, loaded),
        "load_GBps": round(statistics.median(rates), 3) if rates else None,
        "load_over_raw": None,
        "output_token_ids": [each.sample.token_ids for each in ours],
        "tokens_equal_cold": are_tokens_equal(are_equal, are_excluded),
        "num_prompts_excluded": sum(are_excluded),
        "max_logit_diff": max(differences),
        "kv_bytes_equal": have_equal_bytes(*zip(*pairs, strict=True)),
    }
    if arm == "planned" and ("load", length, limit) in runs:
        better = min(_p50(runs["cold", length, limit]), _p50(runs["load", length, limit]))
        row["over_better"] = round(p50_ms / better, 3)
    if raw_GBps and rates:
        row["load_over_raw"] = round(statistics.median(rates) / raw_GBps, 3)
    if raw_GBps and arm == "planned":
        rate = min(raw_GBps, limit / 1e9) if limit else raw_GBps
        device_ms = _p50(runs["device", length, limit])
        row["ideal_ms"] = round(ideal_ms(length, cold_ms, spec, rate, device_ms), 3)
        row["over_ideal"] = round(p50_ms / row["ideal_ms"], 3)
    return row
