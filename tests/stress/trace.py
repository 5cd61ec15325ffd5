"""Records how much space a store's files occupy over time, and what was done to the store when.

This module measures a folder and draws the plot. It does not know what the files contain.
"""

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.stress.faults import KINDS
from tests.stress.promises import Promises

SAMPLE_S = 0.05


@dataclass(slots=True)
class Trace:
    """The data of the plot. Times are in seconds since the start."""

    started: float = field(default_factory=time.monotonic)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def mark(self, what: str) -> None:
        """Record that something is done to the store now."""
        self.marks.append((self.now, what))


class Sampler(threading.Thread):
    """Measures every 50 ms how much space the files occupy, except while it is paused."""

    def __init__(self, folder: Path, budget_bytes: int, trace: Trace, promises: Promises) -> None:
        super().__init__(name="soak-sampler", daemon=True)
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._trace = trace
        self._promises = promises
        self._is_over = threading.Event()
        self._is_paused = False
        self._looking = threading.Lock()

    def run(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            with self._looking:
                if self._is_paused:
                    continue
                sizes = self._look()
                size = sum(sizes.values())
                self._trace.sizes.append((self._trace.now, size))
                if size > self._budget_bytes:
                    beside = {
                        path[len(str(self._folder)) + 1 :]: held
                        for path, held in sizes.items()
                        if not path.endswith(".seg")
                    }
                    what = f"{size} of {self._budget_bytes} bytes at {self._trace.now:.2f} s"
                    what = f"{what}; beside the segments {beside}"
                    self._promises.blame("samples_above_budget", what)

    def end(self) -> None:
        self._is_over.set()
        self.join()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not measure while the context lasts.

        The soak damages a stopped store in this context. What it writes into the files does not
        count against the budget before the store has opened.
        """
        with self._looking:
            self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _look(self) -> dict[str, int]:
        """Return how much space each file and folder occupies.

        One look takes a while, and space that moves during it from a file already seen to one not
        yet seen is counted twice. So a sum above the budget counts only if two looks in a row agree
        on every file. Otherwise the look with the smallest sum is returned.
        """
        sizes = least = file_sizes(self._folder)
        for _ in range(10):
            if sum(least.values()) <= self._budget_bytes:
                break
            again = file_sizes(self._folder)
            if again == sizes:
                return again
            sizes = again
            least = min(least, sizes, key=lambda look: sum(look.values()))
        return least


def file_sizes(folder: Path) -> dict[str, int]:
    """Return how many bytes each file and folder below a folder occupies, by path."""
    sizes = {}
    for parent, folders, files in os.walk(folder):
        for name in (".", *folders, *files) if parent == str(folder) else (*folders, *files):
            path = os.path.join(parent, name)
            with contextlib.suppress(FileNotFoundError):
                sizes[path] = os.lstat(path).st_blocks * 512
    return sizes


def draw(path: Path, trace: Trace, budget_bytes: int) -> None:
    """Draw the occupied space over time, the budget, and the times of kills and damage."""
    figure = importlib.import_module("matplotlib.figure").Figure((12, 5), layout="constrained")
    axes = figure.subplots()
    times, sizes = zip(*(trace.sizes or [(0.0, 0)]), strict=True)
    axes.axhline(budget_bytes / 2**20, color="black", linestyle="--", label="budget")
    axes.plot(times, [size / 2**20 for size in sizes], linewidth=0.8, label="files")
    kills = [at for at, what in trace.marks if what == "kills"]
    axes.vlines(kills, 0, budget_bytes / 2**20, "grey", linewidth=0.3, label="kill -9")
    for index, kind in enumerate((*KINDS, "evictions", "restarts", "stores_begun_anew")):
        marks = [at for at, what in trace.marks if what == kind]
        if marks:
            height = budget_bytes / 2**20 * (1.03 + 0.02 * index)
            axes.plot(marks, [height] * len(marks), "v", color=f"C{index + 1}", label=kind)
    axes.set(xlabel="seconds", ylabel="MiB that the files occupy", ylim=(0, None))
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=120)
