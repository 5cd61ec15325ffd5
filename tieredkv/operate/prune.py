"""`prune`: blocks on disk that nothing can use: expired ones, other models', and orphans.

An orphan is a block whose parent is in no tier, or that comes behind one: a prompt would have to be
computed up to it first.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tieredkv.errors import ConfigError
from tieredkv.operate.calls import Ls, Prune
from tieredkv.operate.chains import Chains
from tieredkv.operate.models import KnownModels, read_models
from tieredkv.operate.ram import RamBlocks
from tieredkv.operate.table import Blocks, BlockTable, scan, starts_in
from tieredkv.operate.worker import Worker, silent_engine


def prune(call: Prune, worker: Worker) -> dict[str, Any]:
    """Drop what nothing can use.

    Raises:
        ConfigError: the model that is in use is not known.
        StoreUnreachableError: the engine did not answer, and may have what orphans follow.
    """
    table, now = scan(worker)
    models, in_ram = KnownModels(read_models(worker.path)), RamBlocks.of(worker.ask_engine(Ls()))
    if not in_ram.is_told:
        raise silent_engine()
    by_reason, freed_bytes, keys_error = dict[str, int](), 0, ""
    for why, blocks in useless(table, call.model, models, in_ram, now).items():
        # Of expired blocks some may be stored again by now, and live.
        starts, is_expired = starts_in(blocks), why == "expired"
        done = worker.delete(starts, expired=is_expired, dry_run=call.dry_run)
        by_reason |= {why: done.num_blocks} if done.num_blocks else {}
        freed_bytes += done.freed_bytes
        keys_error = done.keys_error
    return {
        "pruned_blocks": sum(by_reason.values()),
        "freed_bytes": freed_bytes,
        "by_reason": by_reason,
        **({"keys_error": keys_error} if keys_error else {}),
    }


def useless(
    table: BlockTable, model: str, models: KnownModels, in_ram: RamBlocks, now: float
) -> Mapping[str, Blocks]:
    """Return the blocks that nothing can use, by the reason.

    Args:
        table: all blocks on disk.
        model: the one that is in use; "" if every model is.
        models: name the blocks.
        in_ram: blocks that VRAM and host memory have, which are in use.
        now: the time.

    Raises:
        ConfigError: the model that is in use is not known.
    """
    if model and model not in models.names:
        known = ", ".join(f"`{name}`" for name in models.names) or "none"
        raise ConfigError(f"the store knows no model `{model}`; it knows {known}")
    names = [it.name if it else "" for it in (models.of(*kind[:2]) for kind in table.kinds)]
    is_used = np.array([not model or name == model for name in names], bool)
    is_expired = table.blocks["expires_at"] <= now
    living = table.blocks[~is_expired]
    chains, in_use = Chains(living, table.kinds), is_used[living["kind"]]
    has_parent = chains.has_parent() | in_ram.holds(living["parent_key"])
    is_first = (living["position"] > 0) & ~has_parent
    is_orphan = chains.following(is_first, in_ram.holds(chains.keys))
    return {
        "expired": table.blocks[is_expired],
        "other_model": living[~in_use],
        "orphan": living[in_use & is_orphan],
    }
