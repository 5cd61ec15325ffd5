"""The disk of a replay: a tier that decides as the store does, without files and without bytes.

`Store` evicts the blocks that were unused for longest (the tail of a prompt before its head),
no more than it needs room for, keeps a block that is as young as a new copy of it, and drops what
has expired when it is swept. This tier does the same for a number of blocks of one size, at the
times of a simulated clock. What it is asked for has been done when it is next polled.
`tests/sizing/test_disk.py` runs random operations on it and on a real store and compares them.

A name stands for one block, as a trace has it, so that blocks are not told apart beyond it. Pins,
tenants and their shares are not simulated.
"""

import heapq
import math
import struct
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import msgspec

from tieredkv.clock import Clock
from tieredkv.errors import IntegrityError
from tieredkv.storage.index.entries import to_us
from tieredkv.tier import (
    HASHES,
    BackingTier,
    BlockLife,
    Event,
    Gone,
    Lent,
    Loaded,
    LookupDone,
    Stored,
    TierFigures,
    TierState,
    Times,
    TouchItem,
)

SWEEP_S = 10.0
"""How often expired blocks leave the disk, as the setting `sweep_interval` has it."""

_NO_LIMIT_BYTES = 1 << 62
_TIMES = struct.Struct("<3d")


class SimulatedClock(Clock):
    """A clock that shows what it is set to.

    Attributes:
        moment: the time that it shows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moment = 0.0

    def now(self) -> float:
        """Return the time that it shows."""
        return self.moment


class _Block(msgspec.Struct, gc=False):
    """One block, and when the disk has queued it.

    Attributes:
        block_hash, position: see `Lent`.
        retention, computed_at, last_used, expires_at: see `BlockLife`.
        is_stored: whether it has not left the disk yet.
        used_us, expires_us: the times under which it is queued to be evicted, and to expire.
    """

    block_hash: bytes
    position: int | None
    retention: str
    computed_at: float
    last_used: float
    expires_at: float
    is_stored: bool = True
    used_us: int = 0
    expires_us: int = 0


_HASH, _POSITION = attrgetter("block_hash"), attrgetter("position")


class _Queue:
    """Blocks by a time in microseconds.

    A request uses and stores many blocks at once. So a heap has the times, and each time has its
    blocks.
    """

    def __init__(self) -> None:
        self.times: list[int] = []
        self.blocks: dict[int, list[_Block]] = {}

    def add(self, time_us: int, block: _Block) -> None:
        """Add a block."""
        blocks = self.blocks.get(time_us)
        if blocks is None:
            blocks = self.blocks[time_us] = []
            heapq.heappush(self.times, time_us)
        blocks.append(block)

    def pop(self) -> list[_Block]:
        """Remove the earliest time, and return its blocks."""
        return self.blocks.pop(heapq.heappop(self.times))

    def check(self) -> None:
        """Raise IntegrityError if the heap does not have the times of the blocks."""
        if sorted(self.times) != sorted(self.blocks):
            raise IntegrityError("the times of a queue are not those of its blocks")


def _us(moment: float) -> int:
    """Return a time in microseconds; 0 for one that never comes."""
    return to_us(moment) if moment < math.inf else 0


class SimulatedDisk(BackingTier):
    """A disk that holds a number of blocks, and the order in which they leave it.

    Invariants (`check`): it has as many blocks as fit at most; each of them is queued to be
    evicted, and to expire if it does, no later than its place; the blocks know that they are
    stored.

    Attributes:
        num_blocks: how many fit; may be infinite.
    """

    def __init__(self, num_blocks: float, clock: Clock, block_bytes: int = 1) -> None:
        """Make an empty disk.

        Args:
            num_blocks: how many blocks it holds.
            clock: shows the simulated time.
            block_bytes: what a block takes on it; by default all is counted in blocks.
        """
        self.num_blocks, self._clock, self._block_bytes = num_blocks, clock, block_bytes
        self.shares: dict[bytes, float] = {}
        self.names = HASHES
        self._blocks: dict[bytes, _Block] = {}
        self._events: list[Event] = []
        # Uses and claims only move a block back in both queues, so that its entry is put right once
        # its turn has come. Entries of blocks that have left, or that stand elsewhere, are skipped.
        self._used, self._expiring = _Queue(), _Queue()
        self._sorted_us = -1  # whose blocks are sorted, the first to be evicted last
        self._next_sweep = 0.0
        self._num_jobs = self._num_read = 0
        self._num_stored = self._num_expired = self._num_evicted = 0
        self._deleted = dict[str, int]()

    # The protocol

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """Ask which blocks are stored and not expired; answered by `LookupDone` of this job."""
        now, found = self._clock.now(), dict[bytes, bytes]()
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is not None and now < block.expires_at:
                found[block_hash] = _TIMES.pack(*(getattr(block, name) for name in Times._fields))
        self._num_jobs += 1
        self._events.append(LookupDone(self._num_jobs, found))
        return self._num_jobs

    def times_of(self, found: bytes, /) -> Times:
        """Read the times of a block from what a lookup has found."""
        return Times(*_TIMES.unpack(found))

    def load(self, lent: Sequence[Lent]) -> None:
        """Read blocks into pages; each page is on loan until its `Loaded`."""
        now, blocks, events = self._clock.now(), self._blocks, self._events
        for page in lent:
            block = blocks.get(page.block_hash)
            if block is None or now >= block.expires_at:
                events.append(Loaded(page.page_id, "missing"))
                continue
            self._num_read += 1
            life = BlockLife(
                retention=block.retention,
                computed_at=block.computed_at,
                expires_at=block.expires_at,
                last_used=block.last_used,
            )
            events.append(Loaded(page.page_id, "", life))

    def store(self, lent: Sequence[Lent]) -> None:
        """Write blocks from pages; each page is on loan until its `Stored`.

        A block that is on disk already, as young, is not written again.
        """
        now, blocks, tell = self._clock.now(), self._blocks, self._events.append
        used, most, num_written = self._used.blocks, self.num_blocks, 0
        evicted, known, used_us, expires_us = dict[bytes, None](), None, 0, 0
        for page in lent:
            block_hash, life = page.block_hash, page.life
            assert life is not None, "a block is stored with its life"
            old = blocks.get(block_hash)
            if old is not None and now < old.expires_at and old.computed_at >= life.computed_at:
                self._use(old, life.last_used, life.expires_at, life.retention)
                tell(Stored(page.page_id))
                continue
            if len(blocks) >= most:
                if not blocks:
                    tell(Stored(page.page_id, "full"))
                    continue
                evicted[self._evict_one()] = None
            num_written += 1
            if now >= life.expires_at:  # its room was taken for nothing
                tell(Stored(page.page_id, "expired"))
                continue
            if block_hash in evicted:  # what is told last is what holds
                self._tell_gone([*evicted], "capacity")
                evicted.clear()
            elif old is not None:
                self._drop(old)
            if life is not known:  # blocks that came together share it
                known, used_us, expires_us = life, int(life.last_used * 1e6), _us(life.expires_at)
            blocks[block_hash] = block = _Block(
                block_hash,
                page.position,
                life.retention,
                life.computed_at,
                life.last_used,
                life.expires_at,
                True,
                used_us,
                expires_us,
            )
            if (queued := used.get(used_us)) is None:
                self._used.add(used_us, block)
            else:  # as `_Queue.add`, but faster
                queued.append(block)
            if used_us == self._sorted_us:
                self._sorted_us = -1
            if expires_us:
                self._expiring.add(expires_us, block)
            tell(Stored(page.page_id))
        self._num_stored += num_written
        self._tell_gone([*evicted], "capacity")

    def touch(self, items: Sequence[TouchItem]) -> None:
        """Refresh blocks after a hit."""
        now, blocks = self._clock.now(), self._blocks
        for item in items:
            block = blocks.get(item.block_hash)
            if block is not None and now < block.expires_at:
                self._use(block, item.last_used, item.expires_at, item.retention)

    def delete(self, hashes: Sequence[bytes], reason: str) -> None:
        """Make blocks unreachable."""
        doomed = [block for each in hashes if (block := self._blocks.get(each)) is not None]
        for block in doomed:
            self._drop(block)
        self._deleted[reason] = self._deleted.get(reason, 0) + len(doomed)
        self._tell_gone([block.block_hash for block in doomed], reason)

    def reply(self, id: int, body: dict[str, Any], has_more: bool = False) -> None:
        """Do nothing: nobody operates a simulated disk."""

    def poll(self) -> list[Event]:
        """Return what has happened since the last call; what has expired leaves when it is due."""
        now = self._clock.now()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_S
            self._sweep(to_us(now))
        events, self._events = self._events, []
        return events

    def stats(self) -> TierFigures:
        """Return the figures so far."""
        size, blocks = self._block_bytes, len(self._blocks)
        return TierFigures(
            blocks=blocks,
            bytes_live=size * blocks,
            bytes_files=size * blocks,
            bytes_budget=size * blocks + self.state().room_bytes,
            bytes_written=size * self._num_stored,
            bytes_read=size * self._num_read,
            num_stored=self._num_stored,
            num_expired=self._num_expired,
            num_evicted=self._num_evicted,
            deleted=dict(self._deleted),
        )

    def state(self) -> TierState:
        """Return that it serves, and its room."""
        room = self.num_blocks - len(self._blocks)
        room_bytes = _NO_LIMIT_BYTES if room == math.inf else int(room) * self._block_bytes
        return TierState(is_open=True, why="", room_bytes=room_bytes)

    def close(self) -> None:
        """Do nothing: no loan is left after a call."""

    # What is stored

    @staticmethod
    def _use(
        block: _Block, last_used: float, expires_at: float | None, retention: str | None
    ) -> None:
        """Note a use of a block, and the claim that came with it if that lengthens its life."""
        if last_used > block.last_used:
            block.last_used = last_used
        if expires_at is not None and expires_at > block.expires_at:
            block.expires_at = expires_at
            block.retention = retention or block.retention

    def _drop(self, block: _Block) -> None:
        del self._blocks[block.block_hash]
        block.is_stored = False

    def _tell_gone(self, hashes: list[bytes], reason: str) -> None:
        if hashes:
            self._events.append(Gone(hashes, reason, self._block_bytes * len(hashes)))

    def _sweep(self, due_us: int) -> None:
        """Drop what has expired by a time."""
        expiring, expired = self._expiring, list[_Block]()
        while expiring.times and (time_us := expiring.times[0]) <= due_us:
            for block in expiring.pop():
                if not block.is_stored or block.expires_us != time_us:
                    continue
                if (expires_us := to_us(block.expires_at)) > due_us:
                    block.expires_us = expires_us
                    expiring.add(expires_us, block)
                    continue
                self._drop(block)
                expired.append(block)
        self._num_expired += len(expired)
        self._tell_gone([block.block_hash for block in expired], "expired")

    def _evict_one(self) -> bytes:
        """Evict the block that was unused for longest, and return its hash."""
        used = self._used
        while True:
            time_us = used.times[0]
            queued = used.blocks[time_us]
            if time_us != self._sorted_us:
                queued.sort(key=_HASH, reverse=True)  # as `lru_order` orders records
                queued.sort(key=_POSITION)
                self._sorted_us = time_us
            while queued:
                block = queued.pop()
                if not block.is_stored or block.used_us != time_us:
                    continue
                if (last_used_us := int(block.last_used * 1e6)) != time_us:
                    block.used_us = last_used_us
                    used.add(last_used_us, block)
                    continue
                del self._blocks[block.block_hash]  # as `_drop`, but faster
                block.is_stored = False
                self._num_evicted += 1
                return block.block_hash
            used.pop()

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        if len(self._blocks) > self.num_blocks:
            raise IntegrityError(f"{len(self._blocks)} blocks on disk, room for {self.num_blocks}")
        self._used.check()
        self._expiring.check()
        for block in self._blocks.values():
            if not block.is_stored:
                raise IntegrityError("a block does not know that it is on disk")
            places = [(self._used, block.used_us, int(block.last_used * 1e6))]
            if block.expires_at < math.inf:
                places.append((self._expiring, block.expires_us, to_us(block.expires_at)))
            for queue, time_us, place_us in places:
                if not any(queued is block for queued in queue.blocks.get(time_us, ())):
                    raise IntegrityError("a block on disk is not queued")
                if time_us > place_us:
                    raise IntegrityError("a block on disk is queued behind its place")
