"""The rows of the next step, and which blocks they compute.

A block is computed by one row of a step. Rows end where blocks are ready, on their way, or left to
the links.

Called by the engine's thread only.
"""

from typing import NamedTuple

from tieredkv.cache.chain import Chain
from tieredkv.cache.requests import TieredCache
from tieredkv.cache.tail import Tail
from tieredkv.engine.request import Request
from tieredkv.engine.step_buffers import BatchRow

MAX_REST = 1 / 32
"""Fraction of a budget: a rest of a prompt up to this size is computed with the last chunk."""

CHUNK_ALIGNMENT = 512
"""Chunks that do not end a prompt end at a multiple of it: long chunks are attended in steps."""


def longest_chunk(budget: int) -> int:
    """Return the most tokens that one request may get of a budget, including a short rest."""
    return budget + int(budget * MAX_REST)


MAX_SCORED_TOKENS = 256
"""The most tokens of a scored prompt in one step: each has logits for the whole vocabulary."""


class ScheduledRow(NamedTuple):
    """A row of the step, and the request whose tokens it computes."""

    request: Request
    row: BatchRow


class StepPlan:
    """What the next step computes; rows are added one after another.

    Args:
        cache: the cache.
        block_size: tokens a block.

    Attributes:
        rows: of the step.
        lacks_room: whether a running request has no room that no floor keeps from it.
    """

    def __init__(self, cache: TieredCache, block_size: int) -> None:
        self._cache, self._block_size = cache, block_size
        self.rows: list[ScheduledRow] = []
        self.lacks_room = False
        self._claimed: set[int] = set()  # ids of blocks that rows compute
        self._is_scored = False  # whether it has its one row whose tokens all have logits

    @property
    def has_prefills(self) -> bool:
        """Whether a row has tokens of a prompt."""
        return any(request.is_prefilling for request, _ in self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(row.token_ids) for _, row in self.rows)

    def has(self, request: Request) -> bool:
        """Return whether a request has a row."""
        return any(each is request for each, _ in self.rows)

    def add(self, request: Request, budget: int) -> int:
        """Add the next stretch of tokens that is neither ready, on its way, nor claimed.

        Returns:
            How many tokens these are; 0 if there are none.
        """
        chain = request.chain
        if chain.tail is not None:
            return self._add_with_tail(request, chain.tail, budget)
        write_from = start = self._skip_ready(request)
        if start >= request.num_tokens:  # wholly cached, but for the last token's logits
            write_from = request.num_tokens
            start = request.num_tokens - 1
        end = self._end_within(request, start, budget)
        if write_from == start:
            end = self._end_before_others(chain, start, end)
        if end <= start:
            return 0
        return self._add_row(request, start, end, write_from)

    def _add_with_tail(self, request: Request, tail: Tail, budget: int) -> int:
        """Do as `add` does for a model that has layers with windows, or recurrent ones.

        No token can be left out for which its neighbours' windows or states are computed. Where
        blocks are ready, only the pages of these layers are written.
        """
        chain, size, start = request.chain, self._block_size, request.num_computed_tokens
        first = self._cache.next_start(chain, start // size)
        if first * size > start:
            if num_overlapping := start % size:
                request.overlaps[start // size] = num_overlapping
            request.num_computed_tokens = start = first * size
        end = self._end_within(request, start, budget)
        if (most := self._cache.compute_end(chain, first)) is not None:
            end = min(end, most * size)
        end = tail.step_end(start, end, is_last=end == request.num_tokens)
        write_from, blocks = start, chain.blocks[: len(chain.hashes)]
        is_ready = [block.is_ready for block in blocks[first : -(-end // size)]]
        if end > start and is_ready[:1] == [True]:
            num_ready = is_ready.index(False) if False in is_ready else len(is_ready)
            write_from = end = min(end, (first + num_ready) * size)
            for index in range(first, first + num_ready):
                request.overlaps[index] = min(end, (index + 1) * size) - max(start, index * size)
        else:
            end = self._end_before_others(chain, start, end)
        if end <= start or not self._cache.hold(chain, start // size, -(-end // size)):
            return 0
        return self._add_row(request, start, end, write_from)

    def blocks_within(self, request: Request, budget: int) -> tuple[int, int]:
        """Return the range of the blocks of which a request computes tokens with such a budget."""
        start, size = request.num_computed_tokens, self._block_size
        end = min(request.num_tokens, start + longest_chunk(max(budget, 1)))
        return start // size, -(-end // size)

    def _add_row(self, request: Request, start: int, end: int, write_from: int) -> int:
        chain = request.chain
        if write_from == start:
            first, last = start // self._block_size, self._last_block(chain, end)
            self._claimed.update(block.block_id for block in chain.blocks[first:last])
            self._cache.begin_compute(chain, first, last)
        tail = chain.tail
        state = self._cache.take_state(chain, start, end)
        row = BatchRow(
            token_ids=request.token_ids[start:end],
            start=start,
            block_table=chain.block_ids,
            tail_tables=tail.tables if tail is not None else (),
            write_from=write_from,
            needs_logits=end == request.num_tokens,
            all_logits=request.num_unscored_tokens > 0,
            request_index=request.request_index,
            table_key=request.table_key,
            state_pages=state.pages,
            copies=state.copies,
            kept=state.kept,
        )
        self.rows.append(ScheduledRow(request, row))
        return end - start

    def _skip_ready(self, request: Request) -> int:
        """Count ready blocks as computed; return the first token behind them."""
        size, blocks, start = self._block_size, request.chain.blocks, request.num_computed_tokens
        num_chain = len(request.chain.hashes)
        while start // size < num_chain and blocks[start // size].is_ready:
            if num_overlapping := start % size:
                request.overlaps[start // size] = num_overlapping
            start = (start // size + 1) * size
        request.num_computed_tokens = start
        return start

    def _end_within(self, request: Request, start: int, budget: int) -> int:
        """Return where a stretch ends that begins at `start`, by the budget alone."""
        end = request.num_tokens
        if end > start + longest_chunk(budget):
            end = start + budget
            aligned = end // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
            end = aligned if aligned > start else end
        if request.num_unscored_tokens > 0:
            most = 0 if self._is_scored else min(MAX_SCORED_TOKENS, request.num_unscored_tokens)
            end = min(end, start + most)
            self._is_scored = True
        return end

    def _end_before_others(self, chain: Chain, start: int, end: int) -> int:
        """Return where it ends so that nobody else fills, or has filled, a block of it."""
        size, last = self._block_size, self._last_block(chain, end)
        first_loaded = self._cache.first_loaded(chain, start // size, last)
        for index in range(start // size, first_loaded):
            block = chain.blocks[index]
            if block.is_ready or block.is_copying or block.block_id in self._claimed:
                return index * size
        return end if first_loaded == last else first_loaded * size

    def _last_block(self, chain: Chain, end: int) -> int:
        """Return the index behind the last block of the chain that has tokens before `end`."""
        return min(-(-end // self._block_size), len(chain.hashes))
