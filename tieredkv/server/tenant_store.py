"""What a server keeps of its tenants' requests, in memory and within a bound that they share.

Nothing is written to a disk. This module knows tenants and bytes, but not what is kept.
"""

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, Protocol, TypeVar

from tieredkv.operate.calls import EvictFilter


class Kept(Protocol):
    """What an entry must tell.

    Attributes:
        namespace: the digest of the namespace that its request's blocks are in.
        used_at: when it was last used, in seconds since the epoch.
    """

    namespace: bytes
    used_at: float


Key = TypeVar("Key", bound=Hashable)
Entry = TypeVar("Entry", bound=Kept)


class Figures(NamedTuple):
    """How much is held: entries, and their bytes."""

    entries: int
    bytes: int


class TenantStore(Generic[Key, Entry]):
    """The entries of all tenants; any thread may call it.

    Where there is no room for another entry, the first one of the tenant with the most bytes goes,
    so that a tenant with less than an equal share loses none to others.

    Args:
        max_bytes: how many bytes may be held; with 0 nothing is kept.
        now: returns the time in seconds since the epoch.
    """

    def __init__(self, max_bytes: int, now: Callable[[], float]) -> None:
        self._max_bytes, self._now = max_bytes, now
        self._of: dict[str, dict[Key, Entry]] = {}  # by tenant and key; the first ones go first
        self._bytes = Counter[str]()
        self._lock = threading.Lock()

    def evict(self, wanted: EvictFilter) -> int:
        """Drop the entries that an operator wants to evict, and return how many.

        Ids and filters name chains of blocks, and so no entry. A dry run only counts.
        """
        if wanted.is_of_blocks:
            return 0
        with self._lock:
            self._expire()
            now = self._now()
            found = [
                (tenant, key)
                for tenant, entries in self._of.items()
                for key, each in entries.items()
                if wanted.matches(each.namespace, each.used_at, now)
            ]
            if not wanted.dry_run:
                for tenant, key in found:
                    self._drop(tenant, key)
            return len(found)

    def keep_tenants(self, is_known: Callable[[str], bool]) -> None:
        """Drop the entries of tenants that are no longer known."""
        with self._lock:
            for tenant in [tenant for tenant in self._of if not is_known(tenant)]:
                for key in [*self._of[tenant]]:
                    self._drop(tenant, key)

    def num_bytes(self, tenant: str) -> int:
        """Return how many bytes are held for a tenant."""
        return self._bytes[tenant]

    @property
    def figures(self) -> Figures:
        """How much is held for all tenants together."""
        with self._lock:
            self._expire()
            return Figures(sum(map(len, self._of.values())), self._bytes.total())

    def _put(self, tenant: str, key: Key, entry: Entry) -> None:
        self._drop(tenant, key)
        self._of.setdefault(tenant, {})[key] = entry
        self._bytes[tenant] += self._hold(tenant, key, entry)
        while self._bytes.total() > self._max_bytes:
            [(largest, _)] = self._bytes.most_common(1)
            self._drop(largest, next(iter(self._of[largest])))

    def _drop(self, tenant: str, key: Key) -> bool:
        entries = self._of.get(tenant, {})
        entry = entries.pop(key, None)
        if entry is None:
            return False
        self._bytes[tenant] -= self._release(tenant, key, entry)
        if not entries:
            del self._of[tenant], self._bytes[tenant]
        return True

    def _expire(self) -> None:
        """Drop the entries whose time is over."""

    def _hold(self, tenant: str, key: Key, entry: Entry) -> int:
        """Count an entry in, and return how many bytes are held for it."""
        raise NotImplementedError

    def _release(self, tenant: str, key: Key, entry: Entry) -> int:
        """Count an entry out, and return how many bytes are no longer held."""
        raise NotImplementedError
