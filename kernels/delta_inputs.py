"""Triton kernels around the chunked gated delta rule: its inputs, and the states of rows.

They make of the tokens and pages of some rows the tensors that fla-core takes, and put the states
back. Callers go through `tieredkv.kernels.delta_chunks`; this module checks no tensors. References:
`split_heads`, `gates` and `find_pieces` of `tieredkv.kernels.state_reference`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (a kernel's arguments have no Python types)

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tieredkv.kernels.delta_rule import softplus
from tieredkv.kernels.state_layout import ChunkRows, LayerState
from tieredkv.kernels.state_plan import CHUNK
from tieredkv.kernels.state_reference import EPS

PIECE_TILE = 4096
"""Elements of a state that a program copies."""

_LOG2_E = tl.constexpr(1.4426950408889634)


class Inputs(NamedTuple):
    """The tokens of a step as fla-core takes them; those of no row in chunks are undefined.

    Attributes:
        q: [num_tokens, num_key_heads, key_dim], of length 1, as k.
        v: [num_tokens, num_heads, value_dim].
        decay: [num_tokens, num_heads] float32, the logarithm to base 2 of the decays from the first
            token of each one's chunk on.
        beta: [num_tokens, num_heads], in v's dtype.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


@triton.jit
def _split_kernel(
    mixed_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr,
    bounds_ptr, chunks_ptr, mixed_stride, a_stride, b_stride, eps, beta_scale,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, DIM_TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Normalise a chunk's queries or keys of a head, or copy its values and compute its gates.

    Grid: (num_chunks, 2 * NUM_KEY_HEADS + NUM_HEADS). Masks: tokens past the row's last, elements
    past the head's dim. Bytes moved: each channel read and written once.
    """
    chunk_ptr = chunks_ptr + 2 * tl.program_id(0)
    sequence, part = tl.load(chunk_ptr), tl.program_id(1)
    first, end = tl.load(bounds_ptr + sequence), tl.load(bounds_ptr + sequence + 1)
    token = (first + tl.load(chunk_ptr + 1) * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    is_token = token < end
    dim = tl.arange(0, DIM_TILE)[None, :]
    source = mixed_ptr + token[:, None] * mixed_stride + dim
    if part < 2 * NUM_KEY_HEADS:
        mask = is_token[:, None] & (dim < KEY_DIM)
        raw = tl.load(source + part * KEY_DIM, mask, other=0.0)
        x = raw.to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x, axis=1)[:, None] + eps)
        head = part % NUM_KEY_HEADS
        out_ptr = q_ptr
        if part >= NUM_KEY_HEADS:
            out_ptr = k_ptr
        target = (token[:, None] * NUM_KEY_HEADS + head) * KEY_DIM + dim
        tl.store(out_ptr + target, x.to(raw.dtype), mask)
    else:
        head = part - 2 * NUM_KEY_HEADS
        mask = is_token[:, None] & (dim < VALUE_DIM)
        v = tl.load(source + 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM, mask, other=0.0)
        tl.store(v_ptr + (token[:, None] * NUM_HEADS + head) * VALUE_DIM + dim, v, mask)
        a = tl.load(a_ptr + token * a_stride + head, is_token, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + token * b_stride + head, is_token, other=0.0).to(tl.float32)
        rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
        decay = rate * softplus(a + tl.load(dt_bias_ptr + head).to(tl.float32))
        decay = tl.cumsum(tl.where(is_token, decay, 0.0), axis=0) * _LOG2_E
        beta = tl.sigmoid(b) * beta_scale
        tl.store(decay_ptr + token * NUM_HEADS + head, decay, is_token)
        tl.store(beta_ptr + token * NUM_HEADS + head, beta.to(v.dtype), is_token)


@triton.jit(do_not_specialize=["tables_stride", "first_piece"])
def _move_states_kernel(
    states_ptr, pool_ptr, tables_ptr, rows_ptr, pool_stride, tables_stride, first_piece,
    IS_STORE: tl.constexpr, PIECES_PER_PAGE: tl.constexpr, PIECE_ELEMENTS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Copy a tile of the state of one head of a row from its page, or to it if IS_STORE.

    Grid: (num_heads, ceil(PIECE_ELEMENTS / TILE), num_rows); elements past the last are masked, and
    programs of a row without tokens return at once. Bytes moved: 1 read and 1 write of each state.
    """
    head, num_heads = tl.program_id(0), tl.num_programs(0)
    row_ptr = rows_ptr + 3 * tl.program_id(2)
    if tl.load(row_ptr + 2) == 0:
        return
    table_row = tl.load(row_ptr + (1 if IS_STORE else 0)).to(tl.int64)
    element = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = element < PIECE_ELEMENTS
    piece = first_piece + head
    page = tl.load(tables_ptr + table_row * tables_stride + piece // PIECES_PER_PAGE).to(tl.int64)
    place = pool_ptr + page * pool_stride + piece % PIECES_PER_PAGE * PIECE_ELEMENTS + element
    sequence = (2 * tl.program_id(2)).to(tl.int64)
    state = states_ptr + (sequence * num_heads + head) * PIECE_ELEMENTS + element
    if IS_STORE:
        tl.store(place, tl.load(state, mask), mask)
    else:
        tl.store(state, tl.load(place, mask), mask)


def split(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: LayerState,
    rows: ChunkRows,
    beta_scale: float,
) -> Inputs:
    """Launch the kernel over the tokens of some rows; see `states.delta_rule` for the arguments."""
    shape, num_tokens = state.shape, len(mixed)
    q = mixed.new_empty(num_tokens, shape.num_key_heads, shape.key_dim)
    v = mixed.new_empty(num_tokens, shape.num_heads, shape.value_dim)
    decay = torch.empty(num_tokens, shape.num_heads, device=mixed.device)
    inputs = Inputs(q, torch.empty_like(q), v, decay, torch.empty_like(decay, dtype=mixed.dtype))
    num_parts = 2 * shape.num_key_heads + shape.num_heads
    _split_kernel[(len(rows.chunks), num_parts)](
        mixed, a, b, a_log, dt_bias, *inputs, rows.bounds, rows.chunks, mixed.stride(0),
        a.stride(0), b.stride(0), EPS, beta_scale, NUM_HEADS=shape.num_heads,
        NUM_KEY_HEADS=shape.num_key_heads, KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim,
        DIM_TILE=triton.next_power_of_2(max(shape.key_dim, shape.value_dim)), CHUNK=CHUNK,
        num_warps=8,
    )  # fmt: skip
    return inputs


def load_states(state: LayerState, rows: ChunkRows) -> Tensor:
    """Return the states that rows begin with.

    Returns:
        [num_sequences, num_heads, key_dim, value_dim] float32, contiguous; only those of sequences
        that are rows with tokens are defined.
    """
    shape = state.shape
    sizes = rows.num_sequences, shape.num_heads, shape.key_dim, shape.value_dim
    states = state.pool.new_empty(sizes)
    _move_states(state, rows, states, is_store=False)
    return states


def store_states(state: LayerState, rows: ChunkRows, states: Tensor) -> None:
    """Write the states that rows end with, as `load_states` returns states, to pages."""
    _move_states(state, rows, states, is_store=True)


def _move_states(state: LayerState, rows: ChunkRows, states: Tensor, *, is_store: bool) -> None:
    size = state.shape.piece_elements
    tile = min(PIECE_TILE, triton.next_power_of_2(size))
    _move_states_kernel[(state.shape.num_heads, triton.cdiv(size, tile), len(rows.rows))](
        states, state.pool, state.tables, rows.rows, state.pool.stride(0), state.tables.stride(0),
        state.first_piece, IS_STORE=is_store, PIECES_PER_PAGE=state.pieces_per_page,
        PIECE_ELEMENTS=size, TILE=tile, num_warps=4,
    )  # fmt: skip
