"""How many blocks of a pool each tenant keeps, and how many blocks that keeps from the others.

A tenant keeps as many hashed blocks as its floor says, in use or not. The others of its blocks are
spare: an allocation may take them for any tenant. Blocks are counted as they change, and only
tenants that have changed are looked at again, so that more tenants make no allocation slower.

Only the engine's thread may call it.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

from tieredkv.cache.block import Block
from tieredkv.cache.orders import ByRank
from tieredkv.errors import IntegrityError


class Kept(NamedTuple):
    """How many evictable blocks are kept for tenants.

    Attributes:
        num_all: all of them.
        num_before_last: the same if blocks that are evicted last did not count as evictable.
        num_open: those that wait for a copy although they are kept, since floors gave way.
    """

    num_all: int = 0
    num_before_last: int = 0
    num_open: int = 0

    def plus(self, other: "Kept", sign: int = 1) -> "Kept":
        """Return the sum, or the difference if `sign` is -1."""
        num_all, num_before_last = self[0] + sign * other[0], self[1] + sign * other[1]
        return Kept(num_all, num_before_last, self[2] + sign * other[2])


@dataclass(slots=True, eq=False)
class Tenant:
    """What a pool counts of one tenant's blocks.

    Attributes:
        floor: number of hashed blocks that it keeps; None if it keeps none.
        num_hashed: hashed blocks, in use or not.
        num_free: those of them that nobody uses.
        num_last: those of these that are evicted last.
        num_waiting: blocks whose turn has come, and that wait for a copy, or that a copy reads.
        kept: blocks whose turn has come, but that are kept from the tenants whose turn it was.
        counted: what was last counted as kept.
    """

    floor: int | None = None
    num_hashed: int = 0
    num_free: int = 0
    num_last: int = 0
    num_waiting: int = 0
    kept: ByRank[Block] = field(default_factory=ByRank)
    counted: Kept = Kept()

    @property
    def num_spare(self) -> int:
        """How many of its hashed blocks others may have."""
        return sys.maxsize if self.floor is None else max(0, self.num_hashed - self.floor)

    def count(self) -> Kept:
        """Return how many of its evictable blocks are kept."""
        num_spare, num_before_last = self.num_spare, self.num_free - self.num_last
        num_open = max(0, self.num_waiting - num_spare)
        return Kept(
            max(0, self.num_free - num_spare), max(0, num_before_last - num_spare), num_open
        )


class Floors:
    """The floors of one pool's tenants.

    Nothing is counted while there are no floors.

    Invariants (`check`): the sum of the kept blocks is right; `keeping` has the tenants with blocks
    in `Tenant.kept`, and `giving` those of them that have more to spare than wait already.

    Attributes:
        by_tenant: number of hashed blocks that each tenant keeps, even if others want them.
        keeping, giving: tenants by the rank of their first kept block.
    """

    def __init__(self) -> None:
        self.by_tenant: Mapping[bytes, int] = {}
        self.keeping, self.giving = ByRank[Tenant](), ByRank[Tenant]()
        self._tenants: dict[bytes, Tenant] = {}
        self._changed: dict[bytes, Tenant] = {}
        self._sum = Kept()

    def __bool__(self) -> bool:
        return bool(self.by_tenant)

    @property
    def kept(self) -> list[ByRank[Block]]:
        """Blocks that are due, but kept for their tenants, by tenant."""
        return [tenant.kept for tenant in self._tenants.values()]

    def put(self, by_tenant: Mapping[bytes, int]) -> None:
        """Set the floors. Without floors before, or from now on, everything has to be counted."""
        for tenant in {**self.by_tenant, **by_tenant}:
            if self.by_tenant.get(tenant) != by_tenant.get(tenant):
                self.change(tenant).floor = by_tenant.get(tenant)
        self.by_tenant = by_tenant

    def clear(self) -> None:
        """Count nothing; no block is kept."""
        for counts in (self.keeping, self.giving):
            for tenant in list(counts):
                counts.remove(tenant)
        self._tenants.clear()
        self._changed.clear()
        self._sum = Kept()

    def change(self, tenant: bytes) -> Tenant:
        """Return a tenant's counts, for a change."""
        counts = self._changed.get(tenant)
        if counts is None:
            counts = self._tenants.get(tenant) or self._tenants.setdefault(tenant, Tenant())
            self._changed[tenant] = counts
        return counts

    def get(self, tenant: bytes | None) -> Tenant | None:
        """Return a tenant's counts; None if it has no blocks and no floor."""
        return None if tenant is None else self._tenants.get(tenant)

    def kept_from(self, tenant: bytes | None) -> Kept:
        """Return how many evictable blocks are kept for others than this tenant; None has none."""
        if self._changed:
            self.settle()
        own = self._tenants.get(tenant) if tenant is not None else None
        return self._sum if own is None else self._sum.plus(own.counted, -1)

    def settle(self) -> None:
        """Look at the tenants that have changed since the last call."""
        changed, self._changed = self._changed, {}
        for name, tenant in changed.items():
            before, tenant.counted = tenant.counted, tenant.count()
            if before != tenant.counted:
                self._sum = self._sum.plus(tenant.counted).plus(before, -1)
            self.note_kept(tenant, tenant.num_spare)
            if not tenant.num_hashed and tenant.floor is None:
                del self._tenants[name]

    def note_kept(self, tenant: Tenant, num_spare: int) -> None:
        """Note that a tenant's first kept block may be another one, and how many it can spare."""
        rank = tenant.kept.first_rank
        if rank is not None:
            self.keeping.add(tenant, rank)
        else:
            self.keeping.remove(tenant)
        if rank is not None and num_spare > tenant.num_waiting:
            self.giving.add(tenant, rank)
        else:
            self.giving.remove(tenant)

    def check(self, blocks: Iterable[Block]) -> None:
        """Raise IntegrityError if an invariant is broken; `blocks` are all hashed ones."""
        self.settle()
        counts = self._tenants.values()
        if self._sum != reduce(Kept.plus, (each.count() for each in counts), Kept()):
            raise IntegrityError("the sum of the blocks that floors keep is wrong")
        keeping = {each for each in counts if len(each.kept)}
        giving = {each for each in keeping if each.num_spare > each.num_waiting}
        if {*self.keeping} != keeping or {*self.giving} != giving:
            raise IntegrityError("a tenant with kept blocks, or with some to spare, is overlooked")
        hashed = dict.fromkeys(self._tenants, 0)
        for block in blocks:
            hashed[block.tenant] = hashed.get(block.tenant, 0) + 1
        if hashed != {name: each.num_hashed for name, each in self._tenants.items()}:
            raise IntegrityError("the number of blocks per tenant is wrong")
