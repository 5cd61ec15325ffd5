"""How many blocks of a pool each tenant keeps, and how many blocks that keeps from the others.

A tenant keeps as many hashed blocks as its floor says, in use or not. The others of its blocks are
spare: an allocation may take them for any tenant. Only the blocks of tenants that have changed are
counted again, so that an allocation does not cost more when there are more tenants.

Only the engine's thread may call it.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tieredkv.cache.block import Block
from tieredkv.cache.eviction import EvictionOrder
from tieredkv.errors import IntegrityError


class Kept(NamedTuple):
    """How many evictable blocks are kept for tenants.

    Attributes:
        num_all: in all orders.
        num_unpinned: the same if only the blocks that are not pinned counted as evictable.
    """

    num_all: int = 0
    num_unpinned: int = 0


class Floors:
    """The floors of one pool's tenants.

    Nothing is counted while there are no floors.

    Invariants (`check`): the kept blocks are those that a count of all tenants finds; every kept
    block of a tenant with blocks to spare is going to be looked at.

    Args:
        orders: the pool's eviction orders; the last one has the pinned blocks.

    Attributes:
        by_tenant: number of hashed blocks that each tenant keeps, even if others want them.
        num_hashed: number of hashed blocks by tenant, in use or not.
    """

    def __init__(self, orders: Sequence[EvictionOrder]) -> None:
        self._orders = orders
        self.by_tenant: Mapping[bytes, int] = {}
        self.num_hashed: Counter[bytes] = Counter()
        self._changed: dict[bytes, None] = {}  # tenants to be counted again
        self._kept: dict[bytes, Kept] = {}  # of tenants for which blocks are kept
        self._sum = Kept()
        for order in orders:
            order.changed = self._changed

    def __bool__(self) -> bool:
        return bool(self.by_tenant)

    def put(self, by_tenant: Mapping[bytes, int], hashed: Iterable[Block]) -> None:
        """Set the floors; `hashed` are all hashed blocks of the pool."""
        before, self.by_tenant = self.by_tenant, by_tenant
        if bool(before) != bool(by_tenant):
            self._changed.clear()
            self._kept.clear()
            self._sum = Kept()
            self.num_hashed = Counter(block.tenant for block in hashed) if by_tenant else Counter()
            for order in self._orders:
                order.count_tenants(bool(by_tenant))
            self._changed.update(dict.fromkeys(self.num_hashed))
        moved = [it for it in {**before, **by_tenant} if before.get(it) != by_tenant.get(it)]
        self._changed.update(dict.fromkeys(moved))

    def note_hashed(self, tenant: bytes, count: int) -> None:
        """Note that a tenant has more hashed blocks, or fewer; only while there are floors."""
        self.num_hashed[tenant] += count
        self._changed[tenant] = None

    def num_spare(self, tenant: bytes) -> int:
        """Return how many of a tenant's hashed blocks others may have."""
        floor = self.by_tenant.get(tenant)
        return sys.maxsize if floor is None else max(0, self.num_hashed[tenant] - floor)

    def is_within(self, tenant: bytes) -> bool:
        """Return whether a tenant has a floor and no blocks to spare."""
        return self.num_spare(tenant) == 0

    def kept_from(self, tenant: bytes | None) -> Kept:
        """Return how many evictable blocks are kept for others than this tenant; None has none."""
        self.count_changed()
        own = self._kept.get(tenant, Kept()) if tenant is not None else Kept()
        num_all, num_unpinned = self._sum
        return Kept(num_all - own.num_all, num_unpinned - own.num_unpinned)

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        self.count_changed()
        counted = {tenant: self._count(tenant) for tenant in self.by_tenant}
        if self._kept != {tenant: kept for tenant, kept in counted.items() if kept.num_all}:
            raise IntegrityError("the number of blocks that floors keep is wrong")
        if self._sum != tuple(map(sum, zip(Kept(), *counted.values(), strict=True))):
            raise IntegrityError("the sum of the blocks that floors keep is wrong")
        for order in self._orders:
            order.check_kept(self.num_spare)

    def count_changed(self) -> None:
        """Count again what has changed; the orders know then which of their blocks are kept."""
        for tenant in self._changed:
            before, kept = self._kept.pop(tenant, Kept()), self._count(tenant)
            if kept.num_all:
                self._kept[tenant] = kept
            num_all = self._sum.num_all + kept.num_all - before.num_all
            num_unpinned = self._sum.num_unpinned + kept.num_unpinned - before.num_unpinned
            self._sum = Kept(num_all, num_unpinned)
            num_spare = self.num_spare(tenant)
            for order in self._orders:
                order.note_changed(tenant, num_spare)
            if not self.num_hashed[tenant]:
                del self.num_hashed[tenant]
                for order in self._orders:
                    order.forget_tenant(tenant)
        self._changed.clear()

    def _count(self, tenant: bytes) -> Kept:
        *unpinned, last = (order.num_of[tenant] for order in self._orders)
        num_unpinned, num_spare = sum(unpinned), self.num_spare(tenant)
        return Kept(max(0, num_unpinned + last - num_spare), max(0, num_unpinned - num_spare))
