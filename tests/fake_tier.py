"""What the fakes of the disk tier have in common: no worker, no figures, no names of their own."""

from collections.abc import Sequence
from typing import Any

from tieredkv.storage.client.names import NO_NAMES
from tieredkv.storage.stats import NO_STATS, StoreStats
from tieredkv.storage.tier import BackingTier


class FakeTier(BackingTier):
    def __init__(self) -> None:
        self.shares: dict[bytes, float] = {}
        self.names = NO_NAMES

    def delete(self, hashes: Sequence[bytes], reason: str) -> None:
        pass

    def reply(self, id: int, body: dict[str, Any], has_more: bool = False) -> None:
        pass

    def stats(self) -> StoreStats:
        return NO_STATS

    @property
    def trouble(self) -> str:
        return ""

    @property
    def pid(self) -> int | None:
        return None
