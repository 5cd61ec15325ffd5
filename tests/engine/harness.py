"""A runner to compute steps with, and transformers' own code to compare it with."""

import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tieredkv.engine.loader import LoadedModel
from tieredkv.engine.runner import ModelRunner, StepLimits, make_kv_pool
from tieredkv.engine.step_buffers import BatchRow

BLOCK_SIZE = 16
NUM_BLOCKS = 64


def limits_of(loaded: LoadedModel) -> StepLimits:
    """Return limits for steps of a model up to its longest context."""
    return StepLimits(64, 2048, loaded.max_model_len)


class Harness:
    """A runner over a pool of shuffled blocks, a few requests, and no scheduler."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        poison: bool = True,
        num_blocks: int = NUM_BLOCKS,
        max_num_batched_tokens: int = 2048,
    ) -> None:
        self.loaded = loaded
        spec = loaded.kv_spec(BLOCK_SIZE)
        self.pool = make_kv_pool(spec, num_blocks, loaded.device)
        if poison:  # a slot that was never written must never be read
            self.pool.fill_(float("nan"))
        limits = limits_of(loaded)._replace(max_num_batched_tokens=max_num_batched_tokens)
        self.runner = ModelRunner(loaded, self.pool, spec, limits)
        self._free = list(range(num_blocks))
        random.Random(5).shuffle(self._free)

    def table(self, num_tokens: int) -> "array[int]":
        return array("i", [self._free.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))])

    def prefill(self, ids: list[int], table: "array[int]", chunks: list[int]) -> Tensor:
        start = 0
        for chunk in chunks:
            row = BatchRow(ids[start : start + chunk], start, table)
            logits = self.runner.execute([row]).logits
            start += chunk
        assert start == len(ids)
        return logits

    def generate(self, ids: list[int], num_tokens: int, chunks: list[int]) -> list[int]:
        table = self.table(len(ids) + num_tokens)
        logits = self.prefill(ids, table, chunks)
        out = [int(logits.argmax())]
        while len(out) < num_tokens:
            row = BatchRow(out[-1:], len(ids) + len(out) - 1, table)
            out.append(int(self.runner.execute([row]).logits.argmax()))
        return out


def record(calls: list[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that notes the arguments of its calls."""

    def recorded(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return function(*args, **options)

    return recorded


def prompt(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, 256), k=num_tokens)


def reference_model(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval().to(device)


def reference_tokens(folder: Path, ids: list[int], num_tokens: int) -> list[int]:
    out = reference_model(folder).generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(ids) :]]
