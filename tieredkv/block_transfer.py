"""Copies between device blocks and host pages, on streams of their own.

It knows streams and events; it does not know hashes, or why a block moves. A tag given with a copy
comes back from `poll` once the bytes have arrived, never before: the caller holds source and
destination until then.

Called by the engine's thread only.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

import torch

from tieredkv.kernels.copies import BlockCopier
from tieredkv.types import BlockId, PageId

Tag = TypeVar("Tag")


MIN_SPLIT_BYTES = 32 << 20
"""Smaller promotions are over before their first layers could be of use."""


class _Pending(NamedTuple, Generic[Tag]):
    """A copy under way; `early` is there before `event` where the bytes come in two parts."""

    event: torch.cuda.Event | None
    tag: Tag
    early: torch.cuda.Event | None = None


class BlockTransfer(Generic[Tag]):
    """Moves blocks both ways without stalling the compute stream.

    On CUDA each direction has a stream that first waits for what the compute stream was given so
    far: a block about to be overwritten may still be read by a running kernel, and a block about
    to be copied out may still be written by one. Elsewhere a copy is done when the call returns.

    A large promotion comes in two parts, the first layers of every block and then the late ones: a
    forward pass that waits for `late_event` before the latter may start with the former.

    A copy that was started is pending until `poll` reports it.
    """

    def __init__(self, copier: BlockCopier, *, early_bytes: int | None = None) -> None:
        """Bind a copier.

        Args:
            copier: of the two memories.
            early_bytes: of one block's first layers; None if no forward pass starts with them.
        """
        self._copier = copier
        self._early_bytes = early_bytes
        self._num_usable = 0
        is_cuda = copier.device.type == "cuda"
        self._in_stream = torch.cuda.Stream(copier.device) if is_cuda else None
        self._out_stream = torch.cuda.Stream(copier.device) if is_cuda else None
        self._promotions: deque[_Pending[Tag]] = deque()
        self._demotions: deque[_Pending[Tag]] = deque()

    @property
    def has_pending(self) -> bool:
        """Whether a copy has not been reported by `poll` yet."""
        return bool(self._promotions or self._demotions)

    @property
    def has_completed(self) -> bool:
        """Whether the next `poll` has something to report."""
        return any(
            queue and (queue[0].event is None or queue[0].event.query())
            for queue in (self._promotions, self._demotions)
        ) or any(
            pending.early is not None and pending.early.query()
            for pending in islice(self._promotions, self._num_usable, self._num_usable + 1)
        )

    def promote(self, pairs: Sequence[tuple[PageId, BlockId]], tag: Tag) -> None:
        """Start copying host pages into device blocks."""
        stream, early = self._in_stream, None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        split = self._early_bytes
        if split and stream and len(pairs) * self._copier.block_bytes >= MIN_SPLIT_BYTES:
            self._copier.copy_in(pairs, stream, slice(split))
            early = self._record(stream)
            self._copier.copy_in(pairs, stream, slice(split, None))
        else:
            self._copier.copy_in(pairs, stream)
        self._promotions.append(_Pending(self._record(stream), tag, early))

    def demote(self, pairs: Sequence[tuple[BlockId, PageId]], tag: Tag) -> None:
        """Start copying device blocks into host pages."""
        stream = self._out_stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._copier.copy_out(pairs, stream)
        self._demotions.append(_Pending(self._record(stream), tag))

    def poll_usable(self) -> list[Tag]:
        """Return the tags of promotions whose first layers have arrived since the last call."""
        tags = []
        for pending in islice(self._promotions, self._num_usable, None):
            if pending.early is None or not pending.early.query():
                break
            tags.append(pending.tag)
        self._num_usable += len(tags)
        return tags

    @property
    def late_event(self) -> torch.cuda.Event | None:
        """When the late layers of all that `poll_usable` has reported are there; None if they are.

        Ask after `poll`.
        """
        return self._promotions[self._num_usable - 1].event if self._num_usable else None

    def poll(self) -> tuple[list[Tag], list[Tag]]:
        """Return the tags of promotions and of demotions completed since the last call."""
        promoted, demoted = _completed(self._promotions), _completed(self._demotions)
        self._num_usable = max(0, self._num_usable - len(promoted))
        return promoted, demoted

    def synchronize(self) -> None:
        """Wait until everything started so far has arrived; `poll` then reports it."""
        for stream in (self._in_stream, self._out_stream):
            if stream is not None:
                stream.synchronize()

    def _record(self, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        if stream is None:
            return None
        event = torch.cuda.Event()
        event.record(stream)
        return event


def _completed(pending: deque[_Pending[Tag]]) -> list[Tag]:
    """Take what has completed off the front; copies of one direction finish in order."""
    tags = []
    while pending and (pending[0].event is None or pending[0].event.query()):
        tags.append(pending.popleft().tag)
    return tags
