"""Runs made-up steps before the first request: to size the pool, to warm up, to check and to time.

`count_fitting_blocks` measures how many blocks fit into VRAM beside what a step takes. `warm_up`
loads kernels, checks models that nobody tested, and has graphs captured. `time_steps` teaches how
long steps take, for the first plans; what is learnt later is in `step_timer`.
"""

import logging
import time
from functools import partial

import numpy as np
import torch

from tieredkv.engine.attention import StepMetadata
from tieredkv.engine.graphs import Graphs, capture_graphs
from tieredkv.engine.loader import LoadedModel
from tieredkv.engine.runner import ModelRunner, StepLimits, launched_sizes, make_kv_pool
from tieredkv.engine.step_buffers import NO_STATES, BatchRow, idle_row
from tieredkv.engine.step_timer import StepTimer
from tieredkv.engine.suitability import TESTED_MODEL_TYPES
from tieredkv.errors import ConfigError, ModelError
from tieredkv.kernels import delta_chunks, prefill_dense
from tieredkv.kernels.partition import Batch
from tieredkv.types import KVSpec, Progress, ignore_progress, tracked

logger = logging.getLogger(__name__)

_MAX_PAGING_ERROR = 0.1
"""Of the logits' spread: far above what rounding does in bfloat16, far below a wrong context."""

_MAX_CUT_ERROR = 1e-5
"""Of the spread of outputs and states. On an H200, rows that are cut differ in no bit."""

_MAX_STATE_ERROR = 0.1
"""Of the same. Rounding to bfloat16 takes up to about 0.03, and a wrong state is off by 1."""

_CHECKED_LAYERS = 8
"""The first layers are checked. Behind all layers of a mixture of experts, rounding has changed so
many of the experts that tokens are given that the logits tell little.
"""

_SLACK_BYTES = 1 << 30
"""Kept free beside the measured peak: for CUDA graphs, and what libraries allocate later."""

MOST_CPU_TOKENS = 64
"""Tokens of the largest step that is timed at the start on a CPU."""


def count_fitting_blocks(
    loaded: LoadedModel, kv_spec: KVSpec, limits: StepLimits, gpu_memory_utilization: float
) -> int:
    """Count the blocks that fit on the device beside weights, activations and other processes.

    Args:
        loaded: the model.
        kv_spec: the layout of the pool.
        limits: of the steps to come.
        gpu_memory_utilization: share of the device's memory to use at most, for all purposes.

    Raises:
        ConfigError: not even one block fits.
    """
    peak_bytes = measure_peak_bytes(loaded, kv_spec, limits)
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


def measure_peak_bytes(loaded: LoadedModel, kv_spec: KVSpec, limits: StepLimits) -> int:
    """Measure the device memory that the largest steps take beside weights and pool.

    Two steps are run over a pool of one block, or of one recurrent state: many requests with
    logits each, and one chunk at the end of the longest context.
    """
    pool = make_kv_pool(kv_spec, max(1, kv_spec.state_pages), loaded.device)
    runner = ModelRunner(loaded, pool, kv_spec, limits)
    max_num_seqs, most_tokens, context_len = limits
    num_rows = min(max_num_seqs, most_tokens)
    share, chunk = min(most_tokens // num_rows, context_len), min(most_tokens, context_len)
    steps = [idle_row(share, 0)] * num_rows, [idle_row(chunk, context_len - chunk)]
    runner.execute([idle_row(1, 0)])
    torch.cuda.synchronize(loaded.device)
    torch.cuda.reset_peak_memory_stats(loaded.device)
    before_bytes = torch.cuda.memory_allocated(loaded.device)
    for step in steps:
        runner.execute(step)
    torch.cuda.synchronize(loaded.device)
    return torch.cuda.max_memory_allocated(loaded.device) - before_bytes


def warm_up(runner: ModelRunner, progress: Progress = ignore_progress) -> None:
    """Compile kernels and capture graphs before the first request; the pool is not written.

    Raises:
        ModelError: the model's type is not among the tested ones and fails `check_paging`.
    """
    loaded, (max_num_seqs, most_tokens, context_len) = runner.loaded, runner.limits
    if runner.buffers.is_recurrent and loaded.device.type == "cuda":
        check_states(loaded)
    if loaded.config.model_type not in TESTED_MODEL_TYPES:
        check_paging(loaded, loaded.kv_spec(runner.buffers.tables.block_size))
    chunk = min(most_tokens, context_len)
    rows = [idle_row(min(2, chunk), 0), idle_row(1, 0)]
    runner.execute(rows[:max_num_seqs])
    if loaded.device.type == "cuda":
        sinks = (it for name, it in loaded.model.named_parameters() if name.endswith("sinks"))
        of_one_layer = next(sinks, None)
        for heads, window, _ in runner.buffers.kinds:
            longest = min(context_len, window or context_len)
            if prefill_dense.is_available(heads):
                lengths = {"max_query_len": chunk, "max_context_len": longest}
                for share in prefill_dense.warm_up(heads, **lengths, sinks=of_one_layer):
                    progress("planning attention", round(100 * share), 100)
        sizes = [1 << n for n in range(1, 20) if 1 << n < chunk] + [chunk]
        end = min(context_len, 2 * chunk)  # a longer context takes no other kernels
        for size in tracked(progress, "warming up", sizes):
            runner.execute([idle_row(size, end - size)])
        load_kernels(runner, progress)
        runner.graphs = capture_graphs(
            runner.buffers,
            partial(runner.launch, loaded),
            partial(step_seconds, runner),
            max_context_len=context_len,
            progress=progress,
        )
        torch.cuda.synchronize(loaded.device)
    progress("warming up", 1, 1)


@torch.inference_mode()
def load_kernels(runner: ModelRunner, progress: Progress) -> None:
    """Compute padding of every size with a few layers, so that what steps need is loaded.

    cuBLAS chooses the kernel of a product by its sizes, and loads it when it is first needed.
    Loading takes a copy to the device, which waits for all copies of blocks that were given to
    the copy engine before. In service a step would take that much longer.
    """
    buffers, max_num_seqs = runner.buffers, runner.limits.max_num_seqs
    with runner.loaded.shortened(2) as short:  # of the last layer, only some tokens are computed
        if short is None:
            return
        sizes = launched_sizes(buffers.max_tokens)
        for index, size in enumerate(tracked(progress, "loading kernels", sizes)):
            num_kept = 1 + index % max_num_seqs
            buffers.fill_padding(size, num_kept)
            nothing = [Batch(buffers.tables.tensor[0], ())] * len(buffers.kinds)
            step = StepMetadata(buffers.slots[:, :size], nothing, states=buffers.states(NO_STATES))
            runner.launch(short, buffers, step, num_kept)


def step_seconds(runner: ModelRunner, graphs: Graphs, row: BatchRow) -> float:
    """Time a step from its first call to its last kernel; the faster of two counts.

    Args:
        runner: has no graphs of its own yet.
        graphs: what it has for these steps.
        row: the only one of the step.
    """
    times, runner.graphs = list[float](), graphs
    for _ in range(2):
        runner.synchronize()
        began_at = time.perf_counter()
        runner.execute([row])
        runner.synchronize()
        times.append(time.perf_counter() - began_at)
    runner.graphs = {}
    return min(times)


def time_steps(
    runner: ModelRunner, timer: StepTimer, *, most_tokens: int, max_model_len: int, is_cpu: bool
) -> None:
    """Time steps of several sizes and positions.

    Args:
        runner: computes them.
        timer: learns from them.
        most_tokens: tokens of the largest step.
        max_model_len: the longest context.
        is_cpu: whether the device is a CPU, for which smaller steps have to do.
    """
    most_tokens = min(most_tokens, max_model_len, MOST_CPU_TOKENS if is_cpu else most_tokens)
    sizes = sorted({max(1, most_tokens >> shift) for shift in (0, 2, 4, 6)})
    twice = (False, True)  # the first one of its kind may compile something, and teaches nothing
    steps = [(idle_row(size, 0), teaches) for size in sizes for teaches in twice]
    short = sizes[-2:][0]  # the longest one there would take seconds, and teach no more
    steps.append((idle_row(short, max_model_len - short), True))
    steps += [(idle_row(1, 0), teaches) for teaches in twice]
    for row, teaches in steps:
        timer.begin()
        runner.execute([row])
        timer.end([row], teaches=teaches)
    runner.synchronize()
    timer.poll()
    timer.rate.doubt()


def check_paging(loaded: LoadedModel, kv_spec: KVSpec) -> None:
    """Check that a prompt in pieces, beside another prompt, gives the logits of the whole prompt.

    The logits differ if the model mixes tokens outside of attention: in a convolution, a token
    shift, or positions that are counted instead of read.

    Raises:
        ModelError: the logits differ.
    """
    with loaded.shortened(_CHECKED_LAYERS) as shorter:
        error = _paging_error(shorter or loaded, kv_spec)
    if not error < _MAX_PAGING_ERROR:
        raise ModelError(
            f"model `{loaded.name}` cannot be served: a prompt that is computed in pieces gives "
            "other logits than one computed as a whole, so "
            f"`{loaded.config.model_type}` mixes tokens outside of attention"
        )


def check_states(loaded: LoadedModel) -> None:
    """Check that this device computes recurrent states as the reference does, whole and cut.

    Raises:
        ModelError: it does not.
    """
    errors = delta_chunks.measure_errors(loaded.device, getattr(torch, loaded.dtype))
    logger.info("recurrent states differ by %g if cut, by %g from the reference", *errors)
    if not (errors.cut <= _MAX_CUT_ERROR and errors.reference <= _MAX_STATE_ERROR):
        raise ModelError(
            f"model `{loaded.name}` cannot be served: on this device, the kernels of its recurrent "
            f"layers are off by {errors.reference:g}, and by {errors.cut:g} where a prompt is cut"
        )


def _paging_error(loaded: LoadedModel, kv_spec: KVSpec) -> float:
    """Return by how much the logits of a prompt in pieces differ, as a share of their spread."""
    num_tokens, num_blocks = 24, -(-24 // kv_spec.block_size)
    num_kinds, num_state = len(kv_spec.page_kinds), kv_spec.state_pages
    num_tables = 2 * num_kinds * num_blocks
    pool = make_kv_pool(kv_spec, num_tables + 2 * num_state, loaded.device).zero_()
    state = range(num_tables, num_tables + num_state)
    other_state = range(state.stop, state.stop + num_state)
    limits = StepLimits(
        max_num_seqs=2, max_num_batched_tokens=num_tokens, max_context_len=num_tokens
    )
    runner = ModelRunner(loaded, pool, kv_spec, limits)
    draw = np.random.default_rng(0)
    ids, other = draw.integers(0, loaded.vocab_size, (2, num_tokens)).tolist()
    pages = [list(range(i * num_blocks, (i + 1) * num_blocks)) for i in range(2 * num_kinds)]
    (table, *tails), (beside, *beside_tails) = pages[:num_kinds], pages[num_kinds:]
    alone = BatchRow(ids, 0, table, tail_tables=tails, all_logits=True, state_pages=state)
    whole = runner.execute([alone]).logits
    pool.zero_()
    parts = [
        runner.execute(
            [
                BatchRow(
                    other[start:end],
                    start,
                    beside,
                    beside_tails,
                    needs_logits=False,
                    state_pages=other_state,
                ),
                BatchRow(ids[start:end], start, table, tails, all_logits=True, state_pages=state),
            ]
        ).logits
        for start, end in ((0, 11), (11, 12), (12, num_tokens))
    ]
    return float((torch.cat(parts) - whole).abs().mean() / whole.std())
