"""What the store keeps of what the engine claims: which blocks, and until when.

Any thread may use this module, but for the names of blocks that are deleted.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from tieredkv.clock import Clock
from tieredkv.storage.format.record import namespace_in
from tieredkv.tier import TouchItem
from tieredkv.types import BlockRecord

_CLOCK_SLACK_S = 1.0
_TIMES = ("computed_at", "expires_at", "pinned_until", "last_used")
Item = TypeVar("Item", BlockRecord, TouchItem)


@dataclass(frozen=True, slots=True)
class Claims:
    """Decides on the claims of blocks and touches.

    Args:
        clock: the store's clock.
        disk_retentions: names of the retention policies that allow the disk tier.
    """

    clock: Clock
    disk_retentions: Collection[str]

    def of_block(self, record: BlockRecord) -> BlockRecord | None:
        """Return a block's record by our clock, or None if it must not be stored.

        NOTE: this is the last check that keeps a block off the disk whose retention does not allow
        the disk.
        """
        is_allowed = record.retention in self.disk_retentions
        return self._by_our_clock(record) if is_allowed else None

    def of_touch(self, touch: TouchItem) -> TouchItem:
        """Return a touch by our clock, without a claim that no retention lets the disk keep."""
        touch = self._by_our_clock(touch)
        is_kept = touch.retention in self.disk_retentions
        return touch if is_kept else replace(touch, expires_at=None, retention=None)

    def _by_our_clock(self, item: Item) -> Item:
        """Convert the times of a block or a touch to our clock if the engine's clock is ahead.

        Neither clock ever runs back. If the system's clock does, a worker that starts later is
        behind the engine, and would keep a block for longer than the engine asked.
        """
        ahead_s = item.last_used - self.clock.now()
        if ahead_s <= _CLOCK_SLACK_S:
            return item
        times = {name: getattr(item, name, None) for name in _TIMES}
        return replace(item, **{name: time - ahead_s for name, time in times.items() if time})


class Doomed:
    """What is being deleted: lookups miss it, and no store of such a namespace is kept.

    Attributes:
        names: of the blocks that the engine deletes, as often as it asked; the front thread's.
    """

    def __init__(self) -> None:
        self.names = Counter[bytes]()
        self._prefixes: list[str] = []  # hex digits, "" for every namespace

    @contextmanager
    def deleting(self, prefix: str) -> Iterator[None]:
        """Have the namespaces whose hex digits begin so count as deleted."""
        self._prefixes.append(prefix)
        try:
            yield
        finally:
            self._prefixes.remove(prefix)

    @property
    def has_namespaces(self) -> bool:
        """Whether any namespace is being deleted."""
        return bool(self._prefixes)

    def covers(self, namespace: bytes) -> bool:
        """Return whether a namespace is being deleted."""
        return self.has_namespaces and namespace.hex().startswith(tuple(self._prefixes))

    def without(self, found: dict[bytes, bytes]) -> dict[bytes, bytes]:
        """Return sealed records by name without those of blocks that are being deleted."""
        for name in self.names.keys() & found.keys():
            del found[name]
        if not self.has_namespaces:
            return found
        return {name: it for name, it in found.items() if not self.covers(namespace_in(it))}
