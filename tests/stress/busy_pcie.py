"""Measures one request whose prefix is in host memory while other copies keep PCIe busy.

    python -m tests.stress.busy_pcie --model random:llama-3.1-8b --prefix-tokens 8192,32768

Kernels on `--streams` streams read pinned memory without a pause. Copies would take turns with
those of the request, since a copy engine executes one at a time; kernels take a share of PCIe's
rate away, and little of the rest of the GPU. The arms take turns with one prompt: all of it is
computed (`cold`), its prefix is loaded in whole (`load`), or it is divided (`planned`).
Tokens are compared with the cold ones, but for near ties, and the bytes of the blocks that were
loaded with those that were computed. It needs a GPU, but for `--streams 0`.
"""

# mypy: disable-error-code="no-untyped-call"
# (how much of torch.cuda is typed differs between torch versions)

import contextlib
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import click
import torch

from tieredkv.bench import raw
from tieredkv.bench.processes import cut_short, noting_interruptions
from tieredkv.bench.progress import bench_progress
from tieredkv.bench.ttft import (
    PROBLEMS,
    Row,
    Sample,
    are_tokens_equal,
    compare,
    demote_all,
    have_equal_bytes,
    make_prompt,
    serve_once,
)
from tieredkv.engine.llm import LLM
from tieredkv.garbage import look_seldom
from tieredkv.types import Tier, tracked

COPY_BYTES = 64 << 20
NUM_AHEAD = 2
"""Kernels that each stream is given ahead, so that it never pauses."""

MODES: dict[str, Any] = {"cold": "compute", "load": "load", "planned": "auto"}
Samples = dict[tuple[int, int, str], list[Sample]]
"""Samples by streams, prefix length and arm."""


class Traffic:
    """Keeps PCIe busy on several streams, from a thread of its own, until it is closed.

    Attributes:
        num_bytes: what was read so far.
    """

    def __init__(self, num_streams: int) -> None:
        self.num_bytes = 0
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._copy, args=(num_streams,), daemon=True)
        self._thread.start()

    def _copy(self, num_streams: int) -> None:
        from tests.stress.pinned_reads import read  # there is no Triton where there is no GPU

        source = torch.zeros(COPY_BYTES // 4, dtype=torch.int32, pin_memory=True)
        target = torch.zeros_like(source, device="cuda")
        streams = [torch.cuda.Stream() for _ in range(num_streams)]
        pending: list[list[torch.cuda.Event]] = [[] for _ in streams]
        while not self._is_closed.is_set():
            for stream, events in zip(streams, pending, strict=True):
                while events and events[0].query():
                    events.pop(0)
                    self.num_bytes += COPY_BYTES
                while len(events) < NUM_AHEAD:
                    with torch.cuda.stream(stream):
                        read(source, target)
                    events.append(torch.cuda.Event())
                    events[-1].record(stream)
            time.sleep(1e-3)
        for stream in streams:
            stream.synchronize()

    def close(self) -> None:
        """End the copies."""
        self._is_closed.set()
        self._thread.join()


@contextlib.contextmanager
def traffic(num_streams: int) -> Iterator[Traffic | None]:
    """Keep PCIe busy for a while, unless there are no streams."""
    if not num_streams:
        yield None
        return
    with contextlib.closing(Traffic(num_streams)) as it:
        yield it


def measure(
    settings: Row, lengths: list[int], streams: list[int], repeats: int
) -> tuple[Samples, Row]:
    """Serve every prompt in each arm; also return the rate of the other copies, by streams.

    An interruption ends it with the prompts that were served by then.
    """
    progress, samples, rates = bench_progress(), Samples(), Row()
    with (
        LLM(**settings, restore="auto", progress=progress) as llm,
        noting_interruptions() as interrupted,
    ):
        serve_once(llm, make_prompt(llm, max(lengths), -1))  # warm-up
        for num_streams in streams:
            llm.core.verbs.evict()
            with traffic(num_streams) as others:
                serve(llm, max(lengths), -2)  # the rate of PCIe is learnt
                began_at, num_bytes = time.monotonic(), others.num_bytes if others else 0
                cases = list(itertools.product(range(repeats), lengths))
                for repeat, length in tracked(progress, f"beside {num_streams} streams", cases):
                    if interrupted.is_set():
                        break
                    for arm, sample in serve(llm, length, repeat).items():
                        samples.setdefault((num_streams, length, arm), []).append(sample)
                moved = others.num_bytes - num_bytes if others else 0
                rates[str(num_streams)] = round(moved / (time.monotonic() - began_at) / 1e9, 2)
    return samples, rates


def serve(llm: LLM, length: int, repeat: int) -> dict[str, Sample]:
    """Serve one prompt in each arm; it is computed first, and then in host memory."""
    prompt, found = make_prompt(llm, length, repeat), dict[str, Sample]()
    for arm, mode in MODES.items():
        llm.core.parts.tiers.settings.restore = mode
        if arm != "cold":
            demote_all(llm, "host")
        found[arm] = serve_once(llm, prompt, digested=True)
    llm.core.parts.tiers.settings.restore = "auto"
    llm.core.verbs.evict()
    return found


def rows_of(samples: Samples, rates: Row) -> list[Row]:
    """Return a row for each arm, with times in ms."""
    rows = list[Row]()
    for (num_streams, length, arm), ours in samples.items():
        cold, times = samples[num_streams, length, "cold"], [each.ttft_ms for each in ours]
        _, are_equal, are_excluded = zip(*map(compare, ours, cold), strict=True)
        rows.append(
            {
                "streams": num_streams,
                "others_GBps": rates[str(num_streams)],
                "prefix_tokens": length,
                "arm": arm,
                "ttft_ms": {"p50": statistics.median(times), "min": min(times), "all": times},
                "predicted_ms": [each.predicted_ms for each in ours],
                "tokens_from_host": [each.by_tier[Tier.HOST] for each in ours],
                "tokens_equal_cold": are_tokens_equal(are_equal, are_excluded),
                "num_prompts_excluded": sum(are_excluded),
                "kv_bytes_equal": have_equal_bytes(ours, cold),
            }
        )
    return rows


@click.command(help=__doc__)
@click.option("--model", default="random:llama-3.1-8b", show_default=True)
@click.option("--prefix-tokens", default="8192,32768", show_default=True, help="With commas.")
@click.option("--streams", default="0,1,8", show_default=True, help="Other copies at a time.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--device-size", default="12GiB", show_default=True)
@click.option("--host-size", default="24GiB", show_default=True)
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
def main(
    model: str,
    prefix_tokens: str,
    streams: str,
    repeats: int,
    device_size: str,
    host_size: str,
    commit: str | None,
) -> None:
    look_seldom()  # as the engine's process does
    lengths, counts = ([int(it) for it in text.split(",")] for text in (prefix_tokens, streams))
    if any(counts) and not torch.cuda.is_available():
        raise click.UsageError("There is no GPU, and so no PCIe to keep busy.")
    settings: Row = {"model": model, "device_size": device_size, "host_size": host_size}
    settings["max_model_len"] = max(lengths) + 128
    samples, rates = measure(settings, lengths, counts, repeats)
    report = raw.head(commit, "python -m tests.stress.busy_pcie") | {"model": model}
    rows = rows_of(samples, rates)
    problems = [
        f"{row['arm']}, {row['prefix_tokens']} tokens: {PROBLEMS[name]}"
        for row in rows
        for name in ("tokens_equal_cold", "kv_bytes_equal")
        if row[name] is False
    ]
    num_served, num_cases = sum(map(len, samples.values())), len(lengths) * len(counts) * repeats
    problems += cut_short(num_served // len(MODES), num_cases, "prompts")
    click.echo(json.dumps(report | {"rows": rows, "problems": problems}))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
