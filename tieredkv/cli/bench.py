"""`tieredkv bench`: one command for each benchmark."""

import functools
import importlib
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import click

from tieredkv.cli.bench_options import (
    ARMS,
    COMMIT,
    COUNT,
    CROWD,
    ENGINE,
    FOLDER,
    MODEL,
    NUMBER,
    PLOT,
    PREFIX_TOKENS,
    RESTORE_ARMS,
    SESSIONS,
    TIERS,
    Option,
    arms,
    parse_rate,
    repeats,
    several,
    shortest_to_longest,
    with_options,
)
from tieredkv.cli.output import as_text, json_option, print_json, print_table
from tieredkv.cli.settings import settings_options
from tieredkv.config import LoadedSettings
from tieredkv.garbage import look_seldom
from tieredkv.units import parse_bytes

NOT_FACTS = ("hardware", "commit", "command", "raw", "rows", "runs", "problems")
"""Keys of reports that are not told in a line of what was measured, as the others are."""


@click.group()
def bench() -> None:
    """Measure the tiers, the kernels, the engine or a running server."""
    look_seldom()  # as the engine's process does


def measured(
    *options: Option, module: str | None = None
) -> Callable[[Callable[[], None]], click.Command]:
    """Make a bench command of a function that has only a help text; `measure` does the work.

    Args:
        options: options of the command.
        module: module in `tieredkv.bench` that measures; by default, the function's name.
    """

    def make(text: Callable[[], None]) -> click.Command:
        work = functools.partial(measure, module or text.__name__)
        command: Any = functools.update_wrapper(work, text)
        return bench.command()(with_options((*options, COMMIT, PLOT, json_option))(command))

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
    """Run `tieredkv.bench.NAME` and print a table, raw limits, problems and, if asked, JSON.

    The module may name the `COLUMNS` of the table, by default all, and the `PLOTTED` ones, a group
    for each panel, by default the ratio to a raw limit.
    """
    from tieredkv.bench import plots, raw
    from tieredkv.bench.progress import bench_progress, ending_progress
    from tieredkv.cli.http_answers import warn_if_key_is_readable

    plots.check(plot)
    if options.get("api_key"):
        warn_if_key_is_readable(options["url"], options["api_key"])
    if loaded is not None:
        options["settings"] = loaded.given()
    module = importlib.import_module(f"tieredkv.bench.{name}")
    head = raw.head(commit)
    if "runs" in options:  # those that are kept in a file are of one commit
        options["commit"] = head["commit"]
    with ending_progress():
        report = head | module.run(bench_progress(), **options)
    rows = report["rows"]
    if names := getattr(module, "COLUMNS", ()):
        rows = [{it: reduce(getitem, it.split("."), row) for it in names} for row in rows]
    print_table(rows, texts=2)
    hardware, limits = report["hardware"], report["raw"]
    click.echo(f"device: {hardware['gpu'] or 'cpu, ' + hardware['cpu']}")
    facts = {key: value for key, value in report.items() if key not in NOT_FACTS}
    for title, told in (("raw limits of this run", limits), ("measured", facts)):
        if told:
            click.echo(f"{title}: {as_text(told)}")
    for problem in report["problems"]:
        click.echo(f"error: {problem}", err=True)
    if plot is not None and rows:
        panels = getattr(module, "PLOTTED", (("ratio",),))
        lines = {"GBps": limits, "ratio": {"": 1.0}}.get(panels[0][0], {})
        by, x, *_ = rows[0]
        plots.draw(plot, rows, by, x, panels, lines)
    if as_json:
        print_json(report)
    return 1 if report["problems"] else 0


@measured(
    MODEL,
    PREFIX_TOKENS,
    arms(
        ARMS,
        "Where prefixes come from, as above, with commas between.",
        default=("cold", "device", "host", "disk", "restart"),
    ),
    repeats(5),
    TIERS,
)
def ttft() -> None:
    """Measure the time to the first token, cold and with the prefix in each tier.

    \b
    cold      everything is computed
    device    the prefix is in VRAM
    host      it is in host memory
    disk      it is on disk
    planned   it is on disk, and what is faster to compute is computed (restore = "auto")
    restart   it is on disk, and the process is a new one
    planned_restart
              as `planned`, and the process is a new one
    batched   everything is computed, beside another prompt

    By default all but the planned ones and `batched` are measured. Every hit is proved: its tier,
    its keys and values and its tokens are compared with the cold run, and the exit code is 1 if one
    differs. All arms but the planned ones load whatever a tier has (restore = "load"). The bench
    makes a store in the folder `--disk-dir` and removes it again.

    In 16 bits, logits depend on the order of computing. `batched` shows how much: in the JSON
    report, compare its `max_logit_diff` with those of the other arms. Prompts whose tokens part at
    a near tie do not count, and where fewer than four of five count, tokens are not called equal.

    The page cache could serve an arm that claims the disk. In the JSON report, `bytes_from_disk`
    shows beside `bytes_loaded` that it did not; the exit code is 1 if the disk gave less than 0.95
    times the bytes that were loaded. Where `page_cache` is "warm" it may give less: there is no
    block device under the folder, or its filesystem has no O_DIRECT.

    Ctrl-C and SIGTERM remove the store; the prompts that were served in all arms of the first
    process by then are reported, and so are the restarts that were measured. The exit code is then
    1. It is 130 if there is nothing to report.

    \b
    Example:
      tieredkv bench ttft --model tiny-random --prefix-tokens 512,2048 --repeats 5 --json
    """


@measured(
    MODEL,
    PREFIX_TOKENS,
    arms(RESTORE_ARMS, "Arms to report, as above, with commas between.", default=RESTORE_ARMS[:4]),
    several(
        "--disk-rate",
        parse_rate,
        default="none",
        help="Limits of the reads in bytes per second, with commas between, such as 1GB,none.",
    ),
    repeats(5),
    TIERS,
)
def restore() -> None:
    """Measure one request whose prefix is on disk: computed, loaded, and both at once.

    \b
    cold      everything is computed
    load      everything is loaded (restore = "load")
    planned   the head is computed while the tail is loaded (restore = "auto")
    device    everything is in VRAM
    chunked   everything is computed, in steps of at most 272 tokens; not by default

    The arms take turns, and the raw rate of the disk is measured beside each: over 512 MiB (32
    without a GPU), and beside `load` over as many bytes as that loads if they are more. `ideal` is
    the least time that any split could take: computing the head at the measured cold speed, loading
    the rest at the raw rate, whichever ends last, and then what the arm `device` takes. Tokens, and
    the keys and values of all loaded blocks, are compared with the cold run; the exit code is 1 if
    one differs. In bfloat16 the order of computing changes logits, so that near ties do not count;
    beside `chunked`, the exit code is also 1 if `planned` changes logits by more than twice of what
    chunks change. `predicted` is the planner's own forecast. With `--disk-rate`, reads are slowed
    down as by a slower disk. The bench makes a store in the folder `--disk-dir` and removes it
    again.

    VRAM, host memory, the prefix of an earlier repeat or the page cache could serve a request in
    place of the disk. `elsewhere tokens` is the number of tokens that came from a tier that the arm
    does not claim, and `disk over loaded` the bytes that the disk gave for each byte loaded, in the
    run where they are the fewest. The exit code is 1 if the first is not 0 or if the second is not
    0.95 to 1.2. In `planned` the disk may give more, because computing overtakes reads. The second
    is not judged where `page_cache` in the JSON report is "warm": there is no block device under
    the folder, or its filesystem has no O_DIRECT.

    Ctrl-C and SIGTERM remove the store; the cases that have ended by then are reported, and the
    exit code is 1. It is 130 if none has ended.

    \b
    Example:
      tieredkv bench restore --model tiny-random --prefix-tokens 512,2048 --disk-rate 1GB,none
    """


@measured(
    MODEL,
    several(
        "--rates",
        NUMBER,
        default="0.5,0.75,1,1.25",
        help="Returns per second, with commas between.",
    ),
    click.option(
        "--ttft-limit",
        type=NUMBER,
        default=4.0,
        help="Seconds that the 90th percentile of TTFT must hold.",
    ),
    click.option("--sessions", type=COUNT, default=8, help="Sessions that return in turn."),
    shortest_to_longest("--prefix-tokens", "20000-60000", "Lengths of the prefixes in tokens."),
    click.option("--new-tokens", type=COUNT, default=500, help="Tokens that each return adds."),
    click.option("--answers", type=COUNT, default=120, help="Returns at each rate."),
    click.option(
        "--answer-tokens", type=click.IntRange(min=2), default=32, help="Tokens of each answer."
    ),
    click.option(
        "--seed", "shape_seed", type=int, default=0, help="Seed of arrivals, lengths and tokens."
    ),
    *CROWD,
)
def returns() -> None:
    """Measure sessions that come back after a pause that RAM did not outlast.

    \b
    no_disk   without a disk tier: each prefix is computed
    load      each prefix is loaded from disk (restore = "load")
    planned   a prefix's head is computed while its tail is loaded (restore = "auto")

    The sessions return in turn, at random moments and at a given rate, whether or not the engine
    keeps up (open loop). A return is the session's prefix and some new tokens. All prefixes are on
    disk, and they are more than VRAM and host memory hold, so that nothing is found there; the
    columns `by tier` show it. The page cache could serve reads, too: `bytes from disk`, what the
    kernel has read from storage for the store's worker, shows beside `bytes read`, what the engine
    asked for, that it did not. Where `page cache` is "warm" they may differ: there is no block
    device under the folder, or its filesystem has no O_DIRECT. All arms get the same returns, each
    in a process and a store of its own.

    The capacity of an arm is the rate up to which TTFT p90 stays within --ttft-limit, interpolated
    between the rates that were run; an arm is not run beyond the first rate that does not hold. The
    report compares `planned` with the better other arm: their capacities, and their median TTFT at
    0.7 of the other arm's capacity.

    `by tier` has the prompt tokens that came from each tier, and `hit rate` their share. `disk
    useful` is what was read and used, or is wanted by a request that is still queued at the end,
    over the time in which a read was under way, over the raw rate of the disk, the mean of what it
    was before and after the run. `overtaken` is the share of the blocks read that were computed
    before they arrived, and `dropped` the number of blocks that were not stored, or not moved to
    host memory, for lack of time or because of errors.
    `hit ttft` is the time to the first token of requests that found something and had fewer than
    2,048 tokens to compute. The JSON report also has the median error of predicted times. Before
    the measurement some prefixes are served computed and from disk, and the exit code is 1 if the
    tokens differ, if a rate was held with more than 2 % of the prompt tokens found in RAM, or if
    the disk gave less than 0.95 of `bytes read` where `page cache` is not "warm". Unless their
    sizes are given, VRAM holds the two longest prefixes, host memory one, and the disk all.

    Ctrl-C and SIGTERM remove the stores; the arms that have ended by then are reported, and the
    exit code is 1. It is 130 if none has ended.

    \b
    Examples, the first a minute without a GPU:
      tieredkv bench returns --model tiny-random --prefix-tokens 400-1200 --new-tokens 50 \\
          --answers 24 --rates 2,8,32 --ttft-limit 0.4
      tieredkv bench returns --model random:llama-3.1-8b --disk-dir /nvme --rates 0.4,0.6,0.9,1.3
    """


@measured(
    MODEL,
    several(
        "--sessions",
        COUNT,
        help="Sessions at once, with commas between. By default 4,8,16,32, or 8 of a trace.",
    ),
    several(
        "--seed",
        click.IntRange(min=0),
        name="seeds",
        default="0,1,2,3,4",
        help="Seeds of the sessions, with commas between; their runs are pooled.",
    ),
    *SESSIONS,
    click.option(
        "--runs",
        type=click.Path(dir_okay=False, writable=True, path_type=Path),
        help="File that keeps each run as it ends; runs that it has are not made again.",
    ),
    *CROWD,
)
def sessions() -> None:
    """Measure agents at work: sessions that wait for each answer, think, and go on.

    \b
    no_disk   without a disk tier: VRAM and host memory only
    load      what RAM does not hold is loaded from disk (restore = "load")
    planned   it is computed and loaded at once (restore = "auto")

    A session begins with 8,000 to 60,000 tokens, half of them below --first-tokens, of which all
    sessions may share the first (--shared-tokens). Each turn adds an answer of 120 tokens and new
    ones, half of the times up to 600 and one time in ten more than --added-p90-tokens; one turn in
    eight (--replaced-share) first replaces the last third. Prompts stay under 72,000 tokens, as a
    session that would grow longer loses its last third. Think times are random, 1 s in the mean and
    at most 6 s. All of this follows from the seed and not from what the model answers, so that all
    arms do the same turns, each arm in a process and a store of its own. A run begins with empty
    tiers and ends when the first session has had its last answer, or the last session with --until
    last; runs of all seeds are pooled.

    With --trace, recorded sessions are replayed: think times a tenth of the recorded ones, answers
    of at most 120 tokens. Each line of the file is a request, {"timestamp": ms, "input_length":
    tokens, "output_length": tokens, "hash_ids": [...]}, with an id for each 512 tokens; equal ids
    are equal tokens. A trace that `serve --record` has written may be given, too. A request may
    name its "session"; without a name, it continues the session whose last prompt it repeats by
    half or more.
    Sessions with fewer than --turns requests, and those that do not fit, are left out.

    The columns are explained in `bench returns`. Earlier runs leave nothing behind, and `by tier`
    shows what VRAM, host memory and the disk served. The exit code is 1 if the page cache served
    reads, as in `bench returns`.

    An arm that answers more requests answers later ones too, which are longer, so that `common` has
    the times over the requests that all arms have answered, and `tokens_digest` in the JSON report
    is of the tokens of these answers. In float32 it is the same in all arms. In bfloat16 the tokens
    of two arms may part at near ties; the report has the share of equal answers. Unless their sizes
    are given, tiers hold as many tokens as 24 GiB of VRAM, 16 GiB of host memory and, per session,
    5 GiB of disk do for Llama-3.1-8B, divided by the scale.

    With --runs, the same command goes on after a Ctrl-C, and others may add --arms, --seed and, if
    they give the same --disk-size, --sessions. The file refuses runs of another commit, GPU, model
    or setting. A report pools the seeds that all arms have run; the exit code is 1 if runs are
    missing.

    \b
    Examples, the first a minute without a GPU:
      tieredkv bench sessions --model tiny-random --scale 50 --sessions 2,4 --turns 4 --seed 0
      tieredkv bench sessions --model random:llama-3.1-8b --disk-dir /nvme --sessions 4,8,16,32
    """


@measured(
    several(
        "--block-size-bytes",
        parse_bytes,
        default="512KiB,2MiB,8MiB",
        help="Sizes of blocks, with commas between.",
    ),
    click.option("--total", default="256MiB", help="Bytes copied per run."),
    repeats(9),
)
def transfer() -> None:
    """Measure how fast blocks move between VRAM and pinned host memory.

    Blocks lie scattered on both sides, and the engine's own code moves them. The column `raw` is
    the rate of one large copy in the same run. For `both at once`, rates are those of each
    direction. `host us per block` is the time that the call takes on the engine's thread, and
    `one block us` the time of a single block from the call to its arrival. The exit code is 1 if a
    byte arrives changed. Without a GPU, ordinary memory stands for VRAM.

    \b
    Example, half a minute:
      tieredkv bench transfer --block-size-bytes 512KiB,2MiB,8MiB --total 1GiB
    """


@measured(
    click.option(
        "--dir", "folder", type=FOLDER, required=True, help="Folder on the disk to measure."
    ),
    click.option("--block-bytes", default="2MiB", help="Bytes of keys and values per block."),
    click.option("--disk-size", default="4GiB", help="Budget of the store in bytes."),
    several(
        "--index-blocks",
        COUNT,
        default="10000,1000000",
        help="Sizes of indexes in blocks, with commas between.",
    ),
    click.option(
        "--encryption",
        type=click.Choice(["on", "off"]),
        default="on",
        help="Whether the blocks that are read and written are encrypted.",
    ),
    repeats(3),
)
def disk() -> None:
    """Measure the disk tier beside the disk itself.

    \b
    read    reads a random quarter of a store that has seen evictions, with the page cache dropped;
            `bursts` reads 128 MiB at once, again and again, while other blocks are written
    write   writes the whole budget into a full store that evicts, for each way to sync
    index   looks up 8192 hashes at a time: microseconds per hash for hits, for misses, through
            the worker and right after an open, and the seconds that the open takes

    Blocks go through the store's own worker. A ratio compares with the mean of the raw O_DIRECT
    rates just before and after, with as many threads and blocks. `amplification` is the bytes that
    the device moved, for all programs, over the bytes of the blocks, and `own_amplification` those
    that it moved for the worker. A "-" says that the device moved nothing, as the bytes came from
    memory. `beside` is what was written while bursts were read. The bench needs free space for
    twice the budget and 1 KiB per block of an index. The exit code is 1 if a byte differs, a block
    fails, or the worker read more than 1.05 times the blocks and their headers.

    \b
    Example, a few minutes:
      tieredkv bench disk --dir /nvme --disk-size 4GiB
    """


@measured(
    click.option("--shape", default="llama-3.1-8b", help="Shape of the model, as after `random:`."),
    several(
        "--heads", COUNT, help="Query heads, KV heads and head_dim instead of the shape's: 64,8,64."
    ),
    click.option("--window", type=COUNT, help="Positions that a query sees. By default all."),
    click.option(
        "--sinks", "has_sinks", is_flag=True, help="Give each head a sink, as gpt-oss does."
    ),
    click.option("--block-size", type=COUNT, default=16, help="Tokens per block."),
    several(
        "--cases", str, help="Cases to measure, as above. By default some that suit the device."
    ),
    repeats(9),
)
def attention() -> None:
    """Measure the attention kernels over scattered blocks of the paged cache.

    A case is a prefill of new tokens after cached ones (8192+24576), or a decode batch of requests
    by context (64x4096, or 64x128..16384 for contexts of several lengths). The raw limits are the
    FLOPs of a matrix product and the bytes of a copy in the same run, and `ratio` is the longer of
    both times over the kernel's. The exit code is 1 if a result differs from the torch reference
    by more than rounding. On a CPU the reference itself runs.

    \b
    Examples, a minute each:
      tieredkv bench attention --shape llama-3.1-8b --cases 8192+0,64+32768,64x4096
      tieredkv bench attention --heads 64,8,64 --window 128 --sinks --cases 8192+0,32x8192
    """


@measured(
    click.option(
        "--shape", default="qwen3-30b-a3b", help="Shape of the model, as after `random:`."
    ),
    several(
        "--tokens", COUNT, help="Tokens of a step. By default some numbers that suit the device."
    ),
    repeats(9),
)
def experts() -> None:
    """Measure the kernels of the experts of a mixture-of-experts model.

    Tokens are routed at random. The raw limits are the bytes of a copy, for the weights of the
    experts that were chosen, and the FLOPs of a matrix product in the same run, and `ratio` is the
    longer of both times over the kernels'. The exit code is 1 if a result differs from the torch
    reference by more than rounding. On a CPU the reference itself runs.

    \b
    Example, a minute on a GPU:
      tieredkv bench experts --shape qwen3-30b-a3b --tokens 1,32,2048,8192
    """


@measured(
    MODEL,
    several("--contexts", COUNT, help="Contexts of a request alone, such as 1024,32768."),
    click.option(
        "--tokens", type=COUNT, default=200, help="Tokens per measured time between tokens."
    ),
    several("--workloads", str, help="Workloads, as above, such as 128x1024+256,32x8192+128."),
    repeats(3),
    settings_options(*ENGINE, without=("seed", "device", "default_retention")),
)
def decode() -> None:
    """Measure the time between tokens (ITL) and the throughput of the engine.

    \b
    --contexts   measures the ITL of one request alone, at each context
    --workloads  measures the throughput of requests x prompt + answer tokens, all given at once

    Without either, a few of both are measured. The raw limit of a step is the time to copy its
    weights, keys and values at the bandwidth of the same run, and that of a prompt the time of its
    FLOPs at the rate of a matrix product. Tiers have the size that the measurement needs, unless
    their sizes are given.

    \b
    Example, a minute without a GPU:
      tieredkv bench decode --model tiny-random --contexts 1024 --workloads 16x512+16
    """


@measured(
    click.option("--url", default="http://127.0.0.1:8000", help="URL of the server, without /v1."),
    click.option("--api-key", help="API key, if the server needs one."),
    several(
        "--rates",
        NUMBER,
        default="1,2,4",
        help="Conversations that begin per second, with commas between.",
    ),
    several(
        "--retentions", str, default="in_memory", help="Retentions to compare, with commas between."
    ),
    click.option("--duration", type=NUMBER, default=60.0, help="Seconds per rate and retention."),
    click.option("--turns", type=COUNT, default=4, help="Answers per conversation."),
    click.option(
        "--think",
        type=NUMBER,
        default=5.0,
        help="Mean seconds between an answer and the next turn.",
    ),
    click.option(
        "--system-tokens",
        type=COUNT,
        default=2000,
        help="Tokens of the system prompt, which all conversations share.",
    ),
    click.option("--user-tokens", type=COUNT, default=200, help="Tokens that each turn adds."),
    click.option("--answer-tokens", type=COUNT, default=64, help="Tokens of each answer."),
    module="conversations",
)
def serve() -> None:
    """Measure a running server as its clients see it: conversations with think times.

    Conversations begin at a rate, whether or not the server keeps up. All share a system prompt,
    and each turn sends what was said before. Rows tell the time to the first token and between
    tokens, by the slowest tier that the prefix came from, and the share of prompt tokens that were
    cached. To compare with a server without tiers, configure a retention that keeps blocks in VRAM
    alone, such as `[retention.device_only]`. The exit code is 1 if a request fails, and 3 if the
    server does not answer.

    \b
    Example, a minute and a half without a GPU:
      tieredkv serve tiny-random --device-size 16MiB &
      tieredkv bench serve --rates 1,4 --duration 20
    """
