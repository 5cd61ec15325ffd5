"""A step's rows and results, and its inputs: at fixed places, copied to the device in one piece.

CUDA graphs need every address to stay the same, so a step's arrays are written into one pinned
buffer and copied into one on the device, whatever the step. It knows rows of tokens and blocks; it
knows no model and no requests.
"""

import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tieredkv.engine.attention import AttentionKind, StepStates
from tieredkv.kernels import launch, partition, small_copies, state_plan
from tieredkv.kernels.partition import Batch, Span
from tieredkv.kernels.state_layout import StateSpan
from tieredkv.kernels.state_plan import PlanSize
from tieredkv.steps import pairs
from tieredkv.types import MAX_KEPT_WITHIN


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request's share of a step.

    Attributes:
        token_ids: the tokens of positions [start, start + len). A negative one is
            `pending(request_index)`: the token that the step before sampled for that request.
        start: position of the first of them; everything before it is in the cache.
        block_table: ids of the blocks that hold positions from 0 on, as far as the last token or
            further; `array("i")` is read fastest.
        tail_tables: the same for each further kind of page, of which only the cells of what the
            tokens attend to are read. A row without them writes nothing there.
        write_from: keys and values of positions below it are in `block_table` already and are not
            written there.
        needs_logits: give logits of the last token, and the token that they make most likely.
        all_logits: give logits of every token.
        request_index: place of the request among those that run, below `max_num_seqs`; None takes
            the row's index in the batch.
        state_pages: ids of the pages in which the request has its recurrent state, which the row
            changes; without them it is that of the first pages of the pool.
        copies: ids of pages that are copied before the step, from and to; a negative one stands for
            a page of zeros.
        kept: at most `MAX_KEPT_WITHIN` numbers of these tokens, ascending, neither none nor all of
            them, each with the ids of further pages to which the state behind so many is written.
        table_key: who the block table belongs to. While the key of a request index stays the same,
            cells that a row has covered change no more. With None, every cell may have changed.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    tail_tables: Sequence[Sequence[int]] = ()
    write_from: int = 0
    needs_logits: bool = True
    all_logits: bool = False
    request_index: int | None = None
    table_key: int | None = None
    state_pages: Sequence[int] = ()
    copies: Sequence[tuple[int, int]] = ()
    kept: Sequence[tuple[int, Sequence[int]]] = ()

    @property
    def context_len(self) -> int:
        """Tokens that the last of the row's tokens sees, itself included."""
        return self.start + len(self.token_ids)


def pending(request_index: int) -> int:
    """Return the token id that stands for what the step before sampled for a request index."""
    return -1 - request_index


def idle_row(num_tokens: int, start: int) -> BatchRow:
    """Return a row that computes `num_tokens` tokens from position `start` on, and writes nothing.

    It reads block 0 only. Its table is long enough for blocks of any size.
    """
    end = start + num_tokens
    return BatchRow([0] * num_tokens, start, array("i", bytes(4 * end)), write_from=end)


class StepOutput(NamedTuple):
    """The results of a step, in the order of its rows; valid until the next step is issued.

    Attributes:
        logits: [num_logits, vocab_size] float32 on the device: one for a row with `needs_logits`,
            one per token for a row with `all_logits`, none for others.
        tokens: [num_logits] int64 on the device, the most likely token of each.
        targets: [num_logits] int64 on the device, the request indices that the tokens go to.
    """

    logits: Tensor
    tokens: Tensor
    targets: Tensor


class BlockTables:
    """The block tables of all running requests, on the device and pinned on the host.

    Attributes:
        tensor: [num_page_kinds, num_requests + 2, max_blocks] int32 on the device.
        states: [(1 + MAX_KEPT_WITHIN) * num_requests, num_state_pages] int32 on the device, where
            recurrent states are; see `kept_row`.
        fresh_row: see `copy_fresh`.
        copied: the device has read what was pinned for the last step, the tables' own changes and
            the step's buffers; None off CUDA.
    """

    def __init__(
        self,
        num_requests: int,
        max_context_len: int,
        block_size: int,
        device: torch.device,
        num_page_kinds: int = 1,
        num_state_pages: int = 0,
    ) -> None:
        self.num_requests, self.block_size = num_requests, block_size
        self.max_blocks = max_blocks = -(-max_context_len // block_size)
        shape = num_page_kinds, num_requests + 2, max_blocks
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._mirror = self._host.numpy()
        self._keys: list[int | None] = [None] * num_requests
        self._num_known = [0] * num_requests
        # Two more rows: the first cell of one takes the writes of a step's padding, and the other
        # one is read by captured steps that know where their only request's table lies.
        self.tensor = torch.zeros(shape, dtype=torch.int32, device=device)
        self.states = torch.arange(num_state_pages, dtype=torch.int32, device=device)
        self.states = self.states.repeat((1 + MAX_KEPT_WITHIN) * num_requests, 1)
        self.spare_cell, self.fresh_row = num_requests * max_blocks, num_requests + 1
        self.copied = torch.cuda.Event() if device.type == "cuda" else None

    def update(self, rows: Sequence[BatchRow]) -> tuple[list[int], list[int]]:
        """Wait for the upload of the step before, then bring the tables up to date.

        Long changes are copied at once. Short changes, such as those of one more token, are left to
        the step itself.

        Returns:
            Flat indices of the cells that the step must write, and their block ids.
        """
        if self.copied is not None:
            self.copied.synchronize()
        cells: list[int] = []
        block_ids: list[int] = []
        block_size = self.block_size
        for index, row in enumerate(rows):
            owner = index if row.request_index is None else row.request_index
            end, first = -(-row.context_len // block_size), 0
            if row.table_key is not None and self._keys[owner] == row.table_key:
                # Between two rows of a request may lie blocks that were loaded, not computed.
                first = min(row.start // block_size, self._num_known[owner])
            elif row.state_pages:
                self._upload_states(owner, row.state_pages)
            for number, (_, pages) in enumerate(row.kept):
                self._upload_states(kept_row(owner, number, self.num_requests), pages)
            self._keys[owner], self._num_known[owner] = row.table_key, end
            for kind, table in enumerate((row.block_table, *row.tail_tables)):
                assert len(table) >= end, f"{len(table)} blocks for {row.context_len} tokens"
                if end - first == 1:
                    cells.append((kind * len(self._host[0]) + owner) * self.max_blocks + first)
                    block_ids.append(table[first])
                    continue
                self._mirror[kind, owner, first:end] = table[first:end]
                part = self._host[kind, owner, first:end], self.tensor[kind, owner, first:end]
                small_copies.copy(*part)
        return cells, block_ids

    def _upload_states(self, row: int, pages: Sequence[int]) -> None:
        self.states[row].copy_(torch.tensor(pages, dtype=torch.int32), non_blocking=True)

    def copy_fresh(self, span: Span) -> None:
        """Copy the table of a step's only request to `fresh_row`; `update` has left no cell out."""
        num_blocks = -(-span.context_len // self.block_size)
        for tables in self.tensor:
            small_copies.copy(tables[span.row, :num_blocks], tables[self.fresh_row, :num_blocks])


def kept_row(owner: int, number: int, num_requests: int) -> int:
    """Return in which row of the tables the pages are where a step keeps a request's state.

    Args:
        owner: index of the request.
        number: of the place within the step's tokens.
        num_requests: the most that run; the first rows are those of their states themselves.
    """
    return (1 + number) * num_requests + owner


class Plans(NamedTuple):
    """Partitions of attention's work for layers of one kind, int32; see `Batch`.

    Attributes:
        last: partition of the tokens whose logits are wanted.
    """

    narrow: Tensor
    wide: Tensor
    last: Tensor


NO_STATES = PlanSize(0)
"""That of a step that changes no recurrent states."""


class StepBuffers:
    """The inputs of a step with at most `max_tokens` tokens and one row per block table.

    The device side keeps its addresses for good, and the stream's order protects it. The pinned
    side is protected from the next step, which updates the block tables first.

    Attributes:
        kinds, tables, max_tokens: as given.
        token_ids, positions: [max_tokens] int32.
        slots: [num_page_kinds, max_tokens] int32; slot -1 is not written.
        sources: [max_tokens] int64; request index whose last sampled token a negative id means.
        kept: [max_tokens] int64, indices of the tokens whose logits are wanted.
        targets: [max_tokens] int64, request indices whose next token these logits give.
        cells, block_ids: [num_page_kinds * max_rows] int64 and int32, changes of the block tables.
        plans: for each kind of layer.
    """

    def __init__(
        self,
        kinds: Sequence[AttentionKind],
        tables: BlockTables,
        *,
        max_tokens: int,
        vocab_size: int,
    ) -> None:
        self.kinds, self.tables = kinds, tables
        self.max_tokens, self._vocab_size = max_tokens, vocab_size
        max_rows = self._spare_index = tables.num_requests
        parts = dict.fromkeys(("sources", "kept", "targets"), (torch.int64, max_tokens))
        num_page_kinds = len(tables.tensor)
        most_states = PlanSize.largest(max_tokens, max_rows).num_ints
        parts["states"] = torch.int32, most_states if self.is_recurrent else 0
        parts["cells"] = torch.int64, max_rows * num_page_kinds
        parts |= dict.fromkeys(("token_ids", "positions"), (torch.int32, max_tokens))
        parts["slots"] = torch.int32, max_tokens * num_page_kinds
        parts["block_ids"] = torch.int32, max_rows * num_page_kinds
        for index, (heads, _, _) in enumerate(kinds):
            narrow, wide = partition.narrow_tiling(heads), partition.wide_tiling(heads)
            max_wide_tiles = max_tokens // wide.num_queries + max_rows
            num_ints = partition.size_ints(narrow, max_rows)
            parts |= dict.fromkeys((f"narrow {index}", f"last {index}"), (torch.int32, num_ints))
            parts[f"wide {index}"] = torch.int32, partition.size_ints(wide, max_wide_tiles)
        # In words of four bytes; every part begins at a multiple of 16 bytes.
        words = [-(-dtype.itemsize * n // 16) * 4 for dtype, n in parts.values()]
        target = self._target = tables.tensor.device
        is_cuda = target.type == "cuda"
        self._host = torch.zeros(sum(words), dtype=torch.int32, pin_memory=is_cuda)
        self._device = torch.zeros(sum(words), dtype=torch.int32, device=target)

        def views(buffer: Tensor) -> dict[str, Tensor]:
            pieces = zip(parts.items(), buffer.split(words), strict=True)
            return {name: piece.view(dtype)[:n] for (name, (dtype, n)), piece in pieces}

        self._arrays = {name: view.numpy() for name, view in views(self._host).items()}
        self._arrays["slots"] = self._arrays["slots"].reshape(num_page_kinds, max_tokens)
        device = views(self._device)
        self.token_ids, self.positions = device["token_ids"], device["positions"]
        self.slots = device["slots"].view(num_page_kinds, max_tokens)
        self.sources = device["sources"]
        self.kept, self.targets = device["kept"], device["targets"]
        self.cells, self.block_ids = device["cells"], device["block_ids"]
        self._states = device["states"]
        self.plans = [
            Plans(*(device[f"{name} {index}"] for name in Plans._fields))
            for index in range(len(kinds))
        ]

    def smaller(self, max_tokens: int) -> "StepBuffers":
        """Make buffers for shorter steps over the same tables: less is copied for each step."""
        max_tokens = min(max_tokens, self.max_tokens)
        return StepBuffers(
            self.kinds, self.tables, max_tokens=max_tokens, vocab_size=self._vocab_size
        )

    def fill_padding(self, num_tokens: int, num_kept: int, states: PlanSize = NO_STATES) -> None:
        """Write a step that has nothing but padding, after all steps before have been computed."""
        if self._target.type == "cuda":
            torch.cuda.current_stream(self._target).synchronize()
        idle = Layout([], self.kinds, self._spare_index)
        self.fill([], idle, ([], []), num_tokens=num_tokens, num_kept=num_kept, states=states)

    def fill(
        self,
        rows: Sequence[BatchRow],
        layout: "Layout",
        changes: tuple[list[int], list[int]],
        *,
        num_tokens: int,
        num_kept: int,
        states: PlanSize = NO_STATES,
    ) -> None:
        """Write a step and start its copy; the padding up to the given sizes has no effect."""
        arrays = self._arrays
        self._fill_tokens(rows, layout)
        end = layout.num_tokens
        token_ids = arrays["token_ids"]
        if end:
            assert -self._spare_index <= token_ids[:end].min(), "no such request index"
            assert token_ids[:end].max() < self._vocab_size, "unknown token ids"
        token_ids[end:num_tokens] = 0
        arrays["positions"][end:num_tokens] = 0
        arrays["slots"][:, end:num_tokens] = -1
        np.maximum(-1 - token_ids[:num_tokens], 0, out=arrays["sources"][:num_tokens])
        num_real = len(layout.kept)
        arrays["kept"][:num_real] = layout.kept
        arrays["kept"][num_real:num_kept] = 0
        arrays["targets"][:num_real] = layout.targets
        arrays["targets"][num_real:num_kept] = self._spare_index
        cells, block_ids = changes
        arrays["cells"][: len(cells)] = cells
        arrays["cells"][len(cells) :] = self.tables.spare_cell
        arrays["block_ids"][: len(cells)] = block_ids
        if self.is_recurrent:
            state_plan.fill(arrays["states"], layout.state_spans, states)
        if self.tables.copied is not None:
            for index, (heads, window, _) in enumerate(self.kinds):
                shares = layout.shares[index]
                narrow, wide = partition.narrow_tiling(heads), partition.wide_tiling(heads)
                partition.partition(shares.narrow, narrow, arrays[f"narrow {index}"], window)
                partition.partition(shares.wide, wide, arrays[f"wide {index}"], window)
                # A captured step with chunks may read it even if it is empty.
                if layout.last or not rows or end > len(rows):
                    partition.partition(layout.last, narrow, arrays[f"last {index}"], window)
        small_copies.copy(self._host, self._device)
        if self.tables.copied is not None:
            self.tables.copied.record()

    @property
    def is_recurrent(self) -> bool:
        """Whether steps change recurrent states."""
        return self.tables.states.numel() > 0

    def states(self, size: PlanSize, spans: Sequence[StateSpan] = ()) -> StepStates | None:
        """Return whose recurrent states a step changes that is written, if the model has any.

        Args:
            size: of the plan of its rows.
            spans: the rows; none for any that are written before a captured step is replayed.
        """
        if not self.is_recurrent:
            return None
        return StepStates(self.tables.states, state_plan.view(self._states, size, spans))

    def batches(self, layout: "Layout") -> tuple[list[Batch], list[Batch] | None]:
        """Return what attention needs for a step that was written, for each kind of layer.

        Returns:
            For all tokens, and for the last layer's, None if that needs all as well.
        """
        tables = self.tables.tensor
        batches = [
            Batch(
                tables[kind.page],
                layout.spans,
                shares.dense,
                plans.narrow if shares.narrow else None,
                plans.wide if shares.wide else None,
                shares.products,
            )
            for kind, shares, plans in zip(self.kinds, layout.shares, self.plans, strict=True)
        ]
        if not layout.last:
            return batches, None
        return batches, [
            Batch(tables[kind.page], layout.last, narrow=plans.last)
            for kind, plans in zip(self.kinds, self.plans, strict=True)
        ]

    def _fill_tokens(self, rows: Sequence[BatchRow], layout: "Layout") -> None:
        arrays, end, block_size = self._arrays, layout.num_tokens, self.tables.block_size
        token_ids, positions, slots = (arrays[n] for n in ("token_ids", "positions", "slots"))
        if end == len(rows):  # one token each: without numpy's overhead for every row
            token_ids[:end] = [row.token_ids[0] for row in rows]
            starts = [row.start for row in rows]
            positions[:end] = starts
            slots[0, :end] = [
                row.block_table[start // block_size] if row.write_from <= start else -1
                for row, start in zip(rows, starts, strict=True)
            ]
            for kind in range(1, len(slots)):
                slots[kind, :end] = [
                    row.tail_tables[kind - 1][start // block_size] if row.tail_tables else -1
                    for row, start in zip(rows, starts, strict=True)
                ]
            at = slots[:, :end] * block_size + positions[:end] % block_size
            slots[:, :end] = np.where(slots[:, :end] < 0, -1, at)
            return
        for row, span in zip(rows, layout.spans, strict=True):
            at = slice(span.first_token, span.first_token + span.query_len)
            position = np.arange(row.start, row.context_len, dtype=np.int32)
            index, offset = position // block_size, position % block_size
            token_ids[at] = row.token_ids
            positions[at] = position
            slots[:, at] = -1
            for kind, block_table in enumerate((row.block_table, *row.tail_tables)):
                table = np.asarray(block_table, dtype=np.int32)
                slots[kind, at] = table[index] * block_size + offset
            slots[0, at] = np.where(position < row.write_from, -1, slots[0, at])


class Layout:
    """Where the rows of a step lie among its tokens, and which logits they want.

    Attributes:
        spans: the spans of the rows, in their order.
        kept: indices of the tokens whose logits are wanted, rows in order.
        targets: the request index of each kept token.
        shares: for each kind of layer the spans by the kernel that computes them.
        has_chunks: whether some row has more than one token.
        is_fresh: whether the step has one row only, which begins a prompt and is attended densely.
        last: the kept tokens as spans of their own, for the last layer, where they need no others'
            queries; empty where that spares nothing.
    """

    def __init__(
        self, rows: Sequence[BatchRow], kinds: Sequence[AttentionKind], spare_index: int
    ) -> None:
        self.spans: list[Span] = []
        self.kept: list[int] = []
        self.targets: list[int] = []
        self.last: list[Span] = []
        end = 0
        for index, row in enumerate(rows):
            length = len(row.token_ids)
            assert length > 0, "a row without tokens"
            owner = index if row.request_index is None else row.request_index
            self.spans.append(Span(owner, end, length, row.start + length))
            end += length
            if row.all_logits:
                self.kept.extend(range(end - length, end))
                self.targets.extend([spare_index] * length)
            elif row.needs_logits:
                self.last.append(Span(owner, len(self.kept), 1, row.start + length))
                self.kept.append(end - 1)
                self.targets.append(owner)
        if len(self.last) in (0, end) or len(self.last) < len(self.kept):
            self.last = []
        self.num_tokens, self._kinds = end, kinds
        self._rows, self._num_requests = rows, spare_index
        self.shares = self._share_out(may_be_dense=True, may_be_products=True)
        self.has_chunks = end > len(self.spans)
        is_alone = len(self.spans) == 1 and any(shares.dense for shares in self.shares)
        self.is_fresh = bool(is_alone and self.spans[0].context_len == end)

    @property
    def num_pairs(self) -> float:
        """About how many pairs there are of a token and a token that it attends to."""
        return sum(pairs(n - length, n) for _, _, length, n in self.spans)

    @functools.cached_property
    def state_spans(self) -> list[StateSpan]:
        """The tokens that change each request's recurrent state."""
        spans = list[StateSpan]()
        for row, (owner, first_token, length, _) in zip(self._rows, self.spans, strict=True):
            places = enumerate(num_tokens for num_tokens, _ in row.kept)
            kept = tuple((at, kept_row(owner, n, self._num_requests)) for n, at in places)
            spans.append(StateSpan(owner, first_token, length, kept))
        return spans

    @property
    def has_products(self) -> bool:
        """Whether some span is attended as two products."""
        return any(shares.products for shares in self.shares)

    def fit_graph(self, *, is_fresh: bool) -> None:
        """Have the paged kernel attend all spans, but for the dense part of a fresh step."""
        others = (shares.products or (shares.dense and not is_fresh) for shares in self.shares)
        if any(others):
            self.shares = self._share_out(may_be_dense=is_fresh, may_be_products=False)

    def _share_out(self, *, may_be_dense: bool, may_be_products: bool) -> list[launch.Shares]:
        ways = {"may_be_dense": may_be_dense, "may_be_products": may_be_products}
        return [
            launch.share_out(self.spans, heads, **ways, window=window)
            for heads, window, _ in self._kinds
        ]
