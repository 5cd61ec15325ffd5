"""The order in which another engine's chunks are evicted: least recently used first, pinned last.

A pin ends by itself. At most a part of the chunks is pinned, and where nothing else can be evicted,
pinned chunks are, so that a pin never keeps a request from being served.

This module knows keys, ranks and times. It does not know the engine, requests or retention.
"""

import heapq
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tieredkv.errors import IntegrityError

Key = TypeVar("Key", bound=Hashable)
Rank = tuple[int, int]
"""A place in the order; the lowest is evicted first."""

_SLACK = 64


@dataclass(slots=True)
class _Chunk:
    """One chunk.

    Attributes:
        rank: its place in the order.
        pinned_until: when its pin ends; 0 if it is not pinned.
        is_idle: whether no transfer uses it, so that it can be evicted.
    """

    rank: Rank
    pinned_until: float = 0.0
    is_idle: bool = False


class PinnedOrder(Generic[Key]):
    """Chunks in the order of their eviction; one thread at a time calls it.

    Two heaps hold the idle chunks, one those without a pin and one those with. Entries of chunks
    that have moved since are skipped, and dropped when there are too many of them.

    Invariants (`check`): every idle chunk has an entry with its rank in the heap that its pin
    says; every pinned chunk has an entry with its end; no more chunks are pinned than may be.

    Args:
        most_pinned: how many chunks may be pinned at once; further ones are not.
    """

    def __init__(self, most_pinned: int) -> None:
        self._most_pinned = most_pinned
        self.clear()

    def clear(self) -> None:
        """Forget all chunks."""
        self._chunks: dict[Key, _Chunk] = {}
        self._plain: list[tuple[Rank, Key]] = []
        self._pinned: list[tuple[Rank, Key]] = []
        self._ends: list[tuple[float, Key]] = []
        self._num_idle = self.num_pinned = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def add(self, key: Key, rank: Rank) -> None:
        """Add a chunk that a transfer uses."""
        assert key not in self._chunks, f"{key!r} is there already"
        self._chunks[key] = _Chunk(rank)

    def remove(self, key: Key) -> None:
        """Take a chunk out."""
        chunk = self._chunks.pop(key)
        self._num_idle -= chunk.is_idle
        self.num_pinned -= chunk.pinned_until > 0

    def rank(self, key: Key) -> Rank:
        """Return the place of a chunk."""
        return self._chunks[key].rank

    def move(self, key: Key, rank: Rank) -> None:
        """Give a chunk another place."""
        chunk = self._chunks[key]
        if chunk.rank != rank:
            chunk.rank = rank
            self._queue(key, chunk)

    def set_idle(self, key: Key, *, is_idle: bool) -> None:
        """Note whether a chunk can be evicted."""
        chunk = self._chunks[key]
        assert chunk.is_idle != is_idle, f"{key!r} is {'idle' if is_idle else 'used'} already"
        chunk.is_idle = is_idle
        self._num_idle += 1 if is_idle else -1
        self._queue(key, chunk)

    def pin(self, key: Key, until: float, now: float) -> None:
        """Have a chunk evicted last until a time; an earlier end than its present one is void."""
        chunk = self._chunks[key]
        if until <= max(now, chunk.pinned_until):
            return
        if not chunk.pinned_until:
            if self.num_pinned >= self._most_pinned:
                self._end_pins(now)
            if self.num_pinned >= self._most_pinned:
                return
            self.num_pinned += 1
        is_new = not chunk.pinned_until
        chunk.pinned_until = until
        if len(self._ends) >= _SLACK + 2 * self.num_pinned:
            ends = ((each.pinned_until, key) for key, each in self._chunks.items())
            self._ends = [end for end in ends if end[0]]
            heapq.heapify(self._ends)
        else:
            heapq.heappush(self._ends, (until, key))
        if is_new:
            self._queue(key, chunk)

    def evict(self, num: int, spared: Collection[Key], now: float) -> list[Key] | None:
        """Take out this many idle chunks, the next ones in the order.

        Args:
            num: how many.
            spared: chunks that must stay.
            now: the time, in the unit of the pins.

        Returns:
            Their keys; None, with nothing changed, if there are not so many.
        """
        num_spared = sum(self._chunks[key].is_idle for key in {*spared} if key in self._chunks)
        if num > self._num_idle - num_spared:
            return None
        self._end_pins(now)
        keys = self._take(self._plain, num, spared, is_pinned=False)
        return keys + self._take(self._pinned, num - len(keys), spared, is_pinned=True)

    def _take(
        self, heap: list[tuple[Rank, Key]], num: int, spared: Collection[Key], *, is_pinned: bool
    ) -> list[Key]:
        taken, passed = list[Key](), list[tuple[Rank, Key]]()
        while heap and len(taken) < num:
            entry = heapq.heappop(heap)
            if not self._is_current(entry, is_pinned=is_pinned):
                continue
            if entry[1] in spared:
                passed.append(entry)
                continue
            taken.append(entry[1])
            self.remove(entry[1])
        for entry in passed:
            heapq.heappush(heap, entry)
        return taken

    def _is_current(self, entry: tuple[Rank, Key], *, is_pinned: bool) -> bool:
        rank, key = entry
        chunk = self._chunks.get(key)
        if chunk is None or not chunk.is_idle or chunk.rank != rank:
            return False
        return (chunk.pinned_until > 0) == is_pinned

    def _end_pins(self, now: float) -> None:
        """Let the pins end whose time has come; the chunks keep their places in the order."""
        while self._ends and self._ends[0][0] <= now:
            until, key = heapq.heappop(self._ends)
            chunk = self._chunks.get(key)
            if chunk is not None and chunk.pinned_until == until:
                chunk.pinned_until = 0.0
                self.num_pinned -= 1
                self._queue(key, chunk)

    def _queue(self, key: Key, chunk: _Chunk) -> None:
        """Put an idle chunk into the heap in which it belongs now."""
        if not chunk.is_idle:
            return
        is_pinned = chunk.pinned_until > 0
        heap = self._pinned if is_pinned else self._plain
        if len(heap) < _SLACK + 2 * len(self._chunks):
            heapq.heappush(heap, (chunk.rank, key))
            return
        heap[:] = [
            (each.rank, key)
            for key, each in self._chunks.items()
            if each.is_idle and (each.pinned_until > 0) == is_pinned
        ]
        heapq.heapify(heap)

    def check(self) -> None:
        """Prove the invariants.

        Raises:
            IntegrityError: one of them is broken.
        """
        heaps = {False: {*self._plain}, True: {*self._pinned}}
        ends = {*self._ends}
        for key, chunk in self._chunks.items():
            is_pinned = chunk.pinned_until > 0
            if chunk.is_idle and (chunk.rank, key) not in heaps[is_pinned]:
                raise IntegrityError(f"{key!r} is idle, but never evicted")
            if is_pinned and (chunk.pinned_until, key) not in ends:
                raise IntegrityError(f"the pin of {key!r} never ends")
        if self.num_pinned != (num := sum(each.pinned_until > 0 for each in self._chunks.values())):
            raise IntegrityError(f"{num} chunks are pinned, not {self.num_pinned}")
        if self.num_pinned > self._most_pinned:
            what = f"{self.num_pinned} chunks are pinned"
            raise IntegrityError(f"{what}, but at most {self._most_pinned} may be")
        if self._num_idle != (num := sum(each.is_idle for each in self._chunks.values())):
            raise IntegrityError(f"{num} chunks are idle, not {self._num_idle}")
