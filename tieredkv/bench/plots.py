"""Pictures of reports. It knows matplotlib, which is optional, and no bench."""

import importlib
from pathlib import Path
from typing import Any

from tieredkv.errors import ConfigError


def check(path: Path | None) -> None:
    """Refuse a picture that cannot be drawn, before anything is measured.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be made.
    """
    if path is None:
        return
    try:
        canvas = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg
    except ImportError as error:
        hint = "pip install 'tieredkv[plot]'"
        raise ConfigError(f"`--plot` needs matplotlib: {error}\nhint: {hint}") from error
    if path.suffix[1:] not in canvas.get_supported_filetypes() or not path.parent.is_dir():
        raise ConfigError(f"`--plot` = `{path}` must be a .png, .svg or .pdf in a folder that is")


def draw(
    path: Path, rows: list[dict[str, Any]], names: tuple[str, str, str], limits: dict[str, float]
) -> None:
    """Draw a line for each value of a column; two others are x and y, on log axes if numbers."""
    by, x, y = names
    figure = importlib.import_module("matplotlib.figure").Figure((9, 5), layout="constrained")
    axes, rows = figure.subplots(), [row for row in rows if row.get(y) is not None]
    ticks = list(dict.fromkeys(row[x] for row in rows))
    is_log = all(isinstance(tick, int | float) for tick in ticks)
    for name in dict.fromkeys(row[by] for row in rows):
        points = [(row[x], row[y]) for row in rows if row[by] == name]
        axes.plot(*zip(*points, strict=True), "o-" if is_log else "o", label=name)
    for index, (name, limit) in enumerate(limits.items()):
        axes.axhline(limit, linestyle="--", color=f"C{index}", label=f"raw limit {name}")
    if is_log:
        axes.set(xscale="log", yscale="log")
        axes.minorticks_off()
    axes.set_xticks(ticks, [str(tick) for tick in ticks], rotation=0 if is_log else 30)
    axes.set(xlabel=x.replace("_", " "), ylabel=y.replace("_", " "))
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
