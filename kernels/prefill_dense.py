"""Prefill attention of one request over gathered keys and values, for long chunks on a GPU.

The fused attention of cuDNN is faster than any kernel over paged memory, even with the gathering.
But it supports only "causal from the first token" and "no mask", and it takes about 30 ms to build
a plan for each new pair of lengths. So a chunk is cut into squares of 2^k steps, and the context
before each square is cut into pieces of 2^j steps:
```
positions  0 ............................. chunk ............................................. end
queries                          | square 0, causal       | square 1, causal | fewer than STEP
keys of 1  | piece    | piece    | piece                  | square 1         | are not taken
```
Pieces are attended without a mask, and the results are merged by log-sum-exp. So a bounded set of
plans, all made before the first request, serves every length. If a chunk does not begin at a
multiple of STEP, the first square begins at the multiple before it, and its rows before the chunk
are idle. Sinks are merged as one more part, whose lse is the sink and whose output is 0. Windows
are not supported: cuDNN would compute whole squares. Heads of more dims than cuDNN supports are cut
into smaller squares, which `prefill_products` attends. The host must know the lengths. This module
knows no batches.
"""

import functools
import logging
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tieredkv.kernels.checks import LayerCache, triton_module
from tieredkv.kernels.partition import Heads

logger = logging.getLogger(__name__)

STEP = 512
"""Lengths given to cuDNN are STEP times a power of two."""

MAX_SQUARE_STEPS = 64

MAX_PRODUCT_STEPS = 2
"""Steps of the longest square of `prefill_products`; its memory grows with queries times keys."""

MIN_QUERY_TOKENS = 1024
"""Shortest chunk of the dense path. The paged kernel is used for shorter ones, which would be
mostly small squares, because it shares their context among programs."""

MAX_MADE_BYTES = 256 << 20
"""Most bytes of keys and values that are made of latents at a time."""

DTYPES = (torch.bfloat16, torch.float16)
MAX_CUDNN_DIM = 256
MAX_PRODUCT_DIM = 512


class RefusedError(RuntimeError):
    """The dense operator does not support these shapes; the paged kernel does."""


class Partial(NamedTuple):
    """Attention over a part of the context.

    Attributes:
        out: [num_queries, num_heads, head_dim], normalised within the part.
        lse: [num_heads, num_queries] float32, natural log-sum-exp of the part's scores.
    """

    out: Tensor
    lse: Tensor


@functools.cache
def is_available(heads: Heads) -> bool:
    """Return whether the dense path works on this machine; the first call tries it."""
    head_dim, most = heads.head_dim, MAX_PRODUCT_DIM
    if latent := heads.latent:
        head_dim, most = max(latent.query_dim, latent.value_dim), MAX_CUDNN_DIM
    if heads.device.type != "cuda" or heads.dtype not in DTYPES or head_dim > most:
        return False
    try:
        _try_shape(heads, STEP, STEP, is_causal=True)
    except RefusedError as error:
        logger.info("the paged kernel computes long chunks instead of cuDNN: %s", error)
        return False
    return True


def _max_square_steps(head_dim: int) -> int:
    return MAX_SQUARE_STEPS if head_dim <= MAX_CUDNN_DIM else MAX_PRODUCT_STEPS


def count_queries(query_len: int, context_len: int) -> int:
    """Return how many of a chunk's queries, from the first, the dense path takes."""
    if query_len < MIN_QUERY_TOKENS:
        return 0
    return max(0, context_len // STEP * STEP - (context_len - query_len))


def max_made_steps(heads: Heads) -> int:
    """Return the steps of the longest piece whose keys and values are made of latents."""
    latent = heads.latent
    assert latent is not None, "heads without latent attention"
    token_bytes = heads.num_heads * (latent.query_dim + latent.value_dim) * heads.dtype.itemsize
    steps = max(1, MAX_MADE_BYTES // (token_bytes * STEP))
    return min(MAX_SQUARE_STEPS, 1 << steps.bit_length() - 1)


def cut(first: int, end: int, *, max_steps: int) -> Iterator[tuple[int, int]]:
    """Cut [first, end), both multiples of STEP, into pieces of 2^k steps, the longest first."""
    while first < end:
        steps = min(max_steps, (end - first) // STEP)
        stop = first + STEP * (1 << (steps.bit_length() - 1))
        yield first, stop
        first = stop


def warm_up(
    heads: Heads, *, max_query_len: int, max_context_len: int, sinks: Tensor | None = None
) -> Iterator[float]:
    """Build the plans of all shapes up to the given lengths; yield the fraction done.

    Args:
        heads: attention heads of the model.
        max_query_len: queries of the longest chunk.
        max_context_len: tokens of the longest context.
        sinks: those of one layer, if the model has any.
    """
    longest = min(max_query_len + STEP, MAX_SQUARE_STEPS * STEP, max_context_len)
    squares = [STEP << k for k in range(20) if STEP << k <= longest]
    pieces = [STEP << k for k in range(20) if STEP << k < max_context_len]
    if heads.latent is not None:
        most = STEP * max_made_steps(heads)
        squares, pieces = ([n for n in lengths if n <= most] for lengths in (squares, pieces))
    elif heads.head_dim > MAX_CUDNN_DIM:  # one kernel serves all lengths
        squares, pieces = [STEP], []
    shapes = [(n, n, True) for n in squares] + [(n, m, False) for n in squares for m in pieces]
    for done, (num_queries, num_keys, is_causal) in enumerate(shapes, 1):
        _try_shape(heads, num_queries, num_keys, is_causal=is_causal)
        yield done / len(shapes)
    _merge_some(heads, sinks)


def _merge_some(heads: Heads, sinks: Tensor | None) -> None:
    """Compile the kernels that merge parts."""
    kernels = triton_module("dense_kernels")
    latent = heads.latent
    lse = torch.zeros(heads.num_heads, STEP, device=heads.device)
    # Results of absorbed queries, which `latent_products` merges, have the dims of a latent.
    for dim in {heads.head_dim} if latent is None else {latent.value_dim, latent.rank}:
        out = torch.zeros(STEP, heads.num_heads, dim, dtype=heads.dtype, device=heads.device)
        # Sinks are in the first launch only, so that launches of later parts are another kernel.
        for num_parts in range(1 if sinks is not None else 2, 2 * kernels.MAX_PARTS):
            kernels.merge_parts([Partial(out, lse)] * num_parts, torch.empty_like(out), sinks)


def _try_shape(heads: Heads, num_queries: int, num_keys: int, *, is_causal: bool) -> None:
    like = torch.empty(0, dtype=heads.dtype, device=heads.device)
    if latent := heads.latent:  # the values are a view of what is made of latents
        made = like.new_zeros(num_keys, heads.num_heads, latent.key_dim + latent.value_dim)
        q = like.new_zeros(num_queries, heads.num_heads, latent.query_dim)
        k = like.new_zeros(num_keys, heads.num_heads, latent.query_dim)
        attend_cudnn(q, k, made[..., latent.key_dim :], 1.0, is_causal)
        return
    q = like.new_zeros(num_queries, heads.num_heads, heads.head_dim)
    k = like.new_zeros(num_keys, heads.num_kv_heads, heads.head_dim)
    if heads.head_dim > MAX_CUDNN_DIM:
        triton_module("prefill_products").attend_square(q, k, k, 1.0)
    else:
        attend_cudnn(q, k, k, 1.0, is_causal)


def attend_chunk(
    q: Tensor,
    cache: LayerCache,
    block_table: Tensor,
    context_len: int,
    scale: float,
    out: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """Attend a chunk's queries, the last tokens of the context, causally to the whole context.

    Bytes moved besides the attention: the context's keys and values are read and written once,
    and the partial results of every square are written and read once.

    Args:
        q: [num_queries, num_heads, head_dim]; `count_queries` gives their number.
        cache: keys and values of the layer.
        block_table: [max_blocks].
        context_len: tokens of the context with these queries, a multiple of STEP.
        scale: factor on the scores.
        out: the result, shaped as q, contiguous.
        sinks: [num_heads], one more score for each head, without a value.

    Raises:
        RefusedError: the operator does not support these shapes on this machine.
    """
    prefix_len = context_len - q.shape[0]
    begin = prefix_len // STEP * STEP
    rows = q
    if begin != prefix_len:
        rows = q.new_zeros(context_len - begin, *q.shape[1:])
        rows[prefix_len - begin :] = q
    k, v = _gather(cache, block_table, context_len)
    for first, end in cut(begin, context_len, max_steps=_max_square_steps(q.shape[2])):
        parts = _attend_square(rows[first - begin : end - begin], k[:end], v[:end], scale)
        idle = max(0, prefix_len - first)
        real = slice(idle, end - first)
        parts = [Partial(part_out[real], lse[:, real]) for part_out, lse in parts]
        target = out[first + idle - prefix_len : end - prefix_len]
        if len(parts) == 1 and sinks is None:
            target.copy_(parts[0].out)
        else:
            triton_module("dense_kernels").merge_parts(parts, target, sinks)


def _attend_square(q: Tensor, k: Tensor, v: Tensor, scale: float) -> list[Partial]:
    """Attend queries, which are the last tokens of the context, to pieces of the whole context."""
    if q.shape[2] > MAX_CUDNN_DIM:
        parts: list[Partial] = triton_module("prefill_products").attend_square(q, k, v, scale)
        return parts
    first = len(k) - len(q)
    parts = [attend_cudnn(q, k[first:], v[first:], scale, True)]
    for start, stop in cut(0, first, max_steps=first // STEP):
        parts.append(attend_cudnn(q, k[start:stop], v[start:stop], scale, False))
    return parts


def _gather(cache: LayerCache, block_table: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Copy the first tokens of a context out of the cache: [num_tokens, num_kv_heads, head_dim]."""
    num_blocks = -(-num_tokens // cache.k.shape[1])
    gathered = cache.k.new_empty(2, num_blocks, *cache.k.shape[1:])
    triton_module("dense_kernels").gather_blocks(cache, block_table[:num_blocks], gathered)
    k, v = gathered.flatten(1, 2)[:, :num_tokens]
    return k, v


def attend_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> Partial:
    """Attend with cuDNN's fused kernel; causal only if q and k are of equal length."""
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
    return Partial(out[0].transpose(0, 1).contiguous(), lse.reshape(q.shape[1], q.shape[0]))
