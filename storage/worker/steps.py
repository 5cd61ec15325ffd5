"""Long work on a store, in short steps between which other work goes on.

What is deleted and checked for operators, and how many blocks are of another model. A generator's
steps are taken by the index thread, except where its docstring says otherwise. Whoever takes them
decides how many at once, and when.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, count, pairwise
from threading import Event
from typing import TypeVar

from tieredkv.errors import ConfigError, StorageError
from tieredkv.hashing import ModelIdentity
from tieredkv.pieces import Pieces
from tieredkv.storage.format.record import Extent, Located
from tieredkv.storage.index.environment import Index
from tieredkv.storage.index.transaction import IndexTxn, batches
from tieredkv.storage.messages.operator import Checked, Delete, Deleted, Verify
from tieredkv.storage.store import Store
from tieredkv.tier import OPERATOR

_EXTENTS_A_STEP = 64
_PAUSES = 10  # each pause of `count_others` lasts this many times the step before it
_MAX_PAUSE_S = 0.5

Entry = TypeVar("Entry")
Entries = Sequence[tuple[bytes, Entry]]
"""Names of blocks, and what was read of them."""


class DisorderError(Exception):
    """Names do not ascend, as on a damaged page, where a walk might never end."""


def walking(
    index: Index,
    read: Callable[[IndexTxn, bytes], Entries[Entry]],
    last: bytes = b"",
    rest: Callable[[], None] = lambda: None,
) -> Iterator[Entries[Entry]]:
    """Walk over all entries and yield some of them at a time; others may come and go in between.

    Args:
        index: of the blocks.
        read: reads some entries from a name on, in their order.
        last: the name behind which the walk begins.
        rest: called before each step.

    Raises:
        DisorderError
    """
    while True:
        rest()
        with index.reading() as txn:
            entries = read(txn, last + b"\0")
        if not entries:
            return
        if any(name >= other for name, other in pairwise([last, *(name for name, _ in entries)])):
            raise DisorderError
        yield entries
        last, _ = entries[-1]


def _named(index: Index, starts: list[bytes]) -> Iterator[Entries[Located | None]]:
    """Yield the entries whose names begin so, some at a time, in the order of `starts`."""
    for some in batches(starts):
        with index.reading() as txn:
            found = [next(txn.entries_of(start), None) for start in some]
            entries = [(name, txn.sound(name)) for name, _ in filter(None, found)]
        yield entries


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
    with suppress(DisorderError):
        for entries in walking(index, IndexTxn.some_blocks):
            for record in (located.record for _, located in entries if located is not None):
                if (root := roots.get(record.namespace)) is None:
                    root = roots[record.namespace] = model.root(record.namespace)
                num_others += record.root != root and now < record.expires_at
            if is_over.wait(min(_PAUSES * (time.monotonic() - begin), _MAX_PAUSE_S)):
                return None
            begin = time.monotonic()
        return num_others
    return None


def is_of_whole_namespaces(asked: Delete) -> bool:
    """Return whether namespaces are deleted as a whole, whatever the age of their blocks."""
    is_of_some = asked.starts is not None or asked.unused_since is not None or asked.expired
    return not is_of_some and not asked.dry_run


def deleting(store: Store, asked: Delete) -> Pieces[Deleted]:
    """Drop and erase blocks.

    A namespace that is deleted as a whole loses its keys first, while no write of its blocks may be
    under way or begin. Its blocks, which nothing can read from then on, leave the index after that,
    and their bytes are erased last.
    """
    index, key_use = store.parts.index, store.parts.key_use
    now, prefix = store.parts.clock.now(), asked.namespace.lower()
    num_blocks = window_pages = freed_bytes = 0
    is_whole = is_of_whole_namespaces(asked)
    keys = key_use.in_namespaces(prefix) if is_whole else []
    key_ids, keys_error = {key.id for key in keys}, ""
    with suppress(StorageError):  # the blocks go nevertheless, and the keys after them
        yield from key_use.dropping(keys)

    def is_meant(located: Located) -> bool:
        record = located.record
        has_expired = record.expires_at <= now
        return (
            (is_whole or has_expired == asked.expired)
            and (asked.unused_since is None or record.last_used <= asked.unused_since)
            and record.namespace.hex().startswith(prefix)
        )

    walk = walking(index, IndexTxn.some_blocks)
    try:
        for entries in walk if asked.starts is None else _named(index, asked.starts):
            doomed = [it for _, it in entries if it is not None and is_meant(it)]
            if doomed and not asked.dry_run:
                doomed = store.drop([it.record.block_hash for it in doomed], OPERATOR)
                key_ids |= key_use.ids_of(doomed)
            counted = [it for it in doomed if asked.expired or it.record.expires_at > now]
            freed_bytes += sum(it.extent_bytes for it in counted)
            num_pages = sum(it.record.kind > 0 for it in counted)
            num_blocks += len(counted) - num_pages
            window_pages += num_pages
            yield
    except DisorderError:
        store.ask_for_rebuild()
    if not asked.dry_run:
        failed = yield from store.clearing()
        keys_error = "" if failed is None else str(failed)
    kept_ids = key_use.known(key_ids)
    erased, kept = (sorted(map(bytes.hex, each)) for each in (key_ids - kept_ids, kept_ids))
    return Deleted(num_blocks, window_pages, freed_bytes, erased, kept, keys_error)


def taking_strays(store: Store, names: Sequence[bytes], *, repair: bool) -> Pieces[int]:
    """Return of how many of these pages the block is not there; drop and erase them to repair."""
    num_strays = 0
    for some in batches(names):
        with store.parts.index.reading() as txn:
            found = filter(None, map(txn.sound, some))
            strays = [each.record.block_hash for each in found if txn.is_stray(each)]
        num_strays += len(strays)
        if repair:
            store.drop(strays, OPERATOR)
        yield
    if repair:
        yield from store.clearing()
    return num_strays


def checking_index(store: Store, *, is_whole: bool, repair: bool) -> Pieces[bool]:
    """Check the index against itself, and make it again if it contradicts itself.

    Args:
        store: of the index.
        is_whole: whether the entries of all blocks were whole.
        repair: whether the index is made again.

    Returns whether it was sound.
    """
    index = store.parts.index
    for is_sound in chain(index.reading_ahead(), index.looking_over()):
        if not (is_whole := is_whole and is_sound):
            break
        yield
    if repair and not is_whole:
        store.rebuild()
    return is_whole


def checking_extents(store: Store, asked: Verify) -> Pieces[Checked]:
    """Look for what should be erased: in the key table, the index, and all extents ever used.

    The header of an extent is read whatever the index says of it. Copies of the folder are not
    seen, nor bytes that a device keeps of what was overwritten.

    Raises:
        ConfigError: the store is not encrypted.
    """
    parts, key_store = store.parts, store.parts.key_use.keys
    if key_store is None:
        raise ConfigError(f"the store at `{parts.folder.path}` is not encrypted, so it has no keys")
    prefix, key_id = asked.erased_namespace.lower(), bytes.fromhex(asked.erased_key)
    keys = blocks = extents = checked = 0
    with parts.index.reading() as txn:
        segments = [*txn.segments()]
        if prefix:
            keys = len(parts.key_use.in_namespaces(prefix))
            totals = txn.namespaces().items()
            blocks = sum(it.num_blocks for ns, it in totals if ns.hex().startswith(prefix))
        elif (key := key_store.table.of_id(key_id)) is not None:
            keys, blocks = 1, txn.num_encrypted(key.scope)
    for segment in segments:
        for start in count(0, _EXTENTS_A_STEP):
            with parts.index.reading() as txn:
                state = txn.get_segment(segment)
            num_used = 0 if state is None else min(state.num_used, parts.files.num_extents(segment))
            if start >= num_used:
                break
            for number in range(start, min(start + _EXTENTS_A_STEP, num_used)):
                located, found_id = parts.payloads.stored_at(Extent(segment, number))
                namespace = "" if located is None else located.record.namespace.hex()
                extents += namespace.startswith(prefix) if prefix else found_id == key_id
                checked += 1
            yield
    return Checked(checked, keys=keys, blocks=blocks, extents=extents)
