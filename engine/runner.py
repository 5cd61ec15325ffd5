"""Computes a step: takes token ids and block tables, returns logits and the most likely tokens.

It knows neither requests nor sampling, and it knows blocks only by their ids.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tieredkv.engine.attention import CONTEXT_ARGUMENT, AttentionContext, StepMetadata
from tieredkv.engine.graphs import MIXED_SIZES, Graphs, find_graph, mixed_size
from tieredkv.engine.loader import LoadedModel
from tieredkv.engine.step_buffers import BatchRow, BlockTables, Layout, StepBuffers, StepOutput
from tieredkv.kernels import states
from tieredkv.kernels.state_plan import PlanSize
from tieredkv.types import KVSpec

SIZES_PER_OCTAVE = 128
"""Sizes between a number of tokens and its double to which steps that no graph holds are padded."""


class StepLimits(NamedTuple):
    """What the largest step may hold.

    Attributes:
        max_num_seqs: rows; request indices are below it.
        max_num_batched_tokens: tokens, single ones of running requests apart.
        max_context_len: tokens of the longest context.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_context_len: int


def make_kv_pool(kv_spec: KVSpec, num_blocks: int, device: torch.device) -> Tensor:
    """Allocate a device pool, `[num_blocks, elements of a page]`; see `KVSpec`.

    On the CPU it is zeroed, which also makes the operating system hand out its pages.
    """
    make = torch.zeros if device.type == "cpu" else torch.empty
    num_elements = kv_spec.token_elements * kv_spec.block_size
    return make(num_blocks, num_elements, dtype=getattr(torch, kv_spec.dtype), device=device)


class ModelRunner:
    """Forward passes of one model over one pool; one thread calls it.

    The pool belongs to the caller. Steps are issued in order on the current stream, and nothing
    waits for the device, except for the upload of the step before.

    Args:
        loaded: the model.
        kv_pool: see `make_kv_pool`.
        kv_spec: how keys and values lie in pages.
        limits: of steps.

    Attributes:
        loaded, limits: as given.
        buffers: the inputs of steps whose kernels are launched one by one.
        graphs: of the steps that are replayed instead; `profile.warm_up` captures them.
    """

    def __init__(
        self, loaded: LoadedModel, kv_pool: Tensor, kv_spec: KVSpec, limits: StepLimits
    ) -> None:
        self.loaded, self.limits = loaded, limits
        self.graphs: Graphs = {}
        context = self._context = AttentionContext(kv_pool, kv_spec, loaded.layers)
        max_num_seqs, max_num_batched_tokens, max_context_len = limits
        sizes = max_num_seqs, max_context_len, kv_spec.block_size
        tables = BlockTables(
            *sizes, loaded.device, len(kv_spec.page_kinds), num_state_pages=kv_spec.state_pages
        )
        self._pages = kv_pool.view(torch.uint8)
        max_tokens = launched_size(max_num_batched_tokens + max_num_seqs)
        self.buffers = StepBuffers(
            context.kinds, tables, max_tokens=max_tokens, vocab_size=loaded.vocab_size
        )
        self._sampled = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=loaded.device)

    @torch.inference_mode()
    def execute(
        self, rows: Sequence[BatchRow], late_event: torch.cuda.Event | None = None
    ) -> StepOutput:
        """Compute the rows' tokens, write their keys and values, and give the logits asked for.

        The most likely tokens are also kept on the device, where the next step may take them from
        before the host has seen them (`pending`).

        Args:
            rows: at least one, each with at least one token; they may come in any order and mix.
            late_event: the layers from `late_layer` on wait for it; what they attend to may still
                be on its way.
        """
        if late_event is not None:
            self._context.hold_late_layers(late_event)
        buffers = self.buffers
        layout = Layout(rows, buffers.kinds, self.limits.max_num_seqs)
        if copies := [pair for row in rows for pair in row.copies]:
            # From pinned memory, since a copy from any other would wait for the steps before.
            pages = torch.tensor(copies, dtype=torch.int32, pin_memory=self._pages.is_cuda)
            pages = pages.to(self._pages.device, non_blocking=True)
            states.copy_pages(self._pages, *pages.T.contiguous())
        changes = buffers.tables.update(rows)
        graph = find_graph(self.graphs, layout)
        if graph is not None:
            return graph.replay(rows, layout, changes)
        num_tokens, num_kept = launched_size(layout.num_tokens), len(layout.kept)
        if layout.has_products and mixed_size(num_tokens) <= buffers.max_tokens:
            # Kernels of those sizes were loaded when the graphs were captured; see `load_kernels`.
            num_tokens = mixed_size(num_tokens) or num_tokens
        spans = layout.state_spans if buffers.is_recurrent else []
        size = PlanSize.of_step(spans)
        buffers.fill(rows, layout, changes, num_tokens=num_tokens, num_kept=num_kept, states=size)
        step = StepMetadata(
            buffers.slots[:, :num_tokens],
            *buffers.batches(layout),
            states=buffers.states(size, spans),
        )
        return self.launch(self.loaded, buffers, step, num_kept)

    def launch(
        self, loaded: LoadedModel, buffers: StepBuffers, step: StepMetadata, num_kept: int
    ) -> StepOutput:
        """Launch the kernels of a step; the stream may be capturing them.

        Args:
            loaded: the runner's model, or its first layers.
            buffers: what the step reads.
            step: its tokens' slots and spans.
            num_kept: how many of its tokens' logits are wanted.
        """
        num_tokens = step.slots.shape[1]
        buffers.tables.tensor.view(-1)[buffers.cells] = buffers.block_ids
        ids, kept = buffers.token_ids[:num_tokens], buffers.kept[:num_kept]
        tokens = torch.where(ids < 0, self._sampled[buffers.sources[:num_tokens]], ids)
        positions = buffers.positions[:num_tokens]
        self._context.step = step
        try:
            self._context.clear_rests()
            if loaded.fused is not None:
                logits = loaded.fused.forward(tokens, positions, kept, self._context)
            else:
                logits = loaded.model(
                    input_ids=tokens[None],
                    position_ids=positions[None],
                    use_cache=False,
                    logits_to_keep=kept,
                    **{CONTEXT_ARGUMENT: self._context.handle},
                ).logits[0]
        finally:
            self._context.step = None
        logits = logits.float()
        most_likely = _argmax(logits)
        targets = buffers.targets[:num_kept]
        self._sampled[targets] = most_likely
        return StepOutput(logits, most_likely, targets)

    def synchronize(self) -> None:
        """Wait until every step that was issued has been computed."""
        if self.loaded.device.type == "cuda":
            torch.cuda.current_stream(self.loaded.device).synchronize()

    def keep_tokens(self, output: StepOutput, tokens: Tensor) -> None:
        """Have the next step use these tokens instead of the most likely; call before it is issued.

        Args:
            output: of the last step.
            tokens: [num_logits] int64 on the device.
        """
        self._sampled[output.targets] = tokens


def launched_size(num_tokens: int) -> int:
    """Return the size to which a step is padded if no graph holds it, so that sizes are few."""
    if num_tokens <= MIXED_SIZES[-1]:
        return num_tokens
    unit = max(16, (1 << num_tokens.bit_length() - 1) // SIZES_PER_OCTAVE)
    return -(-num_tokens // unit) * unit


def launched_sizes(most_tokens: int) -> list[int]:
    """Return the sizes of all steps that `launched_size` pads, ascending."""
    return sorted(set(map(launched_size, range(MIXED_SIZES[-1] + 1, most_tokens + 1))))


def _argmax(logits: Tensor) -> Tensor:
    """Find the largest of each row, in two steps: for few long rows torch uses few processors."""
    num_rows, num_columns = logits.shape
    width = math.gcd(num_columns, 1 << 9)
    values, indices = logits.view(num_rows, num_columns // width, width).max(-1)
    best = values.argmax(-1, keepdim=True)
    return (best * width + indices.gather(1, best))[:, 0]
