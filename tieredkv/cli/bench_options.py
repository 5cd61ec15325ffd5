"""Options that benches share."""

from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import click

from tieredkv.cli.settings import settings_options
from tieredkv.units import parse_bytes

ARMS = ("cold", "device", "host", "disk", "planned", "restart", "planned_restart", "batched")
RESTORE_ARMS = ("cold", "load", "planned", "device", "chunked")
CROWD_ARMS = ("no_disk", "load", "planned")

COUNT, NUMBER = click.IntRange(min=1), click.FloatRange(0, min_open=True)
ENGINE = ("model", "cache", "scheduler")
FOLDER = click.Path(file_okay=False, path_type=Path)
PICTURE = click.Path(dir_okay=False, path_type=Path)
Option = Callable[[Any], Any]
COMMIT = click.option("--commit", help="Commit to report, where the source has no history.")
MODEL = click.option(
    "--model", required=True, help="Model to measure, as for `serve`, such as random:llama-3.1-8b."
)
PLOT_HELP = "File for a plot of the figures. It needs `pip install 'tieredkv[plot]'`."
PLOT = click.option("--plot", type=PICTURE, metavar="FILE.png", help=PLOT_HELP)


def several(flag: str, kind: Callable[[str], Any], *, name: str = "", **option: Any) -> Option:
    """Return an option that takes a comma-separated list of values.

    Args:
        flag: such as `--arms`.
        kind: makes a value of its text.
        name: of the parameter; by default that of the flag.
        option: see `click.option`.
    """

    def parse(_context: object, _option: object, text: str | None) -> list[Any] | None:
        return None if text is None else [kind(part) for part in text.split(",")]

    names = [flag, name] if name else [flag]
    return click.option(*names, callback=parse, **option)


def with_options(options: Sequence[Option]) -> Option:
    """Return a decorator that adds options to a command, in this order."""
    return lambda command: reduce(lambda it, add: add(it), reversed(options), command)


def arms(names: Sequence[str], text: str, *, default: Sequence[str] = ()) -> Option:
    """Return the `--arms` option; by default all of them are measured."""
    return several("--arms", click.Choice(names), default=",".join(default or names), help=text)


def shortest_to_longest(flag: str, default: str, text: str) -> Option:
    """Return an option that takes two numbers of tokens, such as `20000-60000`."""

    def parse(_context: object, _option: object, given: str) -> tuple[int, int]:
        shortest, _, longest = given.partition("-")
        try:
            ends = int(shortest), int(longest or shortest)
        except ValueError:
            ends = 0, 0
        if not 0 < ends[0] <= ends[1]:
            raise click.BadParameter(f"`{given}` is not a range; write one such as {default}")
        return ends

    return click.option(flag, callback=parse, metavar="FROM-TO", default=default, help=text)


def parse_rate(text: str) -> int:
    """Return a rate in bytes per second; 0 for `none`."""
    return 0 if text == "none" else parse_bytes(text)


def repeats(count: int) -> Option:
    """Return the `--repeats` option with its default."""
    return click.option(
        "--repeats", type=COUNT, default=count, help="Runs per figure; the median is reported."
    )


SESSIONS = (
    click.option("--turns", type=click.IntRange(min=2), default=15, help="Requests of a session."),
    click.option(
        "--first-tokens",
        type=click.IntRange(8_000, 60_000),
        default=18_000,
        help="Median length of the first prompts.",
    ),
    click.option(
        "--added-p90-tokens",
        type=click.IntRange(min=601),
        default=6_000,
        help="New tokens that nine of ten turns do not exceed.",
    ),
    click.option(
        "--replaced-share",
        type=click.FloatRange(0, 1),
        default=1 / 8,
        help="Share of the turns that first replace the last third of the conversation.",
    ),
    click.option(
        "--shared-tokens",
        type=click.IntRange(0, 60_000),
        default=0,
        help="Tokens with which all sessions begin, as those of one program do.",
    ),
    click.option(
        "--until",
        type=click.Choice(["first", "last"]),
        default="first",
        help="Whose end ends a run: that of the first or of the last session.",
    ),
    click.option(
        "--scale",
        type=click.FloatRange(min=1),
        default=1.0,
        help="Divide all numbers of tokens by this, for a small model or a CPU.",
    ),
    click.option(
        "--trace",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File with recorded sessions to replay, .jsonl or .jsonl.gz, as above.",
    ),
)
"""Options that say what sessions look like; the fields of `tieredkv.bench.sessions.Shape`."""

PREFIX_TOKENS = several(
    "--prefix-tokens",
    COUNT,
    default="512,2048",
    help="Lengths of prefixes in tokens, with commas between.",
)
TIERS = settings_options(*ENGINE, without=("seed", "restore", "default_retention"))
CROWD = (arms(CROWD_ARMS, "Arms to measure, as above, with commas between."), TIERS)
