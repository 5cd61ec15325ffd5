"""Measures the first hits in host memory after a flood of long prompts, and logs their plans.

    python -m tests.stress.first_hits --model random:llama-3.1-8b

Each round serves some prefixes, then as many long prompts as it takes to push them out of VRAM,
and then each prefix with 64 further tokens, one after the other. The first of these hits is planned
with the rates that were learnt at the start and during the flood, and the others also with what the
hits before them have taught. So the first one may take longer only if the engine believed something
wrong. Each row has what was believed, every plan, and what was predicted and measured.

A prefix must be in host memory and not in VRAM: the tokens that came from host memory, and those
that were computed although they are there, must be all of the prefix.
"""

import contextlib
import json
import logging
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import click
import msgspec

from tieredkv.bench import raw
from tieredkv.bench.progress import bench_progress
from tieredkv.bench.ttft import SUFFIX_TOKENS
from tieredkv.cache import promotion
from tieredkv.cache.plan_log import LoggedPlan
from tieredkv.engine.llm import LLM
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.types import Tier, tracked

Row = dict[str, Any]

PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
MOST_OVER_LAST = 1.3
"""How many times as long as the last hit of its round the first one may take."""


class _PlanLog(logging.Handler):
    """Keeps the plans that are logged, each with its time."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().removeprefix("plan ")
        if text.startswith("{"):
            self.texts.append((time.perf_counter(), text))

    def rows(self, since: float) -> list[Row]:
        """Return what each plan says of its first request, with its milliseconds since then."""
        rows = list[Row]()
        for at, text in self.texts:
            logged = msgspec.json.decode(text, type=LoggedPlan)
            if not logged.demands:
                continue
            link, split, demand = logged.links[0], logged.splits[0], logged.demands[0]
            rows.append(
                {
                    "at_ms": _ms(at - since),
                    "from_token": demand.begin,
                    "blocks_in_host": sum(len(it.indices) for it in demand.loads if it.link == 0),
                    "h2d_GBps": round(link.bytes_per_s / 1e9, 2),
                    "h2d_busy_ms": _ms(link.busy_s),
                    "device_busy_ms": _ms(logged.busy_s),
                    "computes_to": split.steady_block * logged.block_size,
                    "compute_ms": _ms(split.compute_s),
                    "load_ms": _ms(split.load_s),
                    "done_ms": _ms(split.done_s),
                }
            )
        return rows


@contextlib.contextmanager
def _logged_plans() -> Iterator[_PlanLog]:
    """Log the plans that are made inside."""
    plans, level = _PlanLog(), promotion.logger.level
    promotion.logger.addHandler(plans)
    promotion.logger.setLevel(logging.DEBUG)
    try:
        yield plans
    finally:
        promotion.logger.setLevel(level)
        promotion.logger.removeHandler(plans)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def believed(llm: LLM, num_tokens: int) -> Row:
    """Return what the engine believes of copies, and of computing so many tokens."""
    tiers, now = llm.core.parts.tiers, time.monotonic()
    compute, up = tiers.compute_rate, tiers.device_link.up_rate
    return {
        "h2d_GBps": round(up.effective(now) / 1e9, 2),
        "h2d_learnt_s_ago": round(now - up.learnt_at, 1) if up.is_learnt else None,
        "step_ms": _ms(compute.step_seconds(1, 0)),
        "prefix_ms": _ms(compute.seconds(0, num_tokens)),
    }


def serve_hit(llm: LLM, prefix: list[int], suffix: list[int]) -> Row:
    """Serve a prefix that is in host memory, with further tokens; return the row of it."""
    before = believed(llm, len(prefix))
    with _logged_plans() as plans:
        since = time.perf_counter()
        [answer] = llm.serve([llm.make_request(prefix + suffix, PARAMS)])
    usage = answer.usage
    return {
        "ttft_ms": _ms(answer.ttft_s),
        "predicted_ms": None if usage.predicted_s is None else _ms(usage.predicted_s),
        "actual_ms": None if usage.actual_s is None else _ms(usage.actual_s),
        "cached_tokens_by_tier": dict(usage.cached_tokens_by_tier),
        "recomputed_tokens": usage.recomputed_tokens,
        "written_tokens": usage.written_tokens,
        "believed_before": before,
        "believed_after": believed(llm, len(prefix)),
        "plans": plans.rows(since),
    }


def measure(
    llm: LLM, prefix_tokens: int, flood_lengths: list[int], num_hits: int, num_rounds: int
) -> tuple[list[Row], list[str]]:
    """Measure all rounds; return the rows, and what is wrong."""
    draw, rows, problems = random.Random(0), list[Row](), list[str]()
    block_size, progress = llm.core.kv_spec.block_size, bench_progress()

    def new_prompt(length: int) -> list[int]:
        return draw.choices(range(llm.core.info.vocab_size), k=length)

    def serve(prompt: list[int]) -> None:
        llm.serve([llm.make_request(prompt, PARAMS)])

    for length in sorted({prefix_tokens, *flood_lengths}):
        serve(new_prompt(length))  # the first of its length may compile kernels
    whole = prefix_tokens // block_size * block_size
    for round_ in range(num_rounds):
        prefixes = [new_prompt(prefix_tokens) for _ in range(num_hits)]
        what = f"round {round_}"
        for prompt in tracked(progress, what, [*prefixes, *map(new_prompt, flood_lengths)]):
            serve(prompt)
        for index, prefix in enumerate(prefixes):
            row = serve_hit(llm, prefix, new_prompt(SUFFIX_TOKENS))
            rows.append({"round": round_, "hit": index, **row})
            from_host = row["cached_tokens_by_tier"][Tier.HOST] + row["recomputed_tokens"]
            if row["cached_tokens_by_tier"][Tier.DEVICE] or from_host != whole:
                problems.append(f"round {round_}, hit {index}: not all was in host memory alone")
        first, *_, last = (row["ttft_ms"] for row in rows[-num_hits:])
        if first > MOST_OVER_LAST * last:
            took = f"the first hit took {first} ms, and the last one {last}"
            problems.append(f"round {round_}: {took}")
    return rows, problems


def _show(row: Row) -> str:
    """Return one line that sums up a row."""
    plans, before = row["plans"], row["believed_before"]
    split = f"computes to {plans[0]['computes_to']}, {len(plans)} plans" if plans else "no plan"
    head = "round {round} hit {hit}: {ttft_ms} ms, predicted {predicted_ms}, ".format(**row)
    from_host = row["cached_tokens_by_tier"][Tier.HOST]
    return f"{head}{from_host} from host, h2d {before['h2d_GBps']} GB/s believed, {split}"


@click.command(help=__doc__)
@click.option("--model", default="random:llama-3.1-8b", show_default=True)
@click.option("--prefix-tokens", default=5000, show_default=True, help="Length of a prefix.")
@click.option(
    "--flood",
    default="48000,20000,20000,5000",
    show_default=True,
    help="Lengths of the prompts of a flood, which must be more than VRAM holds.",
)
@click.option("--hits", default=3, show_default=True, help="Hits of a round; 2 at least.")
@click.option("--rounds", default=2, show_default=True)
@click.option("--device-size", default="8GiB", show_default=True)
@click.option("--host-size", default="20GiB", show_default=True)
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
def main(
    model: str,
    prefix_tokens: int,
    flood: str,
    hits: int,
    rounds: int,
    device_size: str,
    host_size: str,
    commit: str | None,
) -> None:
    lengths = [int(length) for length in flood.split(",")]
    sizes: Row = {"device_size": device_size, "host_size": host_size}
    began = time.perf_counter()
    with LLM(model, retention="in_memory", progress=bench_progress(), **sizes) as llm:
        start = {"ready_s": round(time.perf_counter() - began, 1), **believed(llm, prefix_tokens)}
        rows, problems = measure(llm, prefix_tokens, lengths, hits, rounds)
    for row in rows:
        click.echo(_show(row), err=True)
    report = raw.head(commit, "python -m tests.stress.first_hits") | {"model": model}
    report |= {"believed_at_start": start, "rows": rows, "problems": problems}
    click.echo(json.dumps(report))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
