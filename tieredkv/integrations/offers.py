"""The chunks that another engine has offered to be written, until a tier looks at them.

A step can offer thousands of chunks before it is issued, so that the device would wait while each
is looked at. So they are looked at when later steps have been scheduled, in a part of the time that
a step takes.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tieredkv.integrations.tier_request import TierRequest

PART_CHUNKS = 128
"""Chunks that are looked at together; a step looks at no less, if there are so many."""

_SHARE_OF_STEP, _MOST_S = 0.25, 0.05
_SHARE_OF_ALL = 0.125  # so that their number does not grow without end


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


OfferedChunks = tuple[Offer, list[tuple[int, bytes]]]
"""An offer, and some of its chunks as in `Offer.left`."""


@dataclass(slots=True)
class Offers:
    """Offers in the order in which they came; false while there is none.

    Attributes:
        clock: monotonic time in seconds.
    """

    clock: Callable[[], float] = time.monotonic
    _old: deque[Offer] = field(default_factory=deque)
    _new: list[Offer] = field(default_factory=list)  # of the step that is being scheduled
    _back: dict[int, OfferedChunks] = field(default_factory=dict)
    _step_ended_at: float = 0.0

    def __bool__(self) -> bool:
        return bool(self._old or self._new or self._back)

    def add(self, offer: Offer) -> None:
        """Add an offer of the step that is being scheduled."""
        offer.request.num_offered += len(offer.left)
        self._new.append(offer)

    def put_back(self, offer: Offer, chunks: list[tuple[int, bytes]]) -> None:
        """Have chunks of an offer that was yielded be looked at again when others have been."""
        if chunks:
            self._back.setdefault(offer.id, (offer, []))[1].extend(chunks)

    def take_back(self) -> Iterator[OfferedChunks]:
        """Yield what was put back by now."""
        for id in [*self._back]:
            yield self._back.pop(id)

    def has_left(self, offer: Offer) -> bool:
        """Return whether chunks of an offer are still to be looked at."""
        return bool(offer.left) or offer.id in self._back

    def end_step(self) -> Iterator[OfferedChunks]:
        """Yield what is to be looked at now that a step has been scheduled, none of it its own."""
        now = self.clock()
        until = now + min(_SHARE_OF_STEP * (now - self._step_ended_at), _MOST_S)
        num_left = sum(len(each.left) for each in self._old)
        least = max(PART_CHUNKS, _SHARE_OF_ALL * num_left)
        while self._old and (least > 0 or self.clock() < until):
            offer, part = self._next()
            least -= len(part)
            yield offer, part
        yield from self.take_back()
        self._merge()
        self._step_ended_at = self.clock()

    def take_all(self) -> Iterator[OfferedChunks]:
        """Yield all that was offered, but what is put back."""
        self._merge()
        while self._old:
            yield self._next()

    def _next(self) -> OfferedChunks:
        """Take some chunks of the first offer; `left` is empty with the last ones of an offer."""
        offer = self._old[0]
        part = [offer.left.popleft() for _ in range(min(PART_CHUNKS, len(offer.left)))]
        offer.request.num_offered -= len(part)
        if not offer.left:
            self._old.popleft()
        return offer, part

    def _merge(self) -> None:
        self._old += self._new
        self._new.clear()
