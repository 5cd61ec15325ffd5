"""Choice of kernels and host-side checks of tensors, shared by `launch` and `layers`.

The checks run for every layer of every step, so a message is built only when a check fails.
"""

import functools
import importlib
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from tieredkv.errors import ModelError, ShapeError

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LayerCache(NamedTuple):
    """One layer's keys and values in every block of the pool.

    Attributes:
        k: keys, [num_blocks, block_size, num_kv_heads, head_dim], contiguous in head_dim.
        v: values, of the same shape and strides as k.
    """

    k: Tensor
    v: Tensor


class Rope(NamedTuple):
    """The rotation of some tokens, whose angles turn pairs of elements.

    Attributes:
        cos, sin: [num_tokens, rope_dim / 2], a float dtype, with equal strides.
        reads_pairs: whether the elements of a pair stand side by side before the rotation, and
            not in the two halves.
        writes_pairs: the same after it.
    """

    cos: Tensor
    sin: Tensor
    reads_pairs: bool
    writes_pairs: bool


class NormStyle(NamedTuple):
    """How rows are divided by the root of their mean square, and weighed.

    Attributes:
        eps: added to the mean of squares.
        offset: added to the weights.
        is_rounded_first: whether the divided row is rounded before it is weighed, as in Llama, or
            only afterwards, as in Gemma.
    """

    eps: float
    offset: float = 0.0
    is_rounded_first: bool = True


class HeadNorms(NamedTuple):
    """The norms of queries and keys, head by head, before they are rotated.

    Attributes:
        weights: [2, head_dim], contiguous: those of queries, then those of keys; [1, head_dim]
            where there are only queries.
        has_values: whether values are normed too, with weights of 1.
    """

    weights: Tensor
    style: NormStyle
    has_values: bool = False


class Branch(NamedTuple):
    """What is normed and then added to a residual stream.

    Attributes:
        rows: [num_tokens, hidden_size], contiguous.
        norm: [hidden_size], the weights of their norm; None adds them as they are.
        others: rows that `rows` are added to before that norm, of the same shape; or None.
        own_norms: [2, hidden_size], the weights of norms of `rows` and of `others` before they are
            added up; None without `others`.
        scalar: [1], a factor on the residual stream after the sum; or None.
    """

    rows: Tensor
    norm: Tensor | None = None
    others: Tensor | None = None
    own_norms: Tensor | None = None
    scalar: Tensor | None = None


def use_triton(device: torch.device) -> bool:
    """Return whether a device uses the Triton kernels or else the reference; tests replace it."""
    return device.type == "cuda"


@functools.cache
def triton_module(module: str) -> ModuleType:
    """Import a module of Triton kernels on demand: a machine without a GPU may lack Triton."""
    try:
        return importlib.import_module(f"tieredkv.kernels.{module}")
    except ImportError as error:
        raise ModelError(
            f"the `{module}` kernel cannot be loaded: {error}\n"
            "hint: Triton is needed to run on a GPU; reinstall tieredkv, or pass `--device cpu`"
        ) from error


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Return whether a kernel may start before the previous one has ended (since Hopper)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def check_cache(cache: LayerCache) -> None:
    """Refuse a cache that does not match the description of `LayerCache`."""
    k, v = cache
    if k.ndim != 4 or k.dtype not in KERNEL_DTYPES:
        raise ShapeError(f"k_cache {describe(k)} is not a 4-dimensional cache of a supported dtype")
    if v.shape != k.shape or v.stride() != k.stride():
        raise ShapeError(f"v_cache {describe(v)} and k_cache {describe(k)} differ in their layout")
    check_data("k_cache", k, cache)
    check_data("v_cache", v, cache)


def check_data(name: str, tensor: Tensor, cache: LayerCache) -> None:
    """Refuse a tensor of another dtype or device than the cache, or with gaps in its last dim."""
    if tensor.dtype != cache.k.dtype or tensor.device != cache.k.device:
        raise ShapeError(
            f"{name} {describe(tensor)} is not of the cache's dtype and device {describe(cache.k)}"
        )
    check_last_dim(name, tensor)


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Refuse sinks that are not one number of a float dtype for each head of q."""
    is_float = sinks.dtype in KERNEL_DTYPES and sinks.device == q.device
    if sinks.shape != q.shape[1:2] or not is_float:
        what = f"sinks {describe(sinks)}"
        raise ShapeError(f"{what} are not one float for each head of q {describe(q)}")
    check_last_dim("sinks", sinks)


def check_indices(name: str, tensor: Tensor, cache: LayerCache) -> None:
    """Refuse a tensor that is not int32 or int64 on the cache's device, or has gaps."""
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.device != cache.k.device:
        raise ShapeError(f"{name} {describe(tensor)} is not int32 or int64 on {cache.k.device}")
    check_last_dim(name, tensor)


def check_last_dim(name: str, tensor: Tensor) -> None:
    """Refuse a tensor with gaps in its last dimension."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ShapeError(f"{name} {describe(tensor)} is not contiguous in its last dimension")


def describe(tensor: Tensor) -> str:
    """Name a tensor's shape, dtype and device for a message."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
