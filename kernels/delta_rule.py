"""Triton kernel of the gated delta rule, token by token.

Callers go through `tieredkv.kernels.states`, which checks the tensors; this module does not.
Reference: `tieredkv.kernels.state_reference.delta_rule`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (a kernel's arguments have no Python types)

import triton
import triton.language as tl
from torch import Tensor

from tieredkv.kernels.state_layout import LayerState, StateRows
from tieredkv.kernels.state_reference import EPS

NUM_COLUMNS = 16
"""Of a state, which a program of one warp holds in registers."""


@triton.jit
def softplus(x):
    """Compute log(1 + exp(x)) with a small relative error for any x.

    With e = exp(-|x|) at most 1, log(1 + e) = 2 artanh(e / (2 + e)) is a series in at most 1/9.
    The plain logarithm of 1 + e would lose the digits of a small e, and with them the decay of a
    head that remembers long.
    """
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    square = s * s
    series = 1.0 / 17
    for step in tl.static_range(8):
        series = series * square + 1.0 / (15 - 2 * step)
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit(do_not_specialize=["tables_stride", "first_piece"])
def _delta_rule_kernel(
    mixed_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, out_ptr, pool_ptr, tables_ptr, rows_ptr,
    mixed_stride, a_stride, b_stride, pool_stride, tables_stride, first_piece, scale, eps,
    beta_scale, NUM_FIELDS: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PIECES_PER_PAGE: tl.constexpr,
    KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
):  # fmt: skip
    """Run tokens of one row, but for those in chunks, through VALUE_TILE columns of a head's state.

    Grid: (ceil(VALUE_DIM / VALUE_TILE), NUM_HEADS, num_rows). Columns of a state do not depend on
    each other. A program of a row that has no such tokens returns at once. What a token brings is
    loaded while the one before is computed. Masks: key elements past KEY_DIM, columns past
    VALUE_DIM. Bytes moved: the state read once, and written once and for each place where it is
    kept, 4 bytes each; values and outputs once; queries and keys once per head and tile, mostly
    from the cache.

    One kernel serves all steps: two would round differently, where they fuse other products and
    sums, and the result of a row would depend on the rows beside it.
    """
    row_ptr = rows_ptr + NUM_FIELDS * tl.program_id(2)
    done, num_tokens = tl.load(row_ptr + 1), tl.load(row_ptr + (NUM_FIELDS - 2))
    num_unused = tl.load(row_ptr + 3)
    if done >= num_tokens:
        return
    head = tl.program_id(1)
    first_token = (tl.load(row_ptr) + done).to(tl.int64)
    piece = first_piece + head
    tables_ptr += piece // PIECES_PER_PAGE
    pool_ptr += piece % PIECES_PER_PAGE * (KEY_DIM * VALUE_DIM)
    page = tl.load(tables_ptr + tl.load(row_ptr + 2).to(tl.int64) * tables_stride).to(tl.int64)
    dim = tl.arange(0, KEY_TILE)
    column = tl.program_id(0) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    is_dim, is_column = dim < KEY_DIM, column < VALUE_DIM
    element = dim[:, None] * VALUE_DIM + column[None, :]
    mask = is_dim[:, None] & is_column[None, :]
    state = tl.load(pool_ptr + page * pool_stride + element, mask, other=0.0)

    q_ptr = mixed_ptr + first_token * mixed_stride + head // (NUM_HEADS // NUM_KEY_HEADS) * KEY_DIM
    v_ptr = mixed_ptr + first_token * mixed_stride + 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM
    a_ptr += first_token * a_stride + head
    b_ptr += first_token * b_stride + head
    out_ptr += (first_token * NUM_HEADS + head) * VALUE_DIM
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    q_raw = tl.load(q_ptr + dim, is_dim, other=0.0)
    k_raw = tl.load(q_ptr + NUM_KEY_HEADS * KEY_DIM + dim, is_dim, other=0.0)
    v_raw = tl.load(v_ptr + column, is_column, other=0.0)
    a_raw, b_raw = tl.load(a_ptr), tl.load(b_ptr)
    for pair in range(num_unused, (NUM_FIELDS - 4) // 2):
        end = tl.load(row_ptr + 4 + 2 * pair)
        target = tl.load(row_ptr + 5 + 2 * pair).to(tl.int64)
        page = tl.load(tables_ptr + target * tables_stride).to(tl.int64)
        for token in range(done, end):
            q, k, v = q_raw.to(tl.float32), k_raw.to(tl.float32), v_raw.to(tl.float32)
            a, b = a_raw.to(tl.float32), b_raw.to(tl.float32)
            if token + 1 < num_tokens:
                q_ptr += mixed_stride
                v_ptr += mixed_stride
                a_ptr += a_stride
                b_ptr += b_stride
                q_raw = tl.load(q_ptr + dim, is_dim, other=0.0)
                k_raw = tl.load(q_ptr + NUM_KEY_HEADS * KEY_DIM + dim, is_dim, other=0.0)
                v_raw = tl.load(v_ptr + column, is_column, other=0.0)
                a_raw, b_raw = tl.load(a_ptr), tl.load(b_ptr)
            q *= tl.rsqrt(tl.sum(q * q) + eps) * scale
            k *= tl.rsqrt(tl.sum(k * k) + eps)
            state *= tl.exp(rate * softplus(a + dt_bias))
            change = (v - tl.sum(k[:, None] * state, axis=0)) * (tl.sigmoid(b) * beta_scale)
            state += k[:, None] * change[None, :]
            read = tl.sum(q[:, None] * state, axis=0)
            tl.store(out_ptr + column, read.to(out_ptr.dtype.element_ty), is_column)
            out_ptr += NUM_HEADS * VALUE_DIM
        if end > done:
            tl.store(pool_ptr + page * pool_stride + element, state, mask)
            done = end


def delta_rule(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: LayerState,
    rows: StateRows,
    beta_scale: float,
    out: Tensor,
) -> None:
    """Launch the kernel; as `states.delta_rule`, but without what is computed in chunks."""
    shape = state.shape
    value_tile = min(NUM_COLUMNS, triton.next_power_of_2(shape.value_dim))
    grid = (triton.cdiv(shape.value_dim, value_tile), shape.num_heads, len(rows.rows))
    if not all(grid):
        return
    _delta_rule_kernel[grid](
        mixed, a, b, a_log, dt_bias, out, state.pool, state.tables, rows.rows, mixed.stride(0),
        a.stride(0), b.stride(0), state.pool.stride(0), state.tables.stride(0), state.first_piece,
        shape.key_dim**-0.5, EPS, beta_scale, NUM_FIELDS=rows.rows.shape[1],
        NUM_HEADS=shape.num_heads, NUM_KEY_HEADS=shape.num_key_heads, KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim, PIECES_PER_PAGE=state.pieces_per_page,
        KEY_TILE=triton.next_power_of_2(shape.key_dim), VALUE_TILE=value_tile,
        num_warps=1,
    )  # fmt: skip
