"""Entry points of latent attention (MLA): check tensors on the host, then run Triton or torch.

`partition.Latent` says what is stored and how it is attended to. Single queries and short chunks
are absorbed: by the paged kernel, or behind a long context as two products. Long chunks are
expanded, since that takes fewer operations. On a GPU those are the chunks of the dense path: it
takes none below 1,024 queries, and for all known models it pays to expand from a few hundred on.
`launch.share_out` chooses. No function reads a device tensor on the host, so that calls can be
captured in CUDA graphs. This module knows no requests, tiers or models.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tieredkv.errors import ShapeError
from tieredkv.kernels import checks, latent_prefill, latent_products, launch, partition, reference
from tieredkv.kernels.checks import LayerCache, Rope, describe, triton_module
from tieredkv.kernels.partition import Batch, Heads, Span
from tieredkv.kernels.prefill_dense import RefusedError

logger = logging.getLogger(__name__)


def store_latents(latent: Tensor, rotated: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write new latents and their rotated parts into the paged cache, in place.

    Args:
        latent: [num_tokens, rank], the cache's dtype, contiguous in its last dimension.
        rotated: [num_tokens, rope_dim], as latent.
        cache: [num_blocks, block_size, rank + rope_dim], of the layer.
        slot_mapping: as in `launch.store_kv`.

    Raises:
        ShapeError: the tensors disagree; checked on the host before launch.
    """
    whole = _check_cache(cache)
    num_tokens, num_stored = len(latent), latent.shape[-1] + rotated.shape[-1]
    if latent.ndim != 2 or rotated.ndim != 2 or num_stored != cache.shape[2]:
        told = f"latent {describe(latent)} and rotated {describe(rotated)}"
        raise ShapeError(f"{told} do not fit the cache {describe(cache)}")
    if len(rotated) != num_tokens or slot_mapping.shape != (num_tokens,):
        told = f"rotated {describe(rotated)} and slot_mapping {describe(slot_mapping)}"
        raise ShapeError(f"{told} must be of the {num_tokens} tokens of latent")
    checks.check_data("latent", latent, whole)
    checks.check_data("rotated", rotated, whole)
    checks.check_indices("slot_mapping", slot_mapping, whole)
    if not num_tokens:
        return
    is_triton = checks.use_triton(latent.device)
    kernels = triton_module("latent_attention") if is_triton else reference
    kernels.store_latents(latent, rotated, cache, slot_mapping)


def rotate_and_store(
    q: Tensor,
    stored: Tensor,
    norm: Tensor,
    eps: float,
    rope: Rope,
    cache: Tensor,
    slot_mapping: Tensor,
    heads: Heads,
) -> Tensor:
    """Rotate queries, and norm, rotate and write what is stored of the same tokens, in place.

    Args:
        q: [num_tokens, num_heads * query_dim], not rotated yet; the cache's dtype, contiguous in
            its last dimension.
        stored: [num_tokens, rank + rope_dim], neither normed nor rotated yet; as q.
        norm: [rank], the cache's dtype, contiguous: weight of the RMS norm of latents.
        eps: of the norm.
        rope: see `Rope`; of the same tokens.
        cache: [num_blocks, block_size, rank + rope_dim], of the layer.
        slot_mapping: as in `launch.store_kv`.
        heads: of the layer, with `latent`.

    Returns:
        The rotated parts of the queries, [num_tokens, num_heads, rope_dim], contiguous.

    Raises:
        ShapeError: the tensors disagree; checked on the host before launch.
    """
    whole, latent, num_tokens = _check_cache(cache), heads.latent, len(q)
    assert latent is not None, "heads without latent attention"
    shapes = {
        "q": (q, (num_tokens, heads.num_heads * latent.query_dim)),
        "stored": (stored, (num_tokens, latent.num_stored)),
        "norm": (norm, (latent.rank,)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != shape:
            what = f"{name} {describe(tensor)} does not fit {num_tokens} tokens"
            raise ShapeError(f"{what}, {heads.num_heads} heads of {latent}")
        checks.check_data(name, tensor, whole)
    for name, angles in (("cos", rope.cos), ("sin", rope.sin)):
        if angles.shape != (num_tokens, latent.rope_dim // 2):
            raise ShapeError(f"{name} {describe(angles)} does not fit q {describe(q)} and {latent}")
    if slot_mapping.shape != (num_tokens,):
        raise ShapeError(f"slot_mapping {describe(slot_mapping)} does not fit q {describe(q)}")
    checks.check_indices("slot_mapping", slot_mapping, whole)
    if not num_tokens:
        return q.new_empty(0, heads.num_heads, latent.rope_dim)
    is_triton = checks.use_triton(q.device)
    kernels = triton_module("latent_rotation") if is_triton else reference
    rotate: Callable[..., Tensor] = kernels.rotate_and_store_latents
    return rotate(q, stored, norm, eps, rope, cache, slot_mapping, latent)


def latent_attention(
    plain: Tensor,
    rotated: Tensor,
    cache: Tensor,
    matrix: Tensor,
    batch: Batch,
    scale: float,
    heads: Heads,
) -> Tensor:
    """Attend each request's queries, which are its last tokens, causally to its context.

    The latents of the queries themselves must already be in the cache. The matrix is read where it
    lies: its halves are views, and no copy of the weights is made.

    Args:
        plain: [num_tokens, num_heads, key_dim], the part of queries that is not rotated; the
            cache's dtype, contiguous in its last dimension.
        rotated: [num_tokens, num_heads, rope_dim], the other part, as plain.
        cache: [num_blocks, block_size, rank + rope_dim], of the layer.
        matrix: [num_heads * (key_dim + value_dim), rank], contiguous; the rows of a head make its
            key of a latent, then its value.
        batch: see `Batch`; its plans must be made for these heads.
        scale: factor on the scores.
        heads: of the layer, with `latent`.

    Returns:
        [num_tokens, num_heads, value_dim] in the cache's dtype; tokens of no span get no defined
        output.

    Raises:
        ShapeError: the tensors disagree; checked on the host before launch.

    Source: DeepSeek-V2, Liu et al. 2024, section 2.1.
    """
    whole, latent = _check_cache(cache), heads.latent
    assert latent is not None, "heads without latent attention"
    told = f"{heads.num_heads} heads of {latent}"
    num_tokens, num_heads = len(plain), heads.num_heads
    dims = latent.key_dim, latent.rope_dim
    for name, part, dim in zip(("plain", "rotated"), (plain, rotated), dims, strict=True):
        if part.shape != (num_tokens, num_heads, dim):
            raise ShapeError(f"{name} {describe(part)} does not fit {num_tokens} tokens, {told}")
        checks.check_data(name, part, whole)
    num_rows = heads.num_heads * (latent.key_dim + latent.value_dim)
    if matrix.shape != (num_rows, latent.rank) or not matrix.is_contiguous():
        what = f"matrix {describe(matrix)} does not fit {told}"
        raise ShapeError(f"{what}, or is not contiguous")
    if cache.shape[2] != latent.num_stored:
        raise ShapeError(f"cache {describe(cache)} does not fit {told}")
    checks.check_data("matrix", matrix, whole)
    checks.check_indices("block_tables", batch.block_tables, whole)
    weights = matrix.view(heads.num_heads, -1, latent.rank)
    if not checks.use_triton(plain.device):
        q = torch.cat([plain, rotated], dim=2)
        return reference.latent_attention(q, cache, weights, batch, scale, latent)
    out = plain.new_empty(num_tokens, num_heads, latent.value_dim)
    refused = list[Span]()
    for span in batch.dense:
        chunk = slice(span.first_token, span.first_token + span.query_len)
        table = batch.block_tables[span.row]
        q = torch.cat([plain[chunk], rotated[chunk]], dim=2)
        try:
            latent_prefill.attend_chunk(
                q, cache, matrix, table, span.context_len, scale, out[chunk], heads
            )
        except RefusedError as error:
            logger.warning("the paged kernel computes a chunk instead of cuDNN: %s", error)
            refused.append(span)
    if refused:
        plan = launch.upload_plan(refused, partition.wide_tiling(heads), plain.device)
        alone = Batch(batch.block_tables, refused, wide=plan)
        chunks = [slice(it.first_token, it.first_token + it.query_len) for it in refused]
        _attend_absorbed(plain, rotated, cache, weights, alone, chunks, scale, heads, out)
    rest = list(_between(batch.dense, num_tokens))
    _attend_absorbed(plain, rotated, cache, weights, batch, rest, scale, heads, out)
    return out


def _attend_absorbed(
    plain: Tensor,
    rotated: Tensor,
    cache: Tensor,
    weights: Tensor,
    batch: Batch,
    parts: Sequence[slice],
    scale: float,
    heads: Heads,
    out: Tensor,
) -> None:
    """Attend the queries of a batch that are not dense; all lie in some parts of the step."""
    tilings = partition.narrow_tiling(heads), partition.wide_tiling(heads)
    plans = list(zip((batch.narrow, batch.wide), tilings, strict=True))
    latent = heads.latent
    assert latent is not None, "heads without latent attention"
    to_key, to_value = weights.split([latent.key_dim, latent.value_dim], dim=1)
    if not parts:
        return
    # Heads come first in memory, as the products read and write them.
    absorbed = plain.new_empty(heads.num_heads, len(plain), latent.rank)
    summed = torch.empty_like(absorbed)
    for part in parts:
        torch.bmm(plain[part].transpose(0, 1), to_key, out=absorbed[:, part])
    for plan, tiling in plans:
        if plan is not None:
            triton_module("latent_attention").attend(
                absorbed.transpose(0, 1), rotated, cache, batch.block_tables, plan, tiling, scale,
                summed.transpose(0, 1),
            )  # fmt: skip
    for span in batch.products:
        chunk = slice(span.first_token, span.first_token + span.query_len)
        q = torch.cat([absorbed[:, chunk].transpose(0, 1), rotated[chunk]], dim=2)
        table = batch.block_tables[span.row]
        attended = latent_products.attend(q, cache, table, span.context_len, scale, latent.rank)
        summed[:, chunk] = attended.transpose(0, 1)
    for part in parts:
        out[part] = torch.bmm(summed[:, part], to_value.transpose(1, 2)).transpose(0, 1)


def _between(spans: Sequence[Span], num_tokens: int) -> Iterator[slice]:
    """Give the tokens of a step that no span has, as slices."""
    end = 0
    for span in sorted(spans, key=lambda it: it.first_token):
        if span.first_token > end:
            yield slice(end, span.first_token)
        end = span.first_token + span.query_len
    if end < num_tokens:
        yield slice(end, num_tokens)


def _check_cache(cache: Tensor) -> LayerCache:
    """Refuse a cache of latents that has not three dimensions; return it as that of one KV head."""
    if cache.ndim != 3:
        raise ShapeError(f"cache {describe(cache)} is not 3-dimensional")
    whole = LayerCache(cache[:, :, None], cache[:, :, None])
    checks.check_cache(whole)
    return whole
