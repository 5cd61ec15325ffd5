"""Quantized weights of a checkpoint, dequantised one by one as they are read.

FP8 weights have one scale a block, a row or a tensor. MXFP4 weights are the experts of gpt-oss: two
values of four bits a byte, and one power of two for 32 values. Both are computed in float32 and
rounded once, to the dtype of the model. Scales of activations are for products in FP8 and are not
used. This module knows names and numbers in weight files, not models.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from tieredkv.engine.checkpoint import refused
from tieredkv.kernels.quantized import FP8_BLOCK, MXFP4_GROUP, Mxfp4Matrix

CONFIG_FIELDS = ("quantization_config", "compression_config")
"""Fields of a config.json that say how its weights are quantized."""

_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files that some tools write beside quantized weights, and the tool."""

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_SCALE_DTYPES = frozenset({"F32", "F16", "BF16", "F8_E8M0"})
_FP8_SCALES = ("_scale_inv", "_scale")
"""What follows a weight's name in the name of its scales; either is a factor."""

_UNUSED_SCALES = (
    *(".activation_scale", ".input_scale", ".k_scale", ".v_scale"),
    *("experts.gate_up_proj_activation_scale", "experts.down_proj_activation_scale"),
)
_DEFAULT_BLOCK = (FP8_BLOCK, FP8_BLOCK)
_PIECE_ROWS = 256

_FP8_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""The number that each byte means. A look-up is faster than torch's conversion on a CPU."""

_FP4_GROUP_BYTES = MXFP4_GROUP // 2

Block = tuple[int, int] | Literal["any"] | None

_Size = Annotated[int, msgspec.Meta(gt=0)]

Tensors = dict[str, Any]
"""Slices of safetensors by the name of their tensor, or objects that are read in the same way."""


class Dequantised(NamedTuple):
    """The tensors of weight files whose weights are dequantised when they are read.

    Attributes:
        tensors: all that a model may use, without scales.
        unused: names of scales that only products in FP8 would use.
    """

    tensors: Tensors
    unused: list[str]


class Quantization(NamedTuple):
    """How the weights of a checkpoint are quantized.

    Attributes:
        method: `fp8` or `mxfp4`.
        block: rows and columns that have one scale in FP8; None for a scale a row or a tensor, and
            `any` where config.json leaves it to the shapes of the scales.
    """

    method: str
    block: Block = None


def find_quantization(name: str, config: PreTrainedConfig) -> Quantization | None:
    """Return how the weights that a config describes are quantized; None if they are not.

    Raises:
        ModelError: they are quantized in a way that is not supported.
    """
    table = _find_table(config)
    if table is None:
        return None
    method = str(table.get("quant_method"))
    if table.get("quant_method") is None:
        what = "its weights are quantized, and config.json does not say how (`quant_method`)"
        raise refused(name, what)
    if method not in ("fp8", "mxfp4"):
        raise _unsupported(name, method, table.get("quant_algo") or table.get("format"))
    if method == "mxfp4":
        return Quantization(method)
    block = table.get("weight_block_size", "any")
    if block in ("any", None):
        return Quantization(method, block)
    try:
        return Quantization(method, msgspec.convert(block, tuple[_Size, _Size]))
    except msgspec.ValidationError as error:
        what = f"`weight_block_size` = {block} in config.json is not two positive numbers"
        raise refused(name, what) from error


def unquantized_modules(config: PreTrainedConfig) -> list[str]:
    """Return which modules a config excludes from quantization, by parts of their paths."""
    table = _find_table(config) or {}
    told = table.get("modules_to_not_convert") or table.get("ignored_layers") or ()
    return [str(part) for part in told]


def _find_table(config: PreTrainedConfig) -> Mapping[str, Any] | None:
    parts = (config, getattr(config, "text_config", None))
    tables = [getattr(part, field, None) for part in parts for field in CONFIG_FIELDS]
    table = next(filter(None, tables), None)
    return table if table is None or isinstance(table, Mapping) else table.to_dict()


def check_quantization_files(name: str, folder: Path) -> None:
    """Refuse a checkpoint whose weights were quantized by a tool that says so in its own file.

    Raises:
        ModelError: names the tool and what would do.
    """
    for file, method in _FILES.items():
        if (folder / file).is_file():
            with contextlib.suppress(OSError, msgspec.MsgspecError, AttributeError):
                told = msgspec.json.decode((folder / file).read_bytes())
                algorithm = told.get("quantization", {}).get("quant_algo")
                raise _unsupported(name, method, algorithm, f" (`{folder / file}`)")
            raise _unsupported(name, method, None, f" (`{folder / file}`)")


def _unsupported(name: str, method: str, algorithm: object, where: str = "") -> Exception:
    how = f"`{method}` as {algorithm}" if algorithm else f"`{method}`"
    way_out = "take the same model's checkpoint in bfloat16, or in FP8 with `quant_method` = `fp8`"
    what = f"its weights are quantized by {how}{where}, which is not supported"
    return refused(name, f"{what}; {way_out}")


def dequantised(
    name: str, tensors: Tensors, quantization: Quantization, dtype: torch.dtype
) -> Dequantised:
    """Replace quantized weights and their scales by weights that are dequantised when read.

    Args:
        name: the model's name.
        tensors: those of the weight files. A weight without scales stays as it is.
        quantization: what config.json says.
        dtype: of the dequantised weights.

    Raises:
        ModelError: scales are missing, or not of the shape that weight and config ask for.
    """
    unused = [key for key in tensors if key.endswith(_UNUSED_SCALES)]
    used = {key: tensor for key, tensor in tensors.items() if not key.endswith(_UNUSED_SCALES)}
    if quantization.method == "fp8":
        found = dict(_fp8_weights(name, used, quantization.block, dtype))
    else:
        found = dict(_mxfp4_weights(name, used, dtype))
    return Dequantised(found, unused)


def _fp8_weights(
    name: str, tensors: Tensors, told: Block, dtype: torch.dtype
) -> Iterator[tuple[str, Any]]:
    scales = {}
    for key, tensor in tensors.items():
        if tensor.get_dtype() == "F8_E4M3":
            found = [key + suffix for suffix in _FP8_SCALES if key + suffix in tensors]
            if not found:
                raise refused(name, f"tensor `{key}` is stored in FP8, and its scales are missing")
            scales[key] = found[0]
    used = {*scales.values()}
    for key, tensor in tensors.items():
        if key in scales:
            stored = tensors[scales[key]]
            if (kind := stored.get_dtype()) not in _SCALE_DTYPES:
                what = f"the scales `{scales[key]}` are stored as {kind}, which is not supported"
                raise refused(name, what)
            block = _fp8_block(name, scales[key], stored, tensor, told)
            yield key, Fp8Weight(tensor, stored, block, dtype)
        elif key not in used:
            yield key, tensor


def _fp8_block(name: str, key: str, scales: Any, weight: Any, told: Block) -> tuple[int, int]:
    """Return how many rows and columns of a weight have one scale.

    Raises:
        ModelError: the shape of the scales is not one for this weight.
    """
    shape, stored = [*weight.get_shape()], [*scales.get_shape()]
    if len(shape) < 2:
        raise refused(name, f"the scales `{key}` are those of a tensor of shape {tuple(shape)}")
    *others, rows, columns = shape
    size = _DEFAULT_BLOCK if told in ("any", None) else told
    assert isinstance(size, tuple), size
    grid = [*others, math.ceil(rows / size[0]), math.ceil(columns / size[1])]
    by_tensor = (rows, columns), [others, [*others, 1], [*others, 1, 1]]
    by_row = (1, columns), [[*others, rows], [*others, rows, 1]]
    by_block = size, [grid]
    choices = [by_tensor, by_row, by_block] if told == "any" else [by_tensor, by_row]
    choices = [by_block] if isinstance(told, tuple) else choices
    for block, shapes in choices:
        if stored in shapes:
            return block
    wanted = [str(tuple(shapes[0])) for _, shapes in choices]
    what = f"the scales `{key}` have the shape {tuple(stored)}"
    needs = f"a weight of shape {tuple(shape)} needs {' or '.join(wanted)}"
    raise refused(name, f"{what}, but {needs}")


class Fp8Weight:
    """A weight in FP8 with its scales, read like a slice of safetensors.

    Args:
        weight: float8_e4m3fn [..., rows, columns].
        scales: one factor for each block, in the order of the blocks.
        block: rows and columns of a block; the last ones of a weight may be smaller.
        dtype: of what is read.
    """

    def __init__(
        self, weight: Any, scales: Any, block: tuple[int, int], dtype: torch.dtype
    ) -> None:
        self._weight, self._scales, self._dtype = weight, scales, dtype
        self.block = block

    def as_stored(self) -> "tuple[Stored, Stored]":
        """Return the weight and its scales, float32 and in the order of the blocks."""
        shape, grid, scales = self.get_shape(), [*self._grid()], self._scales
        weight = Stored(shape, str(self._weight.get_dtype()), lambda: self._weight[...])
        return weight, Stored(grid, "F32", lambda: scales[...].float().reshape(grid))

    def get_shape(self) -> list[int]:
        """Return the shape of the weight."""
        return [*self._weight.get_shape()]

    def get_dtype(self) -> str:
        """Return the dtype of what is read, by safetensors' name."""
        return _DTYPE_NAMES[self._dtype]

    def __getitem__(self, index: Any) -> Tensor:
        """Read and dequantise the weight; besides the result only some rows are in memory."""
        assert index is Ellipsis, index
        *others, rows, columns = self.get_shape()
        high, wide = self.block
        scales = self._scales[...].float().reshape(self._grid())
        result = torch.empty(*others, rows, columns, dtype=self._dtype)
        # A piece has one row of scales, or one for each of its rows.
        step = high if 1 < high < rows else _PIECE_ROWS
        place: Any
        for place in itertools.product(*map(range, others)):
            for start in range(0, rows, step):
                end = min(start + step, rows)
                where: Any = (*(slice(at, at + 1) for at in place), slice(start, end))
                stored = self._weight[where].reshape(end - start, columns)
                factors = scales[place][start // high : (end - 1) // high + 1]
                factors = factors.repeat_interleave(wide, dim=1)[:, :columns]
                numbers = _FP8_VALUES.index_select(0, stored.view(torch.uint8).flatten().int())
                result[(*place, slice(start, end))] = numbers.view(stored.shape) * factors
        return result

    def _grid(self) -> tuple[int, ...]:
        """Return the shape of the scales."""
        *others, rows, columns = self.get_shape()
        high, wide = self.block
        return (*others, math.ceil(rows / high), math.ceil(columns / wide))


class Stored:
    """A tensor that stays as weight files hold it, read like a slice of safetensors.

    Args:
        shape: of the tensor.
        dtype: by safetensors' name.
        read: reads it.
    """

    def __init__(self, shape: list[int], dtype: str, read: Callable[[], Tensor]) -> None:
        self._shape, self._dtype, self._read = shape, dtype, read

    def get_shape(self) -> list[int]:
        """Return the shape of what is read."""
        return self._shape

    def get_dtype(self) -> str:
        """Return the dtype of what is read, by safetensors' name."""
        return self._dtype

    def __getitem__(self, index: Any) -> Tensor:
        """Read all of it."""
        assert index is Ellipsis, index
        return self._read()


def _mxfp4_weights(name: str, tensors: Tensors, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    for key, tensor in tensors.items():
        base, is_packed = key.removesuffix("_blocks"), key.endswith("_blocks")
        if is_packed and tensor.get_dtype() == "U8":
            scales, shape = tensors.get(f"{base}_scales"), [*tensor.get_shape()]
            if scales is None:
                raise refused(
                    name, f"tensor `{key}` is stored in MXFP4, and its scales are missing"
                )
            stored = [*scales.get_shape()]
            if len(shape) != 4 or shape[-1] != _FP4_GROUP_BYTES or stored != shape[:-1]:
                what = f"the scales `{base}_scales` have the shape {tuple(stored)}"
                wanted = "one for each 16 bytes of it"
                what += f", but a packed weight of shape {tuple(shape)} needs {wanted}"
                raise refused(name, what)
            if scales.get_dtype() != "U8":
                what = f"the scales `{base}_scales` are stored as {scales.get_dtype()}"
                raise refused(name, f"{what}, which is not supported")
            yield base, Mxfp4Weight(tensor, scales, dtype)
        elif not (key.endswith("_scales") and f"{key.removesuffix('_scales')}_blocks" in tensors):
            yield key, tensor


class Mxfp4Weight:
    """The packed weights of gpt-oss' experts with their scales, read like a slice of safetensors.

    Args:
        blocks: uint8 [experts, outputs, groups, 16], two numbers a byte, the low bits first.
        scales: uint8 [experts, outputs, groups], exponents of two plus 127.
        dtype: of what is read.
    """

    def __init__(self, blocks: Any, scales: Any, dtype: torch.dtype) -> None:
        self._blocks, self._scales, self._dtype = blocks, scales, dtype

    def as_stored(self) -> tuple[Stored, Stored]:
        """Return the packed weights, [experts, outputs, inputs / 2], and their scales."""
        experts, outputs, groups, num_bytes = self._blocks.get_shape()
        shape, blocks, scales = [experts, outputs, groups * num_bytes], self._blocks, self._scales
        weight = Stored(shape, "U8", lambda: blocks[...].flatten(2))
        return weight, Stored([*scales.get_shape()], "U8", lambda: scales[...])

    def get_shape(self) -> list[int]:
        """Return the shape of what is read: [experts, inputs, outputs]."""
        experts, outputs, groups, _ = self._blocks.get_shape()
        return [experts, groups * 2 * _FP4_GROUP_BYTES, outputs]

    def get_dtype(self) -> str:
        """Return the dtype of what is read, by safetensors' name."""
        return _DTYPE_NAMES[self._dtype]

    def __getitem__(self, index: Any) -> Tensor:
        """Read and dequantise the weights; besides the result only one expert is in memory."""
        assert index is Ellipsis, index
        result = torch.empty(self.get_shape(), dtype=self._dtype)
        for expert in range(len(result)):
            one = slice(expert, expert + 1)
            matrix = Mxfp4Matrix(self._blocks[one][0].flatten(1), self._scales[one][0])
            result[expert] = matrix.dequantised(self._dtype).T
        return result
