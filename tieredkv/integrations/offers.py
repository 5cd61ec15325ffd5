"""The chunks that another engine has offered to be written, until a tier looks at them.

A step can offer thousands of chunks before it is issued, so that the device would wait while each
is looked at. So they are looked at when later steps have been scheduled, some in each.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tieredkv.integrations.tier_request import TierRequest

LEAST_A_STEP = 512
"""So many chunks are looked at in a step, if there are that many."""

_SHARE = 4
"""And this part of all that wait, so that their number does not grow without end."""


class Offer(NamedTuple):
    """Chunks that a request offered together.

    Attributes:
        id: the engine's number of the job.
        request: who offered them.
        context: what the engine tells of it.
        left: rows and keys that were not looked at yet, in the order of the prompt.
        at: when they were offered, in seconds of the clock.
        purge: how many evictions by the operator there had been by then.
    """

    id: int
    request: TierRequest
    context: Any
    left: deque[tuple[int, bytes]]
    at: float
    purge: int


Part = tuple[Offer, list[tuple[int, bytes]]]


@dataclass(slots=True)
class Offers:
    """Offers in the order in which they came; false while there is none."""

    _old: deque[Offer] = field(default_factory=deque)
    _new: list[Offer] = field(default_factory=list)  # of the step that is being scheduled

    def __bool__(self) -> bool:
        return bool(self._old or self._new)

    def add(self, offer: Offer) -> None:
        """Add an offer of the step that is being scheduled."""
        self._new.append(offer)

    def end_step(self) -> Iterator[Part]:
        """Yield what is to be looked at now that a step has been scheduled, none of it its own."""
        num_left = sum(len(each.left) for each in self._old)
        yield from self._take(max(LEAST_A_STEP, num_left // _SHARE))
        self._old += self._new
        self._new.clear()

    def take_all(self) -> Iterator[Part]:
        """Yield all that was offered."""
        self._old += self._new
        self._new.clear()
        yield from self._take(1 + sum(len(each.left) for each in self._old))

    def _take(self, most: int) -> Iterator[Part]:
        """Yield parts of the first offers; `left` of the last part of an offer is empty."""
        while self._old and most > 0:
            offer = self._old[0]
            part = [offer.left.popleft() for _ in range(min(most, len(offer.left)))]
            most -= len(part)
            if not offer.left:
                self._old.popleft()
            yield offer, part
