"""The chunked gated delta rule: what it needs of fla-core, and on a GPU what it computes."""

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.state_cases import (
    RelativeError,
    StateCase,
    compare_cut,
    compare_kept,
    error_in_rows,
    make_case,
    same_bits,
)
from tieredkv.kernels import delta_chunks, states
from tieredkv.kernels.state_layout import StateRows
from tieredkv.kernels.state_plan import PlanSize, make_rows
from tieredkv.types import StateShape

SHAPE = StateShape(48, 16, 128, 128, 4)

ROWS = [(1, False), (300, True), (0, False), (700, False), (33, False), (257, True)]
KEPT = {3: [630, 694], 5: [60, 200]}
"""Behind how many tokens of which of these rows states are kept; of one, nothing is in chunks."""


@pytest.mark.parametrize("version", ["0.5.2", "0.6.1", "1.0.0", None])
def test_a_missing_or_another_version_of_the_kernels_is_told(
    monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    why = delta_chunks.why_missing()
    assert why is not None
    assert why.endswith("; install `tieredkv[linear]`")
    assert (version or "not installed") in why


def test_the_version_that_is_known_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: delta_chunks.VERSION)
    assert delta_chunks.why_missing() is None


def make_gpu_case(
    rows: Sequence[tuple[int, bool]] = ROWS, kept: Mapping[int, Sequence[int]] = KEPT
) -> StateCase:
    return make_case(rows, SHAPE, pieces_per_page=7, dtype=torch.bfloat16, device="cuda", kept=kept)


@pytest.mark.gpu
def test_on_the_gpu_rows_in_chunks_are_near_the_reference(relative_error: RelativeError) -> None:
    case = make_gpu_case()
    other = case.copy()
    expected, out = other.update("reference"), case.update()
    assert error_in_rows(relative_error, case, out, expected) < 0.02
    for row in case.written:
        place = case.places(row)[0]
        assert relative_error(case.pool.view(-1)[place], other.pool.view(-1)[place]) < 0.02


@pytest.mark.gpu
def test_on_the_gpu_rows_in_chunks_have_the_same_bits_alone_and_in_a_larger_plan() -> None:
    batch = make_gpu_case()
    alone = [batch.alone(index) for index in range(len(batch.spans))]
    padded = batch.copy(size=PlanSize.of_any(2176, 64))
    out, other = batch.update(), padded.update()
    assert same_bits(padded.pool, batch.pool)
    for span, case in zip(batch.spans, alone, strict=True):
        own = slice(span.first_token, span.first_token + span.num_tokens)
        assert same_bits(case.update(), out[own])
        assert same_bits(other[own], out[own])
        if span.num_tokens:
            place = batch.places(span.row)[0]
            assert same_bits(case.pool.view(-1)[place], batch.pool.view(-1)[place])


@pytest.mark.gpu
@pytest.mark.parametrize("at", [320, 448])
def test_on_the_gpu_cuts_between_chunks_change_no_bit(at: int) -> None:
    case = make_gpu_case([(768, False)], {})
    assert same_bits(*compare_cut("auto", case, at, StateCase.update))


@pytest.mark.gpu
@pytest.mark.parametrize("places", [[640, 704], [512], [64, 128]])
def test_on_the_gpu_a_state_kept_within_a_row_is_that_of_the_row_cut_there(
    places: list[int],
) -> None:
    case = make_gpu_case([(places[-1] + 64, False)], {0: places})
    for run in (StateCase.convolve, StateCase.update):
        assert same_bits(*compare_kept("auto", case, run))


@pytest.mark.gpu
def test_on_the_gpu_a_captured_step_serves_any_rows_in_chunks() -> None:
    size = PlanSize.of_any(2176, 64)
    case = make_gpu_case().copy(size=size)
    begun, rows = case.pool.clone(), case.rows

    def step(rows: StateRows) -> Tensor:
        mixed = states.short_conv(case.x, case.weight, case.bias, case.state, rows)
        rest = case.a, case.b, case.a_log, case.dt_bias, case.state, rows
        return states.delta_rule(mixed, *rest)

    captured = rows._replace(spans=[])
    step(captured)  # compile before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(captured)
    assert rows.tiles is not None and rows.chunks is not None
    for spans in (case.spans, case.spans[:3], [case.spans[-1]], []):
        new = make_rows(spans, "cuda", size)
        assert new.tiles is not None and new.chunks is not None
        for mine, other in zip(
            (rows.rows, rows.tiles, *rows.chunks), (new.rows, new.tiles, *new.chunks), strict=True
        ):
            mine.copy_(other)
        case.pool.copy_(begun)
        graph.replay()
        replayed, pool = out.clone(), case.pool.clone()
        case.pool.copy_(begun)
        if spans:
            launched = step(make_rows(spans, "cuda"))
            own = replace(case, spans=spans).tokens()
            assert same_bits(replayed[own], launched[own])
        assert same_bits(pool, case.pool)
