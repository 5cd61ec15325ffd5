"""How long the disk keeps blocks: ages at eviction, and what the present write rate allows.

Everything is counted by retention policy, in the present span of time and in the one before it. So
the memory is bounded, and the counts are always those of the last one to two spans. They are part
of the index's `meta`, so that they survive a restart.

This module knows times and sizes; it does not know where blocks lie or which of them is evicted.
"""

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta

from tieredkv.histogram import LogHistogram
from tieredkv.storage.stats import Lifetimes
from tieredkv.units import format_bytes, format_duration, printable

RATE_SPAN_S = 3600.0
"""The present write rate is that of the last one to two hours."""

AGES_SPAN_S = 86_400.0
"""Ages at eviction are those of the last one to two days."""

LEAST_MEASURED_S = 600.0
"""A write rate that was measured for a shorter time tells nothing."""

# An index with numbers beyond these is forged. Sums of those within can be told in messages.
Counted = Annotated[int, Meta(ge=0, le=1 << 62)]
_Sum = Annotated[float, Meta(ge=-1e30, le=1e30)]
_Time = Annotated[float, Meta(ge=0.0, le=1e18)]


class Written(msgspec.Struct, array_like=True):
    """Bytes that were written, and sums of two times over these bytes.

    Attributes:
        promised_byte_s: from a block's computation to its expiry.
        left_byte_s: from its write to its expiry.
    """

    num_bytes: Annotated[int, Meta(gt=0, le=1 << 62)] = 0
    promised_byte_s: _Sum = 0.0
    left_byte_s: _Sum = 0.0


class Removed(msgspec.Struct, array_like=True):
    """Blocks that have left the disk: the ages of the evicted ones, and how many have expired."""

    evicted: LogHistogram = msgspec.field(default_factory=LogHistogram)
    num_expired: Counted = 0


Count = TypeVar("Count", Written, Removed)


class Recent(msgspec.Struct, Generic[Count], array_like=True):
    """Counts by retention policy, in the present span of time and in the one before it.

    Attributes:
        began_at: when the first count was made, in seconds since the epoch; 0 before it.
        span: number of the present span since the epoch.
    """

    began_at: _Time = 0.0
    span: Counted = 0
    present: dict[str, Count] = {}
    before: dict[str, Count] = {}

    def begin(self, now: float, span_s: float) -> None:
        """Begin a new span if the present one is over."""
        self.began_at = self.began_at or now
        if (span := int(now // span_s)) > self.span:
            self.before = self.present if span == self.span + 1 else {}
            self.present, self.span = {}, span

    def since(self, now: float, span_s: float) -> float:
        """Return the time from which on `of` counts, after beginning a new span if it is time."""
        if not self.began_at:
            return now
        self.begin(now, span_s)
        return max(self.began_at, (self.span - 1) * span_s)

    def of(self, policy: str) -> list[Count]:
        """Return the counts of a policy in both spans."""
        return [counts[policy] for counts in (self.before, self.present) if policy in counts]

    @property
    def policies(self) -> list[str]:
        """Names of the policies with counts."""
        return sorted({*self.before, *self.present})


class LifetimeCounts(msgspec.Struct, array_like=True):
    """What was written to the disk lately, and which blocks have left it."""

    written: Recent[Written] = msgspec.field(default_factory=Recent[Written])
    gone: Recent[Removed] = msgspec.field(default_factory=Recent[Removed])

    def note_written(
        self, policy: str, num_bytes: int, now: float, *, computed_at: float, expires_at: float
    ) -> None:
        """Count a block that was written now."""
        self.written.begin(now, RATE_SPAN_S)
        sums = self.written.present.setdefault(policy, Written())
        sums.num_bytes += num_bytes
        sums.promised_byte_s += num_bytes * (expires_at - computed_at)
        sums.left_byte_s += num_bytes * (expires_at - now)

    def note_evicted(self, policy: str, now: float, *, computed_at: float) -> None:
        """Count a block that has to make room for others now."""
        self._gone(policy, now).evicted.add(max(now - computed_at, 1.0))

    def note_expired(self, policy: str, now: float) -> None:
        """Count a block that was kept for as long as its policy promised."""
        self._gone(policy, now).num_expired += 1

    def _gone(self, policy: str, now: float) -> Removed:
        self.gone.begin(now, AGES_SPAN_S)
        return self.gone.present.setdefault(policy, Removed())

    def figures(self, now: float, *, budget_bytes: int, other_bytes: int) -> Lifetimes:
        """Return what the counts say.

        The longest unused block is evicted first, whatever its policy. So blocks stay, on average,
        until as many bytes as there is room for were written after them (Little's law), unless they
        expire sooner. A block that is used again stays longer than that, and others shorter.

        Args:
            now: seconds since the epoch.
            budget_bytes: what all files may occupy, which is `disk_size`.
            other_bytes: the part of it that the index needs.
        """
        written, gone = self.written, self.gone
        measured_s = now - written.since(now, RATE_SPAN_S)
        ages_since = gone.since(now, AGES_SPAN_S)
        rates, promised_s, left_s = dict[str, float](), dict[str, float](), dict[str, float]()
        for policy in written.policies if measured_s >= LEAST_MEASURED_S else ():
            both = written.of(policy)
            num_bytes = sum(each.num_bytes for each in both)
            rates[policy] = num_bytes / measured_s
            promised_s[policy] = sum(each.promised_byte_s for each in both) / num_bytes
            left_s[policy] = sum(each.left_byte_s for each in both) / num_bytes
        kinds = [(rate, left_s[policy]) for policy, rate in rates.items()]
        room_bytes = max(budget_bytes - other_bytes, 1)
        stay_s = _stay_s(kinds, room_bytes)
        ages = {it: LogHistogram.sum(each.evicted for each in gone.of(it)) for it in gone.policies}
        needed_bytes = sum(rate * left for rate, left in kinds) * budget_bytes / room_bytes
        told = Lifetimes(
            measured_s=measured_s,
            write_bytes_per_s=rates,
            promised_s=promised_s,
            expected_s={it: promised_s[it] - max(0.0, left_s[it] - stay_s) for it in rates},
            needed_bytes=min(math.ceil(needed_bytes), 1 << 62) if rates else None,
            ages_since=ages_since,
            num_evicted={policy: each.num for policy, each in ages.items()},
            num_expired={it: sum(each.num_expired for each in gone.of(it)) for it in ages},
            evicted_age_p1_s=_quantiles(ages, 0.01),
            evicted_age_p50_s=_quantiles(ages, 0.5),
        )
        if stay_s < math.inf:
            told.shortfall = _shortfall(told, budget_bytes)
        return told


def _stay_s(kinds: Collection[tuple[float, float]], room_bytes: int) -> float:
    """Return after which time on the disk a block has to make room; infinite if none ever has to.

    Args:
        kinds: for each kind of blocks the bytes written a second, and the seconds until they
            expire.
        room_bytes: the time is the one at which the blocks that are not older, and have not
            expired, fill this room.
    """
    rate, used_bytes = sum(each for each, _ in kinds), 0.0
    for kind_rate, left_s in sorted(kinds, key=lambda kind: kind[1]):
        if used_bytes + rate * left_s > room_bytes:
            return max(0.0, room_bytes - used_bytes) / rate
        used_bytes += kind_rate * left_s
        rate -= kind_rate
    return math.inf


def _quantiles(ages: Mapping[str, LogHistogram], share: float) -> dict[str, float]:
    found = {policy: each.quantile(share) for policy, each in ages.items()}
    return {policy: age for policy, age in found.items() if age is not None}


def _shortfall(told: Lifetimes, budget_bytes: int) -> str:
    """Say that the disk is too small for what the policies promise, and which size would do."""
    promised_s, kept_s = told.promised_s, told.expected_s
    policy = max(kept_s, key=lambda each: promised_s[each] - kept_s[each])
    name, promised = printable(policy), format_duration(promised_s[policy])
    rate = format_bytes(int(sum(told.write_bytes_per_s.values())))
    measured, kept = format_duration(told.measured_s), format_duration(kept_s[policy])
    return (
        f"`{name}` promises {promised}, but at the present write rate of "
        f"{rate}/s (of the last {measured}) blocks are evicted when they are {kept} old on "
        f"average; `disk_size` = `{format_bytes(told.needed_bytes or 0)}` would do, it is "
        f"`{format_bytes(budget_bytes)}`"
    )
