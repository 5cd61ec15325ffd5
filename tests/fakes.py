"""A clock for tests that cannot wait for real time to pass."""

from tieredkv.clock import Clock

START = 1_800_000_000.0


class FakeClock(Clock):
    """A clock that moves only when a test moves it.

    Attributes:
        moment: the time that it shows. A test may set it, even back, as a restarted process may
            find it.
    """

    def __init__(self, start: float = START) -> None:
        super().__init__()
        self.moment = start

    def now(self) -> float:
        return self.moment

    def advance_to(self, moment: float) -> None:
        self.moment = max(self.moment, moment)

    def advance(self, seconds: float) -> None:
        """Let this many seconds pass."""
        self.moment += seconds
