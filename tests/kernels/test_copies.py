"""BlockCopier copies the right bytes to the right places and no others, on CPU and GPU."""

# mypy: disable-error-code="no-untyped-call"
# (torch versions differ in how much of torch.cuda is typed)

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.golden import refused
from tieredkv.errors import ShapeError
from tieredkv.kernels.copies import BlockCopier, register_pinned

LAYERS = 4
BLOCK_BYTES = LAYERS * 600
PAGE_BYTES = 4096


def random_bytes(rows: int, width: int) -> Tensor:
    return torch.randint(0, 256, (rows, width), dtype=torch.uint8)


def test_copy_in_moves_pages_to_their_blocks_and_nothing_else() -> None:
    blocks, arena = random_bytes(5, BLOCK_BYTES), random_bytes(7, PAGE_BYTES)
    expected = blocks.clone()
    expected[4], expected[0] = arena[6, :BLOCK_BYTES], arena[1, :BLOCK_BYTES]
    arena_before = arena.clone()

    BlockCopier(blocks, arena).copy_in([(6, 4), (1, 0)])

    assert torch.equal(blocks, expected)
    assert torch.equal(arena, arena_before)


def test_copy_out_leaves_the_rest_of_a_page_alone() -> None:
    blocks, arena = random_bytes(5, BLOCK_BYTES), random_bytes(7, PAGE_BYTES)
    expected = arena.clone()
    expected[2, :BLOCK_BYTES] = blocks[3]
    expected[0, :BLOCK_BYTES] = blocks[3]

    BlockCopier(blocks, arena).copy_out([(3, 2), (3, 0)])

    assert torch.equal(arena, expected)


def test_no_pairs_is_no_copy() -> None:
    blocks, arena = random_bytes(2, BLOCK_BYTES), random_bytes(2, PAGE_BYTES)
    before = blocks.clone()
    BlockCopier(blocks, arena).copy_in([])
    assert torch.equal(blocks, before)


@pytest.mark.parametrize("pair", [(-1, 0), (7, 0), (0, -1), (0, 5)])
def test_an_id_out_of_range_copies_nothing(pair: tuple[int, int]) -> None:
    blocks, arena = random_bytes(5, BLOCK_BYTES), random_bytes(7, PAGE_BYTES)
    before = blocks.clone()
    with refused(ShapeError):
        BlockCopier(blocks, arena).copy_in([(0, 1), pair])
    assert torch.equal(blocks, before)


@pytest.mark.parametrize(
    ("blocks", "arena"),
    [
        (torch.zeros(2, 5000, dtype=torch.uint8), torch.zeros(2, 4096, dtype=torch.uint8)),
        (torch.zeros(2, 64), torch.zeros(2, 4096, dtype=torch.uint8)),
        (torch.zeros(64, 4, dtype=torch.uint8).t(), torch.zeros(2, 4096, dtype=torch.uint8)),
    ],
)
def test_memories_that_do_not_fit_are_refused(blocks: Tensor, arena: Tensor) -> None:
    with refused(ShapeError):
        BlockCopier(blocks, arena)


@pytest.mark.gpu
@pytest.mark.parametrize("own_stream", [True, False])
@pytest.mark.parametrize("block_bytes", [32 * 600, 2 << 20])
def test_on_the_gpu_scattered_blocks_come_back_bit_for_bit(
    block_bytes: int, own_stream: bool
) -> None:
    num_blocks, num_pages, page_bytes = 40, 50, -(-block_bytes // 4096) * 4096
    computed = random_bytes(num_blocks, block_bytes)
    blocks = computed.cuda()
    memory = np.zeros(num_pages * page_bytes + 4096, dtype=np.uint8)
    aligned = memory[-memory.ctypes.data % 4096 :][: num_pages * page_bytes]
    arena = torch.from_numpy(aligned).view(num_pages, page_bytes)
    steps: list[tuple[int, int]] = []
    pinned = register_pinned(
        arena.data_ptr(),
        arena.nbytes,
        page_bytes=page_bytes,
        progress=lambda done, total: steps.append((done, total)),
    )
    try:
        assert arena.is_pinned()
        assert steps[-1] == (arena.nbytes, arena.nbytes)
        copier = BlockCopier(blocks, arena)
        stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
        torch.cuda.synchronize()

        pages = torch.randperm(num_pages)[:num_blocks].tolist()
        copier.copy_out(list(zip(range(num_blocks), pages, strict=True)), stream)
        stream.synchronize()
        assert torch.equal(arena[pages, :block_bytes], computed)

        blocks.zero_()
        torch.cuda.synchronize()
        targets = torch.randperm(num_blocks).tolist()
        pairs = list(zip(pages, targets, strict=True))
        copier.copy_in(pairs, stream)
        stream.synchronize()
        assert torch.equal(blocks[targets].cpu(), computed)
    finally:
        pinned.close()
    pinned.close()
    assert not arena.is_pinned()
