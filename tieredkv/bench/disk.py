"""`bench disk`: measure the disk tier, and the disk itself in the same run.

Blocks go through the store's worker and lent pages, as in the engine. A block is a random pattern
with the block's number at the start of each 4 KiB. Every block that is loaded is compared, and at
the end all blocks are loaded. Disks drift, so a raw sample is taken before and after each sample of
the store; a ratio compares the sample with the mean of these two. Rows:

    read    loads a random quarter of the blocks, after new ones replaced a random half; `bursts`
            loads as many as half of the pages hold, again and again, while others are stored
    write   stores blocks at capacity, each evicting another; `commit` flushes every group commit
    index   opens a store without payloads and looks up 8,192 hashes at a time
"""

import hashlib
import math
import os
import random
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from tieredkv.bench import raw
from tieredkv.bench.temporary_keys import make_place, temporary_folder, temporary_keys
from tieredkv.clock import Clock
from tieredkv.config import Switch
from tieredkv.errors import ConfigError
from tieredkv.storage.client.client import StoreClient
from tieredkv.storage.extents.files import SegmentFiles
from tieredkv.storage.extents.space import minimum_budget_bytes
from tieredkv.storage.folder.filesystem import Filesystem
from tieredkv.storage.folder.folder import INDEX, SEGMENTS
from tieredkv.storage.format.record import (
    CODEC_RAW,
    Extent,
    Located,
    Retentions,
    extent_bytes_for,
    identity_of,
    payload_checksum,
)
from tieredkv.storage.index.entries import SegmentState
from tieredkv.storage.index.environment import Index
from tieredkv.storage.keys.cipher import encrypt
from tieredkv.storage.keys.layout import PayloadKey
from tieredkv.storage.opening import open_parts
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.store import Store
from tieredkv.tier import Event, Lent, Loaded, LookupDone, Stored
from tieredkv.types import PAGE_ALIGNMENT_BYTES, BlockRecord, Progress, tracked
from tieredkv.units import format_bytes, parse_bytes
from tieredkv.wire.arena import HostArena

ARENA_BYTES = 256 << 20
STAMPED = np.s_[:: PAGE_ALIGNMENT_BYTES // 8]  # words of a block that hold the block's number
MAX_AMPLIFICATION = 1.05  # of the extents asked for: block and header
LOOKUP_HASHES, LOOKUP_CALLS = 8192, 15
INDEX_BYTES, INDEX_PAYLOAD_BYTES, BATCH_BLOCKS, UNBOUNDED_BYTES = 1024, 4096, 10_000, 1 << 40
SYNCS = ("commit", "none")
ROOT = b"bench disk".ljust(32, b"\0")
SAME: dict[str, Any] = {"parent_hash": ROOT, "root": ROOT, "namespace": ROOT, "retention": "24h"}

Row = dict[str, Any]


def run(
    progress: Progress,
    *,
    folder: Path,
    block_bytes: str,
    disk_size: str,
    index_blocks: list[int],
    repeats: int,
    encryption: Switch,
) -> Row:
    """Measure in a temporary folder under `folder`.

    Raises:
        ConfigError: a size is invalid or the disk has too little space; nothing was written.
    """
    size, budget = parse_bytes(block_bytes), parse_bytes(disk_size)
    if size < 1 or size % PAGE_ALIGNMENT_BYTES:
        raise ConfigError(f"`block_bytes` = `{block_bytes}` must be a multiple of 4 KiB")
    if budget < (least := minimum_budget_bytes(size) + 16 * extent_bytes_for(size)):
        raise ConfigError(f"`disk_size` = `{disk_size}` must be at least {format_bytes(least)}")
    make_place(str(folder))
    needed = 2 * budget + sum(index_blocks) * INDEX_BYTES
    if needed > (free := shutil.disk_usage(folder).free):
        what = f"`{folder}` has {format_bytes(free)} free, but {format_bytes(needed)} are needed"
        raise ConfigError(f"{what}\nhint: give a smaller `--disk-size` or fewer `--index-blocks`")
    with (
        closing(HostArena(min(max(64, ARENA_BYTES // size), budget // size // 4), size)) as arena,
        temporary_folder(folder) as made,
    ):
        keys: Row = {"encryption": encryption}
        for name, path in temporary_keys(f"{made}/keys").items():
            keys[name.removeprefix("disk_")] = path
        disk = _Disk(StoreOptions(path=f"{made}/store", budget_bytes=budget, **keys), arena)
        rows = disk.measure_moves(progress, repeats)
        indexes = [disk.measure_index(it) for it in tracked(progress, "looking up", index_blocks)]
    for row in indexes:
        row["growth"] = row["hit_us"] / indexes[0]["hit_us"]
    found = rows[0]["own_amplification"] or rows[0]["amplification"] or 0.0
    if found > MAX_AMPLIFICATION * extent_bytes_for(size) / size:
        what = f"read: the disk read more than {MAX_AMPLIFICATION} times the bytes of the extents"
        disk.problems.append(what)
    block = np.random.default_rng(0).bytes(ARENA_BYTES)  # more than processor caches hold
    limits = {f"{row['part']}_GBps": row["raw_GBps"] for row in reversed(rows)}
    limits = dict(sorted(limits.items()))
    limits["checksum_GBps"] = len(block) / raw.median_s(partial(payload_checksum, block)) / 1e9
    if encryption == "on":
        limits["cipher_GBps"] = len(block) / raw.median_s(partial(_encrypt, block)) / 1e9
    return {"raw": limits, "disk": disk.facts, "rows": rows + indexes, "problems": disk.problems}


class _Disk:
    """Measures stores in a folder; collects `facts` and `problems` for the report."""

    def __init__(self, options: StoreOptions, arena: HostArena) -> None:
        self._options, self._arena, self._folder = options, arena, Path(options.path).parent
        self._random, self._wake, self._num_stored = random.Random(0), threading.Event(), 0
        self._lent, self._faults = dict[int, int](), Counter[str]()
        self._words = np.frombuffer(arena.buffer, np.uint64).reshape(arena.num_pages, -1)
        self._words[:] = np.frombuffer(np.random.default_rng(0).bytes(arena.page_bytes), np.uint64)
        blocks = (options.budget_bytes or 0) // extent_bytes_for(arena.page_bytes)
        counter = raw.block_device(self._folder) or "/proc/PID/io of the worker"
        self.facts: Row = {"blocks": blocks, "block_bytes": arena.page_bytes, "counter": counter}
        self.facts["encryption"] = options.encryption
        self.problems = list[str]()

    def measure_moves(self, progress: Progress, repeats: int) -> list[Row]:
        """Measure reads and writes at capacity, each between two raw samples of the disk."""
        count, options = self.facts["blocks"], self._options
        buffers = [self._arena.page(page) for page in range(self._arena.num_pages)]
        choose = partial(self._random.sample, range(count))
        with closing(raw.RawFile(self._folder, count, buffers)) as file:
            self.facts["raw_is_direct"] = file.is_direct
            self._write(count, "none")
            syncs = tracked(progress, "writing", SYNCS * repeats)
            num_writers = options.writers(is_encrypted=options.encryption == "on")
            writes = _between(
                lambda: file.move_GBps(os.pwritev, choose(count), num_writers),
                (self._write(count, sync) for sync in syncs),
            )
            with closing(self._serve()) as client:
                present = self._present(client)
                dropped = self._random.sample(present, len(present) // 2)
                client.delete([_hash(number) for number in dropped], "bench")
            self._write(len(dropped), "none")
            raw.drop_cached(self._folder)
            with closing(self._serve()) as client:
                present = self._present(client)
                picks = [self._random.sample(present, len(present) // 4) for _ in range(repeats)]
                reads = _between(
                    lambda: file.move_GBps(os.preadv, choose(count // 4), options.num_readers),
                    (self._move(client, it, "load") for it in tracked(progress, "reading", picks)),
                )
                self._move(client, present, "load")
            with closing(self._serve()) as client:
                bursts = _between(
                    lambda: file.move_GBps(os.preadv, choose(count // 4), options.num_readers),
                    (self._burst(client) for _ in tracked(progress, "amid writes", picks)),
                )
        rows = [_row("read", "scattered", reads), _row("read", "bursts", bursts)]
        self.problems += [f"{it} ({num} blocks)" for it, num in sorted(self._faults.items())]
        rows += [_row("write", f"sync {sync}", writes[i::2]) for i, sync in enumerate(SYNCS)]
        if rows[0]["amplification"] is None:
            self.facts["counter"] = "none, because no byte came from a disk"
        return rows

    def measure_index(self, count: int) -> Row:
        """Measure the index of a store of `count` blocks of 4 KiB without payloads."""
        path, size = self._folder / f"index-{count}", min(count, LOOKUP_HASHES)
        options = StoreOptions(path=str(path), budget_bytes=UNBOUNDED_BYTES, sync="none")
        Store(open_parts(options, Clock()), options).close()
        extent_bytes = extent_bytes_for(INDEX_PAYLOAD_BYTES)
        with (
            closing(Index(str(path / INDEX), sync=False, retentions=Retentions(["24h"]))) as index,
            closing(SegmentFiles(str(path / SEGMENTS), Filesystem.explore(str(path)))) as files,
        ):
            files.open(1, extent_bytes, create=True)
            files.truncate(1, count)  # a sparse file, which occupies no space
            with index.writing() as txn:
                txn.put_segment(1, SegmentState(extent_bytes, num_extents=count, num_used=count))
            for first in range(0, count, BATCH_BLOCKS):
                with index.writing() as txn:
                    for number in range(first, min(first + BATCH_BLOCKS, count)):
                        record, extent = _record(number, INDEX_PAYLOAD_BYTES), Extent(1, number)
                        txn.insert(Located(record, extent, INDEX_PAYLOAD_BYTES, ROOT[:16]))
        raw.drop_cached(path)
        picks = [self._random.sample(range(count), size) for _ in range(LOOKUP_CALLS)]
        calls = [[_hash(number) for number in numbers] for numbers in picks]
        misses = [[it[::-1] for it in each] for each in calls]
        start = time.perf_counter()
        with Store(open_parts(options, Clock()), options) as store:
            open_s = time.perf_counter() - start
            cold_us, warm_us = (self._us(store.find, calls, size) for _ in range(2))
            miss_us = self._us(store.find, misses, 0)
        changes = {"path": str(path), "budget_bytes": UNBOUNDED_BYTES, "encryption": "off"}
        with closing(self._serve(**changes)) as client:
            lookup = partial(self._lookup, client)
            _, client_us = (self._us(lookup, calls, size) for _ in range(2))
            client_miss_us = self._us(lookup, misses, 0)
        every_us = zip(warm_us, miss_us, client_us, client_miss_us, strict=True)
        names = ("hit_us", "miss_us", "client_us", "client_miss_us")
        samples = [dict(zip(names, each, strict=True)) for each in every_us]
        firsts = {"first_us": cold_us[0], "first_us_all": cold_us, "open_s": open_s}
        return _row("index", f"{count} blocks", samples) | firsts

    def _us(self, lookup: Callable[..., Any], calls: list[list[bytes]], right: int) -> list[float]:
        """Return the microseconds per hash of each call; report wrong numbers of hits."""
        times = []
        for hashes in calls:
            start = time.perf_counter()
            found = lookup(hashes)
            times.append((time.perf_counter() - start) * 1e6 / len(hashes))
            if len(found) != right:
                found_instead = f"{len(found)} hashes instead of {right}"
                self.problems.append(f"index: a lookup found {found_instead}")
        return times

    def _serve(self, **changes: Any) -> StoreClient:
        """Start the worker of a store."""
        return StoreClient(replace(self._options, **changes), self._arena, wake=self._wake.set)

    def _events(self, client: StoreClient) -> list[Event]:
        """Wait for events of the worker and return them."""
        self._wake.wait()
        self._wake.clear()
        return client.poll()

    def _lookup(self, client: StoreClient, hashes: list[bytes]) -> dict[bytes, bytes]:
        client.lookup(hashes)
        while not (found := [it for it in self._events(client) if isinstance(it, LookupDone)]):
            pass
        return found[0].found

    def _present(self, client: StoreClient) -> list[int]:
        """Return the numbers of the blocks that are stored."""
        hashes = [_hash(number) for number in range(self._num_stored)]
        found = self._lookup(client, hashes)
        return [number for number, block_hash in enumerate(hashes) if block_hash in found]

    def _write(self, count: int, sync: str) -> Row:
        """Store `count` new blocks; return a sample."""
        first, self._num_stored = self._num_stored, self._num_stored + count
        with closing(self._serve(sync=sync)) as client:
            return self._move(client, range(first, self._num_stored), "store")

    def _move(self, client: StoreClient, numbers: Sequence[int], verb: str) -> Row:
        """Store or load blocks as one request does; return a sample."""
        pid, waiting, free = client.pid, deque(numbers), list(range(self._arena.num_pages))
        before = raw.counters(self._folder, pid)
        while waiting or self._lent:
            self._lend(client, waiting, free, verb)
            free += [event.page_id for event in self._returned(client)]
        after, num_bytes = raw.counters(self._folder, pid), len(numbers) * self._arena.page_bytes
        spent = {name: (after[name] - before[name]) / num_bytes for name in after}
        name = "write" if verb == "store" else "read"
        sample = {"amplification": spent[name], "own_amplification": spent[f"own_{name}"]}
        return {"GBps": 1e-9 / spent["s"], "core_s_per_GB": 1e9 * spent["core_s"]} | sample

    def _burst(self, client: StoreClient) -> Row:
        """Load a quarter of the blocks in bursts while new ones are stored; return a sample.

        Half of the pages are for each. A burst begins once as many blocks were stored since the
        last one as it loads. What is loaded is young, so that the new blocks evict none of it.
        """
        size, present = self._arena.num_pages // 2, self._present(client)
        waiting = deque(self._random.sample(present[len(present) // 2 :], len(present) // 4))
        to_load, to_store = list(range(size)), list(range(size, 2 * size))
        num_loaded, num_beside, bursts_s = len(waiting), 0, 0.0
        while waiting:
            num_stored, start = 0, 0.0
            while not start or len(to_load) < size:
                if not start and num_stored >= size:
                    start = time.perf_counter()
                    self._lend(client, waiting, to_load, "load")
                first, self._num_stored = self._num_stored, self._num_stored + len(to_store)
                self._lend(client, deque(range(first, self._num_stored)), to_store, "store")
                for event in self._returned(client):
                    is_load = isinstance(event, Loaded)
                    (to_load if is_load else to_store).append(event.page_id)
                    num_stored += not is_load
                    num_beside += not is_load and start > 0
            bursts_s += time.perf_counter() - start
        while self._lent:
            self._returned(client)
        num_bytes, beside_bytes = (num * self._arena.page_bytes for num in (num_loaded, num_beside))
        return {"GBps": num_bytes / bursts_s / 1e9, "beside_GBps": beside_bytes / bursts_s / 1e9}

    def _lend(self, client: StoreClient, waiting: deque[int], free: list[int], verb: str) -> None:
        """Have the next blocks stored or loaded, as many as there are free pages."""
        pages, is_store = list[Lent](), verb == "store"
        while waiting and free:
            number, page = waiting.popleft(), free.pop()
            self._lent[page] = number
            self._words[page][STAMPED] = number + 1 if is_store else 0
            pages.append(Lent.of(_record(number, self._arena.page_bytes), page))
        if pages:
            (client.store if is_store else client.load)(pages)

    def _returned(self, client: StoreClient) -> list[Loaded | Stored]:
        """Wait for pages that come back, and check them."""
        events = [it for it in self._events(client) if isinstance(it, Loaded | Stored)]
        for event in events:
            words, number = self._words[event.page_id], self._lent.pop(event.page_id)
            is_store = isinstance(event, Stored)
            is_right = is_store or bool(np.all(words[STAMPED] == number + 1))
            if not (event.ok and is_right):
                reason = event.reason or "the bytes are not those that were stored"
                self._faults[f"{'store' if is_store else 'load'}: {reason}"] += 1
        return events


def _encrypt(block: bytes) -> None:
    """Encrypt as much as a block of the bench in one go, as a writer thread does."""
    key = PayloadKey(bytes(8), bytes(32), bytes(36), math.inf)
    known = identity_of(_record(0, len(block)), CODEC_RAW, len(block))
    encrypt(key, known, memoryview(block), memoryview(bytearray(len(block))))


def _between(raw_GBps: Callable[[], float], samples: Iterator[Row]) -> list[Row]:
    """Take samples of the store, each between two raw samples of the disk."""
    taken, raws = list[Row](), [raw_GBps()]
    for sample in samples:
        raws.append(raw_GBps())
        ratio = sample["GBps"] / float(np.mean(raws[-2:]))
        taken.append(sample | {"raw_GBps": raws[-2:], "ratio": ratio})
    return taken


def _row(part: str, case: str, samples: list[Row]) -> Row:
    """Return a row: the median of each figure (None for 0) and, as `NAME_all`, all its samples."""
    every = {name: [sample[name] for sample in samples] for name in samples[0]}
    medians = {key: float(np.median([np.mean(it) for it in every[key]])) or None for key in every}
    return {"part": part, "case": case} | medians | {f"{name}_all": every[name] for name in every}


def _hash(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8)).digest()


def _record(number: int, size_bytes: int) -> BlockRecord:
    now = time.time()
    times: Row = {"computed_at": now, "expires_at": now + 86400, "last_used": now}
    block: Row = {"block_hash": _hash(number), "position": number, "size_bytes": size_bytes}
    return BlockRecord(**SAME, **times, **block)
