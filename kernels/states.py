"""Entry points of recurrent states: check tensors on the host, then run Triton or torch.

`state_layout` says where states lie in pages. A layer of the gated delta rule calls `short_conv`
on its projected tokens and `delta_rule` on the result; both read and write the states of the rows
in place. Each row is computed alone, so that its result does not depend on the others, bit for bit.
No function reads a device tensor on the host, and grids depend on shapes only, so that calls can be
captured in CUDA graphs. This module knows no requests, tiers or models.

Source: Gated Delta Networks, Yang et al. 2024; the layers of Qwen3-Next, Qwen3.5 and OLMo-Hybrid.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from tieredkv.errors import ShapeError
from tieredkv.kernels import checks, delta_chunks, state_reference
from tieredkv.kernels.checks import KERNEL_DTYPES, describe, triton_module
from tieredkv.kernels.state_layout import LayerState, StateRows
from tieredkv.kernels.state_plan import NUM_FIELDS, num_in_chunks

MAX_CONV_WIDTH = 16
MAX_TRITON_KEY_DIM = 256


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, rows: StateRows
) -> Tensor:
    """Convolve each channel with its last inputs, apply SiLU, and keep the last inputs of each row.

    Token t of a row becomes `silu(bias + sum(weight[:, i] * input(t - conv_width + 1 + i)))`, where
    inputs before the row are those of its state. Sums are in float32.

    Args:
        x: [num_tokens, num_channels], a float dtype of the kernels, contiguous in its last
            dimension.
        weight: [num_channels, conv_width], contiguous; a float dtype, which may differ from x's.
        bias: [num_channels], contiguous, as weight; or None.
        state: of the layer; the inputs of the rows are written in place, as float32.
        rows: see `StateRows`.

    Returns:
        [num_tokens, num_channels] in x's dtype; tokens of no row get no defined output.

    Raises:
        ShapeError: the tensors disagree; checked on the host before launch.
    """
    _check_state(state)
    shape, num_channels = state.shape, state.shape.num_channels
    if x.ndim != 2 or x.shape[1] != num_channels:
        raise ShapeError(f"x {describe(x)} does not have the {num_channels} channels of {shape}")
    _check_floats("x", x, state)
    if weight.shape != (num_channels, shape.conv_width):
        raise ShapeError(f"weight {describe(weight)} does not fit {shape}")
    _check_floats("weight", weight, state, is_whole=True)
    if bias is not None:
        if bias.shape != (num_channels,):
            raise ShapeError(f"bias {describe(bias)} does not fit {shape}")
        _check_floats("bias", bias, state, is_whole=True)
    _check_rows(rows, state, x)
    if not checks.use_triton(x.device):
        return state_reference.short_conv(x, weight, bias, state, rows)
    convolve: Callable[..., Tensor] = triton_module("short_conv").short_conv
    return convolve(x, weight, bias, state, rows)


def delta_rule(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: LayerState,
    rows: StateRows,
    *,
    beta_scale: float = 1.0,
) -> Tensor:
    """Update the state of each head with every token in turn, and read it with the token's query.

    With queries q and keys k of length 1, `q` divided by `sqrt(key_dim)`, values v,
    `beta = sigmoid(b) * beta_scale` and `g = -exp(a_log) * softplus(a + dt_bias)`, a token does:
    `S = S * exp(g); u = (v - k @ S) * beta; S = S + outer(k, u); out = q @ S`, in float32.

    Args:
        mixed: [num_tokens, num_channels], the output of `short_conv`: queries and keys of the key
            heads, not normalised yet, and values; contiguous in its last dimension.
        a: [num_tokens, num_heads], a float dtype, contiguous in its last dimension.
        b: as a.
        a_log: [num_heads], a float dtype, contiguous.
        dt_bias: as a_log.
        state: of the layer; the states of the rows are updated in place.
        rows: see `StateRows`.
        beta_scale: 2.0 in layers whose states may have negative eigenvalues.

    Returns:
        [num_tokens, num_heads, value_dim] in mixed's dtype; tokens of no row get no defined output.

    Raises:
        ShapeError: the tensors disagree; checked on the host before launch.

    Source: equation 10 of Gated Delta Networks, Yang et al. 2024; `beta_scale` after Grazzi et al.
    2024, "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues".
    """
    _check_state(state)
    shape = state.shape
    if mixed.ndim != 2 or mixed.shape[1] != shape.num_channels:
        what = f"mixed {describe(mixed)} does not have the {shape.num_channels} channels"
        raise ShapeError(f"{what} of {shape}")
    _check_floats("mixed", mixed, state)
    for name, tensor in (("a", a), ("b", b)):
        if tensor.shape != (len(mixed), shape.num_heads):
            what = f"{name} {describe(tensor)} does not fit mixed {describe(mixed)}"
            raise ShapeError(f"{what} and {shape}")
        _check_floats(name, tensor, state)
    for name, tensor in (("a_log", a_log), ("dt_bias", dt_bias)):
        if tensor.shape != (shape.num_heads,):
            raise ShapeError(f"{name} {describe(tensor)} does not fit {shape}")
        _check_floats(name, tensor, state)
    _check_rows(rows, state, mixed)
    if not checks.use_triton(mixed.device):
        return state_reference.delta_rule(mixed, a, b, a_log, dt_bias, state, rows, beta_scale)
    if shape.key_dim > MAX_TRITON_KEY_DIM:
        most = f"the kernels support at most {MAX_TRITON_KEY_DIM}"
        raise ShapeError(f"key_dim {shape.key_dim} is above the limit; {most}")
    out = mixed.new_empty(len(mixed), shape.num_heads, shape.value_dim)
    parts = mixed, a, b, a_log, dt_bias, state
    if rows.chunks is not None:
        delta_chunks.delta_rule(*parts, rows.chunks, beta_scale, out)
    if not rows.spans or any(num_in_chunks(span) < span.num_tokens for span in rows.spans):
        triton_module("delta_rule").delta_rule(*parts, rows, beta_scale, out)
    return out


def copy_pages(pool_bytes: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy whole pages to other pages of the pool, on the device, or write zeros to them.

    Args:
        pool_bytes: [num_pages, page_bytes] uint8, contiguous in its last dimension; pages begin at
            multiples of 4 bytes, and page_bytes is one.
        source: [n] int32 or int64, the page to copy; a negative one stands for zeros.
        target: as source, of the same dtype, the page to write. Targets must be distinct, and no
            source of another copy; they are not checked.

    Raises:
        ShapeError: the tensors disagree; checked on the host before launch.
    """
    if pool_bytes.ndim != 2 or pool_bytes.dtype != torch.uint8:
        raise ShapeError(f"pool_bytes {describe(pool_bytes)} is not a 2-dimensional uint8 tensor")
    checks.check_last_dim("pool_bytes", pool_bytes)
    if pool_bytes.shape[1] % 4 or pool_bytes.stride(0) % 4 or pool_bytes.data_ptr() % 4:
        what = f"pool_bytes {describe(pool_bytes)} has pages that are not of whole words of 4 bytes"
        raise ShapeError(f"{what}, or begin between words")
    for name, ids in (("source", source), ("target", target)):
        if ids.dtype not in (torch.int32, torch.int64) or ids.device != pool_bytes.device:
            where = pool_bytes.device
            raise ShapeError(f"{name} {describe(ids)} is not int32 or int64 on {where}")
    if source.ndim != 1 or source.shape != target.shape or source.dtype != target.dtype:
        raise ShapeError(f"source {describe(source)} and target {describe(target)} differ")
    checks.check_last_dim("source", source)
    checks.check_last_dim("target", target)
    if not source.numel() or not pool_bytes.shape[1]:
        return
    if checks.use_triton(pool_bytes.device):
        triton_module("page_copy").copy_pages(pool_bytes, source, target)
    else:
        state_reference.copy_pages(pool_bytes, source, target)


def _check_state(state: LayerState) -> None:
    """Refuse a state that does not match the description of `LayerState`."""
    pool, tables, shape, first_piece = state
    if min(shape[:4]) < 1 or shape.num_heads % shape.num_key_heads:
        raise ShapeError(f"{shape} is not of positive dims, with whole groups of value heads")
    if not 2 <= shape.conv_width <= MAX_CONV_WIDTH:
        raise ShapeError(f"conv_width of {shape} is not within 2 and {MAX_CONV_WIDTH}")
    if pool.ndim != 2 or pool.dtype != torch.float32 or pool.shape[1] < shape.piece_elements:
        what = f"pool {describe(pool)} is not of float32 pages that hold a piece"
        raise ShapeError(f"{what} of {shape.piece_elements} elements")
    checks.check_last_dim("pool", pool)
    if tables.ndim != 2 or tables.dtype != torch.int32 or tables.device != pool.device:
        raise ShapeError(f"tables {describe(tables)} are not [rows, pages] int32 on {pool.device}")
    checks.check_last_dim("tables", tables)
    last = first_piece + shape.layer_pieces
    if first_piece < 0 or last > tables.shape[1] * state.pieces_per_page:
        what = f"tables {describe(tables)} do not hold the pieces {first_piece} to {last}"
        raise ShapeError(f"{what} in pages of {state.pieces_per_page} pieces")


def _check_floats(name: str, tensor: Tensor, state: LayerState, *, is_whole: bool = False) -> None:
    """Refuse a tensor that is not of a float dtype on the pool's device, or has gaps."""
    if tensor.dtype not in KERNEL_DTYPES or tensor.device != state.pool.device:
        what = f"{name} {describe(tensor)} is not of a float dtype of the kernels"
        raise ShapeError(f"{what} on {state.pool.device}")
    checks.check_last_dim(name, tensor)
    if is_whole and not tensor.is_contiguous():
        raise ShapeError(f"{name} {describe(tensor)} is not contiguous")


def _check_rows(rows: StateRows, state: LayerState, tokens: Tensor) -> None:
    """Refuse rows that do not match `StateRows`, or whose spans lie outside of the tokens."""
    given, num_table_rows = rows.rows, len(state.tables)
    if given.ndim != 2 or given.shape[1] != NUM_FIELDS or given.dtype != torch.int32:
        raise ShapeError(f"rows {describe(given)} is not [num_rows, {NUM_FIELDS}] int32")
    if given.device != state.pool.device or not given.is_contiguous():
        raise ShapeError(f"rows {describe(given)} is not contiguous on {state.pool.device}")
    for span in rows.spans:
        end = span.first_token + span.num_tokens
        ends = [0, *(num_before for num_before, _ in span.kept), span.num_tokens]
        is_inside = 0 <= span.first_token <= end <= len(tokens) and all(
            0 <= row < num_table_rows for row in (span.row, *(row for _, row in span.kept))
        )
        if span.num_tokens and not is_inside:
            what = f"{span} does not lie within {len(tokens)} tokens"
            raise ShapeError(f"{what} and {num_table_rows} rows of tables")
        is_planned = (span.num_tokens <= 1 or rows.tiles is not None) and (
            not num_in_chunks(span) or rows.chunks is not None
        )
        if not is_planned:
            raise ShapeError(f"{span} has more tokens than its step was planned for")
        if span.kept and any(before >= behind for before, behind in itertools.pairwise(ends)):
            raise ShapeError(f"{span} does not keep states at places within its tokens, ascending")
