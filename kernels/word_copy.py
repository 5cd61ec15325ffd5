"""Triton kernel that copies words between pinned memory and the device.

Callers go through `tieredkv.kernels.small_copies`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (a kernel's arguments have no Python types)

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024


@triton.jit(do_not_specialize=["source_ptr", "target_ptr", "num_words"])
def _copy_words_kernel(source_ptr, target_ptr, num_words, TILE: tl.constexpr):
    """Copy one tile of words.

    Grid: (ceil(num_words / TILE),); the last tile is masked. Bytes moved: 4 read and 4 written per
    word.
    """
    word = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = word < num_words
    tl.store(target_ptr + word, tl.load(source_ptr + word, mask), mask)


def copy_words(source: Tensor, target: Tensor) -> None:
    """Copy int32 words; both tensors are contiguous."""
    num_words = source.numel()
    _copy_words_kernel[(triton.cdiv(num_words, TILE),)](
        source, target, num_words, TILE=TILE, num_warps=8
    )
