"""Checks a store for an operator: its payloads, its index, and that nothing is left of a key.

Payloads are compared on the operator's thread, and the index on the index thread. What is bad is
dropped or made again by the index thread, if the operator wants that. The proof of erasure looks at
the key table, the index, and the header of every extent that was ever used, whatever the index says
of it. It sees no copies of the folder, and no bytes that a device keeps of what was overwritten.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Generator
from itertools import chain
from typing import Protocol, TypeVar

from tieredkv.errors import ConfigError, CorruptBlockError, StorageError
from tieredkv.storage.format.planes import aligned_buffer
from tieredkv.storage.format.record import Extent, Located, padded_bytes
from tieredkv.storage.index.entries import extent_key, split_extent_key
from tieredkv.storage.messages.operator import Checked, Verify
from tieredkv.storage.store import BlockStore, reason_of

_STEP_S = 0.1
_EXTENTS_A_STEP = 64

Result = TypeVar("Result")


class AtOnce(Protocol):
    """Has the index thread make a call."""

    def __call__(self, call: Callable[[], Result]) -> Result:
        """Return the result of the call."""


def check_blocks(
    store: BlockStore, asked: Verify, at_once: AtOnce, rest: Callable[[], None]
) -> Checked:
    """Read some payloads, or a sample of them, and compare them with their checksums.

    Args:
        store: the store.
        asked: where to begin, and whether bad blocks are dropped.
        at_once: has the index thread make a call.
        rest: called between blocks.
    """
    by_reason, after, checked, repaired = Counter[str](), asked.after, 0, 0
    is_whole, page, end = True, memoryview(b""), time.monotonic() + _STEP_S

    def told(*, is_last: bool) -> Checked:
        return Checked(checked, dict(by_reason), repaired, is_whole, after, is_last)

    while time.monotonic() < end:
        rest()
        with store.index.reading() as txn:
            entries = txn.some_blocks(after)
            # In the same state of the index, as blocks may change at any time.
            are_whole = [located is not None and txn.is_whole(located) for _, located in entries]
        names = [after, *(name for name, _ in entries)]
        if names != sorted(names):  # as on a damaged page: the walk might never end
            at_once(store.ask_for_rebuild)
            return told(is_last=True)
        if not entries:
            return told(is_last=True)
        for (name, located), is_so in zip(entries, are_whole, strict=True):
            after = name + b"\0"
            if random.random() >= asked.sample:
                continue
            if located is None:
                checked += 1
                by_reason["record"] += 1
                repaired += asked.repair
                is_whole = False
                continue
            if store.clock.now() >= located.record.expires_at:
                continue
            checked += 1
            is_whole = is_whole and is_so
            if len(page) < (size := padded_bytes(located.record.size_bytes)):
                page = aligned_buffer(size)
            rest()
            try:
                store.read_payload(located, page)
            except StorageError as error:
                bad = _Bad(store, located, error, repair=asked.repair)
                at_once(bad.judge)
                by_reason.update([reason_of(error)] if bad.is_so else [])
                repaired += bad.is_repaired
            if time.monotonic() >= end:
                break
    return told(is_last=False)


class _Bad:
    """A block that could not be read.

    Attributes:
        is_so: whether it is bad; it may have left the store while it was read.
        is_repaired: whether it was dropped.
    """

    def __init__(
        self, store: BlockStore, located: Located, error: StorageError, *, repair: bool
    ) -> None:
        self._store, self._located, self._error, self._repair = store, located, error, repair
        self.is_so = self.is_repaired = False

    def judge(self) -> None:
        """Find out; called by the index thread."""
        with self._store.index.reading() as txn:
            current = txn.sound(self._located.record.block_hash)
        self.is_so = current is not None and current[1:] == self._located[1:]
        self.is_repaired = (
            self.is_so and self._repair and isinstance(self._error, CorruptBlockError)
        )
        if self.is_repaired:
            self._store.drop_bad(self._located)


def checking_index(store: BlockStore, asked: Verify) -> Generator[None, None, Checked]:
    """Check the index against itself, and make it again if it contradicts itself, in steps."""
    is_whole = asked.is_whole
    for is_sound in chain(store.index.reading_ahead(), store.index.looking_over()):
        if not (is_whole := is_whole and is_sound):
            break
        yield
    if is_whole:
        return Checked(is_last=True)
    if asked.repair:
        store.make_index_again()
    return Checked(by_reason={"index": 1}, repaired=int(asked.repair), is_whole=False, is_last=True)


def checking_extents(store: BlockStore, asked: Verify) -> Generator[None, None, Checked]:
    """Look for what should be erased, in steps.

    Raises:
        ConfigError: the store is not encrypted.
    """
    if store.keys is None:
        raise ConfigError(f"the store at `{store.path}` is not encrypted, so it has no keys")
    prefix, key_id, table = asked.erased_namespace.lower(), b"", store.keys.table
    keys = blocks = extents = checked = 0
    with store.index.reading() as txn:
        if asked.after:
            key_id = b"" if prefix else bytes.fromhex(asked.erased_key)
        elif prefix:
            keys = sum(each.scope.hex().startswith(prefix) for each in table)
            totals = txn.namespaces().items()
            blocks = sum(it.num_blocks for ns, it in totals if ns.hex().startswith(prefix))
        elif (key := table.of_id(key_id := bytes.fromhex(asked.erased_key))) is not None:
            keys, blocks = 1, txn.num_encrypted(key.scope)
        segments = sorted(txn.segments().items())
    first = split_extent_key(asked.after) if asked.after else Extent(0, 0)
    end = time.monotonic() + _STEP_S
    for segment, state in segments:
        if segment < first.segment or segment not in store.files:
            continue
        start = first.number if segment == first.segment else 0
        for number in range(start, state.num_used):
            if number % _EXTENTS_A_STEP == 0:
                yield
                if segment not in store.files:  # it went meanwhile
                    break
                if time.monotonic() > end and (segment, number) != first:
                    at = extent_key(Extent(segment, number))
                    counts = (keys, blocks, extents)
                    return Checked(checked, {}, 0, True, at, False, *counts)
            located, found_id = store.files.stored_at(Extent(segment, number))
            checked += 1
            if prefix and located is not None:
                extents += located.record.namespace.hex().startswith(prefix)
            elif not prefix:
                extents += found_id == key_id
    return Checked(checked, {}, 0, True, b"", True, keys, blocks, extents)
