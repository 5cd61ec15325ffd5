"""Progress of long work: bars on a terminal, lines elsewhere."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from tieredkv.types import Progress, ignore_progress

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 2.0

is_quiet = ContextVar("is_quiet", default=False)
"""Whether no progress is shown."""

_shown: list[RichProgress] = []


@contextmanager
def ending_progress() -> Iterator[None]:
    """At the end take away the bars of what did not reach its total, and show the cursor again."""
    try:
        yield
    finally:
        while _shown:
            _shown.pop().stop()


def bench_progress() -> Progress:
    """Return a function that draws one bar per stage on stderr, or writes lines to it."""
    return terminal_progress(lambda line: print(line, file=sys.stderr, flush=True))


def terminal_progress(log_line: Callable[[str], object] = logger.info) -> Progress:
    """Return a function that draws one bar per stage on stderr, or logs if that is no terminal."""
    if is_quiet.get():
        return ignore_progress
    parts = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    screen = RichProgress(*parts, console=Console(stderr=True), transient=True)
    tasks: dict[str, TaskID] = {}
    told_at: dict[str, float] = {}

    def draw(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = screen.add_task(stage, total=total or None)
            screen.start()
            _shown.append(screen)
        screen.update(tasks[stage], completed=done, total=total or None)
        if total and done >= total:
            screen.remove_task(tasks.pop(stage))
            if not tasks:
                screen.stop()

    def log(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - told_at.setdefault(stage, now) >= LOG_INTERVAL_S:
            told_at[stage] = now
            log_line(f"{stage}: {done} of {total or '?'}")

    return draw if sys.stderr.isatty() else log
