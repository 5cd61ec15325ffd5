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
from tieredkv.kernels.state_plan import CONV_TILE
from tieredkv.types import MAX_KEPT_WITHIN

CHANNEL_TILE = 128


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
    x_ptr, weight_ptr, bias_ptr, out_ptr, pool_ptr, tables_ptr, rows_ptr, tiles_ptr, x_stride,
    pool_stride, tables_stride, first_piece, NUM_FIELDS: tl.constexpr, NUM_ENDS: tl.constexpr,
    NUM_CHANNELS: tl.constexpr, CONV_WIDTH: tl.constexpr, PIECE_ELEMENTS: tl.constexpr,
    PIECES_PER_PAGE: tl.constexpr, TOKEN_TILE: tl.constexpr, CHANNEL_TILE: tl.constexpr,
    STATE_TILE: tl.constexpr,
):  # fmt: skip
    """Convolve one tile of tokens of a row, for one tile of channels.

    Grid: (num_tiles, ceil(NUM_CHANNELS / CHANNEL_TILE)); without tiles, each row has one token and
    is one tile. Programs of a tile behind the end of its row return at once. Only the first tile
    looks at inputs from before the row, so that its program is the only one that reads the state,
    and it alone writes states, that of the row itself last, after it has read it. Only the last
    NUM_ENDS pairs of a row are read. Masks: tokens past the row, channels past
    NUM_CHANNELS, inputs past the CONV_WIDTH - 1 of a state. Bytes moved: x read and written once,
    the inputs of the state once each, the weights once per program.

    Products are added with explicit FMAs in one order, whatever the tiles are: a row of one token
    has the same result, bit for bit, beside longer rows.
    """
    row, tile = tl.program_id(0), 0
    if tiles_ptr is not None:
        tile = tl.load(tiles_ptr + 2 * row + 1)
        row = tl.load(tiles_ptr + 2 * row)
    row_ptr = rows_ptr + NUM_FIELDS * row
    num_tokens = tl.load(row_ptr + (NUM_FIELDS - 2))
    if tile * TOKEN_TILE >= num_tokens:
        return
    first_token = tl.load(row_ptr).to(tl.int64)
    table_ptr = tables_ptr + tl.load(row_ptr + (NUM_FIELDS - 1)).to(tl.int64) * tables_stride
    KEPT: tl.constexpr = CONV_WIDTH - 1
    channel = tl.program_id(1) * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE)
    is_channel = channel < NUM_CHANNELS
    x_ptr += first_token * x_stride
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
    if tile == 0:
        index = tl.arange(0, STATE_TILE)[None, :]
        is_input = is_channel[:, None] & (index < KEPT)
        for pair in tl.static_range(NUM_ENDS):
            end_ptr = row_ptr + (NUM_FIELDS - 2 * NUM_ENDS + 2 * pair)
            end = tl.load(end_ptr)
            if end > 0:
                kept_place = end - KEPT + index
                fresh_ptr = x_ptr + kept_place.to(tl.int64) * x_stride + channel[:, None]
                fresh = tl.load(fresh_ptr, is_input & (kept_place >= 0), other=0.0).to(tl.float32)
                is_old = is_input & (kept_place < 0)
                old_ptr = _locate(
                    table_ptr, pool_ptr, pool_stride, first_piece,
                    channel[:, None] * KEPT + (kept_place + KEPT), is_old, PIECE_ELEMENTS,
                    PIECES_PER_PAGE,
                )  # fmt: skip
                old = tl.load(old_ptr, is_old, other=0.0)
                new_ptr = _locate(
                    tables_ptr + tl.load(end_ptr + 1).to(tl.int64) * tables_stride, pool_ptr,
                    pool_stride, first_piece, channel[:, None] * KEPT + index, is_input,
                    PIECE_ELEMENTS, PIECES_PER_PAGE,
                )  # fmt: skip
                # Every thread has read the old state before any writes the new one.
                tl.debug_barrier()
                tl.store(new_ptr, tl.where(kept_place < 0, old, fresh), is_input)


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, rows: StateRows
) -> Tensor:
    """Launch the kernel; same contract as `states.short_conv`."""
    out, shape = x.new_empty(x.shape), state.shape
    num_tiles = len(rows.rows if rows.tiles is None else rows.tiles)
    if not num_tiles:
        return out
    _short_conv_kernel[(num_tiles, triton.cdiv(shape.num_channels, CHANNEL_TILE))](
        x, weight, bias, out, state.pool, state.tables, rows.rows, rows.tiles, x.stride(0),
        state.pool.stride(0), state.tables.stride(0), state.first_piece + shape.num_heads,
        NUM_FIELDS=rows.rows.shape[1], NUM_ENDS=1 if rows.tiles is None else MAX_KEPT_WITHIN + 1,
        NUM_CHANNELS=shape.num_channels, CONV_WIDTH=shape.conv_width,
        PIECE_ELEMENTS=shape.piece_elements, PIECES_PER_PAGE=state.pieces_per_page,
        TOKEN_TILE=1 if rows.tiles is None else CONV_TILE, CHANNEL_TILE=CHANNEL_TILE,
        STATE_TILE=triton.next_power_of_2(shape.conv_width - 1), num_warps=4,
    )  # fmt: skip
    return out
