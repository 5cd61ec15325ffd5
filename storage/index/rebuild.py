"""The one way to make a new index beside the old one, whatever it is made from.

A source tells which blocks there are: the records of the old index, or, where that is lost, the
headers of the extents. The new index has its own folder until it is complete, and then takes the
place of the old one. This takes time in proportion to the store.
"""

import errno
import logging
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain, islice
from typing import NamedTuple

from msgspec.structs import replace

from tieredkv.errors import CorruptIndexError, StorageError, StoreFullError
from tieredkv.storage.extents.files import SegmentFiles
from tieredkv.storage.folder.filesystem import lack_of_room
from tieredkv.storage.format.record import FORMAT_VERSION, Extent, Located, is_encrypted, scope_of
from tieredkv.storage.index.entries import SegmentState
from tieredkv.storage.index.environment import PAGE_BYTES, Index
from tieredkv.storage.index.transaction import IndexTxn
from tieredkv.storage.parts import Parts

logger = logging.getLogger(__name__)

_MOST_BYTES_A_BLOCK = 4 * PAGE_BYTES  # most index bytes that a transaction writes per block
_BATCH_EXTENTS = 4096  # per transaction, to limit memory and surplus growth of the index
_HEADER_THREADS = 16  # each read waits for the device; this many keep it busy
_REPORTED_EXTENTS = 25 * _BATCH_EXTENTS

OpeningProgress = Callable[[int, int], None]
"""Called with (extents read, extents in all) now and then while headers are read."""

Found = tuple[list[Located], list[Extent]]
"""Some blocks, and some extents; extents that belong to none of the blocks belong to no block."""


class Source(NamedTuple):
    """What a new index is made from.

    Attributes:
        name: for people.
        segments: the segments that it will know.
        batches: every block, and every extent that was ever handed out.
    """

    name: str
    segments: Mapping[int, SegmentState]
    batches: Generator[Found, None, None]


def rebuild(parts: Parts, source: Source, fault: str) -> None:
    """Fill a new index in batches of blocks, then put it in the place of the old one.

    A failure before that changes nothing, except that the blocks evicted to make room are already
    erased. Afterwards all pending extents are erased: one that is reused as it is gets no space set
    aside.

    Args:
        parts: of the store.
        source: what to make it from.
        fault: what is wrong with the old index, which is then counted, told, and set aside if it
            held anything; empty if nothing is.

    Raises:
        StoreFullError: the filesystem has no room for a new index.
    """
    index, folder, now = parts.index, parts.folder, parts.clock.now()
    with index.reading() as txn:
        old, holds_blocks = txn.meta, any(True for _ in txn.records())
    next_segment = max([old.next_segment, *(segment + 1 for segment in source.segments)])
    faults = {**old.faults, "index": old.faults.get("index", 0) + 1} if fault else old.faults
    meta = replace(old, format=FORMAT_VERSION, next_segment=next_segment, faults=faults)
    folder.make_draft()
    draft = Index(folder.draft_path, sync=index.sync, retentions=index.retentions)
    try:
        with draft.writing() as txn:
            txn.begin(meta, source.segments)
        with closing(source.batches) as batches:
            for stored, extents in batches:
                parts.space.measure()
                with draft.writing() as txn:
                    _fill(txn, [each for each in stored if now < each.record.expires_at], extents)
                    draft.keep_ahead(_make_room(txn, parts, len(stored)))
                    times = ((each.record.computed_at, each.record.last_used) for each in stored)
                    txn.saw_time(max(chain.from_iterable(times), default=0.0))
                    parts.failpoint("adopt:before")
        draft.flush()
        folder.take_draft(sets_aside=bool(fault) and (bool(old.format) or holds_blocks))
    except BaseException as error:
        is_short = parts.files.free_bytes() < parts.space.headroom_bytes
        draft.close()
        folder.drop_draft()
        if is_short and type(error) is StorageError:  # a page written in part is EIO for LMDB
            what = f"{lack_of_room(folder.path)} for a new index, which is made beside the old one"
            raise StoreFullError(errno.ENOSPC, what) from error
        raise
    index.become(draft)
    parts.allocator.reload()
    for _ in parts.allocator.erasing():
        pass
    if fault:
        text = "the index of `%s` was rebuilt from %s: %s"
        logger.warning(text, folder.path, source.name, fault)


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


def _make_room(txn: IndexTxn, parts: Parts, num_blocks: int) -> int:
    """Make room for the index pages that a transaction changed; return the bytes they may take.

    The index that was set aside is dropped first. Then the longest unused blocks are evicted: their
    bytes are erased at once, and their extents become pending.
    """
    space, allocator = parts.space, parts.allocator
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
    allocator.note_evicted(txn, victims)
    for victim in victims:
        allocator.erase(victim.extent)
        txn.remove(victim)
    return needed_bytes


def fault_of(index: Index) -> str:
    """Say how an index contradicts itself; empty if it does not."""
    try:
        with index.reading() as txn:
            found = txn.contradictions()
    except CorruptIndexError as error:
        return str(error)
    return f"it contradicts itself ({', '.join(found)})" if found else ""


# --- the two sources ----------------------------------------------------------------------------


def from_records(parts: Parts, dropped: Container[bytes] = ()) -> Source:
    """Return what the index is sure of, and what the headers in files unknown to it say.

    Blocks that are `dropped` are left out. If several records claim the same extent, none of them
    is kept, as at most one can be right. Nor is a block whose payload key is gone.
    """
    unknown = open_unknown(parts.files, parts.index)
    with parts.index.reading() as txn:
        segments = txn.segments() | unknown
    keys, lent = parts.files.keys, parts.allocator.lent

    def is_kept(located: Located) -> bool:
        if located.extent.segment not in segments or located.record.block_hash in dropped:
            return False
        is_sealed = is_encrypted(located.codec)
        scope = scope_of(located.record)
        return keys is None or (is_sealed and keys.of_scope(scope) is not None)

    def records() -> Generator[Found, None, None]:
        with parts.index.reading() as txn:
            claims = Counter(chain(lent, (each.extent for _, each in txn.blocks() if each)))
            kept = set[Extent]()
            blocks = (each for _, each in txn.blocks() if each and claims[each.extent] == 1)
            sound = filter(is_kept, blocks)
            while some := list(islice(sound, _BATCH_EXTENTS)):
                extents = [each.extent for each in some]
                kept.update(extents)
                yield some, extents
            others = {*_extents_of(segments), *lent} - kept
            strays = {each for each in others if each.segment in unknown}
            yield from _stray_blocks(parts, txn, sorted(strays))
            rest = iter(others - strays)
            while extents := list(islice(rest, _BATCH_EXTENTS)):
                yield [], extents

    return Source("its records", segments, records())


def from_headers(parts: Parts, progress: OpeningProgress) -> Source:
    """Return what the headers in all segment files say."""
    segments = open_unknown(parts.files, parts.index)

    def headers() -> Generator[Found, None, None]:
        num_read, num_extents = 0, sum(state.num_extents for state in segments.values())
        for found, batch in _read_headers(parts.files, _extents_of(segments)):
            progress(num_read, num_extents)
            if num_read % _REPORTED_EXTENTS == 0:
                text = "the index is being rebuilt from extent headers: %d of %d extents read"
                logger.warning(text, num_read, num_extents)
            num_read += len(batch)
            yield found, batch

    return Source("the extent headers", segments, headers())


# --- what the files hold ------------------------------------------------------------------------


def open_unknown(files: SegmentFiles, index: Index) -> dict[int, SegmentState]:
    """Open the segment files that the index does not know; every extent in them may be used."""
    with index.reading() as txn:
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


def hold_blocks(parts: Parts, unknown: Mapping[int, SegmentState]) -> bool:
    """Return whether segment files that the index does not know hold any stored block."""
    with parts.index.reading() as txn:
        return any(stored for stored, _ in _stray_blocks(parts, txn, _extents_of(unknown)))


def _stray_blocks(parts: Parts, txn: IndexTxn, extents: Iterable[Extent]) -> Iterator[Found]:
    """Read the headers of extents in files that the index does not know; return what is stored.

    An extent that the index lists as free or pending, or whose block it has elsewhere, holds no
    stored block, whatever its header says.
    """
    now, dropped = parts.clock.now(), {*txn.extents("free"), *txn.extents("pending")}
    for found, batch in _read_headers(parts.files, extents):
        stored = []
        for each in found:
            located = txn.sound(each.record.block_hash) or each
            is_here = located.extent == each.extent and each.extent not in dropped
            if is_here and now < located.record.expires_at:
                stored.append(located)
        yield stored, batch


def _extents_of(segments: Mapping[int, SegmentState]) -> Iterator[Extent]:
    """Walk over all extents of these segments that were ever handed out."""
    return (Extent(s, number) for s, state in segments.items() for number in range(state.num_used))


def _read_headers(files: SegmentFiles, extents: Iterable[Extent]) -> Iterator[Found]:
    """Read the headers of extents in batches; return the blocks that they name."""
    rest = iter(extents)
    with ThreadPoolExecutor(_HEADER_THREADS) as pool:
        while batch := list(islice(rest, _BATCH_EXTENTS)):
            yield [each for each in pool.map(files.header_at, batch) if each], batch
