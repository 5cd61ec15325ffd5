"""CUDA graphs of whole steps: which steps are captured, and which of them are replayed.

A replay spares the host the launching of kernels one by one, and pads its step to the tokens that
were captured. Steps that no graph holds are launched by `runner`, which this module does not know.
"""

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tieredkv.engine.attention import StepMetadata
from tieredkv.engine.step_buffers import BatchRow, Layout, StepBuffers, StepOutput, idle_row
from tieredkv.kernels import prefill_dense
from tieredkv.kernels.partition import Batch, Span
from tieredkv.kernels.state_plan import PlanSize
from tieredkv.types import Progress, tracked

logger = logging.getLogger(__name__)

DECODE_SIZES = (1, 2, 4, 8, *range(16, 64, 8), *range(64, 257, 16))
"""Rows of the captured steps in which every row has one token."""

MIXED_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Tokens of the captured steps in which some row has more. Where latent attention is computed as
products behind a long context, which a captured step cannot do, all but the first size are timed as
the long ones are; the steps of the first have hardly enough queries for that."""

LONG_SIZES = (640, 832, 1088, 1408, 1792, 2176, 2816, 3584, 4352)
"""Tokens of such steps that are captured only where a replay is faster at some depth: where the
device computes a step in less time than the host takes to launch its kernels. Each size is at most
a third larger than the one before."""

FRESH_STEPS = (1024, 2048, 4096, 8192)
"""Tokens of the steps that are timed to find out up to where it pays to capture fresh steps: steps
of one prompt from its first token on. Those can use the dense path, since all lengths are known."""

FRESH_REST = 128
"""Tokens behind the dense path that the smaller of two fresh graphs of one length has room for."""

TRIED_STARTS = (0, 2048, 8192, 32_768)
"""Positions at which long steps are timed. Those that are captured cannot use the dense path, which
is faster behind a long context, but whose pieces take the host long to launch."""

Depths = Sequence[tuple[float, float]]
"""Ranges `[first, end)` of how many tokens each token of a step attends to, on average."""

GraphKey = tuple[int, Literal["decode", "mixed", "fresh"]]
"""Tokens and kind: one token a row, any rows, or one prompt from its first token on."""

Launch = Callable[[StepBuffers, StepMetadata, int], StepOutput]
"""Launches the kernels of a step whose inputs are in the buffers, with so many logits."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured step, where it reads its inputs, and where it leaves its results.

    Attributes:
        num_tokens, num_kept: the tokens and the logits to which a step is padded.
        is_fresh: whether it is the step of one prompt from its first token on.
        depths: where a replay is the faster way; empty if it is everywhere. A short step is always
            replayed if no span of it is attended as products.
        states: what it has room for of rows with recurrent states.
    """

    num_tokens: int
    num_kept: int
    is_fresh: bool
    depths: Depths
    states: PlanSize
    graph: torch.cuda.CUDAGraph
    buffers: StepBuffers
    output: StepOutput

    def replay(
        self, rows: Sequence[BatchRow], layout: Layout, changes: tuple[list[int], list[int]]
    ) -> StepOutput:
        """Compute a step that was found to fit.

        Args:
            rows: of the step.
            layout: of the rows; it leaves ways of attending that the graph does not have.
            changes: of the block tables, as `BlockTables.update` returns them.
        """
        layout.fit_graph(is_fresh=self.is_fresh)
        if self.is_fresh:
            self.buffers.tables.copy_fresh(layout.spans[0])
        sizes = {"num_tokens": self.num_tokens, "num_kept": self.num_kept}
        self.buffers.fill(rows, layout, changes, **sizes, states=self.states)
        self.graph.replay()
        return StepOutput(*(part[: len(layout.kept)] for part in self.output))


Graphs = Mapping[GraphKey, Graph]


def find_graph(graphs: Graphs, layout: Layout) -> Graph | None:
    """Find the graph of the smallest size that holds a step, if a replay is to compute it."""
    num_tokens = layout.num_tokens
    key: GraphKey
    if layout.has_chunks:
        key = fresh_size(num_tokens), "fresh"
        if not layout.is_fresh or key not in graphs:
            key = _smallest(MIXED_SIZES + LONG_SIZES, num_tokens), "mixed"
    else:
        key = _smallest(DECODE_SIZES, num_tokens), "decode"
    graph = graphs.get(key)
    if graph is None or len(layout.kept) > graph.num_kept:
        return None
    if graph.buffers.is_recurrent and not graph.states.has_room(layout.state_spans):
        return None
    if not graph.depths or (num_tokens <= MIXED_SIZES[-1] and not layout.has_products):
        return graph
    depth = layout.num_pairs / num_tokens
    return graph if any(first <= depth < end for first, end in graph.depths) else None


def mixed_size(num_tokens: int) -> int:
    """Return the size of the short captured steps that holds a step; 0 if none does."""
    return _smallest(MIXED_SIZES, num_tokens)


def _smallest(sizes: Sequence[int], num_tokens: int) -> int:
    """Return the first of ascending sizes that is large enough; 0 if none is."""
    return next((size for size in sizes if size >= num_tokens), 0)


def fresh_size(num_tokens: int) -> int:
    """Return the size of the graph for a fresh step, which attends whole steps of the dense path.

    The tokens behind those are computed by the paged kernel, and are padded.
    """
    dense_len = num_tokens // prefill_dense.STEP * prefill_dense.STEP
    is_short = num_tokens - dense_len <= FRESH_REST
    return dense_len + (FRESH_REST if is_short else prefill_dense.STEP)


def capture_graphs(
    buffers: StepBuffers,
    launch: Launch,
    step_seconds: Callable[[Graphs, BatchRow], float],
    *,
    max_context_len: int,
    progress: Progress,
) -> Graphs:
    """Find out by timing which long steps to replay, then capture those and all short ones.

    Args:
        buffers: for the longest step; short captured steps get smaller ones.
        launch: launches a step's kernels.
        step_seconds: returns how many seconds a step of one row takes if there are these graphs.
        max_context_len: no step ends behind it.
        progress: told about timing and capturing.
    """
    num_rows, most_tokens = buffers.tables.num_requests, buffers.max_tokens
    short = buffers.smaller(max(MIXED_SIZES[-1], num_rows))

    def captured(key: GraphKey, pool: Any, depths: Depths = ()) -> Graph:
        into = short if key[0] <= short.max_tokens else buffers
        return capture(key, into, launch, pool, depths)

    def saved_s(key: GraphKey, num_tokens: int, starts: Sequence[int]) -> list[float]:
        try:  # no other graph has memory now
            graphs = {key: captured(key, torch.cuda.graph_pool_handle())}
        except RuntimeError as error:
            logger.warning("steps of %d tokens and more are not captured: %s", key[0], error)
            return []
        saved = list[float]()
        for row in (idle_row(num_tokens, start) for start in starts):
            replayed_s, launched_s = step_seconds(graphs, row), step_seconds({}, row)
            saved.append(launched_s - replayed_s)
        return saved

    progress("timing long steps", 0, 1)
    has_products = any(kind.has_products() for kind in buffers.kinds)
    short_sizes = MIXED_SIZES if has_products else MIXED_SIZES[-1:]
    paying = sizes_that_pay(
        [size for size in short_sizes[1:] + LONG_SIZES if size <= most_tokens],
        short_sizes[0] + 1,
        max_context_len,
        lambda size, *steps: saved_s((size, "mixed"), *steps),
    )
    fresh: list[int] = []
    is_dense = any(kind.is_dense(FRESH_STEPS[0]) for kind in buffers.kinds)
    for num_tokens in FRESH_STEPS if is_dense else ():
        size = fresh_size(num_tokens)
        is_possible = num_tokens <= max_context_len and size <= most_tokens
        if not is_possible or min(saved_s((size, "fresh"), num_tokens, [0]), default=-1.0) < 0:
            break
        fresh = sorted({fresh_size(n) for n in range(FRESH_STEPS[0], num_tokens + 1)})
    progress("timing long steps", 1, 1)
    wanted: dict[GraphKey, Depths] = {(n, "fresh"): () for n in fresh}
    wanted |= {(n, "decode"): () for n in DECODE_SIZES if n <= num_rows}
    wanted |= {(n, "mixed"): () for n in MIXED_SIZES if n <= most_tokens}
    wanted |= {(n, "mixed"): depths for n, depths in paying.items()}
    keys = sorted(wanted, reverse=True)  # the largest first, so that the others fit into its memory
    pool = torch.cuda.graph_pool_handle()
    steps = tracked(progress, "capturing CUDA graphs", keys)
    graphs = {key: captured(key, pool, wanted[key]) for key in steps}
    logger.info("timed steps that are replayed: fresh %s, others %s", fresh[-1:], paying)
    return graphs


def capture(
    key: GraphKey, buffers: StepBuffers, launch: Launch, pool: Any, depths: Depths = ()
) -> Graph:
    """Capture a step that has nothing but padding.

    Args:
        key: its tokens and kind.
        buffers: where the graph reads its inputs.
        launch: launches the step's kernels.
        pool: a handle of graph memory, which one of its graphs may use at a time.
        depths: where a replay is the faster way.
    """
    (num_tokens, kind), tables = key, buffers.tables
    num_kept = 1 if kind == "fresh" else min(num_tokens, tables.num_requests)
    states = PlanSize.of_any(num_tokens, 1 if kind == "fresh" else tables.num_requests)
    if kind == "decode":
        states = PlanSize(num_tokens)
    buffers.fill_padding(num_tokens, num_kept, states)
    dense_len = (num_tokens - 1) // prefill_dense.STEP * prefill_dense.STEP
    whole = [Span(tables.fresh_row, 0, dense_len, dense_len)]
    batches: list[Batch] = []
    for layers, plans in zip(buffers.kinds, buffers.plans, strict=True):
        dense = whole if kind == "fresh" and layers.is_dense(dense_len) else ()
        narrow = None if kind == "fresh" else plans.narrow
        wide = None if kind == "decode" else plans.wide
        batches.append(Batch(tables.tensor[layers.page], (), dense, narrow, wide))
    last = None
    if kind == "fresh":
        last = [
            Batch(tables.tensor[layers.page], (), (), plans.last)
            for layers, plans in zip(buffers.kinds, buffers.plans, strict=True)
        ]
    step = StepMetadata(buffers.slots[:, :num_tokens], batches, last, buffers.states(states))
    with torch.inference_mode():
        launch(buffers, step, num_kept)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            output = launch(buffers, step, num_kept)
        graph.replay()  # the first time, it is copied to the device, as kernels are
    return Graph(num_tokens, num_kept, kind == "fresh", depths, states, graph, buffers, output)


def sizes_that_pay(
    sizes: Sequence[int],
    shortest: int,
    max_context_len: int,
    saved_s: Callable[[int, int, Sequence[int]], Sequence[float]],
) -> dict[int, Depths]:
    """Find the sizes of steps to be captured, up to the first for which that pays nowhere.

    Args:
        sizes: ascending.
        shortest: tokens of the shortest step that the first size would serve. The shortest step is
            padded the most, so it is the one that is timed.
        max_context_len: no step ends behind it.
        saved_s: returns the seconds that a replay saves: of a size, for a step of so many tokens at
            each of some positions; nothing if there can be no replay.

    Returns:
        For each size, where a replay is the faster one; between the positions that are timed, what
        it saves is interpolated.
    """
    found: dict[int, Depths] = {}
    for size in sizes:
        starts = [start for start in TRIED_STARTS if start + shortest <= max_context_len]
        saved = saved_s(size, shortest, starts) if starts else ()
        points = [(start + shortest / 2, s) for start, s in zip(starts, saved, strict=False)]
        if not (depths := _depths_of_gain(points)):
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
