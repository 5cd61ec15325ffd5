"""`bench attention`: measure the attention kernels over scattered blocks of the paged cache.

The blocks of a case lie at random places of a pool that has the model's layers. Each call attends
the next layer, as in the engine. The pool is several times as large as the device's cache, so that
keys and values are read from memory. Decode batches and short chunks are replayed in a CUDA graph;
longer chunks are launched one by one. Each result is compared with the torch reference. With a
window, FLOPs and bytes are those of the positions that the queries see. With latent attention (MLA)
they are those of latents, and of the way of computing that takes fewer.
"""

# mypy: disable-error-code="no-untyped-call"
# (how much of torch.cuda is typed differs between torch versions)

import itertools
import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tieredkv.bench import raw
from tieredkv.engine.attention import AttentionLayer
from tieredkv.engine.loader import FoundModel, find_model
from tieredkv.errors import ConfigError
from tieredkv.kernels import latents, launch, reference
from tieredkv.kernels.checks import LayerCache
from tieredkv.kernels.partition import Heads, Latent, Span
from tieredkv.types import Progress, tracked

GPU_CASES = ["2048+0", "8192+0", "32768+0", "8192+24576", "8192+57344", "64+2048", "64+32768"]
GPU_CASES += ["64+131072", "1x1024", "1x32768", "64x4096", "64x128..16384"]
CPU_CASES = ["512+0", "64+512", "1x1024", "4x64..1024"]
GRAPH_MAX_TOKENS = 256
MAX_CHECKED = 16
MAX_ERROR = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
SAMPLE_S = 0.1


def run(
    progress: Progress,
    *,
    shape: str,
    heads: list[int] | None,
    window: int | None,
    has_sinks: bool,
    cases: list[str] | None,
    block_size: int,
    repeats: int,
) -> dict[str, Any]:
    """Measure the cases, by default those for the device; times are medians of the repeats.

    Raises:
        ConfigError, ModelError: a case, the shape or the heads are unknown.
    """
    names = cases or (GPU_CASES if torch.cuda.is_available() else CPU_CASES)
    model, rows = find_model(f"random:{shape}"), list[dict[str, Any]]()
    is_latent = model.attention[0].latent is not None and heads is None
    if is_latent and (window is not None or has_sinks):
        raise ConfigError(f"shape `{shape}` has latent attention; leave `--window` and `--sinks`")
    if heads is not None:
        if len(heads) != 3 or heads[0] % heads[1]:
            raise ConfigError("`--heads` needs query heads, KV heads and head_dim, as in 64,8,64")
        num_heads, num_kv_heads, head_dim = heads
        layer = AttentionLayer(num_heads, num_kv_heads, head_dim, source=0)
        model = replace(model, layers=[layer] * len(model.attention))
    limits = {"copy_GBps": raw.copy_GBps(), "gemm_TFLOPs": raw.gemm_TFLOPs(model.dtype)}
    for name, lens in tracked(progress, "measuring", [(name, _lens(name)) for name in names]):
        paged = _Paged(lens, model, block_size, window, has_sinks=has_sinks)
        rows.append(_measure(name, paged, limits, repeats))
        del paged  # frees the pool before the next
    bad = [r for r in rows if not r["relative_error"] <= MAX_ERROR[model.dtype]]  # NaN is bad too
    most = f"at most {MAX_ERROR[model.dtype]:.1e} is allowed"
    problems = [
        f"{r['case']}: the relative error is {r['relative_error']:.1e}; {most}" for r in bad
    ]
    report = {"shape": shape, "dtype": model.dtype, "block_size": block_size, "heads": heads}
    report |= {"window": window, "has_sinks": has_sinks}
    return {**report, "raw": limits, "rows": rows, "problems": problems}


def _lens(case: str) -> list[tuple[int, int]]:
    """Parse `8192+24576` (new + cached tokens), `64x4096` or `64x128..16384` (batch x context).

    Returns:
        (query_len, context_len) of each request.
    """
    if match := re.fullmatch(r"([1-9]\d{0,6})\+(\d{1,7})", case):
        return [(int(match[1]), int(match[1]) + int(match[2]))]
    if match := re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,6})(?:\.\.([1-9]\d{0,6}))?", case):
        lens = np.geomspace(int(match[2]), int(match[3] or match[2]), int(match[1])).tolist()
        return [(1, round(context)) for context in (*lens[1::2], *lens[::2])]
    examples = "8192+24576, 64x4096 or 64x128..16384"
    raise ConfigError(f"`{case}` is not a case; write one such as {examples}")


def _pairs(new: int, context: int, window: int) -> int:
    """Count the pairs of a new token and a token that it sees."""
    return int(np.minimum(np.arange(context - new, context) + 1, window).sum())


def _latent_flops(latent: Latent, num_heads: int, new: int, context: int) -> int:
    """Return the operations of latent attention, by the way that takes fewer."""
    is_expanded = latent.should_expand(new)
    made = context * latent.rank * (latent.key_dim + latent.value_dim) if is_expanded else 0
    products = latent.pair_products(is_expanded=is_expanded)
    return 2 * num_heads * (made + products * _pairs(new, context, context))


class _Paged:
    """Tensors of a case: the pool, the queries, and batches over several sets of blocks."""

    def __init__(
        self,
        lens: list[tuple[int, int]],
        model: FoundModel,
        block_size: int,
        window: int | None,
        *,
        has_sinks: bool,
    ) -> None:
        layers, layer = len(model.attention), model.attention[0]
        num_heads, kv_heads, head_dim = layer[:3]
        dtype, device = getattr(torch, model.dtype), torch.device(raw.device())
        self.query_lens, self.context_lens = zip(*lens, strict=True)
        self.is_decode, room, cache = max(self.query_lens) == 1, 256 << 20, 8 << 20
        if device.type == "cuda":
            torch.cuda.empty_cache()
            room = torch.cuda.mem_get_info()[0] * 2 // 5
            cache = torch.cuda.get_device_properties(0).L2_cache_size
        token_bytes = layer.stored.num_elements * dtype.itemsize
        counts = [-(-context // block_size) for context in self.context_lens]
        layer_bytes = sum(counts) * block_size * token_bytes
        layers = max(1, min(layers, room // layer_bytes))
        seen = [min(context, new + (window or context) - 1) for new, context in lens]
        self.kv_bytes = sum(seen) * token_bytes
        sets = min(-(-4 * cache // (layers * self.kv_bytes)), max(1, room // layers // layer_bytes))
        pairs = sum(_pairs(new, context, window or context) for new, context in lens)
        self.latent, self.flops, query_dim = layer.latent, layer.pair_flops * pairs, head_dim
        if latent := layer.latent:
            self.flops = sum(_latent_flops(latent, num_heads, *it) for it in lens)
            num_rows, query_dim = num_heads * (latent.key_dim + latent.value_dim), latent.query_dim
            self.matrix = torch.randn(num_rows, latent.rank, dtype=dtype, device=device)
            self.matrix *= latent.rank**-0.5
        self.scale = query_dim**-0.5
        self.q = torch.randn(sum(self.query_lens), num_heads, query_dim, dtype=dtype, device=device)
        num_parts = 1 if layer.stored.values_in_keys else 2
        pool_shape = (sets * sum(counts), layers, num_parts, block_size, kv_heads, head_dim)
        self.pool = torch.empty(pool_shape, dtype=dtype, device=device).normal_()
        ids = torch.randperm(len(self.pool), dtype=torch.int32, device=device).split(counts * sets)
        tables = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True).split(len(counts))
        starts = itertools.accumulate(self.query_lens, initial=0)
        spans = [Span(row, next(starts), *lens[row]) for row in range(len(lens))]
        self.heads = Heads(num_heads, kv_heads, head_dim, dtype, device, layer.latent)
        batches = [launch.make_batch(one, spans, self.heads, window) for one in tables]
        sinks = torch.randn(num_heads, dtype=dtype, device=device) if has_sinks else None
        self.window, self.sinks = window, sinks
        self.places = list(itertools.product(range(layers), batches))

    def cache(self, layer: int) -> LayerCache:
        """Return the keys and values of one layer of the pool."""
        return LayerCache(self.pool[:, layer, 0], self.pool[:, layer, -1])

    def attend(self, place: int) -> Tensor:
        """Call the attention kernels as the engine does."""
        layer, batch = self.places[place]
        if self.latent is not None:
            stored = self.cache(layer).k[:, :, 0]
            rest = self.matrix, batch, self.scale, self.heads
            plain, rotated = self.q.split([self.latent.key_dim, self.latent.rope_dim], dim=2)
            return latents.latent_attention(plain, rotated, stored, *rest)
        return launch.paged_attention(
            self.q, self.cache(layer), batch, self.scale, window=self.window, sinks=self.sinks
        )

    def relative_error(self) -> float:
        """Return the relative error of the last queries or requests against the reference."""
        layer, batch = self.places[0]
        count = min(len(self.q), MAX_CHECKED)
        spans = [
            Span(span.row, index, min(span.query_len, count), span.context_len)
            for index, span in enumerate(batch.spans[-count:])
        ]
        checked = batch._replace(spans=spans)
        q, cache = self.q[-count:], self.cache(layer)
        if latent := self.latent:
            weights = self.matrix.view(q.shape[1], -1, latent.rank)
            stored = cache.k[:, :, 0]
            expected = reference.latent_attention(q, stored, weights, checked, self.scale, latent)
        else:
            rest = checked, self.scale, self.window, self.sinks
            expected = reference.paged_attention(q, cache, *rest)
        expected = expected.float()
        return float((self.attend(0)[-count:].float() - expected).norm() / expected.norm())


def _measure(case: str, paged: _Paged, limits: dict[str, float], repeats: int) -> dict[str, Any]:
    error, ms = paged.relative_error(), _median_ms(paged, repeats)
    gemm_ms = paged.flops / limits["gemm_TFLOPs"] / 1e9
    copy_ms = paged.kv_bytes / limits["copy_GBps"] / 1e6
    return {
        "kind": "decode" if paged.is_decode else "prefill",
        "case": case,
        "ms": ms,
        "TFLOPs": paged.flops / ms / 1e9,
        "GBps": paged.kv_bytes / ms / 1e6,
        "limited_by": "gemm" if gemm_ms > copy_ms else "copy",
        "limit_ms": max(gemm_ms, copy_ms),
        "ratio": max(gemm_ms, copy_ms) / ms,
        "relative_error": error,
    }


def _median_ms(paged: _Paged, repeats: int) -> float:
    """Return the median time of a call; consecutive calls use different parts of the pool."""
    once_s = raw.median_s(partial(paged.attend, 0), repeats=3)
    count = max(2, min(1000, int(SAMPLE_S / once_s)))

    def attend_all() -> None:
        for index in range(count):
            paged.attend(index % len(paged.places))

    replay = attend_all
    if torch.cuda.is_available() and len(paged.q) <= GRAPH_MAX_TOKENS:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend_all()
        replay = graph.replay
    return raw.median_s(replay, repeats=repeats) / count * 1e3
