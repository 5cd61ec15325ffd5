"""The weights of a checkpoint: which files hold them, and a model that has exactly these.

transformers is given the tensors of the files that the fingerprint covers, not their folder. So it
cannot choose other files, nor apply an adapter that lies beside them. A tensor that the model lacks
or does not use is refused by its name, and so are values that are not finite: each of them would
give an answer that is not the model's. It knows nothing of devices' caches or of requests.
"""

import contextlib
import copy
import itertools
import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import logging as transformers_logging

from tieredkv.engine.attention import ATTENTION_NAME
from tieredkv.engine.checkpoint import reason_of, refused, refusing
from tieredkv.engine.experts import EXPERTS_NAME
from tieredkv.engine.quantized import (
    Fp8Weight,
    Mxfp4Weight,
    Tensors,
    dequantised,
    find_quantization,
)
from tieredkv.engine.quantized_modules import (
    Method,
    find_stored,
    keep_quantized,
    quantized_class,
    stored,
)
from tieredkv.engine.suitability import Reasons, check_reasons
from tieredkv.engine.text_model import ignored_names, is_multimodal, split_tensors, turned

logger = logging.getLogger(__name__)

_AUTO_MODEL: Any = AutoModelForCausalLM  # untyped in transformers
_NUM_NAMES_TOLD = 3
_NUM_GROUPS_TOLD = 8
_WIDE_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""Of the tensors in a safetensors file; narrower ones mean nothing without their scales."""

_OF_IMAGES = re.compile("vision|visual|audio|multi_modal")
"""In names of tensors that read what is no text."""

_LAYER = re.compile(r"([^0-9]+)\.([0-9]+)\.")


class _Index(msgspec.Struct):
    """Which file each tensor of a sharded checkpoint is in."""

    weight_map: dict[str, str]


def find_weight_files(name: str, folder: Path) -> list[Path]:
    """List the safetensors files of a checkpoint, which must all be there.

    Raises:
        ModelError: there are none, or one is missing or lies elsewhere.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        others = "convert the weights, since other formats can run code and are not loaded"
        raise refused(name, f"`{folder}` has no model.safetensors; {others}")
    with refusing(name, f"`{index}` cannot be read"):
        shards = sorted({*msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()})
    if outside := [shard for shard in shards if Path(shard).name != shard]:
        raise refused(name, f"`{index}` names `{outside[0]}`, which is no file of its folder")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        what = f"{len(missing)} of {len(shards)} weight files are missing from `{folder}`"
        raise refused(name, f"{what}; the first is `{missing[0]}`")
    return [folder / shard for shard in shards]


def check_weights(
    name: str,
    config: PreTrainedConfig,
    files: Sequence[Path],
    *,
    whole: PreTrainedConfig,
    dtype: torch.dtype,
    method: Method | None = None,
) -> None:
    """Refuse weight files that cannot be those of a model, by what their headers say.

    Args:
        name: the model's name.
        config: that of the model, which is a text model.
        files: the weight files.
        whole: the config that lies beside them.
        dtype: of the model.
        method: how weights stay quantized; None if all of them are dequantised.

    Raises:
        ModelError: a file cannot be read, or a tensor is not one of the model.
    """
    with contextlib.ExitStack() as stack:
        _open_checkpoint(name, config, files, whole, dtype, method, stack)


def load_weights(
    name: str,
    config: PreTrainedConfig,
    files: Sequence[Path],
    *,
    whole: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    method: Method | None = None,
) -> PreTrainedModel:
    """Make the model that a config describes and weight files hold, on its device.

    Args:
        name: as in `check_weights`, and so are the others.
        config: as well.
        files: as well.
        whole: as well.
        dtype: as well.
        device: where the weights will lie.
        method: as well.

    Raises:
        ModelError: the files cannot be read, or do not hold exactly the tensors of the model, or
            some values are not finite.
    """
    with contextlib.ExitStack() as stack:
        opened = _open_checkpoint(name, config, files, whole, dtype, method, stack)
        empty, tensors = opened.empty, opened.tensors
        for text in opened.told:
            logger.info("model `%s`: %s", name, text)
        options = {"dtype": dtype, "attn_implementation": ATTENTION_NAME}
        options["experts_implementation"] = EXPERTS_NAME
        stack.enter_context(_quiet_transformers())
        with refusing(name, "its weights do not fit its config", _merge_reason):
            model, info = opened.kind.from_pretrained(
                None,  # no folder: nothing is read but these tensors
                config=opened.config,
                state_dict=tensors,
                ignore_mismatched_sizes=True,  # which are refused below, in our own words
                output_loading_info=True,
                **options,
            )
        model.__class__ = type(empty)
        untied = sorted({*empty.all_tied_weights_keys} - {*model.all_tied_weights_keys})
        check_reasons(name, _tensor_reasons(info, untied))
        model = model.to(device)
        if device.type == "cpu":
            # Copied out of the memory-mapped files, one by one: a file that is overwritten then
            # cannot change a running model, and results do not depend on where a tensor stood.
            for tensor in itertools.chain(model.parameters(), model.buffers()):
                tensor.data = tensor.data.clone()
    check_reasons(name, _value_reasons(model, str(dtype).removeprefix("torch.")))
    loaded: PreTrainedModel = model
    return loaded


class _Opened(NamedTuple):
    """A checkpoint of which only the headers of its files were read.

    Attributes:
        config: that of the model to make.
        empty: the model on the meta device.
        kind: the class to make it of.
        tensors: those that it is made from, by names that transformers knows for it.
        told: what operators should know of the other tensors.
    """

    config: PreTrainedConfig
    empty: Any
    kind: Any
    tensors: Tensors
    told: list[str]


def _open_checkpoint(
    name: str,
    config: PreTrainedConfig,
    files: Sequence[Path],
    whole: PreTrainedConfig,
    dtype: torch.dtype,
    method: Method | None,
    stack: contextlib.ExitStack,
) -> _Opened:
    """Find the tensors of a model in weight files, and check their names and shapes.

    Nothing is allocated, and no weight is read. The tensors can be read until the stack is closed.
    """
    config, quantization = copy.deepcopy(config), find_quantization(name, whole)
    empty, tensors = _empty_model(config, dtype), _open_tensors(name, files, stack)
    told: list[str] = []
    unused: list[str] = []
    scales: list[str] = []
    if is_part := is_multimodal(whole):
        tensors, unused, config.tie_word_embeddings = split_tensors(name, whole, empty, tensors)
        empty = _empty_model(config, dtype)
    state, ignored = empty.state_dict(), ignored_names(empty)
    used = {key: it for key, it in tensors.items() if key in state or not ignored.search(key)}
    if unused := [*unused, *(key for key in tensors if key not in used)]:
        told.append(f"{len(unused)} tensors are not used: {_counted(_groups(unused, state))}")
    if quantization is not None:
        used, scales = dequantised(name, used, quantization, dtype)
    if is_part:
        used = turned(used, state)
    kind = type(empty)
    if quantization is not None:
        paths = [] if method is None else find_stored(empty, used, method)
        if method is not None:
            kind, used = quantized_class(kind, paths, method), stored(empty, used, paths)
            keep_quantized(empty, paths, method)
            state = empty.state_dict()
        told.append(_told_of_quantized(quantization.method, used, paths, dtype))
        if scales:
            ends = Counter(key.rpartition(".")[2] for key in scales)
            told.append(f"{len(scales)} static scales are not used: {_counted(ends)}")
    check_reasons(name, _header_reasons(config.model_type, is_part, state, used))
    check_reasons(name, _count_reasons(empty, used))
    return _Opened(config, empty, kind, used, told)


def _told_of_quantized(
    method: str, tensors: Tensors, paths: Sequence[str], dtype: torch.dtype
) -> str:
    """Say how many quantized weights are multiplied as they are stored, and what of the others."""
    count = sum(isinstance(it, (Fp8Weight, Mxfp4Weight)) for it in tensors.values())
    what = f"{count} {method} weights are dequantised to {str(dtype).removeprefix('torch.')}"
    if not paths:
        return what
    others = f"; {what}" if count else ""
    return f"{len(paths)} modules multiply by {method} weights as they are stored{others}"


def _empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """Build a model on the meta device, whatever dtype its config names."""
    options = {"dtype": dtype, "attn_implementation": ATTENTION_NAME}
    with torch.device("meta"):
        return _AUTO_MODEL.from_config(copy.deepcopy(config), **options)


def _open_tensors(name: str, files: Sequence[Path], stack: contextlib.ExitStack) -> Tensors:
    """Find all tensors of weight files, none of which is read yet.

    Returns:
        Slices of safetensors by name, usable until the stack is closed.
    """
    tensors: Tensors = {}
    for path in files:
        with refusing(name, f"`{path}` cannot be read", partial(_file_reason, path)):
            file = stack.enter_context(safe_open(path, framework="pt"))
        for key in file.keys():  # noqa: SIM118 (it is no dictionary)
            if key in tensors:
                raise refused(name, f"tensor `{key}` is in two of its weight files")
            tensors[key] = file.get_slice(key)
    return tensors


def _file_reason(path: Path, error: Exception) -> str | None:
    """Say what a file is that safetensors cannot read, or why it cannot be opened."""
    try:  # safetensors says "No such file" of whatever it cannot open
        with path.open("rb") as file:
            start = file.read(32)
    except OSError as cause:
        return reason_of(cause, str(path))
    if isinstance(error, OSError):
        return None
    if start.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS; fetch the weights with `git lfs pull`"
    return f"it was cut short, or it is not a safetensors file ({error})"


def _header_reasons(kind: str, is_part: bool, state: dict[str, Any], tensors: Tensors) -> Reasons:
    """Say why tensors cannot be those of a model, as far as their names and shapes tell.

    Args:
        kind: the model's type.
        is_part: whether it is a part of a multimodal one.
        state: its tensors, on the meta device.
        tensors: those of the files. transformers may know them by other names than in `state`.
    """
    groups = _groups(tensors, state)
    if not is_part and (beside := [key for key in groups if _OF_IMAGES.search(key)]):
        found = Counter({group: groups[group] for group in beside})
        what = f"its weight files hold more than text ({_counted(found)})"
        way_out = "take the config.json of the multimodal checkpoint"
        yield True, f"{what}, but config.json describes a text model (`{kind}`); {way_out}"

    def is_narrow(key: str) -> bool:
        is_wide = key not in state or state[key].dtype in _WIDE_DTYPES
        return tensors[key].get_dtype() not in _FLOAT_DTYPES and is_wide

    if narrow := list(filter(is_narrow, tensors)):
        what = f"{_named(narrow)} {_are(narrow)} stored as {tensors[narrow[0]].get_dtype()}"
        yield True, f"{what}, and config.json does not say by which scales to read that"
    expected, stored = _num_layers(state), _num_layers(tensors)
    for place in expected:
        what = f"config.json says {expected[place]} layers (`{place}`)"
        differs = stored.get(place, expected[place]) != expected[place]
        held = f"but its weight files hold {stored.get(place)}"
        yield differs, f"its weights do not fit its config: {what}, {held}"
    for key in sorted({*tensors} & {*state}):
        has, wants = tuple(tensors[key].get_shape()), tuple(state[key].shape)
        what = f"tensor `{key}` has the shape {has}, but config.json says {wants}"
        yield has != wants, f"its weights do not fit its config: {what}"


def _count_reasons(empty: Any, tensors: Tensors) -> Reasons:
    """Say where weight files hold more or fewer values than a model on the meta device has."""
    state, tied = empty.state_dict(), {*empty.all_tied_weights_keys}
    sizes = {key: math.prod(it.get_shape()) for key, it in tensors.items()}
    num_expected = sum(state[key].numel() for key in state if key not in tied)
    num_copied = sum(state[key].numel() for key in tensors if key in tied)
    if (num_stored := sum(sizes.values())) - num_expected in (0, num_copied):
        return
    renamings, prefix = get_model_conversion_mapping(empty), empty.base_model_prefix
    stored, unknown = Counter[str](), list[str]()
    for key in sorted(sizes):
        known = key  # what transformers makes of it, alone or with others
        for renaming in renamings:
            known, _ = renaming.rename_source_key(known)
        known = whole if (whole := f"{prefix}.{known}") in state else known
        stored[known] += sizes[key]
        if known not in state:
            unknown.append(key)
    misfit = "its weights do not fit its config"
    yield from _name_reasons(unknown, sorted({*state} - {*stored} - tied))
    for key in stored:
        has, wants = stored[key], state[key].numel()
        what = f"{misfit}: its weight files hold {has:,} values for `{key}`"
        yield has != wants, f"{what}, but config.json says {wants:,}"
    what = f"{misfit}: its weight files hold {num_stored:,} values"
    yield True, f"{what}, but config.json says {num_expected:,}"


def _name_reasons(extra: Sequence[str], absent: Sequence[str]) -> Reasons:
    """Say that a model lacks tensors of its weight files, or they lack some of it."""
    misfit = "its weights do not fit its config"
    yield extra, f"{misfit}: the model that config.json describes does not use {_named(extra)}"
    yield absent, f"{misfit}: {_named(absent)} {_are(absent)} missing from its weight files"


def _num_layers(keys: Iterable[str]) -> dict[str, int]:
    """Count the layers, by the place of their list in the model."""
    layers = {match.groups() for key in keys if (match := _LAYER.match(key))}
    return Counter(place for place, _ in layers)


def _groups(keys: Iterable[str], state: Iterable[str]) -> Counter[str]:
    """Count tensors by the largest part of the whole that they are in and the model is not."""
    own = {start for key in state for start in _starts(key)}
    return Counter(next((it for it in _starts(key) if it not in own), key) for key in keys)


def _starts(key: str) -> Iterator[str]:
    """Give all paths on the way to a tensor, the shortest one first."""
    return itertools.accumulate(key.split("."), "{}.{}".format)


def _counted(groups: Counter[str]) -> str:
    """Name the largest groups of tensors, with the number of tensors in each."""
    named = [f"`{group}` ({count})" for group, count in groups.most_common(_NUM_GROUPS_TOLD)]
    return ", ".join([*named, "…"] if len(groups) > len(named) else named)


def _tensor_reasons(info: dict[str, Any], untied: Sequence[str]) -> Reasons:
    """Say where tensors, by transformers' names for them, and those of the model differ."""
    yield from _name_reasons(sorted(info["unexpected_keys"]), sorted(info["missing_keys"]))
    for key, found, expected in sorted(info["mismatched_keys"]):
        shapes = f"has the shape {tuple(found)}, but config.json says {tuple(expected)}"
        yield True, f"its weights do not fit its config: tensor `{key}` {shapes}"
    what = "tied to the input embeddings by config.json, but stored with other values"
    yield untied, f"its weights do not fit its config: {_named(untied)} {_are(untied)} {what}"


def _value_reasons(model: PreTrainedModel, dtype: str) -> Reasons:
    """Say which tensors hold NaN or infinite values; each is read once, where it lies."""
    tensors = model.state_dict()
    floats = {key: it for key, it in tensors.items() if it.dtype in _WIDE_DTYPES}
    ranges = [torch.stack(torch.aminmax(it)).float() for it in floats.values() if it.numel()]
    is_finite = torch.stack(ranges).isfinite().all(dim=1).tolist()
    bad = [key for key, fine in zip(floats, is_finite, strict=True) if not fine]
    bad += [key for key, it in tensors.items() if it.dtype == torch.float8_e4m3fn and _has_nan(it)]
    yield bad, f"{_named(bad)} {'hold' if len(bad) > 1 else 'holds'} NaN or infinity in {dtype}"


def _has_nan(tensor: Tensor) -> bool:
    """Return whether a tensor in FP8 has a NaN, of which there are two."""
    return bool((tensor.view(torch.uint8) & 0x7F == 0x7F).any())


def _named(keys: Collection[str]) -> str:
    """Name the first few of some tensors and tell how many there are."""
    names = ", ".join(f"`{key}`" for key in itertools.islice(keys, _NUM_NAMES_TOLD))
    if len(keys) > _NUM_NAMES_TOLD:
        return f"{len(keys)} tensors ({names}, …)"
    return f"tensor{'s' if len(keys) > 1 else ''} {names}"


def _are(keys: Collection[str]) -> str:
    return "are" if len(keys) > 1 else "is"


def _merge_reason(error: Exception) -> str | None:
    """Say in our own words what transformers only refers to."""
    if "CONVERSION" in str(error):
        return "tensors that the model merges, such as those of its experts, differ in shape"
    return None


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' bars and reports off the terminal: both are told in our own words."""
    theirs: Any = transformers_logging  # untyped in transformers
    was_enabled, verbosity = theirs.is_progress_bar_enabled(), theirs.get_verbosity()
    theirs.disable_progress_bar()
    theirs.set_verbosity_error()
    try:
        yield
    finally:
        theirs.set_verbosity(verbosity)
        if was_enabled:
            theirs.enable_progress_bar()
