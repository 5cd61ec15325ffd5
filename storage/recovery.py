"""What opening a store settles: the clock, the budget, what a crash left, a lost or bloated index.

All but the rebuilding of a lost index costs in proportion to what was under way, not to the store.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice

from tieredkv.clock import Clock
from tieredkv.errors import StorageError
from tieredkv.storage.allocator import SlotAllocator
from tieredkv.storage.codec import FORMAT_VERSION, Extent, Located
from tieredkv.storage.extents import SegmentFiles
from tieredkv.storage.index import Index, IndexTxn, SegmentState

logger = logging.getLogger(__name__)

CLOCK_TOLERANCE_S = 60.0
_MOST_BYTES_A_BLOCK = 4 * 4096  # of pages that one transaction writes
_ADOPTED_SLOTS = 4096  # in one transaction: memory, and what the index grows by beyond its need
_ADOPTING_THREADS = 16  # one read waits for the device; so many keep it busy
_REPORTED_SLOTS = 25 * _ADOPTED_SLOTS


def _settle_clock(index: Index, clock: Clock) -> int:
    """Compare the clock with the latest time that the store has seen; answer what expired.

    A clock a little behind is moved up. One that is more than a minute behind cannot tell how old
    a block is, so every block counts as expired; its segment files go with the next `reload`.
    """
    with index.reading() as txn:
        mark, num_blocks = txn.meta.clock, txn.meta.totals.num_blocks
    now = clock.now()
    if now >= mark:
        return 0
    if now >= mark - CLOCK_TOLERANCE_S:
        clock.advance_to(mark)
        return 0
    text = "the clock is %.0f s behind the store's latest time: its %d blocks count as expired"
    logger.warning(text, mark - now, num_blocks)
    with index.writing() as txn:
        txn.clear({})
        txn.meta.clock = now
    return num_blocks


def settle_budget(index: Index, budget_bytes: int | None) -> tuple[int, int]:
    """The budget that the files may fill until they are within it, and the one to reach.

    Raises:
        StorageError: none is given and none is remembered.
    """
    with index.reading() as txn:
        stored = txn.meta.budget
    if budget_bytes is None and not stored:
        what = f"the index at `{index.path}` is lost, and the budget with it"
        raise StorageError(f"{what}; a server that starts on this store makes it again")
    wanted = stored if budget_bytes is None else budget_bytes
    return max(stored, wanted), wanted


def recover(slots: SlotAllocator) -> int:
    """Open the segments and erase what a crash left pending; make a lost index again.

    Answers how many blocks expired because of a clock that is behind them.
    """
    index, files = slots.index, slots.files
    with index.reading() as txn:
        is_new = not txn.meta.format
    if is_new:
        _adopt_slots(slots)
    num_expired = _settle_clock(index, slots.clock)
    with index.reading() as txn:
        known = txn.segments()
    for segment, state in known.items():
        _open_segment(index, files, segment, state)
    slots.reload()
    for _ in slots.erasing():
        pass
    return num_expired


def make_again(txn: IndexTxn, slots: SlotAllocator) -> None:
    """Make all databases but `meta` again from the records that are sound.

    Of blocks that claim one slot none is kept: at most one of them is right.
    """
    stored = {located.record.block_hash: located for _, located in txn.blocks() if located}
    claims = Counter(chain(slots.lent, (located.extent for located in stored.values())))
    segments = txn.segments()
    sound = {
        located.extent: located
        for located in stored.values()
        if claims[located.extent] == 1 and located.extent.segment in segments
    }
    txn.clear(segments)
    used = (Extent(s, slot) for s, state in segments.items() for slot in range(state.num_used))
    _fill(txn, slots, list(sound.values()), {*used, *slots.lent} - sound.keys())


def _fill(
    txn: IndexTxn, slots: SlotAllocator, found: Sequence[Located], unowned: Iterable[Extent]
) -> None:
    """Insert blocks and list slots that are none's; of two copies of a block the newer one is kept.

    Where the budget has no room for the pages that this writes, the index that was set aside goes,
    then the longest unused blocks: their bytes at once, their slots as pending ones.
    """
    for extent in unowned:
        txn.add_slot("pending", extent)
    for located in found:
        old = txn.get(located.record.block_hash)
        if old is not None and old.record.computed_at > located.record.computed_at:
            txn.add_slot("pending", located.extent)
            continue
        if old is not None:
            txn.remove(old)
        txn.insert(located)
    needed_bytes = min(txn.used_bytes(), _MOST_BYTES_A_BLOCK * len(found))
    if slots.room_bytes < needed_bytes:
        slots.directory.drop_set_aside()
        slots.measure()
    short_bytes, victims = needed_bytes - slots.room_bytes, list[Located]()
    for block_hash in txn.longest_unused():
        if short_bytes <= 0:
            break
        if (victim := txn.get(block_hash)) is not None:
            victims.append(victim)
            short_bytes -= victim.slot_bytes
    for victim in victims:
        slots.erase(victim.extent)
        txn.remove(victim)


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


def _adopt_slots(slots: SlotAllocator) -> None:
    """Fill a new index from the headers of the slots that are there, some at a time.

    The format comes last: a start after a kill half way begins again.
    """
    files, now, latest = slots.files, slots.clock.now(), 0.0
    segments: dict[int, SegmentState] = {}
    for segment, (_, slot_bytes) in files.names().items():
        files.open(segment, slot_bytes)
        num_slots = files.size_bytes(segment) // slot_bytes
        segments[segment] = SegmentState(slot_bytes, num_slots, num_slots)
    with slots.index.writing() as txn:
        txn.clear(segments)
        txn.meta.next_segment = max(segments, default=0) + 1
    num_slots = sum(state.num_slots for state in segments.values())
    extents = (Extent(s, slot) for s, state in segments.items() for slot in range(state.num_slots))
    with ThreadPoolExecutor(_ADOPTING_THREADS) as pool:
        for first in range(0, num_slots + 1, _ADOPTED_SLOTS):
            if num_slots and first % _REPORTED_SLOTS == 0:
                of = f"{first} of {num_slots}"
                logger.warning("the index is made again from slot headers: %s slots read", of)
            batch = list(islice(extents, _ADOPTED_SLOTS))
            stored = [located for located in pool.map(files.header_at, batch) if located]
            times = ((each.record.computed_at, each.record.last_used) for each in stored)
            latest = max(latest, *chain.from_iterable(times), 0.0)
            found = [each for each in stored if now < each.record.expires_at]
            unowned = set(batch) - {each.extent for each in found}
            slots.measure()
            with slots.index.writing() as txn:
                _fill(txn, slots, found, unowned)
                if first + _ADOPTED_SLOTS > num_slots:
                    txn.saw_time(max(now, latest))
                    txn.meta.format = FORMAT_VERSION
                slots.failpoint("adopt:before")
    if num_slots:
        logger.warning("the index was made again from slot headers")
