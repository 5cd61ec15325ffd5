"""`tieredkv bench`."""

import functools
import importlib
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import click

from tieredkv.cli.output import as_text, json_option, print_json, print_table
from tieredkv.cli.settings import settings_options
from tieredkv.config import LoadedSettings
from tieredkv.units import parse_bytes

ARMS = ("cold", "device", "host", "disk", "restart")
ALWAYS = ("hardware", "commit", "command", "raw", "rows", "problems")
"""What every report has; the rest says what was measured."""

COUNT, NUMBER = click.IntRange(min=1), click.FloatRange(0, min_open=True)
ENGINE = ("model", "cache", "scheduler")
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
PICTURE = click.Path(dir_okay=False, path_type=Path)
Option = Callable[[Any], Any]
COMMIT = click.option("--commit", help="Commit to report, for a tree without its history.")
MODEL = click.option("--model", required=True, help="As for `serve`, e.g. random:llama-3.1-8b.")
PLOT_HELP = "Draw the figures too; needs `pip install 'tieredkv[plot]'`."
PLOT = click.option("--plot", type=PICTURE, metavar="FILE.png", help=PLOT_HELP)


def several(flag: str, kind: Callable[[str], Any], **option: Any) -> Option:
    """Return an option of values of a kind with commas between."""

    def parse(_context: object, _option: object, text: str | None) -> list[Any] | None:
        return None if text is None else [kind(part) for part in text.split(",")]

    return click.option(flag, callback=parse, **option)


def repeats(count: int) -> Option:
    """Return the option that says how often a bench measures."""
    return click.option("--repeats", type=COUNT, default=count, help="Behind each figure.")


@click.group()
def bench() -> None:
    """Measure on this machine."""


def measured(
    *options: Option, module: str | None = None
) -> Callable[[Callable[[], None]], click.Command]:
    """Make a command of a bench, which is nothing but its text: `measure` does the work.

    Args:
        options: what the command takes.
        module: the module in `tieredkv.bench` that measures; by default it has the verb's name.
    """

    def make(text: Callable[[], None]) -> click.Command:
        work = functools.partial(measure, module or text.__name__)
        command: Any = functools.update_wrapper(work, text)
        for option in reversed((*options, COMMIT, PLOT, json_option)):
            command = option(command)
        return bench.command()(command)

    return make


def measure(
    name: str,
    *,
    as_json: bool,
    loaded: LoadedSettings | None = None,
    plot: Path | None = None,
    commit: str | None = None,
    **options: Any,
) -> int:
    """Measure with `tieredkv.bench.NAME`; print a table, the raw limits, what is wrong, JSON.

    The module tells which `COLUMNS` of its rows people see, all if it does not, and which of them
    are `PLOTTED`, else the ratio to a raw limit.
    """
    from tieredkv.bench import plots, raw
    from tieredkv.bench.progress import terminal_progress

    plots.check(plot)
    if loaded is not None:
        options["settings"] = loaded.given()
    module = importlib.import_module(f"tieredkv.bench.{name}")
    report = raw.head(commit) | module.run(terminal_progress(), **options)
    rows = report["rows"]
    if names := getattr(module, "COLUMNS", ()):
        rows = [{it: reduce(getitem, it.split("."), row) for it in names} for row in rows]
    print_table(rows, texts=2)
    hardware, limits = report["hardware"], report["raw"]
    click.echo(f"device: {hardware['gpu'] or 'cpu, ' + hardware['cpu']}")
    facts = {key: value for key, value in report.items() if key not in ALWAYS}
    for title, told in (("raw limits of this run", limits), ("measured", facts)):
        if told:
            click.echo(f"{title}: {as_text(told)}")
    for problem in report["problems"]:
        click.echo(f"error: {problem}", err=True)
    if plot is not None:
        shown = getattr(module, "PLOTTED", ("ratio",))
        lines = {"GBps": limits, "ratio": {"": 1.0}}.get(shown[0], {})
        by, x, *_ = rows[0]
        plots.draw(plot, rows, by, x, shown, lines)
    if as_json:
        print_json(report)
    return 1 if report["problems"] else 0


@measured(
    MODEL,
    several("--prefix-tokens", COUNT, default="512,2048", help="Lengths."),
    several("--arms", click.Choice(ARMS), default=",".join(ARMS), help="Where prefixes come from."),
    repeats(5),
    settings_options(*ENGINE, without=("seed", "restore", "default_retention")),
)
def ttft() -> None:
    """Measure the time to the first token, cold and with the prefix in each tier.

    Every hit is proved: its tier, its KV bytes and its tokens are compared with the cold run; exit
    1 if one differs. `--disk-dir` is the folder in which a store is made and removed again.

    \b
    Example:
      tieredkv bench ttft --model tiny-random --prefix-tokens 512,2048 --repeats 5 --json
    """


@measured(
    several("--block-size-bytes", parse_bytes, default="512KiB,2MiB,8MiB", help="Blocks."),
    click.option("--total", default="256MiB", help="Copied in one go."),
    repeats(9),
)
def transfer() -> None:
    """Measure how fast blocks move between VRAM and pinned host memory.

    Blocks lie scattered on both sides and move as the engine moves them. Beside each rate stands
    that of one large copy of the same run (raw); at both at once, rates are each way. Host us per
    block is what the call costs the engine's thread, one block us the time of a single block from
    call to arrival. Exit 1 if a byte arrives changed. Without a GPU, VRAM is ordinary memory.

    \b
    Example, half a minute:
      tieredkv bench transfer --block-size-bytes 512KiB,2MiB,8MiB --total 1GiB
    """


@measured(
    click.option("--dir", "folder", type=FOLDER, required=True, help="On the disk to be measured."),
    click.option("--block-bytes", default="2MiB", help="Payload of a block."),
    click.option("--disk-size", default="4GiB", help="Budget of the store."),
    several("--index-blocks", COUNT, default="10000,1000000", help="An index each."),
    repeats(3),
)
def disk() -> None:
    """Measure what the disk tier makes of a disk, beside what the disk does without it.

    \b
    read    a random quarter of a churned store, from one request, page cache dropped
    write   at capacity with eviction going on, the whole budget a sample, for each way to sync
    index   us a hash in lookups of 8192: hits, misses, through the worker, and the first calls
            after an open; seconds to open a store of so many blocks

    Blocks go through the store's own worker. A ratio is to the mean of the raw O_DIRECT rates
    just before and after, of as many threads and blocks. Amplification is what the device moved,
    for others too, over the bytes of the blocks; own, what it moved for the worker; "-" where it
    moved nothing, so that the bytes came from memory. Needs twice the budget and a KiB for each
    block of an index. Exit 1 if a byte differs, a block fails, or the worker had more than 1.05
    times the blocks and their headers read.

    \b
    Example, a few minutes:
      tieredkv bench disk --dir /nvme --disk-size 4GiB
    """


@measured(
    click.option("--shape", default="llama-3.1-8b", help="As after `random:`."),
    click.option("--block-size", type=COUNT, default=16, help="Tokens a block."),
    several("--cases", str, help="What to attend; by default what suits."),
    repeats(9),
)
def attention() -> None:
    """Measure the attention kernels over scattered blocks of the paged cache.

    A case is a chunk of new over cached tokens (8192+24576), or a decode batch of requests x
    context (64x4096, or 64x128..16384 for lengths between). The raw limits are a matrix product's
    FLOPs and a copy's bytes of the same run; ratio is the larger of both times over ours. Exit 1 if
    a result differs from the torch reference by more than rounding. On a CPU the reference itself
    is what runs.

    \b
    Example, a minute:
      tieredkv bench attention --shape llama-3.1-8b --cases 8192+0,64+32768,64x4096
    """


@measured(
    MODEL,
    several("--contexts", COUNT, help="ITL of one request, e.g. 1024,32768."),
    click.option("--tokens", type=COUNT, default=200, help="Gaps behind an ITL."),
    several("--workloads", str, help="Throughput, e.g. 128x1024+256,32x8192+128."),
    repeats(3),
    settings_options(*ENGINE, without=("seed", "device", "default_retention")),
)
def decode() -> None:
    """Measure the time between tokens (ITL), and throughput.

    \b
    --contexts   one request alone, at each context: its ITL
    --workloads  requests x input + output tokens, all given at once: their throughput

    Without any of them, a small choice of both. The raw limit of a step is its weights and
    KV over the copy bandwidth of the same run, that of a prompt its FLOPs over a matrix product's
    rate. Tiers are sized for what is measured unless told.

    \b
    Example, a minute without a GPU:
      tieredkv bench decode --model tiny-random --contexts 1024 --workloads 16x512+16
    """


@measured(
    click.option("--url", default="http://127.0.0.1:8000", help="Where it runs."),
    click.option("--api-key", help="Key that it wants, if any."),
    several("--rates", NUMBER, default="1,2,4", help="Conversations a second."),
    several("--retentions", str, default="in_memory", help="Rows."),
    click.option("--duration", type=NUMBER, default=60.0, help="Seconds a row."),
    click.option("--turns", type=COUNT, default=4, help="Answers a conversation."),
    click.option("--think", type=NUMBER, default=5.0, help="Seconds between turns."),
    click.option("--system-tokens", type=COUNT, default=2000, help="Shared by all."),
    click.option("--user-tokens", type=COUNT, default=200, help="New in each turn."),
    click.option("--answer-tokens", type=COUNT, default=64, help="Of each answer."),
    module="conversations",
)
def serve() -> None:
    """Measure a running server as its clients see it: conversations with think times.

    They arrive at a rate, whether or not the server keeps up. All share a system prompt; each turn
    sends what was said before. Rows tell the time to the first token and between tokens, by the
    slowest tier that the prefix came from, and the share of prompt tokens that were cached. With
    the tiers off, a retention keeps blocks in VRAM alone: configure one for it, such as
    `[retention.device_only]`. Exit 1 if a request fails.

    \b
    Example, a minute and a half without a GPU:
      tieredkv serve tiny-random --device-size 16MiB &
      tieredkv bench serve --rates 1,4 --duration 20
    """
