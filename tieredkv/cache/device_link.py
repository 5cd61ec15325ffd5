"""The link between VRAM and host memory: copies of blocks, on streams of their own.

This module knows streams and events. It does not know hashes, or why a block moves. `poll` returns
the tag of a copy once its bytes have arrived, never before. Until then the caller holds the source
and the destination.

Only the engine's thread may call it.
"""

import time
from collections import deque
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Generic, NamedTuple, TypeVar

import torch

from tieredkv.cache.link_rate import LinkRate
from tieredkv.cache.plan import LinkState
from tieredkv.kernels.copies import BlockCopier
from tieredkv.types import BlockId, PageId

Tag = TypeVar("Tag")


MAX_COPY_S = 0.25
"""How much may be on its way to VRAM, in seconds at its rate; the rest is held back for the plan.

Copies are fast, and the first layers of all that is copied at once are copied first, so that a step
may begin before the others have arrived.
"""

MEMORY_BYTES = 64 << 20
"""Bytes after which a measurement of copies has lost most of its weight.

A prompt of 2,048 tokens of an 8B model has 256 MiB, and events on the device time its copy exactly.
So the first prompts tell whether PCIe is slow, busy with something else, or free again.
"""

LEAST_SHARE = 0.1
"""Share of what was measured at the start that the link is taken to give at least.

So a link that is thought to be far too slow is still used, and what it moves corrects its rate.
"""

MIN_SPLIT_BYTES = 32 << 20
"""Promotions smaller than this are not split: they end before their first layers are of use."""

MIN_MEASURED_BYTES = 8 << 20
"""Promotions smaller than this teach nothing: that would be a measurement of latency."""


MEASURED_BYTES = 256 << 20
"""So much is copied at the start to time the link."""


class _Pending(NamedTuple, Generic[Tag]):
    """A copy under way.

    Attributes:
        event: after which all bytes have arrived; None if they have.
        early: event of the first part if the bytes come in two parts.
        num_bytes: how many bytes.
        began: event at which the stream came to the copy.
        seconds: how long it took, if it has ended.
    """

    event: torch.cuda.Event | None
    tag: Tag
    early: torch.cuda.Event | None = None
    num_bytes: int = 0
    began: torch.cuda.Event | None = None
    seconds: float = 0.0


class DeviceLink(Generic[Tag]):
    """Moves blocks both ways without stalling the compute stream.

    On CUDA each direction has a stream of its own. A step may still read a block that is about to
    be overwritten, or write one that is about to be copied out, so a copy first waits for the last
    step that uses its blocks; `note_step` numbers the steps. On other devices a copy is done when
    the call returns.

    A large promotion comes in two parts: the first layers of every block, then the late layers. A
    forward pass may start after the first part if it waits for `late_event` before the late layers.

    A copy that was started is pending until `poll` reports it.

    Attributes:
        up_rate: the rate of promotions; `poll` learns it from large ones.
        least_bytes_per_s: what it is taken to be at least.
        num_steps: steps that the compute stream was given so far.
    """

    def __init__(self, copier: BlockCopier, *, early_bytes: int | None = None) -> None:
        """Bind a copier.

        Args:
            copier: copies between the two memories.
            early_bytes: bytes of one block's first layers; None if promotions are never split.
        """
        self._copier = copier
        self._early_bytes = early_bytes
        self.up_rate = LinkRate(20e9, memory_bytes=MEMORY_BYTES)
        self.least_bytes_per_s = 0.0
        self.num_steps = 0
        self._steps: dict[int, torch.cuda.Event] = {}  # those that may not have ended, in order
        self._num_usable = 0
        is_cuda = copier.device.type == "cuda"
        self._in_stream = torch.cuda.Stream(copier.device) if is_cuda else None
        self._out_stream = torch.cuda.Stream(copier.device) if is_cuda else None
        self._promotions: deque[_Pending[Tag]] = deque()
        self._demotions: deque[_Pending[Tag]] = deque()
        self._moving_since: float | None = None  # the first promotion, as `poll` saw it

    @property
    def up_bytes_per_s(self) -> float:
        """The rate of promotions to plan with."""
        return max(self.up_rate.steady, self.least_bytes_per_s)

    @property
    def most_promotions(self) -> int:
        """How many blocks may be on their way to VRAM."""
        num_bytes = MAX_COPY_S * self.up_bytes_per_s
        return max(1, int(num_bytes / self._copier.block_bytes))

    def up_state(self, num_blocks: int, now: float) -> LinkState:
        """Return what the planner has to know while so many blocks are on their way to VRAM."""
        rate = self.up_bytes_per_s
        seconds = num_blocks * self._copier.block_bytes / rate
        if self._moving_since is not None and self._promotions:
            moving_s = self._promotions[0].num_bytes / rate
            seconds -= min(moving_s, now - self._moving_since)
        return LinkState(rate, self._copier.block_bytes, max(0.0, seconds), is_steady=True)

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

    def note_step(self) -> None:
        """Note that the compute stream was given a step."""
        self.num_steps += 1
        if self._in_stream is not None:
            event = self._record(torch.cuda.current_stream(self._in_stream.device))
            assert event is not None
            self._steps[self.num_steps] = event

    def promote(self, pairs: Sequence[tuple[PageId, BlockId]], tag: Tag, *, after: int = 0) -> None:
        """Start copying host pages into device blocks.

        Args:
            pairs: pages and blocks.
            tag: what `poll` returns when the bytes have arrived.
            after: the last step that may use the blocks; 0 if none does.
        """
        stream, early = self._in_stream, None
        self._wait_for_step(stream, after)
        num_bytes = len(pairs) * self._copier.block_bytes
        began_at, began = time.perf_counter(), self._record(stream, is_timed=True)
        split = self._early_bytes
        if split and stream and num_bytes >= MIN_SPLIT_BYTES:
            self._copier.copy_in(pairs, stream, slice(split))
            early = self._record(stream)
            self._copier.copy_in(pairs, stream, slice(split, None))
        else:
            self._copier.copy_in(pairs, stream)
        ended, seconds = self._record(stream, is_timed=True), time.perf_counter() - began_at
        self._promotions.append(_Pending(ended, tag, early, num_bytes, began, seconds))

    def demote(self, pairs: Sequence[tuple[BlockId, PageId]], tag: Tag, *, after: int = 0) -> None:
        """Start copying device blocks into host pages.

        Args:
            pairs: blocks and pages.
            tag: what `poll` returns when the bytes have arrived.
            after: the last step that may write the blocks; 0 if none does.
        """
        stream = self._out_stream
        self._wait_for_step(stream, after)
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
        """Event after which the late layers of what `poll_usable` reported have arrived.

        None if they have arrived already. Read it after a call of `poll`.
        """
        return self._promotions[self._num_usable - 1].event if self._num_usable else None

    def poll(self) -> tuple[list[Tag], list[Tag]]:
        """Return the tags of promotions and of demotions completed since the last call."""
        promoted, demoted = _completed(self._promotions), _completed(self._demotions)
        self._num_usable = max(0, self._num_usable - len(promoted))
        num_bytes, seconds = 0, 0.0
        for pending in promoted:
            if pending.num_bytes < MIN_MEASURED_BYTES:
                continue
            num_bytes += pending.num_bytes
            if pending.began is not None and pending.event is not None:
                seconds += pending.began.elapsed_time(pending.event) / 1e3
            else:
                seconds += pending.seconds
        now = time.monotonic()
        if num_bytes:
            self.up_rate.learn(num_bytes, seconds, now)
        if promoted:
            self._moving_since = None
        if self._moving_since is None and self._promotions:
            began = self._promotions[0].began
            self._moving_since = now if began is None or began.query() else None
        return [pending.tag for pending in promoted], [pending.tag for pending in demoted]

    def synchronize(self) -> None:
        """Wait until everything started so far has arrived; `poll` then reports it."""
        for stream in (self._in_stream, self._out_stream):
            if stream is not None:
                stream.synchronize()

    def _wait_for_step(self, stream: torch.cuda.Stream | None, step: int) -> None:
        """Have a stream wait until a step has ended."""
        ended = list(takewhile(lambda number: self._steps[number].query(), self._steps))
        for number in ended:
            del self._steps[number]
        if stream is not None and step in self._steps:
            stream.wait_event(self._steps[step])

    def _record(
        self, stream: torch.cuda.Stream | None, *, is_timed: bool = False
    ) -> torch.cuda.Event | None:
        if stream is None:
            return None
        event = torch.cuda.Event(enable_timing=is_timed)
        event.record(stream)
        return event


def _completed(pending: deque[_Pending[Tag]]) -> list[_Pending[Tag]]:
    """Remove the completed copies and return them; one direction finishes in order."""
    completed = []
    while pending and (pending[0].event is None or pending[0].event.query()):
        completed.append(pending.popleft())
    return completed


def time_link(
    link: DeviceLink[tuple[float, tuple[()]]], most_blocks: int, block_bytes: int
) -> None:
    """Copy pages that hold nothing yet into blocks that hold nothing yet, to time the link.

    Args:
        link: between the two.
        most_blocks: how many blocks both have.
        block_bytes: bytes of a block.
    """
    count = min(most_blocks, MEASURED_BYTES // block_bytes)
    for _ in range(2):
        link.up_rate.doubt()  # the first copy also loads what copies need: only the second counts
        link.promote([(PageId(i), BlockId(i)) for i in range(count)], (0.0, ()))
        link.synchronize()
        link.poll()
    link.least_bytes_per_s = LEAST_SHARE * link.up_rate.steady
