"""Measures what an operator's verbs cost on a store of a million blocks.

python -m tests.stress.many_blocks --dir /nvme --blocks 1000000 --json result.json
"""

import hashlib
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tieredkv.clock import Clock
from tieredkv.storage.compression import aligned_buffer
from tieredkv.storage.lmdb_store import BlockStore
from tieredkv.storage.worker_messages import StoreOptions
from tieredkv.types import BlockRecord

GROUP, WRITERS, NUM_TENANTS, SHARED_BLOCKS = 64, 8, 10, 64
SLOT_BYTES = 8192


def records(num_blocks: int, chain_length: int, now: float) -> Iterator[BlockRecord]:
    """Conversations of tenants; those of one tenant go on from the same blocks."""
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
    """Fill a store, as its worker does; blocks a second of each tenth."""
    options = StoreOptions(
        path=str(folder), budget_bytes=int(1.5 * num_blocks * SLOT_BYTES) + (1 << 30), sync="none"
    )
    pages = [aligned_buffer(4096) for _ in range(GROUP)]
    for number, page in enumerate(pages):
        page[:] = hashlib.shake_128(b"%d" % number).digest(4096)
    rates: list[dict[str, Any]] = []
    start, num_stored = time.perf_counter(), 0
    all_records = records(num_blocks, chain_length, time.time())
    with BlockStore.open(options, Clock()) as store, ThreadPoolExecutor(WRITERS) as pool:
        while some := list(itertools.islice(all_records, GROUP)):
            slots = store.reserve_many(some)
            assert None not in slots
            num_stored += sum(store.commit(list(pool.map(store.write_payload, slots, some, pages))))
            if num_stored * 10 // num_blocks > len(rates):
                seconds, start = time.perf_counter() - start, time.perf_counter()
                rates.append({"blocks": num_stored, "blocks_per_s": num_blocks / 10 / seconds})
    return rates


if __name__ == "__main__":
    import sys

    build(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
