"""How fast a link moves bytes: measured while it has something to move.

The planner (`plan`) reads the rate; the moves teach it. A rate of which nothing was measured yet
starts from an assumption and is corrected by the first moves.

Called by the engine's thread only.
"""

import math
from dataclasses import dataclass, field

MIN_WINDOW_S = 0.02
"""A shorter busy time is no measurement: it would be one of latency."""

BURST_GAP_S = 0.002
"""Moves that end so shortly after one another belong to one burst."""

MEMORY_S = 0.5
"""Busy seconds after which a measurement has lost most of its weight."""

FIRST_S = 0.03
"""The first assumption weighs as much as a measurement of so many seconds."""

STALE_S = 0.1
"""The rate of an earlier run weighs as much as a measurement of so many seconds, and so does a
stale rate beside a lower measurement.
"""

BURST_S = 0.02
"""A limit lets through at most what it allows in this time, at once."""

PROBE_S = 5.0
"""A rate that nothing taught for so long is measured again, while there is something to load.

A rate that is wrong is so corrected within ten seconds, also if requests are seldom.
"""

FIRST_PROBE_S = 0.5
"""The first pause between two measurements of a rate that has fallen; see `Probes`."""

FAR_OFF = 2.0
"""If two measurements in turn differ from the rate so many times, both in one direction, the link
itself has changed.
"""


@dataclass(slots=True)
class _Window:
    """A measurement of a link.

    A link moves many things at once, which arrive in bursts. So a measurement lasts until as many
    bytes have arrived as were under way at its beginning, and then to the end of a burst. If they
    arrive one by one, it ends once twice as many have.

    Attributes:
        busy_s: for how long something was under way.
        num_bytes: what was under way at its beginning; 0 before anything has ended.
        num_ended: bytes whose moves have ended.
        num_moved: those of them that arrived.
    """

    busy_s: float = 0.0
    num_bytes: int = 0
    num_ended: int = 0
    num_moved: int = 0


@dataclass(slots=True)
class LinkRate:
    """Learns the rate of one direction of a link while it has something to move.

    The rate is what arrives in a time during which something was always under way. While nothing
    arrives for longer than the bytes under way should take, the rate that is told falls by itself,
    so that a link that has stopped is not waited for.

    Attributes:
        bytes_per_s: the rate that was learnt, or the first assumption.
        limit: the operator's limit in bytes/s; infinite without one. It caps what is told. A link
            that it holds back is known to be no slower than the limit, and nothing more.
        learnt_at: when the rate was last measured, or found to be no lower than the limit; negative
            infinity before that.
        memory_bytes: bytes after which a measurement has lost most of its weight, if they take less
            than `MEMORY_S`.
    """

    bytes_per_s: float
    limit: float = math.inf
    learnt_at: float = -math.inf
    memory_bytes: float = math.inf
    num_bytes: int = 0
    _moved_at: float = 0.0
    _due_at: float = 0.0
    _window: _Window = field(default_factory=_Window)
    _learnt_s: float = FIRST_S
    _allowed: float = 0.0
    _allowed_at: float = -math.inf
    _far: int = 0  # whether the last measurement was far above the rate or far below it
    _is_taken_over: bool = False

    def begin(self, num_bytes: int, now: float) -> None:
        """Note that a move of so many bytes was handed to the link; it counts for the limit."""
        if not self.num_bytes:
            self._moved_at = now
        self._due_at = now + self.busy_s(now) + num_bytes / self.steady
        self.num_bytes += num_bytes
        if self.limit < math.inf:
            self._allowed -= num_bytes

    def end(self, num_bytes: int, now: float, *, teaches: bool = True) -> None:
        """Note that a move has ended.

        Args:
            num_bytes: as given to `begin`.
            now: when it ended.
            teaches: whether the bytes arrived; if not, the move says nothing about the rate.
        """
        window, gap_s = self._window, max(0.0, now - self._moved_at)
        if gap_s > BURST_GAP_S and 0 < window.num_bytes <= window.num_ended:
            window = self._measure(self._moved_at)
        window.num_bytes = window.num_bytes or self.num_bytes
        window.busy_s += gap_s
        window.num_ended += num_bytes
        window.num_moved += num_bytes if teaches else 0
        self._note_end(num_bytes, now)
        if not self.num_bytes or window.num_ended >= 2 * window.num_bytes:
            self._measure(now)

    def skip(self, num_bytes: int, now: float) -> None:
        """Note that a move has ended that something else than the link held back.

        The time up to now teaches nothing, nor do moves that ended shortly before.
        """
        self._note_end(num_bytes, now)
        self._window = _Window()

    def _measure(self, now: float) -> _Window:
        """Learn from the window and return the next one; one that is too short goes on."""
        window = self._window
        if window.busy_s < MIN_WINDOW_S:
            window.num_bytes = window.num_ended = 0
            return window
        if window.num_moved:
            self.learn(window.num_moved, window.busy_s, now)
        self._window = _Window()
        return self._window

    def _note_end(self, num_bytes: int, now: float) -> None:
        self.num_bytes -= num_bytes
        self._due_at = min(self._due_at, now + self.num_bytes / self.steady)
        self._moved_at = max(now, self._moved_at)

    def admits(self, num_bytes: int, now: float) -> bool:
        """Return whether the limit lets a move of so many bytes begin now."""
        if self.limit == math.inf:
            return True
        most = max(num_bytes, self.limit * BURST_S)
        self._allowed = min(most, self._allowed + (now - self._allowed_at) * self.limit)
        self._allowed_at = now
        return self._allowed >= num_bytes

    def learn(self, num_bytes: int, seconds: float, now: float) -> None:
        """Take in a measurement; longer ones weigh more.

        Of a stale rate, a first measurement that is higher replaces it, since a link is never
        faster than it can be. One that is lower may be an exception, and counts in part. The second
        one in turn that is far off in the same direction replaces the rate.
        """
        measured = num_bytes / max(seconds, 1e-9)
        if self.is_learnt and measured >= 0.9 * self.limit and self.bytes_per_s >= measured:
            self.learnt_at = now
            return
        if self.is_stale(now):
            if measured > self.bytes_per_s:
                self._learnt_s = 0.0
            elif self.is_learnt:
                self._learnt_s = STALE_S
        self._learnt_s += seconds
        share = max(seconds / MEMORY_S, num_bytes / self.memory_bytes)
        weight = max(1 - math.exp(-share), seconds / self._learnt_s)
        times = measured / self.bytes_per_s
        far = (times >= FAR_OFF) - (times <= 1 / FAR_OFF)
        if far and far == self._far:
            weight, far = 1.0, 0
        self._far = far
        self.bytes_per_s += weight * (measured - self.bytes_per_s)
        self.learnt_at = now

    def assume(self, bytes_per_s: float) -> None:
        """Take over the rate of an earlier run, until it is measured."""
        self.bytes_per_s, self._learnt_s, self._is_taken_over = bytes_per_s, STALE_S, True

    def doubt(self) -> None:
        """Have the next measurement replace the rate."""
        self._learnt_s = 0.0

    def effective(self, now: float) -> float:
        """Return the rate in bytes/s to plan with: what was learnt, or less if the link stalls."""
        rate = self.steady
        idle_s = now - self._moved_at
        if self.num_bytes and idle_s > MIN_WINDOW_S:
            rate = min(rate, self.num_bytes / idle_s)
        return rate

    def busy_s(self, now: float) -> float:
        """Return for how long the link is busy with what is under way.

        A link moves many things at once, so that none may have arrived while all nearly have. What
        is overdue is expected to take as long again as it is overdue already.
        """
        return abs(self._due_at - now) if self.num_bytes else 0.0

    @property
    def steady(self) -> float:
        """The rate in bytes/s, even if the link has stopped for now."""
        return min(self.bytes_per_s, self.limit)

    @property
    def is_learnt(self) -> bool:
        """Whether the rate was measured, so that it is no assumption any more."""
        return self.learnt_at > -math.inf

    @property
    def is_known(self) -> bool:
        """Whether the rate was measured, now or in an earlier run."""
        return self.is_learnt or self._is_taken_over

    def is_stale(self, now: float) -> bool:
        """Whether the rate was not measured for `PROBE_S`."""
        return now - self.learnt_at >= PROBE_S


@dataclass(slots=True)
class Probes:
    """Says when the rate of a link that the plan gives nothing to is to be measured again.

    A rate is measured every `PROBE_S`. If it has fallen to less than half of what the link was last
    used at, that may be a mistake: it is measured at once, and then after pauses that double.
    """

    _used_at: float = 0.0  # bytes per second
    _pause_s: float = 0.0
    _probed_at: float = -math.inf

    def note_use(self, rate: LinkRate) -> None:
        """Note that the plan gives something to the link."""
        self._used_at, self._pause_s = rate.steady, 0.0

    def is_due(self, rate: LinkRate, now: float) -> bool:
        """Return whether the rate is to be measured again."""
        if self._has_fallen(rate):
            return now - self._probed_at >= self._pause_s
        return now - self._probed_at >= PROBE_S and rate.is_stale(now)

    def note_probe(self, rate: LinkRate, now: float) -> None:
        """Note that the rate is being measured; one that has fallen is not believed any more."""
        if self._has_fallen(rate):
            rate.doubt()
        self._probed_at = now
        self._pause_s = min(PROBE_S, max(FIRST_PROBE_S, 2 * self._pause_s))

    def _has_fallen(self, rate: LinkRate) -> bool:
        return rate.steady < self._used_at / FAR_OFF
