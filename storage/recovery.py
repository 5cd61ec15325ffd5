"""What opening a store settles: the clock, the budget, what a crash left, a lost or bloated index.

All but the rebuilding of a lost index costs in proportion to what was under way, not to the store.
"""

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice

from tieredkv.clock import Clock
from tieredkv.errors import StorageError
from tieredkv.storage.allocator import SlotAllocator, batches
from tieredkv.storage.codec import FORMAT_VERSION, Extent, Located
from tieredkv.storage.extents import SegmentFiles
from tieredkv.storage.index import Index, IndexTxn, SegmentState

logger = logging.getLogger(__name__)

CLOCK_TOLERANCE_S = 60.0
_BLOCK_DBS = ("blocks", "expiry", "lru", "namespaces", "segments", "free", "pending")
_INDEX_BYTES_A_BLOCK = 700  # with its keys, after random inserts
_ADOPTED_SLOTS = 4096  # in one transaction: memory, and what the index grows by beyond its need
_ADOPTING_THREADS = 16  # one read waits for the device; so many keep it busy
_REPORTED_SLOTS = 25 * _ADOPTED_SLOTS
_FORMAT = FORMAT_VERSION.to_bytes(4, "big")


def _settle_clock(index: Index, clock: Clock) -> int:
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
        _forget_blocks(txn)
        txn.set_clock_mark(now, is_empty=True)
    return num_blocks


def _forget_blocks(txn: IndexTxn) -> None:
    txn.clear(*_BLOCK_DBS)
    txn.set_meta("totals", None)


def settle_budget(index: Index, budget_bytes: int | None) -> tuple[int, int]:
    """The budget that the files may fill until they are within it, and the one to reach.

    Raises:
        StorageError: none is given and none is remembered.
    """
    with index.reading() as txn:
        stored = int.from_bytes(txn.meta("budget") or b"", "big")
    if budget_bytes is None and not stored:
        what = f"the index at `{index.path}` is lost, and the budget with it"
        raise StorageError(f"{what}; a server that starts on this store makes it again")
    wanted = stored if budget_bytes is None else budget_bytes
    return max(stored, wanted), wanted


def remember_budget(index: Index, budget_bytes: int) -> None:
    """Keep a budget that is reached, for whoever opens the store without one."""
    encoded = budget_bytes.to_bytes(8, "big")
    with index.writing() as txn:
        if txn.meta("budget") != encoded:
            txn.set_meta("budget", encoded)


def recover(slots: SlotAllocator) -> int:
    """Open the segments and erase what a crash left pending; make a lost index again.

    Answers how many blocks expired because of a clock that is behind them.
    """
    index, files = slots.index, slots.files
    with index.reading() as txn:
        is_new = txn.meta("format") is None
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


def make_again(txn: IndexTxn, slots: SlotAllocator, found: Iterable[Located]) -> None:
    """Make all databases but `meta` and `segments` again from what was found to be stored.

    Of blocks that claim one slot none is kept: at most one of them is right. Of two copies of a
    block the newer one is. Where the budget has no room for the new pages beside the old ones, the
    longest unused blocks give way: their bytes at once, their slots as pending ones.
    """
    owners: dict[Extent, Located | None] = dict.fromkeys(slots.lent)
    newest: dict[bytes, Located] = {}
    for located in found:
        block_hash = located.record.block_hash
        other = owners.setdefault(located.extent, located)
        if other is None or other.record.block_hash != block_hash:
            owners[located.extent] = None
        elif (
            located.record.computed_at >= newest.setdefault(block_hash, located).record.computed_at
        ):
            newest[block_hash] = located
    segments = txn.segments()
    sound = [
        each
        for each in newest.values()
        if each.extent.segment in segments and owners[each.extent] is not None
    ]
    sound.sort(key=lambda each: -each.record.last_used)
    short_bytes = len(sound) * _INDEX_BYTES_A_BLOCK - slots.room_bytes
    while sound and short_bytes > 0:
        victim = sound.pop()
        slots.erase(victim.extent)
        short_bytes -= victim.slot_bytes
    txn.rebuild(sound, set(slots.lent))


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
        segments[segment] = SegmentState(slot_bytes, num_slots, num_slots, 0)
    with slots.index.writing() as txn:
        _forget_blocks(txn)
        for segment, state in segments.items():
            txn.put_segment(segment, state)
        txn.set_meta("next_segment", (max(segments, default=0) + 1).to_bytes(4, "big"))
    num_slots = sum(state.num_slots for state in segments.values())
    extents = (Extent(number, slot) for number in segments for slot in range(segments[number][1]))

    def read_headers(some: Sequence[Extent]) -> list[Located | None]:
        return list(map(files.header_at, some))

    with ThreadPoolExecutor(_ADOPTING_THREADS) as pool:
        for first in range(0, num_slots + 1, _ADOPTED_SLOTS):
            if num_slots and first % _REPORTED_SLOTS == 0:
                of = f"{first} of {num_slots}"
                logger.warning("the index is made again from slot headers: %s slots read", of)
            batch = list(islice(extents, _ADOPTED_SLOTS))
            found: list[Located] = []
            unowned: list[Extent] = []
            headers = chain.from_iterable(pool.map(read_headers, batches(batch)))
            for extent, located in zip(batch, headers, strict=True):
                if located is None or located.slot_bytes != segments[extent.segment].slot_bytes:
                    unowned.append(extent)
                    continue
                latest = max(latest, located.record.computed_at, located.record.last_used)
                is_alive = now < located.record.expires_at
                found.append(located) if is_alive else unowned.append(extent)
            with slots.index.writing() as txn:
                for extent in unowned:
                    txn.add_pending(extent)
                _adopt(txn, found)
                _make_room(txn, slots, len(found))
                if first + _ADOPTED_SLOTS > num_slots:
                    txn.set_clock_mark(max(now, latest))
                    txn.set_meta("format", _FORMAT)
                slots.failpoint("adopt:before")
    if num_slots:
        logger.warning("the index was made again from slot headers")


def _adopt(txn: IndexTxn, found: Iterable[Located]) -> None:
    """Insert blocks; of two copies the newer one is kept."""
    for located in found:
        old = txn.get(located.record.block_hash)
        if old is not None and old.record.computed_at > located.record.computed_at:
            txn.add_pending(located.extent)
            continue
        if old is not None:
            txn.remove(old)
        txn.insert(located)


def _make_room(txn: IndexTxn, slots: SlotAllocator, num_blocks: int) -> None:
    """Make room for the pages that a transaction with so many new blocks writes.

    The index that was set aside goes first, then the longest unused blocks: their bytes at once.
    """
    slots.measure()
    copied_bytes = min(4 * 4096 * num_blocks, slots.index.used_bytes())
    needed_bytes = num_blocks * _INDEX_BYTES_A_BLOCK + copied_bytes
    if slots.room_bytes < needed_bytes:
        slots.directory.drop_set_aside()
        slots.measure()
    short_bytes, victims = needed_bytes - slots.room_bytes, list[Located]()
    for block_hash in txn.longest_unused():
        if short_bytes <= 0:
            break
        if (located := txn.get(block_hash)) is not None:
            victims.append(located)
            short_bytes -= located.slot_bytes
    for victim in victims:
        slots.erase(victim.extent)
        txn.remove(victim)
