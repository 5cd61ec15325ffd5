"""Estimates the time to first token of replayed requests, by the planner and by measured rates.

One device computes the requests one after another, as they come; each is divided between computing
and loading by the planner's own function. Answers take no time, so that what is estimated is the
least that a server of these rates would need.
"""

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from tieredkv.cache.compute_rate import ComputeRate
from tieredkv.cache.disk_link import READ_LATENCY_S
from tieredkv.cache.plan import Demand, LinkLoad, LinkState, Planner
from tieredkv.cache.rate_file import SavedRates
from tieredkv.cache.stretches import stretches
from tieredkv.errors import ConfigError
from tieredkv.sizing.tiers import Source
from tieredkv.types import Tier

CHUNK_TOKENS = 16_384
"""The most tokens of one step of a request that runs alone, as on a GPU."""

COLD = "cold"
SOURCES = (COLD, *map(str, Tier))

UP, READ = 0, 1
"""The links, as the planner numbers them."""


class Estimate:
    """What the requests so far would have waited for.

    Attributes:
        computed_sooner_tokens: tokens that a slower tier had and that would be computed, since that
            is faster.
        busy_s: for how long the device would have computed.
    """

    def __init__(self, rates: SavedRates, *, block_tokens: int, block_bytes: int) -> None:
        """Take the rates.

        Raises:
            ConfigError: one of them was never measured.
        """
        up, read = rates.up_bytes_per_s, rates.read_bytes_per_s
        if not (up and read and rates.steps):
            what = {"copies to VRAM": up, "reads from disk": read, "steps": rates.steps}
            missing = " and ".join(name for name, value in what.items() if not value)
            hint = "hint: let a server of this model with a disk tier serve some long prompts"
            raise ConfigError(f"the rates do not tell how fast {missing} are\n{hint}")
        self._block_tokens, self._block_bytes = block_tokens, block_bytes
        self._compute = ComputeRate(CHUNK_TOKENS)
        self._compute.assume(rates.known_steps)
        self._bytes_per_s = up, min(read, up)  # what is read passes through the other link
        self._free_at = [0.0, 0.0]
        self._device_free_at = 0.0
        self._ttft_s: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
        self.computed_sooner_tokens = 0
        self.busy_s = 0.0

    def add_pages(self, sources: Sequence[Source], now: float) -> None:
        """Have pages of windows loaded for a request that comes now, before its blocks."""
        num_read = sources.count(Tier.DISK)
        self._use(UP, num_read + sources.count(Tier.HOST), now)
        self._use(READ, num_read, now)

    def _use(self, link: int, num_blocks: int, now: float) -> None:
        """Have a link move blocks once it is free."""
        seconds = num_blocks * self._block_bytes / self._bytes_per_s[link]
        self._free_at[link] = max(now, self._free_at[link]) + seconds

    def add(self, sources: Sequence[Source], num_tokens: int, now: float) -> None:
        """Estimate a request that comes now."""
        if not num_tokens:
            return
        of: dict[Source, list[int]] = {tier: [] for tier in Tier}
        for index, source in enumerate(sources):
            if source is not None:
                of[source].append(index)
        free = [max(0.0, at - now) for at in self._free_at]
        up = LinkState(self._bytes_per_s[UP], self._block_bytes, free[UP], is_steady=True)
        read = LinkState(
            self._bytes_per_s[READ], self._block_bytes, free[READ], READ_LATENCY_S, through=UP
        )
        planner = Planner(
            [up, read],
            self._compute.prompt_times,
            block_size=self._block_tokens,
            busy_s=max(0.0, self._device_free_at - now),
            least_tokens=self._compute.least_tokens,
        )
        in_host, on_disk = of[Tier.HOST], of[Tier.DISK]
        loads = [LinkLoad(UP, in_host), LinkLoad(READ, on_disk)]
        begin_s = planner.busy_s
        split = planner.split(Demand(0, num_tokens, loads, ready=stretches(of[Tier.DEVICE])))
        self._device_free_at = now + planner.busy_s
        self.busy_s += planner.busy_s - begin_s
        num_copied = sum(1 for index in in_host if index >= split.steady_block)
        num_read = sum(1 for index in on_disk if index >= split.block)
        used = {Tier.DEVICE: len(of[Tier.DEVICE]), Tier.HOST: num_copied, Tier.DISK: num_read}
        slowest = next((str(tier) for tier in reversed(Tier) if used[tier]), COLD)
        self._ttft_s[slowest].append(split.done_s)
        num_sooner = len(in_host) + len(on_disk) - num_copied - num_read
        self.computed_sooner_tokens += num_sooner * self._block_tokens
        self._use(UP, num_copied + num_read, now)
        self._use(READ, num_read, now)

    def ttft_ms(self) -> dict[str, Any] | None:
        """Return the times as `ttft_ms` does."""
        return ttft_ms(self._ttft_s)


def ttft_ms(times_s: Mapping[str, Sequence[float]]) -> dict[str, Any] | None:
    """Return percentiles of times in seconds, of all requests and by source; None without any.

    Args:
        times_s: by the slowest tier that a request used, or `cold`.
    """
    known = {source: times_s[source] for source in SOURCES if times_s.get(source)}
    if not known:
        return None
    by_source = {name: {"requests": len(it), **_percentiles(it)} for name, it in known.items()}
    return {**_percentiles([*chain(*known.values())]), "by_source": by_source}


def _percentiles(times_s: Sequence[float]) -> dict[str, float]:
    p50, p90 = 1e3 * np.percentile(np.asarray(times_s), (50, 90))
    return {"p50": round(float(p50), 2), "p90": round(float(p90), 2)}
