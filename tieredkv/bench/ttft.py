"""`bench ttft`: measure the time to first token, cold and from each tier, and verify each hit.

For every prefix length and repeat, a new prefix is served in each of these arms:

    cold      the prompt, prefix + 64 tokens, is served with empty tiers; the prefix's KV bytes
              are digested in VRAM right after they were computed
    device    the prompt is served again; the prefix is in VRAM
    host      the prefix was demoted to host memory
    disk      the prefix was demoted to disk, and VRAM and host memory are empty
    planned   the same, but the planner decides which blocks are loaded; the others are computed
    restart   the first process has ended; a new one serves the prompt from disk
    planned_restart
              the same before that, and the planner decides
    batched   the prompt is served with empty tiers beside another prompt, before the cold run

Every hit is verified. The report has the tier that the tokens came from, the digest of the reused
blocks in VRAM next to the digest taken in the cold run, whether the output tokens equal the cold
ones, and the largest difference of any logit. The 64 tokens after the prefix are never cached. All
arms but the planned ones load whatever a tier has (restore = "load").

In 16 bits the order of computing changes logits. `batched` shows by how much, where nothing is
loaded, so that the differences of the other arms can be judged. A prompt whose tokens part at a
near tie proves nothing: if more than one of five does, tokens are not called equal.

Each repeat has a prefix of its own. An arm that claims the disk could also be served from VRAM or
host memory, which `by_tier` and `is_from_claimed_tier` show, or from the page cache: `page_cache`
says whether the worker reads past it, and `bytes_from_disk` are the bytes that the kernel read from
storage for the worker. They should be 0.95 to 1.2 times `bytes_loaded`, and the report complains if
they are fewer.

`run` starts one process for all other arms, and one more for the restarts of each length, so that
a restart is real. Processes run one at a time, and their start is not part of any figure. If it is
interrupted, it reports what was measured by then.
"""

import contextlib
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from tieredkv.bench import raw, sources
from tieredkv.bench.processes import cut_short, in_new_process, noting_interruptions
from tieredkv.bench.progress import bench_progress
from tieredkv.bench.sources import DiskShare, WorkerReads
from tieredkv.bench.temporary_keys import make_place, temporary_folder, temporary_keys
from tieredkv.cache.block import Block
from tieredkv.cache.tail import anchor_pages
from tieredkv.config import Settings
from tieredkv.engine.llm import LLM
from tieredkv.engine.loader import FoundModel, find_model
from tieredkv.engine.parts import vram_for
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import ConfigError, TieredKVError
from tieredkv.types import BlockHash, KVSpec, Progress, Tier, tracked

TIER_OF_ARM = {"batched": None, "cold": None, "device": "device", "host": "host", "disk": "disk"}
TIER_OF_ARM |= dict.fromkeys(("planned", "planned_restart", "restart"), "disk")
"""Arms in the order in which they are measured."""

PLANNED = ("planned", "planned_restart")
RESTARTS = ("planned_restart", "restart")
SUFFIX_TOKENS = 64
OUTPUT_TOKENS = 8
PARAMS = SamplingParams(
    max_tokens=OUTPUT_TOKENS, temperature=0.0, repetition_penalty=1.0, ignore_eos=True
)
MIN_RAM_BYTES = 32 << 20
MIN_DISK_BYTES = 256 << 20
DEMOTE_TIMEOUT_S = 300.0
BESIDE_TOKENS = 100  # of the other prompt of `batched`
LEAST_COUNTED = 0.8  # of the prompts, for tokens to be called equal
PROBLEMS = {
    "tokens_equal_cold": "the output tokens differ from the cold ones",
    "kv_bytes_equal": "the KV bytes differ from the computed ones",
    "is_from_claimed_tier": "the tokens are not from the tier that the arm claims: {by_tier}",
}
COLUMNS: tuple[str, ...] = ("arm", "prefix_tokens", "ttft_ms.p50", "ttft_ms.min", "speedup")
COLUMNS += ("cached_tokens", "loaded_GBps", "tokens_equal_cold", "kv_bytes_equal")
PLOTTED = (("ttft_ms.p50",),)

Row = dict[str, Any]


class Sample(NamedTuple):
    """Result of serving a prompt once.

    Attributes:
        predicted_ms: from the first plan of what to load until the first token, as expected then;
            None if there was no plan.
        by_tier: prompt tokens by the tier that they came from.
        bytes_from_disk: see `WorkerReads.num_bytes`.
        logits: [output token, vocabulary].
        loaded: blocks that were copied to VRAM.
        copied_at: when the last of them had arrived, by `time.perf_counter`; 0.0 without any.
        digests: of the prefix's blocks in VRAM afterwards, head to tail; empty if nobody asked.
    """

    ttft_ms: float
    predicted_ms: float | None
    by_tier: dict[Tier, int]
    token_ids: list[int]
    logits: npt.NDArray[np.float32]
    bytes_from_disk: int | None
    loaded: frozenset[BlockHash]
    copied_at: float
    digests: dict[BlockHash, str]


Samples = dict[tuple[str, int], list[Sample]]
"""Samples by arm and prefix length."""


def measure(
    settings: Row, lengths: list[int], repeats: int, arms: list[str], last: str | None
) -> tuple[Samples, bool]:
    """Serve every prompt in each arm, in this process; demote all of them to the tier `last`.

    An interruption ends it with the prompts that were served in all arms.

    Returns:
        The samples, and whether it was interrupted, which may be after the last of them.
    """
    progress, samples = bench_progress(), Samples()
    with contextlib.ExitStack() as stack:
        with LLM(**settings, retention="24h", progress=progress) as llm:
            serve_once(llm, make_prompt(llm, max(lengths), -1))  # warm-up
            llm.core.verbs.evict()
            interrupted = stack.enter_context(noting_interruptions())  # until the engine is closed
            cases = list(itertools.product(lengths, range(repeats)))
            for length, repeat in tracked(progress, "measuring", cases):
                case = {
                    arm: _serve(llm, length, repeat, arm)
                    for arm in arms
                    if not interrupted.is_set()
                }
                if interrupted.is_set():
                    llm.core.verbs.evict()  # or it would be written when the engine closes
                    break
                for arm, sample in case.items():
                    samples.setdefault((arm, length), []).append(sample)
                demote_all(llm, last)
                llm.core.verbs.evict()
        return samples, interrupted.is_set()


def _serve(llm: LLM, length: int, repeat: int, arm: str) -> Sample:
    """Serve the prompt of a repeat in one arm.

    Raises:
        TieredKVError: the prefix does not stay in VRAM, or could not be demoted.
    """
    demote_all(llm, TIER_OF_ARM[arm])
    llm.core.parts.tiers.settings.restore = "auto" if arm in PLANNED else "load"
    prompt, is_batched = make_prompt(llm, length, repeat), arm == "batched"
    beside = make_prompt(llm, BESIDE_TOKENS, repeat) if is_batched else None
    sample = serve_once(llm, prompt, digested=not is_batched, beside=beside)
    if is_batched:
        llm.core.verbs.evict()
    if arm == "cold" and len(sample.digests) < length // llm.core.kv_spec.block_size:
        what = f"a prefix of {length} tokens does not stay in VRAM"
        raise TieredKVError(f"{what}; raise `device_size`")
    return sample


def make_prompt(llm: LLM, length: int, repeat: int) -> list[int]:
    """Return a random prompt, prefix and suffix, which is the same in every process."""
    generator = random.Random(f"{length}/{repeat}")
    return generator.choices(range(llm.core.info.vocab_size), k=length + SUFFIX_TOKENS)


def demote_all(llm: LLM, tier: str | None) -> None:
    if tier in ("host", "disk") and not llm.demote(tier, timeout_s=DEMOTE_TIMEOUT_S):
        what = f"not every block could be demoted to {tier} within {DEMOTE_TIMEOUT_S:g} s"
        raise TieredKVError(f"{what}; see the log")


def serve_once(
    llm: LLM, prompt: list[int], *, digested: bool = False, beside: list[int] | None = None
) -> Sample:
    """Serve a prompt; keep the logits of its output tokens and, if asked, its blocks' digests.

    Args:
        llm: the engine.
        prompt: prefix and suffix.
        digested: whether digests are asked for.
        beside: another prompt, which is served at the same time.
    """
    core, pool, logits = llm.core, llm.core.parts.tiers.device, list[torch.Tensor]()
    loaded, copied_at, fill = set[BlockHash](), 0.0, pool.fill

    def note_filled(block: Block, *, is_whole: bool = True) -> None:
        nonlocal copied_at
        if block.is_copying and block.block_hash is not None:
            copied_at = time.perf_counter()
            loaded.add(block.block_hash)
        fill(block, is_whole=is_whole)

    def note_logits(request_id: str, row: torch.Tensor) -> None:
        if request_id == request.request_id:
            logits.append(row)

    reads = WorkerReads(core)
    core.on_logits = note_logits
    length = len(prompt) - SUFFIX_TOKENS
    request = llm.make_request(prompt, PARAMS, cacheable_tokens=length)
    others = [] if beside is None else [llm.make_request(beside, PARAMS)]
    with mock.patch.object(pool, "fill", note_filled):
        output, *_ = llm.serve([request, *others])
    predicted_s = output.usage.predicted_s
    prefix = llm.make_request(prompt[:length], PARAMS)
    return Sample(
        ttft_ms=output.ttft_s * 1e3,
        predicted_ms=None if predicted_s is None else predicted_s * 1e3,
        by_tier=output.usage.cached_tokens_by_tier,
        token_ids=output.token_ids,
        logits=torch.stack(logits).float().cpu().numpy(),
        bytes_from_disk=reads.num_bytes(),
        loaded=frozenset(loaded),
        copied_at=copied_at,
        digests=core.kv_digests.by_block(prefix) if digested else {},
    )


def look_up(settings: Row, *, max_context_len: int | None = None) -> tuple[FoundModel, KVSpec]:
    """Find the model of a bench that keeps a store, and the layout of its blocks.

    If `disk_dir` is not there, it is made, as a server makes it.

    Raises:
        ConfigError: `disk_dir` is not a folder and cannot be made.
        ModelError: the model cannot be found or is not supported.
    """
    make_place(settings.get("disk_dir"))
    told = {name: settings.get(name, "auto") for name in ("dtype", "device")}
    told["rope_scaling"] = settings.get("rope_scaling")
    found = find_model(settings["model"], max_context_len=max_context_len, **told)
    return found, found.kv_spec(settings.get("block_size"))


def run(
    _progress: Progress, *, settings: Row, prefix_tokens: list[int], arms: list[str], repeats: int
) -> Row:
    """Run the whole bench in new processes, which draw their progress themselves.

    The bench makes a store under `disk_dir`, or else in the system's temporary folder, and removes
    it at the end. If it is interrupted, the report has what was measured by then.

    Raises:
        ConfigError: a prefix is too long for the model.
        ConfigError: `disk_dir` is not a folder and cannot be made.
        KeyboardInterrupt: it was interrupted before anything was measured.
        TieredKVError: a process failed.
    """
    found, kv_spec = look_up(settings)
    sizes = tier_sizes(prefix_tokens, repeats, found, kv_spec)
    with temporary_folder(settings.get("disk_dir")) as folder:
        path = Path(folder)
        num_bytes = (4 << 30) if torch.cuda.is_available() else (256 << 20)  # more than drives hold
        disk_read_GBps = raw.disk_read_GBps(path, num_bytes=num_bytes)
        limits = {"h2d_GBps": raw.h2d_GBps(), "disk_read_GBps": disk_read_GBps}
        places = {"disk_dir": f"{folder}/store", **temporary_keys(f"{folder}/keys")}
        settings = sizes | settings | {"restore": "load"} | places
        asked = [arm for arm in TIER_OF_ARM if arm in ("cold", *arms)]
        first = [arm for arm in asked if arm not in RESTARTS]
        again = [arm for arm in asked if arm in RESTARTS]
        last = "disk" if again else None
        samples, is_interrupted = in_new_process(
            measure, settings, prefix_tokens, repeats, first, last
        )
        with contextlib.suppress(KeyboardInterrupt):  # what was measured is reported
            for length in prefix_tokens if last else ():
                if is_interrupted:
                    break
                restarts, is_interrupted = in_new_process(
                    measure, settings, [length], repeats, again, last
                )
                samples |= restarts
        page_cache = sources.page_cache(path)
    rows = [
        _row(arm, length, samples, kv_spec.block_bytes, page_cache)
        for arm in arms
        for length in prefix_tokens
        if (arm, length) in samples
    ]
    if not rows:
        raise KeyboardInterrupt
    share = DiskShare.expected(settings, kv_spec)
    problems = []
    for row in rows:
        ratio = sources.disk_over_loaded([row["bytes_from_disk"]], [row["bytes_loaded"]])
        # The worker may read its program, too.
        problems += find_problems(row, share.problem(row["page_cache"], ratio, may_exceed=True))
    for arm, what in [("cold", "cases"), *((arm, "restarts") for arm in again[:1])]:
        num_served = sum(len(samples.get((arm, length), [])) for length in prefix_tokens)
        problems += cut_short(num_served, len(prefix_tokens) * repeats, what)
    facts = {"model": found.name, "dtype": found.dtype, "block_size": kv_spec.block_size}
    return {**facts, "restore": "load", "raw": limits, "rows": rows, "problems": problems}


def tier_sizes(lengths: list[int], repeats: int, found: FoundModel, spec: KVSpec) -> dict[str, int]:
    """Return tier sizes that hold all prompts; the caller's settings take precedence over them.

    Raises:
        ConfigError: the model cannot be served at this length.
    """
    prefix, room = max(lengths), found.max_model_len - SUFFIX_TOKENS - OUTPUT_TOKENS
    if prefix > room:
        beside = f"{SUFFIX_TOKENS} further prompt tokens and {OUTPUT_TOKENS} output tokens"
        what = f"a prefix of {prefix} tokens with {beside} exceeds the model's"
        way_out = f"use a prefix of at most {room} tokens"
        raise ConfigError(f"{what} {found.max_model_len} tokens; {way_out}")
    longest = prefix + SUFFIX_TOKENS + OUTPUT_TOKENS + 256
    # Others may go on behind the prefix, the prompt and the answer.
    beside_bytes = 3 * anchor_pages(spec) * spec.block_bytes
    longest_bytes = longest * spec.token_bytes + beside_bytes
    disk_bytes = sum(num * spec.token_bytes + beside_bytes for num in lengths) * repeats
    longest_step = min(longest, Settings().resolve_max_num_batched_tokens(found.device.type))
    vram = vram_for(spec, 2 * longest, longest_step) + beside_bytes
    return {
        "device_size": max(MIN_RAM_BYTES, vram),
        "host_size": max(MIN_RAM_BYTES, 3 * longest_bytes // 2),
        "disk_size": MIN_DISK_BYTES + 5 * disk_bytes // 4,
    }


def compare(sample: Sample, cold: Sample) -> tuple[float, bool, bool]:
    """Compare a run with the cold run of the same prompt.

    Up to the first token that differs, both runs have seen the same context. If the cold run's best
    two logits for that token are within twice the largest difference of the two runs' logits, the
    token is a near tie, and the prompt is left out of the comparison. Otherwise the tokens are
    unequal.

    Returns:
        The largest difference of a logit, whether the tokens are equal or a near tie, and whether
        the prompt is left out.
    """
    differences = np.abs(sample.logits - cold.logits).max(axis=1)
    parted = np.flatnonzero(np.not_equal(sample.token_ids, cold.token_ids))
    if not len(parted):
        return float(differences.max()), True, False
    at = parted[0]
    second, best = np.partition(cold.logits[at], -2)[-2:]
    is_tie = bool(best - second <= 2 * differences[at])
    return float(differences[: at + 1].max()), is_tie, is_tie


def are_tokens_equal(are_equal: Sequence[bool], are_excluded: Sequence[bool]) -> bool | None:
    """Judge what `compare` says of all prompts; None if too few of them count."""
    num_counted = len(are_excluded) - sum(are_excluded)
    if all(are_equal) and num_counted < LEAST_COUNTED * len(are_excluded):
        return None
    return all(are_equal)


def have_equal_bytes(ours: Sequence[Sample], cold: Sequence[Sample]) -> bool | None:
    """Compare the blocks that were loaded with those that were computed; None if none was."""
    pairs = [
        (sample.digests.get(each), other.digests.get(each))
        for sample, other in zip(ours, cold, strict=True)
        for each in sample.loaded
    ]
    return all(one is not None and one == another for one, another in pairs) if pairs else None


def find_problems(row: Row, of_bytes: str) -> list[str]:
    """Return what is wrong in a row of the report; `of_bytes` is from `DiskShare.problem`."""
    texts = [text.format(**row) for name, text in PROBLEMS.items() if row[name] is False]
    texts += filter(None, [of_bytes])
    return [f"{row['arm']} at {row['prefix_tokens']} tokens: {text}" for text in texts]


def _digest(sample: Sample, reused: Iterable[BlockHash]) -> str | None:
    """Return one digest over blocks in VRAM; None if one is not there, or there are none."""
    some = [sample.digests.get(each) for each in reused]
    known = [digest for digest in some if digest is not None]
    if not known or len(known) < len(some):
        return None
    return xxhash.xxh3_128_hexdigest("".join(known).encode())


def _row(arm: str, length: int, samples: Samples, block_bytes: int, page_cache: str) -> Row:
    """Return one row of the report: all repeats of an arm at a prefix length."""
    ours, tier = samples[arm, length], TIER_OF_ARM[arm]
    cold = samples["cold", length][: len(ours)]  # restarts may have been cut short
    differences, are_equal, are_excluded = zip(*map(compare, ours, cold), strict=True)
    times, cold_times = ([round(it.ttft_ms, 3) for it in each] for each in (ours, cold))
    p50_ms = round(statistics.median(times), 3)
    by_tier = {name: int(statistics.median(it.by_tier[name] for it in ours)) for name in Tier}
    bytes_loaded = int(statistics.median(len(it.loaded) * block_bytes for it in ours))
    from_disk = [it.bytes_from_disk for it in ours if it.bytes_from_disk is not None]
    reused = [
        [each for each in other.digests if arm not in PLANNED or each in it.loaded]
        for it, other in zip(ours, cold, strict=True)
    ]
    computed, found = (
        [_digest(it, some) if tier else None for it, some in zip(each, reused, strict=True)]
        for each in (cold, ours)
    )
    return {
        "arm": arm,
        "prefix_tokens": length,
        "ttft_ms": {
            "p50": p50_ms,
            "p90": sorted(times)[math.ceil(0.9 * len(times)) - 1],
            "min": min(times),
            "all": times,
        },
        "speedup": statistics.median(cold_times) / p50_ms if tier else None,
        "cached_tokens": sum(by_tier.values()),
        "by_tier": by_tier,
        "bytes_loaded": bytes_loaded,
        "loaded_GBps": bytes_loaded / p50_ms / 1e6 or None,
        "bytes_from_disk": int(statistics.median(from_disk)) if from_disk else None,
        "page_cache": page_cache if tier == "disk" else None,
        "output_token_ids": [it.token_ids for it in ours],
        "tokens_equal_cold": are_tokens_equal(are_equal, are_excluded),
        "kv_digest_computed": computed,
        "kv_digest_loaded": found,
        "kv_bytes_equal": found == computed if any(computed) else None,
        "max_logit_diff": max(differences),
        "num_prompts_excluded": sum(are_excluded),
        "is_from_claimed_tier": sources.are_from(
            [it.by_tier for it in ours], tier, may_compute=arm in PLANNED
        ),
    }
