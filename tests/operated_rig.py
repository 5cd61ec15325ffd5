"""A rig whose disk may keep blocks for longer, restart, and tell its blocks bit by bit."""

from collections.abc import Iterable, Sequence

import torch
from msgspec.structs import replace

from tests.fake_store import DAY_S, FakeStore, Rig
from tieredkv.cache.block import Block
from tieredkv.cache.chain import Chain
from tieredkv.clock import Clock
from tieredkv.tier import Held, Restarted, TouchItem
from tieredkv.types import BlockHash, BlockRecord

MOST_BLOCKS = 5
"""Blocks of the longest chain."""


class KeepingStore(FakeStore):
    """A store that keeps blocks for longer when it is told to, and tells its blocks bit by bit.

    Attributes:
        lost: the blocks that it has lost, or had when its worker restarted.
        newest: when each block was computed last.
    """

    def __init__(self, arena: torch.Tensor, clock: Clock) -> None:
        super().__init__(arena, clock)
        self.lost: set[BlockHash] = set()
        self.newest: dict[bytes, float] = {}

    def put_block(self, record: BlockRecord) -> None:
        # A copy that comes back is the one that was lost: the cache may count on its age.
        self.note_computed(record.block_hash, record.computed_at)
        super().put_block(replace(record, computed_at=self.newest[record.block_hash]))

    def note_computed(self, block_hash: bytes, moment: float) -> None:
        """Note when a block was computed."""
        self.newest[block_hash] = max(moment, self.newest.get(block_hash, 0.0))

    def lose(self, hashes: Iterable[bytes], reason: str = "capacity") -> None:
        lost = [*map(BlockHash, hashes)]
        self.lost.update(lost)
        super().lose(lost, reason)

    def touch(self, items: Sequence[TouchItem]) -> None:
        super().touch(items)
        for item in items:
            record, payload = self.blocks.get(BlockHash(item.block_hash), (None, b""))
            if record is None or item.expires_at is None:
                continue
            assert item.expires_at <= record.computed_at + DAY_S, "a block is kept for too long"
            until = max(record.expires_at, item.expires_at)
            longer = replace(record, expires_at=until, last_used=item.last_used)
            self.blocks[BlockHash(item.block_hash)] = longer, payload
            self._tell_held(longer)

    def restart(self, *, is_empty: bool) -> None:
        """Have the worker die, and another one come, which has yet to tell its blocks."""
        self.is_down = True
        while self.lookups:
            self.answer(0)
        while self.jobs:
            self.complete(0, reason="worker_died")
        self.is_down = False
        if self.tells_held:
            self.told.append(Held(is_first=True))
        self.told.append(Restarted())
        self.lost.update(self.blocks)
        if is_empty:
            self.blocks.clear()

    def tell_some(self, hashes: Sequence[BlockHash]) -> None:
        """Tell some of the blocks anew."""
        self._tell_held(*(self.blocks[each][0] for each in hashes if each in self.blocks))


class OperatedRig(Rig):
    """A rig over such a store."""

    make_store = KeepingStore  # type: ignore[assignment]
    store: KeepingStore

    def chain(self, name: str, length: int, retention: str = "24h") -> Chain:
        chain = super().chain(name, length, retention)
        if chain.token_ids is not None:
            chain.token_ids = super().chain(name, MOST_BLOCKS).token_ids
        return chain

    def write(self, block: Block, block_hash: BlockHash) -> None:
        super().write(block, block_hash)
        self.store.note_computed(block_hash, self.clock.now())
