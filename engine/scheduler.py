"""Which tokens of which requests are computed in the next step.

Continuous batching with chunked prefill: every running request that can move gets tokens out of one
budget, then queued requests are admitted as `queue` says. The scheduler asks the cache for
blocks and never learns which tier they come from.

Called by the engine's thread only.
"""

import itertools
import logging
import time
from collections import Counter
from typing import NamedTuple

from tieredkv.cache.tiered import TieredCache
from tieredkv.engine.queue import MAX_PASSES, RequestQueue
from tieredkv.engine.request import Request
from tieredkv.engine.step_buffers import BatchRow
from tieredkv.errors import IntegrityError
from tieredkv.hashing import chain_hashes
from tieredkv.types import BlockHash, HashAlgo

logger = logging.getLogger(__name__)

MAX_REST = 1 / 32
"""Of a budget; so short a rest of a prompt is computed with the chunk before it, not by itself."""

CHUNK_ALIGNMENT = 512
"""Chunks that do not end a prompt end at a multiple of it: long chunks are attended in steps."""

MAX_ADMITTED_TOKENS = 32_768
"""Of prompts that begin in one step; looking up more would hold up the next tokens of others."""


def longest_chunk(budget: int) -> int:
    """Return the most tokens that one request may get of a budget, a short rest included."""
    return budget + int(budget * MAX_REST)


class ScheduledRow(NamedTuple):
    """Tokens `[start, end)` of one request, to be computed in this step."""

    request: Request
    start: int
    end: int
    row: BatchRow


class Scheduler:
    """Holds the queue and the running requests.

    Invariants (`check`): a running request has a block table that covers what it has computed; a
    waiting one has none; nobody is in both; no two share a slot; none was passed too often.
    """

    def __init__(
        self,
        cache: TieredCache,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_alone_tokens: int | None = None,
        hash_algo: HashAlgo,
    ) -> None:
        self.cache = cache
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_alone_tokens = max_num_alone_tokens or max_num_batched_tokens
        self._hash_algo = hash_algo
        self.waiting = RequestQueue()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.is_short = False
        self._free_slots = list(range(max_num_seqs))[::-1]
        self._table_keys = itertools.count(1)

    def add(self, request: Request) -> None:
        """Queue a request; its blocks are looked up, protected and prefetched from now on."""
        self.cache.arrive(request.prefix, is_next=not self.waiting)
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Take a request out, finished or cancelled, and release exactly what it holds."""
        if request.is_running:
            self._stop_running(request)
        else:
            self.waiting.remove(request)
        self.cache.release(request.prefix)

    def schedule(self, *, may_preempt: bool = True) -> list[ScheduledRow]:
        """Choose the next step's tokens; empty when every request waits for blocks or bytes.

        Args:
            may_preempt: no token is pending, so that a request may be sent back to the queue. If
                not and one would have to be, `is_short` says so until the next call.
        """
        self.is_short = False
        # Long chunks are computed a little faster; nobody waits for the end of this one.
        is_alone = len(self.running) + len(self.waiting) == 1
        budget = self._max_num_alone_tokens if is_alone else self._max_num_batched_tokens
        claimed: set[int] = set()
        scheduled: list[ScheduledRow] = []
        has_room = True
        # Decodes first: one token each, so that a long prefill holds up nobody's next token.
        for request in sorted(self.running, key=lambda r: r.is_prefilling):
            if budget <= 0:
                break
            is_preempted = not request.is_running  # by an earlier one of this loop
            if is_preempted or request.is_long_enough:
                continue
            if not self._has_room(request, scheduled, may_preempt):
                has_room = has_room and self.cache.tiers.device.num_kept > 0  # for other tenants
                continue
            row = self._next_row(request, budget, claimed)
            if row is not None:
                scheduled.append(row)
                # A decode takes nothing of the budget, which keeps the chunks beside it whole.
                budget -= row.end - row.start if row.end - row.start > 1 else 0
        if has_room:
            self._admit(budget, claimed, scheduled)
        return scheduled

    def complete(self, scheduled: ScheduledRow) -> None:
        """Take in that a row was computed: publish the full blocks that it ended."""
        request, end = scheduled.request, scheduled.end
        prefix = request.prefix
        first = scheduled.start // self._block_size
        last = min(end // self._block_size, len(prefix.hashes))
        self.cache.complete(prefix, first, last)
        request.num_computed_tokens = max(request.num_computed_tokens, end)
        if scheduled.row.needs_logits:
            request.expect_token()

    def seal_full_blocks(self, request: Request) -> None:
        """Hash and publish the blocks that generated tokens have filled."""
        num_full = request.num_computed_tokens // self._block_size
        for block_hash in self._hash_behind(request, num_full):
            self.cache.seal(request.prefix, block_hash)

    def _hash_behind(self, request: Request, num_blocks: int) -> list[BlockHash]:
        """Hash the blocks behind a request's chain, up to so many in all."""
        prefix, size = request.prefix, self._block_size
        num_blocks = min(num_blocks, prefix.max_blocks)
        if len(prefix.hashes) >= num_blocks:
            return []
        tokens = request.token_ids[len(prefix.hashes) * size : num_blocks * size]
        parent = prefix.hashes[-1] if prefix.hashes else prefix.root
        return chain_hashes(parent, tokens, size, algo=self._hash_algo)

    def check(self) -> None:
        """Raise IntegrityError if an invariant of the class docstring is broken."""
        for request in self.waiting:
            if request.is_running or request.prefix.blocks:
                raise IntegrityError(f"waiting request {request.request_id} holds a block table")
            if request.num_passes > MAX_PASSES:
                raise IntegrityError(f"waiting request {request.request_id} was passed too often")
        for request in self.running:
            capacity = len(request.prefix.blocks) * self._block_size
            if not request.is_running or capacity < request.num_computed_tokens:
                raise IntegrityError(f"running request {request.request_id} outgrew its table")
        slots = self._free_slots + [request.slot for request in self.running]
        if sorted(slots) != list(range(self._max_num_seqs)):
            raise IntegrityError("slots are lost or shared")

    def _has_room(self, request: Request, scheduled: list[ScheduledRow], may_preempt: bool) -> bool:
        """Grow a request's table to its tokens, preempting others if nothing is free."""
        num_blocks = -(-request.num_tokens // self._block_size)
        while len(request.prefix.blocks) < num_blocks:
            if self.cache.extend(request.prefix):
                continue
            if self.cache.is_room_coming(request.prefix):
                return False
            if self._unprotect_queued():  # what is queued comes after what runs
                continue
            if len(self.running) == 1 and self.cache.extend(request.prefix, is_alone=True):
                continue
            if not may_preempt:
                self.is_short = True
                return False
            in_step = {id(row.request) for row in scheduled}
            victim = self._victim()
            if victim is request or id(victim) in in_step:
                return False
            self._preempt(victim)
        return True

    def _next_row(self, request: Request, budget: int, claimed: set[int]) -> ScheduledRow | None:
        """Return the next stretch of tokens that is neither ready, on its way, nor claimed."""
        size, prefix = self._block_size, request.prefix
        num_chain = len(prefix.hashes)
        start = request.num_computed_tokens
        while start // size < num_chain and prefix.blocks[start // size].is_ready:
            start = (start // size + 1) * size
        request.num_computed_tokens = start
        write_from = start
        if start >= request.num_tokens:  # wholly cached: only the last token's logits are missing
            write_from = request.num_tokens
            start = request.num_tokens - 1
        end = start + longest_chunk(budget)
        end = request.num_tokens if request.num_tokens <= end else start + budget
        if end < request.num_tokens and end // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT > start:
            end = end // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
        for index in range(start // size, min(-(-end // size), num_chain)):
            block = prefix.blocks[index]
            if write_from > start:
                break
            if block.is_ready or block.block_id in claimed or self.cache.is_loading(block):
                end = min(end, index * size)
                break
        if end <= start:
            return None
        for index in range(start // size, min(-(-end // size), num_chain)):
            claimed.add(prefix.blocks[index].block_id)
        row = BatchRow(
            token_ids=request.token_ids[start:end],
            start=start,
            block_table=prefix.block_ids,
            write_from=write_from,
            needs_logits=end == request.num_tokens,
            slot=request.slot,
            table_key=request.table_key,
        )
        return ScheduledRow(request, start, end, row)

    def _admit(self, budget: int, claimed: set[int], scheduled: list[ScheduledRow]) -> None:
        num_admitted_tokens = 0
        while self.waiting and len(self.running) < self._max_num_seqs and budget > 0:
            if num_admitted_tokens >= MAX_ADMITTED_TOKENS:
                break
            request, *others = self.waiting.upcoming()
            if not self.cache.is_settled(request.prefix):
                break
            if not self._try(request):
                self.cache.protect(request.prefix)
                if self.cache.is_room_coming(request.prefix):
                    break
                num_free = self.cache.tiers.device.num_free + self.cache.num_held_blocks
                may_pass = others if self.running else [request]
                passing = next((r for r in may_pass if self._num_blocks(r) <= num_free), None)
                if passing is None or not self._try_hard(passing):
                    break
                request = passing
            num_admitted_tokens += request.num_tokens
            self.waiting.take(request)
            request.slot = self._free_slots.pop()
            request.admitted_at = request.admitted_at or time.monotonic()
            request.table_key = next(self._table_keys)
            self.running.append(request)
            row = self._next_row(request, budget, claimed)
            if row is not None:
                scheduled.append(row)
                budget -= row.end - row.start
        if num_admitted_tokens:
            for request in self.waiting.upcoming():
                self.cache.protect(request.prefix)

    def _try(self, request: Request, *, is_alone: bool = False) -> bool:
        """Give a request its blocks, with room for the next token, if they are there."""
        return self.cache.admit(request.prefix, self._num_blocks(request), is_alone=is_alone)

    def _try_hard(self, request: Request) -> bool:
        """Take what is held for others in the queue, too; if nobody runs, even of their floors."""
        if self._try(request):
            return True
        self._unprotect_queued()
        return self._try(request, is_alone=not self.running)

    def _num_blocks(self, request: Request) -> int:
        return request.num_tokens // self._block_size + 1

    def _victim(self) -> Request:
        """Return the newest running request of the tenant that holds most beyond its floor."""
        held: Counter[bytes] = Counter()
        held.subtract(self.cache.tiers.device.floors)
        for request in self.running:
            held[request.prefix.tenant] += len(request.prefix.blocks)
        return max(reversed(self.running), key=lambda each: held[each.prefix.tenant])

    def _unprotect_queued(self) -> bool:
        """Let go of what is held for queued requests, so that one before them can go on.

        Returns:
            Whether anything was held.
        """
        if not self.cache.num_held_blocks:
            return False
        protected = [request.prefix for request in self.waiting if request.prefix.is_protected]
        for prefix in protected:
            self.cache.unprotect(prefix)
        return bool(protected)

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self._free_slots.append(request.slot)
        request.slot = -1

    def _preempt(self, request: Request) -> None:
        """Send a running request back to its tenant's head; its full blocks stay cached."""
        logger.debug("preempting %s", request.request_id)
        self.num_preemptions += 1
        assert not request.num_pending_tokens, request.request_id
        self._stop_running(request)
        prefix = request.prefix
        if request.usage is None:
            found = zip(prefix.hashes, prefix.sources, prefix.blocks, strict=False)
            request.own_hashes.update(h for h, source, b in found if source is None and b.is_ready)
        if prefix.read_ends is not None:  # what it has computed itself is no hit
            prefix.read_ends.append(request.num_computed_tokens // self._block_size)
        self.cache.release(prefix)
        prefix.asked.clear()
        prefix.records.clear()
        num_full = request.num_tokens // self._block_size
        prefix.hashes.extend(self._hash_behind(request, num_full))
        request.touched_at = 0.0
        request.num_computed_tokens = 0
        self.waiting.append(request)
        self.cache.arrive(prefix, is_next=True)
