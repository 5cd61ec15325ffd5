"""Measures how compression changes the speed of loads and stores.

\b
    python -m tests.stress.compression --dir /nvme --blocks 1024

The blocks are 2 MiB of normally distributed bfloat16 numbers. A store without compression and a
store with it are measured one after the other. The figures are GB of payload per second of stores
by 8 threads and of loads by 32 threads, the compression ratio, and how many GB per second one core
compresses and decompresses. The loaded blocks are compared with those that were stored. The result
is printed as JSON; the exit code is 1 if a block was wrong.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import numpy as np

from tests.storage.blocks import make_record
from tieredkv.bench import raw
from tieredkv.clock import Clock
from tieredkv.storage.format.planes import aligned_buffer
from tieredkv.storage.opening import open_parts
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.store import Store

BLOCK_BYTES, GROUP, WRITERS, READERS, REPEATS = 2 << 20, 64, 8, 32, 3


def measure(folder: Path, num_blocks: int, compression: Any) -> dict[str, Any]:
    draw = np.random.default_rng(0).standard_normal(BLOCK_BYTES // 2).astype(np.float32)
    block = (draw.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    pages = [aligned_buffer(BLOCK_BYTES) for _ in range(GROUP)]
    for page in pages:
        page[:] = block
    now, budget_bytes = time.time(), 2 * num_blocks * BLOCK_BYTES
    options = StoreOptions(
        path=str(folder), budget_bytes=budget_bytes, compression=compression, sync="none"
    )
    records = [
        make_record("a", i, now=now, size_bytes=BLOCK_BYTES, expires_at=now + 86_400)
        for i in range(num_blocks)
    ]
    with Store(open_parts(options, Clock()), options) as store:

        def write() -> None:
            with ThreadPoolExecutor(WRITERS) as pool:
                for first in range(0, num_blocks, GROUP):
                    some = records[first : first + GROUP]
                    packed = list(pool.map(store.packing.pack, pages[: len(some)]))
                    extents = store.reserve(some, packed)
                    each = zip(extents, some, pages, packed, strict=False)
                    store.commit(list(pool.map(lambda it: store.write(*it), each)))

        def read() -> None:
            with store.parts.index.reading() as txn:
                located = [txn.get(record.block_hash) for record in records]
            with ThreadPoolExecutor(READERS) as pool:
                list(pool.map(read_one, enumerate(located)))

        def read_one(numbered: Any) -> None:
            index, located = numbered
            store.read(located, pages[index % GROUP])

        stored = rate(write, num_blocks)
        for page in pages:
            page[:] = bytes(BLOCK_BYTES)
        loaded = max(rate(read, num_blocks) for _ in range(REPEATS))
        stats = store.stats()
    return {
        "store_GBps": stored,
        "load_GBps": loaded,
        "ratio": stats.compression_ratio,
        "pack_GBps": stats.compression_rate / 1e9,
        "unpack_GBps": stats.decompression_rate / 1e9,
        "blocks_equal": sum(bytes(page) == block for page in pages),
    }


def rate(move: Callable[[], None], num_blocks: int) -> float:
    start = time.perf_counter()
    move()
    return num_blocks * BLOCK_BYTES / (time.perf_counter() - start) / 1e9


@click.command(help=__doc__)
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), required=True, help="Folder on the disk."
)
@click.option("--blocks", default=1024, show_default=True, help="Number of blocks to store.")
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
def main(folder: Path, blocks: int, commit: str | None) -> None:
    raw_GBps = raw.disk_read_GBps(folder, num_bytes=1 << 30)
    report = raw.head(commit, "python -m tests.stress.compression") | {
        "raw": {"disk_read_GBps": raw_GBps}
    }
    found = {}
    for setting in ("off", "on"):
        with tempfile.TemporaryDirectory(dir=folder) as path:
            found[setting] = measure(Path(path) / "store", blocks, setting)
    click.echo(json.dumps(report | {"blocks": blocks, "block_bytes": BLOCK_BYTES, **found}))
    sys.exit(any(each["blocks_equal"] != GROUP for each in found.values()))


if __name__ == "__main__":
    main()
