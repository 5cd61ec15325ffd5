"""Measures the cost of one step of the engine's thread while queues of every kind are long.

    python -m tests.stress.step_cost --entries 32768

The scheduler and the tiered cache are the real ones. Blocks have only a few bytes and the store's
worker is a fake, so that the work on queues is measured. Each row has the number of entries in one
queue, and the median and longest time of a step with them. Times are processor time of the thread,
so that other processes do not count. That clock still counts interrupts and what the hypervisor
takes away, so each case is measured several times over, with the same blocks, and the least time of
each step counts. The same steps with few entries are listed for comparison. A step that costs more
with more entries delays the next token of every stream.
"""

import gc
import itertools
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
import msgspec
import torch

from tests.fake_store import DAY_S, kept_by
from tests.fake_tier import FakeTier
from tests.fakes import FakeClock
from tests.stress.engine_thread import NoCopies
from tieredkv.bench import raw
from tieredkv.bench.progress import bench_progress
from tieredkv.cache.catalog import Catalog, Entry
from tieredkv.cache.chain import Chain
from tieredkv.cache.device_link import DeviceLink
from tieredkv.cache.pool import BlockPool
from tieredkv.cache.requests import TieredCache
from tieredkv.cache.settings import CacheSettings
from tieredkv.cache.tiers import Tiers
from tieredkv.engine.engine_messages import EngineRequest
from tieredkv.engine.request import Request
from tieredkv.engine.sampler import SamplerState
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.engine.scheduler import Scheduler
from tieredkv.retention import RetentionPolicies
from tieredkv.storage.format.record import Retentions
from tieredkv.storage.messages.engine import StoreCall
from tieredkv.tier import Event, Held, Lent, Restarted, Stored, TouchItem
from tieredkv.types import BlockHash, Progress, tracked

BLOCK_BYTES = 8
PROMPT_BLOCKS = 512
FEW = 1024
ROOT = BlockHash(b"step cost".ljust(32, b"\0"))
RETENTIONS = Retentions(["24h"])
PARAMS = SamplingParams(max_tokens=64, temperature=0.0)

Row = dict[str, Any]
Steps = Iterator[Callable[[], object]]
"""The iterator of a case. It first fills its queue, and then yields each step to be measured."""


class _Worker(FakeTier):
    """A fake worker of a store. It finishes stores only in `write`, and never finishes a load."""

    def __init__(self) -> None:
        super().__init__()
        self.lent: list[Lent] = []
        self.num_lookups = 0
        self._events = deque[Event]()

    def lookup(self, hashes: Sequence[bytes]) -> int:
        self.num_lookups += 1
        return self.num_lookups

    def load(self, pages: Sequence[Lent]) -> None:
        pass

    def store(self, pages: Sequence[Lent]) -> None:
        msgspec.msgpack.encode(StoreCall(list(pages), self.shares))  # the real client does it, too
        self.lent += pages

    def touch(self, items: Sequence[TouchItem]) -> None:
        pass

    def tell(self, event: Event) -> None:
        self._events.append(event)

    def write(self, num_pages: int) -> None:
        done, self.lent = self.lent[:num_pages], self.lent[num_pages:]
        self._events += [Stored(page.page_id, "") for page in done]

    def poll(self) -> list[Event]:
        events = list(self._events)
        self._events.clear()
        return events


class _Engine:
    """A scheduler and a tiered cache with pools of tiny blocks and a fake store."""

    def __init__(
        self, num_blocks: int, *, num_pages: int | None = None, is_write_behind: bool = False
    ) -> None:
        num_pages = num_pages or num_blocks
        device = torch.zeros(num_blocks, BLOCK_BYTES, dtype=torch.uint8)
        host = torch.zeros(num_pages, BLOCK_BYTES, dtype=torch.uint8)
        self.clock, self.worker, self.random = FakeClock(), _Worker(), random.Random(0)
        self.tiers = Tiers(
            device=BlockPool(num_blocks),
            host=BlockPool(num_pages),
            catalog=Catalog(RetentionPolicies()),
            store=self.worker,
            device_link=DeviceLink[Any](NoCopies(device, host)),
            clock=self.clock,
            vram_bytes=BLOCK_BYTES,
            payload_bytes=BLOCK_BYTES,
            settings=CacheSettings(is_write_behind=is_write_behind, device_reserve_blocks=1024),
        )
        self.cache = TieredCache(self.tiers)
        self.worker.tell(Held(is_first=True, is_whole=True))
        self.cache.poll()
        self.scheduler = Scheduler(
            cache=self.cache,
            block_size=16,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            max_num_alone_tokens=8192,
            hash_algo="sha256",
        )

    def step(self) -> None:
        """Do what a step of the engine does in the cache if no request needs anything."""
        self.cache.poll()
        self.cache.pump()

    def chain(self, num_blocks: int) -> list[BlockHash]:
        """Return new random hashes."""
        return [BlockHash(self.random.randbytes(32)) for _ in range(num_blocks)]

    def request_chain(self, num_blocks: int, retention: str = "24h", tenant: bytes = b"") -> Chain:
        """Return a new chain of a request; the cache does not know it yet."""
        return Chain(ROOT, tenant, self.chain(num_blocks), claims=kept_by(retention))

    def compute(self, num_blocks: int, retention: str = "24h", tenant: bytes = b"") -> Chain:
        """Compute a new chain, which stays in use and which the disk does not have."""
        prefix = self.request_chain(num_blocks, retention, tenant)
        for _ in range(100_000):
            if self.cache.admit(prefix, num_blocks):
                break
            self.worker.write(len(self.worker.lent))
            self.step()
        else:
            raise AssertionError("there is no room for a prompt")
        self.cache.complete(prefix, 0, num_blocks)
        return prefix

    def fill(self, num_blocks: int, retention: str = "24h", tenant: bytes = b"") -> None:
        """Compute and release chains of so many blocks in all."""
        for _ in range(num_blocks // PROMPT_BLOCKS):
            self.cache.release(self.compute(PROMPT_BLOCKS, retention, tenant))
            self.step()

    def request(self, number: int, tenant: str = "", num_tokens: int = 64) -> Request:
        """Return a request with a new chain."""
        asked = EngineRequest(
            request_id=str(number),
            prompt_token_ids=list(range(num_tokens)),
            params=PARAMS,
            tenant=tenant,
        )
        prefix = self.request_chain(num_tokens // 16, "in_memory")
        return Request(asked, prefix, SamplerState(PARAMS, 0), max_output_tokens=64)


def _owed_to_a_stuck_worker(entries: int) -> Steps:
    """So many blocks wait to be written behind to disk, and the worker finishes none."""
    engine = _Engine(2 * entries, num_pages=2 * entries, is_write_behind=True)
    engine.fill(entries)
    before = -1
    while (taken := engine.tiers.host.num_cached + len(engine.worker.lent)) != before:
        before = taken
        engine.step()
    while True:
        yield engine.step


def _owed_to_a_busy_worker(entries: int) -> Steps:
    """So many blocks wait to be written behind to disk, and the worker writes 32 a step."""
    engine = _Engine(2 * entries, num_pages=2 * entries, is_write_behind=True)
    engine.fill(entries)
    engine.step()
    while True:
        engine.worker.write(32)
        yield engine.step


def _owed_beside_a_smaller_host(entries: int) -> Steps:
    """As with a busy worker, but host memory holds only a quarter of the blocks."""
    engine = _Engine(2 * entries, num_pages=entries // 4, is_write_behind=True)
    engine.fill(entries)
    engine.step()
    while True:
        engine.worker.write(32)
        yield engine.step


def _noted(entries: int) -> Steps:
    """The cache notes 8,192 computed blocks after others have filled the pool."""
    engine = _Engine(entries, is_write_behind=True)
    engine.fill(entries)
    now = engine.clock.now()
    while True:
        claims = frozenset({"24h"})
        made = [Entry(each, ROOT, ROOT, b"", 0, now, now, claims) for each in engine.chain(8192)]
        yield lambda made=made: engine.cache._demoter.note_computed(made)  # type: ignore[misc]
        while not engine.cache.is_idle:
            engine.worker.write(len(engine.worker.lent))
            engine.step()


def _host_is_full(entries: int) -> Steps:
    """Host memory is full of blocks to be written to disk; a stream takes a block every step."""
    engine = _Engine(entries)
    engine.fill(4 * entries)
    stream = engine.compute(1)

    def step() -> None:
        engine.step()
        engine.cache.extend(stream)

    for _ in range(50):
        step()
    while True:
        engine.worker.write(32)
        yield step


def _nothing_can_go(entries: int) -> Steps:
    """All host memory waits for a worker that finishes nothing, and VRAM has more to demote."""
    engine = _Engine(2 * entries, num_pages=entries)
    engine.fill(entries)
    for _ in range(64):
        engine.cache._demoter.demote(entries)
        engine.step()
    engine.fill(entries // 2)

    def step() -> None:
        engine.cache._demoter.demote(32)
        engine.step()

    while True:
        engine.cache._demoter.note_change()
        yield step


def _late_pages(entries: int) -> Steps:
    """Host memory has as many late pages as it may, and the worker finishes nothing.

    Half of the blocks that pass through it are owed to the disk.
    """
    engine = _Engine(4096, num_pages=entries)
    for _ in range(2 * (entries + 4096) // (2 * PROMPT_BLOCKS)):
        engine.fill(PROMPT_BLOCKS)
        engine.fill(PROMPT_BLOCKS, "in_memory")
    while True:
        engine.cache._demoter.note_change()
        yield engine.step


def _blocks_of_floors(entries: int) -> Steps:
    """A stream wants a block, but every block that could be evicted is in another tenant's floor.

    The floor is the share of a tier that is reserved for a tenant.
    """
    engine = _Engine(entries)
    owner, other = b"owner...", b"other..."
    engine.tiers.shares.give({owner: 1.0})
    engine.fill(entries, "in_memory", owner)
    stream = engine.request_chain(1, "in_memory", other)
    while True:
        yield lambda: engine.cache.extend(stream)


def _passing_through(entries: int) -> Steps:
    """New prompts of 512 blocks each take the place of older blocks in full pools."""
    engine = _Engine(entries)
    engine.fill(4 * entries, "in_memory")
    while True:
        yield lambda: engine.fill(PROMPT_BLOCKS, "in_memory")


def _end_together(entries: int) -> Steps:
    """So many blocks expire at the same moment."""
    while True:
        engine = _Engine(entries)
        engine.fill(entries, "in_memory")
        engine.clock.moment += DAY_S
        for _ in range(8):
            yield engine.step


def _worker_restarts(entries: int) -> Steps:
    """A new worker has replaced one that died."""
    engine = _Engine(entries)
    engine.fill(entries)
    while True:
        engine.worker.tell(Restarted())
        yield engine.step


def _late_reads(entries: int) -> Steps:
    """Requests wait for so many blocks from disk, while other requests end."""
    engine = _Engine(2 * entries, num_pages=64)
    now = engine.clock.now()
    for _ in range(entries // PROMPT_BLOCKS):
        prefix = engine.request_chain(PROMPT_BLOCKS)
        engine.worker.tell(Held.of(dict.fromkeys(prefix.hashes, now + 86_400)))
        engine.step()
        engine.cache.arrive(prefix)
        engine.cache.admit(prefix, PROMPT_BLOCKS)
    while True:
        other = engine.compute(1, "in_memory")

        def step(other: Chain = other) -> None:
            engine.cache.release(other)
            engine.step()

        yield step


def _requests_wait(entries: int) -> Steps:
    """So many requests of one tenant wait. A step cancels one, adds one and takes one to run."""
    yield from _wait_of(entries, num_tenants=1)


def _tenants_wait(entries: int) -> Steps:
    """So many requests of 4,096 tenants wait. A step cancels one, adds one and takes one to run."""
    yield from _wait_of(entries, num_tenants=4096)


def _wait_of(entries: int, num_tenants: int) -> Steps:
    engine = _Engine(4096)
    scheduler, waiting = engine.scheduler, deque[Request]()
    for number in range(entries):
        waiting.append(engine.request(number, str(number % num_tenants)))
        scheduler.waiting.append(waiting[-1])
    for number in itertools.count(entries):
        come, gone = engine.request(number, str(number % num_tenants)), waiting.pop()
        waiting.append(come)

        def step(come: Request = come, gone: Request = gone) -> None:
            scheduler.remove(gone)
            scheduler.add(come)
            scheduler.waiting.check_room("0", 2 * entries)
            scheduler.waiting.take(scheduler.waiting.upcoming()[0])

        yield step


def _lookups_wait(entries: int) -> Steps:
    """So many lookups wait for the disk's answer. A step adds one more request."""
    engine = _Engine(4096)
    for _ in range(entries):
        engine.cache.arrive(engine.request_chain(4))
    while True:
        yield lambda: engine.cache.arrive(engine.request_chain(4))


CASES: dict[str, Callable[[int], Steps]] = {
    "owed to a stuck worker": _owed_to_a_stuck_worker,
    "owed to a busy worker": _owed_to_a_busy_worker,
    "owed beside a smaller host tier": _owed_beside_a_smaller_host,
    "8,192 blocks noted": _noted,
    "host tier full": _host_is_full,
    "host tier stuck": _nothing_can_go,
    "late pages": _late_pages,
    "all of another's floor": _blocks_of_floors,
    "512 blocks passing through": _passing_through,
    "expired together": _end_together,
    "worker restarted": _worker_restarts,
    "reads waiting": _late_reads,
    "requests waiting": _requests_wait,
    "requests of 4,096 tenants waiting": _tenants_wait,
    "lookups waiting": _lookups_wait,
}


def run(progress: Progress, *, entries: int, steps: int, repeats: int, only: str = "") -> list[Row]:
    """Measure so many steps of each case beside so many entries, so many times over."""
    rows = []
    for name, case in tracked(progress, "measuring", list(CASES.items())):
        if only in name:
            few_ms, many_ms = (
                list(map(min, *(_measure(case, count, steps) for _ in range(repeats))))
                for count in (FEW, entries)
            )
            figures = {"median_ms": statistics.median(many_ms), "max_ms": max(many_ms)}
            beside_few = {"few": FEW, "few_median_ms": statistics.median(few_ms)}
            rows.append({"queue": name, "entries": entries, "steps": steps} | figures | beside_few)
    return rows


def _measure(case: Callable[[int], Steps], entries: int, steps: int) -> list[float]:
    """Return the milliseconds of each of so many steps of a case."""
    times_ms, beside = list[float](), case(entries)
    for number in range(steps):
        step = next(beside)
        if not number:  # the engine does the same after its start
            gc.collect()
            gc.freeze()
        start = time.thread_time()
        step()
        times_ms.append(1e3 * (time.thread_time() - start))
    gc.unfreeze()
    return times_ms


@click.command()
@click.option("--entries", default=32_768, show_default=True, help="In each queue.")
@click.option("--steps", default=100, show_default=True, help="Measured steps of each case.")
@click.option("--repeats", default=3, show_default=True, help="Of each case; at least two.")
@click.option("--only", default="", help="Part of the name of the cases to be measured.")
@click.option("--commit", help="Commit to report, for a tree without its history.")
def main(commit: str | None, **options: Any) -> None:
    """Measure the cost of a step of the engine's thread beside long queues; print JSON."""
    head = raw.head(commit, "python -m tests.stress.step_cost")
    click.echo(json.dumps(head | {"rows": run(bench_progress(), **options)}))


if __name__ == "__main__":
    main()
