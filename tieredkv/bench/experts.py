"""`bench experts`: measure the kernels of a model's mixture-of-experts layers.

The experts of two layers take turns, and each call routes its tokens to other experts, chosen at
random, so that weights are read from memory as in the engine. Short steps are replayed in a CUDA
graph; longer ones are launched one by one. Each result is compared with the torch reference. Bytes
are those of the weights of the experts that were chosen; what is read and written of tokens is
left out.
"""

# mypy: disable-error-code="no-untyped-call"
# (how much of torch.cuda is typed differs between torch versions)

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tieredkv.bench import raw
from tieredkv.bench.decode import Weights
from tieredkv.engine.experts import find_experts
from tieredkv.engine.loader import FoundModel, find_model
from tieredkv.errors import ConfigError
from tieredkv.kernels import experts, reference
from tieredkv.kernels.expert_layout import Experts, RoutingRule
from tieredkv.kernels.quantized import Weight
from tieredkv.types import Progress, tracked

GPU_TOKENS = [1, 2, 8, 32, 128, 512, 2048, 8192]
CPU_TOKENS = [1, 32]
GRAPH_MAX_TOKENS = 512
MAX_CHECKED = 16
MAX_ERROR = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
NUM_LAYERS = 2
NUM_ROUTES = 16
SAMPLE_S = 0.1


def run(
    progress: Progress, *, shape: str, tokens: list[int] | None, repeats: int
) -> dict[str, Any]:
    """Measure steps of so many tokens, by default some that suit the device.

    Raises:
        ConfigError, ModelError: the shape is unknown or has no experts that the kernels know.
    """
    counts = tokens or (GPU_TOKENS if torch.cuda.is_available() else CPU_TOKENS)
    found = find_model(f"random:{shape}")
    layers, num_chosen = _draw_layers(shape, found)
    limits = {"copy_GBps": raw.copy_GBps(), "gemm_TFLOPs": raw.gemm_TFLOPs(found.dtype)}
    rows = [
        _measure(num_tokens, layers, num_chosen, limits, repeats)
        for num_tokens in tracked(progress, "measuring", counts)
    ]
    most = MAX_ERROR[found.dtype]
    problems = [
        f"{row['tokens']} tokens: the relative error is {row['relative_error']:.1e}; at most "
        f"{most:.1e} is allowed"
        for row in rows
        if not row["relative_error"] <= most  # NaN is bad too
    ]
    report = {"shape": shape, "dtype": found.dtype, "experts": len(layers[0].down)}
    report |= {"experts_per_token": num_chosen}
    return {**report, "raw": limits, "rows": rows, "problems": problems}


def _draw_layers(shape: str, found: FoundModel) -> tuple[list[Experts], int]:
    """Draw the experts of some layers as the model lays them out; return how many a token uses."""
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(found.config, dtype=getattr(torch, found.dtype))
    modules = (module for module in model.modules() if hasattr(module, "has_gate"))
    empty = next(filter(None, map(find_experts, modules)), None)
    if empty is None:
        raise ConfigError(f"`--shape` = {shape} has no experts that the kernels know")

    def drawn(like: Weight | None) -> Any:
        assert like is None or isinstance(like, Tensor), like
        return None if like is None else torch.empty_like(like, device=raw.device()).normal_(0, 0.1)

    def drawn_layer() -> Experts:
        gate_up, down, gate_up_bias, down_bias = map(drawn, empty[:4])
        return Experts(gate_up, down, gate_up_bias, down_bias, empty.gate)

    return [drawn_layer() for _ in range(NUM_LAYERS)], Weights.of(
        model, Tensor.numel
    ).experts_per_token


def _measure(
    num_tokens: int,
    layers: Sequence[Experts],
    num_chosen: int,
    limits: dict[str, float],
    repeats: int,
) -> dict[str, Any]:
    gate_up, down = layers[0].gate_up, layers[0].down
    assert isinstance(gate_up, Tensor), gate_up
    assert isinstance(down, Tensor), down
    num_experts, expert_weights = len(down), gate_up[0].numel() + down[0].numel()
    x = torch.randn(num_tokens, gate_up.shape[2], dtype=down.dtype, device=down.device)
    logits = torch.randn(NUM_ROUTES, num_tokens, num_experts, device=down.device)
    routes = [experts.route(each, num_chosen, RoutingRule()) for each in logits]

    def compute(index: int) -> Tensor:
        own = layers[index % len(layers)]
        return experts.compute_experts(x, *routes[index % len(routes)], own)

    last_x, ids, weights = (part[-MAX_CHECKED:] for part in (x, *routes[0]))
    expected = reference.compute_experts(last_x, ids, weights, layers[0])
    error = (compute(0)[-MAX_CHECKED:].float() - expected).norm() / expected.norm()
    ms = _median_ms(compute, num_tokens, repeats)
    num_used = statistics.fmean(len(chosen.unique()) for chosen, _ in routes)
    num_bytes = num_used * expert_weights * down.element_size()
    flops = 2 * num_tokens * num_chosen * expert_weights
    copy_ms = num_bytes / limits["copy_GBps"] / 1e6
    gemm_ms = flops / limits["gemm_TFLOPs"] / 1e9
    return {
        "kind": "decode" if num_tokens <= GRAPH_MAX_TOKENS else "prefill",
        "tokens": num_tokens,
        "ms": ms,
        "TFLOPs": flops / ms / 1e9,
        "GBps": num_bytes / ms / 1e6,
        "experts_used": num_used,
        "limited_by": "gemm" if gemm_ms > copy_ms else "copy",
        "limit_ms": max(gemm_ms, copy_ms),
        "ratio": max(gemm_ms, copy_ms) / ms,
        "relative_error": float(error),
    }


def _median_ms(compute: Any, num_tokens: int, repeats: int) -> float:
    """Return the median time of a call; consecutive calls use other weights."""
    once_s = raw.median_s(partial(compute, 0), repeats=3)
    count = max(2, min(1000, int(SAMPLE_S / once_s)))

    def compute_all() -> None:
        for index in range(count):
            compute(index)

    replay = compute_all
    if torch.cuda.is_available() and num_tokens <= GRAPH_MAX_TOKENS:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            compute_all()
        replay = graph.replay
    return raw.median_s(replay, repeats=repeats) / count * 1e3
