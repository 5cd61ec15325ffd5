"""Progress of long work on a terminal; nothing in a pipe."""

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from tieredkv.types import Progress, ignore_progress


def terminal_progress() -> Progress:
    """Return a function that draws one bar a stage on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        return ignore_progress
    bars = RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    tasks: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            if not tasks:
                bars.start()
            tasks[stage] = bars.add_task(stage, total=total or None)
        bars.update(tasks[stage], completed=done, total=total or None)
        if total and done >= total:
            bars.remove_task(tasks.pop(stage))
            if not tasks:
                bars.stop()

    return report
