"""Small copies between pinned memory and the device, made by a kernel, not by a copy engine.

A copy engine executes its copies in order, so the few kilobytes of a step, and every stream that
needs them, would wait behind the gigabytes of a promotion or demotion. A kernel reads and writes
pinned memory over PCIe at once. Callers order the streams, as with any kernel.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from tieredkv.kernels.checks import triton_module

_being_read: deque[tuple[torch.cuda.Event, Tensor]] = deque()
"""Pinned memory that a kernel may still have to read; one thread issues all steps."""


def copy(source: Tensor, target: Tensor) -> None:
    """Copy between pinned memory and the device, either way, in the current stream's order.

    Args:
        source: contiguous, of a dtype of four or eight bytes; pinned if it is on the host.
        target: as source, with the same shape and dtype.
    """
    if not (source.is_cuda or target.is_cuda):
        target.copy_(source)
    elif source.numel():
        triton_module("word_copy").copy_words(source.view(torch.int32), target.view(torch.int32))


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy values to a one-dimensional tensor on a device, without waiting for the copy."""
    return upload(torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda"), device)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy pinned memory that is never written again to a device, without waiting for the copy."""
    if device.type != "cuda":
        return tensor
    target = torch.empty_like(tensor, device=device)
    copy(tensor, target)
    # torch does not know that the kernel reads this pinned memory, and would reuse it too early.
    event = torch.cuda.Event()
    event.record()
    _being_read.append((event, tensor))
    while _being_read[0][0].query() and len(_being_read) > 1:
        _being_read.popleft()
    return target


def to_host(tensor: Tensor) -> Tensor:
    """Copy to pinned memory in the stream's order; callers wait before they read the copy."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy(tensor.contiguous(), host)
    return host
