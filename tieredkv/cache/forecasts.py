"""When requests are expected to get their first token, and how late others were.

A request is told once: by the plan at its admission, or by the step that is issued then, if its
first token comes with that. The plan knows the device and the links. It does not know what else is
computed in a step, nor what the engine's own thread takes, so that the lag of others is added. The
step knows all that the device does before the first token.

Called by the engine's thread only.
"""

import statistics
import sys
import time
from collections import defaultdict, deque
from typing import Literal, NamedTuple

NUM_LAGS = 32
LAG_S = 10.0
"""The lag of a request's first token is the median of so many requests of the last seconds."""

Kind = Literal["restored", "computed", "issued"]
"""What a request waits for: blocks that slower tiers have, its turn, or the step that is issued."""


class Forecast(NamedTuple):
    """When a request's first token is expected.

    Attributes:
        kind: what it waits for.
        made_at: when that was first planned, in monotonic time.
        planned_s: how long after that by the plan.
        lag_s: how much later than planned others of the kind got theirs; 0.0 if it is issued.
    """

    kind: Kind
    made_at: float
    planned_s: float
    lag_s: float

    @property
    def predicted_s(self) -> float:
        """How long after `made_at` it is expected."""
        return self.planned_s + self.lag_s


class Lag:
    """Learns by how much later than planned requests get their first token."""

    def __init__(self) -> None:
        self._last = deque[tuple[float, float]](maxlen=NUM_LAGS)  # when, and how late

    @property
    def seconds(self) -> float:
        """The median of the last requests; 0.0 without any."""
        since = time.monotonic() - LAG_S
        last = [late_s for at, late_s in self._last if at > since]
        return max(0.0, statistics.median(last)) if last else 0.0

    def learn(self, seconds: float) -> None:
        """Take in by how much later than planned a request got its first token."""
        self._last.append((time.monotonic(), seconds))


class Forecasts:
    """Makes the forecasts of all requests, and learns from those whose time has come."""

    def __init__(self) -> None:
        self._lags: defaultdict[Kind, Lag] = defaultdict(Lag)
        self._issued_at = -sys.float_info.max  # the last step

    def make(self, planned_s: float, *, is_restored: bool) -> Forecast:
        """Return the forecast of a request that has just been planned for the first time.

        Args:
            planned_s: until its first token.
            is_restored: whether it lacks blocks that slower tiers have.
        """
        kind: Kind = "restored" if is_restored else "computed"
        return Forecast(kind, time.monotonic(), planned_s, self._lags[kind].seconds)

    def note_issue(self) -> None:
        """Note that a step was issued."""
        self._issued_at = time.monotonic()

    def is_new(self, forecast: Forecast) -> bool:
        """Return whether a forecast was made after the last step was issued."""
        return forecast.made_at > self._issued_at

    def with_step(self, forecast: Forecast | None, done_s: float) -> Forecast:
        """Return the forecast of a request that gets its first token with the step issued now.

        Args:
            forecast: of the request, if it was planned.
            done_s: for how long the device is busy with this step and those before it.
        """
        now = time.monotonic()
        made_at = now if forecast is None else forecast.made_at
        planned_s = now - made_at + done_s
        return Forecast("issued", made_at, planned_s, 0.0)

    def learn(self, forecast: Forecast) -> None:
        """Learn from a forecast whose time has come."""
        if forecast.kind != "issued":
            late_s = time.monotonic() - forecast.made_at - forecast.planned_s
            self._lags[forecast.kind].learn(late_s)
