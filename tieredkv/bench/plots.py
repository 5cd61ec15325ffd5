"""Plots of reports, drawn with matplotlib, which is optional. This module knows no bench."""

import errno
import importlib
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tieredkv.errors import ConfigError

STYLES = ("-", "--", ":")


def check(path: Path | None) -> None:
    """Check before measuring that the plot can be drawn.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be made.
    """
    if path is None:
        return
    try:
        canvas = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg
    except ImportError as error:
        hint = "run `pip install 'tieredkv[plot]'`"
        raise ConfigError(f"`--plot` needs matplotlib: {error}\nhint: {hint}") from error
    if path.suffix[1:] not in canvas.get_supported_filetypes() or not path.parent.is_dir():
        raise ConfigError(f"`--plot` = `{path}` must be a .png, .svg or .pdf in an existing folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"`--plot` = `{path}` cannot be written: {os.strerror(errno.EACCES)}")


def draw(
    path: Path,
    rows: list[dict[str, Any]],
    by: str,
    x: str,
    panels: Sequence[Sequence[str]],
    limits: Mapping[str, float],
) -> None:
    """Plot columns over the column `x`, one line for each value of the column `by`.

    Each panel has its own y axis and shows some columns. A numeric x axis is logarithmic; then a y
    axis is too, if its values span a decade. If all rows have the same x, columns are bars.
    """
    has_values = [any(row.get(y) is not None for row in rows for y in shown) for shown in panels]
    panels = list(itertools.compress(panels, has_values)) or panels[:1]
    num_columns = min(3, len(panels))
    num_rows = -(-len(panels) // num_columns)
    size = (9, 5) if len(panels) == 1 else (5 * num_columns, 4 * num_rows)
    figure = importlib.import_module("matplotlib.figure").Figure(size, layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    colors = {row[by]: f"C{i}" for i, row in enumerate({row[by]: row for row in rows}.values())}
    for axes, shown in zip(grid, panels, strict=False):
        known = [row for row in rows if any(row.get(y) is not None for y in shown)]
        if len({row[x] for row in rows}) == 1:
            _draw_bars(axes, known, by, shown, colors)
            axes.set(xlabel=f"{_words(x)}: {rows[0][x]}")
        else:
            _draw_lines(axes, known, by, x, shown, colors)
        for index, (name, limit) in enumerate(limits.items()):
            axes.axhline(limit, linestyle="--", color=f"C{index}", label=f"raw limit {name}")
        axes.set(ylabel=_words(shown[0] if len(shown) == 1 else _unit(shown[0])))
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    for axes in grid[len(panels) :]:
        axes.remove()
    figure.savefig(path, dpi=150)


def _draw_bars(
    axes: Any, rows: list[dict[str, Any]], by: str, shown: Sequence[str], colors: Mapping[str, str]
) -> None:
    width = 0.8 / len(rows)
    for index, row in enumerate(rows):
        bars = {i + index * width: row[y] for i, y in enumerate(shown) if row.get(y) is not None}
        axes.bar([*bars], [*bars.values()], width, color=colors[row[by]], label=row[by])
    middle = (len(rows) - 1) * width / 2
    axes.set_xticks([i + middle for i in range(len(shown))], [_words(y) for y in shown])


def _draw_lines(
    axes: Any,
    rows: list[dict[str, Any]],
    by: str,
    x: str,
    shown: Sequence[str],
    colors: Mapping[str, str],
) -> None:
    ticks = list(dict.fromkeys(row[x] for row in rows))
    is_log = all(isinstance(tick, int | float) for tick in ticks)
    values = [row[y] for row in rows for y in shown if row.get(y) is not None]
    for name in dict.fromkeys(row[by] for row in rows):
        for y, style in zip(shown, STYLES, strict=False):
            some = [row for row in rows if row[by] == name and row.get(y) is not None]
            if not some:
                continue
            points = [(row[x], row[y]) for row in some]
            how = {"color": colors[name], "linestyle": style if is_log else "", "marker": "o"}
            label = name if len(shown) == 1 else f"{name}: {_words(y)}"
            axes.plot(*zip(*points, strict=True), **how, label=label)
    if is_log:
        axes.set_xscale("log")
        axes.minorticks_off()
    if is_log and max(values, default=0) > 10 * min(values, default=0) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(0, 1.1 * max(values) or 1)
    axes.set_xticks(ticks, [str(tick) for tick in ticks], rotation=0 if is_log else 30)
    axes.set(xlabel=_words(x))


def _words(column: str) -> str:
    return column.replace("_", " ").replace(".", " ")


def _unit(column: str) -> str:
    """Return what columns have in common: `ttft_ms` of `ttft_ms.p50`, `ms` of `itl_p50_ms`."""
    table, dot, _ = column.partition(".")
    return table if dot else column.split("_")[-1]
