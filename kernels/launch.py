"""Entry points of the attention kernels: check tensors on the host, then run Triton or torch.

Layout: the device pool is `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`; a
layer's `LayerCache` is `pool[:, layer, 0]` and `pool[:, layer, 1]`, which are strided views. No
function reads a device tensor on the host unless its docstring says so, so that calls can be
captured in CUDA graphs. This module knows no requests, tiers or models.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tieredkv.errors import ShapeError
from tieredkv.kernels import checks, latent_products, partition, prefill_dense, reference
from tieredkv.kernels.checks import LayerCache, describe, triton_module
from tieredkv.kernels.partition import Batch, Heads, Span, Tiling

logger = logging.getLogger(__name__)

MAX_TRITON_HEAD_DIM = 512


def store_kv(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Write new keys and values into the paged cache, in place.

    Args:
        k: keys, [num_tokens, num_kv_heads, head_dim], the cache's dtype, contiguous in head_dim.
        v: values, as k.
        cache: of the layer.
        slot_mapping: [num_tokens] int32 or int64; `block_id * block_size + offset`, -1 skips a
            token. Slots must be distinct; they are not checked.

    Raises:
        ShapeError: the tensors disagree; checked on the host before launch.

    Source: PagedAttention, Kwon et al. 2023, section 5.1.
    """
    checks.check_cache(cache)
    if k.shape != v.shape or k.ndim != 3 or k.shape[1:] != cache.k.shape[2:]:
        raise ShapeError(
            f"k {describe(k)} and v {describe(v)} do not fit the cache {describe(cache.k)}"
        )
    if slot_mapping.shape != k.shape[:1]:
        what = f"slot_mapping {describe(slot_mapping)}"
        raise ShapeError(f"{what} must have one slot for each token of k {describe(k)}")
    checks.check_data("k", k, cache)
    checks.check_data("v", v, cache)
    checks.check_indices("slot_mapping", slot_mapping, cache)
    if not k.shape[0]:
        return
    is_triton = checks.use_triton(k.device)
    store = triton_module("store_kv").store_kv if is_triton else reference.store_kv
    store(k, v, cache, slot_mapping)


class Shares(NamedTuple):
    """The spans of a step, grouped by the kernel that attends them."""

    dense: list[Span]
    narrow: list[Span]
    wide: list[Span]
    products: list[Span]


def share_out(
    spans: Sequence[Span],
    heads: Heads,
    *,
    may_be_dense: bool = True,
    may_be_products: bool = True,
    window: int | None = None,
) -> Shares:
    """Assign each span, or each part of it, to the fastest kernel.

    The dense path takes long chunks, but no span whose window leaves a part of the context out.
    What it leaves of chunks of latent attention is attended as products behind a long context.

    Args:
        spans: of a step.
        heads: attention heads of the model.
        may_be_dense: whether the dense path may be used; not in a captured step of any lengths, as
            its launches depend on the spans.
        may_be_products: as may_be_dense, for the products of latent attention.
        window: positions that a query sees, or None for all.
    """
    dense, narrow, wide, products = [], [], [], []
    may_be_products &= heads.latent is not None and prefill_dense.is_available(heads)
    is_dense = may_be_dense and prefill_dense.is_available(heads)
    for span in spans:
        if span.query_len == 1:
            narrow.append(span)
            continue
        row, first_token, query_len, context_len = span
        is_whole = window is None or window >= context_len
        taken = prefill_dense.count_queries(query_len, context_len) if is_dense and is_whole else 0
        if taken:
            dense.append(Span(row, first_token, taken, context_len - query_len + taken))
        rest = Span(row, first_token + taken, query_len - taken, context_len)
        if may_be_products and latent_products.is_for(rest):
            products.append(rest)
        elif rest.query_len:
            wide.append(rest)
    return Shares(dense, narrow, wide, products)


def make_batch(
    block_tables: Tensor, spans: Sequence[Span], heads: Heads, window: int | None = None
) -> Batch:
    """Plan a step and upload the plan to new tensors; the engine reuses buffers instead.

    The plan is for layers with this window only.
    """
    if not checks.use_triton(heads.device):
        return Batch(block_tables, spans)
    shares = share_out(spans, heads, window=window)
    narrow = upload_plan(shares.narrow, partition.narrow_tiling(heads), heads.device, window)
    wide = upload_plan(shares.wide, partition.wide_tiling(heads), heads.device, window)
    return Batch(block_tables, spans, shares.dense, narrow, wide, shares.products)


def upload_plan(
    spans: Sequence[Span], tiling: Tiling, device: torch.device, window: int | None = None
) -> Tensor | None:
    """Plan some spans and upload the plan to a new tensor; None if there are no spans."""
    if not spans:
        return None
    num_ints = partition.size_ints(tiling, partition.count_tiles(tiling, spans))
    plan = np.zeros(num_ints, dtype=np.int32)
    partition.partition(spans, tiling, plan, window)
    return torch.from_numpy(plan).to(device)


def paged_attention(
    q: Tensor,
    cache: LayerCache,
    batch: Batch,
    scale: float,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend each request's queries, which are its last tokens, causally to its context.

    Query `i` of a span stands at position `p = context_len - query_len + i` and sees positions 0 to
    p, or max(0, p - window + 1) to p. The keys and values of the queries themselves must already be
    in the cache. No block is read that lies before the window of the span's first query, nor its
    entry in the block table: both may hold anything.

    Args:
        q: [num_tokens, num_heads, head_dim], the cache's dtype, contiguous in head_dim.
        cache: of the layer.
        batch: see `Batch`; its plans must be made for the same window.
        scale: factor on the scores, 1/sqrt(head_dim) in most models.
        window: positions that a query sees, its own included; None for all.
        sinks: [num_heads], a float dtype; a further score of each head that takes its share of the
            softmax and has no value, so a row's weights add up to less than 1. It is not scaled.

    Returns:
        [num_tokens, num_heads, head_dim] in q's dtype; tokens of no span get no defined output.

    Raises:
        ShapeError: the tensors disagree; checked on the host before launch.

    Source: sliding windows as in Mistral 7B, Jiang et al. 2023; sinks as in gpt-oss, OpenAI 2025.
    """
    checks.check_cache(cache)
    num_kv_heads, head_dim = cache.k.shape[2:]
    if q.ndim != 3 or q.shape[2] != head_dim or q.shape[1] % num_kv_heads or not q.shape[1]:
        raise ShapeError(f"q {describe(q)} does not fit the cache {describe(cache.k)}")
    checks.check_data("q", q, cache)
    if batch.block_tables.ndim != 2:
        raise ShapeError(f"block_tables {describe(batch.block_tables)} is not 2-dimensional")
    checks.check_indices("block_tables", batch.block_tables, cache)
    if window is not None and window < 1:
        raise ShapeError(f"window {window} is not positive")
    if sinks is not None:
        checks.check_sinks(sinks, q)
    if not checks.use_triton(q.device):
        _check_spans(q, cache, batch)
        return reference.paged_attention(q, cache, batch, scale, window, sinks)
    if head_dim > MAX_TRITON_HEAD_DIM:
        most = f"the kernels support at most {MAX_TRITON_HEAD_DIM}"
        raise ShapeError(f"head_dim {head_dim} is above the limit; {most}")
    out = q.new_empty(q.shape)
    heads = Heads(q.shape[1], num_kv_heads, head_dim, q.dtype, q.device)
    for span in batch.dense:
        chunk = slice(span.first_token, span.first_token + span.query_len)
        table = batch.block_tables[span.row]
        try:
            prefill_dense.attend_chunk(
                q[chunk], cache, table, span.context_len, scale, out[chunk], sinks
            )
        except prefill_dense.RefusedError as error:
            logger.warning("the paged kernel computes a chunk instead of cuDNN: %s", error)
            plan = upload_plan([span], partition.wide_tiling(heads), q.device, window)
            alone = Batch(batch.block_tables, [span], wide=plan)
            attended = paged_attention(q, cache, alone, scale, window=window, sinks=sinks)
            out[chunk] = attended[chunk]
    for plan, tiling in (
        (batch.narrow, partition.narrow_tiling(heads)),
        (batch.wide, partition.wide_tiling(heads)),
    ):
        if plan is not None:
            triton_module("paged_attention").paged_attention(
                q, cache, batch.block_tables, plan, tiling, scale, out, window, sinks
            )
    return out


def _check_spans(q: Tensor, cache: LayerCache, batch: Batch) -> None:
    num_rows, max_blocks = batch.block_tables.shape
    for span in batch.spans:
        if not (
            0 <= span.row < num_rows
            and 0 <= span.first_token <= span.first_token + span.query_len <= q.shape[0]
            and span.query_len <= span.context_len <= max_blocks * cache.k.shape[1]
        ):
            raise ShapeError(
                f"{span} does not lie within {q.shape[0]} queries and block_tables "
                f"{list(batch.block_tables.shape)}"
            )
