"""Has queued requests wait where a running one computes what they share.

In a model that has layers with windows, a request cannot go on behind blocks that another one is
computing, unless that one keeps its pages where the two part. It does so once somebody waits.

Called by the engine's thread only.
"""

import time
from collections.abc import Collection

from tieredkv.cache.chain import Chain
from tieredkv.cache.completion import Completion
from tieredkv.cache.hits import Hits
from tieredkv.cache.tiers import Tiers
from tieredkv.hashing import num_shared


class Junctions:
    """Where queued requests leave running ones.

    Args:
        tiers: the tiers.
        hits: know what requests find.
        completion: keeps pages of running requests.
        admitted: the chains of all admitted requests, and their tails.
    """

    def __init__(
        self, tiers: Tiers, hits: Hits, completion: Completion, admitted: Collection[Chain]
    ) -> None:
        self._tiers, self._hits = tiers, hits
        self._completion, self._admitted = completion, admitted

    def awaits(self, chain: Chain) -> bool:
        """Return whether a queued request had better wait for a running one.

        No request waits for longer than it would compute the blocks itself that they share.
        """
        if (tail := chain.tail) is None:
            return False
        now, size = time.monotonic(), self._tiers.block_size
        if tail.waits_until is not None and now >= tail.waits_until:
            return False
        for other in self._admitted:
            if other.tail is None:
                continue
            shared = tail.floor(min(num_shared(chain.hashes, other.hashes), tail.most_end))
            if other.tail.num_done >= shared or other.tail.hit_end > shared - tail.reach:
                continue  # it will not compute these pages
            if tail.awaited == (other, shared):
                return True
            if (found := len(self._hits.readable(chain))) < shared:
                self._completion.keep(other.tail, shared)
                tail.awaited = other, shared
                if tail.waits_until is None:
                    compute_s = self._tiers.compute_rate.seconds(found * size, shared * size)
                    tail.waits_until = now + compute_s
                return True
        return False
