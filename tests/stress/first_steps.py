"""Measures steps of sizes that no step had before, while blocks are copied to VRAM.

    python -m tests.stress.first_steps --model random:llama-3.1-8b --steps 120

Each step is computed twice, each time just after copies of blocks were started. If the first time
is longer, something that the step needs was made or loaded then, and that may wait for the copies.
`num_allocations` counts how often torch asked the driver for memory meanwhile. It needs a GPU.
"""

# mypy: disable-error-code="no-untyped-call"
# (how much of torch.cuda is typed differs between torch versions)

import json
import random
import time
from typing import Any, NamedTuple

import click
import torch

from tieredkv.bench import raw
from tieredkv.bench.progress import bench_progress
from tieredkv.engine.graphs import MIXED_SIZES
from tieredkv.engine.llm import LLM
from tieredkv.engine.step_buffers import BatchRow, idle_row
from tieredkv.garbage import look_seldom
from tieredkv.types import BlockId, PageId, tracked

Row = dict[str, Any]

STARTS = (0, 1568, 6000, 20_000)
SLOW = 1.25
"""A first step is slow if it takes so many times what the second one takes."""


class Took(NamedTuple):
    """What a step took: on the GPU, of the thread that issues it, and of the driver's memory."""

    gpu_ms: float
    issue_ms: float
    num_allocations: int


def take(llm: LLM, row: BatchRow, num_copied: int) -> Took:
    """Start copies into the last blocks of VRAM, issue a step, and wait for both."""
    core, stats = llm.core, torch.cuda.memory_stats
    first = core.parts.tiers.device.num_blocks - num_copied
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    num_before = stats()["num_device_alloc"]
    copies = [(PageId(index), BlockId(first + index)) for index in range(num_copied)]
    core.parts.tiers.device_link.promote(copies, (0.0, ()))
    began.record()
    began_at = time.perf_counter()
    core._runner.execute([row])
    issue_ms = 1e3 * (time.perf_counter() - began_at)
    ended.record()
    torch.cuda.synchronize()
    core.parts.tiers.device_link.poll()
    return Took(began.elapsed_time(ended), issue_ms, stats()["num_device_alloc"] - num_before)


def measure(llm: LLM, num_steps: int, most_tokens: int, num_copied: int) -> list[Row]:
    """Compute steps of random sizes, each twice; one row a step. Half of them are short."""
    draw, rows = random.Random(0), list[Row]()
    starts = [it for it in STARTS if it + most_tokens <= llm.core.info.max_model_len]
    for _ in tracked(bench_progress(), "measuring", range(num_steps)):
        num_tokens = draw.randint(2, draw.choice((MIXED_SIZES[-1], most_tokens)))
        start = draw.choice(starts)
        row = idle_row(num_tokens, start)
        first, then = (take(llm, row, num_copied) for _ in range(2))
        is_slow = first.gpu_ms > SLOW * then.gpu_ms
        rows.append({"num_tokens": num_tokens, "start": start, "is_slow": is_slow})
        rows[-1] |= {"first": first._asdict(), "then": then._asdict()}
    return rows


@click.command(help=__doc__)
@click.option("--model", default="random:llama-3.1-8b", show_default=True)
@click.option("--steps", default=120, show_default=True)
@click.option("--most-tokens", default=6000, show_default=True, help="Tokens of the longest step.")
@click.option("--copied", default=2300, show_default=True, help="Blocks that are copied beside it.")
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
def main(model: str, steps: int, most_tokens: int, copied: int, commit: str | None) -> None:
    look_seldom()  # as the engine's process does
    if not torch.cuda.is_available():
        raise click.UsageError("There is no GPU.")
    sizes: Row = {"device_size": "12GiB", "host_size": "12GiB", "max_model_len": 32_768}
    with LLM(model, progress=bench_progress(), **sizes) as llm:
        rows = measure(llm, steps, most_tokens, copied)
    slow = [row for row in rows if row["is_slow"]]
    click.echo(f"{len(slow)} of {steps} first steps were slow", err=True)
    report = raw.head(commit, "python -m tests.stress.first_steps") | {"model": model}
    click.echo(json.dumps(report | {"num_slow": len(slow), "rows": rows}))


if __name__ == "__main__":
    main()
