"""`bench ttft`: time to first token, cold and from each tier, with its proof.

For every prefix length and repeat, one prefix that was never seen is served:

    cold      the whole prompt, prefix + 64 tokens, with empty tiers; the prefix's KV bytes are
              digested where they were computed
    device    the prompt again; the prefix is in VRAM
    host      the prefix was demoted to host memory
    disk      the prefix was demoted to disk, and VRAM and host memory are empty
    restart   the first process has ended; a new one serves the prompt from disk

A hit counts with its proof: which tier the tokens came from, the digest of the reused blocks in
VRAM beside the one taken when they were computed, the output tokens beside the cold ones, the
largest difference of any logit. The 64 tokens behind the prefix are never cached.

Each process measures alone: `run` starts one for `measure`, and one for each restart, so that
process start is never part of a figure and a restart is a real one.
"""

import contextlib
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tieredkv.bench import raw
from tieredkv.bench.progress import terminal_progress
from tieredkv.engine.llm import LLM
from tieredkv.engine.loader import find_model
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import ConfigError, TieredKVError
from tieredkv.types import Progress, Tier, tracked

TIER_OF_ARM = {"device": "device", "host": "host", "disk": "disk", "restart": "disk"}
ARMS = ("cold", *TIER_OF_ARM)
SUFFIX_TOKENS = 64
OUTPUT_TOKENS = 8
PARAMS = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
MIN_RAM_BYTES = 32 << 20
MIN_DISK_BYTES = 256 << 20
DEMOTE_TIMEOUT_S = 300.0
PROBLEMS = {
    "tokens_equal_cold": "the output tokens differ from the cold ones",
    "kv_bytes_equal": "the KV bytes differ from the computed ones",
    "is_from_claimed_tier": "the tokens came from {by_tier}",
}

Row = dict[str, Any]
T = TypeVar("T")


class Spec(NamedTuple):
    """What to measure; `settings` are fields of `Settings`, `model` among them."""

    settings: dict[str, Any]
    prefix_tokens: list[int]
    arms: list[str]
    repeats: int
    bench_seed: int = 0


class Sample(NamedTuple):
    """A prompt served once.

    Attributes:
        logits: [output token, vocabulary].
        kv_digest: of the prefix's blocks in VRAM afterwards; None if they are not there.
    """

    ttft_ms: float
    by_tier: dict[Tier, int]
    token_ids: list[int]
    logits: npt.NDArray[np.float32]
    bytes_from_disk: int
    kv_digest: str | None


class Measured(NamedTuple):
    """What one process measured; samples by arm and length."""

    facts: Row
    token_bytes: int
    samples: dict[tuple[str, int], list[Sample]]


class _Bench(NamedTuple):
    """One process's engine, and what is served with it."""

    llm: LLM
    spec: Spec

    def prompt(self, length: int, repeat: int) -> list[int]:
        """Return a prefix and what follows it: random, and the same in every process."""
        generator = random.Random(f"{self.spec.bench_seed}/{length}/{repeat}")
        return generator.choices(range(self.llm.core.info.vocab_size), k=length + SUFFIX_TOKENS)

    def serve(self, prompt: list[int]) -> Sample:
        """Serve a prompt, keep the logits of its output tokens, and digest its prefix."""
        core, logits = self.llm.core, list[torch.Tensor]()
        length = len(prompt) - SUFFIX_TOKENS
        request = self.llm.make_request(prompt, PARAMS, cacheable_tokens=length)
        pid = core.info.worker_pid
        before = raw.read_bytes_of(pid)
        core.on_logits = lambda _id, row: logits.append(row.float().cpu().clone())
        try:
            [output] = self.llm.serve([request])
        finally:
            core.on_logits = None
        return Sample(
            ttft_ms=output.ttft_s * 1e3,
            by_tier=output.usage.cached_tokens_by_tier,
            token_ids=output.token_ids,
            logits=torch.stack(logits).numpy(),
            bytes_from_disk=raw.read_bytes_of(pid) - before,
            kv_digest=self.digest(prompt[:length]),
        )

    def digest(self, prefix: list[int]) -> str | None:
        """Return the digest of a prefix's full blocks in VRAM."""
        return self.llm.core.kv_digest(self.llm.make_request(prefix, PARAMS))


@contextlib.contextmanager
def _warm(spec: Spec, progress: Progress) -> Iterator[_Bench]:
    """Start an engine, and serve an unrelated prompt: no figure pays for first-time work."""
    with LLM(**spec.settings, retention="24h", progress=progress) as llm:
        bench = _Bench(llm, spec)
        bench.serve(bench.prompt(max(spec.prefix_tokens), repeat=-1))
        llm.core.evict()
        yield bench


def measure(spec: Spec) -> Measured:
    """Measure every arm but `restart` in this process, and leave prefixes on disk for that one."""
    progress = terminal_progress()
    with _warm(spec, progress) as bench:
        core, kv_spec = bench.llm.core, bench.llm.core.kv_spec
        facts = {"model": core.info.model, "dtype": kv_spec.dtype, "block_size": kv_spec.block_size}
        measured = Measured(facts, kv_spec.token_bytes, {})
        cases = [(length, index) for length in spec.prefix_tokens for index in range(spec.repeats)]
        for length, repeat in tracked(progress, "measuring", cases):
            prompt = bench.prompt(length, repeat)
            for arm in (arm for arm in ARMS if arm in ("cold", *spec.arms)):
                tier = TIER_OF_ARM.get(arm, "device")
                if tier != "device" and not bench.llm.demote(tier, timeout_s=DEMOTE_TIMEOUT_S):
                    raise TieredKVError(f"Not everything could be demoted to {tier}; see the log")
                if arm == "restart":
                    continue
                sample = bench.serve(prompt)
                if arm == "cold" and sample.kv_digest is None:
                    what = f"A prefix of {length} tokens does not stay in VRAM"
                    raise TieredKVError(f"{what}; raise `device_size`")
                measured.samples.setdefault((arm, length), []).append(sample)
            core.evict()
    return measured


def measure_restart(spec: Spec, length: int) -> list[Sample]:
    """Serve the prompts of one length, whose prefixes an earlier process left on disk."""
    with _warm(spec, terminal_progress()) as bench:
        return [bench.serve(bench.prompt(length, repeat)) for repeat in range(spec.repeats)]


def run(settings: dict[str, Any], _progress: Progress | None = None, **options: Any) -> Row:
    """Run the whole bench in processes of its own, which draw their progress themselves.

    Args:
        settings: of the engine; a store is made under its `disk_dir`, or the system's temporary
            folder, and removed again.
        options: the other fields of `Spec`.

    Raises:
        ConfigError: there is no such arm or folder.
        TieredKVError: a process failed.
    """
    spec = Spec({**settings, "restore": "load"}, **options)
    if unknown := [arm for arm in spec.arms if arm not in ARMS]:
        raise ConfigError(f"Unknown arm `{', '.join(unknown)}`; arms are {', '.join(ARMS)}")
    parent = spec.settings.get("disk_dir")
    if parent and not Path(parent).is_dir():
        raise ConfigError(f"`disk_dir` = `{parent}` is not a folder")
    sizes = _sizes(spec)
    with tempfile.TemporaryDirectory(prefix="tieredkv-bench-", dir=parent) as folder:
        path = Path(folder)
        num_bytes = (4 << 30) if torch.cuda.is_available() else (256 << 20)  # more than drives hold
        disk_read_GBps = raw.disk_read_GBps(path, num_bytes=num_bytes)
        limits = {"h2d_GBps": raw.h2d_GBps(), "disk_read_GBps": disk_read_GBps}
        spec = spec._replace(settings=sizes | spec.settings | {"disk_dir": str(path / "store")})
        measured = _in_new_process(measure, spec)
        if "restart" in spec.arms:
            for length in spec.prefix_tokens:
                measured.samples["restart", length] = _in_new_process(measure_restart, spec, length)
        page_cache = "bypassed" if raw.block_device(path) else "warm"
    rows = [_row(arm, at, measured, page_cache) for arm in spec.arms for at in spec.prefix_tokens]
    problems = [
        f"{row['arm']} at {row['prefix_tokens']} tokens: {problem.format(**row)}"
        for row in rows
        for name, problem in PROBLEMS.items()
        if row[name] is False
    ]
    facts = {**measured.facts, "restore": "load", "raw": limits}
    return {**facts, "rows": rows, "problems": problems}


def _in_new_process(function: Callable[..., T], *arguments: object) -> T:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool as error:
            raise TieredKVError("A measuring process ended before it answered") from error


def _sizes(spec: Spec) -> dict[str, int]:
    """Return tier sizes that hold what is measured; what the caller sets comes before them.

    Raises:
        ModelError, ConfigError: the model cannot be served, or not at this length.
    """
    told = {name: spec.settings.get(name, "auto") for name in ("dtype", "device")}
    found = find_model(spec.settings["model"], **told)
    token_bytes = found.kv_spec(spec.settings.get("block_size", 16)).token_bytes
    prefix, room = max(spec.prefix_tokens), found.max_model_len - SUFFIX_TOKENS - OUTPUT_TOKENS
    if prefix > room:
        beside = f"{SUFFIX_TOKENS} more and {OUTPUT_TOKENS} of an answer"
        what = f"A prefix of {prefix} tokens with {beside} does not fit"
        raise ConfigError(f"{what} {found.max_model_len} tokens, the model's most; use {room}")
    longest = prefix + SUFFIX_TOKENS + OUTPUT_TOKENS + 256
    kept = sum(spec.prefix_tokens) * spec.repeats
    return {
        "device_size": max(MIN_RAM_BYTES, 2 * longest * token_bytes),
        "host_size": max(MIN_RAM_BYTES, 3 * longest * token_bytes // 2),
        "disk_size": MIN_DISK_BYTES + 5 * kept * token_bytes // 4,
    }


def _compare(sample: Sample, cold: Sample) -> tuple[float, bool, bool]:
    """Hold a run against the cold run of the same prompt.

    Where the tokens part, both runs have seen the same context up to there: the parting is a near
    tie, and the prompt is left out of the comparison, if the cold run's best two logits were closer
    to each other than the two runs are; otherwise the tokens are unequal.

    Returns:
        The largest difference of two logits, whether the tokens are equal, whether they are left
        out.
    """
    largest = 0.0
    for index, (token, cold_token) in enumerate(zip(sample.token_ids, cold.token_ids, strict=True)):
        difference = float(np.abs(sample.logits[index] - cold.logits[index]).max())
        largest = max(largest, difference)
        if token != cold_token:
            second, best = np.partition(cold.logits[index], -2)[-2:]
            is_tie = bool(best - second <= 2 * difference)
            return largest, is_tie, is_tie
    return largest, True, False


def _row(arm: str, length: int, measured: Measured, page_cache: str) -> Row:
    """Return one row of the report: an arm at a prefix length, all repeats."""
    samples, cold = measured.samples[arm, length], measured.samples["cold", length]
    compared = [_compare(*pair) for pair in zip(samples, cold, strict=True)]
    differences, are_equal, are_excluded = zip(*compared, strict=True)
    times = [round(sample.ttft_ms, 3) for sample in samples]
    tier = TIER_OF_ARM.get(arm)
    sources = [sample.by_tier for sample in samples]
    by_tier = {name: int(statistics.median(one[name] for one in sources)) for name in sources[0]}
    loaded = statistics.median(one[Tier.HOST] + one[Tier.DISK] for one in sources)
    used = [{name for name, count in one.items() if count} for one in sources]
    computed, found = ([it.kv_digest if tier else None for it in each] for each in (cold, samples))
    return {
        "arm": arm,
        "prefix_tokens": length,
        "ttft_ms": {
            "p50": round(statistics.median(times), 3),
            "p90": sorted(times)[math.ceil(0.9 * len(times)) - 1],
            "min": min(times),
            "all": times,
        },
        "cached_tokens": sum(by_tier.values()),
        "by_tier": by_tier,
        "bytes_loaded": int(loaded) * measured.token_bytes,
        "bytes_from_disk": int(statistics.median(s.bytes_from_disk for s in samples)),
        "page_cache": page_cache if tier == "disk" else None,
        "output_token_ids": [sample.token_ids for sample in samples],
        "tokens_equal_cold": all(are_equal),
        "kv_digest_computed": computed,
        "kv_digest_loaded": found,
        "kv_bytes_equal": found == computed if tier else None,
        "max_logit_diff": max(differences),
        "num_prompts_excluded": sum(are_excluded),
        "is_from_claimed_tier": all(it == ({tier} if tier else set()) for it in used),
    }


def table(rows: list[Row]) -> list[Row]:
    """Return rows for people: the figures beside cold, and what was proved."""
    cold_ms = {row["prefix_tokens"]: row["ttft_ms"]["p50"] for row in rows if row["arm"] == "cold"}
    shown = []
    for row in rows:
        p50_ms, is_hit = row["ttft_ms"]["p50"], row["arm"] != "cold"
        beside = cold_ms.get(row["prefix_tokens"]) if is_hit else None
        proofs = {"tokens_equal": row["tokens_equal_cold"], "KV_bytes_equal": row["kv_bytes_equal"]}
        shown.append(
            {
                "arm": row["arm"],
                "prefix_tokens": row["prefix_tokens"],
                "TTFT_p50_ms": p50_ms,
                "min_ms": row["ttft_ms"]["min"],
                "vs_cold": beside and f"{beside / p50_ms:.1f}x",
                "cached_tokens": row["cached_tokens"],
                "loaded_GBps": row["bytes_loaded"] / p50_ms / 1e6 if row["bytes_loaded"] else None,
                **{name: ("NO", "yes")[it] if is_hit else None for name, it in proofs.items()},
            }
        )
    return shown
