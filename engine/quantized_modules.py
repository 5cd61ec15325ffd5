"""Modules whose weights stay quantized, for kernels that multiply them as they are stored.

Which of a model's modules these are is decided by the headers of its weight files, or, where there
are none, by its config. All other quantized weights are dequantised when they are read. The module
knows parameters, not devices or requests.
"""

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tieredkv.engine.experts import SCALES, find_experts
from tieredkv.engine.quantized import Fp8Weight, Mxfp4Weight, Quantization, Stored, Tensors
from tieredkv.kernels import layers
from tieredkv.kernels.quantized import FP8_BLOCK, MXFP4_GROUP, Fp8Matrix, has_fp8

Method = Literal["fp8", "mxfp4"]

ARITHMETIC: dict[Method, str] = {"fp8": "fp8-block", "mxfp4": "mxfp4-packed"}
"""How products with quantized weights are named in what identifies a model's keys and values."""

_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("in_proj_qkv", "in_proj_z"))
"""Matrices of one input, which stay quantized together or not at all, since they are merged."""

_READ_AS_NUMBERS = ("lm_head", "kv_b_proj")
"""Linear layers whose weights are used otherwise than in a product of their own."""

_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}
"""Of weights in FP8 and of their scales, by safetensors' names."""

_EXPERTS = ("gate_up_proj", "down_proj")
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The weights of an expert, as checkpoints name them, by the name of those of all experts."""


class QuantizedLinear(nn.Linear):
    """A linear layer in FP8.

    Attributes:
        weight: float8_e4m3fn [outputs, inputs].
        scales: float32, one for each block; see `Fp8Matrix`.
    """

    scales: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Multiply rows, [..., inputs], which are quantized too."""
        rows = input.reshape(-1, input.shape[-1])
        matrix = Fp8Matrix(self.weight.data, self.scales.data)
        return layers.linear(rows, matrix, self.bias).view(*input.shape[:-1], -1)


def method_for(
    quantization: Quantization | None, device: torch.device, dtype: str
) -> Method | None:
    """Return how weights stay quantized on a device; None if all of them are dequantised.

    Products in FP8 need blocks of 128 by 128 and a GPU that has them.
    """
    if quantization is None or dtype != "bfloat16":
        return None
    if quantization.method == "fp8":
        is_by_block = quantization.block == (FP8_BLOCK, FP8_BLOCK)
        return "fp8" if is_by_block and has_fp8(device) else None
    return "mxfp4" if device.type == "cuda" else None


def find_stored(model: PreTrainedModel, tensors: Tensors, method: Method) -> list[str]:
    """Return the paths of modules whose weights can stay as weight files hold them.

    Args:
        model: on the meta device.
        tensors: by the model's names; those that are quantized are dequantised when they are read.
        method: of the weights that may stay.
    """

    def fits(weight: Any) -> bool:
        if method == "mxfp4":
            return isinstance(weight, Mxfp4Weight)
        return isinstance(weight, Fp8Weight) and _is_whole(weight)

    def fits_linear(path: str, _: nn.Linear) -> bool:
        return fits(tensors.get(f"{path}.weight"))

    def fits_experts(path: str, module: Any) -> bool:
        found = (_experts_weights(path, name, module, tensors) for name in _EXPERTS)
        return all(map(fits, itertools.chain(*found)))

    return [*_fitting(model, method, fits_linear, fits_experts)]


def choose_drawn(model: PreTrainedModel, method: Method, excluded: Collection[str]) -> list[str]:
    """Return the paths of modules whose weights a checkpoint of this config has quantized.

    Args:
        model: on the meta device.
        method: of the checkpoint.
        excluded: parts of paths of modules that are not quantized, in this model or in the
            multimodal one that it is a part of.
    """
    parts = [re.escape(part.replace("language_model.", "")) for part in excluded]

    def is_excluded(path: str) -> bool:
        return any(re.search(rf"(^|\.){part}(\.|$)", path) for part in parts)

    def fits_linear(path: str, linear: nn.Linear) -> bool:
        return not (any(size % FP8_BLOCK for size in linear.weight.shape) or is_excluded(path))

    def fits_experts(path: str, module: Any) -> bool:
        inputs = [_expert_shape(module, name)[2] for name in _EXPERTS]
        if method == "mxfp4":
            return not any(size % MXFP4_GROUP for size in inputs)
        sizes = *inputs, _expert_shape(module, "gate_up_proj")[1] // 2
        return not (any(size % FP8_BLOCK for size in sizes) or is_excluded(path))

    return [*_fitting(model, method, fits_linear, fits_experts)]


def _fitting(
    model: PreTrainedModel,
    method: Method,
    fits_linear: Callable[[str, nn.Linear], bool],
    fits_experts: Callable[[str, Any], bool],
) -> Iterator[str]:
    """Give the paths of modules that fit and that kernels can take; in MXFP4 only experts."""
    linears = dict[str, nn.Linear]()
    if method == "fp8":
        linears |= {path: it for path, it in model.named_modules() if isinstance(it, nn.Linear)}
    fitting = {
        path
        for path, linear in linears.items()
        if path.rpartition(".")[2] not in _READ_AS_NUMBERS and fits_linear(path, linear)
    }
    for path in linears:
        parent, _, name = path.rpartition(".")
        siblings = next((group for group in _MERGED if name in group), (name,))
        paths = {f"{parent}.{each}" if parent else each for each in siblings}
        if paths & {*linears} <= fitting:
            yield path
    for path, module in model.named_modules():
        if hasattr(module, _EXPERTS[0]) and hasattr(module, _EXPERTS[1]):
            is_known = hasattr(module, "has_gate") and find_experts(module) is not None
            if is_known and fits_experts(path, module):
                yield path


def keep_quantized(model: nn.Module, paths: Collection[str], method: Method) -> None:
    """Give modules of a model on the meta device parameters that hold quantized weights."""
    for path in paths:
        module: Any = model.get_submodule(path)
        if isinstance(module, nn.Linear):
            module.__class__ = QuantizedLinear
            module.weight, module.scales = _empty("fp8", module.weight.shape)
        else:
            for name in _EXPERTS:
                weight, scales = _empty(method, _expert_shape(module, name))
                setattr(module, name, weight)
                setattr(module, f"{name}{SCALES}", scales)


def quantized_class(kind: Any, paths: Collection[str], method: Method) -> Any:
    """Return a class of models whose modules are made with parameters for quantized weights."""

    def init(self: Any, *args: Any, **options: Any) -> None:
        kind.__init__(self, *args, **options)
        keep_quantized(self, paths, method)

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})


def _empty(method: Method, shape: tuple[int, ...]) -> tuple[nn.Parameter, nn.Parameter]:
    """Return parameters for weights, [..., outputs, inputs], and for their scales."""
    *others, outputs, inputs = shape
    if method == "fp8":
        grid = [*others, outputs // FP8_BLOCK, inputs // FP8_BLOCK]
        sizes = ([*shape], torch.float8_e4m3fn), (grid, torch.float32)
    else:
        sizes = (
            ([*others, outputs, inputs // 2], torch.uint8),
            ([*others, outputs, inputs // MXFP4_GROUP], torch.uint8),
        )
    weight, scales = (
        nn.Parameter(torch.empty(size, dtype=dtype, device="meta"), requires_grad=False)
        for size, dtype in sizes
    )
    return weight, scales


def quantized_parameters(model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Give the values and scales of all weights that stay quantized."""
    for module in model.modules():
        whole: Any = module
        if isinstance(module, QuantizedLinear):
            yield module.weight, module.scales
        for name in _EXPERTS:
            if hasattr(module, f"{name}{SCALES}"):
                yield getattr(whole, name), getattr(whole, f"{name}{SCALES}")


def other_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Give the names and parameters of all that is not quantized."""
    quantized = {id(tensor) for pair in quantized_parameters(model) for tensor in pair}
    for name, parameter in model.named_parameters():
        if id(parameter) not in quantized:
            yield name, parameter


def quantized_paths(model: nn.Module) -> Iterator[tuple[str, Method]]:
    """Give the paths of all modules whose weights stay quantized, and how."""
    for path, module in model.named_modules():
        whole: Any = module
        if isinstance(module, QuantizedLinear):
            yield path, "fp8"
        elif hasattr(module, f"{_EXPERTS[0]}{SCALES}"):
            is_fp8 = getattr(whole, _EXPERTS[0]).dtype == torch.float8_e4m3fn
            yield path, "fp8" if is_fp8 else "mxfp4"


def stored(model: PreTrainedModel, tensors: Tensors, paths: Collection[str]) -> Tensors:
    """Return the tensors of weight files, with those of modules that stay quantized as they are.

    Args:
        model: on the meta device, before `keep_quantized`.
        tensors: by the model's names.
        paths: by `find_stored`.
    """
    result = dict(tensors)
    for path in paths:
        module = model.get_submodule(path)
        if isinstance(module, nn.Linear):
            weight = result.pop(f"{path}.weight")
            result[f"{path}.weight"], result[f"{path}.scales"] = weight.as_stored()
            continue
        for name in _EXPERTS:
            weights = _experts_weights(path, name, module, tensors)
            for key in _experts_keys(path, name, module, tensors):
                del result[key]
            parts = [weight.as_stored() for weight in weights]
            key = f"{path}.{name}"
            merged = parts[0] if len(parts) == 1 else _stacked(parts, len(_STACKED[name]))
            result[key], result[f"{key}{SCALES}"] = merged
    return result


def _experts_keys(path: str, name: str, module: Any, tensors: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors that have a weight of all experts, expert by expert."""
    if (key := f"{path}.{name}") in tensors:
        return [key]
    num_experts = _expert_shape(module, name)[0]
    places = [(expert, part) for expert in range(num_experts) for part in _STACKED[name]]
    return [f"{path}.{expert}.{part}.weight" for expert, part in places]


def _experts_weights(path: str, name: str, module: Any, tensors: Mapping[str, Any]) -> list[Any]:
    return [tensors.get(key) for key in _experts_keys(path, name, module, tensors)]


def _expert_shape(module: Any, name: str) -> tuple[int, int, int]:
    """Return [num_experts, outputs, inputs] of a weight of experts that is not quantized yet."""
    num_experts, outputs, inputs = getattr(module, name).shape
    turned = num_experts, inputs, outputs
    return turned if module.is_transposed else (num_experts, outputs, inputs)


def _is_whole(weight: Fp8Weight) -> bool:
    """Whether a weight is of whole blocks."""
    *_, outputs, inputs = weight.get_shape()
    return weight.block == (FP8_BLOCK, FP8_BLOCK) and not (
        outputs % FP8_BLOCK or inputs % FP8_BLOCK
    )


def _stacked(parts: list[tuple[Stored, Stored]], num_parts: int) -> tuple[Stored, Stored]:
    """Put the weights of each expert under one another, and those of all experts together."""
    values, scales = (_stack([*each], num_parts) for each in zip(*parts, strict=True))
    return values, scales


def _stack(parts: list[Stored], num_parts: int) -> Stored:
    (rows, columns), dtype = parts[0].get_shape(), parts[0].get_dtype()
    shape = [len(parts) // num_parts, num_parts * rows, columns]

    def read() -> Tensor:
        result = torch.empty(len(parts), rows, columns, dtype=_DTYPES[dtype])
        for place, part in zip(result, parts, strict=True):
            place.copy_(part[...])
        return result.view(shape)

    return Stored(shape, dtype, read)
