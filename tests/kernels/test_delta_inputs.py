"""What stands around the chunked gated delta rule, against the references."""

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import DEVICE, choose
from tieredkv.kernels import delta_inputs, state_plan, state_reference
from tieredkv.kernels.state_layout import ChunkRows, LayerState, StateSpan
from tieredkv.kernels.state_plan import PlanSize
from tieredkv.types import StateShape

SHAPES = [StateShape(4, 2, 16, 8, 4), StateShape(3, 1, 24, 20, 3), StateShape(2, 2, 8, 24, 2)]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7}


def plan(spans: list[StateSpan], monkeypatch: pytest.MonkeyPatch) -> ChunkRows:
    """Return the rows of more than 4 tokens, with room for a further one."""
    monkeypatch.setattr(state_plan, "MAX_STEP_TOKENS", 4)
    chunks = state_plan.make_rows(spans, DEVICE, PlanSize(len(spans), 20, len(spans), 9)).chunks
    assert chunks is not None
    return chunks


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_tokens", "beta_scale"), [(6, 1.0), (64, 2.0), (137, 1.0)])
def test_the_inputs_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    shape: StateShape,
    dtype: torch.dtype,
    num_tokens: int,
    beta_scale: float,
) -> None:
    def draw(*size: int) -> Tensor:
        return torch.randn(*size).to(dtype).to(DEVICE)

    other = 5
    spans = [StateSpan(0, 1, other), StateSpan(1, 7, 1), StateSpan(2, 9, num_tokens)]
    length = 9 + num_tokens
    mixed = draw(length, shape.num_channels + 5)[:, : shape.num_channels]
    rates = draw(length, 2 * shape.num_heads + 1)
    a, b = rates[:, : shape.num_heads], rates[:, shape.num_heads : -1]
    a_log, dt_bias = torch.randn(2, shape.num_heads, device=DEVICE)
    state = LayerState(torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int32), shape, 0)
    rows = plan(spans, monkeypatch)
    with choose("triton"):
        found = delta_inputs.split(mixed, a, b, a_log, dt_bias, state, rows, beta_scale)
    group = shape.num_heads // shape.num_key_heads
    q, k, v = (part.transpose(0, 1) for part in state_reference.split_heads(mixed, shape))
    beta, decay = state_reference.gates(a, b, a_log, dt_bias, beta_scale)
    for span in (spans[0], spans[2]):
        own = slice(span.first_token, span.first_token + span.num_tokens)
        summed = torch.cat([part.cumsum(0) for part in torch.split(decay[own], state_plan.CHUNK)])
        heads = q[own, ::group] * shape.key_dim**0.5, k[own, ::group], v[own]
        wanted = *heads, summed / math.log(2.0), beta[own]
        for part, expected in zip(found, wanted, strict=True):
            assert part.is_contiguous()
            error = (part[own].float() - expected.float()).abs().max()
            assert float(error) <= TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))
        assert torch.equal(found.v[own].flatten(1), mixed[own, -v[0].numel() :])


@pytest.mark.parametrize("shape", SHAPES)
def test_states_are_loaded_from_the_pages_of_rows_and_stored_there(
    monkeypatch: pytest.MonkeyPatch, shape: StateShape
) -> None:
    size, first_piece = shape.piece_elements, 3
    num_pieces = first_piece + shape.layer_pieces
    pages = torch.randperm(4 * num_pieces, dtype=torch.int32)[: 3 * num_pieces]  # 2 pieces a page
    tables = pages.view(3, -1).to(DEVICE)
    pool = torch.randn(4 * num_pieces, 2 * size + 3, device=DEVICE)
    state = LayerState(pool, tables, shape, first_piece)
    kept = ((9, 2),)  # only what comes before it is computed in chunks
    spans = [StateSpan(0, 0, 6), StateSpan(1, 6, 70, kept), StateSpan(0, 76, 3)]
    rows = plan(spans, monkeypatch)
    with choose("triton"):
        states, before = delta_inputs.load_states(state, rows), pool.clone()
        delta_inputs.store_states(state, rows, states + 1.0)
    heads = slice(0, shape.num_heads)
    for index, (source, target) in enumerate([(1, 2), (0, 0)]):  # the last row comes first
        where = state_reference.find_pieces(state, source, heads)
        stored = state_reference.view_pieces(state._replace(pool=before))[where]
        assert torch.equal(states[2 * index].flatten(1), stored)
        where = state_reference.find_pieces(state, target, heads)
        assert torch.equal(state_reference.view_pieces(state)[where], stored + 1.0)
    assert int((pool != before).sum()) == 2 * shape.num_heads * size  # and nothing else is written
