"""Touches of blocks, gathered until they are written to the index some at a time."""

import time
from collections.abc import Iterable
from threading import Lock

from msgspec.structs import replace

from tieredkv.tier import TouchItem

_INTERVAL_S = 1.0
_TOUCHES_A_TURN = 256
_MAX_TOUCHES = 1 << 16  # how many blocks' touches are kept while the index thread is busy


class GatheredTouches:
    """Touches that wait to be written: one thread gathers them, another one takes them.

    Attributes:
        num_dropped: touches that were dropped because too many were waiting.
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        self._lock = Lock()
        self._items: dict[bytes, TouchItem] = {}
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def are_due(self) -> bool:
        """Whether the oldest touch has waited long enough for others to be written with it."""
        return bool(self._items) and time.monotonic() - self._since > _INTERVAL_S

    def gather(self, touches: Iterable[TouchItem]) -> None:
        """Keep touches for later; two of one block become its later use and its longer claim."""
        with self._lock:
            if not self._items:
                self._since = time.monotonic()
            for touch in touches:
                known = self._items.get(touch.block_hash, touch)
                if known is touch and len(self._items) >= _MAX_TOUCHES:
                    self.num_dropped += 1
                    continue
                longer = max(known, touch, key=lambda each: each.expires_at or 0.0)
                last_used = max(known.last_used, touch.last_used)
                self._items[touch.block_hash] = replace(longer, last_used=last_used)

    def take(self) -> list[TouchItem]:
        """Remove some of the touches and return them."""
        with self._lock:
            return [self._items.pop(key) for key in list(self._items)[:_TOUCHES_A_TURN]]
