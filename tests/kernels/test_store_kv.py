"""store_kv against its reference and against a loop that defines what a slot is."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from tests.golden import refused
from tieredkv.errors import ShapeError
from tieredkv.kernels import launch
from tieredkv.kernels.checks import LayerCache

Choose = Callable[[str], AbstractContextManager[None]]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_pool(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> Tensor:
    """Return a pool of three layers; tests write the middle one, so stray writes are seen."""
    return torch.randn(num_blocks, 3, 2, block_size, num_kv_heads, head_dim).to(dtype)


def middle_of(pool: Tensor) -> LayerCache:
    return LayerCache(pool[:, 1, 0], pool[:, 1, 1])


def store(pool: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor, device: str) -> Tensor:
    """Store into a copy of the pool on the device; return that copy on the CPU."""
    pool = pool.clone().to(device)
    k, v, slot_mapping = k.to(device), v.to(device), slot_mapping.to(device)
    launch.store_kv(k, v, middle_of(pool), slot_mapping)
    return pool.cpu()


def expected_pool(pool: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> Tensor:
    expected = pool.clone()
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block_id, offset = divmod(slot, pool.shape[3])
            expected[block_id, 1, 0, offset] = k[token]
            expected[block_id, 1, 1, offset] = v[token]
    return expected


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("block_size", "num_kv_heads", "head_dim", "num_tokens"),
    [(16, 2, 32, 19), (32, 1, 64, 1), (16, 3, 80, 33), (256, 5, 256, 7)],
)
def test_writes_every_slot_and_nothing_else(
    device: str,
    choose: Choose,
    backend: str,
    dtype: torch.dtype,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    num_tokens: int,
) -> None:
    pool = make_pool(4, block_size, num_kv_heads, head_dim, dtype)
    k, v = torch.randn(2, num_tokens, num_kv_heads, head_dim).to(dtype)
    slot_mapping = torch.randperm(4 * block_size)[:num_tokens]
    slot_mapping[::3] = -1

    with choose(backend):
        stored = store(pool, k, v, slot_mapping, device)

    assert torch.equal(stored, expected_pool(pool, k, v, slot_mapping))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_takes_views_of_a_fused_projection_and_int32_slots(
    device: str, choose: Choose, backend: str
) -> None:
    pool = make_pool(3, 16, 2, 32, torch.float32)
    fused = torch.randn(5, 8 + 2 + 2, 32)
    k, v = fused[:, 8:10], fused[:, 10:]
    slot_mapping = torch.tensor([47, 0, -1, 16, 1], dtype=torch.int32)

    with choose(backend):
        stored = store(pool, k, v, slot_mapping, device)

    assert torch.equal(stored, expected_pool(pool, k, v, slot_mapping))


def test_no_tokens_is_no_launch() -> None:
    pool = make_pool(1, 16, 2, 32, torch.float32)
    empty = torch.empty(0, 2, 32)
    launch.store_kv(empty, empty, middle_of(pool), torch.empty(0, dtype=torch.int64))


@pytest.mark.parametrize(
    "change",
    [
        {"k": torch.zeros(4, 2, 16)},
        {"k": torch.zeros(4, 2, 32, dtype=torch.float16)},
        {"v": torch.zeros(5, 2, 32)},
        {"v": torch.zeros(4, 2, 64)[..., ::2]},
        {"slot_mapping": torch.zeros(3, dtype=torch.int64)},
        {"slot_mapping": torch.zeros(4)},
        {"cache": LayerCache(torch.zeros(2, 16, 2, 32), torch.zeros(2, 16, 1, 32))},
    ],
)
def test_tensors_that_disagree_are_refused_with_their_shapes(change: dict[str, Tensor]) -> None:
    pool = make_pool(2, 16, 2, 32, torch.float32)
    arguments = {
        "k": torch.zeros(4, 2, 32),
        "v": torch.zeros(4, 2, 32),
        "cache": middle_of(pool),
        "slot_mapping": torch.zeros(4, dtype=torch.int64),
    }
    with refused(ShapeError):
        launch.store_kv(**(arguments | change))  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("block_size", "num_kv_heads", "head_dim"), [(16, 8, 128), (64, 4, 128), (16, 8, 64)]
)
def test_on_the_gpu_writes_every_slot_and_nothing_else(
    dtype: torch.dtype, block_size: int, num_kv_heads: int, head_dim: int
) -> None:
    num_tokens = 4099
    num_blocks = num_tokens // block_size + 9
    pool = make_pool(num_blocks, block_size, num_kv_heads, head_dim, dtype)
    k, v = torch.randn(2, num_tokens, num_kv_heads, head_dim).to(dtype)
    slot_mapping = torch.randperm(num_blocks * block_size)[:num_tokens]
    slot_mapping[::7] = -1

    stored = store(pool, k, v, slot_mapping, "cuda")

    assert torch.equal(stored, expected_pool(pool, k, v, slot_mapping))


@pytest.mark.gpu
def test_on_the_gpu_slots_beyond_two_to_the_31_elements_are_reached() -> None:
    num_blocks = 2**31 // (2 * 2 * 16 * 8 * 128) + 3
    pool = torch.zeros(num_blocks, 2, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, 1, 8, 128, device="cuda").bfloat16()
    slot = torch.tensor([num_blocks * 16 - 1], device="cuda")

    launch.store_kv(k, v, middle_of(pool), slot)

    assert torch.equal(pool[-1, 1, :, -1], torch.stack([k[0], v[0]]))
    assert int(torch.count_nonzero(pool)) == int(torch.count_nonzero(k) + torch.count_nonzero(v))
