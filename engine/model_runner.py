"""Runs one step of a batch through the model over the paged cache, and sizes that cache.

It takes token ids and block tables and returns logits. It knows neither requests nor sampling,
and it knows blocks only by their ids.
"""

import itertools
import logging
import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tieredkv.engine.attention import CONTEXT_ARGUMENT, AttentionContext, StepMetadata
from tieredkv.engine.loader import LoadedModel
from tieredkv.engine.step_buffers import BatchRow, BlockTables, Layout, StepBuffers
from tieredkv.engine.suitability import TESTED_MODEL_TYPES
from tieredkv.errors import ConfigError, ModelError
from tieredkv.kernels import prefill_dense
from tieredkv.kernels.partition import Batch, Heads, Span
from tieredkv.types import KVSpec, Progress, ignore_progress, tracked

logger = logging.getLogger(__name__)

DECODE_SIZES = (1, 2, 4, 8, *range(16, 64, 8), *range(64, 257, 16))
"""Rows of the captured steps in which every row has one token."""

MIXED_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Tokens of the captured steps in which some row has more."""

LONG_SIZES = (640, 832, 1088, 1408, 1792, 2176, 2816, 3584, 4352)
"""The same for steps that are captured only where a replay is faster at some depth: where the
device computes a step in less time than the host takes to launch its kernels. Each size is at most
a third larger than the one before."""

FRESH_STEPS = (1024, 2048, 4096, 8192)
"""Tokens of the steps that are timed to find out up to where it pays to capture fresh steps: steps
of one prompt from its first token on. Those can use the dense path, since all lengths are known."""

FRESH_REST = 128
"""Tokens behind the dense path that the smaller of two fresh graphs of one length has room for."""

SIZES_PER_OCTAVE = 128
"""Sizes between a number of tokens and its double to which steps that no graph holds are padded."""

TRIED_STARTS = (0, 2048, 8192, 32_768)
"""Positions at which long steps are timed. Those that are captured cannot use the dense path, which
is faster behind a long context, but whose pieces take the host long to launch."""

_MAX_PAGING_ERROR = 0.1
"""Of the logits' spread: far above what rounding does in bfloat16, far below a wrong context."""

_SLACK_BYTES = 1 << 30
"""Kept free beside the measured peak: for CUDA graphs, and what libraries allocate later."""


def make_kv_pool(kv_spec: KVSpec, num_blocks: int, device: torch.device) -> Tensor:
    """Allocate a device pool, `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`.

    On the CPU it is zeroed, which also makes the operating system hand out its pages.
    """
    make = torch.zeros if device.type == "cpu" else torch.empty
    block = (kv_spec.num_layers, 2, kv_spec.block_size, kv_spec.num_kv_heads, kv_spec.head_dim)
    return make(num_blocks, *block, dtype=getattr(torch, kv_spec.dtype), device=device)


def late_layer(kv_spec: KVSpec) -> int:
    """Return the first of the layers whose keys and values may arrive while others compute.

    An eighth of them: as long as its bytes take, the layers before compute a short chunk.
    """
    return kv_spec.num_layers - max(1, kv_spec.num_layers // 8)


Depths = Sequence[tuple[float, float]]
"""Ranges `[first, end)` of how many tokens each token of a step attends to, on average."""

_ANY_DEPTH: Depths = ((0.0, math.inf),)
_ANY_DECODES = dict.fromkeys(DECODE_SIZES, _ANY_DEPTH)


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


_GraphKey = tuple[int, Literal["decode", "mixed", "fresh"]]
"""Tokens and kind: one token a row, any rows, or one prompt from its first token on."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step, padded to a number of tokens, and where it reads its inputs."""

    num_tokens: int
    is_fresh: bool
    graph: torch.cuda.CUDAGraph
    output: StepOutput
    buffers: StepBuffers


class ModelRunner:
    """Forward passes of one model over one pool; one thread calls it.

    The pool belongs to the caller. Steps are issued in order on the current stream, and nothing
    waits for the device, except for the upload of the step before. After `warm_up`, small steps
    are replayed from CUDA graphs, and so are longer ones of a model for which that is faster.

    Args:
        loaded: the model.
        kv_pool: see `make_kv_pool`.
        kv_spec: of the pool.
        max_num_seqs: rows of the largest step; request indices are below it.
        max_num_batched_tokens: tokens of the largest step, single ones of running requests apart.
        max_context_len: the longest context; the model's own if None.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        kv_pool: Tensor,
        kv_spec: KVSpec,
        *,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_context_len: int | None = None,
    ) -> None:
        self._loaded, self._kv_spec = loaded, kv_spec
        self._max_context_len = max_context_len or loaded.max_model_len
        self._max_num_seqs, self._max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self._context = AttentionContext(kv_pool)
        if loaded.device.type == "cuda":
            self._context.late_layer = late_layer(kv_spec)
            self._context.gate = torch.cuda.Event(external=True)
            self._gate_stream = torch.cuda.Stream(loaded.device)
            self._context.gate.record(self._gate_stream)
        shape, dtype = loaded.shape, getattr(torch, loaded.dtype)
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self._heads = Heads(*heads, dtype, loaded.device)
        self._tables = BlockTables(
            max_num_seqs, self._max_context_len, kv_spec.block_size, loaded.device
        )
        max_tokens = launched_size(max_num_batched_tokens + max_num_seqs)
        sizes = (max_tokens, min(max_tokens, max(MIXED_SIZES[-1], max_num_seqs)))
        self._buffers, self._graph_buffers = (
            StepBuffers(self._heads, self._tables, max_tokens=size, vocab_size=loaded.vocab_size)
            for size in sizes
        )
        self._sampled = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=loaded.device)
        self._graphs: dict[_GraphKey, _Graph] = {}
        self._depths: dict[int, Depths] = {}

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
        if late_event is not None and self._context.gate is not None:
            # A captured graph always waits for the same event, which is recorded here.
            self._gate_stream.wait_event(late_event)
            self._context.gate.record(self._gate_stream)
        layout = Layout(rows, self._heads, self._max_num_seqs)
        num_tokens, num_kept = launched_size(layout.num_tokens), len(layout.kept)
        changes = self._tables.update(rows)
        graph = self._find_graph(layout)
        buffers = self._buffers if graph is None else graph.buffers
        if graph is not None:
            num_tokens, num_kept = graph.num_tokens, len(graph.output.logits)
            if graph.is_fresh:
                self._tables.copy_fresh(layout.spans[0])
            else:
                layout.leave_dense_path()
        buffers.fill(rows, layout, changes, num_tokens=num_tokens, num_kept=num_kept)
        if graph is not None:
            graph.graph.replay()
            return StepOutput(*(part[: len(layout.kept)] for part in graph.output))
        shares, tables = layout.shares, self._tables.tensor
        narrow = buffers.narrow if shares.narrow else None
        wide = buffers.wide if shares.wide else None
        batch = Batch(tables, layout.spans, shares.dense, narrow, wide)
        last = Batch(tables, layout.last, narrow=buffers.last) if layout.last else None
        return self._forward(buffers, num_tokens, num_kept, batch, last)

    def synchronize(self) -> None:
        """Wait until every step that was issued has been computed."""
        if self._loaded.device.type == "cuda":
            torch.cuda.current_stream(self._loaded.device).synchronize()

    def keep_tokens(self, output: StepOutput, tokens: Tensor) -> None:
        """Have the next step use these tokens instead of the most likely; call before it is issued.

        Args:
            output: of the last step.
            tokens: [num_logits] int64 on the device.
        """
        self._sampled[output.targets] = tokens

    def _forward(
        self,
        buffers: StepBuffers,
        num_tokens: int,
        num_kept: int,
        batch: Batch,
        last: Batch | None = None,
    ) -> StepOutput:
        """Run the model on the inputs in the buffers."""
        self._tables.tensor.view(-1)[buffers.cells] = buffers.block_ids
        ids, kept = buffers.token_ids[:num_tokens], buffers.kept[:num_kept]
        tokens = torch.where(ids < 0, self._sampled[buffers.sources[:num_tokens]], ids)
        positions = buffers.positions[:num_tokens]
        self._context.step = StepMetadata(buffers.slots[:num_tokens], batch, last)
        try:
            if self._loaded.fused is not None:
                logits = self._loaded.fused.forward(tokens, positions, kept, self._context)
            else:
                logits = self._loaded.model(
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

    def _find_graph(self, layout: Layout) -> _Graph | None:
        """Find the smallest graph that holds a step, if a replay is to compute it."""
        num_tokens = layout.num_tokens
        key: _GraphKey = fresh_size(num_tokens), "fresh"
        if not (layout.shares.dense or layout.shares.wide):
            key = choose_size(_ANY_DECODES, num_tokens, 0), "decode"
        elif not (layout.is_fresh and key in self._graphs):
            key = choose_size(self._depths, num_tokens, layout.num_pairs), "mixed"
        graph = self._graphs.get(key)
        has_room = graph is not None and len(layout.kept) <= len(graph.output.logits)
        return graph if has_room else None

    def warm_up(self, progress: Progress = ignore_progress) -> None:
        """Compile kernels and capture graphs before the first request; the pool is not written.

        Raises:
            ModelError: the model's type is not among the tested ones and fails `check_paging`.
        """
        if self._loaded.config.model_type not in TESTED_MODEL_TYPES:
            check_paging(self._loaded, self._kv_spec)
        chunk = min(self._max_num_batched_tokens, self._max_context_len)
        rows = [self.idle_row(min(2, chunk), 0), self.idle_row(1, 0)]
        self.execute(rows[: self._max_num_seqs])
        if self._loaded.device.type == "cuda":
            if prefill_dense.is_available(self._heads):
                limits = {"max_query_len": chunk, "max_context_len": self._max_context_len}
                for share in prefill_dense.warm_up(self._heads, **limits):
                    progress("planning attention", round(100 * share), 100)
            sizes = [1 << n for n in range(1, 20) if 1 << n < chunk] + [chunk]
            for size in tracked(progress, "warming up", sizes):
                self.execute([self.idle_row(size, self._max_context_len - size)])
            self._load_kernels(progress)
            self._capture(progress)
            torch.cuda.synchronize(self._loaded.device)
        progress("warming up", 1, 1)

    @torch.inference_mode()
    def _load_kernels(self, progress: Progress) -> None:
        """Compute padding of every size with a few layers, so that what steps need is loaded.

        cuBLAS chooses the kernel of a product by its sizes, and loads it when it is first needed.
        Loading takes a copy to the device, which waits for all copies of blocks that were given to
        the copy engine before. In service a step would take that much longer.
        """
        with self._loaded.shortened(2) as short:  # of the last layer, only some tokens are computed
            if short is None:
                return
            whole, self._loaded = self._loaded, short
            try:
                sizes = launched_sizes(self._buffers.max_tokens)
                for index, size in enumerate(tracked(progress, "loading kernels", sizes)):
                    num_kept = 1 + index % self._max_num_seqs
                    self._fill_padding(self._buffers, size, num_kept)
                    self._forward(self._buffers, size, num_kept, Batch(self._tables.tensor, ()))
            finally:
                self._loaded = whole

    def _capture(self, progress: Progress) -> None:
        """Capture steps, the largest first, so that the others fit into its memory."""
        progress("timing long steps", 0, 1)
        most_tokens = self._buffers.max_tokens
        paying = sizes_that_pay(
            [size for size in LONG_SIZES if size <= most_tokens],
            MIXED_SIZES[-1] + 1,
            self._max_context_len,
            lambda size, *step: self._saved_s((size, "mixed"), *step),
        )
        fresh: list[int] = []
        for size in FRESH_STEPS if prefill_dense.is_available(self._heads) else ():
            key: _GraphKey = fresh_size(size), "fresh"
            is_possible = size <= self._max_context_len and key[0] <= most_tokens
            if not is_possible or self._saved_s(key, size, 0) < 0:
                break
            fresh = sorted({fresh_size(n) for n in range(FRESH_STEPS[0], size + 1)})
        progress("timing long steps", 1, 1)
        self._graphs, self._depths = {}, dict.fromkeys(MIXED_SIZES, _ANY_DEPTH) | paying
        keys: list[_GraphKey] = [(n, "fresh") for n in fresh]
        keys += [(n, "decode") for n in DECODE_SIZES if n <= self._max_num_seqs]
        keys += [(n, "mixed") for n in self._depths if n <= most_tokens]
        keys.sort(reverse=True)
        pool = torch.cuda.graph_pool_handle()
        for key in tracked(progress, "capturing CUDA graphs", keys):
            self._graphs[key] = self._capture_step(key, pool)
        logger.info("long steps that are replayed: fresh %s, others %s", fresh[-1:], paying)

    def _capture_step(self, key: _GraphKey, pool: Any) -> _Graph:
        """Capture a step into a pool of graph memory."""
        size, kind = key
        buffers = self._graph_buffers if size <= self._graph_buffers.max_tokens else self._buffers
        num_kept = 1 if kind == "fresh" else min(size, self._max_num_seqs)
        self._fill_padding(buffers, size, num_kept)
        tables = self._tables.tensor
        wide = None if kind == "decode" else buffers.wide
        batch, last = Batch(tables, (), (), buffers.narrow, wide), None
        if kind == "fresh":
            dense_len = (size - 1) // prefill_dense.STEP * prefill_dense.STEP
            dense = [Span(self._tables.fresh_row, 0, dense_len, dense_len)]
            batch, last = Batch(tables, (), dense, None, wide), Batch(tables, (), (), buffers.last)
        with torch.inference_mode():
            self._forward(buffers, size, num_kept, batch, last)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                output = self._forward(buffers, size, num_kept, batch, last)
            graph.replay()  # the first time, it is copied to the device, as kernels are
        return _Graph(size, kind == "fresh", graph, output, buffers)

    def _fill_padding(self, buffers: StepBuffers, num_tokens: int, num_kept: int) -> None:
        """Write a step that has nothing but padding."""
        self.synchronize()  # the device has read what the buffers had for the last step
        idle = Layout([], self._heads, self._max_num_seqs)
        buffers.fill([], idle, ([], []), num_tokens=num_tokens, num_kept=num_kept)

    def _saved_s(self, key: _GraphKey, num_tokens: int, start: int) -> float:
        """Return how many seconds a replay saves of a step that the graph pads.

        A step that cannot be captured, for want of memory for instance, is to be launched as ever:
        its replay saves minus infinity.
        """
        if key not in self._graphs:
            self._graphs.clear()  # the graph before gives its memory back
            try:
                self._graphs[key] = self._capture_step(key, torch.cuda.graph_pool_handle())
            except RuntimeError as error:
                logger.warning("steps of %d tokens and more are not captured: %s", key[0], error)
                return -math.inf
        row, graphs = self.idle_row(num_tokens, start), self._graphs
        self._depths = {key[0]: _ANY_DEPTH}
        replayed_s = self._step_seconds(row)
        self._graphs = {}
        launched_s = self._step_seconds(row)
        self._graphs = graphs
        return launched_s - replayed_s

    def _step_seconds(self, row: BatchRow) -> float:
        """Time a step from its first call to its last kernel; the faster of two counts."""
        times = []
        for _ in range(2):
            self.synchronize()
            began_at = time.perf_counter()
            self.execute([row])
            self.synchronize()
            times.append(time.perf_counter() - began_at)
        return min(times)

    def idle_row(self, num_tokens: int, start: int) -> BatchRow:
        """Make a row that computes something of this size over block 0 and writes nothing."""
        end = start + num_tokens
        table = array("i", bytes(4 * -(-end // self._tables.block_size)))
        return BatchRow([0] * num_tokens, start, table, write_from=end)


def launched_size(num_tokens: int) -> int:
    """Return the size to which a step is padded if no graph holds it, so that sizes are few."""
    if num_tokens <= MIXED_SIZES[-1]:
        return num_tokens
    unit = max(16, (1 << num_tokens.bit_length() - 1) // SIZES_PER_OCTAVE)
    return -(-num_tokens // unit) * unit


def launched_sizes(most_tokens: int) -> list[int]:
    """Return the sizes of all steps that `launched_size` pads, ascending."""
    return sorted(set(map(launched_size, range(MIXED_SIZES[-1] + 1, most_tokens + 1))))


def choose_size(depths: Mapping[int, Depths], num_tokens: int, num_pairs: float) -> int:
    """Return the smallest captured size that holds a step, and 0 if no replay is to compute it.

    Args:
        depths: of each size, ascending.
        num_tokens: of the step.
        num_pairs: see `Layout.num_pairs`.
    """
    size = next((size for size in depths if size >= num_tokens), 0)
    depth = num_pairs / num_tokens
    return size if any(first <= depth < end for first, end in depths.get(size, ())) else 0


def fresh_size(num_tokens: int) -> int:
    """Return the size of the graph for a fresh step, which attends whole steps of the dense path.

    The tokens behind those are computed by the paged kernel, and are padded.
    """
    dense_len = num_tokens // prefill_dense.STEP * prefill_dense.STEP
    is_short = num_tokens - dense_len <= FRESH_REST
    return dense_len + (FRESH_REST if is_short else prefill_dense.STEP)


def sizes_that_pay(
    sizes: Sequence[int],
    shortest: int,
    max_context_len: int,
    saved_s: Callable[[int, int, int], float],
) -> dict[int, Depths]:
    """Find the sizes of steps to be captured, up to the first for which that pays nowhere.

    Args:
        sizes: ascending.
        shortest: tokens of the shortest step that the first size would serve. The shortest step is
            padded the most, so it is the one that is timed.
        max_context_len: no step ends behind it.
        saved_s: returns the seconds that a replay saves: of a size, for a step of so many tokens at
            a position; minus infinity if there can be no replay.

    Returns:
        For each size, where a replay is the faster one; between the positions that are timed, what
        it saves is interpolated.
    """
    found: dict[int, Depths] = {}
    for size in sizes:
        saved = list[tuple[float, float]]()
        for start in TRIED_STARTS:
            if start + shortest > max_context_len:
                break
            if (seconds := saved_s(size, shortest, start)) == -math.inf:
                break
            saved.append((start + shortest / 2, seconds))
        if not (depths := _depths_of_gain(saved)):
            break
        found[size] = depths
        shortest = size + 1
    return found


def _depths_of_gain(saved: Sequence[tuple[float, float]]) -> Depths:
    """Return where a line through these points, (depth, gain) by ascending depth, is not below 0.

    Before the first point and behind the last one it is level.
    """
    depths, first = list[tuple[float, float]](), 0.0 if saved and saved[0][1] >= 0 else None
    for (low, before), (high, after) in itertools.pairwise(saved):
        if (first is None) == (after < 0):
            continue
        crossing = low + (high - low) * before / (before - after)
        if first is None:
            first = crossing
        else:
            depths.append((first, crossing))
            first = None
    return [*depths, (first, math.inf)] if first is not None else depths


def _argmax(logits: Tensor) -> Tensor:
    """Find the largest of each row, in two steps: for few long rows torch uses few processors."""
    num_rows, num_columns = logits.shape
    width = math.gcd(num_columns, 1 << 9)
    values, indices = logits.view(num_rows, num_columns // width, width).max(-1)
    best = values.argmax(-1, keepdim=True)
    return (best * width + indices.gather(1, best))[:, 0]


def check_paging(loaded: LoadedModel, kv_spec: KVSpec) -> None:
    """Check that a prompt in pieces, beside another prompt, gives the logits of the whole prompt.

    The logits differ if the model mixes tokens outside of attention: in a convolution, a token
    shift, or positions that are counted instead of read.

    Raises:
        ModelError: the logits differ.
    """
    num_tokens, num_blocks = 24, -(-24 // kv_spec.block_size)
    pool = make_kv_pool(kv_spec, 2 * num_blocks, loaded.device).zero_()
    runner = ModelRunner(loaded, pool, kv_spec)
    draw = np.random.default_rng(0)
    ids, other = draw.integers(0, loaded.vocab_size, (2, num_tokens)).tolist()
    table, beside = list(range(num_blocks)), list(range(num_blocks, 2 * num_blocks))
    whole = runner.execute([BatchRow(ids, 0, table, all_logits=True)]).logits
    pool.zero_()
    parts = [
        runner.execute(
            [
                BatchRow(other[start:end], start, beside, needs_logits=False),
                BatchRow(ids[start:end], start, table, all_logits=True),
            ]
        ).logits
        for start, end in ((0, 11), (11, 12), (12, num_tokens))
    ]
    error = (torch.cat(parts) - whole).abs().mean() / whole.std()
    if not error < _MAX_PAGING_ERROR:
        raise ModelError(
            f"model `{loaded.name}` cannot be served: a prompt that is computed in pieces gives "
            "other logits than one computed as a whole, so "
            f"`{loaded.config.model_type}` mixes tokens outside of attention"
        )


def profile_peak_bytes(
    loaded: LoadedModel, kv_spec: KVSpec, *, max_num_batched_tokens: int, max_num_seqs: int
) -> int:
    """Measure the device memory that the largest steps take beside weights and pool.

    Two steps are run over a pool of one block: many requests with logits each, and one chunk at
    the end of the longest context.
    """
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    runner = ModelRunner(loaded, make_kv_pool(kv_spec, 1, loaded.device), kv_spec, **limits)
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    share = min(max_num_batched_tokens // num_rows, loaded.max_model_len)
    chunk = min(max_num_batched_tokens, loaded.max_model_len)
    steps = (
        [runner.idle_row(share, 0)] * num_rows,
        [runner.idle_row(chunk, loaded.max_model_len - chunk)],
    )
    runner.execute([runner.idle_row(1, 0)])
    torch.cuda.synchronize(loaded.device)
    torch.cuda.reset_peak_memory_stats(loaded.device)
    before_bytes = torch.cuda.memory_allocated(loaded.device)
    for step in steps:
        runner.execute(step)
    torch.cuda.synchronize(loaded.device)
    return torch.cuda.max_memory_allocated(loaded.device) - before_bytes


def num_device_blocks(
    loaded: LoadedModel, kv_spec: KVSpec, gpu_memory_utilization: float, **limits: int
) -> int:
    """Count the blocks that fit on the device beside weights, activations and other processes.

    Args:
        loaded: the model.
        kv_spec: the layout of the pool.
        gpu_memory_utilization: share of the device's memory to use at most, for all purposes.
        limits: `max_num_seqs` and `max_num_batched_tokens` of the runner.

    Raises:
        ConfigError: not even one block fits.
    """
    peak_bytes = profile_peak_bytes(loaded, kv_spec, **limits)
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(loaded.device)
    used_bytes = total_bytes - free_bytes
    spare_bytes = int(total_bytes * gpu_memory_utilization) - used_bytes
    num_blocks = (spare_bytes - peak_bytes - _SLACK_BYTES) // kv_spec.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"`gpu_memory_utilization` = {gpu_memory_utilization} leaves no room for blocks in "
            f"{total_bytes >> 20} MiB: {used_bytes >> 20} MiB are in use and a step takes "
            f"{peak_bytes >> 20} MiB\nhint: raise it, or lower `max_num_batched_tokens`"
        )
    return num_blocks
