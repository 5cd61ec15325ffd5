"""Why blocks of prompts are computed, for answers to requests; remembered of those that left last.

Called by the engine's thread only.
"""

from collections import deque
from collections.abc import Iterable
from typing import Literal

import msgspec

from tieredkv.types import BlockHash, Tier

MissReason = Literal[
    "never_seen",
    "evicted_device",
    "evicted_host",
    "evicted_disk",
    "expired",
    "admin",
    "corrupt",
    "load_timeout",
    "load_failed",
    "loads_off",
    "behind_lookback",
    "no_anchor",
    "computed_sooner",
]
"""Why a block is computed.

    never_seen       it is not among the blocks that were remembered
    evicted_device   it was evicted for room, and VRAM was the last tier that had it; likewise
    evicted_host     host memory, and
    evicted_disk     the disk
    expired          its retention has ended
    admin            an operator evicted it
    corrupt          its bytes on disk were damaged
    load_timeout     loading it took too long
    load_failed      the disk could not read it, or the store's worker ended meanwhile
    loads_off        host memory has it, but `restore` is `compute`
    behind_lookback  it is there, but no hit may end so far back
    no_anchor        it is there, but not what the windows of the next token reach
    computed_sooner  a slower tier has it, but computing it was faster
"""

EVICTED: dict[Tier, MissReason] = {
    Tier.DEVICE: "evicted_device",
    Tier.HOST: "evicted_host",
    Tier.DISK: "evicted_disk",
}
"""The reasons of blocks that were evicted for room, by the last tier that had them."""

OF_FAILED_LOADS: dict[str, MissReason] = {
    "missing": "evicted_disk",
    "evicted": "admin",
    "expired": "expired",
    "io_error": "load_failed",
    "closing": "load_failed",
    "worker_died": "load_failed",
    "worker_down": "load_failed",
}
"""What receipts call the reasons of failed loads. All others say that the bytes are `corrupt`."""

COMPUTED_SOONER: MissReason = "computed_sooner"

NUM_REMEMBERED = 65_536
"""The most blocks that are remembered."""

_GENERATIONS = 4


class _Reason(msgspec.Struct, frozen=True, gc=False):
    """Why a block left, and until when it is on disk; Python's garbage collector passes over it."""

    reason: MissReason
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

    def note(self, block_hash: BlockHash, reason: MissReason, until: float = 0.0) -> None:
        """Note why a block left; if `evicted_disk`, it expires on disk at `until`."""
        if len(self._generations[-1]) == NUM_REMEMBERED // _GENERATIONS:
            self._generations.append({})
        self._generations[-1][block_hash] = _Reason(reason, until)

    def why(self, block_hash: BlockHash, now: float) -> MissReason:
        """Return why a block is in no tier, or `never_seen` if it is not among the last to leave.

        `evicted_disk` becomes `expired` when the block's deadline on disk has passed.
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
