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
    """The states of a chain's blocks.

    Args:
        num_blocks: length of the chain; all its blocks are to be computed.
    """

    def __init__(self, num_blocks: int) -> None:
        self._states = bytearray([State.COMPUTE]) * num_blocks
        self._known: dict[State, Sequence[int]] = {}
        self._there: Stretches | None = None

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, index: int) -> int:
        return self._states[index]

    def put(self, index: int, state: State) -> None:
        """Change the state of one block."""
        self._states[index] = state
        self._note_change()

    def put_all(self, indices: Iterable[int], state: State) -> None:
        """Change the state of some blocks."""
        states = self._states
        for index in indices:
            states[index] = state
        self._note_change()

    def append(self, state: State) -> None:
        """Add a block behind the others."""
        self._states.append(state)
        self._note_change()

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
            if state in self._states:
                found = _where(np.frombuffer(bytes(self._states), np.uint8) == state)
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
    def lacking(self) -> Sequence[int]:
        """All other blocks, ascending."""
        return _where(np.frombuffer(bytes(self._states), np.uint8) > State.COMING)

    def reset(self, num_blocks: int, state: State = State.COMPUTE) -> None:
        """Put all blocks of a chain of this length into one state."""
        self._states = bytearray([state]) * num_blocks
        self._note_change()

    def _note_change(self) -> None:
        if self._known:
            self._known = {}
        self._there = None

    @property
    def awaited(self) -> list[int]:
        """Blocks that were not found, and that the request has not computed itself."""
        return [
            index
            for index, state in enumerate(self._states)
            if State.FOUND < state < State.COMPUTED
        ]


def _where(is_so: NDArray[np.bool_]) -> Sequence[int]:
    """Return the indices of what is true."""
    found = array("q")
    found.frombytes(np.flatnonzero(is_so).astype(np.int64, copy=False).tobytes())
    return found
