"""Entry points of the operations between a model's matrix products and its attention.

As in `tieredkv.kernels.launch`, tensors are checked on the host, then the Triton kernel or the
torch reference runs. No function reads a device tensor on the host, so that calls can be captured
in CUDA graphs. Results are rounded where transformers' eager code rounds them. Two exceptions are
rounded only once: the rotation, and products that are added to a residual. This module knows no
requests, tiers or models.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from tieredkv.errors import ShapeError
from tieredkv.kernels import checks, fp8, reference
from tieredkv.kernels.checks import (
    Branch,
    HeadNorms,
    LayerCache,
    NormStyle,
    describe,
    triton_module,
)
from tieredkv.kernels.expert_layout import GateKind
from tieredkv.kernels.quantized import Fp8Matrix, check_quantized

MAX_HIDDEN_SIZE = 16_384
"""The widest row that a program holds in registers."""

PRODUCT_ROWS = 8_192
"""Rows multiplied at a time, because more are slower; a shorter rest joins the last such group."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row by the root of its mean square, and multiply it by the weight.

    Args:
        x: [num_tokens, hidden_size], contiguous in hidden_size.
        weight: [hidden_size], x's dtype.
        eps: added to the mean of squares.

    Returns:
        [num_tokens, hidden_size], contiguous.

    Raises:
        ShapeError: the tensors disagree; checked on the host before launch.

    Source: RMSNorm, Zhang and Sennrich 2019.
    """
    _check_rows("x", x)
    check_like("weight", weight, x, x.shape[1:])
    if not checks.use_triton(x.device):
        return reference.rms_norm(x, weight, eps)
    _check_width(x)
    if not x.shape[0]:
        return x.new_empty(x.shape)
    normed: Tensor = triton_module("fused").rms_norm(x, weight, eps)
    return normed


def add_and_norm(
    residual: Tensor, branch: Branch | None, norms: Tensor, style: NormStyle
) -> Tensor:
    """Norm a branch, add it to the residual stream, in place, and norm that for what comes next.

    Args:
        residual: [num_tokens, hidden_size], contiguous.
        branch: of the residual's shape and dtype, and so are the weights of its norms; None norms
            the residual stream as it is.
        norms: [num_norms, hidden_size], contiguous: the weights of each norm that is wanted.
        style: of all norms.

    Returns:
        [num_norms, num_tokens, hidden_size], contiguous.

    Raises:
        ShapeError: the tensors disagree; checked on the host before launch.
    """
    _check_rows("residual", residual)
    if not residual.is_contiguous():
        raise ShapeError(f"residual {describe(residual)} is not contiguous")
    check_like("norms", norms, residual, (len(norms), *residual.shape[1:]))
    if branch is not None:
        check_like("rows", branch.rows, residual, residual.shape)
        if branch.norm is not None:
            check_like("norm", branch.norm, residual, residual.shape[1:])
        if branch.others is not None:
            check_like("others", branch.others, residual, residual.shape)
        if (branch.others is None) != (branch.own_norms is None):
            raise ShapeError("others and own_norms are given together, or neither is")
        if branch.own_norms is not None:
            check_like("own_norms", branch.own_norms, residual, (2, *residual.shape[1:]))
        if branch.scalar is not None:
            check_like("scalar", branch.scalar, residual, (1,))
    if not checks.use_triton(residual.device):
        return reference.add_and_norm(residual, branch, norms, style)
    _check_width(residual)
    if not residual.shape[0]:
        return residual.new_empty(len(norms), *residual.shape)
    normed: Tensor = triton_module("fused").add_and_norm(residual, branch, norms, style)
    return normed


def linear(
    x: Tensor,
    weight: Tensor | Fp8Matrix,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """Multiply by a weight matrix, and add the bias and the residual stream, if given.

    Like torch's `linear`, but faster for one row and for very many; with a residual, rounded once.
    By a weight in FP8, x is multiplied in FP8 too: see `fp8.quantise_rows`.

    Args:
        x: [num_tokens, num_inputs].
        weight: [num_outputs, num_inputs], contiguous.
        bias: [num_outputs] or None.
        residual: [num_tokens, num_outputs], x's dtype, updated in place; or None.

    Returns:
        [num_tokens, num_outputs] in x's dtype: the residual itself, if there is one.

    Raises:
        ShapeError: the residual does not fit; or a weight in FP8, or what is multiplied by it.
    """
    num_rows, num_outputs = len(x), weight.shape[0]
    if residual is not None and (
        residual.shape != (num_rows, num_outputs) or residual.dtype != x.dtype
    ):
        what = f"residual {describe(residual)} must have the dtype of x"
        raise ShapeError(f"{what} and the shape {[num_rows, num_outputs]}")
    if isinstance(weight, Fp8Matrix):
        _check_fp8(x, weight, bias, residual)
        return fp8.multiply(x, weight, bias, residual)
    is_row = num_rows == 1 and bias is None and x.dtype != torch.float32
    if is_row and checks.use_triton(x.device):
        kernels = triton_module("fused")
        if weight.is_contiguous() and kernels.takes_row(*weight.shape):
            row: Tensor = kernels.multiply_row(x, weight, residual)
            return row
    if residual is None and num_rows < 2 * PRODUCT_ROWS:
        return F.linear(x, weight, bias)
    out = x.new_empty(num_rows, num_outputs) if residual is None else residual
    if residual is not None and bias is not None:
        out += bias
    starts = range(0, max(1, num_rows - PRODUCT_ROWS + 1), PRODUCT_ROWS)
    for start, end in itertools.pairwise([*starts, num_rows]):
        if residual is not None:
            out[start:end].addmm_(x[start:end], weight.t())
        elif bias is not None:
            torch.addmm(bias, x[start:end], weight.t(), out=out[start:end])
        else:
            torch.mm(x[start:end], weight.t(), out=out[start:end])
    return out


def gate_mul(gate_up: Tensor, kind: GateKind) -> Tensor:
    """Multiply the second half of each row by the activation of its first half.

    Args:
        gate_up: [num_tokens, 2 * intermediate_size], contiguous in its last dimension.
        kind: `silu` or `gelu_tanh`; see `Gate`.

    Returns:
        [num_tokens, intermediate_size], contiguous.

    Raises:
        ShapeError: `gate_up` has no two halves; checked on the host before launch.

    Source: SwiGLU, Shazeer 2020.
    """
    _check_rows("gate_up", gate_up)
    if gate_up.shape[1] % 2:
        raise ShapeError(f"gate_up {describe(gate_up)} must have an even number of columns")
    if not checks.use_triton(gate_up.device):
        return reference.gate_mul(gate_up, kind)
    if not gate_up.shape[0]:
        return gate_up.new_empty(0, gate_up.shape[1] // 2)
    out: Tensor = triton_module("fused").gate_mul(gate_up, kind)
    return out


def rotate_and_store(
    qkv: Tensor,
    num_heads: int,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cache: LayerCache,
    norms: HeadNorms | None,
    *,
    has_gates: bool = False,
    is_partial: bool = False,
) -> Tensor:
    """Rotate queries and keys by their positions, and write keys and values into the paged cache.

    Args:
        qkv: [num_tokens, num_columns], the heads of a token's queries, keys and values one after
            the other; the cache's dtype, contiguous in its last dimension. Without values, the
            keys are the values too, before their norm and rotation. Without keys, nothing is
            written.
        num_heads: of the queries.
        cos_sin: [max_positions, num_angles * 2] float32, contiguous: the cosines of a position's
            angles, then their sines. Angle i turns the elements i and i + head_dim / 2 of a head.
            There are at most head_dim / 2, and other elements are not turned.
        positions: [num_tokens] int32 or int64, below max_positions; they are not checked.
        slot_mapping: [num_tokens] int32 or int64; `block_id * block_size + offset`, -1 skips a
            token's keys and values. Slots must be distinct; they are not checked.
        cache: of the layer.
        norms: of the cache's dtype; None for no norm.
        has_gates: whether each head of the queries is followed by a gate of its size.
        is_partial: whether angle i turns the elements i and i + num_angles instead.

    Returns:
        The rotated queries, [num_tokens, num_heads, head_dim], contiguous.

    Raises:
        ShapeError: the tensors disagree; checked on the host before launch.

    Source: RoFormer, Su et al. 2021, with the halves of a head as the pairs (GPT-NeoX).
    """
    checks.check_cache(cache)
    num_kv_heads, head_dim = cache.k.shape[2:]
    num_first = 2 * num_heads if has_gates else num_heads
    widths = [(num_first + parts * num_kv_heads) * head_dim for parts in range(3)]
    if qkv.ndim != 2 or qkv.shape[1] not in widths or num_heads < 1 or head_dim % 2:
        what = f"qkv {describe(qkv)} with {num_heads} heads"
        raise ShapeError(f"{what} does not fit the cache {describe(cache.k)}")
    checks.check_data("qkv", qkv, cache)
    num_columns = cos_sin.shape[-1]
    if cos_sin.ndim != 2 or num_columns > head_dim or num_columns % 2 or not num_columns:
        what = f"cos_sin {describe(cos_sin)} must have an even number of columns"
        raise ShapeError(f"{what}, at most {head_dim}, as heads have")
    if not cos_sin.is_contiguous():
        raise ShapeError(f"cos_sin {describe(cos_sin)} is not contiguous")
    if cos_sin.dtype != torch.float32 or cos_sin.device != qkv.device:
        raise ShapeError(f"cos_sin {describe(cos_sin)} is not float32 on {qkv.device}")
    for name, indices in (("positions", positions), ("slot_mapping", slot_mapping)):
        if indices.shape != qkv.shape[:1]:
            what = f"{name} {describe(indices)} must have one entry"
            raise ShapeError(f"{what} for each row of qkv {describe(qkv)}")
        checks.check_indices(name, indices, cache)
    if norms is not None:
        num_norms = 2 if qkv.shape[1] > widths[0] else 1
        check_like("head_norms", norms.weights, qkv, (num_norms, head_dim))
    is_triton = checks.use_triton(qkv.device)
    if not qkv.shape[0]:
        return qkv.new_empty(0, num_heads, head_dim)
    rotate = triton_module("fused").rotate_and_store if is_triton else reference.rotate_and_store
    parts = qkv, num_heads, cos_sin, positions, slot_mapping, cache, norms
    q: Tensor = rotate(*parts, has_gates, is_partial)
    return q


def gate_heads(
    heads: Tensor, gates: Tensor, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Multiply heads by the sigmoids of their gates, or, with a norm, norm them and take `silu`.

    Args:
        heads: [num_tokens, num_heads, head_dim], contiguous.
        gates: of the same shape and dtype, contiguous in head_dim.
        norm: [head_dim], heads' dtype, the weights of a norm of each head; or None.
        eps: of the norm.

    Returns:
        Of heads' shape and dtype, contiguous.

    Raises:
        ShapeError: the tensors disagree; checked on the host before launch.

    Source: without a norm, Qiu et al. 2025, "Gated Attention for Large Language Models"; with one,
    Gated Delta Networks, Yang et al. 2024.
    """
    if heads.ndim != 3 or heads.dtype not in checks.KERNEL_DTYPES or not heads.is_contiguous():
        what = f"heads {describe(heads)} are not [num_tokens, num_heads, head_dim]"
        raise ShapeError(f"{what}, contiguous and of a supported dtype")
    if (gates.shape, gates.dtype, gates.device) != (heads.shape, heads.dtype, heads.device):
        what = f"gates {describe(gates)} must have the shape, dtype and device"
        raise ShapeError(f"{what} of heads {describe(heads)}")
    checks.check_last_dim("gates", gates)
    if norm is not None:
        check_like("norm", norm, heads, heads.shape[2:])
    if not checks.use_triton(heads.device):
        return reference.gate_heads(heads, gates, norm, eps)
    if not heads.numel():
        return heads.new_empty(heads.shape)
    out: Tensor = triton_module("fused").gate_heads(heads, gates, norm, eps)
    return out


def _check_rows(name: str, tensor: Tensor) -> None:
    if tensor.ndim != 2 or tensor.dtype not in checks.KERNEL_DTYPES:
        raise ShapeError(f"{name} {describe(tensor)} is not a matrix of a supported dtype")
    checks.check_last_dim(name, tensor)


def _check_fp8(x: Tensor, weight: Fp8Matrix, bias: Tensor | None, residual: Tensor | None) -> None:
    _check_rows("x", x)
    if weight.values.ndim != 2 or weight.shape[1] != x.shape[1]:
        raise ShapeError(f"weight {describe(weight.values)} does not fit x {describe(x)}")
    check_quantized("weight", weight, x)
    if bias is not None:
        check_like("bias", bias, x, weight.shape[:1])
    if residual is not None and not residual.is_contiguous():
        raise ShapeError(f"residual {describe(residual)} is not contiguous")


def _check_width(x: Tensor) -> None:
    if x.shape[1] > MAX_HIDDEN_SIZE:
        most = f"the kernels support at most {MAX_HIDDEN_SIZE}"
        raise ShapeError(f"hidden_size {x.shape[1]} is too large; {most}")


def check_like(name: str, tensor: Tensor, data: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor with gaps, of another shape, or of another dtype or device than the data."""
    if tensor.shape != shape or tensor.dtype != data.dtype or tensor.device != data.device:
        what = f"{name} {describe(tensor)} must have the shape {list(shape)}"
        raise ShapeError(f"{what} and the dtype and device of {describe(data)}")
    if not tensor.is_contiguous():
        raise ShapeError(f"{name} {describe(tensor)} is not contiguous")
