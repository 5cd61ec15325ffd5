"""When requests are expected to get their first token, and how late others were.

Nothing is decided by them. `TieredCache` shows them what happens (`Forecasts`), and they tell what
was expected once a first token has come.

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
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from tieredkv.cache.chain import Chain

NUM_LAGS = 32
LAG_S = 10.0
"""The lag of a request's first token is the median of so many requests of the last seconds."""

ForecastKind = Literal["restored", "computed", "issued"]
"""What a request waits for: blocks that slower tiers have, its turn, or the step that is issued."""


class Forecast(NamedTuple):
    """When a request's first token is expected.

    Attributes:
        kind: what it waits for.
        made_at: when that was first planned, in monotonic time.
        planned_s: how long after that by the plan.
        lag_s: how much later than planned others of the kind got theirs; 0.0 if it is issued.
    """

    kind: ForecastKind
    made_at: float
    planned_s: float
    lag_s: float

    @property
    def predicted_s(self) -> float:
        """How long after `made_at` it is expected."""
        return self.planned_s + self.lag_s


class Outcome(NamedTuple):
    """What was expected of a first token that has come.

    Attributes:
        predicted_s: from the first plan until the first token, as expected then.
        actual_s: the same, as it was.
        kind: what the request waited for.
    """

    predicted_s: float
    actual_s: float
    kind: ForecastKind


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
    """Observes the requests of a cache, and learns from those whose first token has come."""

    def __init__(self) -> None:
        self._of: dict[Chain, Forecast] = {}
        self._lags: defaultdict[ForecastKind, Lag] = defaultdict(Lag)
        self._issued_at = -sys.float_info.max  # the last step

    def note_plan(self, planned: Iterable[tuple[Chain, bool, float]]) -> None:
        """Make the forecasts of admitted requests that are planned for the first time.

        Args:
            planned: each request, whether it lacks blocks that slower tiers have, and until when
                its first token is planned, in seconds.
        """
        for chain, is_restored, planned_s in planned:
            if chain.blocks and chain not in self._of:
                kind: ForecastKind = "restored" if is_restored else "computed"
                lag_s = self._lags[kind].seconds
                self._of[chain] = Forecast(kind, time.monotonic(), planned_s, lag_s)

    def note_step(self, ending: Iterable[Chain], done_s: Callable[[], float]) -> None:
        """Note that a step is issued, which knows best when it gives a first token.

        A request that was planned before the last step is told as it was expected then.

        Args:
            ending: chains of the requests that get a token with it.
            done_s: returns for how long the device is busy with this step and those before it.
        """
        now = time.monotonic()
        for chain in ending:
            forecast = self._of.get(chain)
            made_at = now if forecast is None else forecast.made_at
            if forecast is None or made_at > self._issued_at:
                self._of[chain] = Forecast("issued", made_at, now - made_at + done_s(), 0.0)
        self._issued_at = time.monotonic()

    def note_first_token(self, chain: Chain) -> Outcome | None:
        """Learn from the forecast of a request that gets its first token; tell what it was."""
        forecast = self._of.get(chain)
        if forecast is None:
            return None
        actual_s = time.monotonic() - forecast.made_at
        if forecast.kind != "issued":
            self._lags[forecast.kind].learn(actual_s - forecast.planned_s)
        return Outcome(forecast.predicted_s, actual_s, forecast.kind)

    def forget(self, chain: Chain) -> None:
        """Forget a request that is released."""
        self._of.pop(chain, None)
