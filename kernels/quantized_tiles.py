"""Parts of Triton kernels that multiply tiles of quantized weights.

The weights are the first factor of every product: tensor cores of Hopper then multiply 64 outputs
at a time by as few as 16 rows. Kernels of `tieredkv.kernels.fp8_products` and `expert_products`
call these functions.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (a kernel's arguments have no Python types)

import triton
import triton.language as tl


def _unpack(index: int) -> str:
    """Return PTX that makes two bfloat16 of the numbers at four bits of two words."""
    left, up = 12 - 4 * index, 6 - 4 * index
    return f"""{{
    .reg .b32 sign, bits, large;
    shl.b32 sign, $1, {left};
    {"shl" if up > 0 else "shr"}.b32 bits, $1, {abs(up)};
    and.b32 sign, sign, 0x80008000;
    and.b32 bits, bits, 0x01C001C0;
    or.b32 bits, bits, sign;
    mov.b32 large, 0x7E807E80;
    mul.rn.bf16x2 bits, bits, large;
    mul.rn.bf16x2 $0, bits, $2;
    }}"""


_UNPACK = tl.constexpr(tuple(_unpack(index) for index in range(4)))
"""The numbers are multiplied by 2^126, and then by their power of two."""


@triton.jit
def sum_fp8_blocks(
    x, x_scales, x_scales_stride, weight, weight_scales, is_row, is_output, first, end,
    IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Multiply rows by outputs over the blocks of 128 inputs from `first` to `end`.

    Products of a block are summed, and then multiplied by both scales, in float32. Scales are
    loaded one block ahead.

    Args:
        x: pointers [rows, 128] to values of block 0, in FP8.
        x_scales: pointers [rows] to the scales of block 0.
        x_scales_stride: from the scales of one block to those of the next.
        weight: pointers [outputs, 128] to values of block 0, in FP8.
        weight_scales: pointers [outputs] to the scales of block 0, which the next ones follow.
        is_row: [rows]; other rows are not loaded.
        is_output: [outputs]; others are not loaded unless IS_EVEN.
        first: block.
        end: the block after the last one.
        IS_EVEN: whether all outputs are loaded.

    Returns:
        [outputs, rows] float32.
    """
    acc = tl.zeros([weight.shape[0], x.shape[0]], tl.float32)
    row_factor = tl.load(x_scales + first * x_scales_stride, mask=is_row, other=0.0)
    output_factor = tl.load(weight_scales + first, mask=is_output, other=0.0)
    for block in range(first, end):
        rows = tl.load(x + block * 128, mask=is_row[:, None], other=0.0)
        if IS_EVEN:
            values = tl.load(weight + block * 128)
        else:
            values = tl.load(weight + block * 128, mask=is_output[:, None], other=0.0)
        ahead = tl.minimum(block + 1, end - 1)
        next_row_factor = tl.load(x_scales + ahead * x_scales_stride, mask=is_row, other=0.0)
        next_output_factor = tl.load(weight_scales + ahead, mask=is_output, other=0.0)
        part = tl.dot(values, tl.trans(rows))
        acc += part * (output_factor[:, None] * row_factor[None, :])
        row_factor, output_factor = next_row_factor, next_output_factor
    return acc


@triton.jit
def sum_wide_fp8_blocks(
    x, x_scales, x_scales_stride, weight, even_scales, odd_scales, is_row, is_output, first, end,
    IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Multiply 64 rows or more by outputs of which all even ones, and all odd ones, share a scale.

    As `sum_fp8_blocks`, but the rows are the first factor: each thread then has sums of two rows,
    and needs few scales.

    Args:
        x: pointers [rows, 128] to values of block 0, in FP8.
        x_scales: pointers [rows] to the scales of block 0.
        x_scales_stride: from the scales of one block to those of the next.
        weight: pointers [outputs, 128] to values of block 0, in FP8.
        even_scales: pointer to the scale of the even outputs of block 0, which the next ones
            follow.
        odd_scales: pointer to that of the odd outputs.
        is_row: [rows]; other rows are not loaded.
        is_output: [outputs]; others are not loaded unless IS_EVEN.
        first: block.
        end: the block after the last one.
        IS_EVEN: whether all outputs are loaded.

    Returns:
        [rows, outputs] float32.
    """
    acc = tl.zeros([x.shape[0], weight.shape[0]], tl.float32)
    is_odd = (tl.arange(0, weight.shape[0]) % 2)[None, :] == 1
    row_factor = tl.load(x_scales + first * x_scales_stride, mask=is_row, other=0.0)
    even_factor, odd_factor = tl.load(even_scales + first), tl.load(odd_scales + first)
    for block in range(first, end):
        rows = tl.load(x + block * 128, mask=is_row[:, None], other=0.0)
        if IS_EVEN:
            values = tl.load(weight + block * 128)
        else:
            values = tl.load(weight + block * 128, mask=is_output[:, None], other=0.0)
        ahead = tl.minimum(block + 1, end - 1)
        next_row_factor = tl.load(x_scales + ahead * x_scales_stride, mask=is_row, other=0.0)
        next_even_factor, next_odd_factor = (
            tl.load(even_scales + ahead),
            tl.load(odd_scales + ahead),
        )
        part = tl.dot(rows, tl.trans(values))
        odd, even = row_factor * odd_factor, row_factor * even_factor
        acc += part * tl.where(is_odd, odd[:, None], even[:, None])
        row_factor, even_factor, odd_factor = next_row_factor, next_even_factor, next_odd_factor
    return acc


@triton.jit
def _power_of_two(stored):
    """Return 2^(stored - 127) of bytes in int32; a float32 below 2^-126 has no leading one."""
    bits = tl.where(stored == 0, 0x400000, stored << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _fp4_numbers(words, factor, INDEX: tl.constexpr, HAS_PTX: tl.constexpr, dtype: tl.constexpr):
    """Return the E2M1 number at four bits of each word, times a power of two; rounded once.

    Its bits are put where a wider float has the same ones. That is the number times 2^-126, of zero
    and 0.5 too, which have no leading one in either. With HAS_PTX, two numbers in bfloat16 share
    each instruction; their powers of two are exact there.
    """
    if HAS_PTX:
        return tl.inline_asm_elementwise(
            _UNPACK[INDEX], "=r,r,r", [words, factor.to(tl.bfloat16)], dtype=tl.bfloat16,
            is_pure=True, pack=2,
        )  # fmt: skip
    code = words.to(tl.int32) >> (4 * INDEX)
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    exact = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    return (exact * factor).to(dtype)


@triton.jit
def sum_mxfp4_groups(
    x, weight, weight_scales, is_row, is_output, NUM_INPUTS: tl.constexpr, IS_EVEN: tl.constexpr,
    WORD: tl.constexpr, HAS_PTX: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Multiply rows by outputs, whose numbers are made tile by tile.

    A word of the weight has WORD numbers, and a word of x has the WORD inputs that they are
    multiplied by, the first one in the lowest bits. Numbers at the same place of their words are
    multiplied together, so that nothing is moved from one thread to another.

    Args:
        x: pointers [rows, tile] to words, of WORD times the width of the dtype.
        weight: pointers [outputs, tile] to words of 4 * WORD bits.
        weight_scales: pointers [outputs, groups of 32 inputs in a tile] to bytes.
        is_row: [rows]; other rows are not loaded.
        is_output: [outputs]; others are not loaded unless IS_EVEN, nor are inputs past the last.
        NUM_INPUTS: of the weight.
        IS_EVEN: whether tiles divide outputs and inputs.
        WORD: inputs of a word.
        HAS_PTX: whether bfloat16 is made by PTX, which needs Hopper and words of 4 inputs.
        dtype: of the rows, to which weights are rounded.

    Returns:
        [outputs, rows] float32.
    """
    NUM_ROWS: tl.constexpr = x.shape[0]
    OUTPUTS: tl.constexpr = weight.shape[0]
    TILE: tl.constexpr = weight.shape[1]
    GROUP: tl.constexpr = 32 // WORD
    BITS: tl.constexpr = dtype.primitive_bitwidth
    half: tl.constexpr = tl.int16 if BITS == 16 else tl.int32
    word = tl.arange(0, TILE)
    group = tl.arange(0, TILE // GROUP)
    acc = tl.zeros([OUTPUTS, NUM_ROWS], tl.float32)
    for start in range(0, NUM_INPUTS // WORD, TILE):
        if IS_EVEN:
            rows = tl.load(x + start, mask=is_row[:, None], other=0)
            words = tl.load(weight + start)
            stored = tl.load(weight_scales + start // GROUP)
        else:
            is_word = start + word < NUM_INPUTS // WORD
            rows = tl.load(x + start, mask=is_row[:, None] & is_word[None, :], other=0)
            words = tl.load(weight + start, mask=is_output[:, None] & is_word[None, :], other=0)
            is_group = start // GROUP + group < NUM_INPUTS // 32
            mask = is_output[:, None] & is_group[None, :]
            stored = tl.load(weight_scales + start // GROUP, mask=mask, other=127)
        factor = _power_of_two(stored.to(tl.int32))[:, :, None]
        factor = tl.broadcast_to(factor, (OUTPUTS, TILE // GROUP, GROUP))
        factor = tl.reshape(factor, (OUTPUTS, TILE))
        for index in tl.static_range(WORD):
            inputs = (rows >> (BITS * index)).to(half).to(dtype, bitcast=True)
            weights = _fp4_numbers(words, factor, index, HAS_PTX, dtype)
            acc = tl.dot(weights, tl.trans(inputs), acc, input_precision="ieee")
    return acc
