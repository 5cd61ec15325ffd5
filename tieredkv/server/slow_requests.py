"""The slowest requests of the last ten minutes, each with where its prompt came from.

Memory is bounded: the slowest requests of each minute are kept. They hold counts and times, but
never a text, token or hash.
"""

from bisect import insort
from itertools import chain

import msgspec

NUM_SLOWEST = 20
KEPT_MINUTES = 10


class SlowRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a request; see `RequestUsage`.

    Attributes:
        at: when its first token came, in seconds since the epoch.
        tenant: whose it was, as in `Keys.tenant`; operators are told the name instead.
        ttft_s: from its arrival to its first token.
        queue_s, prefill_s: the parts of it that the request was in the queue, and from then on. The
            rest is before: the server read and tokenized it.
        source: the slowest tier that its prefix came from, or `cold`.
        cached_tokens: prompt tokens that were not computed, by the tier that had them.
        miss_reason: as in the receipt, see `Diagnosis.miss`.
    """

    at: float
    tenant: str
    ttft_s: float
    queue_s: float
    prefill_s: float
    source: str
    prompt_tokens: int
    cached_tokens: dict[str, int]
    recomputed_tokens: int
    miss_reason: str | None


class SlowRequests:
    """Keeps the `NUM_SLOWEST` slowest requests of each of the last `KEPT_MINUTES` minutes."""

    def __init__(self) -> None:
        self._by_minute: dict[int, list[SlowRequest]] = {}

    def would_keep(self, at: float, ttft_s: float) -> bool:
        """Return whether such a request is one of the slowest of its minute so far."""
        kept = self._by_minute.get(int(at // 60), [])
        return len(kept) < NUM_SLOWEST or ttft_s > kept[-1].ttft_s

    def add(self, request: SlowRequest) -> None:
        """Keep a request if it is one of the slowest of its minute."""
        self._forget(request.at)
        kept = self._by_minute.setdefault(int(request.at // 60), [])
        insort(kept, request, key=lambda each: -each.ttft_s)
        del kept[NUM_SLOWEST:]

    def slowest(self, now: float) -> list[SlowRequest]:
        """Return the slowest requests of this minute and the nine before it, the slowest first."""
        self._forget(now)
        kept = chain.from_iterable(self._by_minute.values())
        return sorted(kept, key=lambda each: -each.ttft_s)[:NUM_SLOWEST]

    def _forget(self, now: float) -> None:
        """Drop the minutes that are too old, or in the future because the clock was set back."""
        present = int(now // 60)
        for minute in [it for it in self._by_minute if not 0 <= present - it < KEPT_MINUTES]:
            del self._by_minute[minute]
