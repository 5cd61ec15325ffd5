"""Measures what encryption at rest costs loads and stores, in turns with a store without it.

\b
    python -m tests.stress.encryption_cost --dir /nvme --blocks 128 --rounds 20

Two stores, one encrypted and one clear, take turns on one disk, since disks drift. In each round,
each of them stores as many new blocks as there are pages, in place of old ones, and loads as many
at random; then the disk itself is measured with as many blocks. Loads and stores go through the
store's worker and lent pages, as in the engine, and each begins when the one before has ended.
Loaded blocks are compared with what was stored.

`GBps` and `core_s_per_GB` have the median of all rounds and their range. `times_clear` divides the
time of the encrypted store by that of the clear one in the same round: the median, and quartiles.
The exit code is 1 if a block was not stored, not loaded, or wrong.
"""

import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import click
import numpy as np

from tests.storage.blocks import make_record
from tieredkv.bench import raw
from tieredkv.bench.disk import STAMPED
from tieredkv.bench.progress import terminal_progress
from tieredkv.storage.client.client import StoreClient
from tieredkv.storage.format.record import extent_bytes_for
from tieredkv.storage.options import StoreOptions
from tieredkv.tier import Lent, Loaded, Stored
from tieredkv.types import tracked
from tieredkv.units import parse_bytes
from tieredkv.wire.arena import HostArena

NUM_KEPT = 4  # times the blocks of a round
READERS, WRITERS = StoreOptions(path="").num_readers, StoreOptions(path="").num_writers
Row = dict[str, Any]


class Store:
    """A store whose blocks are moved between it and the pages of an arena.

    Attributes:
        problems: of all moves.
    """

    def __init__(self, folder: Path, arena: HostArena, encryption: Any) -> None:
        self._folder, self._arena, self._wake = folder, arena, threading.Event()
        budget_bytes = 2 * NUM_KEPT * arena.num_pages * extent_bytes_for(arena.page_bytes)
        keys: Row = {"encryption": encryption, "key_dir": str(folder.parent / "keys")}
        options = StoreOptions(path=str(folder), budget_bytes=budget_bytes, **keys)
        self._client = StoreClient(options, arena, wake=self._wake.set)
        self._words = np.frombuffer(arena.buffer, np.uint64).reshape(arena.num_pages, -1)
        self._next = 0
        self.problems = list[str]()
        self.close = self._client.close

    def store(self) -> Row:
        """Store a new block from each page."""
        numbers = range(self._next, self._next + self._arena.num_pages)
        self._next = numbers.stop
        for page, number in enumerate(numbers):
            self._words[page][STAMPED] = number
        return self._move(self._client.store, numbers)

    def load(self, chance: random.Random) -> Row:
        """Load a block into each page, of those that were stored lately."""
        num = self._arena.num_pages
        numbers = chance.sample(range(max(0, self._next - NUM_KEPT * num), self._next), num)
        self._words[:, STAMPED] = 0
        row = self._move(self._client.load, numbers)
        is_so = (self._words[:, STAMPED] == np.array(numbers)[:, None]).all(axis=1)
        wrong = np.array(numbers)[~is_so].tolist()
        self.problems += [f"block {it} is not what was stored" for it in wrong]
        return row

    def _move(self, lend: Any, numbers: Sequence[int]) -> Row:
        now, size = time.time(), self._arena.page_bytes
        pages = [
            Lent.of(make_record("a", it, now=now, size_bytes=size, expires_at=now + 86_400), page)
            for page, it in enumerate(numbers)
        ]
        before = raw.counters(self._folder, self._client.pid)
        lend(pages)
        num_left = len(pages)
        while num_left:
            self._wake.wait()
            self._wake.clear()
            for event in self._client.poll():
                if isinstance(event, Loaded | Stored):
                    num_left -= 1
                    self.problems += [] if event.ok else [f"{event.reason}"]
        after = raw.counters(self._folder, self._client.pid)
        num_GB = len(numbers) * size / 1e9
        seconds, core_s = (after[it] - before[it] for it in ("s", "core_s"))
        return {"GBps": num_GB / seconds, "core_s_per_GB": core_s / num_GB}


def told(samples: list[float]) -> Row:
    """Return the median of samples, and their range."""
    return {"p50": float(np.median(samples)), "min": min(samples), "max": max(samples)}


@click.command(help=__doc__)
@click.option(
    "--dir", "where", type=click.Path(path_type=Path), required=True, help="Folder on the disk."
)
@click.option("--block-bytes", default="8MiB", show_default=True, help="Size of a block.")
@click.option("--blocks", default=128, show_default=True, help="Blocks of a move, and pages.")
@click.option("--rounds", default=20, show_default=True, help="How often each store has a turn.")
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
def main(where: Path, block_bytes: str, blocks: int, rounds: int, commit: str | None) -> None:
    size, chance, found = (
        parse_bytes(block_bytes),
        random.Random(0),
        defaultdict[str, list[Row]](list),
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=where)))
        arena = stack.enter_context(closing(HostArena(blocks, size)))
        stores = {
            each: stack.enter_context(closing(Store(folder / each, arena, setting)))
            for each, setting in (("clear", "off"), ("encrypted", "on"))
        }
        buffers = [arena.page(page) for page in range(blocks)]
        file = stack.enter_context(closing(raw.RawFile(folder, NUM_KEPT * blocks, buffers)))
        for store in stores.values():
            for _ in range(2 * NUM_KEPT):
                store.store()
        progress = terminal_progress(lambda line: click.echo(line, err=True))
        for turn in tracked(progress, "taking turns", range(rounds)):
            for name in sorted(stores, reverse=turn % 2 > 0):
                found[f"store {name}"].append(stores[name].store())
                found[f"load {name}"].append(stores[name].load(chance))
            some = chance.sample(range(NUM_KEPT * blocks), blocks)
            for verb, move, num in ("store", os.pwritev, WRITERS), ("load", os.preadv, READERS):
                found[f"{verb} raw"].append({"GBps": file.move_GBps(move, some, num)})
        problems = [f"{name}: {it}" for name in stores for it in stores[name].problems]
    report = raw.head(commit, "python -m tests.stress.encryption_cost")
    report |= {
        "block_bytes": size,
        "blocks": blocks,
        "rounds": rounds,
        "raw_is_direct": file.is_direct,
    }
    for verb in ("load", "store"):
        rows = {name: found[f"{verb} {name}"] for name in (*stores, "raw")}
        report[verb] = {
            name: {key: told([row[key] for row in some]) for key in some[0]}
            for name, some in rows.items()
        }
        clear, encrypted = (np.array([row["GBps"] for row in rows[it]]) for it in stores)
        report[verb]["times_clear"] = np.percentile(clear / encrypted, [25, 50, 75]).tolist()
    click.echo(json.dumps(report | {"problems": problems}))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
