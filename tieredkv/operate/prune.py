"""Drops blocks on disk that nothing can use: expired ones, other models', and orphans.

An orphan is a block whose parent is in no tier, or that comes behind one: a prompt would have to be
computed up to it first.
"""

from collections import Counter
from collections.abc import Generator, Mapping

import numpy as np

from tieredkv.errors import ConfigError
from tieredkv.operate.chains import Chains
from tieredkv.operate.inspection import reading_hashes
from tieredkv.operate.models import KnownModels
from tieredkv.operate.ram import RamBlocks
from tieredkv.operate.table import Blocks, BlockTable
from tieredkv.storage.index_txn import batches
from tieredkv.storage.lmdb_store import BlockStore
from tieredkv.storage.results import PruneResult


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


def dropping(
    store: BlockStore, doomed: Mapping[str, Blocks], *, dry_run: bool
) -> Generator[None, None, PruneResult]:
    """Drop and erase blocks for some reasons, in steps.

    Args:
        store: the store.
        doomed: blocks by reason.
        dry_run: whether they are only counted.
    """
    by_reason, freed_bytes, failed = Counter[str](), 0, None
    for why, blocks in doomed.items():
        for hashes in batches((yield from reading_hashes(store, blocks))):
            with store.index.reading() as txn:
                sound = [each for each in map(txn.sound, hashes) if each is not None]
            if why == "expired":  # others were stored again in the meantime
                sound = [each for each in sound if each.record.expires_at <= store.clock.now()]
            by_reason[why] += len(sound)
            freed_bytes += sum(located.extent_bytes for located in sound)
            if not dry_run:
                store.delete([located.record.block_hash for located in sound], "operator")
            yield
    if not dry_run:
        failed = yield from store.allocator.clearing()
    why = "" if failed is None else str(failed)
    return PruneResult(by_reason.total(), freed_bytes, dict(+by_reason), why)
