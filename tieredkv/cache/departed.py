"""Why blocks that have left every tier did, as far as that is remembered.

Called by the engine's thread only.
"""

from array import array
from typing import Literal

from tieredkv.types import BlockHash

Reason = Literal[
    "never_seen",
    "expired",
    "evicted_device",
    "evicted_host",
    "evicted_disk",
    "corrupt",
    "admin",
    "slower_than_recomputing",
    "behind_lookback",
]
"""Why a block was not served: the tier that it was evicted from last, `admin` for an operator,
`slower_than_recomputing` for a load that was given up or not wanted, `behind_lookback` where it is
there and no hit may end."""

_REASONS: tuple[Reason, ...] = Reason.__args__  # type: ignore[attr-defined]
NUM_PLACES = 65_536


class Departed:
    """Reasons by block hash, in a table of a fixed size: 13 bytes a place, and nothing is made.

    A block's place follows from its hash, so that a few later ones may have taken it; it counts
    as never seen then. What left for the disk stays there until its time there has come, as far as
    is known here.
    """

    def __init__(self) -> None:
        self._tags = array("Q", bytes(8 * NUM_PLACES))
        self._reasons = bytearray(NUM_PLACES)
        self._deadlines = array("I", bytes(4 * NUM_PLACES))

    def note(self, block_hash: BlockHash, reason: Reason, until: float = 0.0) -> None:
        """Note that a block is gone; one that is `evicted_disk` expires there at `until`."""
        tag = int.from_bytes(block_hash[-8:], "little")
        place = tag % NUM_PLACES
        self._tags[place], self._deadlines[place] = tag, min(int(until), 2**32 - 1)
        self._reasons[place] = _REASONS.index(reason)

    def reason(self, block_hash: BlockHash, now: float) -> Reason:
        """Return why a block that is in no tier is not."""
        tag = int.from_bytes(block_hash[-8:], "little")
        place = tag % NUM_PLACES
        if self._tags[place] != tag:
            return "never_seen"
        reason = _REASONS[self._reasons[place]]
        is_over = reason == "evicted_disk" and self._deadlines[place] <= now
        return "expired" if is_over else reason

    def clear_disk(self) -> None:
        """Note that an operator has emptied the disk."""
        codes = [_REASONS.index(reason) for reason in ("evicted_disk", "admin")]
        self._reasons = self._reasons.replace(bytes(codes[:1]), bytes(codes[1:]))
