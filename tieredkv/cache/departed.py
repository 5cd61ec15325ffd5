"""Why blocks that have left every tier did, as far as that is remembered.

Called by the engine's thread only.
"""

from array import array

from tieredkv.types import BlockHash

REASONS = "expired evicted_device evicted_host evicted_disk corrupt admin slower_than_recomputing"
"""Why a block was not served, beside `never_seen` and, where it is there but no hit may end,
`behind_lookback`: evicted from which tier last, by an operator, or its load was given up."""

_REASONS = REASONS.split()
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

    def note(self, block_hash: BlockHash, reason: str, until: float = 0.0) -> None:
        """Note that a block is gone; one that is `evicted_disk` expires there at `until`."""
        tag = int.from_bytes(block_hash[-8:], "little")
        place = tag % NUM_PLACES
        self._tags[place], self._deadlines[place] = tag, min(int(until), 2**32 - 1)
        self._reasons[place] = _REASONS.index(reason)

    def reason(self, block_hash: BlockHash, now: float) -> str:
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
