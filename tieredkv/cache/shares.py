"""Which part of each tier is reserved for each tenant.

Called by the engine's thread only.
"""

from collections.abc import Collection, Mapping
from itertools import takewhile

from tieredkv.cache.pool import BlockPool
from tieredkv.clock import Clock
from tieredkv.tier import BackingTier

SEEN_S = 3600.0
"""Since a tenant's last request; after that nothing is reserved for it any more."""


class Shares:
    """The fraction of each tier that a tenant has: the operator's, else an equal part of the rest.

    The pools get them as floors, in blocks, and the disk gets them as they are.

    Args:
        pools: of VRAM and host memory.
        disk: the disk tier, or None.
        clock: tells the time.

    Attributes:
        by_tenant: the fractions; empty while there is only one tenant.
    """

    def __init__(
        self, pools: Collection[BlockPool], disk: BackingTier | None, clock: Clock
    ) -> None:
        self._pools, self._disk, self._clock = pools, disk, clock
        self.by_tenant: Mapping[bytes, float] = {}
        self._given: Mapping[bytes, float] = {}
        self._seen = dict[bytes, float]()  # in the order of the last requests

    def __bool__(self) -> bool:
        return bool(self.by_tenant)

    def note_request(self, tenant: bytes) -> None:
        """Note a tenant's request; each tenant of the last hour has a share."""
        now, seen = self._clock.now(), self._seen
        is_known = seen.pop(tenant, None) is not None
        seen[tenant] = now  # it is the last one now
        gone = list(takewhile(lambda each: now - seen[each] >= SEEN_S, seen))
        for each in gone:
            del seen[each]
        if gone or not is_known:
            self._share_out()

    def give(self, shares: Mapping[bytes, float]) -> None:
        """Set the fractions that the operator wants."""
        self._given = shares
        self._share_out()

    def _share_out(self) -> None:
        rest = 1 - sum(self._given.values())
        equal = rest / max(1, len(self._seen.keys() - self._given))
        shares = {**dict.fromkeys(self._seen, equal), **self._given}
        self.by_tenant = shares if len(shares) > 1 else {}
        for pool in self._pools:
            floors = {tenant: int(it * pool.num_blocks) for tenant, it in self.by_tenant.items()}
            pool.floors = floors
        if self._disk is not None:
            self._disk.shares = self.by_tenant
