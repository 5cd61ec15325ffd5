"""Measures how long the operator's commands take on a store of a million small blocks.

\b
    python -m tests.stress.many_blocks --dir /nvme --blocks 1000000

Ten tenants have conversations, and those of one tenant share their first 64 blocks. The store is
filled in this process. Then a worker serves it, and each command runs in a process of its own, as
an operator would run it. Meanwhile this process looks 256 blocks up again and again, one of them
beside the verbs with `quiet` in their names, and stores one block of another tenant at a time, and
measures how long each takes. A third process wakes up every 10 ms, as an engine does for each
token; `gap_ms` are the times between.
`cpu_s` is what a command and the worker took of the processor, and `verb_MiB` the memory that the
command held at most. The result is printed as JSON. A million blocks need 10 GB.
"""

import hashlib
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import numpy as np

from tieredkv.bench import raw
from tieredkv.clock import Clock
from tieredkv.storage.client.client import StoreClient
from tieredkv.storage.format.planes import aligned_buffer
from tieredkv.storage.opening import open_parts
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.store import Store
from tieredkv.tier import ControlRequest, Lent, LookupDone, Stored
from tieredkv.types import BlockRecord
from tieredkv.wire.arena import HostArena

GROUP, WRITERS, NUM_TENANTS, SHARED_BLOCKS = 64, 8, 10, 64
EXTENT_BYTES = 8192
FILTERED = ("--filter", "idle>30m", "--sort", "-size", "--limit", "20")


def records(num_blocks: int, chain_length: int, now: float) -> Iterator[BlockRecord]:
    """Yield the records of conversations; those of one tenant share their first blocks."""
    ages = itertools.count()

    def record(parent: bytes, name: str, tenant: int, position: int) -> BlockRecord:
        used = now - 3600 + 3600 * next(ages) / num_blocks
        return BlockRecord(
            block_hash=hashlib.sha256(parent + name.encode()).digest(),
            parent_hash=parent,
            root=b"R" * 32,
            namespace=hashlib.sha256(b"tenant%d" % tenant).digest(),
            position=position,
            size_bytes=4096,
            retention="24h",
            computed_at=used,
            expires_at=used + 86_400,
            last_used=used,
        )

    num_made, heads = 0, dict[int, bytes]()
    for tenant in range(NUM_TENANTS):
        heads[tenant] = b"R" * 32
        for position in range(SHARED_BLOCKS):
            made = record(heads[tenant], f"{tenant}", tenant, position)
            heads[tenant] = made.block_hash
            num_made += 1
            yield made
    for chain in itertools.count():
        tenant = chain % NUM_TENANTS
        parent = heads[tenant]
        for position in range(chain_length):
            if num_made == num_blocks:
                return
            made = record(parent, f"{chain}", tenant, SHARED_BLOCKS + position)
            parent = made.block_hash
            num_made += 1
            yield made


def build(folder: Path, num_blocks: int, chain_length: int) -> list[dict[str, Any]]:
    """Fill a store as its worker does; return the blocks per second of each tenth."""
    options = StoreOptions(
        path=str(folder), budget_bytes=int(1.5 * num_blocks * EXTENT_BYTES) + (1 << 30), sync="none"
    )
    pages = [aligned_buffer(4096) for _ in range(GROUP)]
    for number, page in enumerate(pages):
        page[:] = hashlib.shake_128(b"%d" % number).digest(4096)
    rates: list[dict[str, Any]] = []
    start, num_stored = time.perf_counter(), 0
    all_records = records(num_blocks, chain_length, time.time())
    with Store(open_parts(options, Clock()), options) as store, ThreadPoolExecutor(WRITERS) as pool:
        while some := list(itertools.islice(all_records, GROUP)):
            extents = store.reserve(some)
            assert None not in extents
            outcomes = store.commit(list(pool.map(store.write, extents, some, pages)))
            num_stored += sum(outcome.is_stored for outcome in outcomes)
            if num_stored * 10 // num_blocks > len(rates):
                seconds, start = time.perf_counter() - start, time.perf_counter()
                rates.append({"blocks": num_stored, "blocks_per_s": num_blocks / 10 / seconds})
    return rates


class Beside:
    """Looks up the same blocks again and again, and stores others, as an engine does.

    Args:
        client: of the store.
        arena: lends the page of the block that is stored.
        hashes: blocks that are looked up.
    """

    def __init__(self, client: StoreClient, arena: HostArena, hashes: list[bytes]) -> None:
        self._client, self._hashes = client, hashes
        arena.page(0)[:] = bytes(4096)
        self._is_over = threading.Event()
        self._lookup_ms, self._store_ms, self._gap_ms = list[float](), list[float](), list[float]()
        self._began_at, self._num_stored, self._has_found = -1.0, 0, False
        self._ticking = subprocess.Popen([sys.executable, "-c", TICK], stdout=subprocess.PIPE)
        self._threads = [threading.Thread(target=it) for it in (self._run, self._hear_ticks)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            if self._began_at < 0:
                self._store()
            start, self._has_found = time.perf_counter(), False
            self._client.lookup(self._hashes)
            while not self._has_found:
                self._poll()
                time.sleep(0.0002)
            self._lookup_ms.append(1e3 * (time.perf_counter() - start))
            until = start + 0.01
            while time.perf_counter() < until:
                self._poll()
                time.sleep(0.001)

    def _store(self) -> None:
        self._num_stored += 1
        self._began_at, now = time.perf_counter(), time.time()
        record = BlockRecord(
            block_hash=hashlib.sha256(b"beside %d" % self._num_stored).digest(),
            parent_hash=b"R" * 32,
            root=b"R" * 32,
            namespace=b"B" * 32,
            position=0,
            size_bytes=4096,
            retention="24h",
            computed_at=now,
            expires_at=now + 86_400,
            last_used=now,
        )
        self._client.store([Lent.of(record, 0)])

    def _poll(self) -> None:
        for event in self._client.poll():
            match event:
                case ControlRequest(id):
                    self._client.reply(id, {"evicted_blocks": 0, "freed_bytes": 0})
                case LookupDone():
                    self._has_found = True
                case Stored():
                    self._store_ms.append(1e3 * (time.perf_counter() - self._began_at))
                    self._began_at = -1.0

    def _hear_ticks(self) -> None:
        assert self._ticking.stdout is not None
        for line in self._ticking.stdout:
            self._gap_ms.append(float(line))

    def taken_ms(self) -> dict[str, dict[str, float]]:
        """Return percentiles of the times since the last call."""
        taken = self._lookup_ms, self._store_ms, self._gap_ms
        self._lookup_ms, self._store_ms, self._gap_ms = [], [], []
        return dict(zip(("lookup_ms", "store_ms", "gap_ms"), map(percentiles, taken), strict=True))

    def close(self) -> None:
        self._is_over.set()
        self._ticking.kill()
        self._ticking.wait()
        for thread in self._threads:
            thread.join()


TICK = """
import time
last = time.perf_counter()
while True:
    time.sleep(0.01)
    now = time.perf_counter()
    print(1e3 * (now - last), flush=True)
    last = now
"""


def percentiles(taken: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(taken, [50, 99]) if taken else (0.0, 0.0)
    return {"n": len(taken), "p50": float(p50), "p99": float(p99), "max": max(taken, default=0)}


def memory_MiB(pid: int) -> dict[str, float]:
    """Return the resident memory of a process: its own, and that of mapped files (the index)."""
    rows = (row.split() for row in Path(f"/proc/{pid}/status").read_text().splitlines())
    sizes = {row[0]: int(row[1]) / 1024 for row in rows if row[0] in ("RssAnon:", "RssFile:")}
    return {"own": sizes["RssAnon:"], "files": sizes["RssFile:"]}


def used_s(worker: int | None) -> float:
    """Return the processor time of all children that have ended, and of a worker, so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = 0
    if worker is not None:
        stat = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()
        ticks = int(stat[11]) + int(stat[12])
    return used.ru_utime + used.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def run(
    folder: Path, *words: str, beside: Beside | None = None, worker: int | None = None
) -> dict[str, Any]:
    """Run a verb as an operator does: how long it took, its answer, and what was done beside it."""
    command = [sys.executable, "-P", "-m", "tieredkv", *words, "--disk-dir", str(folder), "--json"]
    start, used = time.perf_counter(), used_s(worker)
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdout=out)
        first_s, most = None, 0.0
        while process.poll() is None:
            if first_s is None and os.fstat(out.fileno()).st_size:
                first_s = time.perf_counter() - start
            with suppress(OSError, KeyError):  # it ends just now
                most = max(most, sum(memory_MiB(process.pid).values()))
            time.sleep(0.01)
        seconds, cpu_s = time.perf_counter() - start, used_s(worker) - used
        # Before the answer is decoded, since that holds up the thread that looks blocks up.
        times_beside = {} if beside is None else beside.taken_ms()
        out.seek(0)
        answer = json.loads(out.read())
    chains, blocks = answer.pop("chains", None), answer.pop("chain", None)
    times = {"seconds": seconds, "cpu_s": cpu_s, "first_output_s": first_s, "verb_MiB": most}
    found = times | {"exit": process.returncode} | times_beside
    if blocks is not None:
        return found | {"blocks": len(blocks)}
    if chains is not None:
        return found | {"chains": len(chains), "ids": [each["id"] for each in chains[:2000]]}
    return found | {k: v for k, v in answer.items() if isinstance(v, int | dict) and k != "disk"}


@contextmanager
def serving(folder: Path) -> Iterator[tuple[StoreClient, HostArena, dict[str, Any]]]:
    """Serve the store by a worker; yield its client and arena, and its start time and memory."""
    arena, start = HostArena(64, 4096), time.perf_counter()
    client = StoreClient(StoreOptions(path=str(folder), sync="none"), arena)
    seconds = time.perf_counter() - start
    assert client.pid is not None
    with closing(arena), closing(client):
        yield client, arena, {"seconds": seconds, "memory_MiB": memory_MiB(client.pid)}


Measuring = Callable[..., dict[str, Any]]
"""Runs a verb, given a name of its figures and its words, and reports them; see `run`."""


@contextmanager
def measuring_live(
    folder: Path, report: dict[str, Any], name: str, num_looked_up: int = 256
) -> Iterator[Measuring]:
    """Serve the store, with lookups and stores beside all verbs; report the start under a name."""
    made = itertools.islice(records(2000, 20, 0.0), num_looked_up)
    some = [record.block_hash for record in made]
    with (
        serving(folder) as (client, arena, report[name]),
        closing(Beside(client, arena, some)) as beside,
    ):
        pid = client.pid
        assert pid is not None

        def live(name: str, *words: str) -> dict[str, Any]:
            beside.taken_ms()
            found = run(folder, *words, beside=beside, worker=pid)
            found |= {"worker_MiB": memory_MiB(pid)}
            report[name] = {key: value for key, value in found.items() if key != "ids"}
            click.echo(f"{name}: {report[name]}", err=True)
            return found

        time.sleep(5)
        report[f"alone_after_{name}"] = beside.taken_ms()
        yield live


def measure(folder: Path, *, verifies: bool) -> dict[str, Any]:
    """Measure commands on the served and on the stopped store, and the rebuilding of its index."""
    report: dict[str, Any] = {}
    with measuring_live(folder, report, "quiet_restart", num_looked_up=1) as live:
        for name in ("first", "second"):
            live(f"ls_first_20_quiet_{name}", "ls", "--limit", "20")
    with measuring_live(folder, report, "restart") as live:
        live("df_live", "df")
        live("df_verbose_live", "df", "-v")
        live("ls_first_20_live", "ls", "--limit", "20")
        ids = live("ls_live", "ls")["ids"]
        live("ls_filter_live", "ls", *FILTERED)
        live("inspect_live", "inspect", ids[0])
        live("inspect_following_live", "inspect", ids[0], "--following")
        live("prune_dry_live", "prune", "--dry-run")
        if verifies:
            live("verify_live", "verify")

    def stopped(name: str, *words: str) -> None:
        report[name] = run(folder, *words)
        report[name].pop("ids", None)
        click.echo(f"{name}: {report[name]}", err=True)

    stopped("df_stopped", "df")
    stopped("df_verbose_stopped", "df", "-v")
    stopped("ls_first_20_stopped", "ls", "--limit", "20")
    stopped("ls_stopped", "ls")
    stopped("ls_filter_stopped", "ls", *FILTERED)
    stopped("inspect_stopped", "inspect", ids[-1])
    stopped("prune_dry_stopped", "prune", "--dry-run")
    with measuring_live(folder, report, "second_restart") as live:
        live("evict_1_id_live", "evict", "-y", ids[0])
        live("evict_1000_ids_live", "evict", "-y", *ids[1:1001])
        live("evict_filter_live", "evict", "-y", "--filter", "idle>50m")
        live("evict_older_live", "evict", "-y", "--older-than", "30m")
        tenant = hashlib.sha256(b"tenant0").hexdigest()
        live("evict_namespace_live", "evict", "-y", "--ns", tenant)
    shutil.rmtree(folder / "index")
    with serving(folder) as (client, _, start):
        report["index_remade"] = start | {"blocks": client.stats().blocks}
    # The first blocks of each tenant, which all others follow, were among the oldest.
    stopped("prune_stopped", "prune", "-y")
    with measuring_live(folder, report, "third_restart") as live:
        live("evict_all_live", "evict", "-y", "--all")
    return report


@click.command(help=__doc__)
@click.option(
    "--dir", "where", type=click.Path(path_type=Path), required=True, help="Folder on the disk."
)
@click.option("--blocks", default=1_000_000, show_default=True, help="Number of blocks to store.")
@click.option("--chain-length", default=20, show_default=True, help="Blocks of a conversation.")
@click.option("--verify/--no-verify", default=True, show_default=True, help="Measure `verify` too.")
@click.option("--commit", help="Commit to report, if the source tree has no git history.")
def main(where: Path, blocks: int, chain_length: int, verify: bool, commit: str | None) -> None:
    report = raw.head(commit, "python -m tests.stress.many_blocks")
    report |= {"blocks": blocks, "chain_length": chain_length, "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(dir=where) as path:
        folder = Path(path) / "store"
        report["stored"] = build(folder, blocks, chain_length)
        click.echo(f"{report['stored']}", err=True)
        report |= measure(folder, verifies=verify)
    click.echo(json.dumps(report))


if __name__ == "__main__":
    main()
