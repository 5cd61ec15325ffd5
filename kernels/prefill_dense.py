"""Prefill attention of one request over gathered keys and values, for long chunks on a GPU.

The fused attention of cuDNN is faster than any kernel over paged memory, gathering included, but
knows only "causal from the first token" and "no mask". So a chunk over a cached prefix is two
calls, the chunk over itself and the chunk over the prefix, merged by their log-sum-exp. The host
must know the lengths; one plan is built for each new pair of them. It knows no batches.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tieredkv.kernels import reference

MIN_QUERY_TOKENS = 256
"""Shorter chunks leave multiprocessors idle here; the paged kernel splits their context."""

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


Attend = Callable[[Tensor, Tensor, Tensor, float, bool], Partial]
"""(q [n, Hq, D], k and v [m, Hkv, D], scale, is_causal) -> Partial; causal only where n = m."""


def attend_request(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_len: int,
    scale: float,
) -> Tensor:
    """Attend one request's chunk, the last tokens of its context, to the whole context.

    Bytes moved beside the attention itself: the context's keys and values once in and once out.

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
    attend = attend_cudnn if q.is_cuda else attend_torch
    k = reference.gather_context(k_cache, block_table, context_len)
    v = reference.gather_context(v_cache, block_table, context_len)
    prefix_len = context_len - q.shape[0]
    chunk = attend(q, k[prefix_len:], v[prefix_len:], scale, True)
    if prefix_len == 0:
        return chunk.out
    return merge(chunk, attend(q, k[:prefix_len], v[:prefix_len], scale, False))


def merge(first: Partial, second: Partial) -> Tensor:
    """Combine attention over two disjoint parts of a context, as if it had been one.

    Source: the identity behind Flash-Decoding and cascade inference; float32 inside.
    """
    weight = torch.sigmoid(first.lse - second.lse)[..., None]
    return torch.lerp(second.out.float(), first.out.float(), weight).to(first.out.dtype)


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
