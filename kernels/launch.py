"""The kernels' front door: checks tensors on the host, then picks Triton or the torch reference.

Layout: the device pool is `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`; a
layer's `k_cache = pool[:, layer, 0]` and `v_cache = pool[:, layer, 1]` are strided views
`[num_blocks, block_size, num_kv_heads, head_dim]`. Nothing here reads a device tensor on the host
unless its docstring says so, so that calls can be captured in CUDA graphs. It knows no requests,
tiers or models.
"""

import itertools
import logging
from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from tieredkv.errors import ShapeError
from tieredkv.kernels import prefill_dense, reference
from tieredkv.kernels.checks import Backend, use_triton
from tieredkv.kernels.checks import check_cache as _check_cache
from tieredkv.kernels.checks import check_data as _check_data
from tieredkv.kernels.checks import check_indices as _check_indices
from tieredkv.kernels.checks import describe as _describe
from tieredkv.kernels.checks import triton_module as _triton

logger = logging.getLogger(__name__)

PrefillBackend = Literal["auto", "triton", "cudnn", "reference"]
MAX_TRITON_HEAD_DIM = 256


class Span(NamedTuple):
    """One request's lengths, where the host knows them: of its chunk, and with all before it."""

    query_len: int
    context_len: int


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """Write new keys and values into the paged cache, in place.

    Args:
        k: [num_tokens, num_kv_heads, head_dim], the cache's dtype, contiguous in head_dim.
        v: as k.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        v_cache: as k_cache, with equal strides.
        slot_mapping: [num_tokens] int32 or int64; `block_id * block_size + offset`, -1 skips a
            token. Slots must be distinct; they are not checked.
        backend: `auto` is Triton for CUDA tensors and the reference elsewhere.

    Raises:
        ShapeError: the tensors disagree; checked on the host before launch.

    Source: PagedAttention, Kwon et al. 2023, section 5.1.
    """
    _check_cache(k_cache, v_cache)
    if k.shape != v.shape or k.ndim != 3 or k.shape[1:] != k_cache.shape[2:]:
        raise ShapeError(
            f"k {_describe(k)} and v {_describe(v)} do not fit the cache {_describe(k_cache)}"
        )
    if slot_mapping.shape != k.shape[:1]:
        raise ShapeError(f"slot_mapping {_describe(slot_mapping)} for k {_describe(k)}")
    _check_data("k", k, k_cache)
    _check_data("v", v, k_cache)
    _check_indices("slot_mapping", slot_mapping, k_cache)
    if not k.shape[0]:
        return
    store = _triton("store_kv").store_kv if _use_triton(backend, k) else reference.store_kv
    store(k, v, k_cache, v_cache, slot_mapping)


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    max_context_len: int,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Attend one query per request to all of its context, which includes the query's own token.

    Args:
        q: [num_requests, num_heads, head_dim], the cache's dtype, contiguous in head_dim.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        v_cache: as k_cache, with equal strides.
        block_tables: [num_requests, max_blocks] int32; entries past the context are not read.
        context_lens: [num_requests] int32; 0 marks a padding row, whose output is 0.
        scale: factor on the scores, 1/sqrt(head_dim) in most models.
        max_context_len: no context is longer; it sizes the grid, a larger bound is only slower.
        backend: `auto` is Triton for CUDA tensors and the reference elsewhere.

    Returns:
        [num_requests, num_heads, head_dim] in q's dtype.

    Raises:
        ShapeError: the tensors disagree; checked on the host before launch.

    Source: Flash-Decoding, Dao et al. 2023.
    """
    _check_attention(q, k_cache, v_cache, block_tables, context_lens, max_context_len)
    if block_tables.shape[0] != q.shape[0]:
        raise ShapeError(f"block_tables {_describe(block_tables)} for {q.shape[0]} queries")
    if not q.shape[0]:
        return q.new_empty(q.shape)
    arguments = (q, k_cache, v_cache, block_tables, context_lens, scale, max_context_len)
    if not _use_triton(backend, q):
        return reference.paged_decode_attention(*arguments)
    out = q.new_empty(q.shape)
    _triton("decode_attention").paged_decode_attention(*arguments, out)
    return out


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start_lens: Tensor,
    context_lens: Tensor,
    scale: float,
    max_query_len: int,
    max_context_len: int,
    *,
    spans: Sequence[Span] | None = None,
    backend: PrefillBackend = "auto",
) -> Tensor:
    """Attend each request's chunk of queries causally to its context, the chunk included.

    Query `i` of request `r` stands at position `context_lens[r] - query_len + i` and sees
    positions 0 to its own. Chunk and context must already be in the cache.

    Args:
        q: [num_tokens, num_heads, head_dim], the requests' chunks one after the other, the
            cache's dtype, contiguous in head_dim.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        v_cache: as k_cache, with equal strides.
        block_tables: [num_requests, max_blocks] int32; entries past the context are not read.
        query_start_lens: [num_requests + 1] int32, from 0; a request without queries is skipped
            and tokens past the last entry get no defined output (padding of a CUDA graph).
        context_lens: [num_requests] int32.
        scale: factor on the scores, 1/sqrt(head_dim) in most models.
        max_query_len: no chunk is longer; it sizes the grid, a larger bound is only slower.
        max_context_len: no context is longer; likewise.
        spans: the requests' exact lengths, where the host knows them; without them there is no
            dense path. They must agree with the tensors, which are not read to check it.
        backend: `triton`; `cudnn`, the dense path of `tieredkv.kernels.prefill_dense`; or
            `reference`. `auto` is the reference off CUDA; on CUDA the dense path for chunks for
            which it is faster, outside of graph capture, and Triton for the others.

    Returns:
        [num_tokens, num_heads, head_dim] in q's dtype.

    Raises:
        ShapeError: the tensors disagree; checked on the host before launch.

    Source: FlashAttention-2, Dao 2023.
    """
    _check_attention(q, k_cache, v_cache, block_tables, context_lens, max_context_len)
    num_requests = block_tables.shape[0]
    if query_start_lens.shape != (num_requests + 1,):
        raise ShapeError(
            f"query_start_lens {_describe(query_start_lens)} for {num_requests} requests"
        )
    _check_indices("query_start_lens", query_start_lens, k_cache)
    if max_query_len < 1 and q.shape[0]:
        raise ShapeError(f"max_query_len {max_query_len} is below 1")
    if spans is not None and not (
        len(spans) == num_requests
        and sum(span.query_len for span in spans) <= q.shape[0]
        and all(0 <= span.query_len <= max_query_len for span in spans)
        and all(span.query_len <= span.context_len <= max_context_len for span in spans)
    ):
        raise ShapeError(
            f"spans {spans} for {num_requests} requests and {q.shape[0]} tokens of at most "
            f"{max_query_len} in {max_context_len}"
        )
    if not q.shape[0] or not num_requests:
        return q.new_empty(q.shape)
    paged = _Paged(q, k_cache, v_cache, block_tables, query_start_lens, context_lens, scale)
    wants_dense = backend == "cudnn" or (backend == "auto" and prefill_dense.is_available(q))
    if wants_dense and spans is not None:
        return _prefill_by_span(paged, spans, backend)
    if backend == "cudnn":
        raise ShapeError("backend `cudnn` needs `spans`: the host must know the lengths")
    if not _use_triton(backend, q):
        return reference.paged_prefill_attention(*paged, max_query_len, max_context_len)
    out = q.new_empty(q.shape)
    _triton("prefill_attention").paged_prefill_attention(
        *paged, max_query_len, max_context_len, out
    )
    return out


class _Paged(NamedTuple):
    """What every prefill backend is given, in the order of its signature."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    query_start_lens: Tensor
    context_lens: Tensor
    scale: float


def _prefill_by_span(paged: _Paged, spans: Sequence[Span], backend: PrefillBackend) -> Tensor:
    """Send each chunk to the dense path or to Triton, neighbours of one kind in one launch."""
    out = paged.q.new_empty(paged.q.shape)
    is_dense = [backend == "cudnn" or s.query_len >= prefill_dense.MIN_QUERY_TOKENS for s in spans]
    starts = list(itertools.accumulate((s.query_len for s in spans), initial=0))
    for row, span in enumerate(spans):
        if is_dense[row] and span.query_len:
            chunk = slice(starts[row], starts[row + 1])
            try:
                out[chunk] = prefill_dense.attend_request(
                    paged.q[chunk],
                    paged.k_cache,
                    paged.v_cache,
                    paged.block_tables[row],
                    span.context_len,
                    paged.scale,
                )
            except prefill_dense.RefusedError as error:
                if backend == "cudnn":
                    raise ShapeError(str(error)) from error
                is_dense[row] = False
                logger.debug("prefill attention in Triton, not cuDNN: %s", error)
    for dense, group in itertools.groupby(range(len(spans)), key=is_dense.__getitem__):
        rows = list(group)
        first, last = rows[0], rows[-1]
        tokens = slice(starts[first], starts[last + 1])
        if dense or tokens.start == tokens.stop:
            continue
        query_start_lens = paged.query_start_lens[first : last + 2]
        _triton("prefill_attention").paged_prefill_attention(
            paged.q[tokens],
            paged.k_cache,
            paged.v_cache,
            paged.block_tables[first : last + 1],
            query_start_lens - tokens.start if tokens.start else query_start_lens,
            paged.context_lens[first : last + 1],
            paged.scale,
            max(spans[row].query_len for row in rows),
            max(spans[row].context_len for row in rows),
            out[tokens],
        )
    return out


def _use_triton(backend: str, q: Tensor) -> bool:
    if not use_triton(backend, q):
        return False
    if q.shape[2] > MAX_TRITON_HEAD_DIM:
        raise ShapeError(
            f"head_dim {q.shape[2]} is above {MAX_TRITON_HEAD_DIM}, the most that the kernels take"
        )
    return True


def _check_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context_len: int,
) -> None:
    _check_cache(k_cache, v_cache)
    num_kv_heads, head_dim = k_cache.shape[2:]
    if q.ndim != 3 or q.shape[2] != head_dim or q.shape[1] % num_kv_heads or not q.shape[1]:
        raise ShapeError(f"q {_describe(q)} does not fit the cache {_describe(k_cache)}")
    if block_tables.ndim != 2 or context_lens.shape != block_tables.shape[:1]:
        raise ShapeError(
            f"block_tables {_describe(block_tables)} and context_lens {_describe(context_lens)}"
        )
    capacity = block_tables.shape[1] * k_cache.shape[1]
    if not 0 <= max_context_len <= capacity:
        raise ShapeError(
            f"max_context_len {max_context_len} is outside of 0 to {capacity}, what block_tables "
            "hold"
        )
    _check_data("q", q, k_cache)
    _check_indices("block_tables", block_tables, k_cache)
    _check_indices("context_lens", context_lens, k_cache)
