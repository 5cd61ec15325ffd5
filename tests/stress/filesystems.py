"""Measures on each filesystem how much of its budget the disk tier occupies, and that it works.

\b
    python -m tests.stress.filesystems --seconds 20 --json docs/results/filesystems-2-cores.json

Each filesystem is made in an image and mounted through a loop device. This needs root and the tools
that make the filesystem; one that cannot be mounted is listed with the reason. A store is flooded
with small blocks of many sizes, which are evicted, deleted and expire. The space that the whole
folder occupies is measured by `st_blocks`, as `du` does, on a thread of its own and at every
labelled step of every change. At the end the store is opened again and all of it is verified.
"""

import contextlib
import itertools
import json
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import click

from tests.fakes import FakeClock
from tests.storage.blocks import (
    commit,
    load,
    make_record,
    open_store,
    page_with,
    payload_of,
    sweep,
    verify,
)
from tests.storage.mounts import FILESYSTEMS, CannotMountError, mounted
from tieredkv.bench import raw
from tieredkv.errors import StorageError
from tieredkv.tier import TouchItem
from tieredkv.types import BlockRecord
from tieredkv.units import parse_bytes

SIZES = (1024, 9_000, 30_000, 60_000, 100_000)


class Sampler:
    """Records the largest space that a folder has occupied."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.most_bytes = self.num_samples = 0

    def sample(self, _label: str = "") -> None:
        """Measure now; the sample is dropped if a file is removed meanwhile."""
        with contextlib.suppress(FileNotFoundError):
            blocks = [os.lstat(self._folder).st_blocks]
            for folder, folders, files in os.walk(self._folder):
                names = (os.path.join(folder, name) for name in (*folders, *files))
                blocks += [os.lstat(name).st_blocks for name in names]
            self.most_bytes = max(self.most_bytes, 512 * sum(blocks))
            self.num_samples += 1

    def _run(self) -> None:
        while not self._is_over.wait(0.002):
            self.sample()

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        self._thread.join()


def flood(folder: Path, *, budget_bytes: int, sync: str, seconds: float, seed: int) -> Any:
    """Store, evict, delete and expire blocks; return the figures of the run."""
    rng, clock, stored = random.Random(seed), FakeClock(), list[BlockRecord]()
    options: dict[str, Any] = {"budget_bytes": budget_bytes, "sync": sync}
    num_refused, until = 0, time.monotonic() + seconds
    causes = set[str]()
    folder.mkdir(mode=0o700)
    with (
        Sampler(folder) as sampler,
        open_store(folder, clock, failpoint=sampler.sample, **options) as store,
    ):
        for number in itertools.count():
            if time.monotonic() > until:
                break
            clock.advance(0.1)
            now, life_s = clock.now(), rng.choice([2.0, 3600.0, 3600.0])
            size = 1024 if number // 50 % 4 else rng.choice(SIZES)
            group = [
                make_record(f"{number}", each, now=now, size_bytes=size, expires_at=now + life_s)
                for each in range(rng.randint(1, 64))
            ]
            try:
                extents = zip(group, store.reserve(group), strict=True)
                lent = [(record, extent) for record, extent in extents if extent is not None]
                pages = [page_with(payload_of(record)) for record, _ in lent]
                written = zip(lent, pages, strict=True)
                commit(store, [store.write(extent, it, page) for (it, extent), page in written])
            except StorageError as error:
                lent = []
                causes.add(str(error))
            stored += [record for record, _ in lent]
            num_refused += len(group) - len(lent)
            if number % 7 == 0:
                sweep(store)
                used = rng.sample(stored[-3000:], min(len(stored), 500))
                store.touch([TouchItem(each.block_hash, now) for each in used])
            if number % 31 == 0 and stored:
                gone = rng.sample(stored, len(stored) // 4)
                store.drop([each.block_hash for each in gone], "evicted")
                stored = [each for each in stored if each not in gone][-500:]
        stats = store.stats()
        store.check()
    with open_store(folder, clock, **options) as store:
        bad = verify(store, repair=False).bad
        there = [each for each in stored[-100:] if isinstance(load(store, each), bytes)]
    return {
        "max_share": round(sampler.most_bytes / budget_bytes, 4),
        "samples": sampler.num_samples,
        "blocks_stored": stats.num_stored,
        "blocks_refused": num_refused,
        "causes": sorted(causes)[:3],
        "blocks_evicted": stats.num_evicted,
        "blocks_at_end": stats.blocks,
        "of_last_100_there": len(there),
        "bad": bad,
        "faults": stats.faults,
        "direct_io": stats.direct_io,
        "punch_hole": stats.punch_hole,
    }


@click.command(help=__doc__)
@click.option("--only", multiple=True, help="Name of a filesystem to measure; all by default.")
@click.option("--seconds", default=20.0, show_default=True, help="Length of each flood.")
@click.option("--budget", default="24MiB", show_default=True, help="Budget of the store.")
@click.option("--seed", default=0, show_default=True, help="Seed of the random choices.")
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
@click.option("--json", "report", type=click.Path(path_type=Path), help="File for the figures.")
def main(
    only: tuple[str, ...],
    seconds: float,
    budget: str,
    seed: int,
    commit: str | None,
    report: Path | None,
) -> None:
    rows, unmounted, budget_bytes = list[dict[str, Any]](), dict[str, str](), parse_bytes(budget)
    for name in only or FILESYSTEMS:
        for sync in ("none", "commit"):
            try:
                with mounted(FILESYSTEMS[name]) as disk:
                    told: dict[str, Any] = {"sync": sync, "seed": seed}
                    row = {"filesystem": name, "sync": sync}
                    try:
                        row |= flood(
                            disk / "store", budget_bytes=budget_bytes, seconds=seconds, **told
                        )
                    except StorageError as error:
                        row["refused"] = str(error).replace(str(disk), "DISK")
            except CannotMountError as error:
                unmounted[name] = str(error)
                click.echo(f"{name}: {error}", err=True)
                break
            rows.append(row)
            click.echo(json.dumps(row), err=True)
    shares = [row["max_share"] for row in rows if "max_share" in row]
    head = raw.head(commit, "python -m tests.stress.filesystems")
    result = {"kernel": os.uname().release, "budget_bytes": budget_bytes, "rows": rows}
    figures = head | result | {"not_mounted": unmounted, "max_share": max(shares, default=0.0)}
    if report is not None:
        report.write_text(json.dumps(figures, indent=1) + "\n")
    click.echo(json.dumps(figures))


if __name__ == "__main__":
    main()
