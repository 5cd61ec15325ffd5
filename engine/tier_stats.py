"""What a running engine reports: how full its tiers are, its counters, and the rates it learnt."""

from typing import Any

from tieredkv.cache.operations import Operations
from tieredkv.engine.scheduler import Scheduler
from tieredkv.engine.step_timer import StepTimer


class TierStats:
    """Reads the statistics of one engine; called by the engine's thread."""

    def __init__(
        self, operations: Operations, scheduler: Scheduler, timer: StepTimer, max_model_len: int
    ) -> None:
        self._operations, self._scheduler, self._timer = operations, scheduler, timer
        self._max_model_len = max_model_len

    def read(self) -> dict[str, Any]:
        """Return blocks and bytes of each tier, what is owed to the disk, and the counters."""
        stats, scheduler = self._operations.stats(self._max_model_len), self._scheduler
        stats["counters"] |= {
            "computed_tokens": scheduler.num_computed_tokens,
            "step_seconds": dict(self._timer.step_seconds),
            "step_error_seconds": dict(self._timer.error_seconds),
            "preemptions": scheduler.num_preemptions,
            "requests_running": len(scheduler.running),
            "requests_waiting": len(scheduler.waiting),
        }
        return stats
