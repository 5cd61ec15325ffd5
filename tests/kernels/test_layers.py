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
from tests.levels import few
from tieredkv.errors import ShapeError
from tieredkv.kernels import layers, reference
from tieredkv.kernels.checks import Branch, HeadNorms, LayerCache, NormStyle, triton_module
from tieredkv.kernels.expert_layout import GateKind

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
LLAMA = NormStyle(EPS)
GEMMA = NormStyle(EPS, offset=1.0, is_rounded_first=False)


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
        gated = layers.gate_mul(wide[2, :, 10:110], "silu")
    assert_close(normed, expected)
    assert gated.is_contiguous()
    assert_close(gated, F.silu(wide[2, :, 10:60]) * wide[2, :, 60:110])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 96), (4, 1500), (0, 32)])
def test_the_gate_is_rounded_and_then_multiplied(
    device: str, choose: Choose, dtype: torch.dtype, num_tokens: int, size: int, kind: GateKind
) -> None:
    gate_up = (4 * torch.randn(num_tokens, 2 * size)).to(dtype).to(device)
    gate, up = gate_up.cpu().chunk(2, dim=1)
    activated = F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")
    expected = activated * up
    for backend in ("reference", "triton"):
        with choose(backend):
            assert_close(layers.gate_mul(gate_up, kind), expected)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_the_gate_holds_for_the_largest_numbers(
    device: str, choose: Choose, kind: GateKind
) -> None:
    gate = torch.tensor([[-1e38, -200.0, -0.0, 200.0, 1e38]], device=device)
    gate_up = torch.cat([gate, torch.ones_like(gate)], dim=1)
    with choose("triton"):
        out = layers.gate_mul(gate_up, kind)
    assert torch.equal(out.cpu(), torch.tensor([[0.0, 0.0, 0.0, 200.0, 1e38]]))


def rotation_case(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    num_tokens: int,
    norm: bool,
    num_parts: int = 2,
) -> dict[str, Any]:
    """Return arguments with random positions and slots; every third token is not stored."""
    slots = torch.randperm(4 * 16)[:num_tokens]
    slots[::3] = -1
    return {
        "qkv": torch.randn(num_tokens, (num_heads + num_parts * num_kv_heads) * head_dim).to(dtype),
        "num_heads": num_heads,
        "cos_sin": table(50, head_dim),
        "positions": torch.randint(50, (num_tokens,)),
        "slot_mapping": slots,
        "norms": HeadNorms(torch.randn(2, head_dim).to(dtype), LLAMA) if norm else None,
    }


def on(device: str, case: dict[str, Any]) -> dict[str, Any]:
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in case.items()}
    if (norms := case["norms"]) is not None:
        moved["norms"] = norms._replace(weights=norms.weights.to(device))
    return moved


def rotate(case: dict[str, Any], pool: Tensor, device: str) -> tuple[Tensor, ...]:
    """Run on the device over a copy of the pool; return the queries and the pool on the CPU."""
    moved = on(device, case)
    pool = pool.clone().to(device)
    q = layers.rotate_and_store(**moved, cache=LayerCache(pool[:, 1, 0], pool[:, 1, 1]))
    assert q.is_contiguous()
    return q.cpu(), pool.cpu()


def shares_keys(case: dict[str, Any], pool: Tensor) -> bool:
    """Whether the keys are the values too, by the number of columns."""
    num_kv_heads, head_dim = pool.shape[4:]
    return bool(case["qkv"].shape[1] == (case["num_heads"] + num_kv_heads) * head_dim)


def normed(rows: Tensor, weight: Tensor, style: NormStyle) -> Tensor:
    """Norm rows of float64."""
    divided = rows / (rows.pow(2).mean(-1, keepdim=True) + style.eps).sqrt()
    return divided * (weight.double() + style.offset)


def expected_rotation(case: dict[str, Any], pool: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate each token in float64, each pair of values as a complex number."""
    expected = pool.double()
    num_kv_heads, head_dim = pool.shape[4:]
    qkv = case["qkv"].double().unflatten(1, (-1, head_dim))
    queries, norms = [], case["norms"]
    for token, slot in enumerate(case["slot_mapping"].tolist()):
        q, *parts = qkv[token].split(
            [case["num_heads"]] + [num_kv_heads] * (1 if shares_keys(case, pool) else 2)
        )
        k, v = parts[0], parts[-1]
        row = case["cos_sin"][case["positions"][token]].double()
        turn = torch.ones(head_dim // 2, dtype=torch.complex128)
        turn[: len(row) // 2] = torch.complex(*row.chunk(2))
        turned = []
        for index, heads in enumerate((q, k)):
            if norms is not None:
                heads = normed(heads, norms.weights[index], norms.style)
            pairs = torch.complex(*heads.chunk(2, dim=-1)) * turn
            turned.append(torch.cat([pairs.real, pairs.imag], dim=-1))
        queries.append(turned[0])
        if slot >= 0:
            block_id, offset = divmod(slot, pool.shape[3])
            expected[block_id, 1, 0, offset] = turned[1]
            if norms is not None and norms.has_values:
                v = v / (v.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
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
@pytest.mark.parametrize("has_values", [False, True])
@pytest.mark.parametrize(
    ("dtype", "style", "num_parts", "num_angles"),
    [
        (torch.float32, GEMMA, 1, 16),
        (torch.bfloat16, GEMMA._replace(offset=0.0), 1, 5),
        (torch.float16, LLAMA, 2, 3),
        (torch.bfloat16, GEMMA, 2, 16),
    ],
)
def test_keys_may_be_values_too_and_both_normed_and_some_angles_may_be_zero(
    device: str,
    choose: Choose,
    backend: str,
    has_values: bool,
    dtype: torch.dtype,
    style: NormStyle,
    num_parts: int,
    num_angles: int,
) -> None:
    case = rotation_case(6, 2, 32, dtype, 4, norm=True, num_parts=num_parts)
    case["norms"] = HeadNorms(case["norms"].weights, style, has_values)
    case["cos_sin"] = table(50, 2 * num_angles)
    pool = torch.randn(4, 3, 2, 16, 2, 32).to(dtype)
    with choose(backend):
        q, stored = rotate(case, pool, device)
    expected_q, expected = expected_rotation(case, pool)
    assert_close(q, expected_q)
    assert_close(stored, expected)


def permuted(rows: Tensor, num_angles: int) -> Tensor:
    """Reorder heads whose first elements are turned, so that pairs are half a head apart."""
    first, second, rest = rows.tensor_split([num_angles, 2 * num_angles], dim=-1)
    low, high = rest.chunk(2, dim=-1)
    return torch.cat([first, low, second, high], dim=-1)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("has_gates", [False, True])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "num_angles"),
    [(torch.float32, 32, 4), (torch.bfloat16, 80, 10), (torch.float16, 24, 12)],
)
def test_only_the_first_elements_of_a_head_are_turned_and_gates_are_left_out(
    device: str,
    choose: Choose,
    backend: str,
    has_gates: bool,
    dtype: torch.dtype,
    head_dim: int,
    num_angles: int,
) -> None:
    case = rotation_case(3, 2, head_dim, dtype, 5, norm=True)
    case["norms"] = HeadNorms(case["norms"].weights, GEMMA)
    case["cos_sin"] = table(50, 2 * num_angles)
    pool = torch.randn(4, 3, 2, 16, 2, head_dim).to(dtype)
    given = dict(case)
    heads = case["qkv"].unflatten(1, (-1, head_dim))
    if has_gates:
        queries = torch.stack([heads[:, :3], torch.randn(5, 3, head_dim).to(dtype)], dim=2)
        given["qkv"] = torch.cat([queries.flatten(1), heads[:, 3:].flatten(1)], dim=1)
    with choose(backend):
        q, stored = rotate(given | {"has_gates": has_gates, "is_partial": True}, pool, device)
    # As if the elements of each pair were half a head apart.
    case["qkv"] = permuted(heads, num_angles).flatten(1)
    case["norms"] = HeadNorms(permuted(case["norms"].weights, num_angles), GEMMA)
    expected_q, expected = expected_rotation(case, permuted(pool, num_angles))
    assert_close(permuted(q, num_angles), expected_q)
    assert_close(permuted(stored, num_angles), expected)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_heads", "dim"), [(1, 3, 128), (5, 20, 96), (0, 2, 8)])
def test_heads_are_gated(
    device: str,
    choose: Choose,
    backend: str,
    dtype: torch.dtype,
    num_tokens: int,
    num_heads: int,
    dim: int,
) -> None:
    heads = torch.randn(num_tokens, num_heads, dim).to(dtype)
    gates = (3 * torch.randn(num_tokens, num_heads, 2, dim)).to(dtype)[:, :, 1]
    norm = torch.randn(dim).to(dtype)
    divided = normed(heads.double(), torch.ones(dim), LLAMA)
    rounded = (divided.to(dtype).double() * norm.double()).to(dtype).double()
    expected = rounded * F.silu(gates.double())
    plain = heads.double() * torch.sigmoid(gates.double()).to(dtype).double()
    moved = heads.to(device), gates.to(device)
    with choose(backend):
        assert_close(layers.gate_heads(*moved, norm.to(device), EPS), expected.to(dtype))
        assert_close(layers.gate_heads(*moved), plain.to(dtype))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_queries_alone_are_rotated_and_nothing_is_stored(
    device: str, choose: Choose, backend: str
) -> None:
    case = rotation_case(6, 2, 32, torch.float32, 4, norm=True)
    pool = torch.randn(4, 3, 2, 16, 2, 32)
    expected_q, _ = expected_rotation(case, pool)
    case["qkv"] = case["qkv"][:, : 6 * 32].contiguous()
    case["norms"] = HeadNorms(case["norms"].weights[:1], LLAMA)
    with choose(backend):
        q, stored = rotate(case, pool, device)
    assert_close(q, expected_q)
    assert torch.equal(stored, pool)


def branch_case(
    dtype: torch.dtype, num_tokens: int, hidden_size: int, *, has_others: bool, has_scalar: bool
) -> Branch:
    return Branch(
        3 * torch.randn(num_tokens, hidden_size).to(dtype),
        torch.randn(hidden_size).to(dtype),
        torch.randn(num_tokens, hidden_size).to(dtype) if has_others else None,
        torch.randn(2, hidden_size).to(dtype) if has_others else None,
        torch.tensor([0.75]).to(dtype) if has_scalar else None,
    )


def branch_on(device: str, branch: Branch) -> Branch:
    moved = {k: v.to(device) for k, v in branch._asdict().items() if v is not None}
    return branch._replace(**moved)


def expected_sum(residual: Tensor, branch: Branch, style: NormStyle) -> Tensor:
    """Add a branch to the residual stream in float64."""
    rows = branch.rows.double()
    if branch.others is not None and branch.own_norms is not None:
        first, second = branch.own_norms
        rows = normed(rows, first, style) + normed(branch.others.double(), second, style)
    if branch.norm is not None:
        rows = normed(rows, branch.norm, style)
    total = residual.double() + rows
    return total if branch.scalar is None else total * branch.scalar.double()


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("style", "num_tokens", "hidden_size", "num_norms", "has_others", "has_scalar"),
    [
        (GEMMA, 3, 200, 1, False, False),
        (GEMMA._replace(offset=0.0), 2, 176, 3, True, True),
        (LLAMA, 1, 64, 2, True, False),
        (GEMMA, 2, 48, 0, False, True),
        (LLAMA, 0, 32, 2, False, True),
    ],
)
def test_a_branch_is_normed_and_added_and_the_sum_is_normed_for_what_comes_next(
    device: str,
    choose: Choose,
    backend: str,
    dtype: torch.dtype,
    style: NormStyle,
    num_tokens: int,
    hidden_size: int,
    num_norms: int,
    has_others: bool,
    has_scalar: bool,
) -> None:
    residual = torch.randn(num_tokens, hidden_size).to(dtype)
    norms = torch.randn(num_norms, hidden_size).to(dtype)
    branch = branch_case(
        dtype, num_tokens, hidden_size, has_others=has_others, has_scalar=has_scalar
    )
    total = expected_sum(residual, branch, style)
    moved = residual.to(device, copy=True)
    with choose(backend):
        out = layers.add_and_norm(moved, branch_on(device, branch), norms.to(device), style)
    assert_close(moved, total.to(dtype))
    assert out.shape == (num_norms, num_tokens, hidden_size)
    assert out.is_contiguous()
    for row, weight in zip(out, norms, strict=True):
        assert_close(row, normed(moved.cpu().double(), weight, style).to(dtype))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_branch_without_a_norm_is_only_added(device: str, choose: Choose, backend: str) -> None:
    residual, branch = torch.randn(3, 80), Branch(torch.randn(3, 80))
    total, weight = expected_sum(residual, branch, LLAMA), torch.randn(80)
    moved = residual.to(device, copy=True)
    with choose(backend):
        [out] = layers.add_and_norm(
            moved, branch_on(device, branch), weight[None].to(device), LLAMA
        )
    assert_close(moved, total.float())
    assert_close(out, normed(total, weight, LLAMA).float())


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_without_a_branch_the_residual_stream_is_only_normed(
    device: str, choose: Choose, backend: str
) -> None:
    residual, norms = torch.randn(3, 80, device=device), torch.randn(2, 80, device=device)
    before = residual.clone()
    with choose(backend):
        out = layers.add_and_norm(residual, None, norms, GEMMA)
    assert torch.equal(residual, before)
    for row, weight in zip(out, norms, strict=True):
        assert_close(row, normed(before.double(), weight, GEMMA).float())


@pytest.mark.parametrize(
    "change",
    [
        {"rows": torch.zeros(2, 31)},
        {"rows": torch.zeros(2, 64)[:, ::2]},
        {"rows": torch.zeros(2, 32).half()},
        {"norm": torch.zeros(31)},
        {"others": torch.zeros(2, 32)},
        {"others": torch.zeros(3, 32), "own_norms": torch.zeros(2, 32)},
        {"others": torch.zeros(2, 32), "own_norms": torch.zeros(3, 32)},
        {"scalar": torch.zeros(2)},
    ],
)
def test_a_branch_that_does_not_fit_the_residual_stream_is_refused(
    change: dict[str, Tensor],
) -> None:
    branch = branch_case(torch.float32, 2, 32, has_others=False, has_scalar=False)
    with refused(ShapeError):
        layers.add_and_norm(
            torch.zeros(2, 32), branch._replace(**change), torch.zeros(1, 32), GEMMA
        )


@pytest.mark.parametrize(
    ("residual", "norms"),
    [
        (torch.zeros(2, 64)[:, ::2], torch.zeros(1, 32)),
        (torch.zeros(2, 64)[:, :32], torch.zeros(1, 32)),
        (torch.zeros(2, 32), torch.zeros(1, 31)),
    ],
)
def test_a_residual_stream_that_cannot_be_normed_is_refused(
    residual: Tensor, norms: Tensor
) -> None:
    with refused(ShapeError):
        layers.add_and_norm(residual, None, norms, GEMMA)


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
        {"cos_sin": torch.zeros(50, 34)},
        {"cos_sin": torch.zeros(50, 15)},
        {"cos_sin": torch.zeros(50, 64)[:, ::2]},
        {"cos_sin": torch.zeros(50, 32).half()},
        {"positions": torch.zeros(4, dtype=torch.int64)},
        {"slot_mapping": torch.zeros(3)},
        {"num_heads": 3},
        {"num_heads": 0},
        {"norms": HeadNorms(torch.zeros(32), LLAMA)},
        {"norms": HeadNorms(torch.zeros(2, 16), LLAMA)},
        {"norms": HeadNorms(torch.zeros(2, 64)[:, ::2], LLAMA)},
    ],
)
def test_a_rotation_of_tensors_that_disagree_is_refused(change: dict[str, Any]) -> None:
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
        layers.gate_mul(torch.zeros(2, 33), "silu")
    wide = layers.MAX_HIDDEN_SIZE + 1
    with choose("triton"), refused(ShapeError):
        layers.rms_norm(torch.zeros(1, wide), torch.ones(wide), EPS)
    with choose("triton"), refused(ShapeError):
        layers.add_and_norm(torch.zeros(1, wide), None, torch.ones(1, wide), LLAMA)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    few(
        [
            (torch.bfloat16, (8, 1024)),
            (torch.float16, (8, 1024)),
            (torch.bfloat16, (4104, 512)),
            (torch.float16, (4104, 512)),
            (torch.bfloat16, (16384, 256)),
            (torch.float16, (16384, 256)),
        ],
        3,
    ),
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
    for kind in ("silu", "gelu_tanh"):
        assert_close(layers.gate_mul(gate_up, kind), reference.gate_mul(gate_up, kind))
    for has_others, hidden_size, num_norms in ((False, 5376, 1), (True, 2816, 3)):
        residual = torch.randn(num_tokens, hidden_size, device="cuda").to(dtype)
        norms = torch.randn(num_norms, hidden_size, device="cuda").to(dtype)
        branch = branch_on(
            "cuda",
            branch_case(dtype, num_tokens, hidden_size, has_others=has_others, has_scalar=True),
        )
        own = residual.clone()
        expected = reference.add_and_norm(own, branch, norms, GEMMA)
        assert_close(layers.add_and_norm(residual, branch, norms, GEMMA), expected)
        assert_close(residual, own)
    for norm in (False, True):
        case = rotation_case(32, 8, 128, dtype, num_tokens, norm)
        case["slot_mapping"] = torch.randperm(num_tokens)
        with choose("reference"):
            expected_rotated = rotate(case, pool, "cuda")
        for out, wanted in zip(rotate(case, pool, "cuda"), expected_rotated, strict=True):
            assert_close(out, wanted)
    pool = torch.zeros(num_tokens // 16 + 1, 3, 2, 16, 4, 512, dtype=dtype)
    case = rotation_case(32, 4, 512, dtype, num_tokens, norm=True, num_parts=1)
    case["norms"] = HeadNorms(case["norms"].weights, GEMMA, has_values=True)
    case["cos_sin"], case["slot_mapping"] = table(50, 128), torch.randperm(num_tokens)
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
        rows = q.flatten(1)
        branch = Branch(layers.rms_norm(rows, weight, EPS), weight)
        [normed] = layers.add_and_norm(rows, branch, weight[None], GEMMA)
        return layers.gate_mul(torch.cat([normed, rows], dim=1), "gelu_tanh")

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
