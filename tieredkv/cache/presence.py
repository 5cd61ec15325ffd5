"""Which blocks the tier below host memory has, as it has told: some 16 bytes a block.

A block is known by the first eight bytes of its hash, so that one may be taken for another: then
its load is a miss. Whoever can choose hashes gains no more than that, as each table spreads them by
a number of its own.

`Presence` is what the cache asks. It keeps its blocks in one `_Table`, in two while that grows.
"""

import mmap
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tieredkv.errors import IntegrityError
from tieredkv.tier import FINGERPRINT_BYTES, Held

_SLOTS = 8  # of a bucket, which is one line of the processor's cache
_MOST_LOAD = 0.75  # more of it would have many blocks lie behind their own bucket
_GROWTH = 1.25
_LEAST_BUCKETS = 64
_MOVED_EACH = 8  # blocks that move to a larger table with each block that comes
_LEAST_MOVED = 512
_MOST_TOLD = 2048  # blocks that are noted at once

Number = TypeVar("Number", np.uint64, np.uint32)
Keys = NDArray[np.uint64]
Seconds = NDArray[np.uint32]
Places = NDArray[np.int64]


class Presence:
    """The blocks of a tier, each with the second in which it expires.

    What the tier tells is noted together, at the next question or once it is enough, since a call
    takes some 0.2 ms however few blocks it is about. A table that is full grows bit by bit: each
    call of `settle` moves some blocks to a larger one.

    Invariants (`check`): those of the tables; no block is in both.

    Attributes:
        is_whole: whether the tier has told all blocks that it has. Until then, one that is not here
            may be there.
    """

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        self.settle()
        return self._num_blocks

    @property
    def _num_blocks(self) -> int:
        return self._table.num_blocks + (self._old.num_blocks if self._old is not None else 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the tables have."""
        return self._table.num_bytes + (self._old.num_bytes if self._old is not None else 0)

    def clear(self, num_blocks: int = 0) -> None:
        """Forget all blocks: the tier has others now, or tells its blocks anew.

        Args:
            num_blocks: about how many there will be.
        """
        self.is_whole = False
        self._told: list[Held] = []  # that is not noted yet
        self._num_told = 0  # blocks of it
        self._table = _Table.for_blocks(num_blocks)
        self._old: _Table | None = None  # what is left of it moves
        self._num_moved = 0  # buckets of `_old` that are empty now

    def take(self, told: Held) -> None:
        """Note blocks that the tier has told of; the second that was told last counts."""
        if told.is_first:
            self.clear(told.num_blocks)
        self._told.append(told)
        self._num_told += len(told.fingerprints) // FINGERPRINT_BYTES
        self.is_whole |= told.is_whole
        if self._num_told >= _MOST_TOLD:
            self.settle()

    def settle(self) -> None:
        """Note what the tier has told since the last call; any question does so first."""
        if not self._told:
            return
        told, self._told, self._num_told = self._told, [], 0
        keys = _nonzero(np.frombuffer(b"".join([each.fingerprints for each in told]), "<u8"))
        keys, places = np.unique(keys[::-1], return_index=True)  # of equal ones the last
        until = np.frombuffer(b"".join([each.seconds for each in told]), "<u4")
        seconds = until[::-1][places]
        if self._old is not None:
            self._old.discard(keys)
        places = self._table.find(keys)
        is_known = places >= 0
        self._table.seconds.flat[places[is_known]] = seconds[is_known]
        self._add(keys[~is_known], seconds[~is_known])

    def discard(self, hashes: Sequence[bytes]) -> None:
        """Forget blocks, such as those that have left the tier."""
        self.settle()
        keys = np.unique(_keys_of(hashes))
        self._table.discard(keys)
        if self._old is not None:
            self._old.discard(keys)

    def has(self, hashes: Sequence[bytes], now: float) -> NDArray[np.bool_]:
        """Return which blocks the tier has and keeps beyond this time."""
        return self.until(hashes) > now

    def until(self, hashes: Sequence[bytes]) -> Seconds:
        """Return until when the tier keeps blocks, in seconds; 0 of those that it does not have."""
        self.settle()
        keys = _keys_of(hashes)
        until = self._table.seconds_of(keys)
        if self._old is not None:
            np.maximum(until, self._old.seconds_of(keys), out=until)
        return until

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        self.settle()
        self._table.check()
        if self._old is not None:
            self._old.check(is_filling=False)
            if (self._table.find(self._old.all_blocks()[0]) >= 0).any():
                raise IntegrityError("a block is in both tables")

    def _add(self, keys: Keys, seconds: Seconds) -> None:
        if self._num_blocks + len(keys) > self._table.most_blocks:
            self._move(self._old.num_buckets if self._old is not None else 0)
            self._old, self._num_moved = self._table, 0
            self._table = _Table.for_blocks(int(_GROWTH * (self._num_blocks + len(keys))))
        self._table.put(keys, seconds)
        self._move(max(_LEAST_MOVED, _MOVED_EACH * len(keys)) // _SLOTS)

    def _move(self, num_buckets: int) -> None:
        """Move the blocks of some buckets of the old table."""
        if self._old is None:
            return
        first, self._num_moved = self._num_moved, self._num_moved + num_buckets
        self._table.put(*self._old.empty(first, self._num_moved))
        if self._num_moved >= self._old.num_buckets:
            self._old = None


class _Table:
    """A hash table of a fixed size.

    A block lies in its own bucket or, if that was full, in the next one that was not. A bucket
    counts the blocks that lie behind it and would have fitted there, so that whoever looks for one
    knows when to stop. So a block that goes leaves nothing behind.

    Invariants (`check`): each block is found; the counts are right, unless the table is emptied.
    """

    def __init__(self, num_buckets: int) -> None:
        self.num_buckets, self.num_blocks = num_buckets, 0
        self.most_blocks = int(_MOST_LOAD * _SLOTS * num_buckets)
        self.keys = _zeroes(np.uint64, num_buckets)  # 0 in an empty slot
        self.seconds = _zeroes(np.uint32, num_buckets)
        self.passed = np.zeros(num_buckets, np.uint16)
        self._factor = np.uint64(secrets.randbits(64) | 1)

    @classmethod
    def for_blocks(cls, num_blocks: int) -> "_Table":
        """Return an empty table with room for so many blocks."""
        return cls(max(_LEAST_BUCKETS, int(num_blocks / (_MOST_LOAD * _SLOTS)) + 1))

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.seconds.nbytes + self.passed.nbytes

    def find(self, keys: Keys) -> Places:
        """Return the slot of each block, counted through all buckets; -1 if it is not here."""
        found = np.full(len(keys), -1)
        left, buckets = np.arange(len(keys)), self._own(keys)
        for _ in range(self.num_buckets):
            is_it = self.keys.take(buckets, axis=0) == keys[:, None]
            rows, slots = np.divmod(np.flatnonzero(is_it), _SLOTS)
            found[left[rows]] = buckets[rows] * _SLOTS + slots
            goes_on = self.passed[buckets] > 0
            goes_on[rows] = False
            if not goes_on.any():
                break
            left, keys, buckets = left[goes_on], keys[goes_on], self._next(buckets[goes_on])
        return found

    def seconds_of(self, keys: Keys) -> Seconds:
        """Return the second in which each block expires; 0 if it is not here."""
        places = self.find(keys)
        return np.where(places >= 0, self.seconds.take(places), np.uint32(0))

    def put(self, keys: Keys, seconds: Seconds) -> None:
        """Add different blocks that are not here; there is room."""
        self.num_blocks += len(keys)
        buckets = self._own(keys)
        while len(keys):
            order = np.argsort(buckets, kind="stable")
            keys, seconds, buckets = keys[order], seconds[order], buckets[order]
            starts = np.flatnonzero(np.diff(buckets, prepend=-1))
            rank = np.arange(len(keys)) - np.repeat(starts, np.diff(starts, append=len(keys)))
            is_free = self.keys.take(buckets, axis=0) == 0
            nth = is_free.cumsum(axis=1)
            fits = rank < nth[:, -1]
            slots = (is_free & (nth == rank[:, None] + 1)).argmax(axis=1)
            places = buckets[fits], slots[fits]
            self.keys[places], self.seconds[places] = keys[fits], seconds[fits]
            keys, seconds, buckets = keys[~fits], seconds[~fits], buckets[~fits]
            np.add.at(self.passed, buckets, 1)
            buckets = self._next(buckets)

    def discard(self, keys: Keys) -> None:
        """Take out those of some different blocks that are here."""
        places = self.find(keys)
        keys, places = keys[places >= 0], places[places >= 0]
        self.num_blocks -= len(keys)
        self.keys.flat[places] = 0
        for buckets in self._passed(keys, places):
            np.subtract.at(self.passed, buckets, 1)

    def empty(self, first: int, end: int) -> tuple[Keys, Seconds]:
        """Take out and return the blocks of the buckets `[first, end)`.

        The counts stay as they are: this is for a table that gets no more blocks.
        """
        keys, seconds = self.keys[first:end], self.seconds[first:end]
        is_used = keys != 0
        taken = keys[is_used], seconds[is_used]
        self.num_blocks -= len(taken[0])
        keys[:] = 0
        return taken

    def all_blocks(self) -> tuple[Keys, Seconds]:
        is_used = self.keys != 0
        return self.keys[is_used], self.seconds[is_used]

    def _passed(self, keys: Keys, places: Places) -> Iterator[Places]:
        """Yield the full buckets that blocks once passed on the way to their slots, step by step.

        A block that has passed no more of them has no part in what is yielded.
        """
        buckets, ends = self._own(keys), places // _SLOTS
        while len(buckets := buckets[is_before := buckets != ends]):
            ends = ends[is_before]
            yield buckets
            buckets = self._next(buckets)

    def check(self, *, is_filling: bool = True) -> None:
        """Raise IntegrityError if an invariant is broken.

        Args:
            is_filling: whether the table may get more blocks.
        """
        keys, _ = self.all_blocks()
        if len(keys) != self.num_blocks or len(np.unique(keys)) < len(keys):
            raise IntegrityError(f"{self.num_blocks} blocks are counted, but {len(keys)} are there")
        if ((places := self.find(keys)) < 0).any():
            raise IntegrityError("a block cannot be found")
        passed = np.zeros_like(self.passed)
        for buckets in self._passed(keys, places):
            np.add.at(passed, buckets, 1)
        if is_filling and (passed != self.passed).any():
            raise IntegrityError("a bucket counts blocks behind it that are not there")

    def _own(self, keys: Keys) -> Places:
        """Return the bucket in which each block should lie."""
        spread = (keys * self._factor) >> np.uint64(32)
        return ((spread * np.uint64(self.num_buckets)) >> np.uint64(32)).astype(np.int64)

    def _next(self, buckets: Places) -> Places:
        buckets = buckets + 1
        buckets[buckets == self.num_buckets] = 0
        return buckets


def _zeroes(kind: type[Number], num_buckets: int) -> NDArray[Number]:
    """Return zeroes whose memory is taken page by page as it is used.

    numpy asks for huge pages. Clearing them would keep the thread for half a second at 10^7 blocks.
    """
    size = num_buckets * _SLOTS * np.dtype(kind).itemsize
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, kind).reshape(num_buckets, _SLOTS)


def _keys_of(hashes: Sequence[bytes]) -> Keys:
    if not hashes:
        return np.zeros(0, np.uint64)
    joined, size = np.frombuffer(b"".join(hashes), "<u8"), len(hashes[0]) // FINGERPRINT_BYTES
    assert len(joined) == size * len(hashes), "all hashes have one length"
    return _nonzero(joined[::size])


def _nonzero(keys: Keys) -> Keys:
    """Return keys that differ from those of empty slots."""
    return np.maximum(keys, 1)
