"""Which chunks on disk were announced to routers, so that their removal can be announced too.

The disk knows our hashes; another engine's events name its own keys, which cannot be computed from
them. So the keys of what was announced are kept here, some 250 bytes for a chunk, for as long as
the disk has it. What this process has never announced is no router's business: it is announced when
it is next used.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Announcement(NamedTuple):
    """Chunks, by the engine's keys, that the disk has from now on, or no more."""

    keys: list[bytes]
    is_removed: bool


class Announced:
    """The chunks that were announced and not taken back.

    Args:
        most: more than the disk holds. If it is exceeded, the oldest ones are taken back.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: dict[bytes, bytes] = {}  # by our hash
        self._news: list[Announcement] = []

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, block_hash: bytes, key: bytes) -> None:
        """Announce a chunk that is on disk, unless it was announced."""
        if block_hash in self._keys:
            return
        self._keys[block_hash] = key
        self._tell(key, is_removed=False)
        if len(self._keys) > self._most:
            self.remove([next(iter(self._keys))])

    def remove(self, hashes: Iterable[bytes]) -> None:
        """Announce that chunks are gone, of those that were announced."""
        for block_hash in hashes:
            if (key := self._keys.pop(block_hash, None)) is not None:
                self._tell(key, is_removed=True)

    def remove_all(self) -> None:
        """Announce that all chunks are gone, as nobody knows which are."""
        self.remove([*self._keys])

    def take(self) -> list[Announcement]:
        """Return the announcements since the last call, in their order; neighbours share one."""
        news, self._news = self._news, []
        return news

    def _tell(self, key: bytes, *, is_removed: bool) -> None:
        if not self._news or self._news[-1].is_removed != is_removed:
            self._news.append(Announcement([], is_removed))
        self._news[-1].keys.append(key)
