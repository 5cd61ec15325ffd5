"""`tieredkv bench`."""

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from tieredkv.cli.output import json_option, print_json, print_table
from tieredkv.cli.settings_options import settings_of, settings_options

ARMS = "cold,device,host,disk,restart"


@click.group()
def bench() -> None:
    """Measure on this machine."""


@bench.command()
@click.option("--model", required=True, help="As for `serve`, e.g. random:llama-3.1-8b.")
@click.option("--prefix-tokens", default="512,2048", show_default=True, help="Lengths to measure.")
@click.option("--arms", default=ARMS, show_default=True, help="Where the prefix comes from.")
@click.option("--repeats", type=int, default=5, show_default=True, help="Prefixes of each length.")
@click.option("--commit", help="Commit to report, for a tree without its history.")
@click.option("--seed", "bench_seed", type=int, default=0, help="Other seeds, other prompts.")
@settings_options("model", "cache", "scheduler", without=("seed", "restore", "default_retention"))
@json_option
def ttft(
    model: str,
    prefix_tokens: str,
    arms: str,
    repeats: int,
    bench_seed: int,
    commit: str | None,
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
    lengths = _lengths(prefix_tokens)
    disk_dir = settings.pop("disk_dir")
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
        spec,
        command=shlex.join(["tieredkv", *sys.argv[1:]]),
        disk_dir=Path(disk_dir) if disk_dir else None,
        commit=commit,
    )
    return show_ttft(report, as_json=as_json)


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


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"'{text}' is not a list of lengths such as 512,2048.", param_hint="'--prefix-tokens'"
        ) from None
