"""Drops blocks on disk that nothing can use: expired ones, other models', and orphans.

An orphan is a block whose parent is in no tier, or that comes behind one: a prompt would have to be
computed up to it first.
"""

from collections import Counter
from collections.abc import Generator

from tieredkv.errors import ConfigError
from tieredkv.storage.calls import Prune
from tieredkv.storage.codec import Located
from tieredkv.storage.index_txn import IndexTxn
from tieredkv.storage.inspection import GATHERED_BLOCKS, Chains, InRam, key_of, walking
from tieredkv.storage.known_models import KnownModels
from tieredkv.storage.lmdb_store import BlockStore
from tieredkv.storage.results import PruneResult


def pruning(
    store: BlockStore, call: Prune, chains: Chains, models: KnownModels, in_ram: InRam
) -> Generator[None, None, PruneResult]:
    """Drop and erase what nothing can use, in steps.

    Args:
        store: the store.
        call: says which model is in use, and whether blocks are only counted.
        chains: what is stored and has not expired.
        models: name the blocks.
        in_ram: blocks that VRAM and host memory have, which are in use.

    Raises:
        ConfigError: the model that is in use is not known.
    """
    if call.model and call.model not in models.names:
        known = ", ".join(f"`{name}`" for name in models.names) or "none"
        raise ConfigError(f"the store knows no model `{call.model}`; it knows {known}")
    is_orphan = yield from _finding_orphans(store, chains, in_ram)
    now, by_reason, freed_bytes = store.clock.now(), Counter[str](), 0

    def reason(located: Located) -> str | None:
        record = located.record
        if now >= record.expires_at:
            return "expired"
        if call.model:
            model = models.of(record.root, record.namespace)
            if model is None or model.name != call.model:
                return "other_model"
        place = chains.find(record.block_hash)
        return "orphan" if place is not None and is_orphan[place] else None

    for entries in walking(store, IndexTxn.blocks):
        doomed = list[bytes]()
        for block_hash, located in entries:
            if located is None or (why := reason(located)) is None:
                continue
            by_reason[why] += 1
            freed_bytes += located.extent_bytes
            doomed.append(block_hash)
        if not call.dry_run:
            store.delete(doomed, "operator")
        yield
    if not call.dry_run:
        store.key_use.drop_unused()
        yield from store.allocator.erasing()
    return PruneResult(by_reason.total(), freed_bytes, dict(by_reason))


def _finding_orphans(
    store: BlockStore, chains: Chains, in_ram: InRam
) -> Generator[None, None, bytearray]:
    """Find the places of orphans, in steps; what is in RAM is none, nor what follows it."""
    waiting, kept = list[int](), in_ram.device | in_ram.host
    for entries in walking(store, IndexTxn.links, GATHERED_BLOCKS):
        for block_hash, link in entries:
            if link is None or not link.position or (place := chains.find(block_hash)) is None:
                continue
            if chains.find(link.parent_hash) is None and key_of(link.parent_hash) not in kept:
                waiting.append(place)
        yield
    is_orphan, num_steps = bytearray(len(chains)), 0
    while waiting:
        place = waiting.pop()
        if not is_orphan[place] and chains.key(place) not in kept:
            is_orphan[place] = True
            waiting += chains.children(place)
        num_steps += 1
        if num_steps % GATHERED_BLOCKS == 0:
            yield
    return is_orphan
