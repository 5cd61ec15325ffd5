"""What the cache counts: blocks that were moved, evicted or lost, and how long moves took.

The counters are those of the engine's thread; what it reports of them may be read anywhere.
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class CacheCounters:
    """Counts since the start, in blocks unless the name says otherwise.

    Attributes:
        promoted_disk_blocks: blocks that were read from disk to host memory, also if they were then
            not copied to VRAM, or not kept.
        demoted_host_blocks: blocks that were copied from VRAM to host memory, also if they expired
            or were evicted meanwhile.
        allocation_waits: allocations that had to wait for a copy to end.
        overtaken_blocks: blocks that were read from disk and computed before they arrived.
        used_reads: blocks that were read from disk and then copied to VRAM.
        demotions_dropped: blocks whose demotion was given up, so that they could be evicted.
        superseded_pages: pages of layers with windows that requests have gone on past, and that no
            other is likely to need.
        lost_blocks: blocks that the disk should have kept and that left RAM without a copy there,
            by reason: `too_slow` if a write could not be waited for, else why the store refused.
            At a stop, the reason `drain_timeout` counts blocks that no time was left for.
        load_failures: failed loads by reason; each of these blocks was recomputed.
        evictions: evicted copies in RAM by `tier,reason`.
        move_seconds: number of copies by `from,to`, and the sum of their durations in seconds. A
            copy between VRAM and host memory moves several blocks.
        event_batches: steps whose changes were to be published, see `cache.events`.
        dropped_event_batches: those of them for which there was no room.
    """

    promoted_host_blocks: int = 0
    promoted_disk_blocks: int = 0
    overtaken_blocks: int = 0
    used_reads: int = 0
    demoted_host_blocks: int = 0
    demoted_disk_blocks: int = 0
    demotions_dropped: int = 0
    superseded_pages: int = 0
    allocation_waits: int = 0
    expired_blocks: int = 0
    load_failures: Counter[str] = field(default_factory=Counter)
    store_failures: Counter[str] = field(default_factory=Counter)
    lost_blocks: Counter[str] = field(default_factory=Counter)
    evictions: Counter[str] = field(default_factory=Counter)
    move_seconds: dict[str, tuple[int, float]] = field(default_factory=dict)
    event_batches: int = 0
    dropped_event_batches: int = 0

    def note_move(self, between: str, began_at: float) -> None:
        """Count a copy that ends now and began at `began_at`, in `perf_counter` time."""
        count, seconds = self.move_seconds.get(between, (0, 0.0))
        self.move_seconds[between] = count + 1, seconds + time.perf_counter() - began_at


def moved_bytes(stats: Mapping[str, Any]) -> dict[str, int]:
    """Return how many bytes were moved since the start, by `from,to`.

    Those to and from the disk are what its device wrote and read.

    Args:
        stats: what an engine reports of its tiers; without any, nothing is known to have moved.
    """
    if not stats:
        return {}
    size, counters, disk = stats["block_bytes"], stats["counters"], stats["disk"]
    moved = {
        "device,host": size * counters["demoted_host_blocks"],
        "host,device": size * counters["promoted_host_blocks"],
    }
    if disk:
        moved |= {"host,disk": disk["bytes_written"], "disk,host": disk["bytes_read"]}
    return moved
