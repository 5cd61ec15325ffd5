"""Copies of blocks between the device pool and the host arena, and pinning of the arena.

This module knows addresses and sizes only. `tieredkv.cache.device_link` decides which block goes to
which page, and when either may be reused.
"""

# mypy: disable-error-code="no-untyped-call"
# (how much of torch.cuda is typed differs between torch versions)

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from tieredkv.errors import DeviceError, ShapeError

logger = logging.getLogger(__name__)

PIN_CHUNK_BYTES = 1 << 30
"""Bytes pinned in one call. It takes a few tenths of a second, so that a progress bar moves."""

Pairs = Sequence[tuple[int, int]]


class BlockCopier:
    """Copies scattered blocks between the device pool and the arena, many in one driver call.

    A page holds one block from the page's start; the rest of the page is not touched. On a CPU a
    copy is done when the call returns. On CUDA it is done when the stream reaches it, and until
    then neither side may be reused or written. Only one thread at a time may call it.

    Attributes:
        block_bytes: size of one block.
        device: device of the pool.
    """

    def __init__(self, device_blocks: Tensor, arena: Tensor) -> None:
        """Bind the two memories, which the caller keeps alive.

        Args:
            device_blocks: uint8 [num_blocks, block_bytes], a view of the pool, contiguous.
            arena: uint8 [num_pages, page_bytes] on the CPU, contiguous; if the
                pool is on CUDA, also pinned (see `register_pinned`), or copies are slow and block.

        Raises:
            ShapeError: a block does not fit a page, or the tensors are not as described.
        """
        for name, tensor in (("device_blocks", device_blocks), ("arena", arena)):
            if tensor.ndim != 2 or tensor.dtype != torch.uint8 or not tensor.is_contiguous():
                raise ShapeError(
                    f"{name} {list(tensor.shape)} {tensor.dtype} must be contiguous 2-d uint8"
                )
        block_bytes, page_bytes = device_blocks.shape[1], arena.shape[1]
        if arena.is_cuda or page_bytes < block_bytes:
            raise ShapeError(
                f"pages of {page_bytes} bytes on {arena.device} cannot hold blocks of "
                f"{block_bytes} bytes; they must be at least as large, and in host memory"
            )
        self.block_bytes, self.device = block_bytes, device_blocks.device
        self._blocks = device_blocks
        self._arena = arena

    def copy_in(
        self, pairs: Pairs, stream: torch.cuda.Stream | None = None, part: slice = slice(None)
    ) -> None:
        """Copy pages to blocks, host to device.

        Args:
            pairs: pairs of (page_id, block_id); block ids must be distinct.
            stream: CUDA stream of the copies; None is the current stream. The driver batches
                copies only on a stream other than the default one.
            part: bytes of every block to copy.

        Raises:
            ShapeError: an id is out of range; nothing was copied.
            DeviceError: the driver refused the copies.
        """
        self._copy(self._arena, self._blocks, pairs, stream, part)

    def copy_out(self, pairs: Pairs, stream: torch.cuda.Stream | None = None) -> None:
        """Copy blocks to pages, device to host; as `copy_in`, with pairs of (block_id, page_id)."""
        self._copy(self._blocks, self._arena, pairs, stream, slice(None))

    def _copy(
        self,
        source: Tensor,
        target: Tensor,
        pairs: Pairs,
        stream: torch.cuda.Stream | None,
        part: slice,
    ) -> None:
        ids = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
        limits = (source.shape[0], target.shape[0])
        if ((ids < 0) | (ids >= limits)).any():
            raise ShapeError(f"a pair of ids is outside of [0, {limits[0]}) and [0, {limits[1]})")
        if not len(ids):
            return
        first, end, _ = part.indices(self._blocks.shape[1])
        if not self._blocks.is_cuda:
            from_rows, to_rows = source.numpy(), target.numpy()
            for source_id, target_id in ids:
                to_rows[target_id, first:end] = from_rows[source_id, first:end]
            return
        with torch.cuda.device(self._blocks.device):
            stream = stream or torch.cuda.current_stream()
            runtime = _batch_runtime() if stream.cuda_stream else None
            if runtime is not None:
                bases = np.array([source.data_ptr(), target.data_ptr()]) + first
                strides = np.array([source.shape[1], target.shape[1]])
                sources, targets = (bases + ids * strides).T.tolist()
                _copy_batch(runtime, sources, targets, end - first, stream.cuda_stream)
                return
            with torch.cuda.stream(stream):
                for source_id, target_id in ids.tolist():
                    piece = source[source_id, first:end]
                    target[target_id, first:end].copy_(piece, non_blocking=True)


def _copy_batch(
    runtime: ModuleType, sources: list[int], targets: list[int], nbytes: int, stream: int
) -> None:
    """Queue all copies with one driver call."""
    attributes = runtime.cudaMemcpyAttributes()
    # Sources are read in stream order: an earlier copy may still be writing to the page.
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    count = len(sources)
    error, *_ = runtime.cudaMemcpyBatchAsync(
        targets, sources, [nbytes] * count, count, [attributes], [0], 1, stream
    )
    if error != runtime.cudaError_t.cudaSuccess:
        raise DeviceError(f"cudaMemcpyBatchAsync of {count} x {nbytes} bytes failed: {error!r}")


@functools.cache
def _batch_runtime() -> ModuleType | None:
    """Return the CUDA bindings if they have the batched copy (CUDA 13 or later), else None."""
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
        error, version = runtime.cudaRuntimeGetVersion()
        if error == runtime.cudaError_t.cudaSuccess and version >= 13000:
            return runtime
        reason = f"CUDA runtime 13.0 is needed, and its version is {version}"
    except ImportError as error:
        reason = str(error)
    logger.warning("blocks are copied one by one, which is slower below 1 MiB: %s", reason)
    return None


def register_pinned(
    address: int, nbytes: int, *, page_bytes: int, progress: Callable[[int, int], None]
) -> contextlib.ExitStack:
    """Pin host memory for CUDA in chunks of whole pages; a copy must not span two chunks.

    Args:
        address: address of the first byte, 4 KiB aligned; the memory must outlive the pinning.
        nbytes: size of the memory, a multiple of page_bytes.
        page_bytes: size of an arena page, a multiple of 4 KiB.
        progress: called with (bytes done, bytes in all) after each chunk.

    Raises:
        DeviceError: CUDA refused; nothing stays pinned.

    Returns:
        A stack that unpins the memory when it is closed; no copy may be under way then.
    """
    step = max(1, PIN_CHUNK_BYTES // page_bytes) * page_bytes
    cudart = torch.cuda.cudart()
    with contextlib.ExitStack() as pinned:
        for offset in range(0, nbytes, step):
            size = min(step, nbytes - offset)
            _check_cuda(
                cudart.cudaHostRegister(address + offset, size, 0),
                f"pinning {size} bytes of host memory after the first {offset}",
                hint="lower `--host-size`, or raise the limit of locked memory (`ulimit -l`)",
            )
            pinned.callback(_unregister, address + offset)
            progress(offset + size, nbytes)
        return pinned.pop_all()


def _unregister(address: int) -> None:
    _check_cuda(torch.cuda.cudart().cudaHostUnregister(address), "cudaHostUnregister")


def _check_cuda(error: int, what: str, *, hint: str | None = None) -> None:
    if int(error) != 0:
        advice = f"\nhint: {hint}" if hint else ""
        raise DeviceError(f"{what} failed with CUDA error {int(error)}, {error}{advice}")
