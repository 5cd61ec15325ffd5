"""`tieredkv bench`."""

import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from tieredkv.cli.output import Command, json_option, print_json, print_table
from tieredkv.cli.settings_options import settings_of, settings_options
from tieredkv.types import Progress
from tieredkv.units import parse_bytes

ARMS = "cold,device,host,disk,restart"


def report_options(command: Command) -> Command:
    """Give a bench its `--plot`, `--commit` and `--json`."""
    command = click.option("--commit", help="Commit to report, for a tree without its history.")(
        json_option(command)
    )
    return click.option(
        "--plot",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=_check_plot,
        metavar="FILE.png",
        help="Draw the figures too; needs `pip install 'tieredkv[plot]'`.",
    )(command)


def _check_plot(
    _context: click.Context, _option: click.Parameter, path: Path | None
) -> Path | None:
    from tieredkv.bench import plots

    if path is not None:
        plots.check(path)
    return path


def _report(
    measure: Callable[[Progress], dict[str, Any]],
    *,
    plot: Path | None,
    commit: str | None,
    as_json: bool,
    axes: tuple[str, str, str],
) -> int:
    """Measure; print a table, the raw limits, what is wrong, JSON; return the exit code."""
    from tieredkv.bench import plots, raw
    from tieredkv.bench.progress import terminal_progress

    report = raw.head(_command(), commit) | measure(terminal_progress())
    rows = report["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row if not name.endswith("_all")))
    print_table(
        [{name.replace("_", " "): _cell(row.get(name)) for name in names} for row in rows],
        numbers=len(names) - 2,
    )
    hardware = report["hardware"]
    click.echo(f"measured on {hardware['gpu'] or 'cpu: ' + hardware['cpu']}")
    for title, values in report.items():
        if isinstance(values, dict) and title != "hardware":
            told = ", ".join(f"{name.replace('_', ' ')} {_cell(values[name])}" for name in values)
            click.echo(f"{'raw limits of this run' if title == 'raw' else title}: {told}")
    for problem in report["problems"]:
        click.echo(f"error: {problem}", err=True)
    if plot is not None:
        plots.draw(plot, rows, axes, limits=report["raw"] if axes[2] == "GBps" else {"": 1.0})
    if as_json:
        print_json(report)
    return 1 if report["problems"] else 0


def _command() -> str:
    return shlex.join(["tieredkv", *sys.argv[1:]])


def _cell(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{value['median']:.4g} ({value['low']:.4g} to {value['high']:.4g}, 95 %)"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


@click.group()
def bench() -> None:
    """Measure on this machine."""


@bench.command()
@click.option("--model", required=True, help="As for `serve`, e.g. random:llama-3.1-8b.")
@click.option("--prefix-tokens", default="512,2048", show_default=True, help="Lengths to measure.")
@click.option("--arms", default=ARMS, show_default=True, help="Where the prefix comes from.")
@click.option("--repeats", type=int, default=5, show_default=True, help="Prefixes of each length.")
@click.option("--seed", "bench_seed", type=int, default=0, help="Other seeds, other prompts.")
@settings_options("model", "cache", "scheduler", without=("seed", "restore", "default_retention"))
@report_options
def ttft(
    model: str,
    prefix_tokens: str,
    arms: str,
    repeats: int,
    bench_seed: int,
    commit: str | None,
    plot: Path | None,
    config_path: str | None,
    as_json: bool,
    **settings: Any,
) -> int:
    """Measure the time to the first token, cold and with the prefix in each tier.

    Every hit is proved: its tier, its KV bytes and its tokens are compared with the cold run; exit
    1 if one differs. `--disk-dir` is the folder in which a store is made and removed again.

    \b
    Example:
      tieredkv bench ttft --model tiny-random --prefix-tokens 512,2048 --repeats 5 --json
    """
    settings_of(settings, config_path=config_path, model=model)
    lengths = _lengths(prefix_tokens, "--prefix-tokens")
    disk_dir = settings.pop("disk_dir")
    from tieredkv.bench import plots
    from tieredkv.bench import ttft as run_ttft

    spec = run_ttft.TTFTSpec(
        prefix_tokens=lengths,
        arms=arms.split(","),
        repeats=repeats,
        seed=bench_seed,
        settings={name: value for name, value in settings.items() if value is not None}
        | {"model": model, "restore": "load"}
        | ({"config": config_path} if config_path else {}),
    )
    report = run_ttft.run(
        spec, command=_command(), disk_dir=Path(disk_dir) if disk_dir else None, commit=commit
    )
    if plot is not None:
        rows = [{**row, "TTFT_p50_ms": row["ttft_ms"]["p50"]} for row in report["rows"]]
        plots.draw(plot, rows, ("arm", "prefix_tokens", "TTFT_p50_ms"))
    return show_ttft(report, as_json=as_json)


@bench.command()
@click.option(
    "--block-size-bytes", default="512KiB,2MiB,8MiB", show_default=True, help="Sizes to measure."
)
@click.option("--total", default="1GiB", show_default=True, help="Bytes copied in one go.")
@click.option("--repeats", type=int, default=9, show_default=True, help="Copies behind a median.")
@report_options
def transfer(block_size_bytes: str, total: str, repeats: int, **options: Any) -> int:
    """Measure how fast blocks move between VRAM and pinned host memory.

    Blocks lie scattered on both sides and move as the engine moves them. Beside each rate stands
    that of one large copy of the same run (raw); at both at once, rates are each way. Host us per
    block is what the call costs the engine's thread, one block us the time of a single block from
    call to arrival. Exit 1 if a byte arrives changed. Without a GPU, VRAM is ordinary memory.

    \b
    Example, half a minute:
      tieredkv bench transfer --block-size-bytes 512KiB,2MiB,8MiB --total 1GiB
    """
    sizes, total_bytes = (
        [parse_bytes(size) for size in block_size_bytes.split(",")],
        parse_bytes(total),
    )
    from tieredkv.bench import transfer as bench

    return _report(
        lambda p: bench.run(sizes, total_bytes=total_bytes, repeats=repeats, progress=p),
        axes=("direction", "block_bytes", "GBps"),
        **options,
    )


@bench.command()
@click.option("--shape", default="llama-3.1-8b", show_default=True, help="As after `random:`.")
@click.option("--block-size", type=int, default=16, show_default=True, help="Tokens a block.")
@click.option("--cases", help="What to attend, see above; a choice for this device if not told.")
@click.option("--repeats", type=int, default=9, show_default=True, help="Runs behind a median.")
@report_options
def attention(shape: str, block_size: int, cases: str | None, repeats: int, **options: Any) -> int:
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
    from tieredkv.bench import attention as bench

    return _report(
        lambda p: bench.run(shape, cases, block_size=block_size, repeats=repeats, progress=p),
        axes=("kind", "case", "ratio"),
        **options,
    )


@bench.command()
@click.option("--model", required=True, help="As for `serve`, e.g. random:llama-3.1-8b.")
@click.option(
    "--parts", default="itl,throughput", show_default=True, help="Also: demotion, promotion."
)
@click.option("--contexts", default="1024,4096", show_default=True, help="For itl, in tokens.")
@click.option("--tokens", type=int, default=200, show_default=True, help="Gaps behind an ITL.")
@click.option("--workloads", default="16x512+64", show_default=True, help="For throughput.")
@click.option("--repeats", type=int, default=3, show_default=True, help="Runs of a workload.")
@click.option("--demotion", default="32x1024+16", show_default=True, help="Workload that evicts.")
@click.option("--pairs", type=int, default=7, show_default=True, help="Demotion on and off.")
@click.option("--prefix", type=int, default=4096, show_default=True, help="Tokens promoted.")
@settings_options("model", "cache", "scheduler", without=("seed", "default_retention"))
@report_options
def decode(
    model: str,
    parts: str,
    contexts: str,
    tokens: int,
    workloads: str,
    repeats: int,
    demotion: str,
    pairs: int,
    prefix: int,
    config_path: str | None,
    plot: Path | None,
    commit: str | None,
    as_json: bool,
    **settings: Any,
) -> int:
    """Measure the time between tokens (ITL), throughput, and what moving blocks costs both.

    \b
    itl         one request alone at each of --contexts
    throughput  each of --workloads, requests x input + output tokens: 128x1024+256
    demotion    --demotion in VRAM for a quarter of it, with the host tier and without, in pairs
    promotion   --prefix comes up from host memory while 8 requests decode

    The raw limit of a step is its weights and KV over the copy bandwidth of the same run, that of a
    prompt its FLOPs over a matrix product's rate. Exit 1 if two requests load one prefix twice, or
    a cancelled one keeps its share. Tiers are sized for what is measured unless told.

    \b
    Example, a minute without a GPU:
      tieredkv bench decode --model tiny-random --parts itl,throughput,demotion,promotion
    """
    loaded = settings_of(settings, config_path=config_path, model=model)
    given = {
        name: getattr(loaded.settings, name)
        for name in loaded.sources
        if loaded.sources[name] != "default"
    }
    lengths = _lengths(contexts, "--contexts")
    from tieredkv.bench import decode as bench

    spec = bench.DecodeSpec(
        parts=parts.split(","),
        contexts=lengths,
        tokens=tokens,
        repeats=repeats,
        pairs=pairs,
        workloads=[bench.Workload.parse(text) for text in workloads.split(",")],
        demotion=bench.Workload.parse(demotion),
        prefix=prefix,
    )
    return _report(
        lambda p: bench.run(spec, given, progress=p),
        axes=("part", "requests", "ratio"),
        plot=plot,
        commit=commit,
        as_json=as_json,
    )


def show_ttft(report: dict[str, Any], *, as_json: bool) -> int:
    """Print a TTFT report as a table, what it proves wrong, and its JSON; return the exit code."""
    from tieredkv.bench.ttft import problems

    cold = {r["prefix_tokens"]: r["ttft_ms"]["p50"] for r in report["rows"] if r["arm"] == "cold"}
    limits = report["raw"]
    rows = [_ttft_row(row, cold.get(row["prefix_tokens"])) for row in report["rows"]]
    print_table(rows, numbers=8)
    disk = limits["disk_read_GBps"]
    click.echo(
        f"{report['model']}, {report['dtype']}, blocks of {report['block_size']} tokens; raw limits"
        f" of this run: host to device {limits['h2d_GBps']} GB/s, disk "
        f"{'not measured (no O_DIRECT)' if disk is None else f'{disk} GB/s'}"
    )
    found = problems(report)
    for problem in found:
        click.echo(f"error: {problem}", err=True)
    if as_json:
        print_json(report)
    return 1 if found else 0


def _ttft_row(row: dict[str, Any], cold_ms: float | None) -> dict[str, str]:
    p50 = row["ttft_ms"]["p50"]
    is_hit = row["arm"] != "cold"
    return {
        "arm": row["arm"],
        "prefix tokens": str(row["prefix_tokens"]),
        "TTFT p50 ms": f"{p50:.1f}",
        "min ms": f"{row['ttft_ms']['min']:.1f}",
        "vs cold": f"{cold_ms / p50:.1f}x" if is_hit and cold_ms else "-",
        "cached tokens": str(row["cached_tokens"]),
        "loaded GB/s": f"{row['bytes_loaded'] / p50 / 1e6:.2f}" if row["bytes_loaded"] else "-",
        "tokens equal": ("yes" if row["tokens_equal_cold"] else "NO") if is_hit else "-",
        "KV bytes equal": ("yes" if row["kv_bytes_equal"] else "NO") if is_hit else "-",
    }


def _lengths(text: str, hint: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"'{text}' is not a list of lengths such as 512,2048.", param_hint=f"'{hint}'"
        ) from None
