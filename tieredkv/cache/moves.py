"""Moves blocks between the tiers, step by step: what has arrived, what can start, what must go.

Called by the engine's thread only.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from tieredkv.cache.demotion import Demoter
from tieredkv.cache.directory import Entry
from tieredkv.cache.promotion import Promoter
from tieredkv.cache.tiers import Tiers
from tieredkv.errors import IntegrityError
from tieredkv.storage.messages import ControlRequest, PageLoaded, PageStored, WorkerUp
from tieredkv.types import BlockHash


class BlockMover:
    """Takes in what streams and store have completed, and starts what comes next.

    Invariants (`check`): those of both pools, the directory, promotion and demotion; every ready
    hashed block of a pool has an entry in the directory, and every entry is in a pool.

    Attributes:
        control_requests: what the store's worker wants to know for an operator.
    """

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self.promoter = Promoter(tiers)
        self.demoter = Demoter(tiers, self.poll)
        self.control_requests: deque[ControlRequest] = deque()
        self._handlers: dict[type, Callable[[Any], object]] = {
            PageLoaded: self.promoter.on_page_loaded,
            PageStored: self.demoter.on_page_stored,
            WorkerUp: lambda _: tiers.directory.forget_disk(),
            ControlRequest: self.control_requests.append,
        }

    def poll(self, *, may_start_early: bool = False) -> None:
        """Take in what streams and store have completed since the last call.

        Args:
            may_start_early: hand blocks over when their first layers have arrived. A step that
                waits for the others holds up whoever shares it, so it is for an idle device.
        """
        transfer, store = self.tiers.transfer, self.tiers.store
        for _, copies in transfer.poll_usable() if may_start_early else ():
            for _, block in copies:
                block.is_ready = True
        promoted, demoted = transfer.poll()
        for began_at, copies in promoted:
            self.promoter.on_copied(began_at, copies)
        for began_at, pairs in demoted:
            self.demoter.on_copied(began_at, pairs)
        for event in store.poll() if store is not None else ():
            self._handlers[type(event)](event)

    def pump(self) -> None:
        """Start what can start: loads, demotions ahead of need, expiry. Once a step."""
        self.expire_due()
        if self.promoter.pump():
            self.demoter.note_change()
        self.demoter.pump()

    def expire_due(self) -> None:
        """Make every block unreachable whose time has come; end the protection of others."""
        tiers, now = self.tiers, self.tiers.clock.now()
        aged: list[BlockHash] = []
        for entry in tiers.directory.due(now):
            if tiers.directory.is_expired(entry, now):
                tiers.drop(entry.block_hash, "ttl")
                tiers.counters.expired_blocks += 1
            else:
                aged.append(entry.block_hash)
        for pool in tiers.pools.values():
            pool.touch(aged)

    def evict(self, is_wanted: Callable[[Entry], bool]) -> int:
        """Make the blocks that the filter wants unreachable in VRAM and host memory; count them.

        Those that are being read from disk do not arrive; those that are being written to it are
        deleted there once they are.
        """
        wanted = [entry for entry in self.tiers.directory.entries() if is_wanted(entry)]
        for entry in wanted:
            self.tiers.drop(entry.block_hash, "admin")
        self.promoter.evict(is_wanted)
        self.demoter.note_change()
        return len(wanted)

    @property
    def is_idle(self) -> bool:
        """Whether nothing moves."""
        return self.promoter.is_idle and self.demoter.is_idle

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        tiers = self.tiers
        tiers.device.check()
        tiers.host.check()
        tiers.directory.check()
        self.promoter.check()
        self.demoter.check()
        for entry in tiers.directory.entries():
            if not tiers.is_in_ram(entry.block_hash):
                raise IntegrityError(f"entry {entry.block_hash.hex()[:12]} is in no RAM tier")
        for pool in tiers.pools.values():
            for block in pool.evictable():
                if tiers.directory.get(block.block_hash) is None:
                    raise IntegrityError(f"evictable block {block.block_id} has no entry")
