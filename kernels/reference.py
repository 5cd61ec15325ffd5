"""The kernels in plain torch: what the Triton code must equal, and what the engine runs on a CPU.

Mathematics is float32 whatever the cache's dtype. Every request is computed alone, so that its
result does not depend on what else is in the batch. It knows no requests, tiers or backends;
callers go through `tieredkv.kernels.launch`, which checks shapes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tieredkv.kernels.partition import Batch


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write new keys and values into the paged cache, in place; see `launch.store_kv`."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_ids, offsets = slots // k_cache.shape[1], slots % k_cache.shape[1]
    k_cache[block_ids, offsets] = k[kept]
    v_cache[block_ids, offsets] = v[kept]


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, scale: float
) -> Tensor:
    """Attend each span's queries causally to its context; see `launch.paged_attention`."""
    out = q.new_zeros(q.shape)
    for row, start, query_len, context_len in batch.spans:
        if query_len:
            k = gather_context(k_cache, batch.block_tables[row], context_len)
            v = gather_context(v_cache, batch.block_tables[row], context_len)
            queries = q[start : start + query_len]
            attended = _attend(queries.float(), k.float(), v.float(), scale)
            out[start : start + query_len] = attended.to(q.dtype)
    return out


def gather_context(cache: Tensor, block_table: Tensor, context_len: int) -> Tensor:
    """Copy the first `context_len` tokens of a request out of the paged cache.

    Args:
        cache: [num_blocks, block_size, num_kv_heads, head_dim].
        block_table: [max_blocks]; entries past the context are not read.
        context_len: tokens to copy.

    Returns:
        [context_len, num_kv_heads, head_dim], a contiguous copy.
    """
    num_blocks = -(-context_len // cache.shape[1])
    return cache.index_select(0, block_table[:num_blocks]).flatten(0, 1)[:context_len]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """[n, Hq, D] queries, the last n of k's and v's [m, Hkv, D] positions -> [n, Hq, D]."""
    num_queries, num_heads, head_dim = q.shape
    context_len, num_kv_heads, _ = k.shape
    if num_queries == 1:  # a group's heads are the rows of one call: nothing to mask
        rows = q.reshape(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = F.scaled_dot_product_attention(
            rows, k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale=scale
        )
        return out.reshape(1, num_heads, head_dim)
    mask = None
    if num_queries < context_len:
        positions = torch.arange(context_len, device=q.device)
        mask = positions <= positions[context_len - num_queries :, None]
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
