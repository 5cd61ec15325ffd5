"""The kernels of recurrent states in plain torch: for tests, and the engine's code on a CPU.

All computation is in float32. Every row is computed alone, and every chunk of a long row alone, so
that results depend neither on the rest of the batch nor on cuts between whole chunks. That holds
for elementwise functions only if tensors have the same shapes: torch may compute what does not fill
a vector register by other code. This module knows no requests, tiers or backends; callers go
through `tieredkv.kernels.states`, which checks shapes.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tieredkv.kernels.state_layout import LayerState, StateRows
from tieredkv.kernels.state_plan import CHUNK
from tieredkv.types import StateShape

MAX_SINGLE_TOKENS = 16
"""Rows of more tokens are computed in chunks."""

EPS = 1e-6
"""Added to the sum of squares that queries and keys are normalised by."""


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, rows: StateRows
) -> Tensor:
    """Convolve each channel with its last inputs; see `states.short_conv`."""
    out, shape = x.new_zeros(x.shape), state.shape
    pieces, taps = slice(shape.num_heads, shape.layer_pieces), weight.float().T
    for source, target, own in _parts(rows):
        stored = view_pieces(state)[find_pieces(state, source, pieces)]
        num_tokens = own.stop - own.start
        kept = stored.flatten()[: shape.conv_elements].view(shape.num_channels, -1).T
        inputs = torch.cat([kept, x[own].float()])
        for first in range(0, num_tokens, CHUNK):
            size = min(CHUNK, num_tokens - first)
            summed = inputs.new_zeros(size, shape.num_channels)
            if bias is not None:
                summed += bias.float()
            for index, tap in enumerate(taps, first):
                summed += inputs[index : index + size] * tap
            out[own][first : first + size] = F.silu(summed).to(x.dtype)
        kept.copy_(inputs[num_tokens:])
        view_pieces(state)[find_pieces(state, target, pieces)] = stored
    return out


def delta_rule(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: LayerState,
    rows: StateRows,
    beta_scale: float,
) -> Tensor:
    """Update and read the states of each row; see `states.delta_rule`."""
    shape = state.shape
    out = mixed.new_zeros(len(mixed), shape.num_heads, shape.value_dim)
    pieces = slice(0, shape.num_heads)
    for source, target, part in _parts(rows):
        states = view_pieces(state)[find_pieces(state, source, pieces)]
        states = states.view(shape.num_heads, shape.key_dim, -1)
        is_long = part.stop - part.start > MAX_SINGLE_TOKENS
        step, update = (CHUNK, update_chunk) if is_long else (1, update_token)
        for first in range(part.start, part.stop, step):
            own = slice(first, min(part.stop, first + step))
            q, k, v = split_heads(mixed[own], shape)
            beta, decay = gates(a[own], b[own], a_log, dt_bias, beta_scale)
            read, states = update(q, k, v, beta.T, decay.T, states)
            out[own] = read.transpose(0, 1).to(mixed.dtype)
        view_pieces(state)[find_pieces(state, target, pieces)] = states.flatten(1)
    return out


def _parts(rows: StateRows) -> Iterator[tuple[int, int, slice]]:
    """Cut each row where a state of it is kept.

    Returns:
        For each part the row of the tables whose state it begins with, that where its last state is
        written, and its tokens.
    """
    for row, first_token, num_tokens, kept in rows.spans:
        source, begun = row, 0
        for end, target in (*kept, (num_tokens, row)) if num_tokens else ():
            yield source, target, slice(first_token + begun, first_token + end)
            source, begun = target, end


def gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, beta_scale: float
) -> tuple[Tensor, Tensor]:
    """Return how much tokens change the states, and the logarithms of how much of them they leave.

    Both are [num_tokens, num_heads] float32; see `states.delta_rule` for the arguments.
    """
    decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return b.float().sigmoid() * beta_scale, decay


def split_heads(mixed: Tensor, shape: StateShape) -> tuple[Tensor, Tensor, Tensor]:
    """Split channels [n, num_channels] into q, k and v of every value head, in float32.

    Returns:
        q and k, [num_heads, n, key_dim], normalised, q also scaled; and v,
        [num_heads, n, value_dim].
    """
    size = shape.num_key_heads * shape.key_dim
    q, k, v = mixed.float().split([size, size, shape.num_heads * shape.value_dim], dim=1)
    group = shape.num_heads // shape.num_key_heads

    def normalise(x: Tensor) -> Tensor:
        x = x.unflatten(1, (shape.num_key_heads, -1))
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
        return x.repeat_interleave(group, 1).transpose(0, 1).contiguous()

    values = v.unflatten(1, (shape.num_heads, -1)).transpose(0, 1).contiguous()
    return normalise(q) * shape.key_dim**-0.5, normalise(k), values


def update_token(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Update states with one token, in place; see `update_chunk`, with n = 1."""
    states *= decay.exp()[:, :, None]
    change = (v - k @ states) * beta[:, :, None]
    states.baddbmm_(k.transpose(1, 2), change)
    return q @ states, states


def update_chunk(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Update states with n tokens at once, and read them with the query of each.

    Let d(i, j) be the decay from behind token j to behind token i, and d(i) that from before the
    chunk to behind token i. What the tokens up to i make of the state S before the chunk is
    `S_i = d(i) S + sum over j <= i of d(i, j) k_j u_j^T`. Put into the definition of u_i, this
    gives for the rows u_i of U, with K, V, Q the rows k_i, v_i, q_i,

        u_i + beta_i * sum over j < i of d(i, j) (k_i k_j) u_j = beta_i (v_i - d(i) k_i S),

    which is a unit lower triangular system. Its solution gives all outputs,
    `d(i) q_i S + sum over j <= i of d(i, j) (q_i k_j) u_j`, and the state behind the chunk.

    Decays are differences of sums, which are kept in float64: in float32, a token that forgets
    nearly everything would take the digits of the others in its chunk.

    Args:
        q: [num_heads, n, key_dim], normalised and scaled.
        k: as q, normalised.
        v: [num_heads, n, value_dim].
        beta: [num_heads, n].
        decay: [num_heads, n], the logarithms of the decays.
        states: [num_heads, key_dim, value_dim], not written.

    Returns:
        What is read, [num_heads, n, value_dim], and the new states.

    Source: the WY form of products of Householder matrices, as in Gated Delta Networks, Yang et
    al. 2024, section 3.3.
    """
    summed = decay.double().cumsum(1)
    between = (summed[:, :, None] - summed[:, None, :]).float()
    between = between.tril().exp().tril()
    before = summed.float().exp()[:, :, None]
    after = between[:, -1, :, None]
    system = (k @ k.transpose(1, 2)) * between * beta[:, :, None]
    rest = (v - before * (k @ states)) * beta[:, :, None]
    u = torch.linalg.solve_triangular(system, rest, upper=False, unitriangular=True)
    read = before * (q @ states) + ((q @ k.transpose(1, 2)) * between) @ u
    return read, before[:, -1:] * states + (after * k).transpose(1, 2) @ u


def copy_pages(pool_bytes: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy whole pages to other pages of the pool; see `states.copy_pages`."""
    pages = pool_bytes[source.clamp(min=0).long()]
    pool_bytes[target.long()] = pages.where(source[:, None] >= 0, torch.zeros_like(pages))


def view_pieces(state: LayerState) -> Tensor:
    """View the pool as [num_pages, pieces_per_page, piece_elements]."""
    size = state.shape.piece_elements
    return state.pool[:, : state.pieces_per_page * size].view(len(state.pool), -1, size)


def find_pieces(state: LayerState, row: int, pieces: slice) -> tuple[Tensor, Tensor]:
    """Return the page of each of a layer's pieces in a row of the tables, and its index there."""
    index = torch.arange(pieces.start, pieces.stop, device=state.pool.device) + state.first_piece
    pages = state.tables[row].long()[index // state.pieces_per_page]
    return pages, index % state.pieces_per_page
