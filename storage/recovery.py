"""Opening of a store: settle its clock and budget, and repair what a crash or a loss left behind.

A crash can leave writes half done. An index can be lost, or have grown beyond its need. Only making
a new index takes time in proportion to the store; the rest takes time in proportion to the writes
that were under way.
"""

import errno
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice

from msgspec.structs import replace

from tieredkv.clock import Clock
from tieredkv.errors import CorruptBlockError, MissingKeyError, StorageError, StoreFullError
from tieredkv.storage.allocator import ExtentAllocator, largest_file_bytes
from tieredkv.storage.extents import SegmentFiles
from tieredkv.storage.filesystem import lack_of_room
from tieredkv.storage.folder import StoreFolder
from tieredkv.storage.format.record import FORMAT_VERSION, Extent, Located, is_encrypted, scope_of
from tieredkv.storage.index import PAGE_BYTES, Index
from tieredkv.storage.index_entries import SegmentState
from tieredkv.storage.index_txn import IndexTxn
from tieredkv.storage.limits import check_file_size

logger = logging.getLogger(__name__)

CLOCK_TOLERANCE_S = 60.0
_MOST_BYTES_A_BLOCK = 4 * PAGE_BYTES  # most index bytes that a transaction writes per block
_ADOPTED_EXTENTS = 4096  # per transaction, to limit memory and surplus growth of the index
_ADOPTING_THREADS = 16  # each read waits for the device; this many keep it busy
_REPORTED_EXTENTS = 25 * _ADOPTED_EXTENTS

OpeningProgress = Callable[[int, int], None]
"""Called with (extents read, extents in all) now and then while a lost index is made again."""

Found = tuple[list[Located], list[Extent]]
"""Some blocks, and some extents; extents that belong to none of the blocks belong to no block."""


def _settle_clock(index: Index, files: SegmentFiles, clock: Clock) -> int:
    """Compare the clock with the store's latest time, and return how many blocks expire by it.

    A clock that is at most a minute behind is moved up. A clock that is further behind cannot tell
    how old a block is, so every block counts as expired and every segment file is removed.
    """
    with index.reading() as txn:
        mark, num_blocks = txn.meta.clock, txn.meta.totals.num_blocks
    now = clock.now()
    if now >= mark:
        return 0
    if now >= mark - CLOCK_TOLERANCE_S:
        clock.advance_to(mark)
        return 0
    text = "the clock is %.0f s behind the store's latest time, so its %d blocks count as expired"
    logger.warning(text, mark - now, num_blocks)
    files.remove_all()  # before the index forgets them: the blocks in an unknown file are adopted
    with index.writing() as txn:
        txn.clear()
        txn.meta.clock = now
    return num_blocks


def settle_budget(folder: StoreFolder, budget_bytes: int | None) -> tuple[int, int]:
    """Return the budget that the files may fill at first, and the one that they must shrink to.

    Raises:
        StorageError: no budget is given or remembered, or the system allows no files so large.
    """
    stored = folder.budget_bytes
    if budget_bytes is None and not stored:
        what = f"the lock file of `{folder.path}` no longer tells the budget of the store"
        raise StorageError(f"{what}; start a server on it first")
    wanted = stored if budget_bytes is None else budget_bytes
    check_file_size(folder.path, min(wanted, largest_file_bytes(wanted)))
    return max(stored, wanted), wanted


def recover(allocator: ExtentAllocator, progress: OpeningProgress) -> int:
    """Open the segments, erase what a crash left pending, and make a lost index again.

    A crash can leave a segment file that the index does not know. Such a file is removed if it
    holds no block; if it holds one, the index is wrong and is made again.

    Args:
        allocator: of the store.
        progress: told how far a lost index is made again.

    Returns how many blocks expired because the clock is behind the store's latest time.

    Raises:
        MissingKeyError: a lost index cannot be made again without keys.
    """
    index, files = allocator.index, allocator.files
    with index.reading() as txn:
        is_lost = not txn.meta.format
    if is_lost and (why := allocator.key_use.lacks_keys):
        raise MissingKeyError(f"the index has to be rebuilt, which needs the keys: {why}")
    if is_lost:
        _adopt_extents(allocator, progress)
    num_expired = _settle_clock(index, files, allocator.clock)
    with index.reading() as txn:
        known = txn.segments()
    for segment, state in known.items():
        _open_segment(index, files, segment, state)
    unknown = _open_unknown(allocator)
    allocator.reload()
    for _ in allocator.erasing():  # what was evicted from an unknown file is erased as well
        pass
    if any(stored for stored, _ in _stray_blocks(allocator, _extents_of(unknown))):
        logger.warning("index of `%s`: it does not know all segments", allocator.folder.path)
        make_again(allocator)
    else:
        for segment in unknown:
            files.remove(segment)
    return num_expired


def reach_budget(allocator: ExtentAllocator, budget_bytes: int) -> None:
    """Shrink a store, its index included, to a smaller budget.

    A bloated index is replaced by a compact copy. The index and the copy exist side by side for a
    while, so the copy is made only once both fit into the larger budget that was in force before.
    """
    space = allocator.space
    larger_bytes, space.budget_bytes = space.budget_bytes, budget_bytes

    def compact() -> bool:
        before = space.overhead_bytes
        copy_bytes = allocator.files.filesystem.spread_bytes(allocator.index.used_bytes())
        if space.occupied_bytes + copy_bytes <= larger_bytes:
            with suppress(StoreFullError):
                allocator.index.compact()
            space.measure()
        return space.overhead_bytes < before

    if space.room_bytes < 0:
        allocator.folder.drop_set_aside()
        space.measure()
    others_bytes = space.overhead_bytes - allocator.index.file_bytes()
    if others_bytes > budget_bytes:
        what = f"the files beside the index and segments in `{allocator.folder.path}`"
        takes = f"take {others_bytes} bytes of a budget of {budget_bytes}"
        raise StoreFullError(f"{what} {takes}; remove foreign files or raise `disk_size`")
    while space.room_bytes < 0:
        is_bloated = 2 * allocator.index.used_bytes() < allocator.index.file_bytes()
        if not (is_bloated and compact()) and not allocator.give_way():
            break
    if space.room_bytes < 0:
        compact()
    if space.occupied_bytes > space.budget_bytes:
        where = f"the store at `{allocator.index.path}` occupies {space.occupied_bytes} bytes"
        what = f"{where} without any block, but its budget is {space.budget_bytes}"
        raise StoreFullError(f"{what}; raise `disk_size`")


def _open_segment(index: Index, files: SegmentFiles, segment: int, state: SegmentState) -> None:
    """Open one segment; extents beyond the end of a missing or short file are never handed out."""
    try:
        if segment not in files:
            files.open(segment, state.extent_bytes)
        num_extents = files.size_bytes(segment) // state.extent_bytes
    except FileNotFoundError:
        logger.warning("segment %d is missing, so its blocks are misses", segment)
        num_extents = 0
    if num_extents >= state.num_extents:
        return
    with index.writing() as txn:
        txn.put_segment(segment, state._replace(num_extents=max(num_extents, state.num_used)))


def _open_unknown(allocator: ExtentAllocator) -> dict[int, SegmentState]:
    """Open the segment files that the index does not know; every extent in them may be used."""
    files = allocator.files
    with allocator.index.reading() as txn:
        known = txn.segments()
    found = {}
    for segment, (_, extent_bytes) in files.names().items():
        if segment not in files:
            files.open(segment, extent_bytes)
        elif segment in known:
            continue
        num_extents = files.size_bytes(segment) // extent_bytes
        found[segment] = SegmentState(extent_bytes, num_extents, num_extents)
    return found


def _stray_blocks(allocator: ExtentAllocator, extents: Iterable[Extent]) -> Iterator[Found]:
    """Read the headers of extents in files that the index does not know; return what is stored.

    An extent that the index lists as free or pending, or whose block it has elsewhere, holds no
    stored block, whatever its header says.
    """
    now = allocator.clock.now()
    with allocator.index.reading() as txn:
        dropped = {*txn.extents("free"), *txn.extents("pending")}
        for found, batch in _read_headers(allocator.files, extents):
            stored = []
            for each in found:
                known = None
                with suppress(CorruptBlockError):
                    known = txn.get(each.record.block_hash)
                located = known or each
                is_here = located.extent == each.extent and each.extent not in dropped
                if is_here and now < located.record.expires_at:
                    stored.append(located)
            yield stored, batch


# --- a new index ------------------------------------------------------------------------------


def make_again(allocator: ExtentAllocator) -> None:
    """Make the index again from its sound records, and from the headers in files unknown to it.

    If several records claim the same extent, none of them is kept, as at most one can be right. Nor
    is a block whose payload key is gone.
    """
    unknown = _open_unknown(allocator)
    keys = allocator.files.keys
    with allocator.index.reading() as txn:
        segments = txn.segments() | unknown

    def is_readable(located: Located) -> bool:
        if keys is None:
            return True
        is_sealed = is_encrypted(located.codec)
        return is_sealed and keys.of_scope(scope_of(located.record)) is not None

    def sound_records(txn: IndexTxn) -> Iterator[Found]:
        claims = Counter(chain(allocator.lent, (each.extent for _, each in txn.blocks() if each)))
        kept = set[Extent]()
        blocks = (each for _, each in txn.blocks() if each and claims[each.extent] == 1)
        sound = (each for each in blocks if each.extent.segment in segments and is_readable(each))
        while some := list(islice(sound, _ADOPTED_EXTENTS)):
            extents = [each.extent for each in some]
            kept.update(extents)
            yield some, extents
        others = {*_extents_of(segments), *allocator.lent} - kept
        strays = {each for each in others if each.segment in unknown}
        yield from _stray_blocks(allocator, sorted(strays))
        rest = iter(others - strays)
        while extents := list(islice(rest, _ADOPTED_EXTENTS)):
            yield [], extents

    with allocator.index.reading() as txn:
        _fill_new_index(allocator, segments, sound_records(txn))
    allocator.reload()
    # Erase them all now: a pending extent is reused as it is, without setting space aside for it.
    for _ in allocator.erasing():
        pass
    logger.warning("the index of `%s` was rebuilt from its records", allocator.folder.path)


def _adopt_extents(allocator: ExtentAllocator, progress: OpeningProgress) -> None:
    """Make a lost index again from the headers of the extents that are there."""
    files = allocator.files
    segments: dict[int, SegmentState] = {}
    for segment, (_, extent_bytes) in files.names().items():
        files.open(segment, extent_bytes)
        num_extents = files.size_bytes(segment) // extent_bytes
        segments[segment] = SegmentState(extent_bytes, num_extents, num_extents)
    num_extents = sum(state.num_extents for state in segments.values())
    if not num_extents:  # a new store
        with allocator.index.writing() as txn:
            txn.meta.format = FORMAT_VERSION
        return

    def headers() -> Iterator[Found]:
        first = 0
        for found, batch in _read_headers(files, _extents_of(segments)):
            progress(first, num_extents)
            if first % _REPORTED_EXTENTS == 0:
                of = f"{first} of {num_extents}"
                logger.warning(
                    "the index is being rebuilt from extent headers: %s extents read", of
                )
            first += len(batch)
            yield found, batch

    _fill_new_index(allocator, segments, headers())
    logger.warning("the index was rebuilt from extent headers")


def _extents_of(segments: Mapping[int, SegmentState]) -> Iterator[Extent]:
    """Walk over all extents of these segments that were ever handed out."""
    return (Extent(s, number) for s, state in segments.items() for number in range(state.num_used))


def _read_headers(files: SegmentFiles, extents: Iterable[Extent]) -> Iterator[Found]:
    """Read the headers of extents in batches; return the blocks that they name."""
    rest = iter(extents)
    with ThreadPoolExecutor(_ADOPTING_THREADS) as pool:
        while batch := list(islice(rest, _ADOPTED_EXTENTS)):
            yield [each for each in pool.map(files.header_at, batch) if each], batch


def _fill_new_index(
    allocator: ExtentAllocator, segments: dict[int, SegmentState], batches: Iterable[Found]
) -> None:
    """Fill a new index in batches of blocks, then put it in the place of the old index.

    The old index is set aside if it held anything. A failure before that changes nothing, except
    that the blocks evicted to make room are already erased.
    """
    index, folder, now = allocator.index, allocator.folder, allocator.clock.now()
    with index.reading() as txn:
        old, holds_blocks = txn.meta, any(True for _ in txn.blocks())
    next_segment = max([old.next_segment, *(segment + 1 for segment in segments)])
    faults = {**old.faults, "index": old.faults.get("index", 0) + 1}
    meta = replace(old, format=FORMAT_VERSION, next_segment=next_segment, faults=faults)
    folder.make_draft()
    draft = Index(folder.draft_path, sync=index.sync, retentions=index.retentions)
    try:
        with draft.writing() as txn:
            txn.begin(meta, segments)
        for stored, extents in batches:
            allocator.space.measure()
            with draft.writing() as txn:
                _fill(txn, [each for each in stored if now < each.record.expires_at], extents)
                draft.keep_ahead(_make_room(txn, allocator, len(stored)))
                times = ((each.record.computed_at, each.record.last_used) for each in stored)
                txn.saw_time(max(chain.from_iterable(times), default=0.0))
                allocator.failpoint("adopt:before")
        draft.flush()
        folder.take_draft(sets_aside=bool(old.format) or holds_blocks)
    except BaseException as error:
        is_short = allocator.files.free_bytes() < allocator.space.headroom_bytes
        draft.close()
        folder.drop_draft()
        if is_short and type(error) is StorageError:  # a page written in part is EIO for LMDB
            what = f"{lack_of_room(folder.path)} for a new index, which is made beside the old one"
            raise StoreFullError(errno.ENOSPC, what) from error
        raise
    index.become(draft)
    allocator.space.measure()


def _fill(txn: IndexTxn, found: Sequence[Located], extents: Sequence[Extent]) -> None:
    """Insert blocks, of two copies the newer one, and list extents without a block as pending."""
    for extent in {*extents}.difference(each.extent for each in found):
        txn.add_extent("pending", extent)
    for located in found:
        old = txn.get(located.record.block_hash)
        if old is not None and old.record.computed_at > located.record.computed_at:
            txn.add_extent("pending", located.extent)
            continue
        if old is not None:
            txn.remove(old)
        txn.insert(located)


def _make_room(txn: IndexTxn, allocator: ExtentAllocator, num_blocks: int) -> int:
    """Make room for the index pages that a transaction changed; return the bytes they may take.

    The index that was set aside is dropped first. Then the longest unused blocks are evicted: their
    bytes are erased at once, and their extents become pending.
    """
    space = allocator.space
    needed_bytes = min(txn.used_bytes(), _MOST_BYTES_A_BLOCK * num_blocks)
    needed_bytes = allocator.files.filesystem.spread_bytes(needed_bytes)
    if space.room_bytes < needed_bytes:
        allocator.folder.drop_set_aside()
        space.measure()
    short_bytes, victims = needed_bytes - space.room_bytes, list[Located]()
    for block_hash in txn.longest_unused():
        if short_bytes <= 0:
            break
        if (victim := txn.get(block_hash)) is not None:
            victims.append(victim)
            short_bytes -= victim.extent_bytes
    allocator.note_evicted(txn, victims)
    for victim in victims:
        allocator.erase(victim.extent)
        txn.remove(victim)
    return needed_bytes
