"""What is true of each block of a chain for one request: to be computed, at a tier, coming, there.

What is true of a block for everybody stands in `Block`. A chain of 65,536 tokens has thousands of
blocks, and each step asks for the first and the last ones of some state, so that the states of a
chain lie in one row of bytes, which is searched at the speed of memory.
"""

from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from tieredkv.cache.block import Block
from tieredkv.cache.miss_reasons import MissReason
from tieredkv.cache.stretches import Stretches


class State(IntEnum):
    """The state of a block for one request.

    FOUND     it was in VRAM when the request was admitted; of a request that waits: in VRAM or host
              memory, when the disk was asked
    COMING    it was copied to VRAM for the request, even while that waited for room, or is being
              copied, if only for another request
    SHARED    another request that holds it is to compute or to load it
    COMPUTE   it has to be computed, by this request or by another one that gets there first
    AT_HOST   it can be copied from host memory, where the request holds its page
    AT_DISK   it can be read from disk
    READING   it is being read from disk
    COMPUTED  this request has computed it
    """

    FOUND = 0
    COMING = 1
    SHARED = 2
    COMPUTE = 3
    AT_HOST = 4
    AT_DISK = 5
    READING = 6
    COMPUTED = 7


LOADABLE = (State.AT_HOST, State.AT_DISK, State.READING)
"""States of blocks that links may bring, instead of the device."""


class Row:
    """The states of a chain's blocks, and what belongs to them.

    Its methods are the only ones that change a state. What other requests, or the tiers, do to a
    block meanwhile is taken in before the next plan, and when the block is moved.

    Args:
        num_blocks: length of the chain; all its blocks are to be computed.

    Attributes:
        pages: the pages of the blocks at the host by index, held for the request. A page of a block
            that is there no more is released before the next plan.
        why_computed: blocks that a slower tier had and that are computed all the same, each with
            the reason.
    """

    def __init__(self, num_blocks: int) -> None:
        self._states = bytearray([State.COMPUTE]) * num_blocks
        self._known: dict[State, Sequence[int]] = {}
        self._there: Stretches | None = None
        self.pages: dict[int, Block] = {}
        self.why_computed: dict[int, MissReason] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, index: int) -> int:
        return self._states[index]

    # Changes

    def begin(self, states: bytearray) -> None:
        """Begin anew with blocks in these states."""
        assert not self.pages, "pages are held"
        self._states = states
        self._note_change()
        for state in LOADABLE if self.why_computed else ():
            for index in self.indices(state):
                self.why_computed.pop(index, None)

    def append_computed(self, number: int = 1) -> None:
        """Add blocks that generated tokens have filled."""
        self._states += bytes([State.COMPUTED]) * number
        self._note_change()

    def find(self, index: int, state: State) -> None:
        """Note what a tier, VRAM, a link or another request has of a block."""
        if self.why_computed and state in LOADABLE:
            self.why_computed.pop(index, None)
        self._states[index] = state
        self._note_change()

    def read(self, index: int) -> None:
        """Note that a block on disk is being read."""
        assert self._states[index] == State.AT_DISK, index
        self.find(index, State.READING)

    def copy(self, indices: Iterable[int]) -> None:
        """Note that blocks are being copied to VRAM."""
        self._put(indices, State.COMING)

    def leave(self, indices: Iterable[int]) -> None:
        """Have blocks computed, unless somebody has done so; no link brings them for this request.

        A page of theirs stays held until it is taken out of `pages`.
        """
        self._put(indices, State.COMPUTE)

    def lose(self, index: int, why: MissReason) -> None:
        """Have a block computed that a slower tier had, and note why."""
        self.why_computed[index] = why
        if self._states[index] in (State.SHARED, *LOADABLE):
            self.leave([index])

    def compute(self, indices: Iterable[int]) -> None:
        """Note that the request has computed blocks."""
        self._put(indices, State.COMPUTED)

    def take_over(self, indices: Iterable[int], other: "Row", state: State) -> None:
        """Have blocks loaded for this request that were to be loaded for one that ends."""
        for index in indices:
            if state is State.AT_HOST:
                self.pages[index] = other.pages.pop(index)
            self._states[index] = state
        self._note_change()

    def _put(self, indices: Iterable[int], state: State) -> None:
        states = self._states
        for index in indices:
            states[index] = state
        self._note_change()

    def _note_change(self) -> None:
        if self._known:
            self._known = {}
        self._there = None

    # Questions

    def first(self, state: State, begin: int = 0, end: int | None = None) -> int:
        """Return the first block of `[begin, end)` in a state; -1 if there is none."""
        return self._states.find(state, begin, len(self._states) if end is None else end)

    def last(self, state: State) -> int:
        """Return the last block in a state; -1 if there is none."""
        return self._states.rfind(state)

    def indices(self, state: State) -> Sequence[int]:
        """Return all blocks in a state, ascending; what is returned never changes."""
        if (known := self._known.get(state)) is None:
            found: Sequence[int] = ()
            if (first := self.first(state)) >= 0:  # of many pages few are used
                some = self._states[first : self.last(state) + 1]
                found = _where(np.frombuffer(some, np.uint8) == state, first)
            self._known[state] = known = found
        return known

    @property
    def there(self) -> Stretches:
        """The blocks that are in VRAM or on their way to it."""
        if self._there is None:
            is_there = np.frombuffer(bytes(self._states), np.uint8) <= State.COMING
            edges = np.diff(is_there.astype(np.int8), prepend=0, append=0)
            self._there = Stretches(np.flatnonzero(edges > 0), np.flatnonzero(edges < 0))
        return self._there

    @property
    def awaited(self) -> Sequence[int]:
        """Blocks that were not found, and that the request has not computed itself, ascending."""
        states = np.frombuffer(bytes(self._states), np.uint8)
        return _where((states > State.FOUND) & (states < State.COMPUTED))

    @property
    def states(self) -> bytes:
        """The states of all blocks, as they are now."""
        return bytes(self._states)

    def count(self, state: State) -> int:
        """Return how many blocks are in a state."""
        return self._states.count(state)


def _where(is_so: NDArray[np.bool_], first: int = 0) -> Sequence[int]:
    """Return the indices of what is true, of indices from `first` on."""
    found = array("q")
    found.frombytes((np.flatnonzero(is_so) + first).astype(np.int64, copy=False).tobytes())
    return found
