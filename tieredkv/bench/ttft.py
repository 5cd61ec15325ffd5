"""`bench ttft`: time to first token, cold and from each tier, with its proof.

For every prefix length and repeat, one prefix that was never seen is served:

    cold      the whole prompt, prefix + 64 tokens, with empty tiers
    (store)   the prefix alone; its KV bytes are digested where they were computed
    device    the prompt again; the prefix is in VRAM
    host      the prefix was demoted to host memory
    disk      the prefix was demoted to disk, and VRAM and host memory are empty
    restart   the first process has ended; a new one serves the prompt from disk

A hit counts with its proof: which tier the tokens came from, the digest of the reused blocks in
VRAM beside the one taken when they were computed, the output tokens beside the cold ones, the
largest difference of any logit. The 64 tokens behind the prefix are never cached.

Each process measures alone: `measure` runs in one that `run` starts, so that process start is
never part of a figure and a restart is a real one.
"""

import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from tieredkv.bench import raw
from tieredkv.bench.progress import terminal_progress
from tieredkv.engine.llm import LLM, RequestOutput
from tieredkv.engine.loader import find_model
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import ConfigError, TieredKVError
from tieredkv.types import Progress

ARMS = ("cold", "device", "host", "disk", "restart")
SUFFIX_TOKENS = 64
OUTPUT_TOKENS = 8
MIN_RAM_BYTES = 32 << 20
MIN_DISK_BYTES = 256 << 20
TIER_OF_ARM = {"device": "device", "host": "host", "disk": "disk", "restart": "disk"}


class TTFTSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        settings: fields of `Settings` for the engine, `model` and `disk_dir` among them.
    """

    prefix_tokens: list[int]
    arms: list[str]
    repeats: int
    settings: dict[str, Any]
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigError naming what cannot be measured."""
        unknown = [arm for arm in self.arms if arm not in ARMS]
        if unknown or not self.arms:
            raise ConfigError(
                f"Unknown arm `{', '.join(unknown)}`; arms are {', '.join(ARMS)}"
                if unknown
                else f"No arm to measure; arms are {', '.join(ARMS)}"
            )
        if self.repeats < 1:
            raise ConfigError(f"`repeats` = {self.repeats} must be at least 1")
        if not self.prefix_tokens or min(self.prefix_tokens) < 1:
            raise ConfigError(f"`prefix_tokens` = {self.prefix_tokens} must be positive lengths")


class Sample(msgspec.Struct, kw_only=True):
    """One prompt served once."""

    ttft_ms: float
    by_tier: dict[str, int]
    token_ids: list[int]
    bytes_from_disk: int = 0
    kv_digest_computed: str | None = None
    kv_digest_loaded: str | None = None
    max_logit_diff: float = 0.0
    is_equal_cold: bool = True
    is_excluded: bool = False


class Stored(msgspec.Struct, kw_only=True):
    """A prefix that lies on disk for the restart arm, and what a cold run made of its prompt."""

    prefix: list[int]
    suffix: list[int]
    kv_digest: str
    cold_token_ids: list[int]
    cold_logits: str


class Measured(msgspec.Struct, kw_only=True):
    """What one process measured, by arm and prefix length."""

    samples: dict[str, dict[int, list[Sample]]] = {}
    stored: dict[int, list[Stored]] = {}
    model: str = ""
    dtype: str = ""
    block_size: int = 0
    token_bytes: int = 0


@dataclass(slots=True)
class _Run:
    output: RequestOutput
    logits: list[torch.Tensor] = field(default_factory=list)
    bytes_from_disk: int = 0


class _Bench:
    """One process's engine, and the runs made with it."""

    def __init__(self, llm: LLM, spec: TTFTSpec) -> None:
        self.llm = llm
        self.spec = spec
        self.params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)

    def run(self, prompt: Sequence[int]) -> _Run:
        """Serve a prompt and keep the logits of each of its output tokens."""
        logits: list[torch.Tensor] = []
        pid = self.llm.core.info.worker_pid
        before = raw.read_bytes_of(pid)
        self.llm.core.on_logits = lambda _id, row: logits.append(row.float().cpu().clone())
        try:
            [output] = self.llm.generate(prompt, self.params)
        finally:
            self.llm.core.on_logits = None
        return _Run(output, logits, raw.read_bytes_of(pid) - before)

    def store(self, prefix: Sequence[int]) -> str:
        """Compute a prefix and return the digest of its blocks where they were computed."""
        self.llm.generate(prefix, SamplingParams(max_tokens=1, temperature=0.0))
        digest = self.digest(prefix)
        if digest is None:
            raise TieredKVError(
                f"A prefix of {len(prefix)} tokens does not stay in VRAM; raise `device_size`"
            )
        return digest

    def digest(self, prefix: Sequence[int]) -> str | None:
        """Return the digest of a prefix's full blocks in VRAM."""
        return self.llm.core.kv_digest(self.llm.make_request(prefix, self.params))

    def forget_suffix(self, prefix: Sequence[int], suffix: Sequence[int]) -> None:
        """Drop what lies behind the prefix from the RAM tiers, so that it is never reused."""
        request = self.llm.make_request([*prefix, *suffix], self.params)
        self.llm.core.evict_behind(request, num_tokens=len(prefix))

    def demote(self, to: str) -> None:
        """Empty the tiers above."""
        if not self.llm.demote(to, timeout_s=300.0):
            raise TieredKVError(f"Not everything could be demoted to {to}; see the log")


def measure(spec: TTFTSpec, progress: Progress) -> Measured:
    """Measure every arm but `restart` in this process, and leave prefixes on disk for that one."""
    settings = dict(spec.settings)
    model = str(settings.pop("model"))
    measured = Measured()
    with LLM(model, retention="24h", progress=progress, **settings) as llm:
        bench = _Bench(llm, spec)
        spec_of_kv = llm.core.kv_spec
        measured.model = llm.core.info.model
        measured.dtype = spec_of_kv.dtype
        measured.block_size = spec_of_kv.block_size
        measured.token_bytes = spec_of_kv.token_bytes
        _warm_up(bench)
        total, done = len(spec.prefix_tokens) * spec.repeats, 0
        for length in spec.prefix_tokens:
            for repeat in range(spec.repeats):
                progress("measuring", done, total)
                _measure_one(bench, length, repeat, measured)
                done += 1
        progress("measuring", total, total)
    return measured


def measure_restart(spec: TTFTSpec, stored: list[Stored], progress: Progress) -> list[Sample]:
    """Serve prompts whose prefixes an earlier process left on disk."""
    settings = dict(spec.settings)
    model = str(settings.pop("model"))
    samples: list[Sample] = []
    with LLM(model, retention="24h", progress=progress, **settings) as llm:
        bench = _Bench(llm, spec)
        _warm_up(bench)
        for item in stored:
            run = bench.run([*item.prefix, *item.suffix])
            with np.load(item.cold_logits) as file:
                cold_logits = [torch.from_numpy(row) for row in file["logits"]]
            sample = _sample(run, bench.digest(item.prefix), item.cold_token_ids, cold_logits)
            sample.kv_digest_computed = item.kv_digest
            samples.append(sample)
    return samples


def run(
    spec: TTFTSpec, *, command: str, disk_dir: Path | None = None, commit: str | None = None
) -> dict[str, Any]:
    """Run the whole bench in processes of its own and return its report.

    Args:
        spec: what to measure; its `disk_dir` is filled in here.
        command: the command line, for the report.
        disk_dir: folder under which the store is made; the system's temporary folder if None.
        commit: of the source, for a tree without its own history.

    Raises:
        TieredKVError: a process failed; the message is its own.
    """
    spec.check()
    sizes = _sizes(spec)
    with tempfile.TemporaryDirectory(prefix="tieredkv-bench-", dir=disk_dir) as folder:
        path = Path(folder)
        limits = {
            "h2d_GBps": raw.h2d_GBps(),
            "disk_read_GBps": raw.disk_read_GBps(path, num_bytes=_raw_bytes()),
        }
        spec = msgspec.structs.replace(
            spec, settings={**sizes, **spec.settings, "disk_dir": str(path / "store")}
        )
        measured = msgspec.convert(_child({"spec": spec}), Measured, strict=False)
        if "restart" in spec.arms:
            rows: dict[int, list[Sample]] = {}
            for length in spec.prefix_tokens:
                answer = _child({"spec": spec, "stored": measured.stored[length]})
                rows[length] = msgspec.convert(answer, list[Sample])
            measured.samples["restart"] = rows
        page_cache = "bypassed" if raw.has_block_device(path) else "warm"
    return _report(spec, measured, limits, page_cache, command, commit or raw.commit())


def _warm_up(bench: _Bench) -> None:
    """Serve an unrelated prompt, so that no figure pays for first-time work."""
    bench.run(_tokens(bench, "warm-up", 0, max(bench.spec.prefix_tokens) + SUFFIX_TOKENS))
    bench.llm.core.evict()


def _measure_one(bench: _Bench, length: int, repeat: int, measured: Measured) -> None:
    """Serve one prompt cold and from every tier that was asked for."""
    arms = bench.spec.arms
    prefix = _tokens(bench, f"prefix-{length}", repeat, length)
    suffix = _tokens(bench, f"suffix-{length}", repeat, SUFFIX_TOKENS)
    prompt = [*prefix, *suffix]

    def keep(arm: str, sample: Sample) -> None:
        measured.samples.setdefault(arm, {}).setdefault(length, []).append(sample)

    cold = bench.run(prompt)
    keep("cold", _sample(cold, None, cold.output.token_ids, cold.logits))
    bench.llm.core.evict()
    digest = bench.store(prefix)
    for arm in ("device", "host", "disk"):
        if arm not in arms:
            continue
        if arm != "device":
            bench.demote(arm)
        hit = bench.run(prompt)
        sample = _sample(hit, bench.digest(prefix), cold.output.token_ids, cold.logits)
        sample.kv_digest_computed = digest
        keep(arm, sample)
        bench.forget_suffix(prefix, suffix)
    if "restart" in arms:
        bench.demote("disk")
        path = Path(str(bench.spec.settings["disk_dir"])).parent / f"cold-{length}-{repeat}.npz"
        np.savez(path, logits=torch.stack(cold.logits).numpy())
        measured.stored.setdefault(length, []).append(
            Stored(
                prefix=prefix,
                suffix=suffix,
                kv_digest=digest,
                cold_token_ids=cold.output.token_ids,
                cold_logits=str(path),
            )
        )
    bench.llm.core.evict()


def _tokens(bench: _Bench, purpose: str, repeat: int, count: int) -> list[int]:
    """Return random tokens, the same in every process for the same purpose and repeat."""
    generator = random.Random(f"{bench.spec.seed}/{purpose}/{repeat}")
    return [generator.randrange(bench.llm.core.info.vocab_size) for _ in range(count)]


def _sample(
    run: _Run, digest: str | None, cold_ids: list[int], cold_logits: list[torch.Tensor]
) -> Sample:
    """Hold a run against the cold run of the same prompt.

    Where the tokens part, both runs have seen the same context up to there: the parting is a near
    tie, and the prompt is left out of the comparison, if the cold run's best two logits were closer
    to each other than the two runs are; otherwise the tokens are unequal.
    """
    output = run.output
    is_equal, is_excluded, largest = True, False, 0.0
    for index, (token, cold_token) in enumerate(zip(output.token_ids, cold_ids, strict=True)):
        difference = float((run.logits[index] - cold_logits[index]).abs().max())
        largest = max(largest, difference)
        if token != cold_token:
            best = cold_logits[index].topk(2).values
            is_excluded = float(best[0] - best[1]) <= 2 * difference
            is_equal = is_excluded
            break
    return Sample(
        ttft_ms=output.ttft_s * 1e3,
        by_tier=output.usage.cached_tokens_by_tier,
        token_ids=output.token_ids,
        bytes_from_disk=run.bytes_from_disk,
        kv_digest_loaded=digest,
        max_logit_diff=largest,
        is_equal_cold=is_equal,
        is_excluded=is_excluded,
    )


def _report(
    spec: TTFTSpec,
    measured: Measured,
    limits: dict[str, float | None],
    page_cache: str,
    command: str,
    commit: str,
) -> dict[str, Any]:
    """Return the bench's JSON document."""
    rows = [
        _row(arm, length, measured.samples[arm][length], measured.token_bytes, page_cache)
        for arm in spec.arms
        for length in spec.prefix_tokens
    ]
    return {
        "hardware": raw.hardware(),
        "commit": commit,
        "command": command,
        "model": measured.model,
        "dtype": measured.dtype,
        "block_size": measured.block_size,
        "restore": spec.settings.get("restore", "load"),
        "raw": limits,
        "rows": rows,
    }


def _row(
    arm: str, length: int, samples: list[Sample], token_bytes: int, page_cache: str
) -> dict[str, object]:
    """Return one row of the report: an arm at a prefix length, all repeats."""
    times = sorted(sample.ttft_ms for sample in samples)
    tier = TIER_OF_ARM.get(arm)
    loaded = [sum(s.by_tier.values()) - s.by_tier["device"] for s in samples]
    by_tier = {
        name: int(statistics.median(sample.by_tier[name] for sample in samples))
        for name in ("device", "host", "disk")
    }
    first = samples[0]
    return {
        "arm": arm,
        "prefix_tokens": length,
        "ttft_ms": {
            "p50": round(statistics.median(times), 3),
            "p90": round(times[min(len(times) - 1, math.ceil(0.9 * len(times)) - 1)], 3),
            "min": round(times[0], 3),
            "all": [round(sample.ttft_ms, 3) for sample in samples],
        },
        "cached_tokens": sum(by_tier.values()),
        "by_tier": by_tier,
        "bytes_loaded": int(statistics.median(loaded)) * token_bytes,
        "bytes_from_disk": int(statistics.median(s.bytes_from_disk for s in samples)),
        "page_cache": page_cache if tier == "disk" else None,
        "output_token_ids": [sample.token_ids for sample in samples],
        "tokens_equal_cold": all(sample.is_equal_cold for sample in samples),
        "kv_digest_computed": [sample.kv_digest_computed for sample in samples],
        "kv_digest_loaded": [sample.kv_digest_loaded for sample in samples],
        "kv_bytes_equal": (
            None
            if tier is None
            else all(
                s.kv_digest_loaded is not None and s.kv_digest_loaded == s.kv_digest_computed
                for s in samples
            )
        ),
        "max_logit_diff": max(sample.max_logit_diff for sample in samples),
        "num_prompts_excluded": sum(sample.is_excluded for sample in samples),
        "is_from_claimed_tier": (
            tier is None and first.by_tier == {"device": 0, "host": 0, "disk": 0}
        )
        or all(
            tier is not None and s.by_tier[tier] == sum(s.by_tier.values()) > 0 for s in samples
        ),
    }


def problems(report: dict[str, Any]) -> list[str]:
    """Return what a report proves wrong: unequal tokens or bytes, or another tier than claimed."""
    found = []
    for row in report["rows"]:
        where = f"{row['arm']} at {row['prefix_tokens']} tokens"
        if not row["tokens_equal_cold"]:
            found.append(f"{where}: the output tokens differ from the cold ones")
        if row["kv_bytes_equal"] is False:
            found.append(f"{where}: the KV bytes differ from the computed ones")
        if not row["is_from_claimed_tier"]:
            found.append(f"{where}: the tokens came from {row['by_tier']}")
    return found


def _child(job: dict[str, object]) -> object:
    """Run one job in a new process and return its answer."""
    result = subprocess.run(
        [sys.executable, "-P", "-m", "tieredkv.bench.ttft"],
        input=msgspec.json.encode(job).decode(),
        stdout=subprocess.PIPE,
        text=True,
    )
    if result.returncode != 0:
        raise TieredKVError(f"A measuring process ended with status {result.returncode}")
    answer = msgspec.json.decode(result.stdout.rstrip().splitlines()[-1])
    if isinstance(answer, dict) and "error" in answer:
        raise TieredKVError(f"{answer['error_type']}: {answer['error']}")
    return answer


def _sizes(spec: TTFTSpec) -> dict[str, int]:
    """Return tier sizes that hold what is measured; what the caller sets comes before them.

    Raises:
        ModelError, ConfigError: the model cannot be served.
    """
    settings = spec.settings
    found = find_model(
        str(settings["model"]),
        dtype=settings.get("dtype", "auto"),
        device=str(settings.get("device", "auto")),
    )
    token_bytes = found.kv_spec(int(settings.get("block_size", 16))).token_bytes
    longest = max(spec.prefix_tokens) + SUFFIX_TOKENS + OUTPUT_TOKENS + 256
    kept = sum(spec.prefix_tokens) * spec.repeats
    return {
        "device_size": max(MIN_RAM_BYTES, 2 * longest * token_bytes),
        "host_size": max(MIN_RAM_BYTES, 3 * longest * token_bytes // 2),
        "disk_size": MIN_DISK_BYTES + 5 * kept * token_bytes // 4,
    }


def _raw_bytes() -> int:
    """Return how much to read for the raw disk rate: enough to leave the drive's own cache."""
    return (4 << 30) if torch.cuda.is_available() else (256 << 20)


def main() -> None:
    """Measure what stdin asks for; the answer is one JSON document on the last line of stdout."""
    job = json.load(sys.stdin)
    spec = msgspec.convert(job["spec"], TTFTSpec)
    progress = terminal_progress()
    try:
        if "stored" in job:
            stored = msgspec.convert(job["stored"], list[Stored])
            answer: object = measure_restart(spec, stored, progress)
        else:
            answer = measure(spec, progress)
    except TieredKVError as error:
        answer = {"error": str(error), "error_type": type(error).__name__}
    sys.stdout.write("\n" + msgspec.json.encode(answer).decode() + "\n")


if __name__ == "__main__":
    main()
