"""A clock for tests that cannot wait for real time to pass."""

from tieredkv.clock import Clock


class FakeClock(Clock):
    """A clock that moves only when a test moves it."""

    def __init__(self, start: float = 1_800_000_000.0) -> None:
        super().__init__()
        self._moment = start

    def now(self) -> float:
        return self._moment

    def advance_to(self, moment: float) -> None:
        self._moment = max(self._moment, moment)

    def advance(self, seconds: float) -> None:
        """Let this many seconds pass."""
        self._moment += seconds

    def set(self, moment: float) -> None:
        """Set the clock to this moment, even back, as a restarted process may find it."""
        self._moment = moment
