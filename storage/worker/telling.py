"""Tells the engine which blocks the store has, which have come since, and which have gone.

After a start all blocks are told, some at a time and in the order of their names, and once more
after the index was made again. Changes are told as soon as they are made. One thread makes the
changes, reads what is told and tells it, so that what is told last of a block is how it is.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tieredkv.storage.format.record import BLOCK_AT, RECORD_BYTES, SEAL_BYTES
from tieredkv.storage.index.transaction import Left, batches
from tieredkv.storage.messages.engine import HIDDEN_HEAD_BYTES
from tieredkv.storage.ownership import owned_by
from tieredkv.storage.store import Store
from tieredkv.storage.worker.fault_log import FaultLog
from tieredkv.storage.worker.loop import Loop
from tieredkv.tier import FINGERPRINT_BYTES, Gone, Held

_PIECE_BLOCKS, _STEP_BLOCKS = 2048, 256
_PIECE_S = 0.002  # on an index that is not in memory yet, a piece has fewer blocks
_PAUSES = 10  # each pause lasts this many times the piece before it
_AGAIN_S = 1.0  # after a failure
_UNREAD_S = 0.01  # until the engine has read the pieces before


@dataclass(eq=False)
class Telling:
    """What one worker tells of its blocks; only the index thread uses it.

    Args:
        store: where blocks are stored.
        loop: of the index thread.
        log: told of failures.
        is_read: returns whether the engine has read what it was told.
        tell: has the engine told, in the order of the calls.
        is_on: whether the engine wants to know.
    """

    store: Store
    loop: Loop
    log: FaultLog
    is_read: Callable[[], bool]
    tell: Callable[[Held | Gone], None]
    is_on: bool
    _num_rebuilds: int = 0  # of the index that is told
    _last: bytes = b""  # the last name that was told
    _next_at: float = field(default_factory=time.monotonic)  # infinite once all are told

    def __post_init__(self) -> None:
        is_hidden = bool(self.store.parts.key_use.names_key)
        self._head_bytes = HIDDEN_HEAD_BYTES if is_hidden else FINGERPRINT_BYTES
        if not self.is_on:
            self._next_at = math.inf

    @property
    @owned_by("loop")
    def wait_s(self) -> float:
        """Seconds until the next piece."""
        return max(0.0, self._next_at - time.monotonic())

    @owned_by("loop")
    def tell_held(self) -> None:
        """Tell blocks that were stored, or got another expiry, since the last call."""
        if held := self.store.take_held():
            self.tell(Held.of(held, self._head_bytes))

    @owned_by("loop")
    def tell_changes(self) -> None:
        """Tell what has changed since the last call."""
        self.tell_held()
        self._tell_gone()

    @owned_by("loop")
    def step(self) -> None:
        """Tell what has changed since the last call, then the next blocks of all if it is time."""
        self.tell_changes()
        if self.is_on and self.store.num_rebuilds > self._num_rebuilds:
            self._num_rebuilds, self._last = self.store.num_rebuilds, b""
            self._next_at = time.monotonic()
        if (began_at := time.monotonic()) < self._next_at:
            return
        if not self.is_read():
            self._next_at = began_at + _UNREAD_S
            return
        self._next_at = began_at + _AGAIN_S
        if (piece := self.log.attempt("table", self._next_piece)) is not None:
            self.log.note_works("table")
            self.tell(piece)
            now = time.monotonic()
            self._next_at = math.inf if piece.is_whole else now + _PAUSES * (now - began_at)

    def _tell_gone(self) -> None:
        left = defaultdict[str, list[Left]](list)
        for each in self.store.take_gone():
            left[each.reason].append(each)
        for reason, blocks in left.items():
            for some in batches(blocks):
                num_bytes = sum(each.extent_bytes for each in some)
                self.tell(Gone([each.block_hash for each in some], reason, num_bytes))

    def _next_piece(self) -> Held | None:
        """Read the next blocks, those that have expired left out.

        Returns None on a damaged page, where the walk might never end: the index is made again.

        Raises:
            StorageError: the index cannot be read.
        """
        parts, is_first, found = self.store.parts, not self._last, list[tuple[bytes, bytes]]()
        until = time.monotonic() + _PIECE_S
        with parts.index.reading() as txn:
            records, num_blocks = txn.records(self._last + b"\0"), txn.meta.totals.num_blocks
            while some := [*islice(records, _STEP_BLOCKS)]:
                found += some
                if len(found) >= _PIECE_BLOCKS or time.monotonic() > until:
                    break
        before, self._last = self._last, found[-1][0] if found else self._last
        if found and self._last <= before:
            self._next_at = math.inf
            self.store.ask_for_rebuild()
            return None
        heads, expires_at = _heads_in([record for _, record in found], self._head_bytes)
        seconds = np.ceil(np.nan_to_num(expires_at))
        is_kept = seconds > parts.clock.now()
        return Held(
            fingerprints=np.frombuffer(heads, f"V{self._head_bytes}")[is_kept].tobytes(),
            seconds=np.minimum(seconds[is_kept], 0xFFFF_FFFF).astype("<u4").tobytes(),
            is_first=is_first,
            is_whole=not some,
            num_blocks=num_blocks,
        )


def _heads_in(records: Sequence[bytes], num_bytes: int) -> tuple[bytes, NDArray[np.float64]]:
    """Read the first bytes of the hashes of blocks, side by side, and when each block expires.

    What is as long as no record is left out; nothing else is checked.
    """
    data = b"".join([each for each in records if len(each) == RECORD_BYTES])
    rows = np.frombuffer(data, np.uint8).reshape(-1, RECORD_BYTES)
    heads = rows[:, BLOCK_AT : BLOCK_AT + num_bytes].tobytes()
    return heads, np.frombuffer(rows[:, SEAL_BYTES:BLOCK_AT].tobytes(), "<f8")
