"""`tieredkv replay` and `tieredkv size`: what caches would have found in a recorded trace."""

import math
import textwrap
from pathlib import Path
from typing import Any

import click

from tieredkv.bench.progress import terminal_progress
from tieredkv.cli.bench_options import COMMIT, PLOT, several, with_options
from tieredkv.cli.output import Answer, answering
from tieredkv.cli.settings import FILE
from tieredkv.config import load_settings
from tieredkv.errors import ConfigError
from tieredkv.retention import TWENTY_FOUR_HOURS
from tieredkv.units import parse_bytes, parse_duration

DEFAULT_TOKEN_BYTES = 131_072
NO_LIMIT = "unlimited"
TEXT_COLUMNS = 60


class SizeOption(click.ParamType[float]):
    """A size such as 110GiB, 0 or `unlimited`."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Return bytes."""
        if isinstance(value, float) or value == NO_LIMIT:
            return math.inf if value == NO_LIMIT else value
        try:
            return float(parse_bytes(value))
        except ConfigError:
            self.fail(f"`{value}` is not a size; write one such as 110GiB, 0 or {NO_LIMIT}")


class DurationOption(click.ParamType[float]):
    """A duration such as 24h or `unlimited`."""

    name = "duration"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Return seconds."""
        if isinstance(value, float) or value == NO_LIMIT:
            return math.inf if value == NO_LIMIT else value
        try:
            seconds = parse_duration(value)
        except ConfigError:
            seconds = 0.0
        if seconds <= 0:
            self.fail(f"`{value}` is not a duration above 0; write one such as 24h or 10m")
        return seconds


def _size(name: str, default: str, what: str) -> Any:
    return click.option(f"--{name}", type=SizeOption(), default=default, metavar="SIZE", help=what)


MODEL = click.option(
    "--model",
    help="Model whose tokens are meant, as for `serve`. Its windows or states are replayed, too,"
    " unless --bytes-per-token is given.",
)
BLOCK_TOKENS = click.option(
    "--block-tokens",
    type=click.IntRange(min=1),
    help="Tokens of one of the trace's `hash_ids`. By default as many as the trace says, else 512.",
)
TRACE = click.argument("trace", type=click.Path(path_type=Path), metavar="TRACE")
SIZES = (
    _size("vram", NO_LIMIT, "KV budget of VRAM: a size such as 110GiB, 0 or unlimited."),
    _size("host", "0", "KV budget of host memory."),
    _size("disk", "0", "KV budget of the disk."),
    click.option(
        "--retention",
        type=DurationOption(),
        metavar="TIME",
        help="How long a block is kept after it was computed, for all requests. By default as long"
        " as the `retention` of each request in the trace says, and 24h where it says nothing.",
    ),
    click.option(
        "--idle",
        type=DurationOption(),
        metavar="TIME",
        help="How long a block is kept after its last use, for all requests. By default as long as"
        " --retention says.",
    ),
    click.option(
        "--config",
        "config_path",
        type=FILE,
        help="The server's TOML file, for its [retention.*] policies that the trace names. Its"
        " other settings are not used.",
    ),
    click.option(
        "--bytes-per-token",
        type=str,
        metavar="SIZE",
        help="Keys and values of one token. By default those of --model, else 128KiB, which"
        " Llama-3.1-8B has.",
        show_default=False,
    ),
    MODEL,
    click.option(
        "--rates",
        type=click.Path(exists=True, path_type=Path),
        help="Folder of a store in which a server has left its rates, or a copy of rates.json.",
    ),
    BLOCK_TOKENS,
)


@click.command()
@TRACE
@with_options(SIZES)
@answering
def replay(trace: Path, block_tokens: int | None, rates: Path | None, **options: Any) -> Answer:
    """Replay a trace of requests through caches of given sizes, without a model or a GPU.

    It tells what each tier would have found, what would have been computed, moved and written, how
    fast the SSD would wear, and how old blocks are when they are evicted. The pools, their order of
    eviction and the retention are the server's own. With --rates it also estimates the time to
    first token, by the planner's own function.

    TRACE is a file of Mooncake's format, gzipped or not, or `-` for stdin. Each line is a request:

    \b
      {"timestamp": 27482, "input_length": 1030,
       "output_length": 52, "hash_ids": [46, 47, 2353]}

    The time is in ms, the lengths are in tokens, and there is one id for each 512 tokens of the
    prompt. Equal ids mean equal tokens, up to the end of that block. A trace that `serve --record`
    has written may be given, too. It has the retention policy of each request, which the replay
    follows: `in_memory` blocks never go to disk. With --retention or --idle, all requests have
    these times instead, and all may go to disk.

    \b
    Examples:
    What unlimited memory would find, in all and within 5 minutes:
      tieredkv replay trace.jsonl.gz
      tieredkv replay trace.jsonl.gz --idle 5m
    What these sizes would find:
      tieredkv replay trace.jsonl.gz --vram 40GiB --host 100GiB \\
        --disk 1TiB --retention 24h
    How long requests would wait, by the rates of a server:
      tieredkv replay trace.jsonl.gz --vram 40GiB --disk 1TiB \\
        --rates /nvme/kv
    What a recorded server found, with its own policies of retention:
      tieredkv replay recorded.jsonl --vram 40GiB --disk 1TiB \\
        --config server.toml
    For programs:
      zcat trace.jsonl.gz | tieredkv replay - --json

    Of a model with sliding windows or recurrent layers, a request goes on only where the tiers also
    have the pages that these need there, which take room beside the blocks.

    Requests are served at the times of the trace, and moving a block takes no time. What they
    generate is not cached. Ctrl-C ends the replay with the figures so far, and exit code 1.
    """
    from tieredkv.sizing import replay as replaying
    from tieredkv.traces import read_trace

    progress = terminal_progress(lambda line: click.echo(line, err=True))
    sizes = _sizes(options)
    known_rates = _read_rates(rates)
    read = read_trace(trace, progress, block_tokens=block_tokens, retentions=sizes.retention_names)
    sizes = sizes.of_trace(read)
    document = replaying.replay(read, sizes, progress, rates=known_rates)
    lines = replaying.described(document)
    return Answer(document, lines=lines, is_problem=document["interrupted"])


@click.command()
@TRACE
@with_options([*SIZES[:-3], MODEL, BLOCK_TOKENS])
@several(
    "--orders",
    parse_bytes,
    metavar="SIZES",
    help="Compare orders of eviction instead, in one cache of each of these sizes.",
)
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="Parallel processes.")
@PLOT
@COMMIT
@answering
def size(
    trace: Path,
    block_tokens: int | None,
    orders: list[int] | None,
    jobs: int,
    plot: Path | None,
    commit: str | None,
    **options: Any,
) -> Answer:
    """Replay a trace with less and with more of each tier, and with other retentions.

    Each tier is tried with 0 to 4 times the size that is given, and without a limit, while all
    else stays as given; then retentions from a minute to a day are tried, each for all requests. A
    sentence tells what the next gigabyte of each tier would buy, measured over a tenth of its size,
    and over 10 GiB at least. `replay --help` describes the trace and what a replay leaves out.

    \b
    Examples:
      tieredkv size trace.jsonl.gz --vram 40GiB --disk 1TiB
      tieredkv size trace.jsonl.gz --vram 40GiB --host 100GiB \\
        --disk 1TiB --jobs 8 --plot sizes.png
      tieredkv size trace.jsonl.gz --orders 64GiB,1TiB

    With --plot sizes.png the curves of the tiers are drawn there, and those of the retentions in
    sizes-retention.png. Ctrl-C ends the sweep with the replays that have ended, and exit code 1.

    With --orders nothing of this is done. Instead it tells what one cache of each size would find
    with other orders of eviction than a server's, which is LRU, and what an order that knows the
    future would, which is the most that there is to find. Windows are left out of this.
    """
    from tieredkv.bench import plots, raw
    from tieredkv.sizing import orders as comparing
    from tieredkv.sizing import sweep as sweeping
    from tieredkv.traces import read_trace

    plots.check(plot)
    progress = terminal_progress(lambda line: click.echo(line, err=True))
    sizes = _sizes(options)
    retentions = sizes.retention_names if orders is None else ()
    read = read_trace(trace, progress, block_tokens=block_tokens, retentions=retentions)
    sizes = sizes.of_trace(read)
    if orders is not None:
        if plot is not None:
            raise ConfigError("`--plot` draws tiers and retentions; leave it or `--orders` out")
        compared = comparing.compare(read, orders, sizes.token_bytes, progress)
        head = raw.head(commit) | {"trace": read.name, "bytes_per_token": sizes.token_bytes}
        return Answer(head | {"rows": compared}, comparing.table(compared))
    found = sweeping.sweep(read, sizes, progress, num_jobs=jobs)
    told = found.sentence
    if plot is not None and found.rows:
        by_size, by_time = sweeping.curves(found.rows)
        panels = sweeping.PANELS
        plots.draw(plot, by_size, "tier", "times_its_size", panels, {})
        beside = plot.with_name(f"{plot.stem}-retention{plot.suffix}")
        plots.draw(beside, by_time, "tier", "retention_in_minutes", panels, {})
    document = raw.head(commit) | {"trace": read.name, **sizes.described()}
    document |= {"next_GiB": found.gains, "sentence": told, "rows": found.rows}
    document["interrupted"] = found.is_interrupted
    lines = ["", *textwrap.wrap(told, TEXT_COLUMNS)]
    if found.is_interrupted:
        lines.append("It was interrupted: some replays are missing.")
    return Answer(
        document, sweeping.table(found.rows), lines, texts=2, is_problem=found.is_interrupted
    )


def _sizes(options: dict[str, Any]) -> Any:
    """Return the sizes that the options tell.

    Raises:
        ConfigError: the model is unknown, or the numbers do not fit each other.
    """
    from tieredkv.sizing.replay import Sizes

    told, model = options["bytes_per_token"], options["model"]
    token_bytes, anchor = DEFAULT_TOKEN_BYTES, None
    if told is not None:
        token_bytes = parse_bytes(told)
    elif model is not None:
        from tieredkv.engine.loader import find_model
        from tieredkv.sizing.anchors import anchor_size

        spec = find_model(model, dtype="bfloat16", device="cpu").kv_spec(None)
        token_bytes, anchor = spec.token_bytes, anchor_size(spec)
    settings = load_settings(config_path=options["config_path"], environ={}).settings
    retention_s, idle_s = options["retention"], options["idle"]
    return Sizes(
        device=options["vram"],
        host=options["host"],
        disk=options["disk"],
        retention_s=retention_s or TWENTY_FOUR_HOURS.absolute_s,
        idle_s=idle_s or math.inf,
        policies=() if retention_s or idle_s else settings.policies,
        token_bytes=token_bytes,
        anchor=anchor,
    )


def _read_rates(path: Path | None) -> Any:
    """Return the rates of a store's folder or of a copy of its file; None without a path.

    Raises:
        ConfigError: there are none, or they cannot be read.
    """
    if path is None:
        return None
    from tieredkv.cache.rate_file import NAME, parse_rates, read_rates

    try:
        found = read_rates(str(path)) if path.is_dir() else parse_rates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"the rates in `{path}` cannot be read: {error}") from error
    if found is None:
        hint = "hint: a server with --disk-dir leaves them there once it has served requests"
        raise ConfigError(f"there is no {NAME} in `{path}`\n{hint}")
    return found
