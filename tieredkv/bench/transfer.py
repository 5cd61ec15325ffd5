"""`bench transfer`: blocks between the device pool and the host arena, beside one large copy.

Every block lies at a random place of both memories. The raw copy and the blocks take turns, so that
a drifting clock drifts for both; at last the bytes of every block are compared.
"""

# mypy: disable-error-code="no-untyped-call"
# (how much of torch.cuda is typed differs between torch versions)

import contextlib
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from tieredkv.bench import raw
from tieredkv.errors import ConfigError
from tieredkv.kernels.copies import BlockCopier, register_pinned
from tieredkv.storage.host import HostArena
from tieredkv.transfer import BlockTransfer
from tieredkv.types import BlockId, PageId, Progress

DIRECTIONS = UP, DOWN, BOTH = ("host to device", "device to host", "both at once")
"""The rate of both at once is that of each way, with half of the bytes each."""

SINGLE_COPIES = 50


def run(
    sizes: Sequence[int], *, total_bytes: int, repeats: int, progress: Progress
) -> dict[str, Any]:
    """Measure each block size in each direction; a row holds medians of the repeats."""
    if repeats < 1 or min(sizes) < 1 or total_bytes < 2 * max(sizes):
        raise ConfigError("`total` must hold two blocks of each size, and `repeats` be at least 1")
    rows: list[dict[str, Any]] = []
    large = _LargeCopies(total_bytes)
    for done, block_bytes in enumerate(sizes):
        progress("measuring", done, len(sizes))
        with contextlib.ExitStack() as stack:
            blocks = _Blocks(total_bytes // block_bytes, block_bytes, stack)
            rows += (_measure(large, blocks, direction, repeats) for direction in DIRECTIONS)
    progress("measuring", 1, 1)
    limits = {
        name: statistics.median(row["raw_GBps"] for row in rows if row["direction"] == name)
        for name in DIRECTIONS
    }
    bad = [f"{r['direction']}, {r['block_bytes']} bytes" for r in rows if not r["bytes_equal"]]
    return {"raw": limits, "rows": rows, "problems": [f"the bytes differ: {row}" for row in bad]}


class _LargeCopies:
    """One copy each way between a pinned tensor and the device, on a stream each."""

    def __init__(self, num_bytes: int) -> None:
        is_cuda = torch.cuda.is_available()
        self.host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self.device = torch.zeros(num_bytes, dtype=torch.uint8, device=raw.device())
        self._streams = [torch.cuda.Stream() if is_cuda else None for _ in range(2)]

    def start(self, direction: str) -> None:
        """Queue the copies of a direction."""
        middle = self.host.numel() // 2 if direction == BOTH else None
        up, down = slice(middle), slice(middle, None)
        if direction != DOWN:
            with torch.cuda.stream(self._streams[0]):
                self.device[up].copy_(self.host[up], non_blocking=True)
        if direction != UP:
            with torch.cuda.stream(self._streams[1]):
                self.host[down].copy_(self.device[down], non_blocking=True)


class _Blocks:
    """A pool, a pinned arena, and the engine's own transfer between them."""

    def __init__(self, count: int, block_bytes: int, stack: contextlib.ExitStack) -> None:
        device = torch.device(raw.device())
        arena = HostArena(count, block_bytes)
        stack.callback(arena.close)
        self.pages = torch.frombuffer(arena.buffer, dtype=torch.uint8).view(count, block_bytes)
        if device.type == "cuda":
            address, size = self.pages.data_ptr(), arena.size_bytes
            pinned = register_pinned(
                address, size, page_bytes=block_bytes, progress=lambda _done, _total: None
            )
            stack.callback(pinned.unregister)
        self.pool = torch.empty(count, block_bytes, dtype=torch.uint8, device=device)
        copier = BlockCopier(self.pool, self.pages)
        self._transfer = BlockTransfer[None](copier, device=device, block_bytes=block_bytes)
        generator = torch.Generator().manual_seed(0)
        self.pages_and_blocks = torch.stack(
            [torch.randperm(count, generator=generator) for _ in range(2)], dim=1
        )

    def copy(self, direction: str, count: int | None = None) -> tuple[float, float]:
        """Copy blocks, asking for their arrival as the engine does.

        Returns:
            Seconds until all have arrived, and how many of them the calls took.
        """
        pairs = self.pages_and_blocks[:count].tolist()
        middle = len(pairs) // 2 if direction == BOTH else None
        up = [(PageId(page), BlockId(block)) for page, block in pairs[:middle]]
        down = [(BlockId(block), PageId(page)) for page, block in pairs[middle or 0 :]]
        raw.synchronize()
        start = time.perf_counter()
        if direction != DOWN:
            self._transfer.promote(up, None)
        if direction != UP:
            self._transfer.demote(down, None)
        called = time.perf_counter()
        while self._transfer.has_pending:
            self._transfer.poll()
        return time.perf_counter() - start, called - start

    def are_equal_after(self, direction: str) -> bool:
        """Fill both memories anew, copy every block once more, and compare every byte."""
        for first, memory in enumerate((self.pages, self.pool)):
            words = memory.view(torch.int64).flatten()
            torch.arange(first, first + 2 * words.numel(), 2, out=words)
        self.copy(direction)
        pages, blocks = self.pages_and_blocks.T
        return torch.equal(self.pool.cpu()[blocks], self.pages[pages])


def _measure(large: _LargeCopies, blocks: _Blocks, direction: str, repeats: int) -> dict[str, Any]:
    large_s, ours_s, call_s = [], [], []
    blocks.copy(direction)
    for _ in range(repeats):
        large_s.append(raw.median_s(partial(large.start, direction), repeats=1))
        arrived_s, called_s = blocks.copy(direction)
        ours_s.append(arrived_s)
        call_s.append(called_s)
    single_s = [blocks.copy(direction, 1)[0] for _ in range(SINGLE_COPIES)]
    count, block_bytes = blocks.pool.shape
    share = 5e-10 if direction == BOTH else 1e-9
    ours = share * blocks.pool.numel() / statistics.median(ours_s)
    limit = share * large.host.numel() / statistics.median(large_s)
    return {
        "direction": direction,
        "block_bytes": block_bytes,
        "blocks": count,
        "GBps": ours,
        "raw_GBps": limit,
        "ratio": ours / limit,
        "host_us_per_block": statistics.median(call_s) / count * 1e6,
        "one_block_us": None if direction == BOTH else statistics.median(single_s) * 1e6,
        "bytes_equal": blocks.are_equal_after(direction),
    }
