"""Prefill attention of one request over gathered keys and values, for long chunks on a GPU.

The fused attention of cuDNN is faster than any kernel over paged memory, gathering included. But
it knows only "causal from the first token" and "no mask", and builds a plan, for tens of
milliseconds, for each new pair of lengths. So a context is cut at multiples of SHAPE_STEP:
```
positions  0 ................ tail_start ...... context_len - n ............ context_len ...
keys       | 2^k steps | 2^j steps |  tail: causal square, a multiple of SHAPE_STEP long       |
queries                            | zeros |  the chunk's n queries              | zeros       |
```
The pieces before the tail are attended without a mask, and all results merged by log-sum-exp: a
bounded set of plans serves every length. The host must know the lengths. It knows no batches.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

SHAPE_STEP = 512
"""Lengths given to cuDNN are multiples of it: larger wastes work on padding, smaller plans."""

MIN_QUERY_TOKENS = 512
"""Shorter chunks would be mostly padding, and the paged kernel splits their context."""

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128)


class RefusedError(RuntimeError):
    """The dense operator does not take these shapes; the paged kernel does."""


class Partial(NamedTuple):
    """Attention over a part of the context.

    Attributes:
        out: [num_queries, num_heads, head_dim], normalised within the part.
        lse: [num_queries, num_heads] float32, natural log-sum-exp of the part's scores.
    """

    out: Tensor
    lse: Tensor

    def rows(self, first: int, end: int) -> "Partial":
        """Narrow to the queries [first, end)."""
        return Partial(self.out[first:end], self.lse[first:end])


Attend = Callable[[Tensor, Tensor, Tensor, float, bool], Partial]
"""(q [n, Hq, D], k and v [m, Hkv, D], scale, is_causal) -> Partial; causal only where n = m."""


def is_available(q: Tensor) -> bool:
    """Tell whether long chunks of such queries gain from this path here and now."""
    return (
        q.is_cuda
        and q.dtype in DTYPES
        and q.shape[2] in HEAD_DIMS
        and not torch.cuda.is_current_stream_capturing()  # lengths would be frozen
    )


def attend_request(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, context_len: int, scale: float
) -> Tensor:
    """Attend one request's chunk, the last tokens of its context, to the whole context.

    Bytes moved beside the attention itself: the context's keys and values once in and once out,
    and two float32 results in and one out for each piece of the prefix.

    Args:
        q: [num_queries, num_heads, head_dim].
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        v_cache: as k_cache.
        block_table: [max_blocks].
        context_len: tokens of the context, the chunk included.
        scale: factor on the scores.

    Returns:
        [num_queries, num_heads, head_dim] in q's dtype.

    Raises:
        RefusedError: the operator does not support these shapes on this machine.
    """
    attend: Attend = attend_cudnn if q.is_cuda else attend_torch
    num_queries = q.shape[0]
    prefix_len = context_len - num_queries
    tail_start = prefix_len // SHAPE_STEP * SHAPE_STEP
    first = prefix_len - tail_start
    tail_len = _round_up(first + num_queries)
    num_rows = _round_up(num_queries)
    rows = q
    if tail_len != num_queries:
        rows = q.new_zeros(max(tail_len, first + num_rows), *q.shape[1:])
        rows[first : first + num_queries] = q
    k = _gather(k_cache, block_table, context_len, tail_start + tail_len)
    v = _gather(v_cache, block_table, context_len, tail_start + tail_len)

    tail = attend(rows[:tail_len], k[tail_start:], v[tail_start:], scale, True)
    merged = tail.rows(first, first + num_queries)
    for start, end in cut_prefix(tail_start):
        piece = attend(rows[first : first + num_rows], k[start:end], v[start:end], scale, False)
        merged = merge(merged, piece.rows(0, num_queries))
    return merged.out.to(q.dtype)


def cut_prefix(num_tokens: int) -> Iterator[tuple[int, int]]:
    """Cut [0, num_tokens), a multiple of SHAPE_STEP, into pieces of 2^k steps, longest first."""
    start = 0
    while start < num_tokens:
        steps = (num_tokens - start) // SHAPE_STEP
        end = start + SHAPE_STEP * (1 << (steps.bit_length() - 1))
        yield start, end
        start = end


def _round_up(num_tokens: int) -> int:
    return -(-num_tokens // SHAPE_STEP) * SHAPE_STEP


def _gather(cache: Tensor, block_table: Tensor, context_len: int, padded_len: int) -> Tensor:
    """Copy a context out of the cache, zeros after it: [padded_len, num_kv_heads, head_dim].

    Zeros, since what no query sees still meets a weight of 0, and 0 x NaN is NaN.
    """
    block_size = cache.shape[1]
    num_blocks = -(-context_len // block_size)
    blocks = cache.new_empty(-(-padded_len // block_size), *cache.shape[1:])
    # As eight-byte elements: fewer and wider accesses than by the cache's dtype.
    table = block_table[:num_blocks]
    torch.index_select(cache.view(torch.int64), 0, table, out=blocks[:num_blocks].view(torch.int64))
    tokens = blocks.flatten(0, 1)
    tokens[context_len:].zero_()
    return tokens[:padded_len]


def merge(first: Partial, second: Partial) -> Partial:
    """Combine attention over two disjoint parts of a context, as if it had been one, in float32.

    Source: the identity behind Flash-Decoding and cascade inference.
    """
    weight = torch.sigmoid(first.lse - second.lse)[..., None]
    out = torch.lerp(second.out.float(), first.out.float(), weight)
    return Partial(out, torch.logaddexp(first.lse, second.lse))


def attend_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> Partial:
    """Attend by cuDNN's fused kernel, grouped heads not repeated."""
    try:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            None,
            True,  # compute_log_sumexp
            0.0,
            is_causal,
            scale=scale,
        )
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        raise RefusedError(
            f"cuDNN refuses q {list(q.shape)}, k {list(k.shape)} {q.dtype}: {error}"
        ) from error
    return Partial(out[0].transpose(0, 1), lse.reshape(q.shape[1], q.shape[0]).t())


def attend_torch(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> Partial:
    """Attend in plain torch, float32 inside: the same contract where cuDNN is not."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.float().transpose(0, 1) @ keys.transpose(1, 2) * scale  # [Hq, n, m]
    if is_causal:
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    out = torch.softmax(scores, -1) @ values
    return Partial(out.transpose(0, 1).to(q.dtype), torch.logsumexp(scores, -1).t())
