"""Triton kernels for the operations between a model's matrix products and its attention.

Grids depend on shapes only, and no kernel is compiled per number of tokens, so that every launch
can be captured in a CUDA graph. Callers go through `tieredkv.kernels.layers`, which checks the
tensors; this module does not. References: the functions of the same names in
`tieredkv.kernels.reference`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (a kernel's arguments have no Python types)

import triton
import triton.language as tl
from torch import Tensor

from tieredkv.kernels.checks import Branch, HeadNorms, LayerCache, NormStyle
from tieredkv.kernels.expert_layout import GateKind

ROW_TILE = 4096
"""Weights that one program multiplies at a time."""

GATE_TILE = 1024
ROTATE_TILE = 512
"""Pairs of elements that one program rotates; they may span several heads."""


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, eps, x_stride, HIDDEN_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Normalise one row.

    Grid: (num_tokens,). A program holds its row in registers; columns past HIDDEN_SIZE are
    masked. Bytes moved: 1 read and 1 write of the row.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    mask = column < HIDDEN_SIZE
    x = tl.load(x_ptr + token * x_stride + column, mask=mask, other=0.0)
    exact = x.to(tl.float32)
    variance = tl.sum(exact * exact, axis=0) / HIDDEN_SIZE
    normed = (exact * tl.rsqrt(variance + eps)).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN_SIZE + column, (normed * weight).to(x.dtype), mask=mask)


@triton.jit
def _weigh(divided, weight, offset, dtype: tl.constexpr, IS_ROUNDED_FIRST: tl.constexpr):
    """Multiply elements that are divided by their root mean square by the weights of a norm."""
    if IS_ROUNDED_FIRST:
        divided = divided.to(dtype).to(tl.float32)
    return (divided * (weight.to(tl.float32) + offset)).to(dtype)


@triton.jit
def _norm_row(
    row, weight_ptr, column, mask, eps, offset, IS_ROUNDED_FIRST: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
):  # fmt: skip
    exact = row.to(tl.float32)
    divided = exact * tl.rsqrt(tl.sum(exact * exact, axis=0) / HIDDEN_SIZE + eps)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    return _weigh(divided, weight, offset, row.dtype, IS_ROUNDED_FIRST)


@triton.jit
def _add_and_norm_kernel(
    residual_ptr, rows_ptr, others_ptr, norm_ptr, own_norms_ptr, scalar_ptr, norms_ptr, normed_ptr,
    eps, offset, IS_ROUNDED_FIRST: tl.constexpr, NUM_NORMS: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Norm a row of a branch, add it to that of the residual stream, and norm that NUM_NORMS times.

    Grid: (num_tokens,). A program holds its row in registers; columns past HIDDEN_SIZE are
    masked. Bytes moved: 1 read and 1 write of the residual row, 1 read of each branch's row, and
    NUM_NORMS writes.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    mask = column < HIDDEN_SIZE
    target = token * HIDDEN_SIZE + column
    x = tl.load(residual_ptr + target, mask=mask, other=0.0)
    if rows_ptr is not None:
        row = tl.load(rows_ptr + target, mask=mask, other=0.0)
        if others_ptr is not None:
            other = tl.load(others_ptr + target, mask=mask, other=0.0)
            row = _norm_row(
                row, own_norms_ptr, column, mask, eps, offset, IS_ROUNDED_FIRST, HIDDEN_SIZE
            )
            other = _norm_row(
                other, own_norms_ptr + HIDDEN_SIZE, column, mask, eps, offset, IS_ROUNDED_FIRST,
                HIDDEN_SIZE,
            )  # fmt: skip
            row = (row.to(tl.float32) + other.to(tl.float32)).to(x.dtype)
        if norm_ptr is not None:
            row = _norm_row(row, norm_ptr, column, mask, eps, offset, IS_ROUNDED_FIRST, HIDDEN_SIZE)
        x = (x.to(tl.float32) + row.to(tl.float32)).to(x.dtype)
        if scalar_ptr is not None:
            x = (x.to(tl.float32) * tl.load(scalar_ptr).to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + target, x, mask=mask)
    exact = x.to(tl.float32)
    divided = exact * tl.rsqrt(tl.sum(exact * exact, axis=0) / HIDDEN_SIZE + eps)
    for index in tl.static_range(NUM_NORMS):
        weight = tl.load(norms_ptr + index * HIDDEN_SIZE + column, mask=mask, other=0.0)
        normed = _weigh(divided, weight, offset, x.dtype, IS_ROUNDED_FIRST)
        out = normed_ptr + (index * tl.num_programs(0) + token) * HIDDEN_SIZE + column
        tl.store(out, normed, mask=mask)


@triton.jit
def _multiply_row_kernel(
    x_ptr, weight_ptr, out_ptr, HAS_RESIDUAL: tl.constexpr, NUM_INPUTS: tl.constexpr,
    OUTPUT_TILE: tl.constexpr, INPUT_TILE: tl.constexpr,
):  # fmt: skip
    """Multiply one row by OUTPUT_TILE rows of a weight matrix, and add out if HAS_RESIDUAL.

    Grid: (num_outputs / OUTPUT_TILE,); nothing is masked. Sums are float32. Bytes moved: the
    weights once, the row once per program.
    """
    output = tl.program_id(0) * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)
    column = tl.arange(0, INPUT_TILE)
    source = weight_ptr + output.to(tl.int64)[:, None] * NUM_INPUTS + column[None, :]
    acc = tl.zeros([OUTPUT_TILE, INPUT_TILE], tl.float32)
    for start in range(0, NUM_INPUTS, INPUT_TILE):
        weight = tl.load(source + start).to(tl.float32)
        acc += weight * tl.load(x_ptr + start + column).to(tl.float32)[None, :]
    total = tl.sum(acc, 1)
    if HAS_RESIDUAL:
        total += tl.load(out_ptr + output).to(tl.float32)
    tl.store(out_ptr + output, total.to(out_ptr.dtype.element_ty))


@triton.jit
def _gate_mul_kernel(
    gate_up_ptr, out_ptr, gate_up_stride, GATE: tl.constexpr, NUM_COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Multiply one tile of a row's second half by the activation of the first half.

    Grid: (num_tokens, ceil(NUM_COLUMNS / TILE)); the last tile of a row is masked. Bytes moved: 2
    reads and 1 write of NUM_COLUMNS elements per token.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < NUM_COLUMNS
    source = gate_up_ptr + token * gate_up_stride + column
    gate = tl.load(source, mask=mask, other=0.0)
    up = tl.load(source + NUM_COLUMNS, mask=mask, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    slope = x
    if GATE == "gelu_tanh":  # (1 + tanh(z)) / 2 is sigmoid(2 z)
        slope = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    gated = (x / (1.0 + tl.exp(-slope))).to(gate.dtype).to(tl.float32)
    out = (gated * up).to(gate.dtype)
    tl.store(out_ptr + token * NUM_COLUMNS + column, out, mask=mask)


@triton.jit
def _pair(
    index, HALF_DIM: tl.constexpr, NUM_ANGLES: tl.constexpr, IS_PARTIAL: tl.constexpr
):  # fmt: skip
    """Return which two elements of a head are its pair of an index.

    They are HALF_DIM apart. If IS_PARTIAL, those that are turned are the first ones of the head,
    and NUM_ANGLES apart; the others have no partner, and are paired in order.
    """
    first, second = index, index + HALF_DIM
    if IS_PARTIAL:
        is_turned = index < NUM_ANGLES
        first = tl.where(is_turned, index, index + NUM_ANGLES)
        second = tl.where(is_turned, index + NUM_ANGLES, second)
    return first, second


@triton.jit
def _rotate_and_store_kernel(
    qkv_ptr, cos_sin_ptr, positions_ptr, slot_mapping_ptr, k_cache_ptr, v_cache_ptr, head_norms_ptr,
    out_ptr, eps, offset, qkv_stride, cache_stride_block, cache_stride_token, cache_stride_head,
    BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HAS_VALUES: tl.constexpr, HAS_GATES: tl.constexpr, HALF_DIM: tl.constexpr,
    NUM_ANGLES: tl.constexpr, IS_PARTIAL: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_VALUE_NORM: tl.constexpr, IS_ROUNDED_FIRST: tl.constexpr, HEAD_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store HEAD_TILE heads of a token: queries, then keys, then values.

    Grid: (num_tokens, ceil((NUM_HEADS + 2 * NUM_KV_HEADS) / HEAD_TILE)). A head is held as the
    first and the second elements of its pairs, of which NUM_ANGLES are turned; see `_pair`. Heads
    past the last and pairs past HALF_DIM are masked. Gates behind queries are skipped. Values are
    read from the keys unless HAS_VALUES. Keys and values of a token with a negative slot are not
    stored.
    Bytes moved: 1 read and 1 write of qkv, and 1 read of the table's row.
    """
    # NOTE: what depends on nothing else is loaded first, so that memory is waited for twice only.
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    head = (tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE))[:, None]
    dim = tl.arange(0, HALF_TILE)[None, :]
    is_real = dim < HALF_DIM
    is_query = is_real & (head < NUM_HEADS)
    is_key = is_real & (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = is_real & (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    is_any = is_query | is_key | is_value

    source_head = head
    if not HAS_VALUES:
        source_head = tl.where(head >= NUM_HEADS + NUM_KV_HEADS, head - NUM_KV_HEADS, head)
    if HAS_GATES:
        source_head = tl.where(head < NUM_HEADS, 2 * head, source_head + NUM_HEADS)
    first, second = _pair(dim, HALF_DIM, NUM_ANGLES, IS_PARTIAL)
    source = qkv_ptr + token * qkv_stride + source_head * (2 * HALF_DIM)
    raw_low = tl.load(source + first, mask=is_any, other=0.0)
    raw_high = tl.load(source + second, mask=is_any, other=0.0)
    if HAS_NORM:
        weight_low = tl.load(head_norms_ptr + first, mask=is_real, other=0.0)
        weight_high = tl.load(head_norms_ptr + second, mask=is_real, other=0.0)
        if NUM_KV_HEADS > 0:
            k_norm = head_norms_ptr + 2 * HALF_DIM
            k_low = tl.load(k_norm + first, mask=is_real, other=0.0)
            k_high = tl.load(k_norm + second, mask=is_real, other=0.0)
            weight_low = tl.where(is_query, weight_low, k_low)
            weight_high = tl.where(is_query, weight_high, k_high)
    row = cos_sin_ptr + position * (2 * NUM_ANGLES) + dim
    cos = tl.load(row, mask=dim < NUM_ANGLES, other=1.0)
    sin = tl.load(row + NUM_ANGLES, mask=dim < NUM_ANGLES, other=0.0)

    dtype = raw_low.dtype
    low, high = raw_low.to(tl.float32), raw_high.to(tl.float32)
    if HAS_NORM:
        variance = tl.sum(low * low + high * high, axis=1)[:, None] / (2 * HALF_DIM)
        scale = tl.rsqrt(variance + eps)
        low, high = low * scale, high * scale
        if HAS_VALUE_NORM:
            raw_low, raw_high = low.to(dtype), high.to(dtype)
        low = _weigh(low, weight_low, offset, dtype, IS_ROUNDED_FIRST).to(tl.float32)
        high = _weigh(high, weight_high, offset, dtype, IS_ROUNDED_FIRST).to(tl.float32)
    rotated_low = (low * cos - high * sin).to(dtype)
    rotated_high = (high * cos + low * sin).to(dtype)

    out = out_ptr + (token * NUM_HEADS + head) * (2 * HALF_DIM)
    tl.store(out + first, rotated_low, mask=is_query)
    tl.store(out + second, rotated_high, mask=is_query)
    if slot >= 0:
        slot_offset = (slot // BLOCK_SIZE) * cache_stride_block
        slot_offset += (slot % BLOCK_SIZE) * cache_stride_token
        key = k_cache_ptr + slot_offset + (head - NUM_HEADS) * cache_stride_head
        tl.store(key + first, rotated_low, mask=is_key)
        tl.store(key + second, rotated_high, mask=is_key)
        value_head = head - NUM_HEADS - NUM_KV_HEADS
        value = v_cache_ptr + slot_offset + value_head * cache_stride_head
        tl.store(value + first, raw_low, mask=is_value)
        tl.store(value + second, raw_high, mask=is_value)


@triton.jit
def _gate_heads_kernel(
    heads_ptr, gates_ptr, norm_ptr, out_ptr, eps, gate_token_stride, gate_head_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
):  # fmt: skip
    """Multiply HEAD_TILE heads of a token by their gates' activations; a norm comes before.

    Grid: (num_tokens, ceil(NUM_HEADS / HEAD_TILE)). Heads past the last and elements past HEAD_DIM
    are masked. Bytes moved: 2 reads and 1 write of the heads.
    """
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE))[:, None]
    dim = tl.arange(0, DIM_TILE)[None, :]
    mask = (head < NUM_HEADS) & (dim < HEAD_DIM)
    target = (token * NUM_HEADS + head) * HEAD_DIM + dim
    raw = tl.load(heads_ptr + target, mask=mask, other=0.0)
    source = gates_ptr + token * gate_token_stride + head * gate_head_stride + dim
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    rows, factor = raw.to(tl.float32), tl.sigmoid(gate)
    if norm_ptr is None:
        factor = factor.to(raw.dtype).to(tl.float32)
    else:
        weight = tl.load(norm_ptr + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(rows * rows, axis=1)[:, None] / HEAD_DIM + eps)
        rows = ((rows * scale).to(raw.dtype).to(tl.float32) * weight).to(raw.dtype).to(tl.float32)
        factor = gate * factor
    tl.store(out_ptr + target, (rows * factor).to(raw.dtype), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Launch the kernel; same contract as `layers.rms_norm`."""
    num_tokens, hidden_size = x.shape
    out = x.new_empty(num_tokens, hidden_size)
    tile = triton.next_power_of_2(hidden_size)
    _rms_norm_kernel[(num_tokens,)](
        x, weight, out, eps, x.stride(0), HIDDEN_SIZE=hidden_size, TILE=tile,
        num_warps=min(16, max(1, tile // 512)),
    )  # fmt: skip
    return out


def add_and_norm(
    residual: Tensor, branch: Branch | None, norms: Tensor, style: NormStyle
) -> Tensor:
    """Launch the kernel; same contract as `layers.add_and_norm`."""
    num_tokens, hidden_size = residual.shape
    rows, norm, others, own_norms, scalar = branch or [None] * 5
    normed = residual.new_empty(len(norms), num_tokens, hidden_size)
    tile = triton.next_power_of_2(hidden_size)
    _add_and_norm_kernel[(num_tokens,)](
        residual, rows, others, norm, own_norms, scalar, norms, normed, style.eps, style.offset,
        IS_ROUNDED_FIRST=style.is_rounded_first, NUM_NORMS=len(norms), HIDDEN_SIZE=hidden_size,
        TILE=tile, num_warps=min(16, max(1, tile // 512)),
    )  # fmt: skip
    return normed


def _output_tile(num_outputs: int) -> int:
    """Return the rows per program: few for small matrices, to occupy every multiprocessor."""
    return 4 if num_outputs <= 4096 else 8 if num_outputs < 16384 else 16


def takes_row(num_outputs: int, num_inputs: int) -> bool:
    """Return whether the kernel's tiles divide a weight matrix of this shape evenly."""
    tile = _output_tile(num_outputs)
    return num_outputs % tile == 0 and num_inputs % (ROW_TILE // tile) == 0


def multiply_row(x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
    """Launch the kernel; same contract as `layers.linear`, for one row."""
    num_outputs, num_inputs = weight.shape
    out = x.new_empty(1, num_outputs) if residual is None else residual
    tile = _output_tile(num_outputs)
    _multiply_row_kernel[(num_outputs // tile,)](
        x, weight, out, HAS_RESIDUAL=residual is not None, NUM_INPUTS=num_inputs,
        OUTPUT_TILE=tile, INPUT_TILE=ROW_TILE // tile, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


def gate_mul(gate_up: Tensor, kind: GateKind) -> Tensor:
    """Launch the kernel; same contract as `layers.gate_mul`."""
    num_tokens, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, num_columns)
    tile = min(GATE_TILE, triton.next_power_of_2(num_columns))
    _gate_mul_kernel[(num_tokens, triton.cdiv(num_columns, tile))](
        gate_up, out, gate_up.stride(0), GATE=kind, NUM_COLUMNS=num_columns, TILE=tile, num_warps=4
    )
    return out


def rotate_and_store(
    qkv: Tensor,
    num_heads: int,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cache: LayerCache,
    norms: HeadNorms | None,
    has_gates: bool,
    is_partial: bool,
) -> Tensor:
    """Launch the kernel; same contract as `layers.rotate_and_store`."""
    num_tokens = qkv.shape[0]
    block_size, num_kv_heads, head_dim = cache.k.shape[1:]
    num_others = qkv.shape[1] // head_dim - (2 * num_heads if has_gates else num_heads)
    num_parts = num_others // num_kv_heads
    num_stored = num_kv_heads if num_parts else 0
    out = qkv.new_empty(num_tokens, num_heads, head_dim)
    half_tile = triton.next_power_of_2(head_dim // 2)
    head_tile = max(1, ROTATE_TILE // half_tile)
    style = NormStyle(0.0) if norms is None else norms.style
    _rotate_and_store_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_stored, head_tile))](
        qkv, cos_sin, positions, slot_mapping, *cache, None if norms is None else norms.weights,
        out, style.eps, style.offset, qkv.stride(0), *cache.k.stride()[:3], BLOCK_SIZE=block_size,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_stored, HAS_VALUES=num_parts == 2,
        HAS_GATES=has_gates, HALF_DIM=head_dim // 2, NUM_ANGLES=cos_sin.shape[1] // 2,
        IS_PARTIAL=is_partial, HAS_NORM=norms is not None,
        HAS_VALUE_NORM=norms is not None and norms.has_values,
        IS_ROUNDED_FIRST=style.is_rounded_first, HEAD_TILE=head_tile, HALF_TILE=half_tile,
        num_warps=4,
    )  # fmt: skip
    return out


def gate_heads(heads: Tensor, gates: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """Launch the kernel; same contract as `layers.gate_heads`."""
    num_tokens, num_heads, head_dim = heads.shape
    out = heads.new_empty(heads.shape)
    dim_tile = triton.next_power_of_2(head_dim)
    head_tile = max(1, GATE_TILE // dim_tile)
    _gate_heads_kernel[(num_tokens, triton.cdiv(num_heads, head_tile))](
        heads, gates, norm, out, eps, gates.stride(0), gates.stride(1), NUM_HEADS=num_heads,
        HEAD_DIM=head_dim, HEAD_TILE=head_tile, DIM_TILE=dim_tile, num_warps=4,
    )  # fmt: skip
    return out
