"""Latent attention of some queries to a long context: absorbed, as two matrix products.

`latent_attention` reads the context once for every few queries, in a program that holds their sums.
With more queries and a long context, plain products over a gathered copy of the context are faster,
though they write a weight for each pair of a query and a token. `prefill_products` computes them;
all heads share the keys. The host must know the lengths. This module knows no batches.
"""

from torch import Tensor

from tieredkv.kernels import latent_prefill
from tieredkv.kernels.checks import triton_module
from tieredkv.kernels.partition import Span

MIN_QUERY_TOKENS = 16
MIN_CONTEXT_TOKENS = 4096
"""Fewest queries, and the shortest context, that are attended as products."""


def is_for(span: Span) -> bool:
    """Return whether products are faster for a span than the kernel over paged latents."""
    return span.query_len >= MIN_QUERY_TOKENS and span.context_len >= MIN_CONTEXT_TOKENS


def attend(
    q: Tensor, cache: Tensor, block_table: Tensor, context_len: int, scale: float, rank: int
) -> Tensor:
    """Attend absorbed queries, the last tokens of the context, causally to the whole context.

    Bytes moved besides the products: what is stored for the context is read and written once.

    Args:
        q: [num_queries, num_heads, rank + rope_dim], contiguous.
        cache: [num_blocks, block_size, rank + rope_dim], of the layer.
        block_table: [max_blocks].
        context_len: tokens of the context with these queries.
        scale: factor on the scores.
        rank: elements of a latent.

    Returns:
        [num_queries, num_heads, rank].
    """
    k = latent_prefill.gather(cache, block_table, 0, context_len)[:, None]
    parts = triton_module("prefill_products").attend_square(q, k, k[..., :rank], scale)
    summed: Tensor = parts[0].out
    if len(parts) > 1:
        triton_module("dense_kernels").merge_parts(parts, summed)
    return summed
