"""The kernels of mixture-of-experts layers against their definition in float64."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.golden import refused
from tieredkv.errors import ShapeError
from tieredkv.kernels import experts, layers, reference, routing
from tieredkv.kernels.checks import NormStyle
from tieredkv.kernels.expert_layout import (
    LARGE,
    MIDDLE,
    NARROW,
    WIDE,
    Experts,
    Gate,
    RoutingRule,
    SharedExpert,
    Tiling,
    choose_tiling,
    most_blocks,
)

Choose = Callable[[str], AbstractContextManager[None]]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}
"""Errors relative to the largest element; inner values and the parts of experts are rounded."""

BACKENDS = [
    ("triton", torch.float32),
    ("triton", torch.float16),  # the interpreter multiplies the raw bits of bfloat16
    ("reference", torch.float32),
    ("reference", torch.bfloat16),
]

STYLE = NormStyle(0.1)

GATES = {
    "silu": Gate(),
    "gelu": Gate("gelu_tanh"),
    "clamped": Gate("clamped", is_interleaved=True, alpha=1.7, limit=1.5),
}


def draw(
    num_tokens: int,
    *,
    num_experts: int = 6,
    top_k: int = 3,
    hidden_size: int = 48,
    num_inner: int = 40,
    dtype: torch.dtype = torch.float32,
    gate: str = "silu",
    is_transposed: bool = False,
    has_bias: bool = False,
    device: str = "cpu",
) -> dict[str, Any]:
    """Draw the arguments of `compute_experts`."""

    def weight(num_outputs: int, num_inputs: int) -> Tensor:
        shape = (num_inputs, num_outputs) if is_transposed else (num_outputs, num_inputs)
        drawn: Tensor = (torch.randn(num_experts, *shape) * num_inputs**-0.5).to(dtype).to(device)
        return drawn.transpose(1, 2) if is_transposed else drawn

    def bias(num_outputs: int) -> Tensor | None:
        return torch.randn(num_experts, num_outputs).to(dtype).to(device) if has_bias else None

    scores = torch.randn(num_tokens, num_experts)
    weights, ids = scores.softmax(-1).topk(top_k)
    return {
        "x": torch.randn(num_tokens, hidden_size).to(dtype).to(device),
        "ids": ids.to(device),
        "weights": weights.to(dtype).to(device),
        "experts": Experts(
            gate_up=weight(2 * num_inner, hidden_size),
            down=weight(hidden_size, num_inner),
            gate_up_bias=bias(2 * num_inner),
            down_bias=bias(hidden_size),
            gate=GATES[gate],
        ),
    }


def defined(case: dict[str, Any]) -> Tensor:
    """Compute each pair by itself in float64."""
    x, chosen, gate = case["x"].double().cpu(), case["experts"], case["experts"].gate
    gate_up, down = chosen.gate_up.double().cpu(), chosen.down.double().cpu()
    out = torch.zeros_like(x)
    for token, ids in enumerate(case["ids"].tolist()):
        for rank, expert in enumerate(ids):
            both = gate_up[expert] @ x[token]
            if chosen.gate_up_bias is not None:
                both += chosen.gate_up_bias[expert].cpu()
            pairs = both.view(-1, 2).t() if gate.is_interleaved else both.view(2, -1)
            g, up = pairs
            if gate.kind == "clamped":
                g, up = g.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit) + 1
                inner = g * torch.sigmoid(gate.alpha * g) * up
            elif gate.kind == "silu":
                inner = g * torch.sigmoid(g) * up
            else:
                inner = g / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))) * up
            result = down[expert] @ inner
            if chosen.down_bias is not None:
                result += chosen.down_bias[expert].cpu()
            out[token] += case["weights"][token, rank].cpu() * result
    return out


def assert_close(out: Tensor, expected: Tensor) -> None:
    atol = TOLERANCE[out.dtype] * float(expected.abs().max())
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0.0, atol=atol)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize(
    ("gate", "is_transposed", "has_bias"),
    [("silu", False, False), ("gelu", False, True), ("clamped", True, True)],
)
@pytest.mark.parametrize("num_tokens", [1, 2, 9])
def test_the_chosen_experts_are_computed_and_added_up_by_weight(
    device: str,
    choose: Choose,
    backend: str,
    dtype: torch.dtype,
    gate: str,
    is_transposed: bool,
    has_bias: bool,
    num_tokens: int,
) -> None:
    case = draw(
        num_tokens,
        dtype=dtype,
        gate=gate,
        is_transposed=is_transposed,
        has_bias=has_bias,
        device=device,
    )
    before = case["x"].clone()
    expected = defined(case)
    with choose(backend):
        out = experts.compute_experts(**case)
    assert_close(out, expected)
    assert torch.equal(case["x"], before)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_whole_tiles_rows_that_lie_apart_and_int32_ids_are_taken(
    device: str, choose: Choose, backend: str, num_tokens: int
) -> None:
    case = draw(num_tokens, hidden_size=64, num_inner=32, num_experts=4, top_k=2, device=device)
    wide = torch.randn(num_tokens, 200, device=device)
    case |= {"x": wide[:, 8:72], "ids": case["ids"].int()}
    with choose(backend):
        out = experts.compute_experts(**case)
    assert_close(out, defined(case))


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_experts_are_added_to_the_residual_stream_which_is_normed(
    device: str, choose: Choose, backend: str, dtype: torch.dtype, num_tokens: int
) -> None:
    case = draw(num_tokens, dtype=dtype, device=device)
    residual, norm = torch.randn(num_tokens, 48).to(dtype), torch.randn(48).to(dtype)
    total = defined(case) + residual.double()
    expected = total / (total.pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * norm.double()
    residual = residual.to(device)
    with choose(backend):
        normed = experts.add_experts(**case, residual=residual, norm=norm.to(device), style=STYLE)
    assert_close(residual, total)
    assert_close(normed, expected)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_a_shared_expert_is_added_by_the_sigmoid_of_its_gate(
    device: str, choose: Choose, backend: str, dtype: torch.dtype, num_tokens: int
) -> None:
    case = draw(num_tokens, dtype=dtype, device=device)
    rows, logits = torch.randn(num_tokens, 48).to(dtype), torch.randn(num_tokens, 7).to(dtype)
    gate = logits.to(device)[:, 5]
    case["shared"] = SharedExpert(rows.to(device), gate)
    expected = defined(case) + rows.double() * torch.sigmoid(logits[:, 5, None].double())
    residual, norm = torch.randn(num_tokens, 48).to(dtype), torch.randn(48).to(dtype)
    total = expected + residual.double()
    divided = total / (total.pow(2).mean(-1, keepdim=True) + 0.1).sqrt()
    residual, style = residual.to(device), NormStyle(0.1, offset=1.0, is_rounded_first=False)
    with choose(backend):
        out = experts.compute_experts(**case)
        added = residual + out
        normed = experts.add_experts(**case, residual=residual, norm=norm.to(device), style=style)
    assert_close(out, expected)
    assert torch.equal(residual, added)
    assert_close(normed, divided * (norm.double() + 1.0))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_no_tokens_is_no_launch(device: str, choose: Choose, backend: str) -> None:
    case = draw(0, device=device)
    with choose(backend):
        assert experts.compute_experts(**case).shape == (0, 48)
        more = {"residual": case["x"], "norm": torch.ones(48, device=device), "style": STYLE}
        assert experts.add_experts(**case, **more).shape == (0, 48)
        ids, weights = experts.route(torch.zeros(0, 6, device=device), 2, RoutingRule())
    assert ids.shape == weights.shape == (0, 2)


@pytest.mark.parametrize("num_tokens", [2, 20])
def test_a_token_does_not_depend_on_the_others_nor_on_their_experts(
    device: str, choose: Choose, num_tokens: int
) -> None:
    case, other = draw(num_tokens, device=device), draw(num_tokens, device=device)
    for key in ("x", "ids", "weights"):
        other[key][1] = case[key][1]
    other["x"][0] = torch.nan
    other["experts"] = case["experts"]
    with choose("triton"):
        row, same = (experts.compute_experts(**each)[1] for each in (case, other))
    assert torch.equal(row, same)


def order(ids: Tensor, num_experts: int, num_rows: int) -> dict[int, list[list[int]]]:
    """Sort pairs, and return the blocks of each expert."""
    pairs, blocks = routing.sort_pairs(ids, num_experts, num_rows)
    found: dict[int, list[list[int]]] = {}
    is_behind = False
    for number, (expert, count) in enumerate(blocks.tolist()):
        assert 0 <= count <= num_rows
        is_behind = is_behind or not count
        assert is_behind == (not count)
        if count:
            first = number * num_rows
            found.setdefault(expert, []).append(pairs[first : first + count].tolist())
    return found


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"),
    [(1, 3, 5), (33, 4, 20), (32, 8, 256), (171, 3, 6), (430, 3, 5), (690, 3, 5)],
)
def test_pairs_are_sorted_by_expert_and_each_block_has_one_expert(
    device: str, num_tokens: int, top_k: int, num_experts: int
) -> None:
    ids = torch.rand(num_tokens, num_experts).argsort(1)[:, :top_k].to(device).contiguous()
    found = order(ids, num_experts, 16)
    assert list(found) == sorted({*ids.flatten().tolist()})
    for expert, blocks in found.items():
        own = (ids.flatten() == expert).nonzero()[:, 0].tolist()
        assert [pair for block in blocks for pair in block] == own
        assert [len(block) for block in blocks[:-1]] == [16] * (len(blocks) - 1)


def test_blocks_suffice_however_tokens_are_routed(device: str) -> None:
    last = torch.full((40, 1), 5, device=device)
    assert order(last, 6, 16) == {5: [[*range(16)], [*range(16, 32)], [*range(32, 40)]]}
    spread = torch.arange(40, device=device)[:, None] % 6
    assert [*map(len, order(spread, 6, 16).values())] == [1] * 6
    assert most_blocks(40, 6, 16) == 8
    for counts in ([35, 1, 1, 1, 1, 1], [17, 17, 2, 2, 1, 1], [40, 0, 0, 0, 0, 0]):
        assert sum(-(-count // 16) for count in counts) <= 8


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "is_sigmoid", "is_normalised", "has_scales"),
    [
        (8, 8, False, True, False),
        (60, 4, False, False, True),
        (60, 4, False, True, True),
        (5, 1, False, True, False),
        (40, 6, True, True, False),
        (40, 6, True, False, False),
    ],
)
def test_the_largest_scores_choose_the_experts(
    device: str,
    choose: Choose,
    backend: str,
    dtype: torch.dtype,
    num_experts: int,
    num_chosen: int,
    is_sigmoid: bool,
    is_normalised: bool,
    has_scales: bool,
) -> None:
    logits = (torch.rand(4, num_experts).argsort(1) / 8 - 3).to(dtype)  # no two are equal
    rule = RoutingRule(
        is_sigmoid=is_sigmoid,
        is_normalised=is_normalised,
        scale=1.5,
        bias=torch.randn(num_experts) if is_sigmoid else None,
        expert_scales=torch.rand(num_experts).to(dtype) if has_scales else None,
        logit_scale=0.25 if has_scales else 1.0,
    )
    scaled = rule.logit_scale * logits.double()
    exact = scaled.sigmoid() if is_sigmoid else scaled.softmax(-1)
    wanted = (exact if rule.bias is None else exact + rule.bias).topk(num_chosen).indices
    expected = exact.gather(1, wanted)
    if is_normalised:
        expected = expected / expected.sum(-1, keepdim=True)
    expected = 1.5 * expected
    if rule.expert_scales is not None:
        expected = expected * rule.expert_scales[wanted]
    moved = rule._replace(
        bias=None if rule.bias is None else rule.bias.to(device),
        expert_scales=None if rule.expert_scales is None else rule.expert_scales.to(device),
    )
    with choose(backend):
        ids, weights = experts.route(logits.to(device), num_chosen, moved)
    assert ids.dtype == torch.int32
    assert torch.equal(ids.cpu(), wanted.int())
    torch.testing.assert_close(weights.cpu(), expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_logits_that_are_no_numbers_give_experts_of_the_layer(device: str, choose: Choose) -> None:
    logits = torch.full((3, 5), torch.nan, device=device)
    logits[1, 2], logits[2] = 1.0, -torch.inf
    for is_sigmoid in (False, True):
        with choose("triton"):
            ids, _ = experts.route(logits, 3, RoutingRule(is_sigmoid=is_sigmoid))
        assert (ids >= 0).all()
        assert (ids < 5).all()


@pytest.mark.parametrize(
    ("num_pairs", "expected"),
    [(8, NARROW), (1024, NARROW), (1032, MIDDLE), (8192, WIDE), (65536, LARGE)],
)
def test_tiles_grow_with_the_rows_of_an_expert(num_pairs: int, expected: Tiling) -> None:
    assert choose_tiling(num_pairs, 128, 2) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(3, 47)},
        {"x": torch.zeros(3, 48, dtype=torch.int64)},
        {"x": torch.zeros(3, 96)[:, ::2]},
        {"x": torch.zeros(3, 48).half()},
        {"ids": torch.zeros(2, 3, dtype=torch.int64)},
        {"ids": torch.zeros(3, 3)},
        {"ids": torch.zeros(3, 6, dtype=torch.int64)[:, ::2]},
        {"weights": torch.zeros(3, 2)},
        {"weights": torch.zeros(3, 3, dtype=torch.int64)},
        {"shared": SharedExpert(torch.zeros(3, 47), torch.zeros(3))},
        {"shared": SharedExpert(torch.zeros(3, 48).half(), torch.zeros(3))},
        {"shared": SharedExpert(torch.zeros(3, 48), torch.zeros(3, 1))},
        {"shared": SharedExpert(torch.zeros(3, 48), torch.zeros(3, dtype=torch.int32))},
    ],
)
def test_tensors_that_disagree_are_refused(change: dict[str, Any]) -> None:
    with refused(ShapeError):
        experts.compute_experts(**(draw(3) | change))


@pytest.mark.parametrize(
    "change",
    [
        {"residual": torch.zeros(3, 47)},
        {"residual": torch.zeros(3, 48).half()},
        {"residual": torch.zeros(3, 96)[:, ::2]},
        {"norm": torch.ones(47)},
        {"ids": torch.zeros(3, 3)},
    ],
)
def test_a_residual_or_norm_that_does_not_fit_is_refused(change: dict[str, Tensor]) -> None:
    more = {"residual": torch.zeros(3, 48), "norm": torch.ones(48), "style": STYLE}
    with refused(ShapeError):
        experts.add_experts(**(draw(3) | more | change))


def test_rows_that_are_too_wide_are_refused() -> None:
    with refused(ShapeError):
        experts.compute_experts(**draw(1, hidden_size=layers.MAX_HIDDEN_SIZE + 2))


@pytest.mark.parametrize(
    "change",
    [
        {"gate_up": torch.zeros(6, 79, 48)},
        {"gate_up": torch.zeros(6, 80, 96)[..., ::2]},
        {"down": torch.zeros(6, 48, 41)},
        {"gate_up_bias": torch.zeros(6, 79)},
        {"down_bias": torch.zeros(6, 96)[:, ::2]},
        {"down_bias": torch.zeros(6, 48).half()},
    ],
)
def test_weights_that_disagree_are_refused(change: dict[str, Tensor]) -> None:
    case = draw(3)
    with refused(ShapeError):
        experts.compute_experts(**(case | {"experts": case["experts"]._replace(**change)}))


@pytest.mark.parametrize(
    ("logits", "num_chosen"),
    [
        (torch.zeros(6), 2),
        (torch.zeros(2, 6, dtype=torch.int64), 2),
        (torch.zeros(2, 12)[:, ::2], 2),
        (torch.zeros(2, 6), 7),
        (torch.zeros(2, 6), 0),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(logits: Tensor, num_chosen: int) -> None:
    with refused(ShapeError):
        experts.route(logits, num_chosen, RoutingRule())


def test_a_bias_or_scales_of_other_experts_are_refused() -> None:
    for rule in (RoutingRule(bias=torch.zeros(5)), RoutingRule(expert_scales=torch.zeros(7))):
        with refused(ShapeError):
            experts.route(torch.zeros(2, 6), 2, rule)


REAL: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {"num_experts": 128, "top_k": 8, "hidden_size": 2048, "num_inner": 768},
    "gemma-4-26b-a4b": {
        "num_experts": 128,
        "top_k": 8,
        "hidden_size": 2816,
        "num_inner": 704,
        "gate": "gelu",
    },
    "glm-4.7-flash": {"num_experts": 64, "top_k": 4, "hidden_size": 2048, "num_inner": 1536},
    "gpt-oss-20b": {
        "num_experts": 32,
        "top_k": 4,
        "hidden_size": 2880,
        "num_inner": 2880,
        "gate": "clamped",
        "is_transposed": True,
        "has_bias": True,
    },
}


def draw_real(name: str, num_tokens: int) -> dict[str, Any]:
    """Draw on the GPU, since the weights are large."""
    with torch.device("cuda"):
        return draw(num_tokens, **REAL[name], dtype=torch.bfloat16, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 32, 200, 1000, 8192])
@pytest.mark.parametrize("name", REAL)
def test_on_the_gpu_the_sizes_of_real_models_agree_with_the_reference(
    name: str, num_tokens: int
) -> None:
    case = draw_real(name, num_tokens)
    expected = reference.compute_experts(**case).double().cpu()
    out = experts.compute_experts(**case)
    assert_close(out, expected)
    assert torch.equal(out, experts.compute_experts(**case))
    other = draw_real(name, num_tokens) | {"experts": case["experts"]}
    for key in ("x", "ids", "weights"):
        other[key][-1] = case[key][-1]
    assert torch.equal(out[-1], experts.compute_experts(**other)[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 5, 300])
def test_on_the_gpu_a_captured_graph_sees_new_routes(num_tokens: int) -> None:
    case = draw_real("glm-4.7-flash", num_tokens)
    logits = torch.randn(num_tokens, 64, device="cuda", dtype=torch.bfloat16)

    def step() -> Tensor:
        ids, weights = experts.route(logits, 4, RoutingRule())
        return experts.compute_experts(case["x"], ids, weights, case["experts"])

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(2):
        logits.normal_()
        case["x"].normal_()
        graph.replay()
        assert torch.equal(out, step())


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [6, 128, 256])
@pytest.mark.parametrize("num_tokens", [1, 33, 256, 257, 20_000])
def test_on_the_gpu_pairs_are_sorted(num_tokens: int, num_experts: int) -> None:
    num_chosen, num_rows = min(8, num_experts), 128 if num_tokens > 1000 else 16
    ids = torch.rand(num_tokens, num_experts, device="cuda").argsort(1)
    ids = ids[:, :num_chosen].int().contiguous()
    pairs, blocks = routing.sort_pairs(ids, num_experts, num_rows)
    count = blocks[:, 1].long()
    assert count.sum() == ids.numel()
    is_row = torch.arange(num_rows, device="cuda") < count[:, None]
    found = pairs.view(-1, num_rows)[is_row]
    owner = blocks[:, 0].long()[:, None].expand(-1, num_rows)[is_row]
    assert torch.equal(found.long(), ids.flatten().sort(stable=True).indices)
    assert torch.equal(ids.flatten()[found.long()], owner)
