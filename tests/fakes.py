"""Stand-ins that tests of several folders share."""

from tieredkv.clock import Clock


class FakeClock(Clock):
    """A clock that only moves when told to; `set` may also turn it back."""

    def __init__(self, start: float = 1_800_000_000.0) -> None:
        self._now = start
        super().__init__(wall=lambda: self._now, elapsed=lambda: self._now)

    def now(self) -> float:
        return self._now

    def advance_to(self, t: float) -> None:
        self._now = max(self._now, t)

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def set(self, t: float) -> None:
        self._now = t
