"""Compile the kernels for an H200 without a GPU; the interpreter cannot show that they compile.

test_compilation.py runs this in a process of its own, because Triton interprets kernels in the
process of the tests, with `first` or `others`. It prints one line per kernel: its name and its
bytes of shared memory.
"""

# mypy: disable-error-code="no-untyped-call, attr-defined"
# (Triton's compiler is not typed)

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tieredkv.kernels import (
    delta_inputs,
    delta_rule,
    dense_kernels,
    expert_products,
    fp8_products,
    fused,
    latent_attention,
    latent_rotation,
    page_copy,
    paged_attention,
    prefill_products,
    routing,
    short_conv,
    state_plan,
    store_kv,
)
from tieredkv.kernels.expert_layout import (
    EXACT,
    FP8_TILINGS,
    LARGE,
    MIDDLE,
    MXFP4_TILINGS,
    NARROW,
    WIDE,
    GateKind,
    Tiling,
)
from tieredkv.kernels.fp8 import choose_tiling
from tieredkv.kernels.partition import (
    INTS_PER_PROGRAM,
    INTS_PER_TILE,
    Heads,
    Latent,
    narrow_tiling,
    wide_tiling,
)
from tieredkv.kernels.quantized import Format
from tieredkv.types import StateShape

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
OTHER_POINTERS = {
    "partial_out_ptr": "*fp32",
    "partial_lse_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "max_ptr": "*fp32",
    "sum_ptr": "*fp32",
    "block_tables_ptr": "*i32",
    "plan_ptr": "*i32",
    "table_ptr": "*i32",
    "positions_ptr": "*i64",
    "cos_sin_ptr": "*fp32",
    "merged_lse_ptr": "*fp32",
    "slot_mapping_ptr": "*i64",
    "ids_ptr": "*i32",
    "choice_bias_ptr": "*fp32",
    "weights_ptr": "*fp32",
    "counts_ptr": "*i32",
    "pairs_ptr": "*i32",
    "blocks_ptr": "*i32",
    "pool_ptr": "*fp32",
    "tables_ptr": "*i32",
    "rows_ptr": "*i32",
    "tiles_ptr": "*i32",
    "bounds_ptr": "*i32",
    "chunks_ptr": "*i32",
    "decay_ptr": "*fp32",
    "states_ptr": "*fp32",
    "words_ptr": "*i32",
    "source_ptr": "*i64",
    "target_ptr": "*i64",
}
FP8_POINTERS = {
    "x_ptr": "*fp8e4nv",
    "x_scales_ptr": "*fp32",
    "weight_ptr": "*fp8e4nv",
    "weight_scales_ptr": "*fp32",
}
MXFP4_POINTERS = {"x_ptr": "*i64", "weight_ptr": "*i16", "weight_scales_ptr": "*u8"}
FLOATS = ("scale_log2", "eps", "offset", "alpha", "limit", "scale", "logit_scale", "beta_scale")


def compile_kernel(
    kernel: Any,
    dtype: torch.dtype,
    constants: dict[str, Any],
    pointers: dict[str, str] | None = None,
    **options: int,
) -> None:
    """Compile for strides that are multiples of 16, and print the shared memory needed."""
    known = {**OTHER_POINTERS, **(pointers or {})}
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            values[(index,)] = constants[name]
            continue
        if name.endswith("_ptr"):
            signature[name] = (
                "*fp32" if name.startswith("lse_") else known.get(name, POINTERS[dtype])
            )
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
        if name.endswith("_ptr") or ("stride" in name and name != "block_tables_stride"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, values, attributes), target=HOPPER, options=options
    )
    sys.stdout.write(f"{kernel.__name__} {compiled.metadata.shared}\n")


def compile_attention(
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    window: int = 0,
    has_sinks: bool = False,
) -> None:
    heads = Heads(num_heads, num_kv_heads, head_dim, dtype, torch.device("cpu"))
    tiles = {"HEAD_DIM": head_dim, "DIM_TILE": max(16, triton.next_power_of_2(head_dim))}
    sinks = {} if has_sinks else {"sinks_ptr": None}
    for tiling in (narrow_tiling(heads), wide_tiling(heads)):
        plan = {
            "INTS_PER_PROGRAM": INTS_PER_PROGRAM,
            "INTS_PER_TILE": INTS_PER_TILE,
            "GROUP": heads.group,
            "ROW_TILE": tiling.row_tile,
            "IS_DEPENDENT": True,
        }
        is_narrow = tiling.num_queries == 1
        compile_kernel(
            paged_attention._attention_kernel,
            dtype,
            tiles
            | plan
            | sinks
            | {
                "BLOCK_SIZE": 16,
                "KV_TILE": tiling.kv_tile,
                "WINDOW": window,
                "SPLITS": tiling.num_splits,
                "HAS_ONE_LOOP": is_narrow or window > 0,
            },
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
        rows = 1 if is_narrow else 4
        compile_kernel(
            paged_attention._merge_kernel,
            dtype,
            tiles | plan | {"PARTIALS": 32 // rows, "ROWS": rows},
        )
    compile_kernel(
        dense_kernels._merge_parts_kernel,
        dtype,
        tiles | sinks | {"NUM_HEADS": num_heads, "NUM_PARTS": 4, "ROWS": 8},
    )


def compile_products(dtype: torch.dtype, group: int, head_dim: int, value_dim: int) -> None:
    sizes = {
        "GROUP": group,
        "ROWS": prefill_products.ROWS,
        "KEYS": prefill_products.KEYS,
        "STEP": prefill_products.STEP,
    }
    compile_kernel(
        prefill_products._scores_kernel,
        dtype,
        sizes | {"HEAD_DIM": head_dim, "ROW_TILES": prefill_products.ROW_TILES},
        None,
        **prefill_products.SCORES_OPTIONS,
    )
    own = {"DIMS": prefill_products.DIMS, "KEY_TILES": prefill_products.KEY_TILES}
    compile_kernel(
        prefill_products._values_kernel,
        dtype,
        sizes | own | {"HEAD_DIM": value_dim},
        None,
        **prefill_products.VALUES_OPTIONS,
    )


def compile_latent_attention(dtype: torch.dtype, num_heads: int, latent: Latent) -> None:
    heads = Heads(num_heads, 1, latent.num_stored, dtype, torch.device("cpu"), latent)
    sizes = {"BLOCK_SIZE": 16, "RANK": latent.rank}
    for tiling in (narrow_tiling(heads), wide_tiling(heads)):
        tiles = {
            "INTS_PER_PROGRAM": INTS_PER_PROGRAM,
            "INTS_PER_TILE": INTS_PER_TILE,
            "GROUP": num_heads // tiling.num_splits,
            "ROW_TILE": tiling.row_tile,
            "RANK_TILE": triton.next_power_of_2(latent.rank),
            "ROPE_DIM": latent.rope_dim,
            "ROPE_TILE": triton.next_power_of_2(latent.rope_dim),
            "KV_TILE": tiling.kv_tile,
            "IS_DEPENDENT": True,
        }
        compile_kernel(
            latent_attention._latent_kernel,
            dtype,
            sizes | tiles,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
    rotation = {
        "NUM_HEADS": num_heads,
        "HEAD_TILE": latent_rotation.HEAD_TILE,
        "QUERY_DIM": latent.query_dim,
        "RANK_TILE": triton.next_power_of_2(latent.rank),
        "HALF_DIM": latent.rope_dim // 2,
        "HALF_TILE": triton.next_power_of_2(latent.rope_dim // 2),
        "READS_PAIRS": True,
        "WRITES_PAIRS": False,
    }
    compile_kernel(
        latent_rotation._rotate_and_store_latents_kernel, dtype, sizes | rotation, num_warps=4
    )
    stored = {"NUM_STORED": latent.num_stored, "TILE": 1024}
    compile_kernel(latent_attention._store_latents_kernel, dtype, sizes | stored)
    block = {"NUM_ELEMENTS": 64 * latent.num_stored, "TILE": 16_384, "v_cache_ptr": None}
    compile_kernel(dense_kernels._gather_kernel, dtype, block, num_warps=8)


def compile_all(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    compile_attention(dtype, num_heads, num_kv_heads, head_dim)
    compile_kernel(
        dense_kernels._gather_kernel, dtype, {"NUM_ELEMENTS": 16 * 8 * 128, "TILE": 4096}
    )
    compile_kernel(
        store_kv._store_kv_kernel,
        dtype,
        {"BLOCK_SIZE": 16, "NUM_ELEMENTS": 1000, "HEAD_DIM": head_dim, "TILE": 1024},
    )
    compile_kernel(
        fused._rms_norm_kernel, dtype, {"HIDDEN_SIZE": 16_000, "TILE": 16_384}, num_warps=16
    )
    compile_kernel(
        fused._multiply_row_kernel,
        dtype,
        {"HAS_RESIDUAL": True, "NUM_INPUTS": 4096, "OUTPUT_TILE": 8, "INPUT_TILE": 512},
    )
    for gate in ("silu", "gelu_tanh"):
        compile_kernel(
            fused._gate_mul_kernel, dtype, {"GATE": gate, "NUM_COLUMNS": 1000, "TILE": 1024}
        )
    compile_rotation(dtype, num_heads, num_kv_heads, head_dim)


def compile_rotation(
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    is_gemma: bool = False,
    is_hybrid: bool = False,
) -> None:
    compile_kernel(
        fused._rotate_and_store_kernel,
        dtype,
        {
            "BLOCK_SIZE": 16,
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HAS_VALUES": not is_gemma,
            "HAS_GATES": is_hybrid,
            "HALF_DIM": head_dim // 2,
            "NUM_ANGLES": head_dim // (8 if is_gemma or is_hybrid else 2),
            "IS_PARTIAL": is_hybrid,
            "HAS_NORM": True,
            "HAS_VALUE_NORM": is_gemma,
            "IS_ROUNDED_FIRST": not is_gemma,
            "HEAD_TILE": 8,
            "HALF_TILE": triton.next_power_of_2(head_dim // 2),
        },
        num_warps=4,
    )


def compile_gated_heads(dtype: torch.dtype, num_heads: int, head_dim: int) -> None:
    compile_kernel(
        fused._gate_heads_kernel,
        dtype,
        {"NUM_HEADS": num_heads, "HEAD_DIM": head_dim, "HEAD_TILE": 8, "DIM_TILE": head_dim},
        num_warps=4,
    )


def compile_add_and_norm(hidden_size: int, *, has_others: bool) -> None:
    """Compile the sum and the norms between the halves of a layer, and behind both."""
    others = {} if has_others else {"others_ptr": None, "own_norms_ptr": None, "scalar_ptr": None}
    tile = triton.next_power_of_2(hidden_size)
    compile_kernel(
        fused._add_and_norm_kernel,
        torch.bfloat16,
        others
        | {
            "IS_ROUNDED_FIRST": False,
            "NUM_NORMS": 1 if has_others else 3,
            "HIDDEN_SIZE": hidden_size,
            "TILE": tile,
        },
        num_warps=min(16, tile // 512),
    )


def compile_experts(
    dtype: torch.dtype,
    tiling: Tiling,
    num_inner: int,
    hidden_size: int,
    gate: GateKind,
    *,
    is_transposed: bool = False,
    is_sorted: bool = True,
    weights: Format = "plain",
) -> None:
    """Compile both grouped products, with biases if the gate is clamped."""
    stride = {"output_stride" if is_transposed else "input_stride": 1}
    bias = {} if gate == "clamped" else {"bias_ptr": None}
    scales = {} if weights == "fp8" else {"x_scales_ptr": None}
    scales |= {"weight_scales_ptr": None} if weights == "plain" else {}
    pointers = {"plain": {}, "fp8": FP8_POINTERS, "mxfp4": MXFP4_POINTERS}[weights]
    for kind, tile, outputs, inputs in (
        (gate, tiling.gate_up, 2 * num_inner, hidden_size),
        ("none", tiling.down, hidden_size, num_inner),
    ):
        compile_kernel(
            expert_products._grouped_kernel,
            dtype,
            stride
            | bias
            | scales
            | ({} if is_sorted else {"pairs_ptr": None})
            | ({} if kind == "none" else {"routing_ptr": None})
            | {
                "FORMAT": weights,
                "HAS_PTX": weights == "mxfp4",
                "GATE": kind,
                "IS_INTERLEAVED": gate == "clamped",
                "PAIRS_PER_ROW": 1 if kind == "none" else 8,
                "NUM_OUTPUTS": outputs,
                "NUM_INPUTS": inputs,
                "IS_EVEN": outputs % tile.num_outputs == 0 and inputs % tile.num_inputs == 0,
                "GROUP": 8,
                "NUM_ROWS": tiling.num_rows,
                "OUTPUT_TILE": tile.num_outputs,
                "INPUT_TILE": tile.num_inputs,
                "IS_WIDE": expert_products.is_wide(tiling.num_rows, outputs, tile.num_outputs),
            },
            pointers,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def compile_fp8(num_outputs: int, num_inputs: int) -> None:
    """Compile what `layers.linear` launches for weights in FP8."""
    dtype = torch.bfloat16
    for num_rows in (1, 32, 64, 300):
        rows, outputs, splits, num_warps, num_stages = choose_tiling(
            num_rows, num_outputs, num_inputs
        )
        compile_kernel(
            fp8_products._multiply_kernel,
            dtype,
            ({} if splits == 1 else {"bias_ptr": None})
            | {
                "HAS_RESIDUAL": splits == 1,
                "NUM_OUTPUTS": num_outputs,
                "NUM_INPUTS": num_inputs,
                "NUM_SPLITS": splits,
                "ROW_TILE": rows,
                "OUTPUT_TILE": outputs,
            },
            FP8_POINTERS | ({} if splits == 1 else {"out_ptr": "*fp32"}),
            num_warps=num_warps,
            num_stages=num_stages,
        )
    for rows in (1, fp8_products.QUANTISE_ROWS):
        compile_kernel(
            fp8_products._quantise_rows_kernel,
            dtype,
            {"CAN_ROUND": True, "NUM_COLUMNS": num_inputs, "ROWS": rows},
            {"values_ptr": "*fp8e4nv", "scales_ptr": "*fp32"},
            num_warps=1 if rows == 1 else 4,
        )
    sums = {"HAS_RESIDUAL": True, "NUM_OUTPUTS": num_outputs, "NUM_SPLITS": 7}
    compile_kernel(
        fp8_products._add_splits_kernel,
        dtype,
        sums | {"TILE": fp8_products.SUM_TILE},
        {"parts_ptr": "*fp32"},
        num_warps=4,
    )


def compile_routing(hidden_size: int, *, is_short: bool) -> None:
    """Compile what stands around the products; one kernel sorts few pairs, and two sort many."""
    dtype = torch.bfloat16
    compile_kernel(
        expert_products._sum_kernel,
        dtype,
        (
            {"IS_ROUNDED_FIRST": False}
            if is_short
            else {"IS_ROUNDED_FIRST": True, "norm_ptr": None, "normed_ptr": None}
            | {"shared_ptr": None, "gate_ptr": None}
        )
        | {"TOP_K": 8, "NUM_COLUMNS": hidden_size, "TILE": 4096},
    )
    compile_kernel(
        routing._top_k_kernel,
        dtype,
        ({"choice_bias_ptr": None} if is_short else {"scales_ptr": None})
        | {
            "IS_SIGMOID": not is_short,
            "NUM_EXPERTS": 100,
            "TOP_K": 6,
            "IS_NORMALISED": is_short,
            "EXPERT_TILE": 128,
            "RANK_TILE": 8,
        },
        num_warps=1,
    )
    tiles = {"CHUNK": routing.CHUNK, "EXPERT_TILE": 256}
    if is_short:
        few = {"NUM_ROWS": 16, "TILE": routing.FEW_TILE}
        compile_kernel(routing._sort_few_kernel, dtype, tiles | few)
        return
    compile_kernel(routing._count_kernel, dtype, tiles)
    many = {"NUM_ROWS": 16, "PAIR_TILE": 32, "CHUNK_TILE": 16}
    compile_kernel(routing._sort_kernel, dtype, tiles | many, num_warps=8)


def compile_states(dtype: torch.dtype, shape: StateShape, *, has_bias: bool) -> None:
    """Compile the kernels of a recurrent layer, for single tokens and for more."""
    paged = {"PIECES_PER_PAGE": 7}
    for token_tile, num_ends in ((1, 1), (state_plan.CONV_TILE, 3)):
        ends = {"NUM_FIELDS": state_plan.NUM_FIELDS, "NUM_ENDS": num_ends}
        compile_kernel(
            short_conv._short_conv_kernel,
            dtype,
            paged
            | ends
            | ({} if has_bias else {"bias_ptr": None})
            | ({"tiles_ptr": None} if token_tile == 1 else {})
            | {
                "NUM_CHANNELS": shape.num_channels,
                "CONV_WIDTH": shape.conv_width,
                "PIECE_ELEMENTS": shape.piece_elements,
                "TOKEN_TILE": token_tile,
                "CHANNEL_TILE": short_conv.CHANNEL_TILE,
                "STATE_TILE": triton.next_power_of_2(shape.conv_width - 1),
            },
            num_warps=4,
        )
    sizes = {
        "NUM_HEADS": shape.num_heads,
        "NUM_KEY_HEADS": shape.num_key_heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "KEY_TILE": triton.next_power_of_2(shape.key_dim),
        "VALUE_TILE": delta_rule.NUM_COLUMNS,
    }
    rows = paged | {"NUM_FIELDS": state_plan.NUM_FIELDS}
    compile_kernel(delta_rule._delta_rule_kernel, dtype, rows | sizes, num_warps=1)
    dims = {name: sizes[name] for name in ("NUM_HEADS", "NUM_KEY_HEADS", "KEY_DIM", "VALUE_DIM")}
    dims |= {"DIM_TILE": triton.next_power_of_2(max(shape.key_dim, shape.value_dim))}
    split = delta_inputs._split_kernel
    compile_kernel(split, dtype, dims | {"CHUNK": state_plan.CHUNK}, num_warps=8)
    moved = paged | {"PIECE_ELEMENTS": shape.piece_elements, "TILE": delta_inputs.PIECE_TILE}
    for is_store in (True, False):
        compile_kernel(
            delta_inputs._move_states_kernel, dtype, moved | {"IS_STORE": is_store}, num_warps=4
        )


def compile_first() -> None:
    """Compile each kernel with each of its branches, tilings and kinds of gate."""
    compile_all(torch.bfloat16, 28, 4, 128)
    compile_all(torch.float32, 4, 4, 48)
    compile_all(torch.bfloat16, 16, 2, 512)
    compile_products(torch.bfloat16, 8, 512, 512)
    compile_products(torch.bfloat16, 20, 576, 512)
    compile_attention(torch.bfloat16, 64, 8, 64, window=128, has_sinks=True)
    compile_latent_attention(torch.bfloat16, 20, Latent(512, 64, 192, 256))
    compile_latent_attention(torch.float32, 16, Latent(512, 64, 128, 128))
    compile_experts(torch.bfloat16, NARROW, 768, 2048, "silu")
    compile_experts(torch.bfloat16, MIDDLE, 704, 2816, "gelu_tanh")
    compile_experts(torch.bfloat16, WIDE, 768, 2048, "silu")
    compile_experts(torch.bfloat16, LARGE, 2880, 2880, "clamped", is_transposed=True)
    compile_experts(torch.float32, EXACT, 768, 2048, "silu")
    compile_experts(torch.bfloat16, NARROW, 768, 2048, "silu", is_sorted=False)
    for tiling in FP8_TILINGS:
        compile_experts(torch.bfloat16, tiling, 512, 2048, "silu", weights="fp8")
    for tiling in MXFP4_TILINGS:
        compile_experts(torch.bfloat16, tiling, 2880, 2880, "clamped", weights="mxfp4")
    compile_fp8(5120, 17408)
    compile_rotation(torch.bfloat16, 32, 4, 512, is_gemma=True)
    compile_rotation(torch.bfloat16, 8, 0, 256, is_gemma=True)
    compile_rotation(torch.bfloat16, 24, 4, 256, is_hybrid=True)
    compile_gated_heads(torch.bfloat16, 48, 128)
    compile_add_and_norm(5376, has_others=False)
    compile_add_and_norm(2816, has_others=True)
    compile_routing(2048, is_short=True)
    compile_routing(2880, is_short=False)
    compile_states(torch.bfloat16, StateShape(48, 16, 128, 128, 4), has_bias=False)
    compile_states(torch.float32, StateShape(3, 1, 24, 40, 5), has_bias=True)
    compile_kernel(page_copy._copy_pages_kernel, torch.bfloat16, {"TILE": page_copy.TILE})


def compile_others() -> None:
    """Compile the same kernels for further shapes."""
    compile_attention(torch.bfloat16, 16, 8, 256, window=1024)
    compile_attention(torch.float16, 14, 2, 128, has_sinks=True)
    compile_products(torch.float16, 128, 320, 256)
    compile_latent_attention(torch.float16, 128, Latent(512, 64, 128, 128))
    compile_latent_attention(torch.bfloat16, 32, Latent(256, 64, 64, 128))
    for tiling in (MIDDLE, LARGE):
        compile_experts(torch.bfloat16, tiling, 768, 2048, "silu")
    for tiling in (NARROW, WIDE, LARGE):
        compile_experts(torch.bfloat16, tiling, 704, 2816, "gelu_tanh")
    for tiling in (NARROW, MIDDLE, WIDE):
        compile_experts(torch.bfloat16, tiling, 2880, 2880, "clamped", is_transposed=True)


if __name__ == "__main__":
    {"first": compile_first, "others": compile_others}[sys.argv[1]]()
