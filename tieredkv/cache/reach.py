"""Which blocks a request may still go on behind, of models that need further pages for that.

A request of a model with windows or recurrent layers goes on only at a *place*, a block whose
further pages are kept. So a block in RAM is of use while a place lies at it, or at a block behind
it. When the last of these places has left, the blocks before it up to another one are of no use.

Called by the engine's thread only.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from tieredkv.errors import IntegrityError
from tieredkv.types import BlockHash


class Known(Protocol):
    """What has to be known of a block."""

    @property
    def parent_hash(self) -> BlockHash:
        """Hash of the block before it."""


class Reach:
    """Counts, for each block, the places at it and those blocks right behind it that are of use.

    A block that is not known hides those before it: they count again once it comes.

    Invariants (`check`): a block's count is 1 for a place, and 1 for each known block right behind
    it that has a count; no count is 0.

    Args:
        blocks: the blocks that are known, by hash; only the caller changes it.
    """

    def __init__(self, blocks: Mapping[BlockHash, Known]) -> None:
        self._blocks = blocks
        self._counts: dict[BlockHash, int] = {}
        self._places: set[BlockHash] = set()
        self._changed: dict[BlockHash, bool] = {}

    def add_place(self, block_hash: BlockHash) -> None:
        """Note that the further pages of a block are there."""
        if block_hash not in self._places:
            self._places.add(block_hash)
            self._raise(block_hash)

    def end_place(self, block_hash: BlockHash) -> None:
        """Note that some of the further pages of a block have left."""
        if block_hash in self._places:
            self._places.discard(block_hash)
            self._lower(block_hash)

    def add(self, block_hash: BlockHash) -> None:
        """Note that a block has come."""
        if block_hash in self._counts:
            self._changed[block_hash] = True
            self._raise(self._blocks[block_hash].parent_hash)

    def forget(self, block_hash: BlockHash, parent_hash: BlockHash) -> None:
        """Note that a block has left."""
        if block_hash in self._counts:
            self._lower(parent_hash)

    def take_changed(self) -> dict[BlockHash, bool]:
        """Return which blocks have come to be of use since the last call, and which are not now."""
        changed, self._changed = self._changed, {}
        return changed

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        counts = Counter(self._places)
        reached = [it for it in self._counts if it in self._blocks]
        counts.update(self._blocks[block_hash].parent_hash for block_hash in reached)
        if counts != self._counts:
            raise IntegrityError("the counts of what lies behind blocks are wrong")

    def _raise(self, block_hash: BlockHash) -> None:
        while True:
            count = self._counts.get(block_hash, 0)
            self._counts[block_hash] = count + 1
            if count or (block := self._blocks.get(block_hash)) is None:
                return
            self._changed[block_hash] = True
            block_hash = block.parent_hash

    def _lower(self, block_hash: BlockHash) -> None:
        while True:
            count = self._counts.pop(block_hash) - 1
            if count:
                self._counts[block_hash] = count
                return
            if (block := self._blocks.get(block_hash)) is None:
                return
            self._changed[block_hash] = False
            block_hash = block.parent_hash
