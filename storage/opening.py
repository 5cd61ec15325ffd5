"""What a start does with a store; `open_parts` has its steps from top to bottom.

A crash can leave writes half done. An index can be lost, or have grown beyond its need. Only making
a new index takes time in proportion to the store; the rest takes time in proportion to the writes
that were under way.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace

from tieredkv.clock import Clock
from tieredkv.errors import MissingKeyError, StorageError, StoreFullError
from tieredkv.storage.extents.allocator import largest_file_bytes
from tieredkv.storage.extents.files import SegmentFiles
from tieredkv.storage.extents.space import headroom_bytes
from tieredkv.storage.folder.filesystem import Filesystem
from tieredkv.storage.folder.folder import StoreFolder
from tieredkv.storage.format.record import FORMAT_VERSION, Located
from tieredkv.storage.index.environment import Index
from tieredkv.storage.index.rebuild import OpeningProgress, rebuild, unknown_segments
from tieredkv.storage.index.verdicts import storage_errors
from tieredkv.storage.keys.store_keys import open_keys
from tieredkv.storage.keys.use import KeyUse
from tieredkv.storage.options import StoreOptions
from tieredkv.storage.parts import Parts
from tieredkv.storage.starts import claim_folder
from tieredkv.wire.limits import check_file_size

logger = logging.getLogger(__name__)

CLOCK_TOLERANCE_S = 60.0


def open_parts(
    options: StoreOptions,
    clock: Clock,
    failpoint: Callable[[str], None] = lambda label: None,
    *,
    prepare: Callable[[StoreFolder], None] = lambda folder: None,
    progress: OpeningProgress = lambda done, total: None,
) -> Parts:
    """Open or create a store and finish what a crash left half done, without a scan.

    Args:
        options: the options of this store.
        clock: moved up to the latest time that the store has seen if it is a little behind.
        failpoint: called with a label at each step of a change; tests stop the process there.
        prepare: called with the locked folder before its index is opened.
        progress: called during steps that take long.

    Raises:
        CorruptIndexError, StoreFailedError, StoreBusyError, FormatVersionError,
        MissingKeyError, StoreFullError, StorageError, ConfigError
    """
    with ExitStack() as undo:
        with storage_errors(options.path):
            # Its parts, from the outside in.
            folder = claim_folder(options)
            undo.callback(folder.release)
            filesystem = Filesystem.explore(folder.path)
            filesystem.check()
            keys, lacks_keys = open_keys(folder, options)
            if keys is not None:
                undo.callback(keys.close)
            prepare(folder)
            earlier, budget = _budgets(folder, options.budget_bytes)
            names = folder.retentions
            index = Index(folder.index_path, sync=options.sync == "commit", retentions=names)
            undo.callback(index.close)
            use = KeyUse(index, clock, keys, lacks_keys, options.longest_s)
            files = SegmentFiles(folder.segments_path, filesystem)
            undo.callback(files.close)
            parts = Parts.join(clock, folder, index, use, files, earlier, failpoint)
            # What a loss, a crash or a wrong clock left behind.
            _open_segments(index, files)
            _complete_index(parts, progress)
            num_expired = settle_clock(index, files, clock)
            parts.room.reload()
            for _ in parts.room.erasing():
                pass
        # A smaller budget, and keys that no block needs any more.
        _reach_budget(parts, budget)
        use.suspect_all()
        if (failed := use.drop_unused()) is not None:
            logger.warning("%s", failed)
        with suppress(StorageError):  # the first sweep of a server says so
            use.sweep_others()
        folder.note_budget(budget)  # used when the store is opened without a budget
        undo.pop_all()
    return replace(parts, num_expired=num_expired)


def _budgets(folder: StoreFolder, budget_bytes: int | None) -> tuple[int, int]:
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


def _complete_index(parts: Parts, progress: OpeningProgress) -> None:
    """Make the index again if it is not complete, or does not know all segments with blocks.

    A new store needs none to be made again.

    Raises:
        MissingKeyError: a lost index cannot be made again without keys.
    """
    with parts.index.reading() as txn:
        is_lost, knows_any = not txn.meta.format, bool(txn.segments())
    if is_lost and (why := parts.key_use.lacks_keys):
        raise MissingKeyError(f"the index has to be rebuilt, which needs the keys: {why}")
    if unknown_segments(parts) or (is_lost and knows_any):
        fault = "it did not know all segments that hold blocks"
        if is_lost:
            fault = "it was lost, set aside or never completed"
        rebuild(parts, fault, progress=progress)
    elif is_lost:
        with parts.index.writing() as txn:
            txn.meta.format = FORMAT_VERSION


def settle_clock(index: Index, files: SegmentFiles, clock: Clock) -> int:
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


def _open_segments(index: Index, files: SegmentFiles) -> None:
    """Open the files of all segments; extents beyond a file's end are never handed out."""
    with index.reading() as txn:
        known = txn.segments()
    for segment, state in known.items():
        try:
            if segment not in files:
                files.open(segment, state.extent_bytes)
            num_extents = files.size_bytes(segment) // state.extent_bytes
        except FileNotFoundError:
            logger.warning("segment %d is missing, so its blocks are misses", segment)
            num_extents = 0
        if num_extents < state.num_extents:
            with index.writing() as txn:
                shorter = state._replace(num_extents=max(num_extents, state.num_used))
                txn.put_segment(segment, shorter)


# --- a smaller budget ---------------------------------------------------------------------------


def _reach_budget(parts: Parts, budget_bytes: int) -> None:
    """Shrink a store, its index included, to a smaller budget.

    Where most of it has to go, or where its index has grown beyond its need, the index is made
    again without the longest unused blocks. Dropping them one by one would take longer, and an
    index keeps nearly all pages that it once had.
    """
    folder, index, space = parts.folder, parts.index, parts.space
    larger_bytes, space.budget_bytes = space.budget_bytes, budget_bytes
    if space.room_bytes < 0:
        folder.drop_set_aside()
        parts.room.release_idle(0)
        space.measure()
    others_bytes = space.overhead_bytes - index.file_bytes()
    if others_bytes > budget_bytes:
        what = f"the files beside the index and segments in `{folder.path}`"
        takes = f"take {others_bytes} bytes of a budget of {budget_bytes}"
        raise StoreFullError(f"{what} {takes}; remove foreign files or raise `disk_size`")
    is_far = space.occupied_bytes > 2 * budget_bytes
    is_bloated = 2 * index.used_bytes() < index.file_bytes()
    if space.room_bytes < 0 and budget_bytes < larger_bytes and (is_far or is_bloated):
        _make_smaller(parts, larger_bytes)
    while space.room_bytes < 0 and parts.room.give_way():
        pass
    if space.room_bytes < 0:
        _make_smaller(parts, larger_bytes)
    if space.occupied_bytes > space.budget_bytes:
        where = f"the store at `{index.path}` occupies {space.occupied_bytes} bytes"
        what = f"{where} without any block, but its budget is {space.budget_bytes}"
        raise StoreFullError(f"{what}; raise `disk_size`")


def _make_smaller(parts: Parts, larger_bytes: int) -> None:
    """Make the index again without the blocks that have no room, if there is room for that.

    The old index and the new one exist side by side for a while. Both, and what the last batch of
    blocks changes, must fit into the larger budget that was in force before, and onto the disk.
    """
    index, space = parts.index, parts.space
    smaller_bytes = space.budget_bytes
    kept = min(smaller_bytes / space.occupied_bytes, 1.0)
    # The new index, its changed pages, and the room that is kept for changes of both.
    needed_bytes = parts.files.filesystem.spread_bytes(int(3 * kept * index.used_bytes()))
    # The old index does not change meanwhile, so the room kept for its changes is free.
    if needed_bytes > min(larger_bytes - space.occupied_bytes, parts.files.free_bytes()):
        return
    try:
        without = _without_room(parts)
        space.budget_bytes = larger_bytes + space.headroom_bytes
        with suppress(StoreFullError):
            rebuild(parts, fault="", without=without)
    finally:
        space.budget_bytes = smaller_bytes
        space.measure()


def _without_room(parts: Parts) -> set[bytes]:
    """Choose the blocks that give way since the budget has no room for them, and count them."""
    index, space, chosen = parts.index, parts.space, list[Located]()
    spread_bytes = parts.files.filesystem.spread_bytes
    with parts.room.changing() as txn:
        used_bytes = txn.used_bytes()
        index_bytes = used_bytes / max(txn.meta.totals.num_blocks, 1)  # of a block
        overhead_bytes = space.overhead_bytes - index.file_bytes() + used_bytes
        needed_bytes = overhead_bytes + spread_bytes(headroom_bytes(overhead_bytes))
        short_bytes: float = parts.files.occupied_bytes + needed_bytes - space.budget_bytes
        for located in parts.room.in_order(txn):
            if short_bytes <= 0:
                break
            chosen.append(located)
            short_bytes -= located.extent_bytes + index_bytes
        parts.room.note_evicted(txn, chosen)
    return {each.record.block_hash for each in chosen}
