"""Products in FP8 against their definition in float64, and the numbers of quantized weights."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.golden import refused
from tieredkv.engine.quantized import Mxfp4Weight
from tieredkv.errors import ShapeError
from tieredkv.kernels import fp8, layers, reference
from tieredkv.kernels.checks import triton_module
from tieredkv.kernels.fp8 import Fp8Tiling, choose_tiling
from tieredkv.kernels.quantized import Fp8Matrix, Mxfp4Matrix, has_fp8

Choose = Callable[[str], AbstractContextManager[None]]

BACKENDS = ["triton", "reference"]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Errors relative to the largest element: the result is rounded once, and Triton's interpreter
truncates to bfloat16."""


def draw_weight(*shape: int, device: str = "cpu") -> Fp8Matrix:
    """Draw weights whose blocks have scales of their own."""
    *others, num_outputs, num_inputs = shape
    grid = (*others, -(-num_outputs // 128), num_inputs // 128)
    values = (100 * torch.randn(shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Fp8Matrix(values.to(device), (0.01 * torch.rand(grid) + 0.001).to(device))


def exact_rows(x: Tensor) -> Tensor:
    """Quantise rows, divided in float32: in float64, a value may be rounded the other way."""
    groups = x.cpu().float().view(len(x), x.shape[1] // 128, 128)
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    values = (groups / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    rows: Tensor = values.double() * scales.double()
    return rows.flatten(1)


def exact_weight(weight: Fp8Matrix) -> Tensor:
    factors = weight.scales.cpu().double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight.values.cpu().double() * factors[: weight.shape[0]]


def assert_close(out: Tensor, expected: Tensor, *, factor: float = 1.0) -> None:
    atol = factor * TOLERANCE[out.dtype] * float(expected.abs().max())
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0.0, atol=atol)


def bytes_of(x: Tensor) -> Tensor:
    return x.cpu().view(torch.uint8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantized_rows_have_these_bytes(device: str, choose: Choose, backend: str) -> None:
    x = torch.zeros(6, 128)
    x[1, :10] = torch.tensor([448, -448, 1, -1, 1.0625, 1.1875, 2**-9, 2**-10, -(2**-11), 17])
    x[2, :3] = torch.tensor([3e38, -1.5e38, 1e-45])
    x[3, :3] = torch.tensor([1e-12, -1e-10, 1e-45])
    x[4, :4] = torch.tensor([7, -3.5, 0.007, 6.9])
    x[5] = -2.0
    with choose(backend):
        values, scales = fp8.quantise_rows(x.to(device))
    assert values.dtype == torch.float8_e4m3fn
    found = bytes_of(values)
    assert not found[0].any()
    wanted = [0x7E, 0xFE, 0x38, 0xB8, 0x38, 0x3A, 0x01, 0x00, 0x80, 0x58]
    assert found[1, :10].tolist() == wanted  # ties go to the even neighbour
    assert found[2, :3].tolist() == [0x7E, 0xF6, 0x00]
    assert found[3, :3].tolist() == [0x49, 0xFE, 0x00]
    assert found[4, :4].tolist() == [0x7E, 0xF6, 0x2E, 0x7E]
    assert found[5].tolist() == [0xFE] * 128
    assert not found[1:, 10:].any(1)[:4].any()
    least = torch.tensor(1e-10) / 448
    largest = torch.tensor([0.0, 448.0, 3e38, 1e-10, 7.0, 2.0])
    expected = torch.maximum(largest / 448, least)
    assert torch.equal(scales.cpu()[:, 0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 128), (2, 640), (17, 256), (0, 128)])
def test_the_kernel_quantises_as_the_reference_does(
    device: str, choose: Choose, dtype: torch.dtype, num_rows: int, num_columns: int
) -> None:
    wide = torch.randn(num_rows, num_columns + 8) * 2.0 ** torch.randint(-9, 9, (num_rows, 1))
    x = wide.to(dtype).to(device)[:, 8:]
    expected_values, expected_scales = reference.quantise_rows(x.cpu())
    for backend in BACKENDS:
        with choose(backend):
            values, scales = fp8.quantise_rows(x)
        assert values.is_contiguous()
        assert scales.t().is_contiguous()
        assert torch.equal(scales.cpu(), expected_scales)
        assert torch.equal(bytes_of(values), bytes_of(expected_values))


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2, 130),
        torch.zeros(2, 0),
        torch.zeros(128),
        torch.zeros(2, 128, dtype=torch.int64),
        torch.zeros(2, 256)[:, ::2],
    ],
)
def test_rows_that_cannot_be_quantized_are_refused(x: Tensor) -> None:
    with refused(ShapeError):
        fp8.quantise_rows(x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs", "dtype", "has_bias", "has_residual"),
    [
        (1, 256, 512, torch.bfloat16, False, False),
        (1, 200, 1024, torch.float16, True, True),
        (2, 128, 640, torch.float32, False, True),
        (17, 320, 256, torch.bfloat16, True, False),
        (64, 72, 1536, torch.float32, True, True),
        (300, 136, 128, torch.float16, False, True),
        (0, 128, 128, torch.bfloat16, False, False),
    ],
)
def test_products_in_fp8_agree_with_their_definition(
    device: str,
    choose: Choose,
    backend: str,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    has_bias: bool,
    has_residual: bool,
) -> None:
    x = torch.randn(num_rows, num_inputs).to(dtype).to(device)
    weight = draw_weight(num_outputs, num_inputs, device=device)
    bias = torch.randn(num_outputs).to(dtype).to(device) if has_bias else None
    residual = torch.randn(num_rows, num_outputs).to(dtype).to(device) if has_residual else None
    expected = exact_rows(x) @ exact_weight(weight).t()
    for added in (bias, residual):
        expected += 0.0 if added is None else added.cpu().double()
    with choose(backend):
        out = layers.linear(x, weight, bias, residual=residual)
    assert out.dtype == dtype
    assert (out is residual) == has_residual
    if num_rows:
        assert_close(out, expected)


def test_many_rows_are_quantized_and_multiplied_in_stretches(
    device: str, choose: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "PRODUCT_ROWS", 8)
    x, weight = torch.randn(21, 256, device=device), draw_weight(64, 256, device=device)
    with choose("triton"):
        out = layers.linear(x, weight)
    assert_close(out, exact_rows(x) @ exact_weight(weight).t())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("num_rows", [65, 256, 512])
def test_products_of_many_rows_are_left_to_torch(
    device: str,
    choose: Choose,
    monkeypatch: pytest.MonkeyPatch,
    num_rows: int,
    has_residual: bool,
    has_bias: bool,
) -> None:
    asked = []

    def scaled_mm(values: Tensor, turned: Tensor, **options: Any) -> Tensor:
        asked.append(len(values))
        scales, own = options["scale_a"], Fp8Matrix(turned.t(), options["scale_b"].t())
        assert scales.stride() == (1, len(values))
        rows = values.float().view(len(values), -1, 128) * scales[..., None]
        product: Tensor = rows.flatten(1) @ own.dequantised(torch.float32).t()
        return product.to(options["output_dtype"])

    monkeypatch.setattr("torch.nn.functional.scaled_mm", scaled_mm)
    monkeypatch.setattr(fp8, "PRODUCT_ROWS", 256)
    x = torch.randn(num_rows, 512, device=device, dtype=torch.bfloat16)
    weight = draw_weight(128, 512, device=device)
    bias = torch.randn(128, device=device, dtype=torch.bfloat16) if has_bias else None
    residual = torch.randn(num_rows, 128, device=device).bfloat16() if has_residual else None
    expected = exact_rows(x) @ exact_weight(weight).t()
    for added in (bias, residual):
        expected += 0.0 if added is None else added.cpu().double()
    with choose("triton"):
        out = layers.linear(x, weight, bias, residual=residual)
    assert asked == ([80] if num_rows == 65 else [256] * (num_rows // 256))
    assert (out is residual) == has_residual
    assert_close(out, expected)


@pytest.mark.parametrize(
    ("num_rows", "shape", "dtype"),
    [
        (64, (128, 512), torch.bfloat16),
        (256, (120, 512), torch.bfloat16),
        (256, (128, 384), torch.bfloat16),
        (256, (128, 512), torch.float16),
    ],
)
def test_other_products_in_fp8_are_not_left_to_torch(
    device: str,
    choose: Choose,
    monkeypatch: pytest.MonkeyPatch,
    num_rows: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    monkeypatch.delattr(fp8, "_scaled_mm")
    monkeypatch.setattr(triton_module("fp8_products"), "multiply", lambda *_: None)
    x = torch.zeros(num_rows, shape[1], dtype=dtype, device=device)
    with choose("triton"):
        out = layers.linear(x, draw_weight(*shape, device=device))
    assert out.shape == (num_rows, shape[0])


def test_splits_of_the_inputs_are_added_in_their_order(
    device: str, choose: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = torch.randn(3, 1792, device=device), draw_weight(96, 1792, device=device)
    expected = exact_rows(x) @ exact_weight(weight).t()
    for splits in (1, 2, 5, 14):
        tiling = Fp8Tiling(16, 64, splits, num_warps=4, num_stages=3)
        monkeypatch.setattr(fp8, "choose_tiling", lambda *_, tiling=tiling: tiling)
        with choose("triton"):
            assert_close(layers.linear(x, weight), expected)


@pytest.mark.filterwarnings("ignore:All-NaN")
def test_a_row_does_not_depend_on_the_others(device: str, choose: Choose) -> None:
    weight = draw_weight(64, 1024, device=device)
    x, other = torch.randn(2, 5, 1024, device=device)
    other[2] = x[2]
    other[0] = torch.nan
    with choose("triton"):
        assert torch.equal(layers.linear(x, weight)[2], layers.linear(other, weight)[2])


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs", "expected"),
    [
        (1, 34816, 5120, Fp8Tiling(16, 64, 1, 4, 3)),
        (16, 5120, 17408, Fp8Tiling(16, 64, 7, 4, 3)),
        (32, 14336, 5120, Fp8Tiling(32, 64, 3, 4, 3)),
        (33, 1024, 512, Fp8Tiling(64, 64, 1, 4, 3)),
        (255, 5120, 5120, Fp8Tiling(128, 128, 7, 8, 3)),
        (8192, 5000, 5120, Fp8Tiling(128, 128, 1, 8, 3)),
    ],
)
def test_products_are_split_until_they_fill_a_gpu(
    num_rows: int, num_outputs: int, num_inputs: int, expected: Fp8Tiling
) -> None:
    assert choose_tiling(num_rows, num_outputs, num_inputs) == expected


X = torch.zeros(2, 256)
WEIGHT = Fp8Matrix(torch.zeros(72, 256).to(torch.float8_e4m3fn), torch.ones(1, 2))


@pytest.mark.parametrize(
    ("change", "x", "bias", "residual"),
    [
        ({}, torch.zeros(2, 128), None, None),
        ({}, X.long(), None, None),
        ({}, X, torch.zeros(71), None),
        ({}, X, torch.zeros(72).half(), None),
        ({}, X, None, torch.zeros(2, 71)),
        ({}, X, None, torch.zeros(72, 2).t()),
        ({"values": WEIGHT.values.float()}, X, None, None),
        ({"values": WEIGHT.values[None]}, X, None, None),
        ({"values": torch.zeros(256, 72).to(torch.float8_e4m3fn).t()}, X, None, None),
        ({"values": torch.zeros(72, 96).to(torch.float8_e4m3fn)}, X[:, :96], None, None),
        ({"scales": torch.ones(2, 2)}, X, None, None),
        ({"scales": torch.ones(1, 2).half()}, X, None, None),
        ({"scales": torch.ones(1, 4)[:, ::2]}, X, None, None),
    ],
)
def test_weights_in_fp8_that_do_not_fit_are_refused(
    change: dict[str, Tensor], x: Tensor, bias: Tensor | None, residual: Tensor | None
) -> None:
    with refused(ShapeError):
        layers.linear(x, WEIGHT._replace(**change), bias, residual=residual)


def test_weights_in_fp8_are_dequantised_block_by_block() -> None:
    weight = draw_weight(2, 200, 256)
    out = weight.dequantised(torch.float32)
    for expert in range(2):
        assert torch.equal(weight.at(expert).dequantised(torch.float32), out[expert])
    assert out[1, 130, 5] == weight.values[1, 130, 5].float() * weight.scales[1, 1, 0]
    assert out[0, 127, 128] == weight.values[0, 127, 128].float() * weight.scales[0, 0, 1]


class Slice:
    """A tensor that is read as those of weight files are."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return [*self._tensor.shape]

    def __getitem__(self, index: object) -> Tensor:
        return self._tensor[index]  # type: ignore[index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_mxfp4_are_the_numbers_of_the_checkpoint(dtype: torch.dtype) -> None:
    blocks = torch.randint(256, (2, 5, 3, 16), dtype=torch.uint8)
    scales = torch.randint(1, 250, (2, 5, 3), dtype=torch.uint8)
    expected = Mxfp4Weight(Slice(blocks), Slice(scales), dtype)[...].transpose(1, 2)
    weight = Mxfp4Matrix(blocks.flatten(2), scales)
    assert weight.shape == expected.shape
    assert torch.equal(weight.dequantised(dtype), expected)
    assert torch.equal(weight.at(1).dequantised(dtype), expected[1])


def test_a_cpu_does_not_multiply_in_fp8() -> None:
    assert not has_fp8(torch.device("cpu"))


REAL = [(34816, 5120), (5120, 17408), (14336, 5120), (1000, 1152)]


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 32, 100, 203, 256])
@pytest.mark.parametrize("shape", REAL)
def test_on_the_gpu_products_in_fp8_agree_with_the_reference(
    num_rows: int, shape: tuple[int, int]
) -> None:
    with torch.device("cuda"):
        weight = draw_weight(*shape, device="cuda")
        x = torch.randn(num_rows, shape[1]).bfloat16()
        bias = torch.randn(shape[0]).bfloat16()
        residual = torch.randn(num_rows, shape[0]).bfloat16()
    for added, stream in ((None, None), (bias, residual)):
        expected = reference.multiply_fp8(x, weight, added)
        if stream is not None:
            expected += stream.float()
        out = layers.linear(x, weight, added, residual=None if stream is None else stream.clone())
        # Tensor cores keep fewer than 24 bits of sums in FP8.
        assert_close(out, expected.double().cpu(), factor=2.0)
        again = layers.linear(x, weight, added, residual=stream)
        assert torch.equal(out, again)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 300])
def test_on_the_gpu_a_captured_product_in_fp8_sees_new_numbers(num_rows: int) -> None:
    weight = draw_weight(5120, 2048, device="cuda")
    x = torch.randn(num_rows, 2048, device="cuda", dtype=torch.bfloat16)
    residual = torch.zeros(num_rows, 5120, device="cuda", dtype=torch.bfloat16)
    layers.linear(x, weight, residual=residual.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers.linear(x, weight, residual=residual)
    for _ in range(2):
        x.normal_()
        residual.normal_()
        expected = layers.linear(x, weight, residual=residual.clone())
        graph.replay()
        assert torch.equal(residual, expected)
