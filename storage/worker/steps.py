"""Long work on a store, in short steps between which other work goes on.

What is deleted and checked for operators, and how many blocks are of another model. A generator's
steps are taken by the index thread, except where its docstring says otherwise. Whoever takes them
decides how many at once, and when.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from threading import Event
from typing import Any

from tieredkv.errors import ConfigError, CorruptBlockError, StorageError
from tieredkv.hashing import ModelIdentity
from tieredkv.storage.faults import reason_of
from tieredkv.storage.format.planes import aligned_buffer
from tieredkv.storage.format.record import Extent, Located, padded_bytes
from tieredkv.storage.index.entries import SegmentState, extent_key, split_extent_key
from tieredkv.storage.index.environment import Index
from tieredkv.storage.index.transaction import batches
from tieredkv.storage.messages.operator import Checked, Delete, Deleted, Verify
from tieredkv.storage.store import Store

_STEP_S = 0.1  # of checking, after which the operator is told
_EXTENTS_A_STEP = 64
_PAUSES = 10  # each pause of `count_others` lasts this many times the step before it
_MAX_PAUSE_S = 0.5

Entries = list[tuple[bytes, Located | None]]
"""Names of blocks and what the index has of them; None for a damaged entry."""


class _DisorderError(Exception):
    """Names do not ascend, as on a damaged page, where a walk might never end."""


def _in_order(start: bytes, entries: Entries) -> Entries:
    """Return entries that begin at a name.

    Raises:
        _DisorderError: they are not in the order of their names.
    """
    names = [start, *(name for name, _ in entries)]
    if names != sorted(names):
        raise _DisorderError
    return entries


def _walking(index: Index) -> Iterator[Entries]:
    """Walk over all entries and yield some of them at a time; others may come and go in between.

    Raises:
        _DisorderError
    """
    start = b""
    while True:
        with index.reading() as txn:
            entries = _in_order(start, txn.some_blocks(start))
        if not entries:
            return
        yield entries
        start = entries[-1][0] + b"\0"


def count_others(index: Index, model: ModelIdentity, now: float, is_over: Event) -> int | None:
    """Count the blocks on disk of other models, which this one can never use; for any thread.

    A block's root is a digest of the model and of the namespace. The blocks of an older version of
    tieredkv that computed the model's fingerprint in another way are of another model, too. A pause
    follows each step, since this competes with lookups for the interpreter's lock.

    Args:
        index: of the store.
        model: of the engine.
        now: blocks that have expired by this time do not count.
        is_over: set to end early.

    Returns None if the end came early, or if a damaged page cut the walk short.

    Raises:
        StorageError: the index cannot be read.
    """
    roots, num_others, begin = dict[bytes, bytes](), 0, time.monotonic()
    with suppress(_DisorderError):
        for entries in _walking(index):
            for record in (located.record for _, located in entries if located is not None):
                if (root := roots.get(record.namespace)) is None:
                    root = roots[record.namespace] = model.root(record.namespace)
                num_others += record.root != root and now < record.expires_at
            if is_over.wait(min(_PAUSES * (time.monotonic() - begin), _MAX_PAUSE_S)):
                return None
            begin = time.monotonic()
        return num_others
    return None


# --- deleting -------------------------------------------------------------------------------------


def is_of_whole_namespaces(asked: Delete) -> bool:
    """Return whether namespaces are deleted as a whole, whatever the age of their blocks."""
    is_of_some = asked.starts is not None or asked.unused_since is not None or asked.expired
    return not is_of_some and not asked.dry_run


def deleting(store: Store, asked: Delete) -> Generator[None, None, Deleted]:
    """Drop and erase blocks.

    A namespace that is deleted as a whole loses its keys first, while no write of its blocks may be
    under way or begin. Its blocks, which nothing can read from then on, leave the index after that,
    and their bytes are erased last.
    """
    parts = store.parts
    now, prefix = parts.clock.now(), asked.namespace.lower()
    num_blocks = freed_bytes = 0
    key_ids, keys_error = set[bytes](), ""
    if is_whole := is_of_whole_namespaces(asked):
        keys = parts.key_use.in_namespaces(prefix)
        key_ids |= {key.id for key in keys}
        with suppress(StorageError):  # the blocks go nevertheless, and the keys after them
            yield from parts.key_use.dropping(keys)

    def is_meant(located: Located) -> bool:
        record = located.record
        has_expired = record.expires_at <= now
        return (
            (is_whole or has_expired == asked.expired)
            and (asked.unused_since is None or record.last_used <= asked.unused_since)
            and record.namespace.hex().startswith(prefix)
        )

    walk = (
        _walking(store.parts.index)
        if asked.starts is None
        else _named(store.parts.index, asked.starts)
    )
    try:
        for entries in walk:
            doomed = [it for _, it in entries if it is not None and is_meant(it)]
            counted = [it for it in doomed if asked.expired or it.record.expires_at > now]
            freed_bytes += sum(it.extent_bytes for it in counted)
            num_blocks += len(counted)
            if doomed and not asked.dry_run:
                key_ids |= parts.key_use.ids_of(doomed)
                store.drop([it.record.block_hash for it in doomed], asked.reason)
            yield
    except _DisorderError:
        store.ask_for_rebuild()
    if not asked.dry_run:
        failed = yield from store.clearing()
        keys_error = "" if failed is None else str(failed)
    kept_ids = parts.key_use.known(key_ids)
    erased, kept = (sorted(map(bytes.hex, each)) for each in (key_ids - kept_ids, kept_ids))
    return Deleted(num_blocks, freed_bytes, erased, kept, keys_error)


def _named(index: Index, starts: list[bytes]) -> Iterator[Entries]:
    """Yield the entries whose names begin so, some at a time, in the order of `starts`."""
    for some in batches(starts):
        with index.reading() as txn:
            found = [next(txn.entries_of(start), None) for start in some]
            entries = [(name, txn.sound(name)) for name, _ in filter(None, found)]
        yield entries


# --- checking -------------------------------------------------------------------------------------

AtOnce = Callable[[Callable[[], Any]], Any]
"""Has the index thread make a call, and returns its result."""


def check_blocks(store: Store, asked: Verify, at_once: AtOnce, rest: Callable[[], None]) -> Checked:
    """Read some payloads, or a sample of them, and compare them; on the operator's own thread.

    Args:
        store: the store.
        asked: where to begin, and whether bad blocks are dropped.
        at_once: has the index thread make a call.
        rest: called between blocks.
    """
    by_reason, after, checked, repaired = Counter[str](), asked.after, 0, 0
    is_whole, is_last, page = True, False, memoryview(b"")
    end = time.monotonic() + _STEP_S
    while not is_last and time.monotonic() < end:
        rest()
        try:
            with store.parts.index.reading() as txn:
                entries = _in_order(after, txn.some_blocks(after))
                # In the same state of the index, as blocks may change at any time.
                are_whole = [it is not None and txn.is_whole(it) for _, it in entries]
        except _DisorderError:
            at_once(store.ask_for_rebuild)
            entries, are_whole = [], []
        is_last = not entries
        for (name, located), is_so in zip(entries, are_whole, strict=True):
            after = name + b"\0"
            if random.random() >= asked.sample:
                continue
            if located is not None and store.parts.clock.now() >= located.record.expires_at:
                continue
            checked += 1
            is_whole = is_whole and is_so
            if located is None:
                by_reason["record"] += 1
                repaired += asked.repair
                continue
            if len(page) < (size := padded_bytes(located.record.size_bytes)):
                page = aligned_buffer(size)
            rest()
            try:
                store.read(located, page)
            except StorageError as error:
                judge = partial(_judge, store, located, error, repair=asked.repair)
                is_bad, is_repaired = at_once(judge)
                by_reason.update([reason_of(error)] if is_bad else [])
                repaired += is_repaired
            if time.monotonic() >= end:
                break
    return Checked(checked, dict(by_reason), repaired, is_whole, after, is_last)


def _judge(
    store: Store, located: Located, error: StorageError, *, repair: bool
) -> tuple[bool, bool]:
    """Return whether a block that could not be read is bad, and whether it was dropped.

    It may have left the store while it was read.
    """
    with store.parts.index.reading() as txn:
        current = txn.sound(located.record.block_hash)
    is_bad = current is not None and current[1:] == located[1:]
    is_repaired = is_bad and repair and isinstance(error, CorruptBlockError)
    if is_repaired:
        store.drop_bad(located)
    return is_bad, is_repaired


def checking_index(store: Store, asked: Verify) -> Generator[None, None, Checked]:
    """Check the index against itself, and make it again if it contradicts itself."""
    is_whole = asked.is_whole
    index = store.parts.index
    for is_sound in chain(index.reading_ahead(), index.looking_over()):
        if not (is_whole := is_whole and is_sound):
            break
        yield
    if is_whole:
        return Checked(is_last=True)
    if asked.repair:
        store.rebuild()
    return Checked(by_reason={"index": 1}, repaired=int(asked.repair), is_whole=False, is_last=True)


def checking_extents(store: Store, asked: Verify) -> Generator[None, None, Checked]:
    """Look for what should be erased: in the key table, the index, and all extents ever used.

    The header of an extent is read whatever the index says of it. Copies of the folder are not
    seen, nor bytes that a device keeps of what was overwritten.

    Raises:
        ConfigError: the store is not encrypted.
    """
    parts, key_store = store.parts, store.parts.key_use.keys
    if key_store is None:
        what = f"the store at `{parts.folder.path}` is not encrypted, so it has no keys"
        raise ConfigError(what)
    prefix, key_id = asked.erased_namespace.lower(), bytes.fromhex(asked.erased_key)
    keys = blocks = extents = checked = 0
    with store.parts.index.reading() as txn:
        segments = sorted(txn.segments().items())
        if not asked.after and prefix:
            keys = len(parts.key_use.in_namespaces(prefix))
            totals = txn.namespaces().items()
            blocks = sum(it.num_blocks for ns, it in totals if ns.hex().startswith(prefix))
        elif not asked.after and (key := key_store.table.of_id(key_id)) is not None:
            keys, blocks = 1, txn.num_encrypted(key.scope)
    first = split_extent_key(asked.after) if asked.after else Extent(0, 0)
    end = time.monotonic() + _STEP_S
    for place in _places(segments, first):
        if place.number % _EXTENTS_A_STEP == 0:
            yield
            if time.monotonic() > end and place != first:
                at = extent_key(place)
                return Checked(checked, next=at, keys=keys, blocks=blocks, extents=extents)
        if place.segment not in parts.files:
            continue
        located, found_id = parts.payloads.stored_at(place)
        checked += 1
        if prefix:
            extents += located is not None and located.record.namespace.hex().startswith(prefix)
        else:
            extents += found_id == key_id
    return Checked(checked, is_last=True, keys=keys, blocks=blocks, extents=extents)


def _places(segments: list[tuple[int, SegmentState]], first: Extent) -> Iterator[Extent]:
    """Return all extents that were ever used, from one on."""
    for segment, state in segments:
        start = first.number if segment == first.segment else 0
        if segment >= first.segment:
            yield from (Extent(segment, number) for number in range(start, state.num_used))
