"""Measures what a store at capacity costs while more and more namespaces have blocks on disk.

    python -m tests.stress.eviction_cost --dir /nvme

Blocks of as many tenants, or of as many salts of one tenant, fill a store to its budget. Then eight
blocks at a time are stored, so that eight others have to go: for the namespaces in turn, or all for
one that floods the store, while the blocks of the others are the longest unused. Each case
runs with no share of the disk, with a share for one tenant, and with a share for each of them.
Times are processor time of the process, the median of so many stores. Bar: with any number of
namespaces a store costs at most 1.5 times what it costs with one, in the same case.
"""

import json
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import click

from tieredkv.bench import raw
from tieredkv.clock import Clock
from tieredkv.storage.format.planes import aligned_buffer
from tieredkv.storage.opening import open_parts
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.store import Store
from tieredkv.types import TENANT_BYTES, BlockRecord

BLOCK_BYTES = 4096
NUM_AT_ONCE = 8
BAR = 1.5
KINDS = ("tenants", "salts")
SHARES = ("none", "one", "all")
ORDERS = ("in turn", "flood")
DAY_S = 86_400.0

Row = dict[str, Any]


def namespaces_of(kind: str, count: int) -> list[bytes]:
    """Return namespaces of as many tenants, or of as many salts of one tenant."""
    if kind == "salts":
        return [b"T" * TENANT_BYTES + b"%024d" % number for number in range(count)]
    return [b"%08d" % number + b"S" * (32 - TENANT_BYTES) for number in range(count)]


def shares_of(which: str, namespaces: list[bytes]) -> dict[bytes, float]:
    """Return the shares of a case, 0.9 in all where each tenant has one."""
    tenants = list(dict.fromkeys(each[:TENANT_BYTES] for each in namespaces))
    if which == "one":
        return {tenants[0]: 0.5}
    return dict.fromkeys(tenants, 0.9 / len(tenants)) if which == "all" else {}


class Filled:
    """A store at capacity, whose blocks belong to the namespaces in turn."""

    def __init__(self, store: Store, namespaces: list[bytes]) -> None:
        self._store, self._namespaces = store, namespaces
        self._page = aligned_buffer(BLOCK_BYTES)
        self._num_made = 0
        while not store.stats().num_evicted:
            self.put(64)

    def only(self, namespace: bytes) -> None:
        """Store for this namespace alone from now on."""
        self._namespaces = [namespace]

    def put(self, count: int) -> None:
        """Store blocks of the next namespaces."""
        now, first = self._store.parts.clock.now(), self._num_made
        self._num_made += count
        records = [
            BlockRecord(
                block_hash=b"%032d" % number,
                parent_hash=b"P" * 32,
                root=b"R" * 32,
                namespace=self._namespaces[number % len(self._namespaces)],
                position=0,
                size_bytes=BLOCK_BYTES,
                retention="24h",
                computed_at=now,
                expires_at=now + DAY_S,
                last_used=now,
            )
            for number in range(first, first + count)
        ]
        extents = self._store.reserve(records)
        pairs = zip(records, extents, strict=True)
        written = [self._store.write(e, r, self._page) for r, e in pairs if e is not None]
        if len(written) < count or not all(each.is_stored for each in self._store.commit(written)):
            raise RuntimeError(f"of {count} blocks {len(written)} found room")


class Case(NamedTuple):
    """What a row of the result measures."""

    kind: str
    shares: str
    order: str


def measure(case: Case, folder: Path, count: int, num_blocks: int, num_stores: int) -> Row:
    """Measure one case in a new store of about `num_blocks` blocks of `count` namespaces."""
    budget_bytes = num_blocks * (2 * BLOCK_BYTES + 1200)
    namespaces = namespaces_of(case.kind, count)
    options = StoreOptions(path=str(folder), budget_bytes=budget_bytes, sync="none")
    with Store(open_parts(options, Clock()), options) as store:
        store.keep_shares(shares_of(case.shares, namespaces))
        filled = Filled(store, namespaces)
        if case.order == "flood":
            filled.only(namespaces[-1])
        for _ in range(num_stores // 4):
            filled.put(NUM_AT_ONCE)
        took_ms = []
        for _ in range(num_stores):
            begin = time.process_time()
            filled.put(NUM_AT_ONCE)
            took_ms.append(1e3 * (time.process_time() - begin))
        p50_ms = round(statistics.median(took_ms), 3)
        row = {"namespaces": count, "blocks": store.stats().blocks, "p50_ms": p50_ms}
        return case._asdict() | row


@click.command()
@click.option("--dir", "folder", default=tempfile.gettempdir(), help="Folder for the stores.")
@click.option("--namespaces", default="540,5400", show_default=True, help="Compared with one.")
@click.option("--blocks", default=8000, show_default=True, help="About how many fit into a store.")
@click.option("--stores", default=200, show_default=True, help="How many stores are measured.")
@click.option("--commit", help="Commit to report, for a tree without its history.")
def main(folder: str, namespaces: str, blocks: int, stores: int, commit: str | None) -> None:
    """Measure what a store at capacity costs with many namespaces; print JSON."""
    rows = []
    for case in map(Case, *zip(*product(KINDS, SHARES, ORDERS), strict=True)):
        one_ms = 0.0
        for count in (1, *map(int, namespaces.split(","))):
            with tempfile.TemporaryDirectory(prefix="tieredkv-bench-", dir=folder) as name:
                row = measure(case, Path(name, "s"), count, blocks, stores)
            one_ms = one_ms or row["p50_ms"]
            rows.append(row | {"x": round(row["p50_ms"] / one_ms, 2)})
            click.echo(json.dumps(rows[-1]), err=True)
    head = raw.head(commit, "python -m tests.stress.eviction_cost")
    is_met = all(row["x"] <= BAR for row in rows)
    click.echo(json.dumps(head | {"bar": BAR, "is_met": is_met, "rows": rows}))


if __name__ == "__main__":
    main()
