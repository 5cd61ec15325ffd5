"""How `tieredkv top` draws a picture of a server: tables as wide as the terminal, bars of text."""

import time
from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tieredkv.cli.output import MOST_COLUMNS
from tieredkv.cli.top_figures import MoveRate, Picture, Recent, TierUse
from tieredkv.cli.versions import untold_text
from tieredkv.server.slow_requests import SlowRequest
from tieredkv.storage.stats import Lifetimes
from tieredkv.types import Tier
from tieredkv.units import format_bytes, format_duration

SOURCES = ("cold", *map(str, Tier))
BAR_COLUMNS = 20
TENANT_COLUMNS = 20


def draw(picture: Picture, console: Console, *, note: str = "", height: int | None = None) -> Group:
    """Return a picture as wide as the console.

    Args:
        picture: the figures.
        console: its encoding decides on the characters of bars.
        note: text below the title, such as that the server does not answer.
        height: lines that there are; the list of slow requests is cut to fit. None for no limit.
    """
    clock = time.strftime("%H:%M:%S", time.localtime(picture.at))
    title = "  ".join(it for it in (clock, picture.model, picture.source) if it)
    running = f"requests: {picture.requests_running} running, {picture.requests_waiting} waiting"
    parts: list[RenderableType] = [
        Text(title, style="bold", no_wrap=True, overflow="ellipsis"),
        *([Text(note, style="reverse")] if note else []),
        Text(running),
        Text(),
        _tiers_table(picture.tiers, console),
        Text(),
        _moves_table(picture.moves, console),
    ]
    if (told := picture.lifetimes) is not None:
        parts += [Text(), *_lifetimes(told)]
    if picture.recent is not None:
        parts += [Text(), *_recent_parts(picture.recent, picture.at)]
    if picture.untold:
        parts += [Text(), Text(untold_text(picture.untold))]
    if picture.slowest is None:
        if "slowest" not in picture.untold:
            what = "The hit rate, times to first token and the slowest requests need --url."
            parts += [Text(), Text(what)]
        return Group(*parts)
    limit = None
    if height is not None:
        limit = max(1, height - len(console.render_lines(Group(*parts))) - 3)
    return Group(*parts, Text(), *_slowest_parts(picture.slowest[:limit], picture.at, console))


def bar(ratio: float, console: Console) -> str:
    """Return a bar with a filled and an empty part, which differ in more than colour."""
    full, empty = "#." if console.options.ascii_only else "█░"
    filled = round(BAR_COLUMNS * min(max(ratio, 0.0), 1.0))
    return full * filled + empty * (BAR_COLUMNS - filled)


def _table(*titles: str, texts: int = 1) -> Table:
    """Return a table without lines; the first columns are text, the others numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, title in enumerate(titles):
        table.add_column(title, justify="left" if i < texts else "right", no_wrap=True)
    return table


def _add(table: Table, *cells: str) -> None:
    """Add a row; what a server tells is never read as markup."""
    table.add_row(*map(Text, cells))


def _tiers_table(tiers: Mapping[str, TierUse], console: Console) -> Table:
    table = _table("tier", "used", "", "held", "size", texts=2)
    for tier, use in tiers.items():
        ratio = use.held_bytes / use.size_bytes if use.size_bytes else 0.0
        held, size = format_bytes(use.held_bytes), format_bytes(use.size_bytes)
        _add(table, tier, bar(ratio, console), _percent(ratio), held, size)
    return table


def _moves_table(moves: Mapping[str, MoveRate], console: Console) -> Table:
    table = _table("move", "of the link", "", "per second", texts=2)
    for between, move in moves.items():
        ratio, rate = move.used_ratio, format_bytes(round(move.bytes_per_s))
        shown = "" if ratio is None else bar(ratio, console)
        _add(table, between.replace(",", " to "), shown, _percent(ratio), rate)
    return table


def _lifetimes(told: Lifetimes) -> list[RenderableType]:
    table = _table("on disk", "promised", "expected", "evicted", "p1 age")
    for policy in sorted({*told.num_evicted, *told.write_bytes_per_s}):
        _add(
            table,
            policy,
            _duration(told.promised_s.get(policy)),
            _duration(told.expected_s.get(policy)),
            str(told.num_evicted.get(policy, 0)),
            _duration(told.evicted_age_p1_s.get(policy)),
        )
    if not table.rows:
        return [Text("How long the disk keeps blocks is told after ten minutes of writes.")]
    return [table, *([Text(f"warning: {told.shortfall}")] if told.shortfall else [])]


def _recent_parts(recent: Recent, now: float) -> list[RenderableType]:
    span, cached = format_duration(max(0.0, now - recent.began_at)), recent.cached_tokens
    title = (
        f"last {span}: {recent.prompt_tokens} prompt tokens, hit rate {_percent(recent.hit_rate)}"
    )
    table = _table("first token from", "requests", "p50", "p90", "cached tokens")
    for source in SOURCES:
        if (ttft := recent.ttft.get(source)) is not None:
            times = _duration(ttft.p50_s), _duration(ttft.p90_s)
            tokens = "-" if source == "cold" else str(cached.get(source, 0))
            _add(table, source, str(ttft.num), *times, tokens)
    return [Text(title), *([table] if table.rows else [])]


def _slowest_parts(
    slowest: Sequence[SlowRequest], now: float, console: Console
) -> list[RenderableType]:
    """Return the table with all columns, or with fewer if the console is too narrow for them."""
    if not slowest:
        return [Text("no request in the last ten minutes")]
    tiers, tenant = [*map(str, Tier)], ["tenant"] * (len({it.tenant for it in slowest}) > 1)
    first, last = ("ttft", "queue", "prompt"), ("from", "miss")
    layouts = (
        (*first, *tiers, "ago", *tenant, *last),
        (*first, "cached", *tenant, *last),
        (*first, "cached", *last),
    )
    tables = [_table(*titles, texts=0) for titles in layouts]
    for each in slowest:
        cached = each.cached_tokens
        cells = {
            "ttft": _duration(each.ttft_s),
            "queue": _duration(each.queue_s),
            "prompt": str(each.prompt_tokens),
            **{tier: str(cached.get(tier, 0)) for tier in tiers},
            "cached": str(sum(cached.values())),
            "ago": _duration(max(0.0, now - each.at)),
            "tenant": each.tenant[:TENANT_COLUMNS],
            "from": each.source,
            "miss": each.miss_reason or "-",
        }
        for table, titles in zip(tables, layouts, strict=True):
            _add(table, *map(cells.__getitem__, titles))
    for column in (column for table in tables for column in table.columns):
        if column.header in (*tenant, *last):
            column.justify = "left"
    unbounded = console.options.update_width(MOST_COLUMNS)
    fits = (it for it in tables if Measurement.get(console, unbounded, it).maximum <= console.width)
    return [Text("slowest requests of the last ten minutes"), next(fits, tables[-1])]


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.0f} %"


def _duration(seconds: float | None) -> str:
    """Return a duration for people, in whole milliseconds if it is short."""
    if seconds is not None and seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return "-" if seconds is None else format_duration(seconds)
