"""Proof reading of a store: every payload against its record, and the index against itself."""

from collections import Counter
from collections.abc import Callable, Generator

from tieredkv.clock import Clock
from tieredkv.errors import CorruptBlockError, StorageError
from tieredkv.storage.allocator import SlotAllocator
from tieredkv.storage.codec import Extent, Located, expiry_key, extent_key, lru_key, padded_bytes
from tieredkv.storage.extents import SegmentFiles, aligned_buffer
from tieredkv.storage.index import IndexTxn, Totals
from tieredkv.storage.results import VerifyResult

Repair = Callable[[bytes, Located | None], None]
"""Drops a block that is bad; without a hash, makes the secondary keys again."""


def verifying(
    slots: SlotAllocator, clock: Clock, repair: Repair | None
) -> Generator[VerifyResult, None, None]:
    """Check block after block, then the index; yields what was found so far after each."""
    result, after = VerifyResult(), b""
    index = slots.index

    def found(reason: str, block_hash: bytes, located: Located | None) -> None:
        can_repair = repair is not None and reason != "io_error"
        if repair is not None and can_repair:
            repair(block_hash, located)
        result.add(reason, is_repaired=can_repair)

    while True:
        with index.reading() as txn:
            entry = next(txn.blocks(after), None)
        if entry is None:
            break
        after, located = entry
        if located is None or clock.now() < located.record.expires_at:
            result.checked += 1
            reason = "record" if located is None else _fault_of(slots.files, located)
            if reason is not None:
                found(reason, after, located)
        yield result
    with index.reading() as txn:
        problems = find_problems(txn, slots)
    if problems:
        found("index", b"", None)
    yield result


def _fault_of(files: SegmentFiles, located: Located) -> str | None:
    """Read header and payload of a slot; the reason why they are bad, or None."""
    try:
        files.check_header(located)
        files.read_block(located, aligned_buffer(padded_bytes(located.payload_bytes)))
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
        blocks, payload = namespaces.get(record.namespace, (0, 0))
        namespaces[record.namespace] = Totals(blocks + 1, payload + located.payload_bytes)
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
    if {s: state._replace(num_live=0) for s, state in segments.items()} != {
        s: state._replace(num_live=0) for s, state in slots.segments.items()
    }:
        problems.append("the segments in memory are not those of the index")
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
