"""Blocks that an operator sends to a slower tier: they are copied down first, then dropped above.

Called by the engine's thread only.
"""

import time
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from tieredkv.cache.block import Block
from tieredkv.cache.demotion import Demoter
from tieredkv.cache.tiers import Tiers
from tieredkv.types import BlockHash, Tier

MAX_LOOKS = 256
"""Blocks that one step may examine."""

PATIENCE_S = 60.0
"""A block that has not arrived in the slower tier within this time stays where it is."""


class _Departure(NamedTuple):
    """Where a block goes, and until when that is tried, in monotonic time."""

    to: Tier
    give_up_at: float


class Departures:
    """Moves chosen blocks down, a bounded number a step.

    Args:
        tiers: the tiers.
        demoter: copies and writes blocks.
    """

    def __init__(self, tiers: Tiers, demoter: Demoter) -> None:
        self._tiers, self._demoter = tiers, demoter
        self._waiting: OrderedDict[BlockHash, _Departure] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, hashes: Iterable[BlockHash], to: Tier) -> None:
        """Begin to move blocks to a slower tier; a later call says better where a block goes."""
        departure = _Departure(to, time.monotonic() + PATIENCE_S)
        self._waiting.update(dict.fromkeys(hashes, departure))

    def note_copied(self, pages: Iterable[Block]) -> None:
        """Have blocks that have just got a page go on first, before other copies take the page."""
        for page in pages if self._waiting else ():
            if (block_hash := page.block_hash) is not None and block_hash in self._waiting:
                self._waiting.move_to_end(block_hash, last=False)

    def pump(self) -> None:
        """Drop the upper copies of blocks that have arrived, and start the moves of others."""
        tiers, now = self._tiers, time.monotonic()
        blocks, pages = list[Block](), list[Block]()
        for block_hash in list(islice(self._waiting, MAX_LOOKS)):
            departure = self._waiting.pop(block_hash)
            entry = tiers.catalog.get(block_hash)
            if entry is None or now > departure.give_up_at:
                continue
            block, page = tiers.device.lookup(block_hash), tiers.host.lookup(block_hash)
            has_page = page is not None and page.is_ready
            if departure.to is Tier.HOST and has_page:
                tiers.drop_copy(Tier.DEVICE, block_hash)
            elif departure.to is Tier.DISK and entry.is_on_disk:
                tiers.drop_copy(Tier.DEVICE, block_hash)
                tiers.drop_copy(Tier.HOST, block_hash)
            elif not entry.is_droppable:  # else its write was given up
                self._waiting[block_hash] = departure
                if page is not None and page.is_ready:
                    pages.append(page)
                elif page is None and block is not None and block.is_ready:
                    blocks.append(block)
        if blocks or pages:
            self._demoter.send(blocks, pages)
