"""What a running engine reports: how full its tiers are, its counters, and the rates it learnt."""

import math
import time

import msgspec

from tieredkv.cache.tiers import Tiers
from tieredkv.engine.scheduler import Scheduler
from tieredkv.engine.step_timer import StepTimer
from tieredkv.types import Tier

TOLD_POSITIONS = (0, 16_384, 65_536)
"""Positions in a prompt at which the metrics tell how fast tokens are computed."""


class TierStats:
    """Reads the statistics of one engine; called by the engine's thread."""

    def __init__(
        self, tiers: Tiers, scheduler: Scheduler, timer: StepTimer, max_model_len: int
    ) -> None:
        self._tiers, self._scheduler, self._timer = tiers, scheduler, timer
        self._positions = [each for each in TOLD_POSITIONS if each < max_model_len]

    def read(self) -> dict[str, object]:
        """Return blocks and bytes of each tier, what is owed to the disk, and the counters."""
        tiers, scheduler, size = self._tiers, self._scheduler, self._tiers.block_bytes
        stats: dict[str, object] = {}
        for tier, pool in ((Tier.DEVICE, tiers.device), (Tier.HOST, tiers.host)):
            stats[tier.value] = {
                "blocks": pool.num_cached,
                "blocks_used": pool.num_used,
                "blocks_total": pool.num_blocks,
                "used_ratio": pool.num_used / pool.num_blocks,
                "bytes_live": pool.num_cached * size,
                "bytes_budget": pool.num_blocks * size,
            }
        stats["counters"] = msgspec.to_builtins(tiers.counters) | {
            "computed_tokens": scheduler.num_computed_tokens,
            "step_seconds": dict(self._timer.step_seconds),
            "step_error_seconds": dict(self._timer.error_seconds),
            "preemptions": scheduler.num_preemptions,
            "requests_running": len(scheduler.running),
            "requests_waiting": len(scheduler.waiting),
        }
        disk = msgspec.to_builtins(tiers.store.stats()) if tiers.store else None
        if tiers.store:
            stats["owed"] = {"bytes": tiers.owed_bytes, "drain_s": tiers.drain_s}
        return stats | {"block_bytes": size, "disk": disk, "learnt": self._learnt_rates()}

    def _learnt_rates(self) -> dict[str, object]:
        """Return the rates that loads and a stop are planned with.

        Those of computing are tokens a second of a step's tokens behind some positions.
        """
        tiers, now, chunk = self._tiers, time.monotonic(), self._tiers.compute_rate.chunk
        seconds = {it: tiers.compute_rate.seconds(it, it + chunk) for it in self._positions}
        reads, writes = tiers.disk_link.read_rate, tiers.disk_link.write_rate
        has_disk, limit = tiers.store is not None, reads.limit
        return {
            "up_bytes_per_s": tiers.device_link.up_rate.effective(now),
            "read_bytes_per_s": reads.effective(now) if has_disk else None,
            "write_bytes_per_s": writes.steady if has_disk else None,
            "read_bytes_limit": limit if has_disk and limit < math.inf else None,
            "prefill_tokens_per_s": {str(it): chunk / took_s for it, took_s in seconds.items()},
        }
