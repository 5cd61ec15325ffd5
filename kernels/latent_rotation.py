"""Triton kernel between the products and the attention of latent attention (MLA).

Callers go through `tieredkv.kernels.latents`, which checks the tensors; this module does not.
Reference: `tieredkv.kernels.reference.rotate_and_store_latents`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (a kernel's arguments have no Python types)

import triton
import triton.language as tl
from torch import Tensor

from tieredkv.kernels.checks import Rope
from tieredkv.kernels.partition import Latent

HEAD_TILE = 16
"""Heads that one program rotates."""


@triton.jit
def _rotate(
    source, target, cos, sin, pair, mask, HALF_DIM: tl.constexpr, READS_PAIRS: tl.constexpr,
    WRITES_PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate rows of HALF_DIM pairs in float32; source and target point at the rows."""
    if READS_PAIRS:
        low = tl.load(source + 2 * pair, mask, other=0.0)
        high = tl.load(source + 2 * pair + 1, mask, other=0.0)
    else:
        low = tl.load(source + pair, mask, other=0.0)
        high = tl.load(source + HALF_DIM + pair, mask, other=0.0)
    exact_low, exact_high = low.to(tl.float32), high.to(tl.float32)
    turned_low = (exact_low * cos - exact_high * sin).to(low.dtype)
    turned_high = (exact_high * cos + exact_low * sin).to(low.dtype)
    if WRITES_PAIRS:
        tl.store(target + 2 * pair, turned_low, mask)
        tl.store(target + 2 * pair + 1, turned_high, mask)
    else:
        tl.store(target + pair, turned_low, mask)
        tl.store(target + HALF_DIM + pair, turned_high, mask)


@triton.jit
def _rotate_and_store_latents_kernel(
    q_ptr, stored_ptr, norm_ptr, cos_ptr, sin_ptr, slot_mapping_ptr, out_ptr, cache_ptr, eps,
    q_stride_token, stored_stride_token, angle_stride_token, angle_stride_pair, cache_stride_block,
    cache_stride_token, BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_TILE: tl.constexpr,
    QUERY_DIM: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr, HALF_DIM: tl.constexpr,
    HALF_TILE: tl.constexpr, READS_PAIRS: tl.constexpr, WRITES_PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate HEAD_TILE queries of a token, or norm, rotate and store its latent.

    Grid: (num_tokens, 1 + ceil(NUM_HEADS / HEAD_TILE)); the first program of a token stores, unless
    the token's slot is negative. Masks: heads past the last, pairs past HALF_DIM, elements past
    RANK. Bytes moved: the rotated part of the queries and what is stored, each read and written.
    """
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_TILE)[None, :]
    is_pair = pair < HALF_DIM
    angle = token * angle_stride_token + pair * angle_stride_pair
    cos = tl.load(cos_ptr + angle, is_pair, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, is_pair, other=0.0).to(tl.float32)
    if tl.program_id(1) == 0:
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        if slot >= 0:
            source = stored_ptr + token * stored_stride_token
            target = cache_ptr + slot // BLOCK_SIZE * cache_stride_block
            target += slot % BLOCK_SIZE * cache_stride_token
            dim = tl.arange(0, RANK_TILE)
            is_dim = dim < RANK
            x = tl.load(source + dim, is_dim, other=0.0)
            exact = x.to(tl.float32)
            variance = tl.sum(exact * exact, axis=0) / RANK
            normed = (exact * tl.rsqrt(variance + eps)).to(x.dtype).to(tl.float32)
            weight = tl.load(norm_ptr + dim, is_dim, other=0.0).to(tl.float32)
            tl.store(target + dim, (normed * weight).to(x.dtype), is_dim)
            row = tl.zeros([1, 1], tl.int32) + RANK
            _rotate(
                source + row, target + row, cos, sin, pair, is_pair, HALF_DIM, READS_PAIRS,
                WRITES_PAIRS,
            )  # fmt: skip
    else:
        head = ((tl.program_id(1) - 1) * HEAD_TILE + tl.arange(0, HEAD_TILE))[:, None]
        source = q_ptr + token * q_stride_token + (head + 1) * QUERY_DIM - 2 * HALF_DIM
        target = out_ptr + (token * NUM_HEADS + head) * (2 * HALF_DIM)
        _rotate(
            source, target, cos, sin, pair, is_pair & (head < NUM_HEADS), HALF_DIM, READS_PAIRS,
            WRITES_PAIRS,
        )  # fmt: skip


def rotate_and_store_latents(
    q: Tensor,
    stored: Tensor,
    norm: Tensor,
    eps: float,
    rope: Rope,
    cache: Tensor,
    slot_mapping: Tensor,
    latent: Latent,
) -> Tensor:
    """Launch the kernel; same contract as `latents.rotate_and_store`."""
    num_tokens, num_heads = len(q), q.shape[1] // latent.query_dim
    out = q.new_empty(num_tokens, num_heads, latent.rope_dim)
    half_dim = latent.rope_dim // 2
    _rotate_and_store_latents_kernel[(num_tokens, 1 + triton.cdiv(num_heads, HEAD_TILE))](
        q, stored, norm, rope.cos, rope.sin, slot_mapping, out, cache, eps, q.stride(0),
        stored.stride(0), *rope.cos.stride(), *cache.stride()[:2], BLOCK_SIZE=cache.shape[1],
        NUM_HEADS=num_heads, HEAD_TILE=HEAD_TILE, QUERY_DIM=latent.query_dim, RANK=latent.rank,
        RANK_TILE=triton.next_power_of_2(latent.rank), HALF_DIM=half_dim,
        HALF_TILE=triton.next_power_of_2(half_dim), READS_PAIRS=rope.reads_pairs,
        WRITES_PAIRS=rope.writes_pairs, num_warps=4,
    )  # fmt: skip
    return out
