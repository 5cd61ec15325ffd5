"""Deletes blocks for an operator, in steps between which other work goes on; on the index thread.

A namespace that is deleted as a whole loses its keys first. Its blocks, which nothing can read from
then on, leave the index after that, and their bytes are erased last.
"""

from collections.abc import Generator, Iterator
from contextlib import suppress
from itertools import islice

from tieredkv.errors import StorageError
from tieredkv.storage.format.record import Located
from tieredkv.storage.index.transaction import batches
from tieredkv.storage.messages.operator import Delete, Deleted
from tieredkv.storage.store import BlockStore


def deleting(
    store: BlockStore, asked: Delete, *, keys_first: bool = False
) -> Generator[None, None, Deleted]:
    """Drop and erase blocks, in steps.

    Args:
        store: the store.
        asked: which blocks.
        keys_first: destroy the keys of the namespaces before anything else. No write of theirs may
            be under way, and none may begin.
    """
    now, prefix = store.clock.now(), asked.namespace.lower()
    num_blocks = freed_bytes = 0
    key_ids, keys_error = set[bytes](), ""
    if keys_first:
        keys = store.key_use.in_namespaces(prefix)
        key_ids |= {key.id for key in keys}
        with suppress(StorageError):  # the blocks go nevertheless, and the keys after them
            store.key_use.drop(keys)
        yield

    def is_meant(located: Located) -> bool:
        record = located.record
        has_expired = record.expires_at <= now
        return (
            (keys_first or has_expired == asked.expired)
            and (asked.unused_since is None or record.last_used <= asked.unused_since)
            and record.namespace.hex().startswith(prefix)
        )

    for some in _batches_of(store, asked):
        doomed = [each for each in some if is_meant(each)]
        counted = [each for each in doomed if asked.expired or each.record.expires_at > now]
        freed_bytes += sum(each.extent_bytes for each in counted)
        num_blocks += len(counted)
        if doomed and not asked.dry_run:
            key_ids |= store.key_use.ids_of(doomed)
            store.delete([each.record.block_hash for each in doomed], asked.reason)
        yield
    if not asked.dry_run:
        failed = yield from store.clearing()
        keys_error = "" if failed is None else str(failed)
    kept_ids = store.key_use.known(key_ids)
    erased, kept = (sorted(map(bytes.hex, each)) for each in (key_ids - kept_ids, kept_ids))
    return Deleted(num_blocks, freed_bytes, erased, kept, keys_error)


def _batches_of(store: BlockStore, asked: Delete) -> Iterator[list[Located]]:
    """Yield sound entries: the named ones in their order, or all."""
    if asked.starts is None:
        for entries in walking(store):
            yield [located for _, located in entries if located is not None]
        return
    for starts in batches(asked.starts):
        with store.index.reading() as txn:
            named = [next(islice(txn.entries_of(start), 1), None) for start in starts]
            found = [txn.sound(each[0]) for each in named if each is not None]
        yield [located for located in found if located is not None]


def walking(store: BlockStore) -> Iterator[list[tuple[bytes, Located | None]]]:
    """Walk over all entries and yield some of them at a time; others may come and go in between.

    The walk ends where a name is smaller than the one before it, as on a damaged page: it might
    never end otherwise.
    """
    start = b""
    while True:
        with store.index.reading() as txn:
            entries = txn.some_blocks(start)
        names = [start, *(name for name, _ in entries)]
        if names != sorted(names):
            return store.ask_for_rebuild()
        if not entries:
            return None
        yield entries
        start = names[-1] + b"\0"
