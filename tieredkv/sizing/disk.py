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
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

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

Entry = TypeVar("Entry", Lent, bytes)

_HASH, _POSITION = attrgetter("block_hash"), attrgetter("position")
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


class _Queue(dict[int, list[Entry]]):
    """Entries by a time in microseconds.

    A request uses and stores many blocks at once. So a heap has the times, and each time has its
    entries.
    """

    def __init__(self) -> None:
        super().__init__()
        self.times: list[int] = []

    def __missing__(self, time_us: int) -> list[Entry]:
        """Begin the list of a time."""
        heapq.heappush(self.times, time_us)
        entries: list[Entry] = []
        self[time_us] = entries
        return entries

    def pop_first(self) -> list[Entry]:
        """Remove the earliest time, and return its entries."""
        return self.pop(heapq.heappop(self.times))

    def check(self) -> None:
        """Raise IntegrityError if the heap does not have the times of the entries."""
        if sorted(self.times) != sorted(self):
            raise IntegrityError("the times of a queue are not those of its entries")


def _used(
    life: BlockLife, last_used: float, expires_at: float | None, retention: str | None
) -> BlockLife:
    """Return the life of a block after a use, and the claim that came with it if it is longer."""
    is_longer = expires_at is not None and expires_at > life.expires_at
    if not is_longer and last_used <= life.last_used:
        return life
    return BlockLife(
        retention=(retention if is_longer else None) or life.retention,
        computed_at=life.computed_at,
        expires_at=expires_at if is_longer and expires_at is not None else life.expires_at,
        last_used=max(last_used, life.last_used),
    )


class SimulatedDisk(BackingTier):
    """A disk that holds a number of blocks, and the order in which they leave it.

    Invariants (`check`): it has as many blocks as fit at most; each of them is queued to be
    evicted, and to expire if it does, no later than its place.

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
        self._lives: dict[bytes, BlockLife] = {}
        self._events: list[Event] = []
        # A use or a claim only moves a block back in both queues, so that its entry is put right
        # once its turn has come. Entries of blocks that have left are skipped then. A block that
        # was stored again since has several entries, of which the first one that is due counts.
        self._used, self._expiring = _Queue[Lent](), _Queue[bytes]()
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
            life = self._lives.get(block_hash)
            if life is not None and now < life.expires_at:
                found[block_hash] = _TIMES.pack(*(getattr(life, name) for name in Times._fields))
        self._num_jobs += 1
        self._events.append(LookupDone(self._num_jobs, found))
        return self._num_jobs

    def times_of(self, found: bytes, /) -> Times:
        """Read the times of a block from what a lookup has found."""
        return Times(*_TIMES.unpack(found))

    def load(self, lent: Sequence[Lent]) -> None:
        """Read blocks into pages; each page is on loan until its `Loaded`."""
        now, lives, tell = self._clock.now(), self._lives, self._events.append
        for page in lent:
            life = lives.get(page.block_hash)
            if life is None or now >= life.expires_at:
                tell(Loaded(page.page_id, "missing"))
                continue
            self._num_read += 1
            tell(Loaded(page.page_id, "", life))

    def store(self, lent: Sequence[Lent]) -> None:
        """Write blocks from pages; each page is on loan until its `Stored`.

        A block that is on disk already, as young, is not written again.
        """
        now, lives, tell = self._clock.now(), self._lives, self._events.append
        used, expiring = self._used, self._expiring
        evicted: dict[bytes, None] = {}
        most, num_written, known, used_us, expires_us = self.num_blocks, 0, None, 0, 0
        for page in lent:
            block_hash, life = page.block_hash, page.life
            assert life is not None, "a block is stored with its life"
            old = lives.get(block_hash)
            if old is not None and now < old.expires_at and old.computed_at >= life.computed_at:
                lives[block_hash] = _used(old, life.last_used, life.expires_at, life.retention)
                tell(Stored(page.page_id))
                continue
            if len(lives) >= most:
                if not lives:
                    tell(Stored(page.page_id, "full"))
                    continue
                evicted[self._evict_one()] = None
            num_written += 1
            if now >= life.expires_at:  # its room was taken for nothing
                tell(Stored(page.page_id, "expired"))
                continue
            if block_hash in evicted:  # what is told last is what holds
                self._note_evicted(evicted)
                evicted = {}
            if life is not known:  # blocks that came together share it
                known, used_us = life, int(life.last_used * 1e6)
                expires_us = to_us(life.expires_at) if life.expires_at < math.inf else 0
            lives[block_hash] = life
            used[used_us].append(page)
            if used_us == self._sorted_us:
                self._sorted_us = -1
            if expires_us:
                expiring[expires_us].append(block_hash)
            tell(Stored(page.page_id))
        self._num_stored += num_written
        self._note_evicted(evicted)

    def touch(self, items: Sequence[TouchItem]) -> None:
        """Refresh blocks after a hit."""
        now, lives = self._clock.now(), self._lives
        of: BlockLife | None = None
        use: tuple[float, float | None, str | None] = 0.0, None, None
        for item in items:
            life = lives.get(item.block_hash)
            if life is None or now >= life.expires_at:
                continue
            if life is not of or use != (item.last_used, item.expires_at, item.retention):
                use = item.last_used, item.expires_at, item.retention
                of, new = life, _used(life, *use)
            lives[item.block_hash] = new  # blocks that are used together share it

    def delete(self, hashes: Sequence[bytes], reason: str) -> None:
        """Make blocks unreachable."""
        doomed = [each for each in hashes if self._lives.pop(each, None) is not None]
        self._deleted[reason] = self._deleted.get(reason, 0) + len(doomed)
        self._tell_gone(doomed, reason)

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
        size, blocks = self._block_bytes, len(self._lives)
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
        room = self.num_blocks - len(self._lives)
        room_bytes = _NO_LIMIT_BYTES if room == math.inf else int(room) * self._block_bytes
        return TierState(is_open=True, why="", room_bytes=room_bytes)

    def close(self) -> None:
        """Do nothing: no loan is left after a call."""

    # What is stored

    def _note_evicted(self, hashes: Iterable[bytes]) -> None:
        evicted = [*hashes]
        self._num_evicted += len(evicted)
        self._tell_gone(evicted, "capacity")

    def _tell_gone(self, hashes: list[bytes], reason: str) -> None:
        if hashes:
            self._events.append(Gone(hashes, reason, self._block_bytes * len(hashes)))

    def _sweep(self, due_us: int) -> None:
        """Drop what has expired by a time."""
        expired: list[bytes] = []
        lives, expiring = self._lives, self._expiring
        while expiring.times and expiring.times[0] <= due_us:
            for block_hash in expiring.pop_first():
                life = lives.get(block_hash)
                if life is None or life.expires_at == math.inf:
                    continue
                if (expires_us := to_us(life.expires_at)) > due_us:
                    expiring[expires_us].append(block_hash)
                    continue
                del lives[block_hash]
                expired.append(block_hash)
        self._num_expired += len(expired)
        self._tell_gone(expired, "expired")

    def _evict_one(self) -> bytes:
        """Evict the block that was unused for longest, and return its hash."""
        lives, used = self._lives, self._used
        while True:
            time_us = used.times[0]
            queued = used[time_us]
            if time_us != self._sorted_us:
                queued.sort(key=_HASH, reverse=True)  # as `lru_order` orders records
                queued.sort(key=_POSITION)
                self._sorted_us = time_us
            while queued:
                page = queued.pop()
                block_hash = page.block_hash
                life = lives.get(block_hash)
                if life is None:
                    continue
                if (last_used_us := int(life.last_used * 1e6)) != time_us:
                    used[last_used_us].append(page)
                    continue
                del lives[block_hash]
                return block_hash
            used.pop_first()

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        if len(self._lives) > self.num_blocks:
            raise IntegrityError(f"{len(self._lives)} blocks on disk, room for {self.num_blocks}")
        self._used.check()
        self._expiring.check()
        used_us, expires_us = dict[bytes, int](), dict[bytes, int]()  # the first ones
        for time_us, pages in sorted(self._used.items()):
            for page in pages:
                used_us.setdefault(page.block_hash, time_us)
        for time_us, hashes in sorted(self._expiring.items()):
            for block_hash in hashes:
                expires_us.setdefault(block_hash, time_us)
        for block_hash, life in self._lives.items():
            places = [(used_us, int(life.last_used * 1e6))]
            if life.expires_at < math.inf:
                places.append((expires_us, to_us(life.expires_at)))
            for queued_us, place_us in places:
                if block_hash not in queued_us:
                    raise IntegrityError("a block on disk is not queued")
                if queued_us[block_hash] > place_us:
                    raise IntegrityError("a block on disk is queued behind its place")
