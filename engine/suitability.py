"""Decide whether a model can be served, before any of its weights is allocated.

First the config is checked for fields that are known to change the result of attention. Then the
model is built without memory, on the meta device, and run once: every layer must ask the attention
interface for causal attention, over all tokens or those of a window.
"""

import copy
import logging
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.activations import ACT2FN

from tieredkv.engine.attention import (
    ATTENTION_NAME,
    CONTEXT_ARGUMENT,
    AttentionCall,
    AttentionLayer,
    ModelLayer,
    StateCall,
)
from tieredkv.engine.checkpoint import refused
from tieredkv.engine.latent import keep_latents
from tieredkv.engine.recurrent import keep_states
from tieredkv.engine.rope import SERVED_ROPES, rope_numbers, rope_types
from tieredkv.errors import ModelError
from tieredkv.kernels.states import MAX_CONV_WIDTH

logger = logging.getLogger(__name__)

TESTED_MODEL_TYPES = frozenset(
    {
        *("cohere2", "deepseek_v2", "exaone4", "gemma3_text", "gemma4_text"),
        *("gemma4_unified_text", "glm4_moe", "glm4_moe_lite", "gpt_oss", "laguna", "llama"),
        *("mellum", "mistral", "mistral4", "olmo3", "olmo_hybrid", "qwen2", "qwen3"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next"),
    }
)
"""Types that answer as transformers generates (`tests/engine/test_family_answers.py`)."""

_PROBE_TOKENS = 3
_HARMLESS_OPTIONS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}
)
_SUPPORTED_OPTIONS = frozenset({"sliding_window", "s_aux"})
"""Windows, and sinks: one number a head."""


_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")

_POSITIVE = (
    *("final_logit_softcapping", "max_position_embeddings", "num_experts_per_tok"),
    *("num_hidden_layers", "query_pre_attn_scalar", "rms_norm_eps", "top_k_experts"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
"""Numbers of which 0 or less is seen late, by no one, or in an error that does not name them."""

_NUMS_OF_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_NUMS_CHOSEN = ("num_experts_per_tok", "top_k_experts")
"""Fields that families have for the experts of a layer, and for how many of them a token takes."""

_SAME_IN_ALL_LAYERS = frozenset(
    {
        *(*_ACTIVATIONS, *_POSITIVE, "attention_chunk_size", "attn_logit_softcapping", "is_causal"),
        *("n_group", "n_routed_experts", "sliding_window", "use_bidirectional_attention"),
    }
)
"""What is read of a whole config; transformers raises an error for one that differs by layer."""

_PARTIAL_LAYERS = frozenset({"sliding_attention", "chunked_attention"})
"""The layer types that attend to part of a long context only."""

_RECURRENT_TYPES = frozenset({"olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"})
"""The types whose `linear_attention` layers are those of `recurrent`."""


Reasons = Iterator[tuple[object, str]]
"""Possible reasons to refuse a model: whether each one applies, and its text."""


def check_config(name: str, config: PreTrainedConfig, context_len: int) -> None:
    """Refuse a model whose config says that its attention cannot be paged.

    Args:
        name: the model's name.
        config: the model's config.
        context_len: the longest context; a window that is at least as long hides no token.

    Raises:
        ModelError: names the model and the reason.
    """
    check_reasons(name, _config_reasons(config, config.model_type, context_len))


def check_reasons(name: str, reasons: Reasons) -> None:
    """Refuse a model for the first reason that applies; later reasons are not evaluated.

    Raises:
        ModelError: names the model and the reason.
    """
    for applies, reason in reasons:
        if applies:
            raise refused(name, reason)


def _config_reasons(config: PreTrainedConfig, kind: str, context_len: int) -> Reasons:
    def told(field: str) -> Any:
        return getattr(config, field, None)

    for field in sorted(_SAME_IN_ALL_LAYERS.intersection(told("per_layer_attributes") or ())):
        what = f"`{field}` differs by layer (`per_layer_config` in config.json)"
        yield True, f"{what}, which is not supported"
    what = f"`{kind}` is an encoder-decoder model, and only decoder-only models are supported"
    yield told("is_encoder_decoder"), what
    is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    yield not is_known, f"transformers has no causal language model of type `{kind}`"
    files = told("transformers_weights")
    yield files, f"`transformers_weights` = {files} in config.json is not supported"
    for field in _POSITIVE:
        number = told(field)
        what = f"`{field}` = {number} in config.json is not a positive number"
        yield isinstance(number, int | float) and number <= 0, what
    experts = next(filter(None, map(told, _NUMS_OF_EXPERTS)), None)
    chosen = next(filter(None, map(told, _NUMS_CHOSEN)), 0)
    what = f"a token would take {chosen} experts, but config.json has {experts} in a layer"
    yield experts is not None and chosen > experts, what
    experts, groups = told("n_routed_experts"), told("n_group")
    what = f"its {experts} experts (`n_routed_experts`) do not make {groups} groups (`n_group`)"
    yield experts and groups and experts % groups, what
    for field in _ACTIVATIONS:
        name = told(field)
        known = ", ".join(f"`{each}`" for each in get_close_matches(str(name), ACT2FN, cutoff=0))
        what = f"transformers has no activation `{name}` (`{field}`); it has {known} and others"
        yield name is not None and name not in ACT2FN, what
    what = f"config.json does not tell the types of its layers (`layer_types`), as `{kind}` must"
    yield hasattr(config, "layer_types") and told("layer_types") is None, what
    kinds = set(told("layer_types") or ()) - {"full_attention"}
    if config.model_type in _RECURRENT_TYPES:
        kinds -= {"linear_attention"}
    for kind_of_layer in sorted(kinds - _PARTIAL_LAYERS):
        served = "full attention, windows and the gated delta rule"
        yield True, f"it has `{kind_of_layer}` layers, and only {served} are served"
    size = told("sliding_window")
    is_used = "sliding_attention" in kinds or not (size is None or told("layer_types"))
    what = f"`sliding_window` = {size} in its config is not a number of tokens"
    yield is_used and not _is_window(size), what
    size = told("attention_chunk_size")
    what = f"it attends to chunks of {size} tokens (`attention_chunk_size`), which is not supported"
    is_chunked = "chunked_attention" in kinds or (size and not told("layer_types"))
    way_out = f"; with `max_model_len` = {size} it can be served" if _is_window(size) else ""
    yield is_chunked and not _is_wide(size, context_len), what + way_out
    size = told("attn_logit_softcapping")
    yield size, f"`attn_logit_softcapping` = {size} changes its attention, which is not supported"
    is_causal = told("use_bidirectional_attention") in (None, False, "vision")  # text is causal
    is_causal = is_causal and told("is_causal") is not False
    yield not is_causal, "its attention is not causal, and only causal attention is supported"
    for rope_type in rope_types(config):
        yield rope_type not in SERVED_ROPES, f"its rope of type `{rope_type}` is not known"
    for field, number in rope_numbers(config):
        what = f"`{field}` = {number} of its rope is not a positive number"
        yield isinstance(number, int | float) and number <= 0, what


def _is_window(size: object) -> bool:
    return isinstance(size, int) and size > 0


def _is_wide(size: object, context_len: int) -> bool:
    """Whether the last token of the longest context still sees the first one."""
    return isinstance(size, int) and size >= context_len


def probe_attention(name: str, config: PreTrainedConfig, context_len: int) -> Sequence[ModelLayer]:
    """Run the model once without weights and return what its layers are.

    Args:
        name: the model's name.
        config: the model's config.
        context_len: as in `check_config`.

    Raises:
        ModelError: it does not go through the attention interface in every layer, or asks for
            something other than causal attention.
    """
    calls: list[AttentionCall | StateCall] = []
    auto: Any = AutoModelForCausalLM  # untyped in transformers
    try:
        with torch.device("meta"), torch.inference_mode():
            ours = copy.deepcopy(config)  # because building a model changes its config
            model = auto.from_config(ours, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
            keep_latents(model)
            keep_states(model)
            tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int32)
            last = torch.zeros(1, dtype=torch.int64)
            options = {"use_cache": False, "logits_to_keep": last, CONTEXT_ARGUMENT: calls}
            logits = model.eval()(input_ids=tokens, position_ids=tokens, **options).logits
    except Exception as error:  # modelling code may raise anything when it meets what it cannot do
        failed = f"a run of `{config.model_type}` without weights failed: {error!r}"
        raise refused(name, error if isinstance(error, ModelError) else failed) from error
    check_reasons(name, _probe_reasons(config, context_len, calls, tuple(logits.shape)))
    if config.model_type not in TESTED_MODEL_TYPES:
        tested = ", ".join(sorted(TESTED_MODEL_TYPES))
        fits = "model `%s` can be served, but the type `%s` is not tested; tested types are %s"
        logger.warning(fits, name, config.model_type, tested)
    attending = [call for call in calls if isinstance(call, AttentionCall)]
    return [
        call.shape if isinstance(call, StateCall) else _layer(call, attending, context_len)
        for call in calls
    ]


def _layer(call: AttentionCall, calls: Sequence[AttentionCall], context_len: int) -> AttentionLayer:
    """Return what a layer with attention is, by its call and those before it."""
    _, num_heads, _, head_dim = call.query_shape
    source = next(other.layer for other in calls if other.key is call.key)
    if latent := call.latent:
        return AttentionLayer(num_heads, 1, latent.num_stored, source, latent=latent)
    window: Any = call.options.get("sliding_window")
    is_wide = not window or _is_wide(window, context_len)
    return AttentionLayer(
        num_heads, call.key_shape[1], head_dim, source, None if is_wide else window
    )


def _told_window(config: PreTrainedConfig, layer: int) -> object:
    """Return the window of a layer by the config; None if the layer has none."""
    kinds = getattr(config, "layer_types", None)
    # A config that does not list the types of its layers has one window for all of them.
    is_used = kinds[layer] == "sliding_attention" if kinds else True
    is_used = is_used and getattr(config, "use_sliding_window", None) is not False
    return getattr(config, "sliding_window", None) if is_used else None


def _probe_reasons(
    config: PreTrainedConfig,
    context_len: int,
    calls: Sequence[AttentionCall | StateCall],
    logits: tuple[int, ...],
) -> Reasons:
    kind = config.model_type
    yield not calls, f"`{kind}` does not use transformers' attention interface"
    layers, num_layers = [call.layer for call in calls], config.num_hidden_layers
    what = "its layers do not call attention once each and in order"
    yield layers != list(range(len(calls))), what
    what = f"{len(calls)} of its {num_layers} layers have attention, and all of them must"
    yield len(calls) != num_layers, what
    what = "it has recurrent layers and none with attention, and only hybrids of both are supported"
    yield all(isinstance(call, StateCall) for call in calls), what
    for call in calls:
        if isinstance(call, StateCall):
            yield from _state_reasons(call)
            continue
        _, num_heads, _, head_dim = call.query_shape
        num_kv_heads, layer = call.key_shape[1], f"layer {call.layer}"
        sizes = [(heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads)]
        if latent := call.latent:
            sizes = [(num_heads, latent.query_dim), (1, latent.rank), (1, latent.rope_dim)]
        asked = [call.query_shape, call.key_shape, call.value_shape]
        fits = asked == [(1, heads, _PROBE_TOKENS, dim) for heads, dim in sizes]
        keys = f"keys {call.key_shape} and values {call.value_shape}"
        what = f"{layer} has queries {call.query_shape}, {keys}, which do not fit each other"
        yield not fits or num_heads % num_kv_heads, what
        yield not call.is_causal, f"the attention of {layer} is not causal"
        for option, value in call.options.items():
            is_asked = option not in _HARMLESS_OPTIONS and value is not None and value is not False
            is_wide = option == "attention_chunk_size" and _is_wide(value, context_len)
            what = f"{layer} uses the attention option `{option}`, which is not supported"
            is_supported = option in _SUPPORTED_OPTIONS and not (call.latent and value)
            yield is_asked and not is_wide and not is_supported, what
        window, expected = call.options.get("sliding_window"), _told_window(config, call.layer)
        what = f"{layer} has a window of {window} tokens, and its config says {expected}"
        yield _is_window(expected) and window != expected, what
    what = f"`{kind}` cannot compute the logits of chosen tokens only"
    yield logits != (1, 1, config.vocab_size), what


def _state_reasons(call: StateCall) -> Reasons:
    shape, layer = call.shape, f"the recurrent layer {call.layer}"
    what = f"{layer} has {shape.num_heads} heads for values (`linear_num_value_heads`), not a "
    what += f"multiple of its {shape.num_key_heads} for keys (`linear_num_key_heads`)"
    yield shape.num_heads % shape.num_key_heads, what
    width = shape.conv_width
    what = f"{layer} has a convolution over {width} tokens, and from 2 to {MAX_CONV_WIDTH} can be"
    yield not 2 <= width <= MAX_CONV_WIDTH, what
    what = f"{layer} has the activation `{call.activation}`, and only `silu` is supported there"
    yield call.activation not in ("silu", "swish"), what
