"""Triton kernel that reads pinned memory with few programs, to keep PCIe busy."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (a kernel's arguments have no Python types)

import triton
import triton.language as tl
from torch import Tensor

NUM_PROGRAMS = 16
"""Enough to keep PCIe busy, and few of the 132 processors of an H200."""

TILE = 4096
"""Words that a program reads at once."""


@triton.jit
def _read_kernel(source_ptr, target_ptr, num_words, STEP: tl.constexpr, TILE: tl.constexpr):
    """Copy every STEP-th tile, from the program's own one on.

    Grid: (STEP / TILE,); no tile is masked. Bytes moved: 4 read and 4 written per word.
    """
    for start in range(tl.program_id(0) * TILE, num_words, STEP):
        word = start + tl.arange(0, TILE)
        tl.store(target_ptr + word, tl.load(source_ptr + word))


def read(source: Tensor, target: Tensor) -> None:
    """Copy int32 words from pinned memory to the device, on the current stream.

    Args:
        source: contiguous; a multiple of NUM_PROGRAMS * TILE words.
        target: as source.
    """
    step = NUM_PROGRAMS * TILE
    assert source.numel() % step == 0, source.shape
    _read_kernel[(NUM_PROGRAMS,)](source, target, source.numel(), STEP=step, TILE=TILE, num_warps=8)
