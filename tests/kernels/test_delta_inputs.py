"""What stands around the chunked gated delta rule, against the references."""

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import DEVICE, choose
from tieredkv.kernels import delta_inputs, state_reference
from tieredkv.kernels.state_layout import LayerState, StateSpan
from tieredkv.types import StateShape

SHAPES = [StateShape(4, 2, 16, 8, 4), StateShape(3, 1, 24, 20, 3), StateShape(2, 2, 8, 24, 2)]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_tokens", "beta_scale"), [(1, 1.0), (16, 2.0), (37, 1.0)])
def test_the_inputs_are_those_of_the_reference(
    shape: StateShape, dtype: torch.dtype, num_tokens: int, beta_scale: float
) -> None:
    def draw(*size: int) -> Tensor:
        return torch.randn(*size).to(dtype).to(DEVICE)

    mixed = draw(num_tokens, shape.num_channels + 5)[:, : shape.num_channels]
    rates = draw(num_tokens, 2 * shape.num_heads + 1)
    a, b = rates[:, : shape.num_heads], rates[:, shape.num_heads : -1]
    a_log, dt_bias = torch.randn(2, shape.num_heads, device=DEVICE)
    state = LayerState(torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int32), shape, 0)
    with choose("triton"):
        found = delta_inputs.split(mixed, a, b, a_log, dt_bias, state, beta_scale)
    group = shape.num_heads // shape.num_key_heads
    q, k, v = (part.transpose(0, 1) for part in state_reference.split_heads(mixed, shape))
    beta, decay = state_reference.gates(a, b, a_log, dt_bias, beta_scale)
    wanted = q[:, ::group] * shape.key_dim**0.5, k[:, ::group], v, decay, beta
    for part, expected in zip(found, wanted, strict=True):
        assert part.is_contiguous()
        error = (part[0].float() - expected.float()).abs().max()
        assert float(error) <= TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))
    assert torch.equal(found.v[0].flatten(1), mixed[:, -v.flatten(1).shape[1] :])


@pytest.mark.parametrize("shape", SHAPES)
def test_states_are_loaded_from_the_pages_of_a_row_and_stored_there(shape: StateShape) -> None:
    size, first_piece = shape.piece_elements, 3
    num_pieces = first_piece + shape.layer_pieces
    pages = torch.randperm(2 * num_pieces, dtype=torch.int32)[:num_pieces]  # 2 pieces a page
    tables = torch.stack([pages.roll(1), pages]).to(DEVICE)
    pool = torch.randn(2 * num_pieces, 2 * size + 3, device=DEVICE)
    state, span = LayerState(pool, tables, shape, first_piece), StateSpan(1, 0, 1)
    where = state_reference.find_pieces(state, span, slice(0, shape.num_heads))
    pieces, before = state_reference.view_pieces(state), pool.clone()
    with choose("triton"):
        states = delta_inputs.load_states(state, span)
        assert torch.equal(states[0].flatten(1), pieces[where])
        assert torch.equal(pool, before)
        delta_inputs.store_states(state, span, states + 1.0)
    changed = (pool != before).sum()
    assert torch.equal(pieces[where], states[0].flatten(1) + 1.0)
    assert int(changed) == shape.num_heads * size  # and nothing else is written
