"""How long the device takes for one prompt, of which some blocks are there already.

What has to be computed are the gaps between the blocks that are ready. The device takes a step of
its own for each gap, so that a prompt with many gaps costs more than its tokens tell. A plan asks
for many parts of one prompt: the seconds of all whole gaps before each one are summed up once, and
then any part takes a bisection, and the time of its last gap.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tieredkv.cache.step_times import PromptTimes
from tieredkv.cache.stretches import Stretch, Stretches, joined, loose


class Gaps:
    """The tokens of one prompt that are not ready, as stretches between those that are.

    Args:
        times: of the device.
        block_size: tokens a block.
        end: number of tokens of the prompt. The last one is always computed.
        ready: stretches of blocks that need no computing, ascending; they do not touch.
    """

    def __init__(
        self, times: PromptTimes, block_size: int, end: int, ready: Sequence[Stretch]
    ) -> None:
        self._times, self._size, self._end = times, block_size, end
        self._ready = ready if isinstance(ready, Stretches) else Stretches.of(ready)
        # Of the ready stretches, in tokens; and as bisect reads them fast.
        self._tokens = block_size * self._ready.firsts, block_size * self._ready.lasts
        self._firsts, self._lasts = self._tokens[0].data, self._tokens[1].data
        self._gaps_s: NDArray[np.float64] | None = None

    def without(self, *blocks: Sequence[int]) -> "Gaps":
        """Return the gaps that are left if these blocks, each sequence ascending, are ready too."""
        ready = joined(self._ready, *map(loose, blocks))
        return Gaps(self._times, self._size, self._end, ready)

    def begin(self, token: int) -> int:
        """Return the first token from `token` on that is not ready."""
        index = bisect_right(self._lasts, token)
        if index < len(self._lasts) and self._firsts[index] <= token:
            return min(self._lasts[index], self._end - 1)
        return token

    def since(self, begin: int) -> Callable[[int], float]:
        """Return what tells of any `end` how long the tokens `[begin, end)` not ready take."""
        times, most = self._times, self._end - 1
        firsts, lasts = self._firsts, self._lasts
        first = bisect_right(lasts, begin)  # of the ready stretches that end behind `begin`
        if first == len(lasts):
            return partial(times, begin)
        sums = self._sums(first, times(begin, firsts[first]))

        def seconds(end: int) -> float:
            index = bisect_left(firsts, end) - 1  # of the last one that begins before `end`
            if index < first:
                return times(begin, end)
            last = min(lasts[index], most)
            return sums[index - first] + (times(last, end) if last < end else 0.0)

        return seconds

    def _sums(self, first: int, before_s: float) -> Sequence[float]:
        """Return for each ready stretch from `first` on the seconds of the gaps before it.

        Args:
            first: index of a ready stretch.
            before_s: the seconds of those before that one.
        """
        firsts, lasts = self._tokens
        if first == len(firsts) - 1:
            return [before_s]
        if self._gaps_s is None:
            self._gaps_s = self._times.each(lasts[:-1], firsts[1:])
        return np.concatenate([[before_s], self._gaps_s[first:]]).cumsum().data
