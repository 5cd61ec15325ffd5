"""`tieredkv bench`."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tieredkv.cli.output import Command, json_option, print_json, print_table
from tieredkv.cli.settings_options import settings_options
from tieredkv.config import LoadedSettings

ARMS = "cold,device,host,disk,restart"
PLOTTED = {"ttft": "TTFT_p50_ms", "transfer": "GBps", "serve": "ttft_p50_ms"}
"""What `--plot` draws; the ratio to a raw limit where nothing is said."""

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


def report_options(command: Command) -> Command:
    """Give a bench its `--plot`, `--commit` and `--json`."""
    plot_help = "Draw the figures too; needs `pip install 'tieredkv[plot]'`."
    picture = click.Path(dir_okay=False, path_type=Path)
    command = click.option("--plot", type=picture, metavar="FILE.png", help=plot_help)(command)
    commit_help = "Commit to report, for a tree without its history."
    return click.option("--commit", help=commit_help)(json_option(command))


def measure(
    name: str,
    *arguments: Any,
    as_json: bool,
    plot: Path | None = None,
    commit: str | None = None,
    command: str | None = None,
    **options: Any,
) -> tuple[int, list[dict[str, Any]]]:
    """Measure; print a table, the raw limits, what is wrong, JSON.

    Returns:
        The exit code, and the rows of the table.
    """
    from tieredkv.bench import plots, raw
    from tieredkv.bench.progress import terminal_progress

    plots.check(plot)
    module = importlib.import_module(f"tieredkv.bench.{name}")
    report = raw.head(commit, command) | module.run(*arguments, terminal_progress(), **options)
    rows = getattr(module, "table", list)(report["rows"])
    names = list(dict.fromkeys(key for row in rows for key in row if not key.endswith("_all")))
    cells = [{key.replace("_", " "): _cell(row.get(key)) for key in names} for row in rows]
    print_table(cells, numbers=len(names) - 2)
    hardware, limits = report["hardware"], report["raw"]
    click.echo(f"device: {hardware['gpu'] or 'cpu, ' + hardware['cpu']}")
    facts = {key: report[key] for key in ("model", "dtype", "block_size") if key in report}
    shown = {"raw limits of this run": limits, "served": facts}
    shown["disk"] = report.get("disk")
    for title in filter(shown.get, shown):
        click.echo(f"{title}: {_cell(shown[title])}")
    for problem in report["problems"]:
        click.echo(f"error: {problem}", err=True)
    if plot is not None:
        y = PLOTTED.get(name, "ratio")
        lines = {"GBps": limits, "ratio": {"": 1.0}}.get(y, {})
        plots.draw(plot, rows, (names[0], names[1], y), lines)
    if as_json:
        print_json(report)
    return (1 if report["problems"] else 0), rows


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_cell(value[key])}" for key in value)
    if isinstance(value, list):
        return " to ".join(map(_cell, value))
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _count(flag: str, *, default: int, help: str) -> Callable[[Command], Command]:
    """Return an option of one count."""
    kind = click.IntRange(min=1)
    return click.option(flag, type=kind, default=default, show_default=True, help=help)


def _several(flag: str, *, help: str, default: str | None = None) -> Callable[[Command], Command]:
    """Return an option of counts with commas between."""
    return click.option(flag, callback=_parse, default=default, show_default=True, help=help)


def _parse(_context: object, _option: object, text: str | None) -> list[int]:
    parts = [part for part in (text or "").split(",") if part]
    if text is not None and not (parts and all(part.isdecimal() and int(part) for part in parts)):
        raise click.BadParameter(f"'{text}' is not a list of counts such as 512,2048.")
    return [int(part) for part in parts]


@click.group()
def bench() -> None:
    """Measure on this machine."""


@bench.command()
@click.option("--model", required=True, help="As for `serve`, e.g. random:llama-3.1-8b.")
@_several("--prefix-tokens", default="512,2048", help="Lengths.")
@click.option("--arms", default=ARMS, show_default=True, help="Where the prefix comes from.")
@_count("--repeats", default=5, help="Of each length.")
@click.option("--seed", "bench_seed", type=int, default=0, help="Other seeds, other prompts.")
@settings_options("model", "cache", "scheduler", without=("seed", "restore", "default_retention"))
@report_options
def ttft(loaded: LoadedSettings, arms: str, **options: Any) -> int:
    """Measure the time to the first token, cold and with the prefix in each tier.

    Every hit is proved: its tier, its KV bytes and its tokens are compared with the cold run; exit
    1 if one differs. `--disk-dir` is the folder in which a store is made and removed again.

    \b
    Example:
      tieredkv bench ttft --model tiny-random --prefix-tokens 512,2048 --repeats 5 --json
    """
    return measure("ttft", loaded.given(), arms=arms.split(","), **options)[0]


@bench.command()
@click.option("--block-size-bytes", default="512KiB,2MiB,8MiB", show_default=True, help="Blocks.")
@click.option("--total", default="256MiB", show_default=True, help="Copied in one go.")
@_count("--repeats", default=9, help="Behind a median.")
@report_options
def transfer(**options: Any) -> int:
    """Measure how fast blocks move between VRAM and pinned host memory.

    Blocks lie scattered on both sides and move as the engine moves them. Beside each rate stands
    that of one large copy of the same run (raw); at both at once, rates are each way. Host us per
    block is what the call costs the engine's thread, one block us the time of a single block from
    call to arrival. Exit 1 if a byte arrives changed. Without a GPU, VRAM is ordinary memory.

    \b
    Example, half a minute:
      tieredkv bench transfer --block-size-bytes 512KiB,2MiB,8MiB --total 1GiB
    """
    return measure("transfer", **options)[0]


@bench.command()
@click.option("--dir", "folder", type=_FOLDER, required=True, help="On the disk to be measured.")
@click.option("--block-bytes", default="2MiB", show_default=True, help="Payload of a block.")
@click.option("--disk-size", default="4GiB", show_default=True, help="Budget of the store.")
@_several("--index-blocks", default="10000,1000000", help="Blocks in an index that is looked up.")
@_count("--repeats", default=3, help="Samples of a rate.")
@_count("--readers", default=32, help="Threads, as the worker has.")
@_count("--writers", default=8, help="Threads, as the worker has.")
@report_options
def disk(**options: Any) -> int:
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
    return measure("disk", **options)[0]


@bench.command()
@click.option("--shape", default="llama-3.1-8b", show_default=True, help="As after `random:`.")
@_count("--block-size", default=16, help="Tokens a block.")
@click.option("--cases", help="What to attend; a choice for this device if not told.")
@_count("--repeats", default=9, help="Behind a median.")
@report_options
def attention(**options: Any) -> int:
    """Measure the attention kernels over scattered blocks of the paged cache.

    A case is a chunk of new over cached tokens (8192+24576), or a decode batch of requests x
    context (64x4096, or 64x128..16384 for lengths between). The raw limits are a matrix product's
    FLOPs and a copy's bytes of the same run; ratio is the larger of both times over ours. Beside it
    stands cuDNN over contiguous keys, where it takes the case. Exit 1 if a result differs from the
    torch reference by more than rounding. On a CPU the reference itself is what runs.

    \b
    Example, a minute:
      tieredkv bench attention --shape llama-3.1-8b --cases 8192+0,64+32768,64x4096
    """
    return measure("attention", **options)[0]


@bench.command()
@click.option("--model", required=True, help="As for `serve`, e.g. random:llama-3.1-8b.")
@_several("--contexts", help="ITL of one request, e.g. 1024,32768.")
@_count("--tokens", default=200, help="Gaps behind an ITL.")
@click.option("--workloads", help="Throughput, e.g. 128x1024+256,32x8192+128.")
@_count("--repeats", default=3, help="Runs of a workload.")
@settings_options("model", "cache", "scheduler", without=("seed", "device", "default_retention"))
@report_options
def decode(loaded: LoadedSettings, **options: Any) -> int:
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
    if not (options["contexts"] or options["workloads"]):
        options |= {"contexts": [1024, 4096], "workloads": "16x512+64"}
    return measure("decode", loaded.given(), **options)[0]


@bench.command()
@click.option("--model", required=True, help="As for `serve`, e.g. random:llama-3.1-8b.")
@click.option("--url", metavar="URL", help="A server that runs, instead of one of its own.")
@click.option("--rates", default="1,2,4", show_default=True, help="Conversations a second.")
@click.option(
    "--retentions", default="device_only,in_memory", show_default=True, help="A row each."
)
@click.option("--duration", type=float, default=60.0, show_default=True, help="Seconds a row.")
@_count("--turns", default=4, help="Answers a conversation.")
@click.option("--think", type=float, default=5.0, show_default=True, help="Seconds between turns.")
@_count("--system-tokens", default=2000, help="Shared by all.")
@_count("--user-tokens", default=200, help="New in each turn.")
@_count("--answer-tokens", default=64, help="Of each answer.")
@click.option("--seed", "bench_seed", type=int, default=0, help="Other seeds, other texts.")
@settings_options("model", "cache", "scheduler", without=("seed",))
@report_options
def serve(loaded: LoadedSettings, rates: str, retentions: str, **options: Any) -> int:
    """Measure a server as its clients see it: conversations, arriving at a rate, with think times.

    All share a system prompt; each turn sends what was said before. Rows tell the time to the first
    token and between tokens, by the slowest tier that the prefix came from, and the share of prompt
    tokens that were cached. The retention `device_only` keeps blocks in VRAM alone: the tiers off.
    Conversations arrive whether or not the server keeps up. Exit 1 if a request fails.

    \b
    Example, a minute and a half without a GPU:
      tieredkv bench serve --model tiny-random --rates 1,4 --duration 20 --device-size 16MiB
    """
    options |= {"rates": _numbers(rates), "retentions": [it for it in retentions.split(",") if it]}
    return measure("serve", loaded.given(), **options)[0]


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part]
    except ValueError:
        raise click.BadParameter(f"'{text}' is not a list of numbers such as 0.5,2.") from None
