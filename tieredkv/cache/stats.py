"""What the engine reports of its tiers: how full they are, their counters, and what was learnt.

Called by the engine's thread only.
"""

import math
import time
from typing import Any

import msgspec

from tieredkv.cache.tiers import Tiers

TOLD_POSITIONS = (0, 16_384, 65_536)
"""Positions in a prompt at which the metrics tell how fast tokens are computed."""


def cache_stats(tiers: Tiers, max_model_len: int) -> dict[str, Any]:
    """Return blocks and bytes of each tier, what is owed to the disk, counters and rates.

    Args:
        tiers: the tiers.
        max_model_len: tokens of the longest context.
    """
    store, stats = tiers.store, dict[str, Any]()
    for tier, pool in tiers.pools.items():
        size = tiers.bytes_in[tier]
        stats[tier.value] = {
            "blocks": pool.num_cached,
            "blocks_used": pool.num_used,
            "blocks_total": pool.num_blocks,
            "used_ratio": pool.num_used / pool.num_blocks,
            "bytes_live": pool.num_cached * size,
            "bytes_budget": pool.num_blocks * size,
        }
    stats["counters"] = msgspec.to_builtins(tiers.counters)
    disk = None
    if store is not None:
        state = store.state()
        why_failing = {"store_error": state.why if state.is_open else ""}
        disk = msgspec.to_builtins(store.stats()) | why_failing
        stats["owed"] = {"bytes": tiers.owed_bytes, "drain_s": tiers.drain_s}
    stats |= {"block_bytes": tiers.payload_bytes, "disk": disk}
    return stats | {"learnt": _rates(tiers, max_model_len)}


def _rates(tiers: Tiers, max_model_len: int) -> dict[str, Any]:
    """Return the rates that loads and a stop are planned with.

    Those of computing are tokens a second of a step's tokens behind some positions.
    """
    now, chunk = time.monotonic(), tiers.compute_rate.chunk
    positions = [each for each in TOLD_POSITIONS if each < max_model_len]
    seconds = {it: tiers.compute_rate.seconds(it, it + chunk) for it in positions}
    reads, writes = tiers.disk_link.read_rate, tiers.disk_link.write_rate
    has_disk, limit = tiers.store is not None, reads.limit
    return {
        "up_bytes_per_s": tiers.device_link.up_bytes_per_s,
        "read_bytes_per_s": reads.effective(now) if has_disk else None,
        "write_bytes_per_s": writes.steady if has_disk else None,
        "read_bytes_limit": limit if has_disk and limit < math.inf else None,
        "prefill_tokens_per_s": {str(it): chunk / took_s for it, took_s in seconds.items()},
    }
