"""Attention over gathered keys and values as two matrix products, for heads above cuDNN's limit.

The scores of heads of 512 dims and their sums do not fit together into a multiprocessor, so a fused
kernel would compute scores more than once. Here one kernel writes the weights exp2(score - maximum)
to memory, where the maximum is that of a row within a tile of keys. A row is a query of one head,
and the heads of a KV head share tiles. A second kernel multiplies the weights by the values, and
scales each tile's weights to the maximum over all tiles. Both are plain tiled products, and a score
is 2 bytes that are written once. A maximum is rounded up to a whole number, so that scaling
multiplies by a power of two, which rounds nothing. Scores are in base 2. Callers go through
`tieredkv.kernels.prefill_dense`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (a kernel's arguments have no Python types)

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tieredkv.kernels.partition import num_multiprocessors
from tieredkv.kernels.prefill_dense import Partial

LOG2_E = math.log2(math.e)
LN_2 = tl.constexpr(math.log(2))

MAX_WEIGHTS_BYTES = 256 << 20
"""Most bytes of weights, of all heads together, that are in memory at a time."""

ROWS = 128
KEYS = 128
"""Rows and keys of a tile of scores; a row is one query of one head."""

ROW_TILES = 64
"""Tiles of rows for which a tile of keys is used in turn. With heads of 512 in 16 bits their
queries take 8 MiB, which stay in the device's cache."""

DIMS = 128
"""Dims of the output that a program computes for a tile of rows."""

STEP = 64
"""Dims, or keys, that are multiplied at a time."""

KEY_TILES = 32
"""Tiles of keys whose maxima and sums are read at a time."""

MIN_SHARE_TILES = 8
"""Fewest tiles of keys that a program multiplies by values, if programs share a tile of rows."""

PROGRAMS = 2
"""Programs of the product with values that a multiprocessor runs at a time."""

MIN_BUSY = 0.9
"""Share of the multiprocessors' time that is enough for no further sharing."""

SCORES_OPTIONS = {"num_warps": 8, "num_stages": 3}
VALUES_OPTIONS = {"num_warps": 4, "num_stages": 3}


@triton.jit
def _count_keys(tile, num_rows, num_keys, position, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return how many keys the last query of a tile sees; the others see no more."""
    last = (tl.minimum(tile * ROWS + ROWS, num_rows) - 1) // GROUP
    return tl.minimum(num_keys, position + last + 1)


@triton.jit(do_not_specialize=["num_rows", "num_keys", "position"])
def _scores_kernel(
    p_ptr, max_ptr, sum_ptr, q_ptr, k_ptr, scale_log2, num_rows, num_keys, position,
    q_stride_query, q_stride_head, k_stride_key, k_stride_head, p_stride_head, p_stride_row,
    sum_stride_head, sum_stride_tile, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STEP: tl.constexpr, ROW_TILES: tl.constexpr,
):  # fmt: skip
    """Compute the weights of a tile of rows and keys, and each row's maximum and sum there.

    Row r is query r // GROUP and head r % GROUP of those of one KV head. Query i sees the keys up
    to position + i. Grid: (tiles of keys, tiles of rows, num_kv_heads), of which ROW_TILES tiles
    of rows are computed for a tile of keys before the next; tiles that no row sees are left
    unwritten. A row that sees no key of a tile has maximum -inf and weights 0 there. Masks: dims
    past HEAD_DIM; rows and keys past the last read the last, and their weights are written, for
    which the buffers have room. Bytes moved: HEAD_DIM elements for each row and each key, and one
    element written for each score.
    """
    row_tile, key_tile = tl.swizzle2d(
        tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), ROW_TILES
    )
    kv_head = tl.program_id(2)
    if key_tile * KEYS >= _count_keys(row_tile, num_rows, num_keys, position, GROUP, ROWS):
        return
    row = row_tile * ROWS + tl.arange(0, ROWS)
    key = key_tile * KEYS + tl.arange(0, KEYS)
    real_row = tl.minimum(row, num_rows - 1)
    query = real_row // GROUP
    q_offset = query * q_stride_query + (kv_head * GROUP + real_row % GROUP) * q_stride_head
    k_offset = tl.minimum(key, num_keys - 1) * k_stride_key + kv_head * k_stride_head
    scores = tl.zeros([ROWS, KEYS], tl.float32)
    for start in range(0, HEAD_DIM, STEP):
        dim = start + tl.arange(0, STEP)
        is_dim = (dim < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + q_offset[:, None] + dim[None, :], is_dim, other=0.0)
        k = tl.load(k_ptr + k_offset[:, None] + dim[None, :], is_dim, other=0.0)
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
    num_seen = tl.minimum(position + query + 1, num_keys)
    is_seen = key[None, :] < num_seen[:, None]
    scores = tl.where(is_seen, scores * scale_log2, float("-inf"))
    row_max = tl.ceil(tl.max(scores, 1))
    # A row without a visible key keeps -inf; a shift of 0 makes exp2 give 0, not NaN.
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    weights = tl.exp2(scores - shift[:, None]).to(p_ptr.dtype.element_ty)
    sum_offset = kv_head * sum_stride_head + key_tile * sum_stride_tile + row
    tl.store(max_ptr + sum_offset, row_max)
    # The sum is that of the rounded weights, so that they add up to 1 once they are divided by it.
    tl.store(sum_ptr + sum_offset, tl.sum(weights.to(tl.float32), 1))
    p_offset = kv_head * p_stride_head + row * p_stride_row
    tl.store(p_ptr + p_offset[:, None] + key[None, :], weights)


@triton.jit(do_not_specialize=["num_rows", "num_keys", "position", "num_shares"])
def _values_kernel(
    out_ptr, lse_ptr, p_ptr, max_ptr, sum_ptr, v_ptr, num_rows, num_keys, position, num_shares,
    v_stride_key, v_stride_head, p_stride_head, p_stride_row, sum_stride_head, sum_stride_tile,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIMS: tl.constexpr, STEP: tl.constexpr, KEY_TILES: tl.constexpr,
):  # fmt: skip
    """Multiply the weights of a tile of rows by a share of the values, and divide by their sums.

    Rows are those of `_scores_kernel`. Grid: (ceil(HEAD_DIM / DIMS), tiles of rows, num_kv_heads *
    num_shares). The tiles of keys that a tile of rows sees are divided into equal shares. Divided
    by the sums of all keys, what the shares give adds up to the result; shares without keys give 0.
    Maxima and sums are read for KEY_TILES tiles of keys at a time. Rows that see no key give 0 and
    an lse of -inf. Masks: rows past the last, dims past HEAD_DIM; keys past the last read the last,
    and have weight 0. Bytes moved: the share's weights, and DIMS elements of each of its values,
    read once; DIMS elements per row written; a maximum and a sum per row and tile of keys.
    """
    kv_head, share = tl.program_id(2) // num_shares, tl.program_id(2) % num_shares
    num_seen = _count_keys(tl.program_id(1), num_rows, num_keys, position, GROUP, ROWS)
    num_tiles = tl.cdiv(num_seen, KEYS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    sum_offset = kv_head * sum_stride_head + row
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for first in range(0, num_tiles, KEY_TILES):
        tile = first + tl.arange(0, KEY_TILES)
        is_tile = (tile < num_tiles)[:, None]
        at = sum_offset[None, :] + tile[:, None] * sum_stride_tile
        tile_max = tl.load(max_ptr + at, is_tile, other=float("-inf"))
        tile_sum = tl.load(sum_ptr + at, is_tile, other=0.0)
        new_max = tl.maximum(row_max, tl.max(tile_max, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        tile_sum *= tl.exp2(tile_max - shift[None, :])
        row_sum = row_sum * tl.exp2(row_max - shift) + tl.sum(tile_sum, 0)
        row_max = new_max

    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    dim = tl.program_id(0) * DIMS + tl.arange(0, DIMS)
    is_dim = (dim < HEAD_DIM)[None, :]
    p_offset = kv_head * p_stride_head + row * p_stride_row
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    share_keys = tl.cdiv(num_tiles, num_shares) * KEYS
    for start in range(share * share_keys, tl.minimum(num_seen, (share + 1) * share_keys), STEP):
        key = start + tl.arange(0, STEP)
        weights = tl.load(p_ptr + p_offset[:, None] + key[None, :])
        tile_max = tl.load(max_ptr + sum_offset + start // KEYS * sum_stride_tile)
        weights *= tl.exp2(tile_max - shift).to(weights.dtype)[:, None]
        v_offset = tl.minimum(key, num_keys - 1) * v_stride_key + kv_head * v_stride_head
        v = tl.load(v_ptr + v_offset[:, None] + dim[None, :], is_dim, other=0.0)
        acc = tl.dot(weights, v, acc, input_precision="ieee")
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / divisor[:, None]
    is_row = row < num_rows
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    num_heads = tl.num_programs(2) // num_shares * GROUP
    out_offset = (query * num_heads + head) * HEAD_DIM
    share_ptr = out_ptr + share.to(tl.int64) * (num_rows // GROUP) * num_heads * HEAD_DIM
    target = share_ptr + out_offset[:, None] + dim[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), is_row[:, None] & is_dim)
    if (tl.program_id(0) == 0) & (share == 0):
        lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.log2(divisor)) * LN_2)
        tl.store(lse_ptr + head * (num_rows // GROUP) + query, lse, is_row)


def attend_square(q: Tensor, k: Tensor, v: Tensor, scale: float) -> list[Partial]:
    """Attend queries, which are the last tokens of the context, to pieces of the whole context.

    Args:
        q: [num_queries, num_heads, head_dim].
        k: keys of the context, [num_keys, num_kv_heads, head_dim].
        v: values, [num_keys, num_kv_heads, value_dim].
        scale: factor on the scores.

    Returns:
        a part for each piece; the weights of a piece take at most `MAX_WEIGHTS_BYTES`.
    """
    num_queries, num_heads, _ = q.shape
    tile_bytes = num_queries * num_heads * KEYS * q.element_size()
    longest = max(1, MAX_WEIGHTS_BYTES // tile_bytes) * KEYS
    parts = []
    for start in range(0, len(k), longest):
        piece = slice(start, start + longest)
        parts.append(attend(q, k[piece], v[piece], scale, len(k) - num_queries - start))
    return parts


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, position: int) -> Partial:
    """Attend to one piece of a context; query i sees the keys up to position + i.

    Args:
        q: [num_queries, num_heads, head_dim].
        k: [num_keys, num_kv_heads, head_dim].
        v: [num_keys, num_kv_heads, value_dim].
        scale: factor on the scores.
        position: position of the first query, counted from the first key.
    """
    num_queries, num_heads, head_dim = q.shape
    value_dim = v.shape[2]
    num_keys, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    tiles, key_tiles = triton.cdiv(num_queries * group, ROWS), triton.cdiv(num_keys, KEYS)
    weights = q.new_empty(num_kv_heads, tiles * ROWS, key_tiles * KEYS)
    sums = torch.empty(
        2, num_kv_heads, key_tiles, tiles * ROWS, dtype=torch.float32, device=q.device
    )
    dim_tiles = triton.cdiv(value_dim, DIMS)
    num_shares = _count_shares(dim_tiles * tiles * num_kv_heads, key_tiles, q.device)
    out = q.new_empty(num_shares, num_queries, num_heads, value_dim)
    lse = torch.empty(num_heads, num_queries, dtype=torch.float32, device=q.device)
    lengths = (num_queries * group, num_keys, position)
    strides = (*weights.stride()[:2], *sums.stride()[1:3])
    sizes = {"GROUP": group, "ROWS": ROWS, "KEYS": KEYS, "STEP": STEP}
    _scores_kernel[(key_tiles, tiles, num_kv_heads)](
        weights, *sums, q, k, scale * LOG2_E, *lengths, *q.stride()[:2], *k.stride()[:2], *strides,
        **sizes, HEAD_DIM=head_dim, ROW_TILES=ROW_TILES, **SCORES_OPTIONS,
    )  # fmt: skip
    _values_kernel[(dim_tiles, tiles, num_kv_heads * num_shares)](
        out, lse, weights, *sums, v, *lengths, num_shares, *v.stride()[:2], *strides,
        **sizes, HEAD_DIM=value_dim, DIMS=DIMS, KEY_TILES=KEY_TILES, **VALUES_OPTIONS,
    )  # fmt: skip
    return Partial(out[0] if num_shares == 1 else out.sum(0), lse)


def _count_shares(num_programs: int, key_tiles: int, device: torch.device) -> int:
    """Return how many programs share the keys of a tile, so that few multiprocessors are idle.

    Args:
        num_programs: of the product with values, if each multiplies by all keys.
        key_tiles: tiles of keys.
        device: that computes.
    """
    at_a_time, most = PROGRAMS * num_multiprocessors(device), max(1, key_tiles // MIN_SHARE_TILES)
    for shares in range(1, most):
        total = num_programs * shares
        if total >= MIN_BUSY * at_a_time * triton.cdiv(total, at_a_time):
            return shares
    return most
