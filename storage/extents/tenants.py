"""Whose block gives way next, and how many bytes on disk each tenant has, in memory.

The index orders blocks within a tenant; this module merges the tenants. What an eviction costs does
not grow with them, since a tenant is looked at only if its longest unused block may be the next
one, or if its bytes have changed.
"""

from collections import Counter
from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from tieredkv.storage.format.record import Located
from tieredkv.storage.index.entries import tenant_of
from tieredkv.storage.index.transaction import TXN_BLOCKS, IndexTxn

_MOST_STALE = 64  # entries of a heap that are kept although they do not count any more


class Tenants:
    """The tenants of one store; only the store's thread uses it.

    A tenant with a share of the budget keeps that much while other tenants have blocks. Invariants:
      - each tenant with blocks has a bound, and none of its keys in `lru` sorts before the bound;
      - a tenant is kept, because its next block would take it below its share, or it can be evicted
        from; the heaps of either kind have an entry for each of its tenants. Others are stale.

    The state is that of the last committed transaction. After a failed one, call `forget`.
    """

    def __init__(self) -> None:
        self._given: Mapping[bytes, float] = {}
        self._shares: dict[bytes, float] = {}
        self._is_known = False
        self._bytes = Counter[bytes]()
        self._bounds: dict[bytes, bytes] = {}
        self._evictable: list[tuple[bytes, bytes]] = []  # bound, tenant
        self._next_bytes: dict[bytes, int] = {}  # of a kept tenant's next block
        # What would be left of a kept tenant without its next block, as a multiple of its share.
        self._excess: dict[bytes, float] = {}
        self._kept: list[tuple[float, bytes]] = []  # the same, negated, with the tenant
        self._kept_bounds: list[tuple[bytes, bytes]] = []

    def keep_shares(self, shares: Mapping[bytes, float]) -> None:
        """Keep a share of the budget for each of these tenants from now on.

        To change shares, pass another object.
        """
        if shares is self._given:
            return
        self._given = shares
        shares = {tenant_of(each): share for each, share in shares.items() if share > 0}
        if shares != self._shares:
            self._shares = shares
            self._let_all_go()

    def forget(self) -> None:
        """Read everything from the index again when it is needed next."""
        self._is_known = False

    def note(self, txn: IndexTxn) -> None:
        """Take over what a committed transaction has changed."""
        if not self._is_known:
            return
        for tenant, num_bytes in txn.growth.items():
            self._bytes[tenant] += num_bytes
            if tenant in self._excess:
                self._keep(tenant, self._bytes[tenant], self._next_bytes[tenant])
        for tenant, order in txn.first_orders.items():
            if tenant not in self._bounds or order < self._bounds[tenant]:
                self._bounds[tenant] = order
                if tenant not in self._excess:
                    self._let_go(tenant)
                else:
                    heappush(self._kept_bounds, (order, tenant))

    def choose(
        self, txn: IndexTxn, needed_bytes: float, asked: Mapping[bytes, int], most_bytes: float
    ) -> list[Located]:
        """Choose blocks to evict, up to `TXN_BLOCKS`: the longest unused that no share keeps.

        If no other blocks are left, the longest unused of all are chosen. Where nobody asks, they
        are of the tenant furthest above its share, or nearest below it. The caller removes them in
        this transaction.

        Args:
            txn: a transaction that has changed no block yet.
            needed_bytes: how many bytes their extents have at least, if there are so many.
            asked: how many bytes each tenant gets back. So it may lose as many that its share would
                keep otherwise, unless it is below its share already.
            most_bytes: of which the shares are parts.
        """
        if not self._is_known:
            self._read(txn)
        while self._kept and -self._kept[0][0] >= most_bytes:
            excess, tenant = heappop(self._kept)
            if self._excess.get(tenant) == -excess:
                del self._excess[tenant]
                self._let_go(tenant)
        returned = dict[bytes, int]()
        for tenant, num_bytes in asked.items():
            if self._bytes[tenant := tenant_of(tenant)] >= self._share(tenant) * most_bytes:
                returned[tenant] = num_bytes
                if self._excess.pop(tenant, None) is not None:
                    self._let_go(tenant)
        victims, lost = list[Located](), Counter[bytes]()
        while needed_bytes > 0 and len(victims) < TXN_BLOCKS and (found := self._next(asked)):
            tenant, was_kept = found
            bound = self._bounds[tenant]
            if (order := txn.next_unused(tenant, bound)) is None:
                del self._bounds[tenant]  # it has no block any more
                continue
            self._bounds[tenant] = order
            is_first = not self._evictable or (order, tenant) < self._evictable[0]
            if order != bound and (was_kept or not is_first):  # another's block may come first
                self._put_back(tenant, self._bytes[tenant] - lost[tenant], was_kept=was_kept)
                continue
            if (located := txn.unused_block(order)) is None:
                self._bounds[tenant] = order + b"\0"
                self._let_go(tenant)
                continue
            has_bytes, next_bytes = self._bytes[tenant] - lost[tenant], located.extent_bytes
            left_bytes = has_bytes - next_bytes + returned.get(tenant, 0)
            is_kept = tenant in self._shares and left_bytes < self._share(tenant) * most_bytes
            if is_kept and not was_kept:
                self._keep(tenant, has_bytes, next_bytes)
                continue
            victims.append(located)
            needed_bytes -= next_bytes
            lost[tenant] += next_bytes
            self._bounds[tenant] = order + b"\0"
            self._next_bytes[tenant] = next_bytes
            self._put_back(tenant, has_bytes - next_bytes, was_kept=is_kept)
        return victims

    def _share(self, tenant: bytes) -> float:
        return self._shares.get(tenant, 0.0)

    def _read(self, txn: IndexTxn) -> None:
        """Read what there is, the changes of this transaction included."""
        self._bytes = txn.tenant_bytes()
        self._bounds = dict(txn.first_unused())
        txn.growth.clear()
        txn.first_orders.clear()
        self._is_known = True
        self._let_all_go()

    def _next(self, asked: Mapping[bytes, int]) -> tuple[bytes, bool] | None:
        """Take the tenant whose block is to go next off its heap; tell whether it was kept."""
        while self._evictable:
            bound, tenant = heappop(self._evictable)
            if tenant not in self._excess and self._bounds.get(tenant) == bound:
                return tenant, False
        while asked and self._kept_bounds:
            bound, tenant = heappop(self._kept_bounds)
            if tenant in self._excess and self._bounds.get(tenant) == bound:
                del self._excess[tenant]
                return tenant, True
        while self._kept:
            excess, tenant = heappop(self._kept)
            if self._excess.get(tenant) == -excess:
                del self._excess[tenant]
                return tenant, True
        return None

    def _put_back(self, tenant: bytes, has_bytes: int, *, was_kept: bool) -> None:
        if was_kept:
            self._keep(tenant, has_bytes, self._next_bytes[tenant])
        else:
            self._let_go(tenant)

    def _keep(self, tenant: bytes, has_bytes: int, next_bytes: int) -> None:
        excess = (has_bytes - next_bytes) / self._shares[tenant]
        self._excess[tenant], self._next_bytes[tenant] = excess, next_bytes
        heappush(self._kept, (-excess, tenant))
        heappush(self._kept_bounds, (self._bounds[tenant], tenant))
        if max(len(self._kept), len(self._kept_bounds)) > 2 * len(self._excess) + _MOST_STALE:
            self._kept = [(-excess, each) for each, excess in self._excess.items()]
            self._kept_bounds = [(self._bounds[each], each) for each in self._excess]
            heapify(self._kept)
            heapify(self._kept_bounds)

    def _let_go(self, tenant: bytes) -> None:
        heappush(self._evictable, (self._bounds[tenant], tenant))
        if len(self._evictable) > 2 * len(self._bounds) + _MOST_STALE:
            self._let_all_of_heap()

    def _let_all_go(self) -> None:
        """Let tenants be evicted from until they turn out to be kept."""
        self._excess.clear()
        self._next_bytes.clear()
        self._kept.clear()
        self._kept_bounds.clear()
        self._let_all_of_heap()

    def _let_all_of_heap(self) -> None:
        bounds = self._bounds.items()
        self._evictable = [(bound, each) for each, bound in bounds if each not in self._excess]
        heapify(self._evictable)
