"""The queue of waiting requests: fair between tenants, and grouped by chain within a tenant.

Tenants share by start-time fair queueing. It is the turn of the tenant for which the fewest tokens
were computed; a tenant that returns starts level with the others. So if a tenant had nothing
queued, at most one request of each other tenant is admitted before its first one.
Cached tokens are not counted; generated tokens are counted once a request has ended.

Within a tenant, the next request is the one of the oldest 64 that has the fewest tokens to compute:
those that no tier holds, and that it does not share with the request admitted last. So short work
does not wait for long work, and conversations that do not fit into the tiers together do not push
each other out in turns. While there is no room for it, the first request that fits may pass it: the
oldest of another tenant, or one of those 64. The oldest request of the tenant whose turn it is can
be passed at most 64 times; then no request is admitted before it.

Called by the engine's thread only.

Source: start-time fair queueing, Goyal, Vin and Cheng 1996.
"""

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from itertools import islice

from tieredkv.cache.chain import Chain
from tieredkv.engine.request import Request
from tieredkv.errors import RequestError
from tieredkv.hashing import num_shared
from tieredkv.types import BlockHash

WINDOW = 64
"""Requests, or tenants, at the head of a queue that are compared with one another."""

MAX_PASSES = 64
"""A request is next in any case once so many others have been admitted before it."""

MOST_AWAY = 64
"""Tenants without requests that are remembered in any case, though they start level with others."""


class RequestQueue:
    """Waiting requests, one queue per tenant; no operation takes longer for longer queues.

    Args:
        block_size: tokens a block.
        num_held: returns how many blocks at the head of a chain need no computing, by and large.

    Attributes:
        waited_s: how long the request that was admitted last had waited.
    """

    def __init__(self, block_size: int, num_held: Callable[[Chain], int]) -> None:
        self._block_size, self._num_held = block_size, num_held
        self.waited_s = 0.0
        self._queues: dict[str, OrderedDict[Request, None]] = {}
        self._tokens: Counter[str] = Counter()  # per tenant: computed, or missed while away
        self._num_admitted: Counter[str] = Counter()  # requests that have not ended, per tenant
        self._most_known = MOST_AWAY  # with so many tenants, those that are level are forgotten
        self._level = 0  # tokens of the tenant whose turn it was last
        self._last: dict[str, Sequence[BlockHash]] = {}  # chains last admitted

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain.from_iterable(self._queues.values())

    @property
    def tenants(self) -> Set[str]:
        """The tenants that have waiting requests."""
        return self._queues.keys()

    def upcoming(self) -> list[Request]:
        """Return the request to admit next, then a few requests that may pass it."""
        tenants = sorted(self._queues, key=self._tokens.__getitem__)[:WINDOW]
        window = list(islice(self._queues[tenants[0]], WINDOW)) if tenants else []
        if not window or window[0].num_passes >= MAX_PASSES:
            return window[:1]
        window.sort(key=self.num_to_compute)
        return [window[0], *map(self._oldest, tenants[1:]), *window[1:]]

    def num_to_compute(self, request: Request) -> int:
        """Return how many tokens a waiting request has to compute if it comes next.

        What a preempted request has left in memory gives it no precedence over new requests.
        """
        last = self._last.get(request.asked.tenant, ())
        num_held = 0 if request.table_key else self._num_held(request.chain)
        num_held = max(num_shared(request.chain.hashes, last), num_held)
        return request.num_tokens - self._block_size * num_held

    def check_room(self, tenant: str, most: int, coming: Collection[Request] = ()) -> None:
        """Refuse a request if `most` requests wait and its tenant has its equal share of them.

        A tenant below its share is still admitted, so that never more than `2 * most` wait.

        Args:
            tenant: whose request it is.
            most: how many requests may wait.
            coming: requests that will be queued; they count as waiting.

        Raises:
            RequestError: the queue is full; the error says when to ask again.
        """
        if len(self) + len(coming) < most:
            return
        waiting = Counter({each: len(queue) for each, queue in self._queues.items()})
        waiting.update(request.asked.tenant for request in coming)
        if waiting[tenant] >= most // len({*waiting, tenant}):
            text = f"The queue is full: {waiting.total()} requests are waiting; retry later."
            raise RequestError(text, code="queue_full", status=429).retry_in(self.waited_s)

    def append(self, request: Request) -> None:
        """Queue a request behind its tenant's others, or before them if it was preempted."""
        tenant = request.asked.tenant
        if request.table_key:
            self._note_end(tenant)
        if tenant not in self._queues:
            self._forget_level()
            self._queues[tenant] = OrderedDict()
            self._tokens[tenant] = max(self._tokens[tenant], self._level)
        self._queues[tenant][request] = None
        self._queues[tenant].move_to_end(request, last=not request.table_key)

    def take(self, request: Request) -> None:
        """Remove an upcoming request, and charge its tenant the tokens that must be computed."""
        turn = min(self._queues, key=self._tokens.__getitem__)
        self._oldest(turn).num_passes += 1
        request.num_passes = 0
        self._level = self._tokens[turn]
        tenant = request.asked.tenant
        self._tokens[tenant] += request.num_uncached_tokens
        self._num_admitted[tenant] += 1
        self._last[tenant] = request.chain.hashes
        if not request.table_key:
            self.waited_s = time.monotonic() - request.added_at
        self.remove(request)

    def end(self, request: Request) -> None:
        """Note that an admitted request has ended, and charge its tenant what it generated."""
        self._tokens[request.asked.tenant] += request.num_output_tokens
        self._note_end(request.asked.tenant)

    def remove(self, request: Request) -> None:
        """Remove a request."""
        tenant = request.asked.tenant
        del self._queues[tenant][request]
        if not self._queues[tenant]:
            del self._queues[tenant]
            self._last.pop(tenant, None)

    def _note_end(self, tenant: str) -> None:
        self._num_admitted[tenant] -= 1
        if not self._num_admitted[tenant]:
            del self._num_admitted[tenant]

    def _forget_level(self) -> None:
        """Forget tenants without requests that would start level with the others anyway."""
        if len(self._tokens) < self._most_known:
            return
        here = self._queues.keys() | self._num_admitted.keys()
        for tenant in [it for it, num in self._tokens.items() if num <= self._level]:
            if tenant not in here:
                del self._tokens[tenant]
        self._most_known = 2 * len(self._tokens) + MOST_AWAY

    def _oldest(self, tenant: str) -> Request:
        return next(iter(self._queues[tenant]))
