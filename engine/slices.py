"""Does what operators ask for a slice of time between two steps, so that no step waits long.

Called by the engine's thread only.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any

SLICE_S = 0.001
"""For so long pieces of work are done between two steps; the last one may take some milliseconds
more, where a large set or dict grows.
"""

BEAT_S = 1.0
"""An answer that takes longer has empty parts meanwhile, so that who waits for it goes on waiting.
"""

TellPart = Callable[[dict[str, Any], bool], object]
"""Takes a part of an answer, and whether more parts follow."""

Answer = Generator[dict[str, Any] | None, None, dict[str, Any]]
"""Yields after each piece of work: a part of an answer, or None. Returns the last part."""


class Slices:
    """Does any amount of work in pieces; works that were begun together go on by turns."""

    def __init__(self) -> None:
        self._open = deque[Iterator[object]]()

    @property
    def has_more(self) -> bool:
        """Whether there is work left."""
        return bool(self._open)

    def begin(self, work: Iterator[object]) -> None:
        """Have work done that yields after each piece."""
        self._open.append(work)

    def go_on(self) -> None:
        """Do pieces of work for a short time, at least one."""
        end = time.monotonic() + SLICE_S
        while self._open:
            work = self._open.popleft()
            if next(work, self) is not self:
                self._open.append(work)
            if time.monotonic() >= end:
                break


def telling(answer: Answer, tell: TellPart) -> Iterator[None]:
    """Tell the parts of an answer as they are made; yield after each piece of work."""
    told_at = time.monotonic()
    while True:
        try:
            part = next(answer)
        except StopIteration as ending:
            tell(ending.value, False)
            return
        if part is not None or time.monotonic() - told_at > BEAT_S:
            tell(part or {}, True)
            told_at = time.monotonic()
        yield
