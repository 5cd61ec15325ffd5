"""Triton kernel that copies whole pages of a pool to other pages of it.

Callers go through `tieredkv.kernels.states`, which checks the tensors; this module does not.
Reference: `tieredkv.kernels.state_reference.copy_pages`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (a kernel's arguments have no Python types)

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Words that one program copies."""


@triton.jit
def _copy_pages_kernel(
    words_ptr, source_ptr, target_ptr, page_stride, num_words, TILE: tl.constexpr
):
    """Copy one tile of one page, or write zeros if the source is negative.

    Grid: (num_copies, ceil(num_words / TILE)). The last tile of a page is masked. Bytes moved: 4
    read and 4 written per word.
    """
    copy = tl.program_id(0)
    target = tl.load(target_ptr + copy).to(tl.int64)
    source = tl.load(source_ptr + copy).to(tl.int64)
    word = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = word < num_words
    is_read = word < tl.where(source < 0, 0, num_words)
    words = tl.load(words_ptr + source * page_stride + word, is_read, other=0)
    tl.store(words_ptr + target * page_stride + word, words, mask)


def copy_pages(pool_bytes: Tensor, source: Tensor, target: Tensor) -> None:
    """Launch the kernel; same contract as `states.copy_pages`."""
    words = pool_bytes.view(torch.int32)
    num_words = words.shape[1]
    _copy_pages_kernel[(len(source), triton.cdiv(num_words, TILE))](
        words, source, target, words.stride(0), num_words, TILE=TILE, num_warps=8
    )
