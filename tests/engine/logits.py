"""All logits of a prompt, computed by the paged engine and by transformers' own code."""

import random
from typing import Any

import torch
from torch import Tensor

from tests.engine.harness import BLOCK_SIZE, limits_of
from tieredkv.engine.loader import LoadedModel
from tieredkv.engine.runner import ModelRunner, make_kv_pool
from tieredkv.engine.step_buffers import BatchRow
from tieredkv.types import KVSpec


def run_paged(loaded: LoadedModel, ids: list[int], spec: KVSpec | None = None) -> Tensor:
    """Compute all logits in chunks and single tokens over scattered blocks of a poisoned pool.

    Args:
        loaded: the model.
        ids: the tokens.
        spec: how keys and values lie in pages; None for the model's own. A page behind the window
            of its kind is poisoned after each step, and cut out of its table.
    """
    spec, num_blocks = spec or loaded.kv_spec(BLOCK_SIZE), -(-len(ids) // BLOCK_SIZE)
    _, *tails = spec.page_kinds
    num_table_pages = (1 + len(tails)) * num_blocks
    num_pages = num_table_pages + spec.state_pages + 2
    pool = make_kv_pool(spec, num_pages, loaded.device).fill_(float("nan"))
    pages = random.Random(1).sample(range(1, num_pages), num_pages - 2)
    tables = [pages[i * num_blocks :][:num_blocks] for i in range(1 + len(tails))]
    state = pages[num_table_pages:]
    copies = [(-1, page) for page in state]
    runner, parts, start = ModelRunner(loaded, pool, spec, limits_of(loaded)), [], 0
    for chunk in (50, 1, 1, len(ids) - 52):
        tokens = ids[start : start + chunk]
        row = BatchRow(
            tokens,
            start,
            tables[0],
            tail_tables=tables[1:],
            all_logits=True,
            state_pages=state,
            copies=() if start else copies,
        )
        parts.append(runner.execute([row]).logits)
        start += chunk
        for kind, table in zip(tails, tables[1:], strict=True):
            assert kind.window is not None
            num_behind = max(0, start + 1 - kind.window) // BLOCK_SIZE
            pool[table[:num_behind]] = float("nan")
            table[:num_behind] = [0] * num_behind  # a page that nobody has written
    return torch.cat(parts)


@torch.inference_mode()
def run_transformers(model: Any, ids: list[int]) -> Tensor:
    """Compute all logits at once with a model of transformers and its eager attention."""
    model.set_attn_implementation("eager")
    logits: Tensor = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0]
    return logits.float()
