"""How verbs answer: a table for people, one JSON document on the last line for programs."""

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click
from rich import box
from rich.console import Console
from rich.logging import RichHandler
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


def print_table(rows: Sequence[Mapping[str, str]], *, numbers: int = 0) -> None:
    """Write a table of rows by column to stdout; the last `numbers` columns are aligned right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = list(rows[0])
    for i, name in enumerate(columns):
        is_number = i >= len(columns) - numbers
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS).print(table)


def set_up_logging(level: str) -> None:
    """Log to stderr: for people on a terminal, plain lines with times elsewhere."""
    if sys.stderr.isatty():
        terminal = Console(stderr=True)
        handler = RichHandler(console=terminal, show_path=False, omit_repeated_times=False)
        logging.basicConfig(level=level, format="%(message)s", handlers=[handler])
    else:
        logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("httpx", "httpcore", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
