"""`bench transfer`: measure block copies between the device pool and the host arena.

Every block lies at a random place of both memories. The raw limit is one large copy. Large copies
and block copies alternate, so that a drifting clock affects both. At the end, the bytes of every
block are compared.
"""

# mypy: disable-error-code="no-untyped-call"
# (how much of torch.cuda is typed differs between torch versions)

import contextlib
import statistics
import time
from functools import partial
from typing import Any

import torch

from tieredkv.bench import raw
from tieredkv.cache.device_link import DeviceLink
from tieredkv.errors import ConfigError
from tieredkv.kernels.copies import BlockCopier, register_pinned
from tieredkv.types import BlockId, PageId, Progress, tracked
from tieredkv.units import parse_bytes
from tieredkv.wire.arena import HostArena

DIRECTIONS = {"host to device": 1.0, "device to host": 0.0, "both at once": 0.5}
"""Share of the bytes copied to the device; the rest goes to the host. Rates are per direction."""

SINGLE_COPIES = 50
PLOTTED = (("GBps",),)

Row = dict[str, Any]


def run(progress: Progress, *, block_size_bytes: list[int], total: str, repeats: int) -> Row:
    """Measure each block size in each direction; a row holds medians of the repeats."""
    sizes, total_bytes = block_size_bytes, parse_bytes(total)
    if min(sizes) < 1 or total_bytes < 2 * max(sizes):
        raise ConfigError(f"`total` = `{total}` must hold at least two blocks of each size")
    rows = list[Row]()
    for size in tracked(progress, "measuring", sizes):
        with contextlib.ExitStack() as stack:
            memories = _Memories(total_bytes // size, size, stack)
            rows += [_measure(memories, direction, repeats) for direction in DIRECTIONS]
    limits = {
        name: max(r["raw_GBps"] for r in rows if r["direction"] == name) for name in DIRECTIONS
    }
    problems = [f"the copied bytes differ: {row}" for row in rows if not row["bytes_equal"]]
    return {"raw": limits, "rows": rows, "problems": problems}


class _Memories:
    """A pool, a pinned arena, the engine's transfer between them, and two tensors for large copies.

    Large copies have separate tensors, because a copy must not span two pinned pieces of the arena.
    """

    def __init__(self, count: int, block_bytes: int, stack: contextlib.ExitStack) -> None:
        is_cuda, device = torch.cuda.is_available(), torch.device(raw.device())
        arena = HostArena(count, block_bytes)
        stack.callback(arena.close)
        self.pages = torch.frombuffer(arena.buffer, dtype=torch.uint8).view(count, block_bytes)
        if is_cuda:
            extent = self.pages.data_ptr(), arena.size_bytes
            pinned = register_pinned(*extent, page_bytes=block_bytes, progress=lambda *_: None)
            stack.callback(pinned.close)
        self.pool = torch.zeros(count, block_bytes, dtype=torch.uint8, device=device)
        self._transfer = DeviceLink[None](BlockCopier(self.pool, self.pages))
        generator = torch.Generator().manual_seed(0)
        orders = [torch.randperm(count, generator=generator) for _ in range(2)]
        self.order = torch.stack(orders, dim=1)  # [count, (page_id, block_id)]
        self._large = torch.zeros(arena.size_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._large_device = torch.zeros_like(self._large, device=device)
        self._streams = [torch.cuda.Stream() if is_cuda else None for _ in range(2)]

    def copy_large(self, share: float) -> None:
        """Queue one large copy in each direction, each on its own stream."""
        middle = int(self._large.numel() * share)
        host, device = (it.tensor_split([middle]) for it in (self._large, self._large_device))
        copies = (device[0], host[0]), (host[1], device[1])
        for stream, (target, source) in zip(self._streams, copies, strict=True):
            if len(target):
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)

    def copy_blocks(self, share: float, count: int | None = None) -> tuple[float, float]:
        """Copy blocks and poll for their arrival, as the engine does.

        Returns:
            Seconds until all blocks have arrived, and the seconds of these spent in the calls.
        """
        pairs = self.order[:count].tolist()
        middle = int(len(pairs) * share)
        up = [(PageId(page), BlockId(block)) for page, block in pairs[:middle]]
        down = [(BlockId(block), PageId(page)) for page, block in pairs[middle:]]
        raw.synchronize()
        start = time.perf_counter()
        if up:
            self._transfer.promote(up, None)
        if down:
            self._transfer.demote(down, None)
        called = time.perf_counter()
        while self._transfer.has_pending:
            self._transfer.poll()
        return time.perf_counter() - start, called - start

    def are_equal_after(self, share: float) -> bool:
        """Fill both memories with new values, copy every block, and compare every byte."""
        for first, memory in enumerate((self.pages, self.pool)):
            words = memory.view(torch.int64).flatten()
            torch.arange(first, first + 2 * words.numel(), 2, out=words)
        self.copy_blocks(share)
        pages, blocks = self.order.T
        return torch.equal(self.pool.cpu()[blocks], self.pages[pages])


def _measure(memories: _Memories, direction: str, repeats: int) -> Row:
    share, large_s, ours = DIRECTIONS[direction], [], []
    memories.copy_blocks(share)  # warm-up
    for _ in range(repeats):
        large_s.append(raw.median_s(partial(memories.copy_large, share), repeats=1))
        ours.append(memories.copy_blocks(share))
    single_s = [memories.copy_blocks(share, 1)[0] for _ in range(SINGLE_COPIES)]
    count, block_bytes = memories.pool.shape
    size = count * block_bytes * max(share, 1 - share) / 1e9
    arrived_s, called_s = map(statistics.median, zip(*ours, strict=True))
    return {
        "direction": direction,
        "block_bytes": block_bytes,
        "blocks": count,
        "GBps": size / arrived_s,
        "raw_GBps": size / statistics.median(large_s),
        "ratio": statistics.median(large_s) / arrived_s,
        "host_us_per_block": called_s / count * 1e6,
        "one_block_us": statistics.median(single_s) * 1e6 if share in (0.0, 1.0) else None,
        "bytes_equal": memories.are_equal_after(share),
    }
