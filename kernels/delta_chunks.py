"""Long rows of the gated delta rule in chunks of 64 tokens, by the kernels of fla-core.

Callers go through `tieredkv.kernels.states`, which checks the tensors; this module does not.
Reference: `tieredkv.kernels.state_reference.delta_rule`. Cuts of a row at multiples of 64 tokens
change no bit of the outputs and the state.
"""

import functools
import importlib
import importlib.metadata
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tieredkv.kernels import state_reference
from tieredkv.kernels.checks import triton_module
from tieredkv.kernels.state_layout import LayerState, StateRows, StateSpan
from tieredkv.types import StateShape

VERSION = "0.6"
"""The version of fla-core whose kernels are known to take and give states as these do."""


_TUNED_FOR = (9, 0)
"""The compute capability of the GPUs of `fla_configs`, H100 and H200."""


def why_missing() -> str | None:
    """Return why the kernels cannot be used, in one sentence; None if they can."""
    try:
        found = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found is not None and found.startswith(f"{VERSION}."):
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
    span: StateSpan,
    beta_scale: float,
    out: Tensor,
) -> None:
    """Compute one row of `states.delta_rule`, and write what is read of its states to `out`."""
    own = slice(span.first_token, span.first_token + span.num_tokens)
    around = triton_module("delta_inputs")
    q, k, v, decay, beta = around.split(
        mixed[own], a[own], b[own], a_log, dt_bias, state, beta_scale
    )
    # NOTE: the function behind the documented one, which adds half a millisecond on the host.
    _, read, _, states, *_ = _kernels().chunk_gated_delta_rule_fwd(
        q=q,
        k=k,
        v=v,
        g=decay,
        beta=beta,
        scale=state.shape.key_dim**-0.5,
        initial_state=around.load_states(state, span),
        output_final_state=True,
    )
    out[own] = read[0]
    around.store_states(state, span, states)


@functools.cache
def _kernels() -> Any:
    """Import fla-core, which is untyped, and slow to import.

    On the GPUs that they were measured on, its kernels take the tiles of `fla_configs`. Otherwise
    each process of a new machine tunes them for a minute or two, again for longer prompts.
    """
    kernels = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    if torch.cuda.get_device_capability() == _TUNED_FOR and "FLA_CONFIG_DIR" not in os.environ:
        tuning: Any = importlib.import_module("fla.ops.utils.cache")
        os.environ["FLA_CONFIG_DIR"] = str(Path(__file__).with_name("fla_configs"))
        tuning.FLA_CACHE_MODE = tuning.FlaCacheMode.FULL
    return kernels


class Errors(NamedTuple):
    """How far off the kernels are, as shares of the root mean square of what they give.

    Attributes:
        cut: of a row that is cut at 64 tokens, from the same row as a whole.
        reference: of the row from the torch reference; bfloat16 and TF32 round its products.
    """

    cut: float
    reference: float


def measure_errors(device: torch.device, dtype: torch.dtype) -> Errors:
    """Run the kernels on made-up tokens and compare what they give, outputs and states."""
    shape, num_tokens = StateShape(2, 1, 128, 128, 2), 192
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
    delta_rule(*given, StateSpan(0, 0, num_tokens), 1.0, whole)
    for first, end in ((0, 64), (64, num_tokens)):
        delta_rule(*given, StateSpan(1, first, end - first), 1.0, cut)
    rows = StateRows([StateSpan(0, 0, num_tokens)], tables, num_tokens)
    exact = state_reference.delta_rule(*given[:-1], given[-1]._replace(pool=expected), rows, 1.0)
    used = slice(0, shape.num_heads * shape.piece_elements)
    found = torch.cat([whole.flatten().float(), pool[0, used]])
    again = torch.cat([cut.flatten().float(), pool[1, used]])
    right = torch.cat([exact.flatten().float(), expected[0, used]])
    size = right.square().mean().sqrt()
    return Errors(*(float((it - found).abs().max() / size) for it in (again, right)))
