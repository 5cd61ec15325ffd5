"""Progress of long work: bars on a terminal, lines elsewhere."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from tieredkv.types import Progress, ignore_progress
from tieredkv.units import format_bytes

logger = logging.getLogger("tieredkv")  # of a server as of a bench

LOG_INTERVAL_S = 2.0

UNITS = {
    "capturing CUDA graphs": "graphs",
    "fingerprinting weights": "pieces",
    "loading kernels": "batch sizes",
    "pinning host memory": "bytes",
    "planning attention": "percent",
    "replaying": "requests",
    "taking host memory": "bytes",
    "verifying": "blocks",
    "warming": "prompts",
    "warming up": "batch sizes",
    "writing to disk": "blocks",
}
"""What is counted in each stage; stages of benches name what they count."""

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


def counted(stage: str, done: int, total: int) -> str:
    """Return how far a stage has come, with a unit; nothing of a stage that is one step."""
    unit = UNITS.get(stage, "")
    if unit == "bytes":
        return f"{format_bytes(done)} of {format_bytes(total)}"
    if total == 1:
        return ""
    return f"{done} of {total or '?'} {unit}".rstrip()


def bench_progress() -> Progress:
    """Return a function that draws one bar per stage on stderr, or writes lines to it."""
    return terminal_progress(lambda line: print(line, file=sys.stderr, flush=True))


def terminal_progress(log_line: Callable[[str], object] = logger.info) -> Progress:
    """Return a function that draws one bar per stage on stderr, or logs if that is no terminal."""
    if is_quiet.get():
        return ignore_progress
    counts = TextColumn("{task.fields[counts]}")
    parts = "{task.description}", BarColumn(), counts, TimeElapsedColumn()
    screen = RichProgress(*parts, console=Console(stderr=True), transient=True)
    tasks: dict[str, TaskID] = {}
    told_at: dict[str, float] = {}

    def draw(stage: str, done: int, total: int) -> None:
        counts = counted(stage, done, total)
        if stage not in tasks:
            tasks[stage] = screen.add_task(stage, total=total or None, counts=counts)
            screen.start()
            _shown.append(screen)
        screen.update(tasks[stage], completed=done, total=total or None, counts=counts)
        if total and done >= total:
            screen.remove_task(tasks.pop(stage))
            if not tasks:
                screen.stop()

    def log(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - told_at.setdefault(stage, now) >= LOG_INTERVAL_S:
            told_at[stage] = now
            log_line(f"{stage}: {counts}" if (counts := counted(stage, done, total)) else stage)

    return draw if sys.stderr.isatty() else log
