"""A tiered cache over real memory, with a clock, a disk store and copies that a test controls.

Each block has one right content, which is made from its hash, and memory is filled with poison when
a block is evicted. So the next `Rig.check` detects bytes in the wrong place.
"""

import hashlib
import itertools
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch

from tests.fake_link import FakeDeviceLink
from tests.fake_tier import FakeTier
from tests.fakes import FakeClock
from tests.waiting import wait_until
from tieredkv.cache.block import Block, Content
from tieredkv.cache.catalog import Catalog, Entry
from tieredkv.cache.chain import BlockClaim, Chain
from tieredkv.cache.disk_link import EARLY_SHARE
from tieredkv.cache.operations import ChooseBlock
from tieredkv.cache.pool import BlockPool, Taken
from tieredkv.cache.requests import RequestProgress, TieredCache
from tieredkv.cache.row import State
from tieredkv.cache.settings import CacheSettings
from tieredkv.cache.tiers import Tiers
from tieredkv.clock import Clock
from tieredkv.config import Restore
from tieredkv.pieces import whole
from tieredkv.retention import IN_MEMORY, TWENTY_FOUR_HOURS, RetentionPolicies, RetentionPolicy
from tieredkv.tier import (
    BlockLife,
    Event,
    Gone,
    Held,
    Lent,
    Loaded,
    LookupDone,
    Restarted,
    Stored,
    TierState,
    TouchItem,
)
from tieredkv.types import BlockHash, BlockRecord, Tier

BLOCK_BYTES = 64
POISON = 0xEE
DAY_S = 86_400.0


def root_of(name: str) -> BlockHash:
    """Return a made-up root for a chain."""
    return BlockHash(hashlib.sha256(f"root {name}".encode()).digest())


def chain_of(name: str, length: int) -> list[BlockHash]:
    """Return made-up hashes for a chain, head first."""
    hashes, parent = [], root_of(name)
    for _ in range(length):
        parent = BlockHash(hashlib.sha256(parent).digest())
        hashes.append(parent)
    return hashes


def tokens_of(block_hash: bytes, block_size: int) -> "array[int]":
    """Return made-up tokens of a block."""
    return array("I", hashlib.shake_128(b"tokens" + block_hash).digest(4 * block_size))


def kept_by(retention: str) -> list[BlockClaim]:
    """Return the claims of a request with this retention for all of its blocks."""
    return [BlockClaim(sys.maxsize, frozenset({retention}))]


def payload_of(block_hash: bytes) -> bytes:
    """Return the one right content of a block."""
    return hashlib.shake_128(block_hash).digest(BLOCK_BYTES)


def stored_chain(name: str, length: int, at: float, retention: str) -> list[BlockRecord]:
    """Return the records of a chain that was computed, and last used, at some time."""
    hashes = [root_of(name), *chain_of(name, length)]
    return [
        BlockRecord(
            block_hash=block_hash,
            parent_hash=parent,
            root=root_of(name),
            namespace=b"ns",
            position=position,
            size_bytes=BLOCK_BYTES,
            retention=retention,
            computed_at=at,
            expires_at=at + DAY_S,
            last_used=at,
        )
        for position, (parent, block_hash) in enumerate(pairwise(hashes))
    ]


@dataclass(slots=True)
class Job:
    """One page lent to the store, to write a block from or to read it into."""

    page: Lent
    is_store: bool

    @property
    def block_hash(self) -> BlockHash:
        """Hash of the block that the page holds or will hold."""
        return BlockHash(self.page.block_hash)


class FakeStore(FakeTier):
    """The disk tier as a dict. It accesses a page only at the very end of the page's loan.

    Attributes:
        blocks: The blocks on disk, each with its record and bytes.
        told: What the next `poll` returns, besides jobs that it ends.
        is_held: Whether jobs stay open, as with a worker that was stopped by a signal.
        is_down: Whether lookups miss and jobs fail at once.
        reason: Why all jobs fail; empty while they succeed.
        tells_gone: Whether it tells of blocks that leave it.
        tells_held: Whether it tells of blocks that it has; see `tell_all`.
        asked, loaded, stored, touched, deleted: What the cache has asked for, in order.
    """

    def __init__(self, arena: torch.Tensor, clock: Clock) -> None:
        super().__init__()
        self._memory = arena
        self._clock = clock
        self._numbers = itertools.count(1)
        self.told: list[Event] = []
        self.lookups: list[tuple[int, list[bytes]]] = []
        self.jobs: list[Job] = []
        self.blocks: dict[BlockHash, tuple[BlockRecord, bytes]] = {}
        self.is_held = False
        self.is_down = False
        self.reason = ""
        self.tells_gone = self.tells_held = False
        self.asked: list[bytes] = []
        self.loaded: list[BlockHash] = []
        self.stored: list[BlockHash] = []
        self.touched: list[TouchItem] = []
        self.deleted: list[BlockHash] = []

    def lookup(self, hashes: Sequence[bytes]) -> int:
        job = next(self._numbers)
        self.asked.extend(hashes)
        self.lookups.append((job, list(hashes)))
        return job

    def load(self, pages: Sequence[Lent]) -> None:
        self.loaded.extend(BlockHash(page.block_hash) for page in pages)
        self._open_jobs(pages, is_store=False)

    def store(self, pages: Sequence[Lent]) -> None:
        for page in pages:
            assert page.life is not None and page.life.retention != "in_memory", page
            assert page.life.expires_at <= page.life.computed_at + DAY_S, page
            self.stored.append(BlockHash(page.block_hash))
        self._open_jobs(pages, is_store=True)

    def touch(self, items: Sequence[TouchItem]) -> None:
        self.touched.extend(items)

    def delete(self, hashes: Sequence[bytes], reason: str) -> None:
        for block_hash in hashes:
            self.deleted.append(BlockHash(block_hash))
        self.lose(hashes, reason)

    def lose(self, hashes: Iterable[bytes], reason: str = "capacity") -> None:
        """Drop blocks, as an eviction for room does."""
        gone = [each for each in map(BlockHash, hashes) if self.blocks.pop(each, None)]
        if gone and self.tells_gone:
            self.told.append(Gone([*gone], reason, len(gone) * BLOCK_BYTES))

    @property
    def pending_pages(self) -> frozenset[int]:
        return frozenset(job.page.page_id for job in self.jobs)

    def poll(self) -> list[Event]:
        if not self.is_held:
            while self.lookups:
                self.answer(0)
            while self.jobs:
                self.complete(0)
        done, self.told = self.told, []
        return done

    def answer(self, index: int) -> None:
        """Answer the lookup at `index`."""
        job, hashes = self.lookups.pop(index)
        found = {}
        for block_hash in hashes:
            record, _ = self.blocks.get(BlockHash(block_hash), (None, b""))
            if record is not None and record.expires_at > self._clock.now() and not self.is_down:
                found[block_hash] = self.found(record)
        self.told.append(LookupDone(job, found))

    def complete(
        self, index: int, *, reason: str = "", is_held_back: bool = False, written_at: float = 0.0
    ) -> None:
        """End the loan at `index`; it fails if there is a reason.

        Args:
            index: of the job in `jobs`.
            reason: why it fails.
            is_held_back: whether a write counts as delayed by reads.
            written_at: when a write counts as having ended; 0.0 if nothing was written.
        """
        job = self.jobs.pop(index)
        page_id, block_hash = job.page.page_id, job.block_hash
        reason = reason or ("worker_down" if self.is_down else self.reason)
        page = self._memory[page_id].numpy()
        if job.is_store:
            payload = page.tobytes()
            assert payload == payload_of(block_hash), "a page on loan was reused"
            if not reason:
                self.blocks[block_hash] = job.page.record, payload
                self._tell_held(job.page.record)
            self.told.append(Stored(page_id, reason, is_held_back, written_at))
            return
        record, payload = self.blocks.get(block_hash, (None, b""))
        if record is None:
            reason = reason or "missing"
        # A failed read may leave any bytes in the page.
        page[:] = POISON if reason else list(payload)
        life = BlockLife.of(record) if record is not None and not reason else None
        self.told.append(Loaded(page_id, reason, life, time.monotonic()))

    def tell_all(self, *, is_whole: bool = True) -> None:
        """Tell all blocks, and from now on those that come and go."""
        self.tells_gone = self.tells_held = True
        self.told.append(Held(is_first=True))
        self._tell_held(*(record for record, _ in self.blocks.values()))
        self.told.append(Held(is_whole=is_whole))

    def _tell_held(self, *records: BlockRecord) -> None:
        if self.tells_held:
            self.told.append(Held.of({it.block_hash: it.expires_at for it in records}))

    def state(self) -> TierState:
        return TierState(not self.is_down, self.reason, room_bytes=0)

    def restart_empty(self) -> None:
        """Come back as a new worker with an empty store."""
        self.blocks.clear()
        if self.tells_held:
            self.told.append(Held(is_first=True))
        self.told.append(Restarted())
        if self.tells_held:
            self.tell_all()

    def put(self, name: str, length: int, *, age_s: float = 0.0, retention: str = "24h") -> None:
        """Put a chain on disk as if an earlier process had stored it."""
        for record in stored_chain(name, length, self._clock.now() - age_s, retention):
            self.put_block(record)

    def put_block(self, record: BlockRecord) -> None:
        """Put one block on disk with its right bytes."""
        self.blocks[BlockHash(record.block_hash)] = record, payload_of(record.block_hash)
        self._tell_held(record)

    def check(self) -> None:
        pages = [job.page.page_id for job in self.jobs]
        assert len(set(pages)) == len(pages), "a page is on two loans"

    def _open_jobs(self, pages: Iterable[Lent], *, is_store: bool) -> None:
        self.jobs.extend(Job(page, is_store) for page in pages)
        self.check()


class Rig:
    """A tiered cache, and requests that compute a block by writing its right bytes.

    Attributes:
        admitted: The running requests in the order of service.
        announces: Whether the blocks of a chain are announced, by its name.
        busy_s: For how long the device is said to be busy.
        make_store: Makes the disk tier over the arena, with a clock.
        tenants: The tenants of chains by name, besides those that a name has before a slash.
    """

    make_store: ClassVar[Callable[[torch.Tensor, Clock], FakeStore]] = FakeStore

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        num_pages: int = 16,
        has_store: bool = True,
        policies: Iterable[RetentionPolicy] = (IN_MEMORY, TWENTY_FOUR_HOURS),
        reserve: int = 1,
        load_timeout_s: float = 30.0,
        most_owed: int = 1_000_000,
        is_write_behind: bool = False,
        eviction_order: str = "lru",
        block_size: int = 1,
        restore: Restore = "load",
    ) -> None:
        self.clock = FakeClock()
        self.device_bytes = torch.full((num_blocks, BLOCK_BYTES), POISON, dtype=torch.uint8)
        self.arena_bytes = torch.full((num_pages, BLOCK_BYTES), POISON, dtype=torch.uint8)
        self.store = type(self).make_store(self.arena_bytes, self.clock)
        self.transfer = FakeDeviceLink(self.device_bytes, self.arena_bytes)
        self.tiers = Tiers(
            device=BlockPool(num_blocks, eviction_order),
            host=BlockPool(num_pages, eviction_order),
            catalog=Catalog(RetentionPolicies(policies)),
            store=self.store if has_store else None,
            device_link=self.transfer,
            clock=self.clock,
            vram_bytes=BLOCK_BYTES,
            payload_bytes=BLOCK_BYTES,
            block_size=block_size,
            settings=CacheSettings(
                restore=restore,
                is_write_behind=is_write_behind,
                device_reserve_blocks=reserve,
                load_timeout_s=load_timeout_s,
            ),
        )
        # At the first assumption of the write rate, so many blocks may wait to be written.
        enough_s = (most_owed + 0.5) * BLOCK_BYTES / self.tiers.disk_link.write_rate.steady
        self.tiers.settings.drain_timeout_s = enough_s / EARLY_SHARE
        for pool, memory in self.memories:
            _poison_taken(pool, memory)
        self.cache = TieredCache(self.tiers)
        self.transfer.may_fill = self._is_unwritten
        self.admitted: list[Chain] = []
        self.busy_s = 0.0
        self.num_computed = 0
        self.tenants: dict[str, bytes] = {}
        self.announces: Callable[[str], bool] = lambda name: False
        self._fillers: dict[int, Chain | None] = {}  # of device blocks; None is a link
        self._found: dict[Chain, set[int]] = {}
        self.transfer.on_fill = lambda block_id: self._fillers.update({block_id: None})

    def chain(self, name: str, length: int, retention: str = "24h") -> Chain:
        """Return the prefix of a request that has not arrived yet.

        A name such as `alice/chat` is a chain of the tenant `alice`; other names share a tenant.
        """
        tenant, is_named, _ = name.partition("/")
        namespace = tenant.encode() if is_named else self.tenants.get(name, b"ns")
        hashes = chain_of(name, length)
        prefix = Chain(root_of(name), namespace, hashes, claims=kept_by(retention))
        if self.announces(name):
            prefix.token_ids = array("I")
            for block_hash in hashes:
                prefix.token_ids += tokens_of(block_hash, self.tiers.block_size)
        return prefix

    def turn(self, count: int = 1) -> None:
        """Do what the engine does in a step, except computing."""
        for _ in range(count):
            self.cache.poll()
            self.plan()
            self.cache.refresh()
            self.cache.pump()
            self.check()

    def plan(self) -> None:
        """Plan for the running requests, and for the queued ones that prefetch something."""
        self.admitted = [prefix for prefix in self.admitted if prefix.blocks]
        size = self.tiers.block_size
        queued = [each for each in self.cache._recalls.chains if each not in self.admitted]
        requests = [
            RequestProgress(prefix, size * self._num_ready(prefix), size * len(prefix.hashes))
            for prefix in [*self.admitted, *queued]
        ]
        still = [each for each in requests if each.num_computed_tokens < each.num_tokens]
        self.cache.plan(still, busy_s=self.busy_s)

    def _num_ready(self, prefix: Chain) -> int:
        blocks = prefix.blocks[: len(prefix.hashes)]
        return next((i for i, block in enumerate(blocks) if not block.is_ready), len(blocks))

    def queue(self, name: str, length: int, retention: str = "24h") -> Chain:
        """Return the prefix of a request that has arrived."""
        prefix = self.chain(name, length, retention)
        self.cache.arrive(prefix)
        self.check()
        return prefix

    def admit(
        self,
        prefix: Chain,
        num_blocks: int | None = None,
        *,
        is_alone: bool = False,
        makes_room: bool = True,
    ) -> bool:
        """Try to give a request the blocks of its table; return whether it was admitted."""
        if not self.cache.is_settled(prefix):
            return False
        num_blocks = num_blocks or len(prefix.hashes)
        brought = {*prefix.row.indices(State.COMING)}  # copied up while it waited
        is_admitted = bool(
            self.cache.admit(prefix, num_blocks, is_alone=is_alone, makes_room=makes_room)
        )
        if is_admitted:
            self.admitted.append(prefix)
            blocks = enumerate(prefix.blocks[: len(prefix.hashes)])
            found = {index for index, block in blocks if block.is_ready}
            self._found[prefix] = found - brought
        self.plan()
        self.check()
        return is_admitted

    def start(self, name: str, length: int, retention: str = "24h") -> Chain:
        """Return the prefix of a request that was admitted, after as many steps as that takes."""
        prefix = self.queue(name, length, retention)
        for _ in range(100):
            if self.admit(prefix):
                return prefix
            self.turn()
        raise AssertionError("not admitted in 100 steps")

    def compute(self, prefix: Chain, *, at_most: int = 1_000_000) -> int:
        """Compute blocks as the scheduler does, from the first one that is not ready.

        Returns:
            How many were computed before one that is being loaded or is left to the links.
        """
        count = 0
        for index, block in enumerate(prefix.blocks[: len(prefix.hashes)]):
            if block.is_ready:
                continue
            if count == at_most or not self.may_compute(prefix, index):
                break
            self.write(block, prefix.hashes[index])
            self.cache.complete(prefix, index, index + 1)
            self._fillers[block.block_id] = prefix
            count += 1
        self.num_computed += count
        self.check()
        return count

    def seal(self, prefix: Chain, block_hash: BlockHash) -> None:
        """Compute the private block behind a chain, and publish it."""
        block = prefix.blocks[len(prefix.hashes)]
        self.write(block, block_hash)
        self.cache.seal(prefix, block_hash)
        self._fillers[block.block_id] = prefix
        self.check()

    def begin(self, prefix: Chain) -> None:
        """Compute some tokens of the first block that is not ready, if that may be computed."""
        index = self._num_ready(prefix)
        if index < len(prefix.hashes) and self.may_compute(prefix, index):
            block = prefix.blocks[index]
            assert block.block_id not in self.transfer.targets, "a block has two writers"
            self.device_bytes[block.block_id, : BLOCK_BYTES // 2] = POISON
            self.cache.complete(prefix, index, index, has_rest=True)

    def may_compute(self, prefix: Chain, index: int) -> bool:
        """Return whether a step may compute a block that is not ready."""
        is_left = self.cache.first_loaded(prefix, index, index + 1) == index
        return not (prefix.blocks[index].is_copying or is_left)

    def can_go_on(self, prefix: Chain) -> bool:
        """Return whether a request is ready, may compute, or waits for what is under way."""
        index = self._num_ready(prefix)
        if index == len(prefix.hashes) or self.may_compute(prefix, index):
            return True
        is_copied_next = prefix.blocks[index].is_copying  # with the next `pump`
        is_moving = self.store.jobs or self.store.told or self.transfer.has_pending
        return bool(is_copied_next or is_moving)

    def write(self, block: Block, block_hash: BlockHash) -> None:
        """Compute one block: write its right bytes into VRAM."""
        assert block.block_id not in self.transfer.targets, "a block has two writers"
        self.device_bytes[block.block_id] = torch.frombuffer(
            bytearray(payload_of(block_hash)), dtype=torch.uint8
        )

    def finish(self, prefix: Chain, *, steps: int = 100) -> int:
        """Load and compute until all blocks are ready, and end the request.

        Returns the number of blocks that were computed.
        """
        count = 0
        for _ in range(steps):
            count += self.compute(prefix)
            if all(block.is_ready for block in prefix.blocks[: len(prefix.hashes)]):
                break
            self.turn()
        else:
            raise AssertionError(f"not ready after {steps} steps")
        self.verify(prefix)
        self.end(prefix)
        return count

    def end(self, prefix: Chain) -> None:
        """End a request whose blocks are all ready, and verify where it says that they are from."""
        for index, origin in enumerate(prefix.origins()):
            if index in self._found[prefix]:
                assert origin is Tier.DEVICE, "a block that was in VRAM counts as another"
                continue
            filler = self._fillers[prefix.blocks[index].block_id]
            if filler is None:
                assert origin in (Tier.HOST, Tier.DISK), "a block that was loaded counts as another"
            else:
                computed = None if filler is prefix else Tier.DEVICE
                assert origin is computed, "a block that was computed counts as another"
        self.cache.touch(prefix)
        self.cache.release(prefix)
        self.check()

    def run(self, name: str, length: int, retention: str = "24h") -> int:
        """Serve a request from arrival to end; return the number of blocks that it computed."""
        return self.finish(self.start(name, length, retention))

    def verify(self, prefix: Chain) -> None:
        """Check the bytes of all ready blocks of a request; of an early one, its first half."""
        for block, block_hash in zip(prefix.blocks, prefix.hashes, strict=False):
            got = self.device_bytes[block.block_id].numpy().tobytes()
            most = len(got) if block.is_whole else len(got) // 2
            is_right = got[:most] == payload_of(block_hash)[:most]
            assert not block.is_ready or is_right, "wrong bytes served"

    def check(self) -> None:
        """Verify every invariant, and the bytes of every block that may be served."""
        self.cache.check()
        self.store.check()
        for pool, memory in self.memories:
            for entry in self.tiers.catalog.entries():
                block = pool.lookup(entry.block_hash)
                if block is not None and block.is_whole:
                    got = memory[block.block_id].numpy().tobytes()
                    assert got == payload_of(entry.block_hash), f"wrong bytes in {block}"

    def check_nothing_is_held(self) -> None:
        """Verify that no request and no copy still holds a block once everything has ended."""
        self.store.is_held = self.transfer.is_held = False
        for _ in range(300):
            self.turn()
            if self.cache.is_idle:
                break
        assert self.cache.is_idle, "something moves for ever"
        assert self.tiers.device.num_used == 0, "device blocks leaked"
        assert self.tiers.host.num_used == 0, "host pages leaked"

    def on_device(self, name: str, length: int) -> list[int]:
        """Return the positions of a chain that are ready in VRAM."""
        return _positions(self.tiers.device, name, length)

    def on_host(self, name: str, length: int) -> list[int]:
        """Return the positions of a chain that are ready in host memory."""
        return _positions(self.tiers.host, name, length)

    def on_disk(self, name: str, length: int) -> list[int]:
        """Return the positions of a chain that are on disk."""
        blocks = self.store.blocks
        return [i for i, h in enumerate(chain_of(name, length)) if h in blocks]

    def run_without_disk(self, name: str, length: int, retention: str = "24h") -> int:
        """Serve a request as `run` does, but without asking the disk, which may hang."""
        prefix = self.chain(name, length, retention)
        self.pass_over_disk(prefix)

        def is_admitted() -> bool:
            if self.admit(prefix):
                return True
            self.turn()
            return False

        wait_until(is_admitted, "never admitted")
        return self.finish(prefix)

    def pass_over_disk(self, prefix: Chain) -> None:
        """Have the disk not asked about a request, as if it had answered that it has nothing."""
        self.cache._lookups._asked[prefix] = {*prefix.hashes}

    def evict(self, is_wanted: ChooseBlock) -> int:
        """Evict blocks from VRAM and host memory; return how many copies."""
        return whole(self.cache.operations.evict(is_wanted)).num_copies

    def entry(self, name: str, position: int) -> Entry:
        """Return the catalog's entry of a block."""
        entry = self.tiers.catalog.get(chain_of(name, position + 1)[-1])
        assert entry is not None
        return entry

    @property
    def memories(self) -> list[tuple[BlockPool, torch.Tensor]]:
        """The pools of VRAM and host memory, each with the memory that its block ids index."""
        return [(self.tiers.device, self.device_bytes), (self.tiers.host, self.arena_bytes)]

    def _is_unwritten(self, block_id: int) -> bool:
        held = (block for prefix in self.admitted for block in prefix.blocks)
        written = (block for block in held if block.is_ready or block.content is Content.COMPUTING)
        return not any(block.block_id == block_id for block in written)


def _poison_taken(pool: BlockPool, memory: torch.Tensor) -> None:
    """Have the blocks that a pool hands out overwritten."""
    allocate = pool.allocate

    def poisoned(*args: Any, **options: Any) -> Taken:
        taken = allocate(*args, **options)
        for block in taken.blocks or ():
            memory[block.block_id] = POISON
        return taken

    vars(pool)["allocate"] = poisoned


def _positions(pool: BlockPool, name: str, length: int) -> list[int]:
    blocks = [pool.lookup(block_hash) for block_hash in chain_of(name, length)]
    return [i for i, block in enumerate(blocks) if block is not None and block.is_ready]
