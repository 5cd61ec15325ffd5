"""What the kernels' front doors share: the choice of a backend, and checks of tensors on the host.

The checks run for every layer of every step, so a message is made only when one fails.
"""

import functools
import importlib
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from tieredkv.errors import ModelError, ShapeError

Backend = Literal["auto", "triton", "cudnn", "reference"]
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def use_triton(backend: str, device: torch.device) -> bool:
    """Tell whether a call on a device goes to the kernels; `auto` is the kernels on CUDA."""
    if backend not in ("auto", "triton", "cudnn", "reference"):
        raise ShapeError(f"unknown backend `{backend}`")
    return backend in ("triton", "cudnn") or (backend == "auto" and device.type == "cuda")


@functools.cache
def triton_module(module: str) -> ModuleType:
    """Import a module of Triton kernels: the one place, as a machine without a GPU may lack it."""
    try:
        return importlib.import_module(f"tieredkv.kernels.{module}")
    except ImportError as error:
        raise ModelError(
            f"the `{module}` kernel cannot be loaded: {error}\n"
            "hint: Triton is needed to run on a GPU; reinstall tieredkv, or pass `--device cpu`"
        ) from error


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Tell whether a kernel may be launched before the one before it has ended (Hopper on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def check_cache(k_cache: Tensor, v_cache: Tensor) -> None:
    """Refuse what is not one layer's cache, `[num_blocks, block_size, num_kv_heads, head_dim]`."""
    if k_cache.ndim != 4 or k_cache.dtype not in KERNEL_DTYPES:
        raise ShapeError(
            f"k_cache {describe(k_cache)} is not a 4-dimensional cache of a supported dtype"
        )
    if v_cache.shape != k_cache.shape or v_cache.stride() != k_cache.stride():
        raise ShapeError(f"v_cache {describe(v_cache)} and k_cache {describe(k_cache)} differ")
    check_data("k_cache", k_cache, k_cache)
    check_data("v_cache", v_cache, k_cache)


def check_data(name: str, tensor: Tensor, cache: Tensor) -> None:
    """Refuse a tensor of another dtype or device than the cache, or with gaps in its last dim."""
    if tensor.dtype != cache.dtype or tensor.device != cache.device:
        raise ShapeError(
            f"{name} {describe(tensor)} is not of the cache's dtype and device {describe(cache)}"
        )
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ShapeError(
            f"{name} {describe(tensor)} is not contiguous in head_dim: stride {tensor.stride(-1)}"
        )


def check_indices(name: str, tensor: Tensor, cache: Tensor) -> None:
    """Refuse what are not indices on the cache's device."""
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.device != cache.device:
        raise ShapeError(f"{name} {describe(tensor)} is not int32 or int64 on {cache.device}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ShapeError(f"{name} {describe(tensor)} is not contiguous in its last dimension")


def describe(tensor: Tensor) -> str:
    """Name a tensor's shape, dtype and device for a message."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
