"""Why the blocks that left VRAM and host memory last are in neither, for answers to requests.

Called by the engine's thread only.
"""

from collections import deque
from collections.abc import Iterable

import msgspec

from tieredkv.types import BlockHash

NUM_REMEMBERED = 65_536
"""The most blocks that are remembered."""

_GENERATIONS = 4


class _Reason(msgspec.Struct, frozen=True, gc=False):
    """Why a block left, and until when it is on disk; Python's garbage collector passes over it."""

    reason: str
    until: float = 0.0


_DELETED = _Reason("admin")


class MissReasons:
    """Remembers the last blocks, at least three quarters of `NUM_REMEMBERED`.

    They are kept in generations, of which the oldest is forgotten as a whole: a dict of all of them
    would take several milliseconds to grow, while a step waits. So would a look for garbage, which
    Python makes after so many new objects of the kind that may refer to each other.
    """

    def __init__(self) -> None:
        self._generations = deque[dict[BlockHash, _Reason]]([{}], _GENERATIONS)

    def note(self, block_hash: BlockHash, reason: str, until: float = 0.0) -> None:
        """Note why a block left; if `evicted_disk`, it expires on disk at `until`."""
        if len(self._generations[-1]) == NUM_REMEMBERED // _GENERATIONS:
            self._generations.append({})
        self._generations[-1][block_hash] = _Reason(reason, until)

    def why(self, block_hash: BlockHash, now: float) -> str:
        """Return why a block is in no tier, or `never_seen` if it is not among the last to leave.

        The reasons are `expired`; `evicted_device`, `evicted_host` and `evicted_disk` (the last
        tier that had the block); `corrupt`; `admin` (an operator evicted it); `load_timeout`
        (loading took too long, so that the block was computed); and `load_failed` (the disk could
        not read it, or the store's worker ended meanwhile). `evicted_disk` becomes `expired`
        when the block's deadline on disk has passed.
        """
        for each in reversed(self._generations):
            if (noted := each.get(block_hash)) is not None:
                has_expired = noted.reason == "evicted_disk" and noted.until <= now
                return "expired" if has_expired else noted.reason
        return "never_seen"

    def note_deleted(self, hashes: Iterable[BlockHash]) -> None:
        """Note which of the blocks that the disk had were deleted there by an operator."""
        for block_hash in hashes:
            for generation in self._generations:
                noted = generation.get(block_hash)
                if noted is not None and noted.reason == "evicted_disk":
                    generation[block_hash] = _DELETED
