"""The one way to make a new index beside the old one.

What the old index is sure of is taken over from it. Segment files that it does not know, which are
all of them once it was lost, tell by the headers of their extents which blocks they hold. The new
index has its own folder until it is complete, and then takes the place of the old one. This takes
time in proportion to the store.
"""

import errno
import logging
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice

from msgspec.structs import replace

from tieredkv.errors import CorruptIndexError, StorageError, StoreFullError
from tieredkv.pieces import cut
from tieredkv.storage.extents.allocator import largest_file_bytes
from tieredkv.storage.folder.filesystem import lack_of_room
from tieredkv.storage.format.record import FORMAT_VERSION, Extent, Located, is_encrypted, scope_of
from tieredkv.storage.index.entries import SegmentState, Totals
from tieredkv.storage.index.environment import PAGE_BYTES, Index
from tieredkv.storage.index.transaction import DAMAGED, TXN_BLOCKS, IndexTxn
from tieredkv.storage.parts import Parts

logger = logging.getLogger(__name__)

_MOST_BYTES_A_BLOCK = 4 * PAGE_BYTES  # most index bytes that a transaction writes per block
_BATCH_EXTENTS = 4096  # per transaction, to limit memory and surplus growth of the index
_HEADER_THREADS = 16  # each read waits for the device; this many keep it busy
_REPORTED_EXTENTS = 25 * _BATCH_EXTENTS

OpeningProgress = Callable[[int, int], None]
"""Called with (extents read, extents in all) now and then while headers are read."""

Segments = Mapping[int, SegmentState]
Found = tuple[list[Located], list[Extent]]
"""Some blocks, and some extents; extents that belong to none of the blocks belong to no block."""


def rebuild(
    parts: Parts,
    fault: str,
    *,
    without: Container[bytes] = (),
    progress: OpeningProgress = lambda done, total: None,
) -> None:
    """Fill a new index in batches of blocks, then put it in the place of the old one.

    A failure before that changes nothing, except that the blocks evicted to make room are already
    erased. Afterwards all pending extents are erased: one that is reused as it is gets no space set
    aside.

    Args:
        parts: of the store.
        fault: what is wrong with the old index, which is then counted, told, and set aside if it
            held anything; empty if nothing is.
        without: blocks that are left out.
        progress: called while headers are read.

    Raises:
        StoreFullError: the filesystem has no room for a new index.
    """
    index, folder = parts.index, parts.folder
    with index.reading() as old:
        was_used = any(True for _ in old.records())
        is_kept_aside = bool(fault) and (was_used or bool(old.meta.format))
    folder.make_draft()
    draft = Index(folder.draft_path, sync=index.sync, retentions=index.retentions)
    try:
        _fill(draft, parts, fault, without, progress)
        draft.flush()
        folder.take_draft(sets_aside=is_kept_aside)
    except BaseException as error:
        is_short = parts.files.free_bytes() < parts.space.headroom_bytes
        draft.close()
        folder.drop_draft()
        if is_short and type(error) is StorageError:  # a page written in part is EIO for LMDB
            what = f"{lack_of_room(folder.path)} for a new index, which is made beside the old one"
            raise StoreFullError(errno.ENOSPC, what) from error
        raise
    index.become(draft)
    parts.room.reload()
    for _ in parts.room.erasing():
        pass
    if fault:
        text = "the index of `%s` was rebuilt from %s: %s"
        source = "its records" if was_used else "the extent headers"
        logger.warning(text, folder.path, source, fault)


def fault_of(index: Index) -> str:
    """Say how an index contradicts itself; empty if it does not."""
    try:
        with index.reading() as txn:
            found = txn.contradictions()
    except CorruptIndexError as error:
        return str(error)
    return f"it contradicts itself ({', '.join(found)})" if found else ""


def _fill(
    draft: Index, parts: Parts, fault: str, without: Container[bytes], progress: OpeningProgress
) -> None:
    """Fill a new index in batches of blocks; see `rebuild`."""
    keys, now, unknown = parts.payloads.keys, parts.clock.now(), unknown_segments(parts)

    def is_kept(located: Located) -> bool:
        record = located.record
        is_sealed = is_encrypted(located.codec)
        if keys is not None and not (is_sealed and keys.of_scope(scope_of(record))):
            return False
        return now < record.expires_at and record.block_hash not in without

    with parts.index.reading() as old:
        segments = (known := _known_segments(parts, old)) | unknown
        with draft.writing() as txn:
            txn.meta = replace(old.meta, format=FORMAT_VERSION)
            txn.meta.totals = Totals(0, 0)
            txn.meta.num_encrypted = txn.meta.window_bytes = 0
            txn.meta.needs_rebuild = False
            if fault:
                txn.meta.faults["index"] = txn.meta.faults.get("index", 0) + 1
            for segment, state in segments.items():
                txn.put_segment(segment, state)
                txn.meta.next_segment = max(txn.meta.next_segment, segment + 1)
        sources = _from_records(parts, old, known), _from_headers(parts, old, unknown, progress)
        for found, extents in chain(*sources):
            stored = list(filter(is_kept, found))
            parts.space.measure()
            with draft.writing() as txn:
                _add(txn, stored, extents)
                draft.keep_ahead(_make_room(txn, parts, len(stored)))
                times = ((each.record.computed_at, each.record.last_used) for each in stored)
                txn.saw_time(max(chain.from_iterable(times), default=0.0))
                parts.failpoint("adopt:before")
    _drop_strays(draft)


def _drop_strays(draft: Index) -> None:
    """Drop the further pages of blocks that the new index lacks, as damaged or evicted ones."""
    with draft.reading() as txn:
        walk = txn.blocks() if txn.meta.totals.window_pages else ()
        strays = [it for _, it in walk if it is not None and txn.is_stray(it)]
    for some in cut(strays, TXN_BLOCKS):
        with draft.writing() as txn:
            for each in some:
                txn.remove(each, DAMAGED)


def _add(txn: IndexTxn, found: Sequence[Located], extents: Sequence[Extent]) -> None:
    """Insert blocks, of two copies the newer one, and list extents without a block as pending."""
    for extent in {*extents}.difference(each.extent for each in found):
        txn.add_extent("pending", extent)
    for located in found:
        old = txn.get(located.record.block_hash)
        if old is not None and old.record.computed_at > located.record.computed_at:
            txn.add_extent("pending", located.extent)
            continue
        if old is not None:
            txn.remove(old, "replaced")
        txn.insert(located)


def _make_room(txn: IndexTxn, parts: Parts, num_blocks: int) -> int:
    """Make room for the index pages that a transaction changed; return the bytes they may take.

    The index that was set aside is dropped first. Then the longest unused blocks are evicted: their
    bytes are erased at once, and their extents become pending.
    """
    space = parts.space
    needed_bytes = min(txn.used_bytes(), _MOST_BYTES_A_BLOCK * num_blocks)
    needed_bytes = parts.files.filesystem.spread_bytes(needed_bytes)
    if space.room_bytes < needed_bytes:
        parts.folder.drop_set_aside()
        space.measure()
    short_bytes, victims = needed_bytes - space.room_bytes, list[Located]()
    for block_hash in txn.longest_unused():
        if short_bytes <= 0:
            break
        if (victim := txn.get(block_hash)) is not None:
            victims.append(victim)
            short_bytes -= victim.extent_bytes
    parts.room.note_evicted(txn, victims)
    for victim in victims:
        parts.files.erase(victim.extent)
        txn.remove(victim, "capacity")
    return needed_bytes


def _from_records(parts: Parts, txn: IndexTxn, known: Segments) -> Iterator[Found]:
    """Walk over the sound records, then over the other extents of the segments that it knows.

    If several records claim the same extent, all are left out, as at most one can be right. Extents
    that are lent belong to no block.
    """
    lent, most = parts.allocator.lent, parts.index.most_records()
    claims = Counter(chain(lent, (it.extent for _, it in islice(txn.blocks(), most) if it)))
    ends = {segment: state.num_used for segment, state in known.items()}
    found = (each for _, each in islice(txn.blocks(), most) if each)
    blocks = (each for each in found if each.extent.number < ends.get(each.extent.segment, 0))
    for some in cut(blocks, _BATCH_EXTENTS):
        yield [each for each in some if claims[each.extent] == 1], [each.extent for each in some]
    rest = ({*_extents_of(known)} - claims.keys()) | lent.keys()
    for extents in cut(rest, _BATCH_EXTENTS):
        yield [], extents


def _from_headers(
    parts: Parts, txn: IndexTxn, unknown: Segments, progress: OpeningProgress
) -> Iterator[Found]:
    """Walk over the extents of segments that the index does not know, and tell of it."""
    num_read, num_extents = 0, sum(state.num_used for state in unknown.values())
    with ThreadPoolExecutor(_HEADER_THREADS) as pool:
        for extents in cut(_extents_of(unknown), _BATCH_EXTENTS):
            progress(num_read, num_extents)
            if num_read % _REPORTED_EXTENTS == 0:
                text = "the index is being rebuilt from extent headers: %d of %d extents read"
                logger.warning(text, num_read, num_extents)
            num_read += len(extents)
            yield _stored_in(parts, txn, pool, extents), extents


# --- segments -------------------------------------------------------------------------------------


def _known_segments(parts: Parts, txn: IndexTxn) -> dict[int, SegmentState]:
    """Return the segments that the index knows and that have files, as far as the files go.

    What an index says of their lengths is not believed: a forged one may name billions of extents.
    """
    files, found = parts.files, dict[int, SegmentState]()
    most_bytes = _most_file_bytes(parts)
    for segment, state in txn.segments().items():
        if segment in files:
            extent_bytes = files.extent_bytes(segment)
            size_bytes = min(files.size_bytes(segment), max(most_bytes, extent_bytes))
            ends = (min(each, size_bytes // extent_bytes) for each in state[1:])
            found[segment] = SegmentState(extent_bytes, *ends)
    return found


def _most_file_bytes(parts: Parts) -> int:
    """Return the size that no segment file exceeds under this budget or an earlier one."""
    return largest_file_bytes(max(parts.space.budget_bytes, parts.files.all_bytes()))


def unknown_segments(parts: Parts) -> dict[int, SegmentState]:
    """Open the segment files that the index does not know, and return those that hold blocks.

    A file without a stored block is removed, as a crash can leave one, and so is one that is longer
    than segments become. Holes take no time, however long they are.
    """
    files, found = parts.files, dict[int, SegmentState]()
    most_bytes = _most_file_bytes(parts)
    with parts.index.reading() as txn, ThreadPoolExecutor(_HEADER_THREADS) as pool:
        known = txn.segments()
        for segment, extent_bytes in files.found().items():
            if segment not in files:
                files.open(segment, extent_bytes)
            if segment in known:
                continue
            is_short = files.size_bytes(segment) <= max(most_bytes, extent_bytes)
            written = [Extent(segment, n) for n in files.written(segment)] if is_short else []
            if any(_stored_in(parts, txn, pool, some) for some in cut(written, TXN_BLOCKS)):
                num_used = written[-1].number + 1
                files.truncate(segment, num_used)
                found[segment] = SegmentState(extent_bytes, num_used, num_used)
            else:
                files.remove(segment)
    return found


def _stored_in(
    parts: Parts, txn: IndexTxn, pool: ThreadPoolExecutor, extents: Iterable[Extent]
) -> list[Located]:
    """Read the headers of extents in files that the index does not know; return what is stored.

    An extent that the index lists as free or pending, or whose block it has elsewhere, holds no
    stored block, whatever its header says.
    """
    now, stored = parts.clock.now(), list[Located]()
    for found in filter(None, pool.map(parts.payloads.header_at, extents)):
        located = txn.sound(found.record.block_hash) or found
        is_here = located.extent == found.extent and not txn.is_listed(found.extent)
        if is_here and now < located.record.expires_at:
            stored.append(located)
    return stored


def _extents_of(segments: Segments) -> Iterator[Extent]:
    """Walk over all extents of these segments that were ever handed out."""
    return (Extent(s, number) for s, state in segments.items() for number in range(state.num_used))
