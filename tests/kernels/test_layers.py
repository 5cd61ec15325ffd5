"""The fused kernels between matrix products against references, which float64 code checks."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.golden import refused
from tieredkv.errors import ShapeError
from tieredkv.kernels import layers, reference
from tieredkv.kernels.checks import LayerCache, triton_module

Choose = Callable[[str], AbstractContextManager[None]]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {
    torch.float32: 1e-6,
    torch.bfloat16: 2**-6 if torch.cuda.is_available() else 2**-5,
    torch.float16: 2**-9,
}
"""Errors of single elements, relative to the largest: at least two units in its last place.

Sums in another order move the last place by one. Triton's interpreter truncates to bfloat16 where
the GPU rounds, several times in a row.
"""

EPS = 1e-5


def assert_close(out: Tensor, expected: Tensor) -> None:
    assert out.dtype == expected.dtype
    atol = TOLERANCE[out.dtype] * float(expected.abs().max() if expected.numel() else 0.0)
    torch.testing.assert_close(out.cpu(), expected.cpu(), rtol=0.0, atol=atol)


def table(num_positions: int, head_dim: int) -> Tensor:
    angles = torch.arange(num_positions)[:, None] * 0.7 ** torch.arange(head_dim // 2)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "hidden_size"), [(1, 64), (5, 2048), (3, 1000), (0, 64)])
def test_rows_are_normed_and_rounded_before_they_are_weighed(
    device: str, choose: Choose, backend: str, dtype: torch.dtype, num_tokens: int, hidden_size: int
) -> None:
    x = 3 * torch.randn(num_tokens, hidden_size).to(dtype).to(device)
    before, weight = x.clone(), torch.randn(hidden_size).to(dtype).to(device)
    rows = x.cpu().double()
    rows = rows / (rows.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double().cpu()
    with choose(backend):
        normed = layers.rms_norm(x, weight, EPS)
    assert_close(normed, rows.to(dtype))
    assert normed.is_contiguous()
    assert torch.equal(x, before)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_rows_may_lie_apart(device: str, choose: Choose, backend: str) -> None:
    wide = torch.randn(3, 4, 200, device=device)
    weight = torch.randn(96, device=device)
    expected = reference.rms_norm(wide[0, :, 8:104].clone(), weight, EPS)
    with choose(backend):
        normed = layers.rms_norm(wide[0, :, 8:104], weight, EPS)
        gated = layers.silu_mul(wide[2, :, 10:110])
    assert_close(normed, expected)
    assert gated.is_contiguous()
    assert_close(gated, F.silu(wide[2, :, 10:60]) * wide[2, :, 60:110])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 96), (4, 1500), (0, 32)])
def test_the_gate_is_rounded_and_then_multiplied(
    device: str, choose: Choose, dtype: torch.dtype, num_tokens: int, size: int
) -> None:
    gate_up = (4 * torch.randn(num_tokens, 2 * size)).to(dtype).to(device)
    gate, up = gate_up.cpu().chunk(2, dim=1)
    expected = F.silu(gate) * up
    for backend in ("reference", "triton"):
        with choose(backend):
            assert_close(layers.silu_mul(gate_up), expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_the_gate_holds_for_the_largest_numbers(device: str, choose: Choose) -> None:
    gate = torch.tensor([[-1e38, -200.0, -0.0, 200.0, 1e38]], device=device)
    gate_up = torch.cat([gate, torch.ones_like(gate)], dim=1)
    with choose("triton"):
        out = layers.silu_mul(gate_up)
    assert torch.equal(out.cpu(), torch.tensor([[0.0, 0.0, 0.0, 200.0, 1e38]]))


def rotation_case(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    num_tokens: int,
    norm: bool,
) -> dict[str, Any]:
    """Return arguments with random positions and slots; every third token is not stored."""
    slots = torch.randperm(4 * 16)[:num_tokens]
    slots[::3] = -1
    return {
        "qkv": torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype),
        "cos_sin": table(50, head_dim),
        "positions": torch.randint(50, (num_tokens,)),
        "slot_mapping": slots,
        "head_norms": torch.randn(2, head_dim).to(dtype) if norm else None,
        "eps": EPS,
    }


def on(device: str, case: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in case.items()}


def rotate(case: dict[str, Any], pool: Tensor, device: str) -> tuple[Tensor, ...]:
    """Run on the device over a copy of the pool; return the queries and the pool on the CPU."""
    moved = on(device, case)
    pool = pool.clone().to(device)
    q = layers.rotate_and_store(**moved, cache=LayerCache(pool[:, 1, 0], pool[:, 1, 1]))
    assert q.is_contiguous()
    return q.cpu(), pool.cpu()


def expected_rotation(case: dict[str, Any], pool: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate each token in float64, each pair of values as a complex number."""
    expected = pool.double()
    num_kv_heads, head_dim = pool.shape[4:]
    qkv = case["qkv"].double().unflatten(1, (-1, head_dim))
    queries = []
    for token, slot in enumerate(case["slot_mapping"].tolist()):
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        q, k, v = qkv[token].split([num_heads, num_kv_heads, num_kv_heads])
        row = case["cos_sin"][case["positions"][token]].double()
        turn = torch.complex(*row.chunk(2))
        turned = []
        norms = (None, None) if case["head_norms"] is None else case["head_norms"]
        for heads, weight in zip((q, k), norms, strict=True):
            if weight is not None:
                heads = heads / (heads.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
            pairs = torch.complex(*heads.chunk(2, dim=-1)) * turn
            turned.append(torch.cat([pairs.real, pairs.imag], dim=-1))
        queries.append(turned[0])
        if slot >= 0:
            block_id, offset = divmod(slot, pool.shape[3])
            expected[block_id, 1, 0, offset] = turned[1]
            expected[block_id, 1, 1, offset] = v
    return torch.stack(queries).to(pool.dtype), expected.to(pool.dtype)


ROTATIONS = [
    (4, 2, 64, 7),
    (6, 2, 80, 1),
    (3, 1, 96, 4),
    (14, 2, 128, 3),
    (2, 1, 256, 3),
    (5, 5, 6, 2),
]


def rotations() -> Iterator[Any]:
    """Yield every combination; those without which each pair of values still occurs are slow."""
    for (number, shape), (type_number, dtype) in itertools.product(
        enumerate(ROTATIONS), enumerate(DTYPES)
    ):
        own = (number + type_number) % 2, (number // 2 + type_number) % 2
        for backend, norm in itertools.product((0, 1), (0, 1)):
            marks = () if (backend, norm) == own else pytest.mark.slow
            name = ("triton", "reference")[backend]
            yield pytest.param(name, dtype, bool(norm), *shape, marks=marks)


@pytest.mark.parametrize(
    ("backend", "dtype", "norm", "num_heads", "num_kv_heads", "head_dim", "num_tokens"),
    [*rotations()],
)
def test_heads_are_rotated_and_stored_where_they_belong(
    device: str,
    choose: Choose,
    backend: str,
    dtype: torch.dtype,
    norm: bool,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_tokens: int,
) -> None:
    case = rotation_case(num_heads, num_kv_heads, head_dim, dtype, num_tokens, norm)
    pool = torch.randn(4, 3, 2, 16, num_kv_heads, head_dim).to(dtype)
    with choose(backend):
        q, stored = rotate(case, pool, device)
    expected_q, expected = expected_rotation(case, pool)
    assert_close(q, expected_q)
    assert_close(stored, expected)
    assert torch.equal(stored[:, ::2], pool[:, ::2])
    assert torch.equal(stored[:, 1, 1], expected[:, 1, 1])


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_rows_of_a_wider_matrix_and_int32_indices_are_taken(
    device: str, choose: Choose, backend: str
) -> None:
    case = rotation_case(4, 2, 32, torch.float32, 5, norm=False)
    pool = torch.randn(4, 3, 2, 16, 2, 32)
    with choose("reference"):
        expected = rotate(case, pool, device)
    wide = torch.randn(5, 300)
    wide[:, 10:266] = case["qkv"]
    case["qkv"] = wide[:, 10:266]
    case["positions"] = case["positions"].to(torch.int32)
    case["slot_mapping"] = case["slot_mapping"].to(torch.int32)
    with choose(backend):
        taken = rotate(case, pool, device)
    for out, wanted in zip(taken, expected, strict=True):
        assert_close(out, wanted)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_no_tokens_is_no_launch(device: str, choose: Choose, backend: str) -> None:
    case = rotation_case(4, 2, 32, torch.float32, 0, norm=False)
    with choose(backend):
        q, _ = rotate(case, torch.zeros(4, 3, 2, 16, 2, 32), device)
    assert q.shape == (0, 4, 32)


@pytest.mark.parametrize(
    "change",
    [
        {"qkv": torch.zeros(3, 255)},
        {"qkv": torch.zeros(3, 256, dtype=torch.float16)},
        {"qkv": torch.zeros(3, 512)[:, ::2]},
        {"cos_sin": torch.zeros(50, 16)},
        {"cos_sin": torch.zeros(50, 32).half()},
        {"positions": torch.zeros(4, dtype=torch.int64)},
        {"slot_mapping": torch.zeros(3)},
        {"head_norms": torch.zeros(32)},
        {"head_norms": torch.zeros(2, 16)},
        {"head_norms": torch.zeros(2, 64)[:, ::2]},
    ],
)
def test_a_rotation_of_tensors_that_disagree_is_refused(change: dict[str, Tensor]) -> None:
    case = rotation_case(4, 2, 32, torch.float32, 3, norm=False) | change
    with refused(ShapeError):
        rotate(case, torch.zeros(4, 3, 2, 16, 2, 32), "cpu")


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.zeros(2, 3, 32), torch.ones(32)),
        (torch.zeros(2, 32, dtype=torch.int64), torch.ones(32)),
        (torch.zeros(2, 64)[:, ::2], torch.ones(32)),
        (torch.zeros(2, 32), torch.ones(31)),
        (torch.zeros(2, 32), torch.ones(64)[::2]),
    ],
)
def test_a_norm_of_tensors_that_disagree_is_refused(x: Tensor, weight: Tensor) -> None:
    with refused(ShapeError):
        layers.rms_norm(x, weight, EPS)


def test_rows_without_two_halves_and_rows_too_wide_are_refused(choose: Choose) -> None:
    with refused(ShapeError):
        layers.silu_mul(torch.zeros(2, 33))
    wide = layers.MAX_HIDDEN_SIZE + 1
    with choose("triton"), refused(ShapeError):
        layers.rms_norm(torch.zeros(1, wide), torch.ones(wide), EPS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(8, 1024), (4104, 1024), pytest.param((16384, 256), marks=pytest.mark.slow)]
)
def test_one_row_times_a_matrix(
    device: str, choose: Choose, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight = torch.randn(shape).to(dtype).to(device)
    x = torch.randn(1, shape[1]).to(dtype).to(device)
    exact = (x.double() @ weight.double().t()).to(dtype)
    assert triton_module("fused").takes_row(*shape)
    for backend in ("triton", "reference"):
        with choose(backend):
            assert_close(layers.linear(x, weight), exact)
    residual = torch.randn(1, shape[0]).to(dtype).to(device)
    total = (residual.double() + x.double() @ weight.double().t()).to(dtype)
    with choose("triton"):
        assert_close(layers.linear(x, weight, residual=residual), total)
    assert_close(residual, total)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 7, 8, 9, 11, 12])
def test_many_rows_are_multiplied_in_stretches(
    device: str, monkeypatch: pytest.MonkeyPatch, num_rows: int, has_residual: bool, has_bias: bool
) -> None:
    monkeypatch.setattr(layers, "PRODUCT_ROWS", 4)
    x, weight = torch.randn(num_rows, 24, device=device), torch.randn(40, 24, device=device)
    bias = torch.randn(40, device=device) if has_bias else None
    residual = torch.randn(num_rows, 40, device=device) if has_residual else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    expected += 0.0 if residual is None else residual.double()
    out = layers.linear(x, weight, bias, residual=residual)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert (out is residual) == has_residual


@pytest.mark.parametrize(
    "residual", [torch.zeros(2, 7), torch.zeros(3, 8), torch.zeros(2, 8).half()]
)
def test_a_residual_of_another_shape_is_refused(residual: Tensor) -> None:
    with refused(ShapeError):
        layers.linear(torch.zeros(2, 4), torch.zeros(8, 4), residual=residual)


@pytest.mark.parametrize(
    ("x", "weight"), [((2, 1024), (8, 1024)), ((1, 1000), (8, 1000)), ((1, 1024), (6, 1024))]
)
def test_other_products_are_left_to_torch(
    choose: Choose, monkeypatch: pytest.MonkeyPatch, x: tuple[int, int], weight: tuple[int, int]
) -> None:
    factors = torch.randn(x).half(), torch.randn(weight).half()
    monkeypatch.delattr(triton_module("fused"), "multiply_row")
    with choose("triton"):
        product = layers.linear(*factors)
    assert_close(product, (factors[0].double() @ factors[1].double().t()).half())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 8192])
def test_on_the_gpu_the_sizes_of_real_models_agree_with_the_reference(
    choose: Choose, dtype: torch.dtype, num_tokens: int
) -> None:
    pool = torch.zeros(num_tokens // 16 + 1, 3, 2, 16, 8, 128, dtype=dtype)
    for hidden_size in (4096, 5120, 16384):
        x = torch.randn(num_tokens, hidden_size, device="cuda").to(dtype)
        weight = torch.randn(hidden_size, device="cuda").to(dtype)
        expected = reference.rms_norm(x, weight, EPS)
        assert_close(layers.rms_norm(x, weight, EPS), expected)
    gate_up = torch.randn(num_tokens, 2 * 14336, device="cuda").to(dtype)
    assert_close(layers.silu_mul(gate_up), reference.silu_mul(gate_up))
    for norm in (False, True):
        case = rotation_case(32, 8, 128, dtype, num_tokens, norm)
        case["slot_mapping"] = torch.randperm(num_tokens)
        with choose("reference"):
            expected_rotated = rotate(case, pool, "cuda")
        for out, wanted in zip(rotate(case, pool, "cuda"), expected_rotated, strict=True):
            assert_close(out, wanted)


@pytest.mark.gpu
def test_on_the_gpu_a_captured_graph_sees_new_numbers() -> None:
    case = rotation_case(8, 2, 64, torch.bfloat16, 3, norm=True)
    case["slot_mapping"] = torch.tensor([5, -1, 40])
    moved = on("cuda", case)
    pool = torch.zeros(4, 3, 2, 16, 2, 64, dtype=torch.bfloat16, device="cuda")
    weight = torch.ones(512, dtype=torch.bfloat16, device="cuda")

    def step() -> Tensor:
        q = layers.rotate_and_store(**moved, cache=LayerCache(pool[:, 1, 0], pool[:, 1, 1]))
        normed = layers.rms_norm(q.flatten(1), weight, EPS)
        return layers.silu_mul(torch.cat([normed, q.flatten(1)], dim=1))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(2):
        moved["qkv"].normal_()
        moved["positions"].random_(0, 50)
        moved["slot_mapping"].copy_(torch.randperm(64)[:3])
        pool.zero_()
        graph.replay()
        replayed, written = out.clone(), pool.clone()
        pool.zero_()
        assert torch.equal(step(), replayed)
        assert torch.equal(pool, written)
