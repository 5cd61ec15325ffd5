"""Chains as an operator sees them, and which blocks an eviction means; it changes nothing."""

from collections import Counter

from tieredkv.storage.codec import Located
from tieredkv.storage.index import IndexTxn
from tieredkv.storage.results import ChainInfo, EvictFilter
from tieredkv.types import BlockRecord


def list_chains(txn: IndexTxn, now: float) -> list[ChainInfo]:
    """List every chain of blocks that have not expired, the last used first."""
    sound = (located.record for _, located in txn.blocks() if located is not None)
    stored = [record for record in sound if now < record.expires_at]
    parents = {record.parent_hash for record in stored}
    chains: dict[bytes, ChainInfo] = {}
    for record in sorted(stored, key=lambda record: record.position):
        chains[record.block_hash] = _extend(chains.get(record.parent_hash), record)
    leaves = [chain for block_hash, chain in chains.items() if block_hash not in parents]
    return sorted(leaves, key=lambda chain: (-chain.last_used_max, chain.id))


def select_blocks(
    txn: IndexTxn, which: EvictFilter, now: float
) -> tuple[list[Located], tuple[str, ...]]:
    """The blocks that a filter means, tails of chains first, and the ids that match nothing."""
    stored = {key: located for key, located in txn.blocks() if located is not None}
    unknown: tuple[str, ...] = ()
    chosen = set(stored)
    if which.ids:
        chosen, unknown = _only_in_chains(stored, which.ids)
    elif not (which.all or which.older_than_s is not None or which.namespace_prefix):
        return [], ()
    selected = [stored[block_hash] for block_hash in chosen]
    selected = [located for located in selected if _matches(located.record, which, now)]
    return sorted(selected, key=lambda each: -each.record.position), unknown


def _matches(record: BlockRecord, which: EvictFilter, now: float) -> bool:
    if which.older_than_s is not None and now - record.last_used < which.older_than_s:
        return False
    return record.namespace.hex().startswith((which.namespace_prefix or "").lower())


def _only_in_chains(
    stored: dict[bytes, Located], ids: tuple[str, ...]
) -> tuple[set[bytes], tuple[str, ...]]:
    """Blocks that no chain but the named ones uses: walk up until another chain joins."""
    num_children = Counter(located.record.parent_hash for located in stored.values())
    leaves = [block_hash for block_hash in stored if block_hash not in num_children]
    chosen: set[bytes] = set()
    unknown = []
    for chain_id in ids:
        named = [leaf for leaf in leaves if leaf.hex().startswith(chain_id.lower())]
        if not named or not chain_id:
            unknown.append(chain_id)
            continue
        for leaf in named:
            block_hash = leaf
            while block_hash in stored and not num_children.get(block_hash):
                if block_hash in chosen:
                    break
                chosen.add(block_hash)
                block_hash = stored[block_hash].record.parent_hash
                num_children[block_hash] = num_children.get(block_hash, 1) - 1
    return chosen, tuple(unknown)


def _extend(before: ChainInfo | None, record: BlockRecord) -> ChainInfo:
    return ChainInfo(
        id=record.block_hash.hex(),
        namespace=record.namespace.hex(),
        root=record.root.hex(),
        blocks=1 + (before.blocks if before else 0),
        last_position=record.position,
        bytes=record.size_bytes + (before.bytes if before else 0),
        retention=record.retention,
        computed_at_min=min(record.computed_at, before.computed_at_min if before else 1e300),
        computed_at_max=max(record.computed_at, before.computed_at_max if before else 0.0),
        expires_at_min=min(record.expires_at, before.expires_at_min if before else 1e300),
        last_used_max=max(record.last_used, before.last_used_max if before else 0.0),
        hits=record.hits + (before.hits if before else 0),
    )
