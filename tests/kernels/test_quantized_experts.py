"""Experts with quantized weights against their definition in float64."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.golden import refused
from tests.kernels.test_quantized import Slice, draw_weight, exact_rows
from tieredkv.engine.quantized import Mxfp4Weight
from tieredkv.errors import ShapeError
from tieredkv.kernels import expert_layout, experts, reference
from tieredkv.kernels.checks import NormStyle, triton_module
from tieredkv.kernels.expert_layout import FP8_TILINGS, MXFP4_TILINGS, Experts, Gate, choose_tiling
from tieredkv.kernels.quantized import Format, Fp8Matrix, Mxfp4Matrix

Choose = Callable[[str], AbstractContextManager[None]]

SILU = Gate()
CLAMPED = Gate("clamped", is_interleaved=True, alpha=1.7, limit=1.5)
BACKENDS = [
    ("triton", torch.float32),
    ("triton", torch.float16),  # the interpreter multiplies the raw bits of bfloat16
    ("reference", torch.float32),
    ("reference", torch.bfloat16),
]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}
"""Errors relative to the largest element; inner values and the parts of experts are rounded."""


def draw_packed(*shape: int, device: str = "cpu") -> Mxfp4Matrix:
    """Draw weights in MXFP4, whose groups have scales of their own."""
    *others, num_inputs = shape
    values = torch.randint(256, (*others, num_inputs // 2), dtype=torch.uint8)
    scales = torch.randint(119, 124, (*others, num_inputs // 32), dtype=torch.uint8)
    return Mxfp4Matrix(values.to(device), scales.to(device))


def draw(
    kind: Format,
    num_tokens: int,
    *,
    num_experts: int = 5,
    top_k: int = 2,
    hidden_size: int = 256,
    num_inner: int = 128,
    dtype: torch.dtype = torch.float32,
    gate: Gate = SILU,
    device: str = "cpu",
) -> dict[str, Any]:
    """Draw the arguments of `compute_experts`, with biases if the gate is clamped."""
    drawn = draw_weight if kind == "fp8" else draw_packed
    has_bias = gate.kind == "clamped"

    def bias(num_outputs: int) -> Tensor | None:
        return torch.randn(num_experts, num_outputs).to(dtype).to(device) if has_bias else None

    weights, ids = torch.randn(num_tokens, num_experts).softmax(-1).topk(top_k)
    return {
        "x": (0.2 * torch.randn(num_tokens, hidden_size)).to(dtype).to(device),
        "ids": ids.to(device),
        "weights": weights.to(dtype).to(device),
        "experts": Experts(
            gate_up=drawn(num_experts, 2 * num_inner, hidden_size, device=device),
            down=drawn(num_experts, hidden_size, num_inner, device=device),
            gate_up_bias=bias(2 * num_inner),
            down_bias=bias(hidden_size),
            gate=gate,
        ),
    }


def defined(case: dict[str, Any]) -> Tensor:
    """Compute each pair by itself in float64; inner values are rounded before they are quantized.

    A value that is rounded one way here and the other way by a kernel may be another number in FP8,
    by a sixteenth. The tolerance of FP8 has room for a few.
    """
    x, own = case["x"], case["experts"]
    is_fp8 = isinstance(own.gate_up, Fp8Matrix)
    rows = exact_rows(x) if is_fp8 else x.cpu().double()
    gate_up, down = (each.dequantised(torch.float32).cpu().double() for each in own[:2])
    out = torch.zeros_like(rows)
    for token, ids in enumerate(case["ids"].tolist()):
        for rank, expert in enumerate(ids):
            both = gate_up[expert] @ rows[token]
            if own.gate_up_bias is not None:
                both += own.gate_up_bias[expert].cpu()
            g, up = both.view(-1, 2).t() if own.gate.is_interleaved else both.view(2, -1)
            slope = g
            if own.gate.kind == "clamped":
                g = g.clamp(max=own.gate.limit)
                up = up.clamp(-own.gate.limit, own.gate.limit) + 1
                slope = own.gate.alpha * g
            inner = (g * torch.sigmoid(slope) * up).to(x.dtype)
            inner = exact_rows(inner[None])[0] if is_fp8 else inner.double()
            result = down[expert] @ inner
            if own.down_bias is not None:
                result += own.down_bias[expert].cpu()
            out[token] += case["weights"][token, rank].cpu() * result
    return out


def assert_close(out: Tensor, expected: Tensor, *, is_fp8: bool) -> None:
    """Compare in the norm for FP8, where the rounding of single inner values may differ."""
    if is_fp8:
        error = float((out.cpu().double() - expected).norm() / expected.norm())
        assert error < 2**-6, error
    else:
        atol = TOLERANCE[out.dtype] * float(expected.abs().max())
        torch.testing.assert_close(out.cpu().double(), expected, rtol=0.0, atol=atol)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize(
    ("kind", "num_tokens", "top_k", "hidden_size", "num_inner", "gate"),
    [
        ("fp8", 1, 1, 256, 128, SILU),
        ("fp8", 2, 4, 128, 256, CLAMPED),
        ("fp8", 19, 3, 256, 128, SILU),
        ("mxfp4", 1, 4, 96, 160, CLAMPED),
        ("mxfp4", 2, 2, 128, 64, SILU),
        ("mxfp4", 19, 3, 96, 160, CLAMPED),
        ("mxfp4", 25, 1, 128, 64, SILU),
    ],
)
def test_experts_of_quantized_weights_agree_with_their_definition(
    device: str,
    choose: Choose,
    backend: str,
    dtype: torch.dtype,
    kind: Format,
    num_tokens: int,
    top_k: int,
    hidden_size: int,
    num_inner: int,
    gate: Gate,
) -> None:
    case = draw(
        kind,
        num_tokens,
        top_k=top_k,
        hidden_size=hidden_size,
        num_inner=num_inner,
        dtype=dtype,
        gate=gate,
        device=device,
    )
    expected = defined(case)
    residual = torch.randn_like(case["x"])
    total = expected + residual.cpu().double()
    norm = torch.ones(hidden_size, dtype=dtype, device=device)
    with choose(backend):
        out = experts.compute_experts(**case)
        experts.add_experts(**case, residual=residual, norm=norm, style=NormStyle(0.1))
    assert_close(out, expected, is_fp8=kind == "fp8")
    assert_close(residual, total, is_fp8=kind == "fp8")


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_every_tiling_computes_the_same(
    device: str, choose: Choose, monkeypatch: pytest.MonkeyPatch, kind: Format, index: int
) -> None:
    tiling = {"fp8": FP8_TILINGS, "mxfp4": MXFP4_TILINGS}[kind][index]
    monkeypatch.setattr(expert_layout, "_TILINGS", {kind: (tiling,) * 4})
    case = draw(kind, 20, num_experts=3, hidden_size=384, dtype=torch.float16, device=device)
    with choose("triton"):
        out = experts.compute_experts(**case)
    assert_close(out, defined(case), is_fp8=kind == "fp8")


@pytest.mark.parametrize("index", [2, 3])
def test_rows_as_the_first_factor_agree_with_weights_as_the_first(
    device: str, choose: Choose, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    monkeypatch.setattr(expert_layout, "_TILINGS", {"fp8": (FP8_TILINGS[index],) * 4})
    case = draw("fp8", 70, num_experts=2, hidden_size=384, num_inner=128, device=device)
    with choose("triton"):
        out = experts.compute_experts(**case)
        monkeypatch.setattr(triton_module("expert_products"), "is_wide", lambda *_: False)
        other = experts.compute_experts(**case)
    torch.testing.assert_close(out, other, rtol=1e-6, atol=1e-6 * float(other.abs().max()))


@pytest.mark.parametrize("first", [1, 4])
def test_rows_that_lie_apart_are_taken(device: str, choose: Choose, first: int) -> None:
    case = draw("mxfp4", 4, hidden_size=64, dtype=torch.float16, device=device)
    wide = torch.randn(4, 75, device=device).half()
    case["x"] = wide[:, first : first + 64]
    with choose("triton"):
        out = experts.compute_experts(**case)
    assert_close(out, defined(case), is_fp8=False)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_every_code_and_scale_means_the_number_of_the_checkpoint(
    device: str, choose: Choose, backend: str
) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    size = 160
    place = torch.arange(size)
    codes = (place[:, None] + place[None, :]) % 16
    codes[:, -32:] &= 11  # 2^127 times 2 or more is infinite
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)[None]
    stored = torch.tensor([0, 1, 127, 130, 254])
    scales = stored.to(torch.uint8).repeat(size, 1)[None]
    wanted = Mxfp4Weight(Slice(packed.view(1, size, -1, 16)), Slice(scales), dtype)[...][0]
    # Of token t, the gate of output t is 2, and others are 0: so is its one inner value 1.
    gates = torch.zeros(1, 2 * size, size // 2, dtype=torch.uint8)
    gates[0, 2 * place, place // 2] = (4 << 4 * (place % 2)).to(torch.uint8)
    ones = torch.full((1, 2 * size, size // 32), 127, dtype=torch.uint8)
    own = Experts(
        gate_up=Mxfp4Matrix(gates.to(device), ones.to(device)),
        down=Mxfp4Matrix(packed.to(device), scales.to(device)),
        gate=Gate("clamped", is_interleaved=True, alpha=0.0, limit=9.0),
    )
    x = torch.eye(size, dtype=dtype, device=device)
    ids = torch.zeros(size, 1, dtype=torch.int64, device=device)
    with choose(backend):
        out = experts.compute_experts(x, ids, ids.to(dtype) + 1, own)
    assert torch.equal(out.cpu(), wanted)


@pytest.mark.parametrize(
    ("kind", "num_pairs", "expected"),
    [
        ("fp8", 1024, FP8_TILINGS[0]),
        ("fp8", 65536, FP8_TILINGS[3]),
        ("mxfp4", 1032, MXFP4_TILINGS[1]),
        ("mxfp4", 8192, MXFP4_TILINGS[2]),
    ],
)
def test_tiles_of_quantized_weights_grow_with_the_rows_of_an_expert(
    kind: Format, num_pairs: int, expected: object
) -> None:
    assert choose_tiling(num_pairs, 128, 2, kind) == expected


PACKED = {"gate_up": draw_packed(5, 256, 256), "down": draw_packed(5, 256, 128)}


@pytest.mark.parametrize(
    "change",
    [
        {"gate_up": draw_weight(5, 256, 128)},
        {"gate_up": draw_weight(256, 256)},
        {"down": draw_weight(5, 256, 256)},
        {"down": draw_packed(5, 256, 128)},
        {"down": torch.zeros(5, 256, 128)},
        {"gate_up": draw_weight(5, 256, 256)._replace(scales=torch.ones(5, 2, 1))},
        {"gate_up": draw_weight(5, 256, 256)._replace(scales=torch.ones(5, 2, 2).double())},
        PACKED | {"down": draw_packed(5, 256, 128)._replace(scales=torch.ones(5, 256, 4))},
        PACKED | {"gate_up": draw_packed(5, 256, 256)._replace(values=torch.ones(5, 256, 128))},
        {"gate_up_bias": torch.zeros(5, 255)},
    ],
)
def test_quantized_weights_that_disagree_are_refused(change: dict[str, Any]) -> None:
    case = draw("fp8", 3)
    with refused(ShapeError):
        experts.compute_experts(**(case | {"experts": case["experts"]._replace(**change)}))


@pytest.mark.parametrize(("kind", "hidden_size"), [("fp8", 192), ("mxfp4", 48)])
def test_experts_whose_inputs_are_no_whole_groups_are_refused(
    kind: Format, hidden_size: int
) -> None:
    case = draw(kind, 3)
    gate_up, down = case["experts"][:2]
    narrow = gate_up.values[..., : hidden_size * gate_up.values.shape[2] // 256].contiguous()
    own = Experts(
        gate_up._replace(values=narrow),
        down._replace(values=down.values[:, :hidden_size].contiguous()),
    )
    with refused(ShapeError):
        experts.compute_experts(**(case | {"x": case["x"][:, :hidden_size], "experts": own}))


REAL: dict[str, dict[str, Any]] = {
    "fp8": {"num_experts": 256, "top_k": 8, "hidden_size": 2048, "num_inner": 512},
    "mxfp4": {
        "num_experts": 32,
        "top_k": 4,
        "hidden_size": 2880,
        "num_inner": 2880,
        "gate": Gate("clamped", is_interleaved=True, alpha=1.702, limit=7.0),
    },
}


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 32, 300, 1000, 8192])
@pytest.mark.parametrize("kind", REAL)
def test_on_the_gpu_quantized_experts_of_real_models_agree_with_the_reference(
    kind: Format, num_tokens: int
) -> None:
    with torch.device("cuda"):
        case = draw(kind, num_tokens, **REAL[kind], dtype=torch.bfloat16, device="cuda")
    expected = reference.compute_experts(**case).double()
    out = experts.compute_experts(**case)
    # An inner value that is rounded otherwise moves by a step of FP8.
    assert float((out.double() - expected).norm() / expected.norm()) < 2**-6
    assert torch.equal(out, experts.compute_experts(**case))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", REAL)
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_on_the_gpu_a_captured_graph_of_quantized_experts_sees_new_rows(
    kind: Format, num_tokens: int
) -> None:
    with torch.device("cuda"):
        case = draw(kind, num_tokens, **REAL[kind], dtype=torch.bfloat16, device="cuda")
    experts.compute_experts(**case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts.compute_experts(**case)
    for _ in range(2):
        case["x"].normal_()
        graph.replay()
        assert torch.equal(out, experts.compute_experts(**case))
