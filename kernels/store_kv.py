"""Triton kernel that writes new keys and values into the paged cache.

Callers go through `tieredkv.kernels.launch`, which checks the tensors; this module does not.
Reference: `tieredkv.kernels.reference.store_kv`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (a kernel's arguments have no Python types)

import triton
import triton.language as tl
from torch import Tensor

from tieredkv.kernels.checks import LayerCache

TILE = 1024


@triton.jit
def _store_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, k_stride_token, k_stride_head,
    v_stride_token, v_stride_head, cache_stride_block, cache_stride_token, cache_stride_head,
    BLOCK_SIZE: tl.constexpr, NUM_ELEMENTS: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Copy one tile of one token's keys and values into its slot.

    Grid: (num_tokens, ceil(num_kv_heads * head_dim / TILE)). A program whose slot is negative
    returns at once; the last tile of a token is masked. Bytes moved: 2 reads and 2 writes of
    num_kv_heads * head_dim elements per token.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot < 0:
        return
    element = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = element < NUM_ELEMENTS
    head, dim = element // HEAD_DIM, element % HEAD_DIM
    k = tl.load(k_ptr + token * k_stride_token + head * k_stride_head + dim, mask=mask)
    v = tl.load(v_ptr + token * v_stride_token + head * v_stride_head + dim, mask=mask)
    target = (
        (slot // BLOCK_SIZE) * cache_stride_block
        + (slot % BLOCK_SIZE) * cache_stride_token
        + head * cache_stride_head
        + dim
    )
    tl.store(k_cache_ptr + target, k, mask=mask)
    tl.store(v_cache_ptr + target, v, mask=mask)


def store_kv(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Launch the kernel; same contract as `launch.store_kv`."""
    num_tokens, num_kv_heads, head_dim = k.shape
    num_elements = num_kv_heads * head_dim
    tile = min(TILE, triton.next_power_of_2(num_elements))
    _store_kv_kernel[(num_tokens, triton.cdiv(num_elements, tile))](
        k, v, *cache, slot_mapping, *k.stride()[:2], *v.stride()[:2],
        *cache.k.stride()[:3], BLOCK_SIZE=cache.k.shape[1], NUM_ELEMENTS=num_elements,
        HEAD_DIM=head_dim, TILE=tile, num_warps=4,
    )  # fmt: skip
