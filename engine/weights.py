"""The weights of a checkpoint: which files hold them, and a model that has exactly these.

transformers is given the tensors of the files that the fingerprint covers, not their folder. So it
cannot choose other files, nor apply an adapter that lies beside them. A tensor that the model lacks
or does not use is refused by its name, and so are values that are not finite: each of them would
give an answer that is not the model's. It knows nothing of devices' caches or of requests.
"""

import contextlib
import copy
import itertools
import math
import re
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tieredkv.engine.attention import ATTENTION_NAME
from tieredkv.engine.checkpoint import reason_of, refused, refusing
from tieredkv.engine.suitability import Reasons, check_reasons

_AUTO_MODEL: Any = AutoModelForCausalLM  # untyped in transformers
_NUM_NAMES_TOLD = 3
_FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""Of the tensors in a safetensors file; narrower ones mean nothing without their scales."""

_ALWAYS_IGNORED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Tensors of old checkpoints that transformers computes itself, in every model class."""


class _Index(msgspec.Struct):
    """Which file each tensor of a sharded checkpoint is in."""

    weight_map: dict[str, str]


def find_weight_files(name: str, folder: Path) -> list[Path]:
    """List the safetensors files of a checkpoint, which must all be there.

    Raises:
        ModelError: there are none, or one is missing.
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
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        what = f"{len(missing)} of {len(shards)} weight files are missing from `{folder}`"
        raise refused(name, f"{what}; the first is `{missing[0]}`")
    return [folder / shard for shard in shards]


def load_weights(
    name: str,
    config: PreTrainedConfig,
    files: Sequence[Path],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """Make the model that a config describes and weight files hold, on its device.

    Raises:
        ModelError: the files cannot be read, or do not hold exactly the tensors of the model, or
            some values are not finite.
    """
    with torch.device("meta"):
        empty = _AUTO_MODEL.from_config(copy.deepcopy(config), attn_implementation=ATTENTION_NAME)
    with contextlib.ExitStack() as stack:
        tensors = _open_tensors(name, files, stack)
        options = {"dtype": dtype, "attn_implementation": ATTENTION_NAME}
        stack.enter_context(_quiet_transformers())
        with refusing(name, "its weights do not fit its config", _merge_reason):
            model, info = type(empty).from_pretrained(
                None,  # no folder: nothing is read but these tensors
                config=config,
                state_dict=tensors,
                ignore_mismatched_sizes=True,  # which are refused below, in our own words
                output_loading_info=True,
                **options,
            )
        untied = sorted({*empty.all_tied_weights_keys} - {*model.all_tied_weights_keys})
        check_reasons(name, _tensor_reasons(model, tensors, info, untied))
        model = model.to(device)
        if device.type == "cpu":
            # Copied out of the memory-mapped files, one by one: a file that is overwritten then
            # cannot change a running model, and results do not depend on where a tensor stood.
            for tensor in itertools.chain(model.parameters(), model.buffers()):
                tensor.data = tensor.data.clone()
    check_reasons(name, _value_reasons(model, str(dtype).removeprefix("torch.")))
    loaded: PreTrainedModel = model
    return loaded


def _open_tensors(name: str, files: Sequence[Path], stack: contextlib.ExitStack) -> dict[str, Any]:
    """Find all tensors of weight files, none of which is read yet.

    Returns:
        Slices of safetensors by name, usable until the stack is closed.
    """
    tensors: dict[str, Any] = {}
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


def _tensor_reasons(
    model: Any, tensors: dict[str, Any], info: dict[str, Any], untied: Sequence[str]
) -> Reasons:
    """Say where the tensors of the files and those of the model differ."""
    state, tied = model.state_dict(), model.all_tied_weights_keys
    patterns = (*(model._keys_to_ignore_on_load_unexpected or ()), *_ALWAYS_IGNORED)
    ignored = re.compile("|".join(f"({pattern})" for pattern in patterns))
    used = [key for key in tensors if key in state or not ignored.search(key)]

    def is_narrow(key: str) -> bool:
        is_number = key in state and not state[key].is_floating_point()
        return tensors[key].get_dtype() not in _FLOAT_DTYPES and not is_number

    if narrow := list(filter(is_narrow, used)):
        what = f"{_named(narrow)} {_are(narrow)} stored as {tensors[narrow[0]].get_dtype()}"
        yield True, f"its weights are quantized, which is not supported yet: {what}"
    if extra := sorted(info["unexpected_keys"]):
        what = f"the model that config.json describes does not use {_named(extra)}"
        yield True, f"its weights do not fit its config: {what}"
    if absent := sorted(info["missing_keys"]):
        what = f"{_named(absent)} {_are(absent)} missing from its weight files"
        yield True, f"its weights do not fit its config: {what}"
    for key, stored, expected in sorted(info["mismatched_keys"]):
        shapes = f"has the shape {tuple(stored)}, but config.json says {tuple(expected)}"
        yield True, f"its weights do not fit its config: tensor `{key}` {shapes}"
    what = "tied to the input embeddings by config.json, but stored with other values"
    yield untied, f"its weights do not fit its config: {_named(untied)} {_are(untied)} {what}"
    # Of two tensors whose names transformers takes for the same parameter it drops one.
    num_expected = sum(state[key].numel() for key in state if key not in tied)
    num_stored = sum(math.prod(tensors[key].get_shape()) for key in used)
    num_copied = sum(state[key].numel() for key in tensors if key in tied)
    others = sorted({*used} - {*state})
    what = f"{num_stored} values are stored, but {num_expected} are used"
    what += f"; the model knows {_named(others)} by other names" if others else ""
    is_whole = num_stored - num_expected in (0, num_copied)
    yield not is_whole, f"its weights do not fit its config: {what}"


def _value_reasons(model: PreTrainedModel, dtype: str) -> Reasons:
    """Say which tensors hold NaN or infinite values; each is read once, where it lies."""
    floats = {key: it for key, it in model.state_dict().items() if it.is_floating_point()}
    ranges = [torch.stack(torch.aminmax(it)).float() for it in floats.values() if it.numel()]
    is_finite = torch.stack(ranges).isfinite().all(dim=1).tolist()
    bad = [key for key, fine in zip(floats, is_finite, strict=True) if not fine]
    yield bad, f"{_named(bad)} {'hold' if len(bad) > 1 else 'holds'} NaN or infinity in {dtype}"


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
