"""Drops blocks whose retention has ended, to the second where a request asks for them.

Called by the engine's thread only.
"""

from collections.abc import Sequence

from tieredkv.cache.catalog import Entry
from tieredkv.cache.tiers import Tiers
from tieredkv.types import BlockHash

MAX_EXPIRED = 64
"""Queued blocks that one step examines for expiry; the next step continues with the others."""


class Expiry:
    """Drops expired blocks from VRAM and host memory, and ends pins."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers

    def sweep(self) -> None:
        """Drop expired blocks, a bounded number per call, and end pins whose time is over."""
        tiers, now = self._tiers, self._tiers.clock.now()
        due = tiers.catalog.due(now, MAX_EXPIRED)
        for entry in due.expired:
            self._drop(entry)
        tiers.recheck(due.owed_no_more)
        tiers.device.touch(due.unpinned)
        tiers.touch_pages(due.unpinned)

    def drop_among(self, hashes: Sequence[BlockHash]) -> None:
        """Drop expired blocks among `hashes`, even if the sweep has not reached them yet."""
        catalog, now = self._tiers.catalog, self._tiers.clock.now()
        self.sweep()
        if catalog.is_behind:
            for entry in filter(None, map(catalog.get, hashes)):
                if catalog.is_expired(entry, now):
                    self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        self._tiers.drop(entry.block_hash, "expired")
        self._tiers.counters.expired_blocks += 1
