"""Output of the verbs: a table for people, or one JSON document on the last line for programs."""

import functools
import json
import logging
import re
import sys
import textwrap
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, TypeVar

import click
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tieredkv.bench.progress import ending_progress, is_quiet
from tieredkv.units import format_bytes, printable

Command = TypeVar("Command", bound=Callable[..., Any])
Rows = Sequence[Mapping[str, object]]

PIPE_COLUMNS = 200
"""Width of tables if stdout is not a terminal."""

MOST_COLUMNS = 10_000
"""More than any table has."""

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Answer with one JSON document on the last line."
)


class Answer(NamedTuple):
    """The result of a verb.

    Attributes:
        document: the JSON document that `--json` prints.
        rows: rows of the table for people.
        lines: text lines below the tables.
        texts: how many columns of the table are text; the columns after them are numbers.
        is_problem: whether the exit code is 1.
        more: rows of further tables, each with the number of its columns that are text.
    """

    document: object
    rows: Rows = ()
    lines: Sequence[str] = ()
    texts: int = 99
    is_problem: bool = False
    more: Sequence[tuple[Rows, int]] = ()


class Listing(NamedTuple):
    """A list as the result of a verb; it may be too long for memory.

    Attributes:
        pages: yields the list a few items at a time; it is read once, then closed.
        document: turns the pages into parts of the JSON document that `--json` prints.
        as_row: turns an item into a row of the table for people.
        name_of: what `-q` prints of an item.
        nothing: text for people if the list is empty.
        texts: how many columns of the table are text; the columns after them are numbers.
        is_problem: whether the exit code is 1; called once the list was read.
    """

    pages: Generator[Any, None, object]
    document: Callable[[Iterator[Any]], Iterable[str]]
    as_row: Callable[[Any], Mapping[str, object]]
    name_of: Callable[[Any], str]
    nothing: str
    texts: int = 99
    is_problem: Callable[[], bool] = lambda: False


quiet_option = click.option(
    *("-q", "--quiet"),
    is_flag=True,
    help="Show no progress and no table, only errors, and of a list its ids.",
)


def answering(verb: Callable[..., Answer | Listing]) -> Any:
    """Add `--json` and `-q` to a verb and print its result: as JSON, as a table, or not at all."""

    @functools.wraps(verb)
    def answer(*, as_json: bool, quiet: bool, **options: Any) -> int:
        is_quiet.set(quiet)
        with ending_progress():
            found = verb(**options)
        if isinstance(found, Listing):
            show = _print_in_parts if as_json else _print_names if quiet else _print_tables
            with closing(found.pages):
                show(found)
            return int(found.is_problem())
        if quiet and not as_json:
            return int(found.is_problem)
        if as_json:
            print_json(found.document)
        for rows, texts in () if as_json else ((found.rows, found.texts), *found.more):
            if rows:
                print_table(rows, texts=texts)
        for line in () if as_json else found.lines:
            click.echo(line)
        return int(found.is_problem)

    return json_option(quiet_option(answer))


def _print_in_parts(listing: Listing) -> None:
    """Write one JSON document on one line; the line is cut short if reading the list fails."""
    for part in listing.document(listing.pages):
        click.echo(_escaped(part), nl=False)
    click.echo()


def _print_names(listing: Listing) -> None:
    """Write what names each item, one a line."""
    for page in listing.pages:
        for item in page:
            click.echo(listing.name_of(item))


def _print_tables(listing: Listing) -> None:
    """Write one table per page, each with its own column widths."""
    is_empty = True
    for page in listing.pages:
        print_table([listing.as_row(item) for item in page], texts=listing.texts)
        is_empty = False
    if is_empty:
        click.echo(listing.nothing)


def usage_error(message: str) -> click.UsageError:
    """Return a usage error for the current verb."""
    return click.UsageError(message, click.get_current_context())


def print_json(document: object) -> None:
    """Write a document as one line of JSON to stdout."""
    click.echo(_escaped(json.dumps(document, ensure_ascii=False)))


def _escaped(part: str) -> str:
    """Return a part of a JSON document, with escapes for what stdout has no letters for."""
    if part.isascii() or (sys.stdout.encoding or "").lower().replace("-", "") == "utf8":
        return part
    return re.sub(r"[^\x00-\x7f]", lambda found: json.dumps(found[0])[1:-1], part)


def print_table(rows: Rows, *, texts: int = 99) -> None:
    """Write rows as a table to stdout; the first columns are text, the others numbers.

    Columns whose name ends with `_all` are left out. On a terminal that is too narrow for the
    table, each row is written as a paragraph.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = dict.fromkeys(key for row in rows for key in row if not key.endswith("_all"))
    for i, name in enumerate(names):
        title = name.replace("_", " ").replace(".", " ")
        if i < texts:
            table.add_column(title, no_wrap=True)
        else:  # a title of several words may have several lines
            table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*(Text(_cell(name, row.get(name))) for name in names))
    console = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    unbounded = console.options.update_width(MOST_COLUMNS)
    if Measurement.get(console, unbounded, table).maximum <= console.width:
        console.print(table)
        return
    for row in rows:
        head, *others = ((name, _cell(name, row.get(name))) for name in names)
        text = ", ".join(f"{name.replace('_', ' ')} {cell}" for name, cell in others)
        click.echo(head[1])
        click.echo(textwrap.fill(text, console.width, initial_indent="  ", subsequent_indent="  "))


def _cell(name: str, value: object) -> str:
    """Format a value of a table; sizes, whose names begin with `bytes_`, have units."""
    if name.startswith("bytes_") and isinstance(value, int):
        return format_bytes(value)
    return as_text(value)


def as_text(value: object) -> str:
    """Format a value for people: floats with four digits, names without underscores."""
    if isinstance(value, dict):
        parts = (f"{printable(key).replace('_', ' ')} {as_text(value[key])}" for key in value)
        return ", ".join(parts) or "none"
    if isinstance(value, list):
        return " to ".join(map(as_text, value))
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "NO"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    return "\n".join(map(printable, str(value).split("\n")))


def set_up_logging(level: str) -> None:
    """Log to stderr, one line per message, with the time."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("httpx", "httpcore", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def log_lines_to_stdout(name: str) -> None:
    """Write each message of a logger as a line to stdout, and nowhere else."""
    logger, handler = logging.getLogger(name), logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
