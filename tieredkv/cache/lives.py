"""Learns how old the disk's copies are of blocks that were computed though the disk has them.

Such a block is not written again, and it is as old as its copy: else the copy might be kept for
longer than it may. The table of what the disk has tells no ages, so the disk is asked, and nobody
waits for the answer. Until it comes, no use of the block is told to the disk.

Called by the engine's thread only.
"""

from collections.abc import Sequence

from tieredkv.cache.catalog import Entry
from tieredkv.cache.tiers import Tiers
from tieredkv.tier import LookupDone
from tieredkv.types import BlockHash


class Lives:
    """The blocks whose copies on disk are of an age that is not known yet."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._open: dict[int, list[BlockHash]] = {}  # by job
        self._awaited: set[BlockHash] = set()

    def is_awaited(self, entry: Entry) -> bool:
        """Return whether the age of a block's copy is not known yet."""
        return entry.block_hash in self._awaited

    def ask(self, entries: Sequence[Entry]) -> None:
        """Ask for the lives of blocks that were computed and count as being on disk."""
        if entries and self._tiers.store is not None:
            hashes = [entry.block_hash for entry in entries]
            self._awaited.update(hashes)
            self._open[self._tiers.store.lookup(hashes)] = hashes

    def take(self, event: LookupDone) -> bool:
        """Use an answer if it is about such blocks; return whether it is."""
        if (hashes := self._open.pop(event.job, None)) is None:
            return False
        tiers, found, now = self._tiers, list[Entry](), self._tiers.clock.now()
        self._awaited.difference_update(hashes)
        for entry in filter(None, map(tiers.catalog.get, hashes)):
            if (data := event.found.get(entry.block_hash)) is None:
                tiers.note_not_on_disk(entry)
                continue
            known = tiers.disk_link.times_of(data)
            entry.computed_at = min(entry.computed_at, known.computed_at)
            entry.disk_expires_at = known.expires_at
            found.append(entry)
        tiers.catalog.add_all(found)
        if found and tiers.store is not None:
            tiers.store.touch(tiers.catalog.touch_items(found, now))
        return True
