"""The text model in a multimodal checkpoint: its config, and which tensors are its own.

Where the text model stands in the whole, and what stands beside it, is taken from transformers'
class of the whole, built without memory. Names of tensors are those of checkpoints as transformers
writes them now, or as it wrote them before version 5; for what stands beside the text, its table of
renamings is asked, too.
"""

import contextlib
import copy
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from tieredkv.engine.checkpoint import refused, refusing
from tieredkv.engine.quantized import CONFIG_FIELDS, Tensors

_AUTO_MODEL: Any = AutoModelForMultimodalLM  # untyped in transformers

_SAME_TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl_text": ("qwen2", {}),
    "qwen2_5_vl_text": ("qwen2", {}),
    "qwen3_vl_text": ("qwen3", {}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": True}),
}
"""Text models without a class of their own, and the type with the same weights and results.

They rotate by three positions, which are equal for a token of text. What their code always does is
a field of the other type.
"""

_ALWAYS_IGNORED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Tensors of old checkpoints that transformers computes itself, in every model class."""

_ROPE_OF_IMAGES = ("mrope_section", "mrope_interleaved")


def text_config(name: str, config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the text model that a checkpoint holds, or is.

    It is a copy that says nothing of quantization, since the weights are dequantised when they are
    loaded.

    Raises:
        ModelError: there is no text model that transformers can build.
    """
    kind = config.model_type
    with refusing(name, f"the text model of `{kind}` cannot be told"):
        text = copy.deepcopy(config.get_text_config())
    for field in CONFIG_FIELDS:
        if hasattr(text, field):
            delattr(text, field)
    if not is_multimodal(config):
        return text
    if config.is_encoder_decoder:
        what = f"`{kind}` is an encoder-decoder model, and only decoder-only models are supported"
        raise refused(name, what)
    if type(config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        raise refused(name, f"transformers has no multimodal language model of type `{kind}`")
    if same := _SAME_TEXT.get(text.model_type):
        kind_of_text, told = same
        table = text.to_dict() | told
        del table["model_type"]
        rope = table.get("rope_parameters") or {}
        table["rope_parameters"] = {k: it for k, it in rope.items() if k not in _ROPE_OF_IMAGES}
        text = AutoConfig.for_model(kind_of_text, **table)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        what = f"transformers has no causal language model of type `{text.model_type}`"
        raise refused(name, f"{what}, which is the text model of `{kind}`")
    return text


def ignored_names(model: PreTrainedModel) -> re.Pattern[str]:
    """Return what the names of tensors have that a model's class does not use, such as MTP's.

    What would match a module of this model is left out: a class may name the layer of MTP in a
    smaller model of its family by a number that is that of a layer here.
    """
    told = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    paths = [f"{path}." for path, _ in model.named_modules()]
    others = [it.pattern for it in told if not any(map(it.search, paths))]
    return re.compile("|".join(f"({pattern})" for pattern in (*others, *_ALWAYS_IGNORED)))


def is_multimodal(config: PreTrainedConfig) -> bool:
    """Whether the text model that a config describes is a part of a larger one."""
    return config.get_text_config() is not config


class SplitTensors(NamedTuple):
    """The tensors of a multimodal checkpoint.

    Attributes:
        text: those of the text model, by its own names for them.
        others: names of those that stand beside it in the whole.
        is_tied: whether the output layer is the input embeddings.
    """

    text: Tensors
    others: list[str]
    is_tied: bool


def split_tensors(
    name: str, config: PreTrainedConfig, model: PreTrainedModel, tensors: Tensors
) -> SplitTensors:
    """Find the tensors of the text model in a multimodal checkpoint.

    Args:
        name: the model's name.
        config: that of the whole.
        model: the text model, on the meta device.
        tensors: those of the weight files. A tensor that is neither of the text model nor of what
            stands beside it keeps its name.

    Raises:
        ModelError: the whole cannot be built, or two tensors have one name in the text model.
    """
    whole = _whole_model(name, config)
    path = _place_of_text(whole, config)
    parent, _, last = path.rpartition(".")
    own = "|".join(child for child, _ in model.named_children())
    # In a checkpoint of an earlier version the text model is whole, with its own output layer.
    whole_text = re.compile(rf"^({re.escape(path)}|{re.escape(last)})\.(?=({own})\.)")
    base = f"{model.base_model_prefix}."
    beside = {_head(key, parent) for key in whole.state_dict() if not key.startswith(f"{path}.")}
    beside -= {*own.split("|")}
    ignored = ignored_names(whole)
    renamings = [it for it in get_model_conversion_mapping(whole) if isinstance(it, WeightRenaming)]
    text: Tensors = {}
    others = []
    for key, tensor in tensors.items():
        new = key
        for renaming in renamings:
            new, _ = renaming.rename_source_key(new)
        heads = {_head(key, parent), _head(new, parent)}
        if heads & beside or ignored.search(key):
            others.append(key)
            continue
        renamed = whole_text.sub("", key)
        if renamed.startswith(f"{path}."):
            renamed = base + renamed.removeprefix(f"{path}.")
        if renamed in text:
            raise refused(name, f"tensor `{renamed}` is in its weight files by two names")
        text[renamed] = tensor
    # The two configs may disagree, and what is stored decides.
    is_tied = any(getattr(it, "tie_word_embeddings", False) for it in (config, model.config))
    outputs = {*(model._tied_weights_keys or ())}
    return SplitTensors(text, others, is_tied and outputs.isdisjoint(text))


def turned(tensors: Tensors, state: Mapping[str, Tensor]) -> Tensors:
    """Exchange rows and columns of experts that are stored the other way, as by Qwen3-VL-MoE.

    Where one of a layer's weights is stored so, all are: a square one does not tell by its shape.

    Args:
        tensors: those of the text model; quantized ones are dequantised when they are read.
        state: what the model needs, on the meta device.
    """
    experts = {key: it for key, it in tensors.items() if key in state and state[key].ndim == 3}
    layers = {_module(key) for key, it in experts.items() if _is_turned(it, state[key])}
    return tensors | {key: Transposed(experts[key]) for key in experts if _module(key) in layers}


def _is_turned(tensor: Any, expected: Tensor) -> bool:
    """Whether weights of experts are stored as [experts, inputs, outputs]."""
    stored, wanted = [*tensor.get_shape()], [*expected.shape]
    return stored != wanted and stored == [wanted[i] for i in (0, 2, 1)]


def _module(key: str) -> str:
    """Return the path of the module that has a tensor."""
    return key.rpartition(".")[0]


class Transposed:
    """Weights of experts whose rows and columns are exchanged, read like a slice of safetensors."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """Return the shape of what is read."""
        experts, inputs, outputs = self._tensor.get_shape()
        return [experts, outputs, inputs]

    def get_dtype(self) -> str:
        """Return the dtype of what is read, by safetensors' name."""
        return str(self._tensor.get_dtype())

    def __getitem__(self, index: Any) -> Tensor:
        """Read all of it."""
        assert index is Ellipsis, index
        read: Tensor = self._tensor[...]
        return read.transpose(1, 2).contiguous()


def _whole_model(name: str, config: PreTrainedConfig) -> PreTrainedModel:
    """Build the whole model on the meta device, whatever dtype its config names."""
    config = copy.deepcopy(config)
    for field in CONFIG_FIELDS:
        with contextlib.suppress(AttributeError):
            delattr(config, field)
    what = f"transformers cannot build `{config.model_type}`, whose text is served"
    with refusing(name, what), torch.device("meta"):
        model: PreTrainedModel = _AUTO_MODEL.from_config(config, dtype=torch.float32)
    return model


def _place_of_text(whole: PreTrainedModel, config: PreTrainedConfig) -> str:
    """Return the path of the text model in the whole."""
    kind = type(config.get_text_config())
    for path, module in whole.named_modules():
        if path and isinstance(module, PreTrainedModel) and type(module.config) is kind:
            return str(path)
    raise AssertionError(f"{type(whole)} has no {kind}")


def _head(key: str, parent: str) -> str:
    """Return the part of the whole that a tensor is in, at its root or beside the text model."""
    return key.removeprefix(f"{parent}.").partition(".")[0]
