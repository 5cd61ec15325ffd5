"""Copies between device blocks and host pages that a test controls."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tieredkv.cache.device_link import DeviceLink
from tieredkv.kernels.copies import BlockCopier
from tieredkv.types import BlockId, PageId


class FakeDeviceLink(DeviceLink[Any]):
    """Copies that move their bytes only when they complete, which a test can delay.

    Attributes:
        is_held: Whether copies stay open until `complete` or `complete_down`.
        may_fill: Whether a copy may be started into a device block, by its id.
        on_fill: Called with the id of each device block into which a copy is started.
    """

    def __init__(self, device: torch.Tensor, arena: torch.Tensor) -> None:
        super().__init__(BlockCopier(device, arena))
        self.is_held = False
        self.may_fill: Callable[[int], bool] = lambda block_id: True
        self.on_fill: Callable[[int], object] = lambda block_id: None
        self._up: list[tuple[Sequence[tuple[PageId, BlockId]], Any]] = []
        self._begun: list[Any] = []  # of which `poll_usable` has yet to tell
        self._num_begun = 0  # of the oldest copies up
        self._down: list[tuple[Sequence[tuple[BlockId, PageId]], Any]] = []

    @property
    def has_pending(self) -> bool:
        return bool(self._up or self._down)

    @property
    def targets(self) -> frozenset[int]:
        """Ids of the device blocks that copies have yet to fill."""
        return frozenset(block_id for pairs, _ in self._up for _, block_id in pairs)

    def promote(self, pairs: Sequence[tuple[PageId, BlockId]], tag: Any, *, after: int = 0) -> None:
        for _, block_id in pairs:
            assert self.may_fill(block_id), "a copy is started into a block that has a writer"
            assert block_id not in self.targets, "two copies fill one block"
            self.on_fill(block_id)
        self._up.append((pairs, tag))

    def demote(self, pairs: Sequence[tuple[BlockId, PageId]], tag: Any, *, after: int = 0) -> None:
        self._down.append((pairs, tag))

    def poll(self) -> tuple[list[Any], list[Any]]:
        while not self.is_held and (self._up or self._down):
            self.complete()
        return super().poll()

    def poll_usable(self) -> list[Any]:
        begun, self._begun = self._begun, []
        return begun

    def begin(self) -> None:
        """Copy the first layers of the oldest copy to VRAM that waits for them.

        `poll_usable` tells of it.
        """
        pairs, tag = self._up[self._num_begun]
        self._num_begun += 1
        self._copier.copy_in(pairs, None, slice(self._copier.block_bytes // 2))
        self._begun.append(tag)

    @property
    def can_begin(self) -> bool:
        """Whether a copy to VRAM waits for its first layers."""
        return self._num_begun < len(self._up)

    def complete(self) -> None:
        """Complete the oldest copy of each direction."""
        if self._up:
            pairs, tag = self._up.pop(0)
            self._num_begun = max(0, self._num_begun - 1)
            self._begun = [each for each in self._begun if each is not tag]
            super().promote(pairs, tag)
        self.complete_down()

    def complete_down(self) -> None:
        """Complete the oldest copy to host memory."""
        if self._down:
            super().demote(*self._down.pop(0))
