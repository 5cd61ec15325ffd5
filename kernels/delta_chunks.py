"""Long rows of the gated delta rule in chunks of 64 tokens, by the kernels of fla-core.

Callers go through `tieredkv.kernels.states`, which checks the tensors; this module does not.
Reference: `tieredkv.kernels.state_reference.delta_rule`. Cuts of a row at multiples of 64 tokens
change no bit of the outputs and the state.

The kernels are launched with the tiles that were the fastest on an H200, and not through fla-core's
functions: those look for tiles when they first run, launch some kernels more, and read on the host
where rows end, so that no CUDA graph could hold them.
"""

import functools
import importlib
import importlib.metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tieredkv.kernels import state_plan, state_reference
from tieredkv.kernels.checks import triton_module
from tieredkv.kernels.state_layout import ChunkRows, LayerState, StateSpan
from tieredkv.kernels.state_plan import CHUNK
from tieredkv.types import StateShape

VERSION = "0.6.0"
"""The version of fla-core whose kernels are known. Their arguments are no part of its interface."""

_STATE_COLUMNS = 32
"""Of a state, which a program takes from chunk to chunk."""

_OUT_COLUMNS = 64
"""Of the outputs of a chunk, which a program computes."""


def why_missing() -> str | None:
    """Return why the kernels cannot be used, in one sentence; None if they can."""
    try:
        found = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found == VERSION:
        return None
    has = "it is not installed" if found is None else f"version {found} is installed"
    what = f"recurrent layers need fla-core {VERSION} on a GPU, and {has}"
    return f"{what}; install `tieredkv[linear]`"


def delta_rule(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: LayerState,
    rows: ChunkRows,
    beta_scale: float,
    out: Tensor,
) -> None:
    """Compute some rows of `states.delta_rule`, and write what is read of their states to `out`."""
    around, kernels, shape = triton_module("delta_inputs"), _kernels(), state.shape
    q, k, v, decay, beta = around.split(mixed, a, b, a_log, dt_bias, state, rows, beta_scale)
    states = around.load_states(state, rows)
    num_tokens, num_chunks, num_heads = len(mixed), len(rows.chunks), shape.num_heads
    key_dim, value_dim = shape.key_dim, shape.value_dim
    sizes: dict[str, Any] = {"T": num_tokens, "H": shape.num_key_heads, "HV": num_heads}
    sizes |= {"K": key_dim, "BT": CHUNK, "USE_G": True, "IS_VARLEN": True}
    places = rows.bounds, rows.chunks
    solved = k.new_zeros(num_tokens, num_heads, CHUNK)  # only triangles of it are written
    kernels.solve[num_chunks, num_heads](
        k, decay, beta, solved, *places, **sizes, BC=16, BK=64, num_warps=2, num_stages=3
    )
    sizes["V"] = value_dim
    w, u = k.new_empty(num_tokens, num_heads, key_dim), torch.empty_like(v)
    kernels.represent[num_chunks, num_heads](
        k, v, beta, w, u, solved, decay, *places, **sizes, BK=64, BV=64, num_warps=4, num_stages=3
    )
    begun, changes = k.new_empty(num_chunks, num_heads, key_dim, value_dim), torch.empty_like(u)
    sizes["STATE_V_FIRST"] = False
    num_programs = -(-value_dim // _STATE_COLUMNS) * rows.num_sequences * num_heads
    kernels.advance[(num_programs,)](
        k, u, w, changes, decay, None, begun, states, states, rows.bounds, rows.offsets, **sizes,
        BV=_STATE_COLUMNS, USE_GK=False, USE_INITIAL_STATE=True, STORE_FINAL_STATE=True,
        SAVE_NEW_VALUE=True, num_warps=4, num_stages=3,
    )  # fmt: skip
    kernels.read[-(-value_dim // _OUT_COLUMNS) * num_chunks, num_heads](
        q, k, changes, begun, decay, None, out, *places, key_dim**-0.5, **sizes, BK=64,
        BV=_OUT_COLUMNS, USE_G_GAMMA=False, num_warps=4, num_stages=3,
    )  # fmt: skip
    around.store_states(state, rows, states)


class _Kernels(NamedTuple):
    """Those of fla-core, in the order in which they run.

    Attributes:
        solve: inverts each chunk's triangular matrix of how its tokens change what others read.
        represent: makes of keys and values what the chunk as a whole does with a state.
        advance: takes the states of rows from chunk to chunk.
        read: reads each chunk's first state and its own tokens with its queries.
    """

    solve: Any
    represent: Any
    advance: Any
    read: Any


@functools.cache
def _kernels() -> _Kernels:
    """Import fla-core, which is untyped, and slow to import."""
    named = (
        ("gated_delta_rule.chunk_fwd", "chunk_gated_delta_rule_fwd_kkt_solve_kernel"),
        ("gated_delta_rule.wy_fast", "recompute_w_u_fwd_kernel"),
        ("common.chunk_delta_h", "chunk_gated_delta_rule_fwd_kernel_h_blockdim64"),
        ("common.chunk_o", "chunk_fwd_kernel_o"),
    )
    tuning: Any = importlib.import_module("triton.runtime.autotuner")
    found = []
    for module, name in named:
        kernel = getattr(importlib.import_module(f"fla.ops.{module}"), name)
        while isinstance(kernel, (tuning.Autotuner, tuning.Heuristics)):
            kernel = kernel.fn
        found.append(kernel)
    return _Kernels(*found)


class Errors(NamedTuple):
    """How far off the kernels are, as shares of the root mean square of what they give.

    Attributes:
        cut: of a row that is cut between two chunks, from the same row as a whole.
        reference: of the row from the torch reference; bfloat16 and TF32 round its products.
    """

    cut: float
    reference: float


def measure_errors(device: torch.device, dtype: torch.dtype) -> Errors:
    """Run the kernels on made-up tokens and compare what they give, outputs and states."""
    shape, num_tokens, half = StateShape(2, 1, 128, 128, 2), 640, 320
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    mixed = draw(num_tokens, shape.num_channels).to(dtype)
    a, b, rates = draw(num_tokens, 2), draw(num_tokens, 2), draw(2) - 4.0
    tables = torch.arange(2, dtype=torch.int32, device=device).view(2, 1)
    pool = draw(1, shape.layer_pieces * shape.piece_elements).repeat(2, 1)
    given = mixed, a, b, rates, torch.zeros_like(rates), LayerState(pool, tables, shape, 0)
    whole, cut = (mixed.new_empty(num_tokens, 2, shape.value_dim) for _ in range(2))
    expected = pool.clone()
    spans = StateSpan(0, 0, num_tokens), StateSpan(1, 0, half), StateSpan(1, half, half)
    rows, *parts = (state_plan.make_rows([span], device) for span in spans)
    for some, out in ((rows, whole), *((part, cut) for part in parts)):
        assert some.chunks is not None, "a row is too short for chunks"
        delta_rule(*given, some.chunks, 1.0, out)
    exact = state_reference.delta_rule(*given[:-1], given[-1]._replace(pool=expected), rows, 1.0)
    used = slice(0, shape.num_heads * shape.piece_elements)
    found = torch.cat([whole.flatten().float(), pool[0, used]])
    again = torch.cat([cut.flatten().float(), pool[1, used]])
    right = torch.cat([exact.flatten().float(), expected[0, used]])
    size = right.square().mean().sqrt()
    return Errors(*(float((it - found).abs().max() / size) for it in (again, right)))
