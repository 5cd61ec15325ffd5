"""Measures what it costs that the engine knows which blocks the disk has.

    python -m tests.stress.presence_cost --dir /scratch

A store is made whose index knows so many blocks that were never written. Then, in this process,
the blocks are told as a worker tells them, decoded as the client of an engine does, and noted in
the engine's table. Times are processor time: of a worker's index thread, of the client's thread and
of the engine's thread, each in all and for the longest piece. Bytes are those on the socket, and
those of the table. Then chains of 4,096 blocks are looked up that nobody has looked up before, and
blocks are stored and deleted.
"""

import hashlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import click
import msgspec

from tieredkv.bench import raw
from tieredkv.cache.presence import Presence
from tieredkv.clock import Clock
from tieredkv.storage.format.record import Extent, Located
from tieredkv.storage.index.entries import SegmentState
from tieredkv.storage.keys.names import Names
from tieredkv.storage.opening import open_parts
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.store import Store
from tieredkv.storage.worker import telling
from tieredkv.storage.worker.fault_log import FaultLog
from tieredkv.storage.worker.loop import Loop
from tieredkv.tier import Gone, Held
from tieredkv.types import BlockRecord

EXTENT_BYTES, CHAIN_BLOCKS, NUM_CHAINS = 8192, 4096, 20
BATCH = 100_000
LOOKUP_BAR_MS = 1.0

P = ParamSpec("P")
Result = TypeVar("Result")


class Spent(NamedTuple):
    """Processor seconds of some calls, in all and of the longest one."""

    seconds: float
    longest_ms: float
    calls: int

    @classmethod
    def of(cls, spent: list[float]) -> "Spent":
        return cls(round(sum(spent), 4), round(1e3 * max(spent, default=0.0), 3), len(spent))


def hash_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def records(num_blocks: int, now: float) -> Iterator[BlockRecord]:
    """Yield the records of blocks in the order of their hashes, which an index takes fastest."""
    for number, block_hash in enumerate(sorted(map(hash_of, range(num_blocks)))):
        yield BlockRecord(
            block_hash=block_hash,
            parent_hash=b"R" * 32,
            root=b"R" * 32,
            namespace=b"N" * 32,
            position=0,
            size_bytes=4096,
            retention="24h",
            computed_at=now,
            expires_at=now + 80_000 + number / num_blocks,
            last_used=now,
        )


def fill(store: Store, num_blocks: int) -> None:
    """Have the index know blocks, whose bytes were never written."""
    index, made = store.parts.index, records(num_blocks, time.time())
    with index.writing() as txn:
        txn.put_segment(1, SegmentState(EXTENT_BYTES, num_blocks, num_blocks))
        txn.meta.next_segment = 2
    numbers = iter(range(num_blocks))
    while some := list(islice(made, BATCH)):
        with index.writing() as txn:
            for record in some:
                txn.insert(Located(record, Extent(1, next(numbers)), 4096, bytes(16)))


def timed(spent: list[float], call: Callable[P, Result], *args: P.args, **kw: P.kwargs) -> Result:
    start = time.thread_time()
    result = call(*args, **kw)
    spent.append(time.thread_time() - start)
    return result


def tell(store: Store) -> tuple[dict[str, Any], Presence]:
    """Tell all blocks; return the figures, and the table that comes of it."""
    told, sent = list[Held | Gone](), 0
    telling._PAUSES = 0
    teller = telling.Telling(store, Loop(), FaultLog(), lambda: True, told.append, is_on=True)
    decoder, table, names = msgspec.msgpack.Decoder(Held), Presence(), Names()

    def hear(data: bytes) -> Held:
        held = decoder.decode(data)
        return msgspec.structs.replace(held, fingerprints=names.fingerprints(held.fingerprints))

    worker, front, client, engine = (list[float]() for _ in range(4))
    while not table.is_whole:
        timed(worker, teller.step)
        while told:
            piece = told.pop()
            data = timed(front, msgspec.msgpack.encode, piece)
            sent += len(data)
            held = timed(client, hear, data)
            timed(engine, table.take, held)
    threads = {"index": worker, "front": front, "client": client, "engine": engine}
    spent = {f"{name}_thread": Spent.of(each)._asdict() for name, each in threads.items()}
    return {"sent_bytes": sent} | spent, table


def look_up(table: Presence, num_blocks: int) -> dict[str, Any]:
    """Look up chains that are there and chains that are not."""
    found, generator = {}, random.Random(1)
    for is_there, among in (True, num_blocks), (False, sys.maxsize):
        spent = list[float]()
        for _ in range(NUM_CHAINS):
            chain = [hash_of(generator.randrange(among)) for _ in range(CHAIN_BLOCKS)]
            has = timed(spent, table.has, chain, time.time())
            assert has.all() == has.any() == is_there
        ms = sorted(round(1e3 * each, 3) for each in spent)
        name = "present" if is_there else "absent"
        found[name] = {"median_ms": ms[len(ms) // 2], "longest_ms": ms[-1]}
    return found


def change(table: Presence, num_blocks: int) -> dict[str, Any]:
    """Have a hundredth of the blocks go and others come, 64 at a time as the worker tells it."""
    come, go, second = list[float](), list[float](), time.time() + 1000
    for first in range(0, max(64, num_blocks // 100), 64):
        new = {hash_of(2 * num_blocks + n): second for n in range(first, first + 64)}
        timed(come, table.take, Held.of(new))
        old = [hash_of(n) for n in range(first, min(num_blocks, first + 64))]
        timed(go, table.discard, old)
    return {"come": Spent.of(come)._asdict(), "go": Spent.of(go)._asdict()}


def measure(folder: Path, num_blocks: int) -> dict[str, Any]:
    options = StoreOptions(path=str(folder), budget_bytes=1 << 42, sync="none", tells_blocks=True)
    with Store(open_parts(options, Clock()), options) as store:
        fill(store, num_blocks)
        figures, table = tell(store)
        assert len(table) == num_blocks, len(table)
        figures |= {
            "table_bytes": table.num_bytes,
            "table_bytes_a_block": round(table.num_bytes / num_blocks, 2),
            "lookup_of_4096": look_up(table, num_blocks),
            "changes_of_64": change(table, num_blocks),
        }
    return figures


@click.command(help=__doc__)
@click.option("--dir", "where", type=click.Path(path_type=Path), help="Folder for the index.")
@click.option("--blocks", default=10_000_000, show_default=True)
@click.option("--commit", help="Commit to report, for a tree without its history.")
def main(where: Path | None, blocks: int, commit: str | None) -> None:
    report = raw.head(commit, "python -m tests.stress.presence_cost") | {"blocks": blocks}
    with tempfile.TemporaryDirectory(dir=where) as path:
        report |= measure(Path(path) / "store", blocks)
    found = report["lookup_of_4096"].values()
    report["is_met"] = all(each["median_ms"] < LOOKUP_BAR_MS for each in found)
    click.echo(json.dumps(report))


if __name__ == "__main__":
    main()
