"""How verbs answer: a table for people, one JSON document on the last line for programs."""

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click
from rich import box
from rich.console import Console
from rich.table import Table

Command = TypeVar("Command", bound=Callable[..., Any])

PIPE_COLUMNS = 200
"""Lines in a pipe are not wrapped to a terminal that is not there."""

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Answer with one JSON document on the last line."
)


def usage_error(message: str) -> click.UsageError:
    """Return the error for a command line that the current verb cannot follow."""
    return click.UsageError(message, click.get_current_context())


def print_json(document: object) -> None:
    """Write a document on one line of stdout."""
    click.echo(json.dumps(document, ensure_ascii=False))


def print_table(rows: Sequence[Mapping[str, object]], *, texts: int = 99) -> None:
    """Write a table of rows by column to stdout, numbers right behind the first columns of text.

    Columns called `…_all` are left out.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = dict.fromkeys(key for row in rows for key in row if not key.endswith("_all"))
    for i, name in enumerate(names):
        side: Any = "left" if i < texts else "right"
        table.add_column(name.replace("_", " "), justify=side, no_wrap=True)
    for row in rows:
        table.add_row(*(as_text(row.get(name)) for name in names))
    Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS).print(table)


def as_text(value: object) -> str:
    """Return what people read: numbers in four digits, names without underscores."""
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {as_text(value[key])}" for key in value)
    if isinstance(value, list):
        return " to ".join(map(as_text, value))
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def set_up_logging(level: str) -> None:
    """Log to stderr, a line each, with times."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("httpx", "httpcore", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
