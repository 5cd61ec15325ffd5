"""What the fakes of the disk tier have in common: no worker, no figures, no names of their own."""

from collections.abc import Sequence
from typing import Any

from tieredkv.storage.format.record import Extent, Located, Retentions, encode_record, times_of
from tieredkv.tier import HASHES, BackingTier, TierFigures, TierState, Times
from tieredkv.types import BlockRecord


class FakeTier(BackingTier):
    def __init__(self) -> None:
        self.shares: dict[bytes, float] = {}
        self.names = HASHES

    @staticmethod
    def found(record: BlockRecord) -> bytes:
        """Return what a lookup tells of a block: its record, as the store seals it."""
        located = Located(record, Extent(1, 0), record.size_bytes, bytes(16))
        return encode_record(located, Retentions([record.retention]))

    def times_of(self, found: bytes, /) -> Times:
        return times_of(found)

    def delete(self, hashes: Sequence[bytes], reason: str) -> None:
        pass

    def reply(self, id: int, body: dict[str, Any], has_more: bool = False) -> None:
        pass

    def close(self) -> None:
        pass

    def stats(self) -> TierFigures:
        return TierFigures()

    def state(self) -> TierState:
        return TierState(is_open=True, why="", room_bytes=0)
