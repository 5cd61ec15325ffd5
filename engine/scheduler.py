"""Chooses the tokens and requests that the next step computes.

Continuous batching with chunked prefill: every running request that can go on gets tokens out of
one budget, then queued requests are admitted in the order of `queue`. The scheduler asks the cache
for blocks and never learns which tier they come from.

Called by the engine's thread only.
"""

import itertools
import logging
import math
import sys
import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import partial

from tieredkv.cache.requests import Admission, RequestProgress, TieredCache
from tieredkv.engine.queue import MAX_PASSES, RequestQueue
from tieredkv.engine.quick_tenants import QuickTenants
from tieredkv.engine.request import Request
from tieredkv.engine.step_plan import ScheduledRow, StepPlan
from tieredkv.errors import IntegrityError
from tieredkv.hashing import chain_hashes
from tieredkv.types import BlockHash, HashAlgo

logger = logging.getLogger(__name__)

MAX_PLANNED = 16
"""Queued requests whose loads are planned.

The queue tells up to 127 requests that may come next. To plan them all would take each step more
than 10 ms of the engine's thread.
"""

MAX_ADMITTED_TOKENS = 32_768
"""The most prompt tokens that are admitted in one step.

Looking up more blocks would hold up the next tokens of other requests, and so does hashing: if so
many tokens were hashed since the last step, their requests are admitted in the next one.
"""

BRIEF = 1 / 4
"""Fraction of a budget: a request with at most that many tokens left to compute is brief.

Brief requests are computed before others, also before those that were admitted first.
"""

BESIDE_BRIEF = 1 / 8
"""Fraction of a budget: the most tokens of others in a step while there are brief requests.

A step that computes a brief request has none of them, unless the step before had none for this
reason. So brief requests get their first tokens soon and the others go on.
"""

SOON_S = 1.0
"""A brief request that waits for its blocks counts if they are expected within this time."""

SHORT_STEP = 1 / 32
"""Fraction of a budget: the prompt tokens of a short step.

A request with at most that many tokens to compute is quick; `quick_tenants` says when steps are
short. A tenant that is alone keeps the whole budget. While steps are short none is issued ahead, so
that a quick request is computed in the very next step. In that step long prompts get a quarter of a
short step, so that they go on. The order of admission still depends on the tokens that were
computed.
"""


@dataclass(kw_only=True)
class Scheduler:
    """Holds the queue and the running requests.

    Invariants (`check`): a running request has a block table that covers its computed tokens; a
    waiting request has none; no request is both; no two requests share an index; no request was
    passed too often.

    Attributes:
        max_num_batched_tokens: the most prompt tokens of a step.
        max_num_alone_tokens: the same for a step while the engine has only one request.
        wants_preemption: whether the last `schedule` had to do without one; see there.
        busy_s: for how long the device is busy with the steps that were issued.
    """

    cache: TieredCache
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_alone_tokens: int
    hash_algo: HashAlgo
    waiting: RequestQueue = field(init=False)
    running: list[Request] = field(default_factory=list)
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    wants_preemption: bool = False
    busy_s: float = 0.0

    def __post_init__(self) -> None:
        self.waiting = RequestQueue(self.block_size, self.cache.num_held)
        self._free_indices = list(range(self.max_num_seqs))[::-1]
        budget = self.max_num_batched_tokens
        self._short_step = max(int(budget * SHORT_STEP), min(budget // 2, 64), 1)
        self._most_brief = int(budget * BRIEF)
        self._most_beside = max(1, int(budget * BESIDE_BRIEF))
        self._quick = QuickTenants()
        self._table_keys = itertools.count(1)
        self._may_preempt = True  # as `schedule` was told
        self._refused: Request | None = None
        self._prepared_at: tuple[int, ...] = ()
        self._num_hashed_tokens = 0  # since the last step; negative if that admitted none
        self._is_unplanned = self._has_put_off = False

    def add(self, request: Request) -> None:
        """Queue a request; its blocks are looked up and prefetched from now on."""
        self.cache.arrive(request.chain)
        self.waiting.append(request)
        self._num_hashed_tokens += request.num_tokens
        self._quick.note_asked(request.asked.tenant)

    def remove(self, request: Request) -> None:
        """Remove a finished or cancelled request, and release exactly what it holds."""
        if request.is_running:
            self._stop_running(request)
            self.waiting.end(request)
            if self._is_quick(request):
                self._quick.note_ended(request.asked.tenant)
        else:
            self.waiting.remove(request)
        self.cache.release(request.chain)

    @property
    def has_short_steps(self) -> bool:
        """Whether steps are short, and none is issued ahead; see `SHORT_STEP`."""
        return self._quick.has_short_steps

    @property
    def held_until(self) -> float:
        """When long prompts resume, in monotonic time; 0 if they are not held."""
        return self._quick.held_until

    def schedule(self, *, may_preempt: bool = True) -> list[ScheduledRow]:
        """Choose the next step's tokens; empty when every request waits for blocks or bytes.

        Running requests that generate come first, then quick ones while steps are short and brief
        ones otherwise, then the others, then the queue.

        Args:
            may_preempt: whether a request may be sent back to the queue; not while a token is
                pending. If not, `wants_preemption` is set until the next call if one was needed,
                and room for queued requests is left to `make_room`.
        """
        self.wants_preemption, self._may_preempt = False, may_preempt
        # Long chunks are computed a little faster, and no other request waits for their end.
        # While blocks are being loaded, what to compute next should be decided more often.
        is_alone = len(self.running) + len(self.waiting) == 1 and not self.cache.is_recalling
        budget = self.max_num_alone_tokens if is_alone else self.max_num_batched_tokens
        step, order = StepPlan(self.cache, self.block_size), sorted(self.running, key=self._rank)
        if self.cache.is_recalling:
            self._plan()
        num_decodes = bisect_left(order, True, key=lambda r: r.is_prefilling)
        decodes, prefills = order[:num_decodes], order[num_decodes:]
        busy = {each.asked.tenant for each in prefills if not self._is_quick(each)}
        tenants = busy | self.waiting.tenants
        if busy and busy < tenants:
            self._admit(step, self._short_step, busy=busy)
        was_held = bool(self.held_until)
        self._quick.look(tenants, has_come=bool(step.rows))
        comes_first = self._is_quick if self.has_short_steps else self._is_brief
        others, has_brief = [*itertools.filterfalse(comes_first, prefills)], False
        if self.has_short_steps:
            quarters = (3 if was_held else 1) if step.rows else 4
            budget = -(-self._short_step * quarters // 4)
        elif others:
            self._admit(step, self._most_brief, only_brief=True)
            budget -= step.num_tokens
            has_brief = bool(step.rows) or any(map(self._comes_soon, self.running))
        budget = self._add_rows(step, [*decodes, *filter(comes_first, prefills)], budget)
        may_put_off, self._has_put_off = not self._has_put_off, False
        if self.held_until:
            budget = 0
        elif has_brief and budget > 0:
            # So far, all rows with tokens of prompts are those of brief requests.
            self._has_put_off = may_put_off and step.has_prefills
            budget = 0 if self._has_put_off else min(budget, self._most_beside)
        budget = self._add_rows(step, others, budget)
        is_late = bool(step.rows) and self._num_hashed_tokens >= MAX_ADMITTED_TOKENS
        self._num_hashed_tokens = -sys.maxsize if is_late else 0
        if not (step.lacks_room or is_late):
            self._admit(step, budget)
        return step.rows

    def _add_rows(self, step: StepPlan, requests: list[Request], budget: int) -> int:
        """Add the rows of running requests as far as a budget goes; return what is left of it."""
        for request in requests:
            if budget <= 0:
                break
            is_preempted = not request.is_running  # by an earlier one of the step
            if is_preempted or request.is_long_enough:
                continue
            if not self._extend(request, step, budget):
                continue
            num_added = step.add(request, budget)
            # A decode does not count against the budget, so that chunks beside it stay whole.
            budget -= num_added if num_added > 1 else 0
        return budget

    def make_room(self) -> bool:
        """Make room for what `schedule` has refused, while the device computes.

        Returns:
            Whether the queued request that was refused has room now.
        """
        self.cache.make_room_for_pages(self.max_num_batched_tokens // self.block_size)
        request, self._refused = self._refused, None
        if request is None:
            return False
        num_blocks, is_alone = self._num_blocks(request), not self.running
        return self.cache.make_room(request.chain, num_blocks, is_alone=is_alone)

    def prepare(self) -> None:
        """Make room for the next request, if its turn may come in the next step."""
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return
        state = (len(self.waiting), *self.cache.room_state)
        if state == self._prepared_at:
            return  # nothing has changed
        self._prepared_at = state
        left = sum(self._num_left(each) for each in self.running if each.is_prefilling)
        if left >= self.max_num_batched_tokens:
            return
        request = self.waiting.upcoming()[0]
        if self.cache.is_settled(request.chain):
            self.cache.make_room(request.chain, self._num_blocks(request))

    def predict(self, busy_s: Callable[[], float]) -> None:
        """Plan what was admitted without anything to load, so that its first token is predicted.

        This comes after the step is issued, so that it delays no request.

        Args:
            busy_s: returns for how long the device is busy with the steps that were issued.
        """
        is_unplanned, self._is_unplanned = self._is_unplanned, False
        if is_unplanned and any(request.is_prefilling for request in self.running):
            self.busy_s = busy_s()
            self._plan()

    def complete(self, scheduled: ScheduledRow) -> None:
        """Note that a row is computed, and publish the blocks that it has filled."""
        request, row = scheduled
        chain, end = request.chain, row.context_len
        self.num_computed_tokens += len(row.token_ids)
        first, last = row.start // self.block_size, end // self.block_size
        self.cache.complete(chain, first, last, has_rest=end % self.block_size > 0)
        request.num_computed_tokens = max(request.num_computed_tokens, end)
        if row.needs_logits:
            request.expect_token()

    def seal_full_blocks(self, request: Request) -> None:
        """Hash and publish the blocks that generated tokens have filled."""
        num_full = request.num_computed_tokens // self.block_size
        for block_hash in self._hash_behind(request, num_full):
            self.cache.seal(request.chain, block_hash)

    def _hash_behind(self, request: Request, num_blocks: int) -> list[BlockHash]:
        """Hash the blocks behind a request's chain until the chain has `num_blocks` blocks."""
        chain, size = request.chain, self.block_size
        num_blocks = min(num_blocks, chain.max_blocks)
        if len(chain.hashes) >= num_blocks:
            return []
        tokens = request.token_ids[len(chain.hashes) * size : num_blocks * size]
        if chain.token_ids is not None:
            chain.token_ids[len(chain.hashes) * size :] = array("I", tokens)
        parent = chain.hashes[-1] if chain.hashes else chain.root
        return chain_hashes(parent, tokens, size, algo=self.hash_algo)

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        for request in self.waiting:
            if request.is_running or request.chain.blocks:
                raise IntegrityError(f"waiting request {request.request_id} holds a block table")
            if request.num_passes > MAX_PASSES:
                what = f"waiting request {request.request_id} was passed {request.num_passes} times"
                raise IntegrityError(f"{what}, but at most {MAX_PASSES} are allowed")
        for request in self.running:
            capacity = len(request.chain.blocks) * self.block_size
            if not request.is_running or capacity < request.num_computed_tokens:
                what = f"running request {request.request_id} has more tokens"
                raise IntegrityError(f"{what} than its block table holds")
        indices = self._free_indices + [request.request_index for request in self.running]
        if sorted(indices) != list(range(self.max_num_seqs)):
            raise IntegrityError("a request index is missing or used twice")

    def _extend(self, request: Request, step: StepPlan, budget: int) -> bool:
        """Extend a request's table to its tokens; preempt other requests if no block is free.

        Args:
            request: that is running.
            step: which it shall be part of.
            budget: the most tokens that it gets.

        Returns:
            Whether it has room.
        """
        chain, num_blocks = request.chain, -(-request.num_tokens // self.block_size)
        while len(chain.blocks) < num_blocks:
            if not self._find_room(request, step, partial(self.cache.extend, chain)):
                return False
        if chain.tail is None:
            return True
        hold = partial(self.cache.hold, chain, *step.blocks_within(request, budget))
        return self._find_room(request, step, hold)

    def _find_room(
        self, request: Request, step: StepPlan, allocate: Callable[..., Admission]
    ) -> bool:
        """Preempt other requests until a request holds what it asks for; return whether it does."""
        while not (found := allocate(is_alone=len(self.running) == 1)):
            is_preempting = self._may_preempt and not found.is_coming
            victim = self._victim() if is_preempting else request
            if victim is request or step.has(victim):
                self.wants_preemption |= not (self._may_preempt or found.is_coming)
                step.lacks_room |= not found.is_kept
                return False
            self._preempt(victim)
        return True

    def _plan(self) -> None:
        """Have the cache plan what to load for the requests that have prompts to compute."""
        running = (
            RequestProgress(request.chain, request.num_computed_tokens, request.num_tokens)
            for request in sorted(self.running, key=self._rank)
            if request.is_prefilling
        )
        upcoming = self.waiting.upcoming()[:MAX_PLANNED]
        queued = (RequestProgress(each.chain, 0, each.num_tokens) for each in upcoming)
        num_read = sum(each.num_tokens for each in self.running if not each.is_prefilling)
        self.cache.plan([*running, *queued], busy_s=self.busy_s, num_read_beside=num_read)

    def _admit(
        self, step: StepPlan, budget: int, *, busy: Set[str] = frozenset(), only_brief: bool = False
    ) -> None:
        """Admit and schedule requests in order, until it is the turn of a busy tenant.

        If there are busy tenants, or only brief requests are admitted, room for one block is left
        free for each running request, since those are scheduled later.
        """
        num_admitted_tokens, is_ahead = 0, bool(busy) or only_brief
        while (
            self.waiting
            and len(self.running) < self.max_num_seqs
            and budget > 0
            and num_admitted_tokens < MAX_ADMITTED_TOKENS
        ):
            request, *others = self.waiting.upcoming()
            num_free = self.cache.num_free
            if request.asked.tenant in busy or not self.cache.is_settled(request.chain):
                break
            if self.cache.awaits(request.chain):
                break
            num_soon = len(self.running) * request.chain.pages_per_block
            if is_ahead and self._num_wanted(request) > num_free - num_soon:
                break
            if only_brief and self.waiting.num_to_compute(request) > self._most_brief:
                break
            if not (found := self._try(request)):
                if only_brief or not self.running or found.is_coming:
                    break
                passing = next((r for r in others if self._num_wanted(r) <= num_free), None)
                if passing is None or not self._try(passing):
                    break
                request = passing
            num_admitted_tokens += request.num_tokens
            self._begin(request)
            budget -= step.add(request, budget)

    def _try(self, request: Request) -> Admission:
        """Admit a request, with blocks for its next token too, if there is room."""
        chain, num_blocks, makes_room = request.chain, self._num_blocks(request), self._may_preempt
        is_alone = not self.running
        found = self.cache.admit(chain, num_blocks, is_alone=is_alone, makes_room=makes_room)
        if found.is_coming and not makes_room:
            self._refused = request
        return found

    def _begin(self, request: Request) -> None:
        """Have a request run that holds its blocks."""
        num_cached = self.block_size * request.chain.num_expected
        request.num_uncached_tokens = max(1, request.num_tokens - num_cached)
        if self._is_quick(request):
            self._quick.note_admitted(request.asked.tenant)
        self.waiting.take(request)
        request.request_index = self._free_indices.pop()
        request.admitted_at = request.admitted_at or time.monotonic()
        request.table_key = next(self._table_keys)
        self.running.append(request)
        if self.cache.is_recalling:
            self._plan()
        else:
            self._is_unplanned = True

    def _rank(self, request: Request) -> tuple[bool, float]:
        """Sort running requests in the order of service; of others the first one comes first.

        Decodes come first, so that a long prefill delays no request's next token.
        """
        is_brief = self._is_brief(request)
        return request.is_prefilling, self._num_left(request) if is_brief else math.inf

    def _is_brief(self, request: Request) -> bool:
        """Whether a running request is brief; see `BRIEF`."""
        return self._num_left(request) <= self._most_brief

    def _comes_soon(self, request: Request) -> bool:
        """Whether a running request is brief and can soon be computed; see `BESIDE_BRIEF`."""
        is_brief = request.is_prefilling and self._is_brief(request)
        return is_brief and self.cache.is_due(request.chain, SOON_S)

    def _num_left(self, request: Request) -> int:
        """Return how many tokens a running request has to compute, at most."""
        num_left = request.num_tokens - request.num_computed_tokens
        return min(request.num_uncached_tokens, num_left)

    def _is_quick(self, request: Request) -> bool:
        """Whether a request is quick; see `SHORT_STEP`."""
        return request.num_uncached_tokens <= self._short_step

    def _num_wanted(self, request: Request) -> int:
        """Return how many blocks and pages a request asks for when it is admitted, at most."""
        return self.cache.num_wanted(request.chain, self._num_blocks(request))

    def _num_blocks(self, request: Request) -> int:
        most_tokens = request.num_prompt_tokens + request.max_output_tokens - 1  # not the last
        return -(-min(request.num_tokens + 1, most_tokens) // self.block_size)

    def _victim(self) -> Request:
        """Return the newest running request of the tenant that exceeds its floor the most."""
        held, floors = Counter[bytes](), self.cache.floors
        for request in self.running:
            held[request.chain.tenant] += request.chain.num_held
        beyond = {tenant: num - floors.get(tenant, 0) for tenant, num in held.items()}
        return max(reversed(self.running), key=lambda each: beyond[each.chain.tenant])

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self._free_indices.append(request.request_index)
        request.request_index = -1

    def _preempt(self, request: Request) -> None:
        """Send a running request back to the head of its tenant's queue."""
        logger.debug("preempting %s", request.request_id)
        self.num_preemptions += 1
        assert not request.num_pending_tokens, request.request_id
        self._stop_running(request)
        chain = request.chain
        if request.usage is None:
            found = zip(chain.hashes, chain.origins(), chain.blocks, strict=False)
            request.own_hashes.update(h for h, source, b in found if source is None and b.is_ready)
        if chain.read_ends is not None:  # it may resume where it was preempted
            chain.read_ends.append(request.num_computed_tokens // self.block_size)
        self.cache.release(chain)
        num_full = request.num_tokens // self.block_size
        chain.grow(self._hash_behind(request, num_full))
        if chain.tail is not None:
            chain.tail.most_end = (request.num_tokens - 1) // self.block_size
        request.touched_at = 0.0
        request.num_computed_tokens = 0
        request.overlaps.clear()
        self.waiting.append(request)
        self.cache.arrive(chain)
