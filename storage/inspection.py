"""A store as its operator sees it: its chains, what an eviction means, and proof reading.

It reads the index and payloads; what it finds bad is dropped by who called it.
"""

from collections import Counter

from tieredkv.errors import CorruptBlockError, StorageError
from tieredkv.storage.allocator import SlotAllocator
from tieredkv.storage.codec import Extent, Located, expiry_key, extent_key, lru_key, padded_bytes
from tieredkv.storage.extents import SegmentFiles, aligned_buffer
from tieredkv.storage.index import IndexTxn, Totals
from tieredkv.storage.results import ChainInfo, EvictFilter
from tieredkv.types import BlockRecord

# --- chains -----------------------------------------------------------------------------------


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
    selected = [
        located
        for located in (stored[block_hash] for block_hash in chosen)
        if which.matches(located.record.namespace, located.record.last_used, now)
    ]
    return sorted(selected, key=lambda each: -each.record.position), unknown


def _only_in_chains(
    stored: dict[bytes, Located], ids: tuple[str, ...]
) -> tuple[set[bytes], tuple[str, ...]]:
    """Blocks that no chain but the named ones uses: walk up until another chain joins."""
    num_children = Counter(located.record.parent_hash for located in stored.values())
    leaves = [block_hash for block_hash in stored if block_hash not in num_children]
    chosen: set[bytes] = set()
    unknown = []
    for chain_id in ids:
        named = [leaf for leaf in leaves if chain_id and leaf.hex().startswith(chain_id.lower())]
        if not named:
            unknown.append(chain_id)
        for block_hash in set(named) - chosen:
            while block_hash in stored and not num_children[block_hash]:
                chosen.add(block_hash)
                block_hash = stored[block_hash].record.parent_hash
                num_children[block_hash] -= 1
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


# --- proof reading ----------------------------------------------------------------------------


def fault_of(files: SegmentFiles, located: Located) -> str | None:
    """Read header and payload of a slot; the reason why they are bad, or None."""
    try:
        files.check_header(located)
        files.read_block(located, aligned_buffer(padded_bytes(located.record.size_bytes)))
    except CorruptBlockError as error:
        return error.reason
    except StorageError:
        return "io_error"
    return None


def find_problems(txn: IndexTxn, slots: SlotAllocator) -> list[str]:
    """Compare records, secondary keys, counters and slots; one sentence for each disagreement."""
    problems = []
    expiry, lru = set(), set()
    owners: Counter[Extent] = Counter()
    namespaces: dict[bytes, Totals] = {}
    for block_hash, located in txn.blocks():
        if located is None:
            problems.append(f"record {block_hash.hex()[:12]} fails its checksum")
            continue
        record = located.record
        expiry.add(expiry_key(record))
        lru.add(lru_key(record))
        owners[located.extent] += 1
        counted = namespaces.get(record.namespace, Totals(0, 0))
        namespaces[record.namespace] = counted.plus(1, located.payload_bytes)
    for name, keys in (("expiry", expiry), ("lru", lru)):
        if different := txn.keys(name) ^ keys:
            problems.append(f"{len(different)} keys of `{name}` do not match the records")
    if txn.namespaces() != namespaces:
        problems.append("the counters of the namespaces are not their sums")
    sums = [sum(each) for each in zip(*namespaces.values(), strict=True)] or [0, 0]
    if list(txn.totals()) != sums:
        problems.append(f"the counters say {txn.totals()}, the records {sums}")
    return problems + _slot_problems(txn, slots, owners)


def _slot_problems(txn: IndexTxn, slots: SlotAllocator, owners: Counter[Extent]) -> list[str]:
    problems = []
    if shared := [extent for extent, count in owners.items() if count > 1]:
        problems.append(f"records share the slots {shared[:3]}")
    pending = set(txn.pending())
    dirty = slots.dirty.keys()
    if pending != dirty | slots.lent.keys() or dirty & slots.lent.keys():
        problems.append("pending slots are not those lent and those to be erased")
    free_keys = txn.keys("free")
    segments = txn.segments()
    live = Counter(extent.segment for extent in owners.elements())
    for segment, state in segments.items():
        if state.num_live != live[segment]:
            problems.append(f"segment {segment} counts {state.num_live} blocks of {live[segment]}")
        for slot in range(state.num_used):
            extent = Extent(segment, slot)
            key = state.slot_bytes.to_bytes(4, "big") + extent_key(extent)
            roles = (extent in owners) + (extent in pending) + (key in free_keys)
            free_keys.discard(key)
            if roles != 1:
                problems.append(f"slot {extent} has {roles} roles")
    if free_keys:
        problems.append(f"{len(free_keys)} free slots lie in no segment")
    if slots.occupied_bytes > slots.budget_bytes:
        problems.append(f"files occupy {slots.occupied_bytes} of {slots.budget_bytes} bytes")
    return problems
