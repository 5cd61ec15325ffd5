"""Compiles the kernels for an H200 without one: what the interpreter accepts may still not compile.

Run by test_compilation.py in a process of its own, as Triton interprets in the tests' process.
Prints one line a kernel: its name and the bytes of shared memory it needs.
"""

# mypy: disable-error-code="no-untyped-call, attr-defined"
# (Triton's compiler has no types)

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tieredkv.kernels import attention_tiles, decode_attention, fused, prefill_attention, store_kv

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
OTHER_POINTERS = {
    "partial_out_ptr": "*fp32",
    "partial_lse_ptr": "*fp32",
    "block_tables_ptr": "*i32",
    "context_lens_ptr": "*i32",
    "query_start_lens_ptr": "*i32",
    "slot_mapping_ptr": "*i64",
    "positions_ptr": "*i64",
    "cos_sin_ptr": "*fp32",
}


def compile_kernel(
    kernel: Any, dtype: torch.dtype, constants: dict[str, Any], **options: int
) -> None:
    """Compile as at a launch with strides that are multiples of 16, and print what it needs."""
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            values[(index,)] = constants[name]
        elif name.endswith("_ptr"):
            signature[name] = OTHER_POINTERS.get(name, POINTERS[dtype])
        else:
            signature[name] = "fp32" if name in ("scale_log2", "eps") else "i32"
        if name.endswith("_ptr") or ("stride" in name and name != "block_tables_stride"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, values, attributes), target=HOPPER, options=options
    )
    sys.stdout.write(f"{kernel.__name__} {compiled.metadata.shared}\n")


def compile_all(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    group = num_heads // num_kv_heads
    sizes = {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "DIM_TILE": triton.next_power_of_2(head_dim),
    }
    attention = sizes | {"BLOCK_SIZE": 16, "GROUP": group, "MIN_SPLIT": 128}
    decode = decode_attention.choose_tiling(group, head_dim, dtype)
    compile_kernel(
        decode_attention._decode_kernel,
        dtype,
        attention | {"GROUP_TILE": decode.row_tile, "KV_TILE": decode.kv_tile, "IS_SPLIT": True},
        num_warps=decode.num_warps,
        num_stages=decode.num_stages,
    )
    for num_rows in (16, 64, 4096):
        prefill = prefill_attention.choose_tiling(num_rows, head_dim, dtype)
        compile_kernel(
            prefill_attention._prefill_kernel,
            dtype,
            attention
            | {
                "ROW_TILE": prefill.row_tile,
                "KV_TILE": prefill.kv_tile,
                "IS_SPLIT": num_rows <= 64,
            },
            num_warps=prefill.num_warps,
            num_stages=prefill.num_stages,
        )
    compile_kernel(attention_tiles._merge_splits_kernel, dtype, sizes | {"SPLIT_TILE": 16})
    compile_kernel(
        store_kv._store_kv_kernel,
        dtype,
        {"BLOCK_SIZE": 16, "NUM_ELEMENTS": 1000, "HEAD_DIM": head_dim, "TILE": 1024},
    )
    compile_kernel(
        fused._add_rms_norm_kernel,
        dtype,
        {"HIDDEN_SIZE": 16_000, "HAS_RESIDUAL": True, "TILE": 16_384},
        num_warps=16,
    )
    compile_kernel(fused._silu_mul_kernel, dtype, {"NUM_COLUMNS": 1000, "TILE": 1024})
    compile_kernel(
        fused._rotate_and_store_kernel,
        dtype,
        {
            "BLOCK_SIZE": 16,
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HALF_DIM": head_dim // 2,
            "HAS_NORM": True,
            "HEAD_TILE": 8,
            "HALF_TILE": triton.next_power_of_2(head_dim // 2),
        },
        num_warps=4,
    )


if __name__ == "__main__":
    compile_all(torch.bfloat16, 28, 4, 128)
    compile_all(torch.float32, 4, 4, 48)
