"""What opening a store settles: the clock, the budget, what a crash left, a lost or bloated index.

All but the rebuilding of a lost index costs in proportion to what was under way, not to the store.
"""

import logging

from tieredkv.clock import Clock
from tieredkv.storage.allocator import SlotAllocator
from tieredkv.storage.codec import FORMAT_VERSION, Extent, Located
from tieredkv.storage.extents import SegmentFiles
from tieredkv.storage.index import Index, IndexTxn, SegmentState

logger = logging.getLogger(__name__)

CLOCK_TOLERANCE_S = 60.0
_BLOCK_DBS = ("blocks", "expiry", "lru", "namespaces", "segments", "free", "pending")
_FORMAT = FORMAT_VERSION.to_bytes(4, "big")


def settle_clock(index: Index, clock: Clock) -> int:
    """Compare the clock with the latest time that the store has seen; answer what expired.

    A clock a little behind is moved up. One that is more than a minute behind cannot tell how old
    a block is, so every block counts as expired; its segment files go with the next `reload`.
    """
    with index.reading() as txn:
        mark, num_blocks = txn.clock_mark(), txn.totals().num_blocks
    now = clock.now()
    if mark is None or now >= mark:
        return 0
    if now >= mark - CLOCK_TOLERANCE_S:
        clock.advance_to(mark)
        return 0
    text = "the clock is %.0f s behind the store's latest time: its %d blocks count as expired"
    logger.warning(text, mark - now, num_blocks)
    with index.writing() as txn:
        txn.clear(*_BLOCK_DBS)
        txn.set_meta("totals", None)
        txn.set_clock_mark(now, is_empty=True)
    return num_blocks


def settle_budget(index: Index, budget_bytes: int | None) -> int:
    """Remember a budget, or answer the one remembered."""
    with index.reading() as txn:
        stored = txn.meta("budget")
    if budget_bytes is None:
        return int.from_bytes(stored, "big") if stored else 0
    encoded = budget_bytes.to_bytes(8, "big")
    if encoded != stored:
        with index.writing() as txn:
            txn.set_meta("budget", encoded)
    return budget_bytes


def recover(slots: SlotAllocator, now: float) -> None:
    """Open the segments and erase what a crash left pending; make a lost index again."""
    index, files = slots.index, slots.files
    with index.reading() as txn:
        is_new = txn.meta("format") is None
    if is_new:
        _adopt_slots(index, files, now)
    with index.reading() as txn:
        known = txn.segments()
    for segment, state in known.items():
        _open_segment(index, files, segment, state)
    slots.reload()
    for _ in slots.erasing():
        pass
    slots.remove_empty_segments()


def rebuild_keys(txn: IndexTxn, lent: set[Extent]) -> None:
    """Make all but `blocks`, `roots` and `meta` again from the sound records; drop the others.

    Of records that claim one slot none is kept: at most one of them is right.
    """
    owners: dict[Extent, Located] = {}
    bad: list[bytes] = []
    segments = txn.segments()
    for block_hash, located in txn.blocks():
        if located is None or located.extent in lent or located.extent.segment not in segments:
            bad.append(block_hash)
        elif (other := owners.get(located.extent)) is not None:
            bad += [block_hash, other.record.block_hash]
        else:
            owners[located.extent] = located
    for block_hash in bad:
        txn.remove_damaged(block_hash)
    dropped = set(bad)
    sound = [each for each in owners.values() if each.record.block_hash not in dropped]
    txn.rebuild(sound, lent)


def _open_segment(index: Index, files: SegmentFiles, segment: int, state: SegmentState) -> None:
    """Open one segment; of a missing or short file no unwritten slot is handed out any more."""
    try:
        if segment not in files:
            files.open(segment, state.slot_bytes)
        num_slots = files.size_bytes(segment) // state.slot_bytes
    except FileNotFoundError:
        logger.warning("segment %d is missing: its blocks are misses", segment)
        num_slots = 0
    if num_slots >= state.num_slots:
        return
    with index.writing() as txn:
        txn.put_segment(segment, state._replace(num_slots=max(num_slots, state.num_used)))


def _adopt_slots(index: Index, files: SegmentFiles, now: float) -> None:
    """Fill a new index from the headers of the slots that are there, if any."""
    found: dict[bytes, Located] = {}
    segments: dict[int, SegmentState] = {}
    latest = 0.0
    for segment, (_, slot_bytes) in files.names().items():
        files.open(segment, slot_bytes)
        num_slots = files.size_bytes(segment) // slot_bytes
        segments[segment] = SegmentState(slot_bytes, num_slots, num_slots, 0)
        for slot in range(num_slots):
            located = files.header_at(Extent(segment, slot))
            if located is None or located.slot_bytes != slot_bytes:
                continue
            record = located.record
            latest = max(latest, record.computed_at, record.last_used)
            other = found.get(record.block_hash)
            if other is None or other.record.computed_at < record.computed_at:
                found[record.block_hash] = located
    is_clock_sound = now >= latest - CLOCK_TOLERANCE_S
    sound = [each for each in found.values() if is_clock_sound and now < each.record.expires_at]
    with index.writing() as txn:
        for segment, state in segments.items():
            txn.put_segment(segment, state)
        txn.set_meta("next_segment", (max(segments, default=0) + 1).to_bytes(4, "big"))
        txn.rebuild(sound, set())
        txn.set_clock_mark(max(now, latest) if is_clock_sound else now)
        txn.set_meta("format", _FORMAT)
    if segments:
        logger.warning("the index was made again from slot headers: %d blocks", len(sound))
