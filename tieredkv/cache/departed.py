"""Why blocks that have left every tier did, as far as that is remembered.

Called by the engine's thread only.
"""

from collections import OrderedDict

from tieredkv.types import BlockHash

NUM_REMEMBERED = 65_536


class Departed:
    """Reasons by block hash, of the blocks that left last; others count as `never_seen`.

    `expired`, `evicted_device`, `evicted_host`, `evicted_disk` (from which tier last), `corrupt`,
    `admin` (evicted by an operator) or `slower_than_recomputing` (its load was given up); beside
    these a block may be `behind_lookback`: it is there, but no hit may end so far back. What left
    for the disk stays there until its time there has come, as far as is known here.
    """

    def __init__(self) -> None:
        self._left: OrderedDict[BlockHash, tuple[str, float]] = OrderedDict()

    def note(self, block_hash: BlockHash, reason: str, until: float = 0.0) -> None:
        """Note that a block is gone; one that is `evicted_disk` expires there at `until`."""
        self._left[block_hash] = reason, until
        self._left.move_to_end(block_hash)
        if len(self._left) > NUM_REMEMBERED:
            self._left.popitem(last=False)

    def reason(self, block_hash: BlockHash, now: float) -> str:
        """Return why a block that is in no tier is not."""
        reason, until = self._left.get(block_hash, ("never_seen", 0.0))
        return "expired" if reason == "evicted_disk" and until <= now else reason

    def clear_disk(self) -> None:
        """Note that an operator has emptied the disk."""
        for block_hash, (reason, _) in self._left.items():
            if reason == "evicted_disk":
                self._left[block_hash] = "admin", 0.0
