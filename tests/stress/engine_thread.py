"""Measures how long the engine's thread works on a long prompt, without the kernels.

    python -m tests.stress.engine_thread --prompt-tokens 32768 --cached-blocks 10000,100000
    python -m tests.stress.engine_thread --block-sizes '' --cached-blocks ''  # verbs only

The scheduler and the tiered cache are the real ones. Blocks have only a few bytes, so that only the
work on hashes, blocks and tables is measured. A prompt is measured in each state:

    none      no block of it is cached
    device    all of it is in VRAM
    host      all of it is in host memory

Then a shorter prompt is looked up in VRAM beside more and more other blocks. This gives the time of
a lookup per block hash.

Last, an operator asks for every verb while VRAM has many blocks, in few long chains and in many
chains of one block. This gives how long the longest slice of work between two steps takes.
"""

import contextlib
import hashlib
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import click
import torch

from tests.fake_store import kept_by
from tieredkv.bench import raw
from tieredkv.bench.progress import bench_progress
from tieredkv.cache.catalog import Catalog
from tieredkv.cache.chain import Chain
from tieredkv.cache.device_link import DeviceLink
from tieredkv.cache.pool import BlockPool
from tieredkv.cache.requests import TieredCache
from tieredkv.cache.settings import CacheSettings
from tieredkv.cache.tiers import Tiers
from tieredkv.clock import Clock
from tieredkv.config import Settings
from tieredkv.engine.chains import Chains
from tieredkv.engine.engine_messages import EngineRequest, Tokenize, Tokenized
from tieredkv.engine.prompt_inspections import PromptInspections
from tieredkv.engine.request import Request
from tieredkv.engine.sampler import SamplerState
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.engine.scheduler import Scheduler
from tieredkv.engine.slices import Slices
from tieredkv.engine.step_timer import StepTimer
from tieredkv.engine.tier_stats import TierStats
from tieredkv.engine.verbs import Verbs
from tieredkv.errors import TieredKVError
from tieredkv.garbage import look_seldom
from tieredkv.hashing import chain_hashes
from tieredkv.kernels.copies import BlockCopier
from tieredkv.operate.calls import Call, Df, EvictFilter, Inspect, Ls
from tieredkv.operate.evict import ASKED_BLOCKS
from tieredkv.operate.models import KnownModel
from tieredkv.operate.table import START_BYTES
from tieredkv.pieces import whole
from tieredkv.retention import RetentionPolicies
from tieredkv.types import BlockHash, KVSpec, LayerKV, Progress, Tier, tracked

BLOCK_BYTES = 8
VOCAB_SIZE = 128_256
FILLED_PROMPT_BLOCKS = 2048
ROOT = BlockHash(b"engine thread".ljust(32, b"\0"))
PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
INSPECTED_TOKENS = 131_072
PARTS = ("hash_ms", "lookup_ms", "load_ms", "complete_ms", "release_ms")

Row = dict[str, Any]


def run(
    progress: Progress,
    *,
    prompt_tokens: int,
    block_sizes: list[int],
    cached_blocks: list[int],
    verb_blocks: int,
    repeats: int,
) -> Row:
    """Measure every state at each block size, hits beside cached blocks, and operators' verbs."""
    rows, verbs, first = list[Row](), list[Row](), (block_sizes or [16])[0]
    cases = [(size, 0) for size in block_sizes] + [(first, count) for count in cached_blocks]
    for block_size, count in tracked(progress, "measuring", cases):
        if count:
            rows.append(_measure_filled(count, block_size, repeats))
        else:
            rows += _measure_states(prompt_tokens, block_size, repeats)
    for chain_blocks in tracked(progress, "asking", [FILLED_PROMPT_BLOCKS, 1]):
        runs = [_measure_verbs(verb_blocks, chain_blocks, first) for _ in range(repeats)]
        verbs += [_least(several) for several in zip(*runs, strict=True)]
    problems = [
        f"{row['state']}, blocks of {row['block_size']}: the tokens came from {row['by_tier']}"
        for row in rows
        if row["by_tier"] != _expected(row["state"], row["prompt_tokens"])
    ]
    data = bytes(16 << 20)
    hash_s = raw.median_s(lambda: hashlib.sha256(data).digest(), repeats=5)
    limits = {"sha256_GBps": round(len(data) / hash_s / 1e9, 3)}
    return {"raw": limits, "rows": rows, "verbs": verbs, "problems": problems}


def _expected(state: str, num_tokens: int) -> dict[str, int]:
    return {tier: num_tokens if tier == state else 0 for tier in ("device", "host")}


class NoCopies(BlockCopier):
    """Copies no bytes, because `bench transfer` measures the time of copies."""

    def _copy(self, *_: object) -> None:
        pass


class _Host:
    """A scheduler and a tiered cache with pools of tiny blocks."""

    def __init__(self, num_blocks: int, block_size: int, num_prompt_tokens: int) -> None:
        memory = torch.zeros(num_blocks, BLOCK_BYTES, dtype=torch.uint8)
        self.tiers = Tiers(
            device=BlockPool(num_blocks),
            host=BlockPool(num_blocks),
            catalog=Catalog(RetentionPolicies()),
            store=None,
            device_link=DeviceLink[Any](NoCopies(memory, memory)),
            clock=Clock(),
            vram_bytes=BLOCK_BYTES,
            payload_bytes=BLOCK_BYTES,
            block_size=block_size,
            settings=CacheSettings(restore="load", device_reserve_blocks=1),
        )
        self.cache = TieredCache(self.tiers)
        self.scheduler = Scheduler(
            cache=self.cache,
            block_size=block_size,
            max_num_seqs=256,
            max_num_batched_tokens=num_prompt_tokens,
            max_num_alone_tokens=num_prompt_tokens,
            hash_algo="sha256",
        )
        self.block_size = block_size
        self.random = random.Random(0)
        known = KnownModel(
            name="", fingerprint="00", dtype="bfloat16", block_size=block_size, hash_algo="sha256"
        )
        spec = KVSpec(layers=[LayerKV(1, 1)], dtype="bfloat16", block_size=block_size)
        stats = TierStats(
            self.cache.operations,
            self.scheduler,
            StepTimer(self.tiers.compute_rate, torch.device("cpu")),
            VOCAB_SIZE,
        )
        slices, prefixes = Slices(), Chains(Settings(), spec, b"", self.tiers.clock)
        prompts = PromptInspections(self.cache.operations, prefixes, slices)
        self.verbs = Verbs(self.cache.operations, stats, prompts, known, slices)
        prompts.on_prompt = self._tokenize

    def prompt(self, num_tokens: int) -> list[int]:
        """Return new random tokens."""
        return self.random.choices(range(VOCAB_SIZE), k=num_tokens)

    def _tokenize(self, asked: Tokenize) -> None:
        """Have a prompt be inspected that fills the pool, but of 131k tokens at most."""
        num_tokens = min(INSPECTED_TOKENS, self.tiers.device.num_blocks * self.block_size)
        tokens = self.prompt(num_tokens)
        request = EngineRequest(request_id="p", prompt_token_ids=tokens, params=PARAMS)
        self.verbs.prompts.go_on(Tokenized(asked.id, request))

    def ask(self, call: Call) -> Row:
        """Carry out a verb; return how many slices it took, and how long the longest one took."""
        done = list[bool]()
        self.verbs.operate(call, lambda _, has_more: done.append(not has_more))
        slices = list[tuple[float, float]]()
        while not any(done):
            begun = time.perf_counter(), time.thread_time()
            self.verbs.answer_control()
            slices.append((time.perf_counter() - begun[0], time.thread_time() - begun[1]))
        wall_s, cpu_s = zip(*slices, strict=True)
        return {
            "slices": len(slices),
            "longest_slice_ms": 1e3 * max(wall_s),
            "longest_slice_cpu_ms": 1e3 * max(cpu_s),
            "all_ms": 1e3 * sum(wall_s),
        }

    def serve(self, token_ids: list[int]) -> Row:
        """Serve a prompt to its first token; return the ms of each part, and its tokens by tier."""
        marks = [time.perf_counter()]
        hashes = chain_hashes(ROOT, token_ids, self.block_size)
        marks.append(time.perf_counter())
        request = Request(
            EngineRequest(request_id="r", prompt_token_ids=token_ids, params=PARAMS),
            chain=Chain(ROOT, b"", hashes, claims=kept_by("in_memory")),
            sampler=SamplerState(PARAMS, 0),
            max_output_tokens=1,
        )
        self.scheduler.add(request)
        rows = self.scheduler.schedule()
        marks.append(time.perf_counter())
        self.cache.pump()
        while not rows or not rows[-1].row.needs_logits:
            for row in rows:
                self.scheduler.complete(row)
            self.cache.poll()
            rows = self.scheduler.schedule()
        marks.append(time.perf_counter())
        for row in rows:
            self.scheduler.complete(row)
        usage = request.measure_usage(self.block_size, 0, self.cache.why_missed)
        self.cache.touch(request.chain)
        marks.append(time.perf_counter())
        self.scheduler.remove(request)
        self.cache.pump()
        marks.append(time.perf_counter())
        parts_ms = [1e3 * (end - start) for start, end in itertools.pairwise(marks)]
        until_first_token = {"until_first_token_ms": sum(parts_ms[:3])}
        by_tier = {tier: usage.cached_tokens_by_tier[tier] for tier in (Tier.DEVICE, Tier.HOST)}
        return dict(zip(PARTS, parts_ms, strict=True)) | until_first_token | {"by_tier": by_tier}


def _measure_states(num_tokens: int, block_size: int, repeats: int) -> list[Row]:
    """Measure a prompt in each state; return the medians of the repeats."""
    num_full = num_tokens // block_size * block_size
    host = _Host(2 * num_tokens // block_size + 2, block_size, num_tokens + block_size)
    runs: dict[str, list[Row]] = {"none": [], "device": [], "host": []}
    for _ in range(repeats):
        prompt = host.prompt(num_full)
        longer = [*prompt, *host.prompt(block_size - 1)]  # its last token is never cached
        runs["none"].append(host.serve(prompt))
        runs["device"].append(host.serve(longer))
        if not host.cache.flush(Tier.HOST, deadline=time.monotonic() + 60):
            raise TieredKVError("The prompt did not reach host memory")
        runs["host"].append(host.serve(longer))
        whole(host.cache.operations.evict(lambda _: True))
    return [_row(state, num_full, block_size, several) for state, several in runs.items()]


def _measure_filled(num_blocks: int, block_size: int, repeats: int) -> Row:
    """Measure the time per hash of a hit in VRAM while so many blocks are cached."""
    prompt_blocks = min(FILLED_PROMPT_BLOCKS, num_blocks)
    num_tokens = prompt_blocks * block_size
    host = _Host(num_blocks + 2, block_size, num_tokens + block_size)
    for _ in range(num_blocks // prompt_blocks - 1):
        host.serve(host.prompt(num_tokens))
    prompt = host.prompt(num_tokens)
    host.serve(prompt)
    longer = [*prompt, *host.prompt(block_size - 1)]
    row = _row("device", num_tokens, block_size, [host.serve(longer) for _ in range(repeats)])
    return row | {
        "cached_blocks": num_blocks,
        "us_per_hash": 1e3 * row["lookup_ms"] / prompt_blocks,
    }


def _measure_verbs(num_blocks: int, chain_blocks: int, block_size: int) -> list[Row]:
    """Measure the slices of every verb while VRAM has so many blocks, in chains of equal length."""
    num_chains = num_blocks // chain_blocks
    num_tokens = chain_blocks * block_size
    host = _Host(num_chains * chain_blocks + 2, block_size, num_tokens + block_size)
    for _ in range(num_chains):
        host.serve(host.prompt(num_tokens))
    entries = host.tiers.catalog.entries()
    starts = tuple(entry.block_hash[:START_BYTES] for entry in entries)[:ASKED_BLOCKS]
    one, num = starts[:chain_blocks], len(starts)
    namespace = entries[0].namespace.hex()
    calls: dict[str, Call] = {
        "df": Df(),
        "ls": Ls(),
        "inspect --prompt-file": Inspect(prompt="text"),
        "evict --dry-run ID": EvictFilter(starts=one, dry_run=True),
        "evict --dry-run --filter": EvictFilter(starts=starts, dry_run=True),
        "evict --dry-run --all": EvictFilter(all=True, dry_run=True),
        "evict --tier host": EvictFilter(tiers=(Tier.HOST,)),
        "evict --to host": EvictFilter(all=True, to="host"),
        "evict ID": EvictFilter(starts=one),
        "evict --ns": EvictFilter(namespace_prefix=namespace, starts=starts[: num // 3]),
        "evict --older-than": EvictFilter(older_than_s=0.0, starts=starts[: num // 2]),
        "evict --filter": EvictFilter(starts=starts[: 3 * num // 4]),
        "evict --all": EvictFilter(all=True),
    }
    del entries
    shape = {"blocks": num_chains * chain_blocks, "chain_blocks": chain_blocks}
    with contextlib.ExitStack() as stack:
        stack.callback(look_seldom())  # as the engine does
        return [shape | {"verb": name} | host.ask(call) for name, call in calls.items()]


def _least(runs: Sequence[Row]) -> Row:
    """Return the least time of each kind, since other jobs may use the cores."""
    times = {name: min(run[name] for run in runs) for name in runs[0] if name.endswith("_ms")}
    return runs[0] | times


def _row(state: str, num_tokens: int, block_size: int, runs: list[Row]) -> Row:
    """Return the medians; `by_tier` is that of a run which does not fit the state, if any."""
    expected = _expected(state, num_tokens)
    wrong = [run["by_tier"] for run in runs if run["by_tier"] != expected]
    times = {
        name: statistics.median(run[name] for run in runs) for name in runs[0] if "_ms" in name
    }
    shape = {"state": state, "block_size": block_size, "prompt_tokens": num_tokens}
    return shape | times | {"by_tier": (wrong or [expected])[0]}


def _counts(_context: object, _option: object, text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


@click.command()
@click.option("--prompt-tokens", default=131_072, show_default=True, help="Tokens of the prompt.")
@click.option(
    "--block-sizes", default="16,64", callback=_counts, show_default=True, help="Tokens per block."
)
@click.option(
    "--cached-blocks",
    default="10000,100000,1000000",
    callback=_counts,
    show_default=True,
    help="Numbers of cached blocks beside which a hit is measured.",
)
@click.option(
    "--verb-blocks", default=100_000, show_default=True, help="Cached blocks that verbs are about."
)
@click.option(
    "--repeats",
    default=5,
    show_default=True,
    help="Runs per figure: the median counts, of verbs the least.",
)
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
def main(commit: str | None, **options: Any) -> None:
    """Measure how long the engine's thread works on a long prompt; print JSON."""
    click.echo(
        json.dumps(
            raw.head(commit, "python -m tests.stress.engine_thread")
            | run(bench_progress(), **options)
        )
    )


if __name__ == "__main__":
    main()
