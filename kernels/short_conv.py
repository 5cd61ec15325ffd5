"""Triton kernel of the short causal convolution in front of recurrent states.

Callers go through `tieredkv.kernels.states`, which checks the tensors; this module does not.
Reference: `tieredkv.kernels.state_reference.short_conv`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (a kernel's arguments have no Python types)

import triton
import triton.language as tl
from torch import Tensor

from tieredkv.kernels.state_layout import LayerState, StateRows

TOKEN_TILE = 16
"""Tokens of a tile of rows with more than one; at least the inputs that a state keeps."""

CHANNEL_TILE = 128

MAX_ROW_PROGRAMS = 32
"""Programs that share the tiles of one row, so that few are started in vain for short rows."""


@triton.jit
def _locate(
    table_ptr, pool_ptr, pool_stride, first_piece, element, mask, PIECE_ELEMENTS: tl.constexpr,
    PIECES_PER_PAGE: tl.constexpr,
):  # fmt: skip
    """Return pointers to elements of the inputs that a layer keeps; see `state_layout`."""
    piece = first_piece + element // PIECE_ELEMENTS
    page = tl.load(table_ptr + piece // PIECES_PER_PAGE, mask, other=0).to(tl.int64)
    inside = piece % PIECES_PER_PAGE * PIECE_ELEMENTS + element % PIECE_ELEMENTS
    return pool_ptr + page * pool_stride + inside


@triton.jit(do_not_specialize=["tables_stride", "first_piece"])
def _short_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, pool_ptr, tables_ptr, rows_ptr, x_stride, pool_stride,
    tables_stride, first_piece, NUM_FIELDS: tl.constexpr, NUM_CHANNELS: tl.constexpr,
    CONV_WIDTH: tl.constexpr, PIECE_ELEMENTS: tl.constexpr, PIECES_PER_PAGE: tl.constexpr,
    TOKEN_TILE: tl.constexpr, CHANNEL_TILE: tl.constexpr, STATE_TILE: tl.constexpr,
):  # fmt: skip
    """Convolve some tiles of tokens of one row, for one tile of channels.

    Grid: (programs of a row, ceil(NUM_CHANNELS / CHANNEL_TILE), num_rows). Programs without a tile
    return at once. Only the first tile looks at inputs from before the row, so that its program is
    the only one that reads the state, and it alone writes the state, after it has read it. Masks:
    tokens past the row, channels past NUM_CHANNELS, inputs past the CONV_WIDTH - 1 of a state.
    Bytes moved: x read and written once, the inputs of the state once each, the weights once per
    program.

    Products are added with explicit FMAs in one order, whatever the tiles are: a row of one token
    has the same result, bit for bit, beside longer rows.
    """
    row_ptr = rows_ptr + NUM_FIELDS * tl.program_id(2)
    num_tokens = tl.load(row_ptr + 2)
    first_tile = tl.program_id(0)
    if first_tile * TOKEN_TILE >= num_tokens:
        return
    first_token = tl.load(row_ptr + 1).to(tl.int64)
    table_ptr = tables_ptr + tl.load(row_ptr).to(tl.int64) * tables_stride
    KEPT: tl.constexpr = CONV_WIDTH - 1
    channel = tl.program_id(1) * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE)
    is_channel = channel < NUM_CHANNELS
    x_ptr += first_token * x_stride
    for tile in range(first_tile, tl.cdiv(num_tokens, TOKEN_TILE), tl.num_programs(0)):
        token = (tile * TOKEN_TILE + tl.arange(0, TOKEN_TILE))[:, None]
        mask = (token < num_tokens) & is_channel[None, :]
        if bias_ptr is None:
            summed = tl.zeros([TOKEN_TILE, CHANNEL_TILE], tl.float32)
        else:
            bias = tl.load(bias_ptr + channel, is_channel, other=0.0).to(tl.float32)
            summed = tl.broadcast_to(bias[None, :], [TOKEN_TILE, CHANNEL_TILE])
        for tap in tl.static_range(CONV_WIDTH):
            place = token + (tap - KEPT)
            source = x_ptr + place.to(tl.int64) * x_stride + channel[None, :]
            taken = tl.load(source, mask & (place >= 0), other=0.0).to(tl.float32)
            if tile == 0:
                is_kept = mask & (place < 0)
                kept = _locate(
                    table_ptr, pool_ptr, pool_stride, first_piece,
                    channel[None, :] * KEPT + (place + KEPT), is_kept, PIECE_ELEMENTS,
                    PIECES_PER_PAGE,
                )  # fmt: skip
                taken = tl.where(place < 0, tl.load(kept, is_kept, other=0.0), taken)
            weight = tl.load(weight_ptr + channel * CONV_WIDTH + tap, is_channel, other=0.0)
            weight = tl.broadcast_to(weight.to(tl.float32)[None, :], [TOKEN_TILE, CHANNEL_TILE])
            summed = tl.fma(taken, weight, summed)
        activated = summed / (1.0 + tl.exp(-summed))
        target = out_ptr + (first_token + token) * NUM_CHANNELS + channel[None, :]
        tl.store(target, activated.to(out_ptr.dtype.element_ty), mask)
    if first_tile == 0:
        index = tl.arange(0, STATE_TILE)[None, :]
        place = num_tokens - KEPT + index
        mask = is_channel[:, None] & (index < KEPT)
        source = x_ptr + place.to(tl.int64) * x_stride + channel[:, None]
        fresh = tl.load(source, mask & (place >= 0), other=0.0).to(tl.float32)
        target = _locate(
            table_ptr, pool_ptr, pool_stride, first_piece, channel[:, None] * KEPT + index, mask,
            PIECE_ELEMENTS, PIECES_PER_PAGE,
        )  # fmt: skip
        is_kept = mask & (place < 0)
        source = _locate(
            table_ptr, pool_ptr, pool_stride, first_piece, channel[:, None] * KEPT + (place + KEPT),
            is_kept, PIECE_ELEMENTS, PIECES_PER_PAGE,
        )  # fmt: skip
        kept = tl.load(source, is_kept, other=0.0)
        tl.debug_barrier()  # every thread has read the old state before any writes the new one
        tl.store(target, tl.where(place < 0, kept, fresh), mask)


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, rows: StateRows
) -> Tensor:
    """Launch the kernel; same contract as `states.short_conv`."""
    out, shape = x.new_empty(x.shape), state.shape
    token_tile = 1 if rows.max_tokens == 1 else TOKEN_TILE
    num_programs = min(MAX_ROW_PROGRAMS, triton.cdiv(rows.max_tokens, token_tile))
    grid = (num_programs, triton.cdiv(shape.num_channels, CHANNEL_TILE), len(rows.rows))
    if not all(grid):
        return out
    _short_conv_kernel[grid](
        x, weight, bias, out, state.pool, state.tables, rows.rows, x.stride(0),
        state.pool.stride(0), state.tables.stride(0), state.first_piece + shape.num_heads,
        NUM_FIELDS=rows.rows.shape[1], NUM_CHANNELS=shape.num_channels, CONV_WIDTH=shape.conv_width,
        PIECE_ELEMENTS=shape.piece_elements, PIECES_PER_PAGE=state.pieces_per_page,
        TOKEN_TILE=token_tile, CHANNEL_TILE=CHANNEL_TILE,
        STATE_TILE=triton.next_power_of_2(shape.conv_width - 1), num_warps=4,
    )  # fmt: skip
    return out
