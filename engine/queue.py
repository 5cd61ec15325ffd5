"""Which request is admitted next: fair between tenants, and those of one prefix near each other.

Between tenants it is start-time fair queueing: it is the turn of the tenant that has got the fewest
tokens, and one that comes back starts level with the others. So at most one request of each other
tenant is admitted before the first of a tenant that had nothing queued, however many they have.

Within a tenant, of the oldest 16 the one goes next that shares most with the last one admitted.
While there is no room for it, the first that does fit may pass it: the oldest of another tenant, or
one of those 16. All this passes the oldest request of the tenant whose turn it is at most 8 times;
then nobody is admitted before it.

Called by the engine's thread only.

Source: start-time fair queueing, Goyal, Vin and Cheng 1996.
"""

import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from tieredkv.engine.request import Request
from tieredkv.errors import IntegrityError
from tieredkv.types import BlockHash

WINDOW = 16
MAX_PASSES = 8


class RequestQueue:
    """Requests that wait, one queue a tenant; nothing here costs more for a longer queue.

    Invariants (`check`): no tenant's queue is empty; each holds its own; nobody was passed more
    often than stated.

    Attributes:
        waited_s: how long the last one admitted had waited.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._queues: dict[str, OrderedDict[Request, None]] = {}
        self._tokens: Counter[str] = Counter()  # that each tenant got, or missed while away
        self._last: dict[str, Sequence[BlockHash]] = {}  # chains last admitted

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self._queues.values())

    def upcoming(self) -> list[Request]:
        """Return the one to be admitted next, then those that may pass it; a few of them."""
        tenants = sorted(self._queues, key=self._tokens.__getitem__)[:WINDOW]
        window = list(islice(self._queues[tenants[0]], WINDOW)) if tenants else []
        if not window or window[0].num_passes >= MAX_PASSES:
            return window[:1]
        last = self._last.get(tenants[0], ())
        window.sort(key=lambda each: -_num_shared(each.prefix.hashes, last))
        return [window[0], *map(self._oldest, tenants[1:]), *window[1:]]

    def displaced(self, tenant: str, most: int) -> Request | None:
        """Return who gives way in a full queue to a request of this tenant.

        It is the newest of the tenant that has most; None where the one that asks has its share,
        `most` divided by the tenants, already.
        """
        if len(self._queues.get(tenant, ())) >= most // len({*self._queues, tenant}):
            return None
        longest = max(self._queues.values(), key=len)
        return next((each for each in reversed(longest) if each.usage is None), None)

    def append(self, request: Request) -> None:
        """Queue a request behind the others of its tenant."""
        request.queued_at = time.monotonic()
        tenant, tokens = request.tenant, self._tokens
        if tenant not in self._queues:
            least = min((tokens[each] for each in self._queues), default=0)
            tokens[tenant] = max(tokens[tenant], least)
        self._queues.setdefault(tenant, OrderedDict())[request] = None

    def appendleft(self, request: Request) -> None:
        """Queue a request before the others of its tenant."""
        self.append(request)
        self._queues[request.tenant].move_to_end(request, last=False)

    def take(self, request: Request) -> None:
        """Take out an upcoming request: its tenant has got its tokens."""
        oldest = self._oldest(min(self._queues, key=self._tokens.__getitem__))
        oldest.num_passes += 1
        request.num_passes = 0
        self.waited_s = time.monotonic() - request.queued_at
        self._tokens[request.tenant] += request.num_tokens
        self._last[request.tenant] = request.prefix.hashes
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Take out a request that is not to run."""
        queue = self._queues[request.tenant]
        del queue[request]
        if not queue:
            del self._queues[request.tenant]
        if not self._queues:
            self._tokens.clear()
            self._last.clear()

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        for tenant, queue in self._queues.items():
            is_wrong = (each.tenant != tenant or each.num_passes > MAX_PASSES for each in queue)
            if not queue or any(is_wrong):
                raise IntegrityError(f"the queue of tenant `{tenant[:12]}` is not in order")

    def _oldest(self, tenant: str) -> Request:
        return next(iter(self._queues[tenant]))


def _num_shared(some: Sequence[BlockHash], others: Sequence[BlockHash]) -> int:
    """Count the blocks that two chains share; a hash tells of all those before it."""
    shortest = range(min(len(some), len(others)))
    return bisect_left(shortest, True, key=lambda index: some[index] != others[index])
