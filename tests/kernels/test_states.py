"""The gated delta rule and its convolution over paged states: Triton and reference.

Both are compared with the definition in float64 and with transformers; `state_cases` has the cases.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.golden import refused
from tests.kernels.conftest import DEVICE, choose
from tests.kernels.state_cases import (
    LAYER,
    RelativeError,
    StateCase,
    compare_cut,
    compare_kept,
    error_in_rows,
    make_case,
    same_bits,
)
from tests.levels import few
from tieredkv.errors import ShapeError
from tieredkv.kernels import state_reference, states
from tieredkv.kernels.state_layout import StateSpan
from tieredkv.kernels.state_plan import NUM_FIELDS, PlanSize, make_rows
from tieredkv.types import StateShape

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCE)

SMALL = StateShape(4, 2, 16, 8, 4)
ODD = StateShape(3, 1, 24, 20, 3)
EQUAL = StateShape(2, 2, 8, 24, 2)
BROAD = StateShape(6, 2, 24, 40, 5)
SHAPES = [SMALL, ODD, EQUAL, BROAD]
UPDATES = [
    *((shape, torch.float32) for shape in (SMALL, ODD, EQUAL)),
    (SMALL, torch.bfloat16),
    (ODD, torch.float16),
    (BROAD, torch.float32),
    (BROAD, torch.bfloat16),
]
REAL = StateShape(48, 16, 128, 128, 4)

MIXED = [(1, False), (17, True), (0, False), (3, True), (1, True), (20, False), (2, False)]
"""Rows of (tokens, whether they start at position 0); one is padding, two are long."""

KEPT = {1: [1, 16], 3: [2], 5: [7, 17]}
"""Behind how many tokens of which of these rows states are kept."""

BACKENDS = ["triton", "reference"]


def check_pool(
    measure: RelativeError, case: StateCase, before: Tensor, expected: Tensor, which: int
) -> None:
    """Require the expected states, or inputs, of the rows, and all else as it was before.

    Args:
        measure: of errors.
        case: after the call.
        before: the whole pool before it.
        expected: the whole pool after it.
        which: 0 for the states of heads, 1 for the inputs of the convolution.
    """
    rest = case.pool.clone()
    for row in case.written:
        place = case.places(row)[which]
        assert measure(case.pool.view(-1)[place], expected.view(-1)[place]) < 1e-5
        rest.view(-1)[place] = before.view(-1)[place]
    assert same_bits(rest, before), "an element was written that is not of these rows' states"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_convolution_equals_its_definition(
    relative_error: RelativeError, backend: str, dtype: torch.dtype, shape: StateShape
) -> None:
    case = make_case(MIXED, shape, dtype=dtype, has_bias=shape is not ODD, kept=KEPT)
    before, (expected, pool) = case.pool.clone(), case.expected_conv()
    out = case.convolve(backend)
    assert out.dtype == dtype
    assert error_in_rows(relative_error, case, out, expected) < TOLERANCE[dtype]
    check_pool(relative_error, case, before, pool, 1)
    for row in case.written:
        place = case.places(row)[1]
        stored = case.pool.view(-1)[place], pool.view(-1)[place]
        assert same_bits(*stored), "inputs are kept as is"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("shape", "dtype"), few(UPDATES, 4))
def test_the_delta_rule_equals_its_definition(
    relative_error: RelativeError, backend: str, dtype: torch.dtype, shape: StateShape
) -> None:
    beta_scale = 2.0 if shape is ODD else 1.0
    case = make_case(MIXED, shape, dtype=dtype, beta_scale=beta_scale, kept=KEPT)
    before, (expected, pool) = case.pool.clone(), case.expected_update()
    out = case.update(backend)
    assert out.dtype == dtype and out.shape[1:] == (shape.num_heads, shape.value_dim)
    assert error_in_rows(relative_error, case, out, expected) < TOLERANCE[dtype]
    check_pool(relative_error, case, before, pool, 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pieces_per_page", [1, 2, 5, 64])
def test_pieces_are_found_in_pages_of_any_number_of_them(
    relative_error: RelativeError, backend: str, pieces_per_page: int
) -> None:
    case = make_case([(2, False), (1, False)], SMALL, pieces_per_page=pieces_per_page)
    for which, run, expect in (
        (1, case.convolve, case.expected_conv),
        (0, case.update, case.expected_update),
    ):
        before, (expected, pool) = case.pool.clone(), expect()
        assert error_in_rows(relative_error, case, run(backend), expected) < 1e-5
        check_pool(relative_error, case, before, pool, which)


LAYERS = [(1, 1.0), (17, 2.0), (3, 2.0), (16, 1.0), (40, 1.0), (64, 2.0)]


@pytest.mark.parametrize(
    ("num_tokens", "beta_scale", "backend"),
    few([*((*it, backend) for it in LAYERS for backend in BACKENDS), (130, 2.0, "reference")], 4),
)
def test_a_layer_computes_what_transformers_does(
    relative_error: RelativeError, num_tokens: int, beta_scale: float, backend: str
) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    case = make_case([(num_tokens, False)], SMALL, beta_scale=beta_scale)
    (span,), shape = case.spans, case.shape
    own = slice(span.first_token, span.first_token + num_tokens)
    held, kept = case.held(span.row)
    assert case.bias is not None
    x, weight, bias, a, b, a_log, dt_bias = (
        it.cpu() for it in (case.x[own], case.weight, case.bias, case.a[own], case.b[own],
            case.a_log, case.dt_bias)
    )  # fmt: skip
    convolved = modeling.causal_conv1d_update(x.T[None], kept[None], weight, bias, "silu")[0].T
    keys = shape.num_key_heads * shape.key_dim
    q, k, v = convolved.split([keys, keys, shape.num_heads * shape.value_dim], dim=1)
    g = -a_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    is_long = num_tokens > state_reference.MAX_SINGLE_TOKENS
    rule = "torch_chunk_gated_delta_rule" if is_long else "torch_recurrent_gated_delta_rule"
    expected, states_after = getattr(modeling, rule)(
        *(it.unflatten(1, (-1, shape.key_dim))[None] for it in (q, k)),
        v.unflatten(1, (-1, shape.value_dim))[None],
        g=g[None],
        beta=b.sigmoid()[None] * beta_scale,
        initial_state=held[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    mixed = case.convolve(backend)
    out = replace(case, mixed=mixed).update(backend)
    place, kept_place = case.places(span.row)
    assert relative_error(mixed[own].cpu(), convolved) < 1e-5
    assert relative_error(out[own].cpu(), expected[0]) < 1e-5
    assert relative_error(case.pool.view(-1)[place].cpu(), states_after[0]) < 1e-5
    # transformers shifts its kept inputs in place
    assert torch.equal(case.pool.view(-1)[kept_place].cpu(), kept)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16]))
def test_a_row_has_the_same_bits_alone_as_in_a_batch(backend: str, dtype: torch.dtype) -> None:
    batch = make_case(MIXED, SMALL, dtype=dtype)
    alone = [batch.alone(index) for index in range(len(batch.spans))]
    for run in (StateCase.convolve, StateCase.update):
        out = run(batch, backend)
        for span, case in zip(batch.spans, alone, strict=True):
            own = slice(span.first_token, span.first_token + span.num_tokens)
            assert same_bits(run(case, backend), out[own])
            for place in batch.places(span.row) if span.num_tokens else ():
                assert same_bits(case.pool.view(-1)[place], batch.pool.view(-1)[place])


@pytest.mark.parametrize("is_start", [True, False])
@pytest.mark.parametrize("at", [64, 128, 192])
@pytest.mark.parametrize("shape", [SMALL, ODD])
def test_cuts_between_chunks_change_no_bit_of_the_reference(
    shape: StateShape, at: int, is_start: bool
) -> None:
    case = make_case([(230, is_start)], shape)
    assert same_bits(*compare_cut("reference", case, at, StateCase.update))
    assert same_bits(*compare_cut("reference", case, at, StateCase.convolve))


@pytest.mark.parametrize("at", [1, 16, 63, 100, 229])
def test_cuts_within_chunks_change_little(relative_error: RelativeError, at: int) -> None:
    case = make_case([(230, False)], ODD)
    assert relative_error(*compare_cut("reference", case, at, StateCase.update)) < 1e-5
    assert relative_error(*compare_cut("reference", case, at, StateCase.convolve)) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("places", few([[1, 19], [16, 30], [2, 18], [29]]))
def test_a_state_kept_within_a_row_is_that_of_the_row_cut_there(
    backend: str, places: list[int]
) -> None:
    case = make_case([(31, False)], SMALL, kept={0: places})
    for run in (StateCase.convolve, StateCase.update):
        whole, cut = compare_kept(backend, case, run)
        assert same_bits(whole, cut)


@pytest.mark.parametrize("at", few([2, 16, 1, 30]))
def test_no_cut_changes_a_bit_of_the_kernels(at: int) -> None:
    case = make_case([(31, False)], SMALL)
    assert same_bits(*compare_cut("triton", case, at, StateCase.update))
    assert same_bits(*compare_cut("triton", case, at, StateCase.convolve))


def test_tiles_behind_the_end_of_a_row_do_nothing(relative_error: RelativeError) -> None:
    case = make_case([(1, False), (50, False)], EQUAL).copy(size=PlanSize(5, 9))
    before, (expected, pool) = case.pool.clone(), case.expected_conv()
    assert error_in_rows(relative_error, case, case.convolve("triton"), expected) < 1e-5
    check_pool(relative_error, case, before, pool, 1)


@pytest.mark.parametrize("num_tokens", [1, 17, 64, 65, 200])
def test_chunks_agree_with_single_tokens(
    relative_error: RelativeError, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    case, chunked = (it := make_case([(num_tokens, False)], ODD)), it.copy()
    monkeypatch.setattr(state_reference, "MAX_SINGLE_TOKENS", 1000)
    (span,), out = case.spans, case.update("reference")
    monkeypatch.setattr(state_reference, "MAX_SINGLE_TOKENS", 0)
    assert error_in_rows(relative_error, case, chunked.update("reference"), out) < 1e-5
    place = case.places(span.row)[0]
    assert relative_error(chunked.pool.view(-1)[place], case.pool.view(-1)[place]) < 1e-5


def test_tokens_that_forget_all_take_no_digits_of_others(relative_error: RelativeError) -> None:
    case = make_case([(64, False)], SMALL)
    case.a[::7] = 30_000.0
    expected, pool = case.expected_update()
    before = case.pool.clone()
    assert error_in_rows(relative_error, case, case.update("reference"), expected) < 3e-6
    check_pool(relative_error, case, before, pool, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_decays_of_small_softplus_keep_their_digits(
    relative_error: RelativeError, backend: str
) -> None:
    shape = StateShape(1, 1, 4, 4, 2)
    case = make_case([(64, False)], shape)
    case.a_log[:], case.dt_bias[:] = math.log(16.0), -9.7
    case.b[:] = -30.0  # nothing is added, so that only decays are seen
    pool = case.expected_update()[1]
    case.update(backend)
    place = case.places(case.spans[0].row)[0]
    assert relative_error(case.pool.view(-1)[place], pool.view(-1)[place]) < 5e-6


def zero_head(case: StateCase) -> None:
    case.pool.view(-1)[case.places(case.spans[0].row)[0][1]] = 0.0


def swap_heads(case: StateCase) -> None:
    own = case.places(case.spans[0].row)[0]
    case.pool.view(-1)[own] = case.pool.view(-1)[own.flip(0)]


def shift_inputs(case: StateCase) -> None:
    kept = case.places(case.spans[0].row)[1]
    case.pool.view(-1)[kept] = case.pool.view(-1)[kept.roll(1, dims=1)]


def zero_all(case: StateCase) -> None:
    for place in case.places(case.spans[0].row):
        case.pool.view(-1)[place] = 0.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("damage", "is_conv"),
    [
        (zero_head, False),
        (swap_heads, False),
        (zero_all, False),
        (shift_inputs, True),
        (zero_all, True),
    ],
)
def test_a_damaged_state_is_seen_in_the_outputs(
    relative_error: RelativeError, backend: str, damage: Callable[[StateCase], None], is_conv: bool
) -> None:
    case = make_case([(6, False)], SMALL)
    expected = (case.expected_conv() if is_conv else case.expected_update())[0]
    damage(case)
    out = case.convolve(backend) if is_conv else case.update(backend)
    assert error_in_rows(relative_error, case, out, expected) > 0.05


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_without_rows_or_tokens_writes_nothing(backend: str) -> None:
    for case in (
        (some := make_case([(2, False)], SMALL)).copy(spans=[]),
        some.copy(spans=[StateSpan(0, 0, 0)]),
        some.copy(spans=[StateSpan(0, 0, 0)], size=PlanSize(2, 3)),
    ):
        before = case.pool.clone()
        case.convolve(backend)
        case.update(backend)
        assert same_bits(case.pool, before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_bytes", [4, 20_000])
def test_pages_are_copied_whole_and_a_negative_source_is_zeros(
    backend: str, dtype: torch.dtype, page_bytes: int
) -> None:
    space = torch.randint(0, 256, (7, page_bytes + 12), dtype=torch.uint8, device=DEVICE)
    pool, expected = space[:, 4 : 4 + page_bytes], space.clone()
    source = torch.tensor([3, -1, 0, 3], dtype=dtype, device=DEVICE)
    target = torch.tensor([5, 1, 2, 6], dtype=dtype, device=DEVICE)
    for one, other in ((3, 5), (0, 2), (3, 6)):
        expected[other, 4 : 4 + page_bytes] = space[one, 4 : 4 + page_bytes]
    expected[1, 4 : 4 + page_bytes] = 0
    with choose(backend):
        states.copy_pages(pool, source, target)
        states.copy_pages(pool, source[:0], target[:0])
    assert torch.equal(space, expected)


@pytest.mark.parametrize(
    "change",
    [
        {"pool_bytes": torch.zeros(4, 8)},
        {"pool_bytes": torch.zeros(4, 10, dtype=torch.uint8)},
        {"pool_bytes": torch.zeros(4, 12, dtype=torch.uint8)[:, 2:10]},
        {"source": torch.zeros(2)},
        {"source": torch.zeros(3, dtype=torch.int64)},
        {"target": torch.zeros(2, dtype=torch.int32)},
        {"target": torch.zeros(4, dtype=torch.int64)[::2]},
    ],
)
def test_copies_that_do_not_fit_are_refused(change: dict[str, Tensor]) -> None:
    given = {
        "pool_bytes": torch.zeros(4, 8, dtype=torch.uint8),
        "source": torch.zeros(2, dtype=torch.int64),
        "target": torch.zeros(2, dtype=torch.int64),
    }
    with refused(ShapeError):
        states.copy_pages(**(given | change))


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(6, 95)},
        {"x": torch.zeros(6, 96, dtype=torch.int32)},
        {"x": torch.zeros(96, 6).T},
        {"weight": torch.zeros(96, 3)},
        {"weight": torch.zeros(4, 96).T},
        {"weight": torch.zeros(96, 8)[:, :4]},
        {"bias": torch.zeros(95)},
        {"bias": torch.zeros(96, dtype=torch.float64)},
        {"pool": torch.zeros(40, 127)},
        {"pool": torch.zeros(40, 400, dtype=torch.bfloat16)},
        {"tables": torch.zeros(1, 4, dtype=torch.int32)},
        {"tables": torch.zeros(1, 9, dtype=torch.int64)},
        {"shape": StateShape(4, 3, 16, 8, 4)},
        {"shape": StateShape(4, 2, 16, 8, 1)},
        {"shape": StateShape(4, 0, 16, 8, 4)},
        {"spans": [StateSpan(0, 4, 5)]},
        {"spans": [StateSpan(1, 0, 2)]},
        {"spans": [StateSpan(0, 0, 3, ((1, 1),))]},
        {"spans": [StateSpan(0, 0, 3, ((3, 0),))]},
        {"spans": [StateSpan(0, 0, 3, ((2, 0), (1, 0)))]},
        {"size": PlanSize(1)},
    ],
)
def test_convolutions_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    case = make_case([(3, False)], SMALL, device="cpu")
    with refused(ShapeError):
        replace(case, **change).convolve()


@pytest.mark.parametrize(
    "change",
    [
        {"mixed": torch.zeros(6, 95)},
        {"mixed": torch.zeros(4, 96)},
        {"a": torch.zeros(6, 3)},
        {"a": torch.zeros(4, 6).T},
        {"b": torch.zeros(5, 4)},
        {"b": torch.zeros(6, 4, dtype=torch.int32)},
        {"a_log": torch.zeros(3)},
        {"dt_bias": torch.zeros(8)[::2]},
    ],
)
def test_updates_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    case = make_case([(3, False)], SMALL, device="cpu")
    with refused(ShapeError):
        replace(case, **change).update()


@pytest.mark.parametrize(
    "given",
    [
        torch.zeros(1, 2, dtype=torch.int32),
        torch.zeros(1, NUM_FIELDS, dtype=torch.int64),
        torch.zeros(2, NUM_FIELDS + 1, dtype=torch.int32)[:, :-1],
    ],
)
def test_rows_that_do_not_fit_are_refused(given: Tensor) -> None:
    case = make_case([(3, False)], SMALL, device="cpu")
    rest = case.x, case.weight, case.bias, case.state
    with refused(ShapeError):
        states.short_conv(*rest, case.rows._replace(rows=given))


def test_keys_too_large_for_the_kernels_are_refused() -> None:
    case = make_case([(1, True)], StateShape(1, 1, 264, 8, 2), device="cpu")
    case.update("reference")
    with refused(ShapeError):
        case.update("triton")


def test_pieces_of_layers_follow_each_other() -> None:
    assert (REAL.num_channels, REAL.piece_elements, REAL.layer_pieces) == (10_240, 16_384, 50)
    assert (ODD.num_channels, ODD.conv_elements, ODD.layer_pieces) == (108, 216, 4)
    case = make_case([(1, False)], SMALL)
    assert case.state.first_piece == LAYER * (4 + 3)
    assert case.state.pieces_per_page == 3


GPU_ROWS = {
    "decode": [(1, index % 5 == 0) for index in range(32)],
    "long": [(64, False)],
    "mixed": [(1, False), (64, True), (0, False), (5, False), (1, True), (33, False)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", GPU_ROWS)
def test_on_the_gpu_states_equal_the_reference(
    relative_error: RelativeError, rows: str, dtype: torch.dtype
) -> None:
    case = make_case(GPU_ROWS[rows], REAL, pieces_per_page=7, dtype=dtype, device="cuda")
    other = case.copy()
    for run in (StateCase.convolve, StateCase.update):
        before, expected = other.pool.clone(), run(other, "reference")
        out = run(case)
        assert error_in_rows(relative_error, case, out, expected) < TOLERANCE[dtype]
        which = 1 if run is StateCase.convolve else 0
        check_pool(relative_error, case, before, other.pool, which)
        case.pool.copy_(other.pool)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_gpu_a_row_has_the_same_bits_alone_as_in_a_batch(dtype: torch.dtype) -> None:
    batch = make_case(GPU_ROWS["mixed"], REAL, pieces_per_page=7, dtype=dtype, device="cuda")
    alone = [batch.alone(index) for index in range(len(batch.spans))]
    for run in (StateCase.convolve, StateCase.update):
        out = run(batch)
        for span, case in zip(batch.spans, alone, strict=True):
            own = slice(span.first_token, span.first_token + span.num_tokens)
            assert same_bits(run(case), out[own])
            for place in batch.places(span.row) if span.num_tokens else ():
                assert same_bits(case.pool.view(-1)[place], batch.pool.view(-1)[place])


@pytest.mark.gpu
def test_on_the_gpu_a_captured_step_follows_new_rows(relative_error: RelativeError) -> None:
    case = make_case(GPU_ROWS["decode"], REAL, pieces_per_page=7, device="cuda")
    other, rows = case.copy(), case.rows._replace(spans=[])

    def step() -> tuple[Tensor, Tensor]:
        mixed = states.short_conv(case.x, case.weight, case.bias, case.state, rows)
        rest = case.a, case.b, case.a_log, case.dt_bias, case.state, rows
        return mixed, states.delta_rule(mixed, *rest)

    begun = case.pool.clone()
    step()  # compile before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mixed, out = step()
    fewer = [*case.spans[:20], *(it._replace(num_tokens=0) for it in case.spans[20:])]
    rows.rows.copy_(make_rows(fewer, "cuda").rows)
    case.pool.copy_(begun)
    graph.replay()
    torch.cuda.synchronize()
    expected = replace(other, spans=fewer[:20])
    convolved = expected.convolve("reference")
    updated = replace(expected, mixed=convolved).update("reference")
    assert error_in_rows(relative_error, expected, mixed, convolved) < 1e-5
    assert error_in_rows(relative_error, expected, out, updated) < 1e-5
    for span in fewer[:20]:
        for place in other.places(span.row):
            assert relative_error(case.pool.view(-1)[place], other.pool.view(-1)[place]) < 1e-5
    for span in case.spans[20:]:
        for place in other.places(span.row):
            assert same_bits(case.pool.view(-1)[place], begun.view(-1)[place])
