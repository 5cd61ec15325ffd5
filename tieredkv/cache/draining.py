"""Empties tiers, for an operator or at a stop: starts moves and polls until none is left.

Called by the engine's thread only.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from tieredkv.cache.catalog import Entry
from tieredkv.cache.demotion import Demoter
from tieredkv.cache.tiers import Tiers
from tieredkv.types import Progress, Tier

POLL_S = 0.0005
"""A drain looks so often for what has ended."""


class Drained(NamedTuple):
    """What a drain has left in memory of what the disk should keep.

    Attributes:
        num_late: blocks that there was no time for.
        num_refused: blocks that the store refused.
        why: why it did.
    """

    num_late: int
    num_refused: int
    why: str


class Drainer:
    """Moves down all that is in VRAM and host memory, or all that the disk is owed.

    Args:
        tiers: the tiers.
        demoter: copies and writes blocks.
        poll: takes in the copies, reads and writes that have ended.
    """

    def __init__(self, tiers: Tiers, demoter: Demoter, poll: Callable[[], None]) -> None:
        self._tiers, self._demoter, self._poll = tiers, demoter, poll

    def flush(self, to: Tier, *, deadline: float) -> bool:
        """Move all blocks that no request uses out of the tiers above `to`.

        Blocks that no retention policy lets into `to` are dropped.

        Args:
            to: HOST empties the device tier, DISK the device and the host tier.
            deadline: monotonic time at which to stop.

        Returns:
            Whether all of them were moved or dropped before the deadline.
        """
        tiers, demoter = self._tiers, self._demoter
        device, host = tiers.device, tiers.host
        tiers_above = [Tier.DEVICE, Tier.HOST] if to is Tier.DISK else [Tier.DEVICE]
        while demoter.is_copying or any(tiers.pools[it].num_evictable for it in tiers_above):
            self._poll()
            moved = sum(map(tiers.evict_clean, tiers_above))
            started = demoter.demote(device.num_blocks)
            if to is Tier.DISK or (not started and device.num_evictable):
                started += demoter.write(host.num_blocks)
            is_moving = demoter.is_moving or host.num_used  # pages being read too
            is_stuck = not (moved or started or is_moving)
            if is_stuck or time.monotonic() >= deadline:
                return False
            if not moved:
                time.sleep(POLL_S)
        return True

    def drain(
        self, timeout_s: float, *, progress: Progress, meanwhile: Callable[[], object]
    ) -> Drained:
        """Write all blocks that are owed to the disk: the newest chains first, each from its head.

        What the disk has no room for beside newer blocks is not written, since it would have them
        evicted, and is not lost: it counts as evicted. Then wait for the copies under way.

        Args:
            timeout_s: for how long to write at most.
            progress: told how many blocks are written or given up.
            meanwhile: called again and again, and may drop blocks.

        Returns:
            What is lost, which the counters have noted; not blocks that were dropped meanwhile.
        """
        tiers, demoter, owed = self._tiers, self._demoter, self._tiers.catalog.owed
        deadline = time.monotonic() + timeout_s
        tiers.recheck(tiers.catalog.try_again())
        newest, budget = self._newest(), tiers.store.stats().bytes_budget if tiers.store else 0
        fitting = budget // tiers.payload_bytes if budget else len(newest)
        entries = [entry for entry in newest[:fitting] if not entry.is_on_disk]
        too_many = [entry for entry in newest[fitting:] if not entry.is_on_disk]
        for entry in reversed(entries):
            owed.move_to_end(entry.block_hash, last=False)
        for entry in too_many:
            tiers.catalog.give_up(entry)
        demoter.is_draining = True
        while not demoter.is_idle and time.monotonic() < deadline:
            self._poll()
            meanwhile()
            demoter.write_owed()
            progress("writing to disk", max(0, len(entries) - len(owed)), len(entries))
            time.sleep(POLL_S)
        demoter.is_draining = False
        evicted = {entry.block_hash for entry in too_many}
        promised = filter(tiers.is_promised, tiers.catalog.entries())
        left = [entry for entry in promised if entry.block_hash not in evicted]
        refusals = Counter(entry.refusal for entry in left if entry.refusal)
        num_refused, lost = refusals.total(), tiers.counters.lost_blocks
        num_late = len(left) - num_refused
        lost.update(refusals)
        if num_late:
            lost["drain_timeout"] += num_late
        why = ""
        if num_refused and tiers.store is not None:
            why = tiers.store.state().why or ", ".join(refusals)
        tiers.device_link.synchronize()
        tiers.events.flush()
        return Drained(num_late, num_refused, why)

    def _newest(self) -> list[Entry]:
        """Return what the disk has or is owed: the newest chains first, each from its head."""
        entries, is_owed = self._tiers.catalog.entries(), self._tiers.is_owed_to_disk
        entries = [it for it in entries if it.is_on_disk or is_owed(it.block_hash)]
        recency = {entry.block_hash: entry.last_used for entry in entries}
        for entry in sorted(entries, key=lambda entry: -entry.position):
            if entry.parent_hash in recency:  # a chain is as new as its newest block
                parent = recency[entry.parent_hash]
                recency[entry.parent_hash] = max(parent, recency[entry.block_hash])
        entries.sort(key=lambda entry: (-recency[entry.block_hash], entry.position))
        return entries
