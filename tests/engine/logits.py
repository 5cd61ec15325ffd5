"""All logits of a prompt, computed by the paged engine and by transformers' own code."""

import random
from typing import Any

import torch
from torch import Tensor

from tests.engine.harness import BLOCK_SIZE, limits_of
from tieredkv.engine.loader import LoadedModel
from tieredkv.engine.runner import ModelRunner, make_kv_pool
from tieredkv.engine.step_buffers import BatchRow


def run_paged(loaded: LoadedModel, ids: list[int]) -> Tensor:
    """Compute all logits in chunks and single tokens over scattered blocks of a poisoned pool."""
    spec, num_blocks = loaded.kv_spec(BLOCK_SIZE), -(-len(ids) // BLOCK_SIZE)
    pool = make_kv_pool(spec, num_blocks + 2, loaded.device).fill_(float("nan"))
    table = random.Random(1).sample(range(num_blocks + 2), num_blocks)
    runner, parts, start = ModelRunner(loaded, pool, limits_of(loaded)), [], 0
    for chunk in (50, 1, 1, len(ids) - 52):
        row = BatchRow(ids[start : start + chunk], start, table, all_logits=True)
        parts.append(runner.execute([row]).logits)
        start += chunk
    return torch.cat(parts)


@torch.inference_mode()
def run_transformers(model: Any, ids: list[int]) -> Tensor:
    """Compute all logits at once with a model of transformers and its eager attention."""
    model.set_attn_implementation("eager")
    logits: Tensor = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0]
    return logits.float()
