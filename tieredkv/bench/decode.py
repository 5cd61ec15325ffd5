"""`bench decode`: measure the time between tokens, and throughput.

The raw limit of a step is the time to copy the bytes that it must read, weights and KV, at the
copy bandwidth of the same run; recurrent states are read and written. The raw limit of a prompt is
its FLOPs over the rate of a large matrix product. In a mixture of experts, a step is assumed to
read the expected number of experts if each token chooses at random; for one token this is exact.
Tokens that prefer the same experts read fewer, so a step of several requests can be faster than its
limit. Times are taken when `EngineCore.step` returns tokens. A workload's row is its median run by
wall-clock time.
"""

import contextlib
import random
import re
import time
from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tieredkv.bench import raw
from tieredkv.config import Settings
from tieredkv.engine.attention import AttentionLayer
from tieredkv.engine.core import EngineCore
from tieredkv.engine.engine_messages import EngineRequest
from tieredkv.engine.loader import find_model
from tieredkv.engine.parts import vram_for
from tieredkv.engine.quantized_modules import quantized_parameters
from tieredkv.engine.sampling_params import SamplingParams
from tieredkv.errors import ConfigError, TieredKVError
from tieredkv.types import DTYPE_BYTES, Progress, tracked

MIN_HOST_BLOCKS = 64

Row = dict[str, Any]


class Workload(NamedTuple):
    """Requests that the engine gets at once, each with a different prompt.

    Attributes:
        requests: number of requests.
        given: tokens of each prompt.
        made: tokens of each answer.
    """

    requests: int
    given: int
    made: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests when they have ended."""
        return self.requests * (self.given + self.made)


class Weights(NamedTuple):
    """Sizes of weights that a forward pass uses; embeddings are looked up and do not count.

    Attributes:
        shared: weights that every token uses, without the output layer.
        head: weights of the output layer.
        expert: weights of one expert, summed over the layers with experts; 0 if there are none.
        num_experts: experts of a layer.
        experts_per_token: experts that a token uses in each such layer.
    """

    shared: int
    head: int
    expert: int
    num_experts: int
    experts_per_token: int

    @classmethod
    def of(cls, model: Any, size: Callable[[Tensor], int]) -> "Weights":
        """Add up the sizes of a transformers model's weights, on any device.

        Args:
            model: the model.
            size: of a parameter: its bytes, or how many weights it has.
        """
        ends = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
        size_of_ends = sum({id(weight): size(weight) for weight in ends}.values())
        size_of_body = sum(map(size, model.parameters())) - size_of_ends
        # transformers merges a matrix of all experts of a layer: [num_experts, rows, columns].
        named = model.named_parameters()
        merged = [it for name, it in named if ".experts." in name and it.ndim == 3]
        num_experts = len(merged[0]) if merged else 0
        names = ("num_experts_per_tok", "moe_topk", "top_k_experts")
        told = (getattr(model.config, name, None) for name in names)
        return cls(
            shared=size_of_body - sum(map(size, merged)),
            head=size(ends[1]),
            expert=sum(map(size, merged)) // max(1, num_experts),
            num_experts=num_experts,
            experts_per_token=next(filter(None, told), num_experts),
        )

    @property
    def per_token(self) -> int:
        """Weights that one token is multiplied with, without the output layer."""
        return self.shared + self.experts_per_token * self.expert

    def read_by(self, num_tokens: int) -> float:
        """Return the size of the weights that a step of some tokens is expected to read."""
        share = self.experts_per_token / max(1, self.num_experts)
        num_used = self.num_experts * (1 - (1 - share) ** num_tokens)
        return self.shared + self.head + num_used * self.expert


def numbers_of(model: Any) -> dict[int, int]:
    """Return how many weights each parameter has, by its id; scales of quantized ones are none."""
    numbers = {id(weight): weight.numel() for weight in model.parameters()}
    for values, scales in quantized_parameters(model):
        numbers[id(scales)] = 0
        if values.dtype == torch.uint8:  # two in a byte
            numbers[id(values)] *= 2
    return numbers


def parse_workload(text: str) -> Workload:
    """Read a workload such as `128x1024+256`: requests x prompt tokens + output tokens."""
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,6})\+([1-9]\d{0,5})", text)
    if match is None or match[3] == "1":
        way_out = "write one such as 128x1024+256, with at least 2 output tokens"
        raise ConfigError(f"`{text}` is not a workload; {way_out}")
    return Workload(*map(int, match.groups()))


def run(
    progress: Progress,
    *,
    settings: Row,
    contexts: list[int] | None,
    tokens: int,
    workloads: list[str] | None,
    repeats: int,
) -> Row:
    """Measure the ITL of one request at each context, and the throughput of workloads."""
    if not (contexts or workloads):
        contexts, workloads = [1024, 4096], ["16x512+64"]
    several = [Workload(1, context, tokens + 1) for context in contexts or ()]
    several += map(parse_workload, workloads or ())
    report = begin(settings)
    largest = max(several, key=attrgetter("num_tokens"))
    room = largest.num_tokens * 3 // 2, largest.requests
    with contextlib.closing(Bench(settings, report, progress, *room)) as bench:
        for workload in tracked(progress, "serving", several):
            bench.serve("", Workload(min(4, workload.requests), workload.given, 4))  # warms up
            part, times = ("throughput", repeats) if workload.requests > 1 else ("itl", 1)
            bench.add_median([bench.serve(part, workload) for _ in range(times)])
    return report


def begin(settings: Row) -> Row:
    """Start a report: the model and the raw limits measured in this run, without rows."""
    found = find_model(settings["model"], dtype=settings.get("dtype", "auto"))
    limits = {"copy_GBps": raw.copy_GBps(), "gemm_TFLOPs": raw.gemm_TFLOPs(found.dtype)}
    return {"model": found.name, "dtype": found.dtype, "raw": limits, "rows": [], "problems": []}


def _num_pairs(layer: AttentionLayer, num_tokens: int) -> int:
    """Return how many pairs of a token and one that it attends to a prompt has."""
    seen = layer.num_seen(num_tokens)
    return seen * (seen + 1) // 2 + (num_tokens - seen) * seen


class Bench:
    """Runs workloads on one engine, records when each token comes, and fills the report."""

    def __init__(
        self,
        settings: Row,
        report: Row,
        progress: Progress,
        device_tokens: int,
        num_requests: int = 1,
    ) -> None:
        """Start an engine with room for `device_tokens` in VRAM unless the settings give a size."""
        found = find_model(settings["model"], dtype=settings.get("dtype", "auto"))
        told = Settings(**{"restore": "load", **settings})
        spec = found.kv_spec(told.block_size)
        longest_step = told.resolve_max_num_alone_tokens(found.device.type)
        vram = vram_for(spec, device_tokens, longest_step, num_requests)
        sizes = {"device_size": vram, "host_size": MIN_HOST_BLOCKS * spec.block_bytes}
        told = Settings(**{"restore": "load", **sizes, **settings})
        self.core = EngineCore(told, progress=progress)
        self.close, self.report = self.core.close, report
        self.times: dict[str, list[float]] = {}
        self.random = random.Random(0)
        model: Any = self.core.model.model
        numbers = numbers_of(model)
        self.weight_bytes = Weights.of(model, lambda weight: weight.nbytes)
        self.num_weights = Weights.of(model, lambda weight: numbers[id(weight)])
        states = self.core.kv_spec.states
        self.state_bytes = 4 * sum(it.layer_pieces * it.piece_elements for it in states)

    def serve(self, part: str, workload: Workload, retention: str | None = None) -> Row:
        """Serve a workload of new prompts with empty RAM tiers, and return a row of the report."""
        self.core.verbs.evict()
        requests, given, made = workload
        prompts = [self.prompt(given) for _ in range(requests)]
        start = time.perf_counter()
        ids = [self.submit(prompt, made, retention) for prompt in prompts]
        self.run()
        wall_s = max(self.times[name][-1] for name in ids) - start
        layers, limits = self.core.model.attention, self.report["raw"]
        flops = sum(it.pair_flops * _num_pairs(it, given) for it in layers)
        flops += 2 * self.num_weights.per_token * given
        read = self.weight_bytes.read_by(requests) + 2 * requests * self.state_bytes
        seen = sum(it.stored.num_elements * it.num_seen(given + made // 2) for it in layers)
        read += requests * seen * DTYPE_BYTES[self.core.kv_spec.dtype]
        gaps_ms = [1e3 * gap for name in ids for gap in np.diff(self.times[name])]
        gaps = raw.percentiles_ms("itl", gaps_ms, (50, 99))
        limit_ms = read / limits["copy_GBps"] / 1e6
        timed_ms = gaps["itl_p50_ms"]
        if requests > 1:
            timed_ms, limit_ms = wall_s * 1e3, (made - 1) * limit_ms
            limit_ms += requests * flops / limits["gemm_TFLOPs"] / 1e9
        return {
            "part": part,
            "requests": f"{requests}x{given}+{made}",
            "output_tok_s": requests * made / wall_s,
            "prompt_tok_s": requests * given / wall_s,
            **gaps,
            "wall_s": wall_s,
            "limit_ms": limit_ms,
            "ratio": limit_ms / timed_ms,
        }

    def add_median(self, several: list[Row]) -> Row:
        """Add the median run by wall-clock time to the report, with the times of all runs."""
        row: Row = dict(sorted(several, key=itemgetter("wall_s"))[len(several) // 2])
        row |= {f"{name}_all": [one[name] for one in several] for name in ("wall_s", "itl_p99_ms")}
        self.report["rows"].append(row)
        return row

    def prompt(self, count: int) -> list[int]:
        """Return `count` random tokens."""
        return self.random.choices(range(self.core.info.vocab_size), k=count)

    def submit(self, prompt: list[int], max_tokens: int, retention: str | None = None) -> str:
        """Queue a request whose answer has exactly `max_tokens` tokens."""
        name = f"bench-{len(self.times)}"
        self.times[name] = []
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, repetition_penalty=1.0, ignore_eos=True
        )
        asked: Row = {"request_id": name, "prompt_token_ids": prompt, "retention": retention}
        self.core.add_request(EngineRequest(**asked, params=params))
        return name

    def run(self) -> None:
        """Step until every request has ended and no block moves between tiers."""
        while self.core.has_work:
            self.step()

    def step(self) -> None:
        """Step once, record when tokens came, and wait briefly if work is left."""
        outputs, now = self.core.step(), time.perf_counter()
        for output in outputs:
            if output.finish_reason == "error":
                raise TieredKVError(f"a request failed: {output.error}")
            self.times[output.request_id] += [now] * len(output.token_ids)
        if self.core.has_work:
            self.core.wait(0.01)
