"""Find and load a model by its name: a folder, a hub id, `tiny-random`, or `random:` and a shape.

What a config tells against a model is refused before weights are allocated, in one sentence that
names the model and the reason. The modelling code is transformers' own. This module knows nothing
of requests, batches or blocks.
"""

import contextlib
import copy
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tieredkv.config import Dtype, Fingerprint, Settings
from tieredkv.engine import fused_gemma, fused_hybrid
from tieredkv.engine.attention import AttentionLayer, ModelLayer, attention_layers, own_layers
from tieredkv.engine.byte_tokenizer import BYTE_VOCAB_SIZE, stop_token_ids
from tieredkv.engine.checkpoint import (
    TINY_NAME,
    GenerationConfig,
    check_folder,
    drawn_config,
    find_folder,
    load_tokenizer,
    max_model_len,
    read_config,
    read_generation_config,
    refused,
)
from tieredkv.engine.drawn_weights import draw_weights, make_model, make_quantized_model
from tieredkv.engine.fingerprint import (
    CACHE_DIR,
    file_state,
    files_fingerprint,
    parameters_fingerprint,
)
from tieredkv.engine.fused import FusedModel
from tieredkv.engine.fused_experts import fuse_experts
from tieredkv.engine.fused_gemma import FusedGemma
from tieredkv.engine.fused_hybrid import FusedHybrid
from tieredkv.engine.fused_latent import fuse_latents
from tieredkv.engine.fused_norms import fuse_norms
from tieredkv.engine.latent import keep_latents
from tieredkv.engine.quantized import (
    check_quantization_files,
    find_quantization,
    unquantized_modules,
)
from tieredkv.engine.quantized_modules import ARITHMETIC, Method, method_for
from tieredkv.engine.recurrent import keep_states
from tieredkv.engine.rope import fixed_rope, scaled_rope, why_unscalable
from tieredkv.engine.suitability import Reasons, check_config, check_reasons, probe_attention
from tieredkv.engine.text_model import text_config
from tieredkv.engine.tiny import init_tiny_weights
from tieredkv.engine.weights import check_weights, find_weight_files, load_weights
from tieredkv.errors import ConfigError
from tieredkv.kernels import delta_chunks
from tieredkv.types import DTYPE_BYTES, KVSpec, LayerKV, Progress, StateShape, ignore_progress

logger = logging.getLogger(__name__)

Fused = FusedModel | FusedGemma | FusedHybrid
"""A model whose layers run in a few large steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model whose config was read and accepted, and of which no weight has been read yet.

    Attributes:
        name: the name that the user gave.
        config: that of the text model, which says nothing of quantization.
        whole_config: the config as transformers read it.
        layers: what its layers keep of the tokens before, in their order.
        dtype: dtype of the weights and of keys and values: `float32`, `bfloat16` or `float16`.
        device: the device on which its weights lie or will lie.
        max_model_len: tokens of its longest context.
        folder: the folder of its files; None for a model with drawn weights.
        generation: what its authors recommend for its answers.
        rope: parameters of its rope where they are not those of its config.json.
        method: how quantized weights stay quantized; None if all are dequantised.
    """

    name: str
    config: PreTrainedConfig
    whole_config: PreTrainedConfig
    layers: Sequence[ModelLayer]
    dtype: str
    device: torch.device
    max_model_len: int
    folder: Path | None
    generation: GenerationConfig
    rope: dict[str, Any] | None
    method: Method | None

    @property
    def vocab_size(self) -> int:
        """The number of token ids, which is the number of logits."""
        return int(self.config.vocab_size)

    @property
    def device_name(self) -> str:
        """The name of the device, by which rates measured on another kind are told apart."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{self.device.type}, {os.cpu_count()} processors"

    @property
    def attention(self) -> list[AttentionLayer]:
        """The layers that have attention."""
        return [*attention_layers(self.layers).values()]

    def kv_spec(self, block_size: int | None) -> KVSpec:
        """Return how this model's keys and values lie in blocks of `block_size` tokens.

        By default a block has 16 tokens, or 64 if some layers have a window and others do not, or
        if layers have latent attention or are recurrent.

        NOTE: pages of these models are small, so that the work for each page outweighs its bytes.
        With blocks of 64 tokens instead of 16, 32k tokens of gpt-oss-20b come from disk in 565 ms
        instead of 817, and from host memory in 41 instead of 50; those of GLM-4.7-Flash come from
        host memory in 75 ms instead of 90 (H200, medians of three).
        """
        layers, states = kv_layers(self.layers), state_layers(self.layers)
        is_small = any(layer.window is not None or layer.values_in_keys for layer in layers)
        size = block_size or (64 if is_small or states else 16)
        return KVSpec(layers=layers, dtype=self.dtype, block_size=size, states=states)

    @property
    def _identity(self) -> dict[str, Any]:
        """What identifies the model beside its weights.

        Of quantized weights it names the arithmetic: the dtype that they are dequantised to, or how
        they are multiplied as they are stored, which gives other keys and values.
        """
        table = self.whole_config.to_dict()
        table |= {} if self.rope is None else {"rope_parameters": self.rope}
        is_quantized = find_quantization(self.name, self.whole_config) is not None
        arithmetic = self.dtype if self.method is None else ARITHMETIC[self.method]
        return table | ({"arithmetic": arithmetic} if is_quantized else {})

    def find_fingerprint(
        self, *, fingerprint: Fingerprint = "full", progress: Progress = ignore_progress
    ) -> bytes:
        """Return what `load` would say is the model's fingerprint.

        Random weights are drawn for it, and released again; weight files are read, or remembered.

        Raises:
            ModelError: the weights cannot be read.
        """
        table, folder = self._identity, self.folder
        if folder is None:
            return parameters_fingerprint(table, _draw_weights(self))
        files, cache = find_weight_files(self.name, folder), CACHE_DIR.expanduser()
        return files_fingerprint(table, files, mode=fingerprint, cache_dir=cache, progress=progress)

    def load(
        self, *, progress: Progress = ignore_progress, fingerprint: Fingerprint = "full"
    ) -> "LoadedModel":
        """Load or draw the weights.

        Args:
            progress: called with what is being done and how far it has come.
            fingerprint: `full` digests all bytes of the weight files, `sample` parts of them.

        Raises:
            ModelError: the weights or the tokenizer cannot be read, or the weights do not fit the
                config.
        """
        table, folder = self._identity, self.folder
        tokenizer = load_tokenizer(str(folder or self.name))
        if folder is None:
            progress("drawing weights", 0, 1)
            model = _draw_weights(self)
            progress("drawing weights", 1, 1)
            digest, ends = parameters_fingerprint(table, model), stop_token_ids()
        else:
            files, cache = find_weight_files(self.name, folder), CACHE_DIR.expanduser()
            states = [*map(file_state, files)]
            progress("loading weights", 0, 1)
            how: dict[str, Any] = {"dtype": getattr(torch, self.dtype), "method": self.method}
            how |= {"whole": self.whole_config, "device": self.device}
            model = load_weights(self.name, self.config, files, **how)
            progress("loading weights", 1, 1)
            digest = files_fingerprint(
                table, files, mode=fingerprint, cache_dir=cache, progress=progress
            )
            if [*map(file_state, files)] != states:
                what = "its weight files changed while they were loaded; load it again"
                raise refused(self.name, what)
            ends = _eos_token_ids(self.config, self.whole_config, self.generation, tokenizer)
        model.eval().requires_grad_(False)
        keep_latents(model)
        keep_states(model)
        fuse_latents(model, self.config)
        fuse_experts(model, self.config)
        fuse_norms(model, self.config)
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        found["device"] = next(model.parameters()).device
        kinds = dict.fromkeys(map(_described, self.layers))
        told = self.name, self.config.model_type, len(self.layers), " and ".join(kinds)
        text = "model `%s`: %s, %d layers, %s, %s on %s, fingerprint %s"
        logger.info(text, *told, self.dtype, found["device"], digest.hex()[:12])
        return LoadedModel(
            **found,
            model=model,
            tokenizer=tokenizer,
            fingerprint=digest,
            eos_token_ids=frozenset(i for i in ends if 0 <= i < self.vocab_size),
            fused=_fuse(model, self.config),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel(FoundModel):
    """A model that is ready to run.

    Attributes:
        model: transformers' causal language model, in eval mode on its device, with our attention.
        tokenizer: its tokenizer.
        fingerprint: 32 bytes that identify config, weights and modelling code.
        eos_token_ids: tokens that end an answer, all of them in the vocabulary.
        fused: the same weights run in fewer and larger steps; None for a family that is not fused.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    fingerprint: bytes
    eos_token_ids: frozenset[int]
    fused: Fused | None

    @contextlib.contextmanager
    def shortened(self, num_layers: int) -> Iterator["LoadedModel | None"]:
        """Give the model without its later layers, for steps whose results nobody wants.

        The weights are shared, and this model must not run until the block ends.

        Args:
            num_layers: how many layers are left, the first ones.

        Returns:
            None if the model keeps its layers in an unknown place.
        """
        base: Any = self.model.base_model
        layers = getattr(base, "layers", None)
        if self.fused is not None:
            fused: Any = self.fused  # each kind has layers of its own
            yield replace(self, fused=replace(fused, layers=fused.layers[:num_layers]))
        elif isinstance(layers, torch.nn.ModuleList):
            base.layers = layers[:num_layers]
            try:
                yield self
            finally:
                base.layers = layers
        else:
            yield None


def _fuse(model: PreTrainedModel, config: PreTrainedConfig) -> Fused | None:
    kind: type[Fused] = FusedModel
    if config.model_type in fused_gemma.FAMILIES:
        kind = FusedGemma
    elif config.model_type in fused_hybrid.FAMILIES:
        kind = FusedHybrid
    fused = kind.from_model(model, config)
    if fused is not None and fused.embedding.is_cuda:
        torch.cuda.empty_cache()  # what the matrices were merged from
    return fused


def _described(layer: ModelLayer) -> str:
    if isinstance(layer, StateShape):
        return f"{layer.num_heads} states of {layer.key_dim} x {layer.value_dim}"
    if latent := layer.latent:
        return f"{layer.num_heads} heads over latents of {latent.rank} + {latent.rope_dim}"
    window = "" if layer.window is None else f" in a window of {layer.window}"
    return f"{layer.num_heads}/{layer.num_kv_heads} heads of {layer.head_dim}{window}"


def find_model(
    name: str,
    *,
    dtype: Dtype = "auto",
    device: str = "auto",
    max_context_len: int | None = None,
    rope_scaling: str | None = None,
) -> FoundModel:
    """Find a model by its name, and refuse one that cannot be served.

    Args:
        name: a folder with config.json and safetensors files; a hub id; `tiny-random`; or
            `random:<shape>` with a known shape or the path of a config.json.
        dtype: `auto` is float32 on the CPU. On a GPU it is the dtype that config.json names, or
            bfloat16 if it names none.
        device: `cpu`, `cuda`, or `auto`: CUDA where there is one.
        max_context_len: the longest context that will be served; None for the longest that the
            model was made for, which is also the highest value.
        rope_scaling: how its rope is scaled for longer contexts, as in `Settings`.

    Raises:
        ModelError: the model cannot be found, read or served.
        ConfigError: `device` is `cuda` and there is no GPU, the context is longer than the
            model's, or its rope cannot be scaled.
    """
    target = _resolve_device(device)
    whole, folder, generation = drawn_config(name), None, GenerationConfig()
    if whole is None:
        folder = find_folder(name)
        check_folder(name, folder)
        whole = read_config(name, folder)
        generation = read_generation_config(name, folder)
    quantization = find_quantization(name, whole)
    if quantization is None and folder is not None:
        check_quantization_files(name, folder)
    told = text_config(name, whole)
    config = told if rope_scaling is None else scaled_rope(name, told, rope_scaling)
    longest = max_model_len(config)
    if max_context_len is not None and max_context_len > longest:
        raise _too_long(name, max_context_len, longest, config)
    context_len = max_context_len or longest
    config = fixed_rope(config, context_len)
    rope = copy.deepcopy(getattr(config, "rope_parameters", None))
    check_config(name, config, context_len)
    layers = probe_attention(name, config, context_len)
    check_reasons(name, _page_reasons(kv_layers(layers), state_layers(layers)))
    if state_layers(layers) and target.type == "cuda" and (why := delta_chunks.why_missing()):
        raise refused(name, why)
    number_type = _resolve_dtype(dtype, whole, config, target)
    method = method_for(quantization, target, number_type)
    if folder is not None:
        folder = find_folder(name, ["*.safetensors"])
        files = find_weight_files(name, folder)
        how: dict[str, Any] = {"dtype": getattr(torch, number_type), "method": method}
        check_weights(name, config, files, whole=whole, **how)
    elif config.vocab_size < BYTE_VOCAB_SIZE:
        needed = f"the {BYTE_VOCAB_SIZE} tokens of the byte-level tokenizer"
        what = f"its vocabulary of {config.vocab_size} tokens is too small for {needed}"
        raise refused(name, what)
    return FoundModel(
        name=name,
        config=config,
        whole_config=whole,
        layers=layers,
        dtype=number_type,
        device=target,
        max_model_len=context_len,
        folder=folder,
        generation=generation,
        rope=None if rope == getattr(told, "rope_parameters", None) else rope,
        method=method,
    )


def model_of(settings: Settings) -> FoundModel:
    """Find the model that settings name, as they say that it is served.

    Raises:
        ModelError: as `find_model`.
        ConfigError: as `find_model`.
    """
    return find_model(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        max_context_len=settings.max_model_len,
        rope_scaling=settings.rope_scaling,
    )


def state_layers(layers: Sequence[ModelLayer]) -> list[StateShape]:
    """Return the layers that are recurrent."""
    return [layer for layer in layers if isinstance(layer, StateShape)]


def kv_layers(layers: Sequence[ModelLayer]) -> list[LayerKV]:
    """Return the layers that have keys and values of their own, as pages hold them.

    NOTE: where every layer has a window, what they hide is kept as well.
    """
    own = own_layers(layers)
    is_prefix = all(layer.window is not None for layer in own)
    return [layer._replace(window=None) for layer in own] if is_prefix else own


def _page_reasons(layers: Sequence[LayerKV], states: Sequence[StateShape]) -> Reasons:
    """Say why pages cannot hold what the layers keep."""
    what = "its recurrent layers are not all of one shape, which is not supported"
    yield len({*states}) > 1, what
    has_windows = any(layer.window is not None for layer in layers)
    what = "it has recurrent layers beside layers with a window, which is not supported"
    yield states and has_windows, what
    most = KVSpec(layers=layers, dtype="float32", block_size=1).token_elements
    for layer in layers:
        what = f"a layer with a window of {layer.window} has {layer.num_elements} keys and values"
        rest = f"a token, and all layers that attend to all tokens have {most}, which sets a page"
        yield layer.num_elements > most, f"{what} {rest}"


def _too_long(name: str, asked: int, longest: int, config: PreTrainedConfig) -> ConfigError:
    what = f"`max_model_len` = {asked} is more than the {longest} positions of model `{name}`"
    way_out = f"give {longest} or less"
    if why_unscalable(config) is None:
        way_out += f", or `rope_scaling` = yarn:{-(-asked // longest)}"
    return ConfigError(f"{what} (`max_position_embeddings` in config.json); {way_out}")


def _resolve_device(device: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError("`device` = cuda, but torch sees no GPU; use `auto` or `cpu`")
    return torch.device("cuda" if has_cuda and device != "cpu" else "cpu")


def _resolve_dtype(
    dtype: Dtype, whole: PreTrainedConfig, config: PreTrainedConfig, device: torch.device
) -> str:
    if dtype != "auto":
        return dtype
    if device.type == "cpu":
        return "float32"
    told = getattr(whole, "dtype", None) or getattr(config, "dtype", None)
    stored = str(told).removeprefix("torch.")
    return stored if stored in DTYPE_BYTES else "bfloat16"


def _draw_weights(found: FoundModel) -> Any:
    """Make a model with random weights, directly on its device and in its dtype."""
    devices = [found.device] if found.device.type == "cuda" else []
    form = found.config, getattr(torch, found.dtype), found.device
    with torch.random.fork_rng(devices=devices):
        if found.method is None:
            model = make_model(*form)
        else:
            excluded = unquantized_modules(found.whole_config)
            model = make_quantized_model(*form, found.method, excluded)
        (init_tiny_weights if found.name == TINY_NAME else draw_weights)(model)
    return model


def _eos_token_ids(*sources: Any) -> frozenset[int]:
    """Return the end tokens that config, generation config and tokenizer name, all together."""
    told = [getattr(source, "eos_token_id", None) for source in sources]
    return frozenset().union(*([it] if isinstance(it, int) else it or () for it in told))
