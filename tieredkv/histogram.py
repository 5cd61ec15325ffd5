"""A histogram of positive numbers, such as ages and times, in buckets of equal ratios."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

_BUCKETS_PER_OCTAVE = 8  # the middle of a bucket is within 4.5 % of each number in it
_FIRST, _LAST = -16 * _BUCKETS_PER_OCTAVE, 25 * _BUCKETS_PER_OCTAVE
"""In seconds: 15 µs and a year. Numbers beyond them are counted in the first or last bucket."""

_Bucket = Annotated[int, Meta(ge=_FIRST, le=_LAST)]
_Count = Annotated[int, Meta(ge=0, le=1 << 50)]


class LogHistogram(msgspec.Struct, array_like=True):
    """Counts numbers in at most 328 buckets; quantiles are told to within 5 %.

    Attributes:
        counts: how many numbers there are by bucket, which is 8·log₂ of the number.
    """

    counts: dict[_Bucket, _Count] = {}

    @classmethod
    def sum(cls, histograms: Iterable["LogHistogram"]) -> "LogHistogram":
        """Return a histogram of all the numbers in others."""
        total = Counter[int]()
        for each in histograms:
            total.update(each.counts)
        return cls(dict(total))

    def add(self, number: float) -> None:
        """Count a number; zero and what is below it counts as the least of all."""
        bucket = math.floor(_BUCKETS_PER_OCTAVE * math.log2(number)) if number > 0 else _FIRST
        bucket = min(max(bucket, _FIRST), _LAST)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1

    @property
    def num(self) -> int:
        """How many numbers were counted."""
        return sum(self.counts.values())

    def quantile(self, share: float) -> float | None:
        """Return the number that this share of all numbers does not exceed; None without any."""
        left, found = share * self.num, None
        for bucket in sorted(self.counts):
            found = 2 ** ((bucket + 0.5) / _BUCKETS_PER_OCTAVE)
            left -= self.counts[bucket]
            if left <= 0:
                break
        return found
