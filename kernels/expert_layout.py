"""The weights of a layer's experts, and how the work of a step is cut into tiles.

The module knows shapes only: no Triton, no routing, no models.
"""

from typing import Literal, NamedTuple

from torch import Tensor

from tieredkv.kernels.quantized import Format, Weight

GateKind = Literal["silu", "gelu_tanh", "clamped"]


class Gate(NamedTuple):
    """How an expert's inner values are made of its gate and up values.

    Attributes:
        kind: `silu` is `silu(gate) * up`; `gelu_tanh` is `gelu(gate) * up` with the tanh form;
            `clamped` is `gate * sigmoid(alpha * gate) * (up + 1)`, with gate at most `limit` and up
            within `-limit` and `limit`.
        is_interleaved: whether gate and up take turns in the rows of the weight; otherwise all of
            the gate comes first.
        alpha, limit: of `clamped`.

    Source: SwiGLU, Shazeer 2020; `clamped` as in gpt-oss, OpenAI 2025.
    """

    kind: GateKind = "silu"
    is_interleaved: bool = False
    alpha: float = 1.0
    limit: float = 0.0


class RoutingRule(NamedTuple):
    """How a router's logits choose and weigh the experts of a token.

    Attributes:
        is_sigmoid: whether an expert's score is the sigmoid of its logit, or else a softmax.
        is_normalised: whether the scores of the chosen experts are divided by their sum.
        scale: factor on all weights.
        bias: [num_experts] float32, added to the sigmoids to choose by, not to the weights; or
            None.
        expert_scales: [num_experts], a factor on each expert's weight; or None.
        logit_scale: factor on the logits.

    Source: `bias` as in DeepSeek-V3, 2024.
    """

    is_sigmoid: bool = False
    is_normalised: bool = True
    scale: float = 1.0
    bias: Tensor | None = None
    expert_scales: Tensor | None = None
    logit_scale: float = 1.0


class Experts(NamedTuple):
    """The weights of the experts of one layer, as a checkpoint has them.

    Attributes:
        gate_up: [num_experts, 2 * intermediate_size, hidden_size]; contiguous, or the transpose
            of a contiguous tensor. Quantized weights are contiguous.
        down: [num_experts, hidden_size, intermediate_size], as `gate_up`, and of its format.
        gate_up_bias: [num_experts, 2 * intermediate_size], contiguous, or None.
        down_bias: [num_experts, hidden_size], contiguous, or None.
        gate: what stands between the two products.
    """

    gate_up: Weight
    down: Weight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate: Gate = Gate()


class SharedExpert(NamedTuple):
    """Rows that are added to the sums of the chosen experts, times a gate.

    Attributes:
        rows: [num_tokens, hidden_size], contiguous, the dtype of the tokens' rows.
        gate: [num_tokens], a float dtype; rows are multiplied by its sigmoid.
    """

    rows: Tensor
    gate: Tensor


class Tile(NamedTuple):
    """What one program of a grouped product computes at a time, beside its rows.

    Attributes:
        num_outputs: rows of the weight.
        num_inputs: terms of the sums that are loaded at a time.
    """

    num_outputs: int
    num_inputs: int
    num_warps: int
    num_stages: int


class Tiling(NamedTuple):
    """How both products of a layer's experts are cut.

    Attributes:
        num_rows: rows of one expert; no tile has rows of two.
        gate_up: of the first product.
        down: of the second one, whose sums are shorter.
    """

    num_rows: int
    gate_up: Tile
    down: Tile


_BYTES = Tile(64, 128, num_warps=4, num_stages=4)
_MIXED = Tile(128, 64, num_warps=4, num_stages=4)

NARROW = Tiling(16, _BYTES, _BYTES)
"""For few rows an expert, where all time goes into reading weights: the fewest rows that tensor
cores take, and 64 KiB of weights on their way, so that three programs share a multiprocessor."""

MIDDLE = Tiling(32, _MIXED, _MIXED)
"""For tens of rows an expert: most experts still have one block, so that weights are read once."""

WIDE = Tiling(64, _MIXED, _MIXED)
"""For a hundred rows an expert: the fewest rows that Hopper's asynchronous products take."""

LARGE = Tiling(128, Tile(256, 64, num_warps=8, num_stages=3), Tile(128, 64, 8, 3))
"""For prefill, which is limited by arithmetic: the largest tile whose sums fit into registers; and
for short sums half of it, so that one of two programs multiplies while the other stores."""

EXACT = Tiling(16, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))
"""For float32, which tensor cores do not compute."""


_FP8_BYTES = Tile(64, 128, num_warps=4, num_stages=4)
_FP8_MIXED = Tile(128, 128, num_warps=4, num_stages=3)

FP8_TILINGS = (
    Tiling(16, _FP8_BYTES, _FP8_BYTES),
    Tiling(32, _FP8_BYTES, _FP8_BYTES),
    Tiling(64, _FP8_MIXED, _FP8_MIXED),
    Tiling(64, _FP8_MIXED, _FP8_MIXED),
)
"""For weights in FP8, by rows an expert. A tile has the 128 inputs that have one scale, and at
least the 64 outputs that Hopper's tensor cores take. Blocks of 128 rows are no faster than those of
64: 1,054 us instead of 937 for 8,192 tokens and a layer of Qwen3.6-35B-A3B (H200)."""

_MXFP4_FEW = Tile(128, 128, num_warps=4, num_stages=4)
_MXFP4_BYTES = Tile(64, 128, num_warps=4, num_stages=4)
_MXFP4_MIXED = Tile(128, 64, num_warps=4, num_stages=3)

MXFP4_TILINGS = (
    Tiling(16, _MXFP4_FEW, _MXFP4_FEW),
    Tiling(32, _MXFP4_BYTES, _MXFP4_BYTES),
    Tiling(64, _MXFP4_MIXED, _MXFP4_MIXED),
    Tiling(64, _MXFP4_MIXED, _MXFP4_MIXED),
)
"""For weights in MXFP4, by rows an expert. Each program makes the numbers of its weights from their
bytes. Blocks of 128 rows are no faster than those of 64: 9.4 ms and more instead of 7.3 for 8,192
tokens and a layer of gpt-oss-120b (H200)."""

_TILINGS: dict[Format, tuple[Tiling, ...]] = {
    "plain": (NARROW, MIDDLE, WIDE, LARGE),
    "fp8": FP8_TILINGS,
    "mxfp4": MXFP4_TILINGS,
}


def choose_tiling(
    num_pairs: int, num_experts: int, element_bytes: int, kind: Format = "plain"
) -> Tiling:
    """Choose a tiling by the mean number of rows an expert, which is known on the host.

    Args:
        num_pairs: tokens times the experts of each.
        num_experts: in the layer.
        element_bytes: of the rows.
        kind: format of the weights.
    """
    if element_bytes > 2 and kind != "fp8":
        return EXACT
    narrow, middle, wide, large = _TILINGS[kind]
    mean_rows = num_pairs / num_experts
    if mean_rows <= 8:  # of a mean of 8, one expert in 270 has more than 16
        return narrow
    if mean_rows <= 24:
        return middle
    return wide if mean_rows <= 96 else large


def most_blocks(num_pairs: int, num_experts: int, num_rows: int) -> int:
    """Return how many blocks of rows the pairs fill at most, however they are routed."""
    num_used = min(num_pairs, num_experts)
    return (num_pairs + num_used * (num_rows - 1)) // num_rows
